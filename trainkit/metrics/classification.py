"""Metrics of classification. Plain NumPy in float64, whatever the type of the scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trainkit.errors import UserError
from trainkit.evaluation_protocols import Classes
from trainkit.interfaces import Scores
from trainkit.metrics import significance
from trainkit.metrics.significance import Units
from trainkit.metrics.verification import as_array, nan_to_none, operating_points, resampled_curve

if TYPE_CHECKING:
    from torch import Tensor

VALUES_AT_ONCE = 4_000_000
BINS = 15
"""Bins of confidence, of equal width, as in Guo et al., "On Calibration of Modern Neural Networks" (ICML 2017)."""


def score_classes(logits: np.ndarray | Tensor, protocol: Classes, where: str = "classification set") -> Scores:
    """Compute the metrics of classes predicted for the images of a split.

    `logits` is (N, C), whose softmax is the probability of each class; the highest is the prediction, the first of
    equal ones. Metrics: top1, top5 (with more than 5 classes), balanced_accuracy (mean recall), f1_macro, nll (mean
    negative logarithm of the label's probability, in nats), ece (expected calibration error, 15 bins of equal width).
    With two classes also accuracy (top1 under its customary name), f1 and auc of the class numbered 1,
    `protocol.names[1]`, ties counting half.

    An image with label -1 has a row in the table and counts in no metric. Means over classes are over those that occur
    among the labels; f1 and auc are left out if one of the two classes does not occur. With two classes the rows have
    `score`, that of class 1 minus that of class 0; `place` is the number of classes ranked before the label's. Raises
    UserError for scores that are not finite, a label that is not a class, or a split without labels.
    """
    logits, label = as_array(logits), check_classes(protocol, where)
    if logits.ndim != 2 or logits.shape != (len(label), len(protocol.names)) or len(protocol.names) < 2:
        raise ValueError(f"scores of {len(label)} images for {len(protocol.names)} classes, got {logits.shape}")
    decided = decide(logits, label, where)
    known = label >= 0
    counts = confusion(label[known], decided.prediction[known], len(protocol.names))
    table = per_class(counts)
    occurs = table["support"] > 0
    right = decided.place[known] == 0
    metrics = {"top1": float(right.mean())}
    if len(protocol.names) > 5:
        metrics["top5"] = float((decided.place[known] < 5).mean())
    metrics |= {
        "balanced_accuracy": float(table["recall"][occurs].mean()),
        "f1_macro": float(table["f1"][occurs].mean()),
        "nll": float(decided.nll[known].mean()),
        "ece": calibration_error(decided.confidence[known], right),
    }
    names = np.array([*protocol.names, None], dtype=object)  # the last one stands for -1
    curves = {"confusion": {"counts": counts, "names": protocol.names}}
    if len(protocol.names) == 2:
        metrics["accuracy"] = metrics["top1"]
        if occurs.all():
            metrics["f1"] = float(table["f1"][1])
            gap = difference(logits)
            points = operating_points(gap[label == 1], gap[label == 0])
            metrics["auc"] = float(points.auc)
            curves["roc"] = points.curve()
    rows = {
        "label": names[label].tolist(),
        "prediction": names[decided.prediction].tolist(),
        "confidence": decided.confidence,
        "probability": np.exp(-decided.nll),
        "place": decided.place,
    }
    if len(protocol.names) == 2:
        rows["score"] = difference(logits)
    if protocol.group is not None:
        rows["group"] = protocol.group
    tables = {"per_class": {"class": list(protocol.names), **{name: nan_to_none(c) for name, c in table.items()}}}
    chance = chance_level("top1", int(counts.sum()), float(counts.sum(axis=1).max() / counts.sum()))
    return Scores(metrics, rows, curves, chance, tables=tables)


def names(protocol: Classes, where: str) -> tuple[str, ...]:
    """Check the protocol, and return the metrics that it will have."""
    label = check_classes(protocol, where)
    found = ["top1", "balanced_accuracy", "f1_macro", "nll", "ece"]
    if len(protocol.names) > 5:
        found.append("top5")
    if len(protocol.names) == 2:
        found += ["accuracy", *(["f1", "auc"] if np.isin((0, 1), label).all() else [])]
    return tuple(found)


def check_classes(protocol: Classes, where: str) -> np.ndarray:
    """Return `labels`. Raises UserError also where no image has one."""
    label = labels(protocol, where)
    if not (label >= 0).any():
        raise UserError(where, f"none of {len(label)} images has a label", "labelled images", "add labels to this set")
    return label


def labels(protocol: Classes, where: str) -> np.ndarray:
    """Return the labels of a split, int64 (N,). Raises UserError for a label that is neither a class nor -1."""
    label = np.asarray(protocol.label, dtype=np.int64)
    bad = np.flatnonzero((label < -1) | (label >= len(protocol.names)))
    if len(bad):
        raise UserError(
            where,
            f"{len(bad)} of {len(label)} labels are not a class, the first is {label[bad[0]]} in row {bad[0]}",
            f"0 to {len(protocol.names) - 1}, or -1 for an image without a label",
        )
    return label


@dataclass(frozen=True)
class Decisions:
    """Prediction, probabilities and rank of the label of each image."""

    prediction: np.ndarray
    """int64 (N,), the class with the highest score, the first of equal ones."""
    confidence: np.ndarray
    """float64 (N,), its probability."""
    nll: np.ndarray
    """float64 (N,), negative logarithm of the label's probability; nan without a label."""
    place: np.ndarray
    """int64 (N,), number of classes ranked before the label's, 0 if it is predicted; -1 without a label."""


def decide(logits: np.ndarray, label: np.ndarray, where: str) -> Decisions:
    """Predictions, probabilities and ranks of `logits` (N, C) for `label` (N,), -1 for none; computed in blocks.

    Raises UserError for scores that are not finite.
    """
    count, classes = logits.shape
    prediction, place = np.empty(count, dtype=np.int64), np.full(count, -1, dtype=np.int64)
    confidence, nll, finite = np.empty(count), np.full(count, np.nan), np.empty(count, dtype=bool)
    step = max(1, VALUES_AT_ONCE // classes)
    for at in range(0, count, step):
        part = slice(at, at + step)
        block = logits[part].astype(np.float64)
        finite[part] = np.isfinite(block).all(axis=1)
        if not finite[part].all():
            continue
        prediction[part] = block.argmax(axis=1)
        block -= block.max(axis=1, keepdims=True)
        total = np.exp(block).sum(axis=1)
        confidence[part] = 1 / total
        own = label[part]
        rows = np.flatnonzero(own >= 0)
        block, own = block[rows], own[rows, None]
        score = np.take_along_axis(block, own, axis=1)
        nll[at + rows] = np.log(total[rows]) - score[:, 0]
        before = (block > score) | ((block == score) & (np.arange(classes) < own))
        place[at + rows] = before.sum(axis=1)
    bad = np.flatnonzero(~finite)
    if len(bad):
        raise UserError(
            where,
            f"scores of {len(bad)} of {count} images are not finite, the first in row {bad[0]}",
            "finite numbers",
            "the network has diverged or its weights are damaged: lower the learning rate, or use other weights",
        )
    return Decisions(prediction, confidence, nll, place)


def difference(logits: np.ndarray) -> np.ndarray:
    """Score of class 1 minus that of class 0, float64 (N,), from (N, 2): the logit of the probability of class 1.

    It ranks like the probability, but keeps its resolution near 0 and 1.
    """
    return logits[:, 1].astype(np.float64) - logits[:, 0].astype(np.float64)


def confusion(label: np.ndarray, prediction: np.ndarray, classes: int) -> np.ndarray:
    """Confusion matrix, int64 (classes, classes): rows are labels, columns predictions."""
    return np.bincount(label * classes + prediction, minlength=classes * classes).reshape(classes, classes)


def per_class(counts: np.ndarray) -> dict[str, np.ndarray]:
    """Support, precision, recall and F1 of each class from a confusion matrix (C, C); nan for 0/0.

    That is the recall of a class that does not occur, the precision of one that is never predicted, and the F1 of one
    to which both apply.
    """
    hit, support, predicted = counts.diagonal(), counts.sum(axis=1), counts.sum(axis=0)
    with np.errstate(invalid="ignore"):
        return {
            "support": support,
            "precision": hit / predicted,
            "recall": hit / support,
            "f1": 2 * hit / (support + predicted),
        }


def calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """Expected calibration error: mean gap between confidence and accuracy in bins, weighted by their predictions.

    `confidence` (N,) is the probability of the predicted class, `right` (N,) bool is True where it is the label.
    """
    place = confidence_bin(confidence)
    count = np.bincount(place, minlength=BINS)
    held = np.flatnonzero(count)
    mean, accuracy = (
        np.bincount(place, weights=values, minlength=BINS)[held] / count[held] for values in (confidence, right)
    )
    return float(np.average(np.abs(accuracy - mean), weights=count[held]))


def confidence_bin(confidence: np.ndarray) -> np.ndarray:
    """Bin k holds k/15 < confidence <= (k+1)/15; the first one also holds 0."""
    return (np.searchsorted(np.arange(BINS + 1) / BINS, confidence, side="left") - 1).clip(min=0)


def chance_level(metric: str, trials: int, p: float) -> dict[str, float]:
    """Upper bound of chance of a metric: share of right guesses not exceeded in 999 of 1,000 cases; empty if it is 1.

    Binomial: `trials` independent guesses, each right with probability `p`.
    """
    from scipy.special import bdtr, bdtrik

    if trials < 1 or p >= 1:
        return {}
    enough = math.ceil(bdtrik(0.999, trials, p))
    if enough and bdtr(enough - 1, trials, p) >= 0.999:  # if the inverse was rounded up
        enough -= 1
    return {metric: enough / trials} if enough < trials else {}


def units(rows: Mapping[str, np.ndarray]) -> Units:
    """Resample groups, such as persons or videos, with all their images; without groups, images."""
    return Units.by(rows["group"], "groups") if "group" in rows else Units("images", np.arange(len(rows["label"])))


def resampled(rows: Mapping[str, np.ndarray], times: np.ndarray) -> dict[str, np.ndarray]:
    """The metrics of `score_classes`, (draws,) each, with row i of its table counted `times[:, i]` times.

    Means over classes are over those in a draw; nan if a draw has too few rows for a metric.
    """
    known = np.array([label is not None for label in rows["label"].tolist()])
    label, prediction = (rows[name][known].astype(str) for name in ("label", "prediction"))
    confidence, probability = (rows[name][known] for name in ("confidence", "probability"))
    times = times[:, known]
    right = label == prediction
    names, both = np.unique(np.concatenate([label, prediction]), return_inverse=True)
    own, taken = both[: len(label)], both[len(label) :]
    hit = significance.group_sums(times * right, own, len(names))
    support, predicted = (
        significance.group_sums(times, own, len(names)),
        significance.group_sums(times, taken, len(names)),
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        f1 = np.where(support > 0, 2 * hit / (support + predicted), np.nan)
        metrics = {
            "top1": significance.mean(right, times),
            "balanced_accuracy": significance.nan_mean(hit / support),
            "f1_macro": significance.nan_mean(f1),
            "nll": significance.mean(-np.log(probability), times),
        }
        gaps = significance.group_sums(times * (right - confidence), confidence_bin(confidence), BINS)
        metrics["ece"] = np.abs(gaps).sum(1) / times.sum(1)
        if "place" in rows:
            metrics["top5"] = significance.mean(rows["place"][known] < 5, times)
        if "score" in rows:
            score = rows["score"][known]
            metrics["accuracy"] = metrics["top1"]
            # The positive class: predicted with a score above 0.
            positive = (score > 0) == right
            found = times @ (positive & right)
            metrics["f1"] = 2 * found / (times @ positive + times @ (score > 0))
            metrics["auc"] = resampled_curve(score, positive, times).auc
    return metrics
