"""Scores of segmented images against loops over pixels, scikit-learn's confusion matrix, and sets of known scores."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv, parquet
from sklearn.metrics import confusion_matrix

from trainkit.errors import UserError
from trainkit.evaluation_protocols import Scenes
from trainkit.interfaces import IGNORED
from trainkit.metrics import score, significance
from trainkit.metrics.boundary_f_score import boundary_counts
from trainkit.metrics.segmentation_2d import pixel_counts, score_scenes, thumbnail_maps
from trainkit.tracking.tracker import METRIC_NAME, _write_table

NAMES = ("road", "Traffic sign", "sky", "never")


def protocol(size: int, kind: str = "scores", names=NAMES, colours=()) -> Scenes:
    return Scenes(tuple(f"scene{k}" for k in range(size)), tuple(names), kind, tuple(colours))


def maps(size: int, classes: int, seed: int = 0, shape=(12, 17)) -> tuple[torch.Tensor, torch.Tensor]:
    """Predictions that are right for about two pixels in three, and masks with unlabelled pixels."""
    draw = np.random.default_rng(seed)
    mask = draw.integers(0, classes, (size, *shape))
    predicted = np.where(draw.random(mask.shape) < 0.6, mask, draw.integers(0, classes, mask.shape))
    mask[draw.random(mask.shape) < 0.1] = IGNORED
    return torch.tensor(predicted), torch.tensor(mask.astype(np.uint8))


def gathered(predicted: torch.Tensor, mask: torch.Tensor, classes: int, within: float | None = 1.0) -> dict:
    """Rows as the loop hands them over: float32."""
    rows = pixel_counts(predicted, mask, classes) | thumbnail_maps(predicted, mask)
    if within is not None:
        rows |= boundary_counts(predicted, mask, classes, within)
    return {name: values.float() for name, values in rows.items()}


def pairs(predicted: torch.Tensor, mask: torch.Tensor) -> list[tuple[int, int]]:
    """(truth, prediction) of every labelled pixel."""
    both = zip(mask.flatten().tolist(), predicted.flatten().tolist(), strict=True)
    return [(truth, found) for truth, found in both if truth != IGNORED]


def iou_by_hand(told: list[tuple[int, int]], k: int) -> float:
    hit = sum(truth == found == k for truth, found in told)
    either = sum(k in (truth, found) for truth, found in told)
    return hit / either if either else math.nan


def number_mean(values) -> float:
    there = [value for value in values if value == value]
    return sum(there) / len(there)


# Counts of pixels


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), classes=st.sampled_from([2, 5, 45, 46, 255]), size=st.integers(1, 3))
def test_counts_are_those_of_a_confusion_matrix(seed, classes, size):
    predicted, mask = maps(size, classes, seed, (9, 11))
    rows = pixel_counts(predicted, mask, classes)
    for b in range(size):
        told = np.array(pairs(predicted[b], mask[b])).reshape(-1, 2)
        expected = confusion_matrix(told[:, 0], told[:, 1], labels=range(classes))
        np.testing.assert_array_equal(rows["intersection"][b], expected.diagonal())
        np.testing.assert_array_equal(rows["predicted"][b], expected.sum(0))
        np.testing.assert_array_equal(rows["actual"][b], expected.sum(1))
        if classes <= 45:
            np.testing.assert_array_equal(rows["confusion"][b].reshape(classes, classes), expected)


def test_a_picture_without_labels_counts_nothing():
    predicted, mask = maps(2, 4)
    mask[0] = IGNORED
    assert not any(counts[0].any() for counts in pixel_counts(predicted, mask, 4).values())


# Scores


def test_scores_are_those_of_all_pixels_taken_together():
    predicted, mask = maps(4, 3)
    found = score_scenes(gathered(predicted, mask, 4), protocol(4)).metrics
    told = pairs(predicted, mask)
    iou = [iou_by_hand(told, k) for k in range(3)]
    assert found["miou"] == pytest.approx(sum(iou) / 3, rel=1e-12)
    assert [found[f"iou.{word}"] for word in ("road", "traffic_sign", "sky")] == pytest.approx(iou, rel=1e-12)
    assert found["pixel_accuracy"] == pytest.approx(sum(t == p for t, p in told) / len(told))
    recall = [sum(t == p == k for t, p in told) / sum(t == k for t, _ in told) for k in range(3)]
    assert found["mean_accuracy"] == pytest.approx(sum(recall) / 3)
    share = [sum(t == k for t, _ in told) / len(told) for k in range(3)]
    assert found["fwiou"] == pytest.approx(sum(s * i for s, i in zip(share, iou, strict=True)))
    assert found["pictures"] == 4
    each = [number_mean(iou_by_hand(pairs(predicted[b], mask[b]), k) for k in range(3)) for b in range(4)]
    assert found["miou"] != pytest.approx(sum(each) / 4)  # not the mean over images
    assert list(found)[:4] == ["miou", "pixel_accuracy", "mean_accuracy", "boundary_f"]
    assert not [name for name in found if not METRIC_NAME.fullmatch(name)]


def test_a_class_that_only_is_predicted_counts_and_one_that_is_nowhere_does_not():
    mask = torch.tensor([[[0, 0, 1, 1]]], dtype=torch.uint8)
    found = score_scenes(gathered(mask.long(), mask, 4), protocol(1)).metrics
    assert found["miou"] == found["mean_accuracy"] == 1 and "iou.sky" not in found and "iou.never" not in found
    found = score_scenes(gathered(torch.tensor([[[0, 0, 1, 2]]]), mask, 4), protocol(1)).metrics
    assert found["miou"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert found["iou.sky"] == 0 and "iou.never" not in found
    assert found["mean_accuracy"] == pytest.approx((1 + 0.5) / 2)  # of the classes of the truth


def test_unlabelled_pixels_count_nowhere():
    predicted, mask = maps(3, 3)
    rows = gathered(predicted, mask, 4)
    predicted[mask == IGNORED] = 3
    changed = gathered(predicted, mask, 4)
    assert score_scenes(rows, protocol(3)).metrics == score_scenes(changed, protocol(3)).metrics


def f_by_hand(rows: dict, picture: int, k: int) -> float:
    found, predicted, met, actual = (
        float(rows[name][picture, k]) for name in ("edge_found", "edge_predicted", "edge_met", "edge_actual")
    )
    if not predicted and not actual:
        return math.nan
    precision, recall = found / predicted if predicted else 0.0, met / actual if actual else 0.0
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def test_boundary_f_is_the_mean_over_classes_of_means_over_pictures():
    draw = np.random.default_rng(1)
    mask = torch.tensor(draw.integers(0, 3, (4, 3, 4)).repeat(6, 1).repeat(6, 2).astype(np.uint8))
    predicted = mask.roll(1, 2).long()
    mask[0], predicted[0] = 0, 0  # nothing has a boundary
    mask[1][mask[1] == 2], predicted[1][predicted[1] == 2] = 0, 0  # one class has none
    mask[2][mask[2] == 1] = 0  # one class only is predicted
    rows = gathered(predicted, mask, 4, within=1.0)
    scores = score_scenes(rows, protocol(4))
    each = np.array([[f_by_hand(rows, b, k) for k in range(4)] for b in range(4)])
    assert np.isnan(each[0]).all() and math.isnan(each[1, 2]) and each[2, 1] == 0 and np.isnan(each[:, 3]).all()
    of_class = [number_mean(each[:, k]) for k in range(3)]
    assert [scores.metrics[f"boundary_f.{w}"] for w in ("road", "traffic_sign", "sky")] == pytest.approx(of_class)
    assert scores.metrics["boundary_f"] == pytest.approx(sum(of_class) / 3) and 0 < scores.metrics["boundary_f"] < 1
    assert "boundary_f.never" not in scores.metrics
    assert math.isnan(scores.rows["boundary_f"][0])
    assert scores.rows["boundary_f"][1:] == pytest.approx([number_mean(each[b]) for b in (1, 2, 3)])
    perfect = score_scenes(gathered(mask.long(), mask, 4), protocol(4)).metrics
    assert perfect["boundary_f"] == 1


def test_masks_without_a_label_are_refused():
    predicted, mask = maps(2, 4)
    with pytest.raises(UserError, match=r"val\.flip: no labelled pixel in any of 2 masks"):
        score.score(gathered(predicted, torch.full_like(mask, IGNORED), 4), protocol(2), "val.flip")


def test_rows_that_are_not_the_sets_are_refused():
    with pytest.raises(ValueError, match="4 rows of 4 classes"):
        score_scenes(gathered(*maps(3, 4), 4), protocol(4))


def test_pictures_are_drawn_again_and_their_pixels_scored_together():
    predicted, mask = maps(5, 3, shape=(4, 5))
    # Images of different quality, the last with a class of its own.
    predicted[0] = mask[0].long().clamp_max(2)
    predicted[1] = 0
    mask[4], predicted[4] = 3, 3
    rows = gathered(predicted, mask, 4)
    scores = score_scenes(rows, protocol(5))
    told = [pairs(predicted[b], mask[b]) for b in range(5)]
    draw = np.random.default_rng(0)
    by_hand = []
    for _ in range(1500):
        some = [pair for b in draw.integers(5, size=5) for pair in told[b]]
        by_hand.append(number_mean(iou_by_hand(some, k) for k in range(4)))
    low, high = np.quantile(by_hand, significance.tail_probabilities(5))
    # The same distribution, not the same draws.
    assert scores.metrics["miou_low"] == pytest.approx(low, abs=0.03)
    assert scores.metrics["miou_high"] == pytest.approx(high, abs=0.03)
    assert scores.metrics["miou_low"] < scores.metrics["miou"] < scores.metrics["miou_high"]
    table = scores.tables["per_class"]
    assert (table["iou_low"][3], table["iou_high"][3]) == (1, 1)  # in the draws that have it
    assert table["iou_low"][0] < table["iou"][0] < table["iou_high"][0]


def test_one_picture_has_no_interval():
    scores = score_scenes(gathered(*maps(1, 4), 4), protocol(1))
    assert "miou_low" not in scores.metrics and scores.tables["per_class"]["iou_high"] == [None] * 4


def test_tables_and_rows_can_be_kept(tmp_path: Path):
    predicted, mask = maps(3, 3)
    mask[1] = IGNORED
    scores = score_scenes(gathered(predicted, mask, 4), protocol(3))
    assert scores.metrics["pictures"] == 2
    _write_table(tmp_path / "per_class.csv", scores.tables["per_class"])
    read = csv.read_csv(tmp_path / "per_class.csv").to_pydict()
    told = pairs(predicted, mask)
    assert read["class"] == list(NAMES) and read["iou"][3] in (None, "")
    assert read["pixels"] == [sum(t == k for t, _ in told) for k in range(4)] and read["pictures"] == [2, 2, 2, 0]
    assert read["predicted_pixels"] == [sum(p == k for _, p in told) for k in range(4)]
    hit = [sum(t == p == k for t, p in told) for k in range(3)]
    for name, column in (("recall", "pixels"), ("precision", "predicted_pixels")):
        assert read[name][:3] == pytest.approx([h / n for h, n in zip(hit, read[column], strict=False)], abs=1e-5)
    assert sum(read["share"]) == pytest.approx(1, abs=1e-5)
    _write_table(tmp_path / "rows.parquet", scores.rows)
    rows = parquet.read_table(tmp_path / "rows.parquet").to_pydict()
    assert rows["id"] == ["scene0", "scene1", "scene2"] and math.isnan(rows["miou"][1])
    for b in (0, 2):
        alone = pairs(predicted[b], mask[b])
        assert rows["miou"][b] == pytest.approx(number_mean(iou_by_hand(alone, k) for k in range(4)))
        assert rows["pixel_accuracy"][b] == pytest.approx(sum(t == p for t, p in alone) / len(alone))
        assert rows["actual"][b] == [sum(t == k for t, _ in alone) for k in range(4)]
        assert rows["predicted"][b] == [sum(p == k for _, p in alone) for k in range(4)]


def test_small_maps_hold_the_nearest_pixels_in_the_corner_of_a_square():
    predicted, mask = maps(2, 5, shape=(20, 50))
    rows = thumbnail_maps(predicted, mask, side=10)
    assert rows["seen_shape"].tolist() == [[4, 10]] * 2
    for name, whole in (("seen_truth", mask), ("seen_predicted", predicted)):
        small = rows[name]
        assert small.dtype == torch.uint8 and small.shape == (2, 10, 10) and (small[:, 4:] == IGNORED).all()
        assert torch.equal(small[:, :4].long(), whole[:, 2::5, 2::5].long())


def test_maps_that_are_small_stay_as_they_are():
    predicted, mask = maps(1, 5, shape=(7, 6))
    rows = thumbnail_maps(predicted, mask)
    assert rows["seen_shape"].tolist() == [[7, 6]] and rows["seen_truth"].shape == (1, 320, 320)
    assert torch.equal(rows["seen_truth"][:, :7, :6], mask)
    assert torch.equal(rows["seen_predicted"][:, :7, :6].long(), predicted)
    assert thumbnail_maps(predicted, mask, side=1)["seen_shape"].tolist() == [[1, 1]]


class Pictures:
    """A split whose images are of one colour each, larger than the maps."""

    def picture(self, row: int) -> np.ndarray:
        return np.full((36, 51, 3), (row, 100, 200), dtype=np.uint8)


def test_an_evaluation_for_pictures_gives_them_and_few_metrics():
    predicted, mask = maps(3, 4)
    rows = gathered(predicted, mask, 4)
    colours = [(k, k, k) for k in range(4)]
    whole = score_scenes(rows, protocol(3))
    shown = score.score(rows, protocol(3, "overlays", colours=colours), "val.overlays", Pictures())
    assert set(shown.metrics) == {"miou", "pixel_accuracy", "boundary_f", "pictures"}
    assert all(whole.metrics[name] == value for name, value in shown.metrics.items())
    assert not shown.curves and set(shown.pictures) == {"scenes"} and not whole.pictures
    arrays = shown.pictures["scenes"]
    for row in range(3):
        assert arrays["images"][row].shape == (12, 17, 3) and (arrays["images"][row] == (row, 100, 200)).all()
        assert arrays["truth"][row].dtype == np.uint8 and (arrays["truth"][row] == mask[row].numpy()).all()
        assert (arrays["predicted"][row] == predicted[row].numpy()).all()
        iou = [iou_by_hand(pairs(predicted[row], mask[row]), k) for k in range(4)]
        assert arrays["iou"][row] == pytest.approx(iou) and arrays["miou"][row] == pytest.approx(sum(iou) / 4)
    assert arrays["id"] == ["scene0", "scene1", "scene2"] and arrays["colours"] == tuple(colours)


def test_pictures_need_the_split():
    with pytest.raises(ValueError, match="split"):
        score_scenes(gathered(*maps(1, 4), 4), protocol(1, "overlays"))
