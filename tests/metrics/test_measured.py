"""The metrics that a protocol declares are those that its evaluation has."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainkit.errors import UserError
from trainkit.evaluation_protocols import (
    Classes,
    Identification,
    Pairs,
    Retrieval,
    Scenes,
    Search,
    Segmentation,
    Separation,
    Templates,
)
from trainkit.metrics import boundary_f_score, measured, segmentation_2d
from trainkit.metrics.reid import score_search
from trainkit.metrics.score import score

RNG = np.random.default_rng(0)
LABELS = np.arange(24) % 3
NAMES = tuple("abc")


def pairs(count: int) -> Pairs:
    first, second = RNG.integers(0, 24, (2, count))
    return Pairs(first, second, np.arange(count) % 2 == 0)


def templates(count: int) -> Templates:
    every = np.arange(24)
    first, second = RNG.integers(0, 24, (2, count))
    return Templates(every, every, np.ones(24, np.float32), first, second, np.arange(count) % 2 == 0)


def search(kind: str, **more) -> Search:
    person, half = np.arange(24) % 4, np.arange(24) // 12
    lists = {name: np.full((12, 5), -1) for name in ("one", "two")}
    for name, at in (("one", 0), ("two", 6)):
        lists[name] = lists[name][:6]
        lists[name][:, 0] = np.arange(at, at + 6)
    return Search(person, half, (np.arange(12, 24),), lists, tuple(map(str, range(24))), kind=kind, **more)


PROTOCOLS = {
    "classes": Classes(LABELS, NAMES),
    "many classes": Classes(np.arange(24) % 8, tuple("abcdefgh")),
    "two classes": Classes(np.arange(24) % 2, ("a", "b")),
    "two classes of which one occurs": Classes(np.zeros(24, np.int64), ("a", "b")),
    "separation": Separation(LABELS, NAMES),
    "separation of two": Separation(np.arange(24) % 2, ("a", "b")),
    "retrieval": Retrieval(LABELS),
    "retrieval of four": Retrieval(np.array([0, 0, 1, 1])),
    "pairs": pairs(40),
    "many pairs": pairs(2600),
    "templates": templates(300),
    "identification": Identification(np.arange(4), np.arange(4, 24), np.arange(24) % 4),
    "a small gallery": Identification(np.arange(4), np.arange(4, 8), np.arange(24) % 4),
    "search": search("scores", groups={"group": ("one", "two")}),
    "search by person": search("scores", by_person=True),
    "ranked": search("ranked"),
}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_declared_metrics_are_those_that_are_measured(name):
    protocol = PROTOCOLS[name]
    size = len(getattr(protocol, "label", getattr(protocol, "person", np.empty(24))))
    rows = {"embedding": torch.from_numpy(RNG.normal(size=(size, 6)).astype(np.float32)), "norm": torch.ones(size)}
    if isinstance(protocol, Classes):
        rows["logits"] = torch.from_numpy(RNG.normal(size=(size, len(protocol.names))).astype(np.float32))
    if isinstance(protocol, Search):
        found = score_search(rows["embedding"], protocol, lambda taken, present: taken.sum(1))
    else:
        found = score(rows, protocol)
    declared = measured.names(protocol, rows)
    assert declared is not None and len(set(declared)) == len(declared)
    assert set(declared) - set(found.metrics) <= {"unmatched"} and set(found.metrics) <= set(declared)


def counts(*shape: int) -> torch.Tensor:
    return torch.from_numpy(RNG.integers(1, 50, shape)).float()


@pytest.mark.parametrize("kind", ["whole", "patches", "overlays"])
@pytest.mark.parametrize("patients", ["abcd", "aaaa"])
def test_declared_metrics_of_volumes_are_those_that_are_measured(kind, patients):
    ids = ("1", "2", "3", "4")
    protocol = Segmentation(ids, tuple(patients), ("background", "left lens", "Kidney"), kind)
    names = ("intersection", "predicted", "actual") if kind == "patches" else segmentation_columns()
    rows = {name: counts(4, 2) for name in names} | {"planes": torch.zeros(4, 3, 3, 8, 8)}
    assert sorted(score(rows, protocol).metrics) == sorted(measured.names(protocol, ()))


def segmentation_columns() -> tuple[str, ...]:
    from trainkit.metrics.surface_distance import SCORES

    return tuple(SCORES)


@pytest.mark.parametrize("boundaries", [True, False])
def test_declared_metrics_of_scenes_are_those_that_are_measured(boundaries):
    protocol = Scenes(("1", "2", "3"), ("road", "Side walk"))
    truth, found = (torch.from_numpy(RNG.integers(0, 2, (3, 16, 16))) for _ in range(2))
    rows = segmentation_2d.pixel_counts(found, truth.to(torch.uint8), 2)
    if boundaries:
        rows |= boundary_f_score.boundary_counts(found, truth.to(torch.uint8), 2, 2.0)
    assert sorted(score(rows, protocol).metrics) == sorted(measured.names(protocol, rows))


def test_a_task_that_does_not_predict_what_a_set_needs_is_refused():
    with pytest.raises(UserError, match="does not predict scores of classes"):
        measured.names(PROTOCOLS["classes"], ("embedding",))
    assert measured.names(object(), ()) is None


@pytest.mark.parametrize(
    ("protocol", "said"),
    [
        (Pairs(np.arange(12), np.arange(12), np.ones(12, bool)), "all 12 pairs are genuine pairs"),
        (Classes(np.full(5, -1), NAMES), "none of 5 images has a label"),
        (Separation(np.zeros(5, np.int64), NAMES), "are all of class 'a'"),
        (Retrieval(np.zeros(5, np.int64)), "all 5 images are of one class"),
        (Identification(np.arange(2), np.arange(2, 4), np.array([0, 1, 1, 1])), "have no match in the gallery"),
    ],
)
def test_sets_that_cannot_be_scored_are_refused_before_anything_is_evaluated(protocol, said):
    with pytest.raises(UserError, match=said):
        measured.names(protocol, ("embedding", "logits"))
