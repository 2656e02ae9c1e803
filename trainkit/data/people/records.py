"""Records of people while a set is read: each is checked when it is added, and what layouts have in common.

What an image shows is none of its business: files are listed, never opened.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.data import folders
from trainkit.data.formats import image_decode
from trainkit.errors import UserError, few
from trainkit.interfaces import RGB, TEXT

DISTRACTOR = "-1"
"""The person of a gallery record whom nobody looks for, as indexes write it."""

SYSU = "SYSU-MM01"
"""The kind of the sets that have a protocol of their own."""

EITHER, QUERY, GALLERY = range(3)
"""Role of a record in a search: default, query only, gallery only."""

LINE_LIMIT = 10_000
"""Longest path, name or caption, in characters."""


@dataclass(frozen=True)
class Layout:
    """A set of a known form, not read yet."""

    kind: str
    where: str
    """As a message names it, with the split."""
    root: Path
    """Where the paths of its images begin."""
    annotations: tuple[Path, ...]
    """Files that say what it holds."""
    read: Callable[[Records], None]

    def records(self) -> Records:
        """Return its records, which are read now. Raises UserError at the first error in them."""
        records = Records(self.root)
        self.read(records)
        return records


@dataclass(eq=False)
class Records:
    """Records of a set as a reader finds them, by column. Each is checked when it is added."""

    root: Path
    ids: list[str] = field(default_factory=list)
    """The path of an image below `root`; a name of its own for each caption."""
    where: list[str] = field(default_factory=list)
    """File and row that a record comes from, for messages."""
    person: list[str | None] = field(default_factory=list)
    """None for a distractor."""
    camera: list[str] = field(default_factory=list)
    """Empty where unknown."""
    modality: list[int] = field(default_factory=list)
    role: list[int] = field(default_factory=list)
    of: list[int] = field(default_factory=list)
    """For a caption the record of the image that it describes, else -1."""
    text: list[str] = field(default_factory=list)
    """Empty for images."""
    lists: dict[str, list[list[int]]] = field(default_factory=dict)
    """Queries that the set itself gives: five records each, one a modality, -1 for none."""
    places: dict[str, int] = field(default_factory=dict)
    """Cameras whose records hide each other, by a number; the others hide nothing."""
    number: dict[str, int] = field(default_factory=dict)
    """The record of each id."""
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """What the reader found and does not take, by what it is: `images that have no entry`."""

    def __post_init__(self):
        self.there = folders.Listing(self.root)
        """The folders that were looked into."""
        self._from_list: set[str] = set()
        self._taken: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.ids)

    def picture(
        self, where: str, path: str, person: str | None, modality: int, camera: str = "", role: int = EITHER
    ) -> int:
        """Add an image; its number. Raises UserError where it is not there, or there twice."""
        earlier = self.number.get(path)
        if earlier is not None:
            raise UserError(where, f"{path}, a duplicate of {self.where[earlier]}"[:500], "each image once")
        self._check_path(where, path)
        return self._add(where, path, person, modality, camera, role, -1, "")

    def caption(
        self, where: str, id: str, text: str, person: str | None, camera: str = "", role: int = EITHER, of: int = -1
    ) -> int:
        """Add a caption, `id` made its own by a number where it is taken; its number. Raises UserError when empty."""
        if not text.strip():
            raise UserError(where, "an empty caption", "a description of the person")
        text = " ".join(text.split())
        if len(text) > LINE_LIMIT:
            raise UserError(where, f"a caption of {len(text)} characters", f"at most {LINE_LIMIT}")
        own = id
        while own in self.number:
            self._taken[id] += 1
            own = f"{id} {self._taken[id] + 1}"
        return self._add(where, own, person, TEXT, camera, role, of, text)

    def _add(
        self, where: str, id: str, person: str | None, modality: int, camera: str, role: int, of: int, text: str
    ) -> int:
        if person is not None:
            if not person:
                raise UserError(where, "no person", "the name of the person in every record")
            if len(person) > LINE_LIMIT or not folders.is_writable(person):
                raise UserError(where, f"person {person[:100]!r}", "a name in one line")
        if person is None and (modality != RGB or role == QUERY):
            raise UserError(where, "a distractor that is not a gallery image", "a person in queries, or an rgb image")
        if not (folders.is_writable(id) and folders.is_writable(camera)):
            folders.check_names(where, (id, camera))
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise UserError(
                    where, "an incomplete character (a lone surrogate)", "text that UTF-8 can encode"
                ) from None
        row = len(self.ids)
        self.number[id] = row
        self.ids.append(id)
        self.where.append(where)
        self.person.append(person)
        self.camera.append(camera)
        self.modality.append(modality)
        self.role.append(GALLERY if person is None else role)
        self.of.append(of)
        self.text.append(text)
        return row

    def losses(self) -> list[str]:
        """Return a sentence for each kind of what is left out."""
        return [f"left out {len(names):,} {what}: {few(names)}" for what, names in self.left_out.items() if names]

    def leave_out(self, what: str, names: Iterable[str]) -> None:
        """Note what is found and not taken."""
        self.left_out.setdefault(what, []).extend(names)

    def _check_path(self, where: str, path: str) -> None:
        folder, _, name = path.rpartition("/")
        if folder not in self.there.stamps:
            self._check_folder(where, path)
        if not path or len(path) > LINE_LIMIT or not folders.is_writable(path):
            raise UserError(where, f"the path {path[:300]!r}", "a path in one line")
        if name not in self.there.names(folder):
            if "\\" in path:
                raise UserError(where, f"the path {path[:300]!r}", "folders divided by /")
            alike = sorted(other for other in self.there.names(folder) if other.casefold() == name.casefold())
            remedy = f"there is {few(alike)}; names are case-sensitive" if alike else ""
            raise UserError(where, f"{path[:300]} is not in {self.root}", "an existing file", remedy)
        if folder in self._from_list and self.there.leads_out(path):
            raise UserError(where, f"{path[:300]} is a link out of {self.root}", "a file below it")
        if os.path.splitext(name)[1].lower() not in image_decode.SUFFIXES:
            raise UserError(where, f"{path[:300]} is not an image", " ".join(sorted(image_decode.SUFFIXES)))

    def _check_folder(self, where: str, path: str) -> None:
        """Refuse a path that leads elsewhere, in a folder that a list names; one that the reader listed it chose."""
        if path.startswith("/") or {"..", ".", ""} & set(path.split("/")):
            raise UserError(where, f"the path {path[:300]!r}", f"a plain path below {self.root}")
        folder = path.rpartition("/")[0]
        if "\0" not in folder and folders.leads_out(self.root, folder):
            raise UserError(where, f"{folder[:300]} is a link out of {self.root}", "a folder below it")
        self._from_list.add(folder)


def check_persons(records: Records) -> None:
    """Raise UserError for persons whose names differ in nothing but the case of letters: one, most likely, cut in two.

    A sampler would call them wrong for each other.
    """
    seen: dict[str, str] = {}
    for name in sorted({name for name in records.person if name is not None}):
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            first = records.where[records.person.index(name)]
            raise UserError(first, f"the person {name!r} as well as {other!r}"[:300], "one spelling of each name")
