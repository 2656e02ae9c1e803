"""Volumes as users have them: whatever is wrong is one message that names the file, before anything is trained.

What can be wrong with a file, a layout or a setting is in tests/data/volumes and tests/data/formats.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nibabel
import nifti_sets
import numpy as np
import pytest
from runs import ROOT, run

from tests.whole_runs.test_segmentation_3d import TOM500, words
from trainkit.data.volumes.dataset import Volumes
from trainkit.errors import EXIT_CODE, UserError
from trainkit.tracking.store import Store


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """Four patients to train on and two to be scored, nothing wrong with any."""
    root = tmp_path_factory.mktemp("sound")
    nifti_sets.write_set(root / "train", 4, seed=1, shape=(20, 18, 8))
    nifti_sets.write_set(root / "val", 2, seed=2, shape=(20, 18, 8))
    return root


@pytest.fixture
def bodies(sound, tmp_path, monkeypatch, store) -> Path:
    """A copy of them, to be damaged."""
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    return shutil.copytree(sound, tmp_path / "bodies")


def saved(file: Path, change: Callable[[np.ndarray], np.ndarray], affine: np.ndarray | None = None) -> None:
    """Write a volume anew with other voxels."""
    volume = nibabel.load(file)
    array = change(np.asanyarray(volume.dataobj).copy())
    nibabel.save(nibabel.Nifti1Image(array, volume.affine if affine is None else affine), file)


def not_a_number(array: np.ndarray) -> np.ndarray:
    array[3, 4, 5] = np.nan
    return array


def claims_256_gib(file: Path) -> None:
    """Change the sizes in the header; the checksums of the compressed file are right."""
    data = bytearray(gzip.decompress(file.read_bytes()))
    data[40:48] = np.array([3, 4096, 4096, 4096], "<i2").tobytes()
    file.write_bytes(gzip.compress(bytes(data), 1))


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "truncated": (
        "train/image/101.nii.gz",
        lambda f: f.write_bytes(f.read_bytes()[: f.stat().st_size // 2]),
        "truncated",
    ),
    "NaN": ("val/image/201.nii.gz", lambda f: saved(f, not_a_number), r"nan in 1 of \d+ voxels, .* \(3, 4, 5\)"),
    "256 GiB": ("train/label/101.nii.gz", claims_256_gib, "claims 4096"),
}


def refused(bodies: Path, *more: str) -> str:
    """What is said; and that no run is left that could be continued."""
    with pytest.raises(UserError) as caught:
        run(*words(bodies, **dict(word.format(b=bodies).split("=", 1) for word in more)), recipe=TOM500)
    assert Store.locate().runs() == []
    return str(caught.value)


@pytest.mark.parametrize("name", ["truncated", "NaN"])
def test_damage_is_named_by_file(bodies, name):
    which, change, message = DAMAGE[name]
    change(bodies / which)
    said = refused(bodies)
    assert str(bodies / which) in said and re.search(message, said)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train={b}/train/image/101.nii.gz", "a single volume, without a label map"),
        ("data.clinical={b}/patients.csv", r"data\.clinical.*per_case_last\.csv"),
        ("evaluations={{val: {{split: val.all}}}}", "val.all"),
        ("task.tolerance={{bowl: 1}}", "bowl"),
    ],
)
def test_sets_and_settings_that_do_not_fit_are_one_message(bodies, override, message):
    assert re.search(message, refused(bodies, override), re.DOTALL)


def test_a_set_of_other_slices_is_said_before_it_is_scored(bodies):
    """Voxels of another scanner are no mistake; that scores are low for them should be no surprise."""
    for file in (bodies / "val").rglob("*.nii.gz"):
        saved(file, lambda array: array, np.diag([1.0, 1.0, 3.0, 1.0]))
    opened = volumes(bodies).open(0)
    said = "data.evaluate.val: voxels of 1x3x1 mm in the median, of data.train 3x1x1 mm"
    assert said in opened.notes and opened.meta.axes == "yzx"
    other = volumes(bodies, evaluate={"train2": f"{bodies}/train"}, leakage="allow").open(0)
    assert not any("in the median" in note for note in other.notes)


def volumes(bodies: Path, **changes) -> Volumes:
    settings = {"train": f"{bodies}/train", "evaluate": {"val": f"{bodies}/val"}, "names": nifti_sets.NAMES}
    return Volumes(**settings | {"patch": (8, 16, 16)} | changes)


BETWEEN = "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]); \
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
"""What starts a run and says its peak: a process counts what its parent held when it was started as its own."""


@pytest.mark.slow
def test_a_user_sees_one_message_and_exit_code_2_at_little_memory(bodies):
    which, change, message = DAMAGE["256 GiB"]
    change(bodies / which)
    command = [sys.executable, "-c", BETWEEN, sys.executable, str(ROOT / "trainkit" / "run.py"), str(TOM500)]
    done = subprocess.run(
        [*command, *words(bodies)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
    )
    said, _, peak = done.stdout.rstrip().rpartition("\n")
    assert done.returncode == EXIT_CODE and str(bodies / which) in said and re.search(message, said)
    assert said.count("\nerror: ") == 1 and "Traceback" not in said and not Store.locate().runs()
    assert int(peak) / 2**20 < 1.3, "GB, of which PyTorch and MLflow are 0.93"
