"""Verification sets of pairs.csv: images and pairs of them."""

from __future__ import annotations

import csv
import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from trainkit.data.folders import inside
from trainkit.data.formats.table_files import csv_lines
from trainkit.data.record import Record, Source
from trainkit.errors import UserError, listing, number_of
from trainkit.evaluation_protocols import Pairs

COLUMNS = ["path_a", "path_b", "same"]
FOLDS = 10
"""Runs of lines that accuracy is counted over: the ten folds of LFW."""

_SAME = {"1": True, "0": False, "true": True, "false": False}


def read_csv(file: Path) -> tuple[Source, Pairs]:
    """Read `path_a,path_b,same` with paths relative to the folder of the file; same is 1 or 0. No image comes twice.

    Raises UserError for a line of another form, a path out of the folder, and all pairs that would count for more or
    less than one comparison: of an image with itself, or of two that were compared before, in either order.
    """
    names, pairs = read_names(file, lambda name, where: inside(file.parent, name, where))
    paths = [file.parent / name for name in names]

    def records() -> Iterator[Record]:
        for row, (name, path) in enumerate(zip(names, paths, strict=True)):
            yield Record(name, -1, path, f"{path} (image {row} of {file.name})")

    return Source("pairs", str(file), len(names), records, (file, *paths)), pairs


def read_names(file: Path, check: Callable[[str, str], object]) -> tuple[list[str], Pairs]:
    """Read the names that stand in a file of pairs, each once in the order of the lines, and the pairs of their places.

    `check` gets each name and its place in words. Raises UserError as `read_csv` does, and what `check` raises.
    """
    rows: dict[str, int] = {}
    first, second, same = [], [], []
    before: dict[frozenset[str], int] = {}
    wrong: list[str] = []
    lines = csv_lines(file)
    header = next(lines, (1, []))[1]
    if header != COLUMNS:
        raise UserError(f"{file}, line 1", ",".join(header)[:200] or "nothing", ",".join(COLUMNS))
    for number, line in lines:
        where = f"{file}, line {number}"
        if len(line) != 3 or line[2].strip().lower() not in _SAME:
            raise UserError(where, ",".join(line)[:200], "two paths and 1 or 0")
        for name, column in ((line[0], first), (line[1], second)):
            if name not in rows:
                check(name, where)
            column.append(rows.setdefault(name, len(rows)))
        pair = frozenset(map(os.path.normpath, line[:2]))
        if len(pair) == 1:
            wrong.append(f"line {number}: {line[0]} with itself")
        elif earlier := before.get(pair):
            wrong.append(f"line {number}: {line[0]} with {line[1]}, a duplicate of line {earlier}")
        before.setdefault(pair, number)
        same.append(_SAME[line[2].strip().lower()])
    if not same:
        raise UserError(str(file), "no pairs", "at least one line below the header")
    if wrong:
        found = f"{number_of(len(wrong), 'pairs')} of one image, or duplicates:{listing(wrong)}\n"
        raise UserError(str(file), found, "each pair of two images once, in either order", "remove these lines")
    return list(rows), _pairs(first, second, same)


def _pairs(first: list[int], second: list[int], same: list[bool]) -> Pairs:
    return Pairs(np.asarray(first, np.int64), np.asarray(second, np.int64), np.asarray(same, bool))


def draw(people: Mapping[str, list[str]], where: str, most: int = 6000, seed: int = 0) -> list[tuple[str, str, int]]:
    """Draw pairs of images of people, given by their names: two images, and 1 for the same person or else 0.

    Half are of one person, and connect what is shown of each: so the pairs say who is whom. People with one image are
    in pairs of two people alone. The pairs come in ten runs, each of other people where there are 20 or more, for the
    ten folds that accuracy is counted by. `most` pairs at the most. Raises UserError naming `where` for too few.
    """
    rng = np.random.default_rng(seed)
    names = rng.permutation(sorted(people)).tolist()
    runs = [names[run::FOLDS] for run in range(FOLDS)] if len(names) >= 2 * FOLDS else [names]
    same, others, each = _balanced(people, runs, rng, most)
    if len(runs) > 1 and not each:  # somebody with several images is not in each run
        same, others, each = _balanced(people, [names], rng, most)
    if len(names) < 2 or each * len(same) < FOLDS:
        found = f"{len(names)} people, {each * len(same)} pairs of one of them"
        raise UserError(where, found, f"{FOLDS} pairs or more, of people with several images each")
    return [
        pair
        for of_one, of_two in zip(same, others, strict=True)
        for one, other in zip(of_one[:each], of_two, strict=True)
        for pair in ((*one, 1), (*other, 0))
    ]


def written(pairs: Iterable[tuple[str, str, int]]) -> str:
    """Return the text of a file of pairs."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(COLUMNS)
    lines.writerows(pairs)
    return text.getvalue()


def _balanced(
    people: Mapping[str, list[str]], runs: list[list[str]], rng: np.random.Generator, most: int
) -> tuple[list[list[tuple[str, str]]], list[list[tuple[str, str]]], int]:
    """Draw pairs of one person and of two for each run, and how many of each kind all runs have."""
    groups = [[people[name] for name in run] for run in runs]
    same = [_same(group, rng, most // (2 * len(runs))) for group in groups]
    each = min(map(len, same))
    while True:
        others = [_different(group, pairs[:each], rng) for group, pairs in zip(groups, same, strict=True)]
        if min(map(len, others)) >= each:
            return same, others, each
        each = min(map(len, others))


def _same(people: list[list[str]], rng: np.random.Generator, most: int) -> list[tuple[str, str]]:
    """Up to so many pairs of one person each, no pair twice; any first ones connect what they have of a person."""
    shuffled = [rng.permutation(pictures).tolist() for pictures in people]
    paths = [list(itertools.pairwise(pictures)) for pictures in shuffled]
    pairs = [pair for step in itertools.zip_longest(*paths) for pair in step if pair is not None]
    there = set(pairs)
    more = [pair for pictures in shuffled for pair in itertools.combinations(pictures, 2) if pair not in there]
    return (pairs + [more[place] for place in rng.permutation(len(more)).tolist()])[:most]


def _different(people: list[list[str]], same: list[tuple[str, str]], rng: np.random.Generator) -> list[tuple[str, str]]:
    """As many pairs of two people as there are of one, or as can be found, of images that those have."""
    shown = set(itertools.chain.from_iterable(same))
    known = [[picture for picture in pictures if picture in shown] or pictures[:1] for pictures in people]
    found: dict[tuple[str, str], None] = {}
    for _ in range(20 * len(same)):
        if len(found) == len(same) or len(people) < 2:
            break
        first, second = sorted(rng.choice(len(people), 2, replace=False).tolist())
        found[str(rng.choice(known[first])), str(rng.choice(known[second]))] = None
    return list(found)
