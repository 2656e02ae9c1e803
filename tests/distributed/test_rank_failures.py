"""Several processes, of which one is killed, raises, leaves or hangs: all end, and say which was the first."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import all_same, own_store, run
from training_processes import PATIENCE, job

from trainkit.distributed import rank_failures
from trainkit.experiments import post_mortem
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store

WORDS = ("limits.collective=20 s", "limits.hang=60 s")
TRAINED = ("train.length=3 epochs",)
ENDINGS = {
    "killed": ("kill", "rank 1 ended without an error message"),
    "raises": ("RuntimeError out of luck", "rank 1 failed first: RuntimeError: out of luck"),
    "leaves": ("exit 0", "rank 1 ended without an error message"),
}
HANGS = {
    "sleeps": {"at": "toy.ToyTask.loss", "do": "sleep 600"},
    "stopped": {"at": "toy.ToyTask.loss", "do": "stop"},
    "skips": {"at": "trainkit.distributed.runtime.Runtime.average_buffers", "do": "skip"},
    "holds the interpreter": {"at": "toy.ToyTask.loss", "do": "spin 600"},
}


@pytest.fixture
def store(tmp_path, database):
    with own_store(tmp_path, database):
        yield tmp_path


@pytest.fixture(scope="module")
def two(tmp_path_factory, database):
    """An uninterrupted run on two processes."""
    home = tmp_path_factory.mktemp("two")
    with own_store(home, database), job(home, processes=2) as one:
        assert one.end() == [0, 0], one.said
        return one.ran()


def dies(seed: int, two, home: Path, database: Path) -> None:
    """One trial: one of two processes dies, and both are begun again."""
    every = [(name, rank) for name in ENDINGS for rank in (1, 0)]
    name, rank = every[seed % len(every)]
    do, said = ENDINGS[name]
    home.mkdir()
    plan = [{"at": "toy.ToyTask.loss", "call": 5 + seed // len(every), "do": do, "rank": rank}]
    with own_store(home, database):
        with job(home, processes=2, plan=plan) as one:
            one.until_struck()
            began = time.monotonic()
            codes = one.end()
            one.gone()
            print(f"{name}, process {rank}: all gone after {time.monotonic() - began:.1f} s", flush=True)
            # What has not ended 15 s after the first is killed, as a launcher does: nothing had to be.
            assert codes[1 - rank] == 1, one.said
            assert said.replace("rank 1", f"rank {rank}") in one.said, one.said
            if rank:
                assert one.ran().folder.info().status == "FAILED"
        with job(home, "--resume-or-start", processes=2) as again:
            assert again.end() == [0, 0], again.said
            ran = again.ran()
        assert all_same(ran, two) and ran.repeatable == two.repeatable
        assert {one.info().status for one in Store.locate().runs()} == {"FINISHED"}


def test_one_of_two_that_dies_ends_both_and_is_named(trials, two, tmp_path, database):
    for seed in trials(1, 12):
        dies(seed, two, tmp_path / str(seed), database)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 4])  # rank 0 is killed, rank 1 raises, rank 1 leaves
def test_whichever_of_two_dies_in_whatever_way_it_is_named(seed, two, tmp_path, database):
    dies(seed, two, tmp_path / "store", database)


@pytest.mark.slow
def test_one_of_two_that_hangs_ends_both_and_all_say_what_they_were_at(tmp_path, database):
    words = ("limits.collective=10 s", "limits.hang=15 s", "limits.stop=12 s")
    for name in list(HANGS):
        home = tmp_path / name.replace(" ", "-")
        home.mkdir()
        with own_store(home, database):
            plan = [{**HANGS[name], "call": 5, "rank": 1}]
            with job(home, *words, processes=2, plan=plan) as one:
                if name != "skips":  # which leaves no note
                    one.until_struck()
                began = time.monotonic()
                codes = one.end()
                one.gone()
                took = time.monotonic() - began
                print(f"{name}: all gone after {took:.1f} s, codes {codes}", flush=True)
                assert all(codes) and took < PATIENCE, one.said
                assert "Timeout" in one.said or "most recent call first" in one.said or "Traceback" in one.said
                info = one.ran().folder.info()
                assert info.status == "FAILED", one.said
                if name == "holds the interpreter":
                    assert "Timeout" in rank_failures.stacks(one.ran().folder.path, 1).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("do", ["sleep 600", "spin 600"])
def test_a_single_process_that_hangs_is_ended_and_the_next_start_says_so(store, do):
    """Also where somebody holds the interpreter, so that no Python runs."""
    with job(store, "limits.hang=6 s", plan=[{"at": "toy.ToyTask.loss", "call": 9, "do": do}]) as one:
        assert one.end() == [1], one.said
        hung = one.ran().folder
    assert hung.info().status == "RUNNING", "nobody was left to say it"
    assert "fault_injection.py" in rank_failures.stacks(hung.path, 0).read_text()
    run("seed=5")
    assert hung.info().status == "FAILED"
    client = Store.locate().client().get_run(hung.info().run_id)
    assert client.info.status == "FAILED" and "rank 0" in client.data.tags["trainkit.error"]


@pytest.mark.slow
def test_without_the_watchdog_it_hangs(store):
    """The negative control."""
    with job(store, "limits.hang=null", plan=[{"at": "toy.ToyTask.loss", "call": 9, "do": "sleep 40"}]) as one:
        one.until_struck()
        time.sleep(12)
        assert one.alive()


LONG = ("train.length=30 epochs", "evaluations={}", "best=null", "checkpoints.every=50 steps")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "limit"), [(signal.SIGTSTP, 2), (signal.SIGSTOP, 60)])
def test_a_training_that_is_stopped_for_a_while_is_not_one_that_hangs(store, number, limit):
    """Ctrl-Z (SIGTSTP) for more than twice the limit; SIGSTOP, of which no process learns, within it: the same bits."""
    with job(store, *LONG, f"limits.hang={limit} s") as one:
        one.until("step 20/")
        one.signal(number)
        one.until(lambda: "T (stopped)" in Path(f"/proc/{one.pids[0]}/status").read_text())
        said = one.said
        time.sleep(5)
        assert one.said == said, "nothing went on"
        one.signal(signal.SIGCONT)
        assert one.end() == [0], one.said
        stopped = one.ran()
    assert not list(stopped.folder.path.glob("stacks*"))
    assert all_same(stopped, run(*LONG))


@pytest.mark.slow
def test_one_that_is_stopped_outright_for_longer_than_the_limit_may_be_ended_and_is_resumed(store):
    """The timer runs on, and whether it or the thread that winds it up is first is chance; the bits are not."""
    with job(store, *LONG, "limits.hang=3 s") as one:
        one.until("step 20/")
        one.signal(signal.SIGSTOP)
        time.sleep(8)
        one.signal(signal.SIGCONT)
        ended = one.end()
        assert ended in ([0], [1]), one.said
        ran = one.ran()
        assert ended == [0] or rank_failures.left(ran.folder.path), "of what it was at something is left"
    if ended == [1]:
        with job(store, *LONG, "--resume", "limits.hang=null") as again:
            assert again.end() == [0], again.said
            assert again.ran().folder == ran.folder
            ran = again.ran()
    assert all_same(ran, run(*LONG))


def test_what_is_left_names_the_first_that_failed_by_itself(tmp_path):
    folder = RunFolder(tmp_path)
    runtime = SimpleNamespace(world=3, rank=0, gone=lambda rank: rank == 2)
    assert rank_failures.left(folder.path) == ""
    assert "rank 2 ended without an error message" in str(rank_failures.first(folder.path, runtime))
    rank_failures.note(folder.path, 2, RuntimeError("[gloo] Connection closed by peer"))
    rank_failures.note(folder.path, 1, ValueError("token=abc is no number"))
    assert "rank 1 failed first: ValueError" in str(rank_failures.first(folder.path, runtime))
    assert rank_failures.left(folder.path).startswith("rank 1: ValueError")
    rank_failures.clear(folder.path)  # by a run that goes on, perhaps on one process alone
    assert rank_failures.left(folder.path) == ""
    rank_failures.stacks(folder.path, 1).write_text("Timeout (0:00:10)!\n")
    assert rank_failures.left(folder.path).startswith("rank 1 hung")
    store = Store(tmp_path, "")
    run_folder = store.new_run("toy", 0, "abc")
    rank_failures.stacks(run_folder.path, 0).write_text("Timeout (0:00:10)!\n")
    assert post_mortem.cause_of_death(run_folder).startswith("rank 0 hung"), "and was not killed for want of memory"
    run_folder.release()
    rank_failures.stacks(folder.path, 1).write_text("")
    assert rank_failures.left(folder.path) == "", "of one that was killed, no time had run out"
    (tmp_path / "error-process-0.json").write_text("{")
    assert rank_failures.left(folder.path) == ""


@pytest.mark.parametrize(
    ("each", "environment", "named"),
    [
        (["seed=1"], {}, "recipe"),
        ([], {"TOY_DIFFERS": "1"}, "data"),
        ([], {"TOY_OTHER_PROGRAM": "1"}, "torch"),
    ],
)
def test_processes_that_disagree_do_not_begin(store, each, environment, named):
    with job(store, processes=2, each=([], each), **environment) as one:
        codes = one.end()
        assert all(code == 2 for code in codes), one.said
        one.gone()
        assert f"rank 1 differs from rank 0 in: {named}" in one.said and "Traceback" not in one.said
    assert not Store.locate().runs()


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes_where_it_is_asked_to(store, tmp_path_factory, database):
    """Two processes, then one, then two: each sample once in every epoch, and the losses of two processes all along."""
    words = ("task.norm=false", "task.dropout=0.0", "log.every=1 steps", "train.ema=null", "train.length=6 epochs")
    home = tmp_path_factory.mktemp("all")
    with own_store(home, database), job(home, *words, processes=2) as one:
        assert one.end() == [0, 0], one.said
        whole = one.ran()
    seen = store / "seen"
    legs = ((2, 10, ()), (1, 17, ("--resume", "--elastic")), (2, None, ("--resume", "--elastic")))
    for processes, call, more in legs:
        plan = [{"at": "toy.ToyTask.loss", "call": call, "do": "signal 15", "rank": 0}] if call else []
        with job(store, *words, *more, processes=processes, plan=plan, TOY_SEEN=str(seen)) as one:
            assert set(one.end()) == {143 if call else 0}, one.said
            ran = one.ran()
    assert len(Store.locate().runs()) == 1 and ran.last.step == whole.last.step == 24
    lines = seen.read_text().split("\n")[:-1]
    assert sorted(lines) == sorted(f"{epoch} {index}" for epoch in range(6) for index in range(64))
    (steps, losses), (others, expected) = (r.history.series("train/loss") for r in (ran, whole))
    assert steps == others and losses == pytest.approx(expected, rel=1e-6)
    with job(store, *words, "seed=3", "--resume") as one:  # of two processes there is none that is unfinished
        assert one.end() == [2], one.said
