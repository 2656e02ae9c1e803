"""Continue a run by its name alone: keep the request that began it, make it again, and name the command that does.

`request.json` of a run's folder holds what its command said: the recipe's file, the words that changed it, the plug-ins
and, of several runs, what sets them apart. Plug-ins are code, and none is imported because a file names it: the command
that continues a run names them again.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainkit.config import diff, loader
from trainkit.config.diff import Change
from trainkit.config.run_request import RunRequest
from trainkit.config.schema import Recipe
from trainkit.environment import process
from trainkit.errors import UserError, listing
from trainkit.files import write_aside
from trainkit.paths import recipe_word
from trainkit.redact import HIDDEN, is_secret_name
from trainkit.tracking.run_folder import MEMBERS, RunFolder, without_waiting

FILE = "request.json"
_VERBS = ("run", "train", "repeat", "sweep")
_PROGRAMS = ("trainkit", "run.py", "trainkit.run")


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
    write_aside(folder.path / FILE, json.dumps(said, indent=1) + "\n")


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
    file = folder.path / FILE
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
        if (folder.path / MEMBERS).is_file():
            found = "was started by an older trainkit, which stored no request for several runs"
            raise UserError(f"run {folder.name}", found, remedy="give its recipe and options too") from None
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
    """Return the command that continues a run, beginning as this process was begun: `trainkit run --resume NAME`."""
    words = [word for plugin in plugins for word in ("--plugin", plugin)]
    return shlex.join([*_program(), "--resume", name, *words])


def same_command(request: RunRequest, resume: bool) -> str:
    """Return the command of this process once more; `resume`: with --resume."""
    program, given = _program(), sys.argv[1:]
    if program[-1] in _VERBS:  # of a command with verbs it is among the words
        given = given[1:] if given[:1] and given[0] in _VERBS else []
        program = [*program[:-1], sys.argv[1] if given else program[-1]]
    if not given:
        plugins = [word for plugin in request.plugins for word in ("--plugin", plugin)]
        given = [recipe_word(request.path), *request.overrides, *plugins]
    again = ["--resume"] if resume and not {"--resume", "--resume-or-start"} & set(given) else []
    return shlex.join([*program, *given, *again])


def _program() -> list[str]:
    """Return the words before the recipe, of `run.py` or `trainkit run`, with those of the launcher."""
    words = process.program_words()
    if not words or Path(words[-1]).name not in _PROGRAMS:  # a notebook, a test
        return ["trainkit", "run"]
    return [*words, *(["run"] if Path(words[-1]).name == "trainkit" else [])]
