"""Ask all processes whether one of them should stop, while training continues."""

from __future__ import annotations

from collections.abc import Callable

from trainkit.distributed.runtime import Runtime


class StopPoll:
    """A question that travels during a step and is answered after it. Each is asked and answered exactly once."""

    def __init__(self, runtime: Runtime, stopping: Callable[[], bool]):
        self._runtime, self._stopping = runtime, stopping
        self._answer: Callable[[], bool] | None = None

    def ask(self) -> None:
        """Begin to ask."""
        if self._answer is not None:
            raise RuntimeError("the previous answer was not read")
        self._answer = self._runtime.any_async(self._stopping())

    def answer(self) -> bool:
        """Return whether any process is to stop, as of the question."""
        if self._answer is None:
            raise RuntimeError("nothing was asked")
        answer, self._answer = self._answer, None
        return answer()
