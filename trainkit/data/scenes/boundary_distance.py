"""Distance of every pixel to the nearest boundary between two classes: computed once, kept compressed, never stale.

A boundary runs along the edges that two neighbouring pixels (left and right, or above and below) of different classes
share. The distance is that from the centre of a pixel to the nearest point of these edges, in pixels: 0.5 beside a
straight boundary. So it belongs to the image and not to its grid: seen at twice the size it is twice as large,
mirrored it is mirrored, and a crop of the map is the map of the crop but for boundaries that were cut away.

What a folder of such maps was made of, the digest of the masks and the settings, stands in its name and in its
manifest, and is compared when it is opened: maps of other masks are never taken for theirs.

A map of 480 x 360 (CamVid) takes 27 ms to compute and 19 kB to keep, and is read in 0.5 ms; one of 2048 x 1024 takes
0.4 s and is read in 5 ms (one core of a server).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from trainkit.data import cache
from trainkit.data.cache import Progress
from trainkit.data.rows.row_files import REBUILD, Form, Layout
from trainkit.data.rows.writer import Writer
from trainkit.data.scenes import mask_store
from trainkit.data.scenes.mask_store import MAP_COLUMNS, CompressedMaps, PackedMasks
from trainkit.data.threads import each, threads
from trainkit.errors import UserError
from trainkit.files import Json
from trainkit.interfaces import IGNORED

FORMAT = "trainkit-distances"
VERSION = 1
"""Raised with any change to what is computed."""

STEP = 0.25
"""Pixels from one stored value to the next."""

CAP_LIMIT = 255 * STEP
"""Largest cap: stored values are bytes."""

_BAND = 1 << 18
"""Pixels that are worked on at a time: what they take stays in the cache of a core."""


@dataclass(kw_only=True)
class Distance:
    """Distance of every pixel to the nearest class boundary, for losses and for the sampling of points."""

    cap: Annotated[float, Field(ge=0.5, le=CAP_LIMIT)] = 16.0
    """Largest distance, in pixels of the packed image; larger distances are clipped to it. At most 63.75."""

    def __post_init__(self) -> None:
        self.cap = float(self.cap)  # 16 and 16.0 name the same maps


def from_mask(mask: np.ndarray, cap: float) -> np.ndarray:
    """Compute the distance from the centre of each pixel of a mask, uint8 (height, width), to the nearest boundary.

    float32 (height, width), in pixels, exact and at most `cap`, which is given where no boundary is that near. The
    border with unlabelled pixels is none.
    """
    height, width = mask.shape
    rows, halo = max(32, _BAND // max(width, 1)), math.ceil(cap) + 1
    squares = np.empty((height, width), np.float32)
    for first in range(0, height, rows):
        last, above = min(first + rows, height), max(first - halo, 0)
        part = _squares(mask[above : last + halo])
        squares[first:last] = part[first - above : last - above]
    np.minimum(squares, np.float32(4 * cap**2), out=squares)
    return np.sqrt(squares, out=squares) / np.float32(2)


def _squares(mask: np.ndarray) -> np.ndarray:
    """Compute four times the squared distances, float64: whole numbers.

    On a grid of half pixels the centres of pixels have odd coordinates, the corners even ones. The point of an edge
    that is nearest to a centre is its middle or one of its ends, so these are all that is looked for.
    """
    from scipy import ndimage

    height, width = mask.shape
    known = mask != IGNORED
    across = (mask[:, 1:] != mask[:, :-1]) & known[:, 1:] & known[:, :-1]
    down = (mask[1:] != mask[:-1]) & known[1:] & known[:-1]
    free = np.ones((2 * height + 1, 2 * width + 1), bool)
    for k in range(3):  # one end of each edge, its middle, the other end
        free[k : 2 * height - 1 + k : 2, 2:-1:2] &= ~across
        free[2:-1:2, k : 2 * width - 1 + k : 2] &= ~down
    if free.all():  # of which the transform says nothing
        return np.full(mask.shape, np.inf)
    return np.rint(np.asarray(ndimage.distance_transform_edt(free))[1::2, 1::2] ** 2)


class Distances(CompressedMaps):
    """The distance maps of a set of masks, opened for reading."""

    FORM = Form(FORMAT, VERSION, "a folder of distance maps")
    IDENTITY = ("rows", "of", "settings")

    @property
    def cap(self) -> float:
        """Largest distance, in pixels."""
        return self.manifest["settings"]["cap"]

    def levels(self, row: int) -> np.ndarray:
        """Read the distances of a row in steps of `STEP` pixels of the packed mask, uint8 (height, width).

        Not to be written to. Raises UserError where it was damaged.
        """
        return self.bytes_of(row)

    @classmethod
    def layout(cls, manifest: Mapping[str, Json]) -> Layout:
        """Return the columns of maps."""
        return MAP_COLUMNS


def distances_once(masks: PackedMasks, settings: Distance) -> Distances:
    """Make the distance maps of masks where they are not there yet. Processes that start together make them once.

    Raises UserError where the ones that are there are damaged, or are not those of the masks.
    """
    cap = settings.cap
    of: dict[str, Json] = {"rows": len(masks), "of": masks.digest, "settings": {"cap": cap, "ignored": "no"}}

    def one(row: int) -> dict[str, object]:
        # Half-steps go up.
        levels = np.floor(from_mask(masks.mask(row), cap) / np.float32(STEP) + np.float32(0.5))
        return mask_store.packed(levels.astype(np.uint8))

    def make(folder: Path, on_progress: Progress) -> None:
        with Writer(folder, MAP_COLUMNS) as writer:
            for row in each(one, range(len(masks)), threads()):
                writer.add(row)
                on_progress(writer.rows, len(masks))
            writer.publish(Distances, of)

    key, what = cache.key([FORMAT, VERSION, masks.digest, of["settings"]], ()), f"computing distances of {masks.path}"
    found = cache.pack_once(key, Distances, make, what, "mask")
    if any(found.manifest.get(name) != value for name, value in of.items()):
        wrong = "distances of other masks, or with other settings"
        raise UserError(str(found.path), wrong, f"up to {cap} of {masks.digest[:12]}, {masks.path}", REBUILD)
    if not np.array_equal(found.shapes, masks.shapes):
        raise found.damaged("rows.arrow", "shapes that are not those of the masks")
    return found
