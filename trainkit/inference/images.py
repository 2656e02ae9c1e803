"""Predict classes and embeddings of images with a run of data `images` or `faces`.

Images are prepared as in the run's evaluations: cropped or resized to the same size, and normalised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainkit.data import kinds
from trainkit.data.formats import image_decode
from trainkit.data.record import Record, Source
from trainkit.errors import UserError
from trainkit.inference import preprocess, samples
from trainkit.inference import table_writer as tables
from trainkit.inference.output_folder import Predicted, Request
from trainkit.inference.trained_model import Rebuilt, origin, rebuilt

if TYPE_CHECKING:
    from trainkit.inference.preprocess import Preparation
    from trainkit.inference.table_writer import Columns

PLAIN = "pictures"
"""Kind of a source of unlabelled images."""


def predict(asked: Request) -> Predicted:
    """Write a row per image to a table, .parquet or .csv; see `predict.predict`.

    The source is an image, a folder with images and subfolders, or any set of images that can be trained on or packed.
    Columns: `id`, `label` if the source has one, and the predictions. With `mirror` probabilities are means over the
    image and its mirror image.
    """
    tables.check_target(asked.out)
    meta, found = asked.meta, open_pictures(asked.source)
    prepared = preprocess.of(asked.recipe.data)
    if prepared is None:  # `predict.predict` has refused it
        raise TypeError("the recipe's data has no images")
    with rebuilt(asked.folder, asked.recipe, meta) as made:
        network, labelled = _Network(made, prepared, asked.mirror), found.kind != PLAIN

        def columns(read: Sequence[tuple[Record, np.ndarray]]) -> Columns:
            first: Columns = {"id": [record.id for record, _ in read]}
            if labelled:
                first["label"] = [_label(record.label, found.names) for record, _ in read]
            return first | network.columns([pixels for _, pixels in read])

        entries = tables.Entries(
            total=found.size,
            items=found.records,
            read=_reader(asked.recipe.data, found, prepared),
            columns=columns,
            example=(Record("", "", Path(), ""), np.zeros((3, *prepared.side), np.uint8)),
        )
        said = origin(asked.folder, made.weights, meta) | {"source": found.where, "mirror": asked.mirror}
        return tables.write(asked, entries, network.names, said, made.weights)


def predictor(made: Rebuilt) -> Callable[[Sequence[Any], bool], Columns]:
    """Return the function that predicts images in memory (faces: aligned); see `predictor.Predictor`."""
    prepared = preprocess.of(made.recipe.data)
    if prepared is None:
        found = "data.fit keep, so images have no fixed size"
        raise UserError(f"recipe {made.recipe.name}", found, "another value of data.fit", "name another run")

    def read(sample: Any, where: str) -> np.ndarray:
        return prepared.pixels(samples.pixels(sample, where), where)

    return lambda pictures, mirror: samples.batched(pictures, read, _Network(made, prepared, mirror).columns)


@dataclasses.dataclass(frozen=True)
class _Network:
    """A network that predicts rows of prepared images, of files and in memory alike."""

    made: Rebuilt
    prepared: Preparation
    mirror: bool

    @property
    def names(self) -> tuple[str, ...]:
        meta = self.made.meta
        return tuple(meta.class_names) or tuple(map(str, range(meta.classes)))

    def columns(self, images: Sequence[np.ndarray]) -> Columns:
        """Predict the rows of a batch of prepared pixels, uint8 (3, height, width) each."""
        task, net, runtime = self.made.recipe.task, self.made.net, self.made.runtime
        image = self.prepared.normal(runtime.to_device({"image": torch.from_numpy(np.stack(images))})["image"])
        with torch.no_grad(), runtime.accelerator.autocast():
            rows = dict(task.predict(net, {"image": image}))
            if self.mirror:
                if "logits" not in rows:
                    expected = "a run that predicts classes"
                    remedy = "leave it out: task.mirror of the recipe decides it for embeddings"
                    raise UserError("--mirror", "a run that only predicts embeddings", expected, remedy)
                other = task.predict(net, {"image": image.flip(-1)})
                both = [x["logits"].float().softmax(1) for x in (rows, other)]
                rows["logits"] = ((both[0] + both[1]) / 2).log()
        return tables.predicted(rows, self.names)


def _reader(data: object, source: Source, prepared: Preparation) -> Callable[[Record], tuple[Record, np.ndarray]]:
    """Return a function that reads a record and its prepared pixels, uint8 (3, height, width)."""
    aligned = source.aligned or kinds.name(data) != "faces"

    def read(record: Record) -> tuple[Record, np.ndarray]:
        pixels = pixels_of(record)
        if not aligned:
            from trainkit.data.face_alignment import align_face

            if record.landmarks is None:
                raise UserError(record.where, "no landmarks", "five points")
            pixels = align_face(pixels, record.landmarks, prepared.side[0], record.where)
        # Drop the encoded image: records wait for their batch.
        return dataclasses.replace(record, data=b""), prepared.pixels(pixels, record.where)

    return read


def _label(label: int | str, names: Sequence[str] | None) -> str:
    return names[label] if names and isinstance(label, int) and 0 <= label < len(names) else str(label)


def pixels_of(record: Record) -> np.ndarray:
    """Decode the image of a record, uint8 (height, width, 3). Raises UserError if it is damaged."""
    data = image_decode.read(record.data, record.where) if isinstance(record.data, Path) else record.data
    return image_decode.decode(data, record.where) if isinstance(data, bytes) else data


def open_pictures(text: str) -> Source:
    """Open local images: a file, a folder, or a set in any format that can be trained on.

    A folder is read with its subfolders; ids are paths relative to it. Raises UserError if there are no images.
    """
    from trainkit.data import hub, image_folder, sources
    from trainkit.data.storage import image_store

    if hub.is_hub(text):
        return sources.named(text)
    path, split = sources.split_of(text)
    if path.is_file() and path.suffix.lower() in image_decode.SUFFIXES:
        return _plain(path.parent, [path.name], text)
    if not path.exists():
        raise UserError(text, "does not exist", "an image, a folder of images, or a data set", "check the path")
    form = sources.form_of(path)
    if form == "packed" and split is None:
        data = image_store.Packed(path)
        # Ignore the classes of evaluation sets.
        found = sources.repacked(data)
        return found if data.manifest["protocol"] is None else dataclasses.replace(found, kind=PLAIN)
    root = path if split is None else path / split
    if form in ("table", "folder", "packed") and root.is_dir():
        found = image_folder.list_images(root)
        # A table among images is not a data set, but most likely an earlier prediction.
        if names := sorted((*found.loose, *found.files), key=lambda name: name.split("/")):
            return _plain(root, names, text)
    if form == "folder":
        raise UserError(text, "no images", f"files {', '.join(sorted(image_decode.SUFFIXES))}", "check the path")
    return sources.open_source(text)


def _plain(root: Path, names: Sequence[str], where: str) -> Source:
    paths = [root / name for name in names]

    def records() -> Iterator[Record]:
        for name, path in zip(names, paths, strict=True):
            yield Record(name, "", path, str(path))

    return Source(PLAIN, where, len(names), records, tuple(paths))
