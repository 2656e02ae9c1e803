"""Trivial baselines of a run: computed once, beside its scores, within their time; and what is said of a bad score."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs import ROOT, overrides, run, stripes

from trainkit.analysis import baselines, frozen_baseline
from trainkit.analysis.baselines import BUDGET_S, _Budget, _LeftOut
from trainkit.config import loader
from trainkit.distributed.stop_signal import Stop
from trainkit.evaluation_protocols import Classes
from trainkit.interfaces import Baseline, Scores
from trainkit.tracking.store import Store

RECIPE = ROOT / "recipes" / "convnext.yaml"


class Numbers:
    """A split whose samples are their index."""

    at_once = None
    digest = "0" * 64

    def __init__(self, name, size):
        self.name, self.size, self.read = name, size, []
        self.protocol = Classes(np.arange(size) % 2, ("even", "odd"))

    def fetch(self, indices, epoch, view=None):
        self.read += indices.tolist()
        return {"image": torch.from_numpy(indices)[:, None].float(), "index": torch.from_numpy(indices)}

    def on_device(self, batch):
        return {**batch, "image": batch["image"] / 10}


class Task:
    """A task whose score is the mean of what was predicted."""

    def score(self, rows, split):
        assert len(rows["found"]) == split.size
        value = float(rows["found"].mean())
        return Scores(
            {"mean": value, "ece": 1.0}, {"id": [f"s{i}" for i in range(split.size)], "value": rows["found"].numpy()}
        )


def ends_with(value):
    """A baseline that adds `value` to each sample; it learns how many training samples there are."""

    def fit(batches):
        known = sum(len(batch["index"]) for batch in batches)
        return lambda batch: {"found": batch["image"][:, 0] + value + known}

    return Baseline("a sum", fit, lacks=("ece",))


def budget(seconds=1000.0, batch_size=4, stop=None):
    return _Budget(time.monotonic() + seconds, batch_size, stop or Stop())


def test_scores_are_those_of_all_samples():
    train = Numbers("train", 9)
    found = baselines.compute(Task(), ends_with(0.0), Numbers("val", 10), train, budget())
    assert found.metrics == {"mean": pytest.approx(0.45 + 9)} and found.title == "a sum"
    assert sorted(train.read) == list(range(9)) and found.rows["id"].tolist() == [f"s{i}" for i in range(10)]
    assert found.rows["value"].dtype == np.float32


def slow(split, now):
    """Let every reading take a second of a clock that nothing else moves."""
    fetch = split.fetch

    def fetch_slowly(indices, epoch):
        now[0] += 1.0
        return fetch(indices, epoch)

    split.fetch = fetch_slowly


def test_of_a_training_set_that_is_too_large_a_part_is_read_and_that_is_said(monkeypatch):
    train, now = Numbers("train", 1000), [0.0]
    monkeypatch.setattr(baselines.time, "monotonic", lambda: now[0])
    slow(train, now)
    found = baselines.compute(Task(), ends_with(0.0), Numbers("val", 10), train, _Budget(40.0, 4, Stop()))
    # A quarter of 40 s, and the batch that is read when it is over.
    assert found.learned == "44 of 1,000 training samples" and len(set(train.read)) == 44
    assert max(train.read) > 500, "spread over the set"


def test_what_takes_too_long_is_left_out_and_a_stop_too(monkeypatch):
    val, now = Numbers("val", 100), [0.0]
    monkeypatch.setattr(baselines.time, "monotonic", lambda: now[0])
    slow(val, now)
    with pytest.raises(_LeftOut, match="predicting val takes about 25 s"):
        baselines.compute(Task(), ends_with(0.0), val, None, _Budget(now[0] + 20.0, 4, Stop()))
    stop = Stop()
    stop.told = True
    with pytest.raises(_LeftOut, match="received a signal to stop"):
        baselines.compute(Task(), ends_with(0.0), val, None, budget(stop=stop))
    monkeypatch.setattr(baselines, "MOST_BYTES", 300)
    with pytest.raises(_LeftOut, match="predictions for val take"):
        baselines.compute(Task(), ends_with(0.0), val, None, budget(now[0] + 1000.0))


def test_a_baseline_that_sees_no_sample_reads_none():
    val = Numbers("val", 10)
    seen = Baseline("index", lambda _: lambda batch: {"found": batch["index"].float()}, sees="index")
    assert baselines.compute(Task(), seen, val, None, budget()).metrics["mean"] == 4.5 and not val.read
    raw = Baseline("raw", lambda _: lambda batch: {"found": batch["image"][:, 0]}, sees="fetched")
    assert baselines.compute(Task(), raw, val, None, budget()).metrics["mean"] == 4.5 and val.read


def judged(right, base_right, metric="val/top1", step=7, mode="max"):
    """The warning for a run whose best evaluation has so many images right."""
    from trainkit.metrics.classification import score_classes

    def scores(which):
        logits = np.where(np.asarray(which)[:, None], [2.0, 0, 0], [0, 2.0, 0])
        return score_classes(logits, Classes(np.zeros(len(which), np.int64), ("a", "b", "c")))

    own, base = scores(right), scores(base_right)
    name = metric.rpartition("/")[2]
    recipe = loader.load(RECIPE, [f"best={{metric: {metric}, mode: {mode}}}"])
    found = baselines.Comparison("val", metric, [baselines.Scored("1-NN", base.metrics, baselines.columns(base.rows))])
    found.scored.append(baselines.Scored("worse", {name: base.metrics[name] + (1 if mode == "min" else -1)}, {}))
    state = SimpleNamespace(best=[{"value": own.metrics[name], "step": 7}], final={})
    baselines._judge(found, recipe, SimpleNamespace(leading=(step, own.rows), rows={}), state)
    assert found.scored[0].name == "1-NN"
    return found.warning


def test_a_score_that_is_not_significantly_better_is_said_with_what_to_change():
    base = np.arange(200) % 2 == 0
    little = base.copy()
    little[:10] = ~base[:10]
    little[1:14:2] = True
    much = base | (np.arange(200) % 5 == 1)
    said = judged(little, base)
    assert said.startswith(
        "val/top1 0.51 is not significantly above the trivial baseline 0.5 (1-NN, 95 % CI of the difference "
    )
    assert said.endswith("train longer (train.length is 20 epochs), or start from pretrained weights")
    assert judged(base[::-1] & base, base).startswith("val/top1 0 is not above the trivial baseline 0.5 (1-NN")
    tuned = loader.load(RECIPE, ["task.net.weights=a.safetensors"])
    assert baselines._remedy(tuned) == "train longer (train.length is 20 epochs)", "it starts from weights"
    probe = loader.load(RECIPE, ["task.net.weights=a.safetensors", "train.length=0 steps"])
    assert "cp --start fine-tune" in baselines._remedy(probe)
    assert judged(much, base) == ""
    assert "not significantly" in judged(much, base, step=3), "rows of another evaluation: not paired"
    assert judged(much, base, "val/nll", mode="min") == ""
    assert "val/nll 1.24 is not below" in judged(base, much, "val/nll", mode="min")


def test_without_a_best_score_the_first_headline_score_is_compared():
    recipe = loader.load(RECIPE, ["best=null"])
    splits = {"pictures": SimpleNamespace(protocol=object()), "val": Numbers("val", 4)}
    found = baselines._primary(recipe, splits)
    assert (found.evaluation, found.metric) == ("val", "val/accuracy")
    assert baselines._primary(recipe, {"mine": SimpleNamespace(protocol=None)}) is None


def words(pictures, **changes):
    settings = {
        "data.train": f"{pictures}/train",
        "data.evaluate": f"{{val: {pictures}/val}}",
        "task.net": "{model: test_convnext3, args: {patch_size: 2}}",
        "train": "{length: 2 steps, batch_size: 6}",
        "evaluations": "{val: {every: 1 steps}}",
        "best": "{metric: val/top1}",
        "log.ceilings": "off",
    }
    return overrides(settings, changes)


@pytest.fixture
def pictures(tmp_path):
    stripes(tmp_path / "train", 10, 0)
    stripes(tmp_path / "val", 9, 1)
    return tmp_path


def test_a_run_ends_with_its_baselines(store, pictures, cache, capsys, monkeypatch):
    monkeypatch.setattr(baselines, "BUDGET_S", 1000.0)  # whatever the pace of the machine
    first = run(*words(pictures), recipe=RECIPE)
    said = capsys.readouterr().out
    assert first.code == 0 and "baseline: 1-NN on pixels" in said and "baseline: majority class" in said
    names = {name for name in first.history.metrics if name.startswith("baseline/")}
    assert names == {"baseline/val/top1"}
    client = Store.locate().client()
    found = client.get_run(first.folder.info().run_id)
    assert found.data.metrics["baseline/val/top1"] == first.series("baseline/val/top1")[-1] >= 1 / 3
    assert {"baselines.csv"} <= {
        file.path.rpartition("/")[2] for file in client.list_artifacts(found.info.run_id, "tables")
    }
    # Two steps from random weights: the run is not better than a constant.
    assert found.data.tags["trainkit.verdict"].startswith("baseline: val/top1 ")
    assert found.data.tags["mlflow.note.content"].startswith("val/top1")
    why = next(line for line in said.splitlines() if line.startswith("Warning: "))
    assert "above the trivial baseline" in why


def test_a_recipe_that_wants_none_has_none():
    recipe = loader.load(RECIPE, ["log.baseline=false"])
    trainer = SimpleNamespace(evaluator=SimpleNamespace(splits={"val": Numbers("val", 4)}))
    assert baselines.compare(recipe, trainer, Stop()) is None


def test_a_baseline_that_fails_ends_no_run(store, pictures, cache, capsys, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("of a test")

    monkeypatch.setattr(baselines, "compute", fail)
    monkeypatch.setattr(frozen_baseline, "of", fail)
    ran = run(*words(pictures), recipe=RECIPE)
    said = capsys.readouterr().out
    assert ran.code == 0 and ran.folder.info().status == "FINISHED"
    assert "trivial baseline, 1-NN on pixels: ZeroDivisionError: of a test" in said
    assert "frozen network: ZeroDivisionError: of a test" in said


KNOWN = [
    ("convnext_cifar10", "test", "1-NN on pixels", {"top1": 0.345}),
    ("face_teacher_lfw", "lfw", "pixels", {"accuracy": 0.635}),
    ("omniglot", "unseen", "pixels", {"recall_at_1": 0.484, "map_at_r": 0.098}),
    ("hippocampus", "val", "mean label map", {"dice.anterior": 0.752, "dice.posterior": 0.691}),
    ("camvid", "val", "most frequent class per position", {"miou": 0.167}),
]
"""As they stand in docs/project/results/ and in the recipes."""


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "name", "baseline", "values"), KNOWN, ids=[one[0] for one in KNOWN])
def test_baselines_of_real_data_have_the_known_values(recipe, name, baseline, values, shared, cache, monkeypatch):
    monkeypatch.setenv("TRAINKIT_DATA", str(shared))
    loaded = loader.load(ROOT / "recipes" / f"{recipe}.yaml")
    data = loaded.data.open(loaded.seed)
    loaded.task.build(data.meta, {}, loaded.seed)
    split, train = data.evaluations[name], data.evaluations.get("train")
    one = next(one for one in loaded.task.baselines(split, train) if one.name == baseline)
    began = time.process_time()
    found = baselines.compute(loaded.task, one, split, train, budget(1e6, 256))
    assert not found.learned and time.process_time() - began < BUDGET_S
    assert {key: found.metrics[key] for key in values} == {key: pytest.approx(v, abs=6e-4) for key, v in values.items()}
    assert not math.isnan(found.metrics[next(iter(values))])
