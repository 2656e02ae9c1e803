"""Begin, continue and end a run: its folder, new or by its name alone, and its status on every way out.

`request.json` of a run's folder holds what its command said: the recipe's file, the words that changed it, the plug-ins
and, of several runs, what sets them apart. Plug-ins are code, and none is imported because a file names it: the command
that continues a run names them again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.config import diff, loader
from trainkit.config.diff import Change
from trainkit.config.run_request import RunRequest
from trainkit.config.schema import Recipe
from trainkit.errors import UserError, listing, of_disk
from trainkit.files import write_aside
from trainkit.redact import HIDDEN, is_secret_name, without_secrets
from trainkit.tracking import markdown
from trainkit.tracking.run_folder import RunFolder, without_waiting
from trainkit.tracking.store import Store

if TYPE_CHECKING:
    from trainkit.tracking.tracker import Silent, Tracker

REQUEST = "request.json"
PATIENCE = 120.0
"""Seconds for which a run that is to be continued waits for another process that uploads what it had left."""


def begin(
    request: RunRequest, store: Store, name: str, seed: int, recipe_hash: str, text: str, begins: bool
) -> tuple[RunFolder, bool]:
    """Return the folder of the run that a request starts or continues, claimed, and True where it is continued.

    `name` and `recipe_hash` are what the run is found by, `text` its recipe. `begins`: where --resume finds nothing to
    continue, one is started, as with --resume-or-start. Raises UserError when there is nothing to continue, or it is
    finished.
    """
    folder = None
    if request.resume is not None:
        named = request.resume and store.find(request.resume, unfinished=True)
        folder = named or store.newest_unfinished(name, recipe_hash)
    away = store.elsewhere(name, recipe_hash) if folder is None and request.resume is not None else ""
    if folder is None and (begins or request.or_start or request.resume is None):
        if away:
            print(away, flush=True)
        folder = store.new_run(name, seed, recipe_hash)
        write_aside(folder.recipe, text)
        keep(folder, request)
        return folder, False
    if folder is None:
        other = store.newest_unfinished(name)
        found = f"no unfinished run of {name} with these settings"
        nearest = f"; {away}" if away else f"; {other.name} had others" if other else ""
        raise UserError("--resume", found + nearest, remedy="leave --resume out to start one")
    if folder.info().status == "FINISHED" and not folder.leaving.exists():
        raise UserError(f"run {folder.name}", "is finished", remedy="leave --resume out to start a new one")
    folder.claim(PATIENCE)
    return folder, True


def keep(folder: RunFolder, request: RunRequest) -> None:
    """Write the request of a new run to its folder. Raises OSError."""
    said = {
        "recipe": str(request.path.absolute()),
        "overrides": list(request.overrides),
        "plugins": list(request.plugins),
        "folds": request.folds,
        "seeds": request.seeds,
        "sweep": request.sweep,
    }
    write_aside(folder.path / REQUEST, json.dumps(said, indent=1) + "\n")


def request_of(
    folder: RunFolder, words: Sequence[str] = (), plugins: Sequence[str] = (), elastic: bool = False
) -> RunRequest:
    """Return the request that continues a run: its own recipe as it was resolved, and further words that change it.

    `plugins`: those that the command names. Raises UserError where the run began with others, and where what it began
    with is not known.
    """
    found = _read(folder)
    if lacking := [name for name in found.plugins if name not in plugins]:
        said = " ".join(f"--plugin {name}" for name in lacking)
        raise UserError(f"run {folder.name}", f"began with {said}", remedy=f"add {said}; code is not imported unasked")
    path = found.path if found.path.is_file() else folder.recipe
    again = {word.partition("=")[0] for word in words}
    kept = [word for word in found.overrides if word.partition("=")[0] not in again]
    return replace(
        found,
        path=path,
        overrides=(*kept, *words),
        plugins=tuple(plugins),
        resume=folder.name,
        elastic=elastic,
        settings=folder.recipe,
    )


def kept(folder: RunFolder) -> RunRequest:
    """Return the request that began a run, as far as it is known."""
    try:
        return _read(folder)
    except UserError:
        return RunRequest(folder.recipe)


def _read(folder: RunFolder) -> RunRequest:
    file = folder.path / REQUEST
    try:
        with open(file, "rb", buffering=0, opener=without_waiting) as source:
            said = json.loads(source.read())
        sweep = said["sweep"]
        request = RunRequest(
            Path(said["recipe"]),
            tuple(said["overrides"]),
            tuple(said["plugins"]),
            folds=bool(said["folds"]),
            seeds=said["seeds"],
            sweep=bool(sweep),
        )
        if not all(isinstance(word, str) for word in (*request.overrides, *request.plugins)):
            raise TypeError("an argument is not text")
        if not isinstance(request.seeds, int | None):
            raise TypeError("a number is missing")
        if isinstance(sweep, dict) and any(sweep.values()):  # as versions before 0.2 wrote it
            raise TypeError("Optuna proposed its settings, which trainkit no longer does")
    except FileNotFoundError:
        return RunRequest(folder.recipe)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        found = f"cannot be read: {error}"
        raise UserError(str(file), found, remedy="give the recipe and its words too") from None
    return request


def refuse_other(folder: RunFolder, recipe: Recipe, plugins: Sequence[str]) -> None:
    """Raise UserError, with the keys that differ, where a recipe is not the one that a run began with."""
    if folder.info().recipe_hash == loader.digest(recipe):
        return
    changes = differing(folder, recipe, plugins)
    if not changes:
        loader.load(folder.recipe, (), tuple(plugins), stored=True, trains=True)  # refuses keys that are no more
        found = "its recipe.yaml is not the one that it began with"
        raise UserError(f"run {folder.name}", found, remedy="start a new run")
    remedy = f"--resume {folder.name} alone takes its own; the run's value -> the one given:"
    raise UserError(f"run {folder.name}", "began with another recipe", remedy=remedy + listing(diff.lines(changes)))


def differing(folder: RunFolder, recipe: Recipe, plugins: Sequence[str]) -> list[Change]:
    """List the changes that make the recipe of a run another one, but for keys that may differ when it is continued.

    Raises UserError where the recipe of the run cannot be read.
    """
    own = loader.load(folder.recipe, (), tuple(plugins), stored=True)
    keys = [change.key for change in diff.diff(loader.hashed(own), loader.hashed(recipe))]
    every = diff.diff(loader.tree(own), loader.tree(recipe))
    found = [one for one in every if any(_within(one.key, key) or _within(key, one.key) for key in keys)]
    return [replace(one, before=HIDDEN, after=HIDDEN) if is_secret_name(one.key) else one for one in found]


def _within(key: str, block: str) -> bool:
    return f"{key}.".startswith(f"{block}.")


def command(name: str, plugins: Sequence[str]) -> str:
    """Return the command that continues a run: `trainkit run --resume NAME`; under a launcher, with its name."""
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ or "WORLD_SIZE" in os.environ
    program = "accelerate launch ... trainkit/run.py" if launched else "trainkit run"
    return f"{program} {shlex.join(['--resume', name, *(word for one in plugins for word in ('--plugin', one))])}"


def finished(
    request: RunRequest, store: Store, name: str, recipe_hash: str, key: str, program: Mapping[str, str]
) -> RunFolder | None:
    """Return the finished run that --resume-or-start finds where there is nothing to continue.

    A job that is started again once its training is over, since its machine or a later command failed, does not train
    twice. None for a request without that option.
    """
    if not request.or_start or store.newest_unfinished(name, recipe_hash) is not None:
        return None
    return store.finished_with(key, program)


def about(request: RunRequest) -> str:
    """Return the header of a recipe in Markdown, for the page of its experiment."""
    # Hidden here: what is told of a run may wait in its folder until a store answers.
    said = without_secrets(loader.header(request.path).replace("# ", "").replace("#", ""))
    return "".join(f"{markdown.plain(line)}\n" for line in said.splitlines())


@contextlib.contextmanager
def ending(
    tracker: Callable[[], Tracker | Silent],
    told: Callable[[], bool] = lambda: False,
    unbegun: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Return a context that ends the tracked run with the status of what happens within.

    `told` returns True after a stop signal: errors after it, except UserError, come from other processes that got it
    too. Errors of a full or failing disk become UserErrors. `unbegun` returns True for a new run before its first step:
    nothing is left of one that ends with a UserError.
    """
    try:
        yield
    except KeyboardInterrupt:
        tracker().finish("KILLED")
        raise
    except BaseException as error:
        disk = getattr(getattr(tracker(), "folder", None), "path", "")
        said = of_disk(error, disk) if isinstance(error, OSError) else error if isinstance(error, UserError) else None
        if told() and said is None:
            tracker().finish("KILLED")
            raise
        if said is not None and unbegun():
            tracker().discard()
        else:
            tracker().finish("FAILED", str(said) if said is not None else error)
        if said is not None and said is not error:
            raise said from error
        raise
