"""Losses of a class for every pixel, where some pixels have none: cross-entropy, OHEM, Dice, Lovasz.

OHEM, online hard example mining: Shrivastava et al. (CVPR 2016, arXiv 1604.03540), over pixels as BiSeNet trains (Yu et
al., ECCV 2018, arXiv 1808.00897). Soft Dice: Milletari et al., V-Net (3DV 2016, arXiv 1606.04797), with the sums
themselves in the denominator and not their squares. Lovasz-softmax: Berman et al. (CVPR 2018, arXiv 1705.08790).
Weights near boundaries: in the spirit of the weight map of U-Net (Ronneberger et al., MICCAI 2015, arXiv 1505.04597),
with one boundary in place of its two.

Pixels that are `IGNORED` are in no sum. A micro-batch without a labelled pixel gives 0, with a gradient of 0. No shape
depends on the content of a mask, so the host never waits for the device.

B images, C classes, h and w their sides, N = B h w.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from trainkit.config.ranges import FractionAboveZero, FractionBetween, NotNegative, Positive
from trainkit.interfaces import IGNORED
from trainkit.losses.class_weights import class_weights
from trainkit.tensors import F, at_least_float32, torch, wide

if TYPE_CHECKING:
    from torch import Tensor

TERMS = ("ce", "dice", "lovasz")
"""Terms of a `PixelLoss`, by the names of their weights."""


@dataclass(kw_only=True)
class Ohem:
    """Online hard example mining: mean cross-entropy of the hard pixels of a micro-batch (CVPR 2016, arXiv
    1604.03540)."""

    probability: FractionBetween = 0.7
    """A pixel is hard if the predicted probability of its class is below this value (between 0 and 1)."""
    least: FractionAboveZero = 1 / 16
    """Smallest share of the labelled pixels that is kept, and at least one pixel. If fewer are hard, the hardest pixels
    fill the share."""


@dataclass(kw_only=True)
class Near:
    """Weigh pixels near class boundaries more: 1 + strength * exp(-distance^2 / (2 sigma^2))."""

    strength: Positive = 2.0
    """Additional weight of a pixel at the boundary; far pixels have weight 1."""
    sigma: Annotated[float, Field(gt=0, le=10000)] = 3.0
    """Range of the additional weight, in pixels of the crop."""


@dataclass(kw_only=True)
class PixelLoss:
    """Weighted sum of segmentation losses, each computed over all labelled pixels of a micro-batch."""

    ce: NotNegative = 1.0
    """Weight of the cross-entropy (mean over pixels). 0 disables it."""
    ohem: Ohem | None = None
    """Restrict the cross-entropy to hard pixels. None: all labelled pixels."""
    dice: NotNegative = 0.0
    """Weight of 1 - Dice (mean over the classes in the micro-batch). 0 disables it."""
    lovasz: NotNegative = 0.0
    """Weight of the Lovasz extension of 1 - IoU (mean over the classes in the micro-batch; Berman et al., CVPR 2018). 0
    disables it. It sorts all pixels once per class."""
    class_weights: dict[str, Positive] = field(default_factory=dict)
    """Weight of a class, by class name, in the mean over pixels and in the mean over classes; else 1."""
    near: Near | None = None
    """Weigh pixels in the cross-entropy by their distance from a class boundary; needs `data.distance`. None: equal
    weights."""

    def __post_init__(self) -> None:
        if not any(getattr(self, name) for name in TERMS):
            raise ValueError(f"{', '.join(TERMS)} are all 0; set one above 0")
        for name in ("ohem", "near"):
            if getattr(self, name) is not None and not self.ce:
                raise ValueError(f"{name} changes the cross-entropy, but ce is 0; set ce above 0 or leave {name} out")

    def weights(self, names: Sequence[str]) -> Tensor | None:
        """Weights (C,) of the classes called `names`, None where all are 1. Raises UserError for unknown classes."""
        return class_weights(self.class_weights, names, "task.objective.class_weights")

    def __call__(
        self, logits: Tensor, mask: Tensor, distance: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """The loss of a micro-batch, a scalar, float32 or wider; `terms` describes the arguments."""
        return self.total(self.terms(logits, mask, distance, weights))

    def total(self, terms: Mapping[str, Tensor]) -> Tensor:
        """The weighted sum of the values of `terms`."""
        return torch.stack([getattr(self, name) * value for name, value in terms.items()]).sum()

    def terms(
        self, logits: Tensor, mask: Tensor, distance: Tensor | None = None, weights: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Each term with a weight above 0, before weighting: scalars, by the names in `TERMS`.

        `logits` (B, C, ., .), also in half precision, are brought to the size of the mask bilinearly. `mask` (B, h, w),
        uint8, holds classes 0 .. C-1 and `IGNORED`; `distance` (B, h, w), pixels to the nearest boundary, is needed
        for `near`; `weights` (C,) come from `weights`, on the same device. A weighted mean is divided by the sum of
        the weights it runs over, so equal weights change nothing. Raises ValueError where shapes do not fit.
        """
        if logits.ndim != 4 or mask.ndim != 3 or len(logits) != len(mask):
            raise ValueError(f"logits {tuple(logits.shape)} and mask {tuple(mask.shape)} do not belong together")
        # Under autocast too: 16 bits do not hold the sums of a million probabilities.
        with torch.autocast(logits.device.type, enabled=False):
            log_p = F.log_softmax(resized(logits, mask.shape[1:]), dim=1)
            terms = {}
            if self.ce:
                terms["ce"] = self._cross_entropy(log_p, mask, distance, weights)
            if self.dice or self.lovasz:
                p = log_p.exp()
                for name, term in (("dice", dice), ("lovasz", lovasz)):
                    if getattr(self, name):
                        terms[name] = term(p, mask, weights)
        return terms

    def _cross_entropy(self, log_p: Tensor, mask: Tensor, distance: Tensor | None, weights: Tensor | None) -> Tensor:
        ce_Bhw = F.nll_loss(log_p, mask.long(), ignore_index=IGNORED, reduction="none")
        valid_Bhw = mask != IGNORED
        if self.ohem is None:
            count_Bhw = valid_Bhw.to(ce_Bhw.dtype)
        else:
            count_Bhw = ohem_weights(ce_Bhw.detach(), valid_Bhw, self.ohem.probability, self.ohem.least)
        if weights is not None:
            count_Bhw = count_Bhw * label_weights(weights.to(ce_Bhw.dtype), mask)
        if self.near is not None:
            if distance is None or distance.shape != mask.shape:
                raise ValueError("near needs the distance of every pixel of the mask from the nearest boundary")
            away = distance.to(ce_Bhw.dtype) / self.near.sigma
            count_Bhw = count_Bhw * (1 + self.near.strength * torch.exp(-away.square() / 2))
        return ratio_of_sums(ce_Bhw * count_Bhw, count_Bhw)


def label_weights(weights: Tensor, labels: Tensor) -> Tensor:
    """The weight of each label's class, by `weights` (C,), of the shape of `labels`; 0 for `IGNORED`."""
    # 256 entries, so that pixels without a class have an entry too.
    return F.pad(weights, (0, 256 - len(weights)))[labels.int()]


def ratio_of_sums(part: Tensor, whole: Tensor) -> Tensor:
    """The sum of `part` over that of `whole`, a scalar; 0 if `whole` is empty."""
    return part.sum() / whole.sum().clamp_min(torch.finfo(part.dtype).tiny)


def resized(logits: Tensor, size: Sequence[int], align_corners: bool = False) -> Tensor:
    """Class scores resized bilinearly to (B, C, *size), in float32 or wider."""
    logits = at_least_float32(logits)
    if logits.shape[2:] == torch.Size(size):
        return logits
    return F.interpolate(logits, tuple(size), mode="bilinear", align_corners=align_corners)


def ohem_weights(ce: Tensor, valid: Tensor, probability: float = 0.7, least: float = 1 / 16) -> Tensor:
    """How much each pixel counts under OHEM, 0 to 1, of the shape and type of `ce`.

    1 where the cross-entropy `ce` of a pixel that is `valid` is above -ln(probability). Where these are fewer than
    floor(`least` * valid pixels), or none, the so many hardest count instead, one at least: those above the last of
    them 1, and those that are as hard as it is share alike in what is left, so that ties favour none.
    """
    with torch.no_grad():
        beyond = valid & (ce > -math.log(probability))
        # One, also where none is valid: then none is as hard as the last either.
        wanted = (valid.sum().to(wide(valid.device)) * least).floor().long().clamp_min(1)
        # As many as there could be at most, whatever is labelled: a shape that no value decides.
        bound = max(1, int(ce.numel() * least))
        hardest = torch.where(valid, ce, -1).flatten().topk(bound).values
        last = hardest.gather(0, (wanted - 1).clamp(0, bound - 1).view(1))
        above, as_hard = valid & (ce > last), valid & (ce == last)
        share = (wanted - above.sum()).to(ce.dtype) / as_hard.sum().clamp_min(1)
        return torch.where(beyond.sum() >= wanted, beyond.to(ce.dtype), above.to(ce.dtype) + share * as_hard)


def dice(p: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """1 - Dice of probabilities `p` (B, C, h, w), mean over the classes that `mask` (B, h, w) has: a scalar.

    Of a class 2 sum(p) over its pixels / (sum(p) over labelled pixels + its pixels), of the micro-batch as a whole.
    """
    is_BChw = _one_hot(mask, p.shape[1])
    hit_C = torch.where(is_BChw, p, 0).sum((0, 2, 3))
    predicted_C = torch.where(mask[:, None] != IGNORED, p, 0).sum((0, 2, 3))
    actual_C = is_BChw.sum((0, 2, 3))
    return _over_classes(1 - 2 * hit_C / (predicted_C + actual_C).clamp_min(1e-6), actual_C > 0, weights)


def lovasz(p: Tensor, mask: Tensor, weights: Tensor | None = None) -> Tensor:
    """Lovasz-softmax of probabilities `p` (B, C, h, w), mean over the classes that `mask` (B, h, w) has: a scalar.

    Of a class sum over k of e_k (J_k - J_(k-1)): e are the errors |is - p| of the labelled pixels, largest first, and
    J_k is 1 - IoU where the first k are taken wrongly.
    """
    valid_N, mask_N = (mask != IGNORED).flatten(), mask.flatten()
    loss_C, present_C = [], []
    for number, p_class in enumerate(p.unbind(1)):
        is_N = mask_N == number
        # Pixels without a class come last, behind errors of 0: there they change no J before them.
        error_N, order_N = torch.where(valid_N, (is_N.to(p.dtype) - p_class.flatten()).abs(), -1).sort(descending=True)
        found_N = is_N[order_N].cumsum(0)
        actual = found_N[-1]
        # Whole numbers until the division: 32 bits of a float count no further than 16.7 million pixels.
        rank_N = torch.arange(1, len(mask_N) + 1, device=mask.device)
        union_N = actual + rank_N - found_N
        jaccard_N = 1 - ((actual - found_N).to(p.dtype) / union_N.to(p.dtype))
        step_N = torch.diff(jaccard_N, prepend=jaccard_N.new_zeros(1))
        loss_C.append((error_N.clamp_min(0) * step_N).sum())
        present_C.append(actual > 0)
    return _over_classes(torch.stack(loss_C), torch.stack(present_C), weights)


def _one_hot(mask: Tensor, classes: int) -> Tensor:
    """bool (B, C, h, w); all false where there is no class."""
    return mask[:, None] == torch.arange(classes, device=mask.device, dtype=mask.dtype)[:, None, None]


def _over_classes(loss: Tensor, counts: Tensor, weights: Tensor | None) -> Tensor:
    """Mean of (..., C) over those that count, weighed; 0 where none does."""
    weight = counts.to(loss.dtype) if weights is None else counts * weights.to(loss.dtype)
    return ratio_of_sums(loss * weight, weight)
