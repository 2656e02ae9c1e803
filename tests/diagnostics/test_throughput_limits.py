"""What loader, network and evaluations could reach alone: right where it is known, absent with the reason where not."""

import json
import re
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs import PLUGIN, TOY, all_same, run, spawn

from trainkit.config.run_request import RunRequest, load
from trainkit.diagnostics import throughput_limits
from trainkit.distributed.runtime import Runtime
from trainkit.speed import limits
from trainkit.speed.limits import ThroughputLimits
from trainkit.tracking import journal
from trainkit.tracking.store import Store

if str(PLUGIN) not in sys.path:
    sys.path.insert(0, str(PLUGIN))

SHORT = ("train.length=6 steps", "evaluations.val.every=3 steps", "data.test=16")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(throughput_limits, "SECONDS", 0.1)


@pytest.fixture
def toy():
    """The toy's recipe changed by words, its data, and the machine it is measured on."""

    def made(*words):
        recipe = load(RunRequest(TOY, words, ("toy",)))
        return recipe, recipe.data.open(recipe.seed), Runtime(recipe)

    return made


def slowed(split, seconds):
    """A split that takes so long to read a batch, in workers too."""
    return Slow(split, seconds)


class Slow:
    def __init__(self, split, seconds):
        self.split, self.seconds = split, seconds
        self.name, self.size, self.views, self.digest = split.name, split.size, split.views, split.digest
        self.at_once, self.protocol, self.labels = split.at_once, split.protocol, split.labels
        self.order, self.on_device = split.order, split.on_device

    def fetch(self, indices, epoch, view=None):
        time.sleep(self.seconds)
        return self.split.fetch(indices, epoch, view)


# ---- What is measured


def test_all_is_measured(toy):
    recipe, data, runtime = toy("promote={}")
    found = throughput_limits.measure(recipe, data, runtime, {}, seconds=0.1)
    assert found.absent == {}
    assert found.loader > found.model > 0  # arrays in memory against a network
    # Of a convolution 3 -> 8 in 3 x 3 on 8 x 8 pixels, the gradient of its weights, and three products of 512 x 4.
    assert found.flops_per_sample == 2 * 2 * 64 * 8 * 27 + 3 * 2 * 512 * 4
    assert found.peak_flops > 1e8 and "a timed float32 matrix product" in found.peak_source
    assert 0 < limits.mfu(found.model, found) < 1


def test_nobody_watches_over_a_training_that_is_only_measured(toy, tmp_path, monkeypatch):
    """A watchdog that outlived it would end the run that follows, as one that hangs."""
    monkeypatch.chdir(tmp_path)
    recipe, data, runtime = toy("limits.hang=2 s")
    assert throughput_limits.measure(recipe, data, runtime, {}, seconds=0.1).absent == {}
    assert not list(tmp_path.iterdir()), "nor are its stacks written where somebody happens to stand"


def test_a_slow_loader_is_the_loaders_own(toy):
    recipe, data, runtime = toy()
    slow = replace(data, train=slowed(data.train, 0.05))  # 8 samples in 50 ms
    found = throughput_limits.measure(recipe, slow, runtime, {}, seconds=0.3)
    assert 40 < found.loader <= 8 / 0.05
    assert found.model > 1.5 * found.loader


@pytest.mark.slow
def test_workers_read_side_by_side(toy):
    recipe, data, runtime = toy("loader.workers=2", "loader.prefetch=1")
    slow = replace(data, train=slowed(data.train, 0.1))
    found = throughput_limits.measure(recipe, slow, runtime, {}, seconds=0.5)
    assert 1.1 * 8 / 0.1 < found.loader <= 1.1 * 2 * 8 / 0.1


def test_a_slow_network_is_the_networks_own(toy, monkeypatch):
    recipe, data, runtime = toy()
    kind = type(recipe.task)
    plain = kind.loss
    monkeypatch.setattr(kind, "loss", lambda self, *args: (time.sleep(0.02), plain(self, *args))[1])
    found = throughput_limits.measure(recipe, data, runtime, {}, seconds=0.3)
    assert 80 < found.model <= 8 / 0.02
    assert found.loader > 2 * found.model


def test_a_recipe_of_two_batches(toy):
    recipe, data, runtime = toy("data.samples=32", "train.length=2 steps", "loader.workers=2")
    found = throughput_limits.measure(recipe, data, runtime, {}, seconds=0.1)
    assert found.absent == {} and found.loader > 0 and found.model > 0


def test_frozen_networks_and_tables_are_made_for_the_one_batch_only(toy, monkeypatch):
    # The toy compares each row of the table with what its frozen network says of the image.
    recipe, data, runtime = toy("task.teacher=oracle")
    read = []
    plain = data.train.fetch
    monkeypatch.setattr(
        data.train, "fetch", lambda rows, epoch, view=None: read.append(len(rows)) or plain(rows, epoch, view)
    )
    alone = throughput_limits._Alone(recipe, data, runtime, {}, 0.1, lambda: False)
    alone.plan = throughput_limits.Plan.make(recipe, data, 1, 0)
    frozen = throughput_limits.RepeatedBatches(data.train, alone.plan, runtime)
    seconds, counted = alone._model(frozen)
    assert seconds > 0 and counted > 0
    assert sum(read) == 16 + 1 + 2 * 16  # the batch, one for the shape of the table, and its samples in both views


def test_a_batch_that_is_changed_in_place_is_whole_the_next_time(toy):
    recipe, data, runtime = toy()
    frozen = throughput_limits.RepeatedBatches(data.train, throughput_limits.Plan.make(recipe, data, 1, 0), runtime)
    first = frozen.fetch(np.arange(8), 0)
    kept = first["image"].clone()
    first["image"].zero_()
    assert torch.equal(frozen.fetch(np.arange(8), 3)["image"], kept)
    assert torch.equal(first["index"], torch.arange(8))
    assert not torch.equal(frozen.fetch(np.arange(8, 16), 0)["image"], kept)


def test_steady_parts():
    assert throughput_limits.steady(np.full(50, 2.0)) == 2.0
    assert throughput_limits.steady(np.array([3.0])) == 3.0
    burst = np.full(100, 1.0)
    burst[20:50] = 9.0  # a neighbour, for two parts of five
    assert throughput_limits.steady(burst) == 1.0
    rhythm = np.tile([1.0] * 9 + [11.0], 20)
    assert throughput_limits.steady(rhythm) == pytest.approx(2.0)


# ---- What is not


def test_what_fails_is_absent_with_the_reason(toy):
    recipe, data, runtime = toy("task.nan_at=0", "data.damaged=3")
    found = throughput_limits.measure(recipe, data, runtime, {}, seconds=0.1)
    assert found.model is None and found.loader is None and found.flops_per_sample is None
    assert "damaged" in found.absent["loader"]
    assert found.peak_flops > 0
    assert limits.share(100.0, found) is None and limits.mfu(100.0, found) is None


def test_a_loss_that_is_not_finite_is_no_figure(toy):
    recipe, data, runtime = toy("task.nan_at=0")
    found = throughput_limits.measure(recipe, data, runtime, {}, seconds=0.1)
    assert found.model is None and "finite" in found.absent["model"]
    assert found.loader > 0


def test_a_run_that_is_told_to_stop_measures_no_further(toy, tmp_path):
    recipe, data, runtime = toy("log.ceilings=measure")
    asked = iter(range(10**9))
    store = Store(tmp_path, "sqlite:///none")
    found = throughput_limits.ensure(recipe, data, runtime, store, {}, lambda text: None, lambda: next(asked) > 10)
    assert "the run was stopped" in found.absent.values()
    assert not (tmp_path / throughput_limits.FOLDER).exists()


# ---- When, and what is kept


@pytest.fixture
def measured(monkeypatch):
    """How often something was measured; nothing is."""
    times = []
    found = ThroughputLimits(loader=10.0, model=20.0, absent={"x": "y"})

    def measure(*args):
        times.append(args)
        return found

    monkeypatch.setattr(throughput_limits, "measure", measure)
    return times


def ensured(recipe, data, runtime, home):
    return throughput_limits.ensure(recipe, data, runtime, Store(home, "sqlite:///none"), {}, lambda text: None)


def test_where_nothing_is_known_a_run_measures_nothing_by_itself(toy, measured, tmp_path, monkeypatch):
    monkeypatch.setattr(throughput_limits, "fingerprint", lambda *args: pytest.fail("looked further than needed"))
    for words in ((), ("log.ceilings=off",)):
        assert ensured(*toy(*words), tmp_path) is None
    assert not measured


def test_what_was_measured_is_known_to_later_runs(toy, measured, tmp_path):
    found = ensured(*toy("log.ceilings=measure"), tmp_path)
    assert found.loader == 10.0 and len(measured) == 1
    assert ensured(*toy("train.length=3 steps", "seed=7"), tmp_path) == found
    assert ensured(*toy("loader.workers=1"), tmp_path) is None and len(measured) == 1
    ensured(*toy("log.ceilings=measure"), tmp_path)
    assert len(measured) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": 1}', "loader", "fingerprint", "negative", "more"])
def test_a_damaged_file_is_not_known(toy, measured, tmp_path, damage):
    ensured(*toy("log.ceilings=measure"), tmp_path)
    (file,) = (tmp_path / throughput_limits.FOLDER).iterdir()
    entry = json.loads(file.read_text())
    if damage == "loader":
        entry["ceilings"]["loader"] = "fast"
    elif damage == "fingerprint":
        entry["fingerprint"] = "another"
    elif damage == "negative":
        entry["ceilings"]["model"] = -1
    elif damage == "more":
        entry["ceilings"]["else"] = 1
    file.write_text(json.dumps(entry) if damage.isalpha() else damage)
    assert ensured(*toy(), tmp_path) is None


def test_a_store_that_cannot_be_written_to_ends_nothing(toy, measured, tmp_path):
    (tmp_path / throughput_limits.FOLDER).write_text("no folder")
    assert ensured(*toy("log.ceilings=measure"), tmp_path).loader == 10.0


def test_data_that_is_too_small_is_the_trainings_own_mistake(toy, measured, tmp_path):
    assert ensured(*toy("data.samples=8", "log.ceilings=measure"), tmp_path) is None and not measured


@pytest.mark.parametrize(
    ("word", "same"),
    [
        ("train.length=7 epochs", True),
        ("optim.lr=0.7", True),
        ("seed=5", True),
        ("log.every=7 steps", True),
        ("evaluations.val.every=9 steps", True),
        ("checkpoints.every=null", True),
        ("name=another", True),
        ("train.batch_size=32", False),
        ("train.micro_batch=4", False),
        ("train.ema=null", False),
        ("loader.workers=3", False),
        ("loader.prefetch=3", False),
        ("device.channels_last=false", False),
        ("data.samples=72", False),
        ("task.dropout=0.1", False),
        ("optim.name=adam", False),
        ("optim.clip_norm=null", False),
        ("evaluations.val.batch_size=4", True),
    ],
)
def test_what_bears_on_the_fingerprint(toy, word, same):
    recipe, data, runtime = toy()
    other = load(RunRequest(TOY, (word,), ("toy",)))
    before = throughput_limits.fingerprint(recipe, data, runtime)
    assert (throughput_limits.fingerprint(other, other.data.open(other.seed), runtime) == before) == same


def test_threads_versions_and_processes_are_in_the_fingerprint(toy, monkeypatch):
    recipe, data, runtime = toy()
    before = throughput_limits.fingerprint(recipe, data, runtime)
    plain = runtime.describe()
    for change in ({"threads": 7}, {"processes": 2}, {"gpu": "another"}, {"precision": "bf16"}):
        monkeypatch.setattr(runtime, "describe", lambda change=change: plain | change)
        assert throughput_limits.fingerprint(recipe, data, runtime) != before
    monkeypatch.setattr(runtime, "describe", lambda: plain)
    assert throughput_limits.fingerprint(recipe, data, runtime) == before
    monkeypatch.setattr(throughput_limits.metadata, "version", lambda name: "0.0")
    assert throughput_limits.fingerprint(recipe, data, runtime) != before


# ---- What stays as it was


def test_generators_and_task_are_as_before(toy):
    recipe, _, _ = toy()
    runtime = SimpleNamespace(
        device=torch.device("cpu"),
        accelerator=SimpleNamespace(free_memory=lambda: None),
    )
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with throughput_limits._unchanged(runtime, recipe):
        torch.rand(7)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_measuring_changes_no_bit_of_a_run_nor_of_one_that_is_resumed(store):
    words = ("train.length=8 steps", "evaluations.val.every=4 steps", "data.test=16", "checkpoints.every=3 steps")
    plain = run(*words, "log.ceilings=off")
    assert "speed/ceiling_loader" not in plain.history.metrics

    def stopping():  # at the first checkpoint of a second run
        return len(list(store.glob("runs/*/checkpoints/step-*3"))) == 2

    cut = run(*words, "log.ceilings=measure", stopping=stopping)
    assert cut.code == 143 and len(cut.history.metrics["speed/ceiling_model"]) == 1
    whole = run(*words, "log.ceilings=measure", resume=cut.folder.name)
    assert all_same(plain, whole) and plain.repeatable == whole.repeatable
    for name in ("speed/ceiling_loader", "speed/ceiling_model"):
        (point,) = whole.history.metrics[name]
        assert point.step == 0 and point.value > 0
    assert not whole.events("repeated")


# ---- What they say


KNOWN = ThroughputLimits(
    loader=310.0,
    model=1900.0,
    flops_per_sample=1.32e9,
    peak_flops=9.895e14,
    peak_source="the data sheet peak for bf16 without sparsity",
    absent={"loader": "the run was stopped"},
)


def test_what_they_say():
    assert limits.lines(KNOWN) == [
        "loader alone          310 samples/s",
        "model alone           1,900 samples/s",
        "operations            1.32 GFLOP per sample, forward and backward pass",
        "peak                  990 TFLOP/s (the data sheet peak for bf16 without sparsity)",
        "model alone uses      0.3 % of the peak",
        "loader: not measured  the run was stopped",
    ]
    assert limits.lines(ThroughputLimits(absent={"model": "x"})) == ["model: not measured  x"]


def test_shares():
    assert limits.share(155.0, KNOWN) == pytest.approx(0.5)
    assert limits.share(155.0, replace(KNOWN, loader=4000.0)) == pytest.approx(155 / 1900)
    assert limits.share(1.0, replace(KNOWN, loader=None)) is None
    assert limits.mfu(1900.0, KNOWN) == pytest.approx(1900 * 1.32e9 / 9.895e14)


def test_metrics_have_names_that_mlflow_takes():
    assert limits.metrics(KNOWN) == {
        "speed/ceiling_loader": 310.0,
        "speed/ceiling_model": 1900.0,
    }
    assert limits.metrics(ThroughputLimits()) == {}


# ---- Several processes, compiled code


@pytest.mark.slow
def test_operations_are_counted_of_a_network_that_is_compiled(toy):
    recipe, data, runtime = toy("train.compile=default", "train.micro_batch=16")
    found = throughput_limits.measure(recipe, data, runtime, {}, seconds=0.1)
    assert found.absent == {} and found.model > 0
    assert found.flops_per_sample == 2 * 2 * 64 * 8 * 27 + 3 * 2 * 512 * 4


@pytest.mark.slow
def test_on_two_processes_there_is_one_figure_for_both(store):
    words = [str(TOY), "--plugin", "toy", "train.length=6 steps", "data.test=16"]
    done = spawn(2, *words, "log.ceilings=measure")
    assert done.returncode == 0, done.stderr
    (folder,) = Store.locate().runs()
    history = journal.read(folder.journal)
    assert history.metrics["speed/ceiling_model"][0].value > 0
    assert history.metrics["speed/ceiling_loader"][0].value > 0
    assert len(re.findall(r"^model alone +\d", done.stdout, re.M)) == 1 and ": not measured" not in done.stdout
