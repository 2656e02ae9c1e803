"""Files of COCO's form, and the images that they name."""

from __future__ import annotations

import json
from pathlib import Path

import scene_sets

SIZE = (24, 32)
CATEGORIES = [{"id": 7, "name": "car"}, {"id": 3, "name": "person"}]


def box(x: float, y: float, width: float, height: float) -> list[float]:
    """A rectangle as a polygon of COCO."""
    return [x, y, x + width, y, x + width, y + height, x, y + height]


def annotation(category: int = 3, image: int = 0, **said) -> dict:
    return {"image_id": image, "category_id": category, "segmentation": [box(2, 3, 10, 5)], "iscrowd": 0} | said


def content(annotations: list, images: int = 1, **said) -> dict:
    named = [{"id": n, "file_name": f"p{n}.png", "height": SIZE[0], "width": SIZE[1]} for n in range(images)]
    return {"images": named, "annotations": annotations, "categories": CATEGORIES} | said


def written(folder: Path, said: object, name: str = "set.json") -> Path:
    """A file of COCO's form, and the images that it may name."""
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(4):
        scene_sets.put(folder / f"p{n}.png", scene_sets.scene(n, SIZE)[0])
    (folder / name).write_text(said if isinstance(said, str) else json.dumps(said))
    return folder / name
