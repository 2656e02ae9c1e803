"""What is wrong with a store that does not take something, in words, from what MLflow's client raises.

The client says such things as `HTTPConnectionPool(host=..., port=...): Max retries exceeded with url: ... (Caused by
NewConnectionError(...))`: what happened stands at the end of it.
"""

from __future__ import annotations

import os
import re

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
    (
        r"(?i)timed out|timeout exception",
        "does not answer within {seconds} s",
        "try later, or set MLFLOW_HTTP_REQUEST_TIMEOUT to more seconds",
    ),
    (r"Connection refused", "does not answer: nothing listens at that address", f"start the server, or {_ADDRESS}"),
    (
        r"Failed to resolve|NameResolutionError|Name or service not known",
        "does not answer: no machine of that name is known",
        _ADDRESS,
    ),
    (
        r"No route to host|Network is unreachable",
        "does not answer: there is no way to that machine",
        "check the network, or a VPN",
    ),
    (r"(?i)wrong.version.number|record layer failure", "does not speak https", "write http:// in MLFLOW_TRACKING_URI"),
    (
        r"certificate verify failed",
        "has a certificate that is not trusted",
        "name the file of its authority in MLFLOW_TRACKING_SERVER_CERT_PATH",
    ),
    (
        r"out-of-date database schema",
        "was written by another MLflow",
        "copy its database, then run: mlflow db upgrade ADDRESS, or install that MLflow",
    ),
    (r"Connection (aborted|reset)|RemoteDisconnected", "broke the connection", _ITS_LOG),
)


def is_refusal(error: BaseException) -> bool:
    """Whether the store fails, or the way to it: MLflow, the network, a database say so. All else is our mistake."""
    if isinstance(error, ModuleNotFoundError):  # the driver of a database, the client of a bucket
        return (error.name or "trainkit").partition(".")[0] not in ("trainkit", "mlflow")
    kinds = type(error).__mro__
    return isinstance(error, OSError) or any(kind.__module__.partition(".")[0] in _LIBRARIES for kind in kinds)


def reason(error: BaseException) -> tuple[str, str]:
    """What a store does or is, of an error of MLflow's client, and what mends it: empty where that is not known.

    The first goes on from the store's name: `wants a password`. Neither holds a password.
    """
    text, code = str(error), getattr(error, "error_code", "")
    if isinstance(error, ModuleNotFoundError):
        return f"needs the Python package {error.name}, which is not installed", "install it"
    if code in ("UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED") or re.search(r"\b401 Client Error|error code 401\b", text):
        given = os.environ.get("MLFLOW_TRACKING_USERNAME") or os.environ.get("MLFLOW_TRACKING_TOKEN")
        return "does not take the password or token that is set" if given else "wants a password", _CREDENTIALS
    if "Invalid Host header" in text:
        return "does not go by this name", "start it with --allowed-hosts NAME:PORT, or give its IP address"
    if code == "PERMISSION_DENIED" or re.search(r"\b403 Client Error|error code 403\b", text):
        return "does not allow this user to do that", "ask who runs it for the permission to edit"
    for sign, found, remedy in _SIGNS:
        if re.search(sign, text):
            return found.format(seconds=os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")), remedy
    if (failed := re.search(r"too many (\d+) error responses|error code (5\d\d)\b", text)) is not None:
        return f"fails with error {failed[1] or failed[2]}", _ITS_LOG
    if code == "ENDPOINT_NOT_FOUND" or "not in a valid JSON format" in text:
        return "is no MLflow server, or a very old one", _ADDRESS
    lines = without_secrets(text).strip().splitlines() or [type(error).__name__]
    return f"refuses: {lines[0][:_CHARS]}", ""
