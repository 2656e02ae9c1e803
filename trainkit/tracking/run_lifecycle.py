"""Begin and end a run: its folder, new or continued, and its status on every way out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from trainkit.config import loader
from trainkit.config.run_request import RunRequest
from trainkit.errors import UserError, of_disk
from trainkit.files import write_aside
from trainkit.redact import without_secrets
from trainkit.tracking import markdown, resume
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store

if TYPE_CHECKING:
    from trainkit.tracking.tracker import Silent, Tracker

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
        resume.keep(folder, request)
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
