"""Measure trainkit on a GPU, and write docs/project/gpu.md; the claims go to docs/project/claims.md.

python -m benchmarks.gpu                 all parts
python -m benchmarks.gpu equality        one: equality, memory, speed, claims
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PARTS = {"equality": ("equality",), "memory": ("memory",), "speed": ("speed", "several"), "claims": ()}
"""Modules of each part; the claims of guides have a command and a page of their own."""
NEEDED = ("torch", "accelerate", "pydantic", "yaml", "numpy", "safetensors", "timm", "psutil", "filelock")
"""Packages without which nothing can be measured; others are asked for by the rows that need them."""
LIMIT = 420
"""Seconds after which a part begins no further row."""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "project" / "gpu.md"
INTRODUCTION = """# Measurements on a GPU

Equality with the CPU, memory, and speed against other implementations, as measured by `make gpu`. A part that has not
been run says so. `make gpu PART=claims` measures the guides' claims about GPUs into [claims.md](claims.md).

To run it: `make gpu PART=equality` (or `memory`, `speed`) runs one part in about 8 minutes; if it stops before the end,
run the same command again to continue. Without `PART` it runs all parts. Results of the same machine, versions and code
are kept in `build/measured/` until you delete that folder. It uses the Python you give it
(`make gpu PYTHON=python3.12`; Python 3.11 to 3.13, torch 2.11 or later, and trainkit's dependencies), installs nothing,
and needs neither a network nor data. A missing package, such as that of another implementation, is reported in its row.
Without a GPU it measures nothing. This page is generated; do not edit.
"""
NOTHING = "Not measured yet: no GPU was available. `tests/benchmarks/test_gpu_*.py` run its rows on a CPU."


def main(words: list[str]) -> int:
    """Measure a part, or all; returns 0, 1 where a row fails, 2 where the command is wrong or a package is missing."""
    parts = list(PARTS) if not words else words[:1]
    if len(words) > 1 or parts[0] not in PARTS:
        print(f"error: PART is {' '.join(words)!r}; expected one of {', '.join(PARTS)}", file=sys.stderr)
        return 2
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        found = f"{sys.executable} has no {', '.join(missing)}"
        print(f"error: {found}; use another one: make gpu PYTHON=...", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        print("0 tests: no GPU available, nothing measured")
        return 0
    if not words:  # each in a process of its own: switches and memory of one are none of the next one's
        return max(subprocess.run([sys.executable, "-m", "benchmarks.gpu", part]).returncode for part in parts)
    if words == ["claims"]:
        return subprocess.run([sys.executable, "-m", "benchmarks.claims"], cwd=PAGE.parents[2]).returncode
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from benchmarks import results
    from benchmarks.gpu.scale import Scale

    modules = {name: importlib.import_module(f"benchmarks.gpu.{name}") for names in PARTS.values() for name in names}
    scale, on, failed = Scale(device=torch.device("cuda", 0), tiny=False), results.machine(), 0
    for name in PARTS[parts[0]]:
        title = modules[name].TITLE
        rows, left = results.measure(name, modules[name].checks(scale), on, limit=LIMIT)
        shown = results.table(("quantity", "expected", "measured", "result"), on, rows, left)
        write({title: "\n".join([f"## {title}", "", *shown]) + "\n"}, [module.TITLE for module in modules.values()])
        failed += sum(row.result == results.FAILS for row in rows)
        print(f"{title}: {len(rows)} rows; docs/project/gpu.md", flush=True)
        if left == results.BROKEN:
            os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *words])
        if left:
            print(f"not complete ({left}): run the same command again to continue")
            break
    return 1 if failed else 0


def write(sections: Mapping[str, str], titles: Sequence[str], page: Path = PAGE) -> None:
    """Write sections of the page, by title; others stay as they are, and one that was never written says so."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    before = {part.partition("\n")[0]: f"## {part.rstrip()}\n" for part in text.split("\n## ")[1:]}
    all_ = (sections.get(title) or before.get(title) or f"## {title}\n\n{NOTHING}\n" for title in titles)
    page.write_text("\n".join([INTRODUCTION, *all_]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
