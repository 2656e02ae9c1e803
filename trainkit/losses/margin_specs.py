"""Blocks of recipes that choose a margin: their keys alone, so that recipes are read without torch.

`margin` computes the losses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from trainkit.config.ranges import FractionAboveZero, Positive, Whole


@dataclass(kw_only=True)
class ArcFace:
    """Additive angular margin: cos(theta + m) (Deng et al., CVPR 2019, equation 3)."""

    name: Literal["arcface"] = "arcface"
    """Selects ArcFace."""
    m: Annotated[float, Field(ge=0, lt=math.pi)] = 0.5
    """Margin that is added to the angle, in radians."""
    scale: Positive = 64.0
    """Factor of the cosines before the softmax."""
    ramp_epochs: Whole = 0
    """Number of epochs over which the margin grows linearly from 0. 0: the full margin from the start."""
    scale_eval: Positive | None = None
    """Factor of the cosines where classes are predicted. None: the value of `scale`."""


@dataclass(kw_only=True)
class CosFace:
    """Additive cosine margin: cos(theta) - m (Wang et al., CVPR 2018, equation 4)."""

    name: Literal["cosface"] = "cosface"
    """Selects CosFace."""
    m: Annotated[float, Field(ge=0, lt=2)] = 0.35
    """Margin that is subtracted from the cosine."""
    scale: Positive = 64.0
    """Factor of the cosines before the softmax."""
    ramp_epochs: Whole = 0
    """Number of epochs over which the margin grows linearly from 0. 0: the full margin from the start."""
    scale_eval: Positive | None = None
    """Factor of the cosines where classes are predicted. None: the value of `scale`."""


@dataclass(kw_only=True)
class AdaFace:
    """Margin that adapts to image quality, estimated from the embedding's norm (Kim et al., CVPR 2022, equations 14,
    15)."""

    name: Literal["adaface"] = "adaface"
    """Selects AdaFace."""
    m: Annotated[float, Field(ge=0, lt=math.pi)] = 0.4
    """Margin; in radians for the part that changes the angle, plain for the part that lowers the cosine."""
    h: Annotated[float, Field(ge=0, le=100)] = 0.333
    """Share of the quality range [-1, 1] that one standard deviation of the embedding norms covers."""
    t_alpha: FractionAboveZero = 0.01
    """Weight of the newest micro-batch in the running mean and standard deviation of the norms."""
    scale: Positive = 64.0
    """Factor of the cosines before the softmax."""


@dataclass(kw_only=True)
class NoMargin:
    """A linear classifier with bias over the embedding, without a margin: the baseline of margin softmax."""

    name: Literal["none"] = "none"
    """Selects a plain classifier."""
    loss: Literal["ce", "bce"] = "ce"
    """`ce`: softmax cross-entropy. `bce`: the sum of binary cross-entropies; with two classes the same function as
    `ce`."""


@dataclass(kw_only=True)
class Head:
    """How the class centres are held by several processes: whole on each, or divided among them."""

    sharded: bool = False
    """Divide the classes over processes: each holds, trains and multiplies the centres of some, for hundreds of
    thousands of classes and more. Loss and gradients are the same up to rounding."""
    sample: FractionAboveZero = 1.0
    """With `sharded`, share of the classes that the softmax of a step is over, such as 0.1: those of the batch, and
    others at random (Partial FC, An et al., CVPR 2022, arXiv 2203.15565). 1: all."""

    def __post_init__(self) -> None:
        if self.sample < 1 and not self.sharded:
            raise ValueError("sample is for a sharded head; set `sharded: true` too, or leave it out")


AnyMargin = ArcFace | CosFace | AdaFace
Margin = Annotated[AnyMargin, Field(discriminator="name")]
"""The block of a recipe that chooses a margin."""
MarginOrNone = Annotated[ArcFace | CosFace | AdaFace | NoMargin, Field(discriminator="name")]
"""The same, with a plain classifier as a further choice."""
