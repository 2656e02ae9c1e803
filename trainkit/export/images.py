"""Export networks for images that predict classes or embeddings.

Exported networks map RGB pixels 0 .. 255, float32 (B, 3, H, W) of the training size, to logits, embeddings or both.
Normalisation is part of the network, and so is the mirror image if the task uses it. A network of timm keeps timm's
names; with `config.json`, `timm.create_model("local-dir:OUT", pretrained=True)` loads the folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from trainkit.config.schema import Recipe
from trainkit.errors import UserError, few
from trainkit.export import files
from trainkit.export.agreement import Agreement, Exportable, Exporter, batch_forms, compare, rows
from trainkit.export.files import CONFIG, Format, Outputs
from trainkit.files import Json, write_aside
from trainkit.inference import preprocess
from trainkit.inference.preprocess import Preparation
from trainkit.inference.trained_model import load_network
from trainkit.interfaces import MODALITIES, RGB, DatasetInfo, Split, Task
from trainkit.models.face_backbones import WithHead
from trainkit.models.reid import ReidNet
from trainkit.models.timm_classifier import Classifier
from trainkit.tasks.classify import Classify
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


def exportable(
    recipe: Recipe, meta: DatasetInfo, run: str, weights: Path, formats: Sequence[Format], pictures: int
) -> Exportable:
    """Load the network of a run of `classify`, `embed`, `adadistill` or `reid`, and `pictures` images to check it on.

    Raises UserError for formats that it does not support.
    """
    prepared, net = _preparation(recipe), load_network(recipe, meta, weights)
    if not isinstance(net, Classifier):
        files.refuse_hub_folder(formats, run, f"{_named(net)}, which timm cannot build")
    split = files.scored_split(recipe)
    pixels, found, chosen = _real(recipe.task, net, split, pictures)
    expected = {name: found[name] for name in _WORDS if name in found}
    deployed, samples = Deployed(recipe.task, net, prepared, list(expected)).eval(), rows(pixels, expected)

    def write_config(folder: Path) -> Agreement:
        if not isinstance(net, Classifier):  # `hub-folder` is refused for others above
            raise TypeError("a hub folder needs a classifier")
        write_aside(folder / CONFIG, json.dumps(timm_config(recipe, meta, prepared, net), indent=1) + "\n")
        return compare(CONFIG, _by_timm(folder, prepared), rows(pixels, {"logits": expected["logits"]}))

    return Exportable(
        net=_without_head(recipe.task, net),
        outputs={name: _WORDS[name].format(values.shape[1]) for name, values in expected.items()},
        samples=samples,
        checked_on=(split.name, chosen.tolist()),
        about=_about(meta, prepared, "logits" in expected),
        forms=batch_forms(deployed, pixels, expected),
        network=_named(net),
        write_config=write_config,
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


def timm_config(recipe: Recipe, meta: DatasetInfo, prepared: Preparation, net: Classifier) -> dict[str, Json]:
    """Describe a network and its image preparation in timm's terms, for config.json.

    Dropout and stochastic depth are left out: they only apply to training.
    """
    import timm

    spec = cast(Classify, recipe.task).net
    architecture = spec.model.partition(".")[0]
    own: Any = net.net.pretrained_cfg  # a dict of timm
    known = timm.get_pretrained_cfg(architecture, allow_unregistered=False)
    fixed = known is not None and bool(known.fixed_input_size)
    sized = {"img_size": list(prepared.side)} if fixed else {}
    size = [meta.shape[0], *prepared.side]
    names = list(meta.class_names)
    return {
        "architecture": architecture,
        "num_classes": meta.classes,
        "num_features": net.net.num_features,
        **({"label_names": names} if names else {}),
        "model_args": {**spec.args, **sized},
        "pretrained_cfg": {
            "custom_load": False,
            "input_size": size,
            "fixed_input_size": fixed,
            "interpolation": "bicubic",
            "crop_pct": prepared.crop_pct,
            "crop_mode": prepared.crop_mode,
            "mean": list(prepared.mean),
            "std": list(prepared.std),
            "num_classes": meta.classes,
            "pool_size": None,
            "first_conv": own.get("first_conv"),
            "classifier": own.get("classifier"),
        },
    }


def _named(net: nn.Module) -> str:
    inner = net.net if isinstance(net, WithHead | Classifier) else net
    return type(inner).__name__


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


def _by_timm(folder: Path, prepared: Preparation) -> Callable[[Tensor], Outputs]:
    """Load the folder with timm, as a function of pixels that normalises them by config.json."""
    import timm

    try:
        net = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    except Exception as error:
        found = f"timm {timm.__version__} cannot load the folder: {files.first_line(error)}"
        raise UserError("--to hub-folder", found, remedy="use --to safetensors --to onnx") from error
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (prepared.mean, prepared.std))
    return lambda pixels: {"logits": net((pixels / 255 - mean) / std)}
