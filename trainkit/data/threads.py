"""Reading of files by several threads, in the order of what is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def threads() -> int:
    """Return the number of threads that read files: the cores that this process may use, 8 at the most."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def each(function: Callable[[Item], Made], items: Iterable[Item], threads: int, waiting: int = 4) -> Iterator[Made]:
    """Yield the results of `function` in the order of items, by `threads`, each with `waiting` items in memory."""
    items = iter(items)
    with ThreadPoolExecutor(threads) as pool:
        while chunk := list(islice(items, waiting * threads)):
            yield from pool.map(function, chunk)
