"""Faces of MS1MV2's counts: 5,822,653 images of 85,742 people in InsightFace's files, opened, trained on and stored.

    python -m benchmarks.rehearsals.faces --scale 0.01|0.1|1 [--home FOLDER] [--only SIDE ...]

Tiny JPEG files (1 kB each) in `train.rec`, `train.idx`, `property` and six `.bin` sets. Beside trainkit InsightFace's
way: a dictionary of the lines of `train.idx`, records decoded one by one. Trainings are of `face_teacher_ms1mv2` with
all its classes and a small network: one from start to end, one ended by SIGKILL and resumed, whose last bits are
compared. Teacher outputs are 512 numbers of both views of each image, of a network that costs next to nothing: stopped
halfway, gone on with, hashed and read. Processes that start import, then open the set at the same time; when all have
it, the shares of memory (PSS) that they have more than before are summed: pages that all map count once.
"""

from __future__ import annotations

import io
import multiprocessing
import pickle
import shutil
import struct
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.rehearsals import measuring
from benchmarks.rehearsals.measuring import ROOT, Found, memory, once, pictures, size_of, train, trained

if TYPE_CHECKING:
    from trainkit.data.faces.dataset import FaceSplit

ROWS, PEOPLE, DRAWN, BATCH = 5_822_653, 85_742, 256, 128
PAIRS = {"lfw": 6000, "cfp_fp": 7000, "cfp_ff": 7000, "agedb_30": 6000, "calfw": 6000, "cplfw": 6000}
MAGIC = 0xCED7230A


def write_records(scale: float, folder: Path) -> None:
    """Write the set as InsightFace does: labels in two numbers, and the ranges of people behind the images."""
    rows = int(ROWS * scale)
    drawn, people = pictures(DRAWN, 112), min(PEOPLE, rows // 4)
    labels = np.arange(rows) * people // rows
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


def write_pairs(scale: float, folder: Path) -> None:
    drawn = pictures(DRAWN, 100)
    for name, pairs in PAIRS.items():
        many = max(60, int(pairs * scale) // 2 * 2)
        listed = [drawn[k % DRAWN] for k in range(2 * many)], [bool(k % 2) for k in range(many)]
        (folder / f"{name}.bin").write_bytes(pickle.dumps(listed, 4))


def make(home: Path, scale: float) -> None:
    once(home / "faces_emore", partial(write_records, scale))
    once(home / "pairs", partial(write_pairs, scale))


def split_of(home: Path) -> FaceSplit:
    """Open the `.rec` as training does, without sets to be evaluated on."""
    from trainkit.data.faces.dataset import Faces, FaceSplit
    from trainkit.data.storage import image_store

    image_store.DECODED_LIMIT = 0  # of any size it is read as one of gigabytes
    found = Faces(train=str(home / "faces_emore")).open(0).train
    if not isinstance(found, FaceSplit):
        raise TypeError(type(found).__name__)
    return found


def opened(home: Path, scale: float, first: bool = False) -> Found:
    for file in (home / "cache").glob("recordio-*") if first else ():
        file.unlink()
    split = split_of(home)
    return Found(f"{split.size:,} images, {len(split.names):,} people", size_of(home / "faces_emore"), split)


def first_batch(home: Path, scale: float) -> Found:
    split = split_of(home)
    return Found(f"{BATCH} images", 0, (split, split.fetch(split.order(0, BATCH)[0, 0:BATCH], 0)))


def dictionary(home: Path, scale: float) -> Found:
    index, keys = {}, []
    with (home / "faces_emore" / "train.idx").open() as file:
        for line in iter(file.readline, ""):
            key, offset = line.strip().split("\t")
            index[int(key)] = int(offset)
            keys.append(int(key))
    return Found(f"{len(keys):,} records", 0, (index, keys))


def dictionary_batch(home: Path, scale: float) -> Found:
    from PIL import Image

    kept: Any = dictionary(home, scale).kept
    with (home / "faces_emore" / "train.rec").open("rb") as file:

        def read(key: int) -> tuple[tuple[float, ...], bytes]:
            file.seek(kept[0][key])
            data = file.read(struct.unpack("<II", file.read(8))[1])
            return struct.unpack_from("<ff", data, 24), data[32:]

        chosen = (np.random.default_rng(0).permutation(int(read(0)[0][0]) - 1)[:BATCH] + 1).tolist()
        made = [np.asarray(Image.open(io.BytesIO(read(key)[1])).convert("RGB")) for key in chosen]
    return Found(f"{BATCH} images", 0, (kept, np.stack(made)))


def packed(home: Path, scale: float) -> Found:
    from trainkit.data.import_images import import_faces

    shutil.rmtree(home / "packed", ignore_errors=True)
    return Found(
        f"{import_faces(home / 'faces_emore', home / 'packed', store='encoded').rows:,} images",
        size_of(home / "packed"),
    )


def _words(home: Path, scale: float) -> list[str]:
    steps = max(20, int(200 * scale))
    sets = ", ".join(f"{name}: {home}/pairs/{name}.bin" for name in PAIRS)
    return [
        "recipes/face_teacher_ms1mv2.yaml", f"data.train={home}/faces_emore", f"data.evaluate={{{sets}}}",
        "task.net={name: iresnet18, embedding: 16, width: 0.125}", "evaluations={lfw: {}}", "loader={workers: 0}",
        f"train={{length: {steps} steps, batch_size: 64}}", f"checkpoints={{every: {steps // 4} steps}}",
    ]  # fmt: skip


def whole(home: Path, scale: float) -> Found:
    trained(*_words(home, scale), store=home / "whole")
    return Found(f"{_last(home / 'whole')[0]} steps of 64, imports included", size_of(home / "whole"))


def resumed(home: Path, scale: float) -> Found:
    store = home / "killed"
    first = train(*_words(home, scale), store=store)
    while first.poll() is None and len(list(store.glob("runs/*/checkpoints/step*"))) < 2:
        time.sleep(0.2)
    first.kill()
    if (code := first.wait()) != -9:
        raise SystemExit(f"the training ended with {code} before it was killed")
    killed, began = _last(store)[0], time.perf_counter()
    trained(*_words(home, scale), "--resume", store=store)
    (step, state), (other, expected) = _last(store), _last(home / "whole")
    same = step == other and all(np.array_equal(state[name], expected[name]) for name in {*state, *expected})
    said = "the bits of" if same else "OTHER BITS THAN"
    return Found(f"from step {killed} in {time.perf_counter() - began:.0f} s, {said} the whole run", size_of(store))


def _last(store: Path) -> tuple[int, dict[str, np.ndarray]]:
    """Return the step and the tensors of the last checkpoint of the one run of a store."""
    from safetensors.numpy import load_file

    from trainkit.checkpoint import storage

    (checkpoints,) = store.glob("runs/*/checkpoints")
    path, _ = storage.newest_valid(checkpoints)
    if path is None:
        raise SystemExit(f"no checkpoint in {checkpoints}")
    read = ((file.name, load_file(file)) for file in path.glob("*.safetensors"))
    return storage.read(path).step, {f"{file} {name}": one for file, some in read for name, one in some.items()}


def _outputs(home: Path, stopping: Callable[[], bool]) -> Any:
    import torch

    from trainkit.config.run_request import RunRequest, load
    from trainkit.distributed.runtime import Runtime
    from trainkit.interfaces import Networks
    from trainkit.training import teacher_cache

    torch.manual_seed(0)
    teacher = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(8), torch.nn.Flatten(), torch.nn.Linear(192, 512)).eval()
    one, quiet = {"teacher": teacher}, SimpleNamespace(say=lambda text: None)
    networks = Networks(torch.nn.Identity(), frozen=one, cached=one, cache_on_disk=True)
    runtime = Runtime(load(RunRequest(ROOT / "recipes" / "face_teacher.yaml")))
    return teacher_cache.outputs(networks, split_of(home), runtime, quiet, home / "outputs", stopping)  # type: ignore


def outputs_made(home: Path, scale: float) -> Found:
    shutil.rmtree(home / "outputs", ignore_errors=True)
    halfway = iter(range(int(ROWS * scale) // 64 // 2))
    if _outputs(home, lambda: next(halfway, None) is None) is not None:
        raise SystemExit("was not stopped")
    split = _outputs(home, lambda: False)
    return Found(f"{split.size:,} x {split.views} x 512 halves", size_of(home / "outputs"), split)


def outputs_read(home: Path, scale: float) -> Found:
    split = _outputs(home, lambda: False)
    rows = split.order(0, BATCH)
    for batch in range(min(100, len(rows))):
        split.fetch(rows[batch, 0:BATCH], 0)
    return Found("hashed, 100 batches read", size_of(home / "outputs"), split)


def _one(open_set: Callable[[Path, float], Found], home: Path, scale: float, together: Barrier) -> tuple[float, ...]:
    """Seconds until the set is open, CPU seconds, and bytes: PSS and anonymous, beyond those of the imports."""
    import torch  # noqa: F401

    import trainkit.data.faces.dataset  # noqa: F401

    together.wait(600)
    used, began, before = time.process_time(), time.perf_counter(), memory("self")
    together.wait(600)
    found = open_set(home, scale)
    took, cpu = time.perf_counter() - began, time.process_time() - used
    together.wait(600)
    after = memory("self")
    together.wait(600)
    del found
    return took, cpu, *(b - a for a, b in zip(before, after, strict=True))


def start(open_set: Callable[[Path, float], Found], processes: int, home: Path, scale: float) -> Found:
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(processes) as pool:
        together = manager.Barrier(processes)
        jobs = [pool.apply_async(_one, (open_set, home, scale, together)) for _ in range(processes)]
        took, cpu, shared, own = zip(*(job.get() for job in jobs), strict=True)
    each = f"PSS {sum(shared) / 1e6:,.0f} MB in all, anonymous {max(own) / 1e6:,.0f} MB each at most"
    return Found(f"open after {max(took):.1f} s, {sum(cpu):.1f} CPU s in all; {each}")


SIDES: measuring.Sides = {
    ".rec, opened once": ("one pass over the file", partial(opened, first=True)),
    ".rec, opened again": ("checks of numbers", opened),
    ".rec, first batch": ("import of the decoder", first_batch),
    "InsightFace's first batch": ("Python objects", dictionary_batch),
    "packing the .rec": ("decoding by Pillow", packed),
    "training on the .rec": ("forward, backward", whole),
    "killed by SIGKILL, resumed": ("forward, backward", resumed),
    "teacher outputs, computed": ("decoding", outputs_made),
    "teacher outputs, read": ("hashing", outputs_read),
    "first start of 4 processes": ("one pass over the file", partial(start, partial(opened, first=True), 4)),
    **{f"start of {many} processes": ("checks of numbers", partial(start, opened, many)) for many in (1, 2, 4, 8)},
    "InsightFace's dictionary in 2 processes": ("Python objects", partial(start, dictionary, 2)),
}

if __name__ == "__main__":
    measuring.main(__doc__, "faces", make, SIDES)
