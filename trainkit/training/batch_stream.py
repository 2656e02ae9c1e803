"""The micro-batches of one rank in training order, on their device."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path

from trainkit.config.schema import Recipe
from trainkit.data.loader import stream
from trainkit.data.loader.damaged_samples import Damage
from trainkit.distributed.runtime import Runtime
from trainkit.distributed.stop_signal import Stop
from trainkit.interfaces import Batch, Dataset, Split
from trainkit.training import teacher_cache
from trainkit.training.model import Model
from trainkit.training.plan import Plan
from trainkit.training.run_logger import RunLogger


class BatchStream:
    """Read micro-batches in the order of the plan, with cached teacher outputs, in one stream for all epochs.

    `cache` is the shared folder of teacher outputs. None: nothing is stored, for tools that only measure speed.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: Dataset,
        model: Model,
        runtime: Runtime,
        logger: RunLogger,
        cache: Path | None,
        stop: Stop,
    ):
        self._recipe, self._data, self._model = recipe, data, model
        self._runtime, self._logger, self._clock = runtime, logger, logger.clock
        self._cache, self._stop = cache, stop
        self._split: Split = data.train
        self.complete = False
        """Whether all cached outputs are there: training can begin."""
        self._damage: Damage | None = None  # a checkpoint may be due before anything was trained on
        self._read_from: Generator[Batch] | None = None
        self._stream: Iterator[Batch] = iter(())

    def open(self, resumed: bool) -> bool:
        """Find or compute cached teacher outputs. False: told to stop before all were computed."""
        self._clock.to("setup")
        networks, runtime, logger = self._model.networks, self._runtime, self._logger
        split = teacher_cache.outputs(networks, self._data.train, runtime, logger, self._cache, self._stop)
        self.complete, self._split = split is not None, split or self._data.train
        self._damage = Damage.policy(self._recipe, self._data, self._split)
        if self._damage is not None and resumed:
            self._damage.add(runtime.broadcast(logger.damaged()))
        return self.complete

    def restart(self, plan: Plan, step: int) -> None:
        """Begin anew at the batches of `step`. Workers are forked at the next batch: nothing may be writing then."""
        self.close()
        self._read_from = self._read(plan, step)
        self._stream = stream.copied(self._read_from, self._runtime.to_device, self._runtime.device)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Read a micro-batch; the clock is left in the phase `transfer`."""
        self._clock.to("data")
        batch = next(self._stream)
        self._clock.to("transfer")
        return self._split.on_device(self._runtime.to_device(batch))

    def log_damage(self, step: int) -> None:
        """Log samples that were found damaged on any rank, and what was trained on in their place."""
        if self._damage is not None:
            self._damage.add(
                [one for found in self._runtime.all_gather(list(self._damage.found.values())) for one in found]
            )
            self._logger.replaced(step, self._damage.found.values())

    def close(self) -> None:
        """End workers."""
        self._stream = iter(())
        if self._read_from is not None:
            self._read_from.close()
            self._read_from = None

    def _read(self, plan: Plan, step: int) -> Generator[Batch]:
        keys, pin = partial(plan.keys, self._split, step), self._runtime.device.type == "cuda"

        def lost(said: str) -> None:
            self._logger.tracker.event(step, "worker_lost", {"said": said})

        return stream.training(self._split, keys, self._recipe.loader, pin, lost, self._damage)
