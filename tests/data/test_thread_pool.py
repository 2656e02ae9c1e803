import os
import threading
import time

import numpy as np
import pytest
import torch

from trainkit.config.schema import Loader
from trainkit.config.units import Span
from trainkit.data import thread_pool
from trainkit.data.loader.workers import Workers


@pytest.fixture
def four(monkeypatch):
    monkeypatch.setattr(thread_pool, "count", lambda: 4)


@pytest.mark.parametrize(("many", "least", "parts"), [(0, 1, 1), (1, 1, 1), (3, 2, 1), (4, 2, 2), (7, 1, 4), (9, 5, 1)])
def test_parts_cover_everything_once(four, many, least, parts):
    seen, slices = np.zeros(many, int), []

    def work(part: slice) -> None:
        slices.append(part)
        seen[part] += 1

    thread_pool.in_parts(work, many, least)
    assert (seen == 1).all() and len(slices) == parts
    assert parts == 1 or min(s.stop - s.start for s in slices) >= least


def test_parts_are_worked_on_at_the_same_time(four):
    meet = threading.Barrier(4, timeout=10)  # one after another, they would wait for each other in vain
    places = []
    thread_pool.in_parts(lambda part: places.append(meet.wait()), 4, 1)
    assert sorted(places) == [0, 1, 2, 3]


def test_alone_the_calling_thread_does_it(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    names = []
    with thread_pool.alone(), thread_pool.alone():
        assert thread_pool.count() == 1
        thread_pool.in_parts(lambda part: names.append(threading.current_thread().name), 8, 1)
    assert names == [threading.current_thread().name] and thread_pool.count() == 8


@pytest.mark.parametrize(
    ("cores", "processes", "expected"), [(8, 1, 8), (8, 3, 2), (2, 4, 1), (200, 1, thread_pool.MOST)]
)
def test_processes_share_the_cores(monkeypatch, cores, processes, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert thread_pool.count() == expected


def test_the_first_error_is_raised(four):
    def work(part: slice) -> None:
        if part.start >= 2:
            raise ValueError(f"part {part.start}")

    with pytest.raises(ValueError, match="part 2"):
        thread_pool.in_parts(work, 4, 1)


def test_the_calling_thread_works_too_and_nobody_after_the_call(four):
    names, ended = set(), []

    def work(part: slice) -> None:
        names.add(threading.current_thread().name)
        if part.start == 0:
            raise ValueError("part 0")
        time.sleep(0.05)
        ended.append(part.start)

    with pytest.raises(ValueError, match="part 0"):
        thread_pool.in_parts(work, 4, 1)
    assert len(names) > 1 and threading.current_thread().name in names
    assert sorted(ended) == [1, 2, 3]


class _Counts:
    def fetch(self, rows, epoch: int) -> dict[str, torch.Tensor]:
        assert thread_pool.count() == 1, "a worker leaves the other cores to the others"
        found = thread_pool.count
        thread_pool.count = lambda: 4
        try:
            names = set()
            thread_pool.in_parts(lambda part: names.add(threading.current_thread().name), 4, 1)
        finally:
            thread_pool.count = found
        return {"names": torch.tensor(len(names))}


def test_a_fork_does_not_wait_for_threads_that_it_has_not(four, monkeypatch):
    thread_pool.in_parts(lambda part: None, 4, 1)
    monkeypatch.undo()
    with Workers(_Counts(), Loader(workers=1, start="fork", timeout=Span(30, "seconds"))) as workers:
        keys = [(0, np.arange(2))] * 2
        assert [int(batch["names"]) >= 1 for batch in workers.read(keys)] == [True, True]


def test_with_turns_who_is_ready_takes_the_next_part(four):
    """One thread that is slow at its first part leaves the others to those that are not."""
    by, slow = {}, threading.Event()

    def work(part: slice) -> None:
        by[part.start] = threading.current_thread().name
        if len(by) == 8:
            slow.set()
        if part.start == 0:
            assert slow.wait(30), "the others did not do all but one part"

    thread_pool.in_parts(work, 8, 1, turns=2)
    assert sorted(by) == list(range(8)) and list(by.values()).count(by[0]) == 1
