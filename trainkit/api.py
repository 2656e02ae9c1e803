"""The Python interface: train a recipe, load a model, compare runs; docs/tutorials/python.ipynb shows it.

It does what the commands do, in the process that calls it. Mistakes raise `UserError`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.errors import UserError
from trainkit.paths import recipe_file
from trainkit.redact import hide_in_logs

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from trainkit.analysis.compare import Comparison
    from trainkit.config import schema
    from trainkit.config.run_request import RunRequest
    from trainkit.inference.predictor import Predictor
    from trainkit.tracking.run_folder import RunFolder

__all__ = ["Compared", "Model", "Recipe", "Run", "UserError", "compare", "find_run", "load", "recipe", "train"]

_PLUGINS = "a list of packages"
Changes = Mapping[str, Any] | Sequence[str]
"""Changes of a recipe: `{"optim.lr": 1e-3}`, or words as commands take them: `["optim.lr=1e-3"]`."""


@dataclass(frozen=True)
class Recipe:
    """A valid recipe with its changes. `str` of it is the resolved recipe, with all defaults, as YAML."""

    request: RunRequest = field(repr=False)
    settings: schema.Recipe
    """Its blocks: `settings.optim.lr`."""

    def as_dict(self) -> dict[str, Any]:
        """Return all keys and values as plain values: `as_dict()["optim"]["lr"]`."""
        from trainkit.config import yaml_reader

        tree = yaml_reader.read(str(self)).tree
        return tree if isinstance(tree, dict) else {}

    def __str__(self) -> str:
        from trainkit.config import loader

        return loader.dump(self.settings)


@dataclass(frozen=True)
class Run:
    """A run on disk."""

    folder: RunFolder = field(repr=False)
    name: str

    @property
    def path(self) -> Path:
        """Folder of the run."""
        return self.folder.path

    @property
    def status(self) -> str:
        """RUNNING, FINISHED, FAILED or KILLED, as in MLflow."""
        return self.folder.info().status

    @property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe, as plain values."""
        from trainkit.config import diff

        return diff.read(self.folder.recipe)

    @property
    def scores(self) -> dict[str, float]:
        """Scores by name, `val/top1`: at the best evaluation where the recipe names a metric for it, else the last."""
        from trainkit.tracking import journal

        evaluations = self.recipe.get("evaluations") or {}
        metrics = journal.at_best(journal.read(self.folder.journal).metrics) if self.folder.journal.is_file() else {}
        for when in ("best/", "final/", ""):
            found = {
                name.removeprefix(when): points[-1].value for name, points in metrics.items() if name.startswith(when)
            }
            scores = {name: value for name, value in found.items() if name.split("/")[0] in evaluations}
            if scores:
                return scores
        return {}

    def load(self, *, plugins: Sequence[str] = ()) -> Model:
        """Load the network with the weights of the best checkpoint. Raises UserError where there is none."""
        return _of_run(self.folder, _texts(plugins, "plugins", _PLUGINS))

    @property
    def metrics(self) -> pd.DataFrame:
        """All metrics: a column for each, a row for each step at which one was logged."""
        import pandas as pd

        from trainkit.tracking import journal

        found = journal.read(self.folder.journal).metrics if self.folder.journal.is_file() else {}
        columns = {name: pd.Series({point.step: point.value for point in points}) for name, points in found.items()}
        return pd.DataFrame(columns).sort_index().rename_axis("step")


@dataclass(frozen=True)
class Model:
    """A trained network with the preprocessing of its evaluations: it predicts as `trainkit predict` does."""

    name: str
    """Run, folder or model that it was loaded from."""
    scores: Mapping[str, float]
    """Scores at the step of its weights by name, `val/ema/top1`, as far as they are known."""
    _predictor: Predictor = field(repr=False)

    @property
    def network(self) -> nn.Module:
        """The network alone, in evaluation mode, on its device; it takes normalised tensors."""
        return self._predictor.network

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of probabilities and label values."""
        return self._predictor.classes

    def predict(self, pictures: Any, *, mirror: bool = False) -> pd.DataFrame:
        """Predict one image or several: a row for each, with the columns of `trainkit predict`, or `label_map`.

        An image is a path, an image of Pillow, encoded bytes, or pixels 0 to 255 as an array (height, width, 3). A
        volume is the path or the bytes of a NIfTI file, or a pair of an array and its spacing in mm. `mirror`: mean
        over mirror images. Raises UserError naming the first that cannot be read.
        """
        import pandas as pd

        found = self._predictor.predict(self._samples(pictures), mirror=mirror)
        return pd.DataFrame({name: list(values) for name, values in found.items()})

    def embed(self, pictures: Any) -> np.ndarray:
        """Return the embedding of one image or several, float32 (n, dimensions). Raises as `predict`."""
        found = self._predictor.predict(self._samples(pictures))
        if "embedding" not in found:
            raise UserError(self.name, "a model of label maps, which has no embeddings", "one of classes or embeddings")
        return np.asarray(found["embedding"])

    def _samples(self, pictures: Any) -> Sequence[Any]:
        from trainkit.data import kinds

        kind = kinds.of(self._predictor.recipe.data)
        return _Samples(pictures, kind is None or kind.sample == "image")


class _Samples(Sequence[Any]):
    """Samples as `Predictor` takes them, each read when its turn comes."""

    def __init__(self, given: Any, pictures: bool):
        one = isinstance(given, str | os.PathLike | bytes | bytearray) or hasattr(given, "getexif")
        if one or (isinstance(given, np.ndarray) and given.ndim in (2, 3)):
            given = [given]
        if not isinstance(given, Iterable):
            raise UserError("predict", f"a {type(given).__name__}", "an image, or several")
        self._given = given if isinstance(given, Sequence) else list(given)
        self._pictures = pictures

    def __len__(self) -> int:
        return len(self._given)

    def __getitem__(self, at: Any) -> Any:
        from trainkit.data.formats import image_decode

        sample = self._given[at]
        if not self._pictures:
            return sample
        if isinstance(sample, str | os.PathLike):
            path = Path(sample)
            return image_decode.decode(image_decode.read(path, str(path)), str(path))
        return image_decode.opened(sample, f"sample {at}") if hasattr(sample, "getexif") else sample


@dataclass(frozen=True)
class Compared:
    """A run compared with another. `str` of it is the text of `trainkit compare`."""

    comparison: Comparison = field(repr=False)

    @cached_property
    def scores(self) -> pd.DataFrame:
        """A row for each score: of both runs, the difference, its interval and verdict."""
        import pandas as pd

        columns = ("name", "primary", "first", "value", "difference", "low", "high", "verdict", "why", "units")
        rows = [
            (s.name, s.primary, *s.values, s.difference, s.low, s.high, s.verdict, s.why, s.units)
            for s in self.comparison.scores
        ]
        return pd.DataFrame(rows, columns=list(columns))

    @cached_property
    def changes(self) -> pd.DataFrame:
        """A row for each key that the second recipe has otherwise than the first."""
        import pandas as pd

        from trainkit.config import diff

        def value(side: Any) -> Any:
            return None if isinstance(side, diff.Absent) else side

        rows = [(change.key, value(change.before), value(change.after)) for change in self.comparison.changes]
        return pd.DataFrame(rows, columns=["key", "before", "after"], dtype=object)

    @cached_property
    def speed(self) -> pd.DataFrame:
        """A row for each rate, time and cost; a column for each run."""
        import pandas as pd

        names = [side.name for side in self.comparison.sides]
        return pd.DataFrame.from_dict(dict(self.comparison.speed), orient="index", columns=names)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences to know before anything is read off: other data, other tasks, runs that did not finish."""
        return self.comparison.notes

    def __str__(self) -> str:
        from trainkit.analysis import compare_report

        return compare_report.text(self.comparison)


def recipe(name: str | os.PathLike[str], changes: Changes = (), *, plugins: Sequence[str] = ()) -> Recipe:
    """Load a recipe, by its file or the name of one that ships, with changes. Raises UserError with every mistake."""
    hide_in_logs()
    from trainkit.config import run_request

    words = _words(changes)
    named = _texts(plugins, "plugins", _PLUGINS)
    request = run_request.RunRequest(recipe_file(_path(name, "recipe")), words, named)
    return Recipe(request, run_request.load(request))


def train(
    recipe: str | os.PathLike[str] | Recipe,
    changes: Changes = (),
    *,
    resume: str | Run | None = None,
    plugins: Sequence[str] = (),
) -> Run:
    """Train a recipe in this process, as `trainkit run` does, and return its run.

    `resume` names a run to continue. Ctrl-C, or a notebook's stop button, saves a checkpoint and returns the run with
    status KILLED; before the run exists, it raises KeyboardInterrupt. Raises UserError for what the user can correct; a
    run that has made a step is then FAILED, and none is left of what is refused before.

    Any thread may train, one at a time. In another thread than the main one Ctrl-C does not reach the training, and
    `limits.hang` is not watched.
    """
    hide_in_logs()
    from trainkit.config.run_request import RunRequest
    from trainkit.distributed.stop_signal import Stop
    from trainkit.environment import process
    from trainkit.experiments import launch

    process.check_variables()
    words, plugins = _words(changes), _texts(plugins, "plugins", _PLUGINS)
    if isinstance(recipe, Recipe):
        before, own = recipe.request, tuple(recipe.request.plugins)
        again = {word.partition("=")[0] for word in words}
        words = (*(word for word in before.overrides if word.partition("=")[0] not in again), *words)
        path, plugins = before.path, (*own, *(name for name in plugins if name not in own))
    else:
        path = recipe_file(_path(recipe, "recipe"))
    named = resume.name if isinstance(resume, Run) else resume if resume is None else _path(resume, "resume")
    stop = Stop()
    with stop.interruptible():
        _, folder = launch.carry_out(RunRequest(path, words, tuple(plugins), named), stop)
    if folder is None:
        raise KeyboardInterrupt("told to stop before the run began")
    return Run(folder, folder.name)


def load(source: str | os.PathLike[str], *, plugins: Sequence[str] = ()) -> Model:
    """Load a trained network from a run, a folder of `trainkit export`, or a logged model, `models:/...`.

    A run is named as in commands: by its name, a short one, its MLflow id, `last` or `best`. Raises UserError.
    """
    hide_in_logs()
    from trainkit.export import export, files
    from trainkit.inference import predictor
    from trainkit.tracking.run_folder import RunFolder
    from trainkit.tracking.store import Store

    word, words = _path(source, "load"), _texts(plugins, "plugins", _PLUGINS)
    if word.startswith("models:/"):
        made = predictor.Predictor.from_folder(Store.locate().model_file(word).parent, plugins=words)
        return Model(word, made.scores, made)
    path = Path(word)
    if isinstance(source, str) or not os.path.exists(path):
        named = Store.locate().find_or_path(word)
        if isinstance(named, RunFolder):
            return _of_run(named, words)
    if (path / files.ABOUT).is_file():
        made = predictor.Predictor(*export.trained(path))
        return Model(word, made.scores, made)
    if (path / predictor.ABOUT).is_file():
        made = predictor.Predictor.from_folder(path, plugins=words)
        return Model(word, made.scores, made)
    if (path / "run.json").is_file():
        return _of_run(RunFolder(path.absolute()), words)
    found = f"a {'folder' if path.is_dir() else 'file'} without a model"
    raise UserError(word, found, "a run, a folder of `trainkit export`, or models:/...")


def _of_run(folder: RunFolder, plugins: tuple[str, ...]) -> Model:
    from trainkit.export import model_card
    from trainkit.inference.predictor import Predictor

    made = Predictor.of_run(folder, plugins=plugins)
    return Model(folder.name, model_card.scores_of(folder, made.recipe, made.made.weights), made)


def find_run(name: str) -> Run:
    """Find a run by its name, a short one, its MLflow id, `last`, `last finished` or `best`. Raises UserError."""
    hide_in_logs()
    from trainkit.tracking.store import Store

    folder = Store.locate().find(_path(name, "find_run"))
    return Run(folder, folder.name)


def compare(first: str | Run, second: str | Run) -> Compared:
    """Compare a run with another, as `trainkit compare` does; nothing is kept in MLflow. Raises UserError."""
    hide_in_logs()
    from trainkit.analysis import compare as comparing
    from trainkit.tracking.store import Store

    store = Store.locate()
    words = [run.name if isinstance(run, Run) else _path(run, "compare") for run in (first, second)]
    return Compared(comparing.compare(store, comparing.resolve(store, words)))


def _words(changes: Changes) -> tuple[str, ...]:
    """Changes as words of a command. Raises UserError for what is neither keys with plain values nor such words."""
    from trainkit.config import yaml_reader

    if not isinstance(changes, Mapping):
        words = (changes,) if isinstance(changes, str) else changes
        return _texts(words, "changes", "a dict of keys and values, or a list of words such as optim.lr=0.1")
    try:
        plain = json.loads(json.dumps(dict(changes), default=_plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError("changes", f"{error}"[:200], "numbers, texts, lists and blocks of these") from None
    return tuple(f"{key}={yaml_reader.flow(value)}" for key, value in plain.items())


def _plain(value: Any) -> Any:
    """Return what JSON takes of numpy, torch and paths. Raises TypeError for anything else."""
    return value.tolist() if hasattr(value, "tolist") else os.fspath(value)


def _texts(given: object, where: str, expected: str) -> tuple[str, ...]:
    """Return a sequence of texts as a tuple. Raises UserError for anything else, a single text too."""
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(word, str) for word in given):
        raise UserError(where, f"{given!r:.80}", expected)
    return tuple(given)


def _path(given: object, where: str) -> str:
    """Return a path or name as text. Raises UserError for anything else."""
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else given
    if not isinstance(text, str) or not text or "\0" in text:
        raise UserError(where, f"{given!r:.80}", "a path or a name")
    return text
