"""Recognise a user's folder of images: classes, classes a level deeper, or images with a table beside them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainkit.autoconfig import fit as fitting
from trainkit.autoconfig.fit import Fitted
from trainkit.data import hub, image_folder, sources
from trainkit.data.folders import visible
from trainkit.data.formats.table_files import Cell
from trainkit.data.sources import LABEL_COLUMNS
from trainkit.data.table import IMAGE_COLUMNS, SPLIT_COLUMN, Table, open_table
from trainkit.errors import UserError, few
from trainkit.paths import locate

LOOKED_AT = 200
"""Rows of a table that its columns are guessed from."""

_NAMED = 0.9
"""Share of cells that name an image, from which a column is one of images."""

_TABLES = frozenset({".csv", ".tsv", ".json", ".jsonl"})
_NO_CLASS = re.compile(
    r"((train|test|val|valid|dev|images?|imgs?|photos?|pic(ture)?s?|jpe?g|png|data|all)(ing|idation)?[ _-]?)+",
    re.IGNORECASE,
)
"""Names of folders that say nothing of what their images show."""


def taken(fitted: Fitted, text: str) -> str:
    """Return the set that a path stands for, with a sentence where that is another: a table beside the images of a
    folder, its columns written into the recipe, or the only folder of classes deeper in it.

    Raises UserError where several tables or columns would do, and for a column for each class.
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
    heads = {name.partition("/")[0] for name in image_folder.list_images(root).files}
    if sum(_NO_CLASS.fullmatch(head) is None for head in heads) > 1:
        return None
    found = {file: columns for file in files if (columns := _columns(file, given)) is not None}
    for word in ("train", "label"):
        some = {file: columns for file, columns in found.items() if word in file.stem.lower()}
        found = some if len(some) == 1 else found
    if len(found) > 1:
        said = f"several tables name its images: {few(file.name for file in found)}"
        raise UserError(str(root), said, "one", f"name it: --data {next(iter(found))}")
    return next(iter(found.items()), None)


def _columns(file: Path, given: Mapping[str, str]) -> dict[str, str] | None:
    """Guess the columns of images and classes of a table; None for a table of something else."""
    try:
        table = open_table(file)
    except UserError:
        return None
    names = list(table.content.columns)
    rows = [cells for _, cells in itertools.islice(table.content.read(names), LOOKED_AT)]
    cells = {name: [row[place] for row in rows] for place, name in enumerate(names)}
    image = given.get("image") or next(
        (name for name in _first(names, IMAGE_COLUMNS) if _names_images(table, cells[name])), None
    )
    if image not in cells or "path_a" in cells:  # pairs of faces are no classes
        return None
    label = given.get("label") or _label(file, {name: cells[name] for name in names if name != image})
    return None if label is None else {"image": image, "label": label}


def _first(names: Sequence[str], usual: Sequence[str]) -> Iterator[str]:
    """Yield names, those that are usual first, in any case of letters."""
    return iter(sorted(names, key=lambda name: usual.index(name.lower()) if name.lower() in usual else len(usual)))


def _names_images(table: Table, cells: Sequence[Cell]) -> bool:
    def is_there(cell: Cell) -> bool:
        try:
            file = table.find(str(cell), table.where)
        except UserError:
            return False
        return isinstance(file, Path) and file.is_file()

    some = [cell for cell in cells if isinstance(cell, str | int)]
    return bool(some) and sum(map(is_there, some)) >= _NAMED * len(cells)


def _label(file: Path, cells: Mapping[str, Sequence[Cell]]) -> str | None:
    """Choose the column of classes: of a usual name, else the only one in which values come again."""
    usual = [name for name in _first(list(cells), LABEL_COLUMNS) if name.lower() in LABEL_COLUMNS]
    if usual:
        return usual[0]
    values = {name: {str(cell) for cell in some} for name, some in cells.items() if name != SPLIT_COLUMN}
    flags = [name for name, some in values.items() if some <= {"0", "1"}]
    again = [name for name, some in values.items() if 1 < len(some) < len(cells[name])]
    if len(flags) > 1 and set(again) <= set(flags):
        raise UserError(str(file), f"a column for each class: {few(flags)}", "one column of classes", sources.SEVERAL)
    if len(again) > 1:
        found = f"several columns that may be the class: {few(again)}"
        raise UserError(str(file), found, "one", f"name it: --columns label={again[0]}")
    return again[0] if again else None
