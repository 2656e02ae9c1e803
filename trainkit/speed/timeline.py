"""What a device did, and when, marked on the device itself."""

from __future__ import annotations

import torch

from trainkit.speed.clock import Timeline


def of(device: torch.device) -> Timeline | None:
    """The timeline of a device; None for a CPU, where the main thread does the work itself."""
    return None
