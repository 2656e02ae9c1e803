"""Recipe keys that are no more: stored runs are opened at their defaults; another value is refused for a training."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from runs import ROOT, stripes
from untrained_runs import made

from trainkit.cli import main
from trainkit.config import diff, loader
from trainkit.config.loader import ConfigError
from trainkit.errors import EXIT_CODE

RECIPES = ROOT / "recipes"
STORED = ROOT / "tests" / "golden" / "resolved_before_drops"
"""Recipes as the commit before these drops resolved them, with the digests that it took."""
DIGESTS = {
    "adadistill": "86aad94518b193df2cb77674d9d4e5daf89eb6f0102f3bd0797192ece426ceb7",
    "reid": "dd9c546fcf32bf866c89ea19ddef8724014b44100eace24afdbd43ac1ee064a4",
    "tom500": "5c1bce3e431106d98e8259301ae6e87339bd574765cd68f36b2639e42d0541d0",
}
DROPPED = [
    ("convnext", "time_to", {}, {"val/top1": [0.6]}, "every score by its step"),
    ("hippocampus", "data.clinical", None, "t.csv", "per_case_last.csv"),
    ("tom500", "data.cache", "auto", "ram", "prepared volumes are memory-mapped"),
    ("hippocampus", "data.channels", None, ["T1w", "FLAIR"], "channel_names"),
    ("tom500", "data.augment.elastic", None, {"p": 0.2}, "rotate and scale change the shape"),
    ("adadistill", "task.products", "float32", "bf16", "multiplied in float32"),
    ("adadistill", "task.matmul_dtype", "float32", "bf16", "multiplied in float32"),
    ("adadistill", "task.duplicates", "last", "sequential", "the last one moves its centre"),
    ("segment", "task.objective.boundary", 0.0, 0.5, "use near"),
    ("segment", "task.points.coarse_each_layer", False, True, "remove it"),
    ("convnext", "task.net.frozen", False, True, "use probe"),
    ("omniglot", "task.net.frozen", False, True, "at a lower rate"),
    ("reid", "task.net.text.dropout", 0.0, 0.1, "use data.token_dropout"),
    ("reid", "task.net.text.tune", "all", "lora", "train the text encoder whole"),
    ("reid", "task.net.text.lora", None, {"rank": 2}, "train the text encoder whole"),
    (
        "reid_orbench",
        "task.net.lora.match",
        ["*.attn.qkv", "*.attn.proj", "*.mlp.fc1", "*.mlp.fc2"],
        ["*.attn.qkv"],
        "set layers",
    ),
    ("reid", "task.net.fusion.dropout", 0.0, 0.1, "use optim.weight_decay"),
    ("reid", "data.queries", "all", "one", "every combination of the modalities"),
    ("reid", "data.same_camera", "ignore", "keep", "leave out the column `camera`"),
    ("reid", "data.sampler.short", "repeat", "drop", "come again in a draw"),
    ("reid", "data.sampler.half", False, True, "one of the K records is RGB"),
    ("reid", "data.sampler.ensure_rgb", True, False, "use the sampler pk"),
    ("reid", "data.sampler.prefer_complete", True, False, "one record of each modality"),
    ("reid_market", "data.sampler.short", "repeat", "drop", "come again in a draw"),
    ("reid_orbench", "data.sampler.epoch", "anchors", "people", "set batches_per_epoch"),
    ("reid", "task.circle", None, {"margin": 0.3}, "use triplet or contrast"),
    ("tom500", "task.objective.focal", 0.0, 1.0, "weight dice and ce"),
    ("hippocampus", "task.objective.tversky", 0, 0.5, "weight dice and ce"),
    ("tom500_emcad", "task.objective.focal_gamma", 2.0, 3.0, "weight dice and ce"),
    ("tom500", "task.objective.tversky_alpha", 0.3, 0.5, "weight dice and ce"),
    ("tom500", "task.objective.tversky_beta", 0.7, 0.5, "weight dice and ce"),
    ("convnext", "promote.max_slower", 0.1, 0.3, "compare the throughput of runs with trainkit compare"),
    ("convnext", "promote.metric", None, "val/top1", "best.metric decides"),
    ("tom500", "train.spikes", None, {"policy": "rollback"}, "losses that jump are not looked for"),
    ("reid", "train.replay", None, {"every": "1k steps"}, "steps are not computed twice"),
    ("reid", "train.nonfinite", "stop", "rollback", "use skip"),
    ("face_teacher", "data.fit", "square", "align", "use crop"),
]
"""Recipe, key, its default, another value, and what the refusal says."""
each_key = pytest.mark.parametrize(("name", "key", "default", "other", "said"), DROPPED)


def recipe_of(name: str, tmp_path: Path) -> Path:
    """A shipped recipe that promotes its run."""
    recipe = tmp_path / f"{name}.yaml"
    recipe.write_text(f"{(RECIPES / recipe.name).read_text()}\npromote: {{}}\n")
    return recipe


def with_key(text: str, key: str, value: object) -> str:
    """A resolved recipe that has a key more."""
    tree = yaml.safe_load(text)
    *path, last = key.split(".")
    block = tree
    for word in path:
        block = block[word]
    block[last] = value
    return yaml.safe_dump(tree, sort_keys=False)


@pytest.mark.parametrize("name", DIGESTS)
def test_a_recipe_that_a_run_stored_before_is_that_of_today(name):
    today = loader.load(RECIPES / f"{name}.yaml")
    for stored in (True, False):
        assert loader.load(STORED / f"{name}.yaml", stored=stored) == today
    assert loader.digest(today) == DIGESTS[name]


@each_key
def test_a_dropped_key_is_read_at_its_default(tmp_path, name, key, default, other, said):
    recipe, stored, now = recipe_of(name, tmp_path), tmp_path / "stored.yaml", tmp_path / "now.yaml"
    new = loader.load(recipe)
    now.write_text(loader.dump(new))
    stored.write_text(with_key(now.read_text(), key, default))
    word = f"{key}={'null' if default is None else default}"
    assert loader.load(stored) == loader.load(recipe, [word]) == new
    assert loader.digest(loader.load(stored)) == loader.digest(new)
    assert diff.diff(diff.read(stored), diff.read(now)) == []


@each_key
def test_another_value_is_refused_for_a_training_and_left_out_of_a_stored_run(
    tmp_path, name, key, default, other, said
):
    recipe, stored = recipe_of(name, tmp_path), tmp_path / "stored.yaml"
    new = loader.load(recipe)
    stored.write_text(with_key(loader.dump(new), key, other))
    refused = rf"1 problem\n.*{key} \(.*is no longer a .*{said}"
    for of_run in (False, True):
        with pytest.raises(ConfigError, match=refused):
            loader.load(stored, stored=of_run, trains=of_run)
    assert loader.load(stored, stored=True) == new
    for path, of_run in ((recipe, False), (stored, True)):
        with pytest.raises(ConfigError, match=refused):
            loader.load(path, [f"{key}={yaml.safe_dump(other, default_flow_style=True).splitlines()[0]}"], (), of_run)


def test_a_stored_run_with_a_dropped_key_is_used_and_not_resumed(tmp_path):
    stripes(tmp_path / "train", 4, 0)
    stripes(tmp_path / "val", 3, 1)
    words = [f"data.train={tmp_path}/train", f"data.evaluate={{val: {tmp_path}/val}}", "train.batch_size=4"]
    net = "task.net={model: test_convnext3, args: {patch_size: 2, ls_init_value: 0.5}}"
    run = made(RECIPES / "convnext.yaml", *words, net)
    run.folder.recipe.write_text(with_key(run.folder.recipe.read_text(), "train.spikes", {"policy": "rollback"}))

    def command(*given):
        return CliRunner().invoke(main.main, list(map(str, given)))

    for done in (
        command("evaluate", run.name, "--no-log"),
        command("predict", run.name, tmp_path / "val", tmp_path / "out.parquet"),
        command("export", run.name, tmp_path / "exported", "--to", "safetensors"),
    ):
        assert done.exit_code == 0, done.output
    for refused in (command("run", "--resume", run.name), command("cp", run.name, tmp_path / "new.yaml")):
        assert refused.exit_code == EXIT_CODE, refused.output
        assert "train.spikes" in refused.output and "is no longer a key" in refused.output
