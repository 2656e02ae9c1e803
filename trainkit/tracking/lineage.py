"""Find the run that a run follows, and record the differences.

A run follows the one whose recipe was copied (`trainkit cp RUN`), or its parent run, as a fold does, or else the last
one of its experiment that has finished. The differences lie in `changes.txt` of its folder, among its artifacts, and at
the head of its page; keys that a parent run varies have `(several)` values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.config import diff, loader
from trainkit.errors import UserError, visible
from trainkit.files import write_aside
from trainkit.interfaces import IdentifiesContent, Split
from trainkit.redact import HIDDEN, is_secret_name
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store

if TYPE_CHECKING:
    from trainkit.tracking.tracker import Silent, Tracker

FILE = "changes.txt"
DATA = "trainkit.data"
"""Tag of the digest of the training data; with a dot and its name, that of an evaluation's."""
CONTENT = "trainkit.content"
"""With a dot and its name, the tag of the digest of what an evaluation holds, however it is prepared."""

_COPIED = re.compile(r"^# Copied from run ([\w-]+)", re.MULTILINE)
_HEAD = 30
"""Lines at the head of a page."""


def record(
    tracker: Tracker | Silent,
    folder: RunFolder,
    store: Store,
    recipe: Path,
    digests: Mapping[str, str],
    above: str | None = None,
) -> None:
    """Write the run that a run follows, and the differences, to its folder, tags and artifacts.

    `recipe` is the file that it was started with, `digests` those of its data by tag, `above` the name of its parent
    run. A run that is continued keeps what was found when it began.
    """
    file = folder.path / FILE
    if not file.exists():
        before, name, how = _followed(folder, store, recipe, above)
        folder.update(follows=name)
        if before is not None:
            how += "\n\n" + _differences(before, folder)
        write_aside(file, f"{how}\n")
    info = folder.info()
    tags: dict[str, Any] = {"trainkit.recipe_hash": info.recipe_hash, **digests}
    if "seed" not in info.varies:
        tags["trainkit.seed"] = info.seed
    if info.follows:
        tags["trainkit.parent"] = info.follows
    tracker.tags({**tags, "mlflow.note.content": note(folder)})
    tracker.artifact_text(f"recipe/{FILE}", read(folder))


def digests(splits: Mapping[str, Split]) -> dict[str, str]:
    """Return digests of evaluations by tag: of the prepared data, and where it is known of the content."""
    found = {f"{DATA}.{name}": split.digest for name, split in splits.items()}
    for name, split in splits.items():
        if isinstance(split, IdentifiesContent) and split.content is not None:
            found[f"{CONTENT}.{name}"] = split.content
    return found


def read(folder: RunFolder) -> str:
    """Return the run that a run follows and the differences, in lines; empty where that is not known."""
    file = folder.path / FILE
    return file.read_text(encoding="utf-8") if file.exists() else ""


def note(folder: RunFolder) -> str:
    """Return the first of these lines in Markdown, for the head of a page."""
    lines = read(folder).splitlines()
    more = [f"and {len(lines) - _HEAD} more lines in recipe/{FILE}"] if len(lines) > _HEAD else []
    return as_it_stands([*lines[:_HEAD], *more])


def as_it_stands(lines: Sequence[str]) -> str:
    """Indent lines, so that Markdown shows them unchanged."""
    return "".join(f"    {visible(line)}\n" for line in lines) + ("\n" if lines else "")


def _followed(
    folder: RunFolder, store: Store, recipe: Path, above: str | None
) -> tuple[RunFolder | None, str | None, str]:
    """Return the run that another one follows, where this store has it; its name, if any; and the reason as text."""
    info = folder.info()
    if above is not None:
        try:
            run = store.find(above)
        except UserError:
            return None, None, f"child run of the MLflow run {above}"
        return run, run.name, f"child run of {run.name}"
    if copied := _COPIED.search(loader.header(recipe)):
        run = RunFolder(store.home / "runs" / copied[1])
        if run.recipe.is_file():
            return run, run.name, f"compared with {run.name}, from which its recipe was copied"
        return None, run.name, f"copied from {run.name}, which is not in this store"
    last = store.newest_finished(info.experiment or "", info.started)
    if last is None:
        return None, None, f"nothing to compare with: no run of experiment {info.experiment} had finished before"
    return last, last.name, f"compared with {last.name}, the last finished run"


def _differences(before: RunFolder, after: RunFolder) -> str:
    """List the keys in which the recipes of two runs differ; `trainkit compare` shows data, versions and hardware."""
    found = diff.diff(*(diff.varied(diff.read(run.recipe), _varies(run)) for run in (before, after)))
    shown = [replace(one, before=HIDDEN, after=HIDDEN) if is_secret_name(one.key) else one for one in found]
    return "\n".join(diff.lines(shown) or ["the recipe is the same"])


def _varies(run: RunFolder) -> Sequence[str]:
    try:
        return run.info().varies
    except UserError:  # its record is damaged
        return ()
