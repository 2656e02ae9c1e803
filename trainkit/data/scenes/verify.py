"""Read every image and mask of sets of scenes, and name what is damaged or odd.

What a training refuses when it starts is named here as well, with everything else that is wrong, and nothing is
written: `trainkit data verify FOLDER`, or a list. Sets are compared with each other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainkit.data import sources, verification
from trainkit.data.cache import Progress
from trainkit.data.formats import image_decode
from trainkit.data.leakage import Held
from trainkit.data.scenes import checks, files, label_maps, mask_store
from trainkit.data.scenes import sources as scene_sources
from trainkit.data.scenes.files import Scene
from trainkit.data.scenes.label_maps import Labels
from trainkit.data.scenes.sources import SceneSource
from trainkit.data.storage import image_store
from trainkit.data.threads import attempt, each, threads
from trainkit.data.verification import WARNING, Examined, Step
from trainkit.errors import UserError, few

_LISTS = frozenset({".txt", ".csv"})
_PARTS = ("train", "val", "test")


@dataclass(frozen=True, kw_only=True)
class Audit(Examined):
    """Sizes and classes of a set whose files were all read. Images that cannot be used have no row."""

    names: tuple[str, ...]
    """Of the classes, in the order of their numbers."""
    ids: tuple[str, ...]
    """Name of each image in its source."""
    shapes: np.ndarray
    """int64 (n, 2), height and width of each."""
    counts: np.ndarray
    """int64 (n, classes + 1), pixels of each class, and last of those without one."""


def examine(source: SceneSource, labels: Labels, step: Step = lambda: None, decode: bool = True) -> Audit:
    """Read all images and masks of a set; without `decode`, of images only the headers."""
    where, names = source.where, labels.names
    found = list(verification.read_all(partial(_read, labels=labels, decode=decode), source.scenes, step))
    good = [one for one in found if isinstance(one, _Seen)]
    errors = [one for one in found if isinstance(one, UserError)]
    ids = tuple(seen.id for seen in good)
    counts = np.asarray([seen.counts for seen in good], np.int64).reshape(-1, len(names) + 1)
    prints, masks = np.asarray([(seen.picture, seen.mask) for seen in good], np.uint64).reshape(-1, 2).T
    prints = prints if decode else np.arange(len(good), dtype=np.uint64)
    damage = verification.damage(where, "images cannot be used", errors, len(source))
    there = (counts[:, :-1] > 0).sum(0)
    if good and (error := checks.mistake(where, names, there, counts, train=False, numbers=not labels.coloured)):
        damage.append(str(error))
    odd = [f"{len(source.left_out)} left out: {few(source.left_out)}"] if source.left_out else []
    odd += checks.oddities(ids, names, there, counts, prints, masks)
    if turned := [seen.id for seen in good if seen.turned]:
        odd.append(
            f"{len(turned)} of {len(ids)} images are rotated or mirrored by their EXIF orientation, and their "
            f"sizes do not show whether their masks are too: {few(turned)}"
        )
    return Audit(
        where=where,
        held=Held(prints=prints, names=lambda places: [ids[place] for place in places]),
        damage=damage,
        odd=odd,
        names=names,
        ids=ids,
        shapes=np.asarray([seen.shape for seen in good], np.int64).reshape(-1, 2),
        counts=counts,
    )


class _Seen(NamedTuple):
    """An image that can be used."""

    id: str
    shape: tuple[int, int]
    counts: np.ndarray
    picture: int
    mask: int
    turned: bool


def _read(scene: Scene, labels: Labels, decode: bool) -> _Seen:
    shape, turn = files.header(scene)
    picture = 0
    if decode:
        pixels = image_decode.decode(files.picture_bytes(scene), scene.where)
        shape, picture = pixels.shape[:2], image_store.content(pixels.transpose(2, 0, 1))
    classes = files.read_classes(scene, labels, shape)
    # By a quarter (5 to 8) shows in the size, unless that is square.
    turned = turn in range(2, 9 if shape[0] == shape[1] else 5)
    counts, mask = mask_store.counted(classes, len(labels.names)), mask_store.fingerprint(classes)
    return _Seen(scene.id, shape, counts, picture, mask, turned)


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


def verify(
    path: Path | str,
    *,
    against: Sequence[Path | str] = (),
    names: Sequence[str] | None = None,
    on_progress: Progress | None = None,
) -> list[str]:
    """Read the set at `path` with its splits. Sentences; empty when all is well.

    Damage, which a training refuses: what cannot be decoded, masks of another size than their images, values or colours
    that stand for no class, sets without a label. What begins with `warning: ` is only odd: classes without a pixel,
    images twice in a set, in two of its splits or in one of `against`. `names` are those of the values 0, 1, ... in
    masks, where the layout does not know; without any, whatever values there are count as classes.
    """
    try:
        sets, said = _sets(path, names)
    except UserError as error:
        return [str(error)]
    others = [one for place in against for one in _sets(place, names)[0]]
    step = verification.steps(on_progress, sum(len(source) for source, _ in (*sets, *others)))
    own, compared = ([examine(*one, step) for one in some] for some in (sets, others))
    return said + verification.sentences(own, compared)


def _sets(path: Path | str, names: Sequence[str] | None) -> tuple[list[tuple[SceneSource, Labels]], list[str]]:
    """Open the set at a path, or its splits, with what masks hold; and tell of those that cannot be opened.

    Raises UserError where there is none.
    """
    opened, lost = _opened(str(path))
    sets: list[tuple[SceneSource, Labels]] = []
    for source in opened:
        try:
            labels = label_maps.numbered(names) if names is not None else source.labels
            if labels is None:
                labels = guessed(source)
                what = f"{len(labels.names)} {'colours' if labels.coloured else 'values'}"
                said = f"its {what} have no class names, so each counts as a class: {few(labels.names, 20)}"
                lost.append(f"{WARNING}{source.where}: {said}")
            sets.append((source, labels))
        except ValueError as error:
            raise UserError("--names", str(error)) from None
        except UserError as error:
            lost.append(str(error))
    if not sets:
        raise UserError(str(path), "; ".join(lost))
    return sets, lost


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
