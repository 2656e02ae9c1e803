"""How training on copied recipes starts: fine-tuned, as a linear probe or from scratch, with the reason in words."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner
from PIL import Image
from runs import run, stripes
from safetensors.torch import save_file

from trainkit.autoconfig import fit, new_recipe, pretrained
from trainkit.checkpoint import timm_weights
from trainkit.cli import main
from trainkit.config import loader
from trainkit.data.split import Holdout
from trainkit.errors import UserError

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = "test_efficientnet"


@pytest.fixture
def here(tmp_path, monkeypatch, cache):
    """A folder to work in, in which paths begin, on a machine without a GPU or downloaded weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def find(word, *, network=False):
        raise UserError(word, "not here, and no network is used" if not network else "downloaded")

    monkeypatch.setattr(timm_weights, "find", find)
    return tmp_path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Random weights of a tiny network of timm, called as it is."""
    file = tmp_path_factory.mktemp("weights") / f"{TINY}.safetensors"
    save_file(timm.create_model(TINY, num_classes=7).state_dict(), file)
    return file


def copied(recipe: str = "convnext", data: str = "patterns", new: str = "mine.yaml", **asked):
    """The copy of a shipped recipe for other data, and what is said of it."""
    made = new_recipe.copy(RECIPES / f"{recipe}.yaml", Path(new), data=data, asked=fit.Asked(**asked))
    return loader.load(new), made.seen[-1]


def refused(**asked) -> str:
    with pytest.raises(UserError) as caught:
        copied(new="refused.yaml", **asked)
    assert not Path("refused.yaml").exists()
    return str(caught.value)


# What is chosen, and why


def test_few_photographs_are_fine_tuned_as_the_network_was_trained(here, tiny):
    stripes(here / "patterns", 12, 1, (48, 60))
    recipe, said = copied(weights=str(tiny))
    assert said == f"start: linear probe, then fine-tuning of {TINY} ({tiny}): as --weights says"
    net, data = recipe.task.net, recipe.data
    assert (net.model, net.weights, net.freeze_bn, net.args) == (TINY, str(tiny), True, {})
    assert net.probe and recipe.evaluations["val"].at_start and recipe.evaluations["val"].every is not None
    config = timm.get_pretrained_cfg(TINY)
    assert (data.mean, data.std, data.image_size) == (config.mean, config.std, 160)
    assert (data.augment.name, data.augment.hflip, data.augment.auto_augment) == ("timm", 0.5, None)
    assert data.augment.interpolation == config.interpolation
    assert recipe.optim.layer_decay or recipe.optim.groups, "the backbone moves less than the head"
    assert 5 <= recipe.train.length.amount <= 20 and recipe.train.schedule.warmup is not None
    assert recipe.train.ema is None and recipe.best.metric == "val/top1"
    header, _, rest = Path("mine.yaml").read_text().partition("name: mine")
    assert f"# start    {said.removeprefix('start: ')}" in header
    marked = [line.split(":")[0].strip() for line in rest.splitlines() if new_recipe.SIGN in line]
    assert marked == ["group", "augment"], "no line whose change makes runs incomparable is to be decided first"


def test_drawings_and_tiny_images_start_from_scratch(here):
    for name, top in (("a", 8), ("b", 30)):
        (here / "letters" / name).mkdir(parents=True)
        for n in range(8):
            pixels = np.full((48, 48), True)
            pixels[top : top + 3, n : n + 20] = False
            Image.fromarray(pixels).save(here / "letters" / name / f"{n}.png")
    recipe, said = copied(data="letters")
    why = "drawings or characters, not photographs: in the median image, one colour covers 85 %"
    assert said == f"start: from scratch: {why}" and recipe.task.net.model == "convnext_atto"
    stripes(here / "dots", 6, 1, (12, 12))
    assert "images of 12 px are too small" in copied(data="dots", new="dots.yaml")[1]


def test_photographs_have_many_colours_and_drawings_few():
    grey = np.add.outer(np.arange(64), np.arange(64)).astype(np.uint8)
    assert pretrained.colours(np.repeat(grey[:, :, None], 3, axis=2)) >= 10
    assert pretrained.colours(np.full((8, 8, 3), 255, np.uint8)) == 1
    product = np.full((64, 64, 3), 255, np.uint8)
    product[16:48, 8:56] = np.random.default_rng(0).integers(0, 255, (32, 48, 3))
    assert pretrained.colours(product) > pretrained.FEW_COLOURS, "a photograph before white"


def test_weights_that_are_not_here_are_told_with_the_command_that_brings_them(here):
    stripes(here / "patterns", 6, 1)
    recipe, said = copied()
    assert recipe.task.net.weights is None and recipe.task.net.model == "convnext_atto"
    assert said == (
        "start: from scratch: the pretrained weights of tf_efficientnet_lite0 are not downloaded; "
        "run `trainkit download timm:tf_efficientnet_lite0.in1k`, or pass --weights FILE, and copy again"
    )
    assert "--start: fine-tune, but the pretrained weights are not downloaded" in refused(start="fine-tune")
    recipe, said = copied(new="other.yaml", weights="timm:resnet18.a1_in1k")
    assert (recipe.task.net.model, recipe.task.net.weights) == ("resnet18.a1_in1k", "pretrained")
    assert said.endswith("the weights are not downloaded: run `trainkit download other.yaml`")


def test_weights_are_found_beside_the_data(here, monkeypatch):
    stripes(here / "sets" / "patterns", 6, 1)
    (here / "sets" / "pretrained").mkdir()
    monkeypatch.setattr(pretrained, "NETWORK", f"{TINY}.r160_in1k")
    save_file(timm.create_model(TINY).state_dict(), here / "sets" / "pretrained" / f"{TINY}.safetensors")
    recipe, said = copied(data="sets/patterns")
    assert said.endswith("18 photographs")
    assert recipe.task.net.weights == f"sets/pretrained/{TINY}.safetensors", "from the data root"


def test_embeddings_of_photographs_start_from_pretrained_weights_too(here, tiny):
    stripes(here / "patterns" / "some", 8, 1)
    stripes(here / "patterns" / "more", 8, 2)
    recipe, said = copied("omniglot", weights=str(tiny))
    assert "fine-tuning of" in said and recipe.data.open_set
    assert (recipe.task.net.name, recipe.task.net.model, recipe.task.net.freeze_bn) == ("timm", TINY, True)
    recipe, _ = copied("eye_state", new="eyes.yaml", start="fine-tune", weights=str(tiny))
    assert recipe.task.net.freeze_bn and recipe.data.fit == "stretch" and recipe.best.metric == "val/f1_macro"


def test_the_command_line_chooses(here, tiny):
    stripes(here / "patterns", 6, 1)
    said = copied(new="tuned.yaml", start="fine-tune", weights=str(tiny))[1]
    assert said == f"start: linear probe, then fine-tuning of {TINY} ({tiny}): as --start says"
    recipe, said = copied(new="probe.yaml", start="probe", weights=str(tiny))
    assert said == f"start: linear probe of {TINY} ({tiny}): as --start says"
    assert recipe.task.net.probe and recipe.task.net.tune == "linear" and recipe.train.length.amount == 0
    assert recipe.evaluations["val"].at_start and recipe.best.metric == "val/top1"
    recipe, said = copied(new="scratch.yaml", start="scratch")
    assert said == "start: from scratch: as --start says" and recipe.task.net.model == "convnext_atto"
    args = ["cp", "convnext", "cli.yaml", "--data", "patterns", "--start", "fine-tune", "--weights", str(tiny)]
    said = CliRunner().invoke(main.main, args)
    assert said.exit_code == 0 and "start: linear probe, then fine-tuning of" in said.output, said.output


def test_what_cannot_be_had_is_refused_before_anything_is_written(here, tiny):
    stripes(here / "patterns", 6, 1)
    assert refused(start="scratch", weights=str(tiny)).startswith("--weights: not allowed with --start scratch")
    assert "nowhere.safetensors: does not exist" in refused(weights="nowhere.safetensors")
    shutil.copy(tiny, here / "resnet18.safetensors")
    assert "resnet18.safetensors" in refused(weights="resnet18.safetensors"), "of another network than it is called"
    assert "timm:resnet18.a2_in1k" not in (said := refused(weights="timm:resnet18.a9_in1k")) and "resnet18" in said
    stripes(here / "parts" / "train", 6, 1)
    stripes(here / "parts" / "val", 6, 2)
    assert refused(data="parts", test="15%").startswith("--test: data that has splits")
    assert refused(test="all").startswith("--test: 'all'; expected a percentage")
    for recipe in ("omniglot", "segment", "hippocampus"):
        assert refused(recipe=recipe, data="parts/train", start="probe").startswith(
            "--start: probe, for a recipe of task"
        )
    said = CliRunner().invoke(main.main, ["cp", "convnext", "cli.yaml", "--start", "scratch"])
    assert said.exit_code == 2 and "--start, --weights: given without --data" in said.output


# Each class is held out from


def test_the_same_share_of_each_class_is_held_out(here):
    stripes(here / "patterns", 20, 1)
    for file in sorted((here / "patterns" / "down").glob("*.png"))[5:]:
        file.unlink()
    recipe, _ = copied(start="scratch")
    assert recipe.data.stratify
    opened = recipe.data.open(recipe.seed)
    assert np.bincount(opened.train.label).tolist() == [16, 4, 16]
    assert np.bincount(opened.evaluations["val"].label).tolist() == [4, 1, 4]


def test_a_test_set_is_held_out_once_and_scored_at_the_end(here):
    stripes(here / "patterns", 20, 1)
    recipe, _ = copied(start="scratch", test="15%")
    assert recipe.data.evaluate == {"val": "held_out", "test": "held_out_test"}
    assert recipe.evaluations["test"].at_end and recipe.evaluations["test"].every is None
    assert recipe.best.metric.startswith("val/")
    data = recipe.data.open(0)
    assert (data.train.size, data.evaluations["val"].size, data.evaluations["test"].size) == (42, 9, 9)
    parts = [split.rows for split in (data.train, data.evaluations["val"], data.evaluations["test"])]
    assert sorted(np.concatenate(parts).tolist()) == list(range(60))
    assert set(np.bincount(data.evaluations["test"].label)) == {3}, "of each class"


def test_a_class_of_one_image_is_trained_on():
    label, names = np.asarray([0, 0, 0, 1, 2, 2]), list("abcdef")
    train, held = Holdout(0.4).divide_classes(label, names, 0)
    assert sorted([*train, *held]) == list(range(6))
    assert np.bincount(label[held], minlength=3).tolist() == [1, 0, 1]
    with pytest.raises(UserError, match="one image of each class"):
        Holdout(0.4).divide_classes(np.arange(3), names[:3], 0)


# Real photographs


@pytest.mark.slow
def test_photographs_of_two_classes_reach_0_9_from_a_folder(shared, tmp_path, monkeypatch, cache):
    for split, count in (("train", 125), ("test", 100)):
        for name in ("airplane", "frog"):
            (tmp_path / "photographs" / split / name).mkdir(parents=True)
            for file in sorted((shared / "cls_cifar10" / split / name).iterdir())[:count]:
                shutil.copy(file, tmp_path / "photographs" / split / name)
    monkeypatch.chdir(tmp_path)
    copied(
        data="photographs", start="fine-tune", weights=str(shared / "pretrained" / "tf_efficientnet_lite0.safetensors")
    )
    # 20 epochs, as `cp` chooses, take 4 min of one core.
    ran = run("train.length=5 epochs", recipe=Path("mine.yaml"))
    assert ran.code == 0 and ran.series("test/top1")[-1] > 0.9
