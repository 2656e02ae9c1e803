"""What started this process, and what it was asked for. Reads the parent's command line on Linux, else nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path


def die_with_parent() -> str | None:
    """Have the kernel send SIGTERM when the launcher dies, which one-process `accelerate launch` does not pass on.

    Returns a line to print where that is not possible.
    """
    if not sys.platform.startswith("linux"):
        return "not on Linux: if the launcher is killed, this process has to be stopped by hand"
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    return None


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


def stop_flag() -> Callable[[], bool]:
    """Turn SIGTERM, SIGUSR1 and SIGINT into a flag that the loop reads; a second signal ends the process at once.

    Ctrl-C ends the launcher too, and the kernel then sends the SIGTERM of `die_with_parent`, which is no second wish.
    Nor is what torch's launcher of several processes passes on where everybody was told already, as on a machine that
    goes away: beneath it a third signal ends the process.
    """
    seen: list[int] = []
    parent = os.getppid()
    same_wish = 2 if "TORCHELASTIC_RUN_ID" in os.environ else 1

    def note(number: int, frame: object) -> None:
        if len(seen) >= same_wish and os.getppid() == parent:
            os._exit(128 + number)
        seen.append(number)

    for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), note)
    return lambda: bool(seen)


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
    from trainkit import yamltext

    try:
        tree = yamltext.read(config.read_text(encoding="utf-8")).tree
        return int(tree.get("num_processes", 1))
    except (OSError, ValueError, AttributeError, TypeError):
        return 1
