"""A store that does not take something: one sentence says why, and what to do."""

from __future__ import annotations

import sqlite3

import pytest
from mlflow.exceptions import MlflowException
from proxy_server import proxy

from trainkit.errors import UserError
from trainkit.tracking import mlflow_client
from trainkit.tracking.mlflow_client import passes, reason
from trainkit.tracking.store import Store

SEARCH = "/api/2.0/mlflow/experiments/search"
POOL = "API request to http://h:5000/api failed with exception HTTPConnectionPool(host='h', port=5000): Max retries "
POOL += "exceeded with url: /api (Caused by {})"


def error(text: str, code: str = "INTERNAL_ERROR") -> MlflowException:
    made = MlflowException(text)
    made.error_code = code
    return made


@pytest.mark.parametrize(
    ("raised", "found", "temporary"),
    [
        (error(POOL.format("NewConnectionError('[Errno 111] Connection refused')")), "does not answer: NewConn", True),
        (error(POOL.format("ReadTimeoutError('Read timed out. (read timeout=7)')")), "does not answer: ReadT", True),
        (
            error(POOL.format("NameResolutionError(\"Failed to resolve 'h' ([Errno -2] x)\")")),
            "does not answer: N",
            False,
        ),
        (
            error(POOL.format("NameResolutionError(\"Failed to resolve 'h' ([Errno -3] x)\")")),
            "does not answer: N",
            True,
        ),
        (error(POOL.format("SSLError('certificate verify failed: self-signed')")), "refuses: SSLError('cert", False),
        (error(POOL.format("ResponseError('too many 503 error responses')")), "refuses: ResponseError", True),
        (error("API request to endpoint /x failed with error code 502 != 200"), "refuses: API request", True),
        (error("('Connection aborted.', RemoteDisconnected('closed'))"), "does not answer: ('Conn", True),
        (error("(sqlite3.OperationalError) database is locked\n[SQL: x]"), "refuses: (sqlite3.Op", True),
        (error("Invalid Host header - possible attack", "PERMISSION_DENIED"), "refuses: Invalid Host", False),
        (error("PERMISSION_DENIED: Permission denied", "PERMISSION_DENIED"), "does not allow", False),
        (error("You are not authenticated", "UNAUTHENTICATED"), "wants a password", False),
        (OSError("401 Client Error: UNAUTHORIZED for url: http://h/x"), "wants a password", False),
        (ValueError("of http://me:hunter2@h: 4010 things\nand more"), "refuses: of http://h: 4010 things", False),
        (KeyError(), "refuses: KeyError", False),
    ],
)
def test_what_the_client_raises_is_said_in_a_line_and_temporary_errors_are_known(raised, found, temporary, monkeypatch):
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    said = reason(raised)
    assert said[0].startswith(found) and passes(raised) is temporary
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
    assert "does not answer: " in refused()


def test_a_server_that_fails_or_hangs_up_is_told_from_one_that_is_away(door):
    door.says[SEARCH] = (503, "busy")
    assert "503" in refused()
    door.down = True
    assert "does not answer: " in refused()
    address = door.address
    door.shutdown()
    door.server_close()
    assert f"{address}: does not answer: " in (said := refused()) and "refused" in said


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
    known, own = mlflow_client._schemas()
    assert own == made and "451aebb31d03" in known and len(known) > 50
