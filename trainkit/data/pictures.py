"""From encoded bytes to RGB pixels of one size, refusing what could harm or silently change a training."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from trainkit.errors import UserError

FORMATS = ("JPEG", "PNG", "BMP", "WEBP")
"""The decoders that data may reach; every other one that PIL knows is surface for attacks."""

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})

PIXEL_CAP = 50_000_000
"""Largest picture, in pixels, that is decoded: 150 MB as RGB. Checked from the header, before anything is allocated."""

BYTE_CAP = 256 << 20
"""Largest encoded picture, in bytes."""


def read(path: Path, where: str) -> bytes:
    """The bytes of an encoded picture. Raises UserError when it cannot be read, is empty or beyond the cap."""
    try:
        if path.stat().st_size > BYTE_CAP:
            raise UserError(where, f"{path.stat().st_size} bytes", f"at most {BYTE_CAP}")
        return path.read_bytes()
    except OSError as error:
        raise UserError(where, f"cannot be read ({error.strerror or error})", "a picture file") from None


def decode(data: bytes, where: str) -> np.ndarray:
    """Decode a JPEG, PNG, BMP or WebP picture to RGB, uint8 (height, width, 3).

    Grey, palette, 1-bit, 16-bit and CMYK pictures are converted, alpha is dropped, an EXIF orientation is applied.
    Raises UserError naming `where` for anything damaged, animated, too large or of another format.
    """
    if not data:
        raise UserError(where, "0 bytes", "an encoded picture")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            width, height = picture.size
            # Our cap is below the one from which PIL warns, so a picture that PIL calls a bomb never gets further.
            if width * height > PIXEL_CAP or width < 1 or height < 1:
                raise UserError(where, f"{width} x {height} pixels", f"1 to {PIXEL_CAP} pixels")
            if getattr(picture, "n_frames", 1) != 1:
                raise UserError(where, "an animated picture", "a single frame")
            picture.load()
            if "exif" in picture.info:
                ImageOps.exif_transpose(picture, in_place=True)
            return _rgb(picture, where)
    except UserError:
        raise
    except MemoryError:
        raise
    except (
        Exception
    ) as error:  # PIL's decoders raise a dozen kinds of exception on damaged input, SyntaxError among them
        text = " ".join(str(error).split()) or type(error).__name__
        if "BytesIO" in text:
            text = "not a picture of these formats"
        raise UserError(where, f"cannot be decoded ({text[:120]})", " or ".join(FORMATS)) from None


def _rgb(picture: Image.Image, where: str) -> np.ndarray:
    if picture.mode == "RGB":
        return np.asarray(picture)
    if picture.mode.startswith(("I", "F")):
        # PIL clips these at 255 instead of scaling, which turns a 16-bit face into a white square.
        values = np.asarray(picture)
        if values.dtype.kind == "f" or values.min() < 0 or values.max() > 65535:
            raise UserError(where, f"pixels of mode {picture.mode}", "8 or 16 bits a channel")
        return np.repeat((values.astype(np.uint32) >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
    return np.asarray(picture.convert("RGB"))


def fit(pixels: np.ndarray, size: int, where: str, resize: str = "no") -> np.ndarray:
    """Bring a picture to `size` x `size`: `resize` is `no` (another size is an error), `down` or `any`.

    Only squares are resized: squeezing a face changes it. Bicubic with antialiasing.
    """
    height, width = pixels.shape[:2]
    if (height, width) == (size, size):
        return pixels
    found, wanted = f"{width} x {height} pixels", f"{size} x {size}"
    if height != width:
        raise UserError(where, found, wanted, "crop or align the pictures first (trainkit data import --align)")
    if resize == "no" or (resize == "down" and height < size):
        remedy = "import with --resize" if resize == "no" else "set data.image_size to the size of the pictures or less"
        raise UserError(where, found, wanted, remedy)
    return np.asarray(Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC))


def encode(pixels: np.ndarray) -> bytes:
    """Losslessly, as PNG."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG", compress_level=1)
    return stream.getvalue()
