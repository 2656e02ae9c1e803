"""Text for terminals and for pipes: colours, tables and widths."""

from __future__ import annotations

import io
import re

import pytest
from fake_terminal import Screen

from trainkit import terminal
from trainkit.terminal import Styled, Table

PAGE = [
    "convnext",
    "",
    Table([["val", "top1"], ["final", "0.3"], ["EMA best", "0.25"]], (2,)),
    Styled("Done.", "green"),
]
TEXT = "convnext\n\nval       top1\nfinal      0.3\nEMA best  0.25\nDone."
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


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
