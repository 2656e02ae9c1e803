"""Headers of NIfTI files: parsed by nibabel, and checked before anything is allocated by what they say.

The affine leads to RAS+ mm (x to the right of the patient, y to the front, z to the head). It is the sform where the
file has one, else the qform, as nibabel and most viewers take it; the spacing is the length of its columns.
"""

from __future__ import annotations

import io
import itertools
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainkit.errors import UserError

if TYPE_CHECKING:
    from nibabel.nifti1 import Nifti1Header

VOXEL_LIMIT = 1 << 29
"""Largest volume that is read, in voxels: 2 GiB as float32. Checked from the header, before anything is allocated."""

GRID_TOLERANCE = 1e-3
"""mm by which the corners of two grids that count as equal may differ."""

SPACING_LIMITS = (1e-4, 1e3)
"""mm; what is beyond is a damaged header or one in other units than it says."""

SHEAR = 1e-3
"""Largest cosine of the angle between two axes of a grid that count as being at right angles: 0.06 degrees. Volumes,
surface distances and augmentation in mm take the three spacings alone, and a length is then wrong by up to half the
cosine, 0.05 %. Affines in float32, and those of registrations, have up to 3e-4."""

ORIGIN_LIMIT = 1e6
"""mm from the origin of the world, likewise."""

CHANNEL_LIMIT = 64
"""Most channels of a file of 4 axes."""

MAGIC = {348: (b"n+1\0", 344), 540: (b"n+2\0", 4)}
"""By length of the header, of NIfTI-1 and 2: the magic and its place."""

_EXTENSIONS = 64 << 20
_LEAST_VOLUME = 1e-3
"""Of the box that unit vectors along the three axes of a grid span; below it they lie almost in one plane."""
_TYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4", 1024: "i8", 1280: "u8"}
_OTHER_TYPES = {
    1: "1-bit", 32: "complex64", 128: "RGB", 1536: "float128", 1792: "complex128", 2048: "complex256", 2304: "RGBA"
}  # fmt: skip
_UNITS = {0: 1.0, 1: 1e3, 2: 1.0, 3: 1e-3}
_OTHER_FILES = {
    b"\x89PNG": "a PNG image", b"\xff\xd8\xff": "a JPEG image", b"NRRD": "an NRRD file",
    b"PK\x03\x04": "a zip archive", b"\x93NUM": "a NumPy array", b"<": "a text (HTML or XML)", b"MINC": "MINC",
    b"vers": "the pointer of a Git LFS file, not the file", b"\x1f\x8b": "compressed twice",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Header:
    """The checked header of a NIfTI file. Axes are those of the file."""

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
    """Source of the affine: sform, qform, or nothing, when the file does not say where left and right are."""
    notes: tuple[str, ...] = ()
    """Sentences about oddities that do not keep the file from being read."""
    raw: bytes = field(default=b"", repr=False)
    """The header as it is in the file."""
    channels: int = 1
    """Channels of a voxel: the length of the 4th axis, or the number of files."""

    @property
    def voxels(self) -> int:
        """Number of voxels, of one channel."""
        return math.prod(self.shape)

    @property
    def scaled(self) -> bool:
        """True where voxels are more than the numbers that are stored."""
        return (self.slope, self.inter) != (1.0, 0.0)


def read(path: Path, stream: io.BufferedIOBase, size: int, most: int, *, channels: bool = False) -> Header:
    """Read and check the header of a file of `size` bytes, at most `most` when it is unpacked.

    With `channels` a 4th axis is taken for that of the channels. Raises UserError naming the file.
    """
    where = str(path)
    raw = stream.read(4)
    order = byte_order(raw)
    if order is None:
        other = next((text for magic, text in _OTHER_FILES.items() if raw.startswith(magic)), "not a NIfTI file")
        raise UserError(where, other if raw else "0 bytes", "a NIfTI file (.nii or .nii.gz)")
    length = struct.unpack(order + "i", raw)[0]
    magic, place = MAGIC[length]
    raw += stream.read(length - 4)
    if len(raw) < length:
        raise UserError(where, f"truncated: {len(raw)} bytes of the header", f"{length}", "copy it again")
    if (found := raw[place : place + 4]) != magic:
        if found[:3] in (b"ni1", b"ni2"):
            raise UserError(where, "the header of a pair of files (.hdr and .img)", "one file", "convert it to .nii.gz")
        raise UserError(where, f"no NIfTI magic ({found!r})", f"{magic!r}", "Analyze files must be converted")
    fields = parsed(raw)
    shape, layers = _shape(where, fields["dim"].tolist(), channels)
    dtype = _dtype(where, int(fields["datatype"]), int(fields["bitpix"]), order)
    offset = float(fields["vox_offset"])
    least = length + 4  # behind the header come 4 bytes more; of a 0 here one program makes 0, others 348 or 352
    if not (math.isfinite(offset) and offset.is_integer() and least <= offset <= least + _EXTENSIONS):
        raise UserError(where, f"voxels that begin at byte {offset:g}", f"{least} or a little more")
    voxels = math.prod(shape) * layers
    claimed = int(offset) + voxels * dtype.itemsize
    sides = shape if layers == 1 else (*shape, layers)
    found = f"the header claims {by(sides)} voxels ({size_text(claimed)}), the file has {size_text(size)}"
    if voxels > VOXEL_LIMIT:
        raise UserError(where, found, f"at most {VOXEL_LIMIT:,} voxels")
    if claimed > most:  # true of any file that was cut short, and of headers that a few bytes of zeros stand behind
        raise UserError(where, f"truncated or damaged: {found}", "all of them", "copy it again")
    slope, inter = float(fields["scl_slope"]), float(fields["scl_inter"])
    if slope == 0 or math.isnan(slope):  # which say that nothing is scaled
        slope, inter = 1.0, 0.0
    if not (math.isfinite(slope) and math.isfinite(inter)):
        raise UserError(where, f"voxels scaled by {slope:g} and {inter:g} (scl_slope, scl_inter)", "finite numbers")
    affine, placed, notes = _affine(where, fields, shape)
    first, second, third = np.linalg.norm(affine[:3, :3], axis=0).tolist()
    spacing = first, second, third
    return Header(path, shape, dtype, affine, spacing, int(offset), slope, inter, placed, notes, raw, layers)


def byte_order(raw: bytes) -> str | None:
    """Return `<` or `>`, the byte order of a header that begins so; None for what is no header."""
    return next((o for o in "<>" if len(raw) >= 4 and struct.unpack(o + "i", raw[:4])[0] in MAGIC), None)


def parsed(raw: bytes) -> Nifti1Header:
    """Parse a header by nibabel, unchecked."""
    from nibabel.nifti1 import Nifti1Header
    from nibabel.nifti2 import Nifti2Header

    kind = Nifti1Header if len(raw) == Nifti1Header.sizeof_hdr else Nifti2Header
    return kind(raw, endianness=byte_order(raw), check=False)


def _shape(where: str, dim: list[int], channels: bool) -> tuple[tuple[int, int, int], int]:
    """Return the voxels along the three axes, and the channels."""
    axes, sizes = dim[0], dim[1:]
    if not 1 <= axes <= 7:
        raise UserError(where, f"{axes} axes", "3", "the header is damaged")
    sizes = sizes[:axes]
    while len(sizes) > 3 and sizes[-1] == 1:
        sizes.pop()
    if min(sizes) < 1:
        raise UserError(where, f"{by(sizes)} voxels", "1 or more along each axis", "the header is damaged")
    layers = 1
    if channels and len(sizes) in (4, 5) and (len(sizes) == 4 or sizes[3] == 1):  # vectors have an axis of time of 1
        layers, sizes = sizes[-1], sizes[:3]
        if layers > CHANNEL_LIMIT:
            raise UserError(where, f"{layers} volumes along its 4th axis", f"at most {CHANNEL_LIMIT} channels")
    if len(sizes) != 3:
        remedy = "extract one of the volumes" if len(sizes) > 3 else ""
        raise UserError(where, f"{len(sizes)} axes ({by(sizes)} voxels)", "3", remedy)
    return (sizes[0], sizes[1], sizes[2]), layers


def _dtype(where: str, code: int, bits: int, order: str) -> np.dtype:
    if code not in _TYPES:
        found = f"voxels of type {_OTHER_TYPES.get(code, f'number {code}')}"
        raise UserError(where, found, "whole numbers of 8 to 64 bits or floats of 32 or 64")
    dtype = np.dtype(order + _TYPES[code])
    if bits not in (0, 8 * dtype.itemsize):
        raise UserError(where, f"{bits} bits a voxel and the type {dtype.name}", "one of them", "the header is damaged")
    return dtype


@np.errstate(invalid="ignore", over="ignore")  # NumPy warns of some NaNs before they are found below
def _affine(where: str, fields: Nifti1Header, shape: tuple[int, int, int]) -> tuple[np.ndarray, str, tuple[str, ...]]:
    """Return voxels to RAS+ mm, the source of that, and sentences about oddities."""
    said = np.abs(np.asarray(fields["pixdim"][1:4], np.float64))
    if not (np.isfinite(said).all() and said.min() > 0):
        raise UserError(where, f"spacing {by(said)} mm (pixdim)", "three numbers above 0")
    codes = {"sform": int(fields["sform_code"]), "qform": int(fields["qform_code"])}
    if wrong := [f"{name}_code {code}" for name, code in codes.items() if not 0 <= code <= 5]:
        raise UserError(where, " and ".join(wrong), "0 to 5", "the header is damaged")
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
        notes.append("has no orientation; interpreted as nibabel does, with x growing to the left")
    unit = int(fields["xyzt_units"]) & 7
    if unit not in _UNITS:
        raise UserError(where, f"lengths in unit number {unit} (xyzt_units)", "metres, mm or micrometres")
    scale = np.array([_UNITS[unit]] * 3 + [1.0])[:, None]
    affine = affine * scale
    _check_affine(where, affine, placed)
    spacing = np.linalg.norm(affine[:3, :3], axis=0)
    if not np.allclose(spacing, said * _UNITS[unit], rtol=0.01):
        notes.append(f"pixdim says {by(said * _UNITS[unit])} mm, the {placed} {by(spacing)} mm, which is used")
    if len(forms) == 2 and np.isfinite(other := forms["qform"] * scale).all():
        corner = np.array([*(n - 1 for n in shape), 1.0])
        apart = max(np.linalg.norm((affine - other)[:3, 3]), np.linalg.norm(((affine - other) @ corner)[:3]))
        if apart > max(0.5 * spacing.min(), GRID_TOLERANCE):
            notes.append(f"sform and qform lie {apart:.3g} mm apart; the sform is used")
    return affine, placed, tuple(notes)


def _check_affine(where: str, affine: np.ndarray, placed: str) -> None:
    name = f"affine ({placed})"
    if not np.isfinite(affine).all():
        raise UserError(where, f"{name} with NaN or infinity: {_rows(affine)}", "finite numbers")
    spacing = np.linalg.norm(affine[:3, :3], axis=0)
    low, high = SPACING_LIMITS
    if not (low <= spacing.min() and spacing.max() <= high):
        raise UserError(where, f"{name} with spacing {by(spacing)} mm: {_rows(affine)}", f"{low:g} to {high:g} mm")
    if abs(np.linalg.det(affine[:3, :3] / spacing)) < _LEAST_VOLUME:
        raise UserError(where, f"singular {name}: {_rows(affine)}", "three axes in different directions")
    if np.abs(affine[:3, 3]).max() > ORIGIN_LIMIT:
        raise UserError(where, f"{name} with origin {_rows(affine[:3, 3:].T)} mm", f"at most {ORIGIN_LIMIT:g} mm away")
    refuse_shear(where, affine, name)


def refuse_shear(where: str, affine: np.ndarray, name: str) -> None:
    """Raise UserError where two axes of a grid are not at right angles: a tilted gantry, an affine registration."""
    unit = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
    cosines = {pair: float(unit[:, pair[0]] @ unit[:, pair[1]]) for pair in itertools.combinations(range(3), 2)}
    first, second = pair = max(cosines, key=lambda pair: abs(cosines[pair]))
    if abs(cosines[pair]) > SHEAR:
        angle = math.degrees(math.acos(max(-1.0, min(1.0, cosines[pair]))))
        found = f"sheared {name}: its axes {'ijk'[first]} and {'ijk'[second]} are {angle:.4g} degrees apart"
        expected = f"90 degrees, within {math.degrees(math.asin(SHEAR)):.2f}"
        remedy = "resample image and label map to an orthogonal grid; of a CT with a tilted gantry, dcm2niix writes one"
        raise UserError(where, found, expected, f"{remedy} (its name has _Tilt)")


def by(numbers: Iterable[float]) -> str:
    """Join numbers as `4 x 5 x 6`."""
    return " x ".join(f"{number:g}" if isinstance(number, float) else str(number) for number in numbers)


def _rows(matrix: np.ndarray) -> str:
    return "; ".join(" ".join(f"{value:.6g}" for value in row) for row in matrix[:3])


def size_text(count: float) -> str:
    """Write a number of bytes: `256.0 GiB`, `100 bytes`."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count} bytes"
