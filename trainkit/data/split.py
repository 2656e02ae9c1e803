"""Members that all splits repeat, groups held out of training, leaks between splits, and views of a split."""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, PlainSerializer, TypeAdapter, ValidationError

from trainkit import rng
from trainkit.config.ranges import FractionBetween
from trainkit.config.units import Share
from trainkit.data import leakage, sources
from trainkit.data.leakage import Held
from trainkit.data.sources import HELD_OUT, PARTS, SAMPLE
from trainkit.errors import UserError, few, number_of
from trainkit.interfaces import Batch, Data, NamesEvaluationSets, NamesTrainingSet, RowOrder, Split, ThreadSafeFetch

_log = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9_-]+")


# ---- Members of splits


class TrainSplit(Split):
    """Defaults of a split that is trained on: shuffled in every epoch, read in batches of any size."""

    seed: int
    at_once = None
    any_thread = False
    """True where `fetch` may run in a thread beside the training; it then uses no generator of the process."""
    protocol: object = None

    def order(self, epoch: int, batch_size: int) -> RowOrder:
        """Return the rows of one epoch, shuffled, int64 (updates, batch_size); what fills no batch is left out.

        Raises UserError when there are fewer samples than one batch takes.
        """
        check_batch(self, batch_size)
        return rng.order(self.seed, epoch, self.size, batch_size)


class EvalSplit(Split):
    """Defaults of a split that is evaluated only: in order and without augmentation."""

    views = 1
    at_once = None
    any_thread = False

    def order(self, epoch: int, batch_size: int) -> RowOrder:
        """Raise ValueError: such a split is not trained on."""
        raise ValueError(f"{self.name} is an evaluation split")


class SplitView(Split):
    """A split through which another one is read; a subclass replaces what it changes.

    It has the members of `Split` and `any_thread`, and none of those that only some splits have. So behind cached
    outputs a damaged sample is replaced by one of any class: nothing there says which samples are of its own.
    """

    def __init__(self, split: Split):
        self.split, self.any_thread = split, isinstance(split, ThreadSafeFetch) and split.any_thread
        self.name, self.size, self.digest, self.views = split.name, split.size, split.digest, split.views
        self.protocol, self.at_once = split.protocol, split.at_once

    def order(self, epoch: int, batch_size: int) -> RowOrder:
        """Return the rows of one epoch, as the split does."""
        return self.split.order(epoch, batch_size)

    def fetch(self, indices: np.ndarray, epoch: int, view: int | None = None) -> Batch:
        """Read the samples at `indices`, as the split does."""
        return self.split.fetch(indices, epoch, view)

    def on_device(self, batch: Batch) -> Batch:
        """Finish a batch on its device, as the split does."""
        return self.split.on_device(batch)


def check_batch(split: Split, batch_size: int) -> None:
    """Raise UserError when a batch takes more samples than the split has."""
    if not 1 <= batch_size <= split.size:
        raise UserError("batch_size", str(batch_size), f"1 to {split.size}, the number of samples in {split.name}")


def spread(size: int, most: int) -> np.ndarray:
    """Return `most` of `size` places at equal distances, int64, the same in every run; all where there are fewer."""
    return np.arange(size) if size <= most else (2 * np.arange(most) + 1) * size // (2 * most)


FEW, FEW_OF_A_CLASS = 30, 5
"""Samples of an evaluation set, and of a class in it, below which a warning says so."""


def warn_of_few(where: str, size: int, what: str, counts: Mapping[str, int]) -> None:
    """Warn of an evaluation set so small that one sample moves its score, and of classes with few samples in it.

    `what` is the plural noun of samples; `counts` has the samples of each class, and is empty without classes.
    """
    said = [f"{number_of(size, what)}: one of them moves a score by up to {100 / size:.0f} %"] if size < FEW else []
    rare = [name for name, count in counts.items() if 0 < count < FEW_OF_A_CLASS <= size]
    if rare:
        said.append(f"fewer than {FEW_OF_A_CLASS} {what} of {few(rare)}")
    for sentence in said:
        _log.warning("%s: %s", where, sentence)


# ---- Groups that are held out of training


def by_another_seed(data: Any, recipe: Any) -> bool:
    """Return True where a part of the data is drawn by another seed than the training's.

    The digest of a recipe covers `split_seed` then alone: with the seed of the training, which drew it before there was
    that key, it is the same experiment.
    """
    parts = (data.hold_out, vars(data).get("hold_out_test"))
    return any(isinstance(part, float) for part in parts) and data.split_seed != recipe.seed


_share = TypeAdapter(Share)


def _parse_hold_out(value: object) -> object:
    if isinstance(value, list) and value and all(isinstance(name, str) for name in value):
        return value
    try:
        return _share.validate_python(value)
    except ValidationError:
        raise ValueError(f"{value!r} is neither a percentage such as 20% nor a list of group names") from None


def _write_hold_out(value: float | list[str]) -> Any:
    return _share.dump_python(value) if isinstance(value, float) else value


HoldOut = Annotated[
    FractionBetween | list[str],
    "a percentage such as 20%, or a list of group names",
    BeforeValidator(_parse_hold_out),
    PlainSerializer(_write_hold_out, return_type=str | list[str]),
]
"""A share of the groups, or their names."""


@dataclass(frozen=True)
class Holdout:
    """Groups that are kept from training and evaluated as `held_out`, by `data.hold_out` of a recipe."""

    value: float | list[str] | None
    """Share of the groups, or their names; None: nothing is held out."""
    one: str = "group"
    """Noun of messages."""
    several: str = "groups"

    def check(self, evaluate: Mapping[str, str]) -> None:
        """Raise ValueError where the names of `evaluate` do not fit each other or what is held out."""
        check_evaluate(evaluate, self.value is not None, "hold_out", self.several)

    def choose(self, names: Sequence[str], seed: int) -> np.ndarray:
        """Return the places of held-out groups among `names`, all different, int64.

        Raises UserError where one that is named is not there, or there are not two to divide.
        """
        if isinstance(self.value, list):
            wanted = set(self.value)
            if absent := sorted(wanted - set(names)):
                found = f"unknown {self.several}: {few(absent)}"
                raise UserError("data.hold_out", found, f"some of: {few(sorted(names), 20)}")
            return np.flatnonzero([name in wanted for name in names])
        if len(names) < 2:
            raise UserError("data.hold_out", f"{len(names)} {self.one} ({few(names)})", "at least 2")
        # By a hash of the name and not by its place, so that one added later moves few of the others.
        codes = np.asarray([zlib.crc32(name.encode(errors="surrogateescape")) for name in names])
        order = np.lexsort((np.asarray(names), rng.words(seed, "hold_out", codes)))
        return order[: min(max(1, round((self.value or 0.0) * len(names))), len(names) - 1)]

    def divide(self, group: np.ndarray, names: Sequence[str], seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Divide samples by the place of their group among `names`: places to train on, and held-out ones, int64.

        Raises UserError where one of the two is empty, and as `choose` does.
        """
        chosen = self.choose(names, seed)
        out = np.isin(group, chosen)
        if out.all() or not out.any():
            rest = "leaves no training data" if out.any() else "holds nothing out"
            found = f"{len(chosen)} of {len(names)} {self.several}, which {rest}"
            raise UserError("data.hold_out", found, f"some {self.several} on each side")
        return np.flatnonzero(~out), np.flatnonzero(out)

    def divide_classes(self, label: np.ndarray, names: Sequence[str], seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Divide samples that are each a group of its own: the share of each class, int64 places, as `divide` does.

        `names` are those of the samples. Of a class at least one is held out, and one is trained on.
        """
        held = []
        for number in np.unique(label).tolist():
            rows = np.flatnonzero(label == number)
            if len(rows) > 1:
                held.append(rows[self.choose([names[row] for row in rows.tolist()], seed)])
        out = np.zeros(len(label), bool)
        out[np.concatenate([np.arange(0), *held])] = True
        if not out.any():
            raise UserError("data.hold_out", "one image of each class", "two or more of some class")
        return np.flatnonzero(~out), np.flatnonzero(out)


def check_evaluate(evaluate: Mapping[str, str], held_out: bool, setting: str, several: str) -> None:
    """Raise ValueError for names of evaluation sets that are taken, and where `held_out` does not fit the `setting`."""
    if HELD_OUT in evaluate.values() and not held_out:
        raise ValueError(f"evaluate has {HELD_OUT}, but {setting} is not set; set it to the {several} to hold out")
    if held_out and evaluate.get(HELD_OUT, HELD_OUT) != HELD_OUT:
        raise ValueError(f"evaluate.{HELD_OUT} is not the {several} of {setting}; choose another name")
    check_names(evaluate)


def check_names(evaluate: Iterable[str]) -> None:
    """Raise ValueError for an evaluation set whose name cannot stand in that of a split, or is taken."""
    for name in evaluate:
        if not _NAME.fullmatch(name) or name == "train":
            raise ValueError(f"evaluate has the name {name!r}; use letters, digits, - and _, but not `train`")


def evaluated(evaluate: Mapping[str, str], held_out: bool) -> dict[str, str]:
    """Return the evaluation sets of a recipe, by name, with the `held_out` groups where no name stands for them."""
    extra = held_out and HELD_OUT not in evaluate.values()
    return {**evaluate, HELD_OUT: HELD_OUT} if extra else dict(evaluate)


# ---- Sets of a recipe


def key(name: str) -> str:
    """Return the recipe key of a set: `data.train`, or `data.evaluate.NAME`."""
    return "data.train" if name == "train" else f"data.evaluate.{name}"


def named_sets(data: Data) -> dict[str, str]:
    """Return the sets that a recipe names, by name: `train`, empty where it names none, and those of `evaluate`."""
    train = data.train if isinstance(data, NamesTrainingSet) else ""
    return {"train": train, **(data.evaluate if isinstance(data, NamesEvaluationSets) else {})}


def missing(
    train: str,
    evaluate: Mapping[str, str],
    find: Callable[[str], str | None] = sources.missing,
    also: Mapping[str, str | None] | None = None,
) -> list[str]:
    """Return a sentence for each set of a recipe that is not there yet; `also` holds sentences of other keys."""
    places = {"train": train, **evaluate}.items()
    found = {key(name): find(text) for name, text in places if text not in PARTS and not text.startswith(SAMPLE)}
    return [f"{where}: {sentence}" for where, sentence in (found | {**(also or {})}).items() if sentence]


def check_leaks(
    train: Held,
    scored: Mapping[str, Held],
    policy: Literal["refuse", "allow"],
    expected: str,
    remedy: str,
    also: Iterable[tuple[str, str]] = (),
) -> None:
    """Compare evaluation sets, by name, with the training set; `also` are names of sets and further leaks.

    Raises UserError naming all leaks, or logs each as a warning where `policy` is `allow`.
    """
    found = [(key(name), said) for name, said in also]
    found += [(key(name), leak.said) for name, held in scored.items() for leak in leakage.leaks(train, held)]
    if found and policy == "refuse":
        listing = "".join(f"\n  {where}: {leak}" for where, leak in found)
        raise UserError("data", f"train/test leakage:{listing}", f"\n{expected}", remedy)
    for where, leak in found:
        _log.warning("%s: %s; its metrics are too optimistic", where, leak)
