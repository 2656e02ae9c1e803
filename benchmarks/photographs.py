"""Compare fine-tuning with a linear probe, and both with sklearn, on small sets of real photographs.

    python -m benchmarks.photographs                  measure what is not measured yet, a row for each run
    ... --side 64 --show                              print the table of the rows that are there alone
    ... --seeds 0 1 --sets cifar --side 64            some rows alone

For each seed images are drawn anew from the sets of `../shared/data`, and a recipe is made of them by
`trainkit cp convnext --data`. Rows go to build/measured/photographs.jsonl; a row that is there is not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
KEPT = ROOT / "build" / "measured" / "photographs.jsonl"
"""Rows that were measured, unless another file is named."""
PEDESTRIAN, BICYCLIST = 9, 10
"""Labels of CamVid."""
Drawn = Iterator[tuple[str, str, str, "Path | Image.Image"]]
"""Part of a set, class, name, and the image or its file."""


def cifar(rng: np.random.Generator, classes: tuple[str, ...] = (), train: int = 24, val: int = 20) -> Drawn:
    """Yield images of 32 px of ten kinds of things and animals, or of some of them."""
    for part, folder, count in (("train", "train", train), ("val", "test", val)):
        for place in sorted((SHARED / "cls_cifar10" / folder).iterdir()):
            files = sorted(place.iterdir())
            if not classes or place.name in classes:
                yield from ((part, place.name, files[n].name, files[n]) for n in rng.permutation(len(files))[:count])


def cats(rng: np.random.Generator) -> Drawn:
    """Yield images of cats and dogs."""
    return cifar(rng, ("cat", "dog"), 120, 100)


def people(rng: np.random.Generator) -> Drawn:
    """Yield aligned faces of 112 px of ten people."""
    places = [place for place in sorted((SHARED / "faces_lfw112" / "train").iterdir()) if len(os.listdir(place)) >= 40]
    for place in (places[n] for n in rng.permutation(len(places))[:10]):
        files = sorted(place.iterdir())
        for row, n in enumerate(rng.permutation(len(files))[:40]):
            yield "train" if row < 24 else "val", place.name, files[n].name, files[n]


def streets(rng: np.random.Generator) -> Drawn:
    """Yield crops of 160 px of street scenes: with people (2 % of the pixels or more, or bicyclists), or without."""
    for part, count in (("train", 120), ("val", 75)):
        crops: dict[str, list[tuple[str, Image.Image]]] = {"people": [], "nobody": []}
        for file in sorted((SHARED / "seg_camvid" / part).iterdir()):
            mask = np.asarray(Image.open(SHARED / "seg_camvid" / f"{part}annot" / file.name))
            image = Image.open(file).convert("RGB")
            for x in (0, 160, 320):
                for y in (40, 200):
                    share = np.isin(mask[y : y + 160, x : x + 160], (PEDESTRIAN, BICYCLIST)).mean()
                    if share == 0 or share >= 0.02:
                        name = "people" if share else "nobody"
                        crops[name].append((f"{file.stem}_{x}_{y}.png", image.crop((x, y, x + 160, y + 160))))
        for name, found in crops.items():
            yield from ((part, name, *found[n]) for n in rng.permutation(len(found))[:count])


SETS: dict[str, Callable[[np.random.Generator], Drawn]] = {
    "cifar": cifar,
    "cats": cats,
    "people": people,
    "streets": streets,
}

VARIANTS: dict[str, tuple[str, ...]] = {"fine-tuned": (), "from zeros": ("task.net.probe=false",)}
"""Trainings, and what they change in the recipe that `cp` writes."""
PEER = "sklearn"


def draw(name: str, seed: int, folder: Path) -> None:
    """Write the images of a set for a seed as <part>/<class>/<name>."""
    for part, label, file, image in SETS[name](np.random.default_rng(seed)):
        place = folder / part / label
        place.mkdir(parents=True, exist_ok=True)
        if isinstance(image, Path):
            shutil.copy(image, place / file)
        else:
            image.save(place / file)


def cpu_seconds() -> float:
    """Processor time of this process and of those it waited for."""
    return sum(os.times()[:4])


def peer(folder: Path, side: int) -> dict[str, float]:
    """Score sklearn's logistic regression, with its defaults, on features of timm's network as it is pretrained."""
    import timm
    import torch
    from safetensors.torch import load_file
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    net: Any = timm.create_model("tf_efficientnet_lite0")
    net.load_state_dict(load_file(SHARED / "pretrained" / "tf_efficientnet_lite0.safetensors"))
    net.reset_classifier(0)
    net.eval()

    def features(part: str) -> tuple[np.ndarray, list[str]]:
        files = sorted((folder / part).glob("*/*"))
        found = []
        for start in range(0, len(files), 16):
            images = [Image.open(file).convert("RGB") for file in files[start : start + 16]]
            pixels = np.stack([np.asarray(image.resize((side, side), Image.Resampling.BICUBIC)) for image in images])
            with torch.inference_mode():
                found.append(net(torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1).numpy())
        return np.concatenate(found), [file.parent.name for file in files]

    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(*features("train"))
    return {"score": model.score(*features("val"))}


def trained(recipe: Path, variant: str, seed: int) -> dict[str, float]:
    """Train the recipe; top-1 of its probe, last and best weights, and of the trivial baseline."""
    from trainkit import api
    from trainkit.tracking import journal

    run = api.train(recipe, [f"seed={seed}", *VARIANTS[variant]])
    found = journal.read(run.folder.journal).metrics
    points = found["val/top1"]
    best = max(points, key=lambda point: point.value)
    row = {"score": points[-1].value, "best": best.value, "best_step": best.step, "evaluations": len(points)}
    for key, metric in (("probe", "probe/val/top1"), ("trivial", "baseline/val/top1")):
        row |= {key: found[metric][-1].value} if metric in found else {}
    return row


def measure(name: str, seed: int, side: int, variants: list[str], kept: Path) -> None:
    """Measure a set of a seed, and keep a row for each variant."""
    from trainkit.autoconfig import fine_tuning, forecast, new_recipe

    forecasts: list[float] = []
    seconds = forecast.seconds

    def recorded(pace: forecast.Pace, length: forecast.Length) -> float:
        found = seconds(pace, length)
        forecasts.extend([found] if pace == pace.idle else [])
        return found

    fine_tuning.SIZES, forecast.seconds = (side,), recorded
    draw(name, seed, Path(name))
    recipe = Path(f"{name}.yaml")
    new_recipe.copy(ROOT / "recipes" / "convnext.yaml", recipe, data=name)
    forecast.seconds = seconds
    for variant in variants:
        began, wall, load = cpu_seconds(), time.perf_counter(), os.getloadavg()[0]
        found = peer(Path(name), side) if variant == PEER else trained(recipe, variant, seed)
        row = {"set": name, "seed": seed, "side": side, "variant": variant, **found}
        row |= {"cpu_s": round(cpu_seconds() - began, 1), "wall_s": round(time.perf_counter() - wall, 1), "load": load}
        row |= {} if variant == PEER else {"forecast_s": round(forecasts[0], 1)}
        with kept.open("a") as file:
            file.write(json.dumps(row) + "\n")


def rows(kept: Path) -> list[dict[str, Any]]:
    """Return the rows that are measured."""
    return [json.loads(line) for line in kept.read_text().splitlines()] if kept.is_file() else []


def table(side: int, kept: Path) -> Iterator[str]:
    """Yield the table of a size, a row for each set: mean and standard deviation over seeds.

    The interval is Student's, 95 %, of the difference between the last weights and the probe of the same seed.
    """
    yield "| set | seeds | trivial | sklearn | probe | fine-tuned, last | best | last - probe | CPU s |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name in SETS:
        here = [row for row in rows(kept) if (row["side"], row["set"]) == (side, name)]
        library = {row["seed"]: row["score"] for row in here if row["variant"] == PEER}
        tuned = {row["seed"]: row for row in here if row["variant"] == "fine-tuned" and row["seed"] in library}
        if not tuned:
            continue
        column = {key: np.asarray([row[key] for row in tuned.values()]) for key in next(iter(tuned.values()))}
        more, count = column["score"] - column["probe"], len(tuned)
        scores = [column["trivial"], np.asarray([library[seed] for seed in tuned])]
        scores += [column[key] for key in ("probe", "score", "best")]
        cells = [f"{one.mean():.3f}" + (f" ± {one.std(ddof=1):.3f}" if count > 1 else "") for one in scores]
        difference = f"{more.mean():+.3f}"
        if count > 1:
            half = stats.t.ppf(0.975, count - 1) * more.std(ddof=1) / count**0.5
            difference += f" ({more.mean() - half:+.3f} to {more.mean() + half:+.3f})"
        yield f"| {' | '.join([name, str(count), *cells, difference, format(column['cpu_s'].mean(), '.0f')])} |"


def main() -> None:
    """Measure what is asked for and not measured yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--variants", nargs="+", choices=[PEER, *VARIANTS], default=[PEER, "fine-tuned"])
    parser.add_argument("--side", type=int, default=160, help="image size in pixels; `cp` chooses 160 for these sets")
    parser.add_argument("--show", action="store_true", help="print the table of the rows that are there")
    parser.add_argument("--rows", type=Path, default=KEPT, help="file of the rows, JSON lines")
    asked = parser.parse_args()
    kept, side = asked.rows.absolute(), asked.side
    kept.parent.mkdir(parents=True, exist_ok=True)
    for seed in () if asked.show else asked.seeds:
        for name in asked.sets:
            done = {r["variant"] for r in rows(kept) if (r["set"], r["seed"], r["side"]) == (name, seed, side)}
            left = [variant for variant in asked.variants if variant not in done]
            with tempfile.TemporaryDirectory() as home, contextlib.chdir(home):
                os.environ["TRAINKIT_STORE"] = f"{home}/store"
                Path("pretrained").symlink_to(SHARED / "pretrained")
                if left:
                    measure(name, seed, side, left, kept)
    print(*table(side, kept), sep="\n")


if __name__ == "__main__":
    main()
