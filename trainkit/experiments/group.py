"""Groups of runs: a parent run in MLflow, and the child runs that it summarises or compares.

The folds of a cross-validation, the seeds of a recipe and the settings of a sweep are groups that vary other keys
(`repeats`, `sweep`). Each child is the run that its overrides alone would start. Runs that finished with the same
recipe and data are reused; `--resume` continues interrupted ones.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from trainkit import terminal
from trainkit.config import diff, loader
from trainkit.config.run_request import RunRequest, load
from trainkit.config.schema import Recipe
from trainkit.errors import UserError, listing, visible
from trainkit.files import write_aside
from trainkit.terminal import numbers
from trainkit.tracking import journal, lineage, run_names
from trainkit.tracking.run_folder import MEMBERS, SUMMARY, RunFolder, run_key
from trainkit.tracking.run_lifecycle import about, begin, differing, ending
from trainkit.tracking.store import Store
from trainkit.tracking.tracker import Silent, Tracker
from trainkit.training import plan
from trainkit.training.dependencies import with_their_split

if TYPE_CHECKING:
    from trainkit.distributed.runtime import Runtime

Train = Callable[[RunRequest, Recipe, str | None], tuple[str, RunFolder | None]]
"""Trains a recipe beneath a run, to the end or to a signal: its status, and its folder where it came to have one."""
Digests = dict[str, tuple[str, dict[str, str]]]
"""Data and seed to the digest of the training set, and those of the evaluations by name."""


@dataclass(frozen=True)
class Child:
    """One of the runs of a group."""

    title: str
    """`fold 0`, `seed 3`, `trial 7`."""
    request: RunRequest
    recipe: Recipe
    setting: Mapping[str, str] = field(default_factory=dict)
    """Keys and values that set it apart, where the title does not say it."""

    @property
    def overrides(self) -> str:
        """The overrides of its setting."""
        return " ".join(f"{key}={value}" for key, value in self.setting.items())


def child_of(request: RunRequest, title: str, words: Sequence[str], setting: Mapping[str, str] | None = None) -> Child:
    """Return the child with these overrides. With --resume it continues if it has a run to continue."""
    resume = request.resume and ""  # by name it is the parent that goes on
    own = replace(request, overrides=tuple(words), resume=resume, folds=False, seeds=None, sweep=False)
    own = with_their_split(own, Store.locate())
    return Child(title, own, load(own), setting or {})


def child_key(child: Child, digests: Digests) -> str:
    """Return the `run_key` of a child. Opens its data unless `digests` has those of this data and seed."""
    recipe = child.recipe
    data = f"{recipe.seed} {recipe.data!r}"
    if data not in digests:
        opened = recipe.data.open(recipe.seed)
        evaluated = {name: split.digest for name, split in plan.evaluated(recipe, opened).items()}
        digests[data] = opened.meta.digest, evaluated
    return run_key(loader.digest(recipe), digests[data][0])


@dataclass(frozen=True)
class Result:
    """A child that ended."""

    child: Child
    run: RunFolder | None
    """None for one that failed before it had a folder."""
    value: float = math.nan
    """The best value of the metric that the recipe's `best` names."""
    step: int = 0
    """The step of that value, else the last one."""
    seconds: float = math.nan
    """Wall-clock time of its last process."""
    error: str = ""
    """Why it failed; empty where it finished."""


@dataclass(frozen=True)
class RunGroup(ABC):
    """Several runs that belong together. A subclass says how they are chosen and summed up."""

    request: RunRequest
    children: Sequence[Child]
    keys: Sequence[str]
    """Keys of the recipe that children may have of their own; blocks too."""
    word: ClassVar[str]
    """`folds`: the parent is RECIPE-folds-..., and its tag `trainkit.folds` says how many there are."""
    kind: ClassVar[str]
    """`cross-validation`: what the whole is called."""
    unit: ClassVar[str]
    """What there are so many of: `folds`."""
    tolerant: ClassVar[bool] = False
    """A child that fails is noted, and the others are trained."""

    @property
    def recipe(self) -> Recipe:
        """That of the first child; what all have in common are the parameters of the parent."""
        return self.children[0].recipe

    @property
    def digest(self) -> str:
        """The SHA-256, in hexadecimal, of the children's recipes, by which --resume finds the group."""
        return hashlib.sha256("\n".join(loader.digest(child.recipe) for child in self.children).encode()).hexdigest()

    def check_data(self, digests: Digests) -> None:  # noqa: B027 - most groups take any data
        """Raise UserError for data on which the runs cannot be summed up."""

    @abstractmethod
    def conclude(self, results: Sequence[Result], parent: Parent) -> None:
        """Sum up the results in the parent run and in the terminal, on the first process."""


def train_group(group: RunGroup, runtime: Runtime, store: Store, train: Train) -> str:
    """Train every child that has no finished run, and sum them up in a parent run. Returns its status.

    Of a tolerant group a child that fails is noted and the others are trained; on several processes the group ends,
    because some processes may be gone. Raises UserError for errors that the user can correct, and if no child
    finished; the next attempt reuses the finished runs.
    """
    digests: Digests = {}
    keys = [child_key(child, digests) for child in group.children]  # what is wrong with the data of the last shows now
    group.check_data(digests)
    results: list[Result] = []
    with parent_run(group, runtime, store, train) as parent:
        for child, key in zip(group.children, keys, strict=True):
            try:
                result = parent.run_child(child, key)
            except UserError as error:
                if not group.tolerant or runtime.world > 1:
                    raise
                runtime.accelerator.free_memory()
                result = parent.failed(child, error)
            if result is None:
                parent.tracker.finish("KILLED")
                parent.say(f"Stopped after {len(results)} of {len(keys)} {group.unit}: {parent.folder.name}")
                return "KILLED"
            results.append(result)
        if all(result.error for result in results):
            found = f"none of the {len(keys)} {group.unit} finished"
            raise UserError(group.kind, found, remedy=f"the first: {results[0].error}")
        runtime.on_main(lambda: group.conclude(results, parent))
    return "FINISHED"


@dataclass
class Parent:
    """The parent run, on every process."""

    group: RunGroup
    runtime: Runtime
    store: Store
    train: Train
    tracker: Tracker | Silent
    """`Silent` but on the first process."""
    folder: Path
    """As the first process sees it."""
    children: dict[str, str] = field(default_factory=dict)
    """Names of the runs of children so far, by title."""
    header_printed: bool = False
    """True after the header of the rows of children."""

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.runtime.main:
            print(visible(text), flush=True)

    def run_child(self, child: Child, key: str) -> Result | None:
        """Find the finished run of a child, or train it now, and print a row for it. None after a stop."""
        found = self.runtime.on_main(lambda: (run := self.store.finished_with(key)) and str(run.path))
        if found is not None:
            folder, state = RunFolder(Path(found)), "reused"
            # The tag of an earlier parent still names it.
            self.runtime.on_main(lambda: self.tracker.adopt(folder.name))
        else:
            status, made = self.train(child.request, child.recipe, self.folder.name)
            # The GPU is asked again how much it has free for the data of the next one.
            self.runtime.accelerator.free_memory()
            if made is None:
                return None
            folder, state = made, "" if status == "FINISHED" else "stopped"
        self.note(child.title, folder)
        values = self.runtime.on_main(lambda: self._row(child, folder, state))
        return None if state == "stopped" else Result(child, folder, *values)

    def failed(self, child: Child, error: UserError) -> Result:
        """Note a child that ended with an error, and its run where it came to have one."""
        self.say(f"{child.title}: failed: {error}")
        infos = {run: run.info() for run in self.store.runs() if run.name not in self.children.values()}
        found = [run for run, info in infos.items() if (info.parent, info.status) == (self.folder.name, "FAILED")]
        if found:
            self.note(child.title, found[-1])
        return Result(child, found[-1] if found else None, error=str(error))

    def _row(self, child: Child, folder: RunFolder, state: str) -> tuple[float, int, float]:
        """Print the row of a child, below a header before the first; return value, step and seconds of its result."""
        metric = child.recipe.best.metric if child.recipe.best else ""
        metrics = journal.read(folder.journal).metrics if folder.journal.is_file() else {}
        best, wall = metrics.get(f"best/{metric}"), metrics.get("final/time/wall_s")
        last = max((points[-1].step for points in metrics.values()), default=0)
        value, step = (best[-1].value, best[-1].step) if best else (math.nan, last)
        took = wall[-1].value if wall else math.nan
        left = [("", child.title, 10), *([("setting", child.overrides, 28)] if child.overrides else [])]
        right = [(metric, numbers([value])[0])] if metric else []
        right += [("step", str(step)), ("seconds", "-" if math.isnan(took) else f"{took:.0f}")]
        texts = [f"{text:{width}}" for _, text, width in left] + [f"{t:>{max(8, len(name))}}" for name, t in right]
        if not self.header_printed:
            self.header_printed = True
            heads = [f"{name:{width}}" for name, _, width in left] + [f"{name:>8}" for name, _ in right]
            print(terminal.painted("  ".join([*heads, "run"]), "bold cyan", sys.stdout), flush=True)
        print(visible("  ".join([*texts, folder.name]) + (f" ({state})" if state else "")), flush=True)
        return value, step, took

    def note(self, title: str, folder: RunFolder) -> None:
        """Record the run of a child in a tag, and in a file that works without MLflow."""
        self.children[title] = folder.name
        if self.runtime.main:
            self.tracker.tags({f"trainkit.{title.replace(' ', '.')}": folder.name})
            write_aside(self.folder / MEMBERS, json.dumps(self.children, indent=1) + "\n")

    def conclude(self, text: str, following: Sequence[tuple[str, str]] = ()) -> None:
        """Print the summary and the next commands, and write the summary at the top of the run's page."""
        head = lineage.note(RunFolder(self.folder)) + lineage.as_it_stands(text.strip("\n").splitlines())
        self.tracker.tags({"mlflow.note.content": head})
        write_aside(self.folder / SUMMARY, f"{text}\n")
        width = max((len(command) for command, _ in following), default=0)
        lines = [
            f"View:   trainkit ui   (or: mlflow ui --backend-store-uri {self.store.shown})",
            f"Files:  {self.folder}",
            *(f"Next:   {command.ljust(width)}  # {why}" for command, why in following),
        ]
        print(visible("\n".join(["", text.rstrip("\n"), "", *lines])), flush=True)


@contextmanager
def parent_run(group: RunGroup, runtime: Runtime, store: Store, train: Train) -> Iterator[Parent]:
    """Start or continue the parent run of a group; it ends with the status of the body of the `with` block."""
    request, recipe, digest = group.request, group.recipe, group.digest
    # Its own name and hash: `--resume` of a single child never finds it, and it never finds a single child.
    name = f"{recipe.name}-{group.word}"
    tracker: Tracker | Silent = Silent()
    resuming = False

    def start() -> str:
        nonlocal tracker, resuming
        folder, resuming = begin(request, store, name, recipe.seed, digest, loader.dump(recipe), False)
        if folder.info().recipe_hash != digest:
            folder.release()
            found = f"is not a {group.kind} of {request.path} with these settings"
            remedy = "leave its name out, or leave out --resume to start a new one"
            if changes := differing(folder, recipe, request.plugins):
                remedy += f"; the run's value -> the one given:{listing(diff.lines(changes))}"
            raise UserError(f"run {folder.name}", found, remedy=remedy)
        differ = tuple(f"{key}." for key in group.keys)
        params = {key: value for key, value in loader.flat(recipe).items() if not f"{key}.".startswith(differ)}
        tags = {f"trainkit.{group.word}": len(group.children)}
        tracker = start_tracker(request, recipe, folder, store, resuming, params, tags)
        if resuming:
            tracker.cut_back(0)
        folder.update(varies=list(group.keys))
        lineage.record(tracker, folder, store, request.path, {})
        track_request(tracker, request)
        again = ", continued" if resuming else ""
        print(
            f"{'Run':12}{folder.name}{again}\n{'Children':12}{len(group.children)} {group.unit} of {recipe.name}",
            flush=True,
        )
        return str(folder.path)

    def unbegun() -> bool:
        own = tracker.folder.name if not isinstance(tracker, Silent) else ""
        return runtime.world == 1 and not resuming and all(run.info().parent != own for run in store.runs())

    with ending(lambda: tracker, unbegun=unbegun):
        path = runtime.on_main(start)
        yield Parent(group, runtime, store, train, tracker, Path(path))
        tracker.finish("FINISHED")
        runtime.barrier()  # a launcher ends the other processes when one leaves with a code, as after a stop


def start_tracker(
    request: RunRequest,
    recipe: Recipe,
    folder: RunFolder,
    store: Store,
    resuming: bool,
    params: Mapping[str, object],
    tags: Mapping[str, object],
    parent: str | None = None,
    metrics: Sequence[str] | None = None,
    system_metrics_every: float = 0.0,
) -> Tracker:
    """Start or continue the MLflow run of a folder, in the experiment that the recipe names.

    Raises UserError where that is refused; then nothing is left of a new run.
    """
    try:
        return Tracker.start(
            folder,
            store,
            experiment=recipe.log.experiment or recipe.name,
            run_name=run_names.title(folder.name, request.overrides),
            params=params,
            tags={"trainkit.recipe": recipe.name, **tags},
            parent=parent,
            note=about(request),
            resume=resuming,
            primary_metric=recipe.best.metric if recipe.best else None,
            higher_is_better=recipe.best is None or not recipe.best.lower,
            metrics=metrics,
            changed=[word.partition("=")[0] for word in request.overrides],
            system_metrics_every=system_metrics_every,
        )
    except UserError:
        if not resuming:
            folder.remove()
        raise


def track_request(tracker: Tracker, request: RunRequest) -> None:
    """Keep the recipe's file and the overrides among the artifacts of a run."""
    if request.settings is None:  # else it is there, and the file may have been edited since
        tracker.artifact_text("recipe/original.yaml", request.path.read_text(encoding="utf-8"))
    tracker.artifact_text("recipe/overrides.txt", "".join(f"{word}\n" for word in request.overrides))
