"""NIfTI files: voxels read by nibabel behind checks of our own, and label maps written back.

nibabel believes a header (one that claims 256 GB as well) and does not look at what follows the voxels, where gzip
keeps its checksum. So headers are checked first, and every file is read to its end.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

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
_GEOMETRY = (
    "qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y", "qoffset_z", "srow_x",
    "srow_y", "srow_z",
)  # fmt: skip


def is_nifti(path: Path | str) -> bool:
    """Return True for a file with one of the `SUFFIXES`."""
    return os.fspath(path).lower().endswith(SUFFIXES)


def stem(path: Path | str) -> str:
    """Return the name of a file without folder, `.nii` and `.nii.gz`."""
    name = Path(path).name
    return next((name[: -len(suffix)] for suffix in SUFFIXES if name.lower().endswith(suffix)), name)


class UnknownLabels(UserError):
    """Label map with whole numbers that are no class: the classes may have other values than 1, 2, ..."""


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
    first one), or a checksum of gzip is wrong. Memory: 4 bytes a voxel and one chunk.
    """
    with _voxels(Path(path), channels=True) as (header, chunks):
        flat, bad = np.empty(header.voxels * header.channels, np.float32), _Bad(header)
        for begin, stored in chunks:
            part = flat[begin : begin + len(stored)]
            _scale(stored, header, part)
            if (stored.dtype.kind == "f" or header.scaled) and not _all_finite(part):
                bad.add(begin, ~np.isfinite(part), part)
    bad.refuse("", "finite intensities")
    # The first axis of the file runs fastest, that of the channels slowest.
    return np.moveaxis(flat.reshape((*header.shape, header.channels), order="F"), 3, 0), header


def read_labels(
    path: Path | str, classes: int | None = None, values: Sequence[int] | None = None, ignored: int | None = None
) -> tuple[np.ndarray, Header]:
    """Read a label map as uint8, in the axes of the file, and its header.

    Labels that are stored as floats must be whole numbers up to LABEL_TOLERANCE: 0.99999997 is 1 and 1.5 is an error.
    `values` are those that classes 1, 2, ... have in the file; None: 1, 2, ... `ignored` is that of voxels which nobody
    labelled, and becomes IGNORED. Raises UserError as `read_image`, and for labels that are not whole; UnknownLabels
    for those below 0, above MAX_LABEL, or of no class, with the values found.
    Memory: 1 byte a voxel and one chunk.
    """
    top = MAX_LABEL if classes is None else classes - 1
    if ignored is not None:
        values = [*(values or range(1, top + 1)), ignored]
    table = None if values is None else np.asarray([0, *values], np.float64)
    with _voxels(Path(path)) as (header, chunks):
        flat, broken, outside = np.empty(header.voxels, np.uint8), _Bad(header), _Bad(header)
        for begin, stored in chunks:
            whole = _whole(begin, stored, header, broken)
            if table is not None:
                numbers, known = _numbered(whole, table)
                if not known.all():
                    outside.add(begin, ~known, whole)
                if ignored is not None:
                    numbers[numbers == len(table) - 1] = IGNORED
                flat[begin : begin + len(whole)] = numbers
            elif whole.min() < 0 or whole.max() > top:
                outside.add(begin, (whole < 0) | (whole > top), whole)
            else:
                flat[begin : begin + len(whole)] = whole
    expected = f"whole numbers from 0 to {top}"
    if table is not None:
        expected = few((f"{value:.0f}" for value in table), _NAMED)
    elif classes is not None:
        expected += f", for {classes} classes with the background"
    broken.refuse("labels ", expected)
    outside.refuse("labels ", expected, UnknownLabels)
    return flat.reshape(header.shape, order="F"), header


def label_values(path: Path | str) -> set[int]:
    """Return the values in a label map. Raises as `read_labels`, but for no value."""
    found: set[int] = set()
    with _voxels(Path(path)) as (header, chunks):
        broken = _Bad(header)
        for begin, stored in chunks:
            found |= {int(value) for value in np.unique(_whole(begin, stored, header, broken))}
    broken.refuse("labels ", "whole numbers")
    return found


def _whole(begin: int, stored: np.ndarray, header: Header, broken: _Bad) -> np.ndarray:
    """Return labels as whole numbers; those that are none are noted, and become 0."""
    if stored.dtype.kind != "f" and not header.scaled:
        return stored
    values = np.empty(len(stored), np.float64)
    _scale(stored, header, values)
    with np.errstate(invalid="ignore"):
        whole = np.rint(values)
        wrong = ~(np.abs(values - whole) <= LABEL_TOLERANCE)
    if wrong.any():
        broken.add(begin, wrong, values)
        whole[wrong] = 0
    return whole


def _numbered(whole: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the place of each value in the table, uint8, and whether it is there."""
    order = np.argsort(table)
    at = order[np.searchsorted(table, whole, sorter=order).clip(max=len(table) - 1)]
    return at.astype(np.uint8), table[at] == whole


def write_labels(path: Path | str, labels: np.ndarray, like: Header) -> None:
    """Write a label map over the image that `like` is the header of: same affine, codes and units.

    `labels` is uint8 of the shape and axes of that file. Of its header nothing but the geometry is taken over: free
    text may name a patient. Written aside and renamed; the same labels give the same bytes. Raises ValueError for
    another type, shape or suffix, UserError when it cannot be written.
    """
    path = Path(path)
    if labels.dtype != np.uint8 or labels.shape != like.shape:
        raise ValueError(f"labels {labels.dtype} {labels.shape}, uint8 {like.shape} is needed")
    if not is_nifti(path):
        raise ValueError(f"{path.name} does not end in {' or '.join(SUFFIXES)}")
    source = nifti_header.parsed(like.raw)
    header = type(source)(endianness="<")
    header.set_data_dtype(np.uint8)
    header.set_data_shape(like.shape)
    header["vox_offset"], header["magic"] = len(like.raw) + 4, nifti_header.MAGIC[len(like.raw)][0]
    header["scl_slope"], header["scl_inter"] = 1.0, 0.0
    header["pixdim"] = [*source["pixdim"][:4], 1, 1, 1, 1]
    header["xyzt_units"] = int(source["xyzt_units"]) & 7
    for name in _GEOMETRY:
        header[name] = source[name]
    content = header.binaryblock + bytes(4) + labels.tobytes(order="F")  # 4 bytes say that no extensions follow
    if path.name.lower().endswith(".gz"):
        content = gzip.compress(content, compresslevel=6, mtime=0)
    try:
        write_aside(path, content)
    except OSError as error:
        raise UserError(str(path), f"cannot be written ({error.strerror or error})") from None


class _Bad:
    """Count of voxels that must not be, the first of them, and some of their values."""

    def __init__(self, header: Header):
        self.header, self.count, self.first, self.values = header, 0, 0, set()

    def add(self, begin: int, wrong: np.ndarray, values: np.ndarray) -> None:
        """Note voxels from `begin` on, of which those marked are wrong."""
        if not self.count:
            self.first = begin + int(np.argmax(wrong))
        self.count += int(wrong.sum())
        if len(self.values) <= _NAMED:
            some = np.unique(values[wrong])[: _NAMED + 1]
            self.values |= {f"{value:.9g}" if value.dtype.kind == "f" else str(value) for value in some}

    def refuse(self, noun: str, expected: str, kind: type[UserError] = UserError) -> None:
        """Raise an error of `kind` where there are any."""
        if self.count:
            listed = sorted(self.values, key=lambda text: (math.isnan(float(text)), float(text)))
            more = " and more" if len(listed) > _NAMED else ""
            x, y, z = (int(i) for i in np.unravel_index(self.first % self.header.voxels, self.header.shape, order="F"))
            of = f"{self.count} of {self.header.voxels * self.header.channels} voxels"
            found = f"{noun}{', '.join(listed[:_NAMED])}{more} in {of}, the first at ({x}, {y}, {z})"
            raise kind(str(self.header.path), found, expected)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[io.BufferedIOBase, int, int]]:
    """Open the decompressed bytes of a file; its size, and the bytes that there may be at most."""
    expected = "a NIfTI file (.nii or .nii.gz)"
    try:
        # Without O_NONBLOCK a named pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(descriptor, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise UserError(str(path), "not a file", expected)
            compressed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if not compressed:
                yield file, found.st_size, found.st_size
                return
            with gzip.GzipFile(fileobj=file, mode="rb") as stream:
                yield stream, found.st_size, found.st_size * _DEFLATE
    except EOFError:
        found = "truncated: the compressed data end early"
        raise UserError(str(path), found, "a whole file", "copy it again") from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise UserError(str(path), f"damaged ({error})", "intact gzip data", "copy it again") from None
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) and "embedded null" not in str(error):
            raise
        raise UserError(str(path), f"cannot be read ({getattr(error, 'strerror', None) or error})", expected) from None


@contextmanager
def _voxels(path: Path, channels: bool = False) -> Iterator[tuple[Header, Iterator[tuple[int, np.ndarray]]]]:
    """Open a file: its header, and the stored numbers in pieces with where each begins. Then it is read to its end."""
    with _opened(path) as (stream, size, most):
        header = nifti_header.read(path, stream, size, most, channels=channels)
        yield header, _chunks(stream, header)
        _check_end(stream, header)


def _chunks(stream: io.BufferedIOBase, header: Header) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the stored numbers in pieces, and where each begins."""
    from nibabel.volumeutils import array_from_file

    size = header.dtype.itemsize
    voxels = header.voxels * header.channels
    for begin in range(0, voxels, _CHUNK):
        count = min(_CHUNK, voxels - begin)
        try:
            yield begin, array_from_file((count,), header.dtype, stream, header.offset + begin * size, mmap=False)
        except OSError as error:
            if error.errno is not None or isinstance(error, gzip.BadGzipFile):
                raise
            found = f"truncated: {max(0, stream.tell() - header.offset):,} bytes of voxels"
            expected = f"{voxels * size:,}, as its header says"
            raise UserError(str(header.path), found, expected, "copy it again") from None


def _check_end(stream: io.BufferedIOBase, header: Header) -> None:
    """Raise UserError where more than padding follows the voxels. Reading on makes gzip compare its checksum, too."""
    if len(stream.read(_SURPLUS + 1)) > _SURPLUS:
        claimed = f"{by(header.shape)} voxels of {header.dtype.name}"
        raise UserError(str(header.path), f"more data than {claimed}, the size in its header", "exactly this size")


def _scale(stored: np.ndarray, header: Header, out: np.ndarray) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        if header.scaled:
            stored = stored.astype(np.float64)
            stored *= header.slope
            stored += header.inter
        out[...] = stored


def _all_finite(part: np.ndarray) -> bool:
    with np.errstate(invalid="ignore"):
        return bool(np.isfinite(part.sum(dtype=np.float64)))  # a NaN or an infinity makes the sum one too
