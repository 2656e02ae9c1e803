"""Measure the cost of ConvNeXt relative to the baseline, and the gain of AMP: the table of an eye-state guide.

    python benchmarks/eye_speed.py            whole trainings: epoch time, samples/s, memory, and the scores beside them
    python benchmarks/eye_speed.py --quick    60 steps a run, repeated: speeds alone
    python benchmarks/eye_speed.py --gates    what an evaluation costs between its gates
    ... --table                               prints the tables of what is there
    ... --repeats 5 --channels 64             runs of each row, and the width of both models
    ... --precisions no                       FP32 alone: on CPUs without bf16 instructions AMP takes ten times as long

Rows are recipes/eye_state.yaml with another model and precision. Each run is a process of its own; repeats are the
outer loop and every other one goes through the rows backwards, so that neither side always runs first. The table is
refused unless all runs made as many steps of as many samples of the same data, on the same machine, and scored each
sample of the same sets once. A finished run is found again by the hash of its recipe, and not repeated.

On a GPU AMP is fp16 and, where it has it, bf16; on a CPU it is bf16 autocast. Memory is what the CUDA allocator held
at most, on a CPU the peak resident set of the whole process: libraries, data, evaluations and figures too.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import timeit
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import speeds
from comparison import Row
from speeds import Measured, refuse_unequal, spread

NETS = {"ConvNeXt": "eye_convnext", "baseline": "eye_baseline"}
SCORES = {"F1": "val/ema/f1", "KS": "separation/ema/ks", "Fisher": "separation/ema/fisher"}
"""Of the EMA weights, at the end."""
LINES = "log.every=10 steps"
SHORT = (
    "train.length=60 steps",
    "train.schedule.warmup.over=10 steps",
    "checkpoints.every=null",
    "evaluations={val: {batch_size: 64}}",
)
# What a gate costs does not depend on the batch: in a small one, and many steps, it would show most.
GATED = ("train.batch_size=8", "train.length=300 steps", *SHORT[1:])
NOT_DUE = "evaluations={val: {batch_size: 64}, separation: {split: val.separation, every: 10 epochs, at_end: false}}"
NOTE = "eye_speed.json"


def measure(history: Any, note: Mapping[str, Any]) -> Measured:
    """What a run did, with its scores. Raises ValueError when its journal says too little."""
    return speeds.measure(history, note, SCORES)


def table(runs: Mapping[tuple[str, int], Measured], shown: Sequence[str] = tuple(SCORES)) -> str:
    """Markdown: one row per title, median and range over its seeds. Raises ValueError for unequal work.

    `shown` are the scores beside the speeds, where every run has them.
    """
    work = refuse_unequal(runs)
    seeds = {title: [seed for name, seed in runs if name == title] for title, _ in runs}
    if len({tuple(sorted(found)) for found in seeds.values()}) > 1:
        raise ValueError(f"unequal work: the rows have not the same seeds: {seeds}")
    cuda = work["device"] == "cuda"
    scores = [score for score in shown if all(score in run.scores for run in runs.values())]
    memory = "GPU memory, GB" if cuda else "peak resident set, GB"
    heads = [
        "",
        "epoch, s",
        "wall-clock per epoch, s",
        "samples/s",
        "in the fastest window",
        "x FP32",
        memory,
        *scores,
        "runs",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    slower = []
    for title, found in seeds.items():
        measured = [runs[title, seed] for seed in found]
        plain = [runs[f"{title.split(',')[0]}, FP32", seed] for seed in found]
        ratios = [m.rate / p.rate for m, p in zip(measured, plain, strict=True)]
        if statistics.median(ratios) < 1:
            slower.append(title)
        cells = [
            spread([m.epoch_s for m in measured], "{:.2f}"),
            spread([m.wall_epoch_s for m in measured], "{:.2f}"),
            spread([m.rate for m in measured], "{:.0f}"),
            spread([m.batch / m.step_least_s for m in measured], "{:.0f}"),
            spread(ratios, "{:.2f}"),
            spread([m.memory_gb for m in measured], "{:.2f}"),
            *(spread([m.scores[score] for m in measured], "{:.3f}") for score in scores),
            " ".join(m.note["run"].removeprefix("eye_state-") for m in measured),
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    said = f" Slower than FP32 here: {'; '.join(slower)}." if slower else ""
    return "\n".join([*lines, "", describe(list(runs.values()), work) + said])


def gate_table(runs: Mapping[tuple[str, int], Measured], asking_ns: Mapping[str, float]) -> str:
    """Markdown: seconds of a step without and with an evaluation that is not due, and their difference in pairs."""
    # Held evaluations would differ if the gate had opened.
    work = refuse_unequal(runs)
    without, with_gate = dict.fromkeys(title for title, _ in runs)
    seeds = [seed for title, seed in runs if title == without]
    columns: dict[str, Callable[[Measured], float]] = {
        "step, ms": lambda m: 1e3 * m.step_s,
        "median step, ms": lambda m: 1e3 * m.step_p50_s,
        "in the fastest window, ms": lambda m: 1e3 * m.step_least_s,
        "wall-clock per step, ms": lambda m: 1e3 * m.wall_s,
    }
    lines = [f"| | {' | '.join(columns)} | asking whether something is due, ns |", "|---" * (len(columns) + 2) + "|"]
    for title in (without, with_gate):
        cells = [spread([of(runs[title, seed]) for seed in seeds], "{:.2f}") for of in columns.values()]
        lines.append(f"| {title} | {' | '.join(cells)} | {asking_ns[title]:.0f} |")
    cells, beyond = [], []
    for title, of in columns.items():
        mean, half = interval([of(runs[with_gate, seed]) - of(runs[without, seed]) for seed in seeds])
        cells.append(f"{mean:+.2f} ± {half:.2f}")
        if abs(mean) > half:
            beyond.append(title)
    lines.append(f"| difference | {' | '.join(cells)} | {asking_ns[with_gate] - asking_ns[without]:+.0f} |")
    verdict = f"NOT within noise in {'; '.join(beyond)}" if beyond else "within noise"
    found = f"Differences are {verdict}: mean and 95 % interval over {len(seeds)} pairs."
    return "\n".join([*lines, "", f"{found} {describe(list(runs.values()), work)}"])


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval by Student's t. Raises ValueError for fewer than 2."""
    from scipy import stats

    if len(differences) < 2:
        raise ValueError(f"{len(differences)} pairs; 2 or more are needed")
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.mean(differences), float(stats.t.ppf(0.975, len(differences) - 1)) * error


def describe(runs: Sequence[Measured], work: Mapping[str, Any]) -> str:
    """What was done alike, and on what, in a few sentences."""
    repeats = len(runs) // max(1, len({run.note["title"] for run in runs}))
    scored = ", ".join(f"{name} {count}" for name, count in work["scored"].items())
    how = "One run" if repeats == 1 else f"Median and range of {repeats} runs"
    return (
        f"{how} a row; each made {work['updates']} steps on {work['samples']} samples in total, {work['per epoch']} "
        f"steps per epoch, data {work['data'][:12]}, and evaluated each sample once: {scored}. "
        f"{speeds.circumstances(runs, work)}"
    )


def asking(evaluations: Sequence[str]) -> float:
    """Nanoseconds for which a step asks whether anything is due, with these evaluations every 10 epochs."""
    from trainkit.config.units import Gate, Span
    from trainkit.training.events import EventSchedule

    gates = {name: Gate(Span(10, "epochs"), 37, 64) for name in evaluations}
    agenda = EventSchedule({"log": Gate(Span(50, "steps"), 37, 64), **gates}, lambda thing: thing, lambda *_: None)
    asked = timeit.repeat("step >= agenda.next", globals={"step": 1, "agenda": agenda}, number=100_000, repeat=20)
    return min(asked) / 100_000 * 1e9


def rows(precisions: Sequence[str], channels: int | None, changes: Sequence[str] = ()) -> list[Row]:
    """Each model in float32 (`no`) and in each of the other precisions."""
    width = () if channels is None else (f"task.net.base_channels={channels}",)
    found = []
    for title, net in NETS.items():
        for precision in precisions:
            words = (f"task.net.name={net}", f"train.precision={precision}", *width, LINES, *changes)
            name = "FP32" if precision == "no" else f"AMP {precision}"
            found.append(Row(f"{title}, {name}", "eye_state", words))
    return found


def main() -> None:
    """Train what is missing and print the table that was asked for."""
    words = argparse.ArgumentParser()
    words.add_argument("--quick", action="store_true", help="few steps per run: speed only")
    words.add_argument("--gates", action="store_true", help="the cost of an evaluation that is not due")
    words.add_argument("--table", action="store_true", help="train nothing")
    words.add_argument("--repeats", type=int, help="runs of each row: 1, with --quick 3, with --gates 5")
    words.add_argument("--precisions", nargs="+", metavar="WORD", help="no, fp16, bf16; all of the machine by default")
    words.add_argument("--channels", type=int, help="base_channels of both models; the recipe's by default")
    asked = words.parse_args()
    if asked.gates:
        listed = rows(["no"], asked.channels, GATED)[:1]
        listed = [
            Row("without the evaluation", "eye_state", listed[0].changes),
            Row("with it, not due", "eye_state", (*listed[0].changes[:-1], NOT_DUE)),
        ]
    else:
        listed = rows(asked.precisions or speeds.available(), asked.channels, SHORT if asked.quick else ())
    repeats = asked.repeats or (5 if asked.gates else 3 if asked.quick else 1)
    experiment = "eye-speed"
    if not asked.table:
        for seed in range(repeats):
            for row in listed if seed % 2 == 0 else reversed(listed):
                if problem := speeds.train(row, seed, experiment, NOTE):
                    sys.exit(problem)
    there = {(row.title, s): (speeds.found(row, s, experiment, NOTE), row) for row in listed for s in range(repeats)}
    runs = {who: speeds.read(folder, row, NOTE, SCORES) for who, (folder, row) in there.items() if folder is not None}
    if not runs:
        sys.exit("nothing has been measured")
    if asked.gates:
        titles = [row.title for row in listed]
        print(gate_table(runs, dict(zip(titles, (asking(["val"]), asking(["val", "separation"])), strict=True))))
    else:
        print(table(runs, () if asked.quick else tuple(SCORES)))


if __name__ == "__main__":
    main()
