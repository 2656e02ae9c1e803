"""What all kinds of packed sets have in common: those written before are opened, and damaged ones refused.

`golden/sets_of_rows.zip` was written by the first version that kept them in rows: images stored in every way, masks,
their distance maps, volumes, and outputs of a teacher, the latter also in their form before.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import packed_rows
import pytest
import scene_sets
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs import ROOT

from trainkit.data.rows import reader
from trainkit.data.rows.reader import Rows
from trainkit.data.scenes import label_maps, sources
from trainkit.data.scenes.boundary_distance import Distance, Distances, distances_once
from trainkit.data.scenes.mask_store import PackedMasks, pack_masks_once
from trainkit.data.storage.image_store import Packed
from trainkit.data.volumes.volume_store import PackedVolumes
from trainkit.errors import UserError
from trainkit.training.teacher_cache import StoredOutputs

KINDS: dict[str, type[Rows]] = {
    "decoded": Packed,
    "encoded": Packed,
    "own_sizes": Packed,
    "pairs": Packed,
    "masks": PackedMasks,
    "distances": Distances,
    "volumes": PackedVolumes,
    "resampled": PackedVolumes,
    "outputs": StoredOutputs,
}
ONE_OF_EACH = ("decoded", "masks", "distances", "volumes", "outputs")


def values(data: Rows) -> list[np.ndarray]:
    """All that is in a set."""
    many = range(len(data))
    if isinstance(data, Packed):
        return [data.picture(row) for row in many]
    if isinstance(data, PackedMasks):
        return [data.mask(row) for row in many]
    if isinstance(data, Distances):
        return [data.levels(row) for row in many]
    if isinstance(data, PackedVolumes):
        for case in many:
            data.check(case)
        return [array for case in many for array in (data.image(case), data.label(case), data.truth(case))]
    return [data.arrays("output", np.arange(len(data)))]


def hashed(arrays: list[np.ndarray]) -> str:
    state = hashlib.sha256()
    for array in arrays:
        state.update(f"{array.dtype} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes())
    return state.hexdigest()


def unpacked(name: str, folder: Path) -> Path:
    with zipfile.ZipFile(ROOT / "tests" / "golden" / name) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """The sets as they were written."""
    return unpacked("sets_of_rows.zip", tmp_path_factory.mktemp("written"))


@pytest.fixture
def copied(written, tmp_path) -> Callable[[str], Path]:
    """Copies a set, to be damaged."""
    return lambda name: shutil.copytree(written / name, tmp_path / name)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("disk", ["local", "network"])
def test_sets_that_were_written_before_are_read(written, monkeypatch, name, disk):
    monkeypatch.setattr(reader.files, "on_network", lambda folder: disk == "network")
    digest, originals, content = json.loads((written / "digests.json").read_text())[name]
    data = KINDS[name](written / name)
    assert data.path == written / name, "not packed anew"
    assert (data.digest, data.originals, data.changed()) == (digest, originals, [])
    assert hashed(values(data)) == content
    sent = pickle.dumps(data)
    assert len(sent) < 4000, "workers open it anew"
    assert hashed(values(pickle.loads(sent))) == content
    assert data.bytes == sum(f.stat().st_size for f in data.path.iterdir() if f.name != "manifest.json")


def test_what_is_written_today_has_the_digests_of_then(written, tmp_path, cache):
    from tests.data.volumes.test_volume_store import write

    digests = {name: entry[0] for name, entry in json.loads((written / "digests.json").read_text()).items()}
    colours = scene_sets.COLOURS[: scene_sets.CLASSES]
    labels = label_maps.numbered(scene_sets.NAMES[: scene_sets.CLASSES], colours=colours)
    scenes = sources.open_scenes(f"{scene_sets.camvid(tmp_path / 'scenes', (3, 1))}#train")
    masks = pack_masks_once(scenes, labels)
    assert masks.digest == digests["masks"] and distances_once(masks, Distance()).digest == digests["distances"]
    assert write(tmp_path / "volumes", cases=2).digest == digests["volumes"]
    assert write(tmp_path / "resampled", cases=2, spacing=(3.0, 1.0, 0.5)).digest == digests["resampled"]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_sets_of_before_rows_are_refused_and_left(copied, name):
    folder = copied(name)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["arrow"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"a set of a version before 0\.2; expected .*; import the set again"):
        KINDS[name](folder)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_file_that_is_cut_or_missing_or_has_another_byte_is_named(copied, name):
    folder, kind = copied(name), KINDS[name]
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()
        changed = bytearray(whole)
        changed[-2] ^= 1
        for content in (whole[: len(whole) // 2], whole[:-1], changed, None):
            file.unlink() if content is None else file.write_bytes(content)
            with pytest.raises(UserError, match=file.name.replace(".", r"\.")):
                kind(folder)
            file.write_bytes(whole)
    kind(folder)


LARGE = {
    "decoded": ("image", "", lambda data, row: data.fetch(np.asarray([row]))),
    "encoded": ("image", "", lambda data, row: data.fetch(np.asarray([row]))),
    "own_sizes": ("image", "", lambda data, row: data.picture(row)),
    "masks": ("map", "", lambda data, row: data.mask(row)),
    "distances": ("map", "", lambda data, row: data.levels(row)),
    "volumes": ("image", "images ", lambda data, row: data.check(row)),
    "volumes, labels": ("label", "labels ", lambda data, row: data.check(row)),
    "volumes, foreground": ("foreground", "foreground ", lambda data, row: data.check(row)),
}


@pytest.mark.parametrize("name", LARGE)
def test_of_a_file_too_large_to_be_hashed_the_damaged_row_is_named_when_it_is_read(copied, monkeypatch, name):
    (part, what, read), name = LARGE[name], name.partition(",")[0]
    folder, kind = copied(name), KINDS[name]
    damaged, sound = 1, 0
    packed_rows.damage(kind(folder), part, damaged, 9)
    with pytest.raises(UserError, match=r"rows\.arrow: is not what was written \(SHA-256 differs\)"):
        kind(folder)
    monkeypatch.setattr(reader, "HASHED_AT_OPEN", 0)
    data = kind(folder)
    read(data, sound)
    row = "case" if kind is PackedVolumes else "row"
    with pytest.raises(UserError, match=rf"{row} {damaged}\b.*: {what}is not what was written \(checksum differs\)"):
        read(data, damaged)
    assert len(data.changed()) == 1


COMMON = [
    ({"format": None}, "not the manifest of"),
    ({"format": "trainkit-other"}, "not the manifest of"),
    ({"version": 99}, "version 99"),
    ({"files": {}}, "files"),
    ({"files": {"../../etc/passwd": {"bytes": 1, "sha256": ""}}}, "files"),
    ({"arrow": {}}, "arrow"),
    ({"digest": None}, "its digest does not match"),
    ({"digest": "0" * 64}, "its digest does not match"),
]
COUNTED = [-1, True, "12", None, 10**15]
OWN = {
    "decoded": [
        ({"classes": 2}, "its digest does not match"),
        ({"classes": -1}, "classes: -1"),
        ({"store": "other"}, "store: 'other'"),
        ({"protocol": "Pairs"}, "files"),
        ({"protocol": "Others"}, "protocol: 'Others'"),
        ({"image_size": None}, "files"),
        ({"image_size": [8, 8]}, "digest"),
        *(
            ({"image_size": size}, "image_size")
            for size in (
                *([8], [8, 8, 8], [8, 0], [-8, 8], ["8", 8], [8.0, 8]),
                *(0, "8", True, {}, 10**9, [1, 10**9], ...),
            )
        ),
    ],
    "masks": [
        ({"names": ["a"] * 256}, "names"),
        ({"names": []}, "names"),
        ({"names": ["a", 1]}, "names"),
        ({"colours": [[1, 2, 300]] * 4}, "colours"),
        ({"colours": [[1, 2]] * 4}, "colours"),
        ({"size": [1]}, "size"),
        ({"size": ...}, "size"),
        ({"objects": {"there": 1}}, "objects"),
    ],
    "distances": [
        ({"of": "0" * 64}, "its digest does not match"),
    ],
    "volumes": [
        ({"cases": 0}, "cases: 0"),
        ({"names": ["background"]}, "names"),
        ({"names": ["background", "a", "a"]}, "names"),
        ({"channels": ["one"]}, "channels"),
        ({"axes": "xyz"}, "axes"),
        ({"axes": "zyx"}, "its digest does not match"),
        ({"spacing": [1, 0, 1]}, "spacing"),
        ({"spacing": [1, float("nan"), 1]}, "spacing"),
        ({"resampled": [1, 1]}, "resampled"),
        ({"resampled": ...}, "resampled"),
    ],
    "outputs": [
        ({"views": "2"}, "views"),
        ({"views": 3}, "batches|offsets|digest"),
        ({"shape": [40, "6"]}, "shape"),
        ({"weights": "0"}, "its digest does not match"),
    ],
}


def changed(folder: Path, change: dict[str, object]) -> None:
    """Change entries of a manifest; `...` takes one out."""
    found = json.loads((folder / "manifest.json").read_text()) | change
    (folder / "manifest.json").write_text(json.dumps({key: found[key] for key in found if found[key] is not ...}))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_manifest_that_says_something_else_is_refused(copied, name):
    folder, kind = copied(name), KINDS[name]
    sound = (folder / "manifest.json").read_bytes()
    counted = [({kind.FORM.counted: count}, "rows|cases|records|samples") for count in COUNTED]
    for change, said in (*COMMON, *counted, *OWN[name]):
        changed(folder, change)
        with pytest.raises(UserError, match=said) as error:
            kind(folder)
        assert "manifest.json" in str(error.value), change
        (folder / "manifest.json").write_bytes(sound)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=4)


@pytest.mark.parametrize("name", ONE_OF_EACH)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.data())
def test_whatever_a_manifest_says_the_answer_is_a_sentence(written, tmp_path_factory, name, drawn):
    folder = shutil.copytree(written / name, tmp_path_factory.mktemp("fuzz") / "set")
    before = json.loads((folder / "manifest.json").read_text())
    keys = ["format", "version", "files", "digest", "arrow", *KINDS[name].IDENTITY, *KINDS[name].ENTRIES]
    said = drawn.draw(st.dictionaries(st.sampled_from(keys), JSON, min_size=1))
    changed(folder, said)
    after = json.loads((folder / "manifest.json").read_text())
    try:
        KINDS[name](folder)
    except UserError:
        return
    unhashed = {"protocol", "colours", "size", "objects", "kind", "where", "root", "annotations", "lists", "seconds"}
    assert {key for key in after if after[key] != before.get(key)} <= unhashed


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_what_is_no_such_set_is_refused(written, tmp_path, name):
    kind = KINDS[name]
    with pytest.raises(UserError, match=f"none: does not exist; expected {kind.FORM.described}; .*{kind.FORM.command}"):
        kind(tmp_path / "none")
    with pytest.raises(UserError, match=rf"no manifest\.json; expected {kind.FORM.described}"):
        kind(tmp_path)
    for other in ONE_OF_EACH:
        if KINDS[other] is not kind:
            with pytest.raises(UserError, match=f"not the manifest of {kind.FORM.described}"):
                kind(written / other)
