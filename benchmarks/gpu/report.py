"""Rows that a part of `make gpu` measures, and the scale at which it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


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
