"""From an order to a finished run: load, train what is needed first, train, report."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainkit.config import loader
from trainkit.config.run_request import Order, load
from trainkit.config.schema import Recipe
from trainkit.distributed import rank_failures
from trainkit.distributed.stop_signal import Stop, Stopped
from trainkit.environment import record
from trainkit.errors import UserError, visible
from trainkit.experiments.cross_validation import divide
from trainkit.experiments.group import Child
from trainkit.experiments.seeds import repeated
from trainkit.files import write_aside
from trainkit.inference.trained_model import META
from trainkit.models.timm_names import refuse_unknown
from trainkit.redact import without_secrets
from trainkit.tracking import lineage
from trainkit.tracking.run_folder import RunFolder, run_key
from trainkit.tracking.run_lifecycle import about, begin, ending, finished
from trainkit.training.dependencies import Need, gather

STOPPED = 143
"""Exit code of a run that was told to stop."""


def launch(order: Order, stopping: Callable[[], bool], began: float | None = None) -> int:
    """Run an order to its end. Returns the exit code: 0 finished, `STOPPED` told to stop.

    `began`: the `time.perf_counter()` from which the wall-clock of its first run is counted, by default now. Raises
    UserError for what the user can mend.
    """
    stop = Stop.of(stopping)
    try:
        return _launch(order, stop, time.perf_counter() if began is None else began)
    except Stopped:
        return STOPPED
    except UserError:
        raise
    except Exception as error:
        if not stop.told or int(os.environ.get("WORLD_SIZE", 1)) == 1:
            raise
        # Another process was told so too, and left while this one was waiting for it.
        print(visible(f"told to stop; {type(error).__name__}: {error}".splitlines()[0]), file=sys.stderr, flush=True)
        return STOPPED


def _launch(order: Order, stop: Stop, began: float) -> int:
    with stop.at_once():
        children = children_of(order)
        recipe = children[0].recipe if order.sweep else load(order)
        refuse_unknown(recipe, *(child.recipe for child in children))
        stop.seconds = recipe.limits.stop.seconds
        from trainkit.distributed.runtime import Machine
        from trainkit.tracking.store import Store

        machine = Machine(recipe)
        # Of the settings of a sweep the first stands for all.
        machine.agree({"recipe": loader.digest(recipe), **record.program(*order.plugins)})
        store = Store.locate()
        machine.lead(store.ready)

    def timed(*asked: Any) -> tuple[str, RunFolder]:
        """`_run`; the wall-clock of a run begins where that of the run before it ended."""
        nonlocal began
        status, folder = _run(*asked, began=began)
        began = time.perf_counter()
        return status, folder

    def train(child: Order, recipe: Recipe, needs: dict[str, Need]) -> RunFolder:
        with stop.later():
            status, folder = timed(recipe, child, machine, store, needs, stop)
        if status == "KILLED":
            raise Stopped
        machine.accelerator.free_memory()  # for the run that needs this one; behind the last run a second for nothing
        return folder

    def whole(
        child: Order, recipe: Recipe, parent: str | None = None, watch: Any = None
    ) -> tuple[str, RunFolder | None]:
        """Train a recipe and what it needs first: its status and its folder, where it came to have one."""
        with stop.at_once():
            needs = gather(child, recipe, machine, store, train)
        if machine.any(stop())():
            return "KILLED", None
        return timed(recipe, child, machine, store, needs, stop, parent, watch)

    if order.folds:
        from trainkit.experiments import cross_validation

        status = cross_validation.validate(order, children, machine, store, whole)
    elif order.seeds is not None:
        from trainkit.experiments import seeds

        status = seeds.repeat(order, children, machine, store, whole)
    elif order.sweep is not None:
        from trainkit.experiments import sweep

        status = sweep.sweep(order, children, machine, store, whole)
    else:
        status, _ = whole(order, recipe)
    machine.close()  # not after an error: others may be at something else, and never come
    return 0 if status == "FINISHED" else STOPPED


def _run(
    recipe: Recipe,
    order: Order,
    machine: Any,
    store: Any,
    needs: Mapping[str, Need],
    stop: Stop,
    parent: str | None = None,
    watch: Any = None,
    *,
    began: float,
) -> tuple[str, RunFolder]:
    """Train one recipe as one run, beneath the run `parent` where there is one: its status and its folder.

    Where the order is to resume or start, one that has finished takes its place. `watch` is told of its evaluations and
    may end it: `family.Watch`. `began`: from when on its wall-clock is counted.
    """
    from trainkit.analysis import data_integrity, promote, run_summary
    from trainkit.diagnostics import throughput_limits
    from trainkit.speed import cost
    from trainkit.training import plan, trainer
    from trainkit.training.run_logger import Witness

    with stop.at_once():
        machine.configure(recipe)
        data = recipe.data.open(recipe.seed)
        plan.updates(recipe, data)  # mistakes in it are said before a run is begun
        machine.agree({name: split.digest for name, split in {"data": data.train, **data.evaluations}.items()})
        recipe_hash, program = loader.digest(recipe), record.program(*order.plugins)
        key, new = run_key(recipe_hash, data.meta.digest), any(need.new for need in needs.values())

        def look() -> str | None:
            done = finished(order, store, recipe.name, recipe_hash, key, program)
            return done and str(done.path)

        # The runs of several are looked for above; one that needed other weights was another training.
        if parent is None and not new and (done := machine.lead(look)) is not None:
            if machine.main:
                _say_done(RunFolder(Path(done)), store)
            return "FINISHED", RunFolder(Path(done))
        checked = data_integrity.ensure(recipe, data, machine, store)

    def open_folder() -> tuple[str, bool]:
        # What was interrupted may have been a run that this one needs, or an earlier fold; it has been finished by now.
        begins = order.resume == "" and (parent is not None or new)
        folder, resuming = begin(order, store, recipe.name, recipe.seed, recipe_hash, loader.dump(recipe), begins)
        write_aside(folder.path / META, json.dumps(asdict(data.meta), indent=1) + "\n")
        return str(folder.path), resuming

    path, resuming = machine.lead(open_folder)
    folder = RunFolder(Path(path))
    with _tracked(recipe, order, machine, store, folder, needs, resuming, data, stop, parent) as (
        tracker,
        checkpoint_path,
        replayed,
    ):
        witness = Witness(
            recipe,
            recipe_hash,
            loader.dump(recipe),
            folder,
            tracker,
            machine.main,
            stop,
            {name: need.file for name, need in needs.items()},
            replayed,
            checkpoint_path,
            order.elastic,
            source=os.path.relpath(order.path),
            outputs=store.home / "outputs",
            changed=lineage.note(folder),
            allotted=cost.allotted(machine),
            watch=watch,
            began=began,
        )
        again = f", resumed from {checkpoint_path.name}" if checkpoint_path else ""
        witness.say(f"run {folder.name}{again}")
        try:
            with stop.at_once():  # until the loop has something to save
                data_integrity.note(checked, data, tracker, witness.say)
                witness.ceilings = throughput_limits.ensure(
                    recipe, data, machine, store, witness.found, witness.say, stop
                )
                throughput_limits.note(witness, resuming)
                outcome = trainer.train(recipe, data, machine, witness)
        finally:
            witness.close()
        if machine.main:
            with contextlib.nullcontext() if outcome.status == "KILLED" else stop.at_once():
                run_summary.write(witness, outcome, hurried=stop.told)
            # Before the end is said: a finished run is used in place of another by its key.
            folder.update(data_digest=data.meta.digest, key=key, program=program)
            if outcome.status == "FINISHED" and parent is None:
                with contextlib.suppress(OSError):  # of a full disk; then a run that is killed from here on is over
                    folder.leaving.touch()
            tracker.finish(outcome.status)
            with contextlib.suppress(UserError, OSError):  # nor does another job go on with it while it is promoted
                folder.claim()
            witness.say(run_summary.table(witness, outcome, store))
            # Of runs that belong together, such as folds, none speaks for all.
            if recipe.promote and outcome.status == "FINISHED" and parent is None:
                witness.say(promote.at_end(store, folder, recipe.promote))
            if tracker.remains:
                witness.say(f"left   {tracker.remains}")
            folder.leaving.unlink(missing_ok=True)
            folder.release()
    machine.wait()
    return outcome.status, folder


def _say_done(folder: RunFolder, store: Any) -> None:
    """Name a run that had finished before, and send what it has left."""
    from trainkit.tracking import tracker as tracking

    said = "has finished (same recipe, data and program); to train again leave --resume-or-start out"
    print(f"run {folder.name} {said}", flush=True)
    if folder.info().unsent:
        try:
            tracking.send_rest(folder, store)
        except UserError as error:
            print(f"left   {without_secrets(str(error))}; later: trainkit sync {folder.name}", flush=True)


@contextlib.contextmanager
def _tracked(
    recipe: Recipe,
    order: Order,
    machine: Any,
    store: Any,
    folder: Any,
    needs: Mapping[str, Need],
    resuming: bool,
    data: Any,
    stop: Stop,
    parent: str | None,
) -> Iterator[tuple[Any, Path | None, list[Any]]]:
    """The tracker of a run, the checkpoint to resume from, and the decisions to repeat."""
    from trainkit.experiments import post_mortem
    from trainkit.tracking.tracker import Silent, Tracker
    from trainkit.training.plan import evaluated
    from trainkit.training.run_logger import refused

    tracker: Any = Silent()

    def start() -> tuple[str | None, list[Any]]:
        nonlocal tracker
        path, position, problems = _newest(folder) if resuming else (None, 0, [])
        ended = post_mortem.word(folder) if resuming else ""
        rank_failures.clear(folder.path)
        best = recipe.best
        made_by = {f"trainkit.{name}": need.run.name for name, need in needs.items() if need.run is not None}
        tracker = Tracker.start(
            folder,
            store,
            experiment=recipe.log.experiment or recipe.name,
            run_name=folder.name,
            params={**loader.flat(recipe), **{f"machine.{k}": v for k, v in machine.describe().items()}},
            tags={"trainkit.recipe": recipe.name, **made_by},
            parent=parent,
            note=about(order),
            resume=resuming,
            primary_metric=best.metric if best else None,
            higher_is_better=best is None or best.mode == "max",
            system_metrics_every=recipe.log.system_every.seconds if recipe.log.system_every else 0.0,
        )
        tracker.hurried = lambda: stop.told
        for need in needs.values():
            if need.new:  # made for this run: MLflow shows it beneath
                tracker.adopt(need.run.name)
        decided = tracker.cut_back(position).decided if resuming else []
        refused(tracker, problems, lambda text: print(visible(text), flush=True))
        if ended:
            print(visible(ended), flush=True)
            tracker.event(0, "died", {"said": ended})
            tracker.tags({"trainkit.died": ended})
        tracker.artifact_text("recipe/resolved.yaml", loader.dump(recipe))
        tracker.artifact_text("recipe/original.yaml", order.path.read_text(encoding="utf-8"))
        tracker.artifact_text("recipe/overrides.txt", "".join(f"{word}\n" for word in order.overrides))
        splits = evaluated(recipe, data)
        digests = {f"{lineage.DATA}.{name}": split.digest for name, split in splits.items()}
        lineage.record(tracker, folder, store, order.path, {lineage.DATA: data.meta.digest, **digests}, parent)
        tracker.dataset("train", "train", data.meta.digest, getattr(recipe.data, "train", ""), data.train.size)
        for split in {split.digest: split for split in splits.values()}.values():
            source = getattr(recipe.data, "evaluate", {}).get(split.name.partition(".")[0], "")
            tracker.dataset(split.name, "test", split.digest, source, split.size)
        return path, decided

    with ending(lambda: tracker, lambda: stop.told and machine.world > 1):
        try:
            path, decided = machine.lead(start)
            yield tracker, Path(path) if path else None, decided
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if not stop.told and not getattr(error, "told", False):
                rank_failures.note(folder.path, machine.rank, error)
            if (
                rank_failures.lost(error)
                and not stop.told
                and (cause := rank_failures.first(folder.path, machine)) is not None
            ):
                raise cause from error
            raise


def _newest(folder: Any) -> tuple[str | None, int, list[str]]:
    """The newest checkpoint of a run that verifies, its position in the journal, and why newer ones do not."""
    from trainkit.checkpoint import storage

    storage.clean(folder.checkpoints)
    path, problems = storage.newest_valid(folder.checkpoints)
    if path is None and problems:
        found = f"none of its checkpoints is whole: {problems[0]}"
        raise UserError(str(folder.path), found, remedy="start a new run")
    if path is None:
        return None, 0, []
    state = storage.state_of(path)
    if state["identity"]["recipe"] != folder.info().recipe_hash:
        found = "is of another run: its recipe is not the one that this run began with"
        raise UserError(str(path), found, remedy="move it away; the run goes on from the one before")
    return str(path), state["journal"], problems


def children_of(order: Order) -> list[Child]:
    """The runs that an order asks for beneath one of their own; none where it asks for a single run.

    Of a sweep whose settings are proposed as it goes, one example. Raises UserError.
    """
    if order.folds:
        return divide(order)
    if order.seeds is not None:
        return repeated(order)
    if order.sweep is not None:
        from trainkit.experiments.sweep import settings

        return settings(order)
    return []
