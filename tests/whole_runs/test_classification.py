"""Classification from end to end: runs, resumes, processes, what is handed on, and what users get wrong."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from runs import ROOT, all_same, evaluated, overrides, own_store, run, stopped_and_resumed, stripes
from safetensors.torch import load_file

from trainkit.errors import UserError

pytestmark = pytest.mark.usefixtures("store", "unsent")
CONVNEXT = ROOT / "recipes" / "convnext.yaml"
IMAGENET = ROOT / "recipes" / "convnext_imagenet.yaml"
SIDE = 32


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    stripes(root / "train", 20, 0)
    stripes(root / "val", 9, 1)
    return root


def words(pictures, **changes: str) -> list[str]:
    """All that is random in one run: mixing, timm's augmentation, weighted draws, dropped blocks."""
    settings = {
        "data.train": f"{pictures}/train",
        "data.evaluate": f"{{val: {pictures}/val}}",
        "data.image_size": f"{SIDE}",
        "data.augment": "{name: timm, auto_augment: rand-m9-mstd0.5-inc1, re_prob: 0.25}",
        "data.sampling": "balanced",
        "task.net": "{model: test_convnext3, args: {patch_size: 2}, drop_path: 0.2, dropout: 0.1}",
        "task.mix": "{mixup: 0.8, cutmix: 1.0}",
        "optim.layer_decay": "0.8",
        "train": "{length: 3 epochs, batch_size: 12, micro_batch: 6, ema: 0.9}",
        "evaluations": "{val: {every: 4 steps}}",
    }
    return overrides(settings, changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, database, pictures):
    """The run without an interruption, in a store of its own."""
    with own_store(tmp_path_factory.mktemp("whole"), database):
        yield run(*words(pictures), recipe=CONVNEXT)


def test_a_run_scores_its_own_weights_and_their_average_and_counts_every_picture(whole):
    assert whole.code == 0 and whole.few_in_mlflow
    assert {"val/top1", "val/ema/top1", "val/ece", "val/f1_macro", "val/ema/nll"} <= whole.history.metrics.keys()
    assert set(whole.series("eval/val/unique_samples")) == {27.0}
    assert "val/top5" not in whole.history.metrics  # of three classes


def test_an_interrupted_run_with_mixing_augmentation_and_weighted_draws_resumes_to_the_bit(whole, pictures):
    """Also where workers mix and augment."""
    resumed = stopped_and_resumed(CONVNEXT, words(pictures), 6, "loader.workers=2")
    assert all_same(resumed, whole) and resumed.repeatable == whole.repeatable


def test_what_is_handed_on_are_the_weights_that_led_and_another_run_begins_with_them(whole, pictures):
    from trainkit.training.best import best_weights

    file = best_weights(whole.folder.path)
    assert file.name == "ema.safetensors"  # the recipe's best is a score of the average
    probe = run(
        *words(
            pictures,
            task__net=f"{{model: test_convnext3, args: {{patch_size: 2}}, weights: {file}, tune: linear}}",
            task__mix="null",
            evaluations="{val: {at_start: true}}",
        ),
        recipe=CONVNEXT,
    )
    step = int(file.parent.name.split("-")[1])
    averaged = dict(zip(*whole.history.series("val/ema/top1"), strict=True))
    assert probe.series("val/top1")[0] == averaged[step]
    given, trained = load_file(file), probe.last.tensors["model"]
    moved = {name for name, t in given.items() if not torch.equal(t, trained[name])}
    assert moved == {"net.head.fc.weight", "net.head.fc.bias"}


def test_the_published_recipe_takes_steps_on_other_pictures(pictures):
    """All of its settings but the network's size, the data and the number of samples."""
    done = run(
        f"data.train={pictures}/train",
        f"data.evaluate={{val: {pictures}/val}}",
        "data.image_size=32",
        "task.net.model=test_convnext3",
        "train.length=3 steps",
        "train.batch_size=16",
        "train.micro_batch=8",
        "train.schedule.warmup.over=1 step",
        "loader.workers=0",
        "log={every: 1 steps, system_every: null}",
        recipe=IMAGENET,
    )
    assert done.code == 0
    assert done.series("train/lr")[0] == pytest.approx(4e-3 * 16 / 4096)
    assert all(np.isfinite(done.series("train/loss"))) and "val/ema/top1" in done.history.metrics


@pytest.mark.slow
def test_one_checkpoint_scores_identically_on_one_process_and_on_two(whole, pictures, store, monkeypatch):
    monkeypatch.setenv("TRAINKIT_STORE", str(whole.folder.path.parents[1]))
    scored = [evaluated(n, str(CONVNEXT), *words(pictures), "--score", whole.folder.name) for n in (1, 2)]
    assert scored[0] and scored[0] == scored[1]


# What users get wrong


@pytest.mark.parametrize(
    "change, said",
    [
        ({"data__sampling": "{upwards: 2.0}"}, r"upwards"),
        ({"evaluations": "{far: {split: val.seperation}}", "best": "null"}, r"'val.seperation'.*val.separation"),
    ],
)
def test_mistakes_end_a_run_before_its_first_update(change, said, pictures):
    with pytest.raises(UserError) as caught:
        run(*words(pictures, **change), recipe=CONVNEXT)
    assert re.search(said, " ".join(str(caught.value).split())), caught.value
