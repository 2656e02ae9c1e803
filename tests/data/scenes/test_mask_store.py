"""Masks in the packed form: what was in the files, counted, and refused where it cannot be right."""

import io
import json
import re
import zlib

import numpy as np
import packed_rows
import pytest
import scene_sets
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from trainkit.data.scenes import label_maps, mask_store, sources
from trainkit.data.scenes.mask_store import PackedMasks, pack_masks_once, resized
from trainkit.errors import UserError
from trainkit.interfaces import IGNORED

LABELS = label_maps.numbered(scene_sets.NAMES[: scene_sets.CLASSES], colours=scene_sets.COLOURS[: scene_sets.CLASSES])

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def root(tmp_path):
    return scene_sets.camvid(tmp_path / "set", (4, 2))


def source(root, split="train"):
    return sources.open_scenes(f"{root}#{split}")


def masks(count=4, part=0):
    """What the writer of the set drew."""
    return [scene_sets.scene(1000 * part + n)[1] for n in range(count)]


def test_masks_are_those_of_the_files(root):
    data = pack_masks_once(source(root), LABELS)
    assert len(data) == 4 and data.names == LABELS.names and data.manifest["size"] is None
    assert data.manifest["colours"] == [list(colour) for colour in LABELS.colours]
    assert data.ids() == [scene.id for scene in source(root).scenes]
    for row, mask in enumerate(masks()):
        found = data.mask(row)
        assert found.dtype == np.uint8 and (found == mask).all()
        assert data.shapes[row].tolist() == list(mask.shape)
        expected = [int((mask == number).sum()) for number in (*range(scene_sets.CLASSES), IGNORED)]
        assert data.counts[row].tolist() == expected and expected[-1] > 0
        assert data.fingerprints[row] == mask_store.fingerprint(mask)
    assert data.changed() == [] and data.bytes < 20_000
    for row in (-1, 4):
        with pytest.raises(ValueError, match=f"row {row} of a set of 4"):
            data.mask(row)


@settings(max_examples=40, deadline=None)
@given(st.tuples(st.integers(1, 40), st.integers(1, 40)), st.tuples(st.integers(1, 90), st.integers(1, 90)))
def test_resizing_takes_no_pixel_from_outside_and_keeps_whole_factors(old, new):
    mask = np.arange(old[0] * old[1]).reshape(old)
    found = resized(mask, new)
    assert found.shape == new
    rows, columns = np.divmod(found, old[1])
    assert (rows == rows[:, :1]).all() and (columns == columns[:1]).all()
    # The centre of a new pixel, in old ones, lies in the one that was taken.
    for axis, taken in enumerate((rows[:, 0], columns[0])):
        centre = (np.arange(new[axis]) + 0.5) * old[axis] / new[axis]
        assert (taken <= centre + 1e-9).all() and (centre <= taken + 1 + 1e-9).all()
    assert (resized(resized(mask, (3 * old[0], 2 * old[1])), old) == mask).all()


def test_masks_are_packed_once(root, monkeypatch):
    first = pack_masks_once(source(root), LABELS)
    monkeypatch.setattr(mask_store, "_write", lambda *_: pytest.fail("packed again"))
    assert pack_masks_once(source(root), LABELS).path == first.path


def test_what_masks_are_made_of_names_them(root):
    """Other files, other classes, another size: another folder. Colours are for the eye: the same digest."""
    first = pack_masks_once(source(root), LABELS)
    small = pack_masks_once(source(root), LABELS, (12, 16))
    plain = pack_masks_once(source(root), label_maps.numbered(LABELS.names))
    other = label_maps.numbered(("a", *LABELS.names[1:]), colours=LABELS.colours)
    renamed = pack_masks_once(source(root), other)
    scene_sets.put(root / "trainannot/p002.png", masks()[1])
    changed = pack_masks_once(source(root), LABELS)
    assert len({str(data.path) for data in (first, small, plain, renamed, changed)}) == 5
    assert len({data.digest for data in (first, small, renamed, changed)}) == 4 and plain.digest == first.digest
    assert changed.fingerprints[2] == changed.fingerprints[1] == first.fingerprints[1] != first.fingerprints[2]
    assert (changed.mask(2) == masks()[1]).all()


def test_coloured_masks_give_the_same_classes(tmp_path):
    file = scene_sets.listed(tmp_path / "set", (3, 1), colour=True)
    labels = label_maps.from_palette(scene_sets.palette(), [(0, 0, 0)])
    data = pack_masks_once(sources.open_scenes(str(file)), labels)
    assert all((data.mask(row) == mask).all() for row, mask in enumerate(masks(3)))
    assert data.manifest["colours"] == [list(colour) for colour in scene_sets.COLOURS[: scene_sets.CLASSES]]


def test_masks_of_another_size_are_refused(root, cache):
    for name, size in (("p000", (24, 30)), ("p003", (32, 24))):
        scene_sets.put(root / f"trainannot/{name}.png", np.zeros(size, np.uint8))
    with pytest.raises(UserError) as error:
        pack_masks_once(source(root), LABELS)
    said = str(error.value)
    assert "2 masks that cannot be used" in said and "p001" not in said
    assert re.search(r"trainannot/p000\.png: 30 x 24 pixels, its image 32 x 24", said)
    assert re.search(r"trainannot/p003\.png: 24 x 32 pixels, its image 32 x 24 \(is it rotated by its EXIF", said)
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_a_turned_photograph_has_the_size_that_it_is_shown_at(root):
    picture, exif = Image.fromarray(np.zeros((32, 24, 3), np.uint8)), Image.Exif()
    exif[0x0112] = 6
    stream = io.BytesIO()
    picture.save(stream, "PNG", exif=exif)
    (root / "train/p001.png").write_bytes(stream.getvalue())
    assert len(pack_masks_once(source(root), LABELS)) == 4
    # A mask is never turned: one that says so is refused where that makes it another, though its header would fit.
    mask = Image.fromarray(np.zeros((32, 24), np.uint8))
    stream = io.BytesIO()
    mask.save(stream, "PNG", exif=exif)
    (root / "trainannot/p003.png").write_bytes(stream.getvalue())
    with pytest.raises(UserError, match=r"p003\.png: 24 x 32 pixels, its image 32 x 24"):
        pack_masks_once(source(root), LABELS)


def test_values_outside_the_classes_are_named_with_their_files_and_all_at_once(root):
    strange = masks()
    strange[1][5:7, 20:23] = 9
    strange[3][23, 31] = 200
    for row in (1, 3):
        scene_sets.put(root / f"trainannot/p{row:03d}.png", strange[row])
    with pytest.raises(UserError) as error:
        pack_masks_once(source(root), LABELS)
    said = str(error.value)
    assert "2 masks that cannot be used" in said
    assert re.search(r"p001\.png: .*9 \(6 px\)", said)
    assert re.search(r"p003\.png: .*200 \(1 px\)", said)


def of_first(**changed):
    """Change numbers of the first row."""
    return lambda row, values: values.update(
        {name: change(values[name]) for name, change in changed.items() if row == 0}
    )


@pytest.mark.parametrize(
    ("change", "manifest", "said"),
    [
        (of_first(shape=lambda shape: (25, 32)), {}, "counts that do not match"),
        (of_first(shape=lambda shape: (-1, 32)), {}, "impossible sizes"),
        (of_first(shape=lambda shape: (1 << 30, 32)), {}, "impossible sizes"),
        (of_first(counts=lambda counts: [-1, *counts[1:]]), {}, "counts that do not match"),
        (of_first(), {"names": ["a"], "colours": []}, "counts of batch 0 is not what was written"),
        (of_first(), {"colours": [[1, 2, 3]]}, "colours"),
    ],
)
def test_what_does_not_fit_together_is_refused(root, change, manifest, said):
    data = pack_masks_once(source(root), LABELS)
    packed_rows.rebuild(data, change)
    if manifest:
        file = data.path / "manifest.json"
        found = json.loads(file.read_text()) | manifest
        file.write_text(json.dumps(found | {"digest": PackedMasks.digest_of(found)}))
    with pytest.raises(UserError, match=said):
        PackedMasks(data.path)


def test_a_stream_of_another_length_is_refused(root):
    """Also one that would fill the memory."""
    data = pack_masks_once(source(root), LABELS)
    bomb = zlib.compress(bytes(1 << 24))
    small = mask_store.packed(np.zeros((3, 3), np.uint8))["map"]
    for stream, said in (
        (small, "9 pixels; expected 24 x 32"),
        (bomb, "more than 24 x 32 pixels"),
        (b"nonsense", "cannot be unpacked"),
    ):
        packed_rows.rebuild(data, of_first(map=lambda _, s=stream: s, crc=lambda _, s=stream: zlib.crc32(s)))
        opened = PackedMasks(data.path)
        with pytest.raises(UserError, match=said):
            opened.mask(0)
        assert (opened.mask(1) == masks()[1]).all()
