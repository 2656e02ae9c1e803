"""Sets that are packed at the first use: what is shown meanwhile, and what is left of a packing that was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import filelock
import pytest
from PIL import Image

from trainkit import terminal
from trainkit.data import image_folder, import_images


@pytest.fixture
def images(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    for label in ("ant", "bee"):
        (tmp_path / "set" / label).mkdir(parents=True)
        for k in range(3):
            Image.new("RGB", (8, 8), (40 * k, 90, 20)).save(tmp_path / "set" / label / f"{k}.png")
    return tmp_path / "set"


def half_made(tmp_path):
    return {path.name for path in (tmp_path / "cache").glob(".*.partial-*")}


KILLED = """
import sys, time
from pathlib import Path
from trainkit.data import image_folder
from trainkit.data.storage import image_store; from trainkit.data import import_images

add = image_store.Writer.add

def slow(self, *args):
    add(self, *args)
    print("added", flush=True)
    time.sleep(100)

image_store.Writer.add = slow
import_images.pack_once(image_folder.open_folder(Path(sys.argv[1])), (8, 8))
"""


def test_what_a_killed_packing_left_is_removed_by_the_next(images, tmp_path):
    with subprocess.Popen([sys.executable, "-c", KILLED, str(images)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"added\n"
        process.send_signal(signal.SIGKILL)
    assert len(half_made(tmp_path)) == 1
    assert len(import_images.pack_once(image_folder.open_folder(images), (8, 8))) == 6
    assert not half_made(tmp_path)


def test_of_other_sets_only_what_no_process_is_writing_is_removed(images, tmp_path):
    for name in ("busy", "abandoned"):
        (tmp_path / "cache" / f".{name}.partial-1").mkdir(parents=True)
    with filelock.FileLock(tmp_path / "cache" / "busy.lock"):
        import_images.pack_once(image_folder.open_folder(images), (8, 8))
        assert half_made(tmp_path) == {".busy.partial-1"}


def test_outside_a_terminal_progress_is_a_line_now_and_then(monkeypatch, capsys):
    now = iter((0.0, 1.9, 2.0, 31.0, 32.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    with terminal.bar("packing set", "image") as on_progress:
        for done in (10, 20, 155, 160):
            on_progress(done, 200)
    said = capsys.readouterr().err.splitlines()
    assert said == ["packing set: 20 of 200 images, 18 s left", "packing set: 160 of 200 images, 8 s left"]


def test_packing_is_counted(images, monkeypatch):
    counted = []
    monkeypatch.setattr(terminal._Lines, "on_progress", lambda self, *count: counted.append((self.what, *count)))
    import_images.pack_once(image_folder.open_folder(images), (8, 8))
    assert counted == [(f"packing {images}", done, 6) for done in range(1, 7)]
