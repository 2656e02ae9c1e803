"""Packed sets as folders that Hugging Face `datasets` loads: parquet with features, images as they are stored.

`load_dataset` reads the folder, and so does every block `data` of a recipe: what is imported from it at the same size
has the digest of the set that was exported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainkit.data.formats import arrow_tables, image_decode
from trainkit.data.storage import image_store
from trainkit.data.storage.hashed_folder import FolderWriter
from trainkit.data.storage.image_store import Packed
from trainkit.data.storage.import_images import threads
from trainkit.data.storage.map_store import each
from trainkit.data.storage.mask_store import PackedMasks
from trainkit.errors import UserError

SHARD_BYTES = 512 << 20
"""Bytes of images of a parquet file, about."""
_GROUP = 100
"""Rows of a row group, as `datasets` writes images."""


def export_set(
    path: Path | str,
    out: Path | str,
    *,
    masks: Path | str | None = None,
    split: str = "train",
    on_progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write a packed set of images to a folder of parquet files; return the number of rows.

    `masks` is the packed set of their masks, written beside them. Columns: `image`; `label` with the names of classes,
    or `mask`; `image_path`, the names of images; `image_group` where groups are known. Pixels are not changed.

    Raises UserError for other sets, damaged rows, masks that belong to other images, and where `out` already exists.
    """
    data = _opened(Path(path))
    kept = None if masks is None else _masks_of(data, Path(masks))
    schema, ids, total = _schema(data, kept), data.ids(), len(data)
    shards = max(1, math.ceil(data.bytes / SHARD_BYTES))
    with FolderWriter(out) as writer:
        folder = writer.folder / "data"
        folder.mkdir()
        if kept is not None:
            (writer.folder / "names.json").write_text(json.dumps(list(kept.names)), "utf-8")
        for shard in range(shards):
            rows = range(total * shard // shards, total * (shard + 1) // shards)
            file = folder / f"{split}-{shard:05}-of-{shards:05}.parquet"
            _write(
                file, schema, each(lambda row: _row(data, kept, ids, row), rows, threads()), rows, on_progress, total
            )
        writer.folder.rename(writer.out)
    return total


def _opened(path: Path) -> Packed:
    if not image_store.is_packed(path):
        expected = "a packed set of images"
        raise UserError(str(path), "not a packed set", expected, "create one with trainkit data import")
    head = (path / "manifest.json").read_bytes()[: 1 << 20]
    if image_store.FORMAT.encode() not in head:
        reason = "export masks with their images (--masks); packed volumes cannot be exported"
        raise UserError(str(path), "no packed images", "those of images, faces, scenes or people", reason)
    data = Packed(path)
    if data.manifest["protocol"] is not None:
        found = f"an evaluation set, whose {data.manifest['protocol'].lower()} cannot be a column of a table"
        raise UserError(str(path), found, "a set with classes", "copy its files")
    return data


def _masks_of(data: Packed, path: Path) -> PackedMasks:
    masks = PackedMasks(path)
    if masks.ids() != data.ids():
        raise UserError(str(path), f"{len(masks)} masks that belong to other images", f"those of {data.path}")
    return masks


def _schema(data: Packed, masks: PackedMasks | None) -> Any:
    import datasets

    names = list(data.class_names)
    if len(set(names)) < len(names):
        raise UserError(str(data.path), "two classes with the same name", "a name for each class")
    columns: dict[str, Any] = {"image": datasets.Image()}
    columns |= {"label": datasets.ClassLabel(names=names)} if masks is None else {"mask": datasets.Image()}
    columns |= {arrow_tables.NAME_COLUMN: datasets.Value("string")}
    if data.groups is not None:
        columns |= {arrow_tables.GROUP_COLUMN: datasets.Value("string")}
    return datasets.Features(columns).arrow_schema


def _row(data: Packed, masks: PackedMasks | None, ids: list[str], row: int) -> dict[str, Any]:
    pixels = data.picture(row)  # which compares it with its checksum
    stored = data.encoded(row) if data.store == "encoded" else image_decode.encode(pixels)
    id = ids[row].replace("\\\\", "\\")  # as it was before it became a line
    found: dict[str, Any] = {"image": {"bytes": stored, "path": None}, arrow_tables.NAME_COLUMN: id}
    if masks is None:
        found["label"] = int(data.labels[row])
    else:
        found["mask"] = {"bytes": image_decode.encode(masks.mask(row)), "path": None}
    if data.groups is not None:
        found[arrow_tables.GROUP_COLUMN] = data.group_names[data.groups[row]]
    return found


def _write(
    file: Path,
    schema: Any,
    made: Iterator[dict[str, Any]],
    rows: range,
    on_progress: Callable[[int, int], None] | None,
    total: int,
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetWriter(file, schema, write_page_checksum=True) as writer:
        waiting: list[dict[str, Any]] = []
        for row, one in zip(rows, made, strict=True):
            waiting.append(one)
            if len(waiting) == _GROUP or row == rows[-1]:
                writer.write_table(pa.Table.from_pylist(waiting, schema))
                waiting.clear()
            if on_progress:
                on_progress(row + 1, total)
