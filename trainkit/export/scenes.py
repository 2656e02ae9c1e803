"""Export networks for semantic segmentation.

Exported networks map RGB pixels 0 .. 255, float32 (B, 3, H, W), to logits (B, classes, H, W). Normalisation, rounding
up of sides and the refinement of points, if any, are part of the network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainkit import interfaces
from trainkit.config.schema import Recipe
from trainkit.data.scenes.dataset import Scenes
from trainkit.data.scenes.splits import WholeScenes
from trainkit.errors import UserError
from trainkit.export import files
from trainkit.export.agreement import CLOSE, LEAST_SAME, Exportable, Exporter, OnnxForm
from trainkit.export.files import Outputs
from trainkit.files import Json
from trainkit.inference.trained_model import load_network
from trainkit.interfaces import DatasetInfo
from trainkit.tasks.segment2d import Segment2d


def exporter(recipe: Recipe) -> Exporter | None:
    """Return the exporter for semantic segmentation; None if the task does not support it."""
    return Exporter(exportable, rebuilt) if isinstance(recipe.task, interfaces.Exportable) else None


def exportable(recipe: Recipe, meta: DatasetInfo, weights: Path, pictures: int) -> Exportable:
    """Load the network of a run of `segment2d`, and `pictures` images to check it on.

    Raises UserError if its output differs from that of the evaluation.
    """
    net, data = load_network(recipe, meta, weights), cast(Scenes, recipe.data)
    refined = getattr(net, "point_head", None) is not None
    deployed, split = _deployed(recipe, net), cast(WholeScenes, files.scored_split(recipe))
    chosen = _Chosen(split, pictures, deployed)
    _check_scored(cast(Segment2d, recipe.task), net, chosen, str(weights))
    return Exportable(
        net=net,
        outputs={"logits": "float32 (B, classes, H, W); the largest is the class"},
        samples=chosen,
        checked_on=(split.name, chosen.rows.tolist()),
        about={
            "input": "pixels: RGB 0 .. 255, float32 (B, 3, H, W)",
            "names": list(meta.class_names or map(str, range(meta.classes))),
            "colours": [list(colour) for colour in split.protocol.colours],
            "mean": list(data.mean),
            "std": list(data.std),
            "normalised": "included: (pixels / 255 - mean) / std",
            "size": list(chosen.pixels(0).shape[2:]),
            "multiple": net.multiple,
        },
        forms=forms(deployed, chosen.pixels, len(chosen), cast(int, net.multiple), refined),
        network="this network",
        refined=refined,
        reason="the number of points is fixed" if refined else "",
        notes=chosen.notes,
    )


def rebuilt(recipe: Recipe, meta: DatasetInfo, said: Mapping[str, Json], file: Path) -> nn.Module:
    """Rebuild the network of an exported folder: pixels to logits."""
    return _deployed(recipe, load_network(recipe, meta, file))


def _deployed(recipe: Recipe, net: nn.Module) -> nn.Module:
    data = cast(Scenes, recipe.data)
    return cast(Segment2d, recipe.task).deployable(net, data.mean, data.std)


class _Seen:
    """Images and what a network makes of each, computed on access."""

    def __init__(self, net: nn.Module, images: Sequence[Callable[[], Tensor]]):
        self._net, self._images = net, images

    def __len__(self) -> int:
        return len(self._images)

    @torch.no_grad()
    def __getitem__(self, at: int) -> tuple[Tensor, Outputs]:
        """Return an image and its logits."""
        pixels = self._images[at]()
        return pixels, {"logits": self._net(pixels)}


class _Chosen(_Seen):
    """Images of a split, spread over it, as pixels."""

    def __init__(self, split: WholeScenes, most: int, deployed: nn.Module):
        self.split, self.rows = split, files.spread(split.size, most)
        super().__init__(deployed, [lambda at=at: self.pixels(at) for at in range(len(self.rows))])
        factor = self._factor(0)
        said = f"the run evaluates images at {factor:.3g} times their packed size: resize them to that size first"
        self.notes = (said,) if factor != 1 else ()

    def _factor(self, at: int) -> float:
        return float(self.split.base[self.split.scenes.rows[self.rows[at]]])

    def pixels(self, at: int) -> Tensor:
        """Return float pixels 0 .. 255, (1, 3, H, W), at the input size of the run."""
        pixels = self.split.fetch(self.rows[at : at + 1], 0)["image"].float()
        factor = self._factor(at)
        if factor == 1:
            return pixels
        size = [max(1, round(side * factor)) for side in pixels.shape[2:]]
        return F.interpolate(pixels, size, mode="bilinear", align_corners=False)


@torch.no_grad()
def _check_scored(task: Segment2d, net: nn.Module, chosen: _Chosen, where: str) -> None:
    """Raise UserError if normalisation or sizes differ from those of the evaluation."""
    for pixels, outputs in map(chosen.__getitem__, range(len(chosen))):
        scored = task.probabilities(net, chosen.split.on_device({"image": pixels / 255})["image"])
        logits = outputs["logits"]
        same = (logits.argmax(1) == scored.argmax(1)).float().mean().item()
        off = (logits.softmax(1) - scored).abs().amax(1)
        if same < LEAST_SAME or not (off > CLOSE).float().mean() <= 1 - LEAST_SAME:
            found = f"the output for uint8 pixels differs from that of the evaluation: {100 * same:.4g} % same class"
            raise UserError(where, found, remedy="no file was written: check data.mean and data.std of the run")


def forms(
    deployed: nn.Module, pixels: Callable[[int], Tensor], count: int, multiple: int, refined: bool
) -> list[OnnxForm]:
    """Return the forms of a network: for images of any sides, and for those of the first image.

    With refined points there is only the second: their number and the doublings are constants of the file.
    """
    first, images = pixels(0), [lambda at=at: pixels(at) for at in range(count)]
    height, width = first.shape[2:]
    twice = torch.cat([first, first.flip(3)])  # a batch of 1 would become a constant
    alike = [image for at, image in enumerate(images) if pixels(at).shape == first.shape]
    fixed = OnnxForm(
        net=deployed,
        example=twice,
        free=(0,),
        samples=_Seen(deployed, alike),
        others=_Seen(deployed, [lambda: twice]),
        takes={"sides": f"{height} x {width}"},
        note=f"model.onnx takes only images of {height} x {width} pixels",
    )
    if refined:
        return [fixed]
    # Export traces one path; only sides that are not multiples are resized.
    cut = slice(None, -1) if height % multiple == width % multiple == 0 else slice(None)
    others = [lambda other=other: other for other in _other_sides(first)]
    return [
        OnnxForm(
            net=_constant_padding(deployed),
            example=twice[:, :, cut, cut],
            free=(0, 2, 3),
            samples=_Seen(deployed, images),
            others=_Seen(deployed, others),
            takes={"sides": "any"},
        ),
        fixed,
    ]


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


def _other_sides(first: Tensor) -> list[Tensor]:
    """Return an image cut, turned, enlarged, and twice at once."""
    height, width = first.shape[2:]
    cut = first[:, :, : max(1, height - 7), : max(1, width - 13)]
    larger = F.interpolate(first, scale_factor=1.37, mode="bilinear", align_corners=False)
    return [cut, first.transpose(2, 3), larger, torch.cat([first, first.flip(3)])]
