"""The loop: what it computes, what it leaves unchanged, and what it refuses."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from runs import TOY, newest, run, stop_after

from trainkit.analysis import run_summary
from trainkit.data.loader import stream
from trainkit.errors import UserError
from trainkit.tracking.store import Store
from trainkit.training.best import best_weights

pytestmark = pytest.mark.usefixtures("store", "unsent")


def same(a, b) -> bool:
    """Whether two groups of checkpoint tensors hold the same bits."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def all_same(a, b) -> bool:
    return a.tensors.keys() == b.tensors.keys() and all(same(a.tensors[g], b.tensors[g]) for g in a.tensors)


@pytest.fixture(scope="module")
def reference(tmp_path_factory, database):
    """The toy recipe, run to its end without an interruption."""
    import os
    import shutil

    home = tmp_path_factory.mktemp("reference")
    shutil.copy(database, home / "mlflow.db")
    before, os.environ["TRAINKIT_STORE"] = os.environ.get("TRAINKIT_STORE"), str(home)
    try:
        return run()
    finally:
        os.environ["TRAINKIT_STORE"] = before or ""


def test_training_starts_at_chance_and_learns():
    ran = run("train.length=12 epochs", "log.every=1 steps", "task.dropout=0.0", "data.noise=0.5")
    loss = ran.series("train/loss")
    assert ran.code == 0 and loss[0] == pytest.approx(math.log(4), rel=0.35) and loss[-1] < 0.25 * loss[0]
    assert ran.series("val/accuracy")[-1] > 0.8
    assert ran.folder.info().status == "FINISHED"


def test_accumulation_computes_what_one_large_batch_does():
    alike = ["task.norm=false", "task.dropout=0.0", "evaluations={}", "best=null"]
    whole, cut = (run(*alike, f"train.micro_batch={m}").last.tensors["model"] for m in (16, 4))
    for name in whole:
        torch.testing.assert_close(whole[name], cut[name], rtol=1e-5, atol=1e-6)


def test_a_weight_that_only_the_device_knows_gives_the_same_update():
    alike = ["task.norm=false", "evaluations={}", "best=null"]
    host, device = (run(*alike, f"task.tensor_weight={w}").last.tensors["model"] for w in ("false", "true"))
    for name in host:
        torch.testing.assert_close(host[name], device[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "step", [pytest.param(1, marks=pytest.mark.slow), 4, 5, pytest.param(7, marks=pytest.mark.slow), 11]
)
def test_an_interrupted_and_resumed_run_has_the_bits_and_the_history_of_an_uninterrupted_one(reference, step):
    """Mid-epoch, at an epoch's end (4), at a checkpoint (5), one step before the end; batch norm, dropout, average."""
    first = run(stopping=stop_after(step))
    assert first.code == 143 and first.folder.info().status == "KILLED" and first.last.step == step
    ran = run(resume="")
    assert ran.folder == first.folder and ran.code == 0
    assert all_same(ran.last, reference.last)
    assert ran.repeatable == reference.repeatable
    assert not ran.events("nondeterminism")


def test_evaluations_due_at_one_step_are_all_in_the_history_of_a_run_stopped_there():
    """The first of them leads and asks for a checkpoint; the second must be in it."""
    two = "evaluations={val: {every: 3 steps, batch_size: 8}, more: {split: val, every: 3 steps, batch_size: 8}}"
    whole = run(two)
    first = run(two, stopping=stop_after(3))
    assert first.last.step == 3
    assert run(two, resume="").repeatable == whole.repeatable


def test_a_run_that_lost_its_newest_checkpoint_resumes_from_the_one_before(reference):
    first = run(stopping=stop_after(7))
    file = sorted(first.folder.checkpoints.glob("step-*"))[-1] / "model.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-3] ^= 1
    file.write_bytes(damaged)
    ran = run(resume=first.folder.name)
    assert all_same(ran.last, reference.last) and ran.repeatable == reference.repeatable


def test_workers_give_the_same_bits_also_after_an_interruption(reference):
    run("loader.workers=2", stopping=stop_after(6))
    assert all_same(run("loader.workers=2", resume="").last, reference.last)


def test_evaluations_logs_and_checkpoints_change_no_bit_of_training(reference):
    bare = run("evaluations={}", "best=null", "log.every=100 steps", "checkpoints.every=null")
    assert same(bare.last.tensors["model"], reference.last.tensors["model"])
    assert same(bare.last.tensors["optimizer"], reference.last.tensors["optimizer"])
    assert same(bare.last.tensors["ema"], reference.last.tensors["ema"])
    assert bare.repeatable["train/loss"][-1][0] == 12 and "val/accuracy" not in bare.repeatable


@pytest.mark.slow
def test_evaluations_do_not_move_the_speed_meter():
    """The meter of the first guide counted them: 930 samples/s became 170 in the window of an evaluation."""
    common = ["train.length=6 epochs", "log.every=4 steps", "evaluations.val.every=4 steps", "train.ema=null"]
    quick, slow = run(*common), run(*common, "task.slow_score=0.2")
    assert slow.series("time/eval_val_s")[2] > 0.2
    assert slow.series("time/eval_share")[4] > 0.5, "the evaluations are most of the time"
    one, other = (sorted(ran.series("speed/samples_per_s"))[3] for ran in (quick, slow))
    # If the meter counted evaluations, 4 steps of a few ms beside 200 ms would show as a tenth of the rate or less.
    assert other > 0.4 * one


def test_every_sample_counts_exactly_once(reference):
    assert set(reference.series("eval/val/unique_samples")) == {37.0}


def test_a_teacher_that_does_not_beat_chance_ends_the_run_before_step_1():
    with pytest.raises(UserError, match=r"val/accuracy is 0\.\d+, no better than guessing"):
        run("task.teacher=constant")


@pytest.mark.parametrize(("size", "asked", "at_once"), [(5, 8, None), (9, 4, None), (7, 8, 1), (1, 3, None)])
def test_batches_of_an_evaluation_are_of_one_size_whatever_the_number_of_processes(size, asked, at_once):
    split = SimpleNamespace(size=size, at_once=at_once)
    sizes = set()
    for world in (1, 2, 3):
        seen = []
        for rank in range(world):
            for rows, real in stream.every_sample(split, asked, world, rank):
                sizes.add(len(rows))
                seen += rows[real].tolist()
        assert sorted(seen) == list(range(size))
    assert len(sizes) == 1 and sizes.pop() <= (at_once or asked)


def test_a_run_that_ended_at_such_an_update_goes_on_without_it_where_it_is_asked_to():
    words = ("task.nan_at=6", "train.nonfinite=skip")
    whole = run(*words)
    with pytest.raises(UserError, match=r"step 6: .*not finite.*--resume train\.nonfinite=skip"):
        run(words[0])
    ended = newest()
    assert ended != whole.folder and ended.info().status == "FAILED"
    ran = run(*words, resume="")
    assert ran.folder == ended and all_same(ran.last, whole.last) and ran.repeatable == whole.repeatable


@pytest.mark.usefixtures("sent")
def test_a_model_has_the_step_and_the_scores_of_its_own_weights():
    ran = run(
        "checkpoints={every: 5 steps, at_end: false, keep_last: 50}", "best=null", "evaluations.val.every=5 steps"
    )
    made = json.loads((ran.folder.path / "models.json").read_text())
    assert ran.steps == [5, 10] and list(made) == ["last@10"], "after the last update none was written"
    model = Store.locate().client().get_logged_model(made["last@10"])
    assert {(metric.key, metric.step) for metric in model.metrics} == {("val/accuracy", 10), ("val/ema/accuracy", 10)}


@pytest.mark.usefixtures("sent")
def test_a_model_has_scores_that_were_logged_a_moment_before(monkeypatch):
    write = run_summary.write

    def scored(logger, outcome, *more):
        logger.tracker.log(outcome.step, {"val/late": 0.5})
        outcome.final["val/late"] = 0.5
        write(logger, outcome, *more)

    monkeypatch.setattr(run_summary, "write", scored)
    made = json.loads((run("log.metrics=all").folder.path / "models.json").read_text())
    (last,) = (key for key in made if key.startswith("last@"))
    model = Store.locate().client().get_logged_model(made[last])
    assert "val/late" in {metric.key for metric in model.metrics}


def test_training_stops_early_when_the_metric_no_longer_improves():
    rule = "stop_when={metric: val/accuracy, patience: 2, min_delta: 2.0}"  # nothing improves by 2
    ran = run(rule, "evaluations.val.every=1 steps", "train.length=9 epochs")
    assert ran.code == 0 and ran.last.step == 3 and ran.events("stopped_early")


@pytest.mark.parametrize("step", [3, 5])
def test_patience_survives_an_interruption(step):
    rule = ["stop_when={metric: val/accuracy, patience: 4, min_delta: 2.0}", "evaluations.val.every=1 steps"]
    run(*rule, stopping=stop_after(step))
    assert run(*rule, resume="").last.step == 5


def test_the_best_evaluation_is_committed_even_where_a_checkpoint_of_that_step_was_written_before_it():
    late = "evaluations={val: {at_start: true, batch_size: 8}}"  # held once more, at the end
    ran = run(late, "checkpoints.every=12 steps", "train.ema=null", "data.noise=0.5", "train.length=6 epochs")
    assert ran.last.step == 24 and ran.last.state["best"][0]["step"] == 24


def test_the_k_best_are_kept():
    ran = run(
        "checkpoints={every: null, keep_last: 1, keep_best: 2}", "evaluations.val.every=1 steps", "train.ema=null"
    )
    best = {record["step"] for record in ran.last.state["best"]}
    assert len(best) == 2 and best <= set(ran.steps)


def test_a_metric_that_nobody_measures_is_named_before_training_goes_on():
    with pytest.raises(UserError, match="'val/top1', which is not measured"):
        run("best.metric=val/top1", "evaluations.val.at_start=true")


def test_a_finished_run_is_not_resumed(reference, monkeypatch):
    monkeypatch.setenv("TRAINKIT_STORE", str(reference.folder.path.parents[1]))
    with pytest.raises(UserError, match="is finished"):
        run(resume=reference.folder.name)


def test_an_evaluation_that_is_dear_is_held_less_often():
    long = ["train.length=20 epochs", "train.ema=null"]
    free = run(*long, "evaluations.val.every=4 steps")
    kept = run(*long, "evaluations.val={every: 4 steps, budget: 10%}", "task.slow_score=0.15")
    held = len(kept.series("val/accuracy"))
    assert len(free.series("val/accuracy")) == 20 and held < 20
    decisions = kept.events("gate")
    assert decisions and all(e.data["next"] % 4 == 0 for e in decisions), "the stretched gate keeps to its grid"


def test_decisions_that_hung_on_the_clock_are_repeated_after_an_interruption():
    timed = ["evaluations.val={every: 0.02 s}", "train.length=10 epochs", "checkpoints.every=10 steps"]
    first = run(*timed, stopping=stop_after(25))
    import shutil

    shutil.rmtree(sorted(first.folder.checkpoints.glob("step-*"))[-1])  # as if killed without a last checkpoint
    before = [(p.step, p.value) for p in first.history.metrics["val/accuracy"]]
    again = run(*timed, resume="")
    after = [(p.step, p.value) for p in again.history.metrics["val/accuracy"]]
    assert before and after[: len(before)] == before and not again.events("nondeterminism")


def test_a_run_that_computes_its_past_differently_says_so(monkeypatch):
    """Resumed from step 5: the line of step 6 was logged before, and a bit has been flipped since."""
    import toy

    cut = run(stopping=stop_after(7), recipe=TOY)
    for step in (6, 7):
        (cut.folder.checkpoints / f"step-{step:09d}").rename(cut.folder.path / f"aside-{step}")

    def loss(self, net, parts, batch, at, plain=toy.ToyTask.loss):
        if at.step == 5 and not hasattr(self, "done"):
            self.done = True
            net.conv.weight.data.view(torch.int32)[0, 0, 0, 0] ^= 1 << 22
        return plain(self, net, parts, batch, at)

    monkeypatch.setattr(toy.ToyTask, "loss", loss)
    resumed = run(resume="")
    assert resumed.code == 0 and {e.data["name"] for e in resumed.events("nondeterminism")} >= {"train/loss"}


def test_the_learning_rate_follows_the_curve():
    curve = "train.schedule={name: steps, at: [1 epoch, 2 epochs], gamma: 0.5, warmup: {over: 2 steps}}"
    ran = run(curve, "log.every=1 steps")
    assert ran.series("train/lr") == pytest.approx([0.025, 0.05, 0.05, 0.05, *[0.025] * 4, *[0.0125] * 4])


@pytest.mark.slow
def test_a_compiled_network_trains_alike_and_its_checkpoints_have_the_same_keys(reference):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ran = run("train.compile=default", "task.dropout=0.0", "train.length=8 steps", "evaluations.val.batch_size=16")
    # 37 samples in batches of 16 and a padded one: one graph to train with and one to evaluate with, and no third.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    plain = run("task.dropout=0.0", "train.length=8 steps")
    assert ran.last.tensors["model"].keys() == plain.last.tensors["model"].keys()
    for name, t in ran.last.tensors["model"].items():
        torch.testing.assert_close(t, plain.last.tensors["model"][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "words, message",
    [
        (["train.batch_size=96"], "96, but the data has 64 samples"),
        (["evaluations.test={}", "best=null"], "no evaluation set 'test'"),
        (["optim.groups=[{match: nothing*}]"], "matches no parameter"),
        (["best.metric=other/accuracy"], "there is no such evaluation"),
        (["train.precision=fp16"], "fp16 on a CPU"),
        (["train.micro_batch=5"], "not a multiple of micro_batch"),
        (["train.precision=fp8"], "fp8 without a GPU"),
    ],
)
def test_settings_that_cannot_be_are_refused(words, message):
    with pytest.raises(UserError, match=message):
        run(*words)


@pytest.mark.slow
def test_resuming_finishes_the_run_that_was_interrupted_although_it_was_one_that_is_needed_first(tmp_path):
    """The teacher of a student was cut off: it goes on, the student then begins, and stands above it in MLflow."""
    small = "task: {name: toy, needs_recipe: RECIPE}"
    text = TOY.read_text()
    (tmp_path / "first.yaml").write_text(text.replace("name: toy\n", "name: first\n", 1))
    (tmp_path / "toy.yaml").write_text(text.replace("task: {name: toy}", small.replace("RECIPE", "first.yaml")))
    first = run(recipe=tmp_path / "toy.yaml", stopping=stop_after(6))
    assert first.code == 143 and first.folder.info().recipe == "first" and first.folder.info().status == "KILLED"
    ran = run(recipe=tmp_path / "toy.yaml", resume="")
    assert ran.code == 0 and ran.folder.info().recipe == "toy" and first.folder.info().status == "FINISHED"
    from trainkit.tracking.store import Store

    child = Store.locate().client().get_run(first.folder.info().run_id)
    assert child.data.tags["mlflow.parentRunId"] == ran.folder.info().run_id
    again = run("seed=1", recipe=tmp_path / "toy.yaml")
    assert again.code == 0 and len(Store.locate().runs()) == 3, "the finished one is used again"


def test_a_changed_recipe_is_not_resumed():
    first = run(stopping=stop_after(3))
    for word in ("", first.folder.name):
        with pytest.raises(
            UserError, match=rf"{first.folder.name}: began with another recipe; .*\n  optim.lr  0.05 -> 0.01$"
        ):
            run("optim.lr=0.01", resume=word)


def test_resume_or_start_serves_the_first_time_and_every_other(capsys):
    begun = run(resume="", or_start=True, stopping=stop_after(3))
    assert begun.code == 143
    again = run(resume="", or_start=True)
    assert again.code == 0 and again.folder == begun.folder and again.folder.info().status == "FINISHED"
    capsys.readouterr()
    written = {path: path.stat().st_mtime_ns for path in again.folder.path.rglob("*")}
    done = run(resume="", or_start=True)
    said = "has already finished (same recipe, data and program); to train again, leave out --resume-or-start"
    assert done.code == 0 and capsys.readouterr().out == f"run {again.folder.name} {said}\n"
    assert done.folder == again.folder, "it is not trained again"
    assert {path: path.stat().st_mtime_ns for path in again.folder.path.rglob("*")} == written
    changed = run("seed=1", resume="", or_start=True, stopping=stop_after(3))
    assert changed.folder != again.folder, "a changed recipe starts a run of its own"
    anew = run(stopping=stop_after(3))
    assert anew.folder != again.folder and run(resume="", or_start=True).folder == anew.folder, (
        "one begun later goes on"
    )


@pytest.mark.parametrize("changed", ["data", "program"])
def test_resume_or_start_takes_no_run_of_other_data_or_another_program_for_its_own(changed):
    words = ("train.length=1 steps", "evaluations={}", "best=null")
    first = run(*words, resume="", or_start=True).folder
    if changed == "data":
        first.update(key="0" * 32)
    else:
        assert first.info().program.keys() == {"source of trainkit", "source of toy", "torch"}
        first.update(program={**first.info().program, "source of toy": "0" * 12})
    second = run(*words, resume="", or_start=True).folder
    assert second != first and second.info().status == "FINISHED"


@pytest.mark.slow
def test_seeds_are_begun_by_resume_or_start_and_trained_once():
    from trainkit.tracking.store import Store

    for _ in range(2):
        assert run("train.length=1 steps", resume="", or_start=True, seeds=2).code == 0
    assert [folder.info().recipe for folder in Store.locate().runs()].count("toy") == 2


def test_a_run_whose_best_is_a_score_of_the_average_hands_the_average_on():
    from trainkit.config.run_request import RunRequest
    from trainkit.inference import evaluate_run

    settings = ["best.metric=val/ema/accuracy", "data.noise=2.5", "evaluations.val.every=4 steps"]
    ran = run(*settings)
    file = best_weights(ran.folder.path)
    assert file.name == "ema.safetensors"
    step = int(file.parent.name.split("-")[1])
    averaged = dict(zip(*ran.history.series("val/ema/accuracy"), strict=True))
    assert averaged[step] == max(averaged.values())
    scored = evaluate_run.evaluate(RunRequest(TOY, settings, ("toy",)), ran.folder.name, log=False)
    assert scored["val/accuracy"] == averaged[step]
    own = dict(zip(*ran.history.series("val/accuracy"), strict=True))
    assert own[step] != averaged[step], "the two cannot be told apart here"


def test_an_evaluation_that_lost_a_sample_gives_no_score():
    with pytest.raises(RuntimeError, match="36 samples were evaluated, the set has 37"):
        run("data.lost_sample=true")
    assert newest().info().status == "FAILED"
