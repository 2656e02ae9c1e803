"""Crops of images and masks for training: random scale, position and mirror, as numbers, then applied.

A crop is a region of whole pixels of the image, resampled. So that an image of two megapixels does not have to be
resized for a crop of half of one, the region is cut first: nothing but what is needed is resampled. Image, mask and
distance map are cut by the same numbers, which are a pure function of seed, epoch and row.

Pixels are seen as squares whose centres lie at (i + 1/2): the convention of `align_corners=False`, in which images
are resized when they are evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trainkit import rng
from trainkit.config.ranges import Fraction, Ratio
from trainkit.data import augment
from trainkit.data.augment import Distort, Light
from trainkit.tensors import torch

if TYPE_CHECKING:
    from torch import Tensor

STREAM = "scene"

DRAWS = ("scale", "down", "right", "flip")
"""One draw in [0, 1) for each, in this order: what a setting draws does not depend on the other settings."""


@dataclass(frozen=True)
class Cuts:
    """Regions that are cut of n images, and their places in the crops."""

    start: np.ndarray
    """int64 (n, 2), first row and column of the region in the image."""
    region: np.ndarray
    """int64 (n, 2), height and width of the region, in pixels of the image."""
    size: np.ndarray
    """int64 (n, 2), height and width to which it is resampled."""
    corner: np.ndarray
    """int64 (n, 2), first row and column of that in the crop; what is around it is padding."""
    flip: np.ndarray
    """bool (n,), whether it is mirrored, left to right, where it stands."""

    @property
    def factor(self) -> np.ndarray:
        """float64 (n,), pixels of the crop for a pixel of the image: of both axes, which rounding may part by half a
        pixel of the region, the geometric mean."""
        return np.sqrt((self.size / self.region).prod(1))


@dataclass(kw_only=True)
class SceneAugment:
    """Augmentation of training crops. Each crop is at a random place, a different one in every epoch."""

    scales: tuple[Ratio, Ratio] = (1.0, 1.0)
    """Smallest and largest scale factor of the image, sampled uniformly, as is usual for street scenes: with 0.25 to 2,
    more than half enlarge."""
    flip: Fraction = 0.0
    """Fraction of the crops that are mirrored left to right."""
    distort: Distort | None = None
    """Photometric distortion, padding included. null: none."""

    def __post_init__(self) -> None:
        augment.check_order(self, "scales")

    @property
    def colours(self) -> Light | None:
        """The augmentation that draws and applies the distortion, on the device; None without any."""
        return None if self.distort is None else Light(name="light", flip=0.0, distort=self.distort)

    def cuts(
        self,
        seed: int,
        epoch: int,
        rows: np.ndarray,
        shapes: np.ndarray,
        base: np.ndarray | float,
        crop: tuple[int, int],
    ) -> Cuts:
        """Draw the cuts of `rows` in an epoch, of images of `shapes`, int64 (rows, 2), for crops of `crop`.

        `base` is a factor on the size of each image, (rows,), beside the one that is drawn. Along an axis on which
        the scaled image is the larger, the crop lies within it, else it within the crop; each place is as likely.
        """
        draws = rng.uniform(seed, STREAM, epoch, np.asarray(rows)[:, None], np.arange(len(DRAWS)))
        low, high = self.scales
        factor = np.broadcast_to(base, len(draws)) * (low + (high - low) * draws[:, 0])
        return place(factor, draws[:, 1:3], draws[:, 3] < self.flip, shapes, crop)


def place(factor: np.ndarray, where: np.ndarray, flip: np.ndarray, shapes: np.ndarray, crop: Sequence[int]) -> Cuts:
    """Place the cuts of images of `shapes` (n, 2), scaled by `factor` (n,): at `where` (n, 2), from 0, as far up and
    left as can be, to below 1."""
    side, shapes = np.asarray(crop, np.int64), np.asarray(shapes, np.int64)
    wanted = side / factor[:, None]
    inside = wanted <= shapes
    region = np.where(inside, np.maximum(np.rint(np.minimum(wanted, shapes)), 1), shapes).astype(np.int64)
    scaled = np.clip(np.rint(shapes * factor[:, None]), 1, side)
    size = np.where(inside, side, scaled).astype(np.int64)
    start = (where * (shapes - region + 1)).astype(np.int64)
    corner = (where * (side - size + 1)).astype(np.int64)
    return Cuts(start, region, size, corner, np.asarray(flip, bool))


def cut_picture(pixels: np.ndarray, cuts: Cuts, i: int, out: Tensor, fill: Tensor) -> None:
    """Write crop `i` of an image, uint8 (3, H, W) in any memory order, to `out`, uint8 (3, h, w).

    Bilinear, with antialiasing where it becomes smaller; padding is `fill`, uint8 (3,).
    """
    (y, x), (height, width), size = cuts.start[i].tolist(), cuts.region[i].tolist(), cuts.size[i].tolist()
    piece = pixels[:, y : y + height, x : x + width]
    # What PIL decoded must not be written to, of which torch warns.
    region = torch.from_numpy(piece if piece.flags.writeable else piece.copy(order="K"))
    if [height, width] != size:
        # Of uint8, which torch does with vector instructions: 0.2 ms for 180 x 240 to 160 x 224 and 4 to 8 ms for
        # 1024 x 2048 to 512 x 1024, where PIL, whose resize may begin between pixels, takes 0.5 and 11 to 21.
        region = torch.nn.functional.interpolate(region[None], size, mode="bilinear", antialias=True)[0]
    if size != list(out.shape[1:]):
        out.copy_(fill[:, None, None].expand_as(out))
        down, right = cuts.corner[i].tolist()
        out = out[:, down : down + size[0], right : right + size[1]]
    out.copy_(region.flip(-1) if cuts.flip[i] else region)


def cut_map(values: np.ndarray, cuts: Cuts, i: int, out: np.ndarray, fill: float) -> None:
    """Write crop `i` of a mask or of any other map (H, W) to `out` (h, w): each pixel has the value of the pixel of the
    map in which its centre lies. Padding is `fill`."""
    start, region, size = cuts.start[i].tolist(), cuts.region[i].tolist(), cuts.size[i].tolist()
    ys, xs = (at + nearest(r, s) for at, r, s in zip(start, region, size, strict=True))
    if cuts.flip[i]:
        xs = xs[::-1]
    if size != list(out.shape):
        out[:] = fill
        down, right = cuts.corner[i].tolist()
        out = out[down : down + size[0], right : right + size[1]]
    # By rows and then by columns: a third of the time of one index for both.
    np.copyto(out, values.take(ys, 0).take(xs, 1))


def nearest(length: int, size: int) -> np.ndarray:
    """Return in which of `length` pixels the centre of each of `size` pixels over them lies, int64 (size,)."""
    return (2 * np.arange(size) + 1) * length // (2 * size)
