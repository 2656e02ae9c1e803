"""Statistics of a set of volumes: shapes, scanners, organs in mm3, and cases that a radiologist should look at."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainkit.data.formats import volume_grid
from trainkit.data.formats.nifti_header import Header
from trainkit.data.leakage import repeats
from trainkit.data.volumes import preprocess, volume_store
from trainkit.data.volumes.preprocess import PLANES, Preparation
from trainkit.data.volumes.volume_store import CaseInfo
from trainkit.errors import few, number_of
from trainkit.interfaces import IGNORED
from trainkit.terminal import aligned

_NAMED = 20
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


def of(array: np.ndarray, header: Header) -> int:
    """Compute `volume_store.fingerprint` of an image (channels, *axes of its file)."""
    grid = volume_grid.orientation(header.affine, "zyx")
    channels = [grid.apply(channel) for channel in array]
    return volume_store.fingerprint(channels[0] if len(channels) == 1 else np.stack(channels))


def seen_organs(truth: np.ndarray, label: np.ndarray, image: np.ndarray) -> dict[str, dict[str, float]]:
    """Measure each organ: slices that have it, pieces, voxels in stray ones, sides where it is cut, its grey.

    Pieces hang together by faces, edges or corners. Grey is in deviations, on the prepared grid. `lost` are pieces none
    of whose voxels lies in a voxel of the prepared grid that has the organ.
    """
    from scipy import ndimage

    counts, sums = counted(label), counted(label, image)
    # Of each voxel of the file, along each axis, the prepared voxel that it lies in.
    places = [preprocess.nearest_voxels(new, old) for old, new in zip(truth.shape, label.shape, strict=True)]
    found = {}
    for number, box in enumerate(ndimage.find_objects(truth, max_label=IGNORED - 1), start=1):
        if box is None:
            continue
        mask = truth[box] == number
        pieces = np.empty(mask.shape, np.int32)
        ndimage.label(mask, np.ones((3, 3, 3)), output=pieces)
        sizes = np.bincount(pieces.ravel())[1:]
        small = sizes < _STRAY * sizes.max()
        cut = sum(
            bool(mask.take(side, axis).any())
            for axis in range(3)
            for side, at_border in ((0, box[axis].start == 0), (-1, box[axis].stop == truth.shape[axis]))
            if at_border
        )
        kept = label[np.ix_(*(place[side] for place, side in zip(places, box, strict=True)))] == number
        left = np.bincount(pieces[kept], minlength=len(sizes) + 1)[1:]
        seen = counts[number]
        found[str(number)] = {
            "slices": int(mask.any((1, 2)).sum()),
            "pieces": int((~small).sum()),
            "strays": int(small.sum()),
            "stray_voxels": int(sizes[small].sum()),
            "lost": int((left == 0).sum()),
            "cut": int(cut),
            "grey": float(sums[number] / seen) if seen else 0.0,
        }
    return found


def counted(labels: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Sum, for each of 256 labels, its voxels or their weights, float64 (256,).

    Slice by slice: of a whole volume bincount makes 8 bytes of every label and of every weight.
    """
    total = np.zeros(256)
    for place, part in enumerate(labels):
        own = None if weights is None else weights[place].ravel()
        total += np.bincount(part.ravel(), own, 256)
    return total


def codes(header: Header) -> str:
    """Return where the axes of a file grow to: `RAS`, `LPS`, `RSA` ..."""
    letters = [""] * 3
    grid = volume_grid.orientation(header.affine, "xyz")
    for world, (axis, flip) in enumerate(zip(grid.order, grid.flip, strict=True)):
        letters[axis] = ("LPI" if flip else "RAS")[world]
    return "".join(letters)


def tilt(header: Header) -> float:
    """Return the largest angle between an axis of the file and the world axis that it stands for, in degrees."""
    grid = volume_grid.orientation(header.affine, "xyz")
    cosines = header.affine[:3, :3] / np.linalg.norm(header.affine[:3, :3], axis=0)
    aligned = [abs(float(cosines[world, axis])) for world, axis in enumerate(grid.order)]
    return round(math.degrees(math.acos(min(1.0, min(aligned)))), 2)


def describe(
    names: Sequence[str], records: Sequence[Record], how: Preparation, channels: Sequence[str] = ()
) -> list[str]:
    """Tabulate a set: shape, spacing and intensities over the cases, of each of the `channels` where there are several,
    then each organ's size, place and brightness."""
    infos = [record.info for record in records]
    facts = [info.facts for info in infos]
    patients = len({info.patient for info in infos})
    resampled = "not resampled"
    if how.spacing is not None:
        middle = np.median([info.shape for info in infos], axis=0)
        resampled = f"resampled to {by(how.spacing)} mm ({by(middle, '.0f')} voxels in the median)"
    slices = f"{PLANES[how.axes]} slices (axes {how.axes}: depth runs {_WORLD[how.axes[0]]})"
    lines = [f"{number_of(len(infos), 'cases')} of {number_of(patients, 'patients')}, {slices}, {resampled}"]
    rows = []
    for axis, side in enumerate(("depth", "height", "width")):
        rows.append((f"{side} ({how.axes[axis]}), voxels", [info.original_shape[axis] for info in infos], "{:.0f}"))
    for axis, side in enumerate(("depth", "height", "width")):
        rows.append((f"{side} ({how.axes[axis]}), mm/voxel", [info.original_spacing[axis] for info in infos], "{:.4g}"))
    for place, channel in enumerate(channels or [""]):
        of = f"{channel}: " if channel else ""
        each = [fact if place == 0 else fact["also"][place - 1] for fact in facts]
        rows += [(f"{of}{word}", [fact[key] for fact in each], "{:.4g}") for key, word in _INTENSITIES.items()]
    head = ["", "least", "5 %", "median", "95 %", "most"]
    lines += ["", *aligned([head, *([word, *_five(values, form)] for word, values, form in rows)])]
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
    lines += ["", *aligned([head, *body])]
    lines.append("share of the voxels, slices and pieces: in the median; cut: cases where it reaches the border of the")
    lines.append("volume; grey: its intensity, in deviations from the mean of the volume, in the median")
    lines += ignored_share(infos)
    return lines


def oddities(names: Sequence[str], records: Sequence[Record]) -> list[str]:
    """Return sentences about what is odd but usable in a set: doubles, strange grids, scanners, missing organs."""
    infos = [record.info for record in records]
    odd = [*_odd_cases(records), *_odd_grids(infos), *_odd_intensities(infos), *_odd_organs(names, infos)]
    return [*odd, *lost_pieces(names, infos)]


def lost_pieces(names: Sequence[str], infos: Sequence[CaseInfo]) -> list[str]:
    """Return sentences about pieces of organs that were annotated and have no voxel left on the prepared grid."""
    notes = []
    for label in range(1, len(names)):
        seen = [(info, organ) for info in infos if (organ := _organ(info, label))]
        pieces = {info.id: (organ["pieces"] + organ["strays"], organ["lost"]) for info, organ in seen}
        lost = sorted((-gone, id) for id, (_, gone) in pieces.items() if gone)
        if not lost:
            continue
        each = few((f"{id} ({pieces[id][0]} -> {pieces[id][0] - pieces[id][1]})" for _, id in lost), _NAMED)
        of = number_of(sum(before for before, _ in pieces.values()), "pieces")
        nothing = sum(before == gone for before, gone in pieces.values())
        notes.append(
            f"{label} {names[label]}: {-sum(gone for gone, _ in lost)} of {of} lost by resampling, and in {nothing} of "
            f"{number_of(len(pieces), 'cases')} all of it: {each}; a finer spacing keeps smaller ones"
        )
    return notes


def ignored_share(infos: Sequence[CaseInfo]) -> list[str]:
    """Return a sentence about voxels that are ignored, where there are any."""
    shares = [info.facts["ignored"] for info in infos if "ignored" in info.facts]
    said = f"ignored: {float(np.median(shares)):.1%} of the voxels in the median of" if shares else ""
    return [f"{said} {number_of(len(shares), 'cases')} of {len(infos)}; in no loss and no score"] if shares else []


def _listed(names: Iterable[str], noun: str, said: str) -> list[str]:
    """A sentence about those that are named, where there are any: `2 cases tilted by over 5 degrees: a, b`."""
    which = list(names)
    return [f"{f'{number_of(len(which), noun)} {said}'.rstrip()}: {few(which)}"] if which else []


def _odd_cases(records: Sequence[Record]) -> list[str]:
    infos = [record.info for record in records]
    twice = repeats(np.asarray([record.fingerprint for record in records], np.uint64)).tolist()
    same = (f"{infos[first].id} = {infos[again].id}" for first, again in twice)
    notes = _listed(same, "volumes", "under two or more ids")
    scans = Counter(info.patient for info in infos)
    several = (f"{patient} ({count})" for patient, count in scans.items() if count > 1)
    notes += _listed(several, "patients", "with more than one case")
    alike: dict[str, list[tuple[str, str]]] = {}
    for info in infos:
        for note in info.facts.get("notes", ()):
            # Sentences that differ in their numbers say the same of many cases.
            alike.setdefault(_NUMBER.sub("#", note), []).append((note, info.id))
    for said in alike.values():
        example = ("such as: " if len({note for note, _ in said}) > 1 else "") + said[0][0]
        notes.append(f"{len(said)} of {number_of(len(infos), 'cases')}, {example} ({few(id for _, id in said)})")
    return notes


def _odd_grids(infos: Sequence[CaseInfo]) -> list[str]:
    spacing = np.asarray([info.original_spacing for info in infos])
    middle = np.median(spacing, axis=0)
    far = (np.abs(spacing / middle - 1) > 0.1).any(1)
    which = [f"{infos[i].id} ({by(spacing[i])})" for i in np.flatnonzero(far).tolist()]
    notes = _listed(which, "cases", f"with a spacing over 10 % off the median of {by(middle)} mm")
    stored = [info.facts["stored"] for info in infos]
    if (ways := len(set(stored))) > 1:
        notes.append(f"files store their axes in {ways} ways ({commonest(stored)}); all were turned to one")
    tilted = sorted(((info.facts["tilt"], info.id) for info in infos if info.facts["tilt"] > 5), reverse=True)
    which = [f"{id} ({angle:.0f} degrees)" for angle, id in tilted]
    return notes + _listed(which, "cases", "tilted by over 5 degrees, which keep their own axes")


def _odd_intensities(infos: Sequence[CaseInfo]) -> list[str]:
    facts = [info.facts for info in infos]
    flat = [info.id for info in infos if any(fact["std"] == 0 for fact in (info.facts, *info.facts.get("also", ())))]
    notes = _listed(flat, "images", "without contrast between its percentiles")
    width = np.asarray([fact["clip_high"] - fact["clip_low"] for fact in facts])
    if (seen := width[width > 0]).size and seen.max() > 10 * seen.min():
        middle = np.median(seen)
        far = np.flatnonzero((width > 10 * middle) | ((width < middle / 10) & (width > 0))).tolist()
        which = [f"{infos[i].id} ({facts[i]['clip_low']:.4g} to {facts[i]['clip_high']:.4g})" for i in far]
        said = f"; over 10 times off the median: {few(which)}" if which else ""
        notes.append(
            f"intensities differ in scale by a factor of {seen.max() / seen.min():.0f}; each volume was normalised by "
            f"its own{said}"
        )
    top = ((fact["at_highest"], info.id) for fact, info in zip(facts, infos, strict=True) if fact["std"] > 0)
    cut = [f"{id} ({share:.1%})" for share, id in sorted(top, reverse=True) if share > 0.01]
    notes += _listed(cut, "images", "with over 1 % of their voxels at the highest value (saturated)")
    types = Counter(fact["type"] for fact in facts)
    if len(types) > 1:
        notes.append(f"files hold {', '.join(f'{name} ({count})' for name, count in types.most_common())}")
    return notes


def _odd_organs(names: Sequence[str], infos: Sequence[CaseInfo]) -> list[str]:
    blank = [info.id for info in infos if not any(info.volumes_mm3[1:])]
    notes = _listed(blank, "cases", "without any organ")
    for label in range(1, len(names)):
        name = f"{label} {names[label]}"
        has = [info for info in infos if info.volumes_mm3[label] > 0]
        without = [info.id for info in infos if not info.volumes_mm3[label] > 0 and info.id not in blank]
        if not has:
            notes.append(f"{name}: in no case")
            continue
        if without:
            notes.append(f"{name}: not in {len(without)} of {number_of(len(infos), 'cases')}: {few(without)}")
        volumes = np.asarray([info.volumes_mm3[label] for info in has])
        middle, far = _far(np.log(volumes), least=math.log(1.5))
        if far:
            which = [f"{has[i].id} ({volumes[i]:,.0f})" for i in far]
            notes.append(f"{name}: {len(far)} far from the median of {math.exp(middle):,.0f} mm3: {few(which)}")
        organs = [(info, organ) for info in has if (organ := _organ(info, label))]
        stray = sorted(((o["stray_voxels"], o["strays"], info.id) for info, o in organs if o["strays"]), reverse=True)
        which = [f"{id} ({number_of(voxels, 'voxels')} in {count})" for voxels, count, id in stray]
        said = f"{name}: stray pieces, under {_STRAY:.0%} of the largest, in"
        notes += [f"{said} {listed}" for listed in _listed(which, "cases", "")]
        pieces = Counter(int(organ["pieces"]) for _, organ in organs)
        usual = pieces.most_common(1)[0][0]
        more = [f"{info.id} ({organ['pieces']})" for info, organ in organs if organ["pieces"] > usual]
        notes += [f"{name}: in more pieces than the usual {usual} in {said}" for said in _listed(more, "cases", "")]
        grey = np.asarray([organ["grey"] for _, organ in organs])
        middle, far = _far(grey, least=0.5)
        if far:
            which = [f"{organs[i][0].id} ({grey[i]:+.2f})" for i in far]
            notes.append(f"{name}: {len(far)} of unusual intensity, the median is {middle:+.2f}: {few(which)}")
    return notes


def _far(values: np.ndarray, least: float) -> tuple[float, list[int]]:
    """The median, and where values are far from it: by robust deviations and by `least`; the farthest first."""
    middle = float(np.median(values))
    away = np.abs(values - middle)
    limit = max(least, _MARGIN * 1.4826 * float(np.median(away)))
    far = np.flatnonzero(away > limit)
    return middle, far[np.argsort(-away[far], kind="stable")].tolist()


def _organ(info: CaseInfo, label: int) -> Mapping[str, Any] | None:
    return info.facts.get("organs", {}).get(str(label))


def _five(values: Sequence[float], form: str) -> list[str]:
    array = np.asarray(values, np.float64)
    return [form.format(value) for value in np.percentile(array, (0, 5, 50, 95, 100))]


def by(numbers: Iterable[float], form: str = ".4g") -> str:
    """Write lengths of three sides: `1 x 1 x 3.85`."""
    return " x ".join(format(number, form) for number in numbers)


def commonest(words: Iterable[str]) -> str:
    """Count words, the commonest first: `RAS 3, LPS 1`."""
    return ", ".join(f"{word} {count}" for word, count in Counter(words).most_common())
