"""People kept from training: those whom a file of pairs names are evaluated on these pairs, and are not trained on."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainkit.data import pairs_csv
from trainkit.data.storage.image_store import Packed
from trainkit.errors import UserError, few, listing, number_of
from trainkit.evaluation_protocols import Pairs


@dataclass(frozen=True)
class Divided:
    """The rows of a packed set of people, divided by a file of pairs."""

    train: np.ndarray
    """int64, rows of all people whom the pairs do not name."""
    label: np.ndarray
    """int64 (len(train),), their people, as `names` numbers them."""
    names: tuple[str, ...]
    """People who are trained on."""
    scored: np.ndarray
    """int64, rows of the images that the pairs name."""
    people: tuple[str, ...]
    """Those whom they show."""
    pairs: Pairs
    """The pairs, by places in `scored`."""


def divide(data: Packed, file: Path) -> Divided:
    """Divide a set of people by a file of pairs of its images, `path_a,path_b,same` with paths as its ids have them.

    A person of whom the file names one image is kept from training with all of them. Raises UserError where the file
    cannot be read, names what is not there, calls two people the same, or leaves fewer than two to train on.
    """
    names, pairs = pairs_csv.read_names(file, lambda name, where: None)
    wanted, rows = dict.fromkeys(names, -1), np.full(len(names), -1, np.int64)
    twice: set[str] = set()
    for row, name in enumerate(itertools.chain.from_iterable(data.texts_by_batch("id"))):
        if name in wanted:
            twice.update([name] if wanted[name] >= 0 else ())
            wanted[name] = row
    rows[:] = list(wanted.values())
    if absent := [name for name, row in wanted.items() if row < 0]:
        found = f"{number_of(len(absent), 'images')} that the training set does not have: {few(absent)}"
        raise UserError(str(file), found, "paths in data.train, <person>/<image>", "write other pairs, or remove these")
    if twice:
        raise UserError(str(file), f"names of several images each: {few(sorted(twice))}", "names of one image each")
    label = np.asarray(data.labels)
    shown = label[rows]
    _check_same(file, names, shown, pairs)
    held = np.unique(shown)
    train = np.flatnonzero(~np.isin(label, held))
    left, numbers = np.unique(label[train], return_inverse=True)
    if len(left) < 2:
        found = f"names {len(held)} of {data.classes} people, leaving {len(left)} for training"
        raise UserError(str(file), found, "at least 2 left", "remove the pairs of some people")
    called = data.class_names
    return Divided(
        train,
        numbers.astype(np.int64),
        tuple(called[person] for person in left.tolist()),
        rows,
        tuple(called[person] for person in held.tolist()),
        pairs,
    )


def _check_same(file: Path, names: list[str], shown: np.ndarray, pairs: Pairs) -> None:
    """Raise UserError for pairs that say otherwise than the set who is whom."""
    wrong = np.flatnonzero((shown[pairs.first] == shown[pairs.second]) != pairs.same)
    if len(wrong):
        said = [
            f"line {row + 2}: {names[pairs.first[row]]} and {names[pairs.second[row]]}, {int(pairs.same[row])}"
            for row in wrong.tolist()
        ]
        found = f"{number_of(len(wrong), 'pairs')} in conflict with the folders:{listing(said)}\n"
        raise UserError(str(file), found, "1 for two images of one person, else 0", "correct these lines")
