"""What differs between two recipes: few lines, and enough to make one of the other."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.config import diff, loader, yaml_reader

ROOT = Path(__file__).resolve().parents[2]

scalars = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.sampled_from(["a", "b c", "1", ""])
trees = st.dictionaries(
    st.sampled_from("abcd"),
    st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner)),
)


def applied(tree, found):
    """The tree with the changes made in it: written without a look at how they were found."""
    tree = copy.deepcopy(tree)
    for change in found:
        place, parts = tree, change.key.split(".")
        for part in parts[:-1]:
            place = place[int(part)] if isinstance(place, list) else place[part]
        if change.after is diff.ABSENT:
            del place[parts[-1]]
        elif isinstance(place, list):
            place[int(parts[-1])] = change.after
        else:
            place[parts[-1]] = change.after
    return tree


@given(trees, trees)
def test_changes_make_the_other_recipe(before, after):
    found = diff.diff(before, after)
    assert applied(before, found) == after
    assert bool(found) or before == after
    assert len({change.key for change in found}) == len(found)


@given(trees)
def test_nothing_differs_from_itself(tree):
    assert diff.diff(tree, copy.deepcopy(tree)) == []


def of(name, *words):
    return yaml_reader.read(loader.dump(loader.load(ROOT / "recipes" / f"{name}.yaml", words))).tree


def test_what_was_changed_in_a_recipe_is_what_is_said():
    found = diff.diff(of("convnext"), of("convnext", "optim.lr=0.123", "seed=5", "train.precision=bf16"))
    assert str(found[0]) == "seed  0 -> 5"
    assert {change.key for change in found} == {"seed", "optim.lr", "train.precision"}
    assert diff.lines(found)[0].startswith("seed             0 -> 5")


def test_another_kind_of_block_is_one_line_and_what_both_know():
    before = {"data": {"name": "faces", "train": "a", "mirror": True}}
    after = {"data": {"name": "images", "train": "b", "crop": 3}}
    assert [str(change) for change in diff.diff(before, after)] == [
        "data.name  faces -> images",
        "data.train  a -> b",
    ]


@pytest.mark.parametrize(
    ("a", "b", "differ"),
    [(1, 1.0, False), (1, True, True), (0, False, True), ("1", 1, True), ([1], [True], True), ([2], [2.0], False)],
)
def test_numbers_are_numbers_and_no_truths(a, b, differ):
    assert bool(diff.diff({"k": a}, {"k": b})) == differ


def test_keys_that_are_varied_have_several_values_and_the_tree_stays_as_it_was():
    tree = {"seed": 0, "optim": {"lr": 0.1, "betas": [0.9, 0.99]}}
    before = diff.varied(tree, ["optim.lr", "seed", "no.such", "optim.none", "seed.deeper"])
    assert tree == {"seed": 0, "optim": {"lr": 0.1, "betas": [0.9, 0.99]}}
    assert [str(change) for change in diff.diff(before, tree)] == [
        "seed  (several) -> 0",
        "optim.lr  (several) -> 0.1",
    ]
    whole = diff.diff({"optim": {"lr": 1}, "seed": 0}, diff.varied(tree, ["optim"]))
    assert [str(change) for change in whole] == ["optim  {lr: 1} -> (several)"]
    assert diff.diff(before, diff.varied({**tree, "seed": 7}, ["seed", "optim.lr"])) == []


def test_long_values_are_cut_and_absent_ones_said():
    (change,) = diff.diff({}, {"k": "x" * 500})
    assert str(change).startswith("k  (none) -> ") and len(str(change)) < 90


def test_a_resolved_recipe_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(loader.dump(loader.load(ROOT / "recipes" / "segment.yaml")))
    assert diff.diff(diff.read(file), of("segment")) == []
