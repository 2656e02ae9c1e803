"""Metrics of segmented volumes: per organ over cases, per case over organs, with intervals and images.

The scores of one case are in `trainkit.metrics.surface_distance`. An organ that is in neither truth nor prediction of a
case has no score there and is left out of that mean; `cases` in the table per class is the number of cases that count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from trainkit.errors import UserError
from trainkit.evaluation_protocols import Segmentation
from trainkit.interfaces import Columns, Scores
from trainkit.metrics import significance
from trainkit.metrics.significance import Units, nan_mean, percentile_interval
from trainkit.metrics.surface_distance import SCORES, annotated
from trainkit.metrics.verification import as_array, nan_to_none

if TYPE_CHECKING:
    from torch import Tensor

SHOWN = 3
"""Number of worst cases, and of best cases, in the figure."""
_AROUND = 1.2
"""Side of an image over the longer side of the box around the organs."""
_NARROWEST = 32
"""Side of an image at least, in voxels along the axis of the finest spacing."""
METRICS = {
    "dice": ("dice_mean", "dice"),
    "hd95": ("hd95_mean_mm", "hd95_mm"),
    "nsd": ("nsd_mean", "nsd"),
    "iou": ("iou_mean", "iou"),
    "asd": ("asd_mean_mm", "asd_mm"),
    "volume_off": ("volume_error_mean_mm3", "volume_error_mm3"),
}
"""Scores of whole cases, and the metrics that are their means: over all organs, and per organ."""


def score_segmentation(rows: Mapping[str, Tensor], protocol: Segmentation, where: str = "volumes") -> Scores:
    """Compute the metrics of whole cases, or of patches.

    Of whole cases `rows` are what `surface_distance.case_scores` gives, each (N, C-1); with kind `overlays` also
    `planes` (N, 3, 3, S, S), see `planes`. Metrics: dice_mean, iou_mean, nsd_mean, hd95_mean_mm, asd_mean_mm and
    volume_error_mean_mm3 (absolute), each the mean over organs of the means over cases; dice_mean_low and
    dice_mean_high, between which lie 95 % of the bootstrap's; dice.ORGAN, iou.ORGAN, nsd.ORGAN, hd95_mm.ORGAN,
    asd_mm.ORGAN and volume_error_mm3.ORGAN; missed (organs in the truth of which no voxel is predicted, over all
    cases), invented (the reverse) and cases. An organ that no case has, in truth or prediction, has no
    metrics and is in no mean. Tables `per_class` and `per_case`; rows one a case; of `overlays` the images of the
    worst and best cases, and no metrics but dice_mean, missed, invented and cases.

    Of patches `rows` are `intersection`, `predicted` and `actual`, numbers of voxels (N, C-1).
    Metrics: dice_mean, iou_mean and dice.ORGAN of all patches taken together.

    Raises UserError if no truth has any organ.
    """
    if protocol.kind == "patches":
        return _score_patches(rows, protocol, where)
    columns = {name: _column(rows, name, protocol) for name in SCORES}
    _refuse_empty(columns["volume_truth"], where)
    columns["volume_off"] = np.abs(columns["volume_error"])
    metrics, per_class = _over_cases(columns, protocol)
    dice = nan_mean(columns["dice"])
    cases, scored = _each_case(columns, dice, protocol)
    tables = {"per_class": {name: nan_to_none(np.asarray(column)) for name, column in per_class.items()}}
    if protocol.kind == "overlays":
        pictures = {"overlays": _overlays(as_array(rows["planes"]), columns["dice"], dice, protocol)}
        # For display: other evaluations report the organs on more cases.
        metrics = {name: metrics[name] for name in ("dice_mean", "missed", "invented", "cases")}
        return Scores(metrics, cases | scored, tables=tables, pictures=pictures)
    shown = {name: nan_to_none(column) for name, column in scored.items() if name.startswith(("dice", "hd95"))}
    # The page shows the first few columns.
    return Scores(metrics, cases | scored, tables=tables | {"per_case": {"id": cases["id"]} | shown | cases})


def names(protocol: Segmentation) -> tuple[str, ...]:
    """Return the metrics that the protocol may have."""
    words = metric_words(protocol.names[1:])
    if protocol.kind == "patches":
        return ("dice_mean", "iou_mean", *(f"dice.{word}" for word in words))
    if protocol.kind == "overlays":
        return ("dice_mean", "missed", "invented", "cases")
    means, each = zip(*METRICS.values(), strict=True)
    interval = ("dice_mean_low", "dice_mean_high") if len(set(protocol.patients)) > 1 else ()
    return (*means, *interval, "missed", "invented", "cases", *(f"{name}.{word}" for name in each for word in words))


def _over_cases(columns: Mapping[str, np.ndarray], protocol: Segmentation) -> tuple[dict[str, float], Columns]:
    """Return the metrics of a set of cases, and the table of its organs, from scores (N, organs)."""
    organs, patients = protocol.names[1:], len(set(protocol.patients))
    actual, predicted = columns["volume_truth"] > 0, columns["volume_prediction"] > 0
    missed, invented = (actual & ~predicted).sum(0), (predicted & ~actual).sum(0)
    of_organ = {name: nan_mean(values, 0) for name, values in columns.items()}
    whole = {name: float(nan_mean(of_organ[key])) for key, (name, _) in METRICS.items()}
    # A terminal shows the first six.
    metrics = {"dice_mean": whole["dice_mean"]}
    low, high = np.full((2, len(organs)), np.nan)
    if patients > 1:
        drawn = significance.resampled(
            Units.by(protocol.patients, "patients"), lambda times: {"dice": significance.mean(columns["dice"], times)}
        )["dice"]
        metrics["dice_mean_low"], metrics["dice_mean_high"] = percentile_interval(nan_mean(drawn), patients)
        low, high = np.transpose([percentile_interval(values, patients) for values in drawn.T])
    metrics |= {name: whole[name] for name in ("hd95_mean_mm", "nsd_mean")}
    metrics |= {"missed": float(missed.sum()), "invented": float(invented.sum())}
    metrics |= whole | {"cases": float(len(protocol))}
    for name, (_, each) in METRICS.items():
        metrics |= {f"{each}.{word}": float(of_organ[name][k]) for k, word in enumerate(metric_words(organs))}
    hd95 = columns["hd95"]
    table = {
        "class": list(organs),
        "dice": of_organ["dice"],
        "dice_low": low,
        "dice_high": high,
        "hd95_mm": of_organ["hd95"],
        "nsd": of_organ["nsd"],
        "missed": missed,
        "invented": invented,
        "cases": np.isfinite(columns["dice"]).sum(0),
        "hd95_median_mm": [np.median(v[v == v]) if (v == v).any() else np.nan for v in hd95.T],
        "asd_mm": of_organ["asd"],
        "iou": of_organ["iou"],
        "volume_truth_mm3": of_organ["volume_truth"],
        "volume_prediction_mm3": of_organ["volume_prediction"],
        "volume_error_mm3": of_organ["volume_off"],
        "volume_bias_mm3": of_organ["volume_error"],
    }
    return {name: value for name, value in metrics.items() if value == value}, table


def _each_case(columns: Mapping[str, np.ndarray], dice: np.ndarray, protocol: Segmentation) -> tuple[Columns, Columns]:
    """Return columns of the row of each case: what it is, and what it scores."""
    cases: Columns = {"id": list(protocol.ids), "patient": list(protocol.patients)}
    scored: Columns = {"dice": dice}
    for name in SCORES:
        unit = "_mm3" if name.startswith("volume") else "_mm" if name in ("hd95", "asd") else ""
        scored |= {
            f"{name}{unit}_{word}": columns[name][:, k] for k, word in enumerate(metric_words(protocol.names[1:]))
        }
    return cases, scored


def _score_patches(rows: Mapping[str, Tensor], protocol: Segmentation, where: str) -> Scores:
    hit, predicted, actual = (_column(rows, name, protocol) for name in ("intersection", "predicted", "actual"))
    _refuse_empty(actual, where)
    called = metric_words(protocol.names[1:])
    with np.errstate(invalid="ignore"):
        dice = 2 * hit.sum(0) / (predicted.sum(0) + actual.sum(0))
        iou = hit.sum(0) / (predicted.sum(0) + actual.sum(0) - hit.sum(0))
        each = 2 * hit / (predicted + actual)
    metrics = {"dice_mean": float(nan_mean(dice)), "iou_mean": float(nan_mean(iou))}
    metrics |= {f"dice.{word}": float(dice[k]) for k, word in enumerate(called) if dice[k] == dice[k]}
    table = {"class": list(protocol.names[1:]), "dice": dice, "iou": iou, "voxels": actual.sum(0)}
    columns = {"id": list(protocol.ids), "patient": list(protocol.patients), "dice": nan_mean(each)}
    columns |= {f"dice_{word}": each[:, k] for k, word in enumerate(called)}
    tables = {"per_class": {name: nan_to_none(np.asarray(c)) for name, c in table.items()}}
    return Scores(metrics, columns, tables=tables)


def units(rows: Mapping[str, np.ndarray]) -> Units:
    """Resample patients with all their cases."""
    return Units.by(rows["patient"], "patients")


def resampled(rows: Mapping[str, np.ndarray], times: np.ndarray) -> dict[str, np.ndarray]:
    """Means of `score_segmentation` of whole cases, (draws,) each, with case i counted `times[:, i]` times."""
    called = [name.removeprefix("hd95_mm_") for name in rows if name.startswith("hd95_mm_")]
    metrics = {}
    for whole, each in METRICS.values():
        values = np.stack([rows[f"{each}_{word}"] for word in called], 1).astype(np.float64)
        drawn = significance.mean(np.abs(values), times)
        metrics[whole] = nan_mean(drawn)
        metrics |= {f"{each}.{word}": drawn[:, k] for k, word in enumerate(called)}
    return metrics


def metric_words(names: Sequence[str]) -> list[str]:
    """Names of organs for metric names: lower case, `_` for other characters, all different."""
    out: list[str] = []
    for number, name in enumerate(names, start=1):
        word = re.sub(r"[^a-z0-9_.-]+", "_", name.lower()).strip("_.-") or "label"
        out.append(word if word not in out and word != "label" else f"{word}_{number}")
    return out


def planes(
    image: np.ndarray, truth: np.ndarray, prediction: np.ndarray, spacing: ArrayLike, size: int = 224, axes: str = "zyx"
) -> np.ndarray:
    """Three planes through the organs, float32 (3, 3, size, size): axial, coronal, sagittal x image, truth, prediction.

    The arrays are volumes whose axes run as `axes` says, each in the direction of its growing coordinate (RAS+);
    `spacing` (3,) is in mm, of the truth; the image may have another number of voxels over the same extent. Each plane
    is that which cuts the largest shares of the organs, summed over them, so small ones count as much as large ones.
    Each is a square, a fifth wider than the organs are in it. Both choices look at the truth alone where it has an
    organ, so images of two steps can be compared. Voxels that are IGNORED are shown as background. Superior or anterior
    is up, right or anterior on the left. Beyond the volume the image is at its lowest.
    """
    order = [(axes or "zyx").index(axis) for axis in "zyx"]
    prediction, truth = annotated(np.asarray(prediction), np.asarray(truth))
    image, truth, prediction = (np.asarray(array).transpose(order) for array in (image, truth, prediction))
    mm = np.asarray(spacing, dtype=np.float64)[order]
    extent = mm * truth.shape
    cut, first, last = _cuts(truth if truth.any() else prediction)
    middle, box = (first + last) / 2 * mm, (last - first) * mm
    # Downwards along both axes of the image: up is superior or anterior, and the right is where readers of medical
    # images look for it, on the left.
    steps = 0.5 - (np.arange(size) + 0.5) / size
    out = np.zeros((3, 3, size, size), dtype=np.float32)
    for k in range(3):
        row, column = (axis for axis in range(3) if axis != k)
        side = max(_AROUND * max(box[row], box[column]), _NARROWEST * mm.min())
        side = min(side, max(extent[row], extent[column]))
        at = {
            k: (cut[k] + 0.5) * mm[k],
            row: middle[row] + side * steps[:, None],
            column: middle[column] + side * steps,
        }
        for kind, volume in enumerate((image, truth, prediction)):
            index = [np.floor(at[axis] / extent[axis] * volume.shape[axis]).astype(np.int64) for axis in range(3)]
            inside = np.ones((size, size), dtype=bool)
            for axis in (row, column):
                inside &= (index[axis] >= 0) & (index[axis] < volume.shape[axis])
                index[axis] = index[axis].clip(0, volume.shape[axis] - 1)
            out[k, kind] = np.where(inside, volume[tuple(index)], image.min() if kind == 0 else 0)
    return out


def _cuts(guide: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Along each axis the place that cuts most of the organs, the first place with one, and that after the last."""
    found = np.argwhere(guide)
    if not len(found):
        shape = np.array(guide.shape)
        return shape // 2, np.zeros(3, dtype=np.int64), shape
    first, last = found.min(0), found.max(0) + 1
    labels = guide[tuple(found.T)].astype(np.int64)
    share = 1 / np.bincount(labels)[labels]
    cut = [np.bincount(found[:, k], weights=share).argmax() for k in range(3)]
    return np.array(cut), first, last


def _overlays(drawn: np.ndarray, dice: np.ndarray, case: np.ndarray, protocol: Segmentation) -> Columns:
    """The worst and the best cases without repetition; cases without any organ are left out."""
    order = np.argsort(case, kind="stable")  # nan comes last
    order = order[: int((case == case).sum())]
    worst = order[: min(SHOWN, -(-len(order) // 2))]
    best = order[len(worst) :][::-1][:SHOWN]
    shown = np.concatenate([worst, best])
    return {
        "planes": drawn[shown],
        "id": [protocol.ids[k] for k in shown],
        "rank": ["worst"] * len(worst) + ["best"] * len(best),
        "dice": case[shown],
        "organ_dice": dice[shown],
        "names": list(protocol.names[1:]),
        "total": len(protocol),
        "shown": protocol.shown,
    }


def _column(rows: Mapping[str, Tensor], name: str, protocol: Segmentation) -> np.ndarray:
    values = as_array(rows[name]).astype(np.float64)
    if values.shape != (len(protocol), len(protocol.names) - 1):
        raise ValueError(f"{name} {values.shape}; expected {len(protocol)} rows of {len(protocol.names) - 1} organs")
    return values


def _refuse_empty(actual: np.ndarray, where: str) -> None:
    if not (actual > 0).any():
        raise UserError(
            where,
            "no organ in any label map",
            "labels above 0",
            "check that these are the label maps of this set",
        )
