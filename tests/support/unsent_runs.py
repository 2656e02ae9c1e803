"""Runs of tests that ask MLflow nothing: their folders are as ever, and nothing of them is sent.

A toy run takes 0.45 s of processor time, 0.2 s without MLflow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def leave_unsent(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """From now on a tracker creates no MLflow run, and its uploader does nothing and says that all was sent."""
    from trainkit.tracking.tracker import Tracker
    from trainkit.tracking.uploader import Uploader

    put(Tracker, "_connected", lambda self, store: None)
    put(Uploader, "start", lambda self: None)
    put(Uploader, "drain", lambda self, *limits: True)
    put(Uploader, "join", lambda self, timeout=None: None)
