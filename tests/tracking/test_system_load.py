import contextlib
import multiprocessing
import os
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from trainkit.tracking import journal, system_load
from trainkit.tracking.system_load import Load, Reading
from trainkit.tracking.tracker import METRIC_NAME

MB = 1_000_000

# ---- Processes and processors


def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def _worker(done, seconds, begun, used, number):
    spin(seconds)
    used[number] = time.process_time()
    begun.release()
    done.wait()


def test_this_process_and_its_children_as_they_are():
    big = np.ones(120 * MB, np.uint8)
    load = Load()
    earliest = time.process_time()
    first, latest = load.read(), time.process_time()
    alone = first.rss_gb
    assert psutil.Process().memory_info().rss / 1e9 <= alone + 0.005
    context = multiprocessing.get_context("fork")
    done, begun, used = context.Event(), context.Semaphore(0), context.Array("d", 2)
    workers = [context.Process(target=_worker, args=(done, 0.15, begun, used, number)) for number in range(2)]
    for worker in workers:
        worker.start()
    for _ in workers:
        begun.acquire()
    spin(0.1)
    least = time.process_time() - latest
    reading, most = load.read(), time.process_time() - earliest
    elapsed = reading.at - first.at  # the readings' own: on a busy machine, seconds may pass beside them
    # A reading takes CPU seconds itself, and counts those until some moment within it.
    assert least - 0.04 <= reading.own_cores * elapsed <= most + 0.04
    assert sum(used) >= 0.3  # more where forking a large process takes long
    assert reading.worker_cores * elapsed == pytest.approx(sum(used), abs=0.08)
    assert 0 < reading.host_share <= 1
    # Forked pages would count three times: 0.24 GB more. `alone` holds a child that an earlier test may have left.
    assert alone <= reading.rss_gb + 0.005 and reading.rss_gb < alone + 0.1 and big[-1]
    done.set()
    for worker in workers:
        worker.join()
    after = load.read()
    # Their 0.3 s and more are not told twice.
    assert after.worker_cores * (after.at - reading.at) < sum(used) - 0.05


class Machine:
    """What psutil tells of a machine of four processors, two of which the process may run on."""

    def __init__(self, monkeypatch):
        self.busy, self.idle, self.affinity, self.cpu = [0.0] * 4, [0.0] * 4, [1, 3], 0.0
        self.read, self.children, self.at = 0, [], 100.0
        process = SimpleNamespace(
            pid=7, create_time=lambda: 1.0, oneshot=contextlib.nullcontext, children=lambda recursive: self.children,
            cpu_times=lambda: SimpleNamespace(user=self.cpu, system=0.0), io_counters=self.io,
            memory_info=lambda: SimpleNamespace(rss=3 * MB),
        )  # fmt: skip
        monkeypatch.setattr(psutil, "Process", lambda: process)
        monkeypatch.setattr(
            psutil, "cpu_times", lambda percpu: [psutil_times(*each) for each in zip(self.busy, self.idle, strict=True)]
        )
        monkeypatch.setattr(
            psutil, "virtual_memory", lambda: SimpleNamespace(total=4 * MB, available=3 * MB, percent=25.0)
        )
        monkeypatch.setattr(psutil, "cpu_percent", lambda: 50.0)
        monkeypatch.setattr(system_load, "affinity", lambda: self.affinity)
        monkeypatch.setattr(system_load.time, "perf_counter", lambda: self.at)

    def io(self):
        return SimpleNamespace(read_bytes=self.read)


def psutil_times(busy, idle):
    return Times(user=busy, system=0.0, idle=idle * 0.75, iowait=idle * 0.25, guest=busy / 2, guest_nice=0.0)


class Times(SimpleNamespace):
    def __iter__(self):
        return iter(vars(self).values())


def test_a_reading_is_what_was_counted_since_the_one_before(monkeypatch):
    machine = Machine(monkeypatch)
    machine.cpu, machine.read = 10.0, 50 * MB
    load = Load()
    machine.at, machine.cpu, machine.read = 104.0, 13.0, 58 * MB
    machine.busy, machine.idle = [9.0, 2.0, 9.0, 1.0], [0.0, 2.0, 0.0, 3.0]
    reading = load.read()
    assert reading.at == 104.0 and reading.own_cores == pytest.approx(3 / 4) and reading.worker_cores == 0
    assert reading.read_mb_s == pytest.approx(2.0) and reading.rss_gb == pytest.approx(0.003)
    assert reading.host_share == pytest.approx(3 / 8)  # of the processors that it may run on; guests count once
    given = load.metrics(reading)
    assert given["system/system_memory_usage_megabytes"] == pytest.approx(1.0)
    assert given["system/system_memory_usage_percentage"] == 25
    idle = load.read()  # no time has gone by
    assert (idle.own_cores, idle.worker_cores, idle.read_mb_s, idle.host_share) == (0, 0, 0, None)
    machine.affinity = [5, 9]  # a container that numbers its processors anew
    machine.busy, machine.idle = [19.0, 12.0, 19.0, 11.0], [10.0, 12.0, 10.0, 13.0]
    assert load.read().host_share == pytest.approx(0.5)


def test_a_child_that_ends_while_it_is_looked_at_is_left_out(monkeypatch):
    machine = Machine(monkeypatch)

    def gone():
        raise psutil.NoSuchProcess(20)

    ending = SimpleNamespace(pid=20, create_time=gone, oneshot=contextlib.nullcontext, cpu_times=gone)
    machine.children = [ending]
    load = Load()
    machine.at += 1
    assert load.read().worker_cores == 0


def test_what_may_not_be_read_is_none(monkeypatch):
    machine = Machine(monkeypatch)

    def denied():
        raise psutil.AccessDenied(7)

    machine.io = denied
    psutil.Process().io_counters = denied
    load = Load()
    assert load.read().read_mb_s is None


def test_names_and_values_are_those_of_mlflow():
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor

    load, monitor = Load(), CPUMonitor()
    time.sleep(0.05)
    monitor.collect_metrics()
    theirs = monitor.aggregate_metrics()
    ours = load.metrics(load.read())
    assert {f"system/{name}" for name in theirs} <= ours.keys()
    for name, close in (("memory_usage_megabytes", 0.1), ("memory_usage_percentage", 0.1)):
        assert ours[f"system/system_{name}"] == pytest.approx(theirs[f"system_{name}"], rel=close)
    assert all(METRIC_NAME.fullmatch(name) for name in ours)


def test_a_reading_takes_little_time(monkeypatch):
    # Those that tests have started hold gigabytes: counting the pages of a child takes 6 ms for each.
    monkeypatch.setattr(psutil.Process, "children", lambda process, recursive: [])
    load = Load()
    costs = []
    for _ in range(20):
        began = time.thread_time()
        load.metrics(load.read())
        costs.append(time.thread_time() - began)
    # 0.5 ms where it was measured, every 10 s: five hundred-thousandths of a core.
    assert float(np.median(costs)) < 0.01


# ---- Control groups


@pytest.mark.parametrize(
    ("leaf", "above", "expected"),
    [
        ("150000 100000", None, 1.5),
        ("max 100000", "50000 100000", 0.5),
        ("300000 100000", "250000 100000", 2.5),
        ("max 100000", None, None),
        ("lots of", None, None),
        ("100000 0", None, None),
    ],
)
@pytest.mark.parametrize("namespace", ["host", "container"])
def test_the_tightest_quota_above_a_process_counts(tmp_path, leaf, above, expected, namespace):
    # In a container without a namespace the process sees the host's path, of which the mount shows the end.
    path = "/system.slice/docker-1/job/run" if namespace == "container" else "/job/run"
    own, mount = tmp_path / "proc", tmp_path / "cgroup"
    own.write_text(f"nonsense\n0::{path}\n")
    for folder, most in (("job/run", leaf), ("job", above)):
        (mount / folder).mkdir(parents=True, exist_ok=True)
        if most:
            (mount / folder / "cpu.max").write_text(f"{most}\n")
    assert system_load.quota(str(mount), str(own)) == expected


def test_without_control_groups_there_is_no_quota(tmp_path):
    assert system_load.quota(str(tmp_path), str(tmp_path / "none")) is None
    assert 0 < system_load.cores() <= (os.cpu_count() or 1)


# ---- GPUs


def test_the_gpus_of_this_run_are_read_once_cuda_is_in_use(monkeypatch):
    load = Load()
    assert not any("gpu" in name for name in load.metrics(load.read()))
    assert not torch.cuda.is_initialized()
    asked = []

    def used(n):
        asked.append(n)
        if n == 1:
            raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")
        return 2 * 10**9

    for name, answer in {
        "is_initialized": lambda: True, "device_count": lambda: 8, "device_memory_used": used,
        "utilization": lambda n: 75, "power_draw": lambda n: 350_000,
        "get_device_properties": lambda n: SimpleNamespace(total_memory=10**10),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, answer)
    given = {name: value for name, value in load.metrics(load.read()).items() if "gpu_" in name}
    assert given == {
        "system/gpu_0_utilization_percentage": 75.0,
        "system/gpu_0_memory_usage_megabytes": 2000.0,
        "system/gpu_0_memory_usage_percentage": 20.0,
        "system/gpu_0_power_usage_watts": 350.0,
    }
    assert asked == [0], "a single process computes on the first alone"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    given = load.metrics(load.read())
    assert asked == [0, 0, 1, 2]
    assert "system/gpu_2_power_usage_watts" in given and "system/gpu_1_power_usage_watts" not in given


# ---- The thread


def test_the_sampler_keeps_the_last_readings_and_writes_all(tmp_path, monkeypatch):
    monkeypatch.setattr(system_load, "KEPT", 4)
    written = journal.Journal(tmp_path / "journal.jsonl")
    sampler = system_load.Sampler(written, 0.01)
    assert sampler.readings() == ()
    sampler.start()
    deadline = time.monotonic() + 20
    while written.highest("system/") < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    sampler.stop()
    kept = sampler.readings()
    assert len(kept) == 4 and all(isinstance(one, Reading) for one in kept)
    assert [one.at for one in kept] == sorted(one.at for one in kept)
    assert sampler.readings(kept[1].at) == kept[2:] and sampler.readings(kept[-1].at) == ()
    written.close()
    found = journal.read(tmp_path / "journal.jsonl")
    assert len(found.metrics["system/own_cores"]) >= 8


def test_a_machine_that_cannot_be_read_ends_the_sampler_and_not_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Load, "read", lambda self: 1 / 0)
    written = journal.Journal(tmp_path / "journal.jsonl")
    sampler = system_load.Sampler(written, 0.01)
    sampler.start()
    sampler.join(20)
    assert not sampler.is_alive() and "cannot be read any more: division by zero" in caplog.text
    written.close()
