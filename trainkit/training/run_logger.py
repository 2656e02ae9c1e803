"""What a run tells the world: its journal and tracker, its checkpoints, and its lines in the terminal.

The loop calls a witness on every rank; on ranks other than 0 it keeps silent.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from trainkit import targets
from trainkit.checkpoint import storage
from trainkit.checkpoint.async_save import Commit
from trainkit.checkpoint.state_dict import Copies
from trainkit.checkpoint.verification import CheckpointError
from trainkit.config.schema import Recipe
from trainkit.distributed.stop_signal import Stop
from trainkit.distributed.watchdog import Watchdog
from trainkit.errors import of_disk, visible
from trainkit.interfaces import Scores
from trainkit.redact import without_secrets
from trainkit.tracking import journal
from trainkit.tracking.run_folder import RunFolder
from trainkit.training import best as records
from trainkit.training import nonfinite
from trainkit.training.state import State

CHECKPOINT_FAILED = "trainkit.checkpoint_failed"
"""Tag of a run that went on without a checkpoint: at which step, why, and from which on there are some again."""
ELSEWHERE = "trainkit.elsewhere"
"""Tag of a run that was resumed with other software or hardware: at which step, and what differs."""
CHECKPOINT_REFUSED = "trainkit.checkpoint_refused"
"""Tag of a run of which a checkpoint was damaged and left aside: which, and what was found."""


@dataclass
class Witness:
    """One run as the loop sees it."""

    recipe: Recipe
    recipe_hash: str
    recipe_text: str
    folder: RunFolder
    tracker: Any
    """A `Tracker` on rank 0, `Silent` elsewhere."""
    main: bool
    stopping: Callable[[], bool]
    """Whether this process is to stop: a signal has asked it to, or a checkpoint that had to be was not written. Where
    signals are heard, a `Stop`."""
    found: Mapping[str, Path] = field(default_factory=dict)
    """Weights that the task needs, by name."""
    replayed: list[Any] = field(default_factory=list)
    """Journal events behind the checkpoint that is resumed from."""
    checkpoint: Path | None = None
    """Where to resume from."""
    elastic: bool = False
    """Whether the number of processes may have changed since."""
    outputs: Path | None = None
    """Folder of the outputs of frozen networks that runs share. None: nothing is stored, and where there are too many
    for the memory one stands for all, since only speeds are measured."""
    ceilings: Any = None
    """What the loader and the network could reach alone: `speed.evidence.Ceilings`, where it is known."""
    held: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each evaluation that was held, by name."""
    costs: dict[str, float] = field(default_factory=dict)
    """Seconds that each evaluation takes, as far as its first batch tells."""
    clock: Any = None
    """The training's `Clock`, from its start on."""
    source: str = "RECIPE"
    """The recipe's file, as a command would name it."""
    changed: str = ""
    """What the run follows and what was changed since, as its page says it."""
    allotted: Mapping[str, float] = field(default_factory=dict)
    """What an hour of the run costs, by metric: `costs.allotted`."""
    watch: Callable[[int, Mapping[str, float]], bool] | None = None
    """Told of each evaluation on rank 0: step, and scores by full name. True ends the run."""
    began: float = field(default_factory=time.perf_counter)
    """When, by `time.perf_counter`, its wall-clock began: with the command, or as the run before it ended."""

    def __post_init__(self) -> None:
        self._bar = None
        self._replaced: dict[int, Mapping[str, Any]] | None = None
        # What the checkpoint that is resumed from says of the time until then.
        self._before = storage.state_of(self.checkpoint) if self.checkpoint else {}
        self._due = 0
        self._told = 0.0
        self._given_up = False
        self._commit: Commit | None = None
        self._failed = ""
        self.stop = Stop.of(self.stopping)
        self._watchdog: Watchdog | None = None
        self._signalled, self.stopping = self.stopping, self._asked_to_stop

    def elapsed(self) -> float:
        """Seconds of the training; of a resumed one also those until its checkpoint, and not what came to nothing."""
        return self._before.get("elapsed", 0.0) + self.clock.elapsed()

    def spent(self) -> dict[str, float]:
        """What the training has cost so far, counted as `elapsed` is: hours of cores, and of GPUs where it has them."""
        before = self._before.get("spent", {})
        own = {name: many * self.clock.elapsed() / 3600 for name, many in self.allotted.items()}
        return {name: before.get(name, 0.0) + own.get(name, 0.0) for name in {**before, **own}}

    def say(self, text: str) -> None:
        """Print lines, above the progress bar where there is one."""
        if not self.main:
            return
        text = visible(without_secrets(text))
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text, flush=True)

    def progress(self, step: int, steps: int) -> None:
        """A step has ended. Draws nothing without a terminal."""
        if step < self._due or not self.main:
            return
        if not sys.stderr.isatty():
            self._due = steps + 1
            return
        now, seconds = time.perf_counter(), self.recipe.log.progress.seconds
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=steps, initial=step, unit="step", mininterval=seconds, dynamic_ncols=True)
            self._told = now
        done = step - self._bar.n
        self._bar.update(done)
        # Told again after a quarter of the time between two drawings, at this pace: between, a step costs a comparison.
        self._due = min(steps, step + max(1, int(0.25 * seconds * done / max(now - self._told, 1e-9))))
        self._told = now

    def line(self, step: int, steps: int, learned: Mapping[str, float], measured: Mapping[str, float]) -> None:
        """Write down loss, speed and time shares since the last line, and say the first two."""
        self.tracker.log(step, {**learned, **measured})
        loss, rate = learned["train/loss"], measured.get("speed/samples_per_s", 0.0)
        if self._bar is not None:
            # As the end of the run will say it: that of one line is up and down with what the machine does.
            mean = self.recipe.train.batch_size * self.clock.steps / max(self.clock.training, 1e-9)
            self._bar.set_postfix_str(f"loss {loss:.4f}, {mean:.0f} samples/s mean so far", refresh=False)
        else:
            left = (steps - step) * self.recipe.train.batch_size / rate if rate else 0.0
            self.say(f"step {step}/{steps}  loss {loss:.4f}  {rate:.1f} samples/s  {_duration(left)} left")

    def scored(
        self,
        step: int,
        name: str,
        scored: Mapping[str, Scores],
        metrics: Mapping[str, float],
        seconds: float,
        leads: bool,
    ) -> None:
        """Write down an evaluation: its scores, tables and pictures, and when it leads its rows."""
        self.held.setdefault(name, []).append(seconds)
        counted = {f"eval/{name}/unique_samples": scored[name].samples, f"time/eval_{name}_s": seconds}
        decides = self.recipe.best.metric if self.recipe.best else ""
        best = {f"{'best' if k == decides else 'at_best'}/{k}": v for k, v in metrics.items()} if leads else {}
        self.tracker.log(step, {**metrics, **counted, **best})
        if self.recipe.time_to:
            now = self.elapsed()
            for target in self.tracker.once(step, targets.reached(self.recipe.time_to, metrics, now)):
                self.say(f"step {step}: {target.removeprefix(targets.PREFIX)} reached after {_duration(now)}")
        bounds = {f"{title}/{key}": bound for title, scores in scored.items() for key, bound in scores.chance.items()}
        if bounds:
            self.tracker.event(step, "chance", bounds)
        if leads and self.recipe.log.rows:
            for word, rows in records.kept_rows(self.recipe, name, scored).items():
                self.tracker.table(f"rows/{word}_best.parquet", rows)
        for title, scores in scored.items():
            word = title.replace("/", "_")
            for kind, columns in scores.tables.items():
                for when in ("last", "best") if leads else ("last",):
                    self.tracker.table(f"tables/{word}_{kind}_{when}.csv", columns)
            if scores.pictures and self.main:
                from trainkit.plots.run_figures import keep_pictures

                keep_pictures(self.tracker, step, title, scores.pictures)
        whole = [(key, value) for key, value in scored[name].metrics.items() if "." not in key]  # `dice.sr`: of a class
        shown = [f"{key} {value:.4g}" for key, value in whole[:6] if f"{name}/{key}" != decides]
        if decides in metrics:  # it may be of the averaged weights, or of a class
            marked = f"{decides.removeprefix(f'{name}/')}* {metrics[decides]:.4g}"
            shown.insert(0, f"{marked} (best so far)" if leads else marked)
        self.say(f"step {step}: {name}: {'  '.join(shown)}")
        if self.main and self.watch is not None and self.watch(step, metrics):
            self._given_up = True

    def elsewhere(self, step: int, differs: Sequence[str]) -> None:
        """Say that a run goes on with other software or hardware than its checkpoint was written with, if it does."""
        if differs:
            self.say(f"resumed elsewhere ({', '.join(differs)}): it goes on, and equal bits are no longer promised")
            self.tracker.event(step, "elsewhere", {"differs": list(differs)})
            self.tracker.tags({ELSEWHERE: f"step {step}: {', '.join(differs)}"})

    def draw(self, curves: Mapping[str, Mapping[str, Any]]) -> None:
        """Draw the figures as they are now."""
        if self.main:
            from trainkit.plots.run_figures import draw

            with contextlib.suppress(OSError):  # the figures are then of what the disk has taken
                self.tracker.commit()
            best = self.recipe.best.metric if self.recipe.best else None
            draw(self.tracker, journal.read(self.folder.journal), best, curves)

    def damaged(self) -> list[Mapping[str, Any]]:
        """What `replaced` was told so far, before an interruption too; on rank 0."""
        if self._replaced is None:
            self._replaced = {}
            self.tracker.commit()
            if self.main and self.folder.journal.is_file():  # a preflight keeps none
                events = journal.read(self.folder.journal).events
                self._replaced = {e.data["row"]: e.data for e in events if e.name == "sample_replaced"}
        return list(self._replaced.values())

    def replaced(self, step: int, damaged: Iterable[Mapping[str, Any]]) -> None:
        """Write down samples that were damaged, each row once in a run, and what was trained on in their place."""
        if not self.main:
            return
        known = len(self.damaged())
        for one in damaged:
            if one["row"] not in self._replaced:
                self._replaced[one["row"]] = one
                self.tracker.event(step, "sample_replaced", one)
        if len(self._replaced) > known:
            columns = {key: [one[key] for one in self._replaced.values()] for key in ("row", "instead", "said")}
            self.tracker.table("tables/damaged.csv", columns)

    def begun(self, moved: Callable[[], Any], rank: int) -> None:
        """The first update has been made: from here on there is something to save, and it is watched that it goes on.

        `moved` changes as long as it does. Comes again where the run goes back to the checkpoint that it began with.
        """
        self.stop.save_first()
        if self._watchdog is None and (limit := self.recipe.limits.hang) is not None:
            self._watchdog = Watchdog(limit.seconds, moved, self.folder.path, rank)
            self._watchdog.start()

    def over(self) -> None:
        """The training is over."""
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None

    def expect(self, state: State) -> None:
        """A first update has been made, and checkpoints are to come: their memory is got beside the next updates."""
        if self.main:
            self.clock.to("setup")
            threading.Thread(target=state.room(), name="trainkit-room", daemon=True).start()

    def commit(
        self, step: int, copies: Copies, state: Mapping[str, Any], best: list[int], required: bool = False
    ) -> None:
        """Begin to write a checkpoint, and then to prune, beside the training. Called on rank 0, after `settle`.

        Before the next update, and before anything else changes what was promised to `copies`, call `copied`. Without
        one that is `required` the run does not go on, whatever its recipe says.
        """
        # What is logged from here on is computed again by a run that is resumed from this.
        state = {**state, "journal": self.tracker.position(), "spent": self.spent()}
        born = copies.born
        required = required or self.recipe.checkpoints.failing == "stop"

        def write(tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
            try:
                self._write(step, tensors, state, best, born)
            except CheckpointError as error:
                if not required:  # said now, and not when the next is due
                    self.say(f"step {step}: {error}; the training goes on and tries again at its next checkpoint")
                    self.tracker.event(step, "checkpoint_failed", {"error": str(error)})
                raise

        self._commit = Commit(step, copies, write, required)
        self._commit.start()

    def _write(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        best: list[int],
        born: frozenset[str],
    ) -> None:
        nonfinite.refuse(tensors, born, step)
        self.folder.refuse_deleted()
        try:
            self.tracker.commit()
        except OSError as error:  # no checkpoint is written before the journal that it points into
            said = of_disk(error, self.folder.journal)
            found, remedy = (said.found, said.remedy) if said else (str(error), "")
            raise CheckpointError(str(self.folder.journal), found, remedy=remedy) from error
        storage.write(self.folder.checkpoints, step, tensors, state, self.recipe_text)
        # After a resume from an older checkpoint, or a rollback, later ones belong to a future that was given up.
        storage.drop_after(self.folder.checkpoints, step)
        keep = self.recipe.checkpoints
        storage.prune(self.folder.checkpoints, keep.keep_last, best[: keep.keep_best])
        with contextlib.suppress(OSError):  # for people; the checkpoint says it itself
            self.folder.update(last_step=step)

    def copied(self, then: str) -> None:
        """Wait until a checkpoint that is being written needs nothing any more of what an update changes.

        The clock counts the wait as that of a checkpoint and goes on with the phase `then`.
        """
        if self._commit is not None and self._commit.copying:
            self.clock.to("checkpoint")
            self._commit.copied()
            self.clock.to(then)

    def settle(self) -> int | None:
        """Wait until the checkpoint that is being written lies on the disk, and what it supersedes is gone.

        Returns the step of one that could not be written, without which the training goes on; None where there is none.
        Raises what became of one that had to be: a UserError where the disk is full or fails.
        """
        if self._commit is None:
            return None
        self._commit.join()
        commit, self._commit = self._commit, None
        if commit.ends:
            raise commit.failure
        if commit.failure is not None:
            self._failed = f"step {commit.step}: {commit.failure}"
            self.tracker.tags({CHECKPOINT_FAILED: self._failed})
            return commit.step
        if self._failed:
            self.say(f"step {commit.step}: checkpoints can be written again")
            self.tracker.tags({CHECKPOINT_FAILED: f"{self._failed}; written again at step {commit.step}"})
            self._failed = ""
        return None

    def _asked_to_stop(self) -> bool:
        # The save with which a run ends settles, and so raises on every rank why the one before could not be written.
        return self._signalled() or self._given_up or (self._commit is not None and self._commit.ends)

    def newest_checkpoint(self) -> Path | None:
        """The newest checkpoint that verifies."""
        path, problems = storage.newest_valid(self.folder.checkpoints)
        refused(self.tracker, problems, self.say)
        return path

    def checkpoint_before(self, step: int, latest: int) -> Path | None:
        """The newest checkpoint of `step` or earlier that verifies, else the first of a later one up to `latest`."""
        path, problems = storage.valid_before(self.folder.checkpoints, step, latest)
        refused(self.tracker, problems, self.say)
        return path

    def close(self) -> None:
        """Wait for a checkpoint that is being written, and take the progress bar down.

        Where the training ended with an error, that is what ended it: one of the checkpoint is said and not raised.
        """
        self.over()
        try:
            self.settle()
        except Exception as error:
            self.say(f"the last checkpoint: {error}")
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def refused(tracker: Any, problems: Sequence[str], say: Callable[[str], Any]) -> None:
    """Say and note that checkpoints were damaged and are left aside: a line, an event and a tag."""
    for problem in problems:
        say(f"left aside: {problem}")
        tracker.event(0, "checkpoint_refused", {"error": problem})
    if problems:
        tracker.tags({CHECKPOINT_REFUSED: problems[0]})


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
