"""Names of labels, and the values that they have in label maps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from trainkit.errors import UserError, few

BACKGROUND = "background"
"""The name of label 0."""

NOTHING = frozenset(
    {"", BACKGROUND, "back", "bg", "none", "unlabeled", "unlabelled", "other", "void", "exterior", "air"}
)
"""Names, in lower case, that a background has."""

VALUE_LIMIT = 1 << 31
"""Values of classes in label maps are below it."""


IGNORE = "ignore"
"""The name, in nnU-Net's files, of voxels that nobody labelled: they are no class, whatever value they have."""


@dataclass(frozen=True)
class Classes:
    """Labels that label maps may hold."""

    names: tuple[str, ...] | None = None
    """Of classes 0, 1, ..., the first of them `background`; None: not known."""
    values: tuple[int, ...] | None = None
    """Of classes 1, 2, ... in label maps; None: 1, 2, ..."""
    ignored: int | None = None
    """The value of voxels that are ignored."""
    zero: str = field(default=BACKGROUND, compare=False)
    """The name of label 0 in the source, whatever it is."""

    @property
    def count(self) -> int | None:
        """Number of classes with the background; None: any."""
        return None if self.names is None else len(self.names)


def check_values(labels: Mapping[str, int]) -> None:
    """Raise ValueError for values of classes that are none: the background is 0, and two classes have two values."""
    values = list(labels.values())
    if not values or len(set(values)) < len(values) or not all(0 < value < VALUE_LIMIT for value in values):
        raise ValueError("labels must be names of classes with different values above 0; 0 is the background")


def classes_named(names: Iterable[str] | Mapping[str, int], where: str) -> Classes:
    """Return the classes of names of labels 1, 2, ... (a first `background` is understood), or of names with values.

    `ignore` is no class. Raises UserError for names that are empty or there twice, and where no class is named.
    """
    if isinstance(names, Mapping):
        return _classes(names.items(), where)
    return _classes(((name, number) for number, name in enumerate(named_labels(names, where)) if number), where)


def _classes(pairs: Iterable[tuple[str, int]], where: str) -> Classes:
    names, values, ignored = [BACKGROUND], [], []
    for name, value in pairs:
        if name.strip().lower() == IGNORE:
            ignored.append(value)
        else:
            names.append(name)
            values.append(value)
    if len(ignored) > 1:
        raise UserError(where, f"{IGNORE!r} for the values {few(map(str, ignored))}", "one value")
    plain = values == list(range(1, len(values) + 1))
    return Classes(named_labels(names, where), None if plain else tuple(values), *ignored)


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


def of_json(labels: object, where: str) -> Classes:
    """Read `{"0": "background", "1": "Anterior"}`, or nnU-Net's `{"background": 0, "Anterior": 1}`."""
    if labels is None:
        return Classes()
    wanted = 'names of labels such as {"0": "background", "1": "liver"}'
    if not isinstance(labels, dict):
        raise UserError(where, f"labels {labels!r}"[:200], wanted)
    numbered: dict[int, str] = {}
    for key, value in labels.items():
        if isinstance(value, list):
            found = f"the region label {key!r}: {value!r} (`regions_class_order`)"[:200]
            remedy = "name each value of the label maps as a label of its own; regions are not trained"
            raise UserError(where, found, "one value for each label", remedy)
        number, name = (value, key) if isinstance(value, int) else (key, value)
        if isinstance(number, bool) or not isinstance(name, str) or not re.fullmatch(r"[0-9]{1,9}", str(number)):
            raise UserError(where, f"label {key!r}: {value!r}"[:200], wanted)
        if int(number) in numbered:
            raise UserError(where, f"label {number} twice", wanted)
        numbered[int(number)] = name
    if numbered and numbered.get(0, IGNORE).strip().lower() == IGNORE:
        raise UserError(where, f"labels {', '.join(map(str, sorted(numbered)))}"[:200], f"0, the background: {wanted}")
    found = _classes(((numbered[value], value) for value in sorted(numbered)[1:]), where)
    return replace(found, zero=numbered.get(0, BACKGROUND).strip())


def mapping(values: Iterable[int], classes: Classes) -> str:
    """Write the mapping of `data.labels` for values of label maps: by the names, where there is one for each."""
    found = sorted(value for value in values if value and value != classes.ignored)
    given = () if classes.names is None else classes.names[1:]
    called = list(given) if len(given) == len(found) else [f"label {value}" for value in found]
    if classes.ignored is not None:
        called, found = [*called, IGNORE], [*found, classes.ignored]
    return "{" + ", ".join(f"{name}: {value}" for name, value in zip(called, found, strict=True)) + "}"
