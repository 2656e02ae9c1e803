"""Predict samples in memory with the network of a run or of a logged model."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.config import loader
from trainkit.config.schema import TABLES, Recipe
from trainkit.data import kinds
from trainkit.data.folders import read_json
from trainkit.environment.version import __version__
from trainkit.errors import UserError
from trainkit.inference import preprocess
from trainkit.inference.table_writer import Columns
from trainkit.inference.trained_model import JSON_BYTES, Rebuilt, meta_of, placed, read_meta
from trainkit.interfaces import MODALITIES, RGB, DatasetInfo, LabelsImages, LabelsVolumes
from trainkit.tracking.logged_model import ABOUT

if TYPE_CHECKING:
    from torch import nn

    from trainkit.tracking.run_folder import RunFolder

FORMAT = 1
"""Version of `ABOUT`; raised for changes that would give another network or other predictions."""


class Predictor:
    """A trained network with its preprocessing; predictions equal those of `trainkit predict`."""

    _lock = threading.Lock()
    """Shared by all: settings of torch and the precision of Accelerate apply to the whole process."""

    def __init__(self, made: Rebuilt, about: Mapping[str, Any]):
        """Raises UserError if the recipe's data cannot be predicted in memory."""
        self.made = made
        self.about = about
        """Content of `ABOUT`: `run`, `step`, `scores`, `classes`, `made_with`."""
        kind = kinds.of(made.recipe.data)
        function = kinds.function(kind, "predictor") if kind else None
        if function is None:
            found, expected = "its data cannot be predicted in memory", "a kind of data with a predictor"
            raise UserError(f"recipe {made.recipe.name}", found, expected, "use `trainkit predict --plugin`")
        self._predict: Callable[[Sequence[Any], bool], Columns] = function(made)

    @classmethod
    def from_folder(cls, folder: Path | str, *, plugins: Sequence[str] = ()) -> Predictor:
        """Load the folder of a logged model: `trainkit.json` and the safetensors that it names.

        Raises UserError if a file is missing or damaged, or was written in another format.
        """
        folder = Path(folder)
        about = read_about(folder)
        where = str(folder / ABOUT)
        text, name = about.get("recipe"), about.get("weights")
        if not isinstance(text, str):
            raise UserError(where, "no recipe as text", "a model logged by trainkit", "log the model again")
        meta = meta_of(about.get("meta"), where, "log the model again")
        if not isinstance(name, str) or Path(name).name != name:
            found = f"names weights {name!r}"[:200]
            raise UserError(where, found, "a file in the same folder", "log the model again")
        tables = loader.with_plugins(TABLES, tuple(plugins))
        return cls(placed(loader.parse(Recipe, text, where, (), tables, stored=True), meta, folder / name), about)

    @classmethod
    def of_run(cls, run: RunFolder, *, plugins: Sequence[str] = ()) -> Predictor:
        """Load the best weights of a run. Raises UserError if it has none, or they do not fit."""
        from trainkit.training.best import best_weights

        recipe = loader.load(run.recipe, (), tuple(plugins), stored=True)
        meta, weights = read_meta(run), best_weights(run.path)
        return cls(placed(recipe, meta, weights), describe(recipe, meta, run.name, weights.name))

    @property
    def recipe(self) -> Recipe:
        """The recipe of the training."""
        return self.made.recipe

    @property
    def meta(self) -> DatasetInfo:
        """Description of the data that the network was trained on."""
        return self.made.meta

    @property
    def network(self) -> nn.Module:
        """The network, in evaluation mode, on its device; it takes prepared inputs."""
        return self.made.net

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of probabilities and label values."""
        return tuple(self.meta.class_names) or tuple(map(str, range(self.meta.classes)))

    @property
    def scores(self) -> Mapping[str, float]:
        """Metrics of the weights, as far as they are known."""
        return self.about.get("scores") or {}

    def predict(self, samples: Sequence[Any], *, mirror: bool = False) -> Columns:
        """Predict samples, in the same batches as `trainkit predict`: columns with one value per sample.

        Samples are images (bytes, base64 or uint8 arrays; see `samples.pixels`) or volumes (`samples.volume`).
        Columns of `classify`: `class`, `probability`, `probabilities` (n, classes), `embedding` (n, D); of `embed` and
        `adadistill` `embedding` and `norm`, of `reid` `embedding`; of `segment2d` and `segment3d` `label_map`, a list
        of uint8 arrays of the samples' own shapes. `mirror` as of `trainkit predict`.
        Raises UserError naming the first sample that cannot be read by its index: `sample 3`.
        """
        if not len(samples):
            raise UserError("predict", "no samples", "one or more", "pass at least one sample")
        with self._lock:
            self.made.runtime.configure(self.recipe)  # another network of this process may have other settings
            return self._predict(samples, mirror)


def describe(
    recipe: Recipe, meta: DatasetInfo, run: str, weights: str, step: int | None = None, scores: Mapping[str, Any] = {}
) -> dict[str, Any]:
    """Describe a network for `ABOUT`: everything that `from_folder` needs besides the file `weights`."""
    from importlib.metadata import version

    return {
        "format": FORMAT,
        "made_with": {"trainkit": __version__, "torch": version("torch")},
        "run": run,
        "step": step,
        "task": loader.flat(recipe)["task.name"],
        "classes": list(meta.class_names),
        "scores": {key: float(value) for key, value in scores.items()},
        "weights": weights,
        "meta": asdict(meta),
        "recipe": loader.dump(recipe),
    }


def read_about(folder: Path) -> dict[str, Any]:
    """Read `ABOUT` of a logged model. Raises UserError if it is missing, damaged, or in another format."""
    file, made = folder / ABOUT, "a model logged by trainkit"
    if not os.path.lexists(file):
        remedy = "load the run itself, or a model that `trainkit export` made of it"
        raise UserError(str(file), "does not exist", f"{made} {__version__} or newer", remedy)
    about = read_json(file, JSON_BYTES, made)
    if not isinstance(about, dict):
        raise UserError(str(file), f"a {type(about).__name__}", made, "log the model again")
    if (found := about.get("format")) != FORMAT:
        by = about.get("made_with")
        version = by.get("trainkit") if isinstance(by, dict) else "(unknown version)"
        remedy = "install that version of trainkit, or log the model again with this one"
        said = f"format {found!r}, written by trainkit {version}"[:200]
        raise UserError(str(file), said, f"format {FORMAT} of trainkit {__version__}", remedy)
    return about


def is_predictable(recipe: Recipe, meta: DatasetInfo) -> bool:
    """Return True if samples in memory can be predicted with the networks of a recipe, without a plug-in."""
    kind = kinds.of(recipe.data)
    if kind is None or kind.predictor is None:
        return False
    try:
        loader.parse(Recipe, loader.dump(recipe), recipe.name, (), TABLES, stored=True)
    except UserError:
        return False
    if isinstance(recipe.task, LabelsVolumes | LabelsImages):
        return True
    return preprocess.of(recipe.data) is not None and (not meta.modalities or MODALITIES[RGB] in meta.modalities)
