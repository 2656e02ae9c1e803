"""Every network of the recipes, traced by torch's compiler in a training: no graph break, and no recompile after it.

The first two updates and the evaluations after them are the warm-up; what comes then must find its graphs. Each training
accumulates gradients over two micro-batches, averages its weights, and evaluates both.
"""

from __future__ import annotations

import json
from pathlib import Path

import people_sets
import pytest
import torch
from dynamo_traces import FOLDER, count
from runs import ROOT, environment, run, spawn, stripes
from safetensors.torch import save_file

from tests.whole_runs.test_classification import CONVNEXT, pictures  # noqa: F401 - a fixture
from tests.whole_runs.test_classification import words as of_pictures
from tests.whole_runs.test_embedding import EYES, OMNIGLOT, crops  # noqa: F401
from tests.whole_runs.test_embedding import words as of_crops
from tests.whole_runs.test_reid import REID, sets  # noqa: F401
from tests.whole_runs.test_reid import words as of_sets
from tests.whole_runs.test_segmentation_2d import SEGMENT, streets  # noqa: F401
from tests.whole_runs.test_segmentation_2d import words as of_streets
from tests.whole_runs.test_segmentation_3d import TOM500, bodies  # noqa: F401
from tests.whole_runs.test_segmentation_3d import words as of_bodies
from trainkit.models import face_backbones

pytestmark = pytest.mark.usefixtures("store")
ADADISTILL, TEACHER = (ROOT / "recipes" / name for name in ("adadistill.yaml", "face_teacher.yaml"))
VIT = (
    "{model: vit_tiny_patch16_224, args: {depth: 2, embed_dim: 24, num_heads: 2, patch_size: 8}, embedding: 16, "
    "lora: {rank: 2}, drop_path: 0.1, text: {layers: 1, width: 16, heads: 2, dropout: 0.1}, "
    "fusion: {name: transformer, layers: 1, heads: 2, dropout: 0.1}}"
)
SLICES = "{name: slices, encoder: tu-resnet10t, decoder: unet, filters: [16, 8, 8]"


@pytest.fixture(scope="module")
def faces(tmp_path_factory):
    """Aligned faces of three people, pairs of them, and a teacher."""
    root = tmp_path_factory.mktemp("faces")
    for part, seed in (("train", 0), ("val", 1)):
        stripes(root / part, 12, seed)
    names = [f"{title}/{n:03d}.png" for title in ("across", "down", "slanted") for n in range(12)]
    pairs = [(a, b, int(a[0] == b[0])) for a, b in zip(names[::2], names[5::2], strict=False)]
    people_sets.write_csv(root / "val" / "pairs.csv", pairs, ("path_a", "path_b", "same"))
    torch.manual_seed(0)
    teacher = face_backbones.build(face_backbones.IResNetSpec(**FACE), (3, 32, 32))
    save_file(teacher.state_dict(), root / "teacher.safetensors")
    with environment(TRAINKIT_CACHE=tmp_path_factory.mktemp("cache")):
        yield root


FACE = {"name": "iresnet18", "embedding": 16, "width": 0.0625}


def of_faces(root, **changes: str) -> list[str]:
    teacher = f"{{net: {{name: iresnet18, embedding: 16, width: 0.0625}}, weights: {root}/teacher.safetensors}}"
    student = "{name: mobilefacenet, embedding: 16, width: 0.125}"
    settings = {"data.train": f"{root}/train", "data.evaluate": f"{{val: {root}/val/pairs.csv}}", "data.image_size": "32"}
    if "task.net" not in changes:
        settings |= {"task.student": student, "task.teacher": teacher}
    return [f"{key}={value}" for key, value in (settings | changes).items()]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """People who differ in how many records they have of each modality, and in which they have none."""
    root = tmp_path_factory.mktemp("mixed")
    for part, names in (("train", "abcdefghi"), ("val", "wxyz")):
        rows = []
        for n, name in enumerate(names):
            each = (3, 1 + n % 3, n % 2, 1, 1 + n % 2)
            rows += people_sets.index_rows(root / part, [part + name], each, seed=n + 100 * (part == 'val'))
        people_sets.write_csv(root / part / "index.csv", rows)
    with environment(TRAINKIT_CACHE=tmp_path_factory.mktemp("cache")):
        yield root


def cases():
    """Name to recipe, fixture, settings of the fixture, batch, evaluations, and other settings."""
    val, sized = "{val: {every: 2 steps}}", "{val: {every: 2 steps, batch_size: 2}}"
    volumes = "{val: {every: 2 steps}, patches: {split: val.patches, every: 2 steps, batch_size: 8}}"
    cpu_half = {"train.precision": "bf16"}
    everywhere = {"task.points": "null", "task.objective": "{ohem: {}, dice: 0.5, lovasz: 0.5, boundary: 0.5, near: {}}"}
    slow = pytest.mark.slow
    yield "convnext", CONVNEXT, "pictures", of_pictures, 12, val, {}, ()
    yield "convnext in bf16", CONVNEXT, "pictures", of_pictures, 12, val, cpu_half, slow
    yield "eye_convnext", EYES, "crops", of_crops, 10, "{val: {every: 2 steps}, separation: {split: val.separation, every: 2 steps}}", {}, slow
    yield "eye_baseline", EYES, "crops", of_crops, 10, val, {"task.net": "{name: eye_baseline, base_channels: 16, num_blocks: 2, head: avg}"}, ()
    yield "omniglot", OMNIGLOT, "crops", of_crops, 10, val, {"task.net": "{name: eye_baseline, base_channels: 16, num_blocks: 2, head: avg, embedding: 16}", "task.class_weights": "{}", "task.margin": "{name: adaface}", "data.hold_out": "null", "data.open_set": "false"}, slow
    yield "adadistill", ADADISTILL, "faces", of_faces, 8, val, {}, ()
    yield "adadistill, teacher asked", ADADISTILL, "faces", of_faces, 8, val, {"task.cache_teacher": "false"}, slow
    yield "face_teacher", TEACHER, "faces", of_faces, 8, val, {"task.net": "{name: iresnet18, embedding: 16, width: 0.0625}"}, slow
    yield "face_teacher, adaface", TEACHER, "faces", of_faces, 8, val, {"task.net": "{name: ir18, embedding: 16, width: 0.0625}", "task.margin": "{name: adaface}"}, slow
    yield "reid", REID, "sets", of_sets, 20, val, {}, ()
    yield "reid, vit", REID, "sets", of_sets, 20, val, {"task.net": VIT}, slow
    yield "reid, mixed", REID, "mixed", of_sets, 20, val, {}, slow
    yield "reid, vit, mixed", REID, "mixed", of_sets, 20, val, {"task.net": VIT}, slow
    yield "bisenetv2", SEGMENT, "streets", of_streets, 4, sized, {}, ()
    yield "bisenetv2, scales", SEGMENT, "streets", of_streets, 4, "{multi: {split: val.mscf, batch_size: 2, every: 2 steps}}", {}, slow
    yield "bisenetv1", SEGMENT, "streets", of_streets, 4, sized, {"task.net": "{name: bisenetv1, width: 0.125, encoder: resnet10t}"}, slow
    yield "smp", SEGMENT, "streets", of_streets, 4, sized, {"task.net": "{name: smp, encoder: tu-resnet10t, decoder: unet, args: {decoder_channels: [16, 16, 8, 8, 8]}}"}, slow
    yield "group norm", SEGMENT, "streets", of_streets, 4, sized, {"task.norm": "{name: group}", **everywhere}, slow
    yield "unet", TOM500, "bodies", of_bodies, 4, volumes, {}, ()
    yield "dynunet", TOM500, "bodies", of_bodies, 4, volumes, {"data.patch": "[8, 32, 32]", "task.net": "{name: dynunet, filters: [4, 8, 16, 16]}"}, slow
    yield "segresnet", TOM500, "bodies", of_bodies, 4, volumes, {"data.patch": "[8, 32, 32]", "task.net": "{name: segresnet, filters: 8, blocks: [1, 1, 1]}"}, slow
    yield "slices", TOM500, "bodies", of_bodies, 4, volumes, {"data.patch": "[8, 32, 32]", "task.net": SLICES + "}"}, slow
    yield "slices 2.5-D", TOM500, "bodies", of_bodies, 4, volumes, {"data.patch": "[8, 32, 32]", "task.net": SLICES + ", neighbours: 1}"}, slow
    yield "emcad", TOM500, "bodies", of_bodies, 4, volumes, {"data.patch": "[8, 32, 32]", "task.net": "{name: emcad, encoder: pvt_v2_b0}"}, slow


PLAIN = {"best": "null", "stop_when": "null", "time_to": "{}", "checkpoints": "{every: null}"}
CASES = {name: rest for name, *rest, _ in cases()}


def given(name: str, folder: Path) -> tuple[Path, list[str]]:
    """The recipe of a case, and its words."""
    recipe, _, words, batch, evaluations, more = CASES[name]
    train = f"{{length: 6 steps, batch_size: {batch}, micro_batch: {batch // 2}, ema: 0.9, compile: default"
    train += f", precision: {more['train.precision']}}}" if "train.precision" in more else "}"
    changes = PLAIN | {"train": train, "evaluations": evaluations, "log": "{every: 2 steps, system_every: null, ceilings: 'off'}"}
    return recipe, words(folder, **(changes | {k: v for k, v in more.items() if k != "train.precision"}))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, *_, marks in cases()])
def test_no_graph_break_and_no_recompile_after_the_warm_up(name, request, monkeypatch):
    recipe, words = given(name, request.getfixturevalue(CASES[name][1]))
    import time
    t = time.process_time()
    traced = count(monkeypatch.setattr)
    assert run(*words, recipe=recipe).code == 0
    print("CASE", name, traced, time.process_time() - t)
    assert traced.clean, traced
