"""The network of records of five modalities: parts against plain formulas, missing rows, weights, mistakes."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from trainkit.checkpoint import safe_load
from trainkit.config.validation import validate
from trainkit.errors import UserError
from trainkit.interfaces import MODALITIES, DatasetInfo
from trainkit.models.lora import BatchModalities, LoraLinear
from trainkit.models.network_specs import Fusion, Lora, ReidSpec, TextSpec, required_weights
from trainkit.models.reid import MeanFusion, TransformerFusion, build
from trainkit.models.text_encoder import TextEncoder, last_token

SHAPE = (3, 32, 16)
VIT = {"model": "vit_tiny_patch16_224", "args": {"depth": 2, "embed_dim": 24, "num_heads": 2, "patch_size": 8}}
CNN = {"model": "test_resnet"}
CONVNEXT = {"model": "convnext_tiny", "args": {"depths": [1] * 4, "dims": [8, 8, 16, 16], "output_stride": 16}}
SMALL = {"embedding": 16, "text": TextSpec(layers=1, width=16, heads=2)}
PLAIN = MODALITIES[:4]


def meta(modalities=MODALITIES, classes=7, shape=SHAPE) -> DatasetInfo:
    words = "text" in modalities
    return DatasetInfo(
        classes, shape, "", modalities=modalities, vocabulary=50 if words else 0, text_length=9 if words else 0
    )


def made(modalities=MODALITIES, found=None, classes=7, seed=0, **settings):
    torch.manual_seed(seed)
    return build(ReidSpec(**(CNN | SMALL | settings)), meta(modalities, classes), found or {})


def shaken(module: nn.Module, seed: int = 1) -> nn.Module:
    """What is zero at the start would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.05)
    return module


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch(sizes=(4, 2, 3, 2), captions=3, seed=0):
    images = {name: random(n, *SHAPE, seed=seed + m) for m, (name, n) in enumerate(zip(PLAIN, sizes, strict=True))}
    text = torch.randint(1, 49, (captions, 9), generator=torch.Generator().manual_seed(seed))
    if captions:
        text[:, -3], text[:, -2:] = 49, 0
    return images, text


def queries(*rows):
    return torch.tensor(rows, dtype=torch.long).reshape(-1, 5)


def same(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, atol=tolerance, rtol=tolerance)


@pytest.fixture(scope="module")
def vit():
    return shaken(made(**VIT, lora=Lora(), fusion=Fusion(name="transformer", layers=1, heads=2))).eval()


# ---- The whole network


@pytest.mark.parametrize("kind", [VIT, CNN], ids=["vit", "cnn"])
def test_rows_are_pictures_in_the_order_of_modalities_then_captions(kind):
    net = shaken(made(**kind)).eval()
    images, text = batch()
    whole = net.encode(images, text)
    none = {name: x[:0] for name, x in images.items()}
    at = 0
    for name, x in images.items():
        for i in range(len(x)):
            assert same(net.encode(none | {name: x[i : i + 1]}, text[:0]), whole[at : at + 1])
            at += 1
    for i in range(len(text)):
        assert same(net.encode(none, text[i : i + 1]), whole[at + i : at + i + 1])
    assert at + len(text) == len(whole) and whole.dtype == torch.float32 and whole.shape[1] == net.dim


def test_the_same_picture_is_seen_differently_by_each_modality_only_where_something_is_their_own():
    one = random(1, *SHAPE)
    images = dict.fromkeys(PLAIN, one)
    for stems, low in (("own", None), ("shared", Lora()), ("shared", None)):
        net = shaken(made(**VIT, stems=stems, lora=low)).eval()
        features = net.encode(images, torch.zeros(0, 9, dtype=torch.long))
        alike = all(same(features[:1], features[i : i + 1]) for i in range(1, 4))
        assert alike == (stems == "shared" and low is None)


@pytest.mark.parametrize("kind", ["test_resnet", "resnet18", "test_efficientnet", "convnext", "vit"])
def test_at_the_start_every_modality_is_seen_as_the_backbone_alone_sees_it(kind):
    settings = {"vit": VIT, "convnext": CONVNEXT}.get(kind, {"model": kind})
    own = made(PLAIN, stems="own", **settings, lora=Lora() if kind == "vit" else None).eval()
    shared = made(PLAIN, stems="shared", **settings).eval()
    assert own.stems is not None and shared.stems is None
    images, _ = batch()
    assert same(own.encode(images, None), shared.encode(images, None), 0)
    more = sum(p.numel() for p in own.stems.parameters()) * 3 // 4
    more += sum(p.numel() for n, p in own.named_parameters() if ".lora_" in n)
    assert sum(p.numel() for p in own.parameters()) == sum(p.numel() for p in shared.parameters()) + more


def test_the_first_norm_is_each_modalitys_own_and_learns_its_statistics_alone():
    net = made(PLAIN, model="resnet18").train()
    images, _ = batch((3, 0, 2, 2))
    net({name: x * (1 + m) for m, (name, x) in enumerate(images.items())}, None)
    mean = {name: net.stems[name][1].running_mean for name in PLAIN}
    assert not mean["nir"].any() and mean["rgb"].any() and mean["cp"].any()
    conv, bn = net.stems["cp"]
    expected = 0.1 * conv(3 * images["cp"]).mean((0, 2, 3))
    assert same(mean["cp"], expected)
    assert isinstance(bn, nn.BatchNorm2d) and isinstance(net.backbone.bn1, nn.Identity)


@pytest.mark.parametrize("kind", [VIT, CNN], ids=["vit", "cnn"])
@pytest.mark.parametrize("sizes", [(4, 0, 3, 0), (1, 6, 0, 0), (6, 0, 0, 0)])
def test_modalities_without_a_row_get_gradients_of_zero_and_no_statistic_breaks(kind, sizes):
    low = Lora() if kind is VIT else None
    net = made(**kind, lora=low, fusion=Fusion(name="transformer", layers=1, heads=2)).train()
    for count, asked in ((0, queries()), (2, queries([0, -1, -1, -1, -1]))):
        net.zero_grad()
        images, text = batch(sizes, count)
        out = net(images, text, asked)
        sum(out[key].square().sum() for key in ("logits", "fused_logits", "feature")).backward()
        assert [n for n, p in net.named_parameters() if p.requires_grad and p.grad is None] == []
        assert all(p.grad.isfinite().all() for p in net.parameters() if p.requires_grad)
        assert all(b.isfinite().all() for b in net.buffers())
        for name, n in zip(PLAIN, sizes, strict=True):
            assert any(p.grad.any() for p in net.stems[name].parameters()) == (n > 0)
        assert any(p.grad.any() for p in net.text.parameters()) == (count > 0)
    assert out["fused"].shape == (1, net.dim)


def test_records_and_fused_queries_go_through_the_neck_in_one_batch(vit):
    net = shaken(made(fusion=Fusion(name="mean"))).train()
    images, text = batch()
    asked = queries([0, 4, -1, -1, 11], [1, -1, -1, -1, -1], [-1, -1, -1, 9, 12])
    out = net(images, text, asked)
    feature = out["feature"]
    fused = torch.stack([(feature[0] + feature[4] + feature[11]) / 3, feature[1], (feature[9] + feature[12]) / 2])
    assert same(out["fused"], fused)
    x = torch.cat([feature, fused])
    normed = (x - x.mean(0)) / (x.var(0, unbiased=False) + net.bn.eps).sqrt() * net.bn.weight + net.bn.bias
    assert same(torch.cat([out["neck"], out["fused_neck"]]), normed, 1e-4)
    scores = normed @ net.classifier.weight.T
    assert same(torch.cat([out["logits"], out["fused_logits"]]), scores, 1e-4)
    assert net.bn.num_batches_tracked == 1 and not net.bn.bias.requires_grad


def test_without_a_neck_a_feature_is_what_is_compared():
    net = made(neck="none").eval()
    x = random(3, net.dim)
    assert net.neck(x) is x and not any("bn" in name.split(".")[0] for name in net.state_dict())


def test_a_set_of_rgb_alone_has_one_stem_no_text_and_nothing_to_fuse():
    net = made(("rgb",), fusion=Fusion(name="transformer"), lora=Lora(), **VIT).train()
    images = {"rgb": random(4, *SHAPE)}
    out = net(images, None, queries([0, -1, -1, -1, -1], [3, -1, -1, -1, -1]))
    assert torch.equal(out["fused"], out["feature"][[0, 3]])
    (out["logits"].square().sum() + out["fused_logits"].square().sum()).backward()
    assert all(p.grad is not None for p in net.parameters() if p.requires_grad)
    assert net.stems is None and net.text is None and not list(net.fusion.parameters())
    assert build(ReidSpec(**CNN, **SMALL), DatasetInfo(7, SHAPE, ""), {}).pictures == ("rgb",)


def test_pictures_that_are_not_in_the_batch_are_an_error_even_where_there_are_none():
    images, text = batch()
    with pytest.raises(KeyError, match="nir"):
        made().encode({"rgb": images["rgb"], "cp": images["cp"], "sk": images["sk"]}, text)


def test_without_a_projection_a_feature_is_what_the_backbone_gives(vit):
    net = made(PLAIN, embedding=None, stems="shared", **VIT).eval()
    images, _ = batch((2, 0, 0, 0))
    whole = net.backbone(images["rgb"])
    assert net.dim == 24 and same(net.encode(images, None), whole)


def test_nothing_of_a_batch_is_kept(vit):
    images, text = batch()
    vit.encode(images, text)
    assert vit.rows.first is None and vit.rows.own == {}


# ---- Fusion


def test_the_mean_is_of_what_is_there_and_garbage_elsewhere_is_not_looked_at():
    features = random(6, 5, 8)
    present = torch.rand(6, 5, generator=torch.Generator().manual_seed(3)) < 0.5
    present[0], present[1] = False, torch.tensor([False, False, True, False, False])
    broken = features.clone()
    broken[~present] = math.nan
    for fusion in (MeanFusion(), shaken(TransformerFusion(8, Fusion(name="transformer", heads=2))).eval()):
        given = broken.clone().requires_grad_()
        out = fusion(given, present)
        assert same(out, fusion(features, present)) and not out[0].any()
        assert same(out[1], features[1, 2])
        out.sum().backward()
        assert given.grad.isfinite().all() and not given.grad[~present].any()
    out = MeanFusion()(broken, present)
    for i in range(1, 6):
        assert same(out[i], torch.stack([features[i, m] for m in range(5) if present[i, m]]).mean(0))


def test_the_correction_starts_at_nothing_and_leaves_single_records_alone():
    features, present = random(4, 5, 8), torch.tensor([[1, 1, 0, 0, 1], [0, 1, 0, 0, 0], [1] * 5, [0, 0, 1, 1, 0]]) > 0
    fusion = TransformerFusion(8, Fusion(name="transformer", heads=2)).eval()
    mean = MeanFusion()(features, present)
    assert torch.equal(fusion(features, present), mean)
    shaken(fusion)
    moved = (fusion(features, present) - mean).abs().amax(1) > 1e-4
    assert moved.tolist() == [True, False, True, True]


def test_the_correction_is_the_transformer_over_the_records_that_are_there_written_out():
    fusion = shaken(TransformerFusion(8, Fusion(name="transformer", layers=2, heads=2)), seed=4).eval()
    features = random(1, 5, 8)
    kept = [0, 2, 4]
    present = torch.zeros(1, 5, dtype=torch.bool)
    present[0, kept] = True
    x = fusion.before(features[0, kept]) + fusion.kinds[kept]
    for block in fusion.blocks:
        x = plain_block(x, block, lambda i, j: True)
    expected = features[0, kept].mean(0) + fusion.out(fusion.norm(x.mean(0)))
    assert same(fusion(features, present)[0], expected)


def plain_block(x, block, may_see):
    """A block on one sequence (L, width), head by head and token by token."""
    length, width = x.shape
    heads, size = block.attn.num_heads, width // block.attn.num_heads
    qkv = block.attn.qkv(block.norm1(x))
    out = torch.zeros_like(x)
    for h in range(heads):
        q, k, v = (qkv[:, part * width + h * size : part * width + (h + 1) * size] for part in range(3))
        for i in range(length):
            seen = [j for j in range(length) if may_see(i, j)]
            score = torch.stack([(q[i] * k[j]).sum() / math.sqrt(size) for j in seen]).softmax(0)
            out[i, h * size : (h + 1) * size] = sum(s * v[j] for s, j in zip(score, seen, strict=True))
    x = x + block.attn.proj(out)
    return x + block.mlp.fc2(block.mlp.act(block.mlp.fc1(block.norm2(x))))


# ---- Low-rank corrections


def corrected(parts=1, modalities=3, rank=2, alpha=5.0, out=12):
    torch.manual_seed(0)
    rows, linear = BatchModalities(), nn.Linear(6, out)
    layer = LoraLinear(linear, rank, alpha, modalities, rows, parts)
    return linear, layer, rows


@pytest.mark.parametrize("parts", [1, 3])
def test_each_row_has_the_correction_of_its_modality_and_no_other(parts):
    linear, layer, rows = corrected(parts)
    shaken(layer)
    x, sizes = random(6, 4, 6), [3, 0, 3]
    rows.set(sizes, x.device)
    out = layer(x)
    of = [0, 0, 0, 2, 2, 2]
    for i, m in enumerate(of):
        y = linear(x[i])
        for part in range(parts):
            own = slice(part * 2, part * 2 + 2)
            low = x[i] @ layer.lora_down[m, own].T  # (tokens, rank)
            wide = slice(part * 12 // parts, (part + 1) * 12 // parts)
            y[:, wide] = y[:, wide] + 5.0 / 2 * low @ layer.lora_up[m, own]
        assert same(out[i], y)
    out.sum().backward()
    assert not layer.lora_up.grad[1].any() and not layer.lora_down.grad[1].any() and layer.lora_up.grad[0].any()


def test_rows_that_were_cut_into_windows_are_not_taken_for_records():
    _, layer, rows = corrected(rank=4)
    rows.set([1, 1, 1], torch.device("cpu"))
    with pytest.raises(RuntimeError):
        layer(random(36, 4, 6))  # 12 windows of each of 3 records, and 12 columns


def test_corrections_start_at_nothing_have_plain_names_and_the_counts_of_the_paper():
    linear, layer, _ = corrected(parts=3)
    assert torch.equal(layer(random(2, 6)), linear(random(2, 6)))
    assert list(layer.state_dict()) == ["weight", "bias", "lora_down", "lora_up"]
    assert layer.lora_down.numel() + layer.lora_up.numel() == 3 * 3 * 2 * (6 + 4)
    before, net = made(PLAIN, **VIT), made(PLAIN, **VIT, lora=Lora(rank=4))
    assert set(before.state_dict()) < set(net.state_dict())
    low = sum(p.numel() for name, p in net.named_parameters() if ".lora_" in name)
    # q, k, v and the projection map 24 to 24, the two layers of the MLP 24 to 96 and back: rank * (in + out) of each.
    assert low == 4 * 2 * 4 * (4 * (24 + 24) + 2 * (24 + 96))


def test_the_last_blocks_and_patterns_choose_the_layers():
    def chosen(**settings):
        net = made(PLAIN, **VIT, lora=Lora(**settings))
        return [name for name, module in net.backbone.named_modules() if isinstance(module, LoraLinear)]

    assert len(chosen()) == 8
    assert chosen(layers=1) == [f"blocks.1.{n}" for n in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
    with pytest.raises(UserError, match="the network has 2 such blocks"):
        chosen(layers=3)
    with pytest.raises(UserError, match="LoRA is not available for convolutions"):
        made(PLAIN, lora=Lora())


# ---- Captions


def test_a_caption_ends_at_its_first_end_and_padding_changes_nothing():
    text = torch.tensor([[3, 4, 49, 0, 0, 0], [3, 4, 5, 6, 7, 49], [3, 0, 5, 0, 0, 0], [0] * 6, [1, 49, 8, 49, 0, 0]])
    assert last_token(text, 49).tolist() == [2, 5, 2, 0, 1]
    for pool, causal in (("mean", False), ("end", False), ("end", True), ("mean", True)):
        torch.manual_seed(0)
        spec = TextSpec(layers=2, width=16, heads=2, pool=pool, causal=causal)
        net = shaken(TextEncoder(spec, 50, 6)).eval()
        whole = net(text)
        assert same(net(text[:1, :3]), whole[:1])
        other = text.clone()
        other[4, 2:] = 5
        assert same(net(other)[4], whole[4])
        assert not same(net(torch.tensor([[4, 3, 49, 0, 0, 0]])), whole[:1], 1e-3)


@pytest.mark.parametrize(("causal", "activation"), [(False, "gelu"), (True, "quick_gelu")])
def test_the_text_encoder_is_its_blocks_written_out(causal, activation):
    torch.manual_seed(0)
    spec = TextSpec(layers=2, width=16, heads=2, pool="end" if causal else "mean", causal=causal, activation=activation)
    net = shaken(TextEncoder(spec, 50, 6)).eval()
    caption = torch.tensor([[7, 8, 9, 49, 0, 0]])
    x = net.tokens.weight[caption[0, :4]] + net.positions[:4]
    for block in net.blocks:
        x = plain_block(x, block, lambda i, j: j <= i or not causal)
    x = net.norm(x)
    assert same(net(caption)[0], x[-1] if causal else x.mean(0))
    if causal:
        y = random(5)
        assert same(net.blocks[0].mlp.act(y), y / (1 + torch.exp(-1.702 * y)))


# ---- Weights


def clip_tower(width=64, layers=2, vocabulary=50, length=12, dim=16, prefix=""):
    """A text tower under the names of OpenAI's release."""
    shapes = {
        "token_embedding.weight": (vocabulary, width),
        "positional_embedding": (length, width),
        "ln_final.weight": (width,),
        "ln_final.bias": (width,),
        "text_projection": (width, dim),
    }
    for i in range(layers):
        shapes |= {
            f"transformer.resblocks.{i}.{name}": shape
            for name, shape in {
                "attn.in_proj_weight": (3 * width, width),
                "attn.in_proj_bias": (3 * width,),
                "attn.out_proj.weight": (width, width),
                "attn.out_proj.bias": (width,),
                "ln_1.weight": (width,),
                "ln_1.bias": (width,),
                "ln_2.weight": (width,),
                "ln_2.bias": (width,),
                "mlp.c_fc.weight": (4 * width, width),
                "mlp.c_fc.bias": (4 * width,),
                "mlp.c_proj.weight": (width, 4 * width),
                "mlp.c_proj.bias": (width,),
            }.items()
        }
    tensors = {f"{prefix}{name}": random(*shape, seed=i) * 0.2 for i, (name, shape) in enumerate(shapes.items())}
    return tensors | {"logit_scale": torch.tensor(1.0)}


CLIP = {"layers": 2, "width": 64, "heads": 1, "pool": "end", "causal": True, "activation": "quick_gelu"}


@pytest.mark.parametrize("prefix", ["", "text."])
def test_the_text_tower_of_a_clip_reads_as_torchs_own_transformer_does_with_its_weights(tmp_path, prefix):
    tensors = clip_tower(prefix=prefix)
    safe_load.write_tensors(tmp_path / "clip.safetensors", tensors)
    net = made(text=TextSpec(**CLIP), found={"text": tmp_path / "clip.safetensors"}).eval()
    text = torch.tensor([[48, 5, 6, 49, 0, 0, 0, 0, 0], [48, 7, 7, 7, 7, 7, 7, 7, 49]])
    tensors = {name.removeprefix(prefix): t for name, t in tensors.items()}
    x = tensors["token_embedding.weight"][text] + tensors["positional_embedding"][:9]
    mask = torch.full((9, 9), -math.inf).triu(1)
    for i in range(2):
        block = {k.removeprefix(f"transformer.resblocks.{i}."): t for k, t in tensors.items() if f"blocks.{i}." in k}
        attention = nn.MultiheadAttention(64, 1, batch_first=True)
        attention.load_state_dict({k.removeprefix("attn."): t for k, t in block.items() if k.startswith("attn.")})
        y = nn.functional.layer_norm(x, (64,), block["ln_1.weight"], block["ln_1.bias"])
        x = x + attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        y = nn.functional.layer_norm(x, (64,), block["ln_2.weight"], block["ln_2.bias"])
        y = y @ block["mlp.c_fc.weight"].T + block["mlp.c_fc.bias"]
        x = x + y * torch.sigmoid(1.702 * y) @ block["mlp.c_proj.weight"].T + block["mlp.c_proj.bias"]
    x = nn.functional.layer_norm(x, (64,), tensors["ln_final.weight"], tensors["ln_final.bias"])
    expected = torch.stack([x[0, 3], x[1, 8]]) @ tensors["text_projection"]
    images, _ = batch((0, 0, 0, 0))
    assert same(net.encode(images, text), expected, 1e-4)


def test_a_clip_that_would_be_read_wrongly_and_a_file_without_a_text_tower_are_refused(tmp_path):
    file = tmp_path / "clip.safetensors"
    safe_load.write_tensors(file, clip_tower())
    for change in ({"causal": False}, {"heads": 2}):
        with pytest.raises(UserError, match="set causal: true and heads: 1"):
            made(text=TextSpec(**(CLIP | change)), found={"text": file})
    with pytest.raises(UserError, match=r"does not fit TextEncoder.*blocks\.2"):
        made(text=TextSpec(**(CLIP | {"layers": 3})), found={"text": file})
    safe_load.write_tensors(file, {"conv1.weight": torch.ones(3)})
    with pytest.raises(UserError, match="text tower of a CLIP"):
        made(text=TextSpec(**CLIP), found={"text": file})
    safe_load.write_tensors(file, clip_tower(dim=20))
    net = made(text=TextSpec(**CLIP), found={"text": file})
    assert any("projection to 20" in sentence for sentence in net.about)


def test_weights_of_a_backbone_start_all_modalities_alike_and_positions_are_interpolated(tmp_path):
    import timm

    torch.manual_seed(3)
    square = timm.create_model(VIT["model"], img_size=32, num_classes=5, **VIT["args"])
    file = tmp_path / "vit.safetensors"
    safe_load.write_tensors(file, square.state_dict())
    net = made(**VIT, lora=Lora(), found={"net": file})
    state = square.state_dict()
    for name in PLAIN:
        assert torch.equal(net.stems[name][0].weight, state["patch_embed.proj.weight"])
    assert torch.equal(net.backbone.blocks[1].attn.qkv.weight, state["blocks.1.attn.qkv.weight"])
    # 4 x 4 places for 4 x 2: what is constant along a side stays so.
    assert net.backbone.pos_embed.shape == (1, 1 + 8, 24)
    assert torch.equal(net.backbone.pos_embed[:, 0], state["pos_embed"][:, 0])
    grid = torch.arange(4.0)[:, None].expand(4, 4).reshape(1, 16, 1).expand(1, 16, 24)
    safe_load.write_tensors(file, {**state, "pos_embed": torch.cat([state["pos_embed"][:, :1], grid], 1)})
    moved = made(**VIT, found={"net": file}).backbone.pos_embed[0, 1:].reshape(4, 2, 24)
    assert same(moved, torch.arange(4.0)[:, None, None].expand(4, 2, 24), 1e-4)
    safe_load.write_tensors(file, {"something": torch.ones(3)})
    with pytest.raises(UserError, match="does not fit"):
        made(**VIT, found={"net": file})


def test_the_picture_tower_of_a_clip_brings_its_projection(tmp_path):
    import timm

    name, args = "vit_base_patch16_clip_quickgelu_224", VIT["args"] | {"patch_size": 16}
    square = timm.create_model(name, img_size=32, num_classes=16, **args)
    file = tmp_path / "clip.safetensors"
    safe_load.write_tensors(file, square.state_dict())
    net = made(PLAIN, model=name, args=args, stems="own", found={"net": file})
    assert torch.equal(net.project.weight, square.head.weight)
    assert made(PLAIN, model=name, args=args, embedding=8, found={"net": file}).about[1].startswith("projection to 16")


def test_an_earlier_run_is_gone_on_with_and_other_people_have_a_new_classifier(tmp_path, vit):
    file = tmp_path / "run.safetensors"
    safe_load.write_tensors(file, vit.state_dict())
    settings = VIT | {"lora": Lora(), "fusion": Fusion(name="transformer", layers=1, heads=2), "found": {"net": file}}
    again, others = made(**settings).eval(), made(**settings, classes=5).eval()
    images, text = batch()
    for net in (again, others):
        assert torch.equal(net.encode(images, text), vit.encode(images, text))
    assert torch.equal(again.classifier.weight, vit.classifier.weight) and others.classifier.weight.shape == (5, 16)
    assert any("classifier of 7 identities" in sentence for sentence in others.about)
    words = made(found={"text": file}, text=TextSpec(layers=1, width=16, heads=2)).eval()
    none = {name: x[:0] for name, x in images.items()}
    assert torch.equal(words.encode(none, text), vit.encode(none, text))


# ---- What is trained


def test_above_a_backbone_that_stays_corrections_first_layers_and_heads_are_trained(tmp_path):
    import timm

    file = tmp_path / "net.safetensors"
    safe_load.write_tensors(file, timm.create_model(CONVNEXT["model"], num_classes=5, **CONVNEXT["args"]).state_dict())
    settings = CONVNEXT | {"found": {"net": file}}
    settings |= {"lora": Lora(), "tune": "lora", "weights": "x"}
    net = made(**settings)
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    assert {name for name in trained if name.startswith("backbone.")} == {
        name for name in net.state_dict() if ".lora_" in name
    }
    assert {"stems.nir.0.weight", "stems.rgb.1.bias", "project.weight", "classifier.weight"} <= trained
    images, text = batch()
    before = {name: t.clone() for name, t in net.state_dict().items()}
    net.train()(images, text)["logits"].square().sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in net.parameters())
    moved = {name for name, t in net.state_dict().items() if not torch.equal(t, before[name])}
    assert moved <= {f"bn.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert any("are trained" in sentence for sentence in net.about)
    shared = made(**settings, stems="shared")
    assert {n for n, p in shared.backbone.named_parameters() if p.requires_grad and ".lora_" not in n} == {
        f"backbone.stem.{i}.{kind}".removeprefix("backbone.") for i in (0, 1) for kind in ("weight", "bias")
    }


def test_layer_decay_knows_the_blocks_of_both_encoders():
    from trainkit.training.optimizer import layer_scales

    scales = layer_scales(made(**VIT, lora=Lora(), text=TextSpec(layers=2, width=16, heads=2)), 0.5)
    assert scales["text.tokens.weight"] == scales["text.positions"] == 0.5**2
    assert scales["text.blocks.0.mlp.fc1.weight"] == 0.5 and scales["text.blocks.1.norm1.bias"] == 1
    assert scales["text.norm.weight"] == 1
    assert scales["backbone.blocks.0.attn.qkv.lora_up"] == scales["backbone.blocks.0.attn.qkv.weight"] == 0.5
    assert "stems.rgb.0.weight" not in scales


# ---- Mistakes, blocks of a recipe


def test_where_weights_come_from():
    assert required_weights(ReidSpec(**CNN)) == {}
    spec = ReidSpec(model="resnet18.a1_in1k", weights="pretrained", text=TextSpec(weights="run:words"))
    assert required_weights(spec) == {"net": "timm:resnet18.a1_in1k", "text": "run:words"}


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"drop_path": 1.0}, "drop_path"),
        ({"args": {"in_chans": 1}}, "in_chans"),
        ({"args": {"drop_path_rate": 0.1}}, "use drop_path instead"),
        ({"embedding": 0}, "embedding"),
        ({"weights": "pretrained"}, "tag"),
        ({"tune": "lora"}, "lora or weights is not set"),
        ({"tune": "lora", "lora": {}}, "lora or weights is not set"),
        ({"lora": {"rank": 0}}, "rank"),
        ({"lora": {"alpha": 0.0}}, "alpha"),
        ({"lora": {"layers": 0}}, "layers"),
        ({"text": {"width": 10, "heads": 4}}, "multiple of heads"),
        ({"text": {"layers": 0}}, "layers"),
        ({"fusion": {"layers": 0}}, "layers"),
        ({"stems": "some"}, "own"),
    ],
)
def test_mistakes_in_the_block_are_named(block, says):
    with pytest.raises(ValidationError, match=says):
        validate(ReidSpec, {"model": "test_vit", **block}, {})


def test_networks_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match=r"no model 'resnet_18'.*did you mean"):
        made(model="resnet_18")
    with pytest.raises(UserError, match="divisor"):
        made(fusion=Fusion(name="transformer", heads=3))
    with pytest.raises(UserError, match="stems: shared"), torch.device("meta"):  # it folds pixels into channels first
        build(ReidSpec(model="tresnet_m"), meta(PLAIN, shape=(3, 64, 64)), {})


def test_the_network_of_reid5o_builds_for_pictures_of_people():
    spec = ReidSpec(
        model="vit_base_patch16_clip_quickgelu_224.openai",
        lora=Lora(rank=4),
        text=TextSpec(layers=12, width=512, heads=8, pool="end", causal=True, activation="quick_gelu"),
        fusion=Fusion(name="transformer", layers=4, heads=8),
    )
    with torch.device("meta"):
        net = build(
            spec,
            DatasetInfo(400, (3, 384, 128), "", modalities=MODALITIES, vocabulary=49_408, text_length=77),
            {},
        )
    assert net.backbone.pos_embed.shape == (1, 1 + 24 * 8, 768) and net.dim == 512
    # The text tower of CLIP ViT-B/16: 63.4 million with its projection.
    words = sum(p.numel() for p in (*net.text.parameters(), *net.project_text.parameters()))
    assert words == 63_428_096
    images = {name: torch.zeros(2, 3, 384, 128, device="meta") for name in PLAIN}
    out = net(
        images, torch.zeros(2, 77, dtype=torch.long, device="meta"), torch.zeros(3, 5, dtype=torch.long, device="meta")
    )
    assert out["fused_logits"].shape == (3, 400) and out["neck"].shape == (10, 512)


# ---- Compiled


@pytest.mark.slow
def test_compiled_it_computes_the_same_and_other_mixtures_of_modalities_are_not_compiled_again():
    from torch._dynamo.testing import CompileCounterWithBackend

    small = {"args": VIT["args"] | {"depth": 1}, "model": VIT["model"], "lora": Lora()}
    small["fusion"] = Fusion(name="transformer", layers=1, heads=2)
    plain, net = (shaken(made(**small)).train() for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    net.compile(backend=counter)
    for i, (sizes, captions) in enumerate(
        [((6, 3, 4, 2), 5), ((5, 4, 3, 4), 4), ((6, 4, 0, 5), 5), ((6, 1, 5, 0), 6), ((9, 0, 0, 1), 7)]
    ):
        images, text = batch(sizes, captions, seed=i)
        asked = queries(*[[q, -1, -1, -1, sum(sizes) + 1] for q in range(3 + i)])
        outs = []
        for either in (plain, net):
            either.zero_grad()
            outs.append(either(images, text, asked))
            (outs[-1]["logits"].square().sum() + outs[-1]["fused_logits"].square().sum()).backward()
        assert all(same(outs[0][key], outs[1][key]) for key in outs[0])
        pairs = zip(plain.parameters(), net.parameters(), strict=True)
        assert all(same(a.grad, b.grad, 1e-4) for a, b in pairs if a.requires_grad)
    assert counter.frame_count <= 2
    assert list(net.state_dict()) == list(plain.state_dict())
