"""Linear probes: features computed once are the network's, the last layer alone moves, and what is refused."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from fake_runtime import RUNTIME
from runs import ROOT, all_same, overrides, own_store, run, stop_after, stripes

from trainkit import api
from trainkit.checkpoint import safe_load
from trainkit.config import loader
from trainkit.errors import UserError
from trainkit.inference import evaluate_run
from trainkit.interfaces import FEATURES, DatasetInfo, StepContext
from trainkit.models.network_specs import Network
from trainkit.models.timm_classifier import timm_network, without_layer
from trainkit.tasks.classify import Classify
from trainkit.training import teacher_cache

pytestmark = pytest.mark.usefixtures("store")
CONVNEXT, EYES = ROOT / "recipes" / "convnext.yaml", ROOT / "recipes" / "eye_state.yaml"
MODEL, SIDE, CLASSES = "test_resnet", 32, 3
HEAD = {"net.fc.weight", "net.fc.bias"}
AT = StepContext(0, 0, 0.0, lambda x: x, contextlib.nullcontext)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    stripes(root / "train", 20, 0)
    stripes(root / "val", 9, 1)
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A file of "pretrained" weights, for seven classes, with statistics of batch norm as after a training."""
    torch.manual_seed(0)
    net = timm_network(MODEL, (3, SIDE, SIDE), {}, 7, "net")
    with torch.no_grad():
        for _ in range(3):
            net(torch.randn(16, 3, SIDE, SIDE))
    file = tmp_path_factory.mktemp("weights") / "pretrained.safetensors"
    safe_load.write_tensors(file, net.state_dict())
    return file


def words(pictures, weights, **changes: str) -> list[str]:
    settings = {
        "data.train": f"{pictures}/train",
        "data.evaluate": f"{{val: {pictures}/val}}",
        "data.image_size": f"{SIDE}",
        "data.augment": "{name: light, flip: 0.5}",
        "task": f"{{name: classify, net: {{model: {MODEL}, weights: {weights}, frozen: true}}}}",
        "optim": "{name: adamw, lr: 1e-2, weight_decay: 0.05}",
        "train": "{length: 4 epochs, batch_size: 12}",
        "evaluations": "{val: {every: 4 steps}}",
        "best": "{metric: val/top1}",
    }
    return overrides(settings, changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, database, pictures, weights):
    """The probe without an interruption, in a store of its own."""
    with own_store(tmp_path_factory.mktemp("whole"), database):
        yield run(*words(pictures, weights), recipe=CONVNEXT)


def made(weights, **net):
    task = Classify(net=Network(model=MODEL, weights="w", **net))
    meta = DatasetInfo(CLASSES, (3, SIDE, SIDE), "toy", ("across", "down", "slanted"))
    return task, task.build(meta, {"net": weights}, 0)


@pytest.mark.parametrize("model, side", [("test_convnext3", 32), (MODEL, 32), ("test_vit", 160)])
def test_features_are_what_the_last_layer_reads(model, side):
    torch.manual_seed(0)
    net = timm_network(model, (3, side, side), {}, 5, "net").eval()
    features = without_layer(net, next(name for name, m in net.named_modules() if m is net.get_classifier()))
    image = torch.randn(2, 3, side, side)
    assert torch.equal(net.get_classifier()(features(image)), net(image))
    with torch.no_grad():
        next(iter(net.parameters())).mul_(2)  # what is loaded later is the features' too
    assert torch.equal(net.get_classifier()(features(image)), net(image))


@pytest.mark.parametrize("stored", [False, True], ids=["in memory", "on disk"])
def test_batches_carry_the_features_of_their_pictures_in_place_of_them(
    pictures, weights, stored, tmp_path, monkeypatch
):
    """Of many images they are kept on disk, in half precision."""
    monkeypatch.setattr(teacher_cache, "IN_MEMORY", 0 if stored else teacher_cache.IN_MEMORY)
    close = {"rtol": 2e-3, "atol": 2e-3} if stored else {}
    recipe = loader.load(CONVNEXT, words(pictures, weights))
    train = recipe.data.open(0).train
    task, networks = made(weights, frozen=True)
    _, plain = made(weights, tune="linear")
    torch.nn.init.normal_(networks.model.net.get_classifier().weight)
    plain.model.load_state_dict(networks.model.state_dict())
    networks.cached[FEATURES].eval()
    plain.model.eval()
    logger = SimpleNamespace(say=print)
    split = teacher_cache.outputs(networks, train, RUNTIME, logger, tmp_path, lambda: False)
    seen = set()
    for epoch in range(2):
        rows = train.order(epoch, 12)[0, 0:12]
        batch, shown = (one.on_device(one.fetch(rows, epoch)) for one in (split, train))
        assert "image" not in batch and torch.equal(batch["label"], shown["label"])
        scores = plain.model(shown["image"])
        torch.testing.assert_close(networks.model(features=batch[FEATURES]), scores, **close)
        losses = [task.loss(networks.model, networks, batch, AT), plain_loss(plain, shown)]
        torch.testing.assert_close(losses[0].sum, losses[1].sum, **close)
        seen |= set(batch["view"].tolist())
    assert seen == {0, 1}, "mirrored images have features of their own"


def plain_loss(networks, batch):
    """The loss of a task that asks the network in every step."""
    task = Classify(net=Network(model=MODEL, weights="w", tune="linear"))
    task.build(DatasetInfo(CLASSES, (3, SIDE, SIDE), "toy", ("across", "down", "slanted")), {}, 0)
    return task.loss(networks.model, networks, batch, AT)


def test_the_last_layer_alone_moves_and_starts_at_zero(whole, weights):
    given, trained = safe_load.read_tensors(weights), whole.last.tensors["model"]
    same = {name for name, t in trained.items() if torch.equal(t, given[name.removeprefix("net.")])}
    assert set(trained) - same == HEAD
    assert {name.partition("/")[0] for name in whole.last.tensors["optimizer"]} == HEAD
    assert whole.series("train/loss")[-1] < whole.series("train/loss")[0]
    _, networks = made(weights, frozen=True)
    assert not any(p.any() for p in networks.model.net.get_classifier().parameters())
    total = sum(t.numel() for name, t in networks.model.named_parameters() if name not in HEAD)
    assert any(f"{total:,} are frozen" in note for note in networks.notes)
    assert any("for 7 classes not used" in note for note in networks.notes)


def test_an_interrupted_probe_resumes_to_the_bit(whole, pictures, weights):
    cut = run(*words(pictures, weights), recipe=CONVNEXT, stopping=stop_after(9))
    assert cut.folder.info().status == "KILLED" and 5 <= cut.last.step < 20
    resumed = run(*words(pictures, weights), recipe=CONVNEXT, resume="")
    assert resumed.folder == cut.folder and resumed.last.step == 20
    assert all_same(resumed, whole) and resumed.repeatable == whole.repeatable


def test_what_comes_out_is_an_ordinary_network(whole, pictures, monkeypatch, tmp_path):
    """Scored by whole forwards as in the training, loaded, predicted with and exported; the export begins another."""
    monkeypatch.setenv("TRAINKIT_STORE", str(whole.folder.path.parents[1]))
    word = str(whole.folder.path / "checkpoints" / f"step-{whole.steps[-1]:09d}")
    found = evaluate_run.evaluate(evaluate_run.request_for(word, None, (), ()), word, log=False)
    assert found["val/top1"] == whole.series("val/top1")[-1]
    assert found["val/nll"] == pytest.approx(whole.series("val/nll")[-1], rel=1e-5)
    model = api.load(whole.folder.name)
    assert set(model.predict(sorted((pictures / "val").rglob("*.png"))[:3])["class"]) <= set(model.classes)
    from trainkit.export import export

    done = export.export(whole.folder.name, tmp_path / "out", ("safetensors",))
    assert not torch.equal(safe_load.read_tensors(done.written[0])["fc.weight"], torch.zeros(CLASSES, 1))
    again = run(*words(pictures, tmp_path / "out", train__length="1 steps", evaluations="{}", best="null"),
                recipe=CONVNEXT)  # fmt: skip
    assert again.code == 0


EMBED = {
    "task": "{{name: embed, net: {{name: timm, model: {model}, embedding: 8, weights: {weights}, frozen: true}}, "
    "margin: {{name: cosface, m: 0.2, scale: 16}}, mirror: {mirror}}}",
    "evaluations": "{val.retrieval: {every: 4 steps}}",
}


@pytest.mark.parametrize("mirror", ["false", "true"])
def test_an_embedding_is_a_projection_of_features(pictures, weights, mirror):
    task = EMBED["task"].format(model=MODEL, weights=weights, mirror=mirror)
    changes = {"task": task, "train__length": "1 epoch", "evaluations": "{val: {split: val.retrieval}}", "best": "null"}
    done = run(*words(pictures, weights, **changes), recipe=CONVNEXT)
    given, trained = safe_load.read_tensors(weights), done.last.tensors["model"]
    backbone = {name: t for name, t in trained.items() if name.startswith("net.backbone.")}
    assert len(backbone) > 10
    assert all(torch.equal(t, given[name.removeprefix("net.backbone.")]) for name, t in backbone.items())
    assert {name.split(".")[1] for name in trained if name not in backbone} == {"neck", "weight"}
    found = evaluate_run.evaluate(evaluate_run.request_for(done.folder.name, None, (), ()), done.folder.name, log=False)
    assert found["val/recall_at_1"] == done.series("val/recall_at_1")[-1]


# Refused


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"data.augment": "{name: light, shift: 2}"}, "data.augment does more than mirror"),
        ({"data.augment": "{name: timm}"}, "data.augment does more than mirror"),
        ({"task.net.weights": "null"}, "frozen is true, but weights is not set"),
        ({"task.net.tune": "head"}, "but frozen trains only the last layer"),
        ({"task.net.drop_path": "0.1"}, "drop_path is 0.1, which has no effect"),
        ({"task.mix": "{mixup: 0.2}"}, "mix changes images"),
    ],
)
def test_what_a_frozen_network_cannot_have_is_refused_with_the_recipe(pictures, weights, changes, said):
    with pytest.raises(UserError, match=said):
        loader.load(CONVNEXT, words(pictures, weights, **changes))


def test_a_last_layer_that_is_not_linear_is_refused(tmp_path):
    net = timm_network(MODEL, (3, SIDE, SIDE), {}, CLASSES, "net")
    with pytest.raises(UserError, match="last layer is Sequential"):
        without_layer(net, "conv1")


def test_a_recipe_without_the_key_has_the_digest_that_it_had(pictures, weights):
    task = f"{{name: classify, net: {{model: {MODEL}, weights: {weights}}}}}"
    plain, given = (
        loader.load(CONVNEXT, words(pictures, weights, task=task[:-2] + more + "}}"))
        for more in ("", ", frozen: false")
    )
    assert loader.digest(plain) == loader.digest(given)
