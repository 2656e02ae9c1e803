"""Splits: views that forward all, hold-outs, and defaults."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from trainkit.data.split import EvalSplit, Holdout, SplitView, TrainSplit, check_evaluate, evaluated, missing, spread
from trainkit.errors import UserError
from trainkit.interfaces import ComparableSplit


class Numbers(TrainSplit):
    """Ten samples that are their own rows."""

    name, size, digest, views, seed, any_thread = "train", 10, "d", 1, 3, True

    def fetch(self, indices, epoch, view=None):
        return {"index": torch.as_tensor(indices)}

    def on_device(self, batch):
        return batch | {"done": batch["index"] + 1}

    def held(self):
        return "all"


class Doubled(SplitView):
    """Replaces what is read."""

    def fetch(self, indices, epoch, view=None):
        return {"index": 2 * super().fetch(indices, epoch, view)["index"]}


def test_a_view_has_the_members_of_every_split_and_those_that_only_some_have_not():
    split = Numbers()
    for view in (SplitView(split), pickle.loads(pickle.dumps(SplitView(split)))):
        for name in ("name", "size", "digest", "views", "protocol", "at_once", "any_thread"):
            assert getattr(view, name) == getattr(split, name), name
        assert isinstance(split, ComparableSplit) and not isinstance(view, ComparableSplit)
        assert np.array_equal(view.order(1, 4)[0, 0:4], split.order(1, 4)[0, 0:4])
        assert view.on_device(view.fetch(np.arange(3), 0))["done"].tolist() == [1, 2, 3]
    assert Doubled(split).fetch(np.arange(3), 0)["index"].tolist() == [0, 2, 4] and Doubled(split).size == 10


def test_an_epoch_is_shuffled_and_no_batch_larger_than_the_split():
    order = Numbers().order(0, 5)
    assert order.shape == (2, 5) and sorted(np.concatenate([order[0, 0:5], order[1, 0:5]])) == list(range(10))
    with pytest.raises(UserError, match="1 to 10"):
        Numbers().order(0, 11)
    with pytest.raises(ValueError, match="is an evaluation split"):
        type("Scored", (EvalSplit,), {"name": "val", "fetch": None, "on_device": None})().order(0, 1)


@pytest.mark.parametrize(("size", "most", "places"), [(3, 5, [0, 1, 2]), (10, 2, [2, 7]), (5, 5, [0, 1, 2, 3, 4])])
def test_places_are_spread_evenly(size, most, places):
    assert spread(size, most).tolist() == places


def test_groups_are_held_out_by_share_or_name_and_samples_of_none_are_trained():
    names, group = ["a", "b", "c", "d"], np.asarray([0, 1, 2, 3, 0, -1])
    kept, held = Holdout(["b", "d"]).divide(group, names, 0)
    assert kept.tolist() == [0, 2, 4, 5] and held.tolist() == [1, 3]
    assert len(Holdout(0.5).choose(names, 0)) == 2 and len(Holdout(0.01).choose(names, 0)) == 1
    with pytest.raises(UserError, match=r"unknown people: x"):
        Holdout(["x"], "person", "people").divide(group, names, 0)
    with pytest.raises(UserError, match="leaves no training data"):
        Holdout(names).divide(group[:5], names, 0)
    with pytest.raises(UserError, match="holds nothing out"):
        Holdout(["d"]).divide(np.asarray([0, 1]), names, 0)


def test_names_of_evaluation_sets_are_checked_and_completed():
    with pytest.raises(ValueError, match="is not set; set it to the patients"):
        check_evaluate({"v": "held_out"}, False, "fold", "patients")
    with pytest.raises(ValueError, match="is not the patients of fold"):
        check_evaluate({"held_out": "b"}, True, "fold", "patients")
    with pytest.raises(ValueError, match="the name 'a/b'"):
        check_evaluate({"a/b": "c"}, False, "fold", "patients")
    assert evaluated({"a": "b"}, True) == {"a": "b", "held_out": "held_out"}
    assert evaluated({"v": "held_out"}, True) == {"v": "held_out"} and evaluated({}, False) == {}


def test_missing_sets_are_named_by_their_keys():
    found = missing("t", {"a": "held_out", "b": "sample:x", "c": "c"}, lambda text: f"no {text}", {"data.x": "y"})
    assert found == ["data.train: no t", "data.evaluate.c: no c", "data.x: y"]
