"""Read tables: files in which a row is an image, with its class, its mask or whatever else is said of it.

| form                                            | a split is                                  |
|-------------------------------------------------|---------------------------------------------|
| CSV, TSV, JSON, JSON lines, with paths in cells | a value of the column `split`               |
| images with `metadata.csv`, `.jsonl`, `.parquet`| a folder with metadata of its own           |
| parquet, with images in cells                   | files by their names, or a value of `split` |
| a set saved by Hugging Face `datasets`          | a folder of a DatasetDict                   |
| webdataset shards                               | files or folders by their names             |
| a set of the hub                                | as its card or the names of files say       |

All are read by `formats.table_files`, a row at a time; `datasets` finds the files of sets of the hub and reads none.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from trainkit.data import folders, hub, image_folder, source_splits
from trainkit.data.formats import image_decode, table_files
from trainkit.data.formats.table_files import PATH_COLUMN, SUFFIXES, Cell, Content, File
from trainkit.data.hub import DataFiles
from trainkit.data.record import Columns
from trainkit.errors import UserError, few

IMAGE_COLUMNS = ("image", "img", "jpg", "png", "image_bytes", "bytes", "jpeg", "webp", PATH_COLUMN, "path")
SPLIT_COLUMN = "split"
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
REMEDY = "or set columns: {{{0}: NAME}} in the block `data`, or --columns {0}=NAME"

_IMAGES = ("image", "mask")
"""Parts that are images."""
_PLURALS = {"person": "people", "modality": "modalities"}
_HEAD = 1 << 16
_JSON_LIMIT = 64 << 20
_KINDS = {".csv": "CSV", ".tsv": "CSV", ".tar": "webdataset", ".parquet": "parquet"}
_SPLITS = {word: "validation" if split == "val" else split for split, words in folders.SPLITS.items() for word in words}
"""Beginnings of the names of shards, and the split that each stands for."""


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
    """Those of this machine."""
    root: File | None = None
    """Where the paths in cells begin; None where images are in the table itself."""
    boundary: File | None = None
    """The folder that the files they name have to be in, links followed."""
    split: str | None = None
    """The split that was asked for."""
    part: str | None = None
    """What the rows are for, where no split was asked for and it is not training."""
    whole: bool = False
    """All rows are of the split: no column need say so."""

    @property
    def is_file(self) -> bool:
        """True where the table is one file, which nothing but a column divides."""
        return [*map(str, self.files)] == [self.where]

    def holds_images(self, name: str) -> bool:
        """Return True for a column of images, or of texts that may be paths of them."""
        holds = self.content.columns[name].holds
        return holds == "images" or (holds == "text" and self.root is not None)

    def _numbers_files(self, name: str, named: bool) -> bool:
        """Return True for a column of numbers that may be names of files, where the user names it."""
        return named and self.root is not None and self.content.columns[name].holds == "numbers"

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
                near = difflib.get_close_matches(name, there, 1)
                expected = f"one of its columns: {few(there, 20)}"[:300]
                found = f"no column {name!r}"[:200]
                raise UserError(self.where, found, expected, f"did you mean {near[0]!r}?" if near else "")
        own = {part: [name] if name in there else name.split(".") for part, name in given.items()}
        free = [name for name in there if name not in given.values()]
        for part, names in parts.items():
            fits = own[part][:1] if part in own else [name for name in names if name in free]
            if part in _IMAGES and len(own.get(part, ())) < 2:
                fits = [name for name in fits if self.holds_images(name) or self._numbers_files(name, part in own)]
                only = [
                    name for name in free if there[name].type.startswith("struct") and there[name].holds == "images"
                ]
                fits = only if part == "image" and not fits and len(only) == 1 else fits
            if fits:
                if fits[0] in there and there[fits[0]].type == table_files.TWICE:
                    raise UserError(self.where, f"the column {fits[0]} more than once"[:200], "each column once")
                own.setdefault(part, fits[:1])
            elif part not in absent:
                listed = [*(name for name in free if name not in given), *(parts.get(key, [key])[0] for key in given)]
                odd = [name for name in names if part in _IMAGES and name in there]
                held = f"; {odd[0]} holds {there[odd[0]].type}, which is not an image"[:200] if odd else ""
                found = f"columns {', '.join(listed)}"[:300] + held
                many = _PLURALS.get(part, f"{part}s")
                expected = f"{many} in one of {', '.join(names)}"
                raise UserError(self.where, found, expected, REMEDY.format(part))
        return TableRows(self, own, tuple(sorted(given.items())))

    def find(self, name: str, where: str) -> Path | bytes:
        """Return the file that a cell names, of the hub its bytes. Raises UserError for one that lies elsewhere."""
        if isinstance(self.root, Path):
            file = Path(os.path.normpath(self.root / name))
            if "/" not in name and not os.path.lexists(file) and name in self._images:
                file = self.root / self._image_called(name, where)
            if not file.is_relative_to(self.root) or folders.leads_out(Path(self.boundary or self.root), str(file)):
                raise UserError(where, f"the path {name[:300]!r}", f"a path below {self.root}")
            return file
        if "://" in name or name.startswith("/") or ".." in PurePosixPath(name).parts:
            raise UserError(where, f"the path {name[:300]!r}", "a path of the repository")
        with hub.naming(where), table_files.opened(f"{self.root}/{name}") as stream:
            return stream.read(image_decode.BYTE_CAP + 1)

    @functools.cached_property
    def _images(self) -> dict[str, list[str]]:
        """Paths of the images below the root by their names, and by those without suffix."""
        found = image_folder.list_images(Path(self.root or ""))
        by_name: dict[str, list[str]] = {}
        for path in (*found.loose, *found.files):
            name = path.rpartition("/")[2]
            for key in {name, name.rpartition(".")[0]}:
                by_name.setdefault(key, []).append(path)
        return by_name

    def _image_called(self, name: str, where: str) -> str:
        if len(paths := self._images[name]) > 1:
            raise UserError(where, f"{name[:200]!r} is the name of {len(paths)} images: {few(paths)}", "their paths")
        return paths[0]


class TableRows:
    """The rows of one split of a table, with columns for the parts of a record."""

    def __init__(self, table: Table, columns: Mapping[str, Sequence[str]], given: tuple[tuple[str, str], ...] = ()):
        self.table, self.given, self._columns = table, given, columns
        by = list(columns.get("split", [SPLIT_COLUMN]))
        there = table.content.columns
        counts = self._count(by) if by[0] in there and there[by[0]].holds == "text" else {}
        self.split, self.size = self._choose(counts)
        """Value of the column of splits whose rows these are (None: all), and how many rows; None: not known."""
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
        if self.table.root is not None and isinstance(data, str):
            return self.table.find(data, where)
        remedy = "save the set with its images in it (to_parquet and save_to_disk do so)"
        raise UserError(where, "no image, only a path" if isinstance(cell, dict) else "no image", "bytes", remedy)

    def _count(self, by: Sequence[str]) -> dict[str, int]:
        """Count the rows of each split that the column names."""
        counts = Counter(_stripped(_inner(cells[0], by[1:])) for _, cells in self.table.content.read(by[:1]))
        if empty := counts.pop("", 0):
            found = f"{empty} rows whose {SPLIT_COLUMN} is empty"
            raise UserError(self.table.where, found, "a split in every row")
        return counts

    def _choose(self, counts: Mapping[str, int]) -> tuple[str | None, int | None]:
        table = self.table
        whole = table.split is None and len(counts) < 2 and (table.part is None or table.is_file)
        if whole or (table.whole and table.split not in counts):
            return None, table.content.size
        if table.is_file and not counts:
            raise UserError(f"{table.where}#{table.split}", "no such split: no column `split`", "the path alone")
        stems = {re.sub(r"-\d{5}-of-\d{5}.*", "", file.stem): None for file in table.files}
        split, size = source_splits.choose(counts or stems, table.split, table.where, table.part)
        return (split, size) if counts else (None, table.content.size)


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
        return path.suffix.lower() in SUFFIXES
    return is_saved(path) or bool(_metadata(path) or _shards(path) or _parquet(path))


def is_saved(path: Path) -> bool:
    """Return True for a folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def open_table(
    place: Path | str,
    split: str | None = None,
    *,
    part: str | None = None,
    network: bool = False,
    stream: bool = False,
    at_once: int = 256,
) -> Table:
    """Open the table at a path, or of the hub, of a split; of parquet files about `at_once` rows are read together.

    `part` says what the set is for where that is not training, as `source_splits.choose` has it. A set of the hub must
    be here without `network`; with `stream` it is read as it comes, and not kept. Raises UserError where there is
    nothing, it cannot be read, or there is no such split.
    """
    if isinstance(place, str):
        return _of_hub(place, part, network, stream)
    where = str(place)
    if is_saved(place):
        return _saved(place, split, part)
    if place.is_file():
        suffix = place.suffix.lower()
        if suffix not in SUFFIXES:
            raise UserError(where, "a file of unknown kind", f"one of {', '.join(SUFFIXES)}")
        opened = _of_files(where, DataFiles(_KINDS.get(suffix, "JSON"), {"": [place]}), "", place.parent, at_once)
        return replace(opened, split=split, part=part)
    if found := _metadata(place):
        return _of_split(where, DataFiles("image folder", found), split, part, place)
    if found := _shards(place):
        return _of_split(where, DataFiles("webdataset", found), split, part, place)
    if not (every := _parquet(place)):
        raise UserError(where, "no parquet files", "at least one")
    files, name = _named_after(every, split, part)
    opened = _of_files(where, DataFiles("parquet", {"": files}), "", place, at_once)
    return replace(opened, split=name or split, part=part, whole=name is not None)


def _of_hub(text: str, part: str | None, network: bool, stream: bool) -> Table:
    name = hub.parse(text)
    if stream:
        found = hub.resolve(hub.whole(text), name.repository, name.revision, name.config)
        return _of_split(hub.whole(text).partition("#")[0], found, name.split, part, found.base)
    folder = hub.download(text, network=network)
    found = hub.resolve(str(folder), str(folder), None, name.config)
    table = _of_split(str(folder), found, name.split, part, folder)
    # Files of the cache are links into a folder beside it.
    where = str(table.files[0].parent) if table.kind == "parquet" else str(folder)
    return replace(table, where=where, boundary=folder.parents[1])


def _of_split(where: str, found: DataFiles, split: str | None, part: str | None, root: File) -> Table:
    """Return the table of the files of a split, which is chosen by its name."""
    name, _ = source_splits.choose(found.files, split, where, part)
    asked = split is not None or part is not None
    return replace(_of_files(where, found, name, root), split=name if asked else None, whole=asked)


def _of_files(where: str, found: DataFiles, split: str, root: File, at_once: int = 256) -> Table:
    """Return the table of the files that have a name among those found."""
    files = found.files[split]
    if found.kind != "image folder":
        content = table_files.open_rows(files, found.delimiter, at_once)
    elif described := [file for file in files if PurePosixPath(file).name in METADATA]:
        content = table_files.open_metadata(described, root)
    else:
        content = table_files.open_folders(files, root)
    if content.size == 0 and found.kind != "parquet":
        raise UserError(f"{where}#{split}" if split else where, "no rows", "an image a row")
    size = found.sizes.get(split) if content.size is None else content.size
    content = replace(content, size=size, classes={**content.classes, **found.classes})
    local = tuple(file for file in files if isinstance(file, Path))
    root = Path(os.path.abspath(root)) if isinstance(root, Path) else root
    return Table(found.kind, where, content, local, None if found.kind in ("parquet", "webdataset") else root)


def _parquet(path: Path) -> list[Path]:
    """List the parquet files of a folder, or of its `data/`."""
    return folders.visible(path.glob("*.parquet")) or folders.visible((path / "data").glob("*.parquet"))


def _named_after(every: Sequence[Path], split: str | None, part: str | None) -> tuple[Sequence[Path], str | None]:
    """Return the files named after a split (`val.parquet`, `val-00000-of-00002.parquet`), and its name.

    All, and None, where there are no such files; where nothing says which split is meant, those of `train*`.
    """
    wanted = split or part
    for name in () if wanted is None else (wanted,) if part is None else source_splits.called(wanted):
        if files := [file for file in every if file.stem == name or file.stem.startswith(f"{name}-")]:
            return files, name
    first = [file for file in every if file.name.startswith(source_splits.TRAIN)] if wanted is None else []
    return first or every, None


def _metadata(path: Path) -> dict[str, list[File]]:
    """Find the metadata of images by split: in the folder itself, or in those of its splits."""
    places = {source_splits.TRAIN: path}
    if not any(_names_files(path / name) for name in METADATA):
        places = {inner.name: inner for inner in _split_folders(path)}
    every = {split: [place / name for name in METADATA] for split, place in places.items()}
    return {split: [file] for split, files in every.items() if (file := next(filter(_names_files, files), None))}


def _split_folders(path: Path) -> list[Path]:
    """List the folders that are called as splits; folders of classes are not looked into."""
    return sorted(inner for inner in path.glob("*") if inner.name.lower() in folders.SPLIT_NAMES)


def _names_files(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            head = stream.read(_HEAD)
    except OSError:
        return False
    return PATH_COLUMN.encode() in (head if file.suffix == ".parquet" else head.partition(b"\n")[0])


def _shards(path: Path) -> dict[str, list[File]]:
    """Find the shards in a folder, or in the folders of its splits, by split."""
    files = folders.visible(path.glob("*.tar"))
    inner = (file for place in _split_folders(path) for file in folders.visible(place.glob("*.tar")))
    found: dict[str, list[File]] = {}
    for file in files or inner:
        name = re.split(r"[^a-z]", (file.name if files else file.parent.name).lower())[0]
        found.setdefault(_SPLITS.get(name, source_splits.TRAIN), []).append(file)
    return found


# Sets saved by `datasets`.


def _saved(path: Path, split: str | None, part: str | None) -> Table:
    """Open a saved set; of a DatasetDict a split."""
    if (path / "state.json").is_file():
        name, whole = (
            split,
            split is not None
            and split == folders.read_json(path / "state.json", _JSON_LIMIT, "a mapping", dict).get("_split"),
        )
    else:
        listed = folders.read_json(path / "dataset_dict.json", _JSON_LIMIT, "a mapping", dict).get("splits")
        names = [one for one in (listed if isinstance(listed, list) else ()) if isinstance(one, str)]
        there = {one: path / one for one in names if Path(one).name == one and (path / one / "state.json").is_file()}
        name, path = source_splits.choose(there, split, str(path), part)
        name, whole = name if split is not None or part is not None else None, True
    entries = folders.read_json(path / "state.json", _JSON_LIMIT, "a mapping", dict).get("_data_files")
    if not isinstance(entries, list) or not entries:
        raise UserError(str(path / "state.json"), "no _data_files", "the Arrow files of the set")
    files: list[Path] = []
    for entry in entries:
        file = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(file, str) or Path(file).name != file or not (path / file).is_file():
            raise UserError(str(path / "state.json"), f"file {file!r}"[:200], "the name of an Arrow file beside it")
        files.append(path / file)
    told = (
        folders.read_json(path / "dataset_info.json", _JSON_LIMIT, "a mapping", dict).get("features")
        if (path / "dataset_info.json").is_file()
        else None
    )
    content = replace(table_files.open_streams(files), classes=table_files.class_names(told))
    return Table("datasets folder", str(path), content, tuple(files), split=name, part=part, whole=whole)
