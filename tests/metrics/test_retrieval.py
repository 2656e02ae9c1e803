"""Retrieval scores against rankings written out in plain loops."""

import math

import numpy as np
import pytest
import torch

from trainkit.errors import UserError
from trainkit.evaluation_protocols import Retrieval
from trainkit.metrics import retrieval
from trainkit.metrics.retrieval import score_retrieval


def drawn(seed, count=90, classes=8, size=5, levels=None, skill=1.0, alone=2):
    """Embeddings that lean towards their class; with `levels` small whole numbers, so that many cosines are equal."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, classes, count)
    label[:alone] = classes + np.arange(alone)
    embedding = rng.normal(size=(count, size)) + skill * rng.normal(size=(classes + alone, size))[label]
    if levels:
        embedding = np.rint(embedding * levels).clip(-1, 1)
        embedding[(embedding == 0).all(axis=1)] = 1
    return embedding.astype(np.float32), label


def plain_cosines(embedding):
    rows = embedding.astype(np.float64).tolist()
    length = [math.sqrt(sum(v * v for v in row)) for row in rows]
    return [
        [round(sum(a * b for a, b in zip(x, y, strict=True)) / p / q, 6) for y, q in zip(rows, length, strict=True)]
        for x, p in zip(rows, length, strict=True)
    ]


def plain_scores(embedding, label):
    """Each query's full ranking: by cosine, other classes before its own where equal."""
    cosines, n = plain_cosines(embedding), len(label)
    hits = {"recall_at_1": [], "recall_at_5": [], "r_precision": [], "map_at_r": []}
    for q in range(n):
        others = [i for i in range(n) if i != q]
        others.sort(key=lambda i: (-cosines[q][i], label[i] == label[q]))
        right = [bool(label[i] == label[q]) for i in others]
        relevant = sum(right)
        if label[q] < 0 or not relevant:
            continue
        hits["recall_at_1"].append(any(right[:1]))
        hits["recall_at_5"].append(any(right[:5]))
        hits["r_precision"].append(sum(right[:relevant]) / relevant)
        precisions = [sum(right[: i + 1]) / (i + 1) if right[i] else 0 for i in range(relevant)]
        hits["map_at_r"].append(sum(precisions) / relevant)
    return {name: sum(values) / len(values) for name, values in hits.items()}


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (0, {}),
        (1, {"levels": 1}),
        (2, {"levels": 1, "classes": 3}),
        (3, {"classes": 30}),
        (4, {"classes": 2, "alone": 0}),
        (5, {"count": 7, "classes": 2, "alone": 1}),
    ],
)
def test_scores_equal_rankings_written_out_in_loops(seed, options):
    embedding, label = drawn(seed, **options)
    assert score_retrieval(embedding, Retrieval(label)).metrics == pytest.approx(
        plain_scores(embedding, label), abs=1e-9
    )


def test_map_at_r_of_an_example_worked_by_hand():
    # Angles from the query in degrees; R = 3. Its class stands at places 1, 3 and 5: P(1) = 1, P(3) = 2/3, P(5) is
    # beyond R: (1 + 0 + 2/3) / 3. The others are 90 degrees and more away from each other's classes.
    angle = np.radians([0, 10, 20, 30, 40, 50])
    label = np.array([0, 0, 1, 0, 2, 0])
    embedding = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    scores = score_retrieval(embedding, Retrieval(label))
    assert scores.rows["map_at_r"][0] == pytest.approx((1 + 2 / 3) / 3)
    assert scores.rows["r_precision"][0] == pytest.approx(2 / 3) and scores.rows["rank"][0] == 1
    assert scores.rows["relevant"].tolist() == [3, 3, 0, 3, 0, 3]


def test_pictures_alone_in_their_class_are_no_queries_but_are_met():
    embedding, label = drawn(6, alone=0)
    scores = score_retrieval(embedding, Retrieval(label))
    alone = score_retrieval(np.vstack([embedding, embedding[:4]]), Retrieval(np.append(label, [50, 51, 52, 53])))
    assert alone.rows["relevant"][-4:].tolist() == [0, 0, 0, 0]
    # A copy in another class is as near as an image can be: its twin is never first at anything.
    assert (alone.rows["rank"][:4] > 1).all()
    assert alone.metrics["recall_at_1"] < scores.metrics["recall_at_1"]
    assert alone.metrics == pytest.approx(
        plain_scores(np.vstack([embedding, embedding[:4]]), np.append(label, [50, 51, 52, 53])), abs=1e-9
    )


def test_unlabelled_pictures_match_nobody_not_even_each_other():
    embedding, label = drawn(7, alone=0)
    label[:9] = -1
    scores = score_retrieval(embedding, Retrieval(label))
    apart = label.copy()
    apart[:9] = 100 + np.arange(9)
    assert scores.metrics == score_retrieval(embedding, Retrieval(apart)).metrics
    assert scores.rows["relevant"][:9].tolist() == [0] * 9


def test_a_network_that_answers_the_same_to_all_scores_nothing():
    label = np.arange(40) % 4
    for constant in (np.ones((40, 16)), np.zeros((40, 16)), np.full((40, 3), 0.1)):
        scores = score_retrieval(constant, Retrieval(label))
        assert scores.metrics == {"recall_at_1": 0, "recall_at_5": 0, "r_precision": 0, "map_at_r": 0}


def test_perfect_clusters_score_one_and_length_does_not_matter():
    rng = np.random.default_rng(0)
    label = np.arange(60) % 5
    embedding = np.eye(5)[label] + 0.01 * rng.normal(size=(60, 5))
    metrics = score_retrieval(embedding, Retrieval(label)).metrics
    assert metrics == pytest.approx({"recall_at_1": 1, "recall_at_5": 1, "r_precision": 1, "map_at_r": 1})
    embedding, label = drawn(0)
    longer = embedding * 2.0 ** rng.integers(-3, 4, (len(label), 1))
    expected = score_retrieval(embedding, Retrieval(label)).metrics
    assert score_retrieval(longer, Retrieval(label)).metrics == pytest.approx(expected)


def test_scores_do_not_depend_on_the_order_the_block_or_the_kind_of_array(monkeypatch):
    embedding, label = drawn(9, levels=1)
    whole = score_retrieval(embedding, Retrieval(label))
    assert score_retrieval(torch.tensor(embedding), Retrieval(label)).metrics == whole.metrics
    turn = np.random.default_rng(0).permutation(len(label))
    turned = score_retrieval(embedding[turn], Retrieval(label[turn]))
    assert turned.metrics == pytest.approx(whole.metrics, abs=1e-12)
    monkeypatch.setattr(retrieval, "SCORES_AT_ONCE", 600)
    assert score_retrieval(embedding, Retrieval(label)).metrics == pytest.approx(whole.metrics, abs=1e-12)


def test_a_recall_that_cannot_be_missed_is_left_out():
    embedding, label = drawn(0, count=6, classes=2, alone=0)
    label[:] = [0, 0, 0, 1, 1, 1]
    assert set(score_retrieval(embedding, Retrieval(label)).metrics) == {"recall_at_1", "r_precision", "map_at_r"}


def test_sets_in_which_nothing_can_be_retrieved_are_refused():
    embedding = np.random.default_rng(0).normal(size=(4, 3))
    with pytest.raises(UserError, match=r"^val: none of 4 images has another image of its class"):
        score_retrieval(embedding, Retrieval(np.arange(4)), "val")
    with pytest.raises(UserError, match=r"^val: none of 4 images"):
        score_retrieval(embedding, Retrieval(np.full(4, -1)), "val")
    with pytest.raises(UserError, match=r"^val: all 4 images are of one class"):
        score_retrieval(embedding, Retrieval(np.zeros(4, int)), "val")
    with pytest.raises(ValueError, match="4 embeddings for 3 images"):
        score_retrieval(embedding, Retrieval(np.zeros(3, int)), "val")


def test_embeddings_that_are_not_finite_are_refused_by_row():
    embedding, label = drawn(0)
    embedding[33, 2] = math.nan
    with pytest.raises(UserError, match=r"^val: embeddings of 1 of 90 images are not finite, the first in row 33"):
        score_retrieval(embedding, Retrieval(label), "val")


def test_guessing_stays_below_the_bound_and_skill_is_above():
    # In two dimensions most images are nearest to each other, and are right or wrong together: of 2,000 such draws,
    # 16 were above the bound for independent queries and 1 above that for half as many.
    rng = np.random.default_rng(0)
    label, over = rng.choice(6, 150, p=[0.3, 0.3, 0.1, 0.1, 0.1, 0.1]), 0
    for _ in range(100):
        scores = score_retrieval(rng.normal(size=(150, 2)), Retrieval(label))
        over += scores.metrics["recall_at_1"] > scores.chance["recall_at_1"]
    assert over <= 1
    skilled = score_retrieval(rng.normal(size=(150, 8)) + 3 * rng.normal(size=(6, 8))[label], Retrieval(label))
    assert skilled.metrics["recall_at_1"] > skilled.chance["recall_at_1"] > np.mean(skilled.rows["relevant"]) / 149


def test_bound_of_chance_is_that_of_half_as_many_guesses_as_queries():
    from scipy.stats import binom

    embedding, label = drawn(0)
    asked = [y for y in label.tolist() if (label == y).sum() > 1]
    p = sum((label == y).sum() - 1 for y in asked) / len(asked) / 89
    half = len(asked) // 2
    expected = binom.ppf(0.999, half, p) / half
    assert score_retrieval(embedding, Retrieval(label)).chance == {"recall_at_1": pytest.approx(expected)}
