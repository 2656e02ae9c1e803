"""torch's DataLoader in the place of our workers: the same batches, whatever becomes of a process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs import PLUGIN

from trainkit.config.schema import Loader
from trainkit.config.units import Span
from trainkit.data.loader import stream, torch_workers, worker_pool
from trainkit.data.loader.torch_workers import TorchWorkers
from trainkit.errors import UserError
from trainkit.training.plan import Plan

sys.path.insert(0, str(PLUGIN))
from failing import FailingData

PLAN = Plan(steps=8, steps_per_epoch=8, batch_size=8, micro_batch=8, accumulation=1, world=1, rank=0)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch):
    """A system without anonymous memory; nothing of torch's is left."""
    monkeypatch.setattr(worker_pool, "missing", lambda: ["os.memfd_create"])
    before = {child.pid for child in multiprocessing.active_children()}, signal.getsignal(signal.SIGCHLD)
    yield
    after = {child.pid for child in multiprocessing.active_children()}, signal.getsignal(signal.SIGCHLD)
    assert after[0] <= before[0] and after[1] is before[1]


def loader(seconds: float = 60, **more) -> Loader:
    return Loader(workers=2, start="fork", timeout=Span(seconds, "seconds"), **more)


def read(split, loader: Loader, told: list[str] | None = None) -> list[dict]:
    tell = None if told is None else told.append
    return list(stream.training(split, partial(PLAN.keys, split, 0), loader, pin=False, tell=tell))


def same(some: list[dict], others: list[dict]) -> bool:
    return len(some) == len(others) and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
        for a, b in zip(some, others, strict=True)
    )


def test_the_batches_are_those_of_the_process_itself_and_no_random_number_is_drawn(caplog):
    split = FailingData(row=-1).open(0).train
    torch.manual_seed(0)
    before = torch.get_rng_state()
    got = read(split, loader())
    assert torch.equal(torch.get_rng_state(), before)
    assert len(got) == 8 and same(got, read(split, Loader()))
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["loader.workers: this platform has no os.memfd_create; PyTorch's DataLoader reads the batches"]


@pytest.mark.parametrize(
    "fault, said, seconds",
    [
        ("killed", "was killed by SIGKILL", 60),
        ("leaves", "ended with code 3", 60),
        ("raises", "raised ValueError: no such thing", 60),
        ("hangs", "was silent for 2 s", 2),
    ],
)
def test_a_lost_process_is_replaced_and_the_batches_are_the_same(fault, said, seconds, tmp_path, monkeypatch):
    monkeypatch.setattr(torch_workers, "_LOOKS_EVERY", 0.5)
    split, told = FailingData(fault=fault, row=19, once=str(tmp_path / "once")).open(0).train, []
    expected = read(FailingData(row=-1).open(0).train, Loader())
    began = time.monotonic()
    assert same(read(split, loader(seconds), told), expected)
    assert told and said in told[0] and "replaced (1 of 3 times)" in told[0]
    assert time.monotonic() - began < 50, "a death is noticed at once, not by its silence"


def test_a_row_that_no_process_survives_ends_the_stream_no_later(monkeypatch):
    monkeypatch.setattr(torch_workers, "_LOOKS_EVERY", 0.5)
    split, got = FailingData(fault="leaves", row=19).open(0).train, []
    place = int(np.flatnonzero((split.order(0, 8) == 19).any(1))[0])
    with pytest.raises(UserError, match="ended with code 3; 3 were replaced before"):
        for batch in stream.training(split, partial(PLAN.keys, split, 0), loader(), pin=False):
            got.append(batch["index"].tolist())
    # A process that dies takes batches with it that it had read and not handed over.
    assert len(got) <= place and got == split.order(0, 8)[: len(got)].tolist()


class Bad:
    """Rows of which one is a mistake of the user."""

    name = "bad"

    def fetch(self, rows, epoch):
        if 2 in rows:
            raise UserError("images/2", "damaged", "an image", "remove it")
        return {"rows": torch.from_numpy(rows)}


def test_a_mistake_of_the_user_ends_the_stream_where_it_is():
    got = []
    with TorchWorkers(Bad(), loader()) as some, pytest.raises(UserError, match="images/2: damaged") as caught:
        for batch in some.read((0, np.array([row])) for row in range(5)):
            got.append(batch["rows"].item())
    assert got == [0, 1] and caught.value.remedy == "remove it"


def test_a_stream_is_closed_whatever_a_process_is_at():
    split = FailingData(fault="hangs", row=int(FailingData(row=-1).open(0).train.order(0, 8)[0, 0])).open(0).train
    with TorchWorkers(split, loader()) as some:
        some._begin((), iter([(0, np.arange(8))]), deque())
        processes = some._processes
        assert len(processes) == 2 and all(process.is_alive() for process in processes)
    assert not any(process.is_alive() for process in processes)


def test_a_way_to_start_processes_that_the_system_has_not_is_refused(monkeypatch):
    monkeypatch.setattr(torch_workers, "multiprocessing", SimpleNamespace(get_all_start_methods=lambda: ["spawn"]))
    with pytest.raises(UserError, match=r"loader\.start: fork, which this platform does not have; expected spawn"):
        torch_workers.workers(Bad(), loader())


@pytest.mark.parametrize("name", ["fork", "memfd_create"])
def test_what_is_missing_is_named(name, monkeypatch):
    monkeypatch.undo()
    monkeypatch.delattr(os, name)
    assert worker_pool.missing() == [f"os.{name}"]
