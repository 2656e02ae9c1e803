"""Describe and verify sets of people: every image is read, and what a training would leave out is counted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from trainkit.data import hub, sources, verification
from trainkit.data.cache import Progress
from trainkit.data.formats import image_decode
from trainkit.data.leakage import Held
from trainkit.data.people import index as people_index
from trainkit.data.people import layouts, searches, tokenizer
from trainkit.data.people import sources as people_sources
from trainkit.data.people.index import PeopleIndex
from trainkit.data.people.tokenizer import Captions
from trainkit.data.verification import Examined, Step
from trainkit.errors import UserError, few, number_of
from trainkit.interfaces import MODALITIES, TEXT


def holds_people(path: Path | str) -> bool:
    """Return whether `path` is an index of people, a folder with one, or a published layout."""
    if str(path).startswith("sample:") or hub.is_hub(path):
        return str(path) == people_sources.SAMPLE
    try:
        place, _ = sources.split_of(path)
        if place.is_file():
            return people_sources.is_index(place)
        index = people_sources.index_in(place)
        return people_sources.is_index(index) if index is not None else layouts.kind_of(place) is not None
    except UserError:
        return False


def described(path: Path | str) -> list[str]:
    """Describe the set at `path` in lines. Raises UserError where it cannot be read."""
    index = people_index.indexed(str(path), "val")
    counts = np.bincount(index.modality, minlength=len(MODALITIES)).tolist()
    kinds = ", ".join(f"{name} {count:,}" for name, count in zip(MODALITIES, counts, strict=True) if count)
    distractors = int((index.person < 0).sum())
    lines = [
        f"{index.where}: {index.kind}, {len(index):,} records of {number_of(len(index.persons), 'people', 'person')}",
        f"records: {kinds}" + f"; {distractors:,} are distractors" * bool(distractors),
        f"cameras: {few(index.cameras) or 'not known'}",
    ]
    if counts[TEXT]:
        lines.append(f"captions: {Captions().describe()}")
    return [*lines, *_search(index), *index.left_out]


def verify(path: Path | str, *, against: Sequence[Path | str] = (), on_progress: Progress | None = None) -> list[str]:
    """Read the set at `path` and every image of it. Returns sentences; empty when all is well.

    Damage, which a training refuses: errors of the index, images that cannot be decoded. What begins with `warning: `
    is only odd: records that are left out, captions without words, queries without a match, and people who are also in
    one of the sets `against`.
    """
    try:
        index = people_index.indexed(str(path), "val")
    except UserError as error:
        return [str(error)]
    others = [_known(people_index.indexed(str(other), "val")) for other in against]
    files = [os.path.join(index.root, id) for id in np.asarray(index.ids(), object)[index.picture >= 0].tolist()]
    own = _examine(index, files, verification.steps(on_progress, len(files)))
    return verification.sentences([own], others)


def _examine(index: PeopleIndex, files: Sequence[str], step: Step) -> Examined:
    damage = verification.damaged(index.where, "images cannot be read", _decode, files, step)
    odd = [*index.left_out, *_captions(index), *(said for said in _search(index) if searches.loses(said))]
    return replace(_known(index), damage=damage, odd=odd)


def _known(index: PeopleIndex) -> Examined:
    """Return what a set is compared with others by: its people."""
    held = Held(
        prints=np.empty(0, np.uint64), names=lambda places: [], subjects=frozenset(index.persons), kind="people"
    )
    return Examined(where=index.where, held=held)


def _decode(files: Sequence[str]) -> None:
    for file in files:
        image_decode.decode(image_decode.read(Path(file), file), file)


def _captions(index: PeopleIndex) -> list[str]:
    texts, tokens = [text for text in index.words() if text], Captions().make()
    return tokenizer.odd(tokens, texts, tokenizer.table(tokens, texts)) if texts else []


def _search(index: PeopleIndex) -> list[str]:
    """Return the rule of cameras of the set as an evaluation set; why it is none, where it is not."""
    try:
        found = searches.searches(index, np.arange(len(index)), tuple(np.unique(index.modality)), index.where, False)
    except UserError as error:
        return [f"no evaluation set: {error}"]
    return [found[""][1].rule]
