"""Faces of known people to train on, and sets of pairs, templates or probes to be evaluated on."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from trainkit import rng
from trainkit.data import evaluation_sets, hub, import_images, leakage, sources
from trainkit.data.evaluation_sets import Evaluation
from trainkit.data.faces import held_out
from trainkit.data.leakage import Held
from trainkit.data.record import Source
from trainkit.data.sources import HELD_OUT
from trainkit.data.split import TrainSplit, check_evaluate, evaluated, key, missing, warn_of_few
from trainkit.data.storage.image_store import Packed, is_packed
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Pairs, Protocol
from trainkit.interfaces import Batch, Dataset, DatasetInfo
from trainkit.paths import locate
from trainkit.tensors import torch

if TYPE_CHECKING:
    from torch import Tensor

SAMPLE = "sample"
"""In place of a path: the built-in sample set, drawn on first use."""


@dataclass(kw_only=True)
class Faces:
    """Aligned face images with identities; evaluated on verification or identification sets."""

    train: str
    """Training set: a folder of identities, InsightFace folder with train.rec, parquet, saved `datasets` folder, packed
    folder, or `sample`."""
    columns: dict[Literal["image", "label", "split", "name"], str] = field(
        default_factory=dict, metadata={"hash": "set"}
    )
    """Columns of a table, where their names are not recognised: `{image: img, label: fine_label}`; also `split` and
    `name`. A field of a struct column is `json.label`."""
    image_size: Annotated[int, Field(ge=1, le=4096)] = 112
    """Side of an image in pixels. Larger images are scaled down when they are packed."""
    fit: Literal["square", "crop"] = field(default="square", metadata={"hash": "set"})
    """Preparation of images when they are packed. `square`: aligned square images, scaled down. `crop`: the largest
    centre square; for centred faces of one size."""
    hold_out: str | None = field(default=None, metadata={"hash": "set"})
    """File of pairs (`path_a,path_b,same`) of images in `train`, with relative paths. Every person in it is excluded
    from training, and `held_out` in `evaluate` stands for these pairs. null: none."""
    flip: bool = True
    """Mirror half of the training images, a different half in each epoch."""
    evaluate: dict[str, str] = field(default_factory=dict)
    """Evaluation sets by name: a pairs.csv, `.bin`, template folder, TinyFace folder, `sample` or `held_out`."""
    name: Literal["faces"] = "faces"
    """Kind of data."""

    def __post_init__(self) -> None:
        if HELD_OUT in self.evaluate.values() or self.hold_out is not None:
            check_evaluate(self.evaluate, self.hold_out is not None, "hold_out", "people")

    def open(self, seed: int) -> Dataset:
        """Find, check and where needed pack the files. Raises UserError naming file and row."""
        if self.image_size < 1:
            raise UserError("data.image_size", str(self.image_size), "at least 1")
        faces = self._packed_train()
        if faces.classes < 2:
            raise UserError(self.train, f"{faces.classes} people", "at least 2")
        train, held = FaceSplit("train", faces, seed, mirror=self.flip), None
        if self.hold_out is not None:
            found = held_out.divide(faces, locate(self.hold_out))
            part = Part(found.train, found.label, found.names)
            train = FaceSplit("train", faces, seed, mirror=self.flip, part=part)
            held = Part(found.scored, np.full(len(found.scored), -1), found.people, found.pairs)
        scored = {
            name: FaceSplit(name, faces, seed, part=held)
            if place == HELD_OUT
            else FaceSplit(name, self._packed_evaluation(name), seed)
            for name, place in evaluated(self.evaluate, held is not None).items()
        }
        for name, split in scored.items():
            if isinstance(split.protocol, Pairs):
                warn_of_few(key(name), len(split.protocol.same), "pairs", {})
        shape = (3, self.image_size, self.image_size)
        return Dataset(DatasetInfo(len(train.names), shape, train.digest, train.names), train, scored)

    def missing(self) -> list[str]:
        """Return sentences about files that are not there yet."""
        file = None if self.hold_out is None else locate(self.hold_out)
        gone = f"{file} does not exist" if file is not None and not file.exists() else None
        return missing(
            self.train,
            self.evaluate,
            lambda path: None if path == SAMPLE else sources.missing(path),
            {"data.hold_out": gone},
        )

    def _packed_train(self) -> Packed:
        if hub.is_hub(self.train):
            return self._pack(sources.named(self.train, nested=False, columns=self.columns))
        path = _sample(self.image_size) / "train" if self.train == SAMPLE else locate(self.train)
        if is_packed(path):
            faces = Packed(path)
            if faces.manifest["protocol"] is not None:
                raise UserError(str(path), "an evaluation set", "a training set")
            if faces.size == (self.image_size, self.image_size):
                return faces
        return self._pack(sources.open_source(path, nested=False, columns=self.columns))

    def _packed_evaluation(self, name: str) -> Packed:
        text = self.evaluate[name]
        path = _sample(self.image_size) / "verification" if text == SAMPLE else locate(text)
        if is_packed(path):
            faces = Packed(path)
            if faces.manifest["protocol"] is None:
                raise UserError(str(path), "a training set", "an evaluation set")
            if faces.size == (self.image_size, self.image_size):
                return faces
        return self._pack(evaluation_sets.recognise(path))

    def _pack(self, found: Source | Evaluation) -> Packed:
        how = "crop" if self.fit == "crop" else "down"
        return import_images.pack_once(found, (self.image_size, self.image_size), how)


@dataclass(frozen=True, eq=False)
class Part:
    """Rows of a packed set of people that a split is of."""

    rows: np.ndarray
    """int64 (size,)."""
    label: np.ndarray
    """int64 (size,), the person of each as `names` numbers them; -1 where it is evaluated by pairs."""
    names: tuple[str, ...]
    """The people."""
    pairs: Pairs | None = None
    """How it is evaluated, by places in `rows`; None for training."""


@dataclass(frozen=True)
class FaceSplit(TrainSplit):
    """A packed set as the loop sees it. Keys: image (uint8), label, index, view."""

    name: str
    packed: Packed
    seed: int
    mirror: bool = False
    """Mirror half of the images, by a hash of seed, epoch and row."""
    part: Part | None = None
    """Rows of the set, where some people are held out; None: all."""
    any_thread = True

    @property
    def size(self) -> int:
        """Number of images."""
        return len(self.packed) if self.part is None else len(self.part.rows)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the people, in the order of their numbers; of an evaluation set there are none."""
        return self.packed.class_names if self.part is None else self.part.names

    @property
    def views(self) -> int:
        """Two where images are mirrored, else one."""
        return 2 if self.mirror else 1

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of images, labels and protocol."""
        if (part := self.part) is None:
            return self.packed.digest
        if part.pairs is None:
            text = "\n".join((self.packed.digest, *part.names)).encode(errors="surrogateescape")
            return hashlib.sha256(text + b"\n" + part.rows.tobytes() + part.label.tobytes()).hexdigest()
        # Of what is evaluated and nothing else, so that scores stay comparable when more people are trained on.
        pairs = part.pairs
        found = hashlib.sha256(f"pairs {self.packed.image_size}\n".encode())
        for values in (self.packed.at("content", part.rows), pairs.first, pairs.second, pairs.same):
            found.update(np.ascontiguousarray(values).tobytes())
        return found.hexdigest()

    @property
    def content(self) -> str | None:
        """SHA-256 of files, labels and protocol, whatever their size here; None where it was packed without it."""
        return self.packed.originals

    @property
    def protocol(self) -> Protocol | None:
        """How the split is evaluated; None for training."""
        return self.packed.protocol() if self.part is None else self.part.pairs

    def held(self) -> Held:
        """Return what splits are compared by: people by their names, of a set to be evaluated by its folders."""
        part, names, label = self.part, self.names, np.asarray(self.packed.labels)
        rows = np.arange(len(self.packed)) if part is None else part.rows
        held = functools.partial(leakage.held_in, self.packed, rows, kind="people")
        if part is not None and part.pairs is not None:
            return held(subjects=_people(names), prints=self.packed.at("content", rows))
        if part is None and not self.packed.classes:
            folders = {id.rpartition("/")[0].rpartition("/")[2] for id in self.packed.ids()}
            return held(subjects=_people(folders))
        return held(subjects=_people(names), label=label if part is None else part.label)

    def fetch(self, indices: np.ndarray, epoch: int, view: int | None = None) -> Batch:
        """Read the images at `indices`, and which are to be mirrored: all in the view asked for, or as drawn for the
        epoch. They are mirrored where the batch lives, by `on_device`.

        Raises UserError at a damaged row.
        """
        indices = np.array(indices, dtype=np.int64)
        rows = indices if self.part is None else self.part.rows[indices]
        return {"image": torch.from_numpy(self.packed.fetch(rows))} | self._labels(indices, epoch, view)

    def _labels(self, indices: np.ndarray, epoch: int, view: int | None = None) -> Batch:
        """Return label, index and view of the images at `indices`."""
        indices = np.array(indices, dtype=np.int64)
        views = np.full(len(indices), view or 0, np.int64)
        if self.mirror and view is None:
            views[:] = rng.uniform(self.seed, "mirror", epoch, indices) < 0.5
        label = self.packed.labels if self.part is None else self.part.label
        return {
            "label": torch.from_numpy(np.array(label[indices])),
            "index": torch.from_numpy(indices),
            "view": torch.from_numpy(views),
        }

    def on_device(self, batch: Batch) -> Batch:
        """Mirror images of view 1, and bring pixels 0 .. 255 to -1 .. 1: (x / 255 - 0.5) / 0.5."""
        image = batch["image"]
        if self.mirror:
            image = _mirrored(image, batch["view"])
        return {**batch, "image": image.float().div(127.5).sub(1)}


def _mirrored(images: Tensor, views: Tensor) -> Tensor:
    """Return the images, those of view 1 mirrored: uint8 (rows, 3, height, width).

    Both are made and one is chosen: to pick out those of view 1, the host would have to wait for the device.
    """
    # Eight pixels at a time where the width allows it: on a CPU 19 us for 112 px, else 79 us.
    word = torch.uint8 if images.shape[-1] % 8 else torch.int64
    mirrored = views.bool().view(-1, 1, 1, 1)
    return torch.where(mirrored, images.flip(-1).view(word), images.view(word)).view(torch.uint8)


def _people(names: Iterable[str]) -> frozenset[str]:
    """Return those of the names that name people: a number is another person in every set."""
    return frozenset(name for name in names if any(character.isalpha() for character in name))


def _sample(image_size: int) -> Path:
    from trainkit.data.synthetic import faces

    return faces.folder(image_size)
