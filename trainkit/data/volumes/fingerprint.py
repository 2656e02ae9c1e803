"""What a set of volumes is like: shapes, scanners, organs in mm3, and what a radiologist would want to look at."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainkit.data.formats import volume_grid
from trainkit.data.formats.nifti_header import Header
from trainkit.data.storage.volume_store import CaseInfo
from trainkit.data.volumes.preprocess import PLANES, Preparation
from trainkit.errors import few

_FEW = 5
_STRAY = 0.05
"""A piece of an organ below this share of its largest piece is a stray one, not the other side's organ."""
_MARGIN = 4.0
"""How many robust deviations (1.4826 times the median absolute one) from the median are far."""
_WORLD = {"x": "left to right", "y": "back to front", "z": "feet to head"}
_NUMBER = re.compile(r"\d[\d.]*(e[+-]?\d+)?")
_INTENSITIES = {
    "lowest": "lowest intensity",
    "clip_low": "0.5th percentile",
    "mean": "mean",
    "clip_high": "99.5th percentile",
    "highest": "highest intensity",
}


@dataclass(frozen=True)
class Record:
    """One case as it was found, without its voxels."""

    info: CaseInfo
    fingerprint: int
    """`packed_volumes.fingerprint` of the image as it was in its file."""


def seen_organs(truth: np.ndarray, label: np.ndarray, image: np.ndarray) -> dict[str, dict[str, float]]:
    """What is seen of each organ: slices that have it, pieces, voxels in stray ones, sides where it is cut, its grey.

    Pieces hang together by faces, edges or corners. Grey is in deviations, on the prepared grid.
    """
    from scipy import ndimage

    counts, sums = counted(label), counted(label, image)
    found = {}
    for number, box in enumerate(ndimage.find_objects(truth), start=1):
        if box is None:
            continue
        mask = truth[box] == number
        pieces, count = ndimage.label(mask, np.ones((3, 3, 3)))
        sizes = np.bincount(pieces.ravel())[1:]
        small = sizes < _STRAY * sizes.max()
        cut = sum(
            bool(mask.take(side, axis).any())
            for axis in range(3)
            for side, at_border in ((0, box[axis].start == 0), (-1, box[axis].stop == truth.shape[axis]))
            if at_border
        )
        seen = counts[number]
        found[str(number)] = {
            "slices": int(mask.any((1, 2)).sum()),
            "pieces": int(count - small.sum()),
            "strays": int(small.sum()),
            "stray_voxels": int(sizes[small].sum()),
            "cut": int(cut),
            "grey": float(sums[number] / seen) if seen else 0.0,
        }
    return found


def counted(labels: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """For each of 256 labels the number of its voxels, or the sum of their weights, float64.

    Slice by slice: of a whole volume bincount makes 8 bytes of every label and of every weight.
    """
    total = np.zeros(256)
    for place, part in enumerate(labels):
        own = None if weights is None else weights[place].ravel()
        total += np.bincount(part.ravel(), own, 256)
    return total


def codes(header: Header) -> str:
    """Where the axes of a file grow to: `RAS`, `LPS`, `RSA` ..."""
    letters = [""] * 3
    grid = volume_grid.orientation(header.affine, "xyz")
    for world, (axis, flip) in enumerate(zip(grid.order, grid.flip, strict=True)):
        letters[axis] = ("RAS", "LPI")[flip][world]
    return "".join(letters)


def tilt(header: Header) -> float:
    """Largest angle between an axis of the file and the world axis that it stands for, in degrees."""
    grid = volume_grid.orientation(header.affine, "xyz")
    cosines = header.affine[:3, :3] / np.linalg.norm(header.affine[:3, :3], axis=0)
    aligned = [abs(float(cosines[world, axis])) for world, axis in enumerate(grid.order)]
    return round(math.degrees(math.acos(min(1.0, min(aligned)))), 2)


def describe(names: Sequence[str], records: Sequence[Record], how: Preparation) -> list[str]:
    """A table of a set: shape, spacing and intensities over the cases, then each organ's size, place and brightness."""
    infos = [record.info for record in records]
    facts = [info.facts for info in infos]
    patients = len({info.patient for info in infos})
    resampled = "not resampled"
    if how.spacing is not None:
        middle = np.median([info.shape for info in infos], axis=0)
        resampled = f"resampled to {by(how.spacing)} mm ({by(middle, '.0f')} voxels in the median)"
    slices = f"{PLANES[how.axes]} slices (axes {how.axes}: depth runs {_WORLD[how.axes[0]]})"
    lines = [f"{many(len(infos), 'case')} of {many(patients, 'patient')}, {slices}, {resampled}"]
    rows = []
    for axis, side in enumerate(("depth", "height", "width")):
        rows.append((f"{side} ({how.axes[axis]}), voxels", [info.original_shape[axis] for info in infos], "{:.0f}"))
    for axis, side in enumerate(("depth", "height", "width")):
        rows.append((f"{side} ({how.axes[axis]}), mm/voxel", [info.original_spacing[axis] for info in infos], "{:.4g}"))
    for key, word in _INTENSITIES.items():
        rows.append((word, [fact[key] for fact in facts], "{:.4g}"))
    head = ["", "least", "5 %", "median", "95 %", "most"]
    lines += ["", *_aligned([head, *([word, *_five(values, form)] for word, values, form in rows)])]
    head = ["organ", "cases", "mm3: least", "5 %", "median", "95 %", "most", "share", "slices", "pieces", "cut", "grey"]
    body = []
    for label in range(1, len(names)):
        has = [info for info in infos if info.volumes_mm3[label] > 0]
        if not has:
            body.append([f"{label} {names[label]}", "0", *["-"] * (len(head) - 2)])
            continue
        volumes = [info.volumes_mm3[label] for info in has]
        organs = [organ for info in has if (organ := _organ(info, label))]
        share = np.median([info.volumes_mm3[label] / math.fsum(info.volumes_mm3) for info in has])
        body.append(
            [
                f"{label} {names[label]}",
                f"{len(has)}",
                *_five(volumes, "{:,.0f}"),
                f"{share:.2%}",
                *(f"{np.median([organ[key] for organ in organs]):.0f}" for key in ("slices", "pieces")),
                f"{sum(bool(organ['cut']) for organ in organs)}",
                f"{np.median([organ['grey'] for organ in organs]):+.2f}",
            ]
        )
    lines += ["", *_aligned([head, *body])]
    lines.append("share of the voxels, slices and pieces: in the median; cut: cases where it reaches the border of the")
    lines.append("volume; grey: its intensity, in deviations from the mean of the volume, in the median")
    if clinical := _clinical(infos):
        lines += ["", *clinical]
    return lines


def _clinical(infos: Sequence[CaseInfo]) -> list[str]:
    """A line for each column of the clinical table, over patients: the range of numbers, the commonest words."""
    patients = {info.patient: info.clinical for info in infos}
    rows = []
    for column in dict.fromkeys(name for row in patients.values() for name in row):
        values = [row.get(column) for row in patients.values()]
        known = [value for value in values if value is not None]
        numbers = [value for value in known if isinstance(value, int | float)]
        counts = Counter(f"{value:g}" if isinstance(value, int | float) else str(value) for value in known)
        if numbers and len(numbers) == len(known) and len(counts) > _FEW:
            least, middle, most = np.percentile(numbers, (0, 50, 100))
            said = f"{least:g} to {most:g}, {middle:g} in the median"
        elif len(counts) == len(known) and len(known) > _FEW:
            said = f"{len(known)} different ones"
        else:
            said = few(f"{word} ({count})" for word, count in sorted(counts.items(), key=lambda item: -item[1]))
        missing = len(values) - len(known)
        rows.append([column, f"{said or 'nothing'}" + (f"; unknown of {missing}" if missing else "")])
    width = max((len(column) for column, _ in rows), default=0)
    return [f"{column.ljust(width)}  {said}" for column, said in rows]


def oddities(names: Sequence[str], records: Sequence[Record]) -> list[str]:
    """Sentences about what is odd but usable in a set: doubles, strange grids, scanners, organs that are not there."""
    infos = [record.info for record in records]
    return [*_odd_cases(records), *_odd_grids(infos), *_odd_intensities(infos), *_odd_organs(names, infos)]


def _odd_cases(records: Sequence[Record]) -> list[str]:
    notes = []
    infos = [record.info for record in records]
    by_print: dict[int, list[str]] = {}
    for record in records:
        by_print.setdefault(record.fingerprint, []).append(record.info.id)
    if same := [ids for ids in by_print.values() if len(ids) > 1]:
        notes.append(f"{many(len(same), 'volume')} under two or more ids: {few(' = '.join(ids) for ids in same)}")
    scans = Counter(info.patient for info in infos)
    if several := [f"{patient} ({count})" for patient, count in scans.items() if count > 1]:
        notes.append(f"{many(len(several), 'patient')} with more than one case: {few(several)}")
    alike: dict[str, list[tuple[str, str]]] = {}
    for info in infos:
        for note in info.facts.get("notes", ()):
            # Sentences that differ in their numbers say the same of many cases.
            alike.setdefault(_NUMBER.sub("#", note), []).append((note, info.id))
    for said in alike.values():
        example = "such as: " if len({note for note, _ in said}) > 1 else ""
        notes.append(f"{len(said)} of {many(len(infos), 'case')}, {example}{said[0][0]} ({few(id for _, id in said)})")
    return notes


def _odd_grids(infos: Sequence[CaseInfo]) -> list[str]:
    notes = []
    spacing = np.asarray([info.original_spacing for info in infos])
    middle = np.median(spacing, axis=0)
    if (far := (np.abs(spacing / middle - 1) > 0.1).any(1)).any():
        which = [f"{infos[i].id} ({by(spacing[i])})" for i in np.flatnonzero(far)]
        notes.append(
            f"{many(len(which), 'case')} with a spacing over 10 % off the median of {by(middle)} mm: {few(which)}"
        )
    extent = spacing * np.asarray([info.original_shape for info in infos])
    usual = np.median(extent, axis=0)
    if (far := ((extent > 1.5 * usual) | (extent < usual / 1.5)).any(1)).any():
        which = [f"{infos[i].id} ({by(extent[i], '.3g')})" for i in np.flatnonzero(far)]
        median = f"the median of {by(usual, '.3g')} mm"
        notes.append(f"{many(len(which), 'case')} covering much more or less than {median}: {few(which)}")
    stored = Counter(info.facts["stored"] for info in infos)
    if len(stored) > 1:
        said = ", ".join(f"{codes} {count}" for codes, count in stored.most_common())
        notes.append(f"files store their axes in {len(stored)} ways ({said}); all were turned to one")
    tilted = [(info.facts["tilt"], info.id) for info in infos if info.facts["tilt"] > 5]
    if tilted:
        which = [f"{id} ({angle:.0f} degrees)" for angle, id in sorted(tilted, reverse=True)]
        notes.append(f"{many(len(which), 'case')} tilted by over 5 degrees, which keep their own axes: {few(which)}")
    return notes


def _odd_intensities(infos: Sequence[CaseInfo]) -> list[str]:
    notes = []
    facts = [info.facts for info in infos]
    if flat := [info.id for info in infos if info.facts["std"] == 0]:
        notes.append(f"{many(len(flat), 'image')} without contrast between its percentiles: {few(flat)}")
    width = np.asarray([fact["clip_high"] - fact["clip_low"] for fact in facts])
    if (seen := width[width > 0]).size and seen.max() > 10 * seen.min():
        middle = np.median(seen)
        far = np.flatnonzero((width > 10 * middle) | ((width < middle / 10) & (width > 0)))
        which = [f"{infos[i].id} ({facts[i]['clip_low']:.4g} to {facts[i]['clip_high']:.4g})" for i in far]
        said = f"; over 10 times off the median: {few(which)}" if which else ""
        notes.append(
            f"intensities differ in scale by a factor of {seen.max() / seen.min():.0f}; each volume was normalised by "
            f"its own{said}"
        )
    if top := [(fact["at_highest"], info.id) for fact, info in zip(facts, infos, strict=True) if fact["std"] > 0]:
        cut = [f"{id} ({share:.1%})" for share, id in sorted(top, reverse=True) if share > 0.01]
        if cut:
            notes.append(
                f"{many(len(cut), 'image')} with over 1 % of their voxels at the highest value (saturated): {few(cut)}"
            )
    types = Counter(fact["type"] for fact in facts)
    if len(types) > 1:
        notes.append(f"files hold {', '.join(f'{name} ({count})' for name, count in types.most_common())}")
    return notes


def _odd_organs(names: Sequence[str], infos: Sequence[CaseInfo]) -> list[str]:
    notes = []
    blank = [info.id for info in infos if not any(info.volumes_mm3[1:])]
    if blank:
        notes.append(f"{many(len(blank), 'case')} without any organ: {few(blank)}")
    for label in range(1, len(names)):
        name = f"{label} {names[label]}"
        has = [info for info in infos if info.volumes_mm3[label] > 0]
        without = [info.id for info in infos if not info.volumes_mm3[label] > 0 and info.id not in blank]
        if not has:
            notes.append(f"{name}: in no case")
            continue
        if without:
            notes.append(f"{name}: not in {len(without)} of {many(len(infos), 'case')}: {few(without)}")
        volumes = np.asarray([info.volumes_mm3[label] for info in has])
        middle, far = _far(np.log(volumes), least=math.log(1.5))
        if len(far):
            which = [f"{has[i].id} ({volumes[i]:,.0f})" for i in far]
            notes.append(f"{name}: {len(far)} far from the median of {math.exp(middle):,.0f} mm3: {few(which)}")
        organs = [(info, organ) for info in has if (organ := _organ(info, label))]
        stray = sorted(((o["stray_voxels"], o["strays"], info.id) for info, o in organs if o["strays"]), reverse=True)
        if stray:
            which = [f"{id} ({many(voxels, 'voxel')} in {count})" for voxels, count, id in stray]
            said = f"{name}: stray pieces, under {_STRAY:.0%} of the largest"
            notes.append(f"{said}, in {many(len(stray), 'case')}: {few(which)}")
        pieces = Counter(int(organ["pieces"]) for _, organ in organs)
        usual = pieces.most_common(1)[0][0]
        if more := [f"{info.id} ({organ['pieces']})" for info, organ in organs if organ["pieces"] > usual]:
            notes.append(f"{name}: in more pieces than the usual {usual} in {many(len(more), 'case')}: {few(more)}")
        grey = np.asarray([organ["grey"] for _, organ in organs])
        middle, far = _far(grey, least=0.5)
        if len(far):
            which = [f"{organs[i][0].id} ({grey[i]:+.2f})" for i in far]
            notes.append(f"{name}: {len(far)} of unusual intensity, the median is {middle:+.2f}: {few(which)}")
    return notes


def _far(values: np.ndarray, least: float) -> tuple[float, np.ndarray]:
    """The median, and where values are far from it: by robust deviations and by `least`; the farthest first."""
    middle = float(np.median(values))
    away = np.abs(values - middle)
    limit = max(least, _MARGIN * 1.4826 * float(np.median(away)))
    far = np.flatnonzero(away > limit)
    return middle, far[np.argsort(-away[far], kind="stable")]


def _organ(info: CaseInfo, label: int) -> Mapping[str, float] | None:
    return info.facts.get("organs", {}).get(str(label))


def _five(values: Sequence[float], form: str) -> list[str]:
    array = np.asarray(values, np.float64)
    return [form.format(value) for value in np.percentile(array, (0, 5, 50, 95, 100))]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def by(numbers: Iterable[float], form: str = ".4g") -> str:
    """Lengths of three sides: `1 x 1 x 3.85`."""
    return " x ".join(format(number, form) for number in numbers)


def many(count: int, noun: str) -> str:
    """`1 case`, `2 cases`."""
    return f"{count} {noun}{'s' * (count != 1)}"
