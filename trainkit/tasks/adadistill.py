"""AdaDistill: distil a large frozen face network into a small one through class centres that follow the teacher.

Boutros, Štruc and Damer, "AdaDistill: Adaptive Knowledge Distillation for Deep Face Recognition", ECCV 2024,
arXiv 2407.01332; and the two methods that the paper compares it with, feature MSE and AML-distill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainkit import rng
from trainkit.config.ranges import Fraction, NotNegative
from trainkit.errors import UserError
from trainkit.interfaces import Baseline, Batch, DatasetInfo, Loss, Networks, Rows, Source, Split, StepContext
from trainkit.losses.margin_specs import AdaFace, ArcFace, Head, Margin
from trainkit.models.network_specs import Net, embedding_of, refuse_weights
from trainkit.tasks.embed import batch_accuracy, embed_both_views, embedding_quality, pixels_baseline
from trainkit.tasks.protocol_scores import ScoredByProtocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainkit.losses.distillation import Centres, Memory


@dataclass(kw_only=True)
class Teacher:
    """The frozen teacher network, with either its weights or the recipe that trains it first."""

    net: Net
    """Architecture of the teacher. Its embedding must be as long as the student's."""
    weights: str | None = None
    """Weights of the teacher: a file (.safetensors, .pth, .pt), a logged model `models:/ID`, or a run `run:NAME`. Set
    either `weights` or `recipe`."""
    recipe: str | None = None
    """Recipe that trains the teacher first; a path relative to the folder of this recipe. Its run is reused while
    recipe and data are unchanged."""
    centres: str | None = None
    """File with the teacher's class centres, for method `aml`. None: they are read from `weights`."""

    def __post_init__(self) -> None:
        if (self.weights is None) == (self.recipe is None):
            raise ValueError("set either weights or recipe, not both")


@dataclass(kw_only=True)
class GeometryMargin:
    """Raises AdaFace's margin on easy samples where the student lags behind the teacher (no paper: see `geometry`)."""

    weight: NotNegative = 1.0
    """Factor of what is added to AdaFace's quality. 0 disables it."""
    gain: NotNegative = 3.0
    """Factor in the added term gain * hardness * relu(hardness - cosine of student and teacher)."""
    ramp: Fraction = 0.04
    """Share of the training over which the term grows linearly to its full weight. 0: full weight from step 1."""


@dataclass(kw_only=True)
class AdaDistill(ScoredByProtocol):
    """Distil a face teacher into a smaller student (Boutros et al., ECCV 2024, arXiv 2407.01332)."""

    student: Net
    """Architecture of the network that is trained."""
    teacher: Teacher
    """Frozen network whose embeddings the student is trained to reproduce."""
    method: Literal["adadistill", "aml", "mse"] = "adadistill"
    """Distillation loss. `adadistill`: class centres follow the teacher's embeddings. `aml`: the teacher's class
    centres, fixed. `mse`: squared distance of normalised embeddings, without centres."""
    alpha: Literal["hard", "plain"] = "hard"
    """How far a class centre moves. `plain`: by the cosine of student and teacher (equation 7 of the paper). `hard`:
    also by how close the sample is to its centre (equation 8)."""
    margin: Margin = field(default_factory=lambda: ArcFace(name="arcface", m=0.45, scale=64.0))
    """Margin softmax of the student's loss; not used by method `mse`. Default: ArcFace with m 0.45 and scale 64."""
    head: Head = field(default_factory=Head, metadata={"hash": "set"})
    """How several processes hold the class centres. Default: whole on each."""
    geometry: GeometryMargin | None = None
    """Additional margin for method `adadistill` with margin `adaface`. None: no such term."""
    cache_teacher: bool | Literal["disk"] = True
    """Compute the teacher's embeddings of all images once. `true`: up to 1 GiB is computed at each start and kept in
    memory as float32; more is stored as with `disk`. `disk`: stored once for all runs, in half precision. `false`: the
    teacher runs in every step."""

    def __post_init__(self) -> None:
        refuse_weights(self.student, "student")
        refuse_weights(self.teacher.net, "teacher.net")
        if self.student.embedding != self.teacher.net.embedding:
            raise ValueError(
                f"student.embedding is {self.student.embedding}, teacher.net.embedding {self.teacher.net.embedding}; "
                "set both to the same length"
            )
        if self.geometry is not None and not (isinstance(self.margin, AdaFace) and self.method == "adadistill"):
            raise ValueError(
                "geometry needs `method: adadistill` and `margin: {name: adaface}`; leave it out otherwise"
            )
        if self.head.sharded and (self.method == "mse" or self.geometry is not None):
            why = "`method: mse`, which has no centres" if self.method == "mse" else (
                "geometry, which needs the centre of every sample on its own process"
            )  # fmt: skip
            raise ValueError(f"head.sharded with {why}; leave one out")

    def required_weights(self) -> dict[str, Source]:
        """The teacher's weights."""
        return {"teacher": Source(weights=self.teacher.weights, recipe=self.teacher.recipe)}

    def build(self, meta: DatasetInfo, found: Mapping[str, Path], seed: int) -> Networks:
        """Build the student, the frozen teacher and the class centres; without teacher weights only the student."""
        from trainkit.checkpoint import safe_load
        from trainkit.models import face_backbones

        if "teacher" not in found:  # a trained network is rebuilt
            return Networks(face_backbones.build(self.student, meta.shape))
        teacher = face_backbones.build(self.teacher.net, meta.shape)
        tensors = safe_load.read_tensors(found["teacher"])
        centres = {"weight": tensors.pop("head.weight")} if "head.weight" in tensors else None
        backbone = {name.removeprefix("net."): t for name, t in tensors.items()}
        safe_load.load_into(teacher, backbone, str(found["teacher"]))
        return Networks(
            face_backbones.build(self.student, meta.shape),
            frozen={"pixels": face_backbones.Pixels(), "teacher": teacher},
            trusted=("teacher",),
            cached={"teacher": teacher} if self.cache_teacher else {},
            cache_on_disk=self.cache_teacher == "disk",
            memory=None if self.method == "mse" else self._memory(meta, centres, seed),
            in_parts=True,
        )

    def _memory(self, meta: DatasetInfo, found: dict[str, Tensor] | None, seed: int) -> Memory:
        """Make the initial centres: random, or those of the teacher."""
        from trainkit.checkpoint import safe_load
        from trainkit.losses.distillation import Centres, Memory
        from trainkit.losses.margin import NormStatistics

        embedding = embedding_of(self.teacher.net)
        centres = Centres(meta.classes, embedding, rng.generator(seed, "centres"), self.head)
        if self.method == "aml":
            if self.teacher.centres is not None:
                whole = safe_load.read_centres(self.teacher.centres, meta.classes, embedding)
                centres.weight.copy_(centres.shard.part(whole))
            elif found is None:
                raise UserError(
                    "task.teacher",
                    "its weights have no class centres, which method aml needs",
                    remedy="set task.teacher.centres to a file with them, or use `method: adadistill`",
                )
            elif found["weight"].shape != (meta.classes, embedding):
                raise UserError(
                    "task.teacher",
                    f"class centres of shape {tuple(found['weight'].shape)}",
                    f"{(meta.classes, embedding)} (classes, embedding)",
                    "use a teacher that was trained on the same classes, or `method: adadistill`, which needs none",
                )
            else:
                centres.weight.copy_(centres.shard.part(found["weight"]))
        return Memory(centres, NormStatistics() if isinstance(self.margin, AdaFace) else None)

    def loss(self, net: nn.Module, networks: Networks, batch: Batch, at: StepContext) -> Loss:
        """The loss of the method; only the student gets a gradient."""
        from trainkit.losses.distillation import Memory, agreement, feature_mse
        from trainkit.losses.margin import margin_loss, margin_ramp

        student = at.forward(net, batch["image"])
        if self.cache_teacher:
            teacher = batch["teacher"]
        else:
            with at.autocast():
                teacher = networks.frozen["teacher"](batch["image"]).float().detach()
        cosine = agreement(student.detach(), teacher)
        logs = {"cosine_to_teacher": cosine.mean()}
        if self.method == "mse":
            return Loss(feature_mse(student, teacher) * len(student), len(student), logs)
        memory, label = networks.memory, batch["label"]
        if not isinstance(memory, Memory):
            raise TypeError(f"{self.method} needs its Memory, not {type(memory).__name__}")
        plus = self._geometry_margin(teacher, cosine, memory, label, at)
        if self.method == "adadistill":
            logs["alpha"] = self._move_centres(memory.centres, label, student.detach().float(), teacher, at)
        scores = memory.centres.scores(student, label, self.margin.scale)
        quality = embedding_quality(student, self.margin, memory.norms, at, plus)
        total, divisor = margin_loss(scores, label, self.margin, quality, margin_ramp(self.margin, at.epoch))
        return Loss(total, divisor, logs | {"accuracy": batch_accuracy(scores, label)})

    def _move_centres(
        self, centres: Centres, label: Tensor, student: Tensor, teacher: Tensor, at: StepContext
    ) -> Tensor:
        """Move the centres with the samples of all processes; returns the mean of alpha."""
        from trainkit.losses.distillation import agreement

        label, every = at.gather(label), at.gather(teacher)
        if centres.shard.world == 1:
            return centres.update(label, at.gather(student), every, self.alpha).mean()
        # Each process has alpha of its own classes: logs are averaged over processes.
        alpha = centres.move(label, at.gather(agreement(student, teacher)), every, self.alpha)
        return alpha.mean() * centres.shard.world

    def _geometry_margin(
        self, teacher: Tensor, cosine: Tensor, memory: Memory, label: Tensor, at: StepContext
    ) -> Tensor | float:
        """Return what the geometry margin adds to AdaFace's quality of each sample; 0 without one.

        To be called before the centres move: afterwards they are nearest to the samples whose student agrees least.
        """
        if (margin := self.geometry) is None:
            return 0.0
        from trainkit.losses.distillation import geometry

        grown = min(1.0, at.progress / margin.ramp) if margin.ramp > 0 else 1.0
        return margin.weight * grown * geometry(memory.centres.hardness(label, teacher), cosine, margin.gain)

    def predict(self, net: nn.Module, batch: Batch) -> Rows:
        """Embedding of each image summed with that of its mirror image, and the mean norm of the two."""
        return embed_both_views(net, batch["image"])

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of `predict`."""
        return ("embedding", "norm")

    def baselines(self, split: Split, train: Split | None) -> list[Baseline]:
        """Raw pixels as an embedding."""
        return [pixels_baseline(mirror=True)]
