"""Find where the processor waits for the device.

On a GPU the main thread hands over work and runs ahead; whatever needs a value of the device on the host (`.item()`,
`float(tensor)`, a boolean mask as an index) makes it wait until the device has done all that it was given, and then the
device waits for the next piece of work. CUDA itself says where that happens (`torch.cuda.set_sync_debug_mode`); on a
CPU, where nothing waits, `Following` finds the calls that would.
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
from trainkit.errors import UserError
from trainkit.speed.clock import STEP
from trainkit.speed.sync_points import Log, Place, Tally, cuda_waits
from trainkit.tracking.store import Store
from trainkit.training.dependencies import gather
from trainkit.training.trainer import Trainer

WARM_UP = 3
"""Updates before those that are watched."""


@dataclass(frozen=True)
class Audit:
    """Waits that were found in a short training."""

    recipe: str
    device: str
    steps: int
    """Updates that were watched."""
    tallies: Mapping[Place, Tally]
    notes: tuple[str, ...] = ()

    def inside(self) -> dict[Place, Tally]:
        """Waits inside of steps."""
        return {place: tally for place, tally in self.tallies.items() if place.phase in STEP}

    def per_step(self) -> float:
        """How often a step waits, on average."""
        return sum(tally.count for tally in self.inside().values()) / self.steps


def audit(request: RunRequest, steps: int = 10) -> Audit:
    """Train so many updates of a recipe, after a few to warm up, and note where the processor waits.

    Nothing is written to the store. Log lines come with the last update; evaluations are seen by the first batch that
    every training scores of each before it begins. Raises UserError as a training would.
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
            note = f"seen is the way of a CPU: as on a GPU it ends with: {str(error).splitlines()[0]}"
            return replace(again, notes=(*again.notes, note))
    finally:
        runtime.close()


def command(request: RunRequest, steps: int) -> Iterable[str]:
    """`trainkit syncs`: the lines of a recipe's training that make the processor wait, for people."""
    return lines(audit(request, steps))


def lines(found: Audit) -> list[str]:
    """Return the lines that tell people what an audit found."""
    said = [f"{found.recipe} on {found.device}: {found.steps} updates watched", *found.notes]
    inside = found.inside()
    if inside:
        said.append(f"inside steps: {found.per_step():g} a step")
        said += _table(inside, found.steps, "a step")
    else:
        said.append("inside steps: nothing waits")
    rest = {place: tally for place, tally in found.tallies.items() if place.phase not in STEP}
    for phase, title in _ELSEWHERE.items():
        there = {place: tally for place, tally in rest.items() if place.phase == phase}
        if there:
            said.append(title)
            said += _table(there, 1, "in all")
    return said


_ELSEWHERE = {
    "log": "log lines:",
    "checkpoint": "checkpoint:",
    "eval": "evaluations:",
    "trial": "first batches of the evaluations, each read twice:",
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
        notes.append(
            "on a CPU nothing waits: named are calls that would wait for a GPU, with the time of the call itself"
        )
        if recipe.train.compile not in ("auto", "off"):
            notes.append("train.compile is off here: what is compiled cannot be looked into")
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
        notes.append(f"the training has {trainer.state.step} updates")
    return Audit(recipe.name, str(runtime.device), watched, log.tallies, tuple(notes))


def watch(trainer: Trainer, log: Log, total: int) -> int:
    """Train so many steps and log their waits by phase; returns how many were watched, those of the warm-up not."""
    log.phase = lambda: "trial"
    trainer.evaluator.measure_costs()
    log.phase = lambda: trainer.clock.phase
    trainer.evaluator.score_frozen()
    trainer.open()
    total = min(total, trainer.plan.steps)
    warm = min(WARM_UP, total - 1)  # of a training of two updates the second is watched
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
    compiles = cuda and recipe.train.compile != "auto"  # which does not compile for so few updates
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
