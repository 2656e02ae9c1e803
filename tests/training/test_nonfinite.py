"""Numbers that are not finite: seen in the cycle of their update, acted on alike everywhere, and never committed."""

from __future__ import annotations

import itertools
import math
import sys
from unittest import mock

import pytest
import torch
from runs import PLUGIN, TOY, Ran, newest, spawn

from tests.checkpoint.test_async_save import Folder
from tests.training.test_trainer import same as alike
from trainkit.checkpoint import storage
from trainkit.config.run_request import RunRequest, load
from trainkit.distributed.runtime import Runtime
from trainkit.distributed.stop_signal import Stop
from trainkit.errors import UserError
from trainkit.tracking.tracker import Silent
from trainkit.training import best
from trainkit.training.checkpointer import Resume
from trainkit.training.nonfinite import not_finite
from trainkit.training.run_logger import RunLogger
from trainkit.training.state import TrainState
from trainkit.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("unsent")

if str(PLUGIN) not in sys.path:
    sys.path.insert(0, str(PLUGIN))
PLUGINS = ("toy", "poison")
QUIET = ("evaluations={}", "best=null", "log.every=100 steps", "checkpoints={every: 1 steps, keep_last: 50}")


class Noted(Silent):
    """A tracker that keeps what a journal would."""

    def __init__(self):
        super().__init__()
        self.events, self.metrics = [], {}

    def event(self, step, name, data=None):
        self.events.append((step, name, data))

    def log(self, step, metrics):
        for name, value in metrics.items():
            self.metrics.setdefault(name, []).append((step, value))


def poisoned(folder, *words, at=None, stop=None, replayed=()):
    """The poisoned toy, trained without a store: its logger, and how it ended."""
    given = {word.partition("=")[0]: word for word in ("task.name=poisoned", *QUIET, *words)}
    recipe = load(RunRequest(TOY, list(given.values()), PLUGINS))
    asked = itertools.count()
    folder.mkdir(parents=True, exist_ok=True)
    stopping = (lambda: False) if stop is None else (lambda: next(asked) >= stop)
    run = RunLogger(recipe, Folder(folder), Noted(), main=True)
    data, resume = recipe.data.open(recipe.seed), Resume(at, list(replayed))
    # A test may go on with a task that behaves otherwise: the recipe is not compared.
    with (
        mock.patch("trainkit.config.loader.digest", lambda recipe: ""),
        Trainer(recipe, data, Runtime(recipe), run, resume=resume, stop=Stop(stopping)) as trainer,
    ):
        run.outcome = trainer.fit()
    return run


def held(folder):
    """The checkpoints of a run, oldest first."""
    return [storage.read(path) for path in sorted((folder / "checkpoints").glob("step-*"))]


def finite(folder) -> bool:
    return all(not not_finite(loaded.tensors) for loaded in held(folder))


def bits(loaded) -> dict[str, dict[str, torch.Tensor]]:
    return loaded.tensors


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(alike(a[file], b[file]) for file in a)


KINDS = [(kind, value) for kind in ("image", "weight", "loss", "gradient") for value in ("nan", "inf")]
SPOILT = "task={{name: poisoned, poison: {}, value: {}, steps: {}}}"


def test_whatever_is_not_finite_ends_the_run_in_the_cycle_of_its_update(tmp_path):
    for kind, value in KINDS:
        folder = tmp_path / f"{kind}-{value}"
        with pytest.raises(UserError, match="step 6: the loss or a gradient is not finite"):
            poisoned(folder, SPOILT.format(kind, value, [6]))
        assert held(folder)[-1].step == 6 and finite(folder), "six updates were finite, and one checkpoint each"


def test_an_update_that_is_skipped_leaves_no_trace(tmp_path):
    """Weights, optimizer, average, statistics of batch norm and memory are those of before; the next step goes on."""
    for kind, value in KINDS:
        folder = tmp_path / f"{kind}-{value}"
        run = poisoned(folder, SPOILT.format(kind, value, [6]), "train.nonfinite=skip", "train.length=9 steps")
        by_step = {loaded.step: loaded for loaded in held(folder)}
        assert sorted(by_step) == list(range(1, 10)) and finite(folder)
        assert same(bits(by_step[6]), bits(by_step[7])) and not same(bits(by_step[7]), bits(by_step[8]))
        assert [(step, name) for step, name, _ in run.tracker.events if name == "left_out"] == [(6, "left_out")]
        assert by_step[9].state["left_out"] == [6] and run.tracker.metrics["train/left_out"] == [(9, 1)]


def test_ten_updates_in_a_row_end_the_run(tmp_path):
    many = [SPOILT.format("loss", "nan", [3, 4, *range(6, 20)]), "train.length=6 epochs"]
    with pytest.raises(UserError, match="step 15: 10 steps in a row were not finite"):
        poisoned(tmp_path, *many, "train.nonfinite=skip")
    assert finite(tmp_path)


# ---- I8: what loss and gradients do not tell


LARGE = ["optim={name: sgd, lr: 1, momentum: 0, weight_decay: 100}", "train.ema=null"]


def raise_rate(patch: pytest.MonkeyPatch) -> None:
    """Train at a rate that no recipe may have: the step overflows, and no gradient does."""
    patch.setattr("trainkit.training.optimizer.rate", lambda *_: 1e38)


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_step_that_makes_weights_infinite_out_of_finite_gradients_is_not_committed(tmp_path, policy, monkeypatch):
    raise_rate(monkeypatch)
    with pytest.raises(UserError, match=r"step 1: model/\S+.*: not finite, and not committed"):
        poisoned(tmp_path, *LARGE, f"train.nonfinite={policy}", "train.length=1 steps")
    assert not held(tmp_path)


def test_a_variance_that_overflows_under_a_finite_loss_is_not_committed(tmp_path):
    with pytest.raises(UserError, match=r"step 7: model/norm\.running_var.*not finite, and not committed"):
        poisoned(tmp_path, SPOILT.format("image", "'1e25'", [6]))
    assert held(tmp_path)[-1].step == 6 and finite(tmp_path)


def test_what_is_infinite_by_design_may_be_committed(tmp_path):
    run = poisoned(tmp_path, "task={name: poisoned, constant: true}", "train.length=3 steps")
    assert run.outcome.step == 3 and not_finite(held(tmp_path)[-1].tensors) == ["ema/mask", "model/mask"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_every_place_of_a_tensor_is_looked_at(dtype):
    for bad, at in itertools.product([math.nan, math.inf, -math.inf], range(7)):
        t = torch.arange(7).to(dtype) - 3
        assert not_finite({"model": {"a": t, "n": torch.arange(3), "none": torch.zeros(0)}}) == []
        t[at] = bad
        assert not_finite({"model": {"a": t}}) == ["model/a"]


# ---- Scores that are not numbers


def test_scores_that_are_not_numbers_are_never_the_best_and_wear_patience_out(tmp_path):
    words = ["task={name: poisoned, unscored: true}", "evaluations={val: {every: 1 steps, batch_size: 8}}"]
    run = poisoned(tmp_path, *words, "best={metric: val/accuracy}", "stop_when={metric: val/accuracy, patience: 3}")
    assert run.outcome.step == 3 and run.outcome.best == []


def test_a_first_score_that_is_not_a_number_is_no_record():
    """Compared with NaN nothing is better, and a run that recovers would be stopped all the same."""
    recipe = load(RunRequest(TOY, ["stop_when={metric: val/accuracy, patience: 2}"], ("toy",)))
    state = object.__new__(TrainState)
    state.record, state.waited, state.best, state.step = None, 0, [], 1
    seen = []
    for value in (math.nan, 0.5, 0.6, math.nan, 0.4):
        best.enter(state, recipe, "val", {"val/accuracy": value, "val/ema/accuracy": 0.0})
        seen.append((state.record, state.waited))
    assert seen == [(None, 1), (0.5, 0), (0.6, 0), (0.6, 1), (0.6, 2)]


# ---- On one of two processes


ONE_RANK = "task={{name: poisoned, tensor_weight: true, poison: {}, value: nan, steps: [6], rank: {}}}"


def on_two(*words, code=0):
    done = spawn(2, str(TOY), "--plugin", "toy", "--plugin", "poison", *words)
    assert done.returncode == code, done.stdout + done.stderr
    return done, Ran(done.returncode, newest())


@pytest.mark.slow
@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("kind", ["image", "gradient"])
def test_on_one_process_it_is_skipped_by_both(kind):
    _, ran = on_two(ONE_RANK.format(kind, 1), "train.nonfinite=skip", "checkpoints.every=1 steps")
    by_step = {step: storage.read(ran.folder.checkpoints / f"step-{step:09d}") for step in (6, 7, 12)}
    assert same(bits(by_step[6]), bits(by_step[7])) and not not_finite(by_step[12].tensors)
    assert [e.step for e in ran.events("left_out")] == [6]


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_on_one_process_it_ends_both():
    done, ran = on_two(ONE_RANK.format("loss", 1), code=1)
    assert "step 6: the loss or a gradient is not finite" in done.stderr and ran.folder.info().status == "FAILED"
    assert finite(ran.folder.path)
