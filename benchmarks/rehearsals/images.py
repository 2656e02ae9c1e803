"""ImageNet's counts, 1,281,167 images in 1,000 classes and 50,000 to be evaluated: as folder, parquet and webdataset.

    python -m benchmarks.rehearsals.images --scale 0.01|0.1|1 [--home FOLDER] [--only SIDE ...]

Files of the folder are hard links to 1,000 tiny JPEG files (64 px, 1 kB), which stand once on the disk; parquet files
and shards hold them all. Each form is packed once and read in shuffled order by this process, 1, 2 and 4 workers, and 2
processes. Beside it torchvision's ImageFolder in a DataLoader. The evaluation is at the end of a training of one step
with a small network, on 1, 2 and 4 processes.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import tarfile
import time
from collections.abc import Callable, Sized
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.rehearsals import measuring
from benchmarks.rehearsals.measuring import Found, once, opens, pictures, trained

Timed = tuple[int, float, float]
IMAGES, CLASSES, PIXELS, BATCH, SHARD, SECONDS = {"train": 1_281_167, "val": 50_000}, 1000, 64, 256, 10_000, 4.0


def drawn(row: int) -> bytes:
    return pictures(1000, PIXELS)[row * 7 % 1000]


def write_folder(scale: float, folder: Path) -> None:
    (folder / ".drawn").mkdir()
    for number, data in enumerate(pictures(1000, PIXELS)):
        (folder / ".drawn" / f"{number}").write_bytes(data)
    for split, images in IMAGES.items():
        for kind in range(CLASSES):
            (folder / split / f"n{kind:08d}").mkdir(parents=True)
        for row in range(int(images * scale)):
            file = folder / split / f"n{row % CLASSES:08d}" / f"{row:07d}.jpg"
            os.link(folder / ".drawn" / f"{row * 7 % 1000}", file)


def write_parquet(scale: float, folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    images = int(IMAGES["train"] * scale)
    for first in range(0, images, SHARD):
        rows = range(first, min(first + SHARD, images))
        image = pa.array([{"bytes": drawn(row), "path": None} for row in rows])
        table = pa.table({"image": image, "label": pa.array([row % CLASSES for row in rows])})
        pq.write_table(table, folder / f"train-{first // SHARD:05d}.parquet", row_group_size=1000)


def write_shards(scale: float, folder: Path) -> None:
    images = int(IMAGES["train"] * scale)
    for first in range(0, images, SHARD):
        with tarfile.open(folder / f"train-{first // SHARD:05d}.tar", "w") as tar:
            for row in range(first, min(first + SHARD, images)):
                for suffix, data in (("jpg", drawn(row)), ("cls", str(row % CLASSES).encode())):
                    about = tarfile.TarInfo(f"{row:07d}.{suffix}")
                    about.size = len(data)
                    tar.addfile(about, io.BytesIO(data))


FORMS = {"folder": write_folder, "parquet": write_parquet, "shards": write_shards}


def make(home: Path, scale: float) -> None:
    for name, write in FORMS.items():
        once(home / name, partial(write, scale))


def listed(by: Callable[[Path], Sized], home: Path, scale: float) -> Found:
    found = by(home / "folder" / "train")
    return Found(f"{len(found):,} files", 0, found)


def our_files(folder: Path) -> Sized:
    from trainkit.data.image_folder import open_folder

    return open_folder(folder).files


def image_folder(folder: Path, **more: Any) -> Any:
    from torchvision.datasets import ImageFolder

    return ImageFolder(folder, **more)


def opened(form: str, home: Path) -> tuple[Any, str]:
    from trainkit.data.images.dataset import Images
    from trainkit.data.storage import image_store

    image_store.DECODED_LIMIT = 0  # encoded, as sets of gigabytes are
    place = home / "folder" / "train" if form == "folder" else home / form
    split = Images(train=str(place), image_size=PIXELS, leakage="allow").open(0).train
    return split, f"{split.size:,} images"


def ours(home: Path, workers: int) -> Timed:
    from trainkit.config.schema import Loader
    from trainkit.data.loader import stream
    from trainkit.training.plan import Plan

    split: Any = opens(partial(opened, "folder"), "cache-folder", False, home, 0).kept
    plan = Plan(10**9, split.size // BATCH, BATCH, BATCH, 1, 1, 0)
    return _timed(stream.training(split, partial(plan.keys, split, 0), Loader(workers=workers), pin=False))


def torchvision(home: Path, workers: int) -> Timed:
    from torch.utils.data import DataLoader, RandomSampler
    from torchvision.transforms import PILToTensor

    data = image_folder(home / "folder" / "train", transform=PILToTensor())
    rows = RandomSampler(data, num_samples=10**4 * BATCH)
    return _timed(batch for batch, _ in DataLoader(data, BATCH, sampler=rows, num_workers=workers))


def _timed(batches: Any) -> Timed:
    """Images, seconds, and CPU seconds of this process and its workers, behind the first batches."""
    import psutil

    def used() -> float:
        times = [one.cpu_times() for one in (psutil.Process(), *psutil.Process().children(recursive=True))]
        return sum(one.user + one.system for one in times)

    batches = iter(batches)
    for _ in range(12):
        next(batches)
    began, cpu, images = time.perf_counter(), used(), 0
    while time.perf_counter() - began < SECONDS:
        next(batches)
        images += BATCH
    return images, time.perf_counter() - began, used() - cpu


def read(job: Callable[[Path, int], Timed], workers: int, processes: int, home: Path, scale: float) -> Found:
    if processes == 1:
        found = [job(home, workers)]
    else:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
            found = list(pool.map(job, [home] * processes, [workers] * processes))
    rate, cpu = sum(one[0] / one[1] for one in found), sum(one[2] for one in found) / sum(one[0] for one in found)
    return Found(f"{rate:,.0f} images/s, {1e6 * cpu:,.0f} us of CPU each")


def evaluated(processes: int, home: Path, scale: float) -> Found:
    store = home / f"evaluated-{processes}"
    os.environ["TRAINKIT_CACHE"] = str(home / "cache-val")
    net, val = "{model: convnext_atto, args: {depths: [1, 1, 1, 1], dims: [8, 8, 8, 8]}}", f"{home}/folder/val"
    words = [
        "recipes/convnext.yaml", f"data.train={val}", f"data.evaluate={{val: {val}}}", f"data.image_size={PIXELS}",
        f"task.net={net}", f"train={{length: 1 steps, batch_size: {BATCH}}}", "data.augment={name: none}",
        f"evaluations={{val: {{batch_size: {BATCH}}}}}", "best=null", "data.leakage=allow", "integrity.policy=off",
    ]  # fmt: skip
    trained(*words, store=store, processes=processes)
    from trainkit.tracking import journal

    (file,) = store.glob("runs/*/journal*")
    metrics = {name: points[-1].value for name, points in journal.read(file).metrics.items()}
    said = f"{metrics['eval/val/unique_samples']:,.0f} images, nll {metrics['val/nll']:.6f}"
    return Found(f"{said} in {metrics['time/eval_val_s']:.1f} s")


SIDES: measuring.Sides = {
    "folder, listed": ("names, in Python", partial(listed, our_files)),
    "ImageFolder, listed": ("names, in Python", partial(listed, image_folder)),
    **{
        f"{form}, {'packed' if anew else 'opened again'}": (
            "decoding by Pillow" if anew else "a stat a file",
            partial(opens, partial(opened, form), f"cache-{form}", anew),
        )
        for form in FORMS
        for anew in (True, False)
    },
    **{
        f"shuffled, {workers} workers{' x 2 processes' * (many - 1)}": ("decoding", partial(read, ours, workers, many))
        for workers, many in ((0, 1), (1, 1), (2, 1), (4, 1), (0, 2))
    },
    **{f"ImageFolder, {n} workers": ("decoding by Pillow", partial(read, torchvision, n, 1)) for n in (0, 2)},
    **{f"evaluated by {many} processes": ("forward", partial(evaluated, many)) for many in (1, 2, 4)},
}

if __name__ == "__main__":
    measuring.main(__doc__, "images", make, SIDES)
