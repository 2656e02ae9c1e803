"""Where labelled images come from: each source is a list of records, read in order when it is imported."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainkit.data import folders, hub, image_folder, source_splits
from trainkit.data.record import Columns, Record, Source
from trainkit.data.source_splits import split_of
from trainkit.data.table import IMAGE_COLUMNS, TableRows, is_table, open_table
from trainkit.errors import UserError
from trainkit.paths import locate

if TYPE_CHECKING:
    from trainkit.data.storage.image_store import Packed

HELD_OUT = "held_out"
"""In place of a path of `evaluate`: what is kept from training of the set that is trained on."""
HELD_OUT_TEST = "held_out_test"
"""The same of what is kept for a test set, by which nothing is chosen."""
PARTS = (HELD_OUT, HELD_OUT_TEST)

SEVERAL = "several classes an image (multi-label) are not supported; choose a column of one: columns: {label: NAME}"

_COMPARED = 10_000
"""Labels that are looked at for several in one."""
_PLURAL = frozenset({"labels", "tags", "classes", "categories", "attributes"})

SAMPLE = "sample:"
"""Before the name of a built-in drawn set, in place of a path."""

LABEL_COLUMNS = ("label", "identity", "person", "pid", "class", "class_id", "id", "labels", "fine_label", "cls")
COLUMNS = {
    "image": IMAGE_COLUMNS,
    "label": LABEL_COLUMNS,
    "name": ("image_path",),
    "group": ("image_group",),
    "split": ("split",),
}
"""Parts of a record, and the columns of a table that they are looked for in: a row is called by its `image_path`, where
groups are found; `image_group` is what an image shares with others (person, video, alphabet)."""
_ABSENT = ("name", "group", "split")

PATTERN_LIMIT = 200
"""Longest regular expression for groups and patients, in characters."""

ID_LIMIT = 1000
"""Longest id that one is tried on. Both bound how long a badly written one may try."""


def form_of(path: Path) -> Literal["records", "packed", "table", "folder", "file"]:
    """Return what a set at a path is: InsightFace's records, a packed set, a table, else a folder or a file."""
    from trainkit.data.storage import image_store

    if path.suffix == ".rec" or (path / "train.rec").is_file():
        return "records"
    if image_store.is_packed(path):
        return "packed"
    return "table" if is_table(path) else "folder" if path.is_dir() else "file"


def open_source(
    path: Path | str,
    *,
    nested: bool = True,
    network: bool = False,
    columns: Columns | None = None,
) -> Source:
    """Open the source at `path`: a folder, a table, `hf://owner/name`, each with `#split` where it has some.

    With `nested` a class of a folder is the whole path below it (`alphabet/character`), else the name of its folders.
    Without `network` a set of the hub must be here. `columns` says which columns of a table are meant. Raises UserError
    when there is nothing, or no such split.
    """
    from trainkit.data.formats import recordio
    from trainkit.data.storage import image_store

    if hub.is_hub(path):
        return _of_table(open_table(str(path), network=network).take(COLUMNS, columns, _ABSENT))
    path, split = split_of(path)
    if not path.exists():
        raise UserError(str(path), "does not exist", "a data set")
    form = form_of(path)
    if form == "table":
        return _of_table(open_table(path, split).take(COLUMNS, columns, _ABSENT))
    if form == "file":
        expected = "a folder of classes, .parquet, .csv, .jsonl, .tar or train.rec"
        raise UserError(str(path), "a file of unknown kind", expected)
    if form == "folder":
        if split is not None:
            _, path = source_splits.choose(folders.folders_in(path), split, str(path))
        return image_folder.open_folder(path, nested=nested)
    if form == "records":
        source_splits.refuse(split, str(path), recordio.KIND)
        return recordio.insightface(path)
    source_splits.refuse(split, str(path), "packed set")
    data = image_store.Packed(path)
    if data.manifest["protocol"] is not None:
        raise UserError(str(path), "an evaluation set", "a set with classes")
    return repacked(data)


def _of_table(rows: TableRows) -> Source:
    """Return the images of a table as a source."""
    label, names, kind = rows.column("label"), rows.names("label"), rows.type("label")
    made = {"int64": int, "double": float}.get(kind, str)
    cells = (row.cells["label"] for row in itertools.islice(rows.read("label"), _COMPARED)) if "string" in kind else ()
    several = "lists" if "list" in kind else _several({cell for cell in cells if isinstance(cell, str)}, label)
    if several is not None:
        raise UserError(rows.where, f"{label}: {several}"[:200], "one class an image", SEVERAL)

    def records() -> Iterator[Record]:
        for row in rows.read("image", "label", "group"):
            value, group = row.cells["label"], row.cells.get("group")
            value = made(value) if isinstance(value, str) else value  # cells of CSV are text
            if isinstance(value, bool) or not isinstance(value, int | str):
                raise UserError(row.where, f"{label}: {value!r}"[:200], "one whole number or name")
            if names is not None and not (isinstance(value, int) and 0 <= value < len(names)):
                raise UserError(row.where, f"{label}: {value!r}"[:200], f"0 to {len(names) - 1}, its named classes")
            data = rows.picture(row.cells["image"], row.where)
            yield Record(row.id, value, data, row.where, group=None if group is None else str(group))

    table, split = rows.table, rows.split or rows.table.split
    named = None if names is None else tuple(names)
    return Source(table.kind, rows.where, rows.size, records, table.files, named, split=split, columns=rows.given)


def _several(labels: set[str], column: str | None) -> str | None:
    """Return a label that is several in one, `insect ant`; None where each is a class by itself.

    Its words are labels of their own in other rows; in a column called `labels` it is enough that one comes again.
    """
    words = {label: re.split(r"[|;, ]+", label.strip()) for label in sorted(labels)}
    counts = Counter(word for some in words.values() for word in set(some))
    for label, some in words.items():
        if len(some) > 1 and (
            labels.issuperset(some) or (column in _PLURAL and any(counts[word] > 1 for word in some))
        ):
            return repr(label)
    return None


def named(text: str, *, nested: bool = True, columns: Columns | None = None) -> Source:
    """Open the source that a recipe names, below the data root or of the hub. Never downloads.

    Raises UserError as `open_source` does.
    """
    return open_source(text if hub.is_hub(text) else locate(text), nested=nested, columns=columns)


def missing(text: str) -> str | None:
    """Return a sentence about a source that a recipe names and that is not there yet."""
    if hub.is_hub(text):
        return None if hub.is_here(text) else f"{text} is not downloaded; run `trainkit download RECIPE`"
    path, _ = split_of(locate(text))
    return None if path.exists() else f"{path} does not exist"


def repacked(data: Packed) -> Source:
    """Return a packed set as a source, to be packed again at another size."""

    def records() -> Iterator[Record]:
        ids, groups = data.ids(), data.group_names
        for row in range(len(data)):
            group = groups[data.groups[row]] if data.groups is not None else None
            yield Record(ids[row], int(data.labels[row]), data.picture(row), data.where(row), group=group)

    return Source("packed set", str(data.path), len(data), records, (data.path / "manifest.json",), data.class_names)


def only_way(root: Path) -> Path | None:
    """Return the folder of classes, or of splits, that lies deeper than `root` where it is the only one; else None."""
    if form_of(root) != "folder":
        return None
    inner = image_folder.list_images(root).only_way()
    return inner if inner is not None and form_of(inner) == "folder" else None


def grouping(pattern: str) -> Callable[[Record], str]:
    """Return a function that finds the group of a record, as `finding` does in its id."""
    find = finding(pattern, "group")
    return lambda record: find(record.id, record.where)


def finding(pattern: str, what: str) -> Callable[[str, str], str]:
    """Return a function that finds `what` an id names (group, patient), by the one part in parentheses of a pattern.

    Raises UserError when it is no such expression; the function it returns, which takes an id and where that is from,
    raises one where it names nothing.
    """
    if len(pattern) > PATTERN_LIMIT:
        raise UserError(what, f"a regular expression of {len(pattern)} characters", f"at most {PATTERN_LIMIT}")
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(f"{what} {pattern!r}", f"not a regular expression ({error})") from None
    if compiled.groups != 1:
        found, remedy = f"{compiled.groups} parts in parentheses", "write other parentheses as (?:...)"
        raise UserError(f"{what} {pattern!r}", found, f"one: the {what}", remedy)

    def find(id: str, where: str) -> str:
        found = compiled.search(id) if len(id) <= ID_LIMIT else None
        if found is None or not found.group(1):
            raise UserError(where, f"{id[:200]!r} names no {what}", f"a match of {pattern!r}")
        return found.group(1)

    return find
