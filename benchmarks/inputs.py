"""Faces as batches in the memory of the host: packed sets against the loaders in use, from the same JPEG files.

    python benchmarks/inputs.py
    python benchmarks/inputs.py --rounds 7 --json FILE

4,096 drawn pictures of 112 px (JPEG, about 5 KB each), in the page cache; shuffled batches of 256, uint8, labels with
them. The first epoch is not timed; it gives the proof, the same for all sides to the last bit: each picture's pixels
and label, once. The loaders of others have two worker processes, ours none: it reads in this process, with as many
threads as there are cores. `encoded` keeps the JPEG files end to end, for torchvision or simplejpeg to decode;
`cached` keeps the pixels.

`us of CPU` counts all processes of a side: it says less of the neighbours than samples a second do.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from contest import Contest, Sample, Target

CLASSES, EACH, SIDE, BATCH, WORKERS = 64, 64, 112, 256, 2
SECONDS = 4.0
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

    from trainkit.data import importing

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
        importing.import_pictures(home / "files", home / store, size=(SIDE, SIDE), store=store)


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


def timm_loader(case: str) -> Sample:
    """timm's dataset and what its loader does on the host, two workers."""
    from timm.data import create_dataset
    from timm.data.loader import fast_collate
    from timm.data.transforms import ToNumpy

    found = create_dataset("", root=str(files() / "files"))
    found.transform = ToNumpy()
    return measured(_epochs(found, collate_fn=fast_collate))


def encoded(case: str) -> Sample:
    """JPEG files end to end, decoded by torchvision, as without the extra `fast`."""
    from trainkit.data import pictures

    pictures.plain_decoder = pictures._torchvision
    return ours("encoded")


def simplejpeg(case: str) -> Sample:
    """The same with the extra `fast`."""
    from trainkit.data import pictures

    pictures.plain_decoder = pictures._simplejpeg
    return ours("encoded")


def cached(case: str) -> Sample:
    return ours("decoded")


def ours(store: str) -> Sample:
    """A packed set as a training reads it."""
    from trainkit.data import loading
    from trainkit.data.faces import FaceSplit
    from trainkit.data.packed import Packed
    from trainkit.plan import Plan
    from trainkit.recipe import Loader

    split = FaceSplit("train", Packed(files() / store), seed=0, mirror=True)
    plan = Plan(10**9, split.size // BATCH, BATCH, BATCH, 1, 1, 0)
    batches = loading.training(split, plan, 0, Loader(), pin=False)
    return measured((batch["image"], batch["label"]) for batch in batches)


def _epochs(dataset, **options) -> Iterator:
    from torch.utils.data import DataLoader

    loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True, **options)
    return itertools.chain.from_iterable(itertools.repeat(loader))


# ---- what is measured


def measured(batches: Iterable) -> Sample:
    """Samples a second over whole epochs, from the second on."""
    batches, many = iter(batches), CLASSES * EACH // BATCH
    began = time.perf_counter()
    seen = []
    for images, labels in itertools.islice(batches, many):
        assert images.shape == (BATCH, 3, SIDE, SIDE) and images.element_size() == 1
        seen += [f"{label} {zlib.crc32(image)}" for image, label in zip(images.numpy(), labels.tolist(), strict=True)]
    first = time.perf_counter() - began
    proof = hashlib.sha256("\n".join(sorted(seen)).encode()).hexdigest()[:16]
    cpu, began, count = _cpu_seconds(), time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < SECONDS:
        count += sum(len(labels) for _, labels in itertools.islice(batches, many))
    cpu = _cpu_seconds() - cpu
    return Sample(count / spent, proof, {"us of CPU": 1e6 * cpu / count, "first epoch, s": first})


def _cpu_seconds() -> float:
    """Of this process and its workers."""
    import psutil

    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(each.user + each.system for each in times)


CONTEST = Contest(
    title="Input: 112 px pictures",
    unit="samples/s",
    baseline="imagefolder_2w",
    sides={
        "imagefolder_2w": imagefolder,
        "datasets_2w": arrow,
        "timm_2w": timm_loader,
        "trainkit_encoded": encoded,
        "trainkit_simplejpeg": simplejpeg,
        "trainkit_cached": cached,
    },
    more_is_better=True,
    targets=(
        Target("", "trainkit_encoded", 3, least=True, words="encoded, / ImageFolder with two workers,"),
        Target("", "trainkit_simplejpeg", 3, least=True, words="encoded with simplejpeg, / ImageFolder,"),
        Target("", "trainkit_cached", 50, least=True, words="cached, / ImageFolder with two workers,"),
    ),
)

if __name__ == "__main__":
    sys.exit(CONTEST.main(__doc__))
