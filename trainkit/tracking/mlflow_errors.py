"""Turn errors of MLflow's client into sentences about the tracking store.

The client says such things as `HTTPConnectionPool(host=..., port=...): Max retries exceeded with url: ... (Caused by
NewConnectionError(...))`: the cause stands at the end of it.
"""

from __future__ import annotations

import os
import re

from trainkit.errors import UserError
from trainkit.redact import without_secrets

_CREDENTIALS = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
_ADDRESS = "check MLFLOW_TRACKING_URI"
_ITS_LOG = "see what the server itself has printed"
_CHARS = 300

_LIBRARIES = frozenset(
    [
        *("mlflow", "requests", "urllib3", "sqlalchemy", "sqlite3", "psycopg2", "psycopg", "pymysql", "MySQLdb"),
        *("botocore", "boto3", "s3transfer", "google", "azure", "paramiko"),
    ]
)
"""Packages that stand between a run and its store, by the first word of the module of what they raise."""

_SIGNS = (
    (r"(?i)timed out|timeout exception", "does not answer within {seconds} s",
     "try later, or set MLFLOW_HTTP_REQUEST_TIMEOUT to more seconds", True),
    (r"Connection refused", "does not answer: nothing listens at that address",
     f"start the server, or {_ADDRESS}", True),
    # The resolver tells a name that there is not from one that it cannot ask for now.
    (r"Errno -3\b|Temporary failure in name resolution", "does not answer: its name cannot be looked up now",
     "check the network", True),
    (r"Failed to resolve|NameResolutionError|Name or service not known",
     "does not answer: no machine of that name is known", _ADDRESS, False),
    (r"No route to host|Network is unreachable", "does not answer: the network has no route to that machine",
     "check the network, or a VPN", True),
    (r"(?i)wrong.version.number|record layer failure", "does not speak https", "write http:// in MLFLOW_TRACKING_URI",
     False),
    (r"certificate verify failed", "has a certificate that is not trusted",
     "name the file of its authority in MLFLOW_TRACKING_SERVER_CERT_PATH", False),
    (r"out-of-date database schema", "was written by another MLflow",
     "copy its database, then run: mlflow db upgrade ADDRESS, or install that MLflow", False),
    (r"Connection (aborted|reset)|RemoteDisconnected|IncompleteRead|Broken pipe", "broke the connection",
     _ITS_LOG, True),
    (r"database is locked", "is locked by another program", "close what holds it (a database browser?)", True),
    (r"disk is full|No space left on device", "is on a disk that is full", "make room there", True),
)  # fmt: skip
"""Pattern in the text of an error, its meaning, its remedy, and True if the error may be temporary."""

_FAILED = re.compile(r"too many (\d+) error responses|error code (5\d\d|408|429)\b")


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
        return "does not take the password or token that is set" if given else "wants a password", _CREDENTIALS
    if "Invalid Host header" in text:
        return "does not go by this name", "start it with --allowed-hosts NAME:PORT, or give its IP address"
    if code == "PERMISSION_DENIED" or re.search(r"\b403 Client Error|error code 403\b", text):
        return "does not allow this user to do that", "ask its administrator for permission to edit"
    if (sign := _sign(text)) is not None:
        return sign[1].format(seconds=os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")), sign[2]
    if (failed := _FAILED.search(text)) is not None:
        return f"fails with error {failed[1] or failed[2]}", _ITS_LOG
    if code == "ENDPOINT_NOT_FOUND" or "not in a valid JSON format" in text:
        return "is not an MLflow server, or a very old one", _ADDRESS
    lines = without_secrets(text).strip().splitlines() or [type(error).__name__]
    return f"refuses: {lines[0][:_CHARS]}", ""


def unreachable(error: BaseException) -> bool:
    """Return True where the store takes nothing at all now: it is unavailable, locked or full."""
    if isinstance(error, UserError):
        return isinstance(error, Away)
    sign = _sign(str(error))
    return is_refusal(error) and sign is not None and sign[3]


def passes(error: BaseException) -> bool:
    """Return True for a temporary error, as opposed to one such as a wrong password."""
    if isinstance(error, UserError) or not is_refusal(error):
        return isinstance(error, Away)
    # Said by a server of itself; a database that is opened here says what is wrong with it in words.
    of_server = type(error).__name__ == "RestException"
    busy = of_server and getattr(error, "error_code", "") in ("TEMPORARILY_UNAVAILABLE", "INTERNAL_ERROR")
    return busy or unreachable(error) or (_sign(str(error)) is None and _FAILED.search(str(error)) is not None)


def _sign(text: str) -> tuple[str, str, str, bool] | None:
    return next((sign for sign in _SIGNS if re.search(sign[0], text)), None)
