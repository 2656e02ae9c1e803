"""Carry out a request: load the recipe, train its dependencies, train the run, and report."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.config import loader, metric_table
from trainkit.config.run_request import RunRequest, load
from trainkit.config.schema import Recipe
from trainkit.data.split import named_sets
from trainkit.distributed import rank_failures
from trainkit.distributed.stop_signal import Stop, Stopped
from trainkit.environment import record
from trainkit.errors import UserError, visible
from trainkit.experiments import post_mortem, repeats, sweep, validation
from trainkit.experiments.group import Child, RunGroup, start_tracker, track_request, train_group
from trainkit.files import write_aside
from trainkit.paths import recipe_word
from trainkit.redact import without_secrets
from trainkit.tracking import lineage, run_lifecycle
from trainkit.tracking.run_folder import META, RunFolder, run_key
from trainkit.tracking.run_lifecycle import begin, ending, finished
from trainkit.tracking.sync import send_rest
from trainkit.tracking.tracker import Silent, Status, Tracker
from trainkit.training.dependencies import Dependency, gather, with_their_split
from trainkit.training.nonfinite import NotFinite

if TYPE_CHECKING:
    from trainkit.analysis.data_integrity import Report
    from trainkit.distributed.runtime import Runtime
    from trainkit.interfaces import Dataset
    from trainkit.tracking.store import Store
    from trainkit.training.checkpointer import Resume
    from trainkit.training.outcome import Outcome
    from trainkit.training.run_logger import RunLogger
    from trainkit.training.trainer import Trainer

STOPPED = 143
"""Exit code of a run that was told to stop."""

_training = threading.Lock()
"""Held while this process trains."""


def launch(request: RunRequest, stopping: Callable[[], bool], began: float | None = None) -> int:
    """Carry out a request. Returns the exit code: 0 finished, `STOPPED` after a stop. Raises as `carry_out`.

    If a run does not finish, its last line, or the note of its error, is the command that continues it.
    """
    stop = Stop.of(stopping)
    try:
        status, _ = carry_out(request, stop, began)
    except Exception as error:
        if stop.last_words:
            error.add_note(stop.last_words)
        raise
    if status == "FINISHED":
        return 0
    if os.environ.get("RANK", "0") == "0":
        print(visible(stop.last_words or "Nothing was kept; give the same command again"), flush=True)
    return STOPPED


def carry_out(
    request: RunRequest, stopping: Callable[[], bool], began: float | None = None
) -> tuple[str, RunFolder | None]:
    """Carry out a request. Returns its status, FINISHED or KILLED, and the folder of a single run if it has one.

    `began`: the `time.perf_counter()` from which the wall-clock time of the first run counts; default: now. Raises
    UserError for errors that the user can correct, and while another thread trains.
    """
    from trainkit.speed import cost
    from trainkit.tracking.store import Store

    before = cost.busy() if began is None else 0.0
    began = time.perf_counter() if began is None else began
    stop = Stop.of(stopping)
    session: Session | None = None
    with _only_training():
        try:
            with stop.at_once():
                request = with_their_split(request, Store.locate(), logged=True)
                group = group_of(request)
                recipes = [child.recipe for child in group.children] if group is not None else []
                recipe = recipes[0] if request.sweep else load(request)
                session = Session.begin(request, recipe, stop, began, recipes)
                session.busy = before
                session.validate(recipes or [recipe])
            runtime = session.runtime
            folder: RunFolder | None = None
            if group is not None:
                status = train_group(group, runtime, session.store, session.train)
            else:
                with session.open_run(request, recipe) as run:
                    if run.trainer is not None:
                        with stop.at_once():  # until there is something to save
                            run.outcome = run.trainer.fit()
                status, folder = run.status, run.folder
            runtime.close()  # not after an error: others may be at something else, and never come
            return status, folder
        except Stopped:
            return "KILLED", session.made if session is not None else None
        except UserError:
            raise
        except Exception as error:
            if not stop.told or int(os.environ.get("WORLD_SIZE", 1)) == 1:
                raise
            # Another process was told so too, and left while this one was waiting for it.
            print(
                visible(f"stopped by a signal; {type(error).__name__}: {error}".splitlines()[0]),
                file=sys.stderr,
                flush=True,
            )
            return "KILLED", None


@contextlib.contextmanager
def _only_training() -> Iterator[None]:
    """Hold the process for one training. Raises UserError while another thread trains."""
    if not _training.acquire(blocking=False):
        found = "this process is training already, and random numbers and devices are the process's"
        raise UserError("train", found, "one training at a time", "wait for it, or train in another process")
    try:
        yield
    finally:
        _training.release()


def group_of(request: RunRequest) -> RunGroup | None:
    """Return the group of runs that a request asks for; None for a single run. Raises UserError."""
    if request.folds:
        return repeats.Folds.of(request)
    if request.seeds is not None:
        return repeats.Seeds.of(request)
    return sweep.Settings.of(request) if request.sweep else None


def children_of(request: RunRequest) -> Sequence[Child]:
    """Return the child runs that a request asks for; none for a single run. Raises UserError."""
    group = group_of(request)
    return group.children if group is not None else []


@dataclass
class OpenRun:
    """An open run of a recipe; the caller trains it before it is closed."""

    request: RunRequest
    recipe: Recipe
    parent: str | None
    """Name of the run above."""
    dependencies: Mapping[str, Dependency] = field(default_factory=dict)
    ended: Status | None = None
    """Its status where nothing is to be trained."""
    folder: RunFolder | None = None
    data: Dataset = field(init=False)
    key: str = ""
    program: Mapping[str, str] = field(default_factory=dict)
    tracker: Tracker | Silent = field(default_factory=Silent)
    trainer: Trainer | None = None
    """None where nothing is to be trained."""
    outcome: Outcome | None = None
    """Set by the caller."""

    @property
    def status(self) -> str:
        """FINISHED or KILLED."""
        return self.outcome.status if self.outcome is not None else self.ended or "KILLED"


@dataclass
class Session:
    """Device, store and stop signal that the runs of one launch share on a process."""

    runtime: Runtime
    store: Store
    stop: Stop
    began: float
    """From when on the wall-clock of the next run is counted: the command, or the end of the run before."""
    request: RunRequest
    """Of the command."""
    busy: float = 0.0
    """CPU seconds of this process at `began`."""
    opened: dict[str, Dataset] = field(default_factory=dict)
    """Data that was opened to validate the recipes, until a run takes it."""
    made: RunFolder | None = None
    """Folder of the run of the request, once there is one."""

    @classmethod
    def begin(
        cls, request: RunRequest, recipe: Recipe, stop: Stop, began: float, children: Sequence[Recipe] = ()
    ) -> Session:
        """Set up device and store. Raises UserError if processes differ in recipe or program."""
        stop.seconds = recipe.limits.stop.seconds
        from trainkit.distributed.runtime import Runtime
        from trainkit.tracking.store import Store

        store = Store.locate()
        runtime = Runtime(_with_recorded_precision(request, recipe, children, store))
        # Of the settings of a sweep the first stands for all.
        runtime.check_equal({"recipe": loader.digest(recipe), **record.program(*request.plugins)})
        runtime.on_main(store.ready)
        return cls(runtime, store, stop, began, request)

    def validate(self, recipes: Sequence[Recipe]) -> None:
        """Validate recipes, and those that train their weights. Raises UserError for what a run would refuse."""

        def opened(recipe: Recipe) -> Dataset:
            key = validation.data_key(recipe)
            if key not in self.opened:
                self.opened[key] = recipe.data.open(recipe.seed)
            return self.opened[key]

        with self.runtime.heartbeat():  # each machine may have to prepare its own copy
            validation.validate(self.request, recipes, self.runtime.world, opened, self.runtime.precision)

    def train(
        self,
        request: RunRequest,
        recipe: Recipe,
        parent: str | None,
        dependencies: Mapping[str, Dependency] | None = None,
    ) -> tuple[str, RunFolder | None]:
        """Train a recipe as one run; return its status, and its folder if it has one."""
        from trainkit.speed import cost

        with self.open_run(request, recipe, parent, dependencies) as run:
            if run.trainer is not None:
                with self.stop.at_once():  # until there is something to save
                    run.outcome = run.trainer.fit()
        self.began, self.busy = time.perf_counter(), cost.busy()
        return run.status, run.folder

    def _train_dependency(self, request: RunRequest, recipe: Recipe, dependencies: dict[str, Dependency]) -> RunFolder:
        if self.runtime.main:
            self.stop.last_words = "To continue, give the same command again, with --resume"
        with self.stop.later():
            status, folder = self.train(request, recipe, None, dependencies=dependencies)
        if status == "KILLED" or folder is None:
            raise Stopped
        self.stop.last_words = ""
        self.runtime.accelerator.free_memory()  # for the run that needs this one
        return folder

    @contextlib.contextmanager
    def open_run(
        self,
        request: RunRequest,
        recipe: Recipe,
        parent: str | None = None,
        dependencies: Mapping[str, Dependency] | None = None,
    ) -> Iterator[OpenRun]:
        """Open a run, as a child of `parent` if given; report and close it when it was trained within.

        `dependencies` are trained first if not given. For a request to resume or start, a finished run is used instead
        of a new one.
        """
        from trainkit.analysis import data_integrity
        from trainkit.diagnostics import throughput_limits
        from trainkit.training.trainer import Trainer

        run = OpenRun(request, recipe, parent)
        with self.stop.at_once():
            run.dependencies = (
                gather(request, recipe, self.runtime, self.store, self._train_dependency)
                if dependencies is None
                else dependencies
            )
        if dependencies is None and self.runtime.any_async(self.stop())():
            run.ended = "KILLED"
            yield run
            return
        with self.stop.at_once():
            report = self._open_data(run)
        if run.ended:
            yield run
            return
        folder, resuming = self._open_folder(run)
        runtime, store, stop = self.runtime, self.store, self.stop
        weights = {name: dependency.file for name, dependency in run.dependencies.items()}
        with contextlib.ExitStack() as last, self._tracked(run, folder, resuming) as position:
            logger = self._logger(run, folder, position)
            with stop.at_once():
                data_integrity.note(report, run.data, run.tracker, logger.say)
                logger.limits = throughput_limits.ensure(recipe, run.data, runtime, store, weights, logger.say, stop)
                throughput_limits.note(logger, resuming)
                shared: dict[str, Any] = {"weights": weights, "cache": store.home / "outputs"}
                run.trainer = Trainer(recipe, run.data, runtime, logger, resume=position, stop=stop, **shared)
            if runtime.main and dependencies is None:  # else the run that needs this one is to go on too
                stop.last_words = f"Next: {run_lifecycle.command(parent or folder.name, request.plugins)}"
            with run.trainer:
                yield run
            last.enter_context(runtime.heartbeat())  # others wait until the run is reported and closed
            if runtime.main:
                self._report(run, folder, logger)
        if parent is None and run.status == "FINISHED":
            stop.last_words = ""

    def _open_data(self, run: OpenRun) -> Report | None:
        """Open and check the data of a run, or find the finished run that takes its place."""
        from trainkit.analysis import data_integrity
        from trainkit.training import plan

        runtime, recipe, request = self.runtime, run.recipe, run.request
        runtime.configure(recipe)
        with runtime.heartbeat():
            data = self.opened.pop(validation.data_key(recipe), None) or recipe.data.open(recipe.seed)
        run.data = data
        plan.divided(recipe, data, runtime.world)  # mistakes in it are said before a run is begun
        _, updates = plan.updates(recipe, data, runtime.world)
        runtime.choose_compile(recipe, updates)
        plan.evaluated(recipe, data)
        runtime.check_equal({name: split.digest for name, split in {"data": data.train, **data.evaluations}.items()})
        digest = loader.digest(recipe)
        run.key, run.program = run_key(digest, data.meta.digest), record.program(*request.plugins)

        def find() -> str | None:
            done = finished(request, self.store, recipe.name, digest, run.key, run.program)
            return done and str(done.path)

        # The runs of several are looked for above; one that needed other weights was another training.
        new = any(dependency.new for dependency in run.dependencies.values())
        if run.parent is None and not new and (done := runtime.on_main(find)) is not None:
            run.folder, run.ended = RunFolder(Path(done)), "FINISHED"
            if runtime.main:
                _say_done(run.folder, self.store)
            return None
        return data_integrity.ensure(recipe, data, runtime, self.store)

    def _open_folder(self, run: OpenRun) -> tuple[RunFolder, bool]:
        """Make or continue the folder of a run; return it, and whether it is continued."""
        request, recipe = run.request, run.recipe
        # What was interrupted may have been a run that this one needs, or an earlier fold; it has been finished by now.
        new = run.parent is not None or any(dependency.new for dependency in run.dependencies.values())

        def make() -> tuple[str, bool]:
            digest, begins = loader.digest(recipe), request.resume == "" and new
            if request.resume:
                run_lifecycle.refuse_other(self.store.find(request.resume, unfinished=True), recipe, request.plugins)
            try:
                text = loader.dump(recipe)
                folder, resuming = begin(request, self.store, recipe.name, recipe.seed, digest, text, begins)
            except UserError as error:
                if error.where == "--resume" and (other := self.store.newest_unfinished(recipe.name)) is not None:
                    run_lifecycle.refuse_other(other, recipe, request.plugins)
                raise
            write_aside(folder.path / META, json.dumps(asdict(run.data.meta), indent=1) + "\n")
            return str(folder.path), resuming

        path, resuming = self.runtime.on_main(make)
        run.folder = RunFolder(Path(path))
        if request is self.request:
            self.made = run.folder
        return run.folder, resuming

    def _logger(self, run: OpenRun, folder: RunFolder, resume: Resume) -> RunLogger:
        from trainkit.speed import cost
        from trainkit.training.plan import plan_line
        from trainkit.training.run_logger import RunLogger

        logger = RunLogger(
            run.recipe,
            folder,
            run.tracker,
            self.runtime.main,
            source=recipe_word(run.request.path),
            changed=lineage.note(folder),
            rates=cost.allotted(self.runtime),
            began=self.began,
            busy=self.busy if self.runtime.world == 1 else None,
            label=folder.name if run.parent is not None else "",
        )
        resumed = f"resumed from {resume.path.name}" if resume.path else ""
        if run.parent is None:
            logger.show([plan_line("Run", ", ".join(filter(None, (folder.name, resumed))))])
        elif resumed:  # of others the parent prints a row when they have ended
            logger.say(resumed)
        return logger

    @contextlib.contextmanager
    def _tracked(self, run: OpenRun, folder: RunFolder, resuming: bool) -> Iterator[Resume]:
        """Track a run, and say where it goes on; on an error end it as FAILED."""
        from trainkit.training.checkpointer import Resume

        runtime, stop = self.runtime, self.stop

        def unbegun() -> bool:
            # Of several processes the others look for its error in the folder.
            if runtime.world > 1 or resuming or (run.trainer is not None and run.trainer.begun):
                return False
            stop.last_words = ""  # nothing can be continued
            return True

        with ending(lambda: run.tracker, lambda: stop.told and runtime.world > 1, unbegun):
            try:
                path, decided = runtime.on_main(lambda: self._start_tracker(run, folder, resuming))
                yield Resume(Path(path) if path else None, decided, run.request.elastic)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                if isinstance(error, NotFinite) and stop.last_words and (run.parent or run.request is self.request):
                    stop.last_words += " train.nonfinite=skip"
                if not stop.told and not getattr(error, "told", False):
                    rank_failures.note(folder.path, runtime.rank, error)
                if (
                    rank_failures.lost(error)
                    and not stop.told
                    and (cause := rank_failures.first(folder.path, runtime)) is not None
                ):
                    raise cause from error
                raise

    def _start_tracker(self, run: OpenRun, folder: RunFolder, resuming: bool) -> tuple[str | None, list[Any]]:
        from trainkit.experiments.metric_selection import selected
        from trainkit.training.plan import evaluated, protocol_rules
        from trainkit.training.run_logger import RunLogger

        recipe, dependencies = run.recipe, run.dependencies.items()
        path, position, problems = _newest(folder) if resuming else (None, 0, [])
        died = post_mortem.cause_of_death(folder) if resuming else ""
        rank_failures.clear(folder.path)
        made_by = {
            f"trainkit.{name}": dependency.run.name for name, dependency in dependencies if dependency.run is not None
        }
        params = {**loader.flat(recipe), **{f"machine.{k}": v for k, v in self.runtime.describe().items()}}
        params["machine.compile"] = self.runtime.compile
        params |= {f"protocol.{name}": rule for name, rule in protocol_rules(evaluated(recipe, run.data)).items()}
        every = recipe.log.system_every.seconds if recipe.log.system_every else 0.0
        run.tracker = tracker = start_tracker(
            run.request, recipe, folder, self.store, resuming, params, made_by, run.parent,
            selected(recipe, evaluated(recipe, run.data)), every,
        )  # fmt: skip
        tracker.hurried = lambda: self.stop.told
        for _, dependency in dependencies:
            if dependency.new and dependency.run is not None:  # made for this run: MLflow shows it beneath
                tracker.adopt(dependency.run.name)
        decided = tracker.cut_back(position).decided if resuming else []
        RunLogger(recipe, folder, tracker, main=True).refused_checkpoints(problems)
        if died:
            print(visible(died), flush=True)
            tracker.event(0, "died", {"said": died})
            tracker.tags({"trainkit.died": died})
        self._track_inputs(run, folder, tracker)
        return path, decided

    def _track_inputs(self, run: OpenRun, folder: RunFolder, tracker: Tracker) -> None:
        """Keep the recipe, and name the data sets of a run, in MLflow."""
        from trainkit.training.plan import evaluated, protocol_rules

        recipe, request, data = run.recipe, run.request, run.data
        tracker.artifact_text("recipe/resolved.yaml", loader.dump(recipe))
        track_request(tracker, request)
        splits = evaluated(recipe, data)
        if rules := protocol_rules(splits):
            tracker.event(0, "protocols", rules)
        digests = {lineage.DATA: data.meta.digest, **lineage.digests(splits)}
        lineage.record(tracker, folder, self.store, request.path, digests, run.parent)
        sources = named_sets(recipe.data)
        tracker.dataset("train", "train", data.meta.digest, sources["train"], data.train.size)
        for split in {split.digest: split for split in splits.values()}.values():
            source = sources.get(split.name.partition(".")[0], "")
            tracker.dataset(split.name, "test", split.digest, source, split.size)

    def _report(self, run: OpenRun, folder: RunFolder, logger: RunLogger) -> None:
        """Draw, summarise, promote and end a run that was trained, on the first process."""
        from trainkit.analysis import baselines, promote, run_summary

        recipe, tracker, outcome, beside = run.recipe, run.tracker, run.outcome, None
        if outcome is None or run.trainer is None:
            raise RuntimeError(f"run {folder.name} was opened and not trained")
        status: Status = "FINISHED" if outcome.status == "FINISHED" else "KILLED"
        last = status == "FINISHED" and run.parent is None
        if status == "FINISHED":
            beside = baselines.compare(recipe, run.trainer, self.stop)
        if beside is not None:
            baselines.log(beside, outcome, logger)
        with contextlib.nullcontext() if status == "KILLED" else self.stop.at_once():
            run_summary.write(logger, outcome, self.stop.told, beside)
        # Before the end is said: a finished run is used in place of another by its key.
        folder.update(
            data_digest=run.data.meta.digest,
            key=run.key,
            program=run.program,
            directions=dict(metric_table.declared_by(recipe.task)),
        )
        if last:
            with contextlib.suppress(OSError):  # of a full disk; then a run that is killed from here on is over
                folder.leaving.touch()
        tracker.finish(status)
        with contextlib.suppress(UserError, OSError):  # nor does another job go on with it while it is promoted
            folder.claim()
        if run.parent is None:
            logger.show(run_summary.page(logger, outcome, beside))
        # Of runs that belong together, such as folds, none speaks for all.
        if recipe.promote and last:
            logger.say(promote.at_end(self.store, folder, recipe.promote))
        if isinstance(tracker, Tracker) and tracker.remains:
            logger.say(f"Not sent yet: {tracker.remains}")
        if run.parent is None and run.request is self.request:  # else a run that this one needs, which follows
            logger.show(run_summary.closing(logger, outcome, self.store))
        folder.leaving.unlink(missing_ok=True)
        folder.release()


def _with_recorded_precision(request: RunRequest, recipe: Recipe, children: Sequence[Recipe], store: Store) -> Recipe:
    """Return the recipe with the precision of the run that a request continues, where the recipe says `auto`."""
    if request.resume is None or recipe.train.precision != "auto":
        return recipe
    from trainkit.checkpoint import storage

    folders: list[RunFolder | None] = []
    with contextlib.suppress(UserError):  # said when the run is begun
        if request.resume and not children:
            folders = [store.find(request.resume, unfinished=True)]
        else:
            folders = [store.newest_unfinished(r.name, loader.digest(r)) for r in children or [recipe]]
    for path in (p for f in folders if f for p in sorted(f.checkpoints.glob("step-*"), reverse=True)):
        with contextlib.suppress(UserError):  # of a damaged one: the run goes on from the one before
            recorded = storage.state_of(path).get("machine", {}).get("precision", "auto")
            return replace(recipe, train=replace(recipe.train, precision=recorded))
    return recipe


def _say_done(folder: RunFolder, store: Store) -> None:
    """Name a run that had finished before, and send what it has left."""
    said = "has already finished (same recipe, data and program); to train again, leave out --resume-or-start"
    print(f"run {folder.name} {said}", flush=True)
    if folder.info().unsent:
        try:
            send_rest(folder, store)
        except UserError as error:
            print(f"Not sent yet: {without_secrets(str(error))}\nNext: trainkit sync {folder.name}", flush=True)


def _newest(folder: RunFolder) -> tuple[str | None, int, list[str]]:
    """Return the newest checkpoint of a run that verifies, its position in the journal, and why newer ones do not."""
    from trainkit.checkpoint import storage

    storage.clean(folder.checkpoints)
    path, problems = storage.newest_valid(folder.checkpoints)
    if path is None and problems:
        found = f"all of its checkpoints are damaged: {problems[0]}"
        raise UserError(str(folder.path), found, remedy="start a new run")
    if path is None:
        return None, 0, []
    state = storage.state_of(path)
    if state["identity"]["recipe"] != folder.info().recipe_hash:
        found = "belongs to another run: its recipe differs from the one that this run was started with"
        raise UserError(str(path), found, remedy="move it away; the run then continues from the checkpoint before")
    return str(path), state["journal"], problems
