"""Where scenes come from: each layout becomes a list of images, each with a mask that says what its pixels are.

| layout                                                            | splits                    |
|-------------------------------------------------------------------|---------------------------|
| a list (`.txt`, `.csv`), see `image_lists`                        | a list each               |
| `images` and `masks` (`labels`, `annotations`), split below       | folders such as `train`   |
| or above them, or not at all; `leftImg8bit`, `gtFine`             |                           |
| `train`, `trainannot`, `val`, `valannot`: CamVid's                | `#train`, `#val`, any     |
| `sample:scenes`                                                   | `#train`, `#val`          |

Classes are named by `names.json` in its folder, by the names of all mask files where these are of a
published set (`label_maps.published`), or by the recipe. Only names of files are looked at here, and nothing is
decoded. What is there and not used is said in `left_out`.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainkit.data import folders, hub, source_splits, sources
from trainkit.data.formats.image_decode import is_called_picture
from trainkit.data.record import Record, Source
from trainkit.data.scenes import image_lists, label_maps
from trainkit.data.scenes.files import Scene
from trainkit.data.scenes.label_maps import Labels
from trainkit.errors import UserError, few, number_of
from trainkit.paths import locate

SAMPLE = "sample:scenes"

_IMAGE_FOLDERS = ("image", "images", "img", "imgs", "jpegimages", "leftimg8bit")
"""Names of the folder of images, in lower case."""

_MASK_FOLDERS = (
    *("mask", "masks", "label", "labels", "annotation", "annotations", "gtfine", "segmentationclass", "stuffthingmaps"),
)
"""Names of the folder of masks."""

_BESIDE = ("annot", "_annot", "_labels", "_masks")
"""Ends of the name of a folder of masks beside that of images."""

KNOWN = """\
a list of `image,label` a line (.txt, .csv); folders train and trainannot; images and masks; \
leftImg8bit and gtFine (Cityscapes)"""

_IMAGE_TAIL = re.compile(r"(.+?)[_-](leftImg8bit|image|img)", re.IGNORECASE)
_MASK_TAIL = re.compile(r"(.+?)[_-]((gtFine_)?(labelIds|labelTrainIds)|labels?|masks?|seg|gt|L)", re.IGNORECASE)
_CITYSCAPES_ENDS = ("_gtFine_labelIds.png", "_gtFine_labelTrainIds.png")
_FOLDERS = "folders of images and masks"


@dataclass(frozen=True)
class SceneSource:
    """A set of images with masks in some layout."""

    kind: str
    """The layout, in words."""
    where: str
    scenes: tuple[Scene, ...]
    """In the order of their names, or of the list."""
    labels: Labels | None
    """Content of its masks, if the set defines it."""
    files: tuple[Path, ...]
    """Files it is made of, to detect changes."""
    left_out: tuple[str, ...] = ()
    """Sentences about what is there and not used, with counts."""

    def __len__(self) -> int:
        return len(self.scenes)

    def ids(self) -> list[str]:
        """Return the name of each scene."""
        return [scene.id for scene in self.scenes]

    def pictures(self) -> Source:
        """Return the images alone, in the order of the scenes, to be packed. All are of class 0."""

        def records() -> Iterator[Record]:
            for scene in self.scenes:
                yield Record(scene.id, 0, scene.image, scene.where)

        # Without masks and lists: changing those does not pack the images again.
        return Source(self.kind, self.where, len(self.scenes), records, tuple(scene.image for scene in self.scenes))


def open_scenes(text: str, part: str = "train", root: str | None = None) -> SceneSource:
    """Open the scenes that a recipe names, whatever the layout, with `#split` where there are splits. Decodes nothing.

    Without `#split` the split `part` is meant (`train`, `val`) where there are several. `root` is where the paths of a
    list begin; without it they begin in the folder of the list.

    Raises UserError where there is nothing, no such split, no pair of image and mask, or where a list names files
    that are not there or lie outside its root: all such lines are counted, and the first are named.
    """
    if text.startswith(sources.SAMPLE):
        return _sample(text, part)
    if hub.is_hub(text):
        raise UserError(text, "a set of the hub", KNOWN, "save its images and masks as files")
    try:
        path, split = sources.split_of(locate(text))
        if not path.exists():
            raise UserError(str(path), "does not exist", "a set of images with masks")
        if path.is_dir():
            return _folder(path, split, part)
        if path.suffix.lower() not in (".txt", ".csv"):
            remedy = "paint outlines of COCO's JSON as masks: docs/reference/data/segmentation.md"
            raise UserError(str(path), "a file of unknown kind", KNOWN, remedy * (path.suffix.lower() == ".json"))
        source_splits.refuse(split, str(path), "list")
        scenes = image_lists.read(path, path.parent if root is None else locate(root))
        return _made("image list", str(path), scenes, (path,))
    except OSError as error:  # a name too long, a folder that may not be entered
        raise UserError(text[:300], f"cannot be read ({error.strerror or error})", "a set of images") from None


def missing(text: str, root: str | None = None) -> str | None:
    """Return a sentence about scenes of a recipe that are not there yet, or about where their paths begin."""
    if text.startswith(sources.SAMPLE):
        return None
    if (said := sources.missing(text)) is not None or root is None or locate(root).is_dir():
        return said
    return f"{locate(root)} is not a folder"


def _sample(text: str, part: str) -> SceneSource:
    name, _, split = text.partition("#")
    if name != SAMPLE:
        raise UserError("data", f"no built-in set of scenes {text!r}"[:200], SAMPLE)
    drawn = importlib.import_module("trainkit.data.synthetic.scenes")
    labels = label_maps.numbered(drawn.NAMES, colours=drawn.COLOURS)
    return replace(open_scenes(f"{drawn.folder()}#{split or part}"), kind="synthetic scenes", labels=labels)


def _made(
    kind: str,
    where: str,
    scenes: Sequence[Scene],
    also: tuple[Path, ...],
    labels: Labels | None = None,
    left_out: tuple[str, ...] = (),
) -> SceneSource:
    """Return a source of files. Without `labels` the names of all mask files may say which published set they are."""
    masks = [scene.mask for scene in scenes]
    if labels is None and (known := label_maps.published(masks)) is not None:
        kind, labels = known[0] if kind == _FOLDERS else kind, known[1]
    files = dict.fromkeys((*also, *(scene.image for scene in scenes), *masks))
    return SceneSource(kind, where, tuple(scenes), labels, tuple(files), left_out)


# ---- Folders


def _folder(root: Path, split: str | None, part: str) -> SceneSource:
    splits = _pairs_of_folders(root, split)
    if not splits:
        raise UserError(str(root), "a folder of unknown layout, or without images", KNOWN)
    name, pairs = source_splits.choose(splits, split, str(root), part)
    images, masks = _only(root, pairs)
    where = f"{root}#{name}" if name else str(root)
    scenes, left_out = _matched(_files(images), _masks(masks), where)
    names = root / label_maps.NAMES
    named = ((names,), label_maps.read_names(names)) if names.is_file() else ((), None)
    return _made(_FOLDERS, where, scenes, *named, left_out)


def _only(root: Path, found: Sequence[tuple[Path, ...]]) -> tuple[Path, ...]:
    """Return the paths of the only set there is. Raises UserError where there are several."""
    if len(found) > 1:
        several = few(" with ".join(str(path.relative_to(root)) for path in paths) for paths in found)
        remedy = "name the file itself, move the others away, or write a list of `image,label` a line"
        raise UserError(str(root), f"several sets of images and masks: {several}", "one", remedy)
    return found[0]


def _pairs_of_folders(root: Path, split: str | None) -> dict[str, list[tuple[Path, Path]]]:
    """Return folders of images and of masks, by split; where there are no splits by the name of nothing."""
    below = folders.folders_in(root)
    found: dict[str, list[tuple[Path, Path]]] = {}
    for name, folder in below.items():
        found[name] = [(folder, below[name + end]) for end in _BESIDE if name + end in below]
        if name in source_splits.WORDS or name == split:
            found[name] += _both(folders.folders_in(folder))
    for images, masks in _both(below):
        inner, others = folders.folders_in(images), folders.folders_in(masks)
        names = [name for name in inner if name in others and (name in source_splits.WORDS or name == split)]
        for name in names:
            found.setdefault(name, []).append((inner[name], others[name]))
        if not names:
            found.setdefault("", []).append((images, masks))
    full = {name: [pair for pair in pairs if all(map(_has_images, pair))] for name, pairs in found.items()}
    return {name: pairs for name, pairs in full.items() if pairs}


def _both(below: Mapping[str, Path]) -> list[tuple[Path, Path]]:
    images = [folder for name, folder in below.items() if name.lower() in _IMAGE_FOLDERS]
    masks = [folder for name, folder in below.items() if name.lower() in _MASK_FOLDERS]
    return [(image, mask) for image in images for mask in masks]


def _has_images(folder: Path) -> bool:
    return any(is_called_picture(name) for _, _, names in folders.walk(folder) for name in names)


def _files(root: Path) -> dict[str, Path]:
    """List files in a folder and those below, by their path below it, in the order of names; hidden ones are left out.

    What is called as an image and is none is among them, to be refused when it is read. Raises UserError for names of
    images that cannot be written.
    """
    found: list[str] = []
    for place, inner, rest in folders.walk(root):
        odd = [name for name in inner if is_called_picture(name)]
        inner[:] = [name for name in inner if name not in odd]
        found += [os.path.join(place, name) for name in (*odd, *rest)]
    folders.check_names(str(root), filter(is_called_picture, found))
    return {name: root / name for name in sorted(found, key=lambda name: name.split("/"))}


def _masks(root: Path) -> dict[str, Path]:
    """List the masks in a folder: of Cityscapes, where each has files of numbers, colours and instances, one kind."""
    every = _files(root)
    kinds = [{name: file for name, file in every.items() if name.endswith(end)} for end in _CITYSCAPES_ENDS]
    return max(kinds, key=len) or every


def _matched(images: Mapping[str, Path], masks: Mapping[str, Path], where: str) -> tuple[list[Scene], tuple[str, ...]]:
    """Return scenes of images and masks of one name, the suffix apart, and sentences about what fits none.

    Where no two names are alike, `x_leftImg8bit` and `x_mask` are as well. Raises UserError where nothing fits, or two
    images or masks would.
    """
    of_image, of_mask = _by_stem(images, where), _by_stem(masks, where)
    if not of_image.keys() & of_mask.keys():
        of_image, of_mask = _by_stem(images, where, _IMAGE_TAIL), _by_stem(masks, where, _MASK_TAIL)
    scenes = [
        Scene(name, images[name], masks[of_mask[key]], str(images[name]))
        for key, name in of_image.items()
        if key in of_mask
    ]
    left_out = {
        "images without a mask": [name for key, name in of_image.items() if key not in of_mask],
        "masks without an image": [name for key, name in of_mask.items() if key not in of_image],
        "files of another kind": [folders.escaped(name) for name in (*images, *masks) if not is_called_picture(name)],
    }
    said = tuple(f"{number_of(len(names), what)}: {few(names)}" for what, names in left_out.items() if names)
    if not scenes:
        raise UserError(where, f"no pair with the same name; {'; '.join(said)}", "a mask with the name of each image")
    return scenes, said


def _by_stem(files: Mapping[str, Path], where: str, tail: re.Pattern[str] | None = None) -> dict[str, str]:
    """Return the file of each name without suffix, and without `tail` where it has one."""
    found: dict[str, str] = {}
    twice: list[str] = []
    for name in filter(is_called_picture, files):
        stem = os.path.splitext(name)[0]
        ended = tail.fullmatch(stem) if tail else None
        stem = ended[1] if ended else stem
        if stem in found:
            twice.append(f"{found[stem]} and {name}")
        found.setdefault(stem, name)
    if twice:
        said = f"{number_of(len(twice), 'pairs')} of files with the same name: {few(twice)}"
        raise UserError(where, said, "each name once, without suffix")
    return found
