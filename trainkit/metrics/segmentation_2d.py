"""Metrics of semantic segmentation from pixel counts: one confusion matrix for a whole set, exact over processes.

Pixels are counted per image on the device, and metrics are computed from the sums. The intersection over union of a
class is that of all pixels of the set together (Everingham et al., IJCV 111, 2015), and a class that is neither in the
truth nor predicted is in no mean. Some public evaluations add 1 to the denominator to avoid 0, which slightly lowers
the score of small classes; this one does not. Pixels without a label count nowhere, whatever is predicted for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from trainkit.errors import UserError
from trainkit.evaluation_protocols import Scenes
from trainkit.interfaces import IGNORED, Columns, ImageSplit, Rows, Scores, Split
from trainkit.metrics import significance
from trainkit.metrics.boundary_f_score import COUNTS
from trainkit.metrics.segmentation_3d import metric_words
from trainkit.metrics.significance import Units, nan_mean, percentile_interval
from trainkit.metrics.verification import as_array, nan_to_none
from trainkit.tensors import torch

if TYPE_CHECKING:
    from torch import Tensor

WHOLE = 45
"""Number of classes up to which each image keeps its confusion matrix: 2,025 numbers."""
SIDE = 320
"""Longer side in pixels of a map that is kept for figures."""


def pixel_counts(predicted: Tensor, mask: Tensor, classes: int) -> Rows:
    """Numbers of pixels of each image, int64, where the tensors are.

    `predicted` (B, H, W) holds classes, `mask` (B, H, W) classes or IGNORED. `intersection`, `predicted` and `actual`
    (B, C) are the labelled pixels of each class that are right, predicted and true. Of up to 45 classes `confusion`
    (B, C * C) is how many of each true class (row) were predicted as each class (column). Numbers up to 16.7 million
    are exact in float32, in which the loop gathers them.
    """
    size = len(mask)
    own = torch.arange(size, device=mask.device)[:, None]
    truth, found, square = mask.reshape(size, -1).long(), predicted.reshape(size, -1).long(), classes * classes
    # Pixels without a label go to an extra last cell, which is dropped.
    cell = torch.where(truth < classes, own * square + truth * classes + found, size * square)
    counts = torch.bincount(cell.flatten(), minlength=size * square + 1)[:-1].view(size, classes, classes)
    rows = {"intersection": counts.diagonal(dim1=1, dim2=2), "predicted": counts.sum(1), "actual": counts.sum(2)}
    return rows | ({"confusion": counts.flatten(1)} if classes <= WHOLE else {})


def thumbnail_maps(predicted: Tensor, mask: Tensor, side: int = SIDE) -> Rows:
    """Small maps for figures: `seen_predicted` and `seen_truth`, uint8 (B, S, S), and `seen_shape` (B, 2).

    Maps (B, H, W) with a longer side above S are resized to S by nearest pixels. They are placed in the upper left
    corner of a square, with `seen_shape` their height and width, so that images of all sizes fit together; the rest is
    IGNORED.
    """
    height, width = mask.shape[1:]
    shrunk = min(1.0, side / max(height, width))
    shape = [max(1, round(length * shrunk)) for length in (height, width)]
    down, right = (
        ((torch.arange(new, device=mask.device) + 0.5) * (old / new)).long().clamp_max(old - 1)
        for new, old in zip(shape, (height, width), strict=True)
    )
    rows = {}
    for name, labels in (("seen_predicted", predicted), ("seen_truth", mask)):
        small = labels[:, down[:, None], right].to(torch.uint8)
        rows[name] = torch.nn.functional.pad(small, (0, side - shape[1], 0, side - shape[0]), value=IGNORED)
    return rows | {"seen_shape": torch.tensor(shape, device=mask.device).expand(len(mask), 2)}


def score_scenes(
    rows: Mapping[str, Tensor], protocol: Scenes, where: str = "scenes", split: Split | None = None
) -> Scores:
    """Compute the metrics of semantic segmentation.

    `rows` are those of `pixel_counts`; where boundaries are scored also those of
    `boundary_f_score.boundary_counts`; with kind `overlays` also those of `thumbnail_maps`. Metrics: miou (mean IoU
    of the classes that occur, in truth or prediction), pixel_accuracy, mean_accuracy (mean share of the pixels of a
    class that are found, over the classes of the truth), boundary_f (mean over classes of the means over the
    images in which the class has a boundary, in truth or prediction), miou_low and miou_high, between which lie
    95 % of the bootstrap's, fwiou (IoU of each class weighted by its pixels in the truth), images (how many have
    a label), iou.CLASS and boundary_f.CLASS. Table `per_class`; rows one an image; of up to 45 classes the confusion
    matrix.

    Of kind `overlays` the images `scenes`, and no metrics but miou, pixel_accuracy, boundary_f and images. `split`
    is then asked for its images.

    Raises UserError where no pixel has a label.
    """
    counts = {name: _column(rows, name, protocol) for name in ("intersection", "predicted", "actual")}
    hit, predicted, actual = counts.values()
    if not actual.any():
        raise UserError(
            where,
            f"no labelled pixel in any of {len(protocol)} masks",
            "class labels",
            "check that these are the masks of this set",
        )
    outlines = None
    if "edge_actual" in rows:
        outlines = _boundary_f(*(_column(rows, name, protocol) for name in COUNTS))
    metrics, per_class = _over_pictures(hit, predicted, actual, outlines, protocol)
    of_picture = _iou(hit, predicted, actual)
    picture = {
        "id": list(protocol.ids),
        "miou": nan_mean(of_picture),
        "pixel_accuracy": _share(hit.sum(1), actual.sum(1)),
    }
    columns: Columns = picture | counts
    if outlines is not None:
        picture["boundary_f"] = nan_mean(outlines)
        columns = picture | counts | {"boundary": outlines}  # of each class, as those before it
    tables = {"per_class": {name: nan_to_none(np.asarray(column)) for name, column in per_class.items()}}
    curves: Columns = {}
    if "confusion" in rows:
        classes = len(protocol.names)
        matrix = _rounded(rows["confusion"]).sum(0).reshape(classes, classes)
        curves["confusion"] = {"counts": matrix, "names": protocol.names}
    if protocol.kind == "scores":
        return Scores(metrics, columns, curves, tables=tables)
    if not isinstance(split, ImageSplit):
        raise ValueError("overlays need a split whose images can be shown")
    # For display: other evaluations report the classes on more images.
    metrics = {name: metrics[name] for name in ("miou", "pixel_accuracy", "boundary_f", "pictures") if name in metrics}
    pictures: Columns = {"scenes": _scenes(rows, picture | {"iou": of_picture}, protocol, split)}
    return Scores(metrics, columns, tables=tables, pictures=pictures)


def names(protocol: Scenes, boundaries: bool) -> tuple[str, ...]:
    """Return the metrics that the protocol may have."""
    means = ("miou", "pixel_accuracy", "pictures", *(["boundary_f"] if boundaries else []))
    if protocol.kind == "overlays":
        return means
    each = ("iou", *(["boundary_f"] if boundaries else []))
    interval = ("miou_low", "miou_high") if len(protocol) > 1 else ()
    words = metric_words(protocol.names)
    return (*means, "mean_accuracy", "fwiou", *interval, *(f"{name}.{word}" for name in each for word in words))


def _over_pictures(
    hit: np.ndarray, predicted: np.ndarray, actual: np.ndarray, outlines: np.ndarray | None, protocol: Scenes
) -> tuple[dict[str, float], Columns]:
    """Return the metrics of a set of images, and the table of its classes, from counts of pixels (N, C)."""
    called, many = metric_words(protocol.names), len(protocol)
    hits, found, pixels = (counts.sum(0) for counts in (hit, predicted, actual))
    iou, recall, share = _iou(hits, found, pixels), _share(hits, pixels), pixels / pixels.sum()
    metrics = {
        "miou": float(nan_mean(iou)),
        "pixel_accuracy": float(hits.sum() / pixels.sum()),
        "mean_accuracy": float(nan_mean(recall)),
    }
    of_class = None if outlines is None else nan_mean(outlines, 0)
    if of_class is not None:
        metrics["boundary_f"] = float(nan_mean(of_class))
    low, high = np.full((2, len(called)), np.nan)
    if many > 1:
        rows = {"intersection": hit, "predicted": predicted, "actual": actual}
        drawn = significance.resampled(Units("images", np.arange(many)), lambda times: resampled(rows, times))
        metrics["miou_low"], metrics["miou_high"] = percentile_interval(drawn["miou"], many)
        low, high = np.transpose([percentile_interval(values, many) for values in drawn["iou."].T])
    metrics["fwiou"] = float((np.where(pixels > 0, iou, 0) * pixels).sum() / pixels.sum())
    metrics["pictures"] = float((actual.sum(1) > 0).sum())
    metrics |= {f"iou.{word}": float(iou[k]) for k, word in enumerate(called)}
    table: Columns = {"class": list(protocol.names), "iou": iou, "iou_low": low, "iou_high": high}
    table |= {"recall": recall, "precision": _share(hits, found)}
    if of_class is not None:
        metrics |= {f"boundary_f.{word}": float(of_class[k]) for k, word in enumerate(called)}
        table["boundary_f"] = of_class
    table |= {"share": share, "pixels": pixels, "predicted_pixels": found, "pictures": (actual > 0).sum(0)}
    return {name: value for name, value in metrics.items() if value == value}, table


def _iou(hit: np.ndarray, predicted: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """Intersection over union; nan for a class that is neither in the truth nor predicted."""
    return _share(hit, predicted + actual - hit)


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return part / whole


def _boundary_f(found: np.ndarray, predicted: np.ndarray, met: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """F of each image and class (N, C): harmonic mean of the shares of both boundaries that the other has.

    0 where only one of the two has a boundary of the class, nan where neither has.
    """
    precision, recall = (
        np.where(n > 0, part / np.maximum(n, 1), 0.0) for part, n in ((found, predicted), (met, actual))
    )
    both = precision + recall
    score = 2 * precision * recall / np.where(both > 0, both, 1)
    return np.where(predicted + actual > 0, score, np.nan)


def units(rows: Mapping[str, np.ndarray]) -> Units:
    """Resample images."""
    return Units("images", np.arange(len(rows["id"])))


def resampled(rows: Mapping[str, np.ndarray], times: np.ndarray) -> dict[str, np.ndarray]:
    """miou, pixel_accuracy, mean_accuracy, fwiou and boundary_f of `score_scenes`, (draws,) each; those of classes too.

    `iou.` and `boundary_f.` are (draws, C): the rows do not name the classes.

    The pixels of image i count `times[:, i]` times. A class that is not in a draw is in none of its means.
    """
    hit, predicted, actual = (times @ rows[name].astype(np.float64) for name in ("intersection", "predicted", "actual"))
    iou, labelled = _iou(hit, predicted, actual), actual.sum(1)
    metrics = {
        "miou": significance.nan_mean(iou),
        "iou.": iou,
        "pixel_accuracy": _share(hit.sum(1), labelled),
        "mean_accuracy": significance.nan_mean(_share(hit, actual)),
        "fwiou": _share((np.where(actual > 0, iou, 0) * actual).sum(1), labelled),
    }
    if "boundary" in rows:
        metrics["boundary_f."] = significance.mean(rows["boundary"], times)
        metrics["boundary_f"] = significance.nan_mean(metrics["boundary_f."])
    return metrics


def _scenes(rows: Mapping[str, Tensor], picture: Columns, protocol: Scenes, split: ImageSplit) -> Columns:
    """Images with their maps, for `plots.scenes`."""
    from PIL import Image

    shapes = [tuple(shape) for shape in _rounded(rows["seen_shape"]).tolist()]
    maps = {name: as_array(rows[f"seen_{name}"]).astype(np.uint8) for name in ("truth", "predicted")}
    images = []
    for row, (height, width) in enumerate(shapes):
        pixels = split.picture(row)
        if pixels is None:
            raise ValueError(f"row {row} has no image")
        whole = Image.fromarray(np.ascontiguousarray(pixels))
        images.append(np.asarray(whole.resize((width, height), Image.Resampling.BOX)))
    return {
        "images": images,
        **{name: [m[:h, :w] for m, (h, w) in zip(small, shapes, strict=True)] for name, small in maps.items()},
        **{name: picture[name] for name in ("id", "miou", "pixel_accuracy", "iou")},
        "names": protocol.names,
        "colours": protocol.colours,
    }


def _rounded(values: Tensor) -> np.ndarray:
    return np.rint(as_array(values).astype(np.float64)).astype(np.int64)


def _column(rows: Mapping[str, Tensor], name: str, protocol: Scenes) -> np.ndarray:
    values = as_array(rows[name]).astype(np.float64)
    if values.shape != (len(protocol), len(protocol.names)):
        raise ValueError(f"{name} {values.shape}; expected {len(protocol)} rows of {len(protocol.names)} classes")
    return values
