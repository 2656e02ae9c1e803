"""Copied recipes of scenes: how training starts, masks of every form, and folders a level off."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import scene_sets
from PIL import Image

from trainkit.autoconfig import fit, new_recipe, pretrained, scenes
from trainkit.checkpoint import timm_weights
from trainkit.config import loader
from trainkit.errors import UserError

RECIPES = Path(__file__).parents[2] / "recipes"
SIZE = (96, 160)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, cache):
    """A folder to work in, in which paths begin, below one of its own: beside data weights are looked for."""
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(timm_weights, "is_here", lambda word: False)
    return folder


def copied(data: str, recipe: str = "camvid", new: str = "mine.yaml", asked: fit.Asked | None = None):
    """The copy of a recipe for other data, its text, and what is said of the data."""
    made = new_recipe.copy(RECIPES / f"{recipe}.yaml", Path(new), data=data, asked=asked)
    return loader.load(new), Path(new).read_text(), made.seen


def said(seen: tuple[str, ...]) -> str:
    (start,) = [sentence for sentence in seen if sentence.startswith("start: ")]
    return start.removeprefix("start: ")


def weights(folder: Path) -> Path:
    file = folder / "pretrained" / "tf_efficientnet_lite0.safetensors"
    file.parent.mkdir(parents=True)
    file.touch()
    return file


# How training starts


@pytest.mark.parametrize("recipe", ["segment", "camvid"])
@pytest.mark.parametrize("place", [".", ".."])
def test_photographs_start_from_an_encoder_whose_weights_lie_beside_the_data(here, recipe, place):
    pytest.importorskip("segmentation_models_pytorch")
    weights(here / place)
    scene_sets.camvid(here / "streets", (12, 4), SIZE)
    made, text, seen = copied("streets", recipe)
    net = made.task.net
    assert (net.name, net.encoder, net.decoder) == ("smp", "tu-tf_efficientnet_lite0", "fpn")
    assert Path(net.weights).resolve() == (here / place / "pretrained" / "tf_efficientnet_lite0.safetensors").resolve()
    assert made.data.mean == made.data.std == (0.5, 0.5, 0.5) and made.data.crop == (64, 128)
    assert (made.optim.groups[0].match, made.optim.groups[0].lr_scale) == ("*encoder.*", 0.3)
    assert set(made.evaluations) == {"val", "pictures"}, "not at several scales, which takes longest"
    assert str(made.train.length) == "60 epochs" and str(made.evaluations["val"].every) == "15 epochs"
    assert said(seen).startswith("from the pretrained encoder tf_efficientnet_lite0 (") and "\n# start    from" in text
    assert made.task.points is None and made.data.distance is None and made.best.metric == "val/miou"


def test_weights_that_were_downloaded_come_first(here, monkeypatch):
    pytest.importorskip("segmentation_models_pytorch")
    scene_sets.camvid(here / "streets", (4, 2), SIZE)
    monkeypatch.setattr(timm_weights, "is_here", lambda word: word == "timm:tf_efficientnet_lite0.in1k")
    monkeypatch.setattr(timm_weights, "find", lambda word: weights(here))
    made, _, _ = copied("streets")
    assert (made.task.net.encoder, made.task.net.weights) == ("tu-tf_efficientnet_lite0.in1k", "pretrained")
    assert made.task.required_weights()["net"].weights == "timm:tf_efficientnet_lite0.in1k"
    assert made.data.std == (0.5, 0.5, 0.5)


def test_the_command_line_says_how_training_starts(here):
    pytest.importorskip("segmentation_models_pytorch")
    scene_sets.camvid(here / "streets", (4, 2), SIZE)
    named = weights(here).rename(here / "tf_efficientnet_lite0.safetensors")
    made, _, seen = copied("streets", new="scratch.yaml", asked=fit.Asked("scratch"))
    assert made.task.required_weights() == {} and said(seen) == "from scratch: as --start says"
    made, _, seen = copied("streets", new="named.yaml", asked=fit.Asked(None, str(named)))
    assert made.task.net.weights == "tf_efficientnet_lite0.safetensors" and said(seen).endswith("as --weights says")
    for asked, words in (
        (fit.Asked("scratch", str(named)), "--weights: not allowed with --start scratch"),
        (fit.Asked("fine-tune"), "--start: fine-tune, but the pretrained weights are not downloaded"),
        (fit.Asked(None, "run:other"), "run:other: does not exist"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            copied("streets", new="none.yaml", asked=asked)
        assert not Path("none.yaml").exists()


def test_larger_pictures_are_brought_to_what_was_measured(here):
    pytest.importorskip("segmentation_models_pytorch")
    weights(here)
    scene_sets.camvid(here / "streets", (2, 1), (720, 960))
    made, text, _ = copied("streets")
    assert made.data.size == (360, 480) and made.data.crop == (256, 320) and made.data.score_at == "file"
    assert "# <- the median image is 720 x 960: larger crops show more" in text
    scene_sets.put(here / "streets" / "train" / "tall.png", np.zeros((1000, 500, 3), np.uint8))
    scene_sets.put(here / "streets" / "trainannot" / "tall.png", np.zeros((1000, 500), np.uint8))
    made, _, _ = copied("streets", new="other.yaml")
    assert made.data.size is None and made.data.short_side is not None, "of different shapes"


def test_scales_leave_something_of_the_smallest_picture(here):
    pytest.importorskip("segmentation_models_pytorch")
    weights(here)
    scene_sets.camvid(here / "streets", (4, 2), SIZE)
    scene_sets.put(here / "streets" / "train" / "small.png", scene_sets.scene(1, (20, 64))[0])
    scene_sets.put(here / "streets" / "trainannot" / "small.png", scene_sets.scene(1, (20, 64))[1])
    made, _, _ = copied("streets")
    assert made.data.augment.scales == (0.8, 1.25) and made.data.open(0).train.size == 5


def test_without_weights_training_starts_at_random_and_the_command_that_gets_them_is_told(here):
    pytest.importorskip("segmentation_models_pytorch")
    scene_sets.camvid(here / "streets", (4, 2), SIZE)
    made, _, seen = copied("streets")
    assert made.task.net.name == "bisenetv2" and made.task.net.weights is None
    assert said(seen).startswith("from scratch: the pretrained weights of tf_efficientnet_lite0 are not downloaded; ")
    assert f"`trainkit download timm:{pretrained.NETWORK}`" in said(seen)


def test_without_the_library_of_decoders_its_extra_is_named(here, monkeypatch):
    weights(here)
    scene_sets.camvid(here / "streets", (4, 2), SIZE)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == scenes.SMP else find(name))
    made, _, seen = copied("streets")
    assert made.task.net.name == "bisenetv2" and "pip install trainkit[segmentation]" in said(seen)


def test_drawings_and_small_pictures_start_at_random(here):
    weights(here)
    scene_sets.camvid(here / "small", (4, 2), (48, 64))
    assert said(copied("small")[2]) == "from scratch: images of 48 px are too small for a pretrained encoder"
    table = np.array(scene_sets.COLOURS[:3], np.uint8)
    for split in ("train", "val"):
        for n in range(3):
            mask = scene_sets.scene(n, SIZE, 3, ignored=False)[1]
            scene_sets.put(here / "drawn" / split / f"{split}{n}.png", table[mask])
            scene_sets.put(here / "drawn" / f"{split}annot" / f"{split}{n}.png", mask)
    assert said(copied("drawn", new="other.yaml")[2]).startswith(
        "from scratch: drawings, not photographs: in the median image, 3 colours"
    )


# Masks of every form


def test_masks_without_names_have_names_to_decide(here):
    scene_sets.folders(here / "set", 3, SIZE, 3)
    made, text, _ = copied("set")
    assert made.data.names == ["class_0", "class_1", "class_2"]
    assert "# <- name these values; list values without a class in ignore" in text
    (here / "set" / "names.json").write_text('["field", "river", "house"]')
    made, text, _ = copied("set", new="other.yaml")
    assert made.data.names is None and made.data.open(0).meta.class_names == ("field", "river", "house")


def test_a_folder_of_images_without_masks_is_refused(here):
    (here / "some" / "images").mkdir(parents=True)
    Image.new("RGB", (64, 64)).save(here / "some" / "images" / "a.png")
    with pytest.raises(UserError, match=r"a folder of unknown layout, or without images; expected a list of"):
        copied("some")
