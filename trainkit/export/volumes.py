"""Export networks for volumes: patches of prepared volumes to class scores per voxel.

Preparation and sliding windows are not part of the network: model.json describes them, and `trainkit predict` runs
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainkit.config.schema import Recipe
from trainkit.data.volumes.preprocess import PERCENTILES, PLANES
from trainkit.export import files
from trainkit.export.agreement import Exportable, Exporter, batch_forms, rows
from trainkit.files import Json
from trainkit.inference.trained_model import load_network
from trainkit.interfaces import DatasetInfo, LabelsVolumes, Split
from trainkit.tasks.segment3d import Segment3d


class Deployed(nn.Module):
    """A network whose output is float32."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, voxels: Tensor) -> tuple[Tensor]:
        """Patches (B, C, D, H, W) to logits (B, classes, D, H, W), float32."""
        return (self.net(voxels).float(),)


def exporter(recipe: Recipe) -> Exporter | None:
    """Return the exporter for volumes; None if the task predicts no label maps."""
    return Exporter(exportable, rebuilt) if isinstance(recipe.task, LabelsVolumes) else None


def exportable(recipe: Recipe, meta: DatasetInfo, weights: Path, pictures: int) -> Exportable:
    """Load the network of a run of `segment3d`, and patches of `pictures` volumes to check it on."""
    net = load_network(recipe, meta, weights)
    deployed = Deployed(net)
    split = files.scored_split(recipe)
    chosen = files.spread(split.size, pictures).tolist()
    patches = torch.cat([_middle(split, row, meta.shape[1:]) for row in chosen])
    with torch.no_grad():
        expected = {"logits": torch.cat([deployed(patch[None])[0] for patch in patches])}
    sides = ", ".join(str(int(side)) for side in meta.shape[1:])
    return Exportable(
        net=net,
        outputs={"logits": f"float32 (B, {meta.classes}, {sides}); the largest is the class"},
        samples=rows(patches, expected, one_by_one=True),
        checked_on=(split.name, chosen),
        about=_about(recipe, meta, sides),
        forms=batch_forms(deployed, patches, expected, "volumes"),
        network=type(net).__name__,
        of="volumes",
    )


def rebuilt(recipe: Recipe, meta: DatasetInfo, said: Mapping[str, Json], file: Path) -> Deployed:
    """Rebuild the network of an exported folder: patches to a tuple of their logits."""
    return Deployed(load_network(recipe, meta, file))


def _middle(split: Split, row: int, patch: Sequence[int]) -> Tensor:
    """Crop the centre of a prepared volume, float32 (1, C, *patch); pad smaller ones with zeros, their mean."""
    image = split.on_device(split.fetch(np.array([row]), 0))["image"]
    for axis, side in enumerate(patch, start=2):
        have = image.shape[axis]
        if have > side:
            image = image.narrow(axis, (have - side) // 2, side)
    short = [side - have for side, have in zip(patch, image.shape[2:], strict=True)]
    around = [n for missing in reversed(short) for n in (missing // 2, missing - missing // 2)]
    return F.pad(image, around)


def _about(recipe: Recipe, meta: DatasetInfo, sides: str) -> dict[str, Json]:
    window = cast(Segment3d, recipe.task).window
    mm = " x ".join(f"{value:g}" for value in (meta.resampled or meta.spacing))
    grid = f"voxels of {mm} mm" if meta.resampled else f"voxels not resampled, median spacing {mm} mm"
    channels = int(meta.shape[0])
    called = f"; channels {', '.join(meta.channels)}" if meta.channels else ""
    each = "each channel of the volume" if channels > 1 else "the volume"
    return {
        "takes": "voxels",
        "input": f"voxels: a patch of a prepared volume, float32 (B, {channels}, {sides}){called}",
        "names": list(meta.class_names or map(str, range(meta.classes))),
        "normalised": (
            "not included: clip to the percentiles {:g} and {:g} of {}, subtract the mean of the clipped values, "
            "divide by their standard deviation"
        ).format(*PERCENTILES, each),
        "fit": f"{PLANES[meta.axes]} slices, axes {meta.axes}; {grid}; sliding windows with "
        f"{100 * window.overlap:g} % overlap, {window.weight} weights",
        "shape": [1, *map(int, meta.shape)],
        "size": [int(side) for side in meta.shape[1:]],
    }
