"""Memory that runs out: the same update in smaller portions, to the bits of a recipe that asked for them."""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs import ROOT

from tests.checkpoint.test_async_save import Folder
from tests.training.test_nonfinite import QUIET, Noted, bits, held, poisoned, same
from trainkit.config.run_request import RunRequest, load
from trainkit.distributed.runtime import Runtime
from trainkit.errors import UserError
from trainkit.interfaces import Networks
from trainkit.models import recomputation
from trainkit.tracking.journal import Event
from trainkit.training import out_of_memory
from trainkit.training.checkpointer import Resume
from trainkit.training.plan import Plan, halved
from trainkit.training.run_logger import RunLogger
from trainkit.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("unsent")

HALVE = "train={{length: 12 steps, batch_size: 16, micro_batch: {}, ema: 0.9, on_oom: halve}}"
TASK = "task={{name: poisoned, remembers: false, {}}}"
SHORT = [
    (error, late) for error in ("cpu", "gpu", "python") for late in ("false", "true")
]  # what is raised, and whether in the backward pass


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A training whose recipe asks for micro-batches of 4: batch norm, dropout, an average, mirrored images."""
    folder = tmp_path_factory.mktemp("small")
    poisoned(folder, TASK.format(""), HALVE.format(4))
    return held(folder)


def test_from_the_first_step_on_it_is_the_training_that_small_micro_batches_make(tmp_path, small):
    """The statistics of batch norm are those of before the first try, no sample is skipped and none comes twice."""
    for error, late in SHORT:
        folder = tmp_path / f"{error}-{late}"
        run = poisoned(folder, TASK.format(f"room: 4, error: {error}, late: {late}"), HALVE.format(16))
        told = [(step, data["key"], data["size"]) for step, name, data in run.tracker.events if name == "memory"]
        assert told == [(0, "train.micro_batch", 8), (0, "train.micro_batch", 4)]
        assert len(small) == 12 and all(same(bits(a), bits(b)) for a, b in zip(held(folder), small, strict=True))


def test_in_the_middle_too_and_a_resumed_run_goes_on_with_what_was_chosen(tmp_path, small):
    """Until step 6 the training of whole batches, then that of halves: each to the bits."""
    words = TASK.format("room: 8, steps: [6]"), HALVE.format(16)
    poisoned(tmp_path / "whole", TASK.format(""), HALVE.format(16), stop=7)
    before = tmp_path / "whole" / "checkpoints" / "step-000000006"
    run = poisoned(tmp_path / "short", *words)
    assert [name for _, name, _ in run.tracker.events] == ["memory"]
    poisoned(tmp_path / "halves", TASK.format(""), HALVE.format(8), at=before)
    short = {loaded.step: loaded for loaded in held(tmp_path / "short")}
    assert same(bits(short[6]), bits(held(tmp_path / "whole")[5])) and short[6].state["micro_batch"] is None
    assert same(bits(short[12]), bits(held(tmp_path / "halves")[-1])) and short[12].state["micro_batch"] == 8
    # The step at which memory ran out is behind: without what the checkpoint says, batches would be whole again.
    poisoned(tmp_path / "again", *words, at=tmp_path / "short" / "checkpoints" / "step-000000009")
    assert same(bits(held(tmp_path / "again")[-1]), bits(short[12]))
    assert not same(bits(small[-1]), bits(short[12]))


def test_what_was_halved_behind_the_checkpoint_is_halved_again_though_memory_would_suffice_now(tmp_path):
    """Else a run that was killed before its next checkpoint would end with other bits than one that was not."""
    words = HALVE.format(16), "evaluations={val: {every: 3 steps, batch_size: 8}}"
    short = poisoned(tmp_path / "short", TASK.format("room: 4, steps: [7], room_scored: 5"), *words)
    behind = [Event(0, step, name, data) for step, name, data in short.tracker.events if name == "memory"]
    sizes = [(e.step, e.data["size"]) for e in behind]
    assert sizes == [(0, 4), (7, 8), (7, 4)], "an evaluation before the first update, and an update in two goes"
    at = tmp_path / "short" / "checkpoints" / "step-000000005"
    run = poisoned(tmp_path / "again", TASK.format(""), *words, at=at, replayed=behind[1:])
    assert [(step, data) for step, name, data in run.tracker.events if name == "memory"] == [
        (e.step, e.data) for e in behind[1:]
    ]
    assert same(bits(held(tmp_path / "again")[-1]), bits(held(tmp_path / "short")[-1]))
    other = poisoned(tmp_path / "other", TASK.format(""), *words, at=at)
    assert not same(bits(held(other.folder.path)[-1]), bits(held(tmp_path / "short")[-1]))


def test_gradients_are_those_of_the_whole_batch(tmp_path):
    """Without batch norm and dropout, which see micro-batches, weights after 12 updates differ by rounding."""
    task = "norm: false, dropout: 0.0"
    poisoned(tmp_path / "whole", TASK.format(task), HALVE.format(16))
    poisoned(tmp_path / "parts", TASK.format(f"{task}, room: 1"), HALVE.format(16))
    whole, networks = (bits(held(tmp_path / name)[0])["model"] for name in ("whole", "parts"))
    for name in whole:
        torch.testing.assert_close(whole[name], networks[name], rtol=1e-6, atol=1e-6)
    assert held(tmp_path / "parts")[-1].state["micro_batch"] == 1


@pytest.mark.parametrize(
    ("task", "train", "message"),
    [
        ("room: 4", "train.on_oom=stop", r"ran out \(RuntimeError.*train\.micro_batch=\d+, .*train.on_oom=halve"),
        ("room: 0", HALVE.format(16), "step 0: memory ran out, in a micro-batch of one sample"),
        ("room: 4, remembers: true", HALVE.format(16), "what the task remembers follows micro-batches"),
    ],
)
def test_where_nothing_can_be_halved_the_run_ends_in_words(tmp_path, task, train, message):
    with pytest.raises(UserError, match=message):
        poisoned(tmp_path, f"task={{name: poisoned, {'' if 'rem' in task else 'remembers: false, '}{task}}}", train)


def test_other_errors_are_not_taken_for_it():
    assert not out_of_memory.is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not out_of_memory.is_out_of_memory(ValueError("out of memory"))
    with pytest.raises(RuntimeError, match="shapes"), out_of_memory.Attempt():
        torch.matmul(torch.zeros(2, 3), torch.zeros(2, 3))
    for act in (lambda: torch.empty(1 << 55), lambda: bytearray(1 << 60), lambda: np.empty(1 << 58)):
        with out_of_memory.Attempt() as attempt:
            act()
        assert attempt.oom_reason


@pytest.mark.parametrize(("block", "together"), [(4, ""), (1, "its loss is over all pixels of a micro-batch")])
def test_what_belongs_together_is_not_cut(block, together):
    recipe = SimpleNamespace(train=SimpleNamespace(on_oom="halve"), task=None)
    machine, state = SimpleNamespace(world=1, sharded=False), SimpleNamespace(step=3)
    networks = Networks(torch.nn.Identity(), indivisible=together)
    micro_batching = out_of_memory.MicroBatching(recipe, SimpleNamespace(block=block), networks, machine, state, None)
    with pytest.raises(UserError, match=r"step 3: memory ran out .*(4 samples belong together|over all pixels)"):
        micro_batching.halve(Plan(1, 1, 16, 16, 1, 1, 0), "MemoryError")


COMPARES = "task={{name: poisoned, compares: true, {}}}"


@pytest.fixture(scope="module")
def parted(tmp_path_factory):
    """A training whose loss compares 16 samples and whose network, with batch norm and dropout, sees 4 at once."""
    folder = tmp_path_factory.mktemp("parted")
    poisoned(folder, COMPARES.format("room: 4"), HALVE.format(16))
    return held(folder)


@pytest.mark.parametrize(("error", "late"), SHORT[1:])
def test_a_loss_over_the_micro_batch_stays_whole_whatever_ran_out_of_memory(tmp_path, parted, error, late):
    run = poisoned(tmp_path, COMPARES.format(f"room: 4, error: {error}, late: {late}"), HALVE.format(16))
    told = [(step, data["key"], data["size"]) for step, name, data in run.tracker.events if name == "memory"]
    assert told == [(0, "train.micro_batch.part", 8), (0, "train.micro_batch.part", 4)]
    assert all(same(bits(a), bits(b)) for a, b in zip(held(tmp_path), parted, strict=True))


def test_parts_under_a_whole_loss_give_the_weights_and_the_memory_of_the_whole(tmp_path):
    """But for rounding, where no layer looks across samples; in micro-batches of one part they are others."""
    task = "norm: false, dropout: 0.0"
    poisoned(tmp_path / "whole", COMPARES.format(task), HALVE.format(16))
    poisoned(tmp_path / "parts", COMPARES.format(f"{task}, room: 1"), HALVE.format(16))
    poisoned(tmp_path / "small", COMPARES.format(task), HALVE.format(4))
    whole, parts, small = (bits(held(tmp_path / name)[-1]) for name in ("whole", "parts", "small"))
    assert held(tmp_path / "parts")[-1].state["micro_batch"] == 1
    for file in ("model", "memory"):
        for name in whole[file]:
            torch.testing.assert_close(whole[file][name], parts[file][name], rtol=1e-5, atol=1e-5)
    assert (whole["model"]["conv.weight"] - small["model"]["conv.weight"]).abs().max() > 1e-3


def test_parts_go_on_in_a_resumed_run_and_come_back_behind_its_checkpoint(tmp_path, parted):
    words = COMPARES.format("room: 4, steps: [6]"), HALVE.format(16)
    short = poisoned(tmp_path / "short", *words)
    behind = [Event(0, step, name, data) for step, name, data in short.tracker.events if name == "memory"]
    last = held(tmp_path / "short")[-1]
    assert [e.step for e in behind] == [6, 6] and last.state["micro_batch"] == 4
    for at, events in (("step-000000009", ()), ("step-000000005", behind)):
        folder = tmp_path / at
        poisoned(
            folder, COMPARES.format(""), HALVE.format(16), at=tmp_path / "short" / "checkpoints" / at, replayed=events
        )
        assert same(bits(held(folder)[-1]), bits(last))
    assert not same(bits(parted[-1]), bits(last))


def test_the_second_forward_repeats_random_numbers_and_moves_no_statistics(monkeypatch):
    def gradients(act):
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)).double()
        x = torch.randn(12, 5, dtype=torch.float64)
        torch.manual_seed(4)
        out = act(lambda rows: net(x[rows]), net)
        (out @ out.T).softmax(1).square().sum().backward()
        return [p.grad for p in net.parameters()], list(net.buffers()), torch.rand(3)

    def plainly(compute, net):
        return torch.cat([compute(slice(first, first + 4)) for first in (0, 4, 8)])

    def in_parts(compute, net):
        return recomputation.forward_in_parts(compute, 12, 4, net, torch.device("cpu"))

    wanted = gradients(plainly)
    torch.testing.assert_close(gradients(in_parts), wanted, rtol=0, atol=0)
    monkeypatch.setattr(recomputation, "buffers_kept", lambda net, refuse: contextlib.nullcontext())
    with pytest.raises(AssertionError):
        torch.testing.assert_close(gradients(in_parts), wanted, rtol=0, atol=0)


def test_halves_divide_the_share_of_a_process():
    plan, sizes = Plan(1, 1, 2 * 60, 60, 1, 2, 0), []
    while plan.micro_batch > 1:
        plan = halved(plan)
        sizes.append(plan.micro_batch)
        assert plan.micro_batch * plan.accumulation * plan.world == 120
    assert sizes == [30, 15, 6, 3, 1] and dataclasses.replace(plan, micro_batch=60, accumulation=1).batch_size == 120


def test_an_evaluation_halves_its_batches_and_changes_no_bit_of_the_training(tmp_path):
    scored = ["evaluations={val: {every: 3 steps, batch_size: 32}}", "best={metric: val/accuracy}"]
    words = [HALVE.format(8), *scored, "checkpoints={every: 3 steps, keep_last: 50}"]
    free = poisoned(tmp_path / "free", TASK.format(""), *words)
    run = poisoned(tmp_path / "short", TASK.format("room_scored: 5"), *words)
    last, other = held(tmp_path / "short")[-1], held(tmp_path / "free")[-1]
    assert last.state["eval_batches"] == {"val": 4} and same(bits(last), bits(other))
    assert run.tracker.metrics["val/accuracy"] == free.tracker.metrics["val/accuracy"]
    with pytest.raises(UserError, match=r"evaluations\.val\.batch_size: out of memory with 32 .*train\.on_oom=halve"):
        poisoned(tmp_path / "stop", TASK.format("room_scored: 5"), *words, "train.on_oom=stop")


def limited(folder, recipe, *words, room, at=None):
    """A recipe trained for 4 steps with memory for `room` samples in the first convolution of its network, from step 1
    on: the sizes that were gone on with, and the checkpoints."""
    words = (*QUIET, "train.on_oom=halve", "train.length=4 steps", "train.schedule={name: constant}", *words)
    asked = load(RunRequest(ROOT / "recipes" / recipe, list(words)))
    folder.mkdir()
    run = RunLogger(asked, Folder(folder), Noted(), main=True)
    with Trainer(asked, asked.data.open(0), Runtime(asked), run, resume=Resume(at)) as trainer:
        first = next(m for m in trainer.model.bare.modules() if isinstance(m, torch.nn.Conv2d))

        def short(_, given):
            if first.training and trainer.state.step and len(given[0]) > room:
                raise MemoryError

        first.register_forward_pre_hook(short)
        trainer.fit()
    return [(step, data["key"], data["size"]) for step, name, data in run.tracker.events if name == "memory"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "words", "room", "sizes"),
    [
        # Of 20 records 4 are RGB, whose first layer it is.
        ("reid.yaml", ["data.sampler.people=4", "train.batch_size=40", "train.micro_batch=20"], 3, [10, 5, 2]),
        ("segment.yaml", ["task.net.width=0.25"], 2, [4, 2]),
    ],
)
def test_recipes_whose_losses_compare_samples_go_on_in_parts_and_resume_to_the_bit(
    tmp_path, recipe, words, room, sizes
):
    whole, short, resumed = (tmp_path / name for name in ("whole", "short", "resumed"))
    assert limited(whole, recipe, *words, room=1000) == []
    told = limited(short, recipe, *words, room=room)
    assert told == [(1, "train.micro_batch.part", size) for size in sizes]
    assert same(bits(held(short)[0]), bits(held(whole)[0])) and not same(bits(held(short)[-1]), bits(held(whole)[-1]))
    at = short / "checkpoints" / "step-000000002"
    assert limited(resumed, recipe, *words, room=1000, at=at) == []
    assert same(bits(held(resumed)[-1]), bits(held(short)[-1]))


LIMITED = """
import resource, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests/support", {root!r} + "/tests/plugin"]
import torch
torch.set_num_threads(1)
from pathlib import Path
from tests.training.test_nonfinite import poisoned
from tests.training.test_out_of_memory import HALVE, TASK

given = dict(length="3 steps")
train = HALVE.format(16)
poisoned(Path({folder!r}) / "first", TASK.format("norm: false"), train)  # all is imported, all pools are there
size = [int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize")][0]
resource.setrlimit(resource.RLIMIT_AS, (size + (300 << 20), resource.RLIM_INFINITY))
run = poisoned(Path({folder!r}) / "short", TASK.format("norm: false, hoard: 40"), train)
print("SIZES", [data["size"] for _, name, data in run.tracker.events if name == "memory"], run.outcome.step)
"""


@pytest.mark.slow
def test_memory_that_really_runs_out(tmp_path):
    """Each sample needs 40 MB and 300 are free (RLIMIT_AS): 16 at once run out of it, torch says so, and 8 or 4 do."""
    assert resource.RLIMIT_AS
    code = LIMITED.format(root=str(ROOT), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SIZES [8, 4] 12" in done.stdout or "SIZES [8] 12" in done.stdout, done.stdout
