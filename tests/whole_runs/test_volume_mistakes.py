"""Volumes as users have them: whatever is wrong is one message that names the file, before anything is trained."""

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
from runs import ROOT, run, stop_after

from tests.whole_runs.test_segmentation_3d import TOM500, words
from trainkit.data.volumes.dataset import Volumes
from trainkit.errors import EXIT_CODE, UserError
from trainkit.tracking.store import Store

HEADER = 352
"""Bytes before the voxels of a NIfTI-1 file."""


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


def rewritten(file: Path, change: Callable[[bytearray], object]) -> None:
    """Change the bytes of a compressed file, and compress them again: its checksums are right."""
    data = bytearray(gzip.decompress(file.read_bytes()))
    change(data)
    file.write_bytes(gzip.compress(bytes(data), 1))


def saved(file: Path, change: Callable[[np.ndarray], np.ndarray], affine: np.ndarray | None = None, dtype=None) -> None:
    """Write a volume anew with other voxels."""
    volume = nibabel.load(file)
    array = change(np.asanyarray(volume.dataobj).copy())
    nibabel.save(
        nibabel.Nifti1Image(array.astype(dtype or array.dtype), volume.affine if affine is None else affine), file
    )


def put(value: float, at: tuple[int, ...] = (3, 4, 5)) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.astype(np.result_type(array, np.float32)) if value % 1 else array
        array[at] = value
        return array

    return change


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


def shorts(place: int, *values: int) -> Callable[[bytearray], object]:
    return lambda data: data.__setitem__(slice(place, place + 2 * len(values)), np.array(values, "<i2").tobytes())


def no_spacing(data: bytearray) -> None:
    data[280:328] = bytes(48)  # srow_x, srow_y, srow_z


MOVED = np.array([[-1, 0, 0, 24.0], [0, 0, 3, -12], [0, 1, 0, 7.5], [0, 0, 0, 1]])
IMAGE, LABEL = "image/101.nii.gz", "label/101.nii.gz"

DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "truncated": (IMAGE, lambda f: f.write_bytes(f.read_bytes()[: f.stat().st_size // 2]), "truncated"),
    "bit flipped": (IMAGE, flip, "damaged"),
    "bit flipped in a label map": (LABEL, flip, "damaged|truncated|more data"),
    "NaN": (IMAGE, lambda f: saved(f, put(np.nan)), r"nan in 1 of \d+ voxels, the first at \(3, 4, 5\)"),
    "no spacing": (IMAGE, lambda f: rewritten(f, no_spacing), "spacing 0 x 0 x 0 mm"),
    "label map elsewhere": (LABEL, lambda f: saved(f, lambda a: a, MOVED), "a corner 4 mm apart"),
    "two channels": (IMAGE, lambda f: saved(f, lambda a: np.stack([a, a], -1)), "2 channels; expected 1, as in most"),
    "another shape": (LABEL, lambda f: saved(f, lambda a: a[:-1]), "voxels"),
    "label out of range": (LABEL, lambda f: saved(f, put(7)), "labels 7 in 1 of"),
    "half a label": (LABEL, lambda f: saved(f, put(1.5)), "labels 1.5 in 1 of"),
    "256 GiB": (IMAGE, lambda f: rewritten(f, shorts(40, 3, 4096, 4096, 4096)), "claims 4096 x 4096 x 4096"),
    "256 GiB in a label map": (LABEL, lambda f: rewritten(f, shorts(40, 3, 4096, 4096, 4096)), "claims 4096"),
    "no NIfTI": (IMAGE, lambda f: f.write_bytes(b"no volume\n" * 100), "not a NIfTI file"),
    "empty": (IMAGE, lambda f: f.write_bytes(b""), "0 bytes"),
}


def refused(bodies: Path, *more: str) -> str:
    """What is said; and that no run is left that could be continued."""
    with pytest.raises(UserError) as caught:
        run(*words(bodies, **dict(word.format(b=bodies).split("=", 1) for word in more)), recipe=TOM500)
    assert Store.locate().runs() == []
    return str(caught.value)


@pytest.mark.parametrize(
    ("part", "name"),
    [*(("train", name) for name in DAMAGE), ("val", "NaN"), ("val", "half a label"), ("val", "256 GiB")],
)
def test_damage_is_named_by_file(bodies, part, name):
    which, change, message = DAMAGE[name]
    file = bodies / part / which.replace("101", "101" if part == "train" else "201")
    change(file)
    said = refused(bodies)
    assert str(file) in said and re.search(message, said)
    assert not Store.locate().runs(), "found before the run had a folder"


def copy(bodies: Path, file: str, to: str) -> None:
    for part in ("image", "label"):
        shutil.copy(bodies / file.format(part), bodies / to.format(part))


def axial(bodies: Path) -> None:
    for file in (bodies / "val").rglob("*.nii.gz"):
        saved(file, lambda a: a, np.diag([1.0, 1.0, 3.0, 1.0]))


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def renamed(bodies: Path) -> None:
    for file in (bodies / "train" / "label").iterdir():
        file.rename(file.with_name(f"other{file.name}"))


MISTAKES: dict[str, tuple[Callable[[Path], object] | None, tuple[str, ...], str]] = {
    "patient in both": (lambda b: copy(b, "train/{}/102.nii.gz", "val/{}/102.nii.gz"), (), "102"),
    "volume in both": (lambda b: copy(b, "train/{}/102.nii.gz", "val/{}/299.nii.gz"), (), "102.*299|299.*102"),
    "visits of one patient": (None, ("data.patient=^(.)", "data.fold=0", "data.folds=2"), "2 folds of 1 patients"),
    "empty folder": (lambda b: emptied(b / "train"), (), "train: no volumes in a layout that is known; expected"),
    "no images": (lambda b: emptied(b / "train" / "image"), (), "train: no labelled volumes"),
    "no folder of labels": (
        lambda b: shutil.rmtree(b / "train" / "label"),
        (),
        "train: no volumes .*in the folders image;",
    ),
    "labels called otherwise": (renamed, (), "train: no labelled volumes"),
    "no folder": (None, ("data.train={b}/tran",), "tran.*does not exist"),
    "no set": (None, ("data.evaluate={{val: {b}/vall}}",), "vall.*does not exist"),
    "the folder of both": (None, ("data.train={b}",), "train, val"),
    "no such part": (None, ("data.train={b}#test",), "#test: no such split; available: train, val"),
    "a single file": (None, ("data.train={b}/train/image/101.nii.gz",), "a single volume, without a label map"),
    "labels that nothing names": (None, ("data.names=[ball]",), "labels 2 in"),
    "a name twice": (None, ("data.names=[ball, Ball]",), r"data.*names must be different names"),
    "patch that cannot be divided": (
        None,
        ("data.patch=[8, 17, 16]",),
        r"8x17x16 voxels.*use \[8, 16, 16\]",
    ),
    "patch too small": (None, ("data.patch=[2, 4, 4]",), "enough for 1 level of unet"),
    "patch of two": (None, ("data.patch=[16, 16]",), r"data\.patch"),
    "patch of billions": (None, ("data.patch=[4096, 4096, 4096]",), r"data.*patch is \[4096, 4096, 4096\]"),
    "folds without patients": (None, ("data.fold=0", "data.folds=10"), "10 folds of 4 patients"),
    "no such fold": (None, ("data.fold=5",), "fold is 5 of 5"),
    "patient's name not found": (None, ("data.patient=^sub-(.+)",), "image/100.nii.gz: '100' names no patient"),
    "table": (None, ("data.clinical={b}/patients.csv",), r"data\.clinical.*per_case_last\.csv"),
    "network": (None, ("task.net.name=unet3d",), "unet3d"),
    "split": (None, ("evaluations={{val: {{split: val.all}}}}",), "val.all"),
    "metric": (None, ("best={{metric: test/dice_mean}}",), "test/dice_mean"),
    "augment": (None, ("data.augment={{swap: [[ball, bowl]], flips: [left_right]}}",), "bowl"),
    "tolerance": (None, ("task.tolerance={{bowl: 1}}",), "bowl"),
    "sample": (None, ("data.train=sample:orbit",), "orbit"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_sets_and_settings_that_do_not_fit_are_one_message(bodies, name):
    change, more, message = MISTAKES[name]
    if change:
        change(bodies)
    assert re.search(message, refused(bodies, *more), re.DOTALL)


def test_a_set_of_other_slices_is_said_before_it_is_scored(bodies):
    """Voxels of another scanner are no mistake; that scores are low for them should be no surprise."""
    axial(bodies)
    opened = volumes(bodies).open(0)
    said = "data.evaluate.val: voxels of 1x3x1 mm in the median, of data.train 3x1x1 mm"
    assert said in opened.notes and opened.meta.axes == "yzx"
    other = volumes(bodies, evaluate={"train2": f"{bodies}/train"}, leakage="allow").open(0)
    assert not any("in the median" in note for note in other.notes)


def volumes(bodies: Path, **changes) -> Volumes:
    settings = {"train": f"{bodies}/train", "evaluate": {"val": f"{bodies}/val"}, "names": nifti_sets.NAMES}
    return Volumes(**settings | {"patch": (8, 16, 16)} | changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["truncated", "256 GiB", "256 GiB in a label map", "half a label", "NaN"])
def test_a_user_sees_one_message_and_exit_code_2_at_little_memory(bodies, name):
    which, change, message = DAMAGE[name]
    change(bodies / "train" / which)
    code, said, gigabytes = spawned(str(TOM500), *words(bodies))
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert code == EXIT_CODE and len(lines) == 1 and str(bodies / "train" / which) in said and re.search(message, said)
    assert "Traceback" not in said and not Store.locate().runs()
    assert gigabytes < 1.3, "of which PyTorch and MLflow are 0.93"


@pytest.mark.slow
def test_the_patient_in_both_sets_and_the_empty_folder_end_a_command_too(bodies):
    copy(bodies, "train/{}/102.nii.gz", "val/{}/102.nii.gz")
    code, said, _ = spawned(str(TOM500), *words(bodies))
    assert code == EXIT_CODE and said.count("error: ") == 1 and "Traceback" not in said and "data.train: 102" in said
    emptied(bodies / "train")
    code, said, _ = spawned(str(TOM500), *words(bodies))
    assert code == EXIT_CODE and f"error: {bodies}/train: no volumes" in said and "Traceback" not in said


BETWEEN = "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]); \
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
"""What starts a run and says its peak: a process counts what its parent held when it was started as its own."""


def spawned(*words: str) -> tuple[int, str, float]:
    """Exit code, all that was said, and GB at the peak, of a run in a process of its own."""
    command = [sys.executable, "-c", BETWEEN, sys.executable, str(ROOT / "trainkit" / "run.py"), *words]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
    )
    said, _, peak = done.stdout.rstrip().rpartition("\n")
    return done.returncode, said, int(peak) / 2**20


@pytest.mark.slow
def test_volumes_that_changed_since_are_not_trained_on_further(bodies):
    settings = words(bodies, evaluations="{}", best="null")
    first = run(*settings, recipe=TOM500, stopping=stop_after(4))
    file = bodies / "train" / IMAGE
    was = file.read_bytes()
    saved(file, put(-100))
    with pytest.raises(UserError, match="the data has changed since; start a new run"):
        run(*settings, recipe=TOM500, resume="")
    file.write_bytes(was)
    again = run(*settings, recipe=TOM500, resume="")
    assert again.folder == first.folder and again.code == 0 and again.last.step == 12
