"""Classes divided over processes: losses, gradients and centres against those of one process, and the bytes sent."""

from __future__ import annotations

import functools
import math
import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist

from trainkit.checkpoint import state_dict
from trainkit.errors import UserError
from trainkit.losses import class_shards
from trainkit.losses.class_shards import (
    ALL_GATHER,
    REDUCE_SCATTER,
    ClassShard,
    ShardedMarginHead,
    divided,
    divided_over,
    traffic,
)
from trainkit.losses.distillation import Centres, agreement
from trainkit.losses.margin import MarginHead, class_head, margin_loss
from trainkit.losses.margin_specs import AdaFace, ArcFace, CosFace, Head
from trainkit.losses.online_softmax import MarginTerms

N, C, D = 16, 101, 16
MARGINS = [ArcFace(m=0.45), CosFace(m=0.35), AdaFace(m=0.4), ArcFace(m=0.2, scale=300.0)]
WORLDS = [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)]
EXACT = 1e-6
"""Relative, in float32; measured are 4e-7 at most on 2 and 4 processes."""


def drawn():
    """Embeddings, centres, labels, the teacher's embeddings: of all processes."""
    draw = torch.Generator().manual_seed(3)
    x, centre, teacher = (torch.randn(n, D, generator=draw) for n in (N, C, N))
    label = torch.randint(C, (N,), generator=draw)
    label[:4] = torch.tensor([0, C - 1, 0, 50])  # the ends, and one that occurs twice
    x[::2] += 3 * centre[label[::2]]
    return x, centre * torch.rand(C, 1, generator=draw).add(0.5), label, teacher


def quality(rows: slice = slice(None)):
    return torch.linspace(-1, 1, N)[rows]


def of_one() -> dict[str, torch.Tensor]:
    """What one process computes of all rows with undivided heads: the mean loss and its gradients, and the centres."""
    x, centre, label, teacher = drawn()
    found = {}
    for at, margin in enumerate(MARGINS):
        head, own = MarginHead(C, D, margin.scale), x.clone().requires_grad_()
        head.weight.data.copy_(centre)
        total, _ = margin_loss(head(own), label, margin, quality(), 0.7, torch.linspace(0.5, 2, C))
        (total / N).backward()
        found |= {f"loss{at}": total.detach() / N, f"x{at}": own.grad, f"centre{at}": head.weight.grad}
    centres, own = Centres(C, D), x.clone().requires_grad_()
    centres.weight.copy_(centre)
    alpha = centres.update(label, x, teacher)
    total, _ = margin_loss(centres.scores(own, label, 64.0), label, ArcFace())
    (total / N).backward()
    return found | {"loss_d": total.detach() / N, "x_d": own.grad, "moved": centres.weight, "alpha": alpha.mean()}


def compute(rank: int, world: int, sample: float = 1.0) -> dict[str, torch.Tensor]:
    """The same on one of several processes; what each has some rows of is gathered on the first."""
    x, centre, label, teacher = drawn()
    b = N // world
    rows = slice(rank * b, (rank + 1) * b)
    found, by_row = {}, ClassShard(rank, world, N)

    def summed(loss):
        loss = loss.detach() / N
        if world > 1:
            dist.all_reduce(loss)
        return loss

    with divided_over(rank, world):
        for at, margin in enumerate(MARGINS):
            head, own = class_head(margin, C, D, Head(sharded=True)), x[rows].clone().requires_grad_()
            assert isinstance(head, ShardedMarginHead)
            head.weight.data.copy_(head.shard.part(centre))
            weights = torch.linspace(0.5, 2, C)
            total, _ = margin_loss(head(own, label[rows]), label[rows], margin, quality(rows), 0.7, weights)
            (total * (world / N)).backward()  # as the trainer scales it, before gradients are averaged
            found[f"loss{at}"] = summed(total)
            found[f"x{at}"] = by_row.whole(own.grad / world)
            found[f"centre{at}"] = head.shard.whole(head.weight.grad)
        centres, own = Centres(C, D, head=Head(sharded=True)), x[rows].clone().requires_grad_()
    centres.weight.copy_(centres.shard.part(centre))
    centres.unit()
    alpha = centres.move(label, agreement(x, teacher), teacher).mean()
    if world > 1:
        dist.all_reduce(alpha)
    total, _ = margin_loss(centres.scores(own, label[rows], 64.0), label[rows], ArcFace())
    (total * (world / N)).backward()
    moved = centres.shard.whole(centres.weight)
    return found | {"loss_d": summed(total), "x_d": by_row.whole(own.grad / world), "moved": moved, "alpha": alpha}


def sent(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Bytes that this process gives to collectives in a step of a head, by kind."""
    x, _, label, _ = drawn()
    rows = slice(rank * (N // world), (rank + 1) * (N // world))
    counted: dict[str, list[int]] = {}

    def counting(name, given):
        call = getattr(dist, name)

        @functools.wraps(call)
        def collective(*args, **named):
            counted.setdefault(name, []).append(args[given].nbytes)
            return call(*args, **named)

        return collective

    gather, scatter = (class_shards.collective(name).__name__ for name in (ALL_GATHER, REDUCE_SCATTER))
    names = {gather: 1, "all_reduce": 0, scatter: 1}
    kept = {name: getattr(dist, name) for name in (*names, "broadcast", "all_to_all", "all_gather")}
    for name, given in names.items():
        setattr(dist, name, counting(name, given))
    for name in kept.keys() - names.keys():
        setattr(dist, name, None)
    with divided_over(rank, world):
        head, own = class_head(ArcFace(), C, D, Head(sharded=True)), x[rows].clone().requires_grad_()
    total, _ = margin_loss(head(own, label[rows]), label[rows], ArcFace())
    total.backward()
    for name, call in kept.items():
        setattr(dist, name, call)
    known = {gather: "gather", scatter: "scatter"}
    return {known.get(name, name): torch.tensor(many) for name, many in counted.items()}


def sampled(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Rows of centres that got a gradient, by three draws of which the last repeats the first."""
    x, _, label, _ = drawn()
    rows = slice(rank * (N // world), (rank + 1) * (N // world))
    found = {}
    with divided_over(rank, world):
        head = class_head(ArcFace(), C, D, Head(sharded=True, sample=0.3))
    for at, seed in enumerate((1, 2, 1)):
        torch.default_generator.manual_seed(seed + rank)
        head.weight.grad = None
        terms = head(x[rows], label[rows])
        margin_loss(terms, label[rows], ArcFace())[0].backward()
        found[f"touched{at}"] = head.shard.whole(head.weight.grad.abs().sum(1) > 0)
        found[f"target{at}"] = ClassShard(rank, world, N).whole(terms.target.detach())
    return found | {"weight": head.shard.whole(head.weight)}


def gathered_and_cut(rank: int, world: int) -> dict[str, torch.Tensor]:
    """A tensor of three dimensions that goes in many portions to the first process, and a sum that it must keep."""
    class_shards._PORTION = 3 * 24
    shard = ClassShard(rank, world, C)
    whole = torch.arange(C * 6.0).view(C, 2, 3)
    kept, dropped = shard.whole(shard.part(whole)), shard.whole(shard.part(whole), keep=False)
    return {"kept": kept, "dropped": torch.tensor(dropped.shape)}


def _process(rank: int, world: int, kind: str, folder: str) -> None:
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found = globals()[kind](rank, world)
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    if world > 1:
        dist.destroy_process_group()


def on(world: int, kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """What the first of so many processes over gloo returns."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["trainkit.losses.distillation"])
    if world == 1:
        _process(0, 1, kind, str(folder))
    else:
        torch.multiprocessing.start_processes(
            _process, (world, kind, str(folder)), nprocs=world, start_method="forkserver"
        )
    return torch.load(folder / "found.pt")


@pytest.mark.parametrize("world", WORLDS)
def test_losses_gradients_and_centres_are_those_of_one_process(world, tmp_path):
    expected, found = of_one(), on(world, "compute", tmp_path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = float((found[name].double() - tensor.double()).norm() / tensor.double().norm())
        assert error < EXACT, (name, error)


@pytest.mark.parametrize("world", [2, 4])
def test_a_step_sends_the_bytes_of_the_formula(world, tmp_path):
    found, formula = on(world, "sent", tmp_path), traffic(N // world, D)
    gathers = found["gather"].tolist()
    assert gathers == [formula["all_gather"], formula["all_gather_backward"]]
    # What is reduced is of the rows of all processes.
    reduced = found["all_reduce"].tolist()
    assert reduced == [N * 4, 2 * N * 4] and sum(reduced) == world * formula["all_reduce"]
    assert found["scatter"].tolist() == [world * formula["reduce_scatter"]]


@pytest.mark.parametrize("world", [1, 2])
def test_negatives_are_sampled_and_classes_of_the_batch_are_always_in(world, tmp_path):
    found = on(world, "sampled", tmp_path)
    x, _, label, _ = drawn()
    touched = [found[f"touched{at}"] for at in range(3)]
    for drawn_rows in touched:
        assert drawn_rows[label].all()
        most = sum(max(math.ceil(0.3 * ClassShard(r, world, C).count), N) for r in range(world))
        assert len(label.unique()) < drawn_rows.sum() <= most < C
    assert torch.equal(touched[0], touched[2]) and not torch.equal(touched[0], touched[1])
    own = (F.normalize(x) * F.normalize(found["weight"][label])).sum(1)
    torch.testing.assert_close(found["target0"], own)


def test_a_head_that_is_evaluated_has_all_classes():
    head, (x, _, label, _) = class_head(ArcFace(), C, D, Head(sharded=True, sample=0.3)), drawn()
    terms = head.eval()(x, label)
    whole = F.normalize(x) @ F.normalize(head.weight).T
    assert isinstance(terms, MarginTerms)
    torch.testing.assert_close(terms.nearest, whole.scatter(1, label[:, None], -1.0).amax(1).detach())


@pytest.mark.parametrize("world", [2, 4])
def test_rows_are_gathered_in_portions(world, tmp_path):
    found = on(world, "gathered_and_cut", tmp_path)
    assert torch.equal(found["kept"], torch.arange(C * 6.0).view(C, 2, 3))
    assert found["dropped"].tolist() == [ClassShard(0, world, C).count, 2, 3]


@pytest.mark.parametrize("portion", [64, 64 * 7, 16 << 20])
@pytest.mark.parametrize(("classes", "size"), [(101, 16), (33, 7), (16, 5), (5, 3), (32, 1)])
def test_the_first_weights_are_those_of_an_undivided_head(monkeypatch, classes, size, portion):
    monkeypatch.setattr(class_shards, "_PORTION", portion)
    torch.manual_seed(4)
    whole, after = torch.empty(classes, size).normal_(0.0, 0.01), torch.rand(3)
    for world in (1, 2):
        parts = []
        for rank in range(world):
            torch.manual_seed(4)
            parts.append(ClassShard(rank, world, classes).normal(size, 0.01))
            assert torch.equal(torch.rand(3), after)
        assert torch.equal(torch.cat(parts), whole)


def test_shards_hold_each_class_once():
    for classes, world in ((101, 4), (8, 4), (85_742, 64)):
        shards = [ClassShard(rank, world, classes) for rank in range(world)]
        assert [i for s in shards for i in range(s.first, s.stop)] == list(range(classes))
        assert max(s.count for s in shards) - min(s.count for s in shards) <= 1


def test_too_few_classes_are_refused():
    with divided_over(0, 4), pytest.raises(UserError, match="7 classes over 4 processes; expected at least 2"):
        ShardedMarginHead(7, D, 64.0)
    with pytest.raises(ValueError, match="sample is for a sharded head"):
        Head(sample=0.1)


def state(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of a head after two steps, as the first process would write them."""
    x, _, label, _ = drawn()
    rows = slice(rank * (N // world), (rank + 1) * (N // world))
    torch.manual_seed(1)
    with divided_over(rank, world):
        head = class_head(ArcFace(), C, D, Head(sharded=True))
    optimizer = torch.optim.Adam(head.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        margin_loss(head(x[rows], label[rows]), label[rows], ArcFace())[0].backward()
        optimizer.step()
    shards = divided(head)
    tensors, scalars = state_dict.optimizer_tensors(
        optimizer, head.named_parameters(), rank == 0, state_dict.Copies(), shards
    )
    model = state_dict.module_tensors(head, rank == 0, state_dict.Copies(), divided=shards)
    assert bool(tensors) == bool(model) == (rank == 0)
    return {"scalars": scalars, "optimizer": tensors, "model": model}


@pytest.mark.parametrize("world", [1, 2])
def test_a_state_is_that_of_all_classes_and_goes_on_with_any_number_of_processes(world, tmp_path):
    saved = on(world, "state", tmp_path)
    assert saved["model"]["weight"].shape == saved["optimizer"]["weight/exp_avg"].shape == (C, D)
    for other in (1, 2, 4):
        came = []
        for rank in range(other):
            with divided_over(rank, other):
                head = class_head(ArcFace(), C, D, Head(sharded=True))
            optimizer = torch.optim.Adam(head.parameters())
            shards = divided(head)
            state_dict.load_module(head, saved["model"], "file", shards)
            named = list(head.named_parameters())
            state_dict.load_optimizer(optimizer, named, saved["optimizer"], saved["scalars"], divided=shards)
            (entries,) = optimizer.state.values()
            assert float(entries["step"]) == 2
            came.append({"weight": head.weight.detach(), **entries})
        for name, whole in (("weight", saved["model"]["weight"]), ("exp_avg", saved["optimizer"]["weight/exp_avg"])):
            assert torch.equal(torch.cat([part[name] for part in came]), whole)


def test_a_state_of_other_classes_is_refused():
    with divided_over(1, 2):
        head = class_head(ArcFace(), C, D, Head(sharded=True))
    with pytest.raises(UserError, match=r"weight is float32 \(102, 16\) instead of float32 \(50, 16\)"):
        state_dict.load_module(head, {"weight": torch.zeros(C + 1, D)}, "file", divided(head))
