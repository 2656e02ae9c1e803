"""Faces of known people to train on, and sets of pairs, templates or probes to be scored on."""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import filelock
import numpy as np
import torch

from trainkit import seeding
from trainkit.data import evaluations, hub, importing, packed, sources
from trainkit.data.evaluations import Evaluation
from trainkit.data.packed import Packed, is_packed
from trainkit.data.protocols import Protocol
from trainkit.data.record import Source
from trainkit.errors import UserError
from trainkit.places import data_root, locate
from trainkit.task import Batch, Meta, Opened

_log = logging.getLogger(__name__)

SAMPLE = "sample"
"""In place of a path: the built-in sample set, drawn on first use."""


@dataclass(kw_only=True)
class Faces:
    """Faces of known people, square and aligned; scored on verification or identification sets."""

    train: str
    """Folder of identities, packed folder, saved `datasets` folder, parquet file or folder, InsightFace folder with
    train.rec, or `sample`. What is not packed is packed once, into `.trainkit-packed` under the data root."""
    image_size: int = 112
    """Side of a picture in pixels; larger pictures are made smaller when they are packed."""
    flip: bool = True
    """Mirror half of the training pictures, others in each epoch."""
    evaluate: dict[str, str] = field(default_factory=dict)
    """Name of an evaluation set to its pairs.csv, `.bin`, template folder, TinyFace folder, or `sample`."""
    name: Literal["faces"] = "faces"

    def open(self, seed: int) -> Opened:
        """Find, check and where needed pack the files. Raises UserError naming file and row."""
        if self.image_size < 1:
            raise UserError("data.image_size", str(self.image_size), "at least 1")
        faces = self._packed_train()
        if faces.classes < 2:
            raise UserError(self.train, f"{faces.classes} people", "at least 2 to tell apart")
        train = FaceSplit("train", faces, seed, mirror=self.flip)
        scored = {name: FaceSplit(name, self._packed_evaluation(name), seed) for name in self.evaluate}
        shape = (3, self.image_size, self.image_size)
        return Opened(Meta(faces.classes, shape, faces.digest, faces.class_names), train, scored)

    def missing(self) -> list[str]:
        """Sentences about files that are not there yet."""
        named = {"data.train": self.train} | {f"data.evaluate.{name}": path for name, path in self.evaluate.items()}
        absent = []
        for key, path in named.items():
            if hub.is_hub(path):
                if not hub.is_here(path):
                    absent.append(f"{key}: {path} is not here yet; `trainkit fetch RECIPE` downloads it")
            elif path != SAMPLE and not locate(path).exists():
                absent.append(f"{key}: {locate(path)} does not exist")
        return absent

    def _packed_train(self) -> Packed:
        if hub.is_hub(self.train):
            # Never downloads: a training uses no network.
            return pack_once(sources.open_source(hub.download(self.train, network=False)), self.image_size)
        path = _sample(self.image_size) / "train" if self.train == SAMPLE else locate(self.train)
        if is_packed(path):
            faces = Packed(path)
            if faces.manifest["protocol"] is not None:
                raise UserError(str(path), "an evaluation set", "a set to train on")
            if faces.image_size == self.image_size:
                return faces
        return pack_once(sources.open_source(path), self.image_size)

    def _packed_evaluation(self, name: str) -> Packed:
        text = self.evaluate[name]
        path = _sample(self.image_size) / "verification" if text == SAMPLE else locate(text)
        if is_packed(path):
            faces = Packed(path)
            if faces.manifest["protocol"] is None:
                raise UserError(str(path), "a set to train on", "an evaluation set")
            if faces.image_size == self.image_size:
                return faces
        return pack_once(evaluations.recognise(path), self.image_size)


@dataclass(frozen=True)
class FaceSplit:
    """A packed set as the loop sees it. Keys: image (uint8), label, index, view."""

    name: str
    packed: Packed
    seed: int
    mirror: bool = False
    """Mirror half of the pictures, by a hash of seed, epoch and row."""

    @property
    def size(self) -> int:
        """Number of pictures."""
        return len(self.packed)

    @property
    def views(self) -> int:
        """Two where pictures are mirrored, else one."""
        return 2 if self.mirror else 1

    @property
    def digest(self) -> str:
        """SHA-256 of pictures, labels and protocol."""
        return self.packed.digest

    @property
    def protocol(self) -> Protocol | None:
        """How the split is scored; None for training."""
        return self.packed.protocol()

    def order(self, epoch: int, batch_size: int) -> np.ndarray:
        """Rows of one epoch, shuffled, int64 (updates, batch_size); what fills no batch is left for other epochs.

        Raises UserError when there are fewer pictures than one batch takes.
        """
        if not 1 <= batch_size <= self.size:
            raise UserError("batch_size", str(batch_size), f"1 to {self.size}, the number of pictures in {self.name}")
        updates = self.size // batch_size
        rows = seeding.permutation(self.seed, epoch, self.size)[: updates * batch_size]
        return rows.astype(np.int64).reshape(updates, batch_size)

    def fetch(self, indices: np.ndarray, epoch: int, view: int | None = None) -> Batch:
        """The pictures at `indices` with those of view 1 mirrored: all in the view asked for, or as the epoch draws it.

        Raises UserError at a damaged row.
        """
        indices = np.array(indices, dtype=np.int64)
        images = self.packed.fetch(indices)
        views = np.full(len(indices), view or 0, np.int64)
        if self.mirror and view is None:
            views[:] = seeding.uniform(self.seed, "mirror", epoch, indices) < 0.5
        chosen = np.flatnonzero(views)
        images[chosen] = images[chosen][..., ::-1]
        return {
            "image": torch.from_numpy(images),
            "label": torch.from_numpy(np.array(self.packed.labels[indices])),
            "index": torch.from_numpy(indices),
            "view": torch.from_numpy(views),
        }

    def on_device(self, batch: Batch) -> Batch:
        """Pixels 0 .. 255 to -1 .. 1, as the field's networks take them: (x / 255 - 0.5) / 0.5."""
        return {**batch, "image": batch["image"].float().div(127.5).sub(1)}


def pack_once(found: Source | Evaluation, image_size: int) -> Packed:
    """The packed form of a source, made when it is not there yet. Processes that start together make it once."""
    folder = cache_root() / _key(found, image_size)
    if is_packed(folder):
        return Packed(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        (folder.parent / ".gitignore").write_text("*\n")
        with filelock.FileLock(folder.with_suffix(".lock")):
            if not is_packed(folder):
                _log.info("packing %s into %s, once", found.where, folder)
                source, protocol = found.read() if isinstance(found, Evaluation) else (found, None)
                report = importing.import_faces(source, folder, image_size=image_size, resize="down", protocol=protocol)
                for note in report.notes:
                    _log.warning("%s: %s", source.where, note)
    except OSError as error:
        remedy = "set TRAINKIT_CACHE to a folder that can be written"
        raise UserError(str(folder), f"cannot be written ({error.strerror or error})", remedy=remedy) from None
    return Packed(folder)


def cache_root() -> Path:
    """Where sets are packed: `$TRAINKIT_CACHE`, else beside the data, else (where read-only) the user's cache."""
    if chosen := os.environ.get("TRAINKIT_CACHE"):
        return Path(chosen).expanduser().absolute()
    root = data_root()
    try:
        # Permission bits as well as access: the superuser could write to what its owner has set read-only.
        writable = root.stat().st_mode & 0o222 and os.access(root, os.W_OK)
    except OSError:
        writable = False
    if writable:
        return root / ".trainkit-packed"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainkit" / "packed"


def _key(source: Source | Evaluation, image_size: int) -> str:
    """Names a packed set by what it is made from: any file that was changed, replaced or added gives another key.

    The time of the last change of the file's entry (ctime) is part of it: unlike the time of modification, it cannot be
    carried over from a file that is replaced.
    """
    key = hashlib.sha256(f"{packed.FORMAT} {packed.VERSION} {source.kind} {source.where} {image_size}".encode())
    for file in source.files:
        try:
            seen = file.stat()
        except OSError:
            key.update(f"\n{file} missing".encode(errors="surrogateescape"))
            continue
        stamp = f"\n{file} {seen.st_size} {seen.st_mtime_ns} {seen.st_ctime_ns}"
        key.update(stamp.encode(errors="surrogateescape"))
    return key.hexdigest()[:24]


def _sample(image_size: int) -> Path:
    from trainkit.data import sample

    return sample.folder(image_size)
