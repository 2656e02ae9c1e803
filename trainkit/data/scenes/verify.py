"""Reading every image and mask of sets of scenes, naming what is damaged or odd, and saying what a set is like.

What a training refuses when it starts is named here as well, with everything else that is wrong, and nothing is
written: `trainkit data verify RECIPE.yaml`, or the list or folder of a set alone. Sets are compared with each other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainkit.data import hub, kinds, sources, verification
from trainkit.data.cache import Progress
from trainkit.data.formats import image_decode
from trainkit.data.leakage import Held
from trainkit.data.scenes import files, label_maps, mask_store
from trainkit.data.scenes import sources as scene_sources
from trainkit.data.scenes.files import Scene
from trainkit.data.scenes.label_maps import Labels
from trainkit.data.scenes.lost_objects import Fates, Tally, fates
from trainkit.data.scenes.oddities import oddities
from trainkit.data.scenes.sources import SceneSource
from trainkit.data.split import key as key_of
from trainkit.data.storage import image_store
from trainkit.data.threads import attempt, each, threads
from trainkit.data.verification import WARNING, Examined, Mistake, Step
from trainkit.data.verify_images import sizes
from trainkit.errors import UserError, few

if TYPE_CHECKING:
    from trainkit.data.scenes.dataset import Scenes

_RECIPES = frozenset({".yaml", ".yml"})
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


@dataclass(frozen=True)
class NamedSet:
    """A set whose files are to be read, and how its masks are."""

    name: str
    """The key of a recipe that names it; else its place."""
    source: SceneSource
    labels: Labels
    """Content of its masks."""
    size: tuple[int, int] | None = None
    """Height and width to which a recipe brings masks; None for as they are."""
    train: bool = True
    """Whether something must be left of each class, as it is trained on."""

    @property
    def where(self) -> str:
        """Key and place."""
        return self.name if self.name == self.source.where else f"{self.name} ({self.source.where})"

    def examine(self, step: Step = lambda: None, decode: bool = True) -> Audit:
        """Read all images and masks; without `decode`, of images only the headers."""
        where, names = self.where, self.labels.names
        tally = Tally(len(names), self.source.is_painted)
        good: list[_Seen] = []
        errors: list[UserError] = []
        read = partial(_read, labels=self.labels, decode=decode, size=self.size)
        for seen in verification.read_all(read, self.source.scenes, step):
            if isinstance(seen, UserError):
                errors.append(seen)
                continue
            good.append(seen)
            tally.add(seen.id, seen.fates, seen.white)
        ids, objects = tuple(seen.id for seen in good), tally.objects(names)
        counts = np.asarray([seen.counts for seen in good], np.int64).reshape(-1, len(names) + 1)
        pictures, masks = np.asarray([(seen.picture, seen.mask) for seen in good], np.uint64).reshape(-1, 2).T
        pictures = pictures if decode else np.arange(len(good), dtype=np.uint64)
        damage = verification.damage(where, "images cannot be used", errors, len(self.source.scenes))
        if len(ids) and (error := objects.error(where, names, counts[:, :-1].sum(0), self.train)):
            damage.append(str(error))
        left_out = self.source.left_out
        odd = [f"{len(left_out)} left out: {few(left_out)}"] if left_out else []
        odd += oddities(ids, names, counts, pictures, masks, objects, [seen.id for seen in good if seen.turned])
        return Audit(
            where=where,
            held=Held(prints=pictures, names=lambda places: [ids[place] for place in places]),
            damage=damage,
            odd=odd,
            names=names,
            ids=ids,
            shapes=np.asarray([seen.shape for seen in good], np.int64).reshape(-1, 2),
            counts=counts,
        )


def holds_scenes(path: Path | str) -> bool:
    """Return whether `path` is a recipe, a list, or holds images and masks in a known layout."""
    text = str(path)
    if Path(text).suffix.lower() in _RECIPES | _LISTS or text.startswith(scene_sources.SAMPLE):
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
    plugins: Sequence[str] = (),
    on_progress: Progress | None = None,
) -> list[str]:
    """Read all that a recipe of scenes names, or the set at `path` with its splits. Sentences; empty when all is well.

    Damage, which a training refuses: what is named and not there, what cannot be decoded, masks of another size than
    their images, values or colours that stand for no class, sets without a label; of a recipe also a crop larger than
    every image, scales that leave nothing, and (unless `leakage` is `allow`) images that are trained on and scored.
    What begins with `warning: ` is only odd: classes without a pixel, one class for a whole image, images twice in
    a set, in two of its splits or in one of `against`. `names` are those of the values 0, 1, ... in masks, where the
    layout does not know; without any, whatever values there are count as classes.
    """
    data = recipe_data(path, plugins) if Path(path).suffix.lower() in _RECIPES else None
    try:
        sets, said = _found(path, names) if data is None else _named(data)
    except UserError as error:
        return [str(error)]
    others = [one for place in against for one in _found(place, names)[0]]
    step = verification.steps(on_progress, sum(len(one.source.scenes) for one in (*sets, *others)))
    own, compared = ([one.examine(step) for one in some] for some in (sets, others))
    if data is None:
        return said + verification.sentences(own, compared)
    train = next((seen for one, seen in zip(sets, own, strict=True) if one.train), None)
    for one, seen in zip(sets, own, strict=True):
        shapes = seen.shapes if data.size is None else np.tile(data.size, (len(seen.ids), 1))
        if len(seen.ids):
            said += map(str, data.size_errors(one.name, seen.ids, shapes))
            said += (f"{WARNING}{text}" for text in data.odd_scales(one.name, seen.ids, shapes))
        if train is not None and not one.train:
            begin = "" if data.leakage == "refuse" else WARNING
            said += (f"{begin}{text}" for text in verification.shared(seen, train))
    return said + verification.sentences(own, compared, each_other=False)


def described(
    path: Path | str,
    *,
    names: Sequence[str] | None = None,
    plugins: Sequence[str] = (),
    on_progress: Progress | None = None,
) -> list[str]:
    """Describe the sets of a recipe, or the set at `path` and its splits, in lines: sizes, shares of the classes.

    Masks are read, of images only the headers. Raises UserError where a set cannot be opened.
    """
    recipe = Path(path).suffix.lower() in _RECIPES
    sets, lost = _named(recipe_data(path, plugins)) if recipe else _found(path, names)
    if lost and not sets:
        raise UserError(str(path), lost[0])
    lines: list[str] = []
    step = verification.steps(on_progress, sum(len(one.source.scenes) for one in sets))
    for one in sets:
        seen = one.examine(step, decode=False)
        total = seen.counts.sum(0)
        labelled = max(int(total[:-1].sum()), 1)
        lines += ["", seen.where] if lines else [seen.where]
        facts = {
            "kind": one.source.kind,
            "images": len(seen.ids),
            "size": sizes(seen.shapes) if len(seen.shapes) else "none",
            "classes": len(seen.names),
            "without class": f"{total[-1] / max(int(total.sum()), 1):.2%} of the pixels",
        }
        lines += verification.fact_lines(facts, "  ")
        damage = [text.removeprefix(f"{seen.where}: ").partition("\n")[0].rstrip(":") for text in seen.damage]
        lines += [f"  {WARNING}{text}; `trainkit data verify` lists them" for text in damage]
        width = max(map(len, seen.names))
        lines.append(f"  {'class':{width}}  share of labelled pixels  in images")
        for name, pixels, times in zip(seen.names, total, (seen.counts > 0).sum(0), strict=False):
            lines.append(f"  {name:{width}}  {pixels / labelled:24.2%}  {times:11}")
    return lines + [WARNING + text.removeprefix(WARNING) for text in lost]


@dataclass(frozen=True)
class _Seen:
    """An image that can be used."""

    id: str
    shape: tuple[int, int]
    counts: np.ndarray
    picture: int
    mask: int
    turned: bool
    fates: Fates
    white: bool


def _read(scene: Scene, labels: Labels, decode: bool, size: tuple[int, int] | None) -> _Seen:
    shape, picture = _picture(scene, decode)
    # By a quarter (5 to 8) shows in the size, unless that is square.
    turned = files.header(scene)[1] in range(2, 9 if shape[0] == shape[1] else 5)
    try:
        mask, painted = files.read_objects(scene, labels.coloured)
        classes = labels.classes(mask, files.mask_where(scene))
    except UserError as error:
        raise error if isinstance(error, Mistake) else Mistake("masks cannot be read", error) from None
    if classes.shape != shape:
        where, found = mask_store.of_another_size(scene, shape, classes.shape).split(": ", 1)
        raise Mistake("masks differ in size from their images", UserError(where, found))
    counts = mask_store.counted(classes, len(labels.names))
    white = painted is None and labels.drops_white(mask) and int((counts[:-1] > 0).sum()) == 1
    found = fates(classes, painted, size)
    return _Seen(scene.id, shape, counts, picture, mask_store.fingerprint(classes), turned, found, white)


def _picture(scene: Scene, decode: bool) -> tuple[tuple[int, int], int]:
    """Return height and width of an image, and a fingerprint of its pixels, as packed ones have it."""
    if not decode:
        return files.picture_shape(scene), 0
    pixels = image_decode.decode(files.picture_bytes(scene), scene.where)
    return pixels.shape[:2], image_store.content(pixels.transpose(2, 0, 1))


def recipe_data(path: Path | str, plugins: Sequence[str] = ()) -> Scenes:
    """Return the data block of a recipe of scenes. Raises UserError where it is one of something else."""
    from trainkit.config import loader
    from trainkit.data.scenes.dataset import Scenes

    data = loader.load(path, (), plugins).data
    if not isinstance(data, Scenes):
        remedy = "verify the packed form of other sets: trainkit data verify FOLDER"
        raise UserError(str(path), f"a recipe with data {kinds.name(data)}", "one with data scenes", remedy)
    return data


def _named(data: Scenes) -> tuple[list[NamedSet], list[str]]:
    """Open the sets of a recipe; and sentences about those that cannot be opened or have other classes."""
    sets: list[NamedSet] = []
    lost, first = [], None
    for name, place in {"train": data.train, **data.evaluate}.items():
        key = key_of(name)
        try:
            part = "train" if name == "train" else "val"
            source = scene_sources.open_scenes(place, part, data.root, data.columns)
        except UserError as error:
            lost.append(f"{key}: {error}")
            continue
        labels = data.labels(source.labels) or first
        if error := data.class_error(key, source, labels, first):
            lost.append(str(error))
        if labels is not None:
            first = first or labels
            sets.append(NamedSet(key, source, labels, data.size, train=name == "train"))
    return sets, lost


def _found(path: Path | str, names: Sequence[str] | None) -> tuple[list[NamedSet], list[str]]:
    """Open the set at a path, or its splits; and tell of those that cannot be opened. Raises UserError for none."""
    opened, lost = _opened(str(path))
    sets: list[NamedSet] = []
    for source in opened:
        labels, odd = _labels(source, names)
        lost += odd
        if labels is not None:
            sets.append(NamedSet(source.where, source, labels))
    if not sets:
        raise UserError(str(path), "; ".join(lost))
    return sets, lost


def _opened(text: str) -> tuple[list[SceneSource], list[str]]:
    """Open each split at a path, else the path as it is; and tell of splits that are there and cannot be opened.

    Raises UserError where there is neither.
    """
    path, split = sources.split_of(text)
    known = hub.is_hub(text) or text.startswith(sources.SAMPLE)
    if not known and path.exists():
        text = os.path.abspath(text)  # what a command names begins here, and not at the data root
    found, lost = {}, []
    if split is None and (known or path.is_dir()) and "#" not in text:
        for part in _PARTS:
            try:
                source = scene_sources.open_scenes(f"{text}#{part}")
                found.setdefault(source.where, source)
            except UserError as error:
                if "no such split" not in error.found and "no split" not in error.found:
                    lost.append(str(error))
    if not found:
        # Its own error says most.
        return [scene_sources.open_scenes(text)], []
    return list(found.values()), lost


def _labels(source: SceneSource, names: Sequence[str] | None) -> tuple[Labels | None, list[str]]:
    """Return the classes of a set: as named, as the layout says, or as it looks; and sentences about that."""
    if names is not None:
        try:
            return label_maps.numbered(names), []
        except ValueError as error:
            raise UserError("--names", str(error)) from None
    if source.labels is not None:
        return source.labels, []
    try:
        labels = guessed(source)
    except UserError as error:
        return None, [str(error)]
    what = f"{len(labels.names)} {'colours' if labels.coloured else 'values'}"
    said = f"its {what} have no class names, so each counts as a class: {few(labels.names, 20)}"
    return labels, [f"{WARNING}{source.where}: {said}"]


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
