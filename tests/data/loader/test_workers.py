"""Processes that read batches: whatever becomes of one, the batches come or one message, and none is left."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs import PLUGIN, TOY, Ran, all_same, newest, own_store, run, spawn
from small_disk import mounted

from trainkit.config.schema import Loader
from trainkit.config.units import Span
from trainkit.data.loader import batch_memory, workers
from trainkit.data.loader import stream as loading
from trainkit.data.loader.workers import RESTARTS, Workers
from trainkit.errors import EXIT_CODE, UserError
from trainkit.training.plan import Plan

sys.path.insert(0, str(PLUGIN))
from failing import FAULTS, FailingData

pytestmark = pytest.mark.usefixtures("unsent")

PLAN = Plan(steps=8, steps_per_epoch=8, batch_size=8, micro_batch=8, accumulation=1, world=1, rank=0)
SILENT = ("hangs", "stopped")
SAID = {
    "killed": "was killed by SIGKILL",
    "segmentation fault": "was killed by SIGSEGV",
    "raises": "raised ValueError: no such thing",
    "hangs": "was silent for",
    "stopped": "was silent for",
    "out of memory": "raised .*Unable to allocate",
    "leaves": "ended with code 3",
}


def loader(many: int = 2, seconds: float = 30, **more) -> Loader:
    """For tests in which a worker falls silent, few seconds: of a loaded machine they cost a restart more."""
    return Loader(workers=many, start="fork", timeout=Span(seconds, "seconds"), **more)


def children() -> set[int]:
    """Processes whose parent this one is, those not waited for among them; not those that are there to start others."""
    there = (b"fork_server", b"multiprocessing.forkserver", b"multiprocessing.resource_tracker")
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    own = {int(word) for word in listed.read_text().split()}
    called = {child: Path(f"/proc/{child}/cmdline").read_bytes() for child in own}
    return {child for child, words in called.items() if not any(word in words for word in there)}


class Warns:
    """Rows that a library warns of, by their names."""

    name = "warns"

    def fetch(self, rows: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        """The rows themselves."""
        warnings.warn("image \x1b[2J.png", stacklevel=1)
        return {"rows": torch.from_numpy(rows)}


@pytest.mark.slow  # a worker that was not forked imports all anew
def test_what_a_library_warns_of_in_a_worker_orders_a_terminal_nothing(capfd):
    with Workers(Warns(), Loader(workers=1, start="spawn")) as some:
        (batch,) = some.read([(0, np.arange(3))])
    assert batch["rows"].tolist() == [0, 1, 2]
    said = capfd.readouterr().err
    assert r"UserWarning: image \x1b[2J.png" in said and "\x1b" not in said


@pytest.fixture(autouse=True)
def none_is_left():
    before = children()
    yield
    assert children() <= before


def same(some: list[dict], others: list[dict]) -> bool:
    return len(some) == len(others) and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
        for a, b in zip(some, others, strict=True)
    )


def reading(split, row: int) -> tuple[int, str]:
    """Which batch of the first epoch has a row, and what is said of it."""
    order = split.order(0, 8)
    place = int(np.flatnonzero((order == row).any(1))[0])
    return place, f"loader, epoch 0, rows {', '.join(map(str, order[place]))} of train: "


def faults(trials) -> Iterator[tuple[int, str]]:
    """Trials of each fault in turn, at rows drawn by the seed."""
    for seed in trials(len(FAULTS), 10 * len(FAULTS)):
        yield seed, list(FAULTS)[seed % len(FAULTS)]


def test_a_lost_worker_is_replaced_and_the_batches_are_the_same(trials, tmp_path, caplog):
    for seed, fault in faults(trials):
        row, told = int(np.random.default_rng(seed).integers(64)), []
        split = FailingData(fault=fault, row=row, once=str(tmp_path / str(seed))).open(0).train
        expected = list(loading.training(split, partial(PLAN.keys, split, 0), Loader(), pin=False))
        began, seconds = time.monotonic(), 2 if fault in SILENT else 60
        with caplog.at_level(logging.WARNING, "trainkit"):
            got = list(
                loading.training(
                    split, partial(PLAN.keys, split, 0), loader(seconds=seconds), pin=False, tell=told.append
                )
            )
        assert same(got, expected) and len(got) == 8
        assert 1 <= len(told) <= RESTARTS and told[0] in caplog.text and "replaced (1 of 3 times)" in told[0]
        assert told[0].startswith(reading(split, row)[1]) and re.search(SAID[fault], told[0])
        assert fault in SILENT or time.monotonic() - began < 60, "a death is noticed at once, not by its silence"


@pytest.mark.parametrize("fault", ["killed", "raises", pytest.param("hangs", marks=pytest.mark.slow)])
def test_a_row_that_no_worker_survives_ends_the_stream_where_it_is(fault, monkeypatch):
    many = 1 if fault in SILENT else RESTARTS  # each of these takes its seconds of silence
    monkeypatch.setattr(workers, "RESTARTS", many)
    row, got = 19, []
    split = FailingData(fault=fault, row=row).open(0).train
    place, said = reading(split, row)
    seconds = 1 if fault in SILENT else 60
    with pytest.raises(UserError, match=SAID[fault]) as caught:
        for batch in loading.training(split, partial(PLAN.keys, split, 0), loader(seconds=seconds), pin=False):
            got.append(batch["index"].tolist())
    assert got == split.order(0, 8)[:place].tolist()
    assert str(caught.value).startswith(said) and f"{many} were replaced before" in str(caught.value)


def test_signals_to_the_whole_group_are_for_the_training_to_answer(monkeypatch):
    split, told = FailingData(row=-1).open(0).train, []

    def read(numbers) -> list[dict]:
        got = []
        with Workers(split, loader(1, prefetch=1), told.append) as some:
            for batch in some.read(PLAN.keys(split, 0)):
                got.append(batch)
                for number in numbers:
                    with contextlib.suppress(ProcessLookupError):  # one whose batch had come before it died
                        os.kill(some.processes[0].pid, number)
        return got

    expected = list(loading.training(split, partial(PLAN.keys, split, 0), Loader(), pin=False))
    assert same(read((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)), expected) and not told
    monkeypatch.setattr(workers, "_IGNORED", ())  # which is what keeps them alive
    monkeypatch.setattr(workers, "RESTARTS", 0)  # one that had answered before it died is missed a batch later
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a run in this process has left its own, which forks have
    try:
        with pytest.raises(UserError, match="ended with code 0"):  # by the handler of torch
            read((signal.SIGTERM,))
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("fault", ["hangs", "stopped"])
def test_a_stream_is_closed_at_once_whatever_its_workers_are_at(fault, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    split = FailingData(fault=fault, row=int(FailingData().open(0).train.order(0, 8)[1, 0])).open(0).train
    stream = loading.training(split, partial(PLAN.keys, split, 0), loader(seconds=600), pin=True)
    next(stream)
    began = time.monotonic()
    stream.close()
    assert time.monotonic() - began < 60, "not the ten minutes for which a worker may be silent"
    until = time.monotonic() + 60
    while any(thread.name.startswith("trainkit-ahead") for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("fault", ["hangs", None])
def test_no_worker_outlives_a_training_that_is_killed(fault, tmp_path):
    """One that hangs within a read is ended by the system, and so is one that waits."""
    split = FailingData(fault=fault or "killed", row=-1 if fault is None else 11).open(0).train
    told, say = os.pipe()
    training = os.fork()
    if not training:
        some = Workers(split, loader(3))
        stream = some.read([(0, np.arange(8, 16))] * 12)
        if fault is None:
            next(stream)
        else:
            threading.Thread(target=next, args=(stream,), daemon=True).start()
        os.write(say, " ".join(str(one.pid) for one in some.processes).encode() + b"\n")
        signal.pause()
    pids = [int(word) for word in os.read(told, 100).split()]
    assert len(pids) == 3
    os.kill(training, signal.SIGKILL)
    os.waitpid(training, 0)
    until = time.monotonic() + 60
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Slow:
    name = "slow"

    def fetch(self, rows: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        time.sleep(1)
        return {"rows": torch.from_numpy(rows)}


@pytest.mark.slow
def test_a_job_that_was_suspended_has_lost_no_worker():
    """Stopped with all its workers for longer than these may be silent, as schedulers do, it goes on."""
    told, say = os.pipe()
    training = os.fork()
    if not training:
        lost = []
        with Workers(Slow(), loader(2, seconds=4), lost.append) as some:
            stream = some.read([(0, np.arange(4))] * 8)
            os.write(say, " ".join(str(one.pid) for one in some.processes).encode())
            for _ in stream:
                pass
        os._exit(len(lost))
    everyone = [training, *(int(word) for word in os.read(told, 100).split())]
    time.sleep(1.5)
    for pid in everyone:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(6)
    for pid in everyone:  # the training first, which then sees that nothing has come for six seconds
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)
    assert os.waitstatus_to_exitcode(os.waitpid(training, 0)[1]) == 0


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "shared by torch"])
def test_no_random_number_is_drawn_and_nothing_is_left_of_torch(memory, monkeypatch):
    monkeypatch.setattr(batch_memory, "possible", lambda: memory)
    split = FailingData(row=-1).open(0).train
    torch.manual_seed(0)
    before = torch.get_rng_state(), signal.getsignal(signal.SIGCHLD)
    got = list(loading.training(split, partial(PLAN.keys, split, 0), loader(), pin=False))
    assert torch.equal(torch.get_rng_state(), before[0]) and signal.getsignal(signal.SIGCHLD) is before[1]
    assert len(got) == 8 and same(got, list(loading.training(split, partial(PLAN.keys, split, 0), Loader(), pin=False)))


@pytest.mark.parametrize("fault", ["killed", pytest.param("hangs", marks=pytest.mark.slow)])
def test_without_anonymous_memory_a_lost_worker_is_replaced_all_the_same(fault, tmp_path, monkeypatch):
    """As on macOS and Windows: a process that dies takes batches with it, which are read again."""
    monkeypatch.setattr(batch_memory, "possible", lambda: False)
    split, told = FailingData(fault=fault, row=19, once=str(tmp_path / "once")).open(0).train, []
    expected = list(loading.training(split, partial(PLAN.keys, split, 0), Loader(), pin=False))
    some = loader(seconds=2 if fault in SILENT else 60)
    got = list(loading.training(split, partial(PLAN.keys, split, 0), some, pin=False, tell=told.append))
    assert same(got, expected) and re.search(SAID[fault], told[0]) and "replaced (1 of 3 times)" in told[0]


class Bad:
    """Rows of which one is a mistake of the user."""

    name = "bad"

    def fetch(self, rows: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        if 2 in rows:
            raise UserError("images/2", "damaged", "an image", "remove it")
        return {"rows": torch.from_numpy(rows)}


def test_a_mistake_of_the_user_ends_the_stream_where_it_is():
    got = []
    with Workers(Bad(), loader()) as some, pytest.raises(UserError, match="images/2: damaged") as caught:
        for batch in some.read((0, np.array([row])) for row in range(5)):
            got.append(batch["rows"].item())
    assert got == [0, 1] and caught.value.remedy == "remove it"


def test_a_worker_that_dies_takes_no_batch_with_it_that_it_had_read(tmp_path):
    """Its second batch ends it before the first is taken: the first is not read again, and the second is named."""
    split, told = FailingData(fault="leaves", row=11, once=str(tmp_path / "once")).open(0).train, []
    keys = [(0, np.arange(8)), (0, np.arange(8, 16)), (0, np.arange(16, 24))]
    with Workers(split, loader(1), told.append) as some:
        stream = some.read(keys)
        some.processes[0].join(60)
        assert [batch["index"].tolist() for batch in stream] == [rows.tolist() for _, rows in keys]
    assert (
        len(told) == 1 and "rows 8, 9, 10, 11, 12, 13, 14, 15 of train: a worker process ended with code 3" in told[0]
    )


def test_a_way_to_start_processes_that_the_system_has_not_is_refused(monkeypatch):
    monkeypatch.setattr(workers, "multiprocessing", SimpleNamespace(get_all_start_methods=lambda: ["spawn"]))
    with pytest.raises(UserError, match=r"loader\.start: fork, which this platform does not have; expected spawn"):
        Workers(Bad(), loader())


class Shapes:
    """Batches of all kinds of arrays."""

    name = "shapes"

    def fetch(self, rows: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        base = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4) + epoch
        kinds = (torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.bool)
        some = {str(kind): base.to(kind) for kind in kinds}
        some |= {"across": base.permute(2, 0, 1), "of none": torch.empty(0, 5), "one": torch.tensor(epoch)}
        return some | {"rows": torch.from_numpy(rows), "large": torch.full((3 << 20,), 7, dtype=torch.uint8)}


@pytest.mark.parametrize(
    "start", ["fork", *(pytest.param(way, marks=pytest.mark.slow) for way in ("forkserver", "spawn"))]
)
def test_arrays_arrive_as_they_were_and_belong_to_whoever_has_them(start):
    keys = [(epoch, np.arange(epoch)) for epoch in range(5)]
    got = []
    with Workers(Shapes(), Loader(workers=2, start=start, timeout=Span(300, "seconds"))) as some:
        for batch in some.read(keys):
            batch["one"] += 100
            got.append(batch)
    for (epoch, rows), batch in zip(keys, got, strict=True):
        expected = Shapes().fetch(rows, epoch)
        expected["one"] += 100
        assert same([batch], [expected]) and all(batch[key].dtype == expected[key].dtype for key in batch)


def test_nothing_adds_up_over_many_batches():
    """No descriptor, no mapping and no thread is left of a batch that is gone."""
    keys = [(0, np.arange(4))] * 150

    def open_now() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text().count("trainkit-batch")
        return len(os.listdir("/proc/self/fd")), maps, threading.active_count()

    before, within = open_now(), []
    with Workers(Shapes(), loader(2)) as some:
        for number, _ in enumerate(some.read(keys)):
            if number in (30, 140):
                within.append(open_now())
    del _
    # As many batches are read ahead as workers have done by then, a few; of 110, something for each would be left.
    assert all(later <= early + 8 for early, later in zip(*within, strict=True)), within
    end = time.monotonic() + 10  # threads end by themselves, and what an earlier test left may have gone meanwhile
    while any(now > then for now, then in zip(open_now(), before, strict=True)) and time.monotonic() < end:
        time.sleep(0.01)
    assert all(now <= then for now, then in zip(open_now(), before, strict=True)), before


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, database):
    with own_store(tmp_path_factory.mktemp("undisturbed"), database):
        return run()


def words(fault: str, *more: str) -> tuple[str, ...]:
    return ("data.name=failing", f"data.fault={fault}", "loader.workers=2", "loader.start=fork", *more)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_run_that_loses_workers_ends_with_the_same_bits_and_says_so(store, undisturbed, tmp_path, fault):
    timeout = f"loader.timeout={3 if fault in SILENT else 60} s"
    ran = run(*words(fault, f"data.once={tmp_path / 'once'}", timeout))
    assert ran.code == 0 and all_same(ran, undisturbed) and ran.repeatable == undisturbed.repeatable
    (event, *_) = ran.events("worker_lost")
    assert "rows " in event.data["said"] and re.search(SAID[fault], event.data["said"])
    assert not undisturbed.events("worker_lost")


@pytest.mark.slow
def test_where_there_is_no_shared_memory_a_run_with_workers_ends_before_it_trains(undisturbed, tmp_path, database):
    """/dev/shm of 2 MB, all of it taken: queues between processes need some. Without workers the run goes as ever."""
    with mounted(Path("/dev/shm"), 2) as shm, own_store(tmp_path, database):
        shm.fill(leave=0)
        done = spawn(1, str(TOY), "loader.workers=2", "--plugin", "toy", **shm.environment)
        assert done.returncode == EXIT_CODE and "Traceback" not in done.stderr, done.stderr
        (said,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert said.startswith("error: loader.workers: ") and "loader.workers=0" in said
        done = spawn(1, str(TOY), "--plugin", "toy", **shm.environment)
        assert done.returncode == 0 and all_same(Ran(0, newest()), undisturbed), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["segmentation fault", "stopped"])
def test_a_run_whose_workers_die_again_and_again_ends_with_one_message(store, fault):
    timeout = f"loader.timeout={2 if fault in SILENT else 60} s"
    done = spawn(1, str(PLUGIN / "toy.yaml"), *words(fault, timeout), "--plugin", "toy")
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == EXIT_CODE and len(said) == 1 and "3 were replaced before" in said[0], done.stderr
    assert "Traceback" not in done.stderr and "epoch 0, rows " in said[0]
