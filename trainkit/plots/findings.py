"""Titles of figures: one sentence each that states what the data show, or that they show nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from trainkit.plots.style import short


def roc(curves: Mapping[str, tuple[np.ndarray, np.ndarray]], left: float) -> str:
    """State the true accept rate at a false accept rate: 0.001, or the lowest power of ten above that is drawn."""
    rate = max(left, 1e-3)
    scores = {name: float(tar[far <= rate * (1 + 1e-9)].max(initial=0.0)) for name, (far, tar) in curves.items()}
    return f"True accept rate at FAR {rate:g}: {_listed(scores)}"


def auc(curves: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> str:
    """State the area under the curve of two classes."""
    return f"ROC AUC: {_listed({name: float(np.trapezoid(tar, far)) for name, (far, tar) in curves.items()})}"


def _listed(scores: Mapping[str, float]) -> str:
    """List the scores of up to three curves; of more the lowest and the highest."""
    if len(scores) == 1:
        return f"{next(iter(scores.values())):.3f}"
    if len(scores) <= 3:
        return ", ".join(f"{short(name, 20)} {value:.3f}" for name, value in scores.items())
    ends = min(scores, key=lambda name: scores[name]), max(scores, key=lambda name: scores[name])
    return " to ".join(f"{scores[name]:.3f} ({short(name, 16)})" for name in ends)


def calibration(confidence: np.ndarray, accuracy: np.ndarray, count: np.ndarray) -> str:
    """State the expected calibration error, and a mean confidence that differs significantly from the accuracy."""
    total = float(count.sum())
    if not total:
        return "No predictions"
    error = float(np.sum(count * np.abs(confidence - accuracy))) / total
    said, right = (float(np.sum(count * each)) / total for each in (confidence, accuracy))
    # 95 % interval of the accuracy, from the standard error of a proportion.
    margin = 1.96 * math.sqrt(max(right * (1 - right), 0.25 / total) / total)
    if abs(said - right) <= margin:
        return f"No significant over- or underconfidence (ECE {error:.3f})"
    word = "Overconfident" if said > right else "Underconfident"
    return f"{word}: mean confidence {said:.3f}, accuracy {right:.3f} (ECE {error:.3f})"


def confusion(counts: np.ndarray, names: Sequence[str]) -> str:
    """State the accuracy and the most frequent error."""
    total, right = int(counts.sum()), int(np.trace(counts))
    if not total:
        return "Nothing was counted"
    if right == total:
        return "Accuracy 1.000: no errors"
    off = counts - np.diag(np.diag(counts))
    true, predicted = divmod(int(off.argmax()), len(counts))
    worst = f"{short(names[true], 16)} predicted as {short(names[predicted], 16)}"
    share = 100 * off[true, predicted] / max(1, counts[true].sum())
    return f"Accuracy {right / total:.3f}; most frequent error: {worst} ({share:.0f} %)"
