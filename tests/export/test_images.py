"""Classifiers, embeddings and people's networks taken away: equal to the run's, loaded by others, refused otherwise."""

from __future__ import annotations

import json
import re

import numpy as np
import people_sets
import pytest
import timm
import torch
from PIL import Image
from runs import ROOT, environment, stripes
from safetensors.torch import load_file
from untrained_runs import made

from trainkit.errors import UserError
from trainkit.export import export, files
from trainkit.export.agreement import compare, rows

CONVNEXT = ROOT / "recipes" / "convnext.yaml"
EYES = ROOT / "recipes" / "eye_state.yaml"
FACES = ROOT / "recipes" / "face_teacher.yaml"
ADADISTILL = ROOT / "recipes" / "adadistill.yaml"
REID = ROOT / "recipes" / "reid.yaml"
MEAN, STD = (0.3, 0.4, 0.5), (0.2, 0.3, 0.4)
FILES = {"model.safetensors", "model.json", "README.md"}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Images, faces and people, packed once for all tests of this file."""
    root = tmp_path_factory.mktemp("pictures")
    stripes(root / "train", 4, 0)
    stripes(root / "val", 3, 1)
    draw = np.random.default_rng(0)
    for person in ("anna", "ben", "cleo"):
        (root / "faces" / person).mkdir(parents=True)
        for k in range(4):
            pixels = draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "faces" / person / f"{k}.png")
    both = [(a, b, k) for a in ("anna", "ben") for b in ("anna", "ben") for k in (0, 2)]
    lines = [f"{a}/{k}.png,{b}/{k + 1}.png,{int(a == b)}" for a, b, k in both]
    (root / "faces" / "pairs.csv").write_text("\n".join(["path_a,path_b,same", *lines]) + "\n")
    people_sets.index(root / "people", 6, (3, 2))
    people_sets.index(root / "asked", ["a", "b", "c"], (3, 2), seed=7)
    with environment(TRAINKIT_CACHE=tmp_path_factory.mktemp("cache")):
        yield root


def words(settings: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def classifier(home, net: str = "{model: test_convnext3, args: {patch_size: 2, ls_init_value: 0.5}}", **more: str):
    settings = {
        "data.train": f"{home}/train",
        "data.evaluate": f"{{val: {home}/val}}",
        "data.mean": str(list(MEAN)),
        "data.std": str(list(STD)),
        "task.net": net,
        "train.batch_size": "4",
    }
    return made(CONVNEXT, *words(settings | more))


def eyes(home):
    settings = {
        "data.train": f"{home}/train",
        "data.evaluate": f"{{val: {home}/val}}",
        "data.image_size": "[16, 32]",
        "task.net": "{name: eye_convnext, base_channels: 8, num_blocks: 2, head: avg}",
        "train.batch_size": "4",
        "evaluations": "{val: {}}",
        "best": "null",
    }
    return made(EYES, *words(settings))


def faces(home, recipe=FACES):
    net = "{name: mobilefacenet, embedding: 8, width: 0.25}"
    settings = {
        "data.train": f"{home}/faces",
        "data.evaluate": f"{{pairs: {home}/faces/pairs.csv}}",
        "data.image_size": "32",
        "evaluations": "{pairs: {}}",
        "best": "null",
        "train.batch_size": "4",
    }
    if recipe == FACES:
        settings["task.net"] = net
    else:
        settings |= {"task.student": net, "task.teacher.net": "{name: iresnet18, embedding: 8, width: 0.25}"}
    return made(recipe, *words(settings))


def looked_for(home):
    settings = {
        "data.train": f"{home}/people",
        "data.evaluate": f"{{val: {home}/asked}}",
        "data.image_size": "[32, 16]",
        "data.sampler": "{name: pk, people: 2, each: 5}",
        "task.net": "{model: resnet18, args: {layers: [1, 1, 1, 1], channels: [8, 8, 16, 16]}, embedding: 16}",
        "train": "{length: 12 steps, batch_size: 20, micro_batch: 10}",
        "evaluations": "{val: {}}",
        "best": "null",
    }
    return made(REID, *words(settings))


def pixels(file) -> torch.Tensor:
    return torch.from_numpy(np.asarray(Image.open(file)).copy()).permute(2, 0, 1)[None].float()


@torch.no_grad()
def by_run(run, split: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The images that a run is scored on, and what it finds there."""
    scored = run.opened.evaluations[split]
    batch = scored.fetch(np.arange(scored.size), 0)
    return batch["image"].float(), run.recipe.task.predict(run.net, scored.on_device(batch))


def programs(out, picture, monkeypatch) -> list[dict]:
    """What is left in the names of each program on the page in `out`, run there as it stands beside an image."""
    monkeypatch.chdir(out)
    with Image.open(picture) as opened:
        opened.save("image.jpg", "PNG")  # the name is the page's, the pixels are to stay as they are
    found = []
    for text in re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL):
        found.append({})
        exec(text, found[-1])
    return found


@pytest.mark.parametrize("model", ["test_convnext3", "test_vit", "test_efficientnet"])
def test_timm_alone_loads_the_tensors_of_its_networks(home, tmp_path, model):
    """A transformer has a fixed size; another family has batch norm."""
    run, out = classifier(home, f"{{model: {model}}}"), tmp_path / "out"
    export.export(run.name, out, ("safetensors",), pictures=2)
    size = {"img_size": 32} if model == "test_vit" else {}
    net = timm.create_model(model, num_classes=3, checkpoint_path=out / "model.safetensors", **size).eval()
    seen, expected = by_run(run, "val")
    with torch.no_grad():
        found = net((seen / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1))
    assert expected["logits"].std() > 0
    torch.testing.assert_close(found, expected["logits"], rtol=1e-4, atol=1e-5)


def test_tensors_have_timms_names_and_make_the_network_again(home, tmp_path):
    run, out = classifier(home), tmp_path / "out"
    done = export.export(run.name, out, ("safetensors",), pictures=3)
    assert {file.name for file in done.written} == FILES
    net = timm.create_model("test_convnext3", num_classes=3, patch_size=2, ls_init_value=0.5)
    net.load_state_dict(load_file(out / "model.safetensors"))
    seen, expected = by_run(run, "val")
    with torch.no_grad():
        logits, embedding = export.load(out)(seen)
    torch.testing.assert_close(logits, expected["logits"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(embedding, expected["embedding"], rtol=1e-4, atol=1e-5)
    said = json.loads((out / "model.json").read_text())
    assert (said["names"], said["size"], said["mean"]) == (["across", "down", "slanted"], [32, 32], list(MEAN))
    assert list(said["outputs"]) == ["logits", "embedding"] and said["data"]["pictures"] == [0, 4, 8]
    card = (out / "README.md").read_text()
    assert (
        f"run `{run.name}`" in card and "3 classes: `across`, `down`, `slanted`" in card and "licence unknown" in card
    )


@pytest.mark.parametrize("recipe", [FACES, ADADISTILL])
def test_embeddings_leave_the_people_of_the_training_behind(home, tmp_path, recipe):
    run = faces(home, recipe)
    export.export(run.name, tmp_path / "out", ("safetensors",))
    kept = load_file(tmp_path / "out" / "model.safetensors")
    assert kept and not any(name.startswith(("head.", "net.")) for name in kept)
    seen, expected = by_run(run, "pairs")
    with torch.no_grad():
        (embedding,) = export.load(tmp_path / "out")(seen)
    torch.testing.assert_close(embedding, expected["embedding"], rtol=1e-4, atol=1e-5)
    said = json.loads((tmp_path / "out" / "model.json").read_text())
    assert said["names"] == [] and said["outputs"] == {"embedding": "float32 (B, 8), not normalised; compare by cosine"}


def test_an_embedding_that_predicts_classes_keeps_them(home, tmp_path):
    run = eyes(home)
    export.export(run.name, tmp_path / "out", ("safetensors",), pictures=4)
    seen, expected = by_run(run, "val")
    with torch.no_grad():
        found = dict(zip(("logits", "embedding"), export.load(tmp_path / "out")(seen), strict=True))
    for name, values in found.items():
        torch.testing.assert_close(values, expected[name], rtol=1e-4, atol=1e-5)


def test_people_are_exported_as_they_are_compared(home, tmp_path):
    run = looked_for(home)
    done = export.export(run.name, tmp_path / "out", ("safetensors",), pictures=4)
    assert done.agreements["model.safetensors"].cosine > 0.99999
    split = run.opened.evaluations["val"]
    rows = np.flatnonzero(split.modality == 0)
    with torch.no_grad():
        batch = split.fetch(rows, 0)
        feature = run.recipe.task.predict(run.net, split.on_device(batch))["feature"]
        (embedding,) = export.load(tmp_path / "out")(batch["image.rgb"].float())
        torch.testing.assert_close(embedding, run.net.neck(feature), rtol=1e-4, atol=1e-5)


def test_a_folder_with_a_card_is_refused_before_any_work(home, tmp_path):
    (tmp_path / "README.md").write_text("kept")
    with pytest.raises(UserError, match=r"README\.md: exists already"):
        export.export(faces(home).name, tmp_path, ("safetensors",))
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_an_operation_that_onnx_lacks_is_one_message(home, tmp_path, monkeypatch):
    tried = []

    def stumbles(file, net, example, free, outputs, about):
        tried.append(len(free))
        raise RuntimeError("No ONNX function found for <op aten.odd>\nand a hundred lines more")

    monkeypatch.setattr(files, "write_onnx", stumbles)
    monkeypatch.setattr(files, "require", lambda *packages: None)
    with pytest.raises(UserError) as caught:
        export.export(classifier(home).name, tmp_path / "out", ("safetensors", "onnx"), pictures=2)
    assert str(caught.value) == (
        "model.onnx: cannot be written for ConvNeXt: No ONNX function found for <op aten.odd>; "
        "expected operations that ONNX supports; export with --to safetensors only"
    )
    assert tried == [1, 0] and not list((tmp_path / "out").iterdir())


def test_agreement_is_of_every_picture_and_output():
    seen = torch.arange(6.0).view(3, 2)
    true = {"logits": torch.tensor([[1.0, 0], [0, 1], [2, 0]]), "embedding": torch.eye(3)}
    calls = []

    def found(some):
        calls.append(len(some))
        rows = some[:, 0].long() // 2
        return {name: values[rows] for name, values in true.items()}

    same = compare("it", found, rows(seen, true))
    assert (same.pictures, same.same, same.cosine, same.apart) == (3, 1, 1, {"logits": 0, "embedding": 0})
    assert calls == [1, 2], "one alone, and several at once"
    calls.clear()
    compare("it", found, rows(seen, true, one_by_one=True))
    assert calls == [1, 1, 1]

    def last_is_off(by):
        def run(some):
            out = {name: values.clone() for name, values in found(some).items()}
            if len(some) == 2:
                out["embedding"][1, 0] += by
            return out

        return run

    assert compare("it", last_is_off(1e-4), rows(seen, true)).apart["embedding"] == pytest.approx(1e-4)
    for by in (0.01, float("nan")):
        with pytest.raises(UserError, match="it: differs from the trained network"):
            compare("it", last_is_off(by), rows(seen, true))
    with pytest.raises(UserError, match="logits of shape"):
        compare("it", lambda some: {"logits": torch.zeros(len(some), 5)}, rows(seen, true))


@pytest.mark.slow
@pytest.mark.parametrize("make", [classifier, eyes, faces, looked_for])
def test_onnx_finds_what_the_run_finds(home, tmp_path, make, monkeypatch):
    run = make(home)
    done = export.export(run.name, tmp_path / "out", pictures=3)
    said = json.loads((tmp_path / "out" / "model.json").read_text())
    assert {file.name for file in done.written} == FILES | {"model.onnx"} and said["batch"] == "any"
    assert max(done.agreements["model.onnx"].apart.values()) < 1e-3
    import onnx

    onnx.checker.check_model(onnx.load(tmp_path / "out" / "model.onnx"))
    picture = home / ("asked" if make is looked_for else "faces/anna" if make is faces else "val/down") / "0.png"
    picture = picture if picture.is_file() else next(picture.parent.rglob("*.png"))
    (by_onnx, by_trainkit) = programs(tmp_path / "out", picture, monkeypatch)
    with torch.no_grad():
        again = by_trainkit["net"](torch.from_numpy(by_onnx["pixels"]))
    for name, values in zip(said["outputs"], again, strict=True):
        np.testing.assert_allclose(by_onnx[name], values.numpy(), rtol=1e-3, atol=1e-4)
