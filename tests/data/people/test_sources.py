"""Readers of sets of people: what each layout means, and a sentence with file and row for each mistake in one."""

import csv
import json
import os
import sys
import types
from pathlib import Path

import numpy as np
import people_sets
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.data.people import sources
from trainkit.data.people.records import EITHER, GALLERY, QUERY, PersonRecord
from trainkit.errors import UserError
from trainkit.interfaces import CP, NIR, RGB, SK, TEXT


def read(text, part: str = "train", **options) -> types.SimpleNamespace:
    """The records of a set by column, and what else is known of it."""
    found = sources.find(str(text), part, **options)
    columns = {name: [getattr(record, name) for record in found.every] for name in PersonRecord._fields}
    ids, rows = columns.pop("id"), columns.pop("where")
    told = {"number": found.number, "lists": found.lists, "places": found.places, "root": found.root}
    return types.SimpleNamespace(ids=ids, rows=rows, losses=found.losses(), **told, **columns)


def refused(text) -> UserError:
    with pytest.raises(UserError) as error:
        read(text)
    return error.value


def edit(file: Path, change) -> None:
    """Change what a JSON file holds."""
    value = json.loads(file.read_text())
    change(value)
    people_sets.write_json(file, value)


# An index.


def index(root: Path, *lines: tuple, columns=("path", "person", "camera", "modality", "text")) -> Path:
    for name in ("a.png", "b.png", "n.png"):
        people_sets.picture(root / name)
    return people_sets.write_csv(root / "index.csv", lines, columns)


@pytest.mark.parametrize(
    ("columns", "lines", "expected"),
    [
        (
            ("path", "person", "camera", "modality", "text"),
            [("a.png", "p1", "c1", "rgb", " A red\n coat. "), ("n.png", "p1", "", "IR", "")],
            {
                "ids": ["a.png", "a.png#text", "n.png"],
                "modality": [RGB, TEXT, NIR],
                "of": [-1, 0, -1],
                "text": ["", "A red coat.", ""],
                "camera": ["c1", "c1", ""],
                "person": ["p1"] * 3,
                "role": [EITHER] * 3,
            },
        ),
        (
            ("path", "person", "camera", "modality", "text", "of"),
            [
                ("", "p1", "", "text", "one", "a.png"),
                ("", "p1", "", "TEXT", "two", "a.png"),
                ("", "p2", "", "text", "alone", ""),
                ("a.png", "p1", "", "visible", "", ""),
            ],
            {
                "ids": ["a.png", "a.png#text", "a.png#text 2", "index.csv, line 4"],
                "of": [-1, 0, 0, -1],
                "text": ["", "one", "two", "alone"],
            },
        ),
        (
            ("path", "person", "modality", "role"),
            [("a.png", "-1", "rgb", ""), ("b.png", "p", "rgb", "Gallery"), ("n.png", "p", "nir", "query")],
            {"person": [None, "p", "p"], "role": [GALLERY, GALLERY, QUERY]},
        ),
    ],
    ids=["a caption beside its image", "captions in rows of their own", "roles and distractors"],
)
def test_rows_of_an_index_become_records(tmp_path, columns, lines, expected):
    index(tmp_path, *lines, columns=columns)
    found = read(tmp_path)
    assert {name: getattr(found, name) for name in expected} == expected


def test_splits_of_an_index(tmp_path):
    columns = ("path", "person", "modality", "split")
    index(tmp_path, ("a.png", "p", "rgb", "train"), ("b.png", "q", "rgb", "val"), columns=columns)
    assert read(tmp_path).ids == read(f"{tmp_path}#train").ids == ["a.png"]
    assert read(f"{tmp_path}#val").ids == read(f"{tmp_path / 'index.csv'}#val").ids == ["b.png"]
    assert "train, val" in str(refused(f"{tmp_path}#test"))
    index(tmp_path, ("a.png", "p", "rgb", "all"), columns=columns)
    assert read(tmp_path).ids == ["a.png"]
    index(tmp_path, ("a.png", "p", "rgb", ""), ("b.png", "p", "rgb", "all"), columns=columns)
    assert "1 rows whose split is empty" in str(refused(tmp_path))
    index(tmp_path, ("a.png", "p", "", "rgb", ""))
    assert "no column `split`" in str(refused(f"{tmp_path}#val"))


def test_whole_numbers_in_parquet_are_names_and_fractions_are_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    people_sets.picture(tmp_path / "a.png")
    table = {"path": ["a.png"], "person": [7], "modality": ["rgb"]}
    pq.write_table(pa.table(table), tmp_path / "index.parquet")
    assert read(tmp_path).person == ["7"]
    pq.write_table(pa.table(table | {"person": [7.0]}), tmp_path / "index.parquet")
    assert read(tmp_path).person == ["7"]
    pq.write_table(pa.table(table | {"person": [7.5]}), tmp_path / "index.parquet")
    assert "row 0: person 7.5" in str(refused(tmp_path))
    pq.write_table(pa.table(table | {"person": [b"x"]}), tmp_path / "index.parquet")
    assert "row 0: person b'x'" in str(refused(tmp_path))
    data = (tmp_path / "index.parquet").read_bytes()
    (tmp_path / "index.parquet").write_bytes(data[:-20])
    assert "cannot be read" in str(refused(tmp_path))


GOOD = ("a.png", "p", "c", "rgb", "")


@pytest.mark.parametrize(
    "line, said",
    [
        (("gone.png", "p", "c", "rgb", ""), "gone.png is not in"),
        (("sub/gone.png", "p", "c", "rgb", ""), "sub/gone.png is not in"),
        (("A.png", "p", "c", "rgb", ""), "A.png is not in"),
        (("b.png", "", "c", "rgb", ""), "no person"),
        (("b.png", "p", "c", "", ""), "modality ''"),
        (("b.png", "p", "c", "thermo", ""), "modality 'thermo'"),
        (("b.png", "p", "c", "text", "words"), "a caption with the path 'b.png'"),
        (("", "p", "c", "text", " "), "an empty caption"),
        (("", "p", "c", "rgb", ""), "no path"),
        (("b.png", "p", "c", "nir", "words"), "a caption of 'p' beside an image of nir"),
        (("a.png", "p", "c", "rgb", ""), "a.png, a duplicate of"),
        (("../b.png", "p", "c", "rgb", ""), "the path '../b.png'"),
        (("sub/../b.png", "p", "c", "rgb", ""), "the path 'sub/../b.png'"),
        (("./b.png", "p", "c", "rgb", ""), "the path './b.png'"),
        (("/etc/b.png", "p", "c", "rgb", ""), "the path '/etc/b.png'"),
        (("sub\\b.png", "p", "c", "rgb", ""), "is not in"),
        (("b\n.png", "p", "c", "rgb", ""), "the path 'b\\n.png'"),
        (("index.csv", "p", "c", "rgb", ""), "index.csv is not an image"),
        (("b.png", "p\nq", "c", "rgb", ""), "1 name not in UTF-8, or with control characters:\n  p\\x0aq\n"),
        (("b.png", "p", "c\x85d", "rgb", ""), "1 name not in UTF-8, or with control characters:\n  c\\u0085d\n"),
        (("b.png", "p", "c", "rgb"), "4 cells"),
        (("b.png", "p", "c", "rgb", "", ""), "6 cells"),
        (("", "p", "c", "text", "w" * 10_001), "a record of more than 10,000 characters"),
    ],
)
def test_mistakes_in_an_index_are_named_by_line(tmp_path, line, said):
    file = index(tmp_path, GOOD, line)
    error = refused(tmp_path)
    assert said in str(error)
    assert error.where == f"{file}, line 3"
    assert error.expected


@pytest.mark.parametrize(
    "of, person, said",
    [
        ("n.png", "p", "a caption of 'p' for the image 'n.png'"),
        ("x.png", "p", "a caption of 'p' for the image 'x.png'"),
        ("a.png", "q", "a caption of 'q' for the image 'a.png'"),
    ],
)
def test_a_caption_of_something_else(tmp_path, of, person, said):
    columns = ("path", "person", "modality", "text", "of")
    lines = [("a.png", "p", "rgb", "", ""), ("n.png", "p", "nir", "", ""), ("", person, "text", "words", of)]
    index(tmp_path, *lines, columns=columns)
    assert said in str(refused(tmp_path))
    index(tmp_path, ("a.png", "p", "rgb", "", "n.png"), columns=columns)
    assert "an image of the image 'n.png'" in str(refused(tmp_path))


@pytest.mark.parametrize(
    "text, said",
    [
        (b"", "columns"),
        (b"path,person\na.png,p\n", "columns path (string), person (string); expected modality in"),
        (b"person,modality\np,rgb\n", "columns person, modality"),
        (b"path,person,modality,person\na.png,p,rgb,q\n", "the column person more than once"),
        (b"path,person,modality\na.png,\xff\xfe,rgb\n", "cannot be read"),
        (b'path,person,modality\n"a.png,p,rgb\n', "cannot be read"),
        (b"path,person,modality\na.png,p\x00q,rgb\n", ""),
        (b"path,person,modality,role\na.png,p,rgb,probe\n", "role 'probe'"),
    ],
)
def test_damaged_indexes(tmp_path, text, said):
    people_sets.picture(tmp_path / "a.png")
    (tmp_path / "index.csv").write_bytes(text)
    error = refused(tmp_path)
    assert said in str(error)
    assert "index.csv" in str(error)


def test_each_folder_is_listed_once(tmp_path, monkeypatch):
    people_sets.index(tmp_path, 3)
    listed, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda place: listed.append(place) or scandir(place))
    rows = read(tmp_path)
    assert len(listed) == len(set(listed)) == 3 * 4 and len(rows.ids) == 27


# What is found where.


def test_samples_and_derived_sets_are_folders_with_an_index(tmp_path, monkeypatch):
    people_sets.index(tmp_path / "drawn" / "train", ["a", "b"])
    people_sets.index(tmp_path / "drawn" / "val", ["c"])
    sample = types.ModuleType("trainkit.data.synthetic.people")
    sample.folder = lambda: tmp_path / "drawn"
    derived = types.ModuleType("trainkit.data.synthetic.derived_modalities")
    derived.folder = lambda path: tmp_path / "drawn" / path.name
    monkeypatch.setitem(sys.modules, sample.__name__, sample)
    monkeypatch.setitem(sys.modules, derived.__name__, derived)
    monkeypatch.setenv("TRAINKIT_DATA", str(tmp_path))
    assert set(read("sample:people").person) == {"a", "b"}
    assert set(read("sample:people", "val").person) == {"c"}
    assert set(read("derived:faces/val").person) == {"c"}
    assert "no built-in set" in str(refused("sample:eyes"))
    assert sources.missing("sample:people") is None
    assert "faces" in sources.missing("derived:faces")
    assert sources.missing("drawn/train") is None
    assert sources.missing("drawn/train#x") is None


# Published layouts.


def test_orbench_train(tmp_path):
    people_sets.orbench(tmp_path, train=3, test=2, rgb=3, others=2)
    rows = read(f"{tmp_path}#train")
    assert set(rows.person) == {"0001", "0002", "0003"}
    assert np.bincount(rows.modality).tolist() == [9, 6, 6, 6, 9]
    assert rows.modality[rows.number["cp/0002/0002_1_cp.jpg"]] == CP
    assert rows.modality[rows.number["sk/0002/0002_1_sk.jpg"]] == SK
    text = rows.number["vis/0002/0002_1_vis.jpg#text"]
    assert rows.text[text] == "Person 0002 walks, image 1."
    assert rows.ids[rows.of[text]] == "vis/0002/0002_1_vis.jpg"
    assert set(rows.role) == {EITHER}
    assert rows.lists == {}
    assert read(tmp_path).ids == rows.ids


def test_orbench_captions_may_be_lists_and_persons_may_lack_modalities(tmp_path):
    people_sets.orbench(tmp_path, train=2, test=0, lists=())
    edit(tmp_path / "train_annos.json", lambda annos: annos[0].update(caption=["one", "two"]))
    edit(tmp_path / "train_annos.json", lambda annos: annos.pop())
    for file in (tmp_path / "nir" / "0002").iterdir():
        file.unlink()
    (tmp_path / "nir" / "0002").rmdir()
    rows = read(tmp_path)
    texts = [text for text, of in zip(rows.text, rows.of, strict=True) if of == 0]
    assert texts == ["one", "two"]
    assert {p for p, m in zip(rows.person, rows.modality, strict=True) if m == NIR} == {"0001"}
    assert "vis/0002/0002_2_vis.jpg" not in rows.number
    assert rows.losses == ["left out 1 images of vis that have no entry: vis/0002/0002_2_vis.jpg"]


def test_orbench_test_keeps_lists_and_their_order(tmp_path):
    people_sets.orbench(tmp_path, train=3, test=2, rgb=3, others=2)
    file = tmp_path / "test_gallery_and_queries.json"
    rows = read(f"{tmp_path}#test")
    known = json.loads(file.read_text())
    assert set(rows.person) == {"0004", "0005"}
    assert list(rows.lists) == ["_".join(key.lower().split("+")) for key in known if key != "RGB_GALLERY"]
    gallery = [(i, rows.person[i]) for i in range(len(rows.ids)) if rows.role[i] == GALLERY]
    assert [(rows.ids[i], p) for i, p in gallery] == [
        (path, f"{number + 4:04d}") for number, path in known["RGB_GALLERY"]
    ]
    place = {"NIR": NIR, "CP": CP, "SK": SK, "TEXT": TEXT}
    for key, entries in known.items():
        if key == "RGB_GALLERY":
            continue
        queries = rows.lists["_".join(key.lower().split("+"))]
        assert len(queries) == len(entries)
        for query, (number, *parts) in zip(queries, entries, strict=True):
            expected = dict(zip((place[word] for word in key.split("+")), parts, strict=True))
            for modality, row in enumerate(query):
                if modality not in expected:
                    assert row == -1
                    continue
                assert (rows.text if modality == TEXT else rows.ids)[row] == expected[modality]
                assert rows.person[row] == f"{number + 4:04d}"
                assert (rows.modality[row], rows.role[row]) == (modality, QUERY)
    # An image or caption of several lists is one record: it is embedded once.
    assert len(rows.ids) == 2 * 3 + 2 * 2 * 4


def test_the_challenge_of_orbench_has_a_train_alone(tmp_path):
    people_sets.challenge(tmp_path, 2)
    rows = read(f"{tmp_path}#train")
    assert np.bincount(rows.modality).tolist() == [6, 4, 4, 4, 6]
    assert rows.root == tmp_path / "train"
    assert read(tmp_path / "train").ids == rows.ids
    assert "no such split; available: train; expected one of these after #" in str(refused(f"{tmp_path}#val"))


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda a: a[1].update(file_path="vis/0001/gone.jpg"), "vis/0001/gone.jpg is not in"),
        (lambda a: a[1].update(file_path="nir/0001/0001_0_nir.jpg"), "expected vis/<person>/<image>"),
        (lambda a: a[1].update(file_path="../vis/0001/x.jpg"), "the path"),
        (lambda a: a[1].update(file_path=None), "'file_path': None"),
        (lambda a: a[1].update(file_path=a[0]["file_path"]), ", a duplicate of"),
        (lambda a: a[1].update(caption=""), "an empty caption"),
        (lambda a: a[1].update(caption=["good", " "]), "an empty caption"),
        (lambda a: a[1].update(caption=[]), "'caption': []"),
        (lambda a: a[1].pop("caption"), "expected id, file_path, and caption"),
        (lambda a: a[1].pop("id"), "expected id, file_path, and caption"),
        (lambda a: a[1].update(id=True), "'id': True"),
        (lambda a: a.__setitem__(1, ["x"]), "['x']"),
    ],
)
def test_mistakes_in_orbench_train_are_named_by_entry(tmp_path, change, said):
    people_sets.orbench(tmp_path, train=2, test=0, lists=())
    edit(tmp_path / "train_annos.json", change)
    error = refused(f"{tmp_path}#train")
    assert said in str(error)
    assert error.where == f"{tmp_path / 'train_annos.json'}, entry 1"


@pytest.mark.parametrize(
    "change, where, said",
    [
        (lambda k: k["NIR"][1].__setitem__(1, "nir/0002/gone.jpg"), "NIR entry 1", "is not in"),
        (lambda k: k["NIR"][1].__setitem__(1, "cp/0002/0002_1_cp.jpg"), "NIR entry 1", "nir/<person>/<image>"),
        (lambda k: k["NIR"][1].__setitem__(1, "nir/0003/0003_0_nir.jpg"), "NIR entry 1", "person 0 in the folder 0003"),
        (lambda k: k["NIR"][1].__setitem__(0, "0"), "NIR entry 1", "['0', "),
        (lambda k: k["NIR"][1].append("more"), "NIR entry 1", "a person, and 1 texts"),
        (lambda k: k["NIR+TEXT"][1].pop(), "NIR+TEXT entry 1", "a person, and 2 texts"),
        (lambda k: k["TEXT"][1].__setitem__(1, ""), "TEXT entry 1", "an empty caption"),
        (lambda k: k["TEXT"][1].__setitem__(1, " "), "TEXT entry 1", "an empty caption"),
        (lambda k: k["RGB_GALLERY"].append(k["RGB_GALLERY"][0]), "RGB_GALLERY entry 6", ", a duplicate of"),
        (lambda k: k.update(NIR=[]), "list 'NIR'", "no queries"),
        (lambda k: k.update(NIR={}), "list 'NIR'", "dict"),
        (lambda k: k.update({"NIR+LIDAR": []}), "list 'NIR+LIDAR'", "unknown modalities"),
        (lambda k: k.update({"NIR+RGB": []}), "list 'NIR+RGB'", "unknown modalities"),
        (lambda k: k.update({"NIR+NIR": []}), "list 'NIR+NIR'", "unknown modalities"),
        (lambda k: k.update({"nir": k["NIR"]}), "list 'nir'", "each list once"),
        (lambda k: k.pop("RGB_GALLERY"), "json", "expected RGB_GALLERY"),
    ],
)
def test_mistakes_in_orbench_test_are_named_by_list_and_entry(tmp_path, change, where, said):
    people_sets.orbench(tmp_path, train=1, test=2)
    edit(tmp_path / "test_gallery_and_queries.json", change)
    error = refused(f"{tmp_path}#test")
    assert said in str(error)
    assert error.where.startswith(str(tmp_path / "test_gallery_and_queries.json"))
    assert error.where.endswith(where)


def test_a_folder_of_an_unknown_person_of_orbench(tmp_path):
    people_sets.orbench(tmp_path, train=2, test=0, lists=())
    people_sets.picture(tmp_path / "nir" / "0077" / "x.jpg")
    (tmp_path / "nir" / "notes.txt").write_text("a file is no person")
    assert "folders of persons that vis does not have: 0077" in str(refused(tmp_path))


def test_market(tmp_path):
    people_sets.market(tmp_path, train=3, test=2, cameras=2)
    train, test = read(f"{tmp_path}#train"), read(f"{tmp_path}#test")
    assert set(train.person) == {"0002", "0003", "0004"}
    assert set(test.person) == {"0005", "0006", None}
    assert not any("-1_c" in id or "Thumbs" in id for id in test.ids)
    distractor = test.number["bounding_box_test/0000_c2s1_000151_01.jpg"]
    assert (test.person[distractor], test.role[distractor], test.camera[distractor]) == (None, GALLERY, "c2")
    assert {test.role[row] for id, row in test.number.items() if id.startswith("query/")} == {QUERY}
    assert test.places == {"c1": 1, "c2": 2}
    assert set(test.modality) == {RGB}


def test_mistakes_in_market(tmp_path):
    people_sets.market(tmp_path)
    wrong = people_sets.picture(tmp_path / "bounding_box_train" / "person5.jpg")
    error = refused(tmp_path)
    assert error.where == str(wrong)
    assert "0002_c1s1_000451_03.jpg" in error.expected
    wrong.unlink()
    wrong = people_sets.picture(tmp_path / "bounding_box_train" / "0002_c99999s1_000001_01.jpg")
    assert refused(tmp_path).where == str(wrong)
    wrong.unlink()
    people_sets.picture(tmp_path / "query" / "0000_c1s1_000001_00.jpg")
    assert "a distractor outside of the gallery" in str(refused(f"{tmp_path}#test"))
    for file in (tmp_path / "query").iterdir():
        file.unlink()
    assert "no images" in str(refused(f"{tmp_path}#test"))
    assert "no such split; available: test, train" in str(refused(f"{tmp_path}#val"))


# Nothing but sentences.

_ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.floats()
    | st.sampled_from(["", "vis/0001/0001_0_vis.jpg", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["id", "caption", "NIR"]), inner),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def orbench(tmp_path_factory) -> Path:
    return people_sets.orbench(tmp_path_factory.mktemp("orbench"), train=1, test=1, lists=("NIR", "NIR+TEXT"))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_damage_to_an_annotation_is_said_in_a_sentence(orbench, data):
    name, split = data.draw(st.sampled_from([("train_annos.json", "train"), ("test_gallery_and_queries.json", "test")]))
    file = orbench / name
    whole = file.read_text()
    value = json.loads(whole)
    place = value
    while isinstance(place, list | dict) and place:
        keys = list(range(len(place))) if isinstance(place, list) else sorted(place)
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], list | dict) or data.draw(st.booleans()):
            place[key] = data.draw(_ANY)
            break
        place = place[key]
    try:
        file.write_text(json.dumps(value))
        read(f"{orbench}#{split}")
    except UserError as error:
        assert str(file) in error.where or str(orbench) in error.where
    finally:
        file.write_text(whole)


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 400), byte=st.integers(0, 255), cut=st.booleans())
def test_any_damage_to_an_index_is_said_in_a_sentence(orbench, at, byte, cut):
    root = orbench / "index"
    if not root.is_dir():
        people_sets.index(root, 2)
    text = bytearray((root / "index.csv").read_bytes())
    at %= len(text)
    text = text[:at] if cut else text[:at] + bytes([byte]) + text[at + 1 :]
    (root / "changed.csv").write_bytes(text)
    try:
        read(root / "changed.csv")
    except UserError as error:
        assert "changed.csv" in error.where


NAMES = {"path": "file", "person": "pid", "camera": "cam", "modality": "kind"}


@pytest.mark.parametrize(
    ("suffix", "first"),
    [(".csv", "line 2"), (".tsv", "line 2"), (".parquet", "row 0"), (".json", "entry 0"), (".jsonl", "line 1")],
)
def test_an_index_says_the_same_in_every_form_and_with_columns_of_other_names(tmp_path, suffix, first):
    people_sets.index(tmp_path, 3)
    plain = read(tmp_path / "index.csv")
    with (tmp_path / "index.csv").open(newline="") as stream:
        lines = [{NAMES.get(key, key): cell or None for key, cell in line.items()} for line in csv.DictReader(stream)]
    lines = [line | {"person": "not this"} for line in lines]
    file = tmp_path / f"other{suffix}"
    if suffix == ".parquet":
        table = pyarrow.Table.from_pylist(lines)
        kinds = table["kind"].dictionary_encode()
        pyarrow.parquet.write_table(table.set_column(table.column_names.index("kind"), "kind", kinds), file)
    elif suffix.startswith(".json"):
        file.write_text(json.dumps(lines) if suffix == ".json" else "\n".join(map(json.dumps, lines)))
    else:
        people_sets.write_csv(file, [line.values() for line in lines], lines[0], "\t" if suffix == ".tsv" else ",")
    found = read(file, columns=NAMES)
    for column in ("ids", "person", "camera", "modality", "role", "of", "text"):
        assert getattr(found, column) == getattr(plain, column), column
    assert found.rows[0] == f"{file}, {first}"
    with pytest.raises(UserError, match=r"no column 'fil'; expected one of its columns: file, pid"):
        read(file, columns={"path": "fil"})
