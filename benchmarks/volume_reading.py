"""Patches of 3-D volumes: the prepared form against `.nii.gz` read each time and MONAI's cached data sets.

    python benchmarks/volume_reading.py

One patch at a time, half of them on a voxel of an organ, oriented, clipped at percentiles and z-scored, as float32
and uint8; files are in the page cache.

    tom500    16 x 224 x 224 of 20 x 512 x 512, as TOM500's. `prepared` is ours. MONAI does it with its own
              transforms, everything before the crop cached in memory, places of organs included: `monai_cached` as it
              comes, which copies the cached volume for each patch, `monai_shared` without that copy. `nii_gz` reads and
              prepares the files for each patch

Equal work is proved: a side's last patches must be, to half precision, what the prepared set holds where they were cut.
What is opened or cached before the first patch is `ready`; files are kept for further rounds.
"""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from contest import Contest, Sample, Target

HOME = Path(tempfile.gettempdir()) / "trainkit-bench-volumes-1"
"""Where the files are kept between processes."""
VOLUMES, SPACING = 2, (0.3125, 0.3125, 3.85)
SECONDS = 0.7
KEPT = 4
"""Last patches of each side that are compared with the prepared set."""
CLOSE = 5e-3
"""Half precision in between, and percentiles of another implementation."""
UNUSED = ("mlflow", "transformers", "pandas", "matplotlib", "sklearn")
"""MONAI imports these where they are there, for other things than volumes: longer than all that is measured."""


@dataclass(frozen=True)
class Shape:
    """What is read: in the order in which volumes are stored."""

    size: tuple[int, int, int]
    """Of the files, (x, y, z)."""
    axes: str
    patch: tuple[int, int, int]
    names: tuple[str, ...]
    axcodes: str
    """The same order in MONAI's words."""


SHAPES = {
    "tom500": Shape(
        (512, 512, 20), "yzx", (16, 224, 224), ("SR", "LR", "MR", "IR", "ON", "FAT", "LG", "SO", "EB"), "ASR"
    ),
}


def files(case: str) -> Path:
    """The folder of the files of a case and of their prepared form, made when it is not there."""
    home = HOME / case
    if not home.is_dir():
        HOME.mkdir(exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f"{case}.", dir=HOME))
        try:
            _write(aside, case)
            os.rename(aside, home)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return home


def _write(folder: Path, case: str) -> None:
    import nibabel

    from trainkit.data.synthetic import orbits
    from trainkit.data.volumes import importer

    shape = SHAPES[case]
    for part in ("image", "label"):
        (folder / "files" / part).mkdir(parents=True)
    for number in range(VOLUMES):
        image, label = orbits.draw(number + 1, shape.size, SPACING)
        affine = orbits.affine(number + 1, shape.size, SPACING)
        for part, array in (("image", np.round(image).astype(np.int16)), ("label", label)):
            nibabel.save(nibabel.Nifti1Image(array, affine), folder / "files" / part / f"{number:03d}.nii.gz")
    importer.import_volumes(folder / "files", folder / "packed", names=list(shape.names))


# ---- the sides: each yields (image float32, mask uint8, volume, first voxel) for ever

Patches = Iterator[tuple[np.ndarray, np.ndarray, int, tuple[int, int, int]]]


def prepared(folder: Path, shape: Shape) -> Patches:
    """trainkit: rows of an epoch after another."""
    split = _split(folder, shape)
    for epoch in itertools.count():
        for row in split.order(epoch, 1)[:, 0]:
            rows = np.array([row])
            batch = split.on_device(split.fetch(rows, epoch))
            start = tuple(split.starts(rows, epoch)[0].tolist())
            case = int(split.cases[row // split.patches])
            yield batch["image"][0, 0].numpy(), batch["mask"][0].numpy(), case, start


def _split(folder: Path, shape: Shape):
    from trainkit.data.volumes.dataset import Volumes

    os.environ["TRAINKIT_CACHE"] = str(folder / "cache")
    return Volumes(train=str(folder / "files"), names=list(shape.names), patch=shape.patch, patches=64).open(0).train


def nii_gz(folder: Path, shape: Shape) -> Patches:
    """`.nii.gz`, read and normalised for each patch, organs looked for in all of it."""
    import nibabel

    rng = np.random.default_rng(0)
    images = sorted((folder / "files" / "image").iterdir())
    order = ["xyz".index(axis) for axis in shape.axes]
    while True:
        case = int(rng.integers(len(images)))
        pair = []
        for path in (images[case], folder / "files" / "label" / images[case].name):
            image = nibabel.as_closest_canonical(nibabel.load(path))
            pair.append(np.asarray(image.dataobj).transpose(order))
        image, mask = pair[0].astype(np.float32), pair[1].astype(np.uint8)
        image = image.clip(*np.percentile(image, (0.5, 99.5)).astype(np.float32))
        image = (image - image.mean()) / image.std()
        if rng.random() < 0.5:
            found = np.argwhere(mask)
            centre = found[rng.integers(len(found))]
        else:
            centre = [int(rng.integers(side)) for side in mask.shape]
        start = [
            int(np.clip(c - p // 2, 0, side - p)) for c, p, side in zip(centre, shape.patch, mask.shape, strict=True)
        ]
        at = tuple(slice(s, s + p) for s, p in zip(start, shape.patch, strict=True))
        yield np.ascontiguousarray(image[at]), np.ascontiguousarray(mask[at]), case, tuple(start)


def monai_cached(folder: Path, shape: Shape, copy: bool = True) -> Patches:
    """MONAI's CacheDataset, everything before the crop in memory."""
    from monai.data import CacheDataset

    listed, transforms = _monai(folder, shape)
    data = CacheDataset(listed, transforms, cache_rate=1.0, num_workers=1, progress=False, copy_cache=copy)
    return _drawn(data, shape)


def _monai(folder: Path, shape: Shape):
    from monai import transforms as t

    both = ["image", "label"]
    listed = [
        {"image": str(path), "label": str(folder / "files" / "label" / path.name)}
        for path in sorted((folder / "files" / "image").iterdir())
    ]
    steps = [
        t.LoadImaged(both, image_only=True, ensure_channel_first=True),
        t.Orientationd(both, axcodes=shape.axcodes, labels=(("L", "R"), ("P", "A"), ("I", "S"))),
        t.ScaleIntensityRangePercentilesd("image", 0.5, 99.5, 0, 1, clip=True),
        t.NormalizeIntensityd("image"),
        t.CastToTyped("label", np.uint8),
        t.FgBgToIndicesd("label"),
        t.RandCropByPosNegLabeld(
            both, "label", shape.patch, 1, 1, 1, fg_indices_key="label_fg_indices", bg_indices_key="label_bg_indices"
        ),
    ]
    return listed, t.Compose(steps).set_random_state(0)


def _drawn(data, shape: Shape) -> Patches:
    rng = np.random.default_rng(0)
    affines = {}
    while True:
        case = int(rng.integers(len(data)))
        (one,) = data[case]
        image, mask = one["image"], one["label"]
        if case not in affines:  # of the whole volume, from which the crop's place follows
            affines[case] = _stored_affine(data.data[case]["image"], shape)
        inverse = np.linalg.inv(affines[case])
        start = (inverse @ np.asarray(image.affine)[:, 3])[:3].round().astype(int)
        yield image[0].as_tensor().numpy(), mask[0].as_tensor().numpy(), case, tuple(start.tolist())


def _stored_affine(path: str, shape: Shape) -> np.ndarray:
    import nibabel

    image = nibabel.as_closest_canonical(nibabel.load(path))
    order = ["xyz".index(axis) for axis in shape.axes]
    return image.affine[:, [*order, 3]]


# ---- what is measured


def reading(make: Callable[[Path, Shape], Patches], case: str, *imports: str, slow: bool = False) -> Sample:
    """Milliseconds of processor time a patch; no import counts as getting ready."""
    folder, shape = files(case), SHAPES[case]
    for name in imports:
        importlib.import_module(name)
    began = time.process_time()
    patches = make(folder, shape)
    next(patches)
    ready = time.process_time() - began
    for _ in range(0 if slow else 10):
        next(patches)
    kept, done, cpu, began = [], 0, time.process_time(), time.perf_counter()
    while time.perf_counter() - began < SECONDS or done < KEPT:
        kept = [*kept[-KEPT + 1 :], next(patches)]
        done += 1
    cpu = time.process_time() - cpu
    return Sample(1e3 * cpu / done, compare(kept, folder / "packed", shape), {"ready, s": ready})


def compare(kept: list, packed: Path, shape: Shape) -> list:
    """Shape and types of the patches, and how many there are: each must be what the prepared set holds at its place.

    Raises ValueError where one is not.
    """
    from trainkit.data.volumes.volume_store import PackedVolumes

    data, found = PackedVolumes(packed), set()
    for image, mask, case, start in kept:
        at = tuple(slice(s, s + p) for s, p in zip(start, shape.patch, strict=True))
        held, labels = data.image(case)[(0, *at)], data.label(case)[at]
        if image.shape != held.shape or np.abs(image - held).max() > CLOSE or not np.array_equal(mask, labels):
            raise ValueError(f"volume {case} at {start}: not the voxels of the prepared set")
        found.add((*image.shape, str(image.dtype), str(mask.dtype)))
    return [len(kept), *map(list, found)]


def trainkit(case: str) -> Sample:
    return reading(prepared, case, "trainkit.data.volumes.dataset")


def monai(make: Callable[[Path, Shape], Patches]) -> Callable[[str], Sample]:
    """One of MONAI's."""

    def side(case: str) -> Sample:
        for name in UNUSED:
            sys.modules.setdefault(name, None)  # as if it were not installed
        return reading(make, case, "monai.data", "monai.transforms")

    return side


def from_files(case: str) -> Sample:
    return reading(nii_gz, case, "nibabel", slow=True)


CONTEST = Contest(
    title="Reading volume patches",
    unit="ms of CPU per patch",
    baseline="prepared",
    sides={
        "prepared": trainkit,
        "monai_cached": monai(monai_cached),
        "monai_shared": monai(partial(monai_cached, copy=False)),
        "nii_gz": from_files,
    },
    ours=("prepared",),
    cases=("tom500",),
    targets=(
        Target("tom500", "nii_gz", 100, least=True, words=".nii.gz, time relative to prepared,"),
        Target(
            "tom500", "monai_shared", 1, least=True, words="CacheDataset without copies, time relative to prepared,"
        ),
    ),
)

if __name__ == "__main__":
    sys.exit(CONTEST.main(__doc__))
