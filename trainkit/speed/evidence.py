"""Measurements of the speed of a run, from which its bottleneck is found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainkit.speed.clock import Steps
from trainkit.speed.limits import ThroughputLimits
from trainkit.tracking.system_load import Reading


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Recompilations and graph breaks of torch.compile since the warm-up."""

    recompiles: int = 0
    graph_breaks: int = 0
    seconds: float = 0.0
    """Spent compiling."""
    reasons: tuple[str, ...] = ()
    """Why it recompiled, the most frequent first."""
    breaks: tuple[str, ...] = ()
    """`file:line: reason` of graph breaks."""


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Synchronisations of the host with the device, counted over a few steps with CUDA's sync debug mode."""

    per_step: float = 0.0
    places: tuple[str, ...] = ()
    """`file:line`, the most frequent first."""


@dataclass(frozen=True, kw_only=True)
class Drop:
    """A sustained slowdown."""

    step: int
    """The first slow one."""
    before_ms: float
    """Median time of a step before; of all phases, or of those between steps spread over them."""
    after_ms: float
    phase: str
    """Of `clock.PHASES`: the phase that slowed most; `compute` where forward, backward and optimizer slowed alike."""
    share: float
    """Share of the increase that this phase has, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that was measured of a run, or of a part of it."""

    steps: Steps
    """Single times of the steps under review."""
    batch_size: int
    """Samples of a step, over all processes."""
    seconds: Mapping[str, float]
    """Wall-clock by phase of `clock.PHASES`, over the whole time under review."""
    trained: int
    """Steps in that time."""
    device: str = "cpu"
    on_device: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds of a step by `device/` name: forward, backward, optimizer, transfer, idle."""
    evaluation_s: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Seconds of each evaluation, by name."""
    limits: ThroughputLimits | None = None
    load: Sequence[Reading] = ()
    compiled: Compiled | None = None
    waits: Waits | None = None
    ranks: Sequence[Mapping[str, float]] = ()
    """Mean seconds of a step by phase of `clock.STEP`, of each rank, and `met`: those of the forward pass in which
    it exchanged data with the others or waited for them. Empty for a single process."""
    drops: Sequence[Drop] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that affect speed: `workers`, `prefetch`, `compile`, `precision`, `threads`, `cores`, `deterministic`,
    `cudnn_benchmark`, `log_every`, `evaluate_every`, `checkpoint_every`, and of the environment
    `CUDA_LAUNCH_BLOCKING`, `OMP_NUM_THREADS`, ..."""
