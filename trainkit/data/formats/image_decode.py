"""From encoded bytes to RGB pixels of the size asked for, refusing what could harm or silently change a training."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from trainkit.data import folders
from trainkit.errors import UserError

if TYPE_CHECKING:  # imported where an image is read: checking a recipe reads none
    from PIL import Image

FORMATS = ("JPEG", "PNG", "BMP", "WEBP")
"""The decoders of Pillow that data may reach as it is; every other one is surface for attacks. PGM and PPM are opened
by theirs after a look at the header. TIFF is refused: Pillow reads several of its forms as other values than they hold,
and its directories claim what they like."""

_READ = "JPEG, PNG, BMP, WEBP, PGM or PPM"
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".pgm", ".ppm", ".pnm"})

PIXEL_CAP = 50_000_000
"""Largest image, in pixels, that is decoded: 150 MB as RGB. Checked from the header, before anything is allocated."""

BYTE_CAP = 256 << 20
"""Largest encoded image, in bytes."""

_HEAD = 16
"""Bytes that say of which format a file is."""
_ORIENTATION = 0x0112
_PNM = re.compile(rb"P[2356](?:(?:\s|#[^\r\n]*[\r\n])+\d{1,9}){3}\s")
"""Header of a PGM or PPM file: magic, width, height, and the value that is white."""
_PNM_HEADER = 1 << 12
"""Bytes in which it ends: Pillow reads it byte by byte, also a comment of a gigabyte."""
_HARMLESS = frozenset({0xC4, 0xDB, 0xDD, 0xFE, 0xE0, *range(0xE3, 0xEE), 0xEF})
"""Segments of a JPEG that say nothing of orientation, colours or a second image: tables, JFIF, comments, others'."""


def is_called_picture(name: str) -> bool:
    """Return whether a name has the suffix of an image."""
    return os.path.splitext(name)[1].lower() in SUFFIXES


def read(path: Path, where: str) -> bytes:
    """Read the bytes of an encoded image. Raises UserError when it cannot be read, is empty or beyond the cap."""
    try:
        if (size := folders.size_of(path, where, "an image file")) > BYTE_CAP:
            raise UserError(where, f"{size} bytes", f"at most {BYTE_CAP}")
        return path.read_bytes()
    except OSError as error:
        raise UserError(where, f"cannot be read ({error.strerror or error})", "an image file") from None


def decode(data: bytes, where: str) -> np.ndarray:
    """Decode a JPEG, PNG, BMP, WebP, PGM or PPM image to RGB, uint8 (height, width, 3).

    Grey, palette, 1-bit and CMYK images are converted, alpha is dropped, the orientation of EXIF is applied. Of
    16 bits the upper byte is kept. Raises UserError naming `where` for anything damaged, of several frames,
    too large or of another format.
    """
    from PIL import ImageOps

    with open_image(data, where) as picture:
        picture.load()
        if "exif" in picture.info:
            ImageOps.exif_transpose(picture, in_place=True)
        return _rgb(picture, where)


@contextlib.contextmanager
def open_image(file: Path | bytes, where: str) -> Iterator[Image.Image]:
    """Open an image by Pillow, its size checked and its pixels not read yet; what Pillow raises meanwhile becomes a
    UserError naming `where`."""
    from PIL import Image

    with _refusing(where):
        head = file[:_HEAD] if isinstance(file, bytes) else _head(file, where)
        if not head:
            raise UserError(where, "0 bytes", "an encoded image")
        if head[:4] in _TIFF:
            raise UserError(where, "a TIFF file", _READ, "save it as PNG")
        stream, formats = file, FORMATS
        if not stored_as_is(head) or isinstance(file, bytes):
            data = file if isinstance(file, bytes) else read(file, where)
            stream = io.BytesIO(data)
            if not stored_as_is(head):
                formats = ("PPM",)
                if _PNM.match(data[:_PNM_HEADER]) is None:
                    expected = "P2, P3, P5 or P6, width, height, maximum"
                    raise UserError(where, "a damaged header of a PGM or PPM file", expected)
        with Image.open(stream, formats=formats) as picture:
            _check_size(picture, where)
            # Photographs with a preview or a second view are of the format MPO.
            if picture.format != "MPO" and getattr(picture, "n_frames", 1) != 1:
                raise UserError(where, "an animated image", "a single frame")
            yield picture


def _head(file: Path, where: str) -> bytes:
    folders.size_of(file, where, "an image file")  # a pipe would be waited for
    with file.open("rb") as stream:
        return stream.read(_HEAD)


def _check_size(picture: Image.Image, where: str) -> None:
    # Our cap is below the one from which PIL warns, so an image that PIL calls a bomb never gets further.
    width, height = picture.size
    if width * height > PIXEL_CAP or width < 1 or height < 1:
        raise UserError(where, f"{width} x {height} pixels", f"1 to {PIXEL_CAP} pixels")


@contextlib.contextmanager
def _refusing(where: str) -> Iterator[None]:
    """Turn into UserError what PIL raises on damaged input: a dozen kinds of exception, SyntaxError among them."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:
            raise UserError(where, f"cannot be read ({error.strerror})", "an image file") from None
        text = " ".join(str(error).split()) or type(error).__name__
        text = "not an image of these formats" if "identify" in text or "BytesIO" in text else text[:120]
        raise UserError(where, f"cannot be decoded ({text})", _READ) from None


def header(file: Path | bytes, where: str) -> tuple[tuple[int, int], int]:
    """Read height and width, as shown, and the orientation by which an image is turned: 1 to 8, 1 for not at all.

    Raises UserError where it is damaged or too large.
    """
    with open_image(file, where) as picture:
        width, height = picture.size
        turn = picture.getexif().get(_ORIENTATION, 1) if "exif" in picture.info else 1
        return ((width, height) if turn in range(5, 9) else (height, width)), turn if turn in range(1, 9) else 1


def stored_as_is(data: bytes) -> bool:
    """Return False for an encoded image that a packed set keeps as PNG: PGM or PPM."""
    return not (data[:1] == b"P" and data[1:2] in b"2356" and data[2:3] in b"# \t\r\n")


def opened(picture: Image.Image, where: str) -> np.ndarray:
    """Convert an image that Pillow holds or has opened, as `decode` does with its file. Raises UserError."""
    from PIL import ImageOps

    with _refusing(where):
        _check_size(picture, where)
        picture.load()
        return _rgb(ImageOps.exif_transpose(picture), where)


def plain_jpeg(data: bytes) -> tuple[int, int] | None:
    """Return height and width of a JPEG that `plain_decoder` is for; None for others, and for what is no JPEG.

    It has three channels of 8 bits, luma and chroma, coded by Huffman's method; no Exif, no marker of Adobe's and no
    second image: nothing that Pillow and torchvision treat differently.
    """
    if data[:2] != b"\xff\xd8":
        return None
    place, size = 2, None
    while place + 4 <= len(data) and data[place] == 0xFF:
        marker, length = data[place + 1], int.from_bytes(data[place + 2 : place + 4], "big")
        segment = data[place + 4 : place + 2 + length]
        if marker == 0xDA:  # what follows is the image
            return size
        if marker in (0xC0, 0xC1, 0xC2):
            if len(segment) != 15 or segment[0] != 8 or segment[5] != 3 or segment[6::3] != b"\x01\x02\x03":
                return None
            size = int.from_bytes(segment[1:3], "big"), int.from_bytes(segment[3:5], "big")
            if min(size) < 1 or size[0] * size[1] > PIXEL_CAP:
                return None
        elif not (marker in _HARMLESS or (marker in (0xE1, 0xE2) and segment[:4] not in (b"Exif", b"MPF\0"))):
            return None
        place += 2 + length
    return None


Decoder = Callable[[np.ndarray], np.ndarray]
"""Takes encoded bytes as uint8, and gives RGB, uint8 (3, height, width). Raises ValueError or RuntimeError where it
cannot."""


@functools.cache
def plain_decoder() -> Decoder | None:
    """Return a faster decoder of `plain_jpeg`s than Pillow's, of the same arithmetic, that lets go of the interpreter.

    That is torchvision's, which takes 0.55 of Pillow's time at 112 px; None where it was built without one.
    """
    try:
        import torch
        import torchvision.io  # noqa: F401  (registers the operator)

        decode_jpeg, rgb = torch.ops.image.decode_jpeg.default, 3
    except (ImportError, AttributeError, RuntimeError):
        return None
    # A copy: torch warns of memory that cannot be written to, and a file larger than memory cannot be mapped otherwise.
    return lambda data: decode_jpeg(torch.from_numpy(data.copy()), rgb, False).numpy()


def _rgb(picture: Image.Image, where: str) -> np.ndarray:
    if picture.mode == "RGB":
        return np.asarray(picture)
    if picture.mode.startswith(("I", "F")):
        # PIL clips these at 255 instead of scaling, which turns a 16-bit face into a white square.
        values = np.asarray(picture)
        if values.dtype.kind == "f" or values.min() < 0 or values.max() > 65535:
            raise UserError(where, f"pixels of mode {picture.mode}", "8 or 16 bits a channel")
        return np.repeat((values >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")  # PIL warns of the direct way
    if picture.mode == "RGBa":
        picture = picture.convert("RGBA")
    return np.asarray(picture.convert("RGB"))


Fit = Literal["no", "down", "any", "stretch", "crop"]
"""How an image is brought to a size: see `fit`."""


def fit(pixels: np.ndarray, size: tuple[int, int], where: str, how: Fit = "no") -> np.ndarray:
    """Bring an image to `size` (height, width), uint8 (height, width, 3). Bicubic with antialiasing.

    `stretch` resizes both sides whatever the shape was; `crop` resizes the largest centred part that has the shape
    asked for, so that nothing is squeezed. The other three are strict, because squeezing a face changes it: only a
    image of the same shape is resized, `down` to fewer pixels, `any` also to more, and `no` not at all.
    Raises UserError where `how` does not allow it.
    """
    height, width = pixels.shape[:2]
    if (height, width) == size:
        return pixels
    if how in ("stretch", "crop"):
        return _resized(pixels, size, _centre(height, width, size) if how == "crop" else None)
    found, wanted = f"{width} x {height} pixels", f"{size[1]} x {size[0]}"
    if height * size[1] != width * size[0]:
        raise UserError(where, found, wanted, "crop or align the images first")
    if how == "no" or (how == "down" and height < size[0]):
        remedy = "import with --resize" if how == "no" else "set data.image_size to the size of the images or less"
        raise UserError(where, found, wanted, remedy)
    return _resized(pixels, size, None)


def _centre(height: int, width: int, size: tuple[int, int]) -> tuple[float, float, float, float]:
    """Return left, upper, right and lower edge of the largest centred part of the shape of `size`, in pixels."""
    scale = min(height / size[0], width / size[1])
    left, upper = (width - size[1] * scale) / 2, (height - size[0] * scale) / 2
    # Rounding must not lead past the edge, which PIL refuses.
    return max(left, 0.0), max(upper, 0.0), min(left + size[1] * scale, width), min(upper + size[0] * scale, height)


def _resized(pixels: np.ndarray, size: tuple[int, int], box: tuple[float, float, float, float] | None) -> np.ndarray:
    from PIL import Image

    # Cutting within the resize keeps an image of 1 x 5000 from becoming 224 x 1,120,000 on its way.
    picture = Image.fromarray(pixels).resize((size[1], size[0]), Image.Resampling.BICUBIC, box=box)
    return np.asarray(picture)


def encode(pixels: np.ndarray) -> bytes:
    """Encode losslessly, as PNG."""
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG", compress_level=1)
    return stream.getvalue()
