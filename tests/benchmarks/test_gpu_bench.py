"""`make gpu`: rows of equality and memory on the CPU, with the device swapped; what is kept and shown of rows."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace

import pytest
import torch

from benchmarks import results
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import equality, memory, several, speed
from benchmarks.gpu.scale import Scale
from benchmarks.results import Row, Skipped

CPU = Scale(device=torch.device("cpu"), tiny=True)
TITLES = [part.TITLE for part in (equality, memory, speed, several)]
NEEDS_A_GPU = {"tests marked gpu"}


def measured(part, *begins: str) -> dict[str, Row]:
    """Rows of a part that begin with one of these words, by name."""
    every = [what for what, _, _ in part.checks(CPU)]
    left_out = [what for what in every if not what.startswith(begins)]
    found = {row.what: row for row in results.run(part.checks(CPU), left_out)}
    assert set(found) == set(every) - set(left_out) and len(set(every)) == len(every) and found
    return found


def refuse_failed(found: dict[str, Row], skipped: Collection[str] = ()) -> None:
    assert not [row for row in found.values() if row.result == "fails"]
    assert {row.what for row in found.values() if row.result == "skipped"} == set(skipped)


def test_losses_of_a_task_are_compared():
    refuse_failed(measured(equality, "classify: first losses", "tests"), NEEDS_A_GPU)


def test_another_number_or_an_error_fails_its_row_and_the_others_go_on(monkeypatch):
    drawn = iter([2.0, 2.1, None, 3.0, 3.0])  # of the device and of the CPU, the second of which raises at once

    def advance(trainer, steps):
        value = next(drawn)
        if value is None:
            raise ZeroDivisionError("division by zero")
        return [torch.tensor(value)]

    monkeypatch.setattr(equality, "advance", advance)
    checks = [check for check in equality.checks(CPU) if check[0].startswith("classify: first losses")] * 3
    found = list(results.run(checks, ()))
    assert [row.result for row in found] == ["fails", "fails", "ok"]
    assert "within 4.8e-02" in found[0].measured and found[1].measured.startswith("ZeroDivisionError")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("begin", ["classify", "embed", "adadistill", "reid", "segment2d", "segment3d"])
def test_networks_and_trainings_are_compared(begin, store):
    found = measured(equality, begin)
    refuse_failed(found, {what for what in found if "fp16" in what})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_runs_out_and_does_not_grow(store):
    found = measured(memory, "")
    refuse_failed(found)
    assert all("became" in row.measured for what, row in found.items() if "runs out" in what)


def test_a_training_whose_memory_does_not_run_out_fails_its_row(store, monkeypatch):
    monkeypatch.setattr(memory, "SPARED", (2.0,))
    held, said = memory._runs_out(CPU, "classify")
    assert not held and said == "not out of memory with 32"


# ---- What is kept and shown


def checks(*names: str, measured: str = "1", met: bool = True):
    """Checks that note when they are measured, and the note."""
    asked: list[str] = []

    def of(what: str):
        def measure():
            asked.append(what)
            return met, measured

        return what, "1", measure

    return [of(what) for what in names], asked


def test_rows_are_kept_and_measured_once_for_a_machine_and_its_code(tmp_path):
    made, asked = checks("a", "b")
    on = results.machine()
    assert results.measure("speed", made[:1], on, folder=tmp_path)[1] == ""
    for _ in range(2):
        rows, left = results.measure("speed", made, on, folder=tmp_path)
        assert [row.what for row in rows] == ["a", "b"] and not left and asked == ["a", "b"]
    for other in ({**on, "gpu": "another"}, {**on, "sources": "others"}):
        assert results.kept("speed", other, tmp_path) == []
    results.measure("speed", made, {**on, "sources": "others"}, folder=tmp_path)
    assert asked == ["a", "b"] * 2


@pytest.mark.parametrize(
    ("measured", "limit", "left"),
    [("AcceleratorError: CUDA error: device-side assert", 60, results.BROKEN), ("1", -1, "-1 s time limit")],
)
def test_a_part_ends_where_cuda_is_broken_or_its_time_is_over(tmp_path, measured, limit, left):
    made, asked = checks("a", "b", measured=measured, met=limit < 0)
    for many in (1, 2):
        rows, why = results.measure("speed", made, {}, limit=limit, folder=tmp_path)
        assert ([row.what for row in rows], why) == (["a", "b"][:many], left)
    assert results.measure("speed", made, {}, limit=limit, folder=tmp_path)[1] == "" and asked == ["a", "b"]


def test_the_page_keeps_the_parts_that_were_not_measured(tmp_path):
    page, row = tmp_path / "gpu.md", Row(what="a", expected="1 | 2", measured="1", result="ok")
    command.write({}, TITLES, page)
    assert page.read_text().count(command.NOTHING) == len(TITLES)
    lines = results.table(("quantity", "expected", "measured", "result"), {"gpu": "G", "torch": "2"}, [row])
    for title in (memory.TITLE, speed.TITLE):
        command.write({title: "\n".join([f"## {title}", "", *lines]) + "\n"}, TITLES, page)
    text = page.read_text()
    assert text.count("| a | 1 / 2 | 1 | ok |") == 2 and text.count(command.NOTHING) == len(TITLES) - 2
    assert [text.index(f"## {title}\n") for title in TITLES] == sorted(text.index(f"## {title}\n") for title in TITLES)
    command.write({}, TITLES, page)
    assert page.read_text() == text and "gpu G, torch 2; " in text and ": 1 ok." in text


def test_without_a_gpu_nothing_is_measured_and_said(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == command.main(["memory"]) == 0
    assert capsys.readouterr().out.splitlines() == ["0 tests: no GPU available, nothing measured"] * 2
    assert (
        command.main(["memroy"]) == 2 and "expected one of equality, memory, speed, claims" in capsys.readouterr().err
    )
    monkeypatch.setattr(command, "NEEDED", ("no_such_package",))
    assert command.main([]) == 2 and "no_such_package; use another one" in capsys.readouterr().err


def test_a_part_writes_its_section(tmp_path, monkeypatch, capsys):
    made, _ = checks("w", measured="m", met=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(results, "machine", lambda: {"gpu": "G"})
    for module in (equality, memory, speed, several):
        monkeypatch.setattr(module, "checks", lambda scale: iter(made))
    monkeypatch.setitem(results.measure.__kwdefaults__, "folder", tmp_path)
    monkeypatch.setattr(command.write, "__defaults__", (tmp_path / "gpu.md",))
    assert command.main(["speed"]) == 1
    text = (tmp_path / "gpu.md").read_text()
    assert text.count("| w | 1 | m | fails |") == 2 and text.count(command.NOTHING) == 2
    assert "fails    w: m (expected: 1)" in capsys.readouterr().out
    row = Row(what="w", expected="e", measured="m", result="fails")
    monkeypatch.setattr(results, "measure", lambda *asked, **more: ([row], results.BROKEN))
    begun, ran = [], []
    monkeypatch.setattr(command.os, "execv", lambda *words: begun.append(words[1][1:]))
    command.main(["memory"])
    assert begun == [["-m", "benchmarks.gpu", "memory"]]
    assert "1 fails; not complete: CUDA error." in (tmp_path / "gpu.md").read_text()

    def run(words, **more):
        ran.append(words[2:])
        return SimpleNamespace(returncode=int(words[-1] == "speed"))

    monkeypatch.setattr(command.subprocess, "run", run)
    assert command.main([]) == 1 and command.main(["claims"]) == 0
    assert ran[-1] == ["benchmarks.claims"] and len(ran) == 5


def test_what_is_missing_is_said():
    with pytest.raises(Skipped, match="no_such_package is not installed"):
        results.require("no_such_package")

    def lacking(name: str):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    checks = [(name, "", lambda name=name: lacking(name)) for name in ("scipy", "trainkit.data.absent")]
    found = [(row.result, row.measured) for row in results.run(checks, ())]
    assert found == [("skipped", "scipy is not installed"), ("fails", "No module named 'trainkit.data.absent'")]
