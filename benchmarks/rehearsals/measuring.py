"""What rehearsals share: sets made once, sides measured in processes of their own, rows that are kept, and a table.

    python -m benchmarks.rehearsals.NAME --scale 0.01|0.1|1 [--home FOLDER] [--only SIDE ...]

A set is written aside and renamed, and each row is written down when it is measured: a rehearsal that was interrupted
goes on; without `rows.jsonl` all is measured again. Pages of large files are dropped before each side.
CPU seconds are of a side and all processes that it started; memory is anonymous memory beyond that of the imports at
the most of samples every 50 ms, of other processes their shares of it (PSS) every 0.8 s.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import results

ROOT = results.ROOT
HEADS = ("what", "size", "CPU s", "memory, MB", "disk, MB", "read, MB", "bound by")


class Found(NamedTuple):
    """What a side worked on, in words; bytes of it on the disk; and what is to be in memory while that is measured."""

    size: str
    disk: int = 0
    kept: object = None


Sides = Mapping[str, tuple[str, Callable[[Path, float], Found]]]
"""By its name, what a side waits for, and the side, which is given the folder of the sets and the scale."""


def main(doc: str | None, name: str, make: Callable[[Path, float], None], sides: Sides) -> None:
    """Measure the sides that are asked for and have no row yet, and print the table."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.01, help="share of the published size")
    parser.add_argument("--home", type=Path)
    parser.add_argument("--only", nargs="+", choices=sides, default=list(sides), metavar="SIDE")
    asked = parser.parse_args()
    place = Path(tempfile.gettempdir()) / "trainkit-rehearsals" / f"{name}-{asked.scale:g}"
    home, file = (asked.home or place).absolute(), (asked.home or place).absolute() / "rows.jsonl"
    os.environ |= {"TRAINKIT_CACHE": str(home / "cache"), "OMP_NUM_THREADS": "1"}
    home.mkdir(parents=True, exist_ok=True)
    _forked(make, home, asked.scale)
    file.touch()
    for side in asked.only:
        if side not in {json.loads(line)[0] for line in file.read_text().splitlines()}:
            _forked(_measure, side, sides[side], home, asked.scale)
    rows = {row[0]: row for row in map(json.loads, file.read_text().splitlines())}
    print("\n".join(results.markdown(HEADS, [rows[side] for side in sides if side in rows])))


def _forked(function: Callable[..., None], *values: object) -> None:
    """Call a function in a process of its own, which has the imports of this one, where no thread was started."""
    import filelock  # noqa: F401
    import torchvision.io  # noqa: F401

    import trainkit.data.faces.dataset  # noqa: F401

    process = multiprocessing.get_context("fork").Process(target=function, args=values)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"ended with {process.exitcode}")


def _measure(name: str, side: tuple[str, Callable[[Path, float], Found]], home: Path, scale: float) -> None:
    for file in (*home.glob("*"), *home.glob("*/*"), *home.glob("*/*/rows.arrow")):
        if file.is_file() and file.stat().st_size > 1 << 20:
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    me = str(os.getpid())
    before, seen, spent, done = _number(me, "status", "RssAnon:"), [0], [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            seen.append(_anonymous(me, below=len(seen) % 16 == 0))
        spent.append(time.thread_time())

    thread = threading.Thread(target=watch)
    thread.start()
    began, used, read = time.perf_counter(), _cpu(), _number(me, "io", "read_bytes:")
    found = side[1](home, scale)
    seen.append(_anonymous(me))
    used, took = _cpu() - used, time.perf_counter() - began
    read = _number(me, "io", "read_bytes:") - read  # of other processes too, which were waited for
    done.set()
    thread.join()
    used -= spent[-1]
    row = [name, found.size, f"{used:,.1f}", *(f"{n / 1e6:,.0f}" for n in (max(seen) - before, found.disk, read))]
    with (home / "rows.jsonl").open("a") as out:
        out.write(json.dumps([*row, side[0]]) + "\n")
    print(f"{' | '.join(row)} | {took:,.1f} s, load {os.getloadavg()[0]:.1f}", file=sys.stderr)


def memory(process: int | str) -> tuple[int, int]:
    """Return the proportional share of memory of a process, and what of it is anonymous, in bytes."""
    return _number(process, "smaps_rollup", "Pss:"), _number(process, "smaps_rollup", "Pss_Anon:")


def _anonymous(process: str, own: bool = True, below: bool = True) -> int:
    """Return the anonymous memory of a process, and of all below it."""
    total = _number(process, "status", "RssAnon:") if own else memory(process)[1]
    for file in Path("/proc", process, "task").glob("*/children") if below else ():
        for child in file.read_text().split():
            with contextlib.suppress(OSError, StopIteration):  # it ended
                total += _anonymous(child, own=False)
    return total


def _number(process: int | str, file: str, line: str) -> int:
    text = Path("/proc", str(process), file).read_text()
    words = next(one.split() for one in text.splitlines() if one.startswith(line))
    return int(words[1]) * (1024 if words[-1] == "kB" else 1)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(one.ru_utime + one.ru_stime for one in used)


def once(folder: Path, write: Callable[[Path], None]) -> None:
    """Have a folder written where it is not there."""
    if not folder.is_dir():
        aside = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        write(aside)
        aside.rename(folder)


def opens(opened: Callable[[Path], tuple[object, str]], cache: str, anew: bool, home: Path, scale: float) -> Found:
    """Open a set, which is packed into a cache of its own the first time; `anew` removes that before."""
    os.environ["TRAINKIT_CACHE"] = str(home / cache)
    if anew:
        shutil.rmtree(home / cache, ignore_errors=True)
    data, size = opened(home)
    return Found(size, size_of(home / cache), data)


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@cache
def pictures(many: int, side: int) -> list[bytes]:
    """Draw JPEG files, of 112 px about 1 kB each."""
    from PIL import Image

    found = []
    for seed in range(many):
        coarse = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
        stream = io.BytesIO()
        Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=50)
        found.append(stream.getvalue())
    return found


def train(*words: str, store: Path, processes: int = 1) -> subprocess.Popen[bytes]:
    """Start a training that writes into a store of its own; what it says goes to a file beside that."""
    if "--resume" not in words:
        shutil.rmtree(store, ignore_errors=True)
    configs = ["--config_file", str(ROOT / "accelerate_configs" / "cpu_2proc.yaml")]
    launch = [] if processes == 1 else ["-m", "accelerate.commands.launch", *configs, f"--num_processes={processes}"]
    own = {"TRAINKIT_STORE": str(store), "PYTHONPATH": str(ROOT)}
    with store.with_suffix(".log").open("ab") as said:
        command = [sys.executable, *launch, str(ROOT / "trainkit" / "run.py"), *words]
        return subprocess.Popen(command, stdout=said, stderr=said, cwd=ROOT, env={**os.environ, **own})


def trained(*words: str, store: Path, processes: int = 1) -> None:
    """Train to the end. Raises SystemExit with the last lines of what it said where it failed."""
    if code := train(*words, store=store, processes=processes).wait():
        raise SystemExit(f"{words[0]} ended with {code}:\n{store.with_suffix('.log').read_text()[-3000:]}")


def each(many: int, what: str, began: float) -> str:
    """Describe how many of something were done since a process time, and what one took."""
    used = (time.process_time() - began) / max(1, many)
    return f"{many:,} {what}, {f'{used:,.1f} CPU s' if used >= 1 else f'{1e3 * used:,.2f} ms of CPU'} each"
