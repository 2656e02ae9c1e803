"""Clinical tables: a CSV with a row for each patient, joined with the cases of a set of volumes."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path

from trainkit.data import folders
from trainkit.errors import UserError, few

PATIENT_COLUMNS = ("Id", "id", "ID", "patient", "patient_id")
"""Names of the column of a clinical table that holds the patient; else it is the first."""

TEXT_LIMIT = 64 << 20
"""Largest `dataset.json` or table that is read, in bytes."""

Value = str | float | None

_EMPTY = {"", "na", "n/a", "nan", "none", "null"}


def rows_of(patients: Sequence[str], file: Path) -> tuple[list[dict[str, Value]], list[str]]:
    """Find the row of each patient in a table; also a sentence about those that have none."""
    columns, rows = read(file)
    loose: dict[str, list[str]] = {}
    for name in rows:
        loose.setdefault(_loosely(name), []).append(name)
    found, without = [], []
    for patient in patients:
        # A spreadsheet makes 7 of 007; where only one row can be meant, it is taken.
        also = loose.get(_loosely(patient), [])
        name = patient if patient in rows else also[0] if len(also) == 1 else None
        if name is None:
            without.append(patient)
        found.append(rows[name] if name is not None else dict.fromkeys(columns))
    if len(without) == len(patients):
        said = f"no row of any of the {len(patients)} patients ({few(without)}), but of {few(rows)}"
        raise UserError(str(file), said, f"patients in a column {', '.join(PATIENT_COLUMNS[:2])} or the first")
    absent = sorted(set(without))
    return found, [f"{file.name}: no row of {len(absent)} patients: {few(absent)}"] if absent else []


def _loosely(name: str) -> str:
    name = name.strip().casefold()
    if name.endswith(".0") and name[:-2].isdigit():
        name = name[:-2]
    return name.lstrip("0") or "0" if name.isdigit() else name


def read(file: Path) -> tuple[list[str], dict[str, dict[str, Value]]]:
    """Read a table: its columns without that of the patients, and the row of each patient."""
    if file.suffix.lower() in (".xlsx", ".xls", ".ods"):
        raise UserError(str(file), "a spreadsheet", "a CSV table", "save it as CSV (UTF-8)")
    text = text_of(file, "a CSV table of patients")
    comma = max(",;\t", key=text.split("\n", 1)[0].count)
    rows: dict[str, dict[str, Value]] = {}
    try:
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=comma, strict=True)
        header = [name.strip() for name in next(lines, [])]
        if not any(header) or len(set(header)) < len(header) or not all(header):
            raise UserError(f"{file}, line 1", ",".join(header)[:200] or "nothing", "different names of columns")
        key = next((header.index(name) for name in PATIENT_COLUMNS if name in header), 0)
        columns = [name for place, name in enumerate(header) if place != key]
        for line in lines:
            if not any(cell.strip() for cell in line):
                continue
            where = f"{file}, line {lines.line_num}"
            if len(line) != len(header):
                raise UserError(where, f"{len(line)} columns", f"{len(header)}, as in its first line")
            name = line[key].strip()
            if not name or name in rows:
                found = f"a second row of patient {name!r}" if name else f"no {header[key]}"
                raise UserError(where, found[:200], "one row for each patient")
            cells = (cell for place, cell in enumerate(line) if place != key)
            rows[name] = dict(zip(columns, map(_value, cells), strict=True))
    except csv.Error as error:
        raise UserError(str(file), f"cannot be read ({error})", "a CSV table of patients") from None
    if not rows:
        raise UserError(str(file), "no rows", "a row for each patient")
    return columns, rows


def _value(cell: str) -> Value:
    """Read a cell as a number where it is one, None where it says nothing."""
    text = cell.strip()
    if text.lower() in _EMPTY:
        return None
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) and "_" not in text else text


def text_of(file: Path, expected: str) -> str:
    """Read a file of at most `TEXT_LIMIT` bytes."""
    try:
        if (length := folders.size_of(file, str(file), expected)) > TEXT_LIMIT:
            raise UserError(str(file), f"{length} bytes", f"at most {TEXT_LIMIT}")
        return file.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(str(file), "not UTF-8", expected, "save it as UTF-8") from None
    except (OSError, ValueError) as error:
        raise UserError(str(file), f"cannot be read ({getattr(error, 'strerror', None) or error})", expected) from None
