"""The dataclasses of a recipe: what the YAML may say, its types and its defaults. Each default lives here alone.

`task` and `data` are named blocks: their `name` is looked up in `TABLES`, and the class it names is the block.
"""

from __future__ import annotations

import importlib.machinery
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from trainkit.config.ranges import (
    MANY,
    BatchSize,
    Count,
    FractionAboveZero,
    FractionBelowOne,
    FractionBetween,
    NotNegative,
    Positive,
    Score,
    Whole,
)
from trainkit.config.units import AnySpan, Curve, PerProcess, Share, Span, TrainingSpan, UpdateSize, samples_per_update
from trainkit.config.validation import Named

if TYPE_CHECKING:
    from trainkit.interfaces import Data, Task
else:  # a recipe is read without torch, which the protocols import; `Named` alone validates the blocks
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
    """Parameters that are trained differently."""

    match: str
    """Pattern of parameter names with `*` and `?`; one that matches nothing is an error."""
    lr_scale: NotNegative = 1.0
    weight_decay: WeightDecay | None = None


@dataclass(kw_only=True)
class LrRule:
    """How the learning rate follows the batch: `lr` is meant for `batch_size` samples per update."""

    name: Literal["linear", "sqrt"]
    """In proportion to the samples per update (Goyal et al. 2017, arXiv 1706.02677), or to their square root."""
    batch_size: BatchSize = 256


@dataclass(kw_only=True)
class AdaptiveClip:
    """Clipping by units: the gradient of an output of a layer is held below a share of the length of its own weights.

    Adaptive gradient clipping (Brock et al., ICML 2021, arXiv 2102.06171).
    """

    factor: Positive = 0.01
    """Largest length of a unit's gradient, as a share of that of its weights."""
    eps: Positive = 1e-3
    """Weights are taken to be at least this long, so that what starts at zero can move."""
    leave_out: list[str] = field(default_factory=list)
    """Patterns of parameter names that are not clipped, such as the last layer of a classifier; one that matches
    nothing is an error."""


@dataclass(kw_only=True)
class Optim:
    """How the weights move."""

    name: str = "sgd"
    """`sgd`, `adam`, `adamw`, or `timm:NAME` for any of timm's."""
    lr: Annotated[float, Field(gt=0, le=1000)]
    lr_rule: LrRule | None = None
    """None: `lr` is what it says, whatever the batch."""
    momentum: FractionBelowOne = 0.9
    """For `sgd`."""
    nesterov: bool = False
    betas: tuple[FractionBelowOne, FractionBelowOne] = (0.9, 0.999)
    """For `adam` and `adamw`."""
    eps: FractionAboveZero = 1e-8
    weight_decay: WeightDecay = 0.0
    decay_1d: bool = True
    """Whether biases, norm weights and other one-dimensional parameters decay too."""
    clip_norm: Annotated[float, Field(gt=0, le=1e12)] | None = None
    """Largest norm of the whole gradient; the gradient is scaled down to it."""
    clip_agc: AdaptiveClip | None = None
    """Clipping by units in place of the whole gradient."""
    groups: list[Group] = field(default_factory=list)
    layer_decay: FractionAboveZero | None = None
    """Factor on the rate from each block to the one below it; the head has the full rate. For networks of timm."""
    fused: bool = True
    """One kernel for all parameters, where the optimizer has one."""

    def __post_init__(self) -> None:
        if self.clip_norm is not None and self.clip_agc is not None:
            raise ValueError("clip_norm and clip_agc are two ways to clip; give one")
        if not self.name.startswith("timm:") and self.name not in ("sgd", "adam", "adamw"):
            raise ValueError(f"no optimizer {self.name!r}; there are sgd, adam, adamw and timm:NAME")
        if self.name == "sgd" and self.nesterov and self.momentum == 0:
            raise ValueError("nesterov is true and momentum 0; Nesterov's step needs a momentum above 0, such as 0.9")


@dataclass(kw_only=True)
class Spikes:
    """Losses that jump up (PaLM, Chowdhery et al. 2022, arXiv 2204.02311)."""

    policy: Literal["warn", "rollback"] = "warn"
    """What one does: it is said, with an event; or the run goes back to a checkpoint from before, and leaves the
    updates around it out."""
    window: Annotated[int, Field(ge=16, le=MANY)] = 128
    """Updates whose losses are compared with; of fewer than 16 nobody knows how much they scatter."""
    deviations: Positive = 8.0
    """How many robust deviations above their median, of logarithms, is a spike."""
    leave_out: Count = 200
    """Updates that are left out, half of them before the spike."""


@dataclass(kw_only=True)
class Replay:
    """Updates that are computed twice, to find out whether the machine computes the same from the same."""

    every: TrainingSpan
    """Every so many updates one is: `1k steps` costs a thousandth of forward and backward."""
    policy: Literal["stop", "warn"] = "stop"
    """What a difference does: it ends the run, or is said, with an event and a tag."""


@dataclass(kw_only=True)
class Train:
    """How long, in which portions and in which arithmetic."""

    length: TrainingSpan
    """The whole training: `26 epochs`, `80k steps`."""
    batch_size: UpdateSize
    """Samples per update, over all processes; or, as `4 per process`, those of each: more processes then make another
    training, with larger updates, which `optim.lr_rule` can follow."""
    micro_batch: BatchSize | None = None
    """Samples per process and forward; accumulation follows from it. None: the whole share of a process at once."""
    schedule: Curve = field(default_factory=Curve)
    precision: Literal["auto", "no", "bf16", "fp16", "fp8"] = "auto"
    """`auto`: what the launcher says, else bf16 where the GPU has it, fp16 where not, float32 on a CPU."""
    compile: Literal["auto", "off", "default", "reduce-overhead", "max-autotune"] = field(
        default="auto", metadata={"hash": {"auto": "off"}}
    )
    """Mode of torch.compile. `auto`: `default` on a CUDA GPU where the training is long enough, else `off`."""
    activation_checkpointing: bool = field(default=False, metadata=_NOT_IN_HASH)
    """Keep the inputs of the network's blocks alone, and compute what is inside them again in the backward pass: less
    memory for more computation, a forward pass at most, and the same bits."""
    ema: FractionBetween | None = None
    """Decay of an exponential moving average of the weights, which is evaluated too; None: no average."""
    nonfinite: Literal["stop", "skip", "rollback"] = field(default="stop", metadata=_NOT_IN_HASH)
    """What a loss or gradient that is not finite does: end the run, leave that update out, or go back to the last
    checkpoint and leave it out."""
    on_oom: Literal["stop", "halve"] = field(default="stop", metadata=_NOT_IN_HASH)
    """What follows when memory runs out: the end of the run, or the same update or evaluation once more in portions of
    half the size, and so from there on. Batch norm then sees fewer samples at once, so it is not done unasked."""
    spikes: Spikes | None = field(default=None, metadata=_NOT_IN_HASH)
    """Whether losses that jump up are looked for; None: nobody looks."""
    replay: Replay | None = field(default=None, metadata=_NOT_IN_HASH)
    """Whether updates are computed twice now and then; None: none is. A GPU needs `device.deterministic`."""

    def __post_init__(self) -> None:
        one = samples_per_update(self.batch_size, 1)
        if self.micro_batch and one % self.micro_batch:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of micro_batch {self.micro_batch}")
        if isinstance(self.batch_size, int):
            self.schedule.refuse_short(self.length, None, self.batch_size)


@dataclass(kw_only=True)
class Device:
    """Switches of the machine."""

    tf32: bool = True
    """TensorFloat-32 matrix products and convolutions, on GPUs that have them."""
    cudnn_benchmark: bool = True
    channels_last: bool = True
    """Memory format of networks and images. On CPUs too: 1.3 to 1.6 times the rate for the face networks at 48 px."""
    expandable_segments: bool = True
    """The CUDA allocator grows its segments instead of splitting them."""
    deterministic: bool = False
    """Only kernels that repeat their bits. Needed for bit equality on a GPU; a CPU has it at equal threads."""
    threads: Annotated[int, Field(ge=1, le=512)] | None = None
    """CPU threads of each process. None: what the launcher set."""


@dataclass(kw_only=True)
class Loader:
    """How batches are read."""

    workers: Annotated[int, Field(ge=0, le=128)] = 0
    """Worker processes per training process; 0 reads in the process itself, by threads: best for what is packed. Those
    of torch's DataLoader where the system is not Linux."""
    start: Literal["fork", "spawn", "forkserver"] | None = None
    """How workers are started. None: the platform's way."""
    prefetch: Annotated[int, Field(ge=1, le=1024)] = 2
    """Batches each worker reads ahead; without workers, beside a GPU, a thread of the process."""
    pin: bool = True
    """Page-locked memory for batches on their way to a GPU, so that copies need not be waited for; of no use on a
    CPU."""
    damaged: Literal["fail", "replace"] = "fail"
    """What a training sample does that is damaged on the disk: end the run, or another one of its class, chosen by
    seed and row, is trained on in its place and the run says so. What is scored is never replaced, and files of up to
    64 MiB are refused when they are opened."""
    damaged_most: Share = 0.01
    """Share of the training set that a run may replace; more end it."""
    timeout: AnySpan = field(default_factory=lambda: Span(5, "minutes"))
    """Time after which a silent worker is replaced; of workers that are lost, the fourth ends the run."""

    def __post_init__(self) -> None:
        if not self.timeout.timed:
            raise ValueError(f"timeout is '{self.timeout}'; a time is needed, such as 5 min")


@dataclass(kw_only=True)
class Limits:
    """How long something may take before a process is ended for it."""

    hang: AnySpan | None = field(default_factory=lambda: Span(30, "minutes"))
    """Longest time in which a training does not move on, by a phase of an update or a batch of an evaluation: then it
    writes down what all its threads are at, and ends. Not before the first update has been made. null: no limit."""
    collective: AnySpan = field(default_factory=lambda: Span(10, "minutes"))
    """Longest time for which a process waits for another that gives no sign of life; one at work sends heartbeats."""
    stop: AnySpan = field(default_factory=lambda: Span(25, "seconds"))
    """Time from the first signal to stop, after which a training leaves although it has not saved. torch's launcher
    kills after 30 s."""

    def __post_init__(self) -> None:
        for name in ("hang", "collective", "stop"):
            if (span := getattr(self, name)) is not None and not span.timed:
                raise ValueError(f"{name} is '{span}'; a time is needed, such as 10 min")


@dataclass(kw_only=True)
class Evaluation:
    """One named evaluation: on which split, and when."""

    split: str | None = None
    """A word of `data.evaluate`; None: the evaluation's own name."""
    every: AnySpan | None = None
    at_start: bool = False
    at_end: bool = True
    budget: Share | None = None
    """Largest share of wall-clock that this evaluation may take; it is held less often when it is dear."""
    batch_size: BatchSize = 256
    """Samples per process and forward; whole volumes are read one by one, and cut into windows."""


@dataclass(kw_only=True)
class Best:
    """The metric by which the best checkpoint is chosen."""

    metric: str
    """Full name, such as `lfw/accuracy`; that of EMA weights (`val/ema/top1`) makes the run hand those on."""
    mode: Literal["max", "min"] = "max"


@dataclass(kw_only=True)
class Checkpoints:
    """When checkpoints are written and which are kept."""

    every: AnySpan | None = field(default_factory=lambda: Span(1, "epochs"))
    at_end: bool = True
    keep_last: Count = 2
    keep_best: Whole = 1
    lose_at_most: AnySpan | None = field(default_factory=lambda: Span(10, "minutes"), metadata=_NOT_IN_HASH)
    """Most time of training that a process which is killed takes with it, however far apart `every` is; in the first
    minutes of a process at most half of what it did, so that a run which is killed again and again gets on."""
    failing: Literal["continue", "stop"] = field(default="continue", metadata=_NOT_IN_HASH)
    """What one that cannot be written does: the training goes on and tries again at the next, or it ends. The one with
    which a run ends must be written either way."""

    def __post_init__(self) -> None:
        if self.lose_at_most is not None and not self.lose_at_most.timed:
            raise ValueError(f"lose_at_most is {self.lose_at_most}; a time is needed, such as 10 min")


@dataclass(kw_only=True)
class Profile:
    """The updates that torch.profiler traces."""

    at: Annotated[int, Field(ge=1, le=1000000000)]
    """Update with which the trace begins; the few before it warm the tracer up."""
    steps: Annotated[int, Field(ge=1, le=200)] = 10
    """How many are traced; a trace of more than 200 can hardly be opened."""


@dataclass(kw_only=True)
class Log:
    """Log lines, figures and artifacts, and how often they are made."""

    every: AnySpan = field(default_factory=lambda: Span(50, "steps"))
    """Loss, learning rate, gradient norm, speed and time shares."""
    progress: AnySpan = field(default_factory=lambda: Span(2, "seconds"))
    """How often the progress line is drawn in a terminal; without one it is printed with `every`."""
    figures: AnySpan | None = None
    """Figures while training; they are always drawn at the end."""
    system_every: AnySpan | None = field(default_factory=lambda: Span(10, "seconds"))
    """Sampling of CPU, memory and GPU use; null switches it off."""
    experiment: str | None = None
    """MLflow experiment; None: the recipe's name."""
    metrics: Literal["default", "all"] | list[str] = "default"
    """Metrics that go to MLflow: `default`, at most 40, by which runs are compared; `all`; or patterns of what goes
    there beside the default: `["val/iou.*", "device/*"]`, in which `*` is anything without a dot, `**` anything. The
    journal and the artifact `tables/metrics.csv` have all metrics in any case."""
    rows: bool = True
    """Keep the per-sample rows of the best and the final evaluation as parquet."""
    baseline: bool = True
    """Score trivial baselines (majority class, 1-NN on pixels, mean label map, ...) on the evaluation that decides,
    once for its data, in seconds, when the training is over."""
    ceilings: Literal["auto", "measure", "off"] = "auto"
    """Whether the loader and the network are timed alone before the training, in seconds: `auto` where they are not
    known for this recipe, machine and versions and the training has 500 updates or more; `measure` in any case."""
    profile: Profile | None = None
    """A trace of a few updates, for chrome://tracing or ui.perfetto.dev, among the run's artifacts."""

    def __post_init__(self) -> None:
        if not self.progress.timed:
            raise ValueError(f"progress is '{self.progress}'; a time is needed, such as 2 s")
        if self.system_every is not None and not self.system_every.timed:
            raise ValueError(f"system_every is '{self.system_every}'; a time is needed, such as 10 s")
        wrong = [word for word in self.metrics if not re.fullmatch(r"[a-z0-9_./*-]+", word)]
        if isinstance(self.metrics, list) and wrong:
            found = f"metrics has {wrong[0]!r}, which no metric can match"
            raise ValueError(f"{found}; a pattern is of a-z 0-9 _ . - / and *, such as val/iou.*")


@dataclass(kw_only=True)
class Integrity:
    """Checks of the data before a training: train/test leakage, odd and damaged samples."""

    policy: Literal["warn", "refuse", "off"] = "warn"
    """What is found is written down and said; or, where a score would be too good or a set is damaged, ends the run
    before it begins; or nothing is looked at. Beside it `data.leakage` refuses the same image or subject twice."""


@dataclass(kw_only=True)
class StopWhen:
    """Ends the training early when a metric no longer improves."""

    metric: str
    mode: Literal["max", "min"] = "max"
    patience: Count
    """Evaluations without an improvement before the training ends."""
    min_delta: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    """Smallest change that counts as one."""


ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
"""Ends of the names of files that can be unpacked."""


@dataclass(kw_only=True)
class Download:
    """A file that `trainkit download` brings; training itself never uses the network."""

    url: str
    """An https address."""
    sha256: str
    """Of the file, hexadecimal."""
    to: str
    """Where it goes, below the folder where relative paths of data begin; what is there is never replaced."""
    unpack: str | None = None
    """Folder there into which an archive is unpacked, without the one folder that it may hold at its top."""

    def __post_init__(self) -> None:
        if not self.url.startswith("https://"):
            raise ValueError(f"url is {self.url!r}; an https address is needed")
        if len(self.sha256) != 64 or set(self.sha256) - set("0123456789abcdef"):
            raise ValueError("sha256 must be 64 hexadecimal digits in lower case")
        # Whoever wrote the recipe chooses where on this machine a file of theirs is put: not in `~/.ssh`.
        for key, place in {"to": self.to, "unpack": self.unpack}.items():
            if place is not None and not is_plain_path(place):
                raise ValueError(
                    f"{key} is {place!r}; a plain path below the data is needed, without .. ~ or hidden names"
                )
        name = self.to.rpartition("/")[2]
        if "." not in name or is_code(name):
            raise ValueError(f"to is {self.to!r}; the name of a file of data is needed, such as teacher.pth")
        if self.unpack is not None and not self.to.lower().endswith(ARCHIVES):
            raise ValueError(f"unpack is given, and to is {self.to!r}; an archive is needed: {', '.join(ARCHIVES)}")


def is_plain_path(path: str) -> bool:
    """Return whether a path that somebody else chose stays below the folder where it begins, without hidden names."""
    return path == path.strip() and all(re.fullmatch(r"[\w][\w.+ ()-]*", part) for part in path.split("/"))


def is_code(name: str) -> bool:
    """Return whether Python or make would take a file of this name for code.

    Without TRAINKIT_DATA files are put where the command was started: where Python looks for modules, make for rules.
    """
    return name.lower().endswith((*importlib.machinery.all_suffixes(), ".pyd")) or name.lower().endswith("makefile")


@dataclass(kw_only=True)
class Promote:
    """Take an alias of MLflow's model registry when the run beats its holder: docs/how-to/promote.md."""

    name: str | None = None
    """Of the registered model; None: the recipe's name."""
    alias: str = "champion"
    metric: str | None = None
    """The score that decides, by its full name; None: that of `best`."""
    max_slower: FractionBelowOne | None = 0.1
    """Largest share by which the training may be slower than the holder's, in samples/s on the same hardware. None:
    it is not asked."""

    def __post_init__(self) -> None:
        if self.name is not None and (not self.name.strip(" .") or set(self.name) & set("/:@'\"`\\")):
            raise ValueError(f"name is {self.name!r}; a name without / : @ and quotes is needed")
        if not re.fullmatch("[A-Za-z0-9_-]+", self.alias) or re.fullmatch("(?i)latest|v[0-9]+", self.alias):
            raise ValueError(f"alias is {self.alias!r}; letters, digits, - and _ are allowed, but not `latest` or `v1`")


TIME_TO = "time_to/"
"""Begins the names of metrics that hold the time to a score."""


@dataclass(kw_only=True)
class Targets:
    """Values of a metric; the wall-clock until each is first reached is measured.

    The time to a quality makes a training fast, and not samples a second alone (DAWNBench, Coleman et al., NIPS ML
    Systems Workshop 2017; MLPerf Training, Mattson et al., MLSys 2020, arXiv 1910.01500).
    """

    at: list[Score]
    mode: Literal["max", "min"] = "max"
    """`min`: the metric comes from above, as an error rate does."""

    def __post_init__(self) -> None:
        if not self.at:
            raise ValueError("at is empty; give a value to be reached, such as [0.9]")
        texts = [_number_in_name(value) for value in self.at]
        twice = [text for n, text in enumerate(texts) if text in texts[:n]]
        if twice:
            raise ValueError(f"{twice[0]} is given twice; keep one of them")


def targets_with_modes(
    asked: Mapping[str, list[float] | Targets], rules: Iterable[Best | StopWhen | None]
) -> dict[str, Targets]:
    """Make `Targets` of lists of values, with the mode of the rule for the same metric, `max` without one.

    Raises ValueError for a list that is empty or holds a value twice.
    """
    modes: dict[str, Literal["max", "min"]] = {rule.metric: rule.mode for rule in rules if rule is not None}
    found = {}
    for metric, values in asked.items():
        try:
            found[metric] = values if isinstance(values, Targets) else Targets(at=values, mode=modes.get(metric, "max"))
        except ValueError as mistake:
            raise ValueError(f"time_to of {metric}: {mistake}") from None
    return found


def targets_reached(
    asked: Mapping[str, list[float] | Targets], metrics: Mapping[str, float], seconds: float
) -> dict[str, float]:
    """Return `seconds` under the name of each target that these metrics reach: `time_to/lfw/accuracy_0.9`."""
    return {
        f"{TIME_TO}{metric}_{_number_in_name(value)}": seconds
        for metric, targets in asked.items()
        if metric in metrics and isinstance(targets, Targets)  # lists became such with the recipe
        for value in targets.at
        if (metrics[metric] >= value if targets.mode == "max" else metrics[metric] <= value)
    }


def _number_in_name(value: float) -> str:
    return f"{value:.10g}".replace("+", "")  # MLflow takes no plus sign in the name of a metric


@dataclass(kw_only=True)
class Recipe:
    """One experiment, complete in itself."""

    name: str
    seed: Annotated[int, Field(ge=0, le=(1 << 63) - 1)] = 0
    task: Annotated[Task, Named("task", TABLES["task"])]
    data: Annotated[Data, Named("data", TABLES["data"])]
    optim: Optim
    train: Train
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    best: Best | None = None
    stop_when: StopWhen | None = None
    time_to: dict[str, list[Score] | Targets] = field(default_factory=dict, metadata=_NOT_IN_HASH)
    """Metrics, and values of each whose first reaching is timed: `{lfw/accuracy: [0.9, 0.95]}`. More is better, unless
    `best` or `stop_when` of that metric says otherwise, or the entry does: `{lfw/eer: {at: [0.05], mode: min}}`."""
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    integrity: Integrity = field(default_factory=Integrity, metadata=_NOT_IN_HASH)
    log: Log = field(default_factory=Log, metadata=_NOT_IN_HASH)
    downloads: list[Download] = field(default_factory=list, metadata=_NOT_IN_HASH)
    promote: Promote | None = field(default=None, metadata=_NOT_IN_HASH)
    loader: Loader = field(default_factory=Loader, metadata=_NOT_IN_HASH)
    limits: Limits = field(default_factory=Limits, metadata=_NOT_IN_HASH)
    device: Device = field(default_factory=Device)

    def __post_init__(self) -> None:
        if not self.name or not all(c.isascii() and (c.isalnum() or c in "_-") for c in self.name):
            raise ValueError(f"name is {self.name!r}; letters, digits, - and _ are allowed")
        for name in self.evaluations:
            # It begins the names of metrics, of which MLflow refuses others, and those of files.
            if not re.fullmatch("[a-z0-9_-]+", name):
                raise ValueError(f"evaluations has the name {name!r}; small letters, digits, - and _ are allowed")
        from trainkit.interfaces import (  # imports torch, as blocks of tasks and data do
            CountsViews,
            DrawsBlocks,
            TrainsOnFeatures,
        )

        if isinstance(self.task, TrainsOnFeatures) and self.task.cached_features:
            if not isinstance(self.data, CountsViews):
                raise ValueError("data is of another kind; task.net.frozen needs that of images or faces")
            if not self.data.views:
                raise ValueError(
                    "data.augment changes images beyond mirroring, and task.net.frozen computes the features of each "
                    "once: take {name: none} or {name: light, flip: 0.5}, or leave frozen out"
                )
        block = self.data.block if isinstance(self.data, DrawsBlocks) else 1
        # Of a size per process nobody knows yet how many processes share a block.
        rest = 0 if isinstance(self.train.batch_size, PerProcess) else self.train.batch_size % block
        if block > 1 and ((self.train.micro_batch or block) != block or rest):
            raise ValueError(
                f"micro_batch {self.train.micro_batch} and batch_size {self.train.batch_size} of train; data.sampler "
                f"draws P x K = {block} samples that belong together: take micro_batch {block} and a batch_size that "
                "is a multiple of it"
            )
        rules = {"best.metric": self.best, "stop_when.metric": self.stop_when}
        self.time_to = dict(targets_with_modes(self.time_to, rules.values()))
        named = [(key, rule.metric) for key, rule in rules.items() if rule is not None]
        watched = self.train.schedule.metric
        named += [("train.schedule.metric", watched)] if watched else []
        named += [("time_to", metric) for metric in self.time_to]
        named += [("promote.metric", self.promote.metric)] if self.promote and self.promote.metric else []
        for key, metric in named:
            evaluation, slash, _ = metric.partition("/")
            if not slash or evaluation not in self.evaluations:
                known = ", ".join(self.evaluations) or "none"
                raise ValueError(f"{key} is {metric!r}, of no evaluation here; there are: {known}")
        if watched and self.evaluations[name := watched.partition("/")[0]].every is None:
            raise ValueError(f"train.schedule.metric is {watched!r}, and evaluations.{name} has no `every`; set it")
        for key, metric in named:
            if "/ema/" in metric and self.train.ema is None:
                raise ValueError(f"{key} is of EMA weights, and train.ema is not set")
        if self.promote is not None:
            metrics = {key.partition(".")[0]: metric for key, metric in named}
            chosen = {key: metrics[key].rpartition("/")[0] for key in ("best", "promote") if key in metrics}
            if not chosen:
                raise ValueError("promote has no score to decide by: name one in promote.metric, or in best.metric")
            if len(set(chosen.values())) > 1:
                both = f"promote.metric is {metrics['promote']!r} and best.metric {metrics['best']!r}"
                raise ValueError(f"{both}; what is promoted are the weights that best chose, so take a score of those")
            if "best" not in chosen and chosen["promote"].endswith("/ema"):
                raise ValueError("promote.metric is of EMA weights, which are promoted where best.metric is too")
