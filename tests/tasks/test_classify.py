"""The task `classify`: losses in plain Python, what is trained, how the rate falls with depth, and what is refused."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import torch
from torch import nn

from trainkit import rng
from trainkit.checkpoint import safe_load, timm_weights
from trainkit.config.schema import Group, LrRule, Optim
from trainkit.config.validation import validate
from trainkit.errors import UserError
from trainkit.interfaces import DatasetInfo, StepContext
from trainkit.models.network_specs import Network
from trainkit.tasks.classify import Classify, Mix
from trainkit.training import optimizer

CLASSES, SIDE = 5, 32
META = DatasetInfo(CLASSES, (3, SIDE, SIDE), "toy", ("a", "b", "c", "d", "e"))
NET = {"model": "test_convnext3", "args": {"patch_size": 2}}


def at(step: int = 0) -> StepContext:
    return StepContext(step, 0, 0.0, lambda x: x, contextlib.nullcontext)


def batch(size: int = 8, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "image": torch.randn(size, 3, SIDE, SIDE, generator=draw),
        "label": torch.randint(CLASSES, (size,), generator=draw),
    }


def made(seed: int = 0, found=None, **settings):
    torch.manual_seed(seed)
    task = Classify(net=Network(**NET, **settings.pop("net", {})), **settings)
    return task, task.build(META, found or {}, seed)


class Fixed(nn.Module):
    """Gives the same scores whatever it is shown."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(torch.as_tensor(logits).clone())

    def forward(self, image):
        return self.logits


def log_softmax(row):
    top = max(row)
    total = math.log(sum(math.exp(v - top) for v in row)) + top
    return [v - total for v in row]


LOGITS = [[2.0, -1.0, 0.5, 0.0, 1.0], [0.0, 3.0, 0.0, -2.0, 0.1], [1.0, 1.0, 1.0, 1.0, 4.0]]
LABELS = torch.tensor([0, 4, 4])


def plain(smoothing: float, weight: list[float]) -> tuple[float, float]:
    total = divided = 0.0
    for row, label in zip(LOGITS, LABELS.tolist(), strict=True):
        for c, value in enumerate(log_softmax(row)):
            target = (1 - smoothing) * (c == label) + smoothing / CLASSES
            total -= weight[c] * target * value
        divided += weight[label]
    return total, divided


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [{}, {"a": 2.0, "e": 0.25}], ids=["even", "weighted"])
def test_the_loss_is_the_formula_in_plain_python(smoothing, weighted):
    task, networks = made(smoothing=smoothing, class_weights=weighted)
    loss = task.loss(Fixed(LOGITS), networks, {"image": torch.zeros(3, 3, 4, 4), "label": LABELS}, at())
    total, divided = plain(smoothing, [weighted.get(name, 1.0) for name in META.class_names])
    assert loss.sum.item() == pytest.approx(total, rel=1e-6)
    assert float(loss.weight) == pytest.approx(divided if weighted else 3)


@pytest.mark.parametrize("mix", [None, Mix(mixup=0.8), Mix(cutmix=1.0, mode="elem")], ids=["labels", "mixup", "cutmix"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("weighted", [{}, {"a": 7.0, "d": 0.01}], ids=["even", "weighted"])
def test_the_mean_is_torchs_over_one_micro_batch_or_several(mix, smoothing, weighted):
    task, networks = made(mix=mix, smoothing=smoothing, class_weights=weighted)
    weights = torch.tensor([weighted.get(name, 1.0) for name in META.class_names])
    shown, logits = batch(8, seed=5), 4 * torch.randn(8, CLASSES, generator=torch.Generator().manual_seed(6))
    parts, whole = [], []
    for rows in (slice(0, 6), slice(6, 8)):
        part = {key: value[rows] for key, value in shown.items()}
        whole.append(part["label"] if mix is None else mixed(task, 3, part)[1])
        rng.reseed(torch.device("cpu"), 3, 0, 0, 0)
        parts.append(task.loss(Fixed(logits[rows]), networks, part, at()))
    target = torch.cat(whole)
    wanted = nn.functional.cross_entropy(
        logits, target, weights if weighted else None, label_smoothing=smoothing if mix is None else 0.0
    )
    mean = sum(p.sum for p in parts) / sum(float(p.weight) for p in parts)
    torch.testing.assert_close(mean.detach(), wanted, rtol=1e-5, atol=1e-6)


def test_the_loss_at_the_start_is_that_of_guessing():
    task, networks = made()
    networks.model.eval()
    loss = task.loss(networks.model, networks, batch(64), at())
    assert float(loss.sum / loss.weight) == pytest.approx(math.log(CLASSES), abs=0.15)


def test_a_batch_of_eight_is_learnt_by_heart():
    task, networks = made()
    moved = optimizer.build(networks.model, Optim(name="adamw", lr=2e-3))
    shown = batch(8)
    for _ in range(60):
        loss = task.loss(networks.model, networks, shown, at())
        loss.sum.div(loss.weight).backward()
        moved.step()
        moved.zero_grad()
    assert float(loss.sum / loss.weight) < 0.05
    assert float(loss.logs["accuracy"]) == 1.0


@pytest.mark.parametrize("model, side", [("test_convnext3", 32), ("test_resnet", 32), ("test_vit", 160)])
def test_the_embedding_is_what_the_classifier_reads(model, side):
    torch.manual_seed(0)
    task = Classify(net=Network(model=model))
    net = task.build(DatasetInfo(CLASSES, (3, side, side), "toy", META.class_names), {}, 0).model.eval()
    image = torch.randn(2, 3, side, side)
    rows = task.predict(net, {"image": image})
    torch.testing.assert_close(rows["logits"], net.net(image))
    torch.testing.assert_close(net.net.get_classifier()(rows["embedding"]), rows["logits"])


# Mixing


def mixed(task, seed: int, shown):
    """What the network is shown and what the target is, when the layers' generator stands at `seed`."""
    rng.reseed(torch.device("cpu"), seed, 0, 0, 0)
    return task._mixed(shown["image"], shown["label"])


def test_mixup_shows_each_picture_with_its_opposite_in_the_shares_of_the_target():
    task, _ = made(mix=Mix(mixup=0.8))
    shown = batch(6)
    image, target = mixed(task, 3, shown)
    one_hot = nn.functional.one_hot(shown["label"], CLASSES).double()
    i = int((shown["label"] != shown["label"].flip(0)).nonzero()[0])
    share = float(target[i, shown["label"][i]])
    assert 0 < share < 1
    torch.testing.assert_close(image, shown["image"] * share + shown["image"].flip(0) * (1 - share))
    torch.testing.assert_close(target.double(), one_hot * share + one_hot.flip(0) * (1 - share))


def test_cutmix_gives_the_target_the_share_of_the_pixels():
    task, _ = made(mix=Mix(cutmix=1.0))
    shown = batch(6)
    image, target = mixed(task, 4, shown)
    i = int((shown["label"] != shown["label"].flip(0)).nonzero()[0])
    own = float((image[i] == shown["image"][i]).float().mean())
    assert float(target[i, shown["label"][i]]) == pytest.approx(own, abs=1e-6)
    assert torch.equal(
        image[i], torch.where(image[i] == shown["image"][i], shown["image"][i], shown["image"].flip(0)[i])
    )


def test_what_is_mixed_depends_on_where_the_step_stands_and_on_nothing_else():
    task, _ = made(mix=Mix(mixup=0.8, cutmix=1.0))
    shown = batch(6)
    before = shown["image"].clone()
    first = mixed(task, 7, shown)
    np.random.rand(100)
    torch.rand(100)
    again = mixed(task, 7, shown)
    other = mixed(task, 8, shown)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[1], other[1])
    assert torch.equal(shown["image"], before)  # the batch itself stays as it was


def test_an_odd_batch_cannot_be_mixed():
    task, networks = made(mix=Mix(mixup=0.8))
    with pytest.raises(UserError, match="micro-batches of 7 images"):
        task.loss(networks.model, networks, batch(7), at())


# What is trained


def trained(net: nn.Module) -> set[str]:
    return {name for name, p in net.named_parameters() if p.requires_grad}


@pytest.fixture
def weights_file(tmp_path):
    """Weights of a run on other classes: seven of them."""
    torch.manual_seed(9)
    task = Classify(net=Network(**NET))
    net = task.build(DatasetInfo(7, META.shape, "other", tuple("1234567")), {}, 0).model
    safe_load.write_tensors(tmp_path / "model.safetensors", net.state_dict())
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize(
    "tune, expected",
    [
        ("head", {"net.head.norm.weight", "net.head.norm.bias", "net.head.fc.weight", "net.head.fc.bias"}),
        ("linear", {"net.head.fc.weight", "net.head.fc.bias"}),
    ],
)
def test_a_frozen_backbone_is_not_moved_by_training(tune, expected, weights_file):
    task, networks = made(net={"weights": "w.safetensors", "tune": tune}, found={"net": weights_file})
    net = networks.model.train()
    assert trained(net) == expected
    before = {name: t.clone() for name, t in net.state_dict().items()}
    moved = optimizer.build(net, Optim(name="sgd", lr=0.1))
    for step in range(2):  # the last layer starts at zero, and hands no gradient on in the first
        moved.zero_grad()
        task.loss(net, networks, batch(8), at(step)).sum.backward()
        moved.step()
    changed = {name for name, t in net.state_dict().items() if not torch.equal(t, before[name])}
    assert changed == expected
    assert not any(m.training for name, m in net.net.named_modules() if name.startswith("stages"))


def test_what_is_not_trained_drops_nothing_and_keeps_its_statistics(tmp_path):
    torch.manual_seed(0)
    net = Classify(net=Network(model="test_resnet")).build(META, {}, 0).model
    safe_load.write_tensors(tmp_path / "m.safetensors", net.state_dict())
    spec = Network(model="test_resnet", weights="m", tune="linear", drop_path=0.5)
    task = Classify(net=spec)
    networks = task.build(META, {"net": tmp_path / "m.safetensors"}, 0)
    net = networks.model.train()
    before = {name: t.clone() for name, t in net.named_buffers()}
    shown = batch(8)["image"]
    torch.testing.assert_close(net(shown), net(shown), rtol=0, atol=0)
    assert all(torch.equal(t, before[name]) for name, t in net.named_buffers())


def test_batch_norms_keep_their_statistics_and_train_their_weights(tmp_path):
    torch.manual_seed(0)
    net = Classify(net=Network(model="test_resnet")).build(META, {}, 0).model
    safe_load.write_tensors(tmp_path / "m.safetensors", net.state_dict())
    for freeze in (True, False):
        task = Classify(net=Network(model="test_resnet", weights="m", freeze_bn=freeze))
        networks = task.build(META, {"net": tmp_path / "m.safetensors"}, 0)
        net = networks.model.train()
        before = {name: t.clone() for name, t in net.state_dict().items()}
        moved = optimizer.build(net, Optim(name="sgd", lr=0.1))
        for step in range(2):
            moved.zero_grad()
            task.loss(net, networks, batch(8), at(step)).sum.backward()
            moved.step()
        changed = {name for name, t in net.state_dict().items() if not torch.equal(t, before[name])}
        assert any("running_mean" in name for name in changed) != freeze
        assert {"net.bn1.weight", "net.conv1.0.weight", "net.fc.weight"} <= changed


def test_weights_of_other_classes_fill_all_but_the_classifier_which_starts_at_zero(weights_file):
    _, networks = made(net={"weights": "w"}, found={"net": weights_file})
    given, own = safe_load.read_tensors(weights_file), networks.model.state_dict()
    assert own["net.head.fc.weight"].shape == (CLASSES, given["net.head.fc.weight"].shape[1])
    assert all(torch.equal(own[name], t) for name, t in given.items() if not name.startswith("net.head.fc."))
    assert not own["net.head.fc.weight"].any() and not own["net.head.fc.bias"].any()


def test_weights_of_the_same_classes_are_taken_whole(tmp_path):
    _, networks = made(seed=3)
    safe_load.write_tensors(tmp_path / "m.safetensors", networks.model.state_dict())
    _, other = made(seed=4, net={"weights": "w"}, found={"net": tmp_path / "m.safetensors"})
    assert all(torch.equal(other.model.state_dict()[name], t) for name, t in networks.model.state_dict().items())


def test_weights_of_another_network_are_refused(tmp_path):
    net = Classify(net=Network(model="test_resnet")).build(META, {}, 0).model
    safe_load.write_tensors(tmp_path / "m.safetensors", net.state_dict())
    with pytest.raises(UserError, match=r"m.safetensors"):
        made(net={"weights": "w"}, found={"net": tmp_path / "m.safetensors"})


def test_a_network_of_two_classifiers_can_be_trained_whole_and_not_in_part(tmp_path):
    spec = {"model": "deit_tiny_distilled_patch16_224"}
    meta = DatasetInfo(CLASSES, (3, 32, 32), "toy", META.class_names)
    net = Classify(net=Network(**spec)).build(meta, {}, 0).model
    safe_load.write_tensors(tmp_path / "m.safetensors", net.state_dict())
    with pytest.raises(UserError, match="several layers"):
        Classify(net=Network(**spec, weights="m", tune="linear")).build(meta, {"net": tmp_path / "m.safetensors"}, 0)


# The rate by depth


def test_the_rate_falls_from_block_to_block_in_what_the_optimizer_does():
    _, networks = made()
    net = networks.model
    moved = optimizer.build(net, Optim(name="sgd", lr=1.0, momentum=0.0, layer_decay=0.5))
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.set_lr(moved, 0.1)  # what the loop does at each step: a schedule keeps the scales
    moved.step()
    step = {name: float((before[name] - p.detach()).mean()) for name, p in net.named_parameters()}
    from timm.optim import param_groups_layer_decay

    expected = {}
    for group in param_groups_layer_decay(net.net, layer_decay=0.5):
        expected |= {id(p): group["lr_scale"] for p in group["params"]}
    for name, p in net.named_parameters():
        assert step[name] == pytest.approx(0.1 * expected[id(p)], rel=1e-4), name
    assert len(set(expected.values())) > 3


def test_a_group_and_a_depth_multiply():
    _, networks = made()
    grouped = optimizer.groups(
        networks.model, Optim(lr=1.0, layer_decay=0.5, groups=[Group(match="*.stem.*", lr_scale=4.0)])
    )
    scale = {id(p): g["lr_scale"] for g in grouped for p in g["params"]}
    depth = optimizer.layer_scales(networks.model, 0.5)
    named = dict(networks.model.named_parameters())
    assert scale[id(named["net.stem.0.weight"])] == 4 * depth["net.stem.0.weight"]
    assert scale[id(named["net.head.fc.weight"])] == 1.0


def test_a_network_without_an_order_of_layers_has_no_depth():
    with pytest.raises(UserError, match="layer_decay"):
        optimizer.groups(nn.Linear(2, 2), Optim(lr=1.0, layer_decay=0.5))


def test_parameters_that_their_network_excepts_do_not_decay():
    net = (
        Classify(net=Network(model="test_vit")).build(DatasetInfo(5, (3, 160, 160), "t", META.class_names), {}, 0).model
    )
    grouped = optimizer.groups(net, Optim(lr=1.0, weight_decay=0.05))
    decay = {id(p): g["weight_decay"] for g in grouped for p in g["params"]}
    named = dict(net.named_parameters())
    assert decay[id(named["net.pos_embed"])] == 0.0
    assert decay[id(named["net.blocks.0.attn.qkv.weight"])] == 0.05


def test_our_average_is_timms(tmp_path):
    """ModelEmaV3 without its warm-up, and ours once its cap of (1 + step) / (10 + step) is above the decay."""
    from timm.utils import ModelEmaV3

    _, networks = made()
    net = networks.model
    ours, theirs = optimizer.Average(net, 0.9), ModelEmaV3(net, decay=0.9)
    for step in range(1000, 1005):
        with torch.no_grad():
            for p in net.parameters():
                p.add_(torch.randn_like(p))
        ours.update(net, step)
        theirs.update(net)
    for name, t in theirs.module.named_parameters():
        torch.testing.assert_close(ours.tensors[name], t.detach(), rtol=1e-5, atol=1e-6)


# The rate by batch


@pytest.mark.parametrize("rule, expected", [("linear", 4e-3), ("sqrt", 1e-3)])
def test_the_rate_follows_the_batch_by_the_stated_rule(rule, expected):
    ruled = Optim(lr=2.5e-4, lr_rule=LrRule(name=rule, batch_size=256))
    assert optimizer.rate(ruled, 4096) == pytest.approx(expected)
    assert optimizer.rate(ruled, 256) == 2.5e-4
    assert optimizer.rate(Optim(lr=2.5e-4), 4096) == 2.5e-4


# What is refused


def test_a_network_that_does_not_exist_is_refused_with_the_nearest_names():
    with pytest.raises(UserError, match=r"did you mean .*convnext_atto"):
        Classify(net=Network(model="convnxt_atto")).build(META, {}, 0)


def test_an_argument_that_a_network_does_not_take_is_named():
    with pytest.raises(UserError, match="patchsize"):
        Classify(net=Network(model="test_convnext3", args={"patchsize": 2})).build(META, {}, 0)


def test_a_weight_of_a_class_that_is_not_there_is_refused():
    with pytest.raises(UserError, match=r"class 'f', which the data does not have"):
        made(class_weights={"f": 2.0})


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_of_a_class_is_above_zero(weight):
    with pytest.raises(UserError, match="a number above 0"):
        made(class_weights={"a": weight})


@pytest.mark.parametrize(
    "settings",
    [
        lambda: Network(model="x", tune="linear"),
        lambda: Network(model="x", freeze_bn=True),
        lambda: validate(Network, {"model": "x", "drop_path": 1.0}, {}),
        lambda: Network(model="convnext_atto", weights="pretrained"),
        lambda: Mix(),
        lambda: validate(Mix, {"mixup": -1.0, "cutmix": 1.0}, {}),
        lambda: validate(Mix, {"mixup": 1.0, "prob": 0.0}, {}),
        lambda: Mix(cutmix=5e-324),
        lambda: validate(Classify, {"net": {"model": "x"}, "smoothing": 1.0}, {}),
        lambda: validate(Optim, {"lr": 1.0, "layer_decay": 0.0}, {}),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings):
    with pytest.raises(ValueError):
        settings()


def test_a_parameter_without_a_gradient_ends_the_run():
    net = nn.ModuleDict({"used": nn.Linear(2, 2), "dead": nn.Linear(2, 2)})
    net["used"](torch.ones(1, 2)).sum().backward()
    with pytest.raises(UserError, match=r"2 parameters get no gradient: dead.weight, dead.bias"):
        optimizer.refuse_idle(dict(net.named_parameters()))


# Pretrained weights


def test_pretrained_weights_are_asked_for_by_their_tag():
    task = Classify(net=Network(model="convnext_atto.d2_in1k", weights="pretrained"))
    assert task.required_weights()["net"].weights == "timm:convnext_atto.d2_in1k"
    assert Classify(net=Network(model="convnext_atto")).required_weights() == {}


def test_pretrained_weights_that_are_not_here_end_the_run_before_it_begins(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="trainkit download"):
        timm_weights.find("timm:convnext_atto.d2_in1k")
    assert not timm_weights.is_here("timm:convnext_atto.d2_in1k")


def test_pretrained_weights_that_were_fetched_are_found_without_a_network(tmp_path, monkeypatch):
    """The hub's cache: refs/main names the snapshot that holds the file."""
    cached = tmp_path / "models--timm--convnext_atto.d2_in1k"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    file = cached / "snapshots" / ("0" * 40) / "model.safetensors"
    file.parent.mkdir(parents=True)
    safe_load.write_tensors(file, {"stem.0.weight": torch.zeros(2)})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert timm_weights.find("timm:convnext_atto.d2_in1k") == file


def test_a_tag_that_does_not_exist_is_refused_with_the_nearest_names():
    with pytest.raises(UserError, match=r"convnext_atto.d2_in1k"):
        timm_weights.is_here("timm:convnext_atto.d2_in1")


@pytest.mark.parametrize(
    "args", [{"pretrained": True}, {"checkpoint_path": "evil.pth"}, {"pretrained_cfg": "x"}, {"drop_path_rate": 0.1}]
)
def test_arguments_that_would_download_or_unpickle_are_refused(args):
    with pytest.raises(ValueError, match="args has"):
        Network(model="test_convnext3", args=args)
