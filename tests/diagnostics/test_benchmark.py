"""The benchmark: trainings that wait, ratios of pairs, the switches of every recipe, the choice, resuming, writing."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import PLUGIN, TOY, run

from trainkit.config import loader, yaml_editor
from trainkit.config.run_request import RunRequest, load
from trainkit.diagnostics import (
    benchmark,
    benchmark_command,
    benchmark_report,
    stepped_process,
    stepping_child,
    switches,
)
from trainkit.diagnostics.benchmark import Start
from trainkit.diagnostics.benchmark_report import TOGETHER, BenchmarkState
from trainkit.diagnostics.stepped_process import Block, Ready, SteppedProcessError
from trainkit.errors import UserError
from trainkit.plots import benchmark as drawing
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
    told = {"setup_s": 1.0, "batch_size": 16, "micro_batch": 8, "accumulation": 2, "steps_per_epoch": 4}
    told |= {"batch_norm": True, "block": 1, "views": 0, "machine": machine}
    return Ready(**{**told, **changes})


def ready_for(recipe, machine) -> Ready:
    batch = recipe.train.batch_size
    block = getattr(recipe.data, "block", 1)
    micro = recipe.train.micro_batch or (batch if block == 1 else block)
    if recipe.train.precision != "auto":
        machine = {**machine, "precision": recipe.train.precision}
    return ready(machine, batch_size=batch, micro_batch=micro, accumulation=batch // micro, steps_per_epoch=50,
                 block=block, views=2)  # fmt: skip


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
    assert [answer["block"]["first"] for answer in told[1:]] == [1, 2, 5]
    assert [answer["block"]["samples"] for answer in told[1:]] == [16, 48, 64]
    plain = run("log.every=1 step", "evaluations={}", "best=null", "train.length=8 steps")
    assert found == pytest.approx(plain.series("train/loss"), rel=1e-6)


def test_phases_partition_a_block_and_waiting_is_in_none(monkeypatch, tmp_path):
    at: list[float] = []

    class Slow(io.StringIO):
        def readline(self):
            time.sleep(0.2)
            at.append(time.perf_counter())
            return super().readline()

    told: list[dict] = []

    def tell(answer: dict) -> None:
        told.append(dict(answer, at=time.perf_counter()))

    monkeypatch.setenv("TRAINKIT_PACED", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", Slow('{"do": "go", "steps": 5}\n'))
    stepping_child.run([str(TOY), "--plugin=toy"], time.time(), tell)
    block = told[-1]["block"]
    assert set(block["phases"]) == {"data", "transfer", "forward", "backward", "optimizer", "eval", "checkpoint", "log"}
    assert block["seconds"] == pytest.approx(sum(block["phases"].values()))
    # Whether a checkpoint is being written, or outputs of a teacher are to be computed again, is asked once.
    assert block["phases"]["eval"] + block["phases"]["checkpoint"] < 0.001
    assert len(block["each"]) == 5 and sum(block["each"]) <= block["seconds"] + 1e-6
    assert block["seconds"] <= told[-1]["at"] - at[0], "waiting for the parent was counted"


def test_outputs_and_evaluations_leave_the_training_as_it_was(monkeypatch, tmp_path):
    plain = child(monkeypatch, tmp_path, [{"do": "go", "steps": 6}])
    file = tmp_path / "outputs.npz"
    asked = [{"do": "outputs", "file": str(file)}, {"do": "evaluate", "name": "val", "most": 60}]
    looked = child(monkeypatch, tmp_path, [*asked, {"do": "go", "steps": 6}])
    assert looked[-1]["block"]["losses"] == plain[-1]["block"]["losses"]
    assert np.load(file)["logits"].shape == (8, 4)
    assert looked[3]["ran"] and looked[3]["seconds"] > 0


def test_an_evaluation_that_would_take_too_long_does_not_run(monkeypatch, tmp_path):
    told = child(monkeypatch, tmp_path, [{"do": "evaluate", "name": "val", "most": 0}])
    assert told[-1]["ran"] is False and told[-1]["seconds"] > 0


def test_checkpoints_that_are_kept_are_written(monkeypatch, tmp_path):
    told = child(monkeypatch, tmp_path, [{"do": "go", "steps": 4}], "checkpoints.every=1 step", "--keep=checkpoints")
    assert told[-1]["block"]["phases"]["checkpoint"] > 0
    assert list((tmp_path / "checkpoints").glob("step-*/model.safetensors"))


def test_a_paced_recipe_has_no_end_and_holds_nothing():
    recipe = load(toy("log.figures=1 epoch", "log.profile={at: 5}"))
    out = stepping_child.shortened(recipe, ())
    assert out.evaluations == {} and out.best is None and out.checkpoints.every is None
    assert out.train.length.steps(4, 16) == 10**8
    assert out.log.figures is None and out.log.profile is None and out.log.ceilings == "off"
    assert stepping_child.shortened(recipe, ("evaluations",)).evaluations == recipe.evaluations


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


def test_unpaired_intervals_are_not_too_narrow():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(1000):
        found = stepped_process.unpaired(1.1 * rng.lognormal(0, 0.1, 5), rng.lognormal(0, 0.02, 4))
        hits += found.low <= 1.1 <= found.high
    assert hits >= 940


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


# ---- switches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", [MACHINE, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", ["adadistill", "convnext", "eye_state", "reid", "segment", "tom500"])
def test_every_try_of_a_recipe_of_each_task_is_a_valid_recipe_that_says_something_else(name, machine):
    path = loader.RECIPES / f"{name}.yaml"
    recipe = loader.load(path)
    listed = switches.listed(recipe, ready_for(recipe, machine), {}, workers=2)
    assert [switch.name for switch in listed] == list(switches.NAMES)
    for switch in listed:
        assert bool(switch.settings) != bool(switch.absent), switch
        titles = [one.title for one in switch.settings]
        assert len(set(titles)) == len(titles)
        for one in switch.settings:
            changed = loader.load(path, switches.merge((), one.words))
            assert changed != recipe, (switch.name, one)


def of(name: str, *words: str, machine=MACHINE, environment=None, **changes) -> switches.Switch:
    workers = changes.pop("workers", None)
    recipe = load(toy(*words))
    return next(
        r for r in switches.listed(recipe, ready(machine, **changes), environment or {}, workers) if r.name == name
    )


def titles(switch: switches.Switch) -> list[str]:
    return [one.title for one in switch.settings]


def test_switches_fit_the_machine():
    assert titles(of("precision")) == ["bf16"]
    assert titles(of("precision", machine=GPU)) == ["float32", "fp16"]
    assert of("tf32").absent and titles(of("tf32", machine=GPU)) == ["without tf32"]
    assert titles(of("compile")) == ["compiled, default"]
    assert "max-autotune" in str(titles(of("compile", machine=GPU)))
    assert of("compile", machine={**MACHINE, "compiles": "no compiler"}).absent == "no compiler"
    assert titles(of("workers")) == ["1 worker", "2 workers", "4 workers"]
    assert titles(of("workers", "loader.workers=2")) == ["no workers", "1 worker", "4 workers"]
    assert titles(of("threads")) == ["2 threads", "4 threads"]
    assert of("threads", machine={**MACHINE, "cores": 1.0}).absent
    assert of("prefetch").absent and of("prefetch", workers=2).settings[0].words == (
        "loader.workers=2",
        "loader.prefetch=1",
    )
    assert of("pin").absent and of("pin", machine=GPU).settings
    assert of("cache").absent and of("persistent_workers").absent
    assert of("launch_blocking", machine=GPU).absent
    freed = of("launch_blocking", machine=GPU, environment={"CUDA_LAUNCH_BLOCKING": "1"})
    assert freed.settings[0].environment == (("CUDA_LAUNCH_BLOCKING", None),)
    assert of("deterministic", "device.deterministic=true", machine=GPU).settings
    assert of("cudnn_benchmark", "device.deterministic=true", machine=GPU).absent


def test_the_cache_of_a_recipe_is_a_switch():
    recipe = loader.load(loader.RECIPES / "tom500.yaml")
    found = {r.name: r for r in switches.listed(recipe, ready_for(recipe, MACHINE))}
    assert titles(found["cache"]) == ["cache: disk", "cache: ram"]


def test_a_teacher_that_could_be_asked_once_is_a_switch():
    assert of("cache_teacher").absent == "this task has no teacher to cache"
    path = loader.RECIPES / "adadistill_ms1mv2.yaml"

    def switch(words: tuple[str, ...], views: int) -> switches.Switch:
        listed = switches.listed(loader.load(path, words), ready(views=views, batch_norm=False))
        return next(switch for switch in listed if switch.name == "cache_teacher")

    assert [one.words for one in switch((), 2).settings] == [("task.cache_teacher=true",)]
    assert "countable" in switch((), 0).absent and not switch((), 0).settings
    for word in ("disk", "true"):
        assert [one.words for one in switch((f"task.cache_teacher={word}",), 2).settings] == [
            ("task.cache_teacher=false",)
        ]


def test_what_changes_learning_says_so():
    for name in ("batch", "accumulation"):
        assert all(one.gives_up and not one.same_samples for one in of(name).settings), name
    assert all(one.gives_up for one in of("micro_batch").settings)
    assert not any(one.gives_up for one in of("micro_batch", batch_norm=False).settings)
    assert all(one.same_samples for one in of("micro_batch").settings)
    assert titles(of("batch")) == ["batch 32", "batch 64"], "no more than the data holds"
    assert all(of(name, block=8).absent for name in ("micro_batch", "batch", "accumulation"))
    for name in ("evaluations", "checkpoints", "log"):
        assert all(one.gives_up for one in of(name).settings)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 32), min_size=2, max_size=6, unique=True), st.data())
def test_refining_looks_halfway_and_nowhere_else(tried, data):
    best = data.draw(st.sampled_from(tried))
    found = switches.refine(sorted(tried), best, 32)
    assert len(found) <= 2 and not set(found) & set(tried)
    between = [n for n in tried if n < best][-1:] + [n for n in tried if n > best][:1]
    assert all(min(tried) < n < max(tried) for n in found) or not between


def test_refining_by_example():
    assert switches.refine([0, 1, 2, 4, 8], 4, 8) == [3, 6]
    assert switches.refine([0, 1, 2], 1, 8) == []
    assert switches.refine([0, 1, 2, 4, 8], 8, 8) == [6]


def test_merged_words_are_given_once():
    words = switches.merge(("loader.workers=1", "seed=3"), ("loader.workers=4", "train.compile=default"))
    assert words == ("seed=3", "loader.workers=4", "train.compile=default")
    assert load(toy(*switches.merge(("train.precision=no",), ("train.precision=bf16",)))).train.precision == "bf16"


# ---- drift, and what a training takes --------------------------------------------------------------------------------


def test_drift_by_hand():
    reference = Start((2.0, 1.0, 3.0), {"a": np.array([[3.0, 4.0]], np.float32), "b": np.array([1.0, np.nan])})
    same = Start((2.0, 1.0, 3.0), dict(reference.outputs))
    assert benchmark.drift(same, reference) == (0.0, 0.0)
    other = Start((2.0, 1.1, 3.0, 9.0), {"a": np.array([[3.0, 4.5]], np.float32), "c": np.ones(3)})
    loss, outputs = benchmark.drift(other, reference)
    assert loss == pytest.approx(0.1 / 2)
    assert outputs == pytest.approx(0.5 / 5)
    assert benchmark.drift(same, None) == (None, None)
    broken = Start((2.0, math.nan, 3.0), {"b": np.array([np.nan, 1.0])})
    assert benchmark.drift(broken, reference) == (math.inf, math.inf)
    assert benchmark.drift(Start((0.0,), {}), Start((0.0,), {})) == (0.0, None)


def held(steps: int, every: int | None, at_end: bool) -> int:
    """Step by step, as the loop has it."""
    count, last = 0, None
    for step in range(1, steps + 1):
        if every and step % every == 0:
            count, last = count + 1, step
    return count + (at_end and last != steps)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 40), st.booleans(), st.booleans(), st.integers(1, 40))
def test_seconds_of_a_training_are_those_of_its_events(steps, every, at_end, at_start, saved):
    ends = f"at_end: {str(at_end).lower()}, at_start: {str(at_start).lower()}"
    words = (
        f"train.length={steps} steps",
        f"evaluations={{val: {{every: {every} steps, {ends}}}}}",
        f"checkpoints={{every: {saved} steps}}",
    )
    recipe = loader.load(TOY, words, ("toy",))
    found = benchmark.seconds(recipe, ready(), 0.5, {"val": 2.0, "checkpoint": 0.25})
    expected = 0.5 * steps + 2.0 * (held(steps, every, at_end) + at_start) + 0.25 * held(steps, saved, True)
    assert found == pytest.approx(expected)


def test_checkpoints_beside_the_training_cost_what_they_hold_up():
    costs, per_update = {"checkpoint": 0.01, "writing": 2.0}, 0.1
    for every, at_end, more in ((100, False, 10 * 0.01), (100, True, 9 * 0.01 + 2.0), (5, False, 200 * 1.5)):
        words = ("train.length=1000 steps", f"checkpoints={{every: {every} steps, at_end: {str(at_end).lower()}}}")
        recipe = loader.load(TOY, (*words, "evaluations={}", "best=null"), ("toy",))
        assert benchmark.seconds(recipe, ready(), per_update, costs) == pytest.approx(100 + more)


def test_an_evaluation_keeps_to_its_budget():
    words = ("train.length=1000 steps", "evaluations={val: {every: 1 step, budget: 20%, at_end: false}}")
    recipe = loader.load(TOY, (*words, "checkpoints.every=null", "checkpoints.at_end=false"), ("toy",))
    assert benchmark.seconds(recipe, ready(), 0.1, {"val": 5.0}) == pytest.approx(100 / 0.8)


# ---- climbing, with trainings that are made up -----------------------------------------------------------------------


class Fake:
    """A child whose pace, memory, drift and failures follow from its words."""

    alive: ClassVar[list[Fake]] = []
    most: ClassVar[int] = 0
    started: ClassVar[list[tuple[str, ...]]] = []
    world: ClassVar[dict] = {}

    def __init__(self, request, environment=None, *, keep=(), within=None, patience=0):
        self.words = dict(word.partition("=")[::2] for word in request.overrides)
        self.at = 0
        Fake.started.append(tuple(request.overrides))
        Fake.alive.append(self)
        Fake.most = max(Fake.most, len(Fake.alive))
        reason = next((r for w, r in Fake.world.get("fails", {}).items() if w in request.overrides), None)
        room = Fake.world.get("room", 9) if len(Fake.alive) > 1 else 9
        if reason is None and self.batch > 16 * room:
            reason = ("memory", "CUDA out of memory")
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
        phases = {"forward": seconds, "checkpoint": 0.0}
        if "checkpoints.every" in self.words:  # half a second to write one, a hundredth where there is time to
            every = int(self.words["checkpoints.every"].split()[0])
            saves = (self.at - 1) // every - (first - 2) // every
            phases["checkpoint"] = saves * (0.01 if every * seconds / updates > 0.5 else 0.5)
        return Block(first, updates, samples, seconds, phases, losses, (seconds / updates,) * updates, 0.5)

    def go(self, updates: int) -> Block:
        assert self in Fake.alive, "a child that was closed"
        if self.at + updates >= Fake.world.get("breaks", 10**9):
            error = SteppedProcessError("failed", "its loss is not finite")
            error.child = self
            raise error
        return self._block(updates)

    def outputs(self):
        return {"logits": np.ones((2, 4))}

    def evaluate(self, name, most=60.0):
        return 3.0, True

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


def climbed(*chosen: str, request: RunRequest | None = None, state: BenchmarkState | None = None, **more):
    request = request or toy()
    said: list[str] = []
    one = benchmark.Benchmark(
        request, load(request), state or BenchmarkState(), repeats=4, steps=10, say=said.append, **more
    )
    try:
        one.run(chosen)
    finally:
        one.close()
    return one, said


def test_what_helps_is_kept_together_and_what_does_not_is_not(world):
    world["speeds"] = {"train.compile=default": 1.3, "device.channels_last=false": 0.8, "loader.workers=2": 1.2}
    one, said = climbed("compile", "channels_last", "workers", "fused")
    assert Fake.most == 2
    verdicts = {r.title: r.verdict for r in one.state.results}
    assert verdicts["compiled, default"] == "faster" and verdicts["without channels_last"] == "slower"
    assert verdicts["without fused"] in ("no difference", "faster by less than 1 %", "slower")
    kept = one.kept()
    assert kept.switch == TOGETHER and set(kept.words) == {"train.compile=default", "loader.workers=2"}
    assert kept.ratio == pytest.approx(1.56, rel=0.02)
    assert any("together" in line for line in said)


def test_the_best_alone_is_kept_where_together_is_slower(world):
    world["speeds"] = {"train.compile=default": 1.3, "loader.workers=1": 1.2}
    world["fails"] = {}

    class Clash(Fake):
        @property
        def speed(self):
            both = self.words.get("train.compile") == "default" and self.words.get("loader.workers") == "1"
            return 900.0 if both else super().speed

    benchmark.SteppedProcess = Clash
    one, _ = climbed("compile", "workers")
    assert [r.verdict for r in one.state.results if r.switch == TOGETHER] == ["slower"]
    assert one.kept().title == "compiled, default"


def test_a_larger_batch_is_measured_and_never_chosen(world):
    world["speeds"] = {"train.batch_size=32": 1.5}
    one, _ = climbed("batch")
    result = one.state.found("batch", "batch 32")
    assert result.ratio == pytest.approx(3.0, rel=0.02) and "not kept" in result.verdict
    assert result.loss_drift is None, "other samples: their losses are not compared"
    assert one.kept() is None


def test_what_drifts_is_not_chosen(world):
    world["speeds"] = {"train.precision=bf16": 2.0}
    world["drifts"] = {"train.precision=bf16": 0.05}
    one, _ = climbed("precision")
    (result,) = one.state.results
    assert result.loss_drift == pytest.approx(0.05, rel=0.05) and result.verdict == "faster; not kept: numerical drift"
    assert one.kept() is None
    world["drifts"] = {"train.precision=bf16": 0.002}
    one, _ = climbed("precision")
    assert one.kept().title == "bf16"


def test_drift_is_from_float32_and_not_from_the_recipe_as_shipped(world):
    world["machine"] = GPU
    world["drifts"] = {"train.precision=no": -0.03}
    one, _ = climbed("fused")
    assert switches.REFERENCE[0] in Fake.started[1]
    assert one.state.shipped_drift[0] == pytest.approx(0.03 / 0.97, rel=0.05)
    assert one.state.results[0].loss_drift == pytest.approx(0.03 / 0.97, rel=0.05)


def test_a_switch_that_cannot_be_trained_fails_alone(world):
    world["fails"] = {"train.compile=default": ("failed", "CppCompileError"), "loader.workers=2": ("memory", "killed")}
    world["speeds"] = {"loader.workers=1": 1.2}
    one, _ = climbed("compile", "workers")
    assert one.state.found("compile", "compiled, default").verdict == "failed: CppCompileError"
    assert one.state.found("workers", "2 workers").failed == "out of memory: killed"
    assert one.state.found("workers", "4 workers") is None, "the search goes on beyond what failed"
    assert one.kept().title == "1 worker"


def test_what_fits_only_alone_is_measured_alone(world):
    world["machine"] = GPU
    world["room"] = 1
    one, _ = climbed("batch")
    result = one.state.found("batch", "batch 32")
    assert "not measured in alternating blocks" in result.note and result.ratio == pytest.approx(2.0, rel=0.05)
    assert one.state.found("batch", "batch 64").ratio == pytest.approx(4.0, rel=0.05)
    assert benchmark_report.largest(one.state) == (64, "larger ones were not tried")


def test_the_largest_batch_is_looked_for_beyond_the_fastest(world):
    world["machine"] = GPU
    world["speeds"] = {"train.batch_size=32": 0.25}
    world["fails"] = {"train.batch_size=64": ("memory", "CUDA out of memory")}
    one, _ = climbed("batch")
    assert one.state.found("batch", "batch 32").ratio < 0.6
    assert one.state.found("batch", "batch 64").failed == "out of memory: CUDA out of memory"
    assert benchmark_report.largest(one.state) == (32, "64 is out of memory")
    assert "micro-batch 32 fits into memory; 64 is out of memory" in benchmark_report.table(one.state, None)
    world["machine"] = MACHINE
    two, _ = climbed("batch")
    assert two.state.found("batch", "batch 64") is None, "of use on a CPU is what is faster"


def test_the_search_for_workers_looks_between(world):
    world["speeds"] = {f"loader.workers={n}": s for n, s in ((1, 1.1), (2, 1.3), (3, 1.5), (4, 1.2))}
    one, _ = climbed("workers")
    assert [r.number for r in one.state.results] == [1, 2, 4, 3]
    assert one.kept().title == "3 workers"


def test_reading_ahead_is_tried_with_the_best_number_of_workers(world):
    world["speeds"] = {"loader.workers=4": 1.3, "loader.prefetch=8": 1.2}
    one, _ = climbed("workers", "prefetch")
    assert one.state.found("prefetch", "8 batches ahead").words == ("loader.workers=4", "loader.prefetch=8")
    assert one.kept().title == "8 batches ahead", "what sets the same key is not taken twice"


def test_fewer_evaluations_are_computed_and_not_chosen(world):
    request = toy("train.length=1000 steps", "evaluations={val: {every: 10 steps}}", "best=null")
    one, _ = climbed("evaluations", "checkpoints", request=request)
    half, none = (r for r in one.state.results if r.switch == "evaluations")
    pace, one_of_both = 16 / 1000, 6.0  # the EMA weights are evaluated too
    assert half.ratio == pytest.approx((1000 * pace + 100 * one_of_both) / (1000 * pace + 50 * one_of_both), rel=0.01)
    assert none.ratio == pytest.approx((1000 * pace + 100 * one_of_both) / (1000 * pace + one_of_both), rel=0.01)
    assert half.low is None and "computed; not kept" in half.verdict and one.kept() is None
    saved = one.state.found("checkpoints", "final checkpoint only")
    # Every 5 updates of 16 ms one that takes half a second: it waits for the one before. The last is waited for.
    often, seldom = 200 * (0.5 - 5 * pace) + 5 * pace, 0.5
    assert saved.ratio == pytest.approx((1000 * pace + often) / (1000 * pace + seldom), rel=0.01)
    assert "checkpoint 0.01" in saved.note and "writing 0.5 s" in saved.note


def test_the_recipe_as_shipped_must_train(world):
    world["fails"] = {"seed=7": ("user", "bad", UserError("data.train", "is not there"))}
    with pytest.raises(UserError, match="is not there"):
        climbed("fused", request=toy("seed=7"))
    world["breaks"] = 2
    with pytest.raises(UserError, match="the recipe as shipped: its loss is not finite"):
        climbed("fused")


def test_a_recipe_that_diverges_late_begins_again_once(world):
    world["breaks"] = 100
    one, _ = climbed("fused", "channels_last", "threads")  # after some tries the recipe as shipped is at 100 updates
    assert sum(words == () for words in Fake.started) > 1
    assert all(not result.failed for result in one.state.results) and len(one.state.results) >= 4


def test_a_benchmark_is_not_continued_on_another_machine(world):
    one, _ = climbed("fused")
    world["machine"] = {**MACHINE, "cpu": "another"}
    with pytest.raises(UserError, match="cpu was made up and is another"):
        climbed("fused", state=one.state)


def test_the_state_reads_back(tmp_path, world):
    one, _ = climbed("fused", "threads", "tf32", "evaluations")
    one.state.save(tmp_path / "benchmark.json")
    again = BenchmarkState.read(tmp_path / "benchmark.json")
    assert again == one.state and again.absent == {"tf32": "no effect on a CPU"}
    (tmp_path / "benchmark.json").write_text('{"results": [{"nonsense": 1}]}')
    assert BenchmarkState.read(tmp_path / "benchmark.json") == BenchmarkState()
    before = len(Fake.started)
    climbed("fused", "threads", state=again)
    assert len(Fake.started) == before + 1, "only the recipe as shipped is started"


# ---- the verb --------------------------------------------------------------------------------------------------------


def test_an_interrupted_benchmark_goes_on_and_ends_in_mlflow_and_a_recipe(world, store, tmp_path):
    world["speeds"] = {"loader.workers=2": 1.4}
    new, said = tmp_path / "fast.yaml", []

    def stop(line: str) -> None:
        if line.startswith("workers") and "1 worker" in line:
            os.kill(os.getpid(), signal.SIGTERM)  # as a scheduler does

    only = ("fused", "workers")
    with pytest.raises(KeyboardInterrupt):
        benchmark_command.command(toy(), only=only, repeats=3, steps=5, say=stop)
    assert [folder.info().status for folder in Store.locate().runs() if "-bench-" in folder.name] == ["KILLED"]
    begun, there = len(Fake.started), signal.getsignal(signal.SIGTERM)
    assert benchmark_command.command(toy(), only=only, repeats=3, steps=5, resume=True, write=new, say=said.append) == 0
    assert signal.getsignal(signal.SIGTERM) is there
    assert not any(word == ("loader.workers=1",) for word in Fake.started[begun:]), "measured again"
    text = new.read_text()
    assert loader.load(new, (), ("toy",)).loader.workers == 2
    assert "# speed    x 1." in text and TOY.read_text() in text.replace("loader: {workers: 2}\n", "").replace(
        "".join(line + "\n" for line in text.split("\n") if line.startswith("#")), ""
    )
    client = Store.locate().client()
    experiment = client.get_experiment_by_name("toy-bench")
    found = client.search_runs([experiment.experiment_id])
    (parent,) = [r for r in found if r.data.tags.get("trainkit.benchmark") == "benchmark"]
    nested = [r for r in found if r.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert {r.data.params["change"] for r in nested} >= {"without fused", "1 worker", "2 workers", "4 workers"}
    assert len(nested) == len({r.data.params["change"] for r in nested}), "a try has one run"
    two = next(r for r in nested if r.data.params["change"] == "2 workers")
    assert two.data.metrics["speed/ratio"] == pytest.approx(1.4, rel=0.02)
    assert parent.info.status == "FINISHED"
    files = {f.path for f in client.list_artifacts(parent.info.run_id, "tables")}
    assert files == {"tables/benchmark.txt", "tables/benchmark.csv"}
    assert {f.path for f in client.list_artifacts(parent.info.run_id, "figures")} == {"figures/benchmark.png"}
    with pytest.raises(UserError, match="no unfinished run"):
        benchmark_command.command(toy(), only=only, resume=True)


def test_mistakes_are_told_before_anything_is_measured(world, tmp_path):
    there = tmp_path / "there.yaml"
    there.write_text("name: x\n")
    for words, what in (
        ({"only": ("wrokers",)}, "no switch 'wrokers'"),
        ({"repeats": 1}, "--repeats"),
        ({"steps": 0}, "--steps"),
        ({"write": there}, "already exists"),
        ({"write": tmp_path / "no" / "x.yaml"}, "no such folder"),
        ({"write": tmp_path / "x.txt"}, "YAML"),
    ):
        with pytest.raises(UserError, match=what):
            benchmark_command.command(toy(), **words)
    teacher = RunRequest(loader.RECIPES / "adadistill.yaml")
    with pytest.raises(UserError, match="face_teacher"):
        benchmark_command.command(teacher, write=tmp_path / "x.yaml")
    assert not Fake.started


def test_nothing_is_written_where_nothing_helps(world, tmp_path):
    one, _ = climbed("batch")
    new = tmp_path / "fast.yaml"
    told = benchmark_command._write(toy(), load(toy()), one.state, one.kept(), new, None)
    assert "was not written" in told and not new.exists()


def test_the_table_says_what_was_measured(world):
    world["speeds"] = {"loader.workers=2": 1.4, "device.channels_last=false": 0.5}
    one, _ = climbed("workers", "channels_last", "pin")
    text = benchmark_report.table(one.state, one.kept())
    lines = text.splitlines()
    assert lines[1].split()[:2] == ["as", "shipped"]
    assert next(line for line in lines if "2 workers" in line).endswith("kept")
    assert next(line for line in lines if "channels_last" in line).endswith("slower")
    assert "not measured  pin: no effect on a CPU" in text and "made up" in text


def test_the_picture_has_a_line_for_each_try():
    def row(switch, change, ratio, low, high, verdict):
        return {"switch": switch, "change": change, "ratio": ratio, "low": low, "high": high, "verdict": verdict}

    listed = [
        row("", "as shipped", 1.0, None, None, ""),
        row("workers", "2 workers", 1.4, 1.35, 1.45, "kept"),
        row("precision", "bf16", 0.4, 0.38, 0.42, "slower"),
        row("evaluations", "half", 1.1, None, None, "computed; not kept"),
        row("compile", "compiled, default", None, None, None, "failed: no compiler"),
    ]
    (axes,) = drawing.figure(listed).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["2 workers", "evaluations: half", "precision: bf16"]
    assert axes.get_xscale() == "log"
    assert len(drawing.figure(listed[:1]).axes) == 1


# ---- recipes written again -------------------------------------------------------------------------------------------

CHANGES = (
    "train.compile=default", "loader.workers=4", "loader.prefetch=4", "device.channels_last=false", "optim.fused=false",
    "train.precision=bf16", "device.threads=2", "log.every=500 steps", "checkpoints.every=null", "seed=5",
)  # fmt: skip


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_rewritten_recipe_says_what_the_overrides_say_and_keeps_every_comment(path):
    text = yaml_editor.rewrite(path, CHANGES, ["benchmark  x 1.2"])
    comments = [line[line.index("#") :] for line in path.read_text().splitlines() if "#" in line]
    left = text
    for comment in comments:
        assert comment in left
        left = left.replace(comment, "", 1)
    assert "# benchmark  x 1.2\n" in text
    untouched = [line for line in path.read_text().splitlines() if line.startswith("  ") and "{" not in line]
    assert sum(line in text.splitlines() for line in untouched) >= len(untouched) - 4


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_changed_texts_read_as_changed_trees(data):
    text = data.draw(st.sampled_from((
        "a: 1\nb: {c: 2, d: [1, 2]}  # said\ne:\n  f: x  # more\n  g:\n  - h: 1\n    i: 2\n",
        "a: {b: {c: 1}}\ne:\n  # first\n  f: 'quoted, {text}'\n\n  g: null\n# last\n",
        "e:\n  f:\n    g: 1\n  h: |\n    several\n    lines\na:\nb: {}\n",
    )))  # fmt: skip
    import yaml

    for _ in range(data.draw(st.integers(1, 3))):
        before = yaml.safe_load(text)
        key = data.draw(st.sampled_from(("a", "b", "e", "new")))
        inner = data.draw(st.sampled_from((None, "c", "f", "g", "z")))
        path = (key,) if inner is None or not isinstance(before.get(key, {}) or {}, dict) else (key, inner)
        value = data.draw(st.sampled_from((3, 0.5, None, True, "500 steps", "a, b", [1, "x"], {"k": 1})))
        text = yaml_editor.change(text, path, value)
        expected, node = before, before
        for part in path[:-1]:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        node[path[-1]] = value
        assert yaml.safe_load(text) == expected, text


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
        assert one.evaluate("val")[1] and one.outputs()["logits"].shape == (8, 4)
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
def test_a_real_benchmark_of_the_toy(store, tmp_path):
    said: list[str] = []
    only = ("channels_last", "checkpoints", "evaluations")
    assert benchmark_command.command(toy(), only=only, repeats=2, steps=5, say=said.append) == 0
    table = "\n".join(said)
    assert "without channels_last" in table and "checkpoints half as often" in table
    result = next(line for line in said if line.startswith("channels_last"))
    assert "loss drift" in result
