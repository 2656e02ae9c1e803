"""No file takes more memory or time than its size gives it a right to: refused before anything is allocated."""

from __future__ import annotations

import json
import os
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import freed_memory
import pytest
from decompression_bombs import BOMBS
from PIL import Image

from trainkit.data.formats import image_decode
from trainkit.errors import UserError

MEMORY = 256 << 20
"""Bytes that reading a file may add to those of the process."""
SECONDS = 2.0
"""Of processor time: the longest takes 0.5 to 0.6 s of a small process here, and 1.1 s of a fork of the tests."""
READ_IN_FULL = {
    "InsightFace .bin of one image 300,000 times", "JPEG with Exif that claims 4 GB",
}  # fmt: skip
"""These are sound: what they hold is as much as it should be."""


def measured(door: Callable[[Path], Any], path: Path) -> tuple[str, int, float]:
    """What came of reading a file, the bytes it took at most, and its seconds of processor time, in a fork."""
    told, say = os.pipe()
    freed_memory.give_back()
    child = os.fork()
    if not child:
        code = 1
        try:
            # So that a reader which would take all the memory there is ends with an error.
            resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
            room = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (3 << 30)
            resource.setrlimit(resource.RLIMIT_AS, (room, room))
            before, began = peak(), time.process_time()
            try:
                door(path)
                end = "read"
            except UserError as error:
                end = f"refused: {error}"
            except BaseException as error:
                end = f"{type(error).__name__}: {error}"[:300]
            os.write(say, json.dumps([end[:2000], peak() - before, time.process_time() - began]).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(say)
    with open(told, "rb") as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return tuple(json.loads(text)) if text else ("died", 0, 0.0)


def peak() -> int:
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory) -> None:
    """What readers import when they are first used, they have imported."""
    import nibabel  # noqa: F401
    import pyarrow.csv
    import pyarrow.parquet  # noqa: F401

    Image.init()
    folder = tmp_path_factory.mktemp("small")
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    image_decode.decode((folder / "a.png").read_bytes(), "")


FIRST = {door: name for name, (_, door) in reversed(BOMBS.items())}
"""A bomb of each reader."""
OTHERS = [name for name in BOMBS if name not in FIRST.values()]


@pytest.mark.parametrize(
    "names", [[*FIRST.values()], pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["first", "others"]
)
def test_small_files_that_claim_much_are_refused_before_it_is_allocated(names, tmp_path):
    for name in names:
        make, door = BOMBS[name]
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        path = make(folder)
        end, memory, seconds = measured(door, path)
        print(f"{name}: {end[:100]}; {memory >> 20} MB, {seconds:.2f} s")
        assert end.startswith("read" if name in READ_IN_FULL else "refused: "), end
        assert memory < MEMORY and seconds < SECONDS, (memory, seconds)
        assert str(folder) in end or end == "read"


@pytest.mark.slow
def test_without_the_limit_of_pixels_memory_is_taken_for_them(monkeypatch, tmp_path):
    """The negative control: the oracle sees it where an image is read whose header says too much."""
    make, door = BOMBS["PNG of 10,000 x 10,000 in 12 KB"]
    path = make(tmp_path)
    assert measured(door, path)[1] < MEMORY
    monkeypatch.setattr(image_decode, "PIXEL_CAP", 1 << 40)
    end, memory, _ = measured(door, path)
    assert memory > MEMORY, end
