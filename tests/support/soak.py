"""Every promise with many trials, and one table of what came of them.

    python tests/support/soak.py --write docs/project/reliability.md    all of them, from the start
    ... --resume                                                what passed is not made again
    ... --resume tests/whole_runs/test_kills.py -k toy -n 0     words for pytest: some of them

Interrupted, or run in parts, it goes on with `--resume` from the trials in the file of `--keep`. A row for each promise
is printed, a row for each kind of fault written, whatever came of it; the exit code is 0 when every test passed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from promise_trials import pairs, recorded

ROOT = Path(__file__).resolve().parents[2]
FAULTS = {
    "B": "damaged data",
    "C": "damaged checkpoints",
    "D": "full disks",
    "E": "up to six faults in sequence",
    "F": "damaged recipes, command lines and sequences of commands",
    "G": "golden losses",
    "I": "an upload thread that is stuck",
    "K": "kills at any moment, power cuts",
    "N": "numbers that are not finite",
    "O": "out of memory",
    "P": "one of several processes dies or hangs",
    "S": "stop signals, also through launchers",
    "T": "a store that is dead, slow, locked, full or replaced",
    "W": "workers that die, raise or hang; long runs",
    "X": "decompression bombs",
}
"""What is tried, by the first letter of a promise."""
BEGIN, END = "<!-- written by `make soak`, not by hand -->", "<!-- to here -->"


def table(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """A row for each promise, over all tests that count it."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in found:
        for counted in entry["promises"]:
            row = rows.setdefault((counted["id"], counted["text"]), {"trials": 0, "seeds": set(), "failed": []})
            row["trials"] += counted["trials"]
            row["seeds"] |= set(pairs(counted["seeds"]))
            row["failed"] += sorted(counted["failed"], key=lambda seed: (len(seed), seed))
    lines = ["| | guarantee | trials | failures | seeds |", "|---|---|---:|---:|---|"]
    for (id, text), row in sorted(rows.items(), key=lambda item: (_natural(item[0][0]), item[0][1])):
        seeds = ", ".join(f"{first} to {last}" if last > first else str(first) for first, last in sorted(row["seeds"]))
        failed = f"**{len(row['failed'])}**: {', '.join(row['failed'])}" if row["failed"] else "0"
        lines.append(
            f"| {id} | {text} | {row['trials']} | {failed} | {seeds or ('every case' if row['trials'] else 'none')} |"
        )
    return lines


def by_fault(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """A row for each kind of fault, for the page."""
    counts: dict[str, list[int]] = {}
    for counted in (counted for entry in found for counted in entry["promises"]):
        count = counts.setdefault(FAULTS.get(counted["id"][0], counted["id"]), [0, 0])
        count[0] += counted["trials"]
        count[1] += len(counted["failed"])
    rows = (f"| {fault} | {trials:,} | {failed} |" for fault, (trials, failed) in sorted(counts.items()))
    return ["| fault | trials | failures |", "|---|---:|---:|", *rows]


def summary(
    found: Mapping[str, Mapping[str, Any]], rows: Callable[[Iterable[Mapping[str, Any]]], list[str]] = table
) -> list[str]:
    """The table, or that by fault, and beneath it how much that was and on what."""
    entries = list(found.values())
    trials = sum(counted["trials"] for entry in entries for counted in entry["promises"])
    failures = sum(len(counted["failed"]) for entry in entries for counted in entry["promises"])
    on = sorted({f"torch {e['torch']}, Python {e['python']}, {e['cores']} cores" for e in entries})
    lines = [*rows(entries), ""]
    lines += [f"{trials} trials in {len(entries)} tests, {failures} failures; {'; '.join(on) or 'nothing was run'}."]
    lines += [f"Failed: `{test}`." for test, entry in sorted(found.items()) if entry["passed"] is False]
    lines += [f"Not seen to end: `{test}`." for test, entry in sorted(found.items()) if entry["passed"] is None]
    return lines


def write(page: Path, lines: Iterable[str]) -> None:
    """Put lines between the marks of a page."""
    text = page.read_text(encoding="utf-8")
    before, after = text.split(BEGIN, 1)[0], text.split(END, 1)[1]
    page.write_text("\n".join([before + BEGIN, "", *lines, "", END]) + after, encoding="utf-8")


def _natural(word: str) -> tuple[Any, ...]:
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", word))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, default=ROOT / "mlruns" / "soak.jsonl", help="file of the results")
    parser.add_argument("--resume", action="store_true", help="what passed by that file is not run again")
    parser.add_argument("--write", type=Path, help="a page with marks for the table")
    parser.add_argument("--table", action="store_true", help="run nothing")
    asked, words = parser.parse_known_args()
    asked.keep.parent.mkdir(parents=True, exist_ok=True)
    code = 0
    if not asked.table:
        if not asked.resume:
            asked.keep.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-m", "slow or not slow", "--soak"]
        code = subprocess.run([*command, "--promises", str(asked.keep.absolute()), *words], cwd=ROOT).returncode
        code = 0 if code == 5 else code  # nothing was left to run
    found = recorded(asked.keep)
    lines = summary(found)
    print("\n".join(lines))
    if asked.write:
        write(asked.write, summary(found, by_fault))
    return code or int(not all(entry["passed"] for entry in found.values()))


if __name__ == "__main__":
    sys.exit(main())
