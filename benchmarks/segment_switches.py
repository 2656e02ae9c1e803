"""Measure the advice of a speed guide for semantic segmentation, one recipe key at a time.

    python benchmarks/segment_switches.py                  15 rows of 3 runs on a CPU, more on a GPU
    python benchmarks/segment_switches.py --table          prints the table of what is there
    ... --repeats 1 --samples 256                          runs of each row, and samples that each is trained on
    ... --only batch worker                                rows with such a word in their title, beside `as shipped`

Rows are recipes/segment.yaml, shortened, with one thing changed; all drawn images of `val` are scored twice a run.
What the recipe has already is taken away in its row, whose title begins with `without`: there a ratio below 1 speaks
for the advice. How runs are made, compared and refused is in switches.py.

The guide adds up two times in its training loop and finds neither: its first stopwatch starts when the batch is there
already, and its second stops while the GPU still works. Here a step is the whole of it, and waiting is the part of it
in which the loop stood still until a batch had been read, both by the run's own clock: with workers it is what they did
not hide. Below the table stands what reading a crop takes: with its distance map computed once, computed each time (for
which there is no key, since nobody should want it) or left out, and with images that are kept as their files have
them in place of as pixels, which makes other data of them by its digest and so no row.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import comparison
import speeds
import switches as shared
from speeds import Measured
from switches import NO_FIGURE, NOT_IN_IT, SHIPPED, Column, Switch

PICTURES = 60
"""Images that an evaluation scores: all of `val`."""
PRECISION = "2 x, half the GPU memory"
LOADING = "20-30 %"
CUDNN = "5-10 %"
BATCHES = "10-20 %"
PROFILES = {
    "high performance": ("2-3 x", 64, 64, 8, 2),
    "memory-limited": ("64 in the memory of 32", 64, 32, 8, 2),
    "extreme": ("more", 128, 128, 16, 4),
}
"""The three profiles of the guide: what it promises, batch, micro-batch, workers, batches that each reads ahead."""
ACCUMULATION = "no more memory"


def switches(samples: int, precisions: Sequence[str]) -> list[Switch]:
    """All rows; `precisions` are those of the machine. Raises ValueError for samples that do not divide."""
    STUDY.check(samples)
    several = f"evaluations={replace(STUDY, evaluated='split: val.msf, batch_size: 20').every(samples // 2)}"
    six = "data.eval_scales=[0.5, 0.75, 1.0, 1.25, 1.5, 1.75]"
    maps = ("data.distance=null", "task.objective.near=null")
    return [
        Switch(SHIPPED, "", ()),
        *shared.precision_rows(precisions, PRECISION),
        Switch("1 worker, 2 batches ahead", LOADING, ("loader.workers=1",)),
        Switch("2 workers, 2 batches ahead each", LOADING, ("loader.workers=2",), cores=2),
        Switch("1 worker, 4 batches ahead", NO_FIGURE, ("loader.workers=1", "loader.prefetch=4")),
        Switch("without pinned memory", LOADING, ("loader.pin=false",), gpu=True),
        Switch("deterministic kernels alone", CUDNN, ("device.deterministic=true",), gpu=True),
        Switch("without cudnn.benchmark", CUDNN, ("device.cudnn_benchmark=false",), gpu=True),
        Switch("micro-batches of 4", ACCUMULATION, ("train.micro_batch=4",)),
        Switch("batches of 16", BATCHES, ("train.batch_size=16",)),
        Switch("batches of 32", BATCHES, ("train.batch_size=32",)),
        *shared.compiled_rows(NO_FIGURE),
        Switch("without distance maps and what they weigh", NO_FIGURE, maps),
        *STUDY.evaluation_rows(samples, NO_FIGURE),
        Switch("evaluated at three scales, mirrored", NO_FIGURE, (several,)),
        Switch("evaluated at six scales, mirrored", NO_FIGURE, (several, six)),
        Switch("without channels_last", NOT_IN_IT, ("device.channels_last=false",)),
        *(map(_profile, PROFILES) if samples % (shared.LINES * 128) == 0 else ()),
    ]


def _profile(name: str) -> Switch:
    """A profile as docs/reference/data/segmentation.md has it, with as many workers as cores at most."""
    promised, batch, micro, workers, prefetch = PROFILES[name]
    changes = {
        "train.precision": "fp16",
        "train.batch_size": batch,
        "train.micro_batch": micro,
        "loader.workers": min(workers, os.cpu_count() or 1),
        "loader.prefetch": prefetch,
    }
    return Switch(f"profile: {name}", promised, tuple(f"{key}={value}" for key, value in changes.items()), gpu=True)


def _evaluation(run: Measured) -> float | None:
    took = run.held_s.get("val", ())
    return statistics.mean(took) if took else None


STUDY = shared.Study(
    recipe="segment",
    note="segment_switches.json",
    experiment="segment-switches",
    batch=8,
    scored=PICTURES,
    unit="images",
    largest=32,
    samples=(256, 10240),
    evaluated="split: val, batch_size: 20",
    words={},
    listed=switches,
    columns=(
        Column("step, ms", lambda run: 1e3 * run.step_s, "{:.4g}"),
        Column("of it waiting for data, ms", lambda run: 1e3 * run.waiting_s, "{:.2g}"),
        Column("an evaluation, s", _evaluation, "{:.2g}"),
    ),
)


class Computed:
    """Distance maps that are computed whenever one is read: what keeping them is compared with."""

    def __init__(self, kept: object, masks: object):
        self.settings, self._masks = kept.settings, masks

    def levels(self, row: int) -> object:
        """As `Distances.levels`: uint8 (height, width), in steps."""
        import numpy as np

        from trainkit.data.storage import boundary_distance

        map_ = boundary_distance.from_mask(self._masks.mask(row), self.settings)
        return np.floor(map_ / np.float32(boundary_distance.STEP) + np.float32(0.5)).astype(np.uint8)


def reading(rounds: int = 5, samples: int = 48) -> str:
    """What reading a crop takes, interleaved, in CPU time of this process, as a sentence.

    Raises ValueError where two ways to read the same thing do not read the same.
    """
    import numpy as np

    from trainkit.config import loader

    row = STUDY.row(Switch(SHIPPED, ""), STUDY.samples[0])
    data = loader.load(comparison.recipe(row), row.changes).data
    kept = data.open(0).train
    scenes = kept.scenes
    sides = {
        "as shipped": kept,
        "distance map computed each time": replace(
            kept, scenes=replace(scenes, distances=Computed(scenes.distances, scenes.masks))
        ),
        "without distance map": replace(kept, scenes=replace(scenes, distances=None)),
        "images kept encoded": replace(data, store="encoded").open(0).train,
    }
    rows = np.arange(min(samples, kept.size))
    first = {title: split.fetch(rows, 0) for title, split in sides.items()}
    for title, batch in first.items():
        for key, values in batch.items():
            if not (values == first["as shipped"][key]).all():
                raise ValueError(f"{key} is not as shipped: {title}")
    took: dict[str, list[float]] = {title: [] for title in sides}
    for epoch in range(1, 1 + rounds):
        for title, split in sides.items():
            start = time.process_time()
            split.fetch(rows, epoch)
            took[title].append(1e3 * (time.process_time() - start) / len(rows))
    parts = [f"{title} {speeds.spread(values, '{:.2f}')}" for title, values in took.items()]
    how = f"CPU ms, median and range of {rounds} interleaved rounds of {len(rows)}"
    return f"Reading a crop with its mask, {how}: {'; '.join(parts)}."


if __name__ == "__main__":
    shared.main(STUDY, reading)
