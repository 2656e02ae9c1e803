"""Layouts of volumes: which image belongs to which label map, what is left out and said, names, patients."""

import gzip
import json
import os

import nibabel
import numpy as np
import pytest

from trainkit.data.volumes.sources import open_volumes
from trainkit.errors import UserError

PLAIN = nibabel.Nifti1Image(np.zeros((2, 3, 4), np.uint8), np.eye(4)).to_bytes()
PACKED = gzip.compress(PLAIN)


def volume(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(PACKED if path.suffix == ".gz" else PLAIN)
    return path


@pytest.fixture
def tom500(tmp_path):
    for split, ids in (("train", (1, 20, 3)), ("val", (7,))):
        for id in ids:
            volume(tmp_path / "tom500" / split / "image" / f"{id}.nii.gz")
            volume(tmp_path / "tom500" / split / "label" / f"{id}.nii.gz")
    return tmp_path / "tom500"


@pytest.fixture
def decathlon(tmp_path):
    root = tmp_path / "decathlon"
    for id in ("liver_10", "liver_2", "liver_7"):
        volume(root / "imagesTr" / f"{id}.nii.gz")
        volume(root / "labelsTr" / f"{id}.nii.gz")
    volume(root / "imagesTs" / "liver_99.nii.gz")
    return describe(root)


def describe(root, **changes):
    ids = sorted(path.name for path in (root / "imagesTr").iterdir())
    said = {
        "labels": {"0": "background", "1": "Liver", "2": "Tumour"},
        "training": [{"image": f"./imagesTr/{id}", "label": f"./labelsTr/{id}"} for id in ids],
        "test": ["./imagesTs/liver_99.nii.gz"],
    } | changes
    (root / "dataset.json").write_text(json.dumps({key: value for key, value in said.items() if value is not None}))
    return root


def ids(source):
    return [case.id for case in source.cases]


def refused(*args, **kwargs) -> str:
    with pytest.raises(UserError) as error:
        open_volumes(*args, **kwargs)
    return str(error.value)


# TOM500 and plain pairs


def test_a_split_of_tom500(tom500):
    source = open_volumes(f"{tom500}#train")
    assert ids(source) == ["1", "20", "3"] and [case.patient for case in source.cases] == ["1", "20", "3"]
    for case in source.cases:
        assert case.image == tom500 / "train" / "image" / f"{case.id}.nii.gz"
        assert case.label == tom500 / "train" / "label" / f"{case.id}.nii.gz"
    assert source.where == f"{tom500}#train" and source.names is None and source.left_out == ()
    assert sorted(source.files) == sorted(path for path in (tom500 / "train").rglob("*.gz"))
    assert ids(open_volumes(tom500 / "val")) == ["7"]


def test_splits_are_named_where_none_or_another_is_asked_for(tom500):
    assert f"holds the splits train, val; expected one of them; name {tom500}#train or {tom500}#val" in refused(tom500)
    assert f"{tom500}#test: no such split; available: train, val" in refused(f"{tom500}#test")
    assert "holds the splits" in refused(tom500, labelled=False)
    assert "../elsewhere" in refused(f"{tom500}#../elsewhere")


@pytest.mark.parametrize("images", ["image", "images", "imagesTr", "Images"])
@pytest.mark.parametrize("labels", ["label", "labels", "labelsTr", "mask", "masks"])
def test_folders_of_common_names_are_a_pair(tmp_path, images, labels):
    image, label = volume(tmp_path / images / "a.nii"), volume(tmp_path / labels / "a.nii.gz")
    (case,) = open_volumes(tmp_path).cases
    assert (case.id, case.image, case.label) == ("a", image, label)


def test_what_has_no_partner_and_what_lies_astray_is_named_and_not_used(tom500):
    root = tom500 / "train"
    volume(root / "image" / "50.nii.gz")
    volume(root / "label" / "60.nii.gz")
    volume(root / "image" / "old" / "1.nii.gz")
    (root / "image" / "30.nii.gz").mkdir()
    (root / "image" / "._1.nii.gz").write_bytes(b"\0\5\x16\7")
    (root / "label" / "notes.txt").write_text("fat not drawn in 3")
    (root / "image" / "gone.nii.gz").symlink_to(root / "nowhere.nii.gz")
    volume(root / "image" / os.fsdecode(b"\xff.nii"))
    source = open_volumes(f"{tom500}#train")
    assert ids(source) == ["1", "20", "3"]
    assert source.left_out == (
        "2 images without a label map: image/50.nii.gz, image/\\xff.nii",
        "1 mask without an image: label/60.nii.gz",
        "4 files of another kind: image/30.nii.gz, image/gone.nii.gz, image/old, label/notes.txt",
    )
    (root / "image" / os.fsdecode(b"\xff.nii")).unlink()
    assert "50" in ids(open_volumes(f"{tom500}#train", labelled=False))


def test_one_id_twice_is_refused(tmp_path):
    for folder in ("image", "label"):
        volume(tmp_path / folder / "a.nii")
    volume(tmp_path / "image" / "a.nii.gz")
    assert "two images of the id 'a': a.nii.gz and a.nii" in refused(tmp_path)
    (tmp_path / "image" / "a.nii.gz").rename(tmp_path / "label" / "a.nii.gz")
    assert "two label maps of the id 'a'" in refused(tmp_path)


def test_names_that_differ_by_nnunets_number_are_paired_and_others_are_not(tmp_path):
    for image, label in (("case_0000", "case"), ("a", "a_seg"), ("b_img", "b"), ("c_T1w", "c")):
        volume(tmp_path / "images" / f"{image}.nii.gz")
        volume(tmp_path / "labels" / f"{label}.nii.gz")
    source = open_volumes(tmp_path)
    assert ids(source) == ["case"] and source.cases[0].image.name == "case_0000.nii.gz"
    assert source.left_out == (
        "3 images without a label map: images/a.nii.gz, images/b_img.nii.gz, images/c_T1w.nii.gz",
        "3 masks without an image: labels/a_seg.nii.gz, labels/b.nii.gz, labels/c.nii.gz",
    )


def test_numbers_at_the_end_of_a_name_are_no_channels_where_label_maps_have_them_too(tmp_path):
    for folder in ("images", "labels"):
        for number in range(3):
            volume(tmp_path / folder / f"scan_{number:04}.nii.gz")
    assert ids(open_volumes(tmp_path)) == ["scan_0000", "scan_0001", "scan_0002"]
    (tmp_path / "labels" / "scan_0002.nii.gz").unlink()
    source = open_volumes(tmp_path)
    assert ids(source) == ["scan_0000", "scan_0001"]
    assert source.left_out == ("1 image without a label map: images/scan_0002.nii.gz",)


@pytest.mark.parametrize("labels", [True, False])
def test_nothing_to_take_is_said_with_what_was_there(tmp_path, labels):
    assert "does not exist" in refused(tmp_path / "no")
    (tmp_path / "image").mkdir()
    if labels:
        volume(tmp_path / "label" / "a.nii")
        assert "no labelled volumes; 1 mask without an image: label/a.nii" in refused(tmp_path)
    else:
        assert "no volumes in a layout that is known" in refused(tmp_path)


@pytest.mark.parametrize("names", [("a.dcm",), ("p1/1.2.840", "DICOMDIR"), ("images/p1/IM0001", "labels/p1.nii.gz")])
def test_where_there_are_no_volumes_the_program_that_converts_dicom_is_named(tmp_path, names):
    for name in names:
        volume(tmp_path / "scans" / name)
    for place in (tmp_path / "scans", tmp_path / "scans" / names[0]):
        for asked in (True, False):
            said = refused(place, labelled=asked)
            assert "DICOM" in said and "dcm2niix" in said and "\n" not in said


# To predict


def test_without_labels_a_folder_of_files_and_a_file_will_do(tmp_path):
    file = volume(tmp_path / "new" / "b.nii.gz")
    volume(tmp_path / "new" / "a.nii")
    (tmp_path / "new" / "a.txt").touch()
    volume(tmp_path / "new" / "below" / "c.nii")
    source = open_volumes(tmp_path / "new", labelled=False)
    assert ids(source) == ["a", "b"] and all(case.label is None for case in source.cases)
    assert source.left_out == ("2 files of another kind: a.txt, below",)
    assert ids(open_volumes(file, labelled=False)) == ["b"]
    assert ids(open_volumes(f"{tmp_path}#new", labelled=False)) == ["a", "b"]
    assert "without a label map" in refused(file)
    assert "no volumes in a layout" in refused(tmp_path / "new")
    assert "unknown kind" in refused(tmp_path / "new" / "a.txt", labelled=False)


# The Decathlon and nnU-Net


@pytest.mark.parametrize("place", ["", "#train"])
def test_the_decathlon_says_its_files_and_names(decathlon, place):
    source = open_volumes(f"{decathlon}{place}")
    assert source.kind == "pair of folders with dataset.json" and source.names == ("background", "Liver", "Tumour")
    assert ids(source) == ["liver_10", "liver_2", "liver_7"] and source.left_out == ()
    assert decathlon / "dataset.json" in source.files and len(source.files) == 7


def test_images_of_the_decathlons_test_have_no_labels(decathlon):
    assert "no volumes in a layout that is known" in refused(f"{decathlon}#test")
    source = open_volumes(f"{decathlon}#test", labelled=False)
    assert ids(source) == ["liver_99"] and source.cases[0].label is None and source.left_out == ()
    assert "no such split; available: test, train" in refused(f"{decathlon}#val")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"labels": {"0": "background", "1": "\ud800"}}, "names of labels"),
        ({"labels": {"1": "Tumour", "2": "Liver"}}, "expected 0, the background"),
        ({"labels": {"0": "nothing", "2": "Liver"}}, "expected 0, the background"),
        ({"labels": {"0": "background", "1": "Liver", "01": "Tumour"}}, "label '01': 'Tumour'"),
        ({"labels": {"background": 0, "whole": [1, 2]}}, "the region label 'whole'"),
        ({"labels": ["a"]}, "label ['a']: None"),
        ({"labels": {"0": "background", "1": "x", "2": "X"}}, "names of labels"),
        ({"labels": {"background": 0, "x": True}}, "label 'x': True"),
    ],
)
def test_a_wrong_dataset_json_is_named(decathlon, changes, said):
    text = refused(describe(decathlon, **changes))
    assert said in text and text.startswith(str(decathlon))


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, '"x"'])
def test_a_dataset_json_that_is_none_is_named(decathlon, text):
    (decathlon / "dataset.json").write_text(text)
    assert f"{decathlon / 'dataset.json'}:" in refused(decathlon)


def test_nnunets_layout_of_one_channel(tmp_path):
    for id in ("a", "b"):
        volume(tmp_path / "imagesTr" / f"{id}_0000.nii.gz")
        volume(tmp_path / "labelsTr" / f"{id}.nii.gz")
    volume(tmp_path / "imagesTs" / "c_0000.nii.gz")
    describe(tmp_path, labels={"background": 0, "Tumour": 2, "Liver": 1}, training=None, test=None)
    source = open_volumes(tmp_path)
    assert source.kind == "pair of folders with dataset.json" and ids(source) == ["a", "b"] and source.left_out == ()
    assert source.names == ("background", "Liver", "Tumour")
    assert ids(open_volumes(f"{tmp_path}#test", labelled=False)) == ["c"]
    volume(tmp_path / "labelsTs" / "c.nii.gz")
    assert ids(open_volumes(f"{tmp_path}#test")) == ["c"]
    volume(tmp_path / "imagesTr" / "a_0001.nii.gz")
    source = open_volumes(tmp_path)
    assert source.channels == ("channel 0", "channel 1") and [len(case.images) for case in source.cases] == [2, 1]


def test_volumes_whose_names_no_table_could_hold_are_refused(tom500):
    for part in ("image", "label"):
        volume(tom500 / "train" / part / os.fsdecode(b"\xff.nii"))
        volume(tom500 / "train" / part / "two\nlines.nii")
    said = refused(f"{tom500}#train")
    assert "2 names not in UTF-8, or with control characters:" in said
    assert said.splitlines()[1:3] == [r"  two\x0alines", r"  \xff"]


# Patients


def test_patients_are_found_by_an_expression(tmp_path):
    for id in ("p1_left", "p1_right", "p2_left"):
        volume(tmp_path / "image" / f"{id}.nii.gz")
        volume(tmp_path / "label" / f"{id}.nii.gz")
    assert [case.patient for case in open_volumes(tmp_path, patient=r"^(p\d+)_").cases] == ["p1", "p1", "p2"]
    assert "'p1_left' names no patient; expected a match of '^(q)'" in refused(tmp_path, patient="^(q)")
