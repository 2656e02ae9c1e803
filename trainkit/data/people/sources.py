"""Sets of people as others lay them out: records of who was seen, by which camera, in which modality.

A reader says which annotation files a set has, and turns them into records one by one. Here that of an index; those of
published sets are in `layouts`.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

from trainkit import interfaces
from trainkit.data import hub, sources
from trainkit.data.formats import table_files
from trainkit.data.formats.table_files import SUFFIXES, Cell
from trainkit.data.people import image_tables, layouts, modalities
from trainkit.data.people.records import DISTRACTOR, EITHER, GALLERY, QUERY, Layout, Records
from trainkit.data.record import Columns
from trainkit.data.table import Table, TableRows, open_table
from trainkit.errors import UserError, few
from trainkit.interfaces import RGB, TEXT
from trainkit.paths import locate

SAMPLE = "sample:people"
DERIVED = "derived:"

ROLES = {"": EITHER, "query": QUERY, "gallery": GALLERY}


def find(text: str, part: str = "train", columns: Columns | None = None) -> Layout:
    """Return the set that a recipe names: a folder of a known layout, an index, a table with images, a set of the hub,
    `sample:people` or `derived:FOLDER`.

    `part` says which part of a built-in set is meant, and `columns` which columns of an index or a table, by their
    names in `COLUMNS`. Raises UserError where there is none, or none of this kind.
    """
    columns = columns or {}
    if hub.is_hub(text):
        return _with_images(text, None, columns)
    split = None
    if text.startswith("sample:"):
        if text != SAMPLE:
            raise UserError("data", f"no built-in set of people {text!r}"[:200], SAMPLE)
        path = importlib.import_module("trainkit.data.synthetic.people").folder() / part
    elif text.startswith(DERIVED):
        derived = importlib.import_module("trainkit.data.synthetic.derived_modalities")
        path = derived.folder(locate(text.removeprefix(DERIVED)))
    else:
        path, split = sources.split_of(locate(text))
    if not path.exists():
        raise UserError(str(path), "does not exist", "a set of people")
    index = path if path.is_file() else index_in(path)
    found = None if index is not None else layouts.recognise(path, split)
    if found is None and index in (None, path) and image_tables.holds_images(path):
        return _with_images(path, split, columns)
    if index is not None:
        if index.suffix.lower() not in _TABLES:
            raise UserError(str(path), "a file of unknown kind", f"an index, {few(_TABLES)}, or a folder")
        return _index(index, split, columns)
    if columns:
        raise UserError("data.columns", f"given for {text}"[:200], "columns of an index or a table", "leave it out")
    if found is None:
        raise UserError(str(path), "a folder of unknown layout", layouts.KNOWN)
    return found


def _with_images(place: Path | str, split: str | None, columns: Columns) -> Layout:
    return _index(image_tables.folder(place, split, columns) / "index.csv", None, {})


def index_in(folder: Path) -> Path | None:
    """Return the index in a folder; None where it has none."""
    return next((file for suffix in _TABLES if (file := folder / f"index{suffix}").is_file()), None)


def is_index(file: Path) -> bool:
    """Return whether a file is a table of records, by its columns."""
    if file.suffix.lower() not in _TABLES:
        return False
    delimiter = SUFFIXES[file.suffix.lower()]
    try:
        names = table_files.csv_rows(file, delimiter)[0] if delimiter else table_files.open_rows([file]).columns
    except UserError:
        return False
    return {*_NEEDED} <= {name.strip().lower() for name in names}


def missing(text: str) -> str | None:
    """Return a sentence about a set that a recipe names and that is not there yet."""
    if text.startswith("sample:"):
        return None
    return sources.missing(text.removeprefix(DERIVED))


# Indexes: a table with a row for each record.

COLUMNS = ("path", "person", "camera", "modality", "text", "of", "split", "role")
"""Columns of an index. `person` and `modality` must be there, and `path` or `text`; others are left alone.

`path` is below the folder of the index. `text` beside an rgb image is a caption of it, and a record of its own; a row
of modality `text` has no path, and `of` names the rgb image that it describes, where there is one. `person` -1 is
a distractor of the gallery. `role` is empty, `query` or `gallery`.
"""

_NEEDED = ("person", "modality")

_CAMERAS = re.compile(r"cam(era)?[ _-]?(id|idx|index|name|no|nr|num|number)?")

_TABLES = (".csv", ".parquet", ".tsv", ".json", ".jsonl")


def _index(file: Path, split: str | None, columns: Columns) -> Layout:
    where = str(file) if split is None else f"{file}#{split}"
    return Layout(
        "index of people", where, file.parent, (file,), lambda records: _read_index(records, file, split, columns)
    )


def _named(table: Table, columns: Columns) -> dict[str, str]:
    """Return the columns of a table by what they are looked for by: as `columns` says, else by name in any case.

    Raises UserError for two of one name.
    """
    found = dict(columns)
    for name in table.content.columns:
        own = name.strip().lower()
        if own in columns or own not in COLUMNS or name in columns.values():
            continue
        if own in found:
            raise UserError(table.where, f"the column {own} more than once", "each column once")
        found[own] = name
    return found


def _open_index(file: Path, split: str | None, columns: Columns) -> TableRows:
    """Open an index. Raises UserError where a column is missing, or holds neither text nor numbers."""
    table = open_table(file, split, at_once=4096)
    rows = table.take(
        {name: (name,) for name in COLUMNS}, _named(table, columns), [name for name in COLUMNS if name not in _NEEDED]
    )
    if rows.column("path") is None and rows.column("text") is None:
        found = f"columns {', '.join(table.content.columns)}"[:300]
        raise UserError(str(file), found, "person, modality, path or text; and where known camera, of, split, role")
    for name in filter(None, map(rows.column, COLUMNS)):
        column = table.content.columns.get(name)
        if column is not None and column.holds not in ("text", "numbers") and column.type != "null":
            raise UserError(str(file), f"column {name} of type {column.type}"[:200], "text or numbers")
    return rows


def _read_index(records: Records, file: Path, split: str | None, columns: Columns) -> None:
    rows = _open_index(file, split, columns)
    named = [name.strip().lower() for name in rows.table.content.columns]
    if rows.column("camera") is None and (alike := [name for name in named if _CAMERAS.fullmatch(name)]):
        records.leave_out("columns that may be cameras (`data.columns: {camera: NAME}` reads one)", alike)
    captions: list[tuple[str, str, str, str, str, int]] = []
    for row in rows.read(*COLUMNS):
        where = row.where
        path, person, camera, word, text, of, _, role_word = (_cell(where, n, row.cells.get(n)) for n in COLUMNS)
        if not word:
            raise UserError(where, "no modality", f"one of {', '.join(interfaces.MODALITIES)}")
        modality = modalities.code(word)
        if modality is None:
            raise UserError(where, f"modality {word!r}"[:200], f"one of {', '.join(interfaces.MODALITIES)}")
        role = ROLES.get(role_word.lower())
        if role is None:
            raise UserError(where, f"role {role_word!r}"[:200], "query, gallery, or nothing")
        if modality == TEXT:
            if path:
                raise UserError(where, f"a caption with the path {path[:200]!r}", "its image in the column `of`")
            if not text:
                raise UserError(where, "no caption", "words in the column `text`, as the modality says")
            # The image may come further down, so captions wait.
            captions.append((where, text, person, camera, of, role))
        else:
            if of:
                found = f"an image that refers to the image {of[:200]!r}"
                raise UserError(where, found, "`of` in rows of captions alone")
            _add_image(records, where, path, person, camera, modality, text, role)
    for caption in captions:
        _add_caption(records, file, *caption)


def _add_image(
    records: Records, where: str, path: str, person: str, camera: str, modality: int, text: str, role: int
) -> None:
    """Add an image, and the caption beside it."""
    if not path:
        raise UserError(where, "no path", f"the {interfaces.MODALITIES[modality]} image of this row")
    who = None if person == DISTRACTOR else person
    row = records.picture(where, path, who, modality, camera, role)
    if not text:
        return
    if modality != RGB:
        found = f"a caption beside an image of modality {interfaces.MODALITIES[modality]}"
        remedy = "write it in a row of its own, with modality text"
        raise UserError(where, found, "captions beside rgb images", remedy)
    if who is None:
        records.leave_out("captions of distractors", [path])
    else:
        records.caption(where, f"{path}#text", text, who, camera, role, row)


def _add_caption(
    records: Records, file: Path, where: str, text: str, person: str, camera: str, of: str, role: int
) -> None:
    """Add a caption of a row of its own, of the image that it names."""
    if not of:
        records.caption(where, where.removeprefix(f"{file.parent}{os.sep}"), text, person, camera, role)
        return
    row = records.number.get(of)
    if row is None or records.modality[row] != RGB:
        raise UserError(where, f"a caption of {of[:200]!r}", "the path of an rgb image of this index and split")
    if records.person[row] != person:
        found = f"a caption of {person[:100]!r} for an image of {records.person[row] or DISTRACTOR!r}"
        raise UserError(where, found, f"one person, as in {records.where[row]}")
    records.caption(where, f"{of}#text", text, person, camera, role, row)


def _cell(where: str, column: str, value: Cell) -> str:
    """Return a cell as text, empty where it is missing; whole numbers of JSON and parquet as their digits."""
    if value is None or value != value:  # NaN alone differs from itself
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UserError(where, f"{column} {value!r}"[:200], "text or a whole number")
    return str(value).strip()
