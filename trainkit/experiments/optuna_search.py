"""Use Optuna in a sweep: it proposes settings and prunes runs. Needs the extra `sweep`.

The study is in memory only. A sweep that is started again reports the scores of its runs again, in order, and the
sampler is seeded for each proposal by its number. So it makes the same proposals, and nothing but the runs is stored.
Proposals come from a tree-structured Parzen estimator (Bergstra et al., NeurIPS 2011); runs are pruned by the median
rule (Golovin et al., KDD 2017) or by asynchronous successive halving (Li et al., MLSys 2020, arXiv 1810.05934).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainkit import rng
from trainkit.config.metric_table import Mode
from trainkit.config.run_request import Sweep
from trainkit.errors import UserError

if TYPE_CHECKING:
    from trainkit.experiments.search_space import Axis, Setting

PRUNERS = ("median", "halving")
"""Words for rules that end runs: worse than the median of the others, of which five have finished; or not among the
best quarter of those that came as far, asked at the 1st, 4th, 16th ... evaluation."""


def require() -> None:
    """Raise UserError if Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise UserError("sweep", "--tpe and --pruner need Optuna", remedy='pip install "trainkit[sweep]"')


class Study:
    """Optuna's study of one sweep, one trial at a time."""

    def __init__(self, axes: Sequence[Axis], how: Sweep, mode: Mode):
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        pruners = {
            None: optuna.pruners.NopPruner(),
            "median": optuna.pruners.MedianPruner(n_startup_trials=5),
            "halving": optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=4),
        }
        self._optuna, self._axes, self._how = optuna, axes, how
        self._study = optuna.create_study(
            study_name="sweep",
            direction=optuna.study.StudyDirection[f"{mode}imize".upper()],
            sampler=optuna.samplers.RandomSampler(seed=0),
            pruner=pruners[how.pruner],
        )
        self._reported = 0
        self.prunes = how.pruner is not None
        """Runs may be ended early."""

    def begin(self, number: int) -> Setting:
        """Begin a trial; return its setting if settings are proposed, else nothing."""
        self._reported = 0
        if self._how.tpe is None:
            self._trial = self._study.ask()
            return {}
        seed = rng.number(self._how.draws, "tpe", number) % 2**32
        self._study.sampler = self._optuna.samplers.TPESampler(n_startup_trials=10, seed=seed)
        self._trial = self._study.ask({axis.key: self._distribution(axis) for axis in self._axes})
        found = self._trial.params
        return {axis.key: axis.text(found[axis.key]) if axis.span else found[axis.key] for axis in self._axes}

    def report(self, value: float) -> bool:
        """Report the next evaluation of the trial; return whether its run should end.

        Evaluations are counted, and the n-th is compared with the n-th of others, because settings may differ in steps.
        """
        self._reported += 1
        self._trial.report(value, self._reported)
        return self._trial.should_prune()

    def end(self, state: str, value: float) -> None:
        """End the trial: `finished` with a score, `pruned` or `failed`."""
        states = self._optuna.trial.TrialState
        if state == "finished" and math.isfinite(value):
            self._study.tell(self._trial, value)
        else:
            self._study.tell(self._trial, state=states.PRUNED if state == "pruned" else states.FAIL)

    def _distribution(self, axis: Axis) -> Any:
        kinds = self._optuna.distributions
        if axis.span is None:
            return kinds.CategoricalDistribution(axis.values)
        low, high = axis.span
        if axis.whole:
            return kinds.IntDistribution(int(low), int(high), log=axis.log)
        return kinds.FloatDistribution(low, high, log=axis.log)
