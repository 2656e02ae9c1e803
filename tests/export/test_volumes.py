"""Networks of organs taken away: patches of real volumes get the scores that the run gives them."""

from __future__ import annotations

import json

import nifti_sets
import numpy as np
import pytest
import torch
from runs import ROOT, environment
from safetensors.torch import load_file
from torch import nn
from untrained_runs import made

from trainkit.export import export

TOM500 = ROOT / "recipes" / "tom500.yaml"
PATCH = (8, 16, 16)


class Small(nn.Module):
    """Two convolutions, so that MONAI, which takes 12 s to import, is not needed."""

    def __init__(self, classes: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv3d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv3d(6, classes, 3, padding=1))

    def forward(self, x):
        return self.layers(x)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    root = tmp_path_factory.mktemp("sets")
    nifti_sets.write_set(root / "train", 2, seed=1)
    nifti_sets.write_set(root / "val", 2, seed=2)
    with environment(TRAINKIT_CACHE=tmp_path_factory.mktemp("cache")):
        yield root


@pytest.fixture
def run(sets, monkeypatch):
    monkeypatch.setattr("trainkit.models.segmentation_3d.build", lambda spec, meta, found: (Small(meta.classes), []))
    settings = {
        "data.train": f"{sets}/train",
        "data.evaluate": f"{{val: {sets}/val}}",
        "data.names": "[ball, box]",
        "data.patch": str(list(PATCH)),
        "data.patches": "4",
        "task.net": "{name: unet, filters: [4, 8]}",
        "train": "{length: 30 steps, batch_size: 4}",
        "evaluations": "{val: {}}",
        "best": "null",
    }
    return made(TOM500, *(f"{key}={value}" for key, value in settings.items()))


def test_patches_of_real_volumes_get_the_scores_of_the_run(run, tmp_path):
    done = export.export(run.name, tmp_path / "out", ("safetensors",), pictures=2)
    agreed = done.agreements["model.safetensors"]
    assert str(agreed).startswith("2 volumes; largest relative difference: logits 0; same class: 100 %")
    kept = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in run.net.state_dict().items())
    split = run.opened.evaluations["val"]
    image = split.on_device(split.fetch(np.array([0]), 0))["image"]
    patch = image[:, :, : PATCH[0], : PATCH[1], : PATCH[2]]
    assert patch.shape[2:] == PATCH
    with torch.no_grad():
        torch.testing.assert_close(export.load(tmp_path / "out")(patch)[0], run.net(patch))
    said = json.loads((tmp_path / "out" / "model.json").read_text())
    assert (said["names"], said["shape"]) == (["background", "ball", "box"], [1, 1, *PATCH])
    card = (tmp_path / "out" / "README.md").read_text()
    assert "3 classes: `background`, `ball`, `box`" in card and "percentiles 0.5 and 99.5" in card


def test_volumes_smaller_than_a_patch_are_filled_up_with_zeros(monkeypatch):
    from trainkit.export import volumes

    class Split:
        def fetch(self, rows, epoch):
            return {"image": torch.arange(1.0, 1 + 3 * 6 * 4).view(1, 1, 3, 6, 4)}

        def on_device(self, batch):
            return batch

    found = volumes._middle(Split(), 0, (5, 2, 4))
    whole = Split().fetch(None, 0)["image"]
    expected = torch.zeros(1, 1, 5, 2, 4)
    expected[:, :, 1:4] = whole[:, :, :, 2:4]
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_onnx_gives_the_same_scores(run, tmp_path):
    done = export.export(run.name, tmp_path / "out", ("onnx",), pictures=2)
    assert done.agreements["model.onnx"].same == 1
    import onnxruntime

    net = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    voxels = np.random.default_rng(0).normal(size=(1, 1, *PATCH)).astype(np.float32)
    with torch.no_grad():
        expected = run.net(torch.from_numpy(voxels)).numpy()
    np.testing.assert_allclose(net.run(None, {"voxels": voxels})[0], expected, rtol=1e-3, atol=1e-4)
