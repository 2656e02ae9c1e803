"""Losses of retrieval against plain loops and pytorch-metric-learning."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import ROOT, _port
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd import gradcheck

from trainkit.config.validation import validate
from trainkit.losses import retrieval
from trainkit.losses.retrieval import Contrast, Identity, Matching, Triplet

LABELS = st.lists(st.integers(0, 3), min_size=1, max_size=9)


def features(count: int, width: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dot(a, b) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def cosine(a, b) -> float:
    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


def distance(a, b) -> float:
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def mates(labels, i, same=True):
    return [j for j, label in enumerate(labels) if j != i and (label == labels[i]) == same]


def plain_triplet(x, labels, margin):
    out = []
    for i in range(len(x)):
        p, n = mates(labels, i), mates(labels, i, same=False)
        if p and n:
            gap = max(distance(x[i], x[j]) for j in p) - min(distance(x[i], x[j]) for j in n)
            out.append(math.log1p(math.exp(gap)) if margin == "soft" else max(0.0, margin + gap))
    return mean(out)


def plain_contrast(x, labels, temperature):
    out = []
    for i in range(len(x)):
        p, everyone = mates(labels, i), [j for j in range(len(x)) if j != i]
        if p:
            total = sum(math.exp(cosine(x[i], x[j]) / temperature) for j in everyone)
            out.append(mean(-math.log(math.exp(cosine(x[i], x[j]) / temperature) / total) for j in p))
    return mean(out)


def one_way(x, labels, y, others, temperature):
    """KL of the softmax of similarities against the labels, mean over rows that have a match."""
    out = []
    for a, label in zip(x, labels, strict=True):
        matches = [label == other for other in others]
        if any(matches):
            power = [math.exp(cosine(a, b) / temperature) for b in y]
            p = [v / sum(power) for v in power]
            q = [match / sum(matches) for match in matches]
            out.append(sum(p * math.log(p / (q + 1e-8)) for p, q in zip(p, q, strict=True)))
    return mean(out)


def both_ways(query, query_label, gallery, gallery_label, temperature):
    return one_way(query, query_label, gallery, gallery_label, temperature) + one_way(
        gallery, gallery_label, query, query_label, temperature
    )


@settings(max_examples=30, deadline=None)
@given(labels=LABELS, seed=st.integers(0, 99))
def test_losses_of_records_are_the_formulas_in_plain_loops(labels, seed):
    x, label = features(len(labels), seed=seed), torch.tensor(labels)
    rows = x.tolist()
    for margin in ("soft", 0.3, 0.0):
        assert retrieval.triplet(x, label, margin).item() == pytest.approx(
            plain_triplet(rows, labels, margin), abs=1e-9
        )
    assert retrieval.contrast(x, label, 0.3).item() == pytest.approx(plain_contrast(rows, labels, 0.3), abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(asked=LABELS, held=LABELS, seed=st.integers(0, 99))
def test_matching_is_the_formula_in_plain_loops(asked, held, seed):
    query, gallery = features(len(asked), seed=seed), features(len(held), seed=seed + 100)
    loss = retrieval.matching(query, torch.tensor(asked), gallery, torch.tensor(held), 0.2)
    matched = [i for i, label in enumerate(asked) if label in held]
    wanted = both_ways(query.tolist(), asked, gallery.tolist(), held, 0.2) if matched else 0.0
    assert loss.item() == pytest.approx(wanted, abs=1e-9)


def sets_of(count: int, seed: int):
    """Which of three sets of modalities each query is of, -1 for padding; the sets have 1, 2 and 2 modalities."""
    which = torch.randint(-1, 3, (count,), generator=torch.Generator().manual_seed(seed))
    return which, which == torch.arange(3)[:, None], torch.tensor([1, 2, 2])


@settings(max_examples=30, deadline=None)
@given(asked=LABELS, held=LABELS, seed=st.integers(0, 99))
def test_sets_of_modalities_are_matched_one_by_one_and_averaged_by_their_size(asked, held, seed):
    query, gallery = features(len(asked), seed=seed), features(len(held), seed=seed + 100)
    which, asks, size = sets_of(len(asked), seed)
    inside = torch.rand(len(held), generator=torch.Generator().manual_seed(seed)) < 0.8
    loss = retrieval.matching(
        query, torch.tensor(asked), gallery, torch.tensor(held), 0.2, asks, size, in_gallery_G=inside
    )
    rows = [i for i in range(len(held)) if inside[i]]
    shown, labels = [gallery[i].tolist() for i in rows], [held[i] for i in rows]
    by_size = {1: [], 2: []}
    for s in range(3):
        mine = [i for i in range(len(asked)) if which[i] == s]
        if any(asked[i] in labels for i in mine):
            values = both_ways([query[i].tolist() for i in mine], [asked[i] for i in mine], shown, labels, 0.2)
            by_size[int(size[s])].append(values)
    assert loss.item() == pytest.approx(mean(mean(v) for v in by_size.values() if v), abs=1e-9)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_identity_is_the_formula_in_plain_loops(smoothing):
    logits, label = features(4, 5), torch.tensor([0, 4, 4, 2])
    wanted = []
    for row, right in zip(logits.tolist(), label.tolist(), strict=True):
        total = math.log(sum(math.exp(v) for v in row))
        targets = [(1 - smoothing) * (c == right) + smoothing / 5 for c in range(5)]
        wanted.append(-sum(t * (v - total) for t, v in zip(targets, row, strict=True)))
    assert retrieval.identity(logits, label, smoothing).tolist() == pytest.approx(wanted)


def test_padding_changes_neither_the_loss_nor_a_gradient():
    query, gallery = features(5).requires_grad_(), features(4, seed=1).requires_grad_()
    asked, held = torch.tensor([0, 1, 1, 2, 0]), torch.tensor([0, 1, 2, 1])
    asks, size = torch.tensor([[1, 0, 1, 0, 0], [0, 1, 0, 1, 1]]).bool(), torch.tensor([1, 2])
    plain = retrieval.matching(query, asked, gallery, held, 0.1, asks, size)
    wanted = torch.autograd.grad(plain, (query, gallery))
    wide = torch.cat([query, query.new_zeros(3, 3)])
    labels, asks = torch.cat([asked, asked.new_full((3,), -1)]), torch.cat([asks, asks.new_zeros(2, 3)], 1)
    more, kept = torch.cat([gallery, features(2, seed=2)]), torch.tensor([True] * 4 + [False] * 2)
    padded = retrieval.matching(wide, labels, more, torch.cat([held, held[:2]]), 0.1, asks, size, kept)
    torch.testing.assert_close(padded, plain)
    for a, b in zip(torch.autograd.grad(padded, (query, gallery)), wanted, strict=True):
        torch.testing.assert_close(a, b)


LOSSES = {
    "soft": lambda x, label: retrieval.triplet(x, label, "soft"),
    "hinge": lambda x, label: retrieval.triplet(x, label, 0.3),
    "contrast": lambda x, label: retrieval.contrast(x, label, 0.5),
    "matching": lambda x, label: retrieval.matching(x[:4], label[:4], x[4:], label[4:], 0.5),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_differences(name):
    label = torch.tensor([0, 0, 1, 2, 0, 1, 2, 2])
    assert gradcheck(lambda x: LOSSES[name](x, label), features(8).requires_grad_())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("labels", [[0] * 6, list(range(6)), [0, 0, 1, 1, 0, 1]], ids=["one", "all new", "alike"])
def test_batches_without_pairs_and_with_equal_rows_have_finite_gradients(name, labels):
    x = torch.ones(6, 3, requires_grad=True)
    loss = LOSSES[name](x, torch.tensor(labels))
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(x.grad).all()
    if labels == list(range(6)):
        assert loss == 0 and not x.grad.any()


def test_nothing_to_match_is_a_loss_of_zero_with_a_gradient_of_zero():
    query, gallery = torch.zeros(0, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    label = torch.tensor([0, 1, 0, 1])
    loss = retrieval.matching(
        query, label[:0], gallery, label, 0.02, torch.zeros(15, 0, dtype=torch.bool), label.new_ones(15)
    )
    loss.backward()
    assert loss == 0 and not gallery.grad.any() and query.grad.shape == (0, 3)
    query = torch.randn(2, 3, requires_grad=True)
    loss = retrieval.matching(query, label[:2], gallery[:0], label[:0], 0.02)
    loss.backward()
    assert loss == 0 and not query.grad.any()


def test_half_precision_is_computed_in_single():
    x, label = features(8).bfloat16(), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    for loss in LOSSES.values():
        value = loss(x, label)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, loss(x.float(), label))


def test_blocks_say_what_is_wrong():
    for block, words in [
        (Identity, {"smoothing": 1.0}),
        (Triplet, {"margin": -0.1}),
        (Triplet, {"weight": 0.0}),
        (Matching, {"temperature": 0.0}),
        (Contrast, {"temperature": math.nan}),
    ]:
        with pytest.raises(ValueError, match=next(iter(words))):
            validate(block, words, {})


@pytest.mark.parametrize("name", LOSSES)
def test_no_loss_looks_at_a_value_on_the_host(name):
    """Tensors without values: whatever asks for one, such as a branch or a selection by a mask, raises here."""
    with FakeTensorMode():
        x, label = torch.randn(8, 3, requires_grad=True), torch.zeros(8, dtype=torch.int64)
        LOSSES[name](x, label).backward()
        with pytest.raises(DataDependentOutputException):
            bool(label.sum() > 0)


def test_losses_are_those_of_pytorch_metric_learning():
    losses, miners = (pytest.importorskip(f"pytorch_metric_learning.{name}") for name in ("losses", "miners"))
    distances = pytest.importorskip("pytorch_metric_learning.distances")
    x, label = features(24, 8), torch.arange(24) % 5
    euclid = distances.LpDistance(normalize_embeddings=False)
    hard = miners.BatchHardMiner(distance=euclid)(x, label)
    for margin, soft in (("soft", True), (0.3, False)):
        theirs = losses.TripletMarginLoss(0.0 if soft else margin, smooth_loss=soft, distance=euclid)
        if not soft:  # theirs is the mean over triplets that cost something
            theirs.reducer = pytest.importorskip("pytorch_metric_learning.reducers").MeanReducer()
        ours = retrieval.triplet(x, label, margin)
        assert ours.item() == pytest.approx(theirs(x, label, hard).item(), rel=1e-6)
    assert retrieval.contrast(x, label, 0.2).item() == pytest.approx(losses.SupConLoss(0.2)(x, label).item(), rel=1e-5)


# ---- Divided among processes


def held(ranks: int = 1, rank: int = 0):
    """Records and queries of a process, float64: features, labels, which are of the gallery, sets of the queries."""
    count, asked = 24 // ranks, 40 // ranks
    label = torch.randint(0, 7, (24,), generator=torch.Generator().manual_seed(1))
    inside = torch.rand(24, generator=torch.Generator().manual_seed(2)) < 0.6
    which, asks, _ = sets_of(40, 3)
    who = torch.where(which < 0, -1, torch.randint(0, 7, (40,), generator=torch.Generator().manual_seed(4)))
    mine, own = slice(rank * count, (rank + 1) * count), slice(rank * asked, (rank + 1) * asked)
    return features(24)[mine], label[mine], inside[mine], features(40, seed=5)[own], who[own], asks.T[own]


def compared(held_by_all, share=None) -> dict[str, torch.Tensor]:
    x, label, inside, query, who, asks = held_by_all
    sizes = torch.tensor([1, 2, 2])
    return {
        "soft": retrieval.triplet(x, label, "soft", share),
        "hinge": retrieval.triplet(x, label, 0.3, share),
        "contrast": retrieval.contrast(x, label, 0.3, share),
        "matching": retrieval.matching(query, who, x, label, 0.2, asks.T, sizes, inside, share),
    }


def gradients(losses, *of):
    return {name: torch.autograd.grad(loss, of, retain_graph=True, allow_unused=True) for name, loss in losses.items()}


def same_gradients(found, wanted):
    for name, parts in wanted.items():
        for a, b in zip(found[name], parts, strict=True):
            assert (a is None) == (b is None)
            if b is not None:
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shares_add_up_to_the_loss_and_its_gradient(ranks):
    whole = held()
    for leaf in (whole[0], whole[3]):
        leaf.requires_grad_()
    wanted = compared(whole)

    def of(rank, total):
        mine, own = (slice(rank * n // ranks, (rank + 1) * n // ranks) for n in (24, 40))
        return compared(whole, retrieval.Share(mine, own, total))

    counts = [[] for _ in range(ranks)]
    for rank in range(ranks):
        of(rank, lambda own, r=rank: counts[r].append(own) or own)
    totals = [sum(each) for each in zip(*counts, strict=True)]
    shares = []
    for rank in range(ranks):
        told = iter(totals)
        shares.append(of(rank, lambda own, told=told: next(told)))
    found = {name: sum(share[name] for share in shares) for name in wanted}
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=0)
    same_gradients(gradients(found, whole[0], whole[3]), gradients(wanted, whole[0], whole[3]))


GLOO = """
import sys
from types import SimpleNamespace

import torch
from torch import distributed

from tests.losses import test_retrieval as here
from trainkit.distributed.runtime import Runtime
from trainkit.losses.retrieval import Share

distributed.init_process_group("gloo")
rank, world = distributed.get_rank(), distributed.get_world_size()
runtime = SimpleNamespace(world=world, rank=rank)
own = here.held(world, rank)
x, query = own[0].requires_grad_(), own[3].requires_grad_()
whole = [Runtime.gather(runtime, t, grad=t.requires_grad) for t in own]
rows = [slice(rank * len(t), (rank + 1) * len(t)) for t in (x, query)]
losses = here.compared(whole, Share(*rows, lambda count: Runtime.gather(runtime, count[None]).sum(0)))
found = {name: [loss.detach(), *here.gradients({name: loss}, x, query)[name]] for name, loss in losses.items()}
torch.save(found, f"{sys.argv[1]}-{rank}")
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_over_gloo_shares_add_up_to_the_loss_and_its_gradient(tmp_path):
    ranks = 4
    script, out = tmp_path / "ranks.py", tmp_path / "found"
    script.write_text(GLOO)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--master_port", str(_port()), script, out], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    whole = held()
    leaves = whole[0].requires_grad_(), whole[3].requires_grad_()
    wanted = compared(whole)
    seen = [torch.load(f"{out}-{rank}", weights_only=True) for rank in range(ranks)]
    for name, value in wanted.items():
        torch.testing.assert_close(sum(one[name][0] for one in seen), value.detach(), rtol=1e-12, atol=0)
    parts = {name: [[one[name][k] for one in seen] for k in (1, 2)] for name in wanted}
    found = {name: [None if rows[0] is None else torch.cat(rows) for rows in both] for name, both in parts.items()}
    same_gradients(found, gradients(wanted, *leaves))
