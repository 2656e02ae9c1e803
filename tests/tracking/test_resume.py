"""Runs that go on by their name alone, and the command that is named for it when they stop."""

from __future__ import annotations

import shutil

import pytest
from click.testing import CliRunner
from runs import PLUGIN, TOY, all_same, newest, run, stop_after

from trainkit.cli import main, train
from trainkit.config import loader
from trainkit.config.run_request import RunRequest, load
from trainkit.errors import UserError
from trainkit.experiments.launch import launch
from trainkit.tracking import run_lifecycle
from trainkit.tracking.store import Store

WORDS = ("optim.lr=0.02", "log.ceilings=off")


@pytest.fixture(autouse=True)
def _made_before(database):
    shutil.copy(database, Store.locate().home / "mlflow.db")


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A run that was told to stop after its third step, and the recipe with which it was begun."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    shutil.copy(TOY, tmp_path / "mine.yaml")
    ran = run(*WORDS, recipe=tmp_path / "mine.yaml", stopping=stop_after(3))
    return ran.folder, tmp_path / "mine.yaml"


def ask(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(train.run, list(words))
    return done.exit_code, done.output


def test_a_run_goes_on_by_its_name_alone_with_its_own_recipe(stopped, tmp_path):
    folder, recipe = stopped
    assert folder.info().last_step == folder.saved_step() == 3, "the last line of the journal is of step 2"
    recipe.write_text(TOY.read_text().replace("momentum: 0.9", "momentum: 0.5"))  # meanwhile edited
    code, said = ask("--resume", folder.name)
    assert code == 2 and f"run {folder.name}: began with --plugin toy; add --plugin toy" in said
    code, said = ask("--resume", "last", "train.nonfinite=skip", "--plugin", "toy")
    assert code == 0 and "resumed from step-000000003" in said, said
    assert newest() == folder and folder.info().status == "FINISHED"
    whole = run(*WORDS)
    assert all_same(type(whole)(0, folder), whole)
    code, said = ask("--resume", folder.name, "--plugin", "toy")
    assert code == 2 and "is finished" in said


def test_a_recipe_that_differs_is_answered_with_its_keys(stopped):
    folder, recipe = stopped
    for words in ((str(recipe), "--resume", folder.name), ("--resume", folder.name, "optim.lr=0.05")):
        code, said = ask(*words, "--plugin", "toy")
        assert code == 2 and said.endswith("the run's value -> the one given:\n  optim.lr  0.02 -> 0.05\n"), said
    code, said = ask(str(recipe), "--resume", folder.name, *WORDS, "train.ema=null", "best=null", "--plugin", "toy")
    assert code == 2 and "\n  train.ema  0.9 -> null\n" in said and "log.ceilings" not in said, "which may differ"
    assert folder.info().status == "KILLED"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Missing argument 'RECIPE'"),
        (("--resume",), "Missing argument 'RECIPE', or a run: --resume last"),
        (("optim.lr=1",), "Missing argument 'RECIPE'"),
        (("--resume", "adadistill"), "names a recipe; put it before --resume"),
        (("--resume", "last", "--folds"), "repeats the options of the run"),
        (("--resume", "last"), "run 'last': no run in"),
    ],
)
def test_what_names_no_run_is_one_message(words, said):
    code, found = ask(*words)
    assert code == 2 and said in found and "Traceback" not in found


def test_the_resolved_recipe_of_a_run_is_the_recipe_it_began_with():
    for path in sorted((TOY.parents[2] / "recipes").glob("*.yaml")):
        recipe = loader.load(path)
        assert loader.digest(loader.parse(type(recipe), loader.dump(recipe), "x", (), loader.TABLES)) == loader.digest(
            recipe
        ), path.name


def test_a_run_of_before_goes_on_by_its_resolved_recipe_and_a_damaged_request_is_named(stopped):
    folder, _ = stopped
    file = folder.path / run_lifecycle.REQUEST
    whole = file.read_text()
    for text in ("[]", "{", whole.replace('"toy"', "5"), whole.replace("null", '"x"', 1)):
        file.write_text(text)
        with pytest.raises(UserError, match=r"request\.json: cannot be read: .*give the recipe and its words too"):
            run_lifecycle.request_of(folder, (), ("toy",))
    file.unlink()
    request = run_lifecycle.request_of(folder, (), ("toy",))
    assert loader.digest(load(request)) == folder.info().recipe_hash and request.path == folder.recipe


# The last line


@pytest.mark.slow
def test_the_last_line_after_a_stop_goes_on_also_with_seeds_and_with_a_teacher(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(PLUGIN))
    words = ("train.length=4 steps", "checkpoints.every=2 steps", "log.ceilings=off")
    assert run(*words, stopping=stop_after(6), seeds=2).code == 143
    above = next(folder for folder in Store.locate().runs() if folder.info().recipe == "toy-seeds")
    assert capsys.readouterr().out.endswith(f"\nNext: trainkit run --resume {above.name} --plugin toy\n")
    assert ask("--resume", "last", "--plugin", "toy")[0] == 0 and above.info().status == "FINISHED"
    assert [folder.info().status for folder in Store.locate().runs()] == ["FINISHED"] * 3
    capsys.readouterr()

    first = tmp_path / "first.yaml"
    first.write_text(TOY.read_text().replace("name: toy\n", "name: first\n", 1))
    needs = (*words, f"task.needs_recipe={first}")
    assert run(*needs, stopping=stop_after(3)).code == 143
    assert capsys.readouterr().out.endswith("\nTo continue, give the same command again, with --resume\n")
    assert launch(RunRequest(TOY, needs, ("toy",), ""), lambda: False) == 0
    assert newest().info().recipe == "toy" and newest().info().status == "FINISHED"


def test_an_error_of_a_training_ends_with_the_command_that_goes_on(monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))
    done = CliRunner().invoke(main.main, ["run", str(TOY), "data.damaged=7", "log.ceilings=off", "--plugin", "toy"])
    *_, before, last = done.output.splitlines()
    assert done.exit_code == 2 and before.startswith("error: ") and "images/7: damaged" in before
    assert last == f"Next: trainkit run --resume {newest().name} --plugin toy"
    assert "Next: " not in CliRunner().invoke(main.main, ["run", str(TOY), "optim.lrr=1", "--plugin", "toy"]).output


def test_under_a_launcher_the_command_is_that_of_the_launcher(monkeypatch):
    assert run_lifecycle.command("r", ("p",)) == "trainkit run --resume r --plugin p"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_lifecycle.command("r", ()) == "accelerate launch ... trainkit/run.py --resume r"
