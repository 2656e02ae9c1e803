"""The built-in faces: do they order as they should, and does a run on two processes score like one on one?

    python benchmarks/sample_set.py            runs what is missing, prints the table
    python benchmarks/sample_set.py --table    prints the table of what is there

Teacher and student as shipped, three seeds each; the student on one process and on two (gloo), at equal global batch.
"""

from __future__ import annotations

import comparison
from comparison import Row

COLUMNS = {"accuracy": "sample/accuracy", "AUC": "sample/auc"}
ROWS = [
    Row("teacher", "face_teacher", config="cpu"),
    Row("student, one process", "adadistill", config="cpu"),
    Row("student, two processes", "adadistill", config="cpu_2proc"),
]

if __name__ == "__main__":
    comparison.run(ROWS, COLUMNS, "sample-set", reference="pixels")
