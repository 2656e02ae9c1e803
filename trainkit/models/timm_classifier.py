"""Networks of timm: classifiers with their own head, trained in whole or in part, and encoders of other networks.

Linear probe: Alain and Bengio, "Understanding intermediate layers using linear classifier probes", arXiv 1610.01644.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainkit.checkpoint import safe_load
from trainkit.errors import UserError
from trainkit.models.network_specs import Network

if TYPE_CHECKING:
    from timm.models import FeatureInfo


_MISFITS = (RuntimeError, ValueError, AssertionError, TypeError, KeyError, IndexError, StopIteration)
"""Errors that timm and segmentation_models_pytorch raise for parts, arguments or images that do not fit together."""


@contextlib.contextmanager
def misfits_refused(where: str, what: str, expected: str = "", remedy: str = "") -> Iterator[None]:
    """Raise UserError for `what` where a library cannot build or run it, with its reason."""
    try:
        yield
    except _MISFITS as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(where, f"{what}: {reason}"[:400], expected, remedy) from error


class Classifier(nn.Module):
    """A network of timm whose frozen part has no gradient and stays in evaluation mode."""

    net: Any
    """The network of timm, whose methods no type of torch has."""

    def __init__(self, net: nn.Module, tune: str, freeze_bn: bool = False):
        super().__init__()
        self.net, self.tune, self.freeze_bn = net, tune, freeze_bn
        if tune != "all":
            self.net.requires_grad_(False)
            self._tuned().requires_grad_(True)

    def forward(self, image: Tensor, with_embedding: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Images (B, C, H, W) to class scores (B, classes), and on request the input of the last layer (B, D)."""
        with torch.set_grad_enabled(self.tune == "all" and torch.is_grad_enabled()):
            features = self.net.forward_features(image)
        scores = self.net.forward_head(features)
        return (scores, self.net.forward_head(features, pre_logits=True)) if with_embedding else scores

    def train(self, mode: bool = True) -> Classifier:
        """Set the mode of the trained part; the frozen part stays in evaluation mode."""
        super().train(mode)
        if self.tune != "all":
            self.net.eval()
            self._tuned().train(mode)
        if self.freeze_bn:
            keep_statistics(self.net)
        return self

    def _tuned(self) -> nn.Module:
        path = last_layer(self.net)
        # The head is the module that contains the classifier: `head.fc` belongs to `head`.
        return self.net.get_submodule(path if self.tune == "linear" else path.partition(".")[0])


def keep_statistics(net: nn.Module) -> None:
    """Put the batch norms of a network into evaluation mode until `train` is called again."""
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


def build(spec: Network, shape: Sequence[int], classes: int, found: Mapping[str, Path]) -> tuple[Classifier, list[str]]:
    """Build the classifier of a recipe for images of `shape` (channels, height, width); return also notes.

    `found` holds the file of its weights under `net`. A new last layer over pretrained features starts at zero: timm's
    random initial values, as large as +-0.3 for 10 classes, are noise that decays slowly. Raises UserError if timm has
    no such network, it does not take an argument or such images, or the weights do not fit.
    """
    net = timm_network(
        spec.model,
        shape,
        {**spec.args, "drop_path_rate": spec.drop_path, "drop_rate": spec.dropout},
        classes,
        "task.net",
    )
    notes = load(net, found["net"], classes) if "net" in found else []
    if notes:
        for p in net.get_submodule(last_layer(net)).parameters():
            nn.init.zeros_(p)
    return Classifier(net, spec.tune, spec.freeze_bn), notes


def last_layer(net: Any) -> str:
    """Name of the layer of a network of timm that computes the class scores. Raises UserError for several."""
    last = net.get_classifier()
    path = next((name for name, module in net.named_modules() if module is last), "")
    if not path:
        found = "a network whose class scores come from several layers"
        raise UserError("task.net", found, "a single last layer", "use another model")
    return path


def load(net: nn.Module, file: Path, classes: int) -> list[str]:
    """Load a network of timm from a file; a classifier for another number of classes is not loaded, with a note.

    The file may be of a run of `classify` or `embed`. `classes` 0: the network has no classifier. Raises UserError with
    the missing and unexpected names if the file is of another network.
    """
    tensors = _of_backbone(safe_load.read_tensors(file))
    prefix = last_layer(net)
    head = {name: tensors[name] for name in tensors if name.startswith(f"{prefix}.")}
    if head and classes and all(t.shape[:1] == (classes,) for t in head.values()):
        safe_load.load_into(net, tensors, str(file))
        return []
    rest = {name: t for name, t in tensors.items() if name not in head}
    own = {f"{prefix}.{name}": t.detach().clone() for name, t in net.get_submodule(prefix).state_dict().items()}
    safe_load.load_into(net, rest | own, str(file))
    if not classes:
        return []
    if not head:
        return [f"{file}: no last layer ({prefix}); a new one for {classes} classes is trained"]
    of = max((len(t) for t in head.values() if t.ndim), default=0)
    return [f"{file}: last layer ({prefix}) for {of:,} classes not used; a new one for {classes} is trained"]


def _of_backbone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a run, or of an exported network, to timm's names."""
    for prefix in ("net.backbone.", "backbone."):  # of `embed`: without its neck and class centres
        if any(name.startswith(prefix) for name in tensors):
            return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
    if tensors and all(name.startswith("net.") for name in tensors):  # of `classify`
        return {name.removeprefix("net."): t for name, t in tensors.items()}
    return tensors


def feature_info(net: nn.Module) -> FeatureInfo:
    """Return timm's table of the feature maps of a network built with `features_only`."""
    from timm.models import FeatureInfo

    info = net.feature_info
    if not isinstance(info, FeatureInfo):
        raise TypeError(f"feature_info of {type(net).__name__} is a {type(info).__name__}; expected timm's FeatureInfo")
    return info


def refuse_unknown(model: str, where: str) -> None:
    """Raise UserError with the nearest names if timm has no network of that name; no network is built."""
    import timm

    architecture = model.partition(".")[0]
    if not timm.is_model(architecture):
        near = difflib.get_close_matches(architecture, timm.list_models(), n=3)
        raise UserError(
            where,
            f"timm {timm.__version__} has no model {model!r}",
            remedy=f"did you mean {' or '.join(near)}?" if near else "choose a name from timm.list_models()",
        )


def timm_network(model: str, shape: Sequence[int], args: Mapping[str, Any], classes: int, where: str) -> nn.Module:
    """Build a network of timm with random weights for images of `shape`; `classes` 0: without classifier.

    Raises UserError if there is no such network, with the nearest names, or it does not take an argument or such
    images.
    """
    import timm

    refuse_unknown(model, where)
    architecture = model.partition(".")[0]
    config = timm.get_pretrained_cfg(architecture, allow_unregistered=False)
    sized = {"img_size": tuple(shape[1:])} if config is not None and config.fixed_input_size else {}
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in args.items()}
    # Not every network has both arguments; 0 is their default.
    given = {name: value for name, value in given.items() if name not in ("drop_path_rate", "drop_rate") or value}
    remedy = "remove the argument named above" if given else "use another model"
    with misfits_refused(where, f"{model} cannot be built with {given}", remedy=remedy):
        net = timm.create_model(architecture, num_classes=classes, in_chans=shape[0], **sized, **given)
    unfit = f"{model} does not take {shape[0]} x {shape[1]} x {shape[2]} images"
    # A transformer would silently drop the pixels that do not fill a patch.
    patch = getattr(getattr(net, "patch_embed", None), "patch_size", None)
    if sized and patch is not None and any(n % p for n, p in zip(shape[1:], patch, strict=True)):
        raise UserError(where, unfit, f"sides that are multiples of {patch[0]}", "change data.image_size or the model")
    net.eval()
    with misfits_refused(where, unfit, remedy="change data.image_size or the model"), torch.no_grad():
        out = net(torch.zeros(1, *shape, device=next(net.parameters()).device))
    if out.ndim != 2:
        found = f"{model} outputs maps of shape {tuple(out.shape)}"
        raise UserError(where, found, "one vector per image", "use another model")
    return net.train()


# ---- Encoders


def load_encoder(net: nn.Module, encoder: str, file: Path | str) -> None:
    """Load the encoder of timm within `net` from a file of timm's classifier of that name.

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

    with misfits_refused("task.net", f"weights {file} in {encoder}", remedy="use the weights of this encoder"):
        # The whole classifier first: for feature maps timm silently keeps random values for missing tensors.
        timm.create_model(encoder, **given())
        filled = timm.create_model(
            encoder,
            features_only=True,
            out_indices=places,
            in_chans=next(p.shape[1] for p in inner.parameters() if p.ndim == 4),
            **given(),
        )
    safe_load.load_into(inner, filled.state_dict(), str(file))
