"""InsightFace's `.rec` read in place, by the interface of the packed set that would be made of it.

Rows, numbers of classes and pixels are those of that set, so a training on either gives the same bits. It knows less:

- An image has no checksum. Magic number, length and header of its record are checked whenever it is read, and that it
  can be decoded; a bit that flipped in an image may go unseen.
- What an image shows is known only when it is decoded. So all fingerprints are `UNKNOWN_CONTENT`; those of some rows
  are asked for by `at`.
- The digest is of the files (`recordio.Table`) and the size of images, not of what a packed set consists of.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.data.formats import recordio
from trainkit.data.formats.image_decode import Fit
from trainkit.data.record import UNKNOWN_CONTENT, Source
from trainkit.data.rows.writer import BATCH_ROWS
from trainkit.data.storage import image_store
from trainkit.data.storage.image_store import Packed
from trainkit.errors import UserError


def in_place(found: Source, size: tuple[int, int], fit: Fit) -> Packed | None:
    """Open a set where it lies, each image brought to `size` as `fit` says whenever it is read; None for one that is
    packed: of another form, or so small that its pixels are kept decoded, which reads many times as fast.

    Raises UserError naming a record whose label is none.
    """
    small = 3 * size[0] * size[1] * found.size < image_store.DECODED_LIMIT
    if found.kind != recordio.KIND or small or found.some is None or found.labelled is None:
        return None
    wrong = np.flatnonzero(found.labelled()[1] < 0)[:1].tolist()
    for record in found.some(wrong):  # which says itself what is wrong, but for numbers that are too large
        raise UserError(record.where, f"label {record.label}", "a number of a person")
    return Records(Path(found.where), size, fit)


class Records(Packed):
    """A `.rec` opened for reading. Pickles as its path; processes of a machine share the pages of its table."""

    REMEDY = "copy the set again, or leave such images out: trainkit data import --damaged skip"

    def __init__(self, rec: Path, size: tuple[int, int], fit: Fit):
        self.__setstate__({"path": rec, "size": size, "fit": fit})

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "size": self.size, "fit": self._fit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path, self._fit = state["path"], state["fit"]
        table = recordio.open_table(self.path)
        self._table, rows = table.numbers, table.numbers.shape[1]
        label = self._table[recordio.LABEL]
        if int(label.max()) < rows and np.bincount(label).all():
            self._names = range(int(label.max()) + 1)
        else:
            found, label = np.unique(label, return_inverse=True)
            self._names = found.tolist()
        self._columns = {"label": label, "content": np.broadcast_to(np.uint64(UNKNOWN_CONTENT), rows)}
        self._file = self.path.open("rb", buffering=0)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        self._known, self._proved = np.zeros(rows, np.uint8), 0
        self.manifest = {
            "store": "encoded",
            "rows": rows,
            "classes": len(self._names),
            "image_size": list(state["size"]),
            "protocol": None,
            "made_from": f"{recordio.KIND} {self.path.name}",
            "digest": hashlib.sha256(f"{table.digest} {state['size']}".encode()).hexdigest(),
            "files": {"images.bin": {"bytes": self.path.stat().st_size}},
        }

    @functools.cached_property
    def class_names(self) -> tuple[str, ...]:
        """The label each class has in the file."""
        return tuple(map(str, self._names))

    def column_by_batch(self, name: str) -> Iterator[np.ndarray]:
        """Yield all numbers of a column."""
        yield self.column(name)

    def at(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return labels of some rows, or the fingerprints of their pixels, for which they are decoded by Pillow."""
        if name != "content":
            return self.column(name)[rows]
        pixels = (self._by_pillow(row, self.encoded(row)) for row in rows.tolist())
        return np.asarray([image_store.content(one.transpose(2, 0, 1)) for one in pixels], np.uint64)

    def spans(self, name: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where the records of some rows begin and end in the file, int64. Raises ValueError for others."""
        if rows.size and (rows.min() < 0 or rows.max() >= len(self)):
            raise ValueError(f"rows {rows.min()} .. {rows.max()} of a set of {len(self)}")
        return self._table[recordio.BEGIN][rows], self._table[recordio.END][rows]

    def stored(self, begin: int, end: int) -> np.ndarray:
        """Return the encoded image in a record. Raises UserError naming it where it is damaged."""
        try:
            _, picture = recordio.unpack(recordio.read_record(self._file.fileno(), begin, end, ""), "")
        except UserError as error:
            row = int(np.flatnonzero(self._table[recordio.BEGIN] == begin)[0])
            raise UserError(self.where(row), error.found, error.expected, self.REMEDY) from None
        return np.frombuffer(picture, np.uint8)

    def texts_by_batch(self, name: str) -> Iterator[list[str]]:
        """Yield the names of records, in the order of rows."""
        names = recordio.names(self._table)
        while some := list(islice(names, BATCH_ROWS)):
            yield some

    def text(self, name: str, row: int) -> str:
        """Return the name of a record."""
        return f"record {self._table[recordio.KEY, row]}"

    def where(self, row: int) -> str:
        """Describe a record's place, for messages."""
        return f"{self.path}, {self.text('id', row)}"

    def compare(self, row: int, data: bytes | memoryview) -> None:
        """Take an image as it is: nothing says what was written."""
