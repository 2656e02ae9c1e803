"""What values and colours of mask files stand for, each against a loop over pixels."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trainkit.data.scenes import label_maps
from trainkit.data.scenes.label_maps import Labels, from_palette, numbered
from trainkit.errors import UserError
from trainkit.interfaces import IGNORED

NAMES = ("sky", "road", "tree", "car")
COLOURS = {"sky": (0, 0, 0), "road": (128, 64, 128), "tree": (0, 128, 0), "car": (255, 255, 255)}


PUBLISHED = {
    "gtFine/val/a/a_gtFine_labelIds.png": (
        {7: "road", 8: "sidewalk", 11: "building", 21: "vegetation", 26: "car", 31: "train", 33: "bicycle"},
        (0, 1, 4, 6, 9, 10, 14, 18, 29, 30),
        19,
    ),
    "trainannot/0006R0_f00930.png": ({0: "sky", 3: "road", 8: "car", 10: "bicyclist"}, (11,), 11),
    "ADE_val_00000001.png": ({1: "wall", 3: "sky", 13: "person", 21: "car", 150: "flag"}, (0,), 150),
    "SegmentationClass/2007_000032.png": (
        {0: "background", 1: "aeroplane", 15: "person", 20: "tvmonitor"}, (), 21
    ),
    # Ids 12, 26, 29, 30, 45, 66, 68, 69, 71, 83 and 91, less one.
    "stuffthingmaps/train2017/000000000009.png": (
        {0: "person", 2: "car", 12: "stop sign", 89: "toothbrush", 91: "banner", 123: "grass", 181: "wood"},
        (11, 25, 28, 29, 44, 65, 67, 68, 70, 82, 90),
        171,
    ),
}  # fmt: skip


def of_published(*files: str) -> Labels:
    found = label_maps.published(map(Path, files))
    assert found is not None
    return found[1]


@pytest.mark.parametrize("file", PUBLISHED)
def test_published_sets_are_as_published(file):
    known, nothing, count = PUBLISHED[file]
    labels = of_published(file)
    assert len(labels.names) == len(labels.colours) == count
    table = dict(labels.values)
    assert {value: labels.names[table[value]] for value in known} == known
    dropped = {value for value, number in table.items() if number == IGNORED}
    assert dropped >= {*nothing, 255}
    if count == 171:
        assert dropped == {*nothing, 255}
    kept = [value for value, number in labels.values if number != IGNORED]
    assert kept == sorted(kept) and len(kept) == len(labels.names)
    assert len(table) == len(labels.values) and (count != 19 or len(table) == 35)
    assert label_maps.published([Path(file), Path("other.png")]) is None


def test_camvids_own_colours_are_its_eleven_classes():
    labels = of_published("train_labels/0001TP_006690_L.png")
    assert labels.names == of_published("trainannot/0001TP_006690.png").names and len(labels.palette) == 32
    known = {(128, 0, 192): "road", (64, 192, 0): "building", (192, 128, 64): "pedestrian", (128, 128, 192): "pavement"}
    known |= {(0, 64, 64): "sign", (192, 192, 0): "tree", (128, 64, 64): "car", (192, 0, 192): "bicyclist"}
    found = labels.classes(np.array([[*known, (0, 0, 0)]], np.uint8), "m")[0].tolist()
    assert [labels.names[n] for n in found[:-1]] == list(known.values()) and found[-1] == IGNORED
    # All classes but pavement, which SegNet draws otherwise, have a colour of the files.
    own = dict(labels.palette)
    assert [name for name, colour in zip(labels.names, labels.colours, strict=True) if colour not in own] == [
        "pavement"
    ]


def test_cityscapes_numbers_become_train_ids():
    every = np.arange(34, dtype=np.uint8)[None]
    found = of_published("a_gtFine_labelIds.png").classes(every, "m")[0].tolist()
    # The table of its scripts, written down by number.
    expected = [255] * 7 + [0, 1, 255, 255, 2, 3, 4, 255, 255, 255, 5, 255, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    assert found == [*expected, 255, 255, 16, 17, 18]


def test_names_are_those_of_the_values_that_are_not_ignored():
    assert numbered(NAMES, (4,)).values == ((0, 0), (1, 1), (2, 2), (3, 3), (4, 255), (255, 255))
    assert dict(numbered(NAMES, (0, 3)).values) == {1: 0, 2: 1, 4: 2, 5: 3, 0: 255, 3: 255, 255: 255}
    # 255 is never a class, and classes may lie beyond it.
    many = numbered([f"c{n}" for n in range(255)], (0,))
    assert dict(many.values)[254] == 253 and dict(many.values)[256] == 254 and dict(many.values)[255] == 255


@settings(max_examples=40, deadline=None)
@given(
    arrays.arrays(
        np.uint8, st.tuples(st.integers(1, 5), st.integers(1, 6)), elements=st.sampled_from([0, 1, 2, 5, 9, 255])
    ),
    st.sets(st.sampled_from([0, 1, 5, 9]), max_size=3),
    st.booleans(),
)
def test_numbers_against_a_loop(mask, ignored, wide):
    labels = numbered(NAMES, sorted(ignored))
    table = dict(labels.values)
    # A grey image may have been saved as RGB, or with 16 bits.
    given = mask.astype(np.uint16) if wide else np.repeat(mask[..., None], 3, 2)
    strange = Counter(int(value) for value in mask.ravel() if int(value) not in table)
    if not strange:
        found = labels.classes(given, "m.png")
        assert found.dtype == np.uint8
        assert found.tolist() == [[table[int(value)] for value in row] for row in mask]
        return
    with pytest.raises(UserError) as raised:
        labels.classes(given, "m.png")
    assert _told(raised.value) == {str(value): count for value, count in strange.items()}
    assert f"({sum(strange.values())} of {mask.size} pixels)" in raised.value.found


def _told(error: UserError) -> dict[str, int]:
    """Value or colour to pixels, as a message says it."""
    assert error.where == "m.png"
    found = re.findall(r"(\[[\d, ]+\]|\d+) \((\d+) px\)", error.found)
    return {value: int(count) for value, count in found}


@settings(max_examples=40, deadline=None)
@given(
    arrays.arrays(np.uint8, st.tuples(st.integers(1, 4), st.integers(1, 5)), elements=st.integers(0, 6)),
    st.booleans(),
)
def test_colours_against_a_loop(numbers, ignored):
    every = [*COLOURS.values(), (10, 20, 30), (10, 20, 31), (128, 64, 129)]
    labels = from_palette(COLOURS, [(10, 20, 30)] if ignored else [])
    mask = np.asarray(every, np.uint8)[numbers]
    table = {colour: n for n, colour in enumerate(COLOURS.values())} | ({(10, 20, 30): IGNORED} if ignored else {})
    colours = [[tuple(pixel) for pixel in row] for row in mask.tolist()]
    strange = Counter(colour for row in colours for colour in row if colour not in table)
    if not strange:
        assert labels.classes(mask, "m.png").tolist() == [[table[colour] for colour in row] for row in colours]
        return
    with pytest.raises(UserError) as raised:
        labels.classes(mask, "m.png")
    assert _told(raised.value) == {str(list(colour)): count for colour, count in strange.items()}


def test_grey_numbers_are_colours_where_there_is_a_palette():
    labels = from_palette({"nothing": (0, 0, 0), "thing": (255, 255, 255)})
    mask = np.array([[0, 255], [255, 0]], np.uint8)
    assert labels.classes(mask, "m").tolist() == [[0, 1], [1, 0]]
    with pytest.raises(UserError, match=r"\[7, 7, 7\] \(1 px\)"):
        labels.classes(np.array([[0, 7]], np.uint8), "m")
    with pytest.raises(UserError, match="16 bits"):
        labels.classes(mask.astype(np.uint16), "m")


def test_a_coloured_mask_is_no_mask_of_numbers():
    mask = np.zeros((2, 2, 3), np.uint8)
    mask[0, 1] = 1, 2, 3
    with pytest.raises(UserError, match=r"a.png: a coloured mask \(2 colours\).*data.palette"):
        numbered(NAMES).classes(mask, "a.png")


def test_what_is_outside_the_classes_is_named_with_the_most_frequent_first():
    mask = np.zeros((100, 100), np.uint8)
    mask[5, 7:10], mask[9, 9] = 200, 12
    with pytest.raises(UserError) as raised:
        of_published("trainannot/0006R0_f00930.png").classes(mask, "a.png")
    assert raised.value.found == "2 values outside the classes (4 of 10000 pixels): 200 (3 px), 12 (1 px)"
    assert raised.value.expected == "one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 255"
    noise = np.arange(100, 120, dtype=np.uint8).reshape(4, 5)
    with pytest.raises(UserError, match=r"20 values outside the classes .* and 12 more"):
        numbered(NAMES).classes(noise, "a.png")
    with pytest.raises(UserError, match="65535 "):
        numbered(NAMES).classes(np.array([[65535]], np.uint16), "a.png")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: numbered(["sky"]), "1 classes; 2 to 255"),
        (lambda: numbered([f"c{n}" for n in range(256)]), "256 classes"),
        (lambda: numbered(["sky", "sky", "road"]), "with the same name: sky"),
        (lambda: numbered(["sky", " "]), "' '"),
        (lambda: numbered(["sky", "a\nb"]), "printable"),
        (lambda: numbered(["sky", "x" * 201]), "201 characters"),
        (lambda: from_palette(COLOURS | {"car": (0, 0, 0)}), "one colour for several classes"),
        (lambda: from_palette(COLOURS, [(0, 128, 0)]), "one colour for several classes"),
        (lambda: from_palette(COLOURS | {"car": (0, 0, 256)}), "256"),
        (lambda: from_palette(COLOURS | {"car": (0, 0)}), "red, green and blue"),
        (lambda: Labels(NAMES, values=((0, 0), (0, 1))), "one value for several classes: 0"),
    ],
)
def test_tables_that_cannot_be_meant_are_refused(make, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        make()
