"""Validate the recipes of a request before any work: those that it trains, and those that train their weights first.

`check`, `run --check`, `preflight` and `run` call `validate`. What it does not refuse, no run refuses before its first
step, but for what only an evaluation, the device or the store can tell: a teacher at chance level, memory, a full disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from trainkit.analysis import data_integrity
from trainkit.checkpoint import safe_load
from trainkit.config import loader
from trainkit.config.run_request import RunRequest, beside, load
from trainkit.config.schema import Recipe
from trainkit.distributed import launch_settings
from trainkit.errors import UserError
from trainkit.experiments.timm_names import refuse_unknown
from trainkit.interfaces import ChecksMicroBatch, Dataset, DeclaresMetrics, Networks, Source, Split
from trainkit.models import recomputation
from trainkit.paths import recipe_word
from trainkit.tracking.store import Store
from trainkit.training import best, dependencies, optimizer, plan, teacher_cache

TRIED = 8
"""Recipes of a group, of different networks or data, that are validated with their networks. Of the others, on data
that is open already, the length, the batches and the evaluations are."""
_TRIAL = 4
"""Samples that a task predicts for its metrics to be known."""

Open = Callable[[Recipe], Dataset | None]
"""Opens the data of a recipe; None where that is left to its run."""


def data_key(recipe: Recipe) -> str:
    """Return what the opened data of a recipe is known by."""
    return f"{recipe.seed} {recipe.data!r}"


def validate(request: RunRequest, recipes: Sequence[Recipe], world: int, opened: Open, precision: str = "") -> None:
    """Raise the UserError with which the run of one of these recipes, or of one that they need, would end.

    `world` is the number of processes, `precision` that of the launch if it is known.
    """
    refuse_unknown(*recipes)
    validation = _Validation(world, opened, precision or launch_settings.precision(recipes[0]).value)
    seen: set[str] = set()
    for recipe in recipes:
        rules = (recipe.best, recipe.stop_when, recipe.promote)
        optim = (recipe.optim.groups, recipe.optim.clip_agc, recipe.optim.layer_decay, recipe.optim.name)
        parts = repr((recipe.task, recipe.data, recipe.train, recipe.evaluations, rules, optim))
        if parts in seen:
            continue
        seen.add(parts)
        if len(seen) > TRIED:
            validation.planned(recipe)
        else:
            with tempfile.TemporaryDirectory(prefix="validate-") as scratch:
                validation.recipe(RunRequest(request.path, plugins=request.plugins), recipe, Path(scratch))


@dataclass
class _Validation:
    world: int
    opened: Open
    precision: str
    above: list[Path] = field(default_factory=list)
    """Recipes that need the one at hand."""
    data: dict[str, Dataset | None] = field(default_factory=dict)
    """What was opened, by `data_key`."""

    def planned(self, recipe: Recipe) -> None:
        """Validate the plan of a recipe without its networks, where its data is open."""
        launch_settings.check(recipe)
        if (data := self.data.get(data_key(recipe))) is not None:
            plan.divided(recipe, data, self.world)
            plan.evaluated(recipe, data)
            self._cut(recipe, data)

    def _cut(self, recipe: Recipe, data: Dataset) -> None:
        cut = plan.Plan.make(recipe, data, self.world, 0)
        plan.refuse_unheld(recipe, cut)
        if isinstance(recipe.task, ChecksMicroBatch):
            recipe.task.check_micro_batch(cut.micro_batch)

    def recipe(self, request: RunRequest, recipe: Recipe, scratch: Path) -> Networks | None:
        """Validate a recipe and those that it needs; return its networks, None where they cannot be built yet."""
        launch_settings.check(recipe)
        launch_settings.refuse_other_precision(recipe, self.precision)
        data = self.data[data_key(recipe)] = self.opened(recipe)
        if data is not None:
            plan.divided(recipe, data, self.world)
            plan.updates(recipe, data, self.world)
            plan.refuse_unfitted(recipe, data)
            splits = plan.evaluated(recipe, data)
            if recipe.integrity.policy == "refuse":
                report = data_integrity.of(data, Store.locate().home / data_integrity.FOLDER)
                if report is not None:
                    report.refuse()
            for name, split in splits.items():
                if isinstance(recipe.task, DeclaresMetrics):
                    _refuse_unmeasured(recipe, name, recipe.task.measures(split))
        self.above.append(request.path.resolve())
        found = {
            name: self._weights(request, recipe, name, source, scratch)
            for name, source in recipe.task.required_weights().items()
        }
        self.above.pop()
        return None if data is None else self._networks(recipe, data, found)

    def _weights(
        self, request: RunRequest, needing: Recipe, name: str, source: Source, scratch: Path
    ) -> _Weights | None:
        """Return weights that a recipe needs: as they are, or as the recipe that is to train them will save them."""
        if source.recipe is None:
            word, where = source.weights or "", f"task.{name}.weights"
            if word.startswith(dependencies.MODEL):  # which only MLflow can find
                return None
            file = dependencies.find(word, Store.locate(), where, recipe_word(request.path))
            return _Weights(file, str(file))
        child = RunRequest(beside(request.path, source.recipe), plugins=request.plugins)
        if child.path.resolve() in self.above:
            raise UserError(f"task.{name}.recipe", f"{child.path.name} would need its own weights", "another recipe")
        child = dependencies.with_split_of(child, loader.tree(needing), request.path.name, makes=True)
        recipe = load(child)
        refuse_unknown(recipe)
        (folder := scratch / name).mkdir()
        networks = self.recipe(child, recipe, folder)
        if networks is None:
            return None
        safe_load.write_tensors(file := scratch / f"{name}.safetensors", networks.model.state_dict())
        return _Weights(file, str(child.path))

    def _networks(self, recipe: Recipe, data: Dataset, found: Mapping[str, _Weights | None]) -> Networks | None:
        """Build the networks of a recipe, and refuse what does not fit them."""
        files = {name: weights.file for name, weights in found.items() if weights is not None}
        try:
            with torch.random.fork_rng(devices=[]):
                networks = recipe.task.build(data.meta, files, recipe.seed)
        except KeyError as error:
            if error.args[:1] in [(name,) for name in found.keys() - files.keys()]:
                return None
            raise
        except UserError as error:
            for weights in filter(None, found.values()):
                if error.where == str(weights.file) != weights.said:
                    raise UserError(weights.said, error.found, error.expected, error.remedy) from error
            raise
        if recipe.train.activation_checkpointing:
            recomputation.apply(networks.model)
        optimizer.build(networks.model, recipe.optim)
        self._cut(recipe, data)
        teacher_cache.refuse_uncountable(networks, data.train)
        for name, split in plan.evaluated(recipe, data).items():
            if not isinstance(recipe.task, DeclaresMetrics) and best.named_of(recipe, name):
                _refuse_unmeasured(recipe, name, _tried(recipe, networks, split))
        return networks


@dataclass(frozen=True)
class _Weights:
    file: Path
    said: str
    """What messages call it."""


def _refuse_unmeasured(recipe: Recipe, name: str, metrics: Collection[str] | None) -> None:
    if metrics is not None:
        titles = (name, f"{name}/ema") if recipe.train.ema else (name,)
        best.refuse_unmeasured(recipe, name, [f"{title}/{metric}" for title in titles for metric in metrics])


def _tried(recipe: Recipe, networks: Networks, split: Split) -> Collection[str] | None:
    """Return the metrics of a task that does not declare them, from a trial: a few samples stand for all.

    None where the trial fails: what is wrong is then said by the first evaluation.
    """
    few = np.arange(min(_TRIAL, split.at_once or _TRIAL, split.size))
    networks.model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            rows = recipe.task.predict(networks.model, split.on_device(split.fetch(few, epoch=0)))
            again = torch.arange(split.size) % len(few)
            return recipe.task.score({key: value.float()[again] for key, value in rows.items()}, split).metrics
    except Exception:
        return None
