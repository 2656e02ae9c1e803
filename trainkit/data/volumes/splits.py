"""Splits of volumes: whole cases that are evaluated one by one, and patches that are cut from cases."""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from trainkit import rng
from trainkit.data.leakage import Held
from trainkit.data.split import EvalSplit, TrainSplit
from trainkit.data.volumes import volume_store
from trainkit.data.volumes.augment import VolumeAugment
from trainkit.data.volumes.patch_reader import PatchReader
from trainkit.data.volumes.volume_store import CaseInfo, PackedVolumes
from trainkit.evaluation_protocols import Segmentation
from trainkit.interfaces import Batch
from trainkit.tensors import torch


@dataclass(frozen=True, eq=False)
class _Cases:
    """Cases of an imported set."""

    name: str
    packed: PackedVolumes
    cases: np.ndarray
    """int64 (cases,), cases of the packed set."""

    @property
    def infos(self) -> list[CaseInfo]:
        """Shapes, patients and intensities of the cases."""
        return [self.packed.case(case) for case in self.cases.tolist()]

    @property
    def digest(self) -> str:
        """SHA-256 of volumes, labels and names; that of the packed set where it is taken whole."""
        if np.array_equal(self.cases, np.arange(len(self.packed))):
            return self.packed.digest
        return hashlib.sha256(self.packed.digest.encode() + b"\n" + self.cases.astype("<i8").tobytes()).hexdigest()

    def held(self) -> Held:
        """Return what splits are compared by: patients, and volumes as they were in their files."""
        infos = self.infos
        ids, patients = [info.id for info in infos], (info.patient for info in infos)
        return volume_store.held(ids, patients, self.packed.fingerprints()[self.cases])

    def _protocol(self, kind: Literal["whole", "patches", "overlays"], each: int = 1) -> Segmentation:
        """Return ids and patients of the cases, each as often as it has samples."""
        infos = [info for info in self.infos for _ in range(each)]
        ids, patients = tuple(info.id for info in infos), tuple(info.patient for info in infos)
        shown = self.packed.channel_names[0] if self.packed.channel_names else ""
        return Segmentation(ids, patients, self.packed.names, kind, shown)


@dataclass(frozen=True, eq=False)
class CaseSplit(_Cases, EvalSplit):
    """Whole cases of an imported set, read one by one.

    Keys: image, float16 (1, C, D, H, W) on the grid that networks see, float32 after `on_device`; mask, uint8
    (1, D0, H0, W0) as annotated; spacing (of the mask's grid) and mirrors, (1, 3); index, view; and, where images are
    wanted, overlay, bool (1,).
    """

    kind: Literal["whole", "overlays"] = "whole"
    mirrored: bool = False
    """True: predictions are averaged over mirror images along all axes."""

    at_once = 1  # volumes differ in size

    @property
    def size(self) -> int:
        """Number of cases."""
        return len(self.cases)

    @functools.cached_property
    def content(self) -> str:
        """SHA-256 of the files, patients and labels as annotated, which whole cases are evaluated on."""
        return self.packed.content(self.cases)

    @functools.cached_property
    def protocol(self) -> Segmentation:
        """Names and patients of the cases."""
        return self._protocol(self.kind)

    def some(self, most: int) -> CaseSplit:
        """Choose at most so many cases, spread evenly over the sizes: of volumes, and where these are equal, of organs.

        The same ones in every run; neither the smallest nor the largest where there is a choice.
        """
        if self.size <= most:
            return self

        infos = self.infos

        def size(place: int) -> tuple[int, float, str]:
            info = infos[place]
            return math.prod(info.shape), sum(info.volumes_mm3[1:]), info.id

        order = sorted(range(self.size), key=size)
        chosen = sorted(order[(2 * k + 1) * self.size // (2 * most)] for k in range(most))
        return replace(self, cases=self.cases[chosen])

    def fetch(self, indices: np.ndarray, epoch: int, view: int | None = None) -> Batch:
        """Read the case at the one index. Raises UserError where it was damaged, ValueError for several indices."""
        indices = np.array(indices, dtype=np.int64)
        if len(indices) != 1:
            raise ValueError(f"{self.name}: {len(indices)} cases at once; read whole volumes one by one")
        case = int(self.cases[indices[0]])
        self.packed.check(case)
        batch = {
            # Copied: torch warns of arrays that must not be written to, and pinning takes a copy anyway.
            "image": torch.from_numpy(np.array(self.packed.image(case)))[None],
            "mask": torch.from_numpy(np.array(self.packed.truth(case)))[None],
            "spacing": torch.tensor([self.packed.case(case).original_spacing], dtype=torch.float64),
            "mirrors": torch.full((1, 3), self.mirrored),
            "index": torch.from_numpy(indices),
            "view": torch.zeros(1, dtype=torch.int64),
        }
        return batch | ({"overlay": torch.ones(1, dtype=torch.bool)} if self.kind == "overlays" else {})

    def on_device(self, batch: Batch) -> Batch:
        """Return the batch with the image as float32."""
        return {**batch, "image": batch["image"].float()}


@dataclass(frozen=True, eq=False)
class PatchSplit(_Cases, TrainSplit):
    """Patches of cases: row r is draw r % patches of case r // patches. Where it lies is a hash of seed, epoch and row.

    Keys after `on_device`: image, float32 (B, C, *patch); mask, uint8 (B, *patch); index, view. Before, image is
    float16 and both are larger by `margin` on each side, and there are the numbers of the augmentation, `augment_*`.
    """

    reader: PatchReader
    """Of the volumes of these cases."""
    seed: int
    patch: tuple[int, int, int]
    patches: int
    """Of each case in an epoch."""
    foreground: float
    """Share that is centred on organs; of what is evaluated always a half."""
    augment: VolumeAugment
    kind: Literal["train", "patches"] = "train"
    """To train on, other ones in each epoch; or to be evaluated, always the same."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_kept_starts"}

    @property
    def size(self) -> int:
        """Number of patches of an epoch."""
        return len(self.cases) * self.patches

    @property
    def views(self) -> int:
        """Where patches lie differs from epoch to epoch, so there is no counting them: 0; of what is evaluated, 1."""
        return 0 if self.kind == "train" else 1

    @functools.cached_property
    def protocol(self) -> Segmentation | None:
        """Names and patients of the patches; None for training."""
        return None if self.kind == "train" else self._protocol("patches", self.patches)

    @functools.cached_property
    def margin(self) -> tuple[int, int, int]:
        """Voxels more that are read on each side, for what the augmentation moves into the patch."""
        return self.augment.margin(self.patch, self.packed.spacing)

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """Known places of each organ in each case, int64 (cases, classes - 1)."""
        organs = range(1, len(self.packed.names))
        known = [[len(self.packed.foreground(case, organ)) for organ in organs] for case in self.cases.tolist()]
        return np.asarray(known, np.int64).reshape(len(self.cases), len(organs))

    def starts(self, rows: np.ndarray, epoch: int) -> np.ndarray:
        """Return the first voxel of each patch in its volume, int64 (rows, 3).

        A patch lies inside its volume; along axes where the volume is the smaller, all of it lies inside the patch.
        """
        # Those of an epoch are found at once, 5 us each: after megabytes of voxels have gone through the processor's
        # cache, the code that finds a single one takes 0.1 ms.
        epoch = 0 if self.kind == "patches" else epoch
        kept = self.__dict__.get("_kept_starts")
        if kept is None or kept[0] != epoch:
            kept = self.__dict__["_kept_starts"] = epoch, self._all_starts(epoch)
        return kept[1][rows]

    def _all_starts(self, epoch: int) -> np.ndarray:
        rows = np.arange(self.size)
        cases = rows // self.patches
        # Whether on an organ, which, which of its voxels; and where else, along each axis.
        draws = rng.uniform(self.seed, "patch", epoch, rows[:, None], np.arange(6))
        shapes = self.reader.shapes[cases]
        lowest, highest = np.minimum(shapes - self.patch, 0), np.maximum(shapes - self.patch, 0)
        starts = lowest + (draws[:, 3:] * (highest - lowest + 1)).astype(np.int64)
        chosen = draws[:, 0] < self.foreground if self.kind == "train" else rows % 2 == 0
        present = [np.flatnonzero(known) + 1 for known in self.counts]
        # Of a case with ignored voxels the others are centred on voxels that are not, of whatever label.
        partly = np.asarray([len(self.packed.foreground(case, 0)) > 0 for case in self.cases.tolist()])
        for row in np.flatnonzero(chosen | partly[cases]).tolist():
            case = int(cases[row])
            organs, organ = present[case] if chosen[row] else present[case][:0], 0
            if len(organs):
                organ = int(organs[int(draws[row, 1] * len(organs))])
            elif not partly[case]:
                continue
            voxels = self.packed.foreground(int(self.cases[case]), organ)
            rest, x = divmod(int(voxels[int(draws[row, 2] * len(voxels))]), int(shapes[row, 2]))
            z, y = divmod(rest, int(shapes[row, 1]))
            starts[row] = [at - side // 2 for at, side in zip((z, y, x), self.patch, strict=True)]
        return np.clip(starts, lowest, highest)

    def fetch(self, indices: np.ndarray, epoch: int, view: int | None = None) -> Batch:
        """Read the patches at `indices`, in training with the numbers for their augmentation.

        Raises UserError where a case was damaged.
        """
        indices = np.array(indices, dtype=np.int64)
        starts = self.starts(indices, epoch) - self.margin
        batch = {"index": torch.from_numpy(indices), "view": torch.from_numpy(np.zeros_like(indices))}
        batch["image"], batch["mask"] = self.reader.patches(indices // self.patches, starts, self._region)
        if self._augmented:
            where = (self.patch, self.packed.spacing, self.packed.axes, self.packed.names, self.packed.channels)
            numbers = self.augment.numbers(self.seed, epoch, indices, *where)
            batch |= {key: torch.from_numpy(value) for key, value in numbers.items()}
        return batch

    def on_device(self, batch: Batch) -> Batch:
        """Augment patches; the image as float32."""
        image, mask = batch["image"].float(), batch["mask"]
        numbers = {key: value for key, value in batch.items() if key.startswith("augment_")}
        if numbers:
            image, mask = self.augment.apply(image, mask, numbers, self.patch)
        return {"index": batch["index"], "view": batch["view"], "image": image, "mask": mask}

    @functools.cached_property
    def _region(self) -> tuple[int, int, int]:
        depth, height, width = (p + 2 * m for p, m in zip(self.patch, self.margin, strict=True))
        return depth, height, width

    @functools.cached_property
    def _augmented(self) -> bool:
        return self.augment != VolumeAugment()
