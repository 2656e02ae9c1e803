"""A runtime of one process on the CPU, for what asks for no more of it."""

import contextlib
from types import SimpleNamespace

import torch

RUNTIME = SimpleNamespace(
    world=1,
    rank=0,
    main=True,
    precision="no",
    device=torch.device("cpu"),
    accelerator=SimpleNamespace(autocast=contextlib.nullcontext),
    to_device=lambda batch: batch,
    gather=lambda x: x,
    on_main=lambda act, stop=None: act(),
    all_gather=lambda x: [x],
    any_async=lambda flag: lambda: flag,
    begin_batch=lambda: None,
    compiled=lambda net, calls: net,
    uncompiled=contextlib.nullcontext,
)
