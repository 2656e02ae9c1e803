"""Semantic segmentation of images: training on crops, evaluation on whole images, optionally at several scales.

The loss is that of the BiSeNet family: the objective at the main output and at each auxiliary head, and with PointRend
the cross-entropy at the sampled points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from trainkit.config.ranges import NotNegative
from trainkit.errors import UserError
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
from trainkit.losses.segmentation_2d import PixelLoss, label_weights, ratio_of_sums
from trainkit.losses.segmentation_3d import nearest
from trainkit.metrics import baselines, boundary_f_score
from trainkit.metrics import segmentation_2d as scenes
from trainkit.models.segmentation_specs import Norm, PointSpec, SceneNetSpec, source_of
from trainkit.tasks.protocol_scores import ScoredByProtocol
from trainkit.tensors import F, torch

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(kw_only=True)
class Segment2d(ScoredByProtocol):
    """Semantic segmentation of images: train on crops, evaluate on whole images."""

    net: SceneNetSpec
    """The segmentation network."""
    norm: Norm = field(default_factory=Norm)
    """Replacement of the network's batch norms. Default: they are kept."""
    points: PointSpec | None = None
    """Head that refines the prediction at single points where the network is least certain (PointRend). None: no such
    head."""
    objective: PixelLoss = field(default_factory=PixelLoss)
    """Loss. It is computed at each output where the network has several."""
    aux_weight: NotNegative = 1.0
    """Weight of the loss of each auxiliary head; the main output has weight 1."""
    boundary: Annotated[float, Field(ge=0, le=0.1)] | None = boundary_f_score.SHARE
    """Tolerance of the boundary F-score as a share of the image's diagonal. Null: the boundary F-score is not
    computed."""
    window_batch: Annotated[int, Field(ge=1, le=4096)] = 4
    """Number of windows per forward pass, where evaluation uses windows."""
    align_corners: bool = False
    """Resize images and scores with the centres of the corner pixels aligned, as evaluations of the public BiSeNet do.
    False: the borders are aligned."""

    def __post_init__(self) -> None:
        self._least = 1

    @property
    def batch_norm(self) -> Literal["batch", "sync"] | None:
        """Images that are normalised together: a process's micro-batch or all processes'; None: each image alone."""
        return None if self.norm.name == "group" else self.norm.name

    @property
    def batch_norm_least(self) -> int:
        """Smallest number of images that batch norm needs; 1 before `build`."""
        return 1 if self.batch_norm is None else self._least

    def required_weights(self) -> dict[str, Source]:
        """Initial weights, if the recipe names any."""
        word = source_of(self.net)
        return {} if word is None else {"net": Source(weights=word)}

    def build(self, meta: DatasetInfo, found: Mapping[str, Path], seed: int) -> Networks:
        """Build the network for crops of the data. Raises UserError if they do not fit, or a class name is unknown."""
        from trainkit.models import segmentation_2d as segmenter

        if not meta.distances:
            self._refuse_near()
        names = meta.class_names or [str(c) for c in range(meta.classes)]
        self._weights, self._classes = self.objective.weights(names), meta.classes
        net, notes = segmenter.build(self.net, self.points, self.norm, meta, found)
        self._multiple, self._least = net.multiple, net.least
        together = "its loss is over all pixels of a micro-batch"
        return Networks(net, notes=tuple(notes), indivisible=together, in_parts=True)

    def loss(self, net: nn.Module, networks: Networks, batch: Batch, at: StepContext) -> Loss:
        """The objective over all labelled pixels of the micro-batch at each output, plus the loss at the points.

        Logged are the terms of the objective at the main output; `aux`, the sum over the auxiliary heads; `points`; and
        `pixel_accuracy` at the stride of the network's output.
        """
        mask, distance = batch["mask"], batch.get("distance")
        weights = self._weights
        if weights is not None and weights.device != mask.device:
            self._weights = weights = weights.to(mask.device)  # once: the copy waits for the device
        out = at.forward(net, batch["image"], distance)
        main, *aux = out["logits"]
        terms = at.recompute(self.objective.terms, main, mask, distance, weights)
        value = self.objective.total(terms)
        logs = {name: term.detach() for name, term in terms.items()}
        if aux:
            losses = [at.recompute(self.objective, logits, mask, distance, weights) for logits in aux]
            logs["aux"] = torch.stack(losses).sum()
            value = value + self.aux_weight * logs["aux"]
        if self.points is not None and "points" in out:
            logs["points"] = point_loss(out["point_logits"], out["points"], mask, weights)
            value = value + self.points.weight * logs["points"]
        logs["pixel_accuracy"] = _accuracy(main.detach().argmax(1), nearest(mask, main.shape[2:]))
        return Loss(value * len(mask), len(mask), {name: term.detach() for name, term in logs.items()})

    def _refuse_near(self) -> None:
        for place, asks in (
            ("objective.near", self.objective.near is not None),
            ("points.near", self.points is not None and self.points.near > 0),
        ):
            if asks:
                raise UserError(
                    f"task.{place}",
                    "needs distances from class boundaries, which the data does not give",
                    "data.distance",
                    "add `distance: {}` under data",
                )

    def predict(self, net: nn.Module, batch: Batch) -> Rows:
        """Numbers of pixels and boundary pixels of each image; small label maps if overlays are drawn.

        `scales`, `mirrors` and `window` are the same for all images of a batch: those of its split.
        """
        image, size = batch["image"], batch["mask"].shape[1:]
        view = [batch[name][0].tolist() for name in ("scales", "mirrors", "window")]
        # One by one if the size changes: class scores at the file's size may be many times larger than the input.
        parts = [image] if image.shape[2:] == size else image.split(1)
        found = torch.cat([self.probabilities(net, part, *view, size=size).argmax(1) for part in parts])
        return self._counts(found, batch)

    def _counts(self, found: Tensor, batch: Batch) -> Rows:
        """The rows of `predict` for predicted classes (B, H, W)."""
        mask = batch["mask"]
        rows = scenes.pixel_counts(found, mask, self._classes)
        if self.boundary is not None:
            within = boundary_f_score.tolerance(mask.shape[1], mask.shape[2], self.boundary)
            rows |= boundary_f_score.boundary_counts(found, mask, self._classes, within)
        if "overlay" in batch:
            rows |= scenes.thumbnail_maps(found, mask)
        return rows

    def probabilities(
        self,
        net: nn.Module,
        image: Tensor,
        scales: Sequence[float] = (1.0,),
        mirrors: Sequence[bool] = (False, False),
        window: Sequence[int] = (0, 0),
        size: Sequence[int] | None = None,
    ) -> Tensor:
        """Class probabilities, float32 (B, classes, h, w), of normalised images (B, 3, H, W); see `multi_scale`.

        `size` is h and w, None: those of the images. `net` is in evaluation mode; `build` has been called.
        """
        from trainkit.models import multi_scale

        return multi_scale.probabilities(
            lambda seen: net(seen)["logits"][0],
            image,
            scales=scales,
            mirrors=mirrors,
            window=window,
            multiple=self._multiple,
            batch_size=self.window_batch,
            align_corners=self.align_corners,
            size=size,
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """The column of `predict` with which there is a boundary F-score."""
        return () if self.boundary is None else ("edge_actual",)

    def baselines(self, split: Split, train: Split | None) -> list[Baseline]:
        """The most frequent class of all pixels, and of each position."""
        if train is None:
            return []
        return baselines.of_scenes(self._classes, self._counts)

    def deployable(self, net: nn.Module, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
        """The network with its preprocessing and postprocessing; `build` must have been called.

        It maps RGB pixels 0 .. 255, float (B, 3, H, W), to logits (B, classes, H, W): what `probabilities` of one
        scale takes the softmax of. `mean` and `std` are those of the data, of pixels 0 to 1.
        """
        from trainkit.models.segmentation_2d import Deployable

        return Deployable(net, mean, std, self._multiple, self.align_corners).eval()


def point_loss(logits: Tensor, points: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """Cross-entropy at points, a scalar: mean over those whose pixel of `mask` (B, h, w) has a class; 0 without any.

    `logits` (B, C, N) are of `points` (B, N, 2), x and y as shares of width and height; each has the class of the pixel
    it lies in. `weights` (C,) weigh the classes.
    """
    height, width = mask.shape[1:]
    x, y = points.float().unbind(2)
    column = (x * width).long().clamp(0, width - 1)
    row = (y * height).long().clamp(0, height - 1)
    label_BN = mask.flatten(1).gather(1, row * width + column)
    loss_BN = F.cross_entropy(logits.float(), label_BN.long(), ignore_index=IGNORED, reduction="none")
    count_BN = (label_BN != IGNORED).to(loss_BN.dtype)
    if weights is not None:
        count_BN = count_BN * label_weights(weights.to(loss_BN.dtype), label_BN)
    return ratio_of_sums(loss_BN * count_BN, count_BN)


def _accuracy(found: Tensor, mask: Tensor) -> Tensor:
    """Share of the labelled pixels that are right; 0 if no pixel has a label."""
    return (found == mask).sum() / (mask != IGNORED).sum().clamp_min(1)
