"""Does AdaDistill do what it claims, at the size that a CPU can train? Every method, three seeds, one budget.

    python benchmarks/face_methods.py            runs what is missing (a finished run is not repeated), prints the table
    python benchmarks/face_methods.py --table    prints the table of what is there

Teacher, and students of one network, number of updates, batch and schedule: alone (margin softmax with trained
centres), by feature MSE, by the teacher's own centres (AML-distill), by AdaDistill with alpha and with alpha'.
Scored on the last weights, not on the best evaluation, since there is no second set to choose on.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

from spread import spread

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
DATA = ROOT.parent / "shared" / "data"
EXPERIMENT = "face-methods"
SEEDS = (0, 1, 2)
STUDENT = "task.net={name: mobilefacenet, embedding: 128, width: 0.5}"
ALONE = [STUDENT, "task.margin={name: arcface, m: 0.3, scale: 24}", "train.length=8 epochs"]
ALONE += ["train.schedule.warmup.over=43 steps", "evaluations.lfw.every=4 epochs", "checkpoints.every=4 epochs"]
METHODS = {
    "teacher (iResNet-18 x0.25)": ("face_teacher_lfw", []),
    "student alone": ("face_teacher_lfw", ALONE),
    "feature MSE": ("adadistill_lfw", ["task.method=mse"]),
    "AML-distill": ("adadistill_lfw", ["task.method=aml"]),
    "AdaDistill, alpha": ("adadistill_lfw", ["task.alpha=plain"]),
    "AdaDistill, alpha'": ("adadistill_lfw", ["task.alpha=hard"]),
}


def main() -> None:
    if not DATA.is_dir():
        sys.exit("the real faces (../shared/data/faces_lfw112) are not here")
    os.environ.setdefault("TRAINKIT_DATA", str(DATA))
    jobs = [(method, seed) for seed in SEEDS for method in METHODS]
    if "--table" not in sys.argv:
        for method, seed in jobs:
            if finished(method, seed) is None:
                train(method, seed)
    print(table())


def words(method: str, seed: int) -> tuple[Path, list[str]]:
    """Recipe and overrides of one run. The teacher of seed 0 is the one that all students learn from."""
    recipe, changes = METHODS[method]
    return ROOT / "recipes" / f"{recipe}.yaml", [*changes, f"log.experiment={EXPERIMENT}", f"seed={seed}"]


def finished(method: str, seed: int):
    """The finished run of a method and seed, or None."""
    from trainkit import config
    from trainkit.store import Store

    path, changes = words(method, seed)
    digest = config.digest(config.load(path, changes))
    runs = [f for f in Store.locate().runs() if (f.info().recipe_hash, f.info().status) == (digest, "FINISHED")]
    return runs[-1] if runs else None


def train(method: str, seed: int) -> None:
    path, changes = words(method, seed)
    print(f"== {method}, seed {seed}", flush=True)
    subprocess.run([sys.executable, str(ROOT / "trainkit" / "run.py"), str(path), *changes], check=True)


def table() -> str:
    from trainkit import journal

    lines = ["| method | accuracy | AUC | seeds | samples/s | runs |", "|---|---|---|---|---|---|"]
    pixels = None
    for method in METHODS:
        runs = [run for seed in SEEDS if (run := finished(method, seed)) is not None]
        if not runs:
            continue
        histories = [journal.read(run.journal) for run in runs]
        accuracy = [h.series("lfw/accuracy")[1][-1] for h in histories]
        auc = [h.series("lfw/auc")[1][-1] for h in histories]
        rate = [h.series("final/speed/samples_per_s")[1][-1] for h in histories]
        pixels = pixels or histories[0].series("pixels/lfw/accuracy")[1][0]
        names = " ".join(run.name.removeprefix(f"{METHODS[method][0]}-") for run in runs)
        lines.append(
            f"| {method} | {spread(accuracy)} | {spread(auc)} | {len(runs)} | {statistics.mean(rate):.0f} | {names} |"
        )
    return "\n".join([*lines[:2], f"| pixels | {pixels:.3f} | | | | |" if pixels else "", *lines[2:]])


if __name__ == "__main__":
    main()
