"""How the tables of the benchmarks write several values of one figure."""

from __future__ import annotations

import statistics


def spread(values: list[float]) -> str:
    """Mean and standard deviation; a single value as it is."""
    if len(values) < 2:
        return f"{values[0]:.3f}"
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"
