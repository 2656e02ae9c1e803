"""The segmentation recipes from end to end: patches, whole volumes, processes, resumes and mistakes."""

from __future__ import annotations

import nifti_sets
import numpy as np
import pytest
from runs import ROOT, Ran, all_same, environment, evaluated, newest, overrides, own_store, run, spawn, stop_after

pytestmark = pytest.mark.usefixtures("store", "unsent")
TOM500 = ROOT / "recipes" / "tom500.yaml"


@pytest.fixture(scope="module")
def bodies(tmp_path_factory):
    """Two sets of patients, imported once for all tests of this file."""
    root = tmp_path_factory.mktemp("bodies")
    nifti_sets.write_set(root / "train", 6, seed=1)
    nifti_sets.write_set(root / "val", 3, seed=2)
    with environment(TRAINKIT_CACHE=tmp_path_factory.mktemp("cache")):
        yield root


def words(bodies, **changes: str) -> list[str]:
    settings = {
        "data.train": f"{bodies}/train",
        "data.evaluate": f"{{val: {bodies}/val}}",
        "data.names": "[ball, box]",
        "data.patch": "[8, 16, 16]",
        "data.patches": "4",
        "data.few": "2",
        "task.net": "{name: unet, filters: [4, 8]}",
        "task.window": "{overlap: 0.25}",
        "train": "{length: 12 steps, batch_size: 4, micro_batch: 2, ema: 0.9}",
        "evaluations": "{val: {every: 6 steps}, patches: {split: val.patches, every: 3 steps, batch_size: 8}, "
        "images: {split: val.overlays, every: 12 steps}}",
    }
    return overrides(settings, changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, database, bodies):
    """The run without an interruption, in a store of its own."""
    with own_store(tmp_path_factory.mktemp("whole"), database):
        yield run(*words(bodies), recipe=TOM500)


@pytest.mark.slow
def test_each_evaluation_is_held_at_its_own_gate_and_counts_its_cases(whole):
    steps = {name: [p.step for p in points] for name, points in whole.history.metrics.items()}
    assert steps["val/dice_mean"] == steps["val/ema/hd95_mean_mm"] == [6, 12]
    assert steps["patches/dice_mean"] == [3, 6, 9, 12]
    assert set(whole.series("eval/val/unique_samples")) == {3.0}
    assert set(whole.series("eval/images/unique_samples")) == {2.0}


def test_overlays_and_the_table_of_cases_are_where_mlflow_shows_them(whole):
    home = whole.folder.path.parents[1]
    assert any("overlays" in path.name for path in home.rglob("images/*"))
    (table,) = home.rglob("rows/val_final.parquet")
    import pyarrow.parquet as pq

    rows = pq.read_table(table).to_pydict()
    assert sorted(rows["patient"]) == ["200", "201", "202"]
    means = [np.nanmean(rows[f"dice_{organ}"]) for organ in nifti_sets.NAMES]
    assert np.mean(means) == pytest.approx(whole.series("val/dice_mean")[-1], abs=1e-6)


def test_an_interrupted_run_resumes_to_the_bit(whole, bodies):
    cut = run(*words(bodies), recipe=TOM500, stopping=stop_after(7))
    assert cut.folder.info().status == "KILLED"
    resumed = run(*words(bodies), recipe=TOM500, resume="")
    assert resumed.folder == cut.folder and resumed.last.step == 12
    assert all_same(resumed, whole) and resumed.repeatable == whole.repeatable


@pytest.mark.slow
def test_workers_change_no_bit(whole, bodies):
    other = run(*words(bodies), "loader.workers=2", recipe=TOM500)
    assert all_same(other, whole)


@pytest.mark.slow
def test_one_checkpoint_scores_identically_on_one_process_and_on_two(whole, bodies, monkeypatch):
    monkeypatch.setenv("TRAINKIT_STORE", str(whole.folder.path.parents[1]))
    scored = [evaluated(n, str(TOM500), *words(bodies), "--score", whole.folder.name) for n in (1, 2)]
    assert len(scored[0]) > 20 and scored[0] == scored[1]


@pytest.mark.slow
def test_two_processes_train_it_too(bodies):
    done = spawn(2, str(TOM500), *words(bodies), "data.fold=null", "train.ema=null", "best=null")
    assert done.returncode == 0, done.stderr[-2000:]
    assert Ran(0, newest()).folder.info().status == "FINISHED"
