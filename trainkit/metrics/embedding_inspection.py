"""Maps of the embeddings, and sheets of samples that are hard, outliers or likely mislabelled.

Three lists, each by a rule that needs no tuning for a network's temperature or width:

- hard: the two most probable classes are less than 0.3 apart; for two classes that is |p - 0.5| < 0.15.
- likely mislabelled: not hard, predicted as another class at least as confidently as that class's own samples are on
  average (the rule of confident learning: Northcutt, Jiang, Chuang, JAIR 2021, arXiv 1911.00068), and most of the ten
  nearest other samples by cosine have that class as their label. In an overfitted set few are found.
- outliers: farther than 3 standard deviations from the mean of their own class. The distance is Mahalanobis's, under
  the covariance within classes, shrunk as Ledoit and Wolf do (J. Multivariate Analysis 88, 2004). Of a Gaussian class
  its square is distributed nearly as chi-square, with as many degrees of freedom as directions vary (Satterthwaite,
  Biometrics Bulletin 2, 1946); it is converted to standard deviations of a normal variable (Wilson and Hilferty, PNAS
  17, 1931). 1 in 740 Gaussian samples is beyond 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainkit import rng
from trainkit.evaluation_protocols import Inspection
from trainkit.interfaces import Columns, Scores, Split
from trainkit.metrics.classification import Decisions, decide, labels
from trainkit.metrics.verification import as_array, normalised

if TYPE_CHECKING:
    from torch import Tensor

METRICS = ("hard_share", "mislabelled_share", "outlier_share")
HARD_MARGIN = 0.3
"""A sample is hard if its two most probable classes differ by less."""
NEIGHBOURS = 10
OUTLIER = 3.0
"""Standard deviations beyond which a sample is an outlier."""
MAPPED = 2000
"""Samples on the maps, whose embeddings are kept; t-SNE takes 6 s or more for them on one core."""
SHOWN = 24
"""Samples on a sheet of images."""
AT_ONCE = 512
"""Samples that are compared with all others at a time."""


def score_inspection(
    rows: dict[str, Tensor], protocol: Inspection, split: Split, where: str = "inspection set"
) -> Scores:
    """Inspect a labelled split through `rows`: `logits` (N, C) and `embedding` (N, D), ordered by index.

    Metrics: hard_share, mislabelled_share, outlier_share. Images: pca, tsne (a stratified 2,000 samples at
    most) and the sheets hard, mislabelled, outliers, worst first. Rows: one per sample, for the mapped ones with the
    embedding.

    A sample with label -1 is on the maps and may be hard, but is in no other list. Raises UserError if a value is not
    finite, or a label is not a class.
    """
    logits, embedding = as_array(rows["logits"]), as_array(rows["embedding"]).astype(np.float64)
    label, names = labels(protocol, where), protocol.names
    size = len(label)
    if logits.shape != (size, len(names)) or embedding.shape[:-1] != (size,) or len(protocol.ids) != size:
        shapes = f"logits {logits.shape}, embedding {embedding.shape}, {len(protocol.ids)} ids, {len(names)} names"
        raise ValueError(f"{where}: {size} labels, {shapes}")
    unit, decided = normalised(embedding, where), decide(logits, label, where)
    prediction, known, own = decided.prediction, label >= 0, np.exp(-decided.nll)
    best_two = -np.partition(-logits.astype(np.float64), 1, axis=1)[:, :2]
    margin = decided.confidence * -np.expm1(best_two[:, 1] - best_two[:, 0])
    distance = np.full(size, np.nan)
    distance[known] = outlier_distance(embedding[known], label[known])
    flags = {
        "hard": margin < HARD_MARGIN,
        "mislabelled": likely_mislabelled(decided, label, unit) & (margin >= HARD_MARGIN),
        "outlier": distance > OUTLIER,
    }
    mapped = stratified(label, MAPPED)
    shown = {"label": label[mapped], "wrong": (known & (prediction != label))[mapped], "names": names, "total": size}
    points, share = principal_map(embedding)
    pictures: Columns = {
        "pca": {"points": points[mapped], "share": share, **shown},
        "tsne": {"points": tsne(unit[mapped]), **shown},
    }
    called = np.array([*names, None], dtype=object)  # the last one for -1
    columns = {
        "id": np.asarray(protocol.ids, dtype=object),
        "label": called[label],
        "prediction": called[prediction],
        "probability": decided.confidence,
        "distance": distance,
    }
    pictures["hard"] = _sheet(split, flags["hard"], margin, columns)
    pictures["mislabelled"] = _sheet(split, flags["mislabelled"], own, columns)
    pictures["outliers"] = _sheet(split, flags["outlier"], -distance, columns)
    kept: list[np.ndarray | None] = [None] * size
    for row in mapped:
        kept[row] = embedding[row].astype(np.float32)
    table = {
        **{name: columns[name].tolist() for name in ("id", "label", "prediction")},
        "confidence": decided.confidence,
        "probability": own,
        "margin": margin,
        "outlier_distance": distance,
        **flags,
        "embedding": kept,
    }
    return Scores({f"{name}_share": float(flag.mean()) for name, flag in flags.items()}, table, pictures=pictures)


def _sheet(split: Split, flag: np.ndarray, worst: np.ndarray, columns: dict[str, np.ndarray]) -> Columns:
    """Return images and columns of the samples with a flag, (N,), in the ascending order of `worst`."""
    chosen = np.flatnonzero(flag)
    first = chosen[np.argsort(worst[chosen], kind="stable")][:SHOWN]
    said = {
        name: column[first].tolist() if column.dtype == object else column[first] for name, column in columns.items()
    }
    return {"images": _images(split, first), **said, "found": len(chosen), "total": len(flag)}


def outlier_distance(embedding: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Distance of each of (N, D) from the mean of its class in standard deviations, float64 (N,); see the module.

    It is 0 for the only sample of a class.
    """
    from sklearn.covariance import ledoit_wolf_shrinkage

    centred = np.array(embedding, dtype=np.float64)
    for k in np.unique(label):
        centred[label == k] -= centred[label == k].mean(0)
    scale = np.sqrt((centred**2).mean()) if len(centred) else 0.0
    if not scale > 0:
        return np.zeros(len(centred))
    centred /= scale
    spread, axes = np.linalg.eigh(centred.T @ centred / len(centred))
    spread = np.maximum(spread, 0)
    part = ledoit_wolf_shrinkage(centred, assume_centered=True)
    shrunk = (1 - part) * spread + part * spread.mean()
    varies = shrunk > 1e-9 * shrunk[-1]
    spread, shrunk, axes = spread[varies], shrunk[varies], axes[:, varies]
    squared = ((centred @ axes) ** 2 / shrunk).sum(1)
    # Shrinking makes it a weighted sum of chi-squares, which has the mean and variance of one with fewer degrees.
    weight = spread / shrunk
    degrees = weight.sum() ** 2 / (weight**2).sum()
    return (np.cbrt(squared / weight.sum()) - (1 - 2 / (9 * degrees))) / np.sqrt(2 / (9 * degrees))


def likely_mislabelled(decided: Decisions, label: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """Find samples that are likely mislabelled, including hard ones: bool (N,); `unit` (N, D) has rows of length 1.

    No sample is assigned to a class without samples, because its usual confidence is unknown.
    """
    size, prediction = len(label), decided.prediction
    known = label >= 0
    classes = int(max(label.max(), prediction.max())) + 1
    support = np.bincount(label[known], minlength=classes)
    total = np.bincount(label[known], weights=np.exp(-decided.nll[known]), minlength=classes)
    usual = np.where(support > 0, total / np.maximum(support, 1), np.inf)
    asked = np.flatnonzero(known & (prediction != label) & (decided.confidence >= usual[prediction]))
    found = np.zeros(size, dtype=bool)
    nearest = min(NEIGHBOURS, size - 1)
    for start in range(0, len(asked) if nearest else 0, AT_ONCE):
        some = asked[start : start + AT_ONCE]
        likeness = unit[some] @ unit.T
        likeness[np.arange(len(some)), some] = -np.inf
        near = np.argpartition(-likeness, nearest - 1, axis=1)[:, :nearest]
        found[some] = (label[near] == prediction[some, None]).sum(1) > nearest / 2
    return found


def stratified(label: np.ndarray, most: int) -> np.ndarray:
    """Rows of at most `most` samples, ascending, stratified by class, with at least one per class if possible.

    The choice depends only on the labels, so that a map shows the same samples at every step.
    """
    label = np.asarray(label)
    drawn = rng.uniform(0, "inspection", 0, np.arange(len(label)))
    place = np.zeros(len(label))
    for k in np.unique(label):
        of = np.flatnonzero(label == k)
        place[of[np.argsort(drawn[of])]] = np.arange(len(of)) / len(of)
    return np.sort(np.lexsort((drawn, place))[:most])


def principal_map(embedding: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Place (N, D) along the two directions of greatest variance, (N, 2); and their shares of it, (2,).

    scikit-learn fixes the signs, so that maps of equal embeddings are equal. Missing directions are 0.
    """
    from sklearn.decomposition import PCA

    points, share = np.zeros((len(embedding), 2)), np.zeros(2)
    if np.ptp(embedding, axis=0).any():
        pca = PCA(min(2, *embedding.shape))
        found = pca.fit_transform(embedding)
        points[:, : found.shape[1]], share[: found.shape[1]] = found, pca.explained_variance_ratio_
    return points, share


def tsne(unit: np.ndarray) -> np.ndarray:
    """A t-SNE map (van der Maaten and Hinton, JMLR 2008) of vectors of length 1 (N, D), (N, 2): by cosine.

    On their 50 first principal axes; perplexity 30, or a third of a small set; always the same start. Zeros for fewer
    than 5 samples, and for samples that are all equal.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    size = len(unit)
    if size < 5 or np.ptp(unit, axis=0).max() < 1e-12:
        return np.zeros((size, 2))
    flat = PCA(min(50, *unit.shape), svd_solver="full").fit_transform(unit)
    start = "pca" if flat.shape[1] > 1 else "random"
    # sklearn's 1,000 iterations take twice as long and gain little: of 2,000 samples in ten clusters 97.85 % had a
    # neighbour of their class on the map after 500, and 97.75 % after 1,000.
    tsne = TSNE(init=start, perplexity=min(30.0, (size - 1) / 3), max_iter=500, random_state=0)
    return tsne.fit_transform(flat)


def _images(split: Split, rows: np.ndarray) -> np.ndarray:
    """Read samples for display: uint8 (n, h, w, 3)."""
    if not len(rows):
        return np.zeros((0, 1, 1, 3), np.uint8)
    return to_uint8(split.fetch(rows, 0)["image"].cpu().numpy())


def to_uint8(images: np.ndarray) -> np.ndarray:
    """Images for display: (n, 3 or 1, h, w) -> (n, h, w, 3) uint8; other types are stretched over each image."""
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"images of shape {images.shape}; expected (n, 3 or 1, h, w)")
    images = np.repeat(images, 3 // images.shape[1], axis=1).transpose(0, 2, 3, 1)
    if images.dtype == np.uint8:
        return images
    values = np.nan_to_num(images.astype(np.float32))
    low, high = values.min((1, 2, 3), keepdims=True), values.max((1, 2, 3), keepdims=True)
    return np.rint(255 * (values - low) / np.maximum(high - low, 1e-12)).astype(np.uint8)
