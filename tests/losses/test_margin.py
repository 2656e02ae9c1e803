"""Margins, distillation losses and class centres, each against plain loops, and the published defects held off."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter, ValidationError
from torch.overrides import TorchFunctionMode

from trainkit.losses.distillation import Centres, feature_mse, geometry
from trainkit.losses.margin import (
    LinearHead,
    MarginHead,
    NormStatistics,
    arcface,
    class_head,
    class_logits,
    class_loss,
    margin_logits,
    margin_ramp,
)
from trainkit.losses.margin_specs import AdaFace, ArcFace, CosFace, Margin, MarginOrNone, NoMargin

PRECISIONS = pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-9), (torch.float32, 2e-4)])


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def unit(row: list[float]) -> list[float]:
    length = math.sqrt(sum(v * v for v in row))
    return [v / length for v in row]


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


# Margins


def plain_margin(cos: float, margin, quality: float | None) -> float:
    theta = math.acos(clip(cos, -1, 1))
    if margin.name == "arcface":
        return math.cos(theta + margin.m) if theta + margin.m < math.pi else cos - margin.m * math.sin(margin.m)
    if margin.name == "cosface":
        return cos - margin.m
    theta = math.acos(clip(cos, -0.999, 0.999))
    return math.cos(clip(theta - margin.m * quality, 1e-3, math.pi - 1e-3)) - (margin.m + margin.m * quality)


MARGINS = [ArcFace(), ArcFace(m=0.45, scale=30.0), ArcFace(m=2.0), CosFace(), AdaFace(), AdaFace(m=0.5, scale=10.0)]


@PRECISIONS
@pytest.mark.parametrize("margin", MARGINS, ids=str)
def test_every_logit_equals_the_formula(margin, dtype, close):
    cos_BC = normal(40, 7, dtype=dtype).div(2).clamp(-1, 1)
    cos_BC[0, 3], cos_BC[1, 4], cos_BC[2, 5] = 1.0, -1.0, math.cos(3.0)
    label_B = torch.tensor([3, 4, 5, *(i % 7 for i in range(37))])
    quality_B = normal(40, seed=1, dtype=dtype).clamp(-1, 1) if margin.name == "adaface" else None
    logits_BC = margin_logits(cos_BC, label_B, margin, quality_B)
    assert logits_BC.dtype == dtype
    for i in range(40):
        for j in range(7):
            cos = cos_BC[i, j].item()
            if j == label_B[i]:
                cos = plain_margin(cos, margin, None if quality_B is None else quality_B[i].item())
            assert logits_BC[i, j].item() == pytest.approx(margin.scale * cos, abs=close * margin.scale)


@pytest.mark.parametrize("m", [0.1, 0.5, 1.0, 2.0])
def test_arcface_never_rewards_a_larger_angle(m):
    theta = torch.linspace(0, math.pi, 2001, dtype=torch.float64)
    lowered = arcface(theta.cos(), m)
    assert (lowered.diff() < 1e-12).all()
    assert (lowered <= theta.cos() + 1e-12).all()


@pytest.mark.parametrize("margin", MARGINS, ids=str)
def test_gradients_are_finite_where_the_angle_is_0_or_pi(margin):
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.6, 0.8]], requires_grad=True)
    head = MarginHead(2, 2)
    head.weight.data = torch.eye(2)
    label = torch.tensor([0, 0, 1])
    F.cross_entropy(margin_logits(head(x), label, margin, torch.zeros(3)), label).backward()
    assert torch.isfinite(x.grad).all() and torch.isfinite(head.weight.grad).all()
    assert head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("margin", MARGINS, ids=str)
def test_gradients_equal_finite_differences(margin):
    cos = torch.tensor([[0.3, -0.2, 0.7], [0.1, 0.5, -0.4]], dtype=torch.float64, requires_grad=True)
    label = torch.tensor([0, 2])
    quality = torch.tensor([0.2, -0.6], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda c: margin_logits(c, label, margin, quality), (cos,))


def test_norm_statistics_follow_the_published_running_mean_and_spread():
    statistics, mean, std = NormStatistics(), 20.0, 100.0
    assert set(statistics.state_dict()) == {"mean", "std"} and list(statistics.parameters()) == []
    for step in range(30):
        norms = normal(12, seed=step).mul(60).add(30)
        statistics.update(norms, 0.01)
        values = [clip(v, 1e-3, 100.0) for v in norms.tolist()]
        batch_mean = sum(values) / 12
        batch_std = math.sqrt(sum((v - batch_mean) ** 2 for v in values) / 11)
        mean, std = 0.01 * batch_mean + 0.99 * mean, 0.01 * batch_std + 0.99 * std
        quality = statistics.quality(norms, 0.333)
        for v, q in zip(values, quality.tolist(), strict=True):
            assert q == pytest.approx(clip((v - mean) / (std + 1e-3) * 0.333, -1, 1), abs=1e-5)
    assert statistics.mean.item() == pytest.approx(mean, rel=1e-5)
    assert statistics.std.item() == pytest.approx(std, rel=1e-5)


def test_one_sample_alone_does_not_spoil_the_norm_statistics():
    statistics = NormStatistics()
    statistics.update(torch.tensor([30.0]), 0.5)
    assert statistics.mean.item() == 25.0 and statistics.std.item() == 100.0


def test_no_gradient_reaches_the_norm_through_the_margin():
    norm = torch.tensor([10.0, 30.0], requires_grad=True)
    statistics = NormStatistics()
    statistics.update(norm, 0.01)
    assert not statistics.quality(norm, 0.333).requires_grad
    assert not statistics.mean.requires_grad and not statistics.std.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gives_float32_logits_also_under_autocast(dtype):
    x, head, centres = normal(5, 32), MarginHead(6, 32), Centres(6, 32)
    label = torch.arange(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for cos, weight in ((head(x.to(dtype)), head.weight), (centres.cosines(x.to(dtype)), centres.weight)):
            logits = margin_logits(cos, label, ArcFace())
            assert cos.dtype == logits.dtype == torch.float32
            exact = F.normalize(x.to(dtype).double()) @ F.normalize(weight.double()).T
            assert (cos - exact).abs().max() < 1e-6
        assert feature_mse(x.to(dtype), x).dtype == torch.float32
    assert margin_logits(torch.zeros(5, 6, dtype=dtype), label, CosFace()).dtype == torch.float32


def test_cosines_stay_within_one_whatever_the_length():
    head = MarginHead(3, 3)
    cos = head(torch.cat([head.weight.data * 1e6, head.weight.data * 1e-6, torch.zeros(1, 3)]))
    assert cos.abs().max() <= 1 and torch.isfinite(cos).all()
    assert torch.allclose(cos.diagonal(), torch.ones(3))


def test_the_margin_block_is_chosen_by_its_name_and_checked():
    adapter = TypeAdapter(Margin)
    assert adapter.validate_python({"name": "adaface"}) == AdaFace(m=0.4, h=0.333, t_alpha=0.01, scale=64.0)
    assert adapter.validate_python({"name": "cosface", "m": 0.3}) == CosFace(m=0.3)
    for wrong in (
        {"name": "sphereface"},
        {"name": "arcface", "m": 4.0},
        {"name": "arcface", "scale": 0},
        {"name": "cosface", "ramp_epochs": -1},
        {"name": "arcface", "scale_eval": 0},
    ):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)


# A margin that grows, and none at all


def test_a_margin_grows_over_its_first_epochs_and_the_first_has_none():
    margin = CosFace(m=0.18, scale=12.0, ramp_epochs=10)
    assert [margin_ramp(margin, epoch) for epoch in (0, 1, 5, 10, 11, 900)] == [0, 0.1, 0.5, 1, 1, 1]
    for without in (CosFace(), ArcFace(), AdaFace(), NoMargin()):
        assert margin_ramp(without, 0) == margin_ramp(without, 3) == 1


@pytest.mark.parametrize("margin", [ArcFace(m=0.2, scale=8.0), CosFace(m=0.18, scale=12.0)], ids=str)
@pytest.mark.parametrize("ramp", [0.0, 0.3, 1.0])
def test_a_ramp_lowers_the_margin_and_nothing_else(margin, ramp):
    cos, label = normal(6, 3).div(3).clamp(-0.99, 0.99), torch.tensor([0, 1, 2, 0, 1, 2])
    logits = margin_logits(cos, label, margin, ramp=ramp)
    for i in range(6):
        for j in range(3):
            c = cos[i, j].item()
            if j == label[i] and margin.name == "arcface":
                c = math.cos(math.acos(c) + 0.2 * ramp)
            elif j == label[i]:
                c -= 0.18 * ramp
            assert logits[i, j].item() == pytest.approx(margin.scale * c, abs=1e-5)


def test_classes_are_predicted_from_scaled_cosines_without_a_margin():
    cos = normal(5, 2).clamp(-1, 1)
    for margin, scale in [
        (ArcFace(m=0.2, scale=8.0, scale_eval=4.0), 4.0),
        (CosFace(m=0.18, scale=12.0, scale_eval=6.0), 6.0),
        (CosFace(), 64.0),
        (AdaFace(scale=30.0), 30.0),
        (NoMargin(), 1.0),
    ]:
        assert torch.equal(class_logits(cos, margin), scale * cos)


def test_a_block_may_choose_no_margin_only_where_a_plain_classifier_will_do():
    assert TypeAdapter(MarginOrNone).validate_python({"name": "none", "loss": "bce"}) == NoMargin(loss="bce")
    assert TypeAdapter(MarginOrNone).validate_python({"name": "cosface"}) == CosFace()
    for adapter, wrong in ((Margin, {"name": "none"}), (MarginOrNone, {"name": "none", "loss": "mse"})):
        with pytest.raises(ValidationError):
            TypeAdapter(adapter).validate_python(wrong)


def sigmoid_loss(z: float, y: int) -> float:
    return -math.log(1 / (1 + math.exp(-z)) if y else 1 - 1 / (1 + math.exp(-z)))


def test_bce_on_one_logit_is_softmax_cross_entropy_over_that_logit_and_0():
    """The loss of the eye-state guide's baseline, one logit z for `open`, in the words used here."""
    z, label = normal(9, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1])
    expected = sum(sigmoid_loss(a, b) for a, b in zip(z.tolist(), label.tolist(), strict=True))
    shift = normal(9, seed=1, dtype=torch.float64)  # softmax does not see what both scores have in common
    for logits in (torch.stack([torch.zeros_like(z), z], 1), torch.stack([shift, z + shift], 1)):
        for margin in (NoMargin(loss="ce"), NoMargin(loss="bce")):
            total, count = class_loss(margin_logits(logits, label, margin), label, margin)
            assert total.item() == pytest.approx(expected, rel=1e-12) and count == 9
        assert torch.allclose(class_logits(logits, NoMargin()).softmax(1)[:, 1], z.sigmoid(), atol=1e-12)


def test_bce_of_more_classes_sets_each_against_the_others():
    logits, label = normal(7, 4), torch.tensor([0, 1, 2, 3, 3, 0, 1])
    expected = sum(sigmoid_loss(logits[i, j].item(), int(j == label[i])) for i in range(7) for j in range(4))
    total, count = class_loss(logits, label, NoMargin(loss="bce"))
    assert total.item() == pytest.approx(expected, rel=1e-5) and count == 7


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("margin", [NoMargin(), NoMargin(loss="bce"), CosFace(m=0.18, scale=12.0)], ids=str)
def test_weights_of_classes_multiply_the_loss_of_their_samples(margin, classes):
    head, x, label = class_head(margin, classes, 8), normal(6, 8), torch.arange(6) % classes
    weight = torch.tensor([0.5, 3.0, 1.0, 2.0])[:classes]
    logits = margin_logits(head(x), label, margin)
    expected = sum(weight[y].item() * class_loss(logits[i : i + 1], y[None], margin)[0] for i, y in enumerate(label))
    total, count = class_loss(logits, label, margin, weight)
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert count.item() == pytest.approx(sum(weight[y].item() for y in label))


def test_a_linear_head_starts_near_log_classes_and_stays_float32_under_autocast():
    torch.manual_seed(0)
    head, x, label = LinearHead(5, 32), normal(40, 32), torch.arange(40) % 5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = head(x.bfloat16())
    assert logits.dtype == torch.float32
    exact = x.bfloat16().double() @ head.weight.double().T + head.bias.double()
    assert (logits - exact).abs().max() < 1e-5
    total, count = class_loss(logits, label, NoMargin())
    assert (total / count).item() == pytest.approx(math.log(5), abs=0.05)
    total.backward()
    assert all(p.grad.abs().sum() > 0 for p in head.parameters())


# Distillation


@PRECISIONS
def test_feature_mse_equals_the_formula(dtype, close):
    s, t = normal(6, 5, dtype=dtype), normal(6, 5, seed=1, dtype=dtype)
    expected = sum(
        sum((a - b) ** 2 for a, b in zip(unit(s[i].tolist()), unit(t[i].tolist()), strict=True)) for i in range(6)
    )
    assert feature_mse(s, t).item() == pytest.approx(expected / 6, abs=close)


def test_gradient_goes_to_the_student_alone():
    s, t = normal(6, 5).requires_grad_(), normal(6, 5, seed=1).requires_grad_()
    centres = Centres(4, 5)
    label = torch.tensor([0, 1, 2, 3, 0, 1])
    centres.update(label, s, t)
    loss = feature_mse(s, t) + F.cross_entropy(margin_logits(centres.cosines(s), label, ArcFace(m=0.45)), label)
    loss.backward()
    assert s.grad.abs().sum() > 0 and t.grad is None and centres.weight.grad is None


def plain_update(weight, label, student, teacher, alpha: str):
    """The update of equations 6 to 8 by loops over samples; returns the centres and alpha."""
    new = [list(row) for row in weight]
    alphas = []
    for y, s_row, t_row in zip(label, student, teacher, strict=True):
        s, t = unit(s_row), unit(t_row)
        w = weight[y]
        a = clip(dot(s, t), -1, 1)
        if alpha == "hard":
            a *= clip(dot(unit(w), t), 1e-6, 1)
        a = clip(a, 1e-6, 1)
        alphas.append(a)
        new[y] = [a * wi + (1 - a) * ti for wi, ti in zip(w, t, strict=True)]
    return new, alphas


@pytest.mark.parametrize("alpha", ["plain", "hard"])
@PRECISIONS
def test_centres_move_as_the_formula_says(alpha, dtype, close):
    centres = Centres(6, 8, torch.Generator().manual_seed(0)).to(dtype)
    weight = centres.weight.tolist()
    most = 0
    for step in range(12):
        label = torch.randint(0, 5, (17,), generator=torch.Generator().manual_seed(step))  # class 5 never occurs
        teacher = normal(17, 8, seed=100 + step, dtype=dtype) * 3
        student = teacher + 2 * normal(17, 8, seed=200 + step, dtype=dtype)
        weight, expected = plain_update(weight, label.tolist(), student.tolist(), teacher.tolist(), alpha)
        got = centres.update(label, student, teacher, alpha=alpha)
        assert got.tolist() == pytest.approx(expected, abs=close)
        assert torch.allclose(centres.weight, torch.tensor(weight, dtype=dtype), atol=close)
        most = max(most, *Counter(label.tolist()).values())
    assert most >= 6


def test_first_centres_are_normal_with_deviation_one_hundredth_and_repeat():
    table = Centres(400, 64, torch.Generator().manual_seed(3)).weight
    assert table.dtype == torch.float32
    assert table.std().item() == pytest.approx(0.01, rel=0.02) and abs(table.mean().item()) < 3e-4
    assert torch.equal(table, Centres(400, 64, torch.Generator().manual_seed(3)).weight)


# Defects of the published code


class ReversedWrites(TorchFunctionMode):
    """Carries indexed assignments out from the last index to the first, as a GPU may."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__setitem__:
            table, index, value = args
            args = table, index.flip(0), value.flip(0)
        return function(*args, **(kwargs or {}))


def test_the_order_in_which_a_device_writes_changes_no_centre():
    label, s, t = torch.tensor([3, 1, 3, 1, 3]), normal(5, 8), normal(5, 8, seed=1)
    tables = []
    for mode in (nullcontext(), ReversedWrites()):
        centres = Centres(4, 8, torch.Generator().manual_seed(0))
        with mode:
            centres.update(label, s, t)
        tables.append(centres.weight)
    assert torch.equal(*tables)


def test_half_precision_features_leave_float32_centres():
    centres = Centres(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        alpha = centres.update(torch.tensor([0, 1, 1]), normal(3, 8).bfloat16(), normal(3, 8).half())
    assert centres.weight.dtype == alpha.dtype == torch.float32


def test_geometry_adds_to_the_quality_where_the_student_lags_behind():
    hardness, agrees = torch.tensor([0.9, 0.5, 0.2]), torch.tensor([0.4, 0.5, 0.8])
    assert geometry(hardness, agrees, 3.0).tolist() == pytest.approx([3 * 0.9 * 0.5, 0.0, 0.0])
    quality = NormStatistics().quality(torch.full((3,), 20.0), 0.333, 0.5 * geometry(hardness, agrees, 3.0))
    assert quality.tolist() == pytest.approx([0.675, 0.0, 0.0], abs=1e-6)
