"""Names of other trainers: each leads to an override that loads, in recipes, in overrides and on the command line."""

from __future__ import annotations

import functools
import re

import pytest
from click.testing import CliRunner
from runs import ROOT

from trainkit.cli import main
from trainkit.config import field_names
from trainkit.config.field_names import FIELD_NAMES, FieldName, find
from trainkit.config.loader import ConfigError, flat, load, parse
from trainkit.config.schema import TABLES, Recipe

CONVNEXT = ROOT / "recipes" / "convnext.yaml"
RECIPES = [ROOT / "recipes" / f"{name}.yaml" for name in ("convnext", "face_teacher", "segment", "tom500", "reid")]
CONTEXTS = (
    [],
    ["data.augment={name: timm}"],
    ["data.augment={name: light}"],
    ["task.mix.mixup=0.8"],
    ["task.net={model: convnext_atto.d2_in1k}"],
    ["task.net={name: smp, encoder: resnet18, decoder: unet}"],
    ["task.net={name: dynunet, filters: [8, 16, 32]}"],
    ["train.batch_size=64", "train.micro_batch=64"],
)
"""What a key may need beside it."""
COMMANDS = {"--resume"}
VARIABLES = {"TRAINKIT_STORE", "CUDA_VISIBLE_DEVICES", "MLFLOW_TRACKING_URI"}
WITH_EXAMPLE = [entry for entry in FIELD_NAMES if entry.example]


@functools.cache
def loads(override: str) -> bool:
    """Return whether one of the recipes loads with an override."""
    for recipe in RECIPES:
        for more in CONTEXTS:
            try:
                load(recipe, [*more, override])
            except ConfigError:
                continue
            return True
    return False


@functools.cache
def keys_of(recipe, *overrides: str) -> set[str]:
    return set(flat(load(recipe, overrides)))


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


# ---- The table -------------------------------------------------------------------------------------------------------


def test_each_name_stands_once_as_it_is_looked_up():
    names = [entry.name for entry in FIELD_NAMES]
    assert len(set(names)) == len(names) > 250
    assert all(find(name) is entry for name, entry in zip(names, FIELD_NAMES, strict=True))
    assert all(re.fullmatch("[a-z0-9_]+", name) for name in names)


def test_each_has_a_tool_and_a_counterpart_or_a_reason():
    assert all(entry.tool and (entry.ours or entry.note) for entry in FIELD_NAMES)
    other = {key for entry in FIELD_NAMES for key in entry.ours if not entry.is_key}
    assert other == COMMANDS | VARIABLES


@pytest.mark.parametrize("entry", WITH_EXAMPLE, ids=lambda entry: entry.name)
def test_each_converted_value_makes_an_override_that_loads(entry: FieldName):
    value = entry.convert(entry.example)
    assert value is not None
    key = entry.ours[0].replace("NAME", "val")
    if key == "stop_when.patience":
        assert loads(f"stop_when={{metric: val/top1, patience: {value}}}")
        return
    assert loads(f"{key}={value}")
    for other in entry.ours[1:]:
        assert any(loads(f"{other}={text}") for text in (value, f"[{value}, {value}]", f"[8, {value}, {value}]"))


@pytest.mark.parametrize("key", sorted({key for e in FIELD_NAMES if e.is_key and not e.example for key in e.ours}))
def test_keys_without_a_conversion_exist(key: str):
    known = set()
    for recipe in RECIPES:
        known |= keys_of(recipe)
        known |= keys_of(recipe, "train.schedule.warmup={over: 1 step}", "log.profile={at: 5}")
    known |= keys_of(RECIPES[2], *CONTEXTS[5])
    assert any(other == key or other.startswith(f"{key}.") for other in known)


def test_words_of_values_load():
    for entry in FIELD_NAMES:
        for word in entry.words if entry.is_key else ():
            value = entry.convert(word)
            needs_weights = entry.ours[0] == "task.net.tune" and value == "head"
            assert needs_weights or loads(f"{entry.ours[0].replace('NAME', 'val')}={value}"), (entry.name, word)


@pytest.mark.parametrize(
    ("name", "value", "converted"),
    [
        ("epochs", "10", "10 epochs"),
        ("epochs", "1", "1 epoch"),
        ("epochs", "ten", None),
        ("epochs", "-1", None),
        ("max_steps", "5000", "5000 steps"),
        ("val_check_interval", "0.25", "0.25 epochs"),
        ("val_check_interval", "200", "200 steps"),
        ("ims_per_gpu", "32", "32 per process"),
        ("use_amp", "1", "auto"),
        ("use_amp", "False", "no"),
        ("precision", "'bf16-mixed'", "bf16"),
        ("precision", "64-true", None),
        ("opt", "AdamW", "adamw"),
        ("opt", "lamb", None),
        ("accumulate", "2", None),
    ],
)
def test_values_convert(name, value, converted):
    entry = find(name)
    assert entry is not None and entry.convert(value) == converted


# ---- Messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("epochs=10", 'write train.length="10 epochs"'),
        ("max_epochs=1", 'write train.length="1 epoch"'),
        ("lr=0.1", "write optim.lr=0.1"),
        ("optim.learning_rate=0.1", "write optim.lr=0.1"),
        ("optim.wd=0.1", "write optim.weight_decay=0.1"),
        ("train.num_workers=4", "write loader.workers=4 ("),
        ("loader.prefetch_factor=4", "write loader.prefetch=4"),
        ("train.use_amp=true", "write train.precision=auto ("),
        ("compile_model=true", "write train.compile=default"),
        ("patience=5", 'write stop_when="{metric: val/ema/top1, patience: 5}" ('),
        ("val_eval_every_n_epoch=2", 'write evaluations.val.every="2 epochs"'),
        ("evaluations.val.batch=8", "write evaluations.val.batch_size=8"),
        ("reprob=0.2", "write data.augment.erase=0.2 ("),
        ("momentum=0.8", "it belongs in optim: write optim.momentum=0.8"),
        ("num_classes=10", "trainkit has no such setting; it is derived from the data"),
        ("resume=last", "use the option --resume; "),
        ("output_dir=runs", "use the environment variable TRAINKIT_STORE; "),
        ("accumulate=4", "trainkit's key is train.micro_batch ("),
        ("train.opt=lion", "trainkit's key is optim.name ("),
    ],
)
def test_an_override_of_another_trainer_is_answered_with_ours(override, remedy):
    key = override.partition("=")[0]
    assert problem(override).startswith(f"{key} (override '{override}'): unknown key; {remedy}")


def test_the_key_is_that_of_the_recipe_s_data():
    segment, tom500, reid = (ROOT / "recipes" / f"{name}.yaml" for name in ("segment", "tom500", "reid"))
    assert "write data.image_size=64" in problem("imgsz=64")
    assert 'write data.crop="[64, 64]"' in problem("img_size=[64, 64]", recipe=segment)
    assert "write data.patch=" in problem("patch_size=[8, 64, 64]", recipe=tom500)
    assert 'write task.norms="200 steps"' in problem("NORM_EVERY=200", recipe=reid)
    assert 'write log.every="200 steps"' in problem("NORM_EVERY=200")
    assert "which this recipe does not have" in problem("sync_bn=true")


def test_a_file_is_answered_with_the_block_to_write_in():
    text = CONVNEXT.read_text() + "epochs: 10\nloader: {num_workers: 4}\nseeed: 3\n"
    with pytest.raises(ConfigError) as caught:
        parse(Recipe, text, "x.yaml", (), TABLES)
    said = str(caught.value)
    assert "unknown key; write `length: 10 epochs` in train" in said
    assert "unknown key; write `workers: 4` in loader (" in said
    assert "unknown key, did you mean 'seed'?" in said


def test_a_near_spelling_of_a_key_of_the_block_is_still_named():
    assert problem("train.lenght=3").endswith("unknown key, did you mean 'length'?")
    assert problem("optim.LR=3").endswith("unknown key, did you mean 'lr'?")


def test_an_unknown_option_is_answered_with_an_override():
    said = advised("run", "convnext", "--epochs", "10")
    assert said == "error: No such option '--epochs'; write train.length=\"10 epochs\"\n"


def test_all_unknown_options_are_answered_at_once():
    said = advised("run", "convnext", "--epochs", "10", "--lr=0.1", "--use_amp", "--num-workers", "4", "seed=1")
    assert said.splitlines()[0] == "error: No such options; change the recipe with KEY=VALUE instead"
    assert '\n  --epochs: write train.length="10 epochs"\n' in said
    assert "\n  --lr: write optim.lr=0.1\n" in said
    assert "\n  --use_amp: write train.precision=auto (" in said
    assert "\n  --num-workers: write loader.workers=4 (" in said


def test_a_flag_does_not_take_the_recipe_for_its_value():
    assert "write train.compile=default" in advised("run", "--compile_model", "convnext")
    assert "write train.batch_size=64" in advised("run", "convnext", "-b", "64")


def test_commands_without_overrides_and_unknown_words_are_answered_as_before():
    assert "write" not in advised("ls", "--epochs", "3")
    assert "No such option '--loud'" in advised("run", "convnext", "--loud")
    assert field_names.of_options(["--loud", "--seeds", "3"], {"--seeds"}) == ""
