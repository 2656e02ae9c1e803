"""A trained network of organs for use elsewhere: patches of prepared volumes to the scores of every voxel.

What stands around it, preparing a volume and seeing it through windows, is a program and no network: model.json says
in words what it does, and `trainkit predict` does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainkit import __version__
from trainkit.checkpoint import safe_load
from trainkit.config import loader
from trainkit.data.volumes.preprocess import PERCENTILES, PLANES
from trainkit.errors import UserError
from trainkit.export import files, model_card
from trainkit.export.export import Exported
from trainkit.export.files import ABOUT, CARD, ONNX, TENSORS, Format
from trainkit.export.images import agree, by_name, onnx_of
from trainkit.files import write_aside
from trainkit.interfaces import Meta
from trainkit.tracking.run_folder import RunFolder
from trainkit.training.best import best_weights


class Deployed(nn.Module):
    """A network whose one output has a name."""

    outputs = ("logits",)

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, voxels: Tensor) -> tuple[Tensor]:
        """Patches (B, 1, D, H, W) to logits (B, classes, D, H, W), float32."""
        return (self.net(voxels).float(),)


def export(
    folder: RunFolder,
    recipe: Any,
    meta: Meta,
    out: Path,
    formats: Sequence[Format],
    *,
    pictures: int,
    latency: bool,
    seconds: float,
    say: Callable[[str], None],
) -> Exported:
    """Write the network of the best weights of a run to the folder `out`; see `export.export`, which has checked it."""
    if "hub-folder" in formats:
        found = f"the network of run {folder.name} is of volumes, which those of timm are not"
        raise UserError("--to hub-folder", found, "a run of classify", "--to safetensors --to onnx")
    if latency:
        raise UserError("--latency", "a network of volumes", "one of pictures that gives classes", "leave it out")
    file = best_weights(folder.path)
    net = recipe.task.build(meta, {}, recipe.seed).learns
    safe_load.load_into(net, safe_load.read_tensors(file), str(file))
    deployed = Deployed(net.eval())
    split = files.scored_split(recipe)
    rows = files.spread(split.size, pictures)
    patches = torch.cat([_middle(split, int(row), meta.shape[1:]) for row in rows])
    with torch.no_grad():
        expected = {"logits": torch.cat([deployed(patch[None])[0] for patch in patches])}

    out.mkdir(parents=True, exist_ok=True)
    about = _about(folder, recipe, meta, split, rows, file)
    about["network"] = files.network(recipe.task, net)
    agreements, notes = {}, []
    names, kept = files.names_of(formats), []
    with files.aside(out, kept) as aside:
        if TENSORS in names:
            files.write_tensors(aside / TENSORS, net, folder.name)
            again = rebuilt(recipe, meta, about, aside / TENSORS)
            agreements[TENSORS] = agree(TENSORS, by_name(again), patches, expected, True, about["of"])
        if ONNX in names:
            say("writing model.onnx")
            agreements[ONNX], about["batch"], said = onnx_of(aside / ONNX, deployed, patches, expected, about)
            notes += said
        files.say_of(aside, names, about, agreements, notes)
        write_aside(aside / CARD, model_card.card(folder, recipe, file, about, agreements))
        kept += [*names, ABOUT, CARD]
    return Exported(tuple(out / name for name in kept), agreements, tuple(notes))


def rebuilt(recipe: Any, meta: Meta, said: Mapping[str, Any], file: Path) -> nn.Module:
    """The network of an exported folder: patches to a tuple of their logits."""
    net = recipe.task.build(meta, {}, recipe.seed).learns
    safe_load.load_into(net, safe_load.read_tensors(file), str(file))
    return Deployed(net.eval())


def _middle(split: Any, row: int, patch: Sequence[int]) -> Tensor:
    """The middle of a prepared volume, float32 (1, 1, *patch); zeros, the mean of a volume, around smaller ones."""
    import numpy as np

    image = split.on_device(split.fetch(np.array([row]), 0))["image"]
    for axis, side in enumerate(patch, start=2):
        have = image.shape[axis]
        if have > side:
            image = image.narrow(axis, (have - side) // 2, side)
    short = [side - have for side, have in zip(patch, image.shape[2:], strict=True)]
    around = [n for missing in reversed(short) for n in (missing // 2, missing - missing // 2)]
    return F.pad(image, around)


def _about(folder: RunFolder, recipe: Any, meta: Meta, split: Any, rows: Any, file: Path) -> dict[str, Any]:
    """What a program that reads the files must know, and where they come from."""
    patch = [int(side) for side in meta.shape[1:]]
    mm = " x ".join(f"{value:g}" for value in (meta.resampled or meta.spacing))
    grid = f"voxels of {mm} mm" if meta.resampled else f"voxels as they are in the files, of {mm} mm in the median"
    sides = ", ".join(map(str, patch))
    return {
        "takes": "voxels",
        "of": "volumes",
        "input": f"voxels: a patch of a prepared volume, float32 (B, 1, {sides})",
        "output": f"logits: float32 (B, {meta.classes}, {sides}); the largest is the class",
        "outputs": {"logits": f"float32 (B, {meta.classes}, {sides})"},
        "names": list(meta.class_names or map(str, range(meta.classes))),
        "normalised": (
            "before: clipped to the percentiles {:g} and {:g} of the volume, less the mean, divided by the deviation "
            "of what is left"
        ).format(*PERCENTILES),
        "fit": f"{PLANES[meta.axes]} slices, axes {meta.axes}; {grid}; windows that overlap by "
        f"{100 * recipe.task.window.overlap:g} %, weighed {recipe.task.window.weight}",
        "shape": [1, 1, *patch],
        "size": patch,
        "run": folder.name,
        "run_id": folder.info().run_id,
        "weights": str(file.relative_to(folder.path)),
        "data": {"digest": meta.digest, "checked_on": split.name, "pictures": [int(row) for row in rows]},
        "made_with": {"trainkit": __version__, "torch": torch.__version__},
        "meta": asdict(meta),
        "recipe": loader.dump(recipe),
    }
