"""Which split of a source is meant, by what a path names and what the set is for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from table_sets import lines, parquet, png, put, samples, saved, shard

from trainkit.data import source_splits, sources
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


def _folders(root: Path) -> Path:
    return put(root, "train/cat/1.png", "train/dog/1.png", "val/cat/2.png")


def _rows(root: Path) -> Path:
    return parquet(
        root / "a.parquet", image=[png(k) for k in range(3)], label=[0, 1, 0], split=["train", "train", "val"]
    )


def _files(root: Path) -> Path:
    for seed, name in enumerate(["train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001", "test"]):
        parquet(root / f"{name}.parquet", image=[png(seed)], label=[seed % 2])
    return root


def _files_of_the_hub(root: Path) -> Path:
    _files(root / "data")
    return root


def _shards(root: Path) -> Path:
    for name, first in (("train-0", 0), ("train-1", 2), ("val-0", 4)):
        shard(root / f"{name}.tar", *samples(first, 2))
    return root


def _metadata(root: Path) -> Path:
    for split, seeds in (("train", (0, 1)), ("val", (2,))):
        lines(root / split / "metadata.csv", "file_name,label", *(f"{seed}.png,{seed % 2}" for seed in seeds))
        for seed in seeds:
            (root / split / f"{seed}.png").write_bytes(png(seed))
    return root


KINDS: dict[str, tuple[Callable[[Path], Path], dict[str, list[int]]]] = {
    "folders": (_folders, {"train": [0, 1], "val": [2]}),
    "a column": (_rows, {"train": [0, 1], "val": [2]}),
    "parquet files": (_files, {"train": [0, 1], "validation": [2], "test": [3]}),
    "parquet files in data": (_files_of_the_hub, {"train": [0, 1], "validation": [2], "test": [3]}),
    "shards": (_shards, {"train": [0, 1, 2, 3], "val": [4, 5]}),
    "metadata": (_metadata, {"train": [0, 1], "val": [2]}),
    "saved": (lambda root: saved(root, train=[0, 1, 2], validation=[3]), {"train": [0, 1, 2], "validation": [3]}),
}
"""Sources with splits, and the seeds of the images of each."""


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_source_has_the_splits_that_its_path_may_name(tmp_path, kind):
    make, splits = KINDS[kind]
    place = make(tmp_path / "set")
    named = {f"#{split}": seeds for split, seeds in splits.items()}
    if kind != "folders":  # there the splits would be classes
        named[""] = splits["train"]
    for split, seeds in named.items():
        source = sources.open_source(f"{place}{split}")
        found = [record.data for record in source.records()]
        sides = (8, 8) if kind == "shards" else (6, 10)
        assert [data if isinstance(data, bytes) else data.read_bytes() for data in found] == [
            png(seed, *sides) for seed in seeds
        ]
        assert source.size in (len(seeds), None)
    there = ", ".join(sorted(splits))
    with pytest.raises(UserError, match=f"set.*#nothing: no such split; available: {there}; expected one of these"):
        sources.open_source(f"{place}#nothing")


@pytest.mark.parametrize("text", ["set.parquet#val", "set.csv#val", "alone#test"])
def test_sets_without_splits_are_taken_for_none(tmp_path, text):
    parquet(tmp_path / "set.parquet", image=[png(0)], label=[0])
    put(tmp_path, "0.png")
    lines(tmp_path / "set.csv", "image,label", "0.png,0")
    saved(tmp_path / "alone", alone=[5])
    assert sources.open_source(tmp_path / text.partition("#")[0]).size == 1
    with pytest.raises(UserError, match=r"#(val|test): no such split"):
        sources.open_source(tmp_path / text)
