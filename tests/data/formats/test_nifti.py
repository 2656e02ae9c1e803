"""NIfTI files: what nibabel reads of them and what is read here are the same; turning there and back; writing."""

import gzip
import itertools

import nibabel
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from organ_volumes import read_volume
from scipy.spatial.transform import Rotation

from trainkit.data.formats import nifti, nifti_header, volume_grid
from trainkit.errors import UserError

SHAPE = (4, 5, 6)
OBLIQUE = np.eye(4)
OBLIQUE[:3, :3] = Rotation.from_euler("xyz", [8, -11, 5], degrees=True).as_matrix() * (0.3125, 0.3125, 3.85)
OBLIQUE[:3, 3] = -70.5, 12.25, 33
TYPES = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"]


def save(path, array, affine=OBLIQUE, *, kind=nibabel.Nifti1Image, order="<", slope=None, inter=0.0, **fields):
    """A file as another program may write it: byte order, scaling and any field of the header as asked."""
    header = kind.header_class(endianness=order)
    header.set_data_dtype(array.dtype)
    header.set_data_shape(array.shape)
    header.set_sform(affine, 1)
    header.set_qform(affine, 1)
    header["vox_offset"] = header["sizeof_hdr"] + 4
    header["magic"] = header.single_magic
    header["xyzt_units"] = 2
    if slope is not None:
        header["scl_slope"], header["scl_inter"] = slope, inter
    for name, value in fields.items():
        header[name] = value
    content = header.binaryblock + bytes(4) + array.astype(array.dtype.newbyteorder(order)).tobytes(order="F")
    path.write_bytes(gzip.compress(content, 1, mtime=0) if path.name.endswith(".gz") else content)
    return path


def ramp(dtype="i2", shape=SHAPE):
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def permuted(order, signs, spacing=(0.5, 1.25, 4.0)):
    """An affine whose file axis k follows world axis order[k], growing or falling."""
    affine = np.eye(4)
    affine[:3, :3] = 0
    for axis, (world, sign) in enumerate(zip(order, signs, strict=True)):
        affine[world, axis] = sign * spacing[axis]
    affine[:3, 3] = 10, -20, 30
    return affine


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("dtype", TYPES)
def test_voxels_of_every_type_and_byte_order_are_those_that_nibabel_reads(tmp_path, dtype, order, suffix):
    path = save(tmp_path / f"a{suffix}", ramp(dtype), order=order)
    array, header = read_volume(path)
    assert array.dtype == np.float32 and array.shape == SHAPE
    assert np.array_equal(array, nibabel.load(path).get_fdata()) and np.array_equal(array, ramp())
    assert header.dtype == np.dtype(order + dtype) and header.dtype.itemsize == np.dtype(dtype).itemsize


@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(
    ("fields", "notes"),
    [
        ({}, ()),
        ({"sform_code": 0}, ()),
        (
            {"sform_code": 0, "qform_code": 0},
            ("has no orientation; interpreted as nibabel does, with x growing to the left",),
        ),
        ({"srow_x": OBLIQUE[0] + [0, 0, 0, 5]}, ()),
    ],
)
def test_the_affine_is_the_one_that_nibabel_takes(tmp_path, kind, order, fields, notes):
    path = save(tmp_path / "a.nii", ramp(), kind=kind, order=order, **fields)
    header, other = nifti.read_header(path), nibabel.load(path)
    assert np.array_equal(header.affine, other.affine) and header.shape == other.shape and header.notes == notes
    assert np.allclose(header.spacing, (0.3125, 0.3125, 3.85), rtol=1e-5)
    assert np.array_equal(read_volume(path)[0], ramp())


@pytest.mark.parametrize(("slope", "inter"), [(2.0, 0.0), (0.001, -5.0), (-3.0, 1e4), (1.0, 7.0)])
@pytest.mark.parametrize("dtype", ["u1", "i2", "f4"])
def test_scaled_voxels_are_those_that_nibabel_reads(tmp_path, dtype, slope, inter):
    path = save(tmp_path / "a.nii.gz", ramp(dtype), slope=slope, inter=inter)
    array, header = read_volume(path)
    assert header.scaling == (np.float32(slope), inter)
    np.testing.assert_allclose(array, nibabel.load(path).get_fdata(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("slope", [0.0, float("nan")])
def test_a_slope_of_zero_or_nan_scales_nothing(tmp_path, slope):
    array, header = read_volume(save(tmp_path / "a.nii", ramp(), slope=slope, inter=9.0))
    assert np.array_equal(array, ramp()) and header.scaling is None


def test_extensions_are_stepped_over(tmp_path):
    image = nibabel.Nifti1Image(ramp(), OBLIQUE)
    image.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"x" * 1000))
    nibabel.save(image, tmp_path / "a.nii.gz")
    array, header = read_volume(tmp_path / "a.nii.gz")
    assert header.offset > 1300 and np.array_equal(array, ramp())


def test_axes_of_length_1_behind_the_third_are_dropped_and_others_kept(tmp_path):
    assert read_volume(save(tmp_path / "a.nii", ramp(shape=(4, 5, 6, 1, 1))))[0].shape == SHAPE
    assert nifti.read_header(save(tmp_path / "b.nii", ramp(shape=(4, 1, 1)))).shape == (4, 1, 1)


def test_compression_is_seen_in_the_bytes_and_not_in_the_name(tmp_path):
    plain = save(tmp_path / "a.nii", ramp()).rename(tmp_path / "unpacked.nii.gz")
    packed = save(tmp_path / "b.nii.gz", ramp()).rename(tmp_path / "packed.nii")
    for path in (plain, packed):
        assert np.array_equal(read_volume(path)[0], ramp())


# Labels


@pytest.mark.parametrize("dtype", TYPES)
def test_labels_of_every_type_are_read(tmp_path, dtype):
    labels, _ = nifti.read_labels(save(tmp_path / "a.nii.gz", ramp(dtype)), classes=120)
    assert labels.dtype == np.uint8 and np.array_equal(labels, ramp())


@pytest.mark.parametrize("value", [0.99999997, 1.0000005, 0.9995])
def test_labels_that_are_all_but_whole_are_whole(tmp_path, value):
    assert nifti.read_labels(save(tmp_path / "a.nii", np.full(SHAPE, value)))[0].tolist() == np.ones(SHAPE).tolist()


@pytest.mark.parametrize(
    ("dtype", "value", "said"),
    [
        ("f8", 1.5, "labels 1.5 in 2 of 120 voxels, the first at (1, 2, 3)"),
        ("f8", -1.0, "labels -1 in 2"),
        ("f8", 3.0, "labels 3 in 2"),
        ("f8", 300.0, "labels 300 in 2"),
        ("f8", np.nan, "labels nan in 2"),
        ("f8", np.inf, "labels inf in 2"),
        ("f8", 1e30, "labels 1e+30 in 2"),
        ("f8", 0.99, "labels 0.99 in 2"),
        ("i2", -7, "labels -7 in 2"),
        ("u2", 65535, "labels 65535 in 2"),
        ("i8", 1 << 62, "labels 4611686018427387904 in 2"),
    ],
)
def test_labels_that_are_none_are_named_with_their_place(tmp_path, dtype, value, said):
    array = np.ones(SHAPE, dtype)
    array[1, 2, 3] = array[3, 4, 5] = value
    path = save(tmp_path / "a.nii.gz", array)
    with pytest.raises(UserError) as error:
        nifti.read_labels(path, classes=3)
    assert said in str(error.value) and error.value.where == str(path)
    assert error.value.expected in ("0, 1, 2", "whole numbers")


# Orientation


@pytest.mark.parametrize("axes", ["zyx", "yzx", "xzy", "xyz"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_stored_axes_are_nibabels_canonical_ones_permuted(order, axes):
    for signs in itertools.product((1, -1), repeat=3):
        image = nibabel.Nifti1Image(ramp(), permuted(order, signs))
        canonical = nibabel.as_closest_canonical(image)
        world = ["xyz".index(letter) for letter in axes]
        how = volume_grid.orientation(image.affine, axes)
        assert np.array_equal(how.apply(ramp()), np.asarray(canonical.dataobj).transpose(world))
        assert np.array_equal(how.undo(how.apply(ramp())), ramp())
        header = nifti_header.Header("", SHAPE, np.dtype("i2"), image.affine, (0.5, 1.25, 4.0))
        expected = np.linalg.norm(canonical.affine[:3, :3], axis=0)
        assert how.spacing(header) == tuple(expected[world])
        assert volume_grid.orientation(image.affine, "xyz").spacing(header) == tuple(expected)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-180, 180), min_size=3, max_size=3),
    st.lists(st.floats(0.1, 10), min_size=3, max_size=3),
    arrays.arrays(np.uint8, arrays.array_shapes(min_dims=3, max_dims=3, max_side=4)),
)
def test_any_rotation_goes_to_the_closest_axes_and_back(angles, spacing, array):
    matrix = Rotation.from_euler("xyz", angles, degrees=True).as_matrix()
    affine = np.eye(4)
    affine[:3, :3] = matrix * spacing
    how = volume_grid.orientation(affine, "xyz")
    assert np.array_equal(how.undo(how.apply(array)), array)
    # No other pairing of axes has larger cosines, and every stored axis grows with its own.
    cosines = matrix[:, how.order] * np.where(how.flip, -1, 1)
    others = (sum(abs(matrix[world, axis]) for world, axis in enumerate(p)) for p in itertools.permutations(range(3)))
    assert np.trace(cosines) >= max(others) - 1e-5 and (np.diag(cosines) >= 0).all()


@pytest.mark.parametrize(
    ("spacings", "axes"),
    [
        ([(1, 1, 1)], "zyx"),
        ([(0.3125, 3.85, 0.3125)], "yzx"),
        ([(3.85, 0.3, 0.3)], "xzy"),
        ([(0.5, 0.5, 5)], "zyx"),
        ([(1, 4, 1), (1, 4, 1), (9, 1, 1)], "yzx"),
        ([(2, 2, 1)], "yzx"),
        ([(1.0, 1.0, 0.999)], "zyx"),
        ([(3, 1, 3)], "zyx"),
    ],
)
def test_depth_is_the_axis_with_the_largest_median_spacing(spacings, axes):
    assert volume_grid.slice_axis_order(np.array(spacings, float)) == axes


# Two grids


def header_of(affine, shape=SHAPE):
    first, second, third = np.linalg.norm(affine[:3, :3], axis=0)
    return nifti_header.Header(nifti_header.Path("other.nii"), shape, np.dtype("u1"), affine, (first, second, third))


def test_grids_are_equal_up_to_rounding_alone():
    a = header_of(OBLIQUE)
    moved = OBLIQUE.copy()
    moved[0, 3] += 0.005
    assert volume_grid.same_grid(a, header_of(OBLIQUE.astype(np.float32).astype(float))) is None
    assert volume_grid.same_grid(a, header_of(moved)) is None
    moved[0, 3] += 0.1
    assert "lies elsewhere than other.nii: corners are up to 0.105 mm" in volume_grid.same_grid(a, header_of(moved))


def test_grids_of_other_shape_spacing_or_direction_are_told_apart():
    a = header_of(OBLIQUE)
    assert volume_grid.same_grid(a, header_of(OBLIQUE, (5, 4, 6))) == "4 x 5 x 6 voxels, other.nii has 5 x 4 x 6"
    assert "spacing" in volume_grid.same_grid(a, header_of(OBLIQUE @ np.diag([1, 1, 1.1, 1])))
    assert "elsewhere" in volume_grid.same_grid(a, header_of(OBLIQUE @ np.diag([-1, 1, 1, 1])))
    # The same origin and spacing, and yet another place: only corners tell.
    turned = OBLIQUE.copy()
    turned[:3, :3] = Rotation.from_euler("z", 2, degrees=True).as_matrix() @ OBLIQUE[:3, :3]
    assert "elsewhere" in volume_grid.same_grid(a, header_of(turned))


# Writing


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
@pytest.mark.parametrize("fields", [{"sform_code": 2}, {"sform_code": 0}, {"sform_code": 0, "qform_code": 0}])
def test_labels_are_written_where_their_image_is(tmp_path, kind, fields, suffix):
    source = save(tmp_path / "image.nii", ramp(), kind=kind, descrip=b"Jane Doe", slope=3, **fields)
    labels, header = (ramp() % 10).astype(np.uint8), nifti.read_header(source)
    nifti.write_labels(tmp_path / f"out{suffix}", labels, header)
    image, out = nibabel.load(source), nibabel.load(tmp_path / f"out{suffix}")
    assert out.get_data_dtype() == np.uint8 and np.array_equal(np.asarray(out.dataobj), labels)
    np.testing.assert_allclose(out.affine, image.affine, atol=1e-5)
    np.testing.assert_allclose(out.header.get_zooms(), image.header.get_zooms(), rtol=1e-6)
    assert out.header.get_xyzt_units()[0] == "mm" and b"Jane" not in out.header.binaryblock
    again, written = nifti.read_labels(tmp_path / f"out{suffix}", 10)
    assert np.array_equal(again, labels) and volume_grid.same_grid(written, header) is None


def test_the_same_labels_give_the_same_bytes_and_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    header = nifti.read_header(save(tmp_path / "a.nii", ramp()))
    for name in ("x.nii.gz", "y.nii.gz", "x.nii.gz"):
        nifti.write_labels(tmp_path / name, ramp("u1"), header)
    assert (tmp_path / "x.nii.gz").read_bytes() == (tmp_path / "y.nii.gz").read_bytes()
    assert (tmp_path / "x.nii.gz").read_bytes()[3:8] == bytes(5), "gzip's header names a time or a file"

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(nifti.os, "fsync", full)
    with pytest.raises(UserError, match=r"x\.nii\.gz: cannot be written \(No space left on device\)"):
        nifti.write_labels(tmp_path / "x.nii.gz", ramp("u1") * 0, header)
    assert np.array_equal(nifti.read_labels(tmp_path / "x.nii.gz")[0], ramp())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.nii", "x.nii.gz", "y.nii.gz"]


def test_labels_of_another_type_or_shape_are_refused(tmp_path):
    header = nifti.read_header(save(tmp_path / "a.nii", ramp()))
    for labels in (ramp(), ramp("u1", (5, 4, 6))):
        with pytest.raises(ValueError, match="uint8"):
            nifti.write_labels(tmp_path / "b.nii", labels, header)
    with pytest.raises(UserError, match="cannot be written"):
        nifti.write_labels(tmp_path / "no" / "b.nii", ramp("u1"), header)
