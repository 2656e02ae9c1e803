"""Trackers of runs that are not trained, and what their store then holds."""

from __future__ import annotations

import contextlib
import logging
import sqlite3

import pytest

from trainkit.tracking import tracker as tracking
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store
from trainkit.tracking.tracker import Tracker


def begin(store: Store, folder: RunFolder | None = None, experiment: str = "faces", **more) -> Tracker:
    """The tracker of a new run, or of the one in a folder."""
    folder = folder or store.new_run("faces", 0, "a1b2c3d4")
    given = {"experiment": experiment, "run_name": folder.name, "params": {"lr": 0.1}, "system_metrics_every": 0}
    return Tracker.start(folder, store, **given | more)


def crash(tracker: Tracker) -> None:
    """Leave a tracker as a killed process would: nothing more is sent or written, its claim is gone."""
    tracking.atexit.unregister(tracker._at_exit)
    tracker._finished = True
    tracker._uploader._stopping = True
    tracker._uploader.wake.set()
    tracker._uploader.join(timeout=30)
    tracker.folder.release()


def ask(store: Store, words: str, *values: object) -> list[tuple]:
    """The rows of a query to the database of a store."""
    with contextlib.closing(sqlite3.connect(store.database)) as connection:
        return connection.execute(words, values).fetchall()


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What trainkit has warned of."""
    return [e.getMessage() for e in caplog.records if e.levelno >= logging.WARNING and e.name == "trainkit"]
