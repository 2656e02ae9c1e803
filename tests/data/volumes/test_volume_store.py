"""The packed form of volumes: what goes in comes out, and what was changed is noticed."""

from __future__ import annotations

import json
import pickle
import shutil

import numpy as np
import pytest

from trainkit.data.volumes import volume_store
from trainkit.data.volumes.preprocess import Preparation
from trainkit.data.volumes.volume_store import CaseInfo, PackedVolumes, Writer
from trainkit.errors import UserError
from trainkit.files import sha256

NAMES = ("background", "a", "b", "c")


def drawn(number: int, shape=(4, 6, 5)):
    rng = np.random.default_rng(number)
    labels = rng.integers(0, 3, shape).astype(np.uint8)
    return rng.normal(size=shape).astype(np.float16), labels


def write(out, cases=3, spacing=None, names=NAMES):
    with Writer(out, how=Preparation("yzx", spacing)) as writer:
        for number in range(cases):
            shape = (4 + number, 6, 5)
            image, labels = drawn(number, shape)
            original = shape if spacing is None else (2, 3 + number, 4)
            truth = None if spacing is None else drawn(number + 50, original)[1]
            info = CaseInfo(
                id=f"case{number}",
                patient=f"p{number // 2}",
                shape=shape,
                spacing=(3.0 + number, 1.0, 0.5),
                original_shape=original,
                original_spacing=(6.0, 1.0, 0.5),
                floors=(float(image.min()),),
                volumes_mm3=(10.0, 2.0, 1.5),
                facts={"mean": 1.0},
            )
            writer.add_case(info, image[None], labels, truth, 2**63 + number)
        return writer.finish(names=names, made_from="a test")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return write(tmp_path_factory.mktemp("packed") / "set")


@pytest.fixture
def copied(made, tmp_path):
    return shutil.copytree(made.path, tmp_path / "copy")


@pytest.mark.parametrize("spacing", [None, (3.0, 1.0, 0.5)])
def test_what_goes_in_comes_out(tmp_path, spacing):
    data = write(tmp_path / "set", spacing=spacing)
    for opened in (data, PackedVolumes(tmp_path / "set"), pickle.loads(pickle.dumps(data))):
        assert len(opened) == 3 and opened.names == NAMES and opened.axes == "yzx"
        assert opened.spacing == (4.0, 1.0, 0.5) and opened.preparation == Preparation("yzx", spacing)
        assert opened.fingerprints().tolist() == [2**63, 2**63 + 1, 2**63 + 2]
        assert opened.ids() == ["case0", "case1", "case2"] and opened.patients() == ["p0", "p0", "p1"]
        for number in range(3):
            image, labels = drawn(number, (4 + number, 6, 5))
            assert opened.image(number).dtype == np.float16 and (opened.image(number) == image).all()
            assert opened.label(number).dtype == np.uint8 and (opened.label(number) == labels).all()
            truth = labels if spacing is None else drawn(number + 50, (2, 3 + number, 4))[1]
            assert (opened.truth(number) == truth).all() and opened.truth(number).shape == truth.shape
            assert opened.case(number).floors == (image.min(),)
            assert opened.case(number).volumes_mm3 == (10.0, 2.0, 1.5, 0.0)
            for label in range(1, 4):
                assert (opened.foreground(number, label) == np.flatnonzero(labels == label)).all()
            assert opened.foreground(number, 0).size == 0
            opened.check(number)


def test_views_are_of_the_file_and_cannot_be_written(made):
    image = made.image(1)[0]
    assert image.base is not None and not image.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        image[0, 0, 0] = 1


def test_fingerprints_tell_volumes_apart_and_nothing_else():
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    own = volume_store.fingerprint(array)
    assert own == volume_store.fingerprint(np.asfortranarray(array)) == volume_store.fingerprint(array.astype(np.int16))
    negative = array.copy()
    negative[0, 0, 0] = -0.0
    assert volume_store.fingerprint(negative) == own
    other = array.copy()
    other[1, 2, 3] += 1
    assert len({own, volume_store.fingerprint(other), volume_store.fingerprint(array.reshape(3, 2, 4))}) == 3


def test_the_digest_is_of_the_content_alone(tmp_path, made):
    again = write(tmp_path / "elsewhere")
    assert again.digest == made.digest
    assert write(tmp_path / "fewer", cases=2).digest != made.digest
    assert write(tmp_path / "renamed", names=("background", "a", "b", "d")).digest != made.digest
    assert write(tmp_path / "resampled", spacing=(1.0, 1.0, 1.0)).digest != made.digest


@pytest.mark.parametrize(
    "change",
    [
        lambda cases: cases.pop(),
        lambda cases: cases[0].update(shape=[9999, 9999, 9999]),
        lambda cases: cases[0].update(shape=[4, 6, -5]),
        lambda cases: cases[0].update(shape=[4, 6]),
        lambda cases: cases[0].update(original_shape=[4, 6, 6]),
        lambda cases: cases[0].update(spacing=[0, 1, 1]),
        lambda cases: cases[0].update(foreground=[0, 1]),
        lambda cases: cases[0].update(foreground=[0, 10**9, 0, 0]),
        lambda cases: cases[0].update(volumes_mm3=[1]),
        lambda cases: cases[0].update(floor="low"),
        lambda cases: cases[0].update(fingerprint="zz"),
        lambda cases: cases[0].update(fingerprint="1" * 40),
        lambda cases: cases[0].pop("crc"),
        lambda cases: cases[0].pop("id"),
        lambda cases: cases.__setitem__(0, None),
    ],
)
def test_cases_that_do_not_fit_the_files_are_refused_even_when_hashed_anew(copied, change):
    cases = json.loads((copied / "cases.json").read_text())
    change(cases)
    (copied / "cases.json").write_text(json.dumps(cases))
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["files"]["cases.json"] = {
        "bytes": (copied / "cases.json").stat().st_size,
        "sha256": sha256(copied / "cases.json"),
    }
    manifest["digest"] = PackedVolumes.digest_of(manifest)
    (copied / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=str(copied)):
        PackedVolumes(copied)
