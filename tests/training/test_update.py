"""What the loop does in every update: the short ways come to the same bits as the long ones."""

import contextlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit import rng
from trainkit.config.schema import Optim
from trainkit.distributed.runtime import Runtime
from trainkit.interfaces import Loss
from trainkit.training import optimizer
from trainkit.training.loss_meter import LossMeter
from trainkit.training.nonfinite import NonFiniteGuard, NotFinite, all_finite

ROOT = Path(__file__).resolve().parents[2]


def runtime(at_once=True, scaler=None, **more):
    """A machine of one process on a CPU, without its launch."""
    found = object.__new__(Runtime)
    found.world, found.device, found.at_once, found._factors = 1, torch.device("cpu"), at_once, {}
    found.accelerator = SimpleNamespace(scaler=scaler, **more)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("factor", [1 / 64, 2 / 3, 1 / 80])
def test_a_backward_pass_that_begins_with_the_factor_has_the_bits_of_one_through_the_product(dtype, factor):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 5, generator=generator).to(dtype)
    grads = []
    for way in ("product", "ours", "ours"):
        net = torch.nn.Linear(5, 3).to(dtype)
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
        loss = net(x).tanh().square().sum()
        if way == "product":
            (loss * factor / 1).backward()
        else:
            runtime().backward(loss, factor)
        grads.append([p.grad for p in net.parameters()])
    for mine in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], mine, strict=True))


def test_where_losses_are_scaled_accelerate_goes_first():
    seen = []
    scaled = runtime(scaler=object(), backward=lambda loss: seen.append(float(loss.detach())))
    scaled.backward(torch.tensor(8.0, requires_grad=True), 0.25)
    assert seen == [2.0]
    inner = SimpleNamespace(step=lambda: "inner")
    wrapper = SimpleNamespace(step=lambda: "wrapper", optimizer=inner)
    assert scaled.stepper(wrapper)() == "wrapper"
    assert runtime().stepper(wrapper)() == "inner" and runtime().stepper(inner)() == "inner"


@given(st.integers(-(2**70), 2**70), st.text(max_size=8), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4))
@settings(max_examples=200, deadline=None)
def test_one_hashed_number_is_the_first_of_many(seed, stream, parts):
    assert rng.number(seed, stream, *parts) == int(rng.words(seed, stream, *parts)[0] >> np.uint64(1))
    assert rng.number(seed, stream, *map(np.int64, parts)) == rng.number(seed, stream, *parts)


def losses(count, seed, tensor_weight):
    rng = np.random.default_rng(seed)
    for n in range(count):
        logs = {"a": torch.tensor(rng.normal(), dtype=torch.float32)}
        if n % 3 == 0:
            logs |= {"rare": torch.tensor(rng.normal(), dtype=torch.bfloat16), "whole": torch.tensor(n)}
        weight = torch.tensor(float(rng.integers(1, 9))) if tensor_weight else int(rng.integers(1, 9))
        yield Loss(torch.tensor(rng.normal() * 10, dtype=torch.float32), weight, logs)


@pytest.mark.parametrize("tensor_weight", [False, True])
def test_sums_on_the_host_have_the_bits_of_those_on_the_device(tensor_weight):
    here, there = LossMeter(runtime(at_once=True)), LossMeter(runtime(at_once=False))
    given_ = list(losses(200, 1, tensor_weight))
    for number in range(0, 200, 2):
        for tally in (here, there):
            tally.add(given_[number : number + 2], torch.tensor(float(number)))
    assert isinstance(here.loss, float) and isinstance(there.loss, torch.Tensor)
    assert here.state() == there.state() and here.read() == there.read()
    by_hand = math.fsum(float(loss.sum) for loss in given_) / math.fsum(float(loss.weight) for loss in given_)
    assert here.read()["train/loss"] == pytest.approx(by_hand, rel=1e-12)
    for first, second in ((here, there), (there, here)):
        first.load(second.state())
        assert first.state() == second.state()
    here.clear()
    assert here.state() == LossMeter(runtime(at_once=False)).state()


BAD = [math.nan, math.inf, -math.inf]
CASES = [([1.0, 2.0], 3.0, True), ([1e38, 3e38], 3e38, True), ([math.inf, -math.inf], 1.0, False)]
CASES += [([1.0, bad], 3.0, False) for bad in BAD] + [([1.0], bad, False) for bad in BAD]


@pytest.mark.parametrize(("sums", "norm", "fine"), CASES)
@pytest.mark.parametrize("scaled", [False, True])
def test_what_is_not_finite_is_seen_on_the_host_as_on_the_device(sums, norm, fine, scaled):
    given_ = [Loss(torch.tensor(value), 1) for value in sums]
    wanted = all(map(math.isfinite, sums)) if scaled else fine  # infinite gradients are the scaler's own affair
    for at_once in (True, False):
        found = all_finite(torch.tensor(norm), given_, runtime(at_once, scaler=object() if scaled else None))
        assert isinstance(found, bool) == at_once and bool(found) == wanted
        guard, alone = NonFiniteGuard(), NonFiniteGuard()
        alone.observe(7, found)
        guard.observe(7, found)
        guard.judge(wait=False)  # read one step late
        guard.observe(8, True)
        for judge, wait in ((guard.judge, False), (alone.judge, True)):
            with contextlib.nullcontext() if wanted else pytest.raises(NotFinite, match="step 7: "):
                judge(wait)
            judge(True)


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.float64], [torch.bfloat16], [torch.float32, torch.float64]])
@pytest.mark.parametrize("most", [1e-3, 1e3])
def test_gradients_are_measured_and_clipped_to_the_bits_that_torch_comes_to(dtypes, most):
    generator = torch.Generator().manual_seed(1)
    ours, theirs = {}, {}
    for number, shape in enumerate([(3, 4), (5,), (), (2, 3, 4, 5)]):
        grad = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtypes[number % len(dtypes)])
        for params in (ours, theirs):
            params[str(number)] = torch.nn.Parameter(torch.zeros_like(grad))
            params[str(number)].grad = grad.clone()
    wanted = torch.nn.utils.clip_grad_norm_(theirs.values(), most)
    norm = optimizer.total_norm([p.grad for p in ours.values()])
    assert torch.equal(norm, wanted) and norm.dtype == wanted.dtype and not norm.requires_grad
    squares = sum(float(p.grad.double().square().sum()) for p in ours.values())
    assert float(norm) == pytest.approx(math.sqrt(squares), rel=1e-2 if torch.bfloat16 in dtypes else 1e-6)
    optimizer.clip(ours, norm, Optim(lr=1.0, clip_norm=most))
    for mine, other in zip(ours.values(), theirs.values(), strict=True):
        assert torch.equal(mine.grad, other.grad)


def test_a_batch_that_is_handed_on_is_not_the_one_that_was_read():
    batch = {"image": torch.zeros(2)}
    for at_once in (True, False):
        placed = runtime(at_once).to_device(batch)
        placed["teacher"] = torch.ones(2)
        assert list(batch) == ["image"] and placed["image"] is batch["image"]


def test_the_average_follows_parameters_and_buffers_that_are_replaced():
    inner = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    net = torch.nn.Sequential(inner, torch.nn.Linear(3, 2))
    net[1].weight = torch.nn.Parameter(net[1].weight.double())  # two dtypes
    net.register_buffer("aside", torch.ones(2), persistent=False)
    average = optimizer.Average(net, 0.5)
    wanted = {name: t.detach().clone() for name, t in net.state_dict().items() if t.is_floating_point()}
    assert set(average.tensors) == set(wanted) and "aside" not in wanted
    generator = torch.Generator().manual_seed(2)
    for step in range(4):
        with torch.no_grad():
            for p in net.parameters():
                p.add_(torch.randn(p.shape, generator=generator))
        inner[1].running_mean = torch.randn(3, generator=generator)
        inner[0].bias = torch.nn.Parameter(torch.randn(3, generator=generator))
        average.update(net, step)
        now, share = net.state_dict(), 1 - min(0.5, (1 + step) / (10 + step))
        for name, t in wanted.items():
            wanted[name] = torch.lerp(t, now[name], share)
            assert torch.equal(average.tensors[name], wanted[name])
    other = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)), net[1])
    before = average.tensors["0.0.weight"].clone()
    average.update(other, 100)
    assert torch.equal(average.tensors["0.0.weight"], torch.lerp(before, other[0][0].weight.detach(), 0.5))


# ---- The contests


@pytest.mark.slow
def test_trainkits_side_of_the_contest_ends_with_the_weights_of_the_loop_by_hand():
    proofs = []
    for side in ("bare", "trainkit"):
        command = [sys.executable, str(ROOT / "benchmarks" / "step.py"), "--one", side, ""]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        proofs.append(json.loads(done.stdout.rpartition("contest: ")[2])["proof"])
    assert len(set(proofs)) == 1
