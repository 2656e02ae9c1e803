"""Convert networks and optimizers to plain tensors by name and back, bit for bit.

Names are those of the bare network, and sharded tensors are gathered: a checkpoint saved on eight processes loads on
one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.checkpoint.verification import refuse_unfaithful
from trainkit.errors import UserError
from trainkit.files import Json

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

NamedParameters = Mapping[str, nn.Parameter] | Iterable[tuple[str, nn.Parameter]]

_LISTED = 10
_ALIGNED = 64
_OF_THE_MACHINE = frozenset({"fused", "foreach", "capturable", "differentiable", "param_names"})
"""Options of an optimizer that depend on the machine and not on the result: never read from a file."""


class Rows(Protocol):
    """The rows of this process of a tensor that is divided over processes; `losses.class_shards` has those of heads."""

    @property
    def classes(self) -> int:
        """Rows of all processes."""
        ...

    def part(self, whole: Tensor) -> Tensor:
        """Return the rows of this process."""
        ...

    def whole(self, own: Tensor, keep: bool = True) -> Tensor:
        """Return the rows of all on the process that keeps them: a collective."""
        ...


Divided = Mapping[str, Rows]
"""Tensors by name of which this process has some rows, and files all."""


class CopyBuffers:
    """Reusable memory on the CPU for copies of tensors, page-locked for those from a GPU.

    Fresh memory takes longer to allocate than to fill: 300 MB 0.20 s of processor time against 0.07.
    """

    def __init__(self) -> None:
        self._memory: dict[torch.device, Tensor] = {}

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return contiguous copies of tensors, valid until the next call."""
        made = list(tensors)
        for device in dict.fromkeys(tensor.device for tensor in tensors):
            places = [at for at, tensor in enumerate(tensors) if tensor.device == device]
            memory, cuda, start = self._held(device, [tensors[at].nbytes for at in places]), device.type == "cuda", 0
            # On a separate stream: on the training's it would wait for kernels and delay others.
            with torch.cuda.stream(torch.cuda.Stream(device)) if cuda else contextlib.nullcontext():
                for at in places:
                    tensor = tensors[at]
                    part = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                    made[at] = part.copy_(tensor, non_blocking=cuda)
                    start += _aligned(tensor.nbytes)
                if cuda:
                    torch.cuda.current_stream().synchronize()
        return made

    def _held(self, device: torch.device, sizes: Iterable[int]) -> Tensor:
        size = sum(map(_aligned, sizes))
        if device not in self._memory or len(self._memory[device]) < size:
            self._memory.pop(device, None)  # before there is more
            if device.type == "cuda":
                with torch.cuda.device(device):
                    self._memory[device] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            else:
                self._memory[device] = torch.as_tensor(np.empty(size, np.uint8))  # NumPy asks for large pages
        return self._memory[device]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class Copies:
    """Tensors by file and name that become copies on the CPU: those taken by `begin`, those promised by `make`.

    A promised tensor must not change before `make` has returned, in whatever thread that is called. The copies live
    until `buffers` are used again.
    """

    def __init__(self, buffers: tuple[CopyBuffers, CopyBuffers] | None = None) -> None:
        self.files: dict[str, dict[str, Tensor]] = {}
        self._buffers = buffers or (CopyBuffers(), CopyBuffers())
        self._taken: dict[int, Tensor] = {}
        self._promised: dict[int, Tensor] = {}
        self._versions: dict[int, int] = {}

    def take(self, tensor: Tensor, keep: bool = True) -> Tensor:
        """Return the tensor itself, for `files`, to be copied by `begin`. A sharded one is gathered and copied now."""
        return self._noted(tensor, self._taken, keep)

    def promise(self, tensor: Tensor, keep: bool = True) -> Tensor:
        """Return the tensor itself, for `files`, to be copied by `make`. A sharded one is gathered and copied now."""
        return self._noted(tensor, self._promised, keep)

    def _noted(self, tensor: Tensor, among: dict[int, Tensor], keep: bool) -> Tensor:
        if not keep or is_sharded(tensor):
            return whole(tensor, keep)
        tensor = tensor.detach()
        among[id(tensor)] = tensor
        self._versions[id(tensor)] = tensor._version
        return tensor

    def begin(self) -> None:
        """Copy what was taken."""
        self._replace(self._taken, self._buffers[0])

    def make(self) -> dict[str, dict[str, Tensor]]:
        """Copy what was promised; returns all files. Raises UserError for what has changed since.

        What the training gave its GPU to do before the promises must have been waited for.
        """
        self._replace(self._promised, self._buffers[1])
        return self.files

    def _replace(self, tensors: dict[int, Tensor], buffers: CopyBuffers) -> None:
        copied = dict(zip(tensors, buffers.copies(list(tensors.values())), strict=True))
        for file, members in self.files.items():
            for name, tensor in members.items():
                members[name] = copied.get(id(tensor), tensor)
                if id(tensor) in copied and tensor._version != self._versions[id(tensor)]:
                    raise UserError(
                        f"{name} ({file})",
                        "changed while it was copied for a checkpoint",
                        "a trained parameter that only the optimizer step changes",
                        "register tensors that a forward pass changes as buffers (register_buffer), or freeze the "
                        "parameter (requires_grad_(False)): both are copied before the training continues",
                    )
        tensors.clear()


def module_tensors(
    module: nn.Module,
    keep: bool = True,
    copies: Copies | None = None,
    learns: bool = True,
    divided: Divided = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Return copies of a module's parameters and persistent buffers on the CPU, whole even where they are sharded.

    With sharded parameters (FSDP2), or `divided` tensors, this is a collective: every process calls it, and those that
    write nothing pass `keep=False` and get an empty dict, which saves their memory. With `copies`, trained parameters
    are promised to them if the module `learns`, and all other tensors are taken.
    """
    named = module.named_parameters(remove_duplicate=False) if copies is not None else ()
    trained = {name for name, parameter in named if learns and parameter.requires_grad}
    tensors = dict[str, Tensor]()
    for name, tensor in _live_tensors(module).items():
        copy = whole if copies is None else copies.promise if name in trained else copies.take
        tensors[name] = (divided[name].whole if name in divided else copy)(tensor, keep)
    return tensors if keep else {}


def load_module(
    module: nn.Module, tensors: Mapping[str, Tensor], where: str, divided: Divided = MappingProxyType({})
) -> None:
    """Copy tensors into a module in place. Raises `UserError` listing names, shapes and types that do not fit.

    `where` names the source in messages. Nothing is changed unless everything fits.
    """
    load_tensors(_live_tensors(module), tensors, where, divided)


def parts_of(tensors: Mapping[str, Tensor], divided: Divided) -> dict[str, Tensor]:
    """Return tensors with those that are `divided` cut to the rows of this process, if they have one of each class."""
    cut = {name: shard for name, shard in divided.items() if name in tensors and len(tensors[name]) == shard.classes}
    return {**tensors, **{name: shard.part(tensors[name]) for name, shard in cut.items()}}


def load_tensors(
    live: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: str, divided: Divided = MappingProxyType({})
) -> None:
    """Copy tensors into those of the same names in place; as `load_module` for what is no module."""
    tensors = parts_of(tensors, divided)
    problems = [f"{name} is missing" for name in live.keys() - tensors.keys()]
    problems += [f"{name} is unexpected" for name in tensors.keys() - live.keys()]
    for name in live.keys() & tensors.keys():
        file, own = tensors[name], live[name]
        if own.is_meta:
            raise ValueError(f"{name} has no memory yet (meta device)")
        if (file.shape, file.dtype) != (own.shape, own.dtype):
            problems.append(f"{name} is {_kind(file)} instead of {_kind(own)}")
    if problems:
        raise UserError(where, _listed(problems), remedy="use tensors of the same network and recipe")
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(sharded_like(tensors[name], tensor))


def optimizer_tensors(
    optimizer: Optimizer,
    parameters: NamedParameters,
    keep: bool = True,
    copies: Copies | None = None,
    divided: Divided = MappingProxyType({}),
) -> tuple[dict[str, Tensor], dict[str, Json]]:
    """Return the state of an optimizer as (tensors by `<parameter name>/<state key>`, JSON data), by parameter names.

    The JSON data holds each group's options, all state that is not a tensor, and where each tensor belongs. As with
    `module_tensors`, state that is sharded, or `divided` as its parameter is, is gathered: every process calls it,
    `keep=False` where nothing is written. The other tensors are promised to `copies`, where there are some.
    """
    kind, optimizer = _bare_optimizer(optimizer)
    names, copy = _names_by_parameter(parameters), whole if copies is None else copies.promise
    tensors: dict[str, Tensor] = {}
    groups, state = [], {}
    for position, group in enumerate(optimizer.param_groups):
        members = [_name_of(parameter, names) for parameter in group["params"]]
        options = {
            key: _pack(value, f"group {position}/{key}", tensors, keep, copy)
            for key, value in group.items()
            if key != "params" and key not in _OF_THE_MACHINE and not isinstance(value, torch.dtype | torch.device)
        }
        groups.append({"parameters": members, "options": options})
        for name, parameter in zip(members, group["params"], strict=True):
            # .get: the state is a defaultdict, and an empty entry is not the same as none to every optimizer
            entries = optimizer.state.get(parameter) or {}
            for key in sorted(entries):
                _refuse_shards(name, key, entries[key], parameter)
                rows = name in divided and getattr(entries[key], "shape", None) == parameter.shape
                take = divided[name].whole if rows else copy
                state.setdefault(name, {})[key] = _pack(entries[key], f"{name}/{key}", tensors, keep, take)
    own = optimizer.state_dict()
    if sum(map(len, state.values())) < sum(map(len, own["state"].values())):
        raise ValueError(f"{kind} keeps state outside `state`; it cannot be saved")
    # A few optimizers draw random numbers, and hold a generator of their own.
    extra = {
        key: _pack(own[key], f"extra/{key}", tensors, keep, copy) for key in own.keys() - {"state", "param_groups"}
    }
    scalars = {"class": kind, "groups": groups, "state": state, "extra": extra}
    return tensors if keep else {}, scalars


def load_optimizer(
    optimizer: Optimizer,
    parameters: NamedParameters,
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, Json],
    where: str = "optimizer",
    divided: Divided = MappingProxyType({}),
) -> None:
    """Restore the result of `optimizer_tensors`, bit for bit, into an optimizer over the same parameters.

    Options that depend on the machine (fused, foreach ...) are kept. Raises `UserError` naming what does not fit:
    another optimizer, other groups, other parameters, unexpected or missing tensors.
    """
    kind, optimizer = _bare_optimizer(optimizer)
    names = _names_by_parameter(parameters)
    _check_optimizer(kind, optimizer, names, tensors, scalars, where)
    cut = {path: shard for path in tensors if (shard := divided.get(path.partition("/")[0])) and tensors[path].ndim}
    tensors = parts_of(tensors, cut)
    if scalars["extra"]:
        stay = {key: _unpack(packed, tensors, None, stay=True) for key, packed in scalars["extra"].items()}
        optimizer.load_state_dict({**optimizer.state_dict(), **stay})  # only the optimizer knows where these belong
    optimizer.state.clear()
    for group, saved in zip(optimizer.param_groups, scalars["groups"], strict=True):
        on_device = bool(group.get("fused") or group.get("capturable"))
        first = next(iter(group["params"]), None)
        for key, packed in saved["options"].items():
            value = _unpack(packed, tensors, first, stay=key == "step" and not on_device)
            own = group.get(key)
            if isinstance(own, Tensor):
                # in place: a learning rate that lives on the device may be part of a captured graph
                own.copy_(value) if isinstance(value, Tensor) else own.fill_(value)
            else:
                group[key] = value.item() if isinstance(own, float) and isinstance(value, Tensor) else value
        for parameter in group["params"]:
            packed = scalars["state"].get(_name_of(parameter, names))
            if packed is not None:
                optimizer.state[parameter] = {
                    key: _unpack(value, tensors, parameter, stay=key == "step" and not on_device)
                    for key, value in packed.items()
                }


def _live_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, sharing memory with the module."""
    # Extra state may be anything, pickles included, and is made anew by the layers that have it.
    state = module.state_dict().items()
    return {name: t for name, t in state if isinstance(t, Tensor) and not name.endswith("_extra_state")}


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return True for a tensor that is split over processes (a DTensor), without importing its module."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor, keep: bool = True) -> Tensor:
    """Return a copy on the CPU, gathered from all processes where the tensor is sharded (a collective)."""
    tensor = tensor.detach()
    if is_sharded(tensor):
        tensor = tensor.full_tensor()
    return tensor.to("cpu", copy=True).contiguous() if keep else tensor


def sharded_like(full: Tensor, like: Tensor) -> Tensor:
    """Return `full` sharded over the processes as `like` is; every process has all of `full`, so nothing is sent."""
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _bare_optimizer(optimizer: Optimizer) -> tuple[str, Optimizer]:
    """Return a name for an optimizer, and the one that holds the state inside of timm's wrapper (Lookahead)."""
    base = getattr(optimizer, "_base_optimizer", None)
    if not isinstance(base, Optimizer):
        return type(optimizer).__name__, optimizer
    kind, bare = _bare_optimizer(base)
    return f"{type(optimizer).__name__}({kind})", bare


def _names_by_parameter(parameters: NamedParameters) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in dict(parameters).items()}


def _name_of(parameter: nn.Parameter, names: Mapping[nn.Parameter, str]) -> str:
    if parameter not in names:
        raise ValueError(f"the optimizer has a parameter of shape {tuple(parameter.shape)} without a name")
    return names[parameter]


def _refuse_shards(name: str, key: str, value: Any, parameter: Tensor) -> None:
    """Raise ValueError for state of a sharded parameter that is not sharded itself: it cannot be gathered."""
    if not isinstance(value, Tensor) or not is_sharded(parameter):
        return
    if not is_sharded(value) and value.numel() > 1:
        raise ValueError(f"state {key} of {name} is not sharded as its parameter is; it cannot be saved")


def _pack(value: Any, path: str, tensors: dict[str, Tensor], keep: bool, copy: Callable[..., Tensor]) -> Any:
    """Return JSON data for a state value; tensors in it, at any depth, go to `tensors` under their path."""
    if isinstance(value, Tensor):
        tensors[path] = copy(value, keep)
        return {"tensor": path}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_pack(member, f"{path}/{i}", tensors, keep, copy) for i, member in enumerate(value)]}
    if isinstance(value, dict):
        return {"dict": {key: _pack(member, f"{path}/{key}", tensors, keep, copy) for key, member in value.items()}}
    refuse_unfaithful(value, path)
    return value


def _unpack(packed: Json, tensors: Mapping[str, Tensor], parameter: Tensor | None, stay: bool) -> Any:
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return _state_tensor(tensors[content], parameter, stay)
    if kind == "dict":
        return {key: _unpack(member, tensors, parameter, stay) for key, member in content.items()}
    members = [_unpack(member, tensors, parameter, stay) for member in content]
    return members if kind == "list" else tuple(members)


def _state_tensor(full: Tensor, parameter: Tensor | None, stay: bool) -> Tensor:
    """Copy a tensor of the state to where the optimizer expects it; `stay`: step counters live on the CPU."""
    if stay or parameter is None:
        return full.clone()
    if full.shape != parameter.shape:
        return full.to(parameter.device, copy=True)
    # Same strides as the parameter: fused kernels refuse channels_last weights with contiguous moments.
    return torch.empty_like(parameter, dtype=full.dtype, requires_grad=False).copy_(sharded_like(full, parameter))


def _references(packed: Json) -> list[str]:
    if not isinstance(packed, dict):
        return []
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return [content]
    members = content.values() if kind == "dict" else content
    return [reference for member in members for reference in _references(member)]


def _check_optimizer(
    kind: str,
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, Json],
    where: str,
) -> None:
    if scalars["class"] != kind:
        raise UserError(where, f"state of {scalars['class']}", kind, "resume with the recipe of the run")
    own = [[_name_of(parameter, names) for parameter in group["params"]] for group in optimizer.param_groups]
    saved = [group["parameters"] for group in scalars["groups"]]
    if own != saved:
        flat_own, flat_saved = {n for group in own for n in group}, {n for group in saved for n in group}
        problems = [f"{name} is missing" for name in flat_own - flat_saved]
        problems += [f"{name} is unexpected" for name in flat_saved - flat_own]
        problems = problems or [f"{len(saved)} groups of {[len(g) for g in saved]} parameters in another order"]
        expected = f"{len(own)} groups of {[len(g) for g in own]} parameters"
        raise UserError(where, _listed(problems), expected, "resume with the recipe of the run")
    holders = [scalars["extra"], *(group["options"] for group in scalars["groups"]), *scalars["state"].values()]
    used = [reference for entries in holders for packed in entries.values() for reference in _references(packed)]
    problems = [f"{name} is missing" for name in set(used) - tensors.keys()]
    problems += [f"{name} is unexpected" for name in tensors.keys() - set(used)]
    if problems:
        raise UserError(where, _listed(problems), remedy="resume from an older checkpoint")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _listed(problems: list[str]) -> str:
    """Join at most ten problems, sorted, and the number of the others."""
    more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
    return ", ".join(sorted(problems)[:_LISTED] + more)
