"""Upper bounds of a run's throughput, and how far it is from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_PARTS = ("loader", "model")


def share(rate: float, ceilings: ThroughputLimits) -> float | None:
    """Return a throughput as a share of the lower of the bounds of loader and model; None if unknown."""
    if ceilings.loader is None or ceilings.model is None:
        return None
    return rate / min(ceilings.loader, ceilings.model)


def mfu(rate: float, ceilings: ThroughputLimits) -> float | None:
    """Return the model FLOPs utilisation (PaLM, arXiv 2204.02311) at a throughput; None if unknown."""
    if ceilings.flops_per_sample is None or ceilings.peak_flops is None:
        return None
    return rate * ceilings.flops_per_sample / ceilings.peak_flops


def metrics(ceilings: ThroughputLimits) -> dict[str, float]:
    """Return the bounds that are known by metric name, samples a second."""
    rates = {f"speed/ceiling_{name}": getattr(ceilings, name) for name in _PARTS}
    return {name: rate for name, rate in rates.items() if rate is not None}


def lines(ceilings: ThroughputLimits) -> list[str]:
    """Write the bounds as aligned lines."""
    rows = []
    for title, rate in (("loader alone", ceilings.loader), ("model alone", ceilings.model)):
        if rate is not None:
            rows.append((title, f"{rate_words(rate)} samples/s"))
    if ceilings.flops_per_sample is not None:
        rows.append(("operations", f"{_many(ceilings.flops_per_sample)}FLOP per sample, forward and backward pass"))
        if ceilings.peak_flops is not None:
            rows.append(("peak", f"{_many(ceilings.peak_flops)}FLOP/s ({ceilings.peak_source})"))
        if ceilings.model is not None and (used := mfu(ceilings.model, ceilings)) is not None:
            rows.append(("model alone uses", f"{100 * used:.1f} % of the peak"))
    rows += [(f"{name}: not measured", reason) for name, reason in ceilings.absent.items()]
    width = max((len(title) for title, _ in rows), default=0)
    return [f"{title.ljust(width)}  {text}" for title, text in rows]


def rate_words(rate: float) -> str:
    """Write a throughput, samples a second, with three digits or whole."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _many(number: float) -> str:
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g} {letter}"
    return f"{number:.3g} "


@dataclass(frozen=True, kw_only=True)
class ThroughputLimits:
    """Upper bounds of a recipe's throughput on a machine, each of one part alone; samples/s over all processes."""

    loader: float | None = None
    """Batches read and discarded."""
    model: float | None = None
    """Training steps on one batch that is read once."""
    flops_per_sample: float | None = None
    """Floating-point operations of a step per sample, counted; a multiplication with an addition is two."""
    peak_flops: float | None = None
    """Peak operations per second of the devices of all processes."""
    peak_source: str = ""
    """How the peak was timed."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """What could not be measured, and why."""
