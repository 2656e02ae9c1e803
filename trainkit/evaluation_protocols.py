"""How an evaluation set is scored: which of its images meet which. Nothing here knows a file or an image.

Every number is a row of the evaluation split, so each image is embedded once however many pairs it is in.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Pairs:
    """1:1 verification: image `first[i]` against image `second[i]`; the order is kept, for the ten contiguous folds."""

    first: np.ndarray
    """int64 (pairs,), rows of the split."""
    second: np.ndarray
    """int64 (pairs,), rows of the split."""
    same: np.ndarray
    """bool (pairs,), whether both show one person."""

    def __post_init__(self):
        _one_length(self, "first", "second", "same")

    def __len__(self) -> int:
        return len(self.same)


@dataclass(frozen=True)
class Templates:
    """IJB 1:1: images form media (one still, or the frames of one video), media form templates, templates form pairs.

    `template`, `media` and `faceness` have one entry per image (row of the split); `first` and `second` hold template
    ids as they stand in `template`, not positions.
    """

    template: np.ndarray
    """int64 (images,), template id of each image."""
    media: np.ndarray
    """int64 (images,), media id of each image; two templates may share a media id."""
    faceness: np.ndarray
    """float32 (images,), the detector's score, 0 to 1; ones where the set has none."""
    first: np.ndarray
    """int64 (pairs,), template ids."""
    second: np.ndarray
    """int64 (pairs,), template ids."""
    same: np.ndarray
    """bool (pairs,)."""

    def __post_init__(self):
        _one_length(self, "template", "media", "faceness")
        _one_length(self, "first", "second", "same")

    def __len__(self) -> int:
        return len(self.same)


@dataclass(frozen=True)
class Identification:
    """TinyFace, closed-set 1:N: each probe is looked up in the gallery, which holds matches and distractors."""

    probe: np.ndarray
    """int64 (probes,), rows of the split."""
    gallery: np.ndarray
    """int64 (gallery,), rows of the split: matches first, then distractors."""
    label: np.ndarray
    """int64 (images,), identity of each row of the split; -1 for distractors, whom no probe matches."""

    def __post_init__(self):
        if self.probe.ndim != 1 or self.gallery.ndim != 1 or self.label.ndim != 1:
            raise ValueError("probe, gallery and label must have one dimension")

    def __len__(self) -> int:
        return len(self.probe)


@dataclass(frozen=True)
class Classes:
    """Classification: each image is of one of the classes that were trained on."""

    label: np.ndarray
    """int64 (images,), class of each row of the split."""
    names: tuple[str, ...]
    """Name of each class, in the order of their numbers."""
    group: np.ndarray | None = field(default=None, kw_only=True)
    """int64 (images,), which images have a person, video or source in common; None where nothing says."""

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True)
class Separation(Classes):
    """How far apart the classes lie: in the space of the embeddings and in the scores of the classes."""


@dataclass(frozen=True)
class Inspection(Classes):
    """Images for the eye: maps of the embeddings, and the images that are hard, odd or likely mislabelled."""

    ids: tuple[str, ...]
    """Name of each image in its source."""


@dataclass(frozen=True)
class Retrieval:
    """Each image is a query against all others: the nearest should be of its class. The classes may be new ones."""

    label: np.ndarray
    """int64 (images,), class of each row of the split."""

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True)
class Search:
    """Persons are looked for in a gallery, each query with one record or with several of different modalities."""

    person: np.ndarray
    """int64 (records,), whom each row of the split shows; -1 for a distractor, whom nobody looks for."""
    place: np.ndarray
    """int64 (records,), where it was seen: what of its own place a query does not meet, `hides` says; -1 for unknown,
    which hides nothing."""
    galleries: tuple[np.ndarray, ...]
    """int64 rows of each trial's gallery; scores are means over the trials."""
    queries: Mapping[str, np.ndarray]
    """Name of each list to int64 (queries, 5): the row of each modality of `interfaces.MODALITIES`, -1 for none."""
    ids: tuple[str, ...]
    """Name of each record in its source."""
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Lists whose scores are averaged: `modal_1` to those of one modality. Of the groups the mean is the headline."""
    by_person: bool = False
    """Count persons in place of gallery records in CMC, as SYSU-MM01's protocol does."""
    hides: Literal["person", "place"] = "person"
    """Records of its own place that a query does not meet: its person's, or (SYSU-MM01's protocol) anybody's."""
    kind: Literal["scores", "ranked", "reranked"] = "scores"
    """Scores; images of ranked lists too; or scores after k-reciprocal re-ranking."""
    strict: bool = False
    """Of re-ranking: see `metrics.k_reciprocal`."""

    def __post_init__(self):
        _one_length(self, "person", "place")
        if len(self.ids) != len(self.person):
            raise ValueError(f"Search: {len(self.ids)} ids for {len(self.person)} records")
        unknown = {name for names in self.groups.values() for name in names} - set(self.queries)
        if unknown or not self.galleries or not self.queries:
            raise ValueError(
                f"Search: groups name {unknown or 'nothing strange'}, and there must be queries and a gallery"
            )

    def __len__(self) -> int:
        return len(self.person)


@dataclass(frozen=True)
class Segmentation:
    """A class for every voxel of volumes: each row of the split is a case, or a patch of one."""

    ids: tuple[str, ...]
    """Name of each row: of the case, or of the case and the patch."""
    patients: tuple[str, ...]
    """Patient of each row."""
    names: tuple[str, ...]
    """Name of each class, in the order of their numbers; that numbered 0 is the background."""
    kind: Literal["whole", "patches", "overlays"]
    """Whole cases in millimetres; patches by their voxels; or whole cases with images of some."""
    clinical: Mapping[str, tuple] = field(default_factory=dict)
    """Columns that stand beside the scores of each row: name to a value (text, a number or None) for each."""
    shown: str = ""
    """Name of the channel that images show; empty where there is but one."""

    def __post_init__(self):
        columns = {"ids": self.ids, "patients": self.patients, **self.clinical}
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"Segmentation: one length expected, got {lengths}")
        if len(self.names) < 2:
            raise ValueError(f"Segmentation: a background and at least one organ expected, got {self.names}")

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Scenes:
    """A class for every pixel of images: each row of the split is an image."""

    ids: tuple[str, ...]
    """Name of each image in its source."""
    names: tuple[str, ...]
    """Name of each class, in the order of their numbers."""
    kind: Literal["scores", "overlays"] = "scores"
    """Scores, or images of predictions beside the truth."""
    colours: tuple[tuple[int, int, int], ...] = ()
    """Red, green and blue of each class in images; empty where the data has none of its own."""

    def __post_init__(self):
        if len(self.names) < 2 or len(self.colours) not in (0, len(self.names)):
            raise ValueError(f"Scenes: {len(self.names)} classes and {len(self.colours)} colours")

    def __len__(self) -> int:
        return len(self.ids)


@typing.runtime_checkable
class NamesClasses(typing.Protocol):
    """A protocol of samples whose classes are those of the training."""

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each class, in the order of their numbers."""
        ...


Protocol = Pairs | Templates | Identification
"""Protocols that a packed evaluation set may hold; the others are made from the labels of a set."""


def _one_length(protocol: object, *names: str) -> None:
    shapes = {name: np.shape(getattr(protocol, name)) for name in names}
    if len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(f"{type(protocol).__name__}: one length expected, got {shapes}")
