"""Record the single step times of a real training.

    python tests/support/record_step_times.py NAME SECONDS RECIPE [WORDS...]

Adds them to tests/support/recorded_traces.npz as (steps, 9) float32, in the order of `clock.PHASES`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import runs

from trainkit.speed import clock
from trainkit.training import trainer

HERE = Path(__file__).resolve().parent
RECORDED = HERE / "recorded_traces.npz"


def record(seconds: float, recipe: Path, words: list[str]) -> np.ndarray:
    """Seconds of each step by phase, over so many seconds of a training."""
    clocks: list[clock.Clock] = []

    class Kept(clock.Clock):
        def __init__(self, *given):
            super().__init__(*given)
            clocks.append(self)

    trainer.Clock = Kept
    until = time.monotonic() + seconds
    runs.run(*words, recipe=recipe, stopping=lambda: time.monotonic() > until)
    steps = clocks[-1].recent()
    return np.concatenate([steps.phases, steps.between], axis=1).astype(np.float32)


if __name__ == "__main__":
    name, seconds, recipe, *words = sys.argv[1:]
    kept = dict(np.load(RECORDED)) if RECORDED.exists() else {}
    kept[name] = record(float(seconds), Path(recipe), words)
    np.savez_compressed(RECORDED, **kept)
    print(name, kept[name].shape, np.median(kept[name].sum(1)))
