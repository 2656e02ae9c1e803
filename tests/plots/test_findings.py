"""Titles of figures state what the data show, and that nothing was found where nothing was."""

from __future__ import annotations

import numpy as np
import pytest

from trainkit.plots import findings, style


def test_overconfidence_is_stated_only_where_it_is_significant():
    confidence, accuracy = np.array([0.9]), np.array([0.8])
    assert findings.calibration(confidence, accuracy, np.array([10.0])).startswith("No significant")
    many = findings.calibration(confidence, accuracy, np.array([1000.0]))
    assert many == "Overconfident: mean confidence 0.900, accuracy 0.800 (ECE 0.100)"
    assert findings.calibration(accuracy, confidence, np.array([1000.0])).startswith("Underconfident")


def test_errors_of_a_classifier_are_named_or_absent():
    assert findings.confusion(np.array([[9, 1], [0, 5]]), "ab") == (
        "Accuracy 0.933; most frequent error: a predicted as b (10 %)"
    )
    assert findings.confusion(np.eye(2, dtype=int), "ab") == "Accuracy 1.000: no errors"
    assert findings.confusion(np.zeros((2, 2), int), "ab") == "Nothing was counted"


def test_rates_of_many_curves_are_given_by_their_ends():
    far = np.array([1e-4, 1e-3, 1.0])
    curves = {f"net {k}": (far, np.array([0.1, 0.1 * k, 1.0])) for k in range(1, 6)}
    assert findings.roc(curves, 1e-4) == "True accept rate at FAR 0.001: 0.100 (net 1) to 0.500 (net 5)"


@pytest.mark.parametrize("letter", ["m", "i", "a", "W"])
def test_titles_stay_inside_the_figure(letter):
    figure, _ = style.blank(2.0)
    style.titled(figure, " ".join([letter * 9] * 30) + letter * 300, " ".join([letter * 7] * 60))
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.texts]
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height for box in boxes)
    assert boxes[1].y1 <= boxes[0].y0 + 3 and figure.axes[0].get_window_extent().y1 <= boxes[1].y0
