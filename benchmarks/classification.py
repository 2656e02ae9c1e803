"""ConvNeXt on pictures: a small and a larger one on the drawn objects, and CIFAR-10 with and without mixing.

    python benchmarks/classification.py            runs what is missing, prints the tables
    python benchmarks/classification.py --table    prints the tables of what is there

Each run scores its own weights and their average, at the end alone: nothing is chosen on the pictures that are scored.
"""

from __future__ import annotations

import comparison
from comparison import Row

CIFAR = {"top-1": "test/top1", "top-1, averaged": "test/ema/top1", "ECE": "test/ece", "ECE, averaged": "test/ema/ece"}
CIFAR_ROWS = [
    Row("as shipped", "convnext_cifar10"),
    Row("mixup 0.8, cutmix 1.0", "convnext_cifar10", ("task.mix={mixup: 0.8, cutmix: 1.0}",)),
]

if __name__ == "__main__":
    comparison.need_data()
    comparison.run(CIFAR_ROWS, CIFAR, "cifar10")
