"""Classes that disappear: counted by image, said with the names of files, refused where all is lost."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from coco_sets import SIZE, annotation, box, content, written
from PIL import Image

from trainkit.data.scenes import label_maps, lost_classes, outlines, verify
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


UNSEEN = {
    "outside to the right": cut(40, 3, 5, 5),
    "between centres": cut(5.6, 5.6, 0.3, 0.3),
    "a line": annotation(segmentation=[[1, 1, 9, 9, 5, 5]]),
    "two points": annotation(segmentation=[[1, 1, 9, 9]]),
    "an empty list": annotation(segmentation=[[]]),
    "null": annotation(segmentation=None),
    "a box without width": annotation(segmentation=[], bbox=[1, 1, 0, 5]),
    "run lengths of nothing": annotation(segmentation={"size": list(SIZE), "counts": [24 * 32]}),
    "a box alone": annotation(segmentation=[], bbox=[20, 0, 5, 5]),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_an_outline_without_a_pixel_is_counted_and_its_class_named_with_its_file(tmp_path, name):
    file = written(
        tmp_path,
        content([UNSEEN[name], annotation(image=1), annotation(7, 1, segmentation=[box(20, 20, 3, 3)])], images=2),
    )
    found = packed(file).losses
    assert (found.objects, found.unseen, found.there, found.left) == (3, 1, (0, 2, 1), (0, 1, 1))
    assert found.lost == (
        "1 of 3 outlines have no pixel in their images: p0.png",
        "person: no pixel left in 1 of 2 images: p0.png",
    )
    warned = [text for text in verify.verify(file) if "p0.png" in text]
    assert all(text.startswith(verify.WARNING) for text in warned)
    assert [text.rpartition(": warning: ")[2].partition(f"{file}: ")[2] for text in warned[:2]] == [*found.lost]


def test_classes_that_are_covered_or_vanish_when_masks_are_resized_are_named(tmp_path):
    file = written(tmp_path / "covered", content([annotation(7), annotation(), annotation(7, image=1)], images=2))
    found = packed(file).losses
    assert (found.unseen, found.lost) == (0, ("car: no pixel left in 1 of 2 images: p0.png",))
    small = annotation(7, segmentation=[box(20, 20, 1, 1)])
    file = written(tmp_path, content([annotation(), small, annotation(7, 1), small | {"image_id": 2}], images=3))
    assert packed(file).losses.lost == ()
    assert packed(file, (6, 8)).losses.lost == ("car: no pixel left in 2 of 3 images: p0.png, p2.png",)
    root = masks_of(tmp_path / "set", spot(1), spot(20), spot(1))
    found = packed(root, (8, 8), ["none", "spot"]).losses
    assert found.there == (3, 3) and found.left == (3, 1)
    assert found.lost == ("spot: no pixel left in 2 of 3 images: 0.png, 2.png",)
    assert packed(root, None, ["none", "spot"]).losses.lost == ()


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


def opened(place: object, **more) -> None:
    Scenes(train=str(place), crop=(16, 16), evaluate={}, **more).open(0)


def test_a_training_set_without_a_class_that_was_drawn_is_refused(tmp_path):
    file = written(tmp_path / "coco", content([annotation(), annotation(7, segmentation=[box(5.6, 5.6, 0.3, 0.3)])]))
    with pytest.raises(UserError, match=r"nothing is left of 1 class \(car\)(.|\n)*1 of 2 outlines have no pixel"):
        opened(file)
    assert any("nothing is left of 1 class (car)" in t and not t.startswith("warn") for t in verify.verify(file))
    root = masks_of(tmp_path / "set", spot(1), spot(1))
    with pytest.raises(UserError, match=r"nothing is left of 1 class \(spot\)(.|\n)*data\.size"):
        opened(root, names=["none", "spot"], size=(16, 16))


def test_a_set_of_which_most_outlines_are_not_seen_is_refused(tmp_path):
    far = [annotation(image=n, segmentation=[box(300, 300, 50, 50)]) for n in range(3)]
    file = written(tmp_path, content([annotation(), annotation(7, 1), annotation(image=2), *far], images=3))
    opened(file)
    file = written(tmp_path, content([annotation(7, 1), annotation(), *far], images=3))
    with pytest.raises(UserError, match="3 of 5 outlines have no pixel in their images"):
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
    assert packed(root, None, ["none", "spot"]).losses.lost == ()
    root = masks_of(tmp_path / "some", spot(20, 255), spot(30, 1), spot(20, 255))
    (said,) = [text for text in verify.verify(root, names=["none", "spot"]) if "only one class" in text]
    assert "2 of 3 images have only one class: 0.png (none), 2.png (none)" in said


# What manifests and run lengths hold.


def test_losses_come_back_from_a_manifest_and_others_are_refused(tmp_path):
    losses = packed(written(tmp_path, content([UNSEEN["a line"], annotation()]))).losses
    value = json.loads(json.dumps(dataclasses.asdict(losses)))
    assert lost_classes.read(value) == losses
    for wrong in ([], None, value | {"there": 5}, value | {"there": ["a"]}, value | {"lost": [1]}):
        assert lost_classes.read(wrong) is None


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
