"""Predictions over volumes: what colour each pixel has, and that the image is drawn for every number of cases."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from trainkit.plots import run_figures
from trainkit.plots.volumes import COLOURS, overlays, painted

LARGER = 3


def rgb(k: int) -> np.ndarray:
    return np.array([int(COLOURS[(k - 1) % len(COLOURS)][i : i + 2], 16) for i in (1, 3, 5)])


def line_of(k: int) -> np.ndarray:
    return np.rint(0.8 * rgb(k) + 0.2 * 255).astype(int)


def plane(size: int = 20) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A grey ramp, the truth of organ 1 on the left and the prediction of organ 2 on the right."""
    image = np.linspace(-3, 3, size * size).reshape(size, size).astype(np.float32)
    truth, prediction = np.zeros((2, size, size), np.float32)
    truth[4:14, 2:9] = 1
    prediction[4:14, 11:18] = 2
    return image, truth, prediction


def test_truth_is_a_tint_and_prediction_a_line():
    image, truth, prediction = plane()
    found = painted(image, truth, prediction).astype(int)
    assert found.shape == (60, 60, 3)
    grey = painted(image, truth * 0, prediction * 0).astype(int)
    assert (grey[..., 0] == grey[..., 1]).all() and (np.diff(grey[:, 0, 0]) >= 0).all()
    on_truth = np.kron(truth, np.ones((LARGER, LARGER))) > 0
    np.testing.assert_allclose(found[on_truth], 0.65 * grey[on_truth] + 0.35 * rgb(1), atol=1.01)
    line = (found == line_of(2)).all(-1)
    large = np.kron(prediction, np.ones((LARGER, LARGER))) > 0
    inner = large.copy()
    for axis in (0, 1):
        for step in (-3, -2, -1, 1, 2, 3):
            inner &= np.roll(large, step, axis)
    assert (line == large & ~inner).all() and line.any() and inner.any()
    assert (found[~on_truth & ~line] == grey[~on_truth & ~line]).all()


def test_neighbouring_organs_each_have_their_line():
    image, truth, prediction = plane()
    prediction[4:14, 4:11] = 5
    found = painted(image, truth, prediction)
    for k in (2, 5):
        assert (found == line_of(k)).all(-1).any()


def test_organs_beyond_the_colours_begin_again():
    image, truth, prediction = plane()
    again = [painted(image, truth * k, prediction * 0) for k in (1, 1 + len(COLOURS))]
    assert (again[0] == again[1]).all()
    assert len(set(COLOURS)) == len(COLOURS)


def test_an_image_of_one_value_is_drawn():
    flat = np.full((4, 4), 7.0)
    assert painted(flat, flat * 0, flat * 0).max() == 0


def pictures(cases: int) -> dict:
    one = np.stack(plane())
    return {
        "planes": np.tile(one, (cases, 3, 1, 1, 1)),
        "id": [f"case{k}" for k in range(cases)],
        "rank": ["worst"] * (cases // 2) + ["best"] * (cases - cases // 2),
        "dice": np.linspace(0.2, 0.9, cases),
        "organ_dice": np.tile([0.5, np.nan, 0.25], (cases, 1)),
        "names": ["SR", "LR", "a name of an organ that is long"],
        "total": 40,
    }


@pytest.mark.parametrize("cases", [1, 6])
def test_a_picture_is_drawn_of_any_number_of_cases(cases):
    figure = run_figures.picture("overlays", pictures(cases), "val, step 100")
    out = io.BytesIO()
    figure.savefig(out, format="png")
    wide, tall = Image.open(out).size
    assert wide == 1200 and (tall > 400 * cases)
    texts = [text.get_text() for text in figure.texts]
    said = f"the {cases // 2} worst and {cases - cases // 2} best of 40 cases by mean Dice"
    assert [text.replace("\n", " ") for text in texts[:2]] == [
        "val, step 100", f"{said}; tint: truth, outline: prediction",
    ]  # fmt: skip
    assert "worst: case0, mean Dice 0.200:  SR 0.50, a name of an organ that is long 0.25" in texts or cases == 1
    assert {"SR", "LR"} < set(texts) and not any(text.startswith("a name of") for text in texts)  # on the planes
    shown = [image.get_array() for image in figure.axes[0].images]
    assert len(shown) == 3 * cases and all((shown[0] == other).all() for other in shown)


def test_long_lists_of_organs_end_in_time():
    many = pictures(2)
    many["names"], many["organ_dice"] = [f"organ{k}" for k in range(40)], np.full((2, 40), 0.5)
    figure = run_figures.picture("overlays", many, "val")
    caption = next(text.get_text() for text in figure.texts if text.get_text().startswith("worst"))
    assert "organ0 0.50" in caption and len(caption) < 150


def test_arrays_that_are_no_planes_are_refused():
    with pytest.raises(ValueError, match="captions"):
        overlays(np.zeros((2, 3, 3, 4, 4)), ["one"], ["SR"], "val")
    with pytest.raises(ValueError, match="planes"):
        overlays(np.zeros((1, 3, 2, 4, 4)), ["one"], ["SR"], "val")


@pytest.mark.parametrize(("shown", "end"), [("T1w", "; channel T1w"), ("", "by mean Dice")])
def test_the_channel_that_is_shown_is_said(monkeypatch, shown, end):
    seen = []
    monkeypatch.setattr("trainkit.plots.volumes.overlays", lambda *given: seen.append(given[-1]))
    case = {"id": ["a"], "rank": ["worst"], "dice": [0.5], "organ_dice": [[0.5]], "names": ["x"], "total": 1}
    run_figures.picture("overlays", {**case, "planes": None, "shown": shown}, "val")
    assert seen[0].startswith("the 1 worst and 0 best of 1 cases") and seen[0].endswith(end)
