"""What passes `check` starts: it ends with the message that `run` would end with, before a run is begun."""

from __future__ import annotations

import shutil
from pathlib import Path

import people_sets
import pytest
from click.testing import CliRunner
from runs import PLUGIN, ROOT, TOY
from safetensors.torch import save_file

from trainkit.cli import main
from trainkit.config import loader
from trainkit.config.run_request import RunRequest, Sweep, load
from trainkit.errors import UserError
from trainkit.experiments import recipe_check
from trainkit.experiments.launch import launch
from trainkit.tracking.store import Store

CONVNEXT = ROOT / "recipes" / "convnext.yaml"
NET = "task.net={model: test_convnext3, args: {patch_size: 2, ls_init_value: 0.5}}"


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _home(database, cache, monkeypatch):
    shutil.copy(database, Store.locate().home / "mlflow.db")
    monkeypatch.setenv("TRAINKIT_CACHE", str(cache))


def words(pictures: Path, *more: str) -> tuple[str, ...]:
    given = {word.partition("=")[0] for word in more}
    own = (f"data.train={pictures / 'train'}", f"data.evaluate={{val: {pictures / 'val'}}}", NET,
           "train.batch_size=4", "train.length=6 steps", "log.system_every=null", "log.ceilings=off",
           "evaluations={val: {at_end: true}}", "best=null", "promote=null", "stop_when=null")  # fmt: skip
    return (*(word for word in own if word.partition("=")[0] not in given), *more)


def torn(folder: Path) -> list[str]:
    shutil.copytree(folder / "train", folder / "torn", dirs_exist_ok=True)
    file = sorted((folder / "torn").rglob("*.png"))[0]
    file.write_bytes(file.read_bytes()[:60])
    return [f"data.train={folder / 'torn'}"]


def one_class(folder: Path) -> list[str]:
    first = sorted(path for path in (folder / "train").iterdir() if path.is_dir())[0]
    shutil.copytree(first, folder / "one" / first.name, dirs_exist_ok=True)
    return [f"data.train={folder / 'one'}"]


def weights(folder: Path) -> list[str]:
    import torch

    save_file({"conv.weight": torch.zeros(2, 2)}, folder / "other.safetensors")
    return [f"task.net={{model: test_convnext3, weights: {folder / 'other.safetensors'}}}"]


MISTAKES = {
    "a name that timm has not": (lambda folder: ["task.net={model: convnext_atoo}"], "no model 'convnext_atoo'"),
    "an argument that the network has not": (
        lambda folder: ["task.net={model: test_convnext3, args: {patchsize: 2}}"],
        "patchsize",
    ),
    "images too small for the network": (
        lambda folder: ["task.net={model: convnext_atto}", "data.image_size=24"],
        "does not take 3 x 24 x 24 images",
    ),
    "a folder that is not there": (lambda folder: [f"data.train={folder / 'nowhere'}"], "nowhere: does not exist"),
    "an evaluation set that is not there": (
        lambda folder: [f"data.evaluate={{val: {folder / 'nowhere'}}}"],
        "nowhere: does not exist",
    ),
    "a split that is not there": (lambda folder: [f"data.train={folder}#training"], "#training: no such split"),
    "an evaluation of no set": (lambda folder: ["evaluations={test: {at_end: true}}"], "no evaluation set 'test'"),
    "an image that cannot be read": (torn, "cannot be decoded"),
    "other classes": (one_class, "at least 2"),
    "more samples than there are": (lambda folder: ["train.batch_size=400"], "400, but the data has 12 samples"),
    "weights that are not there": (
        lambda folder: ["task.net={model: test_convnext3, weights: nowhere.safetensors}"],
        "nowhere.safetensors does not exist",
    ),
    "weights of another network": (weights, "does not fit"),
    "a warm-up that is longer": (lambda folder: ["train.schedule={warmup: {over: 9 epochs}}"], "the warm-up"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_check_ends_with_the_message_with_which_run_ends(pictures, mistake):
    make, said = MISTAKES[mistake]
    given = words(pictures, *make(pictures))
    with pytest.raises(UserError) as ran:
        launch(RunRequest(CONVNEXT, given), lambda: False)
    done = CliRunner().invoke(main.main, ["check", str(CONVNEXT), *given])
    assert said in str(ran.value)
    assert done.exit_code == 2 and done.stderr.endswith(f"error: {ran.value}\n"), (done.stderr, str(ran.value))
    assert "valid: " not in done.output


def test_more_persons_than_there_are_is_said_by_check_as_by_run(tmp_path):
    recipe = ROOT / "recipes" / "reid.yaml"
    train, val = people_sets.index(tmp_path / "train", 6), people_sets.index(tmp_path / "val", ["a", "b"], seed=7)
    given = (f"data.train={train}", f"data.evaluate={{val: {val}}}", "train.batch_size=2000", "train.micro_batch=2000",
             "data.sampler={name: modal_pk, people: 400, each: 5, epoch: records}")  # fmt: skip
    with pytest.raises(UserError) as ran:
        launch(RunRequest(recipe, given), lambda: False)
    assert "people" in str(ran.value) and "problem" not in str(ran.value)
    done = CliRunner().invoke(main.main, ["check", str(recipe), *given])
    assert done.exit_code == 2 and done.stderr.endswith(f"error: {ran.value}\n"), done.stderr


def test_what_is_right_passes_begins_no_run_and_leaves_the_cache_that_the_run_takes(pictures, cache):
    given = words(pictures)
    done = CliRunner().invoke(main.main, ["check", str(CONVNEXT), *given], catch_exceptions=False)
    assert (
        done.exit_code == 0 and f"valid: {CONVNEXT}\nNext: trainkit run " in done.stderr and Store.locate().runs() == []
    )
    packed = sorted(path.name for path in cache.iterdir())
    assert launch(RunRequest(CONVNEXT, given), lambda: False) == 0
    assert sorted(path.name for path in cache.iterdir()) == packed


def test_every_network_of_a_sweep_is_built_and_the_recipe_of_a_teacher_is_opened(pictures, tmp_path, monkeypatch):
    given = words(pictures, "task.net={model: test_convnext3}", "task.net.args={patch_size: 2},{patchsize: 2}",
                  "best={metric: val/top1}")  # fmt: skip
    with pytest.raises(UserError, match="patchsize"):
        recipe_check.open_all(RunRequest(CONVNEXT, given, sweep=Sweep()))
    monkeypatch.syspath_prepend(str(PLUGIN))
    first = tmp_path / "first.yaml"
    loaded = load(RunRequest(CONVNEXT, words(pictures, f"data.train={tmp_path / 'nowhere'}")))
    first.write_text(loader.dump(loaded))
    request = RunRequest(TOY, (f"task.needs_recipe={first}",), ("toy",))
    with pytest.raises(UserError, match=r"nowhere: does not exist"):
        recipe_check.open_all(request)
    first.write_text(TOY.read_text())
    recipe_check.open_all(request)


def test_a_large_set_is_not_opened(pictures, monkeypatch):
    monkeypatch.setattr(recipe_check, "MOST_FILES", 3)
    recipe_check.open_all(RunRequest(CONVNEXT, words(pictures, "train.batch_size=400")))
    with pytest.raises(UserError, match=r"data\.evaluate\.val: .*nowhere does not exist"):
        recipe_check.open_all(RunRequest(CONVNEXT, words(pictures, "data.evaluate={val: nowhere}")))
