"""A recipe of which only the steps are left, for trainings that are measured and thrown away."""

from __future__ import annotations

from dataclasses import replace

from trainkit.config.schema import Recipe


def steps_alone(recipe: Recipe) -> Recipe:
    """Return a recipe without scheduled evaluations, checkpoints and figures, and without what follows from scores."""
    return replace(
        recipe,
        train=replace(recipe.train, schedule=recipe.train.schedule.without_scores()),
        evaluations={
            name: replace(each, every=None, at_start=False, at_end=False) for name, each in recipe.evaluations.items()
        },
        best=None,
        stop_when=None,
        promote=None,
        checkpoints=replace(recipe.checkpoints, every=None, at_end=False, lose_at_most=None),
        log=replace(recipe.log, figures=None, profile=None, system_every=None, ceilings="off", rows=False),
    )
