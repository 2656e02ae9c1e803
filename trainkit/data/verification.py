"""Verify sets of data of any kind: read every item, name what is damaged or odd, compare sets with each other.

A kind gives what is of its own: how a set is opened and one of its items read, and what is odd about what was read.
Here are the walk over all items, the lists of errors, and the sentences about what two sets share.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainkit.data.cache import Progress
from trainkit.data.leakage import Held, leaks
from trainkit.data.threads import Item, Made, attempt, each, threads
from trainkit.errors import UserError, few, listing

WARNING = "warning: "
"""Begins a sentence about what is odd but usable."""

NAMED = 1000
"""Items that are listed for one kind of error; more are counted."""

Step = Callable[[], None]
"""Called when an item was read."""


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A set of which every item was read, or with which another one is compared."""

    where: str
    """The set in messages."""
    held: Held
    """What it is compared with other sets by."""
    damage: Sequence[str] = ()
    """Sentences about what a training refuses, each with its place."""
    odd: Sequence[str] = ()
    """Sentences about what is odd but usable, without the place."""


class Mistake(UserError):
    """An error of an item, where there are several kinds: `what`, such as `masks cannot be read`.

    `codes` are values in it that stand for nothing, with the pixels of each.
    """

    def __init__(self, what: str, error: UserError, codes: Mapping[str, int] | None = None):
        super().__init__(error.where, error.found, error.expected, error.remedy)
        self.what, self.codes = what, codes or {}


def steps(on_progress: Progress | None, total: int) -> Step:
    """Return what to call for each of `total` items, so that progress is reported over several sets."""
    done = itertools.count(1)
    return lambda: on_progress(next(done), total) if on_progress else None


def read_all(read: Callable[[Item], Made], items: Sequence[Item], step: Step) -> Iterator[Made | UserError]:
    """Read items by several threads and yield what was read in their order; the error of one that is damaged."""
    attempted = attempt(read)
    for found in each(lambda part: [attempted(item) for item in part], _parts(items), threads()):
        for one in found:
            step()
            yield one


def damaged(
    where: str, what: str, check: Callable[[Sequence[Item]], None], items: Sequence[Item], step: Step
) -> list[str]:
    """Check items, several at once and where that raises UserError one by one; return a sentence about the damaged."""

    def errors(part: Sequence[Item]) -> list[UserError]:
        try:
            check(part)
        except UserError as error:
            return [error] if len(part) == 1 else [found for n in range(len(part)) for found in errors(part[n : n + 1])]
        return []

    parts, found = _parts(items), []
    for part, some in zip(parts, each(errors, parts, threads()), strict=True):
        found += some
        for _ in part:
            step()
    return damage(where, what, found, len(items))


def _parts(items: Sequence[Item]) -> list[Sequence[Item]]:
    """Divide items into those that a thread reads at once: to wake it costs more than to read a small image."""
    at_once = max(1, min(64, len(items) // (8 * threads())))
    return [items[first : first + at_once] for first in range(0, len(items), at_once)]


def damage(where: str, what: str, errors: Sequence[UserError], total: int) -> list[str]:
    """Return a sentence for each kind of error among `total` items: how many there are, which values, and each item.

    `what` is the kind of those that are no `Mistake`, as `images cannot be read`.
    """
    kinds: dict[str, list[UserError]] = {}
    for error in errors:
        kinds.setdefault(error.what if isinstance(error, Mistake) else what, []).append(error)
    return [f"{where}: {len(some)} of {total} {kind}{_codes(some)}:{_listed(some)}" for kind, some in kinds.items()]


def _listed(errors: Sequence[UserError]) -> str:
    """List errors, each on a line of its own, and in the last line what all of them expect and advise."""
    ends = {"; ".join(filter(None, (f"expected {e.expected}" if e.expected else "", e.remedy))) for e in errors}
    if len(ends) > 1:
        return listing(map(str, errors), NAMED)
    return listing((f"{e.where}: {e.found}" for e in errors), NAMED) + "".join(f"\n  {end}" for end in ends if end)


def _codes(errors: Sequence[UserError]) -> str:
    """Name the values that stand for nothing, the commonest first: `, 9 (6 pixels of 2), 200 (3 pixels of 1)`."""
    found = [error.codes for error in errors if isinstance(error, Mistake)]
    items = Counter(code for codes in found for code in codes)
    pixels = {code: sum(codes.get(code, 0) for codes in found) for code in items}
    ordered = sorted(pixels, key=lambda code: -pixels[code])
    return ", " * bool(ordered) + few((f"{code} ({pixels[code]} pixels of {items[code]})" for code in ordered), 8)


def sentences(own: Sequence[Examined], others: Sequence[Examined], *, each_other: bool = True) -> list[str]:
    """Return what is damaged in sets and then, after `warning: `, what is odd: in one of them, and shared with `others`
    and, with `each_other`, with those before it. Empty when all is well."""
    odd = [f"{seen.where}: {text}" for seen in own for text in seen.odd]
    for place, seen in enumerate(own):
        odd += [text for other in (*(own[:place] if each_other else ()), *others) for text in shared(seen, other)]
    return [text for seen in own for text in seen.damage] + [f"{WARNING}{text}" for text in odd]


def shared(seen: Examined, other: Examined) -> list[str]:
    """Return sentences about what of a set is in another one too: subjects by name, items by content."""
    return [f"{seen.where}: {leak.said}" for leak in leaks(other.held, seen.held, other.where)]
