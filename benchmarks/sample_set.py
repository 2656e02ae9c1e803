"""The built-in sample set: does it order as it should, and does a run on two processes score like one on one?

    python benchmarks/sample_set.py            runs what is missing, prints the tables
    python benchmarks/sample_set.py --table    prints the tables of what is there

Teacher and student as shipped, three seeds each; the student on one process and on two (gloo), at equal global batch.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

from spread import spread

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SEEDS = (0, 1, 2)
ROWS = {
    "teacher": ("face_teacher", "cpu"),
    "student, one process": ("adadistill", "cpu"),
    "student, two processes": ("adadistill", "cpu_2proc"),
}


def main() -> None:
    if "--table" not in sys.argv:
        for row in ROWS:
            for seed in SEEDS:
                if finished(row, seed) is None:
                    train(row, seed)
    print(table())


def words(row: str, seed: int) -> tuple[Path, list[str]]:
    return ROOT / "recipes" / f"{ROWS[row][0]}.yaml", ["log.experiment=sample-set", f"seed={seed}"]


def finished(row: str, seed: int):
    """The finished run of a row and seed, or None. Runs on one process and two differ in what their checkpoints say."""
    import json

    from trainkit import checkpoint, config
    from trainkit.store import Store

    path, changes = words(row, seed)
    digest = config.digest(config.load(path, changes))
    processes = 2 if ROWS[row][1] == "cpu_2proc" else 1
    for run in reversed(Store.locate().runs()):
        if (run.info().recipe_hash, run.info().status) == (digest, "FINISHED"):
            newest, _ = checkpoint.newest_valid(run.checkpoints)
            if json.loads((newest / checkpoint.STATE).read_text())["identity"]["processes"] == processes:
                return run
    return None


def train(row: str, seed: int) -> None:
    path, changes = words(row, seed)
    print(f"== {row}, seed {seed}", flush=True)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    launcher += [str(ROOT / "accelerate_configs" / f"{ROWS[row][1]}.yaml"), str(ROOT / "trainkit" / "run.py")]
    subprocess.run([*launcher, str(path), *changes], check=True)


def table() -> str:
    from trainkit import journal

    lines = ["| | accuracy | AUC | samples/s | runs |", "|---|---|---|---|---|"]
    for row in ROWS:
        runs = [run for seed in SEEDS if (run := finished(row, seed)) is not None]
        if not runs:
            continue
        histories = [journal.read(run.journal) for run in runs]
        if len(lines) == 2:
            pixels = [histories[0].series(f"pixels/sample/{metric}")[1][0] for metric in ("accuracy", "auc")]
            lines.append(f"| pixels | {pixels[0]:.3f} | {pixels[1]:.3f} | | |")
        accuracy, auc = ([h.series(f"sample/{metric}")[1][-1] for h in histories] for metric in ("accuracy", "auc"))
        rate = statistics.mean(h.series("final/speed/samples_per_s")[1][-1] for h in histories)
        names = " ".join(run.name.removeprefix(f"{ROWS[row][0]}-") for run in runs)
        lines.append(f"| {row} | {spread(accuracy)} | {spread(auc)} | {rate:.0f} | {names} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
