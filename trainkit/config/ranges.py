"""Ranges of the numbers in a recipe: types that a field is declared with, so that no number is without bounds.

A range that one field alone has stands at that field, as `Annotated[float, Field(ge=0, le=5)]`. Upper bounds lie far
above what is used: beyond them a value can only be an error, or exhausts the machine.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MANY = 1_000_000
"""Upper bound where nothing but an error is larger."""

Fraction = Annotated[float, Field(ge=0, le=1)]
"""From 0 to 1."""
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]
"""From 0 to below 1."""
FractionAboveZero = Annotated[float, Field(gt=0, le=1)]
"""Above 0, up to 1."""
FractionBetween = Annotated[float, Field(gt=0, lt=1)]
"""Between 0 and 1."""
Positive = Annotated[float, Field(gt=0, le=MANY)]
"""Above 0: scales, temperatures, weights that must not vanish."""
NotNegative = Annotated[float, Field(ge=0, le=MANY)]
"""From 0: weights of terms that may be left out."""
Count = Annotated[int, Field(ge=1, le=MANY)]
"""From 1."""
Whole = Annotated[int, Field(ge=0, le=MANY)]
"""From 0."""
BatchSize = Annotated[int, Field(ge=1, le=1 << 20)]
"""Samples that are computed at once."""
Channels = Annotated[int, Field(ge=1, le=1 << 14)]
"""Channels of a map, or the length of a vector."""
Layers = Annotated[int, Field(ge=1, le=256)]
"""Layers, blocks or heads of a network."""
Side = Annotated[int, Field(ge=1, le=1 << 13)]
"""Side of an image in pixels."""
Byte = Annotated[int, Field(ge=0, le=255)]
"""Value of a channel of an image in a file."""
Factor = Annotated[float, Field(ge=0, le=100)]
"""Factor on intensities, or a multiple of their standard deviation."""
Ratio = Annotated[float, Field(ge=0.01, le=100)]
"""Of two lengths."""
Deviation = Annotated[float, Field(gt=0, le=255)]
"""Standard deviation by which pixels in 0 .. 1 are divided."""
