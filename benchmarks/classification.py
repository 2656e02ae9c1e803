"""Images of classes: does a larger model beat a smaller one, and what do averaging and mixing do?

    python benchmarks/classification.py            runs what is missing, prints the tables
    python benchmarks/classification.py --table    prints the tables of what is there

Drawn objects, CIFAR-10 with and without mixing, drawn eyes, Omniglot; three seeds each. Each run scores its own weights
and their average; the scores of the last step are shown, not the best.
"""

from __future__ import annotations

import comparison
import numpy as np
from comparison import Row

LARGER = "task.net.args.dims=[64, 128, 192, 192]"
CONVNEXT = "task.net={name: eye_convnext, base_channels: 32, num_blocks: 4, head: transformer, layer_scale: 0.3}"
TABLES = {
    "objects": (
        {"top-1": "val/top1", "top-1, averaged": "val/ema/top1", "ECE": "val/ece"},
        [Row("as shipped", "convnext"), Row("twice as wide", "convnext", (LARGER,))],
        None,
    ),
    "cifar10": (
        {"top-1": "test/top1", "averaged": "test/ema/top1", "ECE": "test/ece", "ECE, averaged": "test/ema/ece"},
        [
            Row("as shipped", "convnext_cifar10"),
            Row("mixup 0.8, cutmix 1.0", "convnext_cifar10", ("task.mix={mixup: 0.8, cutmix: 1.0}",)),
        ],
        None,
    ),
    "eyes": (
        {
            "accuracy": "val/accuracy",
            "F1": "val/f1",
            "AUC": "val/auc",
            "KS": "separation/ks",
            "Fisher": "separation/fisher",
        },
        [
            Row("eye_baseline, 8 channels", "eye_state", ("task.net.base_channels=8",)),
            Row("eye_baseline, 32 channels, as shipped", "eye_state"),
            Row("eye_convnext, 32 channels, transformer, 24 epochs", "eye_state", (CONVNEXT, "train.length=24 epochs")),
        ],
        None,
    ),
    "omniglot": (
        {"recall@1": "unseen/recall_at_1", "mAP@R": "unseen/map_at_r"},
        [Row("as shipped", "omniglot")],
        "pixels",
    ),
}


def nearest(recipe: str, name: str) -> float:
    """Share of a split's images whose nearest training image, by correlation of the pixels, is of their class."""
    from trainkit.config import loader

    data = loader.load(comparison.ROOT / "recipes" / f"{recipe}.yaml").data.open(0)
    train, scored = (_pixels(split) for split in (data.evaluations["train"], data.evaluations[name]))
    hits = [train[1][np.argmax(row @ train[0].T)] == label for row, label in zip(*scored, strict=True)]
    return float(np.mean(hits))


def _pixels(split) -> tuple[np.ndarray, np.ndarray]:
    batch = split.fetch(np.arange(split.size), 0)
    flat = batch["image"].flatten(1).double().numpy()
    flat -= flat.mean(1, keepdims=True)
    return flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12), batch["label"].numpy()


if __name__ == "__main__":
    comparison.need_data()
    for experiment, (columns, rows, reference) in TABLES.items():
        comparison.run(rows, columns, experiment, reference)
        if reference is None:
            metric = next(iter(columns.values()))
            print(f"nearest training image by its pixels: {nearest(rows[0].recipe, metric.split('/')[0]):.3f}\n")
