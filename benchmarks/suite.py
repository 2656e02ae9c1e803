"""All contests, one after the other, and what they say of the targets.

    python benchmarks/suite.py                              3 rounds each
    ... --rounds 7 --write docs/performance.md              what documents cite
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
from pathlib import Path

import contest
from contest import Contest

HERE = Path(__file__).resolve().parent
SUBJECTS = (
    "margin_head",
    "step",
    "gates",
    "shuffle",
    "inputs",
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
hand. A figure is the median over rounds, a ratio the median of ratios within a round, with its range; every process
runs one side of one case once. What claims to do the same work has proved it, by equal weights or equal samples.
"""


def subject(name: str) -> Contest:
    """The contest of a module."""
    return importlib.import_module(name).CONTEST


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=contest.ROUNDS)
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--keep", type=Path, default=Path("mlruns") / "bench", help="folder of the figures")
    parser.add_argument("--resume", action="store_true", help="what lies in that folder is not measured again")
    parser.add_argument("--write", type=Path, help="a document, of all that lies in that folder")
    asked = parser.parse_args()
    asked.keep.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in asked.only:
        kept = asked.keep / f"{name}.json"
        if not (asked.resume and kept.is_file()):
            command = [sys.executable, str(HERE / f"{name}.py"), "--rounds", str(asked.rounds), "--json", str(kept)]
            failed |= subprocess.run(command).returncode
            print()
    if asked.write:
        parts = [HEAD]
        for name in SUBJECTS:
            if (kept := asked.keep / f"{name}.json").is_file():
                found = json.loads(kept.read_text("utf-8"))
                parts += ["\n".join([*subject(name).lines(found), "", f"`python benchmarks/{name}.py`"]), ""]
        asked.write.write_text("\n".join(parts), encoding="utf-8")
    return failed


if __name__ == "__main__":
    sys.exit(main())
