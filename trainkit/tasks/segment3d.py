"""Segmentation of volumes: patches to learn from, windows over whole volumes to be scored."""

from __future__ import annotations

from dataclasses import dataclass

from trainkit.models.volumetric import VolumeNet


@dataclass(kw_only=True)
class Segment3d:
    """Learn which voxel is of which organ."""

    net: VolumeNet
