"""Class centres whole on each process, and divided over them: memory, traffic and time of a step on 1, 2, 4 processes.

    python -m benchmarks.rehearsals.sharded_heads                    # 85,742 classes, as docs/project/scale.md has it
    python -m benchmarks.rehearsals.sharded_heads --classes 857      # a hundredth

Steps of ArcFace and SGD with momentum over 256 embeddings of 512 numbers, on all processes together, without a network:
`whole` by DistributedDataParallel as a training wraps it, `sharded` as `task.head.sharded` trains it. Both take the
softmax in one pass. Processes of this machine talk over gloo in a network of their own, in which every byte counted by
the system is theirs; where that is not allowed, traffic is left out. Of a process are printed: the forecast of the
formula and what was measured of `memory`, MB above the start of the process at most, and of `traffic`, MB received in a
step; and milliseconds of processor time of a step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from torch import distributed as dist
from torch import nn

from trainkit.losses.class_shards import ClassShard, divided, divided_over, traffic
from trainkit.losses.margin import class_head, margin_loss
from trainkit.losses.margin_specs import ArcFace, Head

SAMPLES, SIZE, STEPS, WARM = 256, 512, 3, 1
FORECAST = [(classes, world) for classes in (85_742, 2_000_000, 10_000_000) for world in (1, 8, 64)]


def forecast(
    classes: int, world: int, samples: int, size: int, sharded: bool, gloo: bool = False
) -> tuple[float, float]:
    """MB of centres, gradient and momentum of a process, and MB that it receives in a step of `samples` of its own.

    `gloo` sums gradients of all rows on all processes where NCCL scatters the sums: twice the traffic of these.
    """
    rows = ClassShard(0, world, classes).count if sharded else classes
    memory = 3 * rows * size * 4 / 1e6
    if not sharded:  # a sum over processes takes two rounds, in each of which all but a part of one's own arrives
        return memory, 2 * (world - 1) / world * classes * size * 4 / 1e6
    part = traffic(samples, size)
    gathered = part["all_gather"] + part["all_gather_backward"] + part["reduce_scatter"] * (2 if gloo else 1)
    return memory, (world - 1) * (gathered + 2 * part["all_reduce"]) / 1e6


def measure(rank: int, world: int, classes: int, sharded: bool) -> dict[str, float]:
    """Train some steps on one of the processes."""
    torch.set_num_threads(1)
    steps(rank, world, 512, sharded, 1)  # reads the code that a step needs
    before = psutil.Process().memory_info().rss
    times, received = steps(rank, world, classes, sharded, WARM + STEPS)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = torch.tensor([(peak - before) / 1e6, min(received[WARM:]) / 1e6, min(times[WARM:]) * 1e3])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    memory, sent, milliseconds = found.tolist()
    return {"memory": memory, "traffic": sent, "ms": milliseconds}


def steps(rank: int, world: int, classes: int, sharded: bool, many: int) -> tuple[list[float], list[float]]:
    """Make steps of a new head: the processor seconds of each, and the bytes that a process received in it."""
    share = SAMPLES // world
    draw = torch.Generator().manual_seed(rank)
    x, label = torch.randn(share, SIZE, generator=draw), torch.randint(classes, (share,), generator=draw)
    with divided_over(rank, world):
        head: nn.Module = class_head(ArcFace(), classes, SIZE, Head(sharded=sharded))
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9, fused=True)
    if world > 1 and not divided(head):
        head = nn.parallel.DistributedDataParallel(head, broadcast_buffers=False, gradient_as_bucket_view=True)
    times, received = [], []
    for _ in range(many):
        dist.barrier()
        began, came = time.process_time(), psutil.net_io_counters().bytes_recv
        own = x.clone().requires_grad_()
        total, _ = margin_loss(head(own, label), label, ArcFace())
        (total / share).backward()
        optimizer.step()
        for p in head.parameters():
            p.grad = None
        dist.barrier()
        times.append(time.process_time() - began)
        received.append((psutil.net_io_counters().bytes_recv - came) / world)
    return times, received


def child(rank: int, world: int, classes: int, sharded: bool, folder: str) -> None:
    """Be one of the processes; the first prints what was measured."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found = measure(rank, world, classes, sharded)
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def alone() -> list[str]:
    """Return the command that gives its children a network of their own; empty where the system does not."""
    words = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    try:
        fine = subprocess.run([*words, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        fine = False
    return words if fine else []


def launched(world: int, classes: int, sharded: bool) -> dict[str, float]:
    """Measure on so many processes of this machine."""
    own = f"[{sys.executable!r}, '-m', 'benchmarks.rehearsals.sharded_heads', '--child']"
    with tempfile.TemporaryDirectory() as folder:
        words = f"[str(rank), '{world}', '{classes}', '{int(sharded)}', {folder!r}]"
        start = f"import subprocess as s; p = [s.Popen({own} + {words}) for rank in range({world})]"
        code = f"{start}; raise SystemExit(max(one.wait() for one in p))"
        done = subprocess.run(
            [*alone(), sys.executable, "-c", code],
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise SystemExit(done.stderr)
    found = json.loads(done.stdout)
    return found if alone() else found | {"traffic": math.nan}


def main() -> None:
    """Print the table that is measured, and with all classes the forecast for more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--classes", type=int, default=85_742)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--child", nargs=5)
    given = parser.parse_args()
    if given.child:
        rank, world, classes, sharded, folder = given.child
        child(int(rank), int(world), int(classes), bool(int(sharded)), folder)
        return
    print("| processes | head | memory, MB: formula | measured | traffic, MB: formula | measured | CPU ms a step |")
    print("|---|---|---|---|---|---|---|")
    for world in given.processes:
        for sharded in (False, True):
            memory, sent = forecast(given.classes, world, SAMPLES // world, SIZE, sharded, gloo=True)
            found = launched(world, given.classes, sharded)
            row = [f"{memory:,.1f}", f"{found['memory']:,.1f}", f"{sent:,.2f}", f"{found['traffic']:,.2f}"]
            print("|", " | ".join([str(world), "sharded" if sharded else "whole", *row, f"{found['ms']:,.0f}"]), "|")
    print("\n| classes | processes | memory, GB: whole | sharded | traffic, MB: whole | sharded |")
    print("|---|---|---|---|---|---|")
    for classes, world in FORECAST:
        (a, b), (c, d) = (forecast(classes, world, 64, SIZE, sharded) for sharded in (False, True))
        print(f"| {classes:,} | {world} | {a / 1e3:,.2f} | {c / 1e3:,.3f} | {b:,.0f} | {d:,.2f} |")


if __name__ == "__main__":
    main()
