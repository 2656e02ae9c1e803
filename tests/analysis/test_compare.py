"""Comparisons of runs: their results, their text, page and image, and runs that cannot be compared."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from pyarrow import parquet
from runs import own_store, run
from scipy import stats

from trainkit import rng
from trainkit.analysis import compare as comparing
from trainkit.analysis import compare_report, saved_rows
from trainkit.analysis.compare import compare
from trainkit.cli import main
from trainkit.errors import UserError
from trainkit.experiments import group
from trainkit.interfaces import Scores
from trainkit.tracking import journal
from trainkit.tracking.journal import Point
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store
from trainkit.training import best


@pytest.fixture(scope="module")
def trained(tmp_path_factory, database):
    """Runs of the toy recipe: two seeds as it is, two that hardly learn, one that is scored on other data."""
    with own_store(tmp_path_factory.mktemp("compared"), database):
        made = {
            "plain": run(),
            "slow": run("optim.lr=0.0001"),
            "plain1": run("seed=1"),
            "slow1": run("optim.lr=0.0001", "seed=1"),
            "other": run("data.noise=2.0"),
        }
        store = Store.locate()
    return store, {name: ran.folder for name, ran in made.items()}


def last(folder: RunFolder) -> dict[str, float]:
    return {name: points[-1].value for name, points in journal.read(folder.journal).metrics.items()}


def rows(store: Store, folder: RunFolder, when: str, tmp_path) -> np.ndarray:
    path = store.client().download_artifacts(folder.info().run_id, f"rows/val_{when}.parquet", str(tmp_path))
    return parquet.read_table(path)["accuracy"].to_numpy().astype(float)


def ask(store: Store, monkeypatch, *words: str, code: int = 0) -> str:
    monkeypatch.setenv("TRAINKIT_STORE", str(store.home))
    result = CliRunner().invoke(main.main, ["compare", *words], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def span(hits: tuple[np.ndarray, np.ndarray], level: float = 0.95) -> tuple[float, float]:
    """The interval of a difference of means, written out."""
    many = len(hits[0])
    draw = np.random.Generator(np.random.Philox(key=rng.number(0, "bootstrap"))).integers(many, size=(2000, many))
    gaps = [float(hits[1][line].mean() - hits[0][line].mean()) for line in draw]
    tail = stats.norm.cdf(math.sqrt(many / (many - 1)) * stats.t.ppf((1 - level) / 2, many - 1))
    return tuple(np.quantile(gaps, (tail, 1 - tail)) - np.mean(gaps) + hits[1].mean() - hits[0].mean())


# ---- What is found ---------------------------------------------------------------------------------------------------


def test_two_runs_are_judged_on_the_rows_that_both_kept(trained, tmp_path):
    store, runs = trained
    found = compare(store, [runs["plain"], runs["slow"]])
    assert [str(change) for change in found.changes] == ["optim.lr  0.05 -> 0.0001"]
    assert found.same_data == {"val": True} and found.notes == ()
    assert {score.name for score in found.scores} == {
        "val/accuracy", "val/ema/accuracy", "best/val/accuracy", "at_best/val/ema/accuracy",
    }  # fmt: skip
    ends = [last(runs[name]) for name in ("plain", "slow")]
    for when, prefix in (("final", "final/val"), ("best", "best/val")):
        (score,) = [s for s in found.scores if s.name == f"{prefix.removeprefix('final/')}/accuracy"]
        assert score.values == pytest.approx(tuple(end[f"{prefix}/accuracy"] for end in ends))
        hits = tuple(rows(store, runs[name], when, tmp_path) for name in ("plain", "slow"))
        assert score.values == pytest.approx((hits[0].mean(), hits[1].mean()))
        assert (score.low, score.high) == pytest.approx(span(hits))
        assert score.difference == pytest.approx(hits[1].mean() - hits[0].mean())
        assert (score.draws, score.units, score.why) == (2000, "37 samples", "")
        assert score.verdict == ("worse" if score.high < 0 else "better" if score.low > 0 else "not decided")
    assert found.primary.name == "best/val/accuracy" and found.primary.verdict == "worse"
    assert sum(score.primary for score in found.scores) == 1
    (averaged,) = [s for s in found.scores if s.name == "val/ema/accuracy"]
    assert averaged.low is None and averaged.verdict == "not decided" and "saved no rows" in averaged.why
    # The other way round everything is turned over.
    back = compare(store, [runs["slow"], runs["plain"]])
    assert back.primary.verdict == "better" and back.primary.difference == pytest.approx(-found.primary.difference)
    assert (back.primary.low, back.primary.high) == pytest.approx((-found.primary.high, -found.primary.low), abs=0.01)


def test_runs_whose_data_was_prepared_differently_are_compared_and_it_is_said(trained, monkeypatch):
    store, runs = trained
    tagged = comparing._tags
    tags = {run.name: dict(tagged(run, store, store.client())) for run in runs.values()}
    monkeypatch.setattr(comparing, "_tags", lambda run, store, client: tags[run.name])
    pair = [runs["plain"], runs["slow"]]
    tags[runs["slow"].name]["trainkit.data.val"] = "of another size"
    older = compare(store, pair)
    assert older.same_data == {"val": False} and older.primary.verdict == "not comparable"
    assert older.notes[0] == "val: not compared: evaluated on different data"
    for folder in pair:
        tags[folder.name]["trainkit.content.val"] = "the same files"
    found = compare(store, pair)
    assert found.same_data == {"val": True} and found.primary.verdict == "worse"
    assert found.notes == (f"val: the same samples, prepared differently in {runs['slow'].name}",)
    tags[runs["slow"].name]["trainkit.content.val"] = "other files"
    assert compare(store, pair).primary.verdict == "not comparable"


def test_a_run_from_before_that_logged_all_scores_under_best_is_compared_as_others_are(trained, monkeypatch):
    store, runs = trained
    read = journal.read

    def as_before(path):
        history = read(path)
        if path != runs["plain"].journal:
            return history
        return journal.History({name.replace("at_best/", "best/"): own for name, own in history.metrics.items()})

    pair = [runs["plain"], runs["slow"]]
    assert {name for name in last(runs["plain"]) if "best/" in name} == {
        "best/val/accuracy", "at_best/val/ema/accuracy",
    }  # fmt: skip
    new = compare(store, pair).scores
    monkeypatch.setattr(journal, "read", as_before)
    assert "best/val/ema/accuracy" in last(runs["plain"]) and compare(store, pair).scores == new


def test_a_run_beside_itself_again_is_not_decided(trained):
    store, runs = trained
    found = compare(store, [runs["plain"], runs["plain1"]])
    assert [change.key for change in found.changes] == ["seed"]
    one = comparing.replace(found.primary, verdict="better", seeds=None)
    assert "another seed, or training again" in compare_report.sentence(one, True)
    assert "trainkit repeat" in compare_report.sentence(one, False)
    same = compare(store, [runs["plain"], runs["plain"]])
    assert (same.primary.low, same.primary.high, same.primary.verdict) == (0.0, 0.0, "not decided")


def test_runs_scored_on_other_data_are_not_compared(trained):
    store, runs = trained
    found = compare(store, [runs["plain"], runs["other"]])
    assert found.same_data == {"val": False}
    assert {score.verdict for score in found.scores} == {"not comparable"}
    assert all(score.difference is None and score.low is None for score in found.scores)
    assert "different data" in found.notes[0]
    place = {change.key: change for change in found.place}
    assert "training data" in place, "it is another set too"
    text = compare_report.text(found)
    assert text.index("different data") < text.index("changes in B") and "are not comparable on" in text


def test_where_the_data_of_an_evaluation_is_not_known_nothing_is_judged(trained):
    store, runs = trained
    client, run_id, tag = store.client(), runs["slow"].info().run_id, f"{comparing.DATA}.val"
    known = client.get_run(run_id).data.tags[tag]
    client.delete_tag(run_id, tag)
    try:
        found = compare(store, [runs["plain"], runs["slow"]])
    finally:
        client.set_tag(run_id, tag, known)
    assert found.primary.verdict == "not comparable" and runs["slow"].name in found.primary.why
    assert found.same_data == {"val": False} and "is unknown" in found.notes[0]


def test_rows_that_do_not_give_the_score_are_not_trusted(trained, monkeypatch):
    store, runs = trained
    slow = runs["slow"].info().run_id

    def altered(client, run_id, name, read=saved_rows.read):
        if (found := read(client, run_id, name)) is None or run_id != slow:
            return found
        return found[0] | {"accuracy": 1 - found[0]["accuracy"]}, found[1]

    monkeypatch.setattr(saved_rows, "read", altered)
    found = compare(store, [runs["plain"], runs["slow"]])
    assert found.primary.low is None and found.primary.verdict == "not decided"
    assert "do not reproduce this metric" in found.primary.why
    fine = comparing.replace(found.primary, metric="other", why="")
    assert compare_report.whys([found.primary, fine]) == [f"accuracy: {found.primary.why}"]


def parent(store: Store, beneath: list[RunFolder], kind: str = "seed") -> RunFolder:
    """A run above others, as repeating a recipe makes one."""
    client, folder = store.client(), store.new_run("toy-seeds", 0, "abcd")
    experiment = client.get_experiment_by_name("toy").experiment_id
    run_id = client.create_run(experiment, run_name=folder.name).info.run_id
    members = {f"{kind} {k}": child.name for k, child in enumerate(beneath)}
    (folder.path / group.MEMBERS).write_text(json.dumps(members))
    folder.recipe.write_text(beneath[0].recipe.read_text())
    folder.journal.write_text("")
    folder.update(run_id=run_id, status="FINISHED", experiment="toy")
    folder.release()
    return folder


def test_repeats_are_compared_by_their_means_and_by_their_spread(trained, tmp_path):
    store, runs = trained
    plain, slow = (parent(store, [runs[name], runs[f"{name}1"]]) for name in ("plain", "slow"))
    found = compare(store, [plain, slow])
    assert [change.key for change in found.changes] == ["optim.lr"], "the seeds of repeats are no change"
    (score,) = [s for s in found.scores if s.name == "val/accuracy"]
    values = {name: [last(runs[f"{name}{k}"])["final/val/accuracy"] for k in ("", "1")] for name in ("plain", "slow")}
    assert score.values == pytest.approx((np.mean(values["plain"]), np.mean(values["slow"])))
    expected = stats.ttest_ind(values["slow"], values["plain"], equal_var=False).confidence_interval(0.95)
    assert (score.seeds.low, score.seeds.high) == pytest.approx((expected.low, expected.high))
    hits = [
        np.mean([rows(store, runs[f"{name}{k}"], "final", tmp_path) for k in ("", "1")], 0)
        for name in ("plain", "slow")
    ]
    assert (score.low, score.high) == pytest.approx(span(tuple(hits)))
    both = score.high < 0 and score.seeds.high < 0
    assert score.verdict == ("worse" if both else "not decided")
    assert "CI over repeats" in compare_report.text(found) and "2 repeats" in compare_report.text(found)


def test_a_sweep_is_no_side(trained, monkeypatch):
    store, runs = trained
    sweep = parent(store, [runs["plain"], runs["slow"]], "trial")
    store.client().set_tag(sweep.info().run_id, "trainkit.best", runs["plain"].name)
    said = ask(store, monkeypatch, sweep.name, runs["slow"].name, code=2)
    assert (
        f"run {sweep.name}: is the parent run of a sweep" in said
        and f"its best child run is {runs['plain'].name}" in said
    )


@pytest.mark.slow
def test_cross_validations_are_compared_on_every_sample_once(trained):
    store, _ = trained
    words = ("data.name=folded", "data.samples=66", "data.noise=2.5", "data.folds=2")
    words += ("evaluations={held_out: {batch_size: 8}, val: {batch_size: 8}}", "best.metric=held_out/accuracy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINKIT_STORE", str(store.home))
        for more in ((), ("optim.lr=0.0001",)):
            run(*words, *more, folds=True)
        one, other = [folder for folder in Store.locate().runs() if folder.info().recipe == "toy-folds"]
    found = compare(store, [one, other])
    assert found.primary.name == "pooled/held_out/accuracy" and found.primary.units == "66 samples"
    assert found.same_data == {"held_out": True, "val": True}


# ---- Words for runs --------------------------------------------------------------------------------------------------


def test_last_and_best_are_runs(trained):
    store, runs = trained
    above = parent(store, [runs["plain"]])
    assert store.runs()[-1] == above and store.find("last") == runs["other"], (
        "nothing was trained in a run above others"
    )
    scores = {name: last(folder)["best/val/accuracy"] for name, folder in runs.items()}
    assert last(store.find("best"))["best/val/accuracy"] == max(scores.values())
    assert store.find("best", runs["slow"]) == store.find("best")
    runs["other"].update(experiment="elsewhere")
    try:
        with pytest.raises(UserError, match=r"experiment 'elsewhere' has no primary metric"):
            store.find("best", runs["other"])
    finally:
        runs["other"].update(experiment="toy")
    assert comparing.resolve(store, ["best", runs["slow"].name]) == [store.find("best"), runs["slow"]]
    assert comparing.resolve(store, [runs["slow"].info().run_id, runs["plain"].name]) == [runs["slow"], runs["plain"]]


def test_words_that_do_not_name_two_runs_give_one_message(trained, monkeypatch, store):
    empty, (kept, runs) = Store.locate(), trained
    assert empty.home == store
    said = ask(kept, monkeypatch, runs["slow"].name, code=2)
    assert "takes 2 values" in said and "Traceback" not in said
    assert "are both" in ask(kept, monkeypatch, runs["slow"].name, runs["slow"].info().run_id, code=2)
    assert runs["slow"].name in ask(kept, monkeypatch, runs["slow"].name[:-1] + "z", "last", code=2)
    assert "there are no runs yet" in ask(empty, monkeypatch, "some", "other", code=2)
    assert "no run in" in ask(empty, monkeypatch, "last", "best", code=2)


# ---- What is said and written ----------------------------------------------------------------------------------------


def test_the_terminal_says_what_changed_what_it_did_and_what_it_cost(trained, monkeypatch):
    store, runs = trained
    said = ask(store, monkeypatch, runs["plain"].name, runs["slow"].name)
    lines = [line.split() for line in said.splitlines()]
    assert ["A", runs["plain"].name] == lines[1][:2] and ["optim.lr", "0.05", "->", "0.0001"] in lines
    ends = [last(runs[name])["best/val/accuracy"] for name in ("plain", "slow")]
    (line,) = [line for line in lines if line[:2] == ["accuracy", "*"]]
    assert line[2:5] == [f"{ends[0]:.4f}", f"{ends[1]:.4f}", f"{ends[1] - ends[0]:+.4f}"]
    assert line[-2:] == ["significantly", "worse"]
    (speed,) = [line for line in lines if line[:1] == ["speed/samples_per_s"]]
    assert float(speed[3]) == pytest.approx(float(speed[2]) / float(speed[1]), abs=0.02)
    assert "\nverdict  B is significantly worse than A on best/val/accuracy: -0." in said and "between seeds" in said


def test_step_times_are_medians_over_steps_not_over_windows():
    def measured(name: str, *windows: tuple[int, float]) -> float:
        points = [Point(step, value, 0) for step, value in windows]
        return comparing._measured(SimpleNamespace(metrics=[{name: points}]))[name]

    # Ten windows of 10 steps before the machine was busy, three of 100 after it.
    short = [(10 * k, 46.0) for k in range(1, 11)]
    long = [(100 + 100 * k, 76.0) for k in range(1, 4)]
    assert measured("speed/step_ms_p50", *short, *long) == 76.0
    assert measured("speed/step_ms_p99", *short, (150, 76.0)) == 46.0
    assert measured("speed/step_ms_p50", (10, 1.0), (20, 2.0), (30, 3.0), (40, 4.0)) == 2.5
    assert measured("speed/peak_memory_gb", (10, 1.0), (20, 4.0), (500, 3.0)) == 4.0


def test_what_ended_at_its_best_is_shown_once(trained):
    store, runs = trained
    pair = compare(store, [runs["plain"], runs["slow"]])
    best, plain = ([s for s in pair.scores if s.evaluation == name] for name in ("best/val", "val"))
    same = [comparing.replace(score, values=best[0].values) for score in plain]
    assert [name for name, _ in compare_report.by_evaluation([*same, *best])] == ["best/val"]
    other = [comparing.replace(score, values=(0.1, 0.2)) for score in plain]
    assert [name for name, _ in compare_report.by_evaluation([*other, *best])] == ["best/val", "val"]


# ---- What is kept to be compared -------------------------------------------------------------------------------------


def test_rows_of_averaged_weights_are_kept_where_the_best_is_chosen_by_them():
    scored = {name: Scores({}, {"of": [name]}) for name in ("val", "val/ema")}
    for metric, words in (("val/ema/top1", {"val", "val_ema"}), ("val/top1", {"val"}), ("lfw/ema/auc", {"val"})):
        kept = best.kept_rows(SimpleNamespace(best=SimpleNamespace(metric=metric)), "val", scored)
        assert set(kept) == words and all(rows == {"of": [word.replace("_", "/")]} for word, rows in kept.items())
    assert set(best.kept_rows(SimpleNamespace(best=None), "val", scored)) == {"val"}
