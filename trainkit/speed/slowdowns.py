"""Find the step from which training became slower, and the phase that slowed.

Steps are cut into windows. The level of a window is the mean time of its steps, what lies between steps included,
without its slowest: an occasional evaluation, checkpoint or stall is not a slowdown. It is compared with the median of
the windows before. A slowdown is sustained once several windows in succession are slower by a factor:

- windows of 25 steps without their 8 slowest: 2 of them, 2.5 times slower, of 5 seconds or more;
- windows of 100 steps without their 4 slowest: 5 of them, 1.4 times slower, of a minute or more. Long waits of every
  16th step, as of workers that run in step, count here.

Slower windows that are followed by a usual one were a burst. As many faster ones in succession are the new usual, and
end the slowdowns above them. Deciding is a pure function of the records: no time is read here.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from trainkit.speed.clock import COMPUTE, PHASES, Steps
from trainkit.speed.evidence import Drop

WINDOW = 25
"""Steps of the smallest window."""
SKIPPED = 50
"""Steps at the start that are never compared: warm-up, and batches that were prefetched before the first step."""
KEPT = 80
"""Windows a new one is compared with, at most."""


@dataclass(frozen=True)
class _Window:
    number: np.ndarray
    """(B,) of the steps."""
    total: np.ndarray
    """(B,) seconds of each."""
    mean: np.ndarray
    """(phases,) seconds, without the slowest steps."""
    level: float
    """Log of the seconds of a step, without the slowest."""


@dataclass
class _Scale:
    """Windows of one size, and what makes a slowdown of them."""

    size: int
    trim: int
    """Slowest steps of a window that are left out."""
    many: int
    """Windows in succession that must be slower."""
    factor: float
    """How much slower they must be."""
    seconds: float
    """How long they must last together."""
    first: int
    """Windows that must have been seen before."""
    reference: deque[_Window] = field(default_factory=lambda: deque(maxlen=KEPT))
    slower: list[_Window] = field(default_factory=list)
    faster: list[_Window] = field(default_factory=list)
    pending: tuple[np.ndarray, np.ndarray] = (np.empty(0, np.int64), np.empty((0, len(PHASES))))

    def feed(self, number: np.ndarray, rows: np.ndarray) -> list[_Window]:
        """Return the windows that these steps complete."""
        number, rows = np.concatenate([self.pending[0], number]), np.concatenate([self.pending[1], rows])
        whole = len(number) // self.size * self.size
        self.pending = number[whole:], rows[whole:]
        return [
            self._window(number[at : at + self.size], rows[at : at + self.size]) for at in range(0, whole, self.size)
        ]

    def _window(self, number: np.ndarray, rows: np.ndarray) -> _Window:
        total = rows.sum(1)
        mean = rows[np.argsort(total)[: self.size - self.trim]].mean(0)
        return _Window(number, total, mean, math.log(max(float(mean.sum()), 1e-9)))

    def judge(self, new: _Window) -> str:
        """Take a window; return `slower` or `faster` where it ends a change for good, else an empty text."""
        if len(self.reference) < self.first:
            self.reference.append(new)
            return ""
        levels = np.array([window.level for window in self.reference])
        middle = float(np.median(levels))
        spread = 1.4826 * float(np.median(np.abs(levels - middle)))
        limit = max(math.log(self.factor), 4 * spread)
        above = new.level - middle
        for same, other, beyond in ((self.slower, self.faster, above), (self.faster, self.slower, -above)):
            if beyond < limit:
                continue
            self.reference.extend(other)
            other.clear()
            same.append(new)
            lasted = sum(float(window.total.sum()) for window in same)
            done = len(same) >= self.many and (lasted >= self.seconds or same is self.faster)
            return ("slower" if same is self.slower else "faster") if done else ""
        self.reference.extend([*self.slower, *self.faster, new])
        self.slower.clear()
        self.faster.clear()
        return ""

    def drop(self) -> Drop:
        """Return the slowdown that the slower windows are."""
        late = self.slower[len(self.slower) // 2 :]  # the first may be slow in part
        before, after = (float(np.exp(np.median([window.level for window in part]))) for part in (self.reference, late))
        phase, share = _blame(*(np.median([window.mean for window in part], axis=0) for part in (self.reference, late)))
        # It begins where the sum of what lies above the middle of both levels is least.
        near = [self.reference[-1], self.slower[0]]
        total = np.minimum(np.concatenate([window.total for window in near]), 4 * after)
        onset = int(np.argmin(np.concatenate([[0.0], np.cumsum(total - (before + after) / 2)[:-1]])))
        step = int(np.concatenate([window.number for window in near])[onset])
        return Drop(step=step, before_ms=1e3 * before, after_ms=1e3 * after, phase=phase, share=share)

    def restart(self) -> None:
        """Forget the usual step times: what lasts is the new usual."""
        latest = self.slower or self.faster
        self.reference = deque(latest, maxlen=KEPT)
        self.slower, self.faster = [], []


class SlowdownDetector:
    """Finds slowdowns during training.

    `skip` steps at the start are left out: at least as many as batches are prefetched before the first step, since the
    first steps take them from a full queue. Steps are numbered as the clock counts them, from 1 in each process that
    trains, resumed or not. A slowdown in the first 250 steps, where the usual step time is not known yet, is not seen.
    """

    def __init__(self, skip: int = SKIPPED):
        self._skip, self._seen = skip, skip
        self._scales = (
            _Scale(WINDOW, WINDOW // 3, many=2, factor=2.5, seconds=5.0, first=8),
            _Scale(4 * WINDOW, 4, many=5, factor=1.4, seconds=60.0, first=5),
        )
        self.lasting: list[Drop] = []
        """Slowdowns that have not ended."""
        self.ended: list[tuple[Drop, int]] = []
        """Those that have, and the first step that was fast again."""

    def look(self, steps: Steps) -> Drop | None:
        """Return the slowdown that the newest records make known, if any. Records seen before may be among them."""
        found = self.feed(steps)
        return found[0] if found else None

    def feed(self, steps: Steps) -> list[Drop]:
        """Return all slowdowns that these records make known, in their order."""
        new = steps[int(np.searchsorted(steps.number, self._seen, side="right")) :]
        rows = np.concatenate([new.phases, new.between], axis=1)
        found: list[Drop] = []
        for at in range(0, len(new), WINDOW):
            number = new.number[at : at + WINDOW]
            self._seen = int(number[-1])
            found += filter(None, (self._feed(scale, number, rows[at : at + WINDOW]) for scale in self._scales))
        return found

    def _feed(self, scale: _Scale, number: np.ndarray, rows: np.ndarray) -> Drop | None:
        for window in scale.feed(number, rows):
            change = scale.judge(window)
            if not change:
                continue
            if change == "faster":
                first, level = int(scale.faster[0].number[0]), math.exp(scale.faster[0].level)
                over = [drop for drop in self.lasting if 1e3 * level < (drop.before_ms * drop.after_ms) ** 0.5]
                self.ended += [(drop, first) for drop in over]
                self.lasting = [drop for drop in self.lasting if drop not in over]
                scale.restart()
                continue
            drop = scale.drop()
            self.lasting.append(drop)
            for each in self._scales:
                each.restart()
            return drop
        return None


def _blame(before: np.ndarray, after: np.ndarray) -> tuple[str, float]:
    """Return the phase with the largest increase, and its share of the increase; `compute` where all of it slowed."""
    was, now, lost = (
        dict(zip(PHASES, times.tolist(), strict=True)) for times in (before, after, np.maximum(after - before, 0))
    )
    whole = sum(lost.values()) or 1.0
    worst = max(COMPUTE, key=lost.__getitem__)
    rest = [name for name in COMPUTE if name != worst]
    own = math.log((now[worst] + 1e-9) / (was[worst] + 1e-9))
    others = math.log((sum(now[n] for n in rest) + 1e-9) / (sum(was[n] for n in rest) + 1e-9))
    if others > own / 2 and (compute := sum(lost.pop(name) for name in COMPUTE)):
        lost["compute"] = compute
    phase = max(lost, key=lost.__getitem__)
    return phase, lost[phase] / whole
