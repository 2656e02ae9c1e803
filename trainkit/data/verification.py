"""Verify sets of data of any kind: what a training would refuse, what is odd, and what sets have in common.

A kind opens its sets as a training does, which reads every item, and says what is odd; here are the sentences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit.data.cache import Progress
from trainkit.data.leakage import Held, leaks
from trainkit.data.threads import Item, attempt, each, threads
from trainkit.errors import UserError, listing

WARNING = "warning: "
"""Begins a sentence about what is odd but usable."""

NAMED = 1000
"""Items that are listed for one kind of error; more are counted."""


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A set of which every item was read."""

    where: str
    """The set in messages."""
    held: Held | None = None
    """What it is compared with other sets by; None for one that cannot be opened."""
    damage: Sequence[str] = ()
    """Sentences about what a training refuses, each with its place."""
    odd: Sequence[str] = ()
    """Sentences about what is odd but usable, without the place."""


def verified(
    find: Callable[[Path | str], list[Examined]], path: Path | str, against: Iterable[Path | str]
) -> list[str]:
    """Return what is damaged in the sets that `find` opens at a path and then, after `warning: `, what is odd: in one
    of them, and shared with those before it and those `against`. Empty when all is well."""
    try:
        own = find(path)
    except UserError as error:
        return [str(error)]
    others = [seen for place in against for seen in find(place)]
    odd = [f"{seen.where}: {text}" for seen in own for text in seen.odd]
    for place, seen in enumerate(own):
        for other in (*own[:place], *others):
            if seen.held is not None and other.held is not None:
                odd += [f"{seen.where}: {leak.said}" for leak in leaks(other.held, seen.held, other.where)]
    unread = [seen for seen in others if seen.held is None]
    return [text for seen in (*own, *unread) for text in seen.damage] + [f"{WARNING}{text}" for text in odd]


def damaged(
    where: str, check: Callable[[Item], object], items: Sequence[Item], on_progress: Progress | None
) -> list[str]:
    """Check each of the images of a set by several threads; return a sentence about those that cannot be read."""
    errors, done = list[UserError](), itertools.count(1)
    # To wake a thread costs more than to read a small image.
    at_once = max(1, min(64, len(items) // (8 * threads())))
    parts = [items[first : first + at_once] for first in range(0, len(items), at_once)]
    attempted = attempt(check)
    for found in each(lambda part: [attempted(item) for item in part], parts, threads()):
        for one in found:
            errors += [one] if isinstance(one, UserError) else []
            if on_progress:
                on_progress(next(done), len(items))
    said = f"{where}: {len(errors)} of {len(items)} images cannot be read:{listing(map(str, errors), NAMED)}"
    return [said] if errors else []
