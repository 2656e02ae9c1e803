"""Predict label maps for images: PNG files of the same size with the class colours as palette.

Images are prepared as in training: resized to the packed size, if there is one, or to the shorter side. Class scores,
not labels, are resized to the size of the file, as in evaluations with `data.score_at: file`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from PIL import Image

from trainkit.data import folders
from trainkit.data.formats import image_decode
from trainkit.errors import UserError, few, number_of
from trainkit.inference import samples
from trainkit.inference.output_folder import Predicted, Request, check_free, write_each, write_file
from trainkit.inference.trained_model import Rebuilt, origin, rebuilt
from trainkit.interfaces import LabelsImages
from trainkit.plots.scenes import palette

if TYPE_CHECKING:
    from trainkit.data.scenes.dataset import Scenes
    from trainkit.data.scenes.files import Scene
    from trainkit.inference.table_writer import Columns

CLASSES = "classes.json"
"""File beside the label maps that lists the classes of their values."""

STRETCHED = 1.25
"""Ratio of the two resize factors of an image above which a warning is printed."""


@dataclass(frozen=True)
class _Picture:
    id: str
    """Path relative to the source folder, without suffix."""
    read: Callable[[], tuple[bytes, str]]
    """Returns the file's bytes and place; called late, because a table may be larger than the memory."""
    where: str


def predict(asked: Request) -> Predicted | None:
    """Write a label map `OUT/<id>.png` for every image at `source`, and `OUT/classes.json`; see `predict.predict`.

    `source` is an image, a folder of images (without subfolders), a split of a set with masks such as `cityscapes#val`,
    or a list `.txt` or `.csv`. With `mirror` it takes twice as long. None if the run's task does not segment images.
    """
    if not isinstance(asked.recipe.task, LabelsImages):
        return None
    found, notes = _pictures(asked.source)
    meta, recipe, out = asked.meta, asked.recipe, asked.out
    size = cast("Scenes", recipe.data).size
    targets = [(out / f"{picture.id}.png", picture) for picture in found]
    check_free(out, [*(target for target, _ in targets), out / CLASSES])
    stretched: list[str] = []
    colours = meta.class_colours or palette(meta.classes)
    with rebuilt(asked.folder, recipe, meta) as made:

        def label(picture: _Picture) -> bytes:
            data, where = picture.read()
            pixels = image_decode.decode(data, where)
            labels = _label(pixels, where, made, asked.mirror)
            if _is_stretched(pixels, size):
                stretched.append(picture.id)
            return _encoded(labels, colours)

        written, damaged = write_each(targets, label, write_file, asked.on_progress)
    if written:
        classes = [
            {"value": value, "name": name, "colour": list(colour)}
            for value, (name, colour) in enumerate(zip(meta.class_names, colours, strict=True))
        ]
        said = {"classes": classes, **origin(asked.folder, made.weights, meta)}
        write_file(out / CLASSES, (json.dumps(said, indent=1) + "\n").encode())
    if stretched and size is not None:
        sides = "{} x {} pixels".format(*size)
        many = number_of(len(stretched), "images")
        notes.append(f"{many} resized to {sides} with another aspect ratio: {few(stretched)}")
    return Predicted(tuple(written), tuple(damaged), tuple(notes), meta.class_names, made.weights)


def predictor(made: Rebuilt) -> Callable[[Sequence[Any], bool], Columns]:
    """Return the function that makes label maps of images in memory; see `predictor.Predictor`."""
    if not isinstance(made.recipe.task, LabelsImages):
        found = "its task does not segment images"
        raise UserError(f"recipe {made.recipe.name}", found, "task segment2d", "use another run")

    def predict(pictures: Sequence[Any], mirror: bool) -> Columns:
        return samples.each(pictures, lambda one, where: _label(samples.pixels(one, where), where, made, mirror))

    return predict


def _pictures(source: str) -> tuple[list[_Picture], list[str]]:
    """Find the images to predict, in the order of names, and notes about those left out.

    Raises UserError if there is none, or two images would have the same label map.
    """
    path, suffixes = Path(source), ", ".join(sorted(image_decode.SUFFIXES))
    notes: list[str] = []
    if path.is_dir():
        found = [_of_file(file, str(file)) for file in _below(path)]
        if not found:
            remedy = "name a folder with images, or a split of a set of images and masks as FOLDER#val"
            raise UserError(source, "no images", f"files {suffixes}", remedy)
    elif path.is_file() and path.suffix.lower() in image_decode.SUFFIXES:
        found = [_of_file(path, source)]
    elif "#" in source or path.suffix.lower() in (".txt", ".csv"):
        found = list(_of_set(source, notes))
    else:
        there = "not an image" if path.exists() else "does not exist"
        raise UserError(source, there, f"a folder of images, or a file {suffixes}", "check the path")
    seen: dict[str, _Picture] = {}
    for picture in found:
        # File systems may ignore case.
        other = seen.setdefault(picture.id.casefold(), picture)
        if other is not picture:
            both = f"the same output file as {other.where}: {picture.id}.png"
            raise UserError(picture.where, both, "names that differ before their suffix", "rename one of them")
    return found, notes


def _of_file(file: Path, where: str) -> _Picture:
    return _Picture(file.stem, lambda: (image_decode.read(file, where), where), where)


def _of_set(source: str, notes: list[str]) -> Iterator[_Picture]:
    from trainkit.data.scenes import sources

    found = sources.open_scenes(source, "val")
    notes += found.left_out
    for row, id in enumerate(found.ids()):
        name, where = PurePosixPath(id), f"{found.where} ({id})"
        if name.is_absolute() or ".." in name.parts:
            raise UserError(where, f"name {id!r}", "a relative path without ..", "rename it in the list")
        short = name.with_suffix("") if name.suffix.lower() in image_decode.SUFFIXES else name
        yield _Picture(str(short), partial(_bytes_of, found.scenes, row), where)


def _bytes_of(scenes: Sequence[Scene], row: int) -> tuple[bytes, str]:
    from trainkit.data.scenes.files import picture_bytes

    return picture_bytes(scenes[row]), scenes[row].where


def _below(folder: Path) -> list[Path]:
    _, inner, rest = next(folders.walk(folder))
    names = sorted(filter(image_decode.is_called_picture, (*inner, *rest)))
    folders.check_names(str(folder), names)
    return [folder / name for name in names]


def _label(pixels: np.ndarray, where: str, made: Rebuilt, mirror: bool) -> np.ndarray:
    """Predict the class of every pixel of an image (height, width, 3), uint8 (height, width)."""
    import torch

    from trainkit.data import augment
    from trainkit.data.scenes.dataset import CROP_LIMIT

    data, task = cast("Scenes", made.recipe.data), cast(LabelsImages, made.recipe.task)
    seen = pixels if data.size is None else image_decode.fit(pixels, data.size, where, "stretch")
    scale = float(data.base(np.array([seen.shape[:2]]))[0])
    if seen.shape[0] * seen.shape[1] * scale**2 > CROP_LIMIT:
        found = f"{pixels.shape[1]} x {pixels.shape[0]} pixels, of which data.short_side={data.short_side} makes more"
        raise UserError(where, found, f"at most {CROP_LIMIT:,} pixels", "cut the image into parts")
    image = torch.from_numpy(np.ascontiguousarray(seen.transpose(2, 0, 1)))[None].to(made.runtime.device)
    image = augment.normalise(image, data.mean, data.std)
    with torch.no_grad(), made.runtime.accelerator.autocast():
        found = task.probabilities(made.net, image, (round(scale, 6),), (False, mirror), size=pixels.shape[:2])
    return found.argmax(1)[0].to(torch.uint8).cpu().numpy()


def _is_stretched(pixels: np.ndarray, size: tuple[int, int] | None) -> bool:
    if size is None:
        return False
    height, width = (new / old for new, old in zip(size, pixels.shape[:2], strict=True))
    return max(height / width, width / height) > STRETCHED


def _encoded(labels: np.ndarray, colours: Sequence[Sequence[int]]) -> bytes:
    """Encode labels as a PNG with the class colours as palette; equal labels give equal bytes."""
    picture = Image.fromarray(labels)
    picture.putpalette([value for colour in colours for value in colour])
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()
