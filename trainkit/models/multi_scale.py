"""Class probabilities of images, averaged over what a network sees of them: sizes, mirror images, windows.

As BiSeNet is evaluated (facts of the public implementation: sizes 0.5 to 1.75, the mirror image, windows whose stride
is two thirds of their side, softmax before any mean). Where windows overlap their mean is taken.

Pixels are seen as squares whose centres lie at (i + 1/2). The public implementation does so within its networks, but
lays the centres of the outermost pixels on each other (`align_corners`) where it brings an image to another size and
what was found back; it enlarges scores to the size of what the network saw first.
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
    the same extent. Of each scale the images are brought to that size, bilinear, and their sides are rounded up to
    multiples; scores are brought to `size` (h, w; None: that of the images), bilinear, and their softmax is averaged,
    with that of the mirror images along every combination of the axes in `mirrors` (height, width).

    With a `window` (height, width; rounded up to multiples) each scaled image is seen through windows instead, at
    most `batch_size` at once, and the mean of their softmax is brought to `size`. It is padded with 0, the mean colour,
    on both sides where it is smaller than a window. One image is seen at a time; neither its neighbours nor
    `batch_size` matter for what is found.
    """
    if bool(window[0]) != bool(window[1]):
        raise ValueError(f"window is {tuple(window)}; both sides are needed, or neither")
    own, flips = image.shape[2:], list(axis_subsets([2 + axis for axis, on in enumerate(mirrors) if on]))
    target = tuple(own if size is None else size)

    def whole(scale: float) -> Tensor:
        seen = _resized(image, [round_up(side * scale, multiple) for side in own], align_corners)

        def turned(flip: list[int]) -> Tensor:
            scores = forward(seen.flip(flip) if flip else seen)
            # Turned back while it is small.
            return resize_back(scores.flip(flip) if flip else scores, seen.shape[2:], target, align_corners).softmax(1)

        return reduce(Tensor.add_, map(turned, flips)).div_(len(flips))

    def windowed(scale: float) -> Tensor:
        seen = _resized(image, [max(1, round(side * scale)) for side in own], align_corners)
        sides = [round_up(side, multiple) for side in window]
        found = [_through_windows(forward, picture[None], sides, mirrors, batch_size) for picture in seen]
        return torch.stack([resized(part[None], target, align_corners)[0] for part in found])

    return reduce(Tensor.add_, map(windowed if window[0] else whole, scales)).div_(len(scales))


def resize_back(scores: Tensor, seen: Sequence[int], size: Sequence[int], align_corners: bool) -> Tensor:
    """Class scores (B, C, *size), float32 or wider, of images that a network saw at the size `seen`."""
    return resized(resized(scores, seen) if align_corners else scores, size, align_corners)


def _through_windows(
    forward: Callable[[Tensor], Tensor], image: Tensor, window: list[int], mirrors: Sequence[bool], batch_size: int
) -> Tensor:
    settings = {"overlap": OVERLAP, "batch_size": batch_size, "mirrors": mirrors, "fill": 0.0}
    return sliding_probabilities(
        lambda part: resized(forward(part), part.shape[2:]), image, window, weight="constant", **settings
    )


def _resized(image: Tensor, size: Sequence[int], align_corners: bool) -> Tensor:
    """Images as `resized` scores, in their own precision."""
    if image.shape[2:] == torch.Size(size):
        return image
    return F.interpolate(image, tuple(size), mode="bilinear", align_corners=align_corners)
