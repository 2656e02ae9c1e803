"""Gates, and the agenda that repeats decisions which hung on the clock."""

from __future__ import annotations

import numpy as np
import pytest

from trainkit.config.gates import Gate, Safeguard
from trainkit.config.units import Span
from trainkit.tracking.journal import Event
from trainkit.training.events import EventSchedule, recorded_decisions

EPOCH, BATCH = 40, 16


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
