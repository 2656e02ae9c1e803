"""Fitting recipes of images of classes: classes, sizes, mean and standard deviation, splits."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np

from trainkit.autoconfig import fit as fitting
from trainkit.autoconfig import pretrained, transfer
from trainkit.autoconfig.fit import Fitted
from trainkit.autoconfig.own_images import taken
from trainkit.config.schema import Recipe
from trainkit.data import hub, sources
from trainkit.data.formats import image_decode
from trainkit.data.images.augment import Light
from trainkit.data.images.dataset import Images
from trainkit.data.record import Columns, Record, Source
from trainkit.data.sources import HELD_OUT
from trainkit.data.threads import each, threads
from trainkit.errors import UserError, few
from trainkit.paths import locate

HOLD_OUT = 20
"""Per cent that is kept from training of a set without splits."""

LEAST = 5
"""Images of a class below which one held out is missed."""

UNEVEN = 3
"""Images of the largest class for each of the smallest, from which that is noted."""

LARGER = 2
"""How much larger than what is trained on images may be before that is noted."""

_CLASS = "^(.+)/[^/]+$"
"""Finds the folder, which is the class, in the path of an image."""


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
    if not (rows := source.count()):
        raise UserError(source.where, "no images", "at least one")
    wanted = set(np.linspace(0, rows - 1, min(rows, fitting.LOOKED_AT)).round().astype(int).tolist())
    counts: Counter[int | str] = Counter()
    chosen: list[Record] = []
    grouped = False
    if source.some is not None and source.labelled is not None:
        counts.update(label for _, label in source.labelled())
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

    read = list(each(one, chosen, threads()))
    mean, std = fitting.moments((first, second) for *_, first, second in read)
    return Looked(
        dict(sorted((_name(source, label), count) for label, count in counts.items())),
        grouped,
        np.asarray([shape for shape, *_ in read], np.int64).reshape(-1, 2),
        mean,
        std,
        int(np.median([colours for _, colours, *_ in read])),
    )


def images(fitted: Fitted, recipe: Recipe, text: str) -> None:
    """Fit a recipe with data `images`: a classifier or an embedding of classes."""
    fitting.refuse_sample(text)
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
    fitted.drop("data.group", "data.hold_out", "data.stratify", "task.class_weights")
    if isinstance(data.sampling, dict):
        fitted.drop("data.sampling")
    choice = transfer.choose(fitted, recipe, train, looked.total, min(looked.median), looked.colours)
    if choice is None or choice.weights is None:
        values(fitted, recipe, looked)
        resize(fitted, looked, data.side, stretched=data.fit == "stretch")
    if isinstance(data.augment, Light) and data.augment.flip > 0:
        fitted.decide("data.augment", "set flip: 0 if a mirrored image belongs to another class, as with letters")
    _uneven(fitted, looked.counts, data.sampling)
    open_set, count = data.open_set, looked.total
    if sets:
        main = next(iter(sets))
        scored = {place: _names(opened(place)) for place in sets.values()}
        open_set = open_set and scored[sets[main]].isdisjoint(looked.counts)
        for place, names in scored.items():
            if not open_set and (new := sorted(names - looked.counts.keys())):
                raise UserError(place, f"classes that are not in the training set: {few(new)}", f"those of {train}")
        if main == "test" and fitted.get("best.metric"):
            fitted.decide(
                "data.evaluate", "the test set also selects the best checkpoint; hold_out can add a validation split"
            )
    else:
        sets = {"val": HELD_OUT}
        count = _held_out(fitted, looked, open_set, train)
    fitting.score(fitted, sets, like={"": ".retrieval"} if data.open_set and not open_set else None)
    if choice is not None:
        transfer.write(fitted, recipe, choice, looked.median, count)
    _order(fitted, open_set)
    _metric(fitted, len(looked.counts))
    if choice is None or choice.weights is None:
        fitting.measure(fitted, count)
    fitted.seen += said(train, source, looked, "classes")


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
    if fitting.pretrained(recipe):
        return
    if min(looked.std) < 0.01:
        fitted.put("data.mean", looked.mean)
        fitted.put("data.std", [max(0.01, part) for part in looked.std])
        fitted.decide("data.std", f"images hardly vary ({looked.std}): check them")
        return
    fitted.put("data.mean", looked.mean, f"of {len(looked.shapes)} images")
    fitted.put("data.std", looked.std)


def resize(fitted: Fitted, looked: Looked, side: tuple[int, int], stretched: bool) -> None:
    """The size that is trained on: the recipe's, in the shape of the data where that is squeezed to it."""
    height, width = looked.median
    shape = side
    if stretched and not 0.8 < (height / width) / (side[0] / side[1]) < 1.25:
        area, aspect = side[0] * side[1], height / width
        shape = _eights((area * aspect) ** 0.5), _eights((area / aspect) ** 0.5)
    enlarged = max(shape[0] / height, shape[1] / width)
    if enlarged > 4 / 3:
        shape = _eights(shape[0] / enlarged), _eights(shape[1] / enlarged)
    said = f"the median image is {height} x {width}"
    if shape != side:
        fitted.put("data.image_size", shape[0] if shape[0] == shape[1] else list(shape), said)
    elif min(height / side[0], width / side[1]) >= LARGER:
        key = "data.image_size"
        if fitted.get(key) is None:
            fitted.put(key, side[0] if side[0] == side[1] else list(side))
        fitted.notes["data", "image_size"] = fitting.Note(f"{said}; twice the side costs four times the compute", False)


def _eights(side: float) -> int:
    return max(8, round(side / 8) * 8)


def _uneven(fitted: Fitted, counts: Mapping[str, int], sampling: object) -> None:
    least, most = min(counts.values()), max(counts.values())
    if most >= UNEVEN * least and sampling != "balanced":
        fitted.put("data.sampling", "uniform")
        fitted.decide(
            "data.sampling", f"{least} to {most} images per class: balanced samples all classes equally often"
        )


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
    if looked.grouped and not open_set:
        fitted.notes["data", "hold_out"] = fitting.Note("of the groups in the data set", False)
    elif not open_set:
        fitted.put("data.group", "each")
        fitted.put("data.stratify", True, "the same percentage of each class")
        what = "do several images share a person or a video? then set a pattern such as '^[^/]+/([^_/]+)_'"
        fitted.decide("data.group", what)
        if scarce := [name for name, count in looked.counts.items() if count < LEAST]:
            fitted.decide(
                "data.hold_out", f"fewer than {LEAST} images of {few(scarce)}: some may have no training image left"
            )
    return round(looked.total * (1 - share / 100))


def _order(fitted: Fitted, open_set: bool) -> None:
    """The keys of the data block in the order in which they are read best."""
    data = fitted.get("data")
    if "open_set" in data:
        data.pop("open_set")
        if open_set:
            data["open_set"] = True
    first = (
        "name",
        "train",
        "group",
        "hold_out",
        "stratify",
        "open_set",
        "evaluate",
        "image_size",
        "fit",
        "mean",
        "std",
    )
    fitted.tree["data"] = {key: data[key] for key in first if key in data} | data


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
