"""Classes that disappear when masks are resized, and masks of 0 and 255."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trainkit.data.scenes import label_maps, verify
from trainkit.data.scenes.dataset import Scenes
from trainkit.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))


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


def opened(place: object, **more) -> tuple[str, ...]:
    return Scenes(train=str(place), crop=(16, 16), evaluate={}, **more).open(0).notes


def test_a_class_that_vanishes_when_masks_are_resized_is_counted_and_refused_where_nothing_is_left(tmp_path):
    names = ["none", "spot"]
    root = masks_of(tmp_path / "set", spot(1), spot(20), spot(1))
    assert "data.train: spot: no pixel left in 2 of 3 images" in opened(root, names=names, size=(8, 8))
    assert not any("no pixel left" in said for said in opened(root, names=names))
    root = masks_of(tmp_path / "small", spot(1), spot(1))
    with pytest.raises(UserError, match=r"nothing is left of 1 class \(spot\)(.|\n)*data\.size"):
        opened(root, names=names, size=(16, 16))


def test_masks_of_255_are_two_classes_or_refused_where_that_would_be_no_class(tmp_path):
    root = masks_of(tmp_path / "white", spot(20, 255), spot(30, 255))
    with pytest.raises(
        UserError, match=r"\(255\) alone.*data\.palette: \{none: \[0, 0, 0\], NAME: \[255, 255, 255\]\}"
    ):
        opened(root, names=["none", "spot"])
    opened(root, palette={"none": (0, 0, 0), "spot": (255, 255, 255)})
    assert any("(255) alone" in text for text in verify.verify(root, names=["none", "spot"]))
    (said,) = verify.verify(root)
    assert said.startswith("warning: ") and "[255, 255, 255]" in said
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
    opened(masks_of(tmp_path / "rim", rim, spot(10)), names=["none", "spot"])
    root = masks_of(tmp_path / "some", spot(20, 255), spot(30, 1), spot(20, 255))
    (said,) = [text for text in verify.verify(root, names=["none", "spot"]) if "only one class" in text]
    assert "2 of 3 images have only one class: 0.png (none), 2.png (none)" in said
