"""Tables of people that hold their images, such as data sets of the hub: written once as image files with an index."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

from trainkit.data import cache
from trainkit.data.cache import Progress
from trainkit.data.formats.table_files import Cell
from trainkit.data.people import modalities
from trainkit.data.record import Columns
from trainkit.data.sources import LABEL_COLUMNS
from trainkit.data.table import IMAGE_COLUMNS, TableRows, is_table, open_table
from trainkit.errors import UserError
from trainkit.interfaces import MODALITIES

VERSION = 2
"""Part of the folder's key; raised with any change to what is written."""

_OPTIONAL = ("camera", "modality", "text", "role")
COLUMNS = {
    "image": IMAGE_COLUMNS,
    "person": ("person", *(name for name in LABEL_COLUMNS if name != "person")),
    **{name: (name,) for name in (*_OPTIONAL, "split")},
}
_ENDS = {
    b"\xff\xd8\xff": ".jpg",
    b"\x89PNG": ".png",
    b"BM": ".bmp",
    b"RIFF": ".webp",
    b"II*\0": ".tif",
    b"MM\0*": ".tif",
}


def holds_images(path: Path) -> bool:
    """Return True for a table with the images in it: a saved set, shards, metadata, parquet.

    Raises UserError where a parquet file cannot be read.
    """
    if path.is_dir() or path.suffix.lower() != ".parquet":
        return is_table(path) and (path.is_dir() or path.suffix.lower() == ".tar")
    return any(column.holds == "images" for column in open_table(path).content.columns.values())


def folder(place: Path | str, split: str | None, columns: Columns) -> Path:
    """Return a folder with `index.csv` and the images of a table, made once in the cache.

    The table is that of a set of the hub, which must be downloaded already, or of a file or folder. It has a column of
    images and one of people (`person`, else one of `LABEL_COLUMNS`), and where known `camera`, `modality` (rgb without
    it), `text`, a caption of its image, and `role`. `columns` maps other names.

    Raises UserError where a column or a split is missing, or a cell holds no image, with its row.
    """
    rows = open_table(place, split).take(COLUMNS, columns, (*_OPTIONAL, "split"))
    parts = [(part, rows.column(part)) for part in COLUMNS]
    made = cache.place(f"people-{cache.key(['people', VERSION, rows.where, parts], rows.table.files)}")
    what = f"extracting the images of {rows.table.where}"
    cache.make_once(made, lambda it: (it / "index.csv").is_file(), lambda tell: _write(rows, made, tell), what)
    return made


def _write(rows: TableRows, to: Path, on_progress: Progress) -> None:
    aside = to.with_name(f".{to.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        (aside / "images").mkdir(parents=True)
        with open(aside / "index.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("path", "person", "modality", "camera", "text", "role"))
            for done, (row, _, where, cells) in enumerate(rows.read("image", "person", *_OPTIONAL), start=1):
                on_progress(done, rows.size or 0)
                data = rows.picture(cells["image"], where)
                data = data.read_bytes() if isinstance(data, Path) else data
                end = next((end for magic, end in _ENDS.items() if data.startswith(magic)), None)
                if end is None:
                    raise UserError(where, "bytes of no known image format", "JPEG, PNG, BMP, WebP or TIFF")
                name = f"images/{row:08d}{end}"
                (aside / name).write_bytes(data)
                modality = _cell(cells.get("modality")) or "rgb"
                if modalities.code(modality) is None:
                    raise UserError(where, f"modality {modality!r}"[:200], f"one of {', '.join(MODALITIES)}")
                rest = (modality, *(_cell(cells.get(key)) for key in ("camera", "text", "role")))
                writer.writerow((name, _person(rows, cells["person"], where), *rest))
        shutil.rmtree(to, ignore_errors=True)
        aside.rename(to)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _person(rows: TableRows, value: Cell, where: str) -> str:
    """Return the name of a person; the number of a ClassLabel stands for its name."""
    if isinstance(value, bool) or not isinstance(value, int | str) or not str(value).strip():
        raise UserError(where, f"{rows.column('person')}: {value!r}"[:200], "a whole number or a name")
    names = rows.names("person")
    return str(value) if names is None or not isinstance(value, int) or not 0 <= value < len(names) else names[value]


def _cell(value: Cell) -> str:
    return "" if value is None or value != value else str(value)  # NaN alone differs from itself
