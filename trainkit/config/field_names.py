"""Advice for names of other trainers: the override to write instead of an unknown key or option."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from trainkit.config.field_name_table import FIELD_NAMES, FieldName

__all__ = ["FIELD_NAMES", "FieldName", "advise", "find", "of_options", "quoted"]

BY_NAME: dict[str, FieldName] = {entry.name: entry for entry in FIELD_NAMES}


def find(name: str) -> FieldName | None:
    """Return the entry of a name, written with dashes or underscores, in any case; None where there is none."""
    return BY_NAME.get(name.lstrip("-").replace("-", "_").lower())


def quoted(key: str, value: str) -> str:
    """Return an override as it is typed in a shell."""
    return f"{key}={value}" if re.fullmatch(r"[\w.:/@%+-]+", value) else f'{key}="{value}"'


def said_of(entry: FieldName) -> str:
    """Say what stands for a name where no value can be written."""
    ours = entry.ours[0] if entry.ours else ""
    sentences = [entry.note] if entry.note else []
    if not ours:
        sentences.insert(0, "trainkit has no such setting")
    elif ours.startswith("--"):
        sentences.insert(0, f"use the option {ours}")
    elif not entry.is_key:
        sentences.insert(0, f"use the environment variable {ours}")
    else:
        sentences.insert(0, f"trainkit's key is {ours}")
    return "; ".join(sentences)


def advise(
    name: str, value: str | None, has: Callable[[str], bool], tree: Any, around: str, siblings: Sequence[str]
) -> tuple[str, str, str] | None:
    """Return the key to write instead of an unknown one, its value where it converts, and a note; None if unknown.

    `around` is the dotted path of the block with the unknown key, and `siblings` are that block's keys. `value` is the
    text of the value. The key is empty where trainkit has none, and the note then says what to do.
    """
    entry = find(name)
    if entry is None:
        return None
    here = next((last for key in entry.ours if entry.is_key and (last := key.rpartition(".")[2]) in siblings), "")
    filled = [_with_evaluation(key, tree) for key in entry.ours]
    if here and around:  # the block itself has that key
        key = f"{around}.{here}"
    else:
        key = next((key for key in filled if entry.is_key and has(key)), "")
    if not key and entry.is_key:
        return "", "", f"{said_of(entry)}, which this recipe does not have"
    if not key:
        return "", "", said_of(entry)
    converted = entry.convert(value) if value is not None else None
    if key == "stop_when.patience" and converted and not tree.get("stop_when"):
        best = tree.get("best")
        metric = best.get("metric") if isinstance(best, dict) else None
        key, converted = "stop_when", f"{{metric: {metric or 'EVALUATION/METRIC'}, patience: {converted}}}"
    return key, converted or "", entry.note if key in filled or key == "stop_when" else ""


def _with_evaluation(key: str, tree: Any) -> str:
    """Return a key with the name of the recipe's first evaluation in it."""
    evaluations = tree.get("evaluations") if isinstance(tree, dict) else None
    first = next(iter(evaluations), "NAME") if isinstance(evaluations, dict) else "NAME"
    return key.replace("NAME", str(first))


def of_options(argv: Sequence[str], known: Collection[str]) -> str:
    """Return the advice for options of other tools in a command line; empty where there are none.

    `known` are the options that the command has. One option makes a clause, several make a list of lines.
    """
    found: list[tuple[str, str]] = []
    for n, word in enumerate(argv):
        option, equals, value = word.partition("=")
        entry = find(option) if option.startswith("-") and option not in known else None
        if entry is None or option.startswith("--") != (len(entry.name) > 1):
            continue
        after = argv[n + 1] if n + 1 < len(argv) else "-"
        if not equals and not after.startswith("-") and "=" not in after:
            value = after
        if not equals and entry.is_flag and entry.convert(value) is None:
            value = ""  # what follows a flag is another argument
        converted = entry.convert(value) if value or entry.is_flag else None
        if converted is not None and entry.is_key:
            note = f" ({entry.note})" if entry.note else ""
            found.append((option, f"write {quoted(entry.ours[0], converted)}{note}"))
        else:
            found.append((option, said_of(entry)))
    if len(found) == 1:
        return f"No such option '{found[0][0]}'; {found[0][1]}"
    lines = "".join(f"\n  {option}: {advice}" for option, advice in found)
    return f"No such options; change the recipe with KEY=VALUE instead{lines}" if found else ""
