"""Standard output on a console of Windows."""

from __future__ import annotations

import subprocess
import sys

from runs import ROOT

CODE = """
import io, sys
from trainkit.cli import console
class _WindowsConsoleIO(io.FileIO):
    pass
sys.stdout = sys.__stdout__ = io.TextIOWrapper(io.BufferedWriter(_WindowsConsoleIO(1, "w", closefd=False)))
console.outlive_readers()
print(type(console._raw(sys.stdout)).__name__, type(console._raw(sys.stderr)).__name__)
"""


def test_a_console_that_writes_unicode_itself_is_left_alone():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["_WindowsConsoleIO", "_Enduring"], done.stderr
