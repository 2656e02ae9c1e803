"""NIfTI files: headers that are checked before anything is allocated, voxels, orientation, and label maps written back.

nibabel parses the header; the voxels are read here, because nibabel trusts the header (one that claims 256 GB is
believed) and does not look at what follows the data, where gzip keeps its checksum.

World axes are RAS+: x grows to the right of the patient, y to the front, z to the head. Distances are in mm. The affine
is the sform where the file has one, else the qform, as nibabel and most viewers take it; the spacing is the length of
its columns.
"""

from __future__ import annotations

import gzip
import itertools
import math
import os
import stat
import struct
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trainkit.errors import UserError

SUFFIXES = (".nii.gz", ".nii")
"""Names of NIfTI files end so, in either case. Whether one is compressed is taken from its first bytes."""

VOXEL_LIMIT = 1 << 29
"""Largest volume that is read, in voxels: 2 GiB as float32. Checked from the header, before anything is allocated."""

GRID_TOLERANCE = 1e-3
"""mm by which the corners of two grids that count as equal may differ."""

GRID_SHARE = 0.02
"""Or this share of the finest spacing, if that is more: programs that copy an affine through a quaternion in float32
move corners by some micrometres, which is no mistake."""

LABEL_TOLERANCE = 1e-3
"""How far from a whole number a label may be: resampling programs leave 0.99999997 for 1."""

SPACING_LIMITS = (1e-4, 1e3)
"""mm; what is beyond is a damaged header or one in other units than it says."""

ORIGIN_LIMIT = 1e6
"""mm from the origin of the world, likewise."""

MAX_LABEL = 255

_SURPLUS = 512
"""Bytes after the voxels that are let pass: some programs pad. A row or slice more than the header says is damage."""
_EXTENSIONS = 64 << 20
_DEFLATE = 1032
"""What deflate can gain at most: a gzip file cannot hold more than its own size times this."""
_CHUNK = 1 << 20
_NAMED = 8
_LEAST_VOLUME = 1e-3
"""Of the box that unit vectors along the three axes of a grid span; below it they lie almost in one plane."""
_SIZES = {348: ("Nifti1Header", b"n+1\0", 344), 540: ("Nifti2Header", b"n+2\0", 4)}
_KINDS = "whole numbers of 8 to 64 bits or floats of 32 or 64"
_DTYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4", 1024: "i8", 1280: "u8"}
_OTHERS = {
    1: "1-bit", 32: "complex64", 128: "RGB", 1536: "float128", 1792: "complex128", 2048: "complex256", 2304: "RGBA"
}  # fmt: skip
_CODES = 5
_UNITS = {0: 1.0, 1: 1e3, 2: 1.0, 3: 1e-3}


@dataclass(frozen=True, eq=False)
class Header:
    """What a NIfTI file says of itself, checked. Axes are those of the file."""

    path: Path
    shape: tuple[int, int, int]
    dtype: np.dtype
    """Of the voxels as stored, with their byte order."""
    affine: np.ndarray
    """float64 (4, 4): voxel numbers to RAS+ mm."""
    spacing: tuple[float, float, float]
    """mm from voxel to voxel along each axis."""
    offset: int = 352
    """Byte at which the voxels begin."""
    slope: float = 1.0
    inter: float = 0.0
    """A voxel is slope * stored + inter."""
    placed: str = "sform"
    """Where the affine is from: sform, qform, or nothing, when the file does not say where left and right are."""
    notes: tuple[str, ...] = ()
    """What is odd and does not keep the file from being read, in sentences."""
    raw: bytes = field(default=b"", repr=False)
    """The header as it is in the file."""

    @property
    def voxels(self) -> int:
        """Number of voxels."""
        return math.prod(self.shape)

    @property
    def scaled(self) -> bool:
        """Whether voxels are more than the numbers that are stored."""
        return (self.slope, self.inter) != (1.0, 0.0)


@dataclass(frozen=True)
class Orientation:
    """How a volume is turned from the axes of its file to stored axes: by permuting and flipping alone."""

    order: tuple[int, int, int]
    """The axis of the file that becomes each stored axis."""
    flip: tuple[bool, bool, bool]
    """Whether each stored axis runs against that of the file."""

    def apply(self, array: np.ndarray) -> np.ndarray:
        """A view of a volume of the file's axes, in stored axes."""
        return array.transpose(self.order)[self._slices()]

    def undo(self, array: np.ndarray) -> np.ndarray:
        """A view of a volume of stored axes, in those of the file: the exact inverse of `apply`."""
        return array[self._slices()].transpose(np.argsort(self.order))

    def spacing(self, header: Header) -> tuple[float, float, float]:
        """mm from voxel to voxel along the stored axes."""
        first, second, third = (header.spacing[axis] for axis in self.order)
        return first, second, third

    def _slices(self) -> tuple[slice, ...]:
        return tuple(slice(None, None, -1) if flip else slice(None) for flip in self.flip)


def is_nifti(path: Path | str) -> bool:
    """Whether a file is called like one."""
    return os.fspath(path).lower().endswith(SUFFIXES)


def stem(path: Path | str) -> str:
    """The name of a file without folder, `.nii` and `.nii.gz`."""
    name = Path(path).name
    for suffix in SUFFIXES:
        if name.lower().endswith(suffix):
            return name[: -len(suffix)]
    return name


def read_header(path: Path | str) -> Header:
    """The header of a file, `.nii` or `.nii.gz`, NIfTI-1 or 2 of either byte order, checked.

    Raises UserError naming the file when it cannot be read, is none, is damaged, is not of 3 axes, says nothing usable
    of orientation or spacing, holds complex numbers or colours, or claims more than VOXEL_LIMIT or than it can hold.
    """
    path = Path(path)
    with _opened(path) as (stream, size, compressed):
        return _header(path, stream, size, compressed)


def read_image(path: Path | str) -> tuple[np.ndarray, Header]:
    """A volume as float32, in the axes of the file, and its header.

    Raises UserError as `read_header`, and when voxels are missing, too many, NaN or infinite (with their number and the
    first one), or a checksum of gzip is wrong. Memory: 4 bytes a voxel and one chunk.
    """
    path = Path(path)
    with _opened(path) as (stream, size, compressed):
        header = _header(path, stream, size, compressed)
        flat = np.empty(header.voxels, np.float32)
        bad = _Bad(header)
        for begin, stored in _chunks(stream, header):
            part = flat[begin : begin + len(stored)]
            _scale(stored, header, part)
            if (stored.dtype.kind == "f" or header.scaled) and not _all_finite(part):
                bad.add(begin, ~np.isfinite(part), part)
        _check_end(stream, header)
    if bad.count:
        raise UserError(str(path), bad.described(), "finite intensities")
    return flat.reshape(header.shape, order="F"), header


def read_labels(path: Path | str, classes: int | None = None) -> tuple[np.ndarray, Header]:
    """A label map as uint8, in the axes of the file, and its header.

    What is stored as floats must be whole numbers up to LABEL_TOLERANCE: 0.99999997 is 1 and 1.5 is an error. Raises
    UserError as `read_image`, and for labels that are not whole, below 0, above 255, or not below `classes`, with the
    values found. Memory: 1 byte a voxel and one chunk.
    """
    path = Path(path)
    top = MAX_LABEL if classes is None else classes - 1
    with _opened(path) as (stream, size, compressed):
        header = _header(path, stream, size, compressed)
        flat = np.empty(header.voxels, np.uint8)
        broken, outside = _Bad(header), _Bad(header)
        for begin, stored in _chunks(stream, header):
            part = flat[begin : begin + len(stored)]
            if stored.dtype.kind in "iu" and not header.scaled:
                whole = stored
            else:
                values = np.empty(len(stored), np.float64)
                _scale(stored, header, values)
                with np.errstate(invalid="ignore"):
                    whole = np.rint(values)
                    wrong = ~(np.abs(values - whole) <= LABEL_TOLERANCE)
                if wrong.any():
                    broken.add(begin, wrong, values)
                    whole[wrong] = 0
            if whole.min() < 0 or whole.max() > top:
                outside.add(begin, (whole < 0) | (whole > top), whole)
                continue
            part[...] = whole
        _check_end(stream, header)
    expected = f"whole numbers from 0 to {top}"
    if classes is not None:
        expected += f", for {classes} classes with the background"
    for bad in (broken, outside):
        if bad.count:
            raise UserError(str(path), f"labels {bad.described()}", expected)
    return flat.reshape(header.shape, order="F"), header


def orientation(affine: np.ndarray, axes: str) -> Orientation:
    """How a volume with this affine is brought closest to stored axes such as `yzx`, growing to right, front and head.

    `axes` names the world axis of each stored one. Raises ValueError when it does not name each of x, y, z once.
    """
    if sorted(axes) != ["x", "y", "z"]:
        raise ValueError(f"axes {axes!r}: each of x, y and z once is needed")
    closest, signs = _closest(np.asarray(affine, np.float64))
    world = ["xyz".index(letter) for letter in axes]
    first, second, third = ((closest[axis], bool(signs[axis] < 0)) for axis in world)
    return Orientation((first[0], second[0], third[0]), (first[1], second[1], third[1]))


def ras_spacing(header: Header) -> tuple[float, float, float]:
    """mm from voxel to voxel along the axes of the file that are closest to x, y and z."""
    closest, _ = _closest(header.affine)
    x, y, z = (header.spacing[axis] for axis in closest)
    return x, y, z


def slice_axis_order(spacings_ras: np.ndarray) -> str:
    """The word for the stored axes of a set of volumes, from their spacings along x, y, z in mm, (N, 3).

    The first is the one across slices, with the largest median; of those within 1 % of it z before y before x. The
    others follow in the order z, y, x.
    """
    median = np.median(np.asarray(spacings_ras, np.float64).reshape(-1, 3), axis=0)
    if not np.isfinite(median).all():
        raise ValueError("the spacing of one volume or more is needed")
    across = max(axis for axis in range(3) if median[axis] >= 0.99 * median.max())
    return "".join("xyz"[axis] for axis in (across, *(other for other in (2, 1, 0) if other != across)))


def same_grid(a: Header, b: Header) -> str | None:
    """A sentence when the voxels of two files do not lie in the same places, else None.

    Corners may differ by GRID_TOLERANCE or GRID_SHARE of the finest spacing, whichever is more.
    """
    if a.shape != b.shape:
        return f"{_by(a.shape)} voxels, {b.path.name} has {_by(b.shape)}"
    corners = np.array([(*corner, 1) for corner in itertools.product(*((0, n - 1) for n in a.shape))], np.float64)
    apart = np.linalg.norm((corners @ (a.affine - b.affine).T)[:, :3], axis=1).max()
    if apart <= max(GRID_TOLERANCE, GRID_SHARE * min(*a.spacing, *b.spacing)):
        return None
    if not np.allclose(a.spacing, b.spacing, rtol=1e-3):
        said = f"spacing {_by(a.spacing)} mm, {b.path.name} has {_by(b.spacing)} mm"
    else:
        said = f"lies elsewhere than {b.path.name}"
    return f"{said} (their affines put a corner {apart:.3g} mm apart)"


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
    content = _label_header(like) + labels.tobytes(order="F")
    if path.name.lower().endswith(".gz"):
        content = gzip.compress(content, compresslevel=6, mtime=0)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        raise UserError(str(path), f"cannot be written ({error.strerror or error})") from None
    finally:
        aside.unlink(missing_ok=True)


class _Bad:
    """Voxels that must not be: how many, the first, and some of their values."""

    def __init__(self, header: Header):
        self.shape, self.count, self.first, self.values = header.shape, 0, 0, set()

    def add(self, begin: int, wrong: np.ndarray, values: np.ndarray) -> None:
        """Voxels from `begin` on, of which those marked are wrong."""
        if not self.count:
            self.first = begin + int(np.argmax(wrong))
        self.count += int(wrong.sum())
        if len(self.values) <= _NAMED:
            some = np.unique(values[wrong])[: _NAMED + 1]
            self.values |= {f"{value:.9g}" if value.dtype.kind == "f" else str(value) for value in some}

    def described(self) -> str:
        listed = sorted(self.values, key=lambda text: (math.isnan(float(text)), float(text)))
        more = " and more" if len(listed) > _NAMED else ""
        x, y, z = (int(i) for i in np.unravel_index(self.first, self.shape, order="F"))
        of = f"{self.count} of {math.prod(self.shape)} voxels"
        return f"{', '.join(listed[:_NAMED])}{more} in {of}, the first at ({x}, {y}, {z})"


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, int, bool]]:
    """The decompressed bytes of a file, its size, and whether it is compressed."""
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
                yield file, found.st_size, False
                return
            with gzip.GzipFile(fileobj=file, mode="rb") as stream:
                yield stream, found.st_size, True
    except EOFError:
        raise UserError(
            str(path), "truncated: the compressed data end early", "a whole file", "copy it again"
        ) from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise UserError(str(path), f"damaged ({error})", "intact gzip data", "copy it again") from None
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) and "null byte" not in str(error):
            raise
        text = getattr(error, "strerror", None) or str(error)
        raise UserError(str(path), f"cannot be read ({text})", expected) from None


def _header(path: Path, stream: BinaryIO, size: int, compressed: bool) -> Header:
    """Read and check the header; the stream then stands behind it."""
    where = str(path)
    start = stream.read(4)
    order = _byte_order(start)
    if order is None:
        raise UserError(where, _instead(start), "a NIfTI file (.nii or .nii.gz)")
    length = struct.unpack(order + "i", start)[0]
    kind, magic, place = _SIZES[length]
    raw = start + stream.read(length - 4)
    if len(raw) < length:
        raise UserError(where, f"truncated: {len(raw)} bytes of the header", f"{length}", "copy it again")
    if (found := raw[place : place + 4]) != magic:
        if found[:3] in (b"ni1", b"ni2"):
            raise UserError(where, "the header of a pair of files (.hdr and .img)", "one file", "convert it to .nii.gz")
        raise UserError(where, f"no NIfTI magic ({found!r})", f"{magic!r}", "Analyze files must be converted")
    fields = _parse(where, kind, raw, order)
    shape = _shape(where, fields["dim"])
    dtype = _dtype(where, int(fields["datatype"]), int(fields["bitpix"]), order)
    offset = _offset(where, fields["vox_offset"], length)
    claimed, held = offset + math.prod(shape) * dtype.itemsize, size * (_DEFLATE if compressed else 1)
    if math.prod(shape) > VOXEL_LIMIT or claimed > held:
        # The second is true of any file that was cut short, and of headers that a few bytes of zeros stand behind.
        found = f"the header claims {_by(shape)} voxels ({_bytes(claimed)}), the file has {_bytes(size)}"
        if math.prod(shape) > VOXEL_LIMIT:
            raise UserError(where, found, f"at most {VOXEL_LIMIT:,} voxels")
        raise UserError(where, f"truncated or damaged: {found}", "all of them", "copy it again")
    slope, inter = _scaling(where, float(fields["scl_slope"]), float(fields["scl_inter"]))
    affine, placed, notes = _affine(where, fields, shape)
    first, second, third = (float(length) for length in np.linalg.norm(affine[:3, :3], axis=0))
    return Header(path, shape, dtype, affine, (first, second, third), offset, slope, inter, placed, notes, raw)


def _byte_order(start: bytes) -> str | None:
    if len(start) == 4:
        for order in "<>":
            if struct.unpack(order + "i", start)[0] in _SIZES:
                return order
    return None


def _instead(start: bytes) -> str:
    """What a file that is no NIfTI is."""
    if not start:
        return "0 bytes"
    known = {
        b"\x89PNG": "a PNG picture",
        b"\xff\xd8\xff": "a JPEG picture",
        b"NRRD": "an NRRD file",
        b"PK\x03\x04": "a zip archive",
        b"\x93NUM": "a NumPy array",
        b"<": "a text (HTML or XML)",
        b"MINC": "MINC",
        b"vers": "the pointer of a Git LFS file, not the file",
        b"\x1f\x8b": "compressed twice",
    }
    return next((text for magic, text in known.items() if start.startswith(magic)), "not a NIfTI file")


def _parse(where: str, kind: str, raw: bytes, order: str) -> Any:
    try:
        import nibabel
    except ImportError:
        remedy = 'pip install "trainkit[medical]"'
        raise UserError(where, "nibabel, which reads NIfTI headers, is not installed", remedy=remedy) from None
    module = nibabel.nifti1 if kind == "Nifti1Header" else nibabel.nifti2
    return getattr(module, kind)(raw, endianness=order, check=False)


def _shape(where: str, dim: np.ndarray) -> tuple[int, int, int]:
    axes, sizes = int(dim[0]), [int(size) for size in dim[1:]]
    if not 1 <= axes <= 7:
        raise UserError(where, f"{axes} axes", "3", "the header is damaged")
    sizes = sizes[:axes]
    while len(sizes) > 3 and sizes[-1] == 1:
        sizes.pop()
    if min(sizes) < 1:
        raise UserError(where, f"{_by(sizes)} voxels", "1 or more along each axis", "the header is damaged")
    if len(sizes) != 3:
        remedy = "take one of the volumes out of it" if len(sizes) > 3 else ""
        raise UserError(where, f"{len(sizes)} axes ({_by(sizes)} voxels)", "3", remedy)
    return sizes[0], sizes[1], sizes[2]


def _dtype(where: str, code: int, bits: int, order: str) -> np.dtype:
    if code not in _DTYPES:
        raise UserError(where, f"voxels of type {_OTHERS.get(code, f'number {code}')}", _KINDS)
    dtype = np.dtype(order + _DTYPES[code])
    if bits not in (0, 8 * dtype.itemsize):
        raise UserError(where, f"{bits} bits a voxel and the type {dtype.name}", "one of them", "the header is damaged")
    return dtype


def _offset(where: str, value: Any, length: int) -> int:
    """Voxels begin behind the header and 4 bytes more; of a 0 here one program makes 0, others 348 or 352."""
    offset = float(value)
    least = length + 4
    if not (math.isfinite(offset) and offset == int(offset) and least <= offset <= least + _EXTENSIONS):
        raise UserError(where, f"voxels that begin at byte {offset:g}", f"{least} or a little more")
    return int(offset)


def _scaling(where: str, slope: float, inter: float) -> tuple[float, float]:
    """Slope and intercept; a slope of 0 or NaN says that there is none."""
    if slope == 0 or math.isnan(slope):
        return 1.0, 0.0
    if not (math.isfinite(slope) and math.isfinite(inter)):
        raise UserError(where, f"voxels scaled by {slope:g} and {inter:g} (scl_slope, scl_inter)", "finite numbers")
    return slope, inter


@np.errstate(invalid="ignore", over="ignore")  # NumPy warns of some NaNs before they are found below
def _affine(where: str, fields: Any, shape: tuple[int, int, int]) -> tuple[np.ndarray, str, tuple[str, ...]]:
    """Voxels to RAS+ mm, where it is from, and what is odd about it."""
    said = np.abs(np.asarray(fields["pixdim"][1:4], np.float64))
    if not (np.isfinite(said).all() and said.min() > 0):
        raise UserError(where, f"spacing {_by(said)} mm (pixdim)", "three numbers above 0")
    codes = {"sform": int(fields["sform_code"]), "qform": int(fields["qform_code"])}
    if wrong := [f"{name}_code {code}" for name, code in codes.items() if not 0 <= code <= _CODES]:
        raise UserError(where, " and ".join(wrong), f"0 to {_CODES}", "the header is damaged")
    forms: dict[str, np.ndarray] = {}
    if codes["sform"] > 0:
        forms["sform"] = np.asarray(fields.get_sform(), np.float64)
    if codes["qform"] > 0:
        try:
            fields["pixdim"][0] = -1 if fields["pixdim"][0] < 0 else 1  # which nibabel insists on; 0 stands for 1
            fields["pixdim"][1:4] = said
            forms["qform"] = np.asarray(fields.get_qform(), np.float64)
        except Exception as error:  # nibabel's HeaderDataError and its ValueErrors about quaternions
            if "sform" not in forms:
                raise UserError(where, f"no usable qform ({error})"[:300], "a rotation (unit quaternion)") from None
    notes = []
    if forms:
        placed = "sform" if "sform" in forms else "qform"
        affine = forms[placed]
    else:
        placed = "nothing"
        affine = np.asarray(fields.get_base_affine(), np.float64)
        notes.append("says nothing of its orientation; taken as nibabel does, where x grows to the left")
    unit = int(fields["xyzt_units"]) & 7
    if unit not in _UNITS:
        raise UserError(where, f"lengths in unit number {unit} (xyzt_units)", "metres, mm or micrometres")
    scale = np.array([_UNITS[unit]] * 3 + [1.0])[:, None]
    affine = affine * scale
    _check_affine(where, affine, placed)
    spacing = np.linalg.norm(affine[:3, :3], axis=0)
    if not np.allclose(spacing, said * _UNITS[unit], rtol=0.01):
        notes.append(f"pixdim says {_by(said * _UNITS[unit])} mm, the {placed} {_by(spacing)} mm, which is taken")
    if len(forms) == 2 and np.isfinite(other := forms["qform"] * scale).all():
        corner = np.array([*(n - 1 for n in shape), 1.0])
        apart = max(np.linalg.norm((affine - other)[:3, 3]), np.linalg.norm(((affine - other) @ corner)[:3]))
        if apart > max(0.5 * spacing.min(), GRID_TOLERANCE):
            notes.append(f"sform and qform lie {apart:.3g} mm apart; the sform is taken")
    return affine, placed, tuple(notes)


def _check_affine(where: str, affine: np.ndarray, placed: str) -> None:
    name = f"affine ({placed})"
    if not np.isfinite(affine).all():
        raise UserError(where, f"{name} with NaN or infinity: {_rows(affine)}", "finite numbers")
    spacing = np.linalg.norm(affine[:3, :3], axis=0)
    low, high = SPACING_LIMITS
    if not (low <= spacing.min() and spacing.max() <= high):
        raise UserError(where, f"{name} with spacing {_by(spacing)} mm: {_rows(affine)}", f"{low:g} to {high:g} mm")
    if abs(np.linalg.det(affine[:3, :3] / spacing)) < _LEAST_VOLUME:
        raise UserError(where, f"singular {name}: {_rows(affine)}", "three axes in different directions")
    if np.abs(affine[:3, 3]).max() > ORIGIN_LIMIT:
        raise UserError(where, f"{name} with origin {_rows(affine[:3, 3:].T)} mm", f"at most {ORIGIN_LIMIT:g} mm away")


def _closest(affine: np.ndarray) -> tuple[tuple[int, int, int], np.ndarray]:
    """For each of x, y, z the axis of the file that follows it most closely, and whether it grows (1) or falls (-1).

    Of all ways to pair axes the one with the largest sum of absolute cosines.
    """
    cosines = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
    best, most = (0, 1, 2), -1.0
    for pairing in itertools.permutations(range(3)):
        score = sum(abs(float(cosines[world, axis])) for world, axis in enumerate(pairing))
        if score > most + 1e-6:  # so that rounding does not decide between two that are as good
            best, most = pairing, score
    return best, np.array([1.0 if cosines[world, axis] >= 0 else -1.0 for world, axis in enumerate(best)])


def _chunks(stream: BinaryIO, header: Header) -> Iterator[tuple[int, np.ndarray]]:
    """The stored numbers in pieces, and where each begins; the stream stands behind the header."""
    _skip(stream, header.offset - len(header.raw), header)
    buffer = bytearray(min(_CHUNK, header.voxels) * header.dtype.itemsize)
    for begin in range(0, header.voxels, _CHUNK):
        count = min(_CHUNK, header.voxels - begin)
        part = memoryview(buffer)[: count * header.dtype.itemsize]
        filled = 0
        while filled < len(part):
            got = stream.readinto(part[filled:])
            if not got:
                raise _short(header, begin * header.dtype.itemsize + filled)
            filled += got
        yield begin, np.frombuffer(part, header.dtype)


def _skip(stream: BinaryIO, count: int, header: Header) -> None:
    while count:
        got = len(stream.read(min(count, _CHUNK)))
        if not got:
            raise _short(header, 0)
        count -= got


def _short(header: Header, found: int) -> UserError:
    claimed = header.voxels * header.dtype.itemsize
    return UserError(
        str(header.path), f"truncated: {found:,} bytes of voxels", f"{claimed:,}, as its header says", "copy it again"
    )


def _check_end(stream: BinaryIO, header: Header) -> None:
    """That little follows the voxels; reading on is also what makes gzip compare its checksum."""
    if len(stream.read(_SURPLUS + 1)) > _SURPLUS:
        claimed = f"{_by(header.shape)} voxels of {header.dtype.name}"
        raise UserError(str(header.path), f"more data than {claimed}, which its header claims", "no more than these")


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


def _label_header(like: Header) -> bytes:
    """The header of a label map, little-endian, with 4 bytes that say that no extensions follow."""
    order = _byte_order(like.raw[:4]) or "<"
    length = len(like.raw)
    kind, magic, _ = _SIZES[length]
    source = _parse(str(like.path), kind, like.raw, order)
    header = type(source)(endianness="<")
    header["dim"] = [3, *like.shape, 1, 1, 1, 1]
    header["datatype"], header["bitpix"], header["vox_offset"], header["magic"] = 2, 8, length + 4, magic
    header["scl_slope"], header["scl_inter"] = 1.0, 0.0
    header["pixdim"] = [source["pixdim"][0], *source["pixdim"][1:4], 1, 1, 1, 1]
    header["xyzt_units"] = int(source["xyzt_units"]) & 7
    names = ["qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d"]
    for name in (*names, "qoffset_x", "qoffset_y", "qoffset_z", "srow_x", "srow_y", "srow_z"):
        header[name] = source[name]
    return header.binaryblock + bytes(4)


def _by(numbers: Any) -> str:
    return " x ".join(f"{number:g}" if isinstance(number, float) else str(number) for number in numbers)


def _rows(matrix: np.ndarray) -> str:
    return "; ".join(" ".join(f"{value:.6g}" for value in row) for row in matrix[:3])


def _bytes(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count} bytes"
