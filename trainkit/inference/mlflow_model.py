"""Describe trained weights as an MLflow model, and load them again: the loader module of logged models.

`mlflow.pyfunc.load_model` and `mlflow models serve` import this module by the name that the file MLmodel gives, and
call `_load_pyfunc`. The network is made again from safetensors and JSON.
"""

from __future__ import annotations

import base64
import os
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.config import loader
from trainkit.data.formats import image_decode
from trainkit.data.scenes.dataset import Scenes
from trainkit.errors import UserError
from trainkit.inference import predictor, preprocess, samples
from trainkit.inference.predictor import Predictor
from trainkit.inference.trained_model import read_meta
from trainkit.interfaces import DatasetInfo, LabelsImages, LabelsVolumes
from trainkit.tasks.embed import Embed
from trainkit.tracking.logged_model import Described

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from trainkit.config.schema import Recipe
    from trainkit.tracking.run_folder import RunFolder

IMAGE, SPACING, MIRROR = "image", "spacing", "mirror"
"""Columns of the input, and the parameter of a prediction."""

_SERVING = "_MLFLOW_IS_IN_SERVING_ENVIRONMENT"
"""Set to `true` by MLflow's scoring server and `mlflow models predict`."""
_BASE64 = re.compile(rb"[A-Za-z0-9+/=\s]+")
"""No encoded image or volume is of these bytes alone."""
_FILE = (str, bytes, Path)
_REQUIRED = (
    "trainkit", "mlflow", "torch", "torchvision", "accelerate", "timm", "safetensors", "numpy", "pillow", "pydantic",
    "PyYAML", "nibabel",
)  # fmt: skip
_REQUIRED_WHERE_USED = {"monai": "monai", "segmentation_models_pytorch": "segmentation-models-pytorch"}
"""Packages by the module that a network of theirs has imported."""
_CLASSES = ("class", "probability", "probabilities")
_COLUMNS: dict[str, Any] = {
    "class": "string", "probability": "float", "probabilities": ["float"], "embedding": ["float"], "norm": "float",
    "label_map": None,
}  # fmt: skip
"""Types of the columns of predictions; a list of one: vectors. The depth of label maps is that of their samples."""


# ---- Describe --------------------------------------------------------------------------------------------------------


def describe(recipe: Recipe, run: RunFolder, weights: str, step: int, scores: Mapping[str, float]) -> Described | None:
    """Describe the weights of a run, a file of that name, with their scores; None where MLflow cannot load them.

    Such are those of a plug-in, and of a run without the description of its data.
    """
    try:
        meta = read_meta(run)
    except UserError:
        return None
    if not predictor.is_predictable(recipe, meta):
        return None
    about = predictor.describe(recipe, meta, run.name, weights, step, scores)
    kept = ("format", "made_with", "run", "step", "task", "classes", "scores")
    volumes = bool(meta.axes)
    # MLflow takes any text for base64 where a column is binary; of a volume text is a path in a program.
    image = {"name": IMAGE, "type": "binary" if volumes else "string", "required": True}
    spacing = [{"name": SPACING, "type": "array", "items": {"type": "double"}, "required": False}]
    outputs = _outputs(recipe)
    mirrors = outputs is None or "embedding" not in outputs or "class" in outputs
    return Described(
        about=about,
        inputs=[image, *(spacing if volumes else ())],
        outputs=[_column(name, volumes) for name in outputs] if outputs else None,
        params=[{"name": MIRROR, "type": "boolean", "default": False, "shape": None}] if mirrors else (),
        example={"columns": [IMAGE], "data": [[base64.b64encode(_example(recipe, meta)).decode()]]},
        requirements=requirements(),
        metadata={**{key: about[key] for key in kept}, "preprocessing": _preprocessing(recipe, meta)},
    )


def requirements() -> list[str]:
    """List the packages that a prediction needs, each pinned to the version that is installed here."""
    used = (name for module, name in _REQUIRED_WHERE_USED.items() if module in sys.modules)
    found = []
    for name in (*_REQUIRED, *used):
        try:
            # Without `+cpu`: which build of a version is right, the other machine knows.
            found.append(f"{name}=={metadata.version(name).partition('+')[0]}")
        except metadata.PackageNotFoundError:  # run from a folder that is not installed
            found.append(name)
    return found


def _outputs(recipe: Recipe) -> tuple[str, ...] | None:
    """List the columns of predictions of a task; None of a plug-in's, which only a prediction tells."""
    task = recipe.task
    if isinstance(task, LabelsVolumes | LabelsImages):
        return ("label_map",)
    known = {
        "classify": (*_CLASSES, "embedding"),
        "embed": (*(_CLASSES if isinstance(task, Embed) and task.classify else ()), "embedding", "norm"),
        "adadistill": ("embedding", "norm"),
        "reid": ("embedding",),
    }
    return known.get(str(loader.flat(recipe)["task.name"]))


def _column(name: str, volumes: bool) -> dict[str, Any]:
    """Describe a column of predictions for a signature."""
    if name == "label_map":
        depth, inner = 3 if volumes else 2, {"type": "integer"}
        for _ in range(depth - 1):
            inner = {"type": "array", "items": inner}
        return {"name": name, "type": "array", "items": inner, "required": True}
    kind = _COLUMNS[name]
    own = {"type": "array", "items": {"type": kind[0]}} if isinstance(kind, list) else {"type": kind}
    return {"name": name, **own, "required": True}


def _example(recipe: Recipe, meta: DatasetInfo) -> bytes:
    """Make an encoded sample of the right size: a ramp, since an image of the data could be anybody's."""
    if meta.axes:
        mm = meta.resampled or meta.spacing or (1.0, 1.0, 1.0)
        ramp = np.arange(16.0**3).reshape(16, 16, 16)
        channels = meta.shape[0]
        return samples.nifti_bytes(ramp if channels == 1 else np.stack([ramp] * channels, axis=3), mm, "example")
    height, width = _side(recipe)
    ramp = np.linspace(0, 255, height * width).reshape(height, width).astype(np.uint8)
    return image_decode.encode(np.stack([ramp, ramp[::-1], ramp[:, ::-1]], axis=2))


def _side(recipe: Recipe) -> tuple[int, int]:
    """Return a height and width that the network takes."""
    if isinstance(recipe.data, Scenes):
        return recipe.data.size or recipe.data.crop
    prepared = preprocess.of(recipe.data)
    if prepared is None:
        raise UserError(f"recipe {recipe.name}", "data whose preparation is unknown", "data of a shipped kind")
    return prepared.side


def _preprocessing(recipe: Recipe, meta: DatasetInfo) -> dict[str, Any]:
    """Describe how samples are prepared, which the model does itself."""
    if meta.axes:
        from trainkit.data.volumes.preprocess import PERCENTILES

        found = {"axes": meta.axes, "spacing": list(meta.resampled) or None, "clip_percentiles": list(PERCENTILES)}
        return found | ({"channels": list(meta.channels)} if meta.channels else {})
    data, prepared = recipe.data, preprocess.of(recipe.data)
    if isinstance(data, Scenes):
        return {"size": list(data.size) if data.size else None, "mean": list(data.mean), "std": list(data.std)}
    if prepared is None:
        return {}
    shape = {"size": list(prepared.side), "fit": prepared.words}
    return {**shape, "mean": list(prepared.mean), "std": list(prepared.std)}


# ---- Load ------------------------------------------------------------------------------------------------------------


def _load_pyfunc(path: str) -> LoadedModel:
    """Load the folder of a logged model, as MLflow does. Raises MlflowException where it cannot be."""
    from mlflow.exceptions import MlflowException

    folder = Path(path)
    try:
        return LoadedModel(Predictor.from_folder(folder))
    except UserError as error:
        raise MlflowException.invalid_parameter_value(str(error)) from None


class LoadedModel:
    """A network as MLflow's pyfunc: a table of samples to a table of predictions, a row each."""

    def __init__(self, predictor: Predictor):
        self.predictor = predictor

    def get_raw_model(self) -> nn.Module:
        """Return the bare network, for `PyFuncModel.get_raw_model`."""
        return self.predictor.network

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """Predict the samples in the column `image`; `params` may have `mirror`.

        Raises MlflowException naming the first sample that cannot be read.
        """
        import pandas as pd
        from mlflow.exceptions import MlflowException

        served = os.environ.get(_SERVING) == "true"
        try:
            given = _samples(model_input, bool(self.predictor.meta.axes), served)
            found = self.predictor.predict(given, mirror=bool((params or {}).get(MIRROR)))
        except UserError as error:
            raise MlflowException.invalid_parameter_value(str(error)) from None
        index = model_input.index if len(model_input.index) == len(given) else None
        return pd.DataFrame({name: list(values) for name, values in found.items()}, index=index)


def _samples(table: pd.DataFrame, volumes: bool, served: bool) -> list[Any]:
    """Return the samples of a table; of volumes that are arrays with their spacing.

    Where they come from a request, text is base64 and never a path: a client opens no file of the server.
    """
    column = table[IMAGE].tolist()
    if volumes and SPACING in table.columns:
        pairs = zip(column, table[SPACING].tolist(), strict=True)
        cells = [[one] if isinstance(one, _FILE) else [(one, mm)] for one, mm in pairs]
    else:  # a list of texts in one cell is MLflow's reading of `{"image": [text, text]}`
        cells = [one if isinstance(one, list) and one and isinstance(one[0], _FILE) else [one] for one in column]
    return [_decoded(one, f"sample {k}", served) for k, one in enumerate(one for cell in cells for one in cell)]


def _decoded(sample: Any, where: str, served: bool) -> Any:
    if isinstance(sample, bytes) and _BASE64.fullmatch(sample):  # MLflow leaves it so in requests with `inputs`
        return samples.from_base64(sample.decode(), where)
    return samples.from_base64(sample, where) if served and isinstance(sample, str) else sample
