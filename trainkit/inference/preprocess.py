"""How new images become what a network was trained on: brought to its size and normalised, as the data's own were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from trainkit.data import augment
from trainkit.data.augment import Timm
from trainkit.data.faces.dataset import Faces
from trainkit.data.formats import image_decode
from trainkit.data.images.dataset import Images
from trainkit.data.people.dataset import People

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Preparation:
    """Preprocessing of an image for a network, and the same in numbers for other programs."""

    side: tuple[int, int]
    """Height and width that the network sees."""
    mean: tuple[float, float, float]
    """Taken from pixels 0 .. 1, for red, green and blue."""
    std: tuple[float, float, float]
    """Divisor after `mean` is subtracted."""
    pixels: Callable[[np.ndarray, str], np.ndarray]
    """An image, uint8 (h, w, 3), and its place in words, to uint8 (3, *side). Raises UserError where it does not fit.
    """
    normal: Callable[[Tensor], Tensor]
    """Images, uint8 (B, 3, *side), to float ones, with the bits with which the run was evaluated."""
    words: str
    """How images get to their size."""
    crop_pct: float = 1.0
    """Share of the shorter side that is cut from the middle."""
    crop_mode: str = "center"
    """The same in timm's words: `center`, or `squash` where the whole is squeezed."""


def of(data: object) -> Preparation | None:
    """Return the preparation of the data `faces`, `images` and `people`; None for data of another kind."""
    if isinstance(data, Faces):
        side, half = (data.image_size, data.image_size), (0.5, 0.5, 0.5)
        if data.fit == "crop":
            words = "the largest centre square of a face, resized"
            return Preparation(side, half, half, partial(_fitted, side=side, how="crop"), _faces, words)
        words = "an aligned square face; a larger one is scaled down, any other shape is refused"
        return Preparation(side, half, half, partial(_fitted, side=side, how="down"), _faces, words)
    if isinstance(data, Images) and data.fit == "keep" and isinstance(data.augment, Timm):
        cut, share = data.augment.scoring(data.side), data.augment.crop_pct
        words = f"resized and centre-cropped to {100 * share:.4g} % of the shorter side"
        return _normalised(data, lambda pixels, where: cut(pixels).numpy(), words, share, "center")
    if not isinstance(data, Images | People) or data.fit == "keep":
        return None
    pixels = partial(_fitted, side=data.side, how=data.fit)
    if data.fit == "stretch":
        return _normalised(data, pixels, "the whole image, resized", 1.0, "squash")
    return _normalised(data, pixels, "the largest centre crop of that shape, resized", 1.0, "center")


def _normalised(
    data: Images | People, pixels: Callable[[np.ndarray, str], np.ndarray], words: str, share: float, mode: str
) -> Preparation:
    normal = partial(augment.normalise, mean=data.mean, std=data.std)
    return Preparation(data.side, data.mean, data.std, pixels, normal, words, share, mode)


def _fitted(pixels: np.ndarray, where: str, side: tuple[int, int], how: image_decode.Fit) -> np.ndarray:
    return np.ascontiguousarray(image_decode.fit(pixels, side, where, how).transpose(2, 0, 1))


def _faces(images: Tensor) -> Tensor:
    # As `FaceSplit.on_device`, whose bits it gives.
    return images.float().div(127.5).sub(1)
