"""Separation metrics against SciPy, scikit-learn and plain loops, and against the wrong formulas they replace."""

import itertools
import math

import numpy as np
import pytest
import torch

from trainkit.errors import UserError
from trainkit.evaluation_protocols import Classes, Separation
from trainkit.metrics import class_separation
from trainkit.metrics.class_separation import embedding_distance, score_distance, score_separation
from trainkit.metrics.classification import score_classes

TWO = ("closed", "open")


def names(classes):
    return tuple(f"class {i}" for i in range(classes))


def drawn(seed, count=400, size=6, classes=2, apart=1.0):
    """Rows of a network: classes of unequal size, spread and share, off the origin."""
    rng = np.random.default_rng(seed)
    label = rng.choice(classes, count, p=(p := np.arange(1, classes + 1)) / p.sum())
    spread = rng.uniform(0.3, 2, (classes, size))
    embedding = 5 + apart * rng.normal(size=(classes, size))[label] + spread[label] * rng.normal(size=(count, size))
    logits = rng.normal(size=(count, classes)) + 1.5 * np.eye(classes)[label]
    return {"embedding": embedding.astype(np.float32), "logits": logits.astype(np.float32)}, label


def probabilities(logits):
    """Of class 1, for the images of class 0 and of class 1, is what the wrong formulas were given."""
    return [1 / (1 + math.exp(a - b)) for a, b in logits.astype(np.float64).tolist()]


def sides(rows, label):
    p = np.array(probabilities(rows["logits"]))
    return p[label == 0], p[label == 1]


def shares(values, bins=200):
    out = [0.0] * bins
    for v in values:
        out[min(int(v * bins), bins - 1)] += 1 / len(values)
    return out


# ---- Scores of two classes


@pytest.mark.parametrize("seed", range(4))
def test_ks_and_auc_equal_those_of_scipy_and_scikit_learn(seed):
    from scipy.stats import ks_2samp
    from sklearn.metrics import roc_auc_score

    rows, label = drawn(seed)
    rows["logits"] = np.rint(rows["logits"] * (1 + seed))  # some scores are equal
    metrics = score_separation(rows, Separation(label, TWO)).metrics
    zero, one = sides(rows, label)
    assert metrics["ks"] == pytest.approx(ks_2samp(zero, one).statistic, abs=1e-12)
    assert metrics["auc"] == pytest.approx(roc_auc_score(label, probabilities(rows["logits"])), abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_distances_of_histograms_equal_loops_and_scipy(seed):
    from scipy.spatial.distance import jensenshannon

    rows, label = drawn(seed)
    metrics = score_separation(rows, Separation(label, TWO)).metrics
    p0, p1 = (shares(side) for side in sides(rows, label))
    pairs = list(zip(p0, p1, strict=True))
    assert metrics["hellinger"] == pytest.approx(math.sqrt(1 - sum(math.sqrt(a * b) for a, b in pairs)), abs=1e-9)
    assert metrics["bayes_error"] == pytest.approx(0.5 * sum(min(a, b) for a, b in pairs), abs=1e-12)
    assert metrics["js"] == pytest.approx(jensenshannon(p0, p1, base=2) ** 2, abs=1e-12)  # SciPy gives the root
    off = [abs(p - 0.5) for p in probabilities(rows["logits"])]
    assert metrics["margin"] == pytest.approx(sum(off) / len(off), abs=1e-12)


def test_d_prime_is_that_of_the_logits():
    rows, label = drawn(1)
    logit = [float(b) - float(a) for a, b in rows["logits"].tolist()]
    means, variances = [], []
    for side in (0, 1):
        values = [v for v, y in zip(logit, label, strict=True) if y == side]
        means.append(sum(values) / len(values))
        variances.append(sum((v - means[-1]) ** 2 for v in values) / (len(values) - 1))
    expected = (means[1] - means[0]) / math.sqrt(sum(variances) / 2)
    assert score_separation(rows, Separation(label, TWO)).metrics["d_prime"] == pytest.approx(expected, abs=1e-9)
    swapped = {"logits": rows["logits"][:, ::-1].copy()}
    assert score_separation(swapped, Separation(label, TWO)).metrics["d_prime"] == pytest.approx(-expected, abs=1e-9)


@pytest.mark.parametrize("classes", [2, 5])
def test_ece_is_that_of_classification(classes):
    rows, label = drawn(2, classes=classes)
    expected = score_classes(rows["logits"], Classes(label, names(classes))).metrics["ece"]
    assert score_separation(rows, Separation(label, names(classes))).metrics["ece"] == expected


def test_classes_that_are_wholly_apart_or_the_same_have_the_extreme_values():
    label = np.arange(200) % 2
    apart = np.random.default_rng(0).uniform(2, 5, 200) * (2 * label - 1)
    metrics = score_distance(apart, label == 1)
    assert [metrics[name] for name in ("ks", "hellinger", "js", "bayes_error", "auc")] == [1, 1, 1, 0, 1]
    same = score_distance(np.repeat(np.arange(100) / 10, 2), label == 1)
    assert [same[name] for name in ("ks", "js", "bayes_error", "auc", "d_prime")] == [0, 0, 0.5, 0.5, 0]
    assert same["hellinger"] == pytest.approx(0, abs=1e-7)


def test_near_certain_scores_are_told_apart_that_are_one_as_probabilities():
    logits = np.array([[0, 800], [0, 900], [0, 1000], [0, 1100]], dtype=np.float32)
    metrics = score_separation({"logits": logits}, Separation(np.array([0, 0, 1, 1]), TWO)).metrics
    assert metrics["auc"] == metrics["ks"] == 1 and metrics["bayes_error"] == 0.5
    assert all(np.isfinite(v) for v in metrics.values())


# ---- The formulas of the origin, each wrong on its own terms


def test_fisher_does_not_change_with_the_scale_and_the_legacy_one_does():
    rows, label = drawn(0)
    small, large = (
        score_separation({"embedding": rows["embedding"] * k}, Separation(label, TWO)).metrics for k in (1, 8)
    )
    assert large["fisher"] == pytest.approx(small["fisher"], rel=1e-9)
    assert large["fisher_legacy"] == pytest.approx(small["fisher_legacy"] / 8, rel=1e-6)
    assert abs(small["fisher"] - small["fisher_legacy"]) > 0.01


# ---- Space of the embeddings


def plain_space(embedding, label):
    rows = [[float(v) for v in row] for row in embedding]
    classes = sorted(set(label.tolist()))
    grouped = {c: [r for r, y in zip(rows, label, strict=True) if y == c] for c in classes}
    size = len(rows[0])

    def mean(group):
        return [sum(r[d] for r in group) / len(group) for d in range(size)]

    def squared(a, b):
        return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))

    means, middle = {c: mean(g) for c, g in grouped.items()}, mean(rows)
    variance = {
        c: [sum((r[d] - means[c][d]) ** 2 for r in g) / (len(g) - 1) for d in range(size)] for c, g in grouped.items()
    }
    pairs = list(itertools.combinations(classes, 2))
    intra = sum(sum(squared(r, means[c]) for r in g) / len(g) for c, g in grouped.items()) / len(classes)
    inter = sum(math.sqrt(squared(means[a], means[b])) for a, b in pairs) / len(pairs)
    bhattacharyya = 0.0
    for a, b in pairs:
        for d in range(size):
            u, v = variance[a][d], variance[b][d]
            bhattacharyya += math.log((u / v + v / u + 2) / 4) / 4
            bhattacharyya += (means[a][d] - means[b][d]) ** 2 / (u + v) / 4
    within = sum(squared(r, means[c]) for c, g in grouped.items() for r in g)
    between = sum(len(g) * squared(means[c], middle) for c, g in grouped.items())
    return {
        "intra": intra,
        "inter": inter,
        "fisher": between / within,
        "fisher_legacy": inter / (intra + 1e-8),
        "bhattacharyya": bhattacharyya / len(pairs),
    }


@pytest.mark.parametrize(("seed", "classes"), [(0, 2), (1, 2), (2, 5), (3, 9)])
def test_distances_of_classes_in_space_equal_loops(seed, classes):
    rows, label = drawn(seed, classes=classes)
    metrics = score_separation(rows, Separation(label, names(classes))).metrics
    for name, value in plain_space(rows["embedding"], label).items():
        assert metrics[name] == pytest.approx(value, rel=1e-9), name


def test_bhattacharyya_is_that_of_two_gaussians():
    # The overlap integral of sqrt(p q) along a line, by the trapezium rule: B = -log of it.
    rng = np.random.default_rng(0)
    label = np.arange(200) % 2
    x = np.where(label == 1, 3 + 2 * rng.normal(size=200), rng.normal(size=200))
    (m, s), (n, t) = ((x[label == c].mean(), x[label == c].std(ddof=1)) for c in (0, 1))
    line = np.linspace(-30, 30, 200_001)
    p, q = (np.exp(-(((line - mu) / sd) ** 2) / 2) / sd / math.sqrt(2 * math.pi) for mu, sd in ((m, s), (n, t)))
    got = embedding_distance(x[:, None], label)[0]["bhattacharyya"]
    assert got == pytest.approx(-math.log(np.trapezoid(np.sqrt(p * q), line)), rel=1e-6)


@pytest.mark.parametrize(("seed", "count", "size"), [(0, 400, 6), (1, 400, 3), (2, 20, 50)])
def test_energy_of_components_equals_that_of_scikit_learn(seed, count, size):
    from sklearn.decomposition import PCA

    rows, label = drawn(seed, count=count, size=size)
    metrics = score_separation(rows, Separation(label, TWO)).metrics
    expected = PCA().fit(rows["embedding"].astype(np.float64)).explained_variance_ratio_[:5]
    energy = [metrics[f"pca_energy_{i}"] for i in range(min(5, size))]
    assert energy == pytest.approx(expected.tolist(), abs=1e-10)
    assert f"pca_energy_{min(5, size)}" not in metrics


def test_fewer_samples_than_components_leave_energy_in_few():
    metrics, _ = embedding_distance(np.random.default_rng(0).normal(size=(3, 9)), np.array([0, 1, 0]))
    assert metrics["pca_energy_0"] + metrics["pca_energy_1"] == pytest.approx(1)
    assert [metrics[f"pca_energy_{i}"] for i in (2, 3, 4)] == pytest.approx([0, 0, 0], abs=1e-12)


def test_many_classes_are_compared_in_fixed_random_pairs(monkeypatch):
    rows, label = drawn(0, count=3000, classes=40)
    exact = score_separation(rows, Separation(label, names(40))).metrics
    monkeypatch.setattr(class_separation, "CLASS_PAIRS", 300)
    first, second = class_separation.class_pairs(40)
    assert len(first) == len(second) == 300 and (first != second).all()
    assert first.min() == 0 and first.max() == 39 and second.min() == 0 and second.max() == 39
    some = score_separation(rows, Separation(label, names(40))).metrics
    assert some == score_separation(rows, Separation(label, names(40))).metrics
    for name in ("inter", "bhattacharyya"):
        assert some[name] != exact[name] and some[name] == pytest.approx(exact[name], rel=0.15)


def test_scores_do_not_depend_on_the_order_or_the_place_in_space():
    rows, label = drawn(3, classes=4)
    expected = score_separation(rows, Separation(label, names(4))).metrics
    turn = np.random.default_rng(0).permutation(len(label))
    turned = score_separation({k: v[turn] for k, v in rows.items()}, Separation(label[turn], names(4)))
    assert turned.metrics == pytest.approx(expected, rel=1e-9)
    moved = {**rows, "embedding": rows["embedding"].astype(np.float64) + 1000}
    assert score_separation(moved, Separation(label, names(4))).metrics == pytest.approx(expected, rel=1e-6)


# ---- What cannot be told


def test_what_is_not_given_is_left_out():
    rows, label = drawn(0)
    whole = score_separation(rows, Separation(label, TWO)).metrics
    space = score_separation({"embedding": torch.tensor(rows["embedding"])}, Separation(label, TWO)).metrics
    scores = score_separation({"logits": torch.tensor(rows["logits"])}, Separation(label, TWO)).metrics
    assert not set(space) & set(scores) and {**space, **scores} == whole
    agreed = {"ks", "hellinger", "js", "ece", "margin", "bayes_error", "intra", "inter", "fisher", "fisher_legacy"}
    agreed |= {"bhattacharyya", "auc", "d_prime", *(f"pca_energy_{i}" for i in range(5))}
    assert set(whole) == agreed


def test_values_that_are_not_finite_are_refused_by_row():
    for name, message in (("embedding", "embeddings of 1 of 400 images"), ("logits", "scores of 1 of 400 images")):
        for bad in (math.nan, math.inf):
            rows, label = drawn(0)
            rows[name][30, 1] = bad
            with pytest.raises(UserError, match=rf"^val: {message} are not finite, the first in row 30"):
                score_separation(rows, Separation(label, TWO), "val")


def test_unlabelled_pictures_count_in_nothing():
    rows, label = drawn(1)
    expected = score_separation({k: v[20:] for k, v in rows.items()}, Separation(label[20:], TWO))
    label[:20] = -1
    scores = score_separation(rows, Separation(label, TWO))
    assert scores.metrics == expected.metrics and scores.chance == expected.chance
    assert scores.rows["row"].tolist() == list(range(20, 400))
    assert scores.rows["distance"].tolist() == expected.rows["distance"].tolist()


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
def test_constant_embeddings_have_no_metric_that_divides_by_their_spread(scale):
    one = scale * np.random.default_rng(0).normal(size=8).astype(np.float32)
    label = np.arange(997) % 3
    metrics, distance = embedding_distance(np.repeat(one[None], 997, axis=0), label)
    assert set(metrics) == {"intra", "inter", "fisher_legacy", "bhattacharyya"}
    assert all(v == pytest.approx(0, abs=1e-2) for v in metrics.values())  # legacy: rounding over 1e-8
    assert distance == pytest.approx(np.zeros(997), abs=1e-9)


def test_embeddings_that_differ_by_rounding_alone_count_as_one():
    rng = np.random.default_rng(0)
    one = np.repeat(rng.normal(size=(1, 8)).astype(np.float32), 300, axis=0)
    rounded = np.where(rng.random((300, 8)) < 0.5, one, np.nextafter(one, np.float32(9)))
    assert rounded.dtype == np.float32 and (rounded != one).any()
    metrics, _ = embedding_distance(rounded, np.arange(300) % 2)
    assert set(metrics) == {"intra", "inter", "fisher_legacy", "bhattacharyya"}
    doubled = np.where(rng.random((300, 8)) < 0.5, one, one * np.float32(1.00001))
    assert {"fisher", "pca_energy_0"} < set(embedding_distance(doubled, np.arange(300) % 2)[0])


def test_classes_that_are_each_one_point_have_no_fisher():
    label = np.arange(60) % 3
    points = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    metrics, _ = embedding_distance(points[label], label)
    assert not {"fisher", "bhattacharyya"} & set(metrics)
    assert metrics["intra"] == pytest.approx(0, abs=1e-12) and all(np.isfinite(v) for v in metrics.values())


def test_an_axis_along_which_nothing_varies_changes_nothing_and_one_class_still_makes_it_infinite():
    rows, label = drawn(0)
    embedding = rows["embedding"]
    expected = embedding_distance(embedding, label)[0]
    still = np.full((len(label), 2), 0.3, dtype=np.float32)
    assert embedding_distance(np.hstack([embedding, still]), label)[0] == pytest.approx(expected, rel=1e-9)
    half = np.where(label[:, None] == 1, embedding[:, :1], np.float32(0))
    assert "bhattacharyya" not in embedding_distance(np.hstack([embedding, half]), label)[0]


def test_classes_of_one_sample_are_explicit():
    rng = np.random.default_rng(0)
    label = np.array([0, 0, 0, 0, 1, 1, 1, 2])
    embedding = rng.normal(size=(8, 3))
    metrics, distance = embedding_distance(embedding, label)
    first_two = embedding_distance(embedding[:7], label[:7])[0]
    assert metrics["bhattacharyya"] == pytest.approx(first_two["bhattacharyya"])  # a variance needs two samples
    assert metrics["intra"] == pytest.approx(first_two["intra"] * 2 / 3)  # its own mean is at no distance
    assert distance[7] == 0
    alone, _ = embedding_distance(embedding[:2], np.array([0, 1]))
    assert not {"fisher", "bhattacharyya"} & set(alone)
    one = score_distance(np.array([-1.0, 0.5, 2.0]), np.array([False, False, True]))
    assert "d_prime" not in one and one["auc"] == 1 and all(np.isfinite(v) for v in one.values())


def test_a_network_that_gives_all_the_same_score_has_no_d_prime():
    metrics = score_distance(np.full(997, 0.7), np.arange(997) % 3 == 1)
    assert "d_prime" not in metrics
    assert (metrics["auc"], metrics["ks"], metrics["bayes_error"]) == (0.5, 0, 0.5)


def test_rows_give_name_probability_of_the_label_and_distance_to_the_class():
    rows, label = drawn(2, count=50)
    table = score_separation(rows, Separation(label, TWO)).rows
    p = probabilities(rows["logits"])
    assert table["label"] == [TWO[y] for y in label]
    assert table["probability"] == pytest.approx([q if y else 1 - q for q, y in zip(p, label, strict=True)], abs=1e-12)
    embedding = rows["embedding"].astype(np.float64)
    expected = [math.dist(x, embedding[label == y].mean(axis=0)) for x, y in zip(embedding, label, strict=True)]
    assert table["distance"] == pytest.approx(expected, abs=1e-9)
