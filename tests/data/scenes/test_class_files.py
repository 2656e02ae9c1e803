"""Masks of a file for each class: the three forms, what is on top, and what is no such set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scene_sets

from trainkit.data.scenes import files
from trainkit.data.scenes.sources import open_scenes
from trainkit.errors import UserError

SIZE = (24, 32)


def covered(top: int, bottom: int, value: int = 255) -> np.ndarray:
    made = np.zeros(SIZE, np.uint8)
    made[top:bottom] = value
    return made


def place(root: Path, form: str, image: str, name: str) -> Path:
    """The file of a class of an image, in one of the forms."""
    named = {"folder": f"{name}/{image}", "file": f"{image}/{name}", "end": f"{image}_{name}"}[form]
    return root / f"{named}.png"


def made(root: Path, form: str, splits: tuple[str, ...] = ("",)) -> Path:
    """Two images of each split: of road above and a car, and of road alone; in the last split also of a sign."""
    for split in splits:
        for n in range(2):
            scene_sets.put(root / "images" / split / f"my_{n}.jpg", scene_sets.scene(n, SIZE)[0])
            scene_sets.put(place(root / "masks" / split, form, f"my_{n}", "road"), covered(0, 12))
        scene_sets.put(place(root / "masks" / split, form, "my_0", "car"), covered(10, 14, 1))
    scene_sets.put(place(root / "masks" / splits[-1], form, "my_1", "sign"), covered(20, 24))
    return root


def classes(root: Path | str) -> list[np.ndarray]:
    source = open_scenes(str(root))
    assert source.labels is not None
    return [files.classes_of(scene, source.labels) for scene in source.scenes]


@pytest.mark.parametrize("form", ["folder", "file", "end"])
def test_each_form_gives_classes_by_name_after_the_background(tmp_path, form):
    source = open_scenes(str(made(tmp_path, form)))
    assert source.kind == "folders with a mask for each class" and source.left_out == ()
    assert source.labels is not None and source.labels.names == ("background", "car", "road", "sign")
    assert source.ids() == ["my_0.jpg", "my_1.jpg"] and len(source.files) == 2 + 4
    first, second = classes(tmp_path)
    expected = np.zeros(SIZE, np.uint8)
    expected[:10], expected[10:14] = 2, 1
    assert (first == expected).all()
    assert (second[:12] == 2).all() and (second[20:] == 3).all() and not second[12:20].any()
    assert [files.mask_shape(scene) for scene in source.scenes] == [SIZE, SIZE]


@pytest.mark.parametrize("form", ["folder", "file", "end"])
def test_splits_have_the_classes_of_all_of_them(tmp_path, form):
    made(tmp_path, form, ("train", "val"))
    for part in ("train", "val"):
        labels = open_scenes(f"{tmp_path}#{part}").labels
        assert labels is not None and labels.names == ("background", "car", "road", "sign")


def test_a_class_called_background_leaves_what_nothing_covers_without_a_class(tmp_path):
    made(tmp_path, "folder")
    for n in range(2):
        scene_sets.put(tmp_path / "masks" / "background" / f"my_{n}.png", covered(12, 20))
    labels = open_scenes(str(tmp_path)).labels
    assert labels is not None and labels.names == ("background", "car", "road", "sign")
    first, _ = classes(tmp_path)
    assert not first[14:20].any() and (first[20:] == 255).all() and (first[10:14] == 1).all()


def test_a_mask_in_colour_covers_where_it_is_not_black(tmp_path):
    made(tmp_path, "folder")
    scene_sets.put(tmp_path / "masks" / "car" / "my_0.png", np.stack([covered(10, 14, 9)] * 2 + [covered(0, 0)], 2))
    assert (classes(tmp_path)[0][10:14] == 1).all()


def test_what_fits_nothing_is_told(tmp_path):
    made(tmp_path, "folder")
    scene_sets.put(tmp_path / "images" / "alone.jpg", scene_sets.scene(9, SIZE)[0])
    scene_sets.put(tmp_path / "masks" / "car" / "gone.png", covered(0, 4))
    assert open_scenes(str(tmp_path)).left_out == (
        "1 image without a mask: alone.jpg",
        "1 mask without an image: car/gone.png",
    )


def test_files_of_several_sizes_and_damaged_ones_are_refused(tmp_path):
    made(tmp_path, "folder")
    scene_sets.put(tmp_path / "masks" / "road" / "my_0.png", covered(0, 4)[:20])
    with pytest.raises(UserError, match=r"road/my_0\.png: 32 x 20 pixels, and my_0\.png 32 x 24; expected one size"):
        classes(tmp_path)
    (tmp_path / "masks" / "car" / "my_0.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"car/my_0\.png: cannot be decoded"):
        classes(tmp_path)


@pytest.mark.parametrize("ends", [("_mask",), ("_labelIds", "_color", "_instanceIds")])
def test_ends_of_masks_that_are_no_classes_stay_what_they_were(tmp_path, ends):
    for n in range(2):
        scene_sets.put(tmp_path / "images" / f"a{n}.png", scene_sets.scene(n, SIZE)[0])
        for end in ends:
            scene_sets.put(tmp_path / "masks" / f"a{n}{end}.png", scene_sets.scene(n, SIZE)[1])
    source = open_scenes(str(tmp_path))
    assert source.kind == "folders of images and masks" and len(source) == 2


def test_a_list_may_have_a_column_for_each_class(tmp_path):
    made(tmp_path, "folder")
    rows = [
        ("images/my_0.jpg", "masks/road/my_0.png", "masks/car/my_0.png"),
        ("images/my_1.jpg", "masks/road/my_1.png", ""),
    ]
    list_ = scene_sets.write_list(tmp_path / "some.csv", rows, ("image", "class:road", "class:car"))
    source = open_scenes(str(list_))
    assert source.labels is not None and source.labels.names == ("background", "road", "car")
    first, second = classes(list_)
    assert (first[:10] == 1).all() and (first[10:14] == 2).all() and (second[:12] == 1).all() and second.max() == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("images/my_0.jpg", "masks/road/my_0.png"), "1 line not of the form image,road,car"),
        (("images/my_0.jpg", "", ""), "1 line without a file of any class"),
        (("images/my_0.jpg", "masks/road/gone.png", ""), "1 line with a mask that does not exist"),
        (("images/my_0.jpg", "../my_0.png", ""), "1 line with a path outside of the root"),
        (("images/my_0.jpg", "some.csv", ""), "1 line with a file that is not an image"),
    ],
)
def test_lines_of_such_a_list_that_cannot_be_used_are_counted(tmp_path, row, message):
    made(tmp_path, "folder")
    list_ = scene_sets.write_list(tmp_path / "some.csv", [row], ("image", "class:road", "class:car"))
    with pytest.raises(UserError, match=message):
        open_scenes(str(list_))
    twice = scene_sets.write_list(tmp_path / "twice.csv", [], ("image", "class:road", "class:road"))
    with pytest.raises(UserError, match="its first line: two classes with the same name: road"):
        open_scenes(str(twice))
