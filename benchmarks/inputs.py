"""Faces as batches in the memory of the host: packed sets against the loaders in use, from the same JPEG files.

    python benchmarks/inputs.py
    python benchmarks/inputs.py --rounds 7 --json FILE

4,096 drawn images of 112 px (JPEG, about 5 KB each), in the page cache; shuffled batches of 256, uint8, labels with
them. The first epoch is not timed; it gives the proof, the same for all sides to the last bit: each image's pixels
and label, once. The loaders of others have two worker processes and go from epoch to epoch without a pause, ours has
none: it reads in this process, with as many threads as there are cores. `encoded` keeps the JPEG files end to end, for
torchvision to decode; `cached` keeps the pixels. Normalisation is left out on all sides.

Sides take turns of half a second or more, of two batches at a time, one of each worker.

`us of CPU` counts all processes of a side: it says less of the neighbours than samples a second do.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from contest import Contest, Sample, Target, next_turn

CLASSES, EACH, SIDE, BATCH, WORKERS = 64, 64, 112, 256, 2
TURNS, SECONDS = 6, 0.5
HOME = Path(tempfile.gettempdir()) / "trainkit-bench-inputs-1"
"""Where the files are kept between processes."""


def files() -> Path:
    """The folder of all forms of the set, made when it is not there."""
    if not HOME.is_dir():
        aside = Path(tempfile.mkdtemp(prefix=f"{HOME.name}.", dir=HOME.parent))
        try:
            _draw(aside)
            os.rename(aside, HOME)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return HOME


def _draw(home: Path) -> None:
    import datasets
    from PIL import Image

    from trainkit.data import import_images

    rng = np.random.default_rng(0)
    rows: dict[str, list] = {"image": [], "label": []}
    for label in range(CLASSES):
        folder = home / "files" / f"{label:03d}"
        folder.mkdir(parents=True)
        for k in range(EACH):
            coarse = Image.fromarray(rng.integers(0, 256, (14, 14, 3), dtype=np.uint8))
            smooth = np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC)).astype(np.int16)
            pixels = (smooth + rng.integers(-8, 9, (SIDE, SIDE, 1))).clip(0, 255).astype(np.uint8)
            stream = io.BytesIO()
            Image.fromarray(pixels).save(stream, "JPEG", quality=85)
            (folder / f"{k:03d}.jpg").write_bytes(stream.getvalue())
            rows["image"].append({"bytes": stream.getvalue(), "path": None})
            rows["label"].append(label)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(home / "arrow")
    for store in ("encoded", "decoded"):
        import_images.import_pictures(home / "files", home / store, size=(SIDE, SIDE), store=store)


# ---- sides


def imagefolder(case: str) -> Sample:
    """torchvision's ImageFolder, Pillow, two workers."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import PILToTensor

    return measured(_epochs(ImageFolder(files() / "files", transform=PILToTensor())))


def arrow(case: str) -> Sample:
    """`datasets`, map-style, from its own files, two workers."""
    import datasets

    found = datasets.load_from_disk(str(files() / "arrow")).with_format("torch")
    return measured((batch["image"], batch["label"]) for batch in _epochs(found))


def encoded(case: str) -> Sample:
    """JPEG files end to end, decoded by torchvision."""
    return ours("encoded")


def cached(case: str) -> Sample:
    return ours("decoded")


def ours(store: str) -> Sample:
    """A packed set as a training reads it."""
    from trainkit.config.schema import Loader
    from trainkit.data.faces.dataset import FaceSplit
    from trainkit.data.loader import stream
    from trainkit.data.storage.image_store import Packed
    from trainkit.training.plan import Plan

    split = FaceSplit("train", Packed(files() / store), seed=0, mirror=True)
    plan = Plan(10**9, split.size // BATCH, BATCH, BATCH, 1, 1, 0)
    batches = stream.training(split, partial(plan.keys, split, 0), Loader(), pin=False)
    return measured((batch["image"], batch["label"]) for batch in batches)


def _epochs(dataset, **options) -> Iterator:
    from torch.utils.data import DataLoader, RandomSampler

    rows = RandomSampler(dataset, num_samples=10**6 * len(dataset))  # one permutation after the other
    return iter(DataLoader(dataset, BATCH, sampler=rows, num_workers=WORKERS, **options))


# ---- what is measured


def measured(batches: Iterable) -> Sample:
    """Samples a second from the second epoch on."""
    batches, many = iter(batches), CLASSES * EACH // BATCH
    began = time.perf_counter()
    seen = []
    for images, labels in itertools.islice(batches, many):
        assert images.shape == (BATCH, 3, SIDE, SIDE) and images.element_size() == 1
        seen += [f"{label} {zlib.crc32(image)}" for image, label in zip(images.numpy(), labels.tolist(), strict=True)]
    first = time.perf_counter() - began
    proof = hashlib.sha256("\n".join(sorted(seen)).encode()).hexdigest()[:16]
    for _ in itertools.islice(batches, many):
        pass  # what workers made ready while the proof was taken
    # Nothing stands between a turn and its clock: workers would read ahead meanwhile.
    rates, total, used = [], 0, _cpu_seconds()
    for _ in range(TURNS):
        next_turn()
        began, count = time.perf_counter(), 0
        while (spent := time.perf_counter() - began) < SECONDS:
            count += sum(len(labels) for _, labels in itertools.islice(batches, WORKERS))
        rates.append(count / spent)
        total += count
    cpu = _cpu_seconds() - used
    more = {"us of CPU": 1e6 * cpu / total, "first epoch, s": first}
    return Sample(statistics.median(rates), proof, more, rates)


def _cpu_seconds() -> float:
    """Of this process and its workers."""
    import psutil

    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(each.user + each.system for each in times)


CONTEST = Contest(
    title="Image loading, 112 px",
    unit="samples/s",
    baseline="imagefolder_2w",
    sides={
        "imagefolder_2w": imagefolder,
        "datasets_2w": arrow,
        "trainkit_encoded": encoded,
        "trainkit_cached": cached,
    },
    more_is_better=True,
    turns=True,
    ours=("trainkit_encoded", "trainkit_cached"),
    targets=tuple(
        Target("", f"trainkit_{side}", limit, against=f"{peer}_2w", least=True, words=f"{side}, / {peer}_2w,")
        for side, limit in (("encoded", 3), ("cached", 50))
        for peer in ("imagefolder", "datasets")
    ),
    bounds="Cached images are memory copies.",
)

if __name__ == "__main__":
    sys.exit(CONTEST.main(__doc__))
