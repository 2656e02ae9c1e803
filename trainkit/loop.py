"""train() and evaluate(): how learning proceeds. The only backward pass of the repository is here.

The loop knows the protocols of `task.py` and nothing of faces or organs. Read `train` from top to bottom: it places
what the task is made of, continues from a checkpoint if asked, says its plan, and then repeats: read, forward,
backward, step, and whatever the agenda has for that step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainkit import checkpoint, optim, seeding
from trainkit.agenda import Agenda, recorded_decisions
from trainkit.data import loading
from trainkit.data.loading import Plan
from trainkit.errors import UserError
from trainkit.machine import Machine, checksum
from trainkit.recipe import Best, Evaluation, Recipe
from trainkit.schedule import Gate
from trainkit.speed.clock import Clock
from trainkit.state import State
from trainkit.task import At, Batch, Opened, Parts, Rows, Scores, Split, Task
from trainkit.witness import Witness

MOST_ROLLBACKS = 5
"""A run that goes back more often does not get better by going back."""


@dataclass
class Outcome:
    """How a training ended."""

    status: str
    """FINISHED or KILLED."""
    step: int
    final: dict[str, float] = field(default_factory=dict)
    """The last scores of every evaluation and of the frozen networks, by full name."""
    best: list[dict[str, Any]] = field(default_factory=list)
    speed: dict[str, float] = field(default_factory=dict)
    """Rates and time shares over the whole training."""
    curves: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Curves of the last evaluations, by evaluation."""


def train(recipe: Recipe, data: Opened, machine: Machine, run: Witness, resume: bool = False) -> Outcome:
    """Train a recipe to its end, or to the moment the run is told to stop.

    Raises UserError for what the user can mend: weights that do not fit, a teacher that did not learn, a loss that is
    not finite, a full disk. What was committed before stays.
    """
    task, clock, device = recipe.task, Clock(), machine.device

    # ---- What is trained
    torch.manual_seed(seeding.number(recipe.seed, "weights"))
    parts = task.build(data.meta, run.found, recipe.seed)
    machine.layout(parts.learns)
    for module in (*parts.frozen.values(), *parts.tabulated.values()):
        machine.layout(module).eval().requires_grad_(False)
    if parts.remembers is not None:
        parts.remembers.to(device)
    if recipe.train.compile != "off":
        # In place: wrapped in a new module, every key of a checkpoint would start with `_orig_mod.`
        parts.learns.compile(mode=None if recipe.train.compile == "default" else recipe.train.compile)
    net, optimizer = machine.prepare(parts.learns, optim.build(parts.learns, recipe.optim))
    bare = machine.bare(net)
    params = [p for p in bare.parameters() if p.requires_grad]
    average = optim.Average(bare, recipe.train.ema) if recipe.train.ema else None

    # ---- The plan
    plan = Plan.make(recipe, data, machine.world, machine.rank)
    gates = {
        "log": Gate(recipe.log.every, plan.steps_per_epoch, plan.batch_size),
        **{
            f"evaluate.{name}": Gate(e.every, plan.steps_per_epoch, plan.batch_size, e.budget)
            for name, e in recipe.evaluations.items()
        },
        "checkpoint": Gate(recipe.checkpoints.every, plan.steps_per_epoch, plan.batch_size),
    }
    agenda = Agenda(gates, machine.share, run.tracker.event, recorded_decisions(run.replayed))
    identity = {
        "recipe": run.recipe_hash,
        "data": data.meta.digest,
        "frozen": checksum(t for m in parts.frozen.values() for t in m.state_dict().values()),
        "processes": machine.world,
    }
    inner = getattr(optimizer, "optimizer", optimizer)
    state = State(bare, inner, parts.remembers, average, machine.accelerator.scaler, agenda, identity)
    if resume:
        state.load(checkpoint.read(run.checkpoint))
    splits = {name: _split_of(name, e, data) for name, e in recipe.evaluations.items()}
    run.say(describe_plan(recipe, plan, splits, _trial(task, bare, splits, recipe, machine)))

    # ---- What is frozen: scored before the first step, and tabulated where nothing about it changes
    outcome = Outcome("FINISHED", state.step)
    if state.step == 0 and splits:
        first = next(iter(splits))
        for name, module in parts.frozen.items():
            clock.to("eval")
            scores = evaluate(task, module, splits[first], recipe.evaluations[first].batch_size, machine)
            run.tracker.log(0, {f"{name}/{first}/{key}": value for key, value in scores.metrics.items()})
            outcome.curves.setdefault(first, {})[name] = scores.curves
            if name in parts.trusted:
                _refuse_chance(name, first, scores)
    clock.to("setup")
    tables = {key: tabulate(module, data.train, machine) for key, module in parts.tabulated.items()}

    def at(step: int) -> At:
        epoch, _ = plan.where(step)
        return At(step, epoch, step / plan.steps, machine.gather, machine.accelerator.autocast)

    def hold(names: Iterable[str], final: bool = False) -> None:
        """Hold evaluations, write their scores down, and remember whether they are the best so far."""
        for name in names:
            clock.to("eval")
            before = clock.elapsed()
            nets = {name: None, f"{name}/ema": average} if average else {name: None}
            scored: dict[str, Scores] = {}
            for title, weights in nets.items():
                if weights:
                    weights.swap(bare)
                scored[title] = evaluate(task, bare, splits[name], recipe.evaluations[name].batch_size, machine)
                if weights:
                    weights.swap(bare)
            clock.to("log")
            metrics = {f"{title}/{key}": v for title, s in scored.items() for key, v in s.metrics.items()}
            run.tracker.log(state.step, {**metrics, f"eval/{name}/unique_samples": splits[name].size})
            seconds = machine.share(clock.elapsed() - before)
            run.tracker.log(state.step, {f"time/eval_{name.replace('/', '_')}_s": seconds})
            agenda.gates[f"evaluate.{name}"].took(seconds, machine.share(state.elapsed + clock.elapsed()))
            outcome.final.update(metrics)
            for title, s in scored.items():
                outcome.curves.setdefault(name, {})["student" if title == name else "average"] = s.curves
            held[name] = state.step
            improved = recipe.best is not None and recipe.best.metric in metrics and _improves(state, recipe, metrics)
            if improved:
                run.tracker.log(state.step, {f"best/{key}": value for key, value in metrics.items()})
            if recipe.log.rows and (improved or final):
                for kind in [k for k, wanted in (("best", improved), ("final", final)) if wanted]:
                    run.tracker.table(f"rows/{name}_{kind}.parquet", scored[name].rows)
            if recipe.stop_when and recipe.stop_when.metric in metrics:
                _count_patience(state, recipe, metrics[recipe.stop_when.metric])
            run.say(_line(name, state.step, metrics, improved))
            if improved and not final:
                save()

    def save() -> None:
        """Commit a checkpoint; none is committed before the last update is known to be finite."""
        clock.to("checkpoint")
        if state.step in saved or ((bad := watch.look()) is not None and recipe.train.nonfinite == "rollback"):
            return
        _stop_if(bad, recipe)
        machine.check_equal("the state of batch norm or of class centres", _replicated(bare, parts))
        kept = state.scalars() | {"elapsed": machine.share(state.elapsed + clock.elapsed())}
        tensors = state.tensors(keep=machine.main)
        machine.lead(lambda: run.commit(state.step, tensors, kept, [record["step"] for record in state.best]))
        saved.add(state.step)

    watch, held, saved = _Watch(), {}, set()
    if state.step == 0:
        hold([name for name, e in recipe.evaluations.items() if e.at_start])
    tally = _Tally(device)
    stop_asked = machine.any(run.stopping())
    began, first_step = clock.training, state.step
    bare.train()

    # ---- Training
    stream = loading.training(data.train, plan, state.step, recipe.loader, pin=device.type == "cuda")
    while state.step < plan.steps:
        moment = at(state.step)
        leave_out = state.step in state.left_out
        snapshot = _copy(bare, parts) if recipe.train.nonfinite == "skip" else None
        weight: float | Tensor = 0.0
        for micro in range(plan.accumulation):
            clock.to("data")
            batch = next(stream)
            if leave_out:
                continue
            clock.to("transfer")
            batch = data.train.on_device(machine.place(batch))
            for key, table in tables.items():
                batch[key] = table[batch["index"], batch["view"]]
            clock.to("compute")
            seeding.reseed(device, recipe.seed, state.step, micro, machine.rank)
            with machine.no_sync(net, last=micro == plan.accumulation - 1):
                loss = task.loss(net, parts, batch, moment)
                # Gradients are averaged over ranks, so the sum over a rank is scaled by their number.
                machine.accelerator.backward(loss.sum * (machine.world / plan.batch_size))
            weight = weight + loss.weight
            tally.add(loss.sum, loss.weight, loss.logs)
        clock.to("compute")
        if not leave_out:
            norm = _finish_gradients(machine, params, plan, weight, recipe.optim.clip_norm)
            finite = _finite(norm, loss.sum, machine)
            if snapshot is not None and not bool(finite):
                _restore(bare, parts, snapshot)
                state.left_out.append(state.step)
                _refuse_row(state)
                run.tracker.event(state.step, "left_out", {"reason": "loss or gradient not finite"})
            else:
                factor = recipe.train.schedule.factor(state.step, plan.steps, plan.steps_per_epoch, plan.batch_size)
                optim.set_lr(inner, recipe.optim.lr * factor)
                optimizer.step()
                machine.average_buffers(bare)
                if average:
                    average.update(bare, state.step)
                tally.norm = norm
            optimizer.zero_grad()
        state.step += 1
        clock.step()
        run.progress(state.step, plan.steps)

        # ---- The last update but one is known to be finite before anything is built on it
        if not leave_out and snapshot is None:
            bad = watch.turn(finite, state.step - 1)
            if state.step == plan.steps and bad is None:
                bad = watch.look()
            _stop_if(bad, recipe)
            if bad is not None:
                watch.clear()
                stream = _roll_back(state, bad, run, recipe, data, plan, device)
                continue

        # ---- What is due at this step
        if state.step >= agenda.next:
            machine.synchronize()
            elapsed = state.elapsed + clock.elapsed()
            pace = (clock.training - began) / max(1, state.step - first_step)
            due = agenda.ask(state.step, elapsed, pace)
            if "log" in due:
                _log(run, state, plan, tally, clock, machine, inner, recipe)
            hold(name.removeprefix("evaluate.") for name in due if name.startswith("evaluate."))
            if "checkpoint" in due:
                save()
            bare.train()
            clock.to("compute")
        if stop_asked():
            save()
            outcome.status = "KILLED"
            break
        if recipe.stop_when and state.waited >= recipe.stop_when.patience:
            run.say(f"step {state.step}: {recipe.stop_when.metric} no longer improves; stopping early")
            run.tracker.event(state.step, "stopped_early", {"metric": recipe.stop_when.metric})
            break
        stop_asked = machine.any(run.stopping())

    # ---- The end
    machine.synchronize()
    outcome.step = state.step
    if outcome.status == "FINISHED":
        _log(run, state, plan, tally, clock, machine, inner, recipe)
        hold([n for n, e in recipe.evaluations.items() if e.at_end and held.get(n) != state.step], final=True)
        if recipe.checkpoints.at_end:
            save()
        run.tracker.log(state.step, {f"final/{key}": value for key, value in outcome.final.items()})
    clock.to("log")
    outcome.best, outcome.speed = state.best, _whole(clock, plan, state.step - first_step, began)
    return outcome


@torch.no_grad()
def evaluate(task: Task, net: nn.Module, split: Split, batch_size: int, machine: Machine) -> Scores:
    """Score a network on a split. Every rank takes part and every sample counts exactly once.

    Rows are gathered with the sample's index; padding is dropped, and an evaluation whose rows are not the split's
    samples, each once, is a RuntimeError and no score.
    """
    was_training = net.training
    net.eval()
    kept: list[Rows] = []
    for rows, real in loading.every_sample(split, batch_size, machine.world, machine.rank):
        batch = split.on_device(machine.place(split.fetch(rows, epoch=0)))
        batch["index"] = torch.where(torch.as_tensor(real, device=machine.device), batch["index"], -1)
        with machine.accelerator.autocast():
            predicted = task.predict(net, batch)
        kept.append({"index": batch["index"], **{key: value.float() for key, value in predicted.items()}})
    gathered = {key: machine.gather(value) for key, value in loading.stack(kept).items()}
    net.train(was_training)
    real = gathered["index"] >= 0
    order = gathered["index"][real].argsort()
    index = gathered["index"][real][order].cpu()
    if not torch.equal(index, torch.arange(split.size)):
        raise RuntimeError(f"{split.name}: {len(index.unique())} samples were scored, the set has {split.size}")
    rows = {key: value[real][order].cpu() for key, value in gathered.items() if key != "index"}
    return machine.share(task.score(rows, split) if machine.main else None)


@torch.no_grad()
def tabulate(module: nn.Module, split: Split, machine: Machine, batch_size: int = 64) -> Tensor:
    """Outputs of a frozen network for every sample and view of a split, (samples, views, ...), on every rank."""
    if not split.views:
        raise UserError("task", "outputs cannot be computed once", remedy="the augmentation has no countable views")
    table = []
    for view in range(split.views):
        out = []
        for rows, _ in loading.every_sample(split, batch_size, machine.world, machine.rank):
            batch = split.on_device(machine.place(split.fetch(rows, epoch=0, view=view)))
            with machine.accelerator.autocast():
                out.append({"index": batch["index"], "value": module(batch["image"]).float()})
        gathered = {key: machine.gather(value) for key, value in loading.stack(out).items()}
        values = gathered["value"].new_empty((split.size, *gathered["value"].shape[1:]))
        values[gathered["index"]] = gathered["value"]
        table.append(values)
    return torch.stack(table, 1)


def describe_plan(recipe: Recipe, plan: Plan, splits: dict[str, Split], seconds: dict[str, float]) -> str:
    """The plan in words: how long, in which portions, and which evaluation when, at what estimated cost."""
    lines = [
        f"{plan.steps} steps = {plan.steps / plan.steps_per_epoch:g} epochs of {plan.steps_per_epoch} steps; "
        f"batch {plan.batch_size} = {plan.world} process(es) x {plan.accumulation} x {plan.micro_batch}"
    ]
    for name, e in recipe.evaluations.items():
        when = [word for word, on in (("at the start", e.at_start), ("at the end", e.at_end)) if on]
        times = e.at_start + e.at_end
        if e.every is not None:
            when.insert(0, f"every {e.every}")
            if not e.every.timed:
                length = e.every.steps(plan.steps_per_epoch, plan.batch_size)
                times += plan.steps // length - (1 if e.at_end and plan.steps % length == 0 else 0)
        limit = f", within {100 * e.budget:g}% of the time" if e.budget else ""
        cost = seconds.get(name, 0.0)
        lines.append(
            f"evaluate {name}: {', '.join(when) or 'never'}{limit}; {splits[name].size} samples, "
            f"about {cost:.2g} s each, {times}x = {times * cost:.2g} s"
        )
    lines.append(
        f"checkpoint: every {recipe.checkpoints.every}" if recipe.checkpoints.every else "checkpoint: at the end"
    )
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# What train() does by name


class _Watch:
    """Whether an update was finite, read one step late so that nobody waits for the device."""

    def __init__(self) -> None:
        self._flag: Tensor | None = None
        self._step = 0

    def turn(self, finite: Tensor, step: int) -> int | None:
        """Hand in the flag of `step`; returns the step before it if that one was not finite."""
        bad = self.look()
        self._flag = finite.to("cpu", non_blocking=True) if finite.device.type != "cuda" else _pinned(finite)
        self._step = step
        return bad

    def look(self) -> int | None:
        """The step of the flag handed in last if that update was not finite. Waits for the device."""
        if self._flag is None:
            return None
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return None if bool(self._flag) else self._step

    def clear(self) -> None:
        """Forget the flag."""
        self._flag = None


def _pinned(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


class _Tally:
    """Sums kept on the device between two log lines."""

    def __init__(self, device: torch.device):
        self.device = device
        self.clear()

    def clear(self) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.weight = torch.zeros((), dtype=torch.float64, device=self.device)
        self.logs: dict[str, Tensor] = {}
        self.batches = 0
        self.norm: Tensor | None = None

    def add(self, loss: Tensor, weight: float | Tensor, logs: dict[str, Tensor]) -> None:
        self.loss += loss.detach()
        self.weight += weight
        for key, value in logs.items():
            self.logs[key] = self.logs.get(key, 0) + value.detach().double()
        self.batches += 1


def _log(
    run, state: State, plan: Plan, tally: _Tally, clock: Clock, machine: Machine, optimizer, recipe: Recipe
) -> None:
    """Write loss, rate, norm, speed and time shares since the last line."""
    clock.to("log")
    if tally.batches:
        sums = torch.stack(
            [tally.loss, tally.weight, *(v.to(tally.device) / tally.batches for v in tally.logs.values())]
        )
        loss, weight, *logs = machine.sum(sums).tolist()
        metrics = {"train/loss": loss / weight, "train/lr": optimizer.param_groups[0]["lr"]}
        metrics |= {f"train/{key}": value / machine.world for key, value in zip(tally.logs, logs, strict=True)}
        if tally.norm is not None:
            metrics["train/grad_norm"] = float(_local(tally.norm))
        metrics["train/epoch"] = state.step / plan.steps_per_epoch
        tally.clear()
        measured = clock.window(plan.batch_size)
        if machine.device.type == "cuda":
            measured["speed/peak_memory_gb"] = torch.cuda.max_memory_allocated(machine.device) / 1e9
        run.tracker.log(state.step, {**metrics, **measured})
        run.line(state.step, plan.steps, metrics["train/loss"], measured.get("speed/samples_per_s", 0.0))


def _whole(clock: Clock, plan: Plan, steps: int, began: float) -> dict[str, float]:
    from trainkit.speed.clock import shares

    spent = clock.training - began
    rate = plan.batch_size * steps / spent if spent else 0.0
    return {"speed/samples_per_s": rate, "time/total_s": clock.elapsed(), **shares(clock.seconds)}


def _finish_gradients(machine: Machine, params, plan: Plan, weight: float | Tensor, clip: float | None) -> Tensor:
    """Normalise, unscale and clip the gradients of an update; returns their norm before clipping, on the device."""
    if machine.accelerator.scaler is not None:
        machine.accelerator.unscale_gradients()
    grads = [p.grad for p in params if p.grad is not None]
    if isinstance(weight, Tensor) or weight != plan.batch_size / plan.world:
        total = machine.sum(torch.as_tensor(weight, dtype=torch.float32, device=machine.device))
        torch._foreach_mul_(grads, plan.batch_size / total)
    norm = torch.nn.utils.get_total_norm(grads)
    if clip is not None:
        torch.nn.utils.clip_grads_with_norm_(params, clip, norm)
    return norm


def _local(x: Tensor) -> Tensor:
    """A norm over sharded gradients as a plain tensor."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _finite(norm: Tensor, loss: Tensor, machine: Machine) -> Tensor:
    """Whether an update is finite, alike on all ranks: the norm of averaged gradients is the same everywhere.

    Under fp16 the loss scaler meets infinite gradients on purpose and deals with them; there the loss decides.
    """
    if machine.accelerator.scaler is None:
        return torch.isfinite(_local(norm))
    return machine.sum((~torch.isfinite(loss.detach())).float()) == 0


def _replicated(net: nn.Module, parts: Parts) -> list[Tensor]:
    memory = [] if parts.remembers is None else list(parts.remembers.state_dict().values())
    return [*net.buffers(), *memory]


def _copy(net: nn.Module, parts: Parts) -> list[Tensor]:
    return [t.clone() for t in _replicated(net, parts)]


@torch.no_grad()
def _restore(net: nn.Module, parts: Parts, snapshot: list[Tensor]) -> None:
    for t, kept in zip(_replicated(net, parts), snapshot, strict=True):
        t.copy_(kept)


def _refuse_row(state: State, most: int = 10) -> None:
    """End a run in which every update is left out."""
    if state.left_out[-most:] == list(range(state.step - most + 1, state.step + 1)):
        raise UserError(f"step {state.step}", f"{most} updates in a row were not finite", remedy="lower optim.lr")


def _stop_if(bad: int | None, recipe: Recipe) -> None:
    if bad is not None and recipe.train.nonfinite == "stop":
        raise UserError(
            f"step {bad}",
            "the loss or a gradient is not finite",
            remedy="lower optim.lr or look at the data; no checkpoint holds this state. "
            "train.nonfinite: skip or rollback goes on without such updates",
        )


def _roll_back(state: State, bad: int, run: Witness, recipe: Recipe, data: Opened, plan: Plan, device: torch.device):
    """Return to the newest checkpoint and leave the update of step `bad` out from there."""
    left_out, rollbacks = [*state.left_out, bad], state.rollbacks + 1
    path = run.newest_checkpoint()
    if path is None or rollbacks > MOST_ROLLBACKS:
        why = "there is no checkpoint to go back to" if path is None else f"this is rollback {rollbacks}"
        raise UserError(f"step {bad}", f"the loss or a gradient is not finite, and {why}", remedy="lower optim.lr")
    elapsed = state.elapsed
    state.load(checkpoint.read(path))
    state.left_out, state.rollbacks, state.elapsed = left_out, rollbacks, elapsed
    run.say(f"step {bad}: not finite; back to step {state.step}, leaving that update out")
    run.tracker.event(bad, "rollback", {"to": state.step})
    return loading.training(data.train, plan, state.step, recipe.loader, pin=device.type == "cuda")


def _split_of(name: str, evaluation: Evaluation, data: Opened) -> Split:
    word = evaluation.split or name
    if word not in data.evaluations:
        known = ", ".join(data.evaluations) or "none"
        raise UserError(f"evaluations.{name}", f"the data has no evaluation set {word!r}", f"one of: {known}")
    return data.evaluations[word]


@torch.no_grad()
def _trial(task: Task, net: nn.Module, splits: dict[str, Split], recipe: Recipe, machine: Machine) -> dict[str, float]:
    """Seconds that each evaluation will take, from two batches; a mistake in one shows before training, not after."""
    estimates: dict[str, float] = {}
    was_training = net.training
    net.eval()
    for name, split in splits.items():
        size = recipe.evaluations[name].batch_size
        batches = list(loading.every_sample(split, size, machine.world, machine.rank))
        for rows, _ in [batches[0], batches[0]]:
            watch = Clock()
            batch: Batch = split.on_device(machine.place(split.fetch(rows, epoch=0)))
            with machine.accelerator.autocast():
                task.predict(net, batch)
            machine.synchronize()
            estimates[name] = watch.elapsed() * len(batches)
    net.train(was_training)
    return estimates


def _refuse_chance(name: str, evaluation: str, scores: Scores) -> None:
    for metric, chance in scores.chance.items():
        if scores.metrics[metric] <= chance:
            raise UserError(
                f"task.{name}",
                f"{evaluation}/{metric} is {scores.metrics[metric]:.4f}, no better than guessing",
                f"above {chance:.4f}",
                "its weights were not trained, are those of another network, or expect other pictures",
            )


def _better(value: float, than: float, mode: str, by: float = 0.0) -> bool:
    return np.isfinite(value) and (value > than + by if mode == "max" else value < than - by)


def _improves(state: State, recipe: Recipe, metrics: dict[str, float]) -> bool:
    """Enter an evaluation in the list of the best; True when it leads."""
    best: Best = recipe.best  # type: ignore[assignment]
    value = metrics[best.metric]
    leads = not state.best or _better(value, state.best[0]["value"], best.mode)
    if np.isfinite(value):
        state.best.append({"value": value, "step": state.step})
    state.best.sort(key=lambda r: (-r["value"] if best.mode == "max" else r["value"], r["step"]))
    del state.best[max(1, recipe.checkpoints.keep_best) :]
    return bool(leads and np.isfinite(value))


def _count_patience(state: State, recipe: Recipe, value: float) -> None:
    rule = recipe.stop_when
    if state.record is None or _better(value, state.record, rule.mode, rule.min_delta):
        state.record, state.waited = value, 0
    else:
        state.waited += 1


def _line(name: str, step: int, metrics: dict[str, float], improved: bool) -> str:
    shown = "  ".join(f"{key.removeprefix(name + '/')} {value:.4g}" for key, value in list(metrics.items())[:6])
    return f"step {step}: {name}: {shown}{'  (best so far)' if improved else ''}"
