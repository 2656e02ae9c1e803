"""Several seeds: every one a run, all beneath one, and the spread of their scores."""

from __future__ import annotations

import math
import re
import time

import click_commands
import numpy as np
import pytest
from pyarrow import csv
from runs import PLUGIN, TOY, Ran, run, stop_after
from scipy import stats

from trainkit.config.run_request import RunRequest
from trainkit.errors import UserError
from trainkit.experiments import group, seeds
from trainkit.experiments.launch import launch
from trainkit.experiments.recipe_check import check
from trainkit.experiments.seeds import repeated
from trainkit.tracking import journal, lineage, run_folder
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store

WORDS = ("data.samples=66", "data.noise=2.5", "train.length=2 epochs")


@pytest.fixture(autouse=True)
def _plugin(monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))


def repeat(*words: str, seeds: int = 2, resume: str | None = None, stopping=lambda: False) -> int:
    return launch(RunRequest(TOY, words or WORDS, ("toy",), resume, seeds=seeds), stopping)


def runs_of(recipe: str) -> list[RunFolder]:
    return [folder for folder in Store.locate().runs() if folder.info().recipe == recipe]


def shown(folder: RunFolder):
    return Store.locate().client().get_run(folder.info().run_id)


def final(folder: RunFolder) -> dict[str, float]:
    return {name: points[-1].value for name, points in journal.read(folder.journal).metrics.items()}


def test_the_time_of_each_run_counts_from_the_command_or_from_the_end_of_the_run_before(store, capsys):
    words = ("data.samples=66", "train.length=2 steps", "log.ceilings=off", "log.figures=null")
    assert launch(RunRequest(TOY, words, ("toy",), seeds=2), lambda: False, time.perf_counter() - 5000.0) == 0
    first, second = (final(r) for r in runs_of("toy"))
    assert first["final/time/wall_s"] > 5000 > second["final/time/wall_s"] > second["final/time/total_s"]
    said = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("seed ")]
    assert [row[4] for row in said[:2]] == [f"{run['final/time/wall_s']:.0f}" for run in (first, second)]


def test_every_seed_is_a_run_beneath_one_that_says_how_far_they_are_apart(store, tmp_path, capsys):
    alone = run(*WORDS, "seed=4")
    assert repeat(*WORDS, "seed=3", seeds=3) == 0
    printed = capsys.readouterr().out
    (parent,), children = runs_of("toy-seeds"), sorted(runs_of("toy"), key=lambda folder: folder.info().seed)
    assert [folder.info().seed for folder in children] == [3, 4, 5] and children[1] == alone.folder
    rows = printed.partition("\nChildren ")[2].split("\n\n")[0].splitlines()[1:]
    assert rows[0].split() == ["val/accuracy", "step", "seconds", "run"] and len(rows) == 4, printed
    assert [row[:6] for row in rows[1:]] == ["seed 3", "seed 4", "seed 5"]
    assert rows[2].endswith(f"  {alone.folder.name} (reused)") and parent.info().status == "FINISHED"
    last = click_commands.following(printed)[-2:]
    assert last[0].startswith(f"Next:   trainkit compare OTHER_RUN {parent.name}  # ")
    assert {shown(r).data.tags["mlflow.parentRunId"] for r in children} == {parent.info().run_id}
    assert run_folder.members(parent) == {f"seed {r.info().seed}": r.name for r in children}
    assert run_folder.members(children[0]) == {}
    above = shown(parent)
    assert above.info.experiment_id == shown(children[0]).info.experiment_id and above.info.status == "FINISHED"
    assert [above.data.tags[f"trainkit.seed.{k}"] for k in (3, 4, 5)] == [r.name for r in children]
    assert "seed" not in above.data.params and above.data.params["data.samples"] == "66"

    assert lineage.read(parent).splitlines() == [
        f"compared with {alone.folder.name}, the last finished run", "", "seed  4 -> (several)",
    ]  # fmt: skip
    assert lineage.read(children[2]) == f"child run of {parent.name}\n\nseed  (several) -> 5\n"

    scores = [final(r)["final/val/accuracy"] for r in children]
    assert len(set(scores)) > 1, "nothing to average here"
    found = final(parent)
    assert found["final/val/accuracy"] == pytest.approx(np.mean(scores))
    assert found["std/val/accuracy"] == pytest.approx(np.std(scores, ddof=1))
    expected = stats.t.interval(0.95, 2, loc=np.mean(scores), scale=stats.sem(scores))
    assert (found["seeds/val/accuracy_low"], found["seeds/val/accuracy_high"]) == pytest.approx(expected)
    assert above.data.metrics["seeds/val/accuracy_low"] == pytest.approx(expected[0], rel=1e-5)
    assert "final/val/ema/accuracy" in found, "the EMA weights too"
    assert "final/speed/samples_per_s" in found and "std/speed/samples_per_s" not in found

    path = Store.locate().client().download_artifacts(parent.info().run_id, "tables/seeds.csv", str(tmp_path))
    table = csv.read_csv(path).to_pydict()
    row = table["score"].index("val/accuracy")
    assert [table[f"seed_{k}"][row] for k in (3, 4, 5)] == pytest.approx(scores, rel=1e-5)
    assert [table[key][row] for key in ("low", "high")] == pytest.approx(expected, rel=1e-5)
    values = "  ".join(f"{value:.4f}" for value in (*scores, np.mean(scores), np.std(scores, ddof=1)))
    ends = f"{expected[0]:.4f} to {expected[1]:.4f}"
    assert re.search(rf"^accuracy +{values} +{ends}$", printed, re.MULTILINE), printed
    assert "The data differs between" not in printed
    page = above.data.tags["mlflow.note.content"]
    assert page.startswith(lineage.note(parent)) and f"  {values}" in page


@pytest.mark.slow
def test_more_seeds_use_those_there_are_and_an_interrupted_repetition_goes_on(store, capsys):
    assert repeat() == 0 and len(runs_of("toy")) == 2
    # Asked once before each seed that is trained, once before its first step, and once after each of its eight.
    assert repeat(seeds=4, stopping=stop_after(5)) == 143
    above = runs_of("toy-seeds")
    assert [folder.info().status for folder in above] == ["FINISHED", "KILLED"]
    begun = runs_of("toy")[-1]
    assert begun.info().status == "KILLED" and begun.info().seed == 2
    assert repeat(seeds=4, resume="") == 0
    printed = capsys.readouterr().out
    assert f"{begun.name}: resumed from" in printed and f"Run         {above[1].name}, continued" in printed
    assert [folder.info().seed for folder in runs_of("toy")] == [0, 1, 2, 3] and len(runs_of("toy-seeds")) == 2
    scores = [final(folder)["final/val/accuracy"] for folder in runs_of("toy")]
    assert final(above[1])["final/val/accuracy"] == pytest.approx(np.mean(scores))
    assert Ran(0, begun).folder.info().status == "FINISHED"


def test_the_runs_of_a_seed_are_those_that_the_word_alone_would_start():
    orders = repeated(RunRequest(TOY, ("optim.lr=0.1", "seed=7"), ("toy",), seeds=3))
    assert [child.title for child in orders] == ["seed 7", "seed 8", "seed 9"]
    assert [child.recipe.seed for child in orders] == [7, 8, 9]
    assert all(child.request.seeds is None and child.recipe.optim.lr == 0.1 for child in orders)
    assert [child.request.resume for child in repeated(RunRequest(TOY, (), ("toy",), resume="a-run", seeds=2))] == [
        "",
        "",
    ]


@pytest.mark.parametrize(
    ("seeds", "words", "message"),
    [
        (1, (), "--seeds: 1; expected 2 or more"),
        (-3, (), "--seeds: -3; expected 2 or more"),
        (2, ("evaluations={}", "best=null"), "toy has no evaluations"),
        (2, ("seed=-1x",), "seed"),
        (2, ("optim.lrr=1",), "optim.lrr"),
    ],
)
def test_orders_that_have_no_spread_are_refused_before_anything_begins(seeds, words, message):
    for look in (repeated, check):
        with pytest.raises(UserError, match=message):
            look(RunRequest(TOY, words, ("toy",), seeds=seeds))


def test_a_seed_that_fails_ends_the_run_above_too(store):
    with pytest.raises(UserError, match="not finite"):
        repeat(*WORDS, "task.nan_at=1")
    assert [folder.info().status for folder in Store.locate().runs()] == ["FAILED", "FAILED"]
    assert "not finite" in shown(runs_of("toy-seeds")[0]).data.tags["trainkit.error"]


@pytest.mark.slow
def test_a_run_that_was_deleted_in_the_page_still_counts(store, caplog):
    alone = run(*WORDS)
    Store.locate().client().delete_run(alone.folder.info().run_id)
    assert repeat() == 0 and len(runs_of("toy")) == 2
    assert f"run {alone.folder.name} is not in sqlite" in caplog.text
    scores = [final(folder)["final/val/accuracy"] for folder in runs_of("toy")]
    assert final(runs_of("toy-seeds")[0])["final/val/accuracy"] == pytest.approx(np.mean(scores))


# The arithmetic, without a run


def test_the_interval_is_students_and_holds_the_mean_as_often_as_it_says():
    draw = np.random.default_rng(3)
    values = draw.normal(0.8, 0.02, 5).tolist()
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert seeds.interval(values) == pytest.approx((expected.low, expected.high))
    # By hand for two: t of one degree of freedom is tan(0.475 pi) = 12.706.
    low, high = seeds.interval([1.0, 3.0])
    assert (low, high) == pytest.approx((2 - math.tan(0.475 * math.pi), 2 + math.tan(0.475 * math.pi)))
    held = [low <= 0.8 <= high for low, high in map(seeds.interval, draw.normal(0.8, 0.02, (2000, 5)).tolist())]
    assert np.mean(held) == pytest.approx(0.95, abs=0.015)
    assert seeds.interval(values, 0.5)[0] > seeds.interval(values)[0]


def test_a_score_that_a_seed_has_not_got_is_left_out():
    assert seeds.interval([0.5, math.nan, 0.7]) == pytest.approx(seeds.interval([0.5, 0.7]))
    assert all(math.isnan(end) for end in seeds.interval([0.5, math.nan]))
    assert seeds.interval([0.5, 0.5, 0.5]) == pytest.approx((0.5, 0.5))
    assert group.mean([0.5, math.nan, 0.7]) == pytest.approx(0.6) and math.isnan(group.std([0.5]))
    assert math.isnan(group.mean([])) and group.std([0.5, 0.7, math.inf]) == pytest.approx(0.02**0.5)
