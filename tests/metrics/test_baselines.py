"""Trivial baselines against loops, and their sizes where data is too large."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from trainkit.evaluation_protocols import Classes, Pairs, Retrieval, Separation
from trainkit.metrics import baselines, bootstrap
from trainkit.metrics.classification import score_classes

NAMES = ("a", "b", "c")


def images(count, seed, side=6):
    draw = np.random.default_rng(seed)
    label = torch.from_numpy(draw.integers(3, size=count))
    pixels = torch.from_numpy(draw.integers(0, 256, (count, 3, side, side)).astype(np.uint8))
    return {"image": pixels, "label": label, "index": torch.arange(count)}


def split(protocol, size=10):
    return SimpleNamespace(protocol=protocol, size=size, name="val")


def test_the_majority_class_has_the_frequencies_of_the_training_as_probabilities():
    predict = baselines.majority_class(np.array([2, 2, 2, 0, -1]), 3)
    logits = predict({"index": torch.arange(4)})["logits"]
    assert torch.allclose(logits[0].softmax(0), torch.tensor([2, 1, 4], dtype=torch.float64) / 7)
    scores = score_classes(logits, Classes(np.array([0, 2, 2, 1]), NAMES))
    assert scores.metrics["top1"] == 0.5


def test_the_nearest_image_is_the_one_of_highest_correlation():
    train, val = images(60, 0), images(12, 1)
    train["label"][::7] = -1
    predict = baselines.nearest_image(
        iter([{k: v[:25] for k, v in train.items()}, {k: v[25:] for k, v in train.items()}]), 3, 12
    )
    logits = predict(val)["logits"].numpy()
    for row, query in zip(logits, val["image"].flatten(1).numpy(), strict=True):
        found = [np.corrcoef(query, other)[0, 1] for other in train["image"].flatten(1).numpy()]
        for number in range(3):
            own = [c for c, label in zip(found, train["label"].tolist(), strict=True) if label == number]
            assert row[number] == pytest.approx(max(own), abs=1e-5)


def test_a_class_that_was_not_trained_is_never_the_nearest():
    train = images(9, 0)
    train["label"][:] = torch.tensor([0, 2]).repeat(5)[:9]
    logits = baselines.nearest_image(iter([train]), 3, 5)(images(5, 1))["logits"]
    assert (logits[:, 1] == -1).all() and (logits[:, ::2] > -1).all()


def test_large_images_are_compared_by_the_means_of_areas_and_no_more_than_fit(monkeypatch):
    large = images(4, 0, side=128)["image"]
    assert baselines.correlated(large).shape == (4, 3 * 64 * 64)
    assert torch.allclose(baselines.correlated(large), baselines.correlated(F.avg_pool2d(large.float(), 2)), atol=1e-6)
    monkeypatch.setattr(baselines, "MOST_MULTIPLICATIONS", 100 * 20 * 108)
    read = []

    def batches():
        for seed in range(10):
            read.append(seed)
            yield images(10, seed)

    baselines.nearest_image(batches(), 3, 100)
    assert read == [0, 1], "20 images of 108 values, against 100"


@pytest.mark.parametrize(
    ("protocol", "names"),
    [
        (Classes(np.zeros(4, np.int64), NAMES), ["majority class", "1-NN on pixels"]),
        (Separation(np.zeros(4, np.int64), NAMES), ["1-NN on pixels"]),
        (Retrieval(np.zeros(4, np.int64)), []),
    ],
)
def test_an_evaluation_has_the_baselines_that_its_protocol_can_score(protocol, names):
    train = split(Classes(np.zeros(5, np.int64), NAMES))
    assert [one.name for one in baselines.of_classes(split(protocol), train)] == names
    assert baselines.of_classes(split(protocol), None) == []


def test_classes_are_counted_at_their_positions_whatever_the_size_of_a_map():
    draw = np.random.default_rng(0)
    maps = torch.from_numpy(draw.choice([0, 1, 2, 255], (7, 4, 6)).astype(np.uint8))
    doubled = maps[:1].repeat_interleave(2, 1).repeat_interleave(2, 2)
    counts = baselines.class_counts(iter([{"mask": maps}, {"mask": doubled}]), 3)
    both = torch.cat([maps, maps[:1]])
    assert torch.equal(counts, torch.stack([(both == number).sum(0) for number in range(3)]))


def test_the_most_frequent_class_of_each_position_fits_maps_of_any_size(monkeypatch):
    left = torch.zeros((3, 4, 4), dtype=torch.uint8)
    left[:, :, 2:] = 1
    overall, each = baselines.of_scenes(2, lambda found, batch: {"found": found})
    seen = {"mask": torch.zeros((2, 8, 2), dtype=torch.uint8)}
    found = each.fit(iter([{"mask": left}]))(seen)["found"]
    assert found.shape == (2, 8, 2) and (found[:, :, 0] == 0).all() and (found[:, :, 1] == 1).all()
    left[:, 0] = 1
    assert (overall.fit(iter([{"mask": left}]))(seen)["found"] == 1).all()
    monkeypatch.setattr(baselines, "MOST_CELLS", 8)
    assert baselines.class_counts(iter([{"mask": left}]), 2).shape == (2, 2, 2)


def test_the_mean_label_map_is_stretched_to_each_volume(monkeypatch):
    maps = [torch.zeros((1, 4, 6, 8), dtype=torch.uint8) for _ in range(3)]
    for one in maps[:2]:
        one[:, :2] = 1
    maps[2][:] = 2
    (baseline,) = baselines.of_volumes(3, lambda found, batch: {"found": found})
    predict = baseline.fit(iter([{"mask": one} for one in maps]))
    found = predict({"mask": torch.zeros((1, 8, 3, 5))})["found"]
    assert found.shape == (1, 8, 3, 5) and (found[0, :4] == 1).all() and (found[0, 5:] == 0).all()
    monkeypatch.setattr(baselines, "MOST_CELLS", 3 * 24)
    assert baselines.mean_label_map(iter([{"mask": one} for one in maps]), 3).shape == (1, 3, 2, 3, 4)


def rows(right):
    """Rows of a classification of which some images are right."""
    label = np.zeros(len(right), np.int64)
    logits = np.where(np.asarray(right)[:, None], [2.0, 0, 0], [0, 2.0, 0])
    found = score_classes(logits, Classes(label, NAMES)).rows
    return {
        name: np.asarray(column, dtype=object if isinstance(column, list) else None) for name, column in found.items()
    }


def test_a_difference_is_paired_where_samples_are_the_same_and_wider_where_nothing_is_known_of_one():
    draw = np.random.default_rng(0)
    base = draw.random(400) < 0.5
    better = base | (draw.random(400) < 0.1)
    gap = float(better.mean() - base.mean())
    paired = bootstrap.difference(rows(base), rows(better), "top1", gap, 500)
    alone = bootstrap.difference(rows(base), None, "top1", gap, 500)
    other = bootstrap.difference(rows(base), rows(better[:300]), "top1", gap, 500)
    assert paired.apart == 1 and alone.apart == 0 and alone == other
    # Standard errors: of a difference of shares of the same images, and of two shares of 400.
    assert paired.high - paired.low == pytest.approx(2 * 1.96 * (better ^ base).std() / 20, rel=0.15)
    assert alone.high - alone.low == pytest.approx(2 * 1.96 * base.std() * 2**0.5 / 20, rel=0.15)
    assert bootstrap.difference(rows(base), rows(better), "unheard_of", gap) is None
    assert bootstrap.difference({}, None, "top1", gap) is None


def test_pairs_have_no_baseline_by_classes():
    numbers = np.arange(4)
    assert baselines.of_classes(split(Pairs(numbers, numbers, numbers > 1)), split(Classes(numbers, NAMES))) == []
