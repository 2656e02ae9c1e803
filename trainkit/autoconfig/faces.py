"""Fitting recipes of faces: people to train on, and pairs of other people."""

from __future__ import annotations

import functools
from typing import cast

import numpy as np

from trainkit.autoconfig import fit as fitting
from trainkit.autoconfig.fit import Fitted
from trainkit.autoconfig.images import HOLD_OUT, Looked, look, open_source, said
from trainkit.autoconfig.own_images import taken
from trainkit.config.schema import Recipe
from trainkit.data import folders, hub, pairs_csv
from trainkit.data.faces.dataset import Faces
from trainkit.data.record import Source
from trainkit.data.sources import HELD_OUT
from trainkit.data.split import Holdout
from trainkit.errors import UserError, number_of
from trainkit.paths import locate

SEED = 0
"""Of the choice of people and pairs: the same for all recipes of a set, as for a teacher and its student."""

FEW = 4
"""People who are held out at least, where there are twice as many."""

LARGER = 2
"""How much larger than what is trained on images may be before that is noted."""

MANY = 200
"""Pairs below which that is noted: an accuracy of 0.9 over so many is known to 0.02 (one standard deviation)."""


def faces(fitted: Fitted, recipe: Recipe, text: str) -> None:
    """Fit a recipe with data `faces`: people to train on, and pairs of other people."""
    fitting.refuse(text, "images of people")
    text = taken(fitted, text)
    opened = functools.partial(open_source, nested=False, columns=fitted.columns)
    train, splits = fitting.parts(text, opened)
    data = cast(Faces, recipe.data)
    size = data.image_size
    source = opened(train)
    looked = look(source, (size, size))
    if len(looked.counts) < 2:
        raise UserError(train, f"images of {len(looked.counts)} people", "one folder per person: <person>/<image>")
    fitted.drop("data.hold_out", "data.fit", "task.class_weights", *(["data.flip"] if data.flip else []))
    fitted.put("data.train", train)
    sets, count = _verification(text), looked.total
    if splits and not sets:
        place = text.partition("#")[0]
        scored = next(iter(splits.values())).replace("#", "/")
        remedy = f"name the folder of all people, from which some are held out, or write {scored}/pairs.csv"
        raise UserError(place, "no evaluation data", "pairs.csv or .bin", remedy)
    if not sets:
        sets = {"val": HELD_OUT}
        count = _hold_out(fitted, source, train)
    _shape(fitted, looked, size, train)
    fitting.score(fitted, sets)
    fitting.measure(fitted, count)
    fitted.seen += said(train, source, looked, "people")


def _shape(fitted: Fitted, looked: Looked, size: int, train: str) -> None:
    """Say how images become squares, which are cut where they are none; and how large."""
    if odd := int((looked.shapes[:, 0] != looked.shapes[:, 1]).sum()):
        found = f"{odd} of {len(looked.shapes)} images are not square"
        fitted.put("data.fit", "crop")
        fitted.decide("data.fit", f"{found}: check that faces are centred; scores of aligned ones are higher")
        fitted.seen.append(f"{train}: {found}; the largest centre square of each is used")
    least, median = int(looked.shapes.min()), int(np.median(looked.shapes.min(1)))
    if least < size:
        fitted.put("data.image_size", least, f"the smallest of {len(looked.shapes)} sampled images")
    elif median >= LARGER * size:
        fitted.put("data.image_size", size)
        fitted.decide("data.image_size", f"the median side is {median} px; published networks use 112")


def _hold_out(fitted: Fitted, source: Source, train: str) -> int:
    """Hold people out and draw pairs of them into a file beside the recipe, or take the one that is there.

    Returns how many images are left to train on. Raises UserError for too few people, or too few images of each.
    """
    people: dict[str, list[str]] = {}
    if source.labelled is not None:
        ids, labels = source.labelled()
        labelled = zip(ids, labels.tolist(), strict=True)
    else:
        labelled = ((record.id, record.label) for record in source.records())
    for id, label in labelled:
        name = source.names[label] if source.names and isinstance(label, int) else str(label)
        people.setdefault(name, []).append(id)
    file = fitted.new.with_name(f"{_called(train)}_pairs.csv")
    fitted.put("data.hold_out", fitting.as_named(file))
    if file.exists():
        shown = set(pairs_csv.read_names(file, lambda name, where: None)[0])
        held = [name for name, images in people.items() if not shown.isdisjoint(images)]
        if len(held) < 2:
            remedy = "move it away to generate other pairs"
            raise UserError(str(file), f"pairs of other images than those of {train}", "pairs of its images", remedy)
        many = f"the pairs in {file.name}"
        said = "as listed in an existing file"
    else:
        held, drawn = _drawn(people, train)
        fitted.files[file] = pairs_csv.written(drawn)
        many = f"{file.name} has {len(drawn)} pairs of them, half of the same person"
        said = "chosen at random" if len(drawn) >= MANY else f"chosen at random; {len(drawn)} pairs distinguish little"
    of_all = f"{number_of(len(held), 'people')} of {len(people)}"
    fitted.decide("data.hold_out", f"{of_all}, {said}; no person may be in two folders")
    fitted.seen.append(f"{train}: {of_all} are held out of training; {many}")
    return sum(len(images) for images in people.values()) - sum(len(people[name]) for name in held)


def _drawn(people: dict[str, list[str]], train: str) -> tuple[list[str], list[tuple[str, str, int]]]:
    """Choose a fifth of the people, and as many more as ten pairs of one person take; return them and their pairs."""
    names = list(people)
    if len(names) < FEW:
        expected = f"{FEW} or more: two for training, two for evaluation"
        raise UserError(train, f"{len(names)} people and no evaluation pairs", expected)
    count = max(round(len(names) * HOLD_OUT / 100), min(FEW, len(names) // 2))
    while True:
        held = [names[place] for place in Holdout(count / len(names)).choose(names, SEED).tolist()]
        try:
            return held, pairs_csv.draw({name: people[name] for name in held}, train, seed=SEED)
        except UserError:
            if count >= len(names) - 2:
                raise
            count += 1


def _called(train: str) -> str:
    """Return a name for files about a set: that of its folder, with the one above where it is called as a split."""
    base, _, split = train.partition("#")
    parts = [part for part in (*base.split("/")[-2:], split) if part]
    last = parts[-1:] if parts[-1].lower() not in folders.SPLIT_NAMES else parts[-2:]
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in "_".join(last))


def _verification(text: str) -> dict[str, str]:
    """Verification sets in a folder and the folders in it, by name: pairs, and InsightFace's files."""
    base = text.partition("#")[0]
    root = None if hub.is_hub(text) else locate(base)
    if root is None or not root.is_dir():
        return {}
    found: dict[str, str] = {}
    files = (*root.glob("pairs.csv"), *root.glob("*/pairs.csv"), *root.glob("*.bin"))
    for file in sorted(folders.visible(files), key=lambda file: (len(file.parts), file.name)):
        name = file.stem if file.suffix == ".bin" or file.parent == root else file.parent.name
        name = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_-") else "_" for letter in name)
        if name != "train":
            found[name] = f"{base}/{file.relative_to(root).as_posix()}"
    return found
