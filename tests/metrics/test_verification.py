"""Every score against a computation written out here in plain Python, small enough to read."""

import csv
import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from trainkit.errors import UserError
from trainkit.evaluation_protocols import Identification, Pairs, Templates
from trainkit.metrics import identification, ijb_templates, verification
from trainkit.metrics.score import score

LFW = Path(__file__).parents[3] / "shared" / "data" / "faces_lfw112" / "verification"


def random_pairs(seed, pairs=137, dim=6, levels=3, skill=1.0):
    """Pairs of small whole-number vectors: many distances are exactly equal."""
    rng = np.random.default_rng(seed)
    same = rng.random(pairs) < 0.5
    same[:2] = [True, False]
    first = rng.integers(-levels, levels + 1, (pairs, dim))
    other = rng.integers(-levels, levels + 1, (pairs, dim))
    near = first + rng.integers(-1, 2, (pairs, dim))
    second = np.where((same & (rng.random(pairs) < skill))[:, None], near, other)
    first[(first == 0).all(axis=1)] = 1
    second[(second == 0).all(axis=1)] = 1
    embedding = np.empty((2 * pairs, dim), dtype=np.float32)
    embedding[0::2], embedding[1::2] = first, second
    return embedding, Pairs(np.arange(0, 2 * pairs, 2), np.arange(1, 2 * pairs, 2), same)


def plain_distances(embedding, pairs):
    out = []
    for a, b in zip(pairs.first, pairs.second, strict=True):
        x, y = [float(v) for v in embedding[a]], [float(v) for v in embedding[b]]
        p, q = math.sqrt(sum(v * v for v in x)), math.sqrt(sum(v * v for v in y))
        out.append(sum((u / p - v / q) ** 2 for u, v in zip(x, y, strict=True)))
    return out


def plain_folds(n):
    out, start = [], 0
    for k in range(10):
        size = n // 10 + (1 if k < n % 10 else 0)
        out.append(range(start, start + size))
        start += size
    assert start == n
    return out


def plain_ten_fold(distance, same):
    n = len(distance)
    accuracies, thresholds = [], []
    for held_out in plain_folds(n):
        best, best_right = None, -1
        for t in range(400):
            right = sum((distance[i] < t / 100) == same[i] for i in range(n) if i not in held_out)
            if right > best_right:
                best, best_right = t / 100, right
        thresholds.append(best)
        accuracies.append(sum((distance[i] < best) == same[i] for i in held_out) / len(held_out))
    mean = sum(accuracies) / 10
    return mean, math.sqrt(sum((a - mean) ** 2 for a in accuracies) / 10), sum(thresholds) / 10


def plain_auc(genuine, impostor):
    wins = sum(1.0 if g > i else 0.5 if g == i else 0.0 for g in genuine for i in impostor)
    return wins / len(genuine) / len(impostor)


def plain_points(genuine, impostor):
    """(far count, tar count) of every threshold, from none accepted to all."""
    points = [(0, 0)]
    for t in sorted(set(genuine) | set(impostor), reverse=True):
        points.append((sum(i >= t for i in impostor), sum(g >= t for g in genuine)))
    return points


def plain_eer(genuine, impostor):
    points = [(f / len(impostor), 1 - t / len(genuine)) for f, t in plain_points(genuine, impostor)]
    for (f0, r0), (f1, r1) in itertools.pairwise(points):
        if f1 >= r1:
            # The line from (f0, r0) to (f1, r1) meets the diagonal where f0 + s (f1 - f0) = r0 + s (r1 - r0).
            s = (r0 - f0) / ((f1 - f0) - (r1 - r0))
            return f0 + s * (f1 - f0)
    raise AssertionError("the curve ends at (1, 0)")


@pytest.mark.parametrize(("seed", "pairs"), [(0, 73), (1, 10), (2, 60), (3, 101)])
def test_ten_fold_accuracy_equals_one_written_out_in_loops(seed, pairs):
    embedding, protocol = random_pairs(seed, pairs)
    scores = verification.score_pairs(embedding, protocol)
    distance = plain_distances(embedding, protocol)
    mean, std, threshold = plain_ten_fold(distance, protocol.same)
    assert scores.metrics["accuracy"] == pytest.approx(mean, abs=1e-12)
    assert scores.metrics["accuracy_std"] == pytest.approx(std, abs=1e-12)
    assert scores.metrics["threshold"] == pytest.approx(threshold, abs=1e-12)
    assert scores.rows["distance"] == pytest.approx(distance, abs=1e-12)


def test_folds_hold_every_pair_once_and_in_order():
    for n in (10, 11, 19, 600, 6007):
        fold = verification.contiguous_folds(n)
        for k, expected in enumerate(plain_folds(n)):
            assert np.flatnonzero(fold == k).tolist() == list(expected)


def ten_fold(distance, same):
    """Accuracies and thresholds of the ten folds of a list of pairs."""
    folds = verification.contiguous_folds(len(same))
    accuracy, threshold = verification.ten_fold(distance, same, folds, np.ones((1, len(same))))
    return accuracy[0].tolist(), threshold[0].tolist()


def test_of_equally_good_thresholds_the_smallest_is_taken():
    # Same pairs at 0.5, different at 1.5: each of 0.51 .. 1.50 is perfect (0.50 accepts nothing: below, not at).
    distance = np.array([0.5, 1.5] * 10)
    accuracy, threshold = ten_fold(distance, distance < 1)
    assert threshold == [0.51] * 10 and accuracy == [1.0] * 10


def test_thresholds_reach_from_0_to_3_99():
    # Different pairs nearest of all: best is to accept nobody. Same pairs at 3.985: only the last threshold takes them.
    same = np.array([True, False, False] * 10)
    assert ten_fold(np.where(same, 3.0, 0.0), same)[1] == [0.0] * 10
    assert ten_fold(np.where(same, 3.985, 4.0), same)[1] == [3.99] * 10


def test_accuracy_of_a_worked_example():
    # Two pairs a fold, one at 1.0 (same) and one at 2.0 (different); in fold 0 they are the other way round. Every
    # threshold from 1.01 to 2.00 is best on any nine folds, so 1.01 is taken: nine folds all right, fold 0 all wrong.
    distance = np.array([2.0, 1.0] + [1.0, 2.0] * 9)
    accuracy, threshold = ten_fold(distance, np.array([True, False] * 10))
    assert threshold == [1.01] * 10 and accuracy == [0.0] + [1.0] * 9


def plain_val(distance, same):
    vals, fars = [], []
    n = len(distance)
    for held_out in plain_folds(n):
        train = [distance[i] for i in range(n) if i not in held_out and not same[i]]
        ordered = sorted(train)
        rates, below = [], 0
        for t in range(4000):
            while below < len(ordered) and ordered[below] < t / 1000:
                below += 1
            rates.append(below / len(train))
        if max(rates) < 1e-3:
            threshold = 0.0
        else:
            low = max(t for t in range(4000) if rates[t] <= 1e-3)
            if low == 3999:
                threshold = 3.999
            else:
                share = (1e-3 - rates[low]) / (rates[low + 1] - rates[low])
                threshold = low / 1000 + share / 1000
        vals.append([distance[i] < threshold for i in held_out if same[i]])
        fars.append([distance[i] < threshold for i in held_out if not same[i]])
    rates = [[sum(fold) / len(fold) for fold in folds] for folds in (vals, fars)]
    mean = sum(rates[0]) / 10
    return mean, math.sqrt(sum((v - mean) ** 2 for v in rates[0]) / 10), sum(rates[1]) / 10


@pytest.mark.parametrize(("seed", "spread"), [(0, 0.25), (1, 0.004)])
def test_val_at_far_equals_one_written_out_in_loops(seed, spread):
    # A wide spread leaves steps of the grid at which the rate rests; a narrow one puts many pairs between two of them.
    rng = np.random.default_rng(seed)
    n = 2300
    same = rng.permutation(n) < n // 2 - 20
    distance = np.clip(rng.normal(np.where(same, 1.9 - 3 * spread, 1.9), spread, n), 0, 4).round(6)
    got = verification.val_at_far(distance, same, verification.contiguous_folds(n))
    val, std, far = plain_val(distance.tolist(), same.tolist())
    assert 0.05 < val < 0.95
    assert got["val_at_far_1e-3"] == pytest.approx(val, abs=1e-12)
    assert got["val_at_far_1e-3_std"] == pytest.approx(std, abs=1e-12)
    assert got["val_at_far_1e-3_far"] == pytest.approx(far, abs=1e-12)


def test_val_is_zero_when_no_distance_is_small_enough_to_reach_the_rate():
    same = np.arange(3000) % 2 == 0
    distance = np.where(same, 1.0, 4.0)
    got = verification.val_at_far(distance, same, verification.contiguous_folds(3000))
    assert got == {"val_at_far_1e-3": 0.0, "val_at_far_1e-3_std": 0.0, "val_at_far_1e-3_far": 0.0}


def test_val_is_left_out_below_a_thousand_impostors_in_nine_folds():
    for impostor_pairs, there in ((1120, True), (1100, False)):
        same = np.arange(2 * impostor_pairs) % 2 == 0
        distance = np.linspace(0, 3.9, len(same))
        got = verification.val_at_far(distance, same, verification.contiguous_folds(len(same)))
        assert ("val_at_far_1e-3" in got) == there


def test_val_is_left_out_when_a_fold_lacks_a_kind_of_pair():
    same = np.arange(6000) < 3000
    assert verification.val_at_far(np.linspace(0, 3.9, 6000), same, verification.contiguous_folds(6000)) == {}


@pytest.mark.parametrize("seed", range(4))
def test_roc_auc_and_eer_equal_ones_written_out_in_loops(seed):
    rng = np.random.default_rng(seed)
    genuine = rng.integers(2, 9, 40).tolist()
    impostor = rng.integers(0, 7, 55).tolist()
    points = verification.operating_points(np.array(genuine, float), np.array(impostor, float))
    plain = plain_points(genuine, impostor)
    assert list(zip(points.false_accepts.tolist(), points.true_accepts.tolist(), strict=True)) == plain
    assert points.auc == pytest.approx(plain_auc(genuine, impostor), abs=1e-12)
    assert points.eer == pytest.approx(plain_eer(genuine, impostor), abs=1e-12)


def test_roc_of_a_worked_example():
    # Scores, best first: G I G G I I. After each one: FAR 0 1/3 1/3 1/3 2/3 1, TAR 1/3 1/3 2/3 1 1 1.
    points = verification.operating_points(np.array([6.0, 4.0, 3.0]), np.array([5.0, 2.0, 1.0]))
    assert points.auc == pytest.approx(7 / 9)
    # FAR stays 1/3 while FRR falls from 2/3 through 1/3 to 0.
    assert points.eer == pytest.approx(1 / 3)
    assert points.far.tolist() == pytest.approx([0, 0, 1 / 3, 1 / 3, 1 / 3, 2 / 3, 1])
    assert points.tar.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 2 / 3, 1, 1, 1])


def test_eer_is_nought_for_a_perfect_and_one_for_an_inverted_score():
    low, high = np.array([0.0, 1.0]), np.array([2.0, 3.0])
    assert verification.operating_points(high, low).eer == 0
    assert verification.operating_points(high, low).auc == 1
    assert verification.operating_points(low, high).eer == 1
    assert verification.operating_points(low, high).auc == 0


@pytest.mark.parametrize("seed", range(3))
def test_tar_at_far_is_the_best_that_keeps_the_rate(seed):
    rng = np.random.default_rng(seed)
    genuine, impostor = rng.integers(5, 60, 90).tolist(), rng.integers(0, 50, 230).tolist()
    points = verification.operating_points(np.array(genuine, float), np.array(impostor, float))
    for power in (1, 2):
        allowed = [t for f, t in plain_points(genuine, impostor) if f / 230 <= 10**-power]
        assert points.tar_up_to(power) == max(allowed) / 90
    assert np.isnan(points.tar_up_to(3))


def test_roc_figure_points_are_points_of_the_exact_curve():
    rng = np.random.default_rng(0)
    points = verification.operating_points(rng.normal(1, 1, 30_000), rng.normal(0, 1, 50_000))
    curve = points.curve(levels=200)
    exact = set(zip(points.far.tolist(), points.tar.tolist(), strict=True))
    assert 100 < len(curve["far"]) <= 202
    assert exact.issuperset(zip(curve["far"].tolist(), curve["tar"].tolist(), strict=True))
    assert (curve["far"][-1], curve["tar"][-1]) == (1, 1)
    assert (np.diff(curve["far"]) > 0).all()


def test_pairs_report_exactly_the_rates_that_their_impostors_resolve():
    embedding, protocol = random_pairs(5, 60)
    names = set(verification.score_pairs(embedding, protocol, np.full(120, 21.5)).metrics)
    assert names == {"accuracy", "accuracy_std", "threshold", "auc", "eer", "tar_at_far_1e-1", "xnorm"}


def test_xnorm_is_the_mean_of_the_raw_norms():
    embedding, protocol = random_pairs(6)
    norm = torch.arange(len(embedding), dtype=torch.float32)
    assert score({"embedding": torch.from_numpy(embedding), "norm": norm}, protocol).metrics["xnorm"] == 136.5


def test_rows_of_pairs_agree_with_the_accuracy():
    embedding, protocol = random_pairs(7, 120)
    scores = verification.score_pairs(embedding, protocol)
    by_fold = [scores.rows["correct"][scores.rows["fold"] == k].mean() for k in range(10)]
    assert np.mean(by_fold) == pytest.approx(scores.metrics["accuracy"])
    assert scores.rows["pair"].tolist() == list(range(120))
    assert all(len(column) == 120 for column in scores.rows.values())


def test_scores_do_not_change_with_scale_or_rotation():
    rng = np.random.default_rng(3)
    embedding = rng.normal(size=(400, 16))
    embedding[1::2] = np.where((np.arange(200) % 2 == 0)[:, None], embedding[0::2], 0) + rng.normal(size=(200, 16))
    protocol = Pairs(np.arange(0, 400, 2), np.arange(1, 400, 2), np.arange(200) % 2 == 0)
    plain = verification.score_pairs(embedding, protocol)
    assert 0.6 < plain.metrics["accuracy"] < 0.95
    scaled = verification.score_pairs(embedding * rng.uniform(0.1, 30, (400, 1)), protocol)
    rotation = np.linalg.qr(rng.normal(size=(16, 16)))[0]
    rotated = verification.score_pairs(embedding @ rotation, protocol)
    for other in (scaled, rotated):
        assert other.metrics == pytest.approx(plain.metrics, abs=1e-9)
        assert other.rows["distance"] == pytest.approx(plain.rows["distance"], abs=1e-9)


def test_chance_is_exceeded_by_about_one_guess_in_a_thousand():
    rng = np.random.default_rng(0)
    same = np.arange(60) % 2 == 0
    bound = verification.auc_chance_level(np.arange(60), np.arange(60, 120), same)["auc"]
    points = [verification.operating_points(s[same], s[~same]).auc for s in rng.random((5000, 60))]
    assert 0 < np.mean(np.array(points) > bound) < 0.004


def test_too_few_pairs_promise_nothing_about_chance():
    same = np.array([True] * 5 + [False] * 5)
    assert verification.auc_chance_level(np.arange(10), np.arange(10, 20), same) == {}


def test_torch_numpy_and_half_precision_agree():
    embedding, protocol = random_pairs(9)  # whole numbers below 5: exact in bfloat16
    expected = verification.score_pairs(embedding, protocol).metrics
    for tensor in (torch.from_numpy(embedding), torch.from_numpy(embedding).bfloat16()):
        assert verification.score_pairs(tensor, protocol).metrics == expected


def test_sets_that_cannot_be_scored_are_refused_with_the_reason():
    embedding, protocol = random_pairs(1, 12)
    nine = Pairs(protocol.first[:9], protocol.second[:9], protocol.same[:9])
    with pytest.raises(UserError, match="lfw: 9 pairs; expected at least 10"):
        score({"embedding": torch.from_numpy(embedding)}, nine, where="lfw")
    for value, word in ((True, "genuine"), (False, "impostor")):
        with pytest.raises(UserError, match=f"all 12 pairs are {word}"):
            verification.score_pairs(embedding, Pairs(protocol.first, protocol.second, np.full(12, value)))
    embedding[17] = np.nan
    with pytest.raises(UserError, match="embeddings of 1 of 24 images are not finite, the first in row 17"):
        verification.score_pairs(embedding, protocol)


def test_a_network_that_answers_the_same_to_all_gets_no_credit():
    _, protocol = random_pairs(1, 200)
    scores = verification.score_pairs(np.ones((400, 8)), protocol)
    assert scores.metrics["auc"] == 0.5
    assert scores.metrics["tar_at_far_1e-1"] == 0
    majority = max(protocol.same.mean(), 1 - protocol.same.mean())
    assert scores.metrics["accuracy"] <= majority + 1e-9


# Templates


def random_templates(seed, images=60, made=14, pairs=150, dim=5):
    rng = np.random.default_rng(seed)
    ids = rng.choice(np.arange(100, 900), made, replace=False)  # neither from 0 nor without gaps
    template = np.concatenate([ids, rng.choice(ids, images - made)])
    order = rng.permutation(images)
    media = rng.integers(0, 9, images)  # shared between templates
    person = {int(t): rng.normal(size=dim) for t in ids}
    embedding = np.stack([person[int(t)] for t in template]) + rng.normal(size=(images, dim)) * 2
    embedding = embedding.astype(np.float32)
    first, second = rng.choice(ids, pairs), rng.choice(ids, pairs)
    same = rng.random(pairs) < 0.3
    faceness = rng.uniform(0.2, 1, images).astype(np.float32)
    return embedding[order], Templates(template[order], media[order], faceness[order], first, second, same)


def plain_templates(embedding, protocol):
    """Template features step by step: weigh images, average in media, sum over media, normalise."""
    features = {}
    for t in sorted(set(protocol.template.tolist())):
        media = {}
        for i in range(len(embedding)):
            if protocol.template[i] == t:
                vector = [float(v) for v in embedding[i]]
                vector = [v * float(protocol.faceness[i]) for v in vector]
                media.setdefault(int(protocol.media[i]), []).append(vector)
        means = [[sum(column) / len(of) for column in zip(*of, strict=True)] for of in media.values()]
        total = [sum(column) for column in zip(*means, strict=True)]
        length = math.sqrt(sum(v * v for v in total))
        features[t] = [v / length for v in total]
    return features


def test_template_features_and_cosines_equal_ones_written_out_in_loops(monkeypatch):
    monkeypatch.setattr(ijb_templates, "IMAGES_AT_ONCE", 7)
    monkeypatch.setattr(ijb_templates, "PAIRS_AT_ONCE", 11)
    embedding, protocol = random_templates(0)
    plain = plain_templates(embedding, protocol)
    ids, unit = ijb_templates.pool(embedding, protocol)
    assert ids.tolist() == list(plain)
    assert unit == pytest.approx(np.array(list(plain.values())), abs=1e-6)
    score_of = ijb_templates.score_templates(embedding, protocol).rows["score"]
    expected = [
        sum(x * y for x, y in zip(plain[a], plain[b], strict=True))
        for a, b in zip(protocol.first.tolist(), protocol.second.tolist(), strict=True)
    ]
    assert score_of == pytest.approx(expected, abs=1e-6)


def test_template_of_a_worked_example():
    # Two frames (6, 0) and (0, 8) of one video average to (3, 4); a still (0, 1) is added: (3, 5).
    embedding = np.array([[6, 0], [0, 8], [0, 1]], dtype=np.float32)
    protocol = Templates(
        np.full(3, 4), np.array([7, 7, 9]), np.ones(3, np.float32), np.array([4]), np.array([4]), np.array([True])
    )
    ids, unit = ijb_templates.pool(embedding, protocol)
    assert ids.tolist() == [4]
    assert unit[0] == pytest.approx(np.array([3, 5]) / math.sqrt(34))


@pytest.mark.parametrize("seed", range(3))
def test_tar_at_the_nearest_far_equals_one_written_out_in_loops(seed):
    rng = np.random.default_rng(seed)
    genuine, impostor = rng.integers(5, 60, 90).tolist(), rng.integers(0, 50, 235).tolist()
    points = verification.operating_points(np.array(genuine, float), np.array(impostor, float))
    for power in (1, 2):
        nearest = min(abs(f * 10**power - 235) for f, _ in plain_points(genuine, impostor))
        ties = [p for p in plain_points(genuine, impostor) if abs(p[0] * 10**power - 235) == nearest]
        assert points.tar_nearest(power) == max(t for _, t in ties) / 90


def test_nearest_far_takes_the_largest_tar_of_two_equally_near():
    # 15 impostors: a rate of 0.1 is 1.5 of them, as near to 1 as to 2. At two accepted impostors three genuine pass.
    impostor = np.arange(15, 0, -1, dtype=float)
    genuine = np.array([14.5, 13.5, 13.2, 0.5])
    points = verification.operating_points(genuine, impostor)
    assert points.tar_up_to(1) == 0.25
    assert points.tar_nearest(1) == 0.75


def test_template_scores_come_from_their_cosines():
    embedding, protocol = random_templates(1, images=200, made=40, pairs=900)
    scores = score({"embedding": torch.from_numpy(embedding), "norm": torch.full((200,), 2.0)}, protocol)
    value = scores.rows["score"].tolist()
    genuine = [v for v, s in zip(value, protocol.same, strict=True) if s]
    impostor = [v for v, s in zip(value, protocol.same, strict=True) if not s]
    assert scores.metrics["auc"] == pytest.approx(plain_auc(genuine, impostor), abs=1e-12)
    assert set(scores.metrics) == {"auc", "eer", "tar_at_far_1e-1", "tar_at_far_1e-2", "xnorm"}
    assert scores.metrics["xnorm"] == 2.0


def test_template_table_keeps_all_genuine_and_the_most_alike_impostors(monkeypatch):
    embedding, protocol = random_templates(2)
    full = ijb_templates.score_templates(embedding, protocol).rows
    monkeypatch.setattr(ijb_templates, "IMPOSTORS_KEPT", 5)
    kept = ijb_templates.score_templates(embedding, protocol).rows
    assert int(kept["same"].sum()) == int(protocol.same.sum())
    impostors = np.sort(full["score"][~protocol.same])
    assert np.sort(kept["score"][~kept["same"]]).tolist() == impostors[-5:].tolist()
    assert (np.diff(kept["pair"]) > 0).all()
    assert (full["score"][kept["pair"]] == kept["score"]).all()


def test_a_pair_that_names_an_absent_template_is_refused():
    embedding, protocol = random_templates(0)
    second = protocol.second.copy()
    second[31] = 5000
    broken = Templates(protocol.template, protocol.media, protocol.faceness, protocol.first, second, protocol.same)
    with pytest.raises(UserError, match="ijbb: pair 31 names template 5000 as second"):
        score({"embedding": torch.from_numpy(embedding)}, broken, where="ijbb")


# Identification


def random_gallery(seed, people=12, probes=40, distractors=70, dim=6):
    rng = np.random.default_rng(seed)
    centre = rng.normal(size=(people, dim)) * 2
    probe_label = rng.integers(0, people, probes)
    match_label = np.concatenate([np.arange(people), rng.integers(0, people, 9)])
    known = np.concatenate([probe_label, match_label])
    label = np.concatenate([known, np.full(distractors, -100)])
    mean = np.concatenate([centre[known], np.zeros((distractors, dim))])
    embedding = (mean + rng.normal(size=mean.shape) * 1.5).round().astype(np.float32)
    embedding[(embedding == 0).all(axis=1)] = 1
    order = rng.permutation(len(label))
    place = np.argsort(order)
    rows = np.arange(len(label))
    protocol = Identification(place[rows[:probes]], place[rows[probes:]], label[order])
    return embedding[order], protocol


def plain_ranks(embedding, protocol):
    out = []
    rows = embedding.astype(np.float64)
    for p in protocol.probe.tolist():
        cosines = []
        for g in protocol.gallery.tolist():
            cosine = rows[p] @ rows[g] / math.sqrt((rows[p] @ rows[p]) * (rows[g] @ rows[g]))
            cosines.append((round(cosine, 6), protocol.label[g] == protocol.label[p]))
        best = max(c for c, match in cosines if match)
        out.append(1 + sum(1 for c, match in cosines if not match and c >= best))
    return out


@pytest.mark.parametrize("seed", range(3))
def test_ranks_equal_ones_written_out_in_loops(seed, monkeypatch):
    embedding, protocol = random_gallery(seed)
    # No exact ties here: which of two equal cosines a matrix product rounds up is not defined.
    embedding += np.random.default_rng(seed).normal(size=embedding.shape).astype(np.float32) * 0.05
    monkeypatch.setattr(identification, "SCORES_AT_ONCE", 7 * len(protocol.gallery))
    scores = score({"embedding": torch.from_numpy(embedding)}, protocol)
    expected = plain_ranks(embedding, protocol)
    assert scores.rows["rank"].tolist() == expected
    for k in (1, 5, 20):
        assert scores.metrics[f"rank_{k}"] == sum(r <= k for r in expected) / len(expected)
    assert 0.1 < scores.metrics["rank_1"] < scores.metrics["rank_20"] <= 1


def test_identification_of_a_worked_example():
    # Cosines of the probe to the gallery: match 0.8, match 0.6, distractor 1.0, another person 0.6 and 0.
    embedding = np.array([[1, 0], [4, 3], [3, 4], [2, 0], [3, -4], [0, 1]], dtype=np.float32)
    protocol = Identification(np.array([0]), np.arange(1, 6), np.array([3, 3, 3, -1, 8, 8]))
    scores = identification.score_identification(embedding, protocol)
    assert scores.rows["rank"].tolist() == [2]
    assert scores.rows["match_score"] == pytest.approx([0.8])
    assert scores.rows["other_score"] == pytest.approx([1.0])
    assert scores.metrics == {"rank_1": 0.0}  # 5 and 20 reach the size of the gallery


def test_a_tie_counts_against_the_probe():
    embedding = np.array([[1, 0], [1, 0], [1, 0]], dtype=np.float32)
    protocol = Identification(np.array([0]), np.array([1, 2]), np.array([3, 3, -1]))
    assert identification.score_identification(embedding, protocol).rows["rank"].tolist() == [2]


def test_a_probe_without_a_match_is_refused():
    embedding, protocol = random_gallery(0)
    label = protocol.label.copy()
    label[protocol.probe[4]] = 77
    with pytest.raises(
        UserError, match=f"1 of 40 probes have no match in the gallery, the first is row {protocol.probe[4]}"
    ):
        identification.score_identification(embedding, Identification(protocol.probe, protocol.gallery, label))
    label[protocol.probe[4]] = -100
    with pytest.raises(UserError, match="no match"):
        identification.score_identification(embedding, Identification(protocol.probe, protocol.gallery, label))


def test_a_picture_that_is_probe_and_gallery_is_refused():
    embedding, protocol = random_gallery(0)
    both = np.append(protocol.gallery, protocol.probe[0])
    with pytest.raises(UserError, match="1 images are both probe and gallery"):
        identification.score_identification(embedding, Identification(protocol.probe, both, protocol.label))


# All


def test_every_metric_name_may_be_logged_and_every_value_is_finite():
    rng = np.random.default_rng(0)
    pairs = 3000
    same = np.arange(pairs) % 2 == 0
    embedding = torch.from_numpy(rng.normal(size=(2 * pairs, 4)).astype(np.float32))
    rows = {"embedding": embedding, "norm": embedding.norm(dim=1)}
    wide = score(rows, Pairs(np.arange(pairs), np.arange(pairs, 2 * pairs), same)).metrics
    assert {"val_at_far_1e-3", "tar_at_far_1e-3", "xnorm"} <= set(wide)
    e, t = random_templates(0)
    i, g = random_gallery(0)
    every = {**wide, **score({"embedding": torch.from_numpy(e)}, t).metrics}
    every |= score({"embedding": torch.from_numpy(i)}, g).metrics
    for name, value in every.items():
        assert re.fullmatch(r"[a-z0-9_.-]+", name), name
        assert type(value) is float
        assert math.isfinite(value), name


@pytest.mark.skipif(not LFW.is_dir(), reason="the LFW images in ../shared/data are not here")
def test_pixels_of_real_faces_score_a_little_better_than_guessing():
    rows, first, second, same = {}, [], [], []
    with (LFW / "pairs.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            first.append(rows.setdefault(line["path_a"], len(rows)))
            second.append(rows.setdefault(line["path_b"], len(rows)))
            same.append(line["same"] == "1")
    grey = [Image.open(LFW / name).convert("L").resize((28, 28)) for name in rows]
    pixels = np.stack([np.asarray(picture, np.float32).ravel() for picture in grey])
    pixels -= pixels.mean(axis=1, keepdims=True)
    scores = verification.score_pairs(pixels, Pairs(np.array(first), np.array(second), np.array(same)))
    assert len(rows) == 1097
    # The best threshold on raw pixels gets 0.665 of these pairs right.
    assert 0.60 < scores.metrics["accuracy"] < 0.72
    assert scores.metrics["auc"] > scores.chance["auc"]
