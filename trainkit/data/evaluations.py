"""Which kind of evaluation set a path holds."""

from __future__ import annotations

from pathlib import Path

from trainkit.data import pairs
from trainkit.data.protocols import Protocol
from trainkit.data.sources import Source
from trainkit.errors import UserError

_EXPECTED = "a pairs.csv or a folder with one, an InsightFace .bin, a template folder or a TinyFace folder"


def recognise(path: Path) -> tuple[Source, Protocol]:
    """The pictures at `path` and how they are scored. Raises UserError when it is no evaluation set."""
    if not path.exists():
        raise UserError(str(path), "does not exist", _EXPECTED)
    if path.suffix == ".csv":
        return pairs.read_csv(path)
    if (path / "pairs.csv").is_file():
        return pairs.read_csv(path / "pairs.csv")
    raise UserError(str(path), "not an evaluation set", _EXPECTED)
