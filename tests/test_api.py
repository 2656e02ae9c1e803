"""The Python interface: what the commands do, with objects instead of files and errors instead of exit codes."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from pyarrow import parquet
from runs import PLUGIN, ROOT, TOY, own_store
from torch import nn

import trainkit
from trainkit.cli import main
from trainkit.config import loader
from trainkit.inference import predict
from trainkit.tracking import journal
from trainkit.tracking.store import Store

NET = {"model": "test_convnext3", "args": {"patch_size": 2, "ls_init_value": 0.5}}


def changes(pictures: Path, **more: object) -> dict[str, object]:
    return {
        "data.train": pictures / "train",
        "data.evaluate": {"val": pictures / "val"},
        "task.net": NET,
        "train": {"length": "6 steps", "batch_size": 4, "ema": 0.9},
        "evaluations": {"val": {"every": "3 steps"}},
        "checkpoints": {"every": "3 steps"},
        "log": {"every": "2 steps", "system_every": None},
        **{key.replace("__", "."): value for key, value in more.items()},
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory, database):
    """A store for the trainings of this file."""
    folder = tmp_path_factory.mktemp("home")
    with own_store(folder, database), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINKIT_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def runs(home, pictures):
    """Two trainings of one recipe by two learning rates."""
    return [trainkit.train("convnext", changes(pictures, optim__lr=np.float64(lr))) for lr in (1e-3, 3e-3)]


@pytest.fixture(autouse=True)
def _their_store(home, runs, monkeypatch):
    monkeypatch.setenv("TRAINKIT_STORE", str(home))
    monkeypatch.setenv("TRAINKIT_CACHE", str(home / "cache"))


def command(*words: str | Path) -> str:
    result = CliRunner().invoke(main.main, list(map(str, words)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


# Recipes and runs


def test_a_recipe_is_what_check_says_as_an_object_and_as_a_dict(pictures):
    recipe = trainkit.recipe("convnext", changes(pictures, optim__lr=1e-3, name="123"))
    assert recipe.settings.optim.lr == 1e-3 and recipe.settings.train.batch_size == 4 and recipe.settings.name == "123"
    tree = recipe.as_dict()
    assert tree["optim"]["lr"] == 1e-3 and tree["train"]["length"] == "6 steps" and tree["data"]["name"] == "images"
    assert str(recipe) == loader.dump(recipe.settings)
    words = ("optim.lr=0.05", "train.length=2 epochs")
    assert command("check", "adadistill", *words, "--all").startswith(str(trainkit.recipe("adadistill", words)))
    assert str(trainkit.recipe(ROOT / "recipes" / "adadistill.yaml", list(words))) == str(
        trainkit.recipe("adadistill", {"optim.lr": torch.tensor(0.05, dtype=torch.float64), "train.length": "2 epochs"})
    )


def test_a_training_returns_its_run(runs, home, pictures):
    run = runs[0]
    assert run.path == home / "runs" / run.name and run.status == "FINISHED" and run.recipe["optim"]["lr"] == 1e-3
    history = journal.read(run.path / "journal.jsonl")
    assert set(run.metrics.columns) == set(history.metrics)
    losses = run.metrics["train/loss"].dropna()
    assert list(losses.items()) == [(p.step, p.value) for p in history.metrics["train/loss"]] and len(losses) == 3
    at, best = history.metrics["best/val/ema/top1"][-1].step, history.metrics["best/val/ema/top1"][-1].value
    assert run.scores["val/ema/top1"] == best == run.metrics.loc[at, "val/ema/top1"]
    assert run.scores["val/nll"] == run.metrics.loc[at, "val/nll"] and not [n for n in run.scores if "speed" in n]
    found = trainkit.find_run(run.name)
    assert found == run and trainkit.find_run("last") == runs[1]
    without = trainkit.train(
        trainkit.recipe("convnext", changes(pictures)), {"best": None, "evaluations": {"val": {"at_end": True}}}
    )
    assert without.scores["val/top1"] == without.metrics["val/top1"].dropna().iloc[-1]


def test_a_training_here_has_the_bits_of_the_command(runs, home, pictures):
    command("run", "convnext", *trainkit.recipe("convnext", changes(pictures, optim__lr=1e-3)).request.overrides)
    ours, theirs = runs[0].metrics, trainkit.find_run("last").metrics
    assert trainkit.find_run("last") != runs[1]
    for name in ("train/loss", "val/top1", "val/ema/nll"):
        assert ours[name].dropna().equals(theirs[name].dropna()) and len(ours[name].dropna())


def test_runs_are_compared_as_data_frames(runs):
    found = trainkit.compare(runs[0], runs[1].name)
    assert list(found.changes.itertuples(index=False, name=None)) == [("optim.lr", 0.001, 0.003)]
    assert len(found.scores) == len(found.comparison.scores) > 10
    (decides,) = found.scores[found.scores["primary"]].to_dict("records")
    assert decides["name"] == "best/val/ema/top1" and decides["difference"] == decides["value"] - decides["first"]
    assert decides["first"] == runs[0].scores["val/ema/top1"] and decides["value"] == runs[1].scores["val/ema/top1"]
    assert list(found.speed.columns) == [run.name for run in runs] and found.speed.loc["time/wall_s"].gt(0).all()
    assert "optim.lr  0.001 -> 0.003" in str(found) and isinstance(found.notes, tuple)


@pytest.mark.slow
def test_ctrl_c_saves_and_returns_and_the_run_goes_on(home, monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))
    before, there = signal.getsignal(signal.SIGINT), set((home / "runs").iterdir())

    def interrupt() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end and not ended.is_set():
            if any(step for run in set((home / "runs").iterdir()) - there for step in run.glob("checkpoints/step-*")):
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.01)

    words = {"train.length": "300 steps", "checkpoints": {"every": "5 steps"}, "evaluations": {}, "best": None}
    ended, thread = threading.Event(), threading.Thread(target=interrupt)
    thread.start()
    run = trainkit.train(TOY, words, plugins=["toy"])
    ended.set()
    thread.join()
    saved = max(int(path.name.removeprefix("step-")) for path in run.folder.checkpoints.glob("step-*"))
    # The last line of the journal may lie before the step at which it was saved.
    assert run.status == "KILLED" and 5 <= run.folder.info().last_step == saved < 300
    assert signal.getsignal(signal.SIGINT) is before
    done = trainkit.train(TOY, words, plugins=["toy"], resume=run)
    assert done == run and done.status == "FINISHED" and done.folder.info().last_step == 300
    with pytest.raises(trainkit.UserError, match="is finished"):
        trainkit.train(TOY, words, plugins=["toy"], resume=run.name)


@pytest.mark.slow
def test_ctrl_c_before_the_run_exists_interrupts_and_leaves_none(tmp_path):
    """A process is told so while its data is opened."""
    code = (
        "import sys, time, trainkit\n"
        "from trainkit.experiments import validation\n"
        "def opening(*given):\n"
        "    print('opening', flush=True); time.sleep(60)\n"
        "validation.validate = opening\n"
        "try:\n"
        f"    trainkit.train({str(TOY)!r}, plugins=['toy'])\n"
        "except KeyboardInterrupt as error:\n"
        "    print('interrupted:', error)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(PLUGIN)]), "TRAINKIT_STORE": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) as child:
        assert child.stdout is not None
        while child.stdout.readline().strip() != "opening":
            assert child.poll() is None
        child.send_signal(signal.SIGINT)
        said, _ = child.communicate()
    assert child.returncode == 0 and "interrupted: told to stop before the run began" in said
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def in_thread(call):
    """What a call in another thread returns or raises."""
    found = []

    def work() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, found


def test_a_thread_trains_as_the_main_one_does_and_a_second_training_is_refused(home, monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))
    words = {"train.length": "12 steps", "task.slow_score": 0.2}
    whole = trainkit.train(TOY, words, plugins=["toy"])
    there = set((home / "runs").iterdir())
    thread, found = in_thread(lambda: trainkit.train(TOY, words, plugins=["toy"]))
    while thread.is_alive() and not any(run.glob("journal.jsonl") for run in set((home / "runs").iterdir()) - there):
        time.sleep(0.01)
    during = set((home / "runs").iterdir())
    with pytest.raises(trainkit.UserError, match="this process is training already"):
        trainkit.train(TOY, words, plugins=["toy"])
    thread.join()
    (run,) = found
    assert set((home / "runs").iterdir()) == during, "what was refused left nothing"
    assert run.status == "FINISHED" and list(run.metrics["train/loss"].dropna()) == list(
        whole.metrics["train/loss"].dropna()
    )


MANY: dict[str, object] = {}
MANY["optim"] = MANY
DEEP: dict[str, object] = {}
for _ in range(5000):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"seed": 10**5000}, "changes: Exceeds the limit"),
        (MANY, "Circular reference"),
        ({"optim": DEEP}, "recursion"),
        (None, "changes: None"),
        (7, "changes: 7"),
        (b"optim.lr=1", "changes: b"),
        ({"optim.lr=1"}, "changes: {"),
        (["optim.lr=1", 5], "changes: .*5"),
        ({1: 2}, "unknown key"),
        ({"optim": {1: 2}}, "unknown key"),
        ({"a=b": 1}, "unknown key"),
        ({"optim.lr": float("nan")}, "expected a number"),
        ({"optim.lr": np.float64("inf")}, "expected a number"),
        ({"optim.lr": np.array([0.1])}, "found a list, expected a number"),
        ({"name": b"x"}, "changes: "),
        ({"name": {1, 2}}, "changes: expected"),
        ({"name": "\ud800"}, "name"),
    ],
)
def test_changes_that_no_recipe_can_hold_are_refused(given, said):
    with pytest.raises(trainkit.UserError, match=said):
        trainkit.recipe("convnext", given)


def test_names_that_are_none_are_refused():
    for call in (
        lambda: trainkit.recipe(None),
        lambda: trainkit.recipe("convnext", plugins="toy"),
        lambda: trainkit.train("convnext", resume=5),
        lambda: trainkit.find_run(None),
        lambda: trainkit.load(3),
        lambda: trainkit.load("x" * 10_000),
        lambda: trainkit.compare(1, 2),
    ):
        with pytest.raises(trainkit.UserError):
            call()


# Models


@pytest.fixture(scope="module")
def table(runs, pictures, tmp_path_factory):
    """The predictions of the command, by column."""
    file = tmp_path_factory.mktemp("predicted") / "out.parquet"
    predict.predict(runs[0].name, pictures / "val", file)
    return parquet.read_table(file).to_pydict()


def same(found, table) -> None:
    assert list(found.columns) == ["class", "probability", "probabilities", "embedding"]
    assert list(found["class"]) == table["class"]
    for name in ("probability", "probabilities", "embedding"):
        assert np.array_equal(np.stack(found[name].to_list()), np.array(table[name], np.float32)), name


FORMS = {
    "path": lambda file: file,
    "text": str,
    "bytes": Path.read_bytes,
    "array": lambda file: np.asarray(Image.open(file)),
    "opened": Image.open,
    "image": lambda file: Image.open(file).convert("RGBA"),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_loaded_run_predicts_as_the_command_does(form, runs, table, pictures):
    files = [pictures / "val" / id for id in table["id"]]
    model = runs[0].load()
    same(model.predict([form(file) for file in files]), table)
    assert np.array_equal(model.embed([form(file) for file in files]), np.array(table["embedding"], np.float32))
    one = model.predict(form(files[3]))
    assert len(one) == 1 and one["class"][0] == table["class"][3]


def test_a_model_has_classes_scores_and_its_network(runs, pictures):
    model = trainkit.load(runs[0].name)
    assert model.classes == ("across", "down", "slanted") and model.name == runs[0].name
    assert model.scores == runs[0].scores and {"val/top1", "val/ema/nll"} <= set(model.scores)
    assert isinstance(model.network, nn.Module) and not model.network.training
    for source in (runs[0].path, str(runs[0].path), runs[0].name[:-1], runs[0].folder.info().run_id):
        assert trainkit.load(source).scores == model.scores


def test_an_export_predicts_as_its_run(runs, table, pictures, tmp_path):
    command("export", runs[0].name, tmp_path / "out", "--to", "safetensors", "--images", "3")
    model = trainkit.load(tmp_path / "out")
    same(model.predict(sorted((pictures / "val").rglob("*.png"))), table)
    assert model.scores == runs[0].load().scores and model.classes == ("across", "down", "slanted")


def test_a_logged_model_predicts_as_its_run(runs, table, pictures, home):
    client = Store.locate().client()
    experiment = client.get_run(runs[0].folder.info().run_id).info.experiment_id
    found = client.search_logged_models([experiment])
    (best,) = (m for m in found if m.source_run_id == runs[0].folder.info().run_id and m.name == "best")
    model = trainkit.load(f"models:/{best.model_id}")
    same(model.predict(sorted((pictures / "val").rglob("*.png"))), table)
    assert model.scores == runs[0].scores and model.classes == ("across", "down", "slanted")
    place = Store.locate().model_file(f"models:/{best.model_id}").parent
    same(trainkit.load(place).predict(sorted((pictures / "val").rglob("*.png"))), table)


def test_models_of_another_precision_are_loaded_between_trainings(runs, pictures):
    short = {"train": {"length": "2 steps", "batch_size": 4}, "evaluations": {"val": {"at_end": True}}, "best": None}
    other = trainkit.train("convnext", changes(pictures, **short) | {"train.precision": "bf16"})
    files = sorted((pictures / "val").rglob("*.png"))
    first, second = runs[0].load(), other.load()
    exact, rough = first.embed(files), second.embed(files)
    assert np.array_equal(first.embed(files), exact) and np.array_equal(second.embed(files), rough)
    assert trainkit.train("convnext", changes(pictures, **short)).status == "FINISHED"


# Mistakes


def test_mistakes_are_one_sentence_each(runs, pictures, tmp_path):
    (tmp_path / "none.png").write_bytes(b"no picture")
    (tmp_path / "empty").mkdir()
    model, good = runs[0].load(), pictures / "val" / "down" / "000.png"
    for attempt, said in {
        (
            lambda: trainkit.recipe("convnexxt")
        ): "convnexxt: 1 problem\n.*no such file.*did you mean recipes/convnext.yaml",
        (lambda: trainkit.train("convnexxt")): "did you mean recipes/convnext.yaml",
        (lambda: trainkit.train("convnext", {"optim.lrr": 1})): "optim.lrr.*did you mean 'lr'",
        (lambda: trainkit.train("convnext", {"optim.lr": object()})): "changes: .*not object; expected numbers",
        (lambda: trainkit.train("convnext", {"optim.lr": float("nan")})): "NaN",
        (lambda: trainkit.train("convnext", resume="nosuch")): "run 'nosuch'.*not in",
        (lambda: trainkit.train("convnext", resume="")): "resume: ''; expected a path or a name",
        (lambda: trainkit.load("nosuch")): "run 'nosuch': not in .*; the nearest are",
        (lambda: trainkit.load(tmp_path / "empty")): "a folder without a model",
        (lambda: trainkit.load("models:/nosuch")): "models:/nosuch: not in",
        (lambda: trainkit.find_run("nosuch")): "run 'nosuch': not in",
        (lambda: trainkit.compare(runs[0], "nosuch")): "run 'nosuch': not in",
        (lambda: model.predict([good, tmp_path / "none.png"])): "none.png: cannot be decoded",
        (lambda: model.predict(tmp_path / "gone.png")): "gone.png: .*No such file",
        (lambda: model.predict(tmp_path)): "a folder",
        (lambda: model.predict([good, b"no picture"])): "sample 1: cannot be decoded",
        (lambda: model.predict([np.zeros((4, 4, 7), np.uint8)])): "sample 0: an array of shape",
        (lambda: model.predict([np.zeros((4, 4, 3), np.float32)])): "sample 0: an array of float32",
        (lambda: model.predict([None])): "sample 0: a NoneType",
        (lambda: model.predict(7)): "a int; expected an image, or several",
        (lambda: model.predict([])): "no samples",
        (lambda: model.embed(tmp_path / "none.png")): "none.png: cannot be decoded",
    }.items():
        with pytest.raises(trainkit.UserError, match=f"(?s){said}"):
            attempt()


def test_a_truncated_image_of_pillow_is_refused(runs, pictures, tmp_path):
    file = tmp_path / "cut.png"
    file.write_bytes((pictures / "val" / "down" / "000.png").read_bytes()[:-700])
    with pytest.raises(trainkit.UserError, match="sample 0: cannot be decoded"):
        runs[0].load().predict(Image.open(file))


# The package


def test_importing_trainkit_takes_under_a_fifth_of_a_second_and_loads_nothing_heavy():
    """Processor time beyond that of a bare interpreter, the least of five."""

    def seconds(code: str) -> float:
        least = float("inf")
        for _ in range(5):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, "-P", "-c", code], cwd=ROOT, env=env, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            least = min(least, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return least

    env = os.environ | {"PYTHONPATH": str(ROOT)}
    assert seconds("import trainkit; trainkit.__version__") - seconds("pass") < 0.2
    code = "import sys, trainkit; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert {name for name in loaded if name.startswith("trainkit")} <= {
        "trainkit",
        "trainkit.environment",
        "trainkit.environment.version",
    }
    assert not {"torch", "numpy", "click", "yaml"} & set(loaded)


def test_the_package_offers_the_interface_and_says_what_it_has_not():
    assert set(trainkit.__all__) <= set(dir(trainkit)) and all(hasattr(trainkit, name) for name in trainkit.__all__)
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = trainkit.lode
    assert trainkit.rng.__name__ == "trainkit.rng" and trainkit.UserError.__module__ == "trainkit.errors"
