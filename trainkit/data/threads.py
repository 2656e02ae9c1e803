"""Reading of files by several threads, in the order of what is asked for."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from trainkit.errors import UserError, listing

Item = TypeVar("Item")
Made = TypeVar("Made")


def threads() -> int:
    """Return the number of threads that read files: the cores that this process may use, 8 at the most."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def each(function: Callable[[Item], Made], items: Iterable[Item], threads: int, waiting: int = 4) -> Iterator[Made]:
    """Yield the results of `function` in the order of items, by `threads`, with `waiting` items of each in memory."""
    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[Future[Made]] = deque()
        try:
            for item in items:
                ahead.append(pool.submit(function, item))
                if len(ahead) > waiting * threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


def every(function: Callable[[Item], Made], items: Sequence[Item], where: str, what: str) -> list[Made]:
    """Return the results of `function` for all items of a set. Raises UserError that lists all that fail.

    `what` is the plural noun of items.
    """
    found = list(each(attempt(function), items, threads()))
    bad = [one for one in found if isinstance(one, UserError)]
    if len(bad) == 1:
        raise bad[0]
    if bad:
        found = f"{len(bad)} of {len(items)} {what} are unusable:{listing(map(str, bad))}\n"
        raise UserError(where, found, remedy="repair or remove them")
    return [one for one in found if not isinstance(one, UserError)]


def attempt(function: Callable[[Item], Made]) -> Callable[[Item], Made | UserError]:
    """Have a UserError of a function returned instead of raised."""

    def attempt(item: Item) -> Made | UserError:
        try:
            return function(item)
        except UserError as error:
            return error

    return attempt
