"""Where labelled images come from: each source is a list of records, read in order when it is imported."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.data import folders, hub
from trainkit.data.faces.align import LANDMARKS, read_landmarks
from trainkit.data.formats import image_decode
from trainkit.data.record import Columns, Record, Source
from trainkit.errors import UserError, number_of
from trainkit.paths import locate

if TYPE_CHECKING:
    from trainkit.data.storage.image_store import Packed

_log = logging.getLogger(__name__)

HELD_OUT = "held_out"
"""In place of a path of `evaluate`: what is kept from training of the set that is trained on."""

SAMPLE = "sample:"
"""Before the name of a built-in drawn set, in place of a path."""

SPLITS = frozenset({"train", "training", "test", "testing", "val", "valid", "validation", "dev"})
"""Names that folders of splits go by; two of them side by side are no classes."""

PATTERN_LIMIT = 200
"""Longest regular expression for groups and patients, in characters."""

ID_LIMIT = 1000
"""Longest id that one is tried on. Both bound how long a badly written one may try."""


def open_source(
    path: Path | str,
    *,
    nested: bool = True,
    network: bool = False,
    stream: bool = False,
    columns: Columns | None = None,
) -> Source:
    """Open the source at `path`: a folder, a table, `hf://owner/name`, each with `#split` where it has some.

    With `nested` a class of a folder is the whole path below it (`alphabet/character`), else the name of its folders.
    Without `network` a set of the hub must be here; with `stream` it is read as it comes, and not kept. `columns` says
    which columns of a table are meant. Raises UserError when there is nothing, or no such split.
    """
    from trainkit.data.formats import arrow_tables, dataset_files, mrl_eye, recordio
    from trainkit.data.storage import image_store

    if hub.is_hub(path):
        return arrow_tables.source(*hub.open_table(path, network=network, stream=stream), columns)
    path, split = split_of(path)
    if not path.exists():
        raise UserError(str(path), "does not exist", "a data set")
    if path.suffix == ".rec" or (path / "train.rec").is_file():
        return _whole(recordio.insightface(path), split)
    if image_store.is_packed(path):
        data = image_store.Packed(path)
        if data.manifest["protocol"] is not None:
            raise UserError(str(path), "an evaluation set", "a set with classes")
        return _whole(repacked(data), split)
    if arrow_tables.is_saved(path):
        return arrow_tables.saved(path, split, columns)
    if dataset_files.is_laid_out(path):
        return arrow_tables.source(*dataset_files.open_table(path, split), columns)
    if arrow_tables.parquet_files(path):
        return arrow_tables.parquet(path, split, columns)
    if not path.is_dir():
        expected = "a folder of classes, .parquet, .csv, .jsonl, .tar or train.rec"
        raise UserError(str(path), "a file of unknown kind", expected)
    if split is not None:
        if not (path / split).is_dir():
            raise UserError(f"{path}#{split}", "no such split", f"the folder {path / split}")
        path = path / split
    if not nested:
        return folder(path, nested=False)
    return mrl_eye.recognise(path) or folder(path)


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


def split_of(path: Path | str) -> tuple[Path, str | None]:
    """Divide `set.parquet#val` into path and name of the split; a path that is there with its `#` is a path."""
    path = Path(path)
    name, mark, split = path.name.rpartition("#")
    if not mark or not name or path.exists():
        return path, None
    if not re.fullmatch(r"\w[\w.-]*", split):
        raise UserError(str(path), f"split {split!r}"[:100], "a name after #")
    return path.with_name(name), split


def folder(root: Path, *, nested: bool = True) -> Source:
    """Return a folder of classes, `root/<class>/<image>`, in the order of the names. Raises UserError when empty.

    With `nested` classes may have folders of their own: the class is the path, `alphabet/character`.
    """
    below = image_decode.below(root, nested=nested)
    files = below.files
    if not files:
        found = f"no images, only {image_decode.counted(below.others)}" if below.others else "no images"
        found = f"{number_of(len(below.loose), 'images')}, in no folder of a class" if below.loose else found
        meant = only_way(root)
        raise UserError(str(root), found, "images in <class>/<image>.jpg", f"did you mean {meant}?" if meant else "")
    first = {file.relative_to(root).parts[0] for file in files}
    if (
        len(first) > 1
        and {name.lower() for name in first} <= SPLITS
        and all(len(file.relative_to(root).parts) > 2 for file in files)
    ):
        either = " or ".join(f"{root}#{split}" for split in sorted(first))
        raise UserError(str(root), f"holds the splits {', '.join(sorted(first))}", "one of them", f"name {either}")

    def records() -> Iterator[Record]:
        points = read_landmarks(landmarks) if landmarks.is_file() else {}
        for file in files:
            name = file.relative_to(root)
            yield Record(name.as_posix(), name.parent.as_posix(), file, str(file), points.get(name.as_posix()))

    landmarks = root / LANDMARKS
    made_of = (*files, landmarks) if landmarks.is_file() else tuple(files)
    return Source("folder", str(root), len(files), records, made_of, left_out=below.left_out())


def only_way(root: Path) -> Path | None:
    """Return the folder of classes, or of splits, that lies deeper than `root` where it is the only one.

    Each folder on the way holds no images itself and one folder with images below. None where `root` is such a folder
    itself, holds images or a set of another form, or where there is but one class.
    """
    from trainkit.data.formats import arrow_tables, dataset_files
    from trainkit.data.storage import image_store

    place = root
    while True:
        other = image_store.is_packed(place) or (place / "train.rec").is_file() or arrow_tables.is_saved(place)
        if other or dataset_files.is_laid_out(place) or arrow_tables.parquet_files(place):
            return None
        inner = _with_images(place)
        if inner is None or not inner:
            return None
        if len(inner) > 1:
            return place if place != root else None
        if inner[0].name.lower() in SPLITS and place == root:
            return None
        place = inner[0]


def _with_images(place: Path) -> list[Path] | None:
    """Return up to two folders in a folder that have images in them or below; None where it has images itself."""
    found: dict[str, None] = {}
    for path, _, names in folders.walk(place):
        if any(map(image_decode.is_called_picture, names)):
            if not path:
                return None
            found[path.partition("/")[0]] = None
            if len(found) > 1:
                break
    return [place / name for name in found]


def repacked(data: Packed) -> Source:
    """Return a packed set as a source, to be packed again at another size."""

    def records() -> Iterator[Record]:
        ids, groups = data.ids(), data.group_names
        for row in range(len(data)):
            group = groups[data.groups[row]] if data.groups is not None else None
            yield Record(ids[row], int(data.labels[row]), data.picture(row), data.where(row), group=group)

    return Source("packed set", str(data.path), len(data), records, (data.path / "manifest.json",), data.class_names)


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


def _whole(source: Source, split: str | None) -> Source:
    if split is not None:
        raise UserError(f"{source.where}#{split}", f"a {source.kind} has no splits", "its path alone")
    return source
