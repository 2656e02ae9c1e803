"""Trivial baselines: predictions from labels and pixels alone, which a trained network must beat.

Classes: the majority class, and the nearest training image by correlation of the pixels (1-NN). Scenes: the most
frequent class, of all pixels and at each position. Volumes: the mean of the training label maps. They return the rows
that `Task.predict` returns for a batch, so that a task computes the same metrics for them as for its network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from trainkit.evaluation_protocols import Classes, Inspection, Separation
from trainkit.interfaces import Baseline, Batch, Rows, Split
from trainkit.tensors import F, torch

if TYPE_CHECKING:
    from torch import Tensor

MOST_PIXELS = 64 * 64
"""Pixels up to which images are compared unchanged; larger ones are averaged over areas first."""
MOST_MULTIPLICATIONS = 1e11
"""Limit of the 1-NN for the whole evaluation: 2 to 6 s on a core at 20 to 50 thousand million a second."""
MOST_VALUES = 150_000_000
"""Limit of the 1-NN: pixels of all training images that it keeps, 600 MB."""
MOST_CELLS = 1 << 25
"""Limit: positions times classes of an estimated label map, 128 MB."""
MOST_VOXELS = 1 << 28
"""Limit: voxels of the label maps that are averaged."""

Predict = Callable[[Batch], Rows]
Count = Callable[["Tensor", Batch], Rows]
"""Score label maps (B, ...) against a batch: the rows that `Task.predict` returns."""


# ---- Classes


def of_classes(split: Split, train: Split | None) -> list[Baseline]:
    """Return the baselines of a classification; none for another evaluation, or without training labels."""
    protocol, known = split.protocol, train.protocol if train is not None else None
    if not isinstance(protocol, Classes) or not isinstance(known, Classes):
        return []
    label, classes = np.asarray(known.label), len(protocol.names)
    nearest = Baseline(
        "1-NN on pixels",
        lambda batches: nearest_image(batches, classes, split.size),
        sees="fetched",
        lacks=("nll", "ece"),  # a correlation is not a probability
    )
    if isinstance(protocol, Separation | Inspection):  # they evaluate embeddings, which a constant does not have
        return [nearest]
    return [Baseline("majority class", lambda _: majority_class(label, classes), sees="index"), nearest]


def majority_class(label: np.ndarray, classes: int) -> Predict:
    """Predict the class frequencies of the training labels (N,), -1 for none, for every image.

    Logits are the logarithms of the class counts plus one.
    """
    logits = torch.from_numpy(np.bincount(label[label >= 0], minlength=classes) + 1.0).log()
    return lambda batch: {"logits": logits.expand(len(batch["index"]), classes)}


def nearest_image(batches: Iterator[Batch], classes: int, queries: int) -> Predict:
    """Predict the class of the nearest training image, by correlation of the pixels.

    The logit of a class is the correlation with its nearest image, which ranks the classes. `queries` is the number of
    images to predict: the number of training images kept is limited so that the comparison takes seconds.
    """
    kept, labels, count, most = [], [], 0, math.inf
    for batch in batches:
        known = batch["label"] >= 0
        kept.append(correlated(batch["image"][known]))
        labels.append(batch["label"][known])
        count += len(kept[-1])
        values = kept[-1].shape[1]
        most = min(MOST_VALUES, MOST_MULTIPLICATIONS / queries) / values
        if count >= most:
            break
    label = torch.cat(labels).numpy()
    order = np.argsort(label, kind="stable")
    images = torch.cat(kept)[torch.from_numpy(order)].T.contiguous()
    present, starts = np.unique(label[order], return_index=True)

    def predict(batch: Batch) -> Rows:
        similarity = (correlated(batch["image"]) @ images).numpy()
        logits = np.full((len(similarity), classes), -1.0, dtype=np.float32)
        logits[:, present] = np.maximum.reduceat(similarity, starts, axis=1)
        embedding = batch["image"].flatten(1).float()
        return {"logits": torch.from_numpy(logits), "embedding": embedding, "norm": embedding.norm(dim=1)}

    return predict


def correlated(images: Tensor) -> Tensor:
    """Turn images (B, C, H, W) into vectors whose dot products are pixel correlations, float32 (B, D)."""
    height, width = images.shape[2:]
    images = images.float()
    if height * width > MOST_PIXELS:
        shrunk = math.sqrt(MOST_PIXELS / (height * width))
        images = F.adaptive_avg_pool2d(images, (max(1, int(height * shrunk)), max(1, int(width * shrunk))))
    flat = images.flatten(1)
    return F.normalize(flat - flat.mean(1, keepdim=True))


# ---- Label maps


def of_scenes(classes: int, count: Count) -> list[Baseline]:
    """Return the baselines of segmented images: the most frequent class of all pixels, and of each position."""

    def overall(batches: Iterator[Batch]) -> Predict:
        frequent = int(class_counts(batches, classes).sum((1, 2)).argmax())
        return lambda batch: count(torch.full_like(batch["mask"], frequent), batch)

    def each(batches: Iterator[Batch]) -> Predict:
        frequent = class_counts(batches, classes).argmax(0)[None]

        def predict(batch: Batch) -> Rows:
            mask = batch["mask"]
            return count(_resized(frequent, mask.shape[1:]).expand(mask.shape), batch)

        return predict

    return [
        Baseline("most frequent class", overall),
        Baseline("most frequent class per position", each),
    ]


def class_counts(batches: Iterator[Batch], classes: int) -> Tensor:
    """Count how often each class is at each position of label maps, int64 (classes, H, W).

    The grid is that of the first map, or a coarser one if that is too large; maps of other sizes are resized to it.
    """
    size, counts = None, torch.zeros((classes, 1, 1), dtype=torch.int64)
    for batch in batches:
        mask = batch["mask"]
        if size is None:
            shrunk = min(1.0, math.sqrt(MOST_CELLS / (classes * mask[0].numel())))
            size = (max(1, int(mask.shape[1] * shrunk)), max(1, int(mask.shape[2] * shrunk)))
            counts = torch.zeros((classes, *size), dtype=torch.int64)
        mask = _resized(mask, size).flatten(1).long()
        cell = mask * mask.shape[1] + torch.arange(mask.shape[1])
        counts += torch.bincount(cell[mask < classes], minlength=counts.numel()).view(counts.shape)
    return counts


def _resized(maps: Tensor, size: tuple[int, ...] | torch.Size) -> Tensor:
    """Resize label maps (B, H, W) by their nearest pixels."""
    if tuple(maps.shape[1:]) == tuple(size):
        return maps
    down, right = (
        ((torch.arange(new) + 0.5) * (old / new)).long().clamp_max(old - 1)
        for new, old in zip(size, maps.shape[1:], strict=True)
    )
    return maps[:, down[:, None], right]


def of_volumes(classes: int, count: Count) -> list[Baseline]:
    """Return the baseline of whole volumes: the mean of the training label maps, stretched to each."""

    def fit(batches: Iterator[Batch]) -> Predict:
        mean = mean_label_map(batches, classes)

        def predict(batch: Batch) -> Rows:
            stretched = F.interpolate(mean, batch["mask"].shape[1:], mode="trilinear")
            return count(stretched.argmax(1).to(torch.uint8), batch)

        return predict

    return [Baseline("mean label map", fit)]


def mean_label_map(batches: Iterator[Batch], classes: int) -> Tensor:
    """Add up the label maps of volumes, each stretched to the median size, float32 (1, classes, D, H, W).

    Voxels that are IGNORED are counted for no class.
    """
    maps, voxels = [], 0
    for batch in batches:
        maps += list(batch["mask"])
        voxels += batch["mask"].numel()
        if voxels >= MOST_VOXELS:
            break
    size = np.median([one.shape for one in maps], axis=0)
    size *= min(1.0, (MOST_CELLS / (classes * size.prod())) ** (1 / 3))
    whole = torch.zeros((1, classes, *np.maximum(size, 1).astype(int).tolist()))
    for one in maps:
        hot = torch.stack([one == number for number in range(classes)])[None]
        whole += F.interpolate(hot.float(), whole.shape[2:], mode="trilinear")
    return whole
