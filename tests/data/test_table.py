"""Sets that `datasets` reads: images with metadata, CSV, JSON, shards and cards; and each mistake in them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from click.testing import CliRunner
from table_sets import lines, parquet, png, samples, shard
from table_sets import squares as pictures

from trainkit.cli import main
from trainkit.data import hub, import_images, sources
from trainkit.data.faces.dataset import Faces
from trainkit.data.formats import image_decode
from trainkit.data.images.dataset import Images
from trainkit.data.scenes import verify
from trainkit.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRAINKIT_DATA", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def laid_out(kind: str, root: Path) -> Path:
    """The same four images of two classes, in each form."""
    paths = pictures(root)
    rows = [(path, k % 2) for k, path in enumerate(paths)]
    if kind == "csv":
        return lines(root / "a.csv", "image,label", *(f"{path},{label}" for path, label in rows))
    if kind == "jsonl":
        return lines(root / "a.jsonl", *(json.dumps({"image": path, "label": label}) for path, label in rows))
    if kind == "json":
        return lines(root / "a.json", json.dumps([{"image": path, "label": label} for path, label in rows]))
    if kind == "metadata":
        lines(root / "metadata.csv", "file_name,label", *(f"{path},{label}" for path, label in rows))
        return root
    if kind == "metadata.jsonl":
        lines(root / "metadata.jsonl", *(json.dumps({"file_name": path, "label": label}) for path, label in rows))
        return root
    return shard(root / "a.tar", *samples())


FORMS = ("csv", "jsonl", "json", "metadata", "metadata.jsonl", "tar")


@pytest.mark.parametrize("kind", FORMS)
def test_each_form_is_read_and_packed(tmp_path, kind):
    path = laid_out(kind, tmp_path / "set")
    source = sources.open_source(path)
    found = list(source.records())
    assert [record.label for record in found] == [0, 1, 0, 1] and source.size in (4, None)
    assert [record.id for record in found] == [f"s{k}" if kind == "tar" else f"img/{k}.png" for k in range(4)]
    assert all(record.id in record.where and str(path) in record.where for record in found)
    report = import_images.import_pictures(path, tmp_path / "out", size=(8, 8))
    assert (report.rows, report.classes) == (4, 2)
    packed = import_images.Packed(tmp_path / "out")
    assert all((packed.picture(k) == image_decode.decode(png(k, 8, 8), "")).all() for k in range(4))
    data = Images(train=str(path), image_size=8).open(0)
    assert data.train.size == 4 and data.meta.classes == 2


def test_columns_are_named_in_the_recipe_and_by_the_command(tmp_path):
    paths = pictures(tmp_path / "set")
    rows = (f"{path},{k % 2},{'ab'[k // 2]},g{k}" for k, path in enumerate(paths))
    table = lines(tmp_path / "set" / "a.csv", "file,coarse,fine,video", *rows)
    columns = {"image": "file", "label": "fine", "group": "video"}
    data = Images(train=str(table), columns=columns, image_size=8).open(0)
    assert data.meta.class_names == ("a", "b") and data.train.groups() == {"g0", "g1", "g2", "g3"}
    other = Images(train=str(table), columns={**columns, "label": "coarse"}, image_size=8).open(0)
    assert other.meta.class_names == ("0", "1"), "packed again: other columns are another set"
    assert Faces(train=str(table), columns={"image": "file", "label": "fine"}, image_size=8).open(0).meta.classes == 2
    words = ["data", "import", str(table), str(tmp_path / "out"), "--size", "8x8"]
    done = CliRunner().invoke(main.main, [*words, "--columns", "image=file,label=fine"])
    assert done.exit_code == 0 and "4 images of 2 classes" in done.output
    for given, said in (
        (["--columns", "image=fil,label=fine"],
         "no column 'fil'; expected one of its columns: file, coarse, fine, video"),
        (["--columns", "label=fine"], "video (string); expected image in one of"),
        (["--columns", "image=file"], "video (string); expected label in one of"),
        (["--columns", "picture=file"], "--columns picture=file: image, label, split, name or group"),
    ):  # fmt: skip
        done = CliRunner().invoke(main.main, [*words[:3], str(tmp_path / "no"), *words[4:], *given])
        assert done.exit_code == 2 and said in done.output.replace("\n", " "), done.output


def test_a_field_of_json_in_shards_is_a_label(tmp_path):
    source = sources.open_source(shard(tmp_path / "a.tar", *samples()), columns={"label": "json.who"})
    assert [record.label for record in source.records()] == ["p0", "p1", "p0", "p1"]


def test_a_card_says_splits_and_names_of_classes(tmp_path, monkeypatch):
    folder = tmp_path / "snapshots" / "0" / "set"
    monkeypatch.setattr(hub, "download", lambda path, network: folder)
    paths = pictures(folder)
    for split in ("train", "test"):
        rows = (json.dumps({"image": path, "label": k % 2}) for k, path in enumerate(paths))
        lines(folder / f"{split}.jsonl", *rows)
    card = """---
configs:
- config_name: default
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
dataset_info:
  features:
  - {name: image, dtype: string}
  - name: label
    dtype: {class_label: {names: {'0': cat, '1': dog}}}
  splits:
  - {name: train, num_bytes: 1, num_examples: 4}
---
"""
    (folder / "README.md").write_text(card)
    source = sources.open_source("hf://o/set#test")
    assert source.names == ("cat", "dog") and len(list(source.records())) == 4
    (folder.parent / "x.jsonl").write_text((folder / "test.jsonl").read_text())
    (folder / "README.md").write_text(card.replace("path: test.jsonl", "path: ../x.jsonl"))
    with pytest.raises(UserError, match=r"its card names .*x\.jsonl; expected files of the set itself"):
        sources.open_source("hf://o/set#test")
    (folder / "README.md").write_text("---\nconfigs: [\n---\n")
    with pytest.raises(UserError, match="cannot be read"):
        sources.open_source("hf://o/set")


def test_images_are_named_by_their_name_alone_where_no_other_has_it(tmp_path):
    pictures(tmp_path / "set")
    table = lines(tmp_path / "set" / "a.csv", "image,label", "0,a", "1.png,b", "img/2.png,a", "none,b")
    with pytest.raises(UserError, match=r"columns image \(int64\), label \(string\); expected image in one of"):
        sources.open_source(lines(tmp_path / "set" / "b.csv", "image,label", "0,a", "1,b"))
    named = sources.open_source(tmp_path / "set" / "b.csv", columns={"image": "image"})
    assert [record.data.name for record in named.records()] == ["0.png", "1.png"]
    found = [record.data.relative_to(tmp_path / "set").as_posix() for record in sources.open_source(table).records()]
    assert found == ["img/0.png", "img/1.png", "img/2.png", "none"]
    (tmp_path / "set" / "other").mkdir()
    (tmp_path / "set" / "other" / "0.jpg").write_bytes(png(0))
    with pytest.raises(UserError, match=r"line 2 .*'0' is the name of 2 images: img/0\.png, other/0\.jpg"):
        list(sources.open_source(table).records())


@pytest.mark.parametrize(
    ("labels", "column", "said"),
    [
        (["insect", "ant", "insect ant"], "label", "insect ant"),
        (["insect ant", "insect bee", "bird"], "labels", "insect ant"),
        (["insect ant", "insect bee", "bird"], "label", None),
        (["polar bear", "brown bear", "American black bear"], "label", None),
        (["open", "shut, or nearly"], "label", None),
        (["Doe, John", "Doe, Jane"], "label", None),
        (["a|b", "b", "a"], "label", "a|b"),
    ],
)  # fmt: skip
def test_labels_that_are_several_in_one_are_refused(tmp_path, labels, column, said):
    pictures(tmp_path)
    rows = (f'img/{k % 4}.png,"{label}"' for k, label in enumerate(labels))
    table = lines(tmp_path / "a.csv", f"image,{column}", *rows)
    if said is None:
        assert [record.label for record in sources.open_source(table).records()] == labels
        return
    with pytest.raises(UserError) as told:
        sources.open_source(table)
    assert f"{column}: {said!r}; expected one class an image; several classes an image (multi-label)" in str(told.value)


def test_images_with_a_table_of_labels_are_no_scenes(tmp_path):
    root = laid_out("metadata", tmp_path / "set")
    (root / "metadata.csv").write_text((root / "metadata.csv").read_text().replace(",0", ",cat").replace(",1", ",dog"))
    assert not verify.holds_scenes(root)


# What is wrong is told in one message


@pytest.mark.parametrize("name", ["../x.png", "/etc/hostname", "link.png", "img/none.png", "file:///etc/hostname"])
@pytest.mark.parametrize("kind", ["csv", "metadata"])
def test_paths_stay_in_the_folder_of_the_table(tmp_path, kind, name):
    (tmp_path / "x.png").write_bytes(png(0))
    path = laid_out(kind, tmp_path / "set")
    (tmp_path / "set" / "link.png").symlink_to(tmp_path / "x.png")
    table = tmp_path / "set" / ("a.csv" if kind == "csv" else "metadata.csv")
    table.write_text(table.read_text().replace("img/2.png", name))
    with pytest.raises(UserError) as told:
        import_images.import_pictures(path, tmp_path / "out", size=(8, 8))
    assert str(path) in str(told.value) and not (tmp_path / "out").exists()
    if name == "img/none.png":
        assert "img/none.png" in str(told.value) and "1 unusable image" in str(told.value)


@pytest.mark.parametrize("cut", [700, 3000, -512, -1024, -9000])
def test_a_shard_that_is_cut_off_is_named_before_anything_is_read(tmp_path, cut):
    data = shard(tmp_path / "train-0.tar", *samples(0, 40)).read_bytes()
    end = data.rstrip(b"\0")
    for part in (data[:cut] if cut > 0 else data[: len(end) + cut],):
        (tmp_path / "train-1.tar").write_bytes(part)
        with pytest.raises(UserError, match=r"train-1\.tar: \d+ bytes that are truncated or not a tar file"):
            import_images.import_pictures(tmp_path, tmp_path / "out", size=(8, 8))
    assert not (tmp_path / "out").exists()


def test_what_is_packed_into_a_shard_stays_packed(tmp_path, monkeypatch):
    """300 MB of zeros in 300 KB, as a field of a sample: it is no image and no text, and is not read."""
    import gzip

    monkeypatch.setattr(image_decode, "BYTE_CAP", 10_000)
    bomb = gzip.compress(bytes(300 << 20), 9)
    path = shard(tmp_path / "a.tar", *samples(0, 1)[:2], ("s0.json.gz", bomb), ("s0.npy", b"\x93NUMPY"))
    tracemalloc.start()
    assert len(list(sources.open_source(path).records())) == 1
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()
    with pytest.raises(UserError, match=r"s0\.png: more than 10000 bytes"):
        sources.open_source(shard(tmp_path / "b.tar", ("s0.png", bytes(10_001)), ("s0.cls", b"0")))


LISTS = r"label: lists; expected one class an image; .*\(multi-label\)"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", "image,label\n", "no rows|cannot be read"),
        ("a.csv", "", r"a\.csv: cannot be read"),
        ("a.jsonl", '{"image": "img/0.png", "label": 0}\n{"image": ', r"a\.jsonl, line 2: cannot be read"),
        ("a.jsonl", '{"label": ' + "[" * 100_000, r"a\.jsonl, line 1: cannot be read \(RecursionError"),
        ("a.json", '[\n{"label": ' + "[" * 100_000, r"a\.json, line \d: cannot be read"),
        ("a.csv", "image,label\nimg/0.png,\nimg/1.png,1\n", r"a\.csv, line 2 \(img/0\.png\): label: None"),
        ("a.csv", "image,label\n3,0\n", r"columns image \(int64\), label \(int64\); expected image in one of"),
        ("a.csv", "image,label,label\nimg/0.png,0,1\n", "the column label more than once; expected each column once"),
        ("a.json", '{"image": 1}', r"columns image \(int64\); expected image"),
        ("a.json", '[{"image": "img/0.png", "label": ["a"]}, {"image": "img/1.png", "label": ["a", "b"]}]', LISTS),
        ("a.jsonl", "null", "a row that is not a mapping of columns"),
        ("a.parquet", {"image": [png(0), png(1)], "label": [["a"], ["a", "b"]]}, LISTS),
        ("a.parquet", {"image": [1, 2], "label": [0, 1]}, r"columns image \(int64\), label \(int64\); expected image"),
        ("a.tar", [("a.png", png(0)), ("a.cls", b"cat")], r"a\.tar, a\.cls: b'cat'; expected a whole number"),
        ("a.tar", [("a.png", png(0)), ("b.png", png(1)), ("b.cls", b"0")], "expected label in one of"),
        ("a.tar", [("a.png", png(0)), ("a.cls", b"0"), ("b.png", png(1))], "row 1 .*cls: None"),
        ("a.tar", [("a.txt", b"words")], "no image|columns"),
        ("a.tar", [("a.mp4", b"0" * 100)], r"a\.tar: no rows"),
        ("a.tar", [], r"a\.tar: no rows"),
    ],
)
def test_tables_that_cannot_be_used(tmp_path, name, content, said, caplog):
    pictures(tmp_path)
    if isinstance(content, str):
        (tmp_path / name).write_text(content)
    elif isinstance(content, dict):
        parquet(tmp_path / name, **content)
    else:
        shard(tmp_path / name, *content)
    with caplog.at_level(logging.WARNING), pytest.raises(UserError, match=said):
        list(sources.open_source(tmp_path / name).records())
    assert not [record for record in caplog.records if record.name.startswith("datasets")], "told twice"


def test_a_folder_of_classes_with_a_table_of_something_else_is_still_one(tmp_path):
    for name in ("cat/0.png", "dog/1.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(png(0))
    lines(tmp_path / "metadata.csv", "who,when", "a,b")
    lines(tmp_path / "README.md", "# Cats and dogs")
    assert sources.open_source(tmp_path).kind == "folder"


def test_datasets_is_imported_where_it_is_needed_alone():
    code = "import sys, trainkit, trainkit.cli.main, trainkit.data.sources, trainkit.data.images.dataset\n"
    code += "from trainkit.data import table\nsys.exit('datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ).returncode == 0
