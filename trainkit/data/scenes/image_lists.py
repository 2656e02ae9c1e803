"""Lists of images and their masks: a line `image,label` each, with paths below one folder.

A label is a file of numbers or colours, or a file of COCO's form, which says what it has for the image. Nothing is
decoded.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path

from trainkit.data import folders
from trainkit.data.folders import Listing, listed_path
from trainkit.data.formats.image_decode import SUFFIXES
from trainkit.data.scenes import coco
from trainkit.data.scenes.coco import CocoMask
from trainkit.data.scenes.files import Scene
from trainkit.data.scenes.label_maps import Labels
from trainkit.errors import UserError, few, listing, number_of

LIST_LIMIT = 256 << 20
"""Largest list, in bytes."""

_IMAGES, _LABELS = ("image", "img", "images"), ("label", "mask", "annotation")
"""Cells of a first line that only says what the others hold."""
_EXPECTED = "an image and its mask per line: image,label"


def read(file: Path, root: Path) -> tuple[list[Scene], Labels | None]:
    """Return the scenes of a list whose paths begin in `root`, and their classes where its masks say them.

    Raises UserError that counts the lines which cannot be used: of another form, with files that are not there, are no
    images or lie outside `root`, or with an image named before.
    """
    if not root.is_dir():
        raise UserError(str(root), "no folder", "the folder where the paths of the list begin", "set data.root")
    there, annotations = Listing(root), _Annotations(root)
    scenes: dict[str, Scene] = {}
    errors: list[str] = []
    for number, cells in _lines(file):
        if not scenes and not errors and len(cells) == 2 and cells[0] in _IMAGES and cells[1] in _LABELS:
            continue
        try:
            image, label = _paths(cells, there)
            if image in scenes:
                raise ValueError(f"{image[:200]}, the image of an earlier line")
            mask = annotations.mask(image, label) if label.endswith(".json") else root / label
            scenes[image] = Scene(image, root / image, mask, f"{file}, line {number} ({image[:200]})")
        except ValueError as error:
            errors.append(f"line {number}: {error}")
    if errors:
        found = f"{number_of(len(errors), 'errors')} in {number_of(len(errors) + len(scenes), 'lines')}:"
        remedy = f"correct them; paths begin at {root} (data.root changes that)"
        raise UserError(str(file), f"{found}{listing(errors, 20)}\n", remedy=remedy)
    if not scenes:
        raise UserError(str(file), "no lines", _EXPECTED)
    return list(scenes.values()), annotations.labels


def _lines(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of the lines of a list that are not empty, with their numbers from 1."""
    number = 0
    try:
        for number, line in enumerate(folders.read_text(file, LIST_LIMIT, _EXPECTED).split("\n"), start=1):
            if line.strip():
                yield number, [cell.strip() for cell in next(csv.reader([line.strip()], strict=True))]
    except csv.Error as error:
        raise UserError(f"{file}, line {number}", f"cannot be read ({error})", _EXPECTED) from None


def _paths(cells: list[str], there: Listing) -> tuple[str, str]:
    """Return the paths of image and mask of a line below the root. Raises ValueError for what cannot be used."""
    if len(cells) != 2:
        raise ValueError(f"{','.join(cells)[:200]!r}; image,label is needed")
    image, label = (listed_path(cell, there.root) for cell in cells)
    if image is None or label is None:
        raise ValueError(f"{','.join(cells)[:200]!r} is a path outside of the root")
    for name, suffixes in ((image, SUFFIXES), (label, (*SUFFIXES, ".json"))):
        if os.path.splitext(name)[1].lower() not in suffixes:
            raise ValueError(f"{name[:200]} is not called as an image")
        if not there.has_file(name):
            raise ValueError(f"{name[:200]} does not exist")
        if there.leads_out(name):
            raise ValueError(f"{name[:200]} is a link out of the root")
    if image == label:
        raise ValueError(f"{image[:200]} as image and mask")
    return image, label


class _Annotations:
    """Files of COCO's form that a list names, each read once, and the classes that all of them have."""

    def __init__(self, root: Path):
        self.root = root
        self.labels: Labels | None = None
        self._masks: dict[str, dict[Path, CocoMask]] = {}

    def mask(self, image: str, name: str) -> CocoMask:
        """Return the mask that a file has for an image. Raises ValueError where it has none."""
        if name not in self._masks:
            file = self.root / name
            said = coco.read(file)
            if self.labels is not None and self.labels.names != said.labels.names:
                raise UserError(str(file), f"classes {few(said.labels.names)}", "those of the other lines")
            base = coco.image_root(file, list(said.masks))
            self.labels = said.labels
            self._masks[name] = {base / path: mask for path, mask in said.masks.items()}
        if (mask := self._masks[name].get(self.root / image)) is None:
            raise ValueError(f"{image[:200]} is not in its JSON")
        return mask
