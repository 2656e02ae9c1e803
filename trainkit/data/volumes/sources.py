"""Sources of volumes: each layout of folders becomes a list of cases, an image and its label map each.

| layout                                          | splits                                   | names of labels from |
|-------------------------------------------------|------------------------------------------|----------------------|
| `{train,val}/{image,label}/<patient>.nii.gz`    | TOM500's: `#train`, `#val`, any folder   | `names.json`, if any |
| `dataset.json`, `imagesTr`, `labelsTr`          | the Decathlon's; `#test` for `imagesTs`  | `dataset.json`       |
| the same without lists of files                 | nnU-Net's, of one channel; likewise      | `dataset.json`       |
| a folder of images and one of labels            | none                                     | `names.json`, if any |
| files, or one file: to predict for, no labels   | folders                                  | none                 |

`names.json` beside the folders of images and labels, or one folder above, is the list of the names of labels 0, 1, ...

What is there and is not used is named in `left_out`: whoever imports shows it, since a label map whose image is called
otherwise is a case less, and nobody would notice.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from trainkit.data import folders
from trainkit.data.formats.nifti import is_nifti, stem
from trainkit.data.sources import finding, split_of
from trainkit.errors import UserError, few

BACKGROUND = "background"
"""The name of label 0."""

IMAGE_FOLDERS = ("image", "images", "imagestr")
"""Names of the folder of images, in lower case."""

LABEL_FOLDERS = ("label", "labels", "labelstr", "mask", "masks")
"""Names of the folder of label maps."""

PATIENT_COLUMNS = ("Id", "id", "ID", "patient", "patient_id")
"""Names of the column of a clinical table that holds the patient; else it is the first."""

TEXT_LIMIT = 64 << 20
"""Largest `dataset.json` or table that is read, in bytes."""

Value = str | float | None

_DEPTH = 4
_LOOKED_AT = 20_000
_CHANNEL = re.compile(r"(.+)_(\d{4})")
_IMAGE_TAIL = re.compile(r"(.+?)[_-](image|img)", re.IGNORECASE)
_LABEL_TAIL = re.compile(r"(.+?)[_-](label|labels|mask|seg|segmentation|gt)", re.IGNORECASE)
_EMPTY = {"", "na", "n/a", "nan", "none", "null"}
_FILES = "volumes (.nii.gz or .nii)"


@dataclass(frozen=True)
class Case:
    """One volume of a source."""

    id: str
    """The name of its image without folder and suffix; no two of a source are alike."""
    patient: str
    image: Path
    label: Path | None
    """None where only images are there."""
    clinical: Mapping[str, Value] = field(default_factory=dict, hash=False)
    """The row of the patient in the clinical table; every column is there, with None where the table says nothing."""


@dataclass(frozen=True)
class VolumeSource:
    """A set of volumes in some layout."""

    kind: str
    """The layout, in words."""
    where: str
    cases: tuple[Case, ...]
    """In the order of their ids."""
    names: tuple[str, ...] | None
    """Names of labels 0, 1, ..., where the source says so; the first is `background`."""
    left_out: tuple[str, ...]
    """Sentences about what is there and not used, or odd."""
    files: tuple[Path, ...]
    """All files that it is made of, for noticing changes."""


def open_volumes(
    path: Path | str, *, patient: str | None = None, clinical: Path | str | None = None, labelled: bool = True
) -> VolumeSource:
    """Open the volumes at `path`, whatever the layout, as `path#split` where there are splits. Reads no voxels.

    `patient` is a regular expression with one part in parentheses that finds the patient in the id of a case; without
    it every case is a patient of its own. `clinical` is a CSV table with a column of patients. With `labelled` only
    cases with a label map are taken; without, all images, of a plain folder and a single file too.

    Raises UserError when there is nothing, no such split, two files of one id, a damaged table or `dataset.json`.
    """
    find = None if patient is None else finding(patient, "patient")
    try:
        path, split = split_of(path)
        where = f"{path}#{split}" if split else str(path)
        if not path.exists():
            raise UserError(str(path), "does not exist", "a folder of volumes")
        if path.is_file() and path.name != "dataset.json":
            found = _single(path, split, labelled)
        else:
            found = _layout(path.parent if path.is_file() else path, split, labelled, where)
    except OSError as error:  # a name too long, a folder that may not be entered
        raise UserError(str(path)[:300], f"cannot be read ({error.strerror or error})", "a folder of volumes") from None
    if not found.pairs:
        said = f"; {few(found.left_out, 3)}" if found.left_out else ""
        wanted = "images with label maps of the same names" if labelled else _FILES
        raise UserError(where, f"no {'labelled ' if labelled else ''}volumes{said}", wanted)
    folders.check_names(where, found.pairs)
    cases = [
        Case(id, find(id, str(image)) if find else id, image, label)
        for id, (image, label) in sorted(found.pairs.items())
    ]
    files, notes = list(found.made_of), list(found.left_out)
    for case in cases:
        files += [case.image] if case.label is None else [case.image, case.label]
    if clinical is not None:
        cases, said = _joined(cases, Path(clinical))
        files.append(Path(clinical))
        notes += said
    return VolumeSource(found.kind, where, tuple(cases), found.names, tuple(notes), tuple(files))


def named_labels(names: Iterable[str], where: str) -> tuple[str, ...]:
    """Return the names of labels 0, 1, ... from a list with or without the background.

    Raises UserError for names that are empty or there twice.
    """
    listed = [name.strip() for name in names]
    if not listed or listed[0].lower() != BACKGROUND:
        listed = [BACKGROUND, *listed]
    listed[0] = BACKGROUND
    lower = [name.lower() for name in listed]
    if len(listed) < 2 or not all(name and name.isprintable() for name in listed) or len(set(lower)) < len(lower):
        found = ", ".join(repr(name) for name in listed)[:200]
        raise UserError(where, f"names of labels {found}", "different names of labels 1, 2, ...")
    return tuple(listed)


@dataclass
class _Found:
    kind: str
    pairs: dict[str, tuple[Path, Path | None]] = field(default_factory=dict)
    names: tuple[str, ...] | None = None
    left_out: list[str] = field(default_factory=list)
    made_of: list[Path] = field(default_factory=list)


def _single(path: Path, split: str | None, labelled: bool) -> _Found:
    if split is not None or not is_nifti(path):
        raise UserError(str(path), "a file of unknown kind" if split is None else "a file has no splits", _FILES)
    if labelled:
        raise UserError(str(path), "a single volume, without a label map", "a folder of images and one of labels")
    return _Found("file", {stem(path): (path, None)})


def _layout(root: Path, split: str | None, labelled: bool, where: str) -> _Found:
    if (root / "dataset.json").is_file() and not (split is not None and (root / split).is_dir()):
        return _decathlon(root, split, labelled)
    folder = root
    if split is not None:
        folder = root / split
        if not folder.is_dir():
            splits = ", ".join(f"#{name}" for name in splits_below(root))
            raise UserError(where, "no such split", f"one of: {splits}" if splits else f"the folder {folder}")
    if (pair := _pair(folder, labelled)) is not None:
        images, labels = pair
        found = _paired(folder, images, labels, labelled)
        found.names, found.made_of = _names_beside(folder, split)
        return found
    if not labelled and (files := _volumes(folder)):
        found = _Found("folder of volumes")
        found.left_out += _strays(folder, {folder}, "in a folder below")
        for file in files:
            _put(found, stem(file), file, None, str(folder))
        return found
    if splits := splits_below(root) if split is None else []:
        either = " or ".join(f"{root}#{name}" for name in splits)
        raise UserError(str(root), f"holds the splits {', '.join(splits)}", "one of them", f"name {either}")
    wanted = "a folder `image` and a folder `label`, or dataset.json"
    there = few(entry.name for entry in _folders(folder))
    found = "no volumes in a layout that is known" + (f", in the folders {there}" if there else "")
    raise UserError(where, found, wanted if labelled else f"{wanted}, or {_FILES}")


def splits_below(root: Path) -> list[str]:
    """Return the names of the folders in a folder that are sets of volumes themselves: `train` and `val` of TOM500."""
    return [entry.name for entry in _folders(root) if _pair(entry, labelled=True) is not None]


def _pair(folder: Path, labelled: bool) -> tuple[Path, Path | None] | None:
    """Find the folders of images and of labels in a folder."""
    below = _folders(folder)
    chosen: list[Path | None] = []
    for words in (IMAGE_FOLDERS, LABEL_FOLDERS):
        some = [entry for entry in below if entry.name.lower() in words]
        if len(some) > 1:
            raise UserError(str(folder), f"folders {', '.join(entry.name for entry in some)}", "one of them")
        chosen.append(some[0] if some else None)
    images, labels = chosen
    if images is None or (labels is None and labelled):
        return None
    return images, labels


def _paired(folder: Path, images: Path, labels: Path | None, labelled: bool, *, channels: bool = False) -> _Found:
    """Pair images and labels of the same names, or, where no two are called alike, of the same but for `_seg` and such.

    With `channels` images are called `<id>_0000`, as nnU-Net has it.
    """
    found = _Found("pair of folders" if labels is not None else "folder of images")
    files, maps = _volumes(images), _volumes(labels) if labels is not None else []
    loose = not {stem(file) for file in files} & {stem(file) for file in maps}
    by_id: dict[str, Path] = {}
    for file in maps:
        tail = _LABEL_TAIL.fullmatch(stem(file)) if loose else None
        id = tail[1] if tail else stem(file)
        if id in by_id:
            raise UserError(str(labels), f"two label maps of the id {id!r}: {file.name} and {by_id[id].name}", "one")
        by_id[id] = file
    unused = dict(by_id)
    for file in files:
        id = _image_id(file, by_id, channels, loose)
        label = by_id.get(id)
        unused.pop(id, None)
        if label is None and labelled:
            found.left_out.append(f"{_below(folder, file)}: an image without a label map")
        else:
            _put(found, id, file, label, str(images))
    found.left_out += [f"{_below(folder, file)}: a label map without an image" for file in unused.values()]
    kept = {images} | ({labels} if labels is not None else set())
    found.left_out += _others(folder, kept)
    found.left_out += _strays(folder, kept, f"not in {images.name}" + (f" or {labels.name}" if labels else ""))
    return found


def _image_id(file: Path, labels: Mapping[str, Path], channels: bool, loose: bool) -> str:
    id = stem(file)
    if id in labels:
        return id
    if (channel := _CHANNEL.fullmatch(id)) and (channels or (loose and channel[1] in labels)):
        if channel[2] != "0000":
            raise UserError(str(file), f"channel {int(channel[2])} of {channel[1]}", "images of one channel, _0000")
        return channel[1]
    tail = _IMAGE_TAIL.fullmatch(id) if loose else None
    return tail[1] if tail and tail[1] in labels else id


def _put(found: _Found, id: str, image: Path, label: Path | None, where: str) -> None:
    if id in found.pairs:
        other = found.pairs[id][0]
        said = f"{image.name} and {other.name}" if image != other else f"{image.name} twice"
        raise UserError(where, f"two images of the id {id!r}: {said}"[:300], "one")
    found.pairs[id] = (image, label)


def _decathlon(root: Path, split: str | None, labelled: bool) -> _Found:
    """Read the layout of the Medical Segmentation Decathlon, and nnU-Net's, whose `dataset.json` lists no files."""
    file = root / "dataset.json"
    said = _json(file)
    if not isinstance(said, dict):
        raise UserError(str(file), f"a {type(said).__name__}", "an object with `labels`")
    names = _label_names(said.get("labels"), str(file))
    test = split in ("test", "testing")
    if split is not None and not test and split not in ("train", "training"):
        raise UserError(f"{root}#{split}", "no such split", "one of: #train, #test")
    ending = "Ts" if test else "Tr"
    images, labels = root / f"images{ending}", root / f"labels{ending}"
    listed = said.get("test" if test else "training")
    if test and labelled and not labels.is_dir():
        raise UserError(f"{root}#{split}", "its images have no label maps", "a split with label maps, such as #train")
    if not isinstance(listed, list) or (test and labels.is_dir()):
        if not images.is_dir():
            raise UserError(str(root), f"no folder {images.name}", "the images that dataset.json is about")
        found = _paired(root, images, labels if labels.is_dir() else None, labelled, channels=True)
        found.left_out = [text for text in found.left_out if not text.startswith(_of_other_split(ending))]
        return _Found("nnU-Net", found.pairs, names, found.left_out, [file])
    found = _Found("Decathlon", names=names, made_of=[file])
    kept = {images, labels}
    seen: set[Path] = set()
    for number, entry in enumerate(listed):
        where = f"{file}, {'test' if test else 'training'} {number}"
        image, label = _listed(root, entry, where)
        kept |= {place.parent for place in (image, label) if place is not None}
        seen |= {place for place in (image, label) if place is not None}
        if not image.is_file():
            text = "is listed in dataset.json and not there"
            found.left_out.append(f"{_below(root, image)}: {text}")
        elif labelled and (label is None or not label.is_file()):
            found.left_out.append(f"{_below(root, image)}: an image without a label map")
        else:
            _put(found, stem(image), image, label if label is not None and label.is_file() else None, where)
        if label is not None and label.is_file() and not image.is_file():
            found.left_out.append(f"{_below(root, label)}: a label map without an image")
    for folder in sorted(kept):
        for stray in _volumes(folder) if folder.is_dir() and folder != root else []:
            if stray not in seen:
                found.left_out.append(f"{_below(root, stray)}: is not listed in dataset.json")
    found.left_out += _others(root, kept)
    strays = _strays(root, kept, "is not listed in dataset.json")
    found.left_out += [text for text in strays if not text.startswith(_of_other_split(ending))]
    return found


def _of_other_split(ending: str) -> tuple[str, str]:
    other = "Tr" if ending == "Ts" else "Ts"
    return f"images{other}/", f"labels{other}/"


def _listed(root: Path, entry: Any, where: str) -> tuple[Path, Path | None]:
    """Read an entry of `dataset.json`: an image and its label map, or an image alone."""
    both = (entry.get("image"), entry.get("label")) if isinstance(entry, dict) else (entry, None)
    if isinstance(both[0], list) or not isinstance(both[0], str) or not isinstance(both[1], str | None):
        raise UserError(where, repr(entry)[:200], "paths of one image and its label map")
    places = []
    for name in both:
        pure = PurePosixPath(name or ".")
        if ".." in pure.parts:
            raise UserError(where, repr(name)[:200], f"a path inside {root}")
        places.append(None if name is None else folders.inside(root, name, where))
    return places[0], places[1]


def _label_names(labels: Any, where: str) -> tuple[str, ...] | None:
    """Read `{"0": "background", "1": "Anterior"}`, or nnU-Net's `{"background": 0, "Anterior": 1}`."""
    if labels is None:
        return None
    wanted = 'names of labels 0, 1, ... such as {"0": "background", "1": "liver"}'
    if not isinstance(labels, dict):
        raise UserError(where, f"labels {labels!r}"[:200], wanted)
    numbered: dict[int, str] = {}
    for key, value in labels.items():
        number, name = (value, key) if isinstance(value, int) else (key, value)
        if isinstance(number, bool) or not isinstance(name, str) or not re.fullmatch(r"[0-9]{1,3}", str(number)):
            raise UserError(where, f"label {key!r}: {value!r}"[:200], wanted)
        if int(number) in numbered:
            raise UserError(where, f"label {number} twice", wanted)
        numbered[int(number)] = name
    if sorted(numbered) != list(range(len(numbered))):
        raise UserError(where, f"labels {', '.join(map(str, sorted(numbered)))}"[:200], wanted)
    return named_labels([BACKGROUND, *(numbered[number] for number in range(1, len(numbered)))], where)


def _names_beside(folder: Path, split: str | None) -> tuple[tuple[str, ...] | None, list[Path]]:
    for file in (folder / "names.json", *([folder.parent / "names.json"] if split else [])):
        if file.is_file():
            said = _json(file)
            if not isinstance(said, list) or not all(isinstance(name, str) for name in said):
                raise UserError(str(file), repr(said)[:100], 'a list such as ["background", "liver"]')
            return named_labels(said, str(file)), [file]
    return None, []


def _json(file: Path) -> Any:
    try:
        return json.loads(_text(file, "JSON"))
    except (ValueError, RecursionError) as error:
        raise UserError(str(file), f"cannot be read ({error})"[:300], "JSON") from None


def _text(file: Path, expected: str) -> str:
    """Read a file of at most `TEXT_LIMIT` bytes."""
    try:
        if (length := folders.size_of(file, str(file), expected)) > TEXT_LIMIT:
            raise UserError(str(file), f"{length} bytes", f"at most {TEXT_LIMIT}")
        return file.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(str(file), "not UTF-8", expected, "save it as UTF-8") from None
    except (OSError, ValueError) as error:
        raise UserError(str(file), f"cannot be read ({getattr(error, 'strerror', None) or error})", expected) from None


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(str(folder), f"cannot be read ({error.strerror or error})", "a folder of volumes") from None


def _folders(folder: Path) -> list[Path]:
    return [folder / entry.name for entry in _entries(folder) if not entry.name.startswith(".") and entry.is_dir()]


def _volumes(folder: Path) -> list[Path]:
    """List NIfTI files in a folder itself, without hidden ones."""
    entries = _entries(folder) if folder.is_dir() else []
    return [folder / e.name for e in entries if not e.name.startswith(".") and is_nifti(e.name) and e.is_file()]


def _others(root: Path, folders: Iterable[Path]) -> list[str]:
    """Return sentences about what else lies in the folders of images and labels."""
    said = []
    for folder in sorted(folders):
        if not folder.is_dir() or folder == root:
            continue
        for entry in _entries(folder):
            name = _below(root, folder / entry.name)
            if entry.name.startswith("."):
                said.append(f"{name}: hidden")
            elif entry.is_dir() and not is_nifti(entry.name):
                said += _strays(folder / entry.name, set(), "in a folder below", root)
            elif not entry.is_file():
                nowhere = entry.is_symlink() and not entry.is_dir()
                said.append(f"{name}: leads nowhere" if nowhere else f"{name}: not a file")
            elif not is_nifti(entry.name):
                said.append(f"{name}: not called .nii.gz or .nii")
    return said


def _strays(folder: Path, kept: set[Path], why: str, root: Path | None = None) -> list[str]:
    """Return sentences about NIfTI files in a folder and those below, except in `kept` ones."""
    root = root or folder
    found: list[str] = []
    looked_at = 0

    def walk(place: Path, depth: int) -> None:
        nonlocal looked_at
        for entry in _entries(place):
            looked_at += 1
            if looked_at > _LOOKED_AT or entry.name.startswith("."):
                continue
            here = place / entry.name
            if entry.is_dir(follow_symlinks=False):
                if here not in kept and depth < _DEPTH:
                    walk(here, depth + 1)
            elif place not in kept and is_nifti(entry.name):
                found.append(f"{_below(root, here)}: {why}")

    walk(folder, 0)
    return found


def _joined(cases: list[Case], file: Path) -> tuple[list[Case], list[str]]:
    """Join the cases with the rows of their patients; also a sentence about patients that have none."""
    columns, rows = _table(file)
    loose: dict[str, list[str]] = {}
    for name in rows:
        loose.setdefault(_loosely(name), []).append(name)
    joined, without = [], []
    for case in cases:
        # A spreadsheet makes 7 of 007; where only one row can be meant, it is taken.
        also = loose.get(_loosely(case.patient), [])
        name = case.patient if case.patient in rows else also[0] if len(also) == 1 else None
        if name is None:
            without.append(case.patient)
        clinical = rows[name] if name is not None else dict.fromkeys(columns)
        joined.append(Case(case.id, case.patient, case.image, case.label, clinical))
    if len(without) == len(cases):
        found = f"no row of any of the {len(cases)} patients ({few(without)}), but of {few(rows)}"
        raise UserError(str(file), found, f"patients in a column {', '.join(PATIENT_COLUMNS[:2])} or the first")
    absent = sorted(set(without))
    return joined, [f"{file.name}: no row of {len(absent)} patients: {few(absent)}"] if absent else []


def _loosely(name: str) -> str:
    name = name.strip().casefold()
    if name.endswith(".0") and name[:-2].isdigit():
        name = name[:-2]
    return name.lstrip("0") or "0" if name.isdigit() else name


def _table(file: Path) -> tuple[list[str], dict[str, dict[str, Value]]]:
    """Read a table: its columns without that of the patients, and the row of each patient."""
    if file.suffix.lower() in (".xlsx", ".xls", ".ods"):
        raise UserError(str(file), "a spreadsheet", "a CSV table", "save it as CSV (UTF-8)")
    text = _text(file, "a CSV table of patients")
    comma = max(",;\t", key=text.split("\n", 1)[0].count)
    rows: dict[str, dict[str, Value]] = {}
    try:
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=comma, strict=True)
        header = [name.strip() for name in next(lines, [])]
        if not any(header) or len(set(header)) < len(header) or not all(header):
            raise UserError(f"{file}, line 1", ",".join(header)[:200] or "nothing", "different names of columns")
        key = next((header.index(name) for name in PATIENT_COLUMNS if name in header), 0)
        columns = [name for place, name in enumerate(header) if place != key]
        for line in lines:
            if not any(cell.strip() for cell in line):
                continue
            where = f"{file}, line {lines.line_num}"
            if len(line) != len(header):
                raise UserError(where, f"{len(line)} columns", f"{len(header)}, as in its first line")
            name = line[key].strip()
            if not name or name in rows:
                found = f"a second row of patient {name!r}" if name else f"no {header[key]}"
                raise UserError(where, found[:200], "one row for each patient")
            cells = (cell for place, cell in enumerate(line) if place != key)
            rows[name] = dict(zip(columns, map(_value, cells), strict=True))
    except csv.Error as error:
        raise UserError(str(file), f"cannot be read ({error})", "a CSV table of patients") from None
    if not rows:
        raise UserError(str(file), "no rows", "a row for each patient")
    return columns, rows


def _value(cell: str) -> Value:
    """Read a cell as a number where it is one, None where it says nothing."""
    text = cell.strip()
    if text.lower() in _EMPTY:
        return None
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) and "_" not in text else text


def _below(root: Path, file: Path) -> str:
    return folders.escaped(file.relative_to(root).as_posix())
