"""Draw the figures of a run from its journal, while it trains and when it ends, and images that go with a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainkit.tracking import journal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from trainkit.tracking.tracker import Silent, Tracker

_OWN = {"this run": "", "EMA weights": "_ema"}
"""Networks whose classes are drawn one by one, and what their files' names end in."""
_SHEETS = {
    "hard": "two classes nearly equally probable",
    "mislabelled": "likely mislabelled",
    "outliers": "far from their class",
}


def draw(
    tracker: Tracker | Silent, history: journal.History, best: str | None, curves: Mapping[str, Mapping[str, Any]]
) -> None:
    """Log loss, speed, ROC, confusion and calibration as artifacts, in place of those of earlier steps.

    `best` is the metric shown beside the loss; `curves` are those of the last evaluations, by evaluation and network.
    """
    from trainkit.plots import curves as figures

    steps, loss = history.series("train/loss")
    if steps:
        evaluations = {best: history.series(best)} if best is not None and best in history.metrics else {}
        tracker.figure("figures/loss.png", figures.loss_curve(steps, loss, history.series("train/lr")[1], evaluations))
        held = sorted({p.step for name, points in history.metrics.items() if name.startswith("eval/") for p in points})
        steps, rate = history.series("speed/samples_per_s")
        tracker.figure("figures/speed.png", figures.speed_curve(steps, rate, held))
    for name, networks in curves.items():
        own_first = sorted(networks, key=lambda who: who != "this run")
        rocs = {who: (c["roc"]["far"], c["roc"]["tar"]) for who in own_first if "roc" in (c := networks[who])}
        if rocs:
            # Of two classes the second is looked for; without classes the curve is of pairs.
            classes = next((c["confusion"]["names"] for c in networks.values() if "confusion" in c), (None, None))
            tracker.figure(f"figures/roc_{name}.png", figures.roc(rocs, f"ROC on {name}", classes[1]))
        for who, ending in _OWN.items():
            found, on = networks.get(who, {}), f"{name}, {who}"
            if "confusion" in found:
                figure = figures.confusion(**found["confusion"], title=f"Confusion on {on}")
                tracker.figure(f"figures/confusion_{name}{ending}.png", figure)
            if "reliability" in found:
                figure = figures.reliability(**found["reliability"], title=f"Calibration on {on}")
                tracker.figure(f"figures/calibration_{name}{ending}.png", figure)


def keep_pictures(tracker: Tracker | Silent, step: int, title: str, pictures: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw the images of an evaluation, called `title`, at a step; MLflow shows each kind with a slider over steps.

    Kinds: roc, confusion, pca, tsne, hard, mislabelled, outliers, overlays, ranked, scenes. Raises ValueError for
    another one.
    """
    on = title.replace("/ema", ", EMA weights")
    for kind, arrays in pictures.items():
        tracker.image(f"{title}/{kind}", step, picture(kind, arrays, f"{on}, step {step:,}"))


def picture(kind: str, arrays: Mapping[str, Any], on: str) -> Figure:
    """Draw one kind of `Scores.images`; `on` names evaluation and step."""
    from trainkit.plots import curves, embeddings

    if kind == "roc":
        curve = {f"area {arrays['auc']:.4f}": (arrays["far"], arrays["tar"])}
        return curves.roc(curve, f"ROC on {on}", arrays["positive"])
    if kind == "confusion":
        return curves.confusion(arrays["counts"], arrays["names"], f"Confusion on {on}")
    if kind in ("pca", "tsne"):
        shown, total = len(arrays["label"]), arrays["total"]
        some = f" ({shown:,} of {total:,} samples)" if shown < total else ""
        drawn = {key: arrays[key] for key in ("points", "label", "wrong", "names")}
        if kind == "tsne":
            return embeddings.scatter(**drawn, title=f"t-SNE of {on}{some}")
        across, up = (f"axis {k} ({100 * share:.1f} % of the variance)" for k, share in enumerate(arrays["share"], 1))
        return embeddings.scatter(**drawn, title=f"Principal axes of {on}{some}", axes_names=(across, up))
    if kind in _SHEETS:
        captions = []
        for k, name in enumerate(arrays["id"]):
            says = arrays["label"][k] or "no label"
            says += f", {arrays['distance'][k]:.1f} sd" * (kind == "outliers")
            captions.append(f"{name}\n{says}\n→ {arrays['prediction'][k]} {arrays['probability'][k]:.2f}")
        many = f"{arrays['found']:,} of {arrays['total']:,}"
        first = f", the first {len(captions)}" * (len(captions) < arrays["found"])
        return embeddings.sheet(arrays["images"], captions, f"{on}\n{many}: {_SHEETS[kind]}{first}")
    if kind == "overlays":
        from trainkit.plots import volumes

        channel = f"; channel {arrays['shown']}" if arrays.get("shown") else ""
        return volumes.overlays(arrays["planes"], _cases(arrays), arrays["names"], f"{on}: {_chosen(arrays)}{channel}")
    if kind == "ranked":
        from trainkit.plots import ranked_lists

        drawn = {key: arrays[key] for key in ("queries", "present", "text", "found", "right")}
        return ranked_lists.ranked(**drawn, captions=_asked(arrays), title=f"{on}: {_some(arrays)}")
    if kind == "scenes":
        from trainkit.plots import scenes

        drawn = {key: arrays[key] for key in ("images", "truth", "predicted", "names", "colours")}
        return scenes.scenes(**drawn, captions=_seen(arrays), title=on)
    raise ValueError(f"no image of kind {kind!r}")


def _cases(arrays: Mapping[str, Any]) -> list[str]:
    """Write the captions of cases: rank, mean Dice and, as many as there is room for, those of organs."""
    captions = []
    for name, rank, dice, organs in zip(*(arrays[key] for key in ("id", "rank", "dice", "organ_dice")), strict=True):
        each = [f"{arrays['names'][k]} {v:.2f}" for k, v in enumerate(organs) if v == v]
        captions.append(_filled(f"{rank}: {name[-30:]}, mean Dice {dice:.3f}", ":  ", each, 132))
    return captions


def _filled(caption: str, opening: str, parts: list[str], longest: int) -> str:
    """Add to a caption as many parts as there is room for."""
    for place, part in enumerate(parts):
        part = f"{', ' if place else opening}{part}"
        if len(caption) + len(part) > longest:
            break
        caption += part
    return caption


def _chosen(arrays: Mapping[str, Any]) -> str:
    worst, best = (arrays["rank"].count(word) for word in ("worst", "best"))
    if worst + best == arrays["total"]:
        return f"all {arrays['total']} cases"
    return f"the {worst} worst and {best} best of {arrays['total']} cases by mean Dice"


def _asked(arrays: Mapping[str, Any]) -> list[str]:
    """Write the captions of ranked lists: one of the worst or not, the query, the place of the first right record."""
    captions = []
    for k, name in enumerate(arrays["list"]):
        many, rank = arrays["relevant"][k], arrays["rank"][k]
        caption = f"{name.replace('_', ' + ')}: person {arrays['person'][k]}, AP {arrays['ap'][k]:.3f}, "
        caption += f"{many:,} right {'record' if many == 1 else 'records'}, the first at place {rank:,}"
        captions.append("worst: " * (k < arrays["worst"]) + caption)
    return captions


def _some(arrays: Mapping[str, Any]) -> str:
    worst, others = arrays["worst"], len(arrays["list"]) - arrays["worst"]
    return f"{worst} of the worst and {others} other of {arrays['total']:,} queries"


def _seen(arrays: Mapping[str, Any]) -> list[str]:
    """Write the captions of segmented images: scores and, as many as there is room for, the worst classes."""
    captions = []
    for name, miou, right, iou in zip(*(arrays[key] for key in ("id", "miou", "pixel_accuracy", "iou")), strict=True):
        if miou != miou:
            captions.append(f"{name[-40:]}: nothing labelled")
            continue
        caption = f"{name[-40:]}: mIoU {miou:.3f}, {100 * right:.1f} % of the pixels right"
        worst = [k for k in iou.argsort(kind="stable") if iou[k] < 1][:4]  # nan is not less
        each = [f"{arrays['names'][k]} {iou[k]:.2f}" for k in worst]
        captions.append(_filled(caption, "; lowest IoU: ", each, 125))
    return captions
