"""Correct the paths of artifacts after the store's folder was moved: `trainkit relocate`.

MLflow keeps the place of every artifact as an absolute path, of experiments, runs, logged models and versions of
registered models alike. All that lead into the old folder are changed in one transaction.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from trainkit.errors import UserError, few, number_of
from trainkit.tracking.store import Store

_COLUMNS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
_LOCK_SECONDS = 20.0


@dataclass(frozen=True)
class Relocated:
    """Changes that `relocate` made."""

    homes: list[Path] = field(default_factory=list)
    """Former folders of the store."""
    changed: dict[str, int] = field(default_factory=dict)
    """Table of the database to the number of its rows that were changed."""
    left: dict[Path, int] = field(default_factory=dict)
    """Former folders that still hold artifacts which this one does not, to the number of rows, which are unchanged."""
    copy: Path | None = None
    """The database as it was before."""
    elsewhere: list[str] = field(default_factory=list)
    """Runs of other machines that are marked as running."""


def relocate(store: Store, home: Path | None = None) -> Relocated:
    """Give every artifact of the store its place in the folder where the store is now.

    `home` is the folder in which it was; without one, each in which the database says that an experiment keeps its
    artifacts. What still lies there and not here stays as it is. Raises UserError for a store that is a server, for
    one without a database, while a run of it goes on, and where nothing lay in `home`.
    """
    database = store.database
    if database is None:
        remedy = "on its machine, set TRAINKIT_STORE to the folder of its database, or see `mlflow server --help`"
        raise UserError(store.shown, "a server, which knows itself where its artifacts are", remedy=remedy)
    if not database.is_file():
        raise UserError(str(database), "does not exist", remedy="name the folder of the store in TRAINKIT_STORE")
    store.prepare()
    here = database.parent
    connection = sqlite3.connect(database, timeout=_LOCK_SECONDS, isolation_level=None)
    try:
        # Nothing can begin a run from here on.
        connection.execute("BEGIN IMMEDIATE")
        elsewhere = _refuse_while_running(store)
        homes = [home.expanduser().absolute()] if home else _former(connection, here)
        moves, left = _moves(connection, store, here, homes)
        if home and not moves and not left:
            known = few(str(path) for path in _former(connection, here))
            remedy = f"they lay in {known}" if known else "all are where the database says"
            raise UserError(str(home), "no artifact of this store was there", remedy=remedy)
        copy = _copied(database) if moves else None
        changed: dict[str, int] = {}
        for (table, column), row, place in moves:
            connection.execute(f'UPDATE "{table}" SET "{column}" = ? WHERE rowid = ?', (place, row))
            changed[table] = changed.get(table, 0) + 1
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        remedy = "close what holds it (`trainkit ui`?)" if "locked" in str(error) else "nothing was changed"
        raise UserError(str(database), str(error), remedy=remedy) from None
    finally:
        connection.close()  # what was not committed is as it was
    return Relocated(homes if moves or left else [], changed, left, copy, elsewhere)


def strayed(store: Store, place: str) -> Path | None:
    """Return the former folder of the store where the `place` of an experiment's files lies in it and is gone.

    None where the files are there, and for a place that this program did not make.
    """
    path = folder_of(place)
    if store.database is None or path is None or path.parent.name != "artifacts" or path.exists():
        return None
    home = path.parent.parent
    moved = (store.database.parent / "artifacts" / path.name).exists() or not home.exists()
    return home if moved and home != store.database.parent else None


def _refuse_while_running(store: Store) -> list[str]:
    here, elsewhere = [], []
    for folder in store.runs():
        if folder.alive():
            info = folder.info()
            (here if info.host == socket.gethostname() else elsewhere).append(folder.name)
    if here:
        found = f"{number_of(len(here), 'runs')} in progress: {few(here)}"
        raise UserError(str(store.home), found, remedy="wait for the end, or stop them first")
    return elsewhere


def _former(connection: sqlite3.Connection, here: Path) -> list[Path]:
    """Return folders, other than this one, in whose `artifacts/` an experiment keeps its files."""
    places = [folder_of(place) for (place,) in connection.execute("SELECT artifact_location FROM experiments")]
    homes = [place.parent.parent for place in places if place is not None and place.parent.name == "artifacts"]
    return sorted({home for home in homes if home != here})


def _moves(
    connection: sqlite3.Connection, store: Store, here: Path, homes: list[Path]
) -> tuple[list[tuple[tuple[str, str], int, str]], dict[Path, int]]:
    """Return column, row and new value of all that is to be changed; and the number of rows left by former folder."""
    moves: list[tuple[tuple[str, str], int, str]] = []
    left = dict.fromkeys(homes, 0)
    for (table, column), row, said, path in _places(connection):
        home = next((home for home in homes if path.is_relative_to(home / "artifacts")), None)
        if home is None:
            continue
        now = here / path.relative_to(home)
        if path.exists() and not now.exists():
            left[home] += 1
        else:
            moves.append(((table, column), row, now.as_uri() if said.startswith("file:") else str(now)))
    # The run's own folder is a tag, for people.
    for row, said in connection.execute("SELECT rowid, value FROM tags WHERE key = 'trainkit.folder'"):
        now = store.home / "runs" / Path(said).name
        if moves and str(now) != said and now.is_dir():
            moves.append((("tags", "value"), row, str(now)))
    return moves, {home: count for home, count in left.items() if count}


def _places(connection: sqlite3.Connection) -> Iterator[tuple[tuple[str, str], int, str, Path]]:
    for table, column in _COLUMNS:
        for row, said in connection.execute(f'SELECT rowid, "{column}" FROM "{table}"').fetchall():
            path = folder_of(said)
            if path is not None:
                yield (table, column), row, said, path


def folder_of(place: str | None) -> Path | None:
    """Return the folder that a place of artifacts names; None for one that is no folder."""
    if place and place.startswith("file:"):
        return Path(unquote(urlsplit(place).path))
    return Path(place) if place and place.startswith("/") else None


def _copied(database: Path) -> Path:
    """Copy the database beside itself; returns the copy's path. Raises UserError."""
    copy = database.with_name(f"{database.stem}-before-{time.strftime('%m%d-%H%M%S')}.db")
    try:
        with contextlib.closing(sqlite3.connect(database)) as old, contextlib.closing(sqlite3.connect(copy)) as new:
            old.backup(new)
        shutil.copymode(database, copy)
    except (sqlite3.Error, OSError) as error:
        copy.unlink(missing_ok=True)
        found = f"the copy of the database could not be made: {error}"
        raise UserError(str(copy), found, remedy="make room; nothing was changed") from None
    return copy


def described(done: Relocated, say: Callable[[str], object]) -> None:
    """Report the changes line by line."""
    for home in done.homes:
        say(f"the store was in {home}")
    for table, count in done.changed.items():
        say(f"{table.replace('_', ' ')}: {count} now here")
    if done.copy:
        say(f"the database as it was: {done.copy}")
    for home, count in done.left.items():
        say(f"note: {number_of(count, 'places')} in {home} hold files that are not here; move them, and relocate again")
    for name in done.elsewhere:
        say(f"note: run {name} of another machine is recorded as running; its files still go to the older folder")
    if not done.changed and not done.left:
        say("every artifact is where the database says")
