"""Grids of images and label maps: sheared ones are refused, and those stored with other axes are turned."""

import itertools
import math

import nibabel
import numpy as np
import pytest
from organ_volumes import affine, put, put_case, put_set, volume

from trainkit.data.formats import nifti_header
from trainkit.data.formats.nifti import read_header
from trainkit.data.volumes import importer, verify
from trainkit.data.volumes.sources import open_volumes
from trainkit.errors import UserError
from trainkit.inference import volumes as prediction
from trainkit.interfaces import DatasetInfo

TURNS = [(order, flip) for order in itertools.permutations(range(3)) for flip in itertools.product((1, -1), repeat=3)]


def sheared(cosine: float, askew: bool = False) -> np.ndarray:
    """Slices that lie beside one another, as a tilted gantry leaves them; `askew`: the whole turned as well."""
    matrix = affine()
    angle = math.acos(cosine)
    matrix[:3, 2] = np.linalg.norm(matrix[:3, 2]) * np.array([0, math.cos(angle), math.sin(angle)])
    if askew:
        c, s = math.cos(0.6), math.sin(0.6)
        matrix[:3, :3] = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]]) @ matrix[:3, :3]
    return matrix


@pytest.mark.parametrize("askew", [False, True])
@pytest.mark.parametrize("cosine", [0, 3e-4, -9e-4, 1.1e-3, -0.02, math.sin(math.radians(12)), 0.9])
def test_axes_that_are_not_at_right_angles_are_refused_beyond_the_tolerance(tmp_path, cosine, askew):
    file = put(tmp_path / "a.nii.gz", volume()[0], sheared(cosine, askew))
    if abs(cosine) < nifti_header.SHEAR:
        assert read_header(file).spacing == pytest.approx((1.0, 1.5, 4.0), rel=1e-5)
        return
    with pytest.raises(UserError) as error:
        read_header(file)
    said = str(error.value)
    assert f"sheared affine: its axes j and k are {math.degrees(math.acos(cosine)):.4g} degrees" in said
    assert error.value.where == str(file) and "resample" in said and "dcm2niix" in said


@pytest.mark.parametrize("part", ["image", "label"])
def test_a_sheared_file_is_named_at_import_in_verify_and_when_predicted_for(tmp_path, part):
    root = put_set(tmp_path / "set")
    put(root / part / "p01.nii.gz", volume(1)[part == "label"], sheared(0.3))
    said = rf"{part}.p01\.nii\.gz: sheared affine: .*72\.54 degrees"
    with pytest.raises(UserError, match=said):
        importer.import_volumes(root, tmp_path / "out")
    (problem,) = (line for line in verify.verify(root) if not line.startswith("warning: "))
    assert f"{part}/p01.nii.gz: sheared" in problem
    meta = DatasetInfo(3, (1, 8, 8, 8), "", axes="zyx", spacing=(4, 1.5, 1))
    cases = open_volumes(root, labelled=False).cases
    headers, damaged, _ = prediction._headers(cases, meta)
    assert len(headers) == 4 - len(damaged) and len(damaged) == (part == "image")


@pytest.mark.parametrize("askew", [0.0, 0.6, math.pi / 4])
def test_a_label_map_stored_with_other_axes_than_its_image_is_turned_to_them(tmp_path, askew):
    array, labels = volume(3)
    c, s = math.cos(askew), math.sin(askew)
    matrix = np.array([[c, -s, 0, 0], [s, c, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]) @ affine()
    put_case(tmp_path / "one", "a", array, labels, matrix)
    expected = importer.import_volumes(tmp_path / "one", tmp_path / "packed")
    for number, (order, flip) in enumerate(TURNS):
        turn = np.stack([order, flip], axis=1)
        for part, drawn in (("image", array), ("label", labels)):
            stored = nibabel.Nifti1Image(drawn, matrix)
            stored = stored.as_reoriented(turn) if part == "label" else stored
            put(tmp_path / "set" / part / f"{number:02}.nii.gz", np.asarray(stored.dataobj), stored.affine)
    found = importer.import_volumes(tmp_path / "set", tmp_path / "all")
    assert len(found) == 48 and all((found.label(case) == expected.label(0)).all() for case in range(48))


def test_channels_stored_with_other_axes_are_turned_to_the_first(tmp_path):
    array, labels = volume(2)
    put(tmp_path / "images" / "a_0000.nii.gz", array)
    other = nibabel.Nifti1Image(array + 7, affine()).as_reoriented(np.array([[0, -1], [2, 1], [1, -1]]))
    put(tmp_path / "images" / "a_0001.nii.gz", np.asarray(other.dataobj), other.affine)
    put(tmp_path / "labels" / "a.nii.gz", labels)
    image = importer.import_volumes(tmp_path, tmp_path / "out").image(0)
    np.testing.assert_allclose(image[0].astype(float), image[1].astype(float), atol=2e-3)


@pytest.mark.parametrize("moved", ["origin", "side"])
def test_what_does_not_lie_on_the_grid_of_its_image_is_refused_in_true_sentences(tmp_path, moved):
    array, labels = volume()
    put(tmp_path / "image" / "a.nii.gz", array)
    stored = nibabel.Nifti1Image(labels, affine()).as_reoriented(np.array([[1, -1], [0, -1], [2, 1]]))
    matrix, kept = stored.affine.copy(), np.asarray(stored.dataobj)
    if moved == "origin":
        matrix[2, 3] += 2.5
    put(tmp_path / "label" / "a.nii.gz", kept[:, :-1] if moved == "side" else kept, matrix)
    (problem,) = verify.verify(tmp_path)
    assert ("2.5 mm apart" in problem) == (moved == "origin") and ("11 x 10 x 6 voxels" in problem) == (moved == "side")
    assert "no labelled voxel" not in problem and "label/a.nii.gz: " in problem
    with pytest.raises(UserError) as error:
        importer.import_volumes(tmp_path, tmp_path / "out")
    assert "no labelled voxel" not in str(error.value)
