"""torch, imported where it is first used: importing it takes seconds, and reading a recipe needs none of it.

Modules that define blocks of recipes take `torch` and `F` from here. Networks, which inherit from `nn.Module`, import
torch itself.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__all__ = ["F", "torch"]


class _Module:
    """Stands for a module, and imports it when something of it is asked for."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # whoever inspects or copies this does not use torch
            raise AttributeError(attribute)
        return getattr(sys.modules.get(self._name) or importlib.import_module(self._name), attribute)


if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
else:
    torch, F = _Module("torch"), _Module("torch.nn.functional")
