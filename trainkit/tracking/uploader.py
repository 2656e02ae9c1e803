"""Upload a run to the MLflow store, in one thread beside the training."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from trainkit.errors import UserError
from trainkit.tracking.mlflow_client import is_refusal, reason, unreachable
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store
from trainkit.tracking.sync import send_left
from trainkit.tracking.upload import Upload

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

EVERY_SECONDS = 3.0
"""Pause between two batches; doubled, up to a minute, for each failure in a row."""

SWITCH_SECONDS = 5e-4
"""Time after which a thread hands the interpreter over in a process with an uploader; Python's own is 5 ms.

MLflow's client is pure Python, and a training releases the interpreter at each operation of its network: to get it back
it waits so long. With steps of 40 small products and 8 metrics a step on two busy cores, uploading added 0.9 ms to the
mean step and the slowest hundredth took 25 ms; with this setting 0.5 ms and 14 ms.
"""

_log = logging.getLogger("trainkit")


class Uploader(threading.Thread):
    """The thread that uploads a run."""

    def __init__(self, store: Store, upload: Upload, *, waits: bool):
        """Make the thread; with `waits` it uploads nothing before `released` is set."""
        super().__init__(name="trainkit-uploader", daemon=True)
        self.where = store.shown
        self._store, self._upload = store, upload
        self._client: MlflowClient | None = None
        self.wake, self.released = threading.Event(), threading.Event()
        if not waits:
            self.released.set()
        self._stopping = self._urgent = False
        self._failures = 0
        self._left: list[RunFolder] | None = None
        """Other finished runs that have something left; None before they were looked for."""

    def begin(self, client: MlflowClient | None) -> None:
        """Start, with a client of the store; None where it was unavailable when the run began."""
        self._client, self._failures = client, int(client is None)
        self.start()

    def run(self) -> None:
        """Upload until stopped."""
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        while not self._stopping:
            pause = min(60.0, EVERY_SECONDS * 2**self._failures) if not self._urgent else 0.2
            self.wake.wait(pause)
            self.wake.clear()
            if self._left is None and self._client is not None:
                # At the first line, not while the training starts: 10,000 runs are looked at in 0.12 s.
                self._left = []
                with _errors_logged():
                    for run in self._store.abandoned():
                        self._complete(run)
                    self._left = self._store.unsent()
            if self.released.is_set():
                self._try()
            if self._left and not self._failures and not self._urgent:
                with _errors_logged():
                    self._complete(self._left.pop(0))
                self.wake.set()

    def _try(self) -> None:
        try:
            client = self._client
            if client is None:
                client = self._client = self._store.client()
            self._upload.send(client)
        except Exception as error:
            if self._failures == 0:
                _log.warning(
                    "%s does not take the metrics (%s); training continues, they are kept in %s and sent when it does",
                    self.where, reason(error)[0], self._upload.folder.path,
                    exc_info=None if isinstance(error, UserError) or is_refusal(error) else error,
                )  # fmt: skip
            self._failures = min(self._failures + 1, 10)
            if not unreachable(error):
                # Another database may be in the place of the one that was, or the run gone from it.
                self._client = None
                self._upload.recheck_run()
        else:
            if self._failures:
                _log.warning("%s takes metrics again; nothing was lost", self.where)
            self._failures = 0

    def drain(self, timeout: float, hurried: Callable[[], bool] = lambda: False, then: float = 0.0) -> bool:
        """Wait until everything that is recorded now is uploaded; once `hurried()`, at most `then` seconds more."""
        end, hurries = time.monotonic() + timeout, False
        with contextlib.suppress(UserError):  # the run's folder is gone: what has no file is sent from memory
            self._upload.desired.write_waiting()
        ends = self._upload.ends()
        self._urgent = True
        try:
            while not self._upload.reached(ends):
                if not hurries and hurried():
                    end, hurries = min(end, time.monotonic() + then), True
                if not self.is_alive() or time.monotonic() > end:
                    return False
                self.wake.set()
                time.sleep(0.02)
            return True
        finally:
            self._urgent = False

    def stop(self) -> None:
        """Let the thread end; a call that hangs is left behind."""
        self._stopping = self._upload.closed = True
        self.wake.set()
        self.join(timeout=1.0)

    def delete_run(self) -> None:
        """Delete the MLflow run, if it was created."""
        if (run_id := self._upload.run_id) is None:
            return
        try:
            with self._store.asking():
                (self._client or self._store.client()).delete_run(run_id)
        except Exception as error:  # the refusal that led here is what is to be said
            _log.warning("MLflow run %s of a refused run could not be deleted: %s", run_id, reason(error)[0])

    def _complete(self, folder: RunFolder) -> None:
        """Upload what another run has left; else one whose process was killed would stay RUNNING for ever."""
        client = self._client
        if client is None:
            return  # the store became unavailable
        with contextlib.suppress(UserError), folder.sending():  # or another process, or this one, has it
            send_left(folder, self._store, client)


@contextlib.contextmanager
def _errors_logged() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        level = logging.DEBUG if is_refusal(error) else logging.ERROR
        _log.log(level, "completing runs that were left", exc_info=error)
