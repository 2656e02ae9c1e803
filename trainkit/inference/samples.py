"""Read single samples from memory: images as bytes, base64 or arrays, volumes as files, bytes or arrays."""

from __future__ import annotations

import base64
import binascii
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from trainkit.data.formats import image_decode, nifti
from trainkit.data.formats.nifti_header import VOXEL_LIMIT
from trainkit.errors import UserError
from trainkit.inference.table_writer import BATCH, Columns

if TYPE_CHECKING:
    from trainkit.data.formats.nifti_header import Header

Seen = TypeVar("Seen")

_PICTURE = "an encoded image as bytes or base64, or pixels uint8 (height, width, 3)"
_VOLUME = "a NIfTI file as path or bytes, or an array with 3 axes (4 with channels last) and its spacing in mm"


def pixels(sample: Any, where: str) -> np.ndarray:
    """Return the pixels of an image, uint8 (height, width, 3). Raises UserError naming `where` for anything else.

    It may be encoded (JPEG, PNG, BMP, WebP), as bytes or base64 text, or pixels 0 to 255, RGB or grey, as an array or
    nested lists.
    """
    if isinstance(sample, str):
        sample = from_base64(sample, where)
    if isinstance(sample, bytes | bytearray | memoryview):
        if len(sample) > image_decode.BYTE_CAP:
            raise UserError(
                where, f"{len(sample):,} bytes", f"at most {image_decode.BYTE_CAP:,}", "send a smaller image"
            )
        return image_decode.decode(bytes(sample), where)
    array = _array(sample, where, _PICTURE)
    if array.ndim == 2:
        array = np.repeat(array[:, :, None], 3, axis=2)
    if array.ndim != 3 or array.shape[2] != 3 or not array.size:
        raise UserError(where, f"an array of shape {array.shape}", _PICTURE)
    if array.shape[0] * array.shape[1] > image_decode.PIXEL_CAP:
        height, width = array.shape[:2]
        found = f"{width} x {height} pixels"
        raise UserError(where, found, f"1 to {image_decode.PIXEL_CAP} pixels")
    if array.dtype != np.uint8:
        whole = array.dtype.kind in "iu" and array.min() >= 0 and array.max() <= 255
        if not whole:
            raise UserError(where, f"an array of {array.dtype}", "whole numbers from 0 to 255, uint8")
        array = array.astype(np.uint8)
    return np.ascontiguousarray(array)


def from_base64(text: str, where: str) -> bytes:
    """Decode base64, with or without line breaks. Raises UserError naming `where` for other text."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise UserError(where, f"text that is not base64: {text[:40]!r}", "an encoded file as base64") from None


def volume(sample: Any, where: str) -> tuple[np.ndarray, Header]:
    """Return the voxels of a volume, float32 (channels, *axes), and its header. Raises UserError for anything else.

    It may be a NIfTI file, as path or bytes, or a pair of an array with 3 axes that run to the right, anterior and
    superior (RAS+), and the spacing in mm along each. A 4th axis holds channels.
    """
    if isinstance(sample, str | Path):
        return nifti.read_image(sample)
    if isinstance(sample, bytes | bytearray | memoryview):
        data = bytes(sample)
    elif isinstance(sample, Sequence) and len(sample) == 2:
        data = nifti_bytes(_array(sample[0], where, _VOLUME), sample[1], where)
    else:
        raise UserError(where, f"a {type(sample).__name__}", _VOLUME)
    with tempfile.TemporaryDirectory() as folder:  # our checks with nibabel read files
        file = Path(folder, "volume.nii")
        file.write_bytes(data)
        try:
            return nifti.read_image(file)
        except UserError as error:
            raise UserError(where, error.found, error.expected, error.remedy) from None


def batched(
    samples: Iterable[Any], read: Callable[[Any, str], Seen], columns: Callable[[Sequence[Seen]], Columns]
) -> Columns:
    """Read samples and predict their rows in batches as large as those of tables; return the columns of all."""
    parts = [columns(batch) for batch in _batches(read(sample, f"sample {k}") for k, sample in enumerate(samples))]
    return {
        name: np.concatenate([part[name] for part in parts])
        if isinstance(parts[0][name], np.ndarray)
        else [value for part in parts for value in part[name]]
        for name in parts[0]
    }


def each(samples: Iterable[Any], label: Callable[[Any, str], np.ndarray]) -> Columns:
    """Predict the label map of each sample, one after another; return them as a column."""
    return {"label_map": [label(sample, f"sample {k}") for k, sample in enumerate(samples)]}


def nifti_bytes(array: np.ndarray, spacing: Any, where: str) -> bytes:
    """Encode an array as a NIfTI file with axes to the right, anterior and superior (RAS+), and optional channels.

    Raises UserError naming `where` for an array without 3 or 4 axes, or an invalid spacing.
    """
    import nibabel

    try:
        mm = np.array(spacing, np.float64)
    except (TypeError, ValueError):
        mm = np.zeros(0)
    if mm.shape != (3,) or not (np.isfinite(mm) & (mm > 0)).all():
        raise UserError(where, f"spacing {spacing!r}"[:200], "three numbers above 0, in mm")
    if array.ndim not in (3, 4) or array.dtype.kind not in "fiu":
        raise UserError(where, f"an array {array.dtype} of shape {array.shape}", _VOLUME)
    if array.size > VOXEL_LIMIT:
        raise UserError(where, f"{array.size:,} voxels", f"at most {VOXEL_LIMIT:,} voxels")
    return nibabel.Nifti1Image(array.astype(np.float32), np.diag([*mm, 1.0])).to_bytes()


def _array(sample: Any, where: str, expected: str) -> np.ndarray:
    try:
        array = np.asarray(sample)
    except (TypeError, ValueError):
        array = np.array(None)
    if array.dtype.kind not in "fiu":
        raise UserError(where, f"a {type(sample).__name__}", expected)
    return array


def _batches(items: Iterable[Seen]) -> Iterator[list[Seen]]:
    items = iter(items)
    return iter(lambda: list(islice(items, BATCH)), [])
