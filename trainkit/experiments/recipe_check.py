"""Check a recipe without touching a device or a store."""

from __future__ import annotations

from trainkit.autoconfig import new_recipe
from trainkit.config import loader
from trainkit.config.run_request import RunRequest, beside, load
from trainkit.experiments.launch import children_of
from trainkit.models.timm_names import refuse_unknown
from trainkit.paths import recipe_word
from trainkit.tracking.store import Store
from trainkit.training import dependencies

_SHOWN = 30
"""Settings of a sweep that are listed when it is checked."""


def check(request: RunRequest) -> str:
    """The resolved recipe, of several the first; sentences about data and weights that are not there yet, about lines
    that a copy has marked; and of a sweep its settings. Touches no device or store.

    Raises ConfigError with every mistake of the recipe and of the recipes it needs, else UserError for what timm lacks.
    """
    children = children_of(request)
    recipe = children[0].recipe if request.sweep else load(request)
    refuse_unknown(recipe, *(child.recipe for child in children))
    notes = list(recipe.data.missing())
    said = [f"to decide: {line}" for line in new_recipe.open_lines(request.path, recipe)]
    for name, source in recipe.task.required_weights().items():
        if source.recipe is not None:
            other = RunRequest(beside(request.path, source.recipe), plugins=request.plugins)
            needed = load(other)
            refuse_unknown(needed)
            open_lines = new_recipe.open_lines(other.path, needed)
            said += [f"to decide: {other.path.name}, {line}" for line in open_lines]
            continue
        where, named = f"task.{name}.weights", recipe_word(request.path)
        if absent := dependencies.missing(source.weights or "", Store.locate(), where, named):
            notes.append(absent)
    said += [f"not there yet: {note}" for note in notes]
    if request.sweep:
        said += [f"{child.title}: {child.said}" for child in children[:_SHOWN]]
        said += [f"and {len(children) - _SHOWN} more"] if len(children) > _SHOWN else []
        said += [f"one of {request.sweep.tpe} that will be proposed"] if request.sweep.tpe else []
    return loader.dump(recipe) + "".join(f"# {line}\n" for line in said)
