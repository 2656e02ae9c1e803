"""Find the calls that would wait for the device, on a CPU.

On a CPU nothing waits. This module tracks the tensors that would be on a GPU: those moved to the device
(`x.to(device)`, `torch.zeros(..., device=device)`) and everything computed from them, storage by storage, until a copy
to the host (`x.cpu()`). A call that needs the values of such a tensor on the host, or whose result size depends on
them, would make the host wait.

Some code has one path for a CPU and another for a GPU. So that the GPU path runs, the device of a tracked tensor reads
`cuda:0`, and torch uses the CPU wherever it is given that device.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.config.run_request import RunRequest, load
from trainkit.config.schema import Recipe
from trainkit.diagnostics.sync_audit import WARM_UP, Audit, shortened, watch
from trainkit.distributed.runtime import Runtime
from trainkit.speed import sync_points
from trainkit.speed.sync_points import Log
from trainkit.training.trainer import Trainer

sync_points.SKIPPED.add(__file__)
_T = Tensor
_NAMES = {
    _T.item: ".item()",
    _T.tolist: ".tolist()",
    _T.numpy: ".numpy()",
    _T.__array__: ".numpy()",
    _T.cpu: ".cpu()",
    _T.to: ".to()",
    _T.__bool__: "bool(tensor)",
    _T.__int__: "int(tensor)",
    _T.__index__: "int(tensor)",
    _T.__float__: "float(tensor)",
    _T.__repr__: "print(tensor)",
    _T.__format__: "print(tensor)",
    _T.__getitem__: "indexing",
    _T.__setitem__: "indexing",
}
_LOOP = tuple(
    f"{sync_points._PACKAGE / name}/"
    for name in (
        "training",
        "checkpoint",
        "distributed",
        "environment",
        "experiments",
        "tracking",
        "inference",
        "config",
    )
)
"""Folders whose code may not see a simulated GPU: the training loop would need its driver."""
_GPU = torch.device("cuda", 0)
_PROPERTIES: Any = _T  # torch declares as values what are properties of the class
_WHERE = {
    _PROPERTIES.device.__get__: _GPU,
    _PROPERTIES.is_cuda.__get__: True,
    _PROPERTIES.is_cpu.__get__: False,
    _T.get_device: 0,
}
"""What a tracked tensor reports as its device."""
_TO_HOST = {_T.tolist, _T.numpy, _T.__array__, _T.__repr__, _T.__format__}
"""Functions that give the host values without any operation that a dispatch mode would see on a CPU."""
_FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray, _T.new_tensor}
_BY_VALUES = {
    "aten::_local_scalar_dense": ".item()",
    "aten::nonzero": "nonzero",
    "aten::masked_select": "boolean mask",
    "aten::_unique2": "unique",
    "aten::unique_dim": "unique",
    "aten::unique_consecutive": "unique",
    "aten::unique_dim_consecutive": "unique",
    "aten::equal": "torch.equal",
    "aten::allclose": "torch.allclose",
    "aten::bincount": "bincount",
    "aten::_linalg_check_errors": "torch.linalg",
}
"""Operations that need values of their arguments on the host, on a GPU."""


class Following:
    """A context that calls `seen(what)` for every call that would wait for a GPU, `what` the name of the call.

    Results are unchanged where the code has one path for CPU and GPU. `asked(file)` tells for which source files a
    tracked tensor reports a GPU as its device.
    """

    def __init__(self, seen: Callable[[str], None], asked: Callable[[str], bool] = lambda file: False):
        self._seen, self._asked = seen, asked
        self._refs: dict[int, StorageWeakRef] = {}
        self._call: list[Any] | None = None
        """The torch function that is being called, and whether it was reported."""
        self._quiet = 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Following:
        self._stack.enter_context(_Operations(self))
        self._stack.enter_context(_Calls(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def holds(self, x: Any) -> bool:
        """Return whether a tensor would be on the GPU."""
        key = _storage(x)
        ref = None if key is None else self._refs.get(key._cdata)
        return ref is not None and not ref.expired()

    def hold(self, x: Any) -> None:
        """Mark the storage of a tensor as on the GPU."""
        storage = _storage(x)
        if storage is not None:
            if len(self._refs) >= 1 << 16:
                self._refs = {key: ref for key, ref in self._refs.items() if not ref.expired()}
            self._refs[storage._cdata] = StorageWeakRef(storage)

    def _release(self, x: Tensor) -> Tensor:
        self._refs.pop(x.untyped_storage()._cdata, None)
        return x

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out a function of torch that Python code has called; what it calls in its turn is part of it."""
        if func in _WHERE:
            if self.holds(args[0]) and self._asked(sys._getframe(2).f_code.co_filename):
                return _WHERE[func]
            return func(*args)
        before, self._call = self._call, [func, False]
        try:
            return self._carry_out(func, args, kwargs)
        finally:
            self._call = before

    def _carry_out(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _T.pin_memory:
            return args[0]
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}  # there is no driver to lock it with
        on_device = _is_device(kwargs.get("device"))
        where = _target(self, args[1:], kwargs) if func is _T.to else None
        args, kwargs = tuple(map(_here, args)), {key: _here(value) for key, value in kwargs.items()}
        if func in _TO_HOST and self.holds(args[0]):
            return self._alone(func, args, kwargs)
        if func is _T.cpu and self.holds(args[0]):
            return self._release(self._alone(_copy, args[:1], {}))
        if func is _T.to:
            blocking = not kwargs.get("non_blocking", [a for a in args[1:] if isinstance(a, bool)][:1] == [True])
            if where is not None and where != self.holds(args[0]):
                out = self._alone(_moved, args, kwargs, tell=blocking)
                if not where:
                    return self._release(out)
                self.hold(out)
                return out
        if func in _FROM_HOST:
            on_gpu = (func is _T.new_tensor and self.holds(args[0])) or on_device
            if on_gpu and not self.holds(args[0] if func is not _T.new_tensor else None):
                out = self._alone(func, args, kwargs)
                out = out.clone() if any(out is a for a in args) else out
                self.hold(out)
                return out
        if func is torch.nn.functional.one_hot and (args[1:] or kwargs.get("num_classes", -1) >= 0):
            out = self._alone(func, args, kwargs, tell=False)  # a CPU checks the classes, a GPU does not
        else:
            out = func(*args, **kwargs)
        if on_device:
            for x in _tensors(out):
                self.hold(x)
        return out

    def _alone(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tell: bool = True) -> Any:
        """Carry out a call that is known to be one wait, or none."""
        self._quiet += 1
        try:
            return func(*args, **kwargs)
        finally:
            self._quiet -= 1
            if tell:
                self.tell("")

    def tell(self, what: str) -> None:
        """Report a wait: once for each call that was made from outside torch."""
        if self._quiet:
            return
        if self._call is None:
            self._seen(what)
        elif not self._call[1]:
            self._call[1] = True
            self._seen(_called(self._call[0], what))


class _Calls(TorchFunctionMode):
    """Sees the functions of torch as they are called."""

    def __init__(self, following: Following):
        super().__init__()
        self._following = following

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _T.backward:
            with self:  # what a backward pass written in Python calls is seen too
                given = dict(kwargs or {})
                return torch.autograd.backward(*args, grad_tensors=given.pop("gradient", None), **given)
        return self._following.call(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    """Sees the operations that functions of torch are made of, those of the backward pass too."""

    def __init__(self, following: Following):
        super().__init__()
        self._following = following

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch imports its compiler else, for two seconds, to keep it out of here; nothing is compiled meanwhile."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, following = kwargs or {}, self._following
        given = any(following.holds(x) for x in _tensors((args, tuple(kwargs.values()))))
        out = func(*args, **kwargs)
        if not given:
            return out
        name = func._schema.name
        if name in ("aten::copy_", "aten::_foreach_copy_"):
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            if blocking and any(map(self._crosses, _tensors(args[0]), _tensors(args[1]))):
                following.tell(".copy_()")
            return out
        if name in _BY_VALUES or _depends(following, name, args, kwargs):
            following.tell(_BY_VALUES.get(name) or name.removeprefix("aten::"))
        for x in _tensors(out):
            following.hold(x)
        return out

    def _crosses(self, to: Tensor, source: Tensor) -> bool:
        # A number on its way to a GPU is an argument of the kernel.
        return self._following.holds(to) != self._following.holds(source) and not (
            source.dim() == 0 and self._following.holds(to)
        )


def _depends(following: Following, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether values on the device decide the number of rows, or values of the host are asked for there."""
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        if any(i is not None and i.dim() > 0 and not following.holds(i) for i in args[1]):
            return True  # the index itself has to be copied to the device
        filled = name != "aten::index" and args[2].numel() == 1  # done by masked_fill
        return bool(masks) and not filled
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None
    return name == "aten::multinomial"  # it checks its probabilities


def _copy(x: Tensor) -> Tensor:
    return x.clone()


def _moved(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    out = x.to(*args, **kwargs)
    return out.clone() if out.untyped_storage()._cdata == x.untyped_storage()._cdata else out


def _target(following: Following, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
    """Return whether `.to` moves to the device; False: to the host; None: nowhere, as with a dtype alone."""
    for word in (*args, kwargs.get("device"), kwargs.get("other")):
        if isinstance(word, str):
            return False
        if isinstance(word, torch.device):
            return True
        if isinstance(word, Tensor):
            return following.holds(word)
    return None


def _here(word: Any) -> Any:
    """A word of an argument list, the CPU in place of the GPU that followed tensors speak of."""
    return torch.device("cpu") if isinstance(word, torch.device) and word.type == _GPU.type else word


def _is_device(word: Any) -> bool:
    """Return whether `device=` names the device of the run, an object in code, and not the host by its name."""
    return isinstance(word, torch.device)


def _storage(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return None
    try:
        return x.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse
        return None


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for part in x:
            yield from _tensors(part)


def _called(func: Callable[..., Any], what: str) -> str:
    """Return the name that a function of torch has in source code; `what` where it has none."""
    if func in (_T.__getitem__, _T.__setitem__):
        return "indexing with .item()" if what == ".item()" else "indexing with values of the device"
    return _NAMES.get(func) or (resolve_name(func) or what).replace("torch.Tensor.", ".")


# ---- Trainings


def following(log: Log) -> Following:
    """Return what tells a log of the waits that a GPU would make of a training on this CPU."""
    return Following(lambda what: log.seen(), lambda file: log.is_own(file) and not file.startswith(_LOOP))


def alone(recipe: Recipe, total: int) -> Recipe:
    """Return the recipe of an audit as a CPU can follow it: neither compiled nor read by other processes."""
    recipe = shortened(recipe, total)
    return replace(recipe, train=replace(recipe.train, compile="off"), loader=replace(recipe.loader, workers=0))


def audit(request: RunRequest, steps: int) -> Audit:
    """Count where the host would wait, as `sync_audit.audit` does on a GPU."""
    recipe = alone(load(request), WARM_UP + steps)
    runtime, log = Runtime(recipe), Log()
    try:
        runtime.configure(recipe)
        runtime.at_once = False
        with following(log), Trainer(recipe, recipe.data.open(recipe.seed), runtime) as trainer:
            watched = watch(trainer, log, WARM_UP + steps)
    finally:
        runtime.close()
    return Audit(recipe.name, "an emulated GPU", watched, log.counts)
