"""The table of kinds of data: its names resolve, and a plug-in's kind is trained, predicted, exported and fitted."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from runs import PLUGIN, newest

from trainkit.cli import main
from trainkit.config import loader
from trainkit.config.run_request import RunRequest
from trainkit.config.schema import TABLES
from trainkit.data import kinds
from trainkit.data.images.dataset import Images
from trainkit.errors import UserError
from trainkit.experiments.launch import launch

PACKAGES = {
    "open": "trainkit.data", "holds": "trainkit.data", "verify": "trainkit.data", "configure": "trainkit.autoconfig",
    "predict": "trainkit.inference", "predictor": "trainkit.inference", "export": "trainkit.export",
}  # fmt: skip

RECIPE = """name: tiles
task: {name: toy, norm: false, dropout: 0}
data: {name: tiles, train: TRAIN, test: TEST}
optim: {name: adamw, lr: 0.01}
train: {length: 20 steps, batch_size: 16}
evaluations: {val: {at_end: true}}
log: {system_every: null}
"""


@pytest.mark.parametrize("kind", kinds.KINDS.values(), ids=list(kinds.KINDS))
def test_each_name_is_a_function_in_the_package_of_its_verb(kind):
    assert set(PACKAGES) == set(kinds.VERBS)
    for verb in kinds.VERBS:
        dotted, found = getattr(kind, verb), kinds.function(kind, verb)
        assert (found is None) == (dotted is None)
        if found is not None:
            assert callable(found) and f"{found.__module__}:{found.__qualname__}" == dotted
            assert found.__module__.startswith(f"{PACKAGES[verb]}."), verb


def test_functions_take_what_they_are_called_with():
    called = {"configure": 3, "predict": 1, "predictor": 1, "export": 1, "holds": 1}
    for kind in kinds.KINDS.values():
        for verb, count in called.items():
            if found := kinds.function(kind, verb):
                inspect.signature(found).bind(*range(count))
        if found := kinds.function(kind, "verify"):
            inspect.signature(found).bind("path", against=())


def test_each_data_block_of_recipes_has_a_row_that_opens_it():
    assert {name: kind.open for name, kind in kinds.KINDS.items()} == TABLES["data"]


def test_a_block_is_of_the_kind_that_its_class_inherits_from():
    class Mine(Images):
        pass

    mine = object.__new__(Mine)
    assert kinds.of(mine) is kinds.KINDS["images"] and kinds.of(object()) is None


def test_a_name_that_is_taken_and_a_name_of_no_function_are_refused(monkeypatch):
    monkeypatch.setattr(kinds, "KINDS", dict(kinds.KINDS))
    faces = kinds.KINDS["faces"]
    kinds.add(faces)  # a plug-in that is imported again
    with pytest.raises(UserError, match="'faces': already exists"):
        kinds.add(replace(faces, verify=None))
    with pytest.raises(UserError, match=r"predict of the kind of data 'x': 'a\.b'; expected package\.module:function"):
        kinds.add(kinds.Kind(name="x", open="a:B", predict="a.b"))


@pytest.fixture
def tiles(tmp_path, monkeypatch):
    """A recipe of the kind `tiles`, which tests/plugin/tiles adds, and its sets."""
    monkeypatch.setattr(kinds, "KINDS", dict(kinds.KINDS))
    monkeypatch.syspath_prepend(str(PLUGIN))
    draw = np.random.default_rng(0)
    for name, count in (("train", 16), ("test", 8)):
        for label in range(4):
            folder = tmp_path / name / f"corner{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                tile = draw.normal(0, 1, (3, 8, 8)).astype(np.float32)
                tile[0, label, label] += 9
                np.save(folder / f"{number}.npy", tile)
    text = RECIPE.replace("TRAIN", str(tmp_path / "train")).replace("TEST", str(tmp_path / "test"))
    (tmp_path / "tiles.yaml").write_text(text)
    yield tmp_path
    for module in [name for name in sys.modules if name.partition(".")[0] == "tiles"]:
        del sys.modules[module]


def ask(*words, code=0):
    plugins = ("--plugin", "toy", "--plugin", "tiles")
    done = CliRunner().invoke(main.main, [*map(str, words), *plugins], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output


def test_the_kind_of_a_plug_in_is_trained_predicted_and_exported(tiles):
    assert launch(RunRequest(tiles / "tiles.yaml", (), ("toy", "tiles")), lambda: False) == 0
    run = newest().name
    said = ask("predict", run, tiles / "test" / "corner2", tiles / "out.csv")
    assert "8 rows of id, class" in said
    rows = (tiles / "out.csv").read_text().splitlines()
    assert rows[0] == "id,class" and sum(row.endswith(",corner2") for row in rows[1:]) >= 7
    ask("export", run, tiles / "out", "--format", "safetensors")
    about = json.loads((tiles / "out" / "model.json").read_text())
    assert about["names"][2] == "corner2" and about["checked"]["model.safetensors"]["same"] == 1


def test_the_kind_of_a_plug_in_is_verified(tiles):
    assert "0 problems" in ask("data", "verify", tiles / "test")
    np.save(tiles / "test" / "corner0" / "0.npy", np.zeros((1, 8, 8), np.float32))
    assert "0.npy: (1, 8, 8)" in ask("data", "verify", tiles / "test", code=2)
    assert "--names is for NIfTI files and for masks" in ask("data", "verify", tiles, "--names", "a", code=2)


def test_a_recipe_is_fitted_to_other_data_of_the_kind_of_a_plug_in(tiles):
    new = tiles / "mine.yaml"
    said = ask("cp", tiles / "tiles.yaml", new, "--data", tiles / "test")
    assert "32 tiles of 4 classes" in said + new.read_text()
    assert loader.load(new, (), ("toy", "tiles")).data.train == str(tiles / "test")
