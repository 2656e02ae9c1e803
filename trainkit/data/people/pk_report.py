"""Report of a sampler before training: people that can be drawn, those with few records, length of an epoch."""

from __future__ import annotations

from trainkit.data.people.pk_sampler import PK, Draw, eligible
from trainkit.interfaces import MODALITIES, RGB


def report(draw: Draw) -> tuple[str, ...]:
    """Return sentences about the people of a `draw`, for the plan."""
    spec, counts = draw.spec, draw.cells.counts()
    total, there = counts.sum(1), counts.sum(1) > 0
    persons, able = int(there.sum()), eligible(spec, counts)
    said = f"{int(total.sum()):,} records of {persons:,} people; {spec.name} can sample {draw.persons:,} of them"
    if draw.persons < persons:
        said += ", the others have no RGB record or no other"
    lines = [said]
    lacking = {MODALITIES[code]: int((there & (counts[:, code] == 0)).sum()) for code in draw.cells.modalities}
    if few := [f"{name} {count:,}" for name, count in lacking.items() if count]:
        lines.append(f"people without records of a modality: {', '.join(few)}")
    # A draw takes K records of any modality, or K-1 of others than RGB.
    have, need = (total, spec.each) if isinstance(spec, PK) else (total - counts[:, RGB], spec.each - 1)
    if short := int((able & (have < need)).sum()):
        lines.append(f"{short:,} people have too few records: some of them come more than once in a draw")
    epoch = f"an epoch is {draw.batches:,} blocks of {spec.people} x {spec.each}"
    return (*lines, f"{epoch}, {draw.size:,} draws of {draw.records:,} records")
