"""Scores of whole evaluation sets, from one row per picture or volume."""

from __future__ import annotations

from trainkit.evaluation_protocols import (
    Classes,
    Identification,
    Inspection,
    Pairs,
    Retrieval,
    Scenes,
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
    """Score an evaluation set as its protocol says.

    `rows` are ordered by index: `embedding` (N, D), of faces that of the picture and its mirror image summed;
    `norm` (N,), the mean norm of the two before they were summed; `logits` (N, C), the scores of the classes; of
    volumes what `score_segmentation` takes, of segmented pictures what `score_scenes` takes. Each protocol takes
    what it needs. `where` is what messages call the set; `split`, where pictures are shown, is asked for them.
    """
    match protocol:
        case Pairs():
            return score_pairs(rows["embedding"], protocol, rows.get("norm"), where)
        case Separation():  # before Classes, which it is one of
            return score_separation(rows, protocol, where)
        case Inspection():  # likewise
            if split is None:
                raise ValueError("an inspection needs the split, whose pictures it shows")
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
            raise ValueError(f"no score for a protocol of type {type(protocol).__name__}")
    if "norm" in rows:
        scores.metrics["xnorm"] = float(rows["norm"].double().mean())
    return scores
