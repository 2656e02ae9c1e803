"""What an inspection finds among samples of which it is known what is wrong with them."""

import math

import numpy as np
import pytest
import torch

from trainkit.errors import UserError
from trainkit.evaluation_protocols import Inspection
from trainkit.metrics import embedding_inspection, score
from trainkit.metrics.classification import decide

tsne = embedding_inspection.tsne


@pytest.fixture(autouse=True)
def quick_maps(monkeypatch):
    """t-SNE takes seconds; the tests of it call it themselves."""
    monkeypatch.setattr(embedding_inspection, "tsne", lambda unit: np.zeros((len(unit), 2)))


class Pictures:
    """A split whose images are given; it notes which were asked for."""

    def __init__(self, images):
        self.images, self.asked = torch.as_tensor(images), set()

    def fetch(self, rows, epoch, view=None):
        self.asked.update(rows.tolist())
        return {"image": self.images[torch.as_tensor(rows)], "index": torch.as_tensor(rows)}


def clusters(classes=2, each=40, dimensions=6, seed=0, gap=4.0):
    """Gaussian clusters, the log-probabilities of their classes, and images whose first pixel is the row."""
    rng = np.random.default_rng(seed)
    centre = gap * np.eye(classes, dimensions)
    label = np.repeat(np.arange(classes), each)
    embedding = centre[label] + rng.normal(size=(len(label), dimensions))
    images = np.zeros((len(label), 3, 8, 16), np.uint8)
    images[:, 0, 0, 0] = np.arange(len(label)) % 256
    return embedding, label, centre, images


def logits_of(embedding, centre):
    return -((embedding[:, None] - centre) ** 2).sum(2) / 2


def inspect(embedding, label, logits, images, names=None):
    rows = {"embedding": torch.tensor(embedding).float(), "logits": torch.tensor(logits).float()}
    classes = logits.shape[1]
    names = names or tuple("abcdefghijkl"[:classes])
    protocol = Inspection(label=label, names=names, ids=tuple(f"crops/{k}.png" for k in range(len(label))))
    split = Pictures(images)
    return score.score(rows, protocol, "eyes.inspection", split), split


def test_swapped_labels_are_found_and_nothing_else_is():
    embedding, label, centre, images = clusters(classes=3, gap=7.0)
    given = label.copy()
    given[[3, 50, 100]] = [2, 0, 1]
    scores, _ = inspect(embedding, given, logits_of(embedding, centre), images)
    assert np.flatnonzero(scores.rows["mislabelled"]).tolist() == [3, 50, 100]
    assert scores.metrics["mislabelled_share"] == pytest.approx(3 / 120)
    sheet = scores.pictures["mislabelled"]
    assert sorted(sheet["id"]) == ["crops/100.png", "crops/3.png", "crops/50.png"]
    assert sorted(zip(sheet["label"], sheet["prediction"], strict=True)) == [("a", "b"), ("b", "c"), ("c", "a")]
    assert sorted(sheet["images"][:, 0, 0, 0].tolist()) == [3, 50, 100]


def test_a_confident_mistake_among_its_own_kind_is_no_wrong_label():
    """The network errs, but the sample lies among others of its label: the neighbours say that the label is right."""
    embedding, label, centre, images = clusters(gap=7.0)
    logits = logits_of(embedding, centre)
    logits[5] = [-60, 0]
    scores, _ = inspect(embedding, label, logits, images)
    assert scores.rows["prediction"][5] == "b" and scores.rows["probability"][5] < 1e-9
    assert not scores.rows["mislabelled"].any()


def test_the_rule_for_wrong_labels_is_the_one_written_out():
    embedding, label, centre, _ = clusters(classes=4, each=25, gap=2.0, seed=3)
    given = label.copy()
    given[::9] = (given[::9] + 1) % 4
    logits = logits_of(embedding, centre)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    unit = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
    expected = []
    for i in range(len(given)):
        best = int(np.argmax(p[i]))
        usual = np.mean([p[j, best] for j in range(len(given)) if given[j] == best])
        others = sorted((j for j in range(len(given)) if j != i), key=lambda j: -float(unit[i] @ unit[j]))[:10]
        agreeing = sum(given[j] == best for j in others)
        expected.append(best != given[i] and p[i, best] >= usual and agreeing > 5)
    found = embedding_inspection.likely_mislabelled(decide(logits, given, "x"), given, unit)
    assert found.tolist() == expected
    assert 3 <= sum(expected) < 25


def test_hard_samples_are_those_near_a_half():
    embedding, label, _, images = clusters()
    p = np.random.default_rng(1).uniform(0.01, 0.99, len(label))
    scores, _ = inspect(embedding, label, np.log(np.stack([1 - p, p], 1)), images)
    hard = np.abs(p - 0.5) < 0.15
    assert scores.rows["hard"].tolist() == hard.tolist()
    assert scores.metrics["hard_share"] == pytest.approx(hard.mean())
    np.testing.assert_allclose(scores.rows["margin"], 2 * np.abs(p - 0.5), atol=1e-6)
    np.testing.assert_allclose(scores.rows["probability"], np.where(label == 1, p, 1 - p), atol=1e-6)
    nearest = np.argsort(np.abs(p - 0.5), kind="stable")[: scores.pictures["hard"]["found"]][
        : embedding_inspection.SHOWN
    ]
    assert scores.pictures["hard"]["id"] == [f"crops/{k}.png" for k in nearest]


def test_outliers_are_far_from_their_own_class_and_not_only_from_the_middle():
    embedding, label, centre, images = clusters(classes=2, each=300, dimensions=5, gap=9.0)
    embedding[7] = centre[0] + [0, 0, 0, 8, 0]  # beside its class
    embedding[301] = centre[0]  # in the middle of the other one
    scores, _ = inspect(embedding, label, logits_of(embedding, centre), images)
    worst = np.argsort(-scores.rows["outlier_distance"])[:2]
    assert set(worst) == {7, 301}
    assert scores.rows["outlier"].tolist() == (scores.rows["outlier_distance"] > 3).tolist()
    assert scores.pictures["outliers"]["id"][:2] == [f"crops/{k}.png" for k in worst]


@pytest.mark.parametrize("dimensions", [1, 2, 16, 100])
def test_one_gaussian_sample_in_740_is_an_outlier_whatever_the_dimensions(dimensions):
    rng = np.random.default_rng(dimensions)
    mixing = rng.normal(size=(dimensions, dimensions))
    embedding = rng.normal(size=(8000, dimensions)) @ mixing + 5
    share = (embedding_inspection.outlier_distance(embedding, np.zeros(8000, int)) > 3).mean()
    assert 0.0003 < share < 0.003


def test_the_distance_is_mahalanobis_said_as_standard_deviations():
    from scipy import stats
    from sklearn.covariance import LedoitWolf

    rng = np.random.default_rng(4)
    label = np.repeat([0, 1, 2], [50, 60, 1])
    embedding = rng.normal(size=(111, 7)) @ rng.normal(size=(7, 7)) * 30 + label[:, None]
    centred = np.concatenate([embedding[label == k] - embedding[label == k].mean(0) for k in range(3)])
    precision = np.linalg.inv(LedoitWolf(assume_centered=True).fit(centred).covariance_)
    found = embedding_inspection.outlier_distance(embedding, label)
    # The mean and variance of the squared distance under a Gaussian, and the scaled chi-square that has both.
    product = precision @ centred.T @ centred / 111
    mean, variance = np.trace(product), 2 * np.trace(product @ product)
    part, degrees = variance / mean / 2, 2 * mean**2 / variance
    assert 4 < degrees < 7
    for row in range(110):
        squared = centred[row] @ precision @ centred[row]
        assert found[row] == pytest.approx(stats.norm.isf(stats.chi2.sf(squared / part, degrees)), abs=0.06)
    assert found[110] < -3  # alone, so at the mean of its class


def test_embeddings_that_do_not_vary_have_no_outlier_and_can_be_mapped():
    embedding = np.ones((12, 4))
    label = np.arange(12) % 2
    scores, _ = inspect(embedding, label, np.zeros((12, 2)), np.zeros((12, 3, 8, 8), np.uint8))
    assert scores.metrics == {"hard_share": 1.0, "mislabelled_share": 0.0, "outlier_share": 0.0}
    assert np.isfinite(tsne(embedding / 2)).all()
    assert (scores.pictures["pca"]["points"] == 0).all()


@pytest.mark.parametrize(("size", "dimensions"), [(2, 3), (4, 2), (5, 1), (7, 60), (12, 2)])
def test_small_sets_and_single_dimensions_can_be_inspected(size, dimensions):
    rng = np.random.default_rng(size)
    label = np.arange(size) % 2
    images = np.zeros((size, 1, 6, 6), np.float32)
    embedding = rng.normal(size=(size, dimensions))
    scores, _ = inspect(embedding, label, rng.normal(size=(size, 2)), images)
    for points in (scores.pictures["pca"]["points"], tsne(embedding)):
        assert points.shape == (size, 2)
        assert np.isfinite(points).all()


def test_the_map_is_the_same_again_and_keeps_classes_apart():
    embedding, label, _, _ = clusters(classes=3, each=20, gap=20.0)
    unit = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
    one, two = tsne(unit), tsne(unit)
    assert (one == two).all()
    distance = np.linalg.norm(one[:, None] - one[None], axis=2) + 1e9 * np.eye(60)
    assert (label[distance.argmin(1)] == label).all()


def test_a_map_of_many_shows_every_class_by_its_share():
    label = np.repeat([0, 1, 2, 3], [6000, 3000, 998, 2])
    shown = embedding_inspection.stratified(label, 200)
    assert len(set(shown)) == 200 and (np.diff(shown) > 0).all()
    assert np.bincount(label[shown]).tolist() == pytest.approx([120, 60, 20, 1], abs=1.1)
    assert (label[shown] == 3).any()
    assert (embedding_inspection.stratified(label, 200) == shown).all()
    assert embedding_inspection.stratified(label[:50], 200).tolist() == list(range(50))


def test_what_has_no_label_is_mapped_and_is_neither_mislabelled_nor_an_outlier():
    embedding, label, centre, images = clusters(gap=7.0)
    given = label.copy()
    given[:3] = -1
    embedding[0] += 100
    scores, _ = inspect(embedding, given, logits_of(embedding, centre), images)
    assert scores.rows["label"][:4] == [None, None, None, "a"]
    assert not scores.rows["outlier"][:3].any() and not scores.rows["mislabelled"][:3].any()
    assert math.isnan(scores.rows["probability"][0])
    assert scores.pictures["tsne"]["label"][:3].tolist() == [-1] * 3


def test_what_cannot_be_inspected_is_refused_with_the_place():
    embedding, label, centre, images = clusters()
    logits = logits_of(embedding, centre)
    broken = embedding.copy()
    broken[17, 2] = np.nan
    with pytest.raises(UserError, match=r"eyes\.inspection.*first in row 17"):
        inspect(broken, label, logits, images)
    with pytest.raises(UserError, match=r"eyes\.inspection.*first in row 5"):
        inspect(embedding, label, np.where(np.arange(80)[:, None] == 5, np.inf, logits), images)
    with pytest.raises(UserError, match="not a class"):
        inspect(embedding, np.where(np.arange(80) == 4, 2, label), logits, images)
    with pytest.raises(ValueError, match="80 labels"):
        inspect(embedding[:40], label, logits, images)
    protocol = Inspection(label=label, names=("a", "b"), ids=("x",) * 80)
    with pytest.raises(ValueError, match="needs the split"):
        score.score({"embedding": torch.zeros(80, 2), "logits": torch.zeros(80, 2)}, protocol)
