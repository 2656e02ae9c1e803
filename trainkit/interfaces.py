"""The protocols between the training loop and tasks, data and splits, and the keys of batches.

`Task`, `Data` and `Split` have the required methods. Optional features of each are protocols of their own below, which
are checked by `isinstance`.

Batch keys, the same for every recipe (a batch is a dict of tensors whose first dimension is the sample):

| key       | dtype, shape            | meaning                                                                  |
|-----------|-------------------------|--------------------------------------------------------------------------|
| `image`   | uint8 or float, B C H W | the image; `Split.on_device` turns it into the network's input         |
| `label`   | int64, B                | class of the sample, 0 .. classes-1; -1 without a class                  |
| `index`   | int64, B                | row of the sample in its split; -1 marks padding of a last ragged batch  |
| `view`    | int64, B                | which augmented version of the sample this is (faces: 0 plain, 1 mirror) |
| `mask`    | uint8, B D H W or B H W | class of every voxel (`image` is then float, B C D H W) or pixel; `IGNORED` |
|           |                         | for a pixel without a class                                              |
| `distance` | float32, B H W         | pixels from each pixel to the nearest boundary between classes           |
| `spacing` | float64, B 3            | mm between voxels of `mask`, if whole volumes are evaluated              |
| `mirrors` | bool, B 3 or B 2        | spatial axes along which predictions are averaged over mirror images     |
| `scales`  | float32, B S            | scales of the image over which predictions are averaged                 |
| `window`  | int64, B 2              | height and width of sliding windows; 0: the whole image                 |
| `modality` | int64, B              | modality of a sample: its index in `MODALITIES`                          |
| `image.M` | as `image`              | instead of `image`, the images of modality M: b <= B of them           |
| `text`    | int64, b L              | token ids of the samples that are captions, 0 for padding                |
| `queries` | int64, Q 5              | rows of a query, one per modality; -1: none of this modality             |

Samples of several modalities are ordered by modality: `image.rgb`, `image.nir`, ... and `text`, one after another, are
the rows of the batch. Only training batches have `queries`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np

from trainkit.tensors import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

IGNORED = 255
"""Value of unlabelled pixels in a `mask`; they count in no loss and no metric. Classes are 0 .. 254."""

T = TypeVar("T")
Batch = dict[str, "Tensor"]
Rows = dict[str, "Tensor"]
Columns = dict[str, Any]
"""Arrays or lists by name: the columns of a table, or the data of a figure."""


@dataclass(frozen=True)
class DatasetInfo:
    """Properties of a data set that a task may use."""

    classes: int
    """Number of classes in the training split."""
    shape: tuple[int, ...]
    """Channels, height and width of an image after `Split.on_device`; for volumes channels, depth, height, width."""
    digest: str
    """SHA-256 of the content, hexadecimal; equal digests mean equal data."""
    class_names: tuple[str, ...] = ()
    spacing: tuple[float, ...] = ()
    """Median spacing in mm along depth, height and width; empty for images."""
    axes: str = ""
    """Directions of depth, height and width in the body: `yzx` for coronal slices; empty for images."""
    resampled: tuple[float, ...] = ()
    """Spacing in mm to which all volumes were resampled; empty without resampling."""
    modalities: tuple[str, ...] = ()
    """Modalities of the data, in the order of `MODALITIES`; empty if there is only one kind of image."""
    vocabulary: int = 0
    """Number of token ids in `text`, including 0; 0 without text. The highest id ends a caption."""
    text_length: int = 0
    """Tokens of a caption, padding included."""
    class_colours: tuple[tuple[int, int, int], ...] = ()
    """Red, green and blue of each class in label maps; empty if the data defines no colours."""
    distances: bool = False
    """True if training batches have `distance`."""
    channels: tuple[str, ...] = ()
    """Names of the channels of volumes, in order; empty for a single channel."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Source of weights: a file, a logged model `models:/ID`, a run `run:NAME`, or a recipe to train first."""

    weights: str | None = None
    recipe: str | None = None


class RowOrder(Protocol):
    """Rows of one epoch, int64 (steps, batch_size): an array, or an object that computes parts on access."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of steps, and rows per step."""
        ...

    def __getitem__(self, key: tuple[int, slice], /) -> np.ndarray: ...


class Split(Protocol):
    """A set of samples to train on or to evaluate on."""

    name: str
    size: int
    """Number of samples; for a training split with a sampler, the number per epoch."""
    digest: str
    views: int
    """Number of augmented versions of a sample, numbered by `view`; 0 if they cannot be numbered."""
    protocol: object
    """Evaluation protocol, such as `Pairs` or `Classes`; None for a training split."""
    at_once: int | None
    """Upper bound of the evaluation batch size, whatever the recipe says: 1 for whole volumes; None: no bound."""

    def order(self, epoch: int, batch_size: int) -> RowOrder:
        """Return the sample rows of one epoch in training order, int64, (steps, batch_size), the same on every rank.

        Only `order[step, first:last]` is used. It is a pure function of its arguments and the seed: the order does not
        depend on the number of processes, and resuming or skipping steps costs nothing.
        """
        ...

    def fetch(self, indices: np.ndarray, epoch: int, view: int | None = None) -> Batch:
        """Read samples as host tensors, with `index` and `view`; `view` is the version of each, None of the epoch."""
        ...

    def on_device(self, batch: Batch) -> Batch:
        """Finish a batch on its device: normalise, augment."""
        ...


@runtime_checkable
class ThreadSafeFetch(Protocol):
    """A split that declares if any thread may call `fetch`; for others only the training thread may."""

    @property
    def any_thread(self) -> bool:
        """True if `fetch` uses no random generator of the process."""
        ...


@runtime_checkable
class DividesBlocks(Protocol):
    """A training split whose blocks of samples several processes can share."""

    def divide(self, rows: np.ndarray, number: int, parts: int) -> np.ndarray:
        """Indices with which `fetch` reads one of equal `parts` of the block `rows`, with the same random numbers.

        Samples that belong together are in one part, if they fit.
        """
        ...


@runtime_checkable
class ComparableSplit(Protocol):
    """A split that can be compared with another one for common samples and identities."""

    name: str
    digest: str

    def held(self) -> Any:  # a `Held` of a layer above
        """The `trainkit.data.leakage.Held` of its samples: fingerprints of their content, subjects, names."""
        ...


@runtime_checkable
class IdentifiesContent(Protocol):
    """A split with a digest that does not depend on preparation; equal `content` means the same evaluation data."""

    @property
    def content(self) -> str | None:
        """SHA-256 of files, labels, groups and pairs before preparation; None if unknown."""
        ...


@runtime_checkable
class ImageSplit(Protocol):
    """A split whose images can be displayed."""

    def picture(self, row: int) -> np.ndarray | None:
        """Pixels of a sample for display, uint8 (height, width, 3); None if it is not an image."""
        ...


@dataclass(frozen=True)
class Dataset:
    """An opened data set: its files exist and are checked."""

    meta: DatasetInfo
    train: Split
    evaluations: Mapping[str, Split]
    notes: tuple[str, ...] = ()
    """Notes about decisions made when it was opened, printed with the plan."""
    block: int = 1
    """Number of samples that must stay in one micro-batch, such as P x K for re-identification; 1: no constraint."""
    part: int = 0
    """Number of samples of a block that stay on one process if processes share a block (with `DividesBlocks`): the K of
    a person; 0: a block is not shared."""


@runtime_checkable
class Data(Protocol):
    """A data set. An implementation is a dataclass whose fields are the YAML block."""

    def open(self, seed: int) -> Dataset:
        """Find and check the files. Raises UserError that names file and row."""
        ...

    def missing(self) -> list[str]:
        """List missing files in sentences, for `trainkit check`; empty if there are none."""
        ...


@runtime_checkable
class NamesTrainingSet(Protocol):
    """Data whose training set is named by the recipe."""

    @property
    def train(self) -> str:
        """A path, a data set of the hub, or a built-in one."""
        ...


@runtime_checkable
class NamesEvaluationSets(Protocol):
    """Data whose evaluation sets are named by the recipe."""

    @property
    def evaluate(self) -> Mapping[str, str]:
        """Values like `NamesTrainingSet.train`, or `held_out`, by name of the split."""
        ...


@runtime_checkable
class ChecksLeakage(Protocol):
    """Data that refuses evaluation sets with samples of the training set, unless the recipe allows it."""

    leakage: Literal["refuse", "allow"]


@runtime_checkable
class DividesIntoFolds(Protocol):
    """Data that can be divided for cross-validation."""

    folds: int
    fold: int | None
    """Number of the held-out fold; None: no cross-validation."""


@runtime_checkable
class DrawsBlocks(Protocol):
    """Data with a sampler whose blocks must stay in one micro-batch."""

    @property
    def block(self) -> int:
        """As `Dataset.block`."""
        ...


@dataclass
class Networks:
    """The networks and state of a task."""

    model: nn.Module
    """The trained network: wrapped, compiled, with EMA weights; called only through `forward`."""
    frozen: dict[str, nn.Module] = field(default_factory=dict)
    """Frozen networks: placed on the device, never wrapped, never saved. All of them are evaluated on the first
    evaluation before step 1."""
    trusted: tuple[str, ...] = ()
    """Names in `frozen` that the training depends on: if one is not above chance level, the run ends."""
    cached: dict[str, nn.Module] = field(default_factory=dict)
    """Frozen networks whose outputs are computed once before the training, for every sample and view; each batch then
    has the outputs of its samples under the same key, in float32."""
    memory: nn.Module | None = None
    """State that changes without gradients (class centres, norm statistics): saved, and equal on all ranks, but for
    what `class_shards.divided` finds."""
    notes: tuple[str, ...] = ()
    """Notes about what was built, printed with the plan."""
    indivisible: str = ""
    """Reason why a micro-batch must not be divided, a clause after "and"; empty if the loss is a sum over samples."""
    in_parts: bool = False
    """The loss calls the network through `StepContext.forward`. After running out of memory, forward and backward pass
    are then computed in parts, while the loss still sees the whole micro-batch."""
    cache_on_disk: bool = False
    """Always store outputs of `cached` on disk, in half precision."""


@dataclass(frozen=True)
class StepContext:
    """Position of a micro-batch in the training, and access of its loss to the other ranks."""

    step: int
    epoch: int
    progress: float
    """Finished share of the training, 0 to 1."""
    gather: Callable[..., Tensor]
    """`gather(x, grad=False)`: (b, ...) on each rank -> (world*b, ...) on every rank, in rank order, without gradient.
    With `grad=True` the rows of a rank get the sum of the gradients of the losses of all ranks, so ranks that each
    compute a loss of all rows, weighted by their share, train like a single process."""
    autocast: Callable[[], AbstractContextManager]
    """The run's mixed precision, for forward passes of frozen networks."""
    rank: int = 0
    """Rank of this process: in the result of `gather`, its rows begin at rank * b."""
    in_parts: Callable[[Callable[[slice], Any], int], Any] | None = None
    """After running out of memory: `in_parts(compute, count)` is compute(slice(0, count)), computed a few rows at a
    time and again for each part in the backward pass, with the same random numbers. None: computed at once."""

    def forward(self, net: Callable[..., T], *inputs: Any) -> T:
        """Return `net(*inputs)` of a micro-batch; after running out of memory, computed in parts.

        The first dimension of each tensor among the inputs, and of each that `net` returns, alone or in a dict, list or
        tuple, is the sample.
        """
        if self.in_parts is None:
            return net(*inputs)
        count = next(len(x) for x in inputs if isinstance(x, torch.Tensor))
        return self.in_parts(lambda rows: net(*(x[rows] if isinstance(x, torch.Tensor) else x for x in inputs)), count)

    def recompute(self, loss: Callable[..., T], *inputs: Any) -> T:
        """Return `loss(*inputs)`; after running out of memory, it is recomputed in the backward pass."""
        return loss(*inputs) if self.in_parts is None else self.in_parts(lambda _: loss(*inputs), 1)


@dataclass
class Loss:
    """Loss of a micro-batch: the sum over samples, its divisor, and scalars to log."""

    sum: Tensor
    weight: float | Tensor
    """Divisor of the sum: the number of samples; a tensor for numbers that differ by rank, such as pixels."""
    logs: dict[str, Tensor] = field(default_factory=dict)
    """Means over the micro-batch, detached, on the device; the same keys on every rank. A key that only some batches
    have is logged as the mean over those."""


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
    """Bound of chance for some metrics: 999 of 1,000 guesses are below, or above where lower values are better."""
    samples: int = 0
    """Number of evaluated samples; the loop counts them."""
    tables: dict[str, Columns] = field(default_factory=dict)
    """Tables that are not per sample, by name: column to values (`per_class`: {"class": ..., "f1": ...})."""
    pictures: dict[str, Columns] = field(default_factory=dict)
    """Arrays for images that are logged at every evaluation, by kind (`tsne`: {"points": ...})."""


class Task(Protocol):
    """Networks, losses and metrics. An implementation is a dataclass whose fields are the YAML block."""

    def required_weights(self) -> dict[str, Source]:
        """Weights that must exist before `build`, by name."""
        ...

    def build(self, meta: DatasetInfo, found: Mapping[str, Path], seed: int) -> Networks:
        """Build the networks. `found` has a file for each of `required_weights`, or is empty if a trained network is
        rebuilt. Raises UserError if weights do not fit."""
        ...

    def loss(self, net: nn.Module, networks: Networks, batch: Batch, at: StepContext) -> Loss:
        """Loss of one micro-batch. Calls `net(...)`, never `net.forward(...)`."""
        ...

    def predict(self, net: nn.Module, batch: Batch) -> Rows:
        """One row per sample of the batch, in its order; `net` is `networks.model`, its EMA, or a frozen network."""
        ...

    def score(self, rows: Rows, split: Split) -> Scores:
        """Compute metrics from the rows of all samples of an evaluation set, each exactly once, ordered by index."""
        ...


@runtime_checkable
class DeclaresMetrics(Protocol):
    """A task that names its metrics before it evaluates; those of others are found by a trial."""

    def measures(self, split: Split) -> Collection[str] | None:
        """Return the names of all metrics that `score` may return for a set; None if unknown. Raises UserError."""
        ...


@runtime_checkable
class ChecksMicroBatch(Protocol):
    """A task that does not train on micro-batches of every size."""

    def check_micro_batch(self, samples: int) -> None:
        """Raise UserError for micro-batches of so many samples."""
        ...


@runtime_checkable
class NormalisesBatch(Protocol):
    """A task that declares the batch size of its batch norms; for other tasks nothing is checked."""

    @property
    def batch_norm(self) -> Literal["batch", "sync"] | None:
        """Samples that are normalised together: a process's micro-batch or all processes'; None: each alone."""
        ...

    @property
    def batch_norm_least(self) -> int:
        """Smallest number of samples that must be normalised together; 1 before `build`."""
        ...


@runtime_checkable
class ComparesSamples(Protocol):
    """A task that declares what its loss compares: processes may share a block only with `all`."""

    gather: Literal["all", "local"]


@runtime_checkable
class CachesTeacher(Protocol):
    """A task that can cache the outputs of its teacher."""

    @property
    def cache_teacher(self) -> bool | Literal["disk"]:
        """The setting of the recipe; `disk`: always stored on disk."""
        ...


@runtime_checkable
class DividesClasses(Protocol):
    """A task whose class centres several processes may divide among them (`losses.class_shards`)."""

    @property
    def head(self) -> Any:  # a `Head` of a layer above
        """The `trainkit.losses.margin_specs.Head` of the recipe: whether it is sharded."""
        ...


@runtime_checkable
class FitsBeforeTraining(Protocol):
    """A task that can fit parameters to what the untrained network predicts, such as the last layer of a probe."""

    @property
    def fits(self) -> str:
        """Name of the fitted network, under which scores at step 0 are shown: `probe`; empty: nothing is fitted."""
        ...

    def fit(self, net: nn.Module, rows: Rows, train: Split) -> dict[str, np.ndarray]:
        """Return values of parameters of `net`, by name, fitted to the rows that `predict` gave for `train`.

        `train` is the training set without augmentation. Called on rank 0.
        """
        ...

    def begin_training(self, net: nn.Module) -> None:
        """Change what was fitted before the first step. The scores at step 0 and its checkpoint are of before."""
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
    """A trivial baseline: a prediction without training, evaluated like those of networks."""

    name: str
    """Name of the method: `1-NN on pixels`."""
    fit: Callable[[Iterator[Batch]], Callable[[Batch], Rows]]
    """Fit to training samples, without augmentation and in random order, as many as time allows, and return a function
    that replaces `Task.predict`. Batches are on the CPU."""
    sees: Literal["prepared", "fetched", "index"] = "prepared"
    """Input: the sample after `Split.on_device`, as networks get it; the result of `Split.fetch`; or only its `index`,
    so that nothing is read."""
    lacks: tuple[str, ...] = ()
    """Metrics that do not apply to it."""


@runtime_checkable
class HasBaselines(Protocol):
    """A task with trivial baselines that a trained network must beat."""

    def baselines(self, split: Split, train: Split | None) -> Sequence[Baseline]:
        """Return the trivial baselines of an evaluation set, if any; `build` has been called.

        `train` is the training set prepared for evaluation, without augmentation; None if the data has none.
        """
        ...


@runtime_checkable
class LabelsVolumes(Protocol):
    """A task that predicts the class of every voxel of a volume."""

    def label_map(
        self, net: nn.Module, image: Tensor, shape: Sequence[int], mirrors: Sequence[bool] = (False, False, False)
    ) -> Tensor:
        """Classes, uint8 (D0, H0, W0), on the grid of `shape`, of one prepared volume (1, 1, D, H, W)."""
        ...


@runtime_checkable
class LabelsImages(Protocol):
    """A task that predicts the class of every pixel of an image."""

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
"""Colour, near infrared, colour pencil, sketch, caption. A record's `modality` is an index into this list; captions are
last, so that records in the order of their modalities begin with the images."""


RGB, NIR, CP, SK, TEXT = range(len(MODALITIES))
