"""The evaluation sets of CVLface's toolkit (`facerec_val`): Arrow folders, some with a `metadata.pt`.

Verification sets have rows (image, index, is_same); rows 2i and 2i + 1 are a pair. IJB sets have (image, index) and
metadata of templates, medias, faceness_scores, p1, p2, label; TinyFace has rows (image, index, path) and metadata of
probe_paths, gallery_paths, distractor_paths. A `metadata.pt` is read as tensors or not at all (`checkpoint.safe_load`);
one with arrays or texts in it is to be saved again by those who trust it, as `metadata.npz` without objects.

Written from the toolkit's readers; the sets themselves are handed out on request only and were not at hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trainkit.data.formats import arrow_tables
from trainkit.data.record import Record, Source
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Identification, Pairs, Protocol, Templates

_TEMPLATE_KEYS = ("templates", "medias", "faceness_scores", "p1", "p2", "label")
_LISTS = ("probe_paths", "gallery_paths", "distractor_paths")
_REMEDY = (
    "save it again as metadata.npz: numpy.savez('metadata.npz', **{k: numpy.asarray(v) for k, v in metadata.items()})"
)


def read(root: Path) -> tuple[Source, Protocol]:
    """Read the images, in the order of `index`, and the protocol. Raises UserError naming what does not fit."""
    files, _ = arrow_tables.saved_files(root)
    order, columns, image = _columns(root, files)
    metadata = root / "metadata.npz" if (root / "metadata.npz").is_file() else root / "metadata.pt"
    if metadata.is_file():
        protocol = _with_metadata(metadata, len(order), columns.get("path"))
        made_of = (*files, metadata)
    elif "is_same" in columns:
        same = np.asarray(columns["is_same"], bool)
        if len(same) % 2 or (same[::2] != same[1::2]).any():
            raise UserError(str(root), "rows that are not pairs", "rows 2i and 2i + 1 with one is_same")
        rows = np.arange(len(same))
        protocol, made_of = Pairs(rows[::2], rows[1::2], same[::2]), tuple(files)
    else:
        raise UserError(str(root), f"columns {', '.join(columns)} and no metadata", "is_same, or metadata.pt")

    def records() -> Iterator[Record]:
        # Rows come in the order of the files; nearly always that is the order of `index`.
        waiting: dict[int, Record] = {}
        due = row = 0
        for batch in arrow_tables.stream_batches(files):
            for value in batch.column(image).to_pylist():
                where = f"{root}, row {row}"
                waiting[int(order[row])] = Record(f"row {row}", -1, arrow_tables.picture_bytes(value, where), where)
                row += 1
                while due in waiting:
                    yield waiting.pop(due)
                    due += 1

    return Source("CVLface folder", str(root), len(order), records, made_of), protocol


def _columns(root: Path, files: list[Path]) -> tuple[np.ndarray, dict[str, list], str]:
    columns: dict[str, list] = {}
    image = ""
    for batch in arrow_tables.stream_batches(files):
        image = image or arrow_tables.image_column(str(root), batch.schema)
        for name in ("index", "is_same", "path"):
            if name in batch.schema.names:
                columns.setdefault(name, []).extend(batch.column(name).to_pylist())
    order = columns.pop("index", [])
    if sorted(order) != list(range(len(order))) or not order:
        raise UserError(str(root), "a column index with gaps, or none", "each of 0 .. rows - 1 once")
    sorted_rows = np.argsort(np.asarray(order), kind="stable")
    return np.asarray(order), {name: [values[row] for row in sorted_rows] for name, values in columns.items()}, image


def _with_metadata(file: Path, rows: int, paths: list[str] | None) -> Protocol:
    content = _metadata(file)
    if all(key in content for key in _LISTS):
        if paths is None:
            raise UserError(str(file), "lists of paths, but no column path", "TinyFace's rows with their paths")
        place = {Path(path).stem: row for row, path in enumerate(paths)}
        lists = [[str(path) for path in content[key]] for key in _LISTS]
        strange = [path for listed in lists for path in listed if Path(path).stem not in place]
        if strange:
            raise UserError(str(file), f"{strange[0]!r} is not a row of the set"[:200], "the paths of its rows")
        probe, match, other = (np.asarray([place[Path(path).stem] for path in listed], np.int64) for listed in lists)
        label = np.full(rows, -1, np.int64)
        for path, row in zip(lists[0] + lists[1], [*probe, *match], strict=True):
            prefix = Path(path).name.split("_")[0]
            if not (prefix.isascii() and prefix.isdigit() and len(prefix) < 18):
                raise UserError(str(file), f"no identity in {path!r}"[:200], "<identity>_<anything>")
            label[row] = int(prefix)
        return Identification(probe, np.concatenate([match, other]), label)
    missing = [key for key in _TEMPLATE_KEYS if key not in content]
    if missing:
        raise UserError(str(file), f"no {', '.join(missing)}", ", ".join(_TEMPLATE_KEYS))
    template, media, faceness, first, second, same = (content[key].reshape(-1) for key in _TEMPLATE_KEYS)
    if not len(template) == len(media) == len(faceness) == rows or not len(first) == len(second) == len(same):
        raise UserError(str(file), "columns of other lengths", f"{rows} images, and one label per pair")
    if not (np.isin(first, template).all() and np.isin(second, template).all() and np.isin(same, (0, 1)).all()):
        raise UserError(str(file), "pairs of unknown templates, or pairs without labels", "p1, p2 and label")
    whole = (np.int64, np.int64, np.float32, np.int64, np.int64, bool)
    columns = (template, media, faceness, first, second, same)
    return Templates(*(column.astype(kind) for column, kind in zip(columns, whole, strict=True)))


def _metadata(file: Path) -> dict[str, np.ndarray]:
    if file.suffix == ".npz":
        from trainkit.data.formats.ijb import load_npz

        return load_npz(file)
    from trainkit.checkpoint.safe_load import read_tensors

    try:
        return {name: tensor.numpy() for name, tensor in read_tensors(file).items()}
    except UserError as error:
        raise UserError(error.where, error.found, "tensors", _REMEDY) from None
