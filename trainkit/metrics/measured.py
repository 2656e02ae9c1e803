"""Names of the metrics that an evaluation set will have, from its protocol, before anything is evaluated."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from trainkit.errors import UserError
from trainkit.evaluation_protocols import (
    Classes,
    Identification,
    Inspection,
    Pairs,
    Retrieval,
    Scenes,
    Search,
    Segmentation,
    Separation,
    Templates,
)
from trainkit.metrics import identification, reid, retrieval, segmentation_3d, verification
from trainkit.metrics.class_separation import COMPONENTS, check_separation
from trainkit.metrics.classification import check_classes
from trainkit.metrics.ijb_templates import check_templates
from trainkit.metrics.ranking import Gallery


def names(protocol: object, rows: Collection[str], where: str = "evaluation set") -> tuple[str, ...] | None:
    """Return all metrics that `score` may return for a protocol; None for a protocol of a plug-in.

    `rows` are the columns that the task predicts. What depends on predictions is among them, such as the Dice of an
    organ that no case may turn out to have. Raises UserError for a task that does not predict what the protocol needs.
    """
    needed = _needed(protocol)
    if needed and not needed.intersection(rows):
        expected = " or ".join(sorted(needed)).replace("logits", "scores of classes").replace("embedding", "embeddings")
        remedy = "for scores of classes set task.classify, where the task has it; or remove this evaluation"
        raise UserError(where, f"{type(protocol).__name__} of a task that does not predict {expected}", remedy=remedy)
    match protocol:
        case Inspection():
            return ("hard_share", "mislabelled_share", "outlier_share")
        case Separation():  # before Classes, which it is one of
            check_separation(protocol, where)
            found = _of_separation(protocol, rows)
        case Classes():
            check_classes(protocol, where)
            found = _of_classes(protocol)
        case Retrieval():
            retrieval.check_retrieval(protocol, where)
            ranks = (f"recall_at_{k}" for k in retrieval.RANKS if k < len(protocol) - 1)
            found = (*ranks, "r_precision", "map_at_r")
        case Pairs():
            verification.check_pairs(protocol, where)
            found = _of_pairs(protocol)
        case Templates():
            check_templates(protocol, where)
            found = ("auc", "eer", *_rates(protocol.same, 6))
        case Identification():
            identification.check_identification(protocol, where)
            found = (f"rank_{k}" for k in identification.RANKS if k < len(protocol.gallery))
        case Search():
            found = _of_search(protocol)
        case Segmentation():
            found = _of_volumes(protocol)
        case Scenes():
            found = _of_scenes(protocol, "edge_actual" in rows)
        case _:
            return None
    normed = isinstance(protocol, Pairs | Templates | Identification) and "norm" in rows
    return (*found, "xnorm") if normed else tuple(found)


def _needed(protocol: object) -> set[str]:
    """Return the columns of which `score` needs one; empty for other protocols."""
    match protocol:
        case Separation():
            return {"embedding", "logits"}
        case Classes():
            return {"logits"}
        case Retrieval() | Pairs() | Templates() | Identification():
            return {"embedding"}
    return set()


def _of_classes(protocol: Classes) -> Iterator[str]:
    yield from ("top1", "balanced_accuracy", "f1_macro", "nll", "ece")
    if len(protocol.names) > 5:
        yield "top5"
    if len(protocol.names) == 2:
        yield "accuracy"
        if np.isin((0, 1), protocol.label).all():
            yield from ("f1", "auc")


def _of_separation(protocol: Separation, rows: Collection[str]) -> Iterator[str]:
    if "logits" in rows:
        yield "ece"
        if len(protocol.names) == 2:
            yield from ("ks", "hellinger", "js", "margin", "bayes_error", "auc", "d_prime")
    if "embedding" in rows:
        yield from ("intra", "inter", "fisher_legacy", "fisher", "bhattacharyya", "silhouette")
        yield from (f"pca_energy_{k}" for k in range(COMPONENTS))


def _of_pairs(protocol: Pairs) -> Iterator[str]:
    yield from ("accuracy", "accuracy_std", "threshold", "auc", "eer", *_rates(protocol.same, 4))
    if verification.has_val_at_far(np.asarray(protocol.same, dtype=bool), verification.contiguous_folds(len(protocol))):
        yield from ("val_at_far_1e-3", "val_at_far_1e-3_std", "val_at_far_1e-3_far")


def _rates(same: np.ndarray, most: int) -> list[str]:
    """Return the rates for which there are enough impostor pairs."""
    impostors = int((~np.asarray(same, dtype=bool)).sum())
    return [f"tar_at_far_1e-{power}" for power in range(1, most + 1) if impostors >= 10**power]


def _of_search(protocol: Search) -> Iterator[str]:
    galleries = [Gallery.make(rows, rows, protocol) for rows in protocol.galleries]
    reach = min(len(g.firsts if protocol.by_person else g.rows) for g in galleries)
    own = ("map", *(f"rank_{k}" for k in reid.RANKS if k < reach), "minp")
    yield from (*own, "unmatched")
    if protocol.kind != "ranked":
        yield from (f"{title}.{key}" for title in protocol.groups for key in own)
        yield from (f"{title}.{key}" for title in protocol.queries for key in reid.OF_A_LIST if key in own)


def _of_volumes(protocol: Segmentation) -> Iterator[str]:
    words = segmentation_3d.metric_words(protocol.names[1:])
    if protocol.kind == "patches":
        yield from ("dice_mean", "iou_mean", *_each(["dice"], words))
    elif protocol.kind == "overlays":
        yield from ("dice_mean", "missed", "invented", "cases")
    else:
        means, each = zip(*segmentation_3d.METRICS.values(), strict=True)
        yield from (*means, "missed", "invented", "cases", *_each(each, words))
        if len(set(protocol.patients)) > 1:
            yield from ("dice_mean_low", "dice_mean_high")


def _of_scenes(protocol: Scenes, boundaries: bool) -> Iterator[str]:
    yield from ("miou", "pixel_accuracy", "pictures", *(["boundary_f"] if boundaries else []))
    if protocol.kind == "scores":
        each = ["iou", *(["boundary_f"] if boundaries else [])]
        yield from ("mean_accuracy", "fwiou", *_each(each, segmentation_3d.metric_words(protocol.names)))
        if len(protocol) > 1:
            yield from ("miou_low", "miou_high")


def _each(scores: Sequence[str], words: Sequence[str]) -> list[str]:
    return [f"{score}.{word}" for score in scores for word in words]
