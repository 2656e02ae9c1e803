"""Score a task by the evaluation protocol of each split."""

from __future__ import annotations

from collections.abc import Collection

from trainkit.interfaces import Rows, Scores, Split
from trainkit.metrics import score as metrics


class ScoredByProtocol:
    """A task whose metrics are those of a split's protocol, from the rows that `predict` returns."""

    @property
    def columns(self) -> Collection[str]:
        """Names of those columns of `predict` on which it depends which metrics there are."""
        return ()

    def measures(self, split: Split) -> Collection[str] | None:
        """Names of the metrics of a split."""
        return metrics.names(split.protocol, self.columns, split.name)

    def score(self, rows: Rows, split: Split) -> Scores:
        """Metrics of the split's protocol."""
        return metrics.score(rows, split.protocol, split.name, split)
