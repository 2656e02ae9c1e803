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

from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit import rng
from trainkit.evaluation_protocols import Inspection
from trainkit.interfaces import Columns, Scores, Split
from trainkit.metrics.classification import Decisions, confusion, decide, difference, labels
from trainkit.metrics.verification import as_array, normalised, operating_points

if TYPE_CHECKING:
    from torch import Tensor

HARD_MARGIN = 0.3
"""A sample is hard if its two most probable classes differ by less."""
NEIGHBOURS = 10
OUTLIER = 3.0
"""Standard deviations beyond which a sample is an outlier."""
MAPPED = 2000
"""Samples on the maps and in the projector; t-SNE takes 6 s or more for them on one core."""
SHOWN = 24
"""Samples on a sheet of images."""
THUMBNAIL = 32
"""Side of the small image kept with each mapped sample, in pixels."""
_PERPLEXITY = 30.0
_CHUNK = 512


def score_inspection(
    rows: dict[str, Tensor], protocol: Inspection, split: Split, where: str = "inspection set"
) -> Scores:
    """Inspect a labelled split through `rows`: `logits` (N, C) and `embedding` (N, D), ordered by index.

    Metrics: hard_share, mislabelled_share, outlier_share. Images: confusion, roc (two classes), pca, tsne (a
    stratified 2,000 samples at most) and the sheets hard, mislabelled, outliers, worst first. Rows: one per sample; for
    the mapped ones also the embedding and an image of at most 32 pixels (`thumbnail`, 32 * 32 * 3 bytes, on white).

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
    pictures = {"confusion": {"counts": confusion(label[known], prediction[known], len(names)), "names": names}}
    pictures |= {kind: found | shown for kind, found in _maps(embedding, unit, mapped).items()}
    if len(names) == 2 and len(np.unique(label[known])) == 2:
        gap = difference(logits)
        points = operating_points(gap[label == 1], gap[label == 0])
        pictures["roc"] = {**points.curve(), "auc": points.auc, "positive": names[1]}
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
    table = {
        **{name: columns[name].tolist() for name in ("id", "label", "prediction")},
        "confidence": decided.confidence,
        "probability": own,
        "margin": margin,
        "outlier_distance": distance,
        **flags,
        "embedding": _at(mapped, embedding[mapped].astype(np.float32), size),
        "thumbnail": _at(mapped, [t.tobytes() for t in _thumbnails(split, mapped)], size),
    }
    return Scores({f"{name}_share": float(flag.mean()) for name, flag in flags.items()}, table, pictures=pictures)


def _maps(embedding: np.ndarray, unit: np.ndarray, rows: np.ndarray) -> dict[str, Columns]:
    """Return the PCA and the t-SNE map of some rows of (N, D); `unit` has rows of length 1."""
    axes, share = principal_axes(embedding)
    pca = (embedding[rows] - embedding.mean(0)) @ axes
    return {"pca": {"points": pca, "share": share}, "tsne": {"points": tsne(unit[rows])}}


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
    for start in range(0, len(asked) if nearest else 0, _CHUNK):
        some = asked[start : start + _CHUNK]
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


def principal_axes(embedding: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two directions of greatest variance of (N, D), as columns (D, 2), and their shares of it (2,).

    The largest component of each is positive, so that maps of equal embeddings are equal. Missing directions are 0.
    """
    centred = np.asarray(embedding, dtype=np.float64)
    centred = centred - centred.mean(0)
    value, vector = np.linalg.eigh(centred.T @ centred / len(centred))
    value, vector = np.maximum(value[::-1], 0), vector[:, ::-1]
    axes, share = np.zeros((centred.shape[1], 2)), np.zeros(2)
    found = min(2, len(value))
    axes[:, :found] = vector[:, :found]
    share[:found] = value[:found] / max(value.sum(), 1e-300)
    sign = np.sign(axes[np.abs(axes).argmax(0), [0, 1]])
    return axes * np.where(sign == 0, 1, sign), share


def tsne(unit: np.ndarray) -> np.ndarray:
    """A t-SNE map (van der Maaten and Hinton, JMLR 2008) of vectors of length 1 (N, D), (N, 2): by cosine.

    On their 50 first principal axes; perplexity 30, or a third of a small set; always the same start. Zeros for fewer
    than 5 samples.
    """
    size = len(unit)
    if size < 5:
        return np.zeros((size, 2))
    from sklearn.manifold import TSNE

    unit = unit - unit.mean(0)
    vector = np.linalg.eigh(unit.T @ unit)[1][:, ::-1][:, :50]
    vector *= np.sign(vector[np.abs(vector).argmax(0), np.arange(vector.shape[1])])
    flat = unit @ vector
    # Not sklearn's initialisation: it divides by a standard deviation that is 0 if all samples are equal.
    start = np.zeros((size, 2))
    start[:, : min(2, flat.shape[1])] = flat[:, :2]
    spread = start[:, 0].std()
    start = start / spread * 1e-4 if spread > 1e-12 else start * 0
    start += 1e-6 * np.stack([rng.uniform(0, f"tsne {k}", 0, np.arange(size)) for k in (0, 1)], 1)
    # sklearn's 1,000 iterations take twice as long and gain little: of 2,000 samples in ten clusters 97.85 % had a
    # neighbour of their class on the map after 500, and 97.75 % after 1,000.
    init: Any = start.astype(np.float32)  # sklearn documents an array and infers a word
    perplexity = min(_PERPLEXITY, (size - 1) / 3)
    return TSNE(init=init, perplexity=perplexity, max_iter=500, random_state=0).fit_transform(flat)


def _images(split: Split, rows: np.ndarray) -> np.ndarray:
    if not len(rows):
        return np.zeros((0, 3, 1, 1), np.uint8)
    # (n, h, w, 3) for display, back to the order of batches.
    return to_uint8(split.fetch(rows, 0)["image"].cpu().numpy()).transpose(0, 3, 1, 2)


def _thumbnails(split: Split, rows: np.ndarray) -> np.ndarray:
    from PIL import Image

    out = np.full((len(rows), THUMBNAIL, THUMBNAIL, 3), 255, np.uint8)
    for start in range(0, len(rows), _CHUNK):
        for at, image in enumerate(_images(split, rows[start : start + _CHUNK]), start):
            small = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
            small.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)
            top, left = (THUMBNAIL - small.height) // 2, (THUMBNAIL - small.width) // 2
            out[at, top : top + small.height, left : left + small.width] = np.asarray(small)
    return out


def _at(rows: np.ndarray, values: Any, size: int) -> list[Any]:
    column: list[Any] = [None] * size
    for row, value in zip(rows, values, strict=True):
        column[row] = value
    return column


def to_uint8(images: np.ndarray) -> np.ndarray:
    """Images for display: (n, 3 or 1, h, w) of any number type -> (n, h, w, 3) uint8.

    Floats between 0 and 1 are scaled to 255. Other values (normalised images, integers wider than 8 bits) are
    stretched from the lowest to the highest value of each image.
    """
    images = np.asarray(images)
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"images of shape {images.shape}; expected (n, 3 or 1, h, w)")
    images = np.repeat(images, 3, axis=1) if images.shape[1] == 1 else images
    images = images.transpose(0, 2, 3, 1)
    if images.dtype == np.uint8:
        return images
    values = np.nan_to_num(images.astype(np.float32))
    low, high = values.min((1, 2, 3), keepdims=True), values.max((1, 2, 3), keepdims=True)
    plain = (low >= 0) & (high <= 1) & np.issubdtype(images.dtype, np.floating)
    low, high = np.where(plain, 0, low), np.where(plain, 1, high)
    return np.rint(255 * (values - low) / np.maximum(high - low, 1e-12)).astype(np.uint8)
