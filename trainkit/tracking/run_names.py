"""Find runs by what people call them: a whole name, a short one, a beginning, an MLflow id, or a word.

    convnext, convnext-s0       the last finished run of this name, with or without its seed
    convnext-s0-1121            the run whose name begins so
    last                        the newest training, however it ended, or going on
    last finished               the newest training that finished; also last-finished
    best, best:convnext         of an experiment, or of a recipe: `Store.find`

For `--resume` the same words stand for runs that have not finished. The words come first: a run of a recipe that is
called `last` is named with its seed, `last-s0`.
"""

from __future__ import annotations

import difflib
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from trainkit.errors import UserError, listing
from trainkit.tracking.run_folder import META, RunFolder, RunInfo

Known = Sequence[tuple[RunInfo, RunFolder]]
"""Runs of a store, oldest first."""

BEST = "best"
_LAST, _LAST_FINISHED = "last", ("last finished", "last-finished")
_NAME = re.compile(r"(.+)(-s-?\d+)-\d{4}-\d{4}-[0-9a-f]{4}")
"""Name of a run: that of its recipe, its seed, then month and day, hour and minute, and four digits."""
_UNTITLED = ("name", "seed", "log.experiment")
"""Keys that a run's own name has, or that say nothing of the training."""
_TITLE_CHARS = 48
_SHOWN = 5
"""Candidates that are listed."""


def is_path(word: str) -> bool:
    """Return True for a word that is written as a path: with a slash, or a dot at its beginning."""
    return "/" in word or word.startswith(".")


def best_of(word: str) -> str | None:
    """Return the recipe of `best:RECIPE`, empty for `best`; None for another word."""
    head, colon, recipe = word.partition(":")
    return recipe if head == BEST and (recipe or not colon) else None


def finished(known: Known, word: str, runs: Path, recipe: str = "") -> list[tuple[RunInfo, RunFolder]]:
    """Return trainings, of a recipe where one is given, that finished, oldest first.

    Raises UserError, about a run `word`, where there is none.
    """
    # A run above others, and one that evaluates, has no key: none could be used in its place.
    every = [entry for entry in known if entry[0].status == "FINISHED" and entry[0].key]
    found = [entry for entry in every if recipe in ("", entry[0].recipe)]
    if not found:
        near = difflib.get_close_matches(recipe, {info.recipe for info, _ in every}, n=3, cutoff=0.4)
        remedy = f"the nearest recipes are {', '.join(near)}" if near else "train one first"
        raise UserError(f"run {word!r}", f"no run{recipe and f' of {recipe}'} in {runs} has finished", remedy=remedy)
    return found


def choose(known: Known, word: str, runs: Path, unfinished: bool = False) -> RunFolder:
    """Return the run that a word stands for, of those in the folder `runs`; `unfinished`: one to be continued.

    Raises UserError, with the candidates of an ambiguous word, else with the names nearest to it.
    """
    if word == _LAST:
        return _last_to_resume(known, word, runs) if unfinished else _last(known, word, runs)
    if word in _LAST_FINISHED:
        return finished(known, word, runs)[-1][1]
    matches, named = [entry for entry in known if word and entry[0].run_id == word], []
    if not matches and word:
        named = [entry for entry in known if word in _short(entry[1].name)]
        if (found := (_to_resume if unfinished else _finished_last)(named)) is not None:
            return found
        matches = named or [entry for entry in known if entry[1].name.startswith(word)]
    if len(matches) > 1:
        matches = [entry for entry in matches if not entry[1].ended_unbegun()] or matches
    if len(matches) == 1:
        return matches[0][1]
    if matches:
        found = f"{len(matches)} runs begin so" + (", none of them finished" if named else "")
        lines = [described(*entry) for entry in matches[: -_SHOWN - 1 : -1]]
        lines += [f"and {len(matches) - _SHOWN} older ones"] if len(matches) > _SHOWN else []
        raise UserError(f"run {word!r}", found, remedy=f"name one of them, the newest first:{listing(lines)}")
    names = [folder.name for _, folder in known]
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.4) or names[-3:]
    remedy = f"the nearest are {', '.join(near)}" if near else "there are no runs yet"
    raise UserError(f"run {word!r}", f"not in {runs}", remedy=remedy)


def title(name: str, overrides: Sequence[str]) -> str:
    """Return the name of a run in MLflow: what its command has changed, then its own: `lr=0.006 · convnext-s0-...`.

    Names then differ where the run table shows them. The last override comes first, as the one that was added last. A
    key is written as its last part, where that is enough.
    """
    pairs = [(key.strip(), value.strip()) for key, is_, value in (word.partition("=") for word in overrides) if is_]
    pairs = [(key, value) for key, value in reversed(dict(pairs).items()) if key not in _UNTITLED]
    last = Counter(key.rpartition(".")[2] for key, _ in pairs)
    shown = []
    for key, value in pairs:
        short = key.rpartition(".")[2]
        shown.append(f"{short if last[short] == 1 else key}={value}")
    text = " ".join(_fitting(shown))
    return f"{text} · {name}" if text else name


def _fitting(words: Sequence[str]) -> list[str]:
    """Return as many words as the run table has room for, the last of them cut; `+2` stands for two more."""
    kept: list[str] = []
    for place, word in enumerate(words):
        room = _TITLE_CHARS - sum(map(len, kept))
        if room < len(word) and kept:
            return [*kept, f"+{len(words) - place}"]
        kept.append(word if len(word) <= room else f"{word[: room - 1]}…")
    return kept


def described(info: RunInfo, folder: RunFolder) -> str:
    """Return a line about a run: its name, how it ended, and when it began."""
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(info.started))
    return "  ".join((folder.name, info.status.lower(), began))


def _short(name: str) -> tuple[str, ...]:
    """Return the short names of a run: that of its recipe, and that with its seed."""
    parts = _NAME.fullmatch(name)
    return (parts[1], parts[1] + parts[2]) if parts else ()


def _last(known: Known, word: str, runs: Path) -> RunFolder:
    """Return the newest training. Evaluations, and runs above others, are none, nor is what ended before a step."""
    for info, folder in reversed(known):
        if info.evaluates is None and (folder.path / META).is_file() and not folder.ended_unbegun():
            return folder
    raise UserError(f"run {word!r}", f"no run in {runs} has begun to train", remedy="train one first")


def _last_to_resume(known: Known, word: str, runs: Path) -> RunFolder:
    """Return the newest run that can be continued; the one above where it has one."""
    above = [entry for entry in known if entry[0].evaluates is None and entry[0].parent is None]
    if (found := _to_resume(above)) is None:
        raise UserError(f"run {word!r}", f"no run in {runs} is unfinished", remedy="leave --resume out to start one")
    return found


def _to_resume(known: Known) -> RunFolder | None:
    """Return the newest of some runs that has not finished and is not being trained now; None without one."""
    for info, folder in reversed(known):
        if (info.status != "FINISHED" or folder.leaving.exists()) and not folder.trains():
            return folder
    return None


def _finished_last(known: Known) -> RunFolder | None:
    """Return the newest of some runs that finished; None without one."""
    return next((folder for info, folder in reversed(known) if info.status == "FINISHED"), None)
