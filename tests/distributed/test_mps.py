"""MPS as the device of a training, without a Mac: what a GPU would hold says `mps`, and must not be float64.

There is nothing here that a Mac computes: no test ran on one.
"""

from __future__ import annotations

import pytest
import sync_emulation
import torch
from runs import PLUGIN, TOY
from sync_emulation import Following

from trainkit.config.run_request import RunRequest, load
from trainkit.data import augment
from trainkit.data.volumes import augment_intensity
from trainkit.diagnostics import sync_audit
from trainkit.distributed import launch_settings
from trainkit.distributed.runtime import Runtime
from trainkit.losses.segmentation_2d import ohem_weights
from trainkit.models.pointrend import points_near_boundaries
from trainkit.training.nonfinite import AsyncScalar
from trainkit.training.trainer import Trainer

MPS = torch.device("mps", 0)


@pytest.fixture
def mps(monkeypatch):
    """Have followed tensors be of MPS, for all code; the calls that waited for it, and what it cannot hold."""
    called: list[str] = []
    hold = Following.hold

    def held(self, x):
        if isinstance(x, torch.Tensor) and x.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")
        hold(self, x)

    monkeypatch.setattr(Following, "hold", held)
    monkeypatch.setattr(sync_emulation, "_GPU", MPS)
    where = sync_emulation._WHERE
    properties = sync_emulation._PROPERTIES
    monkeypatch.setitem(where, properties.device.__get__, MPS)
    monkeypatch.setitem(where, properties.is_cuda.__get__, False)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: called.append("synchronize"))
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 3 * 10**9)
    return called


@pytest.fixture
def runtime(store, monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))
    made = Runtime(load(RunRequest(TOY, (), ("toy",))))
    yield made
    made.close()


def following() -> Following:
    return Following(lambda what: None, lambda file: True)


def test_a_whole_training_holds_no_float64_there(mps, runtime, monkeypatch):
    words = ("train.nonfinite=skip", "log.every=2 steps", "loader.pin=true")
    recipe = sync_emulation.alone(load(RunRequest(TOY, words, ("toy",))), 6)
    monkeypatch.setattr(runtime, "device", MPS)
    monkeypatch.setattr(runtime, "at_once", False)
    with following(), Trainer(recipe, recipe.data.open(0), runtime) as trainer:
        watched = sync_audit.watch(trainer, sync_audit.Log([]), 6)
    assert watched > 0 and "synchronize" in mps


def test_float64_is_what_it_cannot_hold(mps):
    with following(), pytest.raises(TypeError, match="float64"):
        torch.zeros(2, device=MPS).double()


WORK = {
    "ohem": lambda place: ohem_weights(place(torch.rand(2, 8, 8)), place(torch.rand(2, 8, 8)) > 0.2),
    "contrast": lambda place: augment._contrast(
        place(torch.rand(2, 3, 8, 8)), place(torch.rand(2, len(augment.NUMBERS)))
    ),
    "moments": lambda place: augment_intensity._moments(place(torch.rand(2, 1, 4, 4, 4)))[1],
}


@pytest.mark.parametrize("name", WORK)
def test_what_is_float64_elsewhere_is_float32_there_and_nearly_the_same(name, mps):
    torch.manual_seed(0)
    expected = WORK[name](lambda x: x)
    torch.manual_seed(0)
    with following():
        got = WORK[name](lambda x: x.to(MPS)).cpu()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected)


def test_points_are_drawn_there(mps):
    with following():
        points = points_near_boundaries(torch.rand(2, 8, 8).to(MPS), 5, 2.0).cpu()
    assert points.shape == (2, 5, 2) and points.ge(0).all() and points.lt(1).all()


def test_batches_arrive_whole_and_without_float64(mps, runtime, monkeypatch):
    batch = {"spacing": torch.tensor([[1.5, 0.7, 0.7]], dtype=torch.float64), "label": torch.tensor([3])}
    monkeypatch.setattr(runtime, "device", MPS)
    monkeypatch.setattr(runtime, "at_once", False)
    with following() as held:
        placed = runtime.to_device(batch)
        assert all(held.holds(value) for value in placed.values())
        assert placed["spacing"].dtype == torch.float32 and placed["label"].dtype == torch.int64


def test_a_number_is_read_when_its_copy_is_whole(mps):
    """A copy that is not waited for would be read before it is there: nothing on MPS says when."""
    waited = []
    with Following(waited.append, lambda file: True):
        scalar = AsyncScalar(torch.ones((), device=MPS) * 2, 0)
    assert waited == [".copy_"] and scalar.read() == 2.0


def test_memory_and_waiting_ask_mps(mps, runtime, monkeypatch):
    monkeypatch.setattr(runtime, "device", MPS)
    assert runtime.memory() == {"speed/peak_memory_gb": 3.0}
    runtime.synchronize()
    assert mps == ["synchronize"]


def test_it_is_taken_where_there_is_one_and_said_so(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert not launch_settings.on_cpu()
    assert str(launch_settings.device(MPS)) == "mps:0 (found)" and launch_settings._device_precision() == "no"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert launch_settings.on_cpu()
