"""Verify sets of scenes: packed as a training packs them, with what is wrong or odd about each split."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainkit.data import leakage, sources, verification
from trainkit.data.scenes import checks, files, label_maps
from trainkit.data.scenes import sources as scene_sources
from trainkit.data.scenes.dataset import packed
from trainkit.data.scenes.label_maps import Labels
from trainkit.data.scenes.sources import SceneSource
from trainkit.data.threads import attempt, each, threads
from trainkit.data.verification import Examined
from trainkit.errors import UserError, few

_LISTS = frozenset({".txt", ".csv"})
_PARTS = ("train", "val", "test")


def holds_scenes(path: Path | str) -> bool:
    """Return whether `path` is a list, or holds images and masks in a known layout."""
    text = str(path)
    if Path(text).suffix.lower() in _LISTS or text.startswith(scene_sources.SAMPLE):
        return True
    if (sources.split_of(text)[0] / "manifest.json").is_file():
        return False
    try:
        return bool(_opened(text)[0])
    except UserError:
        return False


def verify(path: Path | str, *, against: Sequence[Path | str] = (), names: Sequence[str] | None = None) -> list[str]:
    """Pack the set at `path` with its splits, as a training does. Sentences; empty when all is well.

    Damage, which a training refuses: what cannot be decoded, masks of another size than their images, values or colours
    that stand for no class, sets without a label. What begins with `warning: ` is only odd: classes without a pixel,
    images twice in a set, in two of its splits or in one of `against`. `names` are those of the values 0, 1, ... in
    masks, where the layout does not know; without any, whatever values there are count as classes.
    """
    try:
        labels = None if names is None else label_maps.numbered(names)
    except ValueError as error:
        raise UserError("--names", str(error)) from None

    def find(place: Path | str) -> list[Examined]:
        opened, lost = _opened(str(place))
        return [*(_examined(source, labels) for source in opened), *(Examined(where="", damage=[one]) for one in lost)]

    return verification.verified(find, path, against)


def _examined(source: SceneSource, labels: Labels | None) -> Examined:
    """Pack a set, and say what is wrong or odd about it."""
    odd = [f"{len(source.left_out)} left out: {few(source.left_out)}"] if source.left_out else []
    try:
        if (labels := labels or source.labels) is None:
            labels = guessed(source)
            what = f"{len(labels.names)} {'colours' if labels.coloured else 'values'}"
            odd.append(f"its {what} have no class names, so each counts as a class: {few(labels.names, 20)}")
        masks, images = packed(source, labels, None)
    except UserError as error:
        return Examined(where=source.where, damage=[str(error)])
    counts, prints = np.asarray(masks.counts), np.asarray(images.contents())
    numbers = not labels.coloured
    error = checks.mistake(source.where, labels.names, masks.there, counts, train=False, numbers=numbers)
    odd += checks.oddities(source.ids(), masks, prints)
    damage = [str(error)] if error else []
    return Examined(where=source.where, held=leakage.held_in(images), damage=damage, odd=odd)


def _opened(text: str) -> tuple[list[SceneSource], list[str]]:
    """Open each split at a path, else the path as it is; and tell of splits that are there and cannot be opened.

    Raises UserError where there is neither.
    """
    path, split = sources.split_of(text)
    if path.exists():
        text = os.path.abspath(text)  # what a command names begins here, and not at the data root
    found: dict[str, SceneSource] = {}
    lost: list[str] = []
    for part in _PARTS if split is None and "#" not in text and not path.is_file() else ():
        try:
            source = scene_sources.open_scenes(f"{text}#{part}")
            found.setdefault(source.where, source)
        except UserError as error:
            if "no such split" not in error.found and "no split" not in error.found:
                lost.append(str(error))
    # Without splits the error of the set itself says most.
    return (list(found.values()), lost) if found else ([scene_sources.open_scenes(text)], [])


def guessed(source: SceneSource) -> Labels:
    """Take each value or colour of the masks for a class.

    Raises UserError where these are too few or too many, or no mask can be read.
    """
    codes: set[tuple[int, ...]] = set()
    unread: UserError | None = None
    for some in each(attempt(lambda scene: label_maps.codes_in(files.read_mask(scene))), source.scenes, threads()):
        if isinstance(some, UserError):
            unread = unread or some
            continue
        codes |= some
        if len(codes) > label_maps.CODE_LIMIT:
            break
    if unread is not None and not codes:
        raise unread
    try:
        return label_maps.guessed(codes)
    except ValueError as error:
        raise UserError(source.where, str(error)) from None
