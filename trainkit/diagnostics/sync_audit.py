"""Find where the host waits for the GPU: `trainkit syncs`.

The main thread queues work and runs ahead. A call that needs a value of the device on the host (`.item()`,
`float(tensor)`, a boolean mask as an index) waits until the device has finished its queue, and the device is then idle
until it gets more work. CUDA reports where that happens (`torch.cuda.set_sync_debug_mode`). On a CPU nothing waits.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainkit.config.run_request import RunRequest, load
from trainkit.config.schema import Recipe
from trainkit.config.units import Span
from trainkit.diagnostics.short_recipe import steps_alone
from trainkit.distributed.runtime import Runtime
from trainkit.errors import UserError, number_of
from trainkit.speed.clock import STEP
from trainkit.speed.sync_points import Log, Place, cuda_waits
from trainkit.tracking.store import Store
from trainkit.training.dependencies import gather
from trainkit.training.trainer import Trainer

WARM_UP = 3
"""Steps before those that are observed."""
_ELSEWHERE = {"log": "log lines:", "checkpoint": "checkpoint:", "trial": "first batches of the evaluations:"}


@dataclass(frozen=True)
class Audit:
    """Waits that were found in a short training."""

    recipe: str
    device: str
    steps: int
    """Steps that were observed."""
    counts: Counter[Place]

    def inside(self) -> Counter[Place]:
        """Waits inside of steps."""
        return Counter({place: count for place, count in self.counts.items() if place.phase in STEP})


def audit(request: RunRequest, steps: int = 10) -> Audit:
    """Train `steps` steps of a recipe on a GPU after a warm-up, and count where the host waits.

    Nothing is written to the store. Log lines come with the last step; of each evaluation only the first batch runs,
    as before every training. Raises UserError as a training would, and without a GPU.
    """
    if steps < 1:
        raise UserError("--steps", f"{steps}", "1 or more")
    recipe = load(request)
    runtime = Runtime(recipe)
    try:
        if runtime.device.type != "cuda":
            raise UserError("syncs", f"device {runtime.device.type}", "a CUDA GPU", "on a CPU nothing waits")
        total = WARM_UP + steps
        recipe = shortened(recipe, total)
        runtime.configure(recipe)
        found = {name: each.file for name, each in gather(request, recipe, runtime, Store.locate(), None).items()}
        data = recipe.data.open(recipe.seed)
        log = Log(_roots(request.plugins))
        with cuda_waits(log.seen), Trainer(recipe, data, runtime, weights=found) as trainer:
            watched = watch(trainer, log, total)
        return Audit(recipe.name, str(runtime.device), watched, log.counts)
    finally:
        runtime.close()


def command(request: RunRequest, steps: int) -> list[str]:
    """`trainkit syncs`: list the lines of a recipe's training at which the host waits."""
    return lines(audit(request, steps))


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
            for place in [place for place in log.counts if place.phase in STEP]:
                del log.counts[place]
        trainer.after_step()
    return total - warm


def shortened(recipe: Recipe, total: int) -> Recipe:
    """Return the recipe without evaluations, checkpoints and log lines of its own."""
    recipe = steps_alone(recipe)
    compiles = recipe.train.compile != "auto"  # which does not compile for so few steps
    return replace(
        recipe,
        train=recipe.train if compiles else replace(recipe.train, compile="off"),
        log=replace(recipe.log, every=Span(total, "steps")),
    )


def lines(found: Audit) -> list[str]:
    """Return an audit as text: each line that waits, the call there, and how often."""
    inside = found.inside()
    waits = f"{inside.total() / found.steps:g} waits per step" if inside else "no waits"
    said = [
        f"{found.recipe} on {found.device}: {number_of(found.steps, 'steps')} observed",
        f"inside steps: {waits}",
        *(
            f"  {place.where}  {place.code}  {count / found.steps:g} per step ({place.phase})"
            for place, count in inside.most_common()
        ),
    ]
    for phase, title in _ELSEWHERE.items():
        there = Counter({place: count for place, count in found.counts.items() if place.phase == phase})
        if there:
            said.append(title)
            said += [f"  {place.where}  {place.code}  {count} in total" for place, count in there.most_common()]
    return said


def _roots(plugins: Sequence[str]) -> list[str]:
    """Return the folders of the plug-ins, wherever they are installed."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in plugins]
    return [f"{Path(file).resolve().parent}/" for file in files if file and Path(file).name == "__init__.py"]
