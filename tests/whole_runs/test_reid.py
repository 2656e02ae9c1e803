"""The re-identification recipes from end to end: blocks, queries, processes, resumes, published layouts, mistakes."""

from __future__ import annotations

import csv
import re

import people_sets
import pytest
from runs import ROOT, Ran, all_same, environment, evaluated, newest, overrides, own_store, run, spawn, stop_after

from trainkit.analysis import run_scores
from trainkit.errors import UserError
from trainkit.tracking import mlflow_run

pytestmark = pytest.mark.usefixtures("store", "unsent")
REID = ROOT / "recipes" / "reid.yaml"
TINY = (
    "{model: resnet18, args: {layers: [1, 1, 1, 1], channels: [8, 8, 16, 16]}, embedding: 16, "
    "text: {layers: 1, width: 16, heads: 2}, fusion: {name: transformer, layers: 1, heads: 2}}"
)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """People to train on and others, indexed and packed once for all tests of this file."""
    root = tmp_path_factory.mktemp("people")
    people_sets.index(root / "train", 9, (3, 2, 1, 1, 2))
    people_sets.index(root / "val", [f"q{n}" for n in range(4)], (3, 2, 1, 1, 2), seed=1)
    with environment(TRAINKIT_CACHE=tmp_path_factory.mktemp("cache")):
        yield root


def words(sets, **changes: str) -> list[str]:
    settings = {
        "data.train": f"{sets}/train",
        "data.evaluate": f"{{val: {sets}/val}}",
        "data.image_size": "[32, 16]",
        "data.augment": "{name: light, flip: 0.5, shift: 2, erase: 0.5}",
        "data.text": "{length: 12}",
        "data.token_dropout": "0.2",
        "data.modality_dropout": "{p: 0.2}",
        "data.sampler": "{name: modal_pk, people: 2, each: 5, batches_per_epoch: 4}",
        "task.net": TINY,
        "task.triplet": "{margin: soft}",
        "task.norms": "3 steps",
        "train": "{length: 12 steps, batch_size: 20, micro_batch: 10, ema: 0.9}",
        "evaluations": "{val: {every: 6 steps}, images: {split: val.ranked, every: 12 steps}, "
        "reranked: {split: val.reranked}}",
    }
    return overrides(settings, changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, database, sets):
    """The run without an interruption, in a store of its own."""
    with own_store(tmp_path_factory.mktemp("whole"), database):
        yield run(*words(sets), recipe=REID)


@pytest.mark.slow
def test_an_epoch_is_as_long_as_the_recipe_says(whole):
    steps, epochs = whole.history.series("train/epoch")
    assert dict(zip(steps, epochs, strict=True))[12] == 6.0  # of 4 blocks, two to an update


def test_each_kind_of_query_and_each_group_is_scored_at_its_gate(whole):
    steps = {name: [p.step for p in points] for name, points in whole.history.metrics.items()}
    lists = {name for name in steps if re.fullmatch(r"val/(nir|cp|sk|text)(_\w+)?\.map", name)}
    assert len(lists) == 15 and all(steps[name] == [6, 12] for name in lists)
    assert [steps[f"val/modal_{k}.rank_1"] for k in (1, 2, 3, 4)] == [[6, 12]] * 4
    assert steps["val/ema/map"] == [6, 12] and steps["reranked/map"] == steps["images/map"] == [12]
    assert steps["pixels/val/map"] == [0]
    groups = [whole.series(f"val/modal_{k}.map")[-1] for k in (1, 2, 3, 4)]
    assert whole.series("val/map")[-1] == pytest.approx(sum(groups) / 4)


def test_the_rule_of_cameras_is_said_and_logged(whole):
    (rule,) = {event.data["val"] for event in whole.events("protocols")}
    assert rule.startswith("gallery images of the person from the camera of a query are ignored, ")
    lines = run_scores.facts({}, whole.history)
    assert lines[-1] == run_scores.fact("Protocol", f"val, images, reranked: {rule}")
    params = mlflow_run.read(whole.folder).params
    assert params["protocol.val"] == rule
    assert f"{int(whole.series('val/unmatched')[-1])} of" in rule


def test_norms_are_logged_at_their_own_gate(whole):
    logged = {name: [p.step for p in points] for name, points in whole.history.metrics.items() if "_norm" in name}
    assert logged["train/feature_norm"] == logged["train/fused_norm"] == logged["train/bn_norm"] == [2, 4, 8, 10]
    assert logged["train/grad_norm"] == [2, 4, 6, 8, 10, 12]


def test_ranked_lists_and_tables_are_where_mlflow_shows_them(whole):
    home = whole.folder.path.parents[1]
    assert any("ranked" in path.name for path in home.rglob("images/*"))
    (table,) = home.rglob("tables/val_queries_last.csv")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 15 and {row["list"] for row in rows} >= {"nir", "nir_cp_sk_text"}
    by_list = {row["list"]: float(row["map"]) for row in rows}
    assert by_list["nir_text"] == pytest.approx(whole.series("val/nir_text.map")[-1], abs=1e-6)


def test_an_interrupted_run_resumes_to_the_bit(whole, sets):
    cut = run(*words(sets), recipe=REID, stopping=stop_after(7))
    assert cut.folder.info().status == "KILLED"
    resumed = run(*words(sets), recipe=REID, resume="")
    assert resumed.folder == cut.folder and resumed.last.step == 12
    assert all_same(resumed, whole) and resumed.repeatable == whole.repeatable


@pytest.mark.slow
def test_workers_change_no_bit(whole, sets):
    other = run(*words(sets), "loader.workers=2", recipe=REID)
    assert all_same(other, whole)


@pytest.mark.slow
def test_one_checkpoint_scores_identically_on_one_process_and_on_two(whole, sets, monkeypatch):
    monkeypatch.setenv("TRAINKIT_STORE", str(whole.folder.path.parents[1]))
    scored = [evaluated(n, str(REID), *words(sets), "--score", whole.folder.name) for n in (1, 2)]
    assert len(scored[0]) > 50 and scored[0] == scored[1]


@pytest.mark.slow
def test_two_processes_train_it_too_each_with_features_of_its_own(sets):
    changes = {"task__gather": "local", "task__contrast": "{}", "best": "null"}
    done = spawn(2, str(REID), *words(sets, **changes))
    assert done.returncode == 0, done.stderr[-2000:]
    assert Ran(0, newest()).folder.info().status == "FINISHED"


@pytest.mark.slow
def test_the_published_recipes_run_on_two_processes_and_sets_laid_out_as_published(tmp_path, monkeypatch):
    import gzip

    people_sets.orbench(tmp_path / "ORBench", train=6, test=3)
    people_sets.market(tmp_path / "Market-1501", train=6, test=3)
    (tmp_path / "clip").mkdir()
    with gzip.open(tmp_path / "clip" / "bpe_simple_vocab_16e6.txt.gz", "wt") as file:
        file.write("#version: 0.2\np e\npe r\ns o\nso n</w>\n")
    monkeypatch.setenv("TRAINKIT_DATA", str(tmp_path))
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    small = ["data.image_size=[32, 16]", "log={every: 1 steps, system_every: null}", "loader.workers=0"]
    vit = (
        "{model: vit_tiny_patch16_224, args: {patch_size: 8, depth: 2, embed_dim: 24, num_heads: 2}, embedding: 16, "
        "lora: {rank: 2}, text: {layers: 1, width: 16, heads: 2, pool: end, causal: true}, "
        "fusion: {name: transformer, layers: 1, heads: 2}}"
    )
    cnn = "{model: resnet18, args: {layers: [1, 1, 1, 1], channels: [8, 8, 16, 16]}, embedding: 16}"
    for recipe, net, sampler, block in (
        ("reid_orbench", vit, "{name: pairs, people: 4, each: 5}", 20),
        ("reid_market", cnn, "{name: pk, people: 3, each: 4, batches_per_epoch: 6}", 12),
    ):
        train = f"{{length: 3 steps, batch_size: {2 * block}, "
        done = spawn(
            2,
            str(ROOT / "recipes" / f"{recipe}.yaml"),
            *small,
            f"task.net={net}",
            f"data.sampler={sampler}",
            f"train={train}micro_batch: {block}}}",
        )
        assert done.returncode == 0, (recipe, done.stderr[-2000:])
        ran = Ran(0, newest())
        assert ran.folder.info().status == "FINISHED" and ran.series("test/map")


MISTAKES = [
    ({"train": "{length: 4 steps, batch_size: 20, micro_batch: 5}"}, r"P x K = 10 samples that belong together"),
    ({"train": "{length: 4 steps, batch_size: 15}"}, r"P x K = 10 samples that belong together"),
    ({"data__sampler": "{name: modal_pk, people: 10, each: 2}", "train": "{length: 4 steps, batch_size: 20}"},
     r"10 people in a step, but only 9 can be sampled"),
    ({"data__modalities": "[rgb, nir, sk, infrared]"}, r"infrared"),
    ({"data__modalities": "[nir, sk]"}, r"add rgb"),
    ({"data__hold_out": "[nobody]"}, r"unknown people: nobody"),
    ({"data__modalities": "[rgb]", "data__sampler": "{name: pk, people: 2, each: 5}"},
     r"task\.sdm: the data has only RGB records"),
    ({"task__net": "{model: resnet18, lora: {rank: 2}}"}, r"task\.net\.lora"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=lambda value: str(value)[:40])
def test_mistakes_end_a_run_before_its_first_update(changes, message, sets):
    with pytest.raises((UserError, Exception), match=message) as error:
        run(*words(sets, **changes), recipe=REID)
    assert isinstance(error.value, UserError) or type(error.value).__name__ == "ConfigError"


def test_a_person_in_two_splits_is_refused_by_name(sets):
    with pytest.raises(UserError, match=r"4 of its 4 people are in data\.train: q0, q1"):
        run(*words(sets, data__train=f"{sets}/val", data__sampler="{name: pk, people: 2, each: 5}"), recipe=REID)


def test_queries_without_a_match_are_counted_and_said(sets, tmp_path):
    rows = people_sets.index_rows(tmp_path / "odd", ["a", "b", "c"], (2, 1, 1, 1, 1), seed=3)
    rows = [row for row in rows if not (row[1] == "c" and row[3] == "rgb")]
    rows = [(*row[:5], "") if row[1] == "c" else row for row in rows]
    people_sets.write_csv(tmp_path / "odd" / "index.csv", rows)
    ran = run(*words(sets, data__evaluate=f"{{val: {tmp_path}/odd}}", train__length="2 steps"), recipe=REID)
    assert ran.series("val/unmatched") == [15.0]
