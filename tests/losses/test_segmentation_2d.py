"""The losses of pixels against sums written out by hand, their gradients against differences, and smp's own (slow)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from trainkit.config.validation import validate
from trainkit.interfaces import IGNORED
from trainkit.losses.segmentation_2d import Near, Ohem, PixelLoss, ohem_weights, resized

NAMES = ("road", "car", "pole", "sky")


def pixels(seed: int, *shape: int, classes: int = 4, scale: float = 2.0, ignored: float = 0.3):
    """Random logits (B, C, h, w) in float64, a mask and distances (B, h, w)."""
    draw = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(shape[0], classes, *shape[1:], generator=draw, dtype=torch.float64)
    mask = torch.randint(classes, shape, generator=draw, dtype=torch.uint8)
    mask[torch.rand(shape, generator=draw) < ignored] = IGNORED
    return logits, mask, 8 * torch.rand(shape, generator=draw)


def flat(logits, mask):
    """Probabilities and classes of all pixels, as Python's own numbers."""
    rows = logits.movedim(1, -1).reshape(-1, logits.shape[1]).tolist()
    p = [[math.exp(s - max(row)) for s in row] for row in rows]
    return [[e / sum(row) for e in row] for row in p], mask.flatten().tolist()


def cross_entropy_by_hand(loss: PixelLoss, logits, mask, distance, weight) -> float:
    """Pixel by pixel. Where pixels as hard as the last that is kept are too many, each counts its share."""
    p, labels = flat(logits, mask)
    away = distance.flatten().tolist()
    kept = [[-math.log(row[y]), 1.0, y, d] for row, y, d in zip(p, labels, away, strict=True) if y != IGNORED]
    if loss.ohem is not None:
        valid = len(kept)
        kept.sort(key=lambda pixel: -pixel[0])
        over = [pixel for pixel in kept if pixel[0] > -math.log(loss.ohem.probability)]
        wanted = max(1, math.floor(valid * loss.ohem.least))
        kept = over if len(over) >= wanted else kept[:wanted]
    total = count = 0.0
    for ce, share, y, d in kept:
        share *= weight[y]
        if loss.near is not None:
            share *= 1 + loss.near.strength * math.exp(-(d**2) / (2 * loss.near.sigma**2))
        total, count = total + share * ce, count + share
    return total / count if count else 0.0


def over_classes(values: dict, weight) -> float:
    total = sum(weight[c] for c, _ in values)
    return sum(weight[c] * v for (c, _), v in values.items()) / total if total else 0.0


def dice_by_hand(logits, mask, weight) -> float:
    p, labels = flat(logits, mask)
    found = {}
    for c in set(labels) - {IGNORED}:
        hit = sum(row[c] for row, y in zip(p, labels, strict=True) if y == c)
        predicted = sum(row[c] for row, y in zip(p, labels, strict=True) if y != IGNORED)
        found[c, 0] = 1 - 2 * hit / (predicted + labels.count(c))
    return over_classes(found, weight)


def lovasz_by_hand(logits, mask, weight) -> float:
    """The Lovasz extension of the set function 1 - IoU, over sets of wrong pixels."""
    p, labels = flat(logits, mask)
    found = {}
    for c in set(labels) - {IGNORED}:
        errors = {i: abs((y == c) - row[c]) for i, (row, y) in enumerate(zip(p, labels, strict=True)) if y != IGNORED}
        true = {i for i, y in enumerate(labels) if y == c}

        def delta(wrong: set, true=true) -> float:
            return 1 - len(true - wrong) / len(true | wrong)

        order = sorted(errors, key=lambda i: -errors[i])
        found[c, 0] = sum(errors[i] * (delta(set(order[: k + 1])) - delta(set(order[:k]))) for k, i in enumerate(order))
    return over_classes(found, weight)


weights = st.sampled_from([0.0, 0.3, 1.0])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from([(1, 3, 4), (2, 5, 3), (1, 1, 1), (3, 4, 6)]),
    terms=st.tuples(st.just(1.0), weights, weights),
    ohem=st.sampled_from([None, (0.7, 1 / 16), (0.3, 0.5), (0.001, 0.3), (0.99, 1.0)]),
    near=st.sampled_from([None, (2.0, 3.0)]),
    ignored=st.sampled_from([0.0, 0.3, 0.9]),
    weighted=st.booleans(),
)
def test_every_term_is_the_sum_written_out(seed, shape, terms, ohem, near, ignored, weighted):
    logits, mask, distance = pixels(seed, *shape, ignored=ignored)
    loss = PixelLoss(
        **dict(zip(("ce", "dice", "lovasz"), terms, strict=True)),
        ohem=ohem and Ohem(probability=ohem[0], least=ohem[1]),
        near=near and Near(strength=near[0], sigma=near[1]),
        class_weights={"car": 3.0, "road": 0.5} if weighted else {},
    )
    weight = loss.weights(NAMES)
    hand = [1.0] * 4 if weight is None else weight.tolist()
    expected = {
        "ce": cross_entropy_by_hand(loss, logits, mask, distance, hand),
        "dice": dice_by_hand(logits, mask, hand),
        "lovasz": lovasz_by_hand(logits, mask, hand),
    }
    found = loss.terms(logits, mask, distance, weight)
    assert list(found) == [name for name in expected if getattr(loss, name)]
    for name, value in found.items():
        assert value.dtype == torch.float64 and value.item() == pytest.approx(expected[name], rel=1e-5, abs=1e-9), name
    total = sum(getattr(loss, name) * expected[name] for name in expected)
    assert loss(logits, mask, distance, weight).item() == pytest.approx(total, rel=1e-5, abs=1e-9)


# OHEM


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 80),
    levels=st.sampled_from([1, 2, 5, 1000]),
    probability=st.sampled_from([0.2, 0.5, 0.7, 0.95]),
    least=st.sampled_from([1 / 16, 0.25, 0.5, 1.0]),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_hard_pixels_are_those_of_a_sorted_list_with_ties_shared(seed, count, levels, probability, least, ignored):
    rng = np.random.default_rng(seed)
    ce = torch.from_numpy(rng.integers(0, levels, count) / levels * 2.0)
    valid = torch.from_numpy(rng.random(count) >= ignored)
    found = ohem_weights(ce, valid, probability, least)
    values = sorted(ce[valid].tolist(), reverse=True)
    wanted = max(1, math.floor(len(values) * least))
    over = [v for v in values if v > -math.log(probability)]
    kept = over if len(over) >= wanted else values[:wanted]
    assert found.sum().item() == pytest.approx(len(kept), abs=1e-9)
    assert (found * ce).sum().item() == pytest.approx(sum(kept), abs=1e-9)
    assert (found[~valid] == 0).all() and found.min() >= 0 and found.max() <= 1
    for value in set(values):  # pixels that are alike count alike
        assert found[valid & (ce == value)].unique().numel() == 1


def test_ohem_counts_valid_pixels_and_not_all():
    """Of 320 pixels 32 are labelled, all easy: 2 of them are learned from, not 20, and not the unlabelled ones."""
    logits = torch.zeros(1, 2, 16, 20, dtype=torch.float64)
    logits[:, 0] = torch.linspace(2, 3, 320, dtype=torch.float64).view(1, 16, 20)
    mask = torch.full((1, 16, 20), IGNORED, dtype=torch.uint8)
    mask.view(-1)[100:132] = 0
    logits.requires_grad_()
    PixelLoss(ohem=Ohem())(logits, mask).backward()
    moved = logits.grad[0, 0].flatten().nonzero().flatten().tolist()
    assert moved == [100, 101]  # the least sure of the labelled


def test_a_loss_that_is_no_number_stays_none():
    """The loop leaves such an update out; what hides it would let weights rot."""
    logits, mask, _ = pixels(1, 1, 8, 8, ignored=0.0)
    logits[0, 2, 3, 3] = math.nan
    for ohem in (None, Ohem(), Ohem(probability=0.01, least=0.5)):
        assert PixelLoss(ohem=ohem)(logits, mask).isnan()


# All of them


EVERY = PixelLoss(ce=0.5, ohem=Ohem(), dice=0.7, lovasz=0.3, near=Near())


@pytest.mark.parametrize(
    "terms", [{"ce": 1, "ohem": Ohem(probability=0.5)}, {"ce": 0, "dice": 1}, {"ce": 0, "lovasz": 1}]
)
def test_gradients_are_those_of_small_differences(terms):
    logits, mask, distance = pixels(3, 2, 3, 4)
    mask[mask == 2] = 0  # a class that is nowhere
    loss, weight = PixelLoss(**terms), torch.tensor([1.0, 2, 3, 4])
    assert torch.autograd.gradcheck(lambda x: loss(x, mask, distance, weight), logits.requires_grad_())


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2, 3, 4])])
def test_a_micro_batch_without_a_labelled_pixel_costs_nothing_and_moves_nothing(weight):
    logits, mask, distance = pixels(0, 2, 6, 6)
    logits, mask = logits.float().requires_grad_(), torch.full_like(mask, IGNORED)
    loss = EVERY(logits, mask, distance, weight)
    loss.backward()
    assert loss.item() == 0 and (logits.grad == 0).all()


@pytest.mark.parametrize("name", ["ce", "dice", "lovasz"])
def test_a_pixel_without_a_class_matters_to_nothing(name):
    loss = PixelLoss(**{"ce": 0, name: 1})
    logits, mask, _ = pixels(4, 2, 7, 8)
    other = torch.where((mask == IGNORED)[:, None], 3 * logits.flip(1) + 1, logits)
    assert not torch.equal(other, logits)
    torch.testing.assert_close(loss(other, mask), loss(logits, mask))
    logits.requires_grad_()
    loss(logits, mask).backward()
    assert (logits.grad.abs().sum(1)[mask == IGNORED] < 1e-12).all() and logits.grad.abs().sum() > 0


# Sizes and precision


def test_smaller_scores_are_brought_to_the_mask_bilinearly():
    logits, mask, distance = pixels(6, 1, 3, 4)
    size = (7, 10)
    by_hand = np.zeros((1, 4, *size))
    for y in range(7):
        for x in range(10):
            v, u = max(0.0, (y + 0.5) * 3 / 7 - 0.5), max(0.0, (x + 0.5) * 4 / 10 - 0.5)
            j, i = int(v), int(u)
            for jj, a in ((j, 1 - (v - j)), (min(j + 1, 2), v - j)):
                for ii, b in ((i, 1 - (u - i)), (min(i + 1, 3), u - i)):
                    by_hand[0, :, y, x] += a * b * logits[0, :, jj, ii].numpy()
    np.testing.assert_allclose(resized(logits, size), by_hand, atol=1e-12)
    mask, distance = mask.repeat(1, 3, 3)[:, :7, :10], distance.repeat(1, 3, 3)[:, :7, :10]
    torch.testing.assert_close(EVERY(logits, mask, distance), EVERY(torch.from_numpy(by_hand), mask, distance))
    assert resized(logits, (3, 4)) is logits


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_also_under_autocast(kind):
    logits, mask, distance = pixels(8, 2, 8, 9)
    half = logits.to(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = EVERY(half[..., ::2, ::2], mask, distance)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, EVERY(half.float()[..., ::2, ::2], mask, distance), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["ohem", "dice", "lovasz"])
def test_no_shape_and_no_branch_depends_on_what_tensors_hold(name):
    """For that a GPU would have to be waited for; tensors without values cannot be asked."""
    loss = PixelLoss(ohem=Ohem(), near=Near()) if name == "ohem" else PixelLoss(ce=0, **{name: 1})
    with FakeTensorMode():
        logits, mask, distance = pixels(9, 2, 32, 32)
        logits.requires_grad_()
        found = loss(logits[..., ::2, ::2], mask, distance, torch.ones(4))
        found.backward()
    assert found.shape == () and logits.grad.shape == logits.shape


def test_tensors_without_values_notice_a_question():
    with FakeTensorMode(), pytest.raises(DynamicOutputShapeException):
        pixels(9, 2, 32, 32)[2][torch.rand(2, 32, 32) < 0.5].sum()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nothing_waits_for_the_device():
    """Nor by a copy, which the tests above would not notice."""
    logits, mask, distance = (x.cuda() for x in pixels(9, 2, 32, 32))
    logits, weight = logits.float().requires_grad_(), torch.tensor([1.0, 2, 3, 4]).cuda()
    EVERY(logits, mask, distance, weight).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = EVERY(logits[..., ::2, ::2], mask, distance, weight)
        found.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.item() > 0


# Settings


@pytest.mark.parametrize(
    ("block", "settings", "said"),
    [
        (PixelLoss, {"ce": -1}, "ce"),
        (PixelLoss, {"ce": 0}, "ce, dice, lovasz are all 0"),
        (PixelLoss, {"ce": 0, "dice": 1, "ohem": {}}, "ohem changes the cross-entropy"),
        (PixelLoss, {"ce": 0, "dice": 1, "near": {}}, "near changes the cross-entropy"),
        (Ohem, {"probability": 1.0}, "probability"),
        (Ohem, {"least": 0.0}, "least"),
        (Near, {"strength": 0.0}, "strength"),
        (Near, {"sigma": math.inf}, "sigma"),
    ],
)
def test_settings_that_make_no_sense_are_refused(block, settings, said):
    with pytest.raises(ValueError, match=said):
        validate(block, settings, {})


def test_shapes_that_do_not_fit_are_refused():
    logits, mask, distance = pixels(0, 2, 4, 4)
    with pytest.raises(ValueError, match="do not belong together"):
        PixelLoss()(logits, mask[:1])
    with pytest.raises(ValueError, match="near needs the distance"):
        PixelLoss(near=Near())(logits, mask)
    with pytest.raises(ValueError, match="near needs the distance"):
        PixelLoss(near=Near())(logits, mask, distance[:, :2])


def test_dice_and_lovasz_are_those_of_smp():
    smp = pytest.importorskip("segmentation_models_pytorch").losses
    logits, mask, _ = pixels(11, 3, 12, 13)
    logits = logits.float()  # smp's cannot do with more
    theirs = smp.LovaszLoss("multiclass", per_image=False, ignore_index=IGNORED, from_logits=True)
    torch.testing.assert_close(PixelLoss(ce=0, lovasz=1)(logits, mask), theirs(logits, mask.long()))
    theirs = smp.DiceLoss("multiclass", ignore_index=IGNORED, from_logits=True, smooth=0.0)
    torch.testing.assert_close(PixelLoss(ce=0, dice=1)(logits, mask), theirs(logits, mask.long()))
