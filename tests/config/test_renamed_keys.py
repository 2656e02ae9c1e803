"""Recipe keys that were renamed: recipes and runs from before are read, with equal digests."""

from __future__ import annotations

import hashlib
import json

import pytest
import yaml
from runs import ROOT

from trainkit import errors
from trainkit.config import diff, loader
from trainkit.config.loader import ConfigError

RECIPE = ROOT / "recipes" / "adadistill.yaml"


@pytest.fixture
def hints(capsys):
    errors.hint_renamed.cache_clear()
    yield lambda: capsys.readouterr().err
    errors.hint_renamed.cache_clear()


def old_recipe(tmp_path, *more: str):
    text = loader.dump(loader.load(RECIPE, ["task.matmul_dtype=bf16"]))
    old = tmp_path / "old.yaml"
    old.write_text(text.replace("matmul_dtype: bf16", "\n  ".join(["products: bf16", *more])))
    return old


def test_a_recipe_with_the_old_key_is_the_same_experiment(tmp_path, hints):
    new, old = loader.load(RECIPE, ["task.matmul_dtype=bf16"]), loader.load(old_recipe(tmp_path))
    assert new == old and loader.digest(new) == loader.digest(old)
    assert hints() == "hint: task.products is called task.matmul_dtype now; the old name goes with 1.0\n"


def test_the_digest_is_the_one_that_runs_were_begun_with(monkeypatch):
    plain = loader.load(RECIPE)
    hashed = []
    monkeypatch.setattr(hashlib, "sha256", lambda text, plain=hashlib.sha256: hashed.append(text) or plain(text))
    loader.digest(plain)
    task = json.loads(hashed[0])["task"]
    assert task["products"] == "float32" and "matmul_dtype" not in task


def test_an_override_may_use_the_old_key(hints):
    task = yaml.safe_load(loader.dump(loader.load(RECIPE)))["task"]
    task["products"] = "bf16"
    del task["matmul_dtype"]
    for word in ("task.products=bf16", f"task={json.dumps(task)}"):
        assert loader.load(RECIPE, [word]).task.matmul_dtype == "bf16"
    assert "task.products is called task.matmul_dtype" in hints()


def test_an_override_of_the_new_key_replaces_the_old_one(tmp_path):
    assert loader.load(old_recipe(tmp_path), ["task.matmul_dtype=float32"]).task.matmul_dtype == "float32"


def test_both_names_at_once_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"task.products \(line \d+\): unknown key"):
        loader.load(old_recipe(tmp_path, "matmul_dtype: bf16"))
    with pytest.raises(ConfigError, match="given twice"):
        loader.load(RECIPE, ["task.products=bf16", "task.matmul_dtype=bf16"])


def test_a_run_from_before_differs_in_nothing_for_it(tmp_path):
    before = diff.read(old_recipe(tmp_path))
    new = tmp_path / "new.yaml"
    new.write_text(loader.dump(loader.load(RECIPE, ["task.matmul_dtype=bf16"])))
    assert diff.diff(before, diff.read(new)) == []
