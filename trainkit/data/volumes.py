"""Volumes with a class for every voxel: patches to train on, whole volumes to be scored in millimetres."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from trainkit.data.volume_augment import VolumeAugment
from trainkit.task import Opened


@dataclass(kw_only=True)
class Volumes:
    """NIfTI volumes and their label maps. Every set NAME that is scored offers the splits NAME (all cases, whole),
    NAME.few, NAME.mirrored, NAME.overlays and NAME.patches, and so does `train`."""

    train: str
    """`{train,val}/{image,label}` as TOM500 has it (`tom500#train`), a folder with the Decathlon's `dataset.json`, a
    folder with a folder of images and one of labels, an imported set, or the built-in `sample:orbits`."""
    evaluate: dict[str, str] = field(default_factory=dict)
    """Name of a set that is scored to its place, as `train`; `held_out`: the fold that is kept from training."""
    names: list[str] | None = None
    """Names of the labels 1, 2, ...; None: what the source says."""
    spacing: tuple[float, float, float] | None = None
    """mm from voxel to voxel along depth, height and width, to which volumes are resampled once; None: as they are."""
    patch: tuple[int, int, int]
    """Depth, height and width of a training patch, and of a window in evaluations, in voxels. Depth is the axis
    across slices: the one with the largest spacing."""
    patches: int = 4
    """Patches of each case in an epoch."""
    foreground: float = 0.5
    """Share of the patches that are centred on a voxel of an organ, each organ of a case as likely as another."""
    augment: VolumeAugment = field(default_factory=VolumeAugment)
    patient: str | None = None
    """Regular expression with one part in parentheses, which finds the patient in the name of a file; None: the name
    is the patient."""
    folds: int = 5
    """Parts into which patients are divided, by a hash of their names, where one is held out."""
    fold: int | None = None
    """Number of the part that is kept from training, 0 .. folds-1."""
    leakage: Literal["refuse", "allow"] = "refuse"
    """What a patient or a volume that is both trained on and scored does: end the run, or warn."""
    clinical: str | None = None
    """Table (CSV with a column of patients) whose columns stand beside the scores of each case."""
    few: int = 4
    """Cases of NAME.few and NAME.overlays, spread over the sizes."""
    cache: Literal["auto", "disk", "ram", "device"] = "auto"
    """Where volumes are while training: memory-mapped, in memory, or on the GPU. `auto`: the fastest that they fit."""
    name: Literal["volumes"] = "volumes"

    def open(self, seed: int) -> Opened:
        """Find, check and where needed import the files."""
        raise NotImplementedError

    def missing(self) -> list[str]:
        """Sentences about files that are not there yet."""
        return []
