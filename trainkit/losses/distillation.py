"""Distilling a face embedding: feature MSE, fixed teacher centres, AdaDistill's moving centres.

Boutros, Štruc, Damer, "AdaDistill", ECCV 2024, arXiv 2407.01332. B samples, C classes, D embedding.
"""

from __future__ import annotations

import weakref
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.losses.class_shards import ClassShard, shard_of, sharded_terms
from trainkit.losses.margin import NormStatistics, margin_terms_of
from trainkit.losses.margin_specs import Head
from trainkit.losses.online_softmax import MarginTerms, large
from trainkit.tensors import at_least_float32, cosines

SMALLEST = 1e-6
"""Lower end of alpha and of the hardness, as published."""


def feature_mse(student_BD: Tensor, teacher_BD: Tensor) -> Tensor:
    """Squared distance of the normalised features, mean over samples (equation 2). Gradient for the student alone."""
    difference_BD = F.normalize(at_least_float32(student_BD)) - F.normalize(at_least_float32(teacher_BD.detach()))
    return difference_BD.square().sum(1).mean()


def agreement(a_BD: Tensor, b_BD: Tensor) -> Tensor:
    """Cosine (B,) of each row of `a` with the same row of `b`, within [-1, 1]."""
    return (F.normalize(at_least_float32(a_BD)) * F.normalize(at_least_float32(b_BD))).sum(1).clamp(-1, 1)


def geometry(hardness_B: Tensor, agreement_B: Tensor, gain: float = 3.0) -> Tensor:
    """Compute the addition of the geometry margin to AdaFace's quality: gain * hardness * relu(hardness - agreement).

    It raises the quality of samples whose teacher embedding is close to the centre while the student's is not yet close
    to the teacher's. Both are of the centres before this step moves them, as in the AdaFace fork of AdaDistill that the
    term comes from (rayyichen310/adadistill_with_adaface_loss); no paper.
    """
    return gain * hardness_B * (hardness_B - agreement_B).relu()


class Centres(nn.Module):
    """One centre per class, `weight` (C, D), float32; it has no gradient.

    Filled from a teacher's head and kept fixed, they are AMLDistill's; moved by `update`, AdaDistill's. With a
    `sharded` head `weight` has the classes of this process (`class_shards`); labels are those of all classes still.
    """

    weight: Tensor

    def __init__(
        self, classes: int, embedding: int, generator: torch.Generator | None = None, head: Head | None = None
    ):
        super().__init__()
        self._sharded = head if head is not None and head.sharded else None
        self.shard = shard_of(classes) if self._sharded is not None else ClassShard(0, 1, classes)
        self.register_buffer("weight", self.shard.normal(embedding, 0.01, generator))
        self._unit: Tensor | None = None
        self._unit_of: tuple[weakref.ref[Tensor], int] | None = None

    def cosines(self, student_BD: Tensor) -> Tensor:
        """Cosines (B, C) of embeddings with every centre here; only the embeddings get a gradient."""
        return cosines(student_BD, self.weight)

    def scores(self, student_BD: Tensor, label_B: Tensor, scale: float) -> Tensor | MarginTerms:
        """`cosines`, or with many classes their `MarginTerms` at this scale, for `margin_loss`."""
        if (head := self._sharded) is not None:
            shard, unit = self.shard, self.unit()
            return sharded_terms(student_BD, unit, label_B, scale, shard, unit=True, sample=head.sample)
        if large(student_BD, self.weight):
            return margin_terms_of(student_BD, self.unit(), label_B, scale, unit=True)
        return self.cosines(student_BD)

    @torch.no_grad()
    def unit(self) -> Tensor:
        """The centres normalised to length 1 (C, D); cached from the first call on, not in checkpoints.

        `update` refreshes the rows that it moves; after any other change of the weight all are computed again.
        """
        unit = self._current_unit()
        if unit is None:
            self._unit = unit = at_least_float32(F.normalize(self.weight))
            self._unit_of = weakref.ref(self.weight), self.weight._version
        return unit

    def _current_unit(self) -> Tensor | None:
        # Torch counts all changes of a tensor, such as a loaded checkpoint or an undone step.
        if self._unit_of is None:
            return None
        weight, version = self._unit_of
        return self._unit if weight() is self.weight and version == self.weight._version else None

    @torch.no_grad()
    def hardness(self, label_B: Tensor, teacher_BD: Tensor) -> Tensor:
        """Cosine (B,) of each teacher embedding with the centre of its class, at least 1e-6; low is a hard sample."""
        return agreement(self.weight[label_B], teacher_BD).clamp(SMALLEST, 1)

    @torch.no_grad()
    def update(
        self, label_B: Tensor, student_BD: Tensor, teacher_BD: Tensor, alpha: Literal["plain", "hard"] = "hard"
    ) -> Tensor:
        """Move centres towards the teacher's embeddings: w <- alpha w + (1 - alpha) t (equation 6). Returns alpha (B,).

        Called before `cosines`, as published, with the samples of all ranks in global order, so that ranks stay equal.
        `plain` is alpha = cos(student, teacher) (equation 7); `hard` multiplies it by `hardness` (equation 8). Where a
        label occurs more than once, all are computed from the old centre and the last one is kept, as published.
        """
        return self.move(label_B, agreement(student_BD, F.normalize(teacher_BD)), teacher_BD, alpha)

    @torch.no_grad()
    def move(
        self, label_B: Tensor, agreement_B: Tensor, teacher_BD: Tensor, alpha: Literal["plain", "hard"] = "hard"
    ) -> Tensor:
        """`update` with the agreement of student and teacher; of the centres of other processes alpha is 0."""
        unit = self._current_unit()
        inside_B = (label_B >= self.shard.first) & (label_B < self.shard.stop)
        label_B = (label_B - self.shard.first).clamp(0, self.shard.count - 1)
        teacher_BD = F.normalize(teacher_BD.to(self.weight.dtype))
        alpha_B = agreement_B.to(self.weight.dtype)
        if alpha == "hard":
            alpha_B = alpha_B * self.hardness(label_B, teacher_BD)
        alpha_B = alpha_B.clamp(SMALLEST, 1)
        # The stored centre is not normalised; only `cosines` normalises. Its length is part of the method: a shorter
        # centre moves faster.
        moved_BD = alpha_B[:, None] * self.weight[label_B] + (1 - alpha_B)[:, None] * teacher_BD
        # Every sample writes the value of the last sample of its label: so the order of the writes, which is not fixed
        # on a GPU, does not matter, and no shape depends on the labels. Samples of other processes' classes come first,
        # with the value that a centre has.
        moved_BD = torch.where(inside_B[:, None], moved_BD, self.weight[label_B])
        sorted_B, order_B = (2 * label_B + inside_B).sort(stable=True)
        last_B = order_B[torch.searchsorted(sorted_B, 2 * label_B + 1, right=True) - 1]
        self.weight[label_B] = moved_BD[last_B]
        if unit is not None:
            unit[label_B] = F.normalize(self.weight[label_B]).to(unit.dtype)
            self._unit_of = weakref.ref(self.weight), self.weight._version
        return alpha_B * inside_B


class Memory(nn.Module):
    """State of AdaDistill: class centres and, for AdaFace, norm statistics. None of it is trained."""

    def __init__(self, centres: Centres, norms: NormStatistics | None):
        super().__init__()
        self.centres, self.norms = centres, norms
