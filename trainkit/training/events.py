"""Decide at which step evaluations, log lines and checkpoints are due; each kind of event has a gate.

Between two events the loop makes one comparison, `step >= events.next`. If a gate depends on the clock, rank 0 decides,
broadcasts the decision and writes it to the journal. A resumed run repeats the recorded decisions, except those about
checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trainkit.config.gates import Gate
from trainkit.files import Json
from trainkit.tracking.journal import Event

Decision = tuple[bool, int]
"""Whether the event happens, and the step at which to ask again."""
Decided = tuple[dict[str, Decision], float]
"""Decisions by name, and the seconds at which they were made."""


class EventSchedule:
    """The gates of a run by name (`log`, `checkpoint`, `evaluate.lfw`), in the order in which events run."""

    def __init__(
        self,
        gates: Mapping[str, Gate],
        share: Callable[[Decided], Decided],
        note: Callable[[int, str, dict[str, Any]], None],
        recorded: Mapping[tuple[str, int], Decision] | None = None,
    ):
        self.gates = dict(gates)
        self._share, self._note = share, note
        self._recorded = dict(recorded or {})
        self._before: dict[str, tuple[int, float]] = {}
        self._look()

    def _look(self) -> None:
        self.next = min([gate.due for gate in self.gates.values()], default=Gate.NEVER)

    def ask(self, step: int, elapsed: float, seconds_per_step: float) -> list[str]:
        """Names of the events that happen at `step`. Called on every rank at the same steps."""
        due = [name for name, gate in self.gates.items() if step >= gate.due]
        self._before = {name: (self.gates[name].due, self.gates[name].last) for name in due}
        decided: dict[str, Decision] = {}
        if clocked := [name for name in due if self.gates[name].clocked]:
            for name in clocked:
                past = self._recorded.get((name, step)) if self.gates[name].REPEATED else None
                decided[name] = past or self.gates[name].decide(step, elapsed, seconds_per_step)
            decided, elapsed = self._share((decided, elapsed))
        happening = []
        for name in due:
            gate = self.gates[name]
            if name in decided:
                happens, gate.due = decided[name]
                if gate.REPEATED:
                    self._note(step, "gate", {"name": name, "happens": happens, "next": gate.due})
            else:
                happens, gate.due = True, gate.after(step)
            if happens:
                happening.append(name)
                gate.last = elapsed
        self._look()
        return happening

    def give_back(self, names: Iterable[str]) -> None:
        """Make events due again that `ask` named and that were not held after all."""
        for name in names:
            self.gates[name].due, self.gates[name].last = self._before[name]
        self._look()

    def state(self) -> dict[str, Json]:
        """Return what a checkpoint keeps of the gates."""
        return {name: [g.due, g.spent, g.cost, g.last] for name, g in self.gates.items() if g.REPEATED}

    def restore(self, state: Mapping[str, Json]) -> None:
        """Continue with the gates of a checkpoint; gates it does not know start anew."""
        for name, (due, spent, cost, last) in state.items():
            if name in self.gates:
                gate = self.gates[name]
                gate.due, gate.spent, gate.cost, gate.last = due, spent, cost, last
        self._look()


def recorded_decisions(events: Iterable[Event]) -> dict[tuple[str, int], Decision]:
    """Return the decisions of gates with a clock that a journal recorded."""
    return {(e.data["name"], e.step): (e.data["happens"], e.data["next"]) for e in events if e.name == "gate"}
