"""Sets of the hub, of which one on this machine is asked: downloaded, and each mistake in one message."""

from __future__ import annotations

import json
from pathlib import Path

import fake_hub
import pytest
from table_sets import lines, parquet, png, samples, shard, squares

from trainkit.data import hub
from trainkit.errors import UserError


def _parquet(file: Path, rows: int) -> None:
    parquet(file, img=[png(k) for k in range(rows)], fine=[k % 2 for k in range(rows)])


def _sets(root: Path) -> None:
    for split, rows in (("train", 6), ("test", 2)):
        _parquet(root / "o" / "plain" / "words" / f"{split}-00000-of-00001.parquet", rows)
        _parquet(root / "o" / "card" / "a" / f"{split}.parquet", rows)
        _parquet(root / "o" / "card" / "b" / f"{split}.parquet", rows)
    configs = "".join(f"- config_name: {c}\n  data_files:\n  - split: train\n    path: {c}/train*\n" for c in "ab")
    (root / "o" / "card" / "README.md").write_text(f"---\nconfigs:\n{configs}---\nSome images.\n")
    folder = root / "o" / "folder"
    lines(folder / "metadata.csv", "file_name,label", *(f"{path},{k % 2}" for k, path in enumerate(squares(folder))))
    for name, first in (("train-0.tar", 0), ("train-1.tar", 3)):
        shard(root / "o" / "shards" / name, *samples(first, 3))
    (root / "o" / "code").mkdir()
    (root / "o" / "code" / "code.py").write_text("raise SystemExit('this ran')\n")
    (root / "o" / "text").mkdir()
    (root / "o" / "text" / "train.txt").write_text("words\n")
    (root / "o" / "astray").mkdir()
    (root / "o" / "astray" / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: hf://datasets/o/plain/words/train*\n---\n"
    )


def _digest(out: Path) -> str:
    return json.loads((out / "manifest.json").read_text())["digest"]


@pytest.mark.slow
def test_sets_of_the_hub_are_downloaded_and_mistakes_are_told(tmp_path):
    _sets(tmp_path / "hub")
    named = ["--columns", "image=img,label=fine"]
    wanted = {
        "kept": ["hf://o/plain#train", *named],
        "revision": ["hf://o/plain/words@refs/convert/parquet#test", *named],
        "folder": ["hf://o/folder"],
        "shards": ["hf://o/shards"],
        "config": ["hf://o/card/b", *named],
    }
    refused = {
        "no config": (["hf://o/card"], "pick one among the available configs: ['a', 'b']"),
        "other config": (["hf://o/card/c"], "hf://o/card/c: cannot be read"),
        "code": (["hf://o/code"], "read without code of its own"),
        "split": (["hf://o/plain#val", *named], "no such split; available: test, train"),
        "none": (["hf://o/none"], "hf://o/none: cannot be read (DatasetNotFoundError"),
        "kind": (["hf://o/text"], "files of the kind text; expected one of csv, imagefolder"),
        "column": (
            ["hf://o/plain", "--columns", "label=fin,image=img"],
            "no column 'fin'; expected one of its columns",
        ),
        "astray": (["hf://o/astray"], "Data files don't belong to o/astray"),
    }
    commands = [
        ["data", "import", words[0], tmp_path / name, "--size", "8x8", *words[1:]] for name, words in wanted.items()
    ]
    commands += [
        ["data", "import", words[0], tmp_path / "no", "--size", "8x8", *words[1:]] for words, _ in refused.values()
    ]
    with fake_hub.serving(tmp_path / "hub", tmp_path / "home") as served:
        found = served.run(*commands)
    for name, (code, said) in zip(wanted, found, strict=False):
        assert code == 0, (name, said)
    for (name, (_, text)), (code, said) in zip(refused.items(), found[len(wanted) :], strict=True):
        assert code == 2 and text in said and "Traceback" not in said and said.count("\n") <= 3, (name, said)
    assert not (tmp_path / "no").exists()
    assert _digest(tmp_path / "kept") == _digest(tmp_path / "config")
    # Of a set with several configurations, only one is downloaded.
    kept = (tmp_path / "home" / "hub" / "datasets--o--card").rglob("*.parquet")
    assert {file.parent.name for file in kept} == {"b"}


def test_a_name_is_divided_into_its_parts():
    name = hub.parse("hf:/o/n/config@refs/convert/parquet#test")  # as a Path writes it
    assert name == hub.HubName("o/n", "config", "refs/convert/parquet", "test")
    assert hub.parse("hf://o/n") == hub.HubName("o/n", None, None, None)
    wrong = ("hf://owner", "hf://../x", "hf://owner/name#", "hf://owner/name#a/b", "hf://o/n@#x")
    for text in (*wrong, "hf://o/n/a/b", "hf://o/n@../x", "hf://o/n@a//b", "hf://o/n@/a"):
        with pytest.raises(UserError, match="not the name of a data set"):
            hub.parse(text)
