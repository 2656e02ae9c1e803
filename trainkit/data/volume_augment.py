"""Augmentation of patches of volumes, in batches, where the batch lives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class VolumeAugment:
    """Nothing yet."""
