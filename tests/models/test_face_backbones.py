"""Networks for embeddings against the published figures, the keys of published files, and formulas written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from multiply_adds import macs
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from trainkit.checkpoint import safe_load
from trainkit.config import loader, run_request
from trainkit.config.loader import RECIPES
from trainkit.errors import UserError
from trainkit.experiments import recipe_check, timm_names
from trainkit.interfaces import DatasetInfo
from trainkit.models import face_backbones
from trainkit.models.face_backbones import IR, IResNet, build
from trainkit.models.network_specs import IResNetSpec, IRSpec, MobileFaceNetSpec, Net, TimmSpec
from trainkit.tasks.adadistill import AdaDistill, Teacher

FACE = (3, 112, 112)
SIDE = 16
NARROW = IRSpec(name="ir18", embedding=8, width=0.125)
RESIDUAL = IResNetSpec(name="iresnet18", embedding=8, width=0.125)
MOBILE = MobileFaceNetSpec(name="mobilefacenet", embedding=8, width=0.125)


@pytest.fixture
def short(monkeypatch):
    """Residual networks of 18 layers have fewer blocks."""
    for name in ("iresnet18", "ir18"):
        monkeypatch.setitem(face_backbones.LAYERS, name, (2, 1, 1, 2))


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


# IR-18 and IR-101 as counted of AdaFace's files by the table "Comparison" of timm-face (gau-nernst). IR-50 is
# iResNet-50 less a convolution and batch norm on the first way past (64 * 64 + 2 * 64) and the last norm's (2 * 512).
@pytest.mark.parametrize(("name", "count"), [("ir18", 24_020_352), ("ir50", 43_585_600), ("ir101", 65_150_912)])
def test_the_networks_have_the_published_number_of_weights(name, count):
    assert parameters(on_meta(IRSpec(name=name))) == count


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


@pytest.mark.parametrize(
    ("name", "stages"), [("ir18", (2, 2, 2, 2)), ("ir50", (3, 4, 14, 3)), ("ir101", (3, 13, 30, 3))]
)
def test_the_keys_are_those_of_cvlface(name, stages):
    keys = {"input_layer.0.weight", "input_layer.2.weight", "output_layer.3.weight", "output_layer.3.bias"}
    keys |= batch_norm("input_layer.1") | batch_norm("output_layer.0") | batch_norm("output_layer.4", affine=False)
    firsts = [sum(stages[:stage]) for stage in range(4)]
    for i in range(sum(stages)):
        layer = f"body.{i}.res_layer"
        keys |= {f"{layer}.1.weight", f"{layer}.3.weight", f"{layer}.4.weight"}
        keys |= batch_norm(f"{layer}.0") | batch_norm(f"{layer}.2") | batch_norm(f"{layer}.5")
        if i in firsts[1:]:  # the first stage keeps its 64 channels, so nothing is on its way past
            keys |= {f"body.{i}.shortcut_layer.0.weight"} | batch_norm(f"body.{i}.shortcut_layer.1")
    state = on_meta(IRSpec(name=name)).state_dict()
    assert set(state) == keys
    assert tuple(state["output_layer.3.weight"].shape) == (512, 25088)
    assert tuple(state[f"body.{firsts[2]}.res_layer.4.weight"].shape) == (256, 256, 3, 3)
    assert tuple(state[f"body.{firsts[2]}.shortcut_layer.0.weight"].shape) == (256, 128, 1, 1)


def by_hand(state: dict[str, Tensor], x: Tensor, stages: tuple[int, ...]) -> Tensor:
    """The network in evaluation, from its tensors alone."""

    def norm(x: Tensor, at: str) -> Tensor:
        shape = (1, -1) + (1,) * (x.ndim - 2)
        x = (x - state[f"{at}.running_mean"].view(shape)) / (state[f"{at}.running_var"].view(shape) + 1e-5).sqrt()
        if f"{at}.weight" not in state:
            return x
        return x * state[f"{at}.weight"].view(shape) + state[f"{at}.bias"].view(shape)

    def prelu(x: Tensor, at: str) -> Tensor:
        return torch.where(x > 0, x, state[f"{at}.weight"].view(1, -1, 1, 1) * x)

    x = prelu(norm(F.conv2d(x, state["input_layer.0.weight"], padding=1), "input_layer.1"), "input_layer.2")
    i = 0
    for count in stages:
        for stride in [2] + [1] * (count - 1):
            at = f"body.{i}"
            past = F.max_pool2d(x, 1, stride)
            if f"{at}.shortcut_layer.0.weight" in state:
                past = norm(F.conv2d(past, state[f"{at}.shortcut_layer.0.weight"]), f"{at}.shortcut_layer.1")
            y = F.conv2d(norm(x, f"{at}.res_layer.0"), state[f"{at}.res_layer.1.weight"], padding=1)
            y = prelu(norm(y, f"{at}.res_layer.2"), f"{at}.res_layer.3")
            y = F.conv2d(y, state[f"{at}.res_layer.4.weight"], stride=stride, padding=1)
            x = norm(y, f"{at}.res_layer.5") + past
            i += 1
    x = norm(x, "output_layer.0").flatten(1)
    return norm(x @ state["output_layer.3.weight"].T + state["output_layer.3.bias"], "output_layer.4")


def stirred(net: nn.Module) -> nn.Module:
    """Every tensor drawn anew, statistics too, so that none of them can be left out unseen."""
    for name, tensor in net.state_dict().items():
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 2)
        elif tensor.is_floating_point():
            tensor.copy_(torch.randn_like(tensor) * 0.3)
    return net.eval()


@pytest.mark.parametrize("side", [33, 16])
def test_an_embedding_of_ir_is_what_the_formula_gives(side, short):
    torch.manual_seed(0)
    net = stirred(build(NARROW, (3, side, side))).double()
    x = torch.randn(2, 3, side, side, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(net(x), by_hand(net.state_dict(), x, (2, 1, 1, 2)))


def test_an_iresnet_is_an_ir_network_with_one_shortcut_and_the_last_weights_more(short):
    """Its tensors under the other names, the shortcut of the first stage a choice of every other pixel."""
    torch.manual_seed(0)
    net = stirred(build(RESIDUAL, (3, SIDE, SIDE)))
    state, block = {}, ("bn1", "conv1", "bn2", "prelu", "conv2", "bn3")
    with torch.no_grad():
        first = net.layer1[0].downsample
        first[0].weight.copy_(torch.eye(8)[:, :, None, None])
        first[1].load_state_dict(nn.BatchNorm2d(8, eps=0.0).state_dict())
        first[1].eps = 0.0
        net.features.load_state_dict(nn.BatchNorm1d(8).state_dict() | {"running_var": net.features.running_var})
    blocks = [b for stage in (net.layer1, net.layer2, net.layer3, net.layer4) for b in stage]
    for i, module in enumerate(blocks):
        parts = {f"res_layer.{k}": getattr(module, name) for k, name in enumerate(block)}
        parts |= {"shortcut_layer": module.downsample} if i and module.downsample is not None else {}
        for at, part in parts.items():
            state |= {f"body.{i}.{at}.{name}": t for name, t in part.state_dict().items()}
    ends = {"input_layer.0": net.conv1, "input_layer.1": net.bn1, "input_layer.2": net.prelu}
    ends |= {"output_layer.0": net.bn2, "output_layer.3": net.fc, "output_layer.4": net.features}
    for at, part in ends.items():
        state |= {f"{at}.{name}": t for name, t in part.state_dict().items()}
    other, x = build(NARROW, (3, SIDE, SIDE)).eval(), torch.randn(2, 3, SIDE, SIDE)
    other.load_state_dict({name: state[name] for name in other.state_dict()})
    torch.testing.assert_close(net(x), other(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", [56, 33, 16])
@pytest.mark.parametrize("spec", [NARROW, RESIDUAL, MOBILE], ids=lambda spec: spec.name)
def test_small_and_narrow_nets_give_every_weight_a_finite_gradient(spec, side, short):
    torch.manual_seed(0)
    out = (net := build(spec, (3, side, side)))(torch.randn(4, 3, side, side))
    assert out.shape == (4, 8)
    (out * torch.randn(4, 8)).sum().backward()
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    assert [name for name, p in trained.items() if p.grad is None or not torch.isfinite(p.grad).all()] == []
    assert not isinstance(net, IResNet) or "features.weight" not in trained, "the last batch norm keeps weights of one"


@pytest.mark.slow
@pytest.mark.parametrize("spec", [RESIDUAL, MOBILE], ids=lambda spec: spec.name)
def test_nets_compile_into_one_graph(spec, short):
    net, x = build(spec, (3, SIDE, SIDE)).eval(), torch.randn(2, 3, SIDE, SIDE)
    assert torch.allclose(torch.compile(net, backend="eager", fullgraph=True)(x), net(x), atol=1e-6)


def test_bgr_turns_the_channels_round_before_the_first_layer(short):
    torch.manual_seed(0)
    rgb, bgr = (build(IRSpec(name="ir18", embedding=8, width=0.125, bgr=bgr), (3, SIDE, SIDE)) for bgr in (False, True))
    bgr.load_state_dict(stirred(rgb).state_dict())
    bgr.eval()
    x = torch.randn(2, 3, SIDE, SIDE)
    assert torch.equal(bgr(x), rgb(x[:, [2, 1, 0]])) and not torch.allclose(bgr(x), rgb(x))
    with pytest.raises(UserError, match=r"net ir18: bgr with images of 1 channels; expected 3 channels"):
        build(IRSpec(name="ir18", bgr=True), (1, SIDE, SIDE))


# Teachers from files


def distil(file, net=NARROW) -> AdaDistill:
    return AdaDistill(student=MOBILE, teacher=Teacher(net=net, weights=str(file)))


@pytest.fixture
def published(tmp_path):
    """A file as CVLface writes `pretrained_model/model.pt`, of a narrow network, and that network."""
    torch.manual_seed(1)
    net = stirred(build(NARROW, (3, SIDE, SIDE)))
    file = tmp_path / "model.pt"
    torch.save({f"net.{name}": tensor for name, tensor in net.state_dict().items()}, file)
    return file, net


def test_a_file_of_cvlface_becomes_a_teacher_that_gives_the_same_embeddings(published):
    file, net = published
    networks = distil(file).build(DatasetInfo(3, (3, SIDE, SIDE), ""), {"teacher": file}, 0)
    teacher = networks.frozen["teacher"].eval()
    assert isinstance(teacher, IR)
    x = torch.randn(2, 3, SIDE, SIDE)
    assert torch.equal(teacher(x), net(x))


@pytest.mark.parametrize(
    "other",
    [
        RESIDUAL,
        IRSpec(name="ir50", embedding=8, width=0.125),
        IRSpec(name="ir18", embedding=8, width=0.25),
    ],
)
def test_a_file_of_another_network_is_refused_and_says_what_differs(published, other):
    file, _ = published
    task = distil(file, other)
    with pytest.raises(UserError, match=r"model\.pt: does not fit (IR|IResNet); \d+ (missing|of another shape)"):
        task.build(DatasetInfo(3, (3, SIDE, SIDE), ""), {"teacher": file}, 0)


def test_a_file_of_iresnet_is_refused_by_an_ir_network(tmp_path):
    file = tmp_path / "r18.safetensors"
    safe_load.write_tensors(file, build(RESIDUAL, (3, SIDE, SIDE)).state_dict())
    with pytest.raises(UserError, match=r"does not fit IR; \d+ missing: input_layer.*unexpected: bn1"):
        safe_load.load_into(build(NARROW, (3, SIDE, SIDE)), safe_load.read_tensors(file), "r18")


# Blocks of recipes


def test_the_block_is_chosen_by_its_name_and_checked():
    adapter = TypeAdapter(Net)
    for given, spec in [
        ({"name": "iresnet34", "width": 0.5}, IResNetSpec(name="iresnet34", width=0.5)),
        ({"name": "mobilefacenet"}, MobileFaceNetSpec(name="mobilefacenet")),
        ({"name": "timm", "model": "resnet18"}, TimmSpec(name="timm", model="resnet18")),
        ({"name": "ir101", "bgr": True}, IRSpec(name="ir101", bgr=True)),
    ]:
        assert adapter.validate_python(given) == spec
    for wrong, said in [
        ({"name": "iresnet19"}, "iresnet18"),
        ({"name": "ir100"}, "ir101"),
        ({"name": "mobilefacenet", "width": 0}, "width"),
        ({"name": "ir18", "dropout": 1}, "dropout"),
    ]:
        with pytest.raises(ValidationError, match=said):
            adapter.validate_python(wrong)
    text = "task.teacher={net: {name: ir50}, weights: cvlface/model.pt}"
    recipe = loader.load(RECIPES / "adadistill_ms1mv2.yaml", [text])
    assert recipe.task.teacher.net == IRSpec(name="ir50", embedding=512, width=1.0, dropout=0.4, bgr=False)


@pytest.mark.parametrize("spec", [MOBILE, RESIDUAL, NARROW], ids=lambda spec: spec.name)
@pytest.mark.parametrize("shape", [(3, 112, 96), (3, 8, 8)])
def test_pictures_a_net_cannot_take_are_refused(spec, shape):
    with pytest.raises(UserError, match="square images of 16 pixels or more"):
        build(spec, shape)


def test_grey_pictures_are_taken():
    assert build(MOBILE, (1, 32, 32)).conv1.conv.in_channels == 1


# Networks of timm


@pytest.mark.parametrize("model", ["resnet10t", "mobilenetv3_small_050", "test_vit"])
def test_timm_nets_become_embedding_nets(model):
    net = build(TimmSpec(name="timm", model=model, embedding=24), (3, 64, 64))
    assert net.training and net.backbone.training
    out = net(torch.randn(2, 3, 64, 64))
    assert out.shape == (2, 24)
    out.square().sum().backward()


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
