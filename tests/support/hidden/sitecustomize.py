"""Hide parts of the operating system from trainkit in a Python process, as macOS lacks them.

Python imports this file as it starts where its folder is in PYTHONPATH, and so do the processes it starts. HIDDEN names
the parts, with commas between them: attributes (`os.fork`), and the group below.

They are missing for trainkit alone: other libraries ask which system this is, and take for granted what Linux has.
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
import types
from pathlib import Path

_LACKING = ["os.memfd_create", "os.sched_getaffinity", "time.CLOCK_BOOTTIME", "mmap.MAP_POPULATE", "ctypes.CDLL"]
GROUPS = {"macos": [*_LACKING, "/proc", "spawn"]}


def hide(words: list[str]) -> None:
    """Hide modules and attributes by their names."""
    hidden: dict[str, set[str]] = {}
    for word in words:
        module, _, name = word.partition(".")
        if word in ALONE:
            ALONE[word]()
        else:
            hidden.setdefault(module, set()).add(name)
    less = {module: _without(importlib.import_module(module), names) for module, names in hidden.items()}
    imported = builtins.__import__

    def importing(name, globals=None, locals=None, fromlist=(), level=0):
        ours = ((globals or {}).get("__name__") or "").startswith("trainkit")
        return less[name] if ours and name in less else imported(name, globals, locals, fromlist, level)

    builtins.__import__ = importing


def _without(module: types.ModuleType, names: set[str]) -> types.ModuleType:
    out = types.ModuleType(module.__name__)
    out.__dict__.update((name, value) for name, value in vars(module).items() if name not in names)
    return out


def _hide_proc() -> None:
    read_text = Path.read_text

    def reading(self, *rest, **more):
        ours = sys._getframe(1).f_globals.get("__name__", "").startswith("trainkit")
        if ours and self.is_relative_to("/proc"):
            raise FileNotFoundError(2, "No such file or directory", str(self))
        return read_text(self, *rest, **more)

    Path.read_text = reading


def _named(words: str) -> list[str]:
    return [one for word in words.split(",") for one in GROUPS.get(word, [word])]


def _spawn_alone() -> None:
    """Start processes in one way."""
    from multiprocessing import context

    for name in ("fork", "forkserver"):
        context._concrete_contexts.pop(name, None)
    context._default_context.set_start_method("spawn", force=True)
    context.DefaultContext.get_all_start_methods = lambda self: ["spawn"]
    import multiprocessing

    multiprocessing.get_all_start_methods = lambda: ["spawn"]


ALONE = {"spawn": _spawn_alone, "/proc": _hide_proc}

HIDDEN = ""
"""What is hidden in this process."""

if os.environ.get("HIDDEN"):
    hide(_named(os.environ["HIDDEN"]))
    HIDDEN = os.environ["HIDDEN"]
