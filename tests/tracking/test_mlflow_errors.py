"""A store that does not take something: one sentence says why, and what to do."""

from __future__ import annotations

import sqlite3

import pytest
from mlflow.exceptions import MlflowException
from proxy_server import proxy

from trainkit.errors import UserError
from trainkit.tracking import mlflow_database
from trainkit.tracking.mlflow_errors import reason
from trainkit.tracking.store import Store

SEARCH = "/api/2.0/mlflow/experiments/search"
POOL = "API request to http://h:5000/api failed with exception HTTPConnectionPool(host='h', port=5000): Max retries "
POOL += "exceeded with url: /api (Caused by {})"


def error(text: str, code: str = "INTERNAL_ERROR") -> MlflowException:
    made = MlflowException(text)
    made.error_code = code
    return made


@pytest.mark.parametrize(
    "raised, found, remedy",
    [
        (error(POOL.format("NewConnectionError('[Errno 111] Connection refused')")), "nothing listens", "start the"),
        (error(POOL.format("ReadTimeoutError('Read timed out. (read timeout=7)')")), "within 7 s", "REQUEST_TIMEOUT"),
        (error(POOL.format("ConnectTimeoutError(None, 'Connection to h timed out.')")), "within 7 s", "try later"),
        (
            error(POOL.format("NameResolutionError(\"Failed to resolve 'h' ([Errno -2] Name or service not known)\")")),
            "no machine of",
            "TRACKING_U",
        ),
        (
            error(POOL.format("NameResolutionError(\"Failed to resolve 'h' ([Errno -3] Temporary failure)\")")),
            "cannot be looked up now",
            "check the network",
        ),
        (error(POOL.format("SSLError(1, '[SSL: WRONG_VERSION_NUMBER] wrong version')")), "not speak https", "http://"),
        (error(POOL.format("SSLError('certificate verify failed: self-signed')")), "not trusted", "SERVER_CERT_PATH"),
        (error(POOL.format("ResponseError('too many 503 error responses')")), "fails with error 503", "printed"),
        (
            error("API request to endpoint /x failed with error code 502 != 200. Response body: 'x'"),
            "error 502",
            "print",
        ),
        (error("('Connection aborted.', RemoteDisconnected('closed'))"), "broke the connection", "printed"),
        (
            error("Invalid Host header - possible DNS rebinding attack", "PERMISSION_DENIED"),
            "by this name",
            "--allowed",
        ),
        (error("PERMISSION_DENIED: Permission denied", "PERMISSION_DENIED"), "does not allow", "permission to edit"),
        (error("You are not authenticated", "UNAUTHENTICATED"), "wants a password", "MLFLOW_TRACKING_USERNAME"),
        (ConnectionError("401 Client Error: UNAUTHORIZED for url: http://h/x"), "wants a password", "TRACKING_TOKEN"),
        (error("failed with error code 404 != 200", "ENDPOINT_NOT_FOUND"), "not an MLflow server", "TRACKING_URI"),
        (error("Detected out-of-date database schema (found version 1"), "another MLflow", "mlflow db upgrade"),
        (ValueError("of http://me:hunter2@h: 4010 things\nand more"), "refuses: of http://h: 4010 things", ""),
        (KeyError(), "refuses: KeyError", ""),
    ],
)
def test_what_the_client_raises_is_said_in_words(raised, found, remedy, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "7")
    monkeypatch.delenv("MLFLOW_TRACKING_USERNAME", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_TOKEN", raising=False)
    said = reason(raised)
    assert found in said[0] and remedy in said[1] and bool(remedy) == bool(said[1])
    assert "hunter2" not in " ".join(said) and "\n" not in said[0]


def test_what_no_store_says_keeps_its_traceback(store):
    here = Store.locate()
    for mistake in (KeyError("x"), TypeError("x"), ModuleNotFoundError("x", name="trainkit.x"), UnicodeError("x")):
        with pytest.raises(type(mistake)), here.asking():
            raise mistake
    for said in (ConnectionResetError("x"), sqlite3.OperationalError("x"), error("x"), TimeoutError("x")):
        with pytest.raises(UserError), here.asking():
            raise said
    with pytest.raises(UserError, match=r"needs the Python package psycopg2\b.*; install it"), here.asking():
        raise ModuleNotFoundError("No module named 'psycopg2'", name="psycopg2")


@pytest.fixture
def door(monkeypatch):
    """A server that is the store of this test; nothing is behind it."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with proxy() as door:
        door.says = {SEARCH: (200, '{"experiments": []}'), "/version": (200, "3.17.2")}
        monkeypatch.setenv("MLFLOW_TRACKING_URI", door.address)
        yield door


def refused() -> str:
    with pytest.raises(UserError) as caught:
        Store.locate().client()
    return str(caught.value)


def test_a_server_that_answers_is_taken(door):
    assert not Store.locate().client().search_experiments()
    door.says["/version"] = (404, "")  # one of those that do not say
    assert not Store.locate().client().search_experiments()


def test_a_server_that_wants_a_password_gets_one(door, monkeypatch):
    door.password = "me:hunter2"
    assert refused() == (
        f"{door.address}: wants a password; "
        "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    )
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "swordfish")
    said = refused()
    assert "does not take the password or token that is set" in said and "swordfish" not in said
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2")
    assert not Store.locate().client().search_experiments()


def test_a_server_that_is_slow_is_given_up_in_time(door):
    door.holds.set()
    assert "does not answer within 1 s; try later" in refused()


@pytest.mark.parametrize("answer", [(404, "<h1>Not Found</h1>"), (200, "<h1>Welcome</h1>")])
def test_another_server_is_no_mlflow_server(door, answer):
    door.says, door.otherwise = {}, answer
    assert "is not an MLflow server" in refused()


def test_a_server_that_fails_or_hangs_up_is_told_from_one_that_is_away(door):
    door.says[SEARCH] = (503, "busy")
    assert "fails with error 503" in refused()
    door.down = True
    assert "broke the connection" in refused()
    address = door.address
    door.shutdown()
    door.server_close()
    assert f"{address}: does not answer: nothing listens at that address; start the server" in refused()


def test_a_server_of_an_older_mlflow_is_named_with_its_version(door):
    door.says["/version"] = (200, "2.14.1")
    assert "is a server of MLflow 2.14.1" in refused() and "3 or newer" in refused()


def test_a_database_of_an_older_mlflow_is_left_as_it_is(store):
    here = Store.locate()
    with sqlite3.connect(here.database) as connection:
        # The first that there was.
        connection.execute("UPDATE alembic_version SET version_num = '451aebb31d03'")
        connection.execute("DROP TABLE logged_model_tags")
    connection.close()
    before = here.database.read_bytes()
    for ask in (here.prepare, here.client):
        with pytest.raises(UserError, match=r"older MLflow \(schema 451aebb31d03\)") as caught:
            ask()
    assert caught.value.remedy == f"copy it, then run: mlflow db upgrade sqlite:///{here.database}"
    assert here.database.read_bytes() == before, "MLflow itself would have made the table again, and changed others"


def test_the_newest_schema_is_that_of_a_new_database(store):
    with sqlite3.connect(store / "mlflow.db") as connection:
        (made,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    known = mlflow_database._schemas()
    assert known[-1] == made and known[0] == "451aebb31d03" and len(set(known)) == len(known) > 50
