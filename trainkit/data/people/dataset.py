"""People as records of several modalities: to learn who is who, and to find people again by any of them together."""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from trainkit import rng
from trainkit.config.ranges import Deviation, Fraction, FractionBelowOne, Side, Whole
from trainkit.data import augment, import_images
from trainkit.data.augment import Light, Plain
from trainkit.data.leakage import Held, held_in
from trainkit.data.people import index as people_index
from trainkit.data.people import pk_report, tokenizer
from trainkit.data.people import sources as people_sources
from trainkit.data.people.index import PeopleIndex
from trainkit.data.people.modalities import subsets
from trainkit.data.people.pk_sampler import Cells, Draw, DrawnRowOrder, Sampler, parts_of
from trainkit.data.people.searches import combined, search
from trainkit.data.people.tokenizer import Captions
from trainkit.data.sources import HELD_OUT
from trainkit.data.split import (
    HoldOut,
    Holdout,
    TrainSplit,
    by_another_seed,
    check_leaks,
    evaluated,
    key,
    missing,
    warn_of_few,
)
from trainkit.data.storage.image_store import Packed
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Search
from trainkit.interfaces import MODALITIES, RGB, TEXT, Batch, Dataset, DatasetInfo
from trainkit.tensors import torch


@dataclass(kw_only=True)
class ModalityDropout:
    """Random removal of modalities from queries in training, so that the model does not rely on one."""

    p: FractionBelowOne
    """Fraction of the records of multi-modal queries that are left out. One record of each query stays."""
    from_epoch: Whole = 0
    """First epoch, from 0, with modality dropout."""


@dataclass(kw_only=True)
class People:
    """Person images and captions for re-identification. Every evaluation set NAME offers the splits NAME, NAME.ranked
    (with images of ranked lists) and NAME.reranked."""

    train: str
    """Training set: `ORBench#train`, `Market-1501#train`, an index (`.csv`, `.parquet`, `.json`), `sample:people`, or
    `derived:FOLDER` of photographs."""
    evaluate: dict[str, str] = field(default_factory=dict)
    """Evaluation sets by name, in the forms of `train`; `held_out` is the split that `hold_out` excludes from
    training."""
    columns: dict[Literal["path", "person", "camera", "modality", "text", "of", "split", "role"], str] = field(
        default_factory=dict, metadata={"hash": "set"}
    )
    """Columns of indexes that have other names: `{person: pid, path: file}`."""
    modalities: list[Literal["rgb", "nir", "cp", "sk", "text"]] | None = None
    """Modalities to use; `rgb` must be among them. null: all that `train` has."""
    image_size: Side | tuple[Side, Side] = (256, 128)
    """Side of an image in pixels, or [height, width]."""
    fit: Literal["crop", "stretch"] = "stretch"
    """Preparation of images when they are packed. `stretch`: the whole image, resized. `crop`: the largest centre crop
    of that shape."""
    mean: tuple[Fraction, Fraction, Fraction] = (0.485, 0.456, 0.406)
    """Mean per channel (red, green, blue) that is subtracted from pixels in 0 .. 1. Default: ImageNet's."""
    std: tuple[Deviation, Deviation, Deviation] = (0.229, 0.224, 0.225)
    """Standard deviation per channel by which pixels are divided after `mean` is subtracted. Default: ImageNet's."""
    augment: Annotated[Plain | Light, Field(discriminator="name")] = field(default_factory=Plain)
    """Augmentation of training images of every modality: `none` or `light`."""
    text: Captions = field(default_factory=Captions)
    """Tokenization of captions."""
    token_dropout: FractionBelowOne = 0.0
    """Fraction of the words (with `clip`, of its tokens) of a caption that are dropped in training; at least one
    stays."""
    sampler: Sampler
    """Composition of training batches: `pk`, `modal_pk` or `pairs`."""
    modality_dropout: ModalityDropout | None = None
    """Random removal of modalities from queries in training. null: none."""
    hold_out: HoldOut | None = None
    """Identities that are excluded from training and evaluated as `held_out`: a percentage of them, or a list of names.
    null: none."""
    split_seed: Annotated[int, Field(ge=0, le=(1 << 63) - 1)] = field(default=0, metadata={"hash": by_another_seed})
    """Seed by which a percentage of `hold_out` is chosen, so that runs with other `seed`s are evaluated on the same
    people."""
    rerank_strict: bool = False
    """Condition of NAME.reranked for joining two neighbourhoods. false: at least two thirds overlap, as in the
    k-reciprocal re-ranking paper. true: more than two thirds, as in its authors' code."""
    leakage: Literal["refuse", "allow"] = "refuse"
    """Action when a person or an image is in both training and evaluation data. `refuse`: end the run. `allow`:
    warn."""
    name: Literal["people"] = "people"
    """Kind of data."""

    def __post_init__(self) -> None:
        if self.modalities is not None and "rgb" not in self.modalities:
            raise ValueError(f"modalities are {self.modalities}; add rgb, the modality of the gallery")
        self._holdout.check(self.evaluate)

    @property
    def _holdout(self) -> Holdout:
        return Holdout(self.hold_out, "person", "people")

    @property
    def side(self) -> tuple[int, int]:
        """Height and width of an image."""
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size

    @property
    def block(self) -> int:
        """Records of a micro-batch: P x K."""
        return self.sampler.block

    def open(self, seed: int) -> Dataset:
        """Find, index, check and where needed pack the files.

        Raises UserError naming file and row, people and images that are in two splits, a modality that is asked for
        and not there, and fewer people than the sampler takes.
        """
        whole = people_index.indexed(self.train, "train", self.columns)
        known = self._known(whole)
        kept, held = self._divided(whole, np.flatnonzero(np.isin(whole.modality, known)))
        coder = self.text.make() if TEXT in known else None
        nobody, kept = int((whole.person[kept] < 0).sum()), kept[whole.person[kept] >= 0]
        numbers, label = np.unique(whole.person[kept], return_inverse=True)
        names = tuple(whole.persons[number] for number in numbers.tolist())
        # All is found, and the sampler tried, before the first image is packed: an error should not show after that.
        cells, among = Cells.make(label, whole.modality[kept], len(names)), np.full(len(whole) + 1, -1, np.int32)
        among[kept] = np.arange(len(kept), dtype=np.int32)
        draw = Draw(self.sampler, cells, seed, among[whole.of[kept]])
        notes = [*pk_report.report(draw), *(f"train: {said}" for said in _left_out(whole, known))]
        notes += [f"train: {nobody:,} distractors are left out"] if nobody else []
        asked: dict[str, tuple[PeopleIndex, np.ndarray, Search]] = {}
        for name, place in evaluated(self.evaluate, self.hold_out is not None).items():
            index = whole if place == HELD_OUT else people_index.indexed(place, "val", self.columns)
            rows, protocol = search(index, held if place == HELD_OUT else np.arange(len(index)), known, key(name))
            asked[name] = index, rows, protocol
            searched = index.person[rows]
            warn_of_few(key(name), len(np.unique(searched[searched >= 0])), "people", {})
            notes += [f"{name}: {said}" for said in (protocol.rule, *_left_out(index, known, protocol))]
        train = self._split("train", whole, kept, names, known, coder, seed)
        scored: dict[str, PeopleSplit] = {}
        for name, (index, rows, protocol) in asked.items():
            split = replace(self._split(name, index, rows, names, known, coder, seed), protocol=protocol)
            scored[name] = split
            for kind in ("ranked", "reranked"):
                other = replace(protocol, kind=kind, strict=self.rerank_strict)
                scored[f"{name}.{kind}"] = replace(split, name=f"{name}.{kind}", protocol=other)
        self._check_leaks(train, {name: scored[name] for name in asked})
        for split in (train, *(scored[name] for name in asked)):
            if coder is not None and split.ids is not None:
                notes += [f"{split.name}: {said}" for said in tokenizer.losses(coder, split.ids)]
        meta = DatasetInfo(
            len(names),
            (3, *self.side),
            train.digest,
            names,
            modalities=tuple(MODALITIES[m] for m in known),
            vocabulary=coder.vocabulary if coder else 0,
            text_length=coder.length if coder else 0,
        )
        return Dataset(meta, replace(train, draw=draw), scored, tuple(notes), self.block, self.sampler.each)

    def missing(self) -> list[str]:
        """Return sentences about files that are not there yet."""
        also = {"data.text.file": self.text.missing()}
        return missing(self.train, self.evaluate, people_sources.missing, also)

    def _known(self, index: PeopleIndex) -> tuple[int, ...]:
        """Return codes of the modalities that are used."""
        there = tuple(np.unique(index.modality).tolist())
        asked = there if self.modalities is None else tuple(sorted({MODALITIES.index(m) for m in self.modalities}))
        for code in {RGB, *asked} - set(there):
            found = f"no records of {MODALITIES[code]}, only {', '.join(MODALITIES[m] for m in there)}"
            raise UserError(f"data.train ({index.where})", found, f"some of {', '.join(MODALITIES[m] for m in asked)}")
        return asked

    def _divided(self, index: PeopleIndex, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Divide `rows` into those to train on, and those of people who are held out."""
        if self.hold_out is None:
            return rows, rows[:0]
        there = np.unique(index.person[rows][index.person[rows] >= 0])
        names = [index.persons[number] for number in there.tolist()]
        # Distractors, -1, are at no place among the names, and so held out by none.
        group = np.where(index.person[rows] < 0, -1, np.searchsorted(there, index.person[rows]))
        kept, held = self._holdout.divide(group, names, self.split_seed)
        return rows[kept], rows[held]

    def _split(
        self,
        name: str,
        index: PeopleIndex,
        rows: np.ndarray,
        names: tuple[str, ...],
        known: tuple[int, ...],
        coder: tokenizer.Tokens | None,
        seed: int,
    ) -> PeopleSplit:
        place = {known: number for number, known in enumerate(names)}
        numbers = np.asarray([*(place.get(known, -1) for known in index.persons), -1], np.int32)
        captions = rows[index.modality[rows] == TEXT]
        ids, ends = None, None
        if coder is not None:
            texts = [index.texts[row] for row in captions.tolist()]
            ids, ends = tokenizer.table(coder, texts), (coder.begin, coder.end)
        return PeopleSplit(
            name,
            index,
            import_images.pack_once(index.pictures(), self.side, self.fit),
            rows.astype(np.int32),
            numbers[index.person[rows]],
            np.asarray(index.modality[rows]),
            names,
            known,
            ids,
            ends,
            seed,
            self,
        )

    def _check_leaks(self, train: PeopleSplit, scored: Mapping[str, PeopleSplit]) -> None:
        held = {name: one.held() for name, one in scored.items()}
        remedy = "divide the sets by person (data.hold_out can), or set `leakage: allow`"
        check_leaks(train.held(), held, self.leakage, "each person and each image in one split", remedy)


@dataclass(frozen=True, eq=False)
class PeopleSplit(TrainSplit):
    """Records of an index as the loop sees them.

    Keys: `image.M`, uint8, for each modality that is an image; `text`; label, modality, index, view; in training
    `queries`, and `augment`, the numbers of `light` for all images of the batch.
    """

    name: str
    index: PeopleIndex
    packed: Packed
    """Its images."""
    rows: np.ndarray
    """int32 (records,), rows of the index."""
    label: np.ndarray
    """int32 (records,), class of each, as `names` numbers them; -1 for people who are not trained on."""
    modality: np.ndarray
    """int8 (records,), ascending."""
    names: tuple[str, ...]
    """People of the training set."""
    known: tuple[int, ...]
    """Codes of the modalities that batches have keys for."""
    ids: np.ndarray | None
    """Token ids of the captions, which are the last of the records, (captions, length); None without text."""
    ends: tuple[int | None, int] | None
    """Ids that begin and end a caption; None without text."""
    seed: int
    data: People
    protocol: Search | None = None
    """How it is evaluated; None for training."""
    draw: Draw | None = None
    """Sampler of the batches of a training split."""
    any_thread = True

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"draw": None}  # workers that read batches draw none

    @property
    def size(self) -> int:
        """Records of an evaluation; of a training split as many as an epoch draws."""
        return self.draw.size if self.draw is not None else len(self.rows)

    @property
    def views(self) -> int:
        """1 where nothing is changed; 0 in training, where a record is another one in every batch."""
        return 0 if self.protocol is None else 1

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of images, captions as ids, people, modalities, and the rule of cameras."""
        return self._hash(self.packed.digest, self.ids)

    @functools.cached_property
    def content(self) -> str | None:
        """The same of files and captions, however they are prepared; None where it is not known."""
        return None if self.packed.originals is None else self._hash(self.packed.originals)

    def _hash(self, images: str, ids: np.ndarray | None = None) -> str:
        hashed = hashlib.sha256("\n".join((self.index.digest, images, *self.names)).encode(errors="replace"))
        place = self.protocol.place if self.protocol is not None else None
        if place is not None and np.array_equal(place, self.index.place[self.rows]):
            place = None  # that of the index, whose digest covers it
        for array in (self.rows, self.label, self.modality, ids, place):
            hashed.update(b"\n" if array is None else b"\n" + array.tobytes())
        return hashed.hexdigest()

    def persons(self) -> set[str]:
        """Return names of the people of whom it has records."""
        numbers = np.unique(self.index.person[self.rows]).tolist()
        return {self.index.persons[number] for number in numbers if number >= 0}

    def pictures(self) -> np.ndarray:
        """Return rows of `packed` that it has, int32."""
        return self.index.picture[self.rows[self.modality != TEXT]]

    def held(self) -> Held:
        """Return what it is compared with other splits by: its people, and its images."""
        whose = self.index.person[self.rows[self.modality != TEXT]]
        return held_in(
            self.packed,
            self.pictures(),
            subjects=frozenset(self.persons()),
            kind="people",
            label=np.maximum(whose, -1).astype(np.int64),
        )

    def picture(self, row: int) -> np.ndarray | None:
        """Return pixels of a record, uint8 (height, width, 3); None for a caption."""
        place = int(self.index.picture[self.rows[row]])
        return None if place < 0 else self.packed.picture(place)

    def caption(self, row: int) -> str:
        """Return words of a record; empty for an image."""
        return self.index.texts[int(self.rows[row])]

    def order(self, epoch: int, batch_size: int) -> DrawnRowOrder:
        """Return rows of one epoch, computed when they are asked for: `order[update, first:last]`, int64.

        Raises UserError when a batch is not made of whole blocks, or asks for more people than there are.
        """
        if self.draw is None:
            raise ValueError(f"{self.name} is not a split to train on")
        return self.draw.order(epoch, batch_size)

    def divide(self, rows: np.ndarray, number: int, parts: int) -> np.ndarray:
        """Return indices with which `fetch` reads part `number` of the block `rows`: those of others lie behind `rows`.

        Each part has equally many draws of K records, all of a person in one, as far as it has room for them: `pairs`
        may draw somebody more often.
        """
        part = parts_of(self.label[rows[:: self.data.sampler.each]], parts)
        ahead = np.repeat((part - number) % parts, self.data.sampler.each)
        return rows + len(self.rows) * ahead

    def fetch(self, indices: np.ndarray, epoch: int, view: int | None = None) -> Batch:
        """Read the records at `indices`: in training in the order of their modalities, with queries among them and the
        numbers of their augmentation; in evaluation as they come, which is in that order.

        What is drawn for a record depends on its batch, so that one drawn twice, in an epoch or in a batch, is not seen
        twice alike. Of a block that processes share (`divide`) a part is read, and drawn as for the whole. Raises
        UserError at a damaged row, ValueError where an evaluation is asked for out of order.
        """
        part, indices = np.divmod(np.asarray(indices, np.int64), len(self.rows))
        training = self.protocol is None
        modality = self.modality[indices]
        if (modality[1:] < modality[:-1]).any():
            if not training:
                raise ValueError(f"{self.name}: records that are not in the order of their modalities")
            order = np.argsort(modality, kind="stable")
            indices, modality, part = indices[order], modality[order], part[order]
        batch, own = {}, part == 0
        # Drawn for the whole block, whichever part of it is read.
        salt = zlib.crc32(indices.tobytes())
        keys = np.empty(0, np.int64)
        if training:
            # A number for each record of the batch, by which all else that is drawn for it is drawn.
            keys = rng.words(self.seed, "batch", epoch, salt, np.arange(len(indices))).view(np.int64)[own]
            batch["queries"] = torch.from_numpy(self._asked(self.label[indices], modality, part, epoch, salt))
        indices, modality = indices[own], modality[own]
        rows, label = self.rows[indices], self.label[indices].astype(np.int64)
        cuts = np.searchsorted(modality, np.arange(len(MODALITIES) + 1))
        # Mapped arrays give mapped arrays, which take numpy longer.
        images = np.asarray(self.packed.fetch(self.index.picture[rows[: cuts[TEXT]]]))
        batch |= {
            "label": torch.from_numpy(label),
            "modality": torch.from_numpy(modality.astype(np.int64)),
            "index": torch.from_numpy(indices),
            "view": torch.zeros(len(indices), dtype=torch.int64),
        }
        ids = self.ids[indices[cuts[TEXT] :] - self._first_caption] if self.ids is not None else None
        if training:
            if isinstance(self.data.augment, Light):
                self.data.augment.equalise(images, self.seed, epoch, keys[: cuts[TEXT]])
                numbers = self.data.augment.numbers(self.seed, epoch, keys[: cuts[TEXT]], self.data.side, view)
                batch["augment"] = torch.from_numpy(numbers)
            if ids is not None and self.ends is not None and self.data.token_dropout:
                draws = rng.uniform(self.seed, "tokens", epoch, keys[cuts[TEXT] :, None], np.arange(ids.shape[1]))
                ids = tokenizer.leave_out(ids, draws, self.data.token_dropout, *self.ends)
        for code in self.known:
            if code != TEXT:
                batch[f"image.{MODALITIES[code]}"] = torch.from_numpy(images[cuts[code] : cuts[code + 1]])
        if ids is not None:
            batch["text"] = torch.from_numpy(ids.astype(np.int64))
        return batch

    def on_device(self, batch: Batch) -> Batch:
        """Apply `light` to all images of the batch at once, then (pixels / 255 - mean) / std."""
        keys = [f"image.{MODALITIES[code]}" for code in self.known if code != TEXT]
        images = torch.cat([batch[key] for key in keys]) if len(keys) > 1 else batch[keys[0]]
        data = self.data
        if "augment" in batch and isinstance(data.augment, Light):
            images = data.augment.apply(images, batch["augment"], data.mean) if len(images) else images.float()
        images = augment.normalise(images, data.mean, data.std).split([len(batch[key]) for key in keys])
        done = {key: value for key, value in batch.items() if key != "augment"}
        return done | dict(zip(keys, images, strict=True))

    @functools.cached_property
    def _first_caption(self) -> int:
        return int(np.searchsorted(self.modality, TEXT))

    @functools.cached_property
    def _subsets(self) -> list[tuple[int, ...]]:
        return subsets(tuple(MODALITIES[code] for code in self.known))

    def _asked(self, label: np.ndarray, modality: np.ndarray, part: np.ndarray, epoch: int, salt: int) -> np.ndarray:
        """Make the queries of part 0 of a training batch, int64 (queries, 5): rows of that part, -1 for none.

        A combination is asked once for each of the records that a person has of the modality with the most of them, of
        several modalities no more often than half of the person's records. So a batch of n records has n + n/2 x S
        queries at the most, with S the combinations of several: a bound that does not depend on who is in it.
        """
        # Records of one process are fused: who is in other parts too is somebody else there.
        elsewhere = (part > 0) & np.isin(label, label[part == 0])
        _, person = np.unique(np.where(elsewhere, len(self.names) + label, label), return_inverse=True)
        asked = combined(person, modality, self._subsets, cap=True)
        asked = np.concatenate([np.zeros((0, len(MODALITIES)), np.int64), *asked])
        dropout = self.data.modality_dropout
        if dropout is not None and epoch >= dropout.from_epoch and len(asked):
            draws = rng.uniform(
                self.seed, "modality_dropout", epoch, salt, np.arange(len(asked))[:, None], np.arange(len(MODALITIES))
            )
            draws = np.where(asked >= 0, draws, -1.0)
            stays = (draws >= dropout.p) | (draws == draws.max(1, keepdims=True))
            asked = np.where(stays, asked, -1)
        place = np.append(np.where(part == 0, np.cumsum(part == 0) - 1, -1), -1)  # and -1 stays -1
        return place[asked[part[asked.max(1)] == 0]]


def _left_out(index: PeopleIndex, known: tuple[int, ...], search: Search | None = None) -> list[str]:
    """Return sentences about records of a set that take no part: in training, or in a `search` of it."""
    told = list(index.left_out)
    counts = np.bincount(index.modality, minlength=len(MODALITIES))
    if strange := [f"{counts[m]:,} of {MODALITIES[m]}" for m in range(len(MODALITIES)) if counts[m] and m not in known]:
        told.append(f"records of modalities that are not trained on are left out: {', '.join(strange)}")
    listed = sum(map(len, index.lists.values())) if search is not None else 0
    if listed and search is not None and (asked := sum(map(len, search.queries.values()))) < listed:
        told.append(f"{listed - asked:,} of {listed:,} listed queries are left out, for records that take no part")
    return told
