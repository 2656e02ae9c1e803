"""Augmentation: `light`, drawn in `fetch` and computed for whole batches on the device; `timm`, by image, in `fetch`.

All that is random is a function of seed, epoch and row of the split, so an image is augmented alike in any worker, on
any number of processes, in any batch and after a resume.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from trainkit import rng
from trainkit.config.ranges import MANY, Factor, Fraction, FractionAboveZero, Ratio
from trainkit.data import clahe
from trainkit.tensors import torch, wide

if TYPE_CHECKING:
    from torch import Tensor

STREAM = "augment"

DRAWS = (
    "flip", "down", "right", "affine", "turn", "size", "affine_down", "affine_right", "shear",
    "brighten", "brightness", "contrasts", "contrast", "first", "saturate", "saturation", "tint", "hue",
    "swap", "order", "erase", "area", "ratio", "top", "left", "clahe",
)  # fmt: skip
"""One draw in [0, 1) for each, in this order: what a setting draws does not depend on the other settings."""

NUMBERS = (
    "flip", "down", "right", "xx", "xy", "x", "yx", "yy", "y",
    "brightness", "contrast", "first", "saturation", "hue", "order", "top", "bottom", "left", "right_edge",
)  # fmt: skip
"""The columns of `Light.numbers`: what was made of the draws."""

GREY = (0.299, 0.587, 0.114)
"""Luminance of RGB (ITU-R BT.601)."""

_LONGEST = 16
"""Sides of the longer to the shorter side of an image, beyond those of what is cut from it, that are resized."""

_ORDERS = ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))


@dataclass(kw_only=True)
class Plain:
    """No augmentation."""

    name: Literal["none"] = "none"
    """Kind of augmentation."""


@dataclass(kw_only=True)
class Affine:
    """Random rotation, scale, shear and translation about the centre, with bilinear interpolation."""

    p: Fraction = 1.0
    """Fraction of the images that are changed."""
    degrees: Annotated[float, Field(ge=0, le=180)] = 0.0
    """Largest rotation in either direction, in degrees."""
    scale: tuple[Ratio, Ratio] = (1.0, 1.0)
    """Smallest and largest scale factor, sampled uniformly on a logarithmic scale."""
    translate: Fraction = 0.0
    """Largest translation, as a fraction of each side."""
    shear: Annotated[float, Field(ge=0, lt=90)] = 0.0
    """Largest shear along the width, in degrees."""

    def __post_init__(self) -> None:
        check_order(self, "scale")


@dataclass(kw_only=True)
class Distort:
    """Photometric distortion as in SSD's training (Liu et al. 2016) and torchvision's RandomPhotometricDistort.

    Brightness, contrast, saturation and hue are changed and channels swapped, each with probability `p` per image;
    contrast comes first for half of the images and last for the others.
    """

    p: Fraction = 0.5
    """Probability of each change, per image."""
    brightness: tuple[Factor, Factor] = (0.875, 1.125)
    """Smallest and largest factor on all pixels."""
    contrast: tuple[Factor, Factor] = (0.5, 1.5)
    """Smallest and largest factor on the distance from the image's mean luminance."""
    saturation: tuple[Factor, Factor] = (0.5, 1.5)
    """Smallest and largest factor on the distance from the pixel's own luminance."""
    hue: tuple[Annotated[float, Field(ge=-0.5, le=0.5)], Annotated[float, Field(ge=-0.5, le=0.5)]] = (-0.05, 0.05)
    """Smallest and largest shift of the hue, in turns of the colour circle."""
    swap: bool = True
    """Swap the colour channels too."""

    def __post_init__(self) -> None:
        check_order(self, "brightness", "contrast", "saturation", "hue")


@dataclass(kw_only=True)
class Light:
    """Light augmentation on the device, for a whole batch at once, in the order of the fields; CLAHE comes first."""

    name: Literal["light"]
    """Kind of augmentation."""
    flip: Fraction = 0.5
    """Fraction of the images that are mirrored."""
    shift: Annotated[int, Field(ge=0, le=1 << 13)] = 0
    """Largest translation along either side, in whole pixels."""
    affine: Affine | None = None
    """Rotation, scale, shear and translation. null: none."""
    fill: Literal["edge", "reflect", "zero"] = "edge"
    """Fill at the border. `edge`: the outermost pixel. `reflect`: the mirrored image. `zero`: black."""
    distort: Distort | None = None
    """Photometric distortion. null: none."""
    erase: Fraction = 0.0
    """Fraction of the images in which a box is set to `data.mean` (random erasing, Zhong et al. 2020)."""
    erase_area: tuple[Fraction, Fraction] = (0.02, 0.33)
    """Smallest and largest area of the box, as a fraction of the image."""
    erase_ratio: tuple[Ratio, Ratio] = (0.3, 3.3)
    """Smallest and largest ratio of the box's height to its width, sampled uniformly on a logarithmic scale."""
    clahe: Fraction = 0.0
    """Fraction of the images whose luminance is equalised in tiles (CLAHE)."""
    clahe_clip: Annotated[float, Field(ge=1, le=MANY)] = 2.0
    """Clip limit: most pixels in one bin of a tile's histogram, as a multiple of the mean over the bins."""
    clahe_tiles: Annotated[int, Field(ge=1, le=64)] = 8
    """Number of tiles along each side."""

    def __post_init__(self) -> None:
        check_order(self, "erase_area", "erase_ratio")

    @property
    def views(self) -> int:
        """Two where nothing but the mirror is at work, one where nothing is; else 0: they cannot be numbered."""
        if self.shift or self.affine or self.distort or self.erase or self.clahe:
            return 0
        return 2 if self.flip else 1

    def numbers(
        self, seed: int, epoch: int, rows: np.ndarray, side: tuple[int, int], view: int | None = None
    ) -> np.ndarray:
        """Draw the augmentation of each of `rows`, float32 (rows, NUMBERS), for images of `side` (height, width).

        `view` 0 or 1 says for all whether they are mirrored. Drawn here and not on the device, so that every machine
        and every batch has the same.
        """
        draw = _draws(seed, epoch, rows)
        height, width = side
        out: dict[str, np.ndarray] = dict.fromkeys(NUMBERS, np.zeros(len(rows)))
        out["flip"] = (draw["flip"] < self.flip) if view is None else np.full(len(rows), view)
        for name in ("down", "right"):
            out[name] = np.floor(draw[name] * (2 * self.shift + 1)) - self.shift
        if self.affine:
            out |= _affine(self.affine, draw, height, width)
        out |= _distortion(self.distort, draw)
        chosen = draw["erase"] < self.erase
        area = _between(draw["area"], self.erase_area) * height * width
        ratio = np.exp(_between(draw["ratio"], np.log(self.erase_ratio)))
        for near, far, draws, length, whole in (
            ("top", "bottom", "top", np.sqrt(area * ratio), height),
            ("left", "right_edge", "left", np.sqrt(area / ratio), width),
        ):
            length = np.clip(np.rint(length), 1, whole)
            out[near] = np.floor(draw[draws] * (whole - length + 1)) * chosen
            out[far] = out[near] + length * chosen
        return np.stack([out[name] for name in NUMBERS], axis=1).astype(np.float32)

    def equalise(self, images: np.ndarray, seed: int, epoch: int, rows: np.ndarray) -> None:
        """Apply CLAHE in place to those of `images`, uint8 (rows, 3, h, w), drawn for it. On the host: it is rare,
        and histograms by tile are no work for a GPU."""
        if self.clahe:
            for i in np.flatnonzero(_draws(seed, epoch, rows)["clahe"] < self.clahe):
                images[i] = clahe.equalise(images[i], self.clahe_clip, self.clahe_tiles)

    def apply(self, images: Tensor, numbers: Tensor, mean: Sequence[float]) -> Tensor:
        """Augment images, uint8 (B, 3, H, W), by their `numbers`, to float 0 .. 1; `mean` fills erased boxes.

        Each image's outcome depends on itself and its numbers alone, to the last bit.
        """
        images = self._move(images, numbers).float().div_(255)
        if self.affine:
            images = self._warp(images, numbers)
        if self.distort:
            images = _distort(images, numbers, self.distort)
        if self.erase:
            images = _erase(images, numbers, mean)
        return images

    def _move(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Move by whole pixels and mirror: picked, not interpolated, so that values stay what they were."""
        if self.flip:
            images = _some(images, _column(numbers, "flip") > 0, numbers, lambda some, _: some.flip(-1))
        if not self.shift:
            return images
        count, channels, height, width = images.shape
        down, right = (_column(numbers, name).view(-1, 1).long() for name in ("down", "right"))
        ys, inside_y = self._inside(torch.arange(height, device=images.device) - down, height)
        xs, inside_x = self._inside(torch.arange(width, device=images.device) - right, width)
        lines = torch.arange(count * channels, device=images.device).view(count, channels, 1) * height + ys[:, None]
        moved = images.reshape(-1, width).index_select(0, lines.view(-1)).view(count, channels, height, width)
        moved = moved.gather(3, xs[:, None, None].expand(count, channels, height, width))
        if self.fill == "zero":
            moved = moved * (inside_y[:, None, :, None] & inside_x[:, None, None, :])
        return moved

    def _inside(self, place: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return the pixel that a place beyond the border shows, and whether the place is within."""
        inside = (place >= 0) & (place < size)
        if self.fill == "reflect":
            place = place.remainder(2 * size)
            return torch.where(place < size, place, 2 * size - 1 - place), inside
        return place.clamp(0, size - 1), inside

    def _warp(self, images: Tensor, numbers: Tensor) -> Tensor:
        height, width = images.shape[2:]
        x = ((torch.arange(width, device=images.device) * 2 + 1) / width - 1).view(1, 1, width)
        y = ((torch.arange(height, device=images.device) * 2 + 1) / height - 1).view(1, height, 1)
        at = {name: _column(numbers, name)[:, 0] for name in ("xx", "xy", "x", "yx", "yy", "y")}
        grid = torch.stack([at["xx"] * x + at["xy"] * y + at["x"], at["yx"] * x + at["yy"] * y + at["y"]], dim=-1)
        mode = {"edge": "border", "reflect": "reflection", "zero": "zeros"}[self.fill]
        return torch.nn.functional.grid_sample(images, grid, "bilinear", mode, align_corners=False)


@dataclass(kw_only=True)
class Timm:
    """timm's training augmentation, per image; the defaults are those of ConvNeXt's authors for ImageNet.

    Use it with `loader.workers`: a 224 px image takes milliseconds. With `data.fit: keep`, evaluation images are
    resized and centre-cropped by timm too; images that were packed at `data.image_size` are evaluated as they are.
    """

    name: Literal["timm"]
    """Kind of augmentation."""
    scale: tuple[Fraction, Fraction] = (0.08, 1.0)
    """Smallest and largest area of a crop, as a fraction of the image."""
    ratio: tuple[Ratio, Ratio] = (0.75, 4 / 3)
    """Smallest and largest ratio of a crop's width to its height."""
    hflip: Fraction = 0.5
    """Fraction of the images that are mirrored left to right."""
    vflip: Fraction = 0.0
    """Fraction of the images that are mirrored top to bottom."""
    color_jitter: Annotated[float, Field(ge=0, le=10)] | None = None
    """Strength of brightness, contrast and saturation changes. No effect with `auto_augment`. null: none."""
    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    """A policy in timm's notation: RandAugment `rand-...`, AugMix `augmix-...`, AutoAugment `v0`, `original`, `3a`.
    null: none."""
    interpolation: Literal["bicubic", "bilinear", "random"] = "bicubic"
    """Interpolation of the resize; `random` chooses per image."""
    re_prob: Fraction = 0.25
    """Fraction of the images with random erasing."""
    re_mode: Literal["pixel", "rand", "const"] = "pixel"
    """Content of erased boxes. `pixel`: noise per pixel. `rand`: one random colour. `const`: the mean."""
    re_count: Annotated[int, Field(ge=1, le=100)] = 1
    """Largest number of boxes in an image."""
    crop_pct: FractionAboveZero = 0.875
    """Fraction of the shorter side that an evaluation crop takes, with `data.fit: keep`."""

    def __post_init__(self) -> None:
        check_order(self, "scale", "ratio")
        if self.scale[1] == 0:
            raise ValueError("scale is [0, 0]; a crop needs a fraction above 0")

    def training(
        self, side: tuple[int, int], mean: tuple[float, ...], std: tuple[float, ...]
    ) -> Callable[[np.ndarray], Tensor]:
        """Make the transform of pixels, uint8 (h, w, 3), to normalised float (3, *side). Draws from global generators.

        Raises ValueError where timm has no such policy.
        """
        try:
            transform = _timm_transform(
                side,
                is_training=True,
                scale=self.scale,
                ratio=self.ratio,
                hflip=self.hflip,
                vflip=self.vflip,
                color_jitter=self.color_jitter,
                auto_augment=self.auto_augment,
                interpolation=self.interpolation,
                re_prob=self.re_prob,
                re_mode=self.re_mode,
                re_count=self.re_count,
                mean=mean,
                std=std,
            )
        except (AssertionError, ValueError, KeyError, IndexError) as error:
            raise ValueError(f"timm does not take auto_augment {self.auto_augment!r} ({error})") from None
        for operation in _operations(transform):
            if operation.name.startswith("Posterize"):
                operation.aug_fn = _posterize
        return _of_pixels(transform)

    def scoring(self, side: tuple[int, int]) -> Callable[[np.ndarray], Tensor]:
        """Make the transform of pixels of any size to what is evaluated, uint8 (3, *side): resized, and cut.

        Of an image longer than `_LONGEST` the middle is resized alone: 4 x 20,000 pixels took 1.3 GB.
        """
        interpolation = "bicubic" if self.interpolation == "random" else self.interpolation
        cut = _of_pixels(_timm_transform(side, interpolation=interpolation, crop_pct=self.crop_pct, normalize=False))
        most = _LONGEST * max(side) // min(side)

        def middle(pixels: np.ndarray) -> Tensor:
            kept = most * min(pixels.shape[:2])
            down, right = (max(0, length - kept) // 2 for length in pixels.shape[:2])
            return cut(np.ascontiguousarray(pixels[down : down + kept, right : right + kept]))

        return middle


AnyAugment = Plain | Light | Timm
Augment = Annotated[AnyAugment, Field(discriminator="name")]
"""The block of a recipe that chooses an augmentation."""


@contextmanager
def borrowed_generators() -> Iterator[Callable[[int], None]]:
    """Yield a function that seeds Python's, numpy's and torch's global generators; their state is put back after it."""
    ours, theirs, third = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def seed(value: int) -> None:
        random.seed(value)
        np.random.seed(value & 0xFFFFFFFF)
        torch.default_generator.manual_seed(value)

    try:
        yield seed
    finally:
        random.setstate(ours)
        np.random.set_state(theirs)
        torch.set_rng_state(third)


def per_picture(
    pictures: Sequence[np.ndarray],
    transform: Callable[[np.ndarray], Tensor],
    seed: int,
    epoch: int,
    rows: np.ndarray,
) -> Tensor:
    """Transform each image, with the global generators set for its row and this epoch, and stack them."""
    with borrowed_generators() as reseed:
        out = []
        for pixels, row in zip(pictures, rows.tolist(), strict=True):
            reseed(rng.number(seed, STREAM, epoch, row))
            out.append(transform(pixels))
    return torch.stack(out)


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Normalise float images 0 .. 1, or uint8 ones, to (pixel - mean) / std."""
    unit = 1.0 if images.is_floating_point() else 255.0
    shift = _kept(tuple(-m / s for m, s in zip(mean, std, strict=True)), images.device)
    scale = _kept(tuple(1 / (s * unit) for s in std), images.device)
    return torch.addcmul(shift, images.float(), scale)


@functools.lru_cache(maxsize=64)
def _kept(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Keep values by channel, (3, 1, 1), on the device: to copy them anew, the host would wait for it each time."""
    return torch.tensor(values, device=device).view(-1, 1, 1)


def _timm_transform(side: tuple[int, int], **settings: Any) -> Any:
    """Make timm's transform of PIL images; its annotations leave out what its settings may be."""
    from timm.data.transforms_factory import create_transform

    return create_transform((3, *side), **settings)


def _of_pixels(transform: Callable[[Any], Tensor]) -> Callable[[np.ndarray], Tensor]:
    from PIL import Image

    return lambda pixels: transform(Image.fromarray(pixels))


def _operations(transform: Any) -> Iterator[Any]:
    """Return the single operations of timm's RandAugment, AugMix or AutoAugment within a transform."""
    for part in transform.transforms:
        yield from getattr(part, "ops", ())
        for several in getattr(part, "policy", ()):
            yield from several


def _posterize(picture: Any, bits: int, **_: Any) -> Any:
    """Keep the upper bits of each channel. timm asks for 0 bits now and then (`rand-m9-mstd0.5-inc1`: in 1 image of
    700): black with the Pillow its networks were trained with, an exception since Pillow 13."""
    from PIL import Image, ImageOps

    if bits >= 8:
        return picture
    return ImageOps.posterize(picture, bits) if bits else Image.new(picture.mode, picture.size)


def _draws(seed: int, epoch: int, rows: np.ndarray) -> dict[str, np.ndarray]:
    table = rng.uniform(seed, STREAM, epoch, np.asarray(rows)[:, None], np.arange(len(DRAWS)))
    return dict(zip(DRAWS, table.T, strict=True))


def _between(draws: np.ndarray, ends: Sequence[float] | np.ndarray) -> np.ndarray:
    return ends[0] + (ends[1] - ends[0]) * draws


def _affine(block: Affine, draw: dict[str, np.ndarray], height: int, width: int) -> dict[str, np.ndarray]:
    """Compute where each pixel comes from: the inverse of move . turn . shear . scale, in grid_sample's units,
    in which the image spans -1 .. 1 on both sides."""
    on = draw["affine"] < block.p
    turn = np.radians(_between(draw["turn"], (-block.degrees, block.degrees))) * on
    shear = np.tan(np.radians(_between(draw["shear"], (-block.shear, block.shear)))) * on
    size = np.exp(_between(draw["size"], np.log(block.scale)) * on)
    right = _between(draw["affine_right"], (-1, 1)) * block.translate * width * on
    down = _between(draw["affine_down"], (-1, 1)) * block.translate * height * on
    cos, sin = np.cos(turn), np.sin(turn)
    xx, xy, yx, yy = (cos + shear * sin) / size, (sin - shear * cos) / size, -sin / size, cos / size
    return {
        "xx": xx,
        "xy": xy * height / width,
        "x": -(xx * right + xy * down) * 2 / width,
        "yx": yx * width / height,
        "yy": yy,
        "y": -(yx * right + yy * down) * 2 / height,
    }


def _distortion(block: Distort | None, draw: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if block is None:
        return {}
    out = {"first": draw["first"] < 0.5}
    for name, chosen, neutral in (
        ("brightness", "brighten", 1.0),
        ("contrast", "contrasts", 1.0),
        ("saturation", "saturate", 1.0),
        ("hue", "tint", 0.0),
    ):
        out[name] = np.where(draw[chosen] < block.p, _between(draw[name], getattr(block, name)), neutral)
    out["order"] = np.where((draw["swap"] < block.p) & block.swap, np.floor(draw["order"] * len(_ORDERS)), 0)
    return out


def _column(numbers: Tensor, name: str) -> Tensor:
    return numbers[:, NUMBERS.index(name)].view(-1, 1, 1, 1)


def _some(images: Tensor, chosen: Tensor, numbers: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Change those images that are chosen, bool (B, 1, 1, 1)."""
    if images.device.type != "cpu":
        # To know which are chosen, the host would have to wait for the device.
        return torch.where(chosen, change(images, numbers), images)
    changed = images.clone()
    # By few: temporary tensors of a whole batch are given back to the system and asked for again, which costs half.
    for rows in chosen.view(-1).nonzero().view(-1).split(32):
        changed.index_copy_(0, rows, change(images.index_select(0, rows), numbers.index_select(0, rows)))
    return changed


def _distort(images: Tensor, numbers: Tensor, block: Distort) -> Tensor:
    first, contrast = _column(numbers, "first") > 0, _column(numbers, "contrast") != 1
    images = (images * _column(numbers, "brightness")).clamp_(0, 1)
    images = _some(images, contrast & first, numbers, _contrast)
    images = _some(images, _column(numbers, "saturation") != 1, numbers, _saturation)
    images = _some(images, _column(numbers, "hue") != 0, numbers, _hue)
    images = _some(images, contrast & ~first, numbers, _contrast)
    return _some(images, _column(numbers, "order") > 0, numbers, _swap) if block.swap else images


def _grey(images: Tensor) -> Tensor:
    red, green, blue = images.split(1, dim=1)
    return (GREY[0] * red).add_(green, alpha=GREY[1]).add_(blue, alpha=GREY[2])


def _contrast(images: Tensor, numbers: Tensor) -> Tensor:
    # In float64: the order in which a float32 mean is summed, and with it its last bit, depends on the batch.
    middle = _grey(images).to(wide(images.device)).mean((2, 3), keepdim=True).float()
    return torch.lerp(middle, images, _column(numbers, "contrast")).clamp_(0, 1)


def _saturation(images: Tensor, numbers: Tensor) -> Tensor:
    return torch.lerp(_grey(images), images, _column(numbers, "saturation")).clamp_(0, 1)


def _hue(images: Tensor, numbers: Tensor) -> Tensor:
    """Add to the hue, keeping value and chroma: RGB to HSV and back in one.

    With value v, chroma c and hue h in turns of the circle, a channel is v - c clamp(2 - 6 d, 0, 1), where d is the
    distance on the circle, in turns, between h and the channel's own hue: 0, 1/3, 2/3 for red, green, blue, plus 1/2.
    """
    red, green, blue = images.split(1, dim=1)
    value = images.amax(1, keepdim=True)
    chroma = value - images.amin(1, keepdim=True)
    reddest, greenest = value == red, value == green
    sixths = torch.where(reddest, green - blue, torch.where(greenest, blue - red, red - green))
    sixths = sixths.div_(chroma.clamp(min=1e-12)).add_(torch.where(reddest, 0.0, torch.where(greenest, 2.0, 4.0)))
    hue = sixths.div_(6).add_(_column(numbers, "hue"))
    # Whole turns are added so that nothing is below 0; in place, for each new tensor of this size costs as much again.
    apart = hue + _kept((2.0, 2 - 1 / 3, 2 - 2 / 3), images.device)
    apart = apart.frac_().sub_(0.5).abs_().clamp_(1 / 6, 1 / 3)
    return apart.mul_(6 * chroma).add_(value - 2 * chroma).clamp_(0, 1)


def _swap(images: Tensor, numbers: Tensor) -> Tensor:
    orders = _kept(sum(_ORDERS, ()), images.device).view(-1, 3)[_column(numbers, "order").view(-1).long()]
    planes = orders + 3 * torch.arange(len(images), device=images.device)[:, None]
    return images.view(-1, *images.shape[2:]).index_select(0, planes.view(-1)).view(images.shape)


def _erase(images: Tensor, numbers: Tensor, mean: Sequence[float]) -> Tensor:
    height, width = images.shape[2:]
    y = torch.arange(height, device=images.device).view(1, 1, height, 1)
    x = torch.arange(width, device=images.device).view(1, 1, 1, width)
    top, bottom, left, right = (_column(numbers, name) for name in ("top", "bottom", "left", "right_edge"))
    box = ((y >= top) & (y < bottom)) & ((x >= left) & (x < right))
    return torch.where(box, _kept(tuple(mean), images.device), images)


def check_order(block: object, *names: str) -> None:
    """Raise ValueError unless the fields of a block are pairs of numbers, the smaller first."""
    for name in names:
        low, high = getattr(block, name)
        if low > high:
            raise ValueError(f"{name} is [{low}, {high}]; give two numbers, the smaller first")
