"""Sets of people as others lay them out: records of who was seen, by which camera, in which modality.

A reader says which annotation files a set has, and turns them into records one by one. Here that of an index; those of
published sets are in `layouts`.
"""

from __future__ import annotations

import importlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainkit import interfaces
from trainkit.data import hub, sources
from trainkit.data.formats import table_files
from trainkit.data.formats.table_files import SUFFIXES, Cell
from trainkit.data.people import image_tables, layouts, modalities
from trainkit.data.people.records import DISTRACTOR, EITHER, GALLERY, QUERY, Layout, Rows
from trainkit.data.record import Columns
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
        return _table(image_tables.folder(text, None, columns) / "index.csv", None, {})
    if text.startswith("sample:"):
        if text != SAMPLE:
            raise UserError("data", f"no built-in set of people {text!r}"[:200], SAMPLE)
        path, split = importlib.import_module("trainkit.data.synthetic.people").folder() / part, None
    elif text.startswith(DERIVED):
        path = importlib.import_module("trainkit.data.synthetic.derived_modalities").folder(
            locate(text.removeprefix(DERIVED))
        )
        split = None
    else:
        path, split = sources.split_of(locate(text))
    if not path.exists():
        raise UserError(str(path), "does not exist", "a set of people")
    if path.is_file():
        if image_tables.holds_images(path):
            return _table(image_tables.folder(path, split, columns) / "index.csv", None, {})
        if path.suffix.lower() not in _TABLES:
            raise UserError(str(path), "a file of unknown kind", f"an index, {few(_TABLES)}, or a folder")
        return _table(path, split, columns)
    if (index := index_in(path)) is not None:
        return _table(index, split, columns)
    found = layouts.recognise(path, split)
    if found is None and image_tables.holds_images(path):
        return _table(image_tables.folder(path, split, columns) / "index.csv", None, {})
    if columns:
        raise UserError("data.columns", f"given for {text}"[:200], "columns of an index or a table", "leave it out")
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
    try:
        header, _ = _lines(file, {})
    except UserError:
        return False
    return {"person", "modality"} <= {*header}


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

_CAMERAS = re.compile(r"cam(era)?[ _-]?(id|idx|index|name|no|nr|num|number)?")

_TABLES = (".csv", ".parquet", ".tsv", ".json", ".jsonl")


def _table(file: Path, split: str | None, columns: Columns) -> Layout:
    where = str(file) if split is None else f"{file}#{split}"

    def read(rows: Rows) -> None:
        _read_table(rows, file, split, columns)

    return Layout("index of people", where, file.parent, (file,), read)


def _read_table(rows: Rows, file: Path, split: str | None, columns: Columns) -> None:
    header, lines = _lines(file, columns)
    if "person" not in header or "modality" not in header or not {"path", "text"} & set(header):
        expected = "person, modality, path or text; and where known camera, of, split, role"
        raise UserError(str(file), f"columns {', '.join(header)}"[:300], expected)
    if "camera" not in header and (alike := [name for name in header if _CAMERAS.fullmatch(name)]):
        rows.leave_out("columns that may be cameras (`data.columns: {camera: NAME}` reads one)", alike)
    chosen = None
    if "split" in header:
        lines = list(lines)
        chosen = _chosen_split(file, split, Counter(line[COLUMNS.index("split")] for _, line in lines))
    elif split is not None:
        raise UserError(f"{file}#{split}", "an index without a column `split`", "its path alone")
    captions: list[tuple[str, str, str, str, str, int]] = []
    for where, (path, person, camera, word, text, of, own_split, role_word) in lines:
        if chosen is not None and own_split != chosen:
            continue
        if not word:
            raise UserError(where, "no modality", f"one of {', '.join(interfaces.MODALITIES)}")
        modality = modalities.code(word)
        if modality is None:
            raise UserError(where, f"modality {word!r}"[:200], f"one of {', '.join(interfaces.MODALITIES)}")
        role = ROLES.get(role_word.lower())
        if role is None:
            raise UserError(where, f"role {role_word!r}"[:200], "query, gallery, or nothing")
        who = None if person == DISTRACTOR else person
        if modality == TEXT:
            if path:
                raise UserError(where, f"a caption with the path {path[:200]!r}", "its image in the column `of`")
            if not text:
                raise UserError(where, "no caption", "words in the column `text`, as the modality says")
            # The image may come further down, so captions wait.
            captions.append((where, text, person, camera, of, role))
            continue
        if not path:
            raise UserError(where, "no path", f"the {interfaces.MODALITIES[modality]} image of this row")
        if of:
            raise UserError(where, f"an image that refers to the image {of[:200]!r}", "`of` in rows of captions alone")
        row = rows.picture(where, path, who, modality, camera, role)
        if text:
            if modality != RGB:
                found = f"a caption beside an image of modality {interfaces.MODALITIES[modality]}"
                remedy = "write it in a row of its own, with modality text"
                raise UserError(where, found, "captions beside rgb images", remedy)
            if who is None:
                rows.leave_out("captions of distractors", [path])
                continue
            rows.caption(where, f"{path}#text", text, who, camera, role, row)
    for where, text, person, camera, of, role in captions:
        if not of:
            rows.caption(where, where.removeprefix(f"{file.parent}{os.sep}"), text, person, camera, role)
            continue
        row = rows.number.get(of)
        if row is None or rows.modality[row] != RGB:
            raise UserError(where, f"a caption of {of[:200]!r}", "the path of an rgb image of this index and split")
        if rows.person[row] != person:
            found = f"a caption of {person[:100]!r} for an image of {rows.person[row] or DISTRACTOR!r}"
            raise UserError(where, found, f"one person, as in {rows.where[row]}")
        rows.caption(where, f"{of}#text", text, person, camera, role, row)


_Line = Sequence[str]
"""Cells in the order of `COLUMNS`."""


def _lines(file: Path, columns: Columns) -> tuple[list[str], Iterator[tuple[str, _Line]]]:
    """Return the columns of an index, and its rows with their places, cells in the order of `COLUMNS`.

    Cells of CSV are text as they stand: `007` is a name. Elsewhere whole numbers stand for their digits.
    """
    if (delimiter := SUFFIXES[file.suffix.lower()]) != "":
        names, every = table_files.csv_rows(file, delimiter)
        header = _header(file, names, columns)
        at = [header.index(name) for name in COLUMNS if name in header]
        rows = ((where, [line[place] for place in at]) for where, line in every)
    else:
        content = table_files.open_rows([file], at_once=4096)
        names = list(content.columns)
        header = _header(file, names, columns)
        wanted = [names[header.index(name)] for name in COLUMNS if name in header]
        for name in wanted:
            if content.columns[name].holds not in ("text", "numbers"):
                raise UserError(
                    str(file), f"column {name} of type {content.columns[name].type}"[:200], "text or numbers"
                )
        rows = content.read(wanted)
    own = [name for name in COLUMNS if name in header]

    def lines() -> Iterator[tuple[str, _Line]]:
        for where, cells in rows:
            found = {name: _cell(where, name, cell) for name, cell in zip(own, cells, strict=True)}
            yield where, [found.get(name, "") for name in COLUMNS]

    return header, lines()


def _header(file: Path, names: Sequence[str], columns: Columns) -> list[str]:
    """Return the columns by the names that they are looked for by; those of `columns` are called otherwise here."""
    names = [name.strip() for name in names]
    header = ["" if name.lower() in columns else name.lower() for name in names]
    for own, theirs in columns.items():
        if theirs not in names:
            expected = f"one of its columns: {few(names, 20)}"[:300]
            raise UserError(str(file), f"no column {theirs!r}"[:200], expected)
        header[names.index(theirs)] = own
    twice = [name for name, count in Counter(header).items() if count > 1 and name in COLUMNS]
    if twice:
        raise UserError(str(file), f"the column {twice[0]} more than once", "each column once")
    return header


def _cell(where: str, column: str, value: Cell) -> str:
    """Return a cell as text, empty where it is missing."""
    if value is None or value != value:  # NaN alone differs from itself
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise UserError(where, f"{column} {value!r}"[:200], "text or a whole number")
    return str(value).strip()


def _chosen_split(file: Path, split: str | None, counts: Counter[str]) -> str | None:
    """Return the value of the column `split` whose rows are taken, or None for all."""
    if counts.get(""):
        raise UserError(str(file), f"{counts['']} rows whose split is empty", "a split in every row")
    if split is None:
        if len(counts) < 2:
            return None
        split = "train"
    if split not in counts:
        raise UserError(f"{file}#{split}", f"no such split; available: {few(sorted(counts))}", "one of these after #")
    return split
