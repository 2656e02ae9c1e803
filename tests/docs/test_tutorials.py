"""The tutorials: their commands make recipes of data like that which they describe; test_outputs.py runs them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import organ_volumes
import people_sets
import scene_sets
from PIL import Image
from runs import ROOT, stripes

PAGES = sorted(page for page in (ROOT / "docs" / "tutorials").glob("*.md") if page.stem != "index")


def commands(page: Path) -> list[list[str]]:
    """The words of the commands of a page, in their order."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = "".join(text for kind, text in fenced if not kind).splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def nothing(home: Path) -> None:
    """The recipes of this page have data of their own."""


def pretrained(home: Path) -> None:
    """Weights at the place that the pages name; untrained ones do."""
    import timm
    from safetensors.torch import save_file

    (home / "pretrained").mkdir()
    encoder = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    save_file(encoder.state_dict(), home / "pretrained" / "tf_efficientnet_lite0.safetensors")


def flowers(home: Path) -> None:
    pretrained(home)
    for split in range(2):
        folder = home / "flowers" / ("train", "val")[split]
        stripes(folder, 20, split, (40, 48))
        for old, new in (("across", "airplane"), ("down", "frog")):
            (folder / old).rename(folder / new)
        shutil.rmtree(folder / "slanted")
    stripes(home / "new_images", 2, 4, (40, 48))


def shoes(home: Path) -> None:
    """Strokes on white in folders of folders, like those of Omniglot."""
    rng = np.random.default_rng(0)
    for kind in range(136):
        folder = home / "shoes" / ("Balinese", "Greek")[kind // 100] / f"character{kind + 1:02d}"
        folder.mkdir(parents=True)
        for n in range(20):
            pixels = np.full((32, 32), 255, np.uint8)
            pixels[(y := kind % 24 + rng.integers(4)) : y + 4, 2 + kind // 24 : 20] = 0
            pixels[31, :16] = rng.integers(0, 2, 16) * 255
            pixels[30, n] = pixels[30, 21 + kind % 11] = 0
            Image.fromarray(pixels).save(folder / f"{n:02d}.png")
    stripes(home / "new_images", 2, 3, (32, 32))


def faces(home: Path) -> None:
    for person, number in enumerate((10, 13, 19, *range(20, 30))):
        for n in range(4 + person % 2):
            people_sets.picture(home / "faces" / f"id{number:04d}" / f"{n}.png", 10 * person + n, (112, 112))
    people_sets.picture(home / "new_images" / "a.png", 1, (112, 112))


def streets(home: Path) -> None:
    pretrained(home)
    scene_sets.folders(home / "streets", 12, (64, 96), classes=7)
    names = ["sky", "building", "pole", "road", "pavement", "tree", "car"]
    (home / "streets" / "names.json").write_text(json.dumps(names))
    people_sets.picture(home / "new_images" / "a.jpg", 1, (64, 96))


def organs(home: Path) -> None:
    organ_volumes.put_set(home / "scans", 15, shape=(24, 20, 12))
    labels = {"background": 0, "anterior": 1, "posterior": 2}
    (home / "scans" / "dataset.json").write_text(json.dumps({"labels": labels}))
    organ_volumes.put_set(home / "others", 1, shape=(24, 20, 12))
    (home / "others" / "image").rename(home / "new_scans")


def crew(home: Path) -> None:
    """A folder of photographs for each person."""
    for person in range(12):
        for n in range(6):
            people_sets.picture(home / "crew" / f"p{person:02d}" / f"{n}.jpg", 10 * person + n, (64, 32))
    people_sets.picture(home / "new_images" / "a.png", 1, (64, 32))


DATA: dict[str, tuple[Callable[[Path], None], str]] = {
    "first-run": (nothing, "train={length: 6 steps, batch_size: 8, ema: 0.9}"),
    "images": (flowers, "train={length: 6 steps, batch_size: 8, ema: 0.9}"),
    "embeddings": (shoes, "train={length: 6 steps, batch_size: 8}"),
    "faces": (faces, "train={length: 6 steps, batch_size: 8}"),
    "segmentation": (streets, "train={length: 4 steps, batch_size: 4}"),
    "volumes": (organs, "train={length: 4 steps, batch_size: 2}"),
    "reid": (crew, "train={length: 4 steps, batch_size: 45, micro_batch: 45}"),
}
"""By page: the function that writes its data, and the override that makes its runs short."""

OWN_DATA = ["cp", "check", "run", "run", "compare", "export", "predict", "promote"]
"""Commands of every page but the first, in their order. That on images shows what the last one prints."""


def test_every_page_leads_in_eight_commands_from_data_to_two_compared_runs_and_a_served_model():
    assert {page.stem for page in PAGES} == set(DATA)
    for page in PAGES:
        every = commands(page)
        assert all(words[0] == "trainkit" for words in every) and len(every) <= 10, page
        (first, second), (one, other) = (
            [words for words in every if words[1] == "run"],
            next(words[2:] for words in every if words[1] == "compare"),
        )
        assert one == Path(first[2]).stem and f"name={other}" in second and f"log.experiment={one}" in second
        if page.stem == "first-run":
            assert [words[1] for words in every] == ["run", "show", "run", "compare"]
            continue
        every += [["trainkit", "promote", one]] if f"\n$ trainkit promote {one}\n" in page.read_text("utf-8") else []
        assert [words[1] for words in every] == OWN_DATA, page
        copied = every[0]
        assert (ROOT / "recipes" / f"{copied[2]}.yaml").is_file() and copied[4] == "--data"
        assert all(words[2] == copied[3] for words in every if words[1] in ("check", "run"))
        assert every[-3][2] == every[-2][2] == every[-1][2] == one
