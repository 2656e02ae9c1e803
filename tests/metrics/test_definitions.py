"""Every metric that an evaluation reports is declared before it, and defined with unit, direction and source."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, cast

import numpy as np
import pytest
import torch

from trainkit.config import metric_definitions as definitions
from trainkit.config import metric_table
from trainkit.errors import UserError
from trainkit.evaluation_protocols import (
    Classes,
    Identification,
    Inspection,
    Pairs,
    Retrieval,
    Scenes,
    Search,
    Segmentation,
    Separation,
    Templates,
)
from trainkit.interfaces import MODALITIES, Split
from trainkit.metrics import boundary_f_score, segmentation_2d
from trainkit.metrics.reid import score_search
from trainkit.metrics.score import headline, names, score
from trainkit.metrics.surface_distance import SCORES

GROUPS = {
    "Classes": definitions.CLASSES,
    "Separation": definitions.SEPARATION,
    "Inspection": definitions.INSPECTION,
    "Retrieval": definitions.RETRIEVAL,
    "Pairs": definitions.PAIRS,
    "Templates": definitions.TEMPLATES,
    "Identification": definitions.IDENTIFICATION,
    "Search": definitions.SEARCH,
    "Scenes": definitions.SCENES,
    "Segmentation": definitions.SEGMENTATION,
    "Patches": definitions.PATCHES,
}
"""Groups of the table by protocol."""
SIZE = 40
RNG = np.random.default_rng(0)
EMBEDDING = torch.from_numpy(RNG.normal(size=(SIZE, 8)))
NORM = EMBEDDING.norm(dim=1)
LOGITS = torch.from_numpy(RNG.normal(size=(SIZE, 2)))
ORGANS = ("background", "liver", "left kidney")


class Images:
    """A split of random images."""

    def fetch(self, rows: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        return {"image": torch.zeros(len(rows), 3, 4, 4, dtype=torch.uint8)}

    def picture(self, row: int) -> np.ndarray:
        return np.zeros((6, 8, 3), np.uint8)


def classified(kind: type, classes: int, **more: Any) -> Any:
    label = np.arange(SIZE) % classes
    names = tuple(f"c{k}" for k in range(classes))
    rows = {"logits": torch.from_numpy(RNG.normal(size=(SIZE, classes))), "embedding": EMBEDDING}
    return kind(label, names, **more), rows


def pairs() -> Any:
    first, second = RNG.integers(0, SIZE, (2, 3000))
    return Pairs(first, second, np.arange(3000) % 2 == 0), {"embedding": EMBEDDING, "norm": NORM}


def templates() -> Any:
    each = np.arange(SIZE)
    first, second = RNG.integers(0, SIZE, (2, 400))
    protocol = Templates(each, each, np.ones(SIZE, np.float32), first, second, np.arange(400) % 2 == 0)
    return protocol, {"embedding": EMBEDDING, "norm": NORM}


def identification() -> Any:
    label = np.arange(SIZE) % 10
    return Identification(np.arange(10), np.arange(10, SIZE), label), {"embedding": EMBEDDING, "norm": NORM}


def search(**more: Any) -> Any:
    person = np.append(np.arange(SIZE - 1) % 8, 99)
    query = np.full((11, len(MODALITIES)), -1)
    query[:, 1] = [*range(10), SIZE - 1]
    groups = {"modal_1": ("nir",)}
    ids = tuple(map(str, range(SIZE)))
    gallery = np.arange(10, SIZE - 1)
    return Search(person, np.full(SIZE, -1), gallery, {"nir": query}, ids, groups, **more), {"feature": EMBEDDING}


def volumes(kind: Any, patients: tuple[str, ...] = tuple("abcd")) -> Any:
    protocol = Segmentation(tuple(f"case{k}" for k in range(4)), patients, ORGANS, kind)
    columns = ("intersection", "predicted", "actual") if kind == "patches" else SCORES
    rows = {name: torch.from_numpy(RNG.uniform(0.2, 0.9, (4, 2))) for name in columns}
    return protocol, rows | {"planes": torch.zeros(4, 3, 3, 8, 8)}


def scenes(kind: Any) -> Any:
    predicted, mask = torch.from_numpy(RNG.integers(0, 3, (2, 4, 12, 16))).to(torch.uint8)
    rows = segmentation_2d.pixel_counts(predicted, mask, 3)
    rows |= boundary_f_score.boundary_counts(predicted, mask, 3, 1.0)
    rows |= segmentation_2d.thumbnail_maps(predicted, mask)
    return Scenes(tuple("abcd"), ("road", "sky", "bus lane"), kind), rows


SAMPLES = {
    "two classes": lambda: classified(Classes, 2),
    "many classes": lambda: classified(Classes, 7),
    "two classes of which one occurs": lambda: (Classes(np.zeros(SIZE, np.int64), ("a", "b")), {"logits": LOGITS}),
    "separation of three": lambda: classified(Separation, 3),
    "separation": lambda: classified(Separation, 2),
    "inspection": lambda: classified(Inspection, 3, ids=tuple(map(str, range(SIZE)))),
    "retrieval": lambda: (Retrieval(np.arange(SIZE) % 6), {"embedding": EMBEDDING}),
    "retrieval of four": lambda: (Retrieval(np.array([0, 0, 1, 1])), {"embedding": EMBEDDING[:4]}),
    "pairs": pairs,
    "templates": templates,
    "identification": identification,
    "a small gallery": lambda: (
        Identification(np.arange(4), np.arange(4, 8), np.arange(SIZE) % 4),
        {"embedding": EMBEDDING},
    ),
    "search": search,
    "ranked": lambda: search(kind="ranked"),
    "whole volumes": lambda: volumes("whole"),
    "patches": lambda: volumes("patches"),
    "overlays of volumes": lambda: volumes("overlays"),
    "volumes of one patient": lambda: volumes("whole", ("a",) * 4),
    "scenes": lambda: scenes("scores"),
    "overlays of scenes": lambda: scenes("overlays"),
}


def reported(name: str) -> tuple[object, dict[str, float]]:
    protocol, rows = SAMPLES[name]()
    split = cast(Split, Images())
    if isinstance(protocol, Search):

        def finish(features: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
            return features.sum(1)

        return protocol, score_search(rows["feature"], protocol, finish).metrics
    return protocol, score(rows, protocol, "sample", split).metrics


def group_of(protocol: object) -> definitions.Group:
    patches = isinstance(protocol, Segmentation) and protocol.kind == "patches"
    return GROUPS["Patches" if patches else type(protocol).__name__]


def of(protocol: object, name: str) -> definitions.Metric | None:
    metrics = group_of(protocol).metrics
    return metrics.get(name) or next((one for pattern, one in metrics.items() if fnmatchcase(name, pattern)), None)


@pytest.mark.parametrize("name", SAMPLES)
def test_every_metric_that_is_reported_is_declared_and_defined(name):
    protocol, metrics = reported(name)
    declared = names(protocol, SAMPLES[name]()[1])
    assert declared is not None and len(set(declared)) == len(declared)
    assert set(declared) - set(metrics) <= {"unmatched"} and metrics and set(metrics) <= set(declared)
    assert [metric for metric in metrics if of(protocol, metric) is None] == []


def test_a_task_that_does_not_predict_what_a_set_needs_is_refused():
    with pytest.raises(UserError, match="does not predict scores of classes"):
        names(SAMPLES["two classes"]()[0], ("embedding",))
    with pytest.raises(UserError, match="are all of class 'a'"):  # as the evaluation would
        names(Separation(np.zeros(5, np.int64), ("a", "b")), ("embedding",))
    assert names(object(), ()) is None
    with pytest.raises(ValueError, match="unknown evaluation protocol"):
        score({}, object())


def test_every_definition_is_of_a_metric_that_is_reported():
    seen: dict[str, set[int]] = {}
    for name in SAMPLES:
        protocol, metrics = reported(name)
        group = group_of(protocol)
        found = {id(of(protocol, metric)) for metric in metrics}
        seen.setdefault(group.title, set()).update(found)
    assert {group.title for group in definitions.GROUPS} == set(seen)
    for group in definitions.GROUPS:
        left = [name for name, metric in group.metrics.items() if id(metric) not in seen[group.title]]
        assert left == [], group.title


@pytest.mark.parametrize("name", SAMPLES)
def test_directions_and_units_are_known_without_the_protocol(name):
    protocol, metrics = reported(name)
    for metric in metrics:
        known = of(protocol, metric)
        assert known is not None
        assert metric_table.direction(metric) == known.direction, metric
        assert metric_table.unit(metric) == known.unit, metric


@pytest.mark.parametrize("name", SAMPLES)
def test_metrics_that_lead_have_definitions(name):
    protocol, _ = SAMPLES[name]()
    for metric in headline(protocol) or ():
        assert of(protocol, metric) is not None, metric


def test_a_definition_is_one_or_two_sentences_with_unit_and_source():
    for group in definitions.GROUPS:
        for name, metric in group.metrics.items():
            assert metric.text.endswith(".") and len(metric.text) < 260, name
            assert metric.unit and metric.source, name
