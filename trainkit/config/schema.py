"""The dataclasses of a recipe: what the YAML may say, its types and its defaults. Each default lives here alone.

`task` and `data` are named blocks: their `name` is looked up in `TABLES`, and the class it names is the block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from trainkit.config import metric_table
from trainkit.config.downloads import Download
from trainkit.config.ranges import (
    BatchSize,
    Count,
    FractionAboveZero,
    FractionBelowOne,
    FractionBetween,
    NotNegative,
    Positive,
    Whole,
)
from trainkit.config.schedule import Curve
from trainkit.config.targets import Best, StopWhen
from trainkit.config.units import AnySpan, Length, PerProcess, Share, Span, UpdateSize, samples_per_update
from trainkit.config.validation import Named

if TYPE_CHECKING:
    from trainkit.interfaces import Data, Task
else:  # a recipe is read without numpy, which the protocols import; `Named` alone validates the blocks
    Data = Task = Any

TABLES: dict[str, dict[str, str]] = {
    "task": {
        "classify": "trainkit.tasks.classify:Classify",
        "embed": "trainkit.tasks.embed:Embed",
        "adadistill": "trainkit.tasks.adadistill:AdaDistill",
        "segment3d": "trainkit.tasks.segment3d:Segment3d",
        "reid": "trainkit.tasks.reid:Reid",
        "segment2d": "trainkit.tasks.segment2d:Segment2d",
    },
    "data": {
        "faces": "trainkit.data.faces.dataset:Faces",
        "images": "trainkit.data.images.dataset:Images",
        "volumes": "trainkit.data.volumes.dataset:Volumes",
        "people": "trainkit.data.people.dataset:People",
        "scenes": "trainkit.data.scenes.dataset:Scenes",
    },
}

_NOT_IN_HASH = {"hash": False}
"""For what changes no bit of the outcome: two recipes that differ in it are the same experiment. And for what is done
when something goes wrong: an interrupted run may be resumed with another answer."""


WeightDecay = Annotated[float, Field(ge=0, le=100)]
"""Share of a weight that is taken off it, times the learning rate."""


@dataclass(kw_only=True)
class Group:
    """Parameters with a learning rate or weight decay of their own."""

    match: str
    """Pattern of parameter names, with `*` and `?`. A pattern that matches no parameter is an error."""
    lr_scale: NotNegative = 1.0
    """Factor on `optim.lr` for these parameters."""
    weight_decay: WeightDecay | None = None
    """Weight decay of these parameters. null: `optim.weight_decay`."""


@dataclass(kw_only=True)
class LrRule:
    """Scaling of the learning rate with the batch: `optim.lr` then applies to `batch_size` samples per step."""

    name: Literal["linear", "sqrt"]
    """`linear`: the rate grows in proportion to the samples per step (Goyal et al. 2017, arXiv 1706.02677). `sqrt`:
    with their square root."""
    batch_size: BatchSize = 256
    """Samples per step for which `optim.lr` is given."""


@dataclass(kw_only=True)
class AdaptiveClip:
    """Adaptive gradient clipping (Brock et al., ICML 2021, arXiv 2102.06171).

    The gradient of each output unit of a layer is limited to a fraction of the norm of that unit's weights.
    """

    factor: Positive = 0.01
    """Largest norm of a unit's gradient, as a fraction of the norm of its weights."""
    eps: Positive = 1e-3
    """Lower bound for the norm of the weights, so that weights that start at zero can change."""
    leave_out: list[str] = field(default_factory=list)
    """Patterns of parameter names that are not clipped, such as the last layer of a classifier. One that matches no
    parameter is an error."""


@dataclass(kw_only=True)
class Optim:
    """Optimizer, learning rate and gradient clipping."""

    name: str = "sgd"
    """Optimizer: `sgd`, `adam`, `adamw`, or `timm:NAME` for any optimizer of timm."""
    lr: Annotated[float, Field(gt=0, le=1000)]
    """Peak learning rate, before `lr_rule` and the schedule."""
    lr_rule: LrRule | None = None
    """Scaling of `lr` with the samples per step. null: `lr` is used as given, at any batch size."""
    momentum: FractionBelowOne = 0.9
    """Momentum of `sgd`."""
    nesterov: bool = False
    """Use Nesterov momentum in `sgd`."""
    betas: tuple[FractionBelowOne, FractionBelowOne] = (0.9, 0.999)
    """Decay rates of the first and second moment in `adam` and `adamw`."""
    eps: FractionAboveZero = 1e-8
    """Constant in the denominator of `adam` and `adamw`."""
    weight_decay: WeightDecay = 0.0
    """Weight decay: the fraction of a weight, times the learning rate, that a step subtracts."""
    decay_1d: bool = True
    """Apply weight decay to biases, norm weights and other one-dimensional parameters too."""
    clip_norm: Annotated[float, Field(gt=0, le=1e12)] | None = None
    """Largest norm of the whole gradient; a larger gradient is scaled down to it. null: no clipping."""
    clip_agc: AdaptiveClip | None = None
    """Adaptive gradient clipping, instead of `clip_norm`. null: no clipping."""
    groups: list[Group] = field(default_factory=list)
    """Parameters with a learning rate or weight decay of their own."""
    layer_decay: FractionAboveZero | None = None
    """Layer-wise learning rate decay: factor on the rate from each block to the one below it, for networks of timm.
    null: one rate for all blocks."""
    fused: bool = True
    """Use one kernel for all parameters, where the optimizer has one."""

    def __post_init__(self) -> None:
        if self.clip_norm is not None and self.clip_agc is not None:
            raise ValueError("clip_norm and clip_agc are both set; keep one")
        if not self.name.startswith("timm:") and self.name not in ("sgd", "adam", "adamw"):
            raise ValueError(f"unknown optimizer {self.name!r}; use sgd, adam, adamw or timm:NAME")
        if self.name == "sgd" and self.nesterov and self.momentum == 0:
            raise ValueError("nesterov is true and momentum is 0; set a momentum above 0, such as 0.9")


@dataclass(kw_only=True)
class Train:
    """Length, batch, learning rate schedule and numerical precision of the training."""

    length: Length
    """Length of the whole training: `26 epochs`, `80k steps`, `1M samples`. `0 steps`: only the start is evaluated,
    such as a linear probe."""
    batch_size: UpdateSize
    """Samples per optimizer step over all processes. `4 per process` sets those of each process: more processes then
    train with larger batches."""
    micro_batch: BatchSize | None = None
    """Samples per process and forward pass; gradients are accumulated up to `batch_size`. null: all samples of a
    process at once."""
    schedule: Curve = field(default_factory=Curve)
    """Learning rate schedule and warm-up. Default: constant, without warm-up."""
    precision: Literal["auto", "no", "bf16", "fp16", "fp8"] = "auto"
    """Precision of forward and backward pass. `auto`: the launcher's setting, else bf16 where the GPU supports it, else
    fp16, and float32 on a CPU. `no`: float32."""
    compile: Literal["auto", "off", "default", "reduce-overhead", "max-autotune"] = field(
        default="auto", metadata={"hash": {"auto": "off"}}
    )
    """Mode of torch.compile. `auto`: `default` on a CUDA GPU where the training is long enough, else `off`."""
    activation_checkpointing: bool = field(default=False, metadata=_NOT_IN_HASH)
    """Recompute the network's activations in the backward pass instead of storing them: less memory for at most one
    more forward pass, with bitwise equal results."""
    ema: FractionBetween | None = None
    """Decay of the EMA weights, such as 0.999, which are evaluated beside the raw weights. null: no EMA."""
    nonfinite: Literal["stop", "skip"] = field(default="stop", metadata=_NOT_IN_HASH)
    """Action on a loss or gradient that is not finite. `stop`: end the run. `skip`: skip that step."""
    on_oom: Literal["stop", "halve"] = field(default="stop", metadata=_NOT_IN_HASH)
    """Action on out of memory. `stop`: end the run. `halve`, on one process: repeat with half the micro-batch and keep
    that size; batch norm then sees fewer samples at once."""

    def __post_init__(self) -> None:
        one = samples_per_update(self.batch_size, 1)
        if self.micro_batch and one % self.micro_batch:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of micro_batch {self.micro_batch}")
        if isinstance(self.batch_size, int):
            self.schedule.refuse_short(self.length, None, self.batch_size)


@dataclass(kw_only=True)
class Device:
    """Switches of the hardware and of PyTorch's backends."""

    tf32: bool = True
    """Use TensorFloat-32 in matrix products and convolutions, on GPUs that have it."""
    cudnn_benchmark: bool = True
    """Let cuDNN measure its convolution algorithms and choose the fastest for each shape."""
    channels_last: bool = True
    """Use the channels-last memory format for networks and images. On a CPU it gave the face networks at 48 px 1.3 to
    1.6 times the throughput."""
    expandable_segments: bool = True
    """Let the CUDA allocator grow its segments, which reduces fragmentation."""
    deterministic: bool = False
    """Use only deterministic kernels. Bitwise equal runs on a GPU need it; on a CPU they need the same number of
    threads."""
    threads: Annotated[int, Field(ge=1, le=512)] | None = None
    """CPU threads of each process. null: the launcher's setting."""


@dataclass(kw_only=True)
class Loader:
    """Data loading: workers, prefetching and damaged samples."""

    workers: Annotated[int, Field(ge=0, le=128)] = 0
    """Worker processes per training process. 0: the training process reads with threads, which is fastest for packed
    data."""
    start: Literal["fork", "spawn", "forkserver"] | None = None
    """Start method of worker processes. null: the platform's default."""
    prefetch: Annotated[int, Field(ge=1, le=1024)] = 2
    """Batches that each worker reads ahead. Without workers, a thread reads this many ahead where the device is a
    GPU."""
    pin: bool = True
    """Use page-locked memory for batches on their way to a GPU, so that copies are asynchronous. No effect on a CPU."""
    damaged: Literal["fail", "replace"] = "fail"
    """Action on a training sample that is damaged on disk. `fail`: end the run. `replace`: train on another sample of
    its class and report it. Evaluation samples are never replaced."""
    damaged_most: Share = 0.01
    """Largest fraction of the training set that `replace` may replace; above it the run ends."""
    timeout: AnySpan = field(default_factory=lambda: Span(5, "minutes"))
    """Time after which a silent worker is replaced. The fourth worker that is lost ends the run."""

    def __post_init__(self) -> None:
        if not self.timeout.timed:
            raise ValueError(f"timeout is '{self.timeout}'; expected a time, such as 5 min")


@dataclass(kw_only=True)
class Limits:
    """Timeouts after which a process is ended."""

    hang: AnySpan | None = field(default_factory=lambda: Span(30, "minutes"))
    """Longest time between phases of a step or batches of an evaluation, from the first step on; the process then
    writes the stacks of all threads and ends. null: no limit."""
    collective: AnySpan = field(default_factory=lambda: Span(10, "minutes"))
    """Longest time to wait for another process that sends no heartbeat."""
    stop: AnySpan = field(default_factory=lambda: Span(25, "seconds"))
    """Time from the first stop signal after which the training exits even if it has not saved. torch's launcher kills
    after 30 s."""

    def __post_init__(self) -> None:
        for name in ("hang", "collective", "stop"):
            if (span := getattr(self, name)) is not None and not span.timed:
                raise ValueError(f"{name} is '{span}'; expected a time, such as 10 min")


@dataclass(kw_only=True)
class Evaluation:
    """One named evaluation: its split and its schedule."""

    split: str | None = None
    """A name in `data.evaluate`. null: the name of the evaluation."""
    every: AnySpan | None = None
    """Interval between evaluations: `1 epoch`, `500 steps`, `30 min`. null: only at start or end."""
    at_start: bool = False
    """Run this evaluation before the first step."""
    at_end: bool = True
    """Run this evaluation after the last step."""
    budget: Share | None = None
    """Largest fraction of wall-clock time for this evaluation, such as `5%`; it runs less often when it would take
    more. null: no limit."""
    batch_size: BatchSize = 256
    """Samples per process and forward pass. Whole volumes are read one at a time and cut into windows."""


@dataclass(kw_only=True)
class Checkpoints:
    """When checkpoints are written, and which are kept."""

    every: AnySpan | None = field(default_factory=lambda: Span(1, "epochs"))
    """Interval between checkpoints. null: only at the end, and by `lose_at_most`."""
    at_end: bool = True
    """Write a checkpoint after the last step."""
    keep_last: Count = 2
    """Number of most recent checkpoints to keep."""
    keep_best: Whole = 1
    """Number of best checkpoints to keep, by `best.metric`."""
    lose_at_most: AnySpan | None = field(default_factory=lambda: Span(10, "minutes"), metadata=_NOT_IN_HASH)
    """Most training time that a killed process loses, whatever `every` is; in the first minutes at most half of the
    time trained. null: off."""
    failing: Literal["continue", "stop"] = field(default="continue", metadata=_NOT_IN_HASH)
    """Action when a checkpoint cannot be written. `continue`: try again at the next one. `stop`: end the run. The final
    checkpoint must be written."""

    def __post_init__(self) -> None:
        if self.lose_at_most is not None and not self.lose_at_most.timed:
            raise ValueError(f"lose_at_most is {self.lose_at_most}; expected a time, such as 10 min")


@dataclass(kw_only=True)
class Profile:
    """A trace of some steps by torch.profiler."""

    at: Annotated[int, Field(ge=1, le=1000000000)]
    """First step of the trace; the few steps before it warm the profiler up."""
    steps: Annotated[int, Field(ge=1, le=200)] = 10
    """Number of steps to trace. Traces of more than 200 steps are too large to open."""


@dataclass(kw_only=True)
class Log:
    """Log lines, figures and artifacts, and their intervals."""

    every: AnySpan = field(default_factory=lambda: Span(50, "steps"))
    """Interval of loss, learning rate, gradient norm, throughput and time shares."""
    progress: AnySpan = field(default_factory=lambda: Span(2, "seconds"))
    """Interval of the progress line in a terminal. Without a terminal it is printed with `every`."""
    figures: AnySpan | None = None
    """Interval of figures during the training. null: only at the end; the final figures are always drawn."""
    system_every: AnySpan | None = field(default_factory=lambda: Span(10, "seconds"))
    """Sampling interval of CPU, memory and GPU use. null: off."""
    experiment: str | None = None
    """MLflow experiment. null: the recipe's name."""
    metrics: Literal["default", "all"] | list[str] = "default"
    """Metrics that go to MLflow. `default`: at most 40, those by which runs are compared. `all`: every metric. A list
    adds patterns to the default, such as `["val/iou.*", "device/*"]`, where `*` matches anything without a dot and `**`
    anything."""
    rows: bool = True
    """Keep the per-sample rows of the best and the final evaluation as parquet."""
    baseline: bool = True
    """Evaluate trivial baselines (majority class, 1-NN on pixels, mean label map, ...) after the training, once per
    data set."""
    ceilings: Literal["auto", "measure", "off"] = "auto"
    """Compare the throughput with that of loader and network alone. `auto`: as `trainkit preflight` measured them for
    this recipe and machine. `measure`: measure them before the training, which takes seconds."""
    profile: Profile | None = None
    """Trace of some steps, for chrome://tracing or ui.perfetto.dev, as an artifact of the run. null: none."""

    def __post_init__(self) -> None:
        if not self.progress.timed:
            raise ValueError(f"progress is '{self.progress}'; expected a time, such as 2 s")
        if self.system_every is not None and not self.system_every.timed:
            raise ValueError(f"system_every is '{self.system_every}'; expected a time, such as 10 s")
        wrong = [word for word in self.metrics if not re.fullmatch(r"[a-z0-9_./*-]+", word)]
        if isinstance(self.metrics, list) and wrong:
            found = f"metrics has {wrong[0]!r}, which cannot match a metric"
            raise ValueError(f"{found}; use a-z 0-9 _ . - / and * in patterns, such as val/iou.*")


@dataclass(kw_only=True)
class Integrity:
    """Checks of the data before a training: train/test leakage, odd and damaged samples."""

    policy: Literal["warn", "refuse", "off"] = "warn"
    """Action on a finding. `warn`: report it and train. `refuse`: end the run before it starts, where a score would be
    too good or a set is damaged. `off`: skip the checks."""


@dataclass(kw_only=True)
class Promote:
    """Assignment of a model registry alias when the run beats its holder: docs/how-to/promote.md."""

    name: str | None = None
    """Name of the registered model. null: the recipe's name."""
    alias: str = "champion"
    """Alias in the model registry that the better model gets."""

    def __post_init__(self) -> None:
        if self.name is not None and (not self.name.strip(" .") or set(self.name) & set("/:@'\"`\\")):
            raise ValueError(f"name is {self.name!r}; use a name without / : @ and quotes")
        if not re.fullmatch("[A-Za-z0-9_-]+", self.alias) or re.fullmatch("(?i)latest|v[0-9]+", self.alias):
            raise ValueError(f"alias is {self.alias!r}; use letters, digits, - and _, but not `latest` or `v1`")


@dataclass(kw_only=True)
class Recipe:
    """One experiment, complete in one file."""

    name: str
    """Name of the recipe: letters, digits, `-` and `_`. It begins the names of runs and is the default MLflow
    experiment."""
    seed: Annotated[int, Field(ge=0, le=(1 << 63) - 1)] = 0
    """Seed of weights, data order, augmentation and class centres."""
    task: Annotated[Task, Named("task", TABLES["task"])]
    """Training objective: network, losses and metrics. `name` selects the task."""
    data: Annotated[Data, Named("data", TABLES["data"])]
    """Training and evaluation data. `name` selects the kind of data."""
    optim: Optim
    """Optimizer, learning rate and gradient clipping."""
    train: Train
    """Length, batch, schedule and precision of the training."""
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    """Evaluations by name; each runs on a split of `data.evaluate`, by its schedule."""
    best: Best | None = None
    """Metric that selects the best checkpoint. null: no best checkpoint is kept."""
    stop_when: StopWhen | None = None
    """Early stopping. null: train for `train.length`."""
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    """When checkpoints are written, and which are kept."""
    integrity: Integrity = field(default_factory=Integrity, metadata=_NOT_IN_HASH)
    """Checks of the data before a training."""
    log: Log = field(default_factory=Log, metadata=_NOT_IN_HASH)
    """Log lines, figures and artifacts."""
    downloads: list[Download] = field(default_factory=list, metadata=_NOT_IN_HASH)
    """Files that `trainkit download` fetches."""
    promote: Promote | None = field(default=None, metadata=_NOT_IN_HASH)
    """Assignment of a model registry alias to a better model. null: none."""
    loader: Loader = field(default_factory=Loader, metadata=_NOT_IN_HASH)
    """Data loading: workers, prefetching and damaged samples."""
    limits: Limits = field(default_factory=Limits, metadata=_NOT_IN_HASH)
    """Timeouts after which a process is ended."""
    device: Device = field(default_factory=Device)
    """Switches of the hardware and of PyTorch's backends."""

    def rules(self) -> Iterator[tuple[tuple[str, ...], str, Best | StopWhen | Curve]]:
        """Yield the blocks that compare values of a metric: keys, metric, block."""
        for key, rule in (("best", self.best), ("stop_when", self.stop_when)):
            if rule is not None:
                yield (key,), rule.metric, rule
        if self.train.schedule.metric is not None:
            yield ("train", "schedule"), self.train.schedule.metric, self.train.schedule

    def _settle(self) -> None:
        """Set mode and direction of those blocks; a mode that one of them gives for a metric counts in the others."""
        declared, given = metric_table.declared_by(self.task), {}
        for _, metric, rule in self.rules():
            rule.mode, rule.lower = metric_table.settled(metric, rule.mode or given.get(metric), declared)
            given[metric] = rule.mode

    def __post_init__(self) -> None:
        if not self.name or not all(c.isascii() and (c.isalnum() or c in "_-") for c in self.name):
            raise ValueError(f"name is {self.name!r}; use letters, digits, - and _")
        for name in self.evaluations:
            # It begins the names of metrics, of which MLflow refuses others, and those of files.
            if not re.fullmatch("[a-z0-9_-]+", name):
                raise ValueError(f"evaluations has the name {name!r}; use lower-case letters, digits, - and _")
        # Imports numpy, as blocks of tasks and data do.
        from trainkit.interfaces import DividesClasses, DrawsBlocks

        if isinstance(self.task, DividesClasses) and self.task.head.sharded and self.optim.name.startswith("timm:"):
            found = f"optim.name is {self.optim.name} and task.head.sharded is true"
            raise ValueError(f"{found}; a divided head is trained by sgd, adam or adamw, which take each row alone")

        block = self.data.block if isinstance(self.data, DrawsBlocks) else 1
        # Of a size per process nobody knows yet how many processes share a block.
        rest = 0 if isinstance(self.train.batch_size, PerProcess) else self.train.batch_size % block
        if block > 1 and ((self.train.micro_batch or block) != block or rest):
            raise ValueError(
                f"micro_batch {self.train.micro_batch} and batch_size {self.train.batch_size} of train; data.sampler "
                f"draws P x K = {block} samples that belong together: take micro_batch {block} and a batch_size that "
                "is a multiple of it"
            )
        self._settle()
        named = self.named_metrics()
        for key, metric in named:
            evaluation, slash, _ = metric.partition("/")
            if not slash or evaluation not in self.evaluations:
                known = ", ".join(self.evaluations) or "none"
                raise ValueError(f"{key} is {metric!r}, but there is no such evaluation; expected one of: {known}")
            if "/ema/" in metric and self.train.ema is None:
                raise ValueError(f"{key} is a metric of EMA weights, but train.ema is not set; set it")
        watched = self.train.schedule.metric
        if watched and self.evaluations[name := watched.partition("/")[0]].every is None:
            raise ValueError(f"train.schedule.metric is {watched!r}, but evaluations.{name} has no `every`; set it")
        if self.promote is not None and self.best is None:
            raise ValueError("promote has no deciding metric; set best.metric")

    def named_metrics(self) -> list[tuple[str, str]]:
        """Return the keys that name a metric of an evaluation, each with its full name."""
        rules = {
            "best.metric": self.best,
            "stop_when.metric": self.stop_when,
            "train.schedule.metric": self.train.schedule,
        }
        return [(key, rule.metric) for key, rule in rules.items() if rule is not None and rule.metric]
