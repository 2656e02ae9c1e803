"""Fitting recipes of images with masks: classes or palette, crop, weights of classes, lists where nothing splits.

Photographs start from a pretrained encoder, where weights are at hand. What is written for it was measured on CamVid
(110 images, 11 classes), from the encoder's weights and from none: see docs/reference/data/segmentation.md.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from trainkit.autoconfig import fit, pretrained
from trainkit.autoconfig.fit import Fitted
from trainkit.autoconfig.pretrained import Weights
from trainkit.config.schema import Recipe
from trainkit.data.formats import image_decode
from trainkit.data.scenes import checks, files, mask_store, verify
from trainkit.data.scenes import sources as scene_sources
from trainkit.data.scenes.dataset import LEAST, Scenes
from trainkit.data.scenes.files import Scene
from trainkit.data.scenes.label_maps import Labels
from trainkit.data.scenes.sources import SceneSource
from trainkit.data.split import Holdout
from trainkit.data.threads import every
from trainkit.errors import UserError, few, number_of
from trainkit.interfaces import IGNORED
from trainkit.models.segmentation_specs import SMP

SCORED, _SEED = 0.2, 0
"""Share of the images that is evaluated where nothing splits a set, and the seed by which it is chosen."""
COARSE = 32
"""Sides of crops are multiples of so many pixels: networks halve them five times."""
DECODER = "fpn"
LEAST_SIDE = 64
"""Shorter side in the median, in pixels, below which an encoder of stride 32 sees nothing."""
AREA = 360 * 480
"""Pixels to which larger images are brought."""
CROP = 0.7
"""Share of each side that a crop shows."""
SCALES = (0.5, 1.25)
"""Of images that crops are cut from."""
CROPS, EPOCHS = 1320, (5, 60)
"""Crops that are trained on in all, where the set is small; fewest and most epochs."""
_LOST = ("names", "palette", "ignore", "root", "size", "short_side", "score_at", "eval_crop")


def scenes(fitted: Fitted, recipe: Recipe, text: str) -> None:
    """Fit a recipe with data `scenes`. Of a set without splits a fifth is evaluated, by lists beside the recipe."""
    fit.refuse(text, "images with masks", own="scenes")
    opened = scene_sources.open_scenes
    train, sets = fit.parts(text, opened)
    sets = sets or fit.beside(train, opened)
    source = opened(train)
    some = replace(source, scenes=tuple(fit.spread(source.scenes, len(source))))
    labels = source.labels or verify.guessed(some)
    looked = _look(train, some.scenes, labels)
    fitted.drop(*(f"data.{key}" for key in _LOST))
    count = len(source)
    if not sets:
        train, sets, count = _divided(fitted, source)
    fitted.put("data.train", train)
    if source.labels is None or fitted.files:
        _say_labels(fitted, labels, source)
    pixels = dict(zip(looked.names, looked.counts[:, :-1].sum(0).tolist(), strict=True))
    median = np.median(looked.shapes, axis=0).astype(int).tolist()
    size = f"{median[0]} x {median[1]} px in the median"
    said = f"{len(source)} images, {size}, {len(looked.names)} classes ({few(looked.names, 12)})"
    fitted.seen.append(f"{text}: {said}")
    given = fit.pretrained(recipe) and not (fitted.asked.start or fitted.asked.weights)
    encoder = None if given else _encoder(fitted, some.scenes, text, median)
    if encoder is not None:
        _write_start(fitted, encoder, looked.shapes, count)
    else:
        _from_the_recipe(fitted, recipe, looked)
    fit.score(fitted, sets)
    if encoder is not None:
        _evaluate_often(fitted)
    fit.measure(fitted, count)
    _remark(fitted, source, looked, pixels)


@dataclass(frozen=True)
class Looked:
    """Some of the images of a set and their masks."""

    names: tuple[str, ...]
    """Of the classes."""
    shapes: np.ndarray
    """int64 (n, 2), height and width of each."""
    counts: np.ndarray
    """int64 (n, classes + 1), pixels of each class, and last of those without one."""


def _look(text: str, some: Sequence[Scene], labels: Labels) -> Looked:
    """Read headers of images, and their masks. Raises UserError for those that a training would refuse."""

    def read(scene: Scene) -> tuple[tuple[int, int], np.ndarray]:
        shape = files.header(scene)[0]
        return shape, mask_store.counted(files.read_classes(scene, labels, shape), len(labels.names))

    shapes, counts = zip(*every(read, some, text, "images or masks"), strict=True)
    looked = Looked(labels.names, np.asarray(shapes, np.int64), np.asarray(counts, np.int64))
    there = (looked.counts[:, :-1] > 0).sum(0).tolist()
    if error := checks.mistake(text, labels.names, there, looked.counts, train=False, numbers=not labels.coloured):
        raise error
    return looked


def _encoder(fitted: Fitted, some: Sequence[Scene], text: str, median: Sequence[int]) -> Weights | None:
    """Read some images: write their mean and deviation, and choose a pretrained encoder by what they show."""
    means, squares, colours = zip(*every(_pixels, some, text, "images"), strict=True)
    mean, std = fit.moments(zip(means, squares, strict=True))
    fitted.put("data.mean", mean, f"of {len(some)} images")
    fitted.put("data.std", std)
    return _choose_start(fitted, text, median, int(np.median(colours)))


def _remark(fitted: Fitted, source: SceneSource, looked: Looked, pixels: Mapping[str, int]) -> None:
    """Note what its owner should look at, and say what is absent or left out."""
    if fitted.get("data.augment.flip"):
        fitted.decide("data.augment", "set flip: 0 if left and right are different classes")
    if absent := [name for name, there in pixels.items() if not there]:
        fitted.seen.append(f"no pixel of {few(absent)} in {len(looked.shapes)} sampled masks")
    fitted.seen += [f"left out: {sentence}" for sentence in source.left_out]


def _from_the_recipe(fitted: Fitted, recipe: Recipe, looked: Looked) -> None:
    """Fit size, crop and scales of the recipe."""
    data = cast(Scenes, recipe.data)
    fitted.drop("task.objective.class_weights")
    height, width = np.median(looked.shapes, axis=0).astype(int).tolist()
    crop = data.crop[0] * data.crop[1]
    area = 2 * crop if 4 * crop < height * width else height * width  # else a crop shows little of an image
    height, width = _size(fitted, looked.shapes, area)
    sides = [
        side if side <= most else max(COARSE // 2, most // COARSE * COARSE)
        for side, most in zip(data.crop, (height, width), strict=True)
    ]
    if sides != list(data.crop):
        fitted.put("data.crop", sides, f"images are {height} x {width} in the median")
    _scales(fitted, looked.shapes, area, data.augment.scales)


def _pixels(scene: Scene) -> tuple[np.ndarray, np.ndarray, int]:
    """The mean of an image's pixels, that of their squares, and how many colours it has."""
    picture = image_decode.decode(files.picture_bytes(scene), scene.where)
    pixels = picture.reshape(-1, 3) / 255
    return pixels.mean(0), (pixels**2).mean(0), pretrained.colours(picture)


def _say_labels(fitted: Fitted, labels: Labels, source: SceneSource) -> None:
    """Name the values or colours of masks in the recipe: as the layout names them, else by names to be changed."""
    known = source.labels is not None
    called = labels.names if known else tuple(f"class_{number}" for number in range(len(labels.names)))
    classes = [n for _, n in (labels.palette or labels.values) if n != IGNORED]
    if len(set(classes)) < len(classes):
        raise UserError(source.where, "several values of the same class", "splits of its own, or lists of image,label")
    ignored: list[list[int]] | list[int]
    if labels.coloured:
        key, said = "data.palette", {called[n]: list(colour) for colour, n in labels.palette if n != IGNORED}
        ignored = [list(colour) for colour, n in labels.palette if n == IGNORED]
    else:
        of = {value: n for value, n in labels.values if n != IGNORED}
        key, said = "data.names", [called[of[value]] for value in sorted(of)]
        ignored = [value for value in range(max(of)) if value not in of]
        ignored += [value for value, n in labels.values if n == IGNORED and value > max(of) and value != IGNORED]
    fitted.put(key, said)
    if ignored:
        fitted.put("data.ignore", ignored)
    if not known:
        what = "colours" if labels.coloured else "values"
        fitted.decide(key, f"name these {what}; list values without a class in ignore")


def _divided(fitted: Fitted, source: SceneSource) -> tuple[str, dict[str, str], int]:
    """Lists of what to train on and what to score on; the first, the others, and how many images are trained on."""
    if len(source) < 2:
        found = number_of(len(source), "images")
        raise UserError(source.where, found, "2 or more: one for training, one for evaluation")
    lines = [(scene.image, scene.mask) for scene in source.scenes]
    root = Path(os.path.commonpath({path.parent for line in lines for path in line}))
    held = set(Holdout(SCORED, "image", "images").choose(source.ids(), _SEED).tolist())
    lists = {"train": io.StringIO(), "val": io.StringIO()}
    writers = {part: csv.writer(stream, lineterminator="\n") for part, stream in lists.items()}
    for row, line in enumerate(lines):
        writers["val" if row in held else "train"].writerow(path.relative_to(root).as_posix() for path in line)
    named = {part: fitted.keep(part, stream.getvalue()) for part, stream in lists.items()}
    fitted.put("data.root", fit.as_named(root), "folder where the paths in the lists begin")
    fitted.decide("data.evaluate", "a random fifth; keep images that belong together, such as a video, in one list")
    return named["train"], {"val": named["val"]}, len(lines) - len(held)


def _size(fitted: Fitted, shapes: np.ndarray, area: int) -> tuple[int, int]:
    """Have larger images made smaller, to `area` in the median, and say why; height and width in the median then.

    `shapes` are height and width of the images, int64 (n, 2). Those of one shape get a size, others a shorter side.
    """
    height, width = np.median(shapes, axis=0).astype(int).tolist()
    if (factor := math.sqrt(area / (height * width))) >= 1:
        return height, width
    size = [round(factor * side / 8) * 8 for side in (height, width)]
    alike = np.ptp(shapes[:, 0] / shapes[:, 1]) < 0.02 * height / width
    key = "data.size" if alike else "data.short_side"
    fitted.put(key, size if alike else min(size))
    if alike:  # what is seen at its shorter side is evaluated at the file's size in any case
        fitted.put("data.score_at", "file")
    fitted.begin("data", "name", "train", "evaluate", "size", "short_side", "score_at")
    fitted.decide(key, f"the median image is {height} x {width}: larger crops show more and take longer")
    return size[0], size[1]


def _scales(fitted: Fitted, shapes: np.ndarray, area: int, scales: tuple[float, float]) -> None:
    """Have the smallest image leave enough for a crop."""
    height, width = np.median(shapes, axis=0)
    shortest = int(shapes.min() * min(1.0, math.sqrt(area / (height * width))))
    if shortest * scales[0] < LEAST:
        low = min(1.0, math.ceil(100 * LEAST / shortest) / 100)
        fitted.put("data.augment.scales", [low, scales[1]])
        fitted.notes["data", "augment"] = fit.Note(f"the smallest image has {shortest} pixels", False)


# ---- How training starts ---------------------------------------------------------------------------------------------


def _choose_start(fitted: Fitted, data: str, median: Sequence[int], few_colours: int) -> Weights | None:
    """Choose the encoder for images of `median` height and width, and say why; None: from random weights.

    `few_colours` is the median of `pretrained.colours`, `data` where the images are. Raises UserError where what the
    command line asks for cannot be had.
    """
    start, against = fitted.asked.start, ""
    if few_colours <= pretrained.FEW_COLOURS:
        against = f"drawings, not photographs: in the median image, {few_colours} colours cover 85 %"
    elif min(median) < LEAST_SIDE:
        against = f"images of {min(median)} px are too small for a pretrained encoder"
    if start != "scratch" and importlib.util.find_spec(SMP) is None:
        if start or fitted.asked.weights:
            remedy = "pip install trainkit[segmentation]"
            raise UserError("--start, --weights", f"{SMP} is not installed", remedy=remedy)
        against = (
            against or "a pretrained encoder needs `pip install trainkit[segmentation]`; install it and copy again"
        )
    found, why = pretrained.choose(fitted, data, against)
    what = "from scratch" if found is None else f"from the pretrained encoder {found.title}"
    fitted.start = f"{what}: {why or 'these are photographs'}"
    return found


def _write_start(fitted: Fitted, encoder: Weights, shapes: np.ndarray, count: int) -> None:
    """Write what goes with an encoder: network, size, crop, mean, optimizer, length.

    `shapes` are height and width of the images, int64 (n, 2); `count` how many of them are trained on.
    """
    name = encoder.model
    config = pretrained.config(name)
    net = {"name": "smp", "encoder": f"tu-{name}", "decoder": DECODER, "weights": encoder.word}
    fitted.tree["task"] = {"name": "segment2d", "net": net}
    fitted.drop("data.distance", "data.size", "data.short_side", "train.ema", "train.micro_batch", "train.compile")
    fitted.put("data.mean", [round(one, 3) for one in config.mean], "the encoder's own mean and std")
    fitted.put("data.std", [round(one, 3) for one in config.std])
    size = _size(fitted, shapes, AREA)
    sides = [max(32, min(32 * round(CROP * side / 32), side // 32 * 32)) for side in size]
    fitted.put("data.crop", sides, f"about half of an image of {size[0]} x {size[1]}")
    fitted.put("data.augment", {"scales": list(SCALES), "flip": 0.5})
    _scales(fitted, shapes, AREA, SCALES)
    groups = [{"match": "*encoder.*", "lr_scale": 0.3}]
    fitted.tree["optim"] = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.01, "groups": groups}
    epochs = int(np.clip(round(CROPS / count), *EPOCHS))
    fitted.put("train.length", number_of(epochs, "epochs"))
    fitted.put("train.batch_size", 4)
    warmup = {"over": "20 steps", "kind": "exponential", "start": 0.1}
    fitted.put("train.schedule", {"name": "poly", "warmup": warmup})


def _evaluate_often(fitted: Fitted) -> None:
    """Have what is evaluated in the course of the training so four times, and nothing at several scales: that takes
    minutes on a CPU."""
    epochs = int(str(fitted.get("train.length")).split()[0])
    for name, entry in dict(fitted.get("evaluations") or {}).items():
        if isinstance(entry, dict) and str(entry.get("split")).endswith((".msf", ".mscf")):
            fitted.drop(f"evaluations.{name}", "data.eval_scales")
        if isinstance(entry, dict) and "every" in entry:
            every = max(1, epochs // (4 if "overlays" not in str(entry.get("split")) else 2))
            entry["every"] = number_of(every, "epochs")
