"""Losses of a class for every voxel: Dice and cross-entropy; over outputs of several sizes.

Soft Dice: Milletari et al., V-Net (3DV 2016, arXiv 1606.04797), with the denominator that Drozdzal et al. (DLMIA 2016,
arXiv 1608.04117) made customary, the sums themselves, or with `squared` V-Net's, their squares. Outputs of several
sizes: Isensee et al., nnU-Net (Nature Methods 18, 2021); subsets of outputs: Rahman et al., EMCAD (CVPR 2024, arXiv
2405.06880).

Voxels that are `IGNORED` are in no sum. A sample without any other gives 0, with a gradient of 0.

B samples, C classes, V voxels, S their grid: depth, height and width, or height and width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from trainkit.config.ranges import NotNegative, Positive
from trainkit.interfaces import IGNORED
from trainkit.losses.class_weights import class_weights
from trainkit.tensors import F, at_least_float32, torch

if TYPE_CHECKING:
    from torch import Tensor

_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


@dataclass(kw_only=True)
class SegmentationLoss:
    """Weighted sum of segmentation losses, each a mean over the voxels or the classes of a sample."""

    dice: NotNegative = 1.0
    """Weight of 1 - Dice (mean over classes). 0 disables it."""
    ce: NotNegative = 1.0
    """Weight of the cross-entropy (mean over voxels). 0 disables it."""
    smooth: NotNegative = 1e-5
    """Number of voxels added to numerator and denominator of Dice."""
    background: bool = False
    """Include class 0 in Dice. Cross-entropy always includes it."""
    empty: Literal["skip", "count"] = "skip"
    """Class without a voxel in a sample. `skip`: it is left out of the sample's mean. `count`: its overlap is smooth /
    (predicted + smooth), nearly 0 as soon as one voxel is predicted."""
    whole_batch: bool = False
    """Sum the voxels of a class over the micro-batch before taking the ratio, as nnU-Net's `batch_dice`. The loss then
    depends on `train.micro_batch`."""
    squared: bool = field(default=False, metadata={"hash": "set"})
    """Sum the squares of the probabilities in the denominator of Dice (Milletari et al., 3DV 2016), not the
    probabilities."""
    class_weights: dict[str, Positive] = field(default_factory=dict)
    """Weight of a class, by class name, in the mean over classes and in the mean over voxels; else 1."""

    def __post_init__(self) -> None:
        if not self.dice and not self.ce:
            raise ValueError("dice and ce are both 0; set one above 0")
        if not self.smooth > 0 and self.empty == "count":
            raise ValueError("smooth is 0; set it above 0 with `empty: count`, or an empty class has no value")

    def weights(self, names: Sequence[str]) -> Tensor | None:
        """Weights (C,) of the classes called `names`, None where all are 1. Raises UserError for unknown classes."""
        return class_weights(self.class_weights, names, "task.objective.class_weights")

    def __call__(self, logits: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
        """Loss of each sample, (B,), float32 or wider.

        `logits` (B, C, *S), also in half precision; `mask` (B, *S), the class of every voxel or IGNORED, of any
        integer type; `weights` (C,) from `weights`, on the same device. A weighted mean is divided by the sum of the
        weights it runs over, so equal weights change nothing. Raises ValueError where shapes differ.
        """
        if logits.shape[:1] + logits.shape[2:] != mask.shape or logits.ndim < 3:
            raise ValueError(f"logits {tuple(logits.shape)} and mask {tuple(mask.shape)} do not belong together")
        # Under autocast too: 16 bits do not hold the sums of a million probabilities.
        with torch.autocast(logits.device.type, enabled=False):
            log_p_BCV = F.log_softmax(at_least_float32(logits).flatten(2), dim=1)
            mask_BV = mask.flatten(1).long()
            known_BV = mask_BV != IGNORED
            total_B = log_p_BCV.new_zeros(len(logits))
            if self.ce:
                class_BV = torch.where(known_BV, mask_BV, 0)
                ce_BV = -log_p_BCV.gather(1, class_BV[:, None])[:, 0]
                weight_BV = known_BV.to(ce_BV.dtype)
                if weights is not None:
                    weight_BV = weight_BV * weights.to(ce_BV.dtype)[class_BV]
                total_B = total_B + self.ce * _mean(ce_BV, weight_BV)
            if self.dice:
                total_B = total_B + self._dice(log_p_BCV.exp(), mask_BV, known_BV, weights)
        return total_B

    def _dice(self, p_BCV: Tensor, mask_BV: Tensor, known_BV: Tensor, weights: Tensor | None) -> Tensor:
        """Dice term of each sample, (B,), times its weight."""
        classes = p_BCV.shape[1]
        is_BCV = mask_BV[:, None] == torch.arange(classes, device=mask_BV.device)[:, None]
        hit_BC = torch.where(is_BCV, p_BCV, 0).sum(2)
        known_BCV = torch.where(known_BV[:, None], p_BCV, 0)
        predicted_BC = (known_BCV.square() if self.squared else known_BCV).sum(2)
        sums = [hit_BC, predicted_BC, is_BCV.sum(2).to(p_BCV.dtype)]
        first = 0 if self.background else 1
        sums = [x_BC[:, first:] for x_BC in sums]
        if self.whole_batch:
            sums = [x_BC.sum(0, keepdim=True).expand_as(x_BC) for x_BC in sums]
        hit_BC, predicted_BC, actual_BC = sums
        # The floor is for `smooth: 0`, where a class that neither is there nor has any probability would be 0/0.
        whole_BC = (predicted_BC + actual_BC + self.smooth).clamp(min=1e-12)
        loss_BC = self.dice * (1 - (2 * hit_BC + self.smooth) / whole_BC)
        weight_BC = (
            torch.ones_like(loss_BC) if weights is None else weights[first:].to(loss_BC.dtype).expand_as(loss_BC)
        )
        if self.empty == "skip":
            weight_BC = weight_BC * (actual_BC > 0)
        return (loss_BC * weight_BC).sum(1) / weight_BC.sum(1).clamp(min=torch.finfo(loss_BC.dtype).tiny)


Loss = Callable[["Tensor", "Tensor", "Tensor | None"], "Tensor"]
"""Logits (B, C, *S), mask (B, *S) and weights (C,) to the loss of each sample, (B,)."""


def deep(loss: Loss, outputs: Sequence[Tensor], mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """Loss (B,) of outputs of several sizes, the finest first, weighted 1, 1/2, 1/4 ... and these divided by their sum.

    The last of several has weight 0, as in nnU-Net. It is still computed, so that the parameters of its head have a
    gradient of 0: with several processes DDP waits for the gradients of all parameters. The mask (B, *S) is brought to
    the size of each output by taking the voxel nearest to the middle of each of its.
    """
    share = [0.5**k for k in range(len(outputs))]
    if len(share) > 1:
        share[-1] = 0.0
    terms = [
        part / sum(share) * loss(output, nearest(mask, output.shape[2:]), weights)
        for part, output in zip(share, outputs, strict=True)
    ]
    return torch.stack(terms).sum(0)


def subsets(loss: Loss, outputs: Sequence[Tensor], mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """Loss (B,) of the sum of the logits of every non-empty subset of the outputs, mean over the 2^n - 1 subsets.

    EMCAD's supervision, which sums instead; of four outputs that is 15 times as much. Outputs that are smaller than
    the mask (B, *S) are brought to its size linearly.
    """
    size = mask.shape[1:]
    full = [
        x if x.shape[2:] == size else F.interpolate(at_least_float32(x), size, mode=_LINEAR[len(size)]) for x in outputs
    ]
    chosen = (s for n in range(1, len(full) + 1) for s in itertools.combinations(full, n))
    terms = [loss(sum(some[1:], start=some[0]), mask, weights) for some in chosen]
    return torch.stack(terms).mean(0)


def nearest(mask: Tensor, size: Sequence[int]) -> Tensor:
    """A mask (B, *S) on a grid of `size` voxels over the same extent: of each the class at its middle, (B, *size).

    A middle between two voxels takes the later one.
    """
    for axis, (old, new) in enumerate(zip(mask.shape[1:], size, strict=True), start=1):
        if old != new:
            # (i + 1/2) old / new in whole numbers, which round nowhere.
            at = (2 * torch.arange(new, device=mask.device) + 1) * old // (2 * new)
            mask = mask.index_select(axis, at)
    return mask


def _mean(value_BV: Tensor, weight_BV: Tensor) -> Tensor:
    return (value_BV * weight_BV).sum(1) / weight_BV.sum(1).clamp(min=torch.finfo(weight_BV.dtype).tiny)
