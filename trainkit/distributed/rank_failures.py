"""Find the process of a run that failed first: each writes its error to a file in the run's folder.

A process that fails takes the others with it: they see a broken connection, which says nothing. So each reads what the
others wrote, and looks for processes that have ended, before it reports why it ended. Where no process was left to
report, the next start does: a run with such a file has failed, one without was killed.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.errors import UserError
from trainkit.files import write_aside
from trainkit.redact import without_secrets

if TYPE_CHECKING:
    from trainkit.distributed.runtime import Runtime

_WAIT_SECONDS = 2.0
"""A process that fails writes its file at once; one that was killed is gone from the system's list a moment later."""
_LOST = ("gloo", "nccl", "connection closed by peer", "connection reset", "timed out waiting", "broken pipe")
"""Words in errors that come from another process having ended, or not answering."""
_NOTES, _STACKS = "error-process-*.json", "stacks-process-*.txt"


def stacks(folder: Path, rank: int) -> Path:
    """Return the file for the stacks of all threads of a process that hung."""
    return folder / f"stacks-process-{rank}.txt"


def _note(folder: Path, rank: int) -> Path:
    return folder / f"error-process-{rank}.json"


def clear(folder: Path) -> None:
    """Delete the files of all processes: the run continues."""
    for path in (*folder.glob(_NOTES), *folder.glob(_STACKS)):
        path.unlink(missing_ok=True)


def note(folder: Path, rank: int, error: BaseException | str) -> None:
    """Write the error that ended this process to its file."""
    words = without_secrets(error if isinstance(error, str) else f"{type(error).__name__}: {error}")
    said: dict[str, Any] = {"at": time.time(), "words": words, "lost": lost(error)}
    if isinstance(error, UserError):
        said["mistake"] = [error.where, error.found, error.expected, error.remedy]
    with contextlib.suppress(OSError, UserError):  # the folder may be gone
        write_aside(_note(folder, rank), json.dumps(said))


def lost(error: BaseException | str) -> bool:
    """Return True for an error that only says that another process has ended, or does not answer."""
    if not isinstance(error, RuntimeError | ConnectionError):
        return False
    return type(error).__name__.startswith("Dist") or any(words in str(error).lower() for words in _LOST)


def first(folder: Path, runtime: Runtime) -> Exception | None:
    """Return the error that ended another process, and so this one; None where none wrote one or is gone."""
    others = [rank for rank in range(runtime.world) if rank != runtime.rank]
    end = time.monotonic() + _WAIT_SECONDS
    while others:
        told = {rank: said for rank in others if (said := _read(_note(folder, rank))) and not said["lost"]}
        if told:
            rank = min(told, key=lambda rank: told[rank]["at"])
            if mistake := told[rank].get("mistake"):
                error = UserError(*mistake)
                error.told = True
                return error
            return RuntimeError(f"rank {rank} failed first: {told[rank]['words']}")
        over = time.monotonic() > end
        # One that is gone may have written its error as it went.
        if over and (gone := [rank for rank in others if runtime.gone(rank)]):
            return RuntimeError(f"rank {gone[0]} ended without an error message: it was killed or exited early")
        if over:
            break
        time.sleep(0.1)
    return None


def left(folder: Path) -> str:
    """Return the error that ended a run still marked as running, as text; empty where it was killed."""
    found = [(path, said) for path in sorted(folder.glob(_NOTES)) if (said := _read(path))]
    if found:
        path, said = min(found, key=lambda entry: (entry[1]["lost"], entry[1]["at"]))
        return f"rank {path.stem.rpartition('-')[2]}: {said['words']}"
    for path in sorted(folder.glob(_STACKS)):
        with contextlib.suppress(OSError):
            if path.stat().st_size:
                return f"rank {path.stem.rpartition('-')[2]} hung; its stacks are in {path.name}"
    return ""


def _read(path: Path) -> dict[str, Any] | None:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        return {"at": float(said["at"]), "words": str(said["words"]), "lost": bool(said["lost"])} | {
            "mistake": said.get("mistake")
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None
