"""A set of faces of the size of MS1MV2, packed and as InsightFace's files: what opening and reading them takes.

    python -m benchmarks.rehearsals.packed_faces [ROWS] [--home FOLDER]

Draws a set of tiny JPEG files (1 kB each, 85,742 people), writes it once into FOLDER as InsightFace's `train.rec`,
`train.idx`, `property` and `lfw.bin` and as a packed set, and measures in a process of its own each:

- trainkit opening the packed set, and reading 3,000 random images of it;
- trainkit opening the `.rec` for the first and the second time, and to the first batch of 128, beside InsightFace's
  way: a dictionary of the lines of `train.idx`, then records by their offsets, decoded one by one;
- numpy reading the lines of `train.idx`;
- `trainkit cp face_teacher_ms1mv2 --data` of the folder, imports included; its memory is not counted.

Pages of files are dropped before. Memory is anonymous memory, which processes do not share, beyond that of the imports:
at the end, and the most of samples taken every 5 ms.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROWS, PEOPLE, DRAWN = 5_822_653, 85_742, 256
READ, BATCH = 3000, 128
MAGIC = 0xCED7230A


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


def write_packed(folder: Path, labels: np.ndarray) -> None:
    """Pack the set."""
    import zlib

    from trainkit.data.formats import image_decode
    from trainkit.data.storage.image_store import Writer, content

    drawn = draw()
    prints = [content(image_decode.decode(data, "").transpose(2, 0, 1)) for data in drawn]
    crcs = [zlib.crc32(data) for data in drawn]
    with Writer(folder, size=(112, 112), store="encoded") as writer:
        for row in range(len(labels)):
            k = row % DRAWN
            about = {"id": f"record {row + 1}", "label": -1, "group": -1}
            writer.add({**about, "crc": crcs[k], "content": prints[k], "image": drawn[k]})
        writer.finish(labels=labels, class_names=[str(person) for person in range(labels[-1] + 1)])


def write_records(folder: Path, labels: np.ndarray) -> None:
    """Write the set as InsightFace does: labels in two numbers, and the ranges of people behind the images."""
    folder.mkdir()
    drawn, rows, people = draw(), len(labels), int(labels[-1]) + 1
    begins = np.searchsorted(labels, np.arange(people + 1)) + 1
    with (folder / "train.rec").open("wb") as rec, (folder / "train.idx").open("w") as idx:

        def add(key: int, first: float, second: float, data: bytes = b"") -> None:
            idx.write(f"{key}\t{rec.tell()}\n")
            length = 32 + len(data)
            rec.write(struct.pack("<IIIfQQff", MAGIC, length, 2, 0.0, key, 0, first, second) + data)
            rec.write(bytes(-length % 4))

        add(0, rows + 1, rows + 1 + people)
        for row, label in enumerate(labels.tolist()):
            add(row + 1, label, 0.0, drawn[row % DRAWN])
        for person in range(people):
            add(rows + 1 + person, begins[person], begins[person + 1])
    (folder / "property").write_text(f"{people},112,112")
    pairs = [drawn[k % DRAWN] for k in range(12_000)], [bool(k % 2) for k in range(6000)]
    (folder / "lfw.bin").write_bytes(pickle.dumps(pairs, 4))


def trainkit(home: Path) -> Any:
    """Open the packed set and look at its labels."""
    from trainkit.data.storage.image_store import Packed

    data = Packed(home / "set")
    assert data.labels[-1] == data.classes - 1
    return data


def records(home: Path) -> Any:
    """Open the `.rec` as training does, without sets to be evaluated on."""
    from trainkit.data.faces.dataset import Faces, FaceSplit
    from trainkit.data.storage.record_store import Records

    opened = Faces(train=str(home / "faces_emore")).open(0)
    assert isinstance(opened.train, FaceSplit) and isinstance(opened.train.packed, Records)
    return opened.train


def records_anew(home: Path) -> object:
    """The same without what was kept of it."""
    shutil.rmtree(home / "cache", ignore_errors=True)
    return records(home)


def first_batch(home: Path) -> object:
    """The first batch of the first epoch."""
    train = records(home)
    return train, train.fetch(train.order(0, BATCH)[0], 0)


def insightface(home: Path) -> Any:
    """A dictionary of the lines of the index, as its reader keeps one."""
    index, keys = {}, []
    with (home / "faces_emore" / "train.idx").open() as file:
        for line in iter(file.readline, ""):
            key, offset = line.strip().split("\t")
            index[int(key)] = int(offset)
            keys.append(int(key))
    return index, keys


def insightface_batch(home: Path) -> object:
    """The first batch in its way: the keys of all images, one record read and decoded after the other."""
    from PIL import Image

    index, keys = insightface(home)
    with (home / "faces_emore" / "train.rec").open("rb") as file:

        def read(key: int) -> tuple[tuple[float, ...], bytes]:
            file.seek(index[key])
            length = struct.unpack("<II", file.read(8))[1]
            data = file.read(length)
            return struct.unpack_from("<ff", data, 24), data[32:]

        chosen = (np.random.default_rng(0).permutation(int(read(0)[0][0]) - 1)[:BATCH] + 1).tolist()
        made = [np.asarray(Image.open(io.BytesIO(read(key)[1])).convert("RGB")) for key in chosen]
    return index, keys, np.stack(made)


def with_numpy(home: Path) -> object:
    """The same lines as an array."""
    return np.fromstring((home / "faces_emore" / "train.idx").read_text(), np.int64, sep=" ").reshape(-1, 2)


def reading(home: Path) -> object:
    """3,000 random images after the set was opened; pages of the file are dropped before."""
    data = trainkit(home)
    begin = _read_bytes()
    data.fetch(np.random.default_rng(0).integers(0, len(data), READ))
    print(f"  of it read from the disk for {READ:,} images: {(_read_bytes() - begin) / 1e6:,.1f} MB")
    return data


def copied(home: Path) -> object:
    """`trainkit cp` of the folder, in a process of its own, without what was kept of it."""
    shutil.rmtree(home / "cache", ignore_errors=True)
    command = Path(sys.executable).with_name("trainkit")
    with tempfile.TemporaryDirectory() as aside:
        words = ["cp", "face_teacher_ms1mv2", f"{aside}/mine.yaml", "--data", str(home / "faces_emore")]
        return subprocess.run([command, *words], check=True, stdout=subprocess.DEVNULL)


SIDES: dict[str, Callable[[Path], object]] = {
    "trainkit, opened": trainkit,
    "trainkit, opened and read": reading,
    ".rec, opened once": records_anew,
    ".rec, opened again": records,
    ".rec, first batch": first_batch,
    "InsightFace's dictionary": insightface,
    "InsightFace's first batch": insightface_batch,
    "numpy": with_numpy,
    "cp --data": copied,
}


def _of_this_process(file: str, line: str) -> int:
    """A number that Linux counts of this process, in bytes."""
    words = next(one.split() for one in Path("/proc/self", file).read_text().splitlines() if one.startswith(line))
    return int(words[1]) * (1024 if words[-1] == "kB" else 1)


def _anonymous() -> int:
    return _of_this_process("status", "RssAnon:")


def _read_bytes() -> int:
    return _of_this_process("io", "read_bytes:")


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(side: str, home: Path) -> None:
    """Print what a side takes in this process."""
    import filelock  # noqa: F401
    import torch  # noqa: F401

    import trainkit.data.faces.dataset  # noqa: F401  (imports are not what is measured)

    for file in home.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    seen, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            seen.append(_anonymous())

    before, began, used = _anonymous(), time.perf_counter(), _cpu()
    thread = threading.Thread(target=watch)
    thread.start()
    kept = SIDES[side](home)
    cpu, took, after, read = _cpu() - used, time.perf_counter() - began, _anonymous(), _read_bytes() / 1e6
    done.set()
    thread.join()
    memory, most = (after - before) / 1e6, (max(*seen, after) - before) / 1e6
    print(f"{side:28} {took:6.2f} s, {cpu:6.2f} CPU s, {memory:8.1f} MB, at most {most:8.1f}; {read:8.1f} MB read")
    del kept


def _size(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e9


def main() -> None:
    """Make the set where it is not there, and measure each side in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="?", type=int, default=ROWS)
    parser.add_argument("--home", type=Path)
    parser.add_argument("--side", choices=SIDES)
    asked = parser.parse_args()
    home = asked.home or Path(tempfile.gettempdir()) / f"trainkit-packed-faces-{asked.rows}"
    os.environ.update(TRAINKIT_CACHE=str(home / "cache"))
    if asked.side:
        measure(asked.side, home)
        return
    home.mkdir(exist_ok=True)
    labels = np.arange(asked.rows) * min(PEOPLE, asked.rows // 4) // asked.rows
    for folder, write in ((home / "set", write_packed), (home / "faces_emore", write_records)):
        if not folder.is_dir():
            began = time.perf_counter()
            write(folder, labels)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
            print(f"{folder.name}: made in {time.perf_counter() - began:,.0f} s, at most {peak:,.0f} MB in memory")
        print(f"{folder.name}: {asked.rows:,} images, {_size(folder):.2f} GB")
    for side in SIDES:
        command = [sys.executable, "-m", "benchmarks.rehearsals.packed_faces", str(asked.rows), "--home", str(home)]
        subprocess.run([*command, "--side", side], check=True)
    print(f"kept of train.rec in the cache: {_size(home / 'cache'):.2f} GB")


if __name__ == "__main__":
    main()
