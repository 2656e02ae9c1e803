"""Scores of classes against scikit-learn, SciPy and plain loops."""

import math

import numpy as np
import pytest
import torch

from trainkit.errors import UserError
from trainkit.evaluation_protocols import Classes
from trainkit.metrics import classification
from trainkit.metrics.classification import calibration_error, confidence_bin, score_classes


def names(classes):
    return tuple(f"class {i}" for i in range(classes))


def drawn(seed, count=300, classes=7, levels=None, skill=1.0):
    """Scores that lean towards the label; with `levels` they are whole numbers, and many are equal."""
    rng = np.random.default_rng(seed)
    label = rng.choice(classes, count, p=(p := np.arange(1, classes + 1)) / p.sum())
    logits = rng.normal(size=(count, classes)) + skill * np.eye(classes)[label]
    if levels:
        logits = np.rint(logits * levels)
    return logits.astype(np.float32), label


def softmax(logits):
    out = []
    for row in logits.tolist():
        total = sum(math.exp(v) for v in row)
        out.append([math.exp(v) / total for v in row])
    return out


def plain_ece(probability, label, bins=15):
    gap = 0.0
    for k in range(bins):
        inside = [(max(p), p.index(max(p)) == y) for p, y in zip(probability, label, strict=True)]
        inside = [(c, right) for c, right in inside if k / bins < c <= (k + 1) / bins]
        if inside:
            gap += abs(sum(c for c, _ in inside) - sum(right for _, right in inside))
    return gap / len(label)


@pytest.mark.parametrize(("seed", "classes"), [(0, 7), (1, 3), (2, 12)])
def test_metrics_of_many_classes_equal_those_of_scikit_learn(seed, classes):
    from sklearn import metrics as other

    logits, label = drawn(seed, classes=classes)
    label[label == 1] = 0  # class 1 does not occur, but is predicted
    scores = score_classes(logits, Classes(label, names(classes)))
    probability, predicted = np.array(softmax(logits)), logits.argmax(axis=1)
    occurring = sorted(set(label.tolist()))
    assert 1 not in occurring and (predicted == 1).any()
    expected = {
        "top1": other.accuracy_score(label, predicted),
        "balanced_accuracy": np.mean(other.recall_score(label, predicted, labels=occurring, average=None)),
        "f1_macro": other.f1_score(label, predicted, labels=occurring, average="macro"),
        "nll": other.log_loss(label, probability, labels=range(classes)),
        "ece": plain_ece(probability.tolist(), label),
    }
    if classes > 5:
        expected["top5"] = other.top_k_accuracy_score(label, logits, k=5, labels=range(classes))
    assert scores.metrics == pytest.approx(expected, abs=1e-9)
    confused = other.confusion_matrix(label, predicted, labels=range(classes))
    assert scores.curves["confusion"]["counts"].tolist() == confused.tolist()
    assert set(scores.curves) == {"confusion"}


@pytest.mark.parametrize(("seed", "levels"), [(0, None), (1, 1), (2, 2)])
def test_metrics_of_two_classes_equal_those_of_scikit_learn_and_tied_scores_count_half(seed, levels):
    from sklearn import metrics as other

    logits, label = drawn(seed, classes=2, levels=levels)
    scores = score_classes(logits, Classes(label, ("closed", "open")))
    gap = (logits[:, 1] - logits[:, 0]).tolist()
    wins = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for a, y in zip(gap, label, strict=True)
        if y
        for b, z in zip(gap, label, strict=True)
        if not z
    ]
    predicted = logits.argmax(axis=1)
    expected = {
        "top1": (predicted == label).mean(),
        "accuracy": (predicted == label).mean(),
        "f1": other.f1_score(label, predicted),
        "f1_macro": other.f1_score(label, predicted, average="macro"),
        "auc": sum(wins) / len(wins),
        "balanced_accuracy": other.balanced_accuracy_score(label, predicted),
        "nll": other.log_loss(label, np.array(softmax(logits))),
        "ece": plain_ece(softmax(logits), label),
    }
    assert scores.metrics == pytest.approx(expected, abs=1e-9)
    assert other.roc_auc_score(label, gap) == pytest.approx(scores.metrics["auc"], abs=1e-12)
    roc = scores.curves["roc"]
    area = np.trapezoid(roc["tar"], roc["far"])
    assert area == pytest.approx(scores.metrics["auc"], abs=0.01)
    assert (roc["far"][0], roc["far"][-1], roc["tar"][-1]) == (0, 1, 1)


def test_f1_is_that_of_the_class_numbered_one():
    label = np.array([1, 0, 0, 0, 0, 0])
    logits = np.eye(2)[[1, 1, 1, 0, 0, 0]]  # class 1: one hit, two false; class 0: three hits, two missed
    assert score_classes(logits, Classes(label, ("closed", "open"))).metrics["f1"] == pytest.approx(2 / 4)
    swapped = score_classes(logits[:, ::-1], Classes(1 - label, ("open", "closed")))
    assert swapped.metrics["f1"] == pytest.approx(6 / 8)


def test_of_equal_scores_the_first_class_is_predicted_and_places_follow_the_same_order():
    logits = np.zeros((8, 8))
    scores = score_classes(logits, Classes(np.arange(8), names(8)))
    assert scores.metrics["top1"] == 1 / 8
    assert scores.metrics["top5"] == 5 / 8
    assert scores.rows["prediction"] == ["class 0"] * 8
    assert scores.metrics["nll"] == pytest.approx(math.log(8))


def test_table_of_classes_equals_scikit_learn_and_says_what_does_not_exist():
    from sklearn.metrics import precision_recall_fscore_support

    logits, label = drawn(3, classes=5)
    label[label == 2] = 3
    logits[:, 4] = -50  # class 4 is never predicted
    logits[:, 0] = np.where(label == 1, logits[:, 0], -60)
    table = score_classes(logits, Classes(label, names(5))).tables["per_class"]
    precision, recall, f1, support = precision_recall_fscore_support(
        label, logits.argmax(axis=1), labels=range(5), zero_division=0
    )
    assert table["class"] == list(names(5)) and table["support"] == support.tolist()
    assert table["recall"][2] is None and table["precision"][4] is None
    assert table["f1"][2] == 0 and table["f1"][4] == 0  # predicted but absent; present but not predicted
    for name, column in (("precision", precision), ("recall", recall), ("f1", f1)):
        for got, expected in zip(table[name], column, strict=True):
            assert got is None or got == pytest.approx(expected, abs=1e-12)


def test_pictures_without_a_label_count_in_nothing_and_keep_their_rows():
    logits, label = drawn(4)
    scores = score_classes(logits, Classes(label, names(7)))
    more = np.vstack([logits[:10], -logits[:10], logits[10:]])
    with_more = score_classes(more, Classes(np.concatenate([label[:10], [-1] * 10, label[10:]]), names(7)))
    assert with_more.metrics == pytest.approx(scores.metrics, abs=1e-12)
    assert with_more.chance == scores.chance
    assert with_more.rows["label"][9:21] == [names(7)[label[9]], *[None] * 10, names(7)[label[10]]]
    assert np.isnan(with_more.rows["probability"][10:20]).all()
    assert np.isfinite(np.delete(with_more.rows["probability"], range(10, 20))).all()
    assert len(with_more.rows["prediction"]) == len(with_more.rows["confidence"]) == 310


def test_a_split_of_one_of_two_classes_has_no_auc_and_no_f1():
    scores = score_classes(np.eye(2)[[0, 0, 1]], Classes(np.zeros(3, int), ("closed", "open")))
    assert scores.metrics["accuracy"] == pytest.approx(2 / 3)
    assert not {"auc", "f1"} & set(scores.metrics) and "roc" not in scores.curves
    assert scores.metrics["balanced_accuracy"] == pytest.approx(2 / 3)
    assert all(np.isfinite(v) for v in scores.metrics.values())
    assert scores.chance == {}  # whoever always says closed is always right


def test_scores_that_are_not_finite_are_refused_by_row():
    for bad in (math.nan, math.inf, -math.inf):
        logits, label = drawn(6)
        logits[[17, 40], 2] = bad
        with pytest.raises(UserError, match=r"^val: scores of 2 of 300 images are not finite, the first in row 17"):
            score_classes(logits, Classes(label, names(7)), "val")


def test_labels_that_are_no_class_are_refused_by_row():
    for bad in (7, -2):
        logits, label = drawn(6)
        label[5] = bad
        with pytest.raises(UserError, match=rf"^val: 1 of 300 labels are not a class, the first is {bad} in row 5"):
            score_classes(logits, Classes(label, names(7)), "val")


def test_shapes_that_do_not_fit_are_programming_errors():
    logits, label = drawn(0)
    for wrong in (logits[:-1], logits[:, :-1], logits[:, 0]):
        with pytest.raises(ValueError, match="300 images for 7 classes"):
            score_classes(wrong, Classes(label, names(7)))


def test_scores_do_not_depend_on_the_block_or_the_kind_of_array(monkeypatch):
    logits, label = drawn(7)
    whole = score_classes(logits, Classes(label, names(7)))
    assert score_classes(torch.tensor(logits), Classes(label, names(7))).metrics == whole.metrics
    monkeypatch.setattr(classification, "VALUES_AT_ONCE", 70)
    in_parts = score_classes(logits, Classes(label, names(7)))
    assert in_parts.metrics == whole.metrics
    assert in_parts.rows["probability"].tolist() == whole.rows["probability"].tolist()
    half = torch.tensor(logits).bfloat16()
    rounded = score_classes(half, Classes(label, names(7))).metrics
    assert rounded == score_classes(half.float(), Classes(label, names(7))).metrics


def test_enormous_scores_stay_finite():
    logits = np.array([[1e30, -1e30, 0], [0, 1e30, -1e30], [3e38, -3e38, 3e38]], dtype=np.float32)
    scores = score_classes(logits, Classes(np.array([0, 1, 2]), names(3)))
    assert all(np.isfinite(v) for v in scores.metrics.values())
    assert scores.metrics["nll"] == pytest.approx(math.log(2) / 3)


# ---- Calibration


def test_a_confidence_on_the_edge_of_two_bins_is_in_the_lower_one():
    edges = np.array([0.0, 1 / 15, 3 / 15, np.nextafter(3 / 15, 1), 1.0])
    assert confidence_bin(edges).tolist() == [0, 0, 2, 3, 14]


def test_ece_is_zero_for_a_calibrated_and_large_for_an_overconfident_network():
    right = np.array([True] * 8 + [False] * 2)
    assert calibration_error(np.full(10, 0.8), right) == pytest.approx(0)
    assert calibration_error(np.full(10, 0.98), right) == pytest.approx(0.18)


# ---- Chance


def test_guessing_the_commonest_class_and_at_random_stay_below_the_bound():
    rng = np.random.default_rng(0)
    beaten = {"commonest": 0, "at random": 0}
    for _ in range(500):
        label = rng.choice(3, 200, p=[0.6, 0.3, 0.1])
        for name, logits in (("commonest", np.eye(3)[[0] * 200]), ("at random", rng.normal(size=(200, 3)))):
            scores = score_classes(logits, Classes(label, names(3)))
            beaten[name] += scores.metrics["top1"] > scores.chance["top1"]
    assert beaten == {"commonest": 0, "at random": 0}
    logits, label = drawn(0, skill=3.0)
    scores = score_classes(logits, Classes(label, names(7)))
    assert scores.metrics["top1"] > scores.chance["top1"] > (label == 6).mean()
