"""Embeddings of records of people: what the run compares when it looks for them."""

from __future__ import annotations

import numpy as np
import people_sets
import pytest
import torch
from click.testing import CliRunner
from pyarrow import parquet
from runs import ROOT, environment
from untrained_runs import made

from trainkit.cli import main
from trainkit.errors import UserError
from trainkit.inference import predict
from trainkit.interfaces import MODALITIES

REID = ROOT / "recipes" / "reid.yaml"
TINY = (
    "{model: resnet18, args: {layers: [1, 1, 1, 1], channels: [8, 8, 16, 16]}, embedding: 16, "
    "text: {layers: 1, width: 16, heads: 2}, fusion: {name: transformer, layers: 1, heads: 2}}"
)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    root = tmp_path_factory.mktemp("people")
    people_sets.index(root / "train", 6, (3, 2, 1, 1, 2))
    people_sets.index(root / "val", ["a", "b", "c"], (3, 2, 1, 1, 2), seed=7)
    with environment(TRAINKIT_CACHE=tmp_path_factory.mktemp("cache")):
        yield root


def reid(sets, **changes: str):
    words = {
        "data.train": f"{sets}/train",
        "data.evaluate": f"{{val: {sets}/val}}",
        "data.image_size": "[32, 16]",
        "data.text": "{length: 12}",
        "data.sampler": "{name: modal_pk, people: 2, each: 5, batches_per_epoch: 4}",
        "task.net": TINY,
        "train": "{length: 12 steps, batch_size: 20, micro_batch: 10}",
        "evaluations": "{val: {}}",
        "best": "null",
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return made(REID, *(f"{key}={value}" for key, value in words.items()))


@torch.no_grad()
def by_run(run) -> dict[str, np.ndarray]:
    """What the run's search compares of each record that asks alone or is looked for, by its id."""
    split = run.opened.evaluations["val"]
    batch = split.on_device(split.fetch(np.arange(split.size), 0))
    feature = run.recipe.task.predict(run.net, batch)["feature"]
    own = run.net.neck(
        torch.stack([run.net.fuse(*_alone(f, int(m)))[0] for f, m in zip(feature, batch["modality"], strict=True)])
    )
    return dict(zip(split.protocol.ids, own.numpy(), strict=True))


def _alone(feature: torch.Tensor, modality: int) -> tuple[torch.Tensor, torch.Tensor]:
    places, present = torch.full((1, 5, len(feature)), 9.0), torch.zeros(1, 5, dtype=torch.bool)
    places[0, modality], present[0, modality] = feature, True
    return places, present


def test_records_are_embedded_as_in_a_search(sets, tmp_path, monkeypatch):
    monkeypatch.setattr("trainkit.inference.table_writer.BATCH", 7)
    run = reid(sets)
    result = CliRunner().invoke(
        main.main, ["predict", run.name, f"{sets}/val", f"{tmp_path}/out.parquet"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    assert "27 rows of id, person, camera, modality, embedding, by " in result.output
    table, own = parquet.read_table(tmp_path / "out.parquet").to_pylist(), by_run(run)
    assert [row["modality"] for row in table] == sorted((r["modality"] for r in table), key=MODALITIES.index)
    assert {row["id"] for row in table} == own.keys() and len(own) == 27
    for row in table:
        np.testing.assert_allclose(row["embedding"], own[row["id"]], rtol=1e-4, atol=1e-5)
    assert {row["person"] for row in table} == {"a", "b", "c"}
    assert len({tuple(row["embedding"]) for row in table}) > 20, "all alike: anything would agree"


def test_records_of_unknown_modalities_are_left_out_and_counted(sets, tmp_path):
    run = reid(sets, data__modalities="[rgb, nir]", data__sampler="{name: pk, people: 2, each: 5}")
    done = predict.predict(run.name, sets / "val", tmp_path / "out.parquet")
    assert done.rows == 15 and done.notes == (
        "3 records of cp left out: the run was trained on rgb, nir",
        "3 records of sk left out: the run was trained on rgb, nir",
        "6 records of text left out: the run was trained on rgb, nir",
    )


def test_a_stored_run_keeps_the_tokenizer_that_it_was_trained_with(tmp_path, monkeypatch):
    """Its recipe has no `rule`; text is embedded by rule 1, by which marks and ideographs were divided otherwise."""
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    for name, people in {"train": "uvwxyz", "val": "ab"}.items():
        rows = people_sets.index_rows(tmp_path / name, list(people), (3, 2, 1, 1, 2), ord(people[0]))
        rows = [(*row[:4], f"穿红色外套的{row[1]}, महिला" if row[3] == "text" else "", row[5]) for row in rows]
        people_sets.write_csv(tmp_path / name / "index.csv", rows)
    run = reid(tmp_path, data__text="{length: 12, rule: 1}")

    def words(out) -> dict[str, np.ndarray]:
        predict.predict(run.name, tmp_path / "val", out)
        rows = parquet.read_table(out).to_pylist()
        return {row["id"]: row["embedding"] for row in rows if row["modality"] == "text"}

    own, stored = by_run(run), run.folder.recipe.read_text()
    older = [line for line in stored.splitlines(True) if line.strip() != "rule: 1"]
    for text, same in (("".join(older), True), (stored.replace("rule: 1", "rule: 2"), False)):
        run.folder.recipe.write_text(text)
        found = words(tmp_path / f"{same}.parquet")
        assert len(found) == 4
        assert all(np.allclose(found[id], own[id], rtol=1e-4, atol=1e-5) == same for id in found)


def test_plain_pictures_are_taken_for_rgb(sets, tmp_path):
    run = reid(sets)
    done = predict.predict(run.name, sets / "val" / "rgb", tmp_path / "out.parquet")
    assert done.columns == ("id", "modality", "embedding") and done.rows == 9
    own = by_run(run)
    for row in parquet.read_table(tmp_path / "out.parquet").to_pylist():
        assert row["modality"] == "rgb"
        np.testing.assert_allclose(row["embedding"], own[f"rgb/{row['id']}"], rtol=1e-4, atol=1e-5)


def test_what_cannot_be_is_refused(sets, tmp_path):
    run = reid(sets)
    with pytest.raises(UserError, match="--mirror: a run of task reid"):
        predict.predict(run.name, sets / "val", tmp_path / "out.parquet", mirror=True)
    with pytest.raises(UserError, match="CSV cannot store embeddings"):
        predict.predict(run.name, sets / "val", tmp_path / "out.csv")
    with pytest.raises(UserError, match="does not exist"):
        predict.predict(run.name, tmp_path / "nowhere", tmp_path / "out.parquet")
    (tmp_path / "val").mkdir()
    with pytest.raises(UserError, match="no images"):
        predict.predict(run.name, tmp_path / "val", tmp_path / "out.parquet")
