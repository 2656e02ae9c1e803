"""Scenes as the loop sees them: crops to train on, whole images to be evaluated."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from trainkit.data import augment, leakage
from trainkit.data.leakage import Held
from trainkit.data.scenes import boundary_distance
from trainkit.data.scenes.augment import Cuts, SceneAugment, cut_map, cut_picture
from trainkit.data.scenes.boundary_distance import Distances
from trainkit.data.scenes.label_maps import Colour
from trainkit.data.scenes.mask_store import PackedMasks
from trainkit.data.split import EvalSplit, TrainSplit, spread
from trainkit.data.storage.image_store import Packed
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Scenes as ScenesProtocol
from trainkit.interfaces import IGNORED, Batch
from trainkit.tensors import torch


@dataclass(frozen=True, eq=False)
class SceneSet:
    """Images, masks and, where asked for, distances to boundaries, row by row."""

    pictures: Packed
    masks: PackedMasks
    """Of the images' size, or of that of their files where they are evaluated at it."""
    rows: np.ndarray
    """int64 (size,), which rows of these."""
    ids: tuple[str, ...]
    """Name of each row in its source."""
    names: tuple[str, ...]
    """Name of each class, in the order of their numbers."""
    colours: tuple[Colour, ...] = ()
    """Red, green and blue of each class; empty where the data has none."""
    distances: Distances | None = None

    @property
    def size(self) -> int:
        """Number of images."""
        return len(self.rows)

    @functools.cached_property
    def shapes(self) -> np.ndarray:
        """Height and width of each image as it is packed, int64 (size, 2)."""
        if self.pictures.size is None:
            return self.mask_shapes  # both are as in their files
        return np.tile(np.asarray(self.pictures.size, np.int64), (self.size, 1))

    @functools.cached_property
    def mask_shapes(self) -> np.ndarray:
        """Height and width of each mask, int64 (size, 2)."""
        return np.asarray(self.masks.shapes, np.int64)[self.rows]

    def pixels(self, place: int) -> np.ndarray:
        """Return an image, uint8 (3, height, width), in the memory order in which it is at hand.

        Raises UserError where it was damaged.
        """
        row = int(self.rows[place])
        if self.pictures.store == "decoded":
            found = self.pictures.fetch(np.asarray([row]))[0]
        else:
            found = self.pictures.picture(row).transpose(2, 0, 1)
        if found.shape[1:] != tuple(self.shapes[place]):
            shape = "{} x {} pixels".format(*found.shape[1:])
            raise UserError(self.pictures.where(row), shape, "{} x {}, as it was packed".format(*self.shapes[place]))
        return found

    def mask(self, place: int) -> np.ndarray:
        """Return classes of its pixels, uint8 (height, width), not to be written to."""
        return self.masks.mask(int(self.rows[place]))

    def some(self, most: int) -> SceneSet:
        """Return at most so many of the images, spread evenly over the set: the same ones in every run."""
        chosen = spread(self.size, most)
        return replace(self, rows=self.rows[chosen], ids=tuple(self.ids[place] for place in chosen.tolist()))


@dataclass(frozen=True, eq=False)
class _OfScenes:
    """Members that crops and whole images have of their set."""

    name: str
    scenes: SceneSet
    base: np.ndarray
    """float64, factor on the size of each image of the whole set, beside the one that is drawn or asked for."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def size(self) -> int:
        """Number of images."""
        return self.scenes.size

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of images, masks, names and rows. What batches have beside these is no part of it."""
        return self._hashed(self.scenes.pictures.digest, self.scenes.masks.digest)

    @functools.cached_property
    def content(self) -> str | None:
        """SHA-256 of the images' files, masks, names and rows, whatever their size here; None where it is not known."""
        pictures, masks = self.scenes.pictures.originals, self.scenes.masks.originals
        return None if pictures is None or masks is None else self._hashed(pictures, masks)

    def _hashed(self, *digests: str) -> str:
        text = "\n".join((*digests, *self.scenes.names))
        return hashlib.sha256(text.encode(errors="surrogateescape") + b"\n" + self.scenes.rows.tobytes()).hexdigest()

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """Pixels of each class in the whole images, int64 (classes,)."""
        return self.scenes.masks.counts[self.scenes.rows].sum(0)[:-1]

    def held(self) -> Held:
        """Return what it is compared with other sets by: its images."""
        return leakage.held_in(self.scenes.pictures, self.scenes.rows)


@dataclass(frozen=True, eq=False)
class SceneCrops(_OfScenes, TrainSplit):
    """Crops to train on, one of each image in an epoch. What is cut is a function of seed, epoch and row.

    Keys: image, uint8 (B, 3, *crop), float32 after `on_device`; mask, uint8 (B, *crop); index, view; before `on_device`
    the numbers of the distortion, `augment`. Where the set has distance maps also distance, float32 (B, *crop), in
    pixels of the crop; its cap is one of the image's pixels, and scaled like the rest.
    """

    seed: int
    crop: tuple[int, int]
    augment: SceneAugment

    @functools.cached_property
    def views(self) -> int:
        """1 where every crop is its whole image, unchanged; else 0: they cannot be numbered."""
        block = self.augment
        still = block.scales == (1.0, 1.0) and (self.base == 1).all() and not block.flip and block.distort is None
        return 1 if still and (self.scenes.shapes == self.crop).all() else 0

    def cuts(self, rows: np.ndarray, epoch: int) -> Cuts:
        """Draw the cuts of `rows` in an epoch."""
        shapes, base = self.scenes.shapes[rows], self.base[rows]
        return self.augment.cuts(self.seed, epoch, rows, shapes, base, self.crop)

    def fetch(self, indices: np.ndarray, epoch: int, view: int | None = None) -> Batch:
        """Read crops of the images at `indices`, of their masks and where asked for of their distance maps.

        Raises UserError where a row was damaged.
        """
        indices = np.array(indices, dtype=np.int64)
        cuts, count = self.cuts(indices, epoch), len(indices)
        image = torch.empty((count, 3, *self.crop), dtype=torch.uint8)
        mask = np.empty((count, *self.crop), np.uint8)
        maps = self.scenes.distances
        distance = None if maps is None else np.empty((count, *self.crop), np.float32)
        for i, place in enumerate(indices.tolist()):
            cut_picture(self.scenes.pixels(place), cuts, i, image[i], self._fill)
            cut_map(self.scenes.mask(place), cuts, i, mask[i], IGNORED)
            if maps is not None and distance is not None:
                _cut_distance(maps, int(self.scenes.rows[place]), cuts, i, distance[i])
        batch = {
            "image": image,
            "mask": torch.from_numpy(mask),
            "index": torch.from_numpy(indices),
            "view": torch.zeros(count, dtype=torch.int64),
        }
        if distance is not None:
            batch["distance"] = torch.from_numpy(distance)
        if (colours := self.augment.colours) is not None:
            batch["augment"] = torch.from_numpy(colours.numbers(self.seed, epoch, indices, self.crop, None))
        return batch

    def on_device(self, batch: Batch) -> Batch:
        """Apply the photometric distortion, then (pixels / 255 - mean) / std."""
        image = batch["image"]
        if "augment" in batch and (colours := self.augment.colours) is not None:
            image = colours.apply(image, batch["augment"], self.mean)
        done = {key: value for key, value in batch.items() if key != "augment"}
        return done | {"image": augment.normalise(image, self.mean, self.std)}

    @functools.cached_property
    def _fill(self) -> torch.Tensor:
        return torch.tensor([round(255 * one) for one in self.mean], dtype=torch.uint8)


def _cut_distance(maps: Distances, row: int, cuts: Cuts, i: int, out: np.ndarray) -> None:
    # Cut as bytes, which are a quarter of the memory, and only then made pixels of the crop.
    levels = np.empty(out.shape, np.uint8)
    cut_map(maps.levels(row), cuts, i, levels, round(maps.cap / boundary_distance.STEP))
    np.multiply(levels, np.float32(boundary_distance.STEP * cuts.factor[i]), out=out)


@dataclass(frozen=True, eq=False)
class WholeScenes(_OfScenes, EvalSplit):
    """Whole images to be evaluated, at the size of their masks: that in which they are packed, or that of their files.

    Keys: image, uint8 (B, 3, H, W), float32 after `on_device`; mask, uint8 (B, h, w), of the same size or of the
    file's; scales, float32 (B, S); mirrors, bool (B, 2), and window, int64 (B, 2), both for height and width; index,
    view; and, where images are wanted, overlay, bool (B,).
    """

    factors: tuple[float, ...] = (1.0,)
    """Factors on the size over which predictions are averaged."""
    mirrored: bool = False
    """True where predictions are averaged with those of the mirrored image."""
    window: tuple[int, int] = (0, 0)
    """Height and width of the windows that the scaled image is seen through; 0, 0: as a whole."""
    kind: Literal["scores", "overlays"] = "scores"

    @functools.cached_property
    def at_once(self) -> int | None:
        """One, where images or masks differ in size; None: any number."""
        return None if all((one == one[0]).all() for one in (self.scenes.shapes, self.scenes.mask_shapes)) else 1

    @functools.cached_property
    def protocol(self) -> ScenesProtocol:
        """Names of images and classes."""
        return ScenesProtocol(self.scenes.ids, self.scenes.names, self.kind, self.scenes.colours)

    def some(self, most: int) -> WholeScenes:
        """Return at most so many of the images, spread evenly over the set."""
        return replace(self, scenes=self.scenes.some(most))

    def picture(self, row: int) -> np.ndarray:
        """Return pixels of an image, uint8 (height, width, 3). Raises UserError where it was damaged."""
        return np.ascontiguousarray(self.scenes.pixels(row).transpose(1, 2, 0))

    def fetch(self, indices: np.ndarray, epoch: int, view: int | None = None) -> Batch:
        """Read the images at `indices`, which are of one size, and how each is to be seen.

        Raises UserError where one was damaged.
        """
        indices = np.array(indices, dtype=np.int64)
        shapes, mask_shapes, count = self.scenes.shapes[indices], self.scenes.mask_shapes[indices], len(indices)
        image = torch.empty((count, 3, *shapes[0].tolist()), dtype=torch.uint8)
        mask = torch.empty((count, *mask_shapes[0].tolist()), dtype=torch.uint8)
        for i, place in enumerate(indices.tolist()):
            image[i].numpy()[:] = self.scenes.pixels(place)
            mask[i].numpy()[:] = self.scenes.mask(place)
        base = self.base[self.scenes.rows[indices]]
        batch = {
            "image": image,
            "mask": mask,
            "scales": torch.from_numpy(np.multiply.outer(base, self.factors).astype(np.float32)),
            "mirrors": torch.tensor([[False, self.mirrored]]).repeat(count, 1),
            "window": torch.tensor([self.window], dtype=torch.int64).repeat(count, 1),
            "index": torch.from_numpy(indices),
            "view": torch.zeros(count, dtype=torch.int64),
        }
        return batch | ({"overlay": torch.ones(count, dtype=torch.bool)} if self.kind == "overlays" else {})

    def on_device(self, batch: Batch) -> Batch:
        """Normalise: (pixels / 255 - mean) / std."""
        return {**batch, "image": augment.normalise(batch["image"], self.mean, self.std)}
