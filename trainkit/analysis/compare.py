"""Compare runs: changed keys, the difference of every metric, its significance, speed and cost.

The second run is compared with the first. The significance of a difference comes from the rows that runs save of their
evaluations (`metrics.significance`, `metrics.bootstrap`), where both were evaluated on the same data. For a parent run
of repeats, the repeats are compared, and their spread counts too. Nothing is trained or evaluated again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from trainkit.analysis import saved_rows
from trainkit.analysis.saved_rows import Columns
from trainkit.config import diff, metric_rules, metric_table
from trainkit.config.diff import Change
from trainkit.environment.record import described, versions
from trainkit.errors import UserError, few
from trainkit.metrics import bootstrap, significance
from trainkit.metrics.bootstrap import Kind
from trainkit.metrics.significance import Interval, Verdict
from trainkit.redact import HIDDEN, is_secret_name
from trainkit.speed import clock
from trainkit.tracking import journal, run_folder
from trainkit.tracking.journal import Point
from trainkit.tracking.lineage import CONTENT, DATA
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store
from trainkit.tracking.sync import send_rest
from trainkit.tracking.upload import waits

_DIGITS = 12
"""Digits shown of commits and digests."""
_SPEED = ("speed/step_ms_p50", "speed/step_ms_p99", "speed/peak_memory_gb")
"""Measured in windows: compared are the medians over steps of the first two, and the maximum of memory."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One score of two sides."""

    evaluation: str
    """`val`: final; `best/val`: at the best step; `val/ema`: of EMA weights; `pooled/val`: of all folds."""
    metric: str
    values: tuple[float, float]
    """Of both sides; means, where a side has several runs."""
    difference: float | None = None
    """Second minus first; None where they were not evaluated on the same data."""
    low: float | None = None
    """Ends of the paired bootstrap interval; None where there is none."""
    high: float | None = None
    draws: int = 0
    units: str = ""
    """Units of the bootstrap, with their number: `120 patients`."""
    seeds: Interval | None = None
    """Welch's interval over the runs of both sides, where both have several."""
    verdict: Verdict = "not decided"
    why: str = ""
    """Reason why a difference has no verdict; empty where it has one."""
    primary: bool = False
    """True for the metric by which the first run, or else the other, chose its best step."""
    lower_is_better: bool | None = False
    """None where the metric's direction is not known."""

    @property
    def name(self) -> str:
        """Its name in MLflow: at the best step, `best/` for the primary metric and `at_best/` for the others."""
        others = self.evaluation.startswith("best/") and not self.primary
        return f"{'at_' if others else ''}{self.evaluation}/{self.metric}"


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a run, or a run and its repeats."""

    folder: RunFolder
    runs: tuple[RunFolder, ...]
    """The run itself, or its child runs with other seeds."""
    folds: tuple[RunFolder, ...] = ()
    """Child runs of a cross-validation."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Tags of the named run in MLflow."""
    run_tags: tuple[Mapping[str, str], ...] = ()
    """Tags of each evaluated run: of the repeats, of the folds, or of the run itself."""

    @property
    def name(self) -> str:
        """Name of the named run."""
        return self.folder.name

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """Resolved recipe of the first run."""
        return diff.read(self.runs[0].recipe)

    @cached_property
    def metrics(self) -> list[dict[str, list[Point]]]:
        """The journal of each run, with all metrics of the best step under `best/`."""
        return [journal.at_best(journal.read(run.journal).metrics) for run in self.runs]

    def digest(self, evaluation: str, of: str = DATA) -> tuple[str, ...] | None:
        """Return the data digest of an evaluation, or that of each fold; None where it is unknown or runs differ.

        With `CONTENT`, that of its files and labels, however they were prepared.
        """
        found = [tags.get(f"{of}.{evaluation}") for tags in self.run_tags]
        digests = tuple(digest for digest in found if digest)
        if not digests or len(digests) < len(found) or (not self.folds and len(set(digests)) > 1):
            return None
        return digests if self.folds else digests[:1]

    @cached_property
    def scores(self) -> dict[str, dict[str, list[float]]]:
        """Value of each run by evaluation, as in `Score`, and metric; metrics that a run lacks are left out."""
        known = self.recipe.get("evaluations") or {}
        heads = {
            f"{when}{name}{average}" for name in known for when in ("", "best/", "pooled/") for average in ("", "/ema")
        }
        each = [_last(metrics, heads) for metrics in self.metrics]
        chosen = (self.recipe.get("best") or {}).get("metric")
        found: dict[str, dict[str, list[float]]] = {}
        for (head, metric), value in each[0].items():
            values = [value, *(other.get((head, metric), math.nan) for other in each[1:])]
            asked = f"{_plain(head)}/{metric}" == chosen or metric_table.is_score(metric)
            if all(map(math.isfinite, values)) and asked:
                found.setdefault(head, {})[metric] = values
        return found


def _last(metrics: Mapping[str, list[Point]], heads: set[str]) -> dict[tuple[str, str], float]:
    """Return the last value of every metric under one of `heads`; `final/` values take precedence."""
    found: dict[tuple[str, str], float] = {}
    for name in sorted(metrics, key=lambda name: name.startswith("final/")):
        head, _, metric = name.removeprefix("final/").rpartition("/")
        if head in heads:
            found[head, metric] = metrics[name][-1].value
    return found


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The second side compared with the first."""

    sides: tuple[Side, Side]
    changes: list[Change]
    """Changes of the recipe."""
    place: list[Change]
    """Other differences: versions, hardware, source, training data."""
    same_data: dict[str, bool]
    """True for each evaluation of both that ran on the same data."""
    scores: list[Score]
    speed: Mapping[str, tuple[float | None, float | None]]
    """Rates, times, shares and costs by name, the rates first; None where a side has not measured one."""
    notes: tuple[str, ...]
    """Facts that limit the comparison: different tasks, different data, runs that did not finish."""

    @property
    def primary(self) -> Score | None:
        """The primary metric: at the best step where both have it, else the final one."""
        return next((score for score in self.scores if score.primary), None)


def resolve(store: Store, words: Sequence[str]) -> list[RunFolder]:
    """Return the two runs that words name. `best` is the best run in the experiment of the other one.

    Raises UserError for a word that names no run, and for one run named twice.
    """
    found = {word: store.find(word) for word in words if word != "best"}
    beside = next(iter(found.values()), None)
    runs = [found[word] if word in found else store.find(word, beside) for word in words]
    if runs[0] == runs[1]:
        raise UserError("runs", f"{words[0]} and {words[1]} are both {runs[0].name}", "different runs")
    return runs


def compare(store: Store, runs: Sequence[RunFolder]) -> Comparison:
    """Compare the second of two runs with the first.

    Raises UserError where the store does not answer, or a run's folder cannot be read.
    """
    client = store.client()
    first, second = (_side(run, store, client) for run in runs)
    theirs = second.recipe.get("evaluations") or {}
    both = [name for name in first.recipe.get("evaluations") or {} if name in theirs]
    equal = {of: {name for name in both if _same(first, second, name, of)} for of in (DATA, CONTENT)}
    same = {name: name in equal[DATA] | equal[CONTENT] for name in both}
    # Of the same samples, in another size or normalisation.
    prepared = [name for name in both if name in equal[CONTENT] - equal[DATA]]
    scores = list(_scores(first, second, same, _Reader(client)))
    one, other = _measured(first), _measured(second)
    return Comparison(
        sides=(first, second),
        changes=_changes(first, second),
        place=_elsewhere(first, second),
        same_data=same,
        scores=scores,
        speed={name: (one.get(name), other.get(name)) for name in sorted({*one, *other}, key=_order)},
        notes=tuple(_notes(first, second, same, prepared, scores)),
    )


def _side(run: RunFolder, store: Store, client: Any) -> Side:
    tags, titles = _tags(run, store, client), run_folder.members(run)
    kind = next(iter(titles), "").partition(" ")[0]
    if kind == "trial":
        found, expected = "is the parent run of a sweep", "two of its child runs"
        remedy = f"its best child run is {tags['trainkit.best']}" if "trainkit.best" in tags else ""
        raise UserError(f"run {run.name}", found, expected, remedy)
    beneath = tuple(store.find(name) for name in titles.values())
    if kind == "fold":
        return Side(run, (run,), beneath, tags, tuple(_tags(child, store, client) for child in beneath))
    beneath = tuple(child for child in beneath if child.info().status == "FINISHED")
    run_tags = tuple(_tags(child, store, client) for child in beneath)
    return Side(run, beneath or (run,), (), tags, run_tags or (tags,))


def _tags(run: RunFolder, store: Store, client: Any) -> dict[str, str]:
    """Return the tags of a run in MLflow, after its upload queue was sent; none where MLflow lacks the run."""
    from mlflow.exceptions import MlflowException

    if not run.alive() and waits(run):
        send_rest(run, store)
    run_id = run.info().run_id
    if run_id is None:
        return {}
    with store.asking():
        try:
            return dict(client.get_run(run_id).data.tags)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return {}


# ---- Two sides -------------------------------------------------------------------------------------------------------


def _changes(first: Side, second: Side) -> list[Change]:
    """List the changes of the recipe, without values of secrets."""
    recipe = [
        replace(change, before=HIDDEN, after=HIDDEN) if is_secret_name(change.key) else change
        for change in diff.diff(first.recipe, second.recipe)
    ]
    if max(len(first.runs), len(second.runs)) > 1:  # every repeat has its own
        recipe = [change for change in recipe if change.key != "seed"]
    return recipe


def _scores(first: Side, second: Side, same: Mapping[str, bool], reader: _Reader) -> Iterator[Score]:
    """Yield the scores that both sides have, judged where they were evaluated on the same data."""
    best = first.recipe.get("best") or second.recipe.get("best") or {}
    decides = _deciding(best.get("metric") or "", first, second)
    for head in first.scores:
        shared = [metric for metric in first.scores[head] if metric in second.scores.get(head, {})]
        if not shared:
            continue
        name = _evaluation(head)
        if same[name]:
            drawn = _bootstrap(first, second, head, shared, reader)
        else:
            drawn = _Bootstrap({}, "", why_other_data((first, second), name), comparable=False)
        for metric in shared:
            values = first.scores[head][metric], second.scores[head][metric]
            score = Score(
                evaluation=head,
                metric=metric,
                values=(float(np.mean(values[0])), float(np.mean(values[1]))),
                primary=(head, metric) == decides,
                lower_is_better=_is_lower(f"{_plain(head)}/{metric}", first, second),
            )
            yield _judged(score, drawn, significance.welch(*values))


def _is_lower(metric: str, *sides: Side) -> bool | None:
    """Return whether lower values of a metric are better; None where no side says it."""
    said = (metric_rules.lower_is_better(metric, side.recipe, side.runs[0].info().directions) for side in sides)
    return next((lower for lower in said if lower is not None), None)


def why_other_data(sides: Sequence[Side], evaluation: str) -> str:
    """Return why runs whose digests of an evaluation differ, or are unknown, were not evaluated on the same data."""
    if unknown := [side.name for side in sides if side.digest(evaluation) is None]:
        return f"the data digest of {few(unknown)} is unknown, or differs between its runs"
    return "evaluated on different data"


def _same(first: Side, second: Side, evaluation: str, of: str) -> bool:
    one = first.digest(evaluation, of)
    return one is not None and one == second.digest(evaluation, of)


def _evaluation(head: str) -> str:
    """Return the recipe's name of an evaluation."""
    return _plain(head).removesuffix("/ema")


def _plain(head: str) -> str:
    """Return an evaluation without `best/` or `pooled/`."""
    return head.removeprefix("best/").removeprefix("pooled/")


def _deciding(metric: str, first: Side, second: Side) -> tuple[str, str] | None:
    """Return the primary metric: of all folds pooled, else at the best step, else final; None without one."""
    head, _, name = metric.rpartition("/")
    for when in ("pooled/", "best/", ""):
        if all(name in side.scores.get(f"{when}{head}", {}) for side in (first, second)):
            return f"{when}{head}", name
    return None


@dataclass(frozen=True)
class _Bootstrap:
    """Paired bootstrap intervals of the scores of an evaluation."""

    intervals: Mapping[str, Interval | None]
    units: str
    why: str
    """Reason why there are none."""
    comparable: bool = True
    """True where both sides were evaluated on the same rows."""


def _judged(score: Score, drawn: _Bootstrap, seeds: Interval | None) -> Score:
    """Return a score with its difference, intervals and verdict."""
    if not drawn.comparable:
        return replace(score, verdict="not comparable", why=drawn.why)
    own = drawn.intervals.get(score.metric)
    both = [interval for interval in (own, seeds) if interval is not None]
    found: dict[str, Any] = {"difference": score.values[1] - score.values[0], "seeds": seeds}
    if own is not None:
        found |= {"low": own.low, "high": own.high, "draws": significance.DRAWS, "units": drawn.units}
        found["why"] = "" if own.decides else f"too few units: {drawn.units}"
    else:
        found["why"] = drawn.why or "the saved rows do not reproduce this metric"
    if score.lower_is_better is None:
        return replace(score, **{**found, "why": "it is not known whether higher or lower values of it are better"})
    return replace(score, **found, verdict=significance.verdict(both, score.lower_is_better))


def _bootstrap(first: Side, second: Side, head: str, metrics: Sequence[str], reader: _Reader) -> _Bootstrap:
    """Run the paired bootstrap for the metrics of an evaluation; for repeats, for their mean."""
    sides: list[list[Columns]] = []
    for side in (first, second):
        kept = {run.name: reader.rows(run, head) for run in side.runs}
        if lacking := [name for name, rows in kept.items() if rows is None]:
            return _Bootstrap({}, "", f"{lacking[0]} saved no rows of it")
        sides.append([rows for rows in kept.values() if rows is not None])
    one = sides[0][0]
    for rows in (*sides[0], *sides[1]):
        if differing := bootstrap.why_not_comparable(one, rows):
            return _Bootstrap({}, "", differing, comparable=False)
    kind, size = bootstrap.kind(one), len(next(iter(one.values()), ()))
    if not size:
        return _Bootstrap({}, "", "no rows were saved")
    same = (*(id(rows) for rows in (*sides[0], *sides[1])), *metrics)
    if same in reader.drawn:
        return reader.drawn[same]
    units = kind.units(one)
    runs = [
        [_resampled_run(kind, rows, list(side.scores[head])) for rows in found]
        for side, found in zip((first, second), sides, strict=True)
    ]
    # Only metrics that the rows reproduce are resampled: computed from all rows they must equal the logged values.
    known = set(metrics)
    for side, own in zip((first, second), runs, strict=True):
        for k, run in enumerate(own):
            given = run(np.ones((1, size)))
            logged = {metric: side.scores[head][metric][k] for metric in known & given.keys()}
            known = {m for m, value in logged.items() if np.isclose(given[m][0], value, rtol=1e-5, atol=1e-7)}

    def differences(times: np.ndarray) -> dict[str, np.ndarray]:
        before, after = ([run(times) for run in own] for own in runs)
        return {m: np.mean([s[m] for s in after], axis=0) - np.mean([s[m] for s in before], axis=0) for m in known}

    intervals = {}
    for metric, drawn in significance.resampled(units, differences).items():
        gap = float(np.mean(second.scores[head][metric]) - np.mean(first.scores[head][metric]))
        intervals[metric] = significance.bootstrap_interval(gap, drawn, units.independent)
    reader.drawn[same] = _Bootstrap(intervals, str(units), "")
    return reader.drawn[same]


def _resampled_run(kind: Kind, rows: Columns, names: Sequence[str]) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    """Return the function from how often each row is drawn, (draws, rows), to the scores by the names of the run."""
    whole = kind.resampled(rows, np.ones((1, len(next(iter(rows.values()))))))
    return lambda times: bootstrap.by_class_name(kind.resampled(rows, times), whole, names)


class _Reader:
    """Rows that runs saved of their evaluations."""

    drawn: dict[tuple[int | str, ...], _Bootstrap]
    """Intervals found so far, by the rows of all runs and the metrics: the final step may be the best one."""

    def __init__(self, client: Any):
        self._client, self.drawn = client, {}
        self._found: dict[tuple[str, str], Columns | None] = {}
        self._files: dict[str, Columns] = {}

    def rows(self, run: RunFolder, head: str) -> Columns | None:
        """Return the columns of an evaluation, as `Score` names it; None for a run that saved none."""
        when = "best" if head.startswith("best/") else "folds" if head.startswith("pooled/") else "final"
        key = (run.name, f"{_plain(head).replace('/', '_')}_{when}")
        if key not in self._found:
            found = saved_rows.read(self._client, run.info().run_id, key[1])
            # Equal files are one object, which identifies the intervals found with them.
            self._found[key] = found and self._files.setdefault(found[1], found[0])
        return self._found[key]


def _elsewhere(first: Side, second: Side) -> list[Change]:
    """List the differences outside the recipe: versions, hardware, source, training data."""
    places = []
    for side in (first, second):
        place = described(side.run_tags[0])
        place |= {name: version for name, version in versions(side.run_tags[0]).items() if name != "mlflow"}
        digests = sorted({run.info().data_digest or "" for run in side.folds or side.runs} - {""})
        places.append(place | {"training data": ", ".join(digest[:_DIGITS] for digest in digests)})
    return diff.diff(*places)


# ---- Both sides ------------------------------------------------------------------------------------------------------


def _order(name: str) -> tuple[int, str]:
    first = ("speed/samples_per_s", *_SPEED, "time/total_s", "cost/", "time_to/", "time/", "speed/")
    return next((k for k, start in enumerate(first) if name.startswith(start)), len(first)), name


def _measured(side: Side) -> dict[str, float]:
    """Return means over the runs of a side, of the measurements that all of them have."""
    each = []
    for metrics in side.metrics:
        own = {}
        for name, points in metrics.items():
            word = name.removeprefix("final/")
            if name.startswith(("final/speed/", "final/time/", "cost/", "final/cost/", "time_to/")):
                own[word] = points[-1].value
            elif name in _SPEED:
                values = [point.value for point in points]
                steps = [point.step for point in points]
                own[name] = max(values) if name.endswith("_gb") else clock.median(steps, values)
        each.append(own)
    shared = [name for name in each[0] if all(math.isfinite(own.get(name, math.nan)) for own in each)]
    return {name: float(np.mean([own[name] for own in each])) for name in shared}


def _notes(
    first: Side, second: Side, same: Mapping[str, bool], prepared: Sequence[str], scores: Sequence[Score]
) -> Iterator[str]:
    """List facts that limit a comparison: runs that did not finish, other tasks, other data."""
    for side in (first, second):
        for run in dict.fromkeys((side.folder, *side.runs, *side.folds)):
            info = run.info()
            if info.status != "FINISHED":
                yield f"{run.name} did not finish ({info.status}, step {info.last_step}); its last metrics are compared"
    tasks = [(side.recipe.get("task") or {}).get("name") for side in (first, second)]
    if tasks[0] != tasks[1]:
        yield f"{first.name} trains {tasks[0]}, {second.name} {tasks[1]}: different tasks"
    for name in (name for name, equal in same.items() if not equal):
        yield f"{name}: not compared: {why_other_data((first, second), name)}"
    if prepared:
        yield f"{', '.join(prepared)}: the same samples, prepared differently in {second.name}"
    if not scores:
        yield f"{first.name} and {second.name} have no metric in common"
