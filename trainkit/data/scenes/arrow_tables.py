"""Scenes in tables: parquet files, sets saved by `datasets` and those of the hub, with pictures in one column and masks
in another.

Columns are found by their names; a recipe has to say what the values in masks stand for. A few rows are in memory at a
time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from trainkit.data.formats import arrow_tables
from trainkit.data.scenes.files import Scene
from trainkit.errors import UserError, few

if TYPE_CHECKING:
    import pyarrow

MASK_COLUMNS = ("annotation", "mask", "label", "segmentation", "labels", "seg", "segmentation_mask", "semantic_mask")
"""Names of the column of masks in a table, in the order in which they are looked for."""

_ROWS = 16


def is_table(path: Path) -> bool:
    """Return whether there is a parquet file at `path`, or a folder of some, or a saved set."""
    if path.is_dir():
        return arrow_tables.is_saved(path) or bool(arrow_tables.parquet_files(path))
    return path.suffix == ".parquet"


def open_rows(path: Path, split: str | None, parts: Sequence[str] = ()) -> Rows:
    """Return the scenes of the table at `path`: those of `split`, or without it of the split that one of `parts` names.

    `parts` are names of the same split, the usual one first; with neither, the split is what `tables.open_table` takes.
    Raises UserError where there is no such split, no column of pictures or of masks, or no row.
    """
    table, value, size, split = _open_table(path, split, parts)
    image, mask = _columns(str(path), table.schema)
    where = str(path) if split is None and value is None else f"{path}#{value or split}"
    if not size:
        raise UserError(where, "no rows", "a picture and its mask a row")
    return Rows(table, where, size, value, image, mask)


def _open_table(
    path: Path, split: str | None, parts: Sequence[str]
) -> tuple[arrow_tables.Table, str | None, int, str | None]:
    """Return the table, the value of its split column, how many rows that is, and the split that was found."""
    if split is not None or not parts:
        return *arrow_tables.open_table(path, split, _ROWS), split
    for name in parts:
        try:
            return *arrow_tables.open_table(path, name, _ROWS), name
        except UserError:
            continue
    table, value, size = arrow_tables.open_table(path, None, _ROWS)
    if value is not None or not path.is_file():
        raise UserError(str(path), f"no split {parts[0]!r}", "the path with # and the name of a split")
    return table, value, size, None


def _columns(where: str, schema: pyarrow.Schema) -> tuple[str, str]:
    """Return the columns of pictures and masks."""
    holding = [name for name in schema.names if arrow_tables.holds_pictures(schema.field(name).type)]
    mask = next((name for name in MASK_COLUMNS if name in holding), None)
    image = next((name for name in (*arrow_tables.IMAGE_COLUMNS, "pixel_values") if name in holding), None)
    if mask is None or image is None:
        wanted = f"pictures in one of {few(arrow_tables.IMAGE_COLUMNS, 9)}, masks in one of {few(MASK_COLUMNS, 9)}"
        raise UserError(where, f"columns {few(schema.names, 20)}"[:300], wanted)
    return image, mask


def _cell(cell: Any, where: str) -> bytes | None:
    return arrow_tables.picture_bytes(cell.as_py(), where) if cell.is_valid else None


class Rows(Sequence[Scene]):
    """Scenes of a table: a few rows are in memory at a time."""

    kind: str
    """Of the table, in words."""
    where: str
    """The table and its split, in words."""
    files: tuple[Path, ...]
    """What the table is made of."""

    def __init__(self, table: arrow_tables.Table, where: str, size: int, split: str | None, image: str, mask: str):
        """Take `size` rows of `table`, whose split column says `split` (None: all), and columns `image` and `mask`."""
        self.kind, self.where, self.files = table.kind, where, tuple(table.files)
        self._table, self._size, self._split = table, size, split
        self._image, self._mask = image, mask
        self._reading: Iterator[Scene] | None = None
        self._last: Scene | None = None
        self._place = -1
        """Of the scene that was read last."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Scene]:
        for where, id, cells in self._read((self._image, self._mask)):
            # An empty cell is a mistake of its row, to be counted with others; a path in place of bytes is the table's.
            image, mask = _cell(cells[0], where), _cell(cells[1], f"{where}, column {self._mask}")
            yield Scene(id, image or b"", mask, where)

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
            if self._reading is None or self._last is None or place < self._place:
                self._reading, self._last, self._place = iter(self), None, -1
            try:
                while self._last is None or self._place < place:
                    self._last, self._place = next(self._reading), self._place + 1
            except UserError:  # which ends it: whoever asks again is to be told again
                self._reading = None
                raise
            return self._last

    def ids(self) -> list[str]:
        """Return the names of all, without reading pictures."""
        return [id for _, id, _ in self._read(())]

    def _read(self, columns: Sequence[str]) -> Iterator[tuple[str, str, list[Any]]]:
        """Return the rows of the split: place in words, name, and the cells of `columns`."""
        schema = self._table.schema
        named = arrow_tables.NAME_COLUMN in schema.names
        texts = [arrow_tables.NAME_COLUMN] if named else []
        texts += [arrow_tables.SPLIT_COLUMN] if self._split is not None else []
        row = -1
        # A batch of no columns has no rows.
        for batch in self._table.batches([*columns, *texts] or [schema.names[0]]):
            names = batch.column(arrow_tables.NAME_COLUMN).to_pylist() if named else None
            splits = batch.column(arrow_tables.SPLIT_COLUMN).to_pylist() if self._split is not None else None
            cells = [batch.column(name) for name in columns]
            for place in range(batch.num_rows):
                row += 1
                if splits is not None and splits[place] != self._split:
                    continue
                own = str(names[place]) if names is not None and names[place] else None
                where = f"{self._table.path}, row {row}" + (f" ({own[:200]})" if own else "")
                yield where, own or f"row {row}", [column[place] for column in cells]
