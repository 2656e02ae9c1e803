"""Label maps written for new images: what the run itself would score, at the size of their files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import scene_sets
import torch
from click.testing import CliRunner
from PIL import Image
from pyarrow import parquet
from runs import run

from trainkit.checkpoint import safe_load
from trainkit.cli import main
from trainkit.config import loader
from trainkit.data.formats import image_decode
from trainkit.errors import UserError
from trainkit.inference import predict, trained_model
from trainkit.plots.scenes import palette
from trainkit.tracking.store import Store

RECIPE = """
name: blocks
task:
  name: segment2d
  net: {name: bisenetv2, width: 0.125}
data:
  name: scenes
  train: ROOT
  evaluate: {val: ROOT}
  crop: [32, 64]
  names: [sky, road, tree, car]
  augment: {flip: 0.5}
optim: {lr: 0.05}
train: {length: 40 steps, batch_size: 4}
evaluations: {val: {}}
checkpoints: {every: null}
log: {every: 10 steps, system_every: null}
"""
FPN = "{name: smp, encoder: tu-test_resnet, decoder: fpn, args: {decoder_pyramid_channels: 16}}"
SIZE = (40, 72)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    return scene_sets.camvid(tmp_path_factory.mktemp("sets") / "blocks", (6, 3), SIZE)


def made(root: Path, monkeypatch, change=lambda text: text, colours=()) -> str:
    """The name of a run whose network was never trained: random, with scores that differ from place to place."""
    monkeypatch.setenv("TRAINKIT_CACHE", str(root.parent / "cache"))
    folder = Store.locate().new_run("blocks", 0, "ab" * 32)
    folder.recipe.write_text(change(RECIPE.replace("ROOT", str(root))))
    meta = {"classes": 4, "shape": [3, 32, 64], "digest": "cd", "class_names": scene_sets.NAMES[:4]}
    (folder.path / "meta.json").write_text(json.dumps(meta | {"class_colours": colours}))
    recipe = loader.load(folder.recipe, (), ())
    torch.manual_seed(0)
    net = recipe.task.build(trained_model.read_meta(folder), {}, 0).model
    head = net.body.head.out
    with torch.no_grad():
        torch.nn.init.normal_(head.weight)
        scores = net.eval()(torch.randn(4, 3, 64, 64))["logits"][0]
        head.bias -= scores.mean((0, 2, 3))  # or one class would be everywhere
    file = folder.path / "model.safetensors"
    safe_load.write_tensors(file, net.state_dict())
    monkeypatch.setattr("trainkit.inference.trained_model.best_weights", lambda path: path / "model.safetensors")
    return folder.name


@pytest.fixture
def name(sets, monkeypatch):
    return made(sets, monkeypatch)


def ask(*words, code: int = 0) -> str:
    result = CliRunner().invoke(main.main, ["predict", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def read(file: Path) -> np.ndarray:
    with Image.open(file) as picture:
        assert picture.mode == "P"
        return np.asarray(picture)


@torch.no_grad()
def by_run(name: str, split: str = "val") -> dict[str, dict[str, list[float]]]:
    """What the run's own evaluation counts in each image of a split."""
    folder = Store.locate().find(name)
    recipe = loader.load(folder.recipe, (), ())
    opened = recipe.data.open(0)
    net = recipe.task.build(opened.meta, {}, 0).model.eval()
    safe_load.load_into(net, safe_load.read_tensors(folder.path / "model.safetensors"), name)
    scored, rows = opened.evaluations[split], {}
    for row, id in enumerate(scored.protocol.ids):
        found = recipe.task.predict(net, scored.on_device(scored.fetch(np.array([row]), 0)))
        rows[Path(id).stem] = {key: found[key][0].tolist() for key in ("intersection", "predicted", "actual")}
    return rows


def counted(out: Path, truth: Path) -> dict[str, dict[str, list[float]]]:
    """The same of label maps and masks, at the size of the masks."""
    rows = {}
    for file in sorted(out.glob("*.png")):
        found, true = read(file), np.asarray(Image.open(truth / file.name))
        assert found.shape == true.shape
        labelled = true != scene_sets.IGNORED
        columns = {"intersection": (found == true), "predicted": labelled, "actual": labelled}
        rows[file.stem] = {
            key: [float((which & ((true if key == "actual" else found) == c)).sum()) for c in range(4)]
            for key, which in columns.items()
        }
    return rows


@pytest.mark.parametrize("mirror", [False, True])
def test_what_is_written_is_what_the_run_scores(name, sets, tmp_path, mirror):
    said = ask(name, sets / "val", tmp_path / "out", *(["--mirror"] if mirror else []))
    assert f"{tmp_path}/out: 3 label maps of 0 sky, 1 road, 2 tree, 3 car, by " in said
    found = counted(tmp_path / "out", sets / "valannot")
    assert found == by_run(name, "val.flip" if mirror else "val") and len(found) == 3
    assert all(np.count_nonzero(row["predicted"]) > 1 for row in found.values()), "one class: anything would agree"


def test_what_is_written_is_what_the_run_scores_at_the_size_of_files(sets, tmp_path, monkeypatch):
    lines = "  crop: [32, 32]\n  size: [48, 96]\n  score_at: file"
    name = made(sets, monkeypatch, lambda text: text.replace("  crop: [32, 64]", lines))
    for split, flags in (("val", []), ("val.flip", ["--mirror"])):
        ask(name, sets / "val", tmp_path / split, *flags)
        assert counted(tmp_path / split, sets / "valannot") == by_run(name, split)


@pytest.mark.parametrize("line", ["size: [48, 96]", "short_side: 64"])
def test_pictures_are_seen_as_those_of_the_run_and_label_maps_have_their_own_size(sets, tmp_path, monkeypatch, line):
    name = made(sets, monkeypatch, lambda text: text.replace("  crop: [32, 64]", f"  crop: [32, 32]\n  {line}"))
    file = sorted((sets / "val").iterdir())[0]
    predict.predict(name, file, tmp_path / "out")
    folder = Store.locate().find(name)
    recipe = loader.load(folder.recipe, (), ())
    with trained_model.rebuilt(folder, recipe, trained_model.read_meta(folder)) as run, torch.no_grad():
        opened = recipe.data.open(0).evaluations["val"]
        batch = opened.on_device(opened.fetch(np.array([0]), 0))
        seen = recipe.task.probabilities(run.net, batch["image"], batch["scales"][0].tolist(), size=SIZE)
    np.testing.assert_array_equal(read(tmp_path / "out" / file.name), seen.argmax(1)[0].numpy())


def test_a_long_picture_that_the_short_side_makes_too_large_is_refused(sets, tmp_path, monkeypatch):
    """Of 4 x 300,000 pixels it would make 64 x 4,800,000."""
    name = made(sets, monkeypatch, lambda text: text.replace("  crop: [32, 64]", "  crop: [32, 32]\n  short_side: 64"))
    for file, size in (("long.png", (4, 300_000)), ("short.png", (80, 144))):
        scene_sets.put(tmp_path / "in" / file, np.zeros((*size, 3), np.uint8))
    done = predict.predict(name, tmp_path / "in", tmp_path / "out")
    assert [file.name for file in done.written] == ["short.png"] and len(done.damaged) == 1
    assert "300000 x 4 pixels, of which data.short_side=64 makes more; expected at most 67,108,864" in done.damaged[0]


def test_stretched_pictures_are_said(sets, tmp_path, monkeypatch):
    name = made(sets, monkeypatch, lambda text: text.replace("  crop: [32, 64]", "  crop: [32, 32]\n  size: [40, 72]"))
    for file, size in (("wide.png", (40, 140)), ("as_it_was.jpg", (80, 144))):
        scene_sets.put(tmp_path / "in" / file, scene_sets.scene(3, size)[0])
    done = predict.predict(name, tmp_path / "in", tmp_path / "out")
    assert done.notes == ("1 image resized to 40 x 72 pixels with another aspect ratio: wide",)
    assert [read(file).shape for file in done.written] == [(80, 144), (40, 140)]


@pytest.mark.parametrize("colours", [[], scene_sets.COLOURS[:4]])
def test_label_maps_show_the_classes_in_their_colours(sets, tmp_path, monkeypatch, colours):
    name = made(sets, monkeypatch, colours=colours)
    done = predict.predict(name, sets / "val", tmp_path / "out")
    said = json.loads((tmp_path / "out" / "classes.json").read_text())
    wanted = [tuple(colour) for colour in (colours or palette(4))]
    assert said["classes"] == [
        {"value": n, "name": scene_sets.NAMES[n], "colour": list(colour)} for n, colour in enumerate(wanted)
    ]
    assert said["run"] == name and said["trained_on"] == "cd"
    for file in done.written:
        labels, shown = read(file), np.asarray(Image.open(file).convert("RGB"))
        np.testing.assert_array_equal(shown, np.array(wanted, np.uint8)[labels])
    again = predict.predict(name, sets / "val", tmp_path / "again").written
    assert [file.read_bytes() for file in again] == [file.read_bytes() for file in done.written]


def test_damaged_pictures_are_named_and_the_others_written(name, sets, tmp_path):
    shutil.copytree(sets / "val", tmp_path / "in")
    whole = sorted((tmp_path / "in").iterdir())
    (tmp_path / "in" / "cut.png").write_bytes(whole[0].read_bytes()[:200])
    (tmp_path / "in" / "none.jpg").write_bytes(b"no picture")
    (tmp_path / "in" / "empty.png").write_bytes(b"")
    for quiet in (".hidden.png", "readme.txt"):
        (tmp_path / "in" / quiet).write_text("not looked at")
    said = ask(name, tmp_path / "in", tmp_path / "out", code=2)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {file.name for file in whole} | {"classes.json"}
    assert "3 label maps" in said and said.count("left out: ") == 3
    for bad in ("cut.png", "none.jpg", "empty.png"):
        assert f"left out: {tmp_path}/in/{bad}: " in said
    for file in whole:
        file.unlink()
    assert "0 label maps" in ask(name, tmp_path / "in", tmp_path / "none", code=2)
    assert not (tmp_path / "none").exists()


def test_nothing_is_written_over_and_that_is_known_before_any_work(name, sets, tmp_path, monkeypatch):
    file = sorted((sets / "val").iterdir())[1]
    with monkeypatch.context() as patch:
        patch.setattr("trainkit.data.formats.image_decode.decode", None)
        for there in (file.name, "classes.json"):
            out = tmp_path / there
            out.mkdir()
            (out / there).write_text("kept")
            with pytest.raises(UserError, match=rf"{there}/{there}: exists already; name another folder"):
                predict.predict(name, sets / "val", out)
            assert (out / there).read_text() == "kept" and len(list(out.iterdir())) == 1
        with pytest.raises(UserError, match="exists already and 2 more"):
            predict.predict(name, sets / "val", sets / "val")


def test_a_split_of_a_set_and_a_list_are_predicted_under_their_names(name, tmp_path):
    root = scene_sets.cityscapes(tmp_path / "city", 1, (32, 64))
    done = predict.predict(name, f"{root}#val", tmp_path / "out")
    assert len(done.written) == 2
    assert all(f.is_relative_to(tmp_path / "out") and f.name.endswith("_leftImg8bit.png") for f in done.written)
    file = scene_sets.listed(tmp_path / "listed", (2, 2), (32, 64)).with_name("val.txt")
    done = predict.predict(name, file, tmp_path / "other")
    assert len(done.written) == 2 and not any(".jpg" in f.name for f in done.written)


def test_what_has_no_pictures_is_refused(name, sets, tmp_path):
    (tmp_path / "notes.md").write_text("#")
    (tmp_path / "twice").mkdir()
    for file in ("a.png", "A.jpg"):
        scene_sets.put(tmp_path / "twice" / file, scene_sets.scene()[0])
    for source, said in (
        (sets, "no images; expected files .*FOLDER#val"),
        (tmp_path / "nowhere", "nowhere: does not exist; expected a folder of images"),
        (tmp_path / "notes.md", "not an image"),
        (tmp_path / "twice", r"a\.png: the same output file as .*A\.jpg"),
        (f"{sets}#none", "none"),
    ):
        with pytest.raises(UserError, match=said):
            predict.predict(name, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_label_maps_of_a_run_score_as_it_did(store, tmp_path, monkeypatch):
    root = scene_sets.camvid(tmp_path / "blocks", (8, 3), SIZE)
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "recipe.yaml").write_text(
        RECIPE.replace("ROOT", str(root)).replace("{name: bisenetv2, width: 0.125}", FPN)
    )
    ran = run(recipe=tmp_path / "recipe.yaml")
    ask(ran.folder.name, root / "val", tmp_path / "out")
    (file,) = store.rglob("rows/val_final.parquet")
    rows = {Path(row["id"]).stem: row for row in parquet.read_table(file).to_pylist()}
    found = counted(tmp_path / "out", root / "valannot")
    for id, row in found.items():
        for key, values in row.items():
            assert values == rows[id][key]
    hit, predicted, actual = (np.sum([row[key] for row in found.values()], 0) for key in found[id])
    assert ran.series("val/miou")[-1] == pytest.approx((hit / (predicted + actual - hit)).mean(), abs=1e-6)
    assert ran.series("val/miou")[-1] > 0.3, "nothing was learned"
    meta = trained_model.read_meta(ran.folder)
    assert meta.class_names == scene_sets.NAMES[:4]


def test_what_was_interrupted_leaves_whole_label_maps(name, sets, tmp_path, monkeypatch):
    whole = predict.predict(name, sets / "val", tmp_path / "whole").written
    real, seen = image_decode.decode, []

    def stops(data, where):
        seen.append(where)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return real(data, where)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("trainkit.data.formats.image_decode.decode", stops)
        with pytest.raises(KeyboardInterrupt):
            predict.predict(name, sets / "val", out)
    assert [(file.name, file.read_bytes()) for file in out.iterdir()] == [(whole[0].name, whole[0].read_bytes())]
    with pytest.raises(UserError, match=rf"{whole[0].name}: exists already; name another folder"):
        predict.predict(name, sets / "val", out)


def test_a_file_of_another_process_is_not_written_over(name, sets, tmp_path, monkeypatch):
    file = sorted((sets / "val").iterdir())[1]
    real = image_decode.decode

    def slow(data, where):
        if where.endswith(file.name):
            (tmp_path / "out" / file.name).write_text("kept")
        return real(data, where)

    with monkeypatch.context() as patch:
        patch.setattr("trainkit.data.formats.image_decode.decode", slow)
        with pytest.raises(UserError, match="was created by another process meanwhile"):
            predict.predict(name, sets / "val", tmp_path / "out")
    with pytest.raises(UserError, match="exists already"):
        predict.predict(name, sets / "val", tmp_path / "out")
    assert (tmp_path / "out" / file.name).read_text() == "kept"
