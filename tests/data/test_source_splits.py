"""Which split of a source is meant, by what a path names and what the set is for."""

from __future__ import annotations

import pytest

from trainkit.data import source_splits
from trainkit.errors import UserError


@pytest.mark.parametrize(
    ("there", "split", "part", "meant"),
    [
        ("train val", None, None, "train"),
        ("train val", "val", None, "val"),
        ("test", None, None, "test"),
        ("all", None, "val", "all"),
        ("training validation", "val", "train", "validation"),
        ("training validation", None, "val", "validation"),
        ("train2017 val2017", None, "val", "val2017"),
        ("valid dev", "dev", "train", "dev"),
        ("validation", "val", None, "x#val: no such split; available: validation; expected one of these after #"),
        ("val test", None, None, "x: no split 'train'; available: test, val; expected one of these after #"),
        ("train", None, "val", "x: no split 'val'; available: train; expected one of these after #"),
        ("", "val", None, "x#val: no such split; expected the path alone"),
    ],
)
def test_a_split_is_chosen_by_its_name_and_never_by_chance(there, split, part, meant):
    splits = {name: len(name) for name in there.split() or [""]}
    try:
        assert source_splits.choose(splits, split, "x", part) == (meant, splits.get(meant))
    except UserError as error:
        assert str(error) == meant
