"""Names of labels, and the values that they have in label maps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from trainkit.errors import UserError

BACKGROUND = "background"
"""The name of label 0."""

VALUE_LIMIT = 1 << 31
"""Values of classes in label maps are below it."""


def check_values(labels: Mapping[str, int]) -> None:
    """Raise ValueError for values of classes that are none: the background is 0, and two classes have two values."""
    values = list(labels.values())
    if not values or len(set(values)) < len(values) or not all(0 < value < VALUE_LIMIT for value in values):
        raise ValueError("labels must be names of classes with different values above 0; 0 is the background")


def named_labels(names: Iterable[str], where: str) -> tuple[str, ...]:
    """Return the names of labels 0, 1, ... from a list with or without the background.

    Raises UserError for names that are empty or there twice.
    """
    listed = [name.strip() for name in names]
    if not listed or listed[0].lower() != BACKGROUND:
        listed = [BACKGROUND, *listed]
    listed[0] = BACKGROUND
    lower = [name.lower() for name in listed]
    if len(listed) < 2 or not all(name and name.isprintable() for name in listed) or len(set(lower)) < len(lower):
        found = ", ".join(repr(name) for name in listed)[:200]
        raise UserError(where, f"names of labels {found}", "different names of labels 1, 2, ...")
    return tuple(listed)


def of_json(labels: Any, where: str) -> tuple[tuple[str, ...] | None, tuple[int, ...] | None]:
    """Read `{"0": "background", "1": "Anterior"}`, or nnU-Net's `{"background": 0, "Anterior": 1}`.

    Returns the names of labels 0, 1, ..., and the values of labels 1, 2, ... where they are others.
    """
    if labels is None:
        return None, None
    wanted = 'names of labels such as {"0": "background", "1": "liver"}'
    if not isinstance(labels, dict):
        raise UserError(where, f"labels {labels!r}"[:200], wanted)
    numbered: dict[int, str] = {}
    for key, value in labels.items():
        number, name = (value, key) if isinstance(value, int) else (key, value)
        if isinstance(number, bool) or not isinstance(name, str) or not re.fullmatch(r"[0-9]{1,9}", str(number)):
            raise UserError(where, f"label {key!r}: {value!r}"[:200], wanted)
        if int(number) in numbered:
            raise UserError(where, f"label {number} twice", wanted)
        numbered[int(number)] = name
    if numbered and 0 not in numbered:
        raise UserError(where, f"labels {', '.join(map(str, sorted(numbered)))}"[:200], f"0, the background: {wanted}")
    values = tuple(sorted(numbered))[1:]
    names = named_labels([BACKGROUND, *(numbered[value] for value in values)], where)
    return names, None if values == tuple(range(1, len(values) + 1)) else values


def mapping(values: Iterable[int], names: Iterable[str] = ()) -> str:
    """Write the mapping of `data.labels` for values of label maps: by the names, where there is one for each."""
    found, given = sorted(value for value in values if value), tuple(names)
    called = given if len(given) == len(found) else tuple(f"label {value}" for value in found)
    return "{" + ", ".join(f"{name}: {value}" for name, value in zip(called, found, strict=True)) + "}"
