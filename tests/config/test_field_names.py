"""Names of other trainers: each is answered with trainkit's key, in recipes, in overrides and on the command line."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner
from runs import ROOT

from trainkit.cli import main
from trainkit.config.field_names import FIELD_NAMES, find
from trainkit.config.loader import ConfigError, flat, load

RECIPES = [ROOT / "recipes" / f"{name}.yaml" for name in ("convnext", "face_teacher", "segment", "tom500", "reid")]
NO_KEYS = {"--resume", "TRAINKIT_STORE", "CUDA_VISIBLE_DEVICES"}


def test_each_counterpart_is_a_key_of_a_recipe():
    known = set()
    for recipe in RECIPES:
        words = ["train.schedule.warmup={over: 1 step}"]
        words += ["stop_when={metric: val/top1, patience: 2}"] if recipe.stem == "convnext" else []
        known |= set(flat(load(recipe, words)))
    known = {re.sub(r"^evaluations\.\w+\.", "evaluations.NAME.", key) for key in known}
    ours = {key for keys in FIELD_NAMES.values() for key in keys} - NO_KEYS
    assert not [key for key in ours if not any(other == key or other.startswith(f"{key}.") for other in known)]
    assert find("--max-epochs") == find("MAX_EPOCHS") == ("train.length",) and len(FIELD_NAMES) <= 60


@pytest.mark.parametrize(
    ("recipe", "override", "remedy"),
    [
        ("convnext", "epochs=10", "trainkit's key is train.length"),
        ("convnext", "optim.learning_rate=0.1", "trainkit's key is optim.lr"),
        ("convnext", "check_val_every_n_epoch=2", "trainkit's key is evaluations.NAME.every"),
        ("convnext", "evaluations.val.batch=8", "trainkit's key is evaluations.val.batch_size"),
        ("convnext", "resume=last", "use the option --resume"),
        ("convnext", "output_dir=runs", "use the environment variable TRAINKIT_STORE"),
        ("convnext", "imgsz=64", "trainkit's key is data.image_size"),
        ("segment", "imgsz=64", "trainkit's key is data.crop"),
        ("tom500", "imgsz=64", "trainkit's key is data.patch"),
        ("convnext", "lr=0.1", "it belongs in optim"),
    ],
)
def test_a_key_of_another_trainer_is_answered_with_ours(recipe, override, remedy):
    with pytest.raises(ConfigError) as caught:
        load(ROOT / "recipes" / f"{recipe}.yaml", [override])
    key = override.partition("=")[0]
    (problem,) = caught.value.problems
    assert str(problem) == f"{key} (override '{override}'): unknown key; {remedy}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run convnext --epochs 10", "error: No such option '--epochs'; trainkit's key is train.length"),
        ("run convnext --loud", "error: No such option '--loud'"),
        ("ls --epochs 3", "error: No such option '--epochs'; see"),
    ],
)
def test_an_option_of_another_trainer_is_answered_with_a_key_where_the_command_takes_keys(words, said):
    result = CliRunner().invoke(main.main, words.split())
    assert result.exit_code == 2 and said in result.output.replace('"', "'")
