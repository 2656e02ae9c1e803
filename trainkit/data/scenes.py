"""Pictures with a class for every pixel: crops to train on, whole pictures to be scored."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from trainkit import seeding
from trainkit.data import (
    augment,
    distances,
    packed_masks,
    packing,
    pictures,
    scene_import,
    scene_labels,
    scene_sources,
    sources,
)
from trainkit.data.distances import Distance, Distances
from trainkit.data.packed import Packed
from trainkit.data.packed_masks import PackedMasks
from trainkit.data.protocols import Scenes as ScenesProtocol
from trainkit.data.scene_augment import Cuts, SceneAugment, cut_map, cut_picture
from trainkit.data.scene_import import Looked
from trainkit.data.scene_labels import Labels
from trainkit.data.scene_sources import SceneSource
from trainkit.errors import UserError, few
from trainkit.task import IGNORED, Batch, Meta, Opened

LEAST = 16
"""Pixels of the shorter side below which nothing of a picture is left to tell."""

CROP_LIMIT = 1 << 26
"""Most pixels of a crop; 8,192 along each side."""

SCALE_LIMIT = 16.0
"""Largest factor on the size of a picture that is scored."""

Colour = tuple[int, int, int]


@dataclass(kw_only=True)
class Scenes:
    """Pictures and their masks. Every set NAME that is scored offers the splits NAME (at one scale), NAME.flip (and
    mirrored), NAME.crop (through windows), NAME.msf (at several scales, and mirrored), NAME.mscf (so, through windows),
    NAME.few and NAME.overlays (pictures of predictions), and so does `train`."""

    train: str
    """A list of pictures and masks (`.txt`, `.csv`: `image,label` a line), folders as CamVid, Cityscapes, ADE20K,
    Pascal VOC and COCO-Stuff have them (`cityscapes#train`), folders of pictures and masks side by side, a table or
    `hf://owner/name#split` with columns of both, or the built-in `sample:scenes`."""
    evaluate: dict[str, str] = field(default_factory=dict)
    """Name of a set that is scored to its place, as `train`."""
    root: str | None = None
    """Folder from which the paths in a list start; None: the one that the list is in."""
    names: list[str] | None = None
    """Names of the classes, where mask files hold 0, 1, ...; None: what the layout says."""
    palette: dict[str, Colour] | None = None
    """Names of the classes and their colours, where mask files are coloured: `road: [128, 64, 128]`."""
    ignore: list[int | Colour] = field(default_factory=list)
    """Numbers, or with `palette` colours, in mask files that stand for no class, 255 beside them."""
    size: tuple[int, int] | None = None
    """Height and width to which pictures and masks are brought, once, when they are packed; None: as in their files."""
    store: Literal["auto", "decoded", "encoded"] = "auto"
    """How pictures are kept when they are packed: as pixels, for which all must be of one size, or encoded, with which
    a crop of a 1024 x 2048 PNG takes 0.1 s in place of 0.02. `auto`: as pixels, where those take less than 2 GB."""
    short_side: int | None = None
    """Shorter side at which each picture is seen, a factor beside those of `augment.scales` and `eval_scales`; None:
    as packed. Predictions are scored at the packed size in any case."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Taken from pixels 0 .. 1, for red, green and blue; as given, ImageNet's."""
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """What the difference is divided by."""
    crop: tuple[int, int]
    """Height and width of what is trained on. Where the scaled picture is smaller, `mean` is around it, unlabelled."""
    augment: SceneAugment = field(default_factory=SceneAugment)
    distance: Distance | None = None
    """Distances to boundaries between classes, for losses and points that ask for them; None: batches have none."""
    eval_scales: list[float] = field(default_factory=lambda: [0.5, 0.75, 1.0, 1.25, 1.5, 1.75])
    """Factors on the size of a picture over which NAME.msf and NAME.mscf average."""
    eval_crop: tuple[int, int] | None = None
    """Height and width of the windows of NAME.crop and NAME.mscf; None: `crop`."""
    few: int = 6
    """Pictures of NAME.few and NAME.overlays, spread evenly over the set."""
    leakage: Literal["refuse", "allow"] = "refuse"
    """What a picture that is both trained on and scored does: end the run, or warn."""
    name: Literal["scenes"] = "scenes"

    def __post_init__(self) -> None:
        for name, most in (("size", pictures.PIXEL_CAP), ("crop", CROP_LIMIT), ("eval_crop", CROP_LIMIT)):
            sides = getattr(self, name)
            if sides is not None and (min(sides) < 1 or sides[0] * sides[1] > most):
                raise ValueError(
                    f"{name} is {list(sides)}; a height and a width from 1 are needed, {most} pixels at most"
                )
        if self.short_side is not None and not LEAST <= self.short_side <= 1 << 14:
            raise ValueError(f"short_side is {self.short_side}; {LEAST} to {1 << 14} pixels are needed")
        if min(self.std) <= 0 or not all(0 <= one <= 1 for one in self.mean):
            raise ValueError(
                f"mean is {list(self.mean)} and std {list(self.std)}; means of pixels 0 to 1 are needed, std above 0"
            )
        if not self.eval_scales or not all(0.01 <= scale <= SCALE_LIMIT for scale in self.eval_scales):
            raise ValueError(f"eval_scales are {self.eval_scales}; factors from 0.01 to {SCALE_LIMIT:g} are needed")
        if self.few < 1:
            raise ValueError("few must be 1 or more")
        if self.names is not None and self.palette is not None:
            raise ValueError("names are those of numbers in mask files, and palette has names of its own; give one")
        if self.ignore and self.names is None and self.palette is None:
            raise ValueError("ignore goes with names or palette; what a layout leaves out, it says itself")
        if strange := [one for one in self.ignore if isinstance(one, int) == (self.palette is not None)]:
            kind = "colours, as palette has" if self.palette is not None else "numbers, as names have"
            raise ValueError(f"ignore has {strange[0]}; {kind}, are needed")
        self.labels(None)
        sources.check_names(self.evaluate)

    def labels(self, known: Labels | None) -> Labels | None:
        """What the values or colours of mask files stand for: as the block says, else as is `known` of a layout.

        Names that the layout knows keep the colours it gives them. Raises ValueError where there are too few or too
        many, or two are alike.
        """
        if self.palette is not None:
            return scene_labels.from_palette(self.palette, self.ignore)
        if self.names is None:
            return known
        own = dict(zip(known.names, known.colours, strict=False)) if known is not None else {}
        colours = [own[name] for name in self.names] if own and set(self.names) <= set(own) else ()
        return scene_labels.numbered(self.names, self.ignore, colours)

    @property
    def window(self) -> tuple[int, int]:
        """Height and width of the windows of NAME.crop and NAME.mscf."""
        return self.eval_crop or self.crop

    def open(self, seed: int) -> Opened:
        """Find, check and where needed pack the files.

        Raises UserError naming file and place: what `scene_sources` and `packed_masks` refuse, classes that differ, a
        crop or scales that fit no picture, pictures that are in two splits.
        """
        # All are found before the first is packed: a misspelt path should not show after half an hour.
        found = {"train": self._found("train", self.train)}
        found |= {name: self._found(name, place) for name, place in self.evaluate.items()}
        labels = self._agreed(found)
        packed = {name: self._packed(name, source, labels[name]) for name, source in found.items()}
        whole = packed["train"]
        check_crop("data.crop", whole.shapes, self.crop, self.base(whole.shapes), self.augment.scales[1])
        for name, one in packed.items():
            where, low = _key(name), self.augment.scales[0] if name == "train" else 1.0
            check_scale(where, one.ids, one.shapes, self.base(one.shapes), low)
            if not one.counts[:-1].sum():
                raise UserError(f"{where} ({found[name].where})", "no pixel with a class", "some labelled pixels")
        train = SceneCrops(
            "train", whole, seed, self.crop, self.augment, self.base(whole.shapes), self.mean, self.std, self.distance
        )
        looked = {name: scene_import.of_packed(_key(name), one.masks, one.pictures) for name, one in packed.items()}
        self._check_leaks(looked)
        evaluations: dict[str, WholeScenes] = {}
        for name, one in packed.items():
            evaluations |= self._kinds(name, one)
        meta = Meta(
            len(whole.names),
            (3, *self.crop),
            whole.digest,
            whole.names,
            class_colours=whole.colours,
            distances=self.distance is not None,
        )
        notes = (*self._left_out(found), *self._padding(train), *self._notes(looked))
        return Opened(meta, train, evaluations, notes)

    def missing(self) -> list[str]:
        """Sentences about files that are not there yet."""
        places = {"train": self.train} | self.evaluate
        found = {_key(name): scene_sources.missing(text, self.root) for name, text in places.items()}
        return [f"{key}: {sentence}" for key, sentence in found.items() if sentence]

    def base(self, shapes: np.ndarray) -> np.ndarray:
        """The factor on the size of pictures of `shapes` (n, 2) that `short_side` makes, float64 (n,)."""
        if self.short_side is None:
            return np.ones(len(shapes))
        return self.short_side / shapes.min(1)

    def _found(self, name: str, text: str) -> SceneSource:
        return scene_sources.open_scenes(text, "train" if name == "train" else "val", self.root)

    def _agreed(self, found: Mapping[str, SceneSource]) -> dict[str, Labels]:
        """How the masks of each set are read; all have the classes of the training set, in its order."""
        first = self.labels(found["train"].labels)
        if first is None:
            where, remedy = f"data.train ({found['train'].where})", "name them in data.names, or data.palette"
            raise UserError(where, "nothing says what the values in its masks stand for", "names of classes", remedy)
        agreed = {"train": first}
        for name, source in found.items():
            agreed[name] = one = self.labels(source.labels) or first
            if one.names != first.names:
                where = f"{_key(name)} ({source.where})"
                expected = f"{len(first.names)} of data.train: {few(first.names, 20)}"
                raise UserError(where, f"{len(one.names)} classes: {few(one.names, 20)}", expected)
        return agreed

    def _packed(self, name: str, source: SceneSource, labels: Labels) -> SceneSet:
        # Masks first: they are quick to pack, and most mistakes are in them.
        masks = packed_masks.pack_masks_once(source, labels, self.size)
        size = self.size
        if size is None and (masks.shapes == masks.shapes[0]).all():
            size = tuple(masks.shapes[0].tolist())
        if size is None and self.store == "decoded":
            found = f"decoded, and pictures of {len(np.unique(masks.shapes, axis=0))} sizes in {source.where}"
            raise UserError("data.store", found, "one size", "give data.size, or leave them encoded")
        fit = "no" if self.size is None else "stretch"
        images = packing.pack_once(source.pictures(), size, fit, store=self.store)
        if len(masks) != len(images):
            raise UserError(source.where, f"{len(images)} pictures and {len(masks)} masks", "one for each")
        ids, rows = tuple(source.ids()), np.arange(len(masks))
        # What is scored needs none.
        wanted = self.distance is not None and name == "train"
        maps = distances.distances_once(masks, self.distance) if wanted else None
        return SceneSet(images, masks, rows, ids, labels.names, labels.colours, maps)

    def _check_leaks(self, looked: Mapping[str, Looked]) -> None:
        pairs = ((_key(name), scene_import.shared(seen, looked["train"])) for name, seen in looked.items())
        found = [(key, leak) for key, leak in pairs if key != scene_import.TRAIN and leak]
        remedy = "take them out of one of the sets, or go on with `leakage: allow`"
        sources.report_leaks(found, self.leakage, "each picture in one split", remedy)

    def _kinds(self, name: str, whole: SceneSet) -> dict[str, WholeScenes]:
        """The splits by which a set is scored, by the words that evaluations name them by."""
        several, window = tuple(self.eval_scales), self.window
        plain = WholeScenes(name, whole, self.base(whole.shapes), self.mean, self.std)
        few = plain.some(self.few)
        made = {
            "": plain,
            ".flip": replace(plain, mirrored=True),
            ".crop": replace(plain, window=window),
            ".msf": replace(plain, factors=several, mirrored=True),
            ".mscf": replace(plain, factors=several, mirrored=True, window=window),
            ".few": few,
            ".overlays": replace(few, kind="overlays"),
        }
        return {name + end: replace(split, name=name + end) for end, split in made.items()}

    def _left_out(self, found: Mapping[str, SceneSource]) -> Iterator[str]:
        for name, source in found.items():
            if source.left_out:
                yield f"{_key(name)}: {len(source.left_out)} left out: {few(source.left_out)}"

    def _padding(self, train: SceneCrops) -> Iterator[str]:
        cuts = train.cuts(np.arange(train.size), 0)
        covered = cuts.size.prod(1) / np.prod(self.crop)
        if (padded := int((covered < 1).sum())) > 0:
            yield (
                f"{padded} of {train.size} crops of the first epoch are larger than their scaled picture; "
                f"{1 - covered.mean():.1%} of what is trained on is padding"
            )

    def _notes(self, looked: Mapping[str, Looked]) -> Iterator[str]:
        """What is odd but can be used, in sentences."""
        for name, seen in looked.items():
            share = seen.counts[:, -1].sum() / seen.counts.sum()
            if 0 < share < scene_import.MUCH:
                yield f"{_key(name)}: {share:.1%} of the pixels have no class"
            yield from (f"{_key(name)}: {text}" for text in scene_import.oddities(seen))
            if name != "train":
                yield from odd_scales(_key(name), seen.ids, seen.shapes, self.base(seen.shapes), self.eval_scales)


@dataclass(frozen=True, eq=False)
class SceneSet:
    """Pictures, masks and, where asked for, distances to boundaries, row by row."""

    pictures: Packed
    masks: PackedMasks
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
        """Number of pictures."""
        return len(self.rows)

    @functools.cached_property
    def shapes(self) -> np.ndarray:
        """Height and width of each picture, int64 (size, 2)."""
        return np.asarray(self.masks.shapes, np.int64)[self.rows]

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """Pixels of each class, and last of those that have none, int64 (classes + 1,)."""
        return np.asarray(self.masks.counts)[self.rows].sum(0)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of pictures, masks, names and rows. What batches have beside these is no part of it."""
        text = "\n".join((self.pictures.digest, self.masks.digest, *self.names))
        return hashlib.sha256(text.encode(errors="surrogateescape") + b"\n" + self.rows.tobytes()).hexdigest()

    def pixels(self, place: int) -> np.ndarray:
        """A picture, uint8 (3, height, width), in the memory order in which it is at hand.

        Raises UserError where it was damaged.
        """
        row = int(self.rows[place])
        if self.pictures.store == "decoded":
            found = self.pictures.fetch(np.asarray([row]))[0]
        else:
            found = self.pictures.picture(row).transpose(2, 0, 1)
        if found.shape[1:] != tuple(self.shapes[place]):
            shape = "{} x {} pixels".format(*found.shape[1:])
            raise UserError(self.pictures.where(row), shape, "{} x {}, as its mask".format(*self.shapes[place]))
        return found

    def mask(self, place: int) -> np.ndarray:
        """Classes of its pixels, uint8 (height, width), not to be written to."""
        return self.masks.mask(int(self.rows[place]))

    def some(self, most: int) -> SceneSet:
        """At most so many of the pictures, spread evenly over the set: the same ones in every run."""
        if self.size <= most:
            return self
        chosen = [(2 * k + 1) * self.size // (2 * most) for k in range(most)]
        return replace(self, rows=self.rows[chosen], ids=tuple(self.ids[place] for place in chosen))


@dataclass(frozen=True, eq=False)
class SceneCrops:
    """Crops to train on, one of each picture in an epoch. What is cut is a function of seed, epoch and row.

    Keys: image, uint8 (B, 3, *crop), float32 after `on_device`; mask, uint8 (B, *crop); index, view; before `on_device`
    the numbers of the distortion, `augment`. Where `distance` is set also distance, float32 (B, *crop), in pixels of
    the crop; its cap is one of the picture's pixels, and scaled like the rest.
    """

    name: str
    scenes: SceneSet
    seed: int
    crop: tuple[int, int]
    augment: SceneAugment
    base: np.ndarray
    """float64 (size,), factor on the size of each picture beside the one that is drawn."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    distance: Distance | None = None

    @property
    def at_once(self) -> None:
        """Crops are read in batches of any size."""
        return None

    @property
    def protocol(self) -> None:
        """None: crops are trained on."""
        return None

    @property
    def size(self) -> int:
        """Number of pictures."""
        return self.scenes.size

    @property
    def digest(self) -> str:
        """SHA-256 of pictures, masks and names."""
        return self.scenes.digest

    @property
    def counts(self) -> np.ndarray:
        """Pixels of each class in the whole pictures, int64 (classes,)."""
        return self.scenes.counts[:-1]

    @functools.cached_property
    def views(self) -> int:
        """1 where every crop is its whole picture, unchanged; else 0: they cannot be numbered."""
        block = self.augment
        still = block.scales == (1.0, 1.0) and (self.base == 1).all() and not block.flip and block.distort is None
        return 1 if still and (self.scenes.shapes == self.crop).all() else 0

    def order(self, epoch: int, batch_size: int) -> np.ndarray:
        """Rows of one epoch, shuffled, int64 (updates, batch_size); what fills no batch is left for other epochs.

        Raises UserError when a batch takes more than there are.
        """
        if not 1 <= batch_size <= self.size:
            raise UserError("batch_size", str(batch_size), f"1 to {self.size}, the number of pictures in {self.name}")
        updates = self.size // batch_size
        rows = seeding.permutation(self.seed, epoch, self.size)[: updates * batch_size]
        return rows.astype(np.int64).reshape(updates, batch_size)

    def cuts(self, rows: np.ndarray, epoch: int) -> Cuts:
        """What is cut of each of `rows` in an epoch."""
        shapes, base = self.scenes.shapes[rows], self.base[rows]
        return self.augment.cuts(self.seed, epoch, rows, shapes, base, self.crop)

    def fetch(self, indices: np.ndarray, epoch: int, view: int | None = None) -> Batch:
        """Crops of the pictures at `indices`, of their masks and where asked for of their distance maps.

        Raises UserError where a row was damaged.
        """
        indices = np.array(indices, dtype=np.int64)
        cuts, count = self.cuts(indices, epoch), len(indices)
        image = torch.empty((count, 3, *self.crop), dtype=torch.uint8)
        mask = np.empty((count, *self.crop), np.uint8)
        distance = None if self.distance is None else np.empty((count, *self.crop), np.float32)
        for i, place in enumerate(indices.tolist()):
            cut_picture(self.scenes.pixels(place), cuts, i, image[i], self._fill)
            cut_map(self.scenes.mask(place), cuts, i, mask[i], IGNORED)
            if distance is not None:
                self._cut_distance(place, cuts, i, distance[i])
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
        """Photometric distortion, then (pixels / 255 - mean) / std."""
        image = batch["image"]
        if "augment" in batch:
            image = self.augment.colours.apply(image, batch["augment"], self.mean)
        done = {key: value for key, value in batch.items() if key != "augment"}
        return done | {"image": augment.normalise(image, self.mean, self.std)}

    def _cut_distance(self, place: int, cuts: Cuts, i: int, out: np.ndarray) -> None:
        # Cut as bytes, which are a quarter of the memory, and only then made pixels of the crop.
        levels = np.empty(self.crop, np.uint8)
        cap = round(self.distance.cap / distances.STEP)
        cut_map(self.scenes.distances.levels(int(self.scenes.rows[place])), cuts, i, levels, cap)
        np.multiply(levels, np.float32(distances.STEP * cuts.factor[i]), out=out)

    @functools.cached_property
    def _fill(self) -> torch.Tensor:
        return torch.tensor([round(255 * one) for one in self.mean], dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class WholeScenes:
    """Whole pictures to be scored, at the size in which they are packed.

    Keys: image, uint8 (B, 3, H, W), float32 after `on_device`; mask, uint8 (B, H, W); scales, float32 (B, S); mirrors,
    bool (B, 2), and window, int64 (B, 2), both for height and width; index, view; and, where pictures are wanted,
    overlay, bool (B,).
    """

    name: str
    scenes: SceneSet
    base: np.ndarray
    """float64, factor on the size of each picture beside `factors`, by row of the whole set."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    factors: tuple[float, ...] = (1.0,)
    """Factors on the size over which predictions are averaged."""
    mirrored: bool = False
    """Whether predictions are averaged with those of the picture mirrored left to right."""
    window: tuple[int, int] = (0, 0)
    """Height and width of the windows that the scaled picture is seen through; 0, 0: as a whole."""
    kind: Literal["scores", "overlays"] = "scores"

    @functools.cached_property
    def at_once(self) -> int | None:
        """One, where pictures differ in size; None: any number."""
        return None if (self.scenes.shapes == self.scenes.shapes[0]).all() else 1

    @property
    def views(self) -> int:
        """One: nothing is augmented."""
        return 1

    @property
    def size(self) -> int:
        """Number of pictures."""
        return self.scenes.size

    @property
    def digest(self) -> str:
        """SHA-256 of pictures, masks and names."""
        return self.scenes.digest

    @property
    def counts(self) -> np.ndarray:
        """Pixels of each class, int64 (classes,)."""
        return self.scenes.counts[:-1]

    @functools.cached_property
    def protocol(self) -> ScenesProtocol:
        """What pictures and classes are called."""
        return ScenesProtocol(self.scenes.ids, self.scenes.names, self.kind, self.scenes.colours)

    def some(self, most: int) -> WholeScenes:
        """At most so many of the pictures, spread evenly over the set."""
        return replace(self, scenes=self.scenes.some(most))

    def picture(self, row: int) -> np.ndarray:
        """Pixels of a picture, uint8 (height, width, 3). Raises UserError where it was damaged."""
        return np.ascontiguousarray(self.scenes.pixels(row).transpose(1, 2, 0))

    def order(self, epoch: int, batch_size: int) -> np.ndarray:
        """What is scored is not trained on: raises ValueError."""
        raise ValueError(f"{self.name} is a split to be scored")

    def fetch(self, indices: np.ndarray, epoch: int, view: int | None = None) -> Batch:
        """The pictures at `indices`, which are of one size, and how each is to be seen.

        Raises UserError where one was damaged, ValueError where sizes differ.
        """
        indices = np.array(indices, dtype=np.int64)
        shapes, count = self.scenes.shapes[indices], len(indices)
        if (shapes != shapes[0]).any():
            raise ValueError(f"{self.name}: pictures of several sizes at once; they are read one by one")
        image = torch.empty((count, 3, *shapes[0].tolist()), dtype=torch.uint8)
        mask = torch.empty((count, *shapes[0].tolist()), dtype=torch.uint8)
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
        """(pixels / 255 - mean) / std."""
        return {**batch, "image": augment.normalise(batch["image"], self.mean, self.std)}


def check_crop(where: str, shapes: np.ndarray, crop: Sequence[int], base: np.ndarray, largest: float) -> None:
    """Raise UserError where a crop is larger than every picture of `shapes` (n, 2), scaled by `base` (n,) and by the
    `largest` scale: all crops would be padded, always."""
    scaled = np.rint(shapes * (base * largest)[:, None]).astype(np.int64)
    for axis, word in enumerate(("high", "wide")):
        if (scaled[:, axis] < crop[axis]).all():
            most = int(scaled[:, axis].max())
            found = f"{crop[axis]} pixels {word}, more than each of {len(shapes)} pictures at their largest scale"
            remedy = "lower data.crop, or raise data.augment.scales or data.short_side"
            raise UserError(where, found, f"at most {most}, at scale {largest:g}", remedy)


def check_scale(where: str, ids: Sequence[str], shapes: np.ndarray, base: np.ndarray, smallest: float) -> None:
    """Raise UserError where pictures of `shapes` (n, 2), scaled by `base` (n,) and by the `smallest` scale, have a
    shorter side of less than `LEAST` pixels."""
    sides = shapes.min(1) * base * smallest
    if len(small := np.flatnonzero(sides < LEAST)):
        listed = few(f"{ids[row]} ({shapes[row][0]} x {shapes[row][1]})" for row in small.tolist())
        found = f"{len(small)} of {len(shapes)} pictures less than {LEAST} pixels short at scale {smallest:g}: {listed}"
        raise UserError(where, found, f"{LEAST} or more", "raise the smallest scale, or leave them out")


def odd_scales(
    key: str, ids: Sequence[str], shapes: np.ndarray, base: np.ndarray, factors: Sequence[float]
) -> Iterator[str]:
    """Sentences about `factors`, over which the set of this key is averaged as `NAME.msf`, that leave nothing of
    pictures of `shapes` (n, 2), or make them larger than any crop may be. Only evaluations that are asked for matter.
    """
    where = f"{key}.msf (data.eval_scales)"
    try:
        check_scale(where, ids, shapes, base, min(1.0, *factors))
    except UserError as error:
        yield str(error)
    pixels = shapes.prod(1) * (base * max(factors)) ** 2
    if large := int((pixels > CROP_LIMIT).sum()):
        yield f"{where}: {large} of {len(ids)} pictures have more than {CROP_LIMIT} pixels at scale {max(factors):g}"


def _key(name: str) -> str:
    return scene_import.TRAIN if name == "train" else f"data.evaluate.{name}"
