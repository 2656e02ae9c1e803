"""From a recipe's path to a finished run: load, check, train what it needs first, train, report."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit import config
from trainkit.errors import UserError
from trainkit.places import locate
from trainkit.recipe import Recipe


@dataclass(frozen=True)
class Order:
    """What the command line asked for."""

    path: Path
    """The recipe's file; recipes it names are looked up from its folder."""
    overrides: Sequence[str] = ()
    plugins: Sequence[str] = ()
    resume: str | None = None
    """Name of a run to continue; empty: the newest unfinished one of this recipe; None: start a new one."""
    elastic: bool = False
    """Continue on another number of processes: every sample still counts once, but bits are no longer promised."""


def check(order: Order) -> str:
    """The resolved recipe, and sentences about data and weights that are not there yet. Touches no device or store.

    Raises ConfigError with every mistake of the recipe and of the recipes it needs.
    """
    recipe = load(order)
    notes = list(recipe.data.missing())
    for name, source in recipe.task.needs().items():
        if source.recipe is not None:
            load(Order(_beside(order.path, source.recipe), plugins=order.plugins))
        elif ":" not in source.weights and not locate(source.weights).is_file():
            notes.append(f"task.{name}.weights: {locate(source.weights)} does not exist")
    text = config.dump(recipe)
    return text + "".join(f"# not there yet: {note}\n" for note in notes)


def load(order: Order) -> Recipe:
    """Load the recipe of an order."""
    return config.load(order.path, list(order.overrides), tuple(order.plugins))


def launch(order: Order, stopping: Callable[[], bool]) -> int:
    """Run an order to its end. Returns the exit code: 0 finished, 143 told to stop.

    Raises UserError for what the user can mend.
    """
    recipe = load(order)
    from trainkit.machine import Machine
    from trainkit.store import Store

    machine = Machine(recipe)
    store = Store.locate()
    machine.lead(store.prepare)
    try:
        found = {
            name: Path(machine.lead(lambda name=name, s=source: str(_provide(name, s, store))))
            if source.recipe is None
            else _train_first(name, source.recipe, order, machine, store, stopping)
            for name, source in recipe.task.needs().items()
        }
        if stopping():
            return 143
        outcome, _ = _run(recipe, order, machine, store, found, stopping)
    finally:
        machine.close()
    return 0 if outcome.status == "FINISHED" else 143


def score(order: Order, run: str) -> dict[str, float]:
    """Score the best weights of a run on every evaluation of a recipe, and print them. Starts no run."""
    recipe = load(order)
    from trainkit import loop, plan, weights
    from trainkit.machine import Machine
    from trainkit.store import Store

    machine, store = Machine(recipe), Store.locate()
    try:
        file = machine.lead(lambda: str(best_weights(store.find(run).path)))
        data = recipe.data.open(recipe.seed)
        found = {n: Path(machine.lead(lambda s=s: _given(s, order, store))) for n, s in recipe.task.needs().items()}
        net = recipe.task.build(data.meta, found, recipe.seed).learns
        weights.load_into(net, weights.read_tensors(Path(file)), file)
        machine.layout(net)
        metrics: dict[str, float] = {}
        for name, split in plan.evaluated(recipe, data).items():
            scores = loop.evaluate(recipe.task, net, split, recipe.evaluations[name].batch_size, machine)
            metrics |= {f"{name}/{key}": value for key, value in scores.metrics.items()}
    finally:
        machine.close()
    if machine.main:
        print(*(f"{key} {value!r}" for key, value in metrics.items()), sep="\n", flush=True)
    return metrics


def _given(source: Any, order: Order, store: Any) -> str:
    """A file of weights that exists already: for scoring, nothing is trained first."""
    if source.recipe is None:
        return str(_provide("teacher", source, store))
    from trainkit.store import run_key

    recipe = load(Order(_beside(order.path, source.recipe), plugins=order.plugins))
    done = store.finished_with(run_key(config.digest(recipe), recipe.data.open(recipe.seed).meta.digest))
    if done is None:
        raise UserError(source.recipe, "has no finished run", remedy="train it first")
    return str(best_weights(done.path))


def _run(
    recipe: Recipe,
    order: Order,
    machine: Any,
    store: Any,
    found: Mapping[str, Path],
    stopping: Callable[[], bool],
    parent: str | None = None,
) -> tuple[Any, Path]:
    """Train one recipe as one run. Returns its outcome and its folder."""
    from trainkit import loop
    from trainkit.report import closing
    from trainkit.store import RunFolder, run_key
    from trainkit.witness import Witness

    data = recipe.data.open(recipe.seed)
    recipe_hash = config.digest(recipe)

    def open_folder() -> tuple[str, bool]:
        if order.resume is None or parent is not None:
            folder = store.new_run(recipe.name, recipe.seed, recipe_hash, parent)
            folder.recipe.write_text(config.dump(recipe), encoding="utf-8")
            return str(folder.path), False
        folder = store.find(order.resume) if order.resume else store.newest_unfinished(recipe.name, recipe_hash)
        if folder is None:
            other = store.newest_unfinished(recipe.name)
            found = f"no unfinished run of {recipe.name} with these settings"
            nearest = f"; {other.name} had others" if other else ""
            raise UserError("--resume", found + nearest, remedy="leave --resume out to start one")
        folder.claim()
        return str(folder.path), True

    path, resuming = machine.lead(open_folder)
    folder = RunFolder(Path(path))
    with _tracked(recipe, order, machine, store, folder, parent, resuming, data) as (
        tracker,
        checkpoint_path,
        replayed,
    ):
        witness = Witness(
            recipe,
            recipe_hash,
            config.dump(recipe),
            folder,
            tracker,
            machine.main,
            stopping,
            found,
            replayed,
            checkpoint_path,
            order.elastic,
        )
        again = f", resumed from {checkpoint_path.name}" if checkpoint_path else ""
        witness.say(f"run {folder.name}{again}")
        try:
            outcome = loop.train(recipe, data, machine, witness)
        finally:
            witness.close()
        if machine.main:
            closing.write(witness, outcome)
            tracker.finish(outcome.status)
            folder.update(data_digest=data.meta.digest, key=run_key(recipe_hash, data.meta.digest))
            witness.say(closing.table(witness, outcome, store))
    machine.accelerator.free_memory()
    machine.wait()
    return outcome, folder.path


@contextlib.contextmanager
def _tracked(
    recipe: Recipe,
    order: Order,
    machine: Any,
    store: Any,
    folder: Any,
    parent: str | None,
    resuming: bool,
    data: Any,
) -> Iterator[tuple[Any, Path | None, list[Any]]]:
    """The tracker of a run, the checkpoint to resume from, and the decisions to repeat.

    However the run ends, its status says so.
    """
    from trainkit.tracking import Silent, Tracker

    tracker: Any = Silent()

    def begin() -> tuple[str | None, list[Any]]:
        nonlocal tracker
        path, position = _newest(folder) if resuming else (None, 0)
        best = recipe.best
        tracker = Tracker.start(
            folder,
            store,
            experiment=recipe.log.experiment or recipe.name,
            run_name=folder.name,
            params={**config.flat(recipe), **{f"machine.{k}": v for k, v in machine.describe().items()}},
            tags={"trainkit.recipe": recipe.name},
            parent=parent,
            resume=resuming,
            primary_metric=best.metric if best else None,
            higher_is_better=best is None or best.mode == "max",
            system_metrics_every=recipe.log.system_every.seconds if recipe.log.system_every else 0.0,
        )
        decided = tracker.cut_back(position).decided if resuming else []
        tracker.artifact_text("recipe/resolved.yaml", config.dump(recipe))
        tracker.artifact_text("recipe/original.yaml", order.path.read_text(encoding="utf-8"))
        tracker.artifact_text("recipe/overrides.txt", "".join(f"{word}\n" for word in order.overrides))
        tracker.dataset("train", "train", data.meta.digest, getattr(recipe.data, "train", ""), data.train.size)
        for name, split in data.evaluations.items():
            tracker.dataset(name, "test", split.digest, getattr(recipe.data, "evaluate", {}).get(name, ""), split.size)
        return path, decided

    try:
        path, decided = machine.lead(begin)
        yield tracker, Path(path) if path else None, decided
    except UserError as error:
        tracker.finish("FAILED", str(error))
        raise
    except KeyboardInterrupt:
        tracker.finish("KILLED")
        raise
    except BaseException as error:
        tracker.finish("FAILED", error)
        raise


def _newest(folder: Any) -> tuple[str | None, int]:
    """The newest checkpoint of a run that verifies, and its position in the journal."""
    from trainkit import checkpoint

    checkpoint.clean(folder.checkpoints)
    path, problems = checkpoint.newest_valid(folder.checkpoints)
    for problem in problems:
        print(f"left aside: {problem}", flush=True)
    return (str(path), json.loads((path / checkpoint.STATE).read_text())["journal"]) if path else (None, 0)


def _provide(name: str, source: Any, store: Any) -> Path:
    """The file behind `weights: ...`: a path, `run:NAME`, or a logged model."""
    word = source.weights
    if word.startswith("run:"):
        return best_weights(store.find(word[4:]).path)
    if word.startswith("models:/"):
        return store.model_file(word)
    path = locate(word)
    if not path.is_file():
        raise UserError(f"task.{name}.weights", f"{path} does not exist", remedy="give a file, run:NAME or models:/ID")
    return path


def best_weights(run: Path) -> Path:
    """Weights of a run's best checkpoint, or of its last where no evaluation named a best."""
    from trainkit import checkpoint

    newest, _ = checkpoint.newest_valid(run / "checkpoints")
    if newest is None:
        raise UserError(str(run), "holds no checkpoint", remedy="train it again")
    best = json.loads((newest / "state.json").read_text())["best"]
    chosen = run / "checkpoints" / f"step-{best[0]['step']:09d}" if best else newest
    return (chosen if chosen.is_dir() else newest) / "model.safetensors"


def _train_first(
    name: str, recipe_path: str, order: Order, machine: Any, store: Any, stopping: Callable[[], bool]
) -> Path:
    """Train the recipe that makes a network's weights, or reuse the run that did so from the same recipe and data."""
    from trainkit.store import run_key

    child = Order(_beside(order.path, recipe_path), plugins=order.plugins)
    recipe = load(child)
    key = run_key(config.digest(recipe), recipe.data.open(recipe.seed).meta.digest)

    def look() -> str | None:
        done = store.finished_with(key)
        return str(done.path) if done else None

    path = machine.lead(look)
    if path is not None:
        if machine.main:
            print(f"{name}: reusing run {Path(path).name} (same recipe and data)", flush=True)
        return best_weights(Path(path))
    unfinished = machine.lead(
        lambda: getattr(store.newest_unfinished(recipe.name, config.digest(recipe)), "name", None)
    )
    if order.resume is not None and unfinished:
        child = Order(child.path, plugins=order.plugins, resume=unfinished, elastic=order.elastic)
    if machine.main:
        print(f"{name}: training {child.path} first", flush=True)
    _, folder = _run(recipe, child, machine, store, {}, stopping)
    return best_weights(folder)


def _beside(recipe: Path, named: str) -> Path:
    """A recipe named in a recipe, from that recipe's folder."""
    return (recipe.parent / named).resolve()
