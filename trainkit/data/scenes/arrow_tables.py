"""Scenes in tables: parquet and JSON files, sets saved by `datasets`, images with metadata and sets of the hub, with
images in one column and masks in another.

Columns are found by their names; a recipe has to say what the values in masks stand for. A few rows are in memory at a
time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from trainkit.data import hub
from trainkit.data.formats import arrow_tables, dataset_files
from trainkit.data.record import Columns
from trainkit.data.scenes.files import Scene
from trainkit.errors import UserError, few

MASK_COLUMNS = ("annotation", "mask", "label", "segmentation", "labels", "seg", "segmentation_mask", "semantic_mask")
"""Names of the column of masks in a table, in the order in which they are looked for."""

_ROWS = 16


def is_table(path: Path) -> bool:
    """Return whether there is a table at `path`: a file, a folder of some, or a saved set; CSV is a list of paths."""
    if path.suffix.lower() == ".csv" and path.is_file():
        return False
    if arrow_tables.is_saved(path) or dataset_files.is_laid_out(path):
        return True
    return bool(arrow_tables.parquet_files(path)) if path.is_dir() else path.suffix == ".parquet"


def open_rows(path: Path | str, split: str | None, parts: Sequence[str] = (), columns: Columns | None = None) -> Rows:
    """Return the scenes of the table at `path`: those of `split`, or without it of the split that one of `parts` names.

    `parts` are names of the same split, the usual one first; with neither, the split is what `tables.open_table` takes.
    Raises UserError where there is no such split, no column of images or of masks, or no row.
    """
    table, value, size, split = _open_table(path, split, parts)
    named = {"name": arrow_tables.NAME_COLUMN, "mask": MASK_COLUMNS[0]}
    table = table.mapped({named.get(name, name): old for name, old in (columns or {}).items()})
    image, mask = _columns(str(path), table)
    place = path if isinstance(path, Path) else table.path
    where = str(place) if split is None and value is None else f"{place}#{value or split}"
    if size is None:
        raise UserError(where, f"{table.kind}, which cannot be read in parts", "a table", "import it as parquet first")
    if not size:
        raise UserError(where, "no rows", "an image and its mask per row")
    return Rows(table, where, size, value, image, mask)


def _open_table(
    path: Path | str, split: str | None, parts: Sequence[str]
) -> tuple[arrow_tables.Table, str | None, int | None, str | None]:
    """Return the table, the value of its split column, how many rows that is, and the split that was found."""

    def opened(name: str | None) -> tuple[arrow_tables.Table, str | None, int | None, str | None]:
        if isinstance(path, str):
            found = hub.open_table(path if name is None else f"{path}#{name}")
        elif dataset_files.is_laid_out(path):
            found = dataset_files.open_table(path, name)
        else:
            found = arrow_tables.open_table(path, name, _ROWS)
        return found[0], *arrow_tables.rows_of(*found), name if name is not None else found[1]

    if split is not None or not parts or (isinstance(path, str) and "#" in path):
        return opened(split)
    for name in parts:
        try:
            return opened(name)
        except UserError:
            continue
    table, value, size, _ = opened(None)
    if value is not None or not (isinstance(path, Path) and path.is_file()):
        raise UserError(str(path), f"no split {parts[0]!r}", "the path with # and the name of a split")
    return table, value, size, None


def _columns(where: str, table: arrow_tables.Table) -> tuple[str, str]:
    """Return the columns of images and masks."""
    schema = table.schema
    holding = [name for name in schema.names if table.may_hold_pictures(name)]
    mask = next((name for name in MASK_COLUMNS if name in holding), None)
    image = next((name for name in (*arrow_tables.IMAGE_COLUMNS, "pixel_values") if name in holding), None)
    if mask is None or image is None:
        wanted = f"images in one of {few(arrow_tables.IMAGE_COLUMNS, 9)}, masks in one of {few(MASK_COLUMNS, 9)}"
        remedy = "or name them: columns: {image: NAME, mask: NAME} in the block `data`"
        raise UserError(where, f"columns {few(schema.names, 20)}"[:300], wanted, remedy)
    return image, mask


class Rows(Sequence[Scene]):
    """Scenes of a table: a few rows are in memory at a time."""

    kind: str
    """Of the table, in words."""
    where: str
    """The table and its split, in words."""
    files: tuple[Path, ...]
    """Files of the table."""

    def __init__(self, table: arrow_tables.Table, where: str, size: int, split: str | None, image: str, mask: str):
        """Take `size` rows of `table`, whose split column says `split` (None: all), and columns `image` and `mask`."""
        self.kind, self.where, self.files, self.columns = table.kind, where, tuple(table.files), table.columns
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
            # An empty cell is an error of its row, to be counted with others; a path in place of bytes is the table's.
            image, mask = self._cell(cells[0], where), self._cell(cells[1], f"{where}, column {self._mask}")
            yield Scene(id, image or b"", mask, where)

    def _cell(self, cell: Any, where: str) -> Path | bytes | None:
        return self._table.picture(cell.as_py(), where) if cell.is_valid else None

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
        """Return the names of all, without reading images."""
        return [id for _, id, _ in self._read(())]

    def _read(self, columns: Sequence[str]) -> Iterator[tuple[str, str, list[Any]]]:
        """Return the rows of the split: place in words, name, and the cells of `columns`."""
        schema = self._table.schema
        named = arrow_tables.NAME_COLUMN in schema.names
        texts = [arrow_tables.NAME_COLUMN] if named else []
        texts += [arrow_tables.SPLIT_COLUMN] if self._split is not None else []
        row = -1
        # A batch of no columns has no rows.
        paths = [] if named or self._table.open is None else [self._image]
        wanted = list(dict.fromkeys((*columns, *texts, *paths)))
        for batch in self._table.batches(wanted or [schema.names[0]]):
            names = batch.column(arrow_tables.NAME_COLUMN).to_pylist() if named else None
            splits = batch.column(arrow_tables.SPLIT_COLUMN).to_pylist() if self._split is not None else None
            cells = [batch.column(name) for name in columns]
            for place in range(batch.num_rows):
                row += 1
                if splits is not None and splits[place] != self._split:
                    continue
                own = str(names[place]) if names is not None and names[place] else None
                if paths:
                    own = self._table.name_of(batch.column(self._image)[place].as_py())
                where = f"{self._table.path}, row {row}" + (f" ({own[:200]})" if own else "")
                yield where, own or f"row {row}", [column[place] for column in cells]
