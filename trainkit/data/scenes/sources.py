"""Where scenes come from: each layout becomes a list of images, each with a mask that says what its pixels are.

| layout                                                            | splits                    | classes from         |
|-------------------------------------------------------------------|---------------------------|----------------------|
| a list (`.txt`, `.csv`), see `image_lists`                        | a list each               | names of its files   |
| masks in COCO's JSON: a file, or the folder it lies in            | names of files, folders   | its categories       |
| `train`, `trainannot`, `val`, `valannot`: CamVid's                | `#train`, `#val`, any     | names of its files   |
| `train`, `train_labels`, ...: CamVid in its own colours           | likewise                  | names of its files   |
| `images` and `masks` (`labels`, `annotations`), split below       | folders such as `train`   | names of its files   |
| or above them, or not at all                                      |                           |                      |
| `leftImg8bit`, `gtFine`: Cityscapes                               | `#train`, `#val`          | the set              |
| `images/training`, `annotations/training`: ADE20K                 | `#train`, `#val`          | the set              |
| `ImageSets/Segmentation`, `JPEGImages`, `SegmentationClass`: VOC  | a list of that folder     | names of its files   |
| `images/train2017`, `stuffthingmaps/train2017`: COCO-Stuff        | `#train`, `#val`          | the set              |
| parquet, a saved set, `hf://owner/name`, masks in a second column | its own                   | the recipe           |
| `sample:scenes`                                                   | `#train`, `#val`          | the set              |

A file beside the folders that names the classes (`label_files`) comes before what names of files say of a published
set.

Only names of files are looked at here, and nothing is decoded. What is there and not used is said in `left_out`.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trainkit.data import folders, hub, source_splits, sources
from trainkit.data.formats.image_decode import SUFFIXES, is_called_picture
from trainkit.data.record import Columns, Record, Source
from trainkit.data.scenes import coco, image_lists, label_files, label_maps, table_scenes
from trainkit.data.scenes.coco import CocoMask
from trainkit.data.scenes.files import Scene
from trainkit.data.scenes.label_maps import Labels
from trainkit.data.scenes.table_scenes import TableScenes
from trainkit.errors import UserError, few, number_of
from trainkit.paths import locate

SAMPLE = "sample:scenes"

IMAGE_FOLDERS = frozenset({"image", "images", "img", "imgs", "jpegimages", "leftimg8bit", "pictures", "rgb"})
"""Names of the folder of images, in lower case."""

MASK_FOLDERS = frozenset(
    {
        "mask", "masks", "label", "labels", "annotation", "annotations", "annot", "gt", "gtfine", "segmentation",
        "segmentationclass", "segmentationclasspng", "stuffthingmaps",
    }
)  # fmt: skip
"""Names of the folder of masks."""

KNOWN = """\
a list of `image,label` a line (.txt, .csv); masks in COCO's JSON; folders train and trainannot; images and masks; \
leftImg8bit and gtFine (Cityscapes); ImageSets/Segmentation, JPEGImages and SegmentationClass (Pascal VOC); \
images/training and annotations/training (ADE20K); images/train2017 and stuffthingmaps/train2017 (COCO-Stuff); \
parquet"""

_BESIDE = ("annot", "_annot", "_labels", "_masks", "_mask", "_label", "masks", "labels")
_IMAGE_TAIL = re.compile(r"(.+?)[_-](leftImg8bit|image|img|rgb)", re.IGNORECASE)
_MASK_TAIL = re.compile(
    r"(.+?)[_-]((gtFine_)?(labelIds|labelTrainIds)|labels?|masks?|seg|segmentation|annotation|annot|gt|L)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class SceneSource:
    """A set of images with masks in some layout."""

    kind: str
    """The layout, in words."""
    where: str
    scenes: Sequence[Scene]
    """In the order of their names, or of the list or table. Those of a table are read as they are asked for: go through
    them in turn, and hold on to none."""
    labels: Labels | None
    """Content of its masks, if the layout defines it."""
    files: tuple[Path, ...]
    """Files and settings it is made of, to detect changes."""
    left_out: tuple[str, ...] = ()
    """Sentences about what is there and not used, with counts."""
    columns: tuple[tuple[str, str], ...] = ()
    """Columns of a table that the user assigned."""

    def __len__(self) -> int:
        return len(self.scenes)

    @property
    def is_painted(self) -> bool:
        """True where masks are painted from outlines."""
        if isinstance(self.scenes, TableScenes):
            return False
        return any(not isinstance(scene.mask, Path | bytes | None) for scene in self.scenes)

    def ids(self) -> list[str]:
        """Return the name of each scene, without reading any."""
        return self.scenes.ids() if isinstance(self.scenes, TableScenes) else [scene.id for scene in self.scenes]

    def pictures(self) -> Source:
        """Return the images alone, in the order of the scenes, to be packed. All are of class 0."""

        def records() -> Iterator[Record]:
            for scene in self.scenes:
                yield Record(scene.id, 0, scene.image, scene.where)

        if isinstance(self.scenes, TableScenes):
            files = self.files
        else:  # Without masks and lists: changing those does not pack the images again.
            files = tuple(scene.image for scene in self.scenes if isinstance(scene.image, Path))
        return Source(self.kind, self.where, len(self.scenes), records, files, columns=self.columns)


def open_scenes(text: str, part: str = "train", root: str | None = None, columns: Columns | None = None) -> SceneSource:
    """Open the scenes that a recipe names, whatever the layout, with `#split` where there are splits. Decodes nothing.

    Without `#split` the split `part` is meant (`train`, `val`) where there are several. `root` is where the paths of a
    list begin; without it they begin in the folder of the list. `columns` says which columns of a table are meant.
    Nothing is downloaded.

    Raises UserError where there is nothing, no such split, no pair of image and mask, or where a list names files
    that are not there or lie outside its root: all such lines are counted, and the first are named.
    """
    if text.startswith(sources.SAMPLE):
        return _sample(text, part)
    if hub.is_hub(text):
        return _table(text, None, part, columns)
    try:
        path, split = sources.split_of(locate(text))
        if not path.exists():
            raise UserError(str(path), "does not exist", "a set of images with masks")
        if path.suffix.lower() == ".json" and split is None and coco.is_coco(path):
            return _coco(path, str(path), None if root is None else locate(root))
        if table_scenes.holds_rows(path):
            return _table(path, split, part, columns)
        if path.is_dir():
            return _folder(path, split, part)
        if path.suffix.lower() not in (".txt", ".csv"):
            raise UserError(str(path), "a file of unknown kind", KNOWN)
        source_splits.refuse(split, str(path), "list")
        scenes, labels = image_lists.read(path, path.parent if root is None else locate(root))
        return _made("image list", str(path), scenes, (path,), labels=labels)
    except OSError as error:  # a name too long, a folder that may not be entered
        raise UserError(text[:300], f"cannot be read ({error.strerror or error})", "a set of images") from None


def missing(text: str, root: str | None = None) -> str | None:
    """Return a sentence about scenes of a recipe that are not there yet, or about where their paths begin."""
    if text.startswith(sources.SAMPLE):
        return None
    if (said := sources.missing(text)) is not None or root is None or locate(root).is_dir():
        return said
    return f"{locate(root)} is not a folder"


def _table(path: Path | str, split: str | None, part: str, columns: Columns | None) -> SceneSource:
    scenes = table_scenes.open_rows(path, split, None if part == source_splits.TRAIN else part, columns)
    named = label_files.find([path]) if isinstance(path, Path) else None
    labels, rows = None if named is None else named[1], scenes.rows
    return SceneSource(rows.table.kind, rows.where, scenes, labels, rows.table.files, columns=rows.given)


def _coco(file: Path, where: str, root: Path | None = None) -> SceneSource:
    said = coco.read(file)
    base = coco.image_root(file, list(said.masks), root)
    scenes = [Scene(name, base / name, mask, mask.where) for name, mask in said.masks.items()]
    return _made("COCO's JSON", where, scenes, (file,), said.left_out, said.labels)


# Folders.


def _folder(root: Path, split: str | None, part: str) -> SceneSource:
    if (root / "ImageSets" / "Segmentation").is_dir() and (root / "JPEGImages").is_dir():
        return _voc(root, split, part)
    every = _pairs_of_folders(root, split)
    splits = {name: some for name, pairs in every.items() if (some := [p for p in pairs if all(map(_has_pictures, p))])}
    if not splits:
        if files := coco.find(root):
            name, found = source_splits.choose(files, split, str(root), part)
            if len(found) > 1:
                said = few(str(file.relative_to(root)) for file in found)
                raise UserError(str(root), f"several files of masks: {said}", "one", "name the file itself")
            return _coco(found[0], f"{root}#{name}" if name else str(root))
        if said := [
            f"{image.relative_to(root)} and {mask.relative_to(root)}" for p in every.values() for image, mask in p
        ]:
            raise UserError(str(root), f"no images in one or both of {few(said)}", "images and masks (.png)")
        raise UserError(str(root), "a folder of unknown layout", KNOWN)
    name, pairs = source_splits.choose(splits, split, str(root), part)
    if len(pairs) > 1:
        said = few(f"{image.relative_to(root)} with {mask.relative_to(root)}" for image, mask in pairs)
        remedy = "move the others away, or write a list of `image,label` a line"
        raise UserError(str(root), f"several folders of images and masks: {said}", "one of each", remedy)
    return _of_pair(root, name, *pairs[0])


def _of_pair(root: Path, name: str, images: Path, masks: Path) -> SceneSource:
    """Return the scenes of a folder of images and one of masks."""
    where = f"{root}#{name}" if name else str(root)
    there, of_mask = _files(images), _files(masks)
    # Of Cityscapes there are numbers, colours and instances of each; its tool writes the train ids as well.
    kinds = [{name: file for name, file in of_mask.items() if name.endswith(end)} for end in _CITYSCAPES_ENDS]
    of_mask = max(kinds, key=len) or of_mask
    scenes, left_out = _matched(there, of_mask, where)
    named = label_files.find((images.parent, masks.parent, root))
    return _made("folders", where, scenes, left_out=left_out, named=named)


def _lonely(what: str, names: Sequence[str]) -> tuple[str, ...]:
    return (f"{number_of(len(names), what)}: {few(names)}",) if names else ()


def _pairs_of_folders(root: Path, split: str | None) -> dict[str, list[tuple[Path, Path]]]:
    """Return folders that may be of images and masks, by split; where there are no splits by the name of nothing."""
    below = folders.folders_in(root)
    found: dict[str, list[tuple[Path, Path]]] = {}
    for name, folder in below.items():
        found.setdefault(name, []).extend((folder, below[name + end]) for end in _BESIDE if name + end in below)
        inner = folders.folders_in(folder) if name in source_splits.WORDS or name == split else {}
        images, masks = _of_kind(inner, IMAGE_FOLDERS), _of_kind(inner, MASK_FOLDERS)
        found[name] += [(image, mask) for image in images for mask in masks]
    # COCO's images may lie in `train2017` itself, beside a folder of masks with a `train2017`.
    for images in (*_of_kind(below, IMAGE_FOLDERS), root):
        for masks in _of_kind(below, MASK_FOLDERS):
            inner, others = folders.folders_in(images), folders.folders_in(masks)
            both = [name for name in inner if name in others and (name in source_splits.WORDS or name == split)]
            for name in both:
                found.setdefault(name, []).append((inner[name], others[name]))
            if not both and images != root:
                found.setdefault("", []).append((images, masks))
    return found


def _of_kind(below: Mapping[str, Path], names: frozenset[str]) -> list[Path]:
    return [folder for name, folder in below.items() if name.lower() in names]


def _has_pictures(folder: Path) -> bool:
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


def _matched(images: Mapping[str, Path], masks: Mapping[str, Path], where: str) -> tuple[list[Scene], tuple[str, ...]]:
    """Return scenes of images and masks of one name, the suffix apart, and sentences about what fits none.

    Where no two names are alike, `x_leftImg8bit` and `x_mask` are as well. Raises UserError where nothing fits, or two
    images or masks would.
    """
    odd = [*_other(images), *_other(masks)]
    by_name, of_mask = _by_stem(images, where, "images"), _by_stem(masks, where, "masks")
    if not by_name.keys() & of_mask.keys():
        by_name, of_mask = _by_stem(images, where, "images", _IMAGE_TAIL), _by_stem(masks, where, "masks", _MASK_TAIL)
    scenes = [
        Scene(name, images[name], masks[of_mask[key]], str(images[name]))
        for key, name in by_name.items()
        if key in of_mask
    ]
    if not scenes:
        first = [few(some.values(), 3) for some in (by_name, of_mask)]
        found = f"{number_of(len(by_name), 'images')} ({first[0]}), {number_of(len(of_mask), 'masks')} ({first[1]})"
        raise UserError(where, f"{found}, but no pair with the same name", "a mask with the name of each image")
    bare = [name for key, name in by_name.items() if key not in of_mask]
    alone = [name for key, name in of_mask.items() if key not in by_name]
    left_out = (*_lonely("images without a mask", bare), *_lonely("masks without an image", alone))
    if odd:
        what = number_of(len(odd), "files that are no images", "file that is not an image")
        left_out = (*left_out, f"{what}: {few(map(folders.escaped, odd))}")
    return scenes, left_out


def _other(files: Mapping[str, Path]) -> list[str]:
    return [name for name in files if os.path.splitext(name)[1].lower() not in SUFFIXES]


def _by_stem(files: Mapping[str, Path], where: str, what: str, tail: re.Pattern[str] | None = None) -> dict[str, str]:
    """Return the file of each name without suffix, and without `tail` where it has one."""
    found: dict[str, str] = {}
    twice: list[str] = []
    for name in files:
        stem, suffix = os.path.splitext(name)
        if suffix.lower() not in SUFFIXES:
            continue
        ended = tail.fullmatch(stem) if tail else None
        stem = ended[1] if ended else stem
        if stem in found:
            twice.append(f"{found[stem]} and {name}")
        found.setdefault(stem, name)
    if twice:
        said = f"{number_of(len(twice), 'pairs')} of {what} with the same name: {few(twice)}"
        raise UserError(where, said, "each name once, without suffix")
    return found


_CITYSCAPES_ENDS = ("_gtFine_labelIds.png", "_gtFine_labelTrainIds.png")


def _voc(root: Path, split: str | None, part: str) -> SceneSource:
    lists = {file.stem: file for file in folders.visible((root / "ImageSets" / "Segmentation").glob("*.txt"))}
    name, file = source_splits.choose(lists, split, str(root), part)
    augmented = root / "SegmentationClassAug"
    folder = augmented if name.endswith("aug") and augmented.is_dir() else root / "SegmentationClass"
    images, masks = (
        {os.path.splitext(name)[0]: path for name, path in _files(place).items() if is_called_picture(name)}
        if place.is_dir()
        else {}
        for place in (root / "JPEGImages", folder)
    )
    scenes, mistakes, seen = [], image_lists.Mistakes(), set()
    for number, cells in image_lists.lines_of(file):
        stem = cells[0] if len(cells) == 1 else ""
        if not stem or PurePosixPath(stem).name != stem or stem in seen:
            found = f"{stem} again" if stem in seen else ",".join(cells)[:200]
            raise UserError(f"{file}, line {number}", found, "the name of an image without suffix, each once")
        seen.add(stem)
        if stem not in images:
            mistakes.add("missing images", number, f"JPEGImages/{stem}.jpg")
        if stem not in masks:
            mistakes.add("missing masks", number, f"{folder.name}/{stem}.png")
        if stem in images and stem in masks:
            scenes.append(Scene(stem, images[stem], masks[stem], f"{file}, line {number} ({stem})"))
    mistakes.check(file, len(seen), "unpack the whole set")
    if not scenes:
        raise UserError(str(file), "no lines", "names of images")
    return _made("Pascal VOC", f"{root}#{name}", scenes, (file,), named=label_files.find((root,)))


def _made(
    kind: str,
    where: str,
    scenes: Sequence[Scene],
    also: Iterable[Path] = (),
    left_out: tuple[str, ...] = (),
    labels: Labels | None = None,
    named: tuple[Path, Labels] | None = None,
) -> SceneSource:
    """Return a source of files. `named` are a file and the classes it names; without it and `labels` the names of all
    mask files may say of which published set they are."""
    of_each = (scene.mask.file if isinstance(scene.mask, CocoMask) else scene.mask for scene in scenes)
    masks = list(dict.fromkeys(file for file in of_each if isinstance(file, Path)))
    images = [scene.image for scene in scenes if isinstance(scene.image, Path)]
    if named is not None:
        also, labels = (*also, named[0]), named[1]
    if labels is None:
        known = next((known for known in _RECOGNISED if all(known[1](mask) for mask in masks)), None)
        if known is not None:
            kind, labels = known[0] if kind == "folders" else kind, known[2]()
    if kind == "Pascal VOC" and labels is not label_maps.voc():
        kind = "folders in the layout of Pascal VOC"
    kind = "folders of images and masks" if kind == "folders" else kind
    return SceneSource(kind, where, tuple(scenes), labels, tuple(dict.fromkeys((*also, *images, *masks))), left_out)


_CAMVID = re.compile(r"(0001TP|0006R0|0016E5|Seq05VD)_f?\d+\.png")
_CAMVID_COLOURED = re.compile(r"(0001TP|0006R0|0016E5|Seq05VD)_f?\d+_L\.png")
_ADE20K = re.compile(r"ADE_(train|val)_\d{8}\.png")
_VOC = re.compile(r"20\d\d_\d{6}\.png")
_COCO = re.compile(r"\d{12}\.png")
_COCO_TRAIN_IDS = re.compile(r"\d{12}_labelTrainIds\.png")

_RECOGNISED: tuple[tuple[str, Callable[[Path], object], Callable[[], Labels]], ...] = (
    ("Cityscapes", lambda mask: mask.name.endswith(_CITYSCAPES_ENDS[0]), label_maps.cityscapes),
    ("Cityscapes", lambda mask: mask.name.endswith(_CITYSCAPES_ENDS[1]), lambda: label_maps.cityscapes(True)),
    ("CamVid", lambda mask: _CAMVID.fullmatch(mask.name) and mask.parent.name.endswith("annot"), label_maps.camvid11),
    ("CamVid", lambda mask: _CAMVID_COLOURED.fullmatch(mask.name), label_maps.camvid_colours),
    ("ADE20K", lambda mask: _ADE20K.fullmatch(mask.name), label_maps.ade20k),
    (
        "COCO-Stuff",
        lambda mask: _COCO.fullmatch(mask.name) and mask.parent.parent.name == "stuffthingmaps",
        label_maps.coco_stuff,
    ),
    ("COCO-Stuff", lambda mask: _COCO_TRAIN_IDS.fullmatch(mask.name), label_maps.coco_stuff_train_ids),
    (
        "Pascal VOC",
        lambda mask: _VOC.fullmatch(mask.name) and mask.parent.name.startswith("SegmentationClass"),
        label_maps.voc,
    ),
)
"""Sets that the names of all mask files give away: kind, whether one is of it, what their values stand for."""


def _sample(text: str, part: str) -> SceneSource:
    name, _, split = text.partition("#")
    if name != SAMPLE:
        raise UserError("data", f"no built-in set of scenes {text!r}"[:200], SAMPLE)
    drawn = importlib.import_module("trainkit.data.synthetic.scenes")
    source = open_scenes(f"{drawn.folder()}#{split or part}")
    labels = label_maps.numbered(drawn.NAMES, colours=drawn.COLOURS)
    return SceneSource("synthetic scenes", source.where, source.scenes, labels, source.files, source.left_out)
