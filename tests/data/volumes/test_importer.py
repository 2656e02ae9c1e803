"""Volumes from files to the packed form: what is written, reported, refused and noticed; and the verbs."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from organ_volumes import affine, put, put_case, put_set, read_volume, volume

from trainkit.cli import main
from trainkit.data import folders
from trainkit.data.formats import nifti
from trainkit.data.volumes import importer, preprocess, reader, sources, verify, volume_store
from trainkit.data.volumes.preprocess import Preparation
from trainkit.data.volumes.volume_store import PackedVolumes
from trainkit.errors import UserError


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return put_set(tmp_path_factory.mktemp("scans") / "set")


@pytest.fixture(scope="module")
def packed(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed") / "set"
    return importer.import_volumes(files, out, names=["left", "right"])


def test_a_set_is_written_as_it_was_prepared(files, packed):
    data = packed
    assert (len(data), data.names, data.axes) == (4, ("background", "left", "right"), "zyx")
    assert data.spacing == pytest.approx((4.0, 1.5, 1.0))
    for number in range(4):
        array, labels = volume(number)
        read, header = read_volume(files / "image" / f"p{number:02d}.nii.gz")
        expected = preprocess.prepare(read, header, Preparation("zyx"))
        case = data.case(number)
        assert (case.id, case.patient) == (f"p{number:02d}",) * 2
        assert (data.image(number) == expected.image).all() and case.floors == (expected.image.min(),)
        assert (data.label(number) == labels.transpose(2, 1, 0)).all()
        # mm3 by hand: voxels of 1 x 1.5 x 4 mm.
        assert case.volumes_mm3 == pytest.approx([(labels == label).sum() * 6.0 for label in range(3)])
        assert case.original_shape == case.shape == (6, 10, 12)
        assert case.facts["lowest"] == array.min() and case.facts["highest"] == array.max()
        assert case.facts["organs"] == {"1": {"pieces": 1, "lost": 0}, "2": {"pieces": 1, "lost": 0}}
        print_ = volume_store.fingerprint(array.transpose(2, 1, 0))
        assert data.fingerprints()[number] == print_


def test_a_resampled_set_keeps_what_was_annotated(files, tmp_path):
    data = importer.import_volumes(files, tmp_path / "set", spacing=(2.0, 1.0, 1.0))
    assert data.preparation == Preparation("zyx", (2.0, 1.0, 1.0)) and data.spacing == (2.0, 1.0, 1.0)
    _, labels = volume(1)
    assert (data.truth(1) == labels.transpose(2, 1, 0)).all() and data.label(1).shape == (12, 15, 12)
    assert data.case(1).original_spacing == pytest.approx((4.0, 1.5, 1.0)) and data.case(1).shape == (12, 15, 12)
    assert data.case(1).volumes_mm3 == pytest.approx([(labels == label).sum() * 6.0 for label in range(3)])
    assert (data.label(1).ravel()[data.foreground(1, 2)] == 2).all()
    assert data.names == ("background", "label 1", "label 2")
    plain = importer.import_volumes(files, tmp_path / "plain")
    same = PackedVolumes(plain.path)
    assert (same.fingerprints() == data.fingerprints()).all()


def test_a_set_that_was_packed_with_names_that_no_table_could_hold_is_refused(tmp_path, monkeypatch):
    for number, name in enumerate(("a", "caf\udce9")):
        put_case(tmp_path / "scans", name, *volume(number))
    with pytest.raises(UserError, match=r"1 name not in UTF-8, or with control characters:\n  caf\\xe9\n"):
        importer.import_volumes(tmp_path / "scans", tmp_path / "set")
    with monkeypatch.context() as patch:
        patch.setattr(folders, "check_names", lambda *_: None)
        importer.import_volumes(tmp_path / "scans", tmp_path / "set")
    with pytest.raises(UserError, match=r"cases\.json: 1 name not .*\n  caf\\xe9\n.*import the set again"):
        PackedVolumes(tmp_path / "set")


def test_axes_follow_the_slices_and_can_be_asked_for(tmp_path):
    for number in range(2):
        put_case(tmp_path / "scans", f"c{number}", *volume(number), affine((1.0, 1.0, 4.0), (0, 2, 1)))
    data = importer.import_volumes(tmp_path / "scans", tmp_path / "set")
    assert data.axes == "yzx" and data.spacing == pytest.approx((4.0, 1.0, 1.0))
    other = importer.import_volumes(tmp_path / "scans", tmp_path / "other", axes="zyx")
    assert other.axes == "zyx" and other.spacing == pytest.approx((1.0, 4.0, 1.0))


@pytest.mark.parametrize("kind", ["nan", "shape", "range"])  # other kinds of damage: test_volume_mistakes.py
def test_unusable_cases_are_refused_by_file(files, tmp_path, kind):
    root = shutil.copytree(files, tmp_path / "scans")
    array, labels = volume(1)
    if kind == "nan":
        array[3, 3, 3] = np.nan
        bad = put(root / "image" / "p01.nii.gz", array)
    else:
        labels[0, 0, 0] = 7
        bad = put(root / "label" / "p01.nii.gz", labels if kind == "range" else labels[:, :, :-1])
    with pytest.raises(UserError, match=f"{bad.parent.name}/p01") as error:
        importer.import_volumes(root, tmp_path / "set", names=["a", "b"])
    assert "1 unusable case:" in str(error.value)
    assert not (tmp_path / "set").exists() and [p.name for p in tmp_path.iterdir()] == ["scans"]
    found = verify.verify(root, names=["a", "b"])
    assert [line for line in found if not line.startswith("warning: ")] and str(bad) in found[0]


def test_headers_are_refused_before_any_voxel_is_read(files, tmp_path, monkeypatch):
    root = shutil.copytree(files, tmp_path / "scans")
    put(root / "label" / "p03.nii.gz", volume(3)[1][:-1])
    monkeypatch.setattr(nifti, "read_image", lambda path: pytest.fail("voxels were read"))
    with pytest.raises(UserError, match="p03"):
        importer.import_volumes(root, tmp_path / "set")


def test_twenty_unusable_cases_are_enough(tmp_path):
    root = put_set(tmp_path / "scans", 23, shape=(9, 8, 5))
    for number in range(23):
        (root / "label" / f"p{number:02d}.nii.gz").write_bytes(b"nothing")
    with pytest.raises(UserError) as error:
        importer.import_volumes(root, tmp_path / "set")
    assert str(error.value).count("not a NIfTI file") == 20
    assert "23 unusable cases" in str(error.value) and "and 3 more" in str(error.value)


def test_what_is_odd_is_said(tmp_path):
    root = tmp_path / "scans"
    for number in range(5):
        array, labels = volume(0)
        array += number / 100
        matrix = affine()
        if number == 1:
            matrix = affine((1.0, 1.5, 5.0))
        elif number == 2:
            array[:] = 3
        elif number == 3:
            labels[labels == 2] = 0
        elif number == 4:
            array = volume(0)[0]  # as number 0
            labels[:] = 0
        put_case(root, f"c{number}", array, labels, matrix)
    data = importer.import_volumes(root, tmp_path / "set", names=["a", "b", "c"])
    assert importer.notes(sources.open_volumes(root), data) == [
        "1 volume under two or more ids: c0 = c4",
        "1 case with a spacing over 10% off the median of 4 x 1.5 x 1 mm: c1 (5 x 1.5 x 1)",
        "1 image without contrast between its percentiles: c2",
        "1 case without any organ: c4",
        "2 b: not in 1 of 5 cases: c3",
        "3 c: in no case",
    ]


def test_names_must_fit_the_labels(files, tmp_path):
    with pytest.raises(UserError, match=r"labels 2 in .* of 720 voxels"):
        importer.import_volumes(files, tmp_path / "set", names=["only one"])
    with pytest.raises(UserError, match="names of labels"):
        importer.import_volumes(files, tmp_path / "set", names=["a", "A"])
    data = importer.import_volumes(files, tmp_path / "more", names=["background", "a", "b", "never seen"])
    assert "3 never seen: in no case" in importer.notes(sources.open_volumes(files), data) and len(data.names) == 4


def test_labels_that_nobody_named_must_look_like_classes(tmp_path):
    root = put_set(tmp_path / "scans", 2)
    labels = volume(1)[1]
    put(root / "label" / "p01.nii.gz", labels * np.uint8(100))
    with pytest.raises(UserError, match=r"labels 1, 2, 100, 200, which have no names; .*write `labels:"):
        importer.import_volumes(root, tmp_path / "set")
    for number in range(2):
        put(root / "label" / f"p{number:02d}.nii.gz", labels * np.uint8(0))
    with pytest.raises(UserError, match="no labelled voxel"):
        importer.import_volumes(root, tmp_path / "set")


def test_verify_finds_patients_and_volumes_of_another_split(files, tmp_path):
    other = tmp_path / "val"
    put_case(other, "p02", *volume(50))
    array, labels = volume(3)
    # The same volume under another name, its axes the other way round.
    put_case(
        other,
        "q",
        np.ascontiguousarray(array.transpose(2, 1, 0)),
        np.ascontiguousarray(labels.transpose(2, 1, 0)),
        affine((4.0, 1.5, 1.0), (2, 1, 0)),
    )
    found = verify.verify(files, against=[other])
    assert f"warning: {files}: 1 of its 4 patients are in {other}: p02" in found
    assert f"warning: {files}: 1 of its 4 volumes are in {other}: p03 = q" in found and len(found) == 2


def test_a_set_is_packed_once_and_again_when_anything_changes(files, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    root = shutil.copytree(files, tmp_path / "scans")
    source = sources.open_volumes(root)
    first = importer.pack_volumes_once(source, names=["a", "b"])
    assert first.names == ("background", "a", "b") and str(first.path).startswith(str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        patch.setattr(importer, "import_volumes", lambda *a, **k: pytest.fail("was packed again"))
        assert importer.pack_volumes_once(source, names=["background", "a", "b"]).path == first.path
    others = [
        importer.pack_volumes_once(source, names=["a", "c"]),
        importer.pack_volumes_once(source, names=["a", "b"], spacing=(4, 2, 2)),
        importer.pack_volumes_once(source, names=["a", "b"], axes="yzx"),
        importer.pack_volumes_once(sources.open_volumes(root, patient=r"p(\d)"), names=["a", "b"]),
    ]
    put(root / "label" / "p00.nii.gz", volume(0)[1])
    others.append(importer.pack_volumes_once(sources.open_volumes(root), names=["a", "b"]))
    assert len({data.path for data in [first, *others]}) == 6
    assert others[2].axes == "yzx" and others[3].patients() == ["0", "0", "0", "0"]


def test_volumes_are_told_from_other_sets(files, tmp_path):
    assert importer.holds_volumes(files)
    assert importer.holds_volumes(files / "image" / "p00.nii.gz")
    assert importer.holds_volumes(f"{files.parent}#set")
    assert not importer.holds_volumes(tmp_path) and not importer.holds_volumes(tmp_path / "none")
    (tmp_path / "a.png").write_bytes(b"")
    assert not importer.holds_volumes(tmp_path)


def test_a_disk_too_small_is_said_before_the_work(files, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 100))
    monkeypatch.setattr(nifti, "read_image", lambda path: pytest.fail("voxels were read"))
    with pytest.raises(UserError, match=r"are free.*choose another disk"):
        importer.import_volumes(files, tmp_path / "set")
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path

from trainkit.data.volumes import volume_store
from trainkit.data.volumes import importer

files, out, most = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
add = volume_store.Writer.add_case
def add_case(self, *case):
    if self.rows == most:
        os.kill(os.getpid(), signal.SIGKILL)
    add(self, *case)
volume_store.Writer.add_case = add_case
importer.import_volumes(files, out, names=["left", "right"], spacing=(2.0, 1.0, 1.0))
"""


@pytest.mark.parametrize("most", [0, 1, 3])
def test_an_import_that_was_killed_is_resumed_and_gives_the_same_set(files, tmp_path, monkeypatch, most):
    root = shutil.copytree(files, tmp_path / "scans")
    put_case(root, "p04", *volume(4))
    how = {"names": ["left", "right"], "spacing": (2.0, 1.0, 1.0)}
    whole = importer.import_volumes(root, tmp_path / "whole", **how)
    done = subprocess.run([sys.executable, "-c", KILLED, root, tmp_path / "set", str(most)], check=False)
    assert done.returncode == -signal.SIGKILL and not (tmp_path / "set").exists()
    read, seen = reader.read_image, []
    monkeypatch.setattr(reader, "read_image", lambda case: seen.append(case.id) or read(case))
    resumed = importer.import_volumes(root, tmp_path / "set", **how)
    assert sorted(seen) == [f"p{n:02d}" for n in range(most, 5)]
    assert resumed.digest == whole.digest and len(resumed) == 5
    assert sorted(place.name for place in tmp_path.iterdir()) == ["scans", "set", "whole"]


def ask(*words, code=0):
    result = CliRunner().invoke(main.main, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.output


def test_the_verbs_know_volumes(files, tmp_path):
    assert f"{files}: 0 problems, 2 to look at" in ask("data", "verify", files, "--against", files)
    root = shutil.copytree(files, tmp_path / "scans")
    (root / "image" / "p01.nii.gz").write_bytes(b"")
    assert "p01.nii.gz: 0 bytes" in ask("data", "verify", root, code=2)
    assert "labels 2 in" in ask("data", "verify", files, "--names", "one", code=2)
    assert "each with its value" in ask("data", "verify", files, "--names", "a=01,b=2", code=2)
    assert "trainkit cp hippocampus mine.yaml" in ask("data", "import", files, tmp_path / "c", code=2)


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_sets_of_any_shape_are_imported_described_and_sound(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("any")
    labelled = 0
    for number in range(data.draw(st.integers(1, 3))):
        shape = data.draw(st.tuples(*[st.integers(1, 6)] * 3))
        rng = np.random.default_rng(data.draw(st.integers(0, 99)))
        labels = rng.integers(0, data.draw(st.integers(1, 4)), shape).astype(np.uint8)
        image = rng.integers(0, data.draw(st.integers(1, 9)), shape).astype(np.int16)
        spacing = data.draw(st.tuples(*[st.sampled_from([0.5, 1.0, 4.0])] * 3))
        order, flip = data.draw(st.permutations(range(3))), data.draw(st.tuples(*[st.booleans()] * 3))
        put_case(root / "scans", f"c{number}", image, labels, affine(spacing, order, flip))
        labelled += int(labels.any())
    asked = data.draw(st.none() | st.tuples(*[st.sampled_from([0.7, 2.0, 9.0])] * 3))
    packed = importer.import_volumes(root / "scans", root / "set", names=["a", "b", "c"], spacing=asked)
    assert sum(any(packed.case(i).volumes_mm3[1:]) for i in range(len(packed))) == labelled
    for i in range(len(packed)):
        assert np.isfinite(packed.image(i)).all() and packed.label(i).shape == packed.case(i).shape


def test_memory_is_that_of_a_volume_whatever_their_number(tmp_path, monkeypatch):
    import tracemalloc

    monkeypatch.setattr(importer, "threads", lambda: 1)
    shape, peaks = (40, 40, 30), []
    for count in (2, 8):
        root = put_set(tmp_path / f"scans{count}", count, shape=shape)
        tracemalloc.start()
        importer.import_volumes(root, tmp_path / f"set{count}", spacing=(3.0, 1.4, 1.0))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]
    # One being prepared and one that waits for being written.
    assert peaks[1] < 3 * importer._PER_VOXEL * 40 * 40 * 40
