"""Plans of the shipped recipes without their data, and what their headers say they run with."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trainkit.config import loader
from trainkit.distributed.launch_settings import LEAST_UPDATES
from trainkit.interfaces import Dataset, DatasetInfo, DrawsBlocks
from trainkit.training.plan import Plan

SIZE = 1 << 17
"""Samples of the set that stands in for a recipe's."""
LARGE = {
    "convnext_imagenet": 1_281_167,
    "adadistill_ms1mv2": 5_822_653,
    "adadistill_adaface_ms1mv2": 5_822_653,
    "face_teacher_ms1mv2": 5_822_653,
    "adadistill_casia": 490_623,
    "face_teacher_casia": 490_623,
    "eye_state_ocec": 376_000,
    "reid_market": 12_936,
    "reid_orbench": 130_000,  # its size is not published; it takes 60 epochs in any case
    "tom500_full": 800,
    "tom500_emcad_full": 8_000,
}
"""Training samples of the sets of recipes for a GPU; the built-in and small ones hold at most 10,000."""
PROCESSES = (1, 2, 4, 8, 16)


class Numbers:
    """A split of numbers in order, whose blocks are divided into runs."""

    name, size = "train", SIZE

    def order(self, epoch, batch_size):
        updates = self.size // batch_size
        return np.arange(updates * batch_size).reshape(updates, batch_size)

    def divide(self, rows, number, parts):
        return np.array_split(rows, parts)[number]


def stand_in(recipe, size=SIZE) -> Dataset:
    """A set of no files with the blocks that the recipe's has."""
    split = Numbers()
    split.size = size
    block, part = (recipe.data.block, recipe.data.sampler.each) if isinstance(recipe.data, DrawsBlocks) else (1, 0)
    return Dataset(DatasetInfo(2, (3, 8, 8), "0"), split, {}, block=block, part=part)


def runs(path: Path) -> str:
    """What the header of a recipe says under `runs`: on a GPU, on a CPU, on how many processes."""
    recipe = loader.load(path)
    precision = {"auto": "bf16", "no": "float32, as published"}[recipe.train.precision]
    steps = Plan.make(recipe, stand_in(recipe, LARGE[path.stem]), 1, 0).steps if path.stem in LARGE else 0
    if recipe.train.length.unit == "steps":
        steps = int(recipe.train.length.amount)
    compiled = {"auto": "compiled" if steps >= LEAST_UPDATES else "too short to compile", "off": "not compiled"}
    plans = [Plan.make(recipe, stand_in(recipe), world, 0) for world in PROCESSES]
    idle = ", ".join(f"{plan.idle} of {plan.world}" for plan in plans if plan.idle)
    many = f"{', '.join(map(str, PROCESSES))} processes" + f" (idle: {idle})" * bool(idle)
    return f"GPU: {precision}, {compiled[recipe.train.compile]}. CPU: float32. {many}"
