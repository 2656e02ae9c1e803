"""Definitions of the scores that evaluations report, by protocol: the part of the table of metrics that tasks measure.

A name may be a pattern: `iou.*` stands for `iou.CLASS` of each class, `rank_*` for `rank_1`, `rank_5`, ... Every metric
is logged as `EVALUATION/NAME`, and as `EVALUATION/ema/NAME` for EMA weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Direction = Literal["higher", "lower", "none"]
"""Values that are better; `none` for counts, thresholds, ends of intervals and descriptive numbers."""


@dataclass(frozen=True)
class Metric:
    """Definition of a metric."""

    text: str
    """One or two sentences."""
    unit: str = ""
    """`share` is 0 to 1."""
    direction: Direction | None = "none"
    """None: that of another metric, which is part of the name."""
    source: str = ""
    """Publication, or the definition that is customary."""


@dataclass(frozen=True)
class Group:
    """Metrics of one protocol."""

    title: str
    about: str
    """One or two sentences: what is evaluated."""
    metrics: Mapping[str, Metric]


STANDARD = "standard definition"
ROC = "Fawcett, Pattern Recognition Letters 27, 2006"
LFW = "Huang et al., Labeled Faces in the Wild, 2007"
FACENET = "Schroff et al., FaceNet, CVPR 2015"
IJB = "Whitelam et al., IJB-B, CVPR Workshops 2017; Maze et al., IJB-C, ICB 2018"
REALITY_CHECK = "Musgrave et al., A Metric Learning Reality Check, ECCV 2020"
MARKET = "Zheng et al., Scalable Person Re-identification, ICCV 2015"
CALIBRATION = "Guo et al., On Calibration of Modern Neural Networks, ICML 2017"
RELOADED = "Maier-Hein et al., Metrics reloaded, Nature Methods 21, 2024"
BOUNDARY = "Csurka et al., BMVC 2013"
VOC = "Everingham et al., IJCV 111, 2015"
BOOTSTRAP = "Efron, Annals of Statistics 7, 1979"
MONITORING = "monitoring of an eye-state classifier"

_EER = "Error rate at the threshold where the false accept rate equals the false reject rate, interpolated linearly."
_XNORM = Metric(
    "Mean norm of the embeddings of images and mirror images before they are normalised.",
    "length",
    "none",
    "ArcFace code",
)
_ECE = Metric(
    "Expected calibration error: mean gap between confidence and accuracy over 15 confidence bins of equal width, "
    "weighted by their predictions; 0 is perfect calibration.",
    "share",
    "lower",
    CALIBRATION,
)

PAIRS = Group(
    "1:1 verification on pairs",
    "Decides for each pair of images whether both show the same identity, by the distance of their embeddings.",
    {
        "accuracy": Metric(
            "Share of correctly decided pairs, mean over ten folds; the threshold of a fold is chosen on the other "
            "nine.",
            "share",
            "higher",
            LFW,
        ),
        "accuracy_std": Metric("Standard deviation of the accuracy over the ten folds.", "share", "none", LFW),
        "threshold": Metric(
            "Squared distance of normalised embeddings below which a pair is accepted, mean over the ten folds.",
            "0 to 4",
            "none",
            LFW,
        ),
        "val_at_far_1e-3": Metric(
            "Share of genuine pairs accepted at the threshold that accepts 1 of 1,000 impostor pairs of the other nine "
            "folds, mean over the ten folds.",
            "share",
            "higher",
            FACENET,
        ),
        "val_at_far_1e-3_std": Metric(
            "Standard deviation of `val_at_far_1e-3` over the ten folds.", "share", "none", FACENET
        ),
        "val_at_far_1e-3_far": Metric(
            "False accept rate that the thresholds of `val_at_far_1e-3` reach on the held-out folds, mean.",
            "share",
            "none",
            FACENET,
        ),
        "auc": Metric(
            "Area under the ROC curve: probability that a genuine pair is closer than an impostor pair; ties count "
            "half.",
            "share",
            "higher",
            ROC,
        ),
        "eer": Metric(_EER, "share", "lower", STANDARD),
        "tar_at_far_1e-*": Metric(
            "Highest true accept rate (share of genuine pairs accepted) with a false accept rate of at most 1e-1, "
            "1e-2, 1e-3 or 1e-4; left out if there are too few impostor pairs for the rate.",
            "share",
            "higher",
            STANDARD,
        ),
        "xnorm": _XNORM,
    },
)
TEMPLATES = Group(
    "1:1 verification on templates (IJB-B, IJB-C)",
    "Compares sets of images: the embeddings of a template's images are pooled into one vector.",
    {
        "auc": Metric(
            "Area under the ROC curve: probability that a genuine pair of templates has a higher cosine than an "
            "impostor pair; ties count half.",
            "share",
            "higher",
            ROC,
        ),
        "eer": Metric(_EER, "share", "lower", STANDARD),
        "tar_at_far_1e-*": Metric(
            "True accept rate at the false accept rate nearest to 1e-1 .. 1e-6; left out if there are too few impostor "
            "pairs for the rate.",
            "share",
            "higher",
            IJB,
        ),
        "xnorm": _XNORM,
    },
)
IDENTIFICATION = Group(
    "Closed-set 1:N identification (TinyFace)",
    "Looks each probe image up in a gallery with images of the same identity and distractors.",
    {
        "rank_*": Metric(
            "Share of probes with an image of their identity among the k gallery images of highest cosine, for k of 1, "
            "5 and 20; ties count as wrong.",
            "share",
            "higher",
            "Cheng et al., TinyFace, 2018",
        ),
        "xnorm": _XNORM,
    },
)
CLASSES = Group(
    "Classification",
    "Predicts one class for each image. Images without a label count in no metric.",
    {
        "top1": Metric("Share of images whose class has the highest score.", "share", "higher", STANDARD),
        "top5": Metric(
            "Share of images whose class is among the five highest scores; with more than 5 classes.",
            "share",
            "higher",
            STANDARD,
        ),
        "accuracy": Metric(
            "The same as `top1`, under its customary name for two classes.", "share", "higher", STANDARD
        ),
        "balanced_accuracy": Metric(
            "Mean over the classes that occur of the share of their images that is found (recall).",
            "share",
            "higher",
            STANDARD,
        ),
        "f1_macro": Metric("Mean F1 score over the classes that occur.", "share", "higher", STANDARD),
        "f1": Metric(
            "F1 score of class 1: harmonic mean of its precision and recall; with two classes.",
            "share",
            "higher",
            STANDARD,
        ),
        "nll": Metric(
            "Mean negative natural logarithm of the probability of the true class (cross-entropy).",
            "nats",
            "lower",
            STANDARD,
        ),
        "ece": _ECE,
        "auc": Metric(
            "Area under the ROC curve of class 1: probability that an image of class 1 has a higher score than one of "
            "class 0; ties count half; with two classes.",
            "share",
            "higher",
            ROC,
        ),
    },
)
SEPARATION = Group(
    "Separation of classes",
    "Measures how far the classes lie apart in the space of embeddings and, with two classes, in their scores.",
    {
        "ece": _ECE,
        "ks": Metric(
            "Kolmogorov-Smirnov statistic: largest gap between the distribution functions of the scores of both "
            "classes.",
            "share",
            "higher",
            STANDARD,
        ),
        "hellinger": Metric(
            "Hellinger distance of the histograms (200 bins) of the probability of class 1 in both classes.",
            "0 to 1",
            "higher",
            STANDARD,
        ),
        "js": Metric(
            "Jensen-Shannon divergence of the same histograms, with logarithms to base 2.", "bits", "higher", STANDARD
        ),
        "margin": Metric(
            "Mean of |p - 0.5| for the probability p of class 1; 0 to 0.5, larger is more confident.",
            "probability",
            "none",
            MONITORING,
        ),
        "bayes_error": Metric(
            "Half the overlap of the same histograms: the least error rate if both classes are equally frequent.",
            "share",
            "lower",
            STANDARD,
        ),
        "auc": Metric(
            "Area under the ROC curve: probability that an image of class 1 has a higher score than one of class 0; "
            "ties count half.",
            "share",
            "higher",
            ROC,
        ),
        "d_prime": Metric(
            "Difference of the mean scores (logits) of both classes over the root of the mean of their variances.",
            "standard deviations",
            "higher",
            STANDARD,
        ),
        "intra": Metric(
            "Mean over classes of the mean squared distance of embeddings to the mean of their class.",
            "squared length",
            "lower",
            MONITORING,
        ),
        "inter": Metric("Mean distance between the means of two classes.", "length", "higher", MONITORING),
        "fisher": Metric(
            "Variance between classes over variance within classes, tr(S_b) / tr(S_w); independent of scale.",
            "ratio",
            "higher",
            STANDARD,
        ),
        "fisher_legacy": Metric("inter / (intra + 1e-8); depends on scale.", "1 / length", "higher", MONITORING),
        "bhattacharyya": Metric(
            "Mean Bhattacharyya distance over pairs of classes, as Gaussians without covariances.",
            "nats",
            "higher",
            STANDARD,
        ),
        "pca_energy_*": Metric(
            "Share of the variance of the embeddings along their first (0) to fifth (4) principal component.",
            "share",
            "none",
            STANDARD,
        ),
        "silhouette": Metric(
            "Mean silhouette, (b - a) / max(a, b) for the mean distances a to the own and b to the nearest other "
            "class.",
            "-1 to 1",
            "higher",
            "Rousseeuw, 1987",
        ),
    },
)
INSPECTION = Group(
    "Inspection of samples",
    "Finds samples that are hard, outliers or likely mislabelled, and draws maps of the embeddings.",
    {
        "hard_share": Metric(
            "Share of samples whose two most probable classes differ by less than 0.3.", "share", "none", "trainkit"
        ),
        "mislabelled_share": Metric(
            "Share of samples that are confidently predicted as another class, which is also the label of most of "
            "their ten nearest samples.",
            "share",
            "none",
            "Northcutt et al., Confident Learning, JAIR 2021; with a neighbour test",
        ),
        "outlier_share": Metric(
            "Share of samples more than 3 standard deviations from the mean of their class, by Mahalanobis distance.",
            "share",
            "none",
            "Ledoit and Wolf, 2004 (covariance)",
        ),
    },
)
RETRIEVAL = Group(
    "Retrieval",
    "Looks each image up among all others by cosine. R is the number of other images of its class.",
    {
        "recall_at_*": Metric(
            "Share of queries with an image of their class among the k nearest, for k of 1 and 5; ties count as wrong.",
            "share",
            "higher",
            REALITY_CHECK,
        ),
        "r_precision": Metric(
            "Mean over queries of the share of images of their class among the R nearest.",
            "share",
            "higher",
            REALITY_CHECK,
        ),
        "map_at_r": Metric(
            "Mean over queries of 1/R times the sum, over the first R places that are right, of the precision at that "
            "place.",
            "share",
            "higher",
            REALITY_CHECK,
        ),
    },
)
_SEARCH = {
    "map": Metric(
        "Mean average precision: mean over queries of the mean of the precisions at their right gallery records.",
        "share",
        "higher",
        MARKET,
    ),
    "rank_*": Metric(
        "CMC: share of queries with a right record among the k nearest of the gallery, for k of 1, 5 and 10.",
        "share",
        "higher",
        MARKET,
    ),
    "minp": Metric(
        "Mean inverse negative penalty: mean over queries of the number of right records over the place of the last.",
        "share",
        "higher",
        "Ye et al., Deep Learning for Person Re-identification, TPAMI 2022",
    ),
}
SEARCH = Group(
    "Re-identification",
    "Looks each query, one record or several of different modalities, up in a gallery. The metrics are means over "
    "groups of query lists, and over trials where there are several.",
    {
        **_SEARCH,
        **{
            f"*.{name}": Metric(
                f"`{name}` of one list of queries, or the mean over the lists of a group such as `modal_1`.",
                one.unit,
                one.direction,
                one.source,
            )
            for name, one in _SEARCH.items()
        },
        "unmatched": Metric(
            "Number of queries without a right record in the gallery; they are in no mean.",
            "queries",
            "none",
            "trainkit",
        ),
    },
)
_DICE = "Dice coefficient, 2 |A and B| / (|A| + |B|)"
_HD95 = "95th percentile of the distances between the surfaces of prediction and truth, the larger of both directions"
_ASD = "Mean distance between the surfaces of prediction and truth, both directions together"
_NSD = "Normalised surface distance: share of both surfaces within the tolerance (`task.tolerance`) of the other"
_MEAN = "mean over organs of the means over cases"
_EACH = "mean over the cases in which truth or prediction has the organ"
_NIKOLOV = "Nikolov et al., 2018, arXiv 1809.04430"
SEGMENTATION = Group(
    "Segmentation of volumes, whole cases",
    "Compares label maps organ by organ on the grid of the file. An organ that is in neither truth nor prediction of a "
    "case is left out. If only one of them has it, dice, iou and nsd are 0, and hd95 and asd the diagonal of the "
    "volume.",
    {
        "dice_mean": Metric(f"{_DICE}; {_MEAN}.", "share", "higher", RELOADED),
        "dice_mean_low": Metric(
            "Lower end of the 95 % bootstrap interval (n = 2,000) of `dice_mean` over patients.",
            "share",
            "none",
            BOOTSTRAP,
        ),
        "dice_mean_high": Metric(
            "Upper end of the 95 % bootstrap interval (n = 2,000) of `dice_mean` over patients.",
            "share",
            "none",
            BOOTSTRAP,
        ),
        "iou_mean": Metric(f"Intersection over union; {_MEAN}.", "share", "higher", RELOADED),
        "nsd_mean": Metric(f"{_NSD}; {_MEAN}.", "share", "higher", _NIKOLOV),
        "hd95_mean_mm": Metric(f"{_HD95}; {_MEAN}.", "mm", "lower", RELOADED),
        "asd_mean_mm": Metric(f"{_ASD}; {_MEAN}.", "mm", "lower", RELOADED),
        "volume_error_mean_mm3": Metric(
            f"Absolute difference of the volumes of prediction and truth; {_MEAN}.", "mm3", "lower", RELOADED
        ),
        "missed": Metric(
            "Number of organs, over all cases, that are in the truth and of which no voxel is predicted.",
            "organs",
            "lower",
            "trainkit",
        ),
        "invented": Metric(
            "Number of organs, over all cases, that are predicted and of which the truth has no voxel.",
            "organs",
            "lower",
            "trainkit",
        ),
        "cases": Metric("Number of cases evaluated.", "cases", "none", "trainkit"),
        "dice.*": Metric(f"`dice_mean` of one organ; {_EACH}.", "share", "higher", RELOADED),
        "iou.*": Metric(f"`iou_mean` of one organ; {_EACH}.", "share", "higher", RELOADED),
        "nsd.*": Metric(f"`nsd_mean` of one organ; {_EACH}.", "share", "higher", _NIKOLOV),
        "hd95_mm.*": Metric(f"`hd95_mean_mm` of one organ; {_EACH}.", "mm", "lower", RELOADED),
        "asd_mm.*": Metric(f"`asd_mean_mm` of one organ; {_EACH}.", "mm", "lower", RELOADED),
        "volume_error_mm3.*": Metric(f"`volume_error_mean_mm3` of one organ; {_EACH}.", "mm3", "lower", RELOADED),
    },
)
PATCHES = Group(
    "Segmentation of volumes, patches",
    "Counts the voxels of all patches together; for a quick evaluation during training.",
    {
        "dice_mean": Metric(
            f"{_DICE}, of the voxels of all patches together; mean over organs.", "share", "higher", RELOADED
        ),
        "iou_mean": Metric(
            "Intersection over union of the voxels of all patches together; mean over organs.",
            "share",
            "higher",
            RELOADED,
        ),
        "dice.*": Metric(f"{_DICE}, of the voxels of one organ in all patches together.", "share", "higher", RELOADED),
    },
)
_IOU = "Intersection over union of the pixels of all images together"
SCENES = Group(
    "Semantic segmentation of images",
    "Compares label maps pixel by pixel. Pixels without a label count nowhere, and a class that is neither in the "
    "truth nor predicted is in no mean.",
    {
        "miou": Metric(f"{_IOU}; mean over classes.", "share", "higher", VOC),
        "miou_low": Metric(
            "Lower end of the 95 % bootstrap interval (n = 2,000) of `miou` over images.", "share", "none", BOOTSTRAP
        ),
        "miou_high": Metric(
            "Upper end of the 95 % bootstrap interval (n = 2,000) of `miou` over images.", "share", "none", BOOTSTRAP
        ),
        "pixel_accuracy": Metric("Share of the labelled pixels that are right.", "share", "higher", STANDARD),
        "mean_accuracy": Metric(
            "Mean over the classes of the truth of the share of their pixels that is found (recall).",
            "share",
            "higher",
            STANDARD,
        ),
        "fwiou": Metric(
            "Frequency-weighted IoU: IoU of each class weighted by its pixels in the truth.",
            "share",
            "higher",
            STANDARD,
        ),
        "boundary_f": Metric(
            "Boundary F-score: harmonic mean of the shares of predicted and true boundary pixels within the tolerance "
            "(`task.boundary`) of each other; mean over the images with a boundary of the class, then over classes.",
            "share",
            "higher",
            BOUNDARY,
        ),
        "pictures": Metric("Number of images with a label.", "images", "none", "trainkit"),
        "iou.*": Metric(f"{_IOU}, of one class.", "share", "higher", VOC),
        "boundary_f.*": Metric("`boundary_f` of one class.", "share", "higher", BOUNDARY),
    },
)

GROUPS = (
    CLASSES,
    SEPARATION,
    INSPECTION,
    RETRIEVAL,
    PAIRS,
    TEMPLATES,
    IDENTIFICATION,
    SEARCH,
    SCENES,
    SEGMENTATION,
    PATCHES,
)
"""All groups, in the order of the reference."""
