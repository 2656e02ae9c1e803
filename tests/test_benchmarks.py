"""The speed benchmark's tables: figures are those of the journals, and unequal work is refused."""

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from trainkit.journal import Journal, read

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("eye_speed", BENCHMARKS / "eye_speed.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["eye_speed"] = module
    spec.loader.exec_module(module)
    yield module
    for name in ("eye_speed", "comparison"):
        sys.modules.pop(name)
    sys.path.remove(str(BENCHMARKS))


def note(title="ConvNeXt, FP32", **changes):
    machine = {"device": "cpu", "gpu": None, "cpu": "a CPU", "cpu_cores": 2, "threads": 1, "precision": "no"}
    return {
        "title": title,
        "run": "eye_state-s0",
        "began": 0.0,
        "load": [0.5, 1.5],
        "peak_resident_gb": 0.75,
        "commit": "abc1234",
        "data": "d" * 64,
        "machine": machine,
        "versions": {"torch": "2.14.1"},
        **changes,
    }


def written(path, monkeypatch, step_s=(0.9, 0.2, 0.2, 0.4), between=0.05, scored=800, gpu_gb=None):
    """A journal of log lines every 10 updates of 64 samples, 37 to an epoch; 100 s of evaluation at updates 20 and 40.

    `step_s`: seconds of a step in each window; `between`: seconds of each window outside steps.
    """
    monkeypatch.setattr("trainkit.journal.time.time_ns", lambda: int(now * 1e9))
    now = 1000.0
    journal = Journal(path)
    for i, seconds in enumerate(step_s, 1):
        now += 10 * seconds + between
        line = {
            "train/epoch": 10 * i / 37,
            "speed/samples_per_s": 64 / seconds,
            "speed/steps_per_s": 1 / seconds,
            "speed/step_ms_p50": 1e3 * seconds,
        }
        if gpu_gb is not None:
            line["speed/peak_memory_gb"] = gpu_gb
        journal.append(10 * i, line)
        if i in (2, 4):
            now += 100
            journal.append(10 * i, {"val/ema/f1": 0.1 * i, "eval/val/unique_samples": scored})
    journal.close()
    return read(path)


@pytest.fixture
def run(bench, tmp_path, monkeypatch):
    def make(name="a", noted=None, **changes):
        return bench.measure(written(tmp_path / f"{name}.jsonl", monkeypatch, **changes), noted or note())

    return make


def cells(table, title):
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {title} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_rates_leave_out_the_window_that_warms_up_and_weigh_the_others_by_their_time(run):
    measured = run()
    assert measured.step_s == pytest.approx((0.2 + 0.2 + 0.4) / 3)
    assert measured.rate == pytest.approx(64 * 30 / (2 + 2 + 4))
    assert run("b", step_s=(0.1, 0.3, 0.2, 0.4)).step_least_s == pytest.approx(0.2)
    assert measured.epoch_s == pytest.approx(37 * 64 / measured.rate)
    assert (measured.updates, measured.batch, measured.per_epoch) == (40, 64, 37)
    assert measured.scored == {"val": 800}


def test_wall_clock_is_of_the_windows_without_an_evaluation_and_has_what_lies_between_steps(run):
    # Of windows 10-20, 20-30 and 30-40 the middle one holds the evaluation of update 20, a hundred seconds of it.
    assert run().wall_s == pytest.approx((10 * 0.2 + 0.05 + 10 * 0.4 + 0.05) / 20, abs=1e-3)


def test_a_run_without_a_window_free_of_evaluations_is_refused(bench, tmp_path):
    journal = Journal(tmp_path / "full.jsonl")
    for step in (10, 20, 30):
        line = {"train/epoch": step / 37, "speed/samples_per_s": 64.0, "speed/steps_per_s": 1.0}
        journal.append(step, {**line, "speed/step_ms_p50": 1e3})
        journal.append(step, {"eval/val/unique_samples": 800})
    journal.close()
    with pytest.raises(ValueError, match="log more often"):
        bench.measure(read(tmp_path / "full.jsonl"), note())
    with pytest.raises(ValueError, match="0 log lines"):
        bench.measure(type(read(tmp_path / "full.jsonl"))(), note())


def test_memory_is_the_devices_on_a_gpu_and_the_processs_on_a_cpu(run):
    assert run("cpu").memory_gb == 0.75
    assert run("gpu", gpu_gb=2.5).memory_gb == 2.5


def test_the_table_has_median_range_and_paired_ratio_of_each_row(bench, run):
    runs = {}
    # The machine is twice as slow for seed 1 and four times for seed 2; AMP takes half the time of its own seed's FP32.
    for seed, slow in enumerate((1, 2, 4)):
        for title, share in (("ConvNeXt, FP32", 1), ("ConvNeXt, AMP bf16", 0.5)):
            noted = note(title, run=f"eye_state-s{seed}", began=seed, load=[seed, seed + 0.5])
            runs[title, seed] = run(f"{title}{seed}", noted, step_s=[0.1 * slow * share] * 4)
    table = bench.table(runs)
    plain, amp = cells(table, "ConvNeXt, FP32"), cells(table, "ConvNeXt, AMP bf16")
    assert plain[0] == "7.40 (3.70-14.80)" and amp[0] == "3.70 (1.85-7.40)"
    assert plain[2] == "320 (160-640)" and amp[4] == "2.00 (2.00-2.00)"
    assert plain[3] == "320 (160-640)" and plain[5] == "0.75 (0.75-0.75)" and plain[6] == "0.400 (0.400-0.400)"
    assert amp[-1] == "s0 s1 s2"
    assert "Slower" not in table and "40 updates of 2560 samples" in table and "val 800" in table
    assert "load average 0.0 at the start, 2.5 at the end" in table
    assert len(cells(bench.table(runs, ()), "ConvNeXt, FP32")) == len(plain) - 1


@pytest.mark.parametrize(
    ("changes", "noted", "named"),
    [
        ({"step_s": (0.2,) * 5}, {}, "updates"),
        ({"scored": 799}, {}, "scored"),
        ({}, {"data": "e" * 64}, "data"),
        ({}, {"versions": {"torch": "2.13.0"}}, "torch"),
        ({}, {"machine": {**note()["machine"], "threads": 2}}, "threads"),
    ],
)
def test_unequal_work_is_refused_by_name(bench, run, changes, noted, named):
    runs = {("ConvNeXt, FP32", 0): run("a"), ("baseline, FP32", 0): run("b")}
    assert "baseline" in bench.table(runs)
    runs["baseline, FP32", 0] = run("c", note("baseline, FP32", **noted), **changes)
    with pytest.raises(ValueError, match=f"unequal work: {named} .*baseline, FP32, seed 0"):
        bench.table(runs)


def test_rows_with_other_seeds_are_refused(bench, run):
    with pytest.raises(ValueError, match="not the same seeds"):
        bench.table({("ConvNeXt, FP32", 0): run("a"), ("baseline, FP32", 1): run("b")})


def test_amp_that_is_slower_is_said_to_be(bench, run):
    half = note("ConvNeXt, AMP bf16", machine={**note()["machine"], "precision": "bf16"})
    runs = {("ConvNeXt, FP32", 0): run("a"), ("ConvNeXt, AMP bf16", 0): run("b", half, step_s=[1.0] * 4)}
    assert bench.table(runs).endswith("Slower than FP32 here: ConvNeXt, AMP bf16.")


def test_precision_alone_may_differ(bench, run):
    half = note("ConvNeXt, AMP bf16", machine={**note()["machine"], "precision": "bf16"})
    assert "AMP" in bench.table({("ConvNeXt, FP32", 0): run("a"), ("ConvNeXt, AMP bf16", 0): run("b", half)})


def gates(run, extra):
    """Five pairs on a machine whose pace differs from pair to pair; the gate costs `extra` seconds a step."""
    runs = {}
    for seed, (pace, jitter) in enumerate([(0.1, 1e-4), (0.2, -2e-4), (0.15, 1e-4), (0.1, -1e-4), (0.3, 1e-4)]):
        for title, more in (("without", 0), ("with", extra + jitter)):
            runs[title, seed] = run(f"{title}{seed}{extra}", note(title, began=seed), step_s=[pace + more] * 4)
    return runs


def test_a_gate_that_costs_nothing_is_within_noise_and_one_that_costs_is_not(bench, run):
    asking = {"without": 40.0, "with": 41.0}
    free, dear = bench.gate_table(gates(run, 0), asking), bench.gate_table(gates(run, 0.01), asking)
    assert "Differences are within noise" in free and cells(free, "difference")[-1] == "+1"
    assert "NOT within noise in step, ms; median step, ms; in the fastest window, ms; wall-clock" in dear
    assert float(cells(dear, "difference")[0].split(" ")[0]) == pytest.approx(10, abs=0.05)


def test_a_gate_that_opened_is_refused(bench, run):
    runs = gates(run, 0)
    runs["with", 2] = replace(runs["with", 2], scored={"val": 800, "separation": 800})
    with pytest.raises(ValueError, match=r"unequal work: scored .*with, seed 2"):
        bench.gate_table(runs, {"without": 40.0, "with": 40.0})


def test_the_interval_is_students(bench):
    from scipy import stats

    values = [0.3, -0.1, 0.25, 0.0, 0.6]
    low, high = stats.t.interval(0.95, 4, loc=sum(values) / 5, scale=stats.sem(values))
    mean, half = bench.interval(values)
    assert (mean - half, mean + half) == pytest.approx((low, high), abs=1e-3)
    for pairs, t in enumerate(bench.T_95, 2):
        assert t == pytest.approx(stats.t.ppf(0.975, pairs - 1), abs=1e-3)


def test_asking_whether_something_is_due_takes_no_longer_with_more_gates(bench):
    few, many = bench.asking(["val"]), bench.asking([f"set{i}" for i in range(200)])
    assert many < 5 * few  # a loop over 200 gates would be a hundred times as long


def test_every_row_is_a_recipe_that_loads(bench):
    from trainkit import config

    digests = set()
    for changes in ((), bench.SHORT, bench.GATED, (*bench.GATED[:-1], bench.NOT_DUE)):
        for row in bench.rows(["no", "bf16"], 64, changes):
            loaded = config.load(bench.comparison.ROOT / "recipes" / f"{row.recipe}.yaml", row.changes)
            assert loaded.task.net.base_channels == 64 and loaded.task.net.name in row.changes[0]
            digests.add(config.digest(loaded))
    assert len(digests) == 4 * 4


@pytest.mark.slow
def test_the_command_trains_its_rows_and_finds_them_again(tmp_path):
    words = [sys.executable, str(BENCHMARKS / "eye_speed.py"), "--quick", "--repeats", "1", "--precisions", "no"]
    env = {**os.environ, "TRAINKIT_STORE": str(tmp_path / "store"), "ACCELERATE_USE_CPU": "true"}
    first = subprocess.run(words, capture_output=True, text=True, env=env, timeout=280)
    assert first.returncode == 0, first.stderr
    again = subprocess.run(words, capture_output=True, text=True, env=env, timeout=60)
    assert "== " not in again.stdout and again.stdout.strip() in first.stdout
    for title in ("ConvNeXt, FP32", "baseline, FP32"):
        row = cells(again.stdout, title)
        assert float(row[2]) > 0 and 0.2 < float(row[5]) < 8
        # Wall-clock has the steps in it, and little else.
        assert 0.95 * float(row[0]) < float(row[1]) < 2 * float(row[0])
    assert re.search(r"load average [\d.]+ at the start", again.stdout)
