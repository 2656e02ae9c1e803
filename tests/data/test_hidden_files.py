"""One rule for all kinds: what macOS, Windows and servers leave in folders is no part of a set."""

from pathlib import Path

import numpy as np
import organ_volumes
import people_sets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from trainkit.data import folders, image_folder, sources
from trainkit.data.formats import ijb
from trainkit.data.people import sources as people_sources
from trainkit.data.scenes.sources import open_scenes
from trainkit.data.volumes.sources import open_volumes
from trainkit.inference import images, scenes

JUNK = b"\0\5\26\7\0\2\0\0Mac OS X        "
"""First bytes of an AppleDouble file."""


def picture(path: Path, value: int = 0, mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (8, 8), value).save(path)
    return path


def classes(root: Path) -> Path:
    for name in ("a/0.png", "a/1.jpg", "b/0.png", "b/c/2.png"):
        picture(root / name)
    return root


def masks(root: Path) -> Path:
    for split in ("train", "val"):
        for k in range(2):
            picture(root / "images" / split / f"{k}.jpg")
            picture(root / "masks" / split / f"{k}.png", k, "L")
    return root


def parquet(root: Path) -> Path:
    root.mkdir()
    data = picture(root.parent / "one.png").read_bytes()
    pq.write_table(pa.table({"image": [{"bytes": data, "path": None}] * 2, "label": [0, 1]}), root / "train.parquet")
    return root


def volumes(root: Path) -> Path:
    return organ_volumes.put_set(root, 2)


def probes(root: Path) -> Path:
    for part in ("Probe", "Gallery_Match", "Gallery_Distractor"):
        for k in range(2):
            picture(root / part / f"{k}_x.png")
    return root


KINDS = {
    "class folders": (classes, lambda root: [r.id for r in sources.open_source(root).records()]),
    "faces": (classes, lambda root: [r.id for r in image_folder.open_folder(root, nested=False).records()]),
    "images to predict": (classes, lambda root: [r.id for r in images.open_pictures(str(root)).records()]),
    "images of scenes to predict": (
        lambda root: classes(root) / "a",
        lambda root: [file.name for file in scenes._below(root)],
    ),
    "masks": (masks, lambda root: [(s.id, s.mask) for s in open_scenes(f"{root}#train").scenes]),
    "parquet": (parquet, lambda root: [r.id for r in sources.open_source(root).records()]),
    "people": (people_sets.market, lambda root: [one.id for one in people_sources.find(str(root)).every]),
    "people of ORBench": (people_sets.orbench, lambda root: [one.id for one in people_sources.find(str(root)).every]),
    "volumes": (volumes, lambda root: [case.id for case in open_volumes(str(root)).cases]),
    "probes": (probes, lambda root: [r.id for r in ijb.read_identification(root)[0].records()]),
}


def litter(root: Path) -> int:
    """Put into every folder what systems put there: beside each file one of macOS."""
    places = [root, *(path for path in root.rglob("*") if path.is_dir())]
    for place in places:
        for name in [path.name for path in place.iterdir() if path.is_file()]:
            (place / f"._{name}").write_bytes(JUNK)
        for name in (".DS_Store", "Thumbs.db", "desktop.ini", "Icon\r", ".hidden.png", ".hidden.nii.gz"):
            (place / name).write_bytes(JUNK)
    for name in ("__MACOSX", "@eaDir", ".Trashes", "$RECYCLE.BIN", "#recycle"):
        for inner in [path.relative_to(root) for path in root.rglob("*") if path.is_file()]:
            copy = root / name / inner
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(JUNK)
    return len(places)


@pytest.mark.parametrize("kind", KINDS)
def test_a_set_is_the_same_with_hidden_files_in_all_its_folders(kind, tmp_path):
    make, read = KINDS[kind]
    root = make(tmp_path / "set")
    before = read(root)
    assert before and litter(root)
    assert read(root) == before


def test_nothing_is_said_of_hidden_files_in_class_folders(tmp_path):
    root = classes(tmp_path / "set")
    litter(root)
    assert sources.open_source(root).left_out == ()


def test_a_file_that_is_named_is_read_whatever_its_name(tmp_path):
    file = picture(tmp_path / ".hidden" / "._0.png", 7)
    (record,) = images.open_pictures(str(file)).records()
    assert record.data == file
    picture(tmp_path / ".hidden" / "1.png", 7)
    assert [record.id for record in images.open_pictures(str(file.parent)).records()] == ["1.png"]
    listed = tmp_path / "list.csv"
    mask = tmp_path / ".m.png"
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(mask)
    listed.write_text(".hidden/._0.png,.m.png\n")
    assert open_scenes(str(listed)).scenes[0].mask == mask


def test_which_names_are_hidden():
    hidden = ("._0.png", ".DS_Store", "Thumbs.db", "THUMBS.DB", "desktop.ini", "__MACOSX", "@Recycle")
    assert all(map(folders.is_hidden, hidden))
    assert not any(map(folders.is_hidden, ("0.png", "thumbs.png", "_0.png", "a.b.db")))
