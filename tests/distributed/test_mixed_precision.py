"""Losses that are scaled (fp16) and bf16: overflows, and what a resumed run knows of them.

Accelerate refuses fp16 on a CPU; torch's scaler works there, so it is put in its place.
"""

from __future__ import annotations

import pytest
import torch
from accelerate.state import AcceleratorState

from tests.training.test_nonfinite import bits, held, poisoned, same
from trainkit.distributed.runtime import Runtime
from trainkit.errors import UserError

pytestmark = pytest.mark.usefixtures("unsent")

LONG = ["train.length=24 steps", "checkpoints={every: 1 steps, keep_last: 50}"]
OVERFLOW = "task={name: poisoned, jump: 1e36, steps: [5, 6, 13]}"
"""Gradients are finite, and infinite times a scale of 65536: that is the scaler's affair. The loss stays finite."""


def scale(patch: pytest.MonkeyPatch) -> None:
    """Let machines scale the loss as for fp16: by 2^16, twice as much after every four updates."""

    def init(self, recipe, plain=Runtime.__init__):
        plain(self, recipe)
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=4)
        self.accelerator.native_amp = True
        patch.setattr(type(self.accelerator), "mixed_precision", "fp16")
        self._scale = self.accelerator.scaler.state_dict()

    patch.setattr(Runtime, "__init__", init)


@pytest.fixture
def scaled(monkeypatch):
    scale(monkeypatch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A scaled run with three overflows, not interrupted."""
    with pytest.MonkeyPatch.context() as patch:
        scale(patch)
        poisoned(folder := tmp_path_factory.mktemp("scaled"), *LONG, OVERFLOW)
    return folder


@pytest.fixture
def anew():
    """Accelerate keeps the precision of a process, which is another one here."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


BF16 = ("train.precision=bf16", "checkpoints={every: 1 steps, keep_last: 50}")


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory):
    """A run in bf16, not interrupted."""
    AcceleratorState._reset_state(True)
    poisoned(folder := tmp_path_factory.mktemp("bf16"), *BF16)
    AcceleratorState._reset_state(True)
    return folder


def scales(folder) -> list[tuple[float, int]]:
    return [(c.state["scaler"]["scale"], c.state["scaler"]["_growth_tracker"]) for c in held(folder)]


def test_an_overflow_leaves_the_update_out_and_halves_the_scale(whole):
    by_step = {c.step: c for c in held(whole)}
    assert len(by_step) == 24 and by_step[24].state["left_out"] == []
    for step in (5, 6, 13):
        weights = [bits(by_step[s])["model"] for s in (step, step + 1)]
        assert same({"a": {"w": weights[0]["head.weight"]}}, {"a": {"w": weights[1]["head.weight"]}})
    told = [scale for scale, _ in scales(whole)]
    assert told[3] == 2.0**17 and told[5] == 2.0**16 and told[6] == 2.0**15, "up after four, down at each overflow"
    assert told[13] == told[12] / 2 and len(set(told)) >= 3


@pytest.mark.slow
def test_a_resumed_run_scales_as_an_uninterrupted_one(tmp_path, whole, scaled):
    for step in [4, 6, 7, 14]:
        rest = tmp_path / str(step)
        poisoned(rest, *LONG, OVERFLOW, at=whole / "checkpoints" / f"step-{step:09d}")
        assert same(bits(held(whole)[-1]), bits(held(rest)[-1])) and scales(rest) == scales(whole)[step:]


def test_with_the_scale_not_loaded_it_does_not(tmp_path, whole, scaled, monkeypatch):
    monkeypatch.setattr(torch.amp.GradScaler, "load_state_dict", lambda self, state: None)
    poisoned(tmp_path, *LONG, OVERFLOW, at=whole / "checkpoints" / "step-000000014")
    assert scales(tmp_path) != scales(whole)[14:]


def test_skipping_and_scaling_live_together(tmp_path, scaled):
    """An update that is skipped for its loss has been looked at by the scaler, which is to look at the next."""
    spoilt = "task={name: poisoned, poison: loss, steps: [5, 9]}"
    poisoned(tmp_path, *LONG, spoilt, "train.nonfinite=skip")
    by_step = {c.step: c for c in held(tmp_path)}
    assert by_step[24].state["left_out"] == [5, 9]
    assert same(bits(by_step[5]), bits(by_step[6])) and not same(bits(by_step[6]), bits(by_step[7]))


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_weight_that_is_no_number_is_seen_although_gradients_are_the_scalers_affair(tmp_path, scaled, value):
    """The scaler looks at gradients before they are divided by it."""
    with pytest.raises(UserError, match="step 6: the loss or a gradient is not finite"):
        poisoned(tmp_path, *LONG, f"task={{name: poisoned, poison: weight, value: {value}, steps: [6]}}")
    assert held(tmp_path)[-1].step == 6


@pytest.mark.parametrize("step", [3, 6, 11])
def test_bf16_resumes_to_the_same_bits(tmp_path, in_bf16, anew, step):
    poisoned(tmp_path, *BF16, at=in_bf16 / "checkpoints" / f"step-{step:09d}")
    assert same(bits(held(in_bf16)[-1]), bits(held(tmp_path)[-1]))


def test_bf16_is_not_float32(tmp_path, in_bf16, anew):
    poisoned(tmp_path, "checkpoints={every: null}")
    assert not same(bits(held(in_bf16)[-1]), bits(held(tmp_path)[-1]))
