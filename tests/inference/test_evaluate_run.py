"""Trained weights scored again: the run's own scores on its data, others on other data, kept beneath the run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyarrow import parquet
from runs import PLUGIN, ROOT, TOY, own_store, run, stripes
from untrained_runs import made

from trainkit.cli import main
from trainkit.config.run_request import RunRequest
from trainkit.errors import UserError
from trainkit.inference import evaluate_run
from trainkit.tracking import journal
from trainkit.tracking.store import Store
from trainkit.training.best import best_weights

CONVNEXT = ROOT / "recipes" / "convnext.yaml"


@pytest.fixture(scope="module")
def whole(tmp_path_factory, database):
    """A run of the toy recipe, whose checkpoints are all kept, in a store of its own."""
    with own_store(tmp_path_factory.mktemp("whole"), database):
        yield run("data.noise=2.5")


@pytest.fixture
def home(whole, monkeypatch):
    monkeypatch.syspath_prepend(PLUGIN)
    monkeypatch.setenv("TRAINKIT_STORE", str(whole.folder.path.parents[1]))
    return whole.folder.path.parents[1]


def ask(*words: str) -> str:
    result = CliRunner().invoke(main.main, ["evaluate", *words, "--plugin", "toy"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def scored(whole) -> dict[int, float]:
    """The run's own scores, by step."""
    return dict(zip(*whole.history.series("val/accuracy"), strict=True))


def best_step(whole) -> int:
    return int(best_weights(whole.folder.path).parent.name.removeprefix("step-"))


def test_a_run_scores_as_it_did_and_the_scores_are_a_run_beneath_it(whole, home):
    before = {folder.name for folder in Store.locate().runs()}
    said = ask(whole.folder.name)
    step = best_step(whole)
    assert ["val/accuracy", f"{scored(whole)[step]:.4f}"] in map(str.split, said.splitlines())
    (folder,) = [folder for folder in Store.locate().runs() if folder.name not in before]
    info = folder.info()
    assert folder.name.startswith("evaluate-toy-s0-") and info.status == "FINISHED"
    assert info.parent == whole.folder.name and info.experiment == whole.folder.info().experiment
    assert f"run {folder.name}: " in said
    kept = Store.locate().client().get_run(info.run_id)
    assert kept.data.tags["mlflow.parentRunId"] == whole.folder.info().run_id
    assert kept.data.tags["trainkit.evaluates"] == whole.folder.name
    assert kept.data.tags["trainkit.weights"] == f"step-{step:09d}/model.safetensors"
    assert kept.data.tags["trainkit.data.val"] == "val-37-2.5"
    assert kept.data.metrics["final/val/accuracy"] == pytest.approx(scored(whole)[step], rel=1e-5)
    assert journal.read(folder.journal).series("val/accuracy") == ([step], [scored(whole)[step]])
    (file,) = [path for path in home.rglob("rows/val_final.parquet") if info.run_id in str(path)]
    assert parquet.read_table(file).num_rows == 37
    assert not Store.locate().newest_unfinished("evaluate-toy")


def test_the_view_of_the_experiment_keeps_its_scores(whole, home):
    client = Store.locate().client()
    tags = client.get_experiment_by_name(whole.folder.info().experiment).tags
    ask(whole.folder.name, "evaluations={again: {split: val}}")
    assert client.get_experiment_by_name(whole.folder.info().experiment).tags == tags


def test_other_data_and_evaluations_are_scored_with_the_same_weights(whole, home):
    request = RunRequest(
        TOY, ("data.noise=2.5", "data.test=21", "evaluations={other: {split: val, batch_size: 4}}"), ("toy",)
    )
    found = evaluate_run.evaluate(request, whole.folder.name)
    hits = 21 * found["other/accuracy"]
    assert found.keys() == {"other/accuracy"} and hits == pytest.approx(round(hits), abs=1e-4)
    newest = Store.locate().runs()[-1]
    assert journal.read(newest.journal).series("eval/other/unique_samples")[1] == [21.0]


def test_every_checkpoint_scores_what_the_run_wrote_down(whole, home):
    seen = set()
    for folder in sorted(whole.folder.checkpoints.iterdir()):
        step = int(folder.name.removeprefix("step-"))
        if step in scored(whole):
            request = evaluate_run.request_for(str(folder), None, (), ("toy",))
            found = evaluate_run.evaluate(request, str(folder), log=False)
            assert found["val/accuracy"] == scored(whole)[step]
            averaged = dict(zip(*whole.history.series("val/ema/accuracy"), strict=True))
            found = evaluate_run.evaluate(request, str(folder / "ema.safetensors"), log=False)
            assert found["val/accuracy"] == averaged[step]
            seen.add(found["val/accuracy"])
    assert len(seen) > 1, "all score alike: any checkpoint would agree"


def test_without_log_no_run_is_started(whole, home):
    before = len(Store.locate().runs())
    assert "val/accuracy " in ask(whole.folder.name, "--no-log") and len(Store.locate().runs()) == before


def test_weights_without_a_run_need_a_recipe(whole, home, tmp_path):
    file = tmp_path / "weights.safetensors"
    shutil.copy(best_weights(whole.folder.path), file)
    with pytest.raises(UserError, match="weights of an unknown run; expected a recipe with task"):
        evaluate_run.request_for(str(file), None, (), ("toy",))
    said = ask(str(file), str(TOY), "data.noise=2.5")
    score, ran = scored(whole)[best_step(whole)], Store.locate().runs()[-1]
    assert ["val/accuracy", f"{score:.4f}"] in map(str.split, said.splitlines())
    assert ran.info().parent is None and journal.read(ran.journal).series("val/accuracy")[1] == [score]


def test_score_of_run_is_the_same_command(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "trainkit.inference.evaluate_run.evaluate", lambda request, word: asked.append((request.path, word))
    )
    words = ["run", str(TOY), "--plugin", "toy", "--score", "some-run"]
    assert CliRunner().invoke(main.main, words, catch_exceptions=False).exit_code == 0
    assert asked == [(TOY, "some-run")]


def test_mistakes_are_said(whole, home, tmp_path):
    name = whole.folder.name
    with pytest.raises(UserError, match="no evaluations; expected one or more"):
        evaluate_run.evaluate(RunRequest(TOY, ("evaluations={}",), ("toy",)), name)
    with pytest.raises(UserError, match=r"run 'nosuch': not in .*nearest are "):
        evaluate_run.evaluate(RunRequest(TOY, (), ("toy",)), "nosuch")
    with pytest.raises(UserError, match=r"evaluations\.val: the data has no evaluation set 'nosuch'"):
        evaluate_run.evaluate(RunRequest(TOY, ("evaluations={val: {split: nosuch}}",), ("toy",)), name)
    with pytest.raises(UserError, match=r"a folder without state\.json; expected a run, a checkpoint"):
        evaluate_run.find(str(tmp_path), Store.locate())
    best = best_weights(whole.folder.path).parent
    copy = Path(shutil.copytree(best, tmp_path / best.name))
    weights = copy / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=rf"^{weights}: .*; name another checkpoint"):
        evaluate_run.find(str(copy), Store.locate())


def test_data_of_other_classes_are_refused_and_searched_where_that_is_asked(cache, tmp_path):
    stripes(tmp_path / "train", 4, 0)
    stripes(tmp_path / "val", 3, 1)
    settings = ["task.net={model: test_convnext3, args: {patch_size: 2}}", "train.batch_size=4"]
    mine = made(CONVNEXT, f"data.train={tmp_path}/train", f"data.evaluate={{val: {tmp_path}/val}}", *settings)
    for part in ("train", "val"):
        shutil.copytree(tmp_path / part, tmp_path / "other" / part)
        (tmp_path / "other" / part / "down").rename(tmp_path / "other" / part / "up")
    other = (f"data.train={tmp_path}/other/train", f"data.evaluate={{val: {tmp_path}/other/val}}")
    said = r"evaluations\.val: classes across, slanted, up; expected the classes that .* was trained on: across, down"
    with pytest.raises(UserError, match=said):
        evaluate_run.evaluate(RunRequest(mine.folder.recipe, other), mine.name, log=False)
    searched = "evaluations={found: {split: val.retrieval}}"
    found = evaluate_run.evaluate(RunRequest(mine.folder.recipe, (*other, searched)), mine.name, log=False)
    assert 0 <= found["found/recall_at_1"] <= 1
    own = evaluate_run.evaluate(RunRequest(mine.folder.recipe), mine.name, log=False)
    assert 0 <= own["val/top1"] <= 1
