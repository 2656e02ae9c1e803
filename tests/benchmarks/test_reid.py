"""The tables of benchmarks/reid.py: means, paired differences, pixels, and rows that are recipes."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainkit.config import loader
from trainkit.data.people.modalities import subsets, title
from trainkit.tracking.journal import Journal

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
EVERY = [title(some) for some in subsets()]


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("reid")
    for name in ("reid", "comparison"):
        sys.modules.pop(name)
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def runs(bench, tmp_path, monkeypatch):
    """Finished runs: mAP of a query of n modalities is 0.1 n plus that of the row and the seed."""

    def finished(row, seed, experiment, fits=None):
        better = 0.2 if not row.changes else 0.0
        path = tmp_path / f"{experiment}-{row.title}-{seed}.jsonl"
        if (better, seed) == (0.0, 2):
            return None  # one is missing
        if not path.exists():
            journal = Journal(path)
            before = {f"pixels/val/{name}.{score}": 0.05 for name in EVERY for score in ("map", "rank_1")}
            journal.append(0, {"pixels/val/map": 0.05, "pixels/val/rank_1": 0.06} | before)
            for step, short in ((10, 0.04), (20, 0.0)):
                scores = {"val/map": 0.3, "val/rank_1": 0.4}
                scores |= {f"val/{name}.map": 0.1 * (name.count("_") + 1) * (1 + seed / 10) for name in EVERY}
                scores |= {f"val/{name}.rank_1": 0.5 for name in EVERY}
                scores |= {f"val/modal_{n}.map": 0.1 * n for n in (1, 2, 3, 4)}
                journal.append(step, {name: value + better + seed / 100 - short for name, value in scores.items()})
            journal.append(20, {"final/speed/samples_per_s": 64.0})
            for n in (1, 2, 3, 4):
                journal.append(0, {f"pixels/val/modal_{n}.map": 0.05})
            journal.close()
        return SimpleNamespace(journal=path, name=f"{row.recipe}-s{seed}-0000")

    monkeypatch.setattr(bench.comparison, "finished", finished)
    return finished


def cells(table, title):
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {title} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_every_query_has_pixels_and_the_last_scores_of_each_row(bench, runs):
    found = bench.read(bench.rows("reid_faces"), "reid-faces")
    assert {name: len(histories) for name, histories in found.items()} == dict(zip(bench.TITLES, (2, 3), strict=True))
    table = bench.by_query(found, EVERY)
    assert len(table.splitlines()) == 2 + 15
    one = cells(table, "nir + sk")
    # Of seeds 0 and 1: 0.2 and 0.22 + 0.01; of the larger, seeds 0, 1, 2: 0.4, 0.43, 0.46.
    assert one == ["0.050", "0.050", "0.215 ± 0.021", "0.505 ± 0.007", "0.430 ± 0.030", "0.710 ± 0.010"]


def test_what_a_modality_adds_is_paired_by_seed(bench, runs):
    table = bench.added(bench.read(bench.rows("reid"), "reid"))
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == [
        "nir",
        "nir + cp",
        "nir + cp + sk",
        "nir + cp + sk + text",
    ]
    assert cells(table, "nir")[1] == cells(table, "nir")[3] == ""
    # A modality more is 0.1, 0.11 and 0.12 for the three seeds, whatever a seed has on top.
    assert cells(table, "nir + cp")[1] == "+0.105 ± 0.007" and cells(table, "nir + cp + sk")[3] == "+0.110 ± 0.010"


def test_the_larger_network_is_compared_by_its_worst_run(bench, runs):
    found = bench.read(bench.rows("reid"), "reid")
    assert "0.500, above the 0.310 of" in bench.larger(found)
    turned = dict(reversed(found.items()))
    assert "0.300, NOT above the 0.520 of" in bench.larger(turned)
    assert "nothing to compare" in bench.larger({"one": []})
    assert "seed by seed" not in bench.larger(found)  # of different numbers of seeds
    even = {name: histories[:2] for name, histories in found.items()}
    small, large = (bench.last(runs, "val/map") for runs in even.values())
    each = ", ".join(f"+{b - a:.3f}" for a, b in zip(small, large, strict=True))
    assert bench.larger(even).endswith(f"({each}).")


def test_the_command_prints_all_tables_and_trains_nothing_when_asked(bench, runs, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["reid.py", "--table"])
    bench.main()
    said = capsys.readouterr().out
    for recipe in bench.RECIPES:
        assert f"{recipe} s0-0000 s1-0000 s2-0000" in said
    assert said.count("| nir + cp + sk + text |") == 4
    assert "| pixels | 0.050 | 0.060 | 0.050 |" in said


def test_rows_are_recipes_that_load_and_differ_in_width(bench):
    for recipe in bench.RECIPES:
        digests = set()
        for row in bench.rows(recipe):
            loaded = loader.load(bench.comparison.recipe(row), row.changes)
            assert type(loaded.task).__name__ == "Reid" and loaded.task.net.model == "resnet18"
            digests.add(loader.digest(loaded))
        assert len(digests) == 2
