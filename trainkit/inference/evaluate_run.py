"""Evaluate trained weights on any evaluation of any data, and log the metrics as a child run of their run.

The network is built for the classes that it was trained on; the settings of the task, the data and the evaluations are
those of the recipe.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit import terminal
from trainkit.checkpoint.verification import STATE
from trainkit.config import loader
from trainkit.config.run_request import RunRequest, load
from trainkit.data.split import named_sets
from trainkit.errors import UserError, few
from trainkit.evaluation_protocols import NamesClasses
from trainkit.inference.trained_model import read_meta
from trainkit.interfaces import Dataset, DatasetInfo, Scores, Split
from trainkit.tracking import lineage
from trainkit.tracking.run_folder import META, RunFolder
from trainkit.tracking.run_lifecycle import ending
from trainkit.tracking.store import Store
from trainkit.tracking.tracker import Silent, Tracker
from trainkit.training import dependencies, evaluator
from trainkit.training.best import best_weights
from trainkit.training.dependencies import gather

if TYPE_CHECKING:
    from torch import nn

    from trainkit.config.schema import Best, Recipe
    from trainkit.distributed.runtime import Runtime

EVALUATES = "trainkit.evaluates"
"""Tag of an evaluation's run: the run, or the file, whose weights it evaluated."""


@dataclass(frozen=True)
class Subject:
    """Weights that are evaluated."""

    file: Path
    """File of the weights."""
    step: int
    """Optimizer step of the weights; 0 if unknown."""
    run: RunFolder | None
    """The run that trained them; None if unknown."""

    @property
    def name(self) -> str:
        """Name of its run, or of its file."""
        return self.run.name if self.run else str(self.file)


def find(word: str, store: Store) -> Subject:
    """Find weights by name: the best of a run, those of a checkpoint's folder, a file, or `models:/ID`.

    Raises UserError if there are none.
    """
    if word.startswith(dependencies.MODEL):
        return Subject(store.model_file(word), 0, None)
    named = store.find_or_path(word)
    run = named if isinstance(named, RunFolder) else None
    if isinstance(named, RunFolder):
        file = best_weights(named.path)
    elif named.is_dir() and (named / STATE).is_file():
        file = dependencies.in_folder(named)
    elif named.is_dir():
        expected = "a run, a checkpoint (.../checkpoints/step-000000120), a file of weights or models:/ID"
        raise UserError(word, f"a folder without {STATE}", expected, "check the name")
    else:
        file = named
    step = re.fullmatch(r"step-(\d+)", file.absolute().parent.name)
    if run is None and step:
        run = dependencies.run_of(file)
    return Subject(file, int(step[1]) if step else 0, run)


def names_run(word: str) -> bool:
    """Return True where weights were named by their run, and not as a file, a checkpoint or a logged model."""
    return not word.startswith(dependencies.MODEL) and isinstance(Store.locate().find_or_path(word), RunFolder)


def request_for(word: str, recipe: Path | None, overrides: tuple[str, ...], plugins: tuple[str, ...]) -> RunRequest:
    """Return the request for a recipe, by default the run's own, with overrides.

    Raises UserError for weights of an unknown run without a recipe.
    """
    if recipe is None:
        run = find(word, Store.locate()).run
        if run is None:
            expected = "a recipe with task, data and evaluations"
            raise UserError(word, "weights of an unknown run", expected, "run `trainkit evaluate WEIGHTS RECIPE`")
        return RunRequest(run.recipe, overrides, plugins, settings=run.recipe)
    return RunRequest(recipe, overrides, plugins)


def evaluate(request: RunRequest, word: str, log: bool = True) -> dict[str, float]:
    """Evaluate the weights `word` on every evaluation of a request's recipe, and print the metrics.

    With `log` they are logged as a child run of the run that trained the weights, with the rows of every sample.
    Returns them by full name. Raises UserError for weights that do not fit, data of other classes or modalities, and a
    recipe without evaluations.
    """
    recipe = _recipe(request)
    if not recipe.evaluations:
        raise UserError(str(request.path), "no evaluations", "one or more", "add one with evaluations='{NAME: {}}'")
    from trainkit.checkpoint import safe_load
    from trainkit.distributed.runtime import Runtime
    from trainkit.training import plan

    runtime, store = Runtime(recipe), Store.locate()
    try:
        file, step, path = runtime.on_main(lambda: _plain(find(word, store)))
        subject = Subject(Path(file), step, RunFolder(Path(path)) if path else None)
        overrides = runtime.on_main(lambda: list(_with_its_split(request, subject).overrides))
        request = replace(request, overrides=tuple(overrides))
        recipe = _recipe(request)
        data = recipe.data.open(recipe.seed)
        splits = plan.evaluated(recipe, data)
        meta = _meta(subject, data, splits)
        net = _network(recipe, meta, request, runtime, store)
        safe_load.load_into(net, safe_load.read_tensors(subject.file), file)
        runtime.to_memory_format(net)
        metrics: dict[str, float] = {}
        with _tracked(request, recipe, subject, data, splits, runtime, store, log) as tracker:
            for name, split in splits.items():
                begun = time.perf_counter()
                scores = evaluator.evaluate(recipe.task, net, split, recipe.evaluations[name].batch_size, runtime)
                if runtime.main:
                    _keep(tracker, recipe, name, split, scores, step, time.perf_counter() - begun)
                metrics |= {f"{name}/{key}": value for key, value in scores.metrics.items()}
            if runtime.main:
                tracker.log(step, {f"final/{name}": value for name, value in metrics.items()})
                tracker.finish("FINISHED")
        runtime.barrier()  # other ranks wait until rank 0 has written everything
    finally:
        runtime.close()
    if runtime.main:
        rows = [[key, *terminal.numbers([value])] for key, value in metrics.items()]
        said = [f"{name}: {rule}" for name, rule in plan.protocol_rules(splits).items()]
        print(terminal.shown([terminal.Table([["metric", "value"], *rows]), *said], sys.stdout), flush=True)
    return metrics


def _with_its_split(request: RunRequest, subject: Subject) -> RunRequest:
    """Return the request with the split of the run whose weights are evaluated, where that is known."""
    try:
        trained, named = dependencies.trained_by(subject.file)
    except UserError:
        return request
    return dependencies.with_split_of(request, trained, named, recipe=_recipe(request))


def _recipe(request: RunRequest) -> Recipe:
    """Load the recipe without `best`, early stopping and the like, which may name evaluations that it lacks."""
    given = [f"{word.partition('=')[0].strip()}." for word in request.overrides]
    without = {"best": "null", "stop_when": "null", "promote": "null", "train.schedule": "{}"}
    words = [f"{key}={nothing}" for key, nothing in without.items() if not any(g.startswith(f"{key}.") for g in given)]
    return load(replace(request, overrides=(*request.overrides, *words)))


def _network(recipe: Recipe, meta: DatasetInfo, request: RunRequest, runtime: Runtime, store: Store) -> nn.Module:
    """Build the network of a task, without its initial weights if possible."""
    try:
        return recipe.task.build(meta, {}, recipe.seed).model
    except KeyError:
        found = {name: dependency.file for name, dependency in gather(request, recipe, runtime, store, None).items()}
        return recipe.task.build(meta, found, recipe.seed).model


def _plain(subject: Subject) -> tuple[str, int, str]:
    return str(subject.file), subject.step, str(subject.run.path) if subject.run else ""


def _meta(subject: Subject, data: Dataset, splits: Mapping[str, Split]) -> DatasetInfo:
    """Describe the data for the network: classes and modalities of its training, and images of this data.

    Raises UserError if the evaluations have others.
    """
    if subject.run is None or not (subject.run.path / META).is_file():
        return data.meta
    trained = read_meta(subject.run)
    own = tuple(trained.class_names) or tuple(map(str, range(trained.classes)))
    for name, split in splits.items():
        # Pairs, searches and retrieval do not depend on the training classes.
        if isinstance(split.protocol, NamesClasses) and tuple(split.protocol.names) != own:
            found = f"classes {few(split.protocol.names, 8)}"
            expected = f"the classes that {subject.name} was trained on: {few(own, 8)}"
            raise UserError(f"evaluations.{name}", found, expected, "use data with these classes")
    if data.meta.modalities != tuple(trained.modalities):
        found = f"modalities {', '.join(data.meta.modalities) or 'none'}"
        expected = f"those that {subject.name} was trained on: {', '.join(trained.modalities) or 'none'}"
        raise UserError("data", found, expected, "use data with these modalities")
    kept = {key: getattr(trained, key) for key in ("classes", "class_names", "vocabulary", "text_length")}
    return replace(data.meta, **kept)


@contextlib.contextmanager
def _tracked(
    request: RunRequest,
    recipe: Recipe,
    subject: Subject,
    data: Dataset,
    splits: Mapping[str, Split],
    runtime: Runtime,
    store: Store,
    log: bool,
) -> Iterator[Tracker | Silent]:
    """Open the tracker of the evaluation's run; one that does nothing without `log`, and on other ranks."""
    from trainkit.training.plan import protocol_rules

    tracker: Tracker | Silent = Silent()
    rules = protocol_rules(splits)

    def start() -> None:
        nonlocal tracker
        store.ready()
        made_by = subject.run.info() if subject.run else None
        lead = _lead(subject, recipe, request)
        folder = store.new_run(f"evaluate-{recipe.name}", recipe.seed, loader.digest(recipe))
        folder.recipe.write_text(loader.dump(recipe), encoding="utf-8")
        tracker = Tracker.start(
            folder,
            store,
            experiment=(made_by and made_by.experiment) or recipe.log.experiment or recipe.name,
            run_name=folder.name,
            params={
                **loader.flat(recipe),
                **{f"machine.{k}": v for k, v in runtime.describe().items()},
                **{f"protocol.{name}": rule for name, rule in rules.items()},
            },
            tags={
                "trainkit.recipe": recipe.name,
                EVALUATES: subject.name,
                "trainkit.weights": f"{subject.file.parent.name}/{subject.file.name}",
                lineage.DATA: data.meta.digest,
                **lineage.digests(splits),
            },
            parent=made_by.name if made_by else None,
            primary_metric=lead.metric if lead else None,
            higher_is_better=lead is None or not lead.lower,
            system_metrics_every=0.0,
        )
        folder.update(data_digest=data.meta.digest, evaluates=subject.name)
        if rules:
            tracker.event(0, "protocols", rules)
        tracker.artifact_text("recipe/resolved.yaml", loader.dump(recipe))
        tracker.artifact_text("recipe/original.yaml", request.path.read_text(encoding="utf-8"))
        tracker.artifact_text("recipe/overrides.txt", "".join(f"{word}\n" for word in request.overrides))
        print(f"run {folder.name}: {subject.file} on {', '.join(recipe.evaluations)}", flush=True)

    with ending(lambda: tracker, unbegun=lambda: tracker.position() == 0):
        if log:
            runtime.on_main(start)
        yield tracker


def _lead(subject: Subject, recipe: Recipe, request: RunRequest) -> Best | None:
    """Return `best` of the run's own recipe, which ranks its experiment."""
    if subject.run is None:
        return recipe.best
    try:
        return loader.load(subject.run.recipe, (), tuple(request.plugins), stored=True).best
    except UserError:
        return recipe.best


def _keep(
    tracker: Tracker | Silent, recipe: Recipe, name: str, split: Split, scores: Scores, step: int, seconds: float
) -> None:
    """Log one evaluation: metrics, rows, tables, images, curves."""
    from trainkit.plots import run_figures

    values = {f"{name}/{key}": value for key, value in scores.metrics.items()}
    tracker.log(step, {**values, f"eval/{name}/unique_samples": scores.samples, f"time/eval_{name}_s": seconds})
    if isinstance(tracker, Silent):
        return
    source = named_sets(recipe.data).get(split.name.partition(".")[0], "")
    tracker.dataset(split.name, "test", split.digest, source, split.size)
    if scores.rows and recipe.log.rows:
        tracker.table(f"rows/{name}_final.parquet", scores.rows)
    for kind, columns in scores.tables.items():
        tracker.table(f"tables/{name}_{kind}_last.csv", columns)
    if scores.pictures:
        run_figures.keep_pictures(tracker, step, name, scores.pictures)
    run_figures.draw(tracker, {name: {"this run": scores.curves}})
