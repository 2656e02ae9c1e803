"""Read the processor time that the control groups of this process (its container) allow, and that they refused."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Refused:
    """Counts of one group since it was made."""

    periods: int
    """Periods of the quota in which the group did anything."""
    cut: int
    """Those in which it had used its quota up."""
    throttled: float
    """Processor seconds that were refused, as many at a time as processors stood still."""
    used: float
    """Processor seconds that were given."""


class Groups:
    """Control group of a process and those above it, version 1 and 2: the tightest one decides.

    `proc` holds the process's own list of groups (`/proc/self/cgroup`); `root` is where groups are mounted.
    """

    def __init__(self, root: str | os.PathLike[str] = "/sys/fs/cgroup", proc: str = "/proc/self/cgroup"):
        self.absent: dict[str, str] = {}
        self._folders: list[Path] = []
        self._usage: list[Path] = []
        root, paths = Path(root), {}
        with contextlib.suppress(OSError, UnicodeDecodeError):
            for line in Path(proc).read_text().splitlines():
                _, _, rest = line.partition(":")
                names, _, path = rest.partition(":")
                paths.update(dict.fromkeys(names.split(","), (names, path)))
        self._old = "cpu" in paths
        if self._old:
            base = _mounted(root, "cpu", paths["cpu"][0])
            usage = _mounted(root, "cpuacct", paths.get("cpuacct", paths["cpu"])[0])
            self._folders = _upwards(base, paths["cpu"][1])
            self._usage = [usage / folder.relative_to(base) for folder in self._folders]
        elif "" in paths:
            base = root / "unified" if (root / "unified").is_dir() else root
            self._folders = self._usage = _upwards(base, paths[""][1])

    def quota(self) -> float | None:
        """Return the quota in processors; None without a limit."""
        found = []
        for folder in self._folders:
            with contextlib.suppress(ValueError):
                found.append(self._quota_of(folder))
        return min((quota for quota in found if quota is not None), default=None)

    def refused(self) -> list[Refused] | None:
        """Return the counts of every group that has a quota; None where they cannot be read."""
        if not any(folder.is_dir() for folder in self._folders):
            self.absent["throttled_share"] = "no control groups are seen here"
            return None
        found = []
        for folder, usage in zip(self._folders, self._usage, strict=False):
            try:
                if self._quota_of(folder) is None:
                    continue
                stat = _pairs(folder / "cpu.stat")
                if self._old:
                    throttled, used = stat["throttled_time"] / 1e9, int((usage / "cpuacct.usage").read_text()) / 1e9
                else:
                    throttled, used = stat["throttled_usec"] / 1e6, stat["usage_usec"] / 1e6
                found.append(Refused(stat["nr_periods"], stat["nr_throttled"], throttled, used))
            except (OSError, ValueError, KeyError) as error:
                self.absent["throttled_share"] = f"{folder} cannot be read: {error}"
                return None
        return found

    def _quota_of(self, folder: Path) -> float | None:
        try:
            if self._old:
                most = float((folder / "cpu.cfs_quota_us").read_text())
                period = float((folder / "cpu.cfs_period_us").read_text())
            else:
                word, period_word = (folder / "cpu.max").read_text().split()
                most, period = (-1.0 if word == "max" else float(word)), float(period_word)
        except FileNotFoundError:
            return None  # the topmost group has no limit
        except OSError as error:
            raise ValueError(str(error)) from error
        if not period > 0:
            raise ValueError(f"a period of {period}")
        return most / period if most > 0 else None


def share(before: list[Refused] | None, now: list[Refused] | None) -> float | None:
    """Return the share of the processor time wanted that was refused between two readings, of the tightest group.

    As many processors as stood still are counted at once, so the time refused is set against the time given; and it
    cannot be more than the share of periods in which anything was refused at all.
    """
    if before is None or now is None or len(before) != len(now):
        return None
    most = 0.0
    for a, b in zip(before, now, strict=True):
        periods, refused, given = b.periods - a.periods, b.throttled - a.throttled, b.used - a.used
        if periods > 0 and refused > 0:
            most = max(most, min(refused / (refused + max(given, 0.0)), (b.cut - a.cut) / periods))
    return most


def _mounted(root: Path, name: str, names: str) -> Path:
    """Return the folder of a controller of version 1: `cpu`, `cpu,cpuacct`, ..."""
    return next((root / n for n in (names, name) if (root / n).is_dir()), root / name)


def _upwards(base: Path, path: str) -> list[Path]:
    """Return the group's folder and those above it, up to the mount.

    In a container the path may be the host's, of which the mount shows the last part only, or nothing but its root.
    """
    parts = [part for part in path.split("/") if part not in ("", "..")]
    while parts and not base.joinpath(*parts).is_dir():
        parts = parts[1:]
    return [base.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


def _pairs(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in path.read_text().splitlines())}
