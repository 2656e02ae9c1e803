"""Sample the reading of batches: shares of reading files, decoding, augmenting and other work."""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType

from trainkit.data import thread_pool

KINDS: tuple[str, ...] = ("read", "decode", "augment", "other")
EVERY = 0.001
"""Seconds from one look at the stack to the next."""
_FUNCTIONS: tuple[tuple[str, str], ...] = (
    (r"trainkit/data/(?:\w+/)?(augment\w*|clahe|face_alignment|tokenizer)\.py:", "augment"),
    (r"/(timm/data/(transforms|auto_augment|random_erasing|mixup)\w*|torchvision/transforms/.*)\.py:", "augment"),
    (r"trainkit/data/(rows/reader|(?:\w+/)?\w+_store|volumes/patch_reader|formats/recordio|hub)\.py:", "read"),
    (r"/(numpy/_core/memmap|h5py/.*|pyarrow/.*|pathlib)\.py:", "read"),
    (r"trainkit/data/formats/(image_decode|nifti)\.py:", "decode"),
    (r"/PIL/(ImageFile|\w+ImagePlugin)\.py:", "decode"),
    (r"/PIL/Image\.py:(open|_open_core|load|tobytes|__array_interface__)$", "decode"),
    (r"/(gzip|lzma|bz2|zipfile/\w+|nibabel/.*)\.py:", "decode"),
)
"""Kinds of functions, by file and name. What a function of no kind does counts for the one that called it."""


def shares(calls: Iterable[Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return the shares of the time of some calls by `KINDS`, 1 in their sum; empty where there was nothing to time.

    Calls are made until `seconds` are over, one at least. Another thread looks at the stack of this one meanwhile.
    """
    spent, done, own = dict.fromkeys(KINDS, 0.0), threading.Event(), threading.get_ident()

    def look() -> None:
        before = time.perf_counter()
        while not done.wait(EVERY):
            kind = _of_stack(sys._current_frames()[own])
            now = time.perf_counter()
            spent[kind] += now - before  # a call in C may have kept this thread waiting
            before = now

    sampler, ends = threading.Thread(target=look, daemon=True), time.perf_counter() + seconds
    sampler.start()
    try:
        with thread_pool.alone():
            for call in calls:
                call()
                if time.perf_counter() >= ends:
                    break
    finally:
        done.set()
        sampler.join()
    whole = sum(spent.values())
    return {kind: part / whole for kind, part in spent.items()} if whole > 0 else {}


def _of_stack(frame: FrameType | None) -> str:
    """Return the kind of the innermost function that has one."""
    while frame is not None:
        if kind := _kind(frame.f_code.co_filename, frame.f_code.co_name):
            return kind
        frame = frame.f_back
    return "other"


@functools.cache
def _kind(file: str, name: str) -> str:
    text = f"{file.replace(os.sep, '/')}:{name}"
    return next((kind for pattern, kind in _FUNCTIONS if re.search(pattern, text)), "")
