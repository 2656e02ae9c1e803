"""Parameter groups, the optimizer, clipping and the EMA weights."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from trainkit.config.schema import Optim
from trainkit.errors import UserError
from trainkit.tensors import foreach_lerp_, foreach_mul_, foreach_norm, full_tensor, local_part


def rate(optim: Optim, batch_size: int) -> float:
    """Return the full learning rate for `batch_size` samples per step over all processes."""
    if optim.lr_rule is None:
        return optim.lr
    times = batch_size / optim.lr_rule.batch_size
    return optim.lr * (times if optim.lr_rule.name == "linear" else times**0.5)


def groups(net: nn.Module, optim: Optim) -> list[dict[str, Any]]:
    """Return parameters with equal settings as optimizer groups, each with an `lr_scale`.

    Every parameter belongs to the last group whose pattern matches its name; the scales of its group and of its layer
    are multiplied. Raises UserError if a pattern matches nothing: a misspelt one would silently train at the wrong
    rate.
    """
    named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    kept = _undecayed(net)
    settings: dict[str, tuple[float, float]] = {}
    for name, p in named:
        decays = (optim.decay_1d or p.ndim > 1) and name not in kept
        settings[name] = (1.0, optim.weight_decay if decays else 0.0)
    depths = layer_scales(net, optim.layer_decay) if optim.layer_decay is not None else {}
    for i, group in enumerate(optim.groups):
        matched = [name for name, _ in named if fnmatch.fnmatchcase(name, group.match)]
        if not matched:
            some = ", ".join(name for name, _ in named[:4])
            raise UserError(
                f"optim.groups[{i}].match", f"{group.match!r} matches no parameter", f"a pattern such as {some}"
            )
        for name in matched:
            decay = settings[name][1] if group.weight_decay is None else group.weight_decay
            settings[name] = (group.lr_scale, decay)
    grouped: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, p in named:
        scale, decay = settings[name]
        grouped.setdefault((scale * depths.get(name, 1.0), decay), []).append(p)
    return [
        {"params": params, "lr": optim.lr * scale, "lr_scale": scale, "weight_decay": decay}
        for (scale, decay), params in grouped.items()
    ]


def layer_scales(net: nn.Module, decay: float) -> dict[str, float]:
    """Return the factor on each parameter's learning rate by depth: decay^(blocks above) (Clark et al., ICLR 2020).

    Depths come from timm's networks (`group_matcher`); parameters outside of one have the full rate. Raises UserError
    if there is no such network.
    """
    from timm.models import group_parameters

    scales: dict[str, float] = {}
    for prefix, module in net.named_modules():
        if hasattr(module, "group_matcher"):
            depth = cast("dict[str, int]", group_parameters(module, _called(module, "group_matcher"), reverse=True))
            top = max(depth.values())
            scales |= {f"{prefix}.{name}".lstrip("."): decay ** (top - at) for name, at in depth.items()}
    if not scales:
        raise UserError("optim.layer_decay", "the network states no order of its layers", "a network of timm")
    return scales


def refuse_idle(params: Mapping[str, nn.Parameter]) -> None:
    """End a run in which parameters get no gradient: they would not be trained, and would hang DDP."""
    idle = [name for name, p in params.items() if p.grad is None]
    if idle:
        raise UserError(
            "task",
            f"{len(idle)} parameters get no gradient: {', '.join(idle[:4])}{' ...' if len(idle) > 4 else ''}",
            "a loss that depends on all that is trained",
            "leave that part of the network out, or choose a loss that uses it",
        )


def _alike(grads: Sequence[torch.Tensor]) -> bool:
    """Return whether they are plain tensors of one dtype, on a device whose kernels take many tensors at once."""
    first = grads[0]
    return (
        (first.is_cpu or first.is_cuda) and {*map(type, grads)} == {torch.Tensor} and len({g.dtype for g in grads}) == 1
    )


def total_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of gradients on one device, with the kernels of `torch.nn.utils.get_total_norm`.

    Gradients of one kind are not sorted by device and dtype first; for a small network the sorting costs more than the
    kernels.
    """
    if not _alike(grads):
        return torch.nn.utils.get_total_norm(grads)
    return torch.linalg.vector_norm(torch.stack(foreach_norm(grads)))


def clip(params: Mapping[str, nn.Parameter], norm: torch.Tensor, optim: Optim) -> None:
    """Clip gradients as the recipe says; `norm` is the norm of all. The host does not wait for the device."""
    if optim.clip_norm is not None:
        grads = _grads(params.values())
        if _alike(grads):  # as below, by the same kernels
            foreach_mul_(grads, ((norm + 1e-6).reciprocal() * optim.clip_norm).clamp(max=1.0))
        else:
            torch.nn.utils.clip_grads_with_norm_(params.values(), optim.clip_norm, norm)
    if optim.clip_agc is not None:
        spared = not_clipped(params, optim)
        clip_units([p for name, p in params.items() if name not in spared], optim.clip_agc.factor, optim.clip_agc.eps)


def not_clipped(names: Collection[str], optim: Optim) -> set[str]:
    """Return the parameters that `clip_agc` leaves out. Raises UserError if one of its patterns matches nothing."""
    spared: set[str] = set()
    for i, pattern in enumerate(optim.clip_agc.leave_out if optim.clip_agc is not None else ()):
        matched = fnmatch.filter(names, pattern)
        if not matched:
            found, some = f"{pattern!r} matches no parameter", ", ".join([*names][-4:])
            raise UserError(f"optim.clip_agc.leave_out[{i}]", found, f"a pattern such as {some}")
        spared.update(matched)
    return spared


@torch.no_grad()
def clip_units(params: Iterable[nn.Parameter], factor: float, eps: float = 1e-3) -> None:
    """Limit the gradient of each unit to `factor` times the norm of its weights, in place (Brock et al. 2021, eq. 3).

    A unit is one output of a layer: a slice of a parameter along its first dimension. A parameter of one dimension or
    none, such as a bias, is one unit. The norm of weights counts as at least `eps`. Gradients below the limit keep
    their bits. timm's `adaptive_clip_grad` gives the same bits in 1.9 to 2.3 times the time (ConvNeXt-A and -T, one
    core), and raises on the vectors of FSDP2 (clamp_ of a partial norm).
    """
    weights = sorted(params, key=lambda p: p.ndim > 1)  # vectors first
    if not weights:
        return
    grads = _grads(weights)
    weight, grad = _lengths(weights), _lengths(grads)
    sizes = [n.numel() for n in weight]
    # One pair of kernels for the units of all parameters; those that are short enough are multiplied by 1.
    most = factor * torch.cat(weight).clamp(min=eps)
    scale = (most / torch.cat(grad).clamp(min=torch.finfo(most.dtype).tiny)).clamp(max=1).split(sizes)
    grads = [local_part(grad) for grad in grads]
    shapes = [(-1, *(1,) * (g.ndim - 1)) if g.ndim else () for g in grads]
    foreach_mul_(grads, [part.view(shape) for part, shape in zip(scale, shapes, strict=True)])


def _lengths(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the length of each unit of each tensor, (units,); those of one dimension or none come first."""
    whole = [t for t in tensors if t.ndim <= 1]
    # FSDP2 cuts along the first dimension: a vector is in parts and its length a sum over ranks, a slice is not.
    norms = [full_tensor(n) for n in (foreach_norm(whole) if whole else ())]
    rows = [local_part(t) for t in tensors[len(whole) :]]
    return [n.view(1) for n in norms] + [torch.linalg.vector_norm(t, dim=tuple(range(1, t.ndim))) for t in rows]


def _undecayed(net: nn.Module) -> set[str]:
    """Names of parameters that their network excepts from weight decay, as timm's do (position embeddings)."""
    return {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in net.named_modules()
        if hasattr(module, "no_weight_decay")
        for name in _called(module, "no_weight_decay")
    }


def build(net: nn.Module, optim: Optim, sharded: bool = False) -> torch.optim.Optimizer:
    """Return the recipe's optimizer over the parameters of `net`, which are `sharded` under FSDP2.

    Raises UserError if a pattern of parameters matches nothing, or timm refuses the optimizer.
    """
    parts = groups(net, optim)
    not_clipped([name for name, p in net.named_parameters() if p.requires_grad], optim)
    if optim.name.startswith("timm:"):
        from timm.optim import create_optimizer_v2  # pyright: ignore[reportPrivateImportUsage] # in timm's docs

        try:
            return create_optimizer_v2(parts, opt=optim.name[5:], lr=optim.lr, weight_decay=optim.weight_decay)
        except (AssertionError, KeyError, ValueError) as error:
            raise UserError("optim.name", f"{optim.name!r}: {error}", "one of timm.optim.list_optimizers()") from None
    if optim.name == "sgd":
        # PyTorch 2.14 has the one-kernel SGD for whole tensors alone.
        fused = optim.fused and not sharded
        return torch.optim.SGD(parts, lr=optim.lr, momentum=optim.momentum, nesterov=optim.nesterov, fused=fused)
    kind = torch.optim.AdamW if optim.name == "adamw" else torch.optim.Adam
    return kind(parts, lr=optim.lr, betas=(optim.betas[0], optim.betas[1]), eps=optim.eps, fused=optim.fused)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group, each with its own scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


class Average:
    """Exponential moving average of weights and floating-point buffers (Polyak and Juditsky 1992).

    Early on the decay is at most (1 + step) / (10 + step), so the random initial weights have little influence.
    """

    def __init__(self, net: nn.Module, decay: float):
        self.decay = decay
        saved = net.state_dict().keys()
        with torch.no_grad():
            self.tensors = {name: t.detach().clone() for name, t in _floating(net) if name in saved}
        self._net: nn.Module | None = None

    @torch.no_grad()
    def begin(self, net: nn.Module) -> None:
        """Take the weights as they are."""
        for name, t in _floating(net):
            if name in self.tensors:
                self.tensors[name].copy_(t)

    @torch.no_grad()
    def update(self, net: nn.Module, step: int) -> None:
        """Move towards the weights after update `step`."""
        decay = min(self.decay, (1 + step) / (10 + step))
        if net is not self._net:
            self._net, self._places = net, [_place(net, name) for name in self.tensors]
            self._sharded = any(hasattr(t, "to_local") for t in self.tensors.values())
        # Looked up again each time, by keys: a buffer may be another tensor by now. Walking over the network to find
        # them takes longer than the kernel, where tensors are small.
        kept, moved = list(self.tensors.values()), [_present(owned[key]) for owned, key in self._places]
        if self._sharded:
            kept, moved = [local_part(t) for t in kept], [local_part(t) for t in moved]
        foreach_lerp_(kept, moved, 1 - decay)

    @torch.no_grad()
    def swap(self, net: nn.Module) -> None:
        """Exchange the average and the weights of `net`; calling it twice changes nothing."""
        for name, t in _floating(net):
            if name in self.tensors:
                kept = t.detach().clone()
                t.copy_(self.tensors[name])
                self.tensors[name].copy_(kept)

    @contextlib.contextmanager
    def swapped(self, net: nn.Module) -> Iterator[None]:
        """Within, `net` has the EMA weights."""
        self.swap(net)
        try:
            yield
        finally:
            self.swap(net)


def _grads(params: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return the gradients of parameters. Raises RuntimeError where one has none."""
    grads = [p.grad for p in params]
    if any(grad is None for grad in grads):
        raise RuntimeError("a parameter has no gradient")
    return [grad for grad in grads if grad is not None]


def _called(module: nn.Module, name: str) -> Any:
    """Call a method that networks of timm have."""
    method: Any = getattr(module, name)
    return method(coarse=False) if name == "group_matcher" else method()


def _place(net: nn.Module, name: str) -> tuple[Mapping[str, torch.Tensor | None], str]:
    """Return the dictionary that holds a parameter or buffer, and its key there."""
    owner, _, key = name.rpartition(".")
    module = net.get_submodule(owner)
    return (module._parameters if key in module._parameters else module._buffers), key


def _present(t: torch.Tensor | None) -> torch.Tensor:
    if t is None:
        raise RuntimeError("a tensor of the average has left the network")
    return t


def _floating(net: nn.Module) -> list[tuple[str, torch.Tensor]]:
    named = [*net.named_parameters(), *net.named_buffers()]
    return [(name, t) for name, t in named if t.is_floating_point()]
