"""Shared by the speed tables: runs in processes of their own, their work and speed, and a check of equal work.

A finished run is found again by the hash of its recipe and by its loader, which the hash leaves out; what its journal
does not say (load, memory of the process, commit) lies beside that in a note, and a run without one is not used.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import comparison
from comparison import Row


@dataclass(frozen=True)
class Measured:
    """What one run did and how fast."""

    updates: int
    batch: int
    per_epoch: int
    """Steps of an epoch."""
    step_s: float
    """Mean seconds of a step in the run's own clock, the first log window left out: it warms up."""
    step_p50_s: float
    """Median over log windows of their median."""
    step_least_s: float
    """Least of those medians: the pace while no other process was in the way."""
    wall_s: float
    """Seconds of wall-clock for a step, log lines and checkpoints included: between log lines without evaluation."""
    memory_gb: float
    scored: Mapping[str, int]
    """Samples that each evaluation scored, each once."""
    note: Mapping[str, Any]
    """What the journal does not say: digest of the data, machine, memory of the process, load."""
    scores: Mapping[str, float] = field(default_factory=dict)
    held_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Seconds of each time that an evaluation was held."""
    ready_s: float = 0.0
    """Seconds from the start of the run to its first log line: libraries, data, compiling, the first steps."""
    waiting_s: float = 0.0
    """Of `step_s`, the mean seconds for which the loop stood still until its batch had been read."""

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.batch / self.step_s

    @property
    def epoch_s(self) -> float:
        """Seconds for the samples of an epoch at that rate."""
        return self.batch * self.per_epoch / self.rate

    @property
    def wall_epoch_s(self) -> float:
        """Seconds of wall-clock for an epoch, evaluations left out."""
        return self.per_epoch * self.wall_s

    @property
    def sample_s(self) -> float:
        """Seconds of wall-clock for a sample, the evaluations that were held spread over all of them."""
        held = sum(sum(seconds) for seconds in self.held_s.values())
        return (self.wall_s + held / self.updates) / self.batch

    @property
    def work(self) -> dict[str, Any]:
        """What must be the same in every run of a table."""
        machine = {key: value for key, value in self.note["machine"].items() if key != "precision"}
        counted = {"updates": self.updates, "samples": self.updates * self.batch, "per epoch": self.per_epoch}
        return {**counted, "data": self.note["data"], "scored": dict(self.scored), **machine, **self.note["versions"]}


def measure(history: Any, note: Mapping[str, Any], scores: Mapping[str, str] | None = None) -> Measured:
    """Read a run's journal; `scores` are titles to the names of metrics whose last value is kept.

    Raises ValueError when it has too few log lines or none free of evaluations.
    """
    steps, rates = history.series("speed/samples_per_s")
    if len(steps) < 3:
        raise ValueError(f"{len(steps)} log lines; 3 or more are needed")
    batch = round(rates[-1] / history.series("speed/steps_per_s")[1][-1])
    per_epoch = round(steps[-1] / history.series("train/epoch")[1][-1])
    held = {step for name in history.metrics if name.startswith("eval/") for step in history.series(name)[0]}
    at = [point.t / 1e3 for point in history.metrics["speed/samples_per_s"]]
    # A line is written before the evaluations of its step, so these lie in the window that the line begins.
    windows = range(1, len(steps))
    free = [i for i in windows if not any(steps[i - 1] <= step < steps[i] for step in held)]
    if not free:
        raise ValueError("an evaluation between every two log lines; log more often")
    done = {i: steps[i] - steps[i - 1] for i in windows}
    spent = {i: done[i] * batch / rates[i] for i in windows}
    medians = history.series("speed/step_ms_p50")[1][1:]
    memory = history.series("speed/peak_memory_gb")[1]
    counted = [name.split("/") for name in history.metrics]
    evaluations = [name[1] for name in counted if name[0] == "eval" and name[-1] == "unique_samples"]
    kept = {title: history.series(name)[1] for title, name in (scores or {}).items()}
    return Measured(
        updates=steps[-1],
        batch=batch,
        per_epoch=per_epoch,
        step_s=sum(spent.values()) / sum(done.values()),
        step_p50_s=statistics.median(medians) / 1e3,
        step_least_s=min(medians) / 1e3,
        wall_s=sum(at[i] - at[i - 1] for i in free) / sum(done[i] for i in free),
        memory_gb=memory[-1] if memory else note["peak_resident_gb"],
        scored={name: round(history.series(f"eval/{name}/unique_samples")[1][-1]) for name in evaluations},
        note=note,
        scores={title: values[-1] for title, values in kept.items() if values},
        held_s={name: tuple(history.series(f"time/eval_{name}_s")[1]) for name in evaluations},
        ready_s=at[0] - note["began"],
        waiting_s=sum(spent[i] * share for i, share in _waited(history).items() if i) / sum(done.values()),
    )


def _waited(history: Any) -> dict[int, float]:
    """Of the time of the steps before each log line, the share in which the loop waited for a batch."""
    phases = [history.series(f"time/{phase}_share")[1] for phase in ("data", "transfer", "compute")]
    return {i: one[0] / (sum(one) or 1.0) for i, one in enumerate(zip(*phases, strict=True))}


def refuse_unequal(runs: Mapping[tuple[str, int], Measured], besides: Sequence[str] = ()) -> dict[str, Any]:
    """The work that all runs, by (title, seed), have in common. Raises ValueError naming what differs, and where.

    `besides` names what may differ.
    """
    (first, run), *others = runs.items()
    work = {key: value for key, value in run.work.items() if key not in besides}
    for who, other in others:
        for key, value in work.items():
            if other.work.get(key) != value:
                raise ValueError(
                    f"unequal work: {key} is {value!r} for {first[0]}, seed {first[1]}, "
                    f"and {other.work.get(key)!r} for {who[0]}, seed {who[1]}"
                )
    return work


def spread(values: Sequence[float], form: str) -> str:
    """Median and range; a single value as it is."""
    middle = form.format(statistics.median(values))
    return middle if len(values) < 2 else f"{middle} ({form.format(min(values))}-{form.format(max(values))})"


def circumstances(runs: Sequence[Measured], work: Mapping[str, Any]) -> str:
    """On what machine and under what load, in a sentence."""
    notes = sorted((run.note for run in runs), key=lambda note: note["began"])
    loads = [load for note in notes for load in note["load"]]
    where = work["gpu"] or (
        f"{work['cpu']} ({notes[0].get('instructions', 'instructions unknown')}), {work['cpu_cores']} cores, "
        f"threads {work['threads']}"
    )
    commits = ", ".join(sorted({note["commit"] for note in notes}))
    return (
        f"{where}; torch {work['torch']}; load average {loads[0]:.1f} at the start, {loads[-1]:.1f} at the end, "
        f"{min(loads):.1f} to {max(loads):.1f} between; commit {commits}."
    )


def train(row: Row, seed: int, experiment: str, note_name: str) -> str | None:
    """Train a row unless it has been measured, and leave beside its journal what that does not say.

    Returns what went wrong, None where nothing did.
    """
    if found(row, seed, experiment, note_name) is not None:
        return None
    print(f"== {row.title}, seed {seed}", flush=True)
    from torch.backends.cpu import get_cpu_capability

    before = os.getloadavg()[0]
    process = subprocess.Popen(comparison.command(row, seed, experiment))
    # Of this child alone; RUSAGE_CHILDREN would be the greatest of all so far.
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        return f"{row.title}, seed {seed}: exit code {process.returncode}"
    folder = comparison.finished(row, seed, experiment, alike(row))
    note = {
        "title": row.title,
        "began": folder.info().started,
        "load": [before, os.getloadavg()[0]],
        "peak_resident_gb": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9,
        "commit": commit(),
        # AVX2 has no products of bf16, so that AMP is emulated; AVX512 may have them.
        "instructions": get_cpu_capability(),
    }
    (folder.path / note_name).write_text(json.dumps(note), encoding="utf-8")
    return None


def found(row: Row, seed: int, experiment: str, note_name: str) -> Any:
    """The finished run of a row and seed that a benchmark made, or None."""
    return comparison.finished(row, seed, experiment, alike(row, note_name))


def read(folder: Any, row: Row, note_name: str, scores: Mapping[str, str] | None = None) -> Measured:
    """What a run found did. Raises ValueError when it ran in another precision than its row asks for."""
    from trainkit.checkpoint import storage
    from trainkit.tracking import journal

    newest, _ = storage.newest_valid(folder.checkpoints)
    state = json.loads((newest / storage.STATE).read_text(encoding="utf-8"))
    note = json.loads((folder.path / note_name).read_text(encoding="utf-8"))
    said = [change.partition("=")[2] for change in row.changes if change.startswith("train.precision=")]
    if said and state["machine"]["precision"] != said[-1]:
        raise ValueError(f"{folder.name} ran in {state['machine']['precision']}, not in {said[-1]}")
    there = {
        "run": folder.name,
        "data": state["identity"]["data"],
        "machine": state["machine"],
        "versions": {"torch": state["versions"]["torch"]},
    }
    return measure(journal.read(folder.journal), {**note, **there}, scores)


def commit() -> str:
    """The commit of the code that was run; `+` where code or recipes are not as committed."""
    git = ["git", "-C", str(comparison.ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "trainkit", "recipes"], check=False).returncode
    return f"{head.stdout.strip()}{'+' if changed else ''}" if head.returncode == 0 else "unknown"


def available() -> list[str]:
    """Precisions of this machine, float32 first."""
    import torch

    if not torch.cuda.is_available():
        return ["no", "bf16"]
    return ["no", "fp16", *(["bf16"] if torch.cuda.is_bf16_supported(including_emulation=False) else [])]


def alike(row: Row, note_name: str | None = None) -> Callable[[Any], bool]:
    """Whether a run's batches were read as the row says, and it has the note."""
    from trainkit.config import loader as config

    loader = config.load(comparison.recipe(row), row.changes).loader

    def fits(folder: Any) -> bool:
        noted = note_name is None or (folder.path / note_name).is_file()
        return noted and config.load(folder.recipe).loader == loader

    return fits
