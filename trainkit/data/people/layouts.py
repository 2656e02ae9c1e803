"""Sets of people as they are published: ORBench, Market-1501. Each reader's rules are its own.

Every set has the splits `train` and `test` (`PATH#test`). Persons are called as their folders are, or as file names
call them, never by the numbers of an annotation: those begin anew in each split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from trainkit.data import folders, source_splits
from trainkit.data.people import modalities
from trainkit.data.people.records import EITHER, GALLERY, QUERY, PersonRecord, Records
from trainkit.errors import UserError, few
from trainkit.files import Json
from trainkit.interfaces import MODALITIES, RGB, TEXT

JSON_LIMIT = 1 << 30
"""Largest annotation file that is read, in bytes; ORBench's are some 20 MB."""

KNOWN = """\
an index.csv or index.parquet; ORBench (train_annos.json, test_gallery_and_queries.json, or the challenge's \
train/text_annos.json); Market-1501 (bounding_box_train, query, bounding_box_test)"""

_Splits = dict[str, tuple[Path, tuple[Path, ...], Callable[[Records], None]]]
"""Name of each split to where paths begin, the files that say what it holds, and its reader."""


def kind_of(path: Path) -> str | None:
    """Return the name of the published set at a folder; None where it has no known layout."""
    for kind, (_, marks) in _LAYOUTS.items():
        if any(all((path / name).exists() for name in mark) for mark in marks):
            return kind
    return None


def read(path: Path, split: str | None) -> Records | None:
    """Read the published set at a folder; None where it has no known layout.

    Raises UserError for another split, and at the first error in the set.
    """
    kind = kind_of(path)
    if kind is None:
        return None
    split, (root, files, reader) = source_splits.choose(_LAYOUTS[kind][0](path), split, str(path))
    for file in files:
        if not file.is_file():
            raise UserError(f"{path}#{split}", f"no {file.relative_to(path)}", f"the layout of {kind}")
    records = Records(kind, f"{path}#{split}", root, files)
    reader(records)
    return records


# ORBench: Zuo et al., "ReID5o: Achieving Omni Multi-modal Person Re-identification in a Single Model", NeurIPS 2025,
# arXiv 2506.09385.


def _orbench(path: Path) -> _Splits:
    challenge = path if (path / "text_annos.json").is_file() else path / "train"
    captions, test = challenge / "text_annos.json", path / "test_gallery_and_queries.json"
    if captions.is_file() and not (path / "train_annos.json").is_file():
        # Its val and test come without the persons of their galleries: nothing here could score them.
        return {"train": (challenge, (captions,), lambda records: _read_orbench_train(records, captions))}
    train = path / "train_annos.json"
    return {
        "train": (path, (train,), lambda records: _read_orbench_train(records, train)),
        "test": (path, (test,), lambda records: _read_orbench_test(records, test)),
    }


def _read_orbench_train(records: Records, file: Path) -> None:
    """Read captions beside each RGB image; of the same persons everything in the folders nir, cp and sk."""
    names: dict[int | str, str] = {}
    for n, entry in enumerate(folders.read_json(file, JSON_LIMIT, "a list", list)):
        where = f"{file}, entry {n}"
        fields = entry if isinstance(entry, dict) else {}
        path, number, captions = fields.get("file_path"), fields.get("id"), fields.get("caption")
        captions = captions if isinstance(captions, list) else [captions]
        texts = [text for text in captions if isinstance(text, str)]
        sound = len(texts) == len(captions) > 0 and not isinstance(number, bool)
        if not isinstance(path, str) or not isinstance(number, int | str) or not sound:
            raise UserError(where, f"{entry!r}"[:200], "id, file_path, and caption: a text or a list of some")
        person = _person_of(where, names, number, path, RGB)
        row = records.picture(where, path, person, RGB)
        for text in texts:
            records.caption(where, f"{path}#text", text, person, of=row)
    persons = list(dict.fromkeys(names.values()))
    listed = [f"vis/{person}/{name}" for person in persons for name in records.images_in(f"vis/{person}")]
    records.leave_out("images of vis that have no entry", [path for path in listed if path not in records.number])
    for modality, folder in enumerate(MODALITIES[:TEXT]):
        if modality == RGB:
            continue
        strange = sorted(records.there.names(folder) - records.there.names("vis"))
        strange = [name for name in strange if not folders.is_hidden(name) and (records.root / folder / name).is_dir()]
        if strange:
            found = f"folders of persons that vis does not have: {few(strange)}"
            raise UserError(str(records.root / folder), found, "those of vis, the gallery")
        for person in persons:
            if person in records.there.names(folder):
                records.add_folder(f"{folder}/{person}", person, modality)


def _read_orbench_test(records: Records, file: Path) -> None:
    """Read the gallery, and lists of queries of one to four records, named by their modalities: `NIR+TEXT`."""
    known = folders.read_json(file, JSON_LIMIT, "a mapping of lists", dict)
    if "RGB_GALLERY" not in known:
        raise UserError(str(file), f"lists {few(known)}"[:300], "RGB_GALLERY and lists of queries")
    names: dict[int | str, str] = {}
    captions: dict[tuple[int, str], int] = {}
    for where, number, (path,) in _entries(file, "RGB_GALLERY", known.pop("RGB_GALLERY"), 1):
        records.picture(where, path, _person_of(where, names, number, path, RGB), RGB, role=GALLERY)
    for key, entries in known.items():
        words = key.split("+")
        codes = [code for word in words if (code := modalities.code(word)) not in (None, RGB)]
        name = "_".join(MODALITIES[code] for code in codes)
        if len({*codes}) < len(words) or name in records.lists:
            expected = "different ones of NIR, CP, SK, TEXT joined by +, each list once"
            raise UserError(f"{file}, list {key!r}"[:300], "a list of unknown modalities", expected)
        queries = records.lists[name] = []
        for where, number, parts in _entries(file, key, entries, len(codes)):
            query = [-1] * len(MODALITIES)
            # Images first: a person of whom a caption speaks is called as the folder of the images.
            for code, part in sorted(zip(codes, parts, strict=True)):
                if code != TEXT:
                    person, row = _person_of(where, names, number, part, code), records.number.get(part)
                    row = records.picture(where, part, person, code, role=QUERY) if row is None else row
                elif (row := captions.get((number, part))) is None:
                    person = names.get(number, f"number {number}")  # without images a name that no folder bears
                    row = records.caption(where, f"{person}#text", part, person, role=QUERY)
                    captions[number, part] = row
                query[code] = row
            queries.append(query)
        if not queries:
            raise UserError(f"{file}, list {key!r}", "no queries", "at least one")


def _entries(file: Path, key: str, entries: Json, parts: int) -> Iterator[tuple[str, int, list[str]]]:
    """Return the entries of a list of a test file: place in words, number of the person, paths and captions."""
    if not isinstance(entries, list):
        raise UserError(f"{file}, list {key!r}", type(entries).__name__, "a list")
    for n, entry in enumerate(entries):
        where = f"{file}, {key} entry {n}"
        kinds = [*map(type, entry)] if isinstance(entry, list) else []
        if kinds != [int, *[str] * parts]:
            raise UserError(where, f"{entry!r}"[:200], f"the number of a person, and {parts} texts: paths, captions")
        yield where, entry[0], entry[1:]


def _person_of(where: str, names: dict[int | str, str], number: int | str, path: str, modality: int) -> str:
    """Return the person in `nir/0001/x.jpg`, and note it as that of the number, by which captions know it.

    Raises UserError where the first folder is not of this modality, and where the number is another person's.
    """
    parts = path.split("/")
    if len(parts) != 3 or modalities.code(parts[0]) != modality or not parts[1]:
        folder = "vis" if modality == RGB else MODALITIES[modality]
        raise UserError(where, f"the path {path[:200]!r}", f"{folder}/<person>/<image>")
    if names.setdefault(number, parts[1]) != parts[1]:
        raise UserError(where, f"person {number} in the folder {parts[1]}", f"{names[number]}, as before")
    return parts[1]


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
    names = records.images_in(folder)
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
        who = person if int(person) else None
        records.add(PersonRecord(where, f"{folder}/{name}", who, RGB, camera, role))
        records.places[camera] = int(camera[1:])


_LAYOUTS: dict[str, tuple[Callable[[Path], _Splits], tuple[tuple[str, ...], ...]]] = {
    "ORBench": (
        _orbench,
        (("train_annos.json",), ("test_gallery_and_queries.json",), ("text_annos.json",), ("train/text_annos.json",)),
    ),
    "Market-1501": (_market, (("bounding_box_train",), ("bounding_box_test",))),
}
"""Name of each layout, its reader, and groups of names one of which is there as a whole."""
