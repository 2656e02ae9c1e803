"""Channels of volumes in files of their own, numbered at the end of the name as nnU-Net has it: `case_0001`."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.errors import UserError, few

_NUMBER = re.compile(r"(.+)_(\d{4})")
_AUTOMATIC = re.compile(r"channel \d+")


@dataclass
class Grouped:
    """The images of each case."""

    names: tuple[str, ...] = ()
    """Of the channels; empty where there is but one."""
    images: dict[str, tuple[Path, ...]] = field(default_factory=dict)
    """Files by id, in the order of the channels."""
    incomplete: list[str] = field(default_factory=list)
    """Sentences about cases without one of the channels."""


def numbered(count: int) -> tuple[str, ...]:
    """Name channels that nothing names; a single one has no name."""
    return tuple(f"channel {place}" for place in range(count)) if count > 1 else ()


def automatic(names: Sequence[str]) -> bool:
    """Return whether names are those of `numbered`, or none."""
    return all(_AUTOMATIC.fullmatch(name) for name in names)


def parted(name: str, ids: Container[str], numbers: bool) -> tuple[str, int | None]:
    """Divide the name of an image into the id of its case and the number of its channel, None without one.

    `ids` are those of label maps. Four digits at the end are a channel where a label map is called without them, or
    with `numbers`.
    """
    found = None if name in ids else _NUMBER.fullmatch(name)
    return (found[1], int(found[2])) if found and (numbers or found[1] in ids) else (name, None)


def grouped(parts: Iterable[tuple[str, int | None, Path]], where: str, names: Sequence[str] = ()) -> Grouped:
    """Group images, given as id, number of the channel and file. `names` are those that channels have.

    Raises UserError for two images of one channel, and a number beyond the names.
    """
    by_id: dict[str, dict[int, Path]] = {}
    several = False
    for id, number, file in parts:
        several |= number is not None
        other = by_id.setdefault(id, {}).setdefault(number or 0, file)
        if other is not file:
            said = f"{file.name} and {other.name}" if file != other else f"{file.name} twice"
            raise UserError(where, f"two images of the id {id!r}: {said}"[:300], "one")
    most = max((number for own in by_id.values() for number in own), default=0)
    count = (len(names) or most + 1) if several else 1
    if most >= count:
        id, own = next((id, own) for id, own in by_id.items() if most in own)
        raise UserError(str(own[most]), f"channel {most} of {id}", f"as many as there are names, {count}: {few(names)}")
    called = tuple(names) if names and count > 1 else numbered(count)
    found = Grouped(called)
    for id, own in by_id.items():
        if missing := [called[number] for number in range(count) if number not in own]:
            there = few(sorted(file.name for file in own.values()))
            noun = "channels" if len(missing) > 1 else "channel"
            found.incomplete.append(f"{id}: no {noun} {few(missing)} (there: {there})")
        else:
            found.images[id] = tuple(own[number] for number in range(count))
    return found
