"""Updates computed twice: a flipped bit is found wherever it is, a sound machine differs in nothing."""

from __future__ import annotations

import pytest
import torch
from runs import TOY, run, stop_after

from tests.training.test_nonfinite import ONE_RANK, bits, held, on_two, poisoned, same
from trainkit.errors import UserError
from trainkit.training import determinism

LAST = "checkpoints={every: null, at_end: true}"
TWICE = "train.replay={every: 3 steps}"
FLIP = "task={{name: poisoned, flip: {}, bit: {}, steps: [5]}}"


def test_a_sound_machine_computes_the_same_and_ends_with_the_same_bits(tmp_path, monkeypatch):
    """Batch norm, dropout, an average, a memory and mirrored images: every update twice."""
    compared = []

    def prints(tensors, plain=determinism.prints):
        compared.append(plain(tensors))
        return compared[-1]

    monkeypatch.setattr(determinism, "prints", prints)
    run = poisoned(tmp_path / "twice", LAST, "train.replay={every: 1 steps}")
    assert len(compared) == 12 * 4 and len(compared[1]) > 10 and not run.tracker.events
    poisoned(tmp_path / "once", LAST)
    assert same(bits(held(tmp_path / "twice")[0]), bits(held(tmp_path / "once")[0]))


def test_a_flipped_bit_is_found(promise, tmp_path):
    """Any bit of a weight or of a gradient; of an image one that matters.

    Of a micro-batch's gradient the lowest bits may be rounded away in the sum: then the update is the sound one.
    """
    places = {"weight": 32, "gradient": 32, "image": 8}
    poisoned(tmp_path / "sound", LAST)
    sound = bits(held(tmp_path / "sound")[0])
    for seed in promise.trials("N4", "a flipped bit in a step that is computed twice is found", few=6, many=200):
        with promise.trial(seed):
            place = [*places][seed % 3]
            bit = 31 - (7 * seed) % places[place]
            try:
                poisoned(tmp_path / str(seed), LAST, TWICE, FLIP.format(place, bit))
            except UserError as error:
                assert "step 5: computed twice, the step gave different results: " in str(error)
            else:
                assert (place, bit) in [("gradient", low) for low in range(3)], "not found"
                assert same(bits(held(tmp_path / str(seed))[0]), sound)


def test_a_flipped_bit_of_what_no_forward_changes_is_found(tmp_path, monkeypatch):
    def check(self, update, again, plain=determinism.DeterminismCheck.check):
        if update.step == 5:
            (momentum,) = self._model.optimizer.state[self._model.params["head.weight"]].values()
            momentum.view(torch.int32).view(-1)[3] ^= 1
        plain(self, update, again)

    monkeypatch.setattr(determinism.DeterminismCheck, "check", check)
    with pytest.raises(UserError, match=r"step 5: .*different results: momentum_buffer of head\.weight"):
        poisoned(tmp_path, LAST, TWICE)


def test_it_is_said_by_policy_and_else_nobody_notices(tmp_path):
    warn, bit = "train.replay={every: 3 steps, policy: warn}", FLIP.format("gradient", 24)
    warned = poisoned(tmp_path / "warn", LAST, warn, bit)
    (event,) = warned.tracker.events
    assert event[:2] == (5, "nondeterminism") and event[2]["names"] == ["gradient of head.weight"]
    silent = poisoned(tmp_path / "off", LAST, bit)
    poisoned(tmp_path / "sound", LAST)
    assert not silent.tracker.events
    ends = {name: bits(held(tmp_path / name)[0]) for name in ("warn", "off", "sound")}
    assert same(ends["warn"], ends["sound"]), "it went on with what was computed second"
    assert not same(ends["off"], ends["sound"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_one_flipped_bit_always_changes_the_print_of_a_tensor(dtype):
    t = torch.arange(24).reshape(2, 3, 4).to(dtype).permute(2, 0, 1)
    before = determinism.prints({"t": t})
    word = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    for place in range(24):
        for bit in range(1 if dtype == torch.bool else 8 * t.element_size()):
            changed = t.clone()
            mask = (1 << bit) if bit < 8 * t.element_size() - 1 else -(1 << bit)
            changed.view(word).as_strided((24,), (1,))[place] ^= mask
            assert determinism.prints({"t": changed}) != before
            if bit > 2 and place > 3:
                break


@pytest.mark.usefixtures("store")
def test_a_run_that_computes_its_past_differently_says_so(monkeypatch):
    """Resumed from step 5: the line of step 6 was logged before, and a bit has been flipped since."""
    import toy

    cut = run(stopping=stop_after(7), recipe=TOY)
    for step in (6, 7):
        (cut.folder.checkpoints / f"step-{step:09d}").rename(cut.folder.path / f"aside-{step}")

    def loss(self, net, parts, batch, at, plain=toy.ToyTask.loss):
        if at.step == 5 and not hasattr(self, "done"):
            self.done = True
            net.conv.weight.data.view(torch.int32)[0, 0, 0, 0] ^= 1 << 22
        return plain(self, net, parts, batch, at)

    monkeypatch.setattr(toy.ToyTask, "loss", loss)
    resumed = run(resume="")
    assert resumed.code == 0 and {e.data["name"] for e in resumed.events("nondeterminism")} >= {"train/loss"}


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_on_two_processes_each_is_compared():
    task = ONE_RANK.replace("poison: {}", "flip: weight, bit: 3").replace("steps: [6]", "steps: [5]").format(1)
    done, ran = on_two(task, TWICE, code=1)
    assert "step 5: computed twice, the step gave different results" in done.stderr and "on process 1" in done.stderr
    assert ran.events("nondeterminism") and ran.folder.info().status == "FAILED"
