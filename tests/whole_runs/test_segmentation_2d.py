"""The recipes of scenes from end to end: crops, scores, processes, resumes, published layouts, mistakes."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
import scene_sets
from runs import ROOT, Ran, all_same, environment, evaluated, newest, overrides, own_store, run, spawn, stop_after

from trainkit.autoconfig import new_recipe
from trainkit.config.loader import ConfigError
from trainkit.errors import UserError

pytestmark = pytest.mark.usefixtures("store", "unsent")
SEGMENT = ROOT / "recipes" / "segment.yaml"


@pytest.fixture(scope="module")
def streets(tmp_path_factory):
    """Two sets of scenes, packed once for all tests of this file."""
    root = scene_sets.camvid(tmp_path_factory.mktemp("streets"), pictures=(10, 5), size=(40, 56))
    with environment(TRAINKIT_CACHE=tmp_path_factory.mktemp("cache")):
        yield root


def words(streets, **changes: str) -> list[str]:
    settings = {
        "data.train": f"{streets}#train",
        "data.evaluate": f"{{val: {streets}#val}}",
        "data.names": "[sky, road, tree, car]",
        "data.ignore": "[255]",
        "data.crop": "[32, 64]",
        "data.few": "2",
        "data.eval_scales": "[0.5, 1.0]",
        "task.net": "{name: bisenetv2, width: 0.125}",
        "task.points": "{points: 32, subdivide: 64, channels: 16, near: 0.5}",
        "task.objective": "{ohem: {}, dice: 0.5, lovasz: 0.5, near: {}}",
        "train": "{length: 12 steps, batch_size: 4, micro_batch: 2, ema: 0.9}",
        "evaluations": "{val: {every: 6 steps, batch_size: 2}, multi: {split: val.mscf, batch_size: 2}, "
        "images: {split: val.overlays, every: 12 steps}}",
    }
    return overrides(settings, changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, database, streets):
    """The run without an interruption, in a store of its own."""
    with own_store(tmp_path_factory.mktemp("whole"), database):
        yield run(*words(streets), recipe=SEGMENT)


@pytest.mark.slow
def test_each_evaluation_is_held_at_its_own_gate_and_counts_its_pictures(whole):
    steps = {name: [p.step for p in points] for name, points in whole.history.metrics.items()}
    assert steps["val/miou"] == steps["val/ema/boundary_f"] == [6, 12]
    assert steps["multi/iou.sky"] == steps["images/miou"] == [12]
    assert set(whole.series("eval/val/unique_samples")) == {5.0}
    assert set(whole.series("eval/images/unique_samples")) == {2.0}


def test_the_scores_are_those_of_the_table_of_pictures(whole):
    home = whole.folder.path.parents[1]
    (table,) = home.rglob("rows/val_final.parquet")
    rows = pq.read_table(table).to_pydict()
    hit, predicted, actual = (
        [sum(column) for column in zip(*rows[name], strict=True)] for name in ("intersection", "predicted", "actual")
    )
    iou = [h / (p + a - h) for h, p, a in zip(hit, predicted, actual, strict=True) if p + a]
    assert whole.series("val/miou")[-1] == pytest.approx(sum(iou) / len(iou), abs=1e-6)
    assert whole.series("val/pixel_accuracy")[-1] == pytest.approx(sum(hit) / sum(actual), abs=1e-6)


def test_overlays_and_the_confusion_are_where_mlflow_shows_them(whole):
    kept = {path.name for path in whole.folder.path.parents[1].rglob("images/*")}
    assert any("scenes" in name for name in kept)


def test_an_interrupted_run_resumes_to_the_bit(whole, streets):
    cut = run(*words(streets), recipe=SEGMENT, stopping=stop_after(7))
    assert cut.folder.info().status == "KILLED"
    resumed = run(*words(streets), recipe=SEGMENT, resume="")
    assert resumed.folder == cut.folder and resumed.last.step == 12
    assert all_same(resumed, whole) and resumed.repeatable == whole.repeatable


@pytest.mark.slow
def test_workers_change_no_bit(whole, streets):
    other = run(*words(streets), "loader.workers=2", recipe=SEGMENT)
    assert all_same(other, whole)


@pytest.mark.slow
def test_one_checkpoint_scores_identically_on_one_process_and_on_two(whole, streets, monkeypatch):
    monkeypatch.setenv("TRAINKIT_STORE", str(whole.folder.path.parents[1]))
    scored = [evaluated(n, str(SEGMENT), *words(streets), "--score", whole.folder.name) for n in (1, 2)]
    assert len(scored[0]) > 20 and scored[0] == scored[1]


def test_accumulation_says_what_batch_norm_sees(streets, capsys):
    run(*words(streets, train="{length: 1 steps, batch_size: 4, micro_batch: 2}", evaluations="{}", best="null"),
        recipe=SEGMENT)  # fmt: skip
    assert "batch norm sees 2 samples at once, not the 4 of a step" in capsys.readouterr().out
    run(*words(streets, train="{length: 1 steps, batch_size: 4, micro_batch: 2}", evaluations="{}", best="null",
               task__norm="{name: group, groups: 4}"), recipe=SEGMENT)  # fmt: skip
    assert "batch norm sees" not in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_with_shared_statistics_learn_what_one_does(tmp_path):
    """Cross-entropy alone, every pixel labelled, and V1: it has no dropout, which would differ by process.

    Small steps: images are few, and rounding would otherwise grow."""
    whole = scene_sets.camvid(tmp_path / "labelled", pictures=(8, 4), size=(64, 64), ignored=0)
    changes = {
        "task__net": "{name: bisenetv1}",
        "task__norm": "{name: sync}",
        "task__points": "null",
        "task__objective": "{}",
        "data__augment": "{}",
        "data__crop": "[64, 64]",
        "optim": "{name: sgd, lr: 1e-2, momentum: 0.9}",
        "train": "{length: 4 steps, batch_size: 4}",
        "log": "{every: 1 steps, system_every: null}",
        "evaluations": "{}",
        "best": "null",
    }
    losses = []
    for processes in (1, 2):
        done = spawn(processes, str(SEGMENT), *words(whole, **changes))
        assert done.returncode == 0, done.stderr[-2000:]
        losses.append(Ran(0, newest()).series("train/loss"))
    assert len(losses[0]) == 4 and losses[0] == pytest.approx(losses[1], rel=2e-3)


@pytest.mark.slow
def test_the_published_recipe_runs_on_two_processes_and_pictures_laid_out_as_published(tmp_path, monkeypatch):
    scene_sets.cityscapes(tmp_path / "cityscapes", pictures=6, size=(64, 128))
    monkeypatch.setenv("TRAINKIT_DATA", str(tmp_path))
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    small = ["data.crop=[64, 128]", "data.eval_crop=[64, 64]", "train.length=2 steps", "train.batch_size=4"]
    small += ["train.schedule.warmup.over=1 step"]
    small += ["task.net.width=0.125", "log={every: 1 steps, system_every: null}", "loader.workers=1"]
    done = spawn(2, str(ROOT / "recipes" / "cityscapes.yaml"), *small)
    assert done.returncode == 0, done.stderr[-2000:]
    ran = Ran(0, newest())
    assert ran.folder.info().status == "FINISHED"
    assert ran.series("val/iou.road") and ran.series("both/miou") and ran.series("scales/miou")


MISTAKES = [
    ({"data__crop": "[400, 400]"}, r"crop"),
    ({"data__names": "[sky, road, tree]"}, r"10 masks.*p000\.png: 1 value outside the classes .*: 3 \("),
    ({"task__objective": "{near: {}}", "data__distance": "null"}, r"distance"),
    ({"task__objective": "{class_weights: {rode: 2}}"}, r"'rode'.*road"),
    (
        {"train": "{length: 1 steps, batch_size: 4, micro_batch: 1}"},
        r"train\.micro_batch: 1, but batch norm needs 2 samples.*group",
    ),
    ({"train": "{length: 1 steps, batch_size: 1}"}, r"batch norm needs 2 samples .* of a train\.batch_size from 2"),
    ({"task__net": "{name: smp, encoder: tu-resnet81, decoder: unet}"}, r"resnet"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=lambda value: str(value)[:40])
def test_mistakes_end_a_run_before_its_first_update(changes, message, streets):
    with pytest.raises((UserError, ConfigError), match=f"(?s){message}"):
        run(*words(streets, **changes), recipe=SEGMENT)


def test_damaged_pairs_are_all_counted_before_anything_is_trained(streets, tmp_path):
    odd = scene_sets.camvid(tmp_path / "odd", pictures=(10, 5), size=(40, 56))
    for name, shape in (("p003", (40, 48)), ("p004", (56, 40))):
        scene_sets.put(odd / "trainannot" / f"{name}.png", scene_sets.scene(1, shape)[1])
    with pytest.raises(UserError, match=r"(?s)2 masks.*p003.png: 48 x 40 pixels, its image 56 x 40.*p004"):
        run(*words(odd), recipe=SEGMENT)


@pytest.mark.slow
def test_what_cp_writes_for_camvid_passes_twice_the_trivial_baseline_in_three_epochs(tmp_path, shared, monkeypatch):
    """100 s of CPU time: a quarter of the length that `cp` writes. The commonest class of every place has 0.167."""
    pytest.importorskip("segmentation_models_pytorch")
    monkeypatch.setenv("TRAINKIT_DATA", str(shared))
    mine = tmp_path / "mine.yaml"
    new_recipe.copy(SEGMENT, mine, data="seg_camvid")
    done = run("train.length=3 epochs", "evaluations={val: {at_end: true, batch_size: 10}}", recipe=mine)
    assert done.code == 0 and done.series("val/miou")[-1] >= 2 * 0.167
