"""Names of other trainers: each is answered with trainkit's key, in recipes, in overrides and on the command line."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner
from runs import ROOT

from trainkit.cli import main
from trainkit.config import field_names
from trainkit.config.field_names import FIELD_NAMES, find
from trainkit.config.loader import ConfigError, flat, load, parse
from trainkit.config.schema import TABLES, Recipe

CONVNEXT = ROOT / "recipes" / "convnext.yaml"
RECIPES = [ROOT / "recipes" / f"{name}.yaml" for name in ("convnext", "face_teacher", "segment", "tom500", "reid")]
NO_KEYS = {"--resume", "TRAINKIT_STORE", "CUDA_VISIBLE_DEVICES"}


def problem(*overrides: str, recipe=CONVNEXT) -> str:
    """The only problem of a recipe with these overrides."""
    with pytest.raises(ConfigError) as caught:
        load(recipe, overrides)
    (found,) = caught.value.problems
    return str(found)


def advised(*args: str) -> str:
    result = CliRunner().invoke(main.main, args)
    assert result.exit_code == 2
    return result.output


def test_each_name_stands_once_as_it_is_looked_up():
    assert len(FIELD_NAMES) == sum(len(names.split()) for names in field_names._NAMES.values())
    assert all(re.fullmatch("[a-z0-9_]+", name) and find(name) for name in FIELD_NAMES)
    assert find("--max-epochs") == find("MAX_EPOCHS") == ("train.length",) and len(FIELD_NAMES) <= 60


def test_each_counterpart_is_a_key_of_a_recipe():
    known = set()
    for recipe in RECIPES:
        words = ["train.schedule.warmup={over: 1 step}"]
        words += ["stop_when={metric: val/top1, patience: 2}"] if recipe == CONVNEXT else []
        known |= set(flat(load(recipe, words)))
    known = {re.sub(r"^evaluations\.\w+\.", "evaluations.NAME.", key) for key in known}
    ours = {key for keys in FIELD_NAMES.values() for key in keys} - NO_KEYS
    assert not [key for key in ours if not any(other == key or other.startswith(f"{key}.") for other in known)]


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("epochs=10", "trainkit's key is train.length"),
        ("optim.learning_rate=0.1", "trainkit's key is optim.lr"),
        ("optim.wd=0.1", "trainkit's key is optim.weight_decay"),
        ("train.num_workers=4", "trainkit's key is loader.workers"),
        ("batch_size=64", "trainkit's key is train.batch_size"),
        ("patience=5", "trainkit's key is stop_when.patience"),
        ("check_val_every_n_epoch=2", "trainkit's key is evaluations.val.every"),
        ("evaluations.val.batch=8", "trainkit's key is evaluations.val.batch_size"),
        ("resume=last", "use the option --resume"),
        ("output_dir=runs", "use the environment variable TRAINKIT_STORE"),
        ("lr=0.1", "it belongs in optim: write optim.lr=0.1"),
        ("momentum=0.8", "it belongs in optim: write optim.momentum=0.8"),
    ],
)
def test_an_override_of_another_trainer_is_answered_with_ours(override, remedy):
    key = override.partition("=")[0]
    assert problem(override) == f"{key} (override '{override}'): unknown key; {remedy}"


def test_the_key_is_that_of_the_recipe_s_data():
    segment, tom500 = (ROOT / "recipes" / f"{name}.yaml" for name in ("segment", "tom500"))
    assert problem("imgsz=64").endswith("trainkit's key is data.image_size")
    assert problem("img_size=[64, 64]", recipe=segment).endswith("trainkit's key is data.crop")
    assert problem("patch_size=[8, 64, 64]", recipe=tom500).endswith("trainkit's key is data.patch")


def test_a_file_is_answered_with_the_key():
    text = CONVNEXT.read_text() + "epochs: 10\nloader: {num_workers: 4}\nseeed: 3\n"
    with pytest.raises(ConfigError) as caught:
        parse(Recipe, text, "x.yaml", (), TABLES)
    said = str(caught.value)
    assert "unknown key; trainkit's key is train.length" in said
    assert "unknown key; trainkit's key is loader.workers" in said
    assert "unknown key, did you mean 'seed'?" in said


def test_a_near_spelling_of_a_key_of_the_block_is_still_named():
    assert problem("train.lenght=3").endswith("unknown key, did you mean 'length'?")
    assert problem("optim.LR=3").endswith("unknown key, did you mean 'lr'?")


def test_unknown_options_are_answered_with_keys():
    assert advised("run", "convnext", "--epochs", "10") == (
        "error: No such option '--epochs'; trainkit's key is train.length\n"
    )
    said = advised("run", "convnext", "--epochs", "10", "--learning-rate=0.1", "--num-workers", "4", "seed=1")
    assert said.splitlines() == [
        "error: No such options; change the recipe with KEY=VALUE instead",
        "  --epochs: trainkit's key is train.length",
        "  --learning-rate: trainkit's key is optim.lr",
        "  --num-workers: trainkit's key is loader.workers",
    ]


def test_commands_without_overrides_and_unknown_words_are_answered_as_before():
    assert "trainkit's key" not in advised("ls", "--epochs", "3")
    assert "No such option '--loud'" in advised("run", "convnext", "--loud")
    assert field_names.of_options(["--loud", "--seeds", "3"], {"--seeds"}) == ""
