"""Networks that give every voxel a class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class DynUNetSpec:
    """nnU-Net's network, from MONAI."""

    name: Literal["dynunet"]
    filters: list[int]


VolumeNet = DynUNetSpec
