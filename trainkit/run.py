"""Train a recipe: accelerate launch trainkit/run.py RECIPE [key=value ...] [--check] [--resume [RUN]]."""

import sys
from pathlib import Path

# Run as a file, Python puts this folder first on the path: `import trainkit` would fail, and every module in here would
# hide a library of the same name.
_here = Path(__file__).resolve().parent
if sys.path and Path(sys.path[0] or ".").resolve() == _here:
    sys.path[0] = str(_here.parent)

from trainkit.cli import run  # noqa: E402

if __name__ == "__main__":
    run()
