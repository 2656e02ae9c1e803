"""How a run ended, as its closing summary and `trainkit show RUN` print it: best score, scores, throughput and time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainkit import terminal
from trainkit.config import diff
from trainkit.speed import cost
from trainkit.terminal import numbers, split
from trainkit.tracking import journal

if TYPE_CHECKING:
    from trainkit.analysis.baselines import Comparison
    from trainkit.tracking.run_folder import RunFolder
    from trainkit.training.outcome import Outcome

_OTHERS = ("best", "final", "eval", "baseline", "time_to")  # `time_to`: of older runs
"""First words of metrics in which no network comes before the evaluation."""
TEST = "test"
"""Evaluation whose score stands first: nothing is chosen by it."""
_BASELINE = "baseline: "
_PHASES = {
    "data": "data loading",
    "transfer": "copy to device",
    "compute": "forward, backward and optimizer",
    "forward": "forward pass",
    "backward": "backward pass",
    "optimizer": "optimizer step",
    "eval": "evaluation",
    "checkpoint": "checkpoints",
    "log": "logging",
    "setup": "start-up",
}
"""Names of the parts of a training's time."""
_COST = {"core_hours": "core hours held", "core_hours_used": "core hours used", "gpu_hours": "GPU hours held"}
_STATUS = {"FINISHED": "Finished", "RUNNING": "Running", "FAILED": "Failed", "KILLED": "Killed"}


def of_folder(folder: RunFolder, outcome: Outcome | None = None, beside: Comparison | None = None) -> terminal.Page:
    """Return how a run ended: with the outcome of its training and its trivial baselines, else as far as is recorded.

    Raises UserError, OSError, ValueError, TypeError or AttributeError for files that are damaged or of another kind.
    """
    info = folder.info()
    history = journal.read(folder.journal) if folder.journal.is_file() else journal.History()
    recipe = diff.read(folder.recipe) if folder.recipe.is_file() else {}
    metric = str((recipe.get("best") or {}).get("metric") or "")
    status, step, speed = info.status, info.last_step, _last(history, "final/")
    if outcome is not None:
        status, step, speed = "FINISHED" if outcome.status == "FINISHED" else "", outcome.step, outcome.speed
    took = speed.get("time/wall_s") if status == "FINISHED" or outcome is not None else None
    parts: list[terminal.Part] = [ended(status, step, took, headline(metric, history)), ""]
    parts += tables(folder.name, list(recipe.get("evaluations") or {}), metric, history, beside)
    if "speed/samples_per_s" not in speed and (logged := history.metrics.get("speed/samples_per_s")):
        parts.append(fact("Throughput", f"{logged[-1].value:.1f} samples/s at step {logged[-1].step}"))
    parts += facts(speed, history)
    return parts if parts[-1] else parts[:-1]


def ended(status: str, step: int, took: float | None, scores: str = "") -> terminal.Styled:
    """Return the first line: how and when a run ended, and its `headline`."""
    finished, word = status == "FINISHED", _STATUS.get(status, "Stopped")
    line = f"{word} at step {step}." if took is None else f"{word} after {duration(took)}, at step {step}."
    if finished and took is not None:
        line = f"Finished in {duration(took)}."
    return terminal.Styled(f"{line} {scores}".strip(), "bold green" if finished else "bold yellow")


def headline(metric: str, history: journal.History) -> str:
    """Return the score of the test set where there is one, and the best one of `metric`, as sentences.

    The best of several evaluations of a set is too optimistic a score for it: how many it was chosen among and the last
    score are said too, and that of a fitted network, a linear probe, where there is one: its step is 0.
    """
    points = journal.at_best(history.metrics).get(f"best/{metric}", [])
    if not points:
        return ""
    scored, (evaluation, _, name) = history.metrics.get(metric, []), metric.rpartition("/")
    probe = history.metrics.get(f"probe/{metric}", [])
    value, last, fitted = numbers([one[-1].value if one else math.nan for one in (points, scored, probe)])
    test = history.metrics.get(f"{TEST}/{name}", []) if evaluation.partition("/")[0] != TEST else []
    said = f"Best {metric} {value} at step {points[-1].step}"
    if points[-1].step == 0 and probe:
        said += ", the linear probe"
    if len(scored) > 1:
        said += f", chosen among {len(scored)} evaluations; final {last}"
    if points[-1].step and probe:
        said += f"; the linear probe {fitted}"
    return (f"Final {TEST}/{name} {numbers([test[-1].value])[0]}. " if test else "") + f"{said}."


def tables(
    name: str, evaluations: Sequence[str], best: str, history: journal.History, beside: Comparison | None
) -> list[terminal.Part]:
    """Return the scores of each evaluation as tables, the run's name in the heading of the first.

    `best`: the metric that chooses the best checkpoint, or empty. `beside`: scores of the trivial baselines.
    """
    parts: list[terminal.Part] = []
    for evaluation in evaluations:
        rows = networks(history, evaluation, best, beside)
        whole, kind, classes = split(score_names(rows))
        emphasised = [number for number, title in enumerate(rows, 1) if title == _deciding(evaluation, best)]
        if rows and not parts:
            parts += [name, ""]
        if rows:
            parts += [terminal.Table([[evaluation, *whole[:6]], *_numbers(rows, whole[:6])], emphasised), ""]
        if classes and (not best or best.startswith(f"{evaluation}/")):  # of the set that counts
            head = [f"{evaluation}, {kind}", *(key.partition(".")[2] for key in classes)]
            parts += [terminal.Table([head, *_numbers(rows, classes)], emphasised), ""]
    return parts


def facts(speed: Mapping[str, float], history: journal.History) -> list[str]:
    """Return the lines on throughput, time, cost and rules of protocols, each where known."""
    shares = ", ".join(f"{phase} {share}" for phase, share in time_shares(speed).items())
    found = []
    if (rate := speed.get("speed/samples_per_s")) is not None:
        found.append(fact("Throughput", f"{rate:.1f} samples/s in training"))
    if (total := speed.get("time/total_s")) is not None:
        found.append(fact("Time", f"{duration(total)} of training" + (f": {shares}" if shares else "")))
    spent = [f"{v:.3g} {_COST.get(k, k.replace('_', ' '))}" for k, v in _last(history, cost.PREFIX).items()]
    found += [fact("Cost", ", ".join(spent))] if spent else []
    rules: dict[str, list[str]] = {}
    told = [event.data for event in history.events if event.name == "protocols"]
    for name, rule in told[-1].items() if told else ():
        rules.setdefault(rule, []).append(name)
    return found + [fact("Protocol", f"{', '.join(names)}: {rule}") for rule, names in rules.items()]


def time_shares(speed: Mapping[str, float]) -> dict[str, str]:
    """Return the shares of the time of a training by phase, in per cent; without those below half a per cent."""
    shares = {key[5:-6]: value for key, value in speed.items() if key.startswith("time/") and key.endswith("_share")}
    return {_PHASES.get(name, name): f"{100 * value:.0f} %" for name, value in shares.items() if value >= 0.005}


def fact(key: str, text: str) -> str:
    """Return a line with a key in a column of its own."""
    return f"{key:12}{text}"


def duration(seconds: float) -> str:
    """Return a time as text; a short one with a fraction."""
    return f"{seconds:.1f} s" if seconds < 9.95 else terminal.duration(seconds)


def _deciding(evaluation: str, best: str) -> str:
    """Return the title of the row with the best score; empty for another evaluation."""
    if not best.startswith(f"{evaluation}/"):
        return ""
    return "EMA best" if best.startswith(f"{evaluation}/ema/") else "best"


def networks(
    history: journal.History, evaluation: str, best: str, beside: Comparison | None
) -> dict[str, dict[str, float]]:
    """Return the scores of each network and trivial baseline on an evaluation, by a title: references first."""
    titles = {evaluation: "final", f"best/{evaluation}": "best"}
    titles |= {f"{evaluation}/ema": "EMA final", f"best/{evaluation}/ema": "EMA best"}
    if best.startswith(f"{evaluation}/ema/"):  # the EMA weights decide
        del titles[f"best/{evaluation}"]
    else:
        del titles[f"best/{evaluation}/ema"]
    rows: dict[str, dict[str, float]] = {}
    for name, points in journal.at_best(history.metrics).items():
        head, _, metric = name.rpartition("/")
        who, _, rest = head.partition("/")
        if title := titles.get(head) or (who if rest == evaluation and who not in _OTHERS else None):
            rows.setdefault(title, {})[metric] = points[-1].value
    order = list(titles.values())
    rows = dict(sorted(rows.items(), key=lambda row: order.index(row[0]) if row[0] in order else -1))
    scored = beside.scored if beside is not None and beside.evaluation == evaluation else []
    trivial = {f"{_BASELINE}{one.title}": one.metrics for one in scored}
    # `pixels` is a reference that was evaluated at step 0, and a baseline.
    return trivial | {title: row for title, row in rows.items() if f"{_BASELINE}{title}" not in trivial}


def score_names(networks: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the names of the scores of networks, those of the last one first."""
    names = dict.fromkeys(name for scores in reversed(list(networks.values())) for name in scores)
    return [name for name in names if not name.startswith(("xnorm", "val_at"))]


def _numbers(rows: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> list[list[str]]:
    """The rows of a table, each column in as many digits as its values need."""
    columns = [numbers([row.get(name, math.nan) for row in rows.values()]) for name in names]
    return [[who, *cells] for who, *cells in zip(rows, *columns, strict=True)]


def _last(history: journal.History, prefix: str) -> dict[str, float]:
    """Last values of the metrics whose names begin so, by the rest of their names."""
    return {k.removeprefix(prefix): p[-1].value for k, p in history.metrics.items() if k.startswith(prefix)}
