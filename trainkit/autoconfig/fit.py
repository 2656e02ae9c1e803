"""Fitting a recipe to other data: what follows from the data is filled in, what only its owner knows is noted.

The data is looked at with the readers that a training uses. Each kind of data has a module of its own; here is what
they share: the tree that is changed, splits that are found, evaluations under other names, and lengths in steps.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal, TypeVar

import numpy as np

from trainkit.config.schema import Recipe
from trainkit.config.units import Span, read_batch_size, samples_per_update
from trainkit.config.yaml_reader import Tree
from trainkit.data import hub, kinds, sources
from trainkit.data.folders import SPLITS, visible
from trainkit.errors import UserError, number_of
from trainkit.paths import data_root, locate

LOOKED_AT = 500
"""Images that are read for sizes, mean and standard deviation, spread evenly over a set."""

FEW_UPDATES = 300
"""A training of fewer is noted: what was chosen for more of them rarely fits."""

UPDATES = 8
"""Updates of an epoch below which the batch is made smaller."""

_OF_THE_OLD = ("stop_when", "promote", "downloads")
"""Blocks that speak of the old data and are left out."""

Key = tuple[str, ...]
Start = Literal["fine-tune", "probe", "scratch"]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Note:
    """A comment behind a line of the new recipe."""

    text: str
    decide: bool
    """The data does not say it: whoever owns the data should look at the line."""


@dataclass(frozen=True)
class Asked:
    """Options of the command line on how training starts."""

    start: Start | None = None
    """None: chosen by what the data shows."""
    weights: str | None = None
    """A file or `timm:NAME.TAG`; None: those that are found."""
    test: str | None = None
    """Share of a set without splits that is held out as a test set: `15%`."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Columns of a table by what they are taken for, where they are not guessed."""


@dataclass
class Fitted:
    """A recipe's text as a tree, changed to fit other data, and what was found on the way."""

    tree: dict[str, Tree]
    new: Path = Path("mine.yaml")
    """The file that the new recipe will be."""
    seen: list[str] = field(default_factory=list)
    """Sentences about the data."""
    notes: dict[Key, Note] = field(default_factory=dict)
    files: dict[Path, str] = field(default_factory=dict)
    """Files that belong to the new recipe, and what is to be in them."""
    scored: dict[str, str] = field(default_factory=dict)
    """Sets to be evaluated on, by name."""
    asked: Asked = Asked()
    start: str = ""
    """How training starts, and why; empty where the recipe says it."""
    time: str = ""
    """How long a run will take; empty where it is not forecast."""

    @property
    def columns(self) -> dict[str, str]:
        """Columns of a table that the recipe names."""
        return self.get("data.columns") or {}

    def get(self, key: str) -> Tree:
        """The value at a dotted key; None where there is none."""
        node: Tree = self.tree
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node

    def put(self, key: str, value: Tree, why: str = "") -> None:
        """Set a value, making the blocks around it; `why` is said behind its line."""
        *above, last = path = tuple(key.split("."))
        node = self.tree
        for part in above:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        node[last] = value
        if why:
            self.notes[tuple(path)] = Note(why, False)

    def drop(self, *keys: str) -> None:
        """Leave out what was said of the old data."""
        for key in keys:
            block, _, last = key.rpartition(".")
            node = self.get(block) if block else self.tree
            if isinstance(node, dict):
                node.pop(last, None)

    def begin(self, block: str, *keys: str) -> None:
        """Put these keys of a block first, in their order: as it is read best."""
        tree = self.tree[block]
        self.tree[block] = {key: tree[key] for key in keys if key in tree} | tree

    def keep(self, part: str, text: str) -> str:
        """Have a text kept beside the new recipe; its name, as a recipe has it. Raises UserError if it is there."""
        file = self.new.with_name(f"{self.new.stem}_{part}.txt")
        if file.exists():
            raise UserError(str(file), "already exists", remedy="choose another name for the new recipe")
        self.files[file] = text
        return as_named(file)

    def decide(self, key: str, what: str) -> None:
        """Note behind the line of a key, which must be there, what its owner should decide."""
        self.notes[tuple(key.split("."))] = Note(what, True)


def fit(recipe: Recipe, tree: dict[str, Tree], data: str, new: Path, asked: Asked = Asked()) -> Fitted:
    """The tree of `recipe`, as its file has it, made to fit the data at a path or of the hub; `new` will be its file.

    Raises UserError where there is nothing there, nothing that such a recipe could learn from, or nothing that could
    start as `asked`.
    """
    kind = kinds.of(recipe.data)
    configure = kinds.function(kind, "configure") if kind else None
    if configure is None:
        expected = f"one of {', '.join(row.name for row in kinds.KINDS.values() if row.configure)}"
        raise UserError("--data", f"a recipe with data {kinds.name(recipe.data)!r}", expected, "copy it without --data")
    fitted = Fitted(tree, new, asked=asked)
    fitted.drop(*_OF_THE_OLD, "data.leakage", "data.columns")
    if asked.columns:
        fitted.put("data.columns", dict(asked.columns))
    if asked.start == "probe" and (task := fitted.get("task.name")) != "classify":
        raise UserError("--start", f"probe, for a recipe of task {task}", "a recipe of task classify, such as convnext")
    configure(fitted, recipe, named(data))
    if (asked.start or asked.weights) and not fitted.start:
        found = f"a recipe with data {kinds.name(recipe.data)!r}"
        raise UserError("--start, --weights", found, "a recipe for images of classes", "remove them")
    fitted.seen += [
        f"evaluated on {name}: {place}" for name, place in fitted.scored.items() if place != sources.HELD_OUT
    ]
    fitted.seen += [f"time: {fitted.time}"] if fitted.time else []
    if asked.test and not fitted.get("data.hold_out_test"):
        found = "data that has splits, or is not images of classes"
        raise UserError("--test", found, "images of classes without splits", "remove it")
    return fitted


def beside(text: str, opened: Callable[[str], object]) -> dict[str, str]:
    """Return the list to be evaluated on that lies beside one to train on, by name: `val.txt` beside `train.txt`."""
    path = PurePosixPath(text)
    if path.suffix.lower() not in (".txt", ".csv", ".tsv", ".json", ".jsonl") or "train" not in path.stem:
        return {}
    for word in (*SPLITS["val"], *SPLITS["test"]):
        other = path.with_name(path.name.replace("train", word, 1)).as_posix()
        if locate(other).is_file():
            with contextlib.suppress(UserError):  # as a list of what is to be predicted, without classes
                opened(other)
                return {"val": other}
    return {}


def named(word: str, option: str = "--data") -> str:
    """A path of the command line, from the current folder or else the data root, as a recipe names it.

    Data sets of the hub and built-in ones are named as they are. Raises UserError where nothing is there.
    """
    if hub.is_hub(word) or word.startswith(sources.SAMPLE):
        return word
    if not word.strip():
        raise UserError(option, "nothing", "a folder, a file or hf://owner/name")
    for place in (Path(os.path.abspath(Path(word).expanduser())), locate(word)):
        path, split = sources.split_of(place)
        if path.exists():
            break
    else:
        raise UserError(word, "does not exist", "a folder, a file or hf://owner/name")
    text = as_named(path)
    return f"{text}#{split}" if split else text


def as_named(path: Path) -> str:
    """A path as a recipe names it: from the data root where it lies below it."""
    root, path = (Path(os.path.abspath(place)) for place in (data_root(), path))
    return path.relative_to(root).as_posix() if path != root and path.is_relative_to(root) else str(path)


def refuse(text: str, expected: str, *, own: str = "") -> None:
    """Raise UserError for a built-in set, and for data of a kind that other recipes are for.

    `own` is the kind that is fitted: `volumes` or `scenes`; volumes are read from files alone.
    """
    from trainkit.data.scenes import verify
    from trainkit.data.volumes import sources as volume_sources

    if text.startswith(sources.SAMPLE):
        remedy = "copy a recipe that uses it, without --data"
        raise UserError(text, "a built-in set", "a folder or a set of the hub", remedy)
    if hub.is_hub(text):
        if own:
            raise UserError(text, "a set of the hub", f"a folder: {own} are read from files", "download it first")
        return
    place = sources.split_of(locate(text))[0]
    if not place.is_dir():
        return
    if own != "volumes" and (found := volume_sources.a_volume(place)) is not None:
        remedy = "move the volumes away, or copy tom500 or hippocampus"
        raise UserError(str(found), "a volume (NIfTI)", expected, remedy)
    if own != "scenes" and verify.holds_scenes(place):
        raise UserError(text, "holds images with masks", expected, "copy segment or camvid instead")


def parts(text: str, opened: Callable[[str], object], *, folders: bool = False) -> tuple[str, dict[str, str]]:
    """The set to train on, and those to be evaluated on by name: the splits that `opened` finds at a path.

    A path that names its split, or has no splits, is the set to train on. Where splits are `folders`, one that is there
    and cannot be opened is an error; with images of its own it is a class that is called so.
    """
    if "#" in text:
        return text, {}
    place = None if hub.is_hub(text) else locate(text)
    there = [one.name for one in visible(place.iterdir()) if one.is_dir()] if place and place.is_dir() else []
    found: dict[str, str] = {}
    for name, words in SPLITS.items():
        for word in (*words, *(folder for folder in there if folder.lower() in words and folder not in words)):
            try:
                opened(f"{text}#{word}")
            except UserError:
                inner = visible((place / word).iterdir()) if folders and place and word in there else None
                if inner is not None and not any(one.is_file() for one in inner):
                    raise
                continue
            found[name] = f"{text}#{word}"
            break
    if folders and place and found and "train" not in found:
        _refuse_without_train(place, text, [one.partition("#")[2] for one in found.values()], there)
    return found.pop("train", text), found


def _refuse_without_train(place: Path, text: str, splits: Sequence[str], there: Sequence[str]) -> None:
    """Raise UserError for splits to evaluate on beside no `train`: what else lies there would hold their images too."""
    if not set(splits) <= set(there):
        return
    others = sorted(set(there) - set(splits))
    remedy = f"run it with --data {text}/{splits[0]}, of which a part is held out"
    if others:
        moved = shlex.join(["mv", *(f"{text}/{name}" for name in others), f"{text}/train"])
        remedy = f"mkdir {shlex.quote(f'{text}/train')} && {moved}" if len(others) < 20 else "move the classes there"
    raise UserError(str(place), f"{' and '.join(splits)} without train", f"{text}/train with the classes", remedy)


def score(fitted: Fitted, sets: Mapping[str, str], *, like: Mapping[str, str] | None = None) -> None:
    """Evaluate on the new sets instead of the old ones: on the first as on the old one that mattered most.

    `like` maps a suffix of a split to another one: {"": ".retrieval"} evaluates retrieval instead of the whole.
    """
    entries = {name: dict(entry or {}) for name, entry in (fitted.get("evaluations") or {}).items()}
    of = {name: str(entry.get("split") or name).partition(".")[0] for name, entry in entries.items()}
    metric = fitted.get("best.metric")
    chosen = str(metric or "").partition("/")[0]
    main = next((base for base in (of.get(chosen), *of.values()) if base and base != "train"), None)
    first = next(iter(sets))
    kept: dict[str, Tree] = {}
    called: dict[str, str] = {}
    for name, entry in entries.items():
        if of[name] not in ("train", main):
            continue
        called[name] = first if name == main else name
        if main and of[name] == main:
            end = str(entry.pop("split", None) or name).removeprefix(main)
            split = first + (like or {}).get(end, end)
            entry = ({} if split == called[name] else {"split": split}) | entry
        kept[called[name]] = entry
    if main is None:
        kept[first] = {"every": "1 epoch"}
    for name in sets:
        kept.setdefault(name, {"at_end": True})
    fitted.scored = dict(sets)
    fitted.put("evaluations", kept)
    fitted.put("data.evaluate", dict(sets))
    for key in ("best.metric", "train.schedule.metric"):
        if isinstance(metric := fitted.get(key), str):
            name, _, score = metric.partition("/")
            fitted.put(key, f"{called.get(name, first)}/{score}")


def measure(fitted: Fitted, count: int, block: int = 1) -> None:
    """Batch, warm-up and length for `count` samples of an epoch, where those of the recipe were meant for more.

    Samples that are drawn in blocks of `block` keep their batch.
    """
    batch = samples_per_update(read_batch_size(fitted.get("train.batch_size")), 1)
    if block == 1 and count // batch < UPDATES and batch > 1:
        smaller = 1 << max(0, (count // UPDATES).bit_length() - 1)
        smaller = min(batch, max(2, smaller)) if count > 1 else 1
        if smaller < batch:
            why = f"{batch} would give an epoch of {count} samples {number_of(count // batch, 'steps')}"
            fitted.put("train.batch_size", smaller, why)
            if not fitted.get("optim.lr_rule"):
                fitted.decide("train.batch_size", f"{why}; optim.lr was tuned for {batch}")
            if smaller % int(fitted.get("train.micro_batch") or 1):
                fitted.drop("train.micro_batch")
            batch = smaller
    epoch = max(1, count // batch)
    total = _updates(fitted, "train.length", epoch, batch)
    warm = _updates(fitted, "train.schedule.warmup.over", epoch, batch)
    if warm > total // 4:
        few = max(1, total // 10)
        fitted.put("train.schedule.warmup.over", number_of(few, "steps"))
        fitted.notes["train", "schedule"] = Note(f"a warm-up of {warm} steps would take most of {total}", False)
    said = f"{total} steps, {epoch} per epoch"
    if total < FEW_UPDATES:
        fitted.decide("train.length", f"{said}: few; train longer while the metric still improves")
    else:
        fitted.notes["train", "length"] = Note(said, False)


def _updates(fitted: Fitted, key: str, epoch: int, batch: int) -> int:
    text = fitted.get(key)
    return Span.parse(text).steps(epoch, batch) if isinstance(text, str) else 0


def spread(items: Iterable[Item], size: int, most: int = LOOKED_AT) -> Iterator[Item]:
    """Up to `most` of `size` items, spread evenly over them."""
    wanted = set(np.linspace(0, size - 1, min(size, most)).round().astype(int).tolist())
    return (item for row, item in enumerate(items) if row in wanted)


def moments(pictures: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of the pixels of images, from the mean of each and that of its squares, (3,) each.

    All images count alike. Three digits.
    """
    mean, square = (np.mean(each, axis=0) for each in zip(*pictures, strict=True))
    std = np.sqrt(np.maximum(square - mean**2, 0))
    return mean.round(3).tolist(), std.round(3).tolist()


def pretrained(recipe: Recipe) -> bool:
    """Return whether the network starts from weights, which go with the mean and deviation they were trained with."""
    return "net" in recipe.task.required_weights()
