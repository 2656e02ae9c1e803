"""Shared by the tables of options: a shortened recipe with one change per row.

Rows of another batch take as many samples, so that samples/s are compared and not steps. Each run is a process of its
own; repeats are the outer loop and every other one goes through the rows backwards. Ratios are of the same repeat. The
table is refused unless all runs trained on as many samples of the same data on the same machine, and held the
evaluations of their row. A finished run is found again, and not repeated; a row whose runs fail is named, and the
others continue.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import speeds
from comparison import Row
from speeds import Measured, spread

SHIPPED = "as shipped"
NO_FIGURE = "no figure"
NOT_IN_IT = "not in the guide"
NAMES = {"no": "float32", "bf16": "bf16", "fp16": "fp16"}
LINES = 8
"""Log lines of a run."""


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


@dataclass(frozen=True)
class Column:
    """A column that one table has beside those of all: its head, its cells and how they are written."""

    head: str
    value: Callable[[Measured], float | None]
    """None: it has none, and the cell stays empty."""
    form: str
    """Of one number, as `str.format` has it."""

    def cell(self, runs: Sequence[Measured]) -> str:
        """Median and range over the runs of a row."""
        values = [value for value in map(self.value, runs) if value is not None]
        return spread(values, self.form) if values else ""


@dataclass(frozen=True)
class Study:
    """One table: the recipe, how it is shortened, and its rows."""

    recipe: str
    note: str
    """File beside a run's journal by which its runs are known."""
    experiment: str
    batch: int
    """Of the recipe; wall-clock is given for 100 of its steps."""
    scored: int
    """What an evaluation scores."""
    unit: str
    """What that is called, one or more of them."""
    largest: int
    """Largest batch of a row; samples are a multiple of what its log lines take."""
    samples: tuple[int, int]
    """Of each run on a CPU and on a GPU, unless said otherwise."""
    evaluated: str
    """The evaluation, but for `every` and `at_end`."""
    words: Mapping[str, str]
    """What else is changed in all rows."""
    listed: Callable[[int, Sequence[str]], list[Switch]]
    """All rows, from the samples and the precisions of the machine."""
    columns: tuple[Column, ...] = ()

    def check(self, samples: int) -> None:
        """Raises ValueError for samples that do not fill the log lines of the largest batch."""
        least = LINES * self.largest
        if samples % least or samples < least:
            found = f"{samples} samples; a multiple of {least} is needed"
            raise ValueError(f"{found}, for {LINES} log lines of the largest batch")

    def every(self, samples: int) -> str:
        """The evaluations, held every so many samples."""
        return f"{{val: {{{self.evaluated}, every: {samples} samples, at_end: false}}}}"

    def evaluation_rows(self, samples: int, promised: str) -> list[Switch]:
        """Rows in which the evaluation is held once, and never."""
        half, never = (f"evaluations={self.every(often)}" for often in (samples, 1000 * samples))
        return [
            Switch("evaluated half as often", promised, (half,), held=1),
            Switch("evaluation never due", promised, (never,), held=0),
        ]

    def row(self, switch: Switch, samples: int) -> Row:
        """The recipe, shortened and changed."""
        words = {
            "train.length": f"{samples} samples",
            "train.schedule.warmup.over": f"{samples // LINES} samples",
            "log.every": f"{samples // LINES} samples",
            "log.system_every": "null",
            "checkpoints.every": "null",
            "best": "null",
            **self.words,
            "evaluations": self.every(samples // 2),
        }
        # A key may be given once.
        words |= {key: value for key, _, value in (change.partition("=") for change in switch.changes)}
        return Row(switch.title, self.recipe, tuple(f"{key}={value}" for key, value in words.items()))

    def table(self, runs: Mapping[tuple[str, int], Measured], listed: Sequence[Switch]) -> str:
        """Markdown: one row per switch that has runs, median and range over its seeds.

        Raises ValueError for unequal work, and where the recipe as shipped was not run with one of the seeds.
        """
        work = speeds.refuse_unequal(runs, besides=("updates", "per epoch", "scored"))
        known = {switch.title: switch for switch in listed}
        for (title, seed), run in runs.items():
            held = len(run.held_s.get("val", ()))
            if held != known[title].held or (held and run.scored != {"val": self.scored}):
                found = f"{held} evaluations of {dict(run.scored)} for {title}, seed {seed}"
                raise ValueError(f"unequal work: {found}; {known[title].held} of {self.scored} are its row's")
            if (SHIPPED, seed) not in runs:
                raise ValueError(f"{title}, seed {seed}: the recipe as shipped was not run with this seed")
        hundred = 100 * self.batch
        heads = [
            "",
            "samples/s",
            f"x {SHIPPED}",
            *(column.head for column in self.columns),
            f"wall-clock, s for {hundred} samples (100 steps as shipped), evaluations included",
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
                *(column.cell(own) for column in self.columns),
                spread([hundred * run.sample_s for run in own], "{:.3g}"),
                spread([plain.sample_s / run.sample_s for run, plain in pairs], "{:.2f}"),
                spread([run.memory_gb for run in own], "{:.2f}"),
                spread([run.ready_s for run in own], "{:.0f}"),
                switch.promised,
                " ".join(run.note["run"].removeprefix(f"{self.recipe}-") for run in own),
            ]
            lines.append(f"| {switch.title} | {' | '.join(cells)} |")
        return "\n".join([*lines, "", self.describe(runs, work)])

    def describe(self, runs: Mapping[tuple[str, int], Measured], work: Mapping[str, object]) -> str:
        """What was done alike, how far two runs of the same thing are apart, and on what machine."""
        seeds = len({seed for _, seed in runs})
        plain = [run for (title, _), run in runs.items() if title == SHIPPED]
        took = [seconds for run in plain for seconds in run.held_s.get("val", ())]
        held = (
            f"; an evaluation of {self.scored} {self.unit} took {spread(took, '{:.2g}')} s as shipped" if took else ""
        )
        how = "One run" if seeds == 1 else f"Median and range of {seeds} runs"
        precision = plain[0].note["machine"]["precision"]
        return (
            f"{how} a row, ratios in the same repeat, above 1 faster; each trained on {work['samples']} samples, data "
            f"{str(work['data'])[:12]}{held}. As shipped means {NAMES.get(precision, precision)}. "
            f"{speeds.circumstances(list(runs.values()), work)}"
        )


def precision_rows(precisions: Sequence[str], promised: str) -> list[Switch]:
    """A row for each precision that the machine has, beside that of the recipe.

    The recipe is in bf16 where a GPU has it, else in fp16, and on a CPU in float32.
    """
    gpu = "fp16" in precisions
    shipped = ("bf16" if "bf16" in precisions else "fp16") if gpu else "no"
    plain = "without mixed precision (float32)"
    return [
        Switch(
            plain if word == "no" else f"mixed precision, {word}",
            promised,
            (f"train.precision={word}",),
            gpu=word == "fp16",
        )
        for word in precisions
        if word != shipped
    ]


def compiled_rows(promised: str) -> list[Switch]:
    """A row compiled, and one with CUDA graphs as well."""
    return [
        Switch("compiled", promised, ("train.compile=default",)),
        # On a CPU the same as `default`: it is CUDA graphs that reduce the overhead.
        Switch("compiled, reduce-overhead", promised, ("train.compile=reduce-overhead",), gpu=True),
    ]


def main(study: Study, after: Callable[[], str] | None = None) -> None:
    """Train what is missing and print the table, and below it what `after` measures in this process."""
    words = argparse.ArgumentParser()
    words.add_argument("--table", action="store_true", help="train nothing")
    words.add_argument("--repeats", type=int, default=3, help="runs of each row")
    cpu, cuda = study.samples
    multiple = f"a multiple of {LINES * study.largest}: {cpu}, on a GPU {cuda:,}"
    words.add_argument("--samples", type=int, help=f"that a run is trained on, {multiple}")
    words.add_argument("--only", nargs="+", metavar="WORD", help="rows with one of these words in their title")
    asked = words.parse_args()
    precisions = speeds.available()
    gpu = "fp16" in precisions
    samples = asked.samples or (cuda if gpu else cpu)
    listed = study.listed(samples, precisions)
    without = [] if gpu else [s.title for s in study.listed(samples, ["no", "bf16", "fp16"]) if s.gpu]
    cores = [s.title for s in listed if s.cores > (os.cpu_count() or 1)]
    listed = [s for s in listed if s.title not in (*without, *cores)]
    if asked.only:
        listed = [s for s in listed if s.title == SHIPPED or any(word in s.title for word in asked.only)]
    rows, failed = {switch.title: study.row(switch, samples) for switch in listed}, []
    for seed in range(0 if asked.table else asked.repeats):
        for one in list(rows.values())[:: 1 if seed % 2 == 0 else -1]:
            if problem := speeds.train(one, seed, study.experiment, study.note):
                failed.append(problem)
    runs = {}
    for seed in range(asked.repeats):
        for title, one in rows.items():
            if (folder := speeds.found(one, seed, study.experiment, study.note)) is not None:
                runs[title, seed] = speeds.read(folder, one, study.note)
    print(study.table(runs, listed) if runs else "nothing has been measured")
    if after is not None and not asked.table:
        print(after())
    for why, titles in (("they act on a GPU alone", without), ("there are too few processor cores", cores)):
        if titles:
            print(f"Left out, since {why}: {'; '.join(titles)}.")
    if failed:
        sys.exit("failed, and not in the table: " + "; ".join(failed))
