"""Calibration: compare the confidence of predictions with their accuracy.

Guo et al., "On Calibration of Modern Neural Networks" (ICML 2017). Plain NumPy in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BINS = 15
"""Bins of equal width, as in the paper."""


@dataclass(frozen=True)
class Reliability:
    """Confidence and accuracy of each bin with at least one prediction, by rising confidence."""

    confidence: np.ndarray
    """float64 (bins,), mean confidence of the predictions in a bin."""
    accuracy: np.ndarray
    """float64 (bins,), share of correct predictions in a bin."""
    count: np.ndarray
    """int64 (bins,), number of predictions in a bin."""

    @property
    def ece(self) -> float:
        """Expected calibration error: mean gap between confidence and accuracy, bins weighted by their predictions."""
        return float(np.average(np.abs(self.accuracy - self.confidence), weights=self.count))


def reliability(confidence: np.ndarray, correct: np.ndarray, bins: int = BINS) -> Reliability:
    """Sort predictions into bins by their confidence.

    `confidence` (N,) is the probability of the predicted class, 0 to 1; `correct` (N,) bool is True if the label is
    that class. Bin k holds k/bins < confidence <= (k+1)/bins; the first one also holds 0. Raises ValueError without
    predictions, or for a confidence outside 0 to 1.
    """
    confidence, correct = np.asarray(confidence, dtype=np.float64), np.asarray(correct, dtype=bool)
    if confidence.ndim != 1 or confidence.shape != correct.shape or not len(confidence):
        raise ValueError(f"one confidence for each decision expected, got {confidence.shape} and {correct.shape}")
    if not (confidence >= 0).all() or not (confidence <= 1).all():
        raise ValueError("a confidence lies between 0 and 1")
    edges = np.arange(bins + 1) / bins
    place = (np.searchsorted(edges, confidence, side="left") - 1).clip(min=0)
    count = np.bincount(place, minlength=bins)
    held = np.flatnonzero(count)
    return Reliability(
        np.bincount(place, weights=confidence, minlength=bins)[held] / count[held],
        np.bincount(place, weights=correct, minlength=bins)[held] / count[held],
        count[held],
    )
