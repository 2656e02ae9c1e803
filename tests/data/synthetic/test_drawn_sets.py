"""The drawn sets: the same pixels and rows everywhere, the folders that hold them, and how these are made.

What a set is like (whose labels are wrong, which folds pairs are in, how large organs are) follows from what is pinned
here: whoever draws a set anew looks at it, and measures what its recipes publish.
"""

import csv
import hashlib
import json
import multiprocessing
import os

import numpy as np
import pytest
from PIL import Image

from trainkit.data.synthetic import drawing, eyes, faces, objects, orbits, people, scenes
from trainkit.errors import UserError
from trainkit.interfaces import CP, MODALITIES, NIR, RGB, SK, TEXT

SMALL, COARSE = (48, 48, 18), (3.0, 3.0, 3.85)
"""Voxels of an orbit that is drawn quickly, and the mm between them."""


def of_objects():
    for kind in objects.CLASSES:
        for number in range(4):
            yield objects.draw(kind, number, "train").tobytes() + objects.draw(kind, number, "val").tobytes()


def of_eyes():
    yield repr([eyes.rows("train"), eyes.rows("val")]).encode()
    yield from (eyes.draw(person, person % 20).tobytes() for person in range(0, 220, 5))


def of_faces():
    yield repr(faces.pairs()).encode()
    yield from (faces.draw(identity, identity % 24, 48).tobytes() for identity in range(0, 120, 4))


def of_people():
    yield repr([[tuple(row) for row in people.rows(split)] for split in ("train", "val")]).encode()
    for person in range(0, 360, 15):
        yield from (people.draw(person, modality, person % 2).tobytes() for modality in (RGB, NIR, CP, SK))


def of_scenes():
    yield from (b"".join(part.tobytes() for part in scenes.draw(number)) for number in range(0, 300, 10))


def of_orbits():
    for patient in (1, 2):
        image, labels = orbits.draw(patient, SMALL, COARSE)
        yield np.rint(image / np.float32(orbits.Scan(patient).slope)).astype("<i2").tobytes() + labels.tobytes()


@pytest.mark.parametrize(
    ("drawn", "version", "digest"),
    [
        (of_objects, (objects.VERSION, 2), "b4d99e57a413ad5750e9269aef7a93f82330f5d0b46465b354c05ac7ab90f46e"),
        (of_eyes, (eyes.VERSION, 4), "86452d378aa4842b83e38db0d35a042d0ad4e0e6baae313bf7bb3d550d9b69b3"),
        (of_faces, (faces.VERSION, 2), "476e1cd88914524f5c03a77d0c71ba971a457d304fac0e9708fdf91ad913df32"),
        (of_people, (people.VERSION, 4), "c7ad5e5f83ea54e842eeb522636dc2bdb8fa668329a7dbb8d38cbf726ec851b6"),
        (of_scenes, (scenes.VERSION, 5), "aa8c02adfcc46c25050149c35b89e50f09fc3a2d1a9ae850f42c39c9d0ca2a48"),
        (of_orbits, (orbits.VERSION, 3), "bc7adcb1cf88ad9d1a331a5fc0faee5646a416e924051f6600274dc455c1783e"),
    ],
)
def test_a_set_is_the_same_everywhere_and_belongs_to_its_version(drawn, version, digest):
    """If it changes on purpose, raise `VERSION` with it."""
    seen = hashlib.sha256()
    for part in drawn():
        seen.update(part)
    assert version[0] == version[1] and seen.hexdigest() == digest


@pytest.mark.parametrize("patient", [1, 5])
def test_an_orbit_is_the_same_at_every_resolution(patient):
    sizes = []
    for shape, spacing in ((SMALL, COARSE), ((96, 96, 36), (1.5, 1.5, 1.925))):
        at = np.argwhere(orbits.Scan(patient, shape, spacing).labels(wander=0.0) == orbits.NAMES.index("EB"))
        matrix = orbits.affine(patient, shape, spacing)
        sizes.append(((at @ matrix[:3, :3].T + matrix[:3, 3]).mean(0), len(at) * np.prod(spacing)))
    assert np.abs(sizes[0][0] - sizes[1][0]).max() < 1.0
    assert sizes[0][1] == pytest.approx(sizes[1][1], rel=0.06)


# ---- folders


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Sets of few images, kept in a folder of its own."""
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    for module, name, value in (
        (objects, "PICTURES", {"train": 3, "val": 2}),
        (eyes, "PEOPLE", {"train": 6, "val": 4}), (eyes, "PICTURES", 10), (eyes, "WRONG", 0.1),
        (scenes, "PICTURES", {"train": 4, "val": 2}),
        (people, "PEOPLE", {"train": 6, "val": 3}), (people, "LACKS", {NIR: (7, 2), TEXT: (7, 4)}),
        (faces, "IDENTITIES", 3), (faces, "PICTURES", 2), (faces, "OTHERS", 20), (faces, "OTHERS_PICTURES", 4),
        (faces, "PAIRS_PER_FOLD", 8),
        (orbits, "PATIENTS", {"train": 6, "val": 1}), (orbits, "SIDE", SMALL[0]), (orbits, "SPACING", COARSE),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    return tmp_path / "cache"


def names(home, pattern="*"):
    return sorted(path.relative_to(home).as_posix() for path in home.glob(pattern))


def pixels(file, mode="RGB"):
    with Image.open(file) as image:
        assert image.mode == mode
        return np.asarray(image)


def about(home):
    return json.loads((home / "sample.json").read_text())


def test_the_folder_of_objects_holds_what_it_says(small):
    home = objects.folder()
    assert home == small / f"objects-v{objects.VERSION}-32" and names(home) == ["sample.json", "train", "val"]
    assert names(home / "train") == sorted(objects.CLASSES)
    assert (len(names(home, "train/*/*.png")), len(names(home, "val/*/*.png"))) == (30, 20)
    assert np.array_equal(pixels(home / "val" / "fish" / "001.png"), objects.draw("fish", 1, "val"))
    assert (about(home)["train"], about(home)["val"]) == (30, 20)


def test_the_folder_of_eyes_holds_what_it_says(small):
    home = eyes.folder()
    assert names(home, "*/*") == ["train/closed", "train/open", "val/closed", "val/open"]
    wrong = set(about(home)["wrong_labels"])
    assert len(wrong) == 6 + 4
    for split, whose in (("train", range(6)), ("val", range(6, 10))):
        files = list(home.glob(f"{split}/*/*.png"))
        assert len(files) == len(whose) * 10
        for file in files:
            person, number = int(file.stem[1:5]), int(file.stem[6:])
            truth = "open" if eyes.openness(person, number) >= eyes.OPEN_FROM else "closed"
            assert person in whose and (file.parent.name != truth) == (file.relative_to(home).as_posix() in wrong)
    assert np.array_equal(pixels(file), eyes.draw(person, number))


def test_the_folder_of_scenes_holds_what_it_says(small):
    home = scenes.folder()
    assert about(home)["names"] == list(scenes.NAMES) and about(home)["ignored"] == 255
    for split, numbers in (("train", range(4)), ("val", range(4, 6))):
        assert scenes.numbers(split) == numbers
        for folder in (split, f"{split}annot"):
            assert names(home / folder) == [f"{i:04d}.png" for i in numbers]
    picture, mask = scenes.draw(4)
    assert np.array_equal(pixels(home / "val" / "0004.png"), picture)
    assert np.array_equal(pixels(home / "valannot" / "0004.png", "P"), mask)
    palette = np.full((256, 3), 255)
    palette[:9] = scenes.COLOURS
    with Image.open(home / "valannot" / "0004.png") as image:
        assert np.array_equal(np.asarray(image.convert("RGB")), palette[mask])


def test_the_folder_of_people_holds_what_it_says(small):
    home = people.folder()
    assert names(home) == ["sample.json", "train", "val"]
    for split in ("train", "val"):
        with open(home / split / "index.csv", newline="", encoding="utf-8") as file:
            table = [people.Row(**row) for row in csv.DictReader(file)]
        assert table == people.rows(split) and len(table) == about(home)["records"][split]
        assert names(home / split, "*/*/*.png") == sorted(row.path for row in table if row.path)
    assert not (home / "train" / "nir" / "p0002").exists()
    for modality in (RGB, NIR, CP, SK):
        found = pixels(home / "val" / MODALITIES[modality] / "p0007" / "1.png", "RGB" if modality in (RGB, CP) else "L")
        assert np.array_equal(found, people.draw(7, modality, 1))


def test_the_folder_of_orbits_holds_what_it_says(small):
    nibabel = pytest.importorskip("nibabel")
    home = orbits.folder()
    assert about(home)["patients"] == {"train": 6, "val": 1}
    codes = []
    for split in ("train", "val"):
        for kind in ("image", "label"):
            assert names(home / split / kind) == sorted(f"{i}.nii.gz" for i in orbits.patients(split))
        for patient in orbits.patients(split):
            image, label = (nibabel.load(home / split / kind / f"{patient}.nii.gz") for kind in ("image", "label"))
            assert np.allclose(image.affine, label.affine) and np.allclose(image.header.get_zooms(), COARSE)
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


def test_the_folder_of_faces_holds_what_it_says_and_is_made_once(small):
    home = faces.folder(16)
    assert home.parent == small and names(home) == ["sample.json", "train", "verification"]
    whose = names(home / "train")
    assert whose == ["id00000", "id00001", "id00002"]
    assert [len(names(home / "train" / name)) for name in whose] == [2, 2, 2]
    with open(home / "verification" / "pairs.csv", newline="", encoding="utf-8") as file:
        paths = [row[key] for row in csv.DictReader(file) for key in ("path_a", "path_b")]
    assert len(paths) == 160 and all((home / "verification" / path).is_file() for path in paths)
    assert not {path.split("/")[0] for path in paths} & {*whose}
    first = home / "train" / "id00001" / "01.png"
    assert np.array_equal(pixels(first), faces.draw(1, 1, 16))
    assert about(home)["train"] == {"identities": 3, "pictures": 6}
    stamp = first.stat().st_mtime_ns
    assert faces.folder(16) == home and first.stat().st_mtime_ns == stamp


# ---- how folders are made


def test_what_an_interrupted_process_left_is_drawn_anew(small, monkeypatch):
    write = faces._write

    def half(to, size):
        (to / "train").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(faces, "_write", half)
    with pytest.raises(KeyboardInterrupt):
        faces.folder(16)
    monkeypatch.setattr(faces, "_write", write)
    assert len(names(faces.folder(16), "train/*/*.png")) == 6


def test_a_place_that_cannot_be_written_is_said_in_a_sentence(small, monkeypatch):
    def full(to, size):
        to.mkdir(parents=True)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(faces, "_write", full)
    with pytest.raises(UserError, match=r"No space left on device.*TRAINKIT_CACHE"):
        faces.folder(16)
    assert not list(small.glob(".*.part"))


def test_a_size_that_makes_no_sense_is_refused():
    with pytest.raises(UserError, match=r"data\.image_size.*8.*expected 16 to 256"):
        faces.folder(8)


def test_the_environment_says_where_sets_are_kept(monkeypatch, tmp_path):
    for name in ("TRAINKIT_CACHE", "TRAINKIT_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert drawing.root() == tmp_path / ".cache" / "trainkit"
    monkeypatch.setenv("TRAINKIT_DATA", str(tmp_path / "data"))
    assert drawing.root() == tmp_path / "data" / ".trainkit-sample"
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    assert drawing.root() == tmp_path / "cache"


def _make(cache, queue):
    os.environ["TRAINKIT_CACHE"] = cache
    faces.IDENTITIES, faces.PICTURES, faces.OTHERS, faces.OTHERS_PICTURES, faces.PAIRS_PER_FOLD = 4, 2, 20, 4, 8
    queue.put((os.getpid(), faces.folder(16).stat().st_ino))


@pytest.mark.slow
def test_processes_that_start_together_draw_one_set(tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_make, args=(str(tmp_path), queue)) for _ in range(2)]
    for process in processes:
        process.start()
    answers = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    assert answers[0][1] == answers[1][1] and answers[0][0] != answers[1][0]
