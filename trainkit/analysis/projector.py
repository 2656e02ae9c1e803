"""Export the embeddings of a run to TensorBoard's Embedding Projector, from the saved rows of its inspections.

Writing does not need TensorBoard. The output has a folder for each inspection with `tensors.tsv`, `metadata.tsv` and
`sprite.png`, and `projector_config.pbtxt` (a ProjectorConfig in protobuf's text format) above them. `tensorboard
--logdir OUT` shows them; https://projector.tensorflow.org loads the first two.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainkit.errors import UserError

if TYPE_CHECKING:
    from trainkit.tracking.store import Store

_REMEDY = "add an evaluation NAME.inspection to the recipe, with log.rows: true"
_WHENS = ("final", "best")
"""Rows of the final evaluation take precedence over those of the best one."""
_SHOWN = ("id", "label", "prediction", "probability", "margin", "outlier_distance", "hard", "mislabelled", "outlier")
_LARGEST_SPRITE = 8192
"""Side in pixels above which browsers reject a texture."""


@dataclass(frozen=True)
class Exported:
    """An exported inspection."""

    name: str
    samples: int
    dimensions: int
    folder: Path


def export(store: Store, run: str, out: Path) -> list[Exported]:
    """Write the inspections of a run, named as for `Store.find`, to the folder `out`.

    Raises UserError for a run without inspections, a store that does not answer, and a folder that cannot be written.
    """
    folder = store.find(run)
    run_id = folder.info().run_id
    where = f"run {folder.name}"
    if run_id is None:
        raise UserError(where, "is not in MLflow", remedy="resume it, or choose another run")
    with tempfile.TemporaryDirectory() as aside:
        files = _rows_of(store, run_id, Path(aside), where)
        tables = {name: columns for name, file in files.items() if (columns := _read(file, f"{where}, {name}"))}
        if not tables:
            raise UserError(where, "has no saved rows of an inspection", remedy=_REMEDY)
        try:
            return write(tables, out)
        except OSError as error:
            raise UserError(str(out), f"cannot be written: {error.strerror or error}") from None


def write(tables: dict[str, dict[str, list[Any]]], out: Path) -> list[Exported]:
    """Write inspections, by name, to the folder `out`: columns of `Scores.rows`, of samples with an `embedding`."""
    done, config = [], []
    for name, columns in tables.items():
        has = [k for k, value in enumerate(columns["embedding"]) if value is not None]
        columns = {key: [column[k] for k in has] for key, column in columns.items()}
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tensors.tsv").write_text("".join(_line(vector) for vector in columns["embedding"]), encoding="utf-8")
        # With several columns the first line is the header.
        shown = [key for key in _SHOWN if key in columns]
        lines = [_line(shown), *map(_line, zip(*(columns[key] for key in shown), strict=True))]
        (folder / "metadata.tsv").write_text("".join(lines), encoding="utf-8")
        about = {"tensor_name": name, "tensor_path": f"{name}/tensors.tsv", "metadata_path": f"{name}/metadata.tsv"}
        text = "".join(f"  {key}: {json.dumps(value)}\n" for key, value in about.items())
        side = _sprite(columns.get("thumbnail", []), folder / "sprite.png")
        if side:
            text += f"  sprite {{\n    image_path: {json.dumps(f'{name}/sprite.png')}\n"
            text += 2 * f"    single_image_dim: {side}\n" + "  }\n"
        text += f"  tensor_shape: {len(has)}\n  tensor_shape: {len(columns['embedding'][0])}\n"
        config.append(f"embeddings {{\n{text}}}\n")
        done.append(Exported(name, len(has), len(columns["embedding"][0]), folder))
    (out / "projector_config.pbtxt").write_text("".join(config), encoding="utf-8")
    return done


def _rows_of(store: Store, run_id: str, aside: Path, where: str) -> dict[str, Path]:
    """Fetch the parquet files of a run's rows, by evaluation: the final ones if there are any, else the best."""
    from trainkit.redact import without_secrets

    client = store.client()
    from mlflow.exceptions import MlflowException

    try:
        found = {Path(entry.path).stem: entry.path for entry in client.list_artifacts(run_id, "rows")}
        found = {stem: path for stem, path in found.items() if not stem.startswith(".")}  # they name folders
        chosen = {}
        for when in reversed(_WHENS):
            chosen |= {stem.removesuffix(f"_{when}"): path for stem, path in found.items() if stem.endswith(f"_{when}")}
        return {
            name: Path(client.download_artifacts(run_id, path, str(aside))) for name, path in sorted(chosen.items())
        }
    except (MlflowException, OSError) as error:
        raise UserError(where, f"its rows cannot be fetched: {without_secrets(str(error))[:300]}") from None


def _read(file: Path, where: str) -> dict[str, list[Any]] | None:
    """Return the columns of an inspection's rows; None for rows of another kind."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(where, f"cannot be read: {error}", remedy="run the evaluation again") from None
    if not {"id", "label", "embedding", "outlier_distance"} <= set(table.column_names):
        return None
    return {name: table[name].to_pylist() for name in table.column_names}


def _line(values: Any) -> str:
    return "\t".join(_cell(value) for value in values) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, float | np.floating):
        return f"{value:.7g}"
    # A tab or a line break inside a name would start another column or row.
    return "" if value is None else " ".join(str(value).split())


def _sprite(thumbnails: list[bytes | None], file: Path) -> int:
    """Write square thumbnails as one image, row by row; returns the side of a thumbnail, 0 without any."""
    tiles = [np.frombuffer(thumbnail, np.uint8) for thumbnail in thumbnails if thumbnail is not None]
    if not tiles or len(tiles) < len(thumbnails):
        return 0
    side = math.isqrt(len(tiles[0]) // 3)
    across = math.ceil(math.sqrt(len(tiles)))
    if across * side > _LARGEST_SPRITE:
        return 0
    from PIL import Image

    sprite = np.full((across * side, across * side, 3), 255, np.uint8)
    for k, tile in enumerate(tiles):
        top, left = k // across * side, k % across * side
        sprite[top : top + side, left : left + side] = tile.reshape(side, side, 3)
    Image.fromarray(sprite).save(file)
    return side
