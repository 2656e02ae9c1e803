"""Objects that disappear: counted by class and reason, said with the names of files, refused where all are lost."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from coco_sets import SIZE, annotation, box, content, written
from PIL import Image

from trainkit.data.scenes import label_maps, outlines, verify
from trainkit.data.scenes.dataset import Scenes
from trainkit.data.scenes.mask_store import PackedMasks, pack_masks_once
from trainkit.data.scenes.sources import open_scenes
from trainkit.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))


def packed(text: object, size: tuple[int, int] | None = None, names: list[str] | None = None) -> PackedMasks:
    source = open_scenes(str(text))
    labels = source.labels if names is None else label_maps.numbered(names)
    assert labels is not None
    return pack_masks_once(source, labels, size)


def cut(x: float, y: float, *rest: float) -> dict:
    return annotation(segmentation=[box(x, y, *rest)])


LOST = {
    "outside to the right": (cut(40, 3, 5, 5), "outside of the image"),
    "outside above": (cut(3, -20, 5, 5), "outside of the image"),
    "between centres": (cut(5.6, 5.6, 0.3, 0.3), "below a pixel"),
    "a line": (annotation(segmentation=[[1, 1, 9, 9, 5, 5]]), "without an area"),
    "two points": (annotation(segmentation=[[1, 1, 9, 9]]), "without an area"),
    "no list": (annotation(segmentation=[]), "without an area"),
    "an empty list": (annotation(segmentation=[[]]), "without an area"),
    "null": (annotation(segmentation=None), "without an area"),
    "a box without width": (annotation(segmentation=[], bbox=[1, 1, 0, 5]), "without an area"),
    "run lengths of nothing": (
        annotation(segmentation={"size": list(SIZE), "counts": [24 * 32]}),
        "without an area",
    ),
    "a box alone": (annotation(segmentation=[], bbox=[20, 0, 5, 5]), "with a box and no outline"),
    "one of the same size above it": (annotation(), "covered by others"),
}


@pytest.mark.parametrize("name", LOST)
def test_an_object_that_is_not_seen_is_counted_with_class_reason_and_file(tmp_path, name):
    lost, reason = LOST[name]
    file = written(tmp_path, content([lost, annotation(), annotation(7, 1)], images=2))
    found = packed(file).objects
    assert found.there == (0, 2, 1) and found.left == (0, 1, 1)
    (said,) = found.lost
    assert said == f"person: 1 of 2 objects left; 1 {reason}: p0.png"
    (warned,) = [text for text in verify.verify(file) if "person" in text]
    assert warned.startswith(verify.WARNING) and said in warned


def test_objects_that_vanish_when_masks_are_resized_are_counted(tmp_path):
    small = annotation(7, segmentation=[box(20, 20, 1, 1)])
    file = written(tmp_path, content([annotation(), small, annotation(7, 1), small | {"image_id": 2}], images=3))
    whole, less = packed(file), packed(file, (6, 8))
    assert whole.objects.lost == () and whole.objects.left == (0, 1, 3)
    assert less.objects.left == (0, 1, 1)
    assert less.objects.lost == ("car: 1 of 3 objects left; 2 gone when masks are resized: p0.png, p2.png",)


def masks_of(root: Path, *masks: np.ndarray) -> Path:
    for k, mask in enumerate(masks):
        for folder, pixels in (("images", np.full((*mask.shape, 3), k, np.uint8)), ("masks", mask)):
            (root / folder).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(root / folder / f"{k}.png")
    return root


def spot(side: int, value: int = 1) -> np.ndarray:
    mask = np.zeros((64, 64), np.uint8)
    mask[29 : 29 + side, 29 : 29 + side] = value
    return mask


def test_classes_that_vanish_from_images_when_masks_are_resized_are_counted(tmp_path):
    root = masks_of(tmp_path / "set", spot(1), spot(20), spot(1))
    found = packed(root, (8, 8), ["none", "spot"]).objects
    assert found.there == (3, 3) and found.left == (3, 1)
    assert found.lost == ("spot: 1 of 3 images left; 2 gone when masks are resized: 0.png, 2.png",)
    assert packed(root, None, ["none", "spot"]).objects.lost == ()


def opened(place: object, **more) -> None:
    Scenes(train=str(place), crop=(16, 16), evaluate={}, **more).open(0)


def test_a_training_set_without_a_class_that_was_drawn_is_refused(tmp_path):
    file = written(tmp_path / "coco", content([annotation(), annotation(7, segmentation=[box(5.6, 5.6, 0.3, 0.3)])]))
    with pytest.raises(UserError, match=r"nothing is left of 1 class \(car\)(.|\n)*1 below a pixel: p0\.png"):
        opened(file)
    assert any("nothing is left of 1 class (car)" in t and not t.startswith("warn") for t in verify.verify(file))
    root = masks_of(tmp_path / "set", spot(1), spot(1))
    with pytest.raises(UserError, match=r"nothing is left of 1 class \(spot\)(.|\n)*data\.size"):
        opened(root, names=["none", "spot"], size=(16, 16))


def test_most_objects_outside_of_their_images_are_refused(tmp_path):
    far = [annotation(image=n, segmentation=[box(300, 300, 50, 50)]) for n in range(3)]
    file = written(tmp_path, content([annotation(), annotation(7, 1), annotation(image=2), *far], images=3))
    opened(file)
    file = written(tmp_path, content([annotation(7, 1), annotation(), *far], images=3))
    with pytest.raises(UserError, match="3 of 5 objects are not seen in their images"):
        opened(file)


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_outlines_from_0_to_1_are_refused_before_anything_is_painted(tmp_path, share):
    small = annotation(segmentation=[[0.1, 0.1, 0.6, 0.1, 0.6, 1.0]])
    many = round(10 * share)
    file = written(tmp_path, content([small] * many + [annotation()] * (10 - many)))
    with pytest.raises(UserError, match=f"{many} of 10 outlines with coordinates from 0 to 1"):
        open_scenes(str(file))
    open_scenes(str(written(tmp_path, content([small] * 2 + [annotation()] * 2))))


@pytest.mark.parametrize("said", [[32, 24], [24, 31], 5, ["24", "32"]])
def test_run_lengths_of_another_size_than_the_image_are_refused(tmp_path, said):
    runs = {"size": said, "counts": [0, 100, 24 * 32 - 100]}
    with pytest.raises(UserError, match=r"annotations\[0\]\.segmentation"):
        open_scenes(str(written(tmp_path, content([annotation(segmentation=runs)]))))


# Masks of 0 and 255.


def test_masks_of_255_are_two_classes_or_refused_where_that_would_be_no_class(tmp_path):
    root = masks_of(tmp_path / "white", spot(20, 255), spot(30, 255))
    with pytest.raises(
        UserError, match=r"\(255\) alone.*data\.palette: \{none: \[0, 0, 0\], NAME: \[255, 255, 255\]\}"
    ):
        opened(root, names=["none", "spot"])
    opened(root, palette={"none": (0, 0, 0), "spot": (255, 255, 255)})
    assert any("(255) alone" in text for text in verify.verify(root, names=["none", "spot"]))
    (said,) = verify.verify(root)
    assert said.startswith(verify.WARNING) and "[255, 255, 255]" in said
    assert label_maps.guessed({(0,), (1,), (255,)}).names == ("0", "1")
    # Where it is a colour, one class beside it is all that an evaluation set may have.
    both, one = (
        masks_of(tmp_path / "both", spot(20, 7), spot(9, 7)),
        masks_of(tmp_path / "one", np.full((64, 64), 7, "u1")),
    )
    Image.fromarray(spot(20, 3)).save(one / "masks" / "0.png")
    palette = {"a": (0, 0, 0), "b": (7, 7, 7)}
    Scenes(
        train=str(both), palette=palette, ignore=[(3, 3, 3)], crop=(16, 16), evaluate={"v": str(one)}, leakage="allow"
    ).open(0)
    # Beside two classes it stays no class.
    rim = spot(20)
    rim[0] = 255
    root = masks_of(tmp_path / "rim", rim, spot(10))
    opened(root, names=["none", "spot"])
    assert packed(root, None, ["none", "spot"]).objects.lost == ()
    root = masks_of(tmp_path / "some", spot(20, 255), spot(30, 1), spot(20, 255))
    (said,) = [text for text in verify.verify(root, names=["none", "spot"]) if "only one class" in text]
    assert "2 of 3 images have only one class: 0.png (none), 2.png (none)" in said


# What manifests and run lengths hold.


def test_sums_come_back_from_a_manifest_and_others_are_refused(tmp_path):
    objects = packed(written(tmp_path, content([LOST["a line"][0], annotation()]))).objects
    value = json.loads(json.dumps(dataclasses.asdict(objects)))
    assert type(objects).read(value) == objects
    for wrong in ({}, [], None, value | {"there": 5}, value | {"there": ["a"]}, value | {"lost": [1]}):
        assert type(objects).read(wrong) is None


def compressed(lengths: list[int]) -> str:
    """As pycocotools writes run lengths."""
    text = ""
    for n, length in enumerate(lengths):
        value = length - (lengths[n - 2] if n > 2 else 0)
        while True:
            low, value = value & 31, value >> 5
            more = value != (-1 if low & 16 else 0)
            text += chr(48 + (low | 32 * more))
            if not more:
                break
    return text


def test_run_lengths_are_decoded_as_they_were_written():
    rng = np.random.default_rng(0)
    for size in ((1, 1), (7, 5), (300, 200)):
        for most in (1, 4, 3000):
            mask = np.repeat(rng.random(2 * size[0] * size[1]) < 0.5, rng.integers(1, most + 1))[: size[0] * size[1]]
            edges = np.flatnonzero(np.diff(np.concatenate([[False], mask])))
            lengths = np.diff([0, *edges.tolist(), len(mask)]).tolist()
            expected = mask.reshape(size[1], size[0]).T
            assert (outlines.decode_runs(compressed(lengths), size) == expected).all()
            assert (outlines.decode_runs(np.array(lengths), size) == expected).all()


@pytest.mark.parametrize(
    "text",
    ["o", "", "Q", "oooooooooooooooooooo0", "ooooooL00", "ooooooO" * 30, "0" * 11, "1" * 11, "2M3", "oooooo?" * 9],
)
def test_run_lengths_beyond_any_image_are_refused_in_a_sentence(text):
    with pytest.raises(ValueError, match="run lengths"):
        outlines.decode_runs(text, (3, 4))
