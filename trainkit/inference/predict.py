"""Predict label maps, classes or embeddings for new data, with the best weights of a run."""

from __future__ import annotations

from pathlib import Path

from trainkit.config import loader
from trainkit.data import kinds
from trainkit.errors import UserError
from trainkit.inference.output_folder import OnProgress, Predicted, Request
from trainkit.inference.trained_model import read_meta
from trainkit.tracking.store import Store


def predict(
    run: str,
    source: Path | str,
    out: Path,
    *,
    mirror: bool = False,
    plugins: tuple[str, ...] = (),
    on_progress: OnProgress | None = None,
) -> Predicted:
    """Write the predictions of a run for the volumes, images or person images at `source`, with its best weights.

    For segmentation runs `out` is a folder of label maps, for others a table with a row per image or record: see
    `volumes`, `scenes`, `images` and `people`. `mirror`: mean over mirror images, along all axes for volumes, left to
    right for images. Unreadable samples are reported and skipped. It runs on the GPU if there is one.

    Raises UserError before any work if the run cannot predict, there is nothing to read, or an output file exists.
    """
    folder = Store.locate().find(run)
    meta = read_meta(folder)
    recipe = loader.load(folder.recipe, (), plugins, stored=True)
    kind = kinds.of(recipe.data)
    if kind is None and meta.axes:  # data of a plug-in without a row
        kind = kinds.KINDS["volumes"]
    of_kind = kinds.function(kind, "predict") if kind else None
    predicted = of_kind(Request(folder, recipe, meta, str(source), out, mirror, on_progress)) if of_kind else None
    if predicted is None:
        raise UserError(
            f"run {folder.name}",
            "its task or data has no predictions for new files",
            "a run of segment3d, segment2d, classify, embed, adadistill or reid",
            "name another run",
        )
    return predicted
