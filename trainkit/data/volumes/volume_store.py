"""The packed form of a set of volumes: prepared once, memory-mapped, able to say whether it is what was written.

A folder of `rows`, a batch for each case, with the columns

| column       | hashed as        | content                                                                           |
|--------------|------------------|-----------------------------------------------------------------------------------|
| `id`         |                  | the name of the case                                                              |
| `image`      | `images.bin`     | float16 (channels, depth, height, width), the prepared image                       |
| `label`      | `labels.bin`     | uint8, its labels on the same grid                                                 |
| `original`   | `originals.bin`  | only where volumes were resampled: uint8, the labels as annotated                  |
| `foreground` | `foreground.bin` | int32, for every label the places of its voxels in the flattened grid             |

and beside them `cases.json`: for every case id, patient, shapes, spacings, label volumes, intensities, fingerprint and
CRCs. A part has the bytes that the shapes of its case say, or the set is refused. A patch is cut out of the
memory-mapped volume by slicing: what it costs depends on the patch, not on the volume.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, ClassVar, Self

import numpy as np
from pydantic import Field, InstanceOf, TypeAdapter

from trainkit.data import folders
from trainkit.data.leakage import Held
from trainkit.data.rows.reader import Rows
from trainkit.data.rows.row_files import (
    ABSENT,
    REBUILD,
    RENAME,
    Form,
    Layout,
    Part,
    Text,
    is_count,
    is_list,
    is_text,
    unreadable,
)
from trainkit.data.rows.writer import Writer as RowWriter
from trainkit.data.volumes.preprocess import AXES, Preparation
from trainkit.errors import UserError
from trainkit.files import Json
from trainkit.interfaces import IGNORED

FORMAT = "trainkit-volumes"
VERSION = 2
FOREGROUND_CAP = 10_000
"""Most voxels of one organ of one case whose places are kept; of more, an even selection."""

LABEL_LIMIT = IGNORED
"""Labels are bytes, and one value is IGNORED."""

_CASES_LIMIT = 256 << 20
_PARTS = {"images": "image", "labels": "label", "originals": "original", "foreground": "foreground"}
"""Column of each CRC of a case."""


def fingerprint(array: np.ndarray) -> int:
    """Compute 64 bits of BLAKE2b over the shape and float32 values of a volume in `zyx` order, channels before it.

    Equal for one volume in two sets, however its axes were stored or resampled there.
    """
    values = np.ascontiguousarray(array, np.float32) + np.float32(0)  # turns -0.0 into 0.0
    state = hashlib.blake2b(repr(values.shape).encode(), digest_size=8)
    state.update(values.data)
    return int.from_bytes(state.digest(), "little")


def held(ids: Sequence[str], patients: Iterable[str], prints: Sequence[int] | np.ndarray) -> Held:
    """Return what sets of volumes are compared by: patients, and volumes as they are in their files."""
    return Held(
        noun="volumes",
        prints=np.asarray(prints, np.uint64),
        names=lambda places: [ids[place] for place in places],
        subjects=frozenset(patients),
        kind="patients",
    )


def places(labels: np.ndarray, cap: int = FOREGROUND_CAP) -> list[np.ndarray]:
    """Find for each label from 0 to the largest present its places in the flattened array, ascending int32.

    Of more than `cap` voxels every n-th is kept. Label 0 gets none: patches away from organs are drawn uniformly. But
    where voxels are IGNORED it gets those that are not, of whatever label, so that no patch is without any.
    """
    flat = labels.ravel()
    annotated = flat != IGNORED
    inside = np.flatnonzero(annotated & (flat > 0))
    values = flat[inside]
    found = [np.empty(0, np.intp) if annotated.all() else np.flatnonzero(annotated)]
    found += [inside[values == label] for label in range(1, int(values.max(initial=0)) + 1)]
    return [(own if len(own) <= cap else own[np.arange(cap) * len(own) // cap]).astype(np.int32) for own in found]


def _is_names(value: Json) -> bool:
    return is_list(value, is_text, range(2, LABEL_LIMIT + 1)) and len(set(value)) == len(value)


def _is_spacing(value: Json) -> bool:
    return is_list(value, lambda mm: type(mm) in (int, float) and math.isfinite(mm) and mm > 0, (3,))


Side = Annotated[int, Field(gt=0, strict=True)]
Millimetres = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
Shape = tuple[Side, Side, Side]
Spacing = tuple[Millimetres, Millimetres, Millimetres]
Whole = Annotated[int, Field(ge=0, lt=1 << 64, strict=True)]


@dataclass(frozen=True)
class CaseInfo:
    """Facts of one case, shapes and spacings in stored order (depth, height, width)."""

    id: InstanceOf[str]
    patient: InstanceOf[str]
    shape: Shape
    """Of the prepared grid."""
    spacing: Spacing
    """mm, of the prepared grid."""
    original_shape: Shape
    original_spacing: Spacing
    floors: tuple[float, ...]
    """Lowest value of each channel of the prepared image, which stands for what lies outside."""
    volumes_mm3: tuple[float, ...]
    """Of each label, 0 included, as annotated: voxels of the original grid times their volume."""
    foreground: tuple[Whole, ...] = ()
    """How many places of each label are known."""
    fingerprint: Whole = 0
    crc: dict[str, Whole] = field(default_factory=dict)
    """CRC-32 of each part, by the words of `_PARTS`."""
    facts: dict[str, Json] = field(default_factory=dict)
    """Intensities of the file (`lowest`, `highest`, `clip_low`, `clip_high`, `mean`, `std`) and more; those of the
    second and further channels are in the list `also`."""


_CASES = TypeAdapter(list[CaseInfo])


class PackedVolumes(Rows):
    """A packed set of volumes opened for reading. Contents of large sets are compared case by case, by `check`."""

    FORM = Form(FORMAT, VERSION, "packed volumes", counted="cases")
    ENTRIES: ClassVar = {
        "cases": lambda cases: is_count(cases) and cases > 0,
        "names": _is_names,
        "channels": lambda names: names is ABSENT or _is_names(names),
        "axes": AXES.__contains__,
        "spacing": _is_spacing,
        "resampled": lambda mm: mm is None or _is_spacing(mm),
    }
    IDENTITY = ("cases", "names", "axes", "spacing", "resampled", "channels")
    BATCH_ROWS = 1

    @classmethod
    def layout(cls, manifest: Mapping[str, Json]) -> Layout:
        """Return the columns."""
        return _columns(manifest["resampled"] is not None)

    @classmethod
    def beside(cls, manifest: Mapping[str, Json]) -> list[str]:
        """Return the facts of cases."""
        return ["cases.json"]

    @classmethod
    def unlisted(cls, manifest: Mapping[str, Json]) -> list[str]:
        """Return the names of cases, which are among their facts too."""
        return ["ids.txt"]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the labels from 0, which is `background`."""
        return tuple(self.manifest["names"])

    @property
    def channel_names(self) -> tuple[str, ...]:
        """Names of the channels, in order; empty where there is but one."""
        return tuple(self.manifest.get("channels", ()))

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return max(1, len(self.channel_names))

    @property
    def axes(self) -> str:
        """Order of the stored axes, such as `yzx`."""
        return self.manifest["axes"]

    @property
    def spacing(self) -> tuple[float, float, float]:
        """mm from voxel to voxel of the prepared grids along each axis, in the median over cases."""
        return tuple(self.manifest["spacing"])

    @property
    def preparation(self) -> Preparation:
        """Preparation of the volumes, which others need for the same network."""
        asked = self.manifest["resampled"]
        return Preparation(self.axes, None if asked is None else tuple(asked))

    def case(self, i: int) -> CaseInfo:
        """Return the facts of case `i`."""
        return self._cases[i]

    def infos(self) -> list[CaseInfo]:
        """Return the facts of all cases."""
        return list(self._cases)

    def ids(self) -> list[str]:
        """Return the id of every case."""
        return [case.id for case in self._cases]

    def patients(self) -> list[str]:
        """Return the patient of every case."""
        return [case.patient for case in self._cases]

    def fingerprints(self) -> np.ndarray:
        """Return `fingerprint` of each image as in its file, uint64 (cases,), for finding one volume in two sets."""
        return np.asarray([case.fingerprint for case in self._cases], np.uint64)

    def where(self, i: int) -> str:
        """Describe a case's place, for messages."""
        return f"{self.path}, case {i} ({self._cases[i].id})"

    def image(self, i: int) -> np.ndarray:
        """Return the prepared image of case `i`, float16 (channels, depth, height, width), a view of the file."""
        return self.array("image", i, np.float16, (self.channels, *self._cases[i].shape))

    def label(self, i: int) -> np.ndarray:
        """Return the labels of case `i` on the grid of its prepared image, uint8, a view of the file."""
        return self.array("label", i, np.uint8, self._cases[i].shape)

    def truth(self, i: int) -> np.ndarray:
        """Return the labels of case `i` as annotated, on the grid of its file, uint8, a view of the file."""
        if self.preparation.spacing is None:
            return self.label(i)
        return self.array("original", i, np.uint8, self._cases[i].original_shape)

    def foreground(self, i: int, label: int) -> np.ndarray:
        """Return the places of voxels of `label` in the flattened prepared grid of case `i`, ascending int32, a view.

        All of them up to `FOREGROUND_CAP`, of more an even selection. Empty for absent organs; for 0 see `places`.
        """
        ends = [0, *accumulate(self._cases[i].foreground)]
        return self.array("foreground", i, np.int32, (ends[-1],))[ends[label] : ends[label + 1]]

    def content(self, cases: np.ndarray) -> str:
        """Compute the SHA-256 of cases as they are in their files: images, labels as annotated, patients and names."""
        file = "labels.bin" if self.preparation.spacing is None else "originals.bin"
        infos = [self._cases[case] for case in cases.tolist()]
        own = [[info.id, info.patient, info.fingerprint] for info in infos]
        labels = self.manifest["files"][file]["sha256"]
        return hashlib.sha256(json.dumps([labels, list(self.names), own]).encode()).hexdigest()

    def check(self, i: int) -> None:
        """Compare the content of case `i` with what was written, once in a process. Raises UserError naming it."""
        if i in self._checked:
            return
        for name, crc in self._cases[i].crc.items():
            begin, end = self.span(_PARTS[name], i)
            if zlib.crc32(self.read(begin, end).data if self.on_network else self._bytes[begin:end].data) != crc:
                raise UserError(self.where(i), f"{name} is not what was written (checksum differs)", remedy=REBUILD)
        self._checked.add(i)

    def _map(self) -> None:
        super()._map()
        self._checked: set[int] = set()
        path, classes = self.path / "cases.json", len(self.names)
        try:
            if path.stat().st_size > _CASES_LIMIT:
                raise ValueError(f"more than {_CASES_LIMIT >> 20} MB")
            entries = json.loads(path.read_text("utf-8"))
            self._cases = _CASES.validate_python([_of_entry(entry) for entry in entries])
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise unreadable(path, error) from None
        resampled = self.preparation.spacing is not None
        sizes = (len(self), classes, classes, self.channels, 4 if resampled else 3)
        for case in self._cases:
            found = len(self._cases), len(case.volumes_mm3), len(case.foreground), len(case.floors), len(case.crc)
            if found != sizes or not (resampled or case.original_shape == case.shape) or not {*case.crc} <= {*_PARTS}:
                raise self.damaged("cases.json", f"facts of {case.id} that do not fit the set")
        folders.check_names(str(path), (*self.ids(), *self.patients()), RENAME)
        for spec in self._layout.values():
            if isinstance(spec, Part):
                begins, ends = self.spans(spec.name, np.arange(len(self)))
                needed = [_bytes(case, spec.name) for case in self._cases]
                if (ends - begins).tolist() != needed:
                    raise self.damaged("cases.json", f"shapes that do not match the bytes of {spec.name}")


def _columns(resampled: bool) -> Layout:
    parts = [Part("image", "images.bin"), Part("label", "labels.bin"), Part("foreground", "foreground.bin")]
    return [Text("id", "ids.txt"), *parts, *([Part("original", "originals.bin")] if resampled else [])]


def _bytes(case: CaseInfo, part: str) -> int:
    """Return the bytes that a part of a case has, a number of any length: a shape may be made up."""
    if part == "foreground":
        return 4 * sum(case.foreground)
    if part == "original":
        return math.prod(case.original_shape)
    return math.prod(case.shape) * (2 * len(case.floors) if part == "image" else 1)


class Writer(RowWriter):
    """Writes packed volumes. Of those that a killed one wrote under the same `key`, `cases` has the facts."""

    def __init__(self, out: Path | str, *, how: Preparation, key: str = ""):
        """`key` as of the `Writer` of rows."""
        layout = _columns(how.spacing is not None)
        super().__init__(
            out, layout, key=key, state=lambda: _entry(self.cases[-1]), batch_rows=PackedVolumes.BATCH_ROWS
        )
        self.how = how
        self.cases: list[CaseInfo] = []
        """Facts of the cases that are written."""

    def __enter__(self) -> Self:
        super().__enter__()
        # An import that a version before began noted more beside each.
        found = (entry[0] if isinstance(entry, list) else entry for entry in self.restored)
        self.cases = _CASES.validate_python([_of_entry(entry) for entry in found])
        return self

    def add_case(
        self, case: CaseInfo, image: np.ndarray, label: np.ndarray, truth: np.ndarray | None, fingerprint: int
    ) -> None:
        """Add one case: its image float16 (channels, D, H, W) and labels uint8 (D, H, W) on the prepared grid, and,
        where resampled, labels as annotated."""
        found = places(label)
        parts = {"images": image, "labels": label, "foreground": np.concatenate(found)}
        parts |= {} if truth is None else {"originals": truth}
        parts = {name: np.ascontiguousarray(array) for name, array in parts.items()}
        crc = {name: zlib.crc32(array.data) if array.size else 0 for name, array in parts.items()}
        counts = tuple(len(own) for own in found)
        self.cases.append(replace(case, fingerprint=fingerprint, foreground=counts, crc=crc))
        self.add({"id": case.id, **{_PARTS[name]: array for name, array in parts.items()}})

    def finish(self, *, names: Sequence[str], channels: Sequence[str] = (), made_from: str = "") -> PackedVolumes:
        """Write everything but the volumes, make it durable, and give it its name.

        `names` are those of the labels from 0, `channels` those of the channels, where there are several.
        """
        entries = []
        for case in self.cases:
            missing = len(names) - len(case.volumes_mm3)
            foreground = case.foreground + (0,) * (len(names) - len(case.foreground))
            entries.append(_entry(replace(case, volumes_mm3=case.volumes_mm3 + (0,) * missing, foreground=foreground)))
        text = json.dumps(entries, allow_nan=False, separators=(",", ":"))
        (self.folder / "cases.json").write_text(text, "utf-8")
        manifest: dict[str, Json] = {
            "cases": len(self.cases),
            "names": list(names),
            "axes": self.how.axes,
            "spacing": np.median([case.spacing for case in self.cases], axis=0).tolist(),
            "resampled": None if self.how.spacing is None else list(self.how.spacing),
            "made_from": made_from,
            # Sets of one channel are as they were before there were others: their digest does not change.
            **({"channels": list(channels)} if channels else {}),
        }
        self.publish(PackedVolumes, manifest)
        return PackedVolumes(self.out)


def _entry(case: CaseInfo) -> dict[str, Json]:
    """Return the facts of a case as `cases.json` has them: `floors` is a number there where there is one channel."""
    floor = case.floors[0] if len(case.floors) == 1 else list(case.floors)
    values = {**asdict(case), "floors": floor, "fingerprint": f"{case.fingerprint:016x}"}
    entry = {"floor" if key == "floors" else key: value for key, value in values.items()}
    return {**entry, "clinical": {}}  # kept though it is empty: sets of before keep their digest


def _of_entry(entry: Mapping[str, Json]) -> dict[str, Json]:
    """Return an entry of `cases.json` as `CaseInfo` has it."""
    floor = entry["floor"]
    floors = floor if isinstance(floor, list) else [floor]
    needed = {"crc": dict(entry["crc"]), "foreground": list(entry["foreground"])}
    return {**entry, **needed, "floors": floors, "fingerprint": int(entry["fingerprint"], 16)}
