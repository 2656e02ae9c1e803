"""Sets of people as they are published: ORBench, SYSU-MM01, Market-1501, RegDB, LLCM. Each reader's rules are its own.

Every set has the splits `train` and `test` (`PATH#test`); RegDB has ten of each. Persons are called as their folders
are, or as file names call them, never by the numbers of an annotation: those begin anew in each split.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from trainkit.data import folders
from trainkit.data.folders import is_hidden
from trainkit.data.formats import image_decode
from trainkit.data.people import modalities
from trainkit.data.people.records import EITHER, GALLERY, QUERY, Layout, Rows
from trainkit.errors import UserError, few
from trainkit.files import Json
from trainkit.interfaces import MODALITIES, NIR, RGB, TEXT

JSON_LIMIT = 1 << 30
"""Largest annotation file that is read, in bytes; ORBench's are some 20 MB."""

KNOWN = """\
an index.csv or index.parquet; ORBench (train_annos.json, test_gallery_and_queries.json, or the challenge's \
train/text_annos.json); SYSU-MM01 (cam1 to cam6 and exp); Market-1501 (bounding_box_train, query, bounding_box_test); \
RegDB (idx/train_visible_1.txt); LLCM (idx/train_vis.txt)"""

_Read = Callable[[Rows], None]


def recognise(path: Path, split: str | None) -> Layout | None:
    """Find the published set at a folder; None where it has no known layout. Raises UserError for another split."""
    wanted = split or "train"
    for kind, parts, marks in _LAYOUTS:
        if any(all((path / name).exists() for name in mark) for mark in marks):
            splits = parts(path)
            if wanted not in splits:
                found = f"no such split of {kind}"
                raise UserError(f"{path}#{wanted}", found, f"{few(splits, 20)} after #")
            root, files, read = splits[wanted]
            for file in files:
                if not file.is_file():
                    raise UserError(f"{path}#{wanted}", f"no {file.relative_to(path)}", f"the layout of {kind}")
            return Layout(kind, f"{path}#{wanted}", root, wanted, files, read)
    return None


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
        "test": (path, (file,), lambda rows: _read_orbench_test(rows, file)),
    }


def _orbench_train(root: Path, file: Path) -> tuple[Path, tuple[Path, ...], _Read]:
    return root, (file,), lambda rows: _read_orbench_train(rows, file)


def _read_orbench_train(rows: Rows, file: Path) -> None:
    """Read captions beside each RGB image; of the same persons everything in the folders nir, cp and sk."""
    folders: dict[object, str] = {}
    numbers: dict[str, object] = {}
    for n, entry in enumerate(_json(file, list)):
        where = f"{file}, entry {n}"
        if not isinstance(entry, dict):
            raise UserError(where, type(entry).__name__, "a mapping of id, file_path and caption")
        path, number = entry.get("file_path"), entry.get("id")
        if not isinstance(path, str) or not path:
            raise UserError(where, f"file_path {path!r}"[:200], "the path of an image")
        if isinstance(number, bool) or not isinstance(number, int | str) or number == "":
            raise UserError(where, f"id {number!r}"[:200], "the number of a person")
        person = _person_of(where, path, RGB)
        # One person under two numbers would be two classes, and wrong for each other.
        if folders.setdefault(number, person) != person:
            raise UserError(where, f"id {number} in the folder {person}", f"{folders[number]}, as before")
        if numbers.setdefault(person, number) != number:
            raise UserError(where, f"id {number} for the folder {person}", f"{numbers[person]}, as before")
        row = rows.picture(where, path, person, RGB)
        captions = entry.get("caption")
        captions = [captions] if isinstance(captions, str) else captions
        if not isinstance(captions, list) or not captions or not all(isinstance(text, str) for text in captions):
            raise UserError(where, f"caption {entry.get('caption')!r}"[:200], "a caption, or a list of some")
        for text in captions:
            rows.caption(where, f"{path}#text", text, person, of=row)
    bare = [f"vis/{p}/{n}" for p in numbers for n in _pictures(rows, f"vis/{p}") if f"vis/{p}/{n}" not in rows.number]
    rows.leave_out("images of vis that have no entry", bare)
    for modality, folder in enumerate(MODALITIES[:TEXT]):
        if modality == RGB:
            continue
        strange = sorted(rows.names(folder) - rows.names("vis"))
        strange = [name for name in strange if not is_hidden(name) and (rows.root / folder / name).is_dir()]
        if strange:
            found = f"folders of persons that vis does not have: {few(strange)}"
            raise UserError(str(rows.root / folder), found, "those of vis, the gallery")
        for person in numbers:
            if person in rows.names(folder):
                _whole_folder(rows, f"{folder}/{person}", person, modality)


def _read_orbench_test(rows: Rows, file: Path) -> None:
    """Read the gallery, and lists of queries of one to four records, named by their modalities: `NIR+TEXT`."""
    known = _json(file, dict)
    if "RGB_GALLERY" not in known:
        raise UserError(str(file), f"lists {few(known)}"[:300], "RGB_GALLERY and lists of queries")
    names = _Names()
    captions: dict[tuple[int, str], int] = {}
    for where, number, parts in _entries(file, "RGB_GALLERY", known.pop("RGB_GALLERY"), 1):
        person = names.of(where, number, parts[0], RGB)
        rows.picture(where, parts[0], person, RGB, role=GALLERY)
    for key, entries in known.items():
        words = key.split("+")
        codes = [code for word in words if (code := modalities.code(word)) is not None and code != RGB]
        if len(set(codes)) < len(words):
            expected = "different ones of NIR, CP, SK, TEXT joined by +"
            raise UserError(f"{file}, list {key!r}"[:300], "a list of unknown modalities", expected)
        name = "_".join(MODALITIES[code] for code in codes)
        if name in rows.lists:
            raise UserError(f"{file}, list {key!r}", f"{name} again", "each list once")
        queries = rows.lists[name] = []
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
                        row = rows.caption(where, f"{person}#text", part, person, role=QUERY)
                        captions[number, part] = row
                else:
                    row = rows.number.get(part)
                    if row is None:
                        row = rows.picture(where, part, person, code, role=QUERY)
                query[code] = row
            queries.append(query)
        if not queries:
            raise UserError(f"{file}, list {key!r}", "no queries", "at least one")


class _Names:
    """Names of persons by their numbers in a test file: the folders of their images."""

    def __init__(self):
        self._names: dict[int, str] = {}
        self._numbers: dict[str, int] = {}

    def of(self, where: str, number: int, path: str, modality: int) -> str:
        """Return the name in the path of an image. Raises UserError where that is another person's."""
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
        "train": (path, (*train, test), lambda rows: _read_sysu(rows, train, (test,), EITHER, EITHER)),
        "test": (path, (*train, test), lambda rows: _read_sysu(rows, (test,), train, GALLERY, QUERY)),
    }


def _read_sysu(rows: Rows, files: tuple[Path, ...], others: tuple[Path, ...], visible: int, infrared: int) -> None:
    persons = {person: file for file in files for person in _numbers(file)}
    both = sorted({person for file in others for person in _numbers(file)} & set(persons))
    if both:
        raise UserError(str(files[0]), f"persons that are also in {others[0].name}: {few(both)}", "each in one split")
    for camera in range(1, 7):
        if not (rows.root / f"cam{camera}").is_dir():
            raise UserError(str(rows.root), f"no folder cam{camera}", "cam1 to cam6")
    for person in sorted(persons):
        found = 0
        for camera in range(1, 7):
            if person in rows.names(f"cam{camera}"):
                kind, role = (NIR, infrared) if camera in SYSU_INFRARED else (RGB, visible)
                found += _whole_folder(rows, f"cam{camera}/{person}", person, kind, f"cam{camera}", role)
        if not found:
            raise UserError(str(persons[person]), f"person {person}, without images", "some of each")
    # Cameras 2 and 3 stand in one place; no other two do.
    rows.places |= {f"cam{camera}": 3 if camera == 2 else camera for camera in range(1, 7)}
    rows.hides, rows.by_person, rows.trials = "place", True, "sysu"


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
    def train(rows: Rows) -> None:
        _read_market(rows, "bounding_box_train", EITHER)

    def test(rows: Rows) -> None:
        _read_market(rows, "query", QUERY)
        _read_market(rows, "bounding_box_test", GALLERY)

    return {"train": (path, (), train), "test": (path, (), test)}


def _read_market(rows: Rows, folder: str, role: int) -> None:
    """Read person and camera in names, `0002_c1s1_000451_03.jpg`; -1 is left out, 0000 is nobody in particular."""
    names = _pictures(rows, folder)
    if not names:
        raise UserError(str(rows.root / folder), "no images", "the layout of Market-1501")
    for name in names:
        where = str(rows.root / folder / name)
        found = _MARKET.fullmatch(name)
        if not found:
            raise UserError(where, f"the name {name!r}"[:200], "person and camera, as in 0002_c1s1_000451_03.jpg")
        person, camera = found.groups()
        if person == "-1":
            rows.leave_out("images of no person (-1, which Market-1501 calls junk)", [f"{folder}/{name}"])
            continue
        if int(person) == 0 and role != GALLERY:
            raise UserError(where, "a distractor outside of the gallery", "a person in queries")
        camera = f"c{int(camera)}"
        rows.picture(where, f"{folder}/{name}", person if int(person) else None, RGB, camera, role)
        rows.places[camera] = int(camera[1:])


# RegDB: Nguyen et al., "Person Recognition System Based on a Combination of Body Images from Visible Light and Thermal
# Cameras", Sensors 2017; the ten divisions of its 412 persons are those of Ye et al.


def _regdb(path: Path) -> _Splits:
    def entry(split: str, trial: int) -> tuple[Path, tuple[Path, ...], _Read]:
        files = tuple(path / "idx" / f"{split}_{kind}_{trial}.txt" for kind in ("visible", "thermal"))
        roles = (EITHER, EITHER) if split == "train" else (GALLERY, QUERY)

        def read(rows: Rows) -> None:
            for file, kind, role in zip(files, (RGB, NIR), roles, strict=True):
                for where, picture in _listed(file):
                    # `Visible/12/male_back_v_00000_1.bmp 0`: the number after the path begins anew in each file.
                    rows.picture(where, picture, _folder_of(where, picture), kind, role=role)

        return path, files, read

    splits = {split: entry(split, 1) for split in ("train", "test")}
    return splits | {f"{split}_{trial}": entry(split, trial) for split in splits for trial in range(1, 11)}


# LLCM: Zhang and Wang, "Diverse Embedding Expansion Network and Low-Light Cross-Modality Benchmark for Visible-Infrared
# Person Re-identification", CVPR 2023, arXiv 2303.14481.

_LLCM = re.compile(r"_c([0-9]{1,4})_")


def _llcm(path: Path) -> _Splits:
    lists, test = tuple(path / "idx" / f"train_{name}.txt" for name in ("vis", "nir")), path / "idx" / "test_id.txt"
    return {
        "train": (path, lists, lambda rows: _read_llcm_train(rows, lists)),
        "test": (path, (test,), lambda rows: _read_llcm_test(rows, test)),
    }


def _read_llcm_train(rows: Rows, lists: tuple[Path, ...]) -> None:
    for file, modality in zip(lists, (RGB, NIR), strict=True):
        for where, picture in _listed(file):
            camera = _LLCM.search(picture.rpartition("/")[2])
            name = f"cam{int(camera.group(1))}" if camera else ""
            rows.picture(where, picture, _folder_of(where, picture), modality, name)


def _read_llcm_test(rows: Rows, file: Path) -> None:
    persons = sorted(_numbers(file))
    for folder, modality, role in (("test_vis", RGB, GALLERY), ("test_nir", NIR, QUERY)):
        found, there = 0, set[str]()
        for camera in sorted(name for name in rows.names(folder) if re.fullmatch(r"cam[0-9]{1,4}", name)):
            rows.places[camera] = int(camera[3:])
            for person in persons:
                if person in rows.names(f"{folder}/{camera}"):
                    there.add(person)
                    found += _whole_folder(rows, f"{folder}/{camera}/{person}", person, modality, camera, role)
        if not found:
            raise UserError(str(rows.root / folder), "no images", f"{folder}/cam1/0001/<image>, and so on")
        rows.leave_out(f"people of {file.name} without images in {folder}", sorted(set(persons) - there))
    rows.by_person, rows.trials = True, "sysu"


# Files and folders.


def _whole_folder(rows: Rows, folder: str, person: str, modality: int, camera: str = "", role: int = EITHER) -> int:
    """Add every image of a folder; how many there are."""
    names = _pictures(rows, folder)
    for name in names:
        rows.picture(os.path.join(rows.root, folder, name), f"{folder}/{name}", person, modality, camera, role)
    return len(names)


def _pictures(rows: Rows, folder: str) -> list[str]:
    """Return names of the images of a folder, in their order; those of other kinds are left out."""
    names = sorted(_visible(rows, folder))
    pictures = [name for name in names if os.path.splitext(name)[1].lower() in image_decode.SUFFIXES]
    rows.leave_out("files that are not images", [f"{folder}/{name}" for name in sorted({*names} - {*pictures})])
    return pictures


def _visible(rows: Rows, folder: str) -> set[str]:
    """Return names in a folder that are not hidden."""
    return {name for name in rows.names(folder) if not is_hidden(name)}


def _folder_of(where: str, path: str) -> str:
    """Return the folder that an image is in, which bears the name of the person."""
    folders = path.split("/")
    if len(folders) < 3:
        raise UserError(where, f"the path {path[:200]!r}", "<modality>/<person>/<image>")
    return folders[-2]


def _listed(file: Path) -> Iterator[tuple[str, str]]:
    """Return the paths in lines `path number`, with their place in words."""
    for n, line in enumerate(folders.read_text(file, JSON_LIMIT, "a text file in UTF-8").split("\n"), start=1):
        if not line.strip():
            continue
        path, space, number = line.strip().rpartition(" ")
        if not space or not number.isdigit():
            raise UserError(f"{file}, line {n}", f"{line.strip()[:200]!r}", "a path and the number of a person")
        yield f"{file}, line {n}", path.strip()


def _json(file: Path, kind: type) -> Json:
    value = folders.read_json(file, JSON_LIMIT, "whole JSON")
    if not isinstance(value, kind):
        raise UserError(str(file), f"a {type(value).__name__}", "a list" if kind is list else "a mapping of lists")
    return value


_LAYOUTS: tuple[tuple[str, Callable[[Path], _Splits], tuple[tuple[str, ...], ...]], ...] = (
    (
        "ORBench",
        _orbench,
        (("train_annos.json",), ("test_gallery_and_queries.json",), ("text_annos.json",), ("train/text_annos.json",)),
    ),
    ("SYSU-MM01", _sysu, (("exp", "cam1"),)),
    ("Market-1501", _market, (("bounding_box_train",), ("bounding_box_test",))),
    ("RegDB", _regdb, (("idx/train_visible_1.txt",), ("idx/test_visible_1.txt",))),
    ("LLCM", _llcm, (("idx/train_vis.txt",), ("test_vis",))),
)
"""Name of each layout, its reader, and groups of names one of which is there as a whole."""
