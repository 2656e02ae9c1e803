"""Unusual and bad images and sets, as a recipe meets them: read right, or refused by file and row."""

import io
import os
import shutil
import socket
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from trainkit.data import import_images
from trainkit.data.faces.dataset import Faces
from trainkit.data.formats import image_decode
from trainkit.data.images.dataset import Images
from trainkit.errors import UserError

SIZE = 16


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRAINKIT_DATA", raising=False)


def noise(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8))


def two_classes(root: Path, first: int = 0, names: tuple[str, ...] = ("cat", "dog")) -> Path:
    for i, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for k in range(3):
            noise(first + 10 * i + k).save(root / name / f"{k}.png")
    return root


@pytest.fixture
def root(tmp_path) -> Path:
    return two_classes(tmp_path / "set")


def opened(root: Path, **settings):
    return Images(**({"train": str(root), "image_size": SIZE} | settings)).open(0)


def test_what_is_called_as_a_picture_and_is_no_file_is_named(root, tmp_path):
    (root / "cat" / "gone.png").symlink_to("nowhere.png")
    (root / "cat" / "round.png").symlink_to("round.png")
    (root / "dog" / "folder.png").mkdir()
    noise(7).save(root / "dog" / "folder.png" / "0.png")
    os.mkfifo(root / "dog" / "pipe.JPG")
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(str(root / "dog" / "socket.png"))
    bound.close()
    for data in (Images(train=str(root), image_size=SIZE), Faces(train=str(root), image_size=SIZE)):
        with pytest.raises(UserError) as error:
            data.open(0)
        assert str(error.value).splitlines()[:-1] == [
            f"{root}: 5 unusable images:",
            f"  {root}/cat/gone.png: a broken link; expected an image file",
            f"  {root}/cat/round.png: cannot be read (Too many levels of symbolic links); expected an image file",
            f"  {root}/dog/folder.png: a folder; expected an image file",
            f"  {root}/dog/pipe.JPG: a named pipe; expected an image file",
            f"  {root}/dog/socket.png: a socket; expected an image file",
        ]
    report = import_images.import_pictures(root, tmp_path / "out", size=(SIZE, SIZE), damaged="skip")
    assert (report.rows, len([note for note in report.notes if note.startswith("skipped: ")])) == (6, 5)


def test_a_set_of_damaged_files_is_not_read_to_its_end(root, monkeypatch):
    monkeypatch.setattr(import_images, "_COUNTED", 25)
    for k in range(30):
        (root / "dog" / f"x{k:02}.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"25 unusable images or more:(\n  .*){20}\n  and 5 more\n"):
        opened(root)


NAMES = {b"caf\xe9": r"caf\xe9", b"two\nlines": r"two\x0alines", "c1\x85".encode(): r"c1\u0085"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("where", [b"%s/0.png", b"cat/%s.png", b"cat/%s/0.png"])
def test_names_that_no_table_could_hold_are_refused_before_anything_is_read(root, name, where, monkeypatch):
    monkeypatch.setattr(image_decode, "read", None)
    file = os.fsencode(root) + b"/" + where % name
    os.makedirs(os.path.dirname(file), exist_ok=True)
    shutil.copy(root / "cat" / "0.png", file)
    shown = (where % NAMES[name].encode()).decode().removesuffix("/0.png")
    faces = where.count(b"/") == 1
    for block in (Images, Faces) if faces else (Images,):
        with pytest.raises(UserError) as error:
            block(train=str(root), image_size=SIZE).open(0)
        assert str(error.value).splitlines()[:2] == [
            f"{root}: 1 name not in UTF-8, or with control characters:",
            f"  {shown}",
        ]
        assert "rename" in error.value.remedy


def test_names_in_any_script_stay_as_they_are(tmp_path):
    names = ("猫", "a b\u3000c", "naïve, \"'=#", "👩\u200d🚀", "می\u200cخواهم")
    root = two_classes(tmp_path / "set", names=names)
    assert opened(root).train.names == tuple(sorted(names))


def test_a_set_that_was_packed_with_such_names_is_refused(root):
    split = opened(root).train
    file = split.packed.path / "names.json"
    file.write_text('["caf\\udce9", "dog"]')
    with pytest.raises(UserError, match=r"1 name not in UTF-8.*\n  caf\\xe9\n.*import the set again"):
        _ = split.packed.class_names


def test_names_of_classes_in_a_table_are_held_to_the_same(tmp_path):
    encoded = io.BytesIO()
    noise(1).save(encoded, "png")
    table = pa.table({"label": ["cat", "two\nlines"], "image": [encoded.getvalue()] * 2})
    pq.write_table(table, tmp_path / "set.parquet")
    with pytest.raises(UserError, match=r"row 1.*1 name not in UTF-8, or with control characters:\n  two\\x0alines"):
        opened(tmp_path / "set.parquet")


def test_folders_without_pictures_are_named_in_every_run(root, caplog):
    (root / "cow" / "young").mkdir(parents=True)
    (root / "dog" / "small").mkdir()
    (root / "dog" / "small" / "notes.txt").write_text("none yet")
    (root / ".git").mkdir()
    noise(9).save(root / "title.png")
    for _ in range(2):
        caplog.clear()
        opened(root)
        assert f"{root}: left out: 2 folders without images: cow, dog/small" in caplog.messages
        assert f"{root}: left out: 1 image outside of class folders: title.png" in caplog.messages


def test_of_faces_what_lies_deeper_is_named(root, caplog):
    (root / "dog" / "2020").mkdir()
    (root / "dog" / "2020" / "more").mkdir()
    (root / "eve").mkdir()
    noise(9).save(root / "dog" / "2020" / "9.png")
    Faces(train=str(root), image_size=SIZE).open(0)
    said = [message.removeprefix(f"{root}: left out: ") for message in caplog.messages if "left out" in message]
    assert said == [
        f"1 image in subfolders of class folders: {root}/dog/2020/9.png",
        "1 folder without images: eve",
    ]


def test_class_names_that_differ_are_named(root, tmp_path):
    val = two_classes(tmp_path / "val", 100, ("cats", "dog"))
    with pytest.raises(UserError) as error:
        opened(root, evaluate={"val": str(val)})
    text = str(error.value)
    assert text.startswith("data.evaluate.val") and "classes that are not in the training set: cats" in text
    assert "those of data.train: cat, dog; set open_set" in text


def test_a_split_of_one_class_is_refused(root, tmp_path):
    lonely = two_classes(tmp_path / "lonely", 200, ("cat",))
    with pytest.raises(UserError, match=r"data\.train .*images of 1 class \(cat\); expected at least 2"):
        opened(lonely)
    with pytest.raises(UserError, match=r"data\.evaluate\.val .*images of 1 class \(cat\)"):
        opened(root, evaluate={"val": str(lonely)})


def test_a_picture_that_names_no_group_is_named(root):
    with pytest.raises(UserError, match=r"cat/0\.png.*names no group"):
        opened(root, group=r"person(\d+)")
    with pytest.raises(UserError, match="parts in parentheses"):
        opened(root, group=r"person\d+")
