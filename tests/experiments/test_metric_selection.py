"""Metrics of a run that MLflow gets: patterns, the default, and that nothing else leaves the journal."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from runs import ROOT, run, stop_after

from trainkit.config.loader import load
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Classes, Inspection, Pairs, Scenes
from trainkit.experiments.metric_selection import _MEASURED, _TRAINING, MOST, selected
from trainkit.tracking.store import Store
from trainkit.tracking.sync import sync
from trainkit.tracking.upload import left, matcher

NUMBERS = np.zeros(4, dtype=np.int64)
PAIRS = Pairs(NUMBERS, NUMBERS, NUMBERS == 0)


def recipe(*words, name="convnext"):
    return load(ROOT / "recipes" / f"{name}.yaml", list(words))


def splits(**protocols):
    return {name: SimpleNamespace(protocol=protocol) for name, protocol in protocols.items()}


def shown(ran):
    """Names of the metrics that MLflow has of a run."""
    return set(Store.locate().client().get_run(ran.folder.info().run_id).data.metrics)


@pytest.mark.parametrize(
    "pattern, matches, others",
    [
        ("val/top1", ["val/top1"], ["val/top10", "a/val/top1", "val/top"]),
        ("val/*", ["val/top1", "val/ema/top1"], ["val/iou.road", "valid/top1"]),
        ("val/iou.*", ["val/iou.road"], ["val/iou", "val/boundary_f.road", "val/iouxroad"]),
        ("val/**", ["val/top1", "val/iou.road"], ["test/top1"]),
        ("*/iou.road", ["val/iou.road", "val/ema/iou.road"], ["val/iou.sky"]),
    ],
)
def test_a_star_stands_for_anything_without_a_dot_and_two_for_anything(pattern, matches, others):
    selects = matcher(["speed/x", pattern])
    assert [name for name in [*matches, *others] if selects(name)] == matches and selects("speed/x")


def test_without_patterns_everything_goes_to_mlflow():
    assert matcher(None)("at_best/val/iou.road") and not matcher([])("train/loss")


@pytest.mark.parametrize("ema", ["null", "0.99"])
@pytest.mark.parametrize("sets", [1, 2, 6, 12, 30])
def test_however_many_evaluations_there_are_40_metrics_are_the_most(sets, ema):
    words = [f"train.ema={ema}", "best={metric: set0/accuracy}", "evaluations={set0: {every: 1 epoch}}"]
    found = selected(recipe(*words), splits(**{f"set{n}": PAIRS for n in range(sets)}))
    scores = [name for name in found if name.startswith("set")]
    assert {"set0/accuracy", "best/set0/accuracy", "train/*"} <= set(found)
    assert _TRAINING + len(_MEASURED) + len(scores) + 1 <= MOST and len(set(found)) == len(found)
    # Of a score all evaluations have it or none, so that they can be compared; but for the one that decides.
    each = {score: sum(name.endswith(f"/{score}") for name in scores) for score in ("auc", "eer")}
    assert set(each.values()) <= {0, sets * (1 if ema == "null" else 2)}
    assert each["auc"] or sets > 6 or (sets == 6 and ema != "null")


def test_pictures_have_no_scores_in_mlflow_and_scores_of_a_plug_in_all_but_those_of_classes():
    pictures = Inspection(NUMBERS, ("a", "b"), ids=("1",) * 4)
    scenes = Scenes(("1",), ("a", "b"), kind="overlays")
    found = selected(
        recipe("log.metrics=[val/iou.*]"),
        splits(val=Classes(NUMBERS, ("a", "b", "c")), pictures=pictures, scenes=scenes, mine=SimpleNamespace()),
    )
    assert found[-1] == "val/iou.*"
    selects = matcher(found)
    assert selects("val/ema/top1") and selects("val/iou.road") and selects("mine/new") and selects("train/loss")
    no = ["pictures/hard_share", "scenes/miou", "mine/new.a", "at_best/val/top1", "final/val/top1", "device/step_ms"]
    assert not [name for name in no if selects(name)]
    assert selected(recipe("log.metrics=all"), {}) is None


@pytest.mark.parametrize("word", ['["val/iou[0]"]', '["Val/top1"]', '[""]', "some", "3"])
def test_what_no_metric_can_match_is_refused_before_anything_starts(word):
    with pytest.raises(UserError, match=r"log\.metrics|metrics has"):
        recipe(f"log.metrics={word}")


@pytest.mark.usefixtures("store")
def test_a_run_sends_the_default_and_lists_everything_in_a_table():
    ran = run()
    metrics, names = shown(ran), ran.history.metrics.keys()
    assert ran.code == 0 and {"train/loss", "val/accuracy", "best/val/accuracy", "speed/samples_per_s"} <= metrics
    assert len(metrics) <= MOST and len(names) > len(metrics)
    sent = {name for name in metrics if name.startswith(("final/", "at_best/", "eval/", "device/"))}
    assert sent == {"final/speed/samples_per_s"}, "the column of the run table"
    client = Store.locate().client()
    lines = Path(client.download_artifacts(ran.folder.info().run_id, "tables/metrics.csv")).read_text().splitlines()
    assert lines[0] == '"metric","last","at_best","step","values"'
    listed = {line.split(",")[0].strip('"') for line in lines[1:]}
    assert listed == {name for name in names if not name.startswith(("best/", "at_best/"))}


@pytest.mark.usefixtures("store")
def test_a_recipe_asks_for_more_or_for_all_and_a_resumed_run_sends_what_it_asks_for():
    asked = run('log.metrics=["final/val/*", "eval/**"]')
    assert {"final/val/accuracy", "eval/val/unique_samples", "train/loss"} <= shown(asked)
    assert "final/time/total_s" not in shown(asked)
    ran = run("seed=1", "log.metrics=all", stopping=stop_after(5))
    again = run("seed=1", "log.metrics=all", resume="")
    assert again.folder == ran.folder and shown(again) == set(again.history.metrics)


@pytest.mark.usefixtures("store")
def test_a_later_upload_sends_the_selection_too():
    ran = run()
    before = shown(ran)
    (done,) = sync(Store.locate(), [ran.folder], whole=True)
    points = [name for name, series in ran.history.metrics.items() for _ in series]
    selects = before.__contains__
    assert done.values == sum(map(selects, points)) and shown(ran) == before and left(ran.folder) == (0, 0)
