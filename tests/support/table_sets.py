"""Images of noise, each known by its seed, in folders and in tables of every form."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def noise(seed: int, height: int = 6, width: int = 10) -> np.ndarray:
    """Pixels of the image of a seed, uint8 (height, width, 3)."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def png(seed: int, height: int = 6, width: int = 10) -> bytes:
    """The image of a seed as a PNG file."""
    stream = io.BytesIO()
    Image.fromarray(noise(seed, height, width)).save(stream, "PNG")
    return stream.getvalue()


def put(root: Path, *names: str) -> Path:
    """Write images, the first of seed 0, and so on."""
    for seed, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(png(seed))
    return root


def squares(root: Path, count: int = 4) -> list[str]:
    """Write `img/0.png`, `img/1.png`, ... of 8 x 8 pixels."""
    (root / "img").mkdir(parents=True)
    for k in range(count):
        (root / "img" / f"{k}.png").write_bytes(png(k, 8, 8))
    return [f"img/{k}.png" for k in range(count)]


def lines(file: Path, *rows: str) -> Path:
    """Write a file of text."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(rows) + "\n")
    return file


def parquet(file: Path, **columns: Any) -> Path:
    """Write a parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file)
    return file


def shard(file: Path, *members: tuple[str, bytes]) -> Path:
    """Write a tar file of files, by their names."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as tar:
        for name, data in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return file


def samples(first: int = 0, count: int = 4) -> list[tuple[str, bytes]]:
    """Members of a shard: squares of the seeds from `first` on, of two classes and two persons."""
    found = []
    for k in range(first, first + count):
        told = json.dumps({"who": f"p{k % 2}"}).encode()
        found += [(f"s{k}.png", png(k, 8, 8)), (f"s{k}.cls", str(k % 2).encode()), (f"s{k}.json", told)]
    return found


def saved(root: Path, **seeds: list[int]) -> Path:
    """Save sets of images of two named classes with `datasets`: a DatasetDict, or a set where the name is `alone`."""
    import datasets

    datasets.disable_progress_bars()
    names = datasets.ClassLabel(names=["shut", "open"])
    features = datasets.Features({"image": datasets.Image(), "label": names})
    made = {
        split: datasets.Dataset.from_dict(
            {"image": [{"bytes": png(s), "path": None} for s in some], "label": [s % 2 for s in some]}, features
        )
        for split, some in seeds.items()
    }
    (made["alone"] if "alone" in made else datasets.DatasetDict(made)).save_to_disk(root)
    return root
