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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainkit.errors import UserError

if TYPE_CHECKING:
    from nibabel.nifti1 import Nifti1Header

VOXEL_LIMIT = 1 << 29
"""Largest volume that is read, in voxels: 2 GiB as float32."""

SHEAR = 1e-3
"""Largest cosine of the angle between two axes of a grid that count as being at right angles: 0.06 degrees. Volumes,
surface distances and augmentation in mm take the three spacings alone, and a length is then wrong by up to half the
cosine, 0.05 %. Affines in float32, and those of registrations, have up to 3e-4."""

_SPACINGS, _ORIGIN = (1e-4, 1e3), 1e6
"""mm; what is beyond is a damaged header or one in other units than it says."""
_LENGTHS = (348, 540)
"""Bytes of the header of NIfTI-1 and 2."""
_EXTENSIONS, _CHANNELS = 64 << 20, 64
"""Most bytes before the voxels, and most channels of a file of 4 axes."""
_TYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4", 1024: "i8", 1280: "u8"}


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
    scaling: tuple[float, float] | None = None
    """A voxel is the first times what is stored, plus the second; None: what is stored."""
    notes: tuple[str, ...] = ()
    """Sentences about oddities that do not keep the file from being read."""
    channels: int = 1
    """Channels of a voxel: the length of the 4th axis, or the number of files."""

    @property
    def voxels(self) -> int:
        """Number of voxels, of one channel."""
        return math.prod(self.shape)


def read(path: Path, stream: io.BufferedIOBase, size: int, most: int, *, channels: bool = False) -> Header:
    """Read and check the header of a file of `size` bytes, at most `most` when it is unpacked.

    With `channels` a 4th axis is taken for that of the channels. Raises UserError naming the file.
    """
    where, raw = str(path), stream.read(4)
    if (order := byte_order(raw)) is None:
        found = f"not a NIfTI file: it begins with {raw!r}" if raw else "0 bytes"
        raise UserError(where, found, "a NIfTI file (.nii or .nii.gz)")
    (length,) = struct.unpack(order + "i", raw)
    raw += stream.read(length - 4)
    if len(raw) < length:
        raise UserError(where, f"truncated: {len(raw)} bytes of the header", f"{length}", "copy it again")
    fields = parsed(raw)
    if not (magic := fields["magic"].tobytes().rstrip(b"\0")).startswith(b"n+"):
        raise UserError(where, f"NIfTI magic {magic!r}", "header and voxels in one file", "convert it to .nii.gz")
    shape, layers = _shape(where, fields["dim"].tolist(), channels)
    dtype = np.dtype(order + _TYPES.get(code := int(fields["datatype"]), "V0"))
    if dtype.kind == "V":
        expected = "whole numbers of 8 to 64 bits or floats of 32 or 64"
        raise UserError(where, f"voxels of NIfTI's data type {code}", expected)
    offset, least = float(fields["vox_offset"]), length + 4
    if not (offset.is_integer() and least <= offset <= least + _EXTENSIONS):
        raise UserError(where, f"voxels that begin at byte {offset:g}", f"{least} or a little more")
    claimed = int(offset) + math.prod(shape) * layers * dtype.itemsize
    found = f"the header claims {by(shape if layers == 1 else (*shape, layers))} voxels ({claimed:,} bytes)"
    if math.prod(shape) * layers > VOXEL_LIMIT:
        raise UserError(where, found, f"at most {VOXEL_LIMIT:,} voxels")
    if claimed > most:  # true of any file that was cut short, and of headers that a few bytes of zeros stand behind
        found = f"truncated or damaged: {found}, the file has {size:,}"
        raise UserError(where, found, "all of them", "copy it again")
    slope, inter = float(fields["scl_slope"]), float(fields["scl_inter"])
    scaling = None if slope == 0 or math.isnan(slope) or (slope, inter) == (1, 0) else (slope, inter)
    affine = _affine(where, fields)
    first, second, third = np.linalg.norm(affine[:3, :3], axis=0).tolist()
    oriented = int(fields["sform_code"]) or int(fields["qform_code"])
    notes = () if oriented else ("has no orientation; interpreted as nibabel does, with x growing to the left",)
    return Header(path, shape, dtype, affine, (first, second, third), int(offset), scaling, notes, layers)


def byte_order(raw: bytes) -> str | None:
    """Return `<` or `>`, the byte order of a header that begins so; None for what is no header."""
    return next((o for o in "<>" if len(raw) >= 4 and struct.unpack(o + "i", raw[:4])[0] in _LENGTHS), None)


def parsed(raw: bytes) -> Nifti1Header:
    """Parse a header by nibabel, unchecked."""
    from nibabel.nifti1 import Nifti1Header
    from nibabel.nifti2 import Nifti2Header

    kind = Nifti1Header if len(raw) == Nifti1Header.sizeof_hdr else Nifti2Header
    return kind(raw, endianness=byte_order(raw), check=False)


def _shape(where: str, dim: list[int], channels: bool) -> tuple[tuple[int, int, int], int]:
    """Return the voxels along the three axes, and the channels."""
    axes, sizes = dim[0], dim[1 : 1 + max(0, dim[0])]
    while len(sizes) > 3 and sizes[-1] == 1:
        sizes.pop()
    layers = sizes.pop() if channels and len(sizes) == 4 else 1
    if not 1 <= axes <= 7 or len(sizes) != 3 or min(sizes) < 1 or not 1 <= layers <= _CHANNELS:
        found = f"{axes} axes ({by(dim[1 : 1 + max(0, axes)])} voxels)"
        raise UserError(where, found, f"3, or a 4th of at most {_CHANNELS} channels", "extract one of the volumes")
    return (sizes[0], sizes[1], sizes[2]), layers


@np.errstate(invalid="ignore", over="ignore")  # NumPy warns of some NaNs before they are found below
def _affine(where: str, fields: Nifti1Header) -> np.ndarray:
    """Return voxels to RAS+ mm. Raises UserError for an affine that no scanner writes, and for axes that are not at
    right angles: a tilted gantry, an affine registration."""
    said, unit = np.abs(np.asarray(fields["pixdim"][1:4], np.float64)), int(fields["xyzt_units"]) & 7
    if not (np.isfinite(said).all() and said.min() > 0):
        raise UserError(where, f"spacing {by(said)} mm (pixdim)", "three numbers above 0")
    codes = int(fields["sform_code"]), int(fields["qform_code"])
    if unit not in (0, 2) or not all(0 <= code <= 5 for code in codes):
        found = f"unit number {unit} (xyzt_units), sform_code {codes[0]} and qform_code {codes[1]}"
        raise UserError(where, found, "lengths in mm: 2, or 0 for what is not said; codes from 0 to 5")
    try:
        fields["pixdim"][0] = -1 if fields["pixdim"][0] < 0 else 1  # which nibabel insists on; 0 stands for 1
        fields["pixdim"][1:4] = said
        affine = np.asarray(fields.get_best_affine(), np.float64)
    except Exception as error:  # nibabel's HeaderDataError and its ValueErrors about quaternions
        raise UserError(where, f"no usable qform ({error})"[:300], "a rotation (unit quaternion)") from None
    spacing, (low, high) = np.linalg.norm(affine[:3, :3], axis=0), _SPACINGS
    rows = "; ".join(" ".join(f"{value:.6g}" for value in row) for row in affine[:3])
    if not np.isfinite(affine).all():
        raise UserError(where, f"affine with NaN or infinity: {rows}", "finite numbers")
    if not (low <= spacing.min() and spacing.max() <= high and np.abs(affine[:3, 3]).max() <= _ORIGIN):
        expected = f"{low:g} to {high:g} mm, and an origin at most {_ORIGIN:g} mm away"
        raise UserError(where, f"affine with spacing {by(spacing)} mm: {rows}", expected)
    cosines = (affine[:3, :3] / spacing).T @ (affine[:3, :3] / spacing)
    first, second = max(itertools.combinations(range(3), 2), key=lambda pair: abs(cosines[pair]))
    if abs(cosines[first, second]) > SHEAR:
        angle = math.degrees(math.acos(max(-1.0, min(1.0, cosines[first, second]))))
        found = f"sheared affine: its axes {'ijk'[first]} and {'ijk'[second]} are {angle:.4g} degrees apart"
        remedy = "resample image and label map to an orthogonal grid; of a CT with a tilted gantry, dcm2niix writes one"
        expected = f"90 degrees, within {math.degrees(math.asin(SHEAR)):.2f}"
        raise UserError(where, found, expected, f"{remedy} (its name has _Tilt)")
    return affine


def by(numbers: Iterable[float], form: str = "") -> str:
    """Join numbers as `4 x 5 x 6`; floats by `form` or in 6 digits."""
    return " x ".join(format(number, form or "g") if isinstance(number, float) else str(number) for number in numbers)
