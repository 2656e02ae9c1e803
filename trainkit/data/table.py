"""Read tables: files in which a row is an image, with its class, its mask or whatever else is said of it.

| form                                            | a split is                                  |
|-------------------------------------------------|---------------------------------------------|
| CSV, TSV, JSON, JSON lines, with paths in cells | a value of the column `split`               |
| images with `metadata.csv`, `.jsonl`, `.parquet`| a folder with metadata of its own           |
| parquet, with images in cells                   | files by their names, or a value of `split` |
| a set saved by Hugging Face `datasets`          | a folder of a DatasetDict                   |
| webdataset shards                               | files by their names                        |
| a set of the hub                                | as its card or the names of files say       |

All are read a row at a time, by `formats.table_files`, and shards by `formats.webdataset`; `datasets` finds the
files of sets of the hub and reads none.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from trainkit.data import folders, hub, image_folder, source_splits
from trainkit.data.formats import table_files, webdataset
from trainkit.data.formats.table_files import PATH_COLUMN, SUFFIXES, Cell, Content
from trainkit.data.record import Columns
from trainkit.errors import UserError, few

IMAGE_COLUMNS = ("image", "img", "jpg", "png", "image_bytes", "bytes", "jpeg", "webp", PATH_COLUMN, "path")
SPLIT_COLUMN = "split"
SHARD = ".tar"
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
REMEDY = "set columns: {{{0}: NAME}} in the block `data`, or --columns {0}=NAME"

_IMAGES = ("image", "mask")
"""Parts that are images."""
_HEAD = 1 << 16
_JSON_LIMIT = 64 << 20
_KINDS = {".csv": "CSV", ".tsv": "CSV", ".parquet": "parquet", SHARD: "webdataset"}
_WITH_PATHS = ("CSV", "JSON", "image folder")
"""Kinds whose cells name files."""


class Row(NamedTuple):
    """A row of a table, as its columns are taken."""

    number: int
    """Its place in the table, from 0."""
    id: str
    """Its name: that of its image, or `row 3`."""
    where: str
    cells: dict[str, Cell]
    """By what the columns are taken for; None where a row has nothing."""


@dataclass(frozen=True)
class Table:
    """The rows of some files, not read yet."""

    kind: str
    where: str
    content: Content
    files: tuple[Path, ...] = ()
    root: Path | None = None
    """Where the paths in cells begin; None where images are in the table itself."""
    boundary: Path | None = None
    """The folder that the files they name have to be in, links followed; None: the root."""
    split: str | None = None
    """The split that was asked for."""
    part: str | None = None
    """What the rows are for, where no split was asked for and it is not training."""
    whole: bool = False
    """The files are those of the split: no column need say so."""

    def take(
        self, parts: Mapping[str, Sequence[str]], columns: Columns | None = None, absent: Iterable[str] = ()
    ) -> TableRows:
        """Choose a column for each of `parts`: as `columns` says, else the first of its usual names that is there.

        An image is in a column that may hold one. A column `json.who` is the field `who` of the column `json`. Raises
        UserError where there is none, but for parts that may be `absent`, and where the split is not there.
        """
        there, given = self.content.columns, dict(columns or {})
        for name in given.values():
            if name not in there and name.split(".")[0] not in there:
                raise UserError(self.where, f"no column {name!r}"[:200], f"one of its columns: {few(there, 20)}"[:300])
        own = {part: [name] if name in there else name.split(".") for part, name in given.items()}
        for part, names in parts.items():
            fits = [name for name in names if name in there and name not in given.values()]
            fits = [name for name in fits if part not in _IMAGES or self._may_hold_images(name)]
            if part not in own and fits:
                own[part] = fits[:1]
            elif part not in own and part not in absent:
                found = ", ".join(f"{name} ({column.type})" for name, column in there.items())
                raise UserError(
                    self.where, f"columns {found}"[:300], f"{part} in one of {', '.join(names)}", REMEDY.format(part)
                )
        return TableRows(self, own, tuple(sorted(given.items())))

    def _may_hold_images(self, name: str) -> bool:
        holds = self.content.columns[name].holds
        return holds == "images" or (holds == "text" and self.root is not None)

    def find(self, name: str, where: str) -> Path:
        """Return the file that a cell names. Raises UserError for one that lies elsewhere."""
        root = self.root or Path()
        file = Path(os.path.normpath(root / name))
        if "/" not in name and not os.path.lexists(file) and (paths := self._images.get(name)):
            if len(paths) > 1:
                raise UserError(where, f"{name[:200]!r} is the name of {len(paths)} images: {few(paths)}", "paths")
            file = root / paths[0]
        if not file.is_relative_to(root) or folders.leads_out(self.boundary or root, str(file)):
            raise UserError(where, f"the path {name[:300]!r}", f"a path below {root}")
        return file

    @functools.cached_property
    def _images(self) -> dict[str, list[str]]:
        """Paths of the images below the root by their names, and by those without suffix."""
        found = image_folder.list_images(self.root or Path())
        by_name: dict[str, list[str]] = {}
        for path in (*found.loose, *found.files):
            name = path.rpartition("/")[2]
            for key in {name, name.rpartition(".")[0]}:
                by_name.setdefault(key, []).append(path)
        return by_name


class TableRows:
    """The rows of one split of a table, with columns for the parts of a record."""

    def __init__(self, table: Table, columns: Mapping[str, Sequence[str]], given: tuple[tuple[str, str], ...] = ()):
        self.table, self.given, self._columns = table, given, columns
        by = list(columns.get("split", [SPLIT_COLUMN]))
        there = table.content.columns
        counts = self._count(by) if by[0] in there and there[by[0]].holds == "text" else {}
        self.split, self.size = self._choose(counts)
        """Value of the column of splits whose rows these are (None: all), and how many rows."""
        self._by = by if self.split is not None else None
        named = self.split or table.split
        self.where = table.where if named is None else f"{table.where}#{named}"

    def column(self, part: str) -> str | None:
        """Return the name of the column of a part, None where it has none."""
        return ".".join(self._columns[part]) if part in self._columns else None

    def type(self, part: str) -> str:
        """Return the type of the column of a part; nothing for a field of a column."""
        name = self.column(part) or ""
        return self.table.content.columns[name].type if name in self.table.content.columns else ""

    def names(self, part: str) -> Sequence[str] | None:
        """Return the names of the classes of a part that is a ClassLabel, by their numbers."""
        return self.table.content.classes.get(self.column(part) or "")

    def read(self, *parts: str) -> Iterator[Row]:
        """Yield the rows, with the cells of `parts`."""
        wanted = [part for part in (*parts, "name") if part in self._columns]
        if "name" not in self._columns and "image" in self._columns and self.table.root is not None:
            wanted.append("image")
        at = {part: self._columns[part] for part in wanted} | ({} if self._by is None else {"split": self._by})
        names = list(dict.fromkeys(path[0] for path in at.values())) or list(self.table.content.columns)[:1]
        places = {part: (names.index(path[0]), path[1:]) for part, path in at.items()}
        for number, (where, cells) in enumerate(self.table.content.read(names)):
            found = {part: _inner(cells[place], path) for part, (place, path) in places.items()}
            if self._by is not None and _stripped(found["split"]) != self.split:
                continue
            name = found.get("name") or (found.get("image") if self.table.root is not None else None)
            if not isinstance(name, str | int):
                yield Row(number, f"row {number}", where, found)
            else:
                yield Row(number, str(name), f"{where} ({str(name)[:200]})", found)

    def picture(self, cell: Cell, where: str) -> bytes | Path:
        """Return the image of a cell: its bytes, or the file that it names. Raises UserError where it holds none."""
        data = cell.get("bytes") if isinstance(cell, dict) else cell
        if isinstance(data, bytes):
            return data
        if self.table.root is not None and isinstance(data, str | int):
            return self.table.find(str(data), where)
        remedy = "save the set with its images in it (to_parquet and save_to_disk do so)"
        raise UserError(where, "no image, only a path" if isinstance(cell, dict) else "no image", "bytes", remedy)

    def _count(self, by: Sequence[str]) -> dict[str, int]:
        """Count the rows of each split that the column names."""
        counts = Counter(_stripped(_inner(cells[0], by[1:])) for _, cells in self.table.content.read(by[:1]))
        if empty := counts.pop("", 0):
            found = f"{empty} rows whose {SPLIT_COLUMN} is empty"
            raise UserError(self.table.where, found, "a split in every row")
        return counts

    def _choose(self, counts: Mapping[str, int]) -> tuple[str | None, int]:
        table = self.table
        if len(counts) < 2 and (table.whole or table.split is None):
            return None, table.content.size
        if not counts:
            raise UserError(f"{table.where}#{table.split}", "no such split: no column `split`", "the path alone")
        return source_splits.choose(counts, table.split, table.where, table.part)


def _stripped(cell: Cell) -> str:
    return "" if cell is None else str(cell).strip()


def _inner(cell: Cell, path: Sequence[str]) -> Cell:
    """Return a field of a cell; None where it is not there."""
    for name in path:
        cell = cell.get(name) if isinstance(cell, dict) else None
    return cell


def is_table(path: Path) -> bool:
    """Return whether there is a table at a path: a file, a folder of some, or a saved set."""
    if path.is_file():
        return path.suffix.lower() in (*SUFFIXES, SHARD)
    return is_saved(path) or _folder_of_files(path) is not None


def is_saved(path: Path) -> bool:
    """Return True for a folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def open_table(
    place: Path | str,
    split: str | None = None,
    *,
    part: str | None = None,
    network: bool = False,
    at_once: int = 256,
) -> Table:
    """Open the table at a path, or of the hub, of a split; of parquet files about `at_once` rows are read together.

    `part` says what the set is for where that is not training, as `source_splits.choose` has it. A set of the hub must
    be here without `network`. Raises UserError where there is nothing, it cannot be read, or there is no such split.
    """
    if isinstance(place, str):
        name = hub.parse(place)
        folder = hub.download(place, network=network)
        found = hub.resolve(folder, name.config)
        table = _opened(str(folder), found.kind, found.files, name.split, part, folder, at_once)
        content = replace(table.content, classes={**table.content.classes, **found.classes})
        # Files of the cache are links into a folder beside it.
        return replace(table, content=content, boundary=folder.parents[1])
    where = str(place)
    if is_saved(place):
        return _opened(where, "datasets folder", _saved_splits(place), split, part, place, at_once)
    if place.is_file():
        if (suffix := place.suffix.lower()) not in (*SUFFIXES, SHARD):
            raise UserError(where, "a file of unknown kind", f"one of {', '.join((*SUFFIXES, SHARD))}")
        return _opened(where, _KINDS.get(suffix, "JSON"), {"": [place]}, split, part, place.parent, at_once)
    if (listed := _folder_of_files(place)) is None:
        raise UserError(where, "no table", "parquet files, shards, or images with metadata")
    return _opened(where, *listed, split, part, place, at_once)


def _opened(
    where: str,
    kind: str,
    splits: Mapping[str, Sequence[Path]],
    split: str | None,
    part: str | None,
    root: Path,
    at_once: int,
) -> Table:
    """Return the table of the files of a split; where they are of none, a column may say it."""
    name, files = ("", splits[""]) if "" in splits else source_splits.choose(splits, split, where, part)
    if kind == "datasets folder":
        files = _saved_files(files[0])
        content = replace(table_files.open_streams(files), classes=_saved_classes(files[0].parent))
    elif kind == "webdataset":
        content = webdataset.open_shards(files)
    elif kind != "image folder":
        content = table_files.open_rows(files, at_once)
    elif described := [file for file in files if file.name in METADATA]:
        if len(described) > 1:
            raise UserError(where, f"{len(described)} files of metadata", f"one, {' or '.join(METADATA)}")
        content = table_files.open_metadata(described[0], root)
    else:
        content = table_files.open_folders(files, root)
    if content.size == 0 and kind in _WITH_PATHS:
        raise UserError(f"{where}#{name}" if name else where, "no rows", "an image a row")
    if name:
        split = name if split is not None or part is not None else None
    return Table(
        kind,
        where,
        content,
        tuple(files),
        Path(os.path.abspath(root)) if kind in _WITH_PATHS else None,
        split=split,
        part=part,
        whole=bool(name),
    )


def _folder_of_files(path: Path) -> tuple[str, dict[str, list[Path]]] | None:
    """Find the files of rows in a folder by their splits, `""` where there are none; None without such files."""
    inner = sorted(folder for folder in path.glob("*") if folder.name.lower() in folders.SPLIT_NAMES)
    if (own := _metadata(path)) is not None:
        return "image folder", {"": [own]}
    metadata = {one.name: [file] for one in inner if (file := _metadata(one)) is not None}
    if metadata:
        return "image folder", metadata
    for place in (path, path / "data"):
        for kind, ending in (("webdataset", SHARD), ("parquet", ".parquet")):
            if found := folders.visible(place.glob(f"*{ending}")):
                return kind, _by_split(found)
    return None


def _by_split(files: Iterable[Path]) -> dict[str, list[Path]]:
    """Divide files by the splits that their names begin with; all are of none where one is. Raises UserError."""
    found: dict[str, list[Path]] = {}
    for file in files:
        word = re.split(r"[^a-z]", file.stem.lower())[0]
        found.setdefault(word if word in source_splits.WORDS else "", []).append(file)
    if "" in found and len(found) > 1:
        expected = "all named after their splits, as train-0, or none"
        raise UserError(str(found[""][0]), "a file of no split beside those of splits", expected)
    return found


def _metadata(folder: Path) -> Path | None:
    """Return the file that describes the images of a folder, None where there is none."""
    for file in (folder / name for name in METADATA):
        with contextlib.suppress(OSError), file.open("rb") as stream:
            head = stream.read(_HEAD)
            if PATH_COLUMN.encode() in (head if file.suffix == ".parquet" else head.partition(b"\n")[0]):
                return file
    return None


# Sets saved by `datasets`.


def _saved_splits(path: Path) -> dict[str, list[Path]]:
    if (path / "state.json").is_file():
        return {"": [path]}
    listed = folders.read_json(path / "dataset_dict.json", _JSON_LIMIT, "a mapping", dict).get("splits")
    names = [one for one in (listed if isinstance(listed, list) else ()) if isinstance(one, str)]
    return {one: [path / one] for one in names if Path(one).name == one and (path / one / "state.json").is_file()}


def _saved_files(path: Path) -> list[Path]:
    entries = folders.read_json(path / "state.json", _JSON_LIMIT, "a mapping", dict).get("_data_files")
    if not isinstance(entries, list) or not entries:
        raise UserError(str(path / "state.json"), "no _data_files", "the Arrow files of the set")
    files: list[Path] = []
    for entry in entries:
        file = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(file, str) or Path(file).name != file or not (path / file).is_file():
            raise UserError(str(path / "state.json"), f"file {file!r}"[:200], "the name of an Arrow file beside it")
        files.append(path / file)
    return files


def _saved_classes(path: Path) -> dict[str, list[str]]:
    about = path / "dataset_info.json"
    told = folders.read_json(about, _JSON_LIMIT, "a mapping", dict).get("features") if about.is_file() else None
    return table_files.class_names(told)
