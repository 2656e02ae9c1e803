"""What each command prints last: the command that may follow. `run`, `repeat` and `sweep` are in their own tests."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace

import click_commands
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from trainkit.cli import main
from trainkit.config.run_request import RunRequest
from trainkit.tracking.store import Store

ELSEWHERE = {("run",), ("repeat",), ("sweep",), ("demo",), ("ui",)}
"""Commands that train, and those that open a page."""


@pytest.fixture
def asked(monkeypatch, tmp_path, store):
    """Run a command whose work is replaced; returns the lines that it prints last."""
    monkeypatch.chdir(tmp_path)
    from trainkit.analysis import compare, compare_report, data_integrity, promote
    from trainkit.autoconfig import download
    from trainkit.diagnostics import benchmark_command, preflight, sync_audit
    from trainkit.export import export
    from trainkit.inference import evaluate_run, predict
    from trainkit.tracking import relocate
    from trainkit.tracking.store import Store

    kept = {"loader.workers=0,2": RunRequest(Path("convnext"), ("loader.workers=2",))}
    monkeypatch.setattr(benchmark_command, "command", lambda order, **more: kept.get(" ".join(order.overrides)))
    for module, lines in ((sync_audit, []), (preflight, 0)):
        monkeypatch.setattr(module, "command", lambda *words, lines=lines, **more: lines)
    folder = SimpleNamespace(name="net-s0", path=tmp_path)
    monkeypatch.setattr(Store, "find", lambda self, word, *more, **named: folder)
    monkeypatch.setattr(compare, "resolve", lambda *words: [])
    monkeypatch.setattr(compare, "compare", lambda *words: None)
    monkeypatch.setattr(compare_report, "text", lambda found: "")
    monkeypatch.setattr(promote, "asked", lambda *words: None)
    decision = SimpleNamespace(lines=lambda: ["promoted"], refused=False, model="net", alias="champion")
    monkeypatch.setattr(promote, "promote", lambda *words: decision)
    monkeypatch.setattr(download, "download", lambda *words: [])
    monkeypatch.setattr(evaluate_run, "request_for", lambda *words: None)
    monkeypatch.setattr(evaluate_run, "evaluate", lambda *words: {})
    monkeypatch.setattr(evaluate_run, "names_run", lambda word: word == "a")
    predicted = SimpleNamespace(notes=[], damaged=[], columns=["top1"], rows=1, weights="best")
    monkeypatch.setattr(predict, "predict", lambda *words, **more: predicted)
    exported = SimpleNamespace(notes=[], written=[], agreements={})
    monkeypatch.setattr(export, "export", lambda *words, **more: exported)
    monkeypatch.setattr(relocate, "relocate", lambda *words: None)
    monkeypatch.setattr(relocate, "described", lambda *words: None)
    monkeypatch.setattr(data_integrity, "check", lambda *words: (SimpleNamespace(bad=False, summary="fine"), None))
    monkeypatch.setattr(data_integrity, "lines", lambda report: [])

    def run(*words: str) -> list[str]:
        done = CliRunner().invoke(main.main, list(words), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return click_commands.following(done.output)

    run.decision = decision  # type: ignore[attr-defined]
    return run


COMMANDS = {
    "ls": "trainkit cp RECIPE mine.yaml --data FOLDER",
    "show convnext": "trainkit run convnext",
    "check convnext optim.lr=0.01": "trainkit run convnext optim.lr=0.01",
    "cp convnext mine.yaml": "trainkit check mine.yaml",
    "download convnext": "trainkit check convnext",
    "compare a b": "trainkit promote b",
    "promote a": "trainkit export net-s0 OUT",
    "evaluate a": "trainkit predict a IMAGES OUT.parquet",
    "predict a photos out.csv": "trainkit export a OUT",
    "export a out": "trainkit predict a IMAGES OUT.parquet",
    "bench convnext": "trainkit preflight convnext",
    "bench convnext loader.workers=0,2": "trainkit run convnext loader.workers=2",
    "syncs convnext": "trainkit bench convnext",
    "preflight convnext optim.lr=0.01": "trainkit run convnext optim.lr=0.01",
    "sync": "trainkit ui",
    "relocate": "trainkit ui",
    "data check convnext": "trainkit run convnext",
}


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_ends_with_the_command_that_may_follow(asked, line):
    (last,) = asked(*line.split())
    assert last.partition("  #")[0] == f"Next: {COMMANDS[line]}"


def test_the_data_commands_lead_from_an_import_to_a_recipe(asked):
    for name in ("anna", "ben"):
        Path("people", name).mkdir(parents=True)
        for number in range(5):
            pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), np.uint8)
            Image.fromarray(pixels).save(f"people/{name}/{number}.png")
    lines = {
        "import people set --image-size 16": "trainkit data verify set",
        "verify set": "trainkit cp RECIPE mine.yaml --data set",
    }
    for line, following in lines.items():
        assert asked("data", *line.split())[0].partition("  #")[0] == f"Next: {following}"
    tested = [*COMMANDS, *(f"data {line}" for line in lines)]
    known = {tuple(line.split()[: 1 + line.startswith("data ")]) for line in tested}
    assert set(click_commands.paths()) == ELSEWHERE | known, "a new command needs a next step"


def test_a_refused_promotion_leads_to_a_comparison(asked):
    asked.decision.refused = True
    done = CliRunner().invoke(main.main, ["promote", "a"])
    assert done.exit_code == 1 and click_commands.following(done.output)[0].startswith(
        "Next: trainkit compare best net-s0"
    )


def test_a_promotion_prints_the_command_that_serves_the_model(asked):
    done = CliRunner().invoke(main.main, ["promote", "a"])
    assert done.exit_code == 0
    (line,) = (line for line in done.output.splitlines() if line.startswith("Serve: "))
    uri, *command = shlex.split(line.removeprefix("Serve: "))
    assert uri == f"MLFLOW_TRACKING_URI={Store.locate().uri}"
    assert command[:5] == ["mlflow", "models", "serve", "-m", "models:/net@champion"]
