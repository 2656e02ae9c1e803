"""A store whose folder was moved: every file is found again, or nothing was changed."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import click_commands
import numpy as np
import pytest
import trackers
from mlflow.tracking._tracking_service import utils as service
from safetensors.numpy import save_file

from trainkit.errors import UserError
from trainkit.tracking import relocate as relocating
from trainkit.tracking.relocate import folder_of, relocate, strayed
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store


def recorded(store: Store, weights: Path, experiment: str = "faces") -> RunFolder:
    tracker = trackers.begin(store, experiment=experiment)
    tracker.log(1, {"val/accuracy": 0.5})
    tracker.artifact_text("recipe/resolved.yaml", "lr: 0.1\n")
    tracker.model("best", weights, 1, {"val/accuracy": 0.5})
    tracker.finish("FINISHED")
    return tracker.folder


@pytest.fixture
def weights(tmp_path) -> Path:
    save_file({"w": np.arange(3.0)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def moved(request, tmp_path, database, weights, monkeypatch) -> tuple[Store, Path]:
    """A store with a run and a registered model that lies elsewhere than when they were made, and where that was."""
    name = getattr(request, "param", "here")
    old, new = tmp_path / "there" / name, tmp_path / name
    old.mkdir(parents=True)
    shutil.copy(database, old / "mlflow.db")
    monkeypatch.setenv("TRAINKIT_STORE", str(old))
    store = Store.locate()
    folder = recorded(store, weights)
    client = store.client()
    (model,) = client.search_logged_models([client.get_experiment_by_name("faces").experiment_id])
    client.create_registered_model("faces")
    # As MLflow's registry keeps them: with the address of the model, and with that of its files.
    client.create_model_version("faces", model.artifact_location, folder.info().run_id)
    old.rename(new)
    # Another process would not know where they were.
    service._artifact_repos_cache.clear()
    monkeypatch.setenv("TRAINKIT_STORE", str(new))
    return Store.locate(), old


def places(database: Path) -> dict[str, list[str]]:
    with sqlite3.connect(database) as connection:
        return {
            f"{table}.{column}": [row[0] for row in connection.execute(f"SELECT {column} FROM {table}")]
            for table, column in relocating._COLUMNS
        }


def files(store: Store, run_id: str) -> list[str]:
    return [file.path for file in store.client().list_artifacts(run_id, "recipe")]


@pytest.mark.parametrize("moved", ["here", "with a space, ä and 100%"], indirect=True)
def test_every_file_of_a_moved_store_is_found_again(moved, weights):
    store, old = moved
    run = store.runs()[0]
    client, run_id = store.client(), run.info().run_id
    assert not files(store, run_id), "otherwise there is nothing to mend"
    done = relocate(store, None)

    assert old in done.homes and not done.left and not done.elsewhere
    assert {"experiments", "runs", "logged_models", "model_versions", "tags"} == done.changed.keys()
    at = folder_of(client.get_run(run_id).info.artifact_uri)
    assert (at / "recipe/resolved.yaml").read_text() == "lr: 0.1\n" and store.home in at.parents
    (model,) = client.search_logged_models([client.get_experiment_by_name("faces").experiment_id])
    assert store.model_file(f"models:/{model.model_id}").read_bytes() == weights.read_bytes()
    at = Path(client.get_model_version_download_uri("faces", "1").removeprefix("file://"))
    assert str(old) not in str(at) and "there" not in at.parts
    assert client.get_run(run_id).data.tags["trainkit.folder"] == str(run.path)
    said = [place for column in places(store.database).values() for place in column if place]
    assert said and not [place for place in said if old.parent.as_uri() in place]
    before, now = (
        {place for place in places(database)["experiments.artifact_location"] if place.startswith("file:")}
        for database in (done.copy, store.database)
    )  # MLflow's own experiment, Default, is elsewhere
    assert before and before.isdisjoint(now), "the copy is as it was"


def test_a_second_time_there_is_nothing_to_do_and_no_copy_is_made(moved):
    store, _ = moved
    relocate(store)
    before, files = places(store.database), sorted(store.home.iterdir())
    done = relocate(store)
    assert not done.changed and done.copy is None and not done.homes
    assert places(store.database) == before and sorted(store.home.iterdir()) == files


def test_a_run_begins_in_a_moved_store_only_when_its_files_will_be_found(moved, weights):
    store, old = moved
    with pytest.raises(UserError, match="trainkit relocate") as caught:
        trackers.begin(store)
    assert str(old) in str(caught.value) and not old.exists()
    relocate(store)
    folder = recorded(store, weights)
    assert files(store, folder.info().run_id) == ["recipe/resolved.yaml"]
    assert not old.exists()


def test_nothing_changes_while_a_run_goes_on(moved):
    store, _ = moved
    tracker = trackers.begin(store, experiment="another")
    before = places(store.database)
    try:
        with pytest.raises(UserError, match=f"1 run in progress: {tracker.folder.name}"):
            relocate(store)
        assert places(store.database) == before and not list(store.home.glob("mlflow-before-*"))
    finally:
        tracker.finish("FINISHED")
    assert relocate(store).changed["runs"] == 1, "that of the other experiment was here already"


def test_a_run_that_another_machine_left_is_named(moved, monkeypatch):
    monkeypatch.setattr("trainkit.tracking.run_folder.file_system", lambda folder: "nfs4")
    store, _ = moved
    folder = store.new_run("faces", 1, "bb")
    folder.update(host="elsewhere")
    folder.release()
    done = relocate(store)
    assert done.elsewhere == [folder.name] and done.changed["runs"] == 1


def test_what_still_lies_in_the_older_folder_alone_stays_as_it_is(moved, weights, tmp_path):
    store, old = moved
    shutil.move(store.artifacts / "faces", tmp_path / "aside")
    (old / "artifacts").mkdir(parents=True)
    shutil.move(tmp_path / "aside", old / "artifacts" / "faces")
    done = relocate(store)
    assert list(done.left) == [old] and done.left[old] >= 3 and "runs" not in done.changed
    run_id = store.runs()[0].info().run_id
    assert files(store, run_id) == ["recipe/resolved.yaml"], "it is found there"
    shutil.move(old / "artifacts" / "faces", store.artifacts / "faces")
    assert relocate(store).changed["runs"] == 1
    assert files(store, run_id) == ["recipe/resolved.yaml"]


def test_a_copy_of_a_store_gets_its_own_files(moved, tmp_path, monkeypatch):
    store, _ = moved
    relocate(store)
    shutil.copytree(store.home, tmp_path / "copy")
    monkeypatch.setenv("TRAINKIT_STORE", str(tmp_path / "copy"))
    copy = Store.locate()
    assert relocate(copy).homes == [store.home]
    run_id = store.runs()[0].info().run_id
    for one in (store, copy):
        assert one.home in folder_of(one.client().get_run(run_id).info.artifact_uri).parents


def test_the_folder_may_be_named_and_a_wrong_one_is_answered_with_the_right_one(moved, tmp_path):
    store, old = moved
    with pytest.raises(UserError, match="no artifact of this store was there") as caught:
        relocate(store, tmp_path / "never")
    assert str(old) in caught.value.remedy
    assert relocate(store, old).changed["runs"] == 1


def no_room(*_):
    raise OSError(28, "No space left on device")


def test_a_failure_in_the_middle_leaves_the_database_as_it_was(moved, monkeypatch):
    store, _ = moved
    before = places(store.database)

    with monkeypatch.context() as patch:
        patch.setattr(relocating.shutil, "copymode", no_room)
        with pytest.raises(UserError, match=r"No space left.*nothing was changed"):
            relocate(store)
    assert places(store.database) == before
    with sqlite3.connect(store.database, timeout=0.1) as connection:
        connection.execute("CREATE TRIGGER stop BEFORE UPDATE ON model_versions BEGIN SELECT RAISE(ABORT, 'no'); END")
    with pytest.raises(UserError, match="no; nothing was changed"):
        relocate(store)
    assert places(store.database) == before, "what had been changed of other tables as well"


def test_stores_that_cannot_be_relocated_are_user_errors(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        relocate(Store(tmp_path, f"sqlite:///{tmp_path}/mlflow.db"))
    assert not (tmp_path / "mlflow.db").exists()
    with pytest.raises(UserError, match="a server") as caught:
        relocate(Store(tmp_path, "http://me:hunter2@host:5000"))
    assert "hunter2" not in str(caught.value)


def test_places_that_no_store_has_left_are_no_matter(moved):
    store, old = moved
    for place in (
        "s3://b/artifacts/faces",
        "mlflow-artifacts:/1",
        "",
        "file:///data/mine/3",
        f"{old.parent}/artifacts/x",
    ):
        assert strayed(store, place) is None
    assert strayed(store, (old / "artifacts" / "faces").as_uri()) == old


def test_the_command_says_where_the_store_was(moved):
    _, old = moved
    said = click_commands.ask("relocate")
    assert f"the store was in {old}\n" in said and "runs: 1 now here\n" in said and "mlflow-before-" in said
    assert (
        click_commands.ask("relocate")
        == "every artifact is where the database says\nNext: trainkit ui  # see the runs\n"
    )
