import contextlib
import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trainkit.config.schema import Loader
from trainkit.data.loader import stream as loading
from trainkit.errors import UserError
from trainkit.training.plan import Plan

PLAN = Plan(steps=7, steps_per_epoch=3, batch_size=4, micro_batch=2, accumulation=2, world=1, rank=0)


class Numbers:
    """Samples that are their own row and epoch; says who read them, and may fail at a row."""

    size, name = 13, "numbers"

    def __init__(self, any_thread: bool, bad: int = -1):
        self.any_thread, self.bad, self.readers, self.read = any_thread, bad, set(), 0

    def order(self, epoch: int, batch_size: int) -> np.ndarray:
        return np.random.default_rng(epoch).permutation(12).reshape(3, 4)

    def fetch(self, indices: np.ndarray, epoch: int, view: int | None = None) -> dict[str, torch.Tensor]:
        self.readers.add(threading.current_thread().name)
        self.read += 1
        if self.bad in indices:
            raise UserError("numbers", f"row {self.bad} is bad")
        return {"index": torch.from_numpy(indices.copy()), "epoch": torch.full((len(indices),), epoch)}


def rows(split: Numbers, step: int = 0, on_gpu: bool = True, **options) -> list[list[int]]:
    stream = loading.training(split, partial(PLAN.keys, split, step), Loader(pin=False, **options), pin=on_gpu)
    return [batch["index"].tolist() + batch["epoch"].tolist() for batch in stream]


def test_beside_a_gpu_a_thread_reads_the_same_batches():
    here, beside, tied = Numbers(True), Numbers(True), Numbers(False)
    expected = rows(here, on_gpu=False)
    assert rows(beside) == rows(tied) == expected and len(expected) == 14
    main = threading.current_thread().name
    assert here.readers == tied.readers == {main} and main not in beside.readers and len(beside.readers) == 1
    assert rows(Numbers(True), 5) == expected[10:], "resumed"


def test_a_bad_row_ends_the_stream_where_it_is_and_no_sooner():
    expected, got = rows(Numbers(True)), []
    bad = expected[5][0]
    first = next(i for i, batch in enumerate(expected) if bad in batch[:2])
    with pytest.raises(UserError, match=f"row {bad} is bad"):
        for batch in loading.training(
            Numbers(True, bad), partial(PLAN.keys, Numbers(True, bad), 0), Loader(pin=False), pin=True
        ):
            got.append(batch["index"].tolist())
    assert got == [batch[:2] for batch in expected[:first]]


@pytest.mark.parametrize("many", [1, 3])
def test_so_many_are_read_ahead_and_no_more(many):
    split = Numbers(True)
    stream = loading.training(split, partial(PLAN.keys, split, 0), Loader(pin=False, prefetch=many), pin=True)
    assert split.read == 0, "nothing is read before it is asked for"
    for taken in range(1, 5):
        next(stream)
        until = time.monotonic() + 10
        while split.read < taken + many and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.01)
        assert split.read == taken + many
    stream.close()
    assert not any(thread.name.startswith("trainkit-ahead") for thread in threading.enumerate())


def test_without_a_gpu_batches_are_handed_on_as_they_are():
    batches = iter([{"x": torch.zeros(1)}])
    assert loading.copied(batches, lambda batch: pytest.fail("placed twice"), torch.device("cpu")) is batches


@pytest.mark.parametrize("count", [0, 1, 4])
def test_each_batch_is_copied_while_the_one_before_it_is_trained_on(monkeypatch, count):
    """The calls to a GPU that is not here, in their order."""
    calls: list[str] = []

    class Stream:
        def __init__(self, name):
            self.name = name if isinstance(name, str) else "copies"

        def record_event(self) -> str:
            calls.append(f"{self.name}: event")
            return "event"

        def wait_event(self, event: str) -> None:
            calls.append(f"{self.name}: wait")

    @contextlib.contextmanager
    def on(stream):
        calls.append("[")
        yield
        calls.append("]")

    cuda = SimpleNamespace(Stream=Stream, stream=on, current_stream=lambda: Stream("main"))
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: calls.append(f"{stream.name}: uses"))

    def place(batch):
        calls.append(f"copy {int(batch['x'])}")
        return batch

    batches = ({"x": torch.tensor(i)} for i in range(count))
    for batch in loading.copied(batches, place, torch.device("cuda")):
        calls.append(f"train {int(batch['x'])}")
    copied = {i: ["[", f"copy {i}", "]", "copies: event"] for i in range(count)}
    expected = copied.get(0, [])
    for i in range(count):
        expected += [*copied.get(i + 1, []), "main: wait", "main: uses", f"train {i}"]
    assert calls == expected


@pytest.mark.parametrize(("size", "batch", "world"), [(1, 8, 1), (13, 4, 1), (13, 4, 3), (12, 4, 3), (5, 4, 2)])
def test_ranks_cover_every_sample_once_in_batches_of_one_size(size, batch, world):
    split, seen = SimpleNamespace(size=size, at_once=None), []
    parts = [list(loading.every_sample(split, batch, world, rank)) for rank in range(world)]
    for step in zip(*parts, strict=True):  # equally many on each rank
        for rows, real in step:
            assert len(rows) == len(real) == min(batch, size) and (rows[~real] == size - 1).all()
            seen += rows[real].tolist()
    assert seen == list(range(size)), "in order, rank after rank"


def test_a_large_evaluation_begins_at_once():
    rows, real = next(loading.every_sample(SimpleNamespace(size=10**15, at_once=None), 256, 8, 3))
    assert rows.tolist() == list(range(768, 1024)) and real.all()
