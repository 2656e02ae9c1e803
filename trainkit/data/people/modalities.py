"""The kinds of records by which a person is known: images of four kinds, and words."""

from __future__ import annotations

from itertools import combinations

from trainkit.interfaces import MODALITIES, RGB

ALIASES = {"vis": "rgb", "visible": "rgb", "ir": "nir", "infrared": "nir", "pencil": "cp", "sketch": "sk"}
"""Other words that sets use."""


def code(word: str) -> int | None:
    """Return the place of a modality in `MODALITIES`, by its name or another word for it; None for an unknown one."""
    name = ALIASES.get(word.strip().lower(), word.strip().lower())
    return MODALITIES.index(name) if name in MODALITIES else None


def subsets(known: tuple[str, ...] = MODALITIES[1:]) -> list[tuple[int, ...]]:
    """List the sets of modalities that a query can be made of, fewest first: 15 of four. RGB is what is looked for."""
    codes = [m for m, name in enumerate(MODALITIES) if name in known and m != RGB]
    return [some for size in range(1, len(codes) + 1) for some in combinations(codes, size)]


def title(some: tuple[int, ...]) -> str:
    """Return a set of modalities as a name of scores may have it: `nir_sk_text`."""
    return "_".join(MODALITIES[m] for m in some)
