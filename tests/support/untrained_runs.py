"""Runs that were never trained, for tests of what is done with a run: a folder, a recipe, and weights by chance."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainkit.checkpoint import storage
from trainkit.config import loader
from trainkit.inference.trained_model import META
from trainkit.interfaces import Dataset
from trainkit.tracking.run_folder import RunFolder
from trainkit.tracking.store import Store

MACHINE = {"gpu": None, "cpu": "Some CPU", "processes": 1, "threads": 1, "precision": "no"}


@dataclass(frozen=True)
class Made:
    folder: RunFolder
    recipe: Any
    opened: Dataset
    net: nn.Module
    """In evaluation mode."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def checkpoint(self) -> Path:
        (path,) = self.folder.checkpoints.iterdir()
        return path


def made(recipe: Path, *words: str, step: int = 7, seed: int = 0) -> Made:
    """A run of `recipe` in the store that the environment names, with a checkpoint at `step`."""
    loaded = loader.load(recipe, words)
    opened = loaded.data.open(loaded.seed)
    folder = Store.locate().new_run(loaded.name, loaded.seed, loader.digest(loaded))
    folder.recipe.write_text(loader.dump(loaded))
    (folder.path / META).write_text(json.dumps(asdict(opened.meta)))
    torch.manual_seed(seed)
    net = loaded.task.build(opened.meta, {}, loaded.seed).model.eval()
    for module in net.modules():  # statistics that a wrong mode would not have
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    state = {"best": [], "machine": MACHINE, "journal": 0}
    storage.write(folder.checkpoints, step, {"model": net.state_dict()}, state, loader.dump(loaded))
    return Made(folder, loaded, opened, net)
