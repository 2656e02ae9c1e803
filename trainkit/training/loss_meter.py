"""Sum loss and logged scalars between two log lines, on the device until they are read."""

from __future__ import annotations

import torch
from torch import Tensor

from trainkit.distributed.runtime import Runtime
from trainkit.files import Json
from trainkit.interfaces import Loss
from trainkit.tensors import wide


class LossMeter:
    """Running sums of one process since the last log line. Part of a checkpoint: a line may span an interruption."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        # Sums of doubles have the same bits on the host, and take a tenth of the time.
        self._at_once = runtime.at_once
        self._zero: float | Tensor = (
            0.0 if self._at_once else torch.zeros((), dtype=wide(runtime.device), device=runtime.device)
        )
        self.clear()

    def clear(self) -> None:
        """Begin a new line."""
        self.loss = self.weight = self._zero
        self.logs: dict[str, float | Tensor] = {}
        self.times: dict[str, int] = {}  # how many batches had each of them
        self.batches = 0
        self.norm: Tensor | None = None

    def add(self, losses: list[Loss], norm: Tensor) -> None:
        """Take in the micro-batches of an update that was made; waits for nothing."""
        number = float if self._at_once else Tensor.detach
        for loss in losses:
            self.loss = self.loss + number(loss.sum)
            weight = loss.weight
            self.weight = self.weight + (number(weight) if isinstance(weight, Tensor) else weight)
            for key, value in loss.logs.items():
                own = number(value.detach() if value.requires_grad else value)
                self.logs[key] = self.logs.get(key, self._zero) + own
                self.times[key] = self.times.get(key, 0) + 1
        self.batches += len(losses)
        self.norm = norm

    def read(self) -> dict[str, float]:
        """Means over all processes, as metrics; waits for the device. Every rank calls it.

        What only some batches logged, such as norms every 200 steps, is a mean over those.
        """
        own = [self.loss, self.weight, *(value / self.times[key] for key, value in self.logs.items())]
        summed = torch.tensor(own, dtype=torch.float64) if self._at_once else torch.stack(own)
        loss, weight, *logs = self._runtime.sum(summed).tolist()
        metrics = {"train/loss": loss / weight}
        metrics |= {f"train/{key}": value / self._runtime.world for key, value in zip(self.logs, logs, strict=True)}
        if self.norm is not None:
            metrics["train/grad_norm"] = float(self.norm)
        return metrics

    def state(self) -> dict[str, Json]:
        """The sums as plain data; doubles survive JSON exactly."""
        return {
            "loss": float(self.loss),
            "weight": float(self.weight),
            "logs": {key: float(value) for key, value in self.logs.items()},
            "times": dict(self.times),
            "batches": self.batches,
            "norm": None if self.norm is None else float(self.norm),
        }

    @staticmethod
    def divided(states: list[dict[str, Json]], processes: int) -> dict[str, Json]:
        """Divide the states of all processes among another number of them."""
        norms = [state["norm"] for state in states]
        whole: dict[str, Json] = {"norm": norms[0], "batches": max(1, sum(s["batches"] for s in states) // processes)}
        if not any(state["batches"] for state in states):
            return states[0]
        for name in ("loss", "weight"):
            whole[name] = sum(state[name] for state in states) / processes
        for name in ("logs", "times"):
            keys = dict.fromkeys(key for state in states for key in state.get(name, ()))
            whole[name] = {key: sum(s[name].get(key, 0) for s in states) / processes for key in keys}
        return whole

    def load(self, state: dict[str, Json]) -> None:
        """Continue a line."""
        device = self._runtime.device
        self.loss, self.weight = self._zero + state["loss"], self._zero + state["weight"]
        self.logs = {key: self._zero + value for key, value in state["logs"].items()}
        self.batches = state["batches"]
        # A checkpoint of before they were counted: every batch had every key.
        self.times = dict(state.get("times", dict.fromkeys(self.logs, self.batches)))
        self.norm = None if state["norm"] is None else torch.tensor(state["norm"], device=device)
