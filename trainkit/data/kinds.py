"""List the kinds of data and, for each, the functions that verify, configure, predict and export it.

A function is named by `package.module:name` and imported when it is first needed, so that a table in the data layer
can name functions of layers above. A plug-in adds a row by `add`; see docs/how-to/extend.md.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from trainkit.config.schema import TABLES
from trainkit.errors import UserError

Verb = Literal["open", "holds", "verify", "configure", "predict", "predictor", "export"]
VERBS: tuple[Verb, ...] = ("open", "holds", "verify", "configure", "predict", "predictor", "export")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of data: its name, and the dotted name of a function for each verb; None where it has none."""

    name: str
    open: str
    """Class of the block `data` of a recipe, whose method `open` opens the data."""
    holds: str | None = None
    """`(path) -> bool`: True where the set at a path of the command line is of this kind."""
    verify: str | None = None
    """`(path, *, against, ...) -> list[str]`: say what is damaged, and after `warning: ` odd.

    Of `names`, `plugins` and `on_progress` it gets those that it has as parameters.
    """
    configure: str | None = None
    """`(fitted, recipe, data) -> None`: fit a recipe to other data, for `trainkit cp --data`; see `autoconfig.fit`."""
    predict: str | None = None
    """`(request) -> Predicted | None`: predict new data; None where the run's task predicts nothing of this kind."""
    predictor: str | None = None
    """`(rebuilt) -> function`: predict samples in memory, as `inference.predictor.Predictor.predict` does."""
    export: str | None = None
    """`(recipe) -> Exporter | None`: choose how a run is exported; None where its network cannot be."""
    sample: str = "image"
    """The word for a sample in progress bars."""


def _built_in(name: str, *, inference: str, verifying: str, export: str, **more: str) -> Kind:
    """Return the row of a kind whose functions lie in the modules of these names."""
    return Kind(
        name=name,
        open=TABLES["data"][name],
        verify=f"trainkit.data.{verifying}:verify",
        configure=f"trainkit.autoconfig.{name}:{name}",
        predict=f"trainkit.inference.{inference}:predict",
        predictor=f"trainkit.inference.{inference}:predictor",
        export=f"trainkit.export.{export}:exporter",
        **more,
    )


_IMAGES = {"inference": "images", "verifying": "verify_images", "export": "images"}
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        _built_in("images", **_IMAGES),
        _built_in("faces", **_IMAGES),
        _built_in(
            "volumes",
            inference="volumes",
            verifying="volumes.verify",
            export="volumes",
            holds="trainkit.data.volumes.importer:holds_volumes",
            sample="case",
        ),
        _built_in(
            "people",
            inference="people",
            verifying="people.verify",
            export="images",
            holds="trainkit.data.people.verify:holds_people",
        ),
        _built_in(
            "scenes",
            inference="scenes",
            verifying="scenes.verify",
            export="scenes",
            holds="trainkit.data.scenes.verify:holds_scenes",
        ),
    )
}
"""Kinds of data by their names, which are the words of recipes. Of several that hold a path the first is taken."""


def add(kind: Kind) -> None:
    """Add the row of a plug-in, which calls this when it is imported. Raises UserError for a name that is taken."""
    if KINDS.get(kind.name, kind) != kind:
        raise UserError(f"the kind of data {kind.name!r}", "already exists", remedy="choose another name")
    for verb in VERBS:
        dotted = getattr(kind, verb)
        if dotted is not None and not re.fullmatch(r"[\w.]+:\w+", dotted):
            raise UserError(f"{verb} of the kind of data {kind.name!r}", repr(dotted), "package.module:function")
    KINDS[kind.name] = kind


def of(data: object) -> Kind | None:
    """Return the row of a recipe's block `data`, by its class or one that it inherits from; None without one."""
    rows = {kind.open: kind for kind in KINDS.values()}
    classes = (f"{cls.__module__}:{cls.__qualname__}" for cls in type(data).__mro__)
    return next((rows[name] for name in classes if name in rows), None)


def name(data: object) -> str:
    """Return the name of the kind of a recipe's block `data`; that of its class where it is of none."""
    kind = of(data)
    return kind.name if kind is not None else type(data).__name__


def at(path: object) -> Kind:
    """Return the kind of the set at a path: the first that holds it, else `images`, whose packed form `faces` share."""
    for kind in KINDS.values():
        if (holds := function(kind, "holds")) is not None and holds(path):
            return kind
    return KINDS["images"]


def function(kind: Kind, verb: Verb) -> Callable[..., Any] | None:
    """Import the function of a kind for a verb; None where it has none."""
    dotted: str | None = getattr(kind, verb)
    if dotted is None:
        return None
    module, _, name = dotted.partition(":")
    return getattr(importlib.import_module(module), name)
