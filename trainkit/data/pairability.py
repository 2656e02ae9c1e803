"""What a sampler can make of a set, said before training: who can be drawn, what is short, and how long an epoch is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainkit.data.modalities import MODALITIES, RGB
from trainkit.data.sampling import Draw, ModalPK, Pairs, eligible
from trainkit.errors import few


@dataclass(frozen=True)
class Report:
    """Counts of a set as a sampler sees it."""

    records: int
    persons: int
    """People with records."""
    pairable: int
    """People that can be drawn."""
    unpaired: int
    """People that cannot: without RGB or without anything else, as the sampler asks for."""
    dropped: int
    """People that could be, and are not because they have too few records (`short: drop`)."""
    lacking: dict[str, int]
    """Modality to how many people have no record of it, for those that anybody has."""
    single: tuple[str, ...]
    """People with records of one modality only, with its name: `0007 (rgb)`."""
    short: int
    """People of whom some record comes more than once in a draw."""
    repeats: float
    """Share of the rows of a pass that repeat a record of the same draw: expected, by exact counts."""
    batches: int
    """Blocks of an epoch."""
    lengths: dict[str, int]
    """Blocks of an epoch by each definition: `people`, `records`, `anchors`."""
    block: tuple[int, int]
    """P and K."""
    anchored: bool
    """RGB records are drawn and not people."""
    left: int
    """People, or RGB records, that a pass leaves out because they fill no block."""
    bytes: int
    """Of the sampler's index."""
    scan_seconds: float | None
    scan_bytes: int | None

    def sentences(self) -> tuple[str, ...]:
        """To be said with the plan."""
        told = f"{self.records:,} records of {self.persons:,} people"
        if self.scan_seconds is not None:
            told += f", scanned in {self.scan_seconds:.2g} s"
        if self.scan_bytes is not None:
            told += f", {self.scan_bytes / 1e6:.2g} MB"
        lines = [f"{told}; the sampler's index takes {self.bytes / max(self.records, 1):.1f} bytes a record"]
        share = f"{self.pairable:,} of {self.persons:,} people ({100 * self.pairable / max(self.persons, 1):.1f}%)"
        rest = [f"{self.unpaired:,} cannot"] * bool(self.unpaired)
        rest += [f"{self.dropped:,} are dropped for too few records"] * bool(self.dropped)
        lines.append(f"the sampler can draw {share}" + "".join(f"; {text}" for text in rest))
        if starved := [f"{name} {count:,}" for name, count in self.lacking.items() if count]:
            lines.append(f"people without records of a modality: {', '.join(starved)}")
        if self.single:
            lines.append(f"people of one modality: {few(self.single)}")
        if self.repeats:
            lines.append(f"{100 * self.repeats:.2g}% of draws repeat a record, of {self.short:,} people with too few")
        people, each = self.block
        drawn = self.batches * people * each
        lines.append(
            f"an epoch is {self.batches:,} blocks of {people} x {each}, {drawn:,} draws "
            f"({100 * drawn / max(self.records, 1):.3g}% of the records' number); {self._lengths()}"
        )
        return tuple(lines)

    def _lengths(self) -> str:
        words = {
            "people": "every person once",
            "records": "as many draws as records",
            "anchors": "every RGB record once",
        }
        return ", ".join(
            f"{words[name]} is {length:,}"
            for name, length in self.lengths.items()
            if name != "anchors" or self.anchored
        )

    def columns(self) -> dict[str, list]:
        """The same as a table: what, and how much."""
        rows = {
            "records": self.records,
            "people": self.persons,
            "people that can be drawn": self.pairable,
            "people that cannot": self.unpaired,
            "people dropped for too few records": self.dropped,
            **{f"people without {name}": count for name, count in self.lacking.items()},
            "people of one modality": len(self.single),
            "people with repeated records": self.short,
            "share of draws that are repeats": self.repeats,
            "blocks of an epoch": self.batches,
            "blocks: every person once": self.lengths["people"],
            "blocks: as many draws as records": self.lengths["records"],
            **({"blocks: every RGB record once": self.lengths["anchors"]} if self.anchored else {}),
            "left out of a pass": self.left,
            "bytes of the index": self.bytes,
        }
        rows |= {} if self.scan_seconds is None else {"seconds of the scan": self.scan_seconds}
        rows |= {} if self.scan_bytes is None else {"bytes of the scan": self.scan_bytes}
        return {"what": list(rows), "value": [float(value) for value in rows.values()]}


def report(
    draw: Draw, names: Sequence[str], scan_seconds: float | None = None, scan_bytes: int | None = None
) -> Report:
    """What `draw` makes of its cells. `names`: of the people, by their numbers in the cells."""
    spec, counts = draw.spec, draw.cells.counts()
    able, dropped = eligible(spec, counts)
    there = counts.sum(1) > 0
    single = np.flatnonzero((counts > 0).sum(1) == 1)
    again = repeated(spec, counts)
    # Of pairs a person comes as often as it has RGB records, else once a pass.
    weight = np.where(able, counts[:, RGB] if isinstance(spec, Pairs) else 1, 0)
    return Report(
        records=int(counts.sum()),
        persons=int(there.sum()),
        pairable=int(able.sum()),
        unpaired=int((there & ~able & ~dropped).sum()),
        dropped=int(dropped.sum()),
        lacking={MODALITIES[m]: int((there & (counts[:, m] == 0)).sum()) for m in draw.cells.modalities},
        single=tuple(f"{names[person]} ({MODALITIES[int(counts[person].argmax())]})" for person in single.tolist()),
        short=int((able & (again > 0)).sum()),
        repeats=float((again * weight).sum() / (spec.each * weight.sum())),
        batches=draw.batches,
        lengths=dict(draw.lengths),
        block=(spec.people, spec.each),
        anchored=isinstance(spec, Pairs),
        left=draw.units % spec.people,
        bytes=draw.bytes,
        scan_seconds=scan_seconds,
        scan_bytes=scan_bytes,
    )


def repeated(spec, counts: np.ndarray) -> np.ndarray:
    """How many rows of a draw of each person repeat a record of it, int64 (persons,). `counts`: `Cells.counts()`."""
    total, rgb = counts.sum(1), counts[:, RGB]

    def lack(have: np.ndarray, need: int) -> np.ndarray:
        return np.maximum(need - have, 0)

    if isinstance(spec, ModalPK) and spec.half:
        return lack(rgb, spec.each // 2) + lack(total - rgb, spec.each // 2)
    if isinstance(spec, ModalPK | Pairs) and getattr(spec, "ensure_rgb", True) and spec.short != "fill":
        return lack(total - rgb, spec.each - 1)
    return lack(total, spec.each)
