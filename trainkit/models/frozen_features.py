"""Features of a frozen network: the network without its last layer, for linear probes.

Linear probe: Alain and Bengio, "Understanding intermediate layers using linear classifier probes", arXiv 1610.01644.
"""

from __future__ import annotations

import copy
from itertools import chain

from torch import nn

from trainkit.errors import UserError

FEATURES = "features"
"""Key of a batch with the input of the last layer, float32 (B, D)."""


def without_layer(net: nn.Module, path: str) -> nn.Module:
    """Copy a network without the layer at `path`: its output is the input of that layer, (B, D).

    Parameters and buffers are shared with the network, so the copy takes no memory and follows weights loaded later.
    Raises UserError if the layer is not linear.
    """
    layer = net.get_submodule(path)
    if not isinstance(layer, nn.Linear):
        found = f"a network whose last layer is {type(layer).__name__}"
        raise UserError("task.net.frozen", found, "a linear last layer", "use another model, or `tune: linear`")
    shared = {id(tensor): tensor for tensor in chain(net.parameters(), net.buffers())}
    features = copy.deepcopy(net, shared)
    features.set_submodule(path, nn.Identity())
    return features


def probe_note(net: nn.Module) -> str:
    """Describe how many parameters of a network are trained and how many are frozen."""
    sizes = [(p.numel(), p.requires_grad) for p in net.parameters()]
    trained, frozen = (sum(size for size, grad in sizes if grad is wanted) for wanted in (True, False))
    return f"linear probe: {trained:,} parameters are trained, {frozen:,} are frozen"
