"""Tiny sets of scenes in each layout, for tests: images of noise in blocks, their masks beside them.

Every writer returns what a recipe names (without `#split`), and takes `images` (for each split), `size` (height,
width), `classes` and `seed`. `scene` is what they all draw: the class of a pixel is in its colour, so that networks
have something to find.
"""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from trainkit.data.scenes.files import Scene, read_mask
from trainkit.data.scenes.label_maps import Labels

SIZE = (24, 32)
CLASSES = 4
IGNORED = 255
NAMES = ("sky", "road", "tree", "car", "sign", "wall", "fence", "pole", "door", "lamp", "hill")

COLOURS = (
    (70, 130, 180),
    (128, 64, 128),
    (0, 128, 0),
    (200, 0, 0),
    (220, 220, 0),
    (90, 90, 90),
    (190, 150, 150),
    (250, 170, 30),
    (119, 11, 32),
    (0, 60, 100),
    (152, 251, 152),
)
"""What an image shows of each class before noise, and what coloured masks hold."""


def scene(seed: int = 0, size: tuple[int, int] = SIZE, classes: int = CLASSES, ignored: bool = True):
    """An image uint8 (h, w, 3) and its classes uint8 (h, w): blocks of 8 pixels, one corner of them `IGNORED`."""
    rng = np.random.default_rng([20251122, seed])
    height, width = size
    blocks = rng.integers(0, classes, (-(-height // 8), -(-width // 8)))
    mask = np.repeat(np.repeat(blocks, 8, 0), 8, 1)[:height, :width].astype(np.uint8)
    picture = np.asarray(COLOURS, np.int64)[mask] + rng.integers(-20, 21, (height, width, 3))
    if ignored:
        mask[: height // 8, : width // 8] = IGNORED
    return picture.clip(0, 255).astype(np.uint8), mask


def coloured(mask: np.ndarray, void: tuple[int, int, int] = (0, 0, 0)) -> np.ndarray:
    """Classes as colours, uint8 (h, w, 3); `IGNORED` is `void`."""
    table = np.zeros((256, 3), np.uint8)
    table[: len(COLOURS)] = COLOURS
    table[IGNORED] = void
    return table[mask]


def classes_of(scene: Scene, labels: Labels) -> np.ndarray:
    """The classes of a mask, uint8 (h, w)."""
    return labels.classes(read_mask(scene, labels.coloured), str(scene.mask))


def encoded(pixels: np.ndarray, kind: str = "PNG", palette: Sequence[Sequence[int]] | None = None) -> bytes:
    """Pixels (h, w) or (h, w, 3) as a file; with a `palette` as a PNG of its indices."""
    picture = Image.fromarray(pixels)
    if palette is not None:
        picture.putpalette([part for colour in palette for part in colour])
    stream = io.BytesIO()
    picture.save(stream, kind)
    return stream.getvalue()


def put(path: Path, pixels: np.ndarray, palette: Sequence[Sequence[int]] | None = None) -> Path:
    """An image or mask as a file, PNG or JPEG by its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = "JPEG" if path.suffix.lower() in (".jpg", ".jpeg") else "PNG"
    path.write_bytes(_encoded(pixels.tobytes(), pixels.dtype.str, pixels.shape, kind, _frozen(palette)))
    return path


def _frozen(palette: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...] | None:
    return None if palette is None else tuple(tuple(colour) for colour in palette)


@functools.cache
def _encoded(data: bytes, dtype: str, shape: tuple[int, ...], kind: str, palette: tuple | None) -> bytes:
    return encoded(np.frombuffer(data, dtype).reshape(shape).copy(), kind, palette)


def _parts(pictures: int | Sequence[int]):
    """Number, name and images of the two splits, of as many each or of the numbers given."""
    each = (pictures, pictures) if isinstance(pictures, int) else pictures
    return zip((0, 1), ("train", "val"), each, strict=True)


def _drawn(pictures: int, part: int, size: tuple[int, int], classes: int, seed: int):
    for n in range(pictures):
        yield n, *scene(seed + 1000 * part + n, size, classes)


def camvid(
    root: Path,
    pictures: int | Sequence[int] = (6, 3),
    size: tuple[int, int] = SIZE,
    classes: int = CLASSES,
    seed: int = 0,
    ignored: int = IGNORED,
    names: str = "p{:03d}",
) -> Path:
    """`train`, `trainannot`, `val`, `valannot`, masks of numbers with `ignored` for none. `names` of images such as
    `0001TP_{:06d}` make it CamVid itself, with 11 for none."""
    for part, split, count in _parts(pictures):
        for n, picture, mask in _drawn(count, part, size, classes, seed):
            put(root / split / f"{names.format(n)}.png", picture)
            put(
                root / f"{split}annot" / f"{names.format(n)}.png", np.where(mask == IGNORED, ignored, mask).astype("u1")
            )
    return root


def folders(
    root: Path,
    pictures: int = 4,
    size: tuple[int, int] = SIZE,
    classes: int = CLASSES,
    seed: int = 0,
    splits: Sequence[str] = ("train", "val"),
    inside: bool = True,
    masks: str = "masks",
    suffix: str = ".jpg",
) -> Path:
    """`images/train` and `masks/train` (`inside`), or `train/images` and `train/masks`; without `splits` `images` and
    `masks`."""
    for part, split in enumerate(splits or ("",)):
        for n, picture, mask in _drawn(pictures, part, size, classes, seed):
            image, label = (Path(kind, split) if inside else Path(split, kind) for kind in ("images", masks))
            put(root / image / f"p{n:03d}{suffix}", picture)
            put(root / label / f"p{n:03d}.png", mask)
    return root


def cityscapes(root: Path, pictures: int = 2, size: tuple[int, int] = SIZE, seed: int = 0, kind: str = "Ids") -> Path:
    """Two cities for each of train and val; classes 0 .. 3 as the numbers 7, 8, 11, 12, or (`TrainIds`) as they are."""
    table = np.arange(256, dtype=np.uint8)
    if kind == "Ids":
        table[[0, 1, 2, 3, IGNORED]] = 7, 8, 11, 12, 0
    for part, split in enumerate(("train", "val")):
        for place, city in enumerate((f"{split}burg", f"{split}ville")):
            for n, picture, mask in _drawn(pictures, 2 * part + place, size, 4, seed):
                name = f"{city}_{n:06d}_000019"
                put(root / "leftImg8bit" / split / city / f"{name}_leftImg8bit.png", picture)
                put(root / "gtFine" / split / city / f"{name}_gtFine_label{kind}.png", table[mask])
                put(root / "gtFine" / split / city / f"{name}_gtFine_color.png", coloured(mask))
    return root


def ade20k(root: Path, pictures: int = 3, size: tuple[int, int] = SIZE, seed: int = 0) -> Path:
    """Classes 0 .. 3 as 1 .. 4, and 0 for none."""
    for part, (split, short) in enumerate((("training", "train"), ("validation", "val"))):
        for n, picture, mask in _drawn(pictures, part, size, 4, seed):
            put(root / "images" / split / f"ADE_{short}_{n:08d}.jpg", picture)
            put(root / "annotations" / split / f"ADE_{short}_{n:08d}.png", (mask + 1).astype(np.uint8))
    return root


def coco_stuff(
    root: Path, pictures: int = 3, size: tuple[int, int] = SIZE, seed: int = 0, masks: str = "stuffthingmaps"
) -> Path:
    """Classes 0 .. 3 as 0, 1, 2, 181 (person, bicycle, car, wood), 255 for none."""
    table = np.arange(256, dtype=np.uint8)
    table[3] = 181
    for part, split in enumerate(("train2017", "val2017")):
        for n, picture, mask in _drawn(pictures, part, size, 4, seed):
            put(root / "images" / split / f"{part}{n:011d}.jpg", picture)
            put(root / masks / split / f"{part}{n:011d}.png", table[mask])
    return root


def write_list(file: Path, rows: Iterable[Sequence[str]], header: Sequence[str] | None = None) -> Path:
    """An image list: `image,label` a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, lineterminator="\n").writerows([*([header] if header else []), *rows])
    return file


def listed(
    root: Path,
    pictures: int | Sequence[int] = (6, 3),
    size: tuple[int, int] = SIZE,
    classes: int = CLASSES,
    seed: int = 0,
    colour: bool = False,
) -> Path:
    """`train.txt` and `val.txt` in `root`, over `data/<split>/*.jpg` and `data/<split>/*.png`; `colour`: masks in RGB.

    Returns the list of train.
    """
    for part, split, count in _parts(pictures):
        rows = []
        for n, picture, mask in _drawn(count, part, size, classes, seed):
            rows.append((f"data/{split}/p{n:03d}.jpg", f"data/{split}/p{n:03d}.png"))
            put(root / rows[-1][0], picture)
            put(root / rows[-1][1], coloured(mask) if colour else mask)
        write_list(root / f"{split}.txt", rows)
    return root / "train.txt"


def palette(classes: int = CLASSES) -> dict[str, tuple[int, int, int]]:
    """Names and colours of coloured masks; black stands for no class in them."""
    return dict(zip(NAMES[:classes], COLOURS, strict=False))
