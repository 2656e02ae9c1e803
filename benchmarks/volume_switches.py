"""What each advice of a speed guide for TOM500 brings here, one key of the recipe at a time.

    python benchmarks/volume_switches.py                   13 rows of 3 runs on a CPU, more on a GPU
    python benchmarks/volume_switches.py --table           prints the table of what is there
    ... --repeats 1 --samples 64                           runs of each row, and samples that each is trained on
    ... --only batch cache                                 rows with such a word in their title, beside `as shipped`

Rows are recipes/tom500.yaml, shortened, with one thing changed; what is scored, twice a run, is one case in windows
that overlap by a quarter. What the recipe has already is taken away in its row, whose title begins with `without`:
there a ratio below 1 speaks for the advice. Rows of another batch take as many samples, so that samples/s are compared
and not updates. Each run is a process of its own; repeats are the outer loop and every other one goes through the rows
backwards. Ratios are of the same repeat. The table is refused unless all runs trained on as many samples of the same
data on the same machine, and held the evaluations of their row. A finished run is found again, and not repeated; a row
whose runs fail is named, and the others go on.

samples/s are of the steps alone, the first eighth of a run left out, where things are compiled and started: what that
takes is in the time to the first log line, for kernels that inductor has kept from an earlier run much less. Wall-clock
has the evaluations in it, as often as they were held in so few samples: of a training its share is another.
On a CPU memory is the peak resident set of the whole process, without those of its loader's workers; on a GPU what the
CUDA allocator had given away at most, in which how it grows its segments does not show.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import speeds
from comparison import Row
from speeds import Measured, spread

NOTE = "volume_switches.json"
EXPERIMENT = "volume-switches"
SHIPPED = "as shipped"
CASES = 1
"""Cases that an evaluation scores."""
BATCH = 2
"""Of the recipe; wall-clock is given for 100 of its updates."""
PRECISION = "30-50 % faster, half the GPU memory"
LOADING = "10-20 %"
COMPILING = "10-20 %"
HOLDING = "5-10 % of the whole time"
BATCHES = "GPU 5-15 % busier"
NO_FIGURE = "no figure"
NOT_IN_IT = "not in it"
NAMES = {"no": "float32", "bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True)
class Switch:
    """One row: what is changed, and what the guide promised of it."""

    title: str
    promised: str
    changes: tuple[str, ...] = ()
    held: int = 2
    """Times that the evaluation is held."""
    gpu: bool = False
    """Whether it acts on a GPU alone."""
    cores: int = 1
    """Processor cores that it takes."""


def switches(samples: int, precisions: Sequence[str]) -> list[Switch]:
    """All rows; `precisions` are those of the machine. Raises ValueError for samples that do not divide.

    The recipe is in bf16 where a GPU has it, else in fp16, and on a CPU in float32.
    """
    if samples % 64 or samples < 64:
        raise ValueError(f"{samples} samples; a multiple of 64 is needed, for 8 log lines of the largest batch")
    gpu = "fp16" in precisions
    shipped = ("bf16" if "bf16" in precisions else "fp16") if gpu else "no"
    exact = "train.precision=no"
    others = [word for word in precisions if word != shipped]
    return [
        Switch(SHIPPED, "", ()),
        *(
            Switch(
                "without mixed precision (float32)" if word == "no" else f"mixed precision, {word}",
                PRECISION,
                (f"train.precision={word}",),
                gpu=word == "fp16",
            )
            for word in others
        ),
        Switch("1 worker, 2 batches ahead", LOADING, ("loader.workers=1",)),
        Switch("4 workers, 4 batches ahead each", LOADING, ("loader.workers=4", "loader.prefetch=4"), cores=5),
        Switch("compiled", COMPILING, ("train.compile=default",)),
        # On a CPU the same as `default`: it is CUDA graphs that reduce the overhead.
        Switch("compiled, reduce-overhead", COMPILING, ("train.compile=reduce-overhead",), gpu=True),
        Switch("evaluated half as often", HOLDING, (_every(samples),), held=1),
        Switch("evaluation never due", HOLDING, (_every(1000 * samples),), held=0),
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


def _every(samples: int) -> str:
    return f"evaluations={{val: {{split: val.few, every: {samples} samples, at_end: false}}}}"


def row(switch: Switch, samples: int) -> Row:
    """The recipe, shortened and changed."""
    words = {
        "train.length": f"{samples} samples",
        "train.schedule.warmup.over": f"{samples // 8} samples",
        "log.every": f"{samples // 8} samples",
        "log.system_every": "null",
        "checkpoints.every": "null",
        "best": "null",
        "data.few": str(CASES),
        "task.window.overlap": "0.25",
        "evaluations": _every(samples // 2).partition("=")[2],
    }
    # A key may be given once.
    words |= {key: value for key, _, value in (change.partition("=") for change in switch.changes)}
    return Row(switch.title, "tom500", tuple(f"{key}={value}" for key, value in words.items()))


def table(runs: Mapping[tuple[str, int], Measured], listed: Sequence[Switch]) -> str:
    """Markdown: one row per switch that has runs, median and range over its seeds.

    Raises ValueError for unequal work, and where the recipe as shipped was not run with one of the seeds.
    """
    work = speeds.refuse_unequal(runs, besides=("updates", "per epoch", "scored"))
    known = {switch.title: switch for switch in listed}
    for (title, seed), run in runs.items():
        held = len(run.held_s.get("val", ()))
        if held != known[title].held or (held and run.scored != {"val": CASES}):
            found = f"{held} evaluations of {dict(run.scored)} for {title}, seed {seed}"
            raise ValueError(f"unequal work: {found}; {known[title].held} of {CASES} are its row's")
        if (SHIPPED, seed) not in runs:
            raise ValueError(f"{title}, seed {seed}: the recipe as shipped was not run with this seed")
    hundred = 100 * BATCH
    heads = [
        "",
        "samples/s",
        f"x {SHIPPED}",
        f"wall-clock, s for {hundred} samples (100 updates as shipped), evaluations included",
        f"x {SHIPPED}",
        "GPU memory, GB" if work["device"] == "cuda" else "peak resident set, GB",
        "first log line after, s",
        "the guide promised",
        "runs",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for switch in listed:
        pairs = [(run, runs[SHIPPED, seed]) for (title, seed), run in runs.items() if title == switch.title]
        if not pairs:
            continue
        own = [run for run, _ in pairs]
        cells = [
            spread([run.rate for run in own], "{:.3g}"),
            spread([run.rate / plain.rate for run, plain in pairs], "{:.2f}"),
            spread([hundred * run.sample_s for run in own], "{:.3g}"),
            spread([plain.sample_s / run.sample_s for run, plain in pairs], "{:.2f}"),
            spread([run.memory_gb for run in own], "{:.2f}"),
            spread([run.ready_s for run in own], "{:.0f}"),
            switch.promised,
            " ".join(run.note["run"].removeprefix("tom500-") for run in own),
        ]
        lines.append(f"| {switch.title} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", describe(runs, work)])


def describe(runs: Mapping[tuple[str, int], Measured], work: Mapping[str, object]) -> str:
    """What was done alike, how far two runs of the same thing are apart, and on what machine."""
    seeds = len({seed for _, seed in runs})
    took = [seconds for run in runs.values() for seconds in run.held_s.get("val", ())]
    held = f"; an evaluation of {CASES} case took {spread(took, '{:.2g}')} s" if took else ""
    how = "One run" if seeds == 1 else f"Median and range of {seeds} runs"
    precision = next(run for (title, _), run in runs.items() if title == SHIPPED).note["machine"]["precision"]
    return (
        f"{how} a row, ratios in the same repeat, above 1 faster; each trained on {work['samples']} samples, data "
        f"{str(work['data'])[:12]}{held}. As shipped means {NAMES.get(precision, precision)}. "
        f"{speeds.circumstances(list(runs.values()), work)}"
    )


def main() -> None:
    """Train what is missing and print the table."""
    words = argparse.ArgumentParser()
    words.add_argument("--table", action="store_true", help="train nothing")
    words.add_argument("--repeats", type=int, default=3, help="runs of each row")
    words.add_argument("--samples", type=int, help="that a run is trained on, a multiple of 64: 64, on a GPU 1,280")
    words.add_argument("--only", nargs="+", metavar="WORD", help="rows with one of these words in their title")
    asked = words.parse_args()
    precisions = speeds.available()
    gpu = "fp16" in precisions
    samples = asked.samples or (1280 if gpu else 64)
    listed = switches(samples, precisions)
    without = [] if gpu else [s.title for s in switches(samples, ["no", "bf16", "fp16"]) if s.gpu]
    cores = [s.title for s in listed if s.cores > (os.cpu_count() or 1)]
    listed = [s for s in listed if s.title not in (*without, *cores)]
    if asked.only:
        listed = [s for s in listed if s.title == SHIPPED or any(word in s.title for word in asked.only)]
    rows, failed = {switch.title: row(switch, samples) for switch in listed}, []
    for seed in range(0 if asked.table else asked.repeats):
        for one in list(rows.values())[:: 1 if seed % 2 == 0 else -1]:
            if problem := speeds.train(one, seed, EXPERIMENT, NOTE):
                failed.append(problem)
    runs = {}
    for seed in range(asked.repeats):
        for title, one in rows.items():
            if (folder := speeds.found(one, seed, EXPERIMENT, NOTE)) is not None:
                runs[title, seed] = speeds.read(folder, one, NOTE)
    print(table(runs, listed) if runs else "nothing has been measured")
    for why, titles in (("they act on a GPU alone", without), ("there are too few processor cores", cores)):
        if titles:
            print(f"Left out, since {why}: {'; '.join(titles)}.")
    if failed:
        sys.exit("failed, and not in the table: " + "; ".join(failed))


if __name__ == "__main__":
    main()
