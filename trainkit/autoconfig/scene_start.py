"""Start a recipe of scenes from a pretrained encoder, where its pictures are photographs and weights are at hand.

What is written was measured on CamVid (110 pictures, 11 classes), from the encoder's weights and from none: see
docs/scenes.md.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainkit.autoconfig import fit
from trainkit.autoconfig.fit import Fitted
from trainkit.checkpoint import timm_weights
from trainkit.data import hub, sources
from trainkit.data.scenes import size_checks
from trainkit.errors import UserError
from trainkit.models.segmentation_2d import SMP
from trainkit.paths import data_root, locate

ENCODER = "tf_efficientnet_lite0.in1k"
"""Encoder that is taken where its weights are here, with their tag: small, 4.7 M weights with its decoder."""

OTHERS = ("resnet18.a1_in1k", "mobilenetv3_large_100.ra_in1k", "resnet50.a1_in1k")
"""Encoders that are taken where theirs were downloaded and those of `ENCODER` were not. Not measured."""

FOLDER = "pretrained"
"""Folder where its weights are looked for as a file: at the data root, beside the data and one level above."""

DECODER = "fpn"

FEW_COLOURS = 4
"""Most colours that cover 85 % of a drawing. Measured medians: photographs 110 to 330, drawn characters 1."""

LEAST = 64
"""Shorter side in the median, in pixels, below which an encoder of stride 32 sees nothing."""

AREA = 360 * 480
"""Pixels to which larger pictures are brought."""

CROP = 0.7
"""Share of each side that a crop shows."""

SCALES = (0.5, 1.25)
"""Of pictures that crops are cut from."""

CROPS = 1320
"""Crops that are trained on in all, where the set is small."""

EPOCHS = (5, 60)
"""Fewest and most."""


@dataclass(frozen=True)
class Encoder:
    """An encoder whose weights are on this machine."""

    name: str
    """In timm, with the tag of the weights where those were downloaded."""
    weights: str
    """As `task.net.weights` says it."""
    title: str
    """In words."""


def colours(pixels: np.ndarray) -> int:
    """Count the colours that cover 85 % of a picture, uint8 (h, w, 3), at 32 levels a channel."""
    levels = (pixels >> 3).astype(np.uint32)
    codes = (levels[..., 0] << 10) | (levels[..., 1] << 5) | levels[..., 2]
    counts = np.sort(np.bincount(codes.ravel()))[::-1]
    return int(np.searchsorted(np.cumsum(counts), 0.85 * codes.size)) + 1


def choose(fitted: Fitted, data: str, median: Sequence[int], few_colours: int) -> Encoder | None:
    """Choose the encoder for pictures of `median` height and width, and note why; None: from random weights.

    `few_colours` is the median of `colours`, `data` where the pictures are.
    """
    found, why = _choose(data, median, few_colours)
    if found is None:
        fitted.seen.append(f"start: from scratch: {why}")
    else:
        fitted.seen.append(f"start: from the pretrained encoder {found.title}, as these are photographs")
    return found


def _choose(data: str, median: Sequence[int], few_colours: int) -> tuple[Encoder | None, str]:
    if few_colours <= FEW_COLOURS:
        return None, f"drawings, not photographs: {few_colours} colours cover 85 % of a picture, in the median"
    if min(median) < LEAST:
        return None, f"pictures of {min(median)} px are too small for a pretrained encoder"
    if importlib.util.find_spec(SMP) is None:
        return None, "a pretrained encoder needs `pip install trainkit[segmentation]`: then copy again"
    if (found := _find(data)) is None:
        name = ENCODER.partition(".")[0]
        bring = f"`trainkit download {timm_weights.PREFIX}{ENCODER}` downloads them"
        file = data_root() / FOLDER / f"{name}.safetensors"
        return None, f"the pretrained weights of {name} are not here; {bring}, or put a file at {file}: then copy again"
    return found, ""


def _find(data: str) -> Encoder | None:
    if _is_here(ENCODER):
        return Encoder(ENCODER, "pretrained", f"{ENCODER} (ImageNet)")
    folders = [data_root()]
    if not hub.is_hub(data) and not data.startswith(sources.SAMPLE):
        folders += list(sources.split_of(locate(data))[0].parents[:2])
    name = ENCODER.partition(".")[0]
    for folder in folders:
        if (file := folder / FOLDER / f"{name}.safetensors").is_file():
            return Encoder(name, fit.as_named(file), f"{name} ({file})")
    other = next((name for name in OTHERS if _is_here(name)), None)
    return None if other is None else Encoder(other, "pretrained", f"{other} (ImageNet)")


def _is_here(name: str) -> bool:
    try:
        return timm_weights.is_here(timm_weights.PREFIX + name)
    except UserError:  # another version of timm does not know it
        return False


def write(fitted: Fitted, encoder: Encoder, shapes: np.ndarray, count: int) -> None:
    """Write what goes with an encoder: network, size, crop, mean, optimizer, length.

    `shapes` are height and width of the pictures, int64 (n, 2); `count` how many of them are trained on.
    """
    config = _config(encoder.name)
    net = {"name": "smp", "encoder": f"tu-{encoder.name}", "decoder": DECODER, "weights": encoder.weights}
    fitted.tree["task"] = {"name": "segment2d", "net": net}
    fitted.drop("data.distance", "data.size", "data.short_side", "train.ema", "train.micro_batch", "train.compile")
    fitted.put("data.mean", [round(one, 3) for one in config.mean], "those that the encoder was trained with")
    fitted.put("data.std", [round(one, 3) for one in config.std])
    size = _size(fitted, shapes)
    sides = [max(32, min(32 * round(CROP * side / 32), side // 32 * 32)) for side in size]
    fitted.put("data.crop", sides, f"about half of a picture of {size[0]} x {size[1]}")
    shortest = min(size) if fitted.get("data.size") or fitted.get("data.short_side") else int(shapes.min())
    low = min(1.0, max(SCALES[0], math.ceil(100 * size_checks.LEAST / shortest) / 100))
    fitted.put("data.augment", {"scales": [low, SCALES[1]], "flip": 0.5})
    groups = [{"match": "*encoder.*", "lr_scale": 0.3}]
    fitted.tree["optim"] = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.01, "groups": groups}
    epochs = int(np.clip(round(CROPS / count), *EPOCHS))
    fitted.put("train.length", f"{epochs} epochs")
    fitted.put("train.batch_size", 4)
    warmup = {"over": "20 steps", "kind": "exponential", "start": 0.1}
    fitted.put("train.schedule", {"name": "poly", "warmup": warmup})


def often(fitted: Fitted) -> None:
    """Have what is evaluated in the course of the training so four times, and nothing at several scales: that takes
    minutes on a CPU."""
    epochs = int(str(fitted.get("train.length")).split()[0])
    for name, entry in dict(fitted.get("evaluations") or {}).items():
        if isinstance(entry, dict) and str(entry.get("split")).endswith((".msf", ".mscf")):
            fitted.drop(f"evaluations.{name}", "data.eval_scales")
        if isinstance(entry, dict) and "every" in entry:
            every = max(1, epochs // (4 if "overlays" not in str(entry.get("split")) else 2))
            entry["every"] = f"{every} epoch{'s' if every > 1 else ''}"


def _size(fitted: Fitted, shapes: np.ndarray) -> tuple[int, int]:
    """Have pictures brought to `AREA` where they are larger; height and width in the median."""
    height, width = np.median(shapes, axis=0).astype(int).tolist()
    factor = math.sqrt(AREA / (height * width))
    if factor >= 1:
        return height, width
    size = [round(factor * side / 8) * 8 for side in (height, width)]
    alike = np.ptp(shapes[:, 0] / shapes[:, 1]) < 0.02 * height / width
    key = "data.size" if alike else "data.short_side"
    data = fitted.get("data")
    later = {name: data.pop(name) for name in list(data) if name not in ("name", "train", "evaluate")}
    fitted.put(key, size if alike else min(size))
    data |= later
    said = f"pictures are {height} x {width} in the median: larger ones show more and take longer, as their area"
    fitted.decide(key, said)
    return size[0], size[1]


def _config(name: str) -> Any:
    import timm

    architecture, _, tag = name.partition(".")
    config = timm.get_pretrained_cfg(name if tag in timm.list_pretrained(architecture) else architecture)
    if config is None:
        raise UserError("--data", f"timm does not say how {name} was trained", "another version of timm")
    return config
