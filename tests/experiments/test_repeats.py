"""Several seeds, and the folds of a cross-validation: each a run, all of them beneath one that sums their scores up."""

from __future__ import annotations

import json
import math
import re
import time

import click_commands
import numpy as np
import pytest
from mlflow.exceptions import MlflowException
from pyarrow import csv, parquet
from runs import PLUGIN, TOY, Ran, run, spawn, stop_after
from scipy import stats

from trainkit.config.run_request import RunRequest
from trainkit.errors import UserError
from trainkit.experiments import fold_rows, repeats
from trainkit.experiments.launch import children_of, launch
from trainkit.experiments.recipe_check import check
from trainkit.metrics import significance
from trainkit.tracking import journal, lineage, run_folder
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store

WORDS = (
    "data.name=folded",
    "data.samples=66",
    "data.noise=2.5",
    "evaluations={held_out: {batch_size: 8}, val: {batch_size: 8}}",
    "best.metric=held_out/accuracy",
)
SEEDED = ("data.samples=66", "data.noise=2.5", "train.length=2 epochs")


@pytest.fixture(autouse=True)
def _plugin(monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))


def repeat(*words: str, seeds: int = 2, stopping=lambda: False) -> int:
    return launch(RunRequest(TOY, words or SEEDED, ("toy",), seeds=seeds), stopping)


def parents(recipe: str = "toy-folds") -> list[RunFolder]:
    return [folder for folder in Store.locate().runs() if folder.info().recipe == recipe]


def beneath() -> list[RunFolder]:
    return parents("toy")


def shown(folder: RunFolder):
    return Store.locate().client().get_run(folder.info().run_id)


def tags(folder: RunFolder) -> dict[str, str]:
    return shown(folder).data.tags


def artifact(folder: RunFolder, path: str, tmp_path):
    return Store.locate().client().download_artifacts(folder.info().run_id, path, str(tmp_path))


def final(folder: RunFolder) -> dict[str, float]:
    return {name: points[-1].value for name, points in journal.read(folder.journal).metrics.items()}


def test_every_fold_is_a_run_beneath_one_that_holds_their_scores(store, tmp_path, capsys):
    ran = run(*WORDS, "data.folds=2", "promote={name: folds}", folds=True)
    printed = capsys.readouterr().out
    (parent,), runs = parents(), beneath()
    assert ran.code == 0 and len(runs) == 2 and parent.info().status == "FINISHED"
    client = Store.locate().client()
    assert [client.get_run(r.info().run_id).data.params["data.fold"] for r in runs] == ["0", "1"]
    assert {tags(r)["mlflow.parentRunId"] for r in runs} == {parent.info().run_id}
    assert [r.info().follows for r in runs] == [parent.name] * 2
    for number, r in enumerate(runs):
        assert lineage.read(r) == f"child run of {parent.name}\n\ndata.fold  (several) -> {number}\n"
    with pytest.raises(MlflowException, match="not found"):  # folds promote nothing
        client.get_registered_model("folds")
    shown = client.get_run(parent.info().run_id)
    assert (
        shown.info.status == "FINISHED"
        and shown.info.experiment_id == client.get_run(runs[0].info().run_id).info.experiment_id
    )
    assert [tags(parent)[f"trainkit.fold.{k}"] for k in range(2)] == [r.name for r in runs]

    scores = [final(r)["final/held_out/accuracy"] for r in runs]
    assert len(set(scores)) > 1, "nothing to average here"
    found = final(parent)
    assert found["final/held_out/accuracy"] == pytest.approx(np.mean(scores))
    assert found["std/held_out/accuracy"] == pytest.approx(np.std(scores, ddof=1))
    assert found["final/held_out/ema/accuracy"] == pytest.approx(
        np.mean([final(r)["final/held_out/ema/accuracy"] for r in runs])
    )
    assert "final/speed/samples_per_s" in found and "std/speed/samples_per_s" not in found
    # The same values are in MLflow, not in the journal alone.
    assert shown.data.metrics["final/held_out/accuracy"] == pytest.approx(np.mean(scores), rel=1e-5)

    rows = parquet.read_table(artifact(parent, "rows/held_out_folds.parquet", tmp_path)).to_pydict()
    assert sorted(rows["id"]) == list(range(66)) and all(
        i % 2 == fold for i, fold in zip(rows["id"], rows["fold"], strict=True)
    )
    by_fold = [
        np.mean([hit for hit, fold in zip(rows["hit"], rows["fold"], strict=True) if fold == k]) for k in range(2)
    ]
    assert by_fold == pytest.approx(scores)
    assert found["pooled/held_out/accuracy"] == pytest.approx(np.mean(rows["hit"]))
    assert found["pooled/held_out/accuracy_low"] < np.mean(rows["hit"]) < found["pooled/held_out/accuracy_high"]
    table = csv.read_csv(artifact(parent, "tables/folds.csv", tmp_path)).to_pydict()
    row = table["score"].index("held_out/accuracy")
    assert [table[f"fold_{k}"][row] for k in range(2)] == pytest.approx(scores, rel=1e-5)
    assert table["mean"][row] == pytest.approx(np.mean(scores), rel=1e-5)
    assert table["std"][row] == pytest.approx(np.std(scores, ddof=1), rel=1e-5)
    assert (
        table["all"][row] == pytest.approx(np.mean(rows["hit"]), rel=1e-5)
        and table["all_low"][row] < table["all_high"][row]
    )
    assert table["all"][table["score"].index("val/accuracy")] is None

    # The fixed set is scored in every fold: put together, each of its samples would count three times.
    assert "pooled/val/accuracy" not in found and "val: no table of all folds" in printed
    numbers = "  ".join(f"{value:.4f}" for value in (*scores, np.mean(scores), np.std(scores, ddof=1)))
    assert re.search(rf"^accuracy +{numbers}  {np.mean(rows['hit']):.4f} +0\.\d+ to 0\.\d+$", printed, re.MULTILINE), (
        printed
    )
    assert "all: the 66 samples of all folds, each once" in printed

    meta = json.loads((runs[0].path / "meta.json").read_text())
    assert (meta["classes"], meta["shape"], meta["digest"]) == (4, [3, 8, 8], "train-66-2.5-0")


@pytest.mark.slow
def test_finished_folds_are_used_again_also_one_that_was_trained_alone(store, capsys):
    alone = run(*WORDS, "data.fold=1")
    assert alone.code == 0
    assert run(*WORDS, folds=True).code == 0
    assert len(beneath()) == 3 and f"{alone.folder.name} (reused)" in capsys.readouterr().out
    first = parents()[0]
    assert tags(alone.folder)["mlflow.parentRunId"] == first.info().run_id
    assert run(*WORDS, folds=True).code == 0
    assert len(beneath()) == 3 and len(parents()) == 2
    second = parents()[1]
    assert {tags(r)["mlflow.parentRunId"] for r in beneath()} == {second.info().run_id}
    assert final(second) == final(first) and tags(first)["trainkit.fold.1"] == alone.folder.name
    # Other settings are other runs.
    assert run(*WORDS, "optim.lr=0.01", folds=True).code == 0
    assert len(beneath()) == 6


@pytest.mark.slow
def test_an_interrupted_cross_validation_goes_on_where_it_was(store, capsys):
    # The stop is asked once before each fold, once before its first step and once after each of its six.
    cut = run(*WORDS, folds=True, stopping=stop_after(11))
    assert cut.code == 143 and parents()[0].info().status == "KILLED"
    states = [r.info().status for r in beneath()]
    assert states == ["FINISHED", "KILLED"] and 0 < Ran(0, beneath()[1]).last.step < 6
    begun = beneath()[1]
    done = run(*WORDS, folds=True, resume="")
    printed = capsys.readouterr().out
    assert done.code == 0 and len(parents()) == 1 and parents()[0].info().status == "FINISHED"
    assert [r.info().status for r in beneath()] == ["FINISHED"] * 3 and beneath()[1] == begun
    assert f"{begun.name}: resumed from" in printed and "(reused)" in printed
    assert f"Run         {parents()[0].name}, continued" in printed
    assert {tags(r)["mlflow.parentRunId"] for r in beneath()} == {parents()[0].info().run_id}
    assert tags(parents()[0])["trainkit.resumed"] == "1"
    # As if it had never been interrupted.
    values = {k: v for k, v in final(parents()[0]).items() if "/speed/" not in k and "/time/" not in k}
    for child in beneath():
        (child.path / "run.json").write_text((child.path / "run.json").read_text().replace("FINISHED", "FAILED"))
    run(*WORDS, folds=True)
    again = {k: v for k, v in final(parents()[1]).items() if "/speed/" not in k and "/time/" not in k}
    assert len(beneath()) == 6 and again == values


@pytest.mark.slow
def test_what_cannot_be_continued_is_refused(store):
    with pytest.raises(UserError, match=r"no unfinished run of toy-folds with these settings"):
        run(*WORDS, folds=True, resume="")
    single = run(*WORDS, "data.fold=0", stopping=stop_after(2)).folder
    with pytest.raises(UserError, match=r"is not a cross-validation of .*toy\.yaml with these settings"):
        run(*WORDS, folds=True, resume=single.name)
    assert single.info().status == "KILLED" and not single.alive()
    assert run(*WORDS, folds=True).code == 0
    with pytest.raises(UserError, match=f"run {parents()[0].name}: is finished"):
        run(*WORDS, folds=True, resume=parents()[0].name)


def test_a_fold_that_fails_ends_the_parent_too_and_the_data_of_all_is_looked_at_first(store):
    with pytest.raises(UserError, match="fold 2: its file is damaged"):
        run(*WORDS, "data.broken_fold=2", folds=True)
    assert Store.locate().runs() == [], "nothing was trained or begun"
    with pytest.raises(UserError, match="not finite"):
        run(*WORDS, "task.nan_at=1", folds=True)
    assert [r.info().status for r in Store.locate().runs()] == ["FAILED", "FAILED"]
    assert "not finite" in tags(parents()[0])["trainkit.error"]


FOLDED = {"folds": True}


@pytest.mark.parametrize(
    ("how", "words", "message"),
    [
        (FOLDED, ("evaluations={val: {}}", "best=null"),
         r"--folds: the data of toy, .*, has no keys `folds` and `fold`; expected data"),
        (FOLDED, (*WORDS, "data.fold=1"), r"--folds: data\.fold is given too"),
        (FOLDED, (*WORDS, "data.folds=1"), r"data\.folds: 1; expected 2 or more"),
        (FOLDED, (*WORDS[:3], "evaluations={}", "best=null"), "--folds: toy has no evaluations"),
        (FOLDED, (*WORDS, "data.folds=three"), "data.folds"),
        ({"seeds": 1}, (), "--seeds: 1; expected 2 or more"),
        ({"seeds": -3}, (), "--seeds: -3; expected 2 or more"),
        ({"seeds": 2}, ("evaluations={}", "best=null"), "--seeds: toy has no evaluations"),
        ({"seeds": 2}, ("seed=-1x",), "seed"),
        ({"seeds": 2}, ("optim.lrr=1",), "optim.lrr"),
    ],
)  # fmt: skip
def test_orders_that_repeat_nothing_are_refused_before_anything_begins(how, words, message):
    for look in (children_of, check):
        with pytest.raises(UserError, match=message):
            look(RunRequest(TOY, words, ("toy",), **how))


@pytest.mark.slow
def test_on_two_processes_too(store, capsys, monkeypatch):
    """And a stop reaches the fold that is trained, and the parent."""
    words = [str(TOY), "--plugin", "toy", *WORDS, "data.folds=2", "--folds"]
    cut = spawn(2, *words, "task.signal_at=2")
    assert cut.returncode != 0 and [r.info().status for r in Store.locate().runs()] == ["KILLED", "KILLED"], cut.stderr
    done = spawn(2, *words, "task.signal_at=2", "--resume")
    # The fold that follows is told to stop at that step as well.
    assert done.returncode != 0 and [r.info().status for r in beneath()] == ["FINISHED", "KILLED"], done.stderr
    # On one process, for a change.
    monkeypatch.syspath_prepend(PLUGIN)
    elastic = RunRequest(TOY, (*words[3:-1], "task.signal_at=2"), ("toy",), resume="", elastic=True, folds=True)
    assert launch(elastic, lambda: False) == 0
    (parent,) = parents()
    assert parent.info().status == "FINISHED" and len(beneath()) == 2
    assert "the 66 samples of all folds, each once" in capsys.readouterr().out
    scores = [final(r)["final/held_out/accuracy"] for r in beneath()]
    assert final(parent)["final/held_out/accuracy"] == pytest.approx(np.mean(scores))


def test_the_time_of_each_run_counts_from_the_command_or_from_the_end_of_the_run_before(store, capsys):
    words = ("data.samples=66", "train.length=2 steps", "log.ceilings=off", "log.figures=null")
    assert launch(RunRequest(TOY, words, ("toy",), seeds=2), lambda: False, time.perf_counter() - 5000.0) == 0
    first, second = (final(r) for r in beneath())
    assert first["final/time/wall_s"] > 5000 > second["final/time/wall_s"] > second["final/time/total_s"]
    said = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("seed ")]
    assert [row[4] for row in said[:2]] == [f"{run['final/time/wall_s']:.0f}" for run in (first, second)]


def test_every_seed_is_a_run_beneath_one_that_says_how_far_they_are_apart(store, tmp_path, capsys):
    alone = run(*SEEDED, "seed=4")
    assert repeat(*SEEDED, "seed=3", seeds=3) == 0
    printed = capsys.readouterr().out
    (parent,), children = parents("toy-seeds"), sorted(beneath(), key=lambda folder: folder.info().seed)
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
def test_more_seeds_use_those_there_are(store):
    assert repeat() == 0 and len(beneath()) == 2
    assert repeat(seeds=4) == 0
    assert [folder.info().seed for folder in beneath()] == [0, 1, 2, 3] and len(parents("toy-seeds")) == 2
    scores = [final(folder)["final/val/accuracy"] for folder in beneath()]
    assert final(parents("toy-seeds")[1])["final/val/accuracy"] == pytest.approx(np.mean(scores))


def test_the_runs_of_a_seed_are_those_that_the_word_alone_would_start():
    orders = children_of(RunRequest(TOY, ("optim.lr=0.1", "seed=7"), ("toy",), seeds=3))
    assert [child.title for child in orders] == ["seed 7", "seed 8", "seed 9"]
    assert [child.recipe.seed for child in orders] == [7, 8, 9]
    assert all(child.request.seeds is None and child.recipe.optim.lr == 0.1 for child in orders)
    assert [child.request.resume for child in children_of(RunRequest(TOY, (), ("toy",), resume="a-run", seeds=2))] == [
        "",
        "",
    ]


@pytest.mark.slow
def test_a_run_that_was_deleted_in_the_page_still_counts(store, caplog):
    alone = run(*SEEDED)
    Store.locate().client().delete_run(alone.folder.info().run_id)
    assert repeat() == 0 and len(beneath()) == 2
    assert f"run {alone.folder.name} is not in sqlite" in caplog.text
    scores = [final(folder)["final/val/accuracy"] for folder in beneath()]
    assert final(parents("toy-seeds")[0])["final/val/accuracy"] == pytest.approx(np.mean(scores))


# The arithmetic, without a run


def rows(seed: int, cases: int, first: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    distance = draw.uniform(0.3, 1, cases)
    distance[0] = np.nan
    return {
        "id": np.array([f"case-{first + n}" for n in range(cases)], object),
        "distance_mm": distance,
        "age": np.full(cases, 50.0),
    }


def scores_of(part: dict[str, np.ndarray]) -> dict[str, float]:
    return {"v/distance_mm": np.nanmean(part["distance_mm"]), "v/age": 49.0, "v/cases": len(part["id"])}


def test_scores_that_the_rows_of_all_folds_reproduce_are_pooled_with_intervals():
    parts = [rows(0, 9, 0), rows(1, 12, 9), rows(2, 7, 21)]
    found = [scores_of(part) for part in parts]
    values = {name: [one[name] for one in found] for name in found[0]}
    out = fold_rows.pool(values, {"v": parts})
    # An age that does not agree is no score of the column, and a number of cases has none.
    assert out.scores.keys() == {"v/distance_mm"}
    distance = np.concatenate([part["distance_mm"] for part in parts])
    mean, low, high = out.scores["v/distance_mm"]
    assert mean == pytest.approx(np.nanmean(distance), rel=1e-6)
    draw = np.random.default_rng(7)
    again = [np.nanmean(distance[draw.integers(0, 28, 28)]) for _ in range(4000)]
    assert (low, high) == pytest.approx(np.quantile(again, significance.tail_probabilities(28)), abs=0.006)
    assert out.tables["v"]["fold"].tolist() == [0] * 9 + [1] * 12 + [2] * 7
    assert len(set(out.tables["v"]["id"])) == 28
    # Folds of different sizes: the mean over folds is another number than that over all samples.
    assert repeats.mean(values["v/distance_mm"]) == pytest.approx(np.mean(values["v/distance_mm"]))
    assert repeats.mean(values["v/distance_mm"]) != pytest.approx(out.scores["v/distance_mm"][0], abs=1e-6)


def test_intervals_are_over_patients_where_rows_have_them():
    parts = [rows(0, 9, 0), rows(1, 12, 9)]
    values = {"v/distance_mm": [scores_of(part)["v/distance_mm"] for part in parts]}
    alone = fold_rows.pool(values, {"v": parts}).scores["v/distance_mm"]
    # Three scans of each patient, alike: as many patients as before, and an interval as wide.
    thrice = [
        {key: np.repeat(column, 3) for key, column in part.items()}
        | {"patient": np.repeat(part["id"], 3), "id": np.array([f"{i}-{k}" for i in part["id"] for k in range(3)])}
        for part in parts
    ]
    again = fold_rows.pool(values, {"v": thrice})
    assert again.scores["v/distance_mm"] == pytest.approx(alone, abs=0.006) and len(again.tables["v"]["id"]) == 63


def test_rows_that_cannot_stand_together_are_said():
    one, two = rows(0, 3, 0), rows(1, 3, 2)
    assert fold_rows.pool({}, {"v": [one, two]}).notes == {
        "v": "v: no table of all folds; the same samples are evaluated in several folds"
    }
    patches = [{**part, "id": np.array([part["id"][0]] * 3)} for part in (rows(0, 3, 0), rows(1, 3, 3))]
    assert len(fold_rows.pool({}, {"v": patches}).tables["v"]["fold"]) == 6
    assert "not every run kept its rows" in fold_rows.pool({}, {"v": [one, None]}).notes["v"]
    assert "have no `id`" in fold_rows.pool({}, {"v": [one, {"x": np.ones(2)}]}).notes["v"]
    text = {**rows(1, 3, 3), "age": np.array(["old", None, "young"], object)}
    joined = fold_rows.pool({}, {"v": [one, text]}).tables["v"]
    assert joined["age"].tolist() == [50.0, 50.0, 50.0, "old", None, "young"]


def test_the_interval_is_students_and_holds_the_mean_as_often_as_it_says():
    draw = np.random.default_rng(3)
    values = draw.normal(0.8, 0.02, 5).tolist()
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert repeats.interval(values) == pytest.approx((expected.low, expected.high))
    # By hand for two: t of one degree of freedom is tan(0.475 pi) = 12.706.
    low, high = repeats.interval([1.0, 3.0])
    assert (low, high) == pytest.approx((2 - math.tan(0.475 * math.pi), 2 + math.tan(0.475 * math.pi)))
    held = [low <= 0.8 <= high for low, high in map(repeats.interval, draw.normal(0.8, 0.02, (2000, 5)).tolist())]
    assert np.mean(held) == pytest.approx(0.95, abs=0.015)
    assert repeats.interval(values, 0.5)[0] > repeats.interval(values)[0]


def test_a_score_that_a_seed_has_not_got_is_left_out():
    assert repeats.interval([0.5, math.nan, 0.7]) == pytest.approx(repeats.interval([0.5, 0.7]))
    assert all(math.isnan(end) for end in repeats.interval([0.5, math.nan]))
    assert repeats.interval([0.5, 0.5, 0.5]) == pytest.approx((0.5, 0.5))
    assert repeats.mean([0.5, math.nan, 0.7]) == pytest.approx(0.6) and math.isnan(repeats.std([0.5]))
    assert math.isnan(repeats.mean([])) and repeats.std([0.5, 0.7, math.inf]) == pytest.approx(0.02**0.5)
