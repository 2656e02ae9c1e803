"""Records of people while a set is read: each is checked when it is added, and files are listed, never opened."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from trainkit.data import folders
from trainkit.data.formats import image_decode
from trainkit.errors import UserError, few
from trainkit.interfaces import RGB, TEXT

DISTRACTOR = "-1"
"""The person of a gallery record whom nobody looks for, as indexes write it."""

EITHER, QUERY, GALLERY = range(3)
"""Role of a record in a search: default, query only, gallery only."""

LONGEST = 10_000
"""Most characters of a record: its path, names and caption."""


class PersonRecord(NamedTuple):
    """An image of one modality, or a caption."""

    where: str
    """File and row that it comes from, for messages."""
    id: str
    """The path of an image below the root of the set; a name of its own for each caption."""
    person: str | None
    """None for a distractor."""
    modality: int
    camera: str = ""
    """Empty where unknown."""
    role: int = EITHER
    of: int = -1
    """For a caption the number of the image that it describes, else -1."""
    text: str = ""
    """The words of a caption; empty for images."""


@dataclass(eq=False)
class Records:
    """The records of a set, in the order in which its reader finds them."""

    kind: str
    """Its layout in words."""
    where: str
    """The set as a message names it, with the split."""
    root: Path
    """Where the paths of its images begin."""
    annotations: tuple[Path, ...] = ()
    """Files that say what it holds."""
    every: list[PersonRecord] = field(default_factory=list)
    number: dict[str, int] = field(default_factory=dict)
    """The place of each id in `every`."""
    lists: dict[str, list[list[int]]] = field(default_factory=dict)
    """Queries that the set itself gives: five records each, one a modality, -1 for none."""
    places: dict[str, int] = field(default_factory=dict)
    """Cameras whose records hide each other, by a number; the others hide nothing."""
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """What the reader found and does not take, by what it is: `images that have no entry`."""

    def __post_init__(self):
        self.there = folders.Listing(self.root)
        self._taken: Counter[str] = Counter()

    def images_in(self, folder: str) -> list[str]:
        """Return the names of the images in a folder, in their order; files of other kinds are left out."""
        names = sorted(name for name in self.there.names(folder) if not folders.is_hidden(name))
        images = [name for name in names if os.path.splitext(name)[1].lower() in image_decode.SUFFIXES]
        self.leave_out("files that are not images", [f"{folder}/{name}" for name in sorted({*names} - {*images})])
        return images

    def add_folder(self, folder: str, person: str, modality: int) -> None:
        """Add every image of a folder."""
        for name in self.images_in(folder):
            self.add(PersonRecord(f"{self.root}/{folder}/{name}", f"{folder}/{name}", person, modality))

    def picture(
        self, where: str, path: str, person: str | None, modality: int, camera: str = "", role: int = EITHER
    ) -> int:
        """Add an image that a list names; its number. Raises UserError where it is not there, or there twice."""
        if (earlier := self.number.get(path)) is not None:
            raise UserError(where, f"{path}, a duplicate of {self.every[earlier].where}"[:500], "each image once")
        folder, _, name = path.rpartition("/")
        if not folders.is_writable(path) or {"", ".", ".."} & set(path.split("/")):
            raise UserError(where, f"the path {path[:300]!r}", f"a plain path below {self.root}, in one line")
        if name not in self.there.names(folder):
            raise UserError(where, f"{path[:300]} is not in {self.root}", "an existing file")
        if self.there.leads_out(path):
            raise UserError(where, f"{path[:300]} is a link out of {self.root}", "a file below it")
        if os.path.splitext(name)[1].lower() not in image_decode.SUFFIXES:
            raise UserError(where, f"{path[:300]} is not an image", " ".join(sorted(image_decode.SUFFIXES)))
        return self.add(PersonRecord(where, path, person, modality, camera, role))

    def caption(
        self, where: str, id: str, text: str, person: str | None, camera: str = "", role: int = EITHER, of: int = -1
    ) -> int:
        """Add a caption, `id` made its own by a number where it is taken; its number. Raises UserError when empty."""
        text = " ".join(text.split())
        if not text:
            raise UserError(where, "an empty caption", "a description of the person")
        self._taken[id] += 1
        own = id if self._taken[id] == 1 else f"{id} {self._taken[id]}"
        return self.add(PersonRecord(where, own, person, TEXT, camera, role, of, text))

    def add(self, record: PersonRecord) -> int:
        """Add a record; its number. Raises UserError for names that no table could hold."""
        where, id, person, modality, camera, role, _, text = record
        if person == "":
            raise UserError(where, "no person", "the name of the person in every record")
        if person is None and (modality != RGB or role == QUERY):
            raise UserError(where, "a distractor that is not a gallery image", "a person in queries, or an rgb image")
        if len(id) + len(text) + len(person or "") + len(camera) > LONGEST:
            raise UserError(where, f"a record of more than {LONGEST:,} characters", "shorter names and captions")
        folders.check_names(where, (id, person or "", camera, text))
        self.number[id] = len(self.every)
        self.every.append(record._replace(role=GALLERY) if person is None else record)
        return len(self.every) - 1

    def leave_out(self, what: str, names: Iterable[str]) -> None:
        """Note what is found and not taken."""
        self.left_out.setdefault(what, []).extend(names)

    def losses(self) -> list[str]:
        """Return a sentence for each kind of what is left out."""
        return [f"left out {len(names):,} {what}: {few(names)}" for what, names in self.left_out.items() if names]
