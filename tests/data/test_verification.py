"""Sets of every kind verified: damage is named with its count, what sets share is told, and progress counts items."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import organ_volumes
import packed_rows
import people_sets
import pytest
import scene_sets
from click.testing import CliRunner

from trainkit.cli import main
from trainkit.config import loader
from trainkit.data import import_images, kinds
from trainkit.data.rows import reader
from trainkit.data.storage.image_store import Packed
from trainkit.data.verification import WARNING
from trainkit.errors import UserError

pytestmark = pytest.mark.usefixtures("cache")

RECIPE = """name: tiny
task: {{name: segment2d, net: {{name: bisenetv2}}}}
data: {{name: scenes, train: "{place}#train", evaluate: {{val: "{place}#val"}}, crop: [16, 24], names: {names}}}
optim: {{lr: 0.1}}
train: {{length: 2 steps, batch_size: 2}}
"""
NAMES = list(scene_sets.NAMES[: scene_sets.CLASSES])


def images(root: Path) -> Path:
    for row in range(6):
        scene_sets.put(root / "files" / f"c{row % 2}" / f"{row}.png", scene_sets.scene(row, (8, 8))[0])
    import_images.import_pictures(root / "files", root / "set", size=(8, 8), group=r"/(\d)\.")
    return root / "set"


SETS: dict[str, tuple[Callable[[Path], Path], int]] = {
    "images": (images, 6),
    "people": (lambda root: people_sets.index(root, ["a", "b"], (3, 1, 1, 1, 2)), 12),
    "scenes": (lambda root: scene_sets.camvid(root, (6, 3)), 9),
    "volumes": (organ_volumes.put_set, 4),
}
"""By kind: how a set that is well is made, and how many items it has."""


def verify(kind: str, place: Path, **more) -> list[str]:
    found = kinds.at(place)
    assert found.name == kind
    function = kinds.function(found, "verify")
    assert function is not None
    return function(place, **more, **({"names": NAMES} if kind == "scenes" else {}))


def recipe(place: Path) -> Path:
    file = place.with_name("recipe.yaml")
    file.write_text(RECIPE.format(place=place, names=NAMES))
    return file


# Damage: what is done to a set, and the sentence about it.


def a_changed_row(place):
    packed_rows.damage(Packed(place), "image", 4, 20)
    return r": 1 of 6 images cannot be read:\n  \S+, row 4 \(c1/3\.png\): .*checksum differs\); remove the folder"


def no_image(place):
    (place / "nir" / "a" / "0.png").write_bytes(b"no image")
    return r"index\.csv: 1 of 12 images cannot be read:\n  \S+nir/a/0\.png: "


def a_case_without_bytes(place):
    (place / "image" / "p01.nii.gz").write_bytes(b"")
    return r": 1 unusable case:\n  \S+image/p01\.nii\.gz: 0 bytes"


def two_damaged_cases(place):
    organ_volumes.put(place / "label" / "p03.nii.gz", organ_volumes.volume(3)[1][:-1])
    organ_volumes.put(place / "label" / "p00.nii.gz", organ_volumes.volume(0)[1][:-1])
    return r": 2 unusable cases:\n  \S+label/p00\.nii\.gz: .*\n  \S+label/p03\.nii\.gz: "


def mask(name, split="train"):
    """The classes that were drawn."""
    return scene_sets.scene(1000 * (split == "val") + int(name[1:]))[1].copy()


def put_mask(root, name, classes, split="train"):
    scene_sets.put(root / f"{split}annot/{name}.png", np.asarray(classes, np.uint8))


def values_outside(root):
    for name, values in (("p002", [9]), ("p003", [9, 200])):
        classes = mask(name)
        for place, value in enumerate(values):
            classes[10 + place, 5:8] = value
        put_mask(root, name, classes)
    first = r"2 masks that cannot be used:\n  \S+p002\.png: 1 value outside the classes \(3 of 768 pixels\): 9 \(3 px\)"
    return rf"(?s){first}.*\n  \S+p003\.png: .*200 \(3 px\); expected one of 0, 1, 2, 3"


def damaged_picture(root):
    file = root / "train/p005.png"
    file.write_bytes(file.read_bytes()[:300])
    (root / "train/p000.png").write_bytes(b"nothing")
    return r"\S+train/p000\.png: cannot be decoded"


def no_label(root):
    for name in ("p000", "p001", "p002"):
        put_mask(root, name, np.full(scene_sets.SIZE, 255), "val")
    return r"#val\)?: no labelled pixel"


DAMAGE = [
    ("images", a_changed_row), ("people", no_image), ("volumes", a_case_without_bytes), ("volumes", two_damaged_cases),
    ("scenes", values_outside), ("scenes", damaged_picture), ("scenes", no_label),
]  # fmt: skip


def problems(found: list[str]) -> list[str]:
    return [line for line in found if not line.startswith(WARNING)]


@pytest.mark.parametrize(("kind", "spoil"), DAMAGE, ids=lambda one: getattr(one, "__name__", one))
def test_damage_is_named_with_its_count(kind, spoil, tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "HASHED_AT_OPEN", 0)  # as for sets of gigabytes, whose rows are looked at one by one
    place = SETS[kind][0](tmp_path / "set")
    assert not problems(verify(kind, place))
    said = spoil(place)
    found = problems(verify(kind, place))
    if kind == "images":
        assert "rows.arrow: is not what was written" in found.pop(0)
    assert len(found) == 1 and re.search(said, found[0]), found
    names = ["--names", ",".join(NAMES)] if kind == "scenes" else []
    done = CliRunner().invoke(main.main, ["data", "verify", str(place), *names], catch_exceptions=False)
    assert done.exit_code == 2 and found[0].splitlines()[-1] in done.output
    if kind == "scenes":
        with pytest.raises(UserError):
            loader.load(recipe(place)).data.open(0)


@pytest.mark.parametrize("kind", SETS)
def test_what_is_not_there_is_a_sentence(kind, tmp_path):
    place, absent = SETS[kind][0](tmp_path / "set"), tmp_path / "nothing"
    function = kinds.function(kinds.at(place), "verify")
    assert function is not None and ["nothing: does not exist" in line for line in function(absent)] == [True]
    with pytest.raises(UserError, match="nothing: does not exist"):
        function(place, against=[absent])


@pytest.mark.parametrize("kind", ["images", "people"])
def test_progress_counts_items(kind, tmp_path):
    (make, items), seen = SETS[kind], []
    verify(kind, make(tmp_path / "set"), on_progress=lambda *done: seen.append(done))
    assert seen == [(n, items) for n in range(1, items + 1)]


SHARED = {
    "images": ["", "6 of its 6 groups", "", "6 of its 6 images"],
    "people": ["index.csv", "2 of its 2 people"],
    "scenes": ["#train", "6 of its 6 images", "#val", "3 of its 3 images"],
    "volumes": ["", "4 of its 4 patients", "", "4 of its 4 volumes"],
}
"""By kind: end of the name of a set, and what of it is also in an equal one."""


@pytest.mark.parametrize("kind", SHARED)
def test_what_two_sets_share_is_told(kind, tmp_path):
    place, other = (SETS[kind][0](tmp_path / name) for name in ("own", "other"))
    found = [line for line in verify(kind, place, against=[other]) if str(other) in line]
    parts, counts = SHARED[kind][::2], SHARED[kind][1::2]
    assert len(found) == len(counts)
    for line, part, count in zip(found, parts, counts, strict=True):
        assert re.match(rf"warning: \S*{place.name}\S*{part}: {count} are in \S*{other.name}\S*{part}: ", line), line
