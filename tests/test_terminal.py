"""Text for terminals and for pipes: colours, tables and widths."""

from __future__ import annotations

import io
import itertools
import os
import pty
import re
import subprocess
import sys
from types import SimpleNamespace

import click_commands
import pytest
from fake_terminal import Screen
from runs import PLUGIN, ROOT, TOY

from trainkit import terminal
from trainkit.config.units import Span
from trainkit.speed.clock import Clock
from trainkit.terminal import LogTable, ProgressLine, Styled, Table
from trainkit.training.run_logger import RunLogger

PAGE = [
    "convnext",
    "",
    Table([["val", "top1"], ["final", "0.3"], ["EMA best", "0.25"]], (2,)),
    Styled("Done.", "green"),
]
TEXT = "convnext\n\nval       top1\nfinal      0.3\nEMA best  0.25\nDone."
ESCAPES = re.compile(r"\x1b\[[0-9;]*[mK]")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def test_a_pipe_gets_plain_text_and_a_terminal_the_same_text_with_colours():
    assert terminal.shown(PAGE, io.StringIO()) == terminal.plain(PAGE) == TEXT
    shown = terminal.shown(PAGE, Screen())
    assert "\x1b[" in shown and ESCAPES.sub("", shown) == TEXT


@pytest.mark.parametrize(
    ("environment", "stream", "coloured"),
    [
        ({"NO_COLOR": "1"}, Screen(), False),
        ({"NO_COLOR": ""}, Screen(), True),
        ({"TERM": "dumb"}, Screen(), False),
        ({"FORCE_COLOR": "1"}, io.StringIO(), True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, Screen(), False),
        ({}, None, False),
    ],
)
def test_colours_follow_the_environment(monkeypatch, environment, stream, coloured):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert terminal.has_colours(stream) == coloured
    assert ("\x1b[" in terminal.shown(PAGE, stream)) == coloured
    assert ESCAPES.sub("", terminal.shown(PAGE, stream)) == TEXT


def test_nothing_is_wrapped_in_a_pipe_and_a_table_that_is_too_wide_keeps_its_cells(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    wide = [Table([["name", *["column" * 3] * 5], ["row", *["value"] * 5]])]
    assert len(terminal.plain(wide).splitlines()) == 2 and terminal.plain([Table([])]) == ""
    assert ESCAPES.sub("", terminal.shown(wide, Screen())) == terminal.plain(wide)
    assert terminal.width(io.StringIO()) > 1000 and terminal.width(Screen()) == 40


def test_control_characters_and_secrets_are_not_printed():
    text = "\x1b[2J\rname https://me:hunter2@host [bold]not markup[/bold] :smile:"
    for stream in (io.StringIO(), Screen()):
        shown = ESCAPES.sub("", terminal.shown([text, Styled(text, "red"), Table([[text, "x"]])], stream))
        assert "\x1b" not in shown and "\r" not in shown and "hunter2" not in shown
        assert shown.count("[bold]not markup[/bold] :smile:") == 3


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(3, "3 s"), (99.4, "99 s"), (100, "1 min 40 s"), (3600, "1 h"), (12_000, "3 h 20 min"), (200_000, "2 d 7 h")],
)
def test_durations(seconds, words):
    assert terminal.duration(seconds) == words


# ---- The training log


def test_the_header_comes_before_the_first_row_and_again_when_the_columns_change():
    table = LogTable("val/ema/top1", True, 93)
    rows = [
        table.log_row(50, 2.29451, 3.2e-4, 398.2, 125.0),
        table.evaluation_row(50, "val", {"val/top1": 0.1661, "val/top5": 0.5, "val/ema/top1": 0.1612}, True),
        table.log_row(100, 12345.0, 0.05, 3.61, 4000.0),
        table.evaluation_row(100, "other", {"other/f1": 0.25, "other/f1.cat": 1.0, "other/ema/f1": 0.5}, False),
    ]
    lines = [terminal.plain(page).splitlines() for page in rows]
    assert [len(page) for page in lines] == [2, 1, 1, 2]
    first = ["step", "epoch", "loss", "lr", "samples/s", "left", "val/top1", "val/ema/top1"]
    assert lines[0][0].split() == first
    assert lines[0][1].split() == ["50", "0.54", "2.2945", "3.2e-4", "398", "2:05"]
    assert lines[1][0].split() == ["50", "0.54", "0.1661", "0.1612", "*best"]
    assert lines[2][0].split() == ["100", "1.08", "1.234e+04", "0.05", "3.6", "1:06:40"]
    assert lines[3][0].split() == [*first[:7], "other/ema/f1", "other/f1", first[7]], "the deciding metric stays last"
    assert lines[3][1].split() == ["100", "1.08", "0.5000", "0.2500"]
    ends = [line.rstrip().removesuffix("  *best") for line in (lines[0][0], lines[1][0])]
    assert len(ends[0]) == len(ends[1]), "columns are aligned"


def test_of_many_evaluations_the_table_has_few_columns():
    table = LogTable("e0/m", False, 0)
    for number in range(30):
        page = terminal.plain(table.evaluation_row(1, f"e{number}", {f"e{number}/m": 0.5}, False))
        assert len(page.splitlines()[0].split()) <= 6 + 8


# ---- The bar


def test_the_line_shows_progress_and_time_left_and_fits_the_terminal(monkeypatch):
    screen, now = Screen(), [100.0]
    bar = ProgressLine(screen, 400, 2.0, now=lambda: now[0])
    facts = ["loss 2.1440", "1092 samples/s", "34.1 it/s"]
    for columns in ("120", "80", "40", "20"):
        monkeypatch.setenv("COLUMNS", columns)
        screen.seek(0)
        screen.truncate()
        for step in (1, 101):
            now[0] += 10.0
            bar.update(step, lambda: facts)
        drawn = ESCAPES.sub("", screen.getvalue()).split("\r")[-1]
        assert len(drawn) < int(columns) and "\n" not in drawn, drawn
        assert drawn.startswith(" 25 %  101/400")
        if columns == "120":
            assert drawn == " 25 %  101/400  0:30 left  loss 2.1440  1092 samples/s  34.1 it/s"
    bar.close()
    assert screen.getvalue().endswith("\r\x1b[2K")


def test_a_terminal_that_was_closed_ends_nothing():
    screen = Screen()
    bar = ProgressLine(screen, 10, 0.0)
    bar.update(1, list)
    screen.close()
    bar.update(2, list)
    bar.close()


def test_the_line_is_drawn_as_often_as_asked_and_costs_a_comparison_in_between(monkeypatch):
    drawn, asked, now = [], [0], [0.0]
    monkeypatch.setattr("trainkit.training.run_logger.bar_stream", Screen)
    monkeypatch.setattr("trainkit.training.run_logger.time", SimpleNamespace(perf_counter=lambda: now[0]))

    class Bar(ProgressLine):
        def __init__(self, *words):
            super().__init__(*words, now=lambda: now[0])

        def update(self, step, facts):
            asked[0] += 1
            super().update(step, facts)

        def _write(self, text):
            drawn.append((int(text.split("/")[0].split()[-1]), now[0]))

    monkeypatch.setattr("trainkit.training.run_logger.ProgressLine", Bar)
    run = RunLogger(SimpleNamespace(log=SimpleNamespace(progress=Span(2, "seconds"))), main=True)
    for step in range(1, 10_001):
        now[0] += 0.001 if step < 9_000 else 0.3
        run.progress(step, 10_000)
    steps, times = zip(*drawn, strict=True)
    assert steps[0] == 1 and steps[-1] == 10_000 and list(steps) == sorted(steps)
    gaps = [later - before for before, later in itertools.pairwise(times)]
    quick = [gap for gap, at in zip(gaps, times, strict=False) if at < 6]
    assert min(gaps[:-1]) >= 2.0 and max(quick) < 2.9 and asked[0] < 1100
    assert [step for step in range(9_600, 9_990) if step in steps] != [], "slow steps are shown too"


def test_the_bar_shows_the_mean_speed_of_the_training(monkeypatch):
    now = [0.0]
    run = RunLogger(SimpleNamespace(), batch_size=8)
    run.clock = Clock(now=lambda: now[0])
    for seconds in (0.1, 0.1, 0.1, 0.7):  # the last one is slow
        run.clock.to("forward")
        now[0] += seconds
        run.clock.step()
        run.clock.to("eval")
        now[0] += 5.0
    assert run._facts() == ["32 samples/s", "4 it/s"]


@pytest.mark.parametrize(
    ("out", "err", "drawn"),
    [("terminal", "pipe", "out"), ("terminal", "terminal", "out"), ("file", "terminal", "err"),
     ("pipe", "terminal", None), ("file", "pipe", None)],
)  # fmt: skip
def test_a_bar_is_drawn_where_no_other_program_writes(monkeypatch, tmp_path, out, err, drawn):
    with open(tmp_path / "log", "w") as file:
        streams = {"terminal": Screen, "pipe": io.StringIO, "file": lambda: file}
        monkeypatch.setattr(sys, "stdout", own := streams[out]())
        monkeypatch.setattr(sys, "stderr", other := streams[err]())
        assert terminal.bar_stream() is {"out": own, "err": other, None: None}[drawn]


# ---- A whole training


WORDS = ("train.length=12 steps", "log.every=4 steps", "evaluations.val.every=4 steps", "log.progress=0.01 s",
         "best={metric: val/ema/accuracy}", "log.ceilings=off", "log.figures=null", "seed=3")  # fmt: skip


def trained(tmp_path, on_terminal: bool, **environment: str) -> str:
    """What a training prints, on a pseudo-terminal or into a pipe."""
    words = [sys.executable, "-m", "trainkit.cli.main", "run", str(TOY), *WORDS, "--plugin", "toy"]
    env = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    env |= {"PYTHONPATH": f"{PLUGIN}:{ROOT}", "TRAINKIT_STORE": str(tmp_path / "store"), "TERM": "xterm"}
    env |= {"COLUMNS": "120", **environment}
    if not on_terminal:
        done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout
    master, slave = pty.openpty()
    with subprocess.Popen(words, env=env, cwd=tmp_path, stdout=slave, stderr=subprocess.DEVNULL) as process:
        os.close(slave)
        chunks = []
        try:
            while chunk := os.read(master, 65536):
                chunks.append(chunk)
        except OSError:  # the other end was closed
            pass
        assert process.wait(60) == 0
    os.close(master)
    return b"".join(chunks).decode().replace("\r\n", "\n")


def rows(text: str) -> list[list[str]]:
    """Cells of the log table, without speeds and times."""
    found = [line.split() for line in text.splitlines() if re.match(r" +(step|\d+) ", line)]
    return [[*row[:4], *row[6:]] if "." in row[2] and len(row) >= 6 and ":" in row[5] else row for row in found]


@pytest.mark.slow
def test_a_training_prints_the_same_rows_into_a_pipe_and_on_a_terminal_and_there_a_bar_below_them(tmp_path):
    plain = trained(tmp_path, on_terminal=False)
    assert "\x1b" not in plain and "\r" not in plain and " left" not in plain
    raw = trained(tmp_path, on_terminal=True)
    assert "\x1b[36m\x1b[1m" in raw and re.search(r"\d+/12  \d+:\d\d left", ESCAPES.sub("", raw))
    # What remains on the screen: of a line what was written after it was cleared last.
    screen = "\n".join(ESCAPES.sub("", line.split("\r\x1b[2K")[-1]) for line in raw.split("\n"))
    assert rows(screen) == rows(plain) and len(rows(plain)) == 7, plain
    assert rows(plain)[0][-2:] == ["val/accuracy", "val/ema/accuracy"] and "*best" in plain
    for text in (plain, screen):
        click_commands.following(text)
