"""Separation of classes in the space of the embeddings and, for two classes, in the scores of the classes.

Standard definitions; `fisher_legacy`, a distance over a squared distance, and the names are those of the monitoring of
an eye-state project. Plain NumPy in float64, whatever the type of the rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from trainkit import rng
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Separation
from trainkit.interfaces import Scores
from trainkit.metrics.classification import calibration_error, decide, difference, labels
from trainkit.metrics.verification import as_array, auc_chance_level, operating_points, refuse_nonfinite

if TYPE_CHECKING:
    from torch import Tensor

HISTOGRAM_BINS = 200
"""Bins of probability, 0 to 1, for the densities behind hellinger, js and bayes_error."""
COMPONENTS = 5
"""Principal components whose share of the variance is reported."""
CLASS_PAIRS = 20_000
"""Limit of class pairs for inter and bhattacharyya: with more than 200 classes, fixed random pairs are used."""
VALUES_AT_ONCE = 1_000_000
ROUNDING = 2.0**-46
"""Square of float32's relative error: a variance below this share of the mean square is rounding, and counts as 0."""


def score_separation(
    rows: Mapping[str, np.ndarray | Tensor], protocol: Separation, where: str = "separation set"
) -> Scores:
    """Measure the separation of the classes of a split.

    `rows` holds `embedding` (N, D), not normalised, or `logits` (N, C), or both; metrics that need a missing one
    are left out. Metrics of the logits: ece, as for classification, and for two classes those of `score_distance`.
    Metrics of the embeddings: those of `embedding_distance`. Images with label -1 count in no metric. Raises
    UserError if fewer than two classes occur, or a value is not finite.
    """
    label = check_separation(protocol, where)
    known = label >= 0
    metrics: dict[str, float] = {}
    chance: dict[str, float] = {}
    classes = np.array(protocol.names, dtype=object)
    table = {"row": np.flatnonzero(known), "label": classes[label[known]].tolist()}
    if "logits" in rows:
        logits = as_array(rows["logits"])
        if logits.shape != (len(label), len(classes)):
            raise ValueError(f"logits of {len(label)} images for {len(classes)} classes expected, got {logits.shape}")
        decided = decide(logits, label, where)
        metrics["ece"] = calibration_error(decided.confidence[known], decided.place[known] == 0)
        table["probability"] = np.exp(-decided.nll[known])
        if len(classes) == 2:
            positive, each = label[known] == 1, np.arange(len(label[known]))
            metrics |= score_distance(difference(logits[known]), positive)
            chance = auc_chance_level(each, each, positive)
    if "embedding" in rows:
        embedding = as_array(rows["embedding"])
        if embedding.ndim != 2 or len(embedding) != len(label):
            raise ValueError(f"embedding of {len(label)} images expected, got {embedding.shape}")
        refuse_nonfinite(np.sqrt(np.einsum("ij,ij->i", embedding, embedding, dtype=np.float64)), where)
        own = np.unique(label[known], return_inverse=True)[1]
        more, table["distance"] = embedding_distance(embedding[known], own)
        metrics |= more
    return Scores(metrics, table, chance=chance)


def names(protocol: Separation, rows: Collection[str], where: str) -> tuple[str, ...]:
    """Check the protocol, and return the metrics that it may have with these columns of rows."""
    check_separation(protocol, where)
    of_two = ("ks", "hellinger", "js", "margin", "bayes_error", "auc", "d_prime") if len(protocol.names) == 2 else ()
    of_space = ("intra", "inter", "fisher_legacy", "fisher", "bhattacharyya")
    energy = (f"pca_energy_{k}" for k in range(COMPONENTS))
    return (
        *(("ece", *of_two) if "logits" in rows else ()),
        *((*of_space, *energy) if "embedding" in rows else ()),
    )


def check_separation(protocol: Separation, where: str) -> np.ndarray:
    """Return the labels. Raises UserError if fewer than two classes occur."""
    label = labels(protocol, where)
    known = label[label >= 0]
    if len(present := np.unique(known)) < 2:
        one = f"are all of class {protocol.names[present[0]]!r}" if len(present) else "have no label"
        raise UserError(
            where,
            f"its {len(known) or len(label)} images {one}",
            "two classes or more",
            "add images of another class, or remove this evaluation",
        )
    return label


def score_distance(logit: np.ndarray, positive: np.ndarray) -> dict[str, float]:
    """Measure the separation of the scores of two classes.

    `logit` (N,) is the score of class 1 minus that of class 0; its sigmoid is the probability p of class 1. `positive`
    (N,) bool is True for label 1; both labels must occur.

    ks: largest gap between the two distribution functions, at all values that occur. hellinger: sqrt(1 - sum sqrt(P0
    P1)). js: Jensen-Shannon divergence (not its root, the distance) with logarithms to base 2, 0 to 1. margin: mean of
    |p - 0.5|. bayes_error: half the sum of min(P0, P1), the smallest error if both classes are equally likely. P0 and
    P1 are histograms of p that sum to 1 each; with few samples they overlap less than the true densities. auc: ties
    count half. d_prime: gap between the mean logits over the root of the mean of their (unbiased) variances, negative
    if class 0 has the higher scores; of logits because probabilities are far from normal. It is left out if a class has
    one sample or no class varies.
    """
    points = operating_points(logit[positive], logit[~positive])
    p = np.exp(-np.logaddexp(0, -logit))
    one, zero = (np.histogram(p[side], HISTOGRAM_BINS, (0, 1))[0] / side.sum() for side in (positive, ~positive))
    metrics = {
        "ks": float(np.abs(points.tar - points.far).max()),
        "hellinger": float(np.sqrt(max(0.0, 1 - np.sqrt(zero * one).sum()))),
        "js": float((_relative_entropy(zero, (zero + one) / 2) + _relative_entropy(one, (zero + one) / 2)) / 2),
        "margin": float(np.abs(p - 0.5).mean()),
        "bayes_error": float(np.minimum(zero, one).sum() / 2),
        "auc": float(points.auc),
    }
    if positive.sum() > 1 and (~positive).sum() > 1:
        spread = (logit[positive].var(ddof=1) + logit[~positive].var(ddof=1)) / 2
        if spread > ROUNDING * np.square(logit).mean():
            metrics["d_prime"] = float((logit[positive].mean() - logit[~positive].mean()) / np.sqrt(spread))
    return metrics


def _relative_entropy(p: np.ndarray, q: np.ndarray) -> float:
    """Kullback-Leibler divergence in bits; where p is 0 it adds nothing."""
    held = p > 0
    return float((p[held] * np.log2(p[held] / q[held])).sum())


def embedding_distance(embedding: np.ndarray, own: np.ndarray) -> tuple[dict[str, float], np.ndarray]:
    """Separation of classes in embedding space: metrics, and the distance of each sample to its class mean (N,).

    `embedding` is (N, D); `own` (N,) the class of each, 0 .. classes-1, every one of which occurs.

    intra: mean over classes of the mean squared distance to the class's mean. inter: distance between the means of two
    classes, mean over pairs of them. fisher: tr(S_b) / tr(S_w), variance between over variance within classes, samples
    counting equally; it does not change with the scale. fisher_legacy: inter / (intra + 1e-8), which does.
    bhattacharyya: between Gaussians with the classes' means and (unbiased) variances and no covariances, mean over
    pairs of classes with two samples or more. pca_energy_0 .. 4: shares of the first principal components in the
    variance.

    Left out: fisher if no class varies; bhattacharyya if it is infinite, because along some axis one class varies and
    another does not, or two differ and neither varies; pca_energy if all samples are equal.
    """
    order = np.argsort(own, kind="stable")
    count = np.bincount(own)
    start = np.cumsum(count) - count
    x = embedding[order].astype(np.float64)
    axis_floor = ROUNDING * np.square(x).mean(axis=0)
    floor = float(axis_floor.sum())
    x -= x.mean(axis=0)
    mean = np.add.reduceat(x, start) / count[:, None]
    gap = x - np.repeat(mean, count, axis=0)
    distance = np.empty(len(x))
    distance[order] = np.sqrt(np.einsum("ij,ij->i", gap, gap))
    np.square(gap, out=gap)
    scatter = np.add.reduceat(gap, start)
    within = float(scatter.sum() / len(x))
    between = float(count @ np.square(mean).sum(axis=1) / len(x))
    intra, inter = float((scatter.sum(axis=1) / count).mean()), mean_distance(mean)
    metrics = {"intra": intra, "inter": inter, "fisher_legacy": inter / (intra + 1e-8)}
    if within > floor:
        metrics["fisher"] = between / within
    many = np.flatnonzero(count > 1)
    if len(many) > 1:
        apart = bhattacharyya(mean[many], scatter[many] / (count[many] - 1)[:, None], axis_floor)
        if np.isfinite(apart):
            metrics["bhattacharyya"] = apart
    if within + between > floor:
        energy = principal_energy(x)
        metrics |= {f"pca_energy_{i}": float(share) for i, share in enumerate(energy)}
    return metrics, distance


def class_pairs(classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of different classes, int64: every pair once, or 20,000 fixed random ones if there are more."""
    if classes * (classes - 1) // 2 <= CLASS_PAIRS:
        return np.triu_indices(classes, 1)
    draw = np.random.Generator(np.random.Philox(key=rng.number(0, "class pairs")))
    first = draw.integers(0, classes, CLASS_PAIRS)
    return first, (first + draw.integers(1, classes, CLASS_PAIRS)) % classes


def mean_distance(mean: np.ndarray) -> float:
    """Mean Euclidean distance over pairs of the rows of `mean` (classes, D)."""
    first, second = class_pairs(len(mean))
    total, step = 0.0, max(1, VALUES_AT_ONCE // mean.shape[1])
    for at in range(0, len(first), step):
        gap = mean[first[at : at + step]] - mean[second[at : at + step]]
        total += float(np.sqrt(np.einsum("ij,ij->i", gap, gap)).sum())
    return total / len(first)


def bhattacharyya(mean: np.ndarray, variance: np.ndarray, floor: np.ndarray) -> float:
    """Mean Bhattacharyya distance over pairs of Gaussians, `mean` and `variance` (classes, D).

    1/4 sum log(1/4 (a/b + b/a + 2)) + 1/4 sum (m - n)^2 / (a + b) for variances a, b and means m, n. A variance up to
    `floor` (D,) counts as 0: an axis along which neither varies adds nothing where the means agree. Infinite when one
    has no variance along an axis and the other has, or neither has and their means differ.
    """
    variance = np.where(variance > floor, variance, 0)
    first, second = class_pairs(len(mean))
    total, step = 0.0, max(1, VALUES_AT_ONCE // mean.shape[1])
    for at in range(0, len(first), step):
        i, j = first[at : at + step], second[at : at + step]
        both, square = variance[i] + variance[j], np.square(mean[i] - mean[j])
        agree = (both == 0) & (square <= floor)
        with np.errstate(divide="ignore", invalid="ignore"):
            # a/b + b/a + 2 = (a + b)^2 / ab
            terms = np.log(np.square(both) / (4 * variance[i] * variance[j])) + square / both
        terms = np.where(both == 0, np.inf, terms)
        total += float(np.where(agree, 0, terms).sum()) / 4
    return total / len(first)


def principal_energy(centred: np.ndarray) -> np.ndarray:
    """Shares of the first five principal components in the variance of `centred` (N, D); fewer in fewer dimensions."""
    count, size = centred.shape
    # Both products have the same eigenvalues, save zeros: the smaller one is quicker.
    product = centred.T @ centred if size <= count else centred @ centred.T
    share = np.zeros(min(COMPONENTS, size))
    largest = np.linalg.eigvalsh(product)[::-1][: len(share)].clip(min=0)
    share[: len(largest)] = largest / np.trace(product)
    return share
