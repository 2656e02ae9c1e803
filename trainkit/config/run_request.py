"""A request of the command line: a recipe, its changes, and how to begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit.config import loader
from trainkit.config.schema import Recipe
from trainkit.paths import shipped


@dataclass(frozen=True)
class RunRequest:
    """A request of the command line."""

    path: Path
    """The recipe's file; recipes it names are looked up from its folder."""
    overrides: Sequence[str] = ()
    plugins: Sequence[str] = ()
    resume: str | None = None
    """Name of a run to continue; empty: the newest unfinished one of this recipe; None: start a new one."""
    elastic: bool = False
    """Continue on another number of processes: every sample still counts once, but bits are no longer promised."""
    folds: bool = False
    """Train once for each part into which the data is divided, that part held out."""
    or_start: bool = False
    """Where `resume` is empty and there is nothing to continue, start a run."""
    seeds: int | None = None
    """Train once for each of so many seeds, from that of the recipe upwards."""
    sweep: bool = False
    """Train once for each of several settings; some of `overrides` then have several values."""
    settings: Path | None = None
    """File that is loaded in place of `path`: the resolved recipe of a run that is named alone."""


def load(request: RunRequest) -> Recipe:
    """Load the recipe of a request."""
    path, stored = request.settings or request.path, request.settings is not None
    trains = request.resume is not None
    return loader.load(path, list(request.overrides), tuple(request.plugins), stored, trains)


def values_of(text: str) -> list[str]:
    """Return the values that an override gives to its key: split at commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if letter == quote:
            quote = ""
        elif not quote and letter in "\"'":
            quote = letter
        elif not quote:
            depth += (letter in "[{") - (letter in "]}")
            if letter == "," and not depth:
                parts.append("")
                continue
        parts[-1] += letter
    return [part.strip() for part in parts]


def beside(recipe: Path, named: str) -> Path:
    """Return the file of a recipe named in a recipe: from that recipe's folder, else a shipped one of that name."""
    path = (recipe.parent / named).resolve()
    file = shipped("recipes") / named
    return file if not path.exists() and Path(named).name == named and file.is_file() else path
