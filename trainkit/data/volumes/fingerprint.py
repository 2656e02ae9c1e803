"""Find what is odd about a set of volumes: doubles, strange grids, missing organs, pieces lost by resampling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from trainkit.data.formats.nifti_header import by
from trainkit.data.leakage import repeats
from trainkit.data.volumes import preprocess
from trainkit.data.volumes.volume_store import CaseInfo
from trainkit.errors import few, number_of
from trainkit.interfaces import IGNORED

_NAMED = 20
_OFF = 0.1
"""Share by which a spacing differs from the median to be called odd."""
ACROSS = {"x": "left to right", "y": "back to front", "z": "feet to head"}
"""Where slices run across each axis of the world."""


def organs(truth: np.ndarray, label: np.ndarray) -> dict[str, dict[str, int]]:
    """Count the pieces of each organ, which hang together by faces, edges or corners, and those that are lost: none of
    whose voxels lies in a voxel of the prepared grid that has the organ."""
    from scipy import ndimage

    # Of each voxel of the file, along each axis, the prepared voxel that it lies in.
    places = [preprocess.nearest_voxels(new, old) for old, new in zip(truth.shape, label.shape, strict=True)]
    found = {}
    for number, box in enumerate(ndimage.find_objects(truth, max_label=IGNORED - 1), start=1):
        if box is None:
            continue
        pieces = np.empty(truth[box].shape, np.int32)
        ndimage.label(truth[box] == number, np.ones((3, 3, 3)), output=pieces)
        kept = label[np.ix_(*(place[side] for place, side in zip(places, box, strict=True)))] == number
        found[str(number)] = {
            "pieces": int(pieces.max()),
            "lost": int(pieces.max() - np.count_nonzero(np.unique(pieces[kept]))),
        }
    return found


def oddities(names: Sequence[str], infos: Sequence[CaseInfo], prints: Sequence[int] | np.ndarray) -> list[str]:
    """Return sentences about what is odd but usable in a set: doubles, strange grids and headers, missing organs."""
    twice = repeats(np.asarray(prints, np.uint64)).tolist()
    notes = _listed((f"{infos[a].id} = {infos[b].id}" for a, b in twice), "volumes", "under two or more ids")
    for note in dict.fromkeys(note for info in infos for note in info.facts.get("notes", ())):
        notes += _listed((info.id for info in infos if note in info.facts.get("notes", ())), "cases", note)
    spacing = np.asarray([info.original_spacing for info in infos])
    middle = np.median(spacing, axis=0)
    odd = np.flatnonzero((np.abs(spacing / middle - 1) > _OFF).any(1)).tolist()
    said = f"with a spacing over {_OFF:.0%} off the median of {by(middle.tolist(), '.4g')} mm"
    notes += _listed((f"{infos[i].id} ({by(spacing[i].tolist(), '.4g')})" for i in odd), "cases", said)
    flat = [info.id for info in infos if any(fact["std"] == 0 for fact in (info.facts, *info.facts.get("also", ())))]
    notes += _listed(flat, "images", "without contrast between its percentiles")
    blank = [info.id for info in infos if not any(info.volumes_mm3[1:])]
    notes += _listed(blank, "cases", "without any organ")
    for label, name in enumerate(names[1:], start=1):
        without = [info.id for info in infos if not info.volumes_mm3[label]]
        notes += [f"{label} {name}: in no case"] if len(without) == len(infos) else []
        some = sorted({*without} - {*blank}) if len(without) < len(infos) else []
        notes += [f"{label} {name}: not in {len(some)} of {len(infos)} cases: {few(some)}"] if some else []
    return [*notes, *_lost_pieces(names, infos)]


def _lost_pieces(names: Sequence[str], infos: Sequence[CaseInfo]) -> list[str]:
    """Return sentences about pieces of organs that were annotated and have no voxel left on the prepared grid."""
    notes = []
    for label, name in enumerate(names[1:], start=1):
        seen = [(info.id, organ) for info in infos if (organ := info.facts.get("organs", {}).get(str(label)))]
        # Sets of before counted small pieces apart.
        pieces = {id: (organ["pieces"] + organ.get("strays", 0), organ["lost"]) for id, organ in seen}
        if lost := sorted((-gone, id) for id, (_, gone) in pieces.items() if gone):
            each = few((f"{id} ({pieces[id][0]} -> {pieces[id][0] + gone})" for gone, id in lost), _NAMED)
            of = number_of(sum(before for before, _ in pieces.values()), "pieces")
            nothing = sum(before == gone for before, gone in pieces.values())
            cases = number_of(len(pieces), "cases")
            notes.append(
                f"{label} {name}: {-sum(gone for gone, _ in lost)} of {of} lost by resampling, and in {nothing} of "
                f"{cases} all of it: {each}; a finer spacing keeps smaller ones"
            )
    return notes


def _listed(names: Iterable[str], noun: str, said: str) -> list[str]:
    """A sentence about those that are named, where there are any: `2 cases without any organ: a, b`."""
    which = list(names)
    return [f"{number_of(len(which), noun)} {said}: {few(which)}"] if which else []
