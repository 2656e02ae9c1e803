"""BiSeNet V1 and V2: sizes by a formula of their own, shapes, cost, gradients, and the names of published weights."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest
import torch
from multiply_adds import macs
from torch import nn
from torch.nn import functional as F

from trainkit.models import bisenet
from trainkit.models.bisenet import BiSeNetV1, BiSeNetV2, from_published

BOTH = pytest.mark.parametrize("make", [BiSeNetV1, BiSeNetV2])


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def on_meta(make, *args, **kwargs) -> nn.Module:
    with torch.device("meta"):
        return make(*args, **kwargs)


def cb(before: int, after: int, kernel: int, groups: int = 1) -> int:
    """Parameters of a convolution without bias and of the batch norm after it."""
    return before * after * kernel**2 // groups + 2 * after


def v1(classes: int, aux: bool, kind: str = "squeeze") -> int:
    resnet18 = 11_689_512 - 513 * 1000  # the classifier's, less its last layer
    spatial = cb(3, 64, 7) + 2 * cb(64, 64, 3) + cb(64, 128, 1)
    attention = sum(cb(before, 128, 3) + cb(128, 128, 1) for before in (256, 512))
    context = attention + 2 * cb(128, 128, 3) + cb(512, 128, 1)
    fusion = cb(256, 256, 1) + (2 * 256 * 64 if kind == "squeeze" else cb(256, 256, 1))
    head = cb(256, 256, 3) + 257 * classes
    return resnet18 + spatial + context + fusion + head + aux * 2 * (cb(128, 64, 3) + 65 * classes)


def v2(classes: int, aux: bool, head: int = 1024) -> int:
    def first(a: int, b: int) -> int:
        way = cb(a, a, 3) + cb(a, 6 * a, 3, a) + cb(6 * a, 6 * a, 3, 6 * a) + cb(6 * a, b, 1)
        return way + cb(a, a, 3, a) + cb(a, b, 1)

    def further(a: int) -> int:
        return cb(a, a, 3) + cb(a, 6 * a, 3, a) + cb(6 * a, a, 1)

    detail = cb(3, 64, 3) + 4 * cb(64, 64, 3) + cb(64, 128, 3) + 2 * cb(128, 128, 3)
    stem = cb(3, 16, 3) + cb(16, 8, 1) + cb(8, 16, 3) + cb(32, 16, 3)
    stages = first(16, 32) + further(32) + first(32, 64) + further(64) + first(64, 128) + 3 * further(128)
    context = 2 * 128 + cb(128, 128, 1) + cb(128, 128, 3)
    aggregation = 2 * (cb(128, 128, 3, 128) + 128 * 128) + 3 * cb(128, 128, 3)
    heads = cb(128, head, 3) + (head + 1) * classes
    for before, second in ((16, 16), (32, 64), (64, 256), (128, 1024)) if aux else ():
        heads += cb(before, 128, 3) + cb(128, second, 3) + (second + 1) * classes
    return detail + stem + stages + context + aggregation + heads


@pytest.mark.parametrize("classes", [11, 19, 171])
@pytest.mark.parametrize("aux", [True, False])
def test_the_parameters_are_those_of_a_count_by_layers(classes, aux):
    assert parameters(on_meta(BiSeNetV1, classes, aux=aux)) == v1(classes, aux)
    assert parameters(on_meta(BiSeNetV1, classes, aux=aux, fusion="conv")) == v1(classes, aux, "conv")
    assert parameters(on_meta(BiSeNetV2, classes, aux=aux)) == v2(classes, aux)
    assert parameters(on_meta(BiSeNetV2, classes, aux=aux, head=512)) == v2(classes, aux, 512)


def test_the_fusion_module_with_one_convolution_is_its_formula():
    fuse = bisenet.Fusion(6, 4, "conv").eval()
    fuse.bn.running_mean.uniform_(-1, 1)
    detail, context = torch.randn(2, 2, 3, 5), torch.randn(2, 4, 3, 5)
    mixed = fuse.mix(torch.cat([detail, context], 1))
    mean = mixed.mean((2, 3))
    share = (mean @ fuse.share.weight[:, :, 0, 0].T - fuse.bn.running_mean) / (1 + fuse.bn.eps) ** 0.5
    expected = mixed * (1 + share.sigmoid())[:, :, None, None]
    torch.testing.assert_close(fuse(detail, context), expected)


def test_the_multiply_adds_of_v2_are_those_of_a_count_by_layers_and_near_the_papers():
    at = {stride: 512 * 1024 // stride**2 for stride in (2, 4, 8, 16, 32)}
    detail = at[2] * 9 * (3 * 64 + 64**2) + at[4] * 9 * 3 * 64**2 + at[8] * 9 * (64 * 128 + 2 * 128**2)
    stem = at[2] * (9 * 3 * 16 + 16 * 8) + at[4] * 9 * (8 * 16 + 32 * 16)
    semantic = stem
    for a, b, more, stride in ((16, 32, 1, 8), (32, 64, 1, 16), (64, 128, 3, 32)):
        semantic += at[stride // 2] * 9 * a**2 + at[stride] * (9 * 6 * a * 2 + 6 * a * b + 9 * a + a * b)
        semantic += more * at[stride] * (9 * b**2 + 9 * 6 * b + 6 * b * b)
    context = 128**2 + at[32] * 9 * 128**2
    aggregation = (at[8] + at[32]) * (9 * 128 + 128**2) + (at[32] + at[16] + at[8]) * 9 * 128**2
    head = at[8] * (9 * 128 * 1024 + 1024 * 19)
    counted = macs(on_meta(BiSeNetV2, 19), (3, 512, 1024))
    assert counted == detail + semantic + context + aggregation + head
    # The paper scales 1024 x 2048 to half first, and says 21.15 G.
    assert 21.15e9 < counted < 1.2 * 21.15e9
    assert macs(on_meta(BiSeNetV2, 19), (3, 1024, 2048)) == pytest.approx(4 * counted, rel=1e-5)


@pytest.mark.parametrize("size", [(64, 96), (32, 32)])
def test_the_outputs_are_at_their_strides(size):
    image = torch.randn(2, 3, *size)
    for make, strides in ((BiSeNetV1, (8, 8, 16)), (BiSeNetV2, (8, 2, 4, 8, 16))):
        net = make(5, width=0.25)
        out = net(image)
        assert [tuple(x.shape) for x in out["logits"]] == [(2, 5, size[0] // s, size[1] // s) for s in strides]
        assert tuple(out["fine"].shape) == (2, net.fine_channels, size[0] // 4, size[1] // 4)
        with torch.no_grad():
            out = net.eval()(image)
        assert [tuple(x.shape) for x in out["logits"]] == [(2, 5, size[0] // 8, size[1] // 8)]
        assert (net.stride, net.multiple) == (8, 32)


@BOTH
def test_every_parameter_learns_and_only_the_last_norms_of_residuals_hold_others_back_at_first(make):
    net = make(4, width=0.25)
    assert any("aux_heads" in name for name, _ in net.named_parameters())
    last = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d) and m.weight.abs().sum() == 0]
    assert len(last) == 8
    for norm in last:
        nn.init.ones_(norm.weight)
    image = torch.randn(4, 3, 64, 64)
    sum(F.cross_entropy(x, torch.randint(4, x[:, 0].shape)) for x in net(image)["logits"]).backward()
    silent = [name for name, p in net.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not silent


@BOTH
def test_only_heads_are_named_so(make):
    names = {name.partition(".")[0] for name, _ in make(4, width=0.25).named_parameters()}
    assert {name for name in names if "head" in name} == {"head", "aux_heads"}


def test_the_first_weights_are_as_published():
    torch.manual_seed(0)
    one, two = BiSeNetV1(7), BiSeNetV2(7)
    for conv, deviation in (
        (one.up16.conv, (1 / (128 * 9)) ** 0.5),
        (BiSeNetV1(7, fusion="conv").fusion.share, (1 / 256) ** 0.5),
        (one.head.out, (1 / 256) ** 0.5),
        (two.head.conv.conv, (2 / (1024 * 9)) ** 0.5),
        (two.head.out, (2 / 7) ** 0.5),
    ):
        assert conv.weight.std().item() == pytest.approx(deviation, rel=0.05)
        assert conv.bias is None or not conv.bias.any()


def test_other_channels_widths_and_encoders():
    assert BiSeNetV2(3, in_channels=1, width=0.5)(torch.randn(2, 1, 32, 64))["logits"][0].shape == (2, 3, 4, 8)
    net = on_meta(BiSeNetV1, 3, in_channels=4, encoder="resnet50")
    assert net.fine_channels == 256 and net.encoder.conv1.weight.shape[1] == 4
    assert parameters(on_meta(BiSeNetV2, 19, width=0.5)) < 0.27 * parameters(on_meta(BiSeNetV2, 19))
    with pytest.raises(ValueError, match="strides"):
        on_meta(BiSeNetV1, 3, encoder="vgg11")


def norm(name: str) -> list[str]:
    return [f"{name}.{word}" for word in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]


def block(name: str) -> list[str]:
    return [f"{name}.conv.weight", *norm(f"{name}.bn")]


def published_v1(fusion: str = "squeeze", encoder: Iterable[str] = ()) -> list[str]:
    encoder = encoder or on_meta(BiSeNetV1, 19).encoder.state_dict()
    names = [f"cp.resnet.{name}" for name in encoder]
    for arm in ("cp.arm16", "cp.arm32"):
        names += [*block(f"{arm}.conv"), f"{arm}.conv_atten.weight", *norm(f"{arm}.bn_atten")]
    for name in ("cp.conv_head32", "cp.conv_head16", "cp.conv_avg", "sp.conv1", "sp.conv2", "sp.conv3", "sp.conv_out"):
        names += block(name)
    names += block("ffm.convblk")
    names += ["ffm.conv1.weight", "ffm.conv2.weight"] if fusion == "squeeze" else block("ffm")
    for name in ("conv_out", "conv_out16", "conv_out32"):
        names += [*block(f"{name}.conv"), f"{name}.conv_out.weight", f"{name}.conv_out.bias"]
    return names


def published_v2() -> list[str]:
    def bare(name: str, at: int = 0) -> list[str]:
        return [f"{name}.{at}.weight", *norm(f"{name}.{at + 1}")]

    names = []
    for stage, count in (("S1", 2), ("S2", 3), ("S3", 3)):
        for i in range(count):
            names += block(f"detail.{stage}.{i}")
    for name in ("conv", "left.0", "left.1", "fuse"):
        names += block(f"segment.S1S2.{name}")
    for stage, count in (("S3", 2), ("S4", 2), ("S5_4", 4)):
        for i in range(count):
            name = f"segment.{stage}.{i}"
            names += [*block(f"{name}.conv1"), *bare(f"{name}.conv2")]
            if i == 0:
                names += [*bare(f"{name}.dwconv1"), *bare(f"{name}.dwconv2")]
                names += [*bare(f"{name}.shortcut"), *bare(f"{name}.shortcut", 2)]
            else:
                names += bare(f"{name}.dwconv")
    names += [*norm("segment.S5_5.bn"), *block("segment.S5_5.conv_gap"), *block("segment.S5_5.conv_last")]
    for name in ("left1", "left2", "right1", "right2", "conv"):
        names += bare(f"bga.{name}")
    names += ["bga.left1.2.weight", "bga.right2.2.weight"]
    names += [*block("head.conv"), "head.conv_out.1.weight", "head.conv_out.1.bias"]
    for name in ("aux2", "aux3", "aux4", "aux5_4"):
        names += [*block(f"{name}.conv"), *block(f"{name}.conv_out.0.1")]
        names += [f"{name}.conv_out.1.weight", f"{name}.conv_out.1.bias"]
    return names


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (BiSeNetV1, published_v1()),
        (partial(BiSeNetV1, fusion="conv"), published_v1("conv")),
        (BiSeNetV2, published_v2()),
    ],
)
def test_the_names_of_published_files_are_found_one_for_one(make, names):
    tensors = {name: torch.tensor(float(i)) for i, name in enumerate(names)}
    renamed = from_published(tensors)
    assert len(renamed) == len(names) and set(renamed) == set(on_meta(make, 19).state_dict())
    # Once renamed they are kept, as are names of anything else.
    assert from_published(renamed) == renamed


def test_published_names_go_to_modules_of_the_same_use():
    renamed = from_published({name: torch.tensor(float(i)) for i, name in enumerate(published_v2())})
    for old, new in {
        "bga.right1.0.weight": "aggregation.semantic_up.conv.weight",
        "segment.S5_4.0.shortcut.2.weight": "semantic.3.0.beside.1.conv.weight",
        "segment.S4.0.dwconv2.1.running_var": "semantic.2.0.depthwise.1.bn.running_var",
        "aux5_4.conv_out.0.1.conv.weight": "aux_heads.3.second.conv.weight",
    }.items():
        assert renamed[new] == published_v2().index(old)


@pytest.mark.slow
@BOTH
def test_it_is_exported_with_any_batch_and_agrees(make):
    net = make(4, width=0.25).eval()
    image = torch.randn(2, 3, 64, 96)
    batch = torch.export.Dim("batch", max=8)
    exported = torch.export.export(net, (image,), dynamic_shapes=({0: batch},)).module()
    other = torch.randn(3, 3, 64, 96)
    with torch.no_grad():
        torch.testing.assert_close(exported(other)["logits"][0], net(other)["logits"][0])
