"""Networks against the published figures and the key names of published checkpoints."""

from __future__ import annotations

import pytest
import torch
from multiply_adds import macs
from pydantic import TypeAdapter, ValidationError
from torch import nn

from trainkit.config import run_request
from trainkit.config.loader import RECIPES
from trainkit.errors import UserError
from trainkit.experiments import recipe_check, timm_names
from trainkit.models.face_backbones import build
from trainkit.models.iresnet import IResNet
from trainkit.models.mobilefacenet import MobileFaceNet
from trainkit.models.network_specs import IResNetSpec, MobileFaceNetSpec, Net, TimmSpec

FACE = (3, 112, 112)


def on_meta(spec, shape=FACE) -> nn.Module:
    with torch.device("meta"):
        return build(spec, shape)


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(
    ("name", "millions", "giga"),
    [
        ("iresnet18", 24.03, 2.61),
        ("iresnet34", 34.14, 4.46),
        ("iresnet50", 43.59, 6.31),
        ("iresnet100", 65.16, 12.09),
    ],
)
def test_iresnets_have_the_published_size_and_cost(name, millions, giga):
    net = on_meta(IResNetSpec(name=name))
    assert parameters(net) / 1e6 == pytest.approx(millions, abs=0.005)
    assert macs(net, FACE) / 1e9 == pytest.approx(giga, rel=0.005)


def test_mobilefacenet_has_the_published_size_and_cost():
    net = on_meta(MobileFaceNetSpec(name="mobilefacenet"))
    assert parameters(net) / 1e6 == pytest.approx(1.1995, abs=0.00005)
    assert macs(net, FACE) / 1e9 == pytest.approx(0.2212, rel=0.0005)
    assert parameters(on_meta(MobileFaceNetSpec(name="mobilefacenet", embedding=128))) / 1e6 == pytest.approx(
        1.003, abs=0.0005
    )


def batch_norm(prefix: str, affine: bool = True) -> set[str]:
    keys = {f"{prefix}.running_mean", f"{prefix}.running_var", f"{prefix}.num_batches_tracked"}
    return keys | {f"{prefix}.weight", f"{prefix}.bias"} if affine else keys


def test_iresnet50_has_the_keys_of_published_checkpoints():
    keys = {"conv1.weight", "prelu.weight", "fc.weight", "fc.bias"}
    keys |= batch_norm("bn1") | batch_norm("bn2") | batch_norm("features")
    for stage, blocks in enumerate((3, 4, 14, 3), start=1):
        for i in range(blocks):
            block = f"layer{stage}.{i}"
            keys |= {f"{block}.conv1.weight", f"{block}.conv2.weight", f"{block}.prelu.weight"}
            keys |= batch_norm(f"{block}.bn1") | batch_norm(f"{block}.bn2") | batch_norm(f"{block}.bn3")
        keys |= {f"layer{stage}.0.downsample.0.weight"} | batch_norm(f"layer{stage}.0.downsample.1")
    state = on_meta(IResNetSpec(name="iresnet50")).state_dict()
    assert set(state) == keys
    assert tuple(state["fc.weight"].shape) == (512, 25088)
    assert tuple(state["layer3.13.conv2.weight"].shape) == (256, 256, 3, 3)


def test_mobilefacenet_has_the_keys_of_published_checkpoints():
    def conv(prefix: str, prelu: bool = True) -> set[str]:
        return {f"{prefix}.conv.weight"} | batch_norm(f"{prefix}.bn") | ({f"{prefix}.prelu.weight"} if prelu else set())

    def bottleneck(prefix: str) -> set[str]:
        return conv(f"{prefix}.conv") | conv(f"{prefix}.conv_dw") | conv(f"{prefix}.project", prelu=False)

    keys = conv("conv1") | conv("conv2_dw") | conv("conv_6_sep") | conv("output_layer.conv_6_dw", prelu=False)
    keys |= {"output_layer.linear.weight"} | batch_norm("output_layer.bn", affine=False)
    for name in ("conv_23", "conv_34", "conv_45"):
        keys |= bottleneck(name)
    for name, blocks in (("conv_3", 4), ("conv_4", 6), ("conv_5", 2)):
        for i in range(blocks):
            keys |= bottleneck(f"{name}.model.{i}")
    state = on_meta(MobileFaceNetSpec(name="mobilefacenet")).state_dict()
    assert set(state) == keys
    assert tuple(state["output_layer.conv_6_dw.conv.weight"].shape) == (512, 1, 7, 7)
    assert tuple(state["conv_45.conv_dw.conv.weight"].shape) == (512, 1, 3, 3)


def test_no_relu_follows_the_sum_of_a_residual_block():
    torch.manual_seed(0)
    net = IResNet((1, 1, 1, 1), embedding=8, image_size=16, width=0.125).eval()
    seen = []
    net.layer1.register_forward_hook(lambda module, inputs, output: seen.append(output))
    net(torch.randn(2, 3, 16, 16))
    assert (seen[0] < 0).any()


def test_the_weight_of_the_last_batch_norm_stays_one():
    net = IResNet((1, 1, 1, 1), embedding=8, image_size=16, width=0.125)
    assert not net.features.weight.requires_grad and net.features.bias.requires_grad
    assert torch.equal(net.features.weight, torch.ones(8))


@pytest.mark.parametrize("side", [56, 33, 16])
@pytest.mark.parametrize(
    "make", [lambda side: IResNet((2, 1, 1, 1), 32, side, 0.125, 0.1), lambda side: MobileFaceNet(32, side, 0.25)]
)
def test_small_and_narrow_nets_give_every_weight_a_finite_gradient(make, side):
    torch.manual_seed(0)
    net = make(side)
    out = net(torch.randn(4, 3, side, side))
    assert out.shape == (4, 32)
    (out * torch.randn(4, 32)).sum().backward()
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    assert [name for name, p in trained.items() if p.grad is None or not torch.isfinite(p.grad).all()] == []


@pytest.mark.slow
@pytest.mark.parametrize("net", [IResNet((1, 1, 1, 1), 8, 16, 0.125), MobileFaceNet(8, 16, 0.125)])
def test_nets_compile_into_one_graph(net):
    x = torch.randn(2, 3, 16, 16)
    assert torch.allclose(torch.compile(net.eval(), backend="eager", fullgraph=True)(x), net(x), atol=1e-6)


def test_the_block_is_chosen_by_its_name():
    adapter = TypeAdapter(Net)
    assert adapter.validate_python({"name": "iresnet34", "width": 0.5}) == IResNetSpec(name="iresnet34", width=0.5)
    assert adapter.validate_python({"name": "mobilefacenet"}) == MobileFaceNetSpec(name="mobilefacenet")
    assert adapter.validate_python({"name": "timm", "model": "resnet18"}) == TimmSpec(name="timm", model="resnet18")
    with pytest.raises(ValidationError, match="iresnet18"):
        adapter.validate_python({"name": "iresnet19"})
    with pytest.raises(ValidationError, match="width"):
        adapter.validate_python({"name": "mobilefacenet", "width": 0})


@pytest.mark.parametrize("spec", [MobileFaceNetSpec(name="mobilefacenet"), IResNetSpec(name="iresnet18")])
@pytest.mark.parametrize("shape", [(3, 112, 96), (3, 8, 8)])
def test_pictures_a_net_cannot_take_are_refused(spec, shape):
    with pytest.raises(UserError, match="square images of 16 pixels or more"):
        build(spec, shape)


def test_grey_pictures_are_taken():
    assert (
        build(MobileFaceNetSpec(name="mobilefacenet", width=0.125, embedding=8), (1, 32, 32)).conv1.conv.in_channels
        == 1
    )


@pytest.mark.parametrize("model", ["resnet10t", "mobilenetv3_small_050", "test_vit"])
def test_timm_nets_become_embedding_nets(model):
    net = build(TimmSpec(name="timm", model=model, embedding=24), (3, 64, 64))
    assert net.training and net.backbone.training
    out = net(torch.randn(2, 3, 64, 64))
    assert out.shape == (2, 24)
    out.square().sum().backward()


def test_a_misspelt_timm_model_suggests_the_right_one():
    with pytest.raises(UserError, match=r"did you mean .*resnet18"):
        build(TimmSpec(name="timm", model="resnet_18"), FACE)


@pytest.mark.parametrize("side", [8, 30, 56])
def test_a_timm_net_that_does_not_take_the_size_is_refused(side):
    with pytest.raises(UserError, match=f"does not take 3 x {side} x {side}"):
        build(TimmSpec(name="timm", model="test_vit"), (3, side, side))


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        (
            "convnext",
            ["task.net.model=convnext_ato"],
            r"task\.net\.model: .* no model 'convnext_ato'; did you mean .*atto",
        ),
        ("face_teacher", ["task.net={name: timm, model: resnet5}"], r"task\.net\.model: .*did you mean resnet5"),
        ("reid", ["task.net.model=nosuchthing"], r"task\.net\.model: .*choose a name from timm\.list_models\(\)"),
        (
            "segment",
            ["task.net={name: bisenetv1, encoder: resnet1x}"],
            r"task\.net\.encoder: .*'resnet1x'; did you mean",
        ),
        ("convnext", ["optim.name=timm:lam"], r"optim\.name: timm has no optimizer .lam."),
    ],
)
def test_a_name_that_timm_lacks_is_refused_before_anything_is_built_or_read(recipe, words, message, monkeypatch):
    import timm

    def build(*_, **__):
        raise AssertionError("a network is built")

    monkeypatch.setattr(timm, "create_model", build)
    with pytest.raises(UserError, match=message):
        recipe_check.check(run_request.RunRequest(RECIPES / f"{recipe}.yaml", words))


def test_names_that_timm_has_pass():
    for recipe, *words in (["convnext", "optim.name=timm:lookahead_adamw"], ["tom500", "optim.name=timm:Lamb"]):
        timm_names.refuse_unknown(run_request.load(run_request.RunRequest(RECIPES / f"{recipe}.yaml", words)))
