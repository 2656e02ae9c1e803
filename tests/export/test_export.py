"""Exported networks: equal to the run's, refused where they are not, and described."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import scene_sets
import timm
import torch
from click.testing import CliRunner
from PIL import Image
from runs import PLUGIN, ROOT, TOY, run
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from trainkit.cli import main
from trainkit.errors import UserError
from trainkit.export import export, files
from trainkit.export import scenes as export_scenes
from trainkit.export.agreement import Exportable, compare, write_onnx
from trainkit.tracking import journal
from trainkit.tracking.store import Store

CAMVID = ROOT / "recipes" / "camvid.yaml"
SIZE = (40, 56)
CLASSES = 3
WORDS = {
    "data.names": str(list(scene_sets.NAMES[:CLASSES])).replace("'", ""),
    "data.ignore": "[255]",
    "data.size": "null",
    "data.crop": "[32, 32]",
    "data.augment": "{flip: 0.5}",
    "data.mean": "[0.3, 0.4, 0.5]",
    "data.std": "[0.2, 0.3, 0.4]",
    "task.net": "{name: bisenetv2, width: 0.1}",
    "task.objective": "{}",
    "train": "{length: 3 steps, batch_size: 4}",
    "evaluations": "{val: {batch_size: 4}}",
    "checkpoints": "{every: null}",
    "log": "{every: 1 steps, system_every: null}",
}


@pytest.fixture(scope="module")
def made(database, tmp_path_factory):
    """A store with one run, and the images that it is scored on."""
    home, root = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("set")
    shutil.copy(database, home / "mlflow.db")
    place = scene_sets.camvid(root / "set", pictures=4, size=SIZE, classes=CLASSES)
    settings = WORDS | {"data.train": f"{place}#train", "data.evaluate": f"{{val: {place}#val}}"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINKIT_STORE", str(home))
        patch.setenv("TRAINKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        run(*(f"{key}={value}" for key, value in settings.items()), recipe=CAMVID)
    return SimpleNamespace(home=home, pictures=sorted((root / "set" / "val").glob("*.png")))


@pytest.fixture
def name(made, monkeypatch, tmp_path):
    monkeypatch.setenv("TRAINKIT_STORE", str(made.home))
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    return Store.locate().runs()[0].name


def pixels(made, at: int = 0) -> torch.Tensor:
    picture = np.asarray(Image.open(made.pictures[at]).convert("RGB"))
    return torch.from_numpy(picture.copy()).permute(2, 0, 1)[None].float()


def test_tensors_are_those_of_the_run_and_make_its_network_again(made, name, tmp_path):
    out = tmp_path / "out"
    words = ["export", name, str(out), "--format", "safetensors", "--images", "3"]
    result = CliRunner().invoke(main.main, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "3 images; largest relative difference: logits 0; same class: 100 %" in result.output
    assert {file.name for file in out.iterdir()} == {"model.safetensors", "model.json", "README.md"}
    (weights,) = Store.locate().find(name).checkpoints.glob("*/model.safetensors")
    trained, written = load_file(weights), load_file(out / "model.safetensors")
    assert set(trained) == set(written) and all(torch.equal(trained[key], written[key]) for key in trained)

    said = json.loads((out / "model.json").read_text())
    assert said["names"] == list(scene_sets.NAMES[:CLASSES]) and said["mean"] == [0.3, 0.4, 0.5]
    assert (said["size"], said["multiple"], said["run"]) == ([*SIZE], 32, name)
    assert (
        said["notes"] == []
        and said["checked"]["model.safetensors"]["same"] == 1
        and said["data"]["pictures"] == [0, 2, 3]
    )

    # By hand: normalise, up to multiples of 32, the network, back.
    net = export.load(out)
    x = pixels(made)
    mean, std = (torch.tensor(said[key]).view(3, 1, 1) for key in ("mean", "std"))
    seen = F.interpolate((x / 255 - mean) / std, (64, 64), mode="bilinear", align_corners=False)
    with torch.no_grad():
        expected = F.interpolate(net.net(seen)["logits"][0], SIZE, mode="bilinear", align_corners=False)
        assert expected.std() > 0
        torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-5)


def test_it_agrees_with_the_labels_that_the_run_scored(made, name, tmp_path):
    """The mIoU of what the exported network finds in the files is the run's own."""
    done = export.export(name, tmp_path / "out", ("safetensors",), pictures=1)
    assert str(done.agreements["model.safetensors"]).startswith("1 image; largest relative difference: logits")
    net, both, either = export.load(tmp_path / "out"), np.zeros(CLASSES), np.zeros(CLASSES)
    for at, file in enumerate(made.pictures):
        mask = np.asarray(Image.open(file.parent.parent / "valannot" / file.name))
        with torch.no_grad():
            found = net(pixels(made, at))[0].argmax(0).numpy()
        for c in range(CLASSES):
            a, b = (found == c) & (mask != 255), mask == c
            both[c] += (a & b).sum()
            either[c] += (a | b).sum()
    points = journal.read(Store.locate().find(name).journal).metrics["val/miou"]
    assert (both / either)[either > 0].mean() == pytest.approx(points[-1].value, abs=1e-6)


def test_nothing_is_written_over(name, tmp_path):
    (tmp_path / "model.json").write_text("kept")
    with pytest.raises(UserError, match=r"model\.json: exists already"):
        export.export(name, tmp_path)
    with pytest.raises(UserError, match=r"is a file; expected a folder"):
        export.export(name, tmp_path / "model.json")
    assert [file.name for file in tmp_path.iterdir()] == ["model.json"]


def test_a_file_that_disagrees_is_not_left(name, tmp_path, monkeypatch):
    honest = export_scenes.rebuilt

    def shifted(*given):
        net = honest(*given)
        return lambda x: net(x) + 0.1 * torch.arange(x.shape[3])

    monkeypatch.setattr(export_scenes, "rebuilt", shifted)
    with pytest.raises(UserError, match=r"model\.safetensors: differs from the trained network"):
        export.export(name, tmp_path / "out", ("safetensors",), pictures=1)
    assert not list((tmp_path / "out").iterdir())


def test_what_killed_exports_left_is_removed_and_what_others_write_is_not(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host = socket.gethostname()
    for number in (ended.pid, os.getpid(), os.getppid()):
        (tmp_path / f".export-{host}-{number}").mkdir()
        (tmp_path / f".export-{host}-{number}" / "model.onnx").write_text("half")
    (tmp_path / ".export-elsewhere-1").mkdir()
    with files.aside(tmp_path, ["model.json"]) as aside:
        assert not list(aside.iterdir())
        (aside / "model.json").write_text("whole")
        (aside / "other").write_text("not kept")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"model.json", f".export-{host}-{os.getppid()}", ".export-elsewhere-1"}


def test_another_normalisation_than_the_runs_is_refused(name, tmp_path, monkeypatch):
    from trainkit.tasks.segment2d import Segment2d

    honest = Segment2d.deployable
    monkeypatch.setattr(Segment2d, "deployable", lambda self, net, mean, std: honest(self, net, std, mean))
    with pytest.raises(UserError, match="differs from that of the evaluation"):
        export.export(name, tmp_path / "out", ("safetensors",), pictures=1)
    assert not (tmp_path / "out").exists()


def test_an_exported_folder_that_was_changed_is_refused(name, tmp_path):
    out = tmp_path / "out"
    export.export(name, out, ("safetensors",), pictures=1)
    content = bytearray((out / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (out / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"SHA-256 differs from that in model\.json"):
        export.load(out)
    (out / "model.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        export.load(out)
    (out / "model.json").unlink()
    with pytest.raises(UserError, match="does not exist"):
        export.load(out)


def test_other_runs_and_missing_packages_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(
        UserError, match=r'onnx, onnxscript.* are not installed; install them with pip install "trainkit\[export\]"'
    ):
        export.export(name, tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.syspath_prepend(PLUGIN)
    other = Store.locate().new_run("toy", 0, "ab" * 32)
    shutil.copy(TOY, other.recipe)
    (other.path / "meta.json").write_text('{"classes": 4, "shape": [3, 8, 8], "digest": "train-64-1.0"}')
    with pytest.raises(UserError, match="its task cannot be exported"):
        export.export(other.name, tmp_path / "out", plugins=("toy",))


class Tiny(nn.Module):
    """A network of one convolution, which takes any sides."""

    multiple = 1

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, CLASSES, 3, padding=1)
        nn.init.normal_(self.conv.weight, std=0.01)

    def forward(self, x):
        return F.interpolate(self.conv(x / 255), scale_factor=2.0, mode="nearest")[:, :, ::2, ::2]


def test_agreement_counts_pixels():
    seen = torch.rand(2, 3, 10, 10)

    def trained(x):
        return torch.stack([x[:, 0] * 0 + 1, x[:, 0] * 0], 1)

    def found(x):
        out = trained(x)
        out[0, 0, 0, 0] = 0.5
        out[1, :, 3, 4] = torch.tensor([0.0, 1.0])
        return out

    def compared(found, *, refined, expected=None):
        expected = {"logits": trained(seen)} if expected is None else expected
        return compare("it", lambda x: {"logits": found(x)}, [(seen, expected)] * 2, refined=refined)

    with pytest.raises(UserError, match=r"4 images; largest relative difference: logits 1; same class: 99.5 %"):
        compared(found, refined=True)
    same = compared(trained, refined=False)
    assert (same.pictures, same.apart, same.same, same.cosine) == (4, {"logits": 0}, 1, None)
    with pytest.raises(UserError, match="differs from the trained network"):
        compared(lambda x: trained(x) * float("nan"), refined=True)
    with pytest.raises(UserError, match="logits of"):
        compared(lambda x: trained(x)[:, :, 1:], refined=False)

    # A point that is refined otherwise may be off, if it is one in a thousand.
    def one_off(x):
        out = trained(x)
        out[0, 0, 0, 0] += 0.01
        return out

    with pytest.raises(UserError, match="differs from the trained network"):
        compared(one_off, refined=False)
    with pytest.raises(UserError, match="differs from the trained network"):
        compared(one_off, refined=True)
    seen = torch.rand(2, 3, 40, 40)
    assert compared(one_off, refined=True).same == 1


def test_padding_that_follows_from_the_shape_is_written_as_a_constant():
    same = timm.create_model("tf_efficientnet_lite0", features_only=True).eval()
    constant = export_scenes._constant_padding(same)
    kinds = [type(part).__name__ for part in constant.modules()]
    assert kinds.count("_ConstantPadding") == kinds.count("Conv2dSame") > 0
    images = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for one, other in zip(same(images), constant(images), strict=True):
            assert torch.equal(one, other)


@pytest.mark.slow
def test_onnx_takes_any_sides_or_says_which(tmp_path, monkeypatch):
    about = {"run": "r", "names": ["a"], "input": "i", "output": "o", "multiple": 32}
    seen = list(255 * torch.rand(3, 1, 3, 64, 96, generator=torch.Generator().manual_seed(0)))
    file, net = tmp_path / "model.onnx", Tiny().eval()
    forms = export_scenes.forms(net, seen.__getitem__, 3, 32, False)
    network = Exportable(
        net=net, outputs={"logits": "o"}, samples=forms[0].samples, checked_on=("val", []), about={}, forms=forms,
        network="Tiny",
    )  # fmt: skip
    agreed, sides, notes = write_onnx(file, network, about)
    assert (sides, notes, agreed.pictures) == ({"sides": "any"}, [], 3) and agreed.apart["logits"] < 1e-4
    other = 255 * torch.rand(2, 3, 33, 50)
    with torch.no_grad():
        torch.testing.assert_close(files.session(file)(other)["logits"], net(other), rtol=1e-4, atol=1e-5)

    # What is written for any sides and errs at some is replaced.
    honest = files.session
    calls = []

    def wrong_at_first(file):
        calls.append(1)
        run = honest(file)
        return (lambda x: {"logits": run(x)["logits"] + 1}) if len(calls) == 1 else run

    monkeypatch.setattr(files, "session", wrong_at_first)
    agreed, sides, notes = write_onnx(file, network, about)
    assert sides == {"sides": "64 x 96"} and "differs from" in notes[0] and agreed.same == 1
    with pytest.raises(Exception, match="dimension"):
        honest(file)(other)


@pytest.mark.slow
def test_a_whole_run_as_onnx(made, name, tmp_path):
    out = tmp_path / "out"
    result = CliRunner().invoke(main.main, ["export", name, str(out)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert {file.name for file in out.iterdir()} == {"model.safetensors", "model.onnx", "model.json", "README.md"}
    said = json.loads((out / "model.json").read_text())
    assert said["sides"] == "any" and said["checked"]["model.onnx"]["same"] >= 0.999
    import onnx

    file = onnx.load(out / "model.onnx")
    onnx.checker.check_model(file)
    assert {p.key: p.value for p in file.metadata_props}["run"] == name
