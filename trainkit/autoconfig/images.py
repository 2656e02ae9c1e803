"""Fitting recipes of images of classes: classes, sizes, mean and standard deviation, splits, and how training starts.

It is fine-tuned, a linear probe, or trained from random weights. Fine-tuning: Yosinski et al., NeurIPS 2014, arXiv
1411.1792. Which of the three does better on how many images was measured for the network that is taken by default:
docs/reference/data/images.md.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from trainkit.autoconfig import fit as fitting
from trainkit.autoconfig import pretrained
from trainkit.autoconfig.fit import Fitted, Start
from trainkit.autoconfig.own_images import taken
from trainkit.autoconfig.pretrained import Weights
from trainkit.config.schema import Recipe
from trainkit.data import hub, sources
from trainkit.data.augment import Light
from trainkit.data.formats import image_decode
from trainkit.data.images.dataset import Images
from trainkit.data.record import Columns, Record, Source
from trainkit.data.sources import HELD_OUT
from trainkit.data.threads import each, threads
from trainkit.errors import UserError, few, number_of
from trainkit.models.network_specs import TimmSpec
from trainkit.paths import locate
from trainkit.tasks.classify import Classify
from trainkit.tasks.embed import Embed

HOLD_OUT = 20
"""Per cent that is kept from training of a set without splits."""

LEAST = 5
"""Images of a class below which one held out is missed."""

UNEVEN = 3
"""Images of the largest class for each of the smallest, from which that is noted."""

LARGER = 2
"""How much larger than what is trained on images may be before that is noted."""

SMALLEST = 16
"""Shorter side in pixels, in the median, below which an image shows nothing that a pretrained network knows."""

LARGE_SET = 100_000
"""Photographs from which training from random weights is worth its time."""

FINE_TUNED = 500
"""Most photographs that are fine-tuned on CPUs without being asked for: 5 minutes of two cores."""

ENLARGED = 160
"""Side to which smaller images are enlarged. Logistic regression over the features of 1,000 images of CIFAR-10, 10
classes: top-1 0.589 at 64 px, 0.691 at 96, 0.719 at 128, 0.734 at 160, 0.730 at 224."""

_PASSES = 2_400
"""Images of `ENLARGED` that a fine-tuning of 5 to 20 epochs passes through the network. 3,840 of them (250 images, 16
epochs) took 402 s of two CPU cores of which another program had 0.7."""

PROBE = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.05}

PROBE_EPOCHS = 50

FINE_TUNE = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.05, "decay_1d": False}

BACKBONE = 0.2
"""Learning rate of the backbone over that of the head. 200 images of CIFAR-10, 10 classes, 96 px, 10 epochs, top-1 on
400: 0.1 gives 0.690, 0.3 0.730, 1 0.595, `layer_decay` 0.75 0.697; logistic regression 0.595. With the statistics of
batches of 16 in place of `freeze_bn` 0.1 gives 0.472."""

AUGMENT = {"name": "timm", "scale": [0.5, 1.0], "color_jitter": 0.2, "auto_augment": None, "re_prob": 0.0}

EMBEDDING = 256
"""Length of an embedding over the features of a pretrained network."""


_CLASS = "^(.+)/[^/]+$"
"""Finds the folder, which is the class, in the path of an image."""


_FIRST = ("name", "train", "group", "hold_out", "stratify", "open_set", "evaluate", "image_size", "fit", "mean", "std")
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

    @property
    def total(self) -> int:
        """Number of images."""
        return sum(self.counts.values())

    @property
    def median(self) -> tuple[int, int]:
        """Height and width, each in the median."""
        height, width = np.median(self.shapes, axis=0).astype(int).tolist()
        return height, width


@dataclass(frozen=True)
class Choice:
    """How training starts."""

    start: Start
    why: str
    weights: Weights | None = None
    """None: random ones."""


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
    choice = _choose_start(fitted, recipe, train, looked)
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
        _write_start(fitted, recipe, choice, looked.median, count)
    fitted.drop("data.open_set")
    if open_set:
        fitted.put("data.open_set", True)
    fitted.begin("data", *_FIRST)
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


# ---- How training starts ---------------------------------------------------------------------------------------------


def _choose_start(fitted: Fitted, recipe: Recipe, data: str, looked: Looked) -> Choice | None:
    """Choose how training starts; None: as the recipe says, from the weights that it names.

    `data` is where the images are. Raises UserError where what the command line asks for cannot be had.
    """
    asked, task = fitted.asked, fitted.get("task.name")
    if task not in ("classify", "embed"):
        if asked.start or asked.weights:
            raise UserError("--start, --weights", f"a recipe of task {task}", "classify or embed")
        return None
    if fitting.pretrained(recipe) and not asked.start and not asked.weights:
        return None
    weights, why = pretrained.choose(fitted, data, _against(looked), _own_model(recipe))
    if weights is None:
        return Choice("scratch", why)
    _check(weights)
    start: Start = asked.start or "fine-tune"
    if not asked.start:
        start, why = _by_size(looked.total, weights)
    if weights.word == "pretrained" and weights.file is None:
        why += f"; the weights are not downloaded: run `trainkit download {fitted.new}`"
    return Choice(start, why, weights)


def _against(looked: Looked) -> str:
    """Why pretrained weights would be of little use; empty where they are of use."""
    count, side = looked.total, min(looked.median)
    if looked.colours <= pretrained.FEW_COLOURS:
        found = "one colour covers" if looked.colours == 1 else f"{looked.colours} colours cover"
        return f"drawings or characters, not photographs: in the median image, {found} 85 %"
    if side < SMALLEST:
        return f"images of {side} px are too small for a network pretrained on photographs"
    if count >= LARGE_SET:
        return f"{count:,} images are enough to train from scratch; --start fine-tune starts from pretrained weights"
    return ""


def _by_size(count: int, weights: Weights) -> tuple[Start, str]:
    """Fine-tuning where it takes minutes, else a linear probe."""
    if _on_gpu():
        return "fine-tune", f"{count:,} photographs, and a GPU"
    if count <= FINE_TUNED:
        return "fine-tune", f"{count} photographs are too few to train from scratch, and fine-tuning takes minutes"
    if weights.model is None:
        return "fine-tune", f"{count:,} photographs"
    most = f"more than the {FINE_TUNED} that two CPU cores fine-tune in 5 minutes"
    return "probe", f"{count:,} photographs are {most}; --start fine-tune trains the whole network"


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _check(weights: Weights) -> None:
    """Raise UserError where a file of weights is not of the network that it is called after."""
    if weights.model is None or weights.file is None:
        return
    from trainkit.models import timm_classifier

    net = timm_classifier.timm_network(weights.model, pretrained.config(weights.model).input_size, {}, 2, "--weights")
    timm_classifier.load(net, weights.file, 2)


def _size(config: Any, side: int, quick: bool) -> int:
    """Side of the square images: the network's own, or smaller where images are small or it should be `quick`."""
    native = min(config.input_size[1:])
    return native if config.fixed_input_size or (side >= ENLARGED and not quick) else min(native, ENLARGED)


def _epochs(count: int, size: int) -> int:
    return int(np.clip(round(_PASSES * (ENLARGED / size) ** 2 / max(1, count)), 5, 20))


def _write_start(fitted: Fitted, recipe: Recipe, choice: Choice, shape: tuple[int, int], count: int) -> None:
    """Have a recipe start as chosen: network, image size, augmentation, optimizer, length, evaluations.

    `shape` is height and width of the images, in the median; `count` how many of them are trained on.
    """
    weights = choice.weights
    if weights is None:
        fitted.start = f"from scratch: {choice.why}"
        fitted.drop("task.net.weights", "task.net.frozen", "task.net.freeze_bn")
        return
    what = "fine-tuning of" if choice.start == "fine-tune" else "linear probe over"
    fitted.start = f"{what} {weights.title}: {choice.why}"
    config = None if weights.model is None else pretrained.config(weights.model)
    _write_network(fitted, recipe, weights, frozen=choice.start == "probe")
    if config is not None:
        _write_images(fitted, weights, config, shape, quick=choice.start == "fine-tune" and not _on_gpu())
    fitted.drop("task.mix", "train.ema", "train.micro_batch", "train.compile")
    if fitted.get("data.fit") == "keep":
        fitted.drop("data.fit")
    if choice.start == "probe":
        fitted.drop("task.smoothing")
        fitted.put("data.augment", {"name": "light", "flip": 0.5})
        fitted.put("optim", dict(PROBE))
        epochs, every, batch, warm = PROBE_EPOCHS, 10, 32, False
    else:
        interpolation = getattr(config, "interpolation", "bicubic")
        bilinear = "bilinear" if interpolation == "bilinear" else "bicubic"
        fitted.put("data.augment", {**AUGMENT, "interpolation": bilinear})
        fitted.put("optim", {**FINE_TUNE, "groups": _groups(fitted, recipe, weights)})
        sides = fitted.get("data.image_size")
        epochs, every, batch, warm = _epochs(count, sides if isinstance(sides, int) else min(shape)), 1, 16, True
    fitted.decide("data.augment", "set flip 0 if a mirrored image belongs to another class, as with letters")
    _write_length(fitted, count, epochs, batch, warm)
    _write_evaluations(fitted, every)


def _write_network(fitted: Fitted, recipe: Recipe, weights: Weights, frozen: bool) -> None:
    ends: dict[str, Any] = {"weights": weights.word, "frozen" if frozen else "freeze_bn": True}
    if weights.model is None:
        left_out = ("tune", "frozen", "freeze_bn", "weights", *(("drop_path", "dropout") if frozen else ()))
        net = {key: value for key, value in dict(fitted.get("task.net") or {}).items() if key not in left_out}
    elif fitted.get("task.name") == "embed":
        net = {"name": "timm", "model": weights.model, "embedding": EMBEDDING}
    else:
        net = {"model": weights.model}
    fitted.put("task.net", net | ends)


def _groups(fitted: Fitted, recipe: Recipe, weights: Weights) -> list[dict[str, Any]]:
    """The backbone at a lower rate than the head."""
    if fitted.get("task.name") == "embed":
        return [{"match": "net.backbone.*", "lr_scale": BACKBONE}]
    head = pretrained.config(weights.model or _own_model(recipe)).classifier
    return [{"match": "net.*", "lr_scale": BACKBONE}, {"match": f"net.{head}.*", "lr_scale": 1}]


def _own_model(recipe: Recipe) -> str:
    """The name in timm of the recipe's own network; empty where it is of another kind."""
    task = recipe.task
    if isinstance(task, Classify):
        return task.net.model
    return task.net.model if isinstance(task, Embed) and isinstance(task.net, TimmSpec) else ""


def _write_images(fitted: Fitted, weights: Weights, config: Any, shape: tuple[int, int], quick: bool) -> None:
    """Size, mean and standard deviation: those that the network was trained with."""
    size = _size(config, min(shape), quick)
    said = f"images are {shape[0]} x {shape[1]} px in the median; the network was pretrained on"
    sides = _sides(size, shape) if fitted.get("data.fit") == "stretch" else size
    fitted.put("data.image_size", sides, f"{said} {config.input_size[-1]}")
    fitted.put("data.mean", [round(value, 4) for value in config.mean], "as in the network's pretraining")
    fitted.put("data.std", [round(value, 4) for value in config.std])


def _sides(size: int, shape: tuple[int, int]) -> int | list[int]:
    """Height and width in multiples of 32, in the shape of the images, of about size x size pixels."""
    aspect = (shape[0] / shape[1]) ** 0.5
    sides = [max(32, round(side / 32) * 32) for side in (size * aspect, size / aspect)]
    return size if 0.8 < shape[0] / shape[1] < 1.25 else sides


def _write_length(fitted: Fitted, count: int, epochs: int, batch: int, warm: bool) -> None:
    while batch > 1 and count // batch < (fitting.UPDATES if batch > 8 else 1):
        batch //= 2
    steps = max(1, count // batch)
    fitted.put("train.length", number_of(epochs, "epochs"), f"{epochs * steps} steps, {steps} per epoch")
    fitted.put("train.batch_size", batch)
    warmup: dict[str, Any] = {"warmup": {"over": "1 epoch"}} if warm else {}
    fitted.put("train.schedule", {"name": "cosine"} | warmup)


def _write_evaluations(fitted: Fitted, every: int) -> None:
    """Have the set by which the best is chosen scored every so many epochs, by the weights themselves."""
    if isinstance(metric := fitted.get("best.metric"), str):
        fitted.put("best.metric", metric.replace("/ema/", "/"))
    main = next(iter(fitted.scored))
    if isinstance(entry := fitted.get(f"evaluations.{main}"), dict):
        entry.pop("every", None)
        fitted.put(f"evaluations.{main}", {"every": number_of(every, "epochs"), **entry})
