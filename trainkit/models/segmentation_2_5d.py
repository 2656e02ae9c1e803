"""2-D networks applied to a volume slice by slice, optionally with the slices on either side (2.5-D).

For anisotropic volumes: if slices are a dozen times as far apart as voxels, adjacent slices have little in common.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.checkpoint import safe_load
from trainkit.errors import UserError
from trainkit.interfaces import DatasetInfo
from trainkit.models.patch_geometry import check_patch, format_sides, require
from trainkit.models.segmentation_specs import TIMM, SlicesSpec, timm_name
from trainkit.models.timm_classifier import feature_info, refuse_unknown


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
