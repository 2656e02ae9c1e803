"""Train a recipe: accelerate launch trainkit/run.py RECIPE [key=value ...] [--check] [--resume [RUN]]."""

import os
import sys
import traceback
from pathlib import Path

# Run as a file, Python puts this folder first on the path: `import trainkit` would fail, and every module in here would
# hide a library of the same name.
_here = Path(__file__).resolve().parent
if sys.path and Path(sys.path[0] or ".").resolve() == _here:
    sys.path[0] = str(_here.parent)

# Idle OpenMP threads sleep instead of spinning, unless told otherwise. On two cores the sample set's teacher learns at
# 255 samples/s so and at 275 when they spin; beside one other busy process at 98 instead of 37.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if __name__ == "__main__":  # workers that are not forked import this file too
    from trainkit.environment import process

    process.die_with_parent()  # before anything that takes time is imported

    from trainkit.cli.train import run

    try:
        run()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    process.leave(code)
