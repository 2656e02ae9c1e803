"""Draw the figures of a run's evaluations, during training and at its end, and the images of evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainkit.errors import number_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from trainkit.tracking.tracker import Silent, Tracker

_OWN = {"this run": "", "EMA weights": "_ema"}
"""Models that get figures of their classes, and the endings of their files' names."""
_NAMES = {"this run": "model"}
"""Names of models in legends, where they differ."""
_LONGEST = 128
"""Letters in the caption of a row of images."""
_SHEETS = {
    "hard": "have two classes of nearly equal probability",
    "mislabelled": "are likely mislabelled",
    "outliers": "are far from their class",
}


def draw(tracker: Tracker | Silent, curves: Mapping[str, Mapping[str, Any]]) -> None:
    """Log ROC curves and confusion matrices as artifacts, in place of those of earlier steps.

    `curves` are those of the last evaluations, by evaluation and model.
    """
    from trainkit.plots import curves as figures

    for name, models in curves.items():
        own_first = sorted(models, key=lambda who: who != "this run")
        rocs = {
            _NAMES.get(who, who): (c["roc"]["far"], c["roc"]["tar"]) for who in own_first if "roc" in (c := models[who])
        }
        if rocs:
            # With two classes the curve is that of the second one; without classes it is of pairs.
            classes = next((c["confusion"]["names"] for c in models.values() if "confusion" in c), (None, None))
            tracker.figure(f"figures/roc_{name}.png", figures.roc(rocs, f"ROC curve on {name}", classes[1]))
        for who, ending in _OWN.items():
            found, on = models.get(who, {}), f"{name}, {_NAMES.get(who, who)}"
            if "confusion" in found:
                figure = figures.confusion(**found["confusion"], about=f"Confusion matrix on {on}")
                tracker.figure(f"figures/confusion_{name}{ending}.png", figure)


def keep_pictures(tracker: Tracker | Silent, step: int, title: str, pictures: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw the images of an evaluation, called `title`, at a step; MLflow shows each kind with a slider over steps.

    Kinds: pca, tsne, hard, mislabelled, outliers, overlays, ranked, scenes. Raises ValueError for another one.
    """
    on = title.replace("/ema", ", EMA weights")
    for kind, arrays in pictures.items():
        tracker.image(f"{title}/{kind}", step, picture(kind, arrays, f"{on}, step {step:,}"))


def picture(kind: str, arrays: Mapping[str, Any], on: str) -> Figure:
    """Draw one kind of `Scores.images`; `on` names evaluation and step."""
    if kind in ("pca", "tsne"):
        return _map(kind, arrays, on)
    if kind in _SHEETS:
        return _sheet(kind, arrays, on)
    if kind == "overlays":
        from trainkit.plots import volumes

        channel = f"; channel {arrays['shown']}" if arrays.get("shown") else ""
        worst, best = (arrays["rank"].count(word) for word in ("worst", "best"))
        about = f"the {worst} worst and {best} best of {arrays['total']} cases by mean Dice{channel}"
        return volumes.overlays(arrays["planes"], _of_cases(arrays), arrays["names"], on, about)
    if kind == "ranked":
        from trainkit.plots import ranked_lists

        drawn = {key: arrays[key] for key in ("queries", "text", "found", "right")}
        worst, others = arrays["worst"], len(arrays["list"]) - arrays["worst"]
        about = f"the {worst} worst and {others} other queries of {arrays['total']:,}"
        return ranked_lists.ranked(**drawn, captions=_of_queries(arrays), title=on, about=about)
    if kind == "scenes":
        from trainkit.plots import scenes

        drawn = {key: arrays[key] for key in ("images", "truth", "predicted", "names", "colours")}
        return scenes.scenes(**drawn, captions=_of_scenes(arrays), title=on)
    raise ValueError(f"no image of kind {kind!r}")


def _map(kind: str, arrays: Mapping[str, Any], on: str) -> Figure:
    from trainkit.plots import embeddings

    shown, total = len(arrays["label"]), arrays["total"]
    some = f" ({shown:,} of {total:,} samples)" if shown < total else ""
    drawn = {key: arrays[key] for key in ("points", "label", "wrong", "names")}
    if kind == "tsne":
        return embeddings.scatter(**drawn, about=f"t-SNE of embeddings, {on}{some}")
    across, up = (f"component {k} ({100 * share:.1f} % of variance)" for k, share in enumerate(arrays["share"], 1))
    return embeddings.scatter(**drawn, about=f"PCA of embeddings, {on}{some}", axes_names=(across, up))


def _sheet(kind: str, arrays: Mapping[str, Any], on: str) -> Figure:
    from trainkit.plots import embeddings

    captions = []
    for k, name in enumerate(arrays["id"]):
        label = arrays["label"][k] or "no label"
        distance = f", {arrays['distance'][k]:.1f} sd" if kind == "outliers" else ""
        captions.append(f"{name}\n{label}{distance}\n→ {arrays['prediction'][k]} {arrays['probability'][k]:.2f}")
    title = f"{arrays['found']:,} of {arrays['total']:,} samples {_SHEETS[kind]}"
    first = f"; the first {len(captions)} are shown" if len(captions) < arrays["found"] else ""
    return embeddings.sheet(arrays["images"], captions, title, f"{on}{first}")


def _filled(caption: str, opening: str, parts: list[str]) -> str:
    """Add to a caption as many parts as fit in a line."""
    for place, part in enumerate(parts):
        part = f"{', ' if place else opening}{part}"
        if len(caption) + len(part) > _LONGEST:
            break
        caption += part
    return caption


def _of_cases(arrays: Mapping[str, Any]) -> list[str]:
    """Write the captions of cases: rank, mean Dice and as many Dice scores of organs as fit."""
    captions = []
    for name, rank, dice, organs in zip(*(arrays[key] for key in ("id", "rank", "dice", "organ_dice")), strict=True):
        each = [f"{arrays['names'][k]} {v:.2f}" for k, v in enumerate(organs) if v == v]
        captions.append(_filled(f"{rank}: {name[-30:]}, mean Dice {dice:.3f}", ":  ", each))
    return captions


def _of_queries(arrays: Mapping[str, Any]) -> list[str]:
    """Write the captions of ranked lists: the query, its average precision, and the rank of the first right result."""
    captions = []
    for k, name in enumerate(arrays["list"]):
        worst, many = "worst: " if k < arrays["worst"] else "", arrays["relevant"][k]
        results = f"{number_of(many, 'right results', 'right result')} in the gallery"
        who = f"{name.replace('_', ' + ')}: identity {arrays['person'][k]}, AP {arrays['ap'][k]:.3f}"
        captions.append(f"{worst}{who}, {results}, the first at rank {arrays['rank'][k]:,}")
    return captions


def _of_scenes(arrays: Mapping[str, Any]) -> list[str]:
    """Write the captions of segmented images: scores and as many of the worst classes as fit."""
    captions = []
    for name, miou, right, iou in zip(*(arrays[key] for key in ("id", "miou", "pixel_accuracy", "iou")), strict=True):
        if miou != miou:
            captions.append(f"{name[-40:]}: no labels")
            continue
        worst = [k for k in iou.argsort(kind="stable") if iou[k] < 1][:4]  # nan is not less
        each = [f"{arrays['names'][k]} {iou[k]:.2f}" for k in worst]
        scores = f"{name[-40:]}: mIoU {miou:.3f}, pixel accuracy {100 * right:.1f} %"
        captions.append(_filled(scores, "; lowest IoU: ", each))
    return captions
