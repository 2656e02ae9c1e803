"""What a store holds is for its owner, whatever the umask; and what a group has made for itself stays as it is."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
from runs import PLUGIN, TOY, run

from trainkit import paths
from trainkit.config import loader
from trainkit.errors import UserError
from trainkit.tracking import relocate, store, ui
from trainkit.tracking.store import Store


@pytest.fixture
def for_all():
    """A umask that gives everything to everybody."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def open_to_others(home: Path) -> list[str]:
    """Files and folders below `home` that somebody else could read or change: no folder on their way is closed."""
    found = []
    for folder, folders, files in os.walk(home):
        inside = [name for name in folders if mode(Path(folder, name)) & 0o077]
        found += [str(Path(folder, name).relative_to(home)) for name in files if mode(Path(folder, name)) & 0o077]
        folders[:] = inside
        found += [str(Path(folder, name).relative_to(home)) for name in inside]
    return sorted(found)


def test_a_new_store_is_its_owners_alone(database):
    """That of the session, which `Store.prepare` made."""
    assert mode(database) == 0o600
    assert mode(database.parent / "runs") == mode(database.parent / "artifacts") == 0o700


def test_a_run_leaves_nothing_that_others_could_read(for_all, tmp_path, monkeypatch, database):
    home = tmp_path / "new" / "mlruns"
    monkeypatch.setenv("TRAINKIT_STORE", str(home))
    paths.make_private(home)
    shutil.copy(database, home / "mlflow.db")
    ran = run("task.teacher=oracle", "train.length=1 epoch", "task.stored=true", "integrity.policy=warn")
    assert ran.code == 0 and mode(home) == 0o700
    # As where the folder was there before, open to all: that of a checkout.
    home.chmod(0o755)
    assert len(list(home.rglob("*"))) > 20 and open_to_others(home) == []


def test_a_folder_that_is_there_keeps_the_mode_that_a_group_gave_it(for_all, tmp_path, monkeypatch, database):
    home = tmp_path / "shared"
    for folder in (home, home / "runs", home / "artifacts"):
        folder.mkdir(mode=0o770)
    shutil.copy(database, home / "mlflow.db")
    (home / "mlflow.db").chmod(0o660)
    monkeypatch.setenv("TRAINKIT_STORE", str(home))
    Store.locate().prepare()
    assert {mode(folder) for folder in (home, home / "runs", home / "artifacts")} == {0o770}
    assert mode(home / "mlflow.db") == 0o660


def test_without_closing_the_folders_others_could_read_the_run(for_all, tmp_path, monkeypatch, database):
    monkeypatch.setattr(store, "make_private", lambda folder: folder.mkdir(parents=True, exist_ok=True))
    home = tmp_path / "mlruns"
    home.mkdir()
    shutil.copy(database, home / "mlflow.db")
    monkeypatch.setenv("TRAINKIT_STORE", str(home))
    Store.locate().prepare()
    Store.locate().new_run("x", 0, "ab")
    assert "runs" in open_to_others(home) and any(name.endswith("run.json") for name in open_to_others(home))


def test_the_copy_of_a_database_is_as_private_as_it(for_all, store):
    database = store / "mlflow.db"
    database.chmod(0o600)
    assert mode(relocate._copied(database)) == 0o600


def test_the_log_of_the_page_is_private_and_written_through_no_link(for_all, tmp_path):
    log = tmp_path / "ui.log"
    ui._begun(["true"], dict(os.environ), log, tmp_path).wait()
    assert mode(log) == 0o600
    mine = tmp_path / "mine"
    mine.write_text("mine")
    log.unlink()
    log.symlink_to(mine)
    with pytest.raises(UserError, match=r"ui\.log: cannot be written"):
        ui._begun(["true"], dict(os.environ), log, tmp_path)
    assert mine.read_text() == "mine"


def test_what_is_compiled_lies_where_nobody_else_can_lay_code_to_be_run(for_all, tmp_path, monkeypatch):
    from torch._inductor.runtime import cache_dir_utils

    from trainkit.distributed.runtime import Runtime

    monkeypatch.syspath_prepend(str(PLUGIN))
    recipe = loader.load(TOY, ["train.compile=default"], ["toy"])
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # given back at the end
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert Path(cache_dir_utils.default_cache_dir()).parent == Path(tempfile.gettempdir())  # by itself
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Runtime(recipe).configure(recipe)
    kept = Path(cache_dir_utils.cache_dir())
    assert kept == tmp_path / "cache" / "trainkit" / "compiled" and mode(kept) == 0o700
    # Without a home that can be written: a folder whose name nobody can foresee.
    (tmp_path / "file").touch()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    paths.keep_compiled_private()
    kept = Path(cache_dir_utils.cache_dir())
    assert mode(kept) == 0o700 and kept != Path(cache_dir_utils.default_cache_dir())
    kept.rmdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    paths.keep_compiled_private()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
