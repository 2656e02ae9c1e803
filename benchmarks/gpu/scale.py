"""Where the parts of `benchmarks.gpu` measure, and how much."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.results import Skipped


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Where to measure, and how much. `tiny`: small shapes and few steps, so that it all runs on a CPU in a test."""

    device: torch.device
    tiny: bool

    def require_cuda(self, why: str) -> None:
        """Raise `Skipped` with the reason, unless a CUDA device is measured."""
        if self.device.type != "cuda":
            raise Skipped(f"needs a GPU: {why}")
