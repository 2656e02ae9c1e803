"""What a process keeps from one training to the next."""

from __future__ import annotations

import signal
import time

import psutil
import pytest
import torch
from runs import PLUGIN, TOY
from training_processes import job

from trainkit.config.run_request import RunRequest, load
from trainkit.distributed import launch_settings
from trainkit.distributed.runtime import Runtime
from trainkit.errors import UserError


def test_each_training_begins_with_the_loss_scale_of_a_new_process(store, monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))
    runtime = Runtime(load(RunRequest(TOY, (), ("toy",))))
    # As of a GPU in fp16.
    runtime.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    runtime._scale = scaler.state_dict()
    for _ in range(2):
        net = torch.nn.Linear(2, 2)
        runtime.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        assert scaler.get_scale() == 1024.0
        scaler.scale(torch.ones(1))
        scaler.update(new_scale=2.0)
        assert scaler.get_scale() == 2.0
    runtime.close()


def test_fewer_processes_than_the_launcher_was_asked_for_are_refused(store, monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.setattr(launch_settings, "asked_processes", lambda: 2)
    with pytest.raises(UserError, match="launch: 1 process started; expected 2, as set in the launcher"):
        Runtime(load(RunRequest(TOY, (), ("toy",))))


def scoring(seconds: float, collective: float, **limits: float) -> list[str]:
    """Words for four steps and one score, which takes so many seconds."""
    short = ["train.length=4 steps", "train.ema=null", "evaluations={val: {}}", "best=null", "log.every=1 steps"]
    most = [f"limits.{name}={value} s" for name, value in (limits | {"collective": collective}).items()]
    return [f"task.slow_score={seconds}", *short, *most]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_a_score_may_take_longer_than_others_wait_for_a_process_that_stands_still(store, processes):
    words = ("train.batch_size=18", "train.micro_batch=6") if processes == 3 else ()
    with job(store, *scoring(8, collective=5), *words, processes=processes) as one:
        assert one.end() == [0] * processes, one.said
        assert one.ran().folder.info().status == "FINISHED" and len(one.ran().series("val/accuracy")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("do", ["kill", "stop", "spin 600"])
def test_a_process_that_dies_or_stands_still_while_it_scores_is_noticed(store, do):
    plan = [{"at": "toy.ToyTask.score", "do": do, "rank": 0}]
    limit = 300 if do == "kill" else 5
    with job(store, *scoring(0, collective=limit, stop=4), processes=2, plan=plan) as one:
        if do != "kill":  # of which the row of its last step may be lost
            one.until("step 4/")
        began = time.monotonic()
        one.until(lambda: not alive(one.pids[1]))
        took = time.monotonic() - began
        assert one.end()[1] == 1, one.said
        assert took < limit if do == "kill" else took > limit, one.said


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_score_that_hangs_is_given_up_by_the_process_that_computes_it(store):
    """Those that wait for it go on waiting: for them each heartbeat counts as progress."""
    with job(store, *scoring(600, collective=4, hang=8), processes=2) as one:
        assert one.end() == [1, 1], one.said
        assert "rank 0: no progress for 8 s (limits.hang)" in one.said
        assert "rank 1: no progress" not in one.said and "Timed out" not in one.said, one.said


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_any_process_that_is_told_to_stop_ends_a_score(store, rank):
    with job(store, *scoring(600, collective=10, stop=60), processes=2) as one:
        one.until("step 4/")
        time.sleep(3)
        one.signal(signal.SIGTERM, rank)
        assert one.end() == [143, 143], one.said
        ran = one.ran()
    assert ran.folder.info().status == "KILLED" and ran.last.step == 4


@pytest.mark.slow
@pytest.mark.parametrize(("at", "rank"), [("trainkit.analysis.run_summary.write", 0), ("toy.ToyData.open", 1)])
def test_data_and_a_report_may_take_longer_too(store, at, rank):
    plan = [{"at": at, "do": "sleep 12", "rank": rank}]
    with job(store, *scoring(0, collective=5), processes=2, plan=plan) as one:
        assert one.end() == [0, 0], one.said
