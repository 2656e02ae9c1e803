"""trainkit: training for computer vision with reproducible, fully tracked runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.environment.version import __version__

if TYPE_CHECKING:
    from trainkit.api import UserError, compare, find_run, load, recipe, train

__all__ = ["UserError", "__version__", "compare", "find_run", "load", "recipe", "train"]


def __getattr__(name: str) -> object:
    """Import `trainkit.api` when the Python interface is first used: commands do without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainkit import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
