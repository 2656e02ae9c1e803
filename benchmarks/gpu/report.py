"""Rows that a part of `make gpu` measures, how they are kept, and the page that shows them."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table: what was measured, what it was expected to be, what it was, and the verdict."""

    what: str
    expected: str
    measured: str
    result: Literal["ok", "fails", "skipped", "no goal"]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Where to measure, and how much. `tiny`: small shapes and few steps, so that it all runs on a CPU in a test."""

    device: torch.device
    tiny: bool


class Skipped(Exception):
    """Says why something cannot be measured here."""


Check = tuple[str, str, Callable[[], tuple[bool | None, str]]]
"""What is measured, what it is expected to be, and the measurement: whether that held (None: no goal), and what was."""


def run(checks: Iterable[Check], done: Collection[str]) -> Iterator[Row]:
    """Yield the row of each check that is not `done`. One that raises fails with the error's text; others go on."""
    for what, expected, measure in checks:
        if what in done:
            continue
        try:
            held, measured = measure()
            result = "no goal" if held is None else "ok" if held else "fails"
        except Skipped as reason:
            result, measured = "skipped", str(reason)
        except Exception as error:
            result, measured = "fails", f"{type(error).__name__}: {error}"
        _free()
        yield Row(what=what, expected=expected, measured=" ".join(measured.split())[:400], result=result)


def require(package: str) -> None:
    """Raise `Skipped` where a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise Skipped(f"{package} is not installed")


def require_cuda(scale: Scale, why: str) -> None:
    """Raise `Skipped` with the reason, unless a CUDA device is measured."""
    if scale.device.type != "cuda":
        raise Skipped(f"needs a GPU: {why}")


def _free() -> None:
    """Let go of what a measurement left, so that the next begins with the same memory."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
