"""Train a recipe: `Trainer.fit()` from start to end, or `Trainer.step()` one optimizer step at a time.

The only backward pass of the repository is here. The trainer knows tasks and data only through the protocols of
`interfaces.py`. Every method runs on every rank. Guarantees of its parts:
- `TrainState` and `Checkpointer`: a resumed run is bitwise identical to an uninterrupted one.
- `EventSchedule`: evaluations, log lines and checkpoints run at their steps and within their budgets.
- `NonFiniteGuard`: a non-finite step ends the run one step later, and before a checkpoint or an evaluation uses it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType

from trainkit import rng
from trainkit.config.schema import Recipe
from trainkit.distributed.runtime import Runtime
from trainkit.distributed.stop_poll import StopPoll
from trainkit.distributed.stop_signal import Stop, Stopped
from trainkit.distributed.watchdog import Watchdog
from trainkit.errors import UserError
from trainkit.interfaces import Dataset, Loss, StepContext
from trainkit.speed import device_timeline
from trainkit.speed.clock import Clock
from trainkit.tensors import full_tensor
from trainkit.training import plan as planning
from trainkit.training.batch_stream import BatchStream
from trainkit.training.checkpointer import Checkpointer, Resume, load, recorded_compile
from trainkit.training.evaluator import Evaluator
from trainkit.training.events import EventSchedule, recorded_decisions
from trainkit.training.gradients import Update, finish_gradients
from trainkit.training.loss_meter import LossMeter
from trainkit.training.model import Model
from trainkit.training.nonfinite import NonFiniteGuard, all_finite
from trainkit.training.out_of_memory import MicroBatching
from trainkit.training.outcome import Outcome, summarize
from trainkit.training.plan import Plan
from trainkit.training.run_logger import RunLogger
from trainkit.training.state import identity
from trainkit.training.throughput_monitor import ThroughputMonitor

MOST_SKIPPED = 10
"""Steps in a row that may be skipped before the run ends."""


class Trainer:
    """One training: its state, and the parts that act on it.

    `weights` has the files that the task needs, by name; `cache` is the shared folder of teacher outputs; tools leave
    `logger` silent. Raises UserError for errors that the user can correct: weights that do not fit, a teacher at chance
    level, a loss that is not finite, a full disk. Checkpoints committed before that stay.
    """

    begun = False
    """True from the first step of `fit` on."""

    def __init__(
        self,
        recipe: Recipe,
        data: Dataset,
        runtime: Runtime,
        logger: RunLogger | None = None,
        *,
        weights: Mapping[str, Path] | None = None,
        resume: Resume | None = None,
        cache: Path | None = None,
        stop: Stop | None = None,
    ):
        self.recipe, self.data, self.runtime = recipe, data, runtime
        self.logger = logger = logger or RunLogger(recipe)
        self.clock = logger.clock = Clock(device_timeline.of(runtime.device), began=logger.began)
        self.resume, self.stop = resume or Resume(), stop or Stop()
        runtime.choose_compile(recipe, planning.updates(recipe, data, runtime.world)[1], recorded_compile(self.resume))
        self.model = model = Model(recipe, data.meta, runtime, weights or {})
        self.plan = Plan.make(recipe, data, runtime.world, runtime.rank)
        logger.steps_per_epoch, logger.batch_size = self.plan.steps_per_epoch, self.plan.batch_size
        gates, decisions = planning.gates(recipe, self.plan), recorded_decisions(self.resume.events)
        self.events = EventSchedule(gates, runtime.broadcast, logger.tracker.event, decisions)
        self.monitor, self.meter = ThroughputMonitor(recipe, self.plan, runtime, logger), LossMeter(runtime)
        self.state = state = model.state(self.events, self.meter, identity(recipe, data, model.networks, runtime))
        load(self.resume, state, runtime, logger)
        self.first_step = state.step
        self.micro_batching = MicroBatching(recipe, data, model.networks, runtime, state, logger, self.resume.events)
        self.plan = self.micro_batching.apply(self.plan)
        self.batches = BatchStream(recipe, data, model, runtime, logger, cache, self.stop)
        self.checkpoints = Checkpointer(recipe, state, model, self.batches, runtime, logger, self.resume)
        self.evaluator = Evaluator(
            recipe, data, model, runtime, logger, self.stop,
            state=state, checkpoints=self.checkpoints, micro_batching=self.micro_batching,
        )  # fmt: skip
        # With `skip` a step is judged before it is made.
        self.guard = NonFiniteGuard() if recipe.train.nonfinite == "stop" else None
        self.stop_poll = StopPoll(runtime, self.stopping)
        self.watchdog: Watchdog | None = None

    # ---- The whole training

    def fit(self) -> Outcome:
        """Train to the end of the recipe, or until a stop is requested."""
        stopped = not self.start()
        while not stopped and self.state.step < self.plan.steps and not self.stops_early():
            self.stop_poll.ask()
            self.begun = True
            self.step()
            if self.state.step == self.first_step + 1:
                self.save_from_here()
            stopped = not self.after_step(asked=self.stop_poll.answer())
        return self.finish(stopped)

    def start(self) -> bool:
        """Print the plan, run the evaluations at the start, compute cached outputs. False: a stop was requested."""
        costs = self.evaluator.measure_costs()
        said = planning.describe(self.recipe, self.plan, self.evaluator.splits, costs)
        notes = [planning.plan_line("Note", note) for note in (*self.data.notes, *self.model.networks.notes)]
        device = planning.plan_line("Device", self.runtime.settings(self.recipe).removeprefix("device "))
        if not self.logger.label:  # child runs have one plan
            self.logger.show([device, said, *notes, ""])
        self.monitor.begin(self.state.step)
        if self.resume.path is None:
            self.evaluator.fit_before_training()
            self.evaluator.score_frozen()
            if self.evaluator.run(name for name, e in self.recipe.evaluations.items() if e.at_start):
                raise Stopped
        if not self.open():
            return False
        if self.plan.steps:
            self.evaluator.begin_training()
        if self.state.step < self.events.next:
            return True
        self.stop.save_first()  # it was stopped before what is due at this step was done
        return self.run_events()

    def open(self) -> bool:
        """Find or compute cached teacher outputs, and open the batches. False: a stop was requested meanwhile."""
        whole = self.batches.open(resumed=self.resume.path is not None)
        self.restart_batches()
        self.model.bare.train()
        return whole

    def save_from_here(self) -> None:
        """From the first step on a stop saves a checkpoint, and a watchdog detects a hang."""
        self.stop.save_first()
        if threading.current_thread() is not threading.main_thread():
            return  # it would end a process that does other things too
        if self.logger.folder is not None and (limit := self.recipe.limits.hang) is not None:
            runtime, clock, folder = self.runtime, self.clock, self.logger.folder.path
            self.watchdog = Watchdog(limit.seconds, lambda: (runtime.asked, *clock.moved), folder, runtime.rank)
            self.watchdog.start()

    def stopping(self) -> bool:
        """Return whether to stop: by a signal, by the watcher of the scores, or because the disk failed."""
        return self.stop() or self.checkpoints.writer.ends_run

    def finish(self, stopped: bool) -> Outcome:
        """Run the final evaluations, save, and summarise. After a stop only save: resume does the rest."""
        self.runtime.synchronize()
        self.batches.log_damage(self.state.step)
        self.batches.close()
        if not stopped:
            self.log()
            ends = [name for name, e in self.recipe.evaluations.items() if e.at_end]
            stopped = bool(self.evaluator.run(n for n in ends if self.evaluator.at.get(n) != self.state.step))
        if self.batches.complete and (stopped or self.recipe.checkpoints.at_end):
            self.checkpoints.save(required=True, again=stopped)
        self.checkpoints.wait()
        status = "KILLED" if stopped else "FINISHED"
        return summarize(status, self.state, self.plan, self.evaluator, self.monitor, self.logger)

    # ---- One step

    def step(self) -> Update:
        """Make one optimizer step. Tools call `open` before."""
        at = self.position()
        update = self.forward_backward(at)
        self.apply(update, at)
        self.state.step += 1
        self.clock.step()
        self.logger.progress(self.state.step, self.plan.steps)
        self.monitor.step(self.state.step)
        return update

    def position(self) -> StepContext:
        """Return the position of the current step."""
        step = self.state.step
        epoch, _ = self.plan.where(step)
        gather = self.plan.gathered(self.monitor.gather)
        return StepContext(step, epoch, step / self.plan.steps, gather, self.runtime.autocast, self.plan.place)

    def forward_backward(self, at: StepContext) -> Update:
        """Compute the gradients of a step; if out of memory, in smaller micro-batches of the same samples."""
        undoes = self.recipe.train.nonfinite == "skip" or self.micro_batching.halving
        update = Update(at.step, [], self.model.copy_buffers() if undoes else [])
        for attempt in self.micro_batching.attempts(partial(self.begin_again, update)):
            with attempt:
                update.losses = self.accumulate(at)
        return update

    def begin_again(self, update: Update, oom_reason: str) -> None:
        """Undo a forward and backward pass for which memory ran out, and halve the micro-batches."""
        self.plan = self.micro_batching.halve(self.plan, oom_reason)
        self.model.restore_buffers(update.buffers)
        self.model.zero_grad()
        self.restart_batches()

    def accumulate(self, at: StepContext) -> list[Loss]:
        """Accumulate the gradients of a step's micro-batches, averaged over processes; return their losses."""
        losses, at = list[Loss](), self.micro_batching.context(at)
        for micro in range(self.plan.accumulation):
            batch = next(self.batches)
            self.runtime.begin_batch()
            self.clock.to("forward")
            rng.reseed(self.runtime.device, self.recipe.seed, at.step, micro, self.plan.place)
            with self.runtime.no_sync(self.model.net, last=micro == self.plan.accumulation - 1):
                loss = self.plan.counted(self.recipe.task.loss(self.model.net, self.model.networks, batch, at))
                self.clock.to("backward")
                # Gradients are averaged over ranks, so the sum over a rank is scaled by their number.
                self.runtime.backward(loss.sum, self.runtime.world / self.plan.batch_size)
            losses.append(Loss(loss.sum.detach(), loss.weight, loss.logs))
        self.clock.to("optimizer")
        return losses

    def apply(self, update: Update, at: StepContext) -> None:
        """Finish the gradients of a step, pass it to the guard, and change the weights."""
        params, optim = self.model.params, self.recipe.optim
        update.norm = finish_gradients(self.runtime, params, self.plan, update.losses, optim, self.model.divided)
        update.finite = all_finite(update.norm, update.losses, self.runtime)
        if self.guard is not None:
            self.guard.observe(update.step, update.finite)
        if self.guard is None and not bool(update.finite):
            self.skip(update)
        else:
            self.checkpoints.wait_for_copies("optimizer")  # what one still copies must not change
            self.model.update(self.plan.lr(self.recipe, at.step, self.state.plateau["reduced"]), at.step)
            self.meter.add(update.losses, full_tensor(update.norm))
        self.model.zero_grad()

    def skip(self, update: Update) -> None:
        """Undo the forward pass of a step that is not finite. Raises UserError if the last ten were all skipped."""
        self.model.restore_buffers(update.buffers)
        if self.state.scaler is not None:
            self.state.scaler.update()  # it has looked at these gradients, and would not look at the next
        step, left_out = update.step, self.state.left_out
        left_out.append(step)
        self.logger.tracker.event(step, "left_out", {"reason": "loss or gradient not finite"})
        if left_out[-MOST_SKIPPED:] == list(range(step - MOST_SKIPPED + 1, step + 1)):
            found = f"{MOST_SKIPPED} steps in a row were not finite"
            raise UserError(f"step {step}", found, remedy="lower optim.lr")

    # ---- Between steps

    def after_step(self, asked: bool = False) -> bool:
        """Judge the step, and run the events that are due. False: a stop was requested."""
        due = self.state.step >= self.events.next
        self.judge(wait=asked or due or self.state.step == self.plan.steps)
        return not asked and (not due or self.run_events())

    def judge(self, wait: bool) -> None:
        """End the run if a step was not finite; `wait`: judge the last step too, because something is built on it."""
        if self.guard is not None:
            self.guard.judge(wait)

    def restart_batches(self) -> None:
        """Read batches from the current step on. Workers are not forked while a thread writes a checkpoint."""
        self.checkpoints.wait()
        self.batches.restart(self.plan, self.state.step)

    def run_events(self) -> bool:
        """Log, evaluate, save and draw if due. False: a stop was requested; unfinished events are due on resume."""
        state, events = self.state, self.events
        self.runtime.synchronize()
        elapsed = self.clock.elapsed()
        due = events.ask(state.step, state.elapsed + elapsed, elapsed / max(1, state.step - self.first_step))
        if "log" in due:
            self.log()
        if left := self.evaluator.run(name.removeprefix("evaluate.") for name in due if name.startswith("evaluate.")):
            undone = {f"evaluate.{name}" for name in left} | {"checkpoint", "safeguard", "figures"}
            events.give_back(undone.intersection(due))
            return False
        if "checkpoint" in due or ("safeguard" in due and state.step < self.plan.steps):
            self.checkpoints.save()
        if "figures" in due:
            self.clock.to("log")
            self.logger.draw(self.evaluator.curves)
        return True

    def log(self) -> None:
        """Log loss, learning rate, gradient norm, speed and time shares since the last line."""
        self.clock.to("log")
        if not self.meter.batches:
            return
        skipped, lr = len(self.state.left_out), self.model.optimizer.param_groups[0]["lr"]
        learned = {**self.meter.read(), **({"train/left_out": skipped} if skipped else {})}
        learned |= {"train/lr": lr, "train/epoch": self.state.step / self.plan.steps_per_epoch}
        self.logger.line(self.state.step, self.plan.steps, self.plan.batch_size, learned, self.monitor.window())
        self.meter.clear()

    def stops_early(self) -> bool:
        """Return whether the metric of `stop_when` no longer improves, and report it."""
        if (rule := self.recipe.stop_when) is None or self.state.waited < rule.patience:
            return False
        self.logger.stopped_early(self.state.step, rule.metric)
        return True

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End workers and the watchdog, and wait for a checkpoint that is being written."""
        if self.watchdog is not None:
            self.watchdog.stop()
        self.batches.close()
        self.checkpoints.close()
        self.logger.close()
