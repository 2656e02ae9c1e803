"""Masks of COCO's JSON: what is painted, which classes there are, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import scene_sets
from coco_sets import CATEGORIES, SIZE, annotation, box, content, written

from trainkit.data.scenes import coco, json_lists, outlines
from trainkit.data.scenes.sources import open_scenes
from trainkit.errors import UserError


def masks(file: Path) -> list[np.ndarray]:
    source = open_scenes(str(file))
    assert source.labels is not None
    return [scene_sets.classes_of(scene, source.labels) for scene in source.scenes]


def test_categories_are_classes_after_the_background_in_the_order_of_their_ids(tmp_path):
    file = written(tmp_path, content([annotation(), annotation(7, segmentation=[box(20, 0, 4, 24)])], images=2))
    source = open_scenes(str(file))
    assert source.labels is not None and source.labels.names == ("background", "person", "car")
    assert source.ids() == ["p0.png", "p1.png"] and file in source.files
    first, empty = masks(file)
    expected = np.zeros(SIZE, np.uint8)
    expected[3:8, 2:12], expected[:, 20:24] = 1, 2
    assert (first == expected).all() and not empty.any()


def test_of_two_that_overlap_the_smaller_is_on_top_and_of_one_size_the_later(tmp_path):
    large, small = annotation(7, segmentation=[box(0, 0, 20, 20)]), annotation(3, segmentation=[box(5, 5, 4, 4)])
    for order in ([large, small], [small, large]):
        (found,) = masks(written(tmp_path / "a", content(order)))
        assert (found[5:9, 5:9] == 1).all() and (found == 2).sum() == 400 - 16
    equal = [annotation(3, segmentation=[box(0, 0, 6, 6)]), annotation(7, segmentation=[box(3, 0, 6, 6)])]
    (found,) = masks(written(tmp_path / "b", content(equal)))
    assert (found[:6, 3:6] == 2).all() and (found[:6, :3] == 1).all()


def test_crowds_and_boxes_without_an_outline_have_no_class_where_nothing_else_is(tmp_path):
    crowd = annotation(7, iscrowd=1, segmentation={"size": list(SIZE), "counts": [0, 24 * 16, 24 * 16]})
    boxed = annotation(7, segmentation=[], bbox=[20, 0, 5, 5])
    file = written(tmp_path, content([crowd, annotation(), boxed]))
    (found,) = masks(file)
    expected = np.zeros(SIZE, np.uint8)
    expected[:, :16], expected[:5, 20:25], expected[3:8, 2:12] = 255, 255, 1
    assert (found == expected).all()


def test_the_category_that_others_are_under_is_no_class(tmp_path):
    named = [{"id": 0, "name": "things", "supercategory": "none"}]
    named += [{**one, "supercategory": "things"} for one in CATEGORIES]
    labels = open_scenes(str(written(tmp_path, content([annotation()], categories=named)))).labels
    assert labels is not None and labels.names == ("background", "person", "car")
    used = content([annotation(), annotation(0)], categories=named)
    labels = open_scenes(str(written(tmp_path / "used", used))).labels
    assert labels is not None and labels.names == ("background", "things", "person", "car")


def test_run_lengths_are_those_of_pycocotools():
    # Made by pycocotools 2.0.11 of a polygon of 160 x 120 pixels.
    text = "gS74b38H6J3M3N1O2N2O1N1O2O1O1N100000000000O101O00000O10001O1N2N2N2N2N2M4L5L5GcY7"
    found = outlines.decode_runs(text, (120, 160))
    assert found.shape == (120, 160) and int(found.sum()) == 1019 and np.argwhere(found).min(0).tolist() == [73, 60]
    lengths = np.array([5, 3, 24 * 32 - 8])
    expected = np.zeros(SIZE, bool)
    expected[5:8, 0] = True
    assert (outlines.decode_runs(lengths, SIZE) == expected).all()


def test_a_pixel_is_inside_where_its_centre_is():
    triangle = np.array([[0.0, 0.0], [8.0, 0.0], [0.0, 8.0]])
    y, x = np.mgrid[:10, :10] + 0.5
    assert (outlines.fill(triangle, (10, 10)) == (x + y < 8)).all()
    ring = np.array([[0, 0], [9, 0], [9, 9], [0, 9], [0, 0], [3, 3], [6, 3], [6, 6], [3, 6], [3, 3]], float)
    found = outlines.fill(ring, (10, 10))
    assert int(found.sum()) == 81 - 9 and not found[3:6, 3:6].any()
    assert not outlines.fill(triangle - 100, (10, 10)).any() and outlines.fill(triangle * 1e5 - 10, (10, 10)).all()


def test_several_polygons_of_an_object_are_one_area(tmp_path):
    parts = annotation(segmentation=[box(0, 0, 6, 6), box(4, 4, 6, 6), box(-50, -50, 20, 20)])
    (found,) = masks(written(tmp_path, content([parts])))
    assert int((found == 1).sum()) == 36 + 36 - 4


@pytest.mark.parametrize(
    ("layout", "splits"),
    [
        ("roboflow", ("train", "valid")),
        ("coco", ("train2017", "val2017")),
        ("cvat", ("train", "val")),
    ],
)
def test_folders_of_coco_are_found_with_their_splits(tmp_path, layout, splits):
    for n, split in enumerate(splits):
        pictures = {
            "roboflow": tmp_path / split, "coco": tmp_path / split, "cvat": tmp_path / "images" / split,
        }[layout]  # fmt: skip
        file = {
            "roboflow": pictures / "_annotations.coco.json",
            "coco": tmp_path / "annotations" / f"instances_{split}.json",
            "cvat": tmp_path / "annotations" / f"instances_{split}.json",
        }[layout]
        file.parent.mkdir(parents=True, exist_ok=True)
        for k in range(2):
            scene_sets.put(pictures / f"p{k}.png", scene_sets.scene(10 * n + k, SIZE)[0])
        file.write_text(json.dumps(content([annotation(image=1)], images=2)))
        if file.parent.name == "annotations":
            file.with_name(f"person_keypoints_{split}.json").write_text(file.read_text())
    for part in ("train", "val"):
        source = open_scenes(str(tmp_path), part)
        assert source.kind == "COCO's JSON" and len(source) == 2 and source.labels is not None
        assert scene_sets.classes_of(source.scenes[1], source.labels).sum() == 50
        assert open_scenes(f"{tmp_path}#{part}").where == source.where


def test_one_file_beside_its_pictures_is_a_set_without_splits(tmp_path):
    written(tmp_path / "a", content([annotation()]), "result.json")
    (tmp_path / "a" / "info.json").write_text('{"images": 3}')
    assert len(open_scenes(str(tmp_path / "a"))) == 1
    written(tmp_path / "a", content([annotation()]), "second.json")
    with pytest.raises(UserError, match=r"several sets of images and masks: .*result\.json, .*second\.json"):
        open_scenes(str(tmp_path / "a"))


def test_lists_may_name_a_file_of_coco(tmp_path):
    written(tmp_path, content([annotation(), annotation(7, image=2)], images=3))
    (tmp_path / "some.txt").write_text("p2.png,set.json\np0.png,set.json\n")
    source = open_scenes(str(tmp_path / "some.txt"))
    assert source.ids() == ["p2.png", "p0.png"] and source.labels is not None
    assert [scene_sets.classes_of(scene, source.labels).max() for scene in source.scenes] == [2, 1]
    (tmp_path / "some.txt").write_text("p3.png,set.json\n")
    with pytest.raises(UserError, match=r"line 1: p3\.png is not in its JSON"):
        open_scenes(str(tmp_path / "some.txt"))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ('["images", "annotations", "categories"]', "cannot be read"),
        ('{"images": [], "annotations": [], "categories"', "cannot be read"),
        ('["images", "annotations", "categories"' + "[" * 100_000, "cannot be read"),
        ('{"images": "annotations", "categories": 3}', "cannot be read"),
        ('{"info": ' + "[" * 100_000 + ', "images annotations categories": "categories"', "unknown kind"),
        ('{["images", "annotations", "categories"]: []}', "no images"),
        ('{"images": [], "annotations": [], "categories": []} 3', "cannot be read"),
        ('{"images": [], "annotations": [{} {}], "categories": []}', r"annotations\[0\]\.image_id: Field required"),
        (json.dumps(content([annotation()])).replace("}", ",}", 1), "cannot be read"),
        (content([annotation()], images=0), "no images"),
        (content([]), "no annotations"),
        (content([3]), r"annotations\[0\]\.: Input should be .*, found 3"),
        (content([annotation(image=5)]), r"annotations\[0\] is of image 5 and category 3, not known"),
        (content([annotation(5)]), r"annotations\[0\] is of image 0 and category 5, not known"),
        (content([annotation(iscrowd=2)]), r"annotations\[0\]\.iscrowd: Input should be 0 or 1, found 2"),
        (content([annotation(segmentation=[[1, 2, "x", 4, 5, 6]])]), r"segmentation: Input should be"),
        (content([annotation(segmentation=[[1, 2, 3, 4, 5, 6, 7]])]), "segmentation: Value error, x without y"),
        (content([annotation(segmentation=[[1, 2, 3, 4, 1e999, 6]])]), r"segmentation: Input should be"),
        (content([annotation(segmentation=[[1, 2, 3, 4, float("nan"), 6]])]), r"segmentation: Input should be"),
        (content([annotation(segmentation="x")]), r"segmentation: Input should be"),
        (content([annotation(segmentation={"counts": [1, -2]})]), r"segmentation: Input should be"),
        (content([annotation()], images=9), "5 of 9 images do not exist: p4.png"),
        (content([annotation()], categories=[{"id": 1, "name": "a"}] * 2), "id is 1, as of an earlier"),
        (content([annotation(1)], categories=[{"id": 1, "name": "a"}, {"id": 2, "name": "a"}]), "same name: a"),
        (content([annotation(1)], categories=[{"id": n, "name": f"c{n}"} for n in range(300)]), "301 classes"),
        (content([]) | {"images": [{"id": 1, "file_name": "../p0.png", "height": 4, "width": 4}]}, "below"),
        (content([]) | {"images": [{"id": 1, "file_name": "/etc/x.png", "height": 4, "width": 4}]}, "below one folder"),
        (content([]) | {"images": [{"id": 1, "file_name": "p0.png", "height": 0, "width": 4}]}, r"height: .* 0"),
        (content([]) | {"images": [{"id": 1, "file_name": 4, "height": 4, "width": 4}]}, r"\]\.file_name: .* 4"),
        (content([annotation()]) | {"images": [{**content([])["images"][0], "id": n} for n in (0, 3)]},
         "file_name of an earlier image"),
    ],
)  # fmt: skip
def test_what_is_not_of_cocos_form_is_refused_in_one_message(tmp_path, said, message):
    with pytest.raises(UserError, match=message) as caught:
        open_scenes(str(written(tmp_path, said)))
    assert len(str(caught.value)) < 2000 and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("segmentation", "message"),
    [
        ({"counts": [5]}, "run lengths that do not make up 32 x 24 pixels"),
        ({"counts": "o"}, "truncated run lengths"),
        ({"counts": "\x01"}, "truncated run lengths, or characters"),
        ({"counts": "o" * 50 + "0"}, "impossible run lengths"),
        ([[0, 0, 5, 1e6] * 30_000], "an outline of 60000 points that crosses"),
    ],
)
def test_outlines_that_do_not_fit_are_named_with_their_picture(tmp_path, segmentation, message):
    file = written(tmp_path, content([annotation(segmentation=segmentation)]))
    with pytest.raises(UserError, match=rf"image 0 \(p0\.png\): {message}"):
        masks(file)


def test_a_file_that_is_too_large_is_refused_unread(tmp_path, monkeypatch):
    file = written(tmp_path, content([annotation()]))
    monkeypatch.setattr(coco, "LIMIT", 100)
    for place in (file, tmp_path):
        with pytest.raises(UserError, match=r"bytes; expected at most 100: masks in COCO's JSON"):
            open_scenes(str(place))


def test_a_picture_behind_a_link_out_of_the_set_is_refused(tmp_path):
    file = written(tmp_path / "set", content([annotation()]))
    outside = scene_sets.put(tmp_path / "outside.png", scene_sets.scene(0, SIZE)[0])
    (tmp_path / "set" / "p0.png").unlink()
    (tmp_path / "set" / "p0.png").symlink_to(outside)
    with pytest.raises(UserError, match=r"1 link.? out of .*p0\.png"):
        open_scenes(str(file))


@pytest.mark.parametrize("most", [80, 200, 5000])
def test_a_file_is_the_same_in_windows_of_any_size(tmp_path, monkeypatch, most):
    annotations = [annotation(n % 2 * 4 + 3, n % 3, segmentation=[box(n % 20, n % 9, 5, 5)]) for n in range(40)]
    said = {"info": {"year": 2017, "ü": "é" * 20}, "licenses": [1.5, -3, None]} | content(annotations, images=3)
    for indent in (None, 1):
        file = written(tmp_path, json.dumps(said, indent=indent, ensure_ascii=False))
        expected = masks(file)
        monkeypatch.setattr(json_lists, "ENTRY", most)
        if most == 80:
            with pytest.raises(UserError, match="above 80 characters"):
                masks(file)
        else:
            assert all(map(np.array_equal, masks(file), expected))
        monkeypatch.undo()
