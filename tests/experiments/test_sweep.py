"""Several settings: which they are, every one a run, the best of them named, and what falls behind ended early."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from click.testing import CliRunner
from pyarrow import csv
from runs import PLUGIN, TOY, Ran, run, spawn, stop_after

from trainkit.cli import main, train
from trainkit.config import loader
from trainkit.config.run_request import RunRequest, Sweep
from trainkit.errors import UserError
from trainkit.experiments import optuna_search
from trainkit.experiments import sweep as sweeps
from trainkit.experiments.launch import launch
from trainkit.experiments.recipe_check import check
from trainkit.experiments.sweep import Axis, Trial
from trainkit.tracking import journal, lineage, run_folder
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store

NOTE = "mlflow.note.content"
WORDS = ("train.length=1 epoch", "data.noise=2.5")


@pytest.fixture(autouse=True)
def _plugin(monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))


def order(*words: str, resume: str | None = None, **how) -> RunRequest:
    return RunRequest(TOY, words, ("toy",), resume, sweep=Sweep(**how))


def sweep(*words: str, resume: str | None = None, stopping=lambda: False, **how) -> int:
    return launch(order(*words, resume=resume, **how), stopping)


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
    assert history.series("sweep/best/val/accuracy")[1] == np.maximum.accumulate(values).tolist()

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


class Rule:
    """An adviser that ends the second setting at its second evaluation, and remembers what it was told."""

    prunes = True
    made: ClassVar[list[Rule]] = []

    def __init__(self, axes, how, mode):
        self.ended, self.mode = [], mode
        self.made.append(self)

    def begin(self, number):
        self.number, self.values = number, []
        return {}

    def report(self, value):
        self.values.append(value)
        return self.number == 1 and len(self.values) == 2

    def end(self, state, value):
        self.ended.append((self.number, state, value, self.values))


def test_a_run_that_falls_behind_ends_after_its_evaluation_and_is_used_again_as_it_is(store, monkeypatch, capsys):
    monkeypatch.setattr(optuna_search, "require", lambda: None)
    monkeypatch.setattr(optuna_search, "Study", Rule)
    Rule.made.clear()
    words = ("train.length=9 steps", "evaluations={val: {every: 3 steps, at_start: true}}", "optim.lr=0.05,0.001,0.01")
    assert sweep(*words, pruner="median") == 0
    children = runs_of("toy")
    assert [r.info().status for r in children] == ["FINISHED", "KILLED", "FINISHED"]
    # Evaluations at 0, 3 and 6; that before training is not told. The update in flight is finished.
    assert Ran(0, children[1]).last.step == 7
    assert shown(children[1]).tags["trainkit.pruned"].startswith("val/accuracy 0.")
    assert "evaluation 2, step 6" in shown(children[1]).tags["trainkit.pruned"]
    (first,) = Rule.made
    told = [journal.read(r.journal).series("val/accuracy")[1][1:] for r in children]
    assert [len(values) for values in told] == [3, 2, 3] and first.mode == "max"
    ended = [(k, state, best_score(r), told[k]) for k, (state, r) in enumerate(zip(
        ("finished", "pruned", "finished"), children, strict=True))]  # fmt: skip
    assert first.ended == ended
    assert "trial 1: pruned: " in capsys.readouterr().out and runs_of("toy-sweep")[0].info().status == "FINISHED"

    assert sweep(*words, pruner="median") == 0
    assert runs_of("toy") == children, "nothing was trained again"
    assert Rule.made[1].ended == ended and f"{children[1].name} (reused, pruned)" in capsys.readouterr().out
    parents = runs_of("toy-sweep")
    assert {shown(r).tags["mlflow.parentRunId"] for r in children} == {parents[1].info().run_id}
    assert run_folder.members(parents[1]) == run_folder.members(parents[0])

    # A rule that would let it go on, or none, trains that setting to its end.
    assert sweep(*words) == 0
    assert [r.info().status for r in runs_of("toy")] == ["FINISHED", "KILLED", "FINISHED", "FINISHED"]


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on_where_it_was(store, capsys):
    words = (*WORDS, "optim.lr=log:1e-4..1e-1")
    # Asked once before each setting, once before its first step, and once after each of its four.
    assert sweep(*words, random=3, stopping=stop_after(9)) == 143
    assert [r.info().status for r in runs_of("toy")] == ["FINISHED", "KILLED"]
    begun = runs_of("toy")[1]
    assert sweep(*words, random=3, resume="") == 0
    printed = capsys.readouterr().out
    assert f"{begun.name}: resumed from" in printed and len(runs_of("toy-sweep")) == 1
    assert [r.info().status for r in runs_of("toy")] == ["FINISHED"] * 3
    # Two more are the same three and two others.
    assert sweep(*words, random=5) == 0
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
    fixed, (axis,) = sweeps.read(order("seed=3", word, "optim.betas=[0.9,0.95]"))
    assert (axis.key, list(axis.values), axis.span) == (word.split("=")[0].strip(), values, None)
    assert fixed == ["seed=3", "optim.betas=[0.9,0.95]"], "a list is one value"


@pytest.mark.parametrize(
    ("how", "words", "message"),
    [
        ({}, (), "no argument gives several values"),
        ({}, ("optim.lr=0.1",), "no argument gives several values"),
        ({}, ("optim.lr",), "not of the form KEY=VALUE"),
        ({}, ("optim.lr=0.1,,0.2",), "a value is missing beside a comma"),
        ({}, ("optim.lr=0.1,0.1",), "gives a value twice"),
        ({}, ("optim.lr=0.1..0.2",), "optim.lr is a range, and a grid"),
        ({}, ("optim.lrr=0.1,0.2",), "optim.lrr"),
        ({}, ("optim.lr=0.1,fast",), "optim.lr"),
        ({}, ("optim.lr=0.1,0.2", "optim.lr=0.3"), "given twice"),
        ({}, ("best=null", "optim.lr=0.1,0.2"), "toy does not name the metric"),
        ({}, tuple(f"{key}={','.join(map(str, range(1, 12)))}" for key in ("seed", "data.test", "data.samples")),
         "1331 settings; expected at most 1000"),
        ({"pruner": "median"}, ("optim.lr=0.1,0.2", "evaluations.val.every=null"), "val is evaluated only at the end"),
        ({}, ("optim.lr=0.1,1e-1",), "optim.lr=1e-1: is the same experiment as optim.lr=0.1"),
        ({}, ("seed=0,1", "loader.workers=0,2"), "seed=0 loader.workers=2: is the same experiment as seed=0 loader"),
        ({"tpe": 4}, ("loader.workers=0..2",), "is the same experiment"),
        ({}, ("train.precision=no,bf16",), "a sweep is one launch"),
        ({}, ("device.threads=1,2",), "a sweep is one launch"),
        ({}, ("best.metric=val/accuracy,val/ema/accuracy",), "must have the same `best`"),
        ({"random": 3}, ("optim.lr=0.2..0.1",), "ends where it begins, or before"),
        ({"random": 3}, ("optim.lr=log:0..1",), "logarithm"),
        ({"random": 3}, ("optim.lr=0.1..1e999",), "too large for a number"),
        ({"random": 3}, ("optim.lr=00.1..0.2",), "optim.lr"),
        ({"random": 3}, ("optim.lr=0.1..\u0660.2",), "optim.lr"),
        ({"random": 2}, ("optim.lr=0.1,0.2",), "--random: 2, of 2 settings"),
        ({"random": 9}, ("data.test=9..11",), "no more than 3 settings came up"),
        ({"random": 2000}, ("optim.lr=0.1..0.2",), "at most 1000"),
        ({"random": 2}, ("data.samples=1.5..9.5",), "data.samples"),
        ({"tpe": 3}, ("train.batch_size=8..12",), "not a multiple of micro_batch"),
    ],
)  # fmt: skip
def test_words_that_make_no_sweep_are_refused_before_anything_begins(how, words, message, monkeypatch):
    monkeypatch.setattr(optuna_search, "require", lambda: None)
    for look in (sweeps.settings, check):
        with pytest.raises(UserError, match=message):
            look(order(*words, **how))
    assert Store.locate().runs() == []


def test_without_optuna_one_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda *names: None)
    for how in ({"tpe": 3}, {"pruner": "median"}):
        with pytest.raises(UserError, match=r'need Optuna; pip install "trainkit\[sweep\]"'):
            sweeps.settings(order("optim.lr=0.1,0.2", **how))


def drawn(*words: str, **how) -> list[dict[str, str]]:
    return [dict(word.split("=") for word in child.said.split()) for child in sweeps.settings(order(*words, **how))]


def test_what_is_drawn_depends_on_its_number_and_key_alone():
    words = ("train.micro_batch=null", "optim.lr=log:1e-4..1e-1", "train.batch_size=8..32", "train.ema=null,0.9")
    six = drawn(*words, random=6)
    assert drawn(*words, random=3) == six[:3] and drawn(*words, random=6, draws=1) != six
    assert [s["optim.lr"] for s in drawn(words[1], random=6)] == [s["optim.lr"] for s in six]
    for setting in six:
        assert 1e-4 <= float(setting["optim.lr"]) <= 1e-1 and len(setting["optim.lr"].strip("0.")) <= 6
        assert setting["train.batch_size"].isdigit() and 8 <= int(setting["train.batch_size"]) <= 32
    assert len({tuple(setting.values()) for setting in six}) == 6
    # Each is the recipe that its words would make.
    child = sweeps.settings(order(*words, random=6))[4]
    own = [f"{key}={value}" for key, value in six[4].items()]
    assert loader.digest(child.recipe) == loader.digest(loader.load(TOY, [words[0], *own], ("toy",)))
    assert child.request.sweep is None and child.title == "trial 4"


def test_a_range_is_gone_through_evenly():
    shares = (np.arange(4000) + 0.5) / 4000
    assert Counter(map(Axis("n", ("2", "5"), (2, 5), whole=True).at, shares)) == dict.fromkeys("2345", 1000)
    assert Counter(map(Axis("w", ("a", "b")).at, shares)) == {"a": 2000, "b": 2000}
    even = [float(Axis("x", ("-1", "1"), (-1, 1)).at(share)) for share in shares]
    assert even == pytest.approx(-1 + 2 * shares, rel=1e-3) and min(even) >= -1 and max(even) <= 1
    logs = [math.log10(float(Axis("x", ("1e-4", "1e-1"), (1e-4, 1e-1), log=True).at(share))) for share in shares]
    assert logs == pytest.approx(-4 + 3 * shares, abs=1e-3)
    counts = Counter(int(Axis("n", ("1", "100"), (1, 100), log=True, whole=True).at(share)) for share in shares)
    assert set(counts) <= set(range(1, 101)) and counts[2] > 5 * counts[50]
    # Four digits never lead out of the range.
    assert Axis("x", ("0.12344", "0.2"), (0.12344, 0.2)).at(0.0) == "0.12344"


def test_whole_numbers_are_drawn_where_the_recipe_takes_them():
    assert all("." not in s["data.test"] for s in drawn("data.test=9..40", random=5))
    assert all("." in s["task.dropout"] for s in drawn("task.dropout=0..1", random=5))


def test_the_best_at_the_end_of_what_was_tried_is_said():
    axes = [Axis(key, ()) for key in ("rate", "size", "few", "word")]
    settings = [dict(zip(("rate", "size", "few", "word"), s.split(), strict=True)) for s in
                ("1e-3 8 1 a", "1e-2 16 2 b", "0.1 32 1 c")]  # fmt: skip
    trials = [Trial(str(k), setting) for k, setting in enumerate(settings)]
    assert sweeps._edges(axes, trials, trials[1]) == []
    assert [line.split(";")[0] for line in sweeps._edges(axes, trials, trials[2])] == [
        "Note: rate=0.1 is the largest value tried", "Note: size=32 is the largest value tried",
    ]  # fmt: skip
    assert "rate=1e-3 is the smallest value tried; a smaller one may" in sweeps._edges(axes, trials, trials[0])[0]


def test_the_best_comes_first_then_what_was_pruned_and_what_failed():
    trials = [
        Trial("a", {}, "failed"), Trial("b", {}, "pruned", value=0.99), Trial("c", {}, value=0.5),
        Trial("d", {}, value=0.7), Trial("e", {}), Trial("f", {}, value=0.7),
    ]  # fmt: skip
    assert "".join(trial.title for trial in sweeps._ranked(trials, "max")) == "dfceba"
    assert "".join(trial.title for trial in sweeps._ranked(trials, "min")) == "cdfeba"


# Commands


def test_the_commands_make_the_orders_they_say(monkeypatch):
    orders = []
    monkeypatch.setattr(
        "trainkit.experiments.launch.launch", lambda request, stopping, began: orders.append(request) or 0
    )
    for command, words in (
        (main.main, ["repeat", "x.yaml", "a=1", "--seeds", "3"]),
        (main.main, ["repeat", "x.yaml", "--resume"]),
        (main.main, ["sweep", "x.yaml", "a=1,2", "--random", "4", "--draws", "7"]),
        (main.main, ["sweep", "x.yaml", "a=1,2", "--tpe", "4", "--pruner", "median", "--resume", "name"]),
        (train.run, ["x.yaml", "--seeds", "2"]),
        (train.run, ["x.yaml", "a=1,2", "--sweep", "--pruner", "halving"]),
        (train.run, ["x.yaml"]),
    ):
        done = CliRunner().invoke(command, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert [(o.resume, o.seeds, o.sweep) for o in orders] == [
        (None, 3, None),
        ("", 5, None),
        (None, None, Sweep(random=4, draws=7)),
        ("name", None, Sweep(tpe=4, pruner="median")),
        (None, 2, None),
        (None, None, Sweep(pruner="halving")),
        (None, None, None),
    ]


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (train.run, ["x.yaml", "--folds", "--seeds", "3"], "--folds and --seeds at once"),
        (train.run, ["x.yaml", "--random", "3"], "add --sweep"),
        (train.run, ["x.yaml", "--sweep", "--score", "r"], "--score evaluates one run; leave out --sweep"),
        (main.main, ["sweep", "x.yaml", "--random", "3", "--tpe", "3"], "--random and --tpe at once"),
        (main.main, ["sweep", "x.yaml", "--random", "0"], "--random"),
        (main.main, ["sweep", "x.yaml", "--pruner", "boldly"], "'boldly' is not one of 'median', 'halving'"),
        (main.main, ["sweep", "nosuch.yaml", "a=1,2"], "no such file"),
        (main.main, ["repeat", "nosuch.yaml"], "no such file"),
    ],
)
def test_words_of_the_commands_that_do_not_go_together(command, words, message, monkeypatch):
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.exit_code == 2 and message in done.output, done.output


def test_check_of_a_sweep_prints_its_first_recipe_and_the_settings(monkeypatch):
    words = ["sweep", str(TOY), "--plugin", "toy", "optim.lr=0.25,0.5", "--check"]
    done = CliRunner().invoke(main.main, words, catch_exceptions=False)
    first = loader.dump(loader.load(TOY, ["optim.lr=0.25"], ("toy",)))
    assert done.stdout == f"{first}# trial 0: optim.lr=0.25\n# trial 1: optim.lr=0.5\n"
    many = check(order("optim.lr=log:1e-3..0.1", random=40)).splitlines()
    assert many[-2].startswith("# trial 29: optim.lr=0.0") and many[-1] == "# and 10 more"
    pytest.importorskip("optuna")
    assert check(order("optim.lr=0.1,0.2", tpe=9)).endswith(
        "# trial 0: optim.lr=0.1\n# one of 9 that will be proposed\n"
    )


# Optuna


AXES = [
    Axis("rate", ("1e-4", "1e-1"), (1e-4, 1e-1), log=True),
    Axis("kind", ("x", "y", "z")),
    Axis("size", ("1", "9"), (1, 9), whole=True),
]


def score(setting: dict[str, str]) -> float:
    return (setting["kind"] == "y") - abs(math.log10(float(setting["rate"])) + 2) - abs(int(setting["size"]) - 3) / 9


def proposed(count: int, draws: int = 0) -> list[dict[str, str]]:
    adviser, settings = optuna_search.Study(AXES, Sweep(tpe=count, draws=draws), "max"), []
    for number in range(count):
        settings.append(adviser.begin(number))
        if number % 7 == 3:
            adviser.end("failed", math.nan)
        else:
            adviser.end("finished", score(settings[-1]))
    return settings


def test_proposals_repeat_and_get_better():
    pytest.importorskip("optuna")
    settings = proposed(40)
    assert proposed(15) == settings[:15] and proposed(15, draws=1) != settings[:15]
    for setting in settings:
        assert 1e-4 <= float(setting["rate"]) <= 1e-1 and setting["kind"] in "xyz" and 1 <= int(setting["size"]) <= 9
    assert np.mean([*map(score, settings[-10:])]) > np.mean([*map(score, settings[:10])]) + 0.3


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_median_rule_ends_what_is_worse_than_the_median_of_five_or_more(mode):
    pytest.importorskip("optuna")
    adviser, draw = optuna_search.Study([], Sweep(pruner="median"), mode), np.random.default_rng(5)
    sign = 1 if mode == "max" else -1
    finished: list[list[float]] = []
    pruned = 0
    for number in range(25):
        assert adviser.begin(number) == {}
        values = draw.normal(0, 1, 6).tolist()
        for n in range(6):
            told = [sign * other[n] for other in finished]
            expected = len(finished) >= 5 and max(sign * value for value in values[: n + 1]) < np.median(told)
            assert adviser.report(values[n]) == expected, (number, n)
            if expected:
                adviser.end("pruned", max(values))
                pruned += 1
                break
        else:
            finished.append(values)
            adviser.end("finished", values[-1])
    assert pruned > 3 and len(finished) > 5


def test_halving_keeps_the_best_quarter():
    pytest.importorskip("optuna")
    adviser = optuna_search.Study([], Sweep(pruner="halving"), "max")
    kept = []
    for number, value in enumerate(np.random.default_rng(2).permutation(32) / 32):
        adviser.begin(number)
        if adviser.report(float(value)):
            adviser.end("pruned", float(value))
        else:
            kept.append(float(value))
            adviser.end("finished", float(value))
    assert max(kept) == 31 / 32 and len(kept) <= 16


@pytest.mark.slow
def test_a_sweep_by_optuna_goes_the_same_way_again(store, capsys):
    pytest.importorskip("optuna")
    words = ("data.noise=2.5", "optim.lr=log:1e-5..1e-1", "optim.momentum=0.9,0.0")
    assert sweep(*words, tpe=12, pruner="median") == 0
    states = Counter(folder.info().status for folder in runs_of("toy"))
    assert states["KILLED"] >= 1 and states["FINISHED"] >= 5
    before = [folder.name for folder in runs_of("toy")]
    assert sweep(*words, tpe=12, pruner="median") == 0
    assert [folder.name for folder in runs_of("toy")] == before
    first, second = runs_of("toy-sweep")
    assert run_folder.members(first) == run_folder.members(second)
    assert shown(first).tags["trainkit.best"] == shown(second).tags["trainkit.best"]
    assert tuple(optuna_search.PRUNERS) == ("median", "halving")
