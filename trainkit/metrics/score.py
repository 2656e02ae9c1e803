"""Evaluate a whole set by its protocol: its metrics from one row per image or volume, and their names beforehand."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

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
from trainkit.interfaces import Rows, Scores, Split
from trainkit.metrics import (
    class_separation,
    classification,
    embedding_inspection,
    identification,
    ijb_templates,
    reid,
    retrieval,
    segmentation_2d,
    segmentation_3d,
    verification,
)


def score(rows: Rows, protocol: object, where: str = "evaluation set", split: Split | None = None) -> Scores:
    """Compute the metrics of an evaluation set by its protocol.

    `rows` are ordered by index: `embedding` (N, D), for faces summed over the image and its mirror image;
    `norm` (N,), the mean norm of the two before they were summed; `logits` (N, C), the scores of the classes; for
    volumes the rows of `score_segmentation`, for segmented images those of `score_scenes`. `where` names the set in
    messages; `split` is needed by protocols that show images.
    """
    match protocol:
        case Pairs():
            return verification.score_pairs(rows["embedding"], protocol, rows.get("norm"), where)
        case Separation():  # before Classes, which it is one of
            return class_separation.score_separation(rows, protocol, where)
        case Inspection():  # likewise
            if split is None:
                raise ValueError("an inspection needs the split for its images")
            return embedding_inspection.score_inspection(rows, protocol, split, where)
        case Classes():
            return classification.score_classes(rows["logits"], protocol, where)
        case Retrieval():
            return retrieval.score_retrieval(rows["embedding"], protocol, where)
        case Segmentation():
            return segmentation_3d.score_segmentation(rows, protocol, where)
        case Scenes():
            return segmentation_2d.score_scenes(rows, protocol, where, split)
        case Templates():
            scores = ijb_templates.score_templates(rows["embedding"], protocol, where)
        case Identification():
            scores = identification.score_identification(rows["embedding"], protocol, where)
        case _:
            raise ValueError(f"unknown evaluation protocol {type(protocol).__name__}")
    if "norm" in rows:
        scores.metrics["xnorm"] = float(rows["norm"].double().mean())
    return scores


def names(protocol: object, rows: Collection[str], where: str = "evaluation set") -> tuple[str, ...] | None:
    """Return all metrics that `score` may return for a protocol; None for a protocol of a plug-in.

    `rows` are the columns that the task predicts. What depends on predictions is among them, such as the Dice of an
    organ that no case may turn out to have. Raises UserError for a set that cannot be scored, and for a task that does
    not predict what the protocol needs.
    """
    needed = _needed(protocol)
    if needed and not needed.intersection(rows):
        expected = " or ".join(sorted(needed)).replace("logits", "scores of classes").replace("embedding", "embeddings")
        remedy = "for scores of classes set task.classify, where the task has it; or remove this evaluation"
        raise UserError(where, f"{type(protocol).__name__} of a task that does not predict {expected}", remedy=remedy)
    xnorm = ("xnorm",) if "norm" in rows else ()
    match protocol:
        case Inspection():
            return embedding_inspection.METRICS
        case Separation():  # before Classes, which it is one of
            return class_separation.names(protocol, rows, where)
        case Classes():
            return classification.names(protocol, where)
        case Retrieval():
            return retrieval.names(protocol, where)
        case Pairs():
            return verification.names(protocol, where) + xnorm
        case Templates():
            return ijb_templates.names(protocol, where) + xnorm
        case Identification():
            return identification.names(protocol, where) + xnorm
        case Search():
            return reid.names(protocol)
        case Segmentation():
            return segmentation_3d.names(protocol)
        case Scenes():
            return segmentation_2d.names(protocol, "edge_actual" in rows)
    return None


def _needed(protocol: object) -> set[str]:
    """Return the columns of which `score` needs one; empty for other protocols."""
    if isinstance(protocol, Classes):
        return {"embedding", "logits"} if isinstance(protocol, Separation) else {"logits"}
    return {"embedding"} if isinstance(protocol, Retrieval | Pairs | Templates | Identification) else set()


def headline(protocol: Any) -> tuple[str, ...] | None:
    """Return the metrics by which runs are compared, the most important first; empty for protocols that show images.

    None for an unknown protocol, such as one of a plug-in.
    """
    match protocol:
        case Inspection() | Search(kind="ranked") | Segmentation(kind="overlays") | Scenes(kind="overlays"):
            return ()
        case Separation():
            return ("auc", "d_prime", "fisher")
        case Classes() if len(protocol.names) == 2:
            return ("accuracy", "f1", "auc", "nll", "ece")
        case Classes():
            return ("top1", "top5", "f1_macro", "nll", "ece", "balanced_accuracy")
        case Pairs():
            return ("accuracy", "auc", "eer", "tar_at_far_1e-3", "tar_at_far_1e-4")
        case Templates():
            return ("tar_at_far_1e-4", "auc", "eer", "tar_at_far_1e-3", "tar_at_far_1e-5")
        case Identification():
            return ("rank_1", "rank_5")
        case Retrieval():
            return ("map_at_r", "recall_at_1", "r_precision")
        case Search():
            return ("map", "rank_1", "minp", "rank_5", "rank_10")
        case Segmentation(kind="patches"):
            return ("dice_mean", "iou_mean")
        case Segmentation():
            return ("dice_mean", "hd95_mean_mm", "nsd_mean", "iou_mean", "asd_mean_mm", "missed", "invented")
        case Scenes():
            return ("miou", "boundary_f", "pixel_accuracy", "mean_accuracy", "fwiou")
    return None
