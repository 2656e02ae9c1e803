"""Volumes with a class for every voxel: patches to train on, whole volumes to be evaluated in millimetres."""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from trainkit.config.ranges import Fraction, Side, Whole
from trainkit.data import sources
from trainkit.data.sources import HELD_OUT, SAMPLE
from trainkit.data.split import check_evaluate, check_leaks, evaluated, key, missing, warn_of_few
from trainkit.data.volumes import fingerprint, importer, label_names
from trainkit.data.volumes import sources as volume_sources
from trainkit.data.volumes.augment import VolumeAugment
from trainkit.data.volumes.patch_reader import PatchReader
from trainkit.data.volumes.sources import VolumeSource
from trainkit.data.volumes.splits import CaseSplit, PatchSplit
from trainkit.data.volumes.volume_store import PackedVolumes
from trainkit.errors import UserError, few
from trainkit.interfaces import Dataset, DatasetInfo
from trainkit.paths import locate

SAMPLES = {"orbits": "trainkit.data.synthetic.orbits"}
"""Built-in sets by name: the module that draws it."""

PATCH_LIMIT = 1 << 28
"""Most voxels of a patch; 645 along each axis."""

_ALIKE = 1.5
"""Factor between two spacings up to which nothing is said."""
_FIXED = 0
"""Seed of the patches that are evaluated: whatever the run's, so that runs are evaluated on the same ones."""


Millimetres = Annotated[float, Field(ge=0.01, le=1000)]
"""Distance between voxels."""


@dataclass(kw_only=True)
class Volumes:
    """NIfTI volumes and their label maps. Every evaluation set NAME offers the splits NAME (all cases, whole),
    NAME.few, NAME.mirrored, NAME.overlays and NAME.patches, and so does `train`."""

    train: str
    """Training set: `{train,val}/{image,label}` in TOM500's layout (`tom500#train`), a folder with the Decathlon's
    `dataset.json`, a folder with one subfolder of images and one of labels, or the built-in `sample:orbits`."""
    evaluate: dict[str, str] = field(default_factory=dict)
    """Evaluation sets by name, in the forms of `train`; `held_out` is the fold that is excluded from training."""
    names: list[str] | None = None
    """Names of the labels 1, 2, ... null: the names in the source. A label called `ignore` is not a class: its voxels
    are in no loss and no score."""
    labels: dict[str, Whole] | None = field(default=None, metadata={"hash": "set"})
    """Classes and their values, in place of `names`, where label maps hold other values than 1, 2, ...: {kidney: 205,
    tumour: 420}. 0 is the background, and `ignore: 255` stands for unlabelled voxels. null: as `names`."""
    spacing: tuple[Millimetres, Millimetres, Millimetres] | None = None
    """Voxel spacing in mm along depth, height and width, to which volumes are resampled once. null: as in the files."""
    patch: tuple[Side, Side, Side]
    """Depth, height and width of a training patch and of an evaluation window, in voxels. Depth is the axis across
    slices: the one with the largest spacing."""
    patches: Annotated[int, Field(ge=1, le=100000)] = 4
    """Patches per case in an epoch, and in NAME.patches, where half of them are always centred on organs."""
    foreground: Fraction = 0.5
    """Fraction of the patches that are centred on a labelled voxel; all labels of a case are equally likely."""
    augment: VolumeAugment = field(default_factory=VolumeAugment)
    """Augmentation of training patches. Default: none."""
    patient: str | None = None
    """Regular expression with one part in parentheses that finds the patient in a file name. null: the name is the
    patient."""
    folds: Annotated[int, Field(ge=2, le=1000)] = 5
    """Number of folds into which patients are divided, by a hash of their names, where one is held out."""
    fold: Annotated[int, Field(ge=0, lt=1000)] | None = None
    """Number of the held-out fold, 0 .. folds-1. null: none."""
    leakage: Literal["refuse", "allow"] = "refuse"
    """Action when a patient or a volume is in both training and evaluation data. `refuse`: end the run. `allow`:
    warn."""
    few: Annotated[int, Field(ge=1, le=1000)] = 4
    """Number of cases in NAME.few and NAME.overlays, spread over the sizes."""
    name: Literal["volumes"] = "volumes"
    """Kind of data."""

    def __post_init__(self) -> None:
        if math.prod(self.patch) > PATCH_LIMIT:
            raise ValueError(f"patch is {list(self.patch)}; {PATCH_LIMIT} voxels at most are possible")
        if self.fold is not None and self.fold >= self.folds:
            raise ValueError(f"fold is {self.fold} of {self.folds}; folds are numbered from 0")
        different = {name.lower() for name in self.names or ()}
        if self.names is not None and (not self.names or len(different) < len(self.names) or "" in self.names):
            raise ValueError("names must be different names of the labels 1, 2, ..., at least one")
        if self.labels is not None:
            if self.names is not None:
                raise ValueError("names and labels are both set; keep one")
            label_names.check_values(self.labels)
        if self.patient is not None:
            try:
                sources.finding(self.patient, "patient")
            except UserError as error:
                raise ValueError(str(error)) from None
        check_evaluate(self.evaluate, self.fold is not None, "fold", "patients")

    def open(self, seed: int) -> Dataset:
        """Find, check and where needed pack the files.

        Raises UserError naming file and case, labels that differ, patients and volumes that are in two splits.
        """
        places = evaluated(self.evaluate, self.fold is not None)
        # All are found before the first is imported: a misspelt path should not show after half an hour.
        found = {"train": self._found(self.train, "train")}
        found |= {name: self._found(place, "val") for name, place in places.items() if place != HELD_OUT}
        whole = self._packed(*found["train"])
        sets = {"train": whole} | {n: self._packed(*one, like=whole) for n, one in found.items() if n != "train"}
        kept, held = self._divided(whole)
        train = CaseSplit("train", whole, kept)
        scored: dict[str, CaseSplit] = {}
        for name, place in places.items():
            packed, cases = (whole, held) if place == HELD_OUT else (sets[name], np.arange(len(sets[name])))
            scored[name] = CaseSplit(name, packed, cases)
            _check_fit(key(name), whole, packed)
            voxels = np.asarray([packed.case(case).foreground[1:] for case in cases.tolist()])
            counts = dict(zip(packed.names[1:], (voxels > 0).sum(0).tolist(), strict=True))
            warn_of_few(key(name), len(cases), "cases", counts)
        self._check_leaks(train, scored)
        self.augment.check_labels(whole.names)
        evaluations: dict[str, CaseSplit | PatchSplit] = {}
        for name, split in {**scored, "train": train}.items():
            evaluations |= self._kinds(name, split)
        meta = DatasetInfo(
            len(whole.names),
            (whole.channels, *self.patch),
            train.digest,
            whole.names,
            spacing=whole.spacing,
            axes=whole.axes,
            resampled=whole.preparation.spacing or (),
            channels=whole.channel_names,
        )
        training = self._patches("train", train, seed, "train")
        others = self._other_spacings(whole, scored)
        odd = (f"{key(name)}: {text}" for name, one in sets.items() for text in importer.notes(found[name][0], one))
        return Dataset(meta, training, evaluations, (*self._notes(training, held), *others, *odd))

    def missing(self) -> list[str]:
        """Sentences about files that are not there yet."""
        return missing(self.train, self.evaluate)

    def _found(self, text: str, part: str) -> tuple[VolumeSource, importer.Names]:
        """Find what a path leads to: files, and the names of their labels."""
        names, path = self.labels or self.names, locate(text)
        if text.startswith(SAMPLE):
            drawn = _sample(text)
            path, names = f"{drawn.folder()}#{part}", names or list(drawn.NAMES[1:])
        return volume_sources.open_volumes(path, patient=self.patient), names

    def _packed(self, source: VolumeSource, names: importer.Names, like: PackedVolumes | None = None) -> PackedVolumes:
        """Pack files where they are not yet; to be evaluated, as the training set `like` was packed."""
        axes, spacing = None, self.spacing
        if like is not None:
            axes, spacing = like.axes, like.preparation.spacing
            names = names or (list(like.names) if source.names is None else None)
            if volume_sources.automatic(source.channels) and like.channel_names:
                source = replace(source, channels=like.channel_names)
        return importer.pack_volumes_once(source, names=names, spacing=spacing, axes=axes)

    def _divided(self, whole: PackedVolumes) -> tuple[np.ndarray, np.ndarray]:
        """Return the cases to train on, and those that are held out, int64 each."""
        if self.fold is None:
            return np.arange(len(whole)), np.arange(0)
        patients = whole.patients()
        if len(set(patients)) < self.folds:
            found = f"{self.folds} folds of {len(set(patients))} patients ({few(sorted(set(patients)))})"
            raise UserError("data.folds", found, "at least one patient per fold")
        part = fold_of(patients, self.folds)
        out = np.asarray([part[patient] == self.fold for patient in patients])
        return np.flatnonzero(~out), np.flatnonzero(out)

    def _check_leaks(self, train: CaseSplit, scored: Mapping[str, CaseSplit]) -> None:
        held = {name: split.held() for name, split in scored.items()}
        remedy = "divide the sets by patient (data.fold can), or set `leakage: allow`"
        check_leaks(train.held(), held, self.leakage, "each patient and each volume in one split", remedy)

    def _patches(self, name: str, split: CaseSplit, seed: int, kind: Literal["train", "patches"]) -> PatchSplit:
        augment = self.augment if kind == "train" else VolumeAugment()
        reader = PatchReader(split.packed, split.cases)
        return PatchSplit(
            name, split.packed, split.cases, reader, seed, self.patch, self.patches, self.foreground, augment, kind
        )

    def _kinds(self, name: str, split: CaseSplit) -> dict[str, CaseSplit | PatchSplit]:
        """Return the splits by which a set is evaluated, by the words that evaluations name them by."""
        few = split.some(self.few)
        return {
            name: replace(split, name=name),
            f"{name}.few": replace(few, name=f"{name}.few"),
            f"{name}.mirrored": replace(split, name=f"{name}.mirrored", mirrored=True),
            f"{name}.overlays": replace(few, name=f"{name}.overlays", kind="overlays"),
            f"{name}.patches": self._patches(f"{name}.patches", split, _FIXED, "patches"),
        }

    def _other_spacings(self, train: PackedVolumes, scored: Mapping[str, CaseSplit]) -> Iterable[str]:
        """Yield sentences about sets to be evaluated whose voxels are of another shape than in training."""
        for name, split in scored.items():
            ratio = np.divide(split.packed.spacing, train.spacing)
            if not 1 / _ALIKE <= ratio.min() <= ratio.max() <= _ALIKE:
                found, expected = ("x".join(f"{mm:.4g}" for mm in one.spacing) for one in (split.packed, train))
                yield f"data.evaluate.{name}: voxels of {found} mm in the median, of data.train {expected} mm"

    def _notes(self, train: PatchSplit, held: np.ndarray) -> Iterable[str]:
        """Yield sentences about what was decided, and what is odd."""
        packed = train.packed
        if self.fold is not None:
            patients = [len({packed.case(case).patient for case in cases.tolist()}) for cases in (train.cases, held)]
            yield (
                f"fold {self.fold} of {self.folds}: {len(train.cases)} cases of {patients[0]} patients to train on, "
                f"{len(held)} of {patients[1]} held out"
            )
        if any(train.margin):
            yield f"patches are read with a margin of {_by(train.margin)} voxels on each side, for the augmentation"
        short = (train.reader.shapes < self.patch).sum(0)
        if short.any():
            along = [f"{n} along {axis}" for n, axis in zip(short, ("depth", "height", "width"), strict=True) if n]
            yield (
                f"volumes smaller than the patch of {_by(self.patch)}: {', '.join(along)}, of {len(train.cases)}; "
                f"the rest of a patch is filled with the volume's lowest value"
            )
        infos = train.infos
        annotated = np.sum([info.volumes_mm3 for info in infos], 0)
        if empty := [name for name, mm3 in zip(packed.names[1:], annotated[1:], strict=True) if not mm3]:
            yield f"no voxel of {few(empty, 20)} in any training case"


def fold_of(patients: Iterable[str], folds: int) -> dict[str, int]:
    """Return the fold of each patient, 0 .. folds-1: ordered by a hash of their names, and cut into parts of one size.

    No seed has a say: a fold is the same in every run, and its scores can be compared. Parts differ by one patient.
    """
    names = {name.encode(errors="surrogateescape"): name for name in patients}
    order = sorted(names, key=lambda name: (hashlib.sha256(name).digest(), name))
    return {names[name]: place * folds // len(order) for place, name in enumerate(order)}


def _sample(text: str) -> ModuleType:
    word = text.removeprefix(SAMPLE)
    if word not in SAMPLES:
        raise UserError("data", f"no built-in set of volumes {text!r}", " or ".join(SAMPLE + name for name in SAMPLES))
    return importlib.import_module(SAMPLES[word])


def _check_fit(where: str, train: PackedVolumes, other: PackedVolumes) -> None:
    """Raise UserError where a set to be evaluated differs from the training set in labels, axes, channels or grid."""

    def facts(data: PackedVolumes) -> dict[str, str]:
        return {
            "labels": few(data.names[1:], 20),
            "slices": f"from {fingerprint.ACROSS[data.axes[0]]}",
            "channels": few(data.channel_names, 20) or "without names",
            "volumes": _grid(data.preparation.spacing),
        }

    expected = facts(train)
    for word, found in facts(other).items():
        if found != expected[word]:
            place = f"{where} ({other.manifest['made_from'] or other.path})"
            remedy = "name labels and channels of both in one way (data.names, dataset.json)"
            raise UserError(place, f"{word} {found}", f"those of data.train: {expected[word]}", remedy)


def _by(numbers: Iterable[int]) -> str:
    return "x".join(map(str, numbers))


def _grid(spacing: Iterable[float] | None) -> str:
    return "as they are" if spacing is None else f"resampled to {'x'.join(f'{mm:g}' for mm in spacing)} mm"
