"""What two sets share: subjects by name, samples by their content, and pictures that only look the same.

A picture that was resized, compressed anew or brightened has other bytes and is still the same picture. To find it,
every picture is brought to 16 x 18 grey cells, the mean of the pixels in each. From these comes a hash of 64 bits, the
difference hash: of 8 x 9 cells, whether each is brighter than its left neighbour (N. Krawetz, "Kind of like that",
hackerfactor.com, 2013). Two pictures look the same if

- their hashes differ in at most `BITS` = 6 bits. Such pairs are found without comparing all: the 64 bits are cut into 7
  bands, and two hashes that differ in 6 bits are equal in one band at least;
- and their cells correlate by `ALIKE` or more. The hash alone is no proof: of aligned faces, or letters on white, many
  have nearly the same one. The correlation does not see brightness and contrast.

What is too plain to say anything (cells that differ by less than `PLAIN` grey levels) is left out. Copies that were
mirrored, turned or cut are not found.

The cost is one look at every pixel: a picture is read or decoded once, its bytes are added up once, and 288 bytes are
kept. How much of a set is looked at is bounded (`BYTES`, `PICTURES`); of larger ones a fixed random part is.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from trainkit import seeding
from trainkit.data import threads
from trainkit.errors import UserError, few

if TYPE_CHECKING:
    from trainkit.data.packed import Packed

VERSION = 1
"""Raised with any change to what is computed, so that what was kept is not taken for it."""

CELLS = (16, 18)
"""Height and width of the small grey pictures."""
BITS = 6
"""Most bits in which the hashes of pictures differ that look the same."""
ALIKE = 0.98
"""Least correlation of their cells."""
PLAIN = 4.0
"""Standard deviation of the cells, in grey levels of 255, below which a picture is too plain to be compared."""

PICTURES = 100_000
"""Most pictures of a packed set that are looked at, unless all are asked for."""
BYTES = {"decoded": 2 << 30, "encoded": 512 << 20}
"""Most bytes of a packed set that are read for it, by how its pictures are stored: decoding costs more than reading."""

_BANDS = 7
_MASKS = tuple(
    np.uint64(((1 << (64 * (k + 1) // _BANDS)) - 1) ^ ((1 << (64 * k // _BANDS)) - 1)) for k in range(_BANDS)
)
_SAME = 8
"""Pictures of one hash that others are compared with: of a set in which thousands have the same one, more would only
take time."""
_COMPARED = 1 << 28
"""Most pairs of hashes that are compared for two sets."""
_AT_ONCE = 1 << 20
_CORRELATED = 1 << 14
_CHUNK = 8 << 20
"""Bytes of pixels that are read at once."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Held:
    """What a split holds, as far as sets can be compared by it. A split that has `held()` returning one is looked at.

    All arrays have an entry for each of its n samples.
    """

    noun: str = "pictures"
    """What the samples are."""
    prints: np.ndarray
    """uint64 (n,), fingerprint of the content of each."""
    names: Callable[[Sequence[int]], list[str]]
    """Names of some of the samples, by their places 0 .. n-1."""
    subjects: frozenset[str] = frozenset()
    """Whom or what the samples are of and no two splits may share: people, patients, videos; empty where unknown."""
    kind: str = "groups"
    """What these are."""
    label: np.ndarray | None = None
    """int64 (n,), class of each sample, -1 for none; None where a sample has no class of its own."""
    classes: Sequence[str] = ()
    """Names of the classes."""
    counts: np.ndarray | None = None
    """How much there is of each class, in `unit`, (classes,); None where there are no classes."""
    unit: str = "pictures"
    unlabelled: float = 0
    """How much there is of no class, in `unit`."""
    packed: Packed | None = None
    """The set that its pictures are in; None where they cannot be looked at."""
    rows: np.ndarray | None = None
    """int64 (n,), their rows."""

    def __len__(self) -> int:
        return len(self.prints)


def held_in(packed: Packed, rows: np.ndarray | None = None, **more: object) -> Held:
    """What is held by rows of a packed set of pictures, by all of them if none are named; `more` are fields."""
    rows = np.arange(len(packed)) if rows is None else np.asarray(rows, np.int64)

    def names(places: Sequence[int]) -> list[str]:
        ids = packed.ids()
        return [ids[row] for row in rows[np.asarray(places, np.int64)].tolist()]

    return Held(prints=np.asarray(packed.contents())[rows], names=names, packed=packed, rows=rows, **more)


# ---- The same content, the same name ---------------------------------------------------------------------------------


def copies(here: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Places of fingerprints that are in another set too, and where they come first in that: int64 (pairs, 2)."""
    same = np.flatnonzero(np.isin(here, there))
    if not len(same):
        return np.empty((0, 2), np.int64)
    order = np.argsort(there, kind="stable")
    return np.stack([same, order[np.searchsorted(there[order], here[same])]], 1)


def across(prints: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Places of samples of one content and two classes, neighbours in the order of contents: int64 (pairs, 2)."""
    order = np.argsort(prints, kind="stable")
    same = (prints[order][1:] == prints[order][:-1]) & (label[order][1:] != label[order][:-1])
    place = np.flatnonzero(same)
    return np.stack([order[place], order[place + 1]], 1)


@dataclass(frozen=True)
class Shared:
    """What a set to be scored has in common with the training set."""

    what: Literal["subjects", "copies"]
    count: int
    said: str
    """A sentence."""
    examples: list[str]


def leaks(train: Held, scored: Held) -> list[Shared]:
    """Subjects and contents of a set to be scored that are in the training set; empty where none are."""
    found = []
    if both := sorted(train.subjects & scored.subjects):
        said = f"{len(both)} of its {len(scored.subjects)} {scored.kind} are in data.train: {few(both)}"
        found.append(Shared("subjects", len(both), said, both))
    if len(pairs := copies(scored.prints, train.prints)):
        words = told(scored, train, pairs)
        said = f"{len(words)} of its {len(scored)} {scored.noun} are in data.train: {few(words)}"
        found.append(Shared("copies", len(words), said, words))
    return found


def told(here: Held, there: Held, pairs: np.ndarray) -> list[str]:
    """Pairs of samples in words: `a = b`."""
    return [f"{a} = {b}" for a, b in zip(here.names(pairs[:, 0]), there.names(pairs[:, 1]), strict=True)]


# ---- What pictures look like -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Looks:
    """Small grey pictures of rows of a packed set."""

    rows: np.ndarray
    """int64 (n,), ascending."""
    cells: np.ndarray
    """uint8 (n, 16, 18), mean grey of the pixels in each cell."""
    damaged: tuple[str, ...] = ()
    """Sentences about rows that could not be read."""

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of `rows` were looked at, as places in these, and their cells."""
        if not len(self.rows):
            return np.empty(0, np.int64), self.cells
        place = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        mine = np.flatnonzero(self.rows[place] == rows)
        return mine, self.cells[place[mine]]


def cells(images: np.ndarray) -> np.ndarray:
    """Pictures, uint8 (n, 3, height, width), as 16 x 18 grey cells, uint8 (n, 16, 18).

    In whole numbers, so that they are the same on every machine. Of a smaller picture pixels are in several cells.
    """
    height, width = images.shape[2:]
    down, along = _bands(height, CELLS[0]), _bands(width, CELLS[1])
    grey = images.sum(1, dtype=np.uint16)
    rows = np.stack([grey[:, a:b].sum(1, dtype=np.uint32) for a, b in down], 1)
    sums = np.stack([rows[:, :, a:b].sum(2, dtype=np.uint64) for a, b in along], 2)
    pixels = np.outer([b - a for a, b in down], [b - a for a, b in along]).astype(np.uint64)
    return (sums // (np.uint64(3) * pixels)).astype(np.uint8)


def hashes(cells: np.ndarray) -> np.ndarray:
    """The difference hash of pictures given as cells, uint64 (n,): its bits say where brightness grows to the right."""
    blocks = cells.reshape(len(cells), 8, 2, 9, 2).sum((2, 4), dtype=np.uint16)
    bits = blocks[:, :, 1:] > blocks[:, :, :-1]
    return np.packbits(bits.reshape(-1, 64), axis=1).view(np.uint64)[:, 0]


def chosen(packed: Packed, whole: bool = False) -> np.ndarray:
    """Rows of a packed set that are looked at, int64 ascending: all, or a part that is the same in every run."""
    rows = len(packed)
    stored = packed.manifest["files"]["images.npy" if packed.store == "decoded" else "images.bin"]["bytes"]
    most = min(PICTURES, BYTES[packed.store] * rows // max(stored, 1))
    if whole or rows <= most:
        return np.arange(rows)
    words = seeding.words(0, "looks", np.arange(rows))
    return np.sort(np.argpartition(words, most)[:most])


def look(packed: Packed, cache: Path | None = None, whole: bool = False) -> Looks:
    """The small grey pictures of a packed set, or of a bounded part of it; kept in the folder `cache`.

    A row that is damaged is left out and named.
    """
    rows = chosen(packed, whole)
    name = hashlib.sha256(f"{VERSION} {CELLS} {packed.digest} {len(rows)}".encode()).hexdigest()[:32]
    file = None if cache is None else cache / f"{name}.npz"
    if file is not None and (kept := _kept(file, rows)) is not None:
        return kept
    at_once = 2 * threads.count()
    if packed.size is not None:
        at_once = max(at_once, _CHUNK // (3 * packed.size[0] * packed.size[1]))
    made, damaged, good = [np.empty((0, *CELLS), np.uint8)], [], np.ones(len(rows), bool)
    for first in range(0, len(rows), at_once):
        try:
            made.append(_cells_of(packed, rows[first : first + at_once]))
        except UserError:  # one by one, to name each
            for place in range(first, min(first + at_once, len(rows))):
                try:
                    made.append(_cells_of(packed, rows[place : place + 1]))
                except UserError as error:
                    good[place] = False
                    damaged.append(str(error))
    looks = Looks(rows[good], np.concatenate(made), tuple(damaged))
    if file is not None and not damaged:
        _keep(file, looks)
    return looks


def _cells_of(packed: Packed, rows: np.ndarray) -> np.ndarray:
    if packed.size is not None:
        return cells(packed.fetch(rows))
    return np.concatenate([cells(pixels.transpose(2, 0, 1)[None]) for pixels in packed.pictures(rows)])


def _bands(size: int, parts: int) -> list[tuple[int, int]]:
    """Begin and end of `parts` of a side of `size` pixels, each of one pixel at least."""
    begins = [part * size // parts for part in range(parts + 1)]
    return [(a, max(a + 1, b)) for a, b in itertools.pairwise(begins)]


def _kept(file: Path, rows: np.ndarray) -> Looks | None:
    try:
        with np.load(file, allow_pickle=False) as kept:
            looks = Looks(kept["rows"], kept["cells"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    fits = np.array_equal(looks.rows, rows) and looks.cells.shape == (len(rows), *CELLS)
    return looks if fits and looks.cells.dtype == np.uint8 else None


def _keep(file: Path, looks: Looks) -> None:
    """What cannot be kept is computed again: no mistake."""
    aside = file.with_name(f".{uuid.uuid4().hex[:8]}.npz")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            np.savez(aside, rows=looks.rows, cells=looks.cells)
            os.replace(aside, file)
        finally:
            aside.unlink(missing_ok=True)


# ---- Which of them look the same -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Twins:
    """Pictures of one set that look like one of another, the most alike first."""

    here: np.ndarray
    """int64 (k,), places in the one."""
    there: np.ndarray
    """int64 (k,), of each the most alike in the other."""
    bits: np.ndarray
    """uint8 (k,), bits in which their hashes differ."""
    alike: np.ndarray
    """float32 (k,), correlation of their cells."""
    compared: int
    """How many pictures of the one were compared."""
    plain: int
    """How many of them were too plain for it."""


def twins(here: np.ndarray, there: np.ndarray, label: tuple[np.ndarray, np.ndarray] | None = None) -> Twins:
    """Pictures, given as cells (n, 16, 18), that look like one of `there`, (m, 16, 18).

    With a `label` for each of both only pairs of different ones count: pictures of one look under two classes.
    """
    one, other = _Side(here), _Side(there)
    plain = len(here) - len(one.places)
    other.keep(_first_of_each(other.codes, _SAME))
    orders = [_ordered(other.codes & mask) for mask in _MASKS]
    total = sum(int(_many(one.codes & mask, keys).sum()) for mask, (keys, _) in zip(_MASKS, orders, strict=True))
    one.keep(slice(None, None, -(-total // _COMPARED) or 1))
    best, twin = np.full(len(one.places), -2.0, np.float32), np.zeros(len(one.places), np.int64)
    for a, b in _near(one.codes, other.codes, orders):
        if label is not None:
            apart = label[0][one.places[a]] != label[1][other.places[b]]
            a, b = a[apart], b[apart]
        for first in range(0, len(a), _CORRELATED):
            some = slice(first, first + _CORRELATED)
            alike = np.einsum("kc,kc->k", one.standardised(a[some]), other.standardised(b[some]))
            # Of each picture the most alike, which is the first of each in this order.
            order = np.lexsort((b[some], -alike, a[some]))
            places, leading = np.unique(a[some][order], return_index=True)
            alike, others = alike[order][leading], b[some][order][leading]
            more = alike > best[places]
            best[places[more]], twin[places[more]] = alike[more], others[more]
    found = np.flatnonzero(best >= ALIKE)
    found = found[np.argsort(-best[found], kind="stable")]
    bits = np.bitwise_count(one.codes[found] ^ other.codes[twin[found]])
    compared = len(one.places) + plain
    return Twins(one.places[found], other.places[twin[found]], bits, best[found], compared, plain)


class _Side:
    """Pictures that are not too plain, given as cells (n, 16, 18)."""

    def __init__(self, cells: np.ndarray):
        self._flat = cells.reshape(len(cells), CELLS[0] * CELLS[1])
        # Squares are summed as whole numbers: 288 times 255 squared is more than float32 counts to.
        squares = np.einsum("nc,nc->n", self._flat, self._flat, dtype=np.int64)
        self._mean = self._flat.mean(1, dtype=np.float64)
        variance = squares / self._flat.shape[1] - self._mean**2
        self._length = np.sqrt(np.maximum(variance, 0) * self._flat.shape[1])
        self.places = np.flatnonzero(variance >= PLAIN**2)
        self.codes = hashes(cells[self.places])

    def keep(self, which: np.ndarray | slice) -> None:
        """Go on with some of them."""
        self.places, self.codes = self.places[which], self.codes[which]

    def standardised(self, which: np.ndarray) -> np.ndarray:
        """Cells of some with mean 0 and length 1, float32 (k, 288): their products are correlations."""
        places = self.places[which]
        flat = self._flat[places].astype(np.float32) - self._mean[places, None].astype(np.float32)
        return flat / self._length[places, None].astype(np.float32)


def _first_of_each(codes: np.ndarray, most: int) -> np.ndarray:
    """Places of the first so many of every code, ascending."""
    ordered, order = _ordered(codes)
    rank = np.arange(len(codes)) - np.searchsorted(ordered, ordered)
    return np.sort(order[rank < most])


def _ordered(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(keys, kind="stable")
    return keys[order], order


def _many(keys: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """How often each of the keys is among others."""
    return np.searchsorted(ordered, keys, "right") - np.searchsorted(ordered, keys, "left")


def _near(
    here: np.ndarray, there: np.ndarray, orders: Sequence[tuple[np.ndarray, np.ndarray]]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Places of hashes that differ in at most `BITS` bits, in portions; a pair may come once for each band."""
    for mask, (ordered, order) in zip(_MASKS, orders, strict=True):
        begin, many = np.searchsorted(ordered, here & mask), _many(here & mask, ordered)
        for part in _portions(many, _AT_ONCE):
            which = np.repeat(np.arange(part.start, part.stop), many[part])
            turn = np.arange(len(which)) - np.repeat(np.cumsum(many[part]) - many[part], many[part])
            what = order[begin[which] + turn]
            near = np.bitwise_count(here[which] ^ there[what]) <= BITS
            yield which[near], what[near]


def _portions(many: np.ndarray, most: int) -> Iterator[slice]:
    """Slices that cover all entries once, of which each sums to `most` or less, or is a single one."""
    total, begin = np.cumsum(many), 0
    while begin < len(many):
        before = int(total[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(total, before + most, "right")))
        yield slice(begin, end)
        begin = end
