"""Score a network on a split."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import nn

from trainkit.data.loader import stream as loading
from trainkit.distributed.runtime import Machine
from trainkit.distributed.stop_signal import Stop, Stopped
from trainkit.interfaces import Rows, Scores, Split, Task
from trainkit.training import out_of_memory


@torch.no_grad()
def evaluate(
    task: Task, net: nn.Module, split: Split, batch_size: int, machine: Machine, stop: Stop | None = None
) -> Scores:
    """Score a network on a split. Every rank takes part and every sample counts exactly once.

    Rows are gathered with the sample's index; padding is dropped, and an evaluation whose rows are not the split's
    samples, each once, is a RuntimeError and no score. Raises `Stopped`, on all ranks, when one is told to stop.
    """

    def forward(rows: np.ndarray, real: np.ndarray) -> Rows:
        batch = split.on_device(machine.place(split.fetch(rows, epoch=0)))
        index = torch.where(torch.as_tensor(real, device=machine.device), batch["index"], -1)
        with machine.accelerator.autocast():
            predicted = task.predict(net, batch)
        return {"index": index, **{key: value.float() for key, value in predicted.items()}}

    def score() -> Scores:
        with stop.at_once():
            return task.score(rows, split)

    stop, was_training = stop or Stop(), net.training
    net.eval()
    try:
        kept, said, ends, asked = [], "", False, machine.any(stop.told)
        for rows, real in loading.every_sample(split, batch_size, machine.world, machine.rank):
            if not said:
                one, said = out_of_memory.caught(forward, rows, real)
                kept.append(one)
            # Of several processes read a batch late, so that none waits for the answer, and all leave at the same one.
            if ends := asked() or (machine.world == 1 and stop.told):
                break
            asked = machine.any(stop.told or bool(said))
        ends = ends or asked()
        own = out_of_memory.agreed(*((None, said) if said else out_of_memory.caught(loading.stack, kept)), machine)
        if ends:
            raise Stopped
    finally:
        net.train(was_training)
        machine.reshard(net)
    gathered = {key: machine.gather(value) for key, value in own.items()}
    index = gathered.pop("index")
    order = index.argsort()[int((index < 0).sum()) :]
    if not torch.equal(index[order].cpu(), torch.arange(split.size)):
        raise RuntimeError(f"{split.name}: {len(index[order].unique())} samples were scored, the set has {split.size}")
    rows = {key: value[order].cpu() for key, value in gathered.items()}
    scores = machine.lead(score)
    scores.samples = len(order)
    return scores


@torch.no_grad()
def _trial(task: Task, net: nn.Module, split: Split, batch_size: int, machine: Machine) -> float:
    """Seconds that an evaluation will take, from its first batch, read twice.

    A mistake in an evaluation shows here, before training, and not after the first epoch.
    """
    was_training = net.training
    net.eval()
    batches = list(loading.every_sample(split, batch_size, machine.world, machine.rank))
    for _ in range(2):
        began = time.perf_counter()
        batch = split.on_device(machine.place(split.fetch(batches[0][0], epoch=0)))
        with machine.accelerator.autocast():
            task.predict(net, batch)
        machine.synchronize()
    net.train(was_training)
    machine.reshard(net)
    return (time.perf_counter() - began) * len(batches)
