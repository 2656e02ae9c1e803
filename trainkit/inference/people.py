"""Predict embeddings of person images with a run of task `reid`; they are compared by cosine.

Each record is embedded alone, without fusion, after the neck.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from trainkit.data import sources
from trainkit.data.formats import image_decode
from trainkit.data.people import tokenizer
from trainkit.data.people.dataset import People
from trainkit.data.people.records import DISTRACTOR, PersonRecord
from trainkit.errors import UserError, number_of
from trainkit.inference import preprocess, samples
from trainkit.inference import table_writer as tables
from trainkit.inference.output_folder import Predicted, Request
from trainkit.inference.trained_model import Rebuilt, origin, rebuilt
from trainkit.interfaces import MODALITIES, RGB, TEXT

if TYPE_CHECKING:
    from trainkit.inference.preprocess import Preparation
    from trainkit.inference.table_writer import Columns
    from trainkit.models.reid import ReidNet


Entry = tuple[PersonRecord, Path]
"""A record, and the file of its image."""


class _Found(NamedTuple):
    where: str
    entries: list[Entry]
    """In the order of their modalities."""
    labelled: bool
    """True if the set has an identity for each record."""
    notes: Sequence[str] = ()
    """What of the set is left out."""


def predict(asked: Request) -> Predicted:
    """Write a row per record to a table, .parquet; see `predict.predict`.

    The source is a re-identification set as in recipes, or an image or a folder of images, read as `rgb`. Columns:
    `id`, `person` and `camera` if the set has them, `modality`, `embedding`. Records of modalities that the run was not
    trained on are left out, with a note.
    """
    tables.check_target(asked.out)
    _refuse_mirror(asked.mirror)
    known = asked.meta.modalities or (MODALITIES[RGB],)
    found = _records(asked.source)
    every = [entry for entry in found.entries if MODALITIES[entry[0].modality] in known]
    notes = [*found.notes, *_left_out(found.entries, known)]
    if not every:
        found_here = "; ".join(notes) or "no records"
        raise UserError(asked.source, found_here, f"records of {', '.join(known)}", "name another source")
    data, prepared = cast(People, asked.recipe.data), preprocess.of(asked.recipe.data)
    if prepared is None:  # `predict.predict` has refused it
        raise TypeError("the recipe's data has no images")
    with rebuilt(asked.folder, asked.recipe, asked.meta) as made:
        coder = data.text.make() if MODALITIES[TEXT] in known else None
        network = _Network(made, prepared, known, coder)

        def columns(read: Sequence[tuple[PersonRecord, np.ndarray]]) -> Columns:
            records = [record for record, _ in read]
            first: Columns = {"id": [record.id for record in records]}
            if found.labelled:
                first["person"] = [DISTRACTOR if record.person is None else record.person for record in records]
                first["camera"] = [record.camera for record in records]
            first["modality"] = [MODALITIES[record.modality] for record in records]
            return first | network.columns([(record.modality, values) for record, values in read])

        entries = tables.Entries(
            total=len(every),
            items=lambda: iter(every),
            read=network.read,
            columns=columns,
            example=(every[0][0]._replace(modality=RGB), np.zeros((3, *prepared.side), np.uint8)),
        )
        said = origin(asked.folder, made.weights, asked.meta) | {"source": found.where}
        return tables.write(asked, entries, (), said, made.weights, notes)


def predictor(made: Rebuilt) -> Callable[[Sequence[Any], bool], Columns]:
    """Return the function that embeds colour images in memory; see `predictor.Predictor`."""
    prepared, known = preprocess.of(made.recipe.data), made.meta.modalities or (MODALITIES[RGB],)
    if prepared is None or MODALITIES[RGB] not in known:
        found = f"a network for {', '.join(known)}"
        raise UserError(f"recipe {made.recipe.name}", found, f"one for {MODALITIES[RGB]}", "use another run")
    network = _Network(made, prepared, known, None)

    def read(sample: Any, where: str) -> tuple[int, np.ndarray]:
        return RGB, prepared.pixels(samples.pixels(sample, where), where)

    def predict(pictures: Sequence[Any], mirror: bool) -> Columns:
        _refuse_mirror(mirror)
        return samples.batched(pictures, read, network.columns)

    return predict


def _refuse_mirror(mirror: bool) -> None:
    if mirror:
        found, expected = "a run of task reid", "one that predicts classes or label maps"
        raise UserError("--mirror", found, expected, "leave it out")


@dataclasses.dataclass(frozen=True)
class _Network:
    """A network that embeds prepared records, of files and in memory alike."""

    made: Rebuilt
    prepared: Preparation
    known: Sequence[str]
    coder: tokenizer.Tokens | None

    def read(self, entry: Entry) -> tuple[PersonRecord, np.ndarray]:
        """Read the pixels of a record, uint8 (3, height, width), or the token ids of its caption, int64 (length,)."""
        record, file = entry
        if record.modality == TEXT and self.coder is not None:
            return record, tokenizer.table(self.coder, [record.text])[0].astype(np.int64)
        pixels = image_decode.decode(image_decode.read(file, record.where), record.where)
        return record, self.prepared.pixels(pixels, record.where)

    def columns(self, read: Sequence[tuple[int, np.ndarray]]) -> Columns:
        """Embed a batch of modalities and values, which are in the order of their modalities."""
        net, runtime = cast("ReidNet", self.made.net), self.made.runtime  # the network of the task `reid`
        batch = {}
        for number, name in enumerate(MODALITIES):
            if name not in self.known:
                continue
            own = [values for modality, values in read if modality == number]
            coder = self.coder if number == TEXT else None
            shape, kind = ((3, *self.prepared.side), np.uint8) if coder is None else ((coder.length,), np.int64)
            values = torch.from_numpy(np.stack(own) if own else np.empty((0, *shape), kind))
            batch[f"image.{name}" if coder is None else "text"] = values
        batch = {
            name: values if name == "text" else self.prepared.normal(values)
            for name, values in runtime.to_device(batch).items()
        }
        with torch.no_grad():
            with runtime.accelerator.autocast():
                feature = self.made.recipe.task.predict(net, batch)["feature"].float()
            # One slot per modality, of which one is filled, as in queries of one record.
            modality = torch.tensor([modality for modality, _ in read], device=feature.device)
            row = torch.arange(len(feature), device=feature.device)
            places = feature.new_zeros(len(feature), len(MODALITIES), feature.shape[1])
            places[row, modality] = feature
            present = torch.zeros(places.shape[:2], dtype=torch.bool, device=feature.device)
            present[row, modality] = True
            return {"embedding": net.neck(net.fuse(places, present)).float().cpu().numpy()}


def _records(text: str) -> _Found:
    """Find the records of a source: a re-identification set, or images, all read as `rgb`."""
    from trainkit.data.people import layouts
    from trainkit.data.people import sources as people_sources
    from trainkit.inference.images import open_pictures

    path, split = sources.split_of(text)
    if path.is_dir():
        pictures = people_sources.index_in(path) is None and layouts.kind_of(path) is None
    else:
        pictures = path.is_file() and path.suffix.lower() in image_decode.SUFFIXES
    if pictures:
        found = open_pictures(text)
        every = [
            (PersonRecord(record.where, record.id, None, RGB), record.data)
            for record in found.records()
            if isinstance(record.data, Path)
        ]
        if len(every) < found.size:
            raise UserError(text, f"a {found.kind}", "a re-identification set, or image files", "name another source")
        return _Found(found.where, every, labelled=False)
    named = str(path.absolute()) + (f"#{split}" if split else "") if path.exists() else text
    records = people_sources.find(named, "val")
    every = sorted(records.every, key=lambda record: record.modality)
    entries = [(record, records.root / record.id) for record in every]
    return _Found(records.where, entries, labelled=True, notes=records.losses())


def _left_out(entries: Sequence[Entry], known: Sequence[str]) -> list[str]:
    strange = [name for record, _ in entries if (name := MODALITIES[record.modality]) not in known]
    return [
        f"{number_of(strange.count(name), f'records of {name}')} left out: the run was trained on {', '.join(known)}"
        for name in dict.fromkeys(strange)
    ]
