"""Make and check the MLflow database of a store."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import re
import sqlite3
from pathlib import Path
from urllib.parse import quote

from trainkit.errors import UserError
from trainkit.tracking.mlflow_errors import Away

_LOCK_SECONDS = 10.0
"""Time for which another writer may hold the database before it counts as locked; 1000 metrics take 0.1 s."""
_CHECKED_BYTES = 256 * 2**20
"""Databases up to this size are checked page by page at the start (0.3 s for 100 MB)."""
ELSEWHERE = "name another folder in TRAINKIT_STORE"


def settle_mlflow(local: bool = False) -> None:
    """Set environment variables of MLflow, except those that the user has set. Call before importing it.

    `local`: the store is a file of this machine.
    """
    if local:
        # No connection outlives a call: the file may be replaced, and none may hold the one that was.
        os.environ.setdefault("MLFLOW_SQLALCHEMYSTORE_POOLCLASS", "NullPool")
    for name, value in {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # The defaults (7 retries of 120 s, doubling pauses) take 247 s to notice a server that is down.
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
        # From the sending thread they would run through the lines of the training.
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    }.items():
        os.environ.setdefault(name, value)


def make_database(database: Path) -> None:
    """Make the database of a store, unless it is there. Raises UserError."""
    if database.is_file() and database.stat().st_size:
        return
    from filelock import FileLock, Timeout

    lock = database.with_name(f".{database.name}.lock")
    try:
        # Two processes that create it at once destroy it (MLflow migrates an empty database in many steps).
        with FileLock(lock, timeout=120):
            if database.is_file() and database.stat().st_size:
                return
            settle_mlflow(local=True)
            import mlflow.store.db.utils  # noqa: F401 - sets up the loggers that are quieted below
            from mlflow.tracking import MlflowClient

            aside = database.with_name(f".{database.name}.new")
            aside.unlink(missing_ok=True)
            uri = f"sqlite:///{aside}"
            loud = [logging.getLogger(name) for name in ("mlflow.store.db.utils", "alembic")]
            levels = [logger.level for logger in loud]
            for logger in loud:
                logger.setLevel(logging.WARNING)
            try:
                MlflowClient(tracking_uri=uri, registry_uri=uri).search_experiments(max_results=1)
            finally:
                for logger, level in zip(loud, levels, strict=True):
                    logger.setLevel(level)
            # SQLite gives its journals the mode of their database.
            aside.chmod(0o600)
            os.replace(aside, database)
    except Timeout:
        raise UserError(str(lock), "held by another process for 120 s", remedy="stop it, or delete the file") from None
    except OSError as error:
        raise UserError(str(database), f"cannot be made: {error.strerror or error}", remedy=ELSEWHERE) from None


def check_database(database: Path) -> None:
    """Check that MLflow can write the database. Raises UserError, and `Away` where it is locked."""
    restore = (
        f"restore a copy, or move it away and begin a new one (journals of the runs are in {database.parent}/runs)"
    )
    try:
        connection = sqlite3.connect(f"file:{quote(str(database))}?mode=rw", uri=True, timeout=_LOCK_SECONDS)
        try:
            connection.isolation_level = None
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
            version = connection.execute("SELECT version_num FROM alembic_version").fetchone()
            if database.stat().st_size <= _CHECKED_BYTES:
                verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
                if verdict != "ok":
                    raise UserError(str(database), f"damaged: {verdict.splitlines()[-1]}", remedy=restore)
        finally:
            connection.close()
    except sqlite3.OperationalError as error:
        text = str(error)
        if "locked" in text:
            found = f"locked by another program for {_LOCK_SECONDS:.0f} s"
            raise Away(str(database), found, remedy="close what holds it (a database browser?)") from None
        if "no such table" in text:
            raise UserError(str(database), "not an MLflow database", remedy=ELSEWHERE) from None
        if "readonly" in text or "unable to open" in text:
            raise UserError(str(database), f"cannot be written: {text}", remedy=ELSEWHERE) from None
        raise UserError(str(database), f"damaged: {text}", remedy=restore) from None
    except sqlite3.DatabaseError as error:
        raise UserError(str(database), f"damaged: {error}", remedy=restore) from None
    known, own = _schemas()
    if version and known and version[0] not in known:
        found = f"written by a newer MLflow (schema {version[0]})"
        raise UserError(str(database), found, remedy="install that MLflow, or name another store in TRAINKIT_STORE")
    if version and known and version[0] != own:
        # Where whole tables are missing, MLflow would change the database at once, without a copy.
        found = f"written by an older MLflow (schema {version[0]})"
        remedy = f"copy it, then run: mlflow db upgrade sqlite:///{database}"
        raise UserError(str(database), found, remedy=remedy)


@functools.cache
def _schemas() -> tuple[set[str], str]:
    """Return the database schemas that the installed MLflow knows, and its own."""
    spec = importlib.util.find_spec("mlflow")
    folder = Path(spec.origin or "").parent if spec else Path()
    texts = [file.read_text() for file in folder.glob("store/db_migrations/versions/*.py")]
    known, before = (
        {found[1] for text in texts if (found := re.search(rf'^{word}\s*=\s*"(\w+)"', text, re.MULTILINE))}
        for word in ("revision", "down_revision")
    )
    return known, next(iter(known - before), "")
