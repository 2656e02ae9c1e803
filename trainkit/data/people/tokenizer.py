"""Captions as rows of token ids: words by a hash, which needs no file, or CLIP's byte pairs, for its text tower.

Byte pair encoding of words: Sennrich et al., ACL 2016, arXiv 1508.07909; over bytes, with the vocabulary of CLIP:
Radford et al., ICML 2021, arXiv 2103.00020.
"""

from __future__ import annotations

import functools
import gzip
import html
import itertools
import unicodedata
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from trainkit.data.people import words
from trainkit.errors import UserError
from trainkit.paths import locate

PADDING = 0
"""Id that fills a row behind its end."""

CHARACTERS = 4096
"""Characters of a caption that are read; the rest is left out, as words beyond the length of a row are."""

MERGES = 49_408 - 2 * 256 - 2
"""Pairs of CLIP's vocabulary: the first in its file, from the second line on. With the bytes, the bytes that end a
word, and the two ids around a caption there are 49,408 ids."""

MERGES_LIMIT = 32 << 20
"""Largest file of pairs that is read, in bytes, unpacked. CLIP's has 3.2 million."""

_STRAIGHT = str.maketrans("‘’‚‛“”„‟", "''''\"\"\"\"")
_LAST = "</w>"
"""Marks the end of a word in CLIP's pairs."""


class Tokens(ABC):
    """Tokenizer of captions."""

    vocabulary: int
    """Number of ids, `PADDING` among them."""
    length: int
    """Ids of a row."""
    begin: int | None
    """Id that begins a caption, where there is one."""
    end: int
    """Id that ends a caption, and stands nowhere else: the highest."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of a caption, its end included, `length` at most: what is too long is cut, and still ends."""


class Words(Tokens):
    """Words and numbers in lower case, each an id by its CRC-32: nothing has to be learnt or kept, and a word has the
    same id in every set. Two words may share one: of 1,000 in a vocabulary of 4,096, about one in five does."""

    def __init__(self, vocabulary: int, length: int, rule: Literal[1, 2] = 2):
        """`rule` is that of `words.words`."""
        self.vocabulary, self.length = vocabulary, length
        self.rule: Literal[1, 2] = rule
        self.begin, self.end = None, vocabulary - 1

    def encode(self, text: str) -> list[int]:
        """Return ids 1 .. vocabulary-2 for the words, and the highest for the end."""
        found = words.words(text[:CHARACTERS], self.rule)
        ids = [1 + zlib.crc32(word.encode(errors="replace")) % (self.vocabulary - 2) for word in found]
        return [*ids[: self.length - 1], self.end]


class Clip(Tokens):
    """CLIP's byte pairs: 49,408 ids, of which the last two begin and end a caption.

    Read from its file of pairs, `bpe_simple_vocab_16e6.txt.gz`, or any of that form (`merges.txt`). Text that was
    decoded wrongly is not mended, as CLIP does by ftfy; of what that does to sound text, accents are composed and
    quotes made straight: 3,000 random texts had the ids that open_clip 3.3 gives them. The words `<|startoftext|>` and
    `<|endoftext|>` in a caption are words like others.
    """

    def __init__(self, file: Path | str, length: int = 77):
        """Read the pairs. Raises UserError where the file is not there, or not one of pairs."""
        self.length = length
        pairs = read_merges(Path(file))
        units = list(_letters().values())
        names = [*units, *(unit + _LAST for unit in units), *(a + b for a, b in pairs)]
        # Where two pairs join to one text the later one gives its id, as in a dictionary that is filled in order.
        self._ids = {name: number for number, name in enumerate(names)}
        self._ranks = {pair: rank for rank, pair in enumerate(pairs)}
        self.vocabulary = len(names) + 2
        self.begin, self.end = self.vocabulary - 2, self.vocabulary - 1
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Return ids of a caption between those that begin and end it."""
        text = unicodedata.normalize("NFC", text[:CHARACTERS]).translate(_STRAIGHT)
        ids = [self.vocabulary - 2]
        for piece in words.pieces(html.unescape(html.unescape(text)).strip().lower()):
            ids += self._piece(piece)
            if len(ids) >= self.length:
                break
        return [*ids[: self.length - 1], self.end]

    def _piece(self, piece: str) -> list[int]:
        if (known := self._known.get(piece)) is not None:
            return known
        units = [_letters()[byte] for byte in piece.encode(errors="replace")]
        units[-1] += _LAST
        while len(units) > 1:
            best = min(itertools.pairwise(units), key=lambda pair: self._ranks.get(pair, MERGES))
            if best not in self._ranks:
                break
            units = _merged(units, best)
        ids = [self._ids[unit] for unit in units]
        if len(self._known) < 100_000:
            self._known[piece] = ids
        return ids


@dataclass(kw_only=True)
class Captions:
    """Tokenization of captions."""

    tokenizer: Literal["words", "clip"] = "words"
    """`words`: each word gets an id by a hash. `clip`: CLIP's byte pairs, from `file`."""
    rule: Literal[1, 2] = field(default=2, metadata={"hash": False, "before": 1})
    """Division into `words`. 2: at spaces and punctuation; Chinese and Japanese by character; Thai, Lao, Khmer and
    Burmese by grapheme cluster. 1: runs of letters and digits, as in runs older than this key."""
    length: Annotated[int, Field(ge=3, le=4096)] = 77
    """Number of tokens of a caption, end token included; longer captions are cut."""
    vocabulary: Annotated[int, Field(ge=3, le=1 << 20)] = 4096
    """Number of ids of `words`. CLIP's file determines its own: 49,408."""
    file: str | None = None
    """CLIP's `bpe_simple_vocab_16e6.txt.gz`. null: none; `clip` needs it."""

    def __post_init__(self) -> None:
        if (self.tokenizer == "clip") != (self.file is not None):
            raise ValueError("tokenizer: clip needs `file`, and words takes none")

    def missing(self) -> str | None:
        """Return a sentence about the file where it is not there yet."""
        return f"{locate(self.file)} does not exist" if self.file and not locate(self.file).is_file() else None

    def make(self) -> Tokens:
        """Make the tokenizer. Raises UserError where the file is not what is needed."""
        if self.file is not None:
            return Clip(locate(self.file), self.length)
        return Words(self.vocabulary, self.length, self.rule)


def table(tokens: Tokens, texts: Sequence[str]) -> np.ndarray:
    """Encode captions as ids, (texts, length), uint16 where they fit and int32 where not."""
    small = tokens.vocabulary <= 1 << 16
    out = np.full((len(texts), tokens.length), PADDING, np.uint16 if small else np.int32)
    for row, text in enumerate(texts):
        ids = tokens.encode(text)
        out[row, : len(ids)] = ids
    return out


def losses(tokens: Tokens, ids: np.ndarray) -> list[str]:
    """Return sentences about captions that lose their words: one token or none, as without spaces, or too many.

    `ids`: a `table` of captions.
    """
    held = (ids != PADDING).sum(1) - 1 - (tokens.begin is not None)
    room = tokens.length - 1 - (tokens.begin is not None)
    found = {"one token or none": held < 2, f"{room} tokens or more, of which the first {room} are read": held >= room}
    return [f"{those.sum():,} of {len(ids):,} captions have {what}" for what, those in found.items() if those.any()]


def leave_out(ids: np.ndarray, draws: np.ndarray, share: float, begin: int | None, end: int) -> np.ndarray:
    """Drop those of `ids` (n, length) whose `draws` (n, length), in [0, 1), are below `share`.

    Others move up. What begins and ends a caption stays, and of each caption one id at least: that with the highest
    draw.
    """
    if not len(ids):
        return ids
    ends = (ids == end).argmax(1)[:, None]
    place = np.arange(ids.shape[1])
    words = place < ends
    if begin is not None:
        words &= place > 0
    out = words & (draws < share)
    none_left = (out == words).all(1) & words.any(1)
    out[none_left, np.where(words, draws, -1.0).argmax(1)[none_left]] = False
    keep = ~out & (place <= ends)
    order = np.argsort(~keep, axis=1, kind="stable")
    moved = np.take_along_axis(ids, order, 1)
    return np.where(place < keep.sum(1)[:, None], moved, PADDING).astype(ids.dtype)


def read_merges(file: Path) -> list[tuple[str, str]]:
    """Read pairs of CLIP's file, most frequent first, `MERGES` at most. Raises UserError naming file and line."""
    make = "CLIP's bpe_simple_vocab_16e6.txt.gz, a line for each pair"
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as stream:
            data = stream.read(MERGES_LIMIT + 1)
        if len(data) > MERGES_LIMIT:
            raise UserError(str(file), f"more than {MERGES_LIMIT} bytes", make)
        lines = data.decode().rstrip("\n").split("\n", MERGES + 1)[1 : MERGES + 1]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(str(file), f"cannot be read ({error})"[:200], make) from None
    if not lines:
        raise UserError(str(file), "0 pairs", make)
    pairs: list[tuple[str, str]] = []
    known = set(_letters().values()) | {unit + _LAST for unit in _letters().values()}
    for number, line in enumerate(lines, start=2):
        parts = line.split()
        if len(parts) != 2 or not known.issuperset(parts):
            raise UserError(f"{file}, line {number}", f"{line[:80]!r}", "two texts that earlier pairs make", make)
        pairs.append((parts[0], parts[1]))
        known.add("".join(parts))
    return pairs


@functools.lru_cache(maxsize=1)
def _letters() -> dict[int, str]:
    """Return a character that can be seen for each byte, in the order of CLIP's ids: first those bytes that are such a
    character in Latin-1 themselves, then the others, from U+0100 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(seen)]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def _merged(units: Sequence[str], pair: tuple[str, str]) -> list[str]:
    """Join every occurrence of the pair, from the left."""
    out: list[str] = []
    at = 0
    while at < len(units):
        both = tuple(units[at : at + 2]) == pair
        out.append("".join(pair) if both else units[at])
        at += 1 + both
    return out
