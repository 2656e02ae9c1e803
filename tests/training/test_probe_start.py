"""Trainings that start from a linear probe: what is fitted, its scores at step 0, resuming, several processes."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from runs import ROOT, all_same, evaluated, overrides, own_store, run, stop_after, stripes
from torch import nn

from trainkit.checkpoint import safe_load
from trainkit.config import loader
from trainkit.config.run_request import RunRequest
from trainkit.data.images.dataset import Images
from trainkit.diagnostics import preflight
from trainkit.distributed.runtime import Runtime
from trainkit.errors import UserError
from trainkit.experiments import recipe_check
from trainkit.models import linear_probe
from trainkit.models.timm_classifier import Classifier, timm_network
from trainkit.training import plan

pytestmark = pytest.mark.usefixtures("unsent")

CONVNEXT = ROOT / "recipes" / "convnext.yaml"
MODEL, SIDE = "test_resnet", 32


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(0)
    net = timm_network(MODEL, (3, SIDE, SIDE), {}, 7, "net")
    with torch.no_grad():
        for _ in range(3):
            net(torch.randn(16, 3, SIDE, SIDE))
    file = tmp_path_factory.mktemp("weights") / "pretrained.safetensors"
    safe_load.write_tensors(file, net.state_dict())
    return file


@pytest.fixture(scope="module")
def settings(tmp_path_factory, weights):
    root = tmp_path_factory.mktemp("pictures")
    stripes(root / "train", 20, 0)
    stripes(root / "val", 9, 1)
    return {
        "data.train": f"{root}/train",
        "data.evaluate": f"{{val: {root}/val}}",
        "data.image_size": f"{SIDE}",
        "data.augment": "{name: light, flip: 0.5, shift: 2}",
        "task": f"{{name: classify, net: {{model: {MODEL}, weights: {weights}, probe: true, freeze_bn: true}}}}",
        "optim.name": "adamw",
        "optim.lr": "1e-3",
        "train": "{length: 3 epochs, batch_size: 12}",
        "evaluations": "{val: {every: 4 steps, at_start: true}}",
        "best": "{metric: val/top1}",
    }


@pytest.fixture(scope="module")
def words(settings):
    return overrides(settings, {})


@pytest.fixture(scope="module")
def whole(tmp_path_factory, database, words):
    with own_store(tmp_path_factory.mktemp("whole"), database):
        yield run(*words, recipe=CONVNEXT)


def classifier(classes: int) -> Classifier:
    torch.manual_seed(1)
    return Classifier(timm_network(MODEL, (3, SIDE, SIDE), {}, classes, "net"), "all")


@pytest.mark.parametrize("classes", [2, 3])
def test_the_last_layer_gets_the_logits_of_a_regularised_logistic_regression(classes):
    """Its gradient is zero there: the penalty is on weights of standardized features."""
    rng = np.random.default_rng(0)
    net = classifier(classes + 1)
    width = net.net.get_classifier().in_features
    label = np.arange(40) % classes
    label[::7] = -1  # images without a class
    features = (5 + 3 * rng.normal(size=(40, width)) + np.eye(classes, width)[label] * 9).astype(np.float32)
    found = linear_probe.fit(net, features, label)
    weight, bias = found["net.fc.weight"].astype(np.float64), found["net.fc.bias"].astype(np.float64)
    known = label >= 0
    logits = features[known] @ weight.T + bias
    assert (logits.argmax(1) == label[known]).mean() > 0.95
    assert logits[:, classes].max() < logits[:, :classes].max(1).min(), "a class without images is never predicted"
    x = (features[known] - features[known].mean(0)) / features[known].std(0)
    p = torch.from_numpy(logits[:, :classes]).softmax(1).numpy()
    step = x.T @ (p - np.eye(classes)[label[known]])
    scaled = (weight[:classes] * features[known].std(0)).T
    pull = -np.sum(step * scaled) / np.sum(scaled * scaled)
    if classes > 2:
        assert pull > 0 and np.abs(step + pull * scaled).max() < 0.02 * np.abs(step).max()


def test_what_has_one_class_or_no_linear_layer_is_refused():
    net = classifier(3)
    width = net.net.get_classifier().in_features
    with pytest.raises(UserError, match="1 classes"):
        linear_probe.fit(net, np.zeros((4, width), np.float32), np.zeros(4, np.int64))
    net.net.fc = nn.Conv2d(width, 3, 1)
    with pytest.raises(UserError, match="last layer is Conv2d"):
        linear_probe.fit(net, np.zeros((4, width), np.float32), np.arange(4) % 2)


def test_training_starts_from_the_probe_whose_scores_are_those_of_step_0(whole, words, store):
    assert whole.code == 0
    steps, scores = whole.history.series("val/top1")
    assert steps[0] == 0 and scores[0] > 0.5, "three classes"
    for name in ("top1", "nll"):
        assert whole.series(f"probe/val/{name}") == whole.series(f"val/{name}")[:1]
    plain = run(*words, "task.net.probe=false", "train.length=1 steps", "log.every=1 steps", recipe=CONVNEXT)
    assert whole.series("val/nll")[0] < 0.9 * plain.series("val/nll")[0], "a last layer of zeros: log(3)"
    assert "probe/val/top1" not in plain.history.metrics


def test_fine_tuning_begins_with_a_softer_probe_and_the_probe_alone_is_a_run_of_no_steps(settings, store):
    still = {"optim__name": "sgd", "optim__lr": "1e-12", "evaluations": "{val: {at_start: true}}"}

    def head(length: str, tune: str) -> tuple[torch.Tensor, list[float]]:
        changes = {**still, "train": f"{{length: {length}, batch_size: 12}}", "task.net.tune": tune}
        ran = run(*overrides(settings, changes), recipe=CONVNEXT)
        assert ran.code == 0
        return ran.last.tensors["model"]["net.fc.weight"], ran.series("val/nll")

    probe, scores = head("0 steps", "linear")
    assert len(scores) == 1 and probe.any()
    assert torch.allclose(head("1 steps", "linear")[0], probe, rtol=1e-5)
    softer, after = head("1 steps", "all")
    assert torch.allclose(softer, 0.2 * probe, rtol=1e-5) and after[0] == scores[0] != after[1]


def test_an_interrupted_run_does_not_fit_again_and_ends_with_the_same_bits(whole, words, store, monkeypatch):
    cut = run(*words, recipe=CONVNEXT, stopping=stop_after(6))
    assert cut.folder.info().status == "KILLED"
    monkeypatch.setattr("trainkit.models.linear_probe.fit", None)
    resumed = run(*words, recipe=CONVNEXT, resume="")
    assert resumed.folder == cut.folder and all_same(resumed, whole) and resumed.repeatable == whole.repeatable


@pytest.mark.slow
def test_a_run_that_goes_on_from_step_0_softens_the_probe_of_its_checkpoint(whole, words, store):
    """The checkpoint of step 0, the best so far, holds the probe as it was scored."""
    cut = run(*words, recipe=CONVNEXT, stopping=stop_after(1))
    shutil.rmtree(cut.folder.checkpoints / "step-000000001")
    assert cut.last.step == 0
    resumed = run(*words, recipe=CONVNEXT, resume="")
    assert resumed.folder == cut.folder and all_same(resumed, whole) and resumed.repeatable == whole.repeatable


def test_a_preflight_counts_the_fit(tmp_path, words, weights, store, monkeypatch):
    monkeypatch.setattr(preflight, "SECONDS", 0.2)
    monkeypatch.setattr(linear_probe, "fit", lambda *args, plain=linear_probe.fit: time.sleep(0.3) or plain(*args))
    recipe = loader.load(CONVNEXT, list(words))
    data, runtime = recipe.data.open(0), Runtime(recipe)
    tried = preflight.fly(recipe, data, runtime, {"net": weights}, tmp_path, tmp_path / "outputs")
    cut = plan.Plan.make(recipe, data, 1, 0)
    assert preflight.forecast(recipe, cut, tried).before_s == tried.fitted_s > 0.3
    assert any(line.startswith("fit  ") for line in preflight.report(recipe, cut, tried, 10**12)[0])


@pytest.mark.slow
def test_two_processes_fit_the_probe_of_one(words, whole, store):
    scores = evaluated(2, str(CONVNEXT), *words, "train.length=1 steps")
    assert scores["probe/val/top1"] == whole.repeatable["probe/val/top1"]
    assert scores["probe/val/nll"][0][1] == pytest.approx(whole.series("probe/val/nll")[0], rel=1e-4)


def test_data_that_is_only_read_augmented_is_refused_by_check(words, store, monkeypatch):
    def opened(data, seed, plain=Images.open):
        found = plain(data, seed)
        return replace(found, evaluations={"val": found.evaluations["val"]})

    monkeypatch.setattr(Images, "open", opened)
    for act in (recipe_check.open_all, lambda request: run(*words, recipe=CONVNEXT)):
        with pytest.raises(UserError, match="task: probe, but the data does not offer its training set"):
            act(RunRequest(CONVNEXT, tuple(words)))


def test_features_of_random_weights_are_refused(words):
    with pytest.raises(UserError, match="probe is true, but weights is not set"):
        loader.load(CONVNEXT, [*words, "task.net.weights=null", "task.net.freeze_bn=false"])
