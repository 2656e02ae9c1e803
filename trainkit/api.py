"""The Python interface: train a recipe, load a model, compare runs; docs/python.ipynb shows it.

It does what the commands do, in the process that calls it. Mistakes raise `UserError`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.environment import min_versions
from trainkit.errors import UserError
from trainkit.paths import recipe_file
from trainkit.redact import hide_in_logs

if TYPE_CHECKING:
    import pandas as pd

    from trainkit.analysis.compare import Comparison
    from trainkit.config import schema
    from trainkit.config.run_request import RunRequest
    from trainkit.tracking.run_folder import RunFolder

__all__ = ["Compared", "Recipe", "Run", "UserError", "compare", "find_run", "recipe", "train"]

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

    @property
    def metrics(self) -> pd.DataFrame:
        """All metrics: a column for each, a row for each step at which one was logged."""
        import pandas as pd

        from trainkit.tracking import journal

        found = journal.read(self.folder.journal).metrics if self.folder.journal.is_file() else {}
        columns = {name: pd.Series({point.step: point.value for point in points}) for name, points in found.items()}
        return pd.DataFrame(columns).sort_index().rename_axis("step")


@dataclass(frozen=True)
class Compared:
    """Runs compared with the first of them. `str` of it is the text of `trainkit compare`."""

    comparison: Comparison = field(repr=False)

    @cached_property
    def scores(self) -> pd.DataFrame:
        """A row for each score of each run but the first: both values, the difference, its interval and verdict."""
        import pandas as pd

        columns = ("run", "name", "primary", "first", "value", "difference", "low", "high", "verdict", "why", "units")
        rows = [
            (s.run, s.name, s.primary, *s.values, s.difference, s.low, s.high, s.verdict, s.why, s.units)
            for s in self.comparison.scores
        ]
        return pd.DataFrame(rows, columns=list(columns))

    @cached_property
    def changes(self) -> pd.DataFrame:
        """A row for each key that another recipe has otherwise than the first."""
        import pandas as pd

        from trainkit.config import diff

        def value(side: Any) -> Any:
            return None if isinstance(side, diff.Absent) else side

        rows = [
            (pair.run, change.key, value(change.before), value(change.after))
            for pair in self.comparison.pairs
            for change in pair.changes
        ]
        return pd.DataFrame(rows, columns=["run", "key", "before", "after"], dtype=object)

    @cached_property
    def speed(self) -> pd.DataFrame:
        """A row for each rate, time and cost; a column for each run."""
        import pandas as pd

        rows = {one.name: one.values for one in self.comparison.speed}
        names = [side.name for side in self.comparison.sides]
        return pd.DataFrame.from_dict(rows, orient="index", columns=names)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences to know before anything is read off: other data, other tasks, runs that did not finish."""
        return self.comparison.notes

    def __str__(self) -> str:
        from trainkit.analysis import compare_report

        return compare_report.text(self.comparison)


def recipe(name: str | os.PathLike[str], changes: Changes = (), *, plugins: Sequence[str] = ()) -> Recipe:
    """Load a recipe, by its file or the name of one that ships, with changes. Raises UserError with every mistake."""
    _prepare()
    from trainkit.config import run_request

    words = _words(changes)
    request = run_request.RunRequest(recipe_file(os.fspath(name)), words, tuple(plugins))
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
    status KILLED. Raises UserError for what the user can mend; the run, where there is one, is then FAILED.
    """
    _prepare()
    from trainkit.config.run_request import RunRequest
    from trainkit.distributed.stop_signal import Stop
    from trainkit.experiments import launch

    words = _words(changes)
    if isinstance(recipe, Recipe):
        before, own = recipe.request, tuple(recipe.request.plugins)
        path, words, plugins = before.path, (*before.overrides, *words), (*own, *(p for p in plugins if p not in own))
    else:
        path = recipe_file(os.fspath(recipe))
    named = resume.name if isinstance(resume, Run) else resume
    if named == "":
        raise UserError("resume", "an empty name", "the name of a run")
    stop = Stop()
    with stop.interruptible():
        _, folder = launch.carry_out(RunRequest(path, words, tuple(plugins), named), stop)
    if folder is None:
        raise KeyboardInterrupt("told to stop before the run began")
    return Run(folder, folder.name)


def find_run(name: str) -> Run:
    """Find a run by its name, a beginning of it, its MLflow id, `last` or `best`. Raises UserError."""
    _prepare()
    from trainkit.tracking.store import Store

    folder = Store.locate().find(name)
    return Run(folder, folder.name)


def compare(*runs: str | Run) -> Compared:
    """Compare runs with the first, as `trainkit compare` does; nothing is kept in MLflow. Raises UserError."""
    _prepare()
    from trainkit.analysis import compare as comparing
    from trainkit.tracking.store import Store

    store = Store.locate()
    words = [run.name if isinstance(run, Run) else run for run in runs]
    return Compared(comparing.compare(store, comparing.resolve(store, words)))


def _prepare() -> None:
    """Refuse libraries with known holes, and keep secrets out of logs, as every command does."""
    min_versions.check()
    hide_in_logs()


def _words(changes: Changes) -> tuple[str, ...]:
    """Changes as words of a command."""
    from trainkit.config import yaml_reader

    if isinstance(changes, str):
        changes = (changes,)
    if not isinstance(changes, Mapping):
        return tuple(changes)
    return tuple(f"{key}={yaml_reader.flow(_plain(value, key))}" for key, value in changes.items())


def _plain(value: Any, key: str) -> Any:
    """A value as recipes hold it: of numpy and torch the number, of a path its text. Raises UserError."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, key) for inner in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if not isinstance(value, bool | int | float | str | None) and getattr(value, "ndim", None) == 0:
        value = value.item()
    if value is not None and not isinstance(value, bool | int | float | str):
        raise UserError(key, f"a value of type {type(value).__name__}", "a number, a text, a list or a block of these")
    return value
