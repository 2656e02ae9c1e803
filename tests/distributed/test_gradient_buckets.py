"""The order of DDP's gradient buckets, on which the last bits of three or more gradients depend."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from torch import distributed as dist
from torch import nn

from trainkit.distributed.runtime import _order_buckets


def _resumed(rank: int, world: int, file: str) -> None:
    """Three steps by one wrapper, and the third by another with the weights of two: they must have the same bits."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)

    def wrapped() -> nn.parallel.DistributedDataParallel:
        torch.manual_seed(0)
        layers = nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 2000), nn.Linear(2000, 10)
        net = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), gradient_as_bucket_view=True)
        _order_buckets(net)
        assert all(p.grad is None for p in net.parameters())
        return net

    def steps(net: nn.Module, numbers: range) -> None:
        for number in numbers:
            draw = torch.Generator().manual_seed(100 * number + rank)
            net(torch.randn(16, 64, generator=draw)).square().mean().backward()
            for p in net.parameters():
                assert p.grad is not None
                p.data -= 0.1 * p.grad
                p.grad = None

    whole, cut, resumed = wrapped(), wrapped(), wrapped()
    steps(whole, range(3))
    steps(cut, range(2))
    resumed.load_state_dict(cut.state_dict())
    steps(resumed, range(2, 3))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_buckets_have_their_order_from_the_first_step_on(world, tmp_path):
    multiprocessing.get_context("forkserver").set_forkserver_preload(["trainkit.distributed.runtime"])
    file = str(tmp_path / "store")
    torch.multiprocessing.start_processes(_resumed, (world, file), nprocs=world, start_method="forkserver")
