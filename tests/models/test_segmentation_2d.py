"""Networks of images behind one face: what they give, what learns, where weights come from, what is refused."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
import timm
import torch
from torch import nn

from tests.models.test_bisenet import published_v1
from trainkit.checkpoint import safe_load
from trainkit.config.validation import validate
from trainkit.errors import UserError
from trainkit.interfaces import DatasetInfo
from trainkit.models import bisenet, segmentation_2d
from trainkit.models import pointrend as pointwise
from trainkit.models.segmentation_2d import SceneNet
from trainkit.models.segmentation_specs import BiSeNetV1Spec, BiSeNetV2Spec, Norm, PointSpec, SmpSpec

META = DatasetInfo(5, (3, 64, 96), "x", tuple("abcde"))
V1 = BiSeNetV1Spec(name="bisenetv1", encoder="test_resnet", width=0.125)
V2 = BiSeNetV2Spec(name="bisenetv2", width=0.125)
FPN = SmpSpec(name="smp", encoder="tu-test_resnet", decoder="fpn", args={"decoder_pyramid_channels": 16})
UNET = SmpSpec(name="smp", encoder="tu-test_resnet", decoder="unet", args={"decoder_channels": [32, 16, 8, 8, 8]})
POINTS = PointSpec(points=64, near=0.25, channels=16, subdivide=100)
NETS = {"v1": (V1, 8, 3), "v2": (V2, 8, 5), "fpn": (FPN, 4, 1), "unet": (UNET, 1, 1)}


def made(spec, points=None, norm=None, meta=META, found=None) -> SceneNet:
    torch.manual_seed(0)
    return segmentation_2d.build(spec, points, norm or Norm(), meta, found or {})[0]


def same(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", NETS)
def test_every_network_gives_scores_at_its_stride_and_everything_learns(name):
    spec, stride, outputs = NETS[name]
    net = made(spec, POINTS)
    assert net.training and net.body.stride == stride and net.multiple == 32
    out = net(torch.randn(2, 3, 64, 96), torch.rand(2, 64, 96) * 16)
    assert len(out["logits"]) == outputs and out["logits"][0].shape == (2, 5, 64 // stride, 96 // stride)
    assert out["points"].shape == (2, 64, 2) and out["point_logits"].shape == (2, 5, 64)
    (sum(x.square().sum() for x in out["logits"]) + out["point_logits"].square().sum()).backward()
    assert [name for name, p in net.named_parameters() if p.requires_grad and p.grad is None] == []
    for classes in (m for m in net.modules() if isinstance(m, nn.Conv1d | nn.Conv2d) and len(m.weight) == 5):
        assert any("head" in name for name, module in net.named_modules() if module is classes)


@pytest.mark.parametrize("name", ["v2", "unet"])
@torch.no_grad()
def test_in_evaluation_there_are_the_main_scores_and_with_points_they_have_the_size_of_the_picture(name):
    spec, stride, _ = NETS[name]
    image = torch.randn(2, 3, 64, 128)
    plain, pointed = made(spec).eval(), made(spec, POINTS).eval()
    pointed.body.load_state_dict(plain.body.state_dict())
    (coarse,) = plain(image)["logits"]
    assert plain(image).keys() == {"logits"} and coarse.shape == (2, 5, 64 // stride, 128 // stride)
    (refined,) = pointed(image)["logits"]
    assert refined.shape == (2, 5, 64, 128)
    fine = pointed.body(image)["fine"]
    assert fine.shape[1:] == (pointed.body.fine_channels, 16, 32)
    coarse = pointwise.pooled(coarse, stride)
    torch.testing.assert_close(refined, pointwise.refine(pointed.point_head, coarse, fine, (64, 128), POINTS))


def test_points_are_sampled_from_the_maps_of_the_network():
    net = made(FPN, PointSpec(points=8, channels=16))
    maps, seen = net.body.register_forward_hook, {}
    maps(lambda module, given, out: seen.update(out))
    out = net(torch.randn(2, 3, 64, 64))
    with torch.no_grad():
        inside = [pointwise.sample(x, out["points"]) for x in (seen["fine"], seen["logits"][0])]
        torch.testing.assert_close(out["point_logits"], net.point_head(*inside))


def test_points_near_boundaries_need_distances_in_training_alone():
    net, image = made(FPN, POINTS), torch.randn(2, 3, 64, 64)
    with pytest.raises(
        UserError, match=r"task\.points\.near: 0\.25, but the data gives no distances; add `distance: \{\}`"
    ):
        net(image)
    net.eval()(image)


@pytest.mark.parametrize("decoder", ["pspnet", "segformer"])
def test_decoders_of_the_library_need_nothing_said(decoder):
    net = made(SmpSpec(name="smp", encoder="tu-test_resnet", decoder=decoder), PointSpec(points=8, channels=4))
    out = net(torch.randn(2, 3, 64, 96))
    assert 64 % out["logits"][0].shape[2] == 0 and out["logits"][0].shape[1] == 5
    (sum(x.sum() for x in out["logits"]) + out["point_logits"].sum()).backward()
    assert all(p.grad is not None for p in net.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("spec", "size", "least"),
    [
        (V1, (64, 96), 2),
        (V2, (64, 96), 2),
        (FPN, (64, 96), 1),
        (FPN, (32, 64), 1),
        (FPN, (32, 32), 2),
        (SmpSpec(name="smp", encoder="tu-test_resnet", decoder="deeplabv3", args={"decoder_channels": 8}), (64, 96), 2),
    ],
    ids=str,
)
def test_how_many_pictures_batch_norm_must_see_is_known(spec, size, least):
    net = made(spec, meta=DatasetInfo(5, (3, *size), "x"))
    assert net.least == least
    for count in (1, 2):
        with contextlib.nullcontext() if count >= least else pytest.raises(ValueError, match="Expected more than 1"):
            net(torch.randn(count, 3, *size))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoder", "decoder"),
    [("tu-resnet18", decoder) for decoder in get_args(get_type_hints(SmpSpec)["decoder"])]
    + [(encoder, "unet") for encoder in ("resnet18", "tu-pvt_v2_b0", "tu-convnext_atto", "efficientnet-b0")]
    + [("tu-pvt_v2_b0", "pan")],
)
def test_encoders_and_decoders_fit_or_say_so(encoder, decoder):
    meta, spec = DatasetInfo(5, (3, 128, 192), "x"), SmpSpec(name="smp", encoder=encoder, decoder=decoder)
    if (encoder, decoder) == ("tu-pvt_v2_b0", "pan"):
        with pytest.raises(UserError, match="unexpected keyword argument 'output_stride'"):
            made(spec, meta=meta)
        return
    net = made(spec, PointSpec(points=8, channels=4), meta=meta)
    out = net(torch.randn(2, 3, 128, 192))
    (sum(x.sum() for x in out["logits"]) + out["point_logits"].sum()).backward()
    assert all(p.grad is not None for p in net.parameters() if p.requires_grad)


def test_what_no_score_depends_on_is_frozen_and_said():
    spec = SmpSpec(name="smp", encoder="resnet18", decoder="pspnet")
    net, notes = segmentation_2d.build(spec, None, Norm(), META, {})
    encoder = timm.create_model("resnet18")
    idle = sum(p.numel() for layer in (encoder.layer3, encoder.layer4) for p in layer.parameters())
    assert f"{idle:,} parameters of the encoder that the decoder does not use are frozen" in notes
    assert sum(p.numel() for p in net.parameters() if not p.requires_grad) == idle
    assert net.multiple == 8


def test_looking_at_a_network_leaves_no_trace():
    net = made(UNET)
    assert all(p.grad is None for p in net.parameters())
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms and all(m.training and not m.num_batches_tracked and not m.running_mean.any() for m in norms)
    assert same(net, made(UNET))


def test_a_file_of_another_encoder_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    safe_load.write_tensors(file, timm.create_model("test_convnext").state_dict())
    spec = SmpSpec(name="smp", encoder="tu-test_resnet.r160_in1k", decoder="fpn", weights="pretrained")
    with pytest.raises(UserError, match=r"weights .*model\.safetensors in test_resnet\.r160_in1k: "):
        made(spec, found={"net": file})


@pytest.mark.parametrize("norm", ["batch", "sync", "group"])
@pytest.mark.parametrize(
    "spec",
    [SmpSpec(name="smp", encoder="tu-test_resnet", decoder="fpn"), replace(V1, encoder="test_resnet")],
    ids=["smp", "bisenetv1"],
)
def test_a_file_of_an_encoder_fills_the_encoder_and_one_of_a_whole_network_all(tmp_path, spec, norm):
    classifier, file = timm.create_model("test_resnet"), tmp_path / "test_resnet.safetensors"
    safe_load.write_tensors(file, classifier.state_dict())
    net, notes = segmentation_2d.build(spec, None, Norm(name=norm), META, {"net": file})
    assert notes[-1] == f"{spec.encoder} starts from test_resnet.safetensors, the rest from random weights"
    theirs = dict(classifier.named_parameters())
    inner = net.body.encoder.model if spec.name == "smp" else net.body.encoder
    own = dict(inner.named_parameters())
    assert own and all(torch.equal(p, theirs[name]) for name, p in own.items())
    safe_load.write_tensors(file, net.state_dict())
    again, notes = segmentation_2d.build(spec, None, Norm(name=norm), META, {"net": file})
    kinds = {type(m).__name__ for m in net.modules() if "Norm" in type(m).__name__}
    assert {"batch": "BatchNorm2d", "sync": "SyncBatchNorm2d", "group": "GroupNorm"}[norm] in kinds
    assert norm == "batch" or "BatchNorm2d" not in kinds
    assert same(net, again) and not any("starts from" in note for note in notes)
    safe_load.write_tensors(file, net.body.state_dict())
    assert same(net, segmentation_2d.build(spec, None, Norm(name=norm), META, {"net": file})[0])


@pytest.mark.parametrize(("fusion", "other"), [("squeeze", "conv"), ("conv", "squeeze")])
def test_public_files_of_both_forms_of_the_fusion_module_fill_the_network_that_has_it(tmp_path, fusion, other):
    file = tmp_path / "model_final_v1_city.safetensors"
    spec = replace(V1, fusion=fusion)
    first = made(spec)
    own, public = first.body.state_dict(), published_v1(fusion, first.body.encoder.state_dict())
    ours = bisenet.from_published({name: torch.tensor(i) for i, name in enumerate(public)})
    tensors = {public[int(i)]: own[name] for name, i in ours.items()}
    assert ("ffm.bn.running_mean" in tensors) == (fusion == "conv")
    safe_load.write_tensors(file, tensors)
    torch.manual_seed(1)
    assert same(first, segmentation_2d.build(spec, None, Norm(), META, {"net": file})[0])
    with pytest.raises(UserError) as caught:
        made(replace(V1, fusion=other), found={"net": file})
    assert "task.net.fusion" in str(caught.value) and f"set `fusion: {fusion}`" in str(caught.value)


def test_a_network_starts_from_a_run_or_from_its_body_alone(tmp_path):
    file, body = tmp_path / "model.safetensors", tmp_path / "body.safetensors"
    first = made(V2, POINTS)
    safe_load.write_tensors(file, first.state_dict())
    torch.manual_seed(1)
    second, notes = segmentation_2d.build(V2, POINTS, Norm(), META, {"net": file})
    assert same(first, second) and len(notes) == 2
    safe_load.write_tensors(body, first.body.state_dict())
    torch.manual_seed(1)
    third, notes = segmentation_2d.build(V2, POINTS, Norm(), META, {"net": body})
    assert same(first.body, third.body)
    assert notes[-1] == f"{body} has no point head: it starts from random weights"
    assert not torch.equal(third.point_head.layers[0].weight, first.point_head.layers[0].weight)
    for spec, points, classes in ((FPN, POINTS, 5), (V2, None, 5), (V2, POINTS, 4)):
        with pytest.raises(UserError, match="does not fit"):
            made(spec, points, meta=DatasetInfo(classes, (3, 64, 96), "x"), found={"net": file})


@pytest.mark.parametrize(
    ("cls", "given", "said"),
    [
        (BiSeNetV1Spec, {"width": 0.0}, "width"),
        (BiSeNetV1Spec, {"encoder": "resnet18", "weights": "pretrained"}, "need a tag, such as resnet18.tv_in1k"),
        (BiSeNetV2Spec, {"width": 9.0}, "width"),
        (BiSeNetV2Spec, {"weights": "pretrained"}, "has no encoder of timm"),
        (BiSeNetV2Spec, {"weights": "timm:resnet18.a1_in1k"}, "has no encoder of timm"),
        (
            SmpSpec,
            {"encoder": "resnet18", "decoder": "fpn", "weights": "timm:resnet18.a1_in1k"},
            "need an encoder of timm",
        ),
        (SmpSpec, {"encoder": "resnet18", "decoder": "fpn", "weights": "pretrained"}, "need an encoder of timm"),
        (SmpSpec, {"encoder": "tu-resnet18", "decoder": "fpn", "weights": "pretrained"}, "need a tag"),
        (SmpSpec, {"encoder": "tu-resnet18", "decoder": "fpn", "args": {"classes": 3}}, "args has classes"),
    ],
)
def test_what_no_network_can_be_is_refused(cls, given, said):
    names = {BiSeNetV1Spec: "bisenetv1", BiSeNetV2Spec: "bisenetv2", SmpSpec: "smp"}
    with pytest.raises(ValueError, match=said):
        validate(cls, {"name": names[cls], **given}, {})


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (SmpSpec(name="smp", encoder="tu-resnet1", decoder="fpn"), "has no model 'resnet1'; did you mean"),
        (SmpSpec(name="smp", encoder="resnet81", decoder="fpn"), "has no encoder 'resnet81'; put tu- before"),
        (BiSeNetV1Spec(name="bisenetv1", encoder="resnet1"), "has no model 'resnet1'"),
        (BiSeNetV1Spec(name="bisenetv1", encoder="vit_tiny_patch16_224"), "as a context path: "),
        (
            SmpSpec(name="smp", encoder="tu-test_resnet", decoder="fpn", args={"depth": 3}),
            "depth, which fpn does not have; expected decoder_dropout, decoder_interpolation",
        ),
        (
            SmpSpec(name="smp", encoder="tu-test_resnet", decoder="unet", args={"decoder_channels": [8]}),
            "unet over tu-test_resnet: ",
        ),
        (SmpSpec(name="smp", encoder="tu-test_vit", decoder="fpn"), "fpn over tu-test_vit: "),
    ],
)
def test_parts_that_do_not_fit_are_refused(spec, said):
    with pytest.raises(UserError) as caught:
        made(spec)
    assert said in str(caught.value)


@pytest.mark.parametrize(("spec", "crop", "near"), [(V2, (65, 96), "[64, 96]"), (FPN, (10, 50), "[32, 64]")])
def test_a_crop_that_cannot_be_divided_is_refused(spec, crop, near):
    with pytest.raises(UserError) as caught:
        made(spec, meta=DatasetInfo(5, (3, *crop), "x"))
    assert "data.crop" in str(caught.value) and f"use {near}" in str(caught.value)


def test_what_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"segmentation_models_pytorch is not installed; .*trainkit\[segmentation\]"):
        made(FPN)
