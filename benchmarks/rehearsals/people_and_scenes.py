"""ORBench's counts of people in five modalities, and Cityscapes' of scenes of 1024 x 2048 with masks and distance maps.

    python -m benchmarks.rehearsals.people_and_scenes --scale 0.01|0.1|1 [--home FOLDER] [--only SIDE ...]

People: 1,000 with 45 photographs, 26 near-infrared images, 18 paintings, 18 sketches and 45 captions each, in an index
of a row a record; images are hard links to 500 tiny JPEG files. Read by the sampler of `reid_orbench`; 400 of them are
looked for with queries of the 15 subsets of modalities, by random features of 512 numbers, beside numpy in the usual
way: all cosines, sorted, and precision at each match. Scenes: 2,975 and 500 PNG images with 19 classes, hard links to
eight; an epoch of crops of 512 x 1024, beside Pillow, which decodes image and mask for each crop.
"""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rehearsals import measuring
from benchmarks.rehearsals.measuring import Found, each, once, opens, pictures

EACH = {"rgb": 45, "nir": 26, "cp": 18, "sk": 18}
PEOPLE, SEARCHED, FEATURES, BLOCK = 1000, 0.4, 512, (64, 5)
SCENES, SIZE, CROP, CLASSES, DRAWN = {"train": 2975, "val": 500}, (1024, 2048), (512, 1024), 19, 8


def write_people(scale: float, folder: Path) -> None:
    people = max(200, int(PEOPLE * scale))
    (folder / "drawn").mkdir()
    for number, data in enumerate(pictures(500, 64)):
        (folder / "drawn" / f"{number}.jpg").write_bytes(data)
    with (folder / "index.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "person", "modality", "camera", "split", "text", "of"])
        for person in range(people):
            split = "test" if person < SEARCHED * people else "train"
            own = folder / "images" / f"{person:04d}"
            own.mkdir(parents=True)
            for kind, count in EACH.items():
                for k in range(count):
                    path = f"images/{person:04d}/{kind}_{k}.jpg"
                    os.link(folder / "drawn" / f"{(person * 131 + k * 7 + len(kind)) % 500}.jpg", folder / path)
                    rows.writerow([path, person, kind, k % 6, split, "", ""])
                    if kind == "rgb":
                        said = f"person {person} in a coat of colour {k} walks past camera {k % 6}"
                        rows.writerow(["", person, "text", k % 6, split, said, path])


def write_scenes(scale: float, folder: Path) -> None:
    from PIL import Image

    drawn = folder / "drawn"
    drawn.mkdir()
    for k in range(DRAWN):
        rng = np.random.default_rng(k)
        blocks = Image.fromarray(rng.integers(0, CLASSES, (16, 32), dtype=np.uint8))
        blocks.resize(SIZE[::-1], Image.Resampling.NEAREST).save(drawn / f"mask{k}.png")
        coarse = Image.fromarray(rng.integers(0, 256, (32, 64, 3), dtype=np.uint8))
        coarse.resize(SIZE[::-1], Image.Resampling.BICUBIC).save(drawn / f"image{k}.png", compress_level=1)
    for split, count in SCENES.items():
        for part, name in (("", "image"), ("annot", "mask")):
            (folder / f"{split}{part}").mkdir()
            for row in range(max(4, int(count * scale))):
                os.link(drawn / f"{name}{row % DRAWN}.png", folder / f"{split}{part}" / f"{row:05d}.png")


def make(home: Path, scale: float) -> None:
    once(home / "people", partial(write_people, scale))
    once(home / "scenes", partial(write_scenes, scale))


def open_people(home: Path) -> tuple[Any, str]:
    from trainkit.data.people.dataset import People
    from trainkit.data.people.pk_sampler import Pairs
    from trainkit.data.storage import image_store

    image_store.DECODED_LIMIT = 0  # encoded, as sets of gigabytes are
    index, sampler = home / "people" / "index.csv", Pairs(people=BLOCK[0], each=BLOCK[1])
    sets = {"train": f"{index}#train", "evaluate": {"test": f"{index}#test"}}
    data = People(**sets, image_size=64, leakage="allow", sampler=sampler).open(0)
    return data, f"{data.train.size:,} draws an epoch"


def people_read(home: Path, scale: float) -> Found:
    split = opens(open_people, "cache-people", False, home, scale).kept.train
    began, block = time.process_time(), BLOCK[0] * BLOCK[1]
    order = split.order(0, block)
    for row in range(len(order)):
        split.fetch(order[row, 0:block], 0)
    return Found(each(len(order), f"batches of {BLOCK[0]} x {BLOCK[1]}", began))


def _search(home: Path, scale: float) -> tuple[Any, np.ndarray]:
    protocol = opens(open_people, "cache-people", False, home, scale).kept.evaluations["test"].protocol
    rng = np.random.default_rng(0)
    people = rng.standard_normal((int(protocol.person.max()) + 1, FEATURES), dtype=np.float32)
    return protocol, people[protocol.person] + 3 * rng.standard_normal((len(protocol), FEATURES), dtype=np.float32)


def searched(home: Path, scale: float) -> Found:
    from trainkit.metrics.reid import score_search

    protocol, features = _search(home, scale)
    scores = score_search(features, protocol, lambda one, there: (one * there[..., None]).sum(1))
    return Found(_said(protocol, scores.metrics))


def _said(protocol: Any, values: Any) -> str:
    queries, mean = (
        sum(map(len, protocol.queries.values())),
        np.mean([values[f"{name}.map"] for name in protocol.queries]),
    )
    return f"{queries:,} queries in {len(protocol.queries)} lists, gallery {len(protocol.gallery):,}; mAP {mean:.4f}"


def searched_by_numpy(home: Path, scale: float) -> Found:
    protocol, features = _search(home, scale)
    gallery = features[protocol.gallery] / np.linalg.norm(features[protocol.gallery], axis=1, keepdims=True)
    who, place, means = protocol.person[protocol.gallery], protocol.place[protocol.gallery], {}
    for name, every in protocol.queries.items():
        precisions: list[float] = []
        for rows in np.split(every, range(1000, len(every), 1000)):
            asked = (features[rows] * (rows >= 0)[..., None]).sum(1)
            order = np.argsort(-(asked @ gallery.T), axis=1, kind="stable")
            for row, ranked in zip(rows, order, strict=True):
                own = row[row >= 0]
                same = who[ranked] == protocol.person[own[0]]
                match = same[~(same & np.isin(place[ranked], protocol.place[own]))]
                if match.any():
                    precisions.append(float((np.cumsum(match)[match] / (np.flatnonzero(match) + 1)).mean()))
        means[f"{name}.map"] = np.mean(precisions)
    return Found(_said(protocol, means))


def open_scenes(home: Path) -> tuple[Any, str]:
    from trainkit.data.scenes.boundary_distance import Distance
    from trainkit.data.scenes.dataset import Scenes

    root, names = home / "scenes", [f"class {k}" for k in range(CLASSES)]
    sets = {"train": f"{root}#train", "evaluate": {"val": f"{root}#val"}}
    data = Scenes(**sets, names=names, crop=CROP, leakage="allow", distance=Distance()).open(0)
    return data, f"{data.train.size:,} + {data.evaluations['val'].size:,} scenes"


def crops(home: Path, scale: float) -> Found:
    split, began = opens(open_scenes, "cache-scenes", False, home, scale).kept.train, time.process_time()
    for row in split.order(0, 1)[:, 0]:
        split.fetch(np.asarray([row]), 0)
    return Found(each(split.size, "crops", began))


def crops_by_pillow(home: Path, scale: float) -> Found:
    from PIL import Image

    def one() -> Iterator[np.ndarray]:
        rng, (height, width) = np.random.default_rng(0), CROP
        for file in sorted((home / "scenes" / "train").iterdir()):
            top, left = (int(rng.integers(0, side - part)) for side, part in zip(SIZE, CROP, strict=True))
            for path in (file, home / "scenes" / "trainannot" / file.name):
                with Image.open(path) as opened:
                    yield np.asarray(opened.crop((left, top, left + width, top + height)))

    began, seen = time.process_time(), sum(1 for _ in one())
    return Found(each(seen // 2, "crops", began))


SIDES: measuring.Sides = {
    "people, packed": ("decoding by Pillow", partial(opens, open_people, "cache-people", True)),
    "people, opened again": ("rows of the index, in Python", partial(opens, open_people, "cache-people", False)),
    "people, an epoch of batches": ("decoding", people_read),
    "15 subsets, scored": ("products, ranking", searched),
    "numpy, 15 subsets": ("sorting", searched_by_numpy),
    "scenes, packed": ("decoding, distances", partial(opens, open_scenes, "cache-scenes", True)),
    "scenes, opened again": ("hashing", partial(opens, open_scenes, "cache-scenes", False)),
    "scenes, an epoch of crops": ("decoding", crops),
    "Pillow, an epoch of crops": ("decoding", crops_by_pillow),
}

if __name__ == "__main__":
    measuring.main(__doc__, "people_and_scenes", make, SIDES)
