"""The forecast that `cp` prints, and the image sizes that are chosen by it."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainkit.autoconfig import fine_tuning, forecast

PACE = forecast.Pace(160, predicted=0.01, trained=0.05, busy=1.0)
LENGTH = forecast.Length(240, {"val": 100}, steps=100, batch=16, times=8, classes=2)


class Slow(nn.Module):
    """Sleep 2 ms an image forward, and 4 ms in training."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        time.sleep(len(images) * (0.004 if self.training else 0.002))
        return images.mean((2, 3)) @ self.weight


def test_a_run_takes_the_sum_of_its_parts():
    parts = [forecast.START, 240 * (0.01 + 2 * forecast.FIT), 2 * 100 * 0.01, 100 * 16 * 0.05, 8 * 100 * 0.01]
    assert forecast.seconds(PACE, LENGTH) == pytest.approx(sum(parts))
    read = replace(PACE, read=0.1)
    assert forecast.seconds(read, LENGTH) == pytest.approx(sum(parts) + 340 * 0.1), "each image once"
    held = replace(LENGTH, budget=0.01)
    assert forecast.seconds(PACE, held) < forecast.seconds(PACE, LENGTH), "evaluations that cost too much are left out"
    test = replace(LENGTH, evaluated={"val": 100, "test": 50})
    assert forecast.seconds(PACE, test) == pytest.approx(sum(parts) + 3 * 50 * 0.01), "tried twice, and run once"


def test_larger_images_and_busy_machines_take_longer():
    assert PACE.at(320).trained == pytest.approx(0.2)
    busy = replace(PACE, predicted=0.03, trained=0.15, busy=3.0)
    assert (busy.idle.trained, busy.idle.busy) == (pytest.approx(PACE.trained), 1.0)
    assert forecast.seconds(busy, LENGTH) == pytest.approx(3 * forecast.seconds(PACE, LENGTH))


def test_a_network_is_timed(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    pace = forecast.measure(Slow(), 16)
    assert 0.002 <= pace.predicted < 0.004 <= pace.trained and pace.busy > 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert 0.001 < forecast.measure(Slow(), 16).trained < 0.004, "by more threads"
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("shortest", "native", "fixed", "sides"),
    [
        (48, 224, False, [160]),
        (240, 224, False, [160, 224]),
        (2000, 224, False, [160, 224, 288]),
        (2000, 160, False, [160]),
        (2000, 224, True, [224]),
        (2000, 128, False, [128]),
    ],
)
def test_images_are_not_enlarged_beyond_the_smallest_size(shortest, native, fixed, sides):
    config = SimpleNamespace(input_size=(3, native, native), fixed_input_size=fixed)
    assert fine_tuning.sides(shortest, config) == sides


@pytest.mark.parametrize(("trained", "gpu", "side"), [(1e-4, False, 288), (0.1, False, 160), (1e-4, True, 224)])
def test_the_largest_size_is_chosen_whose_run_is_short(tmp_path, monkeypatch, trained, gpu, side):
    monkeypatch.setattr(fine_tuning, "_pace", lambda *args: replace(PACE, trained=trained, predicted=trained / 4))
    monkeypatch.setattr(fine_tuning, "_on_gpu", lambda: gpu)
    fitted = fine_tuning.Fitted({"data": {}})
    weights = fine_tuning.Weights("a.safetensors", "a", tmp_path / "a.safetensors")
    images = fine_tuning.Images(240, {"val": 100}, 2, (600, 400), 0.0)
    config = SimpleNamespace(input_size=(3, 224, 224), fixed_input_size=False)
    fine_tuning.put_size(fitted, weights, config, images, LENGTH)
    assert fitted.get("data.image_size") == side
    why = fitted.notes["data", "image_size"].text
    assert why.startswith("images are 600 x 400 px") and ("224 px takes about" in why) == (side == 160)
    assert bool(fitted.time) != gpu, "timed on the CPU"
