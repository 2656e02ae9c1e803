"""The task `reid`: what its loss is made of, on one process and on two; what it predicts, scores, logs and refuses."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs import ROOT, _port
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.tensor import DTensor

from trainkit.config.loader import load
from trainkit.config.schema import Optim
from trainkit.config.units import Span
from trainkit.data.people.modalities import subsets
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Classes, Search
from trainkit.interfaces import MODALITIES, DatasetInfo, Loss, StepContext
from trainkit.losses import retrieval
from trainkit.losses.retrieval import Contrast, Identity, Matching, Triplet
from trainkit.models.network_specs import ReidSpec
from trainkit.models.reid import Pixels
from trainkit.tasks.reid import Reid
from trainkit.training import optimizer
from trainkit.training.loss_meter import LossMeter

PEOPLE, VOCABULARY, LENGTH = 6, 20, 5
META = DatasetInfo(PEOPLE, (3, 32, 16), "toy", modalities=MODALITIES, vocabulary=VOCABULARY, text_length=LENGTH)
RGB_ALONE = DatasetInfo(PEOPLE, (3, 32, 16), "toy", modalities=("rgb",))
ALL = {
    "identity": Identity(weight=0.7, smoothing=0.1),
    "triplet": Triplet(weight=1.5),
    "sdm": Matching(weight=0.4, temperature=0.1),
    "contrast": Contrast(weight=0.2),
}


def at(step: int = 1, gather=lambda x, grad=False: x, rank: int = 0) -> StepContext:
    return StepContext(step, 0, 0.0, gather, contextlib.nullcontext, rank)


def made(meta: DatasetInfo = META, seed: int = 0, net=None, **settings):
    torch.manual_seed(seed)
    spec = {"model": "test_resnet", "embedding": 16, "text": {"layers": 1, "width": 16, "heads": 2}}
    spec |= {"fusion": {"name": "transformer", "layers": 1, "heads": 2}, **(net or {})}
    task = Reid(net=read(ReidSpec, spec), **settings)
    networks = task.build(meta, {}, seed)
    if hasattr(networks.model.fusion, "out"):  # past the start, at which fusion is a mean
        nn.init.normal_(networks.model.fusion.out.weight, std=0.1)
    return task, networks


def read(kind, tree):
    from pydantic import TypeAdapter

    return TypeAdapter(kind).validate_python(tree)


def batch(person, modality, seed: int = 0, asked=None):
    """Records of `modality`, which ascend, and for each person the queries of every set that it has, or those asked."""
    draw = torch.Generator().manual_seed(seed)
    label, kind = torch.tensor(person), torch.tensor(modality)
    out = {"label": label, "modality": kind, "index": torch.arange(len(label)), "view": torch.zeros_like(label)}
    for m, name in enumerate(MODALITIES):
        count = int((kind == m).sum())
        if name == "text":
            out["text"] = torch.randint(1, VOCABULARY, (count, LENGTH), generator=draw)
        else:
            out[f"image.{name}"] = torch.randn(count, 3, 32, 16, generator=draw)
    if asked is None:
        asked = []
        for p in sorted(set(person)):
            own = {
                m: next((i for i in range(len(person)) if person[i] == p and modality[i] == m), -1) for m in range(5)
            }
            for some in subsets():
                if all(own[m] >= 0 for m in some):
                    asked.append([own[m] if m in some else -1 for m in range(5)])
    return out | {"queries": torch.tensor(asked, dtype=torch.int64).reshape(-1, 5)}


def usual(seed: int = 0):
    """Three people; the third has neither colour pencil nor a caption."""
    return batch([0, 0, 3, 5, 0, 3, 5, 0, 3, 0, 3, 5, 0, 3], [0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 4, 4], seed)


# ---- What the loss is made of


def log_softmax(row):
    row = np.asarray(row, dtype=np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def plain_matching(query, person, kinds, gallery, label, temperature):
    """ReID5o's: of each set of modalities KL both ways, averaged within the sets of equal size, then over sizes."""

    def one_way(x, x_label, y, y_label):
        rows = []
        for a, own in zip(unit(x), x_label, strict=True):
            same = np.array([own == other for other in y_label])
            if same.any():
                log_p = log_softmax(unit(y) @ a / temperature)
                rows.append((np.exp(log_p) * (log_p - np.log(same / same.sum() + 1e-8))).sum())
        return np.mean(rows)

    by_size = {}
    for some in {tuple(k) for k in kinds.tolist()}:
        mine = [i for i, k in enumerate(kinds.tolist()) if tuple(k) == some]
        there, back = (query[mine], person[mine]), (gallery, label)
        by_size.setdefault(sum(some), []).append(one_way(*there, *back) + one_way(*back, *there))
    return np.mean([np.mean(values) for values in by_size.values()])


def test_the_loss_is_its_terms_in_plain_loops():
    task, networks = made(**ALL)
    shown = usual()
    state = copy.deepcopy(networks.model.state_dict())
    loss = task.loss(networks.model, networks, shown, at())
    networks.model.load_state_dict(state)
    out = networks.model({m: shown[f"image.{m}"] for m in MODALITIES[:4]}, shown["text"], shown["queries"])
    out = {name: value.detach().double().numpy() for name, value in out.items()}
    label, queries = shown["label"].numpy(), shown["queries"].numpy()
    person = np.array([label[row[row >= 0][0]] for row in queries])

    def smoothed(logits, labels):
        return [-(0.9 * log_softmax(z)[y] + 0.1 * log_softmax(z).mean()) for z, y in zip(logits, labels, strict=True)]

    wanted = {"identity": np.mean(smoothed(out["logits"], label) + smoothed(out["fused_logits"], person))}
    x, s = out["feature"], unit(out["neck"]) @ unit(out["neck"]).T
    triplet, contrast = [], []
    for i in range(len(label)):
        p = [j for j in range(len(label)) if j != i and label[j] == label[i]]
        n = [j for j in range(len(label)) if label[j] != label[i]]
        far = [np.linalg.norm(x[i] - x[j]) for j in p]
        near = [np.linalg.norm(x[i] - x[j]) for j in n]
        triplet.append(np.log1p(np.exp(max(far) - min(near))))
        log_p = log_softmax([s[i, j] / 0.1 for j in range(len(label)) if j != i])
        contrast.append(-np.mean([log_p[j - (j > i)] for j in p]))
    wanted |= {"triplet": np.mean(triplet), "contrast": np.mean(contrast)}
    rgb = shown["modality"].numpy() == 0
    wanted["sdm"] = plain_matching(out["fused_neck"], person, queries >= 0, out["neck"][rgb], label[rgb], 0.1)
    for name, value in wanted.items():
        assert float(loss.logs[name]) == pytest.approx(value, rel=1e-4), name
    total = sum(ALL[name].weight * value for name, value in wanted.items())
    assert float(loss.sum.detach()) == pytest.approx(14 * total, rel=1e-4) and loss.weight == 14
    right = np.mean(out["logits"].argmax(1) == label)
    assert float(loss.logs["accuracy"]) == pytest.approx(right)


def test_records_count_once_in_the_identity_loss_where_a_recipe_says_so():
    """ReID5o's: of an RGB image and one record of each other modality 16 vectors, 1 : 4 : 11."""
    shown = batch([0, 2] * 5, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    found = {}
    for once in (True, False):
        task, networks = made(identity=Identity(smoothing=0, single_queries=not once))
        networks.model.train()
        state = copy.deepcopy(networks.model.state_dict())
        found[once] = float(task.loss(networks.model, networks, shown, at()).logs["identity"])
        networks.model.load_state_dict(state)
    out = networks.model({m: shown[f"image.{m}"] for m in MODALITIES[:4]}, shown["text"], shown["queries"])
    person = shown["label"][shown["queries"].amax(1)]
    records = torch.nn.functional.cross_entropy(out["logits"], shown["label"], reduction="none").detach()
    asked = torch.nn.functional.cross_entropy(out["fused_logits"], person, reduction="none").detach()
    several = (shown["queries"] >= 0).sum(1) > 1
    parts = [float(x.mean()) for x in (records[:2], records[2:], asked[several])]
    assert found[True] == pytest.approx(np.dot(parts, [0.0625, 0.25, 0.6875]), rel=1e-5)
    assert found[False] == pytest.approx(np.dot(parts, [0.05, 0.4, 0.55]), rel=1e-5)


def test_the_recipe_of_orbench_adds_its_four_matching_losses_as_its_authors_do():
    recipe = load(ROOT / "recipes" / "reid_orbench.yaml")
    assert recipe.task.sdm.weight == 4 and recipe.data.sampler.captions == "own"
    assert not recipe.task.identity.single_queries and recipe.task.identity.weight == 1
    draw = np.random.default_rng(0)
    person = np.arange(3)
    kinds = np.array([[False, *(m in some for m in range(1, 5))] for some in subsets()])
    query, gallery = draw.normal(size=(45, 8)), draw.normal(size=(3, 8))
    asks = np.kron(np.eye(15, dtype=bool), np.ones(3, bool))
    whole = retrieval.matching(
        torch.tensor(query), torch.tensor(np.tile(person, 15)), torch.tensor(gallery), torch.tensor(person),
        0.02, torch.tensor(asks), torch.tensor(kinds.sum(1)),
    )  # fmt: skip
    of_size = [
        np.mean([
            plain_matching(query[3 * s : 3 * s + 3], person, kinds[[s] * 3], gallery, person, 0.02)
            for s in np.flatnonzero(kinds.sum(1) == size)
        ])
        for size in (1, 2, 3, 4)
    ]  # fmt: skip
    assert recipe.task.sdm.weight * float(whole) == pytest.approx(sum(of_size), rel=1e-6)


@pytest.mark.parametrize("name", ["triplet", "sdm", "contrast"])
def test_one_loss_alone_is_enough_for_what_it_trains(name):
    task, networks = made(identity=None, **{name: ALL[name]})
    loss = task.loss(networks.model, networks, usual(), at())
    loss.sum.backward()
    optimizer.refuse_idle({n: p for n, p in networks.model.named_parameters() if p.requires_grad})
    assert set(loss.logs) == {name}
    idle = {"triplet": ["classifier", "fusion", "neck"], "sdm": ["classifier"]}.get(name, ["classifier", "fusion"])
    (told,) = [note for note in networks.notes if "no loss depends on them" in note]
    assert re.findall(r"(\w+) \(", told) == idle and "classifier (96)" in told
    assert not networks.model.classifier.weight.requires_grad
    assert networks.model.bn.weight.requires_grad == (name != "triplet")


@pytest.mark.parametrize(
    "records",
    [
        ([0, 1, 0, 1], [0, 0, 4, 4]),
        ([0, 1, 0, 1], [0, 0, 2, 3]),
        ([0, 0, 1, 1], [0, 0, 0, 0]),
        ([0, 0, 1, 1], [1, 1, 2, 4]),
    ],
    ids=["words alone", "no words", "nothing to ask with", "nothing to find"],
)
def test_whatever_a_batch_lacks_all_that_is_trained_gets_a_finite_gradient(records):
    task, networks = made(norms=Span(1, "steps"), **ALL)
    loss = task.loss(networks.model, networks, batch(*records), at())
    loss.sum.backward()
    trained = {n: p for n, p in networks.model.named_parameters() if p.requires_grad}
    optimizer.refuse_idle(trained)
    assert all(torch.isfinite(p.grad).all() for p in trained.values())
    assert all(math.isfinite(v) for v in loss.logs.values())


def test_rgb_alone_trains_without_queries():
    task, networks = made(RGB_ALONE, triplet=Triplet(margin=0.3), contrast=Contrast(), norms=Span(1, "steps"))
    shown = {k: v for k, v in batch([0, 0, 1, 1], [0] * 4).items() if k in ("image.rgb", "label", "modality")}
    shown["queries"] = torch.zeros(0, 5, dtype=torch.int64)
    loss = task.loss(networks.model, networks, shown, at())
    loss.sum.backward()
    optimizer.refuse_idle({n: p for n, p in networks.model.named_parameters() if p.requires_grad})
    assert {"feature_norm", "bn_norm"} == {name for name in loss.logs if "norm" in name}


def test_a_batch_is_learnt_by_heart_and_its_people_are_found():
    task, networks = made(identity=Identity(), sdm=Matching(temperature=0.1))
    moved = optimizer.build(networks.model, Optim(name="adamw", lr=3e-3))
    shown, seen = usual(), []
    for _ in range(25):
        loss = task.loss(networks.model, networks, shown, at())
        (loss.sum / loss.weight).backward()
        moved.step()
        moved.zero_grad()
        seen.append({k: float(v) for k, v in loss.logs.items()})
    assert seen[-1]["accuracy"] == 1.0 and seen[-1]["sdm"] < 0.5 * seen[0]["sdm"]
    scores = task.score(predicted(task, networks.model, shown), held(shown))
    assert scores.metrics["map"] > 0.9


def test_nothing_waits_for_the_device():
    """Tensors without values: whatever asks for one, such as a branch or a selection by a mask, raises here."""
    task, networks = made(norms=Span(1, "steps"), **ALL)
    real = usual()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        shown = {key: mode.from_tensor(value) for key, value in real.items()}
        loss = task.loss(networks.model, networks, shown, at(0))
        assert "fused_norm" in loss.logs and loss.sum.shape == ()
        with pytest.raises(DataDependentOutputException):
            bool(loss.sum > 0)


# ---- Two processes


class Pair:
    """Two ranks as threads of this process, whose gather autograd sees through."""

    def __init__(self):
        self.barrier = threading.Barrier(2, timeout=300)
        self.box = [None, None]

    def gather(self, rank):
        def gather(x, grad=False):
            self.box[rank] = x if grad else x.detach()
            self.barrier.wait()
            out = torch.cat(self.box)
            self.barrier.wait()
            return out

        return gather

    def run(self, act):
        results, failed = [None, None], []

        def one(rank):
            try:
                results[rank] = act(rank, self.gather(rank))
            except BaseException as error:  # the other rank must not wait
                failed.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        return results


def halves():
    """A batch of two ranks with different numbers of RGB records and of queries, and the same as one batch."""
    records = [([0, 0, 3, 0, 3, 3], [0, 0, 0, 1, 2, 4]), ([1, 5, 1, 5, 1, 5], [0, 0, 1, 1, 3, 4])]
    shares = [batch(*r, seed=i) for i, r in enumerate(records)]
    assert len(shares[0]["queries"]) != len(shares[1]["queries"])
    kind = torch.cat([p["modality"] for p in shares])
    order = kind.argsort(stable=True)
    place = torch.cat([order.argsort(), torch.tensor([-1])])  # -1 stays -1
    whole = {k: torch.cat([p[k] for p in shares]) for k in shares[0] if k != "queries"}
    whole |= {k: whole[k][order] for k in ("label", "modality", "index", "view")}
    shifted = [torch.where(p["queries"] < 0, -1, p["queries"] + 6 * i) for i, p in enumerate(shares)]
    return shares, whole | {"queries": place[torch.cat(shifted)]}


PLAIN = {"neck": "none", "model": "test_vit", "args": {"patch_size": 8}}
"""A network without batch norm, which sees one process alone."""


def two_ranks(gather):
    task, networks = made(net=PLAIN, gather=gather, **ALL)
    shares, whole = halves()
    one = copy.deepcopy(networks.model)
    alone = task.loss(one, networks, whole, at())
    (alone.sum / alone.weight).backward()
    nets, pair = [copy.deepcopy(networks.model) for _ in range(2)], Pair()
    losses = pair.run(lambda rank, gather: task.loss(nets[rank], networks, shares[rank], at(1, gather, rank)))
    # As the loop scales it and the wrapper averages it.
    sum(loss.sum * (2 / 12) for loss in losses).backward()
    averaged = {
        name: (p.grad + nets[1].get_parameter(name).grad) / 2
        for name, p in nets[0].named_parameters()
        if p.grad is not None
    }
    return alone, one, losses, averaged


def test_two_processes_have_the_loss_and_the_gradient_of_one():
    alone, one, losses, averaged = two_ranks("all")
    assert float(sum(loss.sum.detach() for loss in losses)) / 12 == pytest.approx(
        float(alone.sum.detach()) / 12, rel=1e-5
    )
    for name, value in alone.logs.items():
        assert float(sum(loss.logs[name] for loss in losses)) / 2 == pytest.approx(float(value), rel=1e-4, abs=1e-6), (
            name
        )
    assert averaged
    for name, grad in averaged.items():
        torch.testing.assert_close(grad, one.get_parameter(name).grad, rtol=1e-4, atol=1e-5)


GLOO = """
import sys
from types import SimpleNamespace

import torch
from torch import distributed, nn

from tests.tasks import test_reid as toy
from trainkit.distributed.runtime import Runtime

distributed.init_process_group("gloo")
rank = distributed.get_rank()
runtime = SimpleNamespace(world=2, rank=rank)
x = torch.arange(6.0).reshape(3, 2).add(10 * rank).requires_grad_()
seen = Runtime.gather(runtime, x, grad=True)
assert torch.equal(seen, torch.cat([torch.arange(6.0).reshape(3, 2) + 10 * r for r in range(2)]))
assert torch.equal(seen, Runtime.gather(runtime, x)) and not Runtime.gather(runtime, x).requires_grad
# Each rank weighs what it sees by its number: what comes back is the sum of all weights for the rows of this one.
(seen * torch.arange(12.0).reshape(6, 2) * (rank + 1)).sum().backward()
assert torch.equal(x.grad, 3 * torch.arange(12.0).reshape(6, 2)[3 * rank : 3 * rank + 3])

task, parts = toy.made(net=toy.PLAIN, **toy.ALL)
net = nn.parallel.DistributedDataParallel(parts.model, broadcast_buffers=False)
share = toy.halves()[0][rank]
at = toy.at(1, lambda x, grad=False: Runtime.gather(runtime, x, grad), rank)
loss = task.loss(net, parts, share, at)
(loss.sum * (2 / 12)).backward()
if rank == 0:
    torch.save({name: p.grad for name, p in parts.model.named_parameters() if p.requires_grad}, sys.argv[1])
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_over_gloo_two_processes_have_the_gradient_of_one(tmp_path):
    script, out = tmp_path / "two.py", tmp_path / "grads.pt"
    script.write_text(GLOO)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(_port())]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}"}
    done = subprocess.run([*command, script, out], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    task, networks = made(net=PLAIN, **ALL)
    alone = task.loss(networks.model, networks, halves()[1], at())
    (alone.sum / alone.weight).backward()
    averaged = torch.load(out, weights_only=True)
    assert averaged
    for name, grad in averaged.items():
        torch.testing.assert_close(grad, networks.model.get_parameter(name).grad, rtol=1e-4, atol=1e-5)


def test_local_losses_compare_the_records_of_a_process_alone():
    alone, _, losses, _ = two_ranks("local")
    shares, _ = halves()
    task, networks = made(net=PLAIN, **ALL)
    for share, loss in zip(shares, losses, strict=True):
        assert float(task.loss(networks.model, networks, share, at()).sum) == pytest.approx(float(loss.sum), rel=1e-5)
    assert abs(float(sum(loss.sum for loss in losses) - alone.sum)) > 0.1


# ---- Predictions and scores


def predicted(task, net, shown):
    with torch.no_grad():
        net.eval()
        rows = task.predict(net, shown)
        net.train()
    return rows


def held(shown, kind="scores"):
    """The batch as an evaluation split."""
    rows = shown["queries"].numpy()
    names = ["_".join(MODALITIES[m] for m in range(5) if row[m] >= 0) for row in rows]
    lists = {name: rows[[i for i, n in enumerate(names) if n == name]] for name in dict.fromkeys(names)}
    label = shown["label"].numpy()
    gallery = np.flatnonzero(shown["modality"].numpy() == 0)
    ids = tuple(str(i) for i in range(len(label)))
    protocol = Search(label, np.full(len(label), -1), gallery, lists, ids, kind=kind)
    return SimpleNamespace(name="val", protocol=protocol, size=len(label))


def test_queries_are_fused_and_scored_as_in_evaluation_though_the_network_trains():
    task, networks = made(**ALL)
    net, shown = networks.model, usual()
    task.loss(net, networks, shown, at())  # moves the statistics of the neck away from 0 and 1
    rows, split = predicted(task, net, shown), held(shown)
    assert list(rows) == ["feature"] and rows["feature"].shape == (14, 16)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    assert net.training
    scores = task.score(rows, split)
    assert net.training and net.bn.training
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    net.eval()
    with torch.no_grad():
        out = net({m: shown[f"image.{m}"] for m in MODALITIES[:4]}, shown["text"], shown["queries"])
    gallery = unit(out["neck"][split.protocol.gallery].numpy())
    label, queries = shown["label"].numpy(), shown["queries"].numpy()
    person = np.array([label[row[row >= 0][0]] for row in queries])
    found, by_list = label[split.protocol.gallery], {}
    for row, query, who in zip(queries, unit(out["fused_neck"].numpy()), person, strict=True):
        order = np.argsort(-(gallery @ query))
        by_list.setdefault(tuple(row >= 0), []).append(found[order[0]] == who)
    wanted = np.mean([np.mean(values) for values in by_list.values()])
    assert scores.metrics["rank_1"] == pytest.approx(wanted)


def test_scoring_needs_a_search_and_a_prediction():
    task, _ = made()
    with pytest.raises(RuntimeError, match="score was called before predict"):
        task.score({}, held(usual()))
    with pytest.raises(ValueError, match="protocol Classes; expected Search"):
        task.score({}, SimpleNamespace(name="val", protocol=Classes(np.zeros(3), ("a",))))


def test_pixels_are_compared_by_correlation_over_areas():
    shown = usual()
    task, networks = made()
    pixels = networks.frozen["pixels"]
    feature = task.predict(pixels, shown)["feature"]
    assert feature.shape == (14, 3 * 16 * 8)
    first = shown["image.rgb"][0].numpy().reshape(3, 16, 2, 8, 2).mean((2, 4)).ravel()
    second = shown["image.nir"][0].numpy().reshape(3, 16, 2, 8, 2).mean((2, 4)).ravel()
    assert float(feature[0] @ feature[4]) == pytest.approx(np.corrcoef(first, second)[0, 1], abs=1e-6)
    assert not feature[12:].any()
    present = torch.tensor([[False, True, False, False, True]])
    both = pixels.neck(pixels.fuse(feature[torch.tensor([[0, 4, 0, 0, 12]])], present))
    assert torch.equal(both[0], feature[4])
    scores = task.score({"feature": feature}, held(shown))
    assert scores.metrics["text.map"] < scores.metrics["nir.map"] + 1 and 0 <= scores.metrics["map"] <= 1
    flat = {"image.rgb": torch.ones(1, 3, 8, 8)}
    assert torch.isfinite(Pixels().encode({"rgb": flat["image.rgb"]}, None)).all()


# ---- What is logged


def test_norms_are_logged_at_their_own_steps_and_computed_at_no_other(monkeypatch):
    from trainkit.tasks import reid

    asked = []
    plain = reid._mean_length
    monkeypatch.setattr(reid, "_mean_length", lambda x: asked.append(x) or plain(x))
    task, networks = made(norms=Span(3, "steps"), sdm=Matching())
    logged = [set(task.loss(networks.model, networks, usual(), at(step)).logs) for step in range(7)]
    norms = {"feature_norm", "fused_norm", "bn_norm"}
    assert [norms & keys for keys in logged] == [norms, set(), set()] * 2 + [norms] and len(asked) == 9
    task, networks = made(norms=None)
    assert not norms & set(task.loss(networks.model, networks, usual(), at(0)).logs)
    assert float(plain(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))) == 3.0 and float(plain(torch.zeros(0, 2))) == 0.0


def runtime():
    return SimpleNamespace(device=torch.device("cpu"), world=1, at_once=True, sum=lambda x: x)


def tallied(tally, *logs):
    for values in logs:
        tally.add([Loss(torch.tensor(2.0), 2, {k: torch.tensor(v) for k, v in values.items()})], torch.tensor(1.0))
    return tally


def test_what_some_batches_log_is_a_mean_over_those_even_across_an_interruption():
    first, rest = [{"a": 1.0, "rare": 8.0}, {"a": 2.0}], [{"a": 6.0}, {"a": 3.0, "rare": 4.0}]
    whole = tallied(LossMeter(runtime()), *first, *rest)
    assert whole.read() == {"train/loss": 1.0, "train/a": 3.0, "train/rare": 6.0, "train/grad_norm": 1.0}
    resumed = LossMeter(runtime())
    resumed.load(json.loads(json.dumps(tallied(LossMeter(runtime()), *first).state())))
    assert tallied(resumed, *rest).read() == whole.read()
    whole.clear()
    assert "train/rare" not in tallied(whole, {"a": 1.0}).read()
    old = tallied(LossMeter(runtime()), {"a": 1.0}, {"a": 2.0}).state()
    del old["times"]  # of a checkpoint in which every batch had every key
    resumed.load(old)
    assert tallied(resumed, {"a": 6.0}).read()["train/a"] == 3.0


# ---- What is refused


def test_blocks_that_cannot_train_are_refused():
    spec = ReidSpec(model="test_resnet")
    with pytest.raises(ValueError, match="all null; set at least one"):
        Reid(net=spec, identity=None)
    with pytest.raises(ValueError, match="norms is '2 epochs'; expected a number of steps"):
        Reid(net=spec, norms=Span(2, "epochs"))
    with pytest.raises(UserError, match="data block `people`"):
        Reid(net=spec).build(DatasetInfo(3, (3, 32, 16), "toy"), {}, 0)
    with pytest.raises(UserError, match="only RGB records"):
        Reid(net=spec, sdm=Matching()).build(RGB_ALONE, {}, 0)


def test_weights_are_asked_for_where_there_are_any():
    assert made()[0].required_weights() == {}
    spec = ReidSpec(model="test_resnet.r160_in1k", weights="pretrained")
    assert Reid(net=spec).required_weights()["net"].weights == "timm:test_resnet.r160_in1k"


def test_parameters_that_are_split_over_processes_are_refused(monkeypatch):
    task, networks = made()
    assert hasattr(DTensor, "to_local")
    split = nn.Module()
    split.weight = nn.Parameter(torch.zeros(2))
    split.weight.to_local = lambda: split.weight
    for act in (lambda: task.predict(split, usual()), lambda: task.loss(split, networks, usual(), at())):
        with pytest.raises(UserError, match="sharded over processes"):
            act()
