import json
import os
from pathlib import Path

import numpy as np
import pytest
from table_sets import noise, parquet, png, put

from trainkit.data import import_images, sources
from trainkit.data.storage.image_store import Packed
from trainkit.errors import UserError


def ocec(path: Path, **changes) -> Path:
    """The columns of OCEC's parquet; the first, third and fourth of five rows are of the training split."""
    columns = {
        "split": ["train", "val", "train", "train", "val"],
        "label": ["open", "closed", "closed", "open", "open"],
        "class_id": [1, 0, 0, 1, 1],
        "image_path": [f"cropped/video{k // 2}/{k:04}.png" for k in range(5)],
        "source": ["real"] * 5,
        "image_bytes": [png(k) for k in range(5)],
    }
    return parquet(path, **(columns | changes))


def ids(source) -> list[str]:
    return [record.id for record in source.records()]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRAINKIT_DATA", raising=False)
    return tmp_path / "cache"


# Folders


def test_the_class_of_a_picture_is_the_path_below_the_root(tmp_path):
    root = put(tmp_path / "set", "Greek/a/1.png", "Greek/a/2.png", "Greek/b/1.png", "Latin/a/1.png", "noise/x.PNG")
    put(root, "root.png", ".hidden/a/1.png", "Greek/.cache/1.png")
    (root / "Greek" / "notes.txt").write_text("no image")
    (root / "empty").mkdir()
    import_images.import_pictures(root, tmp_path / "out", size=(6, 10), group="^([^/]+)/")
    data = Packed(tmp_path / "out")
    assert data.ids() == ["Greek/a/1.png", "Greek/a/2.png", "Greek/b/1.png", "Latin/a/1.png", "noise/x.PNG"]
    assert [data.class_names[label] for label in data.labels] == ["Greek/a", "Greek/a", "Greek/b", "Latin/a", "noise"]
    assert [data.group_names[group] for group in data.groups] == ["Greek", "Greek", "Greek", "Latin", "noise"]
    for row in range(5):
        assert (data.picture(row) == noise(row)).all()


def test_folders_of_splits_are_not_taken_for_classes(tmp_path):
    root = put(tmp_path / "set", "train/cat/1.png", "train/dog/1.png", "val/cat/2.png")
    with pytest.raises(UserError, match=r"splits train, val.*set#train or .*set#val"):
        sources.open_source(root)
    assert ids(sources.open_source(f"{root}#val")) == ids(sources.open_source(root / "val")) == ["cat/2.png"]
    with pytest.raises(UserError, match="set#test: no such split"):
        sources.open_source(f"{root}#test")
    trains = put(tmp_path / "vehicles", "train/1.png", "bus/1.png", "test/2.png")
    assert len(ids(sources.open_source(trains))) == 3, "images of trains"


def test_a_folder_whose_name_has_the_mark_is_a_folder(tmp_path):
    root = put(tmp_path / "take#2", "cat/1.png")
    assert sources.split_of(root) == (root, None)
    assert ids(sources.open_source(root)) == ["cat/1.png"]
    assert sources.split_of("a/set.parquet#val") == (Path("a/set.parquet"), "val")
    for text in ("set#", "set#a b", "set#../x"):
        with pytest.raises(UserError):
            sources.open_source(tmp_path / text)


def test_a_folder_within_itself_ends(tmp_path):
    root = put(tmp_path / "set", "cat/1.png")
    os.symlink(root, root / "cat" / "again")
    with pytest.raises(UserError, match="within itself"):
        sources.open_source(root)


def test_what_a_recipe_names_lies_below_the_data_root(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_DATA", str(tmp_path))
    put(tmp_path / "set", "train/cat/1.png", "val/cat/2.png")
    assert ids(sources.named("set#val")) == ["cat/2.png"]
    assert sources.missing("set#val") is None and "nowhere does not exist" in sources.missing("nowhere#val")
    assert "download" in sources.missing("hf://owner/name#val")


# Groups


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(", "not a regular expression"),
        ("[a-", "not a regular expression"),
        ("(?P<a>x)(?P=b)", "not a regular expression"),
        ("s[0-9]+", "0 parts in parentheses"),
        ("(s)([0-9]+)", "2 parts in parentheses"),
        ("(a)" + "b" * 200, "203 characters"),
        ("(a{99999999999999999999})", "not a regular expression"),
    ],
)
def test_an_expression_that_names_no_group_is_refused_before_anything_is_read(tmp_path, pattern, words):
    root = put(tmp_path / "set", "cat/1.png")
    with pytest.raises(UserError, match=f"^group.*{words}"):
        import_images.import_pictures(root, tmp_path / "out", size=(6, 10), group=pattern)
    assert not (tmp_path / "out").exists()


def test_a_picture_without_a_group_is_an_error_whatever_is_skipped(tmp_path):
    root = put(tmp_path / "set", "open/s01_1.png", "open/s02_1.png", "shut/x02_1.png")
    for pattern in ("(s[0-9]+)_", "(s?)[0-9]+_"):
        with pytest.raises(UserError, match=r"x02_1\.png.* names no group"):
            import_images.import_pictures(root, tmp_path / "out", size=(6, 10), group=pattern, damaged="skip")
    assert not (tmp_path / "out").exists()


def test_a_very_long_name_is_not_searched(tmp_path):
    from trainkit.data.record import Record

    with pytest.raises(UserError, match="names no group"):
        sources.grouping("(a+)+$")(Record("a" * 5000 + "b", 0, b"", "row 4"))


def test_groups_survive_being_packed_again(tmp_path):
    root = put(tmp_path / "set", "open/s02_1.png", "open/s01_1.png", "shut/s02_2.png")
    import_images.import_pictures(root, tmp_path / "one", size=(6, 10), group="(s[0-9]+)_")
    import_images.import_pictures(tmp_path / "one", tmp_path / "two", size=(3, 5), fit="stretch")
    one, two = Packed(tmp_path / "one"), Packed(tmp_path / "two")
    assert one.group_names == two.group_names == ("s01", "s02")
    assert one.groups.tolist() == two.groups.tolist() == [0, 1, 1]
    assert one.class_names == two.class_names == ("open", "shut") and two.size == (3, 5)


# Tables


@pytest.mark.parametrize(("split", "rows"), [("#train", [0, 2, 3]), ("#val", [1, 4]), ("", [0, 2, 3])])
def test_rows_of_ocec_are_chosen_by_their_split(tmp_path, split, rows):
    file = ocec(tmp_path / "ocec.parquet")
    source = sources.open_source(f"{file}{split}")
    import_images.import_pictures(source, tmp_path / "out", size=(6, 10), group=r"(video\d)/")
    data = Packed(tmp_path / "out")
    assert source.size == len(data) == len(rows)
    assert data.class_names == ("closed", "open")
    labels = ["open", "closed", "closed", "open", "open"]
    for place, row in enumerate(rows):
        assert data.ids()[place] == f"cropped/video{row // 2}/{row:04}.png"
        assert data.class_names[data.labels[place]] == labels[row]
        assert data.group_names[data.groups[place]] == f"video{row // 2}"
        assert (data.picture(place) == noise(row)).all()


def test_a_damaged_row_is_named_by_its_place_in_the_table_and_its_path(tmp_path):
    pictures = [png(k) for k in range(5)]
    pictures[4] = pictures[4][:50]
    file = ocec(tmp_path / "ocec.parquet", image_bytes=pictures)
    import_images.import_pictures(file, tmp_path / "train", size=(6, 10))
    with pytest.raises(UserError, match=r"ocec\.parquet, row 4 \(cropped/video2/0004\.png\): cannot be decoded"):
        import_images.import_pictures(f"{file}#val", tmp_path / "val", size=(6, 10))


@pytest.mark.parametrize(
    ("changes", "split", "words"),
    [
        ({}, "#test", "#test: no such split; available: train, val"),
        ({"split": ["a", "b", "a", "b", "a"]}, "", "no split 'train'; available: a, b"),
        ({"split": ["train", None, "train", "val", None]}, "", "2 rows whose split is empty"),
        ({"label": ["open", None, None, "open", "open"]}, "", r"row 2 .*label: None"),
        ({"image_bytes": [b"", b"", png(2), b"", b""]}, "", r"row 0 .*0 bytes"),
        ({"image_bytes": [png(0), None, None, png(3), b""]}, "", r"row 2 .*no image"),
        ({"label": [True] * 5}, "", r"row 0 .*label: True"),
    ],
)
def test_what_is_wrong_in_a_table_is_named(tmp_path, changes, split, words):
    file = ocec(tmp_path / "ocec.parquet", **changes)
    with pytest.raises(UserError, match=words):
        import_images.import_pictures(f"{file}{split}", tmp_path / "out", size=(6, 10))
    assert not (tmp_path / "out").exists()


def test_a_flipped_bit_is_found_where_the_pages_have_checksums(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    content = {"image": [np.random.default_rng(k).bytes(2000) for k in range(4)], "label": [0, 1, 0, 1]}
    file = tmp_path / "set.parquet"
    pq.write_table(pa.table(content), file, write_page_checksum=True, compression="none", use_dictionary=False)
    assert len(list(sources.open_source(file).records())) == 4
    whole = bytearray(file.read_bytes())
    whole[whole.index(content["image"][2][:50]) + 30] ^= 1
    file.write_bytes(whole)
    with pytest.raises(UserError, match=r"set\.parquet"):
        list(sources.open_source(file).records())


# The hub


def in_hub(home: Path, files: dict[str, int]) -> None:
    revision = "0" * 40
    for name, seed in files.items():
        parquet(home / "datasets--owner--name" / "snapshots" / revision / name, image=[png(seed)], label=[seed])
    (home / "datasets--owner--name" / "refs").mkdir(exist_ok=True)
    (home / "datasets--owner--name" / "refs" / "main").write_text(revision)


def test_a_split_of_a_set_of_the_hub_is_its_files(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    in_hub(tmp_path, {"plain_text/train-00000-of-00001.parquet": 4, "plain_text/test-00000-of-00001.parquet": 5})
    for text, label in (("hf://owner/name", 4), ("hf://owner/name#train", 4), ("hf://owner/name@main#test", 5)):
        assert [record.label for record in sources.named(text).records()] == [label]
        assert sources.missing(text) is None
    with pytest.raises(UserError, match="no such split; available: test, train"):
        sources.named("hf://owner/name#validation")
    in_hub(tmp_path, {"other/train-00000-of-00001.parquet": 6})
    with pytest.raises(UserError, match="several configurations: other, plain_text"):
        sources.named("hf://owner/name")


# Packing once


def test_a_set_is_packed_once_for_each_size_fit_split_and_group(tmp_path, cache):
    file = ocec(tmp_path / "ocec.parquet")
    train, val = (sources.open_source(f"{file}#{split}") for split in ("train", "val"))
    made = [
        import_images.pack_once(train, (6, 10), "stretch"),
        import_images.pack_once(train, (4, 4), "stretch"),
        import_images.pack_once(train, (4, 4), "crop"),
        import_images.pack_once(train, None),
        import_images.pack_once(val, (6, 10), "stretch"),
        import_images.pack_once(val, (6, 10), "stretch", r"(video\d)/"),
    ]
    assert len({data.path for data in made}) == len(list(cache.glob("*/manifest.json"))) == 6
    assert [data.size for data in made] == [(6, 10), (4, 4), (4, 4), None, (6, 10), (6, 10)]
    assert not np.array_equal(made[1].picture(0), made[2].picture(0)) and made[5].group_names == ("video0", "video2")
    again = import_images.pack_once(sources.open_source(f"{file}#val"), (6, 10), "stretch")
    assert again.path == made[4].path
    before = json.loads((again.path / "manifest.json").read_text())
    ocec(file, label=["open", "open", "open", "open", "closed"], class_id=[1, 1, 1, 1, 0])
    changed = import_images.pack_once(sources.open_source(f"{file}#val"), (6, 10), "stretch")
    assert changed.digest != before["digest"] and changed.labels.tolist() == [1, 0]


# The command


def ask(*words: str, code: int = 0) -> str:
    from click.testing import CliRunner

    from trainkit.cli import main

    done = CliRunner().invoke(main.main, ["data", *words])
    assert done.exit_code == code, done.output
    return done.output


def test_pictures_of_any_kind_are_imported_by_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ocec(tmp_path / "ocec.parquet")
    said = ask("import", "ocec.parquet#val", "val", "--size", "32x64", "--fit", "stretch", "--group", r"(video\d)/")
    assert "val: 2 images of 2 classes and 2 groups, decoded, from parquet" in said
    assert "val: 0 problems" in ask("verify", "val")
    said = ask("import", "ocec.parquet", "own", "--size", "own")
    assert "3 images of 2 classes, encoded" in said
    assert Packed(tmp_path / "val").size == (32, 64) and Packed(tmp_path / "own").size is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--size", "32"], "is not HEIGHTxWIDTH"),
        (["--size", "32x"], "is not HEIGHTxWIDTH"),
        (["--size", "0x4"], "is not HEIGHTxWIDTH"),
        (["--size", "9999x4"], "is not HEIGHTxWIDTH"),
        (["--size", "-1x4"], "is not HEIGHTxWIDTH"),
        (["--size", "4x4", "--image-size", "8"], "--image-size is for faces, not with --size"),
        (["--fit", "crop"], "--fit is given with --size"),
        (["--group", "(a)"], "--group is given with --size"),
        (["--size", "4x4", "--group", "a"], "0 parts in parentheses"),
    ],
)
def test_words_of_the_command_that_do_not_fit_are_refused(tmp_path, words, said):
    root = put(tmp_path / "set", "cat/1.png")
    assert said in ask("import", str(root), str(tmp_path / "out"), *words, code=2)
    assert not (tmp_path / "out").exists()
