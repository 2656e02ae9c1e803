"""Weights of classes in a loss."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainkit.errors import UserError
from trainkit.tensors import torch

if TYPE_CHECKING:
    from torch import Tensor


def class_weights(
    by_name: Mapping[str, float], class_names: Sequence[str], where: str = "task.class_weights"
) -> Tensor | None:
    """Weights (C,) in the order of the classes, 1 for those not named; None if no class is named.

    Raises UserError, at the place `where` in the recipe, for a class that the data does not have, and for weights that
    are not above 0.
    """
    if not by_name:
        return None
    for name, weight in by_name.items():
        if name not in class_names:
            near = difflib.get_close_matches(name, class_names, n=3) or list(class_names[:8])
            raise UserError(where, f"class {name!r}, which the data does not have", ", ".join(near))
        if not 0 < weight < float("inf"):
            raise UserError(where, f"weight {weight} of class {name}", "a number above 0")
    return torch.tensor([float(by_name.get(name, 1.0)) for name in class_names])
