"""Write metrics and events of a training to its journal, its tracker and the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.checkpoint import storage
from trainkit.config.schema import Recipe
from trainkit.files import Json
from trainkit.interfaces import Columns, Scores
from trainkit.speed import cost
from trainkit.speed.clock import Clock
from trainkit.speed.limits import ThroughputLimits
from trainkit.terminal import LogTable, Page, ProgressLine, bar_stream, clock_time, shown
from trainkit.tracking import journal
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.tracker import Silent, Tracker
from trainkit.training.best import kept_rows

ELSEWHERE = "trainkit.elsewhere"
"""Tag of a run that was resumed with other software or hardware: at which step, and what differs."""
CHECKPOINT_REFUSED = "trainkit.checkpoint_refused"
"""Tag of a run of which a checkpoint was damaged and left aside: which, and what was found."""
_SIGN_OF_LIFE = 60.0
"""Seconds between two lines of a child run in a log."""


@dataclass
class RunLogger:
    """Write metrics and events to journal, tracker and terminal. Every rank calls it; only rank 0 writes.

    Without a folder and a tracker, as `RunLogger(recipe)`, it is silent.
    """

    recipe: Recipe
    folder: RunFolder | None = None
    tracker: Tracker | Silent = field(default_factory=Silent)
    """A `Tracker` on rank 0, `Silent` elsewhere."""
    main: bool = False
    """Whether this is rank 0 of a run that is told of."""
    source: str = "RECIPE"
    """The recipe's file, as a command would name it."""
    changed: str = ""
    """What the run follows and what was changed since, as its page says it."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """What an hour of the run costs, by metric: `cost.allotted`."""
    limits: ThroughputLimits | None = None
    """What the loader and the network could reach alone, where it is known."""
    began: float = field(default_factory=time.perf_counter)
    """When, by `time.perf_counter`, its wall-clock began: with the command, or as the run before it ended."""
    busy: float | None = None
    """CPU seconds of this process at `began`; None where several train, which know nothing of each other's."""
    clock: Clock = field(default_factory=Clock)
    """The clock of the training."""
    evaluation_s: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each evaluation that was run, by name."""

    steps_per_epoch: int = 0
    """For the log table; set by the trainer."""
    batch_size: int = 0
    """Samples of a step over all processes; set by the trainer."""
    label: str = ""
    """Name of a child run. It prints no table: its parent prints one row for it."""

    def __post_init__(self) -> None:
        self._progress_line: ProgressLine | None = None
        self._table: LogTable | None = None
        self._replaced: dict[int, Mapping[str, Json]] | None = None
        self._due = 0
        self._told = (0, 0.0)
        self._loss = ""
        self._spoke = time.perf_counter()

    def used(self) -> dict[str, float]:
        """Return the core hours that the process and its children have computed, by metric; empty if not known."""
        return {} if self.busy is None else {cost.USED: (cost.busy() - self.busy) / 3600}

    def require_folder(self) -> RunFolder:
        """Return the folder of the run. Raises RuntimeError where there is none: a tool keeps nothing."""
        if self.folder is None:
            raise RuntimeError("a training without a folder has no checkpoints and no journal")
        return self.folder

    def say(self, text: str) -> None:
        """Print lines, above the progress bar where there is one."""
        self.show([f"{self.label}: {text}" if self.label else text])

    def show(self, page: Page) -> None:
        """Print a page, above the progress bar where there is one."""
        if not self.main:
            return
        text = shown(page, sys.stdout)
        if self._progress_line is not None:
            self._progress_line.above(text)
        else:
            print(text, flush=True)

    def progress(self, step: int, steps: int) -> None:
        """Move the progress bar after a step. Draws nothing without a terminal."""
        if step < self._due or not self.main:
            return
        now, seconds = time.perf_counter(), self.recipe.log.progress.seconds
        if self._progress_line is None:
            if (stream := bar_stream()) is None:
                self._due = steps + 1
                return
            self._progress_line = ProgressLine(stream, steps, seconds, self.label)
            self._told = (step - 1, now - seconds)
        self._progress_line.update(step, self._facts)
        done, before = step - self._told[0], self._told[1]
        # Asked again after a quarter of the time between two drawings: in between, a step costs a comparison.
        self._due = min(steps, step + max(1, int(0.25 * seconds * done / max(now - before, 1e-9))))
        self._told = (step, now)

    def _facts(self) -> list[str]:
        """Return what the progress bar shows beside the step: the loss of the last log line, and mean rates so far."""
        seconds = max(self.clock.training, 1e-9)
        rate = self.clock.steps / seconds
        rates = [f"{rate * self.batch_size:.0f} samples/s" if rate * self.batch_size >= 10 else "", f"{rate:.3g} it/s"]
        return [text for text in (self._loss, *rates) if text]

    def _log_table(self) -> LogTable:
        if self._table is None:
            decides = self.recipe.best.metric if self.recipe.best else ""
            self._table = LogTable(decides, self.recipe.train.ema is not None, self.steps_per_epoch)
        return self._table

    def line(
        self, step: int, steps: int, batch_size: int, learned: Mapping[str, float], measured: Mapping[str, float]
    ) -> None:
        """Write down loss, speed and time shares since the last line, and print a row of the log table.

        `batch_size`: samples of a step over all processes.
        """
        self.tracker.log(step, {**learned, **measured})
        loss, rate = learned["train/loss"], measured.get("speed/samples_per_s", 0.0)
        self._loss = f"loss {loss:.4f}"
        left = (steps - step) * batch_size / rate if rate else 0.0
        if not self.label:
            self.show(self._log_table().log_row(step, loss, learned.get("train/lr"), rate, left))
        elif self._progress_line is None and time.perf_counter() - self._spoke > _SIGN_OF_LIFE:
            self._spoke = time.perf_counter()
            self.say(f"step {step}/{steps}, loss {loss:.4f}, {clock_time(left)} left")

    def scored(
        self,
        step: int,
        name: str,
        scored: Mapping[str, Scores],
        metrics: Mapping[str, float],
        seconds: float,
        leads: bool,
    ) -> None:
        """Write down an evaluation: its scores, tables and images, and when it leads its rows."""
        self.evaluation_s.setdefault(name, []).append(seconds)
        counted = {f"eval/{name}/unique_samples": scored[name].samples, f"time/eval_{name}_s": seconds}
        decides = self.recipe.best.metric if self.recipe.best else ""
        best = {f"{'best' if k == decides else 'at_best'}/{k}": v for k, v in metrics.items()} if leads else {}
        self.tracker.log(step, {**metrics, **counted, **best})
        bounds = {f"{title}/{key}": bound for title, scores in scored.items() for key, bound in scores.chance.items()}
        if bounds:
            self.tracker.event(step, "chance", bounds)
        if leads and self.recipe.log.rows:
            for word, rows in kept_rows(self.recipe, name, scored).items():
                self.tracker.table(f"rows/{word}_best.parquet", rows)
        for title, scores in scored.items():
            word = title.replace("/", "_")
            for kind, columns in scores.tables.items():
                for when in ("last", "best") if leads else ("last",):
                    self.tracker.table(f"tables/{word}_{kind}_{when}.csv", columns)
            if scores.pictures and self.main:
                from trainkit.plots.run_figures import keep_pictures

                keep_pictures(self.tracker, step, title, scores.pictures)
        if not self.label:
            self.show(self._log_table().evaluation_row(step, name, metrics, leads))

    def changed_environment(self, step: int, differs: Sequence[str]) -> None:
        """Report that a run continues with other software or hardware than its checkpoint was written with, if so."""
        if differs:
            said = f"resumed in another environment ({', '.join(differs)})"
            self.say(f"{said}: bitwise identical results are no longer guaranteed")
            self.tracker.event(step, "elsewhere", {"differs": list(differs)})
            self.tracker.tags({ELSEWHERE: f"step {step}: {', '.join(differs)}"})

    def stopped_early(self, step: int, metric: str) -> None:
        """Report that a score no longer improves, and that training ends with it."""
        self.say(f"step {step}: {metric} no longer improves; stopping early")
        self.tracker.event(step, "stopped_early", {"metric": metric})

    def lr_reduced(self, step: int, times: int) -> None:
        """Report that the learning rate is reduced, since a score no longer improves."""
        curve = self.recipe.train.schedule
        self.say(f"step {step}: {curve.metric} no longer improves; learning rate x {curve.gamma:g} (reduction {times})")
        self.tracker.event(step, "lr_reduced", {"metric": curve.metric, "times": times})

    def draw(self, curves: Mapping[str, Columns]) -> None:
        """Draw the figures as they are now."""
        if self.main and self.folder is not None:
            from trainkit.plots.run_figures import draw

            draw(self.tracker, curves)

    def damaged(self) -> list[Mapping[str, Json]]:
        """Return the samples given to `replaced` so far, those before an interruption too; on rank 0."""
        if self._replaced is None:
            self._replaced = {}
            self.tracker.commit()
            if self.main and self.folder is not None and self.folder.journal.is_file():  # a preflight keeps none
                events = journal.read(self.folder.journal).events
                self._replaced = {e.data["row"]: e.data for e in events if e.name == "sample_replaced"}
        return list(self._replaced.values())

    def replaced(self, step: int, damaged: Iterable[Mapping[str, Json]]) -> None:
        """Write down samples that were damaged, each row once in a run, and what was trained on in their place."""
        if not self.main:
            return
        known = {one["row"]: one for one in self.damaged()}
        new = {one["row"]: one for one in damaged if one["row"] not in known}
        for one in new.values():
            self.tracker.event(step, "sample_replaced", one)
        if new:
            self._replaced = {**known, **new}
            columns = {key: [one[key] for one in self._replaced.values()] for key in ("row", "instead", "said")}
            self.tracker.table("tables/damaged.csv", columns)

    def newest_checkpoint(self) -> Path | None:
        """Return the newest checkpoint that verifies."""
        if self.folder is None:
            return None
        path, problems = storage.newest_valid(self.folder.checkpoints)
        self.refused_checkpoints(problems)
        return path

    def refused_checkpoints(self, problems: Sequence[str]) -> None:
        """Report checkpoints that were damaged and are left aside: a line, an event and a tag."""
        for problem in problems:
            self.say(f"left aside: {problem}")
            self.tracker.event(0, "checkpoint_refused", {"error": problem})
        if problems:
            self.tracker.tags({CHECKPOINT_REFUSED: problems[0]})

    def close(self) -> None:
        """Take the progress bar down."""
        if self._progress_line is not None:
            self._progress_line.close()
            self._progress_line = None
