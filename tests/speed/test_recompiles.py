"""Recompiles and graph breaks of torch.compile: counted, with the reason and with what to change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch import nn

from trainkit.speed.evidence import Compiled
from trainkit.speed.recompiles import Recompiles, advice


class Net(nn.Module):
    def __init__(self, breaks: bool = False):
        super().__init__()
        self.layer, self.breaks, self.factor = nn.Linear(3, 3), breaks, 1.0

    def forward(self, x):
        x = self.layer(x) * self.factor
        if self.breaks:
            print("broken")
        return x.relu()


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(**settings) -> Net:
    net = Net(**settings)
    net.compile(backend="eager", dynamic=False)
    return net


def test_a_recompile_each_step_is_counted_with_its_reason():
    watch, net = Recompiles(), compiled()
    net(torch.ones(9, 3)).sum().backward()
    watch.mark()
    for rows in range(1, 5):
        net(torch.ones(rows, 3)).sum().backward()
    found = watch.since()
    assert found.recompiles == 4 and found.graph_breaks == 0 and 0 < found.seconds < 60
    assert all("size mismatch" in reason for reason in found.reasons)
    assert "recompiled the model 4 times" in advice(found) and "size mismatch" in advice(found)


def test_what_was_compiled_in_the_warm_up_is_no_recompile():
    watch, net = Recompiles(), compiled()
    for rows in (4, 5):
        net(torch.ones(rows, 3))
    watch.mark()
    for rows in (4, 5, 4):
        net(torch.ones(rows, 3))
    assert watch.since() == Compiled() and advice(watch.since()) == ""


def test_a_graph_break_is_one_line_however_often_it_is_compiled(capsys):
    watch, net = Recompiles(), compiled(breaks=True)
    net(torch.ones(4, 3))
    watch.mark()
    net(torch.ones(5, 3))
    found = watch.since()
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if 'print("broken")' in text)
    assert found.graph_breaks == 1 and found.recompiles == 2  # before the break and behind it
    assert len(found.breaks) == 1 and f"{__file__}:{line}: " in found.breaks[0] and found.breaks[0] in advice(found)


def test_breaks_of_before_are_not_counted():
    net = compiled(breaks=True)
    net(torch.ones(4, 3))
    assert Recompiles().since().graph_breaks == 0


@torch._dynamo.config.patch(recompile_limit=2)
def test_what_torch_gives_up_on_is_counted_and_a_number_that_changes_is_named():
    watch, net = Recompiles(), compiled()
    net(torch.ones(9, 3))
    watch.mark()
    for factor in (2.0, 3.0, 4.0):
        net.factor = factor
        net(torch.ones(9, 3))
    found = watch.since()
    assert found.recompiles >= 2 and any("factor" in reason for reason in found.reasons)


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=200)
def test_more_compilations_than_torch_remembers_by_itself_are_counted():
    watch, net = Recompiles(), compiled()
    net(torch.ones(100, 3))
    watch.mark()
    for rows in range(1, 71):
        net(torch.ones(rows, 3))
    assert watch.since().recompiles == 70


def test_without_the_compiler_there_is_nothing_to_say(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils")
    watch = Recompiles()
    watch.mark()
    assert watch.since() is None and advice(watch.since()) == ""


@pytest.mark.slow
def test_where_nothing_compiles_the_compiler_is_not_imported():
    code = (
        "import sys, torch; from trainkit.speed.recompiles import Recompiles, advice\n"
        "r = Recompiles(); torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward(); r.mark()\n"
        "assert r.since() is None and advice(r.since()) == '', r.since()\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[2])
