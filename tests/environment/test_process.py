"""What a process finds out about itself: how many processes its launcher was asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest
from runs import ROOT

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
