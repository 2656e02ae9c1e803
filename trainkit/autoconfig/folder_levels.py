"""Folders with a level too many, or that are themselves a split: recognised when a recipe is fitted to them."""

from __future__ import annotations

from trainkit.autoconfig import fit as fitting
from trainkit.autoconfig.fit import Fitted
from trainkit.data import hub, sources
from trainkit.paths import locate


def taken(fitted: Fitted, text: str) -> str:
    """Return the folder to look at for one that was named: where its classes lie deeper, the one that holds them.

    That is said, and so is a split whose others lie beside it.
    """
    place = None if hub.is_hub(text) or "#" in text or text.startswith(sources.SAMPLE) else locate(text)
    if place is None or not place.is_dir():
        return text
    if (inner := sources.only_way(place)) is not None:
        inner_text = fitting.as_named(inner)
        fitted.seen.append(f"{text} holds a single folder with the others: using {inner_text}")
        return inner_text
    if place.name.lower() in sources.SPLITS:
        others = sources.splits_beside(place)
        if others:
            beside = fitting.as_named(place.parent)
            fitted.seen.append(f"{beside} also holds {', '.join(others)}: `--data {beside}` would evaluate on it")
    return text
