"""Start a recipe of scenes from a pretrained encoder, where its images are photographs and weights are at hand.

What is written was measured on CamVid (110 images, 11 classes), from the encoder's weights and from none: see
docs/reference/data/segmentation.md.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence

import numpy as np

from trainkit.autoconfig import pretrained
from trainkit.autoconfig.fit import Fitted
from trainkit.autoconfig.pretrained import Weights
from trainkit.data.scenes import size_checks
from trainkit.errors import UserError
from trainkit.models.segmentation_specs import SMP

DECODER = "fpn"

LEAST = 64
"""Shorter side in the median, in pixels, below which an encoder of stride 32 sees nothing."""

AREA = 360 * 480
"""Pixels to which larger images are brought."""

CROP = 0.7
"""Share of each side that a crop shows."""

SCALES = (0.5, 1.25)
"""Of images that crops are cut from."""

CROPS = 1320
"""Crops that are trained on in all, where the set is small."""

EPOCHS = (5, 60)
"""Fewest and most."""


def choose(fitted: Fitted, data: str, median: Sequence[int], few_colours: int) -> Weights | None:
    """Choose the encoder for images of `median` height and width, and say why; None: from random weights.

    `few_colours` is the median of `pretrained.colours`, `data` where the images are. Raises UserError where what the
    command line asks for cannot be had.
    """
    found, why = _choose(fitted, data, median, few_colours)
    if found is None:
        fitted.start = f"from scratch: {why}"
    else:
        fitted.start = f"from the pretrained encoder {found.title}: {why}"
    return found


def _choose(fitted: Fitted, data: str, median: Sequence[int], few_colours: int) -> tuple[Weights | None, str]:
    start, word = fitted.asked.start, fitted.asked.weights
    if start == "probe":
        raise UserError("--start", "probe, of a recipe of scenes", "fine-tune or scratch")
    if start == "scratch":
        if word:
            raise UserError("--weights", "not allowed with --start scratch", remedy="remove one of them")
        return None, "as --start says"
    if not start and not word:
        if few_colours <= pretrained.FEW_COLOURS:
            return None, f"drawings, not photographs: in the median image, {few_colours} colours cover 85 %"
        if min(median) < LEAST:
            return None, f"images of {min(median)} px are too small for a pretrained encoder"
    if importlib.util.find_spec(SMP) is None:
        if start or word:
            raise UserError(
                "--start, --weights", f"{SMP} is not installed", remedy="pip install trainkit[segmentation]"
            )
        return None, "a pretrained encoder needs `pip install trainkit[segmentation]`; install it and copy again"
    found = pretrained.asked(word) if word else pretrained.found(data)
    if found is None:
        if start:
            raise UserError(
                "--start", f"{start}, but the pretrained weights are not downloaded", remedy=pretrained.BRING
            )
        name = pretrained.NETWORK.partition(".")[0]
        return None, f"the pretrained weights of {name} are not downloaded; {pretrained.BRING} and copy again"
    return found, "as --start says" if start else "as --weights says" if word else "these are photographs"


def write(fitted: Fitted, encoder: Weights, shapes: np.ndarray, count: int) -> None:
    """Write what goes with an encoder: network, size, crop, mean, optimizer, length.

    `shapes` are height and width of the images, int64 (n, 2); `count` how many of them are trained on.
    """
    name = encoder.model or ""  # a run has none, and pretrained.asked takes none for scenes
    config = pretrained.config(name)
    net = {"name": "smp", "encoder": f"tu-{name}", "decoder": DECODER, "weights": encoder.word}
    fitted.tree["task"] = {"name": "segment2d", "net": net}
    fitted.drop("data.distance", "data.size", "data.short_side", "train.ema", "train.micro_batch", "train.compile")
    fitted.put("data.mean", [round(one, 3) for one in config.mean], "the encoder's own mean and std")
    fitted.put("data.std", [round(one, 3) for one in config.std])
    height, width = np.median(shapes, axis=0).astype(int).tolist()
    factor = math.sqrt(AREA / (height * width))
    size = (height, width) if factor >= 1 else resize(fitted, shapes, factor, "")
    sides = [max(32, min(32 * round(CROP * side / 32), side // 32 * 32)) for side in size]
    fitted.put("data.crop", sides, f"about half of an image of {size[0]} x {size[1]}")
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


def resize(fitted: Fitted, shapes: np.ndarray, factor: float, what: str) -> tuple[int, int]:
    """Have images made smaller by `factor` on their sides, and say why behind the line; the size in the median.

    `shapes` are height and width of the images, int64 (n, 2). Those of one shape get a size, others a shorter side.
    """
    height, width = np.median(shapes, axis=0).astype(int).tolist()
    size = [round(factor * side / 8) * 8 for side in (height, width)]
    alike = np.ptp(shapes[:, 0] / shapes[:, 1]) < 0.02 * height / width
    key = "data.size" if alike else "data.short_side"
    data = fitted.get("data")
    later = {name: data.pop(name) for name in list(data) if name not in ("name", "train", "evaluate")}
    fitted.put(key, size if alike else min(size))
    if alike:  # what is seen at its shorter side is evaluated at the file's size in any case
        fitted.put("data.score_at", "file")
    data |= later
    fitted.decide(key, f"the median image is {height} x {width}{what}: larger crops show more and take longer")
    return size[0], size[1]
