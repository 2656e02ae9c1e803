"""The networks of a training on their device, with the optimizer and the EMA weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainkit import rng
from trainkit.config.schema import Recipe
from trainkit.distributed.runtime import Runtime
from trainkit.files import Json
from trainkit.interfaces import DatasetInfo
from trainkit.losses import class_shards
from trainkit.models import recomputation
from trainkit.models.compilation import compile_in_place
from trainkit.training import optimizer as optim
from trainkit.training.events import EventSchedule
from trainkit.training.loss_meter import LossMeter
from trainkit.training.state import TrainState


class Model:
    """The networks of a task, wrapped for DDP or FSDP2, with their optimizer and EMA weights.

    `weights` has the files that the task needs, by name. Raises UserError if they do not fit.
    """

    def __init__(self, recipe: Recipe, info: DatasetInfo, runtime: Runtime, weights: Mapping[str, Path]):
        torch.manual_seed(rng.number(recipe.seed, "weights"))
        with class_shards.divided_over(runtime.rank, runtime.world):
            networks = self.networks = recipe.task.build(info, weights, recipe.seed)
        self.divided = frozenset(class_shards.divided(networks.model))
        """Parameters of which each process has other rows (`task.head.sharded`)."""
        for module in (*networks.frozen.values(), *networks.cached.values()):
            runtime.to_memory_format(module).eval().requires_grad_(False)
        if networks.memory is not None:
            networks.memory.to(runtime.device)
        runtime.to_memory_format(networks.model)
        if recipe.train.activation_checkpointing:
            recomputation.apply(networks.model)
        compile_in_place(networks.model, runtime.compile)
        for name in networks.trusted:  # what is also cached is compiled for that, and references are not
            if name not in networks.cached:
                compile_in_place(networks.frozen[name], runtime.compile)
        optimizer = optim.build(networks.model, recipe.optim, runtime.sharded)
        self.net, prepared = runtime.prepare(networks.model, optimizer, self.divided)
        self.bare = runtime.unwrap(self.net)
        """The network without the wrapper that averages gradients."""
        self.optimizer: torch.optim.Optimizer = getattr(prepared, "optimizer", prepared)
        self.params = {name: p for name, p in self.bare.named_parameters() if p.requires_grad}
        self.ema = optim.Average(self.bare, recipe.train.ema) if recipe.train.ema else None
        self._runtime, self._step = runtime, runtime.stepper(prepared)

    def state(self, events: EventSchedule, meter: LossMeter, identity: dict[str, Json]) -> TrainState:
        """Return the state of a training of these networks, at step 0."""
        scaler = self._runtime.accelerator.scaler
        memory = self.networks.memory
        return TrainState(self.bare, self.optimizer, memory, self.ema, scaler, events, meter, identity)

    def update(self, lr: float, step: int) -> None:
        """Make an optimizer step with a learning rate; then buffers are equal on all ranks, and the average moves."""
        optim.set_lr(self.optimizer, lr)
        self._step()
        self._runtime.average_buffers(self.bare)
        if self.ema is not None:
            self.ema.update(self.bare, step)

    @torch.no_grad()
    def set_parameters(self, values: Mapping[str, np.ndarray]) -> None:
        """Set parameters, by name, before the first step; the average begins with them."""
        named = dict(self.bare.named_parameters())
        for name, value in values.items():
            named[name].copy_(torch.from_numpy(value))
        self.restart_average()

    def restart_average(self) -> None:
        """Let the average begin at the weights as they are."""
        if self.ema is not None:
            self.ema.begin(self.bare)

    def zero_grad(self) -> None:
        """Let gradients go."""
        for p in self.params.values():
            p.grad = None

    def buffers(self) -> list[Tensor]:
        """Return what moves outside the optimizer: buffers, and what the task remembers."""
        memory = self.networks.memory
        return [*self.bare.buffers(), *(memory.state_dict().values() if memory is not None else ())]

    def equal_buffers(self) -> list[Tensor]:
        """Return those of `buffers` that are equal on all ranks: without centres that are divided among them."""
        memory, parts = self.networks.memory, class_shards.divided(self.networks.memory)
        remembered = memory.state_dict().items() if memory is not None else ()
        return [*self.bare.buffers(), *(t for name, t in remembered if name not in parts)]

    def copy_buffers(self) -> list[Tensor]:
        """Copy what a forward changes: it cannot be undone by leaving the optimizer's step out."""
        return [t.clone() for t in self.buffers()]

    @torch.no_grad()
    def restore_buffers(self, copies: list[Tensor]) -> None:
        """Undo what a forward changed since `copy_buffers`."""
        for t, before in zip(self.buffers(), copies, strict=True):
            t.copy_(before)
