"""Sets of people that a recipe names: an index, which is read here, a published layout (`layouts`), a built-in set."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from trainkit.data import hub, sources
from trainkit.data.formats import table_files
from trainkit.data.formats.table_files import SUFFIXES, Cell
from trainkit.data.people import layouts, modalities
from trainkit.data.people.records import DISTRACTOR, EITHER, GALLERY, LONGEST, QUERY, Records
from trainkit.data.record import Columns
from trainkit.data.table import open_table
from trainkit.errors import UserError, few
from trainkit.interfaces import MODALITIES, RGB, TEXT
from trainkit.paths import locate

SAMPLE = "sample:people"
DERIVED = "derived:"

ROLES = {"": EITHER, "query": QUERY, "gallery": GALLERY}

COLUMNS = ("path", "person", "camera", "modality", "text", "of", "split", "role")
"""Columns of an index. `person` and `modality` must be there, and `path` or `text`; others are left alone.

`path` is below the folder of the index. `text` beside an rgb image is a caption of it, and a record of its own; a row
of modality `text` has no path, and `of` names the rgb image that it describes, where there is one. `person` -1 is
a distractor of the gallery. `role` is empty, `query` or `gallery`.
"""

_NEEDED = ("person", "modality")
_TABLES = (".csv", ".parquet", ".tsv", ".json", ".jsonl")


def find(text: str, part: str = "train", columns: Columns | None = None) -> Records:
    """Read the set that a recipe names: a folder of a known layout, an index, `sample:people` or `derived:FOLDER`.

    `part` says which part of a built-in set is meant, and `columns` which columns of an index, by their names in
    `COLUMNS`. Raises UserError where there is none, none of this kind, and at its first error, naming file and row.
    """
    split = None
    if hub.is_hub(text):
        raise UserError(text[:200], "a set of the hub", "files", "save its images as files, and write an index.csv")
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
    if (index := path if path.is_file() else index_in(path)) is not None:
        if index.suffix.lower() not in _TABLES:
            raise UserError(str(path), "a file of unknown kind", f"an index, {few(_TABLES)}, or a folder")
        where = str(index) if split is None else f"{index}#{split}"
        records = Records("index of people", where, index.parent, (index,))
        _read_index(records, index, split, columns)
        return records
    if columns:
        raise UserError("data.columns", f"given for {text}"[:200], "columns of an index", "leave it out")
    found = layouts.read(path, split)
    if found is None:
        raise UserError(str(path), "a folder of unknown layout", layouts.KNOWN)
    return found


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
    return {*_NEEDED} <= {*names}


def missing(text: str) -> str | None:
    """Return a sentence about a set that a recipe names and that is not there yet."""
    return None if text.startswith("sample:") else sources.missing(text.removeprefix(DERIVED))


def _read_index(records: Records, file: Path, split: str | None, columns: Columns | None) -> None:
    table = open_table(file, split, at_once=4096)
    usual = {name: (name,) for name in COLUMNS}
    rows = table.take(usual, columns, [name for name in COLUMNS if name not in _NEEDED])
    if rows.column("path") is None and rows.column("text") is None:
        found = f"columns {', '.join(table.content.columns)}"[:300]
        raise UserError(str(file), found, "person, modality, path or text; and where known camera, of, split, role")
    captions: list[tuple[str, dict[str, str]]] = []
    for row in rows.read(*COLUMNS):
        cells = {name: _cell(row.where, name, row.cells.get(name)) for name in COLUMNS}
        if cells["camera"] == "-1":  # as lists of cameras write one that is not known
            cells["camera"] = ""
        modality, role = modalities.code(cells["modality"]), ROLES.get(cells["role"].lower())
        if modality is None:
            raise UserError(row.where, f"modality {cells['modality']!r}"[:200], f"one of {', '.join(MODALITIES)}")
        if role is None:
            raise UserError(row.where, f"role {cells['role']!r}"[:200], "query, gallery, or nothing")
        if modality == TEXT:
            # The image may come further down, so captions wait.
            captions.append((row.where, cells))
        else:
            _add_image(records, row.where, cells, modality, role)
    for where, cells in captions:
        _add_caption(records, file, where, cells)


def _add_image(records: Records, where: str, cells: dict[str, str], modality: int, role: int) -> None:
    """Add an image, and the caption beside it."""
    path, person, camera, text = (cells[name] for name in ("path", "person", "camera", "text"))
    if not path:
        raise UserError(where, "no path", f"the {MODALITIES[modality]} image of this row")
    if cells["of"]:
        raise UserError(where, f"an image of the image {cells['of'][:200]!r}", "`of` in rows of captions alone")
    if text and (modality != RGB or person == DISTRACTOR):
        expected = "captions beside rgb images of people, others in rows of modality text"
        raise UserError(where, f"a caption of {person[:100]!r} beside an image of {MODALITIES[modality]}", expected)
    who = None if person == DISTRACTOR else person
    row = records.picture(where, path, who, modality, camera, role)
    if text:
        records.caption(where, f"{path}#text", text, who, camera, role, row)


def _add_caption(records: Records, file: Path, where: str, cells: dict[str, str]) -> None:
    """Add a caption of a row of its own, of the image that it names."""
    person, of, row = cells["person"], cells["of"], records.number.get(cells["of"])
    if cells["path"]:
        raise UserError(where, f"a caption with the path {cells['path'][:200]!r}", "its image in the column `of`")
    if of and (row is None or (records.every[row].modality, records.every[row].person) != (RGB, person)):
        expected = "the path of an rgb image of the same person, in this index and split"
        raise UserError(where, f"a caption of {person[:100]!r} for the image {of[:200]!r}", expected)
    id = f"{of}#text" if of else where.removeprefix(f"{file.parent}{os.sep}")
    role = ROLES[cells["role"].lower()]
    who = None if person == DISTRACTOR else person
    records.caption(where, id, cells["text"], who, cells["camera"], role, -1 if row is None else row)


def _cell(where: str, column: str, value: Cell) -> str:
    """Return a cell as text, empty where it is missing; whole numbers of JSON and parquet as their digits."""
    if value is None or value != value:  # NaN alone differs from itself
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UserError(where, f"{column} {value!r}"[:200], "text or a whole number")
    if len(text := str(value)) > LONGEST:  # before it waits: a parquet file may hold one long text for every row
        raise UserError(where, f"a record of more than {LONGEST:,} characters", "shorter names and captions")
    return text.strip()
