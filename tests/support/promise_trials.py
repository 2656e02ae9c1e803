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
    --promises FILE    lines of JSON: what came of the trials so far; of a soak, what passed by FILE is not made again

`tests/support/soak.py` prints the table, and writes it into docs/project/reliability.md.
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


_KEPT_EVERY_SECONDS = 5.0
"""A killed soak loses no more than this and the trial at hand; a line for each of 100,000 short trials is too much."""


@dataclass
class Counted:
    """Trials of one promise in one test."""

    id: str
    text: str
    trials: int = 0
    seeds: list[int] = field(default_factory=list)
    """First and last seed of each run of seeds; none where trials were enumerated."""
    cases: list[str] = field(default_factory=list)
    """Where trials were enumerated."""
    failed: dict[str, str] = field(default_factory=dict)
    """What came of trials that failed, by seed."""

    def add(self, trial: Any, drawn: bool) -> None:
        """Count a trial."""
        self.trials += 1
        if not drawn:
            self.cases.append(str(trial))
        elif self.seeds and self.seeds[-1] == trial - 1:
            self.seeds[-1] = trial
        else:
            self.seeds += [trial, trial]


class Promise:
    """The promises that one test looks at."""

    def __init__(self, soak: bool, draw: int, only: Collection[int], kept: Kept | None):
        self._soak, self._draw, self._only, self._kept = soak, draw, only, kept
        self.counted: list[Counted] = []
        self._drawn = False
        self._before = 0
        """Trials that passed before, by the file of what is kept."""

    def trials(
        self, id: str, text: str, *, few: int = 0, many: int = 0, of: Collection[Any] | None = None
    ) -> Iterator[Any]:
        """Seeds of the trials of a promise, `few` or in a soak `many`; or each member of `of`."""
        if any(counted.id == id and counted.text == text for counted in self.counted):
            raise ValueError(f"{id} is counted twice in this test")
        counted = Counted(id, text)
        self.counted.append(counted)
        self._drawn = of is None
        made = self._kept.passed(id, text) if self._kept and self._soak and not self._only and self._drawn else ()
        self._before += len(made)
        for trial in self._seeds(few, many) if of is None else of:
            if trial in made:
                continue
            trials = counted.trials
            print(f"{id}: {trial}", flush=True)
            yield trial
            if counted.trials != trials + 1:
                raise RuntimeError(f"{id}: no trial was made of {trial}, or more than one")

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
        counted.add(seed, self._drawn)
        message = None
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:
            print(f"{counted.id}: {seed} failed\n{traceback.format_exc()}", flush=True)
            message = counted.failed[str(seed)] = str(error) or type(error).__name__
        if self._kept:
            self._kept.add(counted, seed, self._drawn, message)

    def keep(self, passed: bool | None) -> None:
        """Write what is new to the file of what is kept; seeds that were asked for are not all that a soak makes."""
        if self._kept:
            self._kept.write(None if passed and self._only else passed, self.counted)

    def settle(self) -> None:
        """Fail for every trial that failed, or if there was none."""
        if not any(counted.trials for counted in self.counted) and not self._before:
            pytest.fail("no trial was made", pytrace=False)
        lines = []
        for counted in self.counted:
            if counted.failed:
                lines.append(f"{counted.id} ({counted.text}): {len(counted.failed)} of {counted.trials} trials failed")
                lines += [f"  {seed}: {message}" for seed, message in counted.failed.items()]
        if lines:
            pytest.fail("\n".join(lines), pytrace=False)


class Kept:
    """What comes of one test, in a file that several processes write at once."""

    def __init__(self, file: Path, test: str):
        self._file, self._test, self._began = file.absolute(), test, time.monotonic()
        self._fresh: dict[tuple[str, str], Counted] = {}

    def passed(self, id: str, text: str) -> set[int]:
        """Seeds of a promise that have passed."""
        found = recorded(self._file).get(self._test, {"promises": []})["promises"]
        return {
            seed
            for one in found
            if (one["id"], one["text"]) == (id, text)
            for first, last in pairs(one["seeds"])
            for seed in range(first, last + 1)
            if str(seed) not in one["failed"]
        }

    def add(self, counted: Counted, trial: Any, drawn: bool, message: str | None) -> None:
        """Note a trial."""
        one = self._fresh.setdefault((counted.id, counted.text), Counted(counted.id, counted.text))
        one.add(trial, drawn)
        if message is not None:
            one.failed[str(trial)] = message
        if message is not None or time.monotonic() - self._began > _KEPT_EVERY_SECONDS:
            self.write(None)

    def write(self, passed: bool | None, but: Collection[Counted] = ()) -> None:
        """Add a line: what is new, whether the test passed if it is at its end, and promises of which no trial was."""
        about = {"torch": metadata.version("torch"), "python": platform.python_version(), "cores": os.cpu_count()}
        counted = [asdict(one) for one in (*self._fresh.values(), *(one for one in but if not one.trials))]
        seconds = round(time.monotonic() - self._began, 1)
        line = {"test": self._test, "passed": passed, "seconds": seconds, **about, "promises": counted}
        self._fresh, self._began = {}, time.monotonic()
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:  # one write in append mode, so that lines of several processes do not mix
            os.write(descriptor, f"\n{json.dumps(line)}\n".encode())  # the line before may have been cut short
        finally:
            os.close(descriptor)


def recorded(file: Path) -> dict[str, dict[str, Any]]:
    """What all lines of a file say of each test: of a trial that was made again the last. A line cut short is left out.

    `passed` is None for a test that was not seen to end.
    """
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    found: dict[str, dict[str, Any]] = {}
    made: dict[tuple[str, str, str], tuple[set[int], dict[str, None], dict[str, str]]] = {}
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        before = found.get(entry["test"], {"passed": None, "seconds": 0.0})
        passed = before["passed"] if entry["passed"] is None else entry["passed"]
        seconds = round(before["seconds"] + entry["seconds"], 1)
        found[entry["test"]] = {**entry, "passed": passed, "seconds": seconds}
        for one in entry["promises"]:
            seeds, cases, failed = made.setdefault((entry["test"], one["id"], one["text"]), (set(), {}, {}))
            again = {seed for first, last in pairs(one["seeds"]) for seed in range(first, last + 1)}
            seeds |= again
            cases |= dict.fromkeys(one["cases"])
            for trial in failed.keys() & {*map(str, again), *one["cases"]}:
                del failed[trial]
            failed |= one["failed"]
    for test, entry in found.items():
        entry["promises"] = []
        for (of, id, text), (seeds, cases, failed) in made.items():
            if of == test:
                counted = Counted(id, text, cases=list(cases), failed=failed)
                for seed in sorted(seeds):
                    counted.add(seed, True)
                counted.trials += len(cases)
                entry["promises"].append(asdict(counted))
    return found


def pairs(runs: list[int]) -> list[tuple[int, int]]:
    """First and last seed of each run of seeds."""
    return list(zip(runs[::2], runs[1::2], strict=True))


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
    """Counts trials; see the top of tests/support/promise_trials.py."""
    option = request.config.getoption
    kept = Kept(option("--promises"), request.node.nodeid) if option("--promises") else None
    return Promise(option("--soak"), option("--draw"), option("--seeds"), kept)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    promise = pyfuncitem.funcargs.get("promise")
    if not isinstance(promise, Promise):
        return (yield)
    passed = False
    try:
        result = yield
        promise.settle()
        passed = True
        return result
    except (KeyboardInterrupt, SystemExit):
        passed = None
        raise
    finally:
        promise.keep(passed)
