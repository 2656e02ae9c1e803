"""Cross-modal person re-identification: find colour images by infrared, colour pencil, sketch or text queries.

ReID5o (Zuo et al., NeurIPS 2025, arXiv 2506.09385) for several modalities, and the strong baseline of
re-identification (Luo et al., CVPR Workshops 2019, arXiv 1903.07071) for one. The losses are in `losses.retrieval`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from trainkit.config.units import Span, TrainingSpan
from trainkit.data.people.modalities import subsets
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Search
from trainkit.interfaces import (
    MODALITIES,
    RGB,
    Baseline,
    Batch,
    DatasetInfo,
    Loss,
    Networks,
    Rows,
    Scores,
    Source,
    Split,
    StepContext,
)
from trainkit.losses import retrieval
from trainkit.losses.retrieval import Contrast, Identity, Matching, Triplet
from trainkit.metrics.reid import score_search
from trainkit.models.network_specs import ReidSpec, required_weights
from trainkit.tasks.embed import batch_accuracy
from trainkit.tasks.protocol_scores import ScoredByProtocol
from trainkit.tensors import F, torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainkit.models.reid import Pixels, ReidNet


@dataclass(kw_only=True)
class Reid(ScoredByProtocol):
    """Cross-modal person re-identification: train features of single records and of fused queries on identity
    labels."""

    net: ReidSpec
    """The network for images and captions."""
    identity: Identity | None = field(default_factory=Identity)
    """Cross-entropy over the identities of the training set, for records and for fused queries. Null: no classifier is
    trained."""
    triplet: Triplet | None = None
    """Batch-hard triplet loss on the features of records, before the neck. None: not used."""
    sdm: Matching | None = None
    """Similarity distribution matching between fused queries and RGB records, after the neck, for each set of
    modalities. None: not used."""
    contrast: Contrast | None = None
    """Supervised contrastive loss on records, after the neck. None: not used."""
    gather: Literal["all", "local"] = "all"
    """Records that the losses compare. `all`: those of all processes. `local`: only those of the same process. Batch
    norm sees its own process in either case."""
    norms: TrainingSpan | None = field(default_factory=lambda: Span(200, "steps"))
    """Interval, in steps, at which the mean lengths of features are logged: before the neck, after it, and fused. Null:
    never."""

    def __post_init__(self) -> None:
        if not self._terms():
            raise ValueError("identity, triplet, sdm and contrast are all null; set at least one")
        if self.norms is not None and self.norms.unit != "steps":
            raise ValueError(f"norms is '{self.norms}'; expected a number of steps, such as 200 steps")

    def _terms(self) -> dict[str, Identity | Triplet | Matching | Contrast]:
        """The losses that the recipe sets, by name."""
        names = ("identity", "triplet", "sdm", "contrast")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def required_weights(self) -> dict[str, Source]:
        """Initial weights, if the recipe names any."""
        return {name: Source(weights=word) for name, word in required_weights(self.net).items()}

    def build(self, meta: DatasetInfo, found: Mapping[str, Path], seed: int) -> Networks:
        """Build the network, and small copies of the images as a baseline.

        Raises UserError if the data has no modalities, or only RGB although the recipe sets `sdm`.
        """
        from trainkit.models import reid

        if not meta.modalities:
            raise UserError("data", "images without modalities", "records of people", "use the data block `people`")
        kinds = subsets(meta.modalities)
        self._alone = not kinds
        if self.sdm is not None and self._alone:
            raise UserError(
                "task.sdm",
                "the data has only RGB records",
                "records of at least one other modality",
                "leave sdm out; use triplet or contrast, which compare RGB records",
            )
        self._kinds = torch.tensor([[m in some for m in range(len(MODALITIES))] for some in kinds])
        self._several = sum(len(some) > 1 for some in kinds)
        self._net: ReidNet | Pixels | None = None
        net = reid.build(self.net, meta, found)
        notes, together = (*net.about, *self._left(net)), "its losses compare the records of a micro-batch"
        return Networks(net, frozen={"pixels": reid.Pixels()}, notes=notes, indivisible=together, in_parts=True)

    def _left(self, net: ReidNet) -> list[str]:
        """Freeze the parts that no loss depends on; return notes about them."""
        asked = self._terms().keys()
        seen_by = {
            "classifier": (net.classifier, {"identity"}),
            "fusion": (net.fusion, {"identity", "sdm"}),
            "neck": (net.bn, {"identity", "sdm", "contrast"}),
        }
        idle = {name: part for name, (part, losses) in seen_by.items() if not losses & asked}
        counts = {name: sum(p.numel() for p in part.parameters() if p.requires_grad) for name, part in idle.items()}
        for part in idle.values():
            part.requires_grad_(False)
        some = ", ".join(f"{name} ({count:,})" for name, count in counts.items() if count)
        return [f"not trained, because no loss depends on them: {some} parameters"] if some else []

    def loss(self, net: nn.Module, networks: Networks, batch: Batch, at: StepContext) -> Loss:
        """Weighted sum of the losses, each a mean over its comparisons, times the number of records.

        With `gather: all` each process compares its own records and queries with those of all processes. Its terms are
        its share of the loss times the number of processes, so gradients equal those of a single process.
        """
        _refuse_sharded(net)
        label, modality, queries = batch["label"], batch["modality"], batch["queries"]
        out = net(*_inputs(batch), queries, at.in_parts)
        person = label[queries.amax(1)]
        terms, logs = {}, {}
        if self.identity is not None:
            counted = None if self.identity.single_queries else (queries >= 0).sum(1) > 1
            terms["identity"] = self._identity(self.identity.smoothing, out, label, person, counted, at)
            logs["accuracy"] = batch_accuracy(out["logits"], label)
        whole = self._gathered(out, label, modality, person, queries, at)
        terms |= self._compared(whole, len(label), at)
        total = reduce(torch.add, (getattr(self, name).weight * value for name, value in terms.items()))
        logs |= {name: value.detach() for name, value in terms.items()}
        if self.norms is not None and at.step % int(self.norms.amount) == 0:
            logs |= {"feature_norm": _mean_length(out["feature"]), "bn_norm": _mean_length(out["neck"])}
            if not self._alone:
                logs["fused_norm"] = _mean_length(out["fused"])
        return Loss(total * len(label), len(label), logs)

    def _identity(
        self, smoothing: float, out: Rows, label: Tensor, person: Tensor, counted: Tensor | None, at: StepContext
    ) -> Tensor:
        """Mean cross-entropy over records and queries, those that are `counted` (Q,) or all; its mean over processes is
        the mean over all of them."""
        loss = retrieval.identity(out["logits"], label, smoothing)
        asked = retrieval.identity(out["fused_logits"], person, smoothing)
        number = loss.new_full((1,), len(loss) + len(asked))
        if counted is not None:
            asked, number = torch.where(counted, asked, 0), len(loss) + counted.sum().to(loss.dtype)[None]
        loss = torch.cat([loss, asked])
        if self.gather == "local":
            return loss.mean() if counted is None else loss.sum() / number[0]
        # The number of queries may differ between processes.
        return loss.sum() / at.gather(number).mean()

    def _gathered(
        self, out: Rows, label: Tensor, modality: Tensor, person: Tensor, queries: Tensor, at: StepContext
    ) -> dict[str, Tensor]:
        """Return the tensors that the losses compare, all-gathered or of this process."""
        kinds = queries >= 0
        whole = {"label": label, "modality": modality}
        if self.triplet is not None:
            whole["feature"] = out["feature"]
        if self.sdm is not None or self.contrast is not None:
            whole["neck"] = out["neck"]
        if self.sdm is not None:
            whole |= {"fused": out["fused_neck"], "person": person, "kinds": kinds}
        if self.gather == "local" or whole.keys() == {"label", "modality"}:
            return whole
        ranks = at.gather(label.new_zeros(1)).shape[0]
        if ranks > 1 and self.sdm is not None:
            # Every rank must send the same number. Each record is a query of its own, and a set of several modalities
            # has at most half as many queries as there are records (`data.people`).
            most = len(label) + len(label) // 2 * self._several
            if len(queries) > most:
                raise ValueError(f"{len(queries)} queries of {len(label)} records; expected at most {most}")
            short = most - len(queries)
            whole["fused"] = F.pad(whole["fused"], (0, 0, 0, short))
            whole["person"] = F.pad(person, (0, short), value=-1)
            whole["kinds"] = F.pad(kinds, (0, 0, 0, short))
        trained = ("feature", "neck", "fused")
        return {
            key: at.gather(value, grad=True) if key in trained else at.gather(value.to(torch.int64))
            for key, value in whole.items()
        }

    def _compared(self, whole: dict[str, Tensor], count: int, at: StepContext) -> dict[str, Tensor]:
        """Losses between records, by name; `count` of the records in `whole` belong to this process."""
        terms: dict[str, Tensor] = {}
        ranks, share = len(whole["label"]) // count, None
        if ranks > 1:
            queries = len(whole["fused"]) // ranks if "fused" in whole else 0
            first = at.rank * count, at.rank * queries
            share = retrieval.Share(
                slice(first[0], first[0] + count),
                slice(first[1], first[1] + queries),
                lambda own: at.gather(own[None]).sum(0),
            )
        if self.triplet is not None:
            terms["triplet"] = retrieval.triplet(whole["feature"], whole["label"], self.triplet.margin, share)
        if self.sdm is not None:
            terms["sdm"] = self._matching(self.sdm.temperature, whole, share)
        if self.contrast is not None:
            terms["contrast"] = retrieval.contrast(whole["neck"], whole["label"], self.contrast.temperature, share)
        return terms if share is None else {name: ranks * value for name, value in terms.items()}

    def _matching(self, temperature: float, whole: dict[str, Tensor], share: retrieval.Share | None) -> Tensor:
        """SDM of every set of modalities against RGB."""
        if self._kinds.device != whole["kinds"].device:  # once: a copy from the host blocks
            self._kinds = self._kinds.to(whole["kinds"].device)
        asks = (whole["kinds"].bool()[None] == self._kinds[:, None]).all(2)
        return retrieval.matching(
            whole["fused"],
            whole["person"],
            whole["neck"],
            whole["label"],
            temperature,
            asks,
            self._kinds.sum(1),
            whole["modality"] == RGB,
            share,
        )

    def predict(self, net: nn.Module, batch: Batch) -> Rows:
        """Feature of each record before the neck; `score` fuses them into queries."""
        _refuse_sharded(net)
        self._net = cast("ReidNet | Pixels", net)  # the two that `build` makes, or the EMA of the first
        return {"feature": self._net.encode(*_inputs(batch))}

    def score(self, rows: Rows, split: Split) -> Scores:
        """Metrics of the search; the network of the last `predict` fuses the records of each query."""
        if not isinstance(split.protocol, Search):
            raise ValueError(f"{split.name}: protocol {type(split.protocol).__name__}; expected Search")
        if self._net is None:
            raise RuntimeError(f"{split.name}: score was called before predict")
        net = self._net
        device = next((p.device for p in net.parameters()), torch.device("cpu"))

        def finish(features: Tensor, present: Tensor) -> Tensor:
            with torch.no_grad():
                return net.neck(net.fuse(features.to(device).float(), present.to(device))).float().cpu()

        was_training = net.training
        net.eval()
        try:
            return score_search(rows["feature"], split.protocol, finish, split.name, split)
        finally:
            net.train(was_training)

    def baselines(self, split: Split, train: Split | None) -> list[Baseline]:
        """Small copies of the images, compared by correlation."""
        from trainkit.models.reid import Pixels

        return [Baseline("pixels", lambda _: lambda batch: self.predict(Pixels(), batch))]


def _inputs(batch: Batch) -> tuple[dict[str, Tensor], Tensor | None]:
    """Images by modality, and captions if the data has any."""
    keys = {name: f"image.{name}" for name in MODALITIES}
    return {name: batch[key] for name, key in keys.items() if key in batch}, batch.get("text")


def _mean_length(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.float().norm(dim=1).sum() / max(1, len(x))


def _refuse_sharded(net: nn.Module) -> None:
    """Raise UserError for FSDP: evaluation fuses queries on one process, which needs the whole network."""
    if hasattr(next(net.parameters(), None), "to_local"):
        raise UserError(
            "launch",
            "parameters are sharded over processes (FSDP)",
            "the whole network on each process, which task reid needs",
            "use accelerate_configs/all_gpus.yaml",
        )
