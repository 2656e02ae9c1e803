"""Scenes: does a larger model beat a smaller one, both what stands where, and what do points and boundaries bring?

    python benchmarks/segmentation.py            runs what is missing, prints the tables
    python benchmarks/segmentation.py --table    prints the tables of what is there

Drawn streets, and CamVid at a quarter of its area from random weights, every row of it for as many steps; three seeds
each, scores of whole images at the last step. What stands where: the commonest class of every place in the training
images.
"""

from __future__ import annotations

import comparison
import numpy as np
from comparison import Row

POINTS = "task.points={points: 512, subdivide: 2048}"
NEAR = ("task.objective.near={}", "data.distance={}")
COLUMNS = {
    "mIoU": "val/miou",
    "boundary F": "val/boundary_f",
    "pixels right": "val/pixel_accuracy",
    "mIoU, scales and mirror": "scales/miou",
}
TABLES = {
    "scenes": [Row("BiSeNetV2, a quarter as wide", "segment", ("task.net.width=0.25",)), Row("as shipped", "segment")],
    "camvid": [
        Row("BiSeNetV1", "camvid", ("task.net={name: bisenetv1}",)),
        Row("BiSeNetV2", "camvid"),
        Row("U-Net over ResNet-18", "camvid", ("task.net={name: smp, encoder: resnet18, decoder: unet}",)),
        Row("BiSeNetV2, points", "camvid", (POINTS,)),
        Row("BiSeNetV2, boundary weights", "camvid", NEAR),
        Row("BiSeNetV2, both", "camvid", (POINTS, *NEAR)),
    ],
}


def what_stands_where(recipe: str) -> dict[str, float]:
    """Scores of the commonest class of every place in the training images, for each image of `val`."""
    import torch

    from trainkit.config import loader
    from trainkit.metrics import boundary_f_score, segmentation_2d

    loaded = loader.load(comparison.ROOT / "recipes" / f"{recipe}.yaml")
    data = loaded.data.open(0)
    train, scored, classes = data.evaluations["train"], data.evaluations["val"], data.meta.classes
    rows = [one.fetch(np.arange(one.size), 0)["mask"] for one in (train, scored)]
    counts = torch.stack([(rows[0] == c).sum(0) for c in range(classes)])
    guess = counts.argmax(0)[None].expand(scored.size, -1, -1)
    found = segmentation_2d.pixel_counts(guess, rows[1], classes)
    within = boundary_f_score.tolerance(*rows[1].shape[1:], loaded.task.boundary)
    found |= boundary_f_score.boundary_counts(guess, rows[1], classes, within)
    return segmentation_2d.score_scenes(found, scored.protocol, "val", scored).metrics


if __name__ == "__main__":
    comparison.need_data()
    for experiment, rows in TABLES.items():
        comparison.run(rows, COLUMNS, experiment)
        prior = what_stands_where(rows[0].recipe)
        print(f"what stands where: mIoU {prior['miou']:.3f}, boundary F {prior['boundary_f']:.3f}\n")
