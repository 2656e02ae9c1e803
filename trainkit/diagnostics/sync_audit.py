"""Find where the host waits for the device.

On a GPU the main thread queues work and runs ahead. A call that needs a value of the device on the host (`.item()`,
`float(tensor)`, a boolean mask as an index) waits until the device has finished its queue, and the device is then idle
until it gets more work. CUDA reports where that happens (`torch.cuda.set_sync_debug_mode`). On a CPU nothing waits, and
`Following` finds the calls that would.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainkit.config.run_request import RunRequest, load
from trainkit.config.schema import Recipe
from trainkit.config.units import Span
from trainkit.diagnostics.sync_emulation import Following
from trainkit.distributed.runtime import Runtime
from trainkit.errors import UserError, number_of
from trainkit.speed.clock import STEP
from trainkit.speed.sync_points import Log, Place, Tally, cuda_waits
from trainkit.tracking.store import Store
from trainkit.training.dependencies import gather
from trainkit.training.trainer import Trainer

WARM_UP = 3
"""Steps before those that are observed."""


@dataclass(frozen=True)
class Audit:
    """Waits that were found in a short training."""

    recipe: str
    device: str
    steps: int
    """Steps that were observed."""
    tallies: Mapping[Place, Tally]
    notes: tuple[str, ...] = ()

    def inside(self) -> dict[Place, Tally]:
        """Waits inside of steps."""
        return {place: tally for place, tally in self.tallies.items() if place.phase in STEP}

    def per_step(self) -> float:
        """How often a step waits, on average."""
        return sum(tally.count for tally in self.inside().values()) / self.steps


def audit(request: RunRequest, steps: int = 10) -> Audit:
    """Train `steps` steps of a recipe after a warm-up, and record where the host waits.

    Nothing is written to the store. Log lines come with the last step; of each evaluation only the first batch runs,
    as before every training. Raises UserError as a training would.
    """
    if steps < 1:
        raise UserError("--steps", f"{steps}", "1 or more")
    recipe = load(request)
    runtime = Runtime(recipe)
    try:
        try:
            return _audit(request, recipe, runtime, steps, as_gpu=True)
        except (RuntimeError, AssertionError, ValueError) as error:
            if runtime.device.type == "cuda" or not any(word in str(error) for word in ("CUDA", "cuda", "NVIDIA")):
                raise
            again = _audit(request, recipe, runtime, steps, as_gpu=False)
            note = f"the code ran its CPU path; with a simulated GPU it fails with: {str(error).splitlines()[0]}"
            return replace(again, notes=(*again.notes, note))
    finally:
        runtime.close()


def command(request: RunRequest, steps: int) -> Iterable[str]:
    """`trainkit syncs`: list the lines of a recipe's training at which the host waits."""
    return lines(audit(request, steps))


def lines(found: Audit) -> list[str]:
    """Return an audit as text."""
    said = [f"{found.recipe} on {found.device}: {number_of(found.steps, 'steps')} observed", *found.notes]
    inside = found.inside()
    if inside:
        said.append(f"inside steps: {found.per_step():g} waits per step")
        said += _table(inside, found.steps, "per step")
    else:
        said.append("inside steps: no waits")
    rest = {place: tally for place, tally in found.tallies.items() if place.phase not in STEP}
    for phase, title in _ELSEWHERE.items():
        there = {place: tally for place, tally in rest.items() if place.phase == phase}
        if there:
            said.append(title)
            said += _table(there, 1, "in total")
    return said


_ELSEWHERE = {
    "log": "log lines:",
    "checkpoint": "checkpoint:",
    "eval": "evaluations:",
    "trial": "first batches of the evaluations, each run twice:",
}


def _table(tallies: Mapping[Place, Tally], over: int, unit: str) -> list[str]:
    rows = sorted(tallies.items(), key=lambda item: (-item[1].seconds, -item[1].count))
    said = []
    for place, tally in rows:
        time_ = f", {1e3 * tally.seconds / over:.3g} ms" if tally.timed else ""
        what = f"{place.what} in " if place.what else ""
        said.append(f"  {place.where}  {what}{place.code}  {tally.count / over:g}{time_} {unit} ({place.phase})")
    return said


def _audit(request: RunRequest, recipe: Recipe, runtime: Runtime, steps: int, as_gpu: bool) -> Audit:
    cuda = runtime.device.type == "cuda"
    notes = []
    if not cuda:
        notes.append("on a CPU nothing waits: these calls would wait on a GPU; the time is of the call on this CPU")
        if recipe.train.compile not in ("auto", "off"):
            notes.append("train.compile is off here: compiled code cannot be traced")
    total = WARM_UP + steps
    recipe = _shortened(recipe, total, cuda)
    runtime.configure(recipe)
    found = {
        name: dependency.file for name, dependency in gather(request, recipe, runtime, Store.locate(), None).items()
    }
    data = recipe.data.open(recipe.seed)
    log = Log(_roots(request.plugins))
    runtime.at_once = False
    if cuda:
        watching = cuda_waits(log.seen, names=recipe.train.compile == "off")
    else:
        watching = Following(log.seen, log.asks if as_gpu else lambda file: False)
    with watching, Trainer(recipe, data, runtime, weights=found) as trainer:
        watched = watch(trainer, log, total)
    if trainer.state.step < total:
        notes.append(f"the training has only {number_of(trainer.state.step, 'steps')}")
    return Audit(recipe.name, str(runtime.device), watched, log.tallies, tuple(notes))


def watch(trainer: Trainer, log: Log, total: int) -> int:
    """Train so many steps and log their waits by phase; returns the number observed, without the warm-up."""
    log.phase = lambda: "trial"
    trainer.evaluator.measure_costs()
    log.phase = lambda: trainer.clock.phase
    trainer.evaluator.score_frozen()
    trainer.open()
    total = min(total, trainer.plan.steps)
    warm = min(WARM_UP, total - 1)  # of a training of two steps the second is observed
    for step in range(1, total + 1):
        trainer.step()
        if step == warm:
            for place in [place for place in log.tallies if place.phase in STEP]:
                del log.tallies[place]
        trainer.after_step()
    return total - warm


def _shortened(recipe: Recipe, total: int, cuda: bool) -> Recipe:
    """The recipe without evaluations, checkpoints and log lines of its own."""
    loader = recipe.loader if cuda else replace(recipe.loader, workers=0)
    compiles = cuda and recipe.train.compile != "auto"  # which does not compile for so few steps
    return replace(
        recipe,
        train=recipe.train if compiles else replace(recipe.train, compile="off"),
        evaluations={
            name: replace(e, every=None, at_start=False, at_end=False) for name, e in recipe.evaluations.items()
        },
        checkpoints=replace(recipe.checkpoints, every=None, at_end=False, lose_at_most=None),
        log=replace(recipe.log, every=Span(total, "steps"), figures=None, profile=None, ceilings="off"),
        loader=loader,
    )


def _roots(plugins: Sequence[str]) -> list[str]:
    """Folders of the plug-ins, wherever they are installed."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in plugins]
    return [f"{Path(file).resolve().parent}/" for file in files if file and Path(file).name == "__init__.py"]
