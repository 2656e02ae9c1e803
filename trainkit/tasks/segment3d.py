"""Segmentation of volumes: training on patches, evaluation of whole volumes with sliding windows.

Whole volumes are evaluated on the grid of their files, organ by organ, with distances in mm; patches by their voxels.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from trainkit.data.volumes import preprocess
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Segmentation
from trainkit.interfaces import (
    IGNORED,
    Baseline,
    Batch,
    DatasetInfo,
    Loss,
    Networks,
    Rows,
    Source,
    Split,
    StepContext,
)
from trainkit.losses import segmentation_3d as losses
from trainkit.losses.segmentation_3d import SegmentationLoss
from trainkit.metrics import baselines, surface_distance
from trainkit.metrics import segmentation_3d as segmentation
from trainkit.models.segmentation_specs import VolumeNet, WindowWeight, source_of
from trainkit.tasks.protocol_scores import ScoredByProtocol
from trainkit.tensors import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

TOLERANCE = 1.0
"""mm, for organs without a tolerance of their own."""
_COMBINED = {"nnunet": losses.deep, "subsets": losses.subsets}
"""The loss of several outputs, by the `supervision` of a network."""


Tolerance = Annotated[float, Field(ge=0, le=1000)]
"""Distance in mm."""


@dataclass(kw_only=True)
class Window:
    """Sliding-window prediction of a whole volume; a window has the size of a training patch."""

    overlap: Annotated[float, Field(ge=0, le=0.95)] = 0.5
    """Share of a window that overlaps with the next one."""
    weight: WindowWeight = "gaussian"
    """Weight of the voxels of a window where windows overlap: `gaussian` weighs its border less, `constant` weighs
    all equally."""
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 4
    """Number of windows per forward pass."""


@dataclass(kw_only=True)
class Segment3d(ScoredByProtocol):
    """Segmentation of volumes: train on patches, evaluate whole volumes with sliding windows."""

    net: VolumeNet
    """The segmentation network."""
    objective: SegmentationLoss = field(default_factory=SegmentationLoss)
    """Loss. It is computed at each output where the network has several."""
    window: Window = field(default_factory=Window)
    """Sliding-window prediction of whole volumes."""
    tolerance: Tolerance | dict[str, Tolerance] = TOLERANCE
    """Tolerance of the normalised surface distance (`nsd`) in mm: one number for all organs, or a number per organ
    name. Organs that are not named have 1 mm."""

    def required_weights(self) -> dict[str, Source]:
        """Initial weights, if the recipe names any."""
        word = source_of(self.net)
        return {} if word is None else {"net": Source(weights=word)}

    def build(self, meta: DatasetInfo, found: Mapping[str, Path], seed: int) -> Networks:
        """Build the network for patches of the data. Raises UserError if they do not fit or a class is unknown."""
        from trainkit.models import segmentation_3d as volumetric

        self._weights = self.objective.weights(meta.class_names)
        self._tolerance = self._tolerances(meta.class_names or [str(c) for c in range(meta.classes)])
        self._patch, self._classes, self._axes = tuple(meta.shape[1:]), meta.classes, meta.axes
        net, notes = volumetric.build(self.net, meta, found)
        together = "objective.whole_batch sums over a micro-batch" if self.objective.whole_batch else ""
        return Networks(net, notes=tuple(notes), indivisible=together, in_parts=True)

    def _tolerances(self, names: Sequence[str]) -> list[float]:
        """Tolerance in mm of each class but the background."""
        if not isinstance(self.tolerance, dict):
            return [float(self.tolerance)] * (len(names) - 1)
        for name in self.tolerance:
            if name not in names[1:]:
                near = difflib.get_close_matches(name, names[1:], n=3) or names[1:]
                raise UserError("task.tolerance", f"organ {name!r}, which the data does not have", ", ".join(near))
        return [float(self.tolerance.get(name, TOLERANCE)) for name in names[1:]]

    def loss(self, net: nn.Module, networks: Networks, batch: Batch, at: StepContext) -> Loss:
        """The objective over patches; logs the Dice of their voxels, all organs together."""
        mask = batch["mask"]
        weights = None if self._weights is None else self._weights.to(mask.device)
        out = at.forward(net, batch["image"])
        if isinstance(out, torch.Tensor):
            finest, loss_B = out, self.objective(out, mask, weights)
        else:
            finest, loss_B = out[0], _COMBINED[self.net.supervision](self.objective, out, mask, weights)
        return Loss(loss_B.sum(), len(mask), {"dice": _pooled_dice(finest.detach().argmax(1), mask)})

    def predict(self, net: nn.Module, batch: Batch) -> Rows:
        """Scores of whole volumes, which have a `spacing`; for patches the voxel counts of each organ."""
        if "spacing" not in batch:
            return self._counts(net(batch["image"]).argmax(1), batch["mask"])
        whole = [
            self._case(net, {key: value[i : i + 1] for key, value in batch.items()}) for i in range(len(batch["mask"]))
        ]
        return {key: torch.cat([rows[key] for rows in whole]) for key in whole[0]}

    def _counts(self, predicted: Tensor, mask: Tensor) -> Rows:
        """Numbers of voxels (B, organs) that are right, predicted and true; exact in float32 up to 16.7 million."""
        rows = {"intersection": [], "predicted": [], "actual": []}
        for organ in range(1, self._classes):
            found, true = (predicted == organ) & (mask != IGNORED), mask == organ
            for name, which in (("intersection", found & true), ("predicted", found), ("actual", true)):
                rows[name].append(which.flatten(1).sum(1))
        return {name: torch.stack(counts, 1) for name, counts in rows.items()}

    def _case(self, net: nn.Module, batch: Batch) -> Rows:
        truth = batch["mask"][0]
        return self._score_case(
            self.label_map(net, batch["image"], truth.shape, batch["mirrors"][0].tolist())[None], batch
        )

    def _score_case(self, found: Tensor, batch: Batch) -> Rows:
        """Scores of a predicted label map (1, D0, H0, W0) for the one volume of a batch."""
        image, spacing = batch["image"], batch["spacing"][0].cpu().double().numpy()
        predicted, true = found[0].cpu().numpy(), batch["mask"][0].cpu().numpy()
        scores = surface_distance.case_scores(predicted, true, spacing, self._classes, self._tolerance)
        rows = {name: torch.as_tensor(values, dtype=torch.float32) for name, values in scores.items()}
        if "overlay" in batch:
            seen = image[0, 0].float().cpu().numpy()
            rows["planes"] = torch.as_tensor(segmentation.planes(seen, true, predicted, spacing, axes=self._axes))
        return {name: values[None].to(image.device) for name, values in rows.items()}

    def label_map(
        self, net: nn.Module, image: Tensor, shape: Sequence[int], mirrors: Sequence[bool] = (False, False, False)
    ) -> Tensor:
        """The class of every voxel, uint8 (D0, H0, W0), on the original grid of `shape`, of one prepared volume.

        `image` (1, C, D, H, W) is seen through windows of the size of a training patch, and mirrored along `mirrors`.
        `net` is in evaluation mode; `build` has been called.
        """
        from trainkit.models.sliding_window import sliding_probabilities

        window = self.window
        with torch.no_grad():
            probabilities = sliding_probabilities(
                net,
                image,
                self._patch,
                overlap=window.overlap,
                weight=window.weight,
                batch_size=window.batch_size,
                mirrors=mirrors,
            )
            return preprocess.to_original(probabilities, tuple(shape))

    def baselines(self, split: Split, train: Split | None) -> list[Baseline]:
        """The mean label map of the training volumes; no baseline for patches."""
        if train is None or not isinstance(split.protocol, Segmentation) or split.protocol.kind == "patches":
            return []
        return baselines.of_volumes(self._classes, self._score_case)


def _pooled_dice(predicted: Tensor, mask: Tensor) -> Tensor:
    """Dice of the voxels of a micro-batch, all organs together; 1 where there is none and none is predicted."""
    known = mask != IGNORED
    organ = (mask > 0) & known
    hit, voxels = ((predicted == mask) & organ).sum(), organ.sum() + ((predicted > 0) & known).sum()
    return torch.where(voxels > 0, 2 * hit / voxels.clamp_min(1), 1.0)
