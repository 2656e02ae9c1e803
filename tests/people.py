"""Tiny sets of people in each layout, for tests: pictures of noise, a few persons, files of a few hundred bytes."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

COLUMNS = ("path", "person", "camera", "modality", "text", "of")


def picture(path: Path, seed: int = 0, size: tuple[int, int] = (16, 8)) -> Path:
    """A picture of noise, (height, width); one seed gives one picture."""
    pixels = np.random.default_rng([20251121, seed]).integers(0, 256, (*size, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def write_csv(file: Path, rows: Iterable[Sequence[object]], columns: Sequence[str] = COLUMNS) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([columns, *rows])
    return file


def index_rows(root: Path, persons: Sequence[str], each: Sequence[int], seed: int = 0) -> list[tuple[str, ...]]:
    """Rows of an index in the order of `COLUMNS`, their pictures written: `each` counts rgb, nir, cp, sk, text."""
    rows, number = [], seed * 100_003
    for place, person in enumerate(persons):
        for modality, count in zip(("rgb", "nir", "cp", "sk"), each, strict=False):
            for n in range(count):
                path = f"{modality}/{person}/{n}.png"
                picture(root / path, number := number + 1)
                rows.append((path, person, f"c{n % 2}", modality, "", ""))
        for n in range(each[4] if len(each) > 4 else 0):
            of = f"rgb/{person}/{n}.png" if n < each[0] else ""
            rows.append(("", person, "", "text", f"person {place} in coat {place % 3}, view {n}", of))
    return rows


def index(root: Path, persons: Sequence[str] | int = 4, each: Sequence[int] = (3, 2, 1, 1, 2), seed: int = 0) -> Path:
    """A folder with an `index.csv` of persons who all have the same numbers of records."""
    names = [f"p{n:02d}" for n in range(persons)] if isinstance(persons, int) else persons
    write_csv(root / "index.csv", index_rows(root, names, each, seed))
    return root
