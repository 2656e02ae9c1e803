"""The tables of speed benchmarks: figures are those of the journals, and unequal work is refused."""

import importlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainkit.config import loader
from trainkit.tracking.journal import Journal, read

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def modules():
    """The benchmarks eye_speed, volume_switches and segment_switches."""
    names = ("eye_speed", "volume_switches", "segment_switches")
    sys.path.insert(0, str(BENCHMARKS))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    for name in (*names, "switches", "speeds", "comparison"):
        sys.modules.pop(name)
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def bench(modules):
    return modules.eye_speed


@pytest.fixture(scope="module")
def switches(modules):
    return modules.volume_switches


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


def written(path, monkeypatch, step_s=(0.9, 0.2, 0.2, 0.4), between=0.05, scored=800, gpu_gb=None, waited=None):
    """A journal of log lines every 10 updates of 64 samples, 37 to an epoch; 100 s of evaluation at updates 20 and 40.

    `step_s`: seconds of a step in each window; `between`: seconds of each window outside steps;
    `waited`: share of the steps in which the loop waited for data, in the first window all of it.
    """
    monkeypatch.setattr("trainkit.tracking.journal.time.time_ns", lambda: int(now * 1e9))
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
        if waited is not None:
            part = 1.0 if i == 1 else waited
            shares = {"data": part, "transfer": 0.0, "compute": 1 - part, "eval": 0.0}
            line |= {f"time/{phase}_share": 0.8 * share for phase, share in shares.items()}
        journal.append(10 * i, line)
        if i in (2, 4):
            now += 100
            counted = {"eval/val/unique_samples": scored, "time/eval_val_s": 25.0 * i}
            journal.append(10 * i, {"val/ema/f1": 0.1 * i, **counted})
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
    assert "Slower" not in table and "40 steps on 2560 samples" in table and "val 800" in table
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


def test_asking_whether_something_is_due_takes_no_longer_with_more_gates(bench):
    # The quickest of some: others may work meanwhile.
    few = min(bench.asking(["val"]) for _ in range(5))
    many = min(bench.asking([f"set{i}" for i in range(200)]) for _ in range(5))
    assert many < 5 * few  # a loop over 200 gates would be a hundred times as long


def test_every_row_is_a_recipe_that_loads(bench):
    digests = set()
    for changes in ((), bench.SHORT, bench.GATED, (*bench.GATED[:-1], bench.NOT_DUE)):
        for row in bench.rows(["no", "bf16"], 64, changes):
            loaded = loader.load(bench.speeds.comparison.recipe(row), row.changes)
            assert loaded.task.net.base_channels == 64 and loaded.task.net.name in row.changes[0]
            digests.add(loader.digest(loaded))
    assert len(digests) == 4 * 4


# ---- benchmarks/switches.py, volume_switches.py and segment_switches.py

CPU, GPU = ["no", "bf16"], ["no", "fp16", "bf16"]


@pytest.fixture(scope="module", params=["volume_switches", "segment_switches"])
def either(modules, request):
    """Each of the two tables of switches."""
    return getattr(modules, request.param)


def test_an_evaluation_is_spread_over_the_samples_and_readiness_is_from_the_start_of_the_run(run):
    measured = run(noted=note(began=990.0))
    assert measured.held_s == {"val": (50.0, 100.0)}
    assert measured.sample_s == pytest.approx((measured.wall_s + 150 / 40) / 64)
    assert measured.ready_s == pytest.approx(10 + 10 * 0.9 + 0.05)


@pytest.mark.parametrize("precisions", [CPU, GPU, ["no", "fp16"]])
def test_every_switch_is_another_recipe_that_loads_and_takes_as_many_samples(either, precisions):
    seen, samples = [], either.STUDY.samples[0] * 2
    for switch in either.switches(samples, precisions):
        row = either.STUDY.row(switch, samples)
        loaded = loader.load(either.shared.speeds.comparison.recipe(row), row.changes)
        assert loaded.train.length.steps(160, loaded.train.batch_size) * loaded.train.batch_size == samples
        assert (switch.title == either.SHIPPED) == (not switch.changes) == (not switch.promised)
        if switch.title == either.SHIPPED:
            assert loaded.train.batch_size == either.STUDY.batch
        what = loader.digest(loaded), loaded.loader
        assert what not in seen
        seen.append(what)
    assert len(seen) > 15


@pytest.mark.parametrize("device", [0, 1])
def test_evaluations_are_held_as_often_as_a_row_says_and_lines_between_them_are_left(either, device):
    from trainkit.config.units import Gate

    samples, largest = either.STUDY.samples[device], 0
    for switch in either.switches(samples, GPU):
        row = either.STUDY.row(switch, samples)
        loaded = loader.load(either.shared.speeds.comparison.recipe(row), row.changes)
        batch = loaded.train.batch_size
        if not switch.title.startswith("profile"):  # listed where samples fill lines of 128 too
            largest = max(largest, batch)
        cut = (320 // batch, batch)
        held, lines = (_steps(gate, samples // batch) for gate in (_gate(loaded, cut), Gate(loaded.log.every, *cut)))
        assert len(held) == switch.held, switch.title
        assert len(lines) == 8
        free = [i for i in range(1, 8) if not any(lines[i - 1] <= step < lines[i] for step in held)]
        assert len(free) >= 3
    assert largest == either.STUDY.largest


def _gate(recipe, cut):
    from trainkit.config.units import Gate

    return Gate(recipe.evaluations["val"].every if recipe.evaluations else None, *cut)


def _steps(gate, last):
    found = []
    for step in range(1, last + 1):
        if step >= gate.due:
            found.append(step)
            gate.due = gate.after(step)
    return found


def test_rows_that_act_on_a_gpu_alone_are_marked(switches):
    gpu = {switch.title for switch in switches.switches(64, GPU) if switch.gpu}
    assert gpu == {
        "mixed precision, fp16",
        "compiled, reduce-overhead",
        "without mixed precision and TF32",
        "without cudnn.benchmark",
        "without expandable segments",
    }
    titles = [switch.title for switch in switches.switches(64, CPU)]
    assert "mixed precision, bf16" in titles and "without mixed precision (float32)" not in titles
    assert "without mixed precision (float32)" in [switch.title for switch in switches.switches(64, GPU)]


def test_rows_of_scenes_that_act_on_a_gpu_alone_are_marked(modules):
    assert {switch.title for switch in modules.segment_switches.switches(1024, GPU) if switch.gpu} == {
        "mixed precision, fp16",
        "without pinned memory",
        "deterministic kernels alone",
        "without cudnn.benchmark",
        "compiled, reduce-overhead",
        "profile: high performance",
        "profile: memory-limited",
        "profile: extreme",
    }


def test_the_profiles_of_the_guide_are_as_the_page_has_them(modules):
    page = (Path(__file__).parents[2] / "docs" / "reference" / "data" / "segmentation.md").read_text(encoding="utf-8")
    for name, (_, batch, micro, workers, prefetch) in modules.segment_switches.PROFILES.items():
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {name} |"))
        said = re.findall(r"[a-z_]+\.[a-z_]+=\d+", line)
        recipe = loader.load(loader.RECIPES / "cityscapes.yaml", tuple(said))
        assert recipe.train.batch_size == batch and (recipe.train.micro_batch or batch) == micro
        assert (recipe.loader.workers, recipe.loader.prefetch, recipe.train.precision) == (workers, prefetch, "auto")


@pytest.mark.parametrize("share", [0, 0.5, 1.5, 1.1])
def test_samples_that_do_not_fill_the_lines_of_the_largest_batch_are_refused(either, share):
    least = either.STUDY.largest * 8
    assert either.switches(least, CPU)
    with pytest.raises(ValueError, match=f"multiple of {least}"):
        either.switches(int(share * least), CPU)


@pytest.fixture
def volumes(run):
    """A run of 40 updates of 2 samples at so many seconds a sample, an evaluation of 1 s for each of `held`."""

    def make(title, seed, sample_s, held=2, batch=2, **changes):
        noted = note(title, run=f"tom500-s{seed}", began=1000.0 + seed)
        scored = {"val": 1} if held else {}
        plain = run(f"{title}{seed}", noted)
        same = {"batch": batch, "updates": 80 // batch, "per_epoch": 320 // batch, "scored": scored}
        steps = {"step_s": batch * sample_s, "wall_s": batch * (sample_s + 0.01)}
        return replace(plain, **same, **steps, held_s={"val": (1.0,) * held} if held else {}, **changes)

    return make


def test_switches_are_compared_in_pairs_by_samples_and_by_wall_clock(switches, volumes):
    listed, runs = switches.switches(64, CPU), {}
    for seed, slow in enumerate((1, 2)):
        runs["as shipped", seed] = volumes("as shipped", seed, 0.1 * slow)
        runs["batches of 8", seed] = volumes("batches of 8", seed, 0.05 * slow, batch=8)
        runs["no evaluation", seed] = volumes("no evaluation", seed, 0.1 * slow, held=0)
    table = switches.table(runs, listed)
    plain, batches, without = (cells(table, title) for title in ("as shipped", "batches of 8", "no evaluation"))
    assert plain[:2] == ["7.5 (5-10)", "1.00 (1.00-1.00)"]
    assert batches[:2] == ["15 (10-20)", "2.00 (2.00-2.00)"]
    assert without[:2] == plain[:2]
    # 200 samples at 0.1 s and 0.01 s outside steps, and two evaluations of a second for every 80 samples.
    assert float(plain[2].split("(")[1].split("-")[0]) == pytest.approx(200 * (0.11 + 2 / 80))
    assert float(without[2].split("(")[1].split("-")[0]) == pytest.approx(200 * 0.11)
    assert without[3].endswith(f"-{(0.11 + 2 / 80) / 0.11:.2f})")
    assert without[6] == switches.HOLDING and plain[-1] == "s0 s1"
    assert "80 samples" in table and "an evaluation of 1 case took 1 (1-1) s" in table and "means float32" in table


def test_switches_with_other_evaluations_samples_or_seeds_are_refused(switches, volumes):
    listed, plain = switches.switches(64, CPU), {("as shipped", 0): volumes("as shipped", 0, 0.1)}
    for title, changes, named in (
        ("compiled", {"held": 1}, r"1 evaluations of .* for compiled, seed 0; 2 of 1"),
        ("evaluation never due", {"held": 2}, "for evaluation never due, seed 0; 0 of 1"),
        ("batches of 4", {"batch": 4}, None),
        ("batches of 4", {"updates": 41}, "samples is 80 .* and 82 for batches of 4"),
    ):
        given = dict(changes)
        made = volumes(title, 0, 0.1, **{key: given.pop(key) for key in ("held", "batch") if key in given})
        runs = {**plain, (title, 0): replace(made, **given)}
        if named is None:
            assert title in switches.table(runs, listed)
        else:
            with pytest.raises(ValueError, match=named):
                switches.table(runs, listed)
    with pytest.raises(ValueError, match="compiled, seed 1: the recipe as shipped was not run"):
        switches.table({**plain, ("compiled", 1): volumes("compiled", 1, 0.1)}, listed)


def test_a_step_and_what_of_it_was_waiting_are_two_columns_and_an_evaluation_is_a_third(modules, run):
    segment = modules.segment_switches
    listed, runs = segment.switches(256, CPU), {}
    for title, waited, held in (("as shipped", 0.5, 2), ("1 worker, 2 batches ahead", 0.1, 2),
                                ("evaluation never due", 0.5, 0)):  # fmt: skip
        noted = note(title, run="segment-s0", began=1000.0)
        scored = {"val": 60} if held else {}
        made = run(title, noted, waited=waited)
        assert made.waiting_s == pytest.approx(waited * made.step_s)
        runs[title, 0] = replace(made, batch=8, scored=scored, held_s={"val": (1.0, 3.0)} if held else {})
    table = segment.STUDY.table(runs, listed)
    plain, worker, never = (cells(table, title) for title, _ in runs)
    step = 1e3 * (0.2 + 0.2 + 0.4) / 3
    assert float(plain[2]) == float(worker[2]) == pytest.approx(step, rel=1e-3)
    assert float(plain[3]) == pytest.approx(step * 0.5, rel=0.05)
    assert float(worker[3]) == pytest.approx(step * 0.1, rel=0.05)
    assert plain[4] == "2" and never[4] == ""
    assert "an evaluation of 60 images took 2 (1-3) s as shipped" in table


def test_maps_computed_each_time_are_the_maps_that_are_kept(modules, shared, tmp_path, monkeypatch):
    from trainkit.data.scenes import sources
    from trainkit.data.storage import boundary_distance, mask_store

    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path))
    source = sources.open_scenes(str(shared / "seg_camvid") + "#val")
    source = replace(source, scenes=tuple(source.scenes)[:2])
    masks = mask_store.pack_masks_once(source, source.labels, None)
    kept = boundary_distance.distances_once(masks, boundary_distance.Distance(cap=12))
    computed = modules.segment_switches.Computed(kept, masks)
    for row in range(2):
        assert (computed.levels(row) == kept.levels(row)).all()
    assert len(set(kept.levels(0).ravel().tolist())) > 20


def test_a_run_is_found_again_by_its_loader_too(switches, tmp_path):
    speeds, listed = switches.shared.speeds, {switch.title: switch for switch in switches.switches(64, CPU)}
    plain, workers = (switches.row(listed[title], 64) for title in ("as shipped", "1 worker, 2 batches ahead"))
    loaded = loader.load(speeds.comparison.recipe(workers), workers.changes)
    assert loader.digest(loaded) == loader.digest(loader.load(speeds.comparison.recipe(plain), plain.changes))
    folder = SimpleNamespace(path=tmp_path, recipe=tmp_path / "recipe.yaml")
    folder.recipe.write_text(loader.dump(loaded), encoding="utf-8")
    assert speeds.alike(workers)(folder) and not speeds.alike(plain)(folder)
    assert not speeds.alike(workers, "note.json")(folder)
    (tmp_path / "note.json").write_text("{}", encoding="utf-8")
    assert speeds.alike(workers, "note.json")(folder)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "samples", "title", "hundred"),
    [
        ("volume_switches", 64, "cache disk", 200),
        ("segment_switches", 256, "micro-batches of 4", 800),
    ],
)
def test_switches_are_trained_and_found_again(tmp_path, name, samples, title, hundred):
    words = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--repeats", "1", "--samples", str(samples)]
    words += ["--only", title]
    env = {**os.environ, "TRAINKIT_STORE": str(tmp_path / "store"), "ACCELERATE_USE_CPU": "true"}
    first = subprocess.run(words, capture_output=True, text=True, env=env, timeout=280)
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("== ") == 2
    again = subprocess.run([*words, "--table"], capture_output=True, text=True, env=env, timeout=60)
    # Training prints what reading takes between the table and what was left out.
    said = [line for line in first.stdout.splitlines() if not line.startswith("Reading a crop")]
    assert "== " not in again.stdout and said[-len(again.stdout.splitlines()) :] == again.stdout.splitlines()
    plain, other = cells(again.stdout, "as shipped"), cells(again.stdout, title)
    assert plain[1] == "1.00" and 0.2 < float(other[1]) < 5
    # Wall-clock has the steps in it, and of two short evaluations not much.
    wall = float(plain[2 if name == "volume_switches" else 5])
    assert 0.95 * hundred / float(plain[0]) < wall < 3 * hundred / float(plain[0])
    assert ("Reading a crop" in first.stdout) == (name == "segment_switches")
