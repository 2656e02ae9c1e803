"""Step times as trainings have them, for judging what watches over the pace.

`steady` are traces without a drop; of what may happen in them each has its own share. `slowed` puts one drop into such
a trace, `guide` the drop from 930 to 170 samples a second at step 1050 of the first guide. `recorded` are stretches of
real trainings. Everything is a pure function of the seed.

What may happen in a trace without a drop:

- log-normal noise of 1 to 40 %, of each phase by itself, and some that wanders over a few steps;
- heavy tails: up to 3 % of the steps last 2 to 30 times as long;
- evaluations, checkpoints and log lines that last up to 200 steps, every 25 steps or rarer; log lines every step;
- a loader that makes one step of two to six wait, and is ahead for up to 32 steps after an evaluation;
- a busy neighbour: every phase at twice its time for up to 200 steps, or at up to 8 times for up to 20 steps, and then
  not again for as long as that, nor for 75 steps;
- a warm-up at up to 50 times the pace; the first 40 steps faster than the rest, from a full queue;
- a first epoch that is slower than the later ones;
- thermal drift: up to 20 % slower, reached over hundreds of steps.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from trainkit.speed.clock import BETWEEN, PHASES, STEP, Steps

RECORDED = Path(__file__).resolve().parent / "recorded_traces.npz"
NEIGHBOUR = (2.0, 200)
SHARP = (8.0, 20)
"""The most that a burst slows, and the most steps that it then lasts."""
DATA = STEP.index("data")
EVAL, CHECKPOINT, LOG = (BETWEEN.index(name) for name in ("eval", "checkpoint", "log"))


def as_steps(rows: np.ndarray) -> Steps:
    """Rows of all phases as steps that are counted from 1."""
    return Steps(np.arange(1, len(rows) + 1), rows[:, : len(STEP)], rows[:, len(STEP) :])


def steady(seed: int, length: int = 1200) -> np.ndarray:
    """(length, 9) seconds by phase of a trace without a drop."""
    return _trace(np.random.default_rng([7, seed]), length)


def guide(seed: int, length: int = 1200) -> tuple[np.ndarray, str]:
    """(length, 9) seconds by phase of a trace that falls from 930 to 170 samples a second at step 1050, and for which.

    A batch has 256 samples.
    """
    rng = np.random.default_rng([8, seed])
    rows = _trace(rng, length)
    rows *= 256 / 930 / _mean(rows[50:1049])
    phase = PHASES[rng.integers(len(PHASES) - 1)]
    _lose(rng, rows, 1050, 930 / 170, phase)
    return rows, phase


def slowed(seed: int, factor: float, phase: str, at: int, length: int = 1200) -> np.ndarray:
    """(length, 9) seconds by phase of a trace in which steps take `factor` times as long from `at` on, for `phase`."""
    rng = np.random.default_rng([9, seed])
    rows = _trace(rng, length)
    _lose(rng, rows, at, factor, phase)
    return rows


@cache
def recordings() -> dict[str, np.ndarray]:
    """Seconds by phase of the steps of trainings on a processor that others used as well, by name: (steps, 9)."""
    with np.load(RECORDED) as kept:
        return {name: kept[name].astype(float) for name in kept}


def recorded(seed: int, length: int = 1200) -> np.ndarray:
    """(length, 9) seconds by phase of a stretch of a real training."""
    rng = np.random.default_rng([10, seed])
    kept = recordings()
    rows = kept[sorted(kept)[seed % len(kept)]]
    first = int(rng.integers(0, max(1, len(rows) - length)))
    return rows[first : first + length]


def _mean(rows: np.ndarray) -> float:
    """Seconds of a step, its log line included."""
    return float(rows[:, : len(STEP)].sum(1).mean() + rows[:, len(STEP) + LOG].mean())


def _lose(rng: np.random.Generator, rows: np.ndarray, at: int, factor: float, phase: str) -> None:
    more = _mean(rows[50 : at - 1]) * (factor - 1)
    noise = np.exp(rng.normal(0, rng.uniform(0.01, 0.3), len(rows) - at + 1))
    rows[at - 1 :, PHASES.index(phase)] += more * noise / noise.mean()


def _trace(rng: np.random.Generator, length: int) -> np.ndarray:
    step = float(np.exp(rng.uniform(np.log(0.002), np.log(1))))
    rows = np.zeros((length, len(PHASES)))
    rows[:, : len(STEP)] = step * rng.dirichlet([1, 0.5, 4, 6, 1])
    own, between, index = rows[:, : len(STEP)], rows[:, len(STEP) :], np.arange(length)

    def sometimes(share: float) -> bool:
        return rng.random() < share

    def span(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    own *= np.exp(rng.normal(0, span(0.01, 0.4), own.shape))
    if sometimes(0.4):
        width = int(rng.integers(2, 12))
        noise = np.convolve(rng.normal(0, rng.uniform(0.02, 0.15), length + width - 1), np.ones(width), "valid")
        own *= np.exp(noise / np.sqrt(width))[:, None]
    if sometimes(0.4):
        hit = np.flatnonzero(rng.random(length) < rng.uniform(0, 0.03))
        own[hit, rng.integers(len(STEP))] += step * np.exp(rng.uniform(0, np.log(29), len(hit)))
    waits = sometimes(0.3)
    if waits:
        period = int(rng.integers(1, 7))
        own[rng.integers(period) :: period, DATA] += period * step * rng.uniform(0.2, 2)
    if sometimes(0.6):
        every = int(span(25, 1000))
        held = np.arange(every, length, every)
        between[held, EVAL] += step * span(1, 200)
        for first in held if waits else ():
            own[first : first + rng.integers(1, 33), DATA] *= 0.02
    if sometimes(0.5):
        every = int(span(50, 1000))
        between[every::every, CHECKPOINT] += step * span(1, 100)
    every = int(span(1, 100))
    between[every::every, LOG] += step * span(0.01, 2) * np.exp(rng.normal(0, 0.3, len(between[every::every])))
    if sometimes(0.6):
        at = int(rng.integers(0, 800))
        while at < length:
            factor, longest = NEIGHBOUR if sometimes(0.7) else (rng.uniform(2, SHARP[0]), SHARP[1])
            many = int(rng.integers(1, longest + 1))
            rows[at : at + many] *= factor
            at += many + max(many, 75) + int(rng.exponential(300))
    if sometimes(0.4):
        own *= (1 + rng.uniform(0, 49) * np.exp(-index / rng.uniform(1, 10)))[:, None]
    if sometimes(0.2):
        own[: rng.integers(1, 41)] *= rng.uniform(0.2, 1)
    if sometimes(0.2):
        own[: rng.integers(100, 900), DATA] += step * rng.uniform(0, 2)
    if sometimes(0.3):
        own *= (1 + rng.uniform(0, 0.2) * (1 - np.exp(-index / rng.uniform(100, 1000))))[:, None]
    return rows
