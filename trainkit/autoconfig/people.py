"""Fit recipes of people: modalities, P x K batches, and people held out where nothing splits a set."""

from __future__ import annotations

import functools
import logging
from typing import cast

import numpy as np

from trainkit.autoconfig import fit, images
from trainkit.autoconfig.fit import Fitted
from trainkit.config.schema import Recipe
from trainkit.data import hub
from trainkit.data.people import index as people_index
from trainkit.data.people import layouts
from trainkit.data.people.dataset import People
from trainkit.data.people.pk_sampler import Sampler
from trainkit.data.people.sources import DERIVED, index_in
from trainkit.data.sources import HELD_OUT
from trainkit.errors import UserError, number_of
from trainkit.interfaces import MODALITIES, RGB
from trainkit.paths import locate

_log = logging.getLogger(__name__)

HOLD_OUT = 25
"""Per cent of the people that are kept from training where nothing splits a set."""


def people(fitted: Fitted, recipe: Recipe, text: str) -> None:
    """Fit a recipe with data `people`. A folder of photographs of people stands for what can be derived from it."""
    fit.refuse(text, "records of people, or <person>/<image>.jpg")
    text = _derived(text)
    opened = functools.partial(people_index.indexed, columns=fitted.columns)
    train, sets = fit.parts(text, opened)
    index = opened(train)
    there = np.unique(index.person[index.person >= 0])
    if len(there) < 2:
        raise UserError(train, f"records of {number_of(len(there), 'people', 'person')}", "2 or more")
    data = cast(People, recipe.data)
    fitted.drop("data.modalities", "data.hold_out")
    fitted.put("data.train", train)
    persons = len(there)
    if not sets:
        if persons < 4:
            raise UserError(train, f"records of {persons} people", "4 or more: two for training, two for evaluation")
        fitted.put("data.hold_out", f"{max(HOLD_OUT, -(-200 // persons))}%", "of the people")
        sets = {"val": HELD_OUT}
        persons -= max(2, round(persons * HOLD_OUT / 100))
    looked = images.look(index.pictures(), data.side, data.fit)
    images.values(fitted, recipe, looked)
    images.resize(fitted, looked, data.side)
    counts = np.bincount(index.modality, minlength=len(MODALITIES))
    records = round(len(index) * persons / len(there))
    block = _sampler(fitted, data.sampler, persons, alone=not counts[RGB + 1 :].any())
    if text.startswith(DERIVED):
        fitted.decide(
            "data.train",
            "infrared, pencil, sketch and text are computed from photographs here: no evidence for real ones",
        )
    elif not counts[RGB + 1 :].any() and len(index.cameras) < 2:
        found = "are not known" if not index.cameras else f"are one, {index.cameras[0]}"
        fitted.decide("data.train", f"cameras {found}: consecutive images match each other easily")
    fit.score(fitted, sets)
    each = fitted.get("data.sampler.each")
    fit.measure(fitted, records if fitted.get("data.sampler.epoch") == "records" else persons * each, block)
    kinds = ", ".join(f"{name} {count}" for name, count in zip(MODALITIES, counts.tolist(), strict=True) if count)
    fitted.seen.append(f"{train}: {len(index)} records of {len(there)} people ({kinds})")
    fitted.seen += [f"{train}: {said}" for said in index.left_out]


def _derived(text: str) -> str:
    """A folder of folders of photographs as what is derived from them; others as they are."""
    if text.startswith(DERIVED) or "#" in text or hub.is_hub(text):
        return text
    place = locate(text)
    if not place.is_dir() or index_in(place) is not None:
        return text
    if layouts.kind_of(place) is not None:
        return text
    _log.warning(
        "%s: computing the other modalities from the photographs, once; 3,500 photographs take 10 to 20 s", text
    )
    return DERIVED + text


def _sampler(fitted: Fitted, spec: Sampler, persons: int, alone: bool) -> int:
    """Set people and records of a P x K block, of no more people than there are; return the records of a block."""
    if alone:  # in RGB alone nothing else asks for it
        fitted.drop("task.sdm")
        if spec.name != "pk":
            known = {"name": "pk", "people": spec.people, "each": spec.each, "epoch": "records"}
            fitted.put("data.sampler", known, "people with RGB images only")
    many = min(spec.people, persons)
    block = many * spec.each
    if many < spec.people:
        fitted.put("data.sampler.people", many)
        fitted.notes["data", "sampler"] = fit.Note(f"{persons} people for training", False)
    if block != spec.block:
        fitted.put("train.batch_size", block, "people x each of the sampler")
        fitted.put("train.micro_batch", block)
    return block
