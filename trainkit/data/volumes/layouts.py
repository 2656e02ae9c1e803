"""Layouts of folders of volumes: which files are the image and the label map of each case. Reads no voxels."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from trainkit.data import folders
from trainkit.data.folders import SPLIT_NAMES, is_hidden
from trainkit.data.formats.nifti import is_nifti, stem
from trainkit.data.volumes import channels, label_names
from trainkit.data.volumes.label_names import Classes
from trainkit.errors import UserError, few

IMAGE_FOLDERS = ("image", "images", "imagestr")
"""Names of the folder of images, in lower case."""

LABEL_FOLDERS = ("label", "labels", "labelstr", "mask", "masks")
"""Names of the folder of label maps."""

FILES = "volumes (.nii.gz or .nii)"
"""Files to predict for, in words."""

_DEPTH = 4
_LOOKED_AT = 20_000
_JSON_LIMIT = 64 << 20


@dataclass
class Found:
    """The cases of a layout."""

    kind: str
    pairs: dict[str, tuple[tuple[Path, ...], Path | None]] = field(default_factory=dict)
    classes: Classes = field(default_factory=Classes)
    channels: tuple[str, ...] = ()
    incomplete: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    made_of: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class Asked:
    """Request for cases."""

    labelled: bool
    """Cases with label maps alone."""
    channels: tuple[str, ...]
    """Names that were asked for; none: those that are there."""


def single(path: Path, split: str | None, labelled: bool) -> Found:
    """Return the one volume that a file is. Raises UserError for another file, and where label maps are wanted."""
    if split is not None or not is_nifti(path):
        refuse_dicom(path)
        raise UserError(str(path), "a file of unknown kind" if split is None else "a file has no splits", FILES)
    if labelled:
        raise UserError(str(path), "a single volume, without a label map", "a folder of images and one of labels")
    return Found("file", {stem(path): ((path,), None)})


def root_of(folder: Path) -> Path:
    """Return the folder of the set that `folder` is meant as: the one above of `imagesTr`, the only one below, or it.

    Those of splits such as `train` are no sets by themselves.
    """
    if folder.name.lower() in (*IMAGE_FOLDERS, *LABEL_FOLDERS, "imagests", "labelsts") and _is_set(folder.parent):
        return folder.parent
    place = folder
    for _ in range(2):
        if _is_set(place):
            return place
        inner = _folders(place)
        sets = [one for one in inner if _is_set(one)]
        if len(sets) == 1 and sets[0].name.lower() not in SPLIT_NAMES and not volumes_in(place):
            return sets[0]
        if len(inner) != 1 or sets or volumes_in(place):
            break
        place = inner[0]
    return folder


def _is_set(folder: Path) -> bool:
    return (folder / "dataset.json").is_file() or _pair(folder, labelled=True) is not None


def layout(root: Path, split: str | None, asked: Asked, where: str) -> Found:
    """Find the cases of a folder, or of a split of it. Raises UserError where there is no layout that is known."""
    if (root / "dataset.json").is_file() and not (split is not None and (root / split).is_dir()):
        return _decathlon(root, split, asked)
    folder = root
    if split is not None:
        folder = root / split
        if not folder.is_dir():
            splits = ", ".join(f"#{name}" for name in splits_below(root))
            raise UserError(where, "no such split", f"one of: {splits}" if splits else f"the folder {folder}")
    if (pair := _pair(folder, asked.labelled)) is not None:
        images, labels = pair
        found = _paired(folder, images, labels, asked)
        found.classes, found.made_of = _names_beside(folder, split)
        return found
    if not asked.labelled and (files := volumes_in(folder)):
        found = Found("folder of volumes")
        found.left_out += _strays(folder, {folder}, "in a folder below")
        parts = [(*channels.parted(stem(file), (), loose=False, numbers=len(asked.channels) > 1,
                                   wanted=asked.channels), file) for file in files]  # fmt: skip
        return _filled(found, folder, channels.grouped(parts, str(folder), wanted=asked.channels), {})
    if splits := splits_below(root) if split is None else []:
        either = " or ".join(f"{root}#{name}" for name in splits)
        raise UserError(str(root), f"holds the splits {', '.join(splits)}", "one of them", f"name {either}")
    refuse_dicom(folder)
    wanted = "a folder `image` and a folder `label`, or dataset.json"
    there = few(entry.name for entry in _folders(folder))
    found = "no volumes in a layout that is known" + (f", in the folders {there}" if there else "")
    raise UserError(where, found, wanted if asked.labelled else f"{wanted}, or {FILES}")


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


def _paired(
    folder: Path, images: Path, labels: Path | None, asked: Asked, *, numbers: bool = False, names: Sequence[str] = ()
) -> Found:
    """Pair images and labels of the same names, or, where no two are called alike, of the same but for `_seg` and such.

    With `numbers` images are called `<id>_0000`, as nnU-Net has it, and `names` are those of the channels.
    """
    found = Found("pair of folders" if labels is not None else "folder of images")
    files, maps = volumes_in(images), volumes_in(labels) if labels is not None else []
    loose = not {stem(file) for file in files} & {stem(file) for file in maps}
    by_id: dict[str, Path] = {}
    for file in maps:
        tail = channels.LABEL_TAIL.fullmatch(stem(file)) if loose else None
        id = tail[1] if tail else stem(file)
        if id in by_id:
            raise UserError(str(labels), f"two label maps of the id {id!r}: {file.name} and {by_id[id].name}", "one")
        by_id[id] = file
    numbers = numbers or (not by_id and len(asked.channels) > 1)
    parts = [
        (*channels.parted(stem(file), by_id, loose=loose, numbers=numbers, wanted=asked.channels), file)
        for file in files
    ]
    used = [part for part in parts if not asked.labelled or part[0] in by_id]
    named = {id for id, _, _ in parts}
    grouped = channels.grouped(used, str(images), names=names, wanted=asked.channels)
    for id, _, file in parts:
        if asked.labelled and id not in by_id:
            found.left_out.append(f"{_below(folder, file)}: an image without a label map")
    _filled(found, folder, grouped, by_id)
    found.left_out += [f"{_below(folder, by_id[id])}: a label map without an image" for id in by_id if id not in named]
    kept = {images} | ({labels} if labels is not None else set())
    found.left_out += _others(folder, kept)
    found.left_out += _strays(folder, kept, f"not in {images.name}" + (f" or {labels.name}" if labels else ""))
    return found


def _filled(found: Found, folder: Path, grouped: channels.Grouped, labels: Mapping[str, Path]) -> Found:
    """Take over the images of the cases, with the label maps that there are."""
    for id, files in grouped.images.items():
        found.pairs[id] = (files, labels.get(id))
    found.channels = grouped.names
    found.incomplete += grouped.incomplete.values()
    found.left_out += [f"{_below(folder, file)}: {why}" for file, why in grouped.unused]
    return found


def refuse_dicom(place: Path) -> None:
    """Raise UserError where a path is a file of DICOM, or a folder in which some lie, however deep."""
    below = (Path(place, folder, name) for folder, _, names in folders.walk(place) for name in names)
    for file in [place] if place.is_file() else itertools.islice(below, _LOOKED_AT):
        if is_dicom(file):
            raise UserError(str(file), "a file of DICOM", FILES, "convert DICOM with dcm2niix, which writes NIfTI")


def is_dicom(file: Path) -> bool:
    """Return whether a file is of DICOM: by its suffix; where that is none or a number, by the mark in the file."""
    suffix = file.suffix.lower()
    if suffix in (".dcm", ".dicom", ".ima"):
        return True
    if (suffix and not suffix[1:].isdigit()) or not file.is_file():
        return False
    try:
        with file.open("rb") as stream:
            return stream.read(132)[128:] == b"DICM"
    except OSError:
        return False


def _put(found: Found, id: str, images: tuple[Path, ...], label: Path | None, where: str) -> None:
    if id in found.pairs:
        image, other = images[0], found.pairs[id][0][0]
        said = f"{image.name} and {other.name}" if image != other else f"{image.name} twice"
        raise UserError(where, f"two images of the id {id!r}: {said}"[:300], "one")
    found.pairs[id] = (images, label)


def _decathlon(root: Path, split: str | None, asked: Asked) -> Found:
    """Read the layout of the Medical Segmentation Decathlon, and nnU-Net's, whose `dataset.json` lists no files."""
    file = root / "dataset.json"
    said, test = _dataset_json(file), split in ("test", "testing")
    classes, listed = label_names.of_json(said.get("labels"), str(file)), said.get("test" if test else "training")
    called = _channels_of(said, str(file))
    if split is not None and not test and split not in ("train", "training"):
        raise UserError(f"{root}#{split}", "no such split", "one of: #train, #test")
    ending = "Ts" if test else "Tr"
    images, labels = root / f"images{ending}", root / f"labels{ending}"
    if test and asked.labelled and not labels.is_dir():
        raise UserError(f"{root}#{split}", "its images have no label maps", "a split with label maps, such as #train")
    if not isinstance(listed, list) or (test and labels.is_dir()):
        if not images.is_dir():
            raise UserError(str(root), f"no folder {images.name}", "the images that dataset.json lists")
        found = _paired(root, images, labels if labels.is_dir() else None, asked, numbers=True, names=called)
        found.left_out = [text for text in found.left_out if not text.startswith(_of_other_split(ending))]
        found.kind, found.classes, found.made_of = "nnU-Net", classes, [file]
        found.channels = found.channels or called
        return found
    found = Found("Decathlon", classes=classes, channels=called, made_of=[file])
    kept = {images, labels}
    seen: set[Path] = set()
    for number, entry in enumerate(listed):
        where = f"{file}, {'test' if test else 'training'} {number}"
        images, label = _listed(root, entry, where)
        image, there = images[0], all(one.is_file() for one in images)
        kept |= {place.parent for place in (*images, label) if place is not None}
        seen |= {place for place in (*images, label) if place is not None}
        if not there:
            text = "is listed in dataset.json but does not exist"
            found.left_out += [f"{_below(root, one)}: {text}" for one in images if not one.is_file()]
        elif asked.labelled and (label is None or not label.is_file()):
            found.left_out.append(f"{_below(root, image)}: an image without a label map")
        else:
            labelled = label if label is not None and label.is_file() else None
            _put(
                found,
                channels.parted(stem(image), (), loose=False, numbers=len(images) > 1)[0],
                images,
                labelled,
                where,
            )
        if label is not None and label.is_file() and not there:
            found.left_out.append(f"{_below(root, label)}: a label map without an image")
    for folder in sorted(kept):
        for stray in volumes_in(folder) if folder.is_dir() and folder != root else []:
            if stray not in seen:
                found.left_out.append(f"{_below(root, stray)}: is not listed in dataset.json")
    found.left_out += _others(root, kept)
    strays = _strays(root, kept, "is not listed in dataset.json")
    found.left_out += [text for text in strays if not text.startswith(_of_other_split(ending))]
    return found


def _dataset_json(file: Path) -> dict[str, Any]:
    """Read `dataset.json`. Raises UserError for nnU-Net's lists of files by case, which are not read."""
    said = folders.read_json(file, _JSON_LIMIT, "JSON")
    if not isinstance(said, dict):
        raise UserError(str(file), f"a {type(said).__name__}", "an object with `labels`")
    if isinstance(said.get("dataset"), dict) and not isinstance(said.get("training"), list):
        raise UserError(
            str(file),
            "the key `dataset`, which lists the files of each case",
            "files in imagesTr and labelsTr",
            "link them to imagesTr/<case>_0000.nii.gz and labelsTr/<case>.nii.gz, or list them in `training`",
        )
    return said


def _of_other_split(ending: str) -> tuple[str, str]:
    other = "Tr" if ending == "Ts" else "Ts"
    return f"images{other}/", f"labels{other}/"


def _listed(root: Path, entry: Any, where: str) -> tuple[tuple[Path, ...], Path | None]:
    """Read an entry of `dataset.json`: an image, or one for each channel, and its label map; or an image alone.

    Version 1 of nnU-Net lists `<id>.nii.gz` where the files are `<id>_0000.nii.gz`, `<id>_0001.nii.gz`.
    """
    images, label = (entry.get("image"), entry.get("label")) if isinstance(entry, dict) else (entry, None)
    images = images if isinstance(images, list) and images else [images]
    if not all(isinstance(name, str) for name in images) or not isinstance(label, str | None):
        raise UserError(where, repr(entry)[:200], "paths of one image, or one for each channel, and its label map")
    places: list[Path] = []
    for name in [*images, *([] if label is None else [label])]:
        if ".." in PurePosixPath(name).parts:
            raise UserError(where, repr(name)[:200], f"a path inside {root}")
        places.append(folders.inside(root, name, where))
    labels = [] if label is None else [places.pop()]
    if len(places) == 1 and not places[0].is_file():
        name = stem(places[0])
        own = [places[0].with_name(places[0].name.replace(name, f"{name}_{place:04}", 1)) for place in range(100)]
        places = [file for file in own if file.is_file()] or places
    return tuple(places), labels[0] if labels else None


def _channels_of(said: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Read the names of channels: nnU-Net's `channel_names`, or `modality`; none where there is one."""
    names = said.get("channel_names", said.get("modality"))
    if not isinstance(names, dict) or len(names) < 2:
        return ()
    wanted = 'names of channels such as {"0": "T1", "1": "FLAIR"}'
    if set(names) != {str(place) for place in range(len(names))}:
        raise UserError(where, f"channels {few(names)}", wanted)
    found = tuple(names[str(place)] for place in range(len(names)))
    if not all(isinstance(name, str) and name.strip() for name in found):
        raise UserError(where, f"channels {found!r}"[:200], wanted)
    # The same word twice, as in ["CT", "CT"], is told apart by its place.
    return found if len(set(found)) == len(found) else tuple(f"{name} {place}" for place, name in enumerate(found))


def _names_beside(folder: Path, split: str | None) -> tuple[Classes, list[Path]]:
    for file in (folder / "names.json", *([folder.parent / "names.json"] if split else [])):
        if file.is_file():
            said = folders.read_json(file, _JSON_LIMIT, "JSON")
            if not isinstance(said, list) or not all(isinstance(name, str) for name in said):
                raise UserError(str(file), repr(said)[:100], 'a list such as ["background", "liver"]')
            return label_names.classes_named(said, str(file)), [file]
    return Classes(), []


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(str(folder), f"cannot be read ({error.strerror or error})", "a folder of volumes") from None


def _folders(folder: Path) -> list[Path]:
    return [folder / entry.name for entry in _entries(folder) if not is_hidden(entry.name) and entry.is_dir()]


def volumes_in(folder: Path) -> list[Path]:
    """List NIfTI files in a folder itself, without hidden ones."""
    entries = _entries(folder) if folder.is_dir() else []
    return [folder / e.name for e in entries if not is_hidden(e.name) and is_nifti(e.name) and e.is_file()]


def _others(root: Path, folders: Iterable[Path]) -> list[str]:
    """Return sentences about what else lies in the folders of images and labels."""
    said = []
    for folder in sorted(folders):
        if not folder.is_dir() or folder == root:
            continue
        for entry in _entries(folder):
            name = _below(root, folder / entry.name)
            if is_hidden(entry.name):
                said.append(f"{name}: hidden")
            elif entry.is_dir() and not is_nifti(entry.name):
                said += _strays(folder / entry.name, set(), "in a folder below", root)
            elif not entry.is_file():
                nowhere = entry.is_symlink() and not entry.is_dir()
                said.append(f"{name}: leads nowhere" if nowhere else f"{name}: not a file")
            elif not is_nifti(entry.name):
                said.append(f"{name}: without the suffix .nii.gz or .nii")
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
            if looked_at > _LOOKED_AT or is_hidden(entry.name):
                continue
            here = place / entry.name
            if entry.is_dir(follow_symlinks=False):
                if here not in kept and depth < _DEPTH:
                    walk(here, depth + 1)
            elif place not in kept and is_nifti(entry.name):
                found.append(f"{_below(root, here)}: {why}")

    walk(folder, 0)
    return found


def _below(root: Path, file: Path) -> str:
    return folders.escaped(file.relative_to(root).as_posix())
