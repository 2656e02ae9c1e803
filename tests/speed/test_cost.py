"""What a run costs: hours of cores and GPUs, counted over interruptions."""

from __future__ import annotations

import time
from types import SimpleNamespace

from runs import PLUGIN, run, stop_after

from trainkit.speed import cost
from trainkit.training.state import TrainState


def test_costs_add_up_where_a_run_goes_on(store, monkeypatch):
    monkeypatch.syspath_prepend(PLUGIN)
    words = ("evaluations.val.every=3 steps", "checkpoints.every=2 steps", "log.ceilings=off")
    began = time.perf_counter()
    cut = run(*words, stopping=stop_after(4))
    assert not any(key.startswith("cost/") for key in cut.history.metrics)
    kept = cut.last.state
    ran = run(*words, resume="")
    spent = {name: points for name, points in ran.history.metrics.items() if name.startswith("cost/")}
    (used,), (point,), name = spent.pop(cost.USED), spent["cost/core_hours"], "cost/core_hours"
    assert 0 < used.value <= point.value * 1.05 and used.value > kept["spent"][cost.USED], "counted over the resume"
    assert ran.folder == cut.folder and name == "cost/core_hours" and point.step == 12
    cores = cost.allotted(SimpleNamespace(all_gather=lambda thing: [thing], device=SimpleNamespace(type="cpu")))[name]
    least = kept["elapsed"] + ran.series("final/time/total_s")[0]
    assert 0.999 * least <= point.value * 3600 / cores <= time.perf_counter() - began
    assert kept["spent"][name] * 3600 / cores >= 0.999 * kept["elapsed"]


def test_hours_are_counted_over_resumes_also_on_other_machines():
    clock, rates = SimpleNamespace(elapsed=lambda: 1200.0, before=600.0), {"cost/core_hours": 8.0}
    new = object.__new__(TrainState)
    new.elapsed, new.spent = 0.0, {}
    assert (new.total_elapsed(clock), new.total_spent(clock, rates)) == (1200.0, {"cost/core_hours": 4.0})
    resumed = object.__new__(TrainState)
    resumed.elapsed, resumed.spent = 7200.0, {"cost/core_hours": 3.0, "cost/gpu_hours": 2.5}
    assert resumed.total_elapsed(clock) == 8400.0
    assert resumed.total_spent(clock, rates) == {"cost/core_hours": 7.0, "cost/gpu_hours": 2.5}


def test_cores_that_processes_share_count_once_and_a_quota_is_that_of_a_host():
    shared = [("a", [0, 1, 2, 3], None), ("a", [2, 3, 4, 5], None)]
    assert cost.cores(shared) == 6.0
    assert cost.cores([*shared, ("b", [0, 1], None)]) == 8.0
    assert cost.cores([("a", [0, 1, 2, 3], 1.5), ("b", range(64), 100.0)]) == 65.5
    assert cost.cores([("a", [0, 1], 4.0), ("a", [2, 3], 2.5)]) == 2.5


def test_gpus_cost_where_the_run_trains_on_them(monkeypatch):
    monkeypatch.setattr(cost, "quota", lambda: None)
    runtime = SimpleNamespace(all_gather=lambda thing: [thing, thing], device=SimpleNamespace(type="cuda"), world=2)
    found = cost.allotted(runtime)
    assert found.keys() == {"cost/core_hours", "cost/gpu_hours"} and found["cost/gpu_hours"] == 2.0
    runtime.device.type = "cpu"
    assert cost.allotted(runtime) == {"cost/core_hours": found["cost/core_hours"]}
