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
from pathlib import Path

PARTS = {"equality": ("equality",), "memory": ("memory",), "speed": ("speed", "several"), "claims": ()}
"""Modules of each part; the claims of guides have a command and a page of their own."""
NEEDED = ("torch", "accelerate", "pydantic", "yaml", "numpy", "safetensors", "timm", "psutil", "filelock")
"""Packages without which nothing can be measured; others are asked for by the rows that need them."""


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
        command = [sys.executable, "-m", "benchmarks.claims", "--write", "docs/project/claims.md"]
        return subprocess.run(command, cwd=Path(__file__).resolve().parents[2]).returncode
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from benchmarks.gpu import report

    modules = {name: importlib.import_module(f"benchmarks.gpu.{name}") for names in PARTS.values() for name in names}
    titles = [module.TITLE for module in modules.values()]
    scale, failed = report.Scale(device=torch.device("cuda", 0), tiny=False), 0
    for name in PARTS[parts[0]]:
        on, rows, left = report.measure(name, modules[name], scale)
        report.write({modules[name].TITLE: report.section(modules[name].TITLE, on, rows, left)}, titles)
        failed += sum(row.result == "fails" for row in rows)
        print(f"{modules[name].TITLE}: {len(rows)} rows; docs/project/gpu.md", flush=True)
        if left == report.BROKEN:
            os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *words])
        if left:
            print(f"not complete ({left}): run the same command again to continue")
            break
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
