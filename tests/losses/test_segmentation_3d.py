"""The losses of voxels against sums written out by hand, their gradients against differences, and MONAI (slow)."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.config import loader
from trainkit.config.validation import validate
from trainkit.errors import UserError
from trainkit.losses.segmentation_3d import SegmentationLoss, deep, nearest, subsets

ROOT = Path(__file__).parents[2]
NAMES = ("background", "front", "back", "stalk")


def voxels(seed: int, *shape: int, classes: int = 4, scale: float = 2.0):
    """Random logits (B, C, *S) in float64, and a mask (B, *S)."""
    draw = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(shape[0], classes, *shape[1:], generator=draw, dtype=torch.float64)
    return logits, torch.randint(classes, shape, generator=draw, dtype=torch.uint8)


def by_hand(loss: SegmentationLoss, logits, mask, weight=None) -> list[float]:
    """The loss of each sample, voxel by voxel and class by class, in Python's own numbers."""
    samples, classes = logits.shape[:2]
    weight = [1.0] * classes if weight is None else weight.tolist()
    parts = []
    for b in range(samples):
        scores = logits[b].reshape(classes, -1).T.tolist()
        labels = mask[b].flatten().tolist()
        probability = [[math.exp(s - max(row)) for s in row] for row in scores]
        probability = [[e / sum(row) for e in row] for row in probability]
        parts.append((probability, labels))
    totals = []
    for probability, labels in parts:
        own = [p[y] for p, y in zip(probability, labels, strict=True)]
        norm = sum(weight[y] for y in labels)
        ce = sum(-weight[y] * math.log(p) for p, y in zip(own, labels, strict=True)) / norm
        pool = parts if loss.whole_batch else [(probability, labels)]
        dice = counted = 0.0
        for c in range(0 if loss.background else 1, classes):
            hit = sum(p[c] for ps, ys in pool for p, y in zip(ps, ys, strict=True) if y == c)
            if loss.empty == "skip" and not any(y == c for _, ys in pool for y in ys):
                continue
            s = loss.smooth
            whole = sum(
                p[c] ** (2 if loss.squared else 1) + (y == c) for ps, ys in pool for p, y in zip(ps, ys, strict=True)
            )
            dice += weight[c] * (1 - (2 * hit + s) / (whole + s))
            counted += weight[c]
        totals.append(loss.dice * (dice / counted if counted else 0.0) + loss.ce * ce)
    return totals


weights = st.sampled_from([0.0, 0.3, 1.0])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from([(1, 3), (2, 2, 3), (3, 2, 2, 2), (2, 1, 1, 1)]),
    terms=st.tuples(weights, weights).filter(any),
    empty=st.sampled_from(["skip", "count"]),
    background=st.booleans(),
    whole_batch=st.booleans(),
    squared=st.booleans(),
    weighted=st.booleans(),
)
def test_every_term_is_the_sum_written_out(
    seed, shape, terms, empty, background, whole_batch, squared, weighted
):  # fmt: skip
    logits, mask = voxels(seed, *shape)
    loss = SegmentationLoss(
        **dict(zip(("dice", "ce"), terms, strict=True)), smooth=0.01, empty=empty, background=background,
        whole_batch=whole_batch, squared=squared, class_weights={"front": 3.0, "background": 0.5} if weighted else {},
    )  # fmt: skip
    weight = loss.weights(NAMES)
    found = loss(logits, mask, weight)
    assert found.shape == (shape[0],) and found.dtype == torch.float64
    np.testing.assert_allclose(found, by_hand(loss, logits, mask, weight), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("empty", ["skip", "count"])
@pytest.mark.parametrize("whole_batch", [False, True])
def test_gradients_are_those_of_small_differences(empty, whole_batch):
    logits, mask = voxels(3, 2, 2, 3)
    mask[mask == 2] = 0  # a class that is nowhere
    loss = SegmentationLoss(dice=1, ce=0.5, empty=empty, whole_batch=whole_batch, smooth=0.1)
    assert torch.autograd.gradcheck(lambda x: loss(x, mask, torch.tensor([1.0, 2, 3, 4])), logits.requires_grad_())


def test_a_sample_does_not_depend_on_its_neighbours_unless_asked():
    logits, mask = voxels(1, 3, 3, 4, 5)
    loss = SegmentationLoss()
    alone = torch.cat([loss(logits[k : k + 1], mask[k : k + 1]) for k in range(3)])
    torch.testing.assert_close(loss(logits, mask), alone)
    pooled = SegmentationLoss(ce=0, whole_batch=True)(logits, mask)
    assert pooled.unique().numel() == 1
    apart = SegmentationLoss(ce=0)(logits, mask)
    assert abs(float(pooled[0] - apart.mean())) > 1e-4


def test_a_patch_without_organs_costs_what_the_policy_says():
    logits, mask = voxels(2, 1, 3, 3, 3)
    mask[:] = 0
    logits.requires_grad_()
    skipped = SegmentationLoss(ce=0)(logits, mask)
    assert skipped.item() == 0
    assert torch.autograd.grad(skipped.sum(), logits)[0].abs().max() == 0
    predicted = logits.detach().softmax(1)[:, 1:].sum((0, 2, 3, 4))
    counted = SegmentationLoss(ce=0, empty="count", smooth=2.0)(logits, mask)
    torch.testing.assert_close(counted, (1 - 2 / (predicted + 2)).mean()[None])
    # Whoever predicts less of a class that is not there, pays less.
    slope = torch.autograd.grad(counted.sum(), logits)[0]
    assert (slope[:, 1:].sum() > 0) and (slope[:, 0] < 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    logits, mask = voxels(9, 1, 40, 40, 40)
    loss = SegmentationLoss()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = loss(logits.to(dtype), mask)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, loss(logits.to(dtype).double(), mask).float(), rtol=1e-5, atol=0)


def test_enormous_logits_give_finite_values_and_slopes():
    _, mask = voxels(10, 2, 4, 4)
    for scale in (1e4, -1e4):
        logits = (scale * F.one_hot(mask.long(), 4).movedim(-1, 1)).float().requires_grad_()
        total = SegmentationLoss(smooth=0.0)(logits, mask)
        total.sum().backward()
        assert total.isfinite().all() and logits.grad.isfinite().all()


@pytest.mark.parametrize("kind", [torch.uint8, torch.int32, torch.int64])
def test_any_integers_are_a_mask(kind):
    logits, mask = voxels(11, 2, 3, 3)
    torch.testing.assert_close(SegmentationLoss()(logits, mask.to(kind)), SegmentationLoss()(logits, mask))


def test_shapes_that_do_not_belong_together_are_refused():
    logits, mask = voxels(12, 2, 3, 3, 3)
    for bad in (mask[:1], mask[:, :2], mask[:, None]):
        with pytest.raises(ValueError, match="do not belong together"):
            SegmentationLoss()(logits, bad)


@pytest.mark.parametrize(
    "settings",
    [
        {"dice": -1.0},
        {"ce": math.nan},
        {"dice": 0.0, "ce": 0.0},
        {"smooth": 0.0, "empty": "count"},
    ],
)
def test_settings_without_meaning_are_refused(settings):
    with pytest.raises(ValueError):
        validate(SegmentationLoss, settings, {})


def test_a_weight_of_no_class_names_the_nearest():
    SegmentationLoss(class_weights={"front": 2.0}).weights(NAMES)
    with pytest.raises(UserError, match=r"task.objective.class_weights.*'fornt'.*front"):
        SegmentationLoss(class_weights={"fornt": 2.0}).weights(NAMES)
    with pytest.raises(UserError, match="a number above 0"):
        SegmentationLoss(class_weights={"front": 0.0}).weights(NAMES)


def test_deep_supervision_halves_the_share_of_each_coarser_output():
    logits, mask = voxels(13, 2, 8, 8, 4)
    outputs = [logits, logits[..., ::2, ::2, :] * 0.5, logits[..., ::4, ::4, ::2] * 3]
    loss = SegmentationLoss()
    masks = [mask, mask[:, 1::2, 1::2], mask[:, 2::4, 2::4, 1::2]]
    parts = [loss(x, m) for x, m in zip(outputs, masks, strict=True)]
    torch.testing.assert_close(deep(loss, outputs, mask), (2 * parts[0] + parts[1]) / 3)
    torch.testing.assert_close(deep(loss, outputs[:1], mask), parts[0])
    weight = torch.tensor([1.0, 5, 1, 1])
    torch.testing.assert_close(deep(loss, outputs[:1], mask, weight), loss(logits, mask, weight))


def test_the_weights_of_deep_supervision_are_nnunets():
    """nnU-Net's network of six levels has five outputs, weighted 1, 1/2, 1/4, 1/8 and 0 before they sum to 1."""
    outputs = [torch.full((1, 1, 1, 1, 1), 10.0**k) for k in range(5)]
    found = deep(lambda x, mask, weights: x.flatten(), outputs, torch.zeros(1, 1, 1, 1, dtype=int))
    torch.testing.assert_close(found, torch.tensor([(8 + 4 * 10 + 2 * 100 + 1000) / 15]))


@settings(max_examples=30, deadline=None)
@given(old=st.tuples(*[st.integers(1, 9)] * 3), new=st.tuples(*[st.integers(1, 9)] * 3))
def test_a_coarser_mask_holds_the_voxels_nearest_to_the_middles(old, new):
    mask = torch.arange(math.prod(old)).reshape(1, *old)
    found = nearest(mask, new)
    assert found.shape == (1, *new)
    for at in itertools.product(*map(range, new)):
        place = tuple(math.floor((i + 0.5) * o / n + 1e-9) for i, o, n in zip(at, old, new, strict=True))
        assert found[0][at] == mask[0][place]
    if old == new:
        assert found is mask


@pytest.mark.parametrize("shape", [(2, 8, 8), (1, 4, 8, 8)])
def test_subsets_are_all_sums_of_outputs(shape):
    logits, mask = voxels(14, *shape)
    mode = "bilinear" if len(shape) == 3 else "trilinear"
    small = [F.interpolate(logits * k, scale_factor=0.5, mode=mode) for k in (2, -1)]
    full = [logits, *(F.interpolate(x, shape[1:], mode=mode) for x in small)]
    loss = SegmentationLoss(dice=0.7, ce=0.3, background=True)
    a, b, c = full
    by_name = [a, b, c, a + b, a + c, b + c, a + b + c]
    expected = torch.stack([loss(x, mask) for x in by_name]).mean(0)
    torch.testing.assert_close(subsets(loss, [logits, *small], mask), expected)


def test_four_outputs_have_fifteen_subsets():
    seen = []

    def count(logits, mask, weights):
        seen.append(float(logits.sum()))
        return logits.flatten(1).sum(1)

    outputs = [torch.full((1, 1, 1, 1), float(2**k)) for k in range(4)]
    assert subsets(count, outputs, torch.zeros(1, 1, 1)).item() == pytest.approx(8.0)
    assert sorted(seen) == [float(k) for k in range(1, 16)]


# What recipes say that they follow


def authors_emcad(p, one_hot, ce):
    """EMCAD's: sums over the batch, squares in the denominator, all classes."""
    both = (2 * (p * one_hot).sum((0, 2, 3, 4)) + 1e-5) / ((p**2 + one_hot).sum((0, 2, 3, 4)) + 1e-5)
    return 0.3 * ce + 0.7 * (1 - both).mean()


def authors_nnunet(p, one_hot, ce):
    """nnU-Net's `batch_dice`, without the background; a class that the batch lacks counts."""
    both = (2 * (p * one_hot).sum((0, 2, 3, 4)) + 1e-5) / ((p + one_hot).sum((0, 2, 3, 4)) + 1e-5)
    return ce + (1 - both[1:]).mean()


@pytest.mark.parametrize("name, authors", [("tom500_emcad_full", authors_emcad), ("tom500_full", authors_nnunet)])
def test_the_loss_of_a_full_recipe_is_its_authors(name, authors):
    objective = loader.load(ROOT / "recipes" / f"{name}.yaml").task.objective
    logits, mask = voxels(8, 3, 2, 5, 6, classes=10)
    mask[mask == 7] = 0  # in no sample
    mask[0][mask[0] == 2] = 1
    one_hot = F.one_hot(mask.long(), 10).movedim(-1, 1).double()
    wanted = authors(logits.softmax(1), one_hot, F.cross_entropy(logits, mask.long()))
    torch.testing.assert_close(objective(logits, mask).mean(), wanted)


# MONAI


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_the_losses_are_monais(background):
    from monai.losses import DiceLoss

    logits, mask = voxels(20, 3, 6, 5, 4)
    mask[0][mask[0] == 2] = 0
    target = mask[:, None]
    ours = {"background": background, "empty": "count"}
    theirs = {"include_background": background, "to_onehot_y": True, "softmax": True}
    smooth = {"smooth_nr": 1e-5, "smooth_dr": 1e-5}

    dice = DiceLoss(**theirs, **smooth, reduction="none")(logits, target).flatten(1).mean(1)
    torch.testing.assert_close(SegmentationLoss(ce=0, **ours)(logits, mask), dice, check_dtype=False)

    batch = DiceLoss(**theirs, **smooth, batch=True)(logits, target)
    found = SegmentationLoss(ce=0, whole_batch=True, **ours)(logits, mask)
    torch.testing.assert_close(found, batch.expand(3), check_dtype=False)

    square = DiceLoss(**theirs, **smooth, batch=True, squared_pred=True)(logits, target)
    found = SegmentationLoss(ce=0, whole_batch=True, squared=True, **ours)(logits, mask)
    torch.testing.assert_close(found, square.expand(3), check_dtype=False)
