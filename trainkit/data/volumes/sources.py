"""Sources of volumes: each layout of folders becomes a list of cases, an image and its label map each.

| layout                                          | splits                                   | names of labels from |
|-------------------------------------------------|------------------------------------------|----------------------|
| `{train,val}/{image,label}/<patient>.nii.gz`    | TOM500's: `#train`, `#val`, any folder   |                      |
| `dataset.json`, `imagesTr`, `labelsTr`          | nnU-Net's, `<id>_0000`, or the           | `dataset.json`       |
|                                                 | Decathlon's; `#test` for `imagesTs`      |                      |
| a folder of images and one of labels            | none                                     | `dataset.json`       |
| files, or one file: to predict for, no labels   | folders                                  |                      |

A case is a file, of several channels where it has a 4th axis; or a file for each channel, numbered at the end of its
name as nnU-Net has it: `case_0001`. Of the folders of images and label maps everything that is not used is named in
`left_out`: whoever imports shows it, since a label map whose image is called otherwise is a case less, and nobody would
notice.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.data import folders, source_splits
from trainkit.data.formats.nifti import is_nifti, stem
from trainkit.data.sources import finding, split_of
from trainkit.data.volumes import label_names
from trainkit.data.volumes.label_names import Classes
from trainkit.errors import UserError, few, number_of

IMAGES = ("image", "images", "imagestr")
"""Names of the folder of images, in lower case."""

LABELS = ("label", "labels", "labelstr", "mask", "masks")
"""Names of the folder of label maps."""

FILES = "volumes (.nii.gz or .nii)"
"""Files to predict for, in words."""

DICOM = "convert DICOM with dcm2niix, which writes NIfTI"
"""What to do where there are no volumes."""

_LOOKED_AT = 5000
_JSON_LIMIT = 64 << 20


@dataclass(frozen=True)
class Case:
    """One volume of a source."""

    id: str
    """The name of its image without folder and suffix; no two of a source are equal."""
    patient: str
    images: tuple[Path, ...]
    """Its file, or one for each channel that is there, in their order."""
    label: Path | None
    """None where only images are there."""

    @property
    def image(self) -> Path:
        """Its first file."""
        return self.images[0]


@dataclass(frozen=True)
class VolumeSource:
    """A set of volumes in some layout."""

    kind: str
    """The layout, in words."""
    where: str
    cases: tuple[Case, ...]
    """In the order of their ids."""
    classes: Classes
    """Labels of its label maps, where the source says so."""
    left_out: tuple[str, ...]
    """Sentences about what is there and not used."""
    files: tuple[Path, ...]
    """All files that it is made of, for noticing changes."""
    channels: tuple[str, ...] = ()
    """Names of the channels; empty where there is one, or files of 4 axes whose channels nothing names."""

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of labels 0, 1, ..., where the source says so; the first is `background`."""
        return self.classes.names


@dataclass
class _Found:
    """Files of a layout, and what `dataset.json` says of them."""

    kind: str
    root: Path
    images: list[Path]
    labels: dict[str, Path] = field(default_factory=dict)
    """Label maps by the ids of their cases."""
    folders: tuple[Path, ...] = ()
    """Folders of images and label maps."""
    numbered: bool = False
    """True where images are called `<id>_0000`, whatever label maps are called."""
    classes: Classes = field(default_factory=Classes)
    channels: tuple[str, ...] = ()
    json: tuple[Path, ...] = ()
    """The file `dataset.json`, where there is one."""
    left_out: dict[str, list[Path]] = field(default_factory=dict)
    """Files that are not used, by what they are."""


def open_volumes(
    path: Path | str, *, patient: str | None = None, labelled: bool = True, channels: Sequence[str] = ()
) -> VolumeSource:
    """Open the volumes at `path`, whatever the layout, as `path#split` where there are splits. Reads no voxels.

    `patient` is a regular expression with one part in parentheses that finds the patient in the id of a case; without
    it every case is a patient of its own. With `labelled` only cases with a label map are taken; without, all images,
    of a plain folder and a single file too. `channels` are the names that they must have, in order, if they have any.

    Raises UserError when there is nothing, no such split, two files of one id, or a damaged `dataset.json`.
    """
    find = None if patient is None else finding(patient, "patient")
    try:
        place, split = split_of(path)
        where = f"{place}#{split}" if split else str(place)
        found = _single(place, split, labelled) if place.is_file() else _in_folder(place, split, labelled, where)
    except OSError as error:  # a name too long, a folder that may not be entered
        raise UserError(str(path)[:300], f"cannot be read ({error.strerror or error})", "a folder of volumes") from None
    if found.channels and channels and not automatic(channels) and found.channels != tuple(channels):
        remedy = "give them the same names in dataset.json"
        raise UserError(where, f"channels {few(found.channels, 20)}", few(channels, 20), remedy)
    found.channels = found.channels or tuple(channels)
    images = _grouped(found, labelled, where)
    used = {file for files in images.values() for file in files}
    found.left_out |= {
        "images without a label map": [file for file in found.images if file not in used],
        "masks without an image": [file for id, file in found.labels.items() if id not in images],
        "files of another kind": [file for folder in found.folders for file in _others(folder)],
    }
    named = {what: [_below(found.root, file) for file in some] for what, some in found.left_out.items()}
    left_out = tuple(f"{number_of(len(names), what)}: {few(names)}" for what, names in named.items() if names)
    if not images:
        wanted = "images with label maps of the same names" if labelled else FILES
        said = f"no {'labelled ' if labelled else ''}volumes" + (f"; {'; '.join(left_out)}" if left_out else "")
        raise UserError(where, said, wanted, DICOM)
    folders.check_names(where, images)
    cases = tuple(
        Case(id, find(id, str(files[0])) if find else id, files, found.labels.get(id))
        for id, files in sorted(images.items())
    )
    files = (*found.json, *(file for case in cases for file in (*case.images, case.label) if file is not None))
    return VolumeSource(found.kind, where, cases, found.classes, left_out, files, found.channels)


def numbered(count: int) -> tuple[str, ...]:
    """Name channels that nothing names; a single one has no name."""
    return tuple(f"channel {place}" for place in range(count)) if count > 1 else ()


def automatic(names: Sequence[str]) -> bool:
    """Return whether names are those of `numbered`, or none."""
    return tuple(names) == numbered(len(names))


def a_volume(path: Path | str) -> Path | None:
    """Find the first NIfTI file at `path` (or `path#split`), itself or in folders up to three levels below it."""
    folder, _ = split_of(path)
    if not folder.is_dir():
        return folder if is_nifti(folder) and folder.is_file() else None
    looked_at = 0
    for below, inner, files in folders.walk(folder):
        if found := next(filter(is_nifti, files), None):
            return folder / below / found
        looked_at += len(files) + len(inner)
        if looked_at > _LOOKED_AT:  # a folder of something else may hold a million files
            break
        if len(Path(below).parts) >= 3:
            inner.clear()
    return None


def _single(path: Path, split: str | None, labelled: bool) -> _Found:
    """Return the one volume that a file is. Raises UserError for another file, and where label maps are wanted."""
    if split is not None or not is_nifti(path):
        raise UserError(str(path), "a file of unknown kind" if split is None else "a file has no splits", FILES, DICOM)
    if labelled:
        raise UserError(str(path), "a single volume, without a label map", "a folder of images and one of labels")
    return _Found("file", path.parent, [path])


def _in_folder(place: Path, split: str | None, labelled: bool, where: str) -> _Found:
    """Find the cases of a folder, or of a split of it. Raises UserError where there is no layout that is known."""
    if not place.is_dir():
        raise UserError(str(place), "does not exist", "a folder of volumes")
    root, test = place, False
    if split is not None and ((place / split).is_dir() or not (place / "dataset.json").is_file()):
        _, root = source_splits.choose(folders.folders_in(place), split, str(place))
    elif (place / "dataset.json").is_file():
        test = source_splits.choose({"train": False, "test": True}, split, str(place))[1]
    words = (("imagests",), ("labelsts",)) if test else (IMAGES, LABELS)
    images, labels = (_one_of(root, some) for some in words)
    plain = images is None and not labelled and not test
    if (images is None and not (plain and _volumes(root))) or (labelled and labels is None):
        raise _unknown(root, split, labelled, where)
    found = _Found("pair of folders" if labels else "folder of volumes", root, _volumes(images or root))
    found.folders = tuple(folder for folder in (images or root, labels) if folder is not None)
    for file in _volumes(labels) if labels is not None else ():
        if (other := found.labels.setdefault(stem(file), file)) is not file:
            said = f"two label maps of the id {stem(file)!r}: {file.name} and {other.name}"
            raise UserError(str(labels), said, "one")
    if (file := root / "dataset.json").is_file() and not plain:
        _describe(found, file)
    return found


def _unknown(root: Path, split: str | None, labelled: bool, where: str) -> UserError:
    """Return the error about a folder whose layout is not known."""
    splits = [] if split else [name for name, inner in folders.folders_in(root).items() if _one_of(inner, IMAGES)]
    if splits:
        either = " or ".join(f"{root}#{name}" for name in splits)
        return UserError(where, f"holds the splits {', '.join(splits)}", "one of them", f"name {either}")
    there = few(folders.folders_in(root))
    said = "no volumes in a layout that is known" + (f", in the folders {there}" if there else "")
    wanted = "a folder `image` and a folder `label`, with dataset.json or without"
    return UserError(where, said, wanted if labelled else f"{wanted}, or {FILES}", DICOM)


def _one_of(root: Path, words: Collection[str]) -> Path | None:
    """Return the folder in a folder that is called by one of the words. Raises UserError for several."""
    found = [inner for name, inner in folders.folders_in(root).items() if name.lower() in words]
    if len(found) > 1:
        raise UserError(str(root), f"folders {', '.join(inner.name for inner in found)}", "one of them")
    return found[0] if found else None


def _volumes(folder: Path) -> list[Path]:
    """List NIfTI files in a folder itself, without hidden ones."""
    return [folder / name for name in next(folders.walk(folder))[2] if is_nifti(name) and (folder / name).is_file()]


def _others(folder: Path) -> list[Path]:
    """List what else is in a folder."""
    volumes = {*_volumes(folder), folder / "dataset.json"}
    return [file for file in folders.visible(folder.iterdir()) if file not in volumes]


def _describe(found: _Found, file: Path) -> None:
    """Take over what `dataset.json` says of labels and channels."""
    said = folders.read_json(file, _JSON_LIMIT, "an object with `labels`", dict)
    if isinstance(said.get("dataset"), dict):
        remedy = "link them to imagesTr/<case>_0000.nii.gz and labelsTr/<case>.nii.gz, or list them in `training`"
        found_ = "the key `dataset`, which lists the files of each case"
        raise UserError(str(file), found_, "files in imagesTr and labelsTr", remedy)
    found.kind, found.json, found.numbered = "pair of folders with dataset.json", (file,), True
    found.classes = label_names.of_json(said.get("labels"), str(file))
    names = said.get("channel_names", said.get("modality"))
    if isinstance(names, dict) and len(names) > 1:
        called = [str(names.get(str(place), "")).strip() for place in range(len(names))]
        if not all(called):
            raise UserError(str(file), f"channels {names!r}"[:200], 'names such as {"0": "T1", "1": "FLAIR"}')
        # The same word twice, as in ["CT", "CT"], is told apart by its place.
        repeated = len(set(called)) < len(called)
        found.channels = tuple(f"{name} {place}" if repeated else name for place, name in enumerate(called))


def _grouped(found: _Found, labelled: bool, where: str) -> dict[str, tuple[Path, ...]]:
    """Return the files of each case, in the order of the channels, which are numbered where nothing names them.

    Four digits at the end of a name are a channel where a label map is called without them, or in nnU-Net's layout.
    Raises UserError for two images of one channel, and a number beyond the names.
    """
    by_id: dict[str, dict[int, Path]] = {}
    several = found.numbered or (not found.labels and len(found.channels) > 1)
    for file in found.images:
        id, place = stem(file), 0
        number = re.fullmatch(r"(.+)_(\d{4})", id)
        if number and id not in found.labels and (several or number[1] in found.labels):
            id, place = number[1], int(number[2])
        if labelled and id not in found.labels:
            continue
        if (other := by_id.setdefault(id, {}).setdefault(place, file)) is not file:
            said = f"{file.name} and {other.name}" if file != other else f"{file.name} twice"
            raise UserError(where, f"two images of the id {id!r}: {said}"[:300], "one")
    most = max((place for files in by_id.values() for place in files), default=0)
    # A case without one of them has too few, which its number of channels tells.
    found.channels = found.channels or numbered(most + 1)
    if most and most >= len(found.channels):
        expected = f"{len(found.channels)} channels: {few(found.channels)}"
        raise UserError(where, f"files numbered up to {most}", expected)
    return {id: tuple(files[place] for place in sorted(files)) for id, files in by_id.items()}


def _below(root: Path, file: Path) -> str:
    return folders.escaped(file.relative_to(root).as_posix())
