"""Norms: batch norm over processes against one process with all images, and groups of channels."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from trainkit.errors import UserError
from trainkit.models import norms
from trainkit.models.bisenet import BiSeNetV2
from trainkit.models.norms import SyncBatchNorm2d, convert, count_groups

SHARES = (3, 2)
"""Images of each of two processes: not equally many."""


def small() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4))
    for norm in (net[1], net[4]):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias)
    return net


def pictures() -> torch.Tensor:
    return 0.5 + torch.randn(sum(SHARES), 3, 7, 9, generator=torch.Generator().manual_seed(1))


def step(net: nn.Module, x: torch.Tensor, of: int) -> dict[str, torch.Tensor]:
    """Two forwards and one backward of a loss that is divided by `of` images; what came of it."""
    net(x + 1)
    x = x.clone().requires_grad_()
    out = net(x)
    weights = torch.linspace(-1, 1, out[0].numel()).view(out[0].shape)
    ((out * weights).sum() / of + (out**3).sum() / of / 100).backward()
    return {
        "out": out.detach(),
        "x": x.grad,
        **{f"grad.{name}": p.grad for name, p in net.named_parameters()},
        **{name: b.clone() for name, b in net.named_buffers()},
    }


def put_together(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What the processes have, as one process would: samples one after another, gradients summed, buffers equal."""
    whole = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        if name in ("out", "x"):
            whole[name] = torch.cat(values)
        elif name.startswith("grad."):
            whole[name] = sum(values)
        else:
            assert all(torch.equal(values[0], value) for value in values)
            whole[name] = values[0]
    return whole


class Threads:
    """Two processes played by two threads: what one sends, the other receives."""

    def __init__(self, monkeypatch):
        self.sent, self.barrier, self.rank = {}, threading.Barrier(2), threading.local()
        monkeypatch.setattr(norms, "_world", lambda: 2)
        monkeypatch.setattr(norms, "_gather", self.gather)
        monkeypatch.setattr(norms, "_reduce", lambda values: self.gather(values).sum(0))

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        self.sent[self.rank.now] = values
        self.barrier.wait(20)
        out = torch.stack([self.sent[0], self.sent[1]])
        self.barrier.wait(20)
        return out

    def run(self, work) -> list:
        out = [None, None]

        def one(rank: int) -> None:
            self.rank.now = rank
            try:
                out[rank] = work(rank)
            except BaseException:
                self.barrier.abort()
                raise

        threads = [threading.Thread(target=one, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert None not in out
        return out


def check(parts: list[dict[str, torch.Tensor]], momentum: float | None = 0.1) -> None:
    net = small()
    for norm in (net[1], net[4]):
        norm.momentum = momentum
    expected, found = step(net, pictures(), sum(SHARES)), put_together(parts)
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("momentum", [0.1, None])
def test_two_processes_normalise_learn_and_remember_as_one_with_all_pictures(monkeypatch, momentum):
    threads = Threads(monkeypatch)

    def work(rank: int):
        net = convert(threads_net, "sync") if rank == 0 else convert(other, "sync")
        for norm in (net[1], net[4]):
            norm.momentum = momentum
        return step(net, pictures().split(SHARES)[rank], sum(SHARES))

    threads_net, other = small(), small()
    check(threads.run(work), momentum)


def _gloo(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    out = step(convert(small(), "sync"), pictures().split(SHARES)[rank], sum(SHARES))
    torch.save(out, f"{file}.{rank}")
    dist.destroy_process_group()


def test_nothing_is_lost_where_the_mean_is_a_thousand_deviations(monkeypatch):
    threads, x = Threads(monkeypatch), pictures() + 1000
    nets = [convert(nn.BatchNorm2d(3), "sync") for _ in SHARES]
    out = torch.cat(threads.run(lambda rank: nets[rank](x.split(SHARES)[rank])))
    exact = F.batch_norm(x.double(), None, None, training=True).float()
    # Squares less the square of the mean would be off by a tenth.
    assert (out - exact).abs().max() < 1e-3
    torch.testing.assert_close(nets[1].running_var, 0.9 + 0.1 * x.var((0, 2, 3)), rtol=1e-4, atol=0)


@pytest.mark.slow
def test_two_processes_of_gloo_do_so_too(tmp_path):
    file = tmp_path / "meet"
    torch.multiprocessing.spawn(_gloo, (str(file),), nprocs=2)
    check([torch.load(f"{file}.{rank}") for rank in (0, 1)])


def test_statistics_are_float32_and_the_dtype_is_kept_under_mixed_precision(monkeypatch):
    threads, x = Threads(monkeypatch), pictures().bfloat16()
    nets = [convert(nn.BatchNorm2d(3), "sync") for _ in SHARES]

    def work(rank: int):
        mine = x.split(SHARES)[rank].clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = nets[rank](mine)
        out.float().square().sum().backward()
        assert (out.dtype, mine.grad.dtype) == (torch.bfloat16, torch.bfloat16)
        return out

    out = torch.cat(threads.run(work)).float()
    expected = F.batch_norm(x.float(), None, None, training=True)
    assert (out - expected).abs().max() < 0.02
    torch.testing.assert_close(nets[0].running_mean, 0.1 * x.float().mean((0, 2, 3)))
    assert nets[0].running_mean.dtype == torch.float32


def test_without_scale_and_without_memory(monkeypatch):
    threads, x = Threads(monkeypatch), pictures()
    nets = [convert(nn.BatchNorm2d(3, affine=False, track_running_stats=False), "sync").eval() for _ in SHARES]
    out = torch.cat(threads.run(lambda rank: nets[rank](x.split(SHARES)[rank])))
    torch.testing.assert_close(out, F.batch_norm(x, None, None, training=True), rtol=1e-5, atol=1e-5)


def test_alone_and_in_evaluation_it_is_batch_norm_with_the_same_names():
    plain = small()
    synced = convert(copy.deepcopy(plain), "sync")
    assert sum(isinstance(m, SyncBatchNorm2d) for m in synced.modules()) == 2
    assert list(synced.state_dict()) == list(plain.state_dict())
    for a, b in ((plain, synced), (plain.eval(), synced.eval())):
        assert torch.equal(a(pictures()), b(pictures()))
    for name, value in plain.state_dict().items():
        assert torch.equal(synced.state_dict()[name], value)
    assert convert(synced, "sync")[1] is synced[1]


def test_evaluation_asks_no_other_process(monkeypatch):
    monkeypatch.setattr(norms, "_world", lambda: 2)
    asked = []
    monkeypatch.setattr(norms, "_gather", lambda values: asked.append(values) or values[None])
    plain, x = small().eval(), pictures()
    net = convert(copy.deepcopy(plain), "sync")
    assert torch.equal(net(x), plain(x)) and not asked
    net.train()(x)
    assert len(asked) == 2  # where it learns, each of its norms asks


@pytest.mark.parametrize(
    ("channels", "most", "groups"),
    [(64, 32, 16), (128, 32, 32), (96, 32, 24), (24, 32, 6), (7, 32, 1), (3, 32, 1), (128, 8, 8), (50, 32, 10)],
)
def test_groups_divide_the_channels_and_are_not_too_small(channels, most, groups):
    assert count_groups(channels, most) == groups


def test_group_norm_keeps_scale_and_shift_and_sees_each_picture_alone():
    plain = BiSeNetV2(4, width=0.25, aux=False)
    nn.init.uniform_(plain.context.bn.weight)
    scale = plain.context.bn.weight.clone()
    net = convert(plain, "group")
    kinds = [m for m in net.modules() if isinstance(m, nn.GroupNorm)]
    assert len(kinds) > 30 and not any(isinstance(m, nn.BatchNorm2d) for m in net.modules())
    assert torch.equal(net.context.bn.weight, scale)
    assert not net.semantic[1][0].project.bn.weight.any()  # still begins at 0
    for m in net.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    x = torch.randn(3, 3, 32, 64)
    out = net(x)["logits"][0]
    torch.testing.assert_close(out[1:2], net(x[1:2])["logits"][0], rtol=1e-4, atol=1e-5)
    assert net.context.bn(torch.randn(2, 32, 1, 1)).abs().max() > 0.1
    out.sum().backward()


def test_norms_of_timm_keep_their_activation_and_others_are_refused():
    from timm.layers import BatchNormAct2d

    x = torch.randn(2, 8, 5, 5)
    norm = BatchNormAct2d(8)
    nn.init.normal_(norm.bias)
    net = nn.Sequential(copy.deepcopy(norm))
    assert torch.equal(convert(net, "sync")(x), norm(x)) and isinstance(net[0], SyncBatchNorm2d)
    grouped = convert(nn.Sequential(copy.deepcopy(norm)), "group")(x)
    torch.testing.assert_close(grouped, F.relu(F.group_norm(x, 2, norm.weight, norm.bias)))

    class Odd(nn.BatchNorm2d):
        pass

    with pytest.raises(UserError, match="Odd"):
        convert(nn.Sequential(Odd(3)), "group")


def test_a_norm_alone_keeps_its_mode_and_what_is_frozen():
    norm = nn.BatchNorm2d(8).eval().requires_grad_(False)
    for kind in ("sync", "group"):
        made = convert(norm, kind)
        assert not made.training and not any(p.requires_grad for p in made.parameters())
