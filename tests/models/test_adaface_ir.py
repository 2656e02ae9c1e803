"""AdaFace's IR networks against the published sizes, the key names of CVLface's files, and a formula written out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from trainkit.checkpoint import safe_load
from trainkit.config import loader
from trainkit.errors import UserError
from trainkit.interfaces import DatasetInfo
from trainkit.models.face_backbones import IR, IResNet, build
from trainkit.models.network_specs import IResNetSpec, IRSpec, MobileFaceNetSpec, Net
from trainkit.tasks.adadistill import AdaDistill, Teacher

ROOT = Path(__file__).resolve().parents[2]
FACE = (3, 112, 112)
SIDE = 16
NARROW = IRSpec(name="ir18", embedding=8, width=0.125)


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return build(IRSpec(name=name), FACE)


# IR-18 and IR-101 as counted of AdaFace's files by the table "Comparison" of timm-face (gau-nernst). IR-50 is
# iResNet-50 less a convolution and batch norm on the first way past (64 * 64 + 2 * 64) and the last norm's (2 * 512).
@pytest.mark.parametrize(("name", "count"), [("ir18", 24_020_352), ("ir50", 43_585_600), ("ir101", 65_150_912)])
def test_the_networks_have_the_published_number_of_weights(name, count):
    assert parameters(on_meta(name)) == count


def test_an_ir_network_lacks_one_shortcut_and_the_last_weights_of_an_iresnet():
    with torch.device("meta"):
        iresnet = build(IResNetSpec(name="iresnet50"), FACE)
    assert parameters(iresnet) - parameters(on_meta("ir50")) == 64 * 64 + 2 * 64 + 2 * 512


def batch_norm(prefix: str, affine: bool = True) -> set[str]:
    keys = {f"{prefix}.running_mean", f"{prefix}.running_var", f"{prefix}.num_batches_tracked"}
    return keys | {f"{prefix}.weight", f"{prefix}.bias"} if affine else keys


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
    state = on_meta(name).state_dict()
    assert set(state) == keys
    assert tuple(state["output_layer.3.weight"].shape) == (512, 25088)
    assert tuple(state[f"body.{firsts[2]}.res_layer.4.weight"].shape) == (256, 256, 3, 3)
    assert tuple(state[f"body.{firsts[2]}.shortcut_layer.0.weight"].shape) == (256, 128, 1, 1)


def test_ir50_has_as_many_tensors_and_bytes_as_the_published_file():
    state = on_meta("ir50").state_dict()
    assert len(state) == 467
    size = sum(t.numel() * t.element_size() for t in state.values())
    # model.pt of cvlface_adaface_ir50_webface4m: what is left is PyTorch's bookkeeping, below 300 bytes for a tensor.
    assert 0 < 174_611_121 - size < 300 * len(state)


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
def test_an_embedding_is_what_the_formula_gives(side):
    torch.manual_seed(0)
    net = stirred(IR((2, 1, 1, 2), 8, side, 0.125)).double()
    x = torch.randn(2, 3, side, side, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(net(x), by_hand(net.state_dict(), x, (2, 1, 1, 2)))


@pytest.mark.parametrize("side", [112, 33, 16])
def test_every_weight_gets_a_finite_gradient(side):
    torch.manual_seed(0)
    net = IR((2, 1, 1, 1), 32, side, 0.125)
    out = net(torch.randn(4, 3, side, side))
    assert out.shape == (4, 32)
    (out * torch.randn(4, 32)).sum().backward()
    # The last batch norm takes the mean away, and with it whatever the bias before it adds.
    trained = {name: p for name, p in net.named_parameters() if name != "output_layer.3.bias"}
    assert [name for name, p in trained.items() if not (torch.isfinite(p.grad).all() and p.grad.any())] == []


def test_embeddings_are_not_normalised():
    torch.manual_seed(0)
    norms = build(NARROW, (3, SIDE, SIDE))(torch.randn(16, 3, SIDE, SIDE)).norm(dim=1)
    assert norms.min() < 0.9 * norms.max()


def test_bgr_turns_the_channels_round_before_the_first_layer():
    torch.manual_seed(0)
    rgb, bgr = IR(embedding=8, image_size=SIDE, width=0.125), IR(embedding=8, image_size=SIDE, width=0.125, bgr=True)
    bgr.load_state_dict(stirred(rgb).state_dict())
    bgr.eval()
    x = torch.randn(2, 3, SIDE, SIDE)
    assert torch.equal(bgr(x), rgb(x[:, [2, 1, 0]])) and not torch.allclose(bgr(x), rgb(x))
    with pytest.raises(UserError, match=r"net ir18: bgr with images of 1 channels; expected 3 channels"):
        build(IRSpec(name="ir18", bgr=True), (1, SIDE, SIDE))


def distil(file, net=NARROW, student=None) -> AdaDistill:
    student = student or MobileFaceNetSpec(name="mobilefacenet", embedding=8, width=0.125)
    return AdaDistill(student=student, teacher=Teacher(net=net, weights=str(file)))


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
        IResNetSpec(name="iresnet18", embedding=8, width=0.125),
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
    safe_load.write_tensors(
        tmp_path / "r18.safetensors", IResNet(embedding=8, image_size=SIDE, width=0.125).state_dict()
    )
    with pytest.raises(UserError, match=r"does not fit IR; \d+ missing: input_layer.*unexpected: bn1"):
        safe_load.load_into(build(NARROW, (3, SIDE, SIDE)), safe_load.read_tensors(tmp_path / "r18.safetensors"), "r18")


def test_a_recipe_names_an_ir_teacher():
    text = "task.teacher={net: {name: ir50}, weights: cvlface/model.pt}"
    recipe = loader.load(ROOT / "recipes" / "adadistill_ms1mv2.yaml", [text])
    assert recipe.task.teacher.net == IRSpec(name="ir50", embedding=512, width=1.0, dropout=0.4, bgr=False)


def test_the_block_is_checked():
    adapter = TypeAdapter(Net)
    assert adapter.validate_python({"name": "ir101", "bgr": True}) == IRSpec(name="ir101", bgr=True)
    with pytest.raises(ValidationError, match="ir101"):
        adapter.validate_python({"name": "ir100"})
    with pytest.raises(ValidationError, match="dropout"):
        adapter.validate_python({"name": "ir18", "dropout": 1})
    with pytest.raises(UserError, match="square images of 16 pixels or more"):
        build(IRSpec(name="ir18"), (3, 112, 96))
