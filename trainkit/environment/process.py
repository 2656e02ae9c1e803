"""Read the launcher's arguments, tie this process to it (on Linux alone), and end it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from trainkit.errors import UserError


def die_with_parent() -> str | None:
    """Have the kernel send SIGTERM when the launcher dies, which one-process `accelerate launch` does not pass on.

    Returns a line to print where that is not possible.
    """
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):  # no such function
        return "not on Linux: if the launcher is killed, stop this process yourself"
    return None


@contextlib.contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Treat SIGTERM, and the SIGHUP of a closed terminal, as Ctrl-C within; in the main thread, which gets them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_variables() -> None:
    """Raise UserError for launcher variables that are not numbers or contradict each other."""
    found: dict[str, int | None] = {}
    for name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        word = os.environ.get(name)
        if word is not None and not (word.isascii() and word.isdigit() and len(word) < 7):
            raise UserError(name, f"{word!r:.80}", "a whole number, as launchers set", f"unset {name}")
        found[name] = int(word) if word is not None else None
    for size, rank in (("WORLD_SIZE", "RANK"), ("LOCAL_WORLD_SIZE", "LOCAL_RANK")):
        count, own = found[size], found[rank] or 0
        if count is not None and count <= own:
            found_here = f"{count}, with {rank}={own}"
            raise UserError(size, found_here, f"a number greater than {rank}", "unset both, or set both")


def asked_processes() -> int:
    """Return the number of processes the launcher was asked for, as far as can be told; at least 1.

    `WORLD_SIZE` where it is set. Accelerate's one-process launcher does not set it, whatever number it was given, so
    the launcher's own arguments and config file are read.
    """
    asked = int(os.environ.get("WORLD_SIZE", 1))
    argv = _accelerate_arguments()
    if not argv:
        return asked
    if number := _option(argv, "--num_processes"):
        return max(asked, int(number)) if number.isdigit() else asked
    # With --cpu, Accelerate reads no file of its own accord.
    config = _option(argv, "--config_file") or ("" if "--cpu" in argv else _default_config())
    return max(asked, _processes_in(Path(config))) if config else asked


def age() -> float:
    """Return seconds since the command of this process began: since its launcher did, where it was started by one.

    A worker that a launcher has restarted counts from its own start. 0 where the system does not tell.
    """
    launched = any("accelerate" in word or "torchrun" in word for word in _parent_arguments()[:4])
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    pid = os.getppid() if launched and not restarted else os.getpid()
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
        began = int(line.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")  # field 22, behind the name
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def peak_memory() -> int:
    """Return the most bytes of memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def keep_freed_memory() -> None:
    """Have glibc keep memory that is freed, for the next step, instead of returning it to the system.

    It returns blocks above 32 MB at once, and the system then fills new pages with zeros in every step. 16 images of
    160 px, EfficientNet-Lite0, one core: 16 to 18 ms of system time an image beside 58 of the network, 0.3 to 0.6 with
    this; forward alone, 64 images, 22 and 0.1 beside 11. The peak grows from 1.51 to 1.65 GB. Settings of the
    environment, MALLOC_*, are left as they are.
    """
    if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):
        with contextlib.suppress(OSError, AttributeError):  # of another C library
            libc = ctypes.CDLL(None)
            libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def leave(code: int, seconds: float = 5.0) -> NoReturn:
    """End the process, as the interpreter does: wait for threads, call the functions of `atexit`; then exit.

    After so many seconds it ends whatever it waits for. What the interpreter would do last is left to the kernel:
    giving back the memory object by object takes 2 s of a core once torch and MLflow are imported, and threads of gloo,
    which outlive the process group, abort about 1 in 14 processes meanwhile.
    """

    def insist() -> None:
        time.sleep(seconds)
        os._exit(code)

    threading.Thread(target=insist, name="trainkit-leave", daemon=True).start()
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - private, as the interpreter calls it
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
    finally:
        os._exit(code)


def _parent_arguments() -> list[str]:
    import psutil

    try:
        return psutil.Process(os.getppid()).cmdline()
    except (psutil.Error, OSError):
        return []


def _accelerate_arguments() -> list[str]:
    """Return the words of the `accelerate launch` that started this process; none where another program did."""
    argv = _parent_arguments()
    return argv if any("accelerate" in word for word in argv[:4]) else []


def _option(argv: list[str], name: str) -> str | None:
    for i, word in enumerate(argv):
        said, sign, value = word.partition("=")
        if said.replace("-", "_") == name.replace("-", "_"):
            return value if sign else argv[i + 1] if i + 1 < len(argv) else None
    return None


def _default_config() -> str | None:
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = Path(os.environ.get("HF_HOME", f"{caches}/huggingface")).expanduser()
    path = home / "accelerate" / "default_config.yaml"
    return str(path) if path.is_file() else None


def _processes_in(config: Path) -> int:
    from trainkit.config import yaml_reader

    try:
        tree = yaml_reader.read(config.read_text(encoding="utf-8")).tree
        return int(tree.get("num_processes", 1))
    except (OSError, ValueError, AttributeError, TypeError):
        return 1
