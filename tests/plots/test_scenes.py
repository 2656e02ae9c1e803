"""Segmented images: what colour each pixel has, and that the image is drawn for every number of them."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from trainkit.interfaces import IGNORED
from trainkit.plots import curves, run_figures
from trainkit.plots.scenes import WRONG, palette, panels, scenes

GREY, PALE = (128, 128, 128), 255 - round(0.45 * (255 - 128))


def one() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A grey image; the truth has two classes and an unlabelled corner, the prediction one wrong block."""
    image = np.full((20, 30, 3), GREY, dtype=np.uint8)
    truth = np.zeros((20, 30), dtype=np.uint8)
    truth[:, 15:] = 1
    truth[:5, :10] = IGNORED
    predicted = np.where(truth == IGNORED, 2, truth).astype(np.uint8)
    predicted[10:14, 3:9] = 1
    return image, truth, predicted


COLOURS = ((0, 0, 0), (10, 200, 30), (1, 2, 3))


def test_panels_are_picture_truth_prediction_and_mistakes():
    image, truth, predicted = one()
    picture, true, found, wrong = panels(image, truth, predicted, COLOURS)
    assert (picture == image).all()
    for panel in (true, found, wrong):
        assert panel.shape == image.shape and panel.dtype == np.uint8
    table = np.array(COLOURS)
    labelled = truth != IGNORED
    assert (true[labelled] == table[truth[labelled]]).all()
    # Two greys, neither of which is black, whatever colour the data gives a class.
    assert {tuple(colour) for colour in true[~labelled].tolist()} == {(244, 244, 244), (208, 208, 208)}
    assert (found == table[predicted]).all()
    mistaken = np.zeros(truth.shape, dtype=bool)
    mistaken[10:14, 3:9] = True
    assert (wrong[mistaken] == WRONG).all() and (wrong[~mistaken] == PALE).all()


def test_panels_of_unlike_sizes_are_refused():
    image, truth, predicted = one()
    with pytest.raises(ValueError, match="prediction"):
        panels(image, truth, predicted[1:], COLOURS)
    with pytest.raises(ValueError, match="2 predictions"):
        scenes([image], [truth], [predicted] * 2, ["one"], ["a", "b", "c"], COLOURS, "val")
    with pytest.raises(ValueError, match="2 classes, 3 colours"):
        scenes([image], [truth], [predicted], ["one"], ["a", "b"], COLOURS, "val")


def test_colours_differ_and_do_not_depend_on_how_many_there_are():
    many = palette(255)
    assert len(set(many)) == 255 and all(0 <= value <= 255 for colour in many for value in colour)
    assert palette(11) == many[:11] and palette(0) == ()
    assert all(type(value) is int for value in many[0])
    # As PASCAL VOC has them.
    voc = {0: (0, 0, 0), 1: (128, 0, 0), 2: (0, 128, 0), 15: (192, 128, 128), 20: (0, 64, 128)}
    assert {label: many[label] for label in voc} == voc
    with pytest.raises(ValueError, match="256 classes"):
        palette(256)


def arrays(count: int, names=("road", "sky", "car"), colours=COLOURS) -> dict:
    image, truth, predicted = one()
    return {
        "images": [image] * count,
        "truth": [truth] * count,
        "predicted": [predicted] * count,
        "id": [f"a/long/folder/scene{k}.png" for k in range(count)],
        "miou": np.full(count, 0.5),
        "pixel_accuracy": np.full(count, 0.956),
        "iou": np.tile([0.75, 0.25, np.nan, *[1.0] * (len(names) - 3)], (count, 1)),
        "names": names,
        "colours": colours,
    }


@pytest.mark.parametrize("count", [1, 2])
def test_a_picture_is_drawn_of_any_number_of_scenes(count):
    figure = run_figures.picture("scenes", arrays(count), "val, step 100")
    out = io.BytesIO()
    figure.savefig(out, format="png")
    wide, tall = Image.open(out).size
    assert wide == 1200 and tall > 200 * count + 60
    texts = [text.get_text() for text in figure.texts]
    assert texts[0] == "val, step 100" and len(figure.axes[0].images) == 4 * count
    assert {"image", "prediction", "wrong pixels", "truth (chequered: no label)"} <= set(texts)
    assert {"road", "sky", "car"} <= set(texts)  # the last is predicted only
    caption = "a/long/folder/scene0.png: mIoU 0.500, pixel accuracy 95.6 %; lowest IoU: sky 0.25, road 0.75"
    assert caption in texts
    expected = panels(*one(), COLOURS)
    for image, panel in zip(figure.axes[0].images[:4], expected, strict=True):
        assert (image.get_array() == panel).all()


def test_classes_that_are_nowhere_are_not_in_the_legend_and_own_colours_do():
    figure = run_figures.picture("scenes", arrays(1, ("road", "sky", "car", "dog"), ()), "val")
    assert "dog" not in [text.get_text() for text in figure.texts]
    assert (figure.axes[0].images[2].get_array()[0, 0] == palette(4)[2]).all()


def test_a_scene_without_labels_says_so():
    given = arrays(1)
    given["miou"][:], given["truth"] = np.nan, [np.full((20, 30), IGNORED, dtype=np.uint8)]
    figure = run_figures.picture("scenes", given, "val")
    assert "a/long/folder/scene0.png: no labels" in [text.get_text() for text in figure.texts]
    assert (figure.axes[0].images[3].get_array() == PALE).all()


@pytest.mark.parametrize("names", [
    ("road", "sky", "car"), ("a name of a class that is far too long",) * 3, ("x" * 90, "y" * 90),
    tuple(f"class {k}" for k in range(150)),
])  # fmt: skip
def test_the_legend_keeps_to_its_place(names):
    image = np.zeros((30, 40, 3), dtype=np.uint8)
    labels = (np.arange(1200).reshape(30, 40) % len(names)).astype(np.uint8)
    figure = scenes([image], [labels], [labels], ["one"], names, (), "val")
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.texts]
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width + 1 for box in boxes)
    assert not any(a.overlaps(b) for k, a in enumerate(boxes) for b in boxes[:k])
    top = max(image.get_window_extent().y1 for image in figure.axes[0].images)
    assert all(box.y0 >= top - 1 for box in boxes)
    patches = figure.axes[0].patches
    assert len(patches) == min(len(names), 20)


def test_tall_and_wide_pictures_stand_below_each_other():
    given = arrays(2)
    given["images"][1] = np.zeros((90, 10, 3), dtype=np.uint8)
    given["truth"][1] = given["predicted"][1] = np.zeros((90, 10), dtype=np.uint8)
    figure = run_figures.picture("scenes", given, "val")
    figure.draw_without_rendering()
    first, second = (figure.axes[0].images[k].get_window_extent() for k in (0, 4))
    assert first.y0 > second.y1 and second.y0 >= 0


def test_confusion_of_millions_of_pixels_is_readable():
    counts = np.diag([1_234_567, 999_600_000, 999_000])
    counts[0, 1] = 70
    texts = {text.get_text() for text in curves.confusion(counts, ["a", "b", "c"]).axes[0].texts}
    assert {"1.235M\n100.0 %", "999.6M\n100.0 %", "999,000\n100.0 %", "70\n0.0 %"} == texts
    many = np.full((15, 15), 10_000)
    many[0] = [960_000, 30_000, 10_000, 100, *[0] * 11]
    figure = curves.confusion(many, [f"class {k}" for k in range(15)])
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts[:4] == ["96", "3", "1", "0"] and set(texts[4:]) == {"7"}
    assert "numbers: %" in figure.axes[1].get_ylabel()
