"""Profile the reading of batches: shares of reading files, decoding, augmenting, collating and other work."""

from __future__ import annotations

import cProfile
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

from trainkit.data import thread_pool

KINDS = ("read", "decode", "augment", "collate", "other")

_PYTHON: tuple[tuple[str, str], ...] = (
    (r"trainkit/data/(?:\w+/)?(augment\w*|clahe|face_alignment|tokenizer)\.py:", "augment"),
    (r"/(timm/data/(transforms|auto_augment|random_erasing|mixup)\w*|torchvision/transforms/.*)\.py:", "augment"),
    (r"trainkit/data/(rows/reader|(?:\w+/)?\w+_store|volumes/patch_reader|formats/recordio|hub)\.py:", "read"),
    (r"/(numpy/_core/memmap|h5py/.*|pyarrow/.*)\.py:", "read"),
    (r"trainkit/data/formats/(image_decode|nifti)\.py:", "decode"),
    (r"/PIL/(ImageFile|\w+ImagePlugin)\.py:", "decode"),
    (r"/PIL/Image\.py:(open|_open_core|load|tobytes|__array_interface__)$", "decode"),
    (r"/(gzip|lzma|bz2|zipfile/\w+|nibabel/.*)\.py:", "decode"),
    (r"/torch/utils/data/_utils/collate\.py:", "collate"),
    (r"/numpy/_core/shape_base\.py:\w*stack$", "collate"),
)
"""Kinds of Python functions, by file and name."""

_C: tuple[tuple[str, str], ...] = (
    (r"io\.open|open_code|'\w*(read|seek|__exit__)\w*' of '(_io\.(?!BytesIO)|mmap)|posix\.(p?read|open|f?stat|lseek)|"
     r"fromfile", "read"),
    (r"decompress|Imaging\w*Decoder|decode_jpeg|decode_image|imdecode", "decode"),
    (r"(torch|numpy)\.(stack|cat|concatenate|from_numpy|as_tensor|tensor|ascontiguousarray)>", "collate"),
)  # fmt: skip
"""Kinds of functions in C, by the name that the profiler gives them."""


Function = CodeType | str
"""A function as cProfile names it: code of Python, or a text for one in C."""


def shares(calls: Iterable[Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return the shares of the time of some calls by `KINDS`, 1 in their sum; empty where there was nothing to time.

    Calls are made until `seconds` are over, one at least; those that took thrice the median are left out. What a
    function costs on its own counts for its own kind; one of no kind, such as numpy's, for the kinds of those that
    called it. The profiler's own time is measured and taken off, since it would make Python look dearer than C. Raises
    ValueError where another profiler is at work.
    """
    ends, cost = time.perf_counter() + seconds, _cost()
    spent: list[dict[str, float]] = []
    for call in calls:
        profile = cProfile.Profile()
        profile.enable()
        try:
            with thread_pool.alone():
                call()
        finally:
            profile.disable()
        spent.append(_by_kind(profile.getstats(), cost))
        if time.perf_counter() >= ends:
            break
    totals = [sum(one.values()) for one in spent]
    # A call in which a neighbour had the processor says where it was taken away, and nothing else.
    most = 3 * statistics.median(totals) if totals else 0.0
    kept = [one for one, total in zip(spent, totals, strict=True) if total <= most]
    whole = sum(sum(one.values()) for one in kept)
    return {kind: sum(one[kind] for one in kept) / whole for kind in KINDS} if whole > 0 else {}


def kind_of(code: CodeType | str) -> str | None:
    """Return the kind of a function, from its code or, in C, cProfile's name of it; None: that of its callers."""
    if isinstance(code, str):
        text, table = code, _C
    else:
        text, table = f"{code.co_filename.replace(os.sep, '/')}:{code.co_name}", _PYTHON
    return next((kind for pattern, kind in table if re.search(pattern, text)), None)


def _by_kind(stats: Iterable[Any], cost: float) -> dict[str, float]:
    """Sum the entries of cProfile by kind, seconds; `cost` is its own time for each call."""
    own: dict[Function, float] = {}
    callers: dict[Function, dict[Function, float]] = {}
    for entry in stats:
        own[entry.code] = max(0.0, entry.inlinetime - cost * entry.callcount)
        for called in entry.calls or ():
            callers.setdefault(called.code, {})[entry.code] = called.inlinetime
    kinds = {code: kind for code in own if (kind := kind_of(code)) is not None}
    mix = {code: {kinds.get(code, "other"): 1.0} for code in own}
    # From callers to callees; as many rounds as a chain of functions without a kind of their own may be long.
    for _ in range(30):
        after = {
            code: _mixed(callers[code], mix) if code in callers else mix[code] for code in own if code not in kinds
        }
        if all(mix[code] == part for code, part in after.items()):
            break
        mix |= after
    spent: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for code, seconds in own.items():
        for kind, share in mix[code].items():
            spent[kind] += share * seconds
    return spent


def _mixed(callers: dict[Function, float], mix: dict[Function, dict[str, float]]) -> dict[str, float]:
    total = sum(callers.values())
    out: dict[str, float] = {}
    for code, seconds in callers.items():
        for kind, share in mix[code].items():
            out[kind] = out.get(kind, 0.0) + share * (seconds / total if total > 0 else 1 / len(callers))
    return out


def _cost(calls: int = 2000) -> float:
    """Measure the seconds that the profiler adds to each call of a function."""

    def many() -> float:
        began = time.perf_counter()
        for _ in range(calls):
            _nothing()
        return time.perf_counter() - began

    plain = min(many() for _ in range(3))
    best = float("inf")
    for _ in range(3):
        profile = cProfile.Profile()
        profile.enable()
        seconds = many()
        profile.disable()
        best = min(best, seconds)
    return max(0.0, best - plain) / calls


def _nothing() -> None:
    pass
