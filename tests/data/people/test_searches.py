"""Which gallery images a query ignores: the rule of cameras, the same in every form of a set."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import people_sets
import pytest

from trainkit.data.people import searches as people_searches
from trainkit.data.people import sources
from trainkit.data.people.dataset import People
from trainkit.data.people.pk_sampler import PK
from trainkit.evaluation_protocols import Search
from trainkit.interfaces import RGB
from trainkit.metrics import ranking
from trainkit.metrics.reid import score_search

pytestmark = pytest.mark.usefixtures("cache")


def searched(source, split="val"):
    """The search of a set, and its scores by the pixels of the images."""
    data = People(
        train=str(source), sampler=PK(people=2, each=2), image_size=(16, 8), evaluate={"val": str(source)},
        leakage="allow",
    )  # fmt: skip
    opened = data.open(seed=0)
    of = opened.evaluations[split]
    features = np.stack([np.zeros(384) if (p := of.picture(row)) is None else p.reshape(-1) for row in range(of.size)])
    features = features.astype(np.float32) - 100
    scores = score_search(features, of.protocol, lambda x, there: x.sum(1) / there.sum(1, keepdim=True))
    return of, scores.metrics, opened.notes


@pytest.fixture(scope="module")
def market(tmp_path_factory):
    """A folder as Market-1501 is laid out, and its test records as columns."""
    root = people_sets.market(tmp_path_factory.mktemp("market"), train=2, test=4, cameras=3)
    every = sources.find(f"{root}#test").every
    return root, {
        "path": [record.id for record in every],
        "person": [record.person or "-1" for record in every],
        "camera": [record.camera.removeprefix("c") for record in every],
        "modality": ["rgb"] * len(every),
        "role": [("", "query", "gallery")[record.role] for record in every],
    }


def _index(root, columns):
    """Write the records as an index, and return it."""
    return people_sets.write_csv(root / "test.csv", zip(*columns.values(), strict=True), columns)


@pytest.mark.parametrize("camera", [str, float], ids=["numbers", "fractions"])
def test_an_index_has_the_scores_of_the_published_layout(market, camera):
    root, columns = market
    of, found, notes = searched(_index(root, columns | {"camera": [camera(name) for name in columns["camera"]]}))
    published = searched(f"{root}#test")
    assert found == published[1]
    assert of.protocol.rule == published[0].protocol.rule and f"val: {of.protocol.rule}" in notes
    assert of.protocol.rule.endswith("are ignored, 24 of 72")


def rgb(root, *records):
    """An index of colour images; a record is person, camera and role."""
    lines = []
    for n, (person, camera, role, *kind) in enumerate(records):
        people_sets.picture(root / f"{n}.png", seed=n)
        lines.append((f"{n}.png", person, camera, *(kind or ["rgb"]), role))
    return people_sets.write_csv(root / "index.csv", lines, ("path", "person", "camera", "modality", "role")).parent


def ignored(search: Search, name="rgb"):
    """For each query the gallery records of its person that are neither right nor wrong, by their names."""
    gallery = ranking.Gallery.make(search.gallery, np.zeros((len(search.gallery), 1), np.int32), search)
    out = ranking.excluded(search.queries[name], gallery, slice(0, len(gallery.rows)), search)
    out &= gallery.person == ranking.person_of_query(search.queries[name], search)[:, None]
    return [[search.ids[row] for row in gallery.rows[line].tolist()] for line in out]


MISSING = ["", "nan", "None", "NULL", "N/A", "-1"]


@pytest.mark.parametrize("missing", MISSING)
def test_a_camera_that_is_not_known_hides_nothing(missing, tmp_path):
    records = [("a", "c1", "query"), ("a", "c1", "gallery"), ("a", missing, "gallery"), ("a", missing, "query")]
    records += [("b", "c2", "query"), ("b", "c2", "gallery"), ("b", "c3", "gallery"), ("-1", "c1", "gallery")]
    search = searched(rgb(tmp_path / "s", *records))[0].protocol
    assert ignored(search) == [["1.png"], [], ["5.png"]]


def test_a_set_of_one_camera_ignores_nothing_and_says_so(tmp_path):
    records = [(person, 1, role) for person in "ab" for role in ("query", "gallery", "gallery")]
    of, found, _ = searched(rgb(tmp_path / "s", *records))
    assert ignored(of.protocol) == [[], []] and "unmatched" not in found
    assert "every match is from the camera of its query" in of.protocol.rule


def test_queries_without_another_match_are_counted_and_in_no_mean(tmp_path):
    records = [("a", "1", "query"), ("a", "1", "gallery"), ("b", "1", "query"), ("b", "2", "gallery")]
    of, found, _ = searched(rgb(tmp_path / "s", *records))
    assert found["unmatched"] == 1 and "1 of 2 queries have no other match and are in no mean" in of.protocol.rule


def test_the_rule_holds_across_modalities(tmp_path):
    records = [("a", "1", "", "nir"), ("a", "1", ""), ("a", "2", ""), ("b", "3", "", "nir"), ("b", "2", "")]
    of, _, _ = searched(rgb(tmp_path / "s", *records))
    assert ignored(of.protocol, "nir") == [["1.png"], []] and "are ignored" in of.protocol.rule


def test_a_caption_is_from_no_camera(tmp_path):
    for n in range(4):
        people_sets.picture(tmp_path / f"{n}.png", seed=n)
    lines = [(f"{n}.png", "ab"[n // 2], f"c{n % 2}", "rgb", f"words {n}", "") for n in range(4)]
    people_sets.write_csv(tmp_path / "index.csv", lines)
    search = searched(tmp_path)[0].protocol
    assert ignored(search, "text") == [[]] * 4


@pytest.mark.parametrize("seed", range(40))
def test_matches_are_counted_as_the_ranking_finds_them(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(4, 20))
    person, place, modality = (rng.integers(low, high, count) for low, high in ((-1, 3), (-1, 3), (0, 5)))
    shown = rng.random(count) < 0.7
    shown[0], modality[:2], person[1] = True, RGB, 0
    person = np.where(modality == RGB, person, np.abs(person))
    gallery = np.flatnonzero((modality == RGB) & shown)
    asking = np.flatnonzero(person >= 0)
    wanted = [*people_searches.subsets(), (RGB,)]
    queries = np.concatenate(people_searches.combined(person[asking], modality[asking], wanted))
    queries = np.append(asking, -1)[queries]
    search = Search(person, place, gallery, {"all": queries}, tuple(map(str, range(len(person)))))
    whole = ranking.Gallery.make(gallery, np.zeros((len(gallery), 1), np.int32), search)
    own = whole.person == person[queries.max(1)][:, None]
    unplaced = replace(search, place=np.full(len(person), -1))
    every = slice(0, len(gallery))
    there = (own & ~ranking.excluded(queries, whole, every, unplaced)).sum(1)
    right = (own & ~ranking.excluded(queries, whole, every, search)).sum(1)
    found = people_searches._matches(queries, gallery, person, place)
    assert (there == found[0]).all() and (there - right == found[1]).all()
