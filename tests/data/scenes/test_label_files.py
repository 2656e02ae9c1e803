"""Names of classes beside a set: which files are read, and that no set gets the names of another one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scene_sets

from trainkit.data.scenes import label_files, label_maps
from trainkit.data.scenes.files import classes_of
from trainkit.data.scenes.label_maps import from_palette, numbered
from trainkit.data.scenes.sources import open_scenes
from trainkit.errors import UserError

COLOURS = {"background": (0, 0, 0), "leaf": (10, 200, 10), "fruit": (200, 10, 10)}
LABEL_MAP = "# label:color_rgb:parts:actions\n" + "".join(
    f"{name}:{','.join(map(str, colour))}::\n" for name, colour in COLOURS.items()
)


def like_voc(root: Path, names: str = "shot{:02d}", coloured: bool = False) -> Path:
    """A set laid out as Pascal VOC that is none, of classes 0, 1 and 2."""
    (root / "ImageSets" / "Segmentation").mkdir(parents=True)
    table = np.array([*COLOURS.values()], np.uint8)
    for n in range(2):
        picture, mask = scene_sets.scene(n, classes=3, ignored=False)
        scene_sets.put(root / "JPEGImages" / f"{names.format(n)}.png", picture)
        scene_sets.put(root / "SegmentationClass" / f"{names.format(n)}.png", table[mask] if coloured else mask)
    stems = "".join(f"{names.format(n)}\n" for n in range(2))
    (root / "ImageSets" / "Segmentation" / "default.txt").write_text(stems)
    return root


def test_a_set_laid_out_as_voc_does_not_get_the_names_of_voc(tmp_path):
    source = open_scenes(str(like_voc(tmp_path / "own")))
    assert (source.kind, source.labels, len(source)) == ("folders in the layout of Pascal VOC", None, 2)
    source = open_scenes(str(like_voc(tmp_path / "voc", names="2007_{:06d}")))
    assert (source.kind, source.labels) == ("Pascal VOC", label_maps.voc())


def test_a_set_laid_out_as_coco_stuff_does_not_get_its_names(tmp_path):
    root = scene_sets.coco_stuff(tmp_path, masks="masks")
    assert open_scenes(f"{root}#train").labels is None


def test_the_label_map_of_cvat_names_colours(tmp_path):
    root = like_voc(tmp_path, coloured=True)
    (root / "labelmap.txt").write_text(LABEL_MAP)
    source = open_scenes(str(root))
    assert source.labels == from_palette(COLOURS, [(224, 224, 192)]) and root / "labelmap.txt" in source.files
    assert (classes_of(source.scenes[1], source.labels) == scene_sets.scene(1, classes=3, ignored=False)[1]).all()


@pytest.mark.parametrize("name", label_files.LISTS)
def test_lists_of_names_are_those_of_the_numbers(tmp_path, name):
    root = like_voc(tmp_path)
    (root / name).write_text("__ignore__\n_background_\nleaf\nfruit\n")
    assert open_scenes(str(root)).labels == numbered(["_background_", "leaf", "fruit"])


def test_names_beside_a_published_layout_come_first(tmp_path):
    root = like_voc(tmp_path / "voc", names="2007_{:06d}")
    (root / "classes.txt").write_text("a\nb\nc\n")
    source = open_scenes(str(root))
    assert source.labels == numbered(["a", "b", "c"]) and source.kind == "folders in the layout of Pascal VOC"
    root = scene_sets.cityscapes(tmp_path / "city")
    (root / "classes.txt").write_text("".join(f"c{n}\n" for n in range(13)))
    assert open_scenes(f"{root}#train").labels == numbered([f"c{n}" for n in range(13)])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("labelmap.txt", "leaf 10 10 10\n", r"'leaf 10 10 10'; expected name:red,green,blue::"),
        ("labelmap.txt", "leaf:1,2,3::\nleaf:1,2,4::\n", r"expected name:red,green,blue:: per line, each name once"),
        ("labelmap.txt", "leaf:1,2,300::\nroot:0,0,0::\n", r"colour \[1, 2, 300\]"),
        ("labelmap.txt", "".join(f"c{n}:0,0,{n}::\n" for n in range(256)), "more than 255 classes|256"),
        ("classes.txt", "leaf\nleaf\n", "two classes with the same name: leaf"),
        ("classes.txt", "one\n", "1 classes; 2 to 255"),
        ("classes.txt", "".join(f"c{n}\n" for n in range(300)), "300 lines; the names of 2 to 255"),
        ("classes.txt", "a\n" * 600_000, "at most 1048576: names of classes"),
        ("classes.txt", "\0\nb\n", "the name of a class is"),
    ],
)
def test_files_that_name_no_classes_are_refused(tmp_path, name, text, message):
    root = like_voc(tmp_path)
    (root / name).write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        open_scenes(str(root))
    assert name in str(caught.value)
