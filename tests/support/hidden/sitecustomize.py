"""Hide parts of the operating system from trainkit in a Python process, as macOS and Windows lack them.

Python imports this file as it starts where its folder is in PYTHONPATH, and so do the processes it starts. HIDDEN names
the parts, with commas between them: modules (`fcntl`), attributes (`os.fork`), and the groups below.

They are missing for trainkit and for filelock. Other libraries ask which system this is, and take for granted what
Linux has: torch `register_at_fork`, psutil `resource`.
"""

from __future__ import annotations

import builtins
import importlib
import os
import signal
import sys
import types
from pathlib import Path

KEPT = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL", "SIG_IGN"}
"""Names of `signal` that Windows has, of those in capitals."""
GROUPS = {
    "groups": [f"os.{name}" for name in ("setsid", "killpg", "getpgrp", "getpgid", "setpgid", "getsid")],
    "calls": [f"os.{name}" for name in ("pread", "pwrite", "set_blocking", "sched_getaffinity", "statvfs", "sysconf")],
    "flags": [f"os.{name}" for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY", "O_CLOEXEC")],
    "users": [f"os.{name}" for name in ("getuid", "geteuid", "chown", "fchmod", "fchown")],
    "maps": [f"mmap.{name}" for name in ("MAP_SHARED", "MAP_POPULATE", "MAP_PRIVATE", "MADV_RANDOM", "PROT_READ")],
    "signals": [f"signal.{name}" for name in dir(signal) if name.isupper() and name not in KEPT]
    + [f"signal.{name}" for name in ("alarm", "setitimer", "pthread_sigmask", "pthread_kill", "sigwait", "pause")],
    "clocks": ["time.clock_gettime", "time.CLOCK_BOOTTIME"],
}
POSIX = [word for words in GROUPS.values() for word in words]
GROUPS["macos"] = ["os.memfd_create", "os.sched_getaffinity", "time.CLOCK_BOOTTIME", "mmap.MAP_POPULATE"]
GROUPS["windows"] = ["resource", "fcntl", "os.memfd_create", "os.fork", "os.register_at_fork", *POSIX]
for group in ("macos", "windows"):
    GROUPS[group] += ["ctypes.CDLL", "/proc", "spawn"]


def hide(words: list[str]) -> None:
    """Hide modules and attributes by their names."""
    hidden: dict[str, set[str]] = {}
    gone = set[str]()
    for word in words:
        module, _, name = word.partition(".")
        if word in ALONE:
            ALONE[word]()
        elif name:
            hidden.setdefault(module, set()).add(name)
        else:
            gone.add(module)
    less = {module: _without(importlib.import_module(module), names) for module, names in hidden.items()}
    imported = builtins.__import__

    def importing(name, globals=None, locals=None, fromlist=(), level=0):
        ours = ((globals or {}).get("__name__") or "").startswith(("trainkit", "filelock"))
        if ours and name in gone:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
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
    """Windows starts processes in one way."""
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
