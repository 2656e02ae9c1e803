"""Recognition of evaluation sets of faces by their files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainkit.data import pairs_csv
from trainkit.data.formats import ijb, insightface_bin
from trainkit.data.record import Source
from trainkit.data.sources import repacked
from trainkit.data.storage.image_store import Packed, is_packed
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Protocol

_EXPECTED = "a pairs.csv or a folder with one, an InsightFace .bin, a template or TinyFace folder"


@dataclass(frozen=True)
class Evaluation:
    """An evaluation set that was found and not yet read, so that one packed earlier costs nothing."""

    kind: str
    where: str
    files: tuple[Path | str, ...]
    """Files and settings it is made of, to detect changes."""
    read: Callable[[], tuple[Source, Protocol]]


def recognise(path: Path) -> Evaluation:
    """Return the evaluation set at `path`. Raises UserError when it is none."""
    if not path.exists():
        raise UserError(str(path), "does not exist", _EXPECTED)
    if path.suffix == ".bin":
        return Evaluation("bin", str(path), (path,), lambda: insightface_bin.read_bin(path))
    if path.suffix == ".csv" or (path / "pairs.csv").is_file():
        file = path if path.suffix == ".csv" else path / "pairs.csv"
        return _read_now(pairs_csv.read_csv(file))
    if is_packed(path):
        return _read_now(_packed(path))
    if ijb.metadata(path):
        return _read_now(ijb.read_templates(path))
    if ijb.identification_parts(path):
        return _read_now(ijb.read_identification(path))
    raise UserError(str(path), "not an evaluation set", _EXPECTED)


def _read_now(found: tuple[Source, Protocol]) -> Evaluation:
    # The list of images is needed for noticing changes, and names them all.
    source = found[0]
    return Evaluation(source.kind, source.where, source.files, lambda: found)


def _packed(path: Path) -> tuple[Source, Protocol]:
    data = Packed(path)
    protocol = data.protocol()
    if protocol is None:
        raise UserError(str(path), "a training set", "an evaluation set")
    return repacked(data), protocol
