"""Fitting recipes of images of classes: classes, sizes, mean and standard deviation, splits, and how training starts.

Photographs are fine-tuned (Yosinski et al., NeurIPS 2014, arXiv 1411.1792) where weights are at hand, anything else is
trained from random weights. What that gives on how many images was measured: docs/reference/data/images.md.
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np
from pydantic import TypeAdapter, ValidationError

from trainkit.autoconfig import fine_tuning, pretrained
from trainkit.autoconfig import fit as fitting
from trainkit.autoconfig.fit import Fitted
from trainkit.autoconfig.own_images import taken
from trainkit.config.schema import Recipe
from trainkit.config.units import Share
from trainkit.data import hub, sources
from trainkit.data.augment import Light
from trainkit.data.formats import image_decode
from trainkit.data.images.dataset import Images
from trainkit.data.record import Columns, Record, Source
from trainkit.data.sources import HELD_OUT, HELD_OUT_TEST
from trainkit.data.threads import every
from trainkit.errors import UserError, few
from trainkit.paths import locate

HOLD_OUT = 20
"""Per cent that is kept from training of a set without splits."""
UNEVEN = 3
"""Images of the largest class for each of the smallest, from which that is noted."""
_CLASS = "^(.+)/[^/]+$"
"""Finds the folder, which is the class, in the path of an image."""
_FIRST = (
    "name",
    "train",
    "group",
    "hold_out",
    "hold_out_test",
    "stratify",
    "open_set",
    "evaluate",
    "image_size",
    "fit",
    "mean",
    "std",
)
"""Keys of the data block in the order in which they are read best; others follow."""


@dataclass(frozen=True)
class Looked:
    """Statistics of a set of images."""

    counts: dict[str, int]
    """Images of each class, in the order of their names."""
    grouped: bool
    """True where the set itself names groups of images."""
    shapes: np.ndarray
    """int64 (n, 2), height and width of those that were read, at their own sizes."""
    mean: list[float]
    """Of pixels 0 .. 1 of those that were read, as they are trained on, for red, green and blue."""
    std: list[float]
    colours: int = 0
    """Colours that cover most of an image, in the median: few in drawings and characters."""
    read: float = 0.0
    """Seconds in which one was read."""

    @property
    def total(self) -> int:
        """Number of images."""
        return sum(self.counts.values())

    @property
    def median(self) -> tuple[int, int]:
        """Height and width, each in the median."""
        height, width = np.median(self.shapes, axis=0).astype(int).tolist()
        return height, width


def look(source: Source, size: tuple[int, int], fit: Literal["crop", "stretch"] = "crop") -> Looked:
    """Go through a set: count its classes, read up to `fitting.LOOKED_AT` images, brought to `size` as `fit` says.

    Raises UserError at an image that cannot be read.
    """
    if not (rows := source.size):
        raise UserError(source.where, "no images", "at least one")
    wanted = set(np.linspace(0, rows - 1, min(rows, fitting.LOOKED_AT)).round().astype(int).tolist())
    counts: Counter[int | str] = Counter()
    chosen: list[Record] = []
    grouped = False
    if source.some is not None and source.labelled is not None:
        counts.update(source.labelled()[1].tolist())
        chosen = list(source.some(sorted(wanted)))
        grouped = any(record.group is not None for record in chosen)
    else:
        for row, record in enumerate(source.records()):
            counts[record.label] += 1
            grouped = grouped or record.group is not None
            if row in wanted:
                chosen.append(record)

    def one(record: Record) -> tuple[tuple[int, int], int, np.ndarray, np.ndarray]:
        data = image_decode.read(record.data, record.where) if isinstance(record.data, Path) else record.data
        pixels = image_decode.decode(data, record.where) if isinstance(data, bytes) else data
        values = image_decode.fit(pixels, size, record.where, fit).reshape(-1, 3) / 255
        return pixels.shape[:2], pretrained.colours(pixels), values.mean(0), (values**2).mean(0)

    began = time.perf_counter()
    read = every(one, chosen, source.where, "images")
    took = (time.perf_counter() - began) / len(read)
    mean, std = fitting.moments((first, second) for *_, first, second in read)
    return Looked(
        dict(sorted((_name(source, label), count) for label, count in counts.items())),
        grouped,
        np.asarray([shape for shape, *_ in read], np.int64).reshape(-1, 2),
        mean,
        std,
        int(np.median([colours for _, colours, *_ in read])),
        took,
    )


def images(fitted: Fitted, recipe: Recipe, text: str) -> None:
    """Fit a recipe with data `images`: a classifier or an embedding of classes."""
    fitting.refuse(text, "images of classes")
    text = taken(fitted, text)
    opened = functools.partial(open_source, columns=fitted.columns)
    train, sets = fitting.parts(text, opened, folders=True)
    sets = sets or fitting.beside(train, opened)
    data, source = cast(Images, recipe.data), opened(train)
    looked = look(source, data.side, "stretch" if data.fit == "stretch" else "crop")
    if len(looked.counts) < 2:
        found = "; ".join([f"images of {len(looked.counts)} class ({few(looked.counts)})", *source.left_out])
        raise UserError(train, found, "two or more class folders: <class>/<image>")
    fitted.put("data.train", train)
    fitted.drop("data.group", "data.hold_out", "data.hold_out_test", "data.stratify", "task.class_weights")
    weights = fine_tuning.choose(fitted, recipe, train, looked.total, min(looked.median), looked.colours)
    if weights is None:
        values(fitted, recipe, looked)
        resize(fitted, looked, data.side)
    if isinstance(data.augment, Light) and data.augment.flip > 0:
        fitted.decide("data.augment", "set flip: 0 if a mirrored image belongs to another class, as with letters")
    least, most = min(looked.counts.values()), max(looked.counts.values())
    if most >= UNEVEN * least and data.sampling != "balanced":
        fitted.put("data.sampling", "uniform")
        fitted.decide(
            "data.sampling", f"{least} to {most} images per class: balanced samples all classes equally often"
        )
    open_set, count = data.open_set, looked.total
    if sets:
        if next(iter(sets)) == "test" and fitted.get("best.metric"):
            what = "the test set also selects the best checkpoint; hold_out can add a validation split"
            fitted.notes["data", "evaluate"] = fitting.Note(what, True)
        there = {name: opened(place) for name, place in sets.items()}
        open_set = _check_classes(there, train, sets, looked, open_set)
        sizes = {name: source.size or 0 for name, source in there.items()}
    else:
        sets = {"val": HELD_OUT}
        count = _held_out(fitted, looked, open_set, train)
        sizes = {"val": looked.total - count}
        if test := fitted.asked.test:
            sets["test"] = HELD_OUT_TEST
            fitted.put("data.hold_out_test", test)
            sizes["test"] = round(count * _share(test))
            count -= sizes["test"]
    fitting.score(fitted, sets, like={"": ".retrieval"} if data.open_set and not open_set else None)
    if weights is not None:
        images = fine_tuning.Images(count, sizes, len(looked.counts), looked.median, looked.read)
        fine_tuning.write(fitted, weights, images)
    fitted.drop("data.open_set")
    if open_set:
        fitted.put("data.open_set", True)
    fitted.begin("data", *_FIRST)
    _metric(fitted, len(looked.counts))
    if weights is None:
        fitting.measure(fitted, count)
    fitted.seen += said(train, source, looked, "classes")


def _share(text: str) -> float:
    """Read what --test says. Raises UserError."""
    try:
        return TypeAdapter(Share).validate_python(text)
    except ValidationError:
        raise UserError("--test", repr(text), "a percentage, such as 15%") from None


def _check_classes(
    sources: dict[str, Source], train: str, sets: dict[str, str], looked: Looked, open_set: bool
) -> bool:
    """Return whether evaluations are of other classes; else raise UserError for classes that are not trained on."""
    names = {place: _names(sources[name]) for name, place in sets.items()}
    if open_set and names[next(iter(sets.values()))].isdisjoint(looked.counts):
        return True
    for place, there in names.items():
        if len(there) < 2:
            raise UserError(place, f"images of {len(there)} class ({few(there)})", "two or more classes to tell apart")
        if new := sorted(there - looked.counts.keys()):
            raise UserError(place, f"classes that are not in the training set: {few(new)}", f"those of {train}")
    return False


def open_source(text: str, nested: bool = True, columns: Columns | None = None) -> Source:
    """Open the source at a path or of the hub. Raises UserError as `sources.open_source` does."""
    place = text if hub.is_hub(text) else locate(text)
    return sources.open_source(place, nested=nested, network=True, columns=columns)


def _names(source: Source) -> set[str]:
    return {_name(source, label) for label in {record.label for record in source.records()}}


def _name(source: Source, label: int | str) -> str:
    return source.names[label] if source.names and isinstance(label, int) else str(label)


def values(fitted: Fitted, recipe: Recipe, looked: Looked) -> None:
    """Fill in mean and standard deviation, but for weights that were trained with others."""
    if not fitting.pretrained(recipe):
        fitted.put("data.mean", looked.mean, f"of {len(looked.shapes)} images")
        fitted.put("data.std", [max(0.01, part) for part in looked.std])


def resize(fitted: Fitted, looked: Looked, side: tuple[int, int]) -> None:
    """Have images trained on at their own size where the recipe's would enlarge them by a third or more."""
    height, width = looked.median
    enlarged = max(side[0] / height, side[1] / width)
    if enlarged > 4 / 3:
        shape = [max(8, round(each / enlarged / 8) * 8) for each in side]
        size = shape[0] if shape[0] == shape[1] else shape
        fitted.put("data.image_size", size, f"the median image is {height} x {width}")


def _held_out(fitted: Fitted, looked: Looked, open_set: bool, train: str) -> int:
    """Hold out a part of a set without splits; how many images are left to train on, about."""
    share = HOLD_OUT
    if open_set:
        if hub.is_hub(train) or not sources.split_of(locate(train))[0].is_dir():
            expected = "a folder of classes, or splits without common classes"
            raise UserError(train, "the classes to hold out are not known", expected)
        if len(looked.counts) < 4:
            raise UserError(train, f"{len(looked.counts)} classes", "4 or more: two for training, two for evaluation")
        share = max(share, math.ceil(200 / len(looked.counts)))  # two are told apart
        fitted.put("data.group", _CLASS, "the class folder: whole classes are held out")
    fitted.put("data.hold_out", f"{share}%")
    if not open_set and not looked.grouped:
        fitted.put("data.group", "each")
        fitted.put("data.stratify", True, "the same percentage of each class")
        what = "do several images share a person or a video? then set a pattern such as '^[^/]+/([^_/]+)_'"
        fitted.decide("data.group", what)
    return round(looked.total * (1 - share / 100))


def _metric(fitted: Fitted, classes: int) -> None:
    """Another metric for the best checkpoint, where the recipe's is one of another number of classes."""
    metric = fitted.get("best.metric")
    if not isinstance(metric, str):
        return
    head, _, last = metric.rpartition("/")
    other = {"top5": "top1"} if classes < 6 else {}
    other |= {"f1": "f1_macro", "accuracy": "top1", "auc": "top1"} if classes > 2 else {}
    if last in other:
        fitted.put("best.metric", f"{head}/{other[last]}", f"{last} does not exist with {classes} classes")


def said(train: str, source: Source, looked: Looked, many: str) -> Iterator[str]:
    """Sentences about a set."""
    counts = sorted(looked.counts.values())
    of_each = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
    height, width = looked.median
    said = f"{train}: {looked.total} images of {len(counts)} {many} ({few(looked.counts, 8)}), {of_each} each"
    yield f"{said}, {height} x {width} px"
    yield from (f"left out: {sentence}" for sentence in source.left_out)
