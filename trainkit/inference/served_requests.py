"""Limit the samples of a request to MLflow's scoring server, before one is decoded."""

from __future__ import annotations

import io
import math
import os
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainkit.data.formats import image_decode, nifti_header
from trainkit.errors import UserError, number_of

SERVED_BYTES = 256 << 20
"""Most bytes of samples that a request to a server may hold; a prediction in a program has no such limit."""
SERVED_PIXELS = 200_000_000
"""Most pixels, or voxels, of all samples of a request: four of the largest images, or a volume of 512 x 512 x 760."""
SAMPLE_PIXELS = 1_000
"""Pixels that a sample counts as at least, for its decoding."""
VARIABLE = "TRAINKIT_SERVED_PIXELS"
"""Variable with another limit of pixels."""


def check_size(given: Sequence[Any], side: tuple[int, int] | None = None, spacing: Sequence[float] = ()) -> None:
    """Raise UserError where samples of a request are of too many bytes, pixels or voxels, before one is decoded.

    Each counts as what the network sees of it, too: an image of a pixel as one of `side`, which it is resized to, and a
    volume as it is at `spacing` in mm.
    """
    held = sum(len(one) if isinstance(one, bytes | str) else getattr(one, "nbytes", 0) for one in given)
    count = number_of(len(given), "samples")
    if held > SERVED_BYTES:
        raise UserError("request", f"{held:,} bytes in {count}", f"at most {SERVED_BYTES:,}", "send fewer at once")
    most, least = pixel_limit(), max(SAMPLE_PIXELS, math.prod(side or ()))
    total = sum(max(least, _pixels(one, spacing)) for one in given)
    if total > most:
        remedy = f"send fewer at once, or start the server with {VARIABLE} set to more"
        seen = " as the network sees them" if total > sum(map(_pixels, given)) else ""
        raise UserError("request", f"{total:,} pixels in {count}{seen}", f"at most {most:,}", remedy)


def pixel_limit() -> int:
    """Return the limit of pixels of a request. Raises UserError where the variable is no number."""
    word = os.environ.get(VARIABLE, "")
    if word and not (word.isascii() and word.isdigit() and int(word[:20]) > 0):
        raise UserError(VARIABLE, repr(word)[:40], "a whole number of pixels above 0", "unset it")
    return int(word[:20]) if word else SERVED_PIXELS


def _pixels(sample: Any, spacing: Sequence[float] = ()) -> int:
    """Return the pixels or voxels of a sample by its header, of a volume the more of its own and those at `spacing`.

    0 of what is none, which its reader refuses.
    """
    own: Sequence[float] = ()
    if isinstance(sample, tuple):  # a volume and its spacing
        sample, own = sample
    try:
        if not isinstance(sample, bytes):
            shape = getattr(sample, "shape", ())
            held = shape[0] * shape[1] if len(shape) == 3 and shape[2] == 3 else getattr(sample, "size", 0)
            return _resampled(held, own, spacing)
        head = zlib.decompressobj(31).decompress(sample, 540) if sample[:2] == b"\x1f\x8b" else sample[:540]
        if nifti_header.byte_order(head) is not None:
            header = nifti_header.read(Path(), io.BytesIO(head), len(head), sys.maxsize, channels=True)
            return _resampled(header.voxels * header.channels, header.spacing, spacing)
        return image_decode.pixels_in(sample)
    except Exception:  # the reader says what is wrong with it
        return 0


def _resampled(held: int, own: Sequence[float], spacing: Sequence[float]) -> int:
    if len(own) != 3 or len(spacing) != 3:
        return held
    return max(held, round(held * math.prod(map(float, own)) / math.prod(spacing)))
