"""Names of labels, and the values that they have in label maps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainkit.errors import UserError, few
from trainkit.interfaces import IGNORED

BACKGROUND = "background"
"""The name of label 0."""

IGNORE = "ignore"
"""The name, in nnU-Net's files, of voxels that nobody labelled: they are no class, whatever value they have."""

VALUE_LIMIT = 1 << 31
"""Values of classes in label maps are below it."""


@dataclass(frozen=True)
class Classes:
    """Labels that label maps may hold."""

    names: tuple[str, ...] | None = None
    """Of classes 0, 1, ..., the first of them `background`; None: not known."""
    values: tuple[int, ...] | None = None
    """Of classes 1, 2, ... in label maps; None: 1, 2, ..."""
    ignored: int | None = None
    """The value of voxels that are ignored."""

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
        pairs = [(name.strip(), value) for name, value in names.items()]
    else:
        listed = [name.strip() for name in names]
        pairs = [(name, place + 1) for place, name in enumerate(listed[listed[:1] == [BACKGROUND] :])]
    kept = [(name, value) for name, value in pairs if name.lower() != IGNORE]
    ignored = [value for name, value in pairs if name.lower() == IGNORE]
    if len(ignored) > 1:
        raise UserError(where, f"{IGNORE!r} for the values {few(map(str, ignored))}", "one value")
    called = [BACKGROUND, *(name for name, _ in kept)]
    if (
        not kept
        or not all(name and name.isprintable() for name in called)
        or len({*map(str.lower, called)}) <= len(kept)
    ):
        found = f"names of labels {', '.join(map(repr, called))}"[:200]
        raise UserError(where, found, "different names of labels 1, 2, ...")
    if len(called) > IGNORED:
        raise UserError(where, f"{len(kept)} labels", f"at most {IGNORED - 1}")
    values = tuple(value for _, value in kept)
    return Classes(tuple(called), None if values == tuple(range(1, len(called))) else values, *ignored)


def of_json(labels: object, where: str) -> Classes:
    """Read `{"0": "background", "1": "Anterior"}`, or nnU-Net's `{"background": 0, "Anterior": 1}`."""
    if labels is None:
        return Classes()
    wanted = 'names of labels such as {"0": "background", "1": "liver"}'
    numbered: dict[int, str] = {}
    for key, value in labels.items() if isinstance(labels, dict) else [(labels, None)]:
        if isinstance(value, list):
            found = f"the region label {key!r}: {value!r} (`regions_class_order`)"[:200]
            remedy = "name each value of the label maps as a label of its own; regions are not trained"
            raise UserError(where, found, "one value for each label", remedy)
        number, name = (value, key) if type(value) is int else (key, value)
        if not (isinstance(name, str) and re.fullmatch("[0-9]{1,9}", str(number))) or int(str(number)) in numbered:
            raise UserError(where, f"label {key!r}: {value!r}"[:200], wanted)
        numbered[int(str(number))] = name
    if numbered.pop(0, "").strip().lower() != BACKGROUND:
        raise UserError(where, f"labels {labels!r}"[:200], f"0, the {BACKGROUND}: {wanted}")
    return classes_named({name: value for value, name in sorted(numbered.items())}, where)
