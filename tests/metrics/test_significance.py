"""The bootstrap and Welch's interval against loops, SciPy and how often they are right; resampled scores against
scoring samples that are there several times."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow import parquet
from scipy import stats

from trainkit.analysis import saved_rows
from trainkit.evaluation_protocols import Classes, Identification, Pairs, Retrieval, Scenes, Search, Segmentation
from trainkit.metrics import bootstrap, significance
from trainkit.metrics.boundary_f_score import boundary_counts
from trainkit.metrics.classification import score_classes
from trainkit.metrics.identification import score_identification
from trainkit.metrics.reid import score_search
from trainkit.metrics.retrieval import score_retrieval
from trainkit.metrics.segmentation_2d import pixel_counts, score_scenes
from trainkit.metrics.segmentation_3d import score_segmentation
from trainkit.metrics.significance import Interval, Units
from trainkit.metrics.surface_distance import SCORES, case_scores
from trainkit.metrics.verification import ACCURACY_GRID, FOLDS, operating_points, score_pairs
from trainkit.tracking.tracker import _write_table


def all_times(units: Units, draws: int) -> np.ndarray:
    return np.concatenate(list(significance.draw_counts(units, draws)))


# ---- Drawing ---------------------------------------------------------------------------------------------------------


def test_as_many_units_are_drawn_as_there_are_each_with_all_its_rows():
    units = Units.by(["b", "a", "b", None, "c", "a"], "people")
    assert units.count == 4 and str(units) == "4 people"
    often = all_times(units, 700)
    assert often.shape == (700, 6) and often.min() == 0
    assert (often[:, 0] == often[:, 2]).all() and (often[:, 1] == often[:, 5]).all()
    assert (often[:, 0] + often[:, 1] + often[:, 3] + often[:, 4] == 4).all()
    assert len(np.unique(often, axis=0)) > 20
    assert (often == all_times(Units("rows", units.of), 700)).all(), "the draws depend on the number of units alone"


def test_a_row_of_two_units_counts_half_for_each():
    of, also = np.array([0, 0, 2, 1]), np.array([0, 1, 1, 1])
    alone, often = (all_times(Units("people", *which), 500) for which in ((np.arange(3),), (of, also)))
    for row, drawn in zip(often.tolist(), alone.tolist(), strict=True):
        a, b, c = drawn
        assert row == [(a + 1) / 2, (a + b) / 2, (c + b) / 2, (b + 1) / 2]
    assert often.max() > 1 and (often == 0).any()
    assert Units("people", of, also).independent == 1 and Units("people", of).independent == 3


def test_blocks_do_not_change_what_is_drawn(monkeypatch):
    units = Units("images", np.arange(11))
    whole = all_times(units, 300)
    monkeypatch.setattr(significance, "_DRAWS_AT_ONCE", 7)
    assert (all_times(units, 300) == whole).all()
    draw = np.random.Generator(np.random.Philox(key=significance.rng.number(0, "bootstrap"))).integers(
        11, size=(300, 11)
    )
    assert (whole == [[list(line).count(k) for k in range(11)] for line in draw.tolist()]).all()


def test_sums_and_means_are_those_of_loops():
    rng = np.random.default_rng(0)
    values, of = rng.normal(size=(5, 40)), rng.integers(-1, 6, 40)
    of[of == 3] = 2  # a group without rows
    expected = [[sum(line[i] for i in range(40) if of[i] == g) for g in range(6)] for line in values]
    assert significance.group_sums(values, of, 6) == pytest.approx(np.array(expected))
    assert significance.group_sums(values, np.full(40, -1), 2).tolist() == np.zeros((5, 2)).tolist()
    column, often = rng.normal(size=(8, 2)), rng.integers(0, 3, (6, 8)).astype(float)
    column[2, 0] = column[5] = math.nan
    often[0] = [0, 0, 3, 0, 0, 1, 0, 0]
    got = significance.mean(column, often)
    for d in range(6):
        for k in range(2):
            repeated = [v for v, n in zip(column[:, k], often[d], strict=True) for _ in range(int(n)) if v == v]
            expected = sum(repeated) / len(repeated) if repeated else math.nan
            assert got[d, k] == pytest.approx(expected, nan_ok=True)
    some = significance.nan_mean(np.array([[1.0, math.nan, 3.0], [math.nan] * 3]))
    assert math.isnan(got[0, 0]) and some[0] == 2.0


# ---- Intervals -------------------------------------------------------------------------------------------------------


def test_an_interval_is_the_percentiles_widened_for_few_units():
    drawn = np.random.default_rng(1).normal(size=50_000)
    for units, level in ((1000, 0.95), (12, 0.95), (30, 0.99)):
        tail = stats.norm.cdf(math.sqrt(units / (units - 1)) * stats.t.ppf((1 - level) / 2, units - 1))
        found = significance.bootstrap_interval(0.1, drawn, units, level)
        ends = np.quantile(drawn, (tail, 1 - tail)) - drawn.mean() + 0.1
        assert (found.low, found.high) == pytest.approx(tuple(ends))
    assert significance.bootstrap_interval(0.0, drawn, 1000).high == pytest.approx(1.96, abs=0.05)


def test_draws_that_lean_to_one_side_are_centred():
    drawn = np.random.default_rng(1).exponential(size=5000)
    found, moved = (significance.bootstrap_interval(0.3, drawn + by, 1000) for by in (0.0, -7.0))
    assert (found.low, found.high) == pytest.approx((moved.low, moved.high))
    assert found.low == pytest.approx(0.3 - 1 + 0.025, abs=0.01) and found.high == pytest.approx(0.3 + 2.69, abs=0.15)


def test_of_few_units_the_interval_is_right_as_often_as_it_says():
    rng = np.random.default_rng(2)
    often = all_times(Units("cases", np.arange(8)), 2000)
    values = rng.normal(size=(8, 400))
    drawn = often @ values / 8
    expanded = plain = 0
    for k in range(400):
        found = significance.bootstrap_interval(float(values[:, k].mean()), drawn[:, k], 8)
        expanded += found.low <= 0 <= found.high
        low, high = np.quantile(drawn[:, k], (0.025, 0.975))
        plain += low <= 0 <= high
    assert 0.92 <= expanded / 400 <= 0.985 and plain + 8 < expanded


def test_of_many_pairs_the_interval_is_that_of_scipy():
    rng = np.random.default_rng(20)
    hard = rng.normal(size=400)
    one, other = (hard + rng.exponential(0.3, 400) for _ in range(2))
    drawn = all_times(Units("images", np.arange(400)), 4000) @ np.stack([one, other], 1) / 400
    found = significance.bootstrap_interval(float((other - one).mean()), drawn[:, 1] - drawn[:, 0], 400)
    expected = stats.bootstrap(
        (one, other), lambda a, b, axis: (b - a).mean(axis), paired=True, vectorized=True, n_resamples=4000,
        method="percentile", rng=np.random.default_rng(21),
    ).confidence_interval  # fmt: skip
    wide = found.high - found.low
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.06 * wide)
    # What is hard for both counts for neither: two test sets would lie much further apart.
    assert wide == pytest.approx(2 * 1.96 * (other - one).std() / 20, rel=0.06)
    apart = 2 * 1.96 * math.hypot(one.std(), other.std()) / 20
    assert wide < 0.4 * apart


def test_five_units_decide_nothing_and_six_may():
    drawn = np.linspace(0.1, 0.3, 2000)
    five, six = (significance.bootstrap_interval(0.2, drawn, units) for units in (5, 6))
    assert five.low > 0 and five.apart == 0 and six.apart == 1
    assert significance.bootstrap_interval(0.2, drawn, 6, level=0.99).apart == 0
    assert (
        significance.bootstrap_interval(0.2, drawn, 1) is None
        and significance.bootstrap_interval(math.nan, drawn, 9) is None
    )


def test_draws_without_a_score_are_left_out_while_they_are_few():
    drawn = np.linspace(-1, 1, 1000)
    drawn[:40] = math.nan
    assert significance.bootstrap_interval(0.0, drawn, 100).low == pytest.approx(-0.92, abs=0.02)
    drawn[:60] = math.nan
    assert significance.bootstrap_interval(0.0, drawn, 100) is None


@pytest.mark.parametrize("sign", [1, -1])
def test_one_image_that_tells_two_networks_apart_decides_nothing(sign):
    """A third of the draws lacks it; centring them moved that end past 0."""
    other = np.zeros(200)
    other[17] = sign
    found = significance.resampled(
        significance.Units.by(range(200), "images"), lambda often: {"top1": significance.mean(other, often)}
    )
    interval = significance.bootstrap_interval(sign / 200, found["top1"], 200)
    assert interval.apart == 0 and 0 in (interval.low, interval.high)
    other[:17] = sign
    found = significance.resampled(
        significance.Units.by(range(200), "images"), lambda often: {"top1": significance.mean(other, often)}
    )
    assert significance.bootstrap_interval(18 * sign / 200, found["top1"], 200).apart == sign


@pytest.mark.parametrize("person", [0.0, 0.5, 1.0])
def test_intervals_of_pairs_of_people_are_as_wide_as_people_and_pairs_make_them(person):
    """Means over 600 pairs of 100 people, a share `person` of whose variance is of the two people of a pair."""
    rng, people, many, graphs, each = np.random.default_rng(33), 100, 600, 8, 100
    held, said, found = [], [], []
    for _ in range(graphs):
        of = rng.integers(0, people, many)
        units = Units("people", of, (of + rng.integers(1, people, many)) % people)
        own = math.sqrt(person / 2) * rng.normal(size=(people, each))
        values = own[units.of] + own[units.also] + math.sqrt(1 - person) * rng.normal(size=(many, each))
        drawn = significance.resampled(
            units, lambda t, v=values: dict(enumerate((t @ v / t.sum(1, keepdims=True)).T)), 600
        )
        for k, mean in enumerate(values.mean(0).tolist()):
            interval = significance.bootstrap_interval(mean, drawn[k], units.independent)
            held.append(interval.low <= 0 <= interval.high)
            said.append(drawn[k].var())
            found.append(mean)
    assert 0.93 <= np.mean(held) <= 0.97
    assert math.sqrt(np.mean(said)) == pytest.approx(np.std(found), rel=0.1)


def test_pairs_of_one_person_are_drawn_as_their_person():
    rng, of = np.random.default_rng(34), np.repeat(np.arange(40), 3)
    values = rng.normal(size=40)[of] + rng.normal(size=120)
    drawn = [
        significance.resampled(units, lambda t: {"mean": t @ values / t.sum(1)})["mean"]
        for units in (Units("people", of), Units("people", of, of))
    ]
    assert np.std(drawn[0]) == pytest.approx(np.std(drawn[1]), rel=0.1)


def test_what_does_not_vary_over_pairs_stays_as_it_is():
    units = Units("people", np.array([0, 1, 2]), np.array([1, 2, 0]))
    drawn = significance.resampled(units, lambda t: {"same": np.ones(len(t)), "none": np.full(len(t), np.nan)}, 8)
    assert drawn["same"].tolist() == [1.0] * 8 and np.isnan(drawn["none"]).all()


def test_the_interval_of_a_share_near_1_is_right_as_often_as_it_says():
    """Of sets that seem easy the interval is as wide as of those that seem hard: it is found of the log odds."""
    rng, many, truth, held = np.random.default_rng(35), 80, 0.93, []
    rows = {"probe": np.arange(many), "label": np.arange(many), "match_score": np.zeros(many)}
    for _ in range(300):
        hit = rng.random(many) < truth
        found, units = saved_rows.intervals(rows | {"rank": np.where(hit, 1, 2)}, {"rank_1": float(hit.mean())}, 300)
        assert 0 <= found["rank_1"].low <= hit.mean() <= found["rank_1"].high <= 1 and units == "80 people"
        held.append(found["rank_1"].low <= truth <= found["rank_1"].high)
    assert 0.93 <= np.mean(held) <= 0.97


def test_an_interval_of_log_odds_holds_a_share_of_0_or_1():
    for share in (0.0, 0.3, 0.99, 1.0):
        odds = float(significance.log_odds(share, 50))
        found = significance.from_log_odds(Interval(odds, odds - 2, odds + 2), share)
        assert 0 <= found.low <= share <= found.high <= 1 and found.high - found.low > 0.01
    assert np.isnan(significance.log_odds(np.array([math.nan]), 50)).all()


def test_welch_is_that_of_scipy():
    rng = np.random.default_rng(3)
    for sizes in ((2, 2), (5, 3), (4, 9)):
        one, other = rng.normal(0.8, 0.01, sizes[0]), rng.normal(0.82, 0.03, sizes[1])
        found = significance.welch(one.tolist(), other.tolist(), 0.9)
        expected = stats.ttest_ind(other, one, equal_var=False).confidence_interval(0.9)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
        assert found.difference == pytest.approx(other.mean() - one.mean())
    assert significance.welch([0.5], [0.6, 0.7]) is None and significance.welch([0.5, math.nan], [0.6, 0.7]) is None
    same = significance.welch([0.5, 0.5], [0.6, 0.6])
    assert same.low == same.high == pytest.approx(0.1) and same.apart == 0


def test_a_verdict_needs_every_interval_on_one_side():
    up, down, around = Interval(0.2, 0.1, 0.3), Interval(-0.2, -0.3, -0.1), Interval(0.0, -0.1, 0.1)
    assert (
        significance.verdict([up])
        == significance.verdict([up, up])
        == significance.verdict([down], lower_is_better=True)
        == "better"
    )
    assert significance.verdict([down]) == significance.verdict([up], lower_is_better=True) == "worse"
    for undecided in ([], [around], [up, around], [up, down], [Interval(0.0, 0.0, 0.0)]):
        assert significance.verdict(undecided) == significance.verdict(undecided, lower_is_better=True) == "not decided"


# ---- Scores of what is drawn -----------------------------------------------------------------------------------------


def kept(scores, tmp_path) -> dict[str, np.ndarray]:
    """Rows as they come back from the file of a run."""
    _write_table(tmp_path / "rows.parquet", scores.rows)
    table = parquet.read_table(tmp_path / "rows.parquet")
    return {name: saved_rows._column(table[name]) for name in table.column_names}


def check(rows: dict, module: str, logged: dict, names: set[str]) -> bootstrap.Kind:
    """That these rows are known as what they are, and all of them once score what was logged."""
    kind = bootstrap.kind(rows)
    assert kind.units.__module__ == f"trainkit.metrics.{module}"
    whole = kind.resampled(rows, np.ones((1, len(next(iter(rows.values()))))))
    for name in names:
        assert whole[name][0] == pytest.approx(logged[name], rel=1e-9), name
    assert bootstrap.why_not_comparable(rows, rows) == ""
    return kind


def some_times(size: int, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 4, size)


@pytest.mark.parametrize("classes", [2, 7])
def test_classes_are_scored_as_pictures_that_are_there_several_times(classes, tmp_path):
    rng = np.random.default_rng(classes)
    label = rng.integers(-1, classes, 90)
    logits = rng.normal(size=(90, classes)) + 1.5 * np.eye(classes)[label]
    names = tuple(f"class {k}" for k in range(classes))
    scores = score_classes(logits, Classes(label, names))
    asked = {"top1", "balanced_accuracy", "f1_macro", "nll", "ece"}
    asked |= {"accuracy", "f1", "auc"} if classes == 2 else {"top5"}
    assert asked == set(scores.metrics)
    rows = kept(scores, tmp_path)
    kind = check(rows, "classification", scores.metrics, asked)
    assert kind.units(rows).count == 90
    often = some_times(90)
    again = score_classes(np.repeat(logits, often, 0), Classes(np.repeat(label, often), names)).metrics
    got = kind.resampled(rows, np.stack([np.ones(90), often]))
    assert {name: got[name][1] for name in asked} == pytest.approx(again)
    alone = kind.resampled(rows, (label == 0)[None].astype(float))
    assert classes > 2 or math.isnan(alone["auc"][0])


def test_pictures_of_a_group_are_drawn_together(tmp_path):
    rng = np.random.default_rng(13)
    label, group = rng.integers(0, 3, 40), rng.integers(4, 11, 40)
    scores = score_classes(rng.normal(size=(40, 3)), Classes(label, ("a", "b", "c"), group=group))
    rows = kept(scores, tmp_path)
    units = bootstrap.kind(rows).units(rows)
    assert str(units) == f"{len(set(group.tolist()))} groups"
    assert {(a == b) for a, b in zip(group[1:] == group[:-1], units.of[1:] == units.of[:-1], strict=True)} == {True}
    other = rows | {"group": rows["group"][::-1]}
    assert bootstrap.why_not_comparable(rows, other) == "their rows differ in 'group'"


def pairs(rng, many: int = 120) -> tuple[np.ndarray, Pairs]:
    person = rng.integers(0, 25, 80)
    embedding = rng.normal(size=(80, 6)) + 2.0 * rng.normal(size=(25, 6))[person]
    first, second = rng.integers(0, 80, (2, many))
    return embedding, Pairs(first, second, person[first] == person[second])


def test_pairs_are_scored_as_pairs_that_are_there_several_times(tmp_path):
    rng = np.random.default_rng(11)
    embedding, protocol = pairs(rng, 400)
    scores = score_pairs(embedding, protocol)
    rows = kept(scores, tmp_path)
    kind = check(rows, "verification", scores.metrics, {"accuracy", "auc", "eer", "tar_at_far_1e-1", "tar_at_far_1e-2"})
    often = some_times(400)
    got = {name: values[0] for name, values in kind.resampled(rows, often[None].astype(float)).items()}
    distance, same, fold = (np.repeat(rows[name], often) for name in ("distance", "same", "fold"))
    points = operating_points(-distance[same], -distance[~same])
    assert (got["auc"], got["eer"]) == pytest.approx((points.auc, points.eer))
    assert got["tar_at_far_1e-1"] == pytest.approx(points.tar_up_to(1))
    accuracy = []
    for k in range(FOLDS):
        inside = fold == k
        right = [((distance < t) == same)[~inside].sum() for t in ACCURACY_GRID]
        accuracy.append(((distance < ACCURACY_GRID[int(np.argmax(right))]) == same)[inside].mean())
    assert got["accuracy"] == pytest.approx(np.mean(accuracy))
    assert math.isnan(got["tar_at_far_1e-4"]), "so few impostors cannot resolve it"
    one_fold = kind.resampled(rows, (rows["fold"] == 3)[None].astype(float))["accuracy"]
    assert 0 <= one_fold[0] <= 1


def test_who_a_person_is_the_same_pairs_say():
    # 0 = 1 = 2 by same pairs, 3 = 4; 5 and 6 are only in different pairs.
    rows = {
        "first": np.array([0, 2, 3, 5, 1, 4, 6]),
        "second": np.array([1, 1, 4, 0, 3, 6, 5]),
        "same": np.array([True, True, True, False, False, False, False]),
        "distance": np.zeros(7),
        "fold": np.zeros(7, int),
    }
    units = bootstrap.kind(rows).units(rows)
    groups = {frozenset(np.flatnonzero(units.of == k).tolist()) for k in set(units.of.tolist())}
    assert groups == {frozenset({0, 1, 4}), frozenset({2, 5}), frozenset({3}), frozenset({6})}
    assert (units.of == units.also).tolist() == rows["same"].tolist() and units.count == 4
    assert units.also[3] == units.of[0] and units.also[4] == units.of[2] and units.also[5] == units.of[6]


def test_probes_are_drawn_with_their_person(tmp_path):
    rng = np.random.default_rng(4)
    label = np.concatenate([np.repeat(np.arange(10), 4), np.full(15, -1)])
    embedding = rng.normal(size=(55, 5)) + np.where(label >= 0, 1, 0)[:, None] * rng.normal(size=(11, 5))[label]
    probe = np.flatnonzero((np.arange(55) % 4 > 0) & (label >= 0))
    gallery = np.setdiff1d(np.arange(55), probe)
    scores = score_identification(embedding.astype(np.float32), Identification(probe, gallery, label))
    rows = kept(scores, tmp_path)
    kind = check(rows, "identification", scores.metrics, {"rank_1", "rank_5", "rank_20"})
    assert kind.units(rows).count == 10
    often = some_times(30)
    rank = np.repeat(rows["rank"], often)
    assert kind.resampled(rows, often[None].astype(float))["rank_5"][0] == pytest.approx((rank <= 5).mean())


def test_retrieval_draws_classes_where_there_are_many(tmp_path):
    rng = np.random.default_rng(6)
    for classes, units in ((30, "classes"), (6, "images")):
        label = np.concatenate([np.repeat(np.arange(classes), 3), [classes, -1]])  # an only one, and an unlabelled one
        embedding = rng.normal(size=(len(label), 4)) + rng.normal(size=(classes + 2, 4))[label]
        scores = score_retrieval(embedding, Retrieval(label))
        rows = kept(scores, tmp_path)
        kind = check(rows, "retrieval", scores.metrics, set(scores.metrics))
        assert kind.units(rows).word == units
        often = some_times(len(label))
        asked = np.repeat(rows["relevant"] > 0, often)
        expected = np.repeat(rows["map_at_r"], often)[asked].mean()
        assert kind.resampled(rows, often[None].astype(float))["map_at_r"][0] == pytest.approx(expected)


def test_searches_are_means_over_groups_of_lists(tmp_path):
    rng = np.random.default_rng(8)
    person = np.repeat(np.arange(12), 6)
    features = torch.tensor(rng.normal(size=(72, 5)) + rng.normal(size=(12, 5))[person])
    colour, others = np.flatnonzero(np.arange(72) % 6 < 3), np.flatnonzero(np.arange(72) % 6 >= 3)
    queries = {}
    for k, name in enumerate(("nir", "text", "nir_text")):
        asked = np.full((12, 5), -1)
        asked[:, 1] = others[k::3]
        queries[name] = asked
    groups = {"modal_1": ("nir", "text"), "modal_2": ("nir_text",)}
    gallery = colour[rng.random(36) < 0.6]
    protocol = Search(person, np.full(72, -1), gallery, queries, tuple(map(str, range(72))), groups=groups)
    scores = score_search(features, protocol, lambda x, there: x.sum(1))
    rows = kept(scores, tmp_path)
    kind = check(rows, "reid", scores.metrics, set(scores.metrics) - {"unmatched"})
    assert kind.units(rows).count == 12
    drawn = rng.integers(0, 3, 12)
    often = drawn[rows["person"]]
    got = kind.resampled(rows, often[None].astype(float))
    of_list = {}
    for name in queries:
        lines = zip(rows["ap"], often, rows["relevant"], rows["list"], strict=True)
        own = [ap for ap, n, relevant, title in lines for _ in range(n) if relevant and title == name]
        of_list[name] = sum(own) / len(own)
    assert got["nir.map"][0] == pytest.approx(of_list["nir"])
    expected = ((of_list["nir"] + of_list["text"]) / 2 + of_list["nir_text"]) / 2
    assert got["map"][0] == pytest.approx(expected)


def volumes(size: int) -> dict[str, torch.Tensor]:
    draw, out = np.random.default_rng(9), []
    for k in range(size):
        truth = np.zeros((4, 8, 8), np.uint8)
        truth[1:3, 2:6, 2:5], truth[3, 4:, :4] = 1, 2
        found = np.where(draw.random(truth.shape) < 0.8, truth, draw.integers(0, 3, truth.shape)).astype(np.uint8)
        if k == 1:  # an organ that neither has
            truth[truth == 2] = 0
            found[found == 2] = 0
        out.append(case_scores(found, truth, (3.0, 0.5, 0.5), 3, [1.0] * 2))
    return {name: torch.tensor(np.stack([scores[name] for scores in out])) for name in SCORES}


def test_volumes_are_scored_as_cases_that_are_there_several_times(tmp_path):
    found, names = volumes(9), ("background", "SR", "Optic nerve")
    ids, patients = [f"case{k}" for k in range(9)], [f"p{k // 2}" for k in range(9)]
    scores = score_segmentation(found, Segmentation(tuple(ids), tuple(patients), names, "whole"))
    rows = kept(scores, tmp_path)
    asked = {m for m in scores.metrics if m not in ("missed", "invented", "cases", "dice_mean_low", "dice_mean_high")}
    kind = check(rows, "segmentation_3d", scores.metrics, asked)
    units = kind.units(rows)
    assert units.count == 5 and len(asked) == 18
    often = some_times(9)
    again = score_segmentation(
        {name: values[np.repeat(np.arange(9), often)] for name, values in found.items()},
        Segmentation(tuple(np.repeat(ids, often)), tuple(np.repeat(patients, often)), names, "whole"),
    ).metrics
    got = kind.resampled(rows, often[None].astype(float))
    assert {name: got[name][0] for name in asked} == pytest.approx({name: again[name] for name in asked})
    # The interval that the run itself logs is of the same draws.
    drawn = kind.resampled(rows, all_times(units, significance.DRAWS))["dice_mean"]
    ends = (scores.metrics["dice_mean_low"], scores.metrics["dice_mean_high"])
    assert significance.percentile_interval(drawn, 5) == pytest.approx(ends)


def test_scenes_are_scored_as_pictures_that_are_there_several_times(tmp_path):
    draw = np.random.default_rng(10)
    mask = draw.integers(0, 4, (7, 9, 11))
    found = np.where(draw.random(mask.shape) < 0.6, mask, draw.integers(0, 4, mask.shape))
    mask[draw.random(mask.shape) < 0.1] = 255
    mask, found, names = torch.tensor(mask.astype(np.uint8)), torch.tensor(found), ("a", "b", "c", "d", "never")
    asked = {"miou", "pixel_accuracy", "mean_accuracy", "fwiou", "boundary_f"}

    def scored(which):
        counts = pixel_counts(found[which], mask[which], 5) | boundary_counts(found[which], mask[which], 5, 1.0)
        protocol = Scenes(tuple(f"scene{k}" for k in which), names)
        return score_scenes({name: many.float() for name, many in counts.items()}, protocol)

    scores = scored(np.arange(7))
    rows = kept(scores, tmp_path)
    kind = check(rows, "segmentation_2d", scores.metrics, asked)
    often = some_times(7)
    again = scored(np.repeat(np.arange(7), often)).metrics
    got = kind.resampled(rows, often[None].astype(float))
    assert {name: got[name][0] for name in asked} == pytest.approx({name: again[name] for name in asked})
    # The rows have no names of classes; those that a run has logged are in their order, without that which never is.
    whole = kind.resampled(rows, np.ones((1, 7)))
    classes = {f"{start}.{name}" for start in ("iou", "boundary_f") for name in "abcd"}
    assert classes == {name for name in scores.metrics if "." in name}
    by_name = bootstrap.by_class_name(got, whole, list(scores.metrics))
    assert {name: by_name[name][0] for name in classes} == pytest.approx({name: again[name] for name in classes})
    assert bootstrap.by_class_name(got, whole, ["iou.a", "iou.b"]).keys() == asked, "too few to tell which is which"


def test_rows_of_a_task_of_ones_own_have_the_means_of_their_columns():
    rows = {"patient": np.array(["a", "a", "b"], object), "score": np.array([1.0, 3.0, 5.0]), "vector": np.ones((3, 2))}
    kind = bootstrap.kind(rows)
    assert kind.units(rows).of.tolist() == [0, 0, 1] and str(kind.units(rows)) == "2 patients"
    assert kind.resampled(rows, np.array([[1.0, 1.0, 2.0]])) == {"score": pytest.approx([3.5])}
    assert (
        bootstrap.kind({"label": 0, "prediction": 0, "confidence": 0, "probability": 0, "outlier_distance": 0}) == kind
    )


def test_rows_of_other_samples_are_told():
    rng = np.random.default_rng(12)
    first, second = (score_pairs(*pairs(rng)).rows for _ in range(2))
    assert bootstrap.why_not_comparable(first, second) == "their rows differ in 'first'"
    short = {name: column[:-1] for name, column in first.items()}
    assert bootstrap.why_not_comparable(first, short) == "120 rows against 119"
    assert bootstrap.why_not_comparable(first, {"hit": np.ones(120)}) == "they were evaluated by different protocols"
    better = first | {"distance": first["distance"] / 2}
    assert bootstrap.why_not_comparable(first, better) == "", "what came out may differ"


# ---- How often intervals are right: simulated test sets of which the truth is known ----------------------------------


def test_cases_of_a_patient_are_drawn_together_or_the_interval_is_too_narrow():
    rng, patients, each, sets = np.random.default_rng(30), 40, 5, 1000
    gaps = (rng.normal(size=(patients, 1, sets)) + rng.normal(size=(patients, each, sets))).reshape(-1, sets)
    held = {}
    for word, of in (("patients", np.repeat(np.arange(patients), each)), ("cases", np.arange(patients * each))):
        units = Units(word, of)
        often = all_times(units, 1000)
        drawn = often @ gaps / often.sum(1, keepdims=True)
        found = [
            significance.bootstrap_interval(float(gaps[:, k].mean()), drawn[:, k], units.count) for k in range(sets)
        ]
        held[word] = np.mean([interval.low <= 0 <= interval.high for interval in found])
    assert 0.91 <= held["patients"] <= 0.97 and held["cases"] < 0.85


def judged(rows: list[dict], draws: int) -> dict[str, int]:
    """On which side of 0 the intervals of the differences between two networks lie, by metric."""
    kind, size = bootstrap.kind(rows[0]), len(next(iter(rows[0].values())))
    units = kind.units(rows[0])

    def gaps(times: np.ndarray) -> dict[str, np.ndarray]:
        one, other = (kind.resampled(own, times) for own in rows)
        return {name: other[name] - one[name] for name, values in one.items() if values.ndim == 1}

    whole = gaps(np.ones((1, size)))
    drawn = significance.resampled(units, gaps, draws)
    found = {
        name: significance.bootstrap_interval(float(whole[name][0]), drawn[name], units.independent) for name in drawn
    }
    return {name: interval.apart for name, interval in found.items() if interval is not None}


@pytest.mark.slow
@pytest.mark.parametrize("person", [0.0, 0.5])
def test_of_two_networks_that_are_as_good_one_in_twenty_seems_better_by_pairs_of_faces(person):
    """Each fails at images of its own, and at `person` at people of its own; some images are hard for both."""
    rng, people, each, many, apart = np.random.default_rng(31), 100, 4, 300, {}
    of = np.repeat(np.arange(people), each)
    for _ in range(150):
        who = np.repeat(rng.integers(0, people, many), 2).reshape(-1, 2)
        who[many // 2 :, 1] = (who[many // 2 :, 0] + rng.integers(1, people, many - many // 2)) % people
        places = np.stack([rng.integers(0, each, many), rng.integers(1, each, many)], 1)
        places[:, 1] = places.sum(1) % each  # another image, of the same person
        first, second = (who * each + places)[rng.permutation(many)].T
        known, hard = rng.normal(size=(people, 16)), 0.9 * rng.normal(size=(of.size, 16))
        rows = []
        for _ in range(2):
            own = 0.6 * rng.normal(size=(of.size, 16)) + person * rng.normal(size=(people, 16))[of]
            rows.append(score_pairs(known[of] + hard + own, Pairs(first, second, of[first] == of[second])).rows)
        for name, side in judged(rows, 200).items():
            apart.setdefault(name, []).append(side != 0)
    assert {"accuracy", "auc", "eer", "tar_at_far_1e-1"} <= apart.keys()
    shares = {name: float(np.mean(sides)) for name, sides in apart.items()}
    assert max(shares.values()) <= 0.09 and shares["auc"] >= 0.01, shares


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 10])
def test_of_two_networks_that_are_as_good_one_in_twenty_seems_better_by_classes(classes):
    rng, names, apart = np.random.default_rng(32), tuple(map(str, range(classes))), {}
    for _ in range(300):
        label = rng.integers(0, classes, 30 * classes)
        hard = 1.5 * np.eye(classes)[label] + 0.8 * rng.normal(size=(label.size, classes))
        nets = [hard + 0.6 * rng.normal(size=hard.shape) for _ in range(2)]
        rows = [{k: np.asarray(v) for k, v in score_classes(net, Classes(label, names)).rows.items()} for net in nets]
        for name, side in judged(rows, 400).items():
            apart.setdefault(name, []).append(side != 0)
    shares = {name: float(np.mean(sides)) for name, sides in apart.items()}
    assert max(shares.values()) <= 0.09 and shares["top1"] >= 0.02, shares


@pytest.fixture
def pair_intervals(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module("pair_intervals")


def test_coverage_is_found_of_every_score_that_pairs_resolve(pair_intervals):
    found = list(pair_intervals.coverage(20, 1, 1, 0.5, sets=3, draws=20))
    assert [name for name, *_ in found] == ["accuracy", "auc", "eer", "tar_at_far_1e-1"]
    assert all(0 <= share <= 1 for _, *shares, _ in found for share in shares) and all(line[3] > 0 for line in found)


@pytest.mark.slow
@pytest.mark.parametrize("person", [0.0, 0.9])
def test_intervals_of_pairs_of_faces_are_right_as_often_as_they_say(pair_intervals, person):
    """Of 120 sets 0.91 to 0.99 are within two standard errors of 0.95, and what is chosen in each draw may widen it.

    Of 300 impostor pairs three are accepted at 1e-2, which is too few.
    """
    for name, gap, alone, _ in pair_intervals.coverage(50, 2, 6, person, sets=120, draws=200):
        assert gap >= (0.84 if name == "tar_at_far_1e-2" else 0.9), (name, gap)
        assert alone >= 0.87, (name, alone)
