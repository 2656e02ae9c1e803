"""`benchmarks.gpu`, speed and several GPUs, and claims about GPUs: all that measures runs here, small and on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import contest, results
from benchmarks.gpu import several, speed
from benchmarks.gpu.scale import Scale
from benchmarks.results import Row
from trainkit.models.network_specs import IResNetSpec

TINY = Scale(device=torch.device("cpu"), tiny=True)


def measure(*begins: str) -> list[Row]:
    """Rows of speed that begin with one of these words."""
    return list(results.run((check for check in speed.checks(TINY) if check[0].startswith(begins)), ()))


# ---- Rows


def test_every_row_has_a_name_of_its_own():
    names = [what for part in (speed, several) for what, _, _ in part.checks(TINY)]
    assert len(set(names)) == len(names) == 13


def test_sides_of_a_contest_take_turns_in_the_same_way(monkeypatch):
    seen: list[str] = []

    class Process:
        def __init__(self, script, side, case, threads, folder):
            self.side, self.left = side, 4

        def go(self, seconds):
            seen.append(self.side)
            self.left -= 1
            return self.left > 0

        def ended(self, seconds):
            return contest._MARK + json.dumps({"value": 1.0, "proof": None, "more": {}, "blocks": []}), "", 0

        def kill(self):
            pass

    monkeypatch.setattr(contest, "_Process", Process)
    monkeypatch.setattr(contest, "others", lambda: 0.0)
    race = contest.Contest("Race", "us", "a", dict.fromkeys("ab", lambda case: None), turns=True)
    race.run(Path("race.py"), ["a", "b"], [""], 1)
    assert "".join(seen) == "ab" + "baabba"  # up to the first block, and then by turns


def test_the_margin_head_is_measured_beside_a_chain_of_the_same_loss():
    (found,) = measure("margin softmax")
    assert found.result == "ok" and " ms, x " in found.measured


@pytest.mark.slow
def test_a_teacher_of_fifty_layers_stays_in_bounds():
    net = speed.teacher_of(IResNetSpec(name="iresnet50", embedding=512), 112, TINY).eval()
    with torch.no_grad():
        assert net(torch.zeros(2, 3, 112, 112)).norm(dim=1).max() < 1e3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", speed.loops.SUBJECTS)
def test_loops_of_others_come_to_the_same_losses(name):
    found = measure(f"{name} bf16")
    assert len(found) == 2
    assert all(row.result == "no goal" and "first losses alike" in row.measured for row in found), found


def test_loops_with_other_losses_fail_their_rows(monkeypatch):
    monkeypatch.setattr(speed, "_contest", lambda scale, name: {"unequal": ["tiny trainkit: [1.0], not [2.0]"]})
    found = measure("iresnet50 bf16")
    assert [row.result for row in found] == ["fails"] * 2
    assert all(row.measured.startswith("RuntimeError: not the same work: tiny trainkit") for row in found)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_student_is_trained_from_cached_outputs():
    (found,) = measure("AdaDistill")
    assert found.result == "no goal" and "samples/s eager" in found.measured, found


# ---- Several GPUs


def test_several_gpus_are_asked_for_where_there_is_one(monkeypatch):
    monkeypatch.setattr(several, "processes", lambda scale: 1)
    found = list(results.run(several.checks(TINY), ()))
    assert len(found) == 5 and {row.measured for row in found} == {"needs two GPUs"}
    assert {row.result for row in found} == {"skipped"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_processes_come_to_the_losses_of_one():
    found = list(results.run(several.checks(TINY), ()))
    assert [row.result for row in found] == ["ok", "ok", "ok", "no goal", "no goal"], found
    assert "2 processes, FSDP" in found[1].measured


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_process_that_fails_is_quoted(monkeypatch):
    monkeypatch.setattr(several, "SUBJECT", "mobilefacenet")  # the processes ask for another one's recipe
    with pytest.raises(RuntimeError, match=r"ended with 1: .*Error: .*convnext_tiny"):
        several.launched(TINY, "equal", 2)
