"""Tiny sets of people in each layout, for tests: images of noise, a few persons, files of a few hundred bytes."""

from __future__ import annotations

import csv
import functools
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

COLUMNS = ("path", "person", "camera", "modality", "text", "of")


def picture(path: Path, seed: int = 0, size: tuple[int, int] = (16, 8)) -> Path:
    """An image of noise, (height, width); one seed gives one image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_encoded(path.suffix, seed, size))
    return path


@functools.cache
def _encoded(suffix: str, seed: int, size: tuple[int, int]) -> bytes:
    pixels = np.random.default_rng([20251121, seed]).integers(0, 256, (*size, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, Image.registered_extensions()[suffix])
    return stream.getvalue()


def write_csv(
    file: Path, rows: Iterable[Iterable[object]], columns: Iterable[str] = COLUMNS, delimiter: str = ","
) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, delimiter=delimiter).writerows([columns, *rows])
    return file


def index_rows(root: Path, persons: Sequence[str], each: Sequence[int], seed: int = 0) -> list[tuple[str, ...]]:
    """Rows of an index in the order of `COLUMNS`, their images written: `each` counts rgb, nir, cp, sk, text."""
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


ORBENCH_LISTS = ("NIR", "CP", "SK", "TEXT", "NIR+TEXT", "TEXT+NIR", "NIR+CP+SK", "NIR+CP+SK+TEXT")
"""Of the 32 lists of the real file; the order of words is part of a name."""


def orbench(
    root: Path, train: int = 3, test: int = 2, rgb: int = 3, others: int = 2, lists: Sequence[str] = ORBENCH_LISTS
) -> Path:
    """ORBench: persons 0001 .. of train, then those of test; the numbers of either file begin anew."""
    kinds, number, people = ("vis", "nir", "cp", "sk"), 0, [f"{n:04d}" for n in range(1, train + test + 1)]
    for person in people:
        for kind in kinds:
            for n in range(rgb if kind == "vis" else others):
                picture(root / kind / person / f"{person}_{n}_{kind}.jpg", number := number + 1)
    write_json(
        root / "train_annos.json",
        [
            {"id": id, "file_path": f"vis/{p}/{p}_{n}_vis.jpg", "caption": f"Person {p} walks, image {n}."}
            for id, p in enumerate(people[:train], start=1)
            for n in range(rgb)
        ],
    )
    known = {"RGB_GALLERY": [[i, f"vis/{p}/{p}_{n}_vis.jpg"] for i, p in enumerate(people[train:]) for n in range(rgb)]}
    for key in lists:
        words = key.split("+")
        known[key] = [
            [
                i,
                *(
                    f"A caption of {p}, {n}." if w == "TEXT" else f"{w.lower()}/{p}/{p}_{n}_{w.lower()}.jpg"
                    for w in words
                ),
            ]
            for i, p in enumerate(people[train:])
            for n in range(others)
        ]
    write_json(root / "test_gallery_and_queries.json", known)
    return root


def challenge(root: Path, persons: int = 3) -> Path:
    """The challenge's form of ORBench: everything in `train/`, captions in `text_annos.json`."""
    orbench(root / "train", persons, 0, lists=())
    (root / "train" / "train_annos.json").rename(root / "train" / "text_annos.json")
    (root / "train" / "test_gallery_and_queries.json").unlink()
    return root


def market(root: Path, train: int = 3, test: int = 2, cameras: int = 2) -> Path:
    """Market-1501: junk and distractors in the gallery, and the file that Windows leaves in folders."""
    number = 0
    for place, person in enumerate(range(2, 2 + train + test)):
        for camera in range(1, cameras + 1):
            for n in range(2):
                name, number = f"{person:04d}_c{camera}s1_{n:06d}_01.jpg", number + 1
                picture(root / ("bounding_box_train" if place < train else "bounding_box_test") / name, number)
            if place >= train:
                picture(root / "query" / f"{person:04d}_c{camera}s1_{9:06d}_00.jpg", 10_000 + number)
    picture(root / "bounding_box_test" / "-1_c1s1_000401_03.jpg", 20_001)
    picture(root / "bounding_box_test" / "0000_c2s1_000151_01.jpg", 20_002)
    (root / "bounding_box_test" / "Thumbs.db").write_bytes(b"thumbs")
    return root


def write_text(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")
    return file


def write_json(file: Path, value: object) -> Path:
    return write_text(file, json.dumps(value))
