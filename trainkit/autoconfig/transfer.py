"""Choose how training on images of classes starts: fine-tuned, as a linear probe, or from random weights; and say why.

Fine-tuning: Yosinski et al., NeurIPS 2014, arXiv 1411.1792. Which of the three does better on how many images was
measured for the network that is taken by default: docs/reference/data/images.md.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.autoconfig import fit as fitting
from trainkit.autoconfig import pretrained
from trainkit.autoconfig.fit import Fitted, Start
from trainkit.autoconfig.pretrained import Weights
from trainkit.config.schema import Recipe
from trainkit.errors import UserError, number_of
from trainkit.models.network_specs import TimmSpec
from trainkit.speed.eta import duration
from trainkit.tasks.classify import Classify
from trainkit.tasks.embed import Embed

if TYPE_CHECKING:
    from torch import nn

SMALLEST = 16
"""Shorter side in pixels, in the median, below which an image shows nothing that a pretrained network knows."""

LARGE_SET = 100_000
"""Photographs from which training from random weights is worth its time."""

FINE_TUNED = 500
"""Most photographs that are fine-tuned on CPUs without being asked for: 5 minutes of two cores."""

MINUTES = 5
"""Longest fine-tuning that is chosen on a GPU without being asked for."""

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


@dataclass(frozen=True)
class Choice:
    """How training starts."""

    start: Start
    why: str
    weights: Weights | None = None
    """None: random ones."""


def choose(fitted: Fitted, recipe: Recipe, data: str, count: int, side: int, few_colours: int) -> Choice | None:
    """Choose how training on `count` images starts; None: as the recipe says, from the weights that it names.

    `side` is the median of their shorter sides in pixels, `few_colours` that of `colours`, `data` where they are.
    Raises UserError where what the command line asks for cannot be had.
    """
    asked = fitted.asked
    task = fitted.get("task.name")
    if task not in ("classify", "embed"):
        if asked.start or asked.weights:
            raise UserError("--start, --weights", f"a recipe of task {task}", "classify or embed")
        return None
    if asked.start == "scratch":
        if asked.weights:
            raise UserError("--weights", "not allowed with --start scratch", remedy="remove one of them")
        return Choice("scratch", "as --start says")
    if not asked.start and not asked.weights:
        if fitting.pretrained(recipe):
            return None
        if reason := _against(count, side, few_colours):
            return Choice("scratch", reason)
    weights = pretrained.asked(asked.weights, _own_model(recipe)) if asked.weights else pretrained.found(data)
    if weights is None:
        if asked.start:
            raise UserError(
                "--start", f"{asked.start}, but the pretrained weights are not downloaded", remedy=pretrained.BRING
            )
        name = pretrained.NETWORK.partition(".")[0]
        return Choice(
            "scratch", f"the pretrained weights of {name} are not downloaded; {pretrained.BRING} and copy again"
        )
    _check(weights)
    if asked.start:
        return Choice(asked.start, _with_hint("as --start says", weights, fitted), weights)
    start, why = _by_size(count, side, weights, recipe)
    return Choice(start, _with_hint(why, weights, fitted), weights)


def _against(count: int, side: int, few_colours: int) -> str:
    """Why pretrained weights would be of little use; empty where they are of use."""
    if few_colours <= pretrained.FEW_COLOURS:
        found = "one colour covers" if few_colours == 1 else f"{few_colours} colours cover"
        return f"drawings or characters, not photographs: in the median image, {found} 85 %"
    if side < SMALLEST:
        return f"images of {side} px are too small for a network pretrained on photographs"
    if count >= LARGE_SET:
        return f"{count:,} images are enough to train from scratch; --start fine-tune starts from pretrained weights"
    return ""


def _with_hint(why: str, weights: Weights, fitted: Fitted) -> str:
    if weights.word == "pretrained" and weights.file is None:
        return f"{why}; the weights are not downloaded: run `trainkit download {fitted.new}`"
    return why


def _by_size(count: int, side: int, weights: Weights, recipe: Recipe) -> tuple[Start, str]:
    """Fine-tuning where it takes minutes, else a linear probe, with what fine-tuning would take."""
    gpu = _on_gpu()
    if count <= FINE_TUNED and not gpu:
        return "fine-tune", f"{count} photographs are too few to train from scratch, and fine-tuning takes minutes"
    if weights.model is None:
        return "fine-tune", f"{count:,} photographs"
    config = pretrained.config(weights.model)
    size = _size(config, side, quick=not gpu)
    seconds = seconds_per_image(weights.model, size) * count * _epochs(count, size)
    taken = duration(seconds)
    if gpu and seconds <= 60 * MINUTES:
        return "fine-tune", f"{count:,} photographs take about {taken} on this GPU"
    most = "take longer" if gpu else f"are more than the {FINE_TUNED} that two CPU cores fine-tune in {MINUTES} minutes"
    return "probe", f"{count:,} photographs {most}; fine-tuning takes {taken} or more here (--start fine-tune)"


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


# ---- What it costs


def _size(config: Any, side: int, quick: bool) -> int:
    """Side of the square images: the network's own, or smaller where images are small or it should be `quick`."""
    native = min(config.input_size[1:])
    return native if config.fixed_input_size or (side >= ENLARGED and not quick) else min(native, ENLARGED)


def _epochs(count: int, size: int) -> int:
    return int(np.clip(round(_PASSES * (ENLARGED / size) ** 2 / max(1, count)), 5, 20))


def seconds_per_image(model: str, size: int, limit: float = 2.0) -> float:
    """Measure forward and backward of a network of timm for an image, on a GPU where there is one, in `limit` s.

    It is the least: of small batches, without the optimizer and the reading of images. On two CPU cores that other
    programs used too a fine-tuning took 2.0 to 2.8 times as long.
    """
    import timm
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = 64 if device.type == "cuda" else 4
    with torch.random.fork_rng(devices=()):
        net: nn.Module = timm.create_model(model.partition(".")[0], num_classes=2).to(device)
    net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] # torch's stub lacks it
    images = torch.linspace(-1, 1, batch * 3 * size * size, device=device).view(batch, 3, size, size)
    images = images.contiguous(memory_format=torch.channels_last)
    taken: list[float] = []
    began = time.monotonic()
    while len(taken) < 2 or time.monotonic() - began < limit / 2:
        start = time.monotonic()
        net(images).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.monotonic() - start)
    return min(taken) / batch


# ---- What is written


def write(fitted: Fitted, recipe: Recipe, choice: Choice, shape: tuple[int, int], count: int) -> None:
    """Have a recipe start as chosen: network, image size, augmentation, optimizer, length, evaluations.

    `shape` is height and width of the images, in the median; `count` how many of them are trained on.
    """
    fitted.start = _sentence(choice)
    weights = choice.weights
    if weights is None:
        fitted.drop("task.net.weights", "task.net.frozen", "task.net.freeze_bn")
        return
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


def _sentence(choice: Choice) -> str:
    if choice.weights is None:
        return f"from scratch: {choice.why}"
    what = "fine-tuning of" if choice.start == "fine-tune" else "linear probe over"
    return f"{what} {choice.weights.title}: {choice.why}"


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
