"""100 volumes of 512 x 512 x 20 with nine organs: prepared, read in patches, predicted and scored with HD95.

    python -m benchmarks.rehearsals.volumes --scale 0.01|0.1|1 [--home FOLDER] [--only SIDE ...]

Heads drawn as those of TOM500, a few of them, each volume moved and brightened in its own way: .nii.gz files of 10 MB.
Beside trainkit MONAI, which reads and prepares the files of each case for its patches (`Dataset`), and whose
`compute_hausdorff_distance`, `compute_average_surface_distance` and `compute_surface_dice` score the same label maps
on one case. Predicted label maps are the true ones, moved by two voxels; the network of the prediction is that of
`tom500`, untrained. The forecast for 500 volumes is of cases, as all but opening grows with them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rehearsals import measuring
from benchmarks.rehearsals.measuring import ROOT, Found, each, once, opens

VOLUMES, DRAWN, FORECAST, PATCHES = 100, 4, 500, 4
SHAPE, SPACING, PATCH = (512, 512, 20), (0.3125, 0.3125, 3.85), (16, 224, 224)
NAMES = ["SR", "LR", "MR", "IR", "ON", "FAT", "LG", "SO", "EB"]


def count(scale: float) -> int:
    return max(2, int(VOLUMES * scale))


def write(scale: float, folder: Path) -> None:
    import nibabel

    from trainkit.data.synthetic import orbits

    drawn = [orbits.draw(patient + 1, SHAPE, SPACING) for patient in range(min(DRAWN, count(scale)))]
    nibabel.openers.Opener.default_compresslevel = 1
    for part in ("image", "label"):
        (folder / part).mkdir()
    for number in range(count(scale)):
        image, label = drawn[number % len(drawn)]
        affine = orbits.affine(number % len(drawn) + 1, SHAPE, SPACING)
        for part, array in (("image", (np.round(image) + number).astype(np.int16)), ("label", label)):
            moved = np.roll(array, number // len(drawn), 0)
            nibabel.save(nibabel.Nifti1Image(moved, affine), folder / part / f"{number:03d}.nii.gz")


def make(home: Path, scale: float) -> None:
    once(home / "files", partial(write, scale))


def opened(home: Path) -> tuple[Any, str]:
    from trainkit.data.volumes.dataset import Volumes

    files, began = str(home / "files"), time.process_time()
    sets = {"train": files, "evaluate": {"val": files}}
    data = Volumes(**sets, names=NAMES, patch=PATCH, patches=PATCHES, leakage="allow").open(0)
    return data, forecast(data.evaluations["val"].size, began)


def forecast(cases: int, began: float) -> str:
    minutes = FORECAST / cases * (time.process_time() - began) / 60
    return f"{each(cases, 'cases', began)}; {FORECAST}: {minutes:,.1f} CPU min"


def patches(home: Path, scale: float) -> Found:
    split = opened(home)[0].train
    began, order = time.process_time(), split.order(0, 2)
    for row in range(len(order)):
        split.on_device(split.fetch(order[row, 0:2], 0))
    return Found(each(2 * len(order), "patches", began))


def patches_by_monai(home: Path, scale: float) -> Found:
    from monai import transforms as t

    both, began, seen = ["image", "label"], time.process_time(), 0
    steps = t.Compose(
        [
            t.LoadImaged(both, image_only=True, ensure_channel_first=True),
            t.Orientationd(both, axcodes="ASR", labels=(("L", "R"), ("P", "A"), ("I", "S"))),
            t.ScaleIntensityRangePercentilesd("image", 0.5, 99.5, 0, 1, clip=True),
            t.NormalizeIntensityd("image"),
            t.RandCropByPosNegLabeld(both, "label", PATCH, 1, 1, PATCHES),
        ]
    )
    for image in sorted((home / "files" / "image").iterdir()):
        seen += len(steps({"image": str(image), "label": str(home / "files" / "label" / image.name)}))
    return Found(each(seen, "patches", began))


def predicted(home: Path, scale: float) -> Found:
    from trainkit.config.run_request import RunRequest, load
    from trainkit.models import segmentation_3d
    from trainkit.models.sliding_window import sliding_probabilities

    data, cases = opened(home)[0], max(1, count(scale) // 10)
    recipe: Any = load(RunRequest(ROOT / "recipes" / "tom500.yaml"))
    net, split = segmentation_3d.build(recipe.task.net, data.meta, {})[0].eval(), data.evaluations["val"]
    began = time.process_time()
    for row in range(cases):
        sliding_probabilities(net, split.on_device(split.fetch(np.asarray([row]), 0))["image"], PATCH)
    return Found(forecast(cases, began))


def label_maps(home: Path, cases: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    split = opened(home)[0].evaluations["val"]
    for row in range(cases):
        batch = split.fetch(np.asarray([row]), 0)
        truth = batch["mask"][0].numpy()
        yield np.roll(truth, (2, 2), (1, 2)), truth, batch["spacing"][0].double().numpy()


def scored(home: Path, scale: float) -> Found:
    from trainkit.metrics import surface_distance

    began, cases, hd95 = time.process_time(), count(scale), []
    for found, truth, spacing in label_maps(home, cases):
        hd95.append(surface_distance.case_scores(found, truth, spacing, 10, np.ones(9))["hd95"])
    return Found(f"{forecast(cases, began)}; HD95 of the first {np.nanmean(hd95[0]):.3f} mm")


def scored_by_monai(home: Path, scale: float) -> Found:
    import torch
    from monai import metrics

    began = time.process_time()
    ((found, truth, spacing),) = label_maps(home, 1)
    one, other = (torch.eye(10)[torch.from_numpy(a.astype(np.int64))].movedim(-1, 0)[None] for a in (found, truth))
    mm = spacing.tolist()
    hd95 = metrics.compute_hausdorff_distance(one, other, percentile=95, spacing=mm)
    metrics.compute_average_surface_distance(one, other, symmetric=True, spacing=mm)
    metrics.compute_surface_dice(one, other, [1.0] * 9, spacing=mm)
    return Found(f"{forecast(1, began)}; HD95 of the first {float(hd95.nanmean()):.3f} mm")


SIDES: measuring.Sides = {
    "prepared": ("unpacking, percentiles", partial(opens, opened, "cache", True)),
    "opened again": ("hashing", partial(opens, opened, "cache", False)),
    "an epoch of patches": ("copying", patches),
    "MONAI, an epoch of patches": ("unpacking, percentiles", patches_by_monai),
    "predicted": ("forward", predicted),
    "scored": ("distances", scored),
    "MONAI, scored": ("distances", scored_by_monai),
}

if __name__ == "__main__":
    measuring.main(__doc__, "volumes", make, SIDES)
