"""Volumes of two channels from a folder to label maps and an exported network, as nnU-Net lays them out.

The volumes are real (hippocampus, MRI); their second channel is the magnitude of the gradient of the first.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import nibabel
import numpy as np
import pandas as pd
import pytest
import torch
from click_commands import ask
from runs import run

from trainkit.errors import UserError
from trainkit.export import export
from trainkit.inference import mlflow_model
from trainkit.inference.predictor import Predictor

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("store")]
CASES, HELD_OUT = 8, 2


def two_channels(source: Path, target: Path, folder: str, number: int) -> None:
    """Write an image and the magnitude of its gradient as channels 0000 and 0001."""
    image = nibabel.load(source)
    values = np.asarray(image.dataobj, np.float32)
    edges = np.sqrt(sum(np.square(part) for part in np.gradient(values))).astype(np.float32)
    (target / folder).mkdir(parents=True, exist_ok=True)
    for channel, array in enumerate((values, edges)):
        nibabel.save(nibabel.Nifti1Image(array, image.affine), target / folder / f"h{number}_{channel:04}.nii.gz")


@pytest.fixture
def hippocampus(shared, tmp_path, monkeypatch, cache):
    real, root = shared / "mri_hippocampus", tmp_path / "heads"
    files = sorted((real / "imagesTr").glob("*.nii.gz"))[: CASES + HELD_OUT]
    for number, file in enumerate(files):
        two_channels(file, root, "imagesTr" if number < CASES else "imagesTs", number)
        if number < CASES:
            label = nibabel.load(real / "labelsTr" / file.name)
            (root / "labelsTr").mkdir(exist_ok=True)
            # As floats, as many programs write them.
            array = np.asarray(label.dataobj).astype(np.float32)
            nibabel.save(nibabel.Nifti1Image(array, label.affine), root / "labelsTr" / f"h{number}.nii.gz")
    said = {"labels": {"background": 0, "Anterior": 1, "Posterior": 2}, "channel_names": {"0": "MRI", "1": "edges"}}
    (root / "dataset.json").write_text(json.dumps(said))
    monkeypatch.chdir(tmp_path)
    return root


def test_two_channels_go_from_a_folder_to_an_exported_network(hippocampus, tmp_path):
    said = ask("cp", "hippocampus", "mine.yaml", "--data", hippocampus)
    assert "channels MRI, edges" in said and "labels Anterior, Posterior" in said
    evaluations = "{val: {at_end: true}, images: {split: val.overlays, at_end: true}}"
    words = ["train.length=60 steps", f"evaluations={evaluations}", "train.schedule={name: constant}", "best=null"]
    ran = run(*words, recipe=Path("mine.yaml"))
    assert ran.code == 0 and np.isfinite(ran.series("val/dice_mean")).all()
    assert ran.series("train/loss")[-1] < ran.series("train/loss")[0]
    assert any("overlays" in path.name for path in ran.folder.path.parents[1].rglob("images/*"))

    ask("predict", ran.folder.name, hippocampus / "imagesTs", "labels")
    written = sorted(Path("labels").glob("*.nii.gz"))
    assert [file.name for file in written] == [f"h{CASES + number}.nii.gz" for number in range(HELD_OUT)]
    image = nibabel.load(hippocampus / "imagesTs" / f"h{CASES}_0000.nii.gz")
    label = np.asarray(nibabel.load(written[0]).dataobj)
    assert label.shape == image.shape and set(np.unique(label)) <= {0, 1, 2}
    (hippocampus / "imagesTs" / f"h{CASES}_0001.nii.gz").unlink()
    said = ask("predict", ran.folder.name, hippocampus / "imagesTs", "again", code=2)
    assert (
        f"h{CASES}_0000.nii.gz: 1 channel; expected 2" in said
        and len(list(Path("again").glob("*.nii.gz"))) == HELD_OUT - 1
    )

    predictor = Predictor.of_run(ran.folder)
    both = [nibabel.load(hippocampus / "imagesTr" / f"h0_{channel:04}.nii.gz") for channel in range(2)]
    array = np.stack([np.asarray(one.dataobj, np.float32) for one in both], axis=3)
    (found,) = predictor.predict([(array, (1.0, 1.0, 1.0))])["label_map"]
    assert found.shape == array.shape[:3]

    described = mlflow_model.describe(predictor.recipe, ran.folder, predictor.made.weights.name, 60, {})
    assert described is not None and described.metadata["preprocessing"]["channels"] == ["MRI", "edges"]
    example = base64.b64decode(described.example["data"][0][0])
    table = mlflow_model.LoadedModel(predictor).predict(pd.DataFrame({"image": [example]}))
    assert np.shape(table["label_map"][0]) == (16, 16, 16)
    with pytest.raises(UserError, match="sample 0: 1 channel; expected 2, as in training: MRI, edges"):
        predictor.predict([(array[..., 0], (1.0, 1.0, 1.0))])

    done = export.export(ran.folder.name, tmp_path / "out", ("safetensors", "onnx"), pictures=2)
    assert done.agreements["model.onnx"].same > 0.999
    about = json.loads((tmp_path / "out" / "model.json").read_text())
    assert about["shape"][:2] == [1, 2] and about["input"].endswith("channels MRI, edges")
    patch = torch.randn(about["shape"], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        given = predictor.network(patch)
        assert torch.equal(export.load(tmp_path / "out")(patch)[0], given)
    import onnxruntime

    scores = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx")).run(None, {"voxels": patch.numpy()})[0]
    np.testing.assert_allclose(scores, given.numpy(), rtol=1e-3, atol=1e-3)
