"""Compare exported files with the trained network on real samples, and write verified ONNX files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from trainkit.config.schema import Recipe
from trainkit.errors import UserError, number_of
from trainkit.export import files
from trainkit.export.files import Format, Outputs
from trainkit.files import Json
from trainkit.interfaces import DatasetInfo, Task

CLOSE = 1e-3
"""Largest difference of a number, as a share of the largest value; 1e-5 is usual. With refined points a share of
1 - `LEAST_SAME` of the pixels may differ by more: rounding may change which points are least certain."""
_NOT_KEPT = "no file was kept: report it with the versions of torch and onnxruntime, or leave this format out"
LEAST_COSINE = 0.9999
"""Smallest cosine between an embedding and that of the trained network."""
LEAST_SAME = 0.999
"""Smallest share of pixels with the same class. Only ties may differ: rounding depends on the machine."""

A = TypeVar("A")


@dataclass(frozen=True)
class RowAgreement:
    """Differences between a file and the trained network on real samples, each of which has one row of outputs."""

    pictures: int
    apart: dict[str, float]
    """Largest difference of each output, as a share of its largest value."""
    same: float | None
    """Share of samples with the same class; None without classes."""
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


@dataclass(frozen=True)
class PixelAgreement:
    """Differences between a file and the trained network on real images, each pixel of which has a class."""

    pictures: int
    largest: float
    """Largest difference of logits."""
    range: float
    """Largest absolute logit."""
    same: float
    """Share of pixels with the same class."""
    apart: float
    """Share of pixels with a logit that differs by more than `CLOSE`."""

    def __str__(self) -> str:
        compared = number_of(self.pictures, "images")
        return (
            f"{compared}; largest difference of logits: {self.largest:.2g} (largest logit {self.range:.3g}); "
            f"same class: {100 * self.same:.6g} % of the pixels"
        )


Agreement = RowAgreement | PixelAgreement


class Pictures(Protocol):
    """Images (1, 3, H, W), read on access because they may be large."""

    def __len__(self) -> int: ...
    def __getitem__(self, at: int, /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Exportable:
    """A trained network of one kind of data, with functions that write and verify its files."""

    net: nn.Module
    """The network whose tensors are written."""
    about: Mapping[str, Json]
    """The part of model.json that depends on the kind of data."""
    checked_on: tuple[str, list[int]]
    """Name of the split, and rows."""
    check: Callable[[Path], Agreement]
    """Rebuilds the network from a file of tensors, and compares."""
    write_onnx: Callable[[Path, Mapping[str, Any]], tuple[Agreement, dict[str, str], list[str]]]
    """Writes an ONNX file, given model.json, and compares; returns also the accepted shapes, and notes."""
    write_config: Callable[[Path], Agreement] | None = None
    """Writes timm's config.json into a folder beside the tensors, and compares the network that timm loads."""
    notes: Sequence[str] = ()


class Exporter(NamedTuple):
    """Functions that export runs of one kind of data and rebuild their networks from exported files."""

    exportable: Callable[[Recipe, DatasetInfo, str, Path, Sequence[Format], int], Exportable]
    """Given recipe, `DatasetInfo`, name of the run, weights, formats, images to check on."""
    rebuilt: Callable[[Recipe, DatasetInfo, Mapping[str, Any], Path], nn.Module]
    """Given recipe, `DatasetInfo`, content of model.json, file of tensors."""
    part: Callable[[Task, nn.Module], nn.Module] = lambda task, net: net
    """Given task and network, the part whose tensors are exported."""


class NamedModule(nn.Module):
    """A module around a network that returns a tuple of named outputs."""

    net: nn.Module
    outputs: tuple[str, ...]


def by_name(deployed: NamedModule) -> Callable[[Tensor], Outputs]:
    """Return a function that returns the outputs of a network by name."""
    return lambda pixels: dict(zip(deployed.outputs, deployed(pixels), strict=True))


@torch.no_grad()
def compare_rows(
    name: str,
    found: Callable[[Tensor], Outputs],
    pixels: Tensor,
    expected: Mapping[str, Tensor],
    one_by_one: bool = False,
    of: str = "images",
) -> RowAgreement:
    """Compare outputs for samples, the first alone and then the others together, with the trained network's.

    Raises UserError if they differ.
    """
    cuts = range(1, len(pixels)) if one_by_one else [1]
    parts = [found(some) for some in torch.tensor_split(pixels, list(cuts)) if len(some)]
    apart: dict[str, float] = {}
    same = cosine = None
    for key in parts[0]:
        got, true = torch.cat([part[key] for part in parts]).float(), expected[key].float()
        if got.shape != true.shape:
            raise UserError(name, f"{key} of shape {tuple(got.shape)}", f"{tuple(true.shape)}", _NOT_KEPT)
        apart[key] = ((got - true).abs().max() / true.abs().max().clamp_min(1e-12)).item()
        if key == "logits":
            same = (got.argmax(1) == true.argmax(1)).float().mean().item()
        else:
            cosine = nn.functional.cosine_similarity(got.double(), true.double()).min().item()
    agreement = RowAgreement(len(pixels), apart, same, cosine, of)
    # NaN fails. If two classes tie within `CLOSE`, either may be first.
    if not all(value <= CLOSE for value in apart.values()) or not (cosine is None or cosine >= LEAST_COSINE):
        raise UserError(name, f"differs from the trained network: {agreement}", remedy=_NOT_KEPT)
    return agreement


@torch.no_grad()
def compare_pixels(
    name: str,
    found: Callable[[Tensor], Tensor],
    trained: Callable[[Tensor], Tensor],
    pictures: Pictures,
    refined: bool,
) -> PixelAgreement:
    """Compare logits (B, classes, H, W) for all `images`; `refined`: the network refines points.

    Raises UserError if they differ.
    """
    largest, high, same, apart, pixels = 0.0, 0.0, 0, 0, 0
    for seen in map(pictures.__getitem__, range(len(pictures))):
        expected, got = trained(seen), found(seen)
        if got.shape != expected.shape:
            problem = f"logits of shape {tuple(got.shape)} for pixels of shape {tuple(seen.shape)}"
            raise UserError(name, problem, f"{tuple(expected.shape)}", _NOT_KEPT)
        off = (got - expected).abs().amax(1)
        largest, high = max(largest, off.max().item()), max(high, expected.abs().max().item())
        same += int((got.argmax(1) == expected.argmax(1)).sum())
        # NaN counts as different.
        apart += int((~(off <= CLOSE * max(1.0, expected.abs().max().item()))).sum())
        pixels += off.numel()
    agreement = PixelAgreement(len(pictures), largest, high, same / pixels, apart / pixels)
    if agreement.same < LEAST_SAME or agreement.apart > (1 - LEAST_SAME if refined else 0):
        raise UserError(name, f"differs from the trained network: {agreement}", remedy=_NOT_KEPT)
    return agreement


def any_or_fixed(
    name: str, network: str, any_shape: Callable[[], A] | None, fixed: Callable[[], A], reason: str = ""
) -> tuple[A, str]:
    """Write and check an ONNX file with `any_shape`; if that fails, or is None for a `reason`, with `fixed`.

    Returns the agreement, and the reason for a fixed shape or an empty text. Raises UserError if both fail.
    """
    if any_shape is not None:
        try:
            return any_shape(), ""
        except Exception as error:
            reason = files.first_line(error)
    try:
        return fixed(), reason
    except UserError:
        raise
    except Exception as error:
        found = f"cannot be written for {network}: {files.first_line(error)}"
        raise UserError(name, found, "operations that ONNX supports", "export with --to safetensors only") from error


def write_onnx_of_rows(
    file: Path,
    deployed: NamedModule,
    network: str,
    pixels: Tensor,
    expected: Mapping[str, Tensor],
    about: Mapping[str, Json],
) -> tuple[RowAgreement, dict[str, str], list[str]]:
    """Write an ONNX file and check it: for batches of any size if possible, else for one sample at a time.

    Returns the agreement, the accepted batch sizes, for model.json, and notes. Raises UserError if it fails.
    """
    wanted = {name: expected[name] for name in deployed.outputs}
    of = about.get("of", "images")

    def write(example: Tensor, free: Mapping[int, Any], one_by_one: bool) -> RowAgreement:
        files.write_onnx(file, deployed, example, free, deployed.outputs, about)
        return compare_rows(file.name, files.session(file), pixels, wanted, one_by_one, of)

    agreement, reason = any_or_fixed(
        file.name,
        network,
        # A batch of 1 would become a constant.
        lambda: write(torch.cat([pixels, pixels.flip(3)])[:2], {0: torch.export.Dim.DYNAMIC}, False),
        lambda: write(pixels[:1], {}, True),
    )
    if not reason:
        return agreement, {"batch": "any"}, []
    return (
        agreement,
        {"batch": "1"},
        [f"model.onnx takes a batch of 1 ({of}): a dynamic batch size failed with: {reason}"],
    )
