"""Find the step from which training became slower, and the phase that slowed.

Step times are looked at in blocks of 25 steps. The level of a block is the mean time of its steps, what lies
between steps included, without its two slowest: an occasional evaluation, checkpoint or stall is not a
slowdown. A block is compared in log time with the median and the robust spread of the up to 80 blocks before it.

A sustained slowdown is a drop, a temporary one a burst. The time needed to tell them apart depends on the size:

- at least 2.5 times slower, every step: 25 steps and a second. Nothing that passes in fewer steps is reported, and a
  drop is known within 50 steps of its first, where 25 of them take a second. Where blocks have scattered by more than
  10 %, other programs are at work on the machine, and it must last for 5 seconds.
- at least 2.5 times slower, for long waits of every second to every tenth step: 50 steps, and as many seconds.
- at least 1.3 times slower: 250 steps and a minute. Another process that competes for the CPU halves the throughput, so
  a factor of two is not conclusive in less time.
- two times slower bit by bit, so that no block stands out: once half of the last 2,000 steps are.

Where a training has had bursts of about that size or more, it must last twice as long as the longest of them, and 1,000
steps where a tenth of the blocks before were as slow.

What such blocks cannot show is looked for in blocks of 100 steps without their four slowest, made of the steps whose
own blocks were as usual: workers that run in step make one long wait every 16 steps, say, which is a change of
throughput and leaves most steps as they were.

Deciding is a pure function of the records: no time is read here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainkit.speed.clock import COMPUTE, PHASES, Steps
from trainkit.speed.evidence import Drop

BLOCK = 25
"""Steps of a block: what the quick rule waits for."""
SKIPPED = 50
"""Steps at the start that are never compared: warm-up, and batches that were prefetched before the first step."""
FIRST, FIRST_S, FIRST_LIMIT = 4, 5.0, 12
"""Blocks and seconds that must have been seen before one can be called slow; so many blocks are enough."""
KEPT = 80
"""Blocks a new one is compared with."""
SHARP, LASTING, RISEN = math.log(2.5), math.log(1.3), math.log(1.15)
"""In log time above the median: reported after 25 steps, reported at all, and suspected."""
PATIENCE_STEPS, PATIENCE_S, PATIENCE_LIMIT = 250, 60.0, 20_000
"""How long what is less than `SHARP` must last; the last is as many steps as are waited for at most."""
LEAST_S, SHARED_S, SHARED = 1.0, 5.0, 0.1
"""How long what is sharp must last, and how long where blocks scatter by more than `SHARED`, in log time."""
BURST_LIMIT = 1000
"""The most steps that bursts make it wait."""
FASTER = 4
"""Blocks that must be faster before the throughput counts as higher: queues filled during an evaluation give fewer."""
DRIFTED = math.log(2)
"""In log time of the median above what it was when it was first known: reported where no block stood out."""
FLOOR = 0.02
"""The least robust spread of blocks that is believed, in log time."""


@dataclass(slots=True)
class _Block:
    number: np.ndarray
    """(B,) of the rows."""
    rows: np.ndarray
    """(B, phases) seconds."""
    total: np.ndarray
    """(B,) seconds."""
    kept: np.ndarray
    """Which rows are not the slowest."""
    seconds: float
    """Of all rows."""
    level: float
    """Log of the mean of the rows that are kept."""
    median: float
    """Log of the median of all."""

    @property
    def mean(self) -> np.ndarray:
        """(phases,) of the rows that are kept."""
        return self.rows[self.kept].mean(0)


class _StepTimes:
    """The times of steps by phase, (steps, phases), in blocks of one size."""

    def __init__(self, block: int, trim: int, skip: int, waits: bool = False):
        self.block, self.trim, self._skip, self.waits = block, trim, skip, waits
        self.reference: deque[_Block] = deque(maxlen=KEPT)
        self.suspects: list[_Block] = []
        self._fast: list[_Block] = []
        self._bursts: deque[tuple[int, float]] = deque(maxlen=KEPT)
        """Steps that bursts lasted, and their log level."""
        self.open: list[tuple[Drop, float]] = []
        """Drops that last, and the log level below which each is over."""
        self.ended: list[tuple[Drop, int]] = []
        self._pending = (np.empty(0, np.int64), np.empty((0, len(PHASES))))
        self._quiet = self._rest = 0
        self._seconds, self._known = 0.0, False
        self._anchor: tuple[float, np.ndarray] | None = None
        self.usual: list[_Block] = []
        """Blocks of the last `feed` that were as those before."""

    def restart(self) -> None:
        """Forget the usual step times, not the drops."""
        self._begin([])

    def _begin(self, blocks: Sequence[_Block]) -> None:
        """Begin with new usual step times, of which these blocks have been seen."""
        self.reference.clear()
        self.reference.extend(blocks)
        self._known, self._fast, self._anchor = False, [], None
        self._clear()

    def _clear(self) -> None:
        self.suspects, self._quiet, self._rest, self._seconds = [], 0, 0, 0.0

    def feed(self, number: np.ndarray, rows: np.ndarray) -> list[Drop]:
        """Return the drops that these rows, which follow those fed before, make known."""
        if len(self._pending[0]):
            number, rows = np.concatenate([self._pending[0], number]), np.concatenate([self._pending[1], rows])
        at, found = 0, []
        self.usual = []
        while len(number) - at >= self.block:
            part = slice(at, at + self.block)
            at += self.block
            if number[part][0] <= self._skip:
                continue
            drop = self._judge(self._measure(number[part], rows[part]))
            if drop is not None:
                found.append(drop)
        self._pending = number[at:], rows[at:]
        return found

    def _measure(self, number: np.ndarray, rows: np.ndarray) -> _Block:
        total = np.add.reduce(rows, 1)
        order = total.argsort()
        kept = order[: len(order) - self.trim]
        level = float(np.add.reduce(total[kept])) / len(kept)
        median, seconds = float(total[order[len(order) // 2]]), float(np.add.reduce(total))
        logs = math.log(max(level, 1e-9)), math.log(max(median, 1e-9))
        return _Block(number, rows, total, kept, seconds, *logs)

    def _judge(self, new: _Block) -> Drop | None:
        if not self._known:
            self.usual.append(new)
            self.reference.append(new)
            seen = sum(block.seconds for block in self.reference)
            self._known = len(self.reference) >= (FIRST if seen >= FIRST_S else FIRST_LIMIT)
            return None
        middle, spread = _middle([block.level for block in self.reference])
        if self._anchor is None:
            self._anchor = middle, np.median([block.mean for block in self.reference], axis=0)
        if middle - self._anchor[0] > DRIFTED and len(self.reference) > KEPT // 2:
            return self._drifted(middle, self._anchor)
        above = new.level - middle
        if above < -max(LASTING, min(3 * spread, SHARP)):
            self._faster(new)
            return None
        self._fast, early = [], self._fast
        self.reference.extend(early)
        if above <= max(RISEN, min(3 * spread, math.log(2))):
            self._usual(new, middle)
            return None
        self.suspects.append(new)
        self._seconds += new.seconds
        self._rest = 0
        return self._sharp(middle, spread) or self._lasting(middle, spread)

    def _usual(self, new: _Block, middle: float) -> None:
        """Take a block as before for the end of a burst, or a moment's rest in something that lasts."""
        if not self.suspects:
            self.usual.append(new)
            self.reference.append(new)
            return
        self._quiet += 1
        self._rest += 1
        self.suspects.append(new)
        if self._rest > 1 or self._quiet > len(self.suspects) // 5:
            height = sorted(block.level for block in self.suspects[: -self._rest])[-1]
            slow = np.concatenate([block.total for block in self.suspects]) > math.exp((middle + height) / 2)
            self._bursts.append((int(slow.sum()), height))
            self.reference.extend(self.suspects)
            self.usual += self.suspects[-self._rest :]
            self._clear()

    def _faster(self, new: _Block) -> None:
        """Note a block that is faster than before; several in succession are the new usual."""
        self.reference.extend(self.suspects)
        self._clear()
        self._fast.append(new)
        if len(self._fast) < FASTER:
            return
        level = sorted(block.level for block in self._fast)[FASTER // 2]
        step = int(self._fast[0].number[0])
        self.ended += [(drop, step) for drop, over in self.open if level < over]
        self.open = [(drop, over) for drop, over in self.open if level >= over]
        self._begin(self._fast)

    def _wait(self, level: float) -> int:
        """Return the steps to wait at this level, because of earlier bursts or of times that went up and down."""
        ordered = sorted(block.level for block in self.reference)
        if level < ordered[len(ordered) * 9 // 10] + RISEN:
            return BURST_LIMIT
        longest = max((steps for steps, height in self._bursts if height > level - math.log(1.5)), default=0)
        return min(2 * longest, BURST_LIMIT)

    def _sharp(self, middle: float, spread: float) -> Drop | None:
        new = self.suspects[-1]
        threshold = max(SHARP, min(6 * spread, math.log(4)))
        if new.level - middle < threshold:
            return None
        last = (list(self.reference)[-2:] + self.suspects)[-BURST_LIMIT // BLOCK - 2 :]
        total = np.concatenate([block.total for block in last])
        risen = new.median - _middle([block.median for block in self.reference])[0]
        each = risen >= threshold
        waits = risen < LASTING and len(self.suspects) > 1 and len(self.reference) >= 2 * FIRST
        if not each and not waits:
            return None
        least = self.block if each else 2 * self.block
        onset, end = _stretch(total, math.exp(middle), math.exp(new.level), None if each else 4 * math.exp(new.level))
        if end - onset < max(least, self._wait(new.level)):
            return None
        ahead = self.suspects[: max(0, len(self.suspects) - math.ceil((len(total) - onset) / self.block))]
        shared = _middle([block.level for block in (*self.reference, *ahead)])[1] > SHARED
        if total[onset:end].sum() < (SHARED_S if shared else LEAST_S):
            return None
        if not each and (total[onset:end] > math.exp((middle + new.level) / 2)).sum() < 5:
            return None
        rows = np.concatenate([block.rows for block in last])[onset:]
        after = self._measure(np.arange(len(rows)), rows)
        if after.level - middle < threshold:
            return None
        step = int(np.concatenate([block.number for block in last])[onset])
        return self._report(step, middle, after.level, after.mean, keep=1)

    def _lasting(self, middle: float, spread: float) -> Drop | None:
        many = len(self.suspects)
        steps = many * self.block
        if steps < PATIENCE_STEPS:
            return None
        if steps < PATIENCE_LIMIT and self._seconds < PATIENCE_S:
            return None
        level = sorted(block.level for block in self.suspects)[many // 2]
        if level - middle < max(LASTING, min(3 * spread, math.log(2))) or steps < self._wait(level):
            return None
        around = [*list(self.reference)[-1:], *self.suspects]
        total = np.concatenate([block.total for block in around])
        middling = math.exp((middle + level) / 2)
        each = float(np.median(total)) > middling
        cap = float(np.median(total[total > middling])) if self.waits else 4 * math.exp(level)
        onset, end = _stretch(total, math.exp(middle), math.exp(level), None if each else cap)
        if end - onset < PATIENCE_STEPS:
            return None
        step = int(np.concatenate([block.number for block in around])[onset])
        return self._report(step, middle, level, np.median([b.mean for b in self.suspects], axis=0), keep=many)

    def _drifted(self, middle: float, anchor: tuple[float, np.ndarray]) -> Drop:
        """Report steps that became slower bit by bit, so that no block was much slower than those before it."""
        before, mean = anchor
        half = (before + middle) / 2
        late = [block for block in self.reference if block.level > half]
        now = np.median([block.mean for block in late], axis=0)
        return self._report(int(late[0].number[0]), before, middle, now, keep=0, old=mean)

    def _report(
        self, step: int, before: float, after: float, mean: np.ndarray, keep: int, old: np.ndarray | None = None
    ) -> Drop:
        """Return a drop; from here on its level is the usual one."""
        old = np.median([b.mean for b in self.reference], axis=0) if old is None else old
        phase, share = _blame(old, mean)
        drop = Drop(
            step=step, before_ms=1e3 * math.exp(before), after_ms=1e3 * math.exp(after), phase=phase, share=share
        )
        self.open.append((drop, (before + after) / 2))
        self._begin(self.suspects[len(self.suspects) - keep :])
        self._bursts.clear()
        return drop


class SlowdownDetector:
    """Finds drops during training.

    `skip` steps at the start are left out: at least as many as batches are prefetched before the first step, since the
    first steps take them from a full queue. Steps are numbered as the clock counts them, from 1 in each process that
    trains, resumed or not. A drop before step 150 or 350, where the usual step time is not known yet, cannot be seen.
    """

    def __init__(self, skip: int = SKIPPED):
        self._fine = _StepTimes(BLOCK, 2, skip)
        self._coarse = _StepTimes(4 * BLOCK, 4, skip, waits=True)
        self._seen = 0

    @property
    def lasting(self) -> tuple[Drop, ...]:
        """Drops that have not ended."""
        return tuple(drop for times in (self._fine, self._coarse) for drop, _ in times.open)

    @property
    def ended(self) -> tuple[tuple[Drop, int], ...]:
        """Drops that have ended, and the first step that was fast again."""
        return (*self._fine.ended, *self._coarse.ended)

    def look(self, steps: Steps) -> Drop | None:
        """Return the drop that the newest records make known, if any. Records seen before may be among them.

        Looking every 25 steps, at multiples of 25 of the clock's count, finds sharp drops within 50 steps.
        """
        found = self._feed(steps)
        return found[0] if found else None

    def _feed(self, steps: Steps) -> list[Drop]:
        new = slice(int(np.searchsorted(steps.number, self._seen, side="right")), None)
        number = steps.number[new].copy()
        if not len(number):
            return []
        self._seen = int(number[-1])
        found: list[Drop] = []
        rows = np.concatenate([steps.phases[new], steps.between[new]], axis=1)
        for at in range(0, len(number), BLOCK):
            part = slice(at, at + BLOCK)
            sharp = self._fine.feed(number[part], rows[part])
            wide = [d for block in self._fine.usual for d in self._coarse.feed(block.number, block.rows)]
            if sharp:
                self._coarse.restart()
            elif wide:
                self._fine.restart()
            found += sharp or wide
        return found


def find(steps: Steps, skip: int = SKIPPED) -> list[Drop]:
    """Return all drops in these records, in the order in which they became known."""
    return SlowdownDetector(skip)._feed(steps)


def _middle(levels: list[float]) -> tuple[float, float]:
    """Return the median and the robust standard deviation."""
    ordered = np.sort(np.array(levels))
    middle = ordered[len(ordered) // 2]
    apart = np.sort(np.abs(ordered - middle))
    return float(middle), max(FLOOR, 1.4826 * float(apart[len(apart) // 2]))


def _stretch(total: np.ndarray, before: float, after: float, cap: float | None) -> tuple[int, int]:
    """Return where the last of these times begin and end to be of the new level; equal where they never are.

    It begins where the sum of what lies above the middle of both levels is least, and ends where it is most: in log
    time where each step is slower; else in seconds, of which one step counts `cap` at most. It must be slow in each of
    its thirds.
    """
    if cap is None:
        half = math.log(after / before) / 2
        score = np.clip(np.log(np.maximum(total, 1e-9) / before) - half, -half, half)
    else:
        score = np.minimum(total, cap) - (before + after) / 2
    height = np.concatenate([[0.0], np.cumsum(score)])
    onset = int(np.argmin(height))
    end = onset + int(np.argmax(height[onset:]))
    if any(part.sum() <= 0 for part in np.array_split(score[onset:end], 3)):
        return onset, onset
    return onset, end


def _blame(before: np.ndarray, after: np.ndarray) -> tuple[str, float]:
    """Return the phase with the largest increase, and its share of the increase."""
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
