"""Measure the advice of a speed guide for TOM500, one recipe key at a time.

    python benchmarks/volume_switches.py                   13 rows of 3 runs on a CPU, more on a GPU
    python benchmarks/volume_switches.py --table           prints the table of what is there
    ... --repeats 1 --samples 64                           runs of each row, and samples that each is trained on
    ... --only batch cache                                 rows with such a word in their title, beside `as shipped`

Rows are recipes/tom500.yaml, shortened, with one thing changed; what is scored, twice a run, is one case in windows
that overlap by a quarter. What the recipe has already is taken away in its row, whose title begins with `without`:
there a ratio below 1 speaks for the advice. How runs are made, compared and refused is in switches.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import switches as shared
from comparison import Row
from speeds import Measured
from switches import NO_FIGURE, NOT_IN_IT, SHIPPED, Switch

CASES = 1
"""Cases that an evaluation scores."""
PRECISION = "30-50 % faster, half the GPU memory"
LOADING = "10-20 %"
COMPILING = "10-20 %"
HOLDING = "5-10 % of the whole time"
BATCHES = "GPU 5-15 % busier"


def switches(samples: int, precisions: Sequence[str]) -> list[Switch]:
    """All rows; `precisions` are those of the machine. Raises ValueError for samples that do not divide."""
    STUDY.check(samples)
    exact = "train.precision=no"
    return [
        Switch(SHIPPED, "", ()),
        *shared.precision_rows(precisions, PRECISION),
        Switch("1 worker, 2 batches ahead", LOADING, ("loader.workers=1",)),
        Switch("4 workers, 4 batches ahead each", LOADING, ("loader.workers=4", "loader.prefetch=4"), cores=5),
        *shared.compiled_rows(COMPILING),
        *STUDY.evaluation_rows(samples, HOLDING),
        Switch("no evaluation", HOLDING, ("evaluations={}",), held=0),
        Switch("without mixed precision and TF32", NO_FIGURE, (exact, "device.tf32=false"), gpu=True),
        Switch("without cudnn.benchmark", NO_FIGURE, ("device.cudnn_benchmark=false",), gpu=True),
        Switch("without expandable segments", NO_FIGURE, ("device.expandable_segments=false",), gpu=True),
        Switch("batches of 4", BATCHES, ("train.batch_size=4",)),
        Switch("batches of 8", BATCHES, ("train.batch_size=8",)),
        Switch("cache disk", NO_FIGURE, ("data.cache=disk",)),
        Switch("cache ram", NO_FIGURE, ("data.cache=ram",)),
        Switch("cache device", NO_FIGURE, ("data.cache=device",)),
        Switch("without channels_last", NOT_IN_IT, ("device.channels_last=false",)),
    ]


STUDY = shared.Study(
    recipe="tom500",
    note="volume_switches.json",
    experiment="volume-switches",
    batch=2,
    scored=CASES,
    unit="case",
    largest=8,
    samples=(64, 1280),
    evaluated="split: val.few",
    words={"data.few": str(CASES), "task.window.overlap": "0.25"},
    listed=switches,
)


def row(switch: Switch, samples: int) -> Row:
    """The recipe, shortened and changed."""
    return STUDY.row(switch, samples)


def table(runs: Mapping[tuple[str, int], Measured], listed: Sequence[Switch]) -> str:
    """Markdown of the runs that are there. Raises ValueError as `Study.table` does."""
    return STUDY.table(runs, listed)


if __name__ == "__main__":
    shared.main(STUDY)
