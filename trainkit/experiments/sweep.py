"""`trainkit sweep`: train a recipe with several settings of some keys, and rank them.

An argument with several values is an axis: `optim.lr=0.1,0.05`. All combinations are tried (grid), or a number of
settings that are sampled at random or proposed by Optuna (`optuna_search`), for which an argument may also be a range:
`optim.lr=log:1e-3..1e-1`. Each setting is a child of a parent run. Settings are a pure function of the arguments and of
the scores of earlier ones, so a sweep that is started again tries the same settings and reuses their runs.
"""

from __future__ import annotations

import itertools
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.config import loader, stored_recipes
from trainkit.config.metric_table import SIGNS, Mode
from trainkit.config.run_request import RunRequest, Sweep
from trainkit.config.schema import Best, Recipe
from trainkit.errors import UserError
from trainkit.experiments import group, optuna_search
from trainkit.experiments.group import Child, Parent, RunGroup, child_of
from trainkit.experiments.search_space import Axis, Setting, check_count, drawn, load_setting, read, words_of
from trainkit.terminal import aligned, numbers
from trainkit.tracking import journal
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store
from trainkit.tracking.tracker import Silent, Tracker

if TYPE_CHECKING:
    from trainkit.distributed.runtime import Runtime

_SHOWN = 20
"""Settings in the printed table; all are in MLflow."""


def settings(request: RunRequest) -> list[Child]:
    """Return the settings of a sweep in the order in which they are tried; one example if Optuna proposes them.

    All are checked here. Raises UserError for arguments that are not a sweep, and for invalid settings.
    """
    how = request.sweep or Sweep()
    fixed, axes = read(request)
    if how.tpe is not None or how.pruner is not None:
        optuna_search.require()
    first = {axis.key: axis.values[0] for axis in axes}
    recipe = load_setting(request, fixed, first)
    scored = _best(recipe).metric.partition("/")[0]
    if how.pruner is not None and recipe.evaluations[scored].every is None:
        found = f"{scored} is evaluated only at the end, when pruning saves nothing"
        raise UserError("--pruner", found, remedy=f"add an override such as evaluations.{scored}.every='1 epoch'")
    if how.tpe is not None:
        others = [{**first, axis.key: value} for axis in axes for value in axis.values[1:]]
        _comparable([_child(request, fixed, number, setting) for number, setting in enumerate([first, *others])])
        chosen = [first]
    elif how.random is not None:
        chosen = list(drawn(axes, how.random, how.draws))
    else:
        check_count(math.prod(len(axis.values) for axis in axes))
        chosen = [
            dict(zip(first, values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))
        ]
    found = [_child(request, fixed, number, setting) for number, setting in enumerate(chosen)]
    _comparable(found)
    return found


def _comparable(children: Sequence[Child]) -> None:
    """Raise UserError for settings that one launch cannot train, or that nothing tells apart."""
    first, known = children[0].recipe, {}
    for child in children:
        recipe, said = child.recipe, child.said
        if (recipe.device, recipe.train.precision) != (first.device, first.train.precision):
            found = "a launch has one `device` and one `train.precision`, and a sweep is one launch"
            raise UserError(said, found, remedy="run each on its own, then trainkit compare")
        held, others = (stored_recipes.division(loader.tree(one)) for one in (recipe, first))
        if (key := next((key for key in {**others, **held} if held.get(key) != others.get(key)), None)) is not None:
            found = f"not comparable: data.{key} gives every setting other held-out data"
            raise UserError(said, found, remedy="keep one split, and vary `seed`")
        if recipe.best != first.best:
            raise UserError(said, "all settings must have the same `best`", remedy="leave it unchanged in the recipe")
        if (same := known.setdefault(loader.digest(recipe), said)) != said:
            remedy = "leave one of them out; keys that change only the speed are measured by trainkit bench"
            raise UserError(said, f"is the same experiment as {same}", remedy=remedy)


def _best(recipe: Recipe) -> Best:
    """Return the rule by which settings are compared. Raises UserError for a recipe without one."""
    if recipe.best is None:
        found = f"{recipe.name} does not name the metric by which settings are compared"
        raise UserError("best", found, "best: {metric: EVALUATION/SCORE}")
    return recipe.best


def _child(request: RunRequest, fixed: Sequence[str], number: int, setting: Setting) -> Child:
    return child_of(request, f"trial {number}", words_of(fixed, setting), setting)


# ---- The sweep -------------------------------------------------------------------------------------------------------


@dataclass
class Trial:
    """One setting, its run and its score."""

    title: str
    setting: Mapping[str, str]
    state: str = "finished"
    """Or `pruned`: ended since it fell behind; or `failed`."""
    run: str = ""
    """Name of its run; empty where it came to have none."""
    value: float = math.nan
    """The best score of the metric that the recipe's `best` names."""
    step: int = 0
    """At which that was."""
    seconds: float = math.nan
    """Until its last checkpoint, those before an interruption too."""
    why: str = ""
    """Why it was pruned, or failed."""


def sweep(request: RunRequest, children: Sequence[Child], runtime: Runtime, store: Store, train: group.Train) -> str:
    """Train every setting that has no finished run, and compare them in a parent run. Returns its status.

    On one process a setting that fails is recorded and the others are tried; on several processes the sweep ends,
    because some processes may be gone. Raises UserError for errors that the user can correct, and if no setting
    finished.
    """
    how, recipe, digests = request.sweep or Sweep(), children[0].recipe, {}
    fixed, axes = read(request)
    for one in children:  # what is wrong with the data of the last shows now
        group.child_key(one, digests)
    with_study = how.tpe is not None or how.pruner is not None
    study = optuna_search.Study(axes, how, _best(recipe).better) if with_study and runtime.main else None
    said = [word for word in request.overrides if word not in fixed]
    keys, identity = [axis.key for axis in axes], (*said, repr(how))
    whole = RunGroup(request, children, "sweep", "sweep", "settings", keys, how.tpe or 0, identity)
    trials: list[Trial] = []
    with group.parent_run(whole, runtime, store, train) as parent:
        parent.tracker.tags({"trainkit.axes": shlex.join(said)})
        for number in range(whole.size):
            setting = runtime.on_main(lambda number=number: study.begin(number) if study else {}) if with_study else {}
            try:
                one = children[number] if how.tpe is None else _child(request, fixed, number, setting)
                trial = _run_trial(one, group.child_key(one, digests), parent, study, with_study)
            except UserError as error:
                if runtime.world > 1:
                    raise
                runtime.accelerator.free_memory()
                trial = _failed(f"trial {number}", error, parent)
                if study is not None:
                    study.end("failed", math.nan)
            if trial is None:
                parent.stop(number)
                return "KILLED"
            trial.setting = setting if how.tpe is not None else children[number].setting
            trials.append(trial)
            _log(trials, recipe, parent.tracker)
        if not any(trial.state == "finished" for trial in trials):
            raise UserError(
                "sweep", f"none of the {whole.size} settings finished", remedy=f"the first: {trials[0].why}"
            )
        runtime.on_main(lambda: _conclude(request, fixed, axes, trials, parent))
    return "FINISHED"


@dataclass
class PruningWatch:
    """Report the evaluations of a run to a study that may prune it, on rank 0: a `group.Watch`."""

    study: optuna_search.Study
    metric: str
    why: str = ""
    """Why it ends; empty where it does not."""
    seen: set[int] = field(default_factory=set)
    """Steps of the evaluations that were told."""

    def __call__(self, step: int, scores: Mapping[str, float]) -> bool:
        """Report an evaluation behind the first update; return whether the run is to end."""
        if step > 0 and step not in self.seen and self.metric in scores and not self.why:
            self.seen.add(step)
            if self.study.report(scores[self.metric]):
                place = f"evaluation {len(self.seen)}, step {step}"
                self.why = f"{self.metric} {scores[self.metric]:.4g} at {place} fell behind other settings"
        return bool(self.why)

    def replay(self, run: RunFolder) -> bool:
        """Report the evaluations of an existing run, up to where it is to end; return whether it is."""
        points = journal.read(run.journal).metrics.get(self.metric, [])
        return any(self(point.step, {self.metric: point.value}) for point in points)


def _run_trial(
    child: Child, key: str, parent: Parent, study: optuna_search.Study | None, with_study: bool
) -> Trial | None:
    """Train a setting, or find its run; None when told to stop. `study` is that of the first process."""
    from trainkit.checkpoint import storage

    runtime, metric = parent.runtime, _best(child.recipe).metric
    watch = PruningWatch(study, metric) if study is not None and study.prunes else None
    earlier = runtime.on_main(lambda: _pruned_before(child, key, parent, watch) if watch else "") if with_study else ""
    if earlier:
        status, folder = "KILLED", RunFolder(Path(earlier))
    else:
        status, folder = parent.run_child(child, key, watch)
    why = runtime.broadcast(watch.why if watch else "") if with_study else ""
    if folder is None or (status != "FINISHED" and not why):
        return None
    state = "finished" if status == "FINISHED" else "pruned"

    def look() -> Trial:
        if watch is not None:
            watch.replay(folder)  # of a run used again; others are told already
        metrics = journal.read(folder.journal).metrics
        trial = Trial(child.title, {}, state, folder.name, why=why if state == "pruned" else "")
        if best := metrics.get(f"best/{metric}"):
            trial.value, trial.step = best[-1].value, best[-1].step
        if (newest := storage.newest_valid(folder.checkpoints)[0]) is not None:
            trial.seconds = float(storage.state_of(newest)["elapsed"])
        if state == "pruned":
            parent.tracker.adopt(folder.name, {"trainkit.pruned": why})
            parent.say(f"{child.title}: pruned: {why}")
        if study is not None:
            study.end(state, trial.value)
        return trial

    return runtime.on_main(look)


def _pruned_before(child: Child, key: str, parent: Parent, watch: PruningWatch) -> str:
    """Find the folder of a run of this setting that was pruned, and would be now; empty where there is none.

    Its evaluations are reported again: the study tells it from a run that was interrupted.
    """
    if parent.store.finished_with(key) is not None:
        return ""
    run = parent.store.newest_unfinished(child.recipe.name, loader.digest(child.recipe))
    if run is None or run.info().key != key or run.info().status != "KILLED" or not watch.replay(run):
        return ""
    parent.row(child, run, "reused, pruned")
    parent.adopt(child, run)
    return str(run.path)


def _failed(title: str, error: UserError, parent: Parent) -> Trial:
    """Note a setting that ended with an error, and its run where it came to have one."""
    parent.say(f"{title}: failed: {error}")
    for run in reversed(parent.store.runs()):
        info = run.info()
        if info.parent == parent.folder.name and info.status == "FAILED" and run.name not in parent.children.values():
            parent.note(title, run)
            return Trial(title, {}, "failed", run.name, why=str(error))
    return Trial(title, {}, "failed", why=str(error))


def _ranked(trials: Sequence[Trial], mode: Mode) -> list[Trial]:
    """Sort trials, the best first; after those that finished come the pruned, then the failed."""
    request = {"finished": 0, "pruned": 1, "failed": 2}

    def place(trial: Trial) -> tuple[int, bool, float]:
        lost = math.isnan(trial.value)
        return request[trial.state], lost, 0.0 if lost else -SIGNS[mode] * trial.value

    return sorted(trials, key=place)


def _log(trials: Sequence[Trial], recipe: Recipe, tracker: Tracker | Silent) -> None:
    """Log the newest setting's score and the best so far; the step is the setting's number."""
    metric, newest = _best(recipe).metric, trials[-1]
    scores = {} if math.isnan(newest.value) else {f"sweep/{metric}": newest.value}
    leader = _ranked(trials, _best(recipe).better)[0]
    if leader.state == "finished" and not math.isnan(leader.value):
        scores[f"sweep/best/{metric}"] = leader.value
    if scores:
        tracker.log(len(trials) - 1, scores)


def _conclude(
    request: RunRequest, fixed: Sequence[str], axes: Sequence[Axis], trials: Sequence[Trial], parent: Parent
) -> None:
    """Name the best setting, and keep and print the scores of all."""
    recipe = parent.group.recipe
    ranked = _ranked(trials, _best(recipe).better)
    best = ranked[0]
    parent.tracker.tags({"trainkit.best": best.run, "trainkit.best_setting": " ".join(words_of((), best.setting))})
    parent.tracker.adopt(best.run, {"trainkit.best_of": parent.folder.name})
    columns: dict[str, list[Any]] = {"trial": [trial.title for trial in ranked]}
    columns |= {key: [trial.setting.get(key, "") for trial in ranked] for key in best.setting}
    columns[_best(recipe).metric] = [trial.value for trial in ranked]
    for name in ("step", "state", "seconds", "run", "why"):
        columns[name] = [getattr(trial, name) for trial in ranked]
    parent.tracker.table("tables/sweep.csv", columns)
    plugins = [word for plugin in request.plugins for word in ("--plugin", plugin)]
    words = shlex.join([os.path.relpath(request.path), *plugins, *words_of(fixed, best.setting)])
    following = [
        (f"trainkit repeat {words}", "is the best setting better on average, or by luck?"),
        (f"trainkit promote {best.run}", "register the run of the best setting"),
    ]
    parent.conclude("\n".join([describe(recipe, ranked), *_edges(axes, trials, best)]), following)


def _edges(axes: Sequence[Axis], trials: Sequence[Trial], best: Trial) -> list[str]:
    """Sentences about keys of which the best setting has the least or the greatest of three or more numbers tried."""
    found = []
    for axis in axes:
        try:
            tried = sorted({float(trial.setting[axis.key]) for trial in trials if axis.key in trial.setting})
            value = float(best.setting[axis.key])
        except ValueError:  # words
            continue
        if len(tried) > 2 and value in (tried[0], tried[-1]):
            which, more = ("smallest", "smaller") if value == tried[0] else ("largest", "larger")
            found.append(
                f"Note: {axis.key}={best.setting[axis.key]} is the {which} value tried; a {more} one may be better"
            )
    return found


def describe(recipe: Recipe, ranked: Sequence[Trial]) -> str:
    """Return the settings as a table, best first."""
    best, shown = ranked[0], ranked[:_SHOWN]
    scores, seconds = numbers([trial.value for trial in shown]), numbers([trial.seconds for trial in shown])
    table = [["", *best.setting, _best(recipe).metric, "at step", "seconds", "run"]]
    for trial, score, took in zip(shown, scores, seconds, strict=True):
        step = str(trial.step) if score != "-" else "-"
        state = "" if trial.state == "finished" else f" ({trial.state})"
        cells = [trial.setting.get(key, "") for key in best.setting]
        table.append([f"{trial.title}{state}", *cells, score, step, took, trial.run or "-"])
    lines = [f"{recipe.name}: {len(ranked)} settings", "", *aligned(table)]
    if len(ranked) > len(shown):
        lines.append(f"and {len(ranked) - len(shown)} more in MLflow")
    return "\n".join([*lines, "", f"Best: {best.run}  {' '.join(words_of((), best.setting))}"])
