"""Outputs shown in README and docs: the program prints them today. Of what trains, one page of each kind is tried.

A block ```console has lines `$ command`, each above its output. `...` alone stands for left-out lines, within a line
for left-out text. Numbers, durations, run ids and hashes are masked before shown and real lines are compared.
"""

from __future__ import annotations

import ast
import functools
import logging
import re
import shlex
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import runs
from click.testing import CliRunner
from runs import ROOT

from tests.docs.test_tutorials import DATA, commands
from trainkit.analysis import run_scores
from trainkit.cli import main
from trainkit.tracking.store import Store

PAGES = [ROOT / "README.md", ROOT / "README_zh.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIALS = [page for page in PAGES if page.stem in DATA and page.parent.name == "tutorials"]
FENCED = re.compile(r"^(```+)(\w*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)

FAST = ("cp", "check", "ls", "data", "--help")
"""Commands that train nothing and need no run; their whole output is compared, in order."""

NOT_RUN = {
    ("tutorials/images", "mlflow models serve"): "a server",
    ("tutorials/images", "curl"): "the answer of a server",
    ("how-to/serve", "curl"): "the answer of a server",
}
"""By page and beginning of a command: why its output is not held against a real one here."""

SHORT = ("train={length: 12 steps, batch_size: 8, ema: 0.9}", "log.ceilings=measure")
"""Overrides that make a training of the recipe convnext short."""

TRAINED = ("tutorials/images", "tutorials/reid", "tutorials/volumes")
"""Tutorials whose trainings are run: of those whose data and outputs are alike, one."""

DEPENDS = re.compile(
    "Warning: |verdict  |Throughput:|Bottleneck:|Other processes|Start-up|Evaluations|Data loading|Few threads:"
    "|Compute-bound:|Sustained slowdown|the machine is|with loader|no setting|.*Drift is|.*@"
)
"""Beginnings of lines that depend on the machine, or on scores: if they are not printed, the code must have them."""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT).with_suffix("")).removeprefix("docs/")


@dataclass(frozen=True)
class Shown:
    """A command on a page, and the output below it."""

    page: str
    command: str
    lines: tuple[str, ...]

    @property
    def excepted(self) -> list[tuple[str, str]]:
        return [key for key in NOT_RUN if key[0] == self.page and self.command.startswith(key[1])]

    @property
    def words(self) -> list[str]:
        return shlex.split(self.command)[1:]

    @property
    def fast(self) -> bool:
        return self.command.startswith("trainkit") and (not self.words or self.words[0] in FAST)


@functools.cache
def shown(page: Path) -> tuple[Shown, ...]:
    """The commands of a page that show an output."""
    found = []
    for _, kind, text in FENCED.findall(page.read_text(encoding="utf-8")):
        if kind == "console":
            assert text.startswith("$ "), f"{page}: a console block begins with a command\n{text}"
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, *lines = part.rstrip("\n").split("\n")
                found += [Shown(name(page), command, tuple(lines))] if lines else []
    return tuple(found)


EVERY = [one for page in PAGES for one in shown(page)]
PHASES = "|".join(map(re.escape, run_scores._PHASES.values()))
TIME = r"# ?(?:ms|seconds?|s|minutes?|min|hours?|h|µs)\b"
MASKS = (
    (r"\x1b\[[0-9;]*m", ""),
    (r"sqlite:///[^\s)]+", "STORE"),
    (r"-s\d+-\d{4}-\d{4}(?:-[0-9a-f]{4})?\b", "-RUN"),
    (r"(?<![\w.])(?=\d*[a-f])(?=[a-f]*\d)[0-9a-f]{8,}\b", "HASH"),
    (r"(?<![\w.])[+-]?\d[\d,.:]*(?:e[+-]?\d+)?(?<![,.:])", "#"),
    (r"\d+(?:\.\d+)?", "#"),
    (r"< #", "#"),
    (rf"{TIME}(?: {TIME})*", "TIME"),
    (r" and TIME for the last|; too few units: # \w+", ""),
    (rf"(?:(?:{PHASES}) # %(?:, )?)+", "PHASES"),
    (r"# [kMGT]B\b", "# B"),
    (r"#-#-# #(?: to #-#-# #)?", "DATE"),
    (r"\b(?:no difference|inconclusive|slower|faster(?:[; ].*)?)$", "VERDICT"),
    (r"\b(?:significantly better|significantly worse|inconclusive)\b", "VERDICT"),
    (r"the line marked|the # lines marked", "the lines marked"),
    (r" \*best$", ""),
    (r"\s+", " "),
)


def masked(line: str) -> str:
    for pattern, mask in MASKS:
        line = re.sub(pattern, mask, line)
    return line.strip()


def pattern(line: str) -> str:
    """Of a shown line: `...` within it is any text."""
    return ".*".join(re.escape(part.strip()) for part in masked(line).split("..."))


def whole(lines: Sequence[str]) -> str:
    """Of a whole output: `...` alone is any lines."""
    return "".join(r"(?:.*\n)*" if line == "..." else pattern(line) + r" *\n" for line in lines)


def real(words: Sequence[str], refused: bool = True) -> str:
    """What a command prints, with the warnings that are logged, which pytest would keep to itself."""
    heard, log = logging.Handler(logging.WARNING), logging.getLogger("trainkit")
    heard.emit = lambda record: click.echo(record.getMessage(), err=True)
    log.addHandler(heard)
    try:
        said = CliRunner().invoke(main.main, list(words), prog_name="trainkit", catch_exceptions=False)
    finally:
        log.removeHandler(heard)
    assert refused or said.exit_code == 0, f"{shlex.join(words)}\n{said.output}"
    return said.output


def missing(lines: Sequence[str], output: str) -> list[str]:
    """Shown lines that no line of an output is like, and that the code cannot print either."""
    printed = {masked(line) for line in output.splitlines()}
    wanted = [line for line in lines if line.strip() and line != "..."]
    unseen = [line for line in wanted if not any(re.fullmatch(pattern(line), other) for other in printed)]
    return [line for line in unseen if not of_the_code(line)]


@functools.cache
def templates() -> tuple[re.Pattern[str], ...]:
    """The sentences that reports can have, their values left open."""
    found = set()
    for folder in ("speed", "diagnostics", "analysis"):
        for file in (ROOT / "trainkit" / folder).glob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                texts = [p.value if isinstance(p, ast.Constant) else "\0" for p in parts]
                if all(isinstance(text, str) for text in texts) and len(re.findall("[A-Za-z]{2,}", "".join(texts))) > 2:
                    found.add(".*".join(map(re.escape, re.split("\0+", "".join(texts)))))
    return tuple(re.compile(text, re.IGNORECASE) for text in found)


def of_the_code(line: str) -> bool:
    """Whether the code can print each sentence of a line that depends on what the machine does meanwhile."""
    sentences = re.split(r"(?<=[.;)]) (?=[A-Z])", re.sub("^(?:verdict  |Warning: |Bottleneck: )", "", line).rstrip())
    return bool(DEPENDS.match(line)) and all(any(t.match(one) for t in templates()) for one in sentences)


def tables(page: Path) -> list[list[str]]:
    """Rows of those Markdown tables of a page that hold scores as the program prints them, without their values."""
    found, head = [], None
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if head is None and cells and re.fullmatch(r"(?:best/)?val(?:/\w+)?", cells[0]):
            found.append(head := [cell for cell in cells if cell])
        elif head is not None and cells and not set(line) <= set("|-"):
            found.append([cells[0]])
        head = head if cells else None
    return found


@pytest.fixture
def signals() -> Iterator[None]:
    """Signal handlers, which a training changes, are restored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def prepare(page: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change into a folder with the data of a tutorial; other pages name recipes of the checkout."""
    monkeypatch.chdir(home)
    if page in TUTORIALS:
        DATA[page.stem][0](home)
    else:
        Path("recipes").symlink_to(ROOT / "recipes")


@pytest.mark.parametrize("page", [page for page in PAGES if any(one.fast for one in shown(page))], ids=name)
def test_what_a_page_shows_is_printed_and_the_recipe_that_a_tutorial_makes_is_valid(page, tmp_path, monkeypatch, cache):
    if page.stem == "volumes":
        pytest.importorskip("nibabel")
    prepare(page, tmp_path, monkeypatch)
    for one in shown(page):
        if one.fast:
            printed = "".join(f"{masked(line)}\n" for line in real(one.words).splitlines())
            assert re.fullmatch(whole(one.lines), printed), f"{page.name}: $ {one.command}\n{printed}"
    for words in commands(page) if page in TUTORIALS else ():
        if words[1] == "check":
            printed = real(words[1:], refused=False)
            marked = "# <-" in Path(words[2]).read_text(encoding="utf-8")
            assert ("to decide: line " in printed) is marked and "not there yet" not in printed


@pytest.mark.slow
@pytest.mark.usefixtures("signals", "store", "cache")
@pytest.mark.parametrize("page", [page for page in TUTORIALS if name(page) in TRAINED], ids=name)
def test_the_commands_of_a_tutorial_run_and_print_what_it_shows(page, tmp_path, monkeypatch):
    if page.stem == "volumes":
        pytest.importorskip("monai")
    prepare(page, tmp_path, monkeypatch)
    outputs = {}
    for words in [*(words[1:] for words in commands(page)), *(one.words for one in shown(page) if not one.excepted)]:
        if shlex.join(words) in outputs or (words[0] == "export" and "=" in words[1]):
            continue
        short = [DATA[page.stem][1], "log.every=2 steps"] if words[0] == "run" else []
        outputs[shlex.join(words)] = real([*words, *short], refused=words[0] == "promote")
        if words[0] == "export":
            assert (tmp_path / words[2] / "model.onnx").is_file()
        if words[0] == "predict":
            assert (tmp_path / words[3]).exists()
    assert len(made := Store.locate().runs()) == 2 and {run.info().status for run in made} == {"FINISHED"}
    for one in shown(page):
        if not one.excepted:
            output = outputs[shlex.join(one.words)]
            assert not missing(one.lines, output), f"$ {one.command}\n{output}"
    printed = [masked(line) for output in outputs.values() for line in output.splitlines()]
    assert not [row for row in tables(page) if not any(all(masked(cell) in line for cell in row) for line in printed)]


@pytest.mark.slow
@pytest.mark.usefixtures("signals", "cache")
@pytest.mark.parametrize("page", [page for page in PAGES if page.stem in ("benchmark", "export")], ids=name)
def test_what_a_page_shows_of_longer_commands_is_printed(page, tmp_path, monkeypatch, store):
    prepare(page, tmp_path, monkeypatch)
    if page.stem == "export":
        runs.stripes(tmp_path / "new-images", 2, 0)
        real(["run", "convnext", "name=objects", *SHORT], refused=False)
    outputs: dict[str, str] = {}
    for one in shown(page):
        if one.fast or one.excepted:
            continue
        if one.command not in outputs:
            outputs[one.command] = real(one.words)
        assert not missing(one.lines, outputs[one.command]), f"$ {one.command}\n{outputs[one.command]}"


@pytest.mark.slow
@pytest.mark.usefixtures("signals", "store", "cache")
def test_the_closing_lines_in_the_readme_are_printed(tmp_path, monkeypatch):
    found = re.search(r"^`make run` trains[^`]*```text\n(.*?)^```$", PAGES[0].read_text(encoding="utf-8"), re.M | re.S)
    assert found, "README.md shows no closing lines of make run"
    monkeypatch.chdir(tmp_path)
    for recipe in ("adadistill", "face_teacher"):
        text = (ROOT / "recipes" / f"{recipe}.yaml").read_text(encoding="utf-8")
        text = re.sub(r"length: \d+ epochs", "length: 4 steps", text)
        Path(f"{recipe}.yaml").write_text(re.sub(r"over: \d+ steps", "over: 2 steps", text), encoding="utf-8")
    output = real(["run", "adadistill.yaml"])
    assert not missing(found[1].splitlines(), output.replace("adadistill.yaml", "recipes/adadistill.yaml")), output


def test_every_output_is_compared_or_excepted_with_a_reason():
    unknown = [one for one in EVERY if not one.excepted and one.command.split()[0] not in ("trainkit", "cat")]
    assert not unknown, "give a reason in NOT_RUN"
    assert {key for one in EVERY for key in one.excepted} == set(NOT_RUN), "an entry of NOT_RUN has no output any more"
    assert len(EVERY) >= 20 and all(NOT_RUN.values())
