"""Compute the metrics of whole evaluation sets from one row per image or volume."""

from __future__ import annotations

from typing import Any

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
from trainkit.metrics.class_separation import score_separation
from trainkit.metrics.classification import score_classes
from trainkit.metrics.embedding_inspection import score_inspection
from trainkit.metrics.identification import score_identification
from trainkit.metrics.ijb_templates import score_templates
from trainkit.metrics.retrieval import score_retrieval
from trainkit.metrics.segmentation_2d import score_scenes
from trainkit.metrics.segmentation_3d import score_segmentation
from trainkit.metrics.verification import score_pairs


def score(rows: Rows, protocol: object, where: str = "evaluation set", split: Split | None = None) -> Scores:
    """Compute the metrics of an evaluation set by its protocol.

    `rows` are ordered by index: `embedding` (N, D), for faces summed over the image and its mirror image;
    `norm` (N,), the mean norm of the two before they were summed; `logits` (N, C), the scores of the classes; for
    volumes the rows of `score_segmentation`, for segmented images those of `score_scenes`. `where` names the set in
    messages; `split` is needed by protocols that show images.
    """
    match protocol:
        case Pairs():
            return score_pairs(rows["embedding"], protocol, rows.get("norm"), where)
        case Separation():  # before Classes, which it is one of
            return score_separation(rows, protocol, where)
        case Inspection():  # likewise
            if split is None:
                raise ValueError("an inspection needs the split for its images")
            return score_inspection(rows, protocol, split, where)
        case Classes():
            return score_classes(rows["logits"], protocol, where)
        case Retrieval():
            return score_retrieval(rows["embedding"], protocol, where)
        case Segmentation():
            return score_segmentation(rows, protocol, where)
        case Scenes():
            return score_scenes(rows, protocol, where, split)
        case Templates():
            scores = score_templates(rows["embedding"], protocol, where=where)
        case Identification():
            scores = score_identification(rows["embedding"], protocol, where=where)
        case _:
            raise ValueError(f"unknown evaluation protocol {type(protocol).__name__}")
    if "norm" in rows:
        scores.metrics["xnorm"] = float(rows["norm"].double().mean())
    return scores


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
