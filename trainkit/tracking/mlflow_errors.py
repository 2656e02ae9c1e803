"""Turn errors of MLflow's client into sentences about the tracking store, and tell temporary ones from the others."""

from __future__ import annotations

import os
import re

from trainkit.errors import UserError
from trainkit.redact import without_secrets

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
