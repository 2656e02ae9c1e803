"""Lists of images and their masks: a line `image,label` each, with paths below one folder.

Nothing is decoded.
"""

from __future__ import annotations

import os
from pathlib import Path

from trainkit.data.folders import Listing, listed_path
from trainkit.data.formats.image_decode import SUFFIXES
from trainkit.data.formats.table_files import csv_lines
from trainkit.data.scenes.files import Scene
from trainkit.errors import UserError, listing, number_of

_IMAGES, _LABELS = ("image", "img", "images"), ("label", "mask", "annotation")
"""Cells of a first line that only says what the others hold."""
_EXPECTED = "an image and its mask per line: image,label"


def read(file: Path, root: Path) -> list[Scene]:
    """Return the scenes of a list whose paths begin in `root`.

    Raises UserError that counts the lines which cannot be used: of another form, with files that are not there, are no
    images or lie outside `root`, or with an image named before.
    """
    if not root.is_dir():
        raise UserError(str(root), "no folder", "the folder where the paths of the list begin", "set data.root")
    there = Listing(root)
    scenes: dict[str, Scene] = {}
    errors: list[str] = []
    for number, line in csv_lines(file):
        cells = [cell.strip() for cell in line]
        if not any(cells):
            continue
        if not scenes and not errors and len(cells) == 2 and cells[0] in _IMAGES and cells[1] in _LABELS:
            continue
        try:
            image, label = _paths(cells, there)
            if image in scenes:
                raise ValueError(f"{image[:200]}, the image of an earlier line")
            scenes[image] = Scene(image, root / image, root / label, f"{file}, line {number} ({image[:200]})")
        except ValueError as error:
            errors.append(f"line {number}: {error}")
    if errors:
        found = f"{number_of(len(errors), 'errors')} in {number_of(len(errors) + len(scenes), 'lines')}:"
        remedy = f"correct them; paths begin at {root} (data.root changes that)"
        raise UserError(str(file), f"{found}{listing(errors, 20)}\n", remedy=remedy)
    if not scenes:
        raise UserError(str(file), "no lines", _EXPECTED)
    return list(scenes.values())


def _paths(cells: list[str], there: Listing) -> tuple[str, str]:
    """Return the paths of image and mask of a line below the root. Raises ValueError for what cannot be used."""
    if len(cells) != 2:
        raise ValueError(f"{','.join(cells)[:200]!r}; image,label is needed")
    image, label = (listed_path(cell, there.root) for cell in cells)
    if image is None or label is None:
        raise ValueError(f"{','.join(cells)[:200]!r} is a path outside of the root")
    for name in (image, label):
        if os.path.splitext(name)[1].lower() not in SUFFIXES:
            raise ValueError(f"{name[:200]} is not called as an image")
        if not there.has_file(name):
            raise ValueError(f"{name[:200]} does not exist")
        if there.leads_out(name):
            raise ValueError(f"{name[:200]} is a link out of the root")
    if image == label:
        raise ValueError(f"{image[:200]} as image and mask")
    return image, label
