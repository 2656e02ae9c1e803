"""Rows of measurements: made one after another, kept for a machine and its code, and shown as a table of a page.

`benchmarks.gpu` and `benchmarks.claims` list their checks, and measure, keep and show them through this module.
"""

from __future__ import annotations

import datetime
import gc
import importlib.util
import json
import os
import platform
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "build" / "measured"
"""Folder of the rows that were measured."""
BROKEN = "CUDA error"
"""How torch words an error after which CUDA is of no use to the process; it words memory that runs out otherwise."""
SKIPPED, FAILS = "skipped", "fails"
_RESULTS = {None: "no goal", True: "ok", False: FAILS}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table: quantity, expected value, measured value, result."""

    what: str
    expected: str
    measured: str
    result: str


class Skipped(Exception):
    """Says why something cannot be measured here."""


Check = tuple[str, str, Callable[[], tuple[bool | str | None, str]]]
"""The quantity, the expected value, and the measurement: whether it was met (None: no goal) or the result as a word,
and the measured value."""


def run(checks: Iterable[Check], done: Collection[str]) -> Iterator[Row]:
    """Yield the row of each check that is not `done`. One that raises fails with the error's text; others continue."""
    for what, expected, measure in checks:
        if what in done:
            continue
        try:
            held, measured = measure()
            result = held if isinstance(held, str) else _RESULTS[held]
        except Skipped as reason:
            result, measured = SKIPPED, str(reason)
        except ModuleNotFoundError as error:
            own = (error.name or "").startswith(("trainkit", "benchmarks"))
            result, measured = (FAILS, str(error)) if own else (SKIPPED, f"{error.name} is not installed")
        except Exception as error:
            result, measured = FAILS, f"{type(error).__name__}: {error}"
        _free()
        yield Row(what=what, expected=expected, measured=" ".join(measured.split())[:400], result=result)


def require(package: str) -> None:
    """Raise `Skipped` where a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise Skipped(f"{package} is not installed")


def _free() -> None:
    """Free the memory of a measurement, so that the next one starts with the same memory."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def machine() -> dict[str, str]:
    """Return what rows are kept for: machine, versions and code. Where they are equal no row is measured again."""
    import benchmarks
    import trainkit
    from trainkit.environment import record
    from trainkit.tracking.system_load import cores

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    sources = record.program(benchmarks.__name__)
    return {
        "processor": record.cpu_name(),
        "cores": f"{cores():g}",
        "threads": str(torch.get_num_threads()),
        "gpu": " + ".join(gpus) or "none",
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "trainkit": trainkit.__version__,
        "data": "with TRAINKIT_DATA" if os.environ.get("TRAINKIT_DATA") else "without TRAINKIT_DATA",
        "sources": ", ".join(sources[f"source of {name}"] for name in ("trainkit", "benchmarks")),
    }


def kept(name: str, on: Mapping[str, str], folder: Path = KEPT) -> list[Row]:
    """Return the rows of this name that were measured on the same machine with the same code."""
    file = folder / f"{name}.jsonl"
    if not file.is_file():
        return []
    first, *lines = file.read_text(encoding="utf-8").splitlines()
    return [Row(**json.loads(line)) for line in lines] if json.loads(first) == on else []


def measure(
    name: str,
    checks: Iterable[Check],
    on: Mapping[str, str],
    *,
    limit: float = float("inf"),
    folder: Path = KEPT,
) -> tuple[list[Row], str]:
    """Measure the checks whose rows are not kept, writing each row down at once; returns all rows that there are.

    The second is why it ended before the last check, empty where it did not: after `limit` seconds, or since CUDA
    failed in a way that every later check of this process would fail in, too.
    """
    began, found, file = time.monotonic(), kept(name, on, folder), folder / f"{name}.jsonl"
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(on) + "\n", encoding="utf-8")
    for row in run(checks, {row.what for row in found}):
        found.append(row)
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(row)) + "\n")
        print(f"{row.result:8} {row.what}: {row.measured} (expected: {row.expected})", flush=True)
        if row.result == FAILS and BROKEN in row.measured:
            return found, BROKEN
        if time.monotonic() - began > limit:
            return found, f"{limit} s time limit"
    return found, ""


def table(heads: Sequence[str], on: Mapping[str, str], rows: Sequence[Row], left: str = "") -> list[str]:
    """Return where and when rows were measured, how many came to each result, and the rows as a table in markdown.

    `left` is why there are not all.
    """
    said = ", ".join(f"{name} {value}" for name, value in on.items())
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    results = [row.result for row in rows]
    found = ", ".join(f"{results.count(one)} {one}" for one in dict.fromkeys(results))
    found += f"; not complete: {left}" if left else ""
    lines = [f"{said}; {datetime.date.today()}, load {load:.1f}: {found}.", ""]
    return lines + markdown(heads, [(row.what, row.expected, row.measured, row.result) for row in rows])


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    cells = (f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)
    return [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *cells]
