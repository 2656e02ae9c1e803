"""Spans, learning-rate curves and gates, against their formulas written out; and the agenda that repeats decisions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from trainkit.config.units import Curve, Gate, PerProcess, Safeguard, Share, Span, Warmup, sides
from trainkit.config.validation import validate
from trainkit.tracking.journal import Event
from trainkit.training.events import EventSchedule, recorded_decisions

EPOCH, BATCH = 40, 16


# Spans


@pytest.mark.parametrize(
    ("text", "amount", "unit", "written"),
    [
        ("500 steps", 500, "steps", "500 steps"),
        ("1 step", 1, "steps", "1 step"),
        (" 1 epoch ", 1, "epochs", "1 epoch"),
        ("0.5 epochs", 0.5, "epochs", "0.5 epochs"),
        ("1M samples", 1e6, "samples", "1000000 samples"),
        ("80k steps", 80_000, "steps", "80000 steps"),
        ("1.5 K steps", 1500, "steps", "1500 steps"),
        ("30 min", 30, "minutes", "30 min"),
        ("1 hour", 1, "hours", "1 h"),
        ("0.000001 s", 1e-6, "seconds", "0.000001 s"),
    ],
)
def test_a_span_means_what_it_says_and_reads_back_as_itself(text, amount, unit, written):
    span = Span.parse(text)
    assert (span.amount, span.unit, str(span)) == (amount, unit, written)
    assert Span.parse(str(span)) == span


@pytest.mark.parametrize(
    "text",
    ["", "5", "steps", "5steps", "0 steps", "-1 steps", "1.5 steps", "0.5 samples", "1e3 steps", "5 parsecs",
     "5 G steps", "0.0000001 s", "9999999999999 steps", "nan steps", "five steps", "5 steps 3", 5, None, True,
     "04 epochs", "00.5 epochs", "+4 epochs", "4\tepochs", "4\u00a0epochs", "4 epochs\n", "\u0664 epochs",
     "\uff14 epochs", "1_0 epochs", "inf s", ".5 epochs", "4. epochs", "030 min", "0x4 steps", "1,5 epochs"],
)  # fmt: skip
def test_what_is_no_span_is_refused(text):
    with pytest.raises(ValueError):
        Span.parse(text)


@pytest.mark.parametrize(
    "number", ["04", "+4", "-4", "\u00a04", "4\t", "\u0664", "1_0", "4e0", "inf", "nan", "0x4", "4.", ".4", ""]
)
def test_numbers_with_units_are_written_in_one_way(number):
    for cls, text in ((Share, f"{number}%"), (PerProcess, f"{number} per process"), (Span, f"{number} epochs")):
        with pytest.raises(ValueError):
            TypeAdapter(Share).validate_python(text) if cls is Share else cls.parse(text)
    assert sides(f"{number}x2", 2) == [] and sides(f"2x{number}", 2) == [] and sides("4x2.5", 2) == [4, 2.5]


def test_a_span_in_steps():
    assert Span.parse("7 steps").steps(EPOCH, BATCH) == 7
    assert Span.parse("3 epochs").steps(EPOCH, BATCH) == 120
    assert Span.parse("0.25 epochs").steps(EPOCH, BATCH) == 10
    assert Span.parse("1k samples").steps(EPOCH, BATCH) == 62  # 62.5, to the even neighbour
    assert Span.parse("1 sample").steps(EPOCH, BATCH) == 1, "never less than one step"


def test_a_span_in_seconds():
    assert [Span.parse(text).seconds for text in ("90 s", "1.5 min", "2 h")] == [90, 90, 7200]
    assert [Span.parse(text).timed for text in ("1 s", "1 min", "1 h", "1 step", "1 epoch", "1 sample")] == [
        True
    ] * 3 + [False] * 3


# Curves


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


# Gates


def gate(every: str | None, budget: float | None = None) -> Gate:
    return Gate(Span.parse(every) if every else None, EPOCH, BATCH, budget)


@pytest.mark.parametrize(
    ("every", "steps"),
    [("3 steps", [3, 6, 9, 12]), ("1 epoch", [40, 80]), ("0.5 epochs", [20, 40, 60, 80]), ("320 samples", [20, 40])],
)
def test_a_gate_in_units_of_training_opens_at_the_multiples(every, steps):
    gates, due = gate(every), []
    for step in range(1, 1 + steps[-1]):
        if step >= gates.due:
            due.append(step)
            gates.due = gates.after(step)
    assert due == steps and not gates.clocked


def test_a_gate_without_a_span_never_opens():
    assert gate(None).due == Gate.NEVER and gate(None).decide(5, 1.0, 0.1) == (False, Gate.NEVER)
    assert not gate(None, budget=0.1).clocked


def simulate(gates: Gate, seconds_per_step: float, cost: float, steps: int) -> tuple[list[int], float]:
    """Steps at which a clocked gate opens when training and events take so long, and the time of all."""
    elapsed, held = 0.0, []
    for step in range(1, steps + 1):
        elapsed += seconds_per_step
        if step < gates.due:
            continue
        happens, gates.due = gates.decide(step, elapsed, seconds_per_step)
        assert gates.due > step
        if happens:
            elapsed += cost
            gates.took(cost, elapsed)
            held.append(step)
    return held, elapsed


def test_a_gate_in_seconds_opens_when_they_are_over():
    held, _ = simulate(gate("10 s"), 0.5, 0.0, 200)
    assert held == list(range(20, 201, 20))


def test_a_gate_in_seconds_finds_the_pace_when_it_was_estimated_wrongly():
    """The first step of a training says nothing of those that follow."""
    timed = gate("10 s")
    timed.due = timed.after(0, seconds_per_step=5.0)  # a first step of 5 s: asks again at step 2
    held, _ = simulate(timed, 0.5, 0.0, 100)
    assert held == [20, 40, 60, 80, 100]


def test_a_cheap_event_is_not_stretched_by_its_budget():
    held, _ = simulate(gate("10 steps", budget=0.05), 1.0, 0.1, 100)
    assert held == list(range(10, 101, 10))


@pytest.mark.parametrize("every", ["10 steps", "10 s"])
@pytest.mark.parametrize("budget", [0.05, 0.2])
def test_a_dear_event_stays_within_its_share_of_the_time(every, budget):
    cost = 8.0
    held, elapsed = simulate(gate(every, budget), 1.0, cost, 2000)
    assert len(held) * cost <= budget * elapsed + cost, "the first is held before its cost is known"
    assert len(held) * cost >= 0.8 * budget * elapsed, "and the share is used"
    assert every != "10 steps" or all(step % 10 == 0 for step in held), "a stretched gate keeps to its grid"


def test_a_gate_in_epochs_stays_at_ends_of_epochs_when_stretched():
    held, _ = simulate(gate("1 epoch", budget=0.1), 0.1, 3.0, 1000)
    assert held and all(step % EPOCH == 0 for step in held) and len(held) < 25


# The agenda


def agenda(gates, notes, recorded=None):
    return EventSchedule(
        gates, lambda thing: thing, lambda step, name, data: notes.append(Event(0, step, name, data)), recorded
    )


def test_between_events_there_is_one_comparison():
    plan = agenda({"log": gate("4 steps"), "checkpoint": gate("6 steps"), "off": gate(None)}, [])
    happened = {}
    for step in range(1, 25):
        if step >= plan.next:
            happened[step] = plan.ask(step, 0.0, 0.0)
    assert list(happened) == [4, 6, 8, 12, 16, 18, 20, 24]
    assert happened[12] == happened[24] == ["log", "checkpoint"] and happened[6] == ["checkpoint"]


def test_an_agenda_without_gates_is_never_asked():
    assert agenda({}, []).next == Gate.NEVER


def drive(plan: EventSchedule, pace, first: int, last: int) -> list[tuple[int, list[str]]]:
    held = []
    for step in range(first, last + 1):
        if step >= plan.next and (names := plan.ask(step, pace(step), 0.5)):
            held.append((step, names))
            for name in names:
                plan.gates[name].took(1.0, pace(step))
    return held


def test_decisions_that_hung_on_the_clock_are_repeated_from_the_journal_whatever_the_clock_says_now():
    def gates():
        return {"evaluate.a": gate("7 s"), "evaluate.b": gate("5 steps", budget=0.1), "log": gate("4 steps")}

    notes: list[Event] = []
    before = drive(agenda(gates(), notes), lambda step: step * 0.5, 1, 60)
    assert (
        notes
        and {note.name for note in notes} == {"gate"}
        and {note.data["name"] for note in notes}
        == {
            "evaluate.a",
            "evaluate.b",
        }
    )
    again: list[Event] = []
    repeated = drive(agenda(gates(), again, recorded_decisions(notes)), lambda step: step * 50.0, 1, 60)
    assert repeated == before and again == notes
    fresh = drive(agenda(gates(), []), lambda step: step * 50.0, 1, 60)
    assert fresh != before, "without the journal the other clock decides otherwise"


def test_an_agenda_continues_from_a_checkpoint():
    whole = agenda({"evaluate.a": gate("7 s"), "log": gate("4 steps")}, [])
    before = drive(whole, lambda step: step * 0.5, 1, 30)
    state = whole.state()
    after = drive(whole, lambda step: step * 0.5, 31, 80)
    resumed = agenda({"evaluate.a": gate("7 s"), "log": gate("4 steps"), "new": gate("50 steps")}, [])
    resumed.restore({**state, "gone": [1, 0.0, 0.0, 0.0]})
    assert before and drive(resumed, lambda step: step * 0.5, 31, 49) == [held for held in after if held[0] < 50]


def test_the_main_process_decides_for_all():
    """What rank 0 shares counts, not what this rank would have decided."""
    plan = EventSchedule({"a": gate("7 s")}, lambda mine: ({"a": (True, 99)}, 5.0), lambda *_: None)
    assert plan.ask(1, 0.0, 0.5) == ["a"] and plan.next == 99
    assert plan.gates["a"].last == 5.0, "the clock is that of rank 0, too"


def test_a_timed_gate_keeps_its_distance_in_time_whatever_the_event_is():
    """Half the wall-clock goes into other events, and the pace halves midway: a checkpoint still comes every 30 min."""
    plan, now, held = EventSchedule({"checkpoint": gate("30 min")}, lambda mine: mine, lambda *_: None), 0.0, []
    for step in range(1, 20_000):
        pace = 1.0 if step < 6_000 else 2.0
        now += 2 * pace
        if step >= plan.next and plan.ask(step, now, now / step):
            held.append(now / 60)
    apart = [b - a for a, b in zip([0.0, *held], held, strict=False)]
    assert len(held) > 20 and all(29.9 < minutes < 31 for minutes in apart)


def safeguard(lose_at_most: str | None = "10 min", cost: float = 0.0, pace: float = 0.3, until: float = 3000.0):
    """When a process that takes so many seconds a step saves, and the checkpoint costs so much."""
    gate = Safeguard(Span.parse(lose_at_most) if lose_at_most else None, EPOCH, BATCH)
    notes: list[Event] = []
    plan, began, saved = agenda({"safeguard": gate}, notes), 1000.0, []
    for step in range(1, int(until / pace)):
        now = began + step * pace
        if step >= plan.next and plan.ask(step, now, pace):
            saved.append(now - began - pace)  # since it was first asked
            plan.gates["safeguard"].took(cost, now)
    assert not notes and not plan.state(), "nothing is repeated, and a process begins anew"
    return saved


def test_what_a_kill_costs_is_half_of_what_was_done_and_ten_minutes_at_most():
    saved = safeguard()
    assert saved[:7] == pytest.approx([5, 10, 20, 40, 80, 160, 320], rel=0.08)
    assert saved[7:] == pytest.approx([640, 1240, 1840, 2440], rel=0.05)
    for moment in np.arange(0.0, 2999.0, 1.3):
        last = max([0.0, *(at for at in saved if at <= moment)])
        assert moment - last <= min(600, max(5, moment / 2)) + 0.7, moment


def test_copies_that_hold_the_training_up_are_made_less_often_but_within_the_promise():
    saved = safeguard("2 min", cost=3.0)
    assert saved[:3] == pytest.approx([5, 65, 130], abs=1) and np.diff(saved)[1:].max() <= 121
    assert safeguard("1 s", cost=3.0, until=30.0)[:5] == pytest.approx([1, 2, 3, 4, 5], rel=0.3)
    assert safeguard(None) == []


def test_a_checkpoint_that_something_else_wrote_is_one_less_to_write():
    gate = Safeguard(Span.parse("10 min"), EPOCH, BATCH)
    assert not gate.decide(1, 100.0, 1.0)[0] and gate.decide(9, 106.0, 1.0)[0]
    gate.took(0.0, 104.0)
    assert not gate.decide(9, 106.0, 1.0)[0]
