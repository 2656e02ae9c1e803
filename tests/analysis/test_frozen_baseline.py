"""The features of a frozen pretrained network as a baseline: where they apply, and what is compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from runs import ROOT
from safetensors.torch import save_file

from trainkit.analysis import frozen_baseline
from trainkit.config import loader
from trainkit.interfaces import HasBaselines
from trainkit.tasks.embed import Embed


def baselines(recipe):
    split = recipe.data.open(0).evaluations["sample"]
    return split, frozen_baseline.of(recipe, split, recipe.task.baselines(split, None))


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_faces_are_compared_by_the_features_of_a_network_whose_weights_are_here(tmp_path, monkeypatch):
    import timm

    monkeypatch.setenv("TRAINKIT_DATA", str(tmp_path))
    recipe = loader.load(ROOT / "recipes" / "face_teacher.yaml")
    assert isinstance(recipe.task, Embed) and baselines(recipe)[1] == [], "no weights are here"
    (tmp_path / "pretrained").mkdir()
    net: Any = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    save_file(net.state_dict(), tmp_path / "pretrained" / "tf_efficientnet_lite0.safetensors")
    split, (found,) = baselines(recipe)
    assert found.name == "frozen tf_efficientnet_lite0"
    with torch.no_grad():
        batch = split.on_device(split.fetch(np.arange(2), epoch=0))
        rows = found.fit(iter(()))(batch)
        image = torch.nn.functional.interpolate(batch["image"].float(), (160, 160), mode="bilinear")
        net.eval()
        expected = net.forward_head(net.forward_features(image), pre_logits=True)
    torch.testing.assert_close(rows["embedding"], expected)  # both normalise by 0.5 and 0.5
    torch.testing.assert_close(rows["norm"], expected.norm(dim=1))


def test_captions_alone_and_images_without_captions_are_encoded():
    import timm

    net = timm.create_model("tf_efficientnet_lite0", pretrained=False, num_classes=0).eval()
    frozen = frozen_baseline.Frozen(net, torch.ones(3, 1, 1), torch.zeros(3, 1, 1))
    empty, captions = torch.zeros(0, 3, 32, 16), torch.zeros(2, 5, dtype=torch.int64)
    with torch.no_grad():
        assert torch.equal(frozen.encode({"rgb": empty}, captions), torch.zeros(2, 1280))
        rows = frozen.encode({"rgb": torch.rand(1, 3, 32, 16), "nir": empty}, captions)
    assert rows.shape == (3, 1280) and rows.norm(dim=1).tolist() == pytest.approx([1, 0, 0])


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_classes_with_baselines_of_their_own_have_none():
    recipe = loader.load(ROOT / "recipes" / "convnext.yaml")
    split = next(iter(recipe.data.open(0).evaluations.values()))
    assert isinstance(recipe.task, HasBaselines)
    assert frozen_baseline.of(recipe, split, recipe.task.baselines(split, None)) == []
