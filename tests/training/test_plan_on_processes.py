"""Plans on real processes: an update, a block or an evaluation that has too little for all of them."""

from __future__ import annotations

import re

import people_sets
import pytest
import scene_sets
import torch
from runs import ROOT, TOY, Ran, newest, overrides, run, spawn

pytestmark = pytest.mark.usefixtures("store")
TRAIN = [str(TOY), "--plugin", "toy"]
PLAIN = ["task.norm=false", "task.dropout=0.0", "train.length=12 steps", "train.micro_batch=null", "log.every=1 steps"]


def trained(processes: int, *words: str) -> tuple[Ran, str]:
    done = spawn(processes, *TRAIN, *PLAIN, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return Ran(0, newest()), done.stdout


def assert_trained_alike(one: Ran, other: Ran, *groups: str) -> None:
    assert other.series("train/loss") == pytest.approx(one.series("train/loss"), rel=1e-5)
    assert other.series("train/grad_norm") == pytest.approx(one.series("train/grad_norm"), rel=1e-4)
    for group in groups:
        for name, tensor in one.last.tensors[group].items():
            torch.testing.assert_close(other.last.tensors[group][name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("weight", ["false", "true"])
def test_idle_processes_change_nothing(weight):
    words = ["train.batch_size=2", f"task.tensor_weight={weight}"]
    one, (three, said) = run(*PLAIN, *words), trained(3, *words)
    assert (
        "Batch       2 samples = 2 processes x 1 micro-batch x 1\n" in said and "Idle        1 of 3 processes" in said
    )
    assert_trained_alike(one, three, "model", "ema", "memory")


@pytest.mark.slow
def test_a_batch_size_per_process_trains_as_its_multiple_and_the_rate_follows():
    words = ["optim.lr_rule={name: linear, batch_size: 16}", "train.schedule.warmup={over: 4 steps}"]
    one = run(*PLAIN, "train.batch_size=8", *words)
    two, said = trained(2, "train.batch_size=4 per process", *words)
    assert (
        "Batch       8 samples = 2 processes x 1 micro-batch x 4\n" in said
        and "LR          0.025 = 0.05 x (8 / 16)" in said
    )
    assert two.series("train/lr") == one.series("train/lr")
    assert_trained_alike(one, two, "model")


@pytest.mark.slow
def test_a_run_with_so_many_samples_per_process_goes_on_with_as_many_processes_alone():
    words = [*TRAIN, *PLAIN, "train.batch_size=4 per process", "task.signal_at=3"]
    cut = spawn(2, *words)
    assert "Stopped after " in cut.stdout, cut.stdout + cut.stderr
    other = spawn(1, *words, "--resume", "--elastic")
    assert other.returncode == 2 and re.search("batch_size 8; expected 4; .* as many processes", other.stderr)
    done = spawn(2, *words, "--resume")
    assert "Finished in " in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_sets_with_fewer_samples_than_processes_are_trained_on_and_scored_whole():
    words = ["train.batch_size=2", "data.samples=3", "data.test=2", "data.flip=false"]
    one, (three, _) = run(*PLAIN, *words), trained(3, *words)
    assert set(three.series("eval/val/unique_samples")) == {2.0}
    assert three.series("val/accuracy") == one.series("val/accuracy")
    assert_trained_alike(one, three, "model")


def test_an_epoch_smaller_than_an_update_ends_before_a_run_is_begun():
    done = spawn(2, *TRAIN, *PLAIN, "train.batch_size=8", "data.samples=7")
    assert done.returncode != 0 and "train.batch_size: 8, but the data has 7 samples; expected at most 7" in done.stderr
    uneven = spawn(2, *TRAIN, *PLAIN, "train.batch_size=7")
    assert uneven.returncode != 0 and 'try train.batch_size=6 or 8, or "3 per process"' in uneven.stderr


# ---- Blocks of people

NET = (
    "{neck: none, model: test_vit, args: {patch_size: 8}, embedding: 16, "
    "text: {layers: 1, width: 16, heads: 2, dropout: 0.0}, fusion: {name: transformer, layers: 1, heads: 2}}"
)
"""Without batch norm, which sees the records of its own process."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "shares"),
    [
        ("{name: modal_pk, people: 4, each: 5}", {2: 10, 5: 5}),
        ("{name: pairs, people: 4, each: 5}", {2: 10}),  # on 4, who is drawn twice is on two of them
    ],
)
def test_processes_that_share_a_block_train_as_one_that_has_it(sampler, shares, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    people_sets.index(tmp_path / "train", 9, (3, 2, 1, 1, 2))
    people_sets.index(tmp_path / "val", [f"q{n}" for n in range(4)], (3, 2, 1, 1, 2), seed=1)
    settings = {
        "data.train": f"{tmp_path}/train",
        "data.evaluate": f"{{val: {tmp_path}/val}}",
        "data.image_size": "[32, 16]",
        "data.augment": "{name: light, flip: 0.5, shift: 2, erase: 0.5}",
        "data.text": "{length: 12}",
        "data.token_dropout": "0.2",
        "data.modality_dropout": "{p: 0.2}",
        "data.sampler": sampler,
        "task.net": NET,
        "task.triplet": "{margin: soft}",
        "task.contrast": "{}",
        "optim": "{name: sgd, lr: 0.01, clip_norm: 5}",  # Adam makes much of differences in gradients near 0
        "train": "{length: 6 steps, batch_size: 20, micro_batch: 20}",
        "evaluations": "{val: {}}",
        "log": "{every: 1 steps, system_every: null}",
    }
    recipe = ROOT / "recipes" / "reid.yaml"
    one = run(*overrides(settings, {}), recipe=recipe)
    for processes, share in shares.items():
        done = spawn(processes, str(recipe), *overrides(settings, {}))
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"x 1 micro-batch x {share}\n" in done.stdout and "share each block of 20" in done.stdout
        assert ("1 of 5 processes: " in done.stdout) == (processes == 5)
        assert_trained_alike(one, Ran(0, newest()), "model")


@pytest.mark.slow
def test_batch_norm_over_all_processes_sees_each_sample_equally_often(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    streets = scene_sets.camvid(tmp_path / "streets", pictures=(10, 5), size=(40, 56))
    settings = {
        "data.train": f"{streets}#train",
        "data.evaluate": f"{{val: {streets}#val}}",
        "data.names": "[sky, road, tree, car]",
        "data.ignore": "[255]",
        "data.crop": "[32, 64]",
        "task.net": "{name: bisenetv2, width: 0.125}",
        "task.norm": "{name: sync}",
        "task.points": "null",
        "optim": "{name: sgd, lr: 0.01}",
        "train": "{length: 2 steps, batch_size: 2}",
        "evaluations": "{val: {batch_size: 2}}",
        "log": "{every: 1 steps, system_every: null}",
    }
    recipe = ROOT / "recipes" / "segment.yaml"
    ran = []
    for processes in (2, 4):
        done = spawn(processes, str(recipe), *overrides(settings, {"best": "null"}))
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("2 of 4 processes: " in done.stdout) == (processes == 4)
        ran.append(Ran(0, newest()))
    # Rounding grows from step to step in norms over 2 images: the first gradient, and what it leads to.
    losses, norms = ([one.series(f"train/{name}") for one in ran] for name in ("loss", "grad_norm"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and norms[1][0] == pytest.approx(norms[0][0], rel=1e-4)
