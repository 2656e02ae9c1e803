"""Reading every image and mask of sets of scenes, naming what is damaged or odd, and saying what a set is like.

What a training refuses when it starts is named here as well, with everything else that is wrong, and nothing is
written: `trainkit data verify RECIPE.yaml`, or the list or folder of a set alone. Sets are compared with each other.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainkit.data import hub, kinds, sources
from trainkit.data.cache import Progress
from trainkit.data.formats import image_decode
from trainkit.data.scenes import audit, files, label_maps, size_checks
from trainkit.data.scenes import sources as scene_sources
from trainkit.data.scenes.audit import Audit
from trainkit.data.scenes.files import Scene
from trainkit.data.scenes.label_maps import Labels
from trainkit.data.scenes.lost_objects import Fates, Tally, fates
from trainkit.data.scenes.sources import SceneSource
from trainkit.data.split import key as key_of
from trainkit.data.storage import image_store, mask_store
from trainkit.data.threads import each, threads
from trainkit.errors import UserError, few

if TYPE_CHECKING:
    from trainkit.data.scenes.dataset import Scenes

WARNING = "warning: "
"""Begins a sentence about what is odd but usable."""

TRAIN = "data.train"

_RECIPES = frozenset({".yaml", ".yml"})
_LISTS = frozenset({".txt", ".csv"})
_PARTS = ("train", "val", "test")
_LISTED = 5


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

    @property
    def words(self) -> str:
        """Key and place."""
        return self.name if self.name == self.source.where else f"{self.name} ({self.source.where})"


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
    recipe = Path(path).suffix.lower() in _RECIPES
    data = recipe_data(path, plugins) if recipe else None
    try:
        sets, said = _found(path, names) if data is None else _named(data)
    except UserError as error:
        return [str(error)]
    others = [one for place in against for one in _alone(place, names)]
    audits = _audits([*sets, *others], on_progress)
    own = dict(zip((one.name for one in sets), audits, strict=False))
    for one, seen in zip(sets, own.values(), strict=True):
        said += [f"{seen.words}: {text}" for text in seen.damage]
        if len(seen.ids) and not seen.counts[:, :-1].any():
            said.append(f"{seen.words}: no labelled pixel; expected some labelled pixels")
        elif len(seen.ids) and (error := seen.error(train=not recipe or one.name == TRAIN)):
            said.append(str(error))
        odd = [f"{len(one.source.left_out)} left out: {few(one.source.left_out)}"] if one.source.left_out else []
        said += [f"{WARNING}{seen.words}: {text}" for text in (*odd, *audit.oddities(seen))]
    if data is None:
        before = [(seen, other) for place, seen in enumerate(audits[: len(sets)]) for other in audits[:place]]
    else:
        said += settings(data, own)
        before = []
        begin = "" if data.leakage == "refuse" else WARNING
        scored = [seen for key, seen in own.items() if TRAIN in own and key != TRAIN]
        said += [f"{begin}{seen.words}: {text}" for seen in scored if (text := audit.shared(seen, own[TRAIN]))]
    pairs = (*before, *((seen, other) for seen in own.values() for other in audits[len(sets) :]))
    return said + [f"{WARNING}{seen.words}: {text}" for seen, other in pairs if (text := audit.shared(seen, other))]


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
    lines = []
    for one, seen in zip(sets, _audits(sets, on_progress, decode=False), strict=True):
        total = seen.counts.sum(0)
        labelled = max(int(total[:-1].sum()), 1)
        lines += ["", seen.words] if lines else [seen.words]
        facts = {
            "kind": one.source.kind,
            "images": len(seen.ids),
            "size": _sizes(seen.shapes),
            "classes": len(seen.names),
            "without class": f"{total[-1] / max(int(total.sum()), 1):.2%} of the pixels",
        }
        lines += [f"  {key:14} {value}" for key, value in facts.items()]
        damage = [text.partition("\n")[0].rstrip(":") for text in seen.damage]
        lines += [f"  {WARNING}{text}; `trainkit data verify` lists them" for text in damage]
        width = max(map(len, seen.names))
        lines.append(f"  {'class':{width}}  share of labelled pixels  in images")
        for name, pixels, times in zip(seen.names, total, (seen.counts > 0).sum(0), strict=False):
            lines.append(f"  {name:{width}}  {pixels / labelled:24.2%}  {times:11}")
    return lines + [WARNING + text.removeprefix(WARNING) for text in lost]


def _sizes(shapes: np.ndarray) -> str:
    if not len(shapes):
        return "none"
    order = np.argsort(shapes.prod(1), kind="stable")
    least, middle, most = (image_store.describe(tuple(shapes[order[i]].tolist())) for i in (0, len(order) // 2, -1))
    return least if (shapes == shapes[0]).all() else f"smallest {least}, median {middle}, largest {most}"


def audit_files(one: NamedSet, *, decode: bool = True, on_seen: Callable[[], None] | None = None) -> Audit:
    """Read all images and masks of a set; without `decode`, of images only the headers."""
    bad: dict[str, list[_Mistake]] = {}
    good: list[_Seen] = []
    tally = Tally(len(one.labels.names), one.source.is_painted)
    see = partial(_see, labels=one.labels, decode=decode, size=one.size)
    for seen in each(see, one.source.scenes, threads()):
        if isinstance(seen, _Seen):
            good.append(seen)
            tally.add(seen.id, seen.fates, seen.white)
        else:
            bad.setdefault(seen.what, []).append(seen)
        if on_seen is not None:
            on_seen()
    classes, total = len(one.labels.names), len(one.source.scenes)
    return Audit(
        one.words,
        one.labels.names,
        tuple(seen.id for seen in good),
        np.asarray([seen.shape for seen in good], np.int64).reshape(-1, 2),
        np.asarray([seen.counts for seen in good], np.int64).reshape(-1, classes + 1),
        np.asarray([seen.picture for seen in good], np.uint64),
        np.asarray([seen.mask for seen in good], np.uint64),
        tuple(_told(what, mistakes, total) for what, mistakes in bad.items()),
        tuple(seen.id for seen in good if seen.turned),
        tally.objects(one.labels.names),
    )


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


@dataclass(frozen=True)
class _Mistake:
    """One that cannot."""

    what: str
    said: str
    advice: str = ""
    codes: Mapping[str, int] = field(default_factory=dict)
    """Values or colours that stand for no class, and the pixels of each."""


def _told(what: str, mistakes: Sequence[_Mistake], total: int) -> str:
    """Return errors of one kind as a sentence, the first of them listed."""
    pixels: Counter[str] = Counter()
    for one in mistakes:
        pixels.update(one.codes)
    among = Counter(code for one in mistakes for code in one.codes)
    codes = [f"{code} ({count} pixels of {among[code]})" for code, count in pixels.most_common()]
    which = f", {few(codes, 8)}" if codes else ""
    more = [f"and {len(mistakes) - _LISTED} more"] if len(mistakes) > _LISTED else []
    advice = [one.advice for one in mistakes if one.advice][:1]
    lines = (*(one.said for one in mistakes[:_LISTED]), *more, *advice)
    return f"{len(mistakes)} of {total} {what}{which}:" + "".join(f"\n  {line}" for line in lines)


def _see(scene: Scene, labels: Labels, decode: bool, size: tuple[int, int] | None) -> _Seen | _Mistake:
    try:
        shape, picture = _picture(scene, decode)
        # By a quarter (5 to 8) shows in the size, unless that is square.
        turned = files.header(scene)[1] in range(2, 9 if shape[0] == shape[1] else 5)
    except UserError as error:
        return _Mistake("images cannot be used", f"{error.where}: {error.found}")
    try:
        mask, painted = files.read_objects(scene, labels.coloured)
    except UserError as error:
        return _Mistake("masks cannot be read", f"{error.where}: {error.found}")
    if mask.shape[:2] != shape:
        said = mask_store.of_another_size(scene, shape, mask.shape[:2])
        return _Mistake("masks differ in size from their images", said)
    try:
        classes = labels.classes(mask, files.mask_where(scene))
    except UserError as error:
        advice = "; ".join(filter(None, (f"expected {error.expected}" if error.expected else "", error.remedy)))
        what = f"masks hold {'colours' if labels.coloured else 'values'} outside the classes"
        return _Mistake(what, f"{error.where}: {error.found}", advice, _strange(mask, labels))
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


def _strange(mask: np.ndarray, labels: Labels) -> dict[str, int]:
    """Return values or colours of a mask that stand for no class, and the pixels of each; of many the commonest."""
    found, counts = np.unique(mask.reshape(-1, *mask.shape[2:]), axis=0, return_counts=True)
    known = {key for key, _ in (labels.palette or labels.values)}
    strange = {}
    for place in np.argsort(-counts, kind="stable").tolist():
        code = found[place].tolist()
        key = tuple(code) if isinstance(code, list) else (code,) * 3 if labels.coloured else code
        if key not in known:
            strange[str(list(key) if isinstance(key, tuple) else key)] = int(counts[place])
    return dict(list(strange.items())[:32])


def settings(data: Scenes, audits: Mapping[str, Audit]) -> list[str]:
    """Return sentences about a crop and scales of a recipe that do not fit the images of its sets, by their keys."""
    said = []
    for key, seen in audits.items():
        if not len(seen.ids):
            continue
        shapes = seen.shapes if data.size is None else np.tile(data.size, (len(seen.ids), 1))
        said += map(str, data.size_errors(key, seen.ids, shapes))
        if key != TRAIN:
            odd = size_checks.odd_scales(key, seen.ids, shapes, data.base(shapes), data.eval_scales)
            said += [f"{WARNING}{text}" for text in odd]
    return said


def recipe_data(path: Path | str, plugins: Sequence[str] = ()) -> Scenes:
    """Return the data block of a recipe of scenes. Raises UserError where it is one of something else."""
    from trainkit.config import loader
    from trainkit.data.scenes.dataset import Scenes

    data = loader.load(path, (), plugins).data
    if not isinstance(data, Scenes):
        remedy = "verify the packed form of other sets: trainkit data verify FOLDER"
        raise UserError(str(path), f"a recipe with data {kinds.name(data)}", "one with data scenes", remedy)
    return data


def _audits(sets: Sequence[NamedSet], on_progress: Progress | None, decode: bool = True) -> list[Audit]:
    done, total = 0, sum(len(one.source.scenes) for one in sets)

    def on_seen() -> None:
        nonlocal done
        done += 1
        if on_progress:
            on_progress(done, total)

    return [audit_files(one, decode=decode, on_seen=on_seen) for one in sets]


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
            sets.append(NamedSet(key, source, labels, data.size))
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
    return sets, lost


def _alone(path: Path | str, names: Sequence[str] | None) -> list[NamedSet]:
    sets, lost = _found(path, names)
    if not sets:
        raise UserError(str(path), lost[0] if lost else "no images with masks")
    return sets


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
    seen: set[tuple[int, ...]] = set()
    for some in each(_codes, source.scenes, threads()):
        seen |= some
        if len(seen) > label_maps.CODE_LIMIT:
            break
    try:
        labels = label_maps.guessed(seen)
    except ValueError as error:
        return None, [f"{source.where}: {error}"]
    what = f"{len(labels.names)} {'colours' if labels.coloured else 'values'}"
    said = f"its {what} have no class names, so each counts as a class: {few(labels.names, 20)}"
    return labels, [f"{WARNING}{source.where}: {said}"]


def _codes(scene: Scene) -> set[tuple[int, ...]]:
    """Return values of a mask, or its colours; nothing where it cannot be read."""
    try:
        return label_maps.codes_in(files.read_mask(scene))
    except UserError:
        return set()
