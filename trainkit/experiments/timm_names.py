"""Check that timm has the networks and optimizers that a recipe names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from trainkit.config.schema import Recipe
from trainkit.errors import UserError


def refuse_unknown(*recipes: Recipe) -> None:
    """Raise UserError for the first network or optimizer that timm does not have.

    timm, which takes seconds to import, is imported only if a recipe names something of it; no network is built. A
    field with `metadata={"timm": PREFIX}` names a network of timm if its value begins with the prefix.
    """
    for recipe in recipes:
        for where, model in _of_timm(recipe, ""):
            from trainkit.models import timm_classifier

            timm_classifier.refuse_unknown(model, where)
        if recipe.optim.name.startswith("timm:"):
            from timm.optim import list_optimizers  # pyright: ignore[reportPrivateImportUsage] # timm has no __all__

            if (name := recipe.optim.name[5:].lower().rpartition("_")[2]) not in list_optimizers():
                remedy = "choose a name from timm.optim.list_optimizers()"
                raise UserError("optim.name", f"timm has no optimizer {name!r}", remedy=remedy)


def _of_timm(block: object, path: str) -> Iterator[tuple[str, str]]:
    """Key path and name of every network of timm in a block."""
    if not is_dataclass(block):
        return
    for f in fields(block):
        value, place = getattr(block, f.name), f"{path}.{f.name}".lstrip(".")
        prefix = f.metadata.get("timm")
        if prefix is not None and value.startswith(prefix):
            yield place, value.removeprefix(prefix)
        yield from _of_timm(value, place)
