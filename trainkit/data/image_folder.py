"""Folders of images: listed in one pass, and opened as sources of classes, `folder/<class>/<image>`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainkit.data import folders
from trainkit.data.formats.image_decode import SUFFIXES, is_called_picture
from trainkit.data.record import Record, Source
from trainkit.errors import UserError, few, number_of

_BESIDE = frozenset({".csv", ".db", ".json", ".md", ".txt", ".xml"})
"""Endings of files that lie beside images and are not taken for one."""


@dataclass(frozen=True)
class Images:
    """Paths of the images below a folder: none has been opened, and some may be no files."""

    root: Path
    files: list[str]
    """Those in folders, each folder's before those of the folders in it, in the order of names."""
    loose: list[str]
    """Those in the folder itself."""
    deeper: list[str]
    """Those below the first folders, where folders in them are not read."""
    bare: list[str]
    """Folders without an image in them or below."""
    others: Counter[str]
    """Files of other formats in folders, by suffix; not text or tables."""

    def left_out(self) -> tuple[str, ...]:
        """Return sentences about what lies there and is no image of a class."""
        deeper = few(f"{self.root}/{name}" for name in self.deeper)
        said = (
            (len(self.loose), "images outside of class folders", few(self.loose)),
            (len(self.deeper), "images in subfolders of class folders", deeper),
            (len(self.bare), "folders without images", few(self.bare)),
        )
        told = [f"{number_of(count, what)}: {folders.escaped(names)}" for count, what, names in said if count]
        return (*told, *([f"{counted(self.others)} that are not images"] if self.others else ()))

    def paths(self) -> tuple[str, ...]:
        """Return the paths of `files` with that of the folder before them."""
        base = str(self.root / "_")[:-1]  # nothing for the current folder
        return tuple([base + name for name in self.files])

    def only_way(self) -> Path | None:
        """Return the folder of classes, or of splits, that lies deeper than the root where it is the only one.

        None where the root, or a folder on the way, holds images itself, where there is but one class, and where the
        folder on the way is a split.
        """
        above = {name.rpartition("/")[0] for name in (*self.files, *self.deeper, *self.loose)}
        common = os.path.commonpath(above) if above else ""
        if not common or common in above or common.partition("/")[0].lower() in folders.SPLIT_NAMES:
            return None
        return self.root / common


def list_images(root: Path, *, nested: bool = True) -> Images:
    """List the images below `root`; with `nested` those of folders in folders too. Hidden ones are left out.

    What is called as an image and is none, a folder or a broken link, is listed: reading it refuses it.
    Raises UserError where folders cannot be read or lead in a circle, and for names that cannot be written.
    """
    found, full, every, unwritable = Images(root, [], [], [], [], Counter()), {""}, [], []
    for place, inner, rest in folders.walk(root):
        # Of a name without a dot this is its last letter. Two times quicker than os.path.splitext.
        called = [name for name in rest if name[name.rfind(".") :].lower() in SUFFIXES]
        if place:
            if odd := [name for name in inner if is_called_picture(name)]:
                inner[:] = [name for name in inner if name not in odd]
                called = sorted([*called, *odd])
            if len(called) < len(rest):
                found.others.update(os.path.splitext(name)[1].lower() for name in rest)
        read = nested or "/" not in place
        if nested or not place:
            every += [os.path.join(place, name) for name in inner]
        paths = [f"{place}/{name}" for name in called] if place else called
        if read and not folders.is_writable("/".join((place, *called))):
            unwritable += [path for path in paths if not folders.is_writable(path)]
        (found.files if place and read else found.deeper if place else found.loose).extend(paths)
        while called and read and place not in full:
            full.add(place)
            place = place.rpartition("/")[0]
    for suffix in (*SUFFIXES, *_BESIDE):
        del found.others[suffix]
    # Of an empty folder within an empty one, only the upper is named.
    found.bare.extend(name for name in every if name not in full and name.rpartition("/")[0] in full)
    folders.check_names(str(root), unwritable)
    return found


def counted(suffixes: Counter[str]) -> str:
    """Describe files by their suffix: `23 files (20 .gif, 3 .jxl)`."""
    each = (f"{count} {suffix or 'without suffix'}" for suffix, count in suffixes.most_common())
    return f"{number_of(suffixes.total(), 'files')} ({few(each)})"


def open_folder(root: Path, *, nested: bool = True) -> Source:
    """Return a folder of classes, `root/<class>/<image>`, in the order of the names. Raises UserError when empty.

    With `nested` classes may have folders of their own, and the class is the path, `alphabet/character`.
    """
    found = list_images(root, nested=nested)
    if not found.files:
        said = f"no images, only {counted(found.others)}" if found.others else "no images"
        said = f"{number_of(len(found.loose), 'images')}, in no folder of a class" if found.loose else said
        meant = found.only_way()
        remedy = f"did you mean {meant}?" if meant else ""
        raise UserError(str(root), said, "images in <class>/<image>.jpg", remedy)
    if all(name.count("/") > 1 and name.partition("/")[0].lower() in folders.SPLIT_NAMES for name in found.files):
        first = sorted({name.partition("/")[0] for name in found.files})
        if len(first) > 1:
            either = " or ".join(f"{root}#{split}" for split in first)
            raise UserError(str(root), f"holds the splits {', '.join(first)}", "one of them", f"name {either}")
    files = found.paths()

    def records() -> Iterator[Record]:
        for name, file in zip(found.files, files, strict=True):
            yield Record(name, name.rpartition("/")[0], Path(file), file)

    return Source("folder", str(root), len(files), records, files, left_out=found.left_out())
