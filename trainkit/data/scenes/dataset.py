"""Images with a class for every pixel: where they come from, how they are read, and what must fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from trainkit.config.ranges import Deviation, Fraction
from trainkit.data import import_images
from trainkit.data.formats import image_decode
from trainkit.data.scenes import boundary_distance, checks, label_maps, mask_store
from trainkit.data.scenes import sources as scene_sources
from trainkit.data.scenes.augment import SceneAugment
from trainkit.data.scenes.boundary_distance import Distance
from trainkit.data.scenes.label_maps import Colour, Labels
from trainkit.data.scenes.mask_store import PackedMasks
from trainkit.data.scenes.sources import SceneSource
from trainkit.data.scenes.splits import SceneCrops, SceneSet, WholeScenes
from trainkit.data.split import check_leaks, check_names, key, missing, warn_of_few
from trainkit.data.storage.image_store import Packed
from trainkit.errors import UserError, few
from trainkit.interfaces import Dataset, DatasetInfo

CROP_LIMIT = 1 << 26
"""Most pixels of a crop or of a scaled image; 8,192 along each side."""

LEAST = 16
"""Pixels of the shorter side below which nothing of an image is left to tell."""

SCALE_LIMIT = 16.0
"""Largest factor on the size of an image that is evaluated."""

SceneSide = Annotated[int, Field(ge=1, le=1 << 14)]
"""Side of an image or a crop, in pixels."""
EvalScale = Annotated[float, Field(ge=0.01, le=SCALE_LIMIT)]
"""Factor on the size of an image that is evaluated."""


@dataclass(kw_only=True)
class Scenes:
    """Images and their masks, for semantic segmentation. Every evaluation set NAME offers the splits NAME (one scale),
    NAME.flip (and mirrored), NAME.crop (sliding windows), NAME.msf (several scales, and mirrored), NAME.mscf (the same,
    with sliding windows), NAME.few and NAME.overlays (images of predictions), and so does `train`."""

    train: str
    """Training set: a list of images and masks (`.txt`, `.csv`), folders of images and masks, the layout of
    CamVid or Cityscapes, or `sample:scenes`."""
    evaluate: dict[str, str] = field(default_factory=dict)
    """Evaluation sets by name, in the forms of `train`."""
    root: str | None = None
    """Folder at which the paths in a list begin. null: the folder of the list."""
    names: list[str] | None = None
    """Names of the classes, where masks hold 0, 1, ... null: the names of the layout."""
    palette: dict[str, Colour] | None = None
    """Names of the classes and their colours, where masks are coloured: `road: [128, 64, 128]`. null: masks hold
    numbers, or the layout's colours."""
    ignore: list[Annotated[int, Field(ge=0, le=65535)] | Colour] = field(default_factory=list)
    """Numbers, or with `palette` colours, in masks that are not labelled, beside 255."""
    size: tuple[SceneSide, SceneSide] | None = None
    """Height and width to which images and masks are resized once, when they are packed. null: as in the files."""
    short_side: Annotated[int, Field(ge=LEAST, le=1 << 14)] | None = None
    """Shorter side to which each image is resized when it is read, before `augment.scales` and `eval_scales`. null: as
    packed."""
    score_at: Literal["prepared", "file"] = field(default="prepared", metadata={"hash": "set"})
    """Resolution of evaluation where `size` is given. `prepared`: the packed size. `file`: masks keep the size of their
    files, to which outputs are resized, so that networks with different input sizes can be compared."""
    mean: tuple[Fraction, Fraction, Fraction] = (0.485, 0.456, 0.406)
    """Mean per channel (red, green, blue) that is subtracted from pixels in 0 .. 1. Default: ImageNet's."""
    std: tuple[Deviation, Deviation, Deviation] = (0.229, 0.224, 0.225)
    """Standard deviation per channel by which pixels are divided after `mean` is subtracted. Default: ImageNet's."""
    crop: tuple[SceneSide, SceneSide]
    """Height and width of a training crop. A smaller scaled image is padded with `mean`, and the padding is not
    labelled."""
    augment: SceneAugment = field(default_factory=SceneAugment)
    """Augmentation of training crops."""
    distance: Distance | None = None
    """Distances to class boundaries, for losses and points that use them. null: none."""
    eval_scales: list[EvalScale] = field(default_factory=lambda: [0.5, 0.75, 1.0, 1.25, 1.5, 1.75])
    """Scale factors over which NAME.msf and NAME.mscf average."""
    eval_crop: tuple[SceneSide, SceneSide] | None = None
    """Height and width of the windows of NAME.crop and NAME.mscf. null: `crop`."""
    few: Annotated[int, Field(ge=1, le=1000)] = 6
    """Number of images in NAME.few and NAME.overlays, spread evenly over the set."""
    leakage: Literal["refuse", "allow"] = "refuse"
    """Action when an image is in both training and evaluation data. `refuse`: end the run. `allow`: warn."""
    name: Literal["scenes"] = "scenes"
    """Kind of data."""

    def __post_init__(self) -> None:
        for name, most in (("size", image_decode.PIXEL_CAP), ("crop", CROP_LIMIT), ("eval_crop", CROP_LIMIT)):
            sides = getattr(self, name)
            if sides is not None and sides[0] * sides[1] > most:
                raise ValueError(f"{name} is {list(sides)}; {most} pixels at most are allowed")
        if not self.eval_scales:
            raise ValueError("eval_scales is empty; give at least one factor, such as [1.0]")
        if self.names is not None and self.palette is not None:
            raise ValueError("names and palette are both set; keep one")
        if self.ignore and self.names is None and self.palette is None:
            raise ValueError("ignore needs names or palette; layouts define their own ignored values")
        if strange := [one for one in self.ignore if isinstance(one, int) == (self.palette is not None)]:
            kind = "colours, since palette is set" if self.palette is not None else "numbers, since names is set"
            raise ValueError(f"ignore has {strange[0]}; expected {kind}")
        self.labels(None)
        check_names(self.evaluate)

    def labels(self, known: Labels | None) -> Labels | None:
        """Return the classes of values or colours in mask files: as the block says, else as is `known` of a layout.

        Names that the layout knows keep the colours it gives them. Raises ValueError where there are too few or too
        many, or two are alike.
        """
        if self.palette is not None:
            return label_maps.from_palette(self.palette, [one for one in self.ignore if not isinstance(one, int)])
        if self.names is None:
            return known
        own = dict(zip(known.names, known.colours, strict=False)) if known is not None else {}
        colours = [own[name] for name in self.names] if own and set(self.names) <= set(own) else ()
        return label_maps.numbered(self.names, [one for one in self.ignore if isinstance(one, int)], colours)

    @property
    def window(self) -> tuple[int, int]:
        """Height and width of the windows of NAME.crop and NAME.mscf."""
        return self.eval_crop or self.crop

    def open(self, seed: int) -> Dataset:
        """Find, check and where needed pack the files.

        Raises UserError naming file and place: what `sources` and `mask_store` refuse, classes that differ, images that
        `short_side` makes too large, and images that are in two splits.
        """
        # All are found before the first is packed: a misspelt path should not show after half an hour.
        found: dict[str, tuple[SceneSource, Labels]] = {}
        for name, place in {"train": self.train, **self.evaluate}.items():
            source = scene_sources.open_scenes(place, "train" if name == "train" else "val", self.root)
            found[name] = source, self.agreed(key(name), source, found["train"][1] if found else None)
        packed = {name: self._packed(name, *one) for name, one in found.items()}
        for name, one in packed.items():
            self._check_size(key(name), one.ids, one.shapes)
        whole = packed["train"]
        train = SceneCrops("train", whole, self.base(whole.shapes), self.mean, self.std, seed, self.crop, self.augment)
        evaluations: dict[str, WholeScenes] = {}
        for name, one in packed.items():
            evaluations |= self._evaluations(name, self._scored(one, *found[name]))
        for name in self.evaluate:
            shown = (np.asarray(packed[name].masks.counts)[:, :-1] > 0).sum(0)
            warn_of_few(key(name), len(packed[name].ids), "images", dict(zip(whole.names, shown.tolist(), strict=True)))
        held = {name: evaluations[name].held() for name in self.evaluate}
        remedy = "remove them from one of the sets, or set `leakage: allow`"
        check_leaks(train.held(), held, self.leakage, "each image in one split", remedy)
        meta = DatasetInfo(
            len(whole.names),
            (3, *self.crop),
            train.digest,
            whole.names,
            class_colours=whole.colours,
            distances=self.distance is not None,
        )
        left_out = (f"{key(name)}: {text}" for name, (source, _) in found.items() for text in source.left_out)
        notes = (*left_out, *_padding(train), *self._notes(packed))
        return Dataset(meta, train, evaluations, notes)

    def missing(self) -> list[str]:
        """Return sentences about files that are not there yet."""
        return missing(self.train, self.evaluate, lambda text: scene_sources.missing(text, self.root))

    def base(self, shapes: np.ndarray) -> np.ndarray:
        """Return the factor on the size of images of `shapes` (n, 2) that `short_side` makes, float64 (n,)."""
        if self.short_side is None:
            return np.ones(len(shapes))
        return self.short_side / shapes.min(1)

    def _check_size(self, where: str, ids: Sequence[str], shapes: np.ndarray) -> None:
        """Raise UserError for images of `shapes` (n, 2), of the set of a key, that `short_side` makes too large."""
        if not len(large := np.flatnonzero(shapes.prod(1) * self.base(shapes) ** 2 > CROP_LIMIT)):
            return
        listed = few(f"{ids[row]} ({shapes[row][0]} x {shapes[row][1]})" for row in large.tolist())
        found = f"{len(large)} of {len(shapes)} images, of which data.short_side makes too many pixels: {listed}"
        raise UserError(where, found, f"{CROP_LIMIT:,} pixels or fewer", "lower data.short_side, or cut them")

    def agreed(self, where: str, source: SceneSource, first: Labels | None) -> Labels:
        """Return how the masks of the set of a key are read; `first` are the classes of the training set.

        Raises UserError where nothing names its classes, or they differ from the first.
        """
        place = f"{where} ({source.where})"
        labels = self.labels(source.labels) or first
        if labels is None:
            found = "the values in its masks have no class names"
            raise UserError(place, found, "names of classes", "set data.names or data.palette")
        if first is not None and labels.names != first.names:
            expected = f"{len(first.names)} of data.train: {few(first.names, 20)}"
            raise UserError(place, f"{len(labels.names)} classes: {few(labels.names, 20)}", expected)
        return labels

    def _packed(self, name: str, source: SceneSource, labels: Labels) -> SceneSet:
        masks, images = packed(source, labels, self.size)
        place, counts = f"{key(name)} ({source.where})", np.asarray(masks.counts)
        train, numbers = name == "train", not labels.coloured
        if error := checks.mistake(place, masks.names, masks.there, counts, train=train, numbers=numbers):
            raise error
        ids, rows = tuple(source.ids()), np.arange(len(masks))
        # What is evaluated needs none.
        wanted = self.distance if name == "train" else None
        maps = None if wanted is None else boundary_distance.distances_once(masks, wanted)
        return SceneSet(images, masks, rows, ids, labels.names, labels.colours, maps)

    def _scored(self, packed: SceneSet, source: SceneSource, labels: Labels) -> SceneSet:
        """Return a set with the masks that it is evaluated by."""
        if self.score_at == "prepared" or self.size is None:
            return packed
        return replace(packed, masks=mask_store.pack_masks_once(source, labels), distances=None)

    def _evaluations(self, name: str, whole: SceneSet) -> dict[str, WholeScenes]:
        """Return the splits by which a set is evaluated, by the words that evaluations name them by."""
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

    def _notes(self, packed: Mapping[str, SceneSet]) -> Iterator[str]:
        """Yield sentences about what is odd but can be used."""
        for name, one in packed.items():
            odd = checks.oddities(one.ids, one.masks, np.asarray(one.pictures.contents()))
            yield from (f"{key(name)}: {text}" for text in odd)


def packed(source: SceneSource, labels: Labels, size: tuple[int, int] | None) -> tuple[PackedMasks, Packed]:
    """Pack masks and images of a source once, both resized to `size` (height, width) where there is one.

    Raises UserError as packing either does.
    """
    # Masks first: they are quick to pack, and most errors are in them.
    masks = mask_store.pack_masks_once(source, labels, size)
    shape, fit = size, "no" if size is None else "stretch"
    if size is None and (masks.shapes == masks.shapes[0]).all():
        shape = tuple(masks.shapes[0].tolist())
    images = import_images.pack_once(source.pictures(), shape, fit)
    if len(masks) != len(images):
        raise UserError(source.where, f"{len(images)} images and {len(masks)} masks", "one for each")
    return masks, images


def _padding(train: SceneCrops) -> Iterator[str]:
    cuts = train.cuts(np.arange(train.size), 0)
    covered = cuts.size.prod(1) / np.prod(train.crop)
    if (padded := int((covered < 1).sum())) > 0:
        yield (
            f"{padded} of {train.size} crops of the first epoch are larger than their scaled image; "
            f"{1 - covered.mean():.1%} of the training pixels are padding"
        )
