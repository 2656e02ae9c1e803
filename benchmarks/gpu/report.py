"""Rows measured by a part of `make gpu`, their files, and their page."""

from __future__ import annotations

import datetime
import gc
import importlib.util
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table: quantity, expected value, measured value, result."""

    what: str
    expected: str
    measured: str
    result: Literal["ok", "fails", "skipped", "no goal"]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Where to measure, and how much. `tiny`: small shapes and few steps, so that it all runs on a CPU in a test."""

    device: torch.device
    tiny: bool


class Skipped(Exception):
    """Says why something cannot be measured here."""


Check = tuple[str, str, Callable[[], tuple[bool | None, str]]]
"""The quantity, the expected value, and the measurement: whether it was met (None: no goal), and the result."""


def run(checks: Iterable[Check], done: Collection[str]) -> Iterator[Row]:
    """Yield the row of each check that is not `done`. One that raises fails with the error's text; others continue."""
    for what, expected, measure in checks:
        if what in done:
            continue
        try:
            held, measured = measure()
            result = "no goal" if held is None else "ok" if held else "fails"
        except Skipped as reason:
            result, measured = "skipped", str(reason)
        except ModuleNotFoundError as error:
            own = (error.name or "").startswith(("trainkit", "benchmarks"))
            result, measured = ("fails", str(error)) if own else ("skipped", f"{error.name} is not installed")
        except Exception as error:
            result, measured = "fails", f"{type(error).__name__}: {error}"
        _free()
        yield Row(what=what, expected=expected, measured=" ".join(measured.split())[:400], result=result)


def require(package: str) -> None:
    """Raise `Skipped` where a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise Skipped(f"{package} is not installed")


def require_cuda(scale: Scale, why: str) -> None:
    """Raise `Skipped` with the reason, unless a CUDA device is measured."""
    if scale.device.type != "cuda":
        raise Skipped(f"needs a GPU: {why}")


def _free() -> None:
    """Free the memory of a measurement, so that the next one starts with the same memory."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


# ---- Kept, and shown

KEPT, PAGE = ROOT / "build" / "gpu", ROOT / "docs" / "project" / "gpu.md"
LIMIT = 420
"""Seconds after which a part begins no further row."""
BROKEN = "CUDA error"
"""How torch words an error after which CUDA is of no use to the process; it words memory that runs out otherwise."""
INTRODUCTION = """# Measurements on a GPU

Equality with the CPU, memory, and speed against other implementations, as measured by `make gpu`. A part that has not
been run says so. `make gpu PART=claims` measures the guides' claims about GPUs into [claims.md](claims.md).

To run it: `make gpu PART=equality` (or `memory`, `speed`) runs one part in about 8 minutes; if it stops before the end,
run the same command again to continue. Without `PART` it runs all parts. Results of the same machine, versions and code
are kept in `build/gpu/` until you delete that folder. It uses the Python you give it (`make gpu PYTHON=python3.12`;
Python 3.11 to 3.13, torch 2.11 or later, and trainkit's dependencies), installs nothing, and needs neither a network
nor data. A missing package, such as that of another implementation, is reported in its row.
Without a GPU it measures nothing. This page is generated; do not edit.
"""
NOTHING = "Not measured yet: no GPU was available. `tests/benchmarks/test_gpu_*.py` run its rows on a CPU."


def machine() -> dict[str, str]:
    """Return what rows are kept for: machine, versions and code. Where they are equal no row is measured again."""
    from benchmarks.claims import ledger
    from trainkit.environment import record

    # The commit is for people: where there is no git, or the code was changed since, sources tell versions apart.
    code = {"commit": record._git(ROOT, "rev-parse", "--short", "HEAD") or "unknown"}
    code["sources"] = ", ".join(
        record.program("benchmarks")[f"source of {name}"] for name in ("trainkit", "benchmarks")
    )
    return {name: value for name, value in {**ledger.here(), **code}.items() if value}


def kept(part: str, on: Mapping[str, str], folder: Path = KEPT) -> list[Row]:
    """Return the rows of a part that were measured on the same machine with the same code."""
    file = folder / f"{part}.jsonl"
    if not file.is_file():
        return []
    first, *lines = file.read_text(encoding="utf-8").splitlines()
    if {**json.loads(first), "commit": ""} != {**on, "commit": ""}:  # it changes with this very page
        return []
    return [Row(**json.loads(line)) for line in lines]


def measure(part: str, module: Any, scale: Scale, folder: Path = KEPT) -> tuple[dict[str, str], list[Row], str]:
    """Measure the rows of a part that are not kept, writing each down at once; returns the machine and all rows.

    The last is why it ended before the last row, empty where it did not: after `LIMIT` seconds, or since CUDA failed in
    a way that every later row of this process would fail in, too.
    """
    began = time.monotonic()
    on = machine()
    found = kept(part, on, folder)
    file = folder / f"{part}.jsonl"
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(on) + "\n", encoding="utf-8")
    for row in module.rows(scale, {row.what for row in found}):
        found.append(row)
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(row)) + "\n")
        print(f"{row.result:8} {row.what}: {row.measured} (expected: {row.expected})", flush=True)
        if row.result == "fails" and BROKEN in row.measured:
            return on, found, BROKEN
        if time.monotonic() - began > LIMIT:
            return on, found, f"{LIMIT} s time limit"
    return on, found, ""


def section(title: str, on: Mapping[str, str], rows: Sequence[Row], left: str = "") -> str:
    """Return the part of the page about the rows of a part; `left` is why there are not all."""
    said = ", ".join(f"{name} {value}" for name, value in on.items())
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    counts = {result: sum(row.result == result for row in rows) for result in ("ok", "fails", "skipped", "no goal")}
    found = ", ".join(f"{count} {result}" for result, count in counts.items() if count)
    found += f"; not complete: {left}" if left else ""
    lines = [f"## {title}", "", f"{said}; {datetime.date.today()}, load {load:.1f}: {found}.", ""]
    lines += ["| quantity | expected | measured | result |", "|---|---|---|---|"]
    cells = ((row.what, row.expected, row.measured, row.result) for row in rows)
    return "\n".join([*lines, *(f"| {' | '.join(c.replace('|', '/') for c in row)} |" for row in cells)]) + "\n"


def write(sections: Mapping[str, str], titles: Sequence[str], page: Path = PAGE) -> None:
    """Write sections of the page, by title; others stay as they are, and one that was never written says so."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    before = {part.partition("\n")[0]: f"## {part.rstrip()}\n" for part in text.split("\n## ")[1:]}
    all_ = (sections.get(title) or before.get(title) or f"## {title}\n\n{NOTHING}\n" for title in titles)
    page.write_text("\n".join([INTRODUCTION, *all_]), encoding="utf-8")
