"""Shared by the benchmarks against other implementations: the same work, a process each, alternating in rounds.

A benchmark states its `Contest` and calls `main`:

    CONTEST = Contest(
        title="Overhead of a step",
        unit="us a step",
        baseline="bare",
        sides={"bare": bare, "trainkit": ours},     # side(case) -> Sample
        cases=("tiny",),
    )
    if __name__ == "__main__":
        CONTEST.main(__doc__)

    python benchmarks/step.py                     3 rounds
    ... --rounds 7 --sides trainkit accelerate --json FILE

A round starts a process for each side in an order of its own, so that what else runs on the machine falls on all of
them alike. A ratio is the median over rounds of side / baseline within one round, with the range of these. Sides that
claim to do the same work prove it: their `proof` must be equal, or the contest ends with an error and prints no table.
A side whose package is not there raises ModuleNotFoundError and stands in the table as absent.

Where differences are small against the changes of pace of the machine itself, as of a virtual one whose host turns to
others, sides take `turns`: all of a round are alive, one works at a time, a block of some ten milliseconds, and all
others are stopped with all their threads. A ratio or difference of a round is then the median of those within a cycle.

How busy the others keep the machine is measured in a second of silence before each process. Above half a core the table
is marked as no result: then a ratio says more about the neighbours.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

BUSY = 0.5
"""Cores that others may use while a ratio still counts as a result."""
ROUNDS = 3
"""Unless more are asked for, as `make bench-full` does."""
_MARK = "contest: "
_PACKAGES = (
    "torch",
    "accelerate",
    "lightning",
    "timm",
    "torchvision",
    "datasets",
    "mlflow",
    "monai",
    "pytorch-metric-learning",
)


@dataclass(frozen=True)
class Sample:
    """What one process measured."""

    value: float
    """In the unit of the contest; less is better unless the contest says otherwise."""
    proof: Any = None
    """What must be equal for all sides of a case: a digest of final weights, a list of numbers. None: nothing to prove.
    Numbers are compared within the contest's tolerance, all else exactly."""
    more: Mapping[str, float] = field(default_factory=dict)
    """Further columns: median over rounds."""
    blocks: Sequence[float] = ()
    """The values of its turns, where sides take turns."""


@dataclass(frozen=True)
class Target:
    """What is aimed at: the ratio of a side to another, or its own figure, is at most (or at least) this."""

    case: str
    side: str
    limit: float
    of: str = "ratio"
    """`ratio`, `difference` (side minus baseline, in the unit), `value`, or the name of a further column."""
    least: bool = False
    """Whether the figure must reach the limit instead of staying below it."""
    words: str = ""
    """In words, for the table."""
    against: str = ""
    """The side that ratio and difference are to; empty for the baseline."""


@dataclass(frozen=True)
class Contest:
    """Sides that do the same work, and in what they are compared."""

    title: str
    unit: str
    baseline: str
    sides: Mapping[str, Callable[[str], Sample]]
    cases: Sequence[str] = ("",)
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The sides of a case that not all of them can do."""
    ours: Sequence[str] = ("trainkit",)
    """The sides that are this project's; the others are its peers."""
    once: Sequence[str] = ()
    """Cases of the first round alone."""
    more_is_better: bool = False
    tolerance: float = 0.0
    """By which share numbers of a proof may differ."""
    targets: Sequence[Target] = ()
    bounds: str = ""
    """What bounds the figures, where a target is missed."""
    threads: int = 1
    """Of each process."""
    timeout: float = 300.0
    """Seconds of one process, or of one of its turns."""
    turns: bool = False
    """Whether sides take turns; they call `next_turn` between the blocks of their work."""

    def main(self, doc: str | None, argv: Sequence[str] | None = None) -> int:
        """The command line of a benchmark. Returns its exit code: 1 where work was not equal."""
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--rounds", type=int, default=ROUNDS)
        parser.add_argument("--sides", nargs="+", choices=list(self.sides), default=list(self.sides))
        parser.add_argument("--cases", nargs="+", choices=list(self.cases), default=list(self.cases))
        parser.add_argument("--json", type=Path, help="also write the results to this file")
        parser.add_argument("--one", nargs=2, metavar=("SIDE", "CASE"), help=argparse.SUPPRESS)
        asked = parser.parse_args(argv)
        if asked.one:
            print(_MARK + json.dumps(asdict(self._one(*asked.one))), flush=True)
            return 0
        sides = [self.baseline, *(side for side in asked.sides if side != self.baseline)]
        # Told to end, it ends those that stand still as well.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        found = self.run(Path(sys.argv[0]), sides, asked.cases, asked.rounds)
        if asked.json:
            asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print("\n".join(self.lines(found)))
        return 1 if found["unequal"] else 0

    def _one(self, side: str, case: str) -> Sample:
        return self.sides[side](case)

    # ---- running

    def run(self, script: Path, sides: Sequence[str], cases: Sequence[str], rounds: int) -> dict[str, Any]:
        """All rounds; figures as plain data."""
        values: dict[str, dict[str, list[dict[str, Any]]]] = {case: {side: [] for side in sides} for case in cases}
        absent: dict[str, str] = {}
        busy: list[float] = []
        for number in range(rounds):
            turn = number % len(sides)
            for case in cases:
                if number and case in self.once:
                    continue
                able = [side for side in (*sides[turn:], *sides[:turn]) if side in self.only.get(case, sides)]
                able = [side for side in able if side not in absent]
                for group in [able] if self.turns else [[side] for side in able]:
                    busy.append(others())
                    for side, (sample, why) in self._processes(script, group, case).items():
                        if sample is None:
                            absent[side] = why
                            continue
                        values[case][side].append(sample)
                        print(
                            f"{number + 1}/{rounds} {case} {side}: {sample['value']:.6g} {self.unit}", file=sys.stderr
                        )
        return {
            "title": self.title,
            "unit": self.unit,
            "baseline": self.baseline,
            "rounds": rounds,
            "cases": values,
            "absent": absent,
            "unequal": self._unequal(values),
            "busy": round(statistics.median(busy), 2) if busy else math.nan,
            "machine": machine(),
            "date": time.strftime("%Y-%m-%d"),
        }

    def _processes(self, script: Path, sides: Sequence[str], case: str) -> dict[str, tuple[dict[str, Any] | None, str]]:
        """What each side measured, or why it did not; more than one side takes turns with the others."""
        with tempfile.TemporaryDirectory() as folder:
            made = {side: _Process(script, side, case, self.threads, Path(folder)) for side in sides}
            try:
                if self.turns:
                    waiting = [side for side in sides if made[side].go(self.timeout)]  # up to its first block
                    while waiting:
                        waiting = [side for side in reversed(waiting) if made[side].go(self.timeout)]  # A B B A
                return {side: self._ended(process, side, case) for side, process in made.items()}
            finally:
                for process in made.values():
                    process.kill()

    def _ended(self, process: _Process, side: str, case: str) -> tuple[dict[str, Any] | None, str]:
        try:
            out, err, code = process.ended(self.timeout)
        except subprocess.TimeoutExpired:
            return None, f"took more than {self.timeout:g} s"
        for line in reversed(out.splitlines()):
            if line.startswith(_MARK):
                return json.loads(line[len(_MARK) :]), ""
        last = (err.strip().splitlines() or [f"exit code {code}"])[-1]
        if "ModuleNotFoundError" in last:
            return None, f"{last.partition(': ')[2]}: pip install 'trainkit[bench]'"
        raise SystemExit(f"{self.title}: {side} {case} failed: {last}\n{err[-2000:]}")

    def _unequal(self, values: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> list[str]:
        found = []
        for case, sides in values.items():
            proofs = {side: s["proof"] for side, samples in sides.items() for s in samples if s["proof"] is not None}
            first = next(iter(proofs.values()), None)
            for side, proof in proofs.items():
                if not same(first, proof, self.tolerance):
                    found.append(f"{case} {side}: {str(proof)[:80]}, not {str(first)[:80]}")
        return found

    # ---- in words

    def lines(self, found: Mapping[str, Any], command: str = "") -> list[str]:
        """Return the table with its conditions; with its `command`, as a section of a page that names the machine."""
        if found["unequal"]:
            return [f"NO TABLE: the implementations did not do the same work: {line}" for line in found["unequal"]]
        m = found["machine"]
        threads = f"{self.threads} {'thread' if self.threads == 1 else 'threads'} per process"
        rounds = f"{found['rounds']} rounds{', each of many alternating blocks' if self.turns else ''}; {threads}"
        where = f"{found['date']}; {m['cpu']}, {m['cores']} cores; {m['versions']}; "
        others = f"other processes used {found['busy']:g} cores."
        about = f"{rounds}; {others} `{command}`" if command else f"{where}{rounds}; {others}"
        lines = [f"### {self.title if command else found['title']}", "", about]
        if found["busy"] > BUSY:
            lines.append(f"**The machine was busy (other processes used more than {BUSY:g} cores): not valid.**")
        extra = sorted(
            {key for sides in found["cases"].values() for ss in sides.values() for s in ss for key in s["more"]}
        )
        named = any(found["cases"])
        titles = [
            *(["case"] if named else []),
            "implementation",
            found["unit"],
            "best",
            f"/ {found['baseline']}",
            "range",
            *extra,
        ]
        lines += ["", f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
        for case, sides in found["cases"].items():
            for side, samples in sides.items():
                if samples:
                    cells = self._cells(sides, side, extra)
                    lines.append(f"| {' | '.join([*([case] if named else []), side, *cells])} |")
        lines += [f"\n{side} was not measured: {why}" for side, why in found["absent"].items()]
        if not command:  # a page has them in one table
            lines += [f"\ntarget: {what} {limit}: {figure}, {met}" for what, limit, figure, met in self.aims(found)]
        lines += [f"\n{self.bounds}"] if self.bounds else []
        return lines

    def aims(self, found: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
        """Each target of which something was measured: what, the limit, the figure, `met` or `missed`."""
        rows = []
        for target in self.targets:
            figure = self.figure(found, target)
            if figure is not None:
                met = figure >= target.limit if target.least else figure <= target.limit
                what = target.words or " ".join(filter(None, (target.case, target.side, target.of)))
                limit = f"{'at least' if target.least else 'at most'} {target.limit:g}"
                rows.append((what.rstrip(","), limit, f"{figure:.4g}", "met" if met else "missed"))
        return rows

    def standings(self, found: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
        """Compare with each other implementation: case, ours, the other, ratio (above 1: ours is better), range."""
        rows = []
        for case, sides in found["cases"].items():
            for own in (side for side in self.ours if sides.get(side)):
                for peer in (side for side in sides if side not in self.ours and sides[side]):
                    paired = ratios(sides, own, peer)
                    if not self.more_is_better:
                        paired = [1 / ratio for ratio in paired]
                    figures = (statistics.median(paired), min(paired), max(paired))
                    times, least, most = (_number(figure) for figure in figures)
                    rows.append((case, own, peer, times, f"{least} to {most}"))
        return rows

    def figure(self, found: Mapping[str, Any], target: Target) -> float | None:
        """What a target speaks of; None where that was not measured."""
        sides = found["cases"].get(target.case, {})
        samples, against = sides.get(target.side, []), target.against or found["baseline"]
        if not samples or (target.of in ("ratio", "difference") and not sides.get(against)):
            return None
        if target.of == "ratio":
            return statistics.median(ratios(sides, target.side, against))
        if target.of == "difference":
            return statistics.median(differences(sides, target.side, against))
        return statistics.median(s["value"] if target.of == "value" else s["more"][target.of] for s in samples)

    def _cells(self, sides: Mapping[str, Sequence[Mapping[str, Any]]], side: str, extra: Sequence[str]) -> list[str]:
        samples = sides[side]
        each = [s["value"] for s in samples]
        best = max(each) if self.more_is_better else min(each)
        cells = [_number(statistics.median(each)), _number(best)]
        if side == self.baseline or not sides[self.baseline]:
            cells += ["1" if side == self.baseline else "", ""]
        else:
            paired = ratios(sides, side, self.baseline)
            cells += [f"{statistics.median(paired):.3g}", f"{min(paired):.3g} to {max(paired):.3g}"]
        for key in extra:
            known = [s["more"][key] for s in samples if key in s["more"]]
            cells.append(_number(statistics.median(known)) if known else "")
        return cells


def ratios(sides: Mapping[str, Sequence[Mapping[str, Any]]], side: str, baseline: str) -> list[float]:
    """Side over baseline, round by round."""
    return [statistics.median(a / b for a, b in pairs) for pairs in _paired(sides[side], sides[baseline])]


def differences(sides: Mapping[str, Sequence[Mapping[str, Any]]], side: str, baseline: str) -> list[float]:
    """Side less baseline, round by round."""
    return [statistics.median(a - b for a, b in pairs) for pairs in _paired(sides[side], sides[baseline])]


def _paired(own: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]) -> list[list[tuple[float, float]]]:
    """The figures of each round that were taken at about the same time."""
    return [
        list(zip(a["blocks"], b["blocks"], strict=True)) if a.get("blocks") else [(a["value"], b["value"])]
        for a, b in zip(own, base, strict=False)
    ]


def same(a: Any, b: Any, tolerance: float) -> bool:
    """Whether two proofs say the same."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, float | int) and isinstance(b, float | int):
        return a == b or math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
    return a == b


_TURN = "CONTEST_TURN"


def next_turn() -> None:
    """End a block and wait until this side may begin the next. Alone, or without turns, it returns at once."""
    if _TURN in os.environ:
        told, go = map(int, os.environ[_TURN].split())
        os.write(told, b".")
        os.read(go, 1)


class _Process:
    """One side of a case in a process group of its own."""

    def __init__(self, script: Path, side: str, case: str, threads: int, folder: Path):
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        env |= {"HF_HUB_OFFLINE": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "TOKENIZERS_PARALLELISM": "false"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # no side compiles its modules in each process
        root = str(Path(__file__).resolve().parents[1])
        env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
        self._command = [sys.executable, str(script), "--one", side, case]
        self._env, self._said, self._running = env, (folder / f"{side}.out", folder / f"{side}.err"), None

    def _start(self, turns: bool) -> subprocess.Popen:
        fds: tuple[int, ...] = ()
        if turns:
            self._told, told = os.pipe()
            go, self._go = os.pipe()
            fds = (told, go)
            self._env[_TURN] = f"{told} {go}"
        with open(self._said[0], "w") as out, open(self._said[1], "w") as err:
            self._running = subprocess.Popen(
                self._command, stdout=out, stderr=err, env=self._env, pass_fds=fds, start_new_session=True
            )
        for fd in fds:
            os.close(fd)
        return self._running

    def go(self, seconds: float) -> bool:
        """Give it a turn, and stop it after that; whether it wants another. The first is up to its first block."""
        if self._running is None:
            self._start(turns=True)
        else:
            os.write(self._go, b".")  # first: while others are looked for, its threads would run outside of a turn
            self._signal(signal.SIGCONT)
        ready, _, _ = select.select([self._told], [], [], seconds)
        if ready and os.read(self._told, 1) == b".":
            self._signal(signal.SIGSTOP)
            return True
        return False

    def _signal(self, number: int) -> None:
        """To its group, and to what it has started in groups of their own."""
        own = self._running.pid
        os.killpg(own, number)
        import psutil

        for child in psutil.Process(own).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getpgid(child.pid) != own:
                    child.send_signal(number)

    def ended(self, seconds: float) -> tuple[str, str, int]:
        """What it said, and its exit code."""
        code = (self._running or self._start(turns=False)).wait(seconds)
        return self._said[0].read_text(), self._said[1].read_text(), code

    def kill(self) -> None:
        if self._running is not None and self._running.poll() is None:
            os.killpg(self._running.pid, signal.SIGKILL)
            self._running.wait()
        for fd in (getattr(self, "_told", None), getattr(self, "_go", None)):
            if fd is not None:
                os.close(fd)


def others(seconds: float = 1.0) -> float:
    """Cores that are busy while this process sleeps."""
    import psutil

    psutil.cpu_percent()
    time.sleep(seconds)
    return psutil.cpu_percent() / 100 * (os.cpu_count() or 1)


def machine() -> dict[str, Any]:
    """Processor, cores and versions."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    versions = ", ".join([f"Python {platform.python_version()}", *(f"{name} {v}" for name, v in found.items())])
    return {"cpu": cpu, "cores": os.cpu_count(), "versions": versions}


def digest(state: Mapping[str, Any]) -> str:
    """SHA-256 of the bits of tensors by name: the proof that two trainings came to the same weights."""
    import hashlib

    found = hashlib.sha256()
    for name in sorted(state):
        found.update(name.encode())
        found.update(state[name].detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
