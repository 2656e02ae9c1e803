"""Predictions of samples in memory: those that `trainkit predict` writes, bit for bit."""

from __future__ import annotations

import base64

import nibabel
import nifti_sets
import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet
from runs import ROOT
from untrained_runs import made

from trainkit.errors import UserError
from trainkit.inference import predict
from trainkit.inference.predictor import Predictor

pytestmark = pytest.mark.usefixtures("cache")


def classes(pictures, *words: str):
    given = (f"data.train={pictures}/train", f"data.evaluate={{val: {pictures}/val}}", "train.batch_size=4")
    net = "task.net={model: test_convnext3, args: {patch_size: 2, ls_init_value: 0.5}}"
    return made(ROOT / "recipes" / "convnext.yaml", *given, net, *words)


def test_pictures_in_memory_have_the_predictions_of_the_command(pictures, tmp_path):
    run = classes(pictures)
    predict.predict(run.name, pictures / "val", tmp_path / "out.parquet")
    table = parquet.read_table(tmp_path / "out.parquet").to_pydict()
    model = Predictor.of_run(run.folder)
    files = [pictures / "val" / id for id in table["id"]]
    for form in (
        lambda file: file.read_bytes(),
        lambda file: base64.encodebytes(file.read_bytes()).decode(),
        lambda file: np.asarray(Image.open(file)),
        lambda file: np.asarray(Image.open(file)).tolist(),
    ):
        found = model.predict([form(file) for file in files])
        assert list(found) == ["class", "probability", "probabilities", "embedding"]
        assert found["class"] == table["class"] and len(set(table["probability"])) == 21
        for name in ("probability", "probabilities", "embedding"):
            assert np.array_equal(found[name], np.array(table[name], np.float32)), name
    assert model.classes == ("across", "down", "slanted")


def test_volumes_in_memory_have_the_label_maps_of_the_command(tmp_path):
    """By path, as bytes, and as an array with its spacing, whose axes are those of the file here."""
    nifti_sets.write_set(tmp_path / "train", 2, seed=1)
    affine = np.diag([1.0, 1.0, 3.0, 1.0])
    nifti_sets.write_set(tmp_path / "val", 2, seed=2)
    for part in ("train/image", "train/label", "val/image", "val/label"):
        for file in (tmp_path / part).iterdir():
            nibabel.save(nibabel.Nifti1Image(np.asanyarray(nibabel.load(file).dataobj), affine), file)
    words = (
        f"data.train={tmp_path}/train", f"data.evaluate={{val: {tmp_path}/val}}", "data.names=[ball, box]",
        "data.patch=[8, 16, 16]", "data.patches=4", "task.net={name: unet, filters: [4, 8]}", "best=null",
        "evaluations={val: {}}", "train={length: 30 steps, batch_size: 4}",
    )  # fmt: skip
    run = made(ROOT / "recipes" / "tom500.yaml", *words)
    source = tmp_path / "val" / "image"
    predict.predict(run.name, source, tmp_path / "out")
    files = sorted(source.iterdir())
    expected = [np.asanyarray(nibabel.load(tmp_path / "out" / file.name).dataobj) for file in files]
    assert len(np.unique(expected[0])) > 1
    model = Predictor.of_run(run.folder)
    arrays = [np.asanyarray(nibabel.load(file).dataobj) for file in files]
    for form in (files, [file.read_bytes() for file in files], [(array, (1.0, 1.0, 3.0)) for array in arrays]):
        found = model.predict(form)["label_map"]
        assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
    other = model.predict([(arrays[0], (1.0, 1.0, 9.0))])["label_map"][0]
    assert other.shape == expected[0].shape
    for sample, said in (
        (arrays[0], "sample 0: a ndarray; expected a NIfTI file as path or bytes"),
        ((arrays[0], (1.0, 0.0, 3.0)), r"sample 0: spacing \(1.0, 0.0, 3.0\); expected three numbers above 0, in mm"),
        ((arrays[0][0], (1, 1, 1)), "sample 0: an array float32 of shape"),
        (b"no volume", "sample 0: "),
        (np.full((4, 4, 4), np.nan), "sample 0: a ndarray"),
        ((np.full((4, 4, 4), np.nan), (1, 1, 1)), "sample 0: .*finite intensities"),
        (str(tmp_path / "gone.nii"), "gone.nii: cannot be read"),
    ):
        with pytest.raises(UserError, match=said):
            model.predict([sample])
