"""A process that hands metrics to MLflow, for trainings that have many.

MLflow's client is Python through and through: in a thread of the training it holds the interpreter, which the training
wants back at each operation of its network. Metrics that are handed over in another process cost the training nothing
on a machine with a core to spare. Such a process takes seconds of processor time to begin, so a training gets one only
when its thread has spent as much.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainkit.tracking.journal import Point
from trainkit.tracking.store import Store

WORTH_SECONDS = 3.0
"""Processor time that the sending thread has taken when a courier takes over: about what starting one takes."""
_PATIENCE = 120.0
"""Seconds within which a batch must be answered for."""


class Courier:
    """Hands over batches of metrics. For one thread; ends with the process that made it, however that ends."""

    def __init__(self, store: Store):
        root = str(Path(__file__).resolve().parents[2])
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))}
        # A session of its own: Ctrl-C is for the training, which still has something to send after it.
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            # -P: what is imported does not lie in the current folder, which may be a data set.
            [sys.executable, "-P", "-m", "trainkit.tracking.upload_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )
        # By its input and not as an argument, which others could read: the address may hold a password.
        self._tell({"home": str(store.home), "uri": store.uri})

    def took(self, run_id: str, batch: Sequence[tuple[str, Point]]) -> bool:
        """Whether these values are in the store now. If not, sending them again is harmless; it may be gone then."""
        return self._tell({"run": run_id, "rows": batch}) and self._answer()

    def close(self) -> None:
        """End it; what it is at may take a second."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()

    def kill(self) -> None:
        """End it at once, whatever it is at: another thread may be waiting for its answer."""
        process = self._process
        if process is not None:
            process.kill()

    def _tell(self, what: dict[str, Any]) -> bool:
        if self._process is not None:
            try:
                self._process.stdin.write(json.dumps(what).encode() + b"\n")
                self._process.stdin.flush()
                return True
            except OSError:
                self.close()
        return False

    def _answer(self) -> bool:
        ready, _, _ = select.select([self._process.stdout], [], [], _PATIENCE)
        answer = self._process.stdout.readline() if ready else b""
        if not answer:
            self.close()
        return answer == b"taken\n"


def main() -> None:
    """Take batches from the standard input, a line of JSON each, until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # What libraries print is not an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    client = None
    about = json.loads(sys.stdin.readline() or "{}")
    for line in sys.stdin:
        try:
            if client is None:
                client = Store(Path(about["home"]), about["uri"]).client()
            from trainkit.tracking.upload_queue import entity

            batch = json.loads(line)
            metrics = [entity(name, Point(*point)) for name, point in batch["rows"]]
            client.log_batch(batch["run"], metrics=metrics)
            said = "taken"
        except Exception:
            said = "refused"  # the training's own thread will try, and say why
        try:
            print(said, file=answers, flush=True)
        except OSError:
            return


if __name__ == "__main__":
    main()
