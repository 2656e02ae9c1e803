"""2-D networks applied to a volume slice by slice, optionally with the slices on either side (2.5-D).

For anisotropic volumes: if slices are a dozen times as far apart as voxels, adjacent slices have little in common.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from trainkit.checkpoint import safe_load
from trainkit.config.ranges import Channels
from trainkit.errors import UserError
from trainkit.interfaces import DatasetInfo
from trainkit.models.patch_geometry import check_patch, format_sides, require
from trainkit.models.timm_classifier import check_tag, feature_info, refuse_unknown

TIMM = "tu-"
"""Prefix of segmentation_models_pytorch for encoders of timm."""


@dataclass(kw_only=True)
class SlicesSpec:
    """A 2-D network of segmentation_models_pytorch that is applied to each slice of a volume."""

    name: Literal["slices"]
    """Selects a 2-D network of segmentation_models_pytorch."""
    encoder: str = field(metadata={"timm": TIMM})
    """`tu-` and the name of a network of timm, with the tag of its weights if `weights` is `pretrained`; or an encoder
    of segmentation_models_pytorch, such as `resnet18`."""
    decoder: Literal["unet", "unetplusplus", "fpn", "linknet", "manet", "deeplabv3plus", "segformer", "upernet"]
    """Decoder, by its name in segmentation_models_pytorch."""
    filters: list[Channels] | None = None
    """Channels of the decoder's levels, coarsest first; their number, 3 to 5, is also how often the encoder halves the
    image. For `unet`, `unetplusplus` and `manet`. None: 256, 128, 64, 32, 16."""
    neighbours: Annotated[int, Field(ge=0, le=2)] = 0
    """Number of slices on either side that are given as further channels. At the ends of a patch its last slice is
    repeated."""
    weights: str | None = None
    """Initial weights: `pretrained` (for a `tu-` encoder, downloaded by `trainkit download`), or those of a whole
    network from a file, `run:NAME` or `models:/ID`. None: random."""
    supervision: ClassVar[str] = "none"

    def __post_init__(self) -> None:
        check_tag(self.encoder, self.weights, "pvt_v2_b2.in1k")
        if self.weights == "pretrained" and not self.encoder.startswith(TIMM):
            raise ValueError(
                f"encoder is {self.encoder!r}; pretrained weights need an encoder of timm, such as tu-resnet18.a1_in1k"
            )
        if self.filters is not None:
            if self.decoder not in ("unet", "unetplusplus", "manet"):
                raise ValueError(f"filters is set, but decoder {self.decoder} has no such option; leave it out")
            if not 3 <= len(self.filters) <= 5:
                raise ValueError(f"filters is {self.filters}; expected 3 to 5 levels")
            # Other encoders keep unused levels, which then get no gradient.
            if len(self.filters) < 5 and not self.encoder.startswith(TIMM):
                raise ValueError(
                    f"filters has {len(self.filters)} levels, which needs a `tu-` encoder; use one, or give 5 levels"
                )


class Slices(nn.Module):
    """A 2-D network applied to every slice of a volume."""

    def __init__(self, net: nn.Module, neighbours: int = 0):
        super().__init__()
        self.net, self.neighbours = net, neighbours

    def forward(self, image: Tensor) -> Tensor | list[Tensor]:
        """Volumes (B, C, D, H, W) to class scores (B, classes, D, H, W); a list if the network returns one."""
        count, depth = image.shape[0], image.shape[2]
        out = self.net(with_neighbours(image, self.neighbours))
        return [_volumes(x, count, depth) for x in out] if isinstance(out, list) else _volumes(out, count, depth)


def with_neighbours(image: Tensor, neighbours: int) -> Tensor:
    """Volumes (B, C, D, H, W) to images (B*D, C*(2*neighbours+1), H, W): each slice between those beside it.

    At either end the last slice is repeated. The channels of one slice lie side by side.
    """
    depth = image.shape[2]
    at = torch.arange(depth, device=image.device)
    beside = [image[:, :, (at + k).clamp(0, depth - 1)] for k in range(-neighbours, neighbours + 1)]
    return torch.cat(beside, 1).transpose(1, 2).flatten(0, 1)


def _volumes(scores: Tensor, count: int, depth: int) -> Tensor:
    return scores.unflatten(0, (count, depth)).transpose(1, 2)


def build(spec: SlicesSpec, meta: DatasetInfo) -> tuple[nn.Module, str]:
    """Build the network of `spec`, with random weights; return also a description."""
    channels, depth = meta.shape[0] * (2 * spec.neighbours + 1), 5 if spec.filters is None else len(spec.filters)
    check_patch(spec.name, meta.shape[1:], (1, 2**depth, 2**depth))
    require("segmentation_models_pytorch")
    import segmentation_models_pytorch as smp

    check_encoder(spec.encoder, smp.encoders.encoders)
    given = {} if spec.filters is None else {"encoder_depth": depth, "decoder_channels": spec.filters}
    try:
        net = smp.create_model(
            spec.decoder, spec.encoder, encoder_weights=None, in_channels=channels, classes=meta.classes, **given
        )
    except (RuntimeError, ValueError, AssertionError, TypeError, KeyError) as error:
        raise misfit(f"{spec.decoder} over {spec.encoder}", error) from error
    made = Slices(net, spec.neighbours)
    probe(made, meta, spec.encoder)
    return made, f"{spec.decoder} over {spec.encoder}, {about_slices(spec.neighbours, 2**depth)}"


def about_slices(neighbours: int, multiple: int) -> str:
    """Describe the input of a network of slices."""
    seen = "each slice alone" if not neighbours else f"each slice with {neighbours} on either side"
    return f"{seen}, patch sides multiples of {format_sides((1, multiple, multiple))}"


@torch.no_grad()
def probe(net: nn.Module, meta: DatasetInfo, encoder: str) -> None:
    """Raise UserError for a network that does not give a score per voxel and class, by a test on one slice."""
    net.eval()
    slice_of = (1, meta.shape[0], 1, *meta.shape[2:])
    try:
        out = net(torch.zeros(slice_of, device=next(net.parameters()).device))
    except (RuntimeError, ValueError, AssertionError, TypeError, IndexError) as error:
        raise misfit(f"{encoder} on slices of {format_sides(meta.shape[2:])} voxels", error) from error
    if tuple(out.shape) != (1, meta.classes, 1, *meta.shape[2:]):
        found = f"{encoder} outputs scores of shape {tuple(out.shape)}"
        expected = f"one per voxel and class, {(1, meta.classes, 1, *meta.shape[2:])}"
        raise UserError("task.net", found, expected, "use another encoder or decoder")
    net.train()


def timm_name(encoder: str) -> str:
    """`tu-resnet18.a1_in1k` -> `resnet18.a1_in1k`."""
    return encoder.removeprefix(TIMM)


def load_encoder(net: nn.Module, encoder: str, file: Path | str) -> None:
    """Load the encoder of a network of slices from a file of timm's classifier of that name.

    timm renames tensors, and sums or repeats the filters of the first convolution if the input has other than three
    channels. Raises UserError for a file with anything but tensors, or with those of another network.
    """
    import timm

    inner = next(module for module in net.modules() if hasattr(module, "feature_info"))
    # Pass tensors, so that timm does not read the file itself.
    tensors = safe_load.read_tensors(file)
    places = tuple(feature_info(inner).out_indices)

    def given() -> dict[str, Any]:
        return {"pretrained": True, "pretrained_cfg_overlay": {"state_dict": dict(tensors)}}  # timm removes entries

    try:
        # The whole classifier first: for feature maps timm silently keeps random values for missing tensors.
        timm.create_model(timm_name(encoder), **given())
        filled = timm.create_model(
            timm_name(encoder),
            features_only=True,
            out_indices=places,
            in_chans=next(p.shape[1] for p in inner.parameters() if p.ndim == 4),
            **given(),
        )
    except (RuntimeError, ValueError, AssertionError, KeyError) as error:
        raise misfit(f"weights {file} in {encoder}", error) from error
    safe_load.load_into(inner, filled.state_dict(), str(file))


def check_encoder(name: str, known: dict) -> None:
    """Raise UserError for an encoder that neither timm nor segmentation_models_pytorch (`known`) has."""
    if name.startswith(TIMM):
        refuse_unknown(timm_name(name), "task.net.encoder")
    elif name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        remedy = f"did you mean {' or '.join(near)}?" if near else f"put {TIMM} before the name of an encoder of timm"
        raise UserError("task.net.encoder", f"segmentation_models_pytorch has no encoder {name!r}", remedy=remedy)


def misfit(what: str, error: Exception) -> UserError:
    """Return the error for `what` if a library cannot build or run it."""
    reason = re.sub(r"\s+", " ", str(error))[:200] or type(error).__name__
    return UserError(
        "task.net", f"{what}: {reason}", "an encoder and a decoder that fit together", "use another encoder or decoder"
    )
