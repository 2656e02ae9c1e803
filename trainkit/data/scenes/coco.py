"""Masks of COCO's JSON: outlines of objects as polygons or run lengths, with a category each, become classes.

Classes are the background (0) and the categories in the order of their ids; see `composed` for what lies on top. A
image without an annotation is all background. Objects marked `iscrowd` enclose more than the objects, and those with
a box and no outline as well: what nothing else covers of them has no class. A category that is only the common
`supercategory` of others, as Roboflow writes one, is no class.

Of polygons a pixel is inside where its centre is, by the even-odd rule; several polygons of an object are one area.
Format: Lin et al., "Microsoft COCO: Common Objects in Context", ECCV 2014, and its API's `mask` for run lengths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.data import folders
from trainkit.data.formats.image_decode import PIXEL_CAP
from trainkit.data.scenes import composed, json_lists
from trainkit.data.scenes.composed import Painted, Region
from trainkit.data.scenes.label_maps import Labels
from trainkit.data.scenes.lost_objects import BOX, OUTSIDE, SMALL, THIN
from trainkit.errors import UserError, few, number_of
from trainkit.files import Json
from trainkit.interfaces import IGNORED

LIMIT = 512 << 20
"""Largest file, in bytes. `instances_train2017.json` has 448 MB."""

FAR = 1e6
"""Largest coordinate of an outline, in pixels."""

CROSSINGS = 1 << 20
"""Most rows that the edges of a polygon may cross together, 0.1 s of painting: more is no outline."""

POINTS = 1 << 17
"""Most points of the outline of an object."""

_TEXT = 7
"""Most characters of a run length: an image has less than 2^30 pixels."""

_BLOCK = 1 << 20
"""Run lengths, or characters of them, that are decoded at a time; an even number."""

_NO_AREA = 1e-9

_FEW = 8
"""Pixels of the shorter side up to which coordinates from 0 to 1 may be pixels."""

_LONGEST = 1 << 16
"""Longest side of an image, in pixels."""

_OTHERS = ("captions_", "person_keypoints_", "panoptic_", "image_info_")
"""Begin the names of COCO's files of other things."""

_SPLIT = re.compile(r"(?:.*[_.-])?(train|training|val|valid|validation|dev|test|testing)(?:\d{4})?", re.IGNORECASE)

_KEPT = {
    "images": ("id", "file_name", "height", "width"),
    "annotations": ("image_id", "category_id", "iscrowd", "segmentation", "bbox"),
    "categories": ("id", "name", "supercategory"),
}
"""What is read of the entries of each list."""


@dataclass(frozen=True, eq=False)
class Outline:
    """One object of an image: polygons, run lengths, or for lack of both a box."""

    number: int
    """Class of its pixels; `IGNORED` for none."""
    of: int
    """Class of the object; `IGNORED` for what encloses several."""
    polygons: tuple[np.ndarray, ...] = ()
    """float64 (n, 2) each, x and y in pixels."""
    runs: str | np.ndarray | None = None
    """Lengths of runs outside and inside in turn, down the columns: compressed, or int64."""
    box: tuple[float, float, float, float] | None = None
    """Left, top, width and height."""


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
        return composed.paint(self.size, map(self._region, self.outlines), self.empty, self.where)

    def _region(self, outline: Outline) -> Region:
        try:
            if outline.runs is not None:
                region = Region.covering(outline.number, decode_runs(outline.runs, self.size))
                return replace(region, of=outline.of, fate="" if region.area else THIN)
            polygons, fate = outline.polygons, ""
            if outline.box is not None:
                x, y, width, height = outline.box
                polygons = (np.array([[x, y], [x + width, y], [x + width, y + height], [x, y + height]]),)
                fate = BOX
            region = _filled(outline.number, polygons, self.size) if polygons else None
            if region is None:
                return Region.lost(outline.of, fate or _reason(polygons, self.size))
            return replace(region, of=outline.of, fate=fate)
        except ValueError as error:
            raise UserError(self.where, str(error), "an outline of the image's size") from None


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
        numbers, empty, labels = composed.numbering(list(names.values()))
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
    if isinstance(counts, str | list) and len(counts) > (most := _TEXT * (pixels + 2)):
        raise ValueError(f"{where} has a length of {len(counts)}; {most} at most for {size[1]} x {size[0]} pixels")
    if isinstance(counts, str):
        if not re.fullmatch("[0-o]+", counts):
            raise ValueError(f"{where} holds characters that no run lengths have")
        return counts
    if not isinstance(counts, list) or not all(type(one) is int and 0 <= one <= PIXEL_CAP for one in counts):
        raise ValueError(f"{where} is neither a text nor a list of lengths")
    return np.array(counts, np.int32)


def decode_runs(runs: str | np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Decode run lengths, compressed or whole numbers, to bool of `size` (height, width).

    Raises ValueError where they do not make up so many pixels, or that is more than any image has.
    """
    pixels = size[0] * size[1]
    if pixels > PIXEL_CAP:
        raise ValueError(f"{size[1]} x {size[0]} pixels; at most {PIXEL_CAP} are allowed")
    made, done, odd = np.empty(pixels, bool), 0, 0
    for lengths in _unpacked(runs) if isinstance(runs, str) else _blocks(runs):
        total = int(lengths.sum())
        if (lengths < 0).any() or done + total > pixels:
            raise ValueError(f"run lengths below 0, or of more pixels than {size[1]} x {size[0]}")
        made[done : done + total] = np.repeat((np.arange(len(lengths)) + odd) % 2 == 1, lengths)
        done, odd = done + total, (odd + len(lengths)) % 2
    if done != pixels:
        raise ValueError(f"run lengths of {done} pixels for {size[1]} x {size[0]}")
    return made.reshape(size[1], size[0]).T


def _blocks(values: np.ndarray) -> Iterator[np.ndarray]:
    return (values[first : first + _BLOCK].astype(np.int64) for first in range(0, len(values), _BLOCK))


def _unpacked(text: str) -> Iterator[np.ndarray]:
    """Unpack lengths from a text, some at a time: 5 bits a character, the sixth says that more follow; each after the
    third is told by its difference from the last but one."""
    codes = np.frombuffer(text.encode("ascii"), np.uint8)
    last, begin, first, more = np.zeros(2, np.int64), 0, 0, 0
    while begin < len(codes):
        some = codes[begin : begin + _BLOCK] - np.uint8(48)
        ends = np.flatnonzero(some & 32 == 0)
        if begin + len(some) < len(codes):
            ends = ends[: len(ends) // 2 * 2]
        elif 0 < (more := len(some) - 1 - int(ends[-1] if len(ends) else -1)) < _TEXT:
            raise ValueError("truncated run lengths")
        begins = np.append(0, ends[:-1] + 1)
        if not len(ends) or int((ends - begins).max()) >= _TEXT or more >= _TEXT:
            raise ValueError("impossible run lengths")
        some = some[: int(ends[-1]) + 1].astype(np.int64)
        place = np.arange(len(some)) - np.repeat(begins, ends - begins + 1)
        values = np.add.reduceat((some & 31) << 5 * place, begins)
        values -= np.where(some[ends] & 16, 1 << 5 * (ends - begins + 1), 0)
        if int(np.abs(values).max()) > PIXEL_CAP:
            raise ValueError("impossible run lengths")
        yield _summed(values, last, first)
        begin, first = begin + len(some), first + len(ends)


def _summed(values: np.ndarray, last: np.ndarray, first: int) -> np.ndarray:
    """Return lengths of differences from the last but one; `last` are the two before, and are set to the last two.

    The first three of all, from `first` 0 on, are lengths themselves.
    """
    for parity in (0, 1):
        own = values[parity::2]
        if first == 0 and parity == 0:
            own[1:].cumsum(out=own[1:])
        else:
            own[:1] += last[parity]
            own.cumsum(out=own)
        if len(own) > (first == 0 and parity == 0):
            last[parity] = own[-1]
    return values


def _filled(number: int, polygons: Sequence[np.ndarray], size: tuple[int, int]) -> Region | None:
    """Fill polygons into one region; None where they cover no pixel of an image of `size` (height, width)."""
    points = np.concatenate(polygons)
    low = np.clip(np.floor(points.min(0)), 0, None).astype(int)
    high = np.minimum(np.ceil(points.max(0)).astype(int), (size[1], size[0]))
    width, height = (high - low).tolist()
    if width < 1 or height < 1:
        return None
    covered = np.zeros((height, width), bool)
    for polygon in polygons:
        covered |= fill(polygon - low, (height, width))
    return Region.covering(number, covered, int(low[1]), int(low[0])) if covered.any() else None


def _reason(polygons: Sequence[np.ndarray], size: tuple[int, int]) -> str:
    """Return why polygons cover no pixel of an image of `size` (height, width)."""
    areas = (np.dot(p[:, 0], np.roll(p[:, 1], -1)) - np.dot(p[:, 1], np.roll(p[:, 0], -1)) for p in polygons)
    if all(abs(area) < _NO_AREA for area in areas):
        return THIN
    points = np.concatenate(polygons)
    outside = (points.max(0) <= 0).any() or (points.min(0) >= size[::-1]).any()
    return OUTSIDE if outside else SMALL


def fill(polygon: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Fill a polygon, float64 (n, 2) of x and y: bool of `size` (height, width), true where a pixel's centre is inside.

    Raises ValueError where its edges cross more rows than `CROSSINGS`.
    """
    height, width = size
    x, y = polygon.T
    x_end, y_end = np.roll(x, -1), np.roll(y, -1)
    first = np.clip(np.ceil(np.minimum(y, y_end) - 0.5), 0, height).astype(np.int64)
    last = np.clip(np.ceil(np.maximum(y, y_end) - 0.5), 0, height).astype(np.int64)
    counts = last - first
    total = int(counts.sum())
    if total > CROSSINGS:
        raise ValueError(f"an outline of {len(polygon)} points that crosses {total} rows")
    edge = np.repeat(np.arange(len(x)), counts)
    row = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts) + first[edge]
    slope = (x_end - x)[edge] / (y_end - y)[edge]
    column = np.ceil(x[edge] + (row + 0.5 - y[edge]) * slope - 0.5)
    column = np.clip(column, 0, width).astype(np.int64)
    turns = np.zeros((height, width + 1), np.uint8)
    np.add.at(turns.reshape(-1), row * (width + 1) + column, 1)  # beyond 255 it goes on from 0, which is even too
    np.bitwise_xor.accumulate(turns, 1, out=turns)
    turns &= 1
    return turns[:, :width].view(bool)


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
