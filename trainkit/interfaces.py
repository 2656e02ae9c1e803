"""The protocols between the loop and everything it knows nothing about, and the vocabulary of batches.

`Task`, `Data` and `Split` have what every one needs. What only some have is a protocol of its own, asked for by
`isinstance`: `NormalisesBatch`, `ComparesSamples`, `CachesTeacher`, `TrainsOnFeatures`, `Exportable`, `HasBaselines`,
`LabelsVolumes` and `LabelsImages` of tasks; `NamesTrainingSet`, `NamesEvaluationSets`, `CountsViews`, `ChecksLeakage`,
`DividesIntoFolds`, `DrawsBlocks` and `CachesSamples` of data; `ThreadSafeFetch`, `DividesBlocks`,
`LabelsWithoutImages`, `ComparableSplit`, `IdentifiesContent` and `ImageSplit` of splits. One that lacks them works
without.

Batch keys, the same for every recipe (a batch is a dict of tensors whose first dimension is the sample):

| key       | dtype, shape            | meaning                                                                  |
|-----------|-------------------------|--------------------------------------------------------------------------|
| `image`   | uint8 or float, B C H W | the image; `Split.on_device` turns it into what the network takes      |
| `label`   | int64, B                | class of the sample, 0 .. classes-1; -1 where it has none                |
| `index`   | int64, B                | row of the sample in its split; -1 marks padding of a last ragged batch  |
| `view`    | int64, B                | which augmented version of the sample this is (faces: 0 plain, 1 mirror) |
| `mask`    | uint8, B D H W or B H W | class of every voxel (`image` is then float, B C D H W) or pixel; `IGNORED` |
|           |                         | where a pixel has none                                                   |
| `distance` | float32, B H W         | pixels from each pixel to the nearest boundary between classes           |
| `spacing` | float64, B 3            | mm from voxel to voxel of `mask`, where a whole volume is to be scored   |
| `mirrors` | bool, B 3 or B 2        | spatial axes over whose mirror images a prediction is averaged           |
| `scales`  | float32, B S            | factors on the size of an image at which predictions are averaged       |
| `window`  | int64, B 2              | height and width of the windows an image is seen through; 0: as a whole |
| `modality` | int64, B              | kind of record of a sample: its place in `MODALITIES`                    |
| `image.M` | as `image`              | in place of `image`, the images of modality M: b <= B of them          |
| `text`    | int64, b L              | token ids of the samples that are captions, 0 where there is none        |
| `queries` | int64, Q 5              | rows that ask for a person together, one a modality; -1: not with this   |

Samples of several modalities are in the order of these: `image.rgb`, `image.nir`, ... and `text`, one after another,
are the rows of the batch. `queries` come with training batches alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from torch import Tensor, nn

from trainkit.errors import hint_renamed

IGNORED = 255
"""In a `mask` of pixels: not labelled, and neither learned from nor scored. Classes are 0 .. 254."""

T = TypeVar("T")
Batch = dict[str, Tensor]
Rows = dict[str, Tensor]
Columns = dict[str, Any]
"""Arrays or lists by name: the columns of a table, or what a figure is drawn of."""


@dataclass(frozen=True)
class DatasetInfo:
    """Properties of a data set that a task may know."""

    classes: int
    """Number of classes in the training split."""
    shape: tuple[int, ...]
    """Channels, height and width of one image after `Split.on_device`; of volumes channels, depth, height, width."""
    digest: str
    """SHA-256 of the content, hexadecimal; equal digests mean equal data."""
    class_names: tuple[str, ...] = ()
    spacing: tuple[float, ...] = ()
    """mm from voxel to voxel along depth, height and width, in the median; empty for images."""
    axes: str = ""
    """Directions of depth, height and width in the body: `yzx` for coronal slices; empty for images."""
    resampled: tuple[float, ...] = ()
    """mm from voxel to voxel to which all volumes were resampled; empty where they are as in their files."""
    modalities: tuple[str, ...] = ()
    """Kinds of records, in the order of `MODALITIES`; empty where there is but one."""
    vocabulary: int = 0
    """Token ids that `text` may hold, 0 among them; 0 without text. The highest ends a caption."""
    text_length: int = 0
    """Tokens of a caption, padding included."""
    class_colours: tuple[tuple[int, int, int], ...] = ()
    """Red, green and blue of each class in label maps; empty where the data has no colours of its own."""
    distances: bool = False
    """True where training batches have `distance`."""
    channels: tuple[str, ...] = ()
    """Names of the channels of volumes, in order; empty where there is but one."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where weights come from: a file, a logged model `models:/ID`, a run `run:NAME`, or a recipe to train."""

    weights: str | None = None
    recipe: str | None = None


class RowOrder(Protocol):
    """Rows of one epoch, int64 (updates, batch_size): an array, or what computes parts of one when asked for them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Updates, and rows of each."""
        ...

    def __getitem__(self, key: tuple[int, slice], /) -> np.ndarray: ...


class Split(Protocol):
    """A set of samples to train on or to evaluate on."""

    name: str
    size: int
    """Number of samples; of a training split whose epoch is drawn, how many an epoch draws."""
    digest: str
    views: int
    """How many augmented versions a sample has, numbered by `view`; 0 when they cannot be numbered."""
    protocol: object
    """How an evaluation is scored: pairs, templates, query and gallery; None for a training split."""
    at_once: int | None
    """Most samples of an evaluation that are read at once, whatever the recipe says: 1 for whole volumes."""

    def order(self, epoch: int, batch_size: int) -> RowOrder:
        """Sample rows of one epoch in training order, int64, (updates, batch_size), the same on every rank.

        Only `order[update, first:last]` is asked, so what computes its rows when they are asked for will do. A pure
        function of its arguments and the seed. The loop cuts each row into micro-batches and ranks, so a recipe means
        the same on any number of processes, and resuming or skipping costs nothing.
        """
        ...

    def fetch(self, indices: np.ndarray, epoch: int, view: int | None = None) -> Batch:
        """Read the samples at `indices` as host tensors, with `index` and `view` among the keys.

        `view` asks for one version of each sample; None leaves the choice to the epoch.
        """
        ...

    def on_device(self, batch: Batch) -> Batch:
        """Finish a batch where it lives: normalise, augment."""
        ...


@runtime_checkable
class ThreadSafeFetch(Protocol):
    """A split that says whether any thread may call `fetch`; of others only the thread that trains may."""

    @property
    def any_thread(self) -> bool:
        """True where `fetch` draws from no generator of the process."""
        ...


@runtime_checkable
class DividesBlocks(Protocol):
    """A training split whose blocks of samples several processes can share."""

    def divide(self, rows: np.ndarray, number: int, parts: int) -> np.ndarray:
        """Indices with which `fetch` reads one of equal `parts` of the block `rows`, drawing for it as for the whole.

        Samples that belong together are in one part, as far as it has room for them.
        """
        ...


@runtime_checkable
class LabelsWithoutImages(Protocol):
    """A split that gives labels without reading images."""

    def fetch_labels(self, indices: np.ndarray, epoch: int, view: int | None = None) -> Batch:
        """Read what `fetch` does of these samples, with `label`, `index` and `view`, and without `image`."""
        ...


@runtime_checkable
class ComparableSplit(Protocol):
    """A split that can be searched for samples and people that another split has too."""

    name: str
    digest: str

    def held(self) -> Any:  # a `Held` of a layer above
        """The `trainkit.data.leakage.Held` of its samples: prints of their content, subjects, names."""
        ...


@runtime_checkable
class IdentifiesContent(Protocol):
    """A split that says what it holds, however it is prepared; two with equal `content` are evaluated on the same."""

    @property
    def content(self) -> str | None:
        """SHA-256 of files, labels, groups and pairs before they were prepared; None where it is not known."""
        ...


@runtime_checkable
class ImageSplit(Protocol):
    """A split whose images can be shown."""

    def picture(self, row: int) -> np.ndarray | None:
        """Pixels of a sample as people see them, uint8 (height, width, 3); None where it is no image."""
        ...


@dataclass(frozen=True)
class Dataset:
    """A data set whose files have been found and checked."""

    meta: DatasetInfo
    train: Split
    evaluations: Mapping[str, Split]
    notes: tuple[str, ...] = ()
    """Sentences about what was decided when it was opened, said with the plan."""
    block: int = 1
    """Samples that a micro-batch is made of and that must not be parted: P x K of people; 1 where any may meet."""
    part: int = 0
    """Samples of a block that stay on one process where processes share one, their split a `DividesBlocks`: the K of a
    person; 0: a block is not shared."""


@runtime_checkable
class Data(Protocol):
    """A data set. An implementation is a dataclass whose fields are the YAML block."""

    def open(self, seed: int) -> Dataset:
        """Find and check the files. Raises UserError naming file and row."""
        ...

    def missing(self) -> list[str]:
        """Sentences about files that are not there yet, for `--check`; empty when all is there."""
        ...


@runtime_checkable
class NamesTrainingSet(Protocol):
    """Data whose training set is named by the recipe."""

    @property
    def train(self) -> str:
        """A path, a set of the hub, or a built-in one."""
        ...


@runtime_checkable
class NamesEvaluationSets(Protocol):
    """Data whose evaluation sets are named by the recipe."""

    @property
    def evaluate(self) -> Mapping[str, str]:
        """By the name of the split, what `NamesTrainingSet.train` may be, or `held_out`."""
        ...


@runtime_checkable
class CountsViews(Protocol):
    """Data that knows from its recipe how many versions of a training sample its augmentation makes."""

    @property
    def views(self) -> int:
        """As `Split.views` of the training split: 0 when they cannot be numbered."""
        ...


@runtime_checkable
class ChecksLeakage(Protocol):
    """Data that refuses evaluation sets with samples of the training set, unless it is told to allow them."""

    leakage: Literal["refuse", "allow"]


@runtime_checkable
class DividesIntoFolds(Protocol):
    """Data that can be divided for cross-validation."""

    folds: int
    fold: int | None
    """The one that is evaluated and not trained on; None: none is."""


@runtime_checkable
class DrawsBlocks(Protocol):
    """Data that draws samples which must be in one micro-batch."""

    @property
    def block(self) -> int:
        """As `Dataset.block`."""
        ...


@runtime_checkable
class CachesSamples(Protocol):
    """Data that says where samples are kept once they are read: `cache` of its block is one of several words."""

    @property
    def cache(self) -> str:
        """The word of the recipe."""
        ...


@dataclass
class Networks:
    """The three kinds of state a task is made of."""

    model: nn.Module
    """Gets gradients: wrapped, compiled, averaged (EMA), called only through forward."""
    frozen: dict[str, nn.Module] = field(default_factory=dict)
    """Placed on the device and nothing else: never wrapped, never saved. All are scored on the first evaluation
    before step 1."""
    trusted: tuple[str, ...] = ()
    """Names in `frozen` that training leans on: one that does not beat chance ends the run."""
    cached: dict[str, nn.Module] = field(default_factory=dict)
    """Frozen networks whose output over the training split is computed once, ahead, for every sample and view; each
    batch then carries the outputs of its samples under the same key, in float32."""
    memory: nn.Module | None = None
    """State that moves without gradients (class centres, norm statistics): saved, and equal on all ranks."""
    notes: tuple[str, ...] = ()
    """Sentences about what was built, said with the plan."""
    indivisible: str = ""
    """Why a micro-batch must not become several: what of the loss is over all of its samples, after "and"; empty where
    the loss is a sum over samples."""
    in_parts: bool = False
    """The loss calls the network through `StepContext.forward`: where memory runs out, the loss still sees the whole
    micro-batch, whose forward and backward pass through the network are made in parts."""
    cache_on_disk: bool = False
    """Keep outputs of `cached` in the store, in half precision, however few they are."""
    cached_alone: bool = False
    """The loss reads labels and the outputs of `cached`, and no image: training batches come without."""
    cached_in_evaluation: bool = False
    """So does `predict`, of batches that have them: for evaluations in a training they are computed once too."""

    def __getattr__(self, name: str) -> Any:
        """Read a field by the name that it had in 0.1."""
        if name not in _OLD_FIELDS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        hint_renamed(f"Networks.{name}", _OLD_FIELDS[name])
        return getattr(self, _OLD_FIELDS[name])


@dataclass(frozen=True)
class StepContext:
    """Where in the training a micro-batch stands, and what its loss may use of the other processes."""

    step: int
    epoch: int
    progress: float
    """Share of the training that is behind, 0 to 1."""
    gather: Callable[..., Tensor]
    """`gather(x, grad=False)`: (b, ...) on each rank -> (world*b, ...) on every rank, in rank order, without gradient.
    With `grad=True` the rows of a rank get the sum of the gradients that the losses of all ranks send them, so ranks
    that each compute one loss of all rows, and weigh it by their own share, train as one process would."""
    autocast: Callable[[], AbstractContextManager]
    """The run's mixed precision, for forwards of frozen networks."""
    rank: int = 0
    """Number of this process: of what `gather` returns, its rows begin at rank * b."""
    in_parts: Callable[[Callable[[slice], Any], int], Any] | None = None
    """Where memory ran out before: `in_parts(compute, count)` is compute(slice(0, count)), made of a few rows at a
    time, and of each such part again in the backward pass, with the same random numbers. None: of all at once."""

    def forward(self, net: Callable[..., T], *inputs: Any) -> T:
        """Return `net(*inputs)` of a micro-batch; where memory ran out before, made in parts.

        The first dimension of each tensor among the inputs, and of each that `net` returns, alone or in a dict, list or
        tuple, is the sample.
        """
        if self.in_parts is None:
            return net(*inputs)
        count = next(len(x) for x in inputs if isinstance(x, Tensor))
        return self.in_parts(lambda rows: net(*(x[rows] if isinstance(x, Tensor) else x for x in inputs)), count)

    def recompute(self, loss: Callable[..., T], *inputs: Any) -> T:
        """Return `loss(*inputs)`; where memory ran out before, it is computed again in the backward pass."""
        return loss(*inputs) if self.in_parts is None else self.in_parts(lambda _: loss(*inputs), 1)


@dataclass
class Loss:
    """Loss of a micro-batch: the sum over samples, its divisor, and scalars to log."""

    sum: Tensor
    weight: float | Tensor
    """Divisor of the sum: the number of samples; as a tensor, of pixels or whatever else may differ by rank."""
    logs: dict[str, Tensor] = field(default_factory=dict)
    """Means over the micro-batch, detached, kept on the device; the same keys on every rank. A key that only some
    batches have is written down as the mean over those."""


@dataclass
class Scores:
    """The outcome of one evaluation."""

    metrics: dict[str, float]
    """Name without the split (`accuracy`) to value."""
    rows: Columns = field(default_factory=dict)
    """Columns of the per-sample table kept as parquet: id, group, prediction or score."""
    curves: Columns = field(default_factory=dict)
    """Arrays for figures, by kind (`roc`: {"far": ..., "tar": ...})."""
    chance: dict[str, float] = field(default_factory=dict)
    """For some metrics, the score that guessing stays below in 999 of 1,000 cases."""
    samples: int = 0
    """How many samples were scored; the loop counts them."""
    tables: dict[str, Columns] = field(default_factory=dict)
    """Tables that are not per sample, by name: column to values (`per_class`: {"class": ..., "f1": ...})."""
    pictures: dict[str, Columns] = field(default_factory=dict)
    """Arrays for images that are kept for every step at which they were made, by kind (`tsne`: {"points": ...})."""


class Task(Protocol):
    """Networks, losses and scores. An implementation is a dataclass whose fields are the YAML block."""

    def required_weights(self) -> dict[str, Source]:
        """Weights that must exist before `build`, by name."""
        ...

    def build(self, meta: DatasetInfo, found: Mapping[str, Path], seed: int) -> Networks:
        """Make the networks. `found` holds a file for each of `required_weights`, or nothing, where one that is trained
        already is put together again. Raises UserError when weights do not fit."""
        ...

    def loss(self, net: nn.Module, networks: Networks, batch: Batch, at: StepContext) -> Loss:
        """Loss of one micro-batch. Calls `net(...)`, never `net.forward(...)`."""
        ...

    def predict(self, net: nn.Module, batch: Batch) -> Rows:
        """One row per sample of the batch, in its order; `net` is `networks.model`, its EMA, or a frozen network."""
        ...

    def score(self, rows: Rows, split: Split) -> Scores:
        """Score a whole evaluation set from the rows of all its samples, each exactly once, ordered by index."""
        ...


@runtime_checkable
class NormalisesBatch(Protocol):
    """A task that says what its batch norms see; of others nothing is known, and nothing refused."""

    @property
    def batch_norm(self) -> Literal["batch", "sync"] | None:
        """Samples that are normalised together: of a process's micro-batch, of all processes'; None: each alone."""
        ...

    @property
    def batch_norm_least(self) -> int:
        """Least number of samples that must be normalised together; 1 before `build`."""
        ...


@runtime_checkable
class ComparesSamples(Protocol):
    """A task that says what its loss compares: only where they are those of all may processes share a block."""

    gather: Literal["all", "local"]


@runtime_checkable
class CachesTeacher(Protocol):
    """A task that can have the outputs of its teacher computed once."""

    @property
    def cache_teacher(self) -> bool | Literal["disk"]:
        """The setting of the recipe; `disk`: they are stored, however few they are."""
        ...


@runtime_checkable
class TrainsOnFeatures(Protocol):
    """A task that can train on features of a frozen network, computed once, in place of images."""

    @property
    def cached_features(self) -> bool:
        """True where its recipe says so."""
        ...


@runtime_checkable
class Exportable(Protocol):
    """A task whose network can be exported with its preprocessing in it."""

    def deployable(self, net: nn.Module, mean: Sequence[float], std: Sequence[float]) -> nn.Module:
        """Module from RGB pixels 0 .. 255, float (B, 3, H, W), to class scores (B, classes, H, W).

        `build` has been called; `mean` and `std` are those of the data, of pixels 0 to 1.
        """
        ...


@dataclass(frozen=True)
class Baseline:
    """A prediction that needs no training, scored as those of networks are."""

    name: str
    """What it predicts by: `1-NN on pixels`."""
    fit: Callable[[Iterator[Batch]], Callable[[Batch], Rows]]
    """Learn from training samples, without augmentation and in random order, as many as there is time for, and return
    what stands in for `Task.predict`. Batches are on the CPU."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Those of the task on which its scores depend, as JSON has them."""
    sees: Literal["prepared", "fetched", "index"] = "prepared"
    """Of a sample: what networks do, `Split.on_device` applied; what `Split.fetch` returns; or its `index` alone, so
    that nothing has to be read."""
    lacks: tuple[str, ...] = ()
    """Metrics that say nothing of it."""


@runtime_checkable
class HasBaselines(Protocol):
    """A task that says which predictions a trained network must beat."""

    def baselines(self, split: Split, train: Split | None) -> Sequence[Baseline]:
        """Return the trivial baselines of an evaluation set, none where nothing is known; `build` has been called.

        `train` is the training set as it would be scored, without augmentation; None where the data offers none.
        """
        ...


@runtime_checkable
class LabelsVolumes(Protocol):
    """A task that gives every voxel of a whole volume a class."""

    def label_map(
        self, net: nn.Module, image: Tensor, shape: Sequence[int], mirrors: Sequence[bool] = (False, False, False)
    ) -> Tensor:
        """Classes, uint8 (D0, H0, W0), on the grid of `shape`, of one prepared volume (1, 1, D, H, W)."""
        ...


@runtime_checkable
class LabelsImages(Protocol):
    """A task that gives every pixel of an image a class."""

    def probabilities(
        self,
        net: nn.Module,
        image: Tensor,
        scales: Sequence[float] = (1.0,),
        mirrors: Sequence[bool] = (False, False),
        window: Sequence[int] = (0, 0),
        size: Sequence[int] | None = None,
    ) -> Tensor:
        """Class probabilities, float32 (B, classes, h, w), of normalised images (B, 3, H, W).

        `size` is h and w; None: those of the images.
        """
        ...


MODALITIES = ("rgb", "nir", "cp", "sk", "text")
"""Colour, near infrared, colour pencil, sketch, caption. A record's `modality` is a place in this list; captions are
last, so that records in the order of their modalities begin with the images."""


RGB, NIR, CP, SK, TEXT = range(len(MODALITIES))


# ---- Names of 0.1, for plug-ins; they go with 1.0

_OLD_CLASSES = {"Meta": "DatasetInfo", "Opened": "Dataset", "Parts": "Networks", "At": "StepContext"}
_OLD_FIELDS = {
    "learns": "model",
    "tabulated": "cached",
    "remembers": "memory",
    "together": "indivisible",
    "stored": "cache_on_disk",
}


def _old_parts(*values: Any, **fields: Any) -> Networks:
    """Make `Networks` from the fields of 0.1's `Parts`."""
    return Networks(*values, **{_OLD_FIELDS.get(name, name): value for name, value in fields.items()})


def __getattr__(name: str) -> Any:
    if name not in _OLD_CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    hint_renamed(f"trainkit.interfaces.{name}", _OLD_CLASSES[name])
    return _old_parts if name == "Parts" else globals()[_OLD_CLASSES[name]]


def with_current_methods(cls: Any) -> Any:
    """Give a task class of 0.1, which has `needs`, its present method `required_weights`."""
    if hasattr(cls, "needs") and not hasattr(cls, "required_weights"):
        hint_renamed(f"{cls.__name__}.needs", "required_weights")
        cls.required_weights = cls.needs
    return cls
