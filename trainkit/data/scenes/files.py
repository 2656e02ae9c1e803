"""An image of a scene and its mask: what they are, and how the files of both are read, whatever set they are from.

Of images only headers are looked at here. Masks are read as they are stored: what their values stand for is said by
`label_maps`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from trainkit.data.formats import image_decode
from trainkit.data.scenes.label_maps import Labels
from trainkit.errors import UserError

_MASK_FORMATS = ("PNG", "BMP")
_UNPACKED = {"L;2": 85, "L;4": 17}
"""Factor of PIL on grey of 2 and 4 bits, so that white is 255."""


@dataclass(frozen=True)
class Scene:
    """One image of a source and its mask."""

    id: str
    """Its name in the source: the path of the image below its folder. No two of a source are alike."""
    image: Path
    mask: Path
    where: str
    """Its place in words, for messages."""


def read_mask(scene: Scene, coloured: bool = False) -> np.ndarray:
    """Read the mask of a scene as it is in its file: (h, w) uint8 or uint16, or (h, w, 3) uint8 where it is in colour.

    Of a palette PNG these are the indices, and grey of 1, 2 and 4 bits is 0 .. 1, 3 and 15; with `coloured`
    (`Labels.coloured`) they are colours, of which white is 255. Alpha is dropped. Raises UserError for anything
    damaged, too large, animated, or of another format.
    """
    where = str(scene.mask)
    with image_decode.open_image(scene.mask, where) as picture:
        if picture.format not in _MASK_FORMATS:  # JPEG and WebP change values
            raise UserError(where, f"a {picture.format} file", "a mask as PNG", "save the masks again, as PNG")
        tiles = getattr(picture, "tile", ())  # which only images from files have
        raw = tiles[0].args if tiles else ""
        raw = raw[0] if isinstance(raw, tuple) else raw
        picture.load()
        if picture.mode == "P" and coloured:
            return _with_palette(picture, where)
        if picture.mode in ("RGBA", "LA", "RGB") and ";16" in str(raw):
            raise UserError(where, "16 bits a channel", "one channel, or colours of 8 bits")
        if picture.mode in ("RGB", "RGBA"):
            return np.ascontiguousarray(np.asarray(picture)[..., :3])
        values = np.asarray(picture.getchannel(0) if picture.mode == "LA" else picture)
        if values.dtype == bool:
            return values.astype(np.uint8) * np.uint8(255 if coloured else 1)
        if values.dtype == np.uint8:
            return values if coloured else values // _UNPACKED.get(raw, 1)
        if values.ndim != 2 or values.dtype.kind not in "ui" or values.min() < 0 or values.max() > 0xFFFF:
            raise UserError(where, f"pixels of mode {picture.mode}", "8 or 16 bits a pixel")
        return values.astype(np.uint16)


def _with_palette(picture: Image.Image, where: str) -> np.ndarray:
    colours = np.asarray(picture.getpalette("RGB") or [], np.uint8).reshape(-1, 3)
    indices = np.asarray(picture)
    if indices.max() >= len(colours):
        raise UserError(where, f"index {indices.max()} of a palette of {len(colours)}", "a whole palette PNG")
    return colours[indices]


def read_classes(scene: Scene, labels: Labels, shape: tuple[int, int]) -> np.ndarray:
    """Read the classes of a mask, uint8 (h, w).

    Raises UserError for a mask that cannot be read, whose values or colours are none of `labels`, or that is not of
    `shape`, height and width of its image.
    """
    where = str(scene.mask)
    classes = labels.classes(read_mask(scene, labels.coloured), where)
    if classes.shape != shape:
        turned = " (is it rotated by its EXIF orientation?)" if classes.shape == shape[::-1] else ""
        found = f"{classes.shape[1]} x {classes.shape[0]} pixels, its image {shape[1]} x {shape[0]}{turned}"
        raise UserError(where, found)
    return classes


def picture_bytes(scene: Scene) -> bytes:
    """Return the file of the image of a scene. Raises UserError where it cannot be read."""
    return image_decode.read(scene.image, scene.where)


def header(scene: Scene) -> tuple[tuple[int, int], int]:
    """Return height and width of the image of a scene as it is decoded, from its header, and the EXIF orientation by
    which it is turned: 1 to 8, 1 for not at all. Raises UserError."""
    return image_decode.header(scene.image, scene.where)
