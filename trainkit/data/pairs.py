"""Verification sets: pictures and pairs of them, as pairs.csv or in InsightFace's `.bin`."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trainkit.data.protocols import Pairs
from trainkit.data.record import Record, Source
from trainkit.errors import UserError

COLUMNS = ["path_a", "path_b", "same"]
_SAME = {"1": True, "0": False, "true": True, "false": False}


def inside(root: Path, name: str, where: str) -> Path:
    """The file `name` in the folder `root`. Raises UserError when the name leads out of it."""
    path = root / name
    if not name or "\0" in name or Path(name).is_absolute() or not path.resolve().is_relative_to(root.resolve()):
        raise UserError(where, repr(name)[:200], f"a path inside {root}")
    return path


def read_csv(file: Path) -> tuple[Source, Pairs]:
    """`path_a,path_b,same` with paths relative to the folder of the file; same is 1 or 0. Each picture is read once."""
    rows: dict[str, int] = {}
    first, second, same = [], [], []
    try:
        with file.open(newline="", encoding="utf-8-sig") as text:
            lines = csv.reader(text, strict=True)
            header = next(lines, [])
            if header != COLUMNS:
                raise UserError(f"{file}, line 1", ",".join(header)[:200] or "nothing", ",".join(COLUMNS))
            for line in lines:
                where = f"{file}, line {lines.line_num}"
                if len(line) != 3 or line[2].strip().lower() not in _SAME:
                    raise UserError(where, ",".join(line)[:200] or "an empty line", "two paths and 1 or 0")
                for name, column in ((line[0], first), (line[1], second)):
                    if name not in rows:
                        inside(file.parent, name, where)
                    column.append(rows.setdefault(name, len(rows)))
                same.append(_SAME[line[2].strip().lower()])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(str(file), f"cannot be read ({error})", "a CSV file of pairs") from None
    if not same:
        raise UserError(str(file), "no pairs", "at least one line below the header")
    names = list(rows)

    def records() -> Iterator[Record]:
        for row, name in enumerate(names):
            path = file.parent / name
            yield Record(name, -1, path, f"{path} (picture {row} of {file.name})")

    files = (file, *(file.parent / name for name in names))
    return Source("pairs", str(file), len(names), records, files), _pairs(first, second, same)


def _pairs(first: list[int], second: list[int], same: list[bool]) -> Pairs:
    return Pairs(np.asarray(first, np.int64), np.asarray(second, np.int64), np.asarray(same, bool))
