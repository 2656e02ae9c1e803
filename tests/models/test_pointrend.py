"""Point refinement against plain loops: what is sampled, what is drawn, and what a refinement changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from trainkit.config.validation import validate
from trainkit.models.pointrend import (
    PointHead,
    PointSpec,
    choose_points,
    pixel_centres,
    points_near_boundaries,
    pooled,
    refine,
    sample,
    uncertainty,
)


def by_hand(maps: np.ndarray, x: float, y: float) -> np.ndarray:
    """Bilinear values (C,) of one map (C, H, W) at one point, its outermost pixels going on beyond their centres."""
    height, width = maps.shape[1:]
    u, v = min(max(x * width - 0.5, 0), width - 1), min(max(y * height - 0.5, 0), height - 1)
    i, j = int(v), int(u)
    k, m = min(i + 1, height - 1), min(j + 1, width - 1)
    a, b = v - i, u - j
    upper = (1 - b) * maps[:, i, j] + b * maps[:, i, m]
    return (1 - a) * upper + a * ((1 - b) * maps[:, k, j] + b * maps[:, k, m])


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_values_at_points_are_bilinear(height, width, seed):
    rng = np.random.default_rng(seed)
    maps, points = rng.normal(size=(2, 3, height, width)), rng.random((2, 7, 2))
    points[0, 0], points[0, 1], points[0, 2] = (0, 0), (1, 1), (0.5 / width, 1 - 0.5 / height)
    found = sample(torch.as_tensor(maps), torch.as_tensor(points)).numpy()
    for b in range(2):
        for n in range(7):
            np.testing.assert_allclose(found[b, :, n], by_hand(maps[b], *points[b, n]), atol=1e-12)


def test_gradients_at_points_are_those_of_grid_sample_and_half_precision_is_widened():
    maps, points = torch.randn(2, 3, 5, 4, dtype=torch.float64), torch.rand(2, 9, 2, dtype=torch.float64)
    mine, theirs = maps.clone().requires_grad_(), maps.clone().requires_grad_()
    weight = torch.randn(2, 3, 9, dtype=torch.float64)
    (sample(mine, points) * weight).sum().backward()
    grid = (2 * points - 1)[:, :, None]
    seen = F.grid_sample(theirs, grid, padding_mode="border", align_corners=False)[..., 0]
    (seen * weight).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
    assert sample(maps.bfloat16(), points.float()).dtype == torch.float32


def test_uncertainty_is_the_margin_between_the_two_best():
    logits = torch.randn(2, 6, 3, 4)
    logits[0, :, 0, 0] = torch.tensor([3.0, 3.0, -1, -2, -3, -4])
    found = uncertainty(logits)
    for b, y, x in np.ndindex(2, 3, 4):
        first, second = sorted(logits[b, :, y, x].tolist(), reverse=True)[:2]
        assert found[b, y, x].item() == pytest.approx(second - first)
    assert found[0, 0, 0] == 0 and (found <= 0).all()


def test_the_least_sure_of_those_drawn_are_kept_and_the_rest_lie_anywhere():
    spec, logits = PointSpec(points=20, oversample=3.0, importance=0.75), torch.randn(2, 4, 6, 6)
    torch.manual_seed(3)
    found = choose_points(logits, spec).numpy()
    torch.manual_seed(3)
    candidates, anywhere = torch.rand(2, 60, 2).numpy(), torch.rand(2, 5, 2).numpy()
    for b in range(2):
        margins = []
        for point in candidates[b]:
            values = sorted(by_hand(logits[b].numpy(), *point), reverse=True)
            margins.append(values[0] - values[1])
        expected = candidates[b][np.argsort(margins)[:15]]
        assert {tuple(p) for p in found[b, :15]} == {tuple(p) for p in expected}
        np.testing.assert_array_equal(found[b, 15:], anywhere[b])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (0, 1536, 512)),
        ({"near": 0.5}, (1024, 768, 256)),
        ({"near": 1.0}, (2048, 0, 0)),
        ({"importance": 0.0}, (0, 0, 2048)),
        ({"points": 1, "importance": 1.0}, (0, 1, 0)),
    ],
)
def test_shares_of_the_points_add_up(given, expected):
    spec = PointSpec(**given)
    assert spec.parts == expected and sum(spec.parts) == spec.points
    found = choose_points(torch.randn(2, 3, 8, 8), spec, torch.rand(2, 32, 32) * 16)
    assert found.shape == (2, spec.points, 2) and found.min() >= 0 and found.max() <= 1


def test_points_near_boundaries_follow_the_distances():
    rng = np.random.default_rng(0)
    distance = rng.choice([0.5, 1.0, 2.0, 3.5, 6.0, 16.0], size=(2, 5, 7)).astype(np.float32)
    torch.manual_seed(0)
    count, sigma = 100_000, 2.0
    found = points_near_boundaries(torch.as_tensor(distance), count, sigma).numpy()
    for b in range(2):
        weight = np.exp(-(distance[b].astype(float) ** 2) / (2 * sigma**2))
        x, y = (found[b] * [7, 5]).T
        counts = np.zeros((5, 7))
        np.add.at(counts, (y.astype(int), x.astype(int)), 1)
        share = weight / weight.sum()
        # Four standard deviations, and what weights in parts of 65,536 may be off.
        assert (np.abs(counts / count - share) < 4 * np.sqrt(share / count) + 3e-5).all()
        within = np.concatenate([x % 1, y % 1])
        np.testing.assert_allclose(np.histogram(within, 4, (0, 1))[0] / len(within), 0.25, atol=0.01)


def test_no_shape_of_what_is_drawn_depends_on_what_tensors_hold():
    """For that a GPU would have to be waited for; tensors without values cannot be asked."""
    spec = PointSpec(points=64, near=0.5)
    with FakeTensorMode():
        found = choose_points(torch.randn(2, 3, 8, 8), spec, torch.rand(2, 16, 16))
        values = sample(torch.randn(2, 5, 16, 16), found)
    assert found.shape == (2, 64, 2) and values.shape == (2, 5, 64)


def test_points_near_boundaries_need_distances():
    with pytest.raises(ValueError, match="need distances"):
        choose_points(torch.randn(1, 3, 8, 8), PointSpec(near=0.1))


def doubled(logits: np.ndarray) -> np.ndarray:
    """Logits (C, h, w) at twice the size, by hand."""
    height, width = (2 * side for side in logits.shape[1:])
    rows = [[by_hand(logits, (x + 0.5) / width, (y + 0.5) / height) for x in range(width)] for y in range(height)]
    return np.array(rows).transpose(2, 0, 1)


@torch.no_grad()
def test_a_refinement_predicts_the_least_sure_points_anew_and_leaves_the_others():
    torch.manual_seed(0)
    spec = PointSpec(channels=8, subdivide=11)
    head = PointHead(spec, 3, 4).double()
    torch.nn.init.normal_(head.predict.weight)
    coarse, fine = torch.randn(1, 4, 3, 4, dtype=torch.float64), torch.randn(1, 3, 6, 8, dtype=torch.float64)
    found = refine(head, coarse, fine, (12, 16), spec)[0].numpy()
    logits = coarse[0].numpy()
    for _ in range(2):
        logits = doubled(logits)
        best = np.sort(logits, axis=0)
        order = np.argsort((best[-1] - best[-2]).ravel())[:11]
        width = logits.shape[2]
        centres = [((n % width + 0.5) / width, (n // width + 0.5) / logits.shape[1]) for n in order]
        for (x, y), n in zip(centres, order, strict=True):
            features = [by_hand(m[0].numpy(), x, y) for m in (fine, coarse)]
            said = head(*(torch.as_tensor(f)[None, :, None] for f in features))[0, :, 0].numpy()
            logits[:, n // width, n % width] = said
    np.testing.assert_allclose(found, logits, atol=1e-9)


@torch.no_grad()
def test_how_far_a_refinement_goes():
    coarse, fine = torch.randn(2, 3, 4, 6), torch.randn(2, 5, 8, 12)
    enlarged = F.interpolate(coarse, size=(32, 48), mode="bilinear", align_corners=False)
    for steps, doublings in ((None, 3), (3, 3), (1, 1), (0, 0), (8, 3)):
        spec = PointSpec(channels=8, subdivide=4, steps=steps)
        asked = []
        head = PointHead(spec, 5, 3)
        head.register_forward_hook(lambda module, given, out, asked=asked: asked.append(out.shape[2]))
        out = refine(head, coarse, fine, (32, 48), spec)
        assert out.shape == (2, 3, 32, 48) and asked == [4] * doublings
        if not doublings:
            torch.testing.assert_close(out, enlarged)
    everywhere = PointSpec(channels=8, subdivide=10**6)
    head = PointHead(everywhere, 5, 3)
    points = pixel_centres(torch.arange(32 * 48).expand(2, -1), 32, 48)
    expected = head(sample(fine, points), sample(coarse, points)).unflatten(2, (32, 48))
    torch.testing.assert_close(refine(head, coarse, fine, (32, 48), everywhere), expected)


@torch.no_grad()
def test_half_precision_is_refined_in_float32():
    torch.manual_seed(0)
    spec = PointSpec(channels=8, subdivide=4)
    head, coarse, fine = PointHead(spec, 5, 3), torch.randn(1, 3, 4, 6).bfloat16(), torch.randn(1, 5, 8, 12)
    found = refine(head, coarse, fine, (32, 48), spec)
    assert found.dtype == torch.float32
    assert torch.equal(found, refine(head, coarse.float(), fine, (32, 48), spec))


def test_logits_that_are_too_fine_are_pooled():
    logits = torch.randn(1, 2, 8, 12)
    torch.testing.assert_close(pooled(logits, 1)[0, 1, 1, 2], logits[0, 1, 4:8, 8:12].mean())
    assert pooled(logits, 2).shape == (1, 2, 4, 6) and pooled(logits, 4) is logits and pooled(logits, 8) is logits


def test_the_head_is_as_published():
    head = PointHead(PointSpec(), 256, 19)
    widths = [256 + 19, 256, 256]
    assert [layer.weight.shape for layer in head.layers] == [(256, w, 1) for w in widths]
    assert sum(p.numel() for p in head.parameters()) == sum(w * 256 + 256 for w in widths) + 256 * 19 + 19
    assert head.predict.weight.std().item() == pytest.approx(0.001, rel=0.1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"points": 0}, "points"),
        ({"oversample": 0.5}, "oversample"),
        ({"importance": 1.5}, "importance"),
        ({"near": -0.1}, "near"),
        ({"sigma": 0.0}, "sigma"),
        ({"steps": -1}, "steps"),
        ({"subdivide": 0}, "subdivide"),
        ({"weight": float("nan")}, "weight"),
    ],
)
def test_what_no_head_can_have_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        validate(PointSpec, given, {})


@pytest.mark.slow
def test_a_refinement_can_be_exported_for_pictures_of_any_size():
    spec = PointSpec(channels=8, subdivide=30)
    head = PointHead(spec, 5, 3)
    torch.nn.init.normal_(head.predict.weight)

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = head

        def forward(self, image):
            fine = F.avg_pool2d(image, 4).repeat(1, 2, 1, 1)[:, :5]
            return refine(self.head, F.avg_pool2d(image, 8), fine, (image.shape[2], image.shape[3]), spec)

    dynamic = torch.export.Dim.DYNAMIC
    sides = {"image": {0: dynamic, 2: 32 * torch.export.Dim("high"), 3: 32 * torch.export.Dim("wide")}}
    exported = torch.export.export(Whole(), (torch.randn(2, 3, 96, 128),), dynamic_shapes=sides).module()
    for shape in ((1, 3, 64, 64), (3, 3, 128, 96)):
        image = torch.randn(shape)
        torch.testing.assert_close(exported(image), Whole()(image))
