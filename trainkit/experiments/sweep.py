"""`trainkit sweep`: a recipe trained with several settings of some of its keys, and which of them does best.

A word that gives several values is an axis: `optim.lr=0.1,0.05`. All combinations are tried (grid), or so many drawn at
random or proposed by Optuna (`advice`); for those a word may be a range too: `optim.lr=log:1e-3..1e-1`. Each setting is
a run of its own beneath a run above. Settings are a pure function of the words and of what earlier ones came to, so
that a sweep which is started again goes the same way, over runs that are there. Knows nothing of what is learned.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainkit import rng
from trainkit.config import loader
from trainkit.config.run_request import Order, load
from trainkit.config.schema import Recipe
from trainkit.errors import UserError
from trainkit.experiments import group
from trainkit.experiments.group import Child, Family, Parent, child_of
from trainkit.tracking import journal
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store

MOST = 1000
"""Settings that a grid may have."""
_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(log:)?({_NUMBER})\.\.({_NUMBER})")
_SHOWN = 20
"""Settings in the printed table; all are in MLflow."""

Setting = dict[str, str]
"""Key to value, as the words of an order write them."""


@dataclass(frozen=True)
class Axis:
    """A key of the recipe that takes several values: those that are listed, or any of a range."""

    key: str
    values: tuple[str, ...]
    """As the command line writes them; of a range its ends."""
    span: tuple[float, float] | None = None
    """The ends of a range, both part of it."""
    log: bool = False
    """Whether a range is even in the logarithm."""
    whole: bool = False
    """Whether a range is one of whole numbers."""

    def at(self, share: float) -> str:
        """The value at a share, from 0 up to but not 1, of the axis."""
        if self.span is None:
            return self.values[int(share * len(self.values))]
        low, high = self.span
        if self.log:
            return self.text(low * (high / low) ** share)
        return self.text(math.floor(low + share * (high - low + 1)) if self.whole else low + share * (high - low))

    def text(self, value: float) -> str:
        """A number of a range as a value of the recipe: whole, or to four digits."""
        if self.whole:
            return str(round(value))
        low, high = self.span
        return repr(min(max(float(f"{value:.4g}"), low), high))


# ---- Which settings --------------------------------------------------------------------------------------------------


def read(order: Order) -> tuple[list[str], list[Axis]]:
    """The words of an order that give one value, and the axes that the others are.

    Raises UserError for words that make no sweep.
    """
    how, fixed, axes = order.sweep, [], []
    for word in order.overrides:
        key, _, text = (part.strip() for part in word.partition("="))
        values = tuple(_values(text))
        if match := _RANGE.fullmatch(text):
            axes.append(_range(word, key, match))
        elif len(values) == 1:
            fixed.append(word)
        elif "" in values:
            raise UserError(word, "a value is missing beside a comma", remedy=f"write it like {key}=0.1,0.05")
        elif len(set(values)) < len(values):
            raise UserError(word, "gives a value twice", remedy="keep one of them")
        else:
            axes.append(Axis(key, values))
    if not axes:
        _load(order, fixed, {})
        expected = "a word such as optim.lr=0.1,0.05"
        raise UserError("sweep", "no word gives several values", expected, "of one setting: trainkit run")
    ranges = [axis for axis in axes if axis.span]
    if ranges and how.random is None and how.tpe is None:
        found = f"{ranges[0].key} is a range, and a grid has no number of them"
        raise UserError("sweep", found, remedy="list its values, or say how many settings: --random 20 or --tpe 20")
    if ranges:  # which of them are of whole numbers is for the recipe to say
        kinds = loader.flat(_load(order, fixed, {axis.key: axis.values[0] for axis in axes}))
        axes = [replace(axis, whole=bool(axis.span) and isinstance(kinds.get(axis.key), int)) for axis in axes]
    return fixed, axes


def settings(order: Order) -> list[Child]:
    """The settings of a sweep, in the order in which they are tried; of those that Optuna will propose an example.

    All are checked here. Raises UserError for words that make no sweep, and for a setting that the recipe refuses.
    """
    how = order.sweep
    fixed, axes = read(order)
    if how.tpe is not None or how.pruner is not None:
        from trainkit.experiments import optuna_search

        optuna_search.require()
    first = {axis.key: axis.values[0] for axis in axes}
    recipe = _load(order, fixed, first)
    if recipe.best is None:
        found = f"{recipe.name} does not say by which score settings are compared"
        raise UserError("best", found, "best: {metric: EVALUATION/SCORE}")
    scored = recipe.best.metric.partition("/")[0]
    if how.pruner is not None and recipe.evaluations[scored].every is None:
        found = f"{scored} is scored at the end alone, when nothing is left to be saved"
        raise UserError("--pruner", found, remedy=f"add a word such as evaluations.{scored}.every='1 epoch'")
    if how.tpe is not None:
        others = [{**first, axis.key: value} for axis in axes for value in axis.values[1:]]
        _comparable([_child(order, fixed, number, setting) for number, setting in enumerate([first, *others])])
        chosen = [first]
    elif how.random is not None:
        chosen = list(_drawn(axes, how.random, how.draws))
    else:
        _few_enough(math.prod(len(axis.values) for axis in axes))
        chosen = [
            dict(zip(first, values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))
        ]
    found = [_child(order, fixed, number, setting) for number, setting in enumerate(chosen)]
    _comparable(found)
    return found


def _comparable(children: Sequence[Child]) -> None:
    """Raise UserError for settings that one launch cannot train, or that nothing tells apart."""
    first, known = children[0].recipe, {}
    for child in children:
        recipe, said = child.recipe, child.said
        if (recipe.device, recipe.train.precision) != (first.device, first.train.precision):
            found = "a launch has one `device` and one `train.precision`, and a sweep is one launch"
            raise UserError(said, found, remedy="run each by itself, then trainkit compare")
        if recipe.best != first.best:
            raise UserError(said, "settings are compared by one `best`", remedy="leave it as it is in the recipe")
        if (same := known.setdefault(loader.digest(recipe), said)) != said:
            remedy = "leave one of them out; what only the speed depends on: trainkit bench"
            raise UserError(said, f"is the same experiment as {same}", remedy=remedy)


def _drawn(axes: Sequence[Axis], count: int, seed: int) -> Iterator[Setting]:
    """So many settings at random, no two alike. Raises UserError where there are not as many.

    What is drawn first does not depend on how many are, and of a key not on the other keys.
    """
    if all(axis.span is None for axis in axes):
        there_are = math.prod(len(axis.values) for axis in axes)
        if count >= there_are:
            raise UserError("--random", f"{count}, of {there_are} settings", remedy="leave it out to try them all")
    _few_enough(count)
    given: set[tuple[str, ...]] = set()
    for number in range(100 * count):
        setting = {axis.key: axis.at(float(rng.uniform(seed, axis.key, number)[0])) for axis in axes}
        if (values := tuple(setting.values())) not in given:
            given.add(values)
            yield setting
        if len(given) == count:
            return
    raise UserError("--random", f"{count}: no more than {len(given)} settings came up", remedy="ask for fewer")


def _few_enough(count: int) -> None:
    if count > MOST:
        raise UserError("sweep", f"{count} settings", f"at most {MOST}", "take fewer, such as --random 50")


def _values(text: str) -> list[str]:
    """What commas outside brackets and quotes part."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if letter == quote:
            quote = ""
        elif not quote and letter in "\"'":
            quote = letter
        elif not quote:
            depth += (letter in "[{") - (letter in "]}")
            if letter == "," and not depth:
                parts.append("")
                continue
        parts[-1] += letter
    return [part.strip() for part in parts]


def _range(word: str, key: str, match: re.Match[str]) -> Axis:
    low, high = float(match[2]), float(match[3])
    if not low < high:
        raise UserError(word, "the range ends where it begins, or before", remedy=f"write it like {key}=0.01..0.1")
    if match[1] and low <= 0:
        raise UserError(word, "a logarithm of numbers that are not above 0", remedy="leave log: out, or begin above 0")
    return Axis(key, (match[2], match[3]), (low, high), bool(match[1]))


def _words(fixed: Sequence[str], setting: Setting) -> tuple[str, ...]:
    return (*fixed, *(f"{key}={value}" for key, value in setting.items()))


def _load(order: Order, fixed: Sequence[str], setting: Setting) -> Recipe:
    return load(replace(order, overrides=_words(fixed, setting)))


def _child(order: Order, fixed: Sequence[str], number: int, setting: Setting) -> Child:
    return child_of(order, f"trial {number}", _words(fixed, setting), " ".join(_words((), setting)))


# ---- The sweep -------------------------------------------------------------------------------------------------------


@dataclass
class Trial:
    """What a setting came to."""

    title: str
    setting: Setting
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


def sweep(order: Order, children: Sequence[Child], machine: Any, store: Store, train: group.Train) -> str:
    """Train every setting that has no finished run, and compare them in a run above. Returns its status.

    On one process a setting that fails is noted and the others are tried; of several processes some may be gone by
    then, and the sweep ends. Raises UserError for what the user can mend, and where no setting came to its end.
    """
    how, recipe, digests = order.sweep, children[0].recipe, {}
    fixed, axes = read(order)
    for one in children:  # what is wrong with the data of the last shows now
        group.key(one, digests)
    advised = how.tpe is not None or how.pruner is not None
    adviser: Any = None
    if advised and machine.main:
        from trainkit.experiments.optuna_search import Adviser

        adviser = Adviser(axes, how, recipe.best.mode)
    said = [word for word in order.overrides if word not in fixed]
    keys, size = [axis.key for axis in axes], how.tpe or len(children)
    digest = group.fingerprint(children, *said, repr(how))
    whole = Family(order, recipe, "sweep", "sweep", size, "settings", keys, digest)
    trials: list[Trial] = []
    with group.above(whole, machine, store, train) as parent:
        parent.tracker.tags({"trainkit.axes": shlex.join(said)})
        for number in range(size):
            setting = machine.lead(lambda number=number: adviser.begin(number)) if advised else {}
            try:
                one = children[number] if how.tpe is None else _child(order, fixed, number, setting)
                trial = _try(one, group.key(one, digests), parent, adviser, advised)
            except UserError as error:
                if machine.world > 1:
                    raise
                machine.accelerator.free_memory()
                trial = _failed(f"trial {number}", error, parent)
                if adviser is not None:
                    adviser.end("failed", math.nan)
            if trial is None:
                parent.stop(number)
                return "KILLED"
            trial.setting = setting if how.tpe is not None else _setting(children[number], keys)
            trials.append(trial)
            _log(trials, recipe, parent.tracker)
        if not any(trial.state == "finished" for trial in trials):
            raise UserError("sweep", f"none of {size} settings came to its end", remedy=f"the first: {trials[0].why}")
        machine.lead(lambda: _conclude(order, fixed, axes, trials, parent))
    return "FINISHED"


@dataclass
class Watching:
    """What an adviser that ends runs is told of one of them, on the first process: `family.Watch`."""

    adviser: Any
    metric: str
    why: str = ""
    """Why it ends; empty where it does not."""
    seen: set[int] = field(default_factory=set)
    """Steps of the evaluations that were told."""

    def __call__(self, step: int, scores: Mapping[str, float]) -> bool:
        """Tell an evaluation; one before the first update says nothing. Whether the run is to end."""
        if step > 0 and step not in self.seen and self.metric in scores and not self.why:
            self.seen.add(step)
            if self.adviser.report(scores[self.metric]):
                place = f"evaluation {len(self.seen)}, step {step}"
                self.why = f"{self.metric} {scores[self.metric]:.4g} at {place}, fell behind other settings"
        return bool(self.why)

    def replay(self, run: RunFolder) -> bool:
        """Tell the evaluations of a run that is there, up to where it is to end. Whether that is so."""
        points = journal.read(run.journal).metrics.get(self.metric, [])
        return any(self(point.step, {self.metric: point.value}) for point in points)


def _try(child: Child, key: str, parent: Parent, adviser: Any, advised: bool) -> Trial | None:
    """What a setting came to: its run, used again or made; None when told to stop."""
    from trainkit.checkpoint import storage

    machine, metric = parent.machine, child.recipe.best.metric
    watch = Watching(adviser, metric) if adviser is not None and adviser.prunes else None
    earlier = machine.lead(lambda: _given_up(child, key, parent, watch) if watch else "") if advised else ""
    if earlier:
        status, folder = "KILLED", RunFolder(Path(earlier))
    else:
        status, folder = parent.bring(child, key, watch)
    why = machine.share(watch.why if watch else "") if advised else ""
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
        if adviser is not None:
            adviser.end(state, trial.value)
        return trial

    return machine.lead(look)


def _given_up(child: Child, key: str, parent: Parent, watch: Watching) -> str:
    """The folder of a run of this setting that was pruned, and would be now; empty where there is none.

    What tells it from one that was interrupted is the adviser, who hears of its evaluations again.
    """
    if parent.store.finished_with(key) is not None:
        return ""
    run = parent.store.newest_unfinished(child.recipe.name, loader.digest(child.recipe))
    if run is None or run.info().key != key or run.info().status != "KILLED" or not watch.replay(run):
        return ""
    parent.say(f"{child.title}: {child.said}: reusing run {run.name} (pruned)")
    parent.adopt(child, run)
    return str(run.path)


def _failed(title: str, error: UserError, parent: Parent) -> Trial:
    """A setting that ended with a mistake, and its run where it came to have one."""
    parent.say(f"{title}: failed: {error}")
    for run in reversed(parent.store.runs()):
        info = run.info()
        if info.parent == parent.folder.name and info.status == "FAILED" and run.name not in parent.members.values():
            parent.note(title, run)
            return Trial(title, {}, "failed", run.name, why=str(error))
    return Trial(title, {}, "failed", why=str(error))


def _setting(child: Child, keys: Sequence[str]) -> Setting:
    """What a setting says of the keys that are swept."""
    words = dict(word.split("=", 1) for word in child.order.overrides if "=" in word)
    return {key: words[key] for key in keys}


def _ranked(trials: Sequence[Trial], mode: str) -> list[Trial]:
    """The best first; after those that finished come the pruned, then the failed."""
    sign = -1 if mode == "max" else 1
    order = {"finished": 0, "pruned": 1, "failed": 2}

    def place(trial: Trial) -> tuple[int, bool, float]:
        lost = math.isnan(trial.value)
        return order[trial.state], lost, 0.0 if lost else sign * trial.value

    return sorted(trials, key=place)


def _log(trials: Sequence[Trial], recipe: Recipe, tracker: Any) -> None:
    """Write down the newest setting's score and the best so far, in the place of the step the setting's number."""
    metric, newest = recipe.best.metric, trials[-1]
    scores = {} if math.isnan(newest.value) else {f"sweep/{metric}": newest.value}
    leader = _ranked(trials, recipe.best.mode)[0]
    if leader.state == "finished" and not math.isnan(leader.value):
        scores[f"sweep/best/{metric}"] = leader.value
    if scores:
        tracker.log(len(trials) - 1, scores)


def _conclude(
    order: Order, fixed: Sequence[str], axes: Sequence[Axis], trials: Sequence[Trial], parent: Parent
) -> None:
    """Name the best setting, and keep and print what all came to."""
    recipe = parent.family.recipe
    ranked = _ranked(trials, recipe.best.mode)
    best = ranked[0]
    parent.tracker.tags({"trainkit.best": best.run, "trainkit.best_setting": " ".join(_words((), best.setting))})
    parent.tracker.adopt(best.run, {"trainkit.best_of": parent.folder.name})
    columns: dict[str, list[Any]] = {"trial": [trial.title for trial in ranked]}
    columns |= {key: [trial.setting.get(key, "") for trial in ranked] for key in best.setting}
    columns[recipe.best.metric] = [trial.value for trial in ranked]
    for name in ("step", "state", "seconds", "run", "why"):
        columns[name] = [getattr(trial, name) for trial in ranked]
    parent.tracker.table("tables/sweep.csv", columns)
    plugins = [word for plugin in order.plugins for word in ("--plugin", plugin)]
    words = shlex.join([os.path.relpath(order.path), *plugins, *_words(fixed, best.setting)])
    lines = [describe(recipe, ranked), *_edges(axes, trials, best)]
    lines += [f"again  accelerate launch trainkit/run.py {words}", f"luck   trainkit repeat {words}"]
    parent.conclude("\n".join(lines))


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
            which, more = ("least", "less") if value == tried[0] else ("greatest", "more")
            found.append(
                f"edge   {axis.key}={best.setting[axis.key]}: the {which} that was tried; {more} may be better"
            )
    return found


def describe(recipe: Recipe, ranked: Sequence[Trial]) -> str:
    """Settings as a table, the best first."""
    from trainkit.text_table import aligned, numbers

    best, shown = ranked[0], ranked[:_SHOWN]
    scores, seconds = numbers([trial.value for trial in shown]), numbers([trial.seconds for trial in shown])
    table = [["", *best.setting, recipe.best.metric, "at step", "seconds", "run"]]
    for trial, score, took in zip(shown, scores, seconds, strict=True):
        step = str(trial.step) if score != "-" else "-"
        state = "" if trial.state == "finished" else f" ({trial.state})"
        cells = [trial.setting.get(key, "") for key in best.setting]
        table.append([f"{trial.title}{state}", *cells, score, step, took, trial.run or "-"])
    lines = [f"{recipe.name}: {len(ranked)} settings", "", *aligned(table)]
    if len(ranked) > len(shown):
        lines.append(f"and {len(ranked) - len(shown)} more in MLflow")
    return "\n".join([*lines, "", f"best   {best.run}: {' '.join(_words((), best.setting))}"])
