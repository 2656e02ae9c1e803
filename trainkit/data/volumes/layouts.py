"""Layouts of folders of volumes: which files are the image and the label map of each case. Reads no voxels."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from trainkit.data import folders, source_splits
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

DICOM = "convert DICOM with dcm2niix, which writes NIfTI"
"""What to do where there are no volumes."""

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


def find(path: Path, split: str | None, asked: Asked) -> Found:
    """Find the cases of a folder, or of a split of it, or the one that a file is.

    Raises UserError where there is nothing, or no layout that is known.
    """
    if not path.exists():
        raise UserError(str(path), "does not exist", "a folder of volumes")
    if path.is_file():
        return _single(path, split, asked.labelled)
    if split is not None and (path / split / "dataset.json").is_file():
        return _decathlon(path / split, None, asked)
    if (path / "dataset.json").is_file() and not (split is not None and (path / split).is_dir()):
        return _decathlon(path, split, asked)
    folder, where = path, str(path)
    if split is not None:
        _, folder = source_splits.choose(folders.folders_in(path), split, where)
        where = f"{path}#{split}"
    if (pair := _pair(folder, asked.labelled)) is not None:
        found = _paired(folder, *pair, asked)
        found.classes, found.made_of = _names_beside(folder, split)
        return found
    if not asked.labelled and (files := volumes_in(folder)):
        found = Found("folder of volumes")
        _group(found, folder, files, {}, asked, len(asked.channels) > 1)
        found.left_out += _unused(folder, (), files, "in a folder below")
        return found
    if splits := splits_below(path) if split is None else []:
        either = " or ".join(f"{path}#{name}" for name in splits)
        raise UserError(str(path), f"holds the splits {', '.join(splits)}", "one of them", f"name {either}")
    wanted = "a folder `image` and a folder `label`, or dataset.json"
    there = few(folders.folders_in(folder))
    said = "no volumes in a layout that is known" + (f", in the folders {there}" if there else "")
    raise UserError(where, said, wanted if asked.labelled else f"{wanted}, or {FILES}", DICOM)


def splits_below(root: Path) -> list[str]:
    """Return the names of the folders in a folder that are sets of volumes themselves: `train` and `val` of TOM500."""
    return [name for name, inner in folders.folders_in(root).items() if _pair(inner, labelled=True) is not None]


def volumes_in(folder: Path) -> list[Path]:
    """List NIfTI files in a folder itself, without hidden ones."""
    names = next(folders.walk(folder))[2] if folder.is_dir() else []
    return [folder / name for name in names if is_nifti(name) and (folder / name).is_file()]


def _single(path: Path, split: str | None, labelled: bool) -> Found:
    """Return the one volume that a file is. Raises UserError for another file, and where label maps are wanted."""
    if split is not None or not is_nifti(path):
        raise UserError(str(path), "a file of unknown kind" if split is None else "a file has no splits", FILES, DICOM)
    if labelled:
        raise UserError(str(path), "a single volume, without a label map", "a folder of images and one of labels")
    return Found("file", {stem(path): ((path,), None)})


def _pair(folder: Path, labelled: bool) -> tuple[Path, Path | None] | None:
    """Find the folders of images and of labels in a folder."""
    below = folders.folders_in(folder).values()
    chosen: list[Path | None] = []
    for words in (IMAGE_FOLDERS, LABEL_FOLDERS):
        some = [inner for inner in below if inner.name.lower() in words]
        if len(some) > 1:
            raise UserError(str(folder), f"folders {', '.join(inner.name for inner in some)}", "one of them")
        chosen.append(some[0] if some else None)
    images, labels = chosen
    if images is None or (labels is None and labelled):
        return None
    return images, labels


def _paired(
    folder: Path,
    images: Path,
    labels: Path | None,
    asked: Asked,
    *,
    numbers: bool = False,
    names: Sequence[str] = (),
    skipped: Collection[str] = (),
) -> Found:
    """Pair images and label maps of the same names.

    With `numbers` images are called `<id>_0000`, as nnU-Net has it, and `names` are those of the channels. `skipped`
    are names of folders of another split.
    """
    found = Found("pair of folders" if labels is not None else "folder of images")
    files, maps = volumes_in(images), volumes_in(labels) if labels is not None else []
    by_id: dict[str, Path] = {}
    for file in maps:
        if (other := by_id.setdefault(stem(file), file)) is not file:
            said = f"two label maps of the id {stem(file)!r}: {file.name} and {other.name}"
            raise UserError(str(labels), said, "one")
    _group(found, folder, files, by_id, asked, numbers or (not by_id and len(asked.channels) > 1), names)
    own = [images] if labels is None else [images, labels]
    elsewhere = f"not in {' or '.join(place.name for place in own)}"
    found.left_out += _unused(folder, own, [*files, *maps], elsewhere, skipped)
    return found


def _group(
    found: Found,
    folder: Path,
    files: Sequence[Path],
    labels: Mapping[str, Path],
    asked: Asked,
    numbers: bool,
    names: Sequence[str] = (),
) -> None:
    """Take over the images of the cases, with the label maps that there are."""
    parts = [(*channels.parted(stem(file), labels, numbers), file) for file in files]
    used = [part for part in parts if not asked.labelled or part[0] in labels]
    grouped = channels.grouped(used, str(folder), names or asked.channels)
    found.pairs = {id: (images, labels.get(id)) for id, images in grouped.images.items()}
    found.channels, found.incomplete = grouped.names, grouped.incomplete
    alone = [file for id, _, file in parts if asked.labelled and id not in labels]
    found.left_out += [f"{_below(folder, file)}: an image without a label map" for file in alone]
    named = {id for id, _, _ in parts}
    alone = [file for id, file in labels.items() if id not in named]
    found.left_out += [f"{_below(folder, file)}: a label map without an image" for file in alone]


def _decathlon(root: Path, split: str | None, asked: Asked) -> Found:
    """Read the layout of the Medical Segmentation Decathlon, and nnU-Net's, whose `dataset.json` lists no files."""
    file = root / "dataset.json"
    name, ending = source_splits.choose({"train": "Tr", "test": "Ts"}, split, str(root))
    said, test = _dataset_json(file), name == "test"
    classes, listed = label_names.of_json(said.get("labels"), str(file)), said.get("test" if test else "training")
    called = _channels_of(said, str(file))
    other = "Tr" if test else "Ts"
    images, labels, skipped = root / f"images{ending}", root / f"labels{ending}", (f"images{other}", f"labels{other}")
    if test and asked.labelled and not labels.is_dir():
        raise UserError(f"{root}#{split}", "its images have no label maps", "a split with label maps, such as #train")
    if isinstance(listed, list) and not (test and labels.is_dir()):
        found = Found("Decathlon", channels=called)
        _list(found, root, listed, f"{file}, {'test' if test else 'training'}", asked, [images, labels], skipped)
    elif images.is_dir():
        there = labels if labels.is_dir() else None
        found = _paired(root, images, there, asked, numbers=True, names=called, skipped=skipped)
        found.kind, found.channels = "nnU-Net", found.channels or called
    else:
        raise UserError(str(root), f"no folder {images.name}", "the images that dataset.json lists")
    found.classes, found.made_of = classes, [file]
    return found


def _list(
    found: Found,
    root: Path,
    listed: Sequence[Any],
    where: str,
    asked: Asked,
    own: Sequence[Path],
    skipped: Collection[str],
) -> None:
    """Take over the cases that `dataset.json` lists, of files in the folders `own` or others."""
    named: set[Path] = set()
    for number, entry in enumerate(listed):
        images, label = _listed(root, entry, f"{where} {number}")
        named |= {*images} if label is None else {*images, label}
        absent = [image for image in images if not image.is_file()]
        labelled = label is not None and label.is_file()
        id = channels.parted(stem(images[0]), (), numbers=len(images) > 1)[0]
        if absent:
            text = "is listed in dataset.json but does not exist"
            found.left_out += [f"{_below(root, image)}: {text}" for image in absent]
            found.left_out += [f"{_below(root, label)}: a label map without an image"] if label and labelled else []
        elif asked.labelled and not labelled:
            found.left_out.append(f"{_below(root, images[0])}: an image without a label map")
        elif id in found.pairs:
            first, other = images[0], found.pairs[id][0][0]
            said = f"{first.name} and {other.name}" if first != other else f"{first.name} twice"
            raise UserError(f"{where} {number}", f"two images of the id {id!r}: {said}"[:300], "one")
        else:
            found.pairs[id] = (images, label if labelled else None)
    own = [place for place in {*own, *(file.parent for file in named)} if place != root]
    found.left_out += _unused(root, own, named, "is not listed in dataset.json", skipped)


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


def _unused(
    root: Path, own: Collection[Path], named: Collection[Path], elsewhere: str, skipped: Collection[str] = ()
) -> list[str]:
    """Return sentences about what lies in a folder, or up to four levels below it, and is not used.

    `own` are the folders of images and label maps, in which everything is named; elsewhere volumes alone are. `named`
    are files that are used, or named already; `skipped` names of folders of another split.
    """
    said: list[str] = []
    looked_at = 0
    named = {*named}
    for below, inner, names in folders.walk(root):
        place = root / below
        looked_at += 0 if place in own else len(inner) + len(names)
        for name in (*names, *filter(is_nifti, inner)):
            file, why = place / name, elsewhere
            if file in named or not (place in own or is_nifti(name)):
                continue
            if place in own:
                why = _no_volume(file) or why
            elif any(place.is_relative_to(folder) for folder in own):
                why = "in a folder below"
            said.append(f"{_below(root, file)}: {why}")
        ends = looked_at > _LOOKED_AT or len(Path(below).parts) >= _DEPTH
        entered = [name for name in inner if name not in skipped and not is_nifti(name)]
        inner[:] = [name for name in entered if place / name in own or not (ends or (place / name).is_symlink())]
    return said


def _no_volume(file: Path) -> str:
    """Return why a file in a folder of volumes is none; nothing for a volume."""
    if not file.is_file():
        return "leads nowhere" if file.is_symlink() and not file.is_dir() else "not a file"
    return "" if is_nifti(file) else "without the suffix .nii.gz or .nii"


def _below(root: Path, file: Path) -> str:
    return folders.escaped(file.relative_to(root).as_posix())
