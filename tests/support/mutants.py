"""Change one operator or number of the product at a time and see whether the default tests notice.

    python tests/support/mutants.py --count 60 --seed 1 --out mutants.jsonl

Each mutant runs, with `-x`, first the test files of its module, then its package's tests; with `--survivors` those
that lived through it run all default tests. It is killed by the first that fails. A row of `--out` is a mutant; those
that stand there are not tried again, so that a stopped run goes on. What then lives is looked at by a person:
`--equivalent ID REASON` takes one out of the count. Works on a copy of the tree.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("training", "checkpoint", "metrics", "losses", "data")
SWAPPED = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is not": "is", "is": "is not",
    "not in": "in", "in": "not in", "+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "+", "and": "or",
    "or": "and",
}  # fmt: skip
SECONDS = 900
"""Processor time of one process of pytest, after which a mutant that runs in a circle is killed."""


@dataclass(frozen=True)
class Mutant:
    """A change of one place."""

    file: str
    line: int
    before: str
    after: str
    start: int
    end: int

    @property
    def id(self) -> str:
        """File, place and change."""
        return f"{self.file}:{self.line}:{self.start}:{self.after}"

    def applied(self, source: bytes) -> bytes:
        """Return the source with the change."""
        return source[: self.start] + self.after.encode() + source[self.end :]


def places(file: Path) -> Iterator[Mutant]:
    """Yield every change of a file that is tried: operators, numbers, and conditions the other way round."""
    source = file.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def at(line: int, column: int) -> int:
        return starts[line - 1] + column

    def span(node: ast.expr) -> tuple[int, int]:
        return at(node.lineno, node.col_offset), at(node.end_lineno or 0, node.end_col_offset or 0)

    def made(node: ast.expr, start: int, end: int, after: str) -> Mutant:
        return Mutant(str(file.relative_to(ROOT)), node.lineno, source[start:end].decode(), after, start, end)

    def between(node: ast.expr, left: ast.expr, right: ast.expr) -> Iterator[Mutant]:
        start, end = span(left)[1], span(right)[0]
        found = source[start:end].decode().strip(" ()\n")
        if found in SWAPPED:
            start += source[start:end].index(found.encode())
            yield made(node, start, start + len(found.encode()), SWAPPED[found])

    for node in code(ast.parse(source)):
        if isinstance(node, ast.Compare):
            for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                yield from between(node, left, right)
        elif isinstance(node, ast.BinOp):
            yield from between(node, node.left, node.right)
        elif isinstance(node, ast.BoolOp):
            yield from between(node, node.values[0], node.values[1])
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield made(node, span(node)[0], span(node.operand)[0], "")
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield made(node, *span(node), f"({node.value!r} + 1)")
        elif isinstance(node, ast.IfExp):
            start, end = span(node.test)
            yield made(node.test, start, end, f"(not ({source[start:end].decode()}))")


def code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that compute something: no annotations, no texts of messages, nothing for type checkers."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or name in ("annotation", "returns", "decorator_list"):
                continue
            if isinstance(child, ast.JoinedStr | ast.Raise):
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            yield child
            yield from code(child)


def chosen(count: int, seed: int) -> list[Mutant]:
    """Return about `count` mutants, equally many of each package, in turns."""
    drawn, rng = [], random.Random(seed)
    for package in PACKAGES:
        files = sorted((ROOT / "trainkit" / package).rglob("*.py"))
        every = [mutant for file in files if "synthetic" not in file.parts for mutant in places(file)]
        drawn.append(rng.sample(every, count // len(PACKAGES)))
    return [mutant for turn in zip(*drawn, strict=True) for mutant in turn]


def tests_of(mutant: Mutant, tree: Path) -> list[list[str]]:
    """Return what is run of the tests, one after another: of the module, of the package."""
    parts = Path(mutant.file).with_suffix("").parts[1:]
    own = [str(path) for path in (tree / "tests").rglob(f"test_{parts[-1]}.py")]
    package = tree / "tests" / Path(*parts[:-1])
    while not package.is_dir():
        package = package.parent
    return [*([["-n", "0", *own]] if own else []), ["-n", "0", str(package)]]


def killer(mutant: Mutant, tree: Path, calls: list[list[str]]) -> str:
    """Return the test that fails, or how pytest was ended; an empty text where all pass."""
    target = tree / mutant.file
    sound = target.read_bytes()
    changed = mutant.applied(sound)
    ast.parse(changed)
    target.write_bytes(changed)
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        for words in calls:
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words]
            done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, preexec_fn=_limited)
            if done.returncode not in (0, 5):  # 5: no tests
                failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return failed[0][:200] if failed else f"ended with {done.returncode}: {done.stdout[-200:]}"
        return ""
    finally:
        target.write_bytes(sound)


def _limited() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


def main() -> None:
    """Try the mutants that are left, and say how many were killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants.jsonl")
    parser.add_argument("--survivors", action="store_true")
    parser.add_argument("--equivalent", nargs=2, metavar=("ID", "REASON"))
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    rows = {}
    if given.out.exists():
        rows = {row["id"]: row for row in map(json.loads, given.out.read_text().splitlines())}
    if given.equivalent:
        rows[given.equivalent[0]]["equivalent"] = given.equivalent[1]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "mlruns", "build", "__pycache__"))
        for mutant in [] if given.equivalent else chosen(given.count, given.seed):
            row = rows.get(mutant.id)
            if row is None:
                killed = killer(mutant, tree, tests_of(mutant, tree))
            elif given.survivors and not row["killed"] and not row.get("equivalent"):
                killed = killer(mutant, tree, [[]])
            else:
                continue
            rows[mutant.id] = {"id": mutant.id, **asdict(mutant), "killed": killed}
            print(f"{mutant.id}: {killed or 'SURVIVED'}", flush=True)
            given.out.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    given.out.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    counted = [row for row in rows.values() if not row.get("equivalent")]
    killed = sum(bool(row["killed"]) for row in counted)
    print(f"{killed} of {len(counted)} killed, {len(rows) - len(counted)} equivalent ones aside")


if __name__ == "__main__":
    main()
