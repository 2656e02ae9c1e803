"""The settings of a sweep: keys with several values or a range, and settings of them that Optuna proposes."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainkit.config import loader
from trainkit.config.metric_table import Mode
from trainkit.config.run_request import RunRequest, Sweep, load, values_of
from trainkit.config.schema import Recipe
from trainkit.errors import UserError

_NUMBER = r"[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?"
_RANGE = re.compile(rf"(log:)?({_NUMBER})\.\.({_NUMBER})")

Setting = dict[str, str]
"""Key to value, as the words of a request write them."""


@dataclass(frozen=True)
class Axis:
    """A key of the recipe with several values: a list, or a range."""

    key: str
    values: tuple[str, ...]
    """As the command line writes them; of a range its ends."""
    span: tuple[float, float] | None = None
    """The ends of a range, both part of it."""
    log: bool = False
    """A range is even in the logarithm."""
    whole: bool = False
    """A range is one of whole numbers."""

    def distribution(self) -> Any:
        """Return the distribution of Optuna from which its values are proposed."""
        from optuna import distributions

        if self.span is None:
            return distributions.CategoricalDistribution(self.values)
        low, high = self.span
        if self.whole:
            return distributions.IntDistribution(int(low), int(high), log=self.log)
        return distributions.FloatDistribution(low, high, log=self.log)

    def text(self, value: Any) -> str:
        """Write a proposed value as the recipe takes it; a fraction with four digits."""
        if self.span is None or self.whole:
            return str(value)
        return repr(min(max(float(f"{value:.4g}"), self.span[0]), self.span[1]))

    def number(self, text: str) -> Any:
        """Return the value of a setting as Optuna knows it."""
        return text if self.span is None else int(text) if self.whole else float(text)


def read(request: RunRequest) -> tuple[list[str], list[Axis]]:
    """Return the arguments of a request with one value, and the axes of the others.

    Raises UserError for arguments that are not a sweep.
    """
    how, fixed, axes = request.sweep or Sweep(), [], []
    for word in request.overrides:
        key, _, text = (part.strip() for part in word.partition("="))
        values = tuple(values_of(text))
        if match := _RANGE.fullmatch(text):
            axes.append(_range(word, key, match))
        elif len(values) == 1:
            fixed.append(word)
        elif "" in values:
            raise UserError(word, "a value is missing beside a comma", remedy=f"write it like {key}=0.1,0.05")
        else:
            axes.append(Axis(key, values))
    if not axes:
        load_setting(request, fixed, {})
        expected = "an argument such as optim.lr=0.1,0.05"
        raise UserError("sweep", "no argument gives several values", expected, "of one setting: trainkit run")
    if ranges := [axis.key for axis in axes if axis.span]:
        if not how.proposed:
            found = f"{ranges[0]} is a range, and a grid has no number of them"
            remedy = "list its values, or say how many settings: --random 20 or --tpe 20"
            raise UserError("sweep", found, remedy=remedy)
        # Which of them are of whole numbers is for the recipe to say.
        flat = loader.flat(load_setting(request, fixed, {axis.key: axis.values[0] for axis in axes}))
        axes = [replace(axis, whole=bool(axis.span) and isinstance(flat.get(axis.key), int)) for axis in axes]
    return fixed, axes


def _range(word: str, key: str, match: re.Match[str]) -> Axis:
    try:
        low, high = float(match[2]), float(match[3])
    except ValueError:
        low = high = math.nan
    if not -math.inf < low < high < math.inf or (match[1] and low <= 0):
        remedy = f"write it like {key}=0.01..0.1"
        raise UserError(word, "is not a range", "two numbers, the lower one first, above 0 with log:", remedy)
    return Axis(key, (match[2], match[3]), (low, high), bool(match[1]))


def words_of(fixed: Sequence[str], setting: Mapping[str, str]) -> tuple[str, ...]:
    """Return the overrides of a setting, after those that all settings share."""
    return (*fixed, *(f"{key}={value}" for key, value in setting.items()))


def load_setting(request: RunRequest, fixed: Sequence[str], setting: Setting) -> Recipe:
    """Load the recipe of one setting."""
    return load(replace(request, overrides=words_of(fixed, setting)))


def require_optuna() -> None:
    """Raise UserError if Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise UserError("sweep", "--random and --tpe need Optuna", remedy='pip install "trainkit[sweep]"')


def propose(axes: Sequence[Axis], results: Sequence[tuple[Setting, float]], mode: Mode, random: bool) -> Setting:
    """Return the setting that Optuna proposes after these, with their scores: the same after the same.

    Its sampler is random, or a tree-structured Parzen estimator (Bergstra et al., NeurIPS 2011) of which the first ten
    are random. Settings without a score count for nothing.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    samplers, number = optuna.samplers, len(results)
    sampler = samplers.RandomSampler(seed=number) if random else samplers.TPESampler(seed=number)
    direction = optuna.study.StudyDirection[f"{mode}imize".upper()]
    study = optuna.create_study(direction=direction, sampler=sampler)
    space = {axis.key: axis.distribution() for axis in axes}
    for setting, value in results:
        if math.isfinite(value):
            params = {axis.key: axis.number(setting[axis.key]) for axis in axes}
            study.add_trial(optuna.trial.create_trial(params=params, distributions=space, value=value))
    found = study.ask(space).params
    return {axis.key: axis.text(found[axis.key]) for axis in axes}
