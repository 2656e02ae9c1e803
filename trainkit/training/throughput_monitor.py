"""Measure the speed of a run while it trains, and summarise it at the end.

The loop calls `step` after every optimizer step, which costs one comparison if nothing is due, `window` for each log
line, and `close` at the end. Measuring changes no bit of the training.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainkit.config.schema import Recipe
from trainkit.distributed.runtime import Runtime
from trainkit.speed import bottleneck, device_timeline, limits
from trainkit.speed.clock import PHASES, STEP, Steps
from trainkit.speed.evidence import Compiled, Drop, Evidence, Waits
from trainkit.speed.recompiles import Recompiles, advice
from trainkit.speed.slowdowns import SKIPPED, SlowdownDetector
from trainkit.speed.sync_points import Probe
from trainkit.speed.torch_profiler import Trace
from trainkit.tracking.system_load import Reading, affinity, cores
from trainkit.training.plan import Plan
from trainkit.training.run_logger import RunLogger

WARM = 20
"""Updates after which everything should have been compiled."""
EVERY = 25
"""Updates between two looks at the single steps."""
PROBED = 5
"""Updates in which waiting for a GPU is counted."""
_LATE = 100
"""Steps that a device may be behind the main thread."""
_ENVIRONMENT = ("CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF")


class ThroughputMonitor:
    """Measure the speed of one run on one process."""

    def __init__(self, recipe: Recipe, plan: Plan, runtime: Runtime, logger: RunLogger):
        self._recipe, self._plan, self._clock = recipe, plan, logger.clock
        self._runtime, self._logger = runtime, logger
        self._recompiles, self._warned = Recompiles(), 0
        # The first updates take what was read ahead.
        ahead = recipe.loader.workers * recipe.loader.prefetch
        self._detective, self._drops = SlowdownDetector(max(SKIPPED, ahead)), list[Drop]()
        self._probe = Probe(runtime.device, logger.clock)
        self._waits: Waits | None = None
        profile = recipe.log.profile if runtime.main else None
        self._trace = Trace(profile, runtime.device, logger.clock) if profile else None
        self._on_device: dict[str, float] = {}
        self._ranks: Sequence[Mapping[str, float]] = ()
        self._met = 0.0
        self._before = self._said = 0
        self.gather = self._timed(runtime.gather)
        """`Runtime.gather` as losses call it; with several processes its time is taken."""
        self._due = 0
        self.page = ""
        """The run's description in MLflow, as Markdown; set by `close`."""

    def begin(self, step: int) -> None:
        """Begin after so many updates."""
        self._before = step - self._clock.steps
        if self._trace is not None:
            self._trace.step(step)

    def _timed(self, gather: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return `gather` as losses call it: timed with several processes, since a late one is waited for there."""
        if self._runtime.world == 1:
            return gather

        def gather_timed(*args: Any, **named: Any) -> Tensor:
            began = time.perf_counter()
            gathered = gather(*args, **named)
            self._met += time.perf_counter() - began
            return gathered

        return gather_timed

    def step(self, step: int) -> None:
        """Check the speed after a step, if a check is due."""
        if step >= self._due:
            self._look(step)

    def _look(self, step: int) -> None:
        done = self._clock.steps
        if done == WARM:
            self._recompiles.mark()
            self._probe.start(step)
        elif done == WARM + PROBED:
            self._waits = self._probe.stop(step)
        if self._trace is not None and step >= self._trace.due:
            self._trace.step(step)
        if self._runtime.main and done % EVERY == 0:
            self._suspect(step)
        dues = [done + EVERY - done % EVERY, *(at for at in (WARM, WARM + PROBED) if at > done)]
        self._due = min(self._before + due for due in dues)
        if self._trace is not None:
            self._due = min(self._due, max(step + 1, self._trace.due))

    # ---- When it gets slower

    def _suspect(self, step: int) -> None:
        """Report a throughput that has changed for good, and what is known of that moment."""
        if self._trace is not None and self._trace.slowed and self._trace.slowed[1] > step - 2 * EVERY:
            return
        drop = self._detective.look(self._single(EVERY))
        if drop is None:
            return
        since = self._clock.recent(max(EVERY, self._clock.steps - drop.step + 1))
        drop = replace(drop, step=drop.step + self._before)
        self._drops.append(drop)
        rows = np.concatenate([since.phases, since.between], axis=1).sum(0).tolist()
        load = self._logger.tracker.readings()
        e = self.evidence(since, dict(zip(PHASES, rows, strict=True)), len(since), load[-6:])
        said = [bottleneck.describe_slowdown(drop), *(f.text for f in bottleneck.judge(e) if f.cause != "setting")]
        found = {**asdict(drop), "said": said, "load": [asdict(reading) for reading in load[-6:]]}
        self._logger.tracker.event(step, "speed_drop", found)
        self._logger.tracker.tags({"trainkit.speed_drop": " ".join(said)})
        self._logger.say("\n".join(said))

    def _single(self, many: int) -> Steps:
        """Return times of the last steps: of the device where it works on its own, what it waited for by the clock."""
        line = self._clock.timeline
        own = line.recent(many + _LATE) if isinstance(line, device_timeline.CudaTimeline) else None
        if own is None:
            return self._clock.recent(many)
        host = self._clock.recent(many + 2 * _LATE)
        _, here, there = np.intersect1d(own.number, host.number, return_indices=True)
        return Steps(own.number[here], own.phases[here], host.between[there])

    # ---- What is written down

    def window(self) -> dict[str, float]:
        """Return the speed since the last log line, by metric name. Every process calls this."""
        measured = {**self._clock.window(self._plan.batch_size), **self._runtime.memory()}
        many, self._said = self._clock.steps - self._said, self._clock.steps
        if not many:
            return measured
        since, line = self._clock.recent(many), self._clock.timeline
        own = line.window() if isinstance(line, device_timeline.CudaTimeline) else device_timeline.of_host(since)
        self._on_device = own
        if self._runtime.world > 1:
            spent = dict(zip(STEP, since.phases.mean(0).tolist(), strict=True))
            self._ranks = self._runtime.all_gather({**spent, "met": self._met / many})
            self._met = 0.0
        if (known := self._logger.limits) is not None:
            rate = measured["speed/samples_per_s"]
            shares = {"ceiling_share": limits.share(rate, known), "mfu": limits.mfu(rate, known)}
            measured |= {f"speed/{name}": share for name, share in shares.items() if share is not None}
        if (compiled := self._compiled()) is not None:
            measured |= {"speed/recompiles": compiled.recompiles, "speed/graph_breaks": compiled.graph_breaks}
            if (warning := advice(compiled)) and (often := compiled.recompiles + compiled.graph_breaks) > self._warned:
                self._warned = often
                self._logger.say(f"warning: {warning}")
        return measured | self._on_device

    def close(self) -> str:
        """Return the verdict in words, and record what could not be measured. Every process calls this."""
        if self._clock.steps < WARM + PROBED:
            self._probe.stop()
        if not self._runtime.main:
            return ""
        tracker = self._logger.tracker
        if self._trace is not None:
            self._trace.close()
            if self._trace.file is not None:
                tracker.artifact_file(self._trace.file, f"speed/{self._trace.file.name}")
            else:
                self._logger.say(f"no trace: {self._trace.absent}")
        e = self.evidence(self._clock.recent(), self._clock.seconds, self._clock.steps, tracker.readings())
        found = bottleneck.judge(e)
        lines = bottleneck.describe(e, found, self._logger.source)
        text = "".join(f"{line}  \n" for line in lines)
        tracker.artifact_text("speed/verdict.md", text)
        # The first of them in the table of runs; all on the run's page, below what was changed.
        self.page = self._logger.changed + text
        tracker.tags({"trainkit.verdict": f"{found[0].cause}: {found[0].text}", "mlflow.note.content": self.page})
        return "\n".join(lines)

    def _compiled(self) -> Compiled | None:
        if self._runtime.compile == "off":
            return None
        # Before the mark everything is compiled for the first time.
        return self._recompiles.since() if self._clock.steps >= WARM else None

    def evidence(
        self, steps: Steps, seconds: Mapping[str, float], trained: int, load: Sequence[Reading] = ()
    ) -> Evidence:
        """Return what is known of so many trained steps, with the times of `steps` and the seconds of each phase."""
        recipe, runtime = self._recipe, self._runtime
        settings = {
            "workers": recipe.loader.workers,
            "prefetch": recipe.loader.prefetch,
            "pin": recipe.loader.pin,
            "compile": runtime.compile,
            "precision": runtime.precision,
            "channels_last": runtime.channels_last,
            "threads": torch.get_num_threads(),
            "cores": cores(),
            "processors": len(affinity()),
            "processes": runtime.world,
            "deterministic": recipe.device.deterministic,
            "cudnn_benchmark": recipe.device.cudnn_benchmark,
            "anomaly": torch.is_anomaly_enabled(),
            **{name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        }
        return Evidence(
            steps=steps,
            batch_size=self._plan.batch_size,
            seconds=dict(seconds),
            trained=trained,
            device=runtime.device.type,
            on_device=self._on_device,
            evaluation_s=self._logger.evaluation_s,
            limits=self._logger.limits,
            load=load,
            compiled=self._compiled(),
            waits=self._waits,
            ranks=self._ranks,
            drops=tuple(self._drops),
            settings=settings,
        )
