"""Export networks for images that predict classes or embeddings.

Exported networks map RGB pixels 0 .. 255, float32 (B, 3, H, W) of the training size, to logits, embeddings or both.
Normalisation is part of the network, and so is the mirror image if the task uses it. A network of timm keeps timm's
names: `timm.create_model(NAME, num_classes=N, checkpoint_path="OUT/model.safetensors")` loads its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from trainkit.config.schema import Recipe
from trainkit.errors import UserError, few
from trainkit.export import files
from trainkit.export.agreement import Exportable, Exporter, batch_forms, rows
from trainkit.export.files import Outputs
from trainkit.files import Json
from trainkit.inference import preprocess
from trainkit.inference.preprocess import Preparation
from trainkit.inference.trained_model import load_network
from trainkit.interfaces import MODALITIES, RGB, DatasetInfo, Split, Task
from trainkit.models.face_backbones import WithHead
from trainkit.models.reid import ReidNet
from trainkit.models.timm_classifier import Classifier
from trainkit.tasks.embed import Embed

if TYPE_CHECKING:
    from trainkit.data.people.dataset import PeopleSplit


class Deployed(nn.Module):
    """Pixels to the outputs of a task, with normalisation."""

    mean: Tensor
    std: Tensor

    def __init__(self, task: Task, net: nn.Module, prepared: Preparation, outputs: Sequence[str]):
        super().__init__()
        self.task, self.net, self.outputs = task, net, tuple(outputs)
        for name in ("mean", "std"):
            values = torch.tensor(getattr(prepared, name), dtype=torch.float32).view(1, 3, 1, 1)
            self.register_buffer(name, values, persistent=False)

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """RGB (B, 3, H, W), 0 .. 255, to `outputs`, float32: logits (B, classes), embedding (B, D)."""
        rows = self._rows((pixels / 255 - self.mean) / self.std)
        return tuple(rows[name].float() for name in self.outputs)

    def _rows(self, image: Tensor) -> Mapping[str, Tensor]:
        if isinstance(self.net, Classifier):  # without switching gradients, which an export does not need
            net: Any = self.net.net  # timm's networks have no class in common
            features = net.forward_features(image)
            embedding = net.forward_head(features, pre_logits=True).flatten(1)
            return {"logits": net.forward_head(features), "embedding": embedding}
        if not isinstance(self.net, ReidNet):
            return self.task.predict(self.net, {"image": image})
        # A single record is its own fusion.
        none = image[:0]
        images = {name: image if name == MODALITIES[RGB] else none for name in self.net.pictures}
        return {"embedding": self.net.neck(self.net.encode(images, None))}


def exporter(recipe: Recipe) -> Exporter | None:
    """Return the exporter for data of single images; None for other data."""
    return None if preprocess.of(recipe.data) is None else Exporter(exportable, rebuilt, _without_head)


def exportable(recipe: Recipe, meta: DatasetInfo, weights: Path, pictures: int) -> Exportable:
    """Load a network that predicts classes or embeddings, and `pictures` images to check it on."""
    prepared, net = _preparation(recipe), load_network(recipe, meta, weights)
    split = files.scored_split(recipe)
    pixels, found, chosen = _real(recipe.task, net, split, pictures)
    expected = {name: found[name] for name in _WORDS if name in found}
    deployed = Deployed(recipe.task, net, prepared, list(expected)).eval()
    inner = net.net if isinstance(net, WithHead | Classifier) else net
    return Exportable(
        net=_without_head(recipe.task, net),
        outputs={name: _WORDS[name].format(values.shape[1]) for name, values in expected.items()},
        samples=rows(pixels, expected),
        checked_on=(split.name, chosen.tolist()),
        about=_about(meta, prepared, "logits" in expected),
        forms=batch_forms(deployed, pixels, expected),
        network=type(inner).__name__,
    )


def rebuilt(recipe: Recipe, meta: DatasetInfo, said: Mapping[str, Json], file: Path) -> nn.Module:
    """Rebuild the network of an exported folder: pixels to its `outputs`, in their order. Raises UserError."""
    outputs = list(said.get("outputs") or ())
    if not outputs or set(outputs) - _WORDS.keys():
        raise UserError(str(file.parent / files.ABOUT), f"outputs {outputs}"[:200], few(_WORDS))
    net = load_network(recipe, headless(recipe, meta), file, lambda net: _without_head(recipe.task, net))
    return Deployed(recipe.task, net, _preparation(recipe), outputs).eval()


_WORDS = {
    "logits": "float32 (B, {}); softmax gives the class probabilities",
    "embedding": "float32 (B, {}), not normalised; compare by cosine",
}


def _about(meta: DatasetInfo, prepared: Preparation, classifies: bool) -> dict[str, Json]:
    height, width = prepared.side
    return {
        "input": f"pixels: RGB 0 .. 255, float32 (B, 3, {height}, {width})",
        "names": list(meta.class_names or map(str, range(meta.classes))) if classifies else [],
        "mean": list(prepared.mean),
        "std": list(prepared.std),
        "normalised": "included: (pixels / 255 - mean) / std",
        "size": [height, width],
        "fit": prepared.words,
        "crop_pct": prepared.crop_pct,
        "crop_mode": prepared.crop_mode,
    }


def _preparation(recipe: Recipe) -> Preparation:
    prepared = preprocess.of(recipe.data)
    if prepared is None:
        raise UserError("data", "data without single images", "images, faces or people", "name another run")
    return prepared


def _without_head(task: Task, net: nn.Module) -> nn.Module:
    """Return the exported part: timm's network of a classifier, or an embedding network without class centres."""
    if isinstance(net, Classifier) or (
        isinstance(net, WithHead) and not cast("Embed", task).classify
    ):  # the only task with it
        return net.net
    return net


def headless(recipe: Recipe, meta: DatasetInfo) -> DatasetInfo:
    """Describe the data with as few classes as the exported part needs: a file without class centres bounds none."""
    return replace(meta, classes=1) if isinstance(recipe.task, Embed) and not recipe.task.classify else meta


@torch.no_grad()
def _real(task: Task, net: nn.Module, split: Split, most: int) -> tuple[Tensor, Outputs, np.ndarray]:
    """Read images of an evaluation: pixels (n, 3, H, W) 0 .. 255, outputs of the trained network, and their rows.

    They are prepared as in an evaluation, so that a different preparation is detected.
    """
    if not isinstance(net, ReidNet):
        rows = files.spread(split.size, most)
        batch = split.fetch(rows, 0)
        return batch["image"].float(), task.predict(net, split.on_device(batch)), rows
    rows = np.flatnonzero(cast("PeopleSplit", split).modality == RGB)  # the only data of such networks
    rows = rows[files.spread(len(rows), most)]
    batch = split.fetch(rows, 0)
    feature = task.predict(net, split.on_device(batch))["feature"].float()
    places = feature.new_zeros(len(feature), len(MODALITIES), feature.shape[1])
    places[:, RGB] = feature
    present = torch.zeros(places.shape[:2], dtype=torch.bool)
    present[:, RGB] = True
    return batch[f"image.{MODALITIES[RGB]}"].float(), {"embedding": net.neck(net.fuse(places, present))}, rows
