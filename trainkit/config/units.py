"""Quantities of a recipe that are written with a unit: spans of training, percentages, batch sizes per process.

A span is `500 steps`, `1 epoch`, `1M samples`, `30 min`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from trainkit.config.ranges import BatchSize, FractionBetween

_UNITS = {
    "step": "steps", "steps": "steps", "epoch": "epochs", "epochs": "epochs", "sample": "samples",
    "samples": "samples", "s": "seconds", "sec": "seconds", "second": "seconds", "seconds": "seconds",
    "min": "minutes", "minute": "minutes", "minutes": "minutes", "h": "hours", "hour": "hours", "hours": "hours",
}  # fmt: skip
_SECONDS = {"seconds": 1, "minutes": 60, "hours": 3600}
_LONGEST = 100_000 * 3600
"""Seconds; clocks of the system and of torch take no time that is much longer."""
_WRITTEN = {"seconds": "s", "minutes": "min", "hours": "h"}
_FACTORS = {"": 1, "k": 1_000, "K": 1_000, "M": 1_000_000}
NUMBER = r"(?:0|[1-9][0-9]{0,11})(?:\.[0-9]{1,6})?"
"""A number before a unit: no sign, no leading zero, no exponent, no other digits than ASCII's."""
_SPAN = re.compile(rf"({NUMBER}) *([kKM]?) +([a-z]+)")


@dataclass(frozen=True)
class Span:
    """A length of training in steps, epochs or samples, or of wall-clock time."""

    amount: float
    """Number of units."""
    unit: str
    """Unit: steps, epochs, samples, seconds, minutes or hours."""

    @staticmethod
    def parse(text: object) -> Span:
        """Read `500 steps`, `1 epoch`, `0.5 epochs`, `1M samples`, `30 min`. Raises ValueError."""
        match = _SPAN.fullmatch(text.strip(" ")) if isinstance(text, str) else None
        unit = _UNITS.get(match[3]) if match else None
        # A millionth is the least that is written, so that the text of a span reads back as the same span.
        amount = round(float(match[1]) * _FACTORS[match[2]], 6) if match else 0
        if match is None or unit is None or not 0 < amount < 1e12:
            raise ValueError(
                f"{text!r} is not a length; write a number and a unit: 500 steps, 1 epoch, 1M samples, 30 min"
            )
        span = Span(amount, unit)
        if span.timed and span.seconds > _LONGEST:
            raise ValueError(f"{text!r} is longer than the maximum of {_LONGEST / 3600:g} h")
        if unit in ("steps", "samples") and amount != int(amount):
            raise ValueError(f"{text!r}: {unit} are counted in whole numbers")
        return span

    def __str__(self) -> str:
        amount = f"{self.amount:.6f}".rstrip("0").rstrip(".")
        unit = _WRITTEN.get(self.unit, self.unit)
        return f"{amount} {unit[:-1] if self.amount == 1 and unit in ('steps', 'epochs', 'samples') else unit}"

    @property
    def timed(self) -> bool:
        """True for a span of wall-clock."""
        return self.unit in _SECONDS

    @property
    def seconds(self) -> float:
        """Length of a timed span."""
        return self.amount * _SECONDS[self.unit]

    def steps(self, steps_per_epoch: int, batch_size: int) -> int:
        """Length of an untimed span in optimizer steps, at least 1; of `0 steps` 0."""
        steps = {"steps": 1, "epochs": steps_per_epoch, "samples": 1 / batch_size}[self.unit] * self.amount
        return max(1, round(steps)) if self.amount else 0


@dataclass(frozen=True)
class PerProcess:
    """A batch size per process: the samples of a step are this number times the processes."""

    samples: BatchSize
    """Samples of each process per step."""

    @staticmethod
    def parse(text: str) -> PerProcess:
        """Read `4 per process`. Raises ValueError."""
        match = re.fullmatch("([1-9][0-9]{0,6}) +per +process", text.strip(" "))
        if match is None or int(match[1]) > 1 << 20:
            raise ValueError(f"{text!r} is not a batch size; write a number, such as 64, or '4 per process'")
        return PerProcess(int(match[1]))

    def __str__(self) -> str:
        return f"{self.samples} per process"


def samples_per_update(batch_size: int | PerProcess, processes: int) -> int:
    """Return the samples of a step over all processes."""
    return batch_size if isinstance(batch_size, int) else batch_size.samples * processes


def read_batch_size(value: object) -> Any:
    """Return what `4 per process` says, and a number as it is. Raises ValueError for all else."""
    if isinstance(value, str):
        return PerProcess.parse(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a batch size; write a number, such as 64, or '4 per process'")
    return value


def _read_span(value: object) -> Span:
    return value if isinstance(value, Span) else Span.parse(value)


def _read_untimed(value: object) -> Span:
    span = _read_span(value)
    if span.timed:
        raise ValueError(f"'{span}' is a time; expected a length of training in steps, epochs or samples")
    return span


def _read_length(value: object) -> Span:
    return Span(0, "steps") if value == "0 steps" else _read_untimed(value)


def _read_share(value: object) -> float:
    share = value
    if isinstance(value, str) and (match := re.fullmatch(f"({NUMBER}) *%", value.strip(" "))):
        share = float(match[1]) / 100
    # Eight digits are what a percentage with six says, so that the text of a share reads back as the same share.
    if isinstance(share, float) and 0 < round(share, 8) < 1:
        return round(share, 8)
    raise ValueError(f"{value!r} is not a percentage; write one between 0% and 100%, such as 5%")


def sides(text: str, count: int) -> list[float]:
    """Read `3.85x0.5x0.5`: so many numbers with an `x` between them; return none where the text is another."""
    return [float(side) for side in text.split("x")] if re.fullmatch("x".join([NUMBER] * count), text) else []


def _write_share(share: float) -> str:
    return f"{100 * share:.6f}".rstrip("0").rstrip(".") + "%"


_as_text = PlainSerializer(str, return_type=str)
AnySpan = Annotated[Span, BeforeValidator(_read_span), _as_text]
"""A span of training or of wall-clock."""
TrainingSpan = Annotated[Span, BeforeValidator(_read_untimed), _as_text]
"""A span of training."""
Length = Annotated[Span, BeforeValidator(_read_length), _as_text]
"""A length of training, which may be `0 steps`."""
Share = Annotated[FractionBetween, BeforeValidator(_read_share), PlainSerializer(_write_share, return_type=str)]
"""A percentage."""
UpdateSize = Annotated[
    BatchSize | PerProcess,
    BeforeValidator(read_batch_size),
    PlainSerializer(lambda size: str(size) if isinstance(size, PerProcess) else size),
    "a whole number, or a text such as '4 per process'",  # what the reference says of it
]
"""Samples of a step: over all processes, or for each."""
