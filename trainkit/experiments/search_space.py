"""Parse the arguments of a sweep: keys with several values or a range, and random settings of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trainkit import rng
from trainkit.config import loader
from trainkit.config.run_request import RunRequest, Sweep, load, values_of
from trainkit.config.schema import Recipe
from trainkit.errors import UserError

MOST = 1000
"""Settings that a sweep may have."""
_NUMBER = r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_RANGE = re.compile(rf"(log:)?({_NUMBER})\.\.({_NUMBER})")

Setting = dict[str, str]
"""Key to value, as the words of a request write them."""


@dataclass(frozen=True)
class Axis:
    """A key of the recipe with several values: a list, or a range."""

    key: str
    values: tuple[str, ...]
    """As the command line writes them; of a range its ends."""
    span: tuple[float, float] | None = None
    """The ends of a range, both part of it."""
    log: bool = False
    """A range is even in the logarithm."""
    whole: bool = False
    """A range is one of whole numbers."""

    def at(self, share: float) -> str:
        """Return the value at a fraction of the axis, from 0 to below 1."""
        if self.span is None:
            return self.values[int(share * len(self.values))]
        low, high = self.span
        if self.log:
            return self.text(low * (high / low) ** share)
        return self.text(math.floor(low + share * (high - low + 1)) if self.whole else low + share * (high - low))

    def text(self, value: float) -> str:
        """Format a number of a range as a recipe value: an integer, or four digits."""
        if self.whole:
            return str(round(value))
        low, high = self.span or (-math.inf, math.inf)
        return repr(min(max(float(f"{value:.4g}"), low), high))


def read(request: RunRequest) -> tuple[list[str], list[Axis]]:
    """Return the arguments of a request with one value, and the axes of the others.

    Raises UserError for arguments that are not a sweep.
    """
    how, fixed, axes = request.sweep or Sweep(), [], []
    for word in request.overrides:
        key, _, text = (part.strip() for part in word.partition("="))
        values = tuple(values_of(text))
        if match := _RANGE.fullmatch(text):
            axes.append(_range(word, key, match))
        elif len(values) == 1:
            fixed.append(word)
        elif "" in values:
            raise UserError(word, "a value is missing beside a comma", remedy=f"write it like {key}=0.1,0.05")
        elif len(set(values)) < len(values):
            raise UserError(word, "gives a value twice", remedy="keep one of them")
        else:
            axes.append(Axis(key, values))
    if not axes:
        load_setting(request, fixed, {})
        expected = "an argument such as optim.lr=0.1,0.05"
        raise UserError("sweep", "no argument gives several values", expected, "of one setting: trainkit run")
    ranges = [axis for axis in axes if axis.span]
    if ranges and how.random is None and how.tpe is None:
        found = f"{ranges[0].key} is a range, and a grid has no number of them"
        raise UserError("sweep", found, remedy="list its values, or say how many settings: --random 20 or --tpe 20")
    if ranges:  # which of them are of whole numbers is for the recipe to say
        kinds = loader.flat(load_setting(request, fixed, {axis.key: axis.values[0] for axis in axes}))
        axes = [replace(axis, whole=bool(axis.span) and isinstance(kinds.get(axis.key), int)) for axis in axes]
    return fixed, axes


def drawn(axes: Sequence[Axis], count: int, seed: int) -> Iterator[Setting]:
    """Sample this many random settings without repetition. Raises UserError if there are fewer.

    The first settings do not depend on the number of settings, and the values of a key not on the other keys.
    """
    if all(axis.span is None for axis in axes):
        there_are = math.prod(len(axis.values) for axis in axes)
        if count >= there_are:
            raise UserError("--random", f"{count}, of {there_are} settings", remedy="leave it out to try them all")
    check_count(count)
    given: set[tuple[str, ...]] = set()
    for number in range(100 * count):
        setting = {axis.key: axis.at(float(rng.uniform(seed, axis.key, number)[0])) for axis in axes}
        if (values := tuple(setting.values())) not in given:
            given.add(values)
            yield setting
        if len(given) == count:
            return
    raise UserError("--random", f"{count}: no more than {len(given)} settings came up", remedy="ask for fewer")


def check_count(count: int) -> None:
    """Raise UserError if there are more settings than a sweep may have."""
    if count > MOST:
        raise UserError("sweep", f"{count} settings", f"at most {MOST}", "take fewer, such as --random 50")


def _range(word: str, key: str, match: re.Match[str]) -> Axis:
    low, high = float(match[2]), float(match[3])
    if math.inf in (-low, high):
        raise UserError(word, "an end that is too large for a number", remedy=f"write it like {key}=0.01..0.1")
    if not low < high:
        raise UserError(word, "the range ends where it begins, or before", remedy=f"write it like {key}=0.01..0.1")
    if match[1] and low <= 0:
        raise UserError(word, "a logarithm of numbers that are not above 0", remedy="leave log: out, or begin above 0")
    return Axis(key, (match[2], match[3]), (low, high), bool(match[1]))


def words_of(fixed: Sequence[str], setting: Mapping[str, str]) -> tuple[str, ...]:
    """Return the overrides of a setting, after those that all settings share."""
    return (*fixed, *(f"{key}={value}" for key, value in setting.items()))


def load_setting(request: RunRequest, fixed: Sequence[str], setting: Setting) -> Recipe:
    """Load the recipe of one setting."""
    return load(replace(request, overrides=words_of(fixed, setting)))
