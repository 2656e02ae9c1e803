"""The trainer: what a careless change of it would break, and how deep it lies below the command.

Each of the seven traps has a deliberately wrong version beside it, which its test must notice.
"""

from __future__ import annotations

import ast
import inspect
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from runs import PLUGIN, TOY, run

from tests.checkpoint.test_async_save import Folder
from trainkit.checkpoint import storage
from trainkit.config.run_request import RunRequest, load
from trainkit.data.loader import stream
from trainkit.distributed.runtime import Runtime
from trainkit.distributed.stop_signal import Stop
from trainkit.tracking.tracker import Silent
from trainkit.training import trainer as module
from trainkit.training.checkpointer import Checkpointer
from trainkit.training.gradients import Update
from trainkit.training.model import Model
from trainkit.training.optimizer import Average
from trainkit.training.run_logger import RunLogger
from trainkit.training.trainer import Trainer

SHORT = ("train.length=6 steps", "log.every=100 steps", "checkpoints={every: null}")
PLAIN = (*SHORT, "evaluations={}", "best=null")


def made(*words: str, folder: Path | None = None, kind: type[Trainer] = Trainer, stop=None, tracker=None) -> Trainer:
    """The toy recipe's trainer; silent, or with a folder for checkpoints."""
    if str(PLUGIN) not in sys.path:
        sys.path.insert(0, str(PLUGIN))
    given = {word.partition("=")[0]: word for word in words}
    recipe = load(RunRequest(TOY, tuple(given.values()), ("toy", "poison") if "poisoned" in str(words) else ("toy",)))
    if folder is not None:
        folder.mkdir(exist_ok=True)
    logger = RunLogger(recipe, folder and Folder(folder), tracker or Silent(), main=folder is not None)
    return kind(recipe, recipe.data.open(recipe.seed), Runtime(recipe), logger, stop=stop)


def noticed(check, wrong: type[Trainer]) -> None:
    """A check that passes for the trainer, and does not for a wrong one."""
    check(Trainer)
    with pytest.raises((AssertionError, RuntimeError)):
        check(wrong)


# ---- A tool


def test_a_tool_makes_steps_and_needs_nothing_else():
    with made(*PLAIN) as trainer:
        trainer.open()
        updates = [trainer.step() for _ in range(4)]
        assert trainer.state.step == 4 == trainer.clock.steps
        assert [update.step for update in updates] == [0, 1, 2, 3]
        losses = [float(sum(loss.sum for loss in update.losses)) for update in updates]
    with made(*PLAIN) as again:
        again.open()
        assert losses[:2] == [float(sum(loss.sum for loss in again.step().losses)) for _ in range(2)]


def test_a_stepped_training_has_the_bits_of_a_whole_one(tmp_path):
    with made(*PLAIN, folder=tmp_path) as whole:
        whole.fit()
    with made(*PLAIN) as stepped:
        stepped.open()
        for _ in range(stepped.plan.steps):
            stepped.step()
            assert stepped.after_step()
        for name, tensor in whole.model.bare.state_dict().items():
            assert torch.equal(tensor, stepped.model.bare.state_dict()[name]), name


# ---- The seven traps


def test_1_copies_are_waited_for_between_observing_a_step_and_making_it_and_before_weights_are_swapped(monkeypatch):
    seen: list[str] = []

    def noted(kind, name, word):
        plain = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda self, *of: (seen.append(word), plain(self, *of))[1])

    noted(Checkpointer, "wait_for_copies", "wait")
    noted(Model, "update", "update")
    noted(Average, "swap", "swap")
    noted(module.NonFiniteGuard, "observe", "observe")

    class Late(Trainer):
        def apply(self, update: Update, at) -> None:
            self.model.update(0.0, at.step)
            super().apply(update, at)

    def check(kind):
        seen.clear()
        with made(*SHORT, "train.ema=0.9", "evaluations={val: {every: 3 steps, batch_size: 8}}", kind=kind) as trainer:
            trainer.start()
            for _ in range(3):
                trainer.step()
            assert seen == ["observe", "wait", "update"] * 3
            seen.clear()
            trainer.evaluator.run(["val"])
            assert seen == ["wait", "swap", "swap"]

    monkeypatch.setattr(Checkpointer, "save", lambda *_, **__: None)
    noticed(check, Late)


def test_2_an_update_that_runs_out_of_memory_reads_each_answer_once(tmp_path):
    class Greedy(Trainer):
        def restart_batches(self) -> None:
            super().restart_batches()
            if self.state.step or self.micro_batching.halving:
                self.stop_poll.answer()

    def check(kind):
        words = ["task={name: poisoned, remembers: false, room: 4}", "train.on_oom=halve", "train.batch_size=16"]
        with made(*PLAIN, *words, "train.micro_batch=16", folder=tmp_path / kind.__name__, kind=kind) as trainer:
            asked: list[str] = []
            poll = trainer.stop_poll
            ask, answer = poll.ask, poll.answer
            poll.ask = lambda: (asked.append("ask"), ask())[1]
            poll.answer = lambda: (asked.append("answer"), answer())[1]
            trainer.fit()
            assert trainer.plan.micro_batch == 4 and asked == ["ask", "answer"] * trainer.plan.steps

    noticed(check, Greedy)


def test_3_a_run_that_is_stopped_logs_nothing_and_saves_what_it_cannot_do_without(tmp_path, monkeypatch):
    saved: list[dict] = []
    save = Checkpointer.save
    monkeypatch.setattr(Checkpointer, "save", lambda self, **how: (saved.append(how), save(self, **how))[1])

    class Lines(Silent):
        def __init__(self):
            self.found = []

        def log(self, step, metrics):
            self.found += metrics

    class Talking(Trainer):
        def finish(self, stopped: bool):
            self.log()
            return super().finish(stopped)

    def check(kind):
        saved.clear()
        asked, lines = iter(range(10)), Lines()
        stop = Stop(lambda: next(asked) >= 3)
        with made(*PLAIN, folder=tmp_path / kind.__name__, kind=kind, stop=stop, tracker=lines) as trainer:
            assert trainer.fit().status == "KILLED"
        assert saved == [{"required": True, "again": True}] and "train/loss" not in lines.found

    noticed(check, Talking)


def test_4_the_guard_has_judged_every_step_before_anything_is_built_on_it(tmp_path, monkeypatch):
    left: list[int] = []
    for kind, name in ((Trainer, "run_events"), (Trainer, "finish")):
        plain = getattr(kind, name)

        def looked(self, *of, plain=plain):
            left.append(len(self.guard._pending))
            return plain(self, *of)

        monkeypatch.setattr(kind, name, looked)

    class Hasty(Trainer):
        def judge(self, wait: bool):
            return super().judge(wait=False)

    def check(kind):
        left.clear()
        with made(*PLAIN, "checkpoints={every: 2 steps}", folder=tmp_path / kind.__name__, kind=kind) as trainer:
            trainer.fit()
        assert len(left) >= 3 and not any(left)

    noticed(check, Hasty)


def test_5_workers_are_forked_only_while_nothing_is_written(tmp_path, monkeypatch):
    writing: list[str] = []

    def write(*what, plain=storage.write):
        time.sleep(0.1)
        return plain(*what)

    def read(*what, plain=stream.training, **more):
        writing.extend(thread.name for thread in threading.enumerate() if thread.name == "trainkit-checkpoint")
        return plain(*what, **more)

    monkeypatch.setattr(storage, "write", write)
    monkeypatch.setattr(stream, "training", read)

    class Eager(Trainer):
        def restart_batches(self) -> None:
            self.batches.restart(self.plan, self.state.step)

    def check(kind):
        writing.clear()
        words = ["evaluations={val: {at_start: true, batch_size: 8}}", "best={metric: val/accuracy}"]
        with made(*SHORT, *words, folder=tmp_path / kind.__name__, kind=kind) as trainer:
            trainer.start()
            assert trainer.resume.path is None and not writing

    noticed(check, Eager)


def test_6_an_evaluation_that_was_interrupted_after_its_scores_is_entered_once(tmp_path, monkeypatch):
    def check(kind, forget=False):
        words = ["evaluations={val: {batch_size: 8, every: 1 epoch}}", "best={metric: val/accuracy}"]
        words.append("stop_when={metric: val/accuracy, patience: 9}")
        with made(*SHORT, *words, folder=tmp_path / f"{forget}", kind=kind) as trainer:
            trainer.open()
            trainer.step()
            trainer.evaluator.run(["val"])
            before = (list(trainer.state.best), trainer.state.waited)
            if forget:
                trainer.state.entered.clear()
            trainer.evaluator.run(["val"])
            assert (trainer.state.best, trainer.state.waited) == before

    check(Trainer)
    with pytest.raises(AssertionError):
        check(Trainer, forget=True)


def test_7_batches_are_counted_from_the_state_and_not_from_the_stream():
    class FromTheStart(Trainer):
        def restart_batches(self) -> None:
            self.checkpoints.wait()
            self.batches.restart(self.plan, 0)

    def check(kind):
        with made(*PLAIN, kind=kind) as trainer:
            trainer.open()
            for _ in range(2):
                trainer.step()
            trainer.restart_batches()
            _, rows = next(trainer.plan.keys(trainer.data.train, 2))
            assert next(trainer.batches)["index"].tolist() == rows.tolist()

    noticed(check, FromTheStart)


# ---- Its shape


def test_methods_are_short_and_few_frames_lie_between_a_command_and_torch(store, monkeypatch):
    tree = ast.parse(Path(module.__file__).read_text())
    lengths = {n.name: n.end_lineno - n.lineno + 1 for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    assert lengths.pop("__init__") <= 40 and max(lengths.values()) <= 30
    assert len(Path(module.__file__).read_text().splitlines()) <= 330
    stacks: list[list[str]] = []
    plain = torch.autograd.backward

    def backward(*of, **named):
        frames = [frame.filename for frame in inspect.stack(context=0)]
        stacks.append([file for file in frames if "/trainkit/" in file and "/tests/" not in file])
        return plain(*of, **named)

    monkeypatch.setattr(torch.autograd, "backward", backward)
    run("train.length=2 steps", "evaluations={}", "best=null")
    assert stacks and len(stacks[0]) <= 7, stacks[0]
