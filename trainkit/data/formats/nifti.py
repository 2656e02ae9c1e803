"""NIfTI files: voxels read behind checks of our own, and label maps written back by nibabel.

nibabel believes a header (one that claims 256 GB as well) and does not look at what follows the voxels, where gzip
keeps its checksum. So headers are checked first, and every file is read to its end.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from trainkit.data import folders
from trainkit.data.formats import nifti_header
from trainkit.data.formats.nifti_header import Header, by
from trainkit.errors import UserError, few
from trainkit.files import write_aside
from trainkit.interfaces import IGNORED

SUFFIXES = (".nii.gz", ".nii")
"""Endings of NIfTI files, in either case. A file is unpacked if its first bytes are those of gzip."""

LABEL_TOLERANCE = 1e-3
"""How far from a whole number a label may be: resampling programs leave 0.99999997 for 1."""

MAX_LABEL = IGNORED - 1

_SURPLUS = 512
"""Bytes after the voxels that are let pass: some programs pad. A row or slice more than the header says is damage."""
_DEFLATE = 1032
"""Most that deflate can gain: a gzip file cannot hold more than its own size times this."""
_CHUNK = 1 << 20
_NAMED = 8


def is_nifti(path: Path | str) -> bool:
    """Return True for a file with one of the `SUFFIXES`."""
    return os.fspath(path).lower().endswith(SUFFIXES)


def stem(path: Path | str) -> str:
    """Return the name of a file without folder, `.nii` and `.nii.gz`."""
    name = Path(path).name
    return next((name[: -len(suffix)] for suffix in SUFFIXES if name.lower().endswith(suffix)), name)


def read_header(path: Path | str, *, channels: bool = False) -> Header:
    """Read the header of a file, `.nii` or `.nii.gz`, NIfTI-1 or 2 of either byte order, and check it.

    With `channels` a 4th axis is taken for that of the channels. Raises UserError naming the file when it cannot be
    read, is none, is damaged, is not of 3 axes, says nothing usable of orientation or spacing, holds complex numbers or
    colours, or claims more than VOXEL_LIMIT or than it can hold.
    """
    with _opened(Path(path)) as (stream, size, most):
        return nifti_header.read(Path(path), stream, size, most, channels=channels)


def read_image(path: Path | str) -> tuple[np.ndarray, Header]:
    """Read a volume of 3 or 4 axes as float32 (channels, *axes of the file), and its header.

    Raises UserError as `read_header`, and when voxels are missing, too many, NaN or infinite (with their number and the
    first one), or a checksum of gzip is wrong.
    """
    stored, header = _stored(Path(path), channels=True)
    with np.errstate(over="ignore", invalid="ignore"):
        values = _scaled(stored, header).astype(np.float32, copy=False)
    _refuse(header, ~np.isfinite(values), values, "", "finite intensities")
    # The first axis of the file runs fastest, that of the channels slowest.
    return np.moveaxis(values.reshape((*header.shape, header.channels), order="F"), 3, 0), header


def read_labels(
    path: Path | str, classes: int | None = None, values: Sequence[int] | None = None, ignored: int | None = None
) -> tuple[np.ndarray, Header]:
    """Read a label map as uint8, in the axes of the file, and its header.

    Labels that are stored as floats must be whole numbers up to LABEL_TOLERANCE: 0.99999997 is 1 and 1.5 is an error.
    `values` are those that classes 1, 2, ... have in the file; None: 1, 2, ... `ignored` is that of voxels which nobody
    labelled, and becomes IGNORED. Raises UserError as `read_image`, and for labels that are not whole, or of no class.
    """
    whole, header = _whole(path)
    known = np.asarray([0, *(values or range(1, classes or MAX_LABEL + 1)), *([] if ignored is None else [ignored])])
    order = np.argsort(known)
    places = np.searchsorted(known, whole, sorter=order)
    labels = order.astype(np.uint8)[np.minimum(places, len(known) - 1, out=places)]
    _refuse(header, known[labels] != whole, whole, "labels ", few(map(str, known.tolist()), _NAMED))
    if ignored is not None:
        labels[labels == len(known) - 1] = IGNORED
    return labels.reshape(header.shape, order="F"), header


def label_values(path: Path | str) -> set[int]:
    """Return the values in a label map. Raises as `read_labels`, but for no value."""
    return {int(value) for value in np.unique(_whole(path)[0])}


def write_labels(path: Path | str, labels: np.ndarray, like: Header) -> None:
    """Write a label map over the image that `like` is the header of: with its affine, in mm.

    `labels` is uint8 of the shape and axes of that file. Nothing else of its header is taken over: free text may name a
    patient. Written aside and renamed; the same labels give the same bytes. Raises ValueError for another type or
    shape, UserError when it cannot be written.
    """
    from nibabel import Nifti1Image, Nifti2Image

    path = Path(path)
    if labels.dtype != np.uint8 or labels.shape != like.shape:
        raise ValueError(f"labels {labels.dtype} {labels.shape}, uint8 {like.shape} is needed")
    image = (Nifti1Image if max(like.shape) < 1 << 15 else Nifti2Image)(labels, like.affine)
    image.header.set_xyzt_units("mm")
    content = image.to_bytes()
    if path.name.lower().endswith(".gz"):
        content = gzip.compress(content, compresslevel=6, mtime=0)
    try:
        write_aside(path, content)
    except OSError as error:
        raise UserError(str(path), f"cannot be written ({error.strerror or error})") from None


def _scaled(stored: np.ndarray, header: Header) -> np.ndarray:
    """Return what the stored numbers stand for: float64 where they are scaled."""
    if header.scaling is None:
        return stored
    values = stored.astype(np.float64)
    values *= header.scaling[0]
    values += header.scaling[1]
    return values


def _whole(path: Path | str) -> tuple[np.ndarray, Header]:
    """Read the labels of a file as whole numbers, one after another. Raises UserError for those that are none."""
    stored, header = _stored(Path(path))
    values = _scaled(stored, header)
    if values.dtype.kind != "f":
        return values, header
    with np.errstate(invalid="ignore"):
        whole = np.rint(values)
        _refuse(header, ~(np.abs(values - whole) <= LABEL_TOLERANCE), values, "labels ", "whole numbers")
    return whole, header


def _refuse(header: Header, wrong: np.ndarray, values: np.ndarray, noun: str, expected: str) -> None:
    """Raise UserError where voxels are wrong: some of their values, how many there are, and the first of them."""
    if not wrong.any():
        return
    some = np.unique(values[wrong])
    listed = few((f"{value:.9g}" if some.dtype.kind == "f" else str(value) for value in some), _NAMED)
    x, y, z = np.unravel_index(int(wrong.argmax()) % header.voxels, header.shape, order="F")
    found = f"{noun}{listed} in {np.count_nonzero(wrong)} of {wrong.size} voxels, the first at ({x}, {y}, {z})"
    raise UserError(str(header.path), found, expected)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[io.BufferedIOBase, int, int]]:
    """Open the decompressed bytes of a file; its size, and the bytes that there may be at most."""
    size = folders.size_of(path, str(path), "a NIfTI file (.nii or .nii.gz)")
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            yield gzip.GzipFile(fileobj=file) if packed else file, size, size * (_DEFLATE if packed else 1)
    except EOFError:
        found = "truncated: the compressed data end early"
        raise UserError(str(path), found, "a whole file", "copy it again") from None
    except (OSError, zlib.error) as error:
        found = "damaged" if isinstance(error, zlib.error | gzip.BadGzipFile) else "cannot be read"
        raise UserError(str(path), f"{found} ({error})", "an intact file", "copy it again") from None


def _stored(path: Path, channels: bool = False) -> tuple[np.ndarray, Header]:
    """Read the numbers of a file as they are stored, one after another, and its header, and the file to its end."""
    with _opened(path) as (stream, size, most):
        header = nifti_header.read(path, stream, size, most, channels=channels)
        numbers = np.empty(header.voxels * header.channels, header.dtype)
        stream.seek(header.offset)
        data, done = numbers.view(np.uint8), 0
        while done < len(data) and (part := stream.read(min(_CHUNK, len(data) - done))):
            data[done : done + len(part)] = np.frombuffer(part, np.uint8)
            done += len(part)
        if done < len(data):
            found, expected = f"truncated: {done:,} bytes of voxels", f"{len(data):,}, as its header says"
            raise UserError(str(path), found, expected, "copy it again")
        # Reading on makes gzip compare its checksum, too.
        if len(stream.read(_SURPLUS + 1)) > _SURPLUS:
            claimed = f"{by(header.shape)} voxels of {header.dtype.name}"
            raise UserError(str(path), f"more data than {claimed}, the size in its header", "exactly this size")
    return numbers, header
