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
    folds = ten_fold(distance, same)
    metrics = {
        "accuracy": float(folds.accuracy.mean()),
        "accuracy_std": float(folds.accuracy.std()),
        "threshold": float(folds.threshold.mean()),
        **val_at_far(distance, same, folds.fold),
    }
    points = operating_points(-distance[same], -distance[~same])
    metrics |= {"auc": points.auc, "eer": points.eer}
    for power in range(1, 5):
        tar = points.tar_up_to(power)
        if tar is not None:
            metrics[f"tar_at_far_1e-{power}"] = tar
    if norm is not None:
        metrics["xnorm"] = float(as_array(norm).mean())
    table = {
        "pair": np.arange(len(pairs)),
        "first": np.asarray(pairs.first),
        "second": np.asarray(pairs.second),
        "same": same,
        "distance": distance,
        "fold": folds.fold,
        "correct": (distance < folds.threshold[folds.fold]) == same,
    }
    curve = points.curve()
    curve["threshold"] = -curve["threshold"]
    return Scores(metrics, table, {"roc": curve}, auc_chance_level(pairs.first, pairs.second, same))


def check_pairs(pairs: Pairs, where: str) -> None:
    """Raise UserError for fewer than 10 pairs, or only one kind of pair."""
    if len(pairs) < FOLDS:
        raise UserError(where, f"{len(pairs)} pairs", f"at least {FOLDS}, one per fold", "add pairs")
    same = np.asarray(pairs.same, dtype=bool)
    if same.all() or not same.any():
        raise UserError(
            where,
            f"all {len(pairs)} pairs are {'genuine' if same.all() else 'impostor'} pairs",
            "genuine and impostor pairs",
            "add the missing kind: a threshold needs both",
        )


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


@dataclass(frozen=True)
class TenFold:
    """Outcome of the ten-fold protocol."""

    fold: np.ndarray
    """int64 (pairs,), the fold for which a pair is held out."""
    threshold: np.ndarray
    """float64 (10,), squared distance below which the held-out pairs of a fold are accepted."""
    accuracy: np.ndarray
    """float64 (10,)."""


def ten_fold(distance: np.ndarray, same: np.ndarray) -> TenFold:
    """Ten times, choose a threshold on nine folds and evaluate it on the tenth.

    `distance` is the squared distance, (pairs,). Folds are contiguous and in the order of the list; if their sizes
    cannot be equal, the first ones are larger by one. The smallest of equally good thresholds is used.
    """
    fold = contiguous_folds(len(distance))
    accepted_same = _accepted(distance, same, fold, ACCURACY_GRID)
    accepted_different = _accepted(distance, ~same, fold, ACCURACY_GRID)
    different = np.bincount(fold[~same], minlength=FOLDS)[:, None]
    correct = accepted_same + different - accepted_different
    best = (correct.sum(axis=0) - correct).argmax(axis=1)  # argmax takes the first of equals
    accuracy = correct[np.arange(FOLDS), best] / np.bincount(fold, minlength=FOLDS)
    return TenFold(fold, ACCURACY_GRID[best], accuracy)


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
    accepted = _accepted(distance, ~same, fold, VAL_GRID)
    far = (accepted.sum(axis=0) - accepted) / train_different[:, None]
    val, met = np.empty(FOLDS), np.empty(FOLDS)
    for k in range(FOLDS):
        threshold = _threshold_at(far[k], 1 / VAL_FAR)
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


def _threshold_at(far: np.ndarray, target: float) -> float:
    # A grid that never reaches the rate accepts no pair: the customary zero.
    if far[-1] < target:
        return 0.0
    below = int(np.searchsorted(far, target, side="right")) - 1  # never -1: nothing is below distance 0
    if below == len(far) - 1:
        return float(VAL_GRID[below])
    share = (target - far[below]) / (far[below + 1] - far[below])
    return float(VAL_GRID[below] + share * (VAL_GRID[below + 1] - VAL_GRID[below]))


def contiguous_folds(pairs: int) -> np.ndarray:
    """Fold of each pair, int64 (pairs,): ten contiguous blocks, the first ones longer by one if needed."""
    return np.repeat(np.arange(FOLDS), [len(part) for part in np.array_split(np.arange(pairs), FOLDS)])


def _accepted(distance: np.ndarray, which: np.ndarray, fold: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Number of chosen pairs with a distance below each grid point, int64 (10, grid)."""
    rows = [np.sort(distance[which & (fold == k)]) for k in range(FOLDS)]
    return np.stack([np.searchsorted(row, grid, side="left") for row in rows])


@dataclass(frozen=True)
class OperatingPoints:
    """Points of the ROC, from accepting no pair to accepting all. Higher scores mean the same identity."""

    threshold: np.ndarray
    """(points,), descending; accepted is what scores at least this. The first is +inf."""
    false_accepts: np.ndarray
    """int64 (points,), impostor pairs accepted."""
    true_accepts: np.ndarray
    """int64 (points,), genuine pairs accepted."""

    @property
    def far(self) -> np.ndarray:
        """False accept rate at each point."""
        return self.false_accepts / self.false_accepts[-1]

    @property
    def tar(self) -> np.ndarray:
        """True accept rate at each point."""
        return self.true_accepts / self.true_accepts[-1]

    @property
    def auc(self) -> float:
        """Area under the ROC: probability that a genuine pair scores above an impostor pair, ties counting half."""
        twice = np.dot(np.diff(self.false_accepts), (self.true_accepts[1:] + self.true_accepts[:-1]).astype(np.float64))
        return float(twice / 2 / self.false_accepts[-1] / self.true_accepts[-1])

    @property
    def eer(self) -> float:
        """Equal error rate: false accepts equal false rejects, with linear interpolation between points."""
        far, frr = self.far, 1 - self.tar
        after = int(np.argmax(far >= frr))
        gap_before, gap_after = (frr - far)[after - 1], (far - frr)[after]
        share = gap_before / (gap_before + gap_after)
        return float(far[after - 1] + share * (far[after] - far[after - 1]))

    def tar_up_to(self, power: int) -> float | None:
        """Highest true accept rate with a false accept rate of at most 10**-power; None with too few impostors."""
        impostors = int(self.false_accepts[-1])
        if impostors < 10**power:
            return None
        last = np.searchsorted(self.false_accepts, impostors // 10**power, side="right") - 1
        return float(self.true_accepts[last] / self.true_accepts[-1])

    def tar_nearest(self, power: int) -> float | None:
        """True accept rate at the false accept rate nearest to 10**-power; None with too few impostors.

        The larger rate if two are equally near, and the largest true accept rate at one false accept rate.
        """
        impostors = int(self.false_accepts[-1])
        if impostors < 10**power:
            return None
        off = np.abs(self.false_accepts * 10**power - impostors)  # whole numbers: a tie is a tie
        nearest = len(off) - 1 - int(np.argmin(off[::-1]))
        return float(self.true_accepts[nearest] / self.true_accepts[-1])

    def curve(self, levels: int = 1000) -> dict[str, np.ndarray]:
        """Points for a figure: at most about `levels`, evenly spread over the logarithm of the rate."""
        impostors = int(self.false_accepts[-1])
        counts = np.unique(np.concatenate([[0], np.geomspace(1, impostors, levels).astype(np.int64), [impostors]]))
        at = np.unique(np.searchsorted(self.false_accepts, counts, side="right") - 1)
        at = at[at >= 0]
        return {"far": self.far[at], "tar": self.tar[at], "threshold": self.threshold[at]}


def operating_points(genuine: np.ndarray, impostor: np.ndarray) -> OperatingPoints:
    """The exact ROC of two sets of scores, one point per distinct score; both need at least one score."""
    if not len(genuine) or not len(impostor):
        raise ValueError(f"both kinds of pairs are needed, got {len(genuine)} genuine and {len(impostor)} impostor")
    genuine, impostor = np.sort(genuine), np.sort(impostor)
    threshold = np.unique(np.concatenate([genuine, impostor]))[::-1]
    false_accepts = len(impostor) - np.searchsorted(impostor, threshold, side="left")
    true_accepts = len(genuine) - np.searchsorted(genuine, threshold, side="left")
    return OperatingPoints(
        np.concatenate([np.array([np.inf], dtype=threshold.dtype), threshold]),
        np.concatenate([[0], false_accepts]),
        np.concatenate([[0], true_accepts]),
    )


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


# ---- Resampling ------------------------------------------------------------------------------------------------------


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
    metrics = {"accuracy": _resampled_accuracy(distance, same, rows["fold"], times)}
    curve = Curve.of(-distance, same, times)
    metrics |= {"auc": curve.auc, "eer": curve.eer}
    return metrics | {f"tar_at_far_1e-{power}": curve.tar_up_to(power) for power in range(1, 5)}


def _resampled_accuracy(distance: np.ndarray, same: np.ndarray, fold: np.ndarray, times: np.ndarray) -> np.ndarray:
    grid = len(ACCURACY_GRID)
    # Index of the first threshold that accepts a pair; the last index stands for never.
    place = fold * (grid + 1) + np.searchsorted(ACCURACY_GRID, distance, side="right")
    accepted = []
    for kind in (same, ~same):
        counts = significance.group_sums(times * kind, place, FOLDS * (grid + 1))
        accepted.append(counts.reshape(len(times), FOLDS, grid + 1).cumsum(2))
    different, size = accepted[1][:, :, -1:], (accepted[0] + accepted[1])[:, :, -1]
    correct = (accepted[0] + different - accepted[1])[:, :, :-1]
    best = (correct.sum(1, keepdims=True) - correct).argmax(2)
    with np.errstate(invalid="ignore", divide="ignore"):
        return significance.nan_mean(np.take_along_axis(correct, best[:, :, None], 2)[:, :, 0] / size)


@dataclass(frozen=True)
class Curve:
    """The ROC of several draws of the same scores, from accepting no pair to accepting all."""

    false_accepts: np.ndarray
    """(draws, points), ascending; the first is 0."""
    true_accepts: np.ndarray
    """(draws, points)."""

    @classmethod
    def of(cls, score: np.ndarray, positive: np.ndarray, times: np.ndarray) -> Curve:
        """The curve of `score` (rows,), higher for `positive` ones, each there `times[:, i]` times in a draw."""
        place = np.unique(-score, return_inverse=True)[1].reshape(-1)
        sums = [
            significance.group_sums(times * kind, place, int(place.max()) + 1).cumsum(1)
            for kind in (~positive, positive)
        ]
        return cls(*(np.pad(each, ((0, 0), (1, 0))) for each in sums))

    @property
    def auc(self) -> np.ndarray:
        """Probability that a positive row scores above another, ties counting half, (draws,)."""
        steps = np.diff(self.false_accepts, axis=1) * (self.true_accepts[:, 1:] + self.true_accepts[:, :-1])
        with np.errstate(invalid="ignore", divide="ignore"):
            return steps.sum(1) / 2 / self.false_accepts[:, -1] / self.true_accepts[:, -1]

    @property
    def eer(self) -> np.ndarray:
        """Equal error rate with linear interpolation between points, (draws,)."""
        with np.errstate(invalid="ignore", divide="ignore"):
            far = self.false_accepts / self.false_accepts[:, -1:]
            over = far - (1 - self.true_accepts / self.true_accepts[:, -1:])
            after = (over >= 0).argmax(1)[:, None]
            before = after - 1
            far_before, far_after, below, above = (
                np.take_along_axis(values, at, 1)[:, 0]
                for values, at in ((far, before), (far, after), (-over, before), (over, after))
            )
            return far_before + below / (below + above) * (far_after - far_before)

    def tar_up_to(self, power: int) -> np.ndarray:
        """Highest true accept rate with a false accept rate of at most 10**-power, (draws,); nan with too few."""
        others = self.false_accepts[:, -1:]
        last = (self.false_accepts <= others // 10**power).sum(1, keepdims=True) - 1
        with np.errstate(invalid="ignore", divide="ignore"):
            rate = np.take_along_axis(self.true_accepts, last, 1) / self.true_accepts[:, -1:]
        return np.where(others >= 10**power, rate, np.nan)[:, 0]


def resampled_auc(score: np.ndarray, positive: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The AUC of `score` (rows,), (draws,), with row i counted `times[:, i]` times."""
    return Curve.of(score, positive, times).auc
