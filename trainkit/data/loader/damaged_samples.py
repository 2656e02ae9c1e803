"""Replacement of damaged samples in training: `loader.damaged: replace`.

A row whose bytes are not what was written, or that cannot be decoded, is read as another row of its class, or as any
other where rows have none. Which one is a function of the run's seed and the row alone, and no other row is touched:
the length of an epoch and the order of all other samples stay, and so do the bits, on any number of workers and
processes and after a resume.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from trainkit import rng
from trainkit.config.schema import Recipe
from trainkit.data.split import SplitView
from trainkit.errors import UserError, number_of
from trainkit.interfaces import Batch, ComparableSplit, Dataset, Split

TRIES = 20
"""Rows that are tried in place of a damaged one before its damage ends the run."""

_log = logging.getLogger("trainkit")


class Replacing(SplitView):
    """A training split that reads another sample where one is damaged; `index` then says which."""

    def __init__(self, split: Split, seed: int):
        super().__init__(split)
        self.seed = seed

    def fetch(self, indices: np.ndarray, epoch: int, view: int | None = None) -> Batch:
        """The samples at `indices`, those of other rows for what is damaged. Raises UserError where TRIES are too."""
        try:
            return self.split.fetch(indices, epoch, view)
        except UserError:
            whole = [self.instead(int(row), epoch)[0] for row in indices]
            return self.split.fetch(np.asarray(whole, np.int64), epoch, view)

    def instead(self, row: int, epoch: int = 0) -> tuple[int, str]:
        """The row that is read for `row`, itself if it is whole, and what is wrong with it."""
        wrong: list[UserError] = []
        for other in self._candidates(row):
            try:
                self.split.fetch(np.asarray([other], np.int64), epoch)
            except UserError as error:
                wrong.append(error)
                continue
            return other, str(wrong[0]) if wrong else ""
        raise wrong[0]

    def _candidates(self, row: int) -> Iterator[int]:
        yield row
        held = self.split.held() if isinstance(self.split, ComparableSplit) else None
        alike = np.arange(self.split.size)
        # A row may be several samples' (a patch of a volume): then nothing says which class it is of.
        if held is not None and held.label is not None and len(held.label) == self.split.size:
            alike = np.flatnonzero(held.label == held.label[row])
        alike = alike[alike != row]
        for k in range(TRIES if len(alike) else 0):
            yield int(alike[rng.number(self.seed, "damaged", row, k) % len(alike)])


class Damage:
    """The damaged samples that this process knows of in a run."""

    def __init__(self, split: Split, seed: int, most: float):
        self.split, self._most = Replacing(split, seed), most
        self._allowed = int(most * split.size)
        self.found: dict[int, dict[str, Any]] = {}
        """By row: what is wrong with it, and the row that was read instead."""

    @staticmethod
    def policy(recipe: Recipe, data: Dataset, split: Split) -> Damage | None:
        """None where damage ends the run. Raises UserError where a batch is made of samples that belong together."""
        if recipe.loader.damaged == "fail":
            return None
        if data.block > 1:
            found = f"replace, but {data.block} samples of a batch belong together"
            raise UserError("loader.damaged", found, "fail", "import the set again from intact files")
        return Damage(split, recipe.seed, recipe.loader.damaged_most)

    def watched(self, asked: Iterable[tuple[int, np.ndarray]], batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches, read by `split`; what they have in place of what was `asked` for is noted.

        Raises UserError beyond the share of the set that may be damaged.
        """
        for (_, rows), batch in zip(asked, batches, strict=False):
            index = batch["index"].numpy()
            for row, other in zip(rows[index != rows].tolist(), index[index != rows].tolist(), strict=True):
                if row not in self.found:
                    self._note(row, other)
            yield batch

    def _note(self, row: int, other: int) -> None:
        said = self.split.instead(row)[1]
        self.found[row] = {"row": row, "said": said, "instead": other}
        _log.warning("%s; row %d replaces it in the training", said, other)
        self._refuse_many()

    def add(self, found: Iterable[Mapping[str, Any]]) -> None:
        """Add what other processes have found, or this run before it was interrupted: the share is that of the run.

        Raises UserError beyond it.
        """
        for one in found:
            self.found.setdefault(one["row"], dict(one))
        self._refuse_many()

    def _refuse_many(self) -> None:
        if len(self.found) > self._allowed:
            *_, last = self.found.values()
            many = number_of(len(self.found), "samples are", "sample is")
            found = f"{many} damaged, the last one: {last['said']}"
            expected = f"at most {self._allowed} of {self.split.size}: {100 * self._most:g}%, loader.damaged_most"
            raise UserError(self.split.name, found, expected, "import the set again from intact files")
