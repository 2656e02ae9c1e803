"""The embedding recipes from end to end: eye states and Omniglot, with their gates, processes, resumes and mistakes."""

from __future__ import annotations

import shutil

import pytest
from runs import ROOT, all_same, evaluated, overrides, own_store, run, stopped_and_resumed, stripes

from trainkit.errors import UserError

pytestmark = pytest.mark.usefixtures("store", "unsent")
EYES = ROOT / "recipes" / "eye_state.yaml"
OMNIGLOT = ROOT / "recipes" / "omniglot.yaml"


@pytest.fixture(scope="module")
def crops(tmp_path_factory):
    """Crops of two states and of people who are in one part alone; the third class of the stripes is left out."""
    root = tmp_path_factory.mktemp("crops")
    for part, people, seed in (("train", 5, 0), ("val", 3, 1)):
        for person in range(people):
            stripes(root / "one", 5, 10 * seed + person, (16, 32), f"{part}{person}_{{:02d}}")
            shutil.rmtree(root / "one" / "slanted")
            for state, title in (("closed", "across"), ("open", "down")):
                (root / part / state).mkdir(parents=True, exist_ok=True)
                for file in (root / "one" / title).iterdir():
                    file.rename(root / part / state / file.name)
            shutil.rmtree(root / "one")
    return root


def words(crops, **changes: str) -> list[str]:
    settings = {
        "data.train": f"{crops}/train",
        "data.evaluate": f"{{val: {crops}/val}}",
        "data.image_size": "[16, 32]",
        "data.group": r"'([a-z]+\d+)_\d+\.png$'",
        "data.cap": "24",
        "data.augment": "{name: light, flip: 0.5, distort: {p: 0.5}, clahe: 0.3, clahe_tiles: 2}",
        "task.net": "{name: eye_convnext, base_channels: 16, num_blocks: 4, head: transformer, grid: [1, 2]}",
        "task.margin": "{name: arcface, m: 0.2, scale: 8, scale_eval: 4, ramp_epochs: 2}",
        "task.class_weights": "{open: 2.0}",
        "train": "{length: 16 steps, batch_size: 10, ema: 0.9}",
        "evaluations": "{val: {every: 4 steps}, separation: {split: val.separation, every: 8 steps}, "
        "separation_train: {split: train.separation, every: 16 steps}, images: {split: val.inspection}}",
    }
    return overrides(settings, changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, database, crops):
    """The run without an interruption, in a store of its own."""
    with own_store(tmp_path_factory.mktemp("whole"), database):
        yield run(*words(crops), recipe=EYES)


@pytest.mark.slow
def test_each_evaluation_is_held_at_its_own_gate_and_counts_its_pictures(whole):
    steps = {name: [p.step for p in points] for name, points in whole.history.metrics.items()}
    assert steps["val/f1"] == [4, 8, 12, 16]
    assert steps["separation/ks"] == steps["separation/ema/fisher"] == [8, 16]
    assert steps["separation_train/ks"] == steps["images/hard_share"] == [16]
    assert whole.few_in_mlflow
    counted = {name: set(whole.series(f"eval/{name}/unique_samples")) for name in ("val", "separation_train")}
    assert counted == {"val": {30.0}, "separation_train": {24.0}}  # the second is capped


def test_the_pictures_and_tables_of_a_run_are_where_mlflow_shows_them(whole):
    home = whole.folder.path.parents[1]
    images = {path.name.partition("%")[0].partition("#")[0] for path in home.rglob("images/*.png")}
    assert len(images) >= 1 and any("tsne" in path.name for path in home.rglob("images/*"))
    assert {"confusion_val.png", "roc_val.png"} <= {p.name for p in home.rglob("figures/*.png")}
    assert any(path.name.startswith("val_per_class") for path in home.rglob("tables/*.csv"))


@pytest.mark.slow
def test_an_interrupted_run_with_a_growing_margin_resumes_to_the_bit(whole, crops):
    resumed = stopped_and_resumed(EYES, words(crops), 7)
    assert all_same(resumed, whole) and resumed.repeatable == whole.repeatable


@pytest.mark.slow
def test_one_checkpoint_scores_identically_on_one_process_and_on_two(whole, crops, monkeypatch):
    monkeypatch.setenv("TRAINKIT_STORE", str(whole.folder.path.parents[1]))
    scored = [evaluated(n, str(EYES), *words(crops), "--score", whole.folder.name) for n in (1, 2)]
    assert len(scored[0]) > 20 and scored[0] == scored[1]


def strange(crops) -> list[str]:
    """Omniglot's recipe on classes of people: those of the last two are new."""
    return [
        f"data.train={crops}/val",
        r"data.group='([a-z]+\d+)_\d+\.png$'",
        "data.hold_out=[val2]",
        "data.open_set=false",
        "data.evaluate={unseen: held_out}",
        "data.image_size=[16, 32]",
        "task.net={name: eye_baseline, base_channels: 8, num_blocks: 2, head: avg}",
        "train={length: 6 steps, batch_size: 10}",
        "evaluations={unseen: {split: unseen.retrieval, every: 3 steps}}",
        "checkpoints={every: 3 steps}",
        "log={every: 2 steps, system_every: null}",
    ]


def test_retrieval_is_scored_beside_raw_pixels(crops):
    ran = run(*strange(crops), recipe=OMNIGLOT)
    assert {"pixels/unseen/recall_at_1", "unseen/map_at_r"} <= ran.history.metrics.keys()
    assert set(ran.series("eval/unseen/unique_samples")) == {10.0}


@pytest.mark.slow
def test_omniglot_beats_pixels_on_alphabets_that_it_was_not_trained_on(shared, monkeypatch):
    monkeypatch.setenv("TRAINKIT_DATA", str(shared))
    ran = run("train.length=6 epochs", "evaluations={unseen: {}}", recipe=OMNIGLOT)
    pixels, learned = ran.series("pixels/unseen/map_at_r")[0], ran.series("unseen/map_at_r")[-1]
    assert learned > 2 * pixels
    assert ran.series("unseen/recall_at_1")[-1] > ran.series("pixels/unseen/recall_at_1")[0] + 0.1


def test_a_mistake_ends_a_run_before_its_first_update(crops):
    wide = "{name: eye_convnext, base_channels: 16, num_blocks: 4, grid: [4, 8]}"
    with pytest.raises(UserError, match=r"16 x 32|32 x 16"):
        run(*words(crops, task__net=wide), recipe=EYES)
