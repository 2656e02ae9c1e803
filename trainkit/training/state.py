"""State of a training: the content of a checkpoint, and its conversion to and from files."""

from __future__ import annotations

import copy
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypedDict

import torch
from torch import nn

from trainkit.checkpoint import state_dict, storage
from trainkit.config import loader
from trainkit.config.schema import Recipe
from trainkit.config.units import samples_per_update
from trainkit.distributed.runtime import Runtime, checksum
from trainkit.environment.version import __version__
from trainkit.errors import UserError, few
from trainkit.files import Json
from trainkit.interfaces import Dataset, Networks
from trainkit.losses.class_shards import divided
from trainkit.speed.clock import Clock
from trainkit.training.events import EventSchedule
from trainkit.training.loss_meter import LossMeter
from trainkit.training.nonfinite import not_finite
from trainkit.training.optimizer import Average
from trainkit.training.plan import evaluated


class Plateau(TypedDict):
    """Counters of a `plateau` schedule."""

    best: float | None
    waited: int
    """Evaluations since the best."""
    cooling: int
    """Evaluations that are not counted yet, after a reduction."""
    reduced: int
    """How often the learning rate was reduced."""


@dataclass
class TrainState:
    """State that changes during training: network, optimizer, EMA weights, task memory and all counters."""

    net: nn.Module
    """Without the wrapper that averages gradients."""
    optimizer: torch.optim.Optimizer
    memory: nn.Module | None
    ema: Average | None
    scaler: torch.amp.GradScaler | None
    events: EventSchedule
    meter: LossMeter
    identity: dict[str, Json]
    """What must be equal for a checkpoint to be continued: recipe and data hashes, frozen networks, processes."""
    step: int = 0
    elapsed: float = 0.0
    """Seconds of training before this process began."""
    best: list[dict[str, Json]] = field(default_factory=list)
    """Records of the best evaluations, best first: value, step."""
    record: float | None = None
    """The value that `stop_when` compares with."""
    waited: int = 0
    """Evaluations since that value improved."""
    plateau: Plateau = field(default_factory=lambda: Plateau(best=None, waited=0, cooling=0, reduced=0))
    """Counters of `train.schedule` where it is `plateau`."""
    left_out: list[int] = field(default_factory=list)
    """Steps whose update was left out, when it was computed, because it was not finite."""
    micro_batch: int | None = None
    """Samples of a micro-batch since memory ran out; None: as planned."""
    eval_batches: dict[str, int] = field(default_factory=dict)
    """Samples of a batch of each evaluation for which memory ran out."""
    trained: float = 0.0
    """Seconds in the phases of steps before this process began."""
    spent: dict[str, float] = field(default_factory=dict)
    """Hours of cores and GPUs before this process began, by metric name."""
    final: dict[str, float] = field(default_factory=dict)
    """The last score of every metric, by full name."""
    entered: dict[str, int] = field(default_factory=dict)
    """Evaluations, and the step whose scores of them were last entered in these records."""
    copy_buffers: tuple[state_dict.CopyBuffers, state_dict.CopyBuffers] = field(
        default_factory=lambda: (state_dict.CopyBuffers(), state_dict.CopyBuffers())
    )
    """Memory for the tensors of a checkpoint, kept for the next."""

    _COUNTERS = (
        *("step", "elapsed", "best", "record", "waited", "plateau", "left_out", "trained", "final"),
        *("micro_batch", "eval_batches", "entered", "spent"),
    )

    def __post_init__(self) -> None:
        built = {"model": self.net, "memory": self.memory}
        tensors = {file: module.state_dict() for file, module in built.items() if module is not None}
        found = not_finite(tensors)
        self.constants = frozenset([*found, *(f"ema/{name.removeprefix('model/')}" for name in found)])
        """Tensors that are not finite as they are built: constants of the network, such as a mask."""

    def total_elapsed(self, clock: Clock) -> float:
        """Return the seconds of training so far, including those before the checkpoint that was resumed."""
        return self.elapsed + clock.elapsed()

    def total_trained(self, clock: Clock) -> float:
        """Return the seconds in the phases of steps so far, including those before a resume."""
        return self.trained + clock.training

    def total_spent(
        self, clock: Clock, rates: Mapping[str, float], used: Mapping[str, float] = MappingProxyType({})
    ) -> dict[str, float]:
        """Return the cost of the run so far, start-up and the time before a resume included.

        `rates`: of an hour; `used`: costs since the start or resume that do not grow with time.
        """
        hours = (clock.before + clock.elapsed()) / 3600
        new = {**{name: rate * hours for name, rate in rates.items()}, **used}
        return {name: self.spent.get(name, 0.0) + new.get(name, 0.0) for name in {**self.spent, **new}}

    def freeze(self, keep: bool) -> tuple[state_dict.Copies, dict[str, Json]]:
        """Return tensors by file, and the rest as plain data.

        Buffers and task memory, which a forward pass changes, are copied here. Tensors that only the optimizer step
        changes are left to `Copies.make` and must not change before it. Every rank calls this, because sharded
        parameters are gathered; the rank that writes keeps the tensors. The result of the previous call becomes
        invalid.
        """
        copies, scalars = self._noted(keep)
        copies.begin()
        return copies, {
            **copy.deepcopy({name: getattr(self, name) for name in self._COUNTERS}),
            "optimizer": scalars,
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "gates": self.events.state(),
            "identity": self.identity,
            "versions": _versions(),
        }

    def _noted(self, keep: bool) -> tuple[state_dict.Copies, dict[str, Json]]:
        """Return all tensors, taken or promised, and what else the optimizer holds."""
        copies = state_dict.Copies(self.copy_buffers)
        named, parts = self.net.named_parameters(), divided(self.net)
        moving, scalars = state_dict.optimizer_tensors(self.optimizer, named, keep, copies, parts)
        files = copies.files
        files |= {"model": state_dict.module_tensors(self.net, keep, copies, divided=parts), "optimizer": moving}
        if self.memory is not None:
            own = divided(self.memory)
            files["memory"] = state_dict.module_tensors(self.memory, keep, copies, learns=False, divided=own)
        if self.ema is not None:
            averaged = {
                name: (parts[name].whole if name in parts else copies.promise)(t, keep)
                for name, t in self.ema.tensors.items()
            }
            # Complete, counters of batch norm included: what is handed on may be the average.
            files["ema"] = {**files["model"], **averaged} if keep else {}
        return copies, scalars

    def load(self, loaded: storage.Loaded, rank: int, elastic: bool = False) -> None:
        """Continue from a checkpoint. Raises UserError if it belongs to another recipe, data or set of networks."""
        where = str(loaded.path)
        then = loaded.state["identity"]
        for key, remedy in (
            ("recipe", "start a new run for a changed recipe"),
            ("data", "the data has changed since; start a new run"),
            ("frozen", "the frozen weights have changed since; start a new run"),
            ("batch_size", "it is a number per process; resume with as many processes"),
            ("processes", "resume with that many processes; or add --elastic, and bits are no longer promised"),
        ):
            if elastic and key == "processes":
                continue
            if then.get(key) != self.identity.get(key):
                found = f"{key} {_short(then.get(key))}"
                raise UserError(where, found, f"{_short(self.identity.get(key))}", remedy)
        scored, before = self.identity.get("evaluated", {}), then.get("evaluated", {})
        if other := [name for name, digest in before.items() if scored.get(name, digest) != digest]:
            found, remedy = f"evaluated on other data as {few(other)}", "the data has changed since; start a new run"
            raise UserError(where, found, "the evaluation data of this run", remedy)
        wanted = {"model": self.net, "optimizer": self.optimizer, "memory": self.memory, "ema": self.ema}
        if gone := [name for name, part in wanted.items() if part is not None and name not in loaded.tensors]:
            raise UserError(where, f"holds no {' and no '.join(gone)}", remedy="it was written with other settings")
        parts = divided(self.net)
        state_dict.load_module(self.net, loaded.tensors["model"], where, parts)
        named, moving = list(self.net.named_parameters()), loaded.tensors["optimizer"]
        state_dict.load_optimizer(self.optimizer, named, moving, loaded.state["optimizer"], divided=parts)
        if self.memory is not None:
            state_dict.load_module(self.memory, loaded.tensors["memory"], where, divided(self.memory))
        if self.ema is not None:
            # The file is complete, the average only of what has a fraction.
            averaged = {name: t for name, t in loaded.tensors["ema"].items() if name in self.ema.tensors}
            state_dict.load_tensors(self.ema.tensors, averaged, f"{where}/ema.safetensors", parts)
        if self.scaler is not None and loaded.state["scaler"]:
            self.scaler.load_state_dict(loaded.state["scaler"])
        for name in self._COUNTERS:
            setattr(self, name, loaded.state.get(name, getattr(self, name)))
        self.events.restore(loaded.state["gates"])
        tallies = loaded.state["tallies"]
        processes = self.identity["processes"]
        self.meter.load(tallies[rank] if len(tallies) == processes else LossMeter.divided(tallies, processes))


def identity(recipe: Recipe, data: Dataset, networks: Networks, runtime: Runtime) -> dict[str, Json]:
    """Return the values that must be equal to continue a checkpoint: recipe, data, frozen networks, processes."""
    fixed = {**networks.frozen, **networks.cached}
    size = recipe.train.batch_size
    return {
        "recipe": loader.digest(recipe),
        "data": data.meta.digest,
        "evaluated": {name: split.digest for name, split in evaluated(recipe, data).items()},
        "frozen": checksum(t for module in fixed.values() for t in module.state_dict().values()),
        "processes": runtime.world,
        "batch_size": None if isinstance(size, int) else samples_per_update(size, runtime.world),
    }


def changed_environment(loaded: storage.Loaded, runtime: Mapping[str, Json]) -> list[str]:
    """Return the differences of versions and hardware from a checkpoint's; equal bits are then not promised."""
    then = {**loaded.state.get("versions", {}), **loaded.state.get("machine", {})}
    now = {**_versions(), **runtime}
    counts = [key for key in now if key not in ("trainkit", "python", "cpu_cores", "processes", "parallelism")]
    return [f"{key} {then[key]} -> {now[key]}" for key in counts if key in then and then[key] != now[key]]


def _versions() -> dict[str, str]:
    return {"trainkit": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _short(value: object) -> str:
    return f"{value[:12]}" if isinstance(value, str) else str(value)
