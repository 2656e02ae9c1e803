"""Figures of runs in tests: made and kept, but not painted, which took three quarters of a small run's time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def leave_unpainted(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """From now on a tracker keeps images of one colour in place of its figures."""
    from trainkit.tracking.tracker import Tracker

    figure, image = Tracker.figure, Tracker.image

    def kept(self: Tracker, path: str, fig: Any) -> None:
        fig.savefig = _blank
        figure(self, path, fig)

    def shown(self: Tracker, key: str, step: int, fig: Any) -> None:
        fig.savefig = _blank
        image(self, key, step, fig)

    put(Tracker, "figure", kept)
    put(Tracker, "image", shown)


def _blank(out: Any, **_: Any) -> None:
    from PIL import Image

    Image.new("RGB", (8, 8)).save(out, "png")
