"""Evaluation protocols: which samples of a split are compared, and with which labels; independent of files.

Every index is a row of the evaluation split, so each image is embedded once, whatever the number of its pairs.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Pairs:
    """1:1 verification: image `first[i]` and image `second[i]`, in the order of the ten contiguous folds."""

    first: np.ndarray
    """int64 (pairs,), rows of the split."""
    second: np.ndarray
    """int64 (pairs,), rows of the split."""
    same: np.ndarray
    """bool (pairs,), True for the same identity."""

    def __post_init__(self):
        _one_length(self, "first", "second", "same")

    def __len__(self) -> int:
        return len(self.same)


@dataclass(frozen=True)
class Templates:
    """IJB 1:1: images form media (one still, or the frames of one video), media form templates, templates form pairs.

    `template`, `media` and `faceness` have one entry per image (row of the split); `first` and `second` hold template
    ids as in `template`, not positions.
    """

    template: np.ndarray
    """int64 (images,), template id of each image."""
    media: np.ndarray
    """int64 (images,), media id of each image; two templates may share a media id."""
    faceness: np.ndarray
    """float32 (images,), the detector's score, 0 to 1; ones if the set has none."""
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
    """int64 (images,), identity of each row of the split; -1 for distractors, which match no probe."""

    def __post_init__(self):
        if self.probe.ndim != 1 or self.gallery.ndim != 1 or self.label.ndim != 1:
            raise ValueError("probe, gallery and label must have one dimension")

    def __len__(self) -> int:
        return len(self.probe)


@dataclass(frozen=True)
class Classes:
    """Classification: each image belongs to one of the classes of the training."""

    label: np.ndarray
    """int64 (images,), class of each row of the split."""
    names: tuple[str, ...]
    """Name of each class, in the order of their numbers."""
    group: np.ndarray | None = field(default=None, kw_only=True)
    """int64 (images,), group of images with the same person, video or source; None if unknown."""

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True)
class Separation(Classes):
    """Separation of the classes in the space of the embeddings and in the class scores."""


@dataclass(frozen=True)
class Inspection(Classes):
    """Inspection: maps of the embeddings, and images that are hard, outliers or likely mislabelled."""

    ids: tuple[str, ...]
    """Name of each image in its source."""


@dataclass(frozen=True)
class Retrieval:
    """Retrieval: each image is a query against all others. The classes may differ from those of the training."""

    label: np.ndarray
    """int64 (images,), class of each row of the split."""

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True)
class Search:
    """Re-identification: find persons in a gallery, with queries of one record or several of different modalities."""

    person: np.ndarray
    """int64 (records,), identity of each row of the split; -1 for a distractor, which matches no query."""
    place: np.ndarray
    """int64 (records,), place (camera) of each row; a query ignores records of its person from its own place. -1:
    unknown, nothing is ignored."""
    gallery: np.ndarray
    """int64 (gallery,), rows of the split."""
    queries: Mapping[str, np.ndarray]
    """Name of each list to int64 (queries, 5): the row per modality of `interfaces.MODALITIES`, -1 for none."""
    ids: tuple[str, ...]
    """Name of each record in its source."""
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Lists whose metrics are averaged: `modal_1` for those of one modality. The main metrics are means over groups."""
    kind: Literal["scores", "ranked", "reranked"] = "scores"
    """Metrics only; with images of ranked lists; or metrics after k-reciprocal re-ranking."""
    strict: bool = False
    """Option of re-ranking: see `metrics.k_reciprocal`."""
    rule: str = ""
    """Which gallery images a query ignores, in words."""

    def __post_init__(self):
        _one_length(self, "person", "place")
        _one_length(self, "gallery")
        if len(self.ids) != len(self.person):
            raise ValueError(f"Search: {len(self.ids)} ids for {len(self.person)} records")
        unknown = {name for names in self.groups.values() for name in names} - set(self.queries)
        if unknown or not self.queries:
            raise ValueError(f"Search: groups with unknown lists: {unknown or 'none'}; expected one or more queries")

    def __len__(self) -> int:
        return len(self.person)


@dataclass(frozen=True)
class Segmentation:
    """Segmentation of volumes: each row of the split is a case, or a patch of one."""

    ids: tuple[str, ...]
    """Name of each row: of the case, or of the case and the patch."""
    patients: tuple[str, ...]
    """Patient of each row."""
    names: tuple[str, ...]
    """Name of each class, in the order of their numbers; class 0 is the background."""
    kind: Literal["whole", "patches", "overlays"]
    """Whole cases in millimetres; patches by voxels; or whole cases with images of some."""
    shown: str = ""
    """Name of the channel in images; empty for a single channel."""

    def __post_init__(self):
        if len(self.ids) != len(self.patients):
            raise ValueError(f"Segmentation: {len(self.ids)} ids, {len(self.patients)} patients; expected equal ones")
        if len(self.names) < 2:
            raise ValueError(f"Segmentation: names {self.names}; expected a background and at least one organ")

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Scenes:
    """Semantic segmentation: each row of the split is an image."""

    ids: tuple[str, ...]
    """Name of each image in its source."""
    names: tuple[str, ...]
    """Name of each class, in the order of their numbers."""
    kind: Literal["scores", "overlays"] = "scores"
    """Metrics, or images of predictions beside the truth."""
    colours: tuple[tuple[int, int, int], ...] = ()
    """Red, green and blue of each class in images; empty if the data defines none."""

    def __post_init__(self):
        if len(self.names) < 2 or len(self.colours) not in (0, len(self.names)):
            raise ValueError(f"Scenes: {len(self.names)} classes and {len(self.colours)} colours")

    def __len__(self) -> int:
        return len(self.ids)


@typing.runtime_checkable
class NamesClasses(typing.Protocol):
    """A protocol with the classes of the training."""

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each class, in the order of their numbers."""
        ...


Protocol = Pairs | Templates | Identification
"""Protocols that a packed evaluation set can store; the others are derived from the labels of a set."""


def _one_length(protocol: object, *names: str) -> None:
    shapes = {name: np.shape(getattr(protocol, name)) for name in names}
    if len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(f"{type(protocol).__name__}: shapes {shapes}; expected equal lengths")
