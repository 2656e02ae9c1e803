"""How training on images of classes starts: from a linear probe, fine-tuned from pretrained weights, or from scratch.

What fine-tuning takes is written into the recipe: network, image size, augmentation, optimizer, length, evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.autoconfig import fit as fitting
from trainkit.autoconfig import forecast, pretrained
from trainkit.autoconfig.fit import Fitted
from trainkit.autoconfig.pretrained import Weights
from trainkit.config.schema import Recipe
from trainkit.errors import UserError, number_of

SMALLEST = 16
"""Shorter side in pixels, in the median, below which an image shows nothing that a pretrained network knows."""
SIZES = (160, 224, 288)
"""Sides that are chosen among. Smaller images are enlarged to the first. Logistic regression over the features of 1,000
images of CIFAR-10, 10 classes: top-1 0.589 at 64 px, 0.691 at 96, 0.719 at 128, 0.734 at 160, 0.730 at 224."""
ON_GPU = 224
"""Largest side on a GPU."""
LARGER = 1.3
"""Largest side over that of the pretraining."""
LONG = 120
"""Seconds of a run, on this machine with nothing else to do, up to which a larger size is chosen. 130 crops of street
scenes, 240 px, with people or without: top-1 of a probe on 59 others 0.864 at 160 px, 0.831 at 224, 0.847 at 288."""
_PASSES = 2_400
"""Images that a fine-tuning of 5 to 20 epochs passes through the network."""
FINE_TUNE = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.05, "decay_1d": False}
BACKBONE = 0.2
"""Learning rate of the backbone over that of the head. 200 images of CIFAR-10, 10 classes, 96 px, 10 epochs, top-1 on
400: 0.1 gives 0.690, 0.3 0.730, 1 0.595, `layer_decay` 0.75 0.697; logistic regression 0.595. With the statistics of
batches of 16 in place of `freeze_bn` 0.1 gives 0.472."""
AUGMENT = {"name": "timm", "scale": [0.5, 1.0], "color_jitter": 0.2, "auto_augment": None, "re_prob": 0.0}
EMBEDDING = 256
"""Length of an embedding over the features of a pretrained network."""


@dataclass(frozen=True)
class Images:
    """Images that a recipe is for."""

    trained: int
    """How many are trained on."""
    evaluated: Mapping[str, int]
    """How many are in each evaluation set, by name."""
    classes: int
    shape: tuple[int, int]
    """Height and width, each in the median."""
    read: float
    """Seconds in which one is read."""


def choose(fitted: Fitted, recipe: Recipe, data: str, total: int, side: int, colours: int) -> Weights | None:
    """Choose how training starts, and say why in `fitted.start`; None: from random weights, or as the recipe says.

    `data` is where the images are, `total` of them; `side` and `colours` are the shorter side and the colours of one,
    in the median. Raises UserError where what the command line asks for cannot be had.
    """
    asked, task = fitted.asked.start or fitted.asked.weights, fitted.get("task.name")
    if task not in ("classify", "embed"):
        if asked:
            raise UserError("--start, --weights", f"a recipe of task {task}", "classify or embed")
        return None
    if fitting.pretrained(recipe) and not asked:
        return None
    against = ""
    if colours <= pretrained.FEW_COLOURS:
        found = "one colour covers" if colours == 1 else f"{colours} colours cover"
        against = f"drawings or characters, not photographs: in the median image, {found} 85 %"
    elif side < SMALLEST:
        against = f"images of {side} px are too small for a network pretrained on photographs"
    weights, why = pretrained.choose(fitted, data, against)
    if weights is None:
        fitted.start = f"from scratch: {why}"
        fitted.drop("task.net.weights", "task.net.freeze_bn")
        return None
    how = "linear probe" if fitted.asked.start == "probe" else "linear probe, then fine-tuning"
    how = how if task == "classify" else "fine-tuning"
    fitted.start = f"{how} of {weights.title}: {why or f'{total:,} photographs'}"
    if weights.file is None:
        fitted.start += f"; the weights are not downloaded: run `trainkit download {fitted.new}`"
    return weights


def write(fitted: Fitted, weights: Weights, images: Images) -> None:
    """Write what fine-tuning, or a probe alone, takes. Raises UserError for a file of weights of another network."""
    config, embeds = pretrained.config(weights.model), fitted.get("task.name") == "embed"
    net = {"name": "timm", "model": weights.model, "embedding": EMBEDDING} if embeds else {"model": weights.model}
    probe = {} if embeds else {"probe": True}
    fitted.put("task.net", net | {"weights": weights.word, **probe, "freeze_bn": True})
    fitted.put("data.mean", [round(value, 4) for value in config.mean], "as in the network's pretraining")
    fitted.put("data.std", [round(value, 4) for value in config.std])
    fitted.drop("task.mix", "train.ema", "train.micro_batch", "train.compile")
    if fitted.get("data.fit") == "keep":
        fitted.drop("data.fit")
    if isinstance(metric := fitted.get("best.metric"), str):  # of the weights themselves, without EMA
        fitted.put("best.metric", metric.replace("/ema/", "/"))
    batch = 16
    while batch > 1 and images.trained // batch < (fitting.UPDATES if batch > 8 else 1):
        batch //= 2
    fitted.put("train.batch_size", batch)
    main = next(iter(fitted.scored))
    entry = fitted.get(f"evaluations.{main}")
    entry = {key: value for key, value in entry.items() if key != "every"} if isinstance(entry, dict) else {}
    epochs, per_epoch = int(np.clip(round(_PASSES / max(1, images.trained)), 5, 20)), max(1, images.trained // batch)
    alone = fitted.asked.start == "probe"
    length = forecast.Length(
        images.trained,
        images.evaluated,
        steps=0 if alone else epochs * per_epoch,
        batch=batch,
        times=1 if alone else epochs + (not embeds),
        classes=0 if embeds else images.classes,
        budget=_share(entry.get("budget")),
    )
    put_size(fitted, weights, config, images, length)
    if alone:
        fitted.put("task.net.tune", "linear")
        fitted.put("optim", dict(FINE_TUNE))
        fitted.drop("data.augment", "train.schedule", "checkpoints.every", "task.smoothing")
        fitted.put("train.length", "0 steps", "the probe alone")
        fitted.put(f"evaluations.{main}", {"at_start": True})
        return
    bilinear = "bilinear" if config.interpolation == "bilinear" else "bicubic"
    fitted.put("data.augment", {**AUGMENT, "interpolation": bilinear})
    fitted.decide("data.augment", "set flip 0 if a mirrored image belongs to another class, as with letters")
    head = [] if embeds else [{"match": f"net.{config.classifier}.*", "lr_scale": 1}]
    groups = [{"match": "net.backbone.*" if embeds else "net.*", "lr_scale": BACKBONE}, *head]
    fitted.put("optim", {**FINE_TUNE, "groups": groups})
    fitted.put("train.length", number_of(epochs, "epochs"), f"{epochs * per_epoch} steps, {per_epoch} per epoch")
    fitted.put("train.schedule", {"name": "cosine", "warmup": {"over": "1 epoch"}})
    fitted.put(f"evaluations.{main}", {"every": "1 epoch"} | ({} if embeds else {"at_start": True}) | entry)


# ---- Image size and time ---------------------------------------------------------------------------------------------


def put_size(fitted: Fitted, weights: Weights, config: Any, images: Images, length: forecast.Length) -> None:
    """Choose the size of images, by their own and by the time that a run takes, and forecast that time."""
    sizes = sides(min(images.shape), config)
    pace = None if weights.file is None else _pace(weights.model, weights.file, sizes[0], images)
    idle = {} if pace is None else {side: forecast.seconds(pace.at(side).idle, length) for side in sizes}
    side = max((side for side in sizes if idle and idle[side] <= LONG), default=sizes[0])
    if _on_gpu():
        side = max(side for side in sizes if side <= max(ON_GPU, sizes[0]))
    why = f"images are {images.shape[0]} x {images.shape[1]} px in the median"
    larger = [each for each in sizes if each > side]
    if larger and idle:
        long, took = forecast.about(idle[larger[0]]), forecast.about(idle[side])
        why += f"; a run at {larger[0]} px takes {long} on an idle machine, this one {took}"
    elif min(images.shape) < side:
        why += f", enlarged; the network was pretrained on {config.input_size[-1]}"
    fitted.put("data.image_size", side, why)
    if pace is not None and not _on_gpu():
        took = forecast.about(forecast.seconds(pace.at(side), length))
        fitted.time = f"{took} on this machine, as busy as it is now"


def sides(shortest: int, config: Any) -> list[int]:
    """Return the sizes to choose among, by the shorter side of the images and the size of the pretraining."""
    native = min(config.input_size[1:])
    if config.fixed_input_size or native < SIZES[0]:
        return [native]
    return [side for side in SIZES if side == SIZES[0] or (side <= shortest and side <= LARGER * native)]


def _pace(model: str, file: Path, side: int, images: Images) -> forecast.Pace:
    """Time the network on this machine. Raises UserError where the weights are of another one than its name says."""
    from trainkit.models import timm_classifier

    net = timm_classifier.timm_network(model, (3, side, side), {}, images.classes, "--weights")
    timm_classifier.load(net, file, images.classes)
    return forecast.measure(net, side, images.read)


def _share(text: Any) -> float | None:
    return float(text.rstrip("%")) / 100 if isinstance(text, str) and text.endswith("%") else None


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
