"""Export networks for semantic segmentation.

Exported networks map RGB pixels 0 .. 255, float32 (B, 3, H, W), to logits (B, classes, H, W). Normalisation, rounding
up of sides and the refinement of points, if any, are part of the network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainkit import interfaces
from trainkit.config.schema import Recipe
from trainkit.data.scenes.dataset import Scenes
from trainkit.data.scenes.splits import WholeScenes
from trainkit.errors import UserError
from trainkit.export import files
from trainkit.export.agreement import (
    CLOSE,
    LEAST_SAME,
    Exportable,
    Exporter,
    Pictures,
    PixelAgreement,
    any_or_fixed,
    compare_pixels,
)
from trainkit.export.files import Format
from trainkit.files import Json
from trainkit.inference.trained_model import load_network
from trainkit.interfaces import DatasetInfo
from trainkit.tasks.segment2d import Segment2d


def exporter(recipe: Recipe) -> Exporter | None:
    """Return the exporter for semantic segmentation; None if the task does not support it."""
    return Exporter(exportable, rebuilt) if isinstance(recipe.task, interfaces.Exportable) else None


def exportable(
    recipe: Recipe, meta: DatasetInfo, run: str, weights: Path, formats: Sequence[Format], pictures: int
) -> Exportable:
    """Load the network of a run of `segment2d`, and `pictures` images to check it on.

    Raises UserError for formats that it does not support, and if its output differs from that of the evaluation.
    """
    if "hub-folder" in formats:
        found = f"the network of run {run} is for semantic segmentation, which timm does not have"
        raise UserError("--to hub-folder", found, "a run of classify", "use --to safetensors --to onnx")
    net, data = load_network(recipe, meta, weights), cast(Scenes, recipe.data)
    refined = getattr(net, "point_head", None) is not None
    deployed, split = _deployed(recipe, net), cast(WholeScenes, files.scored_split(recipe))
    chosen = _Chosen(split, pictures)
    _check_scored(cast(Segment2d, recipe.task), net, deployed, split, chosen, str(weights))

    def check(file: Path) -> PixelAgreement:
        return compare_pixels(file.name, rebuilt(recipe, meta, {}, file), deployed, chosen, refined)

    return Exportable(
        net=net,
        about={
            "input": "pixels: RGB 0 .. 255, float32 (B, 3, H, W)",
            "output": "logits: float32 (B, classes, H, W); the largest is the class",
            "names": list(meta.class_names or map(str, range(meta.classes))),
            "colours": [list(colour) for colour in split.protocol.colours],
            "mean": list(data.mean),
            "std": list(data.std),
            "normalised": "included: (pixels / 255 - mean) / std",
            "size": list(chosen[0].shape[2:]),
            "multiple": net.multiple,
        },
        checked_on=(split.name, chosen.rows.tolist()),
        check=check,
        write_onnx=lambda file, about: write_checked(file, deployed, chosen, refined, about),
        notes=chosen.notes,
    )


def rebuilt(recipe: Recipe, meta: DatasetInfo, said: Mapping[str, Json], file: Path) -> nn.Module:
    """Rebuild the network of an exported folder: pixels to logits."""
    return _deployed(recipe, load_network(recipe, meta, file))


def _deployed(recipe: Recipe, net: nn.Module) -> nn.Module:
    data = cast(Scenes, recipe.data)
    return cast(Segment2d, recipe.task).deployable(net, data.mean, data.std)


class _Chosen:
    """Images of a split, spread over it, as pixels."""

    def __init__(self, split: WholeScenes, most: int):
        self._split = split
        self.rows = files.spread(split.size, most)
        self.notes: tuple[str, ...] = ()
        factor = self._factor(0)
        if factor != 1:
            self.notes = (
                f"the run evaluates images at {factor:.3g} times their packed size: resize them to that size first",
            )

    def _factor(self, at: int) -> float:
        return float(self._split.base[self._split.scenes.rows[self.rows[at]]])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> Tensor:
        """Float pixels 0 .. 255, (1, 3, H, W), at the input size of the run."""
        pixels = self._split.fetch(self.rows[at : at + 1], 0)["image"].float()
        factor = self._factor(at)
        if factor == 1:
            return pixels
        size = [max(1, round(side * factor)) for side in pixels.shape[2:]]
        return F.interpolate(pixels, size, mode="bilinear", align_corners=False)


@torch.no_grad()
def _check_scored(
    task: Segment2d, net: nn.Module, deployed: nn.Module, split: WholeScenes, pictures: _Chosen, where: str
) -> None:
    """Raise UserError if normalisation or sizes differ from those of the evaluation."""
    for seen in map(pictures.__getitem__, range(len(pictures))):
        normal = split.on_device({"image": seen / 255})["image"]
        scored = task.probabilities(net, normal)
        same = (deployed(seen).argmax(1) == scored.argmax(1)).float().mean().item()
        off = (deployed(seen).softmax(1) - scored).abs().amax(1)
        if same < LEAST_SAME or not (off > CLOSE).float().mean() <= 1 - LEAST_SAME:
            found = f"the output for uint8 pixels differs from that of the evaluation: {100 * same:.4g} % same class"
            raise UserError(where, found, remedy="no file was written: check data.mean and data.std of the run")


def write_checked(
    file: Path, deployed: nn.Module, pictures: Pictures, refined: bool, about: Mapping[str, Json]
) -> tuple[PixelAgreement, dict[str, str], list[str]]:
    """Write an ONNX file and check it: for any sides if possible, else for those of the first image.

    Returns the agreement, the accepted sides, for model.json, and notes. Raises UserError if it cannot be written.
    """
    first = pictures[0]

    def write(any_sides: bool, others: Sequence[Tensor], of: Pictures) -> PixelAgreement:
        _write_onnx(file, _constant_padding(deployed) if any_sides else deployed, first, about, any_sides)
        compare_pixels(file.name, _logits(file), deployed, others, refined)
        return compare_pixels(file.name, _logits(file), deployed, of, refined)

    def fixed() -> PixelAgreement:
        same = [at for at in range(len(pictures)) if pictures[at].shape == first.shape]
        return write(False, [torch.cat([first, first.flip(3)])], [pictures[at] for at in same])

    # With refined points their number and the doublings are constants of the file.
    any_sides = None if refined else lambda: write(True, _other_sides(first), pictures)
    agreement, reason = any_or_fixed(
        file.name, "this network", any_sides, fixed, reason="the number of points is fixed"
    )
    if any_sides is not None and not reason:
        return agreement, {"sides": "any"}, []
    height, width = first.shape[2:]
    note = f"model.onnx takes only images of {height} x {width} pixels: {reason}"
    return agreement, {"sides": f"{height} x {width}"}, [note]


class _ConstantPadding(nn.Module):
    """A convolution with the padding of timm's `Conv2dSame`, for inputs whose sides its stride divides."""

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.conv = conv
        steps = zip(conv.dilation, conv.kernel_size, conv.stride, strict=True)
        total = [max(0, dilation * (kernel - 1) + 1 - stride) for dilation, kernel, stride in steps]
        self.before_and_behind = [part for n in reversed(total) for part in (n // 2, n - n // 2)]

    def forward(self, x: Tensor) -> Tensor:
        """Pad with zeros, and convolve."""
        conv = self.conv
        x = F.pad(x, self.before_and_behind)
        return F.conv2d(x, conv.weight, conv.bias, conv.stride, 0, conv.dilation, conv.groups)


def _constant_padding(net: nn.Module) -> nn.Module:
    """Copy a network in which the padding of timm's `Conv2dSame` is that of sides which its stride divides.

    Sides are multiples of 2 at every halving, so the result is the same. With padding that depends on the shape,
    torch.export analyses the bounds of that shape: for `tf_efficientnet_lite0` it had not finished after 8 minutes.
    """
    from timm.layers.conv2d_same import Conv2dSame

    net = copy.deepcopy(net)
    for parent in list(net.modules()):
        for name, child in parent.named_children():
            if isinstance(child, Conv2dSame):
                setattr(parent, name, _ConstantPadding(cast(nn.Conv2d, child)))
    return net


def _logits(file: Path) -> Callable[[Tensor], Tensor]:
    run = files.session(file)
    return lambda pixels: run(pixels)["logits"]


def _other_sides(first: Tensor) -> list[Tensor]:
    """Return an image cut, turned, enlarged, and twice at once."""
    height, width = first.shape[2:]
    cut = first[:, :, : max(1, height - 7), : max(1, width - 13)]
    larger = F.interpolate(first, scale_factor=1.37, mode="bilinear", align_corners=False)
    return [cut, first.transpose(2, 3), larger, torch.cat([first, first.flip(3)])]


def _write_onnx(file: Path, deployed: nn.Module, pixels: Tensor, about: Mapping[str, Json], any_sides: bool) -> None:
    if any_sides and all(side % about["multiple"] == 0 for side in pixels.shape[2:]):
        # Export traces one path; only sides that are not multiples are resized.
        pixels = pixels[:, :, :-1, :-1]
    free: dict[int, Any] = dict.fromkeys((0, 2, 3) if any_sides else (0,), torch.export.Dim.DYNAMIC)
    # A batch of 1 would become a constant.
    example = torch.cat([pixels, pixels.flip(3)])
    files.write_onnx(file, deployed, example, free, ["logits"], about)
