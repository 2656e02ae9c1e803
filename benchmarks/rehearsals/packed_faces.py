"""A packed set of the size of MS1MV2: how long it takes to open and to read, what memory and disk it takes.

    python -m benchmarks.rehearsals.packed_faces [ROWS] [--home FOLDER]

Draws a set of tiny JPEG files (1 kB each, 85,742 people), packs it once into FOLDER, and measures in a process of its
own each: trainkit opening the packed set; InsightFace's way (a dictionary of the lines of `train.idx`); numpy reading
the same lines; and 3,000 random images read, with what that read from the disk where the pages can be dropped.
Memory is anonymous memory, which processes do not share, beyond that of the imports.
"""

from __future__ import annotations

import argparse
import io
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROWS, PEOPLE, DRAWN = 5_822_653, 85_742, 256
READ = 3000


def draw() -> list[bytes]:
    """JPEG files of 112 px, about 1 kB each."""
    from PIL import Image

    found = []
    for seed in range(DRAWN):
        coarse = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
        stream = io.BytesIO()
        Image.fromarray(coarse).resize((112, 112), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=50)
        found.append(stream.getvalue())
    return found


def write(home: Path, rows: int) -> None:
    """Pack the set, and write an index such as InsightFace's beside it."""
    import zlib

    from trainkit.data.formats import image_decode
    from trainkit.data.storage.image_store import Writer, content

    drawn = draw()
    prints = [content(image_decode.decode(data, "").transpose(2, 0, 1)) for data in drawn]
    crcs = [zlib.crc32(data) for data in drawn]
    with Writer(home / "set", size=(112, 112), store="encoded") as writer:
        for row in range(rows):
            k = row % DRAWN
            writer.add(
                {
                    "id": f"record {row + 1}",
                    "label": -1,
                    "group": -1,
                    "crc": crcs[k],
                    "content": prints[k],
                    "image": drawn[k],
                }
            )
        labels = np.arange(rows) * min(PEOPLE, rows) // rows
        writer.finish(labels=labels, class_names=[str(person) for person in range(min(PEOPLE, rows))])
    with (home / "train.idx").open("w") as file:
        file.writelines(f"{row}\t{row * 1040}\n" for row in range(rows))


def trainkit(home: Path) -> object:
    """Open the packed set and look at its labels."""
    from trainkit.data.storage.image_store import Packed

    data = Packed(home / "set")
    assert data.labels[-1] == data.classes - 1
    return data


def insightface(home: Path) -> object:
    """A dictionary of the lines of the index, as its reader keeps one."""
    index, keys = {}, []
    with (home / "train.idx").open() as file:
        for line in iter(file.readline, ""):
            key, offset = line.strip().split("\t")
            index[int(key)] = int(offset)
            keys.append(int(key))
    return index, keys


def with_numpy(home: Path) -> object:
    """The same lines as an array."""
    return np.fromstring((home / "train.idx").read_text(), np.int64, sep=" ").reshape(-1, 2)


def reading(home: Path) -> object:
    """3,000 random images after the set was opened; pages of the file are dropped before."""
    data = trainkit(home)
    begin = _read_bytes()
    rows = np.random.default_rng(0).integers(0, len(data), READ)  # pyright: ignore[reportArgumentType]
    data.fetch(rows)  # pyright: ignore[reportAttributeAccessIssue]
    print(f"  of it read from the disk for {READ:,} images: {(_read_bytes() - begin) / 1e6:,.1f} MB")
    return data


SIDES: dict[str, Callable[[Path], object]] = {
    "trainkit, opened": trainkit,
    "InsightFace's dictionary": insightface,
    "numpy": with_numpy,
    "trainkit, opened and read": reading,
}


def _anonymous() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    return 0


def _read_bytes() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


def measure(side: str, home: Path) -> None:
    """Print what a side takes in this process."""
    import filelock  # noqa: F401
    import torch  # noqa: F401

    import trainkit.data.storage.image_store  # noqa: F401  (imports are not what is measured)

    for file in home.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before, began, used = _anonymous(), time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    kept = SIDES[side](home)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    took, memory, read = time.perf_counter() - began, (_anonymous() - before) / 1e6, _read_bytes() / 1e6
    print(f"{side:28} {took:6.2f} s, {cpu:6.2f} CPU s, {memory:8.1f} MB anonymous, {read:8.1f} MB read")
    del kept


def main() -> None:
    """Make the set where it is not there, and measure each side in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="?", type=int, default=ROWS)
    parser.add_argument("--home", type=Path)
    parser.add_argument("--side", choices=SIDES)
    asked = parser.parse_args()
    home = asked.home or Path(tempfile.gettempdir()) / f"trainkit-packed-faces-{asked.rows}"
    if asked.side:
        measure(asked.side, home)
        return
    if not (home / "train.idx").is_file():
        began = time.perf_counter()
        write(home, asked.rows)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(f"packed {asked.rows:,} images in {time.perf_counter() - began:,.0f} s, at most {peak:,.0f} MB in memory")
    size = sum(file.stat().st_size for file in (home / "set").iterdir())
    print(f"{asked.rows:,} images, {size / 1e9:.2f} GB")
    for side in SIDES:
        command = [sys.executable, "-m", "benchmarks.rehearsals.packed_faces", str(asked.rows), "--home", str(home)]
        subprocess.run([*command, "--side", side], check=True)


if __name__ == "__main__":
    main()
