"""Patches per second: prepared volumes against `.nii.gz` read each time and MONAI's cached data sets, in one run.

    python benchmarks/volume_reading.py                    TOM500: 16 x 224 x 224 of 20 x 512 x 512, drawn orbits
    python benchmarks/volume_reading.py --shape cube       96^3 of 128 x 320 x 320, blobs
    python benchmarks/volume_reading.py --growth           the same patches of volumes from 128^3 to 512^3
    ... --rounds 7 --seconds 3 --cases 6                   rounds of all sides in turn, seconds each, volumes

Each side is a process of its own in every round, rounds run all of them in turn, and ratios are of the same round. All
draw one patch at a time, half of them on a voxel of an organ, oriented, clipped at percentiles and z-scored, as float32
and uint8; MONAI does it with its own transforms, everything before the crop cached, places of organs included. Equal
work is proved: each side's last patches must be what the prepared set holds where they were cut.

What is prepared, imported or cached before the first patch is timed apart. One thread; files are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
KEPT = 4
"""Last patches of each side that are compared with the prepared set."""
CLOSE = 5e-3
"""Half precision in between, and percentiles of another implementation."""


@dataclass(frozen=True)
class Shape:
    """What is read: in the order in which volumes are stored."""

    axes: str
    patch: tuple[int, int, int]
    names: tuple[str, ...]
    axcodes: str
    """The same order in MONAI's words."""


SHAPES = {
    "tom500": Shape("yzx", (16, 224, 224), ("SR", "LR", "MR", "IR", "ON", "FAT", "LG", "SO", "EB"), "ASR"),
    "cube": Shape("zyx", (96, 96, 96), ("blob", "rest"), "SAR"),
}


def write(folder: Path, shape: str, cases: int) -> None:
    """The files, and their prepared form beside them."""
    import nibabel

    from trainkit.data import sample_orbits, volume_import

    for part in ("image", "label"):
        (folder / "files" / part).mkdir(parents=True)
    for case in range(cases):
        if shape == "tom500":
            size, spacing = (512, 512, 20), (0.3125, 0.3125, 3.85)
            image, label = sample_orbits.draw(case + 1, size, spacing)
            affine = sample_orbits.affine(case + 1, size, spacing)
        else:
            image, label = _blobs(case)
            affine = np.eye(4)
        for part, array in (("image", np.round(image).astype(np.int16)), ("label", label)):
            nibabel.save(nibabel.Nifti1Image(array, affine), folder / "files" / part / f"{case:03d}.nii.gz")
    began = time.perf_counter()
    report = volume_import.import_volumes(folder / "files", folder / "packed", names=list(SHAPES[shape].names))
    print(f"imported in {time.perf_counter() - began:.1f} s: {report.bytes / 1e6:.0f} MB", flush=True)


def _blobs(case: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(case)
    at = np.stack(np.meshgrid(*(np.linspace(-1, 1, n, dtype=np.float32) for n in (320, 320, 128)), indexing="ij"))
    inside = ((at - rng.uniform(-0.3, 0.3, (3, 1, 1, 1)).astype(np.float32)) ** 2).sum(0)
    label = ((inside < 0.12).astype(np.uint8) + (inside < 0.04)).astype(np.uint8)
    image = 400.0 * label + 1000 * np.exp(-inside) + rng.normal(0, 60, inside.shape).astype(np.float32)
    return image, label


# ---- the sides: each yields (image float32, mask uint8, case, first voxel) for ever

Patches = Iterator[tuple[np.ndarray, np.ndarray, int, tuple[int, int, int]]]


def prepared(folder: Path, shape: Shape, cache: str = "disk") -> Patches:
    """trainkit: rows of an epoch after another."""
    split = _split(folder / "packed", shape, cache)
    epoch = 0
    while True:
        for row in split.order(epoch, 1)[:, 0]:
            rows = np.array([row])
            batch = split.on_device(split.fetch(rows, epoch))
            start = tuple(split.starts(rows, epoch)[0].tolist())
            case = int(split.cases[row // split.patches])
            yield batch["image"][0, 0].numpy(), batch["mask"][0].numpy(), case, start
        epoch += 1


def in_memory(folder: Path, shape: Shape) -> Patches:
    """The same from memory."""
    return prepared(folder, shape, "ram")


def _split(packed: Path, shape: Shape, cache: str):
    from trainkit.data.volumes import Volumes

    return Volumes(train=str(packed), patch=shape.patch, patches=64, foreground=0.5, cache=cache).open(0).train


def files(folder: Path, shape: Shape) -> Patches:
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
    """MONAI's CacheDataset, everything before the crop in memory; by default it copies that for each patch."""
    from monai.data import CacheDataset

    listed, transforms = _monai(folder, shape)
    data = CacheDataset(listed, transforms, cache_rate=1.0, num_workers=1, progress=False, copy_cache=copy)
    return _drawn(data, shape)


def monai_shared(folder: Path, shape: Shape) -> Patches:
    """The same without the copy, which a crop does not need."""
    return monai_cached(folder, shape, copy=False)


def monai_persistent(folder: Path, shape: Shape) -> Patches:
    """MONAI's PersistentDataset, everything before the crop on disk."""
    from monai.data import PersistentDataset

    listed, transforms = _monai(folder, shape)
    place = folder / "persistent"
    data = PersistentDataset(listed, transforms, cache_dir=place)
    for case in range(len(listed)):  # written before the clock starts
        data[case]
    # It keeps voxels alone: a crop's affine then counts voxels of the volume.
    return _drawn(data, shape, tracked=False)


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


def _drawn(data, shape: Shape, tracked: bool = True) -> Patches:
    rng = np.random.default_rng(0)
    affines = {}
    while True:
        case = int(rng.integers(len(data)))
        (one,) = data[case]
        image, mask = one["image"], one["label"]
        if case not in affines:  # of the whole volume, from which the crop's place follows
            affines[case] = _stored_affine(data.data[case]["image"], shape) if tracked else np.eye(4)
        inverse = np.linalg.inv(affines[case])
        start = (inverse @ np.asarray(image.affine)[:, 3])[:3].round().astype(int)
        yield image[0].as_tensor().numpy(), mask[0].as_tensor().numpy(), case, tuple(start.tolist())


def _stored_affine(path: str, shape: Shape) -> np.ndarray:
    import nibabel

    image = nibabel.as_closest_canonical(nibabel.load(path))
    order = ["xyz".index(axis) for axis in shape.axes]
    return image.affine[:, [*order, 3]]


SIDES: dict[str, Callable[[Path, Shape], Patches]] = {
    "prepared": prepared,
    "prepared, in memory": in_memory,
    "MONAI CacheDataset": monai_cached,
    "MONAI CacheDataset, copy_cache=False": monai_shared,
    "MONAI PersistentDataset": monai_persistent,
    ".nii.gz each time": files,
}


def time_one(name: str, folder: Path, shape: Shape, seconds: float) -> dict[str, float]:
    """One side for so long: patches and CPU seconds. Raises ValueError when its patches are not those of the set."""
    import torch

    torch.set_num_threads(1)
    began = time.perf_counter()
    patches = SIDES[name](folder, shape)
    next(patches)
    ready = time.perf_counter() - began
    for _ in range(0 if name == ".nii.gz each time" else 10):
        next(patches)
    kept, done, cpu, began = [], 0, time.process_time(), time.perf_counter()
    while time.perf_counter() - began < seconds or done < KEPT:
        kept = [*kept[-KEPT + 1 :], next(patches)]
        done += 1
    taken, cpu = time.perf_counter() - began, time.process_time() - cpu
    compare(kept, folder / "packed", shape)
    return {"ready_s": ready, "patches": done, "s": taken, "cpu_s": cpu}


def compare(kept: list, packed: Path, shape: Shape) -> None:
    """Raise ValueError unless each patch is what the prepared set holds at its place."""
    from trainkit.data.packed_volumes import PackedVolumes

    data = PackedVolumes(packed)
    for image, mask, case, start in kept:
        at = tuple(slice(s, s + p) for s, p in zip(start, shape.patch, strict=True))
        if image.shape != shape.patch or image.dtype != np.float32 or mask.dtype != np.uint8:
            raise ValueError(f"{image.dtype} {image.shape} and {mask.dtype} instead of float32 {shape.patch} and uint8")
        off = np.abs(image - data.image(case)[at]).max()
        if off > CLOSE or not np.array_equal(mask, data.label(case)[at]):
            raise ValueError(f"case {case} at {start}: not the voxels of the prepared set (off by {off:.4f})")


def table(rounds: list[dict[str, dict[str, float]]]) -> str:
    """Markdown: ms a patch, patches a second, and how many times longer than `prepared` took, by round."""
    lines = ["| | ms a patch | patches/s | times as long | least | ready in, s |", "|---" * 6 + "|"]
    for name in rounds[0]:
        each = [r[name]["s"] / r[name]["patches"] for r in rounds]
        ratios = [r[name]["s"] / r[name]["patches"] / (r["prepared"]["s"] / r["prepared"]["patches"]) for r in rounds]
        middle = statistics.median(each)
        ready = statistics.median(r[name]["ready_s"] for r in rounds)
        cells = [f"{1e3 * middle:.3g}", f"{1 / middle:,.0f}", f"{statistics.median(ratios):.3g}", f"{min(ratios):.3g}"]
        lines.append(f"| {name} | {' | '.join(cells)} | {ready:.1f} |")
    return "\n".join(lines)


def growth(folder: Path, rounds: int, seconds: float) -> str:
    """Markdown: ms a patch of 96^3 by the size of its volume, and of 16 x 224 x 224; and per megabyte."""
    from trainkit.data.packed_volumes import CaseInfo, Writer
    from trainkit.data.volume_prepare import Preparation

    asked = [
        ("cube", (128, 128, 128)),
        ("cube", (128, 320, 320)),
        ("cube", (256, 256, 256)),
        ("cube", (512, 512, 512)),
        ("tom500", (20, 512, 512)),
    ]
    splits, taken = [], [[] for _ in asked]
    for k, (name, size) in enumerate(asked):
        rng = np.random.default_rng(k)
        shape, classes = SHAPES[name], len(SHAPES[name].names) + 1
        with Writer(folder / f"grown{k}", how=Preparation(shape.axes)) as writer:
            for case in range(2):
                image = rng.standard_normal(size, np.float32).astype(np.float16)
                label = np.zeros(size, np.uint8)
                label[tuple(slice(side // 3, side // 2) for side in size)] = rng.integers(1, classes)
                volumes = np.bincount(label.ravel(), minlength=classes).astype(float).tolist()
                one = (1.0, 1.0, 1.0)
                info = CaseInfo(f"{case}", f"{case}", size, one, size, one, float(image.min()), tuple(volumes), {}, {})
                writer.add(info, image, label, None, case)
            names = ["background", *shape.names]
            writer.finish(names=names)
        splits.append(_split(folder / f"grown{k}", shape, "disk"))
        epochs = splits[-1].order(0, 1)[:, 0]
        for row in epochs:  # every page is read once before the clock starts
            splits[-1].fetch(np.array([row]), 0)
        for case in range(2):
            splits[-1].packed.check(case)
    for _ in range(rounds):
        for k, split in enumerate(splits):
            rows, done, began = split.order(1, 1)[:, 0], 0, time.perf_counter()
            while time.perf_counter() - began < seconds:
                split.fetch(rows[done % len(rows)][None], 1)
                done += 1
            taken[k].append((time.perf_counter() - began) / done)
    lines = ["| patch | volume | ms a patch | least | ms a MB |", "|---" * 5 + "|"]
    for (name, size), times in zip(asked, taken, strict=True):
        patch = SHAPES[name].patch
        middle, megabytes = statistics.median(times), np.prod(patch) * 3 / 1e6
        by = " x ".join(map(str, patch)), " x ".join(map(str, size))
        ms = 1e3 * middle, 1e3 * min(times), 1e3 * middle / megabytes
        lines.append(f"| {by[0]} | {by[1]} | {ms[0]:.3f} | {ms[1]:.3f} | {ms[2]:.3f} |")
    return "\n".join(lines)


def main() -> None:
    """Run the sides in turn and print their table."""
    words = argparse.ArgumentParser()
    words.add_argument("--shape", choices=sorted(SHAPES), default="tom500")
    words.add_argument("--growth", action="store_true", help="volumes of several sizes, prepared")
    words.add_argument("--rounds", type=int, default=7)
    words.add_argument("--seconds", type=float, default=3.0, help="of each side in each round")
    words.add_argument("--cases", type=int, default=6)
    words.add_argument("--side", choices=sorted(SIDES), help=argparse.SUPPRESS)
    words.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = words.parse_args()
    if asked.side:
        print(json.dumps(time_one(asked.side, asked.folder, SHAPES[asked.shape], asked.seconds)))
        return
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if asked.growth:
            print(growth(folder, asked.rounds, asked.seconds))
        else:
            write(folder, asked.shape, asked.cases)
            rounds = []
            for number in range(asked.rounds):
                names = list(SIDES) if number % 2 == 0 else list(reversed(SIDES))
                found = {name: _measured(name, folder, asked) for name in names}
                rounds.append({name: found[name] for name in SIDES})
            print(table(rounds))
    print(f"\n{asked.rounds} rounds; load average {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end")


def _measured(name: str, folder: Path, asked: argparse.Namespace) -> dict[str, float]:
    words = ["--side", name, "--shape", asked.shape, "--folder", str(folder), "--seconds", str(asked.seconds)]
    done = subprocess.run(
        [sys.executable, __file__, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
