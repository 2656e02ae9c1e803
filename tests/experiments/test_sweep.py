"""Several settings: which they are, every one a run, and the best of them named."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from pyarrow import csv
from runs import PLUGIN, TOY, run, spawn, stop_after

from trainkit.cli import main, train
from trainkit.config.run_request import RunRequest
from trainkit.errors import UserError
from trainkit.experiments.group import Result
from trainkit.experiments.launch import launch
from trainkit.experiments.recipe_check import check
from trainkit.experiments.sweep import Settings, rank, read
from trainkit.tracking import journal, lineage, run_folder
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store

NOTE = "mlflow.note.content"
WORDS = ("train.length=1 epoch", "data.noise=2.5")


@pytest.fixture(autouse=True)
def _plugin(monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))


def order(*words: str, resume: str | None = None) -> RunRequest:
    return RunRequest(TOY, words, ("toy",), resume, sweep=True)


def sweep(*words: str, resume: str | None = None, stopping=lambda: False) -> int:
    return launch(order(*words, resume=resume), stopping)


def runs_of(recipe: str) -> list[RunFolder]:
    return [folder for folder in Store.locate().runs() if folder.info().recipe == recipe]


def shown(folder: RunFolder):
    return Store.locate().client().get_run(folder.info().run_id).data


def best_score(folder: RunFolder) -> float:
    return max(journal.read(folder.journal).series("val/accuracy")[1])


# Runs


def test_every_combination_is_a_run_and_the_best_of_them_is_named(store, tmp_path, capsys):
    alone = run(*WORDS, "optim.lr=0.05", "optim.momentum=0.9")
    assert sweep(*WORDS, "optim.lr=0.0001,0.05", "optim.momentum=0.9,0.0") == 0
    printed = capsys.readouterr().out
    (parent,), found = runs_of("toy-sweep"), runs_of("toy")
    members = run_folder.members(parent)
    assert list(members) == [f"trial {k}" for k in range(4)] and len(found) == 4
    children = [Store.locate().find(name) for name in members.values()]
    assert children[2] == alone.folder, "the third setting was there"
    assert [(shown(r).params["optim.lr"], shown(r).params["optim.momentum"]) for r in children] == [
        ("0.0001", "0.9"), ("0.0001", "0.0"), ("0.05", "0.9"), ("0.05", "0.0"),
    ]  # fmt: skip
    assert {shown(r).tags["mlflow.parentRunId"] for r in children} == {parent.info().run_id}

    assert lineage.read(parent).splitlines()[2:] == [
        "optim.lr        0.05 -> (several)",
        "optim.momentum  0.9 -> (several)",
    ]
    assert lineage.read(children[1]).splitlines()[0] == f"child run of {parent.name}"

    values = [best_score(r) for r in children]
    assert len(set(values)) > 1, "nothing to choose from"
    best = children[int(np.argmax(values))]
    above = shown(parent)
    assert parent.info().status == "FINISHED" and above.tags["trainkit.best"] == best.name
    assert [name for name, r in zip(members, children, strict=True) if "trainkit.best_of" in shown(r).tags] == [
        f"trial {int(np.argmax(values))}"
    ]
    assert "optim.lr" not in above.params and "optim.momentum" not in above.params
    assert above.params["data.noise"] == "2.5" and above.tags["trainkit.sweep"] == "4"
    history = journal.read(parent.journal)
    assert history.series("sweep/val/accuracy") == ([0, 1, 2, 3], values)

    again = CliRunner().invoke(main.main, ["show", parent.name], catch_exceptions=False).output
    assert run_folder.summary(parent) in again and f"Best: {best.name}" in again, "as it was printed"
    assert "varies         optim.lr, optim.momentum\n" in again and "None" not in again

    path = Store.locate().client().download_artifacts(parent.info().run_id, "tables/sweep.csv", str(tmp_path))
    table = csv.read_csv(path).to_pydict()
    assert table["run"][0] == best.name and sorted(table["run"]) == sorted(members.values())
    assert table["val/accuracy"] == pytest.approx(sorted(values, reverse=True), rel=1e-5)
    assert all(seconds > 0 for seconds in table["seconds"])
    words = f"optim.lr={shown(best).params['optim.lr']} optim.momentum={shown(best).params['optim.momentum']}"
    assert f"Best: {best.name}  {words}" in printed and f"    Best: {best.name}  {words}\n" in above.tags[NOTE]
    assert re.search(rf"^Next:   trainkit repeat .*'train\.length=1 epoch'.* {re.escape(words)}  # ", printed, re.M), (
        printed
    )
    assert f"\nNext:   trainkit promote {best.name} " in printed
    rows = printed.partition("\nChildren ")[2].split("\n\n")[0].splitlines()[1:]
    assert rows[0].split() == ["setting", "val/accuracy", "step", "seconds", "run"] and len(rows) == 5
    assert rows[3].startswith("trial 2     optim.lr=0.05 optim.momentum=0.9") and rows[3].endswith("(reused)")


def test_a_setting_that_fails_is_noted_and_the_others_are_tried(store, capsys):
    assert sweep(*WORDS, "task.nan_at=1,null") == 0
    printed = capsys.readouterr().out
    assert [folder.info().status for folder in runs_of("toy")] == ["FAILED", "FINISHED"]
    (parent,) = runs_of("toy-sweep")
    assert parent.info().status == "FINISHED" and "trial 0: failed: " in printed and "not finite" in printed
    assert list(run_folder.members(parent).values()) == [folder.name for folder in runs_of("toy")]
    assert shown(parent).tags["trainkit.best"] == runs_of("toy")[1].name


def test_where_none_comes_to_its_end_the_first_mistake_is_said(store):
    with pytest.raises(UserError, match=r"none of the 2 settings finished; the first: .*not finite"):
        sweep(*WORDS, "task.nan_at=0,1")
    assert [folder.info().status for folder in Store.locate().runs()] == ["FAILED"] * 3


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on_where_it_was(store, capsys):
    words = (*WORDS, "optim.lr=0.001,0.01,0.1")
    # Asked once before each setting, once before its first step, and once after each of its four.
    assert sweep(*words, stopping=stop_after(9)) == 143
    assert [r.info().status for r in runs_of("toy")] == ["FINISHED", "KILLED"]
    begun = runs_of("toy")[1]
    assert sweep(*words, resume="") == 0
    printed = capsys.readouterr().out
    assert f"{begun.name}: resumed from" in printed and len(runs_of("toy-sweep")) == 1
    assert [r.info().status for r in runs_of("toy")] == ["FINISHED"] * 3
    # With two values more they are the same three and two others.
    assert sweep(*words[:-1], "optim.lr=0.001,0.01,0.1,0.2,0.3") == 0
    assert len(runs_of("toy")) == 5 and len(runs_of("toy-sweep")) == 2


@pytest.mark.slow
def test_on_two_processes_too(store):
    done = spawn(2, str(TOY), "--plugin", "toy", *WORDS, "optim.lr=0.0001,0.05", "--sweep")
    assert done.returncode == 0, done.stderr
    (parent,), children = runs_of("toy-sweep"), runs_of("toy")
    assert parent.info().status == "FINISHED" and len(children) == 2
    assert shown(parent).tags["trainkit.best"] == max(children, key=best_score).name


# Words


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("optim.lr=0.1,0.05", ["0.1", "0.05"]),
        ("optim.lr = 0.1, 5e-2 ,1", ["0.1", "5e-2", "1"]),
        ("optim.betas=[0.9,0.99],[0.8, 0.9]", ["[0.9,0.99]", "[0.8, 0.9]"]),
        ("best={metric: a/b, mode: min},null", ["{metric: a/b, mode: min}", "null"]),
        ("""log.experiment="a,b",'c,]d'""", ['"a,b"', "'c,]d'"]),
        ("data.evaluate={a: [1,{b: 2,c: 3}]},{}", ["{a: [1,{b: 2,c: 3}]}", "{}"]),
    ],
)
def test_commas_part_values_outside_brackets_and_quotes(word, values):
    fixed, axes = read(order("seed=3", word, "optim.betas=[0.9,0.95]"))
    assert axes == {word.split("=")[0].strip(): tuple(values)}
    assert fixed == ["seed=3", "optim.betas=[0.9,0.95]"], "a list is one value"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no argument gives several values"),
        (("optim.lr=0.1",), "no argument gives several values"),
        (("optim.lr",), "not of the form KEY=VALUE"),
        (("optim.lr=0.1,,0.2",), "a value is missing beside a comma"),
        (("optim.lr=0.1,0.1",), "is the same experiment"),
        (("optim.lrr=0.1,0.2",), "optim.lrr"),
        (("optim.lr=0.1,fast",), "optim.lr"),
        (("optim.lr=0.1,0.2", "optim.lr=0.3"), "given twice"),
        (("best=null", "optim.lr=0.1,0.2"), "toy does not name the metric"),
        (tuple(f"{key}={','.join(map(str, range(1, 12)))}" for key in ("seed", "data.test", "data.samples")),
         "1331 settings; expected at most 1000"),
        (("optim.lr=0.1,1e-1",), "optim.lr=1e-1: is the same experiment as optim.lr=0.1"),
        (("seed=0,1", "loader.workers=0,2"), "seed=0 loader.workers=2: is the same experiment as seed=0 loader"),
        (("train.precision=no,bf16",), "a sweep is one launch"),
        (("device.threads=1,2",), "a sweep is one launch"),
        (("best.metric=val/accuracy,val/ema/accuracy",), "must have the same `best`"),
    ],
)  # fmt: skip
def test_words_that_make_no_sweep_are_refused_before_anything_begins(words, message):
    for look in (Settings.of, check):
        with pytest.raises(UserError, match=message):
            look(order(*words))
    assert Store.locate().runs() == []


def test_the_best_comes_first_then_what_has_no_score_then_what_failed():
    (child, _) = Settings.of(order("optim.lr=0.1,0.2")).children
    results = [
        Result(replace(child, title=title), None, value, error=error)
        for title, value, error in (
            ("a", math.nan, "not finite"), ("c", 0.5, ""), ("d", 0.7, ""), ("e", math.nan, ""), ("f", 0.7, ""),
        )
    ]  # fmt: skip
    assert "".join(one.child.title for one in rank(results, "max")) == "dfcea"
    assert "".join(one.child.title for one in rank(results, "min")) == "cdfea"


# Commands


def test_the_commands_make_the_orders_they_say(monkeypatch):
    orders = []
    monkeypatch.setattr(
        "trainkit.experiments.launch.launch", lambda request, stopping, began: orders.append(request) or 0
    )
    for command, words in (
        (main.main, ["repeat", "x.yaml", "a=1", "--seeds", "3"]),
        (main.main, ["repeat", "x.yaml", "--resume"]),
        (main.main, ["sweep", "x.yaml", "a=1,2"]),
        (main.main, ["sweep", "x.yaml", "a=1,2", "--resume", "name"]),
        (train.run, ["x.yaml", "--seeds", "2"]),
        (train.run, ["x.yaml", "a=1,2", "--sweep"]),
        (train.run, ["x.yaml"]),
    ):
        done = CliRunner().invoke(command, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert [(o.resume, o.seeds, o.sweep) for o in orders] == [
        (None, 3, False),
        ("", 5, False),
        (None, None, True),
        ("name", None, True),
        (None, 2, False),
        (None, None, True),
        (None, None, False),
    ]


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (train.run, ["x.yaml", "--folds", "--seeds", "3"], "--folds and --seeds at once"),
        (train.run, ["x.yaml", "--sweep", "--score", "r"], "--score evaluates one run; leave out --sweep"),
        (main.main, ["sweep", "nosuch.yaml", "a=1,2"], "no such file"),
        (main.main, ["repeat", "nosuch.yaml"], "no such file"),
    ],
)
def test_words_of_the_commands_that_do_not_go_together(command, words, message, monkeypatch):
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.exit_code == 2 and message in done.output, done.output


def test_check_of_a_sweep_prints_the_settings(monkeypatch):
    words = ["sweep", str(TOY), "--plugin", "toy", "optim.lr=0.25,0.5", "--check"]
    done = CliRunner().invoke(main.main, words, catch_exceptions=False)
    assert done.stdout == "trial 0: optim.lr=0.25\ntrial 1: optim.lr=0.5\n"
    many = check(order("optim.lr=" + ",".join(f"0.{k}1" for k in range(40))), whole=False).splitlines()
    assert many[-2:] == ["trial 29: optim.lr=0.291", "and 10 more"]
