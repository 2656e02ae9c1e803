"""What a process finds out about itself: how many processes its launcher was asked for, and how old it is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from runs import ROOT

from trainkit.environment import process

CODE = "from trainkit.environment.process import asked_processes; print(asked_processes())"


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (("accelerate", "launch", "--num_processes", "3"), 3),
        (("accelerate", "launch", "--num_processes=3"), 3),
        (("accelerate", "launch", "--config_file", "two.yaml"), 2),
        (("another", "launch", "--num_processes", "3"), 1),
    ],
)
def test_the_launcher_is_asked_for_so_many_processes(words, number, tmp_path):
    """Its words are read from the process above, which is here a shell with the same words."""
    (tmp_path / "two.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n", encoding="utf-8")
    command = ["bash", "-c", f'PYTHONPATH={ROOT} "{sys.executable}" -c "{CODE}"; true', *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == str(number), done.stderr


@pytest.mark.parametrize("words, number", [("launch", 2), ("launch --cpu", 1), ("launch --config-file one.yaml", 1)])
@pytest.mark.parametrize("home", ["HF_HOME", "XDG_CACHE_HOME"])
def test_the_file_of_accelerate_config_is_read_where_accelerate_reads_it(words, number, home, tmp_path):
    folder = tmp_path / ("accelerate" if home == "HF_HOME" else "huggingface/accelerate")
    folder.mkdir(parents=True)
    (folder / "default_config.yaml").write_text('{"num_processes": 2, "use_cpu": true}', encoding="utf-8")
    (tmp_path / "one.yaml").write_text("num_processes: 1\n", encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if name not in ("HF_HOME", "XDG_CACHE_HOME")}
    env |= {home: str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = ["bash", "-c", f'"{sys.executable}" -c "{CODE}"; true', "accelerate", *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.stdout.strip() == str(number), done.stderr


@pytest.fixture
def no_proc(monkeypatch):
    """A system without /proc."""
    read = Path.read_text

    def refuse(self, *rest, **more):
        if self.is_relative_to("/proc"):
            raise FileNotFoundError(2, "No such file or directory", str(self))
        return read(self, *rest, **more)

    monkeypatch.setattr(Path, "read_text", refuse)


def test_a_process_knows_its_age_where_there_is_proc(no_proc, monkeypatch):
    assert process.age() == 0.0
    monkeypatch.undo()
    assert process.age() == pytest.approx(time.time() - psutil.Process().create_time(), abs=2)


def test_of_a_parent_that_is_gone_nothing_is_known(no_proc, monkeypatch):
    monkeypatch.setattr(os, "getppid", lambda: 2**22 + 1)
    assert process._parent_arguments() == []


def test_without_prctl_a_line_says_what_is_not_done(monkeypatch):
    def refuse(name):
        raise AttributeError("prctl")

    monkeypatch.undo()
    monkeypatch.setattr(process.ctypes, "CDLL", refuse)
    assert "stop this process yourself" in (process.die_with_parent() or "")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
@pytest.mark.parametrize("variable", ["", "MALLOC_ARENA_MAX"])
def test_freed_memory_is_kept_unless_the_environment_says_otherwise(variable):
    words = """
import ctypes, resource
from trainkit.environment import process
process.keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def faults_of_one_more():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(2**26)
    libc.memset(block, 1, 2**26)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults_of_one_more()
print(faults_of_one_more())
"""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environ |= {variable: "4"} if variable else {}
    done = subprocess.run([sys.executable, "-c", words], env=environ, capture_output=True, text=True, check=True)
    assert (int(done.stdout) > 1_000) == bool(variable), "64 MB are 16,384 pages of 4 kB"
