"""Networks for volumes: strides from the spacing, MONAI's own as the measure, slices and their neighbours, EMCAD."""

from __future__ import annotations

import collections
import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trainkit.checkpoint import safe_load
from trainkit.config.validation import validate
from trainkit.errors import UserError
from trainkit.interfaces import DatasetInfo
from trainkit.models import emcad, patch_geometry, segmentation_3d
from trainkit.models.segmentation_specs import BiSeNetV1Spec, DynUNetSpec, EmcadSpec, SmpSpec, UNetSpec, source_of

CUBE = DatasetInfo(3, (1, 16, 16, 24), "x", spacing=(1.0, 1.0, 1.0))
CORONAL = DatasetInfo(10, (1, 16, 64, 32), "x", spacing=(3.85, 1.25, 1.25))
UNET = UNetSpec(name="unet", filters=[4, 8, 12])
DYNUNET = DynUNetSpec(name="dynunet", filters=[4, 8, 12, 16])
EMCAD = EmcadSpec(name="emcad", encoder="test_convnext")

# Kernels and strides


def test_strides_are_those_that_nnunet_published_for_the_prostate_and_the_heart():
    """nnU-Net (Nature Methods 2021), supplementary tables: Task05 and ACDC, 3-D at full resolution."""
    prostate = patch_geometry.levels_for((20, 320, 256), (3.6, 0.625, 0.625), 8)
    assert prostate.strides == ((1, 1, 1), (1, 2, 2), (1, 2, 2), (2, 2, 2), (2, 2, 2), (1, 2, 2), (1, 2, 2))
    assert prostate.kernels == ((1, 3, 3), (1, 3, 3), *[(3, 3, 3)] * 5)
    heart = patch_geometry.levels_for((20, 256, 224), (5.0, 1.5625, 1.5625), 8)
    assert heart.strides == ((1, 1, 1), (1, 2, 2), (2, 2, 2), (2, 2, 2), (1, 2, 2), (1, 2, 2))
    assert heart.kernels == ((1, 3, 3), *[(3, 3, 3)] * 5)
    assert heart.multiple == (4, 32, 32)


def test_strides_of_tom500_leave_its_slices_alone_until_the_voxels_are_as_large():
    levels = patch_geometry.levels_for((16, 224, 224), (3.85, 0.3125, 0.3125), 6)
    assert levels.strides == ((1, 1, 1), (1, 2, 2), (1, 2, 2), (1, 2, 2), (2, 2, 2), (2, 2, 2))
    assert levels.kernels == ((1, 3, 3), (1, 3, 3), (1, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3))
    assert str(patch_geometry.levels_for((16, 16, 16), (), 2)) == "kernels 3x3x3 3x3x3, strides 2x2x2"


sides = st.integers(1, 200)
mm = st.floats(0.1, 10)


@given(st.tuples(sides, sides, sides), st.tuples(mm, mm, mm), st.integers(1, 8))
@settings(deadline=None)
def test_no_axis_is_pooled_below_four_voxels_or_while_it_is_coarse(patch, spacing, most):
    levels = patch_geometry.levels_for(patch, spacing, most)
    assert len(levels.kernels) == len(levels.strides) <= most
    size, now = np.array(patch), np.array(spacing)
    for stride in np.array(levels.strides[1:]):
        assert set(stride) <= {1, 2} and stride.max() == 2
        large = size >= 8
        assert (large | (stride == 1)).all()
        for axis in range(3):
            assert (stride[axis] == 2) == (large[axis] and now[axis] / now[large].min() < 2)
        size, now = np.ceil(size / stride), now * stride
    if len(levels.strides) < most:
        fine = [s for s, m in zip(size, now, strict=True) if s >= 8 and m < 2 * now[size >= 8].min()]
        assert not fine or (len(fine) == 1 and fine[0] < 12)
    for before, after in zip(levels.kernels, levels.kernels[1:], strict=False):
        assert all(b <= a for b, a in zip(before, after, strict=True))
    assert levels.kernels[-1] == tuple(3 if s > 1 else 1 for s in size)
    # A strided convolution with a kernel of 1 would pass over voxels.
    for kernel, stride in zip(levels.kernels, levels.strides[1:], strict=False):
        assert all(k == 3 for k, s in zip(kernel, stride, strict=True) if s == 2)


@given(st.tuples(sides, sides, sides), st.integers(1, 5))
@settings(deadline=None)
def test_a_patch_that_the_strides_do_not_divide_is_refused_with_one_that_they_do(patch, most):
    levels = patch_geometry.levels_for(patch, (1.0, 1.0, 1.0), most)
    assume(any(p % m for p, m in zip(patch, levels.multiple, strict=True)))
    with pytest.raises(UserError) as caught:
        patch_geometry.check_patch("unet", patch, levels.multiple)
    near = [int(n) for n in caught.value.remedy.split("[")[1].strip("]").split(", ")]
    patch_geometry.check_patch("unet", near, levels.multiple)
    assert all(abs(n - p) <= m for n, p, m in zip(near, patch, levels.multiple, strict=True))


@pytest.mark.parametrize("spec", [UNET, DYNUNET], ids=lambda spec: spec.name)
def test_patches_that_are_odd_or_too_small_are_refused_before_monai_is_imported(spec, monkeypatch):
    monkeypatch.setattr(segmentation_3d, "require", lambda package: pytest.fail("imported"))
    with pytest.raises(
        UserError, match=r"data.patch: 18x16x16 .*multiples of 4x4x4|data.patch: 18x16x16 .*8x8x8|18x16x16"
    ):
        segmentation_3d.build(spec, DatasetInfo(3, (1, 18, 16, 16), "x", spacing=(1.0,) * 3), {})
    with pytest.raises(UserError, match=r"data.patch: 4x4x4 voxels, enough for 1 level of"):
        segmentation_3d.build(spec, DatasetInfo(3, (1, 4, 4, 4), "x", spacing=(1.0,) * 3), {})


@pytest.mark.parametrize(
    ("cls", "given", "words"),
    [
        (UNetSpec, {"name": "unet", "filters": [8]}, "2 levels or more"),
        (UNetSpec, {"name": "unet", "filters": [8, 0]}, "filters"),
        (UNetSpec, {"name": "unet", "filters": [8, 8], "dropout": 1.0}, "dropout"),
        (UNetSpec, {"name": "unet", "filters": [8, 8], "weights": "pretrained"}, "which only emcad has"),
        (DynUNetSpec, {"name": "dynunet", "filters": [8, 8]}, "3 levels or more"),
        (EmcadSpec, {"name": "emcad", "kernels": [2]}, "odd"),
        (EmcadSpec, {"name": "emcad", "expansion": 0}, "expansion"),
        (EmcadSpec, {"name": "emcad", "neighbours": 3}, "neighbours"),
        (EmcadSpec, {"name": "emcad", "weights": "pretrained"}, "need a tag"),
    ],
)
def test_what_no_network_is_made_of_is_refused(cls, given, words):
    with pytest.raises(ValueError, match=words):
        validate(cls, given, {})


def test_weights_are_found_where_the_recipe_says():
    assert source_of(UNET) is None
    assert source_of(UNetSpec(name="unet", filters=[4, 8], weights="run:abc")) == "run:abc"
    spec = EmcadSpec(name="emcad", encoder="pvt_v2_b2.in1k", weights="pretrained")
    assert source_of(spec) == "timm:pvt_v2_b2.in1k"
    spec = SmpSpec(name="smp", encoder="tu-resnet18.a1_in1k", decoder="fpn", weights="pretrained")
    assert source_of(spec) == "timm:resnet18.a1_in1k"
    assert source_of(BiSeNetV1Spec(name="bisenetv1", weights="pretrained")) == "timm:resnet18.tv_in1k"


# Slices


@pytest.mark.parametrize("neighbours", [0, 1, 2])
def test_each_slice_stands_between_those_beside_it(neighbours):
    image = torch.arange(2 * 2 * 4 * 2 * 3, dtype=torch.float32).view(2, 2, 4, 2, 3)
    seen = emcad.with_neighbours(image, neighbours)
    assert seen.shape == (8, 2 * (2 * neighbours + 1), 2, 3)
    for volume, depth in itertools.product(range(2), range(4)):
        for place, away in enumerate(range(-neighbours, neighbours + 1)):
            beside = min(max(depth + away, 0), 3)
            assert torch.equal(seen[4 * volume + depth, 2 * place : 2 * place + 2], image[volume, :, beside])


def test_scores_of_slices_return_to_their_volumes():
    class Marked(torch.nn.Module):
        def forward(self, pictures):
            return [torch.cat([pictures, -pictures], 1), pictures[..., ::2, ::2]]

    image = torch.randn(2, 1, 5, 4, 6)
    fine, coarse = emcad.Slices(Marked())(image)
    assert torch.equal(fine, torch.cat([image, -image], 1))
    assert torch.equal(coarse, image[..., ::2, ::2])


# EMCAD


def test_the_decoder_has_as_many_parameters_as_published():
    count = sum(p.numel() for p in emcad.Decoder([512, 320, 128, 64]).parameters())
    assert round(count / 1e6, 2) == 1.91


def test_the_decoder_of_the_published_code_shares_one_spatial_attention_and_starts_from_small_weights():
    torch.manual_seed(0)
    paper, code = (emcad.Decoder([12, 8, 4], form=form) for form in ("paper", "code"))
    size = {name: p.numel() for name, p in paper.named_parameters()}
    shared = {name: p.numel() for name, p in code.named_parameters()}
    gone = {f"refine.{level}.1.conv.weight" for level in (1, 2)}
    assert set(size) - set(shared) == gone and size == shared | dict.fromkeys(gone, 98)
    seen = []
    code.refine[0][1].register_forward_hook(lambda module, given, out: seen.append(tuple(given[0].shape)))
    code([torch.randn(2, c, 4 * 2**i, 3 * 2**i) for i, c in enumerate([12, 8, 4])])
    assert seen == [(2, 12, 4, 3), (2, 8, 8, 6), (2, 4, 16, 12)]
    convolved = [m for m in emcad.Decoder([64, 32, 16], form="code").modules() if isinstance(m, torch.nn.Conv2d)]
    every = torch.cat([m.weight.flatten() for m in convolved])
    assert every.std().item() == pytest.approx(0.02, rel=0.05) and abs(every.mean().item()) < 1e-3
    assert not any(m.bias.any() for m in convolved if m.bias is not None)


@pytest.mark.parametrize("form", ["paper", "code"])
def test_relu6_stands_in_the_blocks_alone(form):
    """As in the paper, and in the authors' code since September 2024 (SLDGroup/EMCAD 8f18a7d)."""
    decoder, count = emcad.Decoder([12, 8, 4], [1, 3], form=form), collections.Counter()
    for place, parts in (("up", decoder.up), ("gate", decoder.gate), ("block", decoder.refine)):
        for module in parts.modules():
            if isinstance(module, torch.nn.ReLU | torch.nn.ReLU6):
                count[place, type(module).__name__] += 1
    assert count == {("up", "ReLU"): 2, ("gate", "ReLU"): 2, ("block", "ReLU6"): 9}


def test_attention_is_the_papers():
    torch.manual_seed(0)
    x, channels = torch.randn(2, 32, 7, 9), emcad.ChannelAttention(32)
    a, b = channels.squeeze.weight[:, :, 0, 0].detach().numpy(), channels.excite.weight[:, :, 0, 0].detach().numpy()
    assert a.shape == (2, 32)
    maps = x.numpy()
    pooled = [maps.mean((2, 3)), maps.max((2, 3))]
    gate = 1 / (1 + np.exp(-sum(np.maximum(p @ a.T, 0) @ b.T for p in pooled)))
    np.testing.assert_allclose(channels(x).detach(), maps * gate[:, :, None, None], rtol=1e-4, atol=1e-6)

    from scipy.ndimage import correlate

    places = emcad.SpatialAttention()
    weight = places.conv.weight[0].detach().numpy()
    for image in maps:
        summed = sum(
            correlate(plane, w, mode="constant") for plane, w in zip((image.mean(0), image.max(0)), weight, strict=True)
        )
        wanted = image / (1 + np.exp(-summed))
        np.testing.assert_allclose(places(torch.tensor(image)[None])[0].detach(), wanted, rtol=1e-4, atol=1e-5)


def test_a_block_adds_up_its_scales_and_a_shortcut():
    torch.manual_seed(0)
    block = emcad.MultiScale(4, [1, 3, 5], 2).eval()
    for norm in (m for m in block.modules() if isinstance(m, torch.nn.BatchNorm2d)):
        torch.nn.init.normal_(norm.running_mean)
        torch.nn.init.uniform_(norm.running_var, 0.5, 2)
    x = torch.randn(1, 4, 6, 5)

    def bn(value, norm):
        return (value - norm.running_mean[:, None, None]) / (norm.running_var[:, None, None] + norm.eps).sqrt()

    wide = bn(torch.einsum("oi,nihw->nohw", block.widen[0].weight[:, :, 0, 0], x), block.widen[1]).clamp(0, 6)
    total = 0
    for k, scale in zip([1, 3, 5], block.scales, strict=True):
        alone = [F.conv2d(wide[:, c : c + 1], scale[0].weight[c : c + 1], padding=k // 2) for c in range(8)]
        total = total + bn(torch.cat(alone, 1), scale[1]).clamp(0, 6)
    mixed = total[:, [0, 2, 4, 6, 1, 3, 5, 7]]
    wanted = x + bn(torch.einsum("oi,nihw->nohw", block.narrow[0].weight[:, :, 0, 0], mixed), block.narrow[1])
    torch.testing.assert_close(block(x), wanted, rtol=1e-4, atol=1e-5)


def test_a_gate_lets_through_a_share_that_both_sides_decide():
    gate = emcad.Gate(8).eval()
    coarse, passed = torch.randn(1, 8, 5, 5), torch.randn(1, 8, 5, 5)
    share = gate(coarse, passed) / passed
    assert (share > 0).all() and (share < 1).all()
    torch.testing.assert_close(share, share[:, :1].expand_as(share))  # one for each place
    assert not torch.allclose(gate(coarse + 1, passed) / passed, share)
    # Each of the hidden maps sees two channels of either side.
    assert gate.coarse[0].weight.shape == gate.passed[0].weight.shape == (4, 2, 3, 3)


def test_encoders_that_do_not_exist_or_do_not_fit_are_named():
    with pytest.raises(UserError, match=r"task.net.encoder: timm .* has no model 'pvt_v2_b22'; did you mean pvt_v2_b"):
        segmentation_3d.build(EmcadSpec(name="emcad", encoder="pvt_v2_b22"), DatasetInfo(3, (1, 2, 32, 32), "x"), {})
    with pytest.raises(UserError, match=r"task.net.encoder: test_vit: .*maps at strides 4, 8, 16, 32"):
        segmentation_3d.build(EmcadSpec(name="emcad", encoder="test_vit"), DatasetInfo(3, (1, 2, 32, 32), "x"), {})
    with pytest.raises(UserError, match=r"data.patch: 2x40x32 .*multiples of 1x32x32.*\[2, 32, 32\]"):
        segmentation_3d.build(EMCAD, DatasetInfo(3, (1, 2, 40, 32), "x"), {})


def contract(spec, meta, outputs, **sizes):
    """A network maps patches to scores, has as many outputs in training, gradients everywhere, and the same in eval."""
    torch.manual_seed(0)
    net, notes = segmentation_3d.build(spec, meta, {})
    count = sum(p.numel() for p in net.parameters())
    assert len(notes) == 1 and notes[0].startswith(f"{spec.name}: ") and f"{count:,} parameters" in notes[0]
    image = torch.randn(2, *meta.shape)
    out = net(image)
    found = out if isinstance(out, list) else [out]
    assert len(found) == outputs and isinstance(out, list) == (outputs > 1)
    assert found[0].shape == (2, meta.classes, *meta.shape[1:])
    sum(x.float().square().mean() for x in found).backward()
    idle = [name for name, p in net.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]
    assert not idle
    with torch.no_grad():
        scores = net.eval()(image)
        assert scores.shape == found[0].shape
        torch.testing.assert_close(net(image[1:]), scores[1:], rtol=1e-4, atol=1e-4)
    copy.deepcopy(net)
    return net, [tuple(x.shape[2:]) for x in found]


def test_emcad_maps_patches_to_scores():
    _, shapes = contract(EMCAD, DatasetInfo(3, (1, 2, 32, 64), "x"), 4)
    assert shapes == [(2, 32, 64)] * 4
    contract(
        EmcadSpec(name="emcad", encoder="test_resnet", neighbours=1, drop_path=0.1),
        DatasetInfo(3, (1, 3, 32, 32), "x"),
        4,
    )
    contract(replace(EMCAD, form="code"), DatasetInfo(3, (1, 2, 32, 32), "x"), 4)


def test_an_encoder_starts_from_the_weights_of_timms_classifier(tmp_path):
    import timm

    whole = timm.create_model("test_convnext")
    file = tmp_path / "model.safetensors"
    safe_load.write_tensors(file, whole.state_dict())
    spec = EmcadSpec(name="emcad", encoder="test_convnext.r160_in1k", weights="pretrained")
    net, _ = segmentation_3d.build(spec, DatasetInfo(3, (1, 2, 32, 32), "x"), {"net": file})
    own = net.net.encoder.state_dict()
    stem = next(name for name in own if own[name].ndim == 4)
    assert own[stem].shape[1] == 1
    torch.testing.assert_close(own[stem], whole.stem[0].weight.sum(1, keepdim=True))
    x = torch.randn(1, 1, 64, 64)
    theirs = whole.eval().forward_features(x.expand(-1, 3, -1, -1))
    torch.testing.assert_close(net.eval().net.encoder(x)[-1], theirs, rtol=1e-4, atol=1e-4)
    safe_load.write_tensors(file, timm.create_model("test_resnet").state_dict())
    with pytest.raises(UserError, match=r"test_convnext"):
        segmentation_3d.build(spec, DatasetInfo(3, (1, 2, 32, 32), "x"), {"net": file})


def test_a_network_starts_from_the_weights_of_a_run(tmp_path):
    meta, file = DatasetInfo(3, (1, 2, 32, 32), "x"), tmp_path / "model.safetensors"
    first, _ = segmentation_3d.build(EMCAD, meta, {})
    safe_load.write_tensors(file, first.state_dict())
    second, _ = segmentation_3d.build(EMCAD, meta, {"net": file})
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name])
    with pytest.raises(UserError, match="does not fit"):
        segmentation_3d.build(EMCAD, DatasetInfo(4, (1, 2, 32, 32), "x"), {"net": file})


# MONAI's and segmentation_models_pytorch's: their import takes longer than all of the above


@pytest.mark.parametrize(
    ("spec", "meta", "coarse"),
    [
        (UNET, CUBE, []),
        (UNET, CORONAL, []),
        (UNetSpec(name="unet", filters=[4, 8], res_units=0), CORONAL, []),
        (DYNUNET, CUBE, [(8, 8, 12)]),
        (DYNUNET, CORONAL, [(16, 32, 16), (8, 16, 8)]),
        (DynUNetSpec(name="dynunet", filters=[4, 8, 8], deep_supervision=False, res_block=True), CORONAL, []),
    ],
)
def test_networks_of_three_dimensions_keep_their_contract(spec, meta, coarse):
    _, shapes = contract(spec, meta, 1 + len(coarse))
    assert shapes[1:] == coarse


@pytest.mark.parametrize("spec", [UNET, DYNUNET, EMCAD], ids=lambda spec: spec.name)
def test_networks_see_each_of_several_channels(spec):
    meta = DatasetInfo(3, (2, 16, 32, 32), "x", spacing=(1.0, 1.0, 1.0))
    net = segmentation_3d.build(spec, meta, {})[0].eval()
    image = torch.randn(1, *meta.shape, requires_grad=True)
    scores = net(image)
    assert scores.shape == (1, 3, *meta.shape[1:])
    scores.square().sum().backward()
    assert all(image.grad[0, channel].abs().max() > 0 for channel in range(2))


def test_kernels_and_strides_are_in_the_network_as_the_note_says():
    said = "kernels 1x3x3 3x3x3 3x3x3, strides 1x2x2 2x2x2, patch sides multiples of 2x4x4"
    # The residual units begin with their stride: what follows it is of the same kernel.
    expected = {(16, 64, 32): {(1, 3, 3)}, (16, 32, 16): {(1, 3, 3), (3, 3, 3)}, (8, 16, 8): {(3, 3, 3)}}
    net, notes = segmentation_3d.build(UNET, CORONAL, {})
    assert said in notes[0]
    met = {}

    def see(module, inputs, output):
        sides = tuple(max(a, b) for a, b in zip(inputs[0].shape[2:], output.shape[2:], strict=True))
        if max(module.kernel_size) > 1:
            met.setdefault(sides, set()).add(tuple(module.kernel_size))

    for module in net.modules():
        if isinstance(module, torch.nn.Conv3d | torch.nn.ConvTranspose3d):
            module.register_forward_hook(see)
    net.eval()(torch.zeros(1, *CORONAL.shape))
    assert met == expected


def test_levels_for_which_there_is_no_room_are_left_out_and_said():
    _, notes = segmentation_3d.build(UNetSpec(name="unet", filters=[4, 4, 4, 4, 4]), CUBE, {})
    assert "unet: 3 of 5 levels, the most that the patch allows, kernels 3x3x3 3x3x3 3x3x3, strides" in notes[0]


def test_the_u_net_is_monais():
    from monai.networks.nets import UNet

    net, _ = segmentation_3d.build(UNET, CUBE, {})
    theirs = UNet(3, 1, 3, (4, 8, 12), (2, 2), num_res_units=2, norm="instance")
    theirs.load_state_dict(net.state_dict())
    image = torch.randn(1, *CUBE.shape)
    assert torch.equal(theirs(image), net(image))


@pytest.mark.parametrize("meta", [CUBE, CORONAL], ids=["cube", "coronal"])
def test_nnunets_network_is_monais(meta):
    from monai.networks.nets import DynUNet

    torch.manual_seed(0)
    net, _ = segmentation_3d.build(DYNUNET, meta, {})
    levels = patch_geometry.levels_for(meta.shape[1:], meta.spacing, 4)
    theirs = DynUNet(
        3, 1, meta.classes, levels.kernels, levels.strides, levels.strides[1:],
        filters=[4, 8, 12, 16][: len(levels.kernels)], deep_supervision=True, deep_supr_num=len(levels.kernels) - 2,
    )  # fmt: skip
    missing, unexpected = theirs.load_state_dict(net.state_dict(), strict=False)
    assert not unexpected and all(name.startswith("skip_layers.") for name in missing)  # the same tensors once more
    image = torch.randn(2, *meta.shape)
    stacked = theirs.train()(image)
    ours = [F.interpolate(x, meta.shape[1:]) for x in net.train()(image)]
    torch.testing.assert_close(torch.stack(ours, 1), stacked)
    assert torch.equal(net.eval()(image), theirs.eval()(image))
    assert len(theirs.state_dict()) > 1.9 * len(net.state_dict())


def test_emcad_over_pvtv2_has_as_many_parameters_as_published():
    net, notes = segmentation_3d.build(EmcadSpec(name="emcad"), DatasetInfo(10, (1, 1, 224, 224), "x"), {})
    assert round(sum(p.numel() for p in net.parameters()) / 1e6, 1) == 26.8
    assert "1,913,809 parameters in the decoder" in notes[0]
