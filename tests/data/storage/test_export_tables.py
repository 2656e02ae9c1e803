"""Packed sets as parquet with features: `datasets` loads them, and imported again they have the same digest."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scene_sets
from click.testing import CliRunner
from PIL import Image

from trainkit.cli import main
from trainkit.data.images.dataset import Images
from trainkit.data.scenes import label_maps
from trainkit.data.scenes.sources import open_scenes
from trainkit.data.storage import cache as packing
from trainkit.data.storage import export_tables, import_images, mask_store
from trainkit.data.storage.image_store import Packed
from trainkit.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRAINKIT_DATA", raising=False)


def _folder(root, names, suffix=".png", size=(6, 10)):
    for seed, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(f"{root / name}{suffix}")
    return root


NAMES = ["open/a_1", "open/b_2", "shut, or nearly/a_3", "shut, or nearly/c\\_4"]


@pytest.mark.parametrize(
    ("size", "suffix", "group"), [((4, 8), ".png", None), ((6, 10), ".jpg", r"/(\w)"), (None, ".jpg", None)]
)
@pytest.mark.parametrize("store", ["decoded", "encoded"])
def test_what_is_exported_is_imported_with_the_same_digest(tmp_path, size, suffix, group, store):
    if size is None and store == "decoded":
        pytest.skip("images of their own sizes are encoded")
    root = _folder(tmp_path / "from", NAMES, suffix)
    made = import_images.import_pictures(root, tmp_path / "a", size=size, fit="crop", group=group, store=store)
    assert export_tables.export_set(tmp_path / "a", tmp_path / "out") == len(NAMES)
    again = import_images.import_pictures(tmp_path / "out", tmp_path / "b", size=size, fit="crop", store=store)
    assert again.digest == made.digest
    assert (Packed(tmp_path / "b").groups is None) == (group is None)


def test_datasets_loads_it_with_names_and_pictures(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(export_tables, "SHARD_BYTES", 400)
    import_images.import_pictures(_folder(tmp_path / "from", NAMES), tmp_path / "a", size=(6, 10))
    words = ["data", "export", str(tmp_path / "a"), str(tmp_path / "out"), "--split", "test"]
    done = CliRunner().invoke(main.main, words)
    assert done.exit_code == 0 and "4 images, split test" in done.output
    assert len(list((tmp_path / "out" / "data").iterdir())) > 1
    found = datasets.load_dataset(str(tmp_path / "out"), split="test", cache_dir=str(tmp_path / "hf"))
    assert found.features["label"].names == ["open", "shut, or nearly"] and found["label"] == [0, 0, 1, 1]
    packed = Packed(tmp_path / "a")
    assert all((np.asarray(row["image"]) == packed.picture(n)).all() for n, row in enumerate(found))
    assert found["image_path"][3] == "shut, or nearly/c\\_4.png"
    data = Images(train=f"{tmp_path / 'out'}#test", image_size=(6, 10)).open(0)
    assert data.train.digest == packed.digest
    again = CliRunner().invoke(main.main, words)
    assert again.exit_code == 2 and "exists" in again.output


def test_faces_and_the_pictures_of_people_are_packed_pictures(tmp_path):
    root = _folder(tmp_path / "from", ["anna/0", "anna/1", "ben/0"], size=(12, 12))
    made = import_images.import_faces(root, tmp_path / "a", image_size=12)
    export_tables.export_set(tmp_path / "a", tmp_path / "out")
    assert import_images.import_faces(tmp_path / "out", tmp_path / "b", image_size=12).digest == made.digest


def test_scenes_are_exported_with_masks_and_names_and_come_back_the_same(tmp_path):
    names = scene_sets.NAMES[: scene_sets.CLASSES]
    labels = label_maps.numbered(names)
    source = open_scenes(f"{scene_sets.camvid(tmp_path / 'from', (3, 1))}#train")
    masks = mask_store.pack_masks_once(source, labels)
    images = packing.pack_once(source.pictures(), tuple(masks.shapes[0].tolist()), "no")
    words = ["data", "export", str(images.path), str(tmp_path / "out"), "--masks", str(masks.path)]
    done = CliRunner().invoke(main.main, words)
    assert done.exit_code == 0 and "3 images and their masks" in done.output
    assert json.loads((tmp_path / "out" / "names.json").read_text()) == list(names)
    again = open_scenes(str(tmp_path / "out"))
    assert again.labels is not None and again.labels.names == labels.names
    assert mask_store.pack_masks_once(again, again.labels).digest == masks.digest
    assert packing.pack_once(again.pictures(), images.size, "no").digest == images.digest
    with pytest.raises(UserError, match="masks that belong to other images"):
        other = open_scenes(f"{tmp_path / 'from'}#val")
        export_tables.export_set(images.path, tmp_path / "no", masks=mask_store.pack_masks_once(other, labels).path)
    with pytest.raises(UserError, match="no packed images"):
        export_tables.export_set(masks.path, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_damage_is_named_and_leaves_nothing(tmp_path):
    import_images.import_pictures(_folder(tmp_path / "from", NAMES), tmp_path / "a", size=(6, 10))
    file = tmp_path / "a" / "images.npy"
    data = bytearray(file.read_bytes())
    data[200] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match="is not what was written"):
        export_tables.export_set(tmp_path / "a", tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def test_an_evaluation_set_says_why_it_is_no_table(tmp_path):
    root = _folder(tmp_path / "from", ["anna/0", "anna/1", "ben/0"], size=(12, 12))
    (root / "pairs.csv").write_text("path_a,path_b,same\nanna/0.png,anna/1.png,1\nanna/0.png,ben/0.png,0\n")
    import_images.import_evaluation(root / "pairs.csv", tmp_path / "a", image_size=12)
    with pytest.raises(UserError, match="whose pairs cannot be a column of a table"):
        export_tables.export_set(tmp_path / "a", tmp_path / "out")
