"""Sets in the form of before rows: opened, packed anew once with the digest they had, and left where they are.

`golden/sets_before_rows.zip` was written by the program as it was then: images stored in every way, an evaluation set,
masks and their distance maps, and volumes.
"""

from __future__ import annotations

import json
import zipfile

import numpy as np
import pytest
from runs import ROOT

from trainkit.data import cache as data_cache
from trainkit.data import image_folder, repack, row_files
from trainkit.data.storage import import_images
from trainkit.data.storage.boundary_distance import Distance, Distances
from trainkit.data.storage.image_store import Packed
from trainkit.data.storage.mask_store import PackedMasks
from trainkit.data.storage.volume_store import PackedVolumes
from trainkit.errors import UserError

IMAGES = ["decoded", "encoded", "own_sizes", "pairs"]


@pytest.fixture
def before(tmp_path, cache):
    with zipfile.ZipFile(ROOT / "tests" / "golden" / "sets_before_rows.zip") as archive:
        archive.extractall(tmp_path / "before")
    return tmp_path / "before"


@pytest.mark.parametrize("name", IMAGES)
def test_images_that_a_user_imported_are_opened(before, name, caplog):
    files = {file.name: file.read_bytes() for file in (before / name).iterdir()}
    digest, originals = json.loads((before / "digests.json").read_text())[name]
    data = Packed(before / name)
    assert (data.digest, data.originals) == (digest, originals) and data.changed() == []
    (said,) = caplog.messages
    assert "in the form of an earlier version: packed anew, once" in said and str(before / name) in said
    for row, stored in enumerate(data.ids()):
        assert data.picture(row).shape[2] == 3 and stored == files["ids.txt"].decode().split("\n")[row]
    assert data.labels.tolist() == np.load(before / name / "labels.npy").tolist()
    assert (data.groups is not None) == ("groups.npy" in files) and (data.protocol() is not None) == (name == "pairs")
    assert Packed(before / name).path == data.path and len(caplog.messages) == 1
    assert {file.name: file.read_bytes() for file in (before / name).iterdir()} == files, "what a user made is left"


def test_masks_and_their_distances_are_packed_anew(before, tmp_path):
    digests = json.loads((before / "digests.json").read_text())
    for name, kind in (("masks", PackedMasks), ("distances", Distances)):
        assert repack.is_old(before / name, kind)
        repack.pack(before / name, tmp_path / name, kind, lambda done, total: None)
        assert kind(tmp_path / name).digest == digests[name][0]
    masks, distances = PackedMasks(tmp_path / "masks"), Distances(tmp_path / "distances")
    assert masks.originals == digests["masks"][1] and distances.of == masks.digest
    assert distances.settings == Distance() and distances.levels(1).shape == masks.mask(1).shape


@pytest.mark.parametrize("name", ["volumes", "resampled"])
def test_volumes_that_a_user_imported_are_opened(before, name, caplog):
    digest, content = json.loads((before / "digests.json").read_text())[name]
    voxels = np.fromfile(before / name / "images.bin", np.float16)
    data = PackedVolumes(before / name)
    assert data.digest == digest and data.content(np.arange(2)) == content and data.changed() == []
    assert "packed anew, once" in caplog.messages[0] and (before / name / "images.bin").is_file()
    assert np.array_equal(np.concatenate([data.image(case).ravel() for case in range(2)]), voxels)
    for case in range(2):
        data.check(case)


def test_a_set_of_the_cache_is_made_of_that_of_before(before, tmp_path, caplog, monkeypatch):
    source = image_folder.open_folder(_pictures(tmp_path / "set"))
    now = import_images.pack_once(source, (12, 16))
    before_it = now.path.with_name(now.path.name.removesuffix("-rows"))
    now.path.rename(tmp_path / "kept")
    (before / "decoded").rename(before_it)
    monkeypatch.setattr(import_images, "import_pictures", lambda *_, **__: pytest.fail("read again"))
    found = import_images.pack_once(source, (12, 16))
    assert found.path == now.path and before_it.is_dir() and len(found) == 6
    assert sum("packed anew" in message for message in caplog.messages) == 1


def _pictures(folder):
    from PIL import Image

    for k in range(2):
        (folder / f"c{k}").mkdir(parents=True)
        Image.new("RGB", (16, 12), (90, 40 * k, 20)).save(folder / f"c{k}" / "0.png")
    return folder


@pytest.mark.parametrize("name", ["images.npy", "labels.npy", "ids.txt"])
def test_one_of_before_that_is_damaged_is_refused(before, name):
    file = before / "decoded" / name
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}: is not what was written"):
        Packed(before / "decoded")
    assert not list(data_cache.cache_root().glob(f"*/{row_files.FILE}"))
