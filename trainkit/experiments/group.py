"""Groups of runs: a parent run in MLflow, and the child runs that it summarises or compares.

The folds of a cross-validation, the seeds of a recipe and the settings of a sweep are runs of their own, each the run
that its overrides alone would start. Runs that finished with the same recipe and data are reused; `--resume` continues
interrupted ones.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit import terminal
from trainkit.config import diff, loader
from trainkit.config.run_request import RunRequest, load
from trainkit.config.schema import Recipe
from trainkit.errors import UserError, listing, visible
from trainkit.files import write_aside
from trainkit.terminal import numbers
from trainkit.tracking import journal, lineage, run_names
from trainkit.tracking.resume import differing
from trainkit.tracking.run_folder import MEMBERS, SUMMARY, RunFolder, run_key
from trainkit.tracking.run_lifecycle import about, begin, ending
from trainkit.tracking.store import Store
from trainkit.tracking.tracker import Silent, Tracker
from trainkit.training import plan
from trainkit.training.dependencies import with_their_split

if TYPE_CHECKING:
    from trainkit.distributed.runtime import Runtime

Watch = Callable[[int, Mapping[str, float]], bool]
"""Told on the first process of each evaluation: step, and scores by full name. True ends the run as KILLED."""


Train = Callable[[RunRequest, Recipe, str | None, Watch | None], tuple[str, RunFolder | None]]
"""Trains a recipe beneath a run, to the end, to a signal, or until `watch` ends it: its status, and its folder where it
came to have one."""


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
    def said(self) -> str:
        """The overrides of its setting."""
        return " ".join(f"{key}={value}" for key, value in self.setting.items())


def child_of(request: RunRequest, title: str, words: Sequence[str], setting: Mapping[str, str] | None = None) -> Child:
    """Return the child with these overrides. With --resume it continues if it has a run to continue."""
    resume = request.resume and ""  # by name it is the parent that goes on
    own = replace(request, overrides=tuple(words), resume=resume, folds=False, seeds=None, sweep=None)
    own = with_their_split(own, Store.locate())
    return Child(title, own, load(own), setting or {})


Digests = dict[str, tuple[str, dict[str, str]]]
"""Data and seed to the digest of the training set, and those of the evaluations by name."""


def child_key(child: Child, digests: Digests) -> str:
    """Return the `run_key` of a child. Opens its data unless `digests` has those of this data and seed.

    Called for all children before any is trained, so that an error in the data of the last one shows at once.
    """
    recipe = child.recipe
    data = f"{recipe.seed} {recipe.data!r}"
    if data not in digests:
        opened = recipe.data.open(recipe.seed)
        scored = {name: split.digest for name, split in plan.evaluated(recipe, opened).items()}
        digests[data] = opened.meta.digest, scored
    return run_key(loader.digest(recipe), digests[data][0])


@dataclass(frozen=True)
class RunGroup:
    """Several runs that belong together: what they are, and what they are called."""

    request: RunRequest
    children: Sequence[Child]
    """The runs; one example where their settings are proposed one after another."""
    word: str
    """`folds`: the parent is RECIPE-folds-..., and its tag `trainkit.folds` says how many there are."""
    kind: str
    """`cross-validation`: what the whole is called."""
    unit: str
    """What there are so many of: `folds`."""
    differ: Sequence[str]
    """Keys of the recipe that children may have of their own; blocks too."""
    proposed: int = 0
    """How many runs there will be where their settings are proposed."""
    identity: Sequence[str] = ()
    """What identifies the group beside the recipes of its children."""

    @property
    def recipe(self) -> Recipe:
        """That of the first child; what all have in common are the parameters of the parent."""
        return self.children[0].recipe

    @property
    def size(self) -> int:
        """How many runs it has in the end."""
        return self.proposed or len(self.children)

    @property
    def digest(self) -> str:
        """The SHA-256, in hexadecimal, of the children's recipes and all else by which --resume finds the group."""
        words = [*(loader.digest(child.recipe) for child in self.children), *self.identity]
        return hashlib.sha256("\n".join(words).encode()).hexdigest()


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

    def run_child(self, child: Child, key: str, watch: Watch | None = None) -> tuple[str, RunFolder | None]:
        """Find the finished run of a child, or train it now; print a row for it.

        Returns its status, and its folder if it has one.
        """
        found = self.runtime.on_main(lambda: (run := self.store.finished_with(key)) and str(run.path))
        if found is not None:
            folder = RunFolder(Path(found))
            self.row(child, folder, "reused")
            self.runtime.on_main(lambda: self.adopt(child, folder))
            return "FINISHED", folder
        status, made = self.train(child.request, child.recipe, self.folder.name, watch)
        # The GPU is asked again how much it has free for the data of the next one.
        self.runtime.accelerator.free_memory()
        if made is not None:
            self.note(child.title, made)
            self.row(child, made, "" if status == "FINISHED" else "stopped")
        return status, made

    def row(self, child: Child, folder: RunFolder, state: str = "") -> None:
        """Print the row of a child: title, setting, score, step, seconds and run, below a header before the first."""
        if not self.runtime.main:
            return
        metric = child.recipe.best.metric if child.recipe.best else ""
        metrics = journal.read(folder.journal).metrics if folder.journal.is_file() else {}
        best, wall = metrics.get(f"best/{metric}"), metrics.get("final/time/wall_s")
        last = max((points[-1].step for points in metrics.values()), default=0)
        cells = {
            "": child.title,
            **({"setting": child.said} if child.said else {}),
            **({metric: numbers([best[-1].value])[0] if best else "-"} if metric else {}),
            "step": str(best[-1].step if best else last),
            "seconds": f"{wall[-1].value:.0f}" if wall else "-",
        }
        widths = {"": 10, "setting": 28}

        def aligned_row(texts: Mapping[str, str]) -> str:
            left = [text.ljust(widths[name]) for name, text in texts.items() if name in widths]
            right = [text.rjust(max(8, len(name))) for name, text in texts.items() if name not in widths]
            return "  ".join([*left, *right])

        if not self.header_printed:
            self.header_printed = True
            head = f"{aligned_row({name: name for name in cells})}  run"
            print(terminal.painted(head, "bold cyan", sys.stdout), flush=True)
        said = f" ({state})" if state else ""
        print(visible(f"{aligned_row(cells)}  {folder.name}{said}"), flush=True)

    def run_children(self, children: Sequence[Child], keys: Sequence[str]) -> list[RunFolder] | None:
        """Return the finished runs of all children, in order; None after a stop: the parent is then KILLED."""
        runs = []
        for child, own in zip(children, keys, strict=True):
            status, folder = self.run_child(child, own)
            if status != "FINISHED" or folder is None:
                self.stop(len(runs))
                return None
            runs.append(folder)
        return runs

    def adopt(self, child: Child, folder: RunFolder) -> None:
        """Show an existing run as a child of this one; the tag of an earlier parent still names it."""
        self.tracker.adopt(folder.name)
        self.note(child.title, folder)

    def note(self, title: str, folder: RunFolder) -> None:
        """Record the run of a child in a tag, and in a file that works without MLflow."""
        self.children[title] = folder.name
        if self.runtime.main:
            self.tracker.tags({f"trainkit.{title.replace(' ', '.')}": folder.name})
            write_aside(self.folder / MEMBERS, json.dumps(self.children, indent=1) + "\n")

    def stop(self, done: int) -> None:
        """End this run as KILLED, and print how many children have finished."""
        self.tracker.finish("KILLED")
        many = f"{done} of {self.group.size} {self.group.unit}"
        self.say(f"Stopped after {many}: {self.folder.name}")

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
        differ = tuple(f"{key}." for key in group.differ)
        params = {key: value for key, value in loader.flat(recipe).items() if not f"{key}.".startswith(differ)}
        tags = {f"trainkit.{group.word}": group.size}
        tracker = start_tracker(request, recipe, folder, store, resuming, params, tags)
        if resuming:
            tracker.cut_back(0)
        folder.update(varies=list(group.differ))
        lineage.record(tracker, folder, store, request.path, {})
        track_request(tracker, request)
        again = ", continued" if resuming else ""
        print(f"{'Run':12}{folder.name}{again}\n{'Children':12}{group.size} {group.unit} of {recipe.name}", flush=True)
        return str(folder.path)

    def unbegun() -> bool:
        own = tracker.folder.name if isinstance(tracker, Tracker) else ""
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
