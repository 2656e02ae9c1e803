"""train() and evaluate(): how learning proceeds. The only backward pass of the repository is here.

The loop knows the protocols of `task.py` and nothing of faces or organs. Read `train` from top to bottom: it places
what the task is made of, continues from a checkpoint if asked, says its plan, and then repeats: read, forward,
backward, step, and whatever the agenda has for that step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from trainkit import rng
from trainkit.checkpoint import storage
from trainkit.config.schema import Recipe
from trainkit.data.loader import stream as loading
from trainkit.data.loader.damaged_samples import Damage
from trainkit.distributed.runtime import Machine, checksum
from trainkit.distributed.stop_signal import Stopped
from trainkit.interfaces import At, Batch, Loss, Opened, Scores
from trainkit.speed import device_timeline
from trainkit.speed.clock import Clock
from trainkit.training import best, determinism, loss_spikes, nonfinite, out_of_memory, rollback, teacher_cache
from trainkit.training import optimizer as optim
from trainkit.training import plan as planning
from trainkit.training.evaluator import _trial, evaluate
from trainkit.training.events import Agenda, recorded_decisions
from trainkit.training.gradients import _finish_gradients
from trainkit.training.loss_meter import Tally
from trainkit.training.outcome import Outcome
from trainkit.training.plan import Plan
from trainkit.training.run_logger import Witness
from trainkit.training.state import State, elsewhere
from trainkit.training.throughput_monitor import Observer


def train(recipe: Recipe, data: Opened, machine: Machine, run: Witness) -> Outcome:
    """Train a recipe to its end, or to the moment the run is told to stop.

    Raises UserError for what the user can mend: weights that do not fit, a teacher that did not learn, a loss that is
    not finite, a full disk. What was committed before stays.
    """
    task, device = recipe.task, machine.device
    clock = run.clock = Clock(device_timeline.of(device))

    # ---- What is trained
    torch.manual_seed(rng.number(recipe.seed, "weights"))
    parts = task.build(data.meta, run.found, recipe.seed)
    for module in (*parts.frozen.values(), *parts.tabulated.values()):
        machine.layout(module).eval().requires_grad_(False)
    if parts.remembers is not None:
        parts.remembers.to(device)
    machine.layout(parts.learns)
    if recipe.train.compile != "off":
        # In place: wrapped in a new module, every key of a checkpoint would start with `_orig_mod.`
        parts.learns.compile(mode=None if recipe.train.compile == "default" else recipe.train.compile)
    net, optimizer = machine.prepare(parts.learns, optim.build(parts.learns, recipe.optim, machine.sharded))
    bare, inner = machine.bare(net), getattr(optimizer, "optimizer", optimizer)
    params, update = {name: p for name, p in bare.named_parameters() if p.requires_grad}, machine.stepper(optimizer)
    average = optim.Average(bare, recipe.train.ema) if recipe.train.ema else None

    # ---- The plan, and where it stands
    plan = Plan.make(recipe, data, machine.world, machine.rank)
    agenda = Agenda(planning.gates(recipe, plan), machine.share, run.tracker.event, recorded_decisions(run.replayed))
    splits = planning.evaluated(recipe, data)
    tally, watch, outcome = Tally(machine), nonfinite.Watch(), Outcome("FINISHED", 0)
    observer = Observer(recipe, plan, clock, machine, run, net)
    identity = {
        "recipe": run.recipe_hash,
        "data": data.meta.digest,
        "evaluated": {name: split.digest for name, split in splits.items()},
        "frozen": checksum(t for m in parts.frozen.values() for t in m.state_dict().values()),
        "processes": machine.world,
    }
    state = State(bare, inner, parts.remembers, average, machine.accelerator.scaler, agenda, tally, identity)
    if run.checkpoint is not None:
        loaded = storage.read(run.checkpoint)
        state.load(loaded, machine.rank, run.elastic)
        run.elsewhere(state.step, elsewhere(loaded, machine.describe()))
        del loaded
    portions = out_of_memory.Portions(recipe, data, parts, machine, state, run)
    detector = loss_spikes.Detector(recipe.train.spikes, state, machine, run)
    twice = determinism.Replay(recipe, plan, machine, run)
    plan = portions.plan(plan)

    def score(module: nn.Module, name: str) -> Scores:
        """Score a network by an evaluation of the recipe, in as large batches as memory suffices for."""
        return portions.evaluated(
            name, module, lambda size: evaluate(task, module, splits[name], size, machine, run.stop)
        )

    costs = {
        name: portions.evaluated(name, bare, lambda size, split=split: _trial(task, bare, split, size, machine))
        for name, split in splits.items()
    }
    costs = {name: seconds * (2 if average else 1) for name, seconds in machine.share(costs).items()}
    run.say(
        "\n".join((machine.settings(recipe), planning.describe(recipe, plan, splits, costs), *data.notes, *parts.notes))
    )
    observer.expects(state.step, costs)
    gather = observer.meeting(machine.gather)

    def hold(names: Iterable[str]) -> list[str]:
        """Hold evaluations, write their scores down, and commit a checkpoint if one is among the best so far.

        Told to stop, it leaves off, and returns the names of those that are yet to be held.
        """
        better, names = False, list(names)
        for number, name in enumerate(names):
            clock.to("eval")
            began = time.perf_counter()
            try:
                scored = {name: score(bare, name)}
                if average:
                    run.copied("eval")
                    with average.swapped(bare):
                        scored[f"{name}/ema"] = score(bare, name)
            except Stopped:
                return names[number:]
            clock.to("log")
            metrics = {f"{title}/{key}": v for title, scores in scored.items() for key, v in scores.metrics.items()}
            seconds, elapsed = machine.share((time.perf_counter() - began, state.elapsed + clock.elapsed()))
            agenda.gates[f"evaluate.{name}"].took(seconds, elapsed)
            leads, entered = False, False
            if state.entered.get(name) != state.step:  # else that was before the run was interrupted
                leads, entered = best.enter(state, recipe, name, metrics)
                state.entered[name] = state.step
            better = better or entered
            run.scored(state.step, name, scored, metrics, seconds, leads)
            held[name] = state.step
            state.final.update(metrics)
            outcome.rows |= best.kept_rows(recipe, name, scored)
            titles = {name: "this run", f"{name}/ema": "averaged weights"}
            outcome.curves.setdefault(name, {}).update({titles[t]: scores.curves for t, scores in scored.items()})
        if better:  # after the last of them: a run resumed from here does not hold them again
            saved.discard(state.step)
            save()
        return []

    def attend() -> bool:
        """What is due at this step. False: told to stop meanwhile; what was left is due again when the run goes on."""
        machine.synchronize()
        elapsed = clock.elapsed()
        due = agenda.ask(state.step, state.elapsed + elapsed, elapsed / max(1, state.step - first_step))
        if "log" in due:
            log()
        left = hold(name.removeprefix("evaluate.") for name in due if name.startswith("evaluate."))
        if left:
            undone = {f"evaluate.{name}" for name in left} | {"checkpoint", "safeguard", "figures"}
            agenda.give_back(undone.intersection(due))
            return False
        if "checkpoint" in due or ("safeguard" in due and state.step < plan.steps):
            save()
        if "figures" in due:
            clock.to("log")
            run.draw(outcome.curves)
        return True

    def stop() -> None:
        """Save, and end as one that was told to stop."""
        saved.discard(state.step)  # what is due may have changed since
        save(ends=True)
        outcome.status = "KILLED"

    def settle() -> None:
        """Wait until the checkpoint that is being written, if one is, lies on the disk, or cannot be put there."""
        clock.to("checkpoint")
        saved.discard(machine.lead(run.settle))

    def save(ends: bool = False) -> None:
        """Begin to write a checkpoint. Called only where the last update is known to be finite.

        Without one with which the run `ends` it has failed.
        """
        clock.to("checkpoint")
        if state.step in saved and not ends:
            return
        settle()
        if state.step in saved:
            return
        entered = time.perf_counter()
        machine.synchronize()
        machine.check_equal("the state of batch norm or of class centres", nonfinite.replicated(bare, parts))
        copies, scalars = state.freeze(keep=machine.main)
        tallies, elapsed = machine.each(tally.state()), machine.share(state.elapsed + clock.elapsed())
        kept = {**scalars, "tallies": tallies, "elapsed": elapsed, "machine": machine.describe()}
        kept["trained"] = machine.share(state.trained + clock.training - began)
        best = [record["step"] for record in state.best]
        list_damage()
        machine.lead(lambda: run.commit(state.step, copies, kept, best, required=ends))
        saved.add(state.step)
        agenda.gates["safeguard"].took(time.perf_counter() - entered, elapsed)

    def log() -> None:
        """Write loss, rate, norm, speed and time shares since the last line."""
        clock.to("log")
        if tally.batches:
            run.line(
                state.step,
                plan.steps,
                {
                    **tally.read(),
                    **({"train/left_out": many} if (many := state.many_left_out()) else {}),
                    "train/lr": inner.param_groups[0]["lr"],
                    "train/epoch": state.step / plan.steps_per_epoch,
                },
                observer.window(),
            )
            tally.clear()

    def batches(once: bool = False) -> Iterator[Batch]:
        """All that are still to be trained on, each on its way to the device; or those of the update at hand alone."""
        cut = replace(plan, steps=state.step + 1) if once else plan
        loader = replace(recipe.loader, workers=0) if once else recipe.loader
        read = loading.training(
            split, partial(cut.keys, split, state.step), loader, device.type == "cuda", lost, damage
        )
        return loading.copied(read, machine.place, device)

    def list_damage() -> None:
        """Write down what was damaged, on any rank, and what was trained on in its place."""
        if damage is not None:
            damage.add([one for found in machine.each(list(damage.found.values())) for one in found])
            run.replaced(state.step, damage.found.values())

    def lost(said: str) -> None:
        """A worker that read batches was lost, and replaced."""
        run.tracker.event(state.step, "worker_lost", {"said": said})

    def gradients(stream: Iterator[Batch], at: At) -> list[Loss]:
        """Add up the gradients of the micro-batches of an update, averaged over processes; returns their losses."""
        losses: list[Loss] = []
        for micro in range(plan.accumulation):
            clock.to("data")
            batch = next(stream)
            clock.to("transfer")
            batch = split.on_device(machine.place(batch))
            clock.to("forward")
            rng.reseed(device, recipe.seed, at.step, micro, machine.rank)
            with machine.no_sync(net, last=micro == plan.accumulation - 1 and not portions.apart):
                loss = task.loss(net, parts, batch, at)
                clock.to("backward")
                # Gradients are averaged over ranks, so the sum over a rank is scaled by their number.
                machine.backward(loss.sum, machine.world / plan.batch_size)
            losses.append(Loss(loss.sum.detach(), loss.weight, loss.logs))
        clock.to("optimizer")
        return losses

    # ---- What is frozen: scored before the first step, and computed once where nothing about it changes
    held: dict[str, int] = {}
    damage: Damage | None = None  # a checkpoint may be due before anything was trained on
    saved = set() if run.checkpoint is None else {state.step}
    began, first_step = clock.training, state.step
    saves = bool(recipe.best) or agenda.gates["checkpoint"].due < plan.steps
    warm = first_step + 1 if saves and not machine.sharded else -1  # by then the optimizer has its state
    if run.checkpoint is None:
        for name, module in parts.frozen.items() if splits else ():
            clock.to("eval")
            first = next(iter(splits))
            scores = score(module, first)
            run.tracker.log(0, {f"{name}/{first}/{key}": value for key, value in scores.metrics.items()})
            outcome.curves.setdefault(first, {})[name] = scores.curves
            if name in parts.trusted:
                best.refuse_chance(name, first, scores)
                if not scores.chance:
                    run.say(f"{name}: {first} is too small to tell it from guessing")
        if hold(name for name, e in recipe.evaluations.items() if e.at_start):
            raise Stopped
    clock.to("setup")
    outputs = teacher_cache.outputs(parts, data.train, machine, run, recipe.seed)
    split, checked = outputs.split, None
    damage = Damage.policy(recipe, data, split)
    if damage is not None and run.checkpoint is not None:
        damage.add(machine.share(run.damaged()))
    if not outputs.whole:  # told to stop meanwhile; what there is of them is gone on with
        outcome.status = "KILLED"

    # ---- Training
    settle()  # worker processes are not forked while a thread writes
    bare.train()
    stream, skips = batches(), recipe.train.nonfinite == "skip"
    going = outputs.whole
    if going and state.step >= agenda.next:  # it was stopped before that was done
        run.stop.save_first()
        if not attend():
            stop()
            going = False
    stop_asked = machine.any(run.stopping())
    while going and state.step < plan.steps:
        if recipe.stop_when and state.waited >= recipe.stop_when.patience:
            run.say(f"step {state.step}: {recipe.stop_when.metric} no longer improves; stopping early")
            run.tracker.event(state.step, "stopped_early", {"metric": recipe.stop_when.metric})
            break
        epoch, _ = plan.where(state.step)
        if epoch != checked:
            clock.to("eval")
            outputs.check(epoch)
            checked = epoch
        at = At(state.step, epoch, state.step / plan.steps, gather, machine.accelerator.autocast)
        leave_out, replayed = state.leaves_out(state.step), twice.due(state)
        before = nonfinite.snapshot(bare, parts) if skips or portions.halving or replayed else []
        if replayed:
            twice.begin(state, params)
        if leave_out:
            clock.to("data")
            for _ in range(plan.accumulation):
                next(stream)
        elif (losses := portions.tried(gradients, stream, at)) is None:
            plan = portions.smaller(plan)
            nonfinite.put_back(bare, parts, before)
            optim.forget(params)
            settle()  # as before the first batch
            stream = batches()
            continue
        if replayed:
            twice.check(state, params, parts, before, losses, lambda at=at: gradients(batches(once=True), at))
        if not leave_out:
            norm = _finish_gradients(machine, params, plan, losses, recipe.optim, portions.apart)
            finite = nonfinite.finite(norm, losses, machine)
            if skips and not bool(finite):
                nonfinite.leave_out(state, bare, parts, before, run)
            else:
                run.copied("optimizer")
                optim.set_lr(inner, plan.lr(recipe, state.step))
                update()
                machine.average_buffers(bare)
                if average:
                    average.update(bare, state.step)
                tally.add(losses, nonfinite.local(norm))
            optim.forget(params)
        state.step += 1
        clock.step()
        run.progress(state.step, plan.steps)
        observer.step(state.step)
        if state.step == first_step + 1:
            run.begun(lambda: (machine.asked, *clock.moved), machine.rank)
        if state.step == warm:
            run.expect(state)

        # ---- Whether the update before this one was as it should be; where something is built on this one, it too
        asked = stop_asked()
        bad = watch.look() if leave_out or skips else watch.turn(finite, state.step - 1)
        jump = None if leave_out else detector.turn(losses, state.step - 1)
        if asked or state.step >= min(plan.steps, agenda.next):
            bad, jump = bad if bad is not None else watch.look(), jump or detector.look()
        if (trouble := nonfinite.trouble(bad, recipe) or jump) is not None:
            settle()
            watch.clear()
            detector.clear()
            rollback.roll_back(state, trouble, run, machine)
            held.clear()
            saved = {state.step}
            stop_asked = machine.any(run.stopping())
            stream = batches()
            continue

        # ---- What is due at this step, unless it is the last for now
        if asked or (state.step >= agenda.next and not attend()):
            stop()
            break
        stop_asked = machine.any(run.stopping())

    # ---- The end
    machine.synchronize()
    list_damage()
    if outcome.status == "FINISHED":
        log()
        if hold(n for n, e in recipe.evaluations.items() if e.at_end and held.get(n) != state.step):
            stop()
        elif recipe.checkpoints.at_end:
            save(ends=True)
    settle()
    if outcome.status == "FINISHED":
        run.tracker.log(state.step, {f"final/{key}": value for key, value in state.final.items()})
    clock.to("log")
    outcome.step, outcome.best, outcome.final = state.step, state.best, state.final
    outcome.speed = clock.whole(plan.batch_size * state.step, state.trained + clock.training - began)
    outcome.steps, outcome.verdict = clock.recent(), observer.close(state.step)
    return outcome
