"""The one thread that talks to the MLflow store while a run goes on."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from trainkit.distributed import rank_failures
from trainkit.errors import UserError
from trainkit.redact import without_secrets
from trainkit.tracking import mlflow_run, upload_process
from trainkit.tracking.journal import Journal
from trainkit.tracking.mlflow_errors import is_refusal, reason, unreachable
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store
from trainkit.tracking.upload_queue import Outbox

EVERY_SECONDS = 3.0
"""Pause between two batches; doubled, up to a minute, for each failure in a row."""

SWITCH_SECONDS = 5e-4
"""After how long a thread hands the interpreter over in a process that has had a sender; Python's own 5 ms.

MLflow's client is Python through and through, and a training gives the interpreter up at each operation of its network:
to get it back it waits so long. With steps of 40 small products and 8 metrics a step on two busy cores, sending added
0.9 ms to the mean step and the slowest hundredth took 25 ms; so it is 0.5 ms and 14 ms.
"""

_log = logging.getLogger("trainkit")


class Sender(threading.Thread):
    """The one thread that talks to the store."""

    def __init__(self, store: Store, outbox: Outbox, *, waits: bool):
        """`waits`: until `released`."""
        super().__init__(name="trainkit-sender", daemon=True)
        self.where = store.shown
        self._store, self._outbox = store, outbox
        self._client: Any = None
        self.wake, self.released = threading.Event(), threading.Event()
        if not waits:
            self.released.set()
        self._stopping = self._urgent = False
        self._failures = 0
        self._left: list[RunFolder] | None = None
        """Other runs that are over and have something left; None as long as nobody has looked."""

    def begin(self, client: Any) -> None:
        """Start, with a client of the store; None where it was away when the run began, which was said then."""
        self._client, self._failures = client, int(client is None)
        self.start()

    def run(self) -> None:
        """Send until stopped."""
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        while not self._stopping:
            pause = min(60.0, EVERY_SECONDS * 2**self._failures) if not self._urgent else 0.2
            self.wake.wait(pause)
            self.wake.clear()
            if self._left is None and self._client is not None:
                # At the first line, not while the training starts: 10,000 runs are looked at in 0.12 s.
                self._left = []
                with _saying():
                    for run in self._store.abandoned():
                        self._complete(run)
                    self._left = self._store.unsent()
            if self.released.is_set():
                self._try()
                if self._outbox.courier is None and time.thread_time() > upload_process.WORTH_SECONDS:
                    self._outbox.courier = upload_process.Courier(self._store)
            if self._left and not self._failures and not self._urgent:
                with _saying():
                    self._complete(self._left.pop(0))
                self.wake.set()
        if self._outbox.courier is not None:
            self._outbox.courier.close()

    def _try(self) -> None:
        try:
            if self._client is None:
                self._store.forget()
                self._client = self._store.client()
            self._outbox.send(self._client)
        except Exception as error:
            if self._failures == 0:
                _log.warning(
                    "%s does not take the metrics (%s); training goes on, they are kept in %s and sent when it does",
                    self.where, reason(error)[0], self._outbox.folder.path,
                    exc_info=None if isinstance(error, UserError) or is_refusal(error) else error,
                )  # fmt: skip
            self._failures = min(self._failures + 1, 10)
            if not unreachable(error):
                # Another database may be in the place of the one that was, or the run gone from it.
                self._client = None
                self._outbox.doubt()
        else:
            if self._failures:
                _log.warning("%s takes metrics again; nothing was lost", self.where)
            self._failures = 0

    def drain(self, timeout: float, hurried: Callable[[], bool] = lambda: False, then: float = 0.0) -> bool:
        """Wait until everything that is recorded now is sent; once it is `hurried`, at most `then` seconds more."""
        end, hurries = time.monotonic() + timeout, False
        with contextlib.suppress(UserError):  # the run's folder is gone: what can be told is sent from memory
            self._outbox.put_down()
        position, waiting = self._outbox.journal.position, self._outbox.waiting()
        self._urgent = True
        try:
            while True:
                told = self._outbox.acknowledged >= position or not self._outbox.journal.path.exists()
                jobs = self._outbox.unsaid() or any(path.exists() for path in waiting)
                if self._outbox.run_id and told and not jobs:
                    return True
                if not hurries and hurried():
                    end, hurries = min(end, time.monotonic() + then), True
                if not self.is_alive() or time.monotonic() > end:
                    return False
                self.wake.set()
                time.sleep(0.02)
        finally:
            self._urgent = False

    def stop(self) -> None:
        """Let the thread end; a call that hangs is left behind, and a process that does is ended."""
        self._stopping = self._outbox.closed = True
        self.wake.set()
        self.join(timeout=1.0)
        if self.is_alive() and self._outbox.courier is not None:
            self._outbox.courier.kill()

    def _complete(self, folder: RunFolder) -> None:
        """Send what another run has left; one whose process died without a word is said to run for ever else."""
        with contextlib.suppress(UserError), folder.sending():  # or another process, or this one, has it
            send_left(folder, self._store, self._client)


@contextlib.contextmanager
def _saying() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        level = logging.DEBUG if is_refusal(error) else logging.ERROR
        _log.log(level, "completing runs that were left", exc_info=error)


def send_left(folder: RunFolder, store: Store, client: Any) -> None:
    """Send what a claimed run that is over has left; one that never said its end was killed, or `faults` says more."""
    info = folder.info()
    if info.run_id is None and not mlflow_run.pending(folder):
        ended = "FAILED" if rank_failures.left(folder.path) else "KILLED"
        folder.update(status=ended if info.status == "RUNNING" else info.status)
        return
    seen = last_sign(folder)
    journal = Journal(folder.journal)
    try:
        outbox = Outbox(folder, store, journal)
        if info.status == "RUNNING":
            # Its process is gone without a word, or this could not have been claimed.
            why = rank_failures.left(folder.path)
            status = "FAILED" if why else "KILLED"
            folder.update(status=status, last_step=journal.last_step, unsent=True)
            if why:
                outbox.put({"kind": "tags", "tags": {"trainkit.error": without_secrets(why)[:5000]}})
            outbox.put({"kind": "end", "status": status, "time": int(1000 * seen)})
        outbox.send(client)
        # Its end may have been lost between run.json and the outbox, or with an older copy of the database.
        if client.get_run(outbox.run_id).info.status == "RUNNING":
            client.set_terminated(outbox.run_id, status=folder.info().status, end_time=int(1000 * seen))
        if folder.info().unsent:
            folder.update(unsent=False)
    finally:
        journal.close()


def last_sign(folder: RunFolder) -> float:
    """When a run was last heard of, in seconds since 1970."""
    return max(path.stat().st_mtime for path in (folder.journal, folder.path / "run.json") if path.exists())
