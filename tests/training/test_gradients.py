"""Clipping: by units against plain loops, and what the loop and a sharded launch make of it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import TOY, newest, run, spawn
from torch import nn

from trainkit.config.schema import AdaptiveClip, Optim
from trainkit.config.validation import validate
from trainkit.errors import UserError
from trainkit.interfaces import Loss
from trainkit.training import gradients, optimizer
from trainkit.training.plan import Plan


def made(shapes, seed=0, grow=1.0):
    draw = torch.Generator().manual_seed(seed)
    params = {}
    for i, shape in enumerate(shapes):
        p = nn.Parameter(torch.randn(shape, generator=draw))
        p.grad = grow * torch.randn(shape, generator=draw)
        params[f"layer.{i}"] = p
    return params


def by_loops(weight, grad, factor, eps):
    """Unit by unit, number by number."""
    units = [(weight, grad)] if weight.ndim <= 1 else list(zip(weight, grad, strict=True))
    out = []
    for w, g in units:
        longest = factor * max(math.sqrt(sum(v * v for v in w.flatten().tolist())), eps)
        length = math.sqrt(sum(v * v for v in g.flatten().tolist()))
        out.append(g * (longest / length) if length > longest else g.clone())
    return out[0] if weight.ndim <= 1 else torch.stack(out)


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 4), min_size=0, max_size=4).map(tuple), min_size=1, max_size=5),
    factor=st.sampled_from([1e-3, 0.3, 1.0, 50.0]),
    seed=st.integers(0, 99),
)
def test_each_unit_is_held_to_a_share_of_its_weights(shapes, factor, seed):
    params = made(shapes, seed)
    expected = [by_loops(p.detach(), p.grad, factor, 0.5) for p in params.values()]
    optimizer.clip_units(params.values(), factor, 0.5)
    for p, wanted in zip(params.values(), expected, strict=True):
        torch.testing.assert_close(p.grad, wanted, rtol=1e-5, atol=1e-7)


def test_short_gradients_keep_their_bits_zeros_stay_and_new_weights_can_move():
    params = made([(3, 4), (4,), ()], grow=1e-4)
    before = [p.grad.clone() for p in params.values()]
    optimizer.clip_units(params.values(), 0.1)
    assert all(torch.equal(p.grad, g) for p, g in zip(params.values(), before, strict=True))
    fresh = nn.Parameter(torch.zeros(2, 3))  # as LoRA starts
    fresh.grad = torch.stack([torch.zeros(3), torch.tensor([3.0, 0.0, 4.0])])
    optimizer.clip_units([fresh], 0.1, eps=1e-3)
    torch.testing.assert_close(fresh.grad, torch.tensor([[0.0, 0, 0], [0.6e-4, 0, 0.8e-4]]))


def test_an_infinite_gradient_stays_visible():
    params = made([(2, 2)])
    params["layer.0"].grad[0, 0] = math.inf
    optimizer.clip_units(params.values(), 0.1)
    assert not torch.isfinite(params["layer.0"].grad).all()


def test_channels_last_is_clipped_where_it_lies():
    p = nn.Parameter(torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last))
    p.grad = torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last)
    wanted, place = by_loops(p.detach(), p.grad, 0.01, 1e-3), p.grad.data_ptr()
    optimizer.clip_units([p], 0.01)
    torch.testing.assert_close(p.grad, wanted)
    assert p.grad.data_ptr() == place


def clipped(params, **words):
    optimizer.clip(params, torch.nn.utils.get_total_norm([p.grad for p in params.values()]), Optim(lr=1.0, **words))
    return [p.grad for p in params.values()]


def test_a_recipe_chooses_between_the_whole_gradient_and_its_units():
    shapes = [(3, 4), (5,)]
    plain = [p.grad for p in made(shapes).values()]
    assert all(torch.equal(a, b) for a, b in zip(clipped(made(shapes)), plain, strict=True))
    whole = clipped(made(shapes), clip_norm=0.5)
    assert float(torch.nn.utils.get_total_norm(whole)) == pytest.approx(0.5, rel=1e-4)
    units = clipped(made(shapes), clip_agc=AdaptiveClip(factor=0.01, leave_out=["*.1"]))
    assert torch.equal(units[1], plain[1]) and not torch.equal(units[0], plain[0])
    with pytest.raises(UserError, match=r"leave_out\[1\].*'hed' matches no parameter.*layer.1"):
        clipped(made(shapes), clip_agc=AdaptiveClip(leave_out=["*.1", "hed"]))
    with pytest.raises(ValueError, match="keep one"):
        Optim(lr=1.0, clip_norm=1.0, clip_agc=AdaptiveClip())
    with pytest.raises(ValueError, match="factor"):
        validate(AdaptiveClip, {"factor": 0.0}, {})


def test_an_update_reports_the_norm_before_it_clips():
    """Gradients of the loop: normalised, measured, clipped."""
    params = made([(3, 4), (5,)], grow=10.0)
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in params.values()]))
    wanted = [by_loops(p.detach(), p.grad, 0.01, 1e-3) for p in params.values()]
    machine, plan = SimpleNamespace(accelerator=SimpleNamespace(scaler=None)), Plan(1, 1, 8, 4, 2, 1, 0)
    losses = [Loss(torch.zeros(()), 4), Loss(torch.zeros(()), 4)]
    said = gradients.finish_gradients(machine, params, plan, losses, Optim(lr=1.0, clip_agc=AdaptiveClip()))
    assert float(said) == pytest.approx(norm)
    for p, grad in zip(params.values(), wanted, strict=True):
        torch.testing.assert_close(p.grad, grad)


@pytest.mark.slow
def test_sharded_parameters_are_clipped_as_whole_ones_are(store):
    words = ["task.norm=false", "task.dropout=0.0", "train.ema=null", "train.length=6 steps", "optim.clip_norm=null"]
    words += ["optim.clip_agc={factor: 0.003}", "optim.momentum=0.0"]
    whole = run(*words)
    sharded = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
        "FSDP_MIN_NUM_PARAMS": "500",
    }
    done = spawn(2, str(TOY), "--plugin", "toy", *words, **sharded)
    assert done.returncode == 0, done.stdout + done.stderr
    from trainkit.checkpoint import storage

    path, _ = storage.newest_valid(newest().checkpoints)
    for name, tensor in storage.read(path).tensors["model"].items():
        torch.testing.assert_close(tensor, whole.last.tensors["model"][name], rtol=1e-4, atol=1e-5)
