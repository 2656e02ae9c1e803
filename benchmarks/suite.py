"""All contests, one after the other, and what they say of the targets.

    python benchmarks/suite.py                              3 rounds each
    ... --rounds 7 --write docs/project/performance.md              what documents cite
    ... --only step inputs                                  some of them

Each is a script of its own (`python benchmarks/step.py --help`); `contest.py` says how figures come about. Interrupted,
`--resume` takes what was measured from the folder of `--keep`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contest import BUSY, ROUNDS, Contest

HERE = Path(__file__).resolve().parent
SUBJECTS = (
    "margin_head",
    "step",
    "gates",
    "shuffle",
    "samplers",
    "inputs",
    "volume_reading",
    "ranking",
    "teacher",
    "checkpoints",
    "tracking_cost",
    "startup",
    "steadiness",
    "growth",
)
"""Modules of this folder with a `CONTEST`, in the order of the document."""
HEAD = """# Performance

Ratios to other ways of doing the same work, measured side by side in one run; written by `make bench-full` and never by
hand. A figure is the median over rounds, a ratio the median of ratios within a round, with its range; where sides take
turns, that of a round is the median of its turns. Every process runs one side of one case once. What claims to do the
same work has proved it, by equal weights or equal samples.
"""


def subject(name: str) -> Contest:
    """The contest of a module."""
    return importlib.import_module(name).CONTEST


def summary(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Two tables over all subjects: against each peer, and of each target."""
    peers = ["## Against each peer", "", "| what | side | peer | times as good | range |", "|---|---|---|---|---|"]
    aims = ["## Targets", "", "| what | target | measured | |", "|---|---|---|---|"]
    for name, figures in found.items():
        made = subject(name)
        if figures["unequal"]:
            peers.append(f"| {made.title} | | | the sides did not do the same work | |")
            continue
        title = made.title + (" (busy machine: no result)" if figures["busy"] > BUSY else "")
        for case, *row in made.standings(figures):
            peers.append(f"| {' | '.join([': '.join(filter(None, (title, case))), *row])} |")
        aims += [f"| {title}: {' | '.join(row)} |" for row in made.aims(figures)]
    return [*peers, "", *aims]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--keep", type=Path, default=Path("mlruns") / "bench", help="folder of the figures")
    parser.add_argument("--resume", action="store_true", help="what lies there is not measured again")
    parser.add_argument("--write", type=Path, help="a document, of all that lies in that folder")
    asked = parser.parse_args()
    asked.keep.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in asked.only:
        kept = asked.keep / f"{name}.json"
        rounds = max(1, round(subject(name).share * asked.rounds))
        if not (asked.resume and kept.is_file() and json.loads(kept.read_text("utf-8"))["rounds"] >= rounds):
            command = [sys.executable, str(HERE / f"{name}.py"), "--rounds", str(rounds), "--json", str(kept)]
            began = time.monotonic()
            failed |= subprocess.run(command).returncode
            print(f"\n{name} took {time.monotonic() - began:.0f} s\n", flush=True)
    kept = {name: asked.keep / f"{name}.json" for name in (SUBJECTS if asked.write else asked.only)}
    found = {name: json.loads(path.read_text("utf-8")) for name, path in kept.items() if path.is_file()}
    print("\n".join(summary(found)))
    if asked.write:
        parts = [HEAD, *summary(found), ""]
        for name, figures in found.items():
            parts += ["\n".join([*subject(name).lines(figures), "", f"`python benchmarks/{name}.py`"]), ""]
        asked.write.write_text("\n".join(parts), encoding="utf-8")
    return failed


if __name__ == "__main__":
    sys.exit(main())
