import multiprocessing
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.tracking import journal
from trainkit.tracking.system import load as load_module
from trainkit.tracking.system import nvml, processes
from trainkit.tracking.system import sampler as system_metrics
from trainkit.tracking.system.cgroup import Groups, Refused, share
from trainkit.tracking.system.load import Load, cores
from trainkit.tracking.system.nvml import Gpus
from trainkit.tracking.system.reading import Gpu, Reading
from trainkit.tracking.tracker import METRIC_NAME

TICK, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
MB = 1_000_000


@dataclass
class Fake:
    """Counters of a machine, written as Linux shows them."""

    home: Path
    at: float = 100.0
    ticks_by: float = 0.0
    """How far the time moves with each look at it."""
    children: dict = field(default_factory=dict)

    def __post_init__(self):
        self.proc, self.groups = self.home / "proc", self.home / "cgroup"
        for folder in (self.proc, self.groups):
            folder.mkdir(parents=True)
        self.affinity = range(64)
        self.stat({0: (0, 1000), 1: (0, 1000)})
        self.process(1, parent=0)
        self.process(7)

    def now(self):
        self.at += self.ticks_by
        return self.at

    def load(self):
        return Load(self.groups, self.now, pid=7, disk=self.home, gpus=no_gpus())

    def shown(self, patch):
        """Have psutil read this machine."""
        patch.setattr(psutil, "PROCFS_PATH", str(self.proc))
        patch.setattr(psutil.Process, "cpu_affinity", lambda process: list(self.affinity))
        patch.setattr(processes, "_CPUS", self.home / "cpu")
        self.write("meminfo", "MemTotal: 4000 kB\nMemFree: 9 kB\nMemAvailable: 3000 kB\nCached: 1 kB\nBuffers: 1 kB\n")
        self.write("net/dev", "Inter-|\n face |\n lo: 5 0 0 0 0 0 0 0 7 0 0 0 0 0 0 0\n")

    def write(self, name, text):
        path = self.proc / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def stat(self, each):
        """Busy and idle ticks by processor."""
        rows = {"": tuple(map(sum, zip(*each.values(), strict=True))), **each}
        # user nice system idle iowait irq softirq steal guest guest_nice: guests are in user, too.
        lines = [f"cpu{n} {b - b // 4} 0 0 {i - i // 3} {i // 3} 0 0 {b // 4} 999999 0" for n, (b, i) in rows.items()]
        self.write("stat", "\n".join([*lines, "intr 5 0 0", "ctxt 1", "btime 1000", ""]))

    def process(
        self, pid, parent=1, own=0.0, reaped=0.0, faults=0, read=0, rss=0, private=None, start=5, name="pt (data) 1 R"
    ):
        fields = ["0"] * 50
        fields[0], fields[1] = "S", str(parent)
        fields[9], fields[10] = str(faults - faults // 3), str(faults // 3)  # of its own, of children that ended
        fields[11], fields[12] = str(round(own * TICK)), "0"
        fields[13], fields[14] = "0", str(round(reaped * TICK))
        fields[19], fields[21] = str(start), str(rss // PAGE)
        self.write(f"{pid}/stat", f"{pid} ({name}) {' '.join(fields)}\n")
        self.write(f"{pid}/statm", f"{rss // PAGE} {rss // PAGE} 0 0 0 0 0\n")
        self.write(f"{pid}/io", f"rchar: 1\nwchar: 1\nsyscr: 1\nsyscw: 1\nread_bytes: {read}\nwrite_bytes: 5\n")
        kb = (rss if private is None else private) // 1024
        self.write(
            f"{pid}/smaps_rollup", f"00-ff ---p 0 [rollup]\nRss: 9 kB\nPrivate_Clean: 0 kB\nPrivate_Dirty: {kb} kB\n"
        )


def no_gpus():
    return Gpus(uuids=lambda: None)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    made = Fake(tmp_path / "machine")
    made.shown(monkeypatch)
    return made


# ---- Processes and processors


def test_a_reading_is_what_was_counted_since_the_one_before(fake):
    fake.process(7, own=10, faults=4, read=50 * MB, rss=800 * PAGE)
    fake.process(20, parent=7, own=3)
    fake.process(21, parent=7, own=1)
    load = fake.load()
    fake.at += 4.0
    fake.process(7, own=13, faults=10, read=58 * MB, rss=1000 * PAGE)
    fake.process(20, parent=7, own=7, read=8 * MB, faults=2)
    fake.process(21, parent=7, own=3)
    fake.stat({0: (300, 1100), 1: (100, 1300)})
    reading = load.read()
    assert reading.at == 104.0
    assert reading.own_cores == pytest.approx(3 / 4) and reading.worker_cores == pytest.approx(6 / 4)
    assert reading.read_mb_s == pytest.approx(16 / 4) and reading.major_faults_s == pytest.approx(8 / 4)
    assert reading.host_share == pytest.approx(400 / 800)
    assert reading.rss_gb == pytest.approx(1000 * PAGE / 1e9) and reading.gpus == ()
    fake.at += 2.0
    idle = load.read()
    assert (idle.own_cores, idle.worker_cores, idle.read_mb_s, idle.major_faults_s) == (0, 0, 0, 0)
    assert idle.host_share is None  # no time has gone by in /proc/stat


def test_two_readings_in_one_moment_hold_no_rates(fake):
    reading = fake.load().read()
    rates = (
        reading.own_cores,
        reading.worker_cores,
        reading.read_mb_s,
        reading.major_faults_s,
        reading.throttled_share,
    )
    assert rates == (None,) * 5


@dataclass
class Lived:
    """A process of a simulated tree: what Linux would show of it."""

    parent: int
    own: int = 0
    reaped: int = 0
    faults: int = 0
    read: int = 0
    start: int = 0


ACTS = ("work", "work", "fork", "die", "look")


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_work_of_children_counts_once_whether_they_live_or_die(tmp_path_factory, seed):
    with pytest.MonkeyPatch.context() as patch:
        fake = Fake(tmp_path_factory.mktemp("tree") / "machine")
        fake.shown(patch)
        _count_a_tree(fake, np.random.default_rng(seed))


def _count_a_tree(fake, rng):
    tree = {7: Lived(1)}

    def show():
        for path in fake.proc.iterdir():
            if path.name.isdigit():
                shutil.rmtree(path)
        for pid, p in tree.items():
            fake.process(pid, p.parent, p.own / TICK, p.reaped / TICK, p.faults, p.read, start=p.start)

    show()
    load = fake.load()
    worked = {"own": 0, "children": 0, "faults": 0, "read": 0}
    for number, act in enumerate([*rng.choice(ACTS, 30), "look"]):
        pid, much = int(rng.choice(sorted(tree))), int(rng.integers(1, 50))
        if act == "work":
            tree[pid].own += much
            tree[pid].faults += much
            tree[pid].read += 1000 * much
            worked["own" if pid == 7 else "children"] += much
            worked["faults"] += much
            worked["read"] += 1000 * much
        elif act == "fork" and len(tree) < 6:
            free = next(n for n in range(8, 99) if n not in tree)  # ids are given out again
            tree[free] = Lived(pid, start=number)
        elif act == "die" and pid != 7 and all(p.parent != pid for p in tree.values()):
            ended = tree.pop(pid)
            parent = tree[ended.parent]
            parent.reaped += ended.own + ended.reaped
            parent.faults += ended.faults
            parent.read += ended.read
        elif act == "look":
            show()
            fake.at += 2.0
            reading = load.read()
            assert reading.own_cores == pytest.approx(worked["own"] / TICK / 2)
            assert reading.worker_cores == pytest.approx(worked["children"] / TICK / 2)
            assert reading.major_faults_s == pytest.approx(worked["faults"] / 2)
            assert reading.read_mb_s == pytest.approx(worked["read"] / 2 / 1e6)
            worked = dict.fromkeys(worked, 0)


def test_a_child_that_ends_while_it_is_looked_at_is_left_out(fake):
    load = fake.load()
    fake.process(21, parent=7, own=1)
    (fake.proc / "20").mkdir()
    fake.at += 1.0
    assert load.read().worker_cores == pytest.approx(1.0)
    (fake.proc / "21" / "smaps_rollup").unlink()
    (fake.proc / "21" / "io").unlink()
    fake.at += 1.0
    assert load.read().worker_cores == 0


def test_pages_that_workers_share_with_their_parent_count_once(fake):
    fake.process(7, rss=4000 * PAGE)
    fake.process(20, parent=7, rss=3900 * PAGE, private=100 * PAGE)
    load = fake.load()
    assert load.read().rss_gb == pytest.approx(4100 * PAGE / 1e9)
    fake.ticks_by = 0.01  # pages take so long to count that they are not counted at the next reading
    load.read()
    fake.process(20, parent=7, rss=4200 * PAGE, private=77 * PAGE)
    assert load.read().rss_gb == pytest.approx(4400 * PAGE / 1e9)
    fake.at += 11 * processes.PAGES_PAID
    assert load.read().rss_gb == pytest.approx(4077 * PAGE / 1e9)


def deny(monkeypatch):
    def denied(self):
        raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(psutil.Process, "io_counters", denied)
    monkeypatch.setattr(psutil.Process, "memory_full_info", denied)


def test_what_may_not_be_read_is_absent_with_its_reason(fake, monkeypatch):
    deny(monkeypatch)
    fake.process(20, parent=7, rss=100 * PAGE)
    fake.stat({0: (0, 0)})
    load = fake.load()
    fake.at += 1.0
    reading = load.read()
    assert reading.own_cores == 0 and reading.major_faults_s == 0
    assert (reading.read_mb_s, reading.rss_gb, reading.host_share, reading.cpu_mhz) == (None,) * 4
    assert {"read_mb_s", "rss_gb", "host_share", "cpu_mhz"} <= load.absent.keys()
    assert "no permission" in load.absent["read_mb_s"] and "no permission" in load.absent["rss_gb"]
    given = load.metrics(reading)
    assert "system/own_cores" in given and not {"system/read_mb_s", "system/cpu_utilization_percentage"} & given.keys()


def test_a_kernel_that_does_not_count_bytes_says_so(fake):
    load = fake.load()
    fake.write("7/io", "rchar: 5\n")
    fake.at += 1.0
    assert load.read().read_mb_s is None and "not counted" in load.absent["read_mb_s"]


def test_processors_are_those_this_process_may_run_on(fake):
    fake.affinity = [1, 3, 4]
    fake.stat(dict.fromkeys(range(8), (0, 1000)))
    load = fake.load()
    fake.at += 1.0
    fake.stat({n: ((100, 1000) if n in (1, 3) else (0, 1100)) for n in range(8)})
    reading = load.read()
    assert reading.host_share == pytest.approx(2 / 3) and load.cores() == 3
    assert load.metrics(reading)["system/cpu_utilization_percentage"] == pytest.approx(25)


def test_a_container_that_numbers_its_processors_anew(fake):
    fake.affinity = [5, 9]
    fake.stat({0: (0, 10), 1: (0, 10)})
    load = fake.load()
    fake.stat({0: (10, 10), 1: (0, 20)})
    assert load.read().host_share == pytest.approx(0.5) and load.cores() == 2


def test_the_clock_is_that_of_the_busiest_processors(fake, monkeypatch):
    monkeypatch.setattr(load_module, "BUSIEST", 2)
    (fake.home / "cpu/cpu0/cpufreq").mkdir(parents=True)
    clocks = [SimpleNamespace(current=1000.0 * (n + 1)) for n in range(4)]
    monkeypatch.setattr(psutil, "cpu_freq", lambda percpu: clocks)
    fake.stat(dict.fromkeys(range(4), (0, 0)))
    fake.stat(dict.fromkeys(range(4), (1, 1)))
    load = fake.load()
    fake.stat({0: (5, 5), 1: (80, 2), 2: (5, 5), 3: (90, 1)})
    assert load.read().cpu_mhz == pytest.approx((2000 + 4000) / 2) and "cpu_mhz" not in load.absent


@pytest.mark.parametrize("measured", [True, False])
def test_a_clock_that_is_only_the_data_sheets_is_absent(fake, measured, monkeypatch):
    monkeypatch.setattr(psutil, "cpu_freq", lambda percpu: [SimpleNamespace(current=2500.5 + n) for n in range(2)])
    flags = "fpu aperfmperf avx" if measured else "fpu avx"
    fake.write("cpuinfo", f"processor : 0\nflags : {flags}\ncpu MHz\t: 2500.5\n\n")
    load = fake.load()
    fake.stat({0: (5, 1500), 1: (80, 1500)})
    assert load.read().cpu_mhz == (pytest.approx(2501.0) if measured else None)
    assert ("cpu_mhz" in load.absent) is not measured


# ---- Control groups


def group(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("cpu_", "cpu.").replace("cpuacct_", "cpuacct.")).write_text(text)


@pytest.mark.parametrize(
    ("version", "leaf", "above", "expected"),
    [
        (2, "150000 100000", None, 1.5),
        (2, "max 100000", "50000 100000", 0.5),
        (2, "300000 100000", "250000 100000", 2.5),
        (2, "max 100000", None, None),
        (1, "150000", None, 1.5),
        (1, "-1", "50000", 0.5),
        (1, "-1", None, None),
    ],
)
@pytest.mark.parametrize("namespace", ["host", "container"])
def test_the_tightest_quota_above_a_process_counts(fake, version, leaf, above, expected, namespace):
    # In a container without a namespace the process sees the host's path, of which the mount shows the end.
    path = "/system.slice/docker-1/job/run" if namespace == "container" else "/job/run"
    if version == 2:
        fake.write("7/cgroup", f"0::{path}\n")
        group(fake.groups / "job/run", cpu_max=f"{leaf}\n")
        if above:
            group(fake.groups / "job", cpu_max=f"{above}\n")
    else:
        fake.write("7/cgroup", f"9:memory:/else\n4:cpu,cpuacct:{path}\n0::/\n")
        group(fake.groups / "cpu,cpuacct/job/run", cpu_cfs_quota_us=f"{leaf}\n", cpu_cfs_period_us="100000\n")
        if above:
            group(fake.groups / "cpu,cpuacct/job", cpu_cfs_quota_us=f"{above}\n", cpu_cfs_period_us="100000\n")
    fake.stat(dict.fromkeys(range(2), (0, 1)))
    assert Groups(fake.groups, str(fake.proc / "7/cgroup")).quota() == expected
    assert fake.load().cores() == min(2.0, expected or 2.0)


@given(threads=st.integers(1, 64), quota=st.floats(0.5, 64), active=st.integers(1, 20), silent=st.integers(0, 20))
def test_the_refused_share_is_what_the_work_wanted_and_did_not_get(threads, quota, active, silent):
    period, before = 0.1, Refused(1000, 700, 12.0, 340.0)
    used = throttled = cut = 0
    for _ in range(active):  # all threads run until the quota is spent, then all stand still
        runs = min(period, quota * period / threads)
        used += threads * runs
        throttled += threads * (period - runs)
        cut += runs < period
    now = Refused(1000 + active, 700 + cut, 12.0 + throttled, 340.0 + used)
    got = share([before], [now])
    assert got == pytest.approx(max(0.0, 1 - quota / threads), abs=1e-9)
    # Periods in which nothing was wanted are not counted by the kernel; those with room to spare lower the share.
    spare = Refused(now.periods + silent, now.cut, now.throttled, now.used + silent * period)
    assert share([before], [spare]) <= got + 1e-9
    assert share([now], [now]) == 0.0 and share([], [now]) is None and share(None, [now]) is None
    rarely = Refused(now.periods + 100, now.cut + 5, now.throttled + 90.0, now.used + 10.0)
    assert share([now], [rarely]) == pytest.approx(0.05)


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_at_its_quota_is_seen(fake, version):
    def show(periods, cut, throttled_s, used_s):
        if version == 2:
            stat = f"usage_usec {used_s * 1e6:.0f}\nuser_usec 3\nnr_periods {periods}\nnr_throttled {cut}\n"
            group(fake.groups, cpu_max="50000 100000\n", cpu_stat=f"{stat}throttled_usec {throttled_s * 1e6:.0f}\n")
        else:
            stat = f"nr_periods {periods}\nnr_throttled {cut}\nthrottled_time {throttled_s * 1e9:.0f}\n"
            group(fake.groups / "cpu", cpu_stat=stat)
            (fake.groups / "cpu" / "cpu.cfs_quota_us").write_text("50000")
            (fake.groups / "cpu" / "cpu.cfs_period_us").write_text("100000")
            group(fake.groups / "cpuacct", cpuacct_usage=f"{used_s * 1e9:.0f}\n")

    fake.write("7/cgroup", "0::/\n" if version == 2 else "1:cpu:/\n2:cpuacct:/\n0::/\n")
    show(10, 5, 1.0, 9.0)
    load = fake.load()
    fake.at += 10.0
    show(110, 85, 4.0, 14.0)
    assert load.read().throttled_share == pytest.approx(3 / 8)
    fake.at += 10.0
    assert load.read().throttled_share == 0.0 and load.cores() == 0.5


@pytest.mark.parametrize(
    ("limit", "stat", "quota"),
    [("lots of\n", "", None), ("100000 0\n", "", None), ("max\n", "", None), ("50000 100000\n", "nr_periods x\n", 0.5),
     ("50000 100000\n", "usage_usec 5\n", 0.5)],
)  # fmt: skip
def test_what_damaged_control_groups_refuse_is_unknown(fake, limit, stat, quota):
    fake.write("7/cgroup", "nonsense\n::\n0::/a/../b\n")
    group(fake.groups / "b", cpu_max=limit, cpu_stat=stat)
    load = fake.load()
    fake.at += 1.0
    assert load.cores() == (quota or 2) and load.read().throttled_share is None
    assert "throttled_share" in load.absent


def test_without_control_groups_nothing_is_said_of_them(fake):
    load = fake.load()  # the process tells no group
    fake.at += 1.0
    assert load.cores() == 2 and load.read().throttled_share is None
    assert load.absent["throttled_share"] == "no control groups are seen here"
    assert Groups(fake.home / "nowhere", str(fake.home / "nothing")).quota() is None
    fake.write("7/cgroup", "0::/\n")
    load = fake.load()  # the topmost group: no limit, nothing refused
    fake.at += 1.0
    assert load.read().throttled_share == 0.0 and "throttled_share" not in load.absent


def test_cores_of_this_process():
    assert 0 < cores() <= (os.cpu_count() or 1)


# ---- GPUs


class Library:
    """NVIDIA's library, with two GPUs that it counts in another order than CUDA does."""

    NVML_GPU_UTILIZATION_SAMPLES = 1

    def __init__(self):
        self.known = {"GPU-bbbb": 0, "GPU-aaaa": 1}
        self.samples = {0: [(1, 10)], 1: [(1, 50), (2, 100)]}
        self.pids, self.bits, self.begun = {0: [], 1: [os.getpid(), 4242]}, {0: 0, 1: 0x44}, 0

    def nvmlInit(self):
        self.begun += 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.known:
            raise RuntimeError("Not Found")
        return self.known[uuid]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=(1 + handle) * 10**9, total=10**10)

    def nvmlDeviceGetClockInfo(self, handle, kind):
        assert kind == 1
        return 1400 + handle

    def nvmlDeviceGetPowerUsage(self, handle):
        return 350_000

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return 700_000

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self.bits[handle]

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=33)

    def nvmlDeviceGetSamples(self, handle, kind, since):
        found = [SimpleNamespace(timeStamp=t, sampleValue=SimpleNamespace(uiVal=v)) for t, v in self.samples[handle]]
        return 1, [s for s in found if s.timeStamp >= since]  # the last one seen may come again

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=pid) for pid in self.pids[handle]]


def test_a_gpu_is_found_by_its_uuid(fake, monkeypatch):
    library, uses = Library(), []
    gpus = Gpus(library, lambda: ["aaaa", "bbbb"] if uses else None)
    load = Load(fake.groups, fake.now, pid=7, gpus=gpus)
    assert load.read().gpus == () and "no GPU so far" in load.absent["gpus"] and not library.begun
    uses.append(True)  # CUDA is in use now
    library.pids[1].append(20)
    fake.process(20, parent=7)
    reading = load.read()
    first, second = reading.gpus
    # This process, which CUDA's ids are of, is not number 7 of the fake.
    assert first == Gpu(
        uuid="GPU-aaaa", used=0.75, memory_gb=2.0, clock_mhz=1401.0, throttled=("power_cap", "thermal"), others=2
    )
    assert second.uuid == "GPU-bbbb" and second.used == pytest.approx(0.1) and second.throttled == ()
    assert second.others is None and "does not list this process" in load.absent["gpu_1 others"]
    assert "gpus" not in load.absent
    given = {name: value for name, value in load.metrics(reading).items() if "gpu_0" in name}
    assert given == {
        "system/gpu_0_utilization_percentage": 75.0,
        "system/gpu_0_memory_usage_megabytes": 2000.0,
        "system/gpu_0_memory_usage_percentage": 20.0,
        "system/gpu_0_power_usage_watts": 350.0,
        "system/gpu_0_power_usage_percentage": 50.0,
        "system/gpu_0_clock_mhz": 1401.0,
        "system/gpu_0_throttled": 1.0,
        "system/gpu_0_other_processes": 2.0,
    }
    library.samples[1].append((3, 20))  # only what is new counts
    assert load.read().gpus[0].used == pytest.approx(0.2)
    assert load.read().gpus[0].used == pytest.approx(0.33)  # none is new
    assert library.begun == 1


def test_other_ranks_are_of_this_run(fake, monkeypatch):
    fake.process(8)
    fake.process(9)
    seen = []
    gpus = SimpleNamespace(read=lambda own: seen.append(own()) or (), absent={}, metrics=dict)
    load = Load(fake.groups, fake.now, pid=7, gpus=gpus)
    fake.process(20, parent=7)
    load.read()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    load.read()
    assert seen == [{7, 20}, {7, 8, 9, 20}]


def test_words_for_why_a_gpu_is_slow():
    library = Library()
    gpus = Gpus(library, lambda: ["aaaa"])
    words = {0x1: (), 0x3: (), 0x8: ("hardware",), 0x48: ("thermal",), 0x88: ("power_brake",), 0x60: ("thermal",)}
    for bits, expected in words.items():
        library.bits[1] = bits
        assert gpus.read(set)[0].throttled == expected
    del Library.nvmlDeviceGetCurrentClocksEventReasons  # as older versions of the library
    try:
        library.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x20
        assert gpus.read(set)[0].throttled == ("thermal",)
        del library.nvmlDeviceGetCurrentClocksThrottleReasons
        assert gpus.read(set)[0].throttled == () and "gpu_0 throttled" in gpus.absent
    finally:
        Library.nvmlDeviceGetCurrentClocksEventReasons = lambda self, handle: self.bits[handle]
    gpus.read(set)
    assert "gpu_0 throttled" not in gpus.absent


def test_a_gpu_without_its_library_is_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gpus = Gpus(uuids=lambda: ["aaaa"])
    assert gpus.read(set) == () and gpus.absent == {"gpus": "the package nvidia-ml-py is not installed"}
    library = Library()
    gpus = Gpus(library, lambda: ["cccc", "aaaa"])
    (only,) = gpus.read(set)
    assert gpus.index(only.uuid) == 1 and "gpu_1_power_usage_watts" in gpus.metrics()
    assert gpus.absent.keys() == {"gpu_0"}
    library.nvmlInit = lambda: 1 / 0
    gpus = Gpus(library, lambda: ["aaaa"])
    assert gpus.read(set) == () and gpus.absent["gpus"].startswith("NVML: ")
    gpus = Gpus(library, lambda: [])
    assert gpus.read(set) == () and gpus.absent["gpus"] == "not an NVIDIA GPU"


def test_asking_for_gpus_does_not_begin_cuda(monkeypatch):
    import torch

    assert nvml._own_uuids() is None and not torch.cuda.is_initialized()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"u{index}"))
    assert nvml._own_uuids() == ["u0"]  # a single process computes on the first alone
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert nvml._own_uuids() == ["u0", "u1", "u2"]


# ---- This machine


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
    # Their 0.3 s and more are not told twice, only their leaving.
    assert after.worker_cores * (after.at - reading.at) < sum(used) - 0.05


def test_where_faults_are_not_counted(fake, monkeypatch):
    monkeypatch.setattr(processes, "_text", lambda name: "")  # a system without /proc
    load = fake.load()
    fake.at += 1.0
    assert load.read().major_faults_s is None and "major_faults_s" in load.absent


def test_names_and_values_are_those_of_mlflow():
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    load, theirs = Load(), {}
    monitors = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    time.sleep(0.05)
    for monitor in monitors:
        monitor.collect_metrics()
        theirs |= monitor.aggregate_metrics()
    ours = load.metrics(load.read())
    assert {f"system/{name}" for name in theirs} <= ours.keys()
    for name, close in (("memory_usage_megabytes", 0.1), ("memory_usage_percentage", 0.1)):
        assert ours[f"system/system_{name}"] == pytest.approx(theirs[f"system_{name}"], rel=close)
    for name in ("usage_percentage", "usage_megabytes", "available_megabytes"):
        assert ours[f"system/disk_{name}"] == pytest.approx(theirs[f"disk_{name}"], rel=0.02)
    assert all(METRIC_NAME.fullmatch(name) for name in ours)


def test_only_the_last_reading_is_told_with_the_state_of_the_machine(fake, monkeypatch):
    net = SimpleNamespace(bytes_recv=15, bytes_sent=27)
    monkeypatch.setattr(psutil, "net_io_counters", lambda: net)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=4_096_000, available=3_072_000))
    load = fake.load()
    net = SimpleNamespace(bytes_recv=3_000_015, bytes_sent=27)
    fake.at += 1.0
    reading = load.read()
    given = load.metrics(reading)
    assert given["system/network_receive_megabytes"] == pytest.approx(3.0)
    assert given["system/network_transmit_megabytes"] == 0
    assert given["system/system_memory_usage_megabytes"] == pytest.approx(1.024)
    assert given["system/system_memory_usage_percentage"] == pytest.approx(25)
    fake.at += 1.0
    load.read()
    assert load.metrics(reading).keys() == {
        f"system/{n}" for n in ("own_cores", "worker_cores", "rss_gb", "read_mb_s", "major_faults_s")
    }


def test_a_reading_takes_little_of_the_main_threads_time():
    load = Load()
    costs = []
    for _ in range(20):
        began = time.thread_time()
        load.metrics(load.read())
        costs.append(time.thread_time() - began)
    # 0.3 ms where it was measured, every 10 s: three millionths of a core.
    assert float(np.median(costs)) < 0.01


# ---- The thread


def test_the_sampler_keeps_the_last_readings_and_tells_once_what_is_absent(tmp_path, monkeypatch):
    monkeypatch.setattr(system_metrics, "KEPT", 4)
    written = journal.Journal(tmp_path / "journal.jsonl")
    sampler = system_metrics.Sampler(written, 0.01, tmp_path)
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
    (event,) = [e for e in found.events if e.name == "load_absent"]
    assert event.data["gpus"] == sampler.absent()["gpus"]
    assert len(found.metrics["system/own_cores"]) >= 8


def test_a_machine_that_cannot_be_read_ends_the_sampler_and_not_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Load, "read", lambda self: 1 / 0)
    written = journal.Journal(tmp_path / "journal.jsonl")
    sampler = system_metrics.Sampler(written, 0.01)
    sampler.start()
    sampler.join(20)
    assert not sampler.is_alive() and "cannot be read any more: division by zero" in caplog.text
    written.close()
