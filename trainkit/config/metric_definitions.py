"""Definitions of all metrics: what each is, its unit, and whether higher or lower is better. `metric_table` reads them.

A metric is a paragraph `names | unit | better | text | source`, where `-` is no unit, `none` stands for counts,
thresholds and ends of intervals, `metric` for the direction of the metric in the name, and the source may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

Direction = Literal["higher", "lower", "none"]
"""Values that are better; `none` for counts, thresholds, ends of intervals and descriptive numbers."""


@dataclass(frozen=True)
class Metric:
    """Definition of a metric."""

    text: str
    """One or two sentences."""
    unit: str
    """`share` is 0 to 1; empty without a unit."""
    direction: Direction | None
    """None: that of another metric, which is part of the name."""
    source: str
    """Publication, or the definition that is customary."""


@dataclass(frozen=True)
class Group:
    """Metrics of one protocol."""

    title: str
    about: str
    """One or two sentences: what is evaluated."""
    metrics: Mapping[str, Metric]


SOURCES = {
    "ROC": "Fawcett, Pattern Recognition Letters 27, 2006",
    "LFW": "Huang et al., Labeled Faces in the Wild, 2007",
    "FACENET": "Schroff et al., FaceNet, CVPR 2015",
    "IJB": "Whitelam et al., IJB-B, CVPR Workshops 2017; Maze et al., IJB-C, ICB 2018",
    "TINYFACE": "Cheng et al., TinyFace, 2018",
    "REALITY_CHECK": "Musgrave et al., A Metric Learning Reality Check, ECCV 2020",
    "MARKET": "Zheng et al., Scalable Person Re-identification, ICCV 2015",
    "YE": "Ye et al., Deep Learning for Person Re-identification, TPAMI 2022",
    "CALIBRATION": "Guo et al., On Calibration of Modern Neural Networks, ICML 2017",
    "NORTHCUTT": "Northcutt et al., Confident Learning, JAIR 2021; with a neighbour test",
    "RELOADED": "Maier-Hein et al., Metrics reloaded, Nature Methods 21, 2024",
    "NIKOLOV": "Nikolov et al., 2018, arXiv 1809.04430",
    "BOUNDARY": "Csurka et al., BMVC 2013",
    "VOC": "Everingham et al., IJCV 111, 2015",
    "BOOTSTRAP": "Efron, Annals of Statistics 7, 1979",
    "MONITORING": "monitoring of an eye-state classifier",
}
"""Publications by the words that stand for them in the tables."""


def _metrics(table: str) -> dict[str, Metric]:
    """Read a table. Raises ValueError for a direction that does not exist."""
    found: dict[str, Metric] = {}
    for paragraph in re.sub(r"\n +", " ", table).strip().split("\n"):
        names, unit, better, text, *source = paragraph.split(" | ")
        if better not in (*get_args(Direction), "metric"):
            raise ValueError(f"{names} is better {better!r}")
        direction = None if better == "metric" else cast("Direction", better)
        named = SOURCES.get(source[0], source[0]) if source else "standard definition"
        metric = Metric(text, unit if unit != "-" else "", direction, named)
        found |= dict.fromkeys(names.split(", "), metric)
    return found


def _group(title: str, about: str, table: str) -> Group:
    return Group(title, about, _metrics(table))


DICE = "Dice coefficient, 2 |A and B| / (|A| + |B|)"
IOU = "Intersection over union of the pixels of all images together"
MEAN = "mean over organs of the means over cases"
EACH = "mean over the cases in which truth or prediction has the organ"

# ---- Scores of evaluations, by protocol ------------------------------------------------------------------------------
# Logged as `EVALUATION/NAME`, and as `EVALUATION/ema/NAME` for EMA weights. `iou.*` stands for `iou.CLASS` of each
# class, `rank_*` for `rank_1`, `rank_5`, ...

CLASSES = _group(
    "Classification",
    "Predicts one class for each image. Images without a label count in no metric.",
    """
top1 | share | higher | Share of images whose class has the highest score.
top5 | share | higher | Share of images whose class is among the five highest scores; with more than 5 classes.
accuracy | share | higher | The same as `top1`, under its customary name for two classes.
balanced_accuracy | share | higher | Mean over the classes that occur of the share of their images that is found
    (recall).
f1_macro | share | higher | Mean F1 score over the classes that occur.
f1 | share | higher | F1 score of class 1: harmonic mean of its precision and recall; with two classes.
nll | nats | lower | Mean negative natural logarithm of the probability of the true class (cross-entropy).
ece | share | lower | Expected calibration error: mean gap between confidence and accuracy over 15 confidence bins of
    equal width, weighted by their predictions; 0 is perfect calibration. | CALIBRATION
auc | share | higher | Area under the ROC curve of class 1: probability that an image of class 1 has a higher score
    than one of class 0; ties count half; with two classes. | ROC
""",
)
SEPARATION = _group(
    "Separation of classes",
    "Measures how far the classes lie apart in the space of embeddings and, with two classes, in their scores.",
    """
ece | share | lower | Expected calibration error: mean gap between confidence and accuracy over 15 confidence bins of
    equal width, weighted by their predictions; 0 is perfect calibration. | CALIBRATION
ks | share | higher | Kolmogorov-Smirnov statistic: largest gap between the distribution functions of the scores of
    both classes.
hellinger | 0 to 1 | higher | Hellinger distance of the histograms (200 bins) of the probability of class 1 in both
    classes.
js | bits | higher | Jensen-Shannon divergence of the same histograms, with logarithms to base 2.
margin | probability | none | Mean of |p - 0.5| for the probability p of class 1; 0 to 0.5, larger is more confident.
    | MONITORING
bayes_error | share | lower | Half the overlap of the same histograms: the least error rate if both classes are
    equally frequent.
auc | share | higher | Area under the ROC curve: probability that an image of class 1 has a higher score than one of
    class 0; ties count half. | ROC
d_prime | standard deviations | higher | Difference of the mean scores (logits) of both classes over the root of the
    mean of their variances.
intra | squared length | lower | Mean over classes of the mean squared distance of embeddings to the mean of their
    class. | MONITORING
inter | length | higher | Mean distance between the means of two classes. | MONITORING
fisher | ratio | higher | Variance between classes over variance within classes, tr(S_b) / tr(S_w); independent of
    scale.
fisher_legacy | 1 / length | higher | inter / (intra + 1e-8); depends on scale. | MONITORING
bhattacharyya | nats | higher | Mean Bhattacharyya distance over pairs of classes, as Gaussians without covariances.
pca_energy_* | share | none | Share of the variance of the embeddings along their first (0) to fifth (4) principal
    component.
""",
)
INSPECTION = _group(
    "Inspection of samples",
    "Finds samples that are hard, outliers or likely mislabelled, and draws maps of the embeddings.",
    """
hard_share | share | none | Share of samples whose two most probable classes differ by less than 0.3. | trainkit
mislabelled_share | share | none | Share of samples that are confidently predicted as another class, which is also the
    label of most of their ten nearest samples. | NORTHCUTT
outlier_share | share | none | Share of samples more than 3 standard deviations from the mean of their class, by
    Mahalanobis distance. | Ledoit and Wolf, 2004 (covariance)
""",
)
RETRIEVAL = _group(
    "Retrieval",
    "Looks each image up among all others by cosine. R is the number of other images of its class.",
    """
recall_at_* | share | higher | Share of queries with an image of their class among the k nearest, for k of 1 and 5;
    ties count as wrong. | REALITY_CHECK
r_precision | share | higher | Mean over queries of the share of images of their class among the R nearest. |
    REALITY_CHECK
map_at_r | share | higher | Mean over queries of 1/R times the sum, over the first R places that are right, of the
    precision at that place. | REALITY_CHECK
""",
)
PAIRS = _group(
    "1:1 verification on pairs",
    "Decides for each pair of images whether both show the same identity, by the distance of their embeddings.",
    """
accuracy | share | higher | Share of correctly decided pairs, mean over ten folds; the threshold of a fold is chosen
    on the other nine. | LFW
accuracy_std | share | none | Standard deviation of the accuracy over the ten folds. | LFW
threshold | 0 to 4 | none | Squared distance of normalised embeddings below which a pair is accepted, mean over the
    ten folds. | LFW
val_at_far_1e-3 | share | higher | Share of genuine pairs accepted at the threshold that accepts 1 of 1,000 impostor
    pairs of the other nine folds, mean over the ten folds. | FACENET
val_at_far_1e-3_std | share | none | Standard deviation of `val_at_far_1e-3` over the ten folds. | FACENET
val_at_far_1e-3_far | share | none | False accept rate that the thresholds of `val_at_far_1e-3` reach on the held-out
    folds, mean. | FACENET
auc | share | higher | Area under the ROC curve: probability that a genuine pair is closer than an impostor pair; ties
    count half. | ROC
eer | share | lower | Error rate at the threshold where the false accept rate equals the false reject rate,
    interpolated linearly.
tar_at_far_1e-* | share | higher | Highest true accept rate (share of genuine pairs accepted) with a false accept rate
    of at most 1e-1, 1e-2, 1e-3 or 1e-4; left out if there are too few impostor pairs for the rate.
xnorm | length | none | Mean norm of the embeddings of images and mirror images before they are normalised. | ArcFace
    code
""",
)
TEMPLATES = _group(
    "1:1 verification on templates (IJB-B, IJB-C)",
    "Compares sets of images: the embeddings of a template's images are pooled into one vector.",
    """
auc | share | higher | Area under the ROC curve: probability that a genuine pair of templates has a higher cosine than
    an impostor pair; ties count half. | ROC
eer | share | lower | Error rate at the threshold where the false accept rate equals the false reject rate,
    interpolated linearly.
tar_at_far_1e-* | share | higher | True accept rate at the false accept rate nearest to 1e-1 .. 1e-6; left out if
    there are too few impostor pairs for the rate. | IJB
xnorm | length | none | Mean norm of the embeddings of images and mirror images before they are normalised. | ArcFace
    code
""",
)
IDENTIFICATION = _group(
    "Closed-set 1:N identification (TinyFace)",
    "Looks each probe image up in a gallery with images of the same identity and distractors.",
    """
rank_* | share | higher | Share of probes with an image of their identity among the k gallery images of highest
    cosine, for k of 1, 5 and 20; ties count as wrong. | TINYFACE
xnorm | length | none | Mean norm of the embeddings of images and mirror images before they are normalised. | ArcFace
    code
""",
)
SEARCH = _group(
    "Re-identification",
    "Looks each query, one record or several of different modalities, up in a gallery. The metrics are means over "
    "groups of query lists.",
    """
map | share | higher | Mean average precision: mean over queries of the mean of the precisions at their right gallery
    records. | MARKET
rank_* | share | higher | CMC: share of queries with a right record among the k nearest of the gallery, for k of 1, 5
    and 10. | MARKET
minp | share | higher | Mean inverse negative penalty: mean over queries of the number of right records over the place
    of the last. | YE
*.map | share | higher | `map` of one list of queries, or the mean over the lists of a group such as `modal_1`. |
    MARKET
*.rank_* | share | higher | `rank_*` of one list of queries, or the mean over the lists of a group such as `modal_1`.
    | MARKET
*.minp | share | higher | `minp` of one list of queries, or the mean over the lists of a group such as `modal_1`. | YE
unmatched | queries | none | Number of queries without a right record in the gallery; they are in no mean. | trainkit
""",
)
SCENES = _group(
    "Semantic segmentation of images",
    "Compares label maps pixel by pixel. Pixels without a label count nowhere, and a class that is neither in the "
    "truth nor predicted is in no mean.",
    f"""
miou | share | higher | {IOU}; mean over classes. | VOC
miou_low, miou_high | share | none | Ends of the 95 % bootstrap interval (n = 2,000) of `miou` over images. | BOOTSTRAP
pixel_accuracy | share | higher | Share of the labelled pixels that are right.
mean_accuracy | share | higher | Mean over the classes of the truth of the share of their pixels that is found
    (recall).
fwiou | share | higher | Frequency-weighted IoU: IoU of each class weighted by its pixels in the truth.
boundary_f | share | higher | Boundary F-score: harmonic mean of the shares of predicted and true boundary pixels
    within the tolerance (`task.boundary`) of each other; mean over the images with a boundary of the class, then over
    classes. | BOUNDARY
pictures | images | none | Number of images with a label. | trainkit
iou.* | share | higher | {IOU}, of one class. | VOC
boundary_f.* | share | higher | `boundary_f` of one class. | BOUNDARY
""",
)
SEGMENTATION = _group(
    "Segmentation of volumes, whole cases",
    "Compares label maps organ by organ on the grid of the file. An organ that is in neither truth nor prediction "
    "of a case is left out. If only one of them has it, dice, iou and nsd are 0, and hd95 and asd the diagonal of "
    "the volume.",
    f"""
dice_mean | share | higher | {DICE}; {MEAN}. | RELOADED
dice_mean_low, dice_mean_high | share | none | Ends of the 95 % bootstrap interval (n = 2,000) of `dice_mean` over
    patients. | BOOTSTRAP
iou_mean | share | higher | Intersection over union; {MEAN}. | RELOADED
nsd_mean | share | higher | Normalised surface distance: share of both surfaces within the tolerance
    (`task.tolerance`) of the other; {MEAN}. | NIKOLOV
hd95_mean_mm | mm | lower | 95th percentile of the distances between the surfaces of prediction and truth, the larger
    of both directions; {MEAN}. | RELOADED
asd_mean_mm | mm | lower | Mean distance between the surfaces of prediction and truth, both directions together;
    {MEAN}. | RELOADED
volume_error_mean_mm3 | mm3 | lower | Absolute difference of the volumes of prediction and truth; {MEAN}. | RELOADED
missed | organs | lower | Number of organs, over all cases, that are in the truth and of which no voxel is predicted.
    | trainkit
invented | organs | lower | Number of organs, over all cases, that are predicted and of which the truth has no voxel.
    | trainkit
cases | cases | none | Number of cases evaluated. | trainkit
dice.* | share | higher | `dice_mean` of one organ; {EACH}. | RELOADED
iou.* | share | higher | `iou_mean` of one organ; {EACH}. | RELOADED
nsd.* | share | higher | `nsd_mean` of one organ; {EACH}. | NIKOLOV
hd95_mm.* | mm | lower | `hd95_mean_mm` of one organ; {EACH}. | RELOADED
asd_mm.* | mm | lower | `asd_mean_mm` of one organ; {EACH}. | RELOADED
volume_error_mm3.* | mm3 | lower | `volume_error_mean_mm3` of one organ; {EACH}. | RELOADED
""",
)
PATCHES = _group(
    "Segmentation of volumes, patches",
    "Counts the voxels of all patches together; for a quick evaluation during training.",
    f"""
dice_mean | share | higher | {DICE}, of the voxels of all patches together; mean over organs. | RELOADED
iou_mean | share | higher | Intersection over union of the voxels of all patches together; mean over organs. |
    RELOADED
dice.* | share | higher | {DICE}, of the voxels of one organ in all patches together. | RELOADED
""",
)
GROUPS = (
    *(CLASSES, SEPARATION, INSPECTION, RETRIEVAL, PAIRS, TEMPLATES, IDENTIFICATION),
    *(SEARCH, SCENES, SEGMENTATION, PATCHES),
)
"""The groups that shipped tasks measure, in the order of the reference."""

CUSTOMARY = _group(
    "Customary names",
    "No shipped task measures these. A metric of a plug-in with such a name needs no declared direction.",
    """
*_std, *_low, *_high, *_far, *_share | - | none | Spread, end of an interval, or share.
loss, *_loss | - | lower | Loss.
mae, mse, rmse, error, *_error, error_rate, *_error_rate, fnmr*, fmr* | - | lower | Error, or rate of errors.
precision, recall, sensitivity, specificity, *_accuracy | share | higher | Share that is right, or that is found.
""",
)
"""Names with one meaning in the field. A metric of a plug-in that has one needs no declared direction."""

# ---- What every training logs, by its full name; `<evaluation>`, `<metric>` ... stand for any text -------------------

DEFINITIONS: dict[str, dict[str, Metric]] = {
    "Training": _metrics("""
train/loss | - | lower | Training loss, mean since the last log line.
train/lr | - | none | Learning rate of the last step.
train/grad_norm | - | none | Norm of the gradient of the last step, before clipping.
train/epoch | - | none | Epochs of training so far; a fraction within an epoch.
train/left_out | - | lower | Steps skipped so far, because they were not finite. Absent if none was skipped.
train/accuracy | - | higher | Share of training samples that the model assigns to their class.
train/dice | - | higher | Dice of the training batches, over all foreground voxels.
train/pixel_accuracy | - | higher | Share of correct pixels of the training batches, at output resolution.
train/cosine_to_teacher | - | higher | AdaDistill: mean cosine of the student's and the teacher's embedding.
train/alpha | - | none | AdaDistill: share of a class center that is kept at a step.
train/<term> | - | metric | Another value that the task logs: a term of the loss, or a norm of features.
"""),
    "Best and final scores": _metrics("""
best/<metric> | - | metric | Score that chooses the best checkpoint (`best.metric`), at the best evaluation.
at_best/<metric> | - | metric | Every other score of that evaluation. Such a score may be better at another step.
final/speed/<metric> | - | metric | Speed over the whole run.
final/time/wall_s | s | lower | Duration of the run, from the start of the command to the last file.
final/time/total_s | s | lower | Duration from the start of the command to the end of the training.
final/time/<phase>_share | - | none | Share of the duration of the training that a phase took.
final/<metric> | - | metric | Score of the last evaluation.
baseline/<metric> | - | metric | Score of the best trivial baseline in the metric that chooses the best.
"""),
    "Evaluations": _metrics("""
eval/<evaluation>/unique_samples | - | none | Samples that were evaluated, each counted once.
time/eval_<evaluation>_s | s | lower | Duration of the evaluation.
pixels/<evaluation>/<metric> | - | metric | Score of raw pixels as an embedding, once at step 0.
teacher/<evaluation>/<metric> | - | metric | Score of the teacher, once at step 0.
<evaluation>/ema/<metric> | - | metric | Score of the EMA weights.
"""),
    "Speed": _metrics("""
speed/samples_per_s | 1/s | higher | Throughput of all processes since the last log line. It includes waiting for
    data, and excludes evaluations, checkpoints and logging.
speed/steps_per_s | 1/s | higher | Optimizer steps per second, counted in the same way.
speed/step_ms_p50 | ms | lower | Median duration of a step.
speed/step_ms_p99 | ms | lower | 99th percentile of the duration of a step.
speed/peak_memory_gb | GB | lower | Peak GPU memory of PyTorch's allocator.
speed/ceiling_loader | 1/s | none | Upper bound: throughput of the loader alone.
speed/ceiling_model | 1/s | none | Upper bound: throughput of the network alone.
speed/ceiling_share | - | higher | Throughput as a share of the lower of the two upper bounds.
speed/mfu | - | higher | Model FLOPs utilization: share of the peak arithmetic of the device.
speed/recompiles | - | lower | Recompilations of a compiled network since step 20.
speed/graph_breaks | - | lower | Graph breaks of a compiled network since step 20.
"""),
    "Time on the device": _metrics("""
device/<phase>_ms | ms | lower | Time of a step on the device, by phase; `step` is the whole step.
device/idle_ms | ms | lower | Time of a step in which the device is idle.
"""),
    "Shares of time": _metrics("""
time/data_share | - | none | Share of training time in which the main thread waits for data.
time/transfer_share | - | none | Share of training time for copies to the device.
time/compute_share | - | none | Share of training time for forward pass, backward pass and optimizer.
time/eval_share | - | none | Share of training time for evaluations.
time/checkpoint_share | - | none | Share of training time for checkpoints.
time/log_share | - | none | Share of training time for logging.
time/setup_share | - | none | Share of training time for start-up; that of the whole run begins with the command, and
    so has imports and the packing of data in it. All shares add up to 1.
"""),
    "Cost": _metrics("""
cost/core_hours | h | lower | Duration of the run, start-up included, times the CPU cores that it may use, on all
    hosts.
cost/core_hours_used | h | lower | CPU time of the run and its workers. Not measured with several processes.
cost/gpu_hours | h | lower | Duration of the run times its GPUs, busy or idle.
"""),
    "System": _metrics("""
system/cpu_utilization_percentage | % | none | CPU utilization of the whole machine.
system/system_memory_usage_<unit> | - | none | Memory in use on the whole machine.
system/own_cores | - | none | CPU cores that this process keeps busy.
system/worker_cores | - | none | CPU cores that the loader's workers keep busy.
system/rss_gb | GB | none | Resident memory of this process and its workers; shared pages count once.
system/read_mb_s | MB/s | none | Read from disk by this process and its workers.
system/gpu_<n>_utilization_percentage | % | none | Utilization of a GPU of this run.
system/gpu_<n>_memory_usage_megabytes | MB | none | Memory in use on a GPU of this run.
system/gpu_<n>_memory_usage_percentage | % | none | The same as a share of its memory.
system/gpu_<n>_power_usage_watts | W | none | Power draw.
"""),
    "Parent runs: folds, seeds, sweeps": _metrics("""
std/<metric> | - | none | Standard deviation over the child runs; `final/<metric>` is the mean.
pooled/<metric>_low, pooled/<metric>_high | - | none | Ends of the 95 % confidence interval of the pooled score.
pooled/<metric> | - | metric | Folds: score of all held-out samples together.
seeds/<metric>_low, seeds/<metric>_high | - | none | Seeds: ends of Student's 95 % confidence interval of the mean.
sweep/<metric> | - | metric | Sweep: score of each setting, over the number of the setting.
"""),
}
"""Metrics by the heading under which a page shows them."""
