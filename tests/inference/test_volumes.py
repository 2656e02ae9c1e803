"""Label maps written for new volumes: equal to what the run scored, on the grid of their files."""

from __future__ import annotations

import shutil

import nibabel
import nifti_sets
import numpy as np
import pytest
from click.testing import CliRunner
from pyarrow import parquet
from runs import PLUGIN, ROOT, TOY, run
from torch import nn

from trainkit.cli import main
from trainkit.errors import UserError
from trainkit.inference import predict, trained_model
from trainkit.tracking.store import Store

TOM500 = ROOT / "recipes" / "tom500.yaml"
WORDS = {
    "data.names": "[ball, box]",
    "data.patch": "[8, 16, 16]",
    "data.patches": "4",
    "task.net": "{name: unet, filters: [4, 8]}",
    "task.window": "{overlap: 0.25}",
    "optim.lr": "0.02",
    "train": "{length: 30 steps, batch_size: 4}",
    "evaluations": "{val: {}}",
    "checkpoints": "{every: null}",
    "log": "{every: 10 steps, system_every: null}",
}


class Small(nn.Module):
    """Two convolutions, so that MONAI, which takes 12 s to import, is not needed."""

    def __init__(self, classes: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv3d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv3d(6, classes, 3, padding=1))

    def forward(self, x):
        return self.layers(x)


@pytest.fixture(scope="module", autouse=True)
def _small_network():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainkit.models.segmentation_3d.build", lambda spec, meta, found: (Small(meta.classes), []))
        yield


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    root = tmp_path_factory.mktemp("sets")
    nifti_sets.write_set(root / "train", 3, seed=1)
    nifti_sets.write_set(root / "val", 2, seed=2)
    return root


def trained(sets, database, tmp_path_factory, **changes: str):
    """The home of a store with one run."""
    home = tmp_path_factory.mktemp("home")
    shutil.copy(database, home / "mlflow.db")
    settings = WORDS | {"data.train": f"{sets}/train", "data.evaluate": f"{{val: {sets}/val}}"} | changes
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINKIT_STORE", str(home))
        patch.setenv("TRAINKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        run(*(f"{key}={value}" for key, value in settings.items()), recipe=TOM500)
    return home


@pytest.fixture(scope="module")
def _trained(sets, database, tmp_path_factory):
    return trained(sets, database, tmp_path_factory)


@pytest.fixture
def name(_trained, monkeypatch):
    """The name of a run in the store of this test."""
    monkeypatch.setenv("TRAINKIT_STORE", str(_trained))
    return Store.locate().runs()[0].name


def ask(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(main.main, ["predict", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def own_rows(home) -> dict[str, dict[str, float]]:
    (file,) = home.rglob("rows/val_final.parquet")
    table = parquet.read_table(file).to_pylist()
    return {row["id"]: row for row in table}


def dice(one: np.ndarray, other: np.ndarray, label: int) -> float:
    a, b = one == label, other == label
    return 2 * (a & b).sum() / (a.sum() + b.sum())


def agrees(out, sets, home) -> None:
    for case, row in own_rows(home).items():
        written, truth = (np.asanyarray(nibabel.load(f"{f}/{case}.nii.gz").dataobj) for f in (out, sets / "val/label"))
        assert written.dtype == np.uint8 and written.shape == truth.shape
        for label, organ in enumerate(nifti_sets.NAMES, start=1):
            assert row[f"dice_{organ}"] == pytest.approx(dice(written, truth, label), abs=1e-6)
            assert row[f"dice_{organ}"] > 0.3, "nothing was learned: any label maps would agree"


def test_what_is_written_scores_as_the_run_did_and_lies_over_its_image(name, _trained, sets, tmp_path):
    said = ask(name, sets / "val", tmp_path / "out")
    assert "2 label maps of 0 background, 1 ball, 2 box" in said and "model.safetensors" in said
    agrees(tmp_path / "out", sets, _trained)
    for file in sorted((tmp_path / "out").iterdir()):
        image, written = nibabel.load(sets / "val" / "image" / file.name), nibabel.load(file)
        np.testing.assert_array_equal(written.affine, image.affine)
        assert written.header.get_xyzt_units()[0] == "mm"


def test_however_the_axes_of_a_file_run_the_same_places_get_the_same_labels(name, sets, tmp_path):
    source = nibabel.load(sorted((sets / "val" / "image").iterdir())[0])
    (tmp_path / "in").mkdir()
    turns = {
        "as_it_is": [[0, 1], [1, 1], [2, 1]],
        "flipped": [[0, -1], [1, 1], [2, -1]],
        "turned": [[2, 1], [0, -1], [1, 1]],
    }
    for word, turn in turns.items():
        turned = source.as_reoriented(np.array(turn))
        nibabel.save(nibabel.Nifti1Image(np.asarray(turned.dataobj), turned.affine), tmp_path / "in" / f"{word}.nii.gz")
    ask(name, tmp_path / "in", tmp_path / "out")
    maps = {word: nibabel.load(tmp_path / "out" / f"{word}.nii.gz") for word in turns}
    for word, written in maps.items():
        image = nibabel.load(tmp_path / "in" / f"{word}.nii.gz")
        assert written.shape == image.shape
        np.testing.assert_array_equal(written.affine, image.affine)
    assert maps["turned"].shape != maps["as_it_is"].shape
    one, *others = (np.asarray(nibabel.as_closest_canonical(written).dataobj) for written in maps.values())
    assert {1, 2} <= set(np.unique(one))
    for other in others:
        np.testing.assert_array_equal(other, one)


def test_damaged_files_are_named_and_the_others_written(name, sets, tmp_path):
    shutil.copytree(sets / "val" / "image", tmp_path / "in")
    first, second = sorted((tmp_path / "in").iterdir())
    content = first.read_bytes()
    (tmp_path / "in" / "cut.nii.gz").write_bytes(content[: len(content) // 2])
    (tmp_path / "in" / "other.nii.gz").write_bytes(b"not a volume" * 50)
    nan = nibabel.load(second)
    values = np.asarray(nan.dataobj).copy()
    values[3, 4, 5] = np.nan
    nibabel.save(nibabel.Nifti1Image(values, nan.affine), tmp_path / "in" / "nan.nii.gz")
    said = ask(name, tmp_path / "in", tmp_path / "out", code=2)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {first.name, second.name}
    assert "2 label maps" in said and said.count("left out: ") == 3
    for bad in ("cut.nii.gz", "other.nii.gz", "nan.nii.gz"):
        assert f"left out: {tmp_path}/in/{bad}: " in said


def test_nothing_is_written_over_and_that_is_known_before_any_work(name, sets, tmp_path, monkeypatch):
    image = sorted((sets / "val" / "image").iterdir())[1]
    out = tmp_path / "out"
    out.mkdir()
    (out / image.name).write_text("kept")
    monkeypatch.setattr("trainkit.data.volumes.reader.read_image", None)
    with pytest.raises(UserError, match=rf"{image.name}: exists already; name another folder"):
        predict.predict(name, sets / "val", out)
    with pytest.raises(UserError, match="exists already and 1 more"):
        predict.predict(name, sets / "val" / "image", sets / "val" / "image")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: is a file; expected a folder"):
        predict.predict(name, sets / "val", tmp_path / "file")
    assert (out / image.name).read_text() == "kept" and len(list(out.iterdir())) == 1


def test_mirrors_are_averaged(name, sets, tmp_path):
    one = sorted((sets / "val" / "image").iterdir())[0]
    plain = predict.predict(name, one, tmp_path / "plain").written
    mirrored = predict.predict(name, one, tmp_path / "mirrored", mirror=True).written
    a, b = (np.asarray(nibabel.load(written[0]).dataobj) for written in (plain, mirrored))
    assert 0.5 < (a == b).mean() < 1


def test_volumes_of_another_spacing_than_the_training_are_said(name, sets, tmp_path):
    image = nibabel.load(sorted((sets / "val" / "image").iterdir())[0])
    affine = image.affine @ np.diag([1, 1, 0.4, 1])
    nibabel.save(nibabel.Nifti1Image(np.asarray(image.dataobj), affine), tmp_path / "thin.nii.gz")
    done = predict.predict(name, tmp_path / "thin.nii.gz", tmp_path / "out")
    assert done.notes == ("thin has a voxel spacing of 1.2 x 1 x 1 mm; the network was trained with 3 x 1 x 1 mm",)
    assert predict.predict(name, sets / "val", tmp_path / "same").notes == ()


def test_runs_that_write_no_label_maps_are_refused(sets, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(PLUGIN)
    other = Store.locate().new_run("toy", 0, "ab" * 32)
    shutil.copy(TOY, other.recipe)
    (other.path / "meta.json").write_text('{"classes": 4, "shape": [3, 8, 8], "digest": "train-64-1.0"}')
    with pytest.raises(UserError, match=f"run {other.name}: its task or data has no predictions"):
        predict.predict(other.name, sets / "val", tmp_path / "out", plugins=("toy",))
    (other.path / "meta.json").unlink()
    with pytest.raises(UserError, match=r"meta\.json: does not exist"):
        predict.predict(other.name, sets / "val", tmp_path / "out", plugins=("toy",))
    (other.path / "meta.json").write_text("[1]")
    with pytest.raises(UserError, match=r"meta\.json: cannot be read"):
        predict.predict(other.name, sets / "val", tmp_path / "out", plugins=("toy",))
    assert not (tmp_path / "out").exists()


def test_a_run_neither_learns_nor_scores_voxels_that_nobody_labelled(database, tmp_path_factory, monkeypatch):
    root = tmp_path_factory.mktemp("nnunet")
    for number in range(4):
        image, label = nifti_sets.draw(np.random.default_rng(number), (28, 26, 10))
        label[12:18] = 9
        affine = np.diag([*nifti_sets.SPACING, 1.0])
        for part, name, array in (("imagesTr", f"c{number}_0000", image), ("labelsTr", f"c{number}", label)):
            (root / part).mkdir(exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(array, affine), root / part / f"{name}.nii.gz")
    (root / "dataset.json").write_text('{"labels": {"background": 0, "ball": 1, "box": 2, "ignore": 9}}')
    augment = "{rotate: {p: 0.5, in_plane: 30}, scale: {p: 0.5}, flips: [left_right]}"
    settings = {"data.names": "null", "data.evaluate": "{val: held_out}", "data.fold": "0", "data.folds": "2"}
    settings |= {
        "data.spacing": "[3, 1.5, 1.5]",
        "data.augment": augment,
        "evaluations": "{val: {split: val.mirrored}}",
    }
    home = trained(root, database, tmp_path_factory, **settings, **{"data.train": str(root)})
    monkeypatch.setenv("TRAINKIT_STORE", str(home))
    (done,) = Store.locate().runs()
    assert trained_model.read_meta(done).class_names == ("background", "ball", "box")
    out = tmp_path_factory.mktemp("out")
    ask(done.name, root, out, "--mirror")
    rows = own_rows(home)
    assert len(rows) == 2
    for case, row in rows.items():
        read = (
            np.asanyarray(nibabel.load(file).dataobj)
            for file in (out / f"{case}.nii.gz", root / f"labelsTr/{case}.nii.gz")
        )
        written, truth = read
        assert written.max() <= 2 and written[truth == 9].any(), "nothing is predicted where nobody labelled"
        for label, organ in enumerate(nifti_sets.NAMES, start=1):
            assert row[f"dice_{organ}"] == pytest.approx(dice(written * (truth != 9), truth, label), abs=1e-6)
            assert row[f"volume_prediction_mm3_{organ}"] == 3 * ((written == label) & (truth != 9)).sum()
    assert not [
        file for file in home.rglob("*") if file.is_file() and file.suffix == ".csv" and "ignore" in file.read_text()
    ]


@pytest.mark.slow
def test_volumes_are_resampled_as_those_of_the_training_were(sets, database, tmp_path_factory, monkeypatch):
    home = trained(sets, database, tmp_path_factory, **{"data.spacing": "[2.5, 1.5, 1.5]"})
    monkeypatch.setenv("TRAINKIT_STORE", str(home))
    out = tmp_path_factory.mktemp("out")
    meta = trained_model.read_meta(Store.locate().runs()[0])
    assert meta.resampled == (2.5, 1.5, 1.5) and meta.spacing != meta.resampled
    ask(Store.locate().runs()[0].name, sets / "val", out)
    agrees(out, sets, home)
