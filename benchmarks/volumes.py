"""Volumes: does a larger model beat a smaller one, both the mean label map, and how well is real anatomy segmented?

    python benchmarks/volumes.py            runs what is missing, prints the tables
    python benchmarks/volumes.py --table    prints the tables of what is there

Drawn orbits, and the hippocampus of the Medical Segmentation Decathlon with a fifth of its patients held out; three
seeds each, scores of whole volumes at the last step.
"""

from __future__ import annotations

import comparison
import numpy as np
from comparison import Row

SMALLER = "task.net={name: unet, filters: [8, 16, 32, 64], res_units: 1}"
TABLES = {
    "orbits": (
        {
            "Dice": "val/dice_mean",
            "EB": "val/dice.eb",
            "ON": "val/dice.on",
            "SO": "val/dice.so",
            "HD95, mm": "val/hd95_mean_mm",
            "NSD, 1 mm": "val/nsd_mean",
        },
        [Row("U-Net, half as wide", "tom500", (SMALLER,)), Row("U-Net, as shipped", "tom500")],
    ),
    "hippocampus": (
        {
            "Dice": "val/dice_mean",
            "anterior": "val/dice.anterior",
            "posterior": "val/dice.posterior",
            "HD95, mm": "val/hd95_mean_mm",
            "ASD, mm": "val/asd_mean_mm",
            "NSD, 1 mm": "val/nsd_mean",
        },
        [Row("U-Net, as shipped", "hippocampus")],
    ),
}


def mean_label_map(recipe: str, name: str) -> tuple[list[str], list[float]]:
    """Dice of each organ when every volume gets the mean label map of the training volumes, stretched to its size."""
    import torch
    import torch.nn.functional as F

    from trainkit.config import loader
    from trainkit.metrics.surface_distance import case_scores

    data = loader.load(comparison.ROOT / "recipes" / f"{recipe}.yaml").data.open(0)
    train, scored = data.evaluations["train"], data.evaluations[name]
    classes = data.meta.classes
    size = tuple(np.median([train.packed.case(c).original_shape for c in train.cases.tolist()], axis=0).astype(int))
    mean = torch.zeros((1, classes, *size))
    for case in train.cases.tolist():
        one = F.one_hot(torch.from_numpy(train.packed.truth(case).astype(np.int64)), classes).movedim(-1, 0)[None]
        mean += F.interpolate(one.float(), size, mode="trilinear")
    dice = []
    for case in scored.cases.tolist():
        truth = scored.packed.truth(case)
        guess = F.interpolate(mean, truth.shape, mode="trilinear")[0].argmax(0).numpy().astype(np.uint8)
        spacing = scored.packed.case(case).original_spacing
        dice.append(case_scores(guess, truth, spacing, classes, [1.0] * (classes - 1))["dice"])
    return list(data.meta.class_names[1:]), np.nanmean(dice, axis=0).tolist()


if __name__ == "__main__":
    comparison.need_data()
    for experiment, (columns, rows) in TABLES.items():
        comparison.run(rows, columns, experiment)
        names, dice = mean_label_map(rows[0].recipe, "val")
        each = ", ".join(f"{name} {value:.3f}" for name, value in zip(names, dice, strict=True))
        print(f"mean label map: Dice {np.mean(dice):.3f} ({each})\n")
