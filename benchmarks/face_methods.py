"""Does AdaDistill do what it claims, at the size that a CPU can train? Every method, three seeds, one budget.

    python benchmarks/face_methods.py            runs what is missing (a finished run is not repeated), prints the table
    python benchmarks/face_methods.py --table    prints the table of what is there

Teacher, and students of one model, number of steps, batch and schedule: alone (margin softmax with trained
centres), by feature MSE, by the teacher's own centres (AML-distill), by AdaDistill with alpha and with alpha'.
Scored on the last weights, not on the best evaluation, since there is not a second set to choose on.
"""

from __future__ import annotations

import comparison
from comparison import Row

COLUMNS = {"accuracy": "lfw/accuracy", "AUC": "lfw/auc"}
ALONE = (
    "task.net={name: mobilefacenet, embedding: 128, width: 0.5}",
    "task.margin={name: arcface, m: 0.3, scale: 24}",
    "train.length=8 epochs",
    "train.schedule.warmup.over=43 steps",
    "evaluations.lfw.every=4 epochs",
    "checkpoints.every=4 epochs",
)
ROWS = [
    # The teacher of seed 0 is the one that all students learn from.
    Row("teacher (iResNet-18 x0.25)", "face_teacher_lfw"),
    Row("student alone", "face_teacher_lfw", ALONE),
    Row("feature MSE", "adadistill_lfw", ("task.method=mse",)),
    Row("AML-distill", "adadistill_lfw", ("task.method=aml",)),
    Row("AdaDistill, alpha", "adadistill_lfw", ("task.alpha=plain",)),
    Row("AdaDistill, alpha'", "adadistill_lfw", ("task.alpha=hard",)),
]

if __name__ == "__main__":
    comparison.need_data()
    comparison.run(ROWS, COLUMNS, "face-methods", reference="pixels")
