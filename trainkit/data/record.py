"""Sources of images, and their records: each one image of a class (a person, a kind of thing, a state)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

UNKNOWN_CONTENT = 0
"""Fingerprint of a sample whose content is not known: it is no copy of any other."""

Columns = Mapping[Any, str]
"""Columns of a table by what they are taken for: `{"label": "fine_label"}`."""


@dataclass(frozen=True)
class Record:
    """One image of a source."""

    id: str
    """Its name in the source: a relative path, or a row."""
    label: int | str
    """Class or person that it shows, as in the source."""
    data: Path | bytes | np.ndarray
    """A file, encoded bytes, or uint8 (height, width, 3) pixels."""
    where: str
    """Its place in words, for messages."""
    landmarks: np.ndarray | None = None
    """Five points (x, y) in pixels, where the source has them."""
    group: str | None = None
    """Group that it shares with other images beside its class (person, video, alphabet), if the source has it. Two
    splits that share a group measure how well it is remembered."""


@dataclass(frozen=True)
class Source:
    """A set of images in some foreign form."""

    kind: str
    where: str
    size: int
    """Number of records."""
    records: Callable[[], Iterator[Record]]
    files: tuple[Path | str, ...] = ()
    """Files and settings it is made of, to detect changes."""
    names: tuple[str, ...] | None = None
    """Names of integer labels, if the source has them."""
    aligned: bool = True
    """True where faces are aligned to the template already; others are always aligned on import."""
    split: str | None = None
    """Split of the source, where it has several."""
    left_out: tuple[str, ...] = ()
    """Sentences about what is there and not used, with counts."""
    columns: tuple[tuple[str, str], ...] = ()
    """Columns of a table that the user assigned."""
    some: Callable[[Iterable[int]], Iterator[Record]] | None = None
    """Reads records by their numbers, where that takes no reading of all others."""
    labelled: Callable[[], tuple[Iterator[str], np.ndarray]] | None = None
    """Returns the ids and the labels, int64, of all records, where that takes no decoding of them."""
