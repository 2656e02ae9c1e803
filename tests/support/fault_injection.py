"""Faults, injected into a run that is otherwise the real one: at the n-th call of a function, or at an import.

A plan is a list of faults, each a dictionary:

    {"at": "os.fsync", "call": 3, "do": "kill"}

| key     | says                                                                                                   |
|---------|--------------------------------------------------------------------------------------------------------|
| `at`    | the function by module and name, `trainkit.checkpoint.storage.prune`, `trainkit.rng.number`; `import`,  |
|         | a module being looked for; or a list of these, whose calls are counted together                          |
| `call`  | at which call, the first being 1; left out: at every one                                                 |
| `until` | the last call at which it is done, of faults that are to last                                            |
| `to`    | only calls one of whose arguments has this in its text, such as a part of a path                         |
| `rank`  | only in the process of this rank                                                                         |
| `thread`| only in threads whose name has this in it: `MainThread`, `trainkit-checkpoint`, `trainkit-uploader`        |
| `do`    | see below                                                                                                |
| `after` | true: when the call has returned, and not in its place                                                   |
| `name`  | anything, to find the fault again in the notes                                                           |

| `do`                    | then the process                                              |
|-------------------------|---------------------------------------------------------------|
| `kill`, `stop`          | gets SIGKILL, SIGSTOP                                         |
| `signal 15`             | gets that signal                                              |
| `exit 3`                | leaves at once with that code                                 |
| `OSError 28`            | has that error raised                                         |
| `MemoryError`           | the same                                                      |
| `RuntimeError some text`| the same                                                      |
| `sleep 60`              | waits so many seconds, while other threads go on              |
| `spin 60`               | waits holding the interpreter, so that no other thread goes on|
| `skip`                  | leaves the call out; it returns None                          |
| `note`                  | does nothing: the calls are counted                           |

Give a plan to a fork of the fork server, `runs.start(1, *words, plan=[...])`; to a process of its own,
`python tests/support/fault_injection.py RECIPE ...` (as the script of `accelerate launch` or `torchrun` in place of
`trainkit/run.py`), in the variable FAULTS; or to this process, `with fault_injection.installed([...]):`. A function is
wrapped where `at` says: what another module took by `from ... import` has to be named there.

In front of each fault a line is added to the file that FAULT_NOTES names: rank, process id, `at`, call, `do`,
`name`.
`struck` reads it, and a trial should ask it: a fault that never struck shows nothing. With `note`, counts are written
as the interpreter ends.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLAN, NOTES = "FAULTS", "FAULT_NOTES"
Fault = Mapping[str, Any]


def environment(plan: Sequence[Fault], notes: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """What a process must find in its environment to be given a plan."""
    return {PLAN: json.dumps(list(plan)), **({NOTES: os.fspath(notes)} if notes else {})}


def struck(notes: Path) -> list[dict[str, Any]]:
    """The faults that struck, in their order; of `note`, how often each was called."""
    return [json.loads(line) for line in notes.read_text().splitlines()] if notes.is_file() else []


def install_from_environment() -> None:
    """Carry out the plan that the environment holds, if it holds one."""
    if plan := os.environ.get(PLAN):
        install(json.loads(plan))


@contextmanager
def installed(plan: Sequence[Fault]) -> Iterator[None]:
    """Carry out a plan in this process for a while."""
    undo = install(plan)
    try:
        yield
    finally:
        for put_back in reversed(undo):
            put_back()


def install(plan: Sequence[Fault]) -> list[Any]:
    """Carry out a plan in this process; returns what takes it back."""
    rank = int(os.environ.get("RANK", 0))
    undo: list[Any] = []
    for fault in plan:
        if fault.get("rank", rank) != rank:
            continue
        counter = _Counter(fault)
        for at in [fault["at"]] if isinstance(fault["at"], str) else fault["at"]:
            if at == "import":
                finder = _Imports(counter)
                sys.meta_path.insert(0, finder)
                undo.append(functools.partial(sys.meta_path.remove, finder))
            else:
                undo += _wrap(at, counter)
    return undo


class _Counter:
    """Counts the calls of a fault, and says at which it strikes."""

    def __init__(self, fault: Fault):
        self.fault, self.calls, self._lock = fault, 0, threading.Lock()
        self.do, _, self.what = fault["do"].partition(" ")
        if self.do == "note":
            atexit.register(lambda: _note(self.fault, self.calls))

    def strikes(self, arguments: Sequence[Any]) -> bool:
        if (to := self.fault.get("to")) is not None and not any(to in str(argument) for argument in arguments):
            return False
        if self.fault.get("thread", "") not in threading.current_thread().name:
            return False
        with self._lock:
            self.calls += 1
            first = self.fault.get("call")
            due = first is None or first <= self.calls <= self.fault.get("until", first)
            if due and self.do not in ("note", "skip"):
                _note(self.fault, self.calls)
        return due and self.do != "note"

    def strike(self) -> None:
        """Do what the fault says; for `skip`, nothing."""
        if self.do in ("kill", "stop", "signal"):
            number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(self.do) or int(self.what)
            os.kill(os.getpid(), number)
        elif self.do == "exit":
            os._exit(int(self.what))
        elif self.do == "OSError":
            raise OSError(int(self.what), os.strerror(int(self.what)))
        elif self.do == "MemoryError":
            raise MemoryError
        elif self.do == "RuntimeError":
            raise RuntimeError(self.what)
        elif self.do == "sleep":
            time.sleep(float(self.what))
        elif self.do == "spin":
            ctypes.PyDLL(None).usleep(int(1e6 * float(self.what)))
        elif self.do != "skip":
            raise ValueError(f"a fault cannot do {self.do!r}")


def _note(fault: Fault, calls: int) -> None:
    if NOTES not in os.environ:
        return
    line = {"rank": int(os.environ.get("RANK", 0)), "pid": os.getpid(), "call": calls}
    line |= {key: fault.get(key) for key in ("at", "do", "name")}
    # The calls of the system themselves, in case Python's are wrapped.
    file = _open(os.environ[NOTES], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    _write(file, (json.dumps(line) + "\n").encode())
    _close(file)


_open, _write, _close = os.open, os.write, os.close


class _Imports:
    """Counts modules that are looked for."""

    def __init__(self, counter: _Counter):
        self._counter = counter

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if self._counter.strikes((name,)):
            self._counter.strike()


class _Late:
    """Wraps functions of a module once it has been imported."""

    def __init__(self, module: str, names: Sequence[str], counter: _Counter):
        self._module, self._names, self._counter = module, names, counter

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def then(module: Any) -> None:
            run(module)
            _put(module, self._names, self._counter)

        spec.loader.exec_module = then
        return spec


def _wrap(at: str, counter: _Counter) -> list[Any]:
    """Wrap a function by its dotted name, at once or when its module is imported."""
    words = at.split(".")
    for many in range(len(words) - 1, 0, -1):
        module = ".".join(words[:many])
        if module in sys.modules:
            if hasattr(sys.modules[module], words[many]):
                return [_put(sys.modules[module], words[many:], counter)]
            break
    many = next((n for n in range(len(words) - 1, 0, -1) if _is_module(words[:n])), 0)
    if not many:
        raise ValueError(f"{at} is nothing that could be wrapped")
    late = _Late(".".join(words[:many]), words[many:], counter)
    sys.meta_path.insert(0, late)
    return [lambda: late in sys.meta_path and sys.meta_path.remove(late)]


def _is_module(words: Sequence[str]) -> bool:
    paths = [Path(place).joinpath(*words) for place in (*sys.path, ROOT)]
    return any(path.is_dir() or path.with_name(f"{path.name}.py").is_file() for path in paths)


def _put(owner: Any, names: Sequence[str], counter: _Counter) -> Any:
    for name in names[:-1]:
        owner = getattr(owner, name)
    name = names[-1]
    own = name in vars(owner)
    plain = vars(owner)[name] if own else getattr(owner, name)
    function = plain.__func__ if isinstance(plain, staticmethod | classmethod) else plain

    @functools.wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        strikes = counter.strikes([*arguments, *named.values()])
        if strikes and not counter.fault.get("after"):
            counter.strike()
            if counter.do == "skip":
                return None
        result = function(*arguments, **named)
        if strikes and counter.fault.get("after"):
            counter.strike()
        return result

    setattr(owner, name, type(plain)(wrapped) if function is not plain else wrapped)
    return functools.partial(setattr, owner, name, plain) if own else functools.partial(delattr, owner, name)


if __name__ == "__main__":
    install_from_environment()
    sys.path[0] = str(ROOT / "trainkit")  # as Python has it when that is the script
    sys.argv[0] = str(ROOT / "trainkit" / "run.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
