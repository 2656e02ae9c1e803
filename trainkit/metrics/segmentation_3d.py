"""Scores of segmented volumes: of an organ over the cases, of a case over its organs, with intervals and pictures.

What one case scores is in `trainkit.metrics.surface_distance`. An organ that a case has neither in truth nor in
prediction has no score there and is left out of that mean; `cases` in the table per class says how many counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from trainkit import rng
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Segmentation
from trainkit.interfaces import Scores
from trainkit.metrics import significance
from trainkit.metrics.significance import Units
from trainkit.metrics.surface_distance import SCORES
from trainkit.metrics.verification import as_array, or_none

RESAMPLES = 2000
SHOWN = 3
"""Cases shown of the worst, and as many of the best."""
_AROUND = 1.2
"""Side of a picture over the longer side of the box around the organs."""
_NARROWEST = 32
"""Side of a picture at least, in voxels along the axis of the finest spacing."""
_AT_ONCE = 1 << 22
_WAYS = {
    "dice": ("dice_mean", "dice"),
    "hd95_mm": ("hd95_mean_mm", "hd95_mm"),
    "nsd": ("nsd_mean", "nsd"),
    "iou": ("iou_mean", "iou"),
    "asd_mm": ("asd_mean_mm", "asd_mm"),
    "volume_error_mm3": ("volume_error_mean_mm3", "volume_error_mm3"),
}
"""Columns of the rows of whole cases, and the metrics that are their means: over all organs, and of each."""


def score_segmentation(rows: Mapping[str, Tensor], protocol: Segmentation, where: str = "volumes") -> Scores:
    """Score whole cases, or patches.

    Of whole cases `rows` are what `surfaces.case_scores` gives, each (N, C-1); with kind `overlays` also `planes`
    (N, 3, 3, S, S), see `planes`. Metrics: dice_mean, iou_mean, nsd_mean, hd95_mean_mm, asd_mean_mm and
    volume_error_mean_mm3 (absolute), each the mean over organs of the means over cases; dice_mean_low and
    dice_mean_high, between which lie 95 % of the bootstrap's; dice.ORGAN, iou.ORGAN, nsd.ORGAN, hd95_mm.ORGAN,
    asd_mm.ORGAN and volume_error_mm3.ORGAN; missed (organs that are there and of which no voxel is predicted, over all
    cases), invented (the other way round) and cases. An organ that no case has, in truth or prediction, has no metrics
    and is in no mean. Tables `per_class` and `per_case`; rows one a case; of
    `overlays` the pictures of the worst and best cases, and no metrics but dice_mean, missed, invented and cases.

    Of patches `rows` are `intersection`, `predicted` and `actual`, numbers of voxels (N, C-1).
    Metrics: dice_mean, iou_mean and dice.ORGAN of all patches taken together.

    Raises UserError where no truth has any organ.
    """
    if protocol.kind == "patches":
        return _score_patches(rows, protocol, where)
    columns = {name: _column(rows, name, protocol) for name in SCORES}
    _refuse_empty(columns["volume_truth"], where)
    organs = protocol.names[1:]
    called = words(organs)
    actual, predicted, counted = columns["volume_truth"] > 0, columns["volume_prediction"] > 0, columns["dice"]
    missed, invented = (actual & ~predicted).sum(0), (predicted & ~actual).sum(0)
    columns["volume_off"] = np.abs(columns["volume_error"])
    of_organ = {name: mean(values, 0) for name, values in columns.items()}
    ways = {
        "dice": ("dice_mean", "dice"),
        "hd95": ("hd95_mean_mm", "hd95_mm"),
        "nsd": ("nsd_mean", "nsd"),
        "iou": ("iou_mean", "iou"),
        "asd": ("asd_mean_mm", "asd_mm"),
        "volume_off": ("volume_error_mean_mm3", "volume_error_mm3"),
    }
    # A terminal shows the first six.
    metrics = {"dice_mean": float(mean(of_organ["dice"]))}
    low, high = np.full(len(organs), np.nan), np.full(len(organs), np.nan)
    if (patients := len(set(protocol.patients))) > 1:
        drawn, drawn_organ = bootstrap(columns["dice"], protocol.patients)
        metrics["dice_mean_low"], metrics["dice_mean_high"] = middle(drawn, patients)
        low, high = np.transpose([middle(values, patients) for values in drawn_organ.T])
    whole = {name: float(mean(of_organ[key])) for key, (name, _) in ways.items()}
    metrics |= {name: whole[name] for name in ("hd95_mean_mm", "nsd_mean")}
    metrics |= {"missed": float(missed.sum()), "invented": float(invented.sum())}
    metrics |= whole | {"cases": float(len(protocol))}
    for name, (_, each) in ways.items():
        metrics |= {f"{each}.{word}": float(of_organ[name][k]) for k, word in enumerate(called)}
    metrics = {name: value for name, value in metrics.items() if value == value}
    table = {
        "class": list(organs),
        "dice": of_organ["dice"],
        "dice_low": low,
        "dice_high": high,
        "hd95_mm": of_organ["hd95"],
        "nsd": of_organ["nsd"],
        "missed": missed,
        "invented": invented,
        "cases": (counted == counted).sum(0),
        "hd95_median_mm": [np.median(v[v == v]) if (v == v).any() else np.nan for v in columns["hd95"].T],
        "asd_mm": of_organ["asd"],
        "iou": of_organ["iou"],
        "volume_truth_mm3": of_organ["volume_truth"],
        "volume_prediction_mm3": of_organ["volume_prediction"],
        "volume_error_mm3": of_organ["volume_off"],
        "volume_bias_mm3": of_organ["volume_error"],
    }
    case = mean(columns["dice"], 1)
    cases: dict[str, Any] = {"id": list(protocol.ids), "patient": list(protocol.patients)}
    scored: dict[str, Any] = {"dice": case}
    units = {"hd95": "hd95_mm", "asd": "asd_mm"} | {name: f"{name}_mm3" for name in SCORES if name.startswith("volume")}
    for name in SCORES:
        scored |= {f"{units.get(name, name)}_{word}": columns[name][:, k] for k, word in enumerate(called)}
    for name, column in protocol.clinical.items():
        cases[f"clinical_{name}" if name in {**cases, **scored} else name] = _one_kind(column)
    tables = {"per_class": {name: or_none(np.asarray(c)) for name, c in table.items()}}
    if protocol.kind == "overlays":
        pictures = {"overlays": _overlays(as_array(rows["planes"]), columns["dice"], case, protocol)}
        # For looking at: what its few cases score organ by organ would only repeat what other evaluations say better.
        metrics = {name: metrics[name] for name in ("dice_mean", "missed", "invented", "cases")}
        return Scores(metrics, cases | scored, tables=tables, pictures=pictures)
    shown = {name: or_none(c) for name, c in scored.items() if name.startswith(("dice", "hd95"))}
    # The page shows the first few columns.
    return Scores(metrics, cases | scored, tables=tables | {"per_case": {"id": cases["id"]} | shown | cases})


def _score_patches(rows: Mapping[str, Tensor], protocol: Segmentation, where: str) -> Scores:
    hit, predicted, actual = (_column(rows, name, protocol) for name in ("intersection", "predicted", "actual"))
    _refuse_empty(actual, where)
    called = words(protocol.names[1:])
    with np.errstate(invalid="ignore"):
        dice = 2 * hit.sum(0) / (predicted.sum(0) + actual.sum(0))
        iou = hit.sum(0) / (predicted.sum(0) + actual.sum(0) - hit.sum(0))
        each = 2 * hit / (predicted + actual)
    metrics = {"dice_mean": float(mean(dice)), "iou_mean": float(mean(iou))}
    metrics |= {f"dice.{word}": float(dice[k]) for k, word in enumerate(called) if dice[k] == dice[k]}
    table = {"class": list(protocol.names[1:]), "dice": dice, "iou": iou, "voxels": actual.sum(0)}
    columns = {"id": list(protocol.ids), "patient": list(protocol.patients), "dice": mean(each, 1)}
    columns |= {f"dice_{word}": each[:, k] for k, word in enumerate(called)}
    tables = {"per_class": {name: or_none(np.asarray(c)) for name, c in table.items()}}
    return Scores(metrics, columns, tables=tables)


def mean(values: np.ndarray, axis: int | None = None) -> Any:
    """Mean of what is a number; nan where nothing is."""
    there = values == values
    with np.errstate(invalid="ignore"):
        return np.where(there, values, 0).sum(axis) / there.sum(axis)


def bootstrap(values: np.ndarray, groups: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Bootstrap the mean over organs, (2000,), and the mean of each organ, (2000, K), over patients.

    `values` (N, K) are scores of N cases, nan where there is none. Efron's bootstrap (Annals of Statistics 7, 1979):
    as many patients as there are (`groups`, N names) are drawn with replacement, with all their cases, for cases of one
    patient are alike. The draws depend on the number of patients alone, so two networks are compared on the same.
    """
    values = np.asarray(values, dtype=np.float64)
    of = np.unique(np.asarray(list(groups)), return_inverse=True)[1]
    people = int(of.max()) + 1
    there = values == values
    total, count = np.zeros((2, people, values.shape[1]))
    np.add.at(total, of, np.where(there, values, 0))
    np.add.at(count, of, there)
    draw = np.random.Generator(np.random.Philox(key=rng.number(0, "bootstrap")))
    organs = []
    step = max(1, _AT_ONCE // people)
    for start in range(0, RESAMPLES, step):
        some = min(step, RESAMPLES - start)
        drawn = draw.integers(people, size=(some, people)) + people * np.arange(some)[:, None]
        times = np.bincount(drawn.ravel(), minlength=some * people).reshape(some, people).astype(np.float64)
        with np.errstate(invalid="ignore"):
            organs.append(times @ total / (times @ count))
    organ = np.concatenate(organs)
    return mean(organ, 1), organ


def units(rows: Mapping[str, np.ndarray]) -> Units:
    """A patient is drawn with all their cases."""
    return Units.by(rows["patient"], "patients")


def resampled(rows: Mapping[str, np.ndarray], times: np.ndarray) -> dict[str, np.ndarray]:
    """Means of `score_segmentation` of whole cases, (draws,) each, where case i is there `times[:, i]` times."""
    called = [name.removeprefix("hd95_mm_") for name in rows if name.startswith("hd95_mm_")]
    metrics = {}
    for column, (whole, each) in _WAYS.items():
        values = np.stack([rows[f"{column}_{word}"] for word in called], 1).astype(np.float64)
        drawn = significance.mean(np.abs(values), times)
        metrics[whole] = significance.over(drawn)
        metrics |= {f"{each}.{word}": drawn[:, k] for k, word in enumerate(called)}
    return metrics


def interval(values: np.ndarray, groups: Sequence[str]) -> tuple[float, float]:
    """The ends of the 95 % interval, by `bootstrap`, of the mean over organs of (N, K); nan for a single patient."""
    patients = len(set(groups))
    return middle(bootstrap(values, groups)[0], patients) if patients > 1 else (float("nan"), float("nan"))


def middle(drawn: np.ndarray, units: int) -> tuple[float, float]:
    """The ends of the 95 % interval from draws of so many units, two at least; nan left out, nan where none is left.

    Percentiles, expanded for few units (`chance.tails`): plain ones hold the mean of 12 patients 91 times in 100.
    """
    drawn = drawn[drawn == drawn]
    return tuple(np.quantile(drawn, significance.tails(units)).tolist()) if len(drawn) else (float("nan"), float("nan"))


def words(names: Sequence[str]) -> list[str]:
    """The names of organs as metrics may bear them: lower case, `_` for what is not allowed, no two alike."""
    out: list[str] = []
    for number, name in enumerate(names, start=1):
        word = re.sub(r"[^a-z0-9_.-]+", "_", name.lower()).strip("_.-") or "label"
        out.append(word if word not in out and word != "label" else f"{word}_{number}")
    return out


def planes(
    image: np.ndarray,
    truth: np.ndarray,
    prediction: np.ndarray,
    spacing: ArrayLike,
    size: int = 224,
    axes: str = "zyx",
) -> np.ndarray:
    """Three planes through the organs, float32 (3, 3, size, size): axial, coronal, sagittal x image, truth, prediction.

    The arrays are volumes whose axes run as `axes` says, each in the direction of its growing coordinate (RAS+);
    `spacing` (3,) is in mm, of the truth; the image may have another number of voxels over the same extent. Each plane
    is that which cuts the largest shares of the organs, summed over them, so small ones count as much as large ones.
    Each is a square, a fifth wider than the organs are in it. Both choices look at the truth alone where it has an
    organ, so pictures of two steps can be compared. Superior or anterior is up, right or anterior on the left. Beyond
    the volume the image is at its lowest.
    """
    order = [(axes or "zyx").index(axis) for axis in "zyx"]
    image, truth, prediction = (np.asarray(array).transpose(order) for array in (image, truth, prediction))
    mm = np.asarray(spacing, dtype=np.float64)[order]
    extent = mm * truth.shape
    cut, first, last = _cuts(truth if truth.any() else prediction)
    middle, box = (first + last) / 2 * mm, (last - first) * mm
    # Downwards along both axes of the picture: up is superior or anterior, and the right is where readers of medical
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


def _overlays(drawn: np.ndarray, dice: np.ndarray, case: np.ndarray, protocol: Segmentation) -> dict[str, Any]:
    """The worst and the best cases, no case twice, those without any organ left out."""
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
    }


def _column(rows: Mapping[str, Tensor], name: str, protocol: Segmentation) -> np.ndarray:
    values = as_array(rows[name]).astype(np.float64)
    if values.shape != (len(protocol), len(protocol.names) - 1):
        raise ValueError(f"{name} {values.shape}; {len(protocol)} rows of {len(protocol.names) - 1} organs expected")
    return values


def _refuse_empty(actual: np.ndarray, where: str) -> None:
    if not (actual > 0).any():
        raise UserError(
            where, "no organ in any of its label maps", "labels above 0", "are these the label maps of this set?"
        )


def _one_kind(column: Sequence[Any]) -> Any:
    """A column that a table can hold: of numbers alone, float64 with nan for none; otherwise text."""
    if all(value is None or isinstance(value, int | float) for value in column):
        return np.array([np.nan if value is None else value for value in column], dtype=np.float64)
    return [None if value is None else str(value) for value in column]
