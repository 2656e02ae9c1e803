"""Metrics of 1:1 verification on pairs of images.

Ten-fold accuracy as Labeled Faces in the Wild defines it (Huang et al. 2007, view 2), with the thresholds that
FaceNet's evaluation made customary and that ArcFace, AdaFace and AdaDistill report; VAL at a FAR as in FaceNet (Schroff
et al. 2015, section 4). Plain NumPy in float64, whatever the type of the embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trainkit.errors import UserError
from trainkit.evaluation_protocols import Pairs
from trainkit.interfaces import Scores
from trainkit.metrics import significance
from trainkit.metrics.significance import Units
from trainkit.tensors import torch

if TYPE_CHECKING:
    from torch import Tensor

FOLDS = 10
ACCURACY_GRID = np.arange(0, 400) / 100
"""Squared distances tried for the accuracy: 0, 0.01, ... 3.99."""
VAL_GRID = np.arange(0, 4000) / 1000
"""Squared distances tried for VAL: 0, 0.001, ... 3.999."""
VAL_FAR = 1000
"""VAL is taken at a false accept rate of 1 in this many."""
CHUNK = 4096
Z_999 = 3.0902
"""99.9 % quantile of the standard normal distribution."""


def score_pairs(
    embedding: np.ndarray | Tensor,
    pairs: Pairs,
    norm: np.ndarray | Tensor | None = None,
    where: str = "verification set",
) -> Scores:
    """Compute the metrics of a list of pairs.

    `embedding` is (N, D), image and mirrored image summed, not normalised; `norm` is (N,), the mean norm of the two
    before they were summed. Metrics: accuracy, accuracy_std, threshold (mean of the folds', squared distance),
    val_at_far_1e-3 and its _std and _far (the rate reached on the held-out folds), auc, eer, tar_at_far_1e-1 .. 1e-4
    (the highest with a false accept rate no higher), xnorm. A rate with too few impostor pairs is left out. Raises
    UserError for fewer than 10 pairs, only one kind of pair, or an embedding that is not finite.
    """
    check_pairs(pairs, where)
    same = np.asarray(pairs.same, dtype=bool)
    distance = pair_distance(normalised(embedding, where), pairs.first, pairs.second)
    fold = contiguous_folds(len(pairs))
    accuracy, threshold = (found[0] for found in ten_fold(distance, same, fold, np.ones((1, len(pairs)))))
    points = operating_points(-distance[same], -distance[~same])
    metrics = {
        "accuracy": float(accuracy.mean()),
        "accuracy_std": float(accuracy.std()),
        "threshold": float(threshold.mean()),
        **val_at_far(distance, same, fold),
        "auc": float(points.auc),
        "eer": float(points.eer),
        **{f"tar_at_far_1e-{power}": float(points.tar_up_to(power)) for power in resolved(same, 4)},
    }
    if norm is not None:
        metrics["xnorm"] = float(as_array(norm).mean())
    table = {
        "pair": np.arange(len(pairs)),
        "first": np.asarray(pairs.first),
        "second": np.asarray(pairs.second),
        "same": same,
        "distance": distance,
        "fold": fold,
        "correct": (distance < threshold[fold]) == same,
    }
    return Scores(metrics, table, {"roc": points.curve()}, auc_chance_level(pairs.first, pairs.second, same))


def names(pairs: Pairs, where: str) -> tuple[str, ...]:
    """Check pairs, and return the metrics that they will have, except xnorm."""
    check_pairs(pairs, where)
    same = np.asarray(pairs.same, dtype=bool)
    val = ("val_at_far_1e-3", "val_at_far_1e-3_std", "val_at_far_1e-3_far")
    rates = (f"tar_at_far_1e-{power}" for power in resolved(same, 4))
    has_val = has_val_at_far(same, contiguous_folds(len(pairs)))
    return ("accuracy", "accuracy_std", "threshold", "auc", "eer", *rates, *(val if has_val else ()))


def check_pairs(pairs: Pairs, where: str) -> None:
    """Raise UserError for fewer than 10 pairs, or only one kind of pair."""
    if len(pairs) < FOLDS:
        raise UserError(where, f"{len(pairs)} pairs", f"at least {FOLDS}, one per fold", "add pairs")
    check_kinds(pairs.same, where)


def check_kinds(same: np.ndarray, where: str) -> None:
    """Raise UserError for only one kind of pair."""
    same = np.asarray(same, dtype=bool)
    if same.all() or not same.any():
        kind = "genuine" if same.any() else "impostor"
        found = f"all {len(same)} pairs are {kind} pairs" if len(same) else "no pairs"
        raise UserError(where, found, "genuine and impostor pairs", "add the missing kind: a threshold needs both")


def resolved(same: np.ndarray, most: int) -> range:
    """Powers up to `most` of the false accept rates 1e-1, 1e-2, ... for which there are enough impostor pairs."""
    impostors = int((~np.asarray(same, dtype=bool)).sum())
    return range(1, 1 + min(most, len(str(impostors)) - 1))


def auc_chance_level(first: np.ndarray, second: np.ndarray, same: np.ndarray) -> dict[str, float]:
    """Upper bound of chance for the AUC (999 of 1,000 guesses are below); empty if there are too few pairs.

    Normal approximation of the Mann-Whitney statistic. Pairs that share members are not independent, so of each kind at
    most as many are counted as there are members in it.
    """
    counts = []
    for kind in (same, ~same):
        members = len(np.unique(np.concatenate([first[kind], second[kind]])))
        counts.append(min(int(kind.sum()), members))
    m, n = counts
    bound = 0.5 + Z_999 * ((m + n + 1) / (12 * m * n)) ** 0.5
    return {"auc": bound} if bound < 1 else {}


def ten_fold(
    distance: np.ndarray, same: np.ndarray, fold: np.ndarray, times: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Ten times, choose a threshold on nine folds and evaluate it on the tenth: accuracies, thresholds (draws, 10).

    `distance` is the squared distance, (pairs,); pair i is there `times[:, i]` times in a draw and in its `fold`. The
    smallest of equally good thresholds is used. The accuracy of a fold without pairs is nan.
    """
    genuine, impostor = (_accepted(distance, times * kind, fold, ACCURACY_GRID) for kind in (same, ~same))
    correct = (genuine + impostor[:, :, -1:] - impostor)[:, :, :-1]
    best = (correct.sum(1, keepdims=True) - correct).argmax(2)  # argmax takes the first of equals
    right = np.take_along_axis(correct, best[:, :, None], 2)[:, :, 0]
    with np.errstate(invalid="ignore", divide="ignore"):
        return right / (genuine + impostor)[:, :, -1], ACCURACY_GRID[best]


def val_at_far(distance: np.ndarray, same: np.ndarray, fold: np.ndarray) -> dict[str, float]:
    """Share of genuine pairs accepted where nine folds accept 1 of 1000 impostor pairs; mean over folds.

    The threshold lies between the last grid point at which the false accept rate is no higher than asked and the next
    one, linearly. Published code uses scipy's `interp1d(kind="slinear")`, which did the same until it began to refuse
    repeated values. Empty if some nine folds have fewer than 1000 impostor pairs, or a fold has no genuine or no
    impostor pair: then no such rate exists.
    """
    if not has_val_at_far(same, fold):
        return {}
    different_in = np.bincount(fold[~same], minlength=FOLDS)
    train_different = different_in.sum() - different_in
    accepted = _accepted(distance, 1.0 - same[None], fold, VAL_GRID)[0, :, :-1]
    far = (accepted.sum(axis=0) - accepted) / train_different[:, None]
    val, met = np.empty(FOLDS), np.empty(FOLDS)
    for k in range(FOLDS):
        # A grid that never reaches the rate accepts no pair: the customary zero.
        threshold = np.interp(1 / VAL_FAR, far[k], VAL_GRID, right=0.0)
        held_out = distance[fold == k] < threshold
        val[k] = held_out[same[fold == k]].mean()
        met[k] = held_out[~same[fold == k]].mean()
    return {
        "val_at_far_1e-3": float(val.mean()),
        "val_at_far_1e-3_std": float(val.std()),
        "val_at_far_1e-3_far": float(met.mean()),
    }


def has_val_at_far(same: np.ndarray, fold: np.ndarray) -> bool:
    """Return whether any nine folds have 1000 impostor pairs or more, and each fold has both kinds of pairs."""
    same_in, different_in = (np.bincount(fold[kind], minlength=FOLDS) for kind in (same, ~same))
    return bool((different_in.sum() - different_in).min() >= VAL_FAR and same_in.all() and different_in.all())


def contiguous_folds(pairs: int) -> np.ndarray:
    """Fold of each pair, int64 (pairs,): ten contiguous blocks, the first ones longer by one if needed."""
    return np.repeat(np.arange(FOLDS), [len(part) for part in np.array_split(np.arange(pairs), FOLDS)])


def _accepted(distance: np.ndarray, times: np.ndarray, fold: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Count the pairs of each fold below each threshold, (draws, 10, grid + 1); the last threshold accepts all.

    `times` (draws, pairs) says how often a pair is counted.
    """
    place = fold * (len(grid) + 1) + np.searchsorted(grid, distance, side="right")
    counts = significance.group_sums(times, place, FOLDS * (len(grid) + 1))
    return counts.reshape(len(times), FOLDS, len(grid) + 1).cumsum(2)


@dataclass(frozen=True)
class Curve:
    """The exact ROC from accepting no row to accepting all, of a set of scores or of several draws of it."""

    threshold: np.ndarray
    """(points,), descending; accepted is what scores at least this. The first is +inf."""
    false_accepts: np.ndarray
    """(points,) or (draws, points), negative rows accepted, such as impostor pairs."""
    true_accepts: np.ndarray
    """(points,) or (draws, points), positive rows accepted, such as genuine pairs."""

    @property
    def far(self) -> np.ndarray:
        """False accept rate at each point; nan without negative rows."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.false_accepts / self.false_accepts[..., -1:]

    @property
    def tar(self) -> np.ndarray:
        """True accept rate at each point; nan without positive rows."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.true_accepts / self.true_accepts[..., -1:]

    @property
    def auc(self) -> np.ndarray:
        """Area under the ROC: probability that a positive row scores above a negative one, ties counting half."""
        steps = np.diff(self.false_accepts) * (self.true_accepts[..., 1:] + self.true_accepts[..., :-1])
        with np.errstate(invalid="ignore", divide="ignore"):
            return steps.sum(-1) / 2 / self.false_accepts[..., -1] / self.true_accepts[..., -1]

    @property
    def eer(self) -> np.ndarray:
        """Equal error rate: false accepts equal false rejects, with linear interpolation between points."""
        far = self.far
        over = far - (1 - self.tar)
        after = (over >= 0).argmax(-1, keepdims=True)
        far_before, below = (np.take_along_axis(values, after - 1, -1)[..., 0] for values in (far, -over))
        far_after, above = (np.take_along_axis(values, after, -1)[..., 0] for values in (far, over))
        with np.errstate(invalid="ignore", divide="ignore"):
            return far_before + below / (below + above) * (far_after - far_before)

    def tar_up_to(self, power: int) -> np.ndarray:
        """Highest true accept rate with a false accept rate of at most 10**-power; nan with too few negative rows."""
        negatives = self.false_accepts[..., -1:]
        last = (self.false_accepts <= negatives // 10**power).sum(-1, keepdims=True) - 1
        return np.where(negatives >= 10**power, np.take_along_axis(self.tar, last, -1), np.nan)[..., 0]

    def tar_nearest(self, power: int) -> float:
        """True accept rate at the false accept rate nearest to 10**-power, of a single set of scores.

        The larger rate if two are equally near, and the largest true accept rate at one false accept rate.
        """
        off = np.abs(self.false_accepts * 10**power - self.false_accepts[-1])  # whole numbers: a tie is a tie
        nearest = len(off) - 1 - int(np.argmin(off[::-1]))
        return float(self.true_accepts[nearest] / self.true_accepts[-1])

    def curve(self, levels: int = 1000) -> dict[str, np.ndarray]:
        """Rates of a single set for a figure: at most about `levels`, evenly spread over the logarithm of the rate."""
        negatives = int(self.false_accepts[-1])
        counts = np.unique(np.concatenate([[0], np.geomspace(1, negatives, levels).astype(np.int64), [negatives]]))
        at = np.unique(np.searchsorted(self.false_accepts, counts, side="right") - 1)
        at = at[at >= 0]
        return {"far": self.far[at], "tar": self.tar[at]}


def operating_points(genuine: np.ndarray, impostor: np.ndarray) -> Curve:
    """The ROC of two sets of scores, higher for genuine ones, one point per distinct score; both must have some."""
    if not len(genuine) or not len(impostor):
        raise ValueError(f"both kinds of pairs are needed, got {len(genuine)} genuine and {len(impostor)} impostor")
    genuine, impostor = np.sort(genuine), np.sort(impostor)
    threshold = np.unique(np.concatenate([genuine, impostor]))[::-1]
    accepts = (len(scores) - np.searchsorted(scores, threshold, side="left") for scores in (impostor, genuine))
    start = np.array([np.inf], dtype=threshold.dtype)
    return Curve(np.concatenate([start, threshold]), *(np.concatenate([[0], counts]) for counts in accepts))


def resampled_curve(score: np.ndarray, positive: np.ndarray, times: np.ndarray) -> Curve:
    """The ROC of `score` (rows,), higher for `positive` ones, in draws with row i counted `times[:, i]` times."""
    scores, place = np.unique(-score, return_inverse=True)
    sums = (significance.group_sums(times * kind, place, len(scores)).cumsum(1) for kind in (~positive, positive))
    return Curve(np.concatenate([[np.inf], -scores]), *(np.pad(each, ((0, 0), (1, 0))) for each in sums))


def pair_distance(unit: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Squared Euclidean distance of rows `first` and `second` of unit vectors (N, D), float64 (pairs,), 0 to 4."""
    out = np.empty(len(first))
    for at in range(0, len(first), CHUNK):
        part = slice(at, at + CHUNK)
        gap = unit[first[part]] - unit[second[part]]
        out[part] = np.einsum("ij,ij->i", gap, gap)
    return out


def normalised(embedding: np.ndarray | Tensor, where: str) -> np.ndarray:
    """Rows of length 1, float64 (N, D); a row of zeros stays zero. Raises UserError for a row that is not finite."""
    rows = as_array(embedding).astype(np.float64)
    if rows.ndim != 2:
        raise ValueError(f"embedding must be (N, D), got {rows.shape}")
    length = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    refuse_nonfinite(length, where)
    rows /= np.where(length > 0, length, 1)[:, None]
    return rows


def refuse_nonfinite(length: np.ndarray, where: str) -> None:
    """Raise UserError when a row's length (N,) is not a finite number."""
    bad = np.flatnonzero(~np.isfinite(length))
    if len(bad):
        raise UserError(
            where,
            f"embeddings of {len(bad)} of {len(length)} images are not finite, the first in row {bad[0]}",
            "finite numbers",
            "the network has diverged or its weights are damaged: lower the learning rate, or use other weights",
        )


def as_array(values: np.ndarray | Tensor) -> np.ndarray:
    """A NumPy view or copy on the host; half-precision tensors become float32, which NumPy can hold."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        return (values.float() if values.is_floating_point() and values.itemsize < 4 else values).numpy()
    return np.asarray(values)


def nan_to_none(column: np.ndarray) -> list:
    """A column of a table, with None instead of nan."""
    return [None if value != value else value for value in column.tolist()]


# ---- Resampling


def units(rows: Mapping[str, np.ndarray]) -> Units:
    """Resample persons with all their pairs; a pair of two persons belongs to both.

    Images that genuine pairs connect belong to one person.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    first, second, same = rows["first"], rows["second"], rows["same"].astype(bool)
    pictures = int(max(first.max(), second.max())) + 1
    links = coo_array((np.ones(int(same.sum())), (first[same], second[same])), shape=(pictures, pictures))
    person = connected_components(links, directed=False)[1]
    both = Units.by(np.concatenate([person[first], person[second]]), "people").of
    return Units("people", *np.split(both, 2))


def resampled(rows: Mapping[str, np.ndarray], times: np.ndarray) -> dict[str, np.ndarray]:
    """Accuracy, auc, eer and the rates of `score_pairs`, (draws,) each, with pair i counted `times[:, i]` times.

    A drawn pair stays in its fold; a fold without drawn pairs is in no mean. nan for a draw with one kind of pair.
    Thresholds of the accuracy are chosen again in each draw: of two equally good networks one was significantly better
    in 2 % of simulated sets of 300 pairs, and in 12 % with the thresholds of all pairs.
    """
    distance, same = rows["distance"].astype(np.float64), rows["same"].astype(bool)
    accuracy = significance.nan_mean(ten_fold(distance, same, rows["fold"], times)[0])
    curve = resampled_curve(-distance, same, times)
    rates = {f"tar_at_far_1e-{power}": curve.tar_up_to(power) for power in range(1, 5)}
    return {"accuracy": accuracy, "auc": curve.auc, "eer": curve.eer, **rates}
