"""Scenes in tables: parquet and JSON files, sets saved by `datasets`, images with metadata and sets of the hub, with
images in one column and masks in another.

Columns are found by their names; a recipe has to say what the values in masks stand for. A few rows are in memory at a
time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

from trainkit.data.formats.image_decode import is_called_picture
from trainkit.data.formats.table_files import Cell
from trainkit.data.record import Columns
from trainkit.data.scenes.files import Scene
from trainkit.data.table import IMAGE_COLUMNS, TableRows, is_table, open_table
from trainkit.errors import UserError

MASK_COLUMNS = ("annotation", "mask", "label", "segmentation", "labels", "seg", "segmentation_mask", "semantic_mask")
"""Names of the column of masks in a table, in the order in which they are looked for."""

COLUMNS = {
    "mask": MASK_COLUMNS,
    "image": (*IMAGE_COLUMNS, "pixel_values"),
    "name": ("image_path",),
    "split": ("split",),
}

_ROWS = 16


def holds_rows(path: Path) -> bool:
    """Return whether there is a table at `path`; CSV is a list of paths."""
    return is_table(path) and not (path.is_file() and path.suffix.lower() == ".csv")


def open_rows(
    path: Path | str, split: str | None, part: str | None = None, columns: Columns | None = None
) -> TableScenes:
    """Return the scenes of the table at `path`, of a split that `open_table` chooses.

    Raises UserError where there is no such split, no column of images or of masks, or no row.
    """
    rows = open_table(path, split, part=part, at_once=_ROWS).take(COLUMNS, columns, ("name", "split"))
    if not rows.size:
        raise UserError(rows.where, "no rows", "an image and its mask per row")
    mask = next((row.cells["mask"] for row in rows.read("mask")), None)
    if isinstance(mask, str) and not is_called_picture(mask):
        raise UserError(rows.where, f"{rows.column('mask')}: {mask!r}"[:200], "the path of a mask")
    return TableScenes(rows)


class TableScenes(Sequence[Scene]):
    """Scenes of a table: a few rows are in memory at a time."""

    def __init__(self, rows: TableRows):
        self.rows, self._size = rows, rows.size
        self._reading: Iterator[Scene] = iter(self)
        self._last: Scene | None = None
        self._place = -1
        """Of the scene that was read last."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Scene]:
        for row in self.rows.read("image", "mask"):
            # An empty cell is an error of its row, to be counted with others; a path in place of bytes is the table's.
            mask = self._cell(row.cells["mask"], f"{row.where}, column {self.rows.column('mask')}")
            yield Scene(row.id, self._cell(row.cells["image"], row.where), mask, row.where)

    def _cell(self, cell: Cell, where: str) -> Path | bytes:
        return b"" if cell is None else self.rows.picture(cell, where)

    @overload
    def __getitem__(self, place: int) -> Scene: ...
    @overload
    def __getitem__(self, place: slice) -> list[Scene]: ...
    def __getitem__(self, place: int | slice) -> Scene | list[Scene]:
        """Return a scene: quick one after another; one before the last asked for begins at the first row again."""
        if isinstance(place, slice):
            return [self[n] for n in range(*place.indices(self._size))]
        place = range(self._size)[place]
        with self._lock:
            if self._last is None or place < self._place:
                self._reading, self._last, self._place = iter(self), None, -1
            try:
                while self._last is None or self._place < place:
                    self._last, self._place = next(self._reading), self._place + 1
            except UserError:  # which ends it: whoever asks again is to be told again
                self._last = None
                raise
            return self._last

    def ids(self) -> list[str]:
        """Return the names of all, without reading images."""
        return [row.id for row in self.rows.read()]
