"""Report of a sampler before training: people that can be drawn, records that are short, length of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainkit.data.people.pk_sampler import PK, AnySampler, Draw, Pairs, eligible
from trainkit.interfaces import MODALITIES, RGB

NAMED = 5
"""People of one modality whose names are given."""

_LENGTHS = {
    "people": "every person once",
    "records": "as many draws as records",
    "anchors": "every RGB record once",
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """Counts of a set as a sampler sees it."""

    draw: Draw
    records: int
    persons: int
    """People with records."""
    unpaired: int
    """People that cannot be drawn, whatever `short` says: what the sampler asks for, they do not have."""
    dropped: int
    """People that could be, and are not because they have too few records (`short: drop`)."""
    lacking: dict[str, int]
    """Modality to how many people have no record of it, for those that anybody has."""
    singles: int
    """People with records of one modality only."""
    single: tuple[str, ...]
    """The first of them, with its name: `0007 (rgb)`."""
    short: int
    """People of whom some record comes more than once in a draw."""
    repeats: float
    """Share of the rows drawn that repeat a row of the same draw. Exact: how many is known for each person."""
    scan_seconds: float | None
    """Seconds that finding the records took."""
    scan_bytes: int | None
    """Bytes that are kept of them."""

    def sentences(self) -> tuple[str, ...]:
        """Return sentences for the plan."""
        told = f"{self.records:,} records of {self.persons:,} people"
        if self.scan_seconds is not None:
            told += f", scanned in {self.scan_seconds:.2g} s"
        if self.scan_bytes is not None:
            told += f", {self.scan_bytes / 1e6:.2g} MB"
        lines = [
            f"{told}; the sampler's index takes {self.draw.bytes / self.records:.1f} bytes a record",
            self._people(),
        ]
        if starved := [f"{name} {count:,}" for name, count in self.lacking.items() if count]:
            lines.append(f"people without records of a modality: {', '.join(starved)}")
        if self.singles:
            more = f" and {self.singles - len(self.single):,} more" if self.singles > len(self.single) else ""
            lines.append(f"people of one modality: {', '.join(self.single)}{more}")
        if self.repeats:
            lines.append(f"{100 * self.repeats:.2g}% of draws repeat a record, of {self.short:,} people with too few")
        spec, draw = self.draw.spec, self.draw
        lengths = ", ".join(
            f"{_LENGTHS[name]} is {length:,}"
            for name, length in draw.lengths.items()
            if name != "anchors" or isinstance(spec, Pairs)
        )
        lines.append(
            f"an epoch is {draw.batches:,} blocks of {spec.people} x {spec.each}, {draw.size:,} draws for "
            f"{draw.records:,} records; {lengths}"
        )
        return tuple(lines)

    def _people(self) -> str:
        spec, able = self.draw.spec, self.draw.persons
        told = f"{spec.name} can sample {able:,} of {self.persons:,} people ({100 * able / self.persons:.1f}%)"
        if self.unpaired:
            one = not isinstance(spec, PK) and not spec.ensure_rgb
            why = "records of one modality" if one else "no RGB record, or no other"
            told += f"; {self.unpaired:,} have {why}"
        return told + (f"; {self.dropped:,} are dropped for too few records" if self.dropped else "")


def report(
    draw: Draw, names: Sequence[str], scan_seconds: float | None = None, scan_bytes: int | None = None
) -> Report:
    """Report on the cells of a `draw`. `names`: of the people, by their numbers in the cells."""
    spec, counts = draw.spec, draw.cells.counts()
    able, dropped = eligible(spec, counts)
    there = counts.sum(1) > 0
    singles = np.flatnonzero((counts > 0).sum(1) == 1)
    again = np.where(able, repeated(spec, counts), 0)
    # Of pairs a person comes as often as it has RGB records, else once a pass.
    weight = np.where(able, counts[:, RGB] if isinstance(spec, Pairs) else 1, 0)
    return Report(
        draw=draw,
        records=int(counts.sum()),
        persons=int(there.sum()),
        unpaired=int((there & ~able & ~dropped).sum()),
        dropped=int(dropped.sum()),
        lacking={MODALITIES[m]: int((there & (counts[:, m] == 0)).sum()) for m in draw.cells.modalities},
        singles=len(singles),
        single=tuple(f"{names[who]} ({MODALITIES[int(counts[who].argmax())]})" for who in singles[:NAMED].tolist()),
        short=int((again > 0).sum()),
        repeats=float((again * weight).sum() / (spec.each * weight.sum())),
        scan_seconds=scan_seconds,
        scan_bytes=scan_bytes,
    )


def repeated(spec: AnySampler, counts: np.ndarray) -> np.ndarray:
    """Count the rows of a draw of each person that repeat a row of it, int64 (persons,), of those that can be drawn.

    `counts`: `Cells.counts()`.
    """
    total, rgb, each = counts.sum(1), counts[:, RGB], spec.each
    if isinstance(spec, PK) or spec.short == "fill" or not spec.ensure_rgb:
        return np.maximum(each - total, 0)
    if spec.half:
        return np.maximum(each // 2 - rgb, 0) + np.maximum(each // 2 - (total - rgb), 0)
    return np.maximum(each - 1 - (total - rgb), 0)
