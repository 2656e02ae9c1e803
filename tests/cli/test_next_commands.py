"""The commands that are printed last work: each is run as it is printed, with files for the words in capitals."""

from __future__ import annotations

import shlex
from pathlib import Path

import click_commands
import pytest
from click.testing import CliRunner, Result
from runs import PLUGIN, ROOT, TOY, newest

from trainkit.cli import main
from trainkit.tracking.store import Store

SHORT = ("train.length=4 steps", "checkpoints.every=2 steps", "log.ceilings=off")
TOYS = ("--plugin", "toy")


@pytest.fixture(autouse=True)
def _home(store, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))


def ask(*words: object) -> Result:
    return CliRunner().invoke(main.main, [str(word) for word in words])


def followed(output: str, **files: object) -> list[Result]:
    """Run every `Next:` command of an output."""
    found = []
    for line in click_commands.following(output):
        words = shlex.split(line.removeprefix("Next:").partition("  #")[0])
        found.append(ask(*(files.get(word, word) for word in words[1:])))
    return found


@pytest.mark.parametrize("options", [(), ("--folds",), ("--seeds", "2")])
def test_check_names_the_command_that_trains_with_its_options(options):
    folds = ("data.name=folded", "data.folds=2") if options == ("--folds",) else ()
    done = ask("run", "--check", TOY, *SHORT, *folds, *options, *TOYS)
    assert done.exit_code == 0, done.output
    (trained,) = followed(done.stderr)
    assert trained.exit_code == 0 and len(Store.locate().runs()) == (3 if options else 1), trained.output


def test_a_sweep_is_named_with_its_plug_ins():
    done = ask("sweep", "--check", TOY, *SHORT, "optim.lr=0.1,0.2", *TOYS)
    (line,) = click_commands.following(done.stderr)
    assert "sweep" in line and "optim.lr=0.1,0.2" in line and "--plugin toy" in line


def test_a_run_that_was_not_finite_goes_on_by_the_command_that_is_printed():
    failed = ask("run", TOY, *SHORT, "task.nan_at=2", *TOYS)
    assert failed.exit_code == 2 and newest().info().status == "FAILED"
    shown = ask("show", newest().name)
    assert click_commands.following(shown.stderr)[0].partition("  #")[0].endswith("--plugin toy")
    (done,) = followed(failed.stderr)
    assert done.exit_code == 0 and newest().info().status == "FINISHED", done.output


def test_what_is_refused_before_its_first_step_leaves_no_run_and_names_no_command():
    for words in (
        ("best.metric=val/acuracy",),
        ("best.metric=val/acuracy", "--seeds", "2"),
        ("task.teacher=constant",),
    ):
        refused = ask("run", TOY, *SHORT, *words, *TOYS)
        assert refused.exit_code == 2 and "Next:" not in refused.output, refused.output
    swept = ask("sweep", TOY, *SHORT, "optim.lr=0.1,0.2", "task.teacher=constant", *TOYS)
    assert swept.exit_code == 2 and "no better than guessing" in swept.output
    client = Store.locate().client()
    every = [one.experiment_id for one in client.search_experiments()]
    assert Store.locate().runs() == [] and client.search_runs(every) == []


@pytest.mark.slow
def test_the_commands_from_a_check_to_an_export_work_one_after_the_other(pictures, tmp_path):
    own = (f"data.train={pictures / 'train'}", f"data.evaluate={{val: {pictures / 'val'}}}", "train.batch_size=4",
           "task.net={model: test_convnext3, args: {patch_size: 2}}", "train.length=6 steps", "log.ceilings=off",
           "train.schedule={name: cosine}", "evaluations.val.every=3 steps", "checkpoints.every=3 steps")  # fmt: skip
    files = {"IMAGES": pictures / "val", "OUT.parquet": tmp_path / "out.parquet", "OUT": tmp_path / "out"}
    tried = ask("preflight", ROOT / "recipes" / "convnext.yaml", *own)
    (trained,) = followed(tried.output)
    for done in (trained, *followed(trained.output, **files)):
        assert done.exit_code == 0, done.output
    (exported,) = followed(ask("predict", newest().name, pictures / "val", tmp_path / "more.csv").output, **files)
    assert exported.exit_code == 0 and Path(tmp_path / "out").is_dir()
