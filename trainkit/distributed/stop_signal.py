"""Turn signals that ask a training to stop into one flag."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

ASKS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that ask a training to stop."""

STOP_SECONDS = 25.0
"""Default time for a training to stop after a signal: torch's launcher kills after 30 s."""

_NOTHING_TO_SAVE_SECONDS = 5.0

_ONE_REQUEST_SECONDS = 1.0
"""Signals this close together count as one: `timeout` sends two, and so do a terminal and a launcher."""


class Stopped(KeyboardInterrupt):
    """A stop request where nothing has to be saved first."""


class Stop:
    """Tells whether the training is to stop: after a signal, or because `asked` returns True.

    A signal turns the flag `told` on, and a loop that has something to save looks at it. Where nothing has to be saved
    (`with stop.at_once():`) it raises `Stopped` in the main thread instead.
    """

    def __init__(self, asked: Callable[[], bool] = lambda: False):
        self._asked = asked
        self.told = False
        """True once a signal has come."""
        self.last_words = ""
        """A line that is printed where the process is ended without more being saved."""
        self.seconds = STOP_SECONDS
        """After so many from the first signal on the process leaves, whatever it is at."""
        self._raises = self._raised = False
        self._first = 0.0

    def __call__(self) -> bool:
        """Return True where the training is to stop."""
        return self.told or self._asked()

    @staticmethod
    def of(stopping: Callable[[], bool]) -> Stop:
        """Return `stopping` as a `Stop`."""
        return stopping if isinstance(stopping, Stop) else Stop(stopping)

    def listen(self) -> None:
        """Install the handlers of signals; to be called once, in the main thread.

        SIGHUP is ignored: a lost terminal or connection is not a reason to stop. A second signal, a second or more
        after the first, ends the process at once. Ctrl-C ends the launcher too, and the kernel then sends the SIGTERM
        of `die_with_parent`, which does not count as a second request. Nor does the signal that torch's launcher of
        several processes passes on after all were signalled already, as on a machine that shuts down: under it a third
        signal counts.
        """
        self._parent, self._later = os.getppid(), 0
        self._excused = 1 if "TORCHELASTIC_RUN_ID" in os.environ else 0
        for number in ASKS:
            signal.signal(number, self._note)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # A handler runs between two instructions of the interpreter, and none is executed while the main thread waits
        # for another process: so a thread is woken as well.
        read, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        threading.Thread(target=self._see_to_it, args=(read,), name="trainkit-stop", daemon=True).start()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Return a context in which Ctrl-C asks for a stop and a second one interrupts, as in a notebook.

        Afterwards the process handles it as before. In another thread than the main one nothing is handled.
        """

        def note(number: int, frame: object) -> None:
            if self.told:
                raise KeyboardInterrupt
            self.told = True
            if self._raises:
                self._raised = True
                raise Stopped

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)

    def at_once(self) -> _Within:
        """Return a context in which a signal raises `Stopped`, also one that came before."""
        return _Within(self, True)

    def later(self) -> _Within:
        """Return a context in which a signal only sets the flag, whatever is around this."""
        return _Within(self, False)

    def save_first(self) -> None:
        """Have signals only set the flag, until the end of the context around this: there is something to save."""
        self._raises = False

    def _note(self, number: int, frame: object) -> None:
        now = time.monotonic()
        if not self._first:
            self._first, self.told = now, True
            if self._raises:  # only now: what cleans up afterwards is not to be interrupted
                self._raised = True
                raise Stopped
        elif now - self._first > _ONE_REQUEST_SECONDS and os.getppid() == self._parent:
            self._later += 1
            if self._later > self._excused:
                self._leave(number)

    def _see_to_it(self, read: socket.socket) -> None:
        while (number := read.recv(1)[0]) not in ASKS:
            pass
        began = time.monotonic()
        self.told = True
        while True:
            time.sleep(0.1)
            # What is read here may change meanwhile: a stop that raises has nothing to save.
            most = min(self.seconds, _NOTHING_TO_SAVE_SECONDS) if self._raises else self.seconds
            if time.monotonic() - began > most:
                break
        with contextlib.suppress(OSError, ValueError):
            print(f"asked to stop {most:.0f} s ago and still running; exiting without saving more", file=sys.stderr)
            faulthandler.dump_traceback(all_threads=True)
        self._leave(number)

    def _leave(self, number: int) -> NoReturn:
        if self.last_words:
            with contextlib.suppress(OSError):  # at once: a handler may have interrupted the printing of something else
                os.write(2, f"{self.last_words}\n".encode("utf-8", "backslashreplace"))
        os._exit(128 + number)


class _Within:
    """Sets for a while if a signal raises. A class, since a generator is resumed before it can turn anything off."""

    def __init__(self, stop: Stop, raises: bool):
        self._stop, self._raises = stop, raises

    def __enter__(self) -> None:
        self._before, self._stop._raises = self._stop._raises, self._raises
        if self._raises:
            self._look()

    def __exit__(self, *failure: Any) -> None:
        raises, self._stop._raises = self._stop._raises, self._before
        if failure[0] is None and raises:
            self._look()

    def _look(self) -> None:
        if self._stop.told and not self._stop._raised:
            self._stop._raises, self._stop._raised = self._before, True
            raise Stopped


def stop_flag() -> Stop:
    """Return a `Stop` with its handlers installed."""
    stop = Stop()
    stop.listen()
    return stop
