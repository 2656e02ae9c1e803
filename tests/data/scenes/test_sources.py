"""Layouts of images with masks: what is found, and what is said about what does not fit."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import scene_sets

from trainkit.data import import_images
from trainkit.data.formats import image_decode
from trainkit.data.scenes import label_maps, mask_store, sources
from trainkit.data.scenes.files import header
from trainkit.data.scenes.label_maps import Labels, from_palette, numbered
from trainkit.data.scenes.sources import open_scenes
from trainkit.errors import UserError

LABELS = numbered(scene_sets.NAMES[: scene_sets.CLASSES])


def drawn(part: int, n: int, classes: int = scene_sets.CLASSES) -> np.ndarray:
    return scene_sets.scene(1000 * part + n, scene_sets.SIZE, classes)[1]


def published(classes: str, place: int = 0) -> Labels:
    """The labels of the first published set of these classes, or of a later one."""
    entries = [entry for entry in label_maps._published()["sets"] if entry["classes"] == classes]
    return label_maps._labels_of(entries[place])


@pytest.mark.parametrize("part", ["train", "val"])
@pytest.mark.parametrize(
    ("write", "kind", "ids", "labels"),
    [
        (scene_sets.camvid, "folders of images and masks", "p{n:03d}.png", None),
        (scene_sets.folders, "folders of images and masks", "p{n:03d}.jpg", None),
        (
            lambda root: scene_sets.folders(root, inside=False, masks="labels"),
            "folders of images and masks",
            "p{n:03d}.jpg",
            None,
        ),
        (scene_sets.ade20k, "ADE20K", "ADE_{part}_{n:08d}.jpg", published("ade20k")),
        (scene_sets.coco_stuff, "COCO-Stuff", "{p}{n:011d}.jpg", published("coco_stuff")),
        (scene_sets.listed, "image list", "data/{part}/p{n:03d}.jpg", None),
    ],
)
def test_every_layout_gives_its_pictures_in_order_each_with_its_own_mask(tmp_path, write, kind, ids, labels, part):
    place = str(write(tmp_path / "set")).replace("train.txt", f"{part}.txt")
    # A list is of one split; elsewhere the split may be named, or be that which is asked for.
    named = [place] if place.endswith(".txt") else [f"{place}#{part}", place]
    p = int(part == "val")
    for text in named:
        source = open_scenes(text, part)
        assert (source.kind, source.labels, source.left_out) == (kind, labels, ())
        assert source.ids() == [ids.format(n=n, p=p, part=part) for n in range(len(source))]
        assert [scene.id for scene in source.scenes] == source.ids()
        for n, scene in enumerate(source.scenes):
            expected = drawn(p, n)
            if write is scene_sets.coco_stuff:
                expected = np.where(expected == 3, 170, expected)
            assert (scene_sets.classes_of(scene, labels or LABELS) == expected).all()
            assert header(scene)[0] == scene_sets.SIZE
    assert all(file.is_file() for file in source.files)


@pytest.mark.parametrize("kind", ["Ids", "TrainIds"])
def test_cityscapes(tmp_path, kind):
    source = open_scenes(f"{scene_sets.cityscapes(tmp_path, kind=kind)}#val")
    assert source.kind == "Cityscapes" and source.labels == published("cityscapes", kind == "TrainIds")
    assert source.ids()[0] == "valburg/valburg_000000_000019_leftImg8bit.png" and len(source) == 4
    assert source.left_out == ()
    for n, scene in enumerate(source.scenes):
        assert (scene_sets.classes_of(scene, source.labels) == drawn(2 + n // 2, n % 2)).all()


def test_camvid_is_known_by_the_names_of_its_frames(tmp_path):
    place = scene_sets.camvid(tmp_path, ignored=11, names="0006R0_f{:05d}")
    source = open_scenes(f"{place}#val")
    assert (source.kind, source.labels) == ("CamVid", published("camvid"))
    assert (scene_sets.classes_of(source.scenes[2], source.labels) == drawn(1, 2)).all()
    # One that is called otherwise, and it may be anything.
    scene_sets.put(place / "val" / "mine.png", scene_sets.scene(5)[0])
    scene_sets.put(place / "valannot" / "mine.png", scene_sets.scene(5)[1])
    assert open_scenes(f"{place}#val").labels is None


def test_masks_of_one_folder_without_splits(tmp_path):
    scene_sets.folders(tmp_path, splits=())
    source = open_scenes(str(tmp_path), "val")
    assert source.where == str(tmp_path) and len(source) == 4
    with pytest.raises(UserError, match="no such split; expected the path alone"):
        open_scenes(f"{tmp_path}#train")


def test_pictures_below_folders_are_matched_by_their_path(tmp_path):
    for city in ("aachen", "ulm"):
        scene_sets.folders(tmp_path / city, pictures=2, splits=(), seed=len(city))
        (tmp_path / "images").mkdir(exist_ok=True)
        (tmp_path / "masks").mkdir(exist_ok=True)
        (tmp_path / city / "images").rename(tmp_path / "images" / city)
        (tmp_path / city / "masks").rename(tmp_path / "masks" / city)
        (tmp_path / city).rmdir()
    source = open_scenes(str(tmp_path))
    assert source.ids() == ["aachen/p000.jpg", "aachen/p001.jpg", "ulm/p000.jpg", "ulm/p001.jpg"]
    assert (scene_sets.classes_of(source.scenes[3], LABELS) == scene_sets.scene(len("ulm") + 1)[1]).all()
    # Folders of any name are splits where one is asked for.
    assert open_scenes(f"{tmp_path}#ulm").ids() == ["p000.jpg", "p001.jpg"]


def test_names_with_and_without_tails(tmp_path):
    for n in range(2):
        picture, mask = scene_sets.scene(n)
        scene_sets.put(tmp_path / "images" / f"a{n}_image.png", picture)
        scene_sets.put(tmp_path / "masks" / f"a{n}_mask.png", mask)
    assert open_scenes(str(tmp_path)).ids() == ["a0_image.png", "a1_image.png"]


def test_what_fits_no_other_is_counted_and_named(tmp_path):
    scene_sets.folders(tmp_path, pictures=8, splits=())
    for n in range(7):
        (tmp_path / "masks" / f"p{n:03d}.png").unlink()
    scene_sets.put(tmp_path / "masks" / "other.png", scene_sets.scene()[1])
    (tmp_path / "masks" / "notes.txt").write_text("hello")
    (tmp_path / "masks" / ".hidden.png").write_text("")
    source = open_scenes(str(tmp_path))
    assert source.ids() == ["p007.jpg"]
    assert source.left_out == (
        "7 images without a mask: p000.jpg, p001.jpg, p002.jpg, p003.jpg, p004.jpg and 2 more",
        "1 mask without an image: other.png",
        "1 file of another kind: notes.txt",
    )
    (tmp_path / "masks" / "p007.png").unlink()
    with pytest.raises(
        UserError,
        match=r"no pair with the same name; 8 images without a mask: p000.jpg, .*; 1 mask without an image: other.png",
    ):
        open_scenes(str(tmp_path))


def test_names_that_no_table_could_hold_are_refused(tmp_path):
    scene_sets.folders(tmp_path, splits=())
    for kind, suffix in (("images", b".jpg"), ("masks", b".png")):
        os.rename(tmp_path / kind / f"p000{suffix.decode()}", os.fsencode(tmp_path / kind) + b"/\xffa\n" + suffix)
    with pytest.raises(UserError) as error:
        open_scenes(str(tmp_path))
    assert str(error.value).splitlines()[:2] == [
        f"{tmp_path}/images: 1 name not in UTF-8, or with control characters:",
        r"  \xffa\x0a.jpg",
    ]


@pytest.mark.parametrize("kind", ["nowhere", "folder", "pipe"])
def test_a_picture_and_a_mask_that_are_no_files_are_refused_by_name(tmp_path, kind, cache):
    scene_sets.folders(tmp_path, splits=())
    for file in (tmp_path / "images" / "p001.jpg", tmp_path / "masks" / "p002.png"):
        file.unlink()
        if kind == "nowhere":
            file.symlink_to("nowhere")
        elif kind == "folder":
            file.mkdir()
        else:
            os.mkfifo(file)
    source = open_scenes(str(tmp_path))
    assert len(source) == 4 and not source.left_out
    said = {"nowhere": "a broken link", "folder": "a folder", "pipe": "a named pipe"}[kind]
    with pytest.raises(UserError) as error:
        mask_store.pack_masks_once(source, LABELS, None)
    for name in ("images/p001.jpg", "masks/p002.png"):
        assert f"{tmp_path}/{name}: {said}; expected an image file" in str(error.value)


def test_splits_are_chosen_by_name_and_never_by_chance(tmp_path):
    root = scene_sets.folders(tmp_path, splits=("training", "validation"))
    assert open_scenes(f"{root}#val").where == f"{root}#validation"
    assert open_scenes(str(root), "train").where == f"{root}#training"
    with pytest.raises(UserError, match="no such split; available: training, validation"):
        open_scenes(f"{root}#test")
    with pytest.raises(UserError, match="no split 'test'; available: training, validation"):
        open_scenes(str(root), "test")
    only = scene_sets.folders(tmp_path / "only", splits=("train",))
    with pytest.raises(UserError, match="no split 'val'; available: train"):
        open_scenes(str(only), "val")


def test_a_set_laid_out_as_a_published_one_does_not_get_its_names(tmp_path):
    root = scene_sets.coco_stuff(tmp_path / "a", masks="masks")
    assert open_scenes(f"{root}#train").labels is None
    # As mmsegmentation converts it: numbers without gaps.
    for n in range(2):
        picture, mask = scene_sets.scene(n)
        scene_sets.put(tmp_path / "b" / "images" / "train2017" / f"{n:012d}.jpg", picture)
        scene_sets.put(tmp_path / "b" / "annotations" / "train2017" / f"{n:012d}_labelTrainIds.png", mask)
    source = open_scenes(f"{tmp_path / 'b'}#train")
    assert source.labels == published("coco_stuff", 1) and len(source) == 2
    for name, labels in (("2007_00000{n}", published("voc")), ("shot{n}", None)):
        root = tmp_path / name
        for n in range(2):
            picture, mask = scene_sets.scene(n)
            scene_sets.put(root / "JPEGImages" / f"{name.format(n=n)}.jpg", picture)
            scene_sets.put(root / "SegmentationClass" / f"{name.format(n=n)}.png", mask)
        assert open_scenes(str(root)).labels == labels


def test_names_beside_the_folders(tmp_path):
    root = scene_sets.folders(tmp_path / "numbers")
    file = root / "names.json"
    file.write_text('["sky", "road", "tree", "car"]')
    source = open_scenes(f"{root}#train")
    assert source.labels == LABELS and file in source.files
    file.write_text('{"sky": [70, 130, 180], "road": [128, 64, 128], "tree": [0, 128, 0], "car": [200, 0, 0]}')
    assert open_scenes(f"{root}#train").labels == from_palette(scene_sets.palette())
    for text, said in (
        ("{", ""), ("3", ""), ("[1]", ""), ('["sky"]', "1 classes; 2 to 255"), ('{"sky": [1, 2]}', ""),
        ('{"sky": [1, 2, "3x"], "b": [1, 1, 1]}', ""), ("[" * 100_000, ""),
        (" " * 1_100_000, "at most 1048576: names of classes"),
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(UserError, match=rf"names\.json.*{said}"):
            open_scenes(f"{root}#train")
    # It comes before what the names of files say.
    root = scene_sets.cityscapes(tmp_path / "city")
    (root / "names.json").write_text(json.dumps([f"c{n}" for n in range(13)]))
    assert open_scenes(f"{root}#train").labels == numbered([f"c{n}" for n in range(13)])


# Lists.


def test_forms_of_lists(tmp_path):
    scene_sets.listed(tmp_path)
    rows = [(f"data/train/p{n:03d}.jpg", f"data/train/p{n:03d}.png") for n in range(2)]
    ids = [image for image, _ in rows]
    forms = [
        "\ufeffimage,label\n" + "".join(f"{a},{b}\n" for a, b in rows),
        "\n" + "".join(f" {a} , {b} \r\n\r\n" for a, b in rows),
        "".join(f'"{a}",./{b}\n' for a, b in rows),
        "".join(f"{tmp_path / a},{b}\n" for a, b in rows),
    ]
    for n, form in enumerate(forms):
        file = tmp_path / f"form{n}.{'csv' if n % 2 else 'txt'}"
        file.write_text(form, "utf-8")
        source = open_scenes(str(file))
        assert source.ids() == ids and source.files[0] == file
        assert (scene_sets.classes_of(source.scenes[1], LABELS) == drawn(0, 1)).all()


def test_paths_of_a_list_begin_at_the_root(tmp_path, monkeypatch):
    scene_sets.listed(tmp_path / "set")
    lists = tmp_path / "lists"
    lists.mkdir()
    (tmp_path / "set" / "train.txt").rename(lists / "train.txt")
    with pytest.raises(UserError, match=r"6 errors in 6 lines:\s+line 1: data/train/p000\.jpg does not exist"):
        open_scenes(str(lists / "train.txt"))
    assert len(open_scenes(str(lists / "train.txt"), root=str(tmp_path / "set"))) == 6
    # Both are below the data root.
    monkeypatch.setenv("TRAINKIT_DATA", str(tmp_path))
    assert len(open_scenes("lists/train.txt", root="set")) == 6
    assert sources.missing("lists/train.txt", "set") is None
    assert sources.missing("lists/val.txt", "set") == f"{lists / 'val.txt'} does not exist"
    assert sources.missing("lists/train.txt", "sets") == f"{tmp_path / 'sets'} is not a folder"
    with pytest.raises(UserError, match=r"no folder.*data.root"):
        open_scenes("lists/train.txt", root="sets")
    assert sources.missing("sample:scenes", "sets") is None


def test_all_mistakes_of_a_list_are_counted(tmp_path):
    scene_sets.listed(tmp_path / "set")
    (tmp_path / "secret.png").write_bytes(b"")
    rows = [
        ("data/train/p000.jpg", "data/train/p000.png"),
        *[(f"gone/{n}.jpg", "data/train/p001.png") for n in range(7)],
        ("data/train/p002.jpg", "data/train/gone.png"),
        ("../secret.png", "data/train/p001.png"),
        ("/etc/passwd", "data/train/p001.png"),
        ("data/train/p000.jpg", "data/train/p001.png"),
        ("data/train/p003.jpg",),
        ("data/train/p003.jpg", "data/train/p003.png", "3"),
        ("data/train/p004.jpg", "../set/data/train/p004.npy"),
        ("data/train/p004.jpg", "data/train/p004.npy"),
        ("data/train/p004.jpg", "data/train/p004.jpg"),
        ("data/train", "data/train/p004.png"),
        ("data/train/p005.jpg", "data/train/p\0.png"),
    ]
    file = scene_sets.write_list(tmp_path / "set" / "bad.txt", rows, ("image", "label"))
    with pytest.raises(UserError) as raised:
        open_scenes(str(file))
    assert raised.value.where == str(file)
    lines = raised.value.found.strip().split("\n")
    assert lines[0] == "18 errors in 19 lines:"
    first, other = "data/train/p001.png' is a path outside of the root", "is not called as an image"
    assert [line.removeprefix("  line ") for line in lines[1:]] == [
        *(f"{n + 3}: gone/{n}.jpg does not exist" for n in range(7)),
        "10: data/train/gone.png does not exist",
        f"11: '../secret.png,{first}",
        f"12: '/etc/passwd,{first}",
        "13: data/train/p000.jpg, the image of an earlier line",
        "14: 'data/train/p003.jpg'; image,label is needed",
        "15: 'data/train/p003.jpg,data/train/p003.png,3'; image,label is needed",
        "16: 'data/train/p004.jpg,../set/data/train/p004.npy' is a path outside of the root",
        f"17: data/train/p004.npy {other}",
        "18: data/train/p004.jpg as image and mask",
        f"19: data/train {other}",
        "20: 'data/train/p005.jpg,data/train/p\\x00.png' is a path outside of the root",
    ]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no lines"),
        (b"image,label\n", "no lines"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b'"a.png,b.png\n', "cannot be read"),
    ],
)
def test_lists_that_are_none(tmp_path, data, said):
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(UserError, match=said):
        open_scenes(str(tmp_path / "a.txt"))


def _twice(root: Path) -> None:
    scene_sets.folders(root, splits=())
    scene_sets.put(root / "images" / "p001.png", scene_sets.scene(9)[0])


def _in_a_circle(root: Path) -> None:
    scene_sets.folders(root, splits=())
    (root / "images" / "again").symlink_to(root / "images")


@pytest.mark.parametrize(
    ("make", "text", "said"),
    [
        (lambda root: None, "nothing", "does not exist"),
        (lambda root: (root / "a").mkdir(), "a", "unknown layout, or without images; expected a list of"),
        (lambda root: (root / "a.bin").write_bytes(b""), "a.bin", "unknown kind"),
        (scene_sets.listed, "train.txt#val", "a list has no splits"),
        (lambda root: None, "sample:faces", "no built-in set of scenes"),
        (lambda root: None, "x" * 5000, "cannot be read"),
        (lambda root: [(root / n).mkdir() for n in ("images", "masks")], ".", "unknown layout, or without images"),
        (lambda root: (root / "a.parquet").write_bytes(b"PAR1"), "a.parquet", "unknown kind"),
        (lambda root: None, "hf://owner/name", "a set of the hub"),
        (_twice, ".", "1 pair of files with the same name: p001.jpg and p001.png"),
        (
            lambda root: [scene_sets.folders(root, splits=(), masks=name) for name in ("masks", "labels")],
            ".",
            "images with labels, images with masks",
        ),
        (_in_a_circle, ".", "within itself"),
    ],
)
def test_what_is_no_set_of_scenes(tmp_path, monkeypatch, make, text, said):
    monkeypatch.setenv("TRAINKIT_DATA", str(tmp_path))
    make(tmp_path)
    with pytest.raises(UserError, match=said):
        open_scenes(text)


def test_the_drawn_set(tmp_path, monkeypatch):
    drawn = types.SimpleNamespace(
        folder=lambda: scene_sets.camvid(tmp_path), NAMES=scene_sets.NAMES[:4], COLOURS=scene_sets.COLOURS[:4]
    )
    monkeypatch.setitem(sys.modules, "trainkit.data.synthetic.scenes", drawn)
    source = open_scenes("sample:scenes", "val")
    assert source.where == f"{tmp_path}#val" and len(source) == 3
    assert source.labels == numbered(scene_sets.NAMES[:4], colours=scene_sets.COLOURS[:4])
    assert len(open_scenes("sample:scenes#train", "val")) == 6


# Packing.


def test_pictures_are_packed_in_the_order_of_the_scenes(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    place = scene_sets.camvid(tmp_path / "set")
    for part, count in (("train", 6), ("val", 3)):
        source = open_scenes(str(place), part)
        packed = import_images.pack_once(source.pictures(), None)
        assert len(packed) == count and packed.ids() == source.ids()
        for n, scene in enumerate(source.scenes):
            assert (packed.picture(n) == image_decode.decode(scene.image.read_bytes(), "")).all()


def test_a_mask_that_changes_does_not_pack_the_pictures_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    place = scene_sets.camvid(tmp_path / "set")

    def packed() -> Path:
        return import_images.pack_once(open_scenes(f"{place}#train").pictures(), (12, 16), "stretch").path

    before, files = packed(), open_scenes(f"{place}#train").files
    scene_sets.put(place / "trainannot" / "p000.png", scene_sets.scene(99)[1])
    assert packed() == before and open_scenes(f"{place}#train").files == files
    assert place / "trainannot" / "p000.png" in files
    scene_sets.put(place / "train" / "p000.png", scene_sets.scene(99)[0])
    assert packed() != before
