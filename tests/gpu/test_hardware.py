"""What only an NVIDIA GPU can show of the parts that watch it. `make gpu` runs these with plain pytest."""

from __future__ import annotations

import time

import pytest
import torch

from trainkit.models.compilation import compile_in_place
from trainkit.rng import reseed
from trainkit.speed import device_timeline
from trainkit.speed.sync_points import Log, cuda_waits
from trainkit.tracking.system_load import Load
from trainkit.training.out_of_memory import is_out_of_memory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
DEVICE = torch.device("cuda", 0)


def busy(seconds: float = 0.2) -> torch.Tensor:
    """Give the device work for so long, without waiting for it."""
    torch.cuda._sleep(round(seconds * 1e9))
    return torch.ones((), device=DEVICE)


def test_memory_that_runs_out_is_told_from_other_errors():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, device=DEVICE)
    assert is_out_of_memory(caught.value)
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2, device=DEVICE) @ torch.ones(3, device=DEVICE)
    assert not is_out_of_memory(caught.value)


def test_a_wait_of_the_host_is_seen_with_its_line():
    log = Log()
    value = busy(0.0)
    with cuda_waits(log.seen):
        value.item()
    assert log.counts.total() == 1
    assert any("test_hardware.py" in place.where for place in log.counts)


def test_work_that_was_queued_is_timed_on_the_device():
    timeline = device_timeline.of(DEVICE)
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    queued = time.perf_counter()
    busy(0.2)
    queued = time.perf_counter() - queued
    ended.record()
    torch.cuda.synchronize()
    assert timeline is not None and queued < 0.1 and began.elapsed_time(ended) > 50


def test_utilisation_and_memory_of_the_device_are_read():
    pytest.importorskip("pynvml")
    kept = torch.ones(1 << 28, device=DEVICE)  # 1 GiB
    load = Load()
    named = load.metrics(load.read())
    assert "gpus" not in load.absent, load.absent
    assert named["system/gpu_0_memory_usage_megabytes"] > 1000
    assert {"system/gpu_0_utilization_percentage", "system/gpu_0_power_usage_watts"} <= named.keys()
    del kept


def test_random_numbers_of_the_device_repeat():
    drawn = []
    for step in (3, 3, 4):
        reseed(DEVICE, 0, step, 0, 0)
        drawn.append(torch.rand(8, device=DEVICE))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_what_a_cuda_graph_returned_is_kept_when_it_runs_again(mode):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(DEVICE)
    given = [torch.randn(16, 64, device=DEVICE) for _ in range(6)]
    true = [net(x).detach().clone() for x in given]
    compile_in_place(net, mode)
    kept = []
    for x in given:
        torch.compiler.cudagraph_mark_step_begin()
        out = net(x)
        out.sum().backward()
        kept.append(out.detach())
    for out, wanted in zip(kept, true, strict=True):
        torch.testing.assert_close(out, wanted, rtol=1e-3, atol=1e-3)
