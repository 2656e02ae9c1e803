"""Compare exported files with the trained network on real samples, and write verified ONNX files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from trainkit.config.schema import Recipe
from trainkit.errors import UserError, number_of
from trainkit.export import files
from trainkit.export.files import Outputs
from trainkit.files import Json
from trainkit.interfaces import DatasetInfo, Task

CLOSE = 1e-3
"""Largest difference of a number, as a share of the largest value of its sample; 1e-5 is usual. With refined points a
share of 1 - `LEAST_SAME` of the pixels may differ by more: rounding may change which points are least certain."""
LEAST_COSINE = 0.9999
"""Smallest cosine between an embedding and that of the trained network."""
LEAST_SAME = 0.999
"""Smallest share of pixels with the same class. Only ties may differ: rounding depends on the machine."""
_NOT_KEPT = "no file was kept: report it with the versions of torch and onnxruntime, or leave this format out"


@dataclass(frozen=True)
class Agreement:
    """Differences between the outputs of a file and those of the trained network on real samples."""

    pictures: int
    apart: dict[str, float]
    """Largest difference of each output, as a share of the largest value of its sample."""
    same: float | None
    """Share of samples, or of pixels, with the same class; None without classes."""
    cosine: float | None
    """Smallest cosine between an embedding and that of the trained network; None without embeddings."""
    of: str = "images"
    """Plural noun of the compared samples."""

    def __str__(self) -> str:
        differences = ", ".join(f"{name} {value:.2g}" for name, value in self.apart.items())
        parts = [f"largest relative difference: {differences}"]
        parts += [] if self.same is None else [f"same class: {100 * self.same:.6g} %"]
        parts += [] if self.cosine is None else [f"cosine of embeddings: at least {self.cosine:.7g}"]
        return f"{number_of(self.pictures, self.of)}; {'; '.join(parts)}"


class Samples(Protocol):
    """Batches of inputs with the outputs of the trained network, read on access because they may be large."""

    def __len__(self) -> int: ...
    def __getitem__(self, at: int, /) -> tuple[Tensor, Outputs]: ...


def rows(pixels: Tensor, expected: Outputs, one_by_one: bool = False) -> Samples:
    """Return samples as batches: the first alone and the others together, or each alone."""
    cuts = list(range(1, len(pixels))) if one_by_one else [1]
    parts = {name: torch.tensor_split(values, cuts) for name, values in {"": pixels, **expected}.items()}
    each = [{name: values[k] for name, values in parts.items()} for k in range(len(cuts) + 1) if len(parts[""][k])]
    return [(own.pop(""), own) for own in each]


@dataclass(frozen=True, kw_only=True)
class OnnxForm:
    """A form in which a network is written as ONNX."""

    net: nn.Module
    example: Tensor
    """An input that is traced; dimensions of size 1 become constants."""
    free: tuple[int, ...]
    """Dimensions of the input that may vary."""
    samples: Samples
    """Samples whose shapes the file takes."""
    takes: Mapping[str, str]
    """The accepted shapes, for model.json."""
    others: Samples = ()
    """Further samples, of other shapes, which are compared by themselves."""
    note: str = ""
    """What users must know of it; the reason why it is not the form before follows."""


@dataclass(frozen=True, kw_only=True)
class Exportable:
    """A trained network of one kind of data, and samples on which its files are verified."""

    net: nn.Module
    """The network whose tensors are written."""
    outputs: Mapping[str, str]
    """Name and description of each output, in order."""
    samples: Samples
    checked_on: tuple[str, list[int]]
    """Name of the split, and rows."""
    about: Mapping[str, Json]
    """The part of model.json that depends on the kind of data."""
    forms: Sequence[OnnxForm]
    """Forms of the ONNX file; the first that can be written and agrees is kept."""
    network: str
    """Name of the network in messages."""
    of: str = "images"
    """Plural noun of the samples."""
    refined: bool = False
    """True for a network that refines single points."""
    reason: str = ""
    """Why the first form is not one for all shapes, where it is not."""
    notes: Sequence[str] = field(default_factory=list)

    def compare(self, name: str, found: Callable[[Tensor], Outputs], samples: Samples | None = None) -> Agreement:
        """Compare the outputs of a file of this name; see `compare`."""
        return compare(name, found, samples or self.samples, self.of, self.refined)


class Exporter(NamedTuple):
    """Functions that export runs of one kind of data and rebuild their networks from exported files."""

    exportable: Callable[[Recipe, DatasetInfo, Path, int], Exportable]
    """Given recipe, `DatasetInfo`, weights, and on how many samples to check."""
    rebuilt: Callable[[Recipe, DatasetInfo, Mapping[str, Any], Path], nn.Module]
    """Given recipe, `DatasetInfo`, content of model.json, file of tensors."""
    part: Callable[[Task, nn.Module], nn.Module] = lambda task, net: net
    """Given task and network, the part whose tensors are exported."""


def by_name(net: nn.Module, outputs: Sequence[str]) -> Callable[[Tensor], Outputs]:
    """Return a function that returns the outputs of a network, a tensor or a tuple of tensors, by name."""

    def found(given: Tensor) -> Outputs:
        values = net(given)
        return dict(zip(outputs, values if isinstance(values, tuple) else (values,), strict=True))

    return found


@torch.no_grad()
def compare(
    name: str, found: Callable[[Tensor], Outputs], samples: Samples, of: str = "images", refined: bool = False
) -> Agreement:
    """Compare the outputs for samples with those of the trained network; `refined`: it refines single points.

    `logits` are (B, classes) or (B, classes, *pixels), other outputs embeddings (B, D). Raises UserError if they
    differ.
    """
    apart: dict[str, float] = {}
    cosine: list[float] = []
    same = off = pixels = count = 0
    dense = False
    for given, expected in _each(samples):
        count += len(given)
        got = found(given)
        for key, true in expected.items():
            one, true = got[key].float(), true.float()
            if one.shape != true.shape:
                raise UserError(name, f"{key} of shape {tuple(one.shape)}", f"{tuple(true.shape)}", _NOT_KEPT)
            difference = (one - true).abs() / true.abs().max().clamp_min(1e-12)
            # `max` of Python loses a NaN, which counts as different.
            apart[key] = torch.tensor([apart.get(key, 0.0), difference.max().item()]).max().item()
            if key == "logits":
                own = one.argmax(1) == true.argmax(1)
                same, pixels, dense = same + int(own.sum()), pixels + own.numel(), true.dim() > 2
                off += int((~(difference.amax(1) <= CLOSE)).sum())
            else:
                cosine.append(nn.functional.cosine_similarity(one.double(), true.double()).min().item())
    least = None if not cosine else min(cosine)
    agreement = Agreement(count, apart, same / pixels if pixels else None, least, of)
    # If two classes of a sample tie within `CLOSE`, either may be first.
    agrees = off <= (1 - LEAST_SAME if refined else 0) * pixels and (not dense or same >= LEAST_SAME * pixels)
    agrees = agrees and all(apart[key] <= CLOSE for key in apart if key != "logits")
    agrees = agrees and all(one >= LEAST_COSINE for one in cosine)
    if not agrees:
        raise UserError(name, f"differs from the trained network: {agreement}", remedy=_NOT_KEPT)
    return agreement


def _each(samples: Samples) -> Iterator[tuple[Tensor, Outputs]]:
    return (samples[at] for at in range(len(samples)))


def write_onnx(
    file: Path, network: Exportable, about: Mapping[str, Json]
) -> tuple[Agreement, Mapping[str, str], list[str]]:
    """Write an ONNX file in the first of the network's forms that can be written and agrees.

    Returns the agreement, the accepted shapes, for model.json, and notes. Raises UserError if no form is left.
    """
    reason = network.reason
    for number, form in enumerate(network.forms, 1):
        try:
            files.write_onnx(file, form.net, form.example, form.free, list(network.outputs), about)
            found = files.session(file)
            if len(form.others):
                network.compare(file.name, found, form.others)
            agreement = network.compare(file.name, found, form.samples)
            return agreement, form.takes, [f"{form.note}: {reason}"] if form.note else []
        except Exception as error:
            reason = files.first_line(error)
            if number < len(network.forms):
                continue
            if isinstance(error, UserError):
                raise
            why = f"cannot be written for {network.network}: {reason}"
            remedy = "export with --to safetensors only"
            raise UserError(file.name, why, "operations that ONNX supports", remedy) from error
    raise RuntimeError("an exporter without a form of ONNX")


def batch_forms(net: nn.Module, pixels: Tensor, expected: Outputs, of: str = "images") -> list[OnnxForm]:
    """Return the forms of a network that takes samples of one shape: batches of any size, or one sample at a time."""
    note = f"model.onnx takes a batch of 1 ({of}): a dynamic batch size failed with"
    # A batch of 1 would become a constant.
    two = torch.cat([pixels, pixels.flip(3)])[:2]
    return [
        OnnxForm(net=net, example=two, free=(0,), samples=rows(pixels, expected), takes={"batch": "any"}),
        OnnxForm(
            net=net,
            example=pixels[:1],
            free=(),
            samples=rows(pixels, expected, one_by_one=True),
            takes={"batch": "1"},
            note=note,
        ),
    ]
