"""Read the CPU quota that the control groups of this process (its container) allow."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil


def quota(root: str = "/sys/fs/cgroup", proc: str = "/proc/self/cgroup") -> float | None:
    """Return the quota in processors, the tightest of the group and those above it; None without a limit.

    Control groups of version 1 and 2. `proc` lists the groups of the process; `root` is where they are mounted.
    """
    found = []
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in Path(proc).read_text().splitlines():
            _, _, rest = line.partition(":")
            names, _, path = rest.partition(":")
            if names == "" or "cpu" in names.split(","):
                base = next(
                    (Path(root, n) for n in (names, "cpu", "unified") if n and Path(root, n).is_dir()), Path(root)
                )
                found += [_quota_of(folder) for folder in _upwards(base, path)]
    return min((most for most in found if most is not None), default=None)


def cores() -> float:
    """Return the number of processors this process may use, which in a container may be less than it sees."""
    return min(float(len(affinity())), quota() or float("inf"))


def affinity() -> list[int]:
    """Return the processors that this process may run on; OpenMP may have pinned the thread that asks."""
    process = psutil.Process()
    return process.cpu_affinity() if hasattr(process, "cpu_affinity") else list(range(psutil.cpu_count() or 1))


def _quota_of(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        if (folder / "cpu.max").exists():
            most, period = (folder / "cpu.max").read_text().split()
        else:
            most, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return float(most) / float(period) if most != "max" and float(most) > 0 else None
    return None


def _upwards(base: Path, path: str) -> list[Path]:
    """Return the group's folder and those above it, up to the mount.

    In a container the path may be the host's, of which the mount shows the last part only, or nothing but its root.
    """
    parts = [part for part in path.split("/") if part not in ("", "..")]
    while parts and not base.joinpath(*parts).is_dir():
        parts = parts[1:]
    return [base.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]
