"""Quantities with units: what is read, and what is refused."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from trainkit.config.units import PerProcess, Share, Span, sides

EPOCH, BATCH = 40, 16


@pytest.mark.parametrize(
    ("text", "amount", "unit", "written"),
    [
        ("500 steps", 500, "steps", "500 steps"),
        ("1 step", 1, "steps", "1 step"),
        (" 1 epoch ", 1, "epochs", "1 epoch"),
        ("0.5 epochs", 0.5, "epochs", "0.5 epochs"),
        ("1M samples", 1e6, "samples", "1000000 samples"),
        ("80k steps", 80_000, "steps", "80000 steps"),
        ("1.5 K steps", 1500, "steps", "1500 steps"),
        ("30 min", 30, "minutes", "30 min"),
        ("1 hour", 1, "hours", "1 h"),
        ("0.000001 s", 1e-6, "seconds", "0.000001 s"),
    ],
)
def test_a_span_means_what_it_says_and_reads_back_as_itself(text, amount, unit, written):
    span = Span.parse(text)
    assert (span.amount, span.unit, str(span)) == (amount, unit, written)
    assert Span.parse(str(span)) == span


@pytest.mark.parametrize(
    "text",
    ["", "5", "steps", "5steps", "0 steps", "-1 steps", "1.5 steps", "0.5 samples", "1e3 steps", "5 parsecs",
     "5 G steps", "0.0000001 s", "9999999999999 steps", "nan steps", "five steps", "5 steps 3", 5, None, True,
     "04 epochs", "00.5 epochs", "+4 epochs", "4\tepochs", "4\u00a0epochs", "4 epochs\n", "\u0664 epochs",
     "\uff14 epochs", "1_0 epochs", "inf s", ".5 epochs", "4. epochs", "030 min", "0x4 steps", "1,5 epochs"],
)  # fmt: skip
def test_what_is_no_span_is_refused(text):
    with pytest.raises(ValueError):
        Span.parse(text)


@pytest.mark.parametrize(
    "number", ["04", "+4", "-4", "\u00a04", "4\t", "\u0664", "1_0", "4e0", "inf", "nan", "0x4", "4.", ".4", ""]
)
def test_numbers_with_units_are_written_in_one_way(number):
    for cls, text in ((Share, f"{number}%"), (PerProcess, f"{number} per process"), (Span, f"{number} epochs")):
        with pytest.raises(ValueError):
            TypeAdapter(Share).validate_python(text) if cls is Share else cls.parse(text)
    assert sides(f"{number}x2", 2) == [] and sides(f"2x{number}", 2) == [] and sides("4x2.5", 2) == [4, 2.5]


def test_a_span_in_steps():
    assert Span.parse("7 steps").steps(EPOCH, BATCH) == 7
    assert Span.parse("3 epochs").steps(EPOCH, BATCH) == 120
    assert Span.parse("0.25 epochs").steps(EPOCH, BATCH) == 10
    assert Span.parse("1k samples").steps(EPOCH, BATCH) == 62  # 62.5, to the even neighbour
    assert Span.parse("1 sample").steps(EPOCH, BATCH) == 1, "never less than one step"


def test_a_span_in_seconds():
    assert [Span.parse(text).seconds for text in ("90 s", "1.5 min", "2 h")] == [90, 90, 7200]
    assert [Span.parse(text).timed for text in ("1 s", "1 min", "1 h", "1 step", "1 epoch", "1 sample")] == [
        True
    ] * 3 + [False] * 3
