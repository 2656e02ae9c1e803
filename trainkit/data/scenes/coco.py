"""Masks of COCO's JSON: outlines of objects as polygons or run lengths, with a category each, become classes.

Classes are the background (0) and the categories in the order of their ids; see `outlines` for what lies on top. An
image without an annotation is all background. Objects marked `iscrowd` enclose more than the objects, and those with
a box and no outline as well: what nothing else covers of them has no class. A category that is only the common
`supercategory` of others, as Roboflow writes one, is no class.

Format: Lin et al., "Microsoft COCO: Common Objects in Context", ECCV 2014, and its API's `mask` for run lengths.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from trainkit.data import folders
from trainkit.data.formats.image_decode import PIXEL_CAP
from trainkit.data.scenes import json_lists, label_maps, outlines
from trainkit.data.scenes.label_maps import Labels
from trainkit.data.scenes.outlines import Outline, Painted
from trainkit.data.source_splits import WORDS
from trainkit.errors import UserError, few, number_of
from trainkit.interfaces import IGNORED

LIMIT = 512 << 20
"""Largest file, in bytes. `instances_train2017.json` has 448 MB."""

FAR = 1e6
"""Largest coordinate of an outline, in pixels."""

POINTS = 1 << 17
"""Most points of the outline of an object."""

_EXPECTED = "masks in COCO's JSON"


def _points(numbers: list[float]) -> np.ndarray:
    """Return x and y of the points of a polygon, float64 (n, 2): lists of numbers take four times as much."""
    if len(numbers) % 2:
        raise ValueError("x without y")
    return np.array(numbers, np.float64).reshape(-1, 2)


_Id = int | Annotated[str, Field(max_length=100)]
_Side = Annotated[int, Field(ge=1, le=1 << 16)]
# Errors of a million numbers would take a gigabyte.
_Coordinates = Annotated[list[Annotated[float, Field(ge=-FAR, le=FAR)]], Field(fail_fast=True)]
_Polygons = Annotated[list[Annotated[_Coordinates, AfterValidator(_points)]], Field(fail_fast=True)]
_Lengths = Annotated[list[Annotated[int, Field(ge=0, le=PIXEL_CAP)]], Field(fail_fast=True)]


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True)


def _path(name: str) -> str:
    path = name.replace("\\", "/").removeprefix("./")
    if not folders.is_writable(path) or {"", ".", ".."} & set(path.split("/")):
        raise ValueError("a path below one folder is needed")
    return path


class _Image(_Entry):
    id: _Id
    file_name: Annotated[str, Field(max_length=1000), AfterValidator(_path)]
    height: _Side
    width: _Side


class _Category(_Entry):
    id: _Id
    name: str
    supercategory: str | None = None


class _Runs(_Entry):
    counts: str | _Lengths
    size: Annotated[list[int], Field(max_length=2, fail_fast=True)] | None = None


class _Annotation(_Entry):
    image_id: _Id
    category_id: _Id
    iscrowd: Literal[0, 1] | None = 0
    segmentation: _Runs | _Polygons | None = None
    bbox: _Coordinates | None = None


_FORMS: dict[str, type[_Image | _Annotation | _Category]] = {
    "images": _Image,
    "annotations": _Annotation,
    "categories": _Category,
}


@dataclass(frozen=True, eq=False)
class CocoMask:
    """The objects of an image, painted when they are read."""

    file: Path
    """The JSON file, which all masks of a set share."""
    where: str
    size: tuple[int, int]
    """Height and width as the file says them."""
    outlines: tuple[Outline, ...]

    def painted(self) -> Painted:
        """Return classes and objects. Raises UserError for run lengths that do not fit the image."""
        return outlines.paint(self.size, self.outlines, self.where)


class Read(NamedTuple):
    """The content of a file."""

    masks: dict[str, CocoMask]
    """By the path of the image as the file has it, `/` between its parts."""
    labels: Labels


def is_coco(file: Path) -> bool:
    """Return whether a JSON file names what COCO's has, without parsing it. Raises UserError for a too large one."""
    _checked_size(file)
    missing = [f'"{key}"'.encode() for key in _FORMS]
    with file.open("rb") as stream:
        end = b""
        while missing and (block := stream.read(1 << 22)):
            missing = [word for word in missing if word not in end + block]
            end = block[-16:]
    return not missing


def _checked_size(file: Path) -> None:
    if (size := folders.size_of(file, str(file), _EXPECTED)) > LIMIT:
        raise UserError(str(file), f"{size} bytes", f"at most {LIMIT}: {_EXPECTED}")


def find(root: Path) -> dict[str, list[Path]]:
    """Return the files of COCO's form in a folder, its `annotations` and the folders of its splits, by split.

    Files whose names tell no split are under the name of nothing. Raises UserError for one that is too large.
    """
    found: dict[str, list[Path]] = {}
    for folder in (root, *folders.folders_in(root).values()):
        if folder == root or folder.name in WORDS or folder.name.lower() in ("annotations", "labels"):
            for file in filter(is_coco, folders.visible(folder.glob("*.json"))):
                named = folder.name if folder != root and folder.name in WORDS else file.stem.rpartition("_")[2]
                found.setdefault(named if named in WORDS else "", []).append(file)
    return {name: [f for f in files if f.name.startswith("instances")] or files for name, files in found.items()}


def read(file: Path) -> Read:
    """Read masks and classes of a file. Decodes no run lengths.

    Raises UserError for what is not of COCO's form, with the first place.
    """
    _checked_size(file)
    images: dict[int | str, _Image] = {}
    categories: dict[int | str, _Category] = {}
    objects: list[tuple[str, _Annotation]] = []
    try:
        for where, entry in _entries(file):
            if isinstance(entry, _Annotation):
                objects.append((where, entry))
                continue
            known: dict = images if isinstance(entry, _Image) else categories
            if entry.id in known:
                raise ValueError(f"{where}.id is {entry.id!r}, as of an earlier one")
            known[entry.id] = entry
        if not images or not objects:
            raise ValueError(f"no {'annotations' if images else 'images'}")
        names = _classes(categories, {entry.category_id for _, entry in objects})
        labels = label_maps.numbered(["background", *names.values()])
        numbers = {id: number for number, id in enumerate(names, start=1)}
        found: dict[int | str, list[Outline]] = {id: [] for id in images}
        for where, entry in objects:
            if entry.image_id not in images or entry.category_id not in numbers:
                ids = f"image {entry.image_id!r} and category {entry.category_id!r}"
                raise ValueError(f"{where} is of {ids}, not known ids")
            found[entry.image_id].append(_outline(entry, numbers[entry.category_id], images[entry.image_id], where))
        _check_pixels([outline for some in found.values() for outline in some])
    except ValueError as error:
        raise UserError(str(file), str(error)[:300], _EXPECTED) from None
    masks: dict[str, CocoMask] = {}
    for id, image in images.items():
        where, size = f"{file}, image {id} ({image.file_name[:200]})", (image.height, image.width)
        if image.file_name in masks:
            raise UserError(where, "the file_name of an earlier image", "each once")
        masks[image.file_name] = CocoMask(file, where, size, tuple(found[id]))
    return Read(masks, labels)


def _entries(file: Path) -> Iterator[tuple[str, _Image | _Annotation | _Category]]:
    """Yield the entries of all lists with their places. Raises ValueError for one of another form."""
    for key, place, value in json_lists.entries(file, _FORMS, _EXPECTED):
        try:
            yield f"{key}[{place}]", _FORMS[key].model_validate(value)
        except ValidationError as error:
            # Of several forms that a value may have, that which it comes nearest.
            found = max(error.errors(), key=lambda one: len(one["loc"]))
            part = ".".join(map(str, found["loc"][:1]))
            raise ValueError(f"{key}[{place}].{part}: {found['msg']}, found {found['input']!r}"[:300]) from None


def _classes(categories: Mapping[int | str, _Category], used: Collection[int | str]) -> dict[int | str, str]:
    """Return the names of the categories by id, in the order of ids, without those that only stand for others."""
    above = {one.supercategory for one in categories.values() if one.supercategory != one.name}
    ordered = sorted(categories, key=lambda id: (isinstance(id, str), id if isinstance(id, int) else 0, str(id)))
    return {id: categories[id].name for id in ordered if id in used or categories[id].name not in above}


def _outline(entry: _Annotation, number: int, image: _Image, where: str) -> Outline:
    """Return the outline of an object of class `number`. Raises ValueError for one that its image cannot have."""
    shape, number = entry.segmentation, IGNORED if entry.iscrowd else number
    if isinstance(shape, _Runs):
        if shape.size not in (None, [image.height, image.width]):
            size = f"{[image.height, image.width]}, height and width"
            raise ValueError(f"{where}.segmentation.size is {shape.size}; its image has {size}")
        return Outline(number, runs=shape.counts if isinstance(shape.counts, str) else np.array(shape.counts, np.int64))
    if not shape and len(box := list(entry.bbox or ())) == 4:
        x, y, width, height = box
        corners = np.array([[x, y], [x + width, y], [x + width, y + height], [x, y + height]])
        return Outline(number, (corners,) if width > 0 and height > 0 else (), is_box=True)
    if (count := sum(map(len, shape or ()))) > POINTS:
        raise ValueError(f"{where}.segmentation has {count} points; {POINTS} at most are allowed")
    return Outline(number, tuple(np.asarray(points) for points in shape or () if len(points) > 2))


def _check_pixels(outlines: Sequence[Outline]) -> None:
    """Raise ValueError where most outlines have coordinates from 0 to 1: shares of the sides of their images."""
    drawn = [one for one in outlines if one.polygons and not one.is_box]
    shares = sum(all(((points >= 0) & (points <= 1)).all() for points in one.polygons) for one in drawn)
    if 2 * shares > len(drawn):
        found = f"{shares} of {number_of(len(drawn), 'outlines')} with coordinates from 0 to 1"
        raise ValueError(f"{found}; pixels are needed: multiply them by the width and height of their image")


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
        found = f"{len(gone[best])} of {len(names)} images do not exist: {few(gone[best])}"
        expected = f"all images that it lists in one of {few(map(str, places), 8)}"
        raise UserError(str(file), found, expected, "set data.root to the folder where the paths begin")
    if out := [name for name in names if there[best].leads_out(name)]:
        raise UserError(str(file), f"{number_of(len(out), 'links')} out of {best}: {few(out)}", "images in it")
    return best


def _places(file: Path) -> Iterator[Path]:
    split = file.stem.rpartition("_")[2]
    for above in (file.parent, file.parent.parent):
        yield from (place for inner in ("", "images", split, f"images/{split}") if (place := above / inner).is_dir())
