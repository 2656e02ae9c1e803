"""Pretrained weights of timm that a copied recipe may start from, and whether its images are photographs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.autoconfig import fit
from trainkit.autoconfig.fit import Fitted
from trainkit.checkpoint import timm_weights
from trainkit.data import hub, sources
from trainkit.errors import UserError
from trainkit.paths import data_root, locate

NETWORK = "tf_efficientnet_lite0.in1k"
"""Network that is taken where none is named, with the tag of its weights. Small (4.7 M weights, 19 MB) and without
squeeze-and-excitation: an image of 160 px takes 12 ms forward and 50 ms forward and backward of one CPU core."""

FOLDER = "pretrained"
"""Folder where its weights are looked for as a file: at the data root, beside the data and one level above."""

BRING = f"run `trainkit download {timm_weights.PREFIX}{NETWORK}`, or pass --weights FILE,"
"""Remedy where the weights of `NETWORK` are not on this machine."""

FEW_COLOURS = 6
"""Most colours that cover 85 % of a drawing or a character, in the median. Measured medians of 60 images: characters
of Omniglot 1, flat shapes 5; photographs 181 (CIFAR-10, 32 px) and 302 (faces, 112 px), the same in grey 16 and 17."""


@dataclass(frozen=True)
class Weights:
    """Weights that a training starts from, and the network that they are of."""

    word: str
    """As `task.net.weights` says it."""
    model: str
    """The network's name in timm."""
    file: Path | None
    """None: not on this machine yet."""

    @property
    def title(self) -> str:
        """The weights in words."""
        return f"{self.model} ({'ImageNet' if self.word == 'pretrained' else self.word})"


def colours(pixels: np.ndarray) -> int:
    """Count the colours that cover 85 % of an image, uint8 (h, w, 3), at 32 levels a channel."""
    levels = (pixels >> 3).astype(np.uint32)
    codes = (levels[..., 0] << 10) | (levels[..., 1] << 5) | levels[..., 2]
    counts = np.sort(np.bincount(codes.ravel()))[::-1]
    return int(np.searchsorted(np.cumsum(counts), 0.85 * codes.size)) + 1


def choose(fitted: Fitted, data: str, against: str = "") -> tuple[Weights | None, str]:
    """Choose the weights that training starts from, and say why; None: random ones.

    `against` says why weights would be of little use, where nobody asks for them; `data` is where the images are. The
    reason is empty where weights are taken because they are found. Raises UserError where what the command line asks
    for cannot be had.
    """
    start, word = fitted.asked.start, fitted.asked.weights
    if start == "scratch":
        if word:
            raise UserError("--weights", "not allowed with --start scratch", remedy="remove one of them")
        return None, "as --start says"
    if against and not start and not word:
        return None, against
    weights = asked(word) if word else found(data)
    if weights is None and start:
        raise UserError("--start", f"{start}, but the pretrained weights are not downloaded", remedy=BRING)
    if weights is None:
        name = NETWORK.partition(".")[0]
        return None, f"the pretrained weights of {name} are not downloaded; {BRING} and copy again"
    return weights, "as --start says" if start else "as --weights says" if word else ""


def found(data: str) -> Weights | None:
    """The default network's weights on this machine: downloaded, else a file; None: neither."""
    if timm_weights.is_here(timm_weights.PREFIX + NETWORK):
        return Weights("pretrained", NETWORK, timm_weights.find(timm_weights.PREFIX + NETWORK))
    folders = [data_root()]
    if not hub.is_hub(data):
        folders += list(sources.split_of(locate(data))[0].parents[:2])
    model = NETWORK.partition(".")[0]
    for folder in folders:
        if (file := folder / FOLDER / f"{model}.safetensors").is_file():
            return Weights(fit.as_named(file), model, file)
    return None


def asked(word: str) -> Weights:
    """Return the weights that --weights names: `timm:NAME.TAG`, or a file with timm's name of its network.

    Raises UserError where there are none, or nothing says of which network they are.
    """
    import timm

    if word.startswith(timm_weights.PREFIX):
        name = word.removeprefix(timm_weights.PREFIX)
        here = timm_weights.is_here(word)
        return Weights("pretrained", name, timm_weights.find(word) if here else None)
    text = fit.named(word, "--weights")
    file = locate(text)
    model = file.name.removesuffix(file.suffix)
    if not file.is_file() or not timm.is_model(model.partition(".")[0]):
        expected = "timm:NAME.TAG, or a file with timm's name of its network, such as resnet18.safetensors"
        raise UserError("--weights", str(file), expected, "for other weights set task.net.weights in the copy")
    return Weights(text, model, file)


def config(model: str) -> Any:
    """timm's description of how a network was trained: size, mean, standard deviation, interpolation."""
    import timm

    architecture, _, tag = model.partition(".")
    found = timm.get_pretrained_cfg(model if tag in timm.list_pretrained(architecture) else architecture)
    if found is None or len(found.input_size) != 3:
        raise UserError("--weights", f"timm has no pretrained configuration of {architecture}", "another network")
    return found
