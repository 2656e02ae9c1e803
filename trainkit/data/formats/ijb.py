"""Template sets (IJB-B, IJB-C) and identification sets (TinyFace): metadata in plain files, images beside it.

Template folders are those of InsightFace: `meta/<set>_face_tid_mid.txt` (image template media),
`meta/<set>_template_pair_label.txt` (template template same), `meta/<set>_name_5pts_score.txt` (image, five points,
faceness), and images in `loose_crop/`, aligned by the five points when they are packed. Without the latter file images
are aligned already, and of one faceness.

TinyFace: folders `Probe`, `Gallery_Match`, `Gallery_Distractor`, or those in `Testing_Set/`. The identity is the file
name before its first `_`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trainkit.data.folders import inside, visible
from trainkit.data.formats.image_decode import is_called_picture
from trainkit.data.record import Record, Source
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Identification, Templates

_PAIRS = ("first", "second", "same")
_FOLDERS = ("Probe", "Gallery_Match", "Gallery_Distractor")


def metadata(root: Path) -> list[Path]:
    """List the files that make `root` a template folder; empty where it is none."""
    for folder in (root / "meta", root):
        for faces in visible(folder.glob("*_face_tid_mid.txt")):
            name = faces.name.removesuffix("_face_tid_mid.txt")
            pairs, points = folder / f"{name}_template_pair_label.txt", folder / f"{name}_name_5pts_score.txt"
            return [faces, pairs, points] if points.is_file() else [faces, pairs]
    return []


def read_templates(root: Path) -> tuple[Source, Templates]:
    """Read the images and the protocol of a template folder. Raises UserError naming file and line."""
    files = metadata(root)
    for file in files:
        if not file.is_file():
            raise UserError(str(file), "is missing", "the pairs that belong to the templates")
    landmarks: np.ndarray | None = None
    images, pairs = _table(files[0], ("path", "template", "media")), _table(files[1], _PAIRS)
    if len(files) == 3:
        points = _table(files[2], ("path", *(f"{axis}{i}" for i in range(5) for axis in "xy"), "faceness"))
        if points["path"].tolist() != images["path"].tolist():
            raise UserError(str(files[2]), "other images or another order", f"those of {files[0].name}")
        images["faceness"] = points["faceness"]
        landmarks = np.stack([[points[f"x{i}"], points[f"y{i}"]] for i in range(5)]).transpose(2, 0, 1)
    pictures = root / "loose_crop" if (root / "loose_crop").is_dir() else root
    names, template, media = (images[name] for name in ("path", "template", "media"))
    faceness = images.get("faceness", np.ones(len(names), np.float32))
    first, second, same = (pairs[name] for name in _PAIRS)
    where = str(files[0])
    if len(names) == 0 or len(first) == 0:
        raise UserError(where, f"{len(names)} images, {len(first)} pairs", "at least one of each")
    if not np.isin(same, (0, 1)).all():
        row = int(np.flatnonzero(~np.isin(same, (0, 1)))[0])
        raise UserError(f"{files[1]}, pair {row}", f"same: {same[row]}", "0 or 1")
    known = np.unique(template)
    for column in (first, second):
        strange = np.flatnonzero(~np.isin(column, known))
        if len(strange):
            place = f"{files[1]}, pair {strange[0]}"
            raise UserError(place, f"template {column[strange[0]]}", f"a template of {files[0].name}")
    if not np.isfinite(faceness).all():
        raise UserError(where, f"faceness of image {int(np.flatnonzero(~np.isfinite(faceness))[0])}", "a number")
    paths = [inside(pictures, str(name), f"{where}, image {row}") for row, name in enumerate(names)]

    def records() -> Iterator[Record]:
        for row, path in enumerate(paths):
            points = None if landmarks is None else landmarks[row]
            yield Record(str(names[row]), -1, path, f"{path} (image {row})", points)

    protocol = Templates(
        template.astype(np.int64),
        media.astype(np.int64),
        faceness.astype(np.float32),
        first.astype(np.int64),
        second.astype(np.int64),
        same.astype(bool),
    )
    return Source("templates", str(root), len(paths), records, (*files, *paths), aligned=landmarks is None), protocol


def identification_parts(root: Path) -> list[Path]:
    """List the three folders that make `root` an identification set; empty where it is none."""
    for folder in (root, root / "Testing_Set"):
        parts = [folder / name for name in _FOLDERS]
        if parts[0].is_dir() and parts[1].is_dir():
            return parts
    return []


def read_identification(root: Path) -> tuple[Source, Identification]:
    """Read the images and the protocol of a TinyFace folder. Raises UserError naming file and line."""
    parts = identification_parts(root)
    listed = [_listed(part) for part in parts]
    if not listed[0] or not listed[1]:
        raise UserError(str(root), f"{len(listed[0])} probes, {len(listed[1])} gallery images", "at least one of each")
    paths = [path for files in listed for path in files]
    labels: list[int] = []
    for path in (*listed[0], *listed[1]):
        prefix = path.name.split("_")[0]
        if "_" not in path.name or not (prefix.isascii() and prefix.isdigit() and len(prefix) < 18):
            raise UserError(str(path), "no identity in its name", "<identity>_<anything>.jpg")
        labels.append(int(prefix))
    probes, matches = len(listed[0]), len(listed[1])
    label = np.full(len(paths), -1, np.int64)
    label[: probes + matches] = labels
    alone = np.flatnonzero(~np.isin(label[:probes], label[probes : probes + matches]))
    if len(alone):
        expected = "a match for every probe, since the protocol is closed-set"
        raise UserError(str(paths[alone[0]]), f"identity {label[alone[0]]} is not in the gallery", expected)

    def records() -> Iterator[Record]:
        for path in paths:
            yield Record(path.relative_to(parts[0].parent).as_posix(), -1, path, str(path))

    protocol = Identification(np.arange(probes), np.arange(probes, len(paths)), label)
    return Source("identification", str(root), len(paths), records, tuple(paths)), protocol


def _listed(part: Path) -> list[Path]:
    # TinyFace's distractors may be left out; probes and matches were looked for before.
    return visible(path for path in part.iterdir() if is_called_picture(path.name)) if part.is_dir() else []


def _table(file: Path, columns: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Read columns parted by spaces: `path` as text, coordinates and faceness as float64, all others as int64."""
    import pyarrow as pa
    from pyarrow import csv

    kinds = {
        name: pa.string() if name == "path" else pa.float64() if name[0] in "xyf" and name != "first" else pa.int64()
        for name in columns
    }
    try:
        table = csv.read_csv(
            file,
            csv.ReadOptions(column_names=list(columns)),
            csv.ParseOptions(delimiter=" ", quote_char=False),
            csv.ConvertOptions(column_types=kinds, strings_can_be_null=False),
        )
    except (OSError, pa.ArrowException) as error:
        text = " ".join(str(error).split())[:200]
        raise UserError(str(file), f"cannot be read ({text})", f"columns {' '.join(columns)}") from None
    for name in columns:
        if table.column(name).null_count:
            raise UserError(str(file), f"an empty {name}", "a value in every line")
    return {name: table.column(name).to_numpy() for name in columns}
