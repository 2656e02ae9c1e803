"""The small networks for eye crops: the figures of the origin, each part against plain formulas, no dead weight."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from multiply_adds import macs
from pydantic import TypeAdapter, ValidationError
from torch import nn

from trainkit.config.validation import to_tree, validate
from trainkit.errors import UserError
from trainkit.losses.margin import class_head, class_loss, margin_logits, margin_ramp
from trainkit.losses.margin_specs import ArcFace, CosFace, NoMargin
from trainkit.models.eye import (
    Block,
    ChannelNorm,
    DropPath,
    EyeNet,
    SeparableBlock,
    TokenGrid,
    Transformer,
)
from trainkit.models.face_backbones import build
from trainkit.models.network_specs import EyeSpec, Net, TimmSpec

EYE = (3, 32, 64)
BACKBONES = ("eye_convnext", "eye_baseline")
HEADS = ("avg", "transformer")
each_backbone = pytest.mark.parametrize("backbone", BACKBONES)
each_head = pytest.mark.parametrize("head", HEADS)


def eye(name="eye_convnext", shape=EYE, **settings) -> EyeNet:
    return build(EyeSpec(name=name, **settings), shape)


def small(name="eye_convnext", head="transformer", **settings) -> EyeNet:
    torch.manual_seed(0)
    return eye(name, (3, 16, 32), base_channels=8, head=head, **settings)


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_random_weights(module: nn.Module, seed: int = 0) -> nn.Module:
    """The first weights leave the blocks of a ConvNeXt next to nothing; formulas need more to bite on."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    for name, tensor in module.state_dict().items():
        if name.endswith("running_var"):
            tensor.abs_().add_(0.5)
    return module


# The figures of the origin


@pytest.mark.parametrize(
    ("base", "backbone", "with_transformer", "cost"),
    [(32, 0.103, 0.170, 5.3), (48, 0.222, 0.372, 11.2), (64, 0.386, 0.652, 19.4), (96, 0.850, 1.445, 42.5)],
)
def test_the_convnext_has_the_size_and_cost_of_the_origin_to_every_digit_given(base, backbone, with_transformer, cost):
    net = eye(base_channels=base, head="avg")
    assert round(parameters(net) / 1e6, 3) == backbone
    assert round(macs(net, EYE) / 1e6, 1) == cost
    assert round(parameters(eye(base_channels=base, head="transformer")) / 1e6, 3) == with_transformer


@pytest.mark.parametrize(
    ("base", "thousands", "cost"), [(32, 11.6, 2.7), (48, 23.5, 5.4), (64, 39.6, 9.0), (96, 83.9, 19.1)]
)
def test_the_baseline_has_the_cost_of_the_origin_and_nearly_its_size(base, thousands, cost):
    net = eye("eye_baseline", base_channels=base, head="avg")
    assert parameters(net) / 1e3 == pytest.approx(thousands, rel=0.006)
    assert round(macs(net, EYE) / 1e6, 1) == cost


# Each part against plain loops


def plain_conv(x, weight, bias=None, stride=1, padding=0, by_channel=False):
    """Convolution of one image (C, H, W), lists in and out."""
    height, width, k = len(x[0]), len(x[0][0]), len(weight[0][0])
    sides = [(n + 2 * padding - k) // stride + 1 for n in (height, width)]
    out = []
    for o in range(len(weight)):
        inputs = [(o, 0)] if by_channel else [(c, c) for c in range(len(x))]
        plane = [[bias[o] if bias else 0.0] * sides[1] for _ in range(sides[0])]
        for i in range(sides[0]):
            for j in range(sides[1]):
                for c, w in inputs:
                    for a in range(k):
                        for b in range(k):
                            y, z = i * stride + a - padding, j * stride + b - padding
                            if 0 <= y < height and 0 <= z < width:
                                plane[i][j] += x[c][y][z] * weight[o][w][a][b]
        out.append(plane)
    return out


def plain_norm(values, weight, bias):
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values) + 1e-6)
    return [(v - mean) / spread * w + b for v, w, b in zip(values, weight, bias, strict=True)]


def plain_linear(values, weight, bias):
    return [sum(v * w for v, w in zip(values, row, strict=True)) + b for row, b in zip(weight, bias, strict=True)]


def gelu(v):
    return v * (1 + math.erf(v / math.sqrt(2))) / 2


def at_places(x, function):
    """A function of the channels, at each place of an image in lists."""
    planes = [[function([plane[i][j] for plane in x]) for j in range(len(x[0][0]))] for i in range(len(x[0]))]
    return [[[cell[c] for cell in row] for row in planes] for c in range(len(planes[0][0]))]


@pytest.mark.parametrize("before", [3, 6])
def test_a_convnext_block_equals_its_formula(before):
    block = with_random_weights(Block(before, 6))
    p = {name: tensor.tolist() for name, tensor in block.state_dict().items()}
    x = random(1, before, 6, 4, seed=1)
    plain = x[0].tolist()
    if before == 3:
        plain = at_places(plain, lambda v: plain_norm(v, p["downsample.0.weight"], p["downsample.0.bias"]))
        plain = plain_conv(plain, p["downsample.1.weight"], p["downsample.1.bias"], stride=2)

    def inner(v):
        hidden = plain_linear(plain_norm(v, p["norm.weight"], p["norm.bias"]), p["widen.weight"], p["widen.bias"])
        out = plain_linear([gelu(h) for h in hidden], p["narrow.weight"], p["narrow.bias"])
        return [s * o for s, o in zip(p["scale"], out, strict=True)]

    branch = at_places(plain_conv(plain, p["depthwise.weight"], p["depthwise.bias"], 1, 3, True), inner)
    expected = torch.tensor(plain) + torch.tensor(branch)
    assert torch.allclose(block(x)[0], expected, atol=1e-4)


@pytest.mark.parametrize(("before", "after"), [(4, 4), (2, 4)])
def test_a_separable_block_equals_its_formula(before, after):
    block = with_random_weights(SeparableBlock(before, after)).eval()
    p = {name: tensor.tolist() for name, tensor in block.state_dict().items()}
    x = random(1, before, 5, 6, seed=1)

    def batch_norm(v, name):
        keys = ("running_mean", "running_var", "weight", "bias")
        return [
            (a - m) / math.sqrt(var + 1e-5) * w + b
            for a, m, var, w, b in zip(v, *(p[f"{name}.{key}"] for key in keys), strict=True)
        ]

    def prelu(v, name):
        return [a if a > 0 else s * a for a, s in zip(v, p[f"{name}.weight"], strict=True)]

    y = plain_conv(x[0].tolist(), p["depthwise.weight"], None, 1 if before == after else 2, 1, True)
    y = at_places(y, lambda v: prelu(batch_norm(v, "bn1"), "prelu1"))
    y = at_places(plain_conv(y, p["pointwise.weight"]), lambda v: batch_norm(v, "bn2"))
    if before == after:
        y = (torch.tensor(y) + x[0]).tolist()
    expected = torch.tensor(at_places(y, lambda v: prelu(v, "prelu2")))
    assert torch.allclose(block(x)[0], expected, atol=1e-5)


def test_the_norm_is_over_channels_at_each_place_and_not_the_group_norm_of_the_origin():
    norm, x = with_random_weights(ChannelNorm(5)), random(1, 5, 3, 4)
    weight, bias = norm.weight.tolist(), norm.bias.tolist()
    expected = torch.tensor(at_places(x[0].tolist(), lambda v: plain_norm(v, weight, bias)))
    assert torch.allclose(norm(x)[0], expected, atol=1e-5)

    moved = x.clone()
    moved[..., 0, 0] = 100 * torch.arange(5.0)
    of_the_origin = nn.GroupNorm(1, 5, eps=1e-6)
    of_the_origin.load_state_dict(norm.state_dict())
    assert torch.equal(norm(moved)[..., 1:, :], norm(x)[..., 1:, :])
    assert (of_the_origin(moved) - of_the_origin(x))[..., 1:, :].abs().max() > 0.1


@pytest.mark.parametrize(("size", "grid"), [((4, 8), (2, 4)), ((3, 5), (2, 4)), ((5, 7), (5, 7)), ((7, 4), (1, 3))])
def test_tokens_are_the_means_of_the_grid_row_by_row(size, grid):
    x = random(2, 3, *size)
    tokens = TokenGrid(size, grid)(x)
    for i in range(grid[0]):
        for j in range(grid[1]):
            rows = range(i * size[0] // grid[0], math.ceil((i + 1) * size[0] / grid[0]))
            columns = range(j * size[1] // grid[1], math.ceil((j + 1) * size[1] / grid[1]))
            cells = [x[:, :, r, c] for r in rows for c in columns]
            assert torch.allclose(tokens[:, i * grid[1] + j], sum(cells) / len(cells), atol=1e-6)
    assert torch.allclose(tokens, F.adaptive_avg_pool2d(x, grid).flatten(2).mT, atol=1e-6)


@pytest.mark.parametrize(("channels", "heads"), [(64, 8), (20, 5), (6, 6)])
def test_the_transformer_head_equals_torchs_own_encoder(channels, heads):
    head = with_random_weights(Transformer(channels, (4, 8), (2, 4)))
    layer = nn.TransformerEncoderLayer(channels, heads, max(128, 2 * channels), 0.0, "gelu", 1e-5, True, True)
    other = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    names = {
        "qkv.weight": "self_attn.in_proj_weight",
        "qkv.bias": "self_attn.in_proj_bias",
        "out": "self_attn.out_proj",
    }
    names |= {"mlp.0": "linear1", "mlp.2": "linear2"}
    state = {}
    for name, tensor in head.layers.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(f".{ours}", f".{theirs}")
        state[f"layers.{name}"] = tensor
    other.load_state_dict(state)
    x = random(3, channels, 4, 8, seed=2)
    tokens = F.adaptive_avg_pool2d(x, (2, 4)).flatten(2).mT + head.place
    assert torch.allclose(head(x), other(tokens).mean(1), atol=1e-4)


# No dead weight


@each_backbone
@each_head
@pytest.mark.parametrize(
    "margin",
    [NoMargin(), NoMargin(loss="bce"), ArcFace(m=0.2, scale=8, ramp_epochs=10), CosFace(m=0.18, scale=12)],
    ids=["ce", "bce", "arcface", "cosface"],
)
def test_every_parameter_gets_a_gradient_under_every_loss(backbone, head, margin):
    """In the origin the margin read the pooled map: the head learnt nothing, and DDP found unused parameters."""
    net = small(backbone, head, embedding=12)
    classifier, label = class_head(margin, 2, 12), torch.tensor([0, 1, 1, 0, 1, 0])
    scores = classifier(net(random(6, 3, 16, 32)))
    class_loss(margin_logits(scores, label, margin, ramp=margin_ramp(margin, 0)), label, margin)[0].backward()
    named = [*net.named_parameters(), *classifier.named_parameters()]
    assert len(named) > 20
    assert [n for n, p in named if p.grad is None or not torch.isfinite(p.grad).all() or not p.grad.any()] == []


# Images


@pytest.mark.parametrize("shape", [(1, 32, 64), (3, 24, 40), (4, 64, 32), (3, 16, 128)])
@each_backbone
def test_pictures_of_other_sizes_and_channels_are_taken(backbone, shape):
    assert eye(backbone, shape, base_channels=8)(random(2, *shape)).shape == (2, 16)


@pytest.mark.parametrize("shape", [(3, 31, 64), (3, 33, 63), (3, 28, 64), (3, 32, 30), (3, 8, 64), (3, 16, 24)])
def test_sizes_that_leave_no_whole_grid_are_refused_and_those_that_fit_are_named(shape):
    found = f"images of {shape[2]} x {shape[1]} pixels"
    with pytest.raises(UserError, match=rf"{found}; expected sides that are multiples of 8, at least 32 x 16"):
        eye(shape=shape)
    least = (3, 16, 32)
    assert eye(shape=least, base_channels=8)(random(1, *least)).shape == (1, 16)
    if shape[1] % 8 == shape[2] % 8 == 0:
        assert eye(shape=shape, base_channels=8, head="avg")(random(1, *shape)).shape == (1, 16)


def test_the_baseline_takes_odd_sizes_down_to_one_pixel_a_token():
    assert eye("eye_baseline", (3, 5, 13), base_channels=8)(random(2, 3, 5, 13)).shape == (2, 16)
    for shape in ((3, 4, 13), (3, 5, 12)):
        with pytest.raises(UserError, match=r"expected at least 13 x 5"):
            eye("eye_baseline", shape)
    assert eye("eye_baseline", (3, 33, 47), base_channels=8)(random(2, 3, 33, 47)).shape == (2, 16)


# The block of a recipe


def test_the_block_says_how_long_the_embedding_is():
    adapter = TypeAdapter(Net)
    spec = adapter.validate_python({"name": "eye_convnext"})
    assert (spec.base_channels, spec.num_blocks, spec.head, spec.grid, spec.embedding) == (
        32,
        4,
        "transformer",
        (2, 4),
        64,
    )
    for blocks, embedding in ((1, 48), (2, 48), (3, 96), (4, 96), (5, 192), (7, 384)):
        assert EyeSpec(name="eye_baseline", base_channels=48, num_blocks=blocks).embedding == embedding
    assert build(spec, EYE).projection is None
    net = eye(embedding=24)
    assert net(random(2, *EYE)).shape == (2, 24) and net.projection.in_features == 64
    resolved = to_tree(EyeSpec(name="eye_convnext", base_channels=64, grid=(1, 2)))
    assert resolved["embedding"] == 128
    assert validate(EyeSpec, resolved, {}) == EyeSpec(name="eye_convnext", base_channels=64, grid=(1, 2))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"base_channels": 0}, "base_channels"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": 40}, "num_blocks"),
        ({"grid": [0, 4]}, "grid"),
        ({"embedding": 0}, "embedding"),
        ({"drop_path": 1.0}, "drop_path"),
        ({"dropout": -0.1}, "dropout"),
        ({"head": "mlp_mixer"}, "transformer"),
    ],
)
def test_impossible_settings_are_refused(wrong, told):
    with pytest.raises(ValidationError, match=told):
        TypeAdapter(Net).validate_python({"name": "eye_convnext", **wrong})


def test_the_names_of_the_weights_are_those_of_earlier_checkpoints():
    norm = ("weight", "bias")
    keys = {f"stem.{i}.{w}" for i in (0, 1) for w in norm} | {"head.place"}
    for i in range(4):
        parts = ("depthwise", "norm", "widen", "narrow", *(("downsample.0", "downsample.1") if i == 2 else ()))
        keys |= {f"blocks.{i}.{part}.{w}" for part in parts for w in norm} | {f"blocks.{i}.scale"}
    for i in (0, 1):
        parts = ("norm1", "qkv", "out", "norm2", "mlp.0", "mlp.2")
        keys |= {f"head.layers.{i}.{part}.{w}" for part in parts for w in norm}
    assert set(eye().state_dict()) == keys
    norm = (*norm, "running_mean", "running_var", "num_batches_tracked")
    keys = {"stem.0.weight", "stem.2.weight", "projection.weight", "projection.bias"} | {f"stem.1.{w}" for w in norm}
    for i in range(4):
        keys |= {f"blocks.{i}.{part}.weight" for part in ("depthwise", "pointwise", "prelu1", "prelu2")}
        keys |= {f"blocks.{i}.{part}.{w}" for part in ("bn1", "bn2") for w in norm}
    assert set(eye("eye_baseline", head="avg", embedding=8).state_dict()) == keys


# What is random in training


def test_a_dropped_path_leaves_samples_out_whole_and_keeps_the_mean():
    drop, x = DropPath(0.25), torch.ones(4000, 2, 3)
    torch.manual_seed(0)
    out = drop(x)
    assert ((out == 0).flatten(1).all(1) | (out == 4 / 3).flatten(1).all(1)).all()
    assert out.mean().item() == pytest.approx(1, abs=0.03)
    assert torch.equal(drop.eval()(x), x)


@each_backbone
def test_later_blocks_are_left_out_more_often(backbone):
    net = small(backbone, drop_path=0.2)
    assert [block.drop_path.rate for block in net.blocks] == pytest.approx([0.05, 0.1, 0.15, 0.2])


@each_head
def test_dropout_and_dropped_paths_act_in_training_alone(head):
    net = with_random_weights(small(head=head, dropout=0.3, drop_path=0.3))
    x = random(4, 3, 16, 32)
    assert not torch.equal(net(x), net(x))
    assert torch.equal(net.eval()(x), net(x))


# Memory layout, precision, compiler


@each_backbone
@each_head
def test_channels_last_gives_the_same_and_maps_keep_the_layout(backbone, head):
    net, x = with_random_weights(small(backbone, head)).eval(), random(3, 3, 16, 32)
    expected, layouts = net(x), []
    for block in net.blocks:
        block.register_forward_hook(
            lambda module, inputs, out: layouts.append(out.is_contiguous(memory_format=torch.channels_last))
        )
    out = net.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last))
    assert torch.allclose(out, expected, atol=1e-4, rtol=1e-4)
    assert layouts == [True] * 4


@pytest.mark.slow
@pytest.mark.parametrize(("backbone", "head"), [("eye_convnext", "avg"), *(("eye_baseline", head) for head in HEADS)])
def test_nets_compile_into_one_graph_and_export_with_their_names(backbone, head):
    net, x = small(backbone, head, drop_path=0.1, dropout=0.1, embedding=12), random(4, 3, 16, 32)
    torch.compiler.reset()  # one forward serves all nets, and a few graphs of it are all that is kept
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compiled(x).square().sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    net.eval()
    assert torch.allclose(compiled(x), net(x), atol=1e-5)
    exported = torch.export.export(net, (x,))
    assert set(exported.state_dict) == set(net.state_dict())
    assert torch.allclose(exported.module()(x), net(x), atol=1e-5)


# Further arguments of timm's networks


def test_timm_networks_take_further_arguments():
    spec = TypeAdapter(Net).validate_python(
        {
            "name": "timm",
            "model": "test_convnext",
            "embedding": 8,
            "args": {"drop_path_rate": 0.3, "depths": [1, 1, 2, 1], "conv_mlp": True, "norm_eps": 1e-5},
        }
    )
    net = build(spec, (3, 64, 64))
    rates = [m.drop_prob for m in net.modules() if type(m).__name__ == "DropPath"]
    assert max(rates) == pytest.approx(0.3)
    assert [len(stage.blocks) for stage in net.backbone.stages] == [1, 1, 2, 1]
    assert net(random(2, 3, 64, 64)).shape == (2, 8)
    assert validate(TimmSpec, to_tree(spec), {}) == spec


@pytest.mark.parametrize("model", ["test_convnext", "resnet10t", "mobilenetv3_small_050", "test_vit"])
def test_an_argument_that_a_timm_network_does_not_take_is_named(model):
    with pytest.raises(UserError, match="drop_path_rte"):
        build(TimmSpec(name="timm", model=model, args={"drop_path_rte": 0.1}), (3, 64, 64))
