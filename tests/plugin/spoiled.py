"""A plug-in that takes one mechanism of trainkit away, by the word in SPOILED: what the oracles must then notice."""

from __future__ import annotations

import os

import numpy as np
import torch

TABLES: dict[str, dict[str, str]] = {}


def nothing() -> None:
    """Leave everything as it is."""


def reseeding() -> None:
    """Draws go on with the state of the generators, which no checkpoint holds."""
    from trainkit import rng

    torch.manual_seed(0)
    rng.reseed = lambda *given: None


def sample_seeding() -> None:
    """What is drawn for a sample hangs on how many were drawn before."""
    from trainkit import rng

    drawn = np.random.default_rng(0)
    plain = rng.uniform
    rng.uniform = lambda *given: drawn.random(np.shape(plain(*given)))


def optimizer() -> None:
    """A resumed optimizer has no memory."""
    from trainkit.checkpoint import state_dict

    state_dict.load_optimizer = lambda *given, **named: None


def averages() -> None:
    """A resumed run begins its average anew."""
    from trainkit.training.state import TrainState

    load = TrainState.load

    def without(self, *given, **named):
        average, self.ema = self.ema, None
        load(self, *given, **named)
        self.ema = average

    TrainState.load = without


def fixed_times() -> None:
    """A value that is computed again gets the time of now."""
    from trainkit.tracking.journal import Journal, Replay

    cut_back = Journal.cut_back

    def forgetful(self, position):
        replay = cut_back(self, position)
        self.replay = Replay(decided=replay.decided)
        return replay

    Journal.cut_back = forgetful


def commit_order() -> None:
    """A checkpoint does not wait for the lines of the journal that belong to it."""
    from trainkit.tracking.tracker import Tracker

    Tracker.commit = Tracker.position


def verification() -> None:
    """A checkpoint is written in its place, and used unseen."""
    from trainkit.checkpoint import storage

    plain, every = storage._aside, storage._checkpoints
    storage._aside = lambda folder, kind, step: (
        folder / f"step-{step:09d}" if kind == "tmp" else plain(folder, kind, step)
    )
    storage._make_room = lambda target: None
    storage.newest_valid = lambda folder: (next(iter(reversed(every(folder))), None), [])


globals()[os.environ.get("SPOILED", "nothing")]()
