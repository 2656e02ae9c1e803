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
    """Write the predictions of a run for the volumes, images or people at `source`, with its best weights.

    Of runs that segment, `out` is a folder of label maps; of others a table with a row for each image or record: see
    `volumes`, `scenes`, `images` and `people`. `mirror`: mean over mirror images, of volumes along all axes, of
    images left to right. What cannot be read is named, and the rest goes on; what was interrupted goes on where it
    stopped. On the GPU if there is one.

    Raises UserError before any work when the run predicts nothing of the kind, there is nothing to read, or a file to
    be written is there already.
    """
    folder = Store.locate().find(run)
    meta = read_meta(folder)
    recipe = loader.load(folder.recipe, (), plugins)
    kind = kinds.of(recipe.data)
    if kind is None and meta.axes:  # data of a plug-in without a row
        kind = kinds.KINDS["volumes"]
    of_kind = kinds.function(kind, "predict") if kind else None
    predicted = of_kind(Request(folder, recipe, meta, str(source), out, mirror, on_progress)) if of_kind else None
    if predicted is None:
        raise UserError(
            f"run {folder.name}",
            "writes no label maps of volumes or images, and no table of classes or embeddings",
            "a run of segment3d, segment2d, classify, embed, adadistill or reid",
        )
    return predicted
