"""Which run a run follows, and that it says what was changed: in its folder, its tags, its note and its artifacts."""

from __future__ import annotations

from pathlib import Path

import pytest
from click_commands import ask
from runs import run, stop_after

from trainkit.config import loader
from trainkit.tracking import lineage
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store

SHORT = ("train.length=1 epoch", "log.ceilings=off")


class Kept:
    """A tracker that keeps what it is told."""

    run_id = None

    def __init__(self):
        self.told, self.files = {}, {}

    def tags(self, values):
        self.told |= values

    def artifact_text(self, path, text):
        self.files[path] = text


def begun(recipe: str, lr: float = 0.1, **info) -> RunFolder:
    """The folder of a run as `begin` leaves it; what else its record says."""
    store = Store.locate()
    folder = store.new_run(recipe, 0, "abcd" * 16)
    folder.recipe.write_text(f"name: {recipe}\noptim:\n  lr: {lr}\n")
    folder.update(**{"experiment": recipe, **info})
    return folder


def told(folder: RunFolder, header: str = "", above: str | None = None, digests=None) -> Kept:
    recipe = folder.path.parents[1] / "started_with.yaml"
    recipe.write_text(f"{header}name: x\n")
    tracker = Kept()
    lineage.record(tracker, folder, Store.locate(), recipe, digests or {}, above)
    return tracker


def test_a_run_is_held_against_the_last_of_its_experiment_that_finished(store):
    first = run(*SHORT)
    second = run(*SHORT, "optim.lr=0.125", "seed=3", "data.samples=48")
    client = Store.locate().client()
    tags = client.get_run(second.folder.info().run_id).data.tags
    assert second.folder.info().follows == tags["trainkit.parent"] == first.folder.name
    text = lineage.read(second.folder)
    assert text.splitlines() == [
        f"compared with {first.folder.name}, the last finished run",
        "",
        "seed          0 -> 3",
        "data.samples  64 -> 48",
        "optim.lr      0.05 -> 0.125",
    ]
    path = client.download_artifacts(second.folder.info().run_id, "recipe/changes.txt")
    assert Path(path).read_text() == text
    assert f"    {text.splitlines()[0]}\n    \n    seed          0 -> 3\n" in tags["mlflow.note.content"]
    assert tags["trainkit.recipe_hash"] == second.folder.info().recipe_hash and tags["trainkit.seed"] == "3"
    assert (tags["trainkit.data"], tags["trainkit.data.val"]) == ("train-48-1.0", "val-37-1.0")
    alone = client.get_run(first.folder.info().run_id).data.tags
    assert "trainkit.parent" not in alone and first.folder.info().follows is None
    assert lineage.read(first.folder) == "nothing to compare with: no run of experiment toy had finished before\n"
    shown = ask("show", second.folder.name)
    assert text in shown and f"follows        {first.folder.name}\n" in shown


@pytest.mark.slow
def test_an_interrupted_run_keeps_what_it_follows_whatever_finishes_meanwhile(store):
    first = run(*SHORT)
    cut = run(*SHORT, "optim.lr=0.125", stopping=stop_after(2))
    before = lineage.read(cut.folder)
    between = run(*SHORT)
    assert lineage.read(between.folder).splitlines()[1:] == ["", "the recipe is the same"]
    assert cut.code == 143 and run(*SHORT, "optim.lr=0.125", resume="").code == 0
    assert cut.folder.info().status == between.folder.info().status == "FINISHED"
    assert lineage.read(cut.folder) == before and "optim.lr  0.05 -> 0.125" in before
    tags = Store.locate().client().get_run(cut.folder.info().run_id).data.tags
    assert tags["trainkit.parent"] == cut.folder.info().follows == first.folder.name
    assert lineage.note(cut.folder) in tags["mlflow.note.content"]


def test_a_copied_recipe_follows_the_run_that_it_was_copied_from(store, tmp_path):
    first = run(*SHORT, "optim.lr=0.5")
    begun("toy", status="FINISHED")
    new = tmp_path / "mine.yaml"
    ask("cp", first.folder.name, str(new), "--plugin", "toy")
    assert new.read_text().startswith(f"# Copied from run {first.folder.name}.\n")
    assert loader.dump(loader.load(new, (), ("toy",))) == first.folder.recipe.read_text()
    ran = run("name=mine", recipe=new)
    assert ran.folder.info().follows == first.folder.name
    assert lineage.read(ran.folder).splitlines() == [
        f"compared with {first.folder.name}, from which its recipe was copied",
        "",
        "name  toy -> mine",
    ]


def test_a_run_that_was_copied_elsewhere_is_named_all_the_same(store):
    tracker = told(begun("x"), "# A recipe.\n# Copied from run other-s0-1121-0103-a1b2.\n")
    assert tracker.told["trainkit.parent"] == "other-s0-1121-0103-a1b2"
    (said,) = tracker.files["recipe/changes.txt"].splitlines()
    assert said.startswith("copied from other-s0-1121-0103-a1b2, which") and said.endswith("not in this store")


def test_what_stands_beneath_a_run_is_held_against_it_and_not_against_its_neighbours(store):
    above = begun("x", run_id="1" * 32)
    begun("x", lr=0.3, status="FINISHED", parent="1" * 32)
    tracker = told(begun("x", lr=0.2, parent="1" * 32), above="1" * 32)
    assert tracker.told["trainkit.parent"] == above.name
    assert tracker.files["recipe/changes.txt"] == f"child run of {above.name}\n\noptim.lr  0.1 -> 0.2\n"
    lost = told(begun("x", parent="2" * 32), above="2" * 32)
    assert "trainkit.parent" not in lost.told and "child run of the MLflow run 2222" in lost.files["recipe/changes.txt"]


def test_runs_above_others_are_held_against_each_other_without_what_they_vary(store):
    first = begun("x", lr=0.1, status="FINISHED", varies=["optim.lr"])
    assert "trainkit.seed" in told(first).told
    second = told(begun("x", lr=0.2, status="FINISHED", varies=["optim.lr", "seed"]))
    assert second.files["recipe/changes.txt"].splitlines()[1:] == ["", "the recipe is the same"]
    assert "trainkit.seed" not in second.told, "it has several"
    assert "optim.lr  (several) -> 0.3" in told(begun("x", lr=0.3)).files["recipe/changes.txt"]


def test_only_whole_runs_that_finished_before_are_followed(store):
    experiment = 'größe "x"'
    right = begun("x", experiment=experiment, status="FINISHED")
    begun("x", experiment=experiment, status="FINISHED", parent="1" * 32)
    begun("x", experiment=experiment, status="KILLED")
    begun("x", experiment="other", status="FINISHED")
    begun("x", experiment=experiment, status="FINISHED").recipe.unlink()
    new = begun("x", experiment=experiment)
    begun("x", experiment=experiment, status="FINISHED")
    place = Store.locate()
    assert place.newest_finished(experiment, new.info().started) == right
    assert place.newest_finished("no such", new.info().started) is None
    assert place.newest_finished(experiment, right.info().started) is None


def test_a_parent_whose_record_is_damaged_is_no_obstacle(store):
    old = begun("x", status="FINISHED")
    (old.path / "run.json").write_text("{")
    tracker = told(begun("x", lr=0.2), f"# Copied from run {old.name}.\n")
    assert "optim.lr  0.1 -> 0.2" in tracker.files["recipe/changes.txt"]


def test_of_what_bears_the_name_of_a_secret_only_that_it_changed_is_said(store):
    begun("x", status="FINISHED").recipe.write_text("name: x\ndata:\n  hub_token: canary-1\n")
    new = begun("x")
    new.recipe.write_text("name: x\ndata:\n  hub_token: canary-2\n")
    tracker = told(new)
    for text in (tracker.files["recipe/changes.txt"], tracker.told["mlflow.note.content"]):
        assert "data.hub_token" in text and "[hidden]" in text and "canary" not in text


def test_of_many_lines_the_page_shows_the_first(store):
    old = begun("x", status="FINISHED")
    old.recipe.write_text("".join(f"key{n}: 1\n" for n in range(50)))
    new = begun("x")
    new.recipe.write_text("".join(f"key{n}: 2\n" for n in range(50)))
    tracker = told(new)
    note = tracker.told["mlflow.note.content"].splitlines()
    assert len(tracker.files["recipe/changes.txt"].splitlines()) == 52
    assert note[-2:] == ["    and 22 more lines in recipe/changes.txt", ""] and len(note) == 32
    assert all(line.startswith("    ") for line in note[:-1])
