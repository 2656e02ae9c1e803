"""The benchmark: trainings that wait, ratios of pairs, the settings worth trying, the choice, writing."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from runs import PLUGIN, TOY, run

from trainkit.config import loader
from trainkit.config.run_request import RunRequest, load
from trainkit.diagnostics import bench_settings, benchmark, benchmark_command, stepped_process, stepping_child
from trainkit.diagnostics.bench_settings import Axis
from trainkit.diagnostics.stepped_process import Block, Ready, SteppedProcessError
from trainkit.errors import UserError
from trainkit.tracking.store import Store

RECIPES = sorted(loader.RECIPES.glob("*.yaml"))
MACHINE = {
    "device": "cpu", "gpu": None, "cpu": "made up", "cpu_cores": 4, "threads": 1, "processes": 1, "parallelism": "NO",
    "precision": "no", "torch": "2.14", "instructions": "AVX2", "bf16": True, "tf32": False, "compile": "off",
    "compiles": "", "cores": 4.0,
}  # fmt: skip
GPU = {**MACHINE, "device": "cuda", "gpu": "made up", "precision": "bf16", "tf32": True, "cores": 16.0}


@pytest.fixture(autouse=True)
def _toys(monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))


def ready(machine=MACHINE, **changes) -> Ready:
    told = {"steps_per_epoch": 4, "batch_norm": True, "views": 0, "machine": machine}
    return Ready(**{**told, **changes})


def ready_for(recipe, machine) -> Ready:
    if recipe.train.precision != "auto":
        machine = {**machine, "precision": recipe.train.precision}
    return ready(machine, steps_per_epoch=50, views=2)


def toy(*words: str) -> RunRequest:
    return RunRequest(TOY, words, ("toy",))


# ---- a training that waits -------------------------------------------------------------------------------------------


def child(monkeypatch, tmp_path, said: list[dict], *words: str) -> list[dict]:
    """The child in this process: told these words, then left alone. Its answers."""
    monkeypatch.setenv("TRAINKIT_PACED", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(word) + "\n" for word in said)))
    answers: list[dict] = []
    stepping_child.run([str(TOY), "--plugin=toy", *words], time.time(), lambda answer: answers.append(dict(answer)))
    return answers


def test_losses_of_a_paced_training_are_those_of_an_ordinary_one(monkeypatch, tmp_path, store):
    told = child(monkeypatch, tmp_path, [{"do": "go", "steps": 3}, {"do": "go", "steps": 4}])
    found = [loss for answer in told if "block" in answer for loss in answer["block"]["losses"]]
    assert [answer["block"]["steps"] for answer in told[1:]] == [1, 3, 4]
    assert [answer["block"]["samples"] for answer in told[1:]] == [16, 48, 64]
    plain = run("log.every=1 step", "evaluations={}", "best=null", "train.length=8 steps")
    assert found == pytest.approx(plain.series("train/loss"), rel=1e-6)


def test_an_evaluation_leaves_the_training_as_it_was(monkeypatch, tmp_path):
    plain = child(monkeypatch, tmp_path, [{"do": "go", "steps": 6}])
    asked = [{"do": "evaluate", "name": "val", "most": 60}]
    looked = child(monkeypatch, tmp_path, [*asked, {"do": "go", "steps": 6}])
    assert looked[-1]["block"]["losses"] == plain[-1]["block"]["losses"]
    assert looked[2]["ran"] and looked[2]["seconds"] > 0


def test_an_evaluation_that_would_take_too_long_does_not_run(monkeypatch, tmp_path):
    told = child(monkeypatch, tmp_path, [{"do": "evaluate", "name": "val", "most": 0}])
    assert told[-1]["ran"] is False and told[-1]["seconds"] > 0


def test_a_paced_recipe_has_no_end_and_holds_nothing():
    recipe = load(toy("log.figures=1 epoch", "log.profile={at: 5}"))
    out = stepping_child.shortened(recipe)
    assert out.evaluations == {} and out.best is None and out.checkpoints.every is None
    assert out.train.length.steps(4, 16) == 10**8
    assert out.log.figures is None and out.log.profile is None and out.log.ceilings == "off"


# ---- ratios ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [2, 5, 12, 31])
def test_the_interval_is_students(pairs):
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(pairs)
    than = rng.lognormal(5, 0.2, pairs)
    faster = than * rng.lognormal(0.1, 0.05, pairs)
    logs = [math.log(a / b) for a, b in zip(faster, than, strict=True)]
    mean = sum(logs) / pairs
    error = (sum((x - mean) ** 2 for x in logs) / (pairs - 1) / pairs) ** 0.5
    half = stats.t.ppf(0.975, pairs - 1) * error
    found = stepped_process.ratio(faster, than)
    assert (found.value, found.low, found.high) == pytest.approx(
        (math.exp(mean), math.exp(mean - half), math.exp(mean + half)), rel=1e-4
    )


def test_intervals_hold_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(0)
    hit = wide = 0
    for _ in range(2000):
        weather = rng.lognormal(0, 0.5, 5)  # which both of a pair have
        found = stepped_process.ratio(1.2 * weather * rng.lognormal(0, 0.05, 5), weather * rng.lognormal(0, 0.05, 5))
        hit += found.low <= 1.2 <= found.high
        wide += found.high / found.low > 1.5
    assert 0.93 <= hit / 2000 <= 0.97
    assert wide / 2000 < 0.02, "what a pair has in common widens the interval"


@pytest.mark.parametrize("rates", [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([1.0, 0.0], [1.0, 1.0])])
def test_ratios_refuse_what_has_no_interval(rates):
    with pytest.raises(ValueError, match="rate"):
        stepped_process.ratio(*rates)


def test_blocks_take_turns():
    order: list[tuple[str, int]] = []

    class One:
        def __init__(self, name):
            self.name = name

        def go(self, updates):
            order.append((self.name, updates))
            return self.name, updates

    pairs = list(stepped_process.in_turns(One("a"), One("b"), (3, 5), 4))
    assert [name for name, _ in order] == list("abbaabba")
    assert pairs == [(("a", 3), ("b", 5))] * 4


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", [MACHINE, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", ["adadistill", "convnext", "eye_state", "reid", "segment", "tom500"])
def test_what_is_worth_trying_is_a_valid_recipe_that_differs_and_trains_alike(name, machine):
    path = loader.RECIPES / f"{name}.yaml"
    recipe = loader.load(path)
    found = ready_for(recipe, machine)
    axes = bench_settings.suggested(recipe, found)
    assert len(axes) >= 4 and len({axis.key for axis in axes}) == len(axes)
    for axis in axes:
        assert len(set(axis.values)) == len(axis.values) > 0
        assert not bench_settings.changes_training(axis.key, found)
        for word in axis.words:
            assert loader.load(path, [word]) != recipe, word


def suggested(*words: str, machine=MACHINE, **changes) -> dict[str, tuple[str, ...]]:
    axes = bench_settings.suggested(load(toy(*words)), ready(machine, **changes))
    return {axis.key: axis.values for axis in axes}


def test_suggestions_fit_the_machine():
    assert suggested() == {
        "train.precision": ("bf16",),
        "train.compile": ("default",),
        "device.channels_last": ("false",),
        "loader.workers": ("1", "2", "4"),
        "device.threads": ("2", "4"),
    }
    gpu = suggested(machine=GPU)
    assert gpu["train.precision"] == ("no", "fp16") and gpu["device.tf32"] == ("false",)
    assert gpu["train.compile"] == ("default", "reduce-overhead", "max-autotune") and "device.threads" not in gpu
    assert "train.compile" not in suggested(machine={**MACHINE, "compiles": "no compiler"})
    assert suggested("loader.workers=2")["loader.workers"] == ("0", "1", "4")
    assert "device.threads" not in suggested(machine={**MACHINE, "cores": 1.0})
    assert "device.cudnn_benchmark" in gpu
    assert "device.cudnn_benchmark" not in suggested("device.deterministic=true", machine=GPU)


def test_a_teacher_that_could_be_asked_once_is_suggested():
    path = loader.RECIPES / "adadistill_ms1mv2.yaml"

    def values(words: tuple[str, ...], views: int) -> tuple[str, ...]:
        axes = bench_settings.suggested(loader.load(path, words), ready(views=views, batch_norm=False))
        return next((axis.values for axis in axes if axis.key == "task.cache_teacher"), ())

    assert values((), 2) == ("true",) and values((), 0) == ()
    assert values(("task.cache_teacher=disk",), 2) == values(("task.cache_teacher=true",), 2) == ("false",)


def test_keys_with_several_values_are_compared_with_the_recipe_of_their_first():
    base, axes = bench_settings.read(toy("seed=3", "loader.workers=0,1,2", "train.precision=no, bf16"))
    assert base.overrides == ("seed=3", "loader.workers=0", "train.precision=no")
    assert axes == [Axis("loader.workers", ("1", "2")), Axis("train.precision", ("bf16",))]
    assert bench_settings.read(toy("evaluations={}", "best=null"))[1] == []
    for word in ("loader.workers=0,", "loader.workers=0,0", "loader.workers=0,x", "loader.wrokers=0,1"):
        with pytest.raises(UserError):
            bench_settings.read(toy(word))


def test_what_changes_the_training_is_named():
    for key in ("train.batch_size", "optim.lr", "evaluations.val.every", "task.smoothing", "data.augment", "seed"):
        assert bench_settings.changes_training(key, ready()) == "changes the training"
        assert not bench_settings.compares_losses(key)
    for key in ("loader.workers", "device.threads", "train.compile", "optim.fused", "task.cache_teacher"):
        assert not bench_settings.changes_training(key, ready())
    assert "batch norm" in bench_settings.changes_training("train.micro_batch", ready())
    assert not bench_settings.changes_training("train.micro_batch", ready(batch_norm=False))
    assert "reproducible" in bench_settings.changes_training("device.deterministic", ready())
    assert bench_settings.compares_losses("train.precision")
    assert not bench_settings.compares_losses("task.cache_teacher")


def test_merged_words_are_given_once():
    words = bench_settings.merge(("loader.workers=1", "seed=3"), ("loader.workers=4", "train.compile=default"))
    assert words == ("seed=3", "loader.workers=4", "train.compile=default")
    assert (
        load(toy(*bench_settings.merge(("train.precision=no",), ("train.precision=bf16",)))).train.precision == "bf16"
    )


def test_drift_by_hand():
    assert benchmark.drift((2.0, 1.0, 3.0), (2.0, 1.0, 3.0)) == 0.0
    assert benchmark.drift((2.0, 1.1, 3.0), (2.0, 1.0, 3.0)) == pytest.approx(0.1 / 2)
    assert benchmark.drift((2.0, math.nan, 3.0), (2.0, 1.0, 3.0)) == math.inf
    assert benchmark.drift((0.0,), (0.0,)) == 0.0


# ---- the choice, with trainings that are made up --------------------------------------------------------------------


class Fake:
    """A child whose pace, memory, drift and failures follow from its words."""

    alive: ClassVar[list[Fake]] = []
    most: ClassVar[int] = 0
    started: ClassVar[list[tuple[str, ...]]] = []
    world: ClassVar[dict] = {}

    def __init__(self, request, environment=None, *, within=None, patience=0):
        self.words = dict(word.partition("=")[::2] for word in request.overrides)
        self.at = 0
        Fake.started.append(tuple(request.overrides))
        Fake.alive.append(self)
        Fake.most = max(Fake.most, len(Fake.alive))
        reason = next((r for w, r in Fake.world.get("fails", {}).items() if w in request.overrides), None)
        if reason is not None:
            Fake.alive.remove(self)
            raise SteppedProcessError(*reason)
        self.rng = np.random.default_rng(zlib.crc32(repr(tuple(request.overrides)).encode()))
        self.ready = ready(Fake.world.get("machine", MACHINE))
        self.first = self._block(1)

    @property
    def batch(self) -> int:
        return int(self.words.get("train.batch_size", 16))

    @property
    def speed(self) -> float:
        speed = 1000.0 * self.batch / 16
        for word, factor in Fake.world.get("speeds", {}).items():
            key, _, value = word.partition("=")
            if self.words.get(key) == value:
                speed *= factor
        return speed

    def _block(self, updates: int) -> Block:
        samples = updates * self.batch
        seconds = samples / (self.speed * self.rng.lognormal(0, 0.003))
        first, self.at = self.at + 1, self.at + updates
        set_ = [f"{key}={value}" for key, value in self.words.items()]
        off = 1 + sum(drift for word, drift in Fake.world.get("drifts", {}).items() if word in set_)
        losses = tuple(off * (2 - 0.01 * k) for k in range(first, self.at + 1))
        return Block(updates, samples, seconds, losses, 0.5)

    def go(self, updates: int) -> Block:
        assert self in Fake.alive, "a child that was closed"
        if self.at + updates >= Fake.world.get("breaks", 10**9):
            error = SteppedProcessError("failed", "its loss is not finite")
            error.child = self
            raise error
        return self._block(updates)

    def close(self):
        if self in Fake.alive:
            Fake.alive.remove(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@pytest.fixture
def world(monkeypatch):
    Fake.alive, Fake.most, Fake.started, Fake.world = [], 0, [], {}
    monkeypatch.setattr(benchmark, "SteppedProcess", Fake)
    yield Fake.world
    assert not Fake.alive, "a child was left"


def measured(*words: str, rising: bool = False) -> tuple[benchmark.Benchmark, list[str]]:
    base, axes = bench_settings.read(toy(*words))
    said: list[str] = []
    one = benchmark.Benchmark(base, 4, 10, say=said.append)
    one.run([Axis(axis.key, axis.values, rising) for axis in axes])
    return one, said


def verdicts(one: benchmark.Benchmark) -> dict[str, str]:
    return {" ".join(r.words): r.verdict for r in one.results}


def test_what_helps_is_kept_together_and_what_does_not_is_not(world):
    world["speeds"] = {"train.compile=default": 1.3, "device.channels_last=false": 0.8, "loader.workers=2": 1.2}
    one, said = measured(
        "train.compile=off,default", "device.channels_last=true,false", "loader.workers=0,1,2", "optim.fused=true,false"
    )
    assert Fake.most == 2
    found = verdicts(one)
    assert found["train.compile=default"] == "faster" and found["device.channels_last=false"] == "slower"
    assert found["optim.fused=false"] in ("no difference", "faster by less than 1 %", "slower")
    kept = one.kept()
    assert set(kept.words) == {"train.compile=default", "loader.workers=2"}
    assert kept.ratio.value == pytest.approx(1.56, rel=0.02)
    assert said[-1].startswith("together: train.compile=default loader.workers=2: ")


def test_the_best_alone_is_kept_where_together_is_slower(world):
    world["speeds"] = {"train.compile=default": 1.3, "loader.workers=1": 1.2}

    class Clash(Fake):
        @property
        def speed(self):
            both = self.words.get("train.compile") == "default" and self.words.get("loader.workers") == "1"
            return 900.0 if both else super().speed

    benchmark.SteppedProcess = Clash
    one, _ = measured("train.compile=off,default", "loader.workers=0,1")
    assert one.results[-1].verdict == "slower" and one.kept().words == ("train.compile=default",)


def test_a_larger_batch_is_measured_and_never_kept(world):
    world["speeds"] = {"train.batch_size=32": 1.5}
    one, _ = measured("train.batch_size=16,32")
    (result,) = one.results
    assert result.ratio.value == pytest.approx(3.0, rel=0.02)
    assert result.verdict == "faster; not kept: changes the training"
    assert result.loss_drift is None, "other samples: their losses are not compared"
    assert one.kept() is None


def test_what_drifts_is_not_kept(world):
    world["speeds"] = {"train.precision=bf16": 2.0}
    world["drifts"] = {"train.precision=bf16": 0.05}
    (result,) = measured("train.precision=no,bf16")[0].results
    assert result.loss_drift == pytest.approx(0.05, rel=0.05)
    assert result.verdict == "faster; not kept: its losses differ"
    world["drifts"] = {"train.precision=bf16": 0.002}
    assert measured("train.precision=no,bf16")[0].kept().words == ("train.precision=bf16",)


def test_a_setting_that_cannot_be_trained_fails_alone(world):
    world["fails"] = {"train.compile=default": ("failed", "CppCompileError"), "loader.workers=2": ("memory", "killed")}
    world["speeds"] = {"loader.workers=1": 1.2}
    one, _ = measured("train.compile=off,default", "loader.workers=0,1,2,4")
    found = verdicts(one)
    assert found["train.compile=default"] == "failed: CppCompileError"
    assert found["loader.workers=2"] == "out of memory: killed" and "loader.workers=4" in found
    assert one.kept().words == ("loader.workers=1",)


def test_a_search_for_the_best_number_ends_where_it_gets_slower(world):
    world["speeds"] = {f"loader.workers={n}": s for n, s in ((1, 1.1), (2, 1.3), (3, 1.2))}
    one, _ = measured("loader.workers=0,1,2,3,4", rising=True)
    assert list(verdicts(one)) == [f"loader.workers={n}" for n in (1, 2, 3)]
    assert one.kept().words == ("loader.workers=2",)


def test_the_recipe_as_it_is_must_train(world):
    world["fails"] = {"seed=7": ("user", "bad", UserError("data.train", "is not there"))}
    with pytest.raises(UserError, match="is not there"):
        measured("seed=7", "optim.fused=true,false")
    world["breaks"] = 2
    with pytest.raises(UserError, match="the recipe as it is: its loss is not finite"):
        measured("optim.fused=true,false")


# ---- the verb --------------------------------------------------------------------------------------------------------


def test_what_was_measured_before_an_interrupt_is_kept(world, store):
    world["speeds"] = {"loader.workers=1": 1.4}

    def stop(line: str) -> None:
        if line.startswith("loader.workers=1"):
            os.kill(os.getpid(), signal.SIGTERM)  # as a scheduler does

    there = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        benchmark_command.command(toy("loader.workers=0,1,2"), repeats=3, steps=5, say=stop)
    assert signal.getsignal(signal.SIGTERM) is there
    (folder,) = (folder for folder in Store.locate().runs() if "-bench-" in folder.name)
    assert folder.info().status == "KILLED"
    client = Store.locate().client()
    (found,) = client.search_runs([client.get_experiment_by_name("toy-bench").experiment_id])
    assert found.data.metrics["speed/ratio"] == pytest.approx(1.4, rel=0.02)


def test_a_benchmark_ends_in_mlflow_and_a_request(world, store):
    world["speeds"] = {"loader.workers=2": 1.4}
    said = []
    words = ("seed=5", "loader.workers=0,1,2", "optim.fused=true,false")
    made = benchmark_command.command(toy(*words), repeats=3, steps=5, say=said.append)
    assert said[1].startswith("3 settings in 3 pairs of blocks each: about ")
    assert said[-1].startswith("kept: loader.workers=2, x 1.")
    assert set(made.overrides) == {"seed=5", "loader.workers=2", "optim.fused=true"} and made.plugins == ("toy",)
    client = Store.locate().client()
    (found,) = client.search_runs([client.get_experiment_by_name("toy-bench").experiment_id])
    assert found.info.status == "FINISHED" and found.data.metrics["speed/ratio"] == pytest.approx(1.4, rel=0.02)
    files = {f.path for f in client.list_artifacts(found.info.run_id, "tables")}
    assert files == {"tables/benchmark.txt"}


def test_mistakes_are_told_before_anything_is_measured(world):
    for words, what in (({"repeats": 1}, "--repeats"), ({"steps": 0}, "--steps")):
        with pytest.raises(UserError, match=what):
            benchmark_command.command(toy(), **words)
    assert not Fake.started


def test_the_table_says_what_was_measured(world):
    world["speeds"] = {"loader.workers=2": 1.4, "device.channels_last=false": 0.5}
    one, _ = measured("loader.workers=0,2", "device.channels_last=true,false")
    lines = one.table().splitlines()
    assert lines[1].split()[:3] == ["as", "it", "is"]
    assert next(line for line in lines if "workers=2" in line).endswith("faster")
    assert next(line for line in lines if "channels_last" in line).endswith("slower")


# ---- real children ---------------------------------------------------------------------------------------------------


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_children_freeze_in_between_train_alike_and_end_with_their_parent(tmp_path):
    import psutil

    with (
        stepped_process.SteppedProcess(toy()) as one,
        stepped_process.SteppedProcess(toy("loader.workers=2"), within=tmp_path) as two,
    ):
        a, b = one.go(20), two.go(20)
        assert a.losses == b.losses and a.samples == b.samples == 320
        family = psutil.Process(two._child.pid)
        workers = family.children(recursive=True)
        assert len(workers) >= 2
        time.sleep(0.2)
        assert {state_of(p.pid) for p in (family, *workers)} == {"T"}
        assert b.memory_gb > 0.1
        assert one.evaluate("val")[1]
    assert not psutil.pid_exists(one._child.pid)
    _, left = psutil.wait_procs(workers, 10)
    assert not left and not list(tmp_path.iterdir())
    with pytest.raises(SteppedProcessError, match="val") as told:
        stepped_process.SteppedProcess(toy("best.metric=nothing/x"))
    assert told.value.kind == "user" and isinstance(told.value.user_error, UserError)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_frozen_children_do_not_outlive_a_parent_that_is_killed():
    import psutil

    code = (
        "import time; from pathlib import Path\n"
        "from trainkit.config.run_request import RunRequest\n"
        "from trainkit.diagnostics.stepped_process import SteppedProcess\n"
        f"child = SteppedProcess(RunRequest(Path({str(TOY)!r}), ('loader.workers=1',), ('toy',)))\n"
        "print(child._child.pid, flush=True); time.sleep(600)"
    )
    path = os.pathsep.join([str(PLUGIN), *(p for p in sys.path if p)])
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        child = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.5)
        family = [child, *child.children(recursive=True)]
        assert len(family) >= 2 and {state_of(one.pid) for one in family} == {"T"}
    finally:
        parent.kill()
        parent.wait()
    _, left = psutil.wait_procs(family, 20)
    assert not left


@pytest.mark.slow
def test_a_real_benchmark_of_the_toy(store):
    said: list[str] = []
    request = toy("device.channels_last=true,false", "train.batch_size=16,32")
    benchmark_command.command(request, repeats=2, steps=5, say=said.append)
    table = next(text for text in said if "loss drift" in text)
    assert "device.channels_last=false" in table and "train.batch_size=32" in table
    assert [line.split(":")[0] for line in said[2:4]] == ["device.channels_last=false", "train.batch_size=32"]
