"""Channels of volumes in files of their own: which files are those of one case.

nnU-Net numbers them at the end of the name (`case_0000`, `case_0001`); others have a word there (`sub-01_T1w`,
`sub-01_FLAIR`).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.errors import UserError, few

LABEL_WORDS = "label|labels|mask|seg|dseg|segmentation|gt"
"""Ends of the names of label maps."""

LABEL_TAIL = re.compile(rf"(.+?)[_-]({LABEL_WORDS})", re.IGNORECASE)
LABEL_WORD = re.compile(LABEL_WORDS, re.IGNORECASE)

_IMAGE_TAIL = re.compile(r"(.+?)[_-](image|img)", re.IGNORECASE)
_NUMBER = re.compile(r"(.+)_(\d{4})")
_WORD = re.compile(r"(.+)[_-]([^_-]+)")
_A_LABEL_MAP = "a label map among images"
_AUTOMATIC = re.compile(r"channel \d+")


@dataclass
class Grouped:
    """The images of each case."""

    names: tuple[str, ...] = ()
    """Of the channels; empty where there is but one."""
    images: dict[str, tuple[Path, ...]] = field(default_factory=dict)
    """Files by id, in the order of the channels."""
    incomplete: dict[str, str] = field(default_factory=dict)
    """Sentences about cases without one of the channels, by id."""
    unused: list[tuple[Path, str]] = field(default_factory=list)
    """Files that are of no channel, and why."""


def numbered(count: int) -> tuple[str, ...]:
    """Name channels that nothing names; a single one has no name."""
    return tuple(f"channel {place}" for place in range(count)) if count > 1 else ()


def automatic(names: Sequence[str]) -> bool:
    """Return whether names are those of `numbered`, or none."""
    return all(_AUTOMATIC.fullmatch(name) for name in names)


def parted(
    name: str, ids: Container[str], *, loose: bool, numbers: bool = False, wanted: Sequence[str] = ()
) -> tuple[str, str]:
    """Divide the name of an image into the id of its case and the word of its channel, which may be empty.

    `ids` are those of label maps. Where these are never called as images are (`loose`), ends of names are no part of
    ids; `numbers`: those of four digits never are. `wanted` are words of channels.
    """
    if name in ids:
        return name, ""
    if (found := _NUMBER.fullmatch(name)) and (numbers or (loose and found[1] in ids)):
        return found[1], found[2]
    if loose and (found := _IMAGE_TAIL.fullmatch(name)) and found[1] in ids:
        return found[1], ""
    if (found := _WORD.fullmatch(name)) and ((loose and found[1] in ids) or found[2] in wanted):
        return found[1], found[2]
    return name, ""


def grouped(
    parts: Iterable[tuple[str, str, Path]], where: str, *, names: Sequence[str] = (), wanted: Sequence[str] = ()
) -> Grouped:
    """Group images, given as id, word and file. `names` are those that the source has for its channels, `wanted` those
    that were asked for: words choose among files, numbers are named by either.

    Raises UserError for two images of one channel, a word that was asked for and that no file has, and a number beyond
    the names.
    """
    by_id: dict[str, dict[str, Path]] = {}
    for id, word, file in parts:
        other = by_id.setdefault(id, {}).setdefault(word, file)
        if other is not file:
            channel = f", channel {word}" if word else ""
            said = f"{file.name} and {other.name}" if file != other else f"{file.name} twice"
            raise UserError(where, f"two images of the id {id!r}{channel}: {said}"[:300], "one")
    words = sorted({word for own in by_id.values() for word in own if word and not LABEL_WORD.fullmatch(word)})
    if not words:
        expected, called = [""], ()
    elif all(re.fullmatch(r"\d{4}", word) for word in words):
        count = len(names) or len(wanted) or int(words[-1]) + 1
        if int(words[-1]) >= count:
            id, own = next((id, own) for id, own in by_id.items() if words[-1] in own)
            said = f"{count}: {few(names or wanted)}" if names or wanted else str(count)
            raise UserError(
                str(own[words[-1]]), f"channel {int(words[-1])} of {id}", f"as many as there are names, {said}"
            )
        expected, called = [f"{place:04}" for place in range(count)], names or wanted or numbered(count)
    else:
        if absent := [word for word in wanted if word not in words]:
            raise UserError(where, f"no image of the channel {few(absent)}", f"some of {few(words, 20)}")
        expected = called = list(wanted or words)
    found = Grouped(tuple(called) if len(expected) > 1 else ())
    for id, own in by_id.items():
        tail = LABEL_TAIL.fullmatch(id)
        if words and list(own) == [""] and tail and tail[1] in by_id:
            found.unused.append((own[""], _A_LABEL_MAP))
            continue
        if len(expected) == 1 and list(own) == [""]:
            own = {expected[0]: own[""]}
        missing = [called[place] for place, word in enumerate(expected) if called and word not in own]
        if missing:
            there = few(sorted(file.name for file in own.values()))
            noun = "channels" if len(missing) > 1 else "channel"
            found.incomplete[id] = f"{id}: no {noun} {few(missing)} (there: {there})"
        else:
            found.images[id] = tuple(own[word] for word in expected)
        for word, file in own.items():
            why = _A_LABEL_MAP if LABEL_WORD.fullmatch(word) else "of an unused channel"
            found.unused += [] if word in expected else [(file, why)]
    return found
