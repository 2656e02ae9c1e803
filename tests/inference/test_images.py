"""Tables of classes and embeddings: what the run itself finds, in parts that outlive an interruption."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import shutil

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from pyarrow import parquet
from runs import ROOT
from untrained_runs import made

from trainkit.cli import main
from trainkit.data import import_images
from trainkit.errors import UserError
from trainkit.inference import images, predict, scenes, table_writer

pytestmark = pytest.mark.usefixtures("cache")
CONVNEXT = ROOT / "recipes" / "convnext.yaml"
FACES = ROOT / "recipes" / "face_teacher.yaml"
NAMES = ("across", "down", "slanted")


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    """Faces of noise: 3 people of 4 images, and pairs of them."""
    root, draw = tmp_path_factory.mktemp("people"), np.random.default_rng(0)
    for person in ("anna", "ben", "cleo"):
        (root / person).mkdir()
        for k in range(4):
            Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(root / person / f"{k}.png")
    pairs = [
        f"{a}/{k}.png,{b}/{k + 1}.png,{int(a == b)}" for a in ("anna", "ben") for b in ("anna", "ben") for k in (0, 2)
    ]
    (root / "pairs.csv").write_text("\n".join(["path_a,path_b,same", *pairs]) + "\n")
    return root


def classes(pictures, **changes: str):
    words = {
        "data.train": f"{pictures}/train",
        "data.evaluate": f"{{val: {pictures}/val}}",
        "data.mean": "[0.3, 0.4, 0.5]",
        "data.std": "[0.2, 0.3, 0.4]",
        "task.net": "{model: test_convnext3, args: {patch_size: 2, ls_init_value: 0.5}}",
        "train.batch_size": "4",
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return made(CONVNEXT, *(f"{key}={value}" for key, value in words.items()))


def faces(people, **changes: str):
    words = {
        "data.train": f"{people}",
        "data.evaluate": f"{{pairs: {people}/pairs.csv}}",
        "data.image_size": "32",
        "task.net": "{name: mobilefacenet, embedding: 8, width: 0.25}",
        "evaluations": "{pairs: {}}",
        "best": "null",
        "train.batch_size": "4",
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return made(FACES, *(f"{key}={value}" for key, value in words.items()))


def ask(*words, code: int = 0) -> str:
    result = CliRunner().invoke(main.main, ["predict", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def rows(file) -> dict[str, dict]:
    return {row["id"]: row for row in parquet.read_table(file).to_pylist()}


@torch.no_grad()
def by_run(run, split: str) -> dict[str, dict[str, np.ndarray]]:
    """What the run's own evaluation finds, by the id of the image."""
    scored = run.opened.evaluations[split]
    batch = scored.on_device(scored.fetch(np.arange(scored.size), 0))
    found = {key: value.numpy() for key, value in run.recipe.task.predict(run.net, batch).items()}
    return {id: {key: value[row] for key, value in found.items()} for row, id in enumerate(scored.packed.ids())}


def test_classes_are_those_that_the_run_finds(pictures, tmp_path):
    run = classes(pictures)
    said = ask(run.name, pictures / "val", tmp_path / "out.parquet")
    assert "out.parquet: 21 rows of id, class, probability, probabilities, embedding, by " in said
    found, own = rows(tmp_path / "out.parquet"), by_run(run, "val")
    assert found.keys() == own.keys() and len(found) == 21
    for id, row in found.items():
        logits = own[id]["logits"].astype(float)
        expected = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        np.testing.assert_allclose(row["probabilities"], expected, atol=1e-6)
        assert row["class"] == NAMES[expected.argmax()] and row["probability"] == max(row["probabilities"])
        np.testing.assert_allclose(row["embedding"], own[id]["embedding"], rtol=1e-4, atol=1e-5)
    # And by hand, from the file.
    x = np.asarray(Image.open(pictures / "val" / "down" / "003.png"), np.float32).transpose(2, 0, 1)[None] / 255
    x = (x - np.array([0.3, 0.4, 0.5]).reshape(3, 1, 1)) / np.array([0.2, 0.3, 0.4]).reshape(3, 1, 1)
    with torch.no_grad():
        by_hand = run.net.net(torch.from_numpy(x).float()).softmax(1)[0]
    np.testing.assert_allclose(found["down/003.png"]["probabilities"], by_hand, atol=1e-5)
    assert len({tuple(row["probabilities"]) for row in found.values()}) == 21, "all alike: anything would agree"
    origin = json.loads(parquet.read_schema(tmp_path / "out.parquet").metadata[b"trainkit"])
    assert (origin["run"], origin["classes"], origin["weights"]) == (
        run.name,
        list(NAMES),
        "step-000000007/model.safetensors",
    )
    assert {path.name for path in tmp_path.iterdir()} == {"out.parquet", "cache"}


def test_a_csv_has_a_column_for_each_class(pictures, tmp_path):
    run = classes(pictures)
    said = ask(run.name, pictures / "val" / "down", tmp_path / "out.csv")
    assert "7 rows of id, class, probability, p.across, p.down, p.slanted" in said
    predict.predict(run.name, pictures / "val" / "down", tmp_path / "out.parquet")
    with open(tmp_path / "out.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    for line, row in zip(lines, parquet.read_table(tmp_path / "out.parquet").to_pylist(), strict=True):
        assert line["id"] == row["id"] and line["class"] == row["class"]
        assert [float(line[f"p.{name}"]) for name in NAMES] == pytest.approx(row["probabilities"], abs=1e-6)


def test_pictures_are_brought_to_the_size_of_the_run(pictures, tmp_path):
    """A large image with the small one as its middle part, squeezed where the run squeezes."""
    one = Image.open(pictures / "val" / "down" / "000.png")
    wide = Image.new("RGB", (96, 32))
    wide.paste(one, (32, 0))
    wide.save(tmp_path / "wide.png")
    one.save(tmp_path / "one.png")
    squeezed = wide.resize((32, 32), Image.Resampling.BICUBIC)
    squeezed.save(tmp_path / "squeezed.png")
    for fit, like in (("crop", "one.png"), ("stretch", "squeezed.png")):
        run = classes(pictures, data__fit=fit)
        for name in ("wide.png", like):
            predict.predict(run.name, tmp_path / name, tmp_path / fit / f"{name}.parquet")
        a, b = (parquet.read_table(tmp_path / fit / f"{name}.parquet").to_pylist()[0] for name in ("wide.png", like))
        np.testing.assert_allclose(a["embedding"], b["embedding"], rtol=1e-5, atol=1e-6)


def test_pictures_that_keep_their_sizes_are_cut_as_the_run_cuts_them(pictures, tmp_path):
    for number, file in enumerate(sorted((pictures / "val").glob("*/*.png"))):
        (tmp_path / "val" / file.parent.name).mkdir(parents=True, exist_ok=True)
        one = Image.open(file).resize((40 + number, 60 - number))
        one.save(tmp_path / "val" / file.parent.name / file.name)
    run = classes(
        pictures,
        data__evaluate=f"{{val: {tmp_path}/val}}",
        data__fit="keep",
        data__augment="{name: timm, crop_pct: 0.8}",
    )
    predict.predict(run.name, tmp_path / "val", tmp_path / "out.parquet")
    found, own = rows(tmp_path / "out.parquet"), by_run(run, "val")
    assert found.keys() == own.keys() and len(found) == 21
    for id, row in found.items():
        np.testing.assert_allclose(row["embedding"], own[id]["embedding"], rtol=1e-4, atol=1e-5)


def test_embeddings_of_faces_are_those_that_the_run_compares(people, tmp_path):
    run = faces(people)
    said = ask(run.name, people, tmp_path / "faces.parquet")
    assert "12 rows of id, embedding, norm, by " in said
    found, own = rows(tmp_path / "faces.parquet"), by_run(run, "pairs")
    assert len(found) == 12 and own.keys() <= found.keys() and len(own) >= 6
    for id, row in own.items():
        np.testing.assert_allclose(found[id]["embedding"], row["embedding"], rtol=1e-4, atol=1e-5)
        assert found[id]["norm"] == pytest.approx(float(row["norm"]), rel=1e-5)


def test_faces_are_cut_as_the_run_does(tmp_path):
    root, draw = tmp_path / "people", np.random.default_rng(0)
    for person in ("anna", "ben", "cleo", "dora"):
        (root / person).mkdir(parents=True)
        for k in range(3):
            Image.fromarray(draw.integers(0, 256, (36, 40, 3), dtype=np.uint8)).save(root / person / f"{k}.png")
    held = [f"anna/{a}.png,{b},{int(b[0] == 'a')}" for a, b in [(0, "anna/1.png"), (0, "ben/0.png"), (1, "ben/1.png")]]
    (tmp_path / "mine.csv").write_text("\n".join(["path_a,path_b,same", *held]) + "\n")
    changes = {"data__fit": "crop", "data__hold_out": f"{tmp_path}/mine.csv", "data__evaluate": "{pairs: held_out}"}
    run = faces(root, **changes)
    ask(run.name, root, tmp_path / "crop.parquet")
    found, scored = rows(tmp_path / "crop.parquet"), run.opened.evaluations["pairs"]
    batch = scored.on_device(scored.fetch(np.arange(scored.size), 0))
    ours = run.recipe.task.predict(run.net, batch)["embedding"].detach().numpy()
    assert len(found) == 12 and len(ours) == 4
    for name, row in zip(("anna/0.png", "anna/1.png", "ben/0.png", "ben/1.png"), ours, strict=True):
        np.testing.assert_allclose(found[name]["embedding"], row, rtol=1e-4, atol=1e-5)


def test_sets_with_labels_keep_them(pictures, people, tmp_path):
    run = classes(pictures)
    import_images.import_pictures(pictures / "val", tmp_path / "packed", size=(32, 32), fit="crop")
    predict.predict(run.name, tmp_path / "packed", tmp_path / "packed.parquet")
    table = parquet.read_table(tmp_path / "packed.parquet").to_pylist()
    assert all(row["label"] == row["id"].partition("/")[0] for row in table) and len(table) == 21
    plain = predict.predict(run.name, pictures / "val", tmp_path / "plain.parquet")
    assert "label" not in plain.columns
    own = rows(tmp_path / "plain.parquet")
    assert all(row["class"] == own[row["id"]]["class"] for row in table)


def test_mirror_images_are_averaged(pictures, people, tmp_path):
    run = classes(pictures)
    file = pictures / "val" / "slanted" / "000.png"
    Image.open(file).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / "mirrored.png")
    both = [
        predict.predict(run.name, f, tmp_path / f"{n}.parquet") for n, f in enumerate((file, tmp_path / "mirrored.png"))
    ]
    a, b = (parquet.read_table(done.written[0]).to_pylist()[0]["probabilities"] for done in both)
    ask(run.name, file, tmp_path / "mean.parquet", "--mirror")
    mean = parquet.read_table(tmp_path / "mean.parquet").to_pylist()[0]["probabilities"]
    np.testing.assert_allclose(mean, (np.array(a) + np.array(b)) / 2, atol=1e-6)
    assert np.abs(np.array(a) - np.array(b)).max() > 1e-6
    with pytest.raises(UserError, match="--mirror: a run that only predicts embeddings"):
        predict.predict(faces(people).name, people, tmp_path / "faces.parquet", mirror=True)


def test_damaged_pictures_are_named_and_have_no_row(pictures, people, tmp_path):
    shutil.copytree(people / "anna", tmp_path / "in" / "anna")
    whole = (tmp_path / "in" / "anna" / "0.png").read_bytes()
    (tmp_path / "in" / "cut.png").write_bytes(whole[:100])
    Image.new("RGB", (40, 32)).save(tmp_path / "in" / "wide.png")
    (tmp_path / "in" / ".hidden.png").write_text("not looked at")
    (tmp_path / "in" / "readme.txt").write_text("nor this")
    said = ask(faces(people).name, tmp_path / "in", tmp_path / "out.parquet", code=2)
    assert said.count("left out: ") == 2 and "cut.png: cannot be decoded" in said and "wide.png: 40 x 32 pixels" in said
    assert list(rows(tmp_path / "out.parquet")) == [f"anna/{k}.png" for k in range(4)]
    for file in (tmp_path / "in" / "anna").iterdir():
        file.unlink()
    assert "0 rows" in ask(faces(people).name, tmp_path / "in", tmp_path / "none.parquet", code=2)
    assert not (tmp_path / "none.parquet").exists()


def test_what_was_interrupted_leaves_nothing_and_begins_anew(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(table_writer, "BATCH", 2)
    monkeypatch.setattr(table_writer, "ROWS", 4)
    run = classes(pictures)
    (tmp_path / "in").mkdir()
    for file in (pictures / "val").glob("*/*.png"):
        shutil.copy(file, tmp_path / "in" / f"{file.parent.name}_{file.name}")
    (tmp_path / "in" / "across_001.png").write_bytes(b"damaged")
    whole = predict.predict(run.name, tmp_path / "in", tmp_path / "whole.parquet")
    assert len(whole.damaged) == 1 and whole.rows == 20
    honest, calls = images._Network.columns, []

    def counted(self, read):
        calls.append(len(read))
        if len(calls) == 7:  # one is the trial, of a black image
            raise KeyboardInterrupt
        return honest(self, read)

    out = tmp_path / "out.parquet"
    with monkeypatch.context() as patch:
        patch.setattr(images._Network, "columns", counted)
        with pytest.raises(KeyboardInterrupt):
            predict.predict(run.name, tmp_path / "in", out)
    assert {file.name for file in tmp_path.iterdir() if "cache" not in file.name} >= {"in", "whole.parquet"}
    assert not [file for file in tmp_path.iterdir() if "out.parquet" in file.name]
    done = predict.predict(run.name, tmp_path / "in", out)
    assert done.rows == 20 and done.damaged == whole.damaged
    assert parquet.read_table(out).equals(parquet.read_table(tmp_path / "whole.parquet"))


def test_a_source_that_changes_meanwhile_makes_no_table(pictures, tmp_path, monkeypatch):
    run = classes(pictures)
    opened = images.open_pictures
    monkeypatch.setattr(images, "open_pictures", lambda text: dataclasses.replace(opened(text), size=22))
    with pytest.raises(UserError, match="21 of 22 entries were read"):
        predict.predict(run.name, pictures / "val", tmp_path / "out.parquet")
    assert not [file for file in tmp_path.iterdir() if "out.parquet" in file.name]


def test_mistakes_are_said_before_any_work(pictures, people, tmp_path, monkeypatch):
    run, other = classes(pictures), faces(people)
    monkeypatch.setattr("trainkit.data.formats.image_decode.decode", None)
    (tmp_path / "there.parquet").write_text("kept")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.md").write_text("#")
    for source, out, said in (
        (pictures / "val", tmp_path / "there.parquet", r"there\.parquet: exists already"),
        (pictures / "val", tmp_path / "out", r"out: not the name of a table.*use .*out\.parquet"),
        (tmp_path / "nowhere", tmp_path / "a.parquet", "nowhere: does not exist"),
        (tmp_path / "empty", tmp_path / "a.parquet", "no images; expected files"),
        (tmp_path / "notes.md", tmp_path / "a.parquet", "a file of unknown kind"),
        (f"{pictures}#none", tmp_path / "a.parquet", "#none: no images"),
    ):
        with pytest.raises(UserError, match=said):
            predict.predict(run.name, source, out)
    with pytest.raises(UserError, match=r"CSV cannot store embeddings.*a file \.parquet"):
        predict.predict(other.name, people, tmp_path / "faces.csv")
    assert (tmp_path / "there.parquet").read_text() == "kept"


def test_of_a_folder_no_name_is_taken_that_a_table_could_not_hold_and_no_entry_vanishes(tmp_path):
    for name in ("a.png", "below/b.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / name)
    (tmp_path / "gone.png").symlink_to("nowhere")
    records = list(images.open_pictures(str(tmp_path)).records())
    assert [record.id for record in records] == ["a.png", "below/b.png", "gone.png"]
    with pytest.raises(UserError, match=r"gone\.png: a broken link"):
        images.pixels_of(records[2])
    (tmp_path / os.fsdecode(b"caf\xe9.png")).symlink_to("a.png")
    (tmp_path / "below" / "two\nlines.png").symlink_to("b.png")
    for read in (images.open_pictures, scenes._pictures):
        with pytest.raises(UserError, match=r"not in UTF-8, or with control characters:\n  caf\\xe9\.png\n"):
            read(str(tmp_path))
