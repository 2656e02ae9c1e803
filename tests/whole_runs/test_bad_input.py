"""What users get wrong, and what disks and other processes do: one message that names the place, and nothing lost."""

from __future__ import annotations

import errno
import itertools
import logging
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from runs import all_same, newest, own_store, run, spawn

from trainkit.checkpoint import safe_load, storage, verification
from trainkit.data.faces.dataset import Faces
from trainkit.errors import EXIT_CODE, UserError
from trainkit.interfaces import DatasetInfo
from trainkit.tasks.embed import Embed
from trainkit.tracking.store import Store

SIDE = 16
NET = "{name: iresnet18, embedding: 8, width: 0.125}"
RECIPE = f"""
name: tiny
task: {{name: embed, net: {NET}}}
data: {{name: faces, train: people, image_size: {SIDE}, evaluate: {{pairs: people}}}}
optim: {{lr: 0.01}}
train: {{length: 2 epochs, batch_size: 4}}
evaluations: {{pairs: {{every: 1 epoch}}}}
log: {{every: 1 steps, system_every: null}}
device: {{channels_last: false}}
"""
# In that format oneDNN writes past its memory for strided 1x1 convolutions with fewer channels than its block of 8 or
# 16 (uxlfoundation/oneDNN#6035); no shipped recipe is as narrow as the nets here.
STUDENT = f"{{name: mobilefacenet, embedding: 8, width: 0.125}}, cache_teacher: false, teacher: {{net: {NET}"


def picture(seed: int, *size: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*(size or (SIDE, SIDE)), 3), dtype=np.uint8))


@pytest.fixture
def tiny(tmp_path, monkeypatch, store) -> Path:
    """The recipe of a small face network on twelve images of three people, in a folder of its own."""
    home = tmp_path / "data"
    for i, person in enumerate(("anna", "ben", "cleo")):
        (home / "people" / person).mkdir(parents=True)
        for k in range(4):
            picture(10 * i + k).save(home / "people" / person / f"{k}.png")
    # Fewer pairs could not tell a teacher from guessing.
    couples = itertools.product(range(4), ("anna", "ben", "cleo"), ("anna", "ben", "cleo"))
    rows = [f"{p}/{k}.png,{q}/{(k + 1) % 4}.png,{int(p == q)}" for k, p, q in couples]
    (home / "people" / "pairs.csv").write_text("\n".join(["path_a,path_b,same", *rows]) + "\n")
    monkeypatch.setenv("TRAINKIT_DATA", str(home))
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    (home / "tiny.yaml").write_text(RECIPE)
    return home / "tiny.yaml"


# Data


def people(tiny: Path) -> Path:
    return tiny.parent / "people"


def cut(tiny):
    file = people(tiny) / "ben" / "1.png"
    file.write_bytes(file.read_bytes()[:90])


def gone(tiny):
    (people(tiny) / "cleo" / "3.png").unlink()


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        (None, ["data.train=nowhere"], r"nowhere: does not exist"),
        (cut, [], r"ben/1\.png.*cannot be decoded"),
        (gone, [], r"cleo/3\.png.*(does not exist|No such file)"),
        (None, ["evaluations={other: {}}"], r"evaluations\.other: the data has no evaluation set 'other'"),
        (None, ["train.batch_size=13"], r"train\.batch_size: 13, but the data has 12 samples; expected at most 12"),
        (None, ["data.image_size=8"], r"images of 8 x 8 pixels"),
        (None, ["task.net={name: timm, model: resnet5}"], r"no model 'resnet5'; did you mean"),
    ],
)
def test_data_and_settings_that_cannot_be_are_one_message_that_names_the_place(tiny, change, words, message):
    if change:
        change(tiny)
    with pytest.raises(UserError, match=message):
        run(*words, recipe=tiny)
    assert Store.locate().runs() == [], "a run that could not begin is never taken for one that can be continued"


def test_what_is_odd_but_usable_is_trained_on_with_a_warning(tiny, caplog, tmp_path):
    """One image of a person; labels with gaps; images that are grey, larger, with a palette or transparent."""
    home = people(tiny)
    (home / "dora").mkdir()
    picture(90).convert("L").save(home / "dora" / "0.png")
    picture(91, 40, 40).convert("P").save(home / "anna" / "4.png")
    picture(92).convert("RGBA").save(home / "anna" / "5.png")
    with caplog.at_level(logging.WARNING):
        opened = Faces(train="people", image_size=SIDE).open(0)
    assert opened.meta.classes == 4 and opened.train.size == 15
    assert opened.train.fetch(np.arange(15), 0)["image"].shape == (15, 3, SIDE, SIDE)
    assert "1 of 4 classes have one image: dora" in caplog.text
    caplog.clear()
    images = [{"bytes": file.read_bytes(), "path": None} for file in sorted(home.glob("*/0.png"))]
    table = pa.table({"image": pa.array(images), "label": [9, 4, 9, -3]})
    pyarrow.parquet.write_table(table, tiny.parent / "gaps.parquet")
    with caplog.at_level(logging.WARNING):
        opened = Faces(train="gaps.parquet", image_size=SIDE).open(0)
    assert opened.meta.classes == 3 and opened.meta.class_names == ("-3", "4", "9")
    assert opened.train.fetch(np.arange(4), 0)["label"].tolist() == [2, 1, 2, 0]
    assert "labels were not 0 to 2 and were renumbered" in caplog.text


def test_a_mistake_is_exit_code_2_and_one_message_without_a_traceback(tiny):
    cut(tiny)
    done = spawn(1, str(tiny))
    assert done.returncode == EXIT_CODE and "Traceback" not in done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "ben/1.png" in done.stderr and str(people(tiny)) in lines[0]


# Teachers


def distil(file: Path | str, more: str = "") -> str:
    return f"task={{name: adadistill, student: {STUDENT}, weights: '{file}'}}{more}}}"


@pytest.fixture
def teacher(tmp_path):
    def make(width: float = 0.125, classes: int = 3) -> Path:
        net = {"name": "iresnet18", "embedding": 8, "width": width}
        from trainkit.models.network_specs import IResNetSpec

        torch.manual_seed(0)
        networks = Embed(net=IResNetSpec(**net)).build(DatasetInfo(classes, (3, SIDE, SIDE), ""), {}, 0)
        file = tmp_path / f"teacher-{width}.safetensors"
        safe_load.write_tensors(file, networks.model.state_dict())
        return file

    return make


def test_a_teacher_that_is_missing_damaged_of_another_shape_or_of_other_people_is_refused(tiny, teacher, tmp_path):
    with pytest.raises(UserError, match=r"task\.teacher\.weights: (/\S*/)?nowhere\.pth does not exist"):
        run(distil("nowhere.pth"), recipe=tiny)
    (tmp_path / "torn.safetensors").write_bytes(teacher().read_bytes()[:-50])
    with pytest.raises(UserError, match=r"torn\.safetensors: .*(damaged|incomplete)"):
        run(distil(tmp_path / "torn.safetensors"), recipe=tiny)
    with pytest.raises(UserError, match=r"teacher-0\.25\.safetensors: does not fit IResNet.*of another shape"):
        run(distil(teacher(width=0.25)), recipe=tiny)
    with pytest.raises(UserError, match=r"task\.teacher: class centres of shape \(5, 8\)"):
        run(distil(teacher(classes=5), ", method: aml"), recipe=tiny)
    assert Store.locate().runs() == []


# Disks


@pytest.fixture(scope="module")
def whole(tmp_path_factory, database):
    """The toy recipe, run to its end."""
    with own_store(tmp_path_factory.mktemp("whole"), database):
        return run()


def test_a_full_disk_ends_the_run_and_costs_nothing_that_was_written_before(store, monkeypatch, whole):
    true_write = storage._write_file

    def write(path, content):
        if any(newest().checkpoints.glob("step-*")) and path.name == "optimizer.safetensors":
            path.write_bytes(b"".join(content)[:100])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return true_write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "_write_file", write)
        with pytest.raises(UserError, match=r"checkpoints.*No space left.*older checkpoints are intact"):
            run()
    folder = newest()
    (path,) = folder.checkpoints.iterdir()
    assert folder.info().status == "FAILED" and verification.verify(path) == []
    ran = run(resume="")
    assert ran.folder == folder and ran.code == 0 and all_same(ran, whole)
    assert ran.repeatable == whole.repeatable
