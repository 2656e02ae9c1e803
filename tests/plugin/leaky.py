"""The toy's data, which speaks of secrets wherever data may speak, and fails with them on its lips."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import fake_secrets
import toy

TABLES = {"data": {"leaky": "leaky:LeakyData"}}


@dataclass(kw_only=True)
class LeakyData(toy.ToyData):
    fails_at: int | None = None
    """Row whose reading raises an exception with all secrets in its text."""

    def open(self, seed):
        said = "\n".join(fake_secrets.SAID.values())
        logging.getLogger("leaky").warning("reading with %s", said)
        opened = super().open(seed)
        for split in (opened.train, *opened.evaluations.values()):
            split.__class__, split.fails_at = LeakySplit, self.fails_at
        return replace(opened, notes=[f"note: {text}" for text in fake_secrets.SAID.values()])


class LeakySplit(toy.ToySplit):
    def fetch(self, indices, epoch, view=None):
        if self.fails_at in indices:
            try:
                raise OSError("cannot open " + "; ".join(fake_secrets.SAID.values()))
            except OSError:
                logging.getLogger("leaky").exception("it is of no use")
                raise
        return super().fetch(indices, epoch, view)
