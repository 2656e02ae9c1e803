"""Recognise a user's folder of images: classes, classes a level deeper, or images with a table beside them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainkit.autoconfig import fit as fitting
from trainkit.autoconfig.fit import Fitted
from trainkit.data import hub, image_folder, sources
from trainkit.data.folders import SPLIT_NAMES, visible
from trainkit.data.formats.table_files import Cell
from trainkit.data.sources import LABEL_COLUMNS
from trainkit.data.table import IMAGE_COLUMNS, SPLIT_COLUMN, Table, open_table
from trainkit.errors import UserError, few
from trainkit.paths import locate

LOOKED_AT = 50
"""Rows of a table whose images are looked for."""
_TABLES = frozenset({".csv", ".tsv", ".json", ".jsonl"})
_NO_CLASS = frozenset({*SPLIT_NAMES, "images", "imgs", "image", "photos", "pictures", "data", "all"})
"""Names of folders that say nothing of what their images show."""


def taken(fitted: Fitted, text: str) -> str:
    """Return the set that a path stands for, with a sentence where that is another: a table beside the images of a
    folder, its columns written into the recipe, or the only folder of classes deeper in it.

    Raises UserError where several tables or columns would do.
    """
    if hub.is_hub(text) or text.startswith(sources.SAMPLE):
        return text
    place, split = sources.split_of(locate(text))
    if place.is_file():
        columns = _columns(place, fitted.columns) if place.suffix.lower() in _TABLES else None
        return text if columns is None else _with_columns(fitted, place, split, columns)
    if split is not None or not place.is_dir():
        return text
    if sources.form_of(place) == "folder" and (found := _beside(place, fitted.columns)) is not None:
        return _with_columns(fitted, found[0], None, found[1])
    inner = sources.only_way(place)
    if inner is None:
        return text
    fitted.seen.append(f"{text} holds a single folder with the others: using {fitting.as_named(inner)}")
    return fitting.as_named(inner)


def _with_columns(fitted: Fitted, file: Path, split: str | None, columns: Mapping[str, str]) -> str:
    """Write the columns of a table into the recipe; its name there."""
    name = fitting.as_named(file)
    fitted.put("data.columns", {**fitted.columns, **columns})
    fitted.seen.append(
        f"{name}: images from the column {columns['image']}, classes from {columns['label']}; "
        "--columns image=NAME,label=NAME changes that"
    )
    return name if split is None else f"{name}#{split}"


def _beside(root: Path, given: Mapping[str, str]) -> tuple[Path, dict[str, str]] | None:
    """Return the table of classes that lies in a folder of images, and its columns; None where folders are classes."""
    files = [file for file in visible(root.iterdir()) if file.suffix.lower() in _TABLES and file.is_file()]
    if not files:
        return None
    heads = {name.partition("/")[0].lower() for name in image_folder.list_images(root).files if "/" in name}
    if len(heads - _NO_CLASS) > 1:
        return None
    named = [file for file in files if "train" in file.stem.lower() or "label" in file.stem.lower()]
    found = {file: columns for file in named or files if (columns := _columns(file, given)) is not None}
    if len(found) > 1:
        said = f"several tables name its images: {few(file.name for file in found)}"
        raise UserError(str(root), said, "one", f"name it: --data {next(iter(found))}")
    return next(iter(found.items()), None)


def _columns(file: Path, given: Mapping[str, str]) -> dict[str, str] | None:
    """Return the columns of images and classes of a table: those `given`, else of usual names, else the first that
    names images and the only other one. None for a table of something else.
    """
    try:
        table = open_table(file)
    except UserError:
        return None
    names = list(table.content.columns)
    rows = [cells for _, cells in itertools.islice(table.content.read(names), LOOKED_AT)]
    if "path_a" in names:  # pairs of faces are no classes
        return None
    cells = {name: [row[place] for row in rows] for place, name in enumerate(names)}
    images = [given["image"]] if given.get("image") in names else [name for name in names if _shows(table, cells[name])]
    image = next((name for name in images if name.lower() in IMAGE_COLUMNS), next(iter(images), None))
    if image is None:
        return None
    others = [name for name in names if name not in (image, SPLIT_COLUMN)]
    label = given.get("label") or next((name for name in others if name.lower() in LABEL_COLUMNS), None)
    if label is None and len(others) > 1:
        found = f"several columns that may be the class: {few(others)}"
        raise UserError(str(file), found, "one class an image, in one column", f"name it: --columns label={others[0]}")
    return {"image": image, "label": label or others[0]} if label or others else None


def _shows(table: Table, cells: Sequence[Cell]) -> bool:
    """Return whether most cells of a column name an image that is there."""

    def is_there(cell: Cell) -> bool:
        try:
            file = table.find(str(cell), table.where)
        except UserError:
            return False
        return isinstance(file, Path) and file.is_file()

    some = [cell for cell in cells if isinstance(cell, str | int)]
    return bool(some) and sum(map(is_there, some)) >= 0.9 * len(cells)
