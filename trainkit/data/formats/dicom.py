"""DICOM series: a folder of slices as one volume, by pydicom (extra `dicom`).

Slices are sorted by their position (ImagePositionPatient) along the normal of their plane. Voxels are what the scanner
means by the stored numbers (RescaleSlope and RescaleIntercept of each slice). Axes of the array are columns, rows and
slices, and the affine leads to RAS+ mm, where DICOM's own axes x and y run to the left and to the back.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.data.folders import is_hidden
from trainkit.data.formats.nifti_header import VOXEL_LIMIT, Header, by, refuse_shear
from trainkit.errors import UserError, few

if TYPE_CHECKING:
    from pydicom import Dataset  # pyright: ignore[reportMissingImports]

UNEVEN = 0.02
"""Share of the distance between slices by which one may lie off its place: positions are written with few digits."""

SLICE_LIMIT = 1 << 28
"""Largest file of a slice that is read, in bytes."""

_PREAMBLE = 132
_LOOKED_AT = 8
_DEFLATED = "1.2.840.10008.1.2.1.99"
_TAGS = (
    "SeriesInstanceUID", "SeriesDescription", "ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "Rows",
    "Columns", "SamplesPerPixel", "NumberOfFrames", "SliceThickness", "BitsAllocated", "PixelRepresentation",
)  # fmt: skip


@dataclass(frozen=True)
class _Slice:
    file: Path
    position: np.ndarray
    about: Any


def is_dicom(file: Path) -> bool:
    """Return whether the content of a file begins as that of DICOM does."""
    try:
        with file.open("rb") as stream:
            return stream.read(_PREAMBLE)[128:] == b"DICM"
    except OSError:
        return False


def is_series(folder: Path) -> bool:
    """Return whether slices lie in a folder, or in a folder in it: one of the first few files is of DICOM."""
    return any(is_dicom(file) for file in slices(folder)[:_LOOKED_AT])


def slices(folder: Path) -> list[Path]:
    """List the files that may be slices: those of a folder, or where it has none of the folders in it."""
    own, below = _listed(folder)
    return own or [file for inner in below for file in _listed(inner)[0]]


def read_header(folder: Path) -> Header:
    """Read where the slices of a series lie, without their pixels.

    Raises UserError where pydicom is not installed, a file cannot be read, there are several series, or the slices do
    not make an even grid, naming the file.
    """
    return _header(folder, _sorted(folder))


def read_image(folder: Path) -> tuple[np.ndarray, Header]:
    """Read a series as float32 (columns, rows, slices), and its header. Raises UserError as `read_header`, and for
    pixels that cannot be decoded or are not finite."""
    found = _sorted(folder)
    header = _header(folder, found)
    array = np.empty(header.shape, np.float32)
    for place, one in enumerate(found):
        array[:, :, place] = _pixels(one.file, header.shape[:2]).T
    return array, header


def _listed(folder: Path) -> tuple[list[Path], list[Path]]:
    """List files, without hidden and NIfTI ones, and folders."""
    try:
        with os.scandir(folder) as entries:
            there = sorted((entry for entry in entries if not is_hidden(entry.name)), key=lambda one: one.name)
            files = [folder / entry.name for entry in there if entry.is_file() and entry.name.upper() != "DICOMDIR"]
            inner = [folder / entry.name for entry in there if entry.is_dir()]
    except OSError as error:
        raise UserError(str(folder), f"cannot be read ({error.strerror or error})", "a folder of slices") from None
    return [file for file in files if not file.name.lower().endswith((".nii", ".nii.gz", ".json", ".txt"))], inner


def _read(file: Path, pixels: bool) -> Dataset:
    try:
        import pydicom  # pyright: ignore[reportMissingImports]
        from pydicom.filereader import read_file_meta_info  # pyright: ignore[reportMissingImports]
    except ImportError:
        found = "a DICOM series, but pydicom is not installed"
        raise UserError(str(file), found, "pydicom", 'install the extra: pip install "trainkit[dicom]"') from None
    try:
        if (size := file.stat().st_size) > SLICE_LIMIT:
            raise UserError(str(file), f"{size:,} bytes", f"at most {SLICE_LIMIT:,}")
        # Asked first: pydicom inflates a deflated file whole, however large it becomes.
        if str(read_file_meta_info(file).get("TransferSyntaxUID", "")) == _DEFLATED:
            raise UserError(str(file), "a deflated data set", "one that is not", "convert it, for example by dcm2niix")
        return pydicom.dcmread(file) if pixels else pydicom.dcmread(file, specific_tags=list(_TAGS))
    except UserError:
        raise
    except Exception as error:  # pydicom raises what its parts raise: struct.error, KeyError, InvalidDicomError ...
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise UserError(str(file), f"cannot be read ({reason})", "a slice (DICOM)", "copy it again") from None


def _sorted(folder: Path) -> list[_Slice]:
    """Read the headers of all slices, in their order along the normal; all lie in parallel planes of one size."""
    files = slices(folder)
    if not files:
        raise UserError(str(folder), "no slices", "a folder with the slices of one series")
    found = [_slice(file) for file in files]
    series = Counter(str(one.about.get("SeriesInstanceUID", "")) for one in found)
    if len(series) > 1:
        named = {str(o.about.get("SeriesInstanceUID", "")): str(o.about.get("SeriesDescription", "")) for o in found}
        each = (f"{named[uid] or uid[-20:]} ({count} slices)" for uid, count in series.items())
        raise UserError(str(folder), f"{len(series)} series: {few(each)}", "one", "keep one series in each folder")
    first = found[0]
    for one in found[1:]:
        for tag, tolerance in (("Rows", 0), ("Columns", 0), ("PixelSpacing", 1e-3), ("ImageOrientationPatient", 1e-3)):
            mine, other = (np.asarray(_numbers(s, tag)) for s in (one, first))
            if not np.allclose(mine, other, rtol=0, atol=tolerance):
                said = f"{by(other.tolist())}, as {first.file.name} has"
                raise UserError(str(one.file), f"{tag} {by(mine.tolist())}", said, "keep one series in each folder")
    normal = _normal(first)
    return sorted(found, key=lambda one: float(one.position @ normal))


def _slice(file: Path) -> _Slice:
    about = _read(file, pixels=False)
    one = _Slice(file, np.zeros(3), about)
    for tag, count in (("Rows", 1), ("Columns", 1), ("PixelSpacing", 2), ("ImageOrientationPatient", 6)):
        if len(_numbers(one, tag)) != count:
            raise UserError(str(file), f"{tag} {about.get(tag)!r}"[:200], f"{count} numbers")
    if _numbers(one, "SamplesPerPixel") not in ([], [1.0]):
        raise UserError(str(file), "pixels of several colours", "one number a pixel")
    if _numbers(one, "NumberOfFrames") not in ([], [1.0]):
        found = f"{about.NumberOfFrames} frames in one file"
        raise UserError(str(file), found, "a slice in each file", "convert it, for example by dcm2niix")
    rows, columns = _numbers(one, "Rows")[0], _numbers(one, "Columns")[0]
    if min(rows, columns) < 1 or min(_numbers(one, "PixelSpacing")) <= 0:
        raise UserError(str(file), f"{rows:g} x {columns:g} pixels of {by(_numbers(one, 'PixelSpacing'))} mm", "more")
    position = _numbers(one, "ImagePositionPatient")
    if len(position) != 3:
        found = f"ImagePositionPatient {about.get('ImagePositionPatient')!r}"[:200]
        raise UserError(str(file), found, "3 numbers: the position of the slice", "remove files that are not slices")
    return _Slice(file, np.asarray(position), about)


def _numbers(one: _Slice, tag: str) -> list[float]:
    """Read the numbers of an element; none where it is missing. Raises UserError for what is no finite number."""
    value = one.about.get(tag)
    if value is None or value == "":
        return []
    try:
        found = [float(part) for part in (value if isinstance(value, Sequence) or np.iterable(value) else [value])]
    except (TypeError, ValueError):
        found = [math.nan]
    if not all(math.isfinite(number) for number in found):
        raise UserError(str(one.file), f"{tag} {value!r}"[:200], "finite numbers")
    return found


def _normal(one: _Slice) -> np.ndarray:
    row, column = np.reshape(_numbers(one, "ImageOrientationPatient"), (2, 3))
    normal = np.cross(row, column)
    if not np.allclose([row @ row, column @ column, normal @ normal], 1, atol=1e-2):
        found = f"ImageOrientationPatient {by(_numbers(one, 'ImageOrientationPatient'))}"
        raise UserError(str(one.file), found, "two directions at right angles, of length 1")
    return normal


def _header(folder: Path, found: Sequence[_Slice]) -> Header:
    """Compute the grid of sorted slices. Raises UserError where they do not lie evenly."""
    from nibabel.nifti1 import Nifti1Header

    first, count = found[0], len(found)
    rows, columns = int(_numbers(first, "Rows")[0]), int(_numbers(first, "Columns")[0])
    if rows * columns * count > VOXEL_LIMIT:
        raise UserError(str(folder), f"{columns} x {rows} x {count} voxels", f"at most {VOXEL_LIMIT:,}")
    across = _step(folder, found)
    row, column = np.reshape(_numbers(first, "ImageOrientationPatient"), (2, 3))
    down, along = _numbers(first, "PixelSpacing")
    affine = np.eye(4)
    affine[:3] = np.stack([row * along, column * down, across, first.position], axis=1)
    affine[:2] *= -1  # from LPS to RAS
    refuse_shear(str(folder), affine, "grid of slices")
    shape = columns, rows, count
    spacing = along, down, float(np.linalg.norm(across))
    signed = bool((_numbers(first, "PixelRepresentation") or [0])[0])
    bits = 8 if (_numbers(first, "BitsAllocated") or [16])[0] <= 8 else 16
    geometry = Nifti1Header()
    geometry.set_data_shape(shape)
    geometry.set_sform(affine, code=1)
    geometry["pixdim"][1:4] = spacing
    geometry.set_xyzt_units("mm")
    dtype = np.dtype(f"{'i' if signed else 'u'}{bits // 8}")
    return Header(folder, shape, dtype, affine, spacing, placed="sform", raw=geometry.binaryblock)


def _step(folder: Path, found: Sequence[_Slice]) -> np.ndarray:
    """Return the way from slice to slice in mm, of DICOM's axes; of a single slice its thickness."""
    normal, count = _normal(found[0]), len(found)
    if count == 1:
        return normal * ((_numbers(found[0], "SliceThickness") or [0])[0] or 1.0)
    places = np.stack([one.position for one in found])
    gaps = np.diff(places @ normal)
    usual = float(np.median(gaps))
    for place in np.argsort(-np.abs(gaps - usual)).tolist():
        pair = f"{found[place].file.name} and {found[place + 1].file.name}"
        if gaps[place] < 1e-3:
            raise UserError(
                str(folder), f"two slices at the same position: {pair}", "one", "keep one series in each folder"
            )
        if abs(gaps[place] - usual) > UNEVEN * usual:
            said = f"{gaps[place]:.4g} mm between {pair}"
            raise UserError(
                str(folder), said, f"{usual:.4g} mm, as between the other slices", "find the slices that are missing"
            )
    step = (places[-1] - places[0]) / (count - 1)
    off = np.linalg.norm(places - places[0] - step * np.arange(count)[:, None], axis=1)
    if off.max() > max(UNEVEN * usual * 2, 0.1):
        which = found[int(off.argmax())].file
        raise UserError(
            str(which), f"lies {off.max():.3g} mm beside the line of the others", "slices behind each other"
        )
    return step


def _pixels(file: Path, shape: tuple[int, int]) -> np.ndarray:
    """Decode a slice, float32 (rows, columns), rescaled. Raises UserError naming the file."""
    data = _read(file, pixels=True)
    syntax = data.file_meta.TransferSyntaxUID
    try:
        stored = data.pixel_array
    except Exception as error:  # of each decoder its own
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        if getattr(syntax, "is_compressed", False):
            found = f"compressed as {syntax.name}, which no installed package decodes"
            remedy = "install pylibjpeg or python-gdcm, or convert the series, for example by dcm2niix"
            raise UserError(str(file), found, "pixels that are not compressed", remedy) from None
        raise UserError(str(file), f"no pixels ({reason})", "a slice (DICOM)", "copy it again") from None
    if stored.shape != shape[::-1]:
        raise UserError(str(file), f"pixels {by(stored.shape)}", f"{by(shape[::-1])}, as its header says")
    try:
        slope, inter = float(data.get("RescaleSlope") or 1), float(data.get("RescaleIntercept") or 0)
    except (TypeError, ValueError):
        slope = inter = math.nan
    values = (stored.astype(np.float64) * slope + inter).astype(np.float32)
    if not np.isfinite(values).all():
        raise UserError(str(file), "NaN or infinite values after RescaleSlope and RescaleIntercept", "finite ones")
    return values
