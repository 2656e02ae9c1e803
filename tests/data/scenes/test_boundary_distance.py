"""Distances to boundaries between classes: exact, following the image, and never those of other masks."""

import math
import shutil

import numpy as np
import pytest
import scene_sets
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import ndimage

from trainkit.config.validation import validate
from trainkit.data.scenes import boundary_distance, label_maps, mask_store, sources
from trainkit.data.scenes.boundary_distance import STEP, Distance, distances_once, from_mask
from trainkit.errors import UserError
from trainkit.interfaces import IGNORED

pytestmark = pytest.mark.usefixtures("cache")


def packed(root, seed=0, size=None):
    """A set of 3 masks of 24 x 32 pixels."""
    if not root.is_dir():
        scene_sets.camvid(root, (3, 1), seed=seed)
    source = sources.open_scenes(f"{root}#train")
    return mask_store.pack_masks_once(source, label_maps.numbered(scene_sets.NAMES[: scene_sets.CLASSES]), size)


def distances(maps, row):
    """As they are kept: in pixels, float32."""
    return maps.levels(row) * np.float32(STEP)


def edges(mask):
    """The edges between pixels of different classes, each as x0, y0, x1, y1."""
    height, width = mask.shape

    def differ(a, b):
        return a != b and IGNORED not in (a, b)

    for y in range(height):
        for x in range(width):
            if x + 1 < width and differ(mask[y, x], mask[y, x + 1]):
                yield x + 1, y, x + 1, y + 1
            if y + 1 < height and differ(mask[y, x], mask[y + 1, x]):
                yield x, y + 1, x + 1, y + 1


def by_hand(mask, cap):
    """The distance of every centre to every edge, the least of them."""
    found = np.full(mask.shape, float(cap))
    lines = list(edges(mask))
    for y, x in np.ndindex(mask.shape):
        for x0, y0, x1, y1 in lines:
            nearest = min(max(x + 0.5, x0), x1), min(max(y + 0.5, y0), y1)
            found[y, x] = min(found[y, x], math.dist(nearest, (x + 0.5, y + 0.5)))
    return found


masks = st.integers(1, 9).flatmap(
    lambda height: st.integers(1, 9).flatmap(
        lambda width: st.lists(
            st.sampled_from([0, 0, 0, 0, 1, 1, 7, IGNORED]), min_size=height * width, max_size=height * width
        ).map(lambda values: np.asarray(values, np.uint8).reshape(height, width))
    )
)


@settings(max_examples=50, deadline=None)
@given(masks, st.sampled_from([0.5, 1.0, 2.3, 4.0, 63.75]))
@example(np.array([[0, 1]], np.uint8), 2.0)
@example(np.array([[0, 0, 0], [0, 0, 0], [0, 0, 1]], np.uint8), 9.0)
def test_distances_are_those_to_the_nearest_point_of_an_edge(mask, cap):
    found = from_mask(mask, cap)
    assert found.dtype == np.float32 and found.shape == mask.shape
    assert found == pytest.approx(by_hand(mask, cap), abs=1e-6)


@pytest.mark.parametrize("shape", [(70, 9), (9, 70), (33, 33)])
def test_working_in_bands_changes_nothing(shape, monkeypatch):
    rng = np.random.default_rng(5)
    mask = ndimage.zoom(rng.integers(0, 3, (5, 5)), (shape[0] / 5, shape[1] / 5), order=0).astype(np.uint8)
    whole = from_mask(mask, 7.5)
    monkeypatch.setattr(boundary_distance, "_BAND", 1)
    assert (from_mask(mask, 7.5) == whole).all()


def test_maps_are_kept_to_a_quarter_of_a_pixel_and_made_once(tmp_path, monkeypatch):
    data = packed(tmp_path / "set")
    found = distances_once(data, Distance(cap=6.6))
    assert len(found) == 3 and found.manifest["of"] == data.digest and found.cap == 6.6
    for row in range(3):
        exact = from_mask(data.mask(row), 6.6)
        assert found.levels(row).dtype == np.uint8 and found.levels(row).shape == exact.shape
        assert np.abs(distances(found, row) - exact).max() <= STEP / 2
        assert distances(found, row).min() == 0.5
    assert found.changed() == []
    monkeypatch.setattr(boundary_distance, "from_mask", lambda *_: pytest.fail("made again"))
    again = distances_once(data, Distance(cap=6.6))
    assert again.path == found.path and (distances(again, 1) == distances(found, 1)).all()


def test_maps_of_others_are_refused_under_their_name(tmp_path):
    """Somebody may move folders about: what is in one is compared with what is asked for."""
    data, other = packed(tmp_path / "set"), packed(tmp_path / "other", seed=1)
    mine, theirs = distances_once(data, Distance()), distances_once(other, Distance())
    shutil.rmtree(mine.path)
    shutil.copytree(theirs.path, mine.path)
    with pytest.raises(UserError, match=r"distances of other masks.*expected up to 16\.0 of.*remove the folder"):
        distances_once(data, Distance())
    shutil.rmtree(mine.path)
    shutil.copytree(distances_once(data, Distance(cap=3)).path, mine.path)
    with pytest.raises(UserError, match="or with other settings"):
        distances_once(data, Distance())


@pytest.mark.parametrize("cap", [0, -1, 64, float("nan"), float("inf")])
def test_caps_that_a_byte_cannot_hold_are_refused(cap):
    with pytest.raises(ValueError, match="cap"):
        validate(Distance, {"cap": cap}, {})
    assert validate(Distance, {"cap": 63.75}, {}).cap == 63.75


def test_the_largest_cap_is_computed_exactly():
    mask = np.zeros((130, 130), np.uint8)
    mask[64, 64] = 1
    found = from_mask(mask, 63.75)
    y, x = np.indices(mask.shape)
    away = np.hypot(np.maximum(np.abs(y - 64) - 0.5, 0), np.maximum(np.abs(x - 64) - 0.5, 0))
    away[64, 64] = 0.5
    assert found == pytest.approx(np.minimum(away, 63.75), abs=1e-5)
