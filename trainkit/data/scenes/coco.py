"""Masks of COCO's JSON: outlines of objects as polygons or run lengths, with a category each, become classes.

Classes are the background (0) and the categories in the order of their ids; see `outlines` for what lies on top. A
image without an annotation is all background. Objects marked `iscrowd` enclose more than the objects, and those with
a box and no outline as well: what nothing else covers of them has no class. A category that is only the common
`supercategory` of others, as Roboflow writes one, is no class.

Format: Lin et al., "Microsoft COCO: Common Objects in Context", ECCV 2014, and its API's `mask` for run lengths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.data import folders
from trainkit.data.formats.image_decode import PIXEL_CAP
from trainkit.data.scenes import json_lists, label_maps, outlines
from trainkit.data.scenes.label_maps import Labels
from trainkit.data.scenes.outlines import LENGTH_TEXT, Outline, Painted
from trainkit.errors import UserError, few, number_of
from trainkit.files import Json
from trainkit.interfaces import IGNORED

LIMIT = 512 << 20
"""Largest file, in bytes. `instances_train2017.json` has 448 MB."""

FAR = 1e6
"""Largest coordinate of an outline, in pixels."""

POINTS = 1 << 17
"""Most points of the outline of an object."""

_FEW = 8
"""Pixels of the shorter side up to which coordinates from 0 to 1 may be pixels."""

_LONGEST = 1 << 16
"""Longest side of an image, in pixels."""

_OTHERS = ("captions_", "person_keypoints_", "panoptic_", "image_info_")
"""Begin the names of COCO's files of other things."""

_SPLIT = re.compile(r"(?:.*[_.-])?(train|training|val|valid|validation|dev|test|testing)(?:\d{4})?", re.IGNORECASE)

_BACKGROUND = "background"
"""Class 0 of what no region covers."""

_CALLED_BACKGROUND = frozenset({_BACKGROUND, "_background_", "bg"})

_KEPT = {
    "images": ("id", "file_name", "height", "width"),
    "annotations": ("image_id", "category_id", "iscrowd", "segmentation", "bbox"),
    "categories": ("id", "name", "supercategory"),
}
"""What is read of the entries of each list."""


@dataclass(frozen=True, eq=False)
class CocoMask:
    """The objects of an image, painted when they are read."""

    file: Path
    """The JSON file, which all masks of a set share."""
    where: str
    size: tuple[int, int]
    """Height and width as the file says them."""
    outlines: tuple[Outline, ...]
    empty: int

    def painted(self) -> Painted:
        """Return classes and objects. Raises UserError for run lengths that do not fit the image."""
        return outlines.paint(self.size, self.outlines, self.empty, self.where)


@dataclass(frozen=True)
class Read:
    """The content of a file."""

    masks: dict[str, CocoMask]
    """By the path of the image as the file has it, `/` between its parts."""
    labels: Labels
    left_out: tuple[str, ...]


def find(root: Path) -> dict[str, list[Path]]:
    """Return the files of COCO's form in a folder, its `annotations` and the folders of its splits, by split.

    Files whose names tell no split are under the name of nothing. Raises UserError for one that is too large.
    """
    found: dict[str, list[Path]] = {}
    for folder in (root, *folders.folders_in(root).values()):
        part = _SPLIT.fullmatch(folder.name) if folder != root else None
        if folder != root and part is None and folder.name.lower() not in ("annotations", "labels"):
            continue
        for file in folders.visible(folder.glob("*.json")):
            named = part or _SPLIT.fullmatch(file.stem)
            if not file.name.startswith(_OTHERS) and is_coco(file):
                found.setdefault(named[1].lower() if named else "", []).append(file)
    return {name: [f for f in files if f.name.startswith("instances")] or files for name, files in found.items()}


def is_coco(file: Path) -> bool:
    """Return whether a JSON file names what COCO's has, without parsing it."""
    size = folders.size_of(file, str(file), "COCO's JSON")
    if size > LIMIT:
        raise UserError(str(file), f"{size} bytes", f"at most {LIMIT}: masks in COCO's JSON")
    wanted = [f'"{key}"'.encode() for key in _KEPT]
    try:
        with file.open("rb") as stream:
            before = b""
            while wanted and (block := stream.read(1 << 22)):
                wanted = [word for word in wanted if word not in before + block]
                before = block[-16:]
    except OSError:
        return False
    return not wanted


def read(file: Path) -> Read:
    """Read masks and classes of a file. Decodes no run lengths.

    Raises UserError for what is not of COCO's form, with the first place, and where no object has an outline.
    """
    said: dict[str, list[dict[str, Any]]] = {key: [] for key in _KEPT}

    def keep(key: str, where: str, entry: Json) -> None:
        if not isinstance(entry, dict):
            raise ValueError(f"{where} is not an object")
        said[key].append({name: entry[name] for name in _KEPT[key] if name in entry})
        if key == "annotations":
            _compact(said[key][-1], where)

    try:
        if (size := folders.size_of(file, str(file), "COCO's JSON")) > LIMIT:
            raise UserError(str(file), f"{size} bytes", f"at most {LIMIT}: masks in COCO's JSON")
        if json_lists.read(file, _KEPT, keep, "masks in COCO's JSON") != set(_KEPT):
            raise UserError(str(file), "no lists `images`, `annotations` and `categories`", "masks in COCO's JSON")
        pictures = _pictures(said["images"])
        names = _categories(said["categories"], said["annotations"])
        numbers, empty, labels = _numbering(list(names.values()))
        classes = {id: numbers[name] for id, name in names.items()}
        outlines, left_out = _outlines(said["annotations"], pictures, classes)
    except ValueError as error:
        raise UserError(str(file), str(error)[:300], "masks in COCO's JSON") from None
    masks = {}
    for id, (name, size) in pictures.items():
        if name in masks:
            raise UserError(str(file), f"two images with the same file_name: {name[:200]}", "each once")
        masks[name] = CocoMask(file, f"{file}, image {id} ({name[:200]})", size, tuple(outlines.get(id, ())), empty)
    if not masks:
        raise UserError(str(file), "no images", "images and their objects")
    return Read(masks, labels, left_out)


def _entries(some: list[dict[str, Any]], what: str) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((f"{what}[{place}]", entry) for place, entry in enumerate(some))


def _compact(entry: dict[str, Any], where: str) -> None:
    """Turn the polygons of an annotation into arrays: lists of numbers take four times as much."""
    for key in ("image_id", "category_id"):
        _id(entry, key, where)
    if not isinstance(shape := entry.get("segmentation"), list) or not all(isinstance(one, list) for one in shape):
        return
    if (points := sum(map(len, shape)) // 2) > POINTS:
        raise ValueError(f"{where}.segmentation has {points} points; {POINTS} at most are allowed")
    entry["segmentation"] = [_numbers(one, 0, f"{where}.segmentation") for one in shape]


def _id(entry: Mapping[str, Any], key: str, where: str) -> int | str:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | str) or (isinstance(value, str) and len(value) > 100):
        raise ValueError(f"{where}.{key} is {value!r}"[:150] + "; a number is needed")
    return value


def _side(entry: Mapping[str, Any], key: str, where: str) -> int:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LONGEST:
        raise ValueError(f"{where}.{key} is {value!r}"[:150] + f"; 1 to {_LONGEST} pixels are needed")
    return value


def _pictures(some: list[Any]) -> dict[int | str, tuple[str, tuple[int, int]]]:
    found: dict[int | str, tuple[str, tuple[int, int]]] = {}
    for where, entry in _entries(some, "images"):
        name = entry.get("file_name")
        if not isinstance(name, str) or not name or len(name) > 1000 or not folders.is_writable(name):
            raise ValueError(f"{where}.file_name is {name!r}"[:150] + "; the path of an image is needed")
        if (id := _id(entry, "id", where)) in found:
            raise ValueError(f"{where}.id is {id}, as of another image")
        name = name.replace("\\", "/").removeprefix("./")
        if {"", ".", ".."} & set(name.split("/")):
            raise ValueError(f"{where}.file_name is {name!r}"[:150] + "; a path below one folder is needed")
        found[id] = (name, (_side(entry, "height", where), _side(entry, "width", where)))
    return found


def _categories(some: list[Any], annotations: list[Any]) -> dict[int | str, str]:
    """Return the name of each category by its id, in the order of ids, without one that only stands for others."""
    found: dict[int | str, str] = {}
    above: set[str] = set()
    for where, entry in _entries(some, "categories"):
        name = entry.get("name")
        if not isinstance(name, str):
            raise ValueError(f"{where}.name is {name!r}"[:150] + "; a name is needed")
        if (id := _id(entry, "id", where)) in found:
            raise ValueError(f"{where}.id is {id}, as of another category")
        found[id] = name
        if isinstance(parent := entry.get("supercategory"), str) and parent != name:
            above.add(parent)
    used = {str(entry.get("category_id")) for entry in annotations if isinstance(entry, dict)}
    only_above = [id for id, name in found.items() if name in above and str(id) not in used]
    ordered = sorted(found, key=lambda id: (isinstance(id, str), id if isinstance(id, int) else 0, str(id)))
    return {id: found[id] for id in ordered if id not in only_above}


def _outlines(
    some: list[Any], pictures: Mapping[int | str, Any], classes: Mapping[int | str, int]
) -> tuple[dict[int | str, list[Outline]], tuple[str, ...]]:
    """Return the objects of each image, and sentences about those that have only a box.

    Raises ValueError where none has an outline, and where most have coordinates from 0 to 1.
    """
    found: dict[int | str, list[Outline]] = {}
    boxes = drawn = polygons = shares = 0
    for where, entry in _entries(some, "annotations"):
        image, category = _id(entry, "image_id", where), _id(entry, "category_id", where)
        if image not in pictures or category not in classes:
            key, value = ("image_id", image) if image not in pictures else ("category_id", category)
            raise ValueError(f"{where}.{key} is {value}, which is not a known id")
        if entry.get("iscrowd", 0) not in (0, 1, None):
            raise ValueError(f"{where}.iscrowd is neither 0 nor 1")
        number = IGNORED if entry.get("iscrowd") else classes[category]
        _, size = pictures[image]
        outline = _outline(entry, number, size, where)
        boxes += outline.box is not None
        drawn += outline.runs is not None or bool(outline.polygons)
        polygons += bool(outline.polygons)
        shares += bool(outline.polygons) and min(size) > _FEW and all(map(_is_of_shares, outline.polygons))
        found.setdefault(image, []).append(outline)
    if boxes and not drawn:
        raise ValueError(f"{number_of(boxes, 'objects')} with a box, and none with an outline (`segmentation`)")
    if 2 * shares > polygons:
        raise ValueError(
            f"{shares} of {number_of(polygons, 'outlines')} with coordinates from 0 to 1; pixels are needed: multiply "
            "them by the width and height of their image"
        )
    boxed = f"{number_of(boxes, 'objects')} with a box but no outline: their pixels have no class"
    return found, (boxed,) if boxes else ()


def _is_of_shares(polygon: np.ndarray) -> bool:
    return bool((polygon >= 0).all() and (polygon <= 1).all())


def _outline(entry: Mapping[str, Any], number: int, size: tuple[int, int], where: str) -> Outline:
    shape = entry.get("segmentation")
    if isinstance(shape, dict):
        said = shape.get("size", list(size))
        if said != list(size):
            found = f"{where}.segmentation.size is {said!r}"[:150]
            raise ValueError(f"{found}; its image has [{size[0]}, {size[1]}], height and width")
        return Outline(number, number, runs=_runs(shape.get("counts"), size, f"{where}.segmentation.counts"))
    if shape in (None, []):
        box = entry.get("bbox")
        if box in (None, []):
            return Outline(number, number)
        left, top, width, height = _numbers(box, 4, f"{where}.bbox").tolist()
        if width <= 0 or height <= 0:
            return Outline(number, number)
        return Outline(IGNORED, number, box=(left, top, width, height))
    if not isinstance(shape, list) or not all(isinstance(one, np.ndarray) for one in shape):
        raise ValueError(f"{where}.segmentation is neither polygons nor run lengths")
    return Outline(number, number, tuple(one.reshape(-1, 2) for one in shape if len(one) >= 6))


def _numbers(some: Any, count: int, where: str) -> np.ndarray:
    try:
        values = np.array(some, np.float64)
    except (TypeError, ValueError, OverflowError):
        values = np.empty((0, 0))
    if values.ndim != 1 or (len(values) != count if count else len(values) % 2) or not (np.abs(values) <= FAR).all():
        raise ValueError(f"{where} is not {count or 'pairs of'} coordinates within {FAR:,.0f} pixels")
    return values


def _runs(counts: Any, size: tuple[int, int], where: str) -> str | np.ndarray:
    pixels = size[0] * size[1]
    if isinstance(counts, str | list) and len(counts) > (most := LENGTH_TEXT * (pixels + 2)):
        raise ValueError(f"{where} has a length of {len(counts)}; {most} at most for {size[1]} x {size[0]} pixels")
    if isinstance(counts, str):
        if not re.fullmatch("[0-o]+", counts):
            raise ValueError(f"{where} holds characters that no run lengths have")
        return counts
    if not isinstance(counts, list) or not all(type(one) is int and 0 <= one <= PIXEL_CAP for one in counts):
        raise ValueError(f"{where} is neither a text nor a list of lengths")
    return np.array(counts, np.int32)


def image_root(file: Path, names: Sequence[str], root: Path | None = None) -> Path:
    """Return the folder that the paths of images in a file begin in: `root`, or the one that holds the most of them.

    Looked at are the file's folder, the one above, and in these `images` and the file's split. Raises UserError where
    images are not there, or lie outside of it behind a link.
    """
    places = [root] if root is not None else list(_places(file))
    there = {place: folders.Listing(place) for place in places}
    gone = {place: [name for name in names if not there[place].has_file(name)] for place in places}
    best = min(places, key=lambda place: len(gone[place]))
    if gone[best]:
        looked = "" if root is not None else f" (looked in {few(map(str, places), 8)})"
        found = f"{len(gone[best])} of {len(names)} images do not exist: {few(gone[best])}{looked}"
        raise UserError(
            str(file), found, "all images that it lists", "set data.root to the folder where the paths begin"
        )
    if out := [name for name in names if there[best].leads_out(name)]:
        raise UserError(str(file), f"{number_of(len(out), 'links')} out of {best}: {few(out)}", "images in it")
    return best


def _places(file: Path) -> Iterator[Path]:
    named = _SPLIT.fullmatch(file.stem)
    tail = file.stem.rpartition("_")[2]
    words = dict.fromkeys((tail, named[1] if named else tail))
    for above in (file.parent, file.parent.parent):
        yield above
        yield from (above / word for word in words if (above / word).is_dir())
        for inner in ("images", "JPEGImages"):
            if (above / inner).is_dir():
                yield above / inner
                yield from (above / inner / word for word in words if (above / inner / word).is_dir())


def _numbering(classes: Sequence[str]) -> tuple[dict[str, int], int, Labels]:
    """Return the number of each class, that of uncovered pixels, and the labels, whose class 0 is the background.

    Where one of `classes` is called background it is class 0, and uncovered pixels have no class. Raises ValueError as
    `Labels` does.
    """
    own = next((name for name in classes if name.lower() in _CALLED_BACKGROUND), None)
    names = (_BACKGROUND if own is None else own, *(name for name in classes if name != own))
    labels = label_maps.numbered(names)
    return {name: number for number, name in enumerate(names)}, 0 if own is None else IGNORED, labels
