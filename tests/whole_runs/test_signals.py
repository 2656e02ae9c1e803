"""Signals: a training that is told to stop saves and is gone, in whatever phase, and goes on to the same bits."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import fault_injection
import pytest
from runs import PLUGIN, ROOT, TOY, Ran, all_same, newest, own_store, run
from training_processes import Job, job, launched

from trainkit.distributed.stop_signal import Stop
from trainkit.tracking.store import Store

LONG = "sleep 300"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@dataclass(frozen=True)
class Phase:
    """A moment of a run: a function is called for the n-th time, which takes long where nothing is to be saved."""

    at: str
    call: int = 1
    do: str = LONG
    words: tuple[str, ...] = ()
    step: int | None = None
    """The update that is under way; None: there is no checkpoint yet."""
    until: int = 0
    """The last call that takes as long; 0: this one alone."""
    thread: str = ""

    def plan(self) -> list[fault_injection.Fault]:
        until = max(self.call, self.until)
        return [{"at": self.at, "call": self.call, "until": until, "do": self.do, "thread": self.thread}]


def save(seconds: str) -> Phase:
    """The second checkpoint takes so long: each has seven files, of one write each."""
    return Phase("os.write", 9, f"sleep {seconds}", step=5, thread="trainkit-checkpoint")


ORACLE = ("task.teacher=oracle",)
# The first prediction and score are those of the trial that finds the names of metrics.
PHASES = {
    "evaluation": Phase("toy.ToyTask.predict", 14, "sleep 3", step=6, until=10**6),
    "mid accumulation": Phase("toy.ToyTask.loss", 14, "sleep 1", step=6),
    "data opening": Phase("toy.ToyData.open"),
    "inside a save": save("1"),
    "report": Phase("trainkit.analysis.run_summary.write", step=12),
    "first step": Phase("toy.ToyTask.loss"),
    "import": Phase("toy.ToyTask.required_weights"),
    "data check": Phase("trainkit.analysis.data_integrity.ensure"),
    "needs": Phase("trainkit.experiments.launch.gather", words=("task.needs_recipe=FIRST",)),
    "teacher": Phase("toy.ToyTask.loss", 5, "sleep 1", words=("task.needs_recipe=FIRST",)),
    "ceilings": Phase("trainkit.diagnostics.throughput_limits.measure", words=("log.ceilings=measure",)),
    "building": Phase("toy.ToyTask.build"),
    "trial": Phase("trainkit.training.evaluator.trial"),
    "outputs": Phase("trainkit.training.teacher_cache.tabulate", words=ORACLE),
    "stored outputs": Phase("trainkit.training.teacher_cache.outputs", words=(*ORACLE, "task.stored=true")),
    "scoring": Phase("toy.ToyTask.score", 4, step=6),
    "last evaluation": Phase("toy.ToyTask.predict", 38, "sleep 3", step=12, until=10**6),
    "sending": Phase("mlflow.tracking.MlflowClient.log_artifact", 2, step=12),
    "shutdown": Phase("trainkit.distributed.runtime.Runtime.close", 1, "sleep 1", step=12),
}
"""The first few in the order in which default tests take them."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory, database) -> Mapping[tuple[str, ...], Ran]:
    """Uninterrupted runs, by their words."""
    return _Whole(tmp_path_factory, database)


class _Whole(dict):
    def __init__(self, folders, database):
        super().__init__()
        self._folders, self._database = folders, database
        self.first = folders.mktemp("recipes") / "first.yaml"
        self.first.write_text(TOY.read_text().replace("name: toy\n", "name: first\n", 1))

    def __missing__(self, words):
        with own_store(self._folders.mktemp("whole"), self._database):
            self[words] = run(*words)
        return self[words]


def assert_goes_on(folder: Path, whole: Ran, words: tuple[str, ...]) -> None:
    """What was interrupted is continued, or begun where there was no run yet, to the bits of the uninterrupted run."""
    with job(folder, *words, "--resume-or-start") as again:
        assert again.end() == [0], again.said
        ran = again.ran()
    assert ran.folder.info().status == "FINISHED"
    assert all_same(ran, whole) and ran.repeatable == whole.repeatable
    assert ran.last.state["best"] == whole.last.state["best"]
    statuses = {one.info().status for one in Store.locate().runs()}
    assert statuses == {"FINISHED"}, "none is said to run, and none was left beside"


def interrupted(one: Job, phase: Phase, number: int, everybody: bool) -> float:
    """Send a signal within a phase, to the process or to its group: after how many seconds nothing was left."""
    one.until(lambda: any(f["do"] == phase.do for f in fault_injection.struck(one.notes)))
    began = time.monotonic()
    one.signal_all(number) if everybody else one.signal(number)
    one.end()
    one.gone()
    return time.monotonic() - began


def test_a_run_told_to_stop_in_any_phase_saves_and_goes_on_to_the_same_bits(trials, whole, tmp_path, database):
    every = [(name, number, all_) for number in SIGNALS for all_ in (False, True) for name in PHASES]
    random.Random(0).shuffle(every)
    first = [(name, SIGNALS[k % 3], bool(k % 2)) for k, name in enumerate(list(PHASES)[:4])]
    every = [*first, *(one for one in every if one not in first)]
    longest = 0.0
    for seed in trials(1, 114):
        name, number, everybody = every[seed % len(every)]
        phase, home = PHASES[name], tmp_path / str(seed)
        home.mkdir()
        with own_store(home, database):
            words = tuple(word.replace("FIRST", str(whole.first)) for word in phase.words)
            with job(home, *words, plan=phase.plan()) as one:
                took = interrupted(one, phase, number, everybody)
                longest = max(longest, took)
                print(f"{name}, {number.name}, {'all' if everybody else 'one'}: gone after {took:.1f} s", flush=True)
                assert "and still running" not in one.said, one.said
                # Told while a file is sent, a run may be at its end or, as threads take turns, on its way there.
                finished = name == "shutdown" or (name == "sending" and newest().info().status == "FINISHED")
                assert one.end() == [0 if finished else 143], one.said
            if phase.step is not None:
                cut = Ran(143, newest())
                assert cut.folder.info().status == ("FINISHED" if finished else "KILLED")
                assert cut.last.step >= phase.step or (name == "sending" and not finished), (
                    "at most the update under way is lost"
                )
            else:
                assert {one.info().status for one in Store.locate().runs()} <= {"KILLED"}
            if not finished:
                assert_goes_on(home, whole[words], words)
    print(f"gone after {longest:.1f} s at most")


@pytest.fixture
def store(tmp_path, database):
    with own_store(tmp_path, database):
        yield tmp_path


@pytest.mark.slow
def test_workers_live_through_what_everybody_is_told_and_not_past_their_parent(store, whole):
    words = ("loader.workers=2", "evaluations={}", "best=null", "train.length=100 epochs")
    with job(store, *words) as one:
        one.until("step 10/")
        one.signal_all(signal.SIGHUP)  # of a terminal that is gone: nobody stops
        one.until("step 20/")
        one.signal_all(signal.SIGTERM)
        assert one.end() == [143], one.said
        one.gone()
        cut = one.ran()
        assert cut.folder.info().status == "KILLED" and cut.last.step >= 20
    with job(store, *words, "--resume") as one:
        one.until("step 50/")
        assert len(one.alive()) > 2
        one.signal(signal.SIGKILL)
        one.gone()


@pytest.mark.slow
def test_nobody_needs_to_read_what_is_said(store, whole):
    """`| head`, and an output that was closed before it began; the run ends well."""
    fifo = store / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with job(store, stdout=fifo) as one:
        heard = b""
        while b"\n     2 " not in heard:
            one.until(lambda: True)
            with contextlib.suppress(BlockingIOError):
                heard += os.read(reader, 1 << 16)
            time.sleep(0.01)
        os.close(reader)
        assert one.end() == [0], one.said
        ran = one.ran()
    assert ran.folder.info().status == "FINISHED" and all_same(ran, whole[()])
    code = (
        "import os, sys\nfrom trainkit.cli import console\nconsole.outlive_readers()\nprint('unheard', flush=True)\n"
        "sys.stderr.write('nor this')\nsys.exit(7 if os.open('x', os.O_CREAT) > 2 else 1)"
    )
    words = ["bash", "-c", '"$@" >&- 2>&-', "bash", sys.executable, "-c", code]
    assert subprocess.run(words, cwd=store, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == 7
    full = [*words[:2], '"$@" > /dev/full', *words[3:]]
    assert subprocess.run(full, cwd=store, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == 7


@pytest.mark.slow
def test_a_disk_that_is_too_slow_is_left_behind_and_a_checkpoint_is_there(store, whole):
    """The second checkpoint takes five minutes. 25 s after the signal the training leaves, with the first one whole."""
    with job(store, plan=save("300").plan()) as one:
        took = interrupted(one, Phase("", do=LONG), signal.SIGTERM, False)
        assert 20 < took < 300 and one.end() == [143] and "and still running" in one.said, one.said
        cut = one.ran()
        assert cut.steps == [3] and cut.last.step == 3
    assert_goes_on(store, whole[()], ())


@pytest.mark.slow
def test_two_signals_within_a_second_are_one_and_a_later_one_ends_it_at_once(store, whole):
    for pause, kept, seconds in ((0.0, True, "1"), (1.5, False, "5")):
        with job(store, plan=save(seconds).plan()) as one:
            one.until_struck()
            one.signal(signal.SIGTERM)
            time.sleep(pause)
            with contextlib.suppress(ProcessLookupError):
                one.signal(signal.SIGTERM)
            assert one.end() == [143], one.said
            assert (len(one.ran().steps) > 1) == kept
            assert one.ran().last.step >= 3
        assert_goes_on(store, whole[()], ())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_beneath_launchers_a_run_told_to_stop_saves_and_goes_on_to_the_same_bits(trials, whole, tmp_path, database):
    """The launcher alone is told, or it and all processes; SIGKILL for the launcher, of which only the kernel tells."""
    every = [
        (launcher, name, number, everybody)
        for name in ("mid accumulation", "data opening", "evaluation", "inside a save", "report", "first step")
        for launcher in ("accelerate", "torchrun")
        for number, everybody in ((15, False), (10, False), (9, False), (15, True), (2, True), (10, True))
    ]
    random.Random(1).shuffle(every)
    # The six of the slow tests have every signal to the launcher alone or to all, but SIGKILL; this one is not drawn.
    every.insert(0, every.pop(every.index(("accelerate", "first step", 15, False))))
    references = {}
    for seed in trials(6, 72):
        launcher, name, number, everybody = every[seed % len(every)]
        phase, home = PHASES[name], tmp_path / str(seed)
        processes = 2 if launcher == "torchrun" else 1
        home.mkdir()
        with own_store(home, database):
            plan = [{**fault, "rank": 0} for fault in phase.plan()]
            if processes == 2:  # a process has half of the micro-batches
                plan = [{**fault, "call": 1 + fault["call"] // 2} for fault in plan]
            with launched(home, launcher, plan=plan) as one:
                one.until_struck()
                began = time.monotonic()
                one.signal_all(number) if everybody else one.signal(number)
                one.gone()
                took = time.monotonic() - began
                print(f"{launcher}, {name}, {number}, {'all' if everybody else 'it'}: {took:.1f} s", flush=True)
                assert "and still running" not in one.said, one.said
            if phase.step is not None and name != "evaluation":
                assert newest().info().status == "KILLED", one.said
                assert Ran(143, newest()).last.step >= phase.step // 2
            if processes not in references:
                other = home / "whole"
                other.mkdir()
                with own_store(other, database), job(other, processes=processes) as all_of_it:
                    assert set(all_of_it.end()) == {0}, all_of_it.said
                    references[processes] = all_of_it.ran()
            with job(home, "--resume-or-start", processes=processes) as again:
                assert set(again.end()) == {0}, again.said
                ran = again.ran()
            assert all_same(ran, references[processes]) and ran.repeatable == references[processes].repeatable
            assert {one.info().status for one in Store.locate().runs()} == {"FINISHED"}


def test_an_evaluation_that_was_cut_off_is_held_by_the_run_that_goes_on(store, whole, monkeypatch):
    """A run in this process is told to stop in the middle of its second evaluation of the EMA weights."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    import toy

    stop, calls, predict = Stop(), [], toy.ToyTask.predict

    def told(self, net, batch):
        calls.append(None)
        stop.told |= len(calls) == 20  # 2 to learn how long it takes, then 5 of the weights and 5 of the average each
        return predict(self, net, batch)

    with monkeypatch.context() as patch:
        patch.setattr(toy.ToyTask, "predict", told)
        cut = run(stopping=stop)
    assert cut.code == 143 and cut.last.step == 6 and len(calls) == 20, "no batch more"
    assert cut.series("val/accuracy") == whole[()].series("val/accuracy")[:1]
    ran = run(resume="")
    assert all_same(ran, whole[()]) and ran.repeatable == whole[()].repeatable
    assert ran.last.state["best"] == whole[()].last.state["best"]
