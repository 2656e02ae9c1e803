"""Runs that are slowed down on purpose: simulated ones, timed by the real clock, with one thing wrong in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from trainkit.speed.clock import STEP, Clock
from trainkit.speed.evidence import Compiled, Evidence, Waits
from trainkit.speed.limits import ThroughputLimits
from trainkit.tracking.system_load import Reading


class Hands:
    """A clock that moves when told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class World:
    """A run to be, sound in all respects: times of a step in seconds, and what else goes on."""

    rng: np.random.Generator
    steps: int
    step_s: float
    cuda: bool
    cores: int
    processes: int
    load: list[Reading]

    def __post_init__(self):
        rng, n = self.rng, self.steps
        parts = {
            "data": rng.uniform(0.005, 0.06),
            "transfer": rng.uniform(0.0, 0.02),
            "forward": rng.uniform(0.25, 0.35),
        }
        parts |= {"backward": rng.uniform(0.4, 0.5), "optimizer": rng.uniform(0.02, 0.08)}
        self.extra = {phase: np.zeros(n) for phase in (*STEP, "eval", "checkpoint", "log")}
        self.times = {
            phase: self.step_s * share * rng.lognormal(0, rng.uniform(0.02, 0.15), n) for phase, share in parts.items()
        }
        self.every = {"eval": int(rng.integers(40, 200)), "checkpoint": int(rng.integers(60, 200)), "log": 20}
        self.between = {
            phase: rng.uniform(0.0, {"eval": 0.05, "checkpoint": 0.02, "log": 0.01}[phase]) * self.step_s * every
            for phase, every in self.every.items()
        }
        rate = 32 / self.step_s
        data = self.step_s * parts["data"]
        self.ceilings = ThroughputLimits(loader=32 / max(data, 1e-9), model=rate * rng.uniform(1.0, 1.1))
        self.compiled: Compiled | None = Compiled(recompiles=int(rng.integers(0, 3)), seconds=0.01 * self.step_s)
        self.waits: Waits | None = Waits(per_step=float(rng.choice([0.0, 0.2]))) if self.cuda else None
        self.idle = rng.uniform(0.0, 0.04) * self.step_s * np.ones(n)
        self.ranks = [
            {phase: float(times.mean()) * rng.uniform(0.97, 1.03) for phase, times in self.times.items()}
            for _ in range(self.processes)
        ]

    @staticmethod
    def random(rng: np.random.Generator, *, cuda: bool | None = None, processes: int | None = None) -> World:
        """A sound run of a few hundred steps of 5 to 500 ms."""
        cores, steps = int(rng.choice([2, 8, 16, 64])), int(rng.integers(250, 600))
        rss, read = rng.uniform(0.5, 8.0), rng.uniform(0.0, 8.0)
        load = []
        for k in range(24):  # the page cache fills and memory settles at first, and all of it flickers
            settled = 1 - 0.1 * np.exp(-k / 2)
            load.append(
                Reading(
                    at=10.0 * k,
                    own_cores=0.8 + rng.uniform(0, 0.2),
                    worker_cores=rng.uniform(0, 0.3),
                    host_share=rng.uniform(0.2, 0.7),
                    rss_gb=rss * settled * rng.uniform(0.99, 1.01),
                    read_mb_s=read * rng.uniform(0.2, 1.0),
                )
            )
        return World(
            rng,
            steps,
            float(np.exp(rng.uniform(np.log(0.005), np.log(0.5)))),
            bool(rng.integers(2)) if cuda is None else cuda,
            cores,
            processes or int(rng.choice([1, 1, 4])),
            load,
        )

    def readings(self, **values: Callable[[int], float]) -> None:
        """Replace values of the load, each a function of the number of the reading."""
        self.load = [replace(r, **{key: value(k) for key, value in values.items()}) for k, r in enumerate(self.load)]

    def evidence(self) -> Evidence:
        """The run, timed by the clock."""
        hands = Hands()
        clock = Clock(now=hands)
        held: list[float] = []
        hands.now += 5 * self.step_s
        for k in range(self.steps):
            for phase in STEP:
                clock.to(phase)
                hands.now += self.times[phase][k] + self.extra[phase][k]
            clock.step()
            for phase, every in self.every.items():
                took = (self.between[phase] if k % every == every - 1 else 0.0) + self.extra[phase][k]
                if took:
                    clock.to(phase)
                    hands.now += took
                    if phase == "eval":
                        held.append(took)
        clock.to("setup")
        step_ms = 1e3 * float(sum(t.mean() + self.extra[p].mean() for p, t in self.times.items()))
        device = {"device/step_ms": step_ms, "device/idle_ms": 1e3 * float(self.idle.mean())}
        return Evidence(
            steps=clock.recent(),
            batch_size=32,
            seconds=clock.seconds,
            trained=clock.steps,
            device="cuda" if self.cuda else "cpu",
            on_device=device if self.cuda else {},
            evaluation_s={"val": held},
            limits=self.ceilings,
            load=self.load,
            compiled=self.compiled,
            waits=self.waits,
            ranks=self.ranks if self.processes > 1 else (),
            settings={
                "workers": 2,
                "cores": self.cores,
                "processors": self.cores,
                "threads": self.cores,
                "processes": 1,
                "precision": "no",
            },
        )


def inject(cause: str, rng: np.random.Generator) -> Evidence:
    """A run with one thing wrong, which costs 0.3 to 3 steps a step, from the start or from its middle on."""
    needs_cuda = {"sync": True}.get(cause)
    world = World.random(rng, cuda=needs_cuda, processes=4 if cause == "slow_rank" else None)
    n, late = world.steps, rng.random() < 0.5
    begins = int(n * rng.uniform(0.3, 0.6)) if late else 0
    on = np.arange(n) >= begins
    cost = float(np.exp(rng.uniform(np.log(0.3), np.log(3.0)))) * (n / (n - begins))
    each = cost * world.step_s * on
    if rng.random() < 0.3 and cause in ("data", "recompile", "log", "evaluation", "checkpoint"):
        # In bursts: every tenth step pays for ten.
        each = each * 10 * (np.arange(n) % 10 == 9)
    mean = float(each.mean()) / world.step_s  # steps a step
    match cause:
        case "data":
            world.extra["data"] += each
            world.readings(worker_cores=lambda k: 1.5)
        case "evaluation" | "checkpoint" | "log":
            phase = "eval" if cause == "evaluation" else cause
            if rng.random() < 0.5:  # each of them is slow; else it is done at every step
                every = world.every[phase]
                slow = np.where(np.arange(n) % every == every - 1, mean * world.step_s * every * on, 0)
                each = slow if slow.sum() >= 0.5 * each.sum() else each  # none may be left in the slow part
            world.extra[phase] += each
        case "recompile":
            world.extra["forward"] += each
            reasons = ("tensor 'image' size mismatch at index 2",)
            world.compiled = Compiled(recompiles=int((each > 0).sum()), seconds=float(each.sum()), reasons=reasons)
        case "sync":
            world.extra[str(rng.choice(["forward", "backward", "optimizer"]))] += each
            world.idle = world.idle + each
            world.waits = Waits(per_step=float(rng.integers(1, 9)), places=("trainkit/losses/margin.py:45",))
        case "slow_rank":
            slowest = int(rng.integers(4))
            gathers = rng.random() < 0.5  # in the forward pass, where the others then wait
            for number, rank in enumerate(world.ranks):
                rank["forward" if gathers or number == slowest else "backward"] += mean * world.step_s
                rank["met"] = mean * world.step_s * (gathers and number != slowest)
            world.extra["forward" if gathers or slowest == 0 else "backward"] += each
        case "other_processes":
            for phase in ("forward", "backward", "optimizer"):
                world.extra[phase] += each * 0.33
            share = min(0.95, mean / (1 + mean) + 0.15)
            own = world.cores * (1 - share)
            world.readings(
                host_share=lambda k: rng.uniform(0.96, 1.0),
                own_cores=lambda k: own * 0.9,
                worker_cores=lambda k: own * 0.1,
            )
        case _:
            raise ValueError(cause)
    return world.evidence()


CAUSES = (
    "data", "evaluation", "checkpoint", "log", "recompile", "sync", "slow_rank", "other_processes",
)  # fmt: skip
