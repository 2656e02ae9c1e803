"""What passes `check` starts: it ends with the message that `run` would end with, before a run is begun."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import people_sets
import pytest
from click.testing import CliRunner
from runs import PLUGIN, ROOT, TOY
from safetensors.torch import save_file

from trainkit.cli import main
from trainkit.config import loader
from trainkit.config.run_request import RunRequest, load
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
    "a best metric that is not measured": (lambda folder: ["best={metric: val/miou}"], "best.metric: 'val/miou'"),
    "top5 of three classes": (lambda folder: ["best={metric: val/top5}"], "which is not measured"),
    "a stop metric that is not measured": (
        lambda folder: ["stop_when={metric: val/auc, patience: 2}", EACH],
        "stop_when.metric: 'val/auc'",
    ),
    "a plateau of what is not measured": (
        lambda folder: ["train.schedule={name: plateau, metric: val/f1, patience: 2}", EACH],
        "train.schedule.metric: 'val/f1'",
    ),
    "an EMA metric that is not measured": (
        lambda folder: ["best={metric: val/ema/topp1, mode: max}", "train.ema=0.9"],
        "expected val/ema/top1",
    ),
    "an odd batch that is mixed": (
        lambda folder: ["task.mix={mixup: 0.2}", "train.batch_size=3", "train.schedule={name: cosine}"],
        "task.mix: micro-batches of 3 images",
    ),
    "an odd micro-batch that is mixed": (
        lambda folder: ["task.mix={cutmix: 1.0}", "train.batch_size=6", "train.micro_batch=3"],
        "task.mix: micro-batches of 3 images",
    ),
    "a group that matches nothing": (
        lambda folder: ["optim.groups=[{match: 'net.haed.*', lr_scale: 10}]"],
        "optim.groups[0].match: 'net.haed.*' matches no parameter",
    ),
    "unclipped parameters that are not there": (
        lambda folder: ["optim.clip_norm=null", "optim.clip_agc={leave_out: ['haed.*']}"],
        "optim.clip_agc.leave_out[0]: 'haed.*' matches no parameter",
    ),
    "fp16 on a CPU": (lambda folder: ["train.precision=fp16"], "train.precision: fp16 on a CPU"),
    "fp8 on a CPU": (lambda folder: ["train.precision=fp8"], "train.precision: fp8 without a GPU"),
    "an optimizer that timm has not": (lambda folder: ["optim.name=timm:adamww"], "optim.name: timm has no optimizer"),
    "a class that is not there": (
        lambda folder: ["task.class_weights={acros: 2.0}"],
        "class 'acros', which the data does not have",
    ),
    "an evaluation that never comes": (
        lambda folder: ["evaluations={val: {every: 9 epochs, at_end: false}}", "best={metric: val/top1}"],
        "evaluations.val runs every 9 epochs, and the training has 6 steps",
    ),
    "early stopping without evaluations": (
        lambda folder: ["stop_when={metric: val/top1, patience: 2}"],
        "an evaluation during the training, but evaluations.val has no `every`",
    ),
    "the best of an evaluation at the start": (
        lambda folder: ["evaluations={val: {at_start: true, at_end: false}}", "best={metric: val/top1}"],
        "evaluations.val has neither `every` nor `at_end`",
    ),
    "leakage that the policy refuses": (
        lambda folder: ["integrity.policy=refuse", "data.leakage=allow", f"data.evaluate={{val: {folder / 'train'}}}"],
        "integrity.policy=refuse stops this run",
    ),
}
EACH = "evaluations={val: {every: 1 epoch}}"
VERBS = {"check": ["check"], "run --check": ["run", "--check"], "preflight": ["preflight"]}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_verb_ends_with_the_message_with_which_run_ends_and_no_run_is_left(pictures, mistake, monkeypatch):
    make, said = MISTAKES[mistake]
    given = words(pictures, *make(pictures))
    with pytest.raises(UserError) as ran:
        launch(RunRequest(CONVNEXT, given), lambda: False)
    assert said in str(ran.value) and not hasattr(ran.value, "__notes__") and Store.locate().runs() == []
    monkeypatch.setattr("trainkit.cli.train.prepare_process", lambda recipe: None)
    for verb in VERBS.values():
        done = CliRunner().invoke(main.main, [*verb, str(CONVNEXT), *given])
        assert done.exit_code == 2 and done.stderr.endswith(f"error: {ran.value}\n"), (
            verb,
            done.stderr,
            str(ran.value),
        )
        assert "valid: " not in done.output and "Next:" not in done.output


@pytest.mark.parametrize(
    ("student", "said"),
    [
        (
            "best={metric: val/acuracy, mode: max}",
            "best.metric: 'val/acuracy', which is not measured; expected val/accuracy",
        ),
        ("optim.groups=[{match: haed.*}]", "optim.groups[0].match: 'haed.*' matches no parameter"),
        ("train.batch_size=400", "400, but the data has 64 samples"),
        ("train.precision=fp16", "fp16 on a CPU"),
    ],
)
def test_a_mistake_of_a_student_or_its_teacher_is_found_before_the_teacher_is_trained(
    student, said, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.setattr("trainkit.cli.train.prepare_process", lambda recipe: None)
    first, wrong = tmp_path / "first.yaml", tmp_path / "wrong.yaml"
    first.write_text(TOY.read_text())
    wrong.write_text(loader.dump(load(RunRequest(TOY, (student,), ("toy",)))))
    for given in ((f"task.needs_recipe={first}", student), (f"task.needs_recipe={wrong}",)):
        with pytest.raises(UserError, match=re.escape(said)):
            launch(RunRequest(TOY, given, ("toy",)), lambda: False)
        for verb in VERBS.values():
            done = CliRunner().invoke(main.main, [*verb, str(TOY), *given, "--plugin", "toy"])
            assert done.exit_code == 2 and said in done.stderr, (verb, done.stderr)
    assert Store.locate().runs() == []


def test_a_recipe_that_needs_itself_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))
    own = tmp_path / "own.yaml"
    own.write_text(TOY.read_text().replace("{name: toy}", f"{{name: toy, needs_recipe: {own}}}", 1))
    with pytest.raises(UserError, match=r"own\.yaml would need its own weights"):
        launch(RunRequest(own, (), ("toy",)), lambda: False)


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
        recipe_check.open_all(RunRequest(CONVNEXT, given, sweep=True))
    monkeypatch.syspath_prepend(str(PLUGIN))
    first = tmp_path / "first.yaml"
    loaded = load(RunRequest(CONVNEXT, words(pictures, f"data.train={tmp_path / 'nowhere'}")))
    first.write_text(loader.dump(loaded))
    request = RunRequest(TOY, (f"task.needs_recipe={first}",), ("toy",))
    with pytest.raises(UserError, match=r"nowhere: does not exist"):
        recipe_check.open_all(request)
    first.write_text(TOY.read_text())
    recipe_check.open_all(request)


def test_settings_of_a_sweep_beyond_those_whose_networks_are_built_are_planned(monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))
    given = ("train.micro_batch=null", "train.batch_size=4,8,12,16,20,24,28,32,36,400")
    with pytest.raises(UserError, match="400, but the data has 64 samples"):
        recipe_check.open_all(RunRequest(TOY, given, ("toy",), sweep=True))


def test_a_large_set_is_not_opened(pictures, monkeypatch):
    monkeypatch.setattr(recipe_check, "MOST_FILES", 3)
    recipe_check.open_all(RunRequest(CONVNEXT, words(pictures, "train.batch_size=400")))
    with pytest.raises(UserError, match=r"data\.evaluate\.val: .*nowhere does not exist"):
        recipe_check.open_all(RunRequest(CONVNEXT, words(pictures, "data.evaluate={val: nowhere}")))
