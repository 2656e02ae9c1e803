"""Losses that jump up: noticed where they are injected, rarely elsewhere, and gone back from to the same bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from runs import ROOT

from tests.training.test_nonfinite import bits, held, poisoned, same
from trainkit.checkpoint import storage
from trainkit.config.schema import Spikes
from trainkit.errors import UserError
from trainkit.training import loss_spikes

LONG = ["optim.lr=0.001", "train.length=60 steps", "checkpoints={every: 10 steps, keep_last: 50}", "log.every=5 steps"]
JUMP = "task={{name: poisoned, jump: 50.0, steps: [{}]}}"
BACK = "train.spikes={policy: rollback, window: 16, leave_out: 6}"


def alarms(losses, settings=None) -> int:
    """How many of the losses are spikes; none is counted before the window is full, and of a run of them the first."""
    settings, was, found = settings or Spikes(), False, 0
    for n in range(settings.window, len(losses)):
        now = loss_spikes.deviations(losses[n], losses[n - settings.window : n]) > settings.deviations
        found, was = found + (now and not was), now
    return found


# ---- The detector


@pytest.mark.parametrize("sign", [1, -1])
def test_a_loss_of_ten_times_the_others_is_a_spike_and_a_slow_fall_is_none(sign):
    rng = np.random.default_rng(0)
    losses = list((2 * np.exp(-np.arange(600) / 300) + 0.5) * rng.lognormal(0, 0.1, 600) * sign)
    assert alarms(losses) == 0
    for at in (200, 400, 599):
        spoilt = [*losses]
        spoilt[at] = abs(spoilt[at]) * 10
        assert alarms(spoilt) == 1, at


def test_what_is_not_finite_is_no_spike():
    for bad in (math.nan, math.inf):
        assert not loss_spikes.deviations(bad, [1.0, 1.1, 0.9] * 10) > 0


SHAPES = {
    "normal": lambda rng, n: 1 + 0.1 * rng.standard_normal(n),
    "lognormal": lambda rng, n: rng.lognormal(0, 0.5, n),
    "wild": lambda rng, n: rng.lognormal(0, 1.0, n),
    "falling": lambda rng, n: (3 * np.exp(-np.arange(n) / (n / 5)) + 0.05) * rng.lognormal(0, 0.2, n),
    "gamma": lambda rng, n: rng.gamma(2.0, 0.5, n),
    "heavy": lambda rng, n: np.exp(0.1 * rng.standard_t(5, n)),
}


@pytest.mark.parametrize("shape", [*SHAPES])
def test_false_alarms_are_rare_in_losses_of_many_shapes(promise, shape):
    """Fewer than 1 in 100,000 updates; of logarithms with the tails of Student's t of 5 degrees 1 in 1,000."""
    many, found = 0, 0
    for seed in promise.trials("N3", f"losses without a spike raise no alarm: {shape}", few=1, many=50):
        with promise.trial(seed):
            losses = SHAPES[shape](np.random.default_rng(seed), 2000)
            alarmed = alarms(list(losses))
            many, found = many + len(losses), found + alarmed
            assert alarmed <= (4 if shape == "heavy" else 0), alarmed
    print(f"{shape}: {found} alarms in {many} updates")


def test_recorded_losses_of_sample_recipes_raise_no_alarm():
    """Every loss of whole trainings of shipped recipes, as they were when this was written."""
    recorded = np.load(ROOT / "tests" / "support" / "recorded_losses.npz")
    found = {name: alarms(list(recorded[name].astype(float))) for name in recorded.files}
    assert len(found) >= 2 and sum(len(recorded[name]) for name in recorded.files) > 2000
    assert not any(found.values()), found


# ---- In a run


def test_an_injected_spike_is_said_and_changes_no_bit(tmp_path):
    run = poisoned(tmp_path / "a", *LONG, JUMP.format(40), "train.spikes={window: 16}")
    (event,) = [(step, data) for step, name, data in run.tracker.events if name == "spike"]
    assert event[0] == 40 and event[1]["deviations"] > 8
    poisoned(tmp_path / "b", *LONG, JUMP.format(40))
    assert same(bits(held(tmp_path / "a")[-1]), bits(held(tmp_path / "b")[-1]))


def test_going_back_leaves_the_updates_around_it_out(tmp_path):
    run = poisoned(tmp_path / "a", *LONG, JUMP.format(46), BACK)
    (event,) = [(step, data) for step, name, data in run.tracker.events if name == "rollback"]
    assert (event[0], event[1]["to"], event[1]["left_out"]) == (46, 40, [43, 49])
    last = held(tmp_path / "a")[-1]
    assert last.step == 60 and last.state["passed"] == [[43, 49]] and last.state["rollbacks"] == 1
    assert run.tracker.metrics["train/left_out"][-1] == (60, 6)
    # As a training that never had these updates: gradients of nothing, skipped.
    skipping = [*LONG, JUMP.format(46).replace("jump: 50.0", "poison: loss"), "train.nonfinite=skip"]
    poisoned(tmp_path / "b", *(word.replace("[46]", "[43, 44, 45, 46, 47, 48]") for word in skipping))
    assert same(bits(held(tmp_path / "b")[-1]), bits(last))


def test_going_back_is_resumable_to_the_same_bits(promise, tmp_path):
    """Told to stop before the spike, at it, as it is noticed, among what is left out, and behind."""
    words = [*LONG, JUMP.format(46), BACK]
    poisoned(tmp_path / "whole", *words)
    whole = held(tmp_path / "whole")[-1]
    for at in promise.trials(
        "N3", "an interrupted rollback from a spike ends with the same bits", of=[42, 46, 47, 48, 52]
    ):
        with promise.trial(at):
            folder = tmp_path / str(at)
            poisoned(folder, *words, stop=at)
            poisoned(folder, *words, at=storage.newest_valid(folder / "checkpoints")[0])
            cut = held(folder)[-1]
            assert same(bits(whole), bits(cut)) and whole.state["losses"] == cut.state["losses"]
            assert cut.state["rollbacks"] == 1 and cut.state["passed"] == whole.state["passed"]


def test_without_a_checkpoint_from_before_the_run_ends(tmp_path):
    with pytest.raises(UserError, match=r"step 46: the loss is .* no checkpoint exists to go back to"):
        poisoned(tmp_path, *LONG, JUMP.format(46), BACK, "checkpoints={every: null}")


def test_with_the_window_not_in_the_checkpoint_the_spike_is_missed(tmp_path, monkeypatch):
    from trainkit.training.state import TrainState

    monkeypatch.setattr(TrainState, "_COUNTERS", tuple(name for name in TrainState._COUNTERS if name != "losses"))
    words = [*LONG, JUMP.format(46), BACK]
    poisoned(tmp_path, *words, stop=40)
    poisoned(tmp_path, *words, at=storage.newest_valid(tmp_path / "checkpoints")[0])
    assert held(tmp_path)[-1].state["rollbacks"] == 0
