"""Where a run happens: processes, device and arithmetic, through Accelerate.

The accelerate config owns processes, devices and sharding. What came up is compared with what was asked for, since
Accelerate 1.15 starts something else in silence on several paths: MULTI_CPU with two processes starts one, MULTI_GPU
with use_cpu starts two that each believe to be alone, and FSDP on a CPU becomes plain data parallelism.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import socket
import threading
from _thread import interrupt_main
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer

from trainkit.config.schema import Recipe
from trainkit.distributed import launch_settings
from trainkit.distributed.stop_signal import Stop, Stopped
from trainkit.environment import process
from trainkit.environment.record import cpu_name
from trainkit.errors import UserError, of_disk
from trainkit.interfaces import Batch
from trainkit.losses.class_shards import gathered
from trainkit.models import compilation
from trainkit.paths import keep_compiled_private
from trainkit.tensors import synchronize

if TYPE_CHECKING:
    from accelerate import FullyShardedDataParallelPlugin

T = TypeVar("T")
_BEAT_SECONDS = 2.0
"""Time between two heartbeats of a rank that others wait for."""


class Runtime:
    """The processes and the device of one launch; made once, shared by a run and the runs it needs first."""

    def __init__(self, recipe: Recipe):
        _set_environment(recipe)
        from accelerate import Accelerator
        from accelerate.utils import (
            DistributedDataParallelKwargs,
            DynamoBackend,
            GradientAccumulationPlugin,
            InitProcessGroupKwargs,
            TorchDynamoPlugin,
        )

        launch_settings.check(recipe)
        precision = launch_settings.precision(recipe)
        patience = datetime.timedelta(seconds=recipe.limits.collective.seconds)
        _leave_other_precision(precision.value)
        handlers = [
            # Buffers are averaged after each step (`average_buffers`), by one rule for every kind of parallelism.
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
            # The default of 30 minutes is far too long to notice that a process has died.
            InitProcessGroupKwargs(timeout=patience),
        ]
        try:
            self.accelerator = Accelerator(
                mixed_precision=precision.value,
                cpu=launch_settings.on_cpu(),
                kwargs_handlers=handlers,
                # `train.compile` compiles in place, and Accelerate never does, whatever the launcher asked for.
                dynamo_plugin=TorchDynamoPlugin(backend=DynamoBackend.NO),
                # The recipe's batch sizes say how often gradients are accumulated (`no_sync`, and a factor on losses).
                gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            )
        except (ValueError, ImportError) as error:
            raise UserError("launch", str(error), remedy="see accelerate_configs/ for tested configs") from None
        self.precision = precision.value
        self.device: torch.device = self.accelerator.device
        self.rank: int = self.accelerator.process_index
        self.world: int = self.accelerator.num_processes
        self.main: bool = self.accelerator.is_main_process
        self.at_once: bool = self.device.type == "cpu"
        """True where values of the device can be read without waiting; set to False to emulate a GPU."""
        self._factors: dict[tuple[float, torch.dtype], Tensor] = {}
        self._limits = recipe.limits
        launch_settings.check_processes(self.world)
        self._plugin = self._sharding_on_cpu()
        scaler = self.accelerator.scaler
        self._scale = scaler.state_dict() if scaler is not None else None
        # Small messages between processes travel beside the training, so that reading one never waits for a GPU.
        self._control = _gloo_group(patience) if self.world > 1 and self.device.type != "cpu" else None
        self.asked = 0
        """How often `any_async` was asked, at every step and every batch of an evaluation, and a heartbeat came."""
        self._peers = self.all_gather((socket.gethostname(), os.getpid()))
        self.configure(recipe)

    def configure(self, recipe: Recipe) -> None:
        """Set the switches of a recipe. Raises UserError when its precision is not the one that this launch has."""
        launch_settings.check(recipe)
        launch_settings.refuse_other_precision(recipe, self.precision)
        # FSDP2 cuts parameters into rows of memory and refuses those that channels_last has strided.
        self.channels_last = recipe.device.channels_last and not self.sharded
        if self.world == 1:  # of several runs and models in one process each has its own
            self.accelerator.state._mixed_precision = self.precision
        self.choose_compile(recipe)
        _set_switches(recipe)
        if self.device.type == "cpu":
            process.keep_freed_memory()

    def choose_compile(self, recipe: Recipe, updates: int | None = None, recorded: str | None = None) -> None:
        """Set the compile mode of a run, as `launch_settings.compile_mode` decides it."""
        self._compile = launch_settings.compile_mode(recipe, self.device.type, updates, recorded)
        if self.compile != "off":
            keep_compiled_private()

    @property
    def compile(self) -> str:
        """The compile mode of the run at hand."""
        return self._compile.value

    def _sharding_on_cpu(self) -> FullyShardedDataParallelPlugin | None:
        """Accelerate 1.15 reads its FSDP settings on GPUs only; FSDP2 itself runs on gloo, so they are read here."""
        if self.device.type != "cpu" or os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true" or self.world == 1:
            return None
        from accelerate import FullyShardedDataParallelPlugin

        return FullyShardedDataParallelPlugin()

    @property
    def kind(self) -> str:
        """How processes share the work: NO, MULTI_CPU, MULTI_GPU, FSDP."""
        return "FSDP" if self._plugin is not None else self.accelerator.state.distributed_type.value

    @property
    def sharded(self) -> bool:
        """True where parameters are split over processes (FSDP2): a forward pass then involves all ranks."""
        return self.kind == "FSDP"

    def describe(self) -> dict[str, Any]:
        """Return device, processors, processes and precision, for the parameters of the run."""
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None
        return {
            "device": self.device.type,
            "gpu": gpu,
            "cpu": cpu_name(),
            "cpu_cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "processes": self.world,
            "parallelism": self.kind,
            "precision": self.precision,
        }

    def settings(self, recipe: Recipe) -> str:
        """Return device, processes, precision and compile mode of a recipe's run, each with its source, as text."""
        found = {
            "device": launch_settings.device(self.device),
            "processes": launch_settings.processes(self.world),
            "precision": self._precision_of(recipe),
            "compile": self._compile,
        }
        return ", ".join(f"{name} {setting}" for name, setting in found.items())

    def _precision_of(self, recipe: Recipe) -> launch_settings.Setting:
        here = launch_settings.precision(recipe)
        if here.value == self.precision:
            return here
        why = f"from the checkpoint; here it would be {here.value}: {here.source}"
        return launch_settings.Setting(self.precision, why)

    # ---- Placing

    def prepare(
        self, net: nn.Module, optimizer: Optimizer, divided: Collection[str] = ()
    ) -> tuple[nn.Module, Optimizer]:
        """Wrap the trained model and its optimizer for the processes and the precision of the launch.

        Parameters that are `divided` are others on each rank: neither they nor their gradients are sent.
        """
        if divided:
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, divided)
        if self._plugin is not None:
            from accelerate.utils import DistributedType

            # Set here and not once: Accelerate puts its own word back whenever it looks at its state.
            self.accelerator.state.distributed_type = DistributedType.FSDP
            self.accelerator.state.fsdp_plugin = self._plugin
        scaler = self.accelerator.scaler
        if scaler is not None and self._scale is not None:
            # A teacher, or a measurement, that was trained before in this process came to another scale of the loss.
            scaler.load_state_dict(self._scale)
        net, optimizer = self.accelerator.prepare(net, optimizer)
        if self.world > 2 and isinstance(net, nn.parallel.DistributedDataParallel):
            _order_buckets(net)
        if self.sharded:
            from torch.distributed.fsdp import register_fsdp_forward_method

            # Models of timm are called by these too, which gather no parameters unasked.
            for module in net.modules():
                for method in ("forward_features", "forward_head"):
                    if hasattr(module, method):
                        register_fsdp_forward_method(module, method)
        return net, optimizer

    def to_device(self, batch: Batch) -> Batch:
        """Move a batch to the device, without waiting where the host memory is pinned."""
        if self.at_once:
            return dict(batch)
        if self.device.type == "mps":  # it has no float64, and nothing that says when a copy has arrived
            narrow = {key: value.float() if value.dtype == torch.float64 else value for key, value in batch.items()}
            return {key: value.to(self.device) for key, value in narrow.items()}
        return {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}

    def to_memory_format(self, net: nn.Module) -> nn.Module:
        """Move a model to the device in the memory format of the run."""
        last = self.channels_last and not (self.device.type == "cpu" and _breaks_onednn(net))
        ranks = {p.dim() for p in net.parameters()}
        fits = torch.channels_last_3d if 5 in ranks else torch.channels_last
        memory_format = fits if last and not {4, 5} <= ranks else torch.preserve_format
        return net.to(self.device, memory_format=memory_format)  # pyright: ignore[reportCallIssue] - torch types no memory_format

    def unwrap(self, net: nn.Module) -> nn.Module:
        """Return the model without DistributedDataParallel around it."""
        return net.module if isinstance(net, nn.parallel.DistributedDataParallel) else net

    def autocast(self) -> AbstractContextManager:
        """Return the run's mixed precision, for forwards outside of what `prepare` wrapped."""
        return self.accelerator.autocast()

    def begin_batch(self) -> None:
        """Begin a micro-batch, or a batch of an evaluation: what compiled models kept of the last is given up."""
        compilation.begin_step(self.compile)

    def compiled(self, net: nn.Module, calls: int) -> Callable[[Tensor], Tensor]:
        """Return a frozen model compiled for so many batches of one shape; itself where that does not pay off."""
        return compilation.compiled(net, self.compile if calls >= launch_settings.LEAST_FORWARDS else "off")

    def uncompiled(self) -> AbstractContextManager:
        """Return a context in which compiled models run as they are: for a few batches of another shape."""
        return contextlib.nullcontext() if self.compile == "off" else torch.compiler.set_stance("force_eager")

    def no_sync(self, net: nn.Module, last: bool) -> AbstractContextManager:
        """Return a context that leaves gradients unsynchronised until the `last` micro-batch of a step."""
        return contextlib.nullcontext() if last else self.accelerator.no_sync(net)

    def backward(self, loss: Tensor, factor: float) -> None:
        """Add the gradient of `factor` times a loss to those of the parameters.

        Accelerate does it where the loss is scaled (fp16). Else the backward pass begins with the factor: the same bits
        as those of a product, without the product and a division by one.
        """
        if self.accelerator.scaler is not None:
            self.accelerator.backward(loss * factor)
            return
        begin = self._factors.get((factor, loss.dtype))
        if begin is None:
            begin = self._factors[factor, loss.dtype] = torch.full_like(loss.detach(), factor)
        loss.backward(begin)

    def stepper(self, optimizer: Optimizer) -> Callable[[], object]:
        """Return the function that makes a step of a prepared optimizer: the optimizer's own where no loss is scaled.

        Accelerate's looks for packages at every step, 35 us and more.
        """
        inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
        return (inner if self.accelerator.scaler is None else optimizer).step

    def reshard(self, net: nn.Module) -> None:
        """Free the gathered parameters: after a forward without a backward, FSDP2 leaves whole ones in the root."""
        if self.sharded:
            from torch.distributed.fsdp import FSDPModule

            for module in net.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def synchronize(self) -> None:
        """Wait for the device, so that time spent on it is counted where it was spent."""
        synchronize(self.device)

    def memory(self) -> dict[str, float]:
        """Greatest GPU memory so far, under its metric name; nothing on a CPU.

        MPS counts no greatest: it is what Metal has given the process, of which little is given back.
        """
        if self.device.type == "mps":
            return {"speed/peak_memory_gb": torch.mps.driver_allocated_memory() / 1e9}
        if self.device.type != "cuda":
            return {}
        return {"speed/peak_memory_gb": torch.cuda.max_memory_allocated(self.device) / 1e9}

    # ---- Collectives

    def gather(self, x: Tensor, grad: bool = False) -> Tensor:
        """(b, ...) on each rank -> (world*b, ...) on every rank, in rank order, without gradient.

        With `grad` the gradient comes back: to the rows of a rank the sum of what all ranks' losses send them. Every
        rank must then run the backward pass.
        """
        if self.world == 1:
            return x if grad else x.detach()
        return _Gathered.apply(x, self.world, self.rank) if grad else gathered(x.detach(), self.world)

    def sum(self, x: Tensor) -> Tensor:
        """Sum over ranks, on every rank."""
        if self.world > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x

    def broadcast(self, thing: T) -> T:
        """Broadcast `thing` of rank 0, which must be plain data; returns it on every rank."""
        if self.world == 1:
            return thing
        box = [thing]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    @contextlib.contextmanager
    def heartbeat(self, stop: Stop | None = None) -> Iterator[None]:
        """Return a context of work for which other ranks wait longer than `limits.collective`; all leave it together.

        Every rank enters it, and calls no collective within. A thread tells the others that this one is at work, for
        `limits.hang` at most: so they notice at once when its process has died, and within `limits.collective` when
        that stands still. With `stop`, a signal to a rank that waits also interrupts those that work.
        """
        if self.world == 1:
            yield
            return
        done = threading.Event()
        thread = threading.Thread(target=self._beat, args=(done, stop), name="trainkit-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        while self._exchange(False, stop)[0]:
            self.asked += 1  # for the watchdog: one that waits does not hang

    def _beat(self, done: threading.Event, stop: Stop | None) -> None:
        seconds = min(_BEAT_SECONDS, self._limits.collective.seconds / 4)
        left = float("inf") if self._limits.hang is None else self._limits.hang.seconds / seconds
        with contextlib.suppress(RuntimeError):  # a connection is broken: the main thread notices
            while left > 0 and not done.wait(seconds):
                left -= 1
                _, told = self._exchange(True, stop)
                if told and stop is not None and not stop.told:
                    interrupt_main()

    def _exchange(self, working: bool, stop: Stop | None) -> tuple[bool, bool]:
        """Return whether any rank is at work, and whether any was asked to stop."""
        box = torch.tensor([working, stop is not None and stop.told], dtype=torch.int32)
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self._control)
        return bool(box[0]), bool(box[1])

    def on_main(self, act: Callable[[], T], stop: Stop | None = None) -> T:
        """Call `act` on rank 0 alone: every rank gets what it returned, which is plain data, or its UserError.

        It may take longer than `limits.collective` (`heartbeat`). Where rank 0 is stopped at it (`Stopped`), so are
        all; with `stop`, also where another one is asked to stop meanwhile.
        """
        if self.world == 1:
            return act()
        done: Any = None
        failure: UserError | str | None = None
        own: BaseException | None = None
        with self.heartbeat(stop):
            try:
                done = act() if self.main else None
            except UserError as error:
                failure = error
            except BaseException as error:
                # The others must not wait for a message that never comes.
                failure = of_disk(error) if isinstance(error, OSError) else None
                if failure is None:
                    own = error
                    failure = "" if isinstance(error, Stopped) else f"rank 0 failed: {type(error).__name__}: {error}"
        done, failure = self.broadcast((done, failure))
        if own is not None:
            raise own
        if isinstance(failure, UserError):
            failure.told = not self.main
            raise failure
        if failure == "":
            raise Stopped
        if failure:
            raise RuntimeError(failure)
        return done

    def all_gather(self, thing: T) -> list[T]:
        """Gather `thing` of all ranks, which must be plain data; returns them on every rank, in rank order."""
        if self.world == 1:
            return [thing]
        box: list[Any] = [None] * self.world
        dist.all_gather_object(box, thing, group=self._control)
        return box

    def check_equal(self, things: Mapping[str, str]) -> None:
        """Compare words by name over ranks. Raises UserError, on every rank, for those that differ."""
        told = self.all_gather(dict(things)) if self.world > 1 else []
        for rank, other in enumerate(told):
            if differ := [name for name in told[0] if other.get(name) != told[0][name]]:
                error = UserError(
                    "launch",
                    f"rank {rank} differs from rank 0 in: {', '.join(differ)}",
                    "the same on every machine",
                    "; ".join(f"{name}: {told[0][name]} and {other.get(name)}" for name in differ),
                )
                error.told = not self.main
                raise error

    def any_async(self, flag: bool) -> Callable[[], bool]:
        """Begin an all-reduce that tells whether a flag is True on any rank; call what is returned to wait for it.

        The message travels while the caller works on, and the answer is read a step later.
        """
        self.asked += 1
        if self.world == 1:
            return lambda: flag
        box = torch.tensor([int(flag)])
        work = dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self._control, async_op=True)

        def answer() -> bool:
            work.wait()
            return bool(box.item())

        return answer

    def barrier(self) -> None:
        """Wait until every rank has come here (a barrier)."""
        if self.world > 1:
            dist.barrier(group=self._control)

    def average_buffers(self, net: nn.Module) -> None:
        """Replace floating-point buffers (batch-norm statistics) on all ranks by their mean.

        After every step, not before evaluations: then evaluating a run changes no bit of it, and a checkpoint holds
        what every rank has.
        """
        if self.world == 1:  # before the walk over all modules, which takes 3 us for five
            return
        buffers = [b for b in net.buffers() if b.is_floating_point()]
        if not buffers:
            return
        flat = torch.cat([b.reshape(-1).float() for b in buffers])
        dist.all_reduce(flat)
        flat /= self.world
        for buffer, mean in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
            buffer.copy_(mean.view_as(buffer))

    def check_tensors_equal(self, what: str, tensors: Iterable[Tensor]) -> None:
        """Compare a checksum of tensors over ranks. Raises RuntimeError where they differ, which `what` names."""
        if self.world == 1:
            return
        sums = self.all_gather(checksum(tensors))
        if len(set(sums)) > 1:
            raise RuntimeError(f"{what} differs between processes (checksums {sums}); nothing was saved")

    def gone(self, rank: int) -> bool:
        """Return True where the process of another rank has ended; False for one on another machine."""
        import psutil

        host, pid = self._peers[rank]
        try:
            return host == self._peers[self.rank][0] and psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def _order_buckets(net: nn.parallel.DistributedDataParallel) -> None:
    """Have DDP order its gradient buckets before the first step, by a backward pass of zeros.

    It orders them by the first backward pass of a process, and three or more gradients are summed in an order that
    depends on their place in a bucket: a resumed run would differ in the last bits of its first step. The zeros come
    in the order in which gradients do if layers are used as they are defined: from the last to the first.
    """
    params = [
        p for name, p in net.module.named_parameters() if p.requires_grad and name not in net.parameters_to_ignore
    ]
    with torch.enable_grad():
        net._pre_forward(params[0].new_zeros(1))
        zero = params[0].new_zeros(())
        for p in params:
            zero = zero + p.sum() * 0
        net._post_forward(zero)
    zero.backward()
    for p in params:
        p.grad = None


def _leave_other_precision(wanted: str) -> None:
    """Have a process that is alone take another precision than before: Accelerate keeps the first for all."""
    from accelerate.state import AcceleratorState

    if AcceleratorState._shared_state and not dist.is_initialized() and AcceleratorState().mixed_precision != wanted:
        AcceleratorState._reset_state()


def _gloo_group(timeout: datetime.timedelta) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timeout)
    if not isinstance(group, dist.ProcessGroup):
        raise RuntimeError("torch.distributed made a group of all processes without this one")
    return group


class _Gathered(torch.autograd.Function):
    """Rows of all ranks, through which a loss of any rank reaches the features of every other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: int, rank: int) -> Tensor:
        ctx.rows = slice(rank * len(x), (rank + 1) * len(x))
        return gathered(x, world)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad[ctx.rows], None, None


def _breaks_onednn(net: nn.Module) -> bool:
    """Return True where a convolution would write past its memory on a CPU (uxlfoundation/oneDNN#6035).

    In channels_last, the backward of a strided 1x1 convolution with fewer input channels than a vector register holds
    numbers: seen here with 3 to 6 channels and AVX2, which holds 8; AVX-512 holds 16.
    """
    return any(
        isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1) and max(m.stride) > 1 and m.in_channels // m.groups < 16
        for m in net.modules()
    )


def checksum(tensors: Iterable[Tensor]) -> str:
    """SHA-256 over the bytes of tensors, in order."""
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _set_environment(recipe: Recipe) -> None:
    if recipe.device.expandable_segments:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if recipe.device.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _set_switches(recipe: Recipe) -> None:
    device = recipe.device
    torch.backends.cuda.matmul.allow_tf32 = device.tf32
    torch.backends.cudnn.allow_tf32 = device.tf32
    torch.backends.cudnn.benchmark = device.cudnn_benchmark and not device.deterministic
    if device.deterministic or torch.are_deterministic_algorithms_enabled():
        # Saying no where nothing else was said imports the compiler: 3 s of processor time.
        torch.use_deterministic_algorithms(device.deterministic, warn_only=False)
    if device.threads:
        torch.set_num_threads(device.threads)
