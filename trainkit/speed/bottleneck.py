"""Name the bottleneck of a run, in words.

A rule looks at the measurements and states what it finds; it is silent where they are missing. What might help is
marked untested, with the switch of the benchmark that tests it. Each rule is tested with a slow-down made on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from trainkit.errors import number_of
from trainkit.speed.clock import COMPUTE, STEP
from trainkit.speed.evidence import Drop, Evidence
from trainkit.speed.limits import mfu, rate_words

NOTABLE = 0.10
"""Share of wall-clock from which something is worth a sentence."""
_FROM_DISK_MB_S, _FAULTS_S = 20.0, 20.0
_GROWN_GB, _GROWN = 0.25, 0.2
_GROWING_S, _RATE_S = 180.0, 600.0
"""Seconds that memory must be seen to grow before it is reported, and before the growth of an hour is."""
_FALLEN = 0.8


@dataclass(frozen=True)
class Finding:
    """One thing that costs time."""

    cause: str
    """Of `CAUSES`."""
    costs: float
    """Share of wall-clock that it took, 0 to 1; of a setting 0, since what it costs was not measured."""
    said: str
    """What was measured, as a sentence."""
    untested: tuple[tuple[str, str], ...] = ()
    """What might help, and the switch of the benchmark that would show it."""


def judge(e: Evidence) -> list[Finding]:
    """Return the findings of all rules, the costliest first; compute itself where nothing else costs 10 %."""
    found = [finding for rule in RULES for finding in _listed(rule(e))]
    dear = [finding for finding in found if finding.costs >= NOTABLE]
    rest = [finding for finding in found if finding.costs < NOTABLE]
    return sorted(dear or [_compute(e)], key=lambda f: -f.costs) + rest


def words(e: Evidence, findings: Sequence[Finding], recipe: str = "RECIPE") -> list[str]:
    """Write a verdict as lines: the throughput and its share of the upper bounds, then why, and what to test."""
    lines = [_pace(e)]
    for drop in e.drops:
        lines.append(dropped(drop))
    for finding in findings:
        lines.append(finding.said)
        if finding.untested:
            options = "; ".join(f"{what} (switch `{switch}`)" for what, switch in finding.untested)
            lines.append(f"  untested: {options}: trainkit bench {recipe} --only {finding.untested[0][1]}")
    return lines


def unmeasured(e: Evidence) -> list[str]:
    """List what was not measured of a run, and why, as one line; empty where all was."""
    absent = "; ".join(f"{what}: {why}" for what, why in sorted(e.absent.items()))
    return [f"not measured: {absent}"] if absent else []


def dropped(drop: Drop) -> str:
    """Describe a lasting slowdown in a sentence."""
    return (
        f"From step {drop.step} on a step took {_ms(drop.after_ms)} instead of {_ms(drop.before_ms)}; "
        f"{_percent(drop.share)} of what was lost is in {NAMES.get(drop.phase, drop.phase)}."
    )


NAMES = {
    "data": "waiting for data",
    "transfer": "copying to the device",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "compute": "forward, backward and optimizer alike",
    "eval": "evaluations",
    "checkpoint": "checkpoints",
    "log": "logging",
    "setup": "what comes before the first step",
    "body": "the body of the loop",
}


# ---- Rules


def _data(e: Evidence) -> Finding | None:
    lost = _share(e, "data")
    if lost < NOTABLE:
        return None
    workers, c = e.settings.get("workers", 0), e.ceilings
    said = f"{_percent(lost)} of the time the step waited for data"
    if c and c.loader and c.model:
        said += f"; the loader alone gives {rate_words(c.loader)} samples/s and the network alone {rate_words(c.model)}"
    if c and c.fetch:
        kind, most = max(c.fetch.items(), key=lambda item: item[1])
        said += f"; {_WORK.get(kind, kind)} is {_percent(most)} of reading a batch"
    disk, faults = _median(e, "read_mb_s"), _median(e, "major_faults_s")
    decoding = c is not None and c.fetch.get("decode", 0.0) + c.fetch.get("augment", 0.0) >= 0.5
    if not decoding and (disk >= _FROM_DISK_MB_S or faults >= _FAULTS_S):
        said += f"; meanwhile {disk:.0f} MB/s came from the disk and {faults:.0f} pages a second were not in memory"
        return Finding("page_cache", lost, f"{said}.", (("keep the data in a form that fits into memory", "cache"),))
    more = f"more workers than {workers}" if workers else "workers that read ahead"
    return Finding("data", lost, f"{said}.", ((more, "workers"), ("data decoded once", "cache")))


def _phases(e: Evidence) -> Iterable[Finding]:
    """Report each phase that takes a notable share by itself."""
    held = ", ".join(f"{name} {len(s)} x {np.median(s):.2g} s" for name, s in e.held.items() if len(s))
    pin = (("page-locked memory", "pin"),) if e.device == "cuda" else ()
    rules: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...] = (
        ("transfer", "transfer", "went into copying batches to the device and what is done to them there", pin),
        ("eval", "evaluation", f"went into evaluations{f' ({held})' if held else ''}",
         (("a budget, or held less often", "evaluations"),)),
        ("checkpoint", "checkpoint", "went into checkpoints", (("written less often", "checkpoints"),)),
        ("log", "log", "went into log lines, tables and images", (("log lines less often", "log"),)),
    )  # fmt: skip
    for phase, cause, said, untested in rules:
        if (lost := _share(e, phase)) >= NOTABLE:
            yield Finding(cause, lost, f"{_percent(lost)} of the time {said}.", untested)
    if (lost := _share(e, "setup")) >= NOTABLE:
        said = f"{_percent(lost)} of the time, {e.seconds['setup']:.2g} s, went by before the first step."
        yield Finding("setup", lost, said)


def _recompiles(e: Evidence) -> Finding | None:
    if e.compiled is None or not e.compiled.recompiles:
        return None
    lost, c = e.compiled.seconds / _total(e), e.compiled
    why = f": {c.reasons[0]}" if c.reasons else ""
    said = f"The network was compiled again {c.recompiles} times after the warm-up, {_percent(lost)} of the time{why}."
    return Finding("recompile", lost, said, (("without compilation", "compile"),))


def _waits(e: Evidence) -> Finding | None:
    if e.waits is None or e.waits.per_step < 1:
        return None
    idle, step = e.on_device.get("device/idle_ms", 0.0), e.on_device.get("device/step_ms", 0.0)
    lost = idle / step * _training(e) / _total(e) if step else 0.0
    at = f", most often at {e.waits.places[0]}" if e.waits.places else ""
    said = (
        f"The processor waited for the device {e.waits.per_step:.0f} times a step{at}; the device stood idle "
        f"{_percent(lost)} of the time. `trainkit syncs` names the lines."
    )
    return Finding("sync", lost, said)


def _throttled(e: Evidence) -> Iterable[Finding]:
    share = _mean(e, "throttled_share")
    if share >= NOTABLE / 2:
        said = f"{_percent(share)} of the time the control group (container) had used up its processor time."
        yield Finding("throttled", share, said)
    before, after = _ends(e, "cpu_mhz")
    if before and after < _FALLEN * before:
        # Work that a clock sets the pace of takes as much longer as it ticks slower.
        lost = (1 - after / before) * _compute_share(e)
        said = f"The processor's clock fell from {before / 1e3:.1f} to {after / 1e3:.1f} GHz while the run went on."
        yield Finding("throttled", lost, said)
    reasons = [g.throttled for r in e.load for g in r.gpus]
    named = sorted({word for some in reasons for word in some})
    if named and (often := sum(bool(some) for some in reasons) / len(reasons)) >= NOTABLE:
        said = f"In {_percent(often)} of the readings a GPU ran below its clock: {', '.join(named)}."
        yield Finding("throttled", often * _compute_share(e), said)


def _neighbour(e: Evidence) -> Finding | None:
    # Those it may run on, of which a control group may grant it a part: what is refused is counted by that group.
    processors, busy = e.settings.get("processors"), _mean(e, "host_share")
    if not processors or not e.load:
        return None
    own = _mean(e, "own_cores") + _mean(e, "worker_cores")
    others = busy * processors - own
    if busy < 0.9 or others < 0.25 * processors:
        return None
    said = f"Other programs kept {others:.1f} of the {processors:g} processor cores busy, this run {own:.1f}."
    return Finding("neighbour", others / processors * _compute_share(e), said)


def _memory(e: Evidence) -> Finding | None:
    before, after = _ends(e, "rss_gb")
    rss = _known(e, "rss_gb")
    if not before or after - before < max(_GROWN_GB, _GROWN * before) or not _still_growing(rss):
        return None
    seconds = e.load[-1].at - e.load[0].at
    if seconds < _GROWING_S:  # a training that begins fills its pools and caches
        return None
    quarter = max(1, len(e.steps) // 4)
    first, last = (float(np.median(part.seconds)) for part in (e.steps[:quarter], e.steps[-quarter:]))
    lost = max(0.0, 1 - first / last) * _training(e) / _total(e) if last else 0.0
    # From the middle of the first quarter to that of the last.
    rate = f", {(after - before) / (0.75 * seconds / 3600):.2g} GB an hour" if seconds >= _RATE_S else ""
    said = f"Resident memory grew from {before:.1f} to {after:.1f} GB within {seconds / 60:.0f} minutes{rate}; "
    said += f"a step took {_ms(1e3 * first)} at first and {_ms(1e3 * last)} at last."
    return Finding("memory", lost, said)


def _slow_rank(e: Evidence) -> Finding | None:
    if len(e.ranks) < 2:
        return None
    # What a process does before it meets the others: in the backward pass it may be waiting for them.
    before = ("data", "transfer", "forward")
    own = np.array([sum(rank.get(phase, 0.0) for phase in before) - rank.get("met", 0.0) for rank in e.ranks])
    slowest = int(own.argmax())
    behind = float(own[slowest] - np.median(np.delete(own, slowest)))
    lost = behind * e.trained / _total(e)
    if lost < NOTABLE:
        return None
    said = (
        f"Process {slowest} works {_ms(1e3 * own[slowest])} until its backward pass, the others "
        f"{_ms(1e3 * float(np.median(np.delete(own, slowest))))}: they wait for it."
    )
    return Finding("slow_rank", lost, said)


def _settings(e: Evidence) -> Iterable[Finding]:
    s = e.settings
    if str(s.get("CUDA_LAUNCH_BLOCKING", "0")) not in ("0", "") and e.device == "cuda":
        said = "CUDA_LAUNCH_BLOCKING is set: every kernel is waited for. It is for finding errors."
        yield Finding("setting", 0.0, said)
    if s.get("anomaly"):
        yield Finding("setting", 0.0, "Autograd's anomaly detection is on: it is for finding errors.")
    if s.get("deterministic"):
        said = "device.deterministic is on: slower kernels may have been taken."
        yield Finding("setting", 0.0, said, (("without it", "deterministic"),) if e.device == "cuda" else ())
    if s.get("cudnn_benchmark") is False and e.device == "cuda" and not s.get("deterministic"):
        said = "device.cudnn_benchmark is off."
        yield Finding("setting", 0.0, said, (("switched on", "cudnn_benchmark"),))
    cores, threads, processes = s.get("cores") or 1, s.get("threads") or 1, s.get("processes") or 1
    if e.device == "cpu" and threads * processes <= cores / 2:
        said = f"{threads * processes} of {cores:g} cores learn: {_threads(processes, threads)}."
        yield Finding("setting", 0.0, said, (("as many threads as cores", "threads"),))
    if threads * processes > 2 * cores:
        said = f"{cores:g} cores have {processes * threads} threads to run: {_threads(processes, threads)}."
        yield Finding("setting", 0.0, said, (("fewer threads", "threads"),))


def _compute(e: Evidence) -> Finding:
    """Report forward, backward and optimizer, where nothing else costs much."""
    share = _compute_share(e)
    said = f"{_percent(share)} of the time the network learned, and nothing else took {_percent(NOTABLE)} of it."
    s = e.settings
    options: list[tuple[str, str]] = []
    if s.get("precision") == "no":
        options.append(("bf16 arithmetic", "precision"))
    if s.get("compile", "off") == "off":
        options.append(("torch.compile", "compile"))
    if s.get("channels_last") is False:
        options.append(("channels_last", "channels_last"))
    return Finding("compute", share, said, tuple(options))


RULES: tuple[Callable[[Evidence], Finding | Iterable[Finding] | None], ...] = (
    _data, _phases, _recompiles, _waits, _throttled, _neighbour, _memory, _slow_rank, _settings,
)  # fmt: skip
CAUSES = (
    "data", "page_cache", "transfer", "evaluation", "checkpoint", "log", "setup", "recompile", "sync", "throttled",
    "neighbour", "memory", "slow_rank", "setting", "compute",
)  # fmt: skip
_WORK = {
    "read": "reading files",
    "decode": "decoding",
    "augment": "augmentation",
    "collate": "putting samples together",
    "other": "what is neither reading, decoding nor augmentation",
}


# ---- Numbers


def _pace(e: Evidence) -> str:
    rate = e.trained * e.batch_size / _training(e) if _training(e) else 0.0
    p10, p50, p99 = 1e3 * np.percentile(e.steps.seconds, [10, 50, 99]) if len(e.steps) else np.zeros(3)
    said = f"{rate_words(rate)} samples/s; a step takes {_ms(p50)}, one in ten {_ms(p10)} or less, one in a hundred "
    said += f"{_ms(p99)} or more"
    if (c := e.ceilings) is None:
        return f"{said}."
    if c.loader and c.model:
        least, what = min((c.loader, "the loader"), (c.model, "the network"))
        said += f"; {_percent(rate / least)} of what {what} alone can do here ({rate_words(least)})"
    if (used := mfu(rate, c)) is not None:
        said += f"; {_percent(used)} of the arithmetic of {c.peak_source}"
    return f"{said}."


def _total(e: Evidence) -> float:
    return sum(e.seconds.values()) or 1.0


def _training(e: Evidence) -> float:
    return sum(e.seconds.get(phase, 0.0) for phase in STEP)


def _share(e: Evidence, phase: str) -> float:
    return e.seconds.get(phase, 0.0) / _total(e)


def _compute_share(e: Evidence) -> float:
    return sum(_share(e, phase) for phase in COMPUTE)


def _known(e: Evidence, name: str) -> list[float]:
    return [value for reading in e.load if (value := getattr(reading, name)) is not None]


def _mean(e: Evidence, name: str) -> float:
    values = _known(e, name)
    return float(np.mean(values)) if values else 0.0


def _median(e: Evidence, name: str) -> float:
    values = _known(e, name)
    return float(np.median(values)) if values else 0.0


def _ends(e: Evidence, name: str) -> tuple[float, float]:
    """Return the medians of the first and the last quarter of the readings; zeros of fewer than eight."""
    values = _known(e, name)
    quarter = len(values) // 4
    return (float(np.median(values[:quarter])), float(np.median(values[-quarter:]))) if quarter >= 2 else (0.0, 0.0)


def _still_growing(values: Sequence[float]) -> bool:
    """Test whether each quarter of a series lies above the one before, unlike a cache that fills up once."""
    quarters = [float(np.median(part)) for part in np.array_split(np.asarray(values), 4)]
    steps = np.diff(quarters)
    return bool((steps > 0.1 * (quarters[-1] - quarters[0])).all())


def _listed(found: Finding | Iterable[Finding] | None) -> Iterable[Finding]:
    return () if found is None else (found,) if isinstance(found, Finding) else found


def _threads(processes: int, threads: int) -> str:
    return f"{number_of(processes, 'processes', 'process')}, {number_of(threads, 'threads')}{' each' * (processes > 1)}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 or share == 0 else "< 1 %"


def _ms(ms: float) -> str:
    return f"{ms:.3g} ms" if ms < 1000 else f"{ms / 1000:.3g} s"
