"""Augmentation of patches of volumes: drawn on the host by hash, computed where the batch lives.

Shape changes come first and are interpolated once, together: rotation in true angles and scale, then mirrors, which
pick voxels and exchange the labels of left and right. Then intensities, in the order in which a scanner makes them:
bias field, blur, low resolution, noise; and at last gamma, gain and shift, as scanners differ in these.

Changes of shape are one for all channels of a patch; those of intensity are drawn for each.

What happens to a sample is a function of seed, epoch and row of the split alone, whatever its batch. On a CPU the work
is done for the samples that are drawn for it; on a GPU for all, and the others keep what they had, because to know
which are drawn the host would have to wait for the device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from trainkit.data.volumes import augment_intensity, augment_spatial
from trainkit.data.volumes.augment_intensity import BiasField, Blur, Brightness, Contrast, Gamma, LowResolution, Noise
from trainkit.data.volumes.augment_spatial import Draws, Rotate, Scale
from trainkit.errors import UserError
from trainkit.tensors import torch

if TYPE_CHECKING:
    from torch import Tensor

ANATOMY = {"left_right": "x", "back_front": "y", "down_up": "z"}
"""The world axis along which a flip goes."""

Flip = Literal["left_right", "back_front", "down_up"]


@dataclass(kw_only=True)
class VolumeAugment:
    """Augmentation of training patches; a block that is null is off. `p` of a block is the fraction of the samples that
    it changes.

    Lengths are in mm and angles are true, whatever the spacing. Where slices are thick (`FLAT`), rotation, scale and
    low resolution stay within them.
    """

    rotate: Rotate | None = None
    """Rotation about the centre of the patch. null: off."""
    scale: Scale | None = None
    """Scaling about the centre of the patch. null: off."""
    flips: list[Flip] = field(default_factory=list)
    """Anatomical axes along which a patch is mirrored, each for half of the samples."""
    swap: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of labels that a flip of left_right exchanges, such as [left kidney, right kidney]."""
    bias_field: BiasField | None = None
    """Smooth factor on intensities. null: off."""
    blur: Blur | None = None
    """Gaussian blur. null: off."""
    low_resolution: LowResolution | None = None
    """Simulated low resolution. null: off."""
    noise: Noise | None = None
    """Gaussian noise. null: off."""
    gamma: Gamma | None = None
    """Power of the intensities. null: off."""
    contrast: Contrast | None = None
    """Factor on the intensities. null: off."""
    brightness: Brightness | None = None
    """Shift of the intensities. null: off."""
    reach: Annotated[float, Field(ge=0, le=2)] = 0.25
    """Largest margin that is read beyond the patch on either side for rotation and scaling, as a fraction of its side.
    Beyond it, the outermost voxel is repeated."""

    def __post_init__(self) -> None:
        if len(set(self.flips)) < len(self.flips):
            raise ValueError(f"flips has {', '.join(self.flips)}; give each axis once")

    @property
    def spatial(self) -> bool:
        """True where patches are interpolated."""
        return any(block is not None and block.p > 0 for block in (self.rotate, self.scale))

    def check_labels(self, names: Sequence[str]) -> None:
        """Raise UserError where the labels do not fit: `names` are those of all labels, the background first."""
        said = [name for pair in self.swap for name in pair]
        if wrong := [name for name in said if name not in names[1:]]:
            raise UserError("data.augment.swap", f"unknown label {wrong[0]!r}", f"pairs of {', '.join(names[1:])}")
        if twice := [name for name in said if said.count(name) > 1]:
            raise UserError("data.augment.swap", f"{twice[0]!r} is in it twice", "each label once")
        if self.swap and "left_right" not in self.flips:
            raise UserError(
                "data.augment.swap", "flips does not contain left_right", remedy="add left_right to augment.flips"
            )
        if "left_right" in self.flips:
            for left, right in sides(names[1:]):
                if not {(left, right), (right, left)} & {tuple(pair) for pair in self.swap}:
                    raise UserError(
                        "data.augment.flips",
                        f"flipping left_right would leave {left!r} and {right!r} with the wrong label",
                        remedy=f"add [{left}, {right}] to data.augment.swap, or remove left_right from flips",
                    )

    def margin(self, patch: Sequence[int], spacing: Sequence[float]) -> tuple[int, int, int]:
        """Return how many voxels are to be read beyond a patch on each side along each axis; 0 where none are needed.

        `spacing` in mm is that of the whole set, in stored order, as for `numbers`.
        """
        if not self.spatial:
            return (0, 0, 0)
        needed = augment_spatial.reach(patch, spacing, self.rotate, self.scale)
        depth, height, width = np.clip(needed, 0, np.floor(self.reach * np.asarray(patch))).astype(int).tolist()
        return depth, height, width

    def numbers(
        self,
        seed: int,
        epoch: int,
        rows: np.ndarray,
        patch: Sequence[int],
        spacing: Sequence[float],
        axes: str,
        names: Sequence[str] = (),
        channels: int = 1,
    ) -> dict[str, np.ndarray]:
        """Draw how each of `rows` of an epoch changes: arrays with one entry a row, for `apply`; none where all is off.

        Of several channels those of intensities are (rows, channels, ...).
        `patch` in voxels and `spacing` in mm are in stored order, which `axes` names; `spacing` is one for the whole
        set. `names` are those of all labels, the background first; needed with `swap`.
        """
        draw = Draws(seed, epoch, rows, patch, spacing)
        out: dict[str, np.ndarray] = {}
        if self.spatial:
            out |= augment_spatial.numbers(draw, self.rotate, self.scale)
        if self.flips:
            out |= self._mirrors(draw, axes, names)
        further = [Draws(seed, epoch, rows, patch, spacing, channel) for channel in range(1, channels)]
        each = [self._intensities(one) for one in (draw, *further)]
        out |= each[0] if channels == 1 else {name: np.stack([own[name] for own in each], 1) for name in each[0]}
        return {f"augment_{name}": values for name, values in out.items()}

    def _intensities(self, draw: Draws) -> dict[str, np.ndarray]:
        """Draw the changes of the intensities of one channel."""
        out: dict[str, np.ndarray] = {}
        for block in (self.bias_field, self.blur, self.low_resolution, self.noise, self.gamma):
            out |= block.numbers(draw) if block else {}
        if self.contrast or self.brightness:
            out |= augment_intensity.gain_and_shift(draw, self.contrast, self.brightness)
        return out

    def _mirrors(self, draw: Draws, axes: str, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Draw the stored axes along which each row is mirrored, bool (N, 3), and what each label becomes then."""
        flips = np.zeros((draw.count, 3), bool)
        for name in self.flips:
            world = ANATOMY[name]
            flips[:, axes.index(world)] = draw.below(f"flip_{'xyz'.index(world)}", 0.5)
        if not self.swap:
            return {"flip": flips}
        table = np.tile(np.arange(256, dtype=np.uint8), (draw.count, 1))  # IGNORED has an entry too
        mirrored = flips[:, axes.index("x")]
        for one, other in self.swap:
            i, j = list(names).index(one), list(names).index(other)
            table[mirrored, i], table[mirrored, j] = j, i
        return {"flip": flips, "labels": table}

    def apply(
        self, image: Tensor, mask: Tensor, numbers: Mapping[str, Tensor], patch: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return augmented patches, float32 (B, C, D, H, W), and their masks, uint8 (B, D, H, W), of size `patch`.

        `image`, float (B, C, D', H', W'), and `mask`, uint8 (B, D', H', W'), reach beyond it by `margin`; they are
        not changed. `numbers` are those of `numbers`; a whole batch may hold them among others.
        """
        at = {name.removeprefix("augment_"): each for name, each in numbers.items() if name.startswith("augment_")}
        with torch.no_grad(), torch.autocast(image.device.type, enabled=False):
            image, mask = augment_spatial.apply(image, mask, at, tuple(patch))
            return augment_intensity.apply(image, at), mask


def sides(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of names that differ in the words left and right (or l and r) alone."""

    def other(name: str) -> str:
        sides = {"left": "right", "l": "r"}
        return "".join(sides.get(part, part) for part in re.split(r"([^a-zA-Z0-9])", name.lower()))

    lower = {name.lower(): name for name in names}
    pairs = [(name, lower.get(other(name))) for name in names if other(name) != name.lower()]
    return [(name, right) for name, right in pairs if right is not None]
