"""A file that another one took the place of, of the same name, size and time of change, is not taken for the first."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nifti_sets
import numpy as np
import people_sets
import pytest
import scene_sets
from PIL import Image
from runs import environment, run, stop_after

from trainkit.data.faces.dataset import Faces
from trainkit.data.images.dataset import Images
from trainkit.data.people.dataset import People
from trainkit.data.people.pk_sampler import PK
from trainkit.data.scenes.dataset import Scenes
from trainkit.data.volumes.dataset import Volumes
from trainkit.errors import UserError

pytestmark = pytest.mark.usefixtures("unsent")


def swapped(file: Path, change: Callable[[Path, Path], object]) -> None:
    """Lay another file in the place of this one, which only the time of its entry tells."""
    was, aside = file.stat(), file.with_name(f".{file.name}")
    change(file, aside)
    if aside.stat().st_size != was.st_size:
        pytest.fail(f"{file.name}: {aside.stat().st_size} bytes in place of {was.st_size}")
    os.replace(aside, file)
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    now = file.stat()
    assert (now.st_size, now.st_mtime_ns) == (was.st_size, was.st_mtime_ns)


def bitmap(file: Path, aside: Path) -> None:
    pixels = np.array(Image.open(file))
    Image.fromarray(pixels[::-1].copy() ^ np.uint8(4)).save(aside, file.suffix[1:].upper())


def volume(file: Path, aside: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    aside.write_bytes(data)


def pictures(root: Path, size: tuple[int, int] = (16, 16), seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    for name in ("anna", "ben", "cleo"):
        (root / name).mkdir(parents=True)
        for k in range(4):
            Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(root / name / f"{k}.bmp")
    return root


def _images(root: Path) -> tuple[Any, Path]:
    pictures(root)
    return Images(train=str(root), image_size=16), root / "ben" / "1.bmp"


def _faces(root: Path) -> tuple[Any, Path]:
    pictures(root)
    return Faces(train=str(root), image_size=16), root / "ben" / "1.bmp"


def _scenes(root: Path) -> tuple[Any, Path]:
    rng = np.random.default_rng(0)
    rows = []
    for k in range(3):
        for part, shape in (("image", (16, 24, 3)), ("mask", (16, 24))):
            (root / part).mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 3, shape, dtype=np.uint8)).save(root / part / f"{k}.bmp")
        rows.append((f"image/{k}.bmp", f"mask/{k}.bmp"))
    scene_sets.write_list(root / "train.csv", rows)
    return Scenes(train=str(root / "train.csv"), names=["a", "b", "c"], crop=(16, 16)), root / "image" / "1.bmp"


def _masks(root: Path) -> tuple[Any, Path]:
    return _scenes(root)[0], root / "mask" / "1.bmp"


def _volumes(root: Path) -> tuple[Any, Path]:
    nifti_sets.write_set(root, 3, shape=(20, 18, 8))
    import gzip

    for file in list(root.rglob("*.nii.gz")):
        file.with_suffix("").write_bytes(gzip.decompress(file.read_bytes()))
        file.unlink()
    data = Volumes(train=str(root), names=nifti_sets.NAMES, patch=(8, 16, 16))
    return data, min(root.rglob("image/*.nii"))


def _people(root: Path) -> tuple[Any, Path]:
    file = people_sets.index(root)
    for one in list(root.rglob("*")):
        if one.suffix in (".jpg", ".png"):
            Image.open(one).convert("RGB").save(one, "BMP")
    return People(train=str(file), sampler=PK(people=2, each=2)), next(
        one for one in sorted(root.rglob("*")) if one.suffix in (".jpg", ".png")
    )


KINDS = {
    "images": (_images, bitmap),
    "faces": (_faces, bitmap),
    "scenes": (_scenes, bitmap),
    "masks": (_masks, lambda file, aside: Image.fromarray(2 - np.array(Image.open(file))).save(aside, "BMP")),
    "volumes": (_volumes, volume),
    "people": (
        _people,
        lambda file, aside: Image.fromarray(np.array(Image.open(file)) ^ np.uint8(4)).save(aside, "BMP"),
    ),
}


def digest(data: Any) -> str:
    return data.open(0).meta.digest


def test_another_file_in_the_place_of_one_gives_another_digest(tmp_path, cache):
    for kind in KINDS:
        make, change = KINDS[kind]
        data, file = make(tmp_path / kind)
        before = digest(data)
        assert digest(data) == before
        swapped(file, change)
        assert digest(data) != before


RECIPE = """
name: tiny
task: {name: classify, net: {model: resnet10t}}
data: {name: images, train: people, image_size: 32, evaluate: {val: others}}
optim: {lr: 0.01}
train: {length: 2 epochs, batch_size: 4}
evaluations: {val: {every: 1 epoch}}
checkpoints: {every: 1 steps}
log: {every: 1 steps, system_every: null}
device: {channels_last: false}
"""


def test_a_run_is_not_resumed_on_other_sets_to_train_on_or_to_be_scored_on(tmp_path, store, monkeypatch):
    home = tmp_path / "data"
    pictures(home / "people", (32, 32))
    pictures(home / "others", (32, 32), 1)
    (home / "tiny.yaml").write_text(RECIPE)
    with environment(TRAINKIT_DATA=home, TRAINKIT_CACHE=tmp_path / "cache"):
        first = run(recipe=home / "tiny.yaml", stopping=stop_after(3))
        assert first.code == 143
        for name in ("people", "others"):
            file = home / name / "ben" / "1.bmp"
            shutil.copy2(file, tmp_path / "was.bmp")
            swapped(file, bitmap)
            with pytest.raises(UserError, match=r"the data has changed since; start a new run") as caught:
                run(recipe=home / "tiny.yaml", resume="")
            assert name == "people" or re.search("evaluated on other data as val", str(caught.value))
            shutil.copy2(tmp_path / "was.bmp", file)
        again = run(recipe=home / "tiny.yaml", resume="")
        assert again.folder == first.folder and again.code == 0 and again.last.step == 6
