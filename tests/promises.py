"""Promises, counted in trials: the fixture `promise`, and what a soak makes of it.

    def test_it(promise):
        for seed in promise.trials("K3", "killed at a random moment, resumed to the same bits", few=20, many=200):
            with promise.trial(seed):
                ...  # one trial; what it raises is kept with its seed, and the next one is made

A test fails after its last trial, with the message of every seed that failed; one that yields a seed and makes no trial
of it fails too. Where trials are enumerated and not drawn, `of=` takes them in place of seeds.

    --soak             `many` seeds in place of `few`, and no tests but those of promises
    --seeds 17,23      these alone, wherever seeds are drawn: to look at one that failed
    --draw N           other seeds behind the first `few`, which are the same in every run
    --promises FILE    one line of JSON for each test; of a soak, a test that passed by FILE is not run again

`tests/soak.py` prints the table, and writes it into docs/reliability.md.
"""

from __future__ import annotations

import json
import os
import platform
import time
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

SOAK_SECONDS = 12 * 3600
"""Limit of a test in a soak, in place of that of the default tests."""
_DRAWS = 1_000_000


@dataclass
class Counted:
    """Trials of one promise in one test."""

    id: str
    text: str
    trials: int = 0
    seeds: list[int] = field(default_factory=list)
    """First and last seed of each run of seeds; none where trials were enumerated."""
    failed: dict[str, str] = field(default_factory=dict)
    """What came of trials that failed, by seed."""


class Promise:
    """The promises that one test looks at."""

    def __init__(self, soak: bool, draw: int, only: Collection[int]):
        self._soak, self._draw, self._only = soak, draw, only
        self.counted: list[Counted] = []

    def trials(
        self, id: str, text: str, *, few: int = 0, many: int = 0, of: Collection[Any] | None = None
    ) -> Iterator[Any]:
        """Seeds of the trials of a promise, `few` or in a soak `many`; or each member of `of`."""
        if any(counted.id == id and counted.text == text for counted in self.counted):
            raise ValueError(f"{id} is counted twice in this test")
        counted = Counted(id, text)
        self.counted.append(counted)
        for number, seed in enumerate(self._seeds(few, many) if of is None else of, 1):
            if of is None:
                _extend(counted.seeds, seed)
            print(f"{id}: {seed}", flush=True)
            yield seed
            if counted.trials != number:
                raise RuntimeError(f"{id}: no trial was made of {seed}, or more than one")

    def _seeds(self, few: int, many: int) -> Iterator[int]:
        if self._only:
            yield from self._only
            return
        yield from range(few)
        if self._soak:
            yield from range(few + self._draw * _DRAWS, many + self._draw * _DRAWS)

    @contextmanager
    def trial(self, seed: Any) -> Iterator[None]:
        """One trial. What it raises fails the test after its last trial."""
        counted = self.counted[-1]
        counted.trials += 1
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:
            print(f"{counted.id}: {seed} failed\n{traceback.format_exc()}", flush=True)
            counted.failed[str(seed)] = str(error) or type(error).__name__

    def settle(self) -> None:
        """Fail for every trial that failed, or if there was none."""
        if not any(counted.trials for counted in self.counted):
            pytest.fail("no trial was made", pytrace=False)
        lines = []
        for counted in self.counted:
            if counted.failed:
                lines.append(f"{counted.id} ({counted.text}): {len(counted.failed)} of {counted.trials} trials failed")
                lines += [f"  {seed}: {message}" for seed, message in counted.failed.items()]
        if lines:
            pytest.fail("\n".join(lines), pytrace=False)


def _extend(runs: list[int], seed: int) -> None:
    if runs and runs[-1] == seed - 1:
        runs[-1] = seed
    else:
        runs += [seed, seed]


def record(file: Path, test: str, passed: bool, seconds: float, promise: Promise) -> None:
    """Add a line for a test. One write in append mode, so that lines of several processes do not mix."""
    about = {"torch": metadata.version("torch"), "python": platform.python_version(), "cores": os.cpu_count()}
    counted = [asdict(counted) for counted in promise.counted]
    line = {"test": test, "passed": passed, "seconds": round(seconds, 1), **about, "promises": counted}
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(descriptor, f"\n{json.dumps(line)}\n".encode())  # the line before may have been cut short
    finally:
        os.close(descriptor)


def recorded(file: Path) -> dict[str, dict[str, Any]]:
    """The last line of each test; one cut short is left out."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    found = {}
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        found[entry["test"]] = entry
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("promises")
    group.addoption("--soak", action="store_true", help="tests of promises alone, with many trials each")
    group.addoption("--seeds", type=_numbers, default=[], help="make trials of these seeds alone: 17,23")
    group.addoption("--draw", type=int, default=0, help="which seeds a soak takes behind the first")
    group.addoption("--promises", type=Path, help="file for what came of the trials, a line of JSON for each test")


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--soak"):
        return
    file = config.getoption("--promises")
    passed = {test for test, entry in recorded(file).items() if entry["passed"]} if file else set()
    kept = [i for i in items if "promise" in getattr(i, "fixturenames", ()) and i.nodeid not in passed]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
    for item in items:
        item.add_marker(pytest.mark.timeout(SOAK_SECONDS), append=False)


@pytest.fixture
def promise(request: pytest.FixtureRequest) -> Promise:
    """Counts trials; see the top of tests/promises.py."""
    option = request.config.getoption
    return Promise(option("--soak"), option("--draw"), option("--seeds"))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    promise = pyfuncitem.funcargs.get("promise")
    if not isinstance(promise, Promise):
        return (yield)
    began, passed = time.monotonic(), None
    try:
        result = yield
        promise.settle()
        passed = True
        return result
    except (Exception, pytest.fail.Exception):
        passed = False
        raise
    finally:
        file = pyfuncitem.config.getoption("--promises")
        if file is not None and passed is not None:
            record(file.absolute(), pyfuncitem.nodeid, passed, time.monotonic() - began, promise)
