"""Set up MLflow's client, put its errors into sentences about the store, and make and check its database."""

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
from trainkit.redact import without_secrets

_LOCK_SECONDS = 10.0
"""Time for which another writer may hold the database before it counts as locked; 1000 metrics take 0.1 s."""
_CHECKED_BYTES = 256 * 2**20
"""Databases up to this size are checked page by page at the start (0.3 s for 100 MB)."""
ELSEWHERE = "name another folder in TRAINKIT_STORE"
_CHARS = 300
_LIBRARIES = frozenset(
    [
        *("mlflow", "requests", "urllib3", "sqlalchemy", "sqlite3", "psycopg2", "psycopg", "pymysql", "MySQLdb"),
        *("botocore", "boto3", "s3transfer", "google", "azure", "paramiko"),
    ]
)
"""Packages that stand between a run and its store, by the first word of the module of what they raise."""
_SILENT = re.compile(
    # The resolver tells a name that there is not (-2) from one that it cannot ask for now (-3).
    r"(?i)timed out|timeout exception|connection (refused|aborted|reset)|errno -3\b|temporary failure in name"
    r"|no route to host|network is unreachable|RemoteDisconnected|IncompleteRead|broken pipe"
)
"""Words of errors of a store that does not answer now, and may later."""
_HELD = re.compile(r"database is locked|disk is full|No space left on device")
"""Words of errors of a store that takes nothing at all now."""
_BUSY = re.compile(r"too many \d+ error responses|error code (5\d\d|408|429)\b")


class Away(UserError):
    """A tracking store is unavailable and may answer later. A run that begins meanwhile is kept in its folder."""

    def __reduce__(self):
        """Pickle as this class."""
        return Away, (self.where, self.found, self.expected, self.remedy)


def is_refusal(error: BaseException) -> bool:
    """Return True for an error of MLflow, the network or a database; any other is an error of this program."""
    if isinstance(error, ModuleNotFoundError):  # the driver of a database, the client of a bucket
        return (error.name or "trainkit").partition(".")[0] not in ("trainkit", "mlflow")
    kinds = type(error).__mro__
    return isinstance(error, OSError) or any(kind.__module__.partition(".")[0] in _LIBRARIES for kind in kinds)


def reason(error: BaseException) -> tuple[str, str]:
    """Return what an error of MLflow's client says about the store, and its remedy, empty where none is known.

    The first continues a sentence that begins with the store's name: `wants a password`. Neither holds a password.
    """
    text, code = str(error), getattr(error, "error_code", "")
    if isinstance(error, UserError):
        return error.found if "://" in error.where else f"{error.where}: {error.found}", error.remedy
    if isinstance(error, ModuleNotFoundError):
        return f"needs the Python package {error.name}, which is not installed", "install it"
    if code in ("UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED") or re.search(r"\b401 Client Error|error code 401\b", text):
        given = os.environ.get("MLFLOW_TRACKING_USERNAME") or os.environ.get("MLFLOW_TRACKING_TOKEN")
        remedy = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        return "does not take the password or token that is set" if given else "wants a password", remedy
    forbidden = code == "PERMISSION_DENIED" or re.search(r"\b403 Client Error|error code 403\b", text)
    if forbidden and "Invalid Host" not in text:  # a name that --allowed-hosts lacks
        return "does not allow this user to do that", "ask its administrator for permission to edit"
    cause = without_secrets(text.rpartition("Caused by ")[2]).strip().splitlines() or [type(error).__name__]
    if _SILENT.search(text) or "Failed to resolve" in text:
        return f"does not answer: {cause[0][:_CHARS]}", "check MLFLOW_TRACKING_URI, the network and the server"
    return f"refuses: {cause[0][:_CHARS]}", ""


def unreachable(error: BaseException) -> bool:
    """Return True where the store takes nothing at all now: it is unavailable, locked or full."""
    if isinstance(error, UserError):
        return isinstance(error, Away)
    return is_refusal(error) and bool(_SILENT.search(str(error)) or _HELD.search(str(error)))


def passes(error: BaseException) -> bool:
    """Return True for a temporary error, as opposed to one such as a wrong password."""
    if isinstance(error, UserError) or not is_refusal(error):
        return isinstance(error, Away)
    # Said by a server of itself; a database that is opened here says what is wrong with it in words.
    of_server = type(error).__name__ == "RestException"
    busy = of_server and getattr(error, "error_code", "") in ("TEMPORARILY_UNAVAILABLE", "INTERNAL_ERROR")
    return busy or unreachable(error) or _BUSY.search(str(error)) is not None


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
    except sqlite3.DatabaseError as error:
        text = str(error)
        if "locked" in text:
            found = f"locked by another program for {_LOCK_SECONDS:.0f} s"
            raise Away(str(database), found, remedy="close what holds it (a database browser?)") from None
        if "no such table" in text:
            raise UserError(str(database), "not an MLflow database", remedy=ELSEWHERE) from None
        if "readonly" in text or "unable to open" in text:
            raise UserError(str(database), f"cannot be written: {text}", remedy=ELSEWHERE) from None
        raise UserError(str(database), f"damaged: {text}", remedy=restore) from None
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
