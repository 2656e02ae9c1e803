"""What started this process, what it was asked for, and when it is told to stop.

Reads the parent's command line on Linux, else nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from trainkit.errors import UserError

ASKS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name))
"""Signals that ask a training to stop."""
STOP_SECONDS = 25.0
"""Time that a training which was told to stop has by default: torch's launcher kills after 30 s."""
_NOTHING_TO_SAVE_SECONDS = 5.0
_ONE_WISH_SECONDS = 1.0
"""`timeout` signals its child twice, a terminal and a launcher both tell it: what comes so close is one wish."""


def die_with_parent() -> str | None:
    """Have the kernel send SIGTERM when the launcher dies, which one-process `accelerate launch` does not pass on.

    Returns a line to print where that is not possible.
    """
    if not sys.platform.startswith("linux"):
        return "not on Linux: if the launcher is killed, this process has to be stopped by hand"
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    return None


def leave_no_log_folders() -> None:
    """Remove the empty folders that torch's launcher of several processes has made for logs; it leaves them behind.

    Each process removes its own, and the last of them those around it. One with a log (`--tee`, `--redirects`) stays,
    and one that `--log_dir` names. A launcher that starts its processes once more makes them again. To be called first
    of all, so that of a run that is killed none is left either.
    """
    own = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent
    # torchelastic_.../<launch>/attempt_0/<rank>/error.json
    around = own.parents[:3]
    if len(around) == 3 and around[-1].name.startswith("torchelastic_"):
        with contextlib.suppress(OSError):
            for folder in (own, *around):
                folder.rmdir()


def check_variables() -> None:
    """Raise UserError for variables of a launcher that are no numbers, or do not fit each other."""
    found = {}
    for name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        word = os.environ.get(name)
        if word is not None and not (word.isascii() and word.isdigit() and len(word) < 7):
            raise UserError(name, f"{word!r:.80}", "a whole number, as launchers set it", f"unset {name}")
        found[name] = int(word) if word is not None else None
    for size, rank in (("WORLD_SIZE", "RANK"), ("LOCAL_WORLD_SIZE", "LOCAL_RANK")):
        if found[size] is not None and found[size] <= (found[rank] or 0):
            said = f"{found[size]}, with {rank} {found[rank] or 0}"
            raise UserError(size, said, "more processes than the number of this one", "unset both, or set both")


def asked_processes() -> int:
    """Number of processes the launcher was asked for, as far as can be told; at least 1.

    `WORLD_SIZE` where it is set. Accelerate's one-process launcher does not set it, whatever number it was given, so
    the launcher's own arguments and config file are read.
    """
    asked = int(os.environ.get("WORLD_SIZE", 1))
    argv = _parent_arguments()
    if not any("accelerate" in word for word in argv[:4]):
        return asked
    if number := _option(argv, "--num_processes", "--num-processes"):
        return max(asked, int(number)) if number.isdigit() else asked
    config = _option(argv, "--config_file", "--config-file") or _default_config()
    return max(asked, _processes_in(Path(config))) if config else asked


def age() -> float:
    """Seconds since the command of this process began: since its launcher did, where it was started by one.

    A worker that a launcher has restarted counts from its own start. 0 where the kernel does not tell.
    """
    launched = any("accelerate" in word or "torchrun" in word for word in _parent_arguments()[:4])
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    try:
        line = Path(f"/proc/{os.getppid() if launched and not restarted else os.getpid()}/stat").read_text()
        began = int(line.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")  # field 22, behind the name
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


class Stopped(KeyboardInterrupt):
    """Told to stop, where nothing has to be saved first."""


class Stop:
    """Whether the training is to stop: by a signal, or because `asked` says so.

    A signal turns the flag `told` on, and a loop that has something to save looks at it. Where nothing has to be saved
    (`with stop.at_once():`) it raises `Stopped` in the main thread instead.
    """

    def __init__(self, asked: Callable[[], bool] = lambda: False):
        self._asked = asked
        self.told = False
        """Whether a signal has come."""
        self.seconds = STOP_SECONDS
        """After so many from the first signal on the process leaves, whatever it is at."""
        self._raises = self._raised = False
        self._first = 0.0

    def __call__(self) -> bool:
        """Whether the training is to stop."""
        return self.told or self._asked()

    @staticmethod
    def of(stopping: Callable[[], bool]) -> Stop:
        """As a `Stop`, whatever says whether to stop."""
        return stopping if isinstance(stopping, Stop) else Stop(stopping)

    def listen(self) -> None:
        """Hear signals from now on; to be called once, in the main thread.

        SIGHUP is ignored: a terminal that is gone, or a connection, is no reason to stop. A second signal, a second or
        more after the first, ends the process at once. Ctrl-C ends the launcher too, and the kernel then sends the
        SIGTERM of `die_with_parent`, which is no second wish. Nor is what torch's launcher of several processes passes
        on where everybody was told already, as on a machine that goes away: beneath it a third signal counts.
        """
        self._parent, self._later = os.getppid(), 0
        self._excused = 1 if "TORCHELASTIC_RUN_ID" in os.environ else 0
        for number in ASKS:
            signal.signal(number, self._note)
        if hasattr(signal, "SIGHUP"):
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # A handler runs between two instructions of the interpreter, and none is executed while the main thread waits
        # for another process: so a thread is woken as well.
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        threading.Thread(target=self._see_to_it, args=(read,), name="trainkit-stop", daemon=True).start()

    def at_once(self) -> _Within:
        """Within, a signal raises `Stopped`; so does one that came before."""
        return _Within(self, True)

    def later(self) -> _Within:
        """Within, it only turns the flag on, whatever is around this."""
        return _Within(self, False)

    def save_first(self) -> None:
        """From here on, until the end of what is around this, there is something to save."""
        self._raises = False

    def _note(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if not self._first:
            self._first, self.told = now, True
            if self._raises:  # only now: what cleans up afterwards is not to be interrupted
                self._raised = True
                raise Stopped
        elif now - self._first > _ONE_WISH_SECONDS and os.getppid() == self._parent:
            self._later += 1
            if self._later > self._excused:
                os._exit(128 + number)

    def _see_to_it(self, read: int) -> None:
        while (number := os.read(read, 1)[0]) not in ASKS:
            pass
        began = time.monotonic()
        self.told = True
        while True:
            time.sleep(0.1)
            # What is read here may change meanwhile: a stop that raises has nothing to save.
            most = min(self.seconds, _NOTHING_TO_SAVE_SECONDS) if self._raises else self.seconds
            if time.monotonic() - began > most:
                break
        with contextlib.suppress(OSError, ValueError):
            print(f"told to stop {most:.0f} s ago and still here; leaving without more being saved", file=sys.stderr)
            faulthandler.dump_traceback(all_threads=True)
        os._exit(128 + number)


class _Within:
    """What a signal does for a while. A class, since a generator is resumed before it can turn anything off."""

    def __init__(self, stop: Stop, raises: bool):
        self._stop, self._raises = stop, raises

    def __enter__(self) -> None:
        self._before, self._stop._raises = self._stop._raises, self._raises
        if self._raises:
            self._look()

    def __exit__(self, *failure: Any) -> None:
        raises, self._stop._raises = self._stop._raises, self._before
        if failure[0] is None and raises:
            self._look()

    def _look(self) -> None:
        if self._stop.told and not self._stop._raised:
            self._stop._raises, self._stop._raised = self._before, True
            raise Stopped


def stop_flag() -> Stop:
    """A `Stop` that hears signals."""
    stop = Stop()
    stop.listen()
    return stop


def leave(code: int, seconds: float = 5.0) -> NoReturn:
    """End the process, as the interpreter does: wait for threads, call what is registered for the end; then exit.

    After so many seconds it ends whatever it waits for. What the interpreter would do last is left to the kernel:
    giving back the memory object by object takes 2 s of a core once torch and MLflow are imported, and threads of gloo,
    which outlive the process group, abort about 1 in 14 processes meanwhile.
    """

    def insist() -> None:
        time.sleep(seconds)
        os._exit(code)

    threading.Thread(target=insist, name="trainkit-leave", daemon=True).start()
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
    finally:
        os._exit(code)


def _parent_arguments() -> list[str]:
    try:
        return Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    except OSError:
        return []


def _option(argv: list[str], *names: str) -> str | None:
    for i, word in enumerate(argv):
        for name in names:
            if word == name and i + 1 < len(argv):
                return argv[i + 1]
            if word.startswith(name + "="):
                return word[len(name) + 1 :]
    return None


def _default_config() -> str | None:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    path = home / "accelerate" / "default_config.yaml"
    return str(path) if path.is_file() else None


def _processes_in(config: Path) -> int:
    from trainkit.config import yaml_reader

    try:
        tree = yaml_reader.read(config.read_text(encoding="utf-8")).tree
        return int(tree.get("num_processes", 1))
    except (OSError, ValueError, AttributeError, TypeError):
        return 1
