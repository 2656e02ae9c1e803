"""Leakage between sets: subjects by name, samples by their content, and images that only look the same.

An image that was resized, compressed anew or brightened has other bytes and is still the same image. To find it,
every image is brought to 16 x 16 grey cells, the mean of the pixels in each. Two images look the same if both of
these correlate by `ALIKE` or more:

- the differences between neighbouring cells, of 8 x 8. This is what the difference hash (N. Krawetz, "Kind of like
  that", hackerfactor.com, 2013) rounds to bits. Kept as numbers they stand more: of CIFAR-10 images compressed at
  quality 40, 14 % differ in more than 6 of its 64 bits from what they were; at quality 30, 1.2 % correlate by less;
- the cells themselves. Strokes in one place have nearly the same differences, whatever they belong to; images of sea
  and sky have nearly the same cells. Few other images have both.

Brightness and contrast are not seen. What is too plain to say anything (cells that differ by less than `PLAIN` grey
levels) is left out. Mirrored copies are found where it is asked for; copies that were turned or cut are not.

The cost is one look at every pixel and a matrix product: an image is read or decoded once, its bytes are added up
once, and 256 bytes are kept; every image is compared with every other. How much of a set is looked at, and how many
pairs are compared, is bounded (`BYTES`, `PICTURES`, `PAIRS`), whatever the images are; of larger sets a fixed random
part is.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trainkit import rng
from trainkit.data import thread_pool
from trainkit.data.record import UNKNOWN_CONTENT
from trainkit.errors import UserError, few
from trainkit.files import write_aside
from trainkit.paths import make_private

if TYPE_CHECKING:
    from trainkit.data.storage.image_store import Packed

VERSION = 1
"""Raised with any change to what is computed, so that what was kept is not taken for it."""

CELLS = 16
"""Side of the small grey images."""
ALIKE = 0.97
"""Least correlation of images that look the same: of their cells, and of the differences between neighbours."""
PLAIN = 4.0
"""Standard deviation of the cells, in grey levels of 255, below which an image is too plain to be compared."""

PICTURES = 50_000
"""Most images of a packed set that are looked at, unless all are asked for."""
BYTES = {"decoded": 1 << 30, "encoded": 256 << 20}
"""Most bytes of a packed set that are read for it, by how its images are stored: decoding costs more than reading."""
PAIRS = 1 << 30
"""Most pairs of images that are compared for two sets, unless all are asked for."""

_BLOCK = (256, 4096)
"""Images of the one and of the other set whose product is made at once: 4 MiB, which a cache holds."""
_AT_ONCE = 1 << 18
"""Fingerprints that are sorted at once."""
_CHUNK = 8 << 20
"""Bytes of pixels that are read at once."""
_SIDE = 512
"""Of an image with twice as many rows or columns, every second is added up, and so on."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Held:
    """Contents of a split, as far as sets can be compared by them. A split whose `held()` returns one is compared.

    All arrays have an entry for each of its n samples.
    """

    noun: str = "images"
    """Noun for the samples."""
    prints: np.ndarray
    """uint64 (n,), fingerprint of the content of each."""
    names: Callable[[Sequence[int] | np.ndarray], list[str]]
    """Names of some of the samples, by their places 0 .. n-1."""
    subjects: frozenset[str] = frozenset()
    """Whom or what the samples are of and no two splits may share: people, patients, videos; empty where unknown."""
    kind: str = "groups"
    """Noun for the subjects."""
    label: np.ndarray | None = None
    """int64 (n,), class of each sample, -1 for none; None where a sample has no class of its own."""
    packed: Packed | None = None
    """The set that its images are in; None where they cannot be looked at."""
    rows: np.ndarray | None = None
    """int64 (n,), their rows."""

    def __len__(self) -> int:
        return len(self.prints)


def held_in(packed: Packed, rows: np.ndarray | None = None, **more: Any) -> Held:
    """Return the contents of rows of a packed set of images, of all if none are named; `more` are fields."""
    rows = np.arange(len(packed)) if rows is None else np.asarray(rows, np.int64)

    def names(places: Sequence[int] | np.ndarray) -> list[str]:
        ids = packed.ids()
        return [ids[row] for row in rows[np.asarray(places, np.int64)].tolist()]

    more.setdefault("prints", np.asarray(packed.contents())[rows])
    return Held(names=names, packed=packed, rows=rows, **more)


# ---- The same content, the same name ---------------------------------------------------------------------------------


def copies(here: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Find fingerprints that are in another set too: their places, and the first there, int64 (pairs, 2)."""
    same = np.flatnonzero((here != UNKNOWN_CONTENT) & np.isin(here, there))
    if not len(same):
        return np.empty((0, 2), np.int64)
    order = np.argsort(there, kind="stable")
    return np.stack([same, order[np.searchsorted(there[order], here[same])]], 1)


def equal(here: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Compare the contents of pairs of samples by their fingerprints, bool (pairs,); False where one is not known."""
    return (here == there) & (here != UNKNOWN_CONTENT)


def repeats(prints: np.ndarray) -> np.ndarray:
    """Find fingerprints that a set has more than once: the place of the first, and of each other, int64 (pairs, 2)."""
    found = np.concatenate(list(repeats_by_part([prints])))
    return found[np.argsort(found[:, 1])]


def repeats_by_part(prints: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the same of fingerprints in several arrays, some of the pairs at a time.

    Looking for them takes 60 bytes a fingerprint: those of a set of millions are divided by their remainders.
    """
    begins = np.cumsum([0, *map(len, prints)])
    parts = np.uint64(1 + begins[-1] // _AT_ONCE)
    for part in range(int(parts)):
        inside = [np.flatnonzero(some % parts == part) for some in prints]
        places = np.concatenate([begin + one for begin, one in zip(begins[:-1], inside, strict=True)])
        own = np.concatenate([some[one] for some, one in zip(prints, inside, strict=True)])
        _, first, number = np.unique(own, return_index=True, return_inverse=True)
        again = np.flatnonzero((first[number] != np.arange(len(own))) & (own != UNKNOWN_CONTENT))
        yield np.stack([places[first[number[again]]], places[again]], 1)


def label_conflicts(prints: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Find samples of another class than the first of the same content: that one and each, int64 (pairs, 2)."""
    pairs = repeats(prints)
    return pairs[label[pairs[:, 0]] != label[pairs[:, 1]]]


@dataclass(frozen=True)
class Shared:
    """Overlap of a set to be evaluated with the training set."""

    what: Literal["subjects", "copies"]
    count: int
    said: str
    """A sentence."""
    examples: list[str]


def leaks(train: Held, scored: Held, whose: str = "data.train") -> list[Shared]:
    """Return subjects and contents of a set to be evaluated that are in the training set; empty where none are.

    `whose` is how the other set is called, where that is another one.
    """
    found = []
    if both := sorted(train.subjects & scored.subjects):
        said = f"{len(both)} of its {len(scored.subjects)} {scored.kind} are in {whose}: {few(both)}"
        found.append(Shared("subjects", len(both), said, both))
    if len(pairs := copies(scored.prints, train.prints)):
        words = sample_names(scored, train, pairs)
        said = f"{len(words)} of its {len(scored)} {scored.noun} are in {whose}: {few(words)}"
        found.append(Shared("copies", len(words), said, words))
    return found


def sample_names(here: Held, there: Held, pairs: np.ndarray) -> list[str]:
    """Return the names of pairs of samples: `a = b`."""
    return [f"{a} = {b}" for a, b in zip(here.names(pairs[:, 0]), there.names(pairs[:, 1]), strict=True)]


# ---- What images look like -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Thumbnails:
    """Small grey images of rows of a packed set."""

    rows: np.ndarray
    """int64 (n,), ascending."""
    cells: np.ndarray
    """uint8 (n, 16, 16), mean grey of the pixels in each cell."""
    damaged: tuple[str, ...] = ()
    """Sentences about rows that could not be read."""

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which of `rows` were looked at, as places in these, and their cells."""
        if not len(self.rows):
            return np.empty(0, np.int64), self.cells
        place = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        mine = np.flatnonzero(self.rows[place] == rows)
        return mine, self.cells[place[mine]]


def cells(images: np.ndarray) -> np.ndarray:
    """Reduce images, uint8 (n, 3, height, width), to 16 x 16 grey cells, uint8 (n, 16, 16).

    The same on every machine. Of a smaller image pixels are in several cells.
    """
    images = images[:, :, :: max(1, images.shape[2] // _SIDE), :: max(1, images.shape[3] // _SIDE)]
    many, _, height, width = images.shape
    down, along = _bands(height), _bands(width)
    # Whole numbers below 2^24, which float32 adds up exactly in any order: a cell has 64 x 64 pixels at most.
    grey = images.sum(1, dtype=np.uint16).astype(np.float32)
    sums = down @ (grey.reshape(many * height, width) @ along.T).reshape(many, height, CELLS)
    pixels = np.outer(down.sum(1), along.sum(1)).astype(np.int32)
    return (sums.astype(np.int32) // (3 * pixels)).astype(np.uint8)


def edges(cells: np.ndarray) -> np.ndarray:
    """Return differences of neighbours in 8 x 8 cells, of length 1, float32 (n, 112): products are correlations."""
    half = CELLS // 2
    blocks = cells.reshape(len(cells), half, 2, half, 2).sum((2, 4), dtype=np.int16)
    sides = [np.diff(blocks, axis=axis).reshape(len(cells), half * (half - 1)) for axis in (1, 2)]
    both = np.concatenate(sides, 1).astype(np.float32)
    return both / np.maximum(np.linalg.norm(both, axis=1, keepdims=True), 1)


def sampled_rows(packed: Packed, whole: bool = False) -> np.ndarray:
    """Return rows of a packed set that are looked at, int64 ascending: all, or a part that is the same in every run."""
    rows = len(packed)
    stored = packed.manifest["files"]["images.npy" if packed.store == "decoded" else "images.bin"]["bytes"]
    most = min(PICTURES, BYTES[packed.store] * rows // max(stored, 1))
    if whole or rows <= most:
        return np.arange(rows)
    words = rng.words(0, "looks", np.arange(rows))
    return np.sort(np.argpartition(words, most)[:most])


def thumbnails(packed: Packed, cache: Path | None = None, whole: bool = False) -> Thumbnails:
    """Return the small grey images of a packed set, or of a bounded part of it; kept in the folder `cache`.

    A row that is damaged is left out and named.
    """
    rows = sampled_rows(packed, whole)
    name = hashlib.sha256(f"{VERSION} {CELLS} {packed.digest} {len(rows)}".encode()).hexdigest()[:32]
    file = None if cache is None else cache / f"{name}.npz"
    if file is not None and (kept := _kept(file, rows)) is not None:
        return kept
    at_once = 2 * thread_pool.count()
    if packed.size is not None:
        at_once = max(at_once, _CHUNK // (3 * packed.size[0] * packed.size[1]))
    made, damaged, good = [np.empty((0, CELLS, CELLS), np.uint8)], [], np.ones(len(rows), bool)
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
    small = Thumbnails(rows[good], np.concatenate(made), tuple(damaged))
    if file is not None and not damaged:
        _keep(file, small)
    return small


def _cells_of(packed: Packed, rows: np.ndarray) -> np.ndarray:
    if packed.size is not None:
        return cells(packed.fetch(rows))
    return np.concatenate([cells(pixels.transpose(2, 0, 1)[None]) for pixels in packed.pictures(rows)])


def _bands(size: int) -> np.ndarray:
    """Return which of `size` rows of pixels are in which row of cells, float32 (16, size): each has one at least."""
    begins = np.arange(CELLS + 1) * size // CELLS
    at, begin, end = np.arange(size), begins[:-1, None], np.maximum(begins[1:], begins[:-1] + 1)[:, None]
    return ((at >= begin) & (at < end)).astype(np.float32)


def _kept(file: Path, rows: np.ndarray) -> Thumbnails | None:
    try:
        with np.load(file, allow_pickle=False) as kept:
            small = Thumbnails(kept["rows"], kept["cells"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    fits = np.array_equal(small.rows, rows) and small.cells.shape == (len(rows), CELLS, CELLS)
    return small if fits and small.cells.dtype == np.uint8 else None


def _keep(file: Path, small: Thumbnails) -> None:
    """Write to the cache; failing to is no error, since it is computed again."""
    stream = io.BytesIO()
    np.savez(stream, rows=small.rows, cells=small.cells)
    with contextlib.suppress(OSError):
        make_private(file.parent)
        write_aside(file, stream.getvalue())


# ---- Which of them look the same -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LookAlikes:
    """Images of one set that look like one of another, the most alike first."""

    here: np.ndarray
    """int64 (k,), places in the one."""
    there: np.ndarray
    """int64 (k,), of each the most alike in the other."""
    alike: np.ndarray
    """float32 (k,), the smaller of their two correlations."""
    mirrored: np.ndarray
    """bool (k,), whether it is the mirrored image that looks like it."""
    compared: int
    """How many images of the one were compared."""
    plain: int
    """How many of them were too plain for it."""


def look_alikes(here: np.ndarray, there: np.ndarray, mirrored: bool = False, whole: bool = False) -> LookAlikes:
    """Find images, given as cells (n, 16, 16), that look like one of `there`, (m, 16, 16), or like one when mirrored.

    `whole`: all pairs are compared, however many there are.
    """
    one, other = _worth(here), _worth(there)
    plain = len(here) - len(one)
    if not whole:
        one = one[:: -(-len(one) * len(other) // PAIRS) or 1]
    alike, twin, flipped = np.full(len(one), -1, np.float32), np.zeros(len(one), np.int64), np.zeros(len(one), bool)
    for flip in (False, True)[: 1 + mirrored]:
        ours = here[one][:, :, ::-1] if flip else here[one]
        product, place = _nearest(edges(ours), edges(there[other]))
        near = np.flatnonzero(product >= ALIKE)
        both = np.minimum(product[near], _correlation(ours[near], there[other[place[near]]]))
        more = both > alike[near]
        near = near[more]
        alike[near], twin[near], flipped[near] = both[more], place[near], flip
    found = np.flatnonzero(alike >= ALIKE)
    found = found[np.argsort(-alike[found], kind="stable")]
    return LookAlikes(one[found], other[twin[found]], alike[found], flipped[found], len(one) + plain, plain)


def _worth(cells: np.ndarray) -> np.ndarray:
    """Return places of images that are not too plain."""
    flat = cells.reshape(len(cells), CELLS**2)
    # Squares are summed as whole numbers: 256 times 255 squared is more than float32 counts to.
    variance = np.einsum("nc,nc->n", flat, flat, dtype=np.int64) / CELLS**2 - flat.mean(1, dtype=np.float64) ** 2
    return np.flatnonzero(variance >= PLAIN**2)


def _nearest(here: np.ndarray, there: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest product of each row with one of `there`, and the place of that one."""
    most, place = np.full(len(here), -1, np.float32), np.zeros(len(here), np.int64)
    for first in range(0, len(here), _BLOCK[0]):
        rows = slice(first, first + _BLOCK[0])
        for begin in range(0, len(there), _BLOCK[1]):
            others = slice(begin, begin + _BLOCK[1])
            product = here[rows] @ there[others].T
            best = product.argmax(1)
            value = product[np.arange(len(best)), best]
            more = value > most[rows]
            most[rows][more], place[rows][more] = value[more], begin + best[more]
    return most, place


def _correlation(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Correlate images given as cells, pair by pair."""
    flat = [cells.reshape(len(cells), CELLS**2).astype(np.float32) for cells in (one, other)]
    a, b = (some - some.mean(1, keepdims=True) for some in flat)
    return (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
