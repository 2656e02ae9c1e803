"""Images of classes: to train a classifier or an embedding on, and to score by classes, separation or retrieval."""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import numpy as np
from pydantic import Field

from trainkit import rng
from trainkit.config.ranges import Deviation, Fraction, Side
from trainkit.data import augment, image_folder, import_images, sources
from trainkit.data.augment import AnyAugment, Augment, Light, Plain, Timm
from trainkit.data.leakage import Held, held_in
from trainkit.data.sources import HELD_OUT, HELD_OUT_TEST, SAMPLE
from trainkit.data.split import (
    HoldOut,
    Holdout,
    TrainSplit,
    by_another_seed,
    check_batch,
    check_leaks,
    evaluated,
    key,
    missing,
    warn_of_few,
)
from trainkit.data.storage.image_store import Packed, is_packed
from trainkit.errors import UserError, few
from trainkit.evaluation_protocols import Classes, Inspection, Retrieval, Separation
from trainkit.interfaces import Batch, Dataset, DatasetInfo, RowOrder
from trainkit.paths import locate
from trainkit.tensors import torch

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

EACH = "each"
"""In place of a regular expression: every image is a group of its own."""

SAMPLES = {
    "objects": ("trainkit.data.synthetic.objects", None),
    "eyes": ("trainkit.data.synthetic.eyes", r"(p\d+)_\d+\.png$"),
}
"""Built-in sets by name: the module that draws it, and the expression that finds the group of an image."""

Kind = Literal["classes", "separation", "inspection", "retrieval"]


@dataclass(kw_only=True)
class Images:
    """Images with class labels. Every evaluation set NAME offers the splits NAME (classification), NAME.separation,
    NAME.inspection and NAME.retrieval, and so does `train`, without augmentation."""

    train: str
    """Training set: a folder of classes, a table (`.csv`, `.jsonl`, parquet, `metadata.csv`), saved `datasets` folder,
    `hf://owner/name#split`, packed folder, `sample:objects` or `sample:eyes`."""
    evaluate: dict[str, str] = field(default_factory=dict)
    """Evaluation sets by name, in the forms of `train`; `held_out` is the split that `hold_out` excludes from
    training."""
    columns: dict[Literal["image", "label", "split", "name", "group"], str] = field(
        default_factory=dict, metadata={"hash": "set"}
    )
    """Columns of a table, where their names are not recognised: `{image: img, label: fine_label}`; also `split`, `name`
    and `group`. A field of a struct column is `json.label`."""
    image_size: Side | tuple[Side, Side] = 224
    """Side of an image in pixels, or [height, width]."""
    fit: Literal["crop", "stretch", "keep"] = "crop"
    """Preparation of images when they are packed. `crop`: the largest centre crop of that shape. `stretch`: the whole
    image, resized. `keep`: stored at their own sizes and cropped by `augment: {name: timm}`."""
    mean: tuple[Fraction, Fraction, Fraction] = (0.485, 0.456, 0.406)
    """Mean per channel (red, green, blue) that is subtracted from pixels in 0 .. 1. Default: ImageNet's."""
    std: tuple[Deviation, Deviation, Deviation] = (0.229, 0.224, 0.225)
    """Standard deviation per channel by which pixels are divided after `mean` is subtracted. Default: ImageNet's."""
    augment: Augment = field(default_factory=Plain)
    """Augmentation of training images: `none`, `light` (on the device) or `timm` (in workers)."""
    group: str | None = None
    """Regular expression with one part in parentheses that finds in the relative path of an image its group, such as a
    person, which must not be in two splits. `each`: every image is its own group. null: the groups that the source
    names."""
    hold_out: HoldOut | None = None
    """Groups that are excluded from training and evaluated as `held_out`: a percentage of them, or a list of names.
    null: none."""
    hold_out_test: HoldOut | None = field(default=None, metadata={"hash": "set"})
    """Groups that are excluded from training for a test set, evaluated as `held_out_test`, in the forms of `hold_out`,
    which is then a part of the rest. null: none."""
    split_seed: Annotated[int, Field(ge=0, le=(1 << 63) - 1)] = field(default=0, metadata={"hash": by_another_seed})
    """Seed by which a percentage of `hold_out` and the images of `cap` are chosen, so that runs with other `seed`s are
    evaluated on the same images."""
    stratify: bool = field(default=False, metadata={"hash": "set"})
    """Hold out the same percentage of each class, where `group` is `each`."""
    leakage: Literal["refuse", "allow"] = "refuse"
    """Action when a group or an image is in both training and evaluation data. `refuse`: end the run. `allow`: warn."""
    open_set: bool = False
    """The evaluation data has other classes than the training data: only retrieval is offered. Held-out groups take
    their classes with them."""
    sampling: Literal["uniform", "balanced"] = "uniform"
    """Sampling of training images. `uniform`: each once per epoch. `balanced`: with replacement, every class equally
    often."""
    cap: Annotated[int, Field(ge=1, le=1000000000)] = 50_000
    """Largest number of images used for separation, inspection and the evaluation of `train`: a fixed random subset."""
    name: Literal["images"] = "images"
    """Kind of data."""

    def __post_init__(self) -> None:
        if self.fit == "keep" and not isinstance(self.augment, Timm):
            raise ValueError("fit: keep needs augment: {name: timm}; with another augment use crop or stretch")
        Holdout(self.hold_out).check(self.evaluate)
        if (HELD_OUT_TEST in self.evaluate.values()) != (self.hold_out_test is not None):
            raise ValueError(f"hold_out_test and an entry of evaluate that is {HELD_OUT_TEST} go together; set both")
        parts = [part for part in (self.hold_out, self.hold_out_test) if part is not None]
        if self.stratify and (self.group != EACH or not parts or not all(isinstance(part, float) for part in parts)):
            raise ValueError(f"stratify is true; set group: {EACH} and a percentage as hold_out, such as 20%")

    @property
    def side(self) -> tuple[int, int]:
        """Height and width of an image."""
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size

    def open(self, seed: int) -> Dataset:
        """Find, check and where needed pack the files.

        Raises UserError naming file and row, classes that differ, groups and images that are in two splits.
        """
        whole = self._packed(self.train, "train")
        kept, held = self._divided(whole)
        names = _present(whole, kept) if self.open_set else whole.class_names
        train = self._split("train", whole, kept, names, seed)
        self._check_classes("data.train", train, names)
        scored: dict[str, ImageSplit] = {}
        for name, place in evaluated(self.evaluate, self.hold_out is not None).items():
            data = whole if place in held else self._packed(place, "val")
            rows = held[place] if place in held else np.arange(len(data))
            known = _present(data, rows) if self.open_set else names
            scored[name] = self._split(name, data, rows, known, seed)
            self._check_classes(f"data.evaluate.{name}", scored[name], names)
            counts = np.bincount(scored[name].label[scored[name].label >= 0], minlength=len(known))
            warn_of_few(key(name), scored[name].size, "images", dict(zip(known, counts.tolist(), strict=True)))
        self._check_leaks(train, scored)
        evaluations: dict[str, ImageSplit] = {}
        for name, split in scored.items():
            evaluations |= self._kinds(name, split, self.open_set)
        evaluations |= self._kinds("train", train.some(self.cap), False)
        meta = DatasetInfo(len(names), (3, *self.side), train.digest, tuple(names))
        return Dataset(meta, replace(train, augment=self._checked_augment(), weights=self._weights(train)), evaluations)

    def missing(self) -> list[str]:
        """Return sentences about files that are not there yet."""
        return missing(self.train, self.evaluate)

    def _packed(self, text: str, part: str) -> Packed:
        size, fit = (None, "no") if self.fit == "keep" else (self.side, self.fit)
        group = None if self.group == EACH else self.group
        if text.startswith(SAMPLE):
            place, own = _sample(text, part)
            return import_images.pack_once(image_folder.open_folder(place), size, fit, group or own)
        if is_packed(locate(text)):
            data = Packed(locate(text))
            if data.manifest["protocol"] is None and data.size == size and group is None:
                return data
        return import_images.pack_once(sources.named(text, columns=self.columns), size, fit, group)

    def _divided(self, whole: Packed) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return rows to train on, and rows that are held out, by the word of `evaluate` for them."""
        rows, held = np.arange(len(whole)), {}
        for word, part in ((HELD_OUT_TEST, self.hold_out_test), (HELD_OUT, self.hold_out)):
            if part is not None:
                kept, out = self._held_out(whole, rows, Holdout(part))
                rows, held[word] = rows[kept], rows[out]
        return rows, held

    def _held_out(self, whole: Packed, rows: np.ndarray, part: Holdout) -> tuple[np.ndarray, np.ndarray]:
        """Divide rows: places among them to train on, and places that are held out."""
        if self.stratify or self.group == EACH:
            ids = whole.ids()
            names = [ids[row] for row in rows.tolist()]
            if self.stratify:
                return part.divide_classes(np.asarray(whole.labels)[rows], names, self.split_seed)
            return part.divide(np.arange(len(rows)), names, self.split_seed)
        if whole.groups is None:
            found, expected = "images without groups", "groups to hold out"
            remedy = f"set data.group to a regular expression; `group: {EACH}` splits by image"
            raise UserError("data.hold_out", found, expected, remedy)
        there, groups = np.unique(np.asarray(whole.groups)[rows], return_inverse=True)
        names = [whole.group_names[number] for number in there.tolist()]
        kept, out = part.divide(groups, names, self.split_seed)
        if self.open_set:
            both = sorted(set(_present(whole, rows[kept])) & set(_present(whole, rows[out])))
            if both:
                found = f"{len(both)} classes have images in held-out groups and in others: {few(both)}"
                raise UserError("data.hold_out", found, "groups of whole classes, since open_set is on")
        return kept, out

    def _split(self, name: str, data: Packed, rows: np.ndarray, names: Iterable[str], seed: int) -> ImageSplit:
        names = tuple(names)
        place = {known: number for number, known in enumerate(names)}
        numbers = np.asarray([place.get(known, -1) for known in data.class_names], np.int64)
        label = numbers[data.labels[rows]] if len(numbers) else np.full(len(rows), -1)
        plain = self.augment if self.fit == "keep" else Plain()
        return ImageSplit(name, data, rows.astype(np.int64), label, names, seed, self, plain)

    def _check_classes(self, where: str, split: ImageSplit, trained: Iterable[str]) -> None:
        present = _present(split.packed, split.rows)
        place = f"{where} ({split.packed.manifest.get('made_from') or split.packed.path})"
        if not self.open_set:
            new, absent = sorted(set(present) - set(trained)), sorted(set(trained) - set(present))
            if split.name == "train" and absent:
                found = f"no training images of {few(absent)} remain, all are held out"
                raise UserError("data.hold_out", found, "groups that leave images of each class", "name other groups")
            if new:
                found, expected = f"classes that are not in the training set: {few(new)}", few(sorted(trained))
                remedy = "set open_set: true to evaluate other classes by retrieval"
                raise UserError(place, found, f"those of data.train: {expected}", remedy)
            if absent:
                _log.warning("%s: no images of %d training classes: %s", place, len(absent), few(absent))
        if len(present) < 2:
            raise UserError(place, f"images of {len(present)} class ({few(present)})", "at least 2")

    def _check_leaks(self, train: ImageSplit, scored: Mapping[str, ImageSplit]) -> None:
        classes = []
        for name, one in scored.items() if self.open_set else ():
            if both := sorted(set(train.names) & set(one.names)):
                found = f"{len(both)} of its {len(one.names)} classes are in the training set, but open_set is on"
                classes.append((name, f"{found}: {few(both)}"))
        held = {name: one.held() for name, one in scored.items()}
        remedy = "divide the sets by group (data.hold_out can), or set `leakage: allow`"
        check_leaks(train.held(), held, self.leakage, "each group and each image in one split", remedy, classes)

    def _kinds(self, name: str, split: ImageSplit, retrieval_only: bool) -> dict[str, ImageSplit]:
        """Return the splits by which a set is evaluated, by the words that evaluations name them by."""
        some, found = split.some(self.cap), {}
        kinds: dict[str, Kind] = {"": "classes", ".separation": "separation", ".inspection": "inspection"}
        if retrieval_only:
            kinds = {"": "retrieval"}
        for end, kind in kinds.items():
            found[name + end] = replace(some if end else split, name=name + end, kind=kind)
        return found | {f"{name}.retrieval": replace(split, name=f"{name}.retrieval", kind="retrieval")}

    def _checked_augment(self) -> AnyAugment:
        if isinstance(self.augment, Timm):
            try:
                self.augment.training(self.side, self.mean, self.std)
            except ValueError as error:
                raise UserError("data.augment", str(error), "a policy such as rand-m9-mstd0.5-inc1") from None
        return self.augment

    def _weights(self, train: ImageSplit) -> np.ndarray | None:
        if self.sampling == "uniform":
            return None
        counts = np.bincount(train.label, minlength=len(train.names))
        return (1.0 / np.maximum(counts, 1))[train.label]


@dataclass(frozen=True, eq=False)
class ImageSplit(TrainSplit):
    """Rows of a packed set as the loop sees them.

    Keys: image, uint8 or, where timm has normalised it, float32; label, index, view; `augment`, the numbers of `light`.
    """

    name: str
    packed: Packed
    rows: np.ndarray
    """int64 (size,), rows of the packed set."""
    label: np.ndarray
    """int64 (size,), class of each, as `names` numbers them."""
    names: tuple[str, ...]
    """Class names of the training set; with an open set, those of this one."""
    seed: int
    data: Images
    augment: AnyAugment
    """Augmentation in training; evaluation images are only cropped, where images keep their own sizes."""
    kind: Kind | None = None
    """How it is evaluated; None for training."""
    weights: np.ndarray | None = None
    """float64 (size,): how often each is drawn in training, relative to the others; None: each once an epoch."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_cut"}  # transforms may not pickle

    @property
    def any_thread(self) -> bool:
        """True unless timm augments, which sets the generators of the process."""
        return not isinstance(self.augment, Timm)

    @property
    def size(self) -> int:
        """Number of images."""
        return len(self.rows)

    @functools.cached_property
    def views(self) -> int:
        """One of what is evaluated or not augmented, two with mirrored images alone, 0 where there is no counting."""
        if self.kind is not None or isinstance(self.augment, Plain):
            return 1
        return self.augment.views if isinstance(self.augment, Light) else 0

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of images, labels and names; that of the packed set where it is taken whole."""
        if self.names == self.packed.class_names and np.array_equal(self.rows, np.arange(len(self.packed))):
            return self.packed.digest
        return self._hash(self.packed.digest)

    @functools.cached_property
    def content(self) -> str | None:
        """SHA-256 of files, labels and names, whatever their size here; None where the set was packed without it."""
        return None if self.packed.originals is None else self._hash(self.packed.originals)

    def _hash(self, images: str) -> str:
        text = "\n".join((images, *self.names)).encode(errors="surrogateescape")
        return hashlib.sha256(text + b"\n" + self.rows.tobytes() + self.label.tobytes()).hexdigest()

    @property
    def protocol(self) -> Classes | Retrieval | None:
        """How the split is evaluated; None for training."""
        if self.kind is None:
            return None
        if self.kind == "retrieval":
            return Retrieval(self.label)
        if self.kind == "inspection":
            ids = self.packed.ids()
            return Inspection(self.label, self.names, tuple(ids[row] for row in self.rows.tolist()))
        if self.kind == "separation":
            return Separation(self.label, self.names)
        group = None if self.packed.groups is None else np.asarray(self.packed.groups[self.rows])
        return Classes(self.label, self.names, group=group)

    def groups(self) -> set[str]:
        """Return names of the groups of which it has images; empty where none are known."""
        if self.packed.groups is None:
            return set()
        names = self.packed.group_names
        return {names[group] for group in np.unique(self.packed.groups[self.rows]).tolist()}

    def held(self) -> Held:
        """Return what it is compared with other splits by."""
        return held_in(
            self.packed,
            self.rows,
            subjects=frozenset(self.groups() if self.data.group != EACH else ()),
            label=self.label,
        )

    def some(self, most: int) -> ImageSplit:
        """Choose at most so many images, in the proportions of their classes, by a hash of `split_seed` and row."""
        if self.size <= most:
            return self
        chance = rng.uniform(self.data.split_seed, "cap", 0, np.arange(self.size))
        order = np.lexsort((chance, self.label))
        begins = np.searchsorted(self.label[order], np.arange(len(self.names)))
        counts = np.bincount(self.label, minlength=len(self.names))
        # The share of its class that stands before each: cut at one level, every class gives in proportion.
        before = np.empty(self.size)
        before[order] = (np.arange(self.size) - begins[self.label[order]] + 0.5) / counts[self.label[order]]
        chosen = np.sort(np.lexsort((chance, before))[:most])
        return replace(self, rows=self.rows[chosen], label=self.label[chosen])

    def order(self, epoch: int, batch_size: int) -> RowOrder:
        """Return the rows of one epoch, int64 (updates, batch_size): shuffled, or drawn by weight with replacement.

        What fills no batch is left for other epochs. Raises UserError when a batch takes more than there are.
        """
        if self.weights is None:
            return super().order(epoch, batch_size)
        check_batch(self, batch_size)
        updates = self.size // batch_size
        ends = np.cumsum(self.weights)
        draws = rng.uniform(self.seed, "sampling", epoch, np.arange(updates * batch_size))
        rows = np.minimum(np.searchsorted(ends, draws * ends[-1], side="right"), self.size - 1)
        return rows.astype(np.int64).reshape(updates, batch_size)

    def fetch(self, indices: np.ndarray, epoch: int, view: int | None = None) -> Batch:
        """Read the images at `indices`, in training with their augmentation or the numbers for it.

        Raises UserError at a damaged row.
        """
        indices = np.array(indices, dtype=np.int64)
        rows, training = self.rows[indices], self.kind is None
        batch = self._labels(indices, epoch, view)
        if isinstance(self.augment, Timm):
            pictures = self.packed.pictures(rows)
            if training:
                batch["image"] = augment.per_picture(pictures, self._cut, self.seed, epoch, indices)
            else:
                batch["image"] = torch.stack([self._cut(pixels) for pixels in pictures])
        else:
            images = self.packed.fetch(rows)
            if training and isinstance(self.augment, Light):
                self.augment.equalise(images, self.seed, epoch, indices)
            batch["image"] = torch.from_numpy(images)
        return batch

    def _labels(self, indices: np.ndarray, epoch: int, view: int | None = None) -> Batch:
        """Return label, index and view of the images at `indices`, and in training the numbers of `light`."""
        indices, views = np.array(indices, dtype=np.int64), np.zeros(len(indices), np.int64)
        batch = {"label": torch.from_numpy(self.label[indices]), "index": torch.from_numpy(indices)}
        if self.kind is None and isinstance(self.augment, Light):
            numbers = self.augment.numbers(self.seed, epoch, indices, self.data.side, view)
            views = numbers[:, augment.NUMBERS.index("flip")].astype(np.int64) * (self.views == 2)
            batch["augment"] = torch.from_numpy(numbers)
        return batch | {"view": torch.from_numpy(views)}

    def on_device(self, batch: Batch) -> Batch:
        """Apply `light` to the whole batch, then (pixels / 255 - mean) / std, where that is not done yet."""
        image = batch["image"]
        if "augment" in batch and isinstance(self.augment, Light):
            image = self.augment.apply(image, batch["augment"], self.data.mean)
        elif image.is_floating_point():
            return batch
        done = {key: value for key, value in batch.items() if key != "augment"}
        return done | {"image": augment.normalise(image, self.data.mean, self.data.std)}

    @functools.cached_property
    def _cut(self) -> Callable[[np.ndarray], Tensor]:
        timm, data = cast(Timm, self.augment), self.data  # `fetch` asks for it with no other
        return timm.training(data.side, data.mean, data.std) if self.kind is None else timm.scoring(data.side)


def _sample(text: str, part: str) -> tuple[Path, str | None]:
    word = text.removeprefix(SAMPLE)
    if word not in SAMPLES:
        raise UserError("data", f"no built-in set {text!r}", " or ".join(SAMPLE + name for name in SAMPLES))
    module, group = SAMPLES[word]
    return importlib.import_module(module).folder() / part, group


def _present(data: Packed, rows: np.ndarray) -> tuple[str, ...]:
    """Return names of the classes that rows of a set have images of, in their order."""
    names = data.class_names
    counts = np.bincount(data.labels[rows], minlength=len(names)) if len(names) else ()
    return tuple(name for name, count in zip(names, counts, strict=True) if count)
