"""Train, stop and resume in one process, as commands of `trainkit/run.py` do one after the other.

    python stop_and_resume.py STEP WORDS...

Training is told to stop at STEP by SIGTERM. Exit code 0 where the first command ended with 143 and the second with 0.
"""

from __future__ import annotations

import os
import sys

import sitecustomize


def main(step: str, *words: str) -> int:
    assert os.environ["HIDDEN"] == sitecustomize.HIDDEN, "else nothing is hidden"
    from unpainted_figures import leave_unpainted

    from trainkit.cli.train import run

    leave_unpainted()
    codes = []
    for more in ([f"task.signal_at={step}"], ["--resume", f"task.signal_at={step}"]):
        try:
            # The thread of the first command that hears signals lives on, and would end the second one.
            run(args=[*words, *more, "limits.stop=10 min"], standalone_mode=True)
        except SystemExit as leaving:
            codes.append(leaving.code)
    print(f"exit codes {codes}", file=sys.stderr)
    return int(codes != [143, 0])


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    from trainkit.environment.process import leave

    leave(code)
