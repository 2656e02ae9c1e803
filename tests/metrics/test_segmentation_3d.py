"""Means over organs and cases, their intervals, and the planes of the images, against loops and known shapes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow import csv, parquet

from trainkit.errors import UserError
from trainkit.evaluation_protocols import Segmentation
from trainkit.metrics import significance
from trainkit.metrics.segmentation_3d import metric_words, planes, score_segmentation
from trainkit.metrics.surface_distance import SCORES, case_scores
from trainkit.tracking.tracker import METRIC_NAME, _write_table

NAMES = ("background", "SR", "Optic nerve", "FAT")
NAN = float("nan")


def protocol(size: int, kind: str = "whole", patients=None) -> Segmentation:
    ids = tuple(f"case{k}" for k in range(size))
    return Segmentation(ids, tuple(patients or ids), NAMES, kind)


def rows(size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Scores of random predictions, float32 as they come from the loop: an organ missed, invented, in neither."""
    draw = np.random.default_rng(seed)
    out = []
    for k in range(size):
        truth = np.zeros((4, 8, 8), np.uint8)
        truth[1:3, 2:6, 2:5], truth[1:3, 2:6, 5:7], truth[3, 4:, :4] = 1, 2, 3
        prediction = np.where(draw.random(truth.shape) < 0.8, truth, draw.integers(0, 4, truth.shape)).astype(np.uint8)
        if k == 0:
            prediction[prediction == 2] = 0
        if k == 1:
            truth[truth == 3] = 0
            prediction[0, 0, 0] = 3
        if k == 2:
            truth[truth == 1] = 0
            prediction[prediction == 1] = 0
        out.append(case_scores(prediction, truth, (3.0, 0.5, 0.5), 4, [1.0] * 3))
    return {name: torch.tensor(np.stack([scores[name] for scores in out])).float() for name in SCORES}


def mean_by_hand(values: torch.Tensor) -> float:
    """Over organs, of the means over the cases that have a number."""
    organs = []
    for column in values.T.tolist():
        there = [value for value in column if value == value]
        if there:
            organs.append(sum(there) / len(there))
    return sum(organs) / len(organs)


def test_means_are_over_organs_of_means_over_cases_that_count():
    found = rows(7)
    assert found["dice"].isnan().sum() == 1
    scores = score_segmentation(found, protocol(7))
    got = scores.metrics
    for name, row in {"dice_mean": "dice", "iou_mean": "iou", "nsd_mean": "nsd", "hd95_mean_mm": "hd95",
                      "asd_mean_mm": "asd"}.items():  # fmt: skip
        assert got[name] == pytest.approx(mean_by_hand(found[row]), rel=1e-12), name
    assert got["volume_error_mean_mm3"] == pytest.approx(mean_by_hand(found["volume_error"].abs()))
    assert got["dice_mean"] != pytest.approx(float(found["dice"].nanmean()))  # not the mean of all numbers together
    assert got["missed"] == 1 and got["invented"] == 1 and got["cases"] == 7
    second = found["dice"][:, 1].double()
    assert second[0] == 0 and got["dice.optic_nerve"] == pytest.approx(float(second.mean()))
    first = found["hd95"][:, 0].double()
    assert got["hd95_mm.sr"] == pytest.approx(float(first[first == first].mean())) and first[2].isnan()
    assert got["dice_mean_low"] < got["dice_mean"] < got["dice_mean_high"]


def test_an_organ_without_any_score_has_no_metrics_and_is_in_no_mean():
    found = rows(5)
    for name, values in found.items():
        values[:, 1] = 0 if name in ("volume_truth", "volume_prediction") else NAN
    scores = score_segmentation(found, protocol(5))
    assert not [name for name in scores.metrics if name.endswith("optic_nerve")]
    assert scores.metrics["dice_mean"] == pytest.approx(mean_by_hand(found["dice"][:, [0, 2]]))
    assert all(math.isfinite(value) for value in scores.metrics.values())
    table = scores.tables["per_class"]
    assert table["cases"][1] == 0 and table["dice"][1] is None and table["hd95_median_mm"][1] is None


def test_labels_that_are_all_background_are_named():
    found = rows(3)
    found["volume_truth"][:] = 0
    with pytest.raises(UserError, match="val: no organ in any label map"):
        score_segmentation(found, protocol(3), "val")
    counts = {name: torch.zeros(3, 3) for name in ("intersection", "predicted", "actual")}
    with pytest.raises(UserError, match="no organ"):
        score_segmentation(counts, protocol(3, "patches"), "val.patches")


def test_rows_that_are_not_the_sets_are_refused():
    with pytest.raises(ValueError, match="4 rows of 3 organs"):
        score_segmentation(rows(3), protocol(4))


def test_the_table_of_classes_says_what_each_organ_scored():
    found = rows(6)
    table = score_segmentation(found, protocol(6)).tables["per_class"]
    assert table["class"] == list(NAMES[1:])
    assert table["cases"] == [5, 6, 6] and table["missed"] == [0, 1, 0] and table["invented"] == [0, 0, 1]
    for organ in range(3):
        volumes = [float(v) for v in found["volume_truth"][:, organ]]
        assert table["volume_truth_mm3"][organ] == pytest.approx(sum(volumes) / 6)
        error = [float(v) for v in found["volume_error"][:, organ] if v == v]
        assert table["volume_bias_mm3"][organ] == pytest.approx(sum(error) / len(error))
        assert table["volume_error_mm3"][organ] == pytest.approx(sum(map(abs, error)) / len(error))
        far = sorted(float(v) for v in found["hd95"][:, organ] if v == v)
        assert min(far) <= table["hd95_median_mm"][organ] <= max(far)
        assert sum(v <= table["hd95_median_mm"][organ] for v in far) >= len(far) / 2
        assert table["dice_low"][organ] <= table["dice"][organ] <= table["dice_high"][organ]


def test_each_case_has_its_row(tmp_path: Path):
    found = rows(4)
    scores = score_segmentation(found, protocol(4, patients=("a", "a", "b", "c")))
    _write_table(tmp_path / "rows.parquet", scores.rows)
    table = parquet.read_table(tmp_path / "rows.parquet").to_pydict()
    assert table["id"] == ["case0", "case1", "case2", "case3"] and table["patient"] == ["a", "a", "b", "c"]
    for case in range(4):
        organs = [v for v in found["dice"][case].tolist() if v == v]
        assert table["dice"][case] == pytest.approx(sum(organs) / len(organs))
        for name, column in {"dice": "dice_optic_nerve", "hd95": "hd95_mm_optic_nerve", "nsd": "nsd_optic_nerve",
                             "volume_error": "volume_error_mm3_optic_nerve"}.items():  # fmt: skip
            assert table[column][case] == pytest.approx(found[name][case, 1].item())
    _write_table(tmp_path / "per_class.csv", scores.tables["per_class"])
    assert csv.read_csv(tmp_path / "per_class.csv").column("class").to_pylist() == list(NAMES[1:])


def test_an_evaluation_for_pictures_gives_few_metrics():
    found = rows(4) | {"planes": torch.zeros(4, 3, 3, 8, 8)}
    whole, shown = (score_segmentation(found, protocol(4, kind)) for kind in ("whole", "overlays"))
    assert set(shown.metrics) == {"dice_mean", "missed", "invented", "cases"} and "overlays" in shown.pictures
    assert all(whole.metrics[name] == value for name, value in shown.metrics.items())


def test_patches_are_scored_all_together():
    draw = np.random.default_rng(0)
    predicted, actual = draw.integers(0, 4, (2, 5, 60))
    predicted[predicted == 2], actual[actual == 2] = 0, 0  # an organ that is nowhere
    both = list(zip(predicted, actual, strict=True))
    counts = {
        "intersection": [[((p == c) & (t == c)).sum() for c in (1, 2, 3)] for p, t in both],
        "predicted": [[(p == c).sum() for c in (1, 2, 3)] for p in predicted],
        "actual": [[(t == c).sum() for c in (1, 2, 3)] for t in actual],
    }
    found = {name: torch.tensor(np.array(value), dtype=torch.float32) for name, value in counts.items()}
    scores = score_segmentation(found, protocol(5, "patches"))

    def pooled(c: int) -> tuple[float, float]:
        hit = ((predicted == c) & (actual == c)).sum()
        return 2 * hit / ((predicted == c).sum() + (actual == c).sum()), hit / ((predicted == c) | (actual == c)).sum()

    assert scores.metrics == pytest.approx({
        "dice_mean": (pooled(1)[0] + pooled(3)[0]) / 2,
        "iou_mean": (pooled(1)[1] + pooled(3)[1]) / 2,
        "dice.sr": pooled(1)[0],
        "dice.fat": pooled(3)[0],
    })  # fmt: skip
    assert scores.tables["per_class"]["dice"][1] is None
    assert len(scores.rows["dice"]) == 5 and np.isnan(scores.rows["dice_optic_nerve"]).all()


def test_names_of_organs_become_words_that_differ():
    names = ["SR", "Optic nerve", "optic-nerve", "OPTIC NERVE", "Muskel (li.)", "眼", "sr"]
    found = metric_words(names)
    assert found == ["sr", "optic_nerve", "optic-nerve", "optic_nerve_4", "muskel_li", "label_6", "sr_7"]
    assert all(METRIC_NAME.fullmatch(f"val/dice.{word}") for word in found) and len(set(found)) == len(names)


# Intervals


def interval(values: np.ndarray, patients) -> tuple[float, float]:
    """Of the mean Dice of cases (N, 3)."""
    found = rows(len(values)) | {"dice": torch.tensor(values)}
    metrics = score_segmentation(found, protocol(len(values), patients=patients)).metrics
    return metrics["dice_mean_low"], metrics["dice_mean_high"]


def test_the_interval_is_that_of_drawing_case_by_case():
    draw = np.random.default_rng(2)
    values = draw.random((6, 3))
    values[draw.random((6, 3)) < 0.3] = NAN
    values[:, 2] = [NAN, 0.5, NAN, NAN, NAN, NAN]  # in some draws no case has this organ
    by_hand = []
    for _ in range(4000):
        some = values[draw.integers(6, size=6)]
        each = [column[column == column].mean() for column in some.T if (column == column).any()]
        by_hand.append(np.mean(each))
    # The same distribution, not the same draws.
    expected = np.quantile(by_hand, significance.tail_probabilities(6))
    assert interval(values, "abcdef") == pytest.approx(tuple(expected), abs=0.05)


def test_it_is_patients_who_are_drawn_not_their_cases():
    values = np.random.default_rng(3).random((8, 3))
    once = interval(values, "abcdefgh")
    thrice = interval(values.repeat(3, 0), [c for c in "abcdefgh" for _ in range(3)])
    assert once == pytest.approx(thrice)
    apart = interval(values.repeat(3, 0), [str(k) for k in range(24)])
    assert apart[1] - apart[0] < 0.8 * (once[1] - once[0])


def test_one_patient_has_no_interval():
    found = score_segmentation(rows(3), protocol(3, patients="aaa"))
    assert "dice_mean_low" not in found.metrics and found.tables["per_class"]["dice_low"] == [None] * 3


# Images


@pytest.mark.parametrize(("size", "worst", "best"), [(9, 3, 3), (6, 3, 3), (5, 3, 2), (2, 1, 1), (1, 1, 0)])
def test_the_worst_and_the_best_cases_are_shown_once(size, worst, best):
    found = rows(size)
    draw = np.random.default_rng(size)
    found["dice"] = torch.tensor(draw.random((size, 3)), dtype=torch.float32)
    found["planes"] = torch.arange(size).float()[:, None, None, None, None].expand(size, 3, 3, 2, 2)
    shown = score_segmentation(found, protocol(size, "overlays")).pictures["overlays"]
    order = sorted(range(size), key=lambda k: found["dice"][k].mean().item())
    expected = order[:worst] + order[::-1][:best]
    assert shown["id"] == [f"case{k}" for k in expected]
    assert shown["rank"] == ["worst"] * worst + ["best"] * best
    assert shown["planes"][:, 0, 0, 0, 0].tolist() == expected and shown["total"] == size
    np.testing.assert_allclose(shown["organ_dice"], found["dice"][expected])


def test_a_case_without_organs_is_not_shown():
    found = rows(4)
    found["dice"][1] = NAN
    found["planes"] = torch.zeros(4, 3, 3, 2, 2)
    shown = score_segmentation(found, protocol(4, "overlays")).pictures["overlays"]
    assert "case1" not in shown["id"] and len(shown["id"]) == 3


def marked() -> tuple[np.ndarray, np.ndarray]:
    """A volume (z, y, x) with one organ in its middle, brighter towards superior, anterior and right."""
    z, y, x = np.meshgrid(*(np.arange(n) for n in (20, 24, 28)), indexing="ij")
    truth = np.zeros((20, 24, 28), np.uint8)
    truth[8:13, 9:16, 10:19] = 1
    return (100 * z + 10 * y + x).astype(np.float32), truth


def test_planes_are_turned_as_medical_images_are():
    image, truth = marked()
    shown = planes(image, truth, truth, (1, 1, 1), size=60)
    axial, coronal, sagittal = shown[:, 0]
    inside = slice(25, 35)
    # 32 voxels are the least that a side shows, and the longer side of the volume the most.
    for plane, up, left, side in ((axial, 10, 1, 28), (coronal, 100, 1, 28), (sagittal, 100, 10, 24)):
        down, across = plane[inside, inside].mean(1), plane[inside, inside].mean(0)
        at = np.arange(60)[inside]
        assert np.polyfit(at, down, 1)[0] == pytest.approx(-up * side / 60, rel=0.25)
        assert np.polyfit(at, across, 1)[0] == pytest.approx(-left * side / 60, rel=0.25)


@pytest.mark.parametrize("axes", ["zyx", "yzx", "xzy", "xyz"])
def test_planes_are_the_same_however_the_volume_is_stored(axes):
    image, truth = marked()
    prediction = np.roll(truth, 2, 2)
    spacing = np.array((3.0, 0.5, 0.75))
    expected = planes(image, truth, prediction, spacing, size=40)
    order = ["zyx".index(axis) for axis in axes]
    stored = [array.transpose(order) for array in (image, truth, prediction)]
    assert (planes(*stored, spacing[order], size=40, axes=axes) == expected).all()
    assert (planes(image, truth, prediction, spacing, size=40, axes="") == expected).all()


def test_a_ball_in_millimetres_is_round_in_every_plane():
    spacing = np.array((4.0, 0.5, 1.0))
    at = np.stack(np.meshgrid(*(np.arange(n) - n / 2 for n in (30, 240, 120)), indexing="ij"), -1) * spacing
    ball = ((at**2).sum(-1) < 30**2).astype(np.uint8)
    shown = planes(ball.astype(np.float32), ball, ball, spacing, size=120)
    for plane in shown[:, 1]:
        tall, wide = plane.any(1).sum(), plane.any(0).sum()
        assert tall == pytest.approx(120 / 1.2, abs=7) and wide == pytest.approx(tall, abs=9)
        assert plane.sum() == pytest.approx(math.pi / 4 * 100**2, rel=0.06)


def test_what_is_shown_depends_on_the_truth_alone():
    image, truth = marked()
    wild = np.zeros_like(truth)
    wild[0, 0, 0] = 2
    right, wrong = planes(image, truth, truth, (1, 1, 1), 30), planes(image, truth, wild, (1, 1, 1), 30)
    assert (right[:, :2] == wrong[:, :2]).all()
    # Without a truth it is the prediction that is looked for, and without either the middle.
    assert (planes(image, truth * 0, truth, (1, 1, 1), 30)[:, 0] == right[:, 0]).all()
    nothing = planes(image, truth * 0, truth * 0, (1, 1, 1), 30)
    assert nothing[0, 0].max() == image[10].max() and not nothing[:, 1:].any()


def test_planes_cut_the_largest_shares_of_the_organs():
    truth = np.zeros((9, 6, 6), np.uint8)
    truth[2] = 1  # 36 voxels
    truth[6, 2:4, 2:4] = 2  # all of a small organ,
    truth[6, 0, 0] = 3  # and of another
    shown = planes(np.zeros(truth.shape, np.float32), truth, truth, (1, 1, 1), 12)
    assert set(np.unique(shown[0, 1])) == {0, 2, 3}


def test_a_protocol_has_one_of_each_for_each_row():
    with pytest.raises(ValueError, match="expected equal ones"):
        Segmentation(("a", "b"), ("a",), NAMES, "whole")
    with pytest.raises(ValueError, match="at least one organ"):
        Segmentation(("a",), ("a",), ("background",), "whole")
    assert len(protocol(3)) == 3
