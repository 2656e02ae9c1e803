"""DICOM series: slices of a folder as one volume that lies where the scanner says, and what keeps one from being."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from organ_volumes import put, volume

from trainkit.data.formats import dicom, nifti, volume_grid
from trainkit.data.storage.volume_store import PackedVolumes
from trainkit.data.volumes import importer
from trainkit.data.volumes.sources import open_volumes
from trainkit.errors import UserError

ROW, COLUMN = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0)
ORIGIN = np.array([-20.0, 30.0, 40.0])


def write_series(folder, array, gap=3.0, series="1.2.3", tilt=0.0, **changes):
    """Slices of an array (columns, rows, slices), numbered against their order; voxels are stored * 2 - 10."""
    pydicom = pytest.importorskip("pydicom")
    from pydicom.dataset import FileMetaDataset

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(array.shape[2]):
        one = pydicom.Dataset()
        one.SeriesInstanceUID, one.SeriesDescription = series, f"series {series}"
        one.SOPClassUID, one.SOPInstanceUID = "1.2.840.10008.5.1.4.1.1.4", f"{series}.{number + 1}"
        one.ImagePositionPatient = (
            ORIGIN + (np.cross(ROW, COLUMN) + tilt * np.asarray(COLUMN)) * gap * number
        ).tolist()
        one.ImageOrientationPatient = [*ROW, *COLUMN]
        one.PixelSpacing, one.SliceThickness = [1.5, 0.5], gap  # between rows, between columns
        one.Columns, one.Rows = array.shape[:2]
        one.SamplesPerPixel, one.PhotometricInterpretation = 1, "MONOCHROME2"
        one.BitsAllocated = one.BitsStored = 16
        one.HighBit, one.PixelRepresentation = 15, 0
        one.RescaleSlope, one.RescaleIntercept = 2, -10
        one.PixelData = np.ascontiguousarray(array[:, :, number].T).astype("<u2").tobytes()
        for name, value in changes.items():
            setattr(one, name, value) if value is not None else delattr(one, name)
        one.file_meta = FileMetaDataset()
        one.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
        one.file_meta.MediaStorageSOPClassUID = one.SOPClassUID
        one.file_meta.MediaStorageSOPInstanceUID = one.SOPInstanceUID
        one.save_as(folder / f"{99 - number:03}.dcm", enforce_file_format=True)
    return folder


STORED = np.arange(4 * 3 * 5).reshape(4, 3, 5)


def refused(folder) -> str:
    with pytest.raises(UserError) as error:
        dicom.read_image(folder)
    return str(error.value)


def test_slices_are_sorted_rescaled_and_placed(tmp_path):
    array, header = dicom.read_image(write_series(tmp_path / "one", STORED))
    assert array.dtype == np.float32 and (array == STORED * 2.0 - 10).all()
    assert header.shape == (4, 3, 5) and header.spacing == pytest.approx((0.5, 1.5, 3.0))
    # x and y of DICOM run to the left and to the back, those of RAS to the right and to the front.
    expected = np.diag([-0.5, -1.5, 3.0, 1.0])
    expected[:3, 3] = 20, -30, 40
    np.testing.assert_allclose(header.affine, expected)
    assert dicom.read_header(tmp_path / "one").shape == header.shape
    assert dicom.is_series(tmp_path / "one") and dicom.is_series(tmp_path)
    drawn = np.arange(60).reshape(4, 3, 5).astype(np.uint8)
    nifti.write_labels(tmp_path / "labels.nii.gz", drawn, header)
    read, written = nifti.read_labels(tmp_path / "labels.nii.gz")
    assert (read == drawn).all() and volume_grid.same_grid(written, header) is None
    (tmp_path / "none").mkdir()
    assert not dicom.is_series(tmp_path / "none")


@pytest.mark.filterwarnings("ignore:End of file reached")
def test_what_is_no_even_grid_of_one_series_is_named(tmp_path):
    folder = write_series(tmp_path / "gap", STORED)
    (folder / "097.dcm").unlink()
    assert "6 mm between" in refused(folder) and "expected 3 mm" in refused(folder)
    write_series(tmp_path / "two", STORED)
    for file in write_series(tmp_path / "other", STORED, series="4.5").iterdir():
        file.rename(tmp_path / "two" / f"other-{file.name}")
    said = refused(tmp_path / "two")
    assert "2 series: " in said and "series 1.2.3 (5 slices)" in said and "series 4.5 (5 slices)" in said
    folder = write_series(tmp_path / "twice", STORED)
    (folder / "again.dcm").write_bytes((folder / "097.dcm").read_bytes())
    assert "two slices at the same position" in refused(folder)
    assert "expected 3 numbers" in refused(write_series(tmp_path / "lost", STORED, ImagePositionPatient=None))
    assert "several colours" in refused(write_series(tmp_path / "colours", STORED, SamplesPerPixel=3))
    write_series(tmp_path / "straight", STORED, tilt=3e-4)
    assert dicom.read_header(tmp_path / "straight").shape == (4, 3, 5)
    assert "sheared grid of slices: its axes j and k are 75 degrees" in refused(
        write_series(tmp_path / "gantry", STORED, tilt=np.tan(np.radians(15)))
    )
    assert "7 frames in one file" in refused(write_series(tmp_path / "frames", STORED, NumberOfFrames=7))
    folder = write_series(tmp_path / "damaged", STORED)
    (folder / "097.dcm").write_bytes((folder / "097.dcm").read_bytes()[:-4])
    assert "097.dcm: no pixels" in refused(folder)
    (folder / "097.dcm").write_bytes(b"\0" * 128 + b"DICM" + b"\xff" * 40)
    assert "097.dcm: " in refused(folder)


def test_a_compressed_series_that_nothing_decodes_is_one_clear_message(tmp_path):
    pydicom = pytest.importorskip("pydicom")
    from pydicom.encaps import encapsulate

    folder = write_series(tmp_path / "one", STORED[:, :, :1])
    (file,) = folder.iterdir()
    one = pydicom.dcmread(file)
    one.PixelData = encapsulate([b"\xff\x4f\xff\x51" + bytes(60)])
    one["PixelData"].VR = "OB"
    one.file_meta.TransferSyntaxUID = pydicom.uid.JPEG2000Lossless
    one.save_as(file)
    said = refused(folder)
    assert "compressed as JPEG 2000" in said and "pylibjpeg or python-gdcm" in said


def test_without_pydicom_the_extra_is_named(tmp_path, monkeypatch):
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "a.dcm").write_bytes(bytes(128) + b"DICM" + bytes(40))
    monkeypatch.setitem(sys.modules, "pydicom", None)
    said = refused(folder)
    assert "pydicom is not installed" in said and "trainkit[dicom]" in said


def test_folders_of_slices_with_label_maps_are_a_set(tmp_path):
    """A label map that was drawn on NIfTI made of the series has turned axes; it lies over the image all the same."""
    for root, label in (
        (tmp_path / "pair", "{root}/labels/{id}.nii.gz"),
        (tmp_path / "inside", "{root}/{id}/seg.nii.gz"),
        (tmp_path / "beside", "{root}/{id}_seg.nii.gz"),
    ):
        for number, id in enumerate(("a", "b")):
            image, labels = volume(number)
            stored = np.clip(image, 0, None).round()
            inner = root / "images" / id if root.name == "pair" else root / id
            write_series(inner / "slices" if root.name == "inside" else inner, stored, gap=4.0)
            header = dicom.read_header(inner)
            turn = np.diag([1.0, -1.0, 1.0, 1.0])
            turn[1, 3] = labels.shape[1] - 1
            matrix = header.affine @ turn if number else header.affine
            put(tmp_path / label.format(root=root.name, id=id), labels[:, ::-1] if number else labels, matrix)
        source = open_volumes(root)
        assert [case.id for case in source.cases] == ["a", "b"] and len(source.files) == 2 * 6 + 2, root
        data = PackedVolumes(importer.import_volumes(source, tmp_path / "packed" / root.name).out)
        for number in range(2):
            # Columns run to the left and rows to the back, so both are turned.
            expected = volume(number)[1][::-1, ::-1].transpose(2, 1, 0)
            assert (data.label(number) == expected).all()
            grey = data.image(number)[0].astype(np.float32)
            assert grey[expected == 2].mean() > grey[expected == 1].mean() > grey[expected == 0].mean()
    alone = open_volumes(tmp_path / "pair" / "images" / "a", labelled=False)
    assert [case.id for case in alone.cases] == ["a"]
    assert [case.id for case in open_volumes(tmp_path / "beside", labelled=False).cases] != []
