"""What a process keeps from one training to the next."""

from __future__ import annotations

import pytest
import torch
from runs import PLUGIN, TOY

from trainkit.config.run_request import RunRequest, load
from trainkit.distributed import launch_settings
from trainkit.distributed.runtime import Runtime
from trainkit.errors import UserError


def test_each_training_begins_with_the_loss_scale_of_a_new_process(store, monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))
    runtime = Runtime(load(RunRequest(TOY, (), ("toy",))))
    # As of a GPU in fp16.
    runtime.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    runtime._scale = scaler.state_dict()
    for _ in range(2):
        net = torch.nn.Linear(2, 2)
        runtime.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        assert scaler.get_scale() == 1024.0
        scaler.scale(torch.ones(1))
        scaler.update(new_scale=2.0)
        assert scaler.get_scale() == 2.0
    runtime.close()


def test_fewer_processes_than_the_launcher_was_asked_for_are_refused(store, monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.setattr(launch_settings, "asked_processes", lambda: 2)
    with pytest.raises(UserError, match="launch: 1 process came up; expected 2, as the launcher was told"):
        Runtime(load(RunRequest(TOY, (), ("toy",))))
