"""Folders with a level too many: recognised when a recipe is fitted to them."""

from __future__ import annotations

from trainkit.autoconfig import fit as fitting
from trainkit.autoconfig.fit import Fitted
from trainkit.data import hub, sources
from trainkit.paths import locate


def taken(fitted: Fitted, text: str) -> str:
    """Return the folder of classes: the one that was named, or the only one deeper in it, with a sentence about it."""
    place = None if hub.is_hub(text) or "#" in text or text.startswith(sources.SAMPLE) else locate(text)
    if place is None or not place.is_dir() or (inner := sources.only_way(place)) is None:
        return text
    inner_text = fitting.as_named(inner)
    fitted.seen.append(f"{text} holds a single folder with the others: using {inner_text}")
    return inner_text
