"""Fitting recipes of faces: people to train on, and pairs of other people."""

from __future__ import annotations

import functools
from typing import cast

from trainkit.autoconfig import fit as fitting
from trainkit.autoconfig.fit import Fitted
from trainkit.autoconfig.images import LARGER, look, open_source, said
from trainkit.config.schema import Recipe
from trainkit.data import hub
from trainkit.data.faces.dataset import Faces
from trainkit.errors import UserError
from trainkit.paths import locate


def faces(fitted: Fitted, recipe: Recipe, text: str) -> None:
    """Fit a recipe with data `faces`: people to train on, and pairs of other people."""
    fitting.refuse_sample(text)
    fitting.refuse(text, "pictures of people")
    train, _ = fitting.parts(text, _open_faces)
    data = cast(Faces, recipe.data)
    size = data.image_size
    source = _open_faces(train)
    looked = look(source, (size, size))
    if len(looked.counts) < 2:
        raise UserError(train, f"pictures of {len(looked.counts)} people", "a folder for each: <person>/<picture>")
    if (odd := looked.shapes[looked.shapes[:, 0] != looked.shapes[:, 1]]).size:
        found = f"{len(odd)} of {len(looked.shapes)} pictures are not square, such as {odd[0][0]} x {odd[0][1]}"
        remedy = "align them by five points: trainkit data import --align SOURCE OUT"
        raise UserError(train, found, "squares, eyes and mouth where all faces have them", remedy)
    sets = _verification(text)
    if not sets:
        place = text.partition("#")[0]
        remedy = f"put some people into {place}/val, others into {place}/train, and `trainkit data pairs {place}/val`"
        raise UserError(place, "nothing to be scored on", "pairs.csv or .bin", remedy)
    fitted.put("data.train", train)
    least = int(looked.shapes.min())
    if least < size:
        fitted.put("data.image_size", least, f"the smallest of {len(looked.shapes)} that were looked at")
    elif looked.median[0] >= LARGER * size:
        fitted.put("data.image_size", size)
        fitted.decide("data.image_size", f"pictures have {looked.median[0]} in the median; published networks see 112")
    if data.flip:
        fitted.drop("data.flip")
    fitted.drop("task.class_weights")
    fitting.score(fitted, sets)
    fitting.measure(fitted, looked.total)
    fitted.seen += said(train, source, looked, "people")


_open_faces = functools.partial(open_source, nested=False)


def _verification(text: str) -> dict[str, str]:
    """Verification sets in a folder and the folders in it, by name: pairs, and InsightFace's files."""
    base = text.partition("#")[0]
    root = None if hub.is_hub(text) else locate(base)
    if root is None or not root.is_dir():
        return {}
    found: dict[str, str] = {}
    files = (*root.glob("pairs.csv"), *root.glob("*/pairs.csv"), *root.glob("*.bin"))
    for file in sorted(files, key=lambda file: (len(file.parts), file.name)):
        name = file.stem if file.suffix == ".bin" or file.parent == root else file.parent.name
        name = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_-") else "_" for letter in name)
        if name != "train":
            found[name] = f"{base}/{file.relative_to(root).as_posix()}"
    return found
