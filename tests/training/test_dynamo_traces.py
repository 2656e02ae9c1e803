"""Every network of the recipes, traced by torch's compiler in a training: no graph break, and no recompile.

The first two updates and the evaluations after them are the warm-up; what comes then must find its graphs. Each
training accumulates gradients over two micro-batches, averages its weights, and evaluates both.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import people_sets
import pytest
import torch
from dynamo_traces import FOLDER, Traced, count
from runs import PLUGIN, ROOT, environment, run, spawn, stripes
from safetensors.torch import load_file, save_file

from tests.whole_runs.test_classification import CONVNEXT, pictures  # noqa: F401 - a fixture
from tests.whole_runs.test_classification import words as of_pictures
from tests.whole_runs.test_embedding import EYES, OMNIGLOT, crops, strange  # noqa: F401
from tests.whole_runs.test_embedding import words as of_crops
from tests.whole_runs.test_reid import REID, TINY, sets  # noqa: F401
from tests.whole_runs.test_reid import words as of_sets
from tests.whole_runs.test_segmentation_2d import SEGMENT, streets  # noqa: F401
from tests.whole_runs.test_segmentation_2d import words as of_streets
from tests.whole_runs.test_segmentation_3d import TOM500, bodies  # noqa: F401
from tests.whole_runs.test_segmentation_3d import words as of_bodies
from trainkit.models import face_backbones
from trainkit.models.compilation import compile_in_place
from trainkit.models.network_specs import IResNetSpec

pytestmark = pytest.mark.usefixtures("store", "unsent")
ADADISTILL, TEACHER = (ROOT / "recipes" / name for name in ("adadistill.yaml", "face_teacher.yaml"))
VIT = (
    "{model: vit_tiny_patch16_224, args: {depth: 2, embed_dim: 24, num_heads: 2, patch_size: 8}, embedding: 16, "
    "lora: {rank: 2}, drop_path: 0.1, text: {layers: 1, width: 16, heads: 2}, "
    "fusion: {name: transformer, layers: 1, heads: 2}}"
)
IRESNET = "{name: iresnet18, embedding: 16, width: 0.0625}"
IR = "{name: ir18, embedding: 16, width: 0.0625}"
SMP = "{name: smp, encoder: tu-resnet10t, decoder: unet, args: {decoder_channels: [16, 16, 8, 8, 8]}}"


@pytest.fixture(autouse=True)
def _compiled_anew():
    """Leave nothing of what was compiled to other tests."""
    yield
    torch._dynamo.reset()


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
    spec = IResNetSpec(name="iresnet18", embedding=16, width=0.0625)
    teacher = face_backbones.build(spec, (3, 32, 32))
    save_file(teacher.state_dict(), root / "teacher.safetensors")
    with environment(TRAINKIT_CACHE=tmp_path_factory.mktemp("cache")):
        yield root


def of_faces(root, **changes: str) -> list[str]:
    settings = {
        "data.train": f"{root}/train",
        "data.evaluate": f"{{val: {root}/val/pairs.csv}}",
        "data.image_size": "32",
    }
    if "task.net" not in changes:
        settings["task.student"] = "{name: mobilefacenet, embedding: 16, width: 0.125}"
        settings["task.teacher"] = f"{{net: {IRESNET}, weights: {root}/teacher.safetensors}}"
    return [f"{key}={value}" for key, value in (settings | changes).items()]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """People who differ in how many records they have of each modality, and in which they have none."""
    root = tmp_path_factory.mktemp("mixed")
    for part, names in (("train", "abcdefghi"), ("val", "wxyz")):
        rows = []
        for n, name in enumerate(names):
            each = (3, 1 + n % 3, n % 2, 1, 1 + n % 2)
            rows += people_sets.index_rows(root / part, [part + name], each, seed=n + 100 * (part == "val"))
        people_sets.write_csv(root / part / "index.csv", rows)
    with environment(TRAINKIT_CACHE=tmp_path_factory.mktemp("cache")):
        yield root


SMALL_EYES = "{name: eye_baseline, base_channels: 16, num_blocks: 2, head: avg, embedding: 16}"
TERMS = "{ohem: {}, dice: 0.5, lovasz: 0.5, near: {}}"
VAL, IN_TWOS = "{val: {every: 2 steps}}", "{val: {every: 2 steps, batch_size: 2}}"
VOLUMES = "{val: {every: 2 steps}, patches: {split: val.patches, every: 2 steps, batch_size: 8}}"
SEPARATION = "{val: {every: 2 steps}, separation: {split: val.separation, every: 2 steps}}"
SCALES = "{multi: {split: val.mscf, batch_size: 2, every: 2 steps}}"


def of_others(root, **changes: str) -> list[str]:
    """Omniglot's words, other settings in their place."""
    words = {word.partition("=")[0]: word for word in strange(root)}
    return list((words | {key: f"{key}={value}" for key, value in changes.items()}).values())


def patch(net: str) -> dict[str, str]:
    return {"data.patch": "[8, 32, 32]", "task.net": net}


IMAGES, CROPS, FACES = (CONVNEXT, "pictures", of_pictures, 12), (EYES, "crops", of_crops, 10), ("faces", of_faces, 8)
PEOPLE, SCENES, ORGANS = ("sets", of_sets, 20), (SEGMENT, "streets", of_streets, 4), (TOM500, "bodies", of_bodies, 4)
CASES = {
    "convnext": (*IMAGES, VAL, {}),
    "convnext in bf16": (*IMAGES, VAL, {"train.precision": "bf16"}),
    "eye_convnext": (*CROPS, SEPARATION, {}),
    "eye_baseline": (*CROPS, VAL, {"task.net": SMALL_EYES}),
    "omniglot": (OMNIGLOT, "crops", of_others, 10, "{unseen: {split: unseen.retrieval, every: 2 steps}}", {}),
    "adadistill": (ADADISTILL, *FACES, VAL, {}),
    "adadistill, asking the teacher": (ADADISTILL, *FACES, VAL, {"task.cache_teacher": "false"}),
    "face_teacher, ir18": (TEACHER, *FACES, VAL, {"task.net": IR, "task.margin": "{name: adaface}"}),
    "reid": (REID, *PEOPLE, VAL, {}),
    "reid, vit, mixed": (REID, "mixed", *PEOPLE[1:], VAL, {"task.net": VIT}),
    "bisenetv2": (*SCENES, IN_TWOS, {}),
    "bisenetv2, scales": (*SCENES, SCALES, {}),
    "bisenetv1": (*SCENES, IN_TWOS, {"task.net": "{name: bisenetv1, width: 0.125, encoder: resnet10t}"}),
    "smp": (*SCENES, IN_TWOS, {"task.net": SMP}),
    "group norm": (*SCENES, IN_TWOS, {"task.norm": "{name: group}", "task.points": "null", "task.objective": TERMS}),
    "unet": (*ORGANS, VOLUMES, {}),
    "dynunet": (*ORGANS, VOLUMES, patch("{name: dynunet, filters: [4, 8, 16, 16]}")),
    "emcad": (*ORGANS, VOLUMES, patch("{name: emcad, encoder: pvt_v2_b0, neighbours: 1}")),
}
"""Name to recipe, fixture, words of the fixture, batch size, evaluations, and other settings."""
SOME = ("eye_baseline", "unet")


def quick(names: Iterable[str], some: Container[str]) -> list[Any]:
    """Names, of which all but some are slow."""
    return [name if name in some else pytest.param(name, marks=pytest.mark.slow) for name in names]


def given(name: str, folder: Path, **more: str) -> tuple[Path, list[str]]:
    """The recipe of a case, and its words."""
    recipe, _, words, batch, evaluations, changes = CASES[name]
    train = {"length": "6 steps", "batch_size": batch, "micro_batch": batch // 2, "ema": 0.9, "compile": "default"}
    log = "{every: 1 steps, system_every: null, ceilings: 'off'}"
    settings = {"best": "null", "stop_when": "null", "checkpoints": "{every: null}", "log": log}
    for key, value in (changes | more).items():
        if key.startswith("train."):
            train[key.removeprefix("train.")] = value
        else:
            settings[key] = value
    block = ", ".join(f"{key}: {value}" for key, value in train.items())
    return recipe, words(folder, **{"evaluations": evaluations, **settings, "train": f"{{{block}}}"})


@pytest.mark.parametrize("name", quick(CASES, SOME))
def test_no_graph_breaks_and_none_is_traced_after_the_warm_up(name, request, monkeypatch):
    recipe, words = given(name, request.getfixturevalue(CASES[name][1]))
    traced = count(monkeypatch.setattr)
    assert run(*words, recipe=recipe).code == 0
    # The features of people are evaluated uncompiled: batches of one modality, of another and of both.
    # A teacher that runs in every step is compiled by itself.
    traced.check(
        train=2 if "mixed" in name or "teacher" in name.partition(", ")[2] else 1, evaluate=not name.startswith("reid")
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnext", "eye_baseline"])
def test_of_two_processes_each_traces_the_same(name, request, tmp_path):
    recipe, words = given(name, request.getfixturevalue(CASES[name][1]))
    path = f"{PLUGIN}:{ROOT / 'tests' / 'support'}"
    done = spawn(2, str(recipe), "--plugin", "dynamo_traces", *words, PYTHONPATH=path, **{FOLDER: str(tmp_path)})
    assert done.returncode == 0, done.stderr[-2000:]
    buckets = 2 if name == "convnext" else 1  # of DDP, at whose bounds torch cuts the network: the first holds 1 MB
    for rank in range(2):
        Traced(**json.loads((tmp_path / f"{rank}.json").read_text())).check(buckets)


@pytest.mark.parametrize("wrong", ["broken", pytest.param("stepped", marks=pytest.mark.slow)])
def test_a_graph_break_and_a_recompile_are_noticed(wrong, monkeypatch):
    """Of a network that prints, and of one that counts its forwards in a plain number."""

    def broken(net, x):
        torch._dynamo.graph_break()
        return forward(net, x)

    def stepped(net, x):
        net.forwards = getattr(net, "forwards", 0) + 1
        return forward(net, x) + 0.0 * net.forwards

    traced = count(monkeypatch.setattr)
    train = "train={length: 6 steps, batch_size: 16, micro_batch: 8, ema: 0.9, compile: default}"
    words = [train, "evaluations={val: {every: 2 steps}}", "best=null"]
    assert run(*words).code == 0
    traced.check()
    import toy

    forward = toy.Net.forward
    monkeypatch.setattr(toy.Net, "forward", {"broken": broken, "stepped": stepped}[wrong])
    traced = count(monkeypatch.setattr)
    assert run(*words).code == 0
    with pytest.raises(AssertionError):
        traced.check()
    assert traced.breaks if wrong == "broken" else traced.late


# ---- Compiled for this processor

CALM = ("adadistill", "unet")
"""Faces and volumes, by networks that draw nothing at random: compiled, they would draw other numbers."""
COMPILER = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no C++ compiler for Inductor")


@COMPILER
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CALM)
def test_inductor_trains_as_without(name, request):
    """The same losses but for rounding, which training makes larger: relative, first and third, 3e-8 and 1e-4
    (adadistill), 6e-8 and below 1e-9 (unet), torch 2.14 on a Xeon."""
    folder, losses = request.getfixturevalue(CASES[name][1]), {}
    more = {"train.length": "3 steps", "evaluations": "{val: {}}"}
    for mode in ("off", "default"):
        torch._dynamo.reset()
        recipe, words = given(name, folder, **more, **{"train.compile": mode})
        ran = run(*words, recipe=recipe)
        assert ran.code == 0 and ran.series("eval/val/unique_samples")
        losses[mode] = ran.series("train/loss")
    assert len(losses["off"]) == 3 and losses["default"] != losses["off"]
    assert losses["default"][0] == pytest.approx(losses["off"][0], rel=1e-6)
    assert losses["default"] == pytest.approx(losses["off"], rel=1e-3)


@COMPILER
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_inductor_compiles_the_frozen_teacher(faces):
    spec = IResNetSpec(name="iresnet18", embedding=16, width=0.0625)
    teacher = face_backbones.build(spec, (3, 32, 32))
    teacher.load_state_dict(load_file(faces / "teacher.safetensors"))
    teacher.eval().requires_grad_(False)
    picture = torch.randn(8, 3, 32, 32)
    plain = teacher(picture)
    compile_in_place(teacher, "default")
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        torch.testing.assert_close(teacher(picture), plain, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
