"""Scores of searches against rankings written out in plain loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.errors import UserError
from trainkit.evaluation_protocols import Search
from trainkit.metrics import k_reciprocal, ranking, reid
from trainkit.metrics.k_reciprocal import Reranked
from trainkit.metrics.reid import score_search

LISTS = {"nir": (1,), "text": (4,), "nir_text": (1, 4), "rgb": (0,)}


def mean(features, present):
    """Fusion that no row of the batch but its own has a part in."""
    return features.sum(1) / present.sum(1, keepdim=True)


def drawn(seed, count=160, persons=9, size=5, pool=None, skill=1.0, **settings):
    """A set of records of five modalities; with `pool` only so many different features, so that many are equally near.

    Some persons have nothing in the gallery, some gallery records show nobody, some places are not known.
    """
    rng = np.random.default_rng(seed)
    person, modality = rng.integers(0, persons, count), rng.choice([0, 0, 1, 4], count)
    features = rng.normal(size=(count, size)) + skill * rng.normal(size=(persons, size))[person]
    if pool:
        features = features[rng.integers(0, pool, count)] * 2.0 ** rng.integers(-2, 3, (count, 1))
    person[(modality == 0) & (person == 0)] = -1
    gallery = np.flatnonzero(modality == 0)
    queries = {}
    for name, kinds in LISTS.items():
        rows = []
        for p in range(persons):
            of = [np.flatnonzero((modality == m) & (person == p)) for m in kinds]
            for t in range(max(map(len, of))) if all(map(len, of)) else ():
                one = [-1] * 5
                for m, rows_of in zip(kinds, of, strict=True):
                    one[m] = rows_of[t % len(rows_of)]
                rows.append(one)
        if rows:
            queries[name] = np.array(rows)
    ids = tuple(f"p{person[row]}/{row}.jpg" for row in range(count))
    protocol = Search(person=person, place=rng.integers(-1, 3, count), gallery=gallery, queries=queries, ids=ids)
    return features.astype(np.float32), replaced(protocol, **settings)


def replaced(protocol, **changes):
    from dataclasses import replace

    return replace(protocol, **changes)


def rankings(features, protocol, name):
    """Of each query, which records are right, from the nearest, without what is ignored, wrong before right."""
    for query in protocol.queries[name].tolist():
        used = [row for row in query if row >= 0]
        asks = np.mean([features[row].astype(np.float64) for row in used], axis=0)
        person, places = protocol.person[used[0]], {int(protocol.place[row]) for row in used} - {-1}
        line = []
        for row in protocol.gallery.tolist():
            right = person >= 0 and protocol.person[row] == person
            if row in used or (right and int(protocol.place[row]) in places):
                continue
            known = features[row].astype(np.float64)
            cosine = sum(a * b for a, b in zip(asks, known, strict=True)) / math.hypot(*asks) / math.hypot(*known)
            line.append((-round(cosine, 6), right, row))
        yield [bool(right) for _, right, _ in sorted(line)]


def scored(right):
    """AP, inverse negative penalty and the place of the first right one, of one ranking; None without a match."""
    if not any(right):
        return None
    places = [i for i, hit in enumerate(right, start=1) if hit]
    ap = sum(sum(right[:i]) / i for i in places) / len(places)
    return ap, len(places) / places[-1], places[0]


def plain(features, protocol):
    """All metrics, written out."""
    lists, unmatched = {}, 0
    for name in protocol.queries:
        every = [scored(right) for right in rankings(features, protocol, name)]
        unmatched += every.count(None)
        every = [one for one in every if one]
        if every:
            lists[name] = {
                "map": np.mean([ap for ap, _, _ in every]),
                "minp": np.mean([inp for _, inp, _ in every]),
                **{f"rank_{k}": np.mean([place <= k for _, _, place in every]) for k in (1, 5, 10)},
            }
    groups = {
        group: {key: np.mean([lists[name][key] for name in names]) for key in lists[names[0]]}
        for group, names in protocol.groups.items()
    }
    tops = list((groups or lists).values())
    metrics = {key: np.mean([one[key] for one in tops]) for key in tops[0]}
    for title, values in groups.items():
        metrics |= {f"{title}.{key}": value for key, value in values.items()}
    for title, values in lists.items():
        metrics |= {f"{title}.{key}": values[key] for key in ("map", "rank_1")}
    return metrics | ({"unmatched": unmatched} if unmatched else {})


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (0, {}),
        (1, {"pool": 12}),
        (2, {"pool": 4}),
        (4, {"persons": 40}),
        (5, {"groups": {"modal_1": ("nir", "text"), "modal_2": ("nir_text",)}}),
        (6, {"persons": 2, "pool": 30}),
    ],
)
def test_scores_equal_rankings_written_out_in_loops(seed, options):
    features, protocol = drawn(seed, **options)
    assert score_search(features, protocol, mean).metrics == pytest.approx(plain(features, protocol), abs=1e-9)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(40, 70),
    persons=st.integers(1, 12),
    pool=st.sampled_from([None, 1, 3, 20]),
)
def test_scores_of_any_set_equal_rankings_written_out(seed, count, persons, pool):
    features, protocol = drawn(seed, count, persons, 3, pool)
    if not any(any(right) for name in protocol.queries for right in rankings(features, protocol, name)):
        with pytest.raises(UserError, match="has a match"):
            score_search(features, protocol, mean)
        return
    found, expected = score_search(features, protocol, mean).metrics, plain(features, protocol)
    assert found == pytest.approx({key: expected[key] for key in found}, abs=1e-9)
    assert not any(".rank" not in key and "rank" not in key for key in set(expected) - set(found))


def test_average_precision_is_that_of_scikit_learn():
    from sklearn.metrics import average_precision_score

    features, protocol = drawn(7)
    protocol = replaced(protocol, place=np.full(len(protocol), -1), queries={"nir": protocol.queries["nir"]})
    gallery = protocol.gallery
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    rows = score_search(features, protocol, mean).rows
    for k, query in enumerate(protocol.queries["nir"][:, 1].tolist()):
        right = protocol.person[gallery] == protocol.person[query]
        if right.any():
            expected = average_precision_score(right, unit[gallery] @ unit[query])
            assert rows["ap"][k] == pytest.approx(expected, abs=1e-6)


def by_hand(**changes):
    """One query of person 0 at angle 0, the gallery at growing angles: wrong, right, hidden, right, nobody, right."""
    angle = np.radians([0, 5, 10, 15, 20, 25, 30])
    features = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    query = np.array([[-1, 0, -1, -1, -1]])
    who = {"person": np.array([0, 1, 0, 0, 0, -1, 0]), "place": np.array([3, 3, 1, 3, -1, 3, 2])}
    made = Search(**who, gallery=np.arange(1, 7), queries={"nir": query}, ids=tuple("abcdefg"))
    return features, replaced(made, **changes)


def test_an_example_worked_by_hand():
    # Right ones at places 2, 3 and 5 of five: 1/2, 2/3 and 3/5; the last at 5.
    features, protocol = by_hand()
    scores = score_search(features, protocol, mean)
    assert scores.metrics["map"] == pytest.approx((1 / 2 + 2 / 3 + 3 / 5) / 3)
    assert scores.metrics["minp"] == pytest.approx(3 / 5)
    assert scores.metrics["rank_1"] == 0 and scores.metrics["rank_5"] == 1 and "rank_10" not in scores.metrics
    assert scores.rows["relevant"].tolist() == [3] and scores.rows["rank"].tolist() == [2]


def test_a_network_that_answers_the_same_to_all_finds_nothing():
    features, protocol = drawn(0)
    for same in (np.ones_like(features), np.zeros_like(features)):
        metrics = score_search(same, protocol, mean).metrics
        assert metrics["rank_1"] == metrics["rank_10"] == 0
        assert metrics == pytest.approx(plain(np.ones_like(features), protocol), abs=1e-9)


def test_a_record_does_not_find_itself():
    rng = np.random.default_rng(0)
    features, person = rng.normal(size=(6, 4)), np.array([0, 0, 1, 1, 2, 3])
    query = np.full((6, 5), -1)
    query[:, 0] = np.arange(6)
    protocol = Search(person, np.full(6, -1), np.arange(6), {"rgb": query}, tuple("abcdef"))
    scores = score_search(features, protocol, mean)
    assert scores.metrics["unmatched"] == 2 and scores.rows["relevant"].tolist() == [1, 1, 1, 1, 0, 0]
    assert scores.tables["queries"]["unmatched"] == [2]


def test_no_score_depends_on_blocks_threads_or_order(monkeypatch):
    features, protocol = drawn(9, count=120, persons=15, size=64, pool=60)
    whole = score_search(features, protocol, mean)
    assert score_search(torch.tensor(features), protocol, mean).metrics == whole.metrics
    threads = torch.get_num_threads()
    for queries, gallery, finished, used in ((1, 1, 3, 1), (7, 30, 1000, 2), (10**6, 10**6, 5, 1)):
        monkeypatch.setattr(ranking, "QUERIES_AT_ONCE", queries)
        monkeypatch.setattr(ranking, "GALLERY_AT_ONCE", gallery)
        monkeypatch.setattr(reid, "FINISHED_AT_ONCE", finished)
        torch.set_num_threads(used)
        again = score_search(features, protocol, mean)
        torch.set_num_threads(threads)
        assert again.metrics == whole.metrics and again.tables == whole.tables
        assert all((np.asarray(again.rows[key]) == np.asarray(whole.rows[key])).all() for key in whole.rows)
    turn = np.random.default_rng(0).permutation(len(protocol))
    back = np.argsort(turn)
    turned = replaced(
        protocol,
        person=protocol.person[turn],
        place=protocol.place[turn],
        gallery=back[protocol.gallery][::-1],
        queries={name: np.where(rows >= 0, back[rows], -1) for name, rows in protocol.queries.items()},
    )
    assert score_search(features[turn], turned, mean).metrics == whole.metrics


def test_products_of_whole_vectors_are_exact():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(40, 700)) * 10.0 ** rng.integers(-20, 20, (40, 1))
    rows[0], rows[1] = 1, 0
    vectors = ranking.to_integers(rows)
    assert vectors.dtype == np.int32 and not vectors[1].any()
    exact = [[sum(int(a) * int(b) for a, b in zip(x, y, strict=True)) for y in vectors[:6]] for x in vectors]
    found = ranking.Cosines(vectors, vectors[:6]).scores(slice(None), slice(0, 6))
    assert [[int(v) for v in line] for line in found] == exact
    assert max(abs(v) for line in exact for v in line) < 2**53
    unit = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300)
    np.testing.assert_allclose(found / ranking.LENGTH**2, unit @ unit[:6].T, atol=700**0.5 / 2**26)


class Watched(ranking.Cosines):
    """Notes how many scores are asked for at once."""

    most = 0

    def scores(self, queries, gallery):
        found = super().scores(queries, gallery)
        Watched.most = max(Watched.most, found.size)
        return found


def test_scores_held_at_once_do_not_grow_with_the_set(monkeypatch):
    monkeypatch.setattr(ranking, "QUERIES_AT_ONCE", 16)
    monkeypatch.setattr(ranking, "GALLERY_AT_ONCE", 64)
    monkeypatch.setattr(reid, "Cosines", Watched)
    for count in (300, 900):
        Watched.most = 0
        features, protocol = drawn(3, count=count, persons=count // 20)
        score_search(features, protocol, mean)
        assert 0 < Watched.most <= 16 * 64


def test_queries_go_through_finish_with_what_is_there_and_nothing_else():
    features, protocol = drawn(2)
    features = torch.tensor(features)
    seen = []

    def finish(taken, present):
        seen.append((taken, present))
        return taken.sum(1)

    score_search(features, protocol, finish)
    taken, present = seen[0]
    assert present.tolist() == [[True, False, False, False, False]] * len(protocol.gallery)
    assert torch.equal(taken[:, 0], features[protocol.gallery]) and not taken[:, 1:].any()
    for (taken, present), rows in zip(seen[1:], protocol.queries.values(), strict=True):
        assert present.tolist() == (rows >= 0).tolist() and not taken[~present].any()
        assert torch.equal(taken[present], features[rows[rows >= 0]])


def test_tables_and_rows_agree_with_the_metrics():
    features, protocol = drawn(11)
    scores = score_search(features, protocol, mean)
    table, rows = scores.tables["queries"], scores.rows
    assert table["list"] == list(protocol.queries)
    assert table["queries"] == [len(rows) for rows in protocol.queries.values()]
    for k, name in enumerate(table["list"]):
        assert (
            table["map"][k] == scores.metrics[f"{name}.map"] and table["rank_1"][k] == scores.metrics[f"{name}.rank_1"]
        )
        asked = (np.array(rows["list"]) == name) & (rows["relevant"] > 0)
        assert rows["ap"][asked].mean() == pytest.approx(table["map"][k])
        assert rows["inp"][asked].mean() == pytest.approx(table["minp"][k])
    assert len({len(column) for column in rows.values()}) == 1
    assert len(rows["list"]) == sum(table["queries"])


def test_a_list_without_a_match_has_a_line_and_no_score():
    features, protocol = drawn(1)
    features = np.concatenate([features, features[:1]])
    query = np.array([[-1, -1, len(features) - 1, -1, -1]])
    groups = {"modal_1": ("nir", "cp"), "modal_2": ("nir_text",), "other": ("cp",)}
    person, place = np.append(protocol.person, 77), np.append(protocol.place, -1)
    asks = protocol.queries | {"cp": query}
    made = Search(person, place, protocol.gallery, asks, (*protocol.ids, "x"), groups)
    scores = score_search(features, made, mean)
    assert "cp.map" not in scores.metrics and "other.map" not in scores.metrics
    assert scores.metrics["modal_1.map"] == scores.metrics["nir.map"]
    assert scores.tables["queries"]["map"][-1] is None and scores.tables["queries"]["unmatched"][-1] == 1


def test_searches_that_cannot_be_scored_are_refused():
    features, protocol = drawn(0)
    with pytest.raises(ValueError, match="159 features for 160 records"):
        score_search(features[:-1], protocol, mean)
    nobody = replaced(protocol, person=np.where(np.isin(np.arange(160), protocol.gallery), -1, protocol.person))
    asks = {"nir": protocol.queries["nir"]}
    with pytest.raises(UserError, match=r"^val: none of \d+ queries has a match in the gallery"):
        score_search(features, replaced(nobody, queries=asks), mean, "val")
    two = protocol.queries["nir_text"].copy()
    two[3, 4] = next(row for row in two[:, 4] if protocol.person[row] != protocol.person[two[3, 1]])
    with pytest.raises(ValueError, match="query 3 show two persons"):
        score_search(features, replaced(protocol, queries={"nir_text": two}), mean)
    with pytest.raises(ValueError, match="beyond 160 records"):
        score_search(features, replaced(protocol, queries={"nir": np.array([[-1, 160, -1, -1, -1]])}), mean)
    with pytest.raises(ValueError, match="without a record"):
        score_search(features, replaced(protocol, queries={"nir": np.full((2, 5), -1)}), mean)


def test_embeddings_that_are_not_finite_are_refused():
    features, protocol = drawn(0)
    with pytest.raises(UserError, match=r"^val, nir_text: embeddings of \d+ of"):
        score_search(features, protocol, lambda x, there: mean(x, there) / (there.sum(1, keepdim=True) < 2), "val")
    features[33, 2] = math.nan
    with pytest.raises(UserError, match=r"^val: embeddings of 1 of 160 images are not finite, the first in row 33"):
        score_search(features, protocol, mean, "val")


def test_guessing_stays_below_the_bound_and_skill_is_above():
    rng, over = np.random.default_rng(0), 0
    for seed in range(20):
        features, protocol = drawn(seed, count=200, persons=20, skill=0)
        if seed % 3 == 0:  # all alike but for a little: one gallery record comes first nearly always
            features = features * 0.01 + rng.normal(size=5).astype(np.float32)
        scores = score_search(features, protocol, mean)
        over += scores.metrics["rank_1"] > scores.chance["rank_1"]
    assert over <= 1
    features, protocol = drawn(0, count=200, persons=20, skill=4, size=16)
    skilled = score_search(features, protocol, mean)
    assert skilled.metrics["rank_1"] > skilled.chance["rank_1"] > 1 / 20


def test_bound_of_chance_is_that_of_as_many_guesses_as_persons():
    from scipy.stats import binom

    features, protocol = by_hand()
    assert score_search(features, protocol, mean).chance == {}  # one person guessed right shows nothing
    features, protocol = drawn(0, persons=30, count=300)
    scores = score_search(features, protocol, mean)
    asked = [n > 0 for n in scores.rows["relevant"]]
    persons = len(set(scores.rows["person"][asked].tolist()))
    odds = []
    for name in protocol.queries:
        odds += [sum(right) / len(right) for right in rankings(features, protocol, name) if any(right)]
    assert scores.chance["rank_1"] == pytest.approx(binom.ppf(0.999, persons, np.mean(odds)) / persons)


# ---- re-ranking


def plain_reranked(vectors, queries, nearest, averaged, share, strict):
    """Zhong et al.'s distance with sets and loops, (queries, gallery)."""
    size = len(vectors)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    distance = 2 - 2 * unit @ unit.T
    order = []
    for i in range(size):
        others = sorted((j for j in range(size) if j != i), key=lambda j: (round(distance[i, j], 9), j))
        order.append([i, *others])

    def mutual(i, k):
        return {j for j in order[i][: k + 1] if i in order[j][: k + 1]}

    weight = np.zeros((size, size))
    for i in range(size):
        own = mutual(i, nearest)
        wider = set(own)
        for j in own:
            theirs = mutual(j, round(nearest / 2))
            if len(theirs & own) / len(theirs) > 2 / 3 - 1e-9 + 2e-9 * strict:
                wider |= theirs
        for j in wider:
            weight[i, j] = math.exp(-distance[i, j] / distance[i].max())
        weight[i] /= weight[i].sum()
    mean_of = np.array([np.mean([weight[j] for j in order[i][:averaged]], axis=0) for i in range(size)])
    final = np.zeros((queries, size - queries))
    for q in range(queries):
        for g in range(size - queries):
            one, other = mean_of[q], mean_of[queries + g]
            apart = 1 - np.minimum(one, other).sum() / np.maximum(one, other).sum()
            final[q, g] = (1 - share) * apart + share * distance[q, queries + g] / distance[q].max()
    return final


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("nearest", "averaged", "share"), [(20, 6, 0.3), (5, 1, 0.0), (3, 4, 0.5), (60, 60, 0.1)])
def test_reranked_distances_equal_those_written_out(nearest, averaged, share, strict):
    rng = np.random.default_rng(nearest)
    rows = rng.normal(size=(50, 6)) + 2 * rng.normal(size=(8, 6))[rng.integers(0, 8, 50)]
    vectors = ranking.to_integers(rows)
    made = Reranked.make(vectors[:20], vectors[20:], ranking.LENGTH, nearest, averaged, share, strict)
    expected = plain_reranked(vectors.astype(np.float64), 20, nearest, averaged, share, strict)
    np.testing.assert_allclose(-made.scores(slice(0, 20), slice(0, 30)), expected, atol=1e-7)
    other = Reranked.make(vectors[:20], vectors[20:], ranking.LENGTH, nearest, averaged, share, not strict)
    # A set that has exactly two thirds of its members in another is common with 20 neighbours.
    if nearest == 20:
        assert not np.allclose(-other.scores(slice(0, 20), slice(0, 30)), expected, atol=1e-3)


def test_the_protocol_says_which_overlap_joins_neighbourhoods():
    features, protocol = drawn(3, count=300, persons=20, skill=1.1, size=8)
    plain, strict = (
        score_search(features, replaced(protocol, kind="reranked", strict=one), mean).metrics for one in (False, True)
    )
    assert plain["map"] != strict["map"] and plain["map"] == pytest.approx(strict["map"], abs=0.02)


def test_a_reranked_distance_is_the_same_in_any_block(monkeypatch):
    rng = np.random.default_rng(0)
    vectors = ranking.to_integers(rng.normal(size=(90, 6)))
    made = Reranked.make(vectors[:40], vectors[40:], ranking.LENGTH)
    every = made.scores(slice(0, 40), slice(0, 50))
    assert (made.scores(np.array([7, 3]), slice(10, 25)) == every[[7, 3], 10:25]).all()
    assert made.scores(np.array([7, 3]), slice(10, 10)).shape == (2, 0)
    monkeypatch.setattr(k_reciprocal, "SCORES_AT_ONCE", 200)
    monkeypatch.setattr(k_reciprocal, "VALUES_AT_ONCE", 50)
    assert (Reranked.make(vectors[:40], vectors[40:], ranking.LENGTH).scores(slice(0, 40), slice(0, 50)) == every).all()


def test_neighbours_mend_a_ranking():
    """Queries that lie between two persons, of which one has others nearby that are like the query."""
    features, protocol = drawn(21, count=700, persons=25, skill=1.1, size=8)
    plainly = score_search(features, protocol, mean).metrics
    again = score_search(features, replaced(protocol, kind="reranked"), mean).metrics
    assert set(again) == set(plainly) and again["map"] > plainly["map"] + 0.02
    assert again["unmatched"] == plainly["unmatched"]


def test_reranking_of_alike_few_and_empty_records_ends():
    for features in (np.ones((7, 2)), np.zeros((7, 2))):
        _, protocol = by_hand(kind="reranked")
        assert score_search(features, protocol, mean).metrics["rank_1"] == 0
    with pytest.raises(ValueError, match="nearest 0"):
        Reranked.make(np.ones((1, 2), np.int32), np.ones((1, 2), np.int32), 1.0, nearest=0)
