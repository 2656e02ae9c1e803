"""Sets of people as they are published: ORBench, SYSU-MM01, Market-1501. Each reader's rules are its own.

Every set has the splits `train` and `test` (`PATH#test`). Persons are called as their folders are, or as file names
call them, never by the numbers of an annotation: those begin anew in each split.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from trainkit.data import folders, source_splits
from trainkit.data.folders import is_hidden
from trainkit.data.formats import image_decode
from trainkit.data.people import modalities
from trainkit.data.people.records import EITHER, GALLERY, QUERY, SYSU, Layout, Records
from trainkit.errors import UserError, few
from trainkit.files import Json
from trainkit.interfaces import MODALITIES, NIR, RGB, TEXT

JSON_LIMIT = 1 << 30
"""Largest annotation file that is read, in bytes; ORBench's are some 20 MB."""

KNOWN = """\
an index.csv or index.parquet; ORBench (train_annos.json, test_gallery_and_queries.json, or the challenge's \
train/text_annos.json); SYSU-MM01 (cam1 to cam6 and exp); Market-1501 (bounding_box_train, query, bounding_box_test)"""

_Read = Callable[[Records], None]


def kind_of(path: Path) -> str | None:
    """Return the name of the published set at a folder; None where it has no known layout."""
    for kind, (_, marks) in _LAYOUTS.items():
        if any(all((path / name).exists() for name in mark) for mark in marks):
            return kind
    return None


def recognise(path: Path, split: str | None) -> Layout | None:
    """Find the published set at a folder; None where it has no known layout.

    Raises UserError for another split, and for a layout that is no longer read.
    """
    kind = kind_of(path)
    if kind is None:
        return None
    parts, _ = _LAYOUTS[kind]
    if parts is None:
        remedy = "write one in this folder; docs/reference/data/reid.md says how"
        raise UserError(str(path), f"the layout of {kind}, which is no longer read", "an index.csv", remedy)
    split, (root, files, read) = source_splits.choose(parts(path), split, str(path))
    for file in files:
        if not file.is_file():
            raise UserError(f"{path}#{split}", f"no {file.relative_to(path)}", f"the layout of {kind}")
    return Layout(kind, f"{path}#{split}", root, files, read)


_Splits = dict[str, tuple[Path, tuple[Path, ...], _Read]]


# ORBench: Zuo et al., "ReID5o: Achieving Omni Multi-modal Person Re-identification in a Single Model", NeurIPS 2025,
# arXiv 2506.09385.


def _orbench(path: Path) -> _Splits:
    challenge = path if (path / "text_annos.json").is_file() else path / "train"
    if (challenge / "text_annos.json").is_file() and not (path / "train_annos.json").is_file():
        # Its val and test come without the persons of their galleries: nothing here could score them.
        return {"train": _orbench_train(challenge, challenge / "text_annos.json")}
    file = path / "test_gallery_and_queries.json"
    return {
        "train": _orbench_train(path, path / "train_annos.json"),
        "test": (path, (file,), lambda records: _read_orbench_test(records, file)),
    }


def _orbench_train(root: Path, file: Path) -> tuple[Path, tuple[Path, ...], _Read]:
    return root, (file,), lambda records: _read_orbench_train(records, file)


def _read_orbench_train(records: Records, file: Path) -> None:
    """Read captions beside each RGB image; of the same persons everything in the folders nir, cp and sk."""
    names = _Names()
    for n, entry in enumerate(folders.read_json(file, JSON_LIMIT, "a list", list)):
        where = f"{file}, entry {n}"
        if not isinstance(entry, dict):
            raise UserError(where, type(entry).__name__, "a mapping of id, file_path and caption")
        path, number = entry.get("file_path"), entry.get("id")
        if not isinstance(path, str) or not path:
            raise UserError(where, f"file_path {path!r}"[:200], "the path of an image")
        if isinstance(number, bool) or not isinstance(number, int | str) or number == "":
            raise UserError(where, f"id {number!r}"[:200], "the number of a person")
        person = names.of(where, number, path, RGB)
        row = records.picture(where, path, person, RGB)
        captions = entry.get("caption")
        captions = [captions] if isinstance(captions, str) else captions
        if not isinstance(captions, list) or not captions or not all(isinstance(text, str) for text in captions):
            raise UserError(where, f"caption {entry.get('caption')!r}"[:200], "a caption, or a list of some")
        for text in captions:
            records.caption(where, f"{path}#text", text, person, of=row)
    bare = [
        f"vis/{p}/{n}"
        for p in names.persons
        for n in _pictures(records, f"vis/{p}")
        if f"vis/{p}/{n}" not in records.number
    ]
    records.leave_out("images of vis that have no entry", bare)
    for modality, folder in enumerate(MODALITIES[:TEXT]):
        if modality == RGB:
            continue
        strange = sorted(records.there.names(folder) - records.there.names("vis"))
        strange = [name for name in strange if not is_hidden(name) and (records.root / folder / name).is_dir()]
        if strange:
            found = f"folders of persons that vis does not have: {few(strange)}"
            raise UserError(str(records.root / folder), found, "those of vis, the gallery")
        for person in names.persons:
            if person in records.there.names(folder):
                _whole_folder(records, f"{folder}/{person}", person, modality)


def _read_orbench_test(records: Records, file: Path) -> None:
    """Read the gallery, and lists of queries of one to four records, named by their modalities: `NIR+TEXT`."""
    known = folders.read_json(file, JSON_LIMIT, "a mapping of lists", dict)
    if "RGB_GALLERY" not in known:
        raise UserError(str(file), f"lists {few(known)}"[:300], "RGB_GALLERY and lists of queries")
    names = _Names()
    captions: dict[tuple[int, str], int] = {}
    for where, number, parts in _entries(file, "RGB_GALLERY", known.pop("RGB_GALLERY"), 1):
        person = names.of(where, number, parts[0], RGB)
        records.picture(where, parts[0], person, RGB, role=GALLERY)
    for key, entries in known.items():
        words = key.split("+")
        codes = [code for word in words if (code := modalities.code(word)) is not None and code != RGB]
        if len(set(codes)) < len(words):
            expected = "different ones of NIR, CP, SK, TEXT joined by +"
            raise UserError(f"{file}, list {key!r}"[:300], "a list of unknown modalities", expected)
        name = "_".join(MODALITIES[code] for code in codes)
        if name in records.lists:
            raise UserError(f"{file}, list {key!r}", f"{name} again", "each list once")
        queries = records.lists[name] = []
        for where, number, parts in _entries(file, key, entries, len(codes)):
            # Images first: a person of whom a caption speaks is called as the folder of the images.
            for code, part in zip(codes, parts, strict=True):
                if code != TEXT:
                    names.of(where, number, part, code)
            person, query = names.name(number), [-1] * len(MODALITIES)
            for code, part in zip(codes, parts, strict=True):
                if code == TEXT:
                    row = captions.get((number, part))
                    if row is None:
                        row = records.caption(where, f"{person}#text", part, person, role=QUERY)
                        captions[number, part] = row
                else:
                    row = records.number.get(part)
                    if row is None:
                        row = records.picture(where, part, person, code, role=QUERY)
                query[code] = row
            queries.append(query)
        if not queries:
            raise UserError(f"{file}, list {key!r}", "no queries", "at least one")


class _Names:
    """Names of persons by their numbers in an annotation file: the folders of their images."""

    def __init__(self):
        self._names: dict[int | str, str] = {}
        self._numbers: dict[str, int | str] = {}

    @property
    def persons(self) -> Iterable[str]:
        """The names, in the order in which they were found."""
        return self._numbers

    def of(self, where: str, number: int | str, path: str, modality: int) -> str:
        """Return the name in the path of an image. Raises UserError where that is another person's.

        One person under two numbers would be two classes, and wrong for each other.
        """
        person = _person_of(where, path, modality)
        if self._names.setdefault(number, person) != person:
            raise UserError(where, f"person {number} in the folder {person}", f"{self._names[number]}, as before")
        if self._numbers.setdefault(person, number) != number:
            raise UserError(where, f"person {number} in {person}", f"{self._numbers[person]}, as before")
        return person

    def name(self, number: int) -> str:
        """Return the name of a number; one of its own where no image has been seen, which no folder bears."""
        return self._names.get(number, f"number {number}")


def _entries(file: Path, key: str, entries: Json, parts: int) -> Iterator[tuple[str, int, list[str]]]:
    """Return the entries of a list of a test file: place in words, number of the person, paths and captions."""
    if not isinstance(entries, list):
        raise UserError(f"{file}, list {key!r}", type(entries).__name__, "a list")
    for n, entry in enumerate(entries):
        where = f"{file}, {key} entry {n}"
        if not isinstance(entry, list) or len(entry) != parts + 1:
            raise UserError(where, f"{entry!r}"[:200], f"the number of a person and {parts} more")
        number, *rest = entry
        if isinstance(number, bool) or not isinstance(number, int):
            raise UserError(where, f"person {number!r}"[:200], "a whole number")
        if not all(isinstance(part, str) and part for part in rest):
            raise UserError(where, f"{rest!r}"[:200], "paths, and captions for TEXT")
        yield where, number, rest


def _person_of(where: str, path: str, modality: int) -> str:
    """Return the person in `nir/0001/x.jpg`. Raises UserError where the first folder is not of this modality."""
    folders = path.split("/")
    if len(folders) != 3 or modalities.code(folders[0]) != modality or not folders[1]:
        folder = "vis" if modality == RGB else MODALITIES[modality]
        raise UserError(where, f"the path {path[:200]!r}", f"{folder}/<person>/<image>")
    return folders[1]


# SYSU-MM01: Wu et al., "RGB-Infrared Cross-Modality Person Re-Identification", ICCV 2017.

SYSU_INFRARED = frozenset({3, 6})


def _sysu(path: Path) -> _Splits:
    train = tuple(path / "exp" / f"{name}_id.txt" for name in ("train", "val"))
    test = path / "exp" / "test_id.txt"
    # Published figures train on the persons of train_id.txt and val_id.txt: 395.
    return {
        "train": (path, (*train, test), lambda records: _read_sysu(records, train, (test,), EITHER, EITHER)),
        "test": (path, (*train, test), lambda records: _read_sysu(records, (test,), train, GALLERY, QUERY)),
    }


def _read_sysu(
    records: Records, files: tuple[Path, ...], others: tuple[Path, ...], visible: int, infrared: int
) -> None:
    persons = {person: file for file in files for person in _numbers(file)}
    both = sorted({person for file in others for person in _numbers(file)} & set(persons))
    if both:
        raise UserError(str(files[0]), f"persons that are also in {others[0].name}: {few(both)}", "each in one split")
    for camera in range(1, 7):
        if not (records.root / f"cam{camera}").is_dir():
            raise UserError(str(records.root), f"no folder cam{camera}", "cam1 to cam6")
    for person in sorted(persons):
        found = 0
        for camera in range(1, 7):
            if person in records.there.names(f"cam{camera}"):
                kind, role = (NIR, infrared) if camera in SYSU_INFRARED else (RGB, visible)
                found += _whole_folder(records, f"cam{camera}/{person}", person, kind, f"cam{camera}", role)
        if not found:
            raise UserError(str(persons[person]), f"person {person}, without images", "some of each")
    # Cameras 2 and 3 stand in one place; no other two do.
    records.places |= {f"cam{camera}": 3 if camera == 2 else camera for camera in range(1, 7)}


def _numbers(file: Path) -> list[str]:
    """Return persons of a file of numbers divided by commas, as four digits: their folders are called so."""
    text = folders.read_text(file, JSON_LIMIT, "a text file in UTF-8")
    words = [word.strip() for word in text.replace("\n", ",").split(",") if word.strip()]
    bad = [word for word in words if not re.fullmatch(r"[0-9]{1,9}", word)]
    if bad or not words:
        raise UserError(str(file), f"{few(bad)}"[:200] if bad else "no numbers", "numbers divided by commas")
    return [f"{int(word):04d}" for word in words]


# Market-1501: Zheng et al., "Scalable Person Re-identification: A Benchmark", ICCV 2015. DukeMTMC-reID has its layout.

_MARKET = re.compile(r"(-1|[0-9]{4,9})_c([0-9]{1,4})[^0-9].*")


def _market(path: Path) -> _Splits:
    def train(records: Records) -> None:
        _read_market(records, "bounding_box_train", EITHER)

    def test(records: Records) -> None:
        _read_market(records, "query", QUERY)
        _read_market(records, "bounding_box_test", GALLERY)

    return {"train": (path, (), train), "test": (path, (), test)}


def _read_market(records: Records, folder: str, role: int) -> None:
    """Read person and camera in names, `0002_c1s1_000451_03.jpg`; -1 is left out, 0000 is nobody in particular."""
    names = _pictures(records, folder)
    if not names:
        raise UserError(str(records.root / folder), "no images", "the layout of Market-1501")
    for name in names:
        where = str(records.root / folder / name)
        found = _MARKET.fullmatch(name)
        if not found:
            raise UserError(where, f"the name {name!r}"[:200], "person and camera, as in 0002_c1s1_000451_03.jpg")
        person, camera = found.groups()
        if person == "-1":
            records.leave_out("images of no person (-1, which Market-1501 calls junk)", [f"{folder}/{name}"])
            continue
        if int(person) == 0 and role != GALLERY:
            raise UserError(where, "a distractor outside of the gallery", "a person in queries")
        camera = f"c{int(camera)}"
        records.picture(where, f"{folder}/{name}", person if int(person) else None, RGB, camera, role)
        records.places[camera] = int(camera[1:])


# Files and folders.


def _whole_folder(
    records: Records, folder: str, person: str, modality: int, camera: str = "", role: int = EITHER
) -> int:
    """Add every image of a folder; how many there are."""
    names = _pictures(records, folder)
    for name in names:
        records.picture(os.path.join(records.root, folder, name), f"{folder}/{name}", person, modality, camera, role)
    return len(names)


def _pictures(records: Records, folder: str) -> list[str]:
    """Return names of the images of a folder, in their order; those of other kinds are left out."""
    names = sorted(name for name in records.there.names(folder) if not is_hidden(name))
    pictures = [name for name in names if os.path.splitext(name)[1].lower() in image_decode.SUFFIXES]
    records.leave_out("files that are not images", [f"{folder}/{name}" for name in sorted({*names} - {*pictures})])
    return pictures


_LAYOUTS: dict[str, tuple[Callable[[Path], _Splits] | None, tuple[tuple[str, ...], ...]]] = {
    "ORBench": (
        _orbench,
        (("train_annos.json",), ("test_gallery_and_queries.json",), ("text_annos.json",), ("train/text_annos.json",)),
    ),
    SYSU: (_sysu, (("exp", "cam1"),)),
    "Market-1501": (_market, (("bounding_box_train",), ("bounding_box_test",))),
    "RegDB": (None, (("idx/train_visible_1.txt",), ("idx/test_visible_1.txt",))),
    "LLCM": (None, (("idx/train_vis.txt",), ("test_vis",))),
}
"""Name of each layout, its reader (None: no longer read), and groups of names one of which is there as a whole."""
