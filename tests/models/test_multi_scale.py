"""Predictions at several sizes, mirrored and through windows, against loops that do one after another."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.models.multi_scale import probabilities, round_up

torch.manual_seed(0)
COARSE = torch.nn.Conv2d(3, 4, 5, stride=2, padding=2).requires_grad_(False)
"""Sees neighbours, so that borders, sizes and mirror images matter, and gives scores at half the size."""


def pictures(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bilinear(x, size, align_corners=False):
    return F.interpolate(x, size, mode="bilinear", align_corners=align_corners)


def mirrored(x, axes):
    return torch.from_numpy(np.flip(x.numpy(), axes).copy()) if axes else x


def subsets(mirrors):
    axes = [axis for axis, on in zip((2, 3), mirrors, strict=True) if on]
    return [c for n in range(len(axes) + 1) for c in itertools.combinations(axes, n)]


@given(st.floats(0.01, 5000), st.integers(1, 64))
@settings(deadline=None)
def test_sides_are_rounded_up_to_multiples(length, multiple):
    found = round_up(length, multiple)
    assert found % multiple == 0 and found >= max(1, round(length)) and found - multiple < max(1, round(length))


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("mirrors", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(("scales", "multiple"), [((1.0,), 1), ((1.0,), 8), ((0.5, 1.0, 1.75), 4), ((0.3, 1.25), 1)])
def test_the_mean_over_sizes_and_mirror_images_is_that_of_a_loop(scales, multiple, mirrors, corners):
    image, sizes, parts = pictures(2, 3, 22, 30), [], []

    def forward(seen):
        sizes.append(tuple(seen.shape[2:]))
        return COARSE(seen)

    found = probabilities(forward, image, scales=scales, mirrors=mirrors, multiple=multiple, align_corners=corners)
    assert found.shape == (2, 4, 22, 30) and found.dtype == torch.float32
    expected = []
    for scale in scales:
        size = tuple(int(np.ceil(round(side * scale) / multiple)) * multiple for side in (22, 30))
        for axes in subsets(mirrors):
            expected.append(size)
            scores = COARSE(mirrored(bilinear(image, size, corners), axes))
            # The networks of the public implementation enlarge their scores to what they saw, by its borders.
            scores = bilinear(scores, size) if corners else scores
            parts.append(mirrored(bilinear(scores, (22, 30), corners).softmax(1), axes))
    assert sizes == expected
    torch.testing.assert_close(found, torch.stack(parts).mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("mirrors", [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    ("scales", "window", "starts"),
    [
        ((1.0,), (12, 12), ([0, 8, 16, 20], [0, 8, 16, 18])),
        ((1.0,), (9, 30), ([0, 6, 12, 18, 23], [0])),
        ((1.0,), (40, 30), ([0], [0])),
        ((0.5,), (12, 12), ([0, 4], [0, 3])),
        ((1.0, 0.5), (32, 30), ([0], [0])),
    ],
)
def test_windows_are_averaged_as_a_loop_over_them_does(scales, window, starts, mirrors, corners):
    image, parts = pictures(2, 3, 32, 30, seed=1), []
    settings = {"scales": scales, "window": window, "mirrors": mirrors, "batch_size": 3}
    found = probabilities(COARSE, image, **settings, align_corners=corners)
    for scale in scales:
        size = round(32 * scale), round(30 * scale)
        seen = bilinear(image, size, corners) if scale != 1 else image
        low = [max(0, w - s) // 2 for w, s in zip(window, size, strict=True)]
        room = torch.zeros(2, 3, *(max(w, s) for w, s in zip(window, size, strict=True)))
        room[:, :, low[0] : low[0] + size[0], low[1] : low[1] + size[1]] = seen
        total, count = torch.zeros(2, 4, *room.shape[2:]), torch.zeros(room.shape[2:])
        for y, x in itertools.product(*starts):
            here = (slice(None), slice(None), slice(y, y + window[0]), slice(x, x + window[1]))
            for axes in subsets(mirrors):
                total[here] += mirrored(bilinear(COARSE(mirrored(room[here], axes)), window).softmax(1), axes)
                count[here[2:]] += 1
        assert (count > 0).all()
        total = (total / count)[:, :, low[0] : low[0] + size[0], low[1] : low[1] + size[1]]
        parts.append(bilinear(total, (32, 30), corners))
    torch.testing.assert_close(found, torch.stack(parts).mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("window", [(0, 0), (16, 24)])
def test_a_picture_does_not_depend_on_its_neighbours(window):
    image = pictures(3, 3, 33, 41)
    settings = {"scales": (0.75, 1.5), "mirrors": (False, True), "window": window, "multiple": 8}
    alone = torch.cat([probabilities(COARSE, image[i : i + 1], **settings) for i in range(3)])
    torch.testing.assert_close(probabilities(COARSE, image, **settings), alone, rtol=0, atol=1e-6)


def test_windows_are_brought_to_multiples_and_padded_with_the_mean_colour_on_both_sides():
    image = 5 + pictures(1, 3, 10, 12)

    def forward(seen):
        assert seen.shape == (1, 3, 16, 16)
        assert torch.equal(seen[:, :, 3:13, 2:14], image)
        assert (seen != 0).sum() == image.numel()
        return COARSE(seen)

    assert probabilities(forward, image, window=(9, 13), multiple=8).shape == (1, 4, 10, 12)
