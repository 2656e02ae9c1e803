"""Class probabilities of images, averaged over scales, mirror images and windows (test-time augmentation).

Follows the evaluation of the public BiSeNet: scales 0.5 to 1.75, the mirror image, windows with a stride of two thirds
of their side, softmax before any mean. Overlapping windows are averaged.

Pixels are squares with centres at (i + 1/2). The public implementation does the same within its networks, but aligns
the centres of the corner pixels (`align_corners`) when it resizes images and scores; it enlarges scores to the size of
the network's input first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.losses.segmentation_2d import resized
from trainkit.models.sliding_window import axis_subsets, sliding_probabilities

OVERLAP = 1 / 3
"""Share of a window that it has in common with the next."""


def round_up(length: float, multiple: int) -> int:
    """The next multiple of `multiple` from the whole number nearest to `length`; at least one."""
    return max(1, -(-round(length) // multiple)) * multiple


@torch.no_grad()
def probabilities(
    forward: Callable[[Tensor], Tensor],
    image: Tensor,
    *,
    scales: Sequence[float] = (1.0,),
    mirrors: Sequence[bool] = (False, False),
    window: Sequence[int] = (0, 0),
    multiple: int = 1,
    batch_size: int = 4,
    align_corners: bool = False,
    size: Sequence[int] | None = None,
) -> Tensor:
    """Class probabilities, float32 (B, classes, h, w), of images (B, channels, H, W): a mean over `scales`.

    `forward` maps images whose sides are multiples of `multiple` to class scores (b, classes, ., .) of any size over
    the same extent. For each scale the images are resized bilinearly, with sides rounded up to multiples; scores are
    resized bilinearly to `size` (h, w; None: that of the images), and their softmax is averaged, together with that of
    the mirror images along every combination of the axes in `mirrors` (height, width).

    With a `window` (height, width; rounded up to multiples) each scaled image is divided into windows, at most
    `batch_size` per forward pass, and the mean of their softmax is resized to `size`. An image smaller than a window is
    padded with 0, the mean colour, on both sides. Images are processed one at a time, so neither the other images of a
    batch nor `batch_size` change the result.
    """
    if bool(window[0]) != bool(window[1]):
        raise ValueError(f"window is {tuple(window)}; expected both sides or none")
    own, flips = image.shape[2:], list(axis_subsets([2 + axis for axis, on in enumerate(mirrors) if on]))
    target = tuple(own if size is None else size)

    def whole(scale: float) -> Tensor:
        seen = _resized(image, [round_up(side * scale, multiple) for side in own], align_corners)

        def turned(flip: list[int]) -> Tensor:
            scores = forward(seen.flip(flip) if flip else seen)
            # Flip back before it is enlarged.
            return resize_back(scores.flip(flip) if flip else scores, seen.shape[2:], target, align_corners).softmax(1)

        return reduce(Tensor.add_, map(turned, flips)).div_(len(flips))

    def windowed(scale: float) -> Tensor:
        seen = _resized(image, [max(1, round(side * scale)) for side in own], align_corners)
        sides = [round_up(side, multiple) for side in window]
        found = [_through_windows(forward, picture[None], sides, mirrors, batch_size) for picture in seen]
        return torch.stack([resized(part[None], target, align_corners)[0] for part in found])

    return reduce(Tensor.add_, map(windowed if window[0] else whole, scales)).div_(len(scales))


def resize_back(scores: Tensor, seen: Sequence[int], size: Sequence[int], align_corners: bool) -> Tensor:
    """Class scores resized to (B, C, *size), float32 or wider, for images with the input size `seen`."""
    return resized(resized(scores, seen) if align_corners else scores, size, align_corners)


def _through_windows(
    forward: Callable[[Tensor], Tensor], image: Tensor, window: list[int], mirrors: Sequence[bool], batch_size: int
) -> Tensor:
    settings = {"overlap": OVERLAP, "batch_size": batch_size, "mirrors": mirrors, "fill": 0.0}
    return sliding_probabilities(
        lambda part: resized(forward(part), part.shape[2:]), image, window, weight="constant", **settings
    )


def _resized(image: Tensor, size: Sequence[int], align_corners: bool) -> Tensor:
    """Images resized like the scores in `resized`, in their own precision."""
    if image.shape[2:] == torch.Size(size):
        return image
    return F.interpolate(image, tuple(size), mode="bilinear", align_corners=align_corners)
