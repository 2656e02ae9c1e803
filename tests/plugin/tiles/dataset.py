"""Read and verify sets of tiles: <class>/<tile>.npy, float32 (3, 8, 8) each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import toy

from trainkit.errors import UserError
from trainkit.interfaces import Dataset, DatasetInfo
from trainkit.paths import locate

SHAPE = (3, toy.SIDE, toy.SIDE)


def found(path):
    """List the tiles of a set and their classes."""
    files = sorted(Path(path).glob("*/*.npy"))
    if not files:
        raise UserError(str(path), "holds no tiles", "<class>/<tile>.npy")
    return files, [file.parent.name for file in files]


@dataclass(kw_only=True)
class Tiles:
    train: str
    test: str

    def open(self, seed):
        train, test = (
            TileSplit(name, locate(path), seed) for name, path in (("train", self.train), ("val", self.test))
        )
        return Dataset(DatasetInfo(len(train.names), SHAPE, train.digest, tuple(train.names)), train, {"val": test})

    def missing(self):
        return []


class TileSplit(toy.ToySplit):
    def __init__(self, name, path, seed):
        files, classes = found(path)
        self.names = sorted(set(classes))
        self.name, self.size, self.seed, self.digest = name, len(files), seed, f"tiles-{len(files)}"
        self.labels = np.array([self.names.index(label) for label in classes])
        self.images = np.stack([np.load(file) for file in files])
        self.ids, self.views, self.flip, self.lost, self.damaged = np.arange(self.size), 1, False, False, None


def holds(path):
    return any(Path(path).glob("*/*.npy"))


def verify(path, *, against, on_progress):
    files, _ = found(path)
    wrong = [f"{file}: {shape}" for file in files if (shape := np.load(file).shape) != SHAPE]
    on_progress(len(files), len(files))
    return wrong
