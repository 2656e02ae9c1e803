"""Name the bottleneck of a run, in words.

Each rule reads the measurements and returns what it finds, or nothing where they are missing. An option that was not
measured is marked as such, with the benchmark that measures it. Each rule is tested with a deliberate slowdown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from trainkit.errors import number_of
from trainkit.speed.clock import COMPUTE, STEP
from trainkit.speed.evidence import Drop, Evidence
from trainkit.speed.limits import mfu, rate_words
from trainkit.tracking import markdown

NOTABLE = 0.10
"""Share of wall-clock time from which a finding counts as a bottleneck."""
_FROM_DISK_MB_S = 20.0
_MOST_WORKERS = 8


@dataclass(frozen=True)
class Finding:
    """One thing that costs time."""

    cause: str
    """One of `CAUSES`."""
    share: float
    """Share of wall-clock time it took, 0 to 1; 0 for a setting, whose cost was not measured."""
    text: str
    """What was measured: a sentence that begins with the cause."""
    options: tuple[tuple[str, str | None], ...] = ()
    """What might help, and the argument of `trainkit bench` that measures it: empty where bench tries it without one,
    None where it cannot."""


def judge(e: Evidence) -> list[Finding]:
    """Return the findings of all rules, the largest share first; compute where no other share reaches 10 %."""
    found = [finding for rule in RULES for finding in _listed(rule(e))]
    large = [finding for finding in found if finding.share >= NOTABLE]
    rest = [finding for finding in found if finding.share < NOTABLE]
    return sorted(large or [_compute(e)], key=lambda f: -f.share) + rest


def describe(e: Evidence, findings: Sequence[Finding], recipe: str = "RECIPE") -> list[str]:
    """Write a verdict as lines: throughput and its share of the upper bound, slowdowns, then each finding."""
    lines = [_throughput(e), *(describe_slowdown(drop) for drop in e.drops)]
    for finding in findings:
        text = finding.text
        if finding is findings[0] and finding.share >= NOTABLE and finding.cause != "compute":
            text = f"Bottleneck: {_lower(text)}"
        lines.append(" ".join(filter(None, (text, _advice(finding, recipe)))))
    return lines


def describe_slowdown(drop: Drop) -> str:
    """Describe a sustained slowdown in a sentence."""
    return (
        f"Sustained slowdown since step {drop.step:,}: step time {_ms(drop.before_ms)} -> {_ms(drop.after_ms)}; "
        f"{_percent(drop.share)} of the increase is {NAMES.get(drop.phase, drop.phase)}."
    )


def _advice(finding: Finding, recipe: str) -> str:
    """Return the options of a finding with the command that measures them; empty where it has none."""
    if not finding.options:
        return ""
    options = ", ".join(option for option, _ in finding.options)
    arguments = [argument for _, argument in finding.options if argument is not None]
    if not arguments:
        return f"Try {options}."
    bench = markdown.code(" ".join(["trainkit bench", recipe, *(arguments if all(arguments) else [])]))
    return f"Try {options} (not measured here; {bench} measures {'it' if len(finding.options) == 1 else 'them'})."


NAMES = {
    "data": "data loading",
    "transfer": "the transfer to the device",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer step",
    "compute": "in forward pass, backward pass and optimizer step equally",
    "eval": "evaluations",
    "checkpoint": "checkpoints",
    "log": "logging",
    "setup": "start-up",
}


# ---- Rules


def _data(e: Evidence) -> Finding | None:
    lost = _share(e, "data")
    if lost < NOTABLE:
        return None
    c, more = e.limits, ""
    if c and c.loader and c.model:
        more += f" Upper bounds: loader alone {rate_words(c.loader)} samples/s, model alone {rate_words(c.model)}."
    if (disk := _median(e, "read_mb_s")) >= _FROM_DISK_MB_S:
        more += f" {disk:.0f} MB/s are read from disk."
    options = (*_more_workers(e), ("decoding the data once", ""))
    return Finding("data", lost, f"Data loading ({_of_time(lost)}).{more}", options)


def _more_workers(e: Evidence) -> tuple[tuple[str, str | None], ...]:
    """Suggest twice as many workers, at most one per core; nothing where each core has one."""
    now, cores = e.settings.get("workers", 0), int(e.settings.get("cores") or _MOST_WORKERS)
    wanted = min(2 * now or 4, max(1, cores))
    return ((f"`loader.workers={wanted}`", f"loader.workers={now},{wanted}"),) if wanted > now else ()


def _phases(e: Evidence) -> Iterable[Finding]:
    """Report each phase that takes a notable share of wall-clock time."""
    took = {name: seconds for name, seconds in e.evaluation_s.items() if len(seconds)}
    each = "; " + ", ".join(f"{name} {len(s)} x {np.median(s):.2g} s" for name, s in took.items()) if took else ""
    costliest = max(took, key=lambda name: sum(took[name]), default="NAME")
    pin = (("`loader.pin=true`", "loader.pin=false,true"),) if e.device == "cuda" and not e.settings.get("pin") else ()
    rules: tuple[tuple[str, str, str, str, tuple[tuple[str, str | None], ...]], ...] = (
        ("transfer", "transfer", "Transfer to the device and augmentation there", "", pin),
        ("eval", "evaluation", "Evaluations", each,
         ((f"a longer `evaluations.{costliest}.every`", None),)),
        ("checkpoint", "checkpoint", "Checkpoints", "", (("a longer `checkpoints.every`", None),)),
        ("log", "log", "Log lines, tables and images", "", (("a longer `log.every`", None),)),
    )  # fmt: skip
    for phase, cause, name, more, options in rules:
        if (lost := _share(e, phase)) >= NOTABLE:
            yield Finding(cause, lost, f"{name} ({_of_time(lost)}{more}).", options)
    if (lost := _share(e, "setup")) >= NOTABLE:
        text = f"Start-up ({_of_time(lost)}, {e.seconds['setup']:.2g} s before the first step)."
        yield Finding("setup", lost, text)


def _recompiles(e: Evidence) -> Finding | None:
    if e.compiled is None or not e.compiled.recompiles:
        return None
    lost, c = e.compiled.seconds / _total(e), e.compiled
    why = f": {c.reasons[0]}" if c.reasons else ""
    times = number_of(c.recompiles, "times")
    text = f"Recompilation ({_of_time(lost)}). torch.compile recompiled the model {times} after the warm-up{why}."
    return Finding("recompile", lost, text, (("`train.compile=off`", "train.compile=default,off"),))


def _waits(e: Evidence) -> Finding | None:
    if e.waits is None or e.waits.per_step < 1:
        return None
    idle, step = e.on_device.get("device/idle_ms", 0.0), e.on_device.get("device/step_ms", 0.0)
    lost = idle / step * _training(e) / _total(e) if step else 0.0
    at = f", most often at {e.waits.places[0]}" if e.waits.places else ""
    text = (
        f"Device synchronization (device idle for {_of_time(lost)}). The host waits for the device "
        f"{number_of(round(e.waits.per_step), 'times')} per step{at}. `trainkit syncs` lists the lines."
    )
    return Finding("sync", lost, text)


def _other_processes(e: Evidence) -> Finding | None:
    # CPUs the process may run on. A control group may grant it fewer; the group counts what it refuses.
    processors, busy = e.settings.get("processors"), _mean(e, "host_share")
    if not processors or not e.load:
        return None
    own = _mean(e, "own_cores") + _mean(e, "worker_cores")
    others = busy * processors - own
    if busy < 0.9 or others < 0.25 * processors:
        return None
    text = f"Other processes used {others:.1f} of {processors:g} CPU cores, this run {own:.1f}."
    return Finding("other_processes", others / processors * _compute_share(e), text)


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
    text = (
        f"Slow rank ({_of_time(lost)}). Rank {slowest} takes {_ms(1e3 * own[slowest])} per step before its backward "
        f"pass, the others {_ms(1e3 * float(np.median(np.delete(own, slowest))))} (median); they wait for it."
    )
    return Finding("slow_rank", lost, text)


def _settings(e: Evidence) -> Iterable[Finding]:
    s, gpu = e.settings, e.device == "cuda"
    deterministic = ("`device.deterministic=false`", "device.deterministic=true,false")
    cudnn = ("`device.cudnn_benchmark=true`", "device.cudnn_benchmark=false,true")
    cores, threads, processes = s.get("cores") or 1, s.get("threads") or 1, s.get("processes") or 1
    fitting = max(1, int(cores // processes))
    other = (f"`device.threads={fitting}`", f"device.threads={threads},{fitting}")
    each = f"{number_of(processes, 'processes', 'process')}, {number_of(threads, 'threads')}{' each' * (processes > 1)}"
    used = f"{threads * processes} on {cores:g} CPU cores ({each})."
    rows: tuple[tuple[bool, str, tuple[str, str] | None], ...] = (
        (gpu and str(s.get("CUDA_LAUNCH_BLOCKING", "0")) not in ("0", ""),
         "CUDA_LAUNCH_BLOCKING is set: the host waits for every kernel. Use it for debugging only.", None),
        (bool(s.get("anomaly")), "Autograd anomaly detection is on. Use it for debugging only.", None),
        (bool(s.get("deterministic")),
         "Deterministic kernels (`device.deterministic`) are on: they may be slower.", deterministic if gpu else None),
        (gpu and s.get("cudnn_benchmark") is False and not s.get("deterministic"),
         "cuDNN's benchmark mode (`device.cudnn_benchmark`) is off.", cudnn),
        (not gpu and threads * processes <= cores / 2, f"Few threads: {used}", other),
        (threads * processes > 2 * cores, f"Too many threads: {used}", other),
    )  # fmt: skip
    for found, text, option in rows:
        if found:
            yield Finding("setting", 0.0, text, (option,) if option else ())


def _compute(e: Evidence) -> Finding:
    """Report forward pass, backward pass and optimizer step, where nothing else takes a notable share."""
    share = _compute_share(e)
    text = f"Compute-bound: {_percent(share)} of wall-clock time is forward pass, backward pass and optimizer step."
    s = e.settings
    options: list[tuple[str, str | None]] = []
    if s.get("precision") == "no":
        options.append(("`train.precision=bf16`", "train.precision=no,bf16"))
    if s.get("compile", "off") == "off":
        options.append(("`train.compile=default`", "train.compile=off,default"))
    if s.get("channels_last") is False:
        options.append(("`device.channels_last=true`", "device.channels_last=false,true"))
    return Finding("compute", share, text, tuple(options))


RULES: tuple[Callable[[Evidence], Finding | Iterable[Finding] | None], ...] = (
    _data, _phases, _recompiles, _waits, _other_processes, _slow_rank, _settings,
)  # fmt: skip
CAUSES = (
    "data", "transfer", "evaluation", "checkpoint", "log", "setup", "recompile", "sync",
    "other_processes", "slow_rank", "setting", "compute",
)  # fmt: skip


# ---- Numbers


def _throughput(e: Evidence) -> str:
    rate = e.trained * e.batch_size / _training(e) if _training(e) else 0.0
    text = f"Throughput: {rate_words(rate)} samples/s"
    if (c := e.limits) is not None and c.loader and c.model:
        least, part = min((c.loader, "loader"), (c.model, "model"))
        bound = f"the {part} alone ({rate_words(least)} samples/s)"
        if rate <= least:
            text += f", {_percent(rate / least)} of the upper bound of {bound}"
        else:
            text += f", more than was measured for {bound}: measure again with log.ceilings=measure"
    text += "."
    if len(e.steps):
        p10, p50, p99 = (_ms(1e3 * s) for s in np.percentile(e.steps.seconds, [10, 50, 99]))
        text += f" Step time: p10 {p10}, p50 {p50}, p99 {p99}."
    if c is not None and (used := mfu(rate, c)) is not None:
        text += f" Model FLOP utilization: {_percent(used)} (peak: {c.peak_source})."
    return text


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


def _listed(found: Finding | Iterable[Finding] | None) -> Iterable[Finding]:
    return () if found is None else (found,) if isinstance(found, Finding) else found


def _of_time(share: float) -> str:
    return f"{_percent(share)} of wall-clock time"


def _lower(text: str) -> str:
    """Return a sentence as the rest of another; abbreviations such as CPU stay as they are."""
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 or share == 0 else "< 1 %"


def _ms(ms: float) -> str:
    return f"{ms:.3g} ms" if ms < 1000 else f"{ms / 1000:.3g} s"
