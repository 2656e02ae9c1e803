"""The drawn orbits: what they are, that they are the same everywhere, and that space and organs agree."""

import hashlib
import json

import numpy as np
import pytest

from trainkit.data.synthetic import orbits

DIGEST = (3, "bc7adcb1cf88ad9d1a331a5fc0faee5646a416e924051f6600274dc455c1783e")
"""Of two patients. If it changes on purpose, raise `VERSION` with it."""
SMALL, COARSE = (48, 48, 18), (3.0, 3.0, 3.85)
REAL = {
    "SR": 2918, "LR": 1933, "MR": 1986, "IR": 2080, "ON": 1102, "FAT": 34065, "LG": 2856, "SO": 776, "EB": 13129,
}  # fmt: skip
"""Mean volumes of TOM500's organs in mm3, both sides together."""


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A set of few patients in few voxels, kept in a folder of its own."""
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(orbits, "PATIENTS", {"train": 6, "val": 1})
    monkeypatch.setattr(orbits, "SIDE", SMALL[0])
    monkeypatch.setattr(orbits, "SPACING", COARSE)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def painted():
    """Label maps of a few patients as the files have them, and the volume of a voxel of each."""
    answer = []
    for patient in orbits.patients("train")[::5]:
        scan = orbits.Scan(patient)
        answer.append((scan.labels(), scan.labels(wander=0.0), float(np.prod(scan.spacing))))
    return answer


def world(patient, labels, organ, shape, spacing):
    """Where the voxels of an organ are: (n, 3) in millimetres of the scanner, right, front and up positive."""
    at = np.argwhere(labels == orbits.NAMES.index(organ))
    matrix = orbits.affine(patient, shape, spacing)
    return at @ matrix[:3, :3].T + matrix[:3, 3]


def test_voxels_are_the_same_everywhere_and_belong_to_the_version():
    seen = hashlib.sha256()
    for patient in (1, 2):
        image, labels = orbits.draw(patient, SMALL, COARSE)
        steps = np.rint(image / np.float32(orbits.Scan(patient).slope)).astype("<i2")
        seen.update(steps.tobytes() + labels.tobytes())
    assert (orbits.VERSION, seen.hexdigest()) == DIGEST


def test_a_patient_depends_on_its_number_alone():
    image, labels = orbits.draw(3, SMALL, COARSE)
    other = orbits.draw(4, SMALL, COARSE)[1]
    again, same = orbits.draw(3, SMALL, COARSE)
    assert (image.shape, image.dtype) == (SMALL, np.float32)
    assert (labels.shape, labels.dtype) == (SMALL, np.uint8)
    assert np.array_equal(image, again)
    assert np.array_equal(labels, same)
    assert not np.array_equal(labels, other)


def test_splits_have_their_sizes_and_nobody_in_common():
    train, val = orbits.patients("train"), orbits.patients("val")
    assert (len(set(train)), len(set(val))) == (40, 12)
    assert not set(train) & set(val)
    assert 1 <= min(train + val) <= max(train + val) <= 1670


def test_organs_have_the_volumes_that_tom500_has(painted):
    for label, name in enumerate(orbits.NAMES[1:], 1):
        volumes = [(labels == label).sum() * voxel for labels, _, voxel in painted]
        assert 0.75 < np.mean(volumes) / REAL[name] < 1.25, name
        assert np.std(volumes) > 0.05 * REAL[name], name


@pytest.mark.parametrize("patient", [1, 5])
def test_a_patient_is_the_same_at_every_resolution(patient):
    sizes = []
    for shape, spacing in ((SMALL, COARSE), ((96, 96, 36), (1.5, 1.5, 1.925))):
        labels = orbits.Scan(patient, shape, spacing).labels(wander=0.0)
        middle = world(patient, labels, "EB", shape, spacing).mean(0)
        volume = (labels == 9).sum() * np.prod(spacing)
        sizes.append((middle, volume))
    assert np.abs(sizes[0][0] - sizes[1][0]).max() < 1.0
    assert sizes[0][1] == pytest.approx(sizes[1][1], rel=0.06)


@pytest.mark.parametrize("patient", [1, 2, 5, 8])
def test_anatomy_lies_where_it_should_in_the_world(patient):
    shape, spacing = (96, 96, 20), (1.7, 1.7, 3.85)
    scan = orbits.Scan(patient, shape, spacing)
    at = {name: world(patient, scan.labels(), name, shape, spacing) for name in orbits.NAMES[1:]}
    middle = (at["EB"][:, 0].min() + at["EB"][:, 0].max()) / 2
    eyes = [thing.ends.mean(0) + np.array((0, 40, 20)) for thing in scan.things if thing.name == "EB"]
    for side, eye in zip((1, -1), eyes, strict=True):  # right, then left
        part = {name: points[(points[:, 0] - middle) * side > 0].mean(0) for name, points in at.items()}
        assert 20 < (part["EB"][0] - middle) * side < 42
        assert np.abs(part["EB"] - eye).max() < 1.2
        assert part["SR"][2] > part["ON"][2] > part["IR"][2]  # up
        assert (part["LR"][0] - part["ON"][0]) * side > 0 > (part["MR"][0] - part["ON"][0]) * side
        assert part["SO"][2] > part["MR"][2]
        assert part["LG"][2] > part["EB"][2]
        assert (part["LG"][0] - part["EB"][0]) * side > 0
        assert part["EB"][1] > part["ON"][1] + 15  # in front


def test_the_folder_holds_what_it_says(small):
    nibabel = pytest.importorskip("nibabel")
    home = orbits.folder()
    assert home == small / f"orbits-v{orbits.VERSION}"
    assert json.loads((home / "sample.json").read_text())["patients"] == {"train": 6, "val": 1}
    codes = []
    for split in ("train", "val"):
        for kind in ("image", "label"):
            names = sorted(p.name for p in (home / split / kind).iterdir())
            assert names == sorted(f"{i}.nii.gz" for i in orbits.patients(split))
        for patient in orbits.patients(split):
            image = nibabel.load(home / split / "image" / f"{patient}.nii.gz")
            label = nibabel.load(home / split / "label" / f"{patient}.nii.gz")
            assert np.allclose(image.affine, label.affine)
            assert np.allclose(image.header.get_zooms(), COARSE)
            codes.append("".join(nibabel.aff2axcodes(image.affine)))
            if codes.count(codes[-1]) > 1:
                continue  # one of each kind is redrawn
            drawn, painted = orbits.draw(patient)
            turn = nibabel.orientations.ornt_transform(
                nibabel.io_orientation(image.affine), nibabel.io_orientation(orbits.affine(patient))
            )
            straight, marked = image.as_reoriented(turn), label.as_reoriented(turn)
            assert np.allclose(straight.affine, orbits.affine(patient), atol=1e-3)
            assert np.allclose(straight.get_fdata(), drawn, rtol=1e-5)
            assert np.array_equal(np.asarray(marked.dataobj), painted)
    assert sorted(codes) == ["LSA"] * 6 + ["RSP"]
