"""Tables of people that hold their images, such as data sets of the hub: written once as image files with an index."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainkit.data import cache, hub
from trainkit.data.cache import Progress
from trainkit.data.formats import arrow_tables, dataset_files
from trainkit.data.formats.arrow_tables import LABEL_COLUMNS, Table
from trainkit.data.people import modalities
from trainkit.data.record import Columns
from trainkit.errors import UserError
from trainkit.interfaces import MODALITIES

VERSION = 2
"""Part of the folder's key; raised with any change to what is written."""

_PERSON = ("person", *(name for name in LABEL_COLUMNS if name != "person"))
_OPTIONAL = ("camera", "modality", "text", "role")
_ENDS = {
    b"\xff\xd8\xff": ".jpg",
    b"\x89PNG": ".png",
    b"BM": ".bmp",
    b"RIFF": ".webp",
    b"II*\0": ".tif",
    b"MM\0*": ".tif",
}


def holds_images(path: Path) -> bool:
    """Return True for what `datasets` reads with the images in it: a saved set, shards, metadata, parquet.

    Raises UserError where a parquet file cannot be read.
    """
    if path.is_dir():
        return arrow_tables.is_saved(path) or dataset_files.is_laid_out(path)
    if path.suffix.lower() != ".parquet":
        return path.suffix.lower() == ".tar"
    table, _, _ = arrow_tables.open_table(path)
    return any(arrow_tables.holds_pictures(field.type) for field in table.schema)


def folder(text: str, place: Path | None, split: str | None, columns: Columns) -> Path:
    """Return a folder with `index.csv` and the images of a table, made once in the cache.

    The table is that of a hub name `text`, which must be downloaded already, or of the file or folder `place`. It has a
    column of images and one of people (`person`, else one of `arrow_tables.LABEL_COLUMNS`), and where known `camera`,
    `modality` (rgb without it), `text`, a caption of its image, and `role`. `columns` maps other names.

    Raises UserError where a column or a split is missing, or a cell holds no image, with its row.
    """
    if place is None:
        table, split, whole = hub.open_table(text)
    elif arrow_tables.is_saved(place) or place.suffix.lower() == ".parquet":
        table, split, whole = arrow_tables.open_table(place, split)
    else:
        table, split, whole = dataset_files.open_table(place, split)
    table = table.mapped(columns)
    image = arrow_tables.image_column(str(table.path), table.schema, table.open is not None)
    person = next((name for name in _PERSON if name in table.schema.names), None)
    if person is None:
        found = f"columns {', '.join(table.schema.names)}"[:300]
        raise UserError(str(table.path), found, f"people in one of {_PERSON}", arrow_tables.MAP.format("person"))
    chosen, _ = arrow_tables.rows_of(table, split, whole)
    made_of = ["people", VERSION, str(table.path), split, chosen, image, person, sorted((columns or {}).items())]
    made = cache.place(f"people-{cache.key(made_of, table.files)}")
    named = {"image": image, "person": person}
    named |= {name: name for name in _OPTIONAL if name in table.schema.names}
    what = f"extracting the images of {table.path}"
    cache.make_once(
        made, lambda it: (it / "index.csv").is_file(), lambda tell: _write(table, chosen, named, made, tell), what
    )
    return made


def _write(table: Table, split: str | None, named: Mapping[str, str], to: Path, on_progress: Progress) -> None:
    aside = to.with_name(f".{to.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        (aside / "images").mkdir(parents=True)
        with open(aside / "index.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("path", "person", "modality", "camera", "text", "role"))
            for done, (row, cells) in enumerate(_rows(table, split, named), start=1):
                on_progress(done, 0)
                where = f"{table.path}, row {row}"
                data = table.picture(cells["image"], where)
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
                writer.writerow((name, _person(table, named["person"], cells["person"], where), *rest))
        shutil.rmtree(to, ignore_errors=True)
        aside.rename(to)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _rows(table: Table, split: str | None, named: Mapping[str, str]) -> Iterator[tuple[int, dict[str, object]]]:
    """Number and cells of each row of a split."""
    wanted = [*named.values(), *([arrow_tables.SPLIT_COLUMN] if split is not None else [])]
    row = -1
    for batch in table.batches(wanted):
        for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            row += 1
            if split is None or values[-1] == split:
                yield row, dict(zip(named, values, strict=False))


def _person(table: Table, column: str, value: object, where: str) -> str:
    """Name of a person; the number of a ClassLabel stands for its name."""
    if isinstance(value, bool) or not isinstance(value, int | str) or not str(value).strip():
        raise UserError(where, f"{column}: {value!r}"[:200], "a whole number or a name")
    names = table.classes.get(column)
    return str(value) if names is None or not isinstance(value, int) or not 0 <= value < len(names) else names[value]


def _cell(value: object) -> str:
    return "" if value is None or value != value else str(value)  # NaN alone differs from itself
