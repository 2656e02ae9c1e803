"""Runs that belong together: one that stands above, and beneath it those that are summed up or compared there.

The folds of a cross-validation (`folds`), the seeds of a recipe (`repeats`) and the settings of a sweep (`sweeps`) are
runs of their own, each the one that its order alone would start. Those that finished with the same recipe and data are
used again; with --resume those that were interrupted go on.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trainkit.config import loader
from trainkit.config.run_request import Order, load
from trainkit.config.schema import Recipe
from trainkit.errors import UserError, visible
from trainkit.files import write_aside
from trainkit.tracking import journal, lineage
from trainkit.tracking.run_folder import MEMBERS, SUMMARY, RunFolder, run_key
from trainkit.tracking.run_lifecycle import about, begin, ending
from trainkit.tracking.store import Store

Watch = Callable[[int, Mapping[str, float]], bool]
"""Told on the first process of each evaluation: step, and scores by full name. True ends the run as KILLED."""


class Train(Protocol):
    """Train a recipe beneath a run: its status, and its folder where it came to have one."""

    def __call__(
        self, order: Order, recipe: Recipe, parent: str | None, watch: Watch | None = None
    ) -> tuple[str, RunFolder | None]:
        """Train to the end, to a signal, or until `watch` ends it."""


@dataclass(frozen=True)
class Family:
    """What is said of the run above."""

    order: Order
    recipe: Recipe
    """That of the first member; what all have in common are the parameters of the run above."""
    word: str
    """`folds`: the run above is RECIPE-folds-..., and its tag `trainkit.folds` says how many there are."""
    kind: str
    """`cross-validation`: what the whole is called."""
    size: int
    unit: str
    """What there are so many of: `folds`."""
    differ: Sequence[str]
    """Keys of the recipe that members may have of their own; blocks too."""
    digest: str
    """What --resume finds it by."""


def fingerprint(children: Sequence[Child], *more: str) -> str:
    """SHA-256, hexadecimal, of the recipes of members and of what else makes a family another one."""
    words = [*(loader.digest(child.recipe) for child in children), *more]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def key(child: Child, digests: dict[str, str]) -> str:
    """The `run_key` of a member. Opens its data, unless `digests` holds the digest of the same data and seed already.

    Asked of all members before any is trained, what is wrong with the data of the last one shows at once.
    """
    recipe = child.recipe
    data = f"{recipe.seed} {recipe.data!r}"
    if data not in digests:
        digests[data] = recipe.data.open(recipe.seed).meta.digest
    return run_key(loader.digest(recipe), digests[data])


@dataclass
class Parent:
    """The run above, on every process."""

    family: Family
    machine: Any
    store: Store
    train: Train
    tracker: Any
    """A `Tracker` on the first process, `Silent` elsewhere."""
    folder: Path
    """As the first process sees it."""
    members: dict[str, str] = field(default_factory=dict)
    """Names of the runs of members so far, by title."""

    def say(self, text: str) -> None:
        """Print a line, once."""
        if self.machine.main:
            print(visible(text), flush=True)

    def bring(self, child: Child, key: str, watch: Watch | None = None) -> tuple[str, RunFolder | None]:
        """A run of a member, beneath this one: one that finished already, or one that is made now. And its status."""
        said = f"{child.title}: " if not child.said else f"{child.title}: {child.said}: "
        found = self.machine.lead(lambda: (run := self.store.finished_with(key)) and str(run.path))
        if found is not None:
            folder = RunFolder(Path(found))
            self.say(f"{said}reusing run {folder.name} (same recipe and data)")
            self.machine.lead(lambda: self.adopt(child, folder))
            return "FINISHED", folder
        self.say(f"{said}to be trained ({len(self.members) + 1} of {self.family.size})")
        status, made = self.train(child.order, child.recipe, self.folder.name, watch)
        # The GPU is asked again how much it has free for the data of the next one.
        self.machine.accelerator.free_memory()
        if made is not None:
            self.note(child.title, made)
        return status, made

    def adopt(self, child: Child, folder: RunFolder) -> None:
        """Show a run that is there beneath this one; an earlier family keeps its name for it in a tag."""
        self.tracker.adopt(folder.name)
        self.note(child.title, folder)

    def note(self, title: str, folder: RunFolder) -> None:
        """Name the run of a member: in a tag, and in a file that needs no MLflow."""
        self.members[title] = folder.name
        if self.machine.main:
            self.tracker.tags({f"trainkit.{title.replace(' ', '.')}": folder.name})
            write_aside(self.folder / MEMBERS, json.dumps(self.members, indent=1) + "\n")

    def bring_all(self, children: Sequence[Child], keys: Sequence[str]) -> list[RunFolder] | None:
        """Finished runs of all members, in order; None when told to stop: this run is then ended as KILLED."""
        runs = []
        for child, own in zip(children, keys, strict=True):
            status, folder = self.bring(child, own)
            if status != "FINISHED" or folder is None:
                self.stop(len(runs))
                return None
            runs.append(folder)
        return runs

    def stop(self, done: int) -> None:
        """End this run as KILLED, and say how it goes on."""
        self.tracker.finish("KILLED")
        many = f"{done} of {self.family.size} {self.family.unit}"
        self.say(f"run {self.folder.name}: KILLED after {many}; the same command with --resume goes on")

    def conclude(self, text: str) -> None:
        """Print what all came to, with what to open, and keep it at the head of the page of this run."""
        head = lineage.note(RunFolder(self.folder)) + lineage.as_it_stands(text.strip("\n").splitlines())
        self.tracker.tags({"mlflow.note.content": head})
        write_aside(self.folder / SUMMARY, f"{text}\n")
        opened = f"open   trainkit ui        (or: mlflow ui --backend-store-uri {self.store.shown})"
        print(visible(f"\n{text}\n{opened}"), flush=True)


@contextmanager
def above(family: Family, machine: Any, store: Store, train: Train) -> Iterator[Parent]:
    """The run that stands above a family, begun or continued; it ends as what is done within ends."""
    from trainkit.tracking.tracker import Silent, Tracker

    order, recipe = family.order, family.recipe
    # Its own name and hash: `--resume` of a single member never finds it, and it never finds a single member.
    name = f"{recipe.name}-{family.word}"
    tracker: Any = Silent()

    def start() -> str:
        nonlocal tracker
        folder, resuming = begin(order, store, name, recipe.seed, family.digest, loader.dump(recipe), False)
        if folder.info().recipe_hash != family.digest:
            folder.release()
            found = f"is no {family.kind} of {order.path} with these settings"
            raise UserError(f"run {folder.name}", found, remedy="leave its name out, or --resume to start one")
        tracker = Tracker.start(
            folder,
            store,
            experiment=recipe.log.experiment or recipe.name,
            run_name=folder.name,
            params=_common(recipe, family.differ),
            tags={"trainkit.recipe": recipe.name, f"trainkit.{family.word}": family.size},
            note=about(order),
            resume=resuming,
            primary_metric=recipe.best.metric if recipe.best else None,
            higher_is_better=recipe.best is None or recipe.best.mode == "max",
            system_metrics_every=0.0,
        )
        if resuming:
            tracker.cut_back(0)
        folder.update(varies=list(family.differ))
        lineage.record(tracker, folder, store, order.path, {})
        tracker.artifact_text("recipe/original.yaml", order.path.read_text(encoding="utf-8"))
        tracker.artifact_text("recipe/overrides.txt", "".join(f"{word}\n" for word in order.overrides))
        again = ", continued" if resuming else ""
        print(f"run {folder.name}{again}: {recipe.name}, {family.size} {family.unit}", flush=True)
        return str(folder.path)

    with ending(lambda: tracker):
        path = machine.lead(start)
        yield Parent(family, machine, store, train, tracker, Path(path))
        tracker.finish("FINISHED")
        machine.wait()  # a launcher ends the other processes when one leaves with a code, as after a stop


def _common(recipe: Recipe, differ: Sequence[str]) -> dict[str, Any]:
    """Parameters without those that members may have of their own."""
    blocks = tuple(f"{name}." for name in differ)
    return {name: value for name, value in loader.flat(recipe).items() if not f"{name}.".startswith(blocks)}


# ---- The scores of members -------------------------------------------------------------------------------------------


def final_scores(runs: Sequence[RunFolder]) -> tuple[dict[str, list[float]], int]:
    """The scores with which runs ended, by name: a value for each run, NaN where it has none; and the last step."""
    histories = [journal.read(run.journal).metrics for run in runs]
    last = [
        {name: points[-1] for name, points in metrics.items() if name.startswith("final/")} for metrics in histories
    ]
    names = dict.fromkeys(name for points in last for name in points)
    values = {
        name.removeprefix("final/"): [points[name].value if name in points else math.nan for points in last]
        for name in names
    }
    return values, max((point.step for points in last for point in points.values()), default=0)


def known(values: Sequence[float]) -> list[float]:
    """The values that there are: finite ones."""
    return [value for value in values if math.isfinite(value)]


def mean(values: Sequence[float]) -> float:
    """Mean of the values that there are; NaN of none."""
    found = known(values)
    return float(np.mean(found)) if found else math.nan


def std(values: Sequence[float]) -> float:
    """Standard deviation of the values that there are (n - 1 in the denominator); NaN for fewer than two."""
    found = known(values)
    return float(np.std(found, ddof=1)) if len(found) > 1 else math.nan


@dataclass(frozen=True)
class Child:
    """One of several runs that an order asks for."""

    title: str
    """`fold 0`, `seed 3`, `trial 7`."""
    order: Order
    recipe: Recipe
    said: str = ""
    """What sets it apart, where the title does not say it: the words of a setting."""


def child_of(order: Order, title: str, words: Sequence[str], said: str = "") -> Child:
    """An order for one run with these overrides. With --resume it goes on where there is something to go on with."""
    resume = order.resume and ""  # by name it is the run above that goes on
    own = replace(order, overrides=tuple(words), resume=resume, folds=False, seeds=None, sweep=None)
    return Child(title, own, load(own), said)
