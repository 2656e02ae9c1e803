"""Learning-rate curves, against their formulas written out and published codes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trainkit.config.schedule import Curve, Warmup
from trainkit.config.units import Span
from trainkit.config.validation import validate

EPOCH, BATCH = 40, 16


def factors(curve: Curve, steps: int) -> list[float]:
    return [curve.factor(step, steps, EPOCH, BATCH) for step in range(steps)]


def test_a_constant_rate():
    assert factors(Curve(), 5) == [1.0] * 5


def test_a_rate_that_drops_at_given_steps():
    """The paper's: a tenth at each of several epochs."""
    curve = Curve(name="steps", at=[Span.parse("1 epoch"), Span.parse("100 steps")], gamma=0.1)
    expected = [1.0] * 40 + [0.1] * 60 + [0.01] * 20
    assert factors(curve, 120) == pytest.approx(expected)


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_a_cosine(floor):
    expected = [floor + (1 - floor) * (1 + math.cos(math.pi * t / 80)) / 2 for t in range(80)]
    assert factors(Curve(name="cosine", floor=floor), 80) == pytest.approx(expected)


@pytest.mark.parametrize(("power", "floor"), [(0.9, 0.0), (2.0, 0.05)])
def test_a_polynomial(power, floor):
    expected = [floor + (1 - floor) * (1 - t / 80) ** power for t in range(80)]
    assert factors(Curve(name="poly", power=power, floor=floor), 80) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "start", "climb"),
    [
        ("linear", 0.0, lambda x: x),
        ("linear", 0.2, lambda x: 0.2 + 0.8 * x),
        ("quadratic", 0.0, lambda x: x * x),
        ("quadratic", 0.2, lambda x: 0.2 + 0.8 * x * x),
        ("exponential", 0.1, lambda x: 0.1 ** (1 - x)),
    ],
)
def test_a_warm_up_reaches_the_full_rate_with_its_last_step_and_the_curve_follows(kind, start, climb):
    curve = Curve(name="cosine", warmup=Warmup(over=Span.parse("20 steps"), kind=kind, start=start))
    expected = [climb((t + 1) / 20) for t in range(20)] + [(1 + math.cos(math.pi * t / 60)) / 2 for t in range(60)]
    got = factors(curve, 80)
    assert got == pytest.approx(expected) and got[0] > 0 and got[19] == got[20] == 1


def test_drops_count_from_the_start_of_training_not_from_the_end_of_the_warm_up():
    curve = Curve(name="steps", at=[Span.parse("30 steps")], gamma=0.5, warmup=Warmup(over=Span.parse("10 steps")))
    assert factors(curve, 40)[10:] == [1.0] * 20 + [0.5] * 10


WARM = 20
PUBLISHED = {
    "timm": lambda t: t / WARM,
    "BiSeNet": lambda t: 0.1 ** (1 - t / WARM),
    "strong baseline": lambda t: 0.01 * (1 - t / WARM) + t / WARM,
    "ConvNeXt": lambda t: np.linspace(0, 1, WARM)[t],
}
"""Factors of published codes after t updates, while t < WARM."""


def test_published_warm_ups_differ_from_this_one_as_the_docs_say():
    """timm, BiSeNet and the strong baseline reach the full rate one update later, ConvNeXt with the same update."""
    own = factors(Curve(warmup=Warmup(over=Span.parse(f"{WARM} steps"))), WARM + 1)
    assert own[WARM - 1] == own[WARM] == 1
    ends = {name: climb(WARM - 1) for name, climb in PUBLISHED.items()}
    assert ends["ConvNeXt"] == 1 and all(end < 1 for name, end in ends.items() if name != "ConvNeXt")
    for name in ("timm", "ConvNeXt"):
        assert PUBLISHED[name](0) == 0, "the first update moves nothing"
        assert max(abs(own[t] - PUBLISHED[name](t)) for t in range(WARM)) == pytest.approx(1 / WARM)


def test_the_factors_of_timm_are_those_of_its_scheduler():
    from timm.scheduler import CosineLRScheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = CosineLRScheduler(optimizer, 80, warmup_t=WARM, warmup_prefix=True, t_in_epochs=False)
    found = []
    for t in range(WARM + 1):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step_update(t + 1)
    assert found == pytest.approx([PUBLISHED["timm"](t) for t in range(WARM)] + [1.0])


def test_one_update_more_and_a_lower_start_give_the_factors_of_bisenet():
    warmup = Warmup(over=Span.parse(f"{WARM + 1} steps"), kind="exponential", start=0.1 ** ((WARM + 1) / WARM))
    published = [PUBLISHED["BiSeNet"](t) for t in range(WARM)]
    assert factors(Curve(warmup=warmup), WARM + 1) == pytest.approx([*published, 1.0])


@pytest.mark.parametrize(
    ("over", "length", "override"),
    [
        ("45 steps", "10 steps", "1 step"),
        ("45 steps", "44 steps", "4 steps"),
        ("2 epochs", "1.5 epochs", "0.15 epochs"),
        ("2 epochs", "60 steps", "6 steps"),
        ("60 steps", "1 epoch", "0.1 epochs"),
        ("50 steps", "790 samples", "79 samples"),
        ("2 epochs", "1 sample", "1 sample"),
    ],
)
def test_a_warm_up_longer_than_the_training_is_refused_with_the_override_that_mends_it(over, length, override):
    length = Span.parse(length)
    refused = Curve(warmup=Warmup(over=Span.parse(over)))
    with pytest.raises(ValueError) as caught:
        refused.refuse_short(length, EPOCH, BATCH)
    assert over in str(caught.value) and str(length) in str(caught.value)
    assert str(caught.value).endswith(f'train.schedule.warmup.over="{override}"')
    Curve(warmup=Warmup(over=Span.parse(override))).refuse_short(length, EPOCH, BATCH)


def test_a_warm_up_as_long_as_the_training_is_taken_and_one_in_another_unit_waits_for_the_data():
    Curve().refuse_short(Span.parse("1 step"), EPOCH, BATCH)
    Curve(warmup=Warmup(over=Span.parse("40 steps"))).refuse_short(Span.parse("1 epoch"), EPOCH, BATCH)
    mixed = Curve(warmup=Warmup(over=Span.parse("2 epochs")))
    mixed.refuse_short(Span.parse("1 step"), None, BATCH)
    with pytest.raises(ValueError, match=r"0\.5 of the full rate"):
        mixed.refuse_short(Span.parse("1 epoch"), None, BATCH)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Curve(name="steps"),
        lambda: Curve(name="cosine", at=[Span.parse("1 step")]),
        lambda: validate(Curve, {"gamma": 1.0}, {}),
        lambda: validate(Curve, {"floor": 1.0}, {}),
        lambda: validate(Curve, {"power": 0.0}, {}),
        lambda: validate(Warmup, {"over": "1 step", "start": 1.0}, {}),
        lambda: Warmup(over=Span.parse("1 step"), kind="exponential"),
    ],
)
def test_a_curve_that_makes_no_sense_is_refused(make):
    with pytest.raises(ValueError):
        make()
