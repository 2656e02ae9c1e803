"""A real MLflow server with a login, which several nodes use at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
from runs import PLUGIN, ROOT, TOY

from tests.whole_runs.test_mlflow_server import Served, served

pytest.importorskip("flask_wtf", reason="Flask-WTF (mlflow[auth]) is not installed")
from mlflow.server.auth.client import AuthServiceClient

pytestmark = pytest.mark.slow  # the server answers after 5 s
RUN = ("run", str(TOY), "--plugin", "toy", "log.experiment=team")
ADMIN, PASSWORD = "admin", "correct-horse-battery-1"
USERS = {"ann": "staple-of-ann-123", "ben": "staple-of-ben-123"}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("login")
    (home / "login.ini").write_text(
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{home}/login.db\nadmin_username = {ADMIN}\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        "auth_cache_ttl_seconds = 60\n"  # else every request hashes the password anew
    )
    login = {
        "MLFLOW_AUTH_CONFIG_PATH": str(home / "login.ini"),
        "MLFLOW_AUTH_ADMIN_PASSWORD": PASSWORD,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "of this test alone",
    }
    with served(home, f"sqlite:///{home}/mlflow.db", words=("--app-name", "basic-auth"), **login) as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLFLOW_TRACKING_USERNAME", ADMIN)
            patch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
            for user, password in USERS.items():
                AuthServiceClient(server.address).create_user(user, password)
        yield server


def node(server: Served, home: Path, user: str, password: str, *words: str) -> subprocess.Popen[str]:
    """A command on a node of its own: another folder of runs, and the login of a user."""
    home.mkdir(exist_ok=True)
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{PLUGIN}",
        "TRAINKIT_STORE": str(home),
        "MLFLOW_TRACKING_URI": server.address,
        "MLFLOW_TRACKING_USERNAME": user,
        "MLFLOW_TRACKING_PASSWORD": password,
    }
    command = [sys.executable, "-m", "trainkit.cli.main", *words]
    return subprocess.Popen(command, cwd=home, env=env, text=True, stdout=-1, stderr=subprocess.STDOUT)


def test_nodes_log_to_one_experiment_at_once_each_with_its_login(server, tmp_path, monkeypatch):
    refused = node(server, tmp_path / "wrong", "ann", "another password", *RUN)
    assert "does not take the password" in refused.communicate()[0] and refused.returncode == 2

    both = [node(server, tmp_path / f"node{n}", "ann", USERS["ann"], *RUN, f"seed={n}") for n in range(2)]
    said = [one.communicate()[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    for n in range(2):  # what a busy machine had left at the end
        sync = node(server, tmp_path / f"node{n}", "ann", USERS["ann"], "sync")
        assert sync.communicate() and sync.returncode == 0

    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", ADMIN)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    client = mlflow.MlflowClient(server.address)
    experiment = client.get_experiment_by_name("team")
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(run.data.params["seed"] for run in runs) == ["0", "1"]
    assert {run.info.status for run in runs} == {"FINISHED"} and all("train/loss" in run.data.metrics for run in runs)

    # Another user may read what ann began, and is told before any work that he may not write there.
    other = node(server, tmp_path / "other", "ben", USERS["ben"], *RUN, "seed=2")
    told = other.communicate()[0]
    assert (
        other.returncode == 2
        and "does not allow this user to do that; ask its administrator for permission to edit" in told
        and "Traceback" not in told
    ), told
    AuthServiceClient(server.address).grant_user_permission("ben", "experiment", experiment.experiment_id, "EDIT")
    other = node(server, tmp_path / "other", "ben", USERS["ben"], *RUN, "seed=2")
    assert other.communicate() and other.returncode == 0
    assert len(client.search_runs([experiment.experiment_id])) == 3
    for folder in tmp_path.iterdir():
        secrets = [*USERS.values(), PASSWORD]
        files = [file for file in folder.rglob("*") if file.is_file()]
        assert not [file for file in files if any(word.encode() in file.read_bytes() for word in secrets)]
