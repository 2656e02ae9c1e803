"""The switches of the benchmark: options that may make a recipe faster, where each applies, and its trade-off.

A switch (`precision`, `workers`) has one or more settings; a setting is overrides of the recipe or environment
variables. A setting that changes training results, or how much is known of a run, names that trade-off in `gives_up`
and is never chosen by the benchmark.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trainkit.config.schema import Recipe
from trainkit.config.units import Span
from trainkit.diagnostics.stepped_process import Ready
from trainkit.interfaces import CachesSamples, CachesTeacher, Data
from trainkit.training.plan import batch_norm_least

OTHER_BATCH = "another batch size changes the training"
FEWER_EVALUATIONS = "fewer evaluations to choose the best checkpoint from"
FEWER_CHECKPOINTS = "an interrupted run loses more"
FEWER_LINES = "fewer points in every curve"
TO_SEE = "measures the cost of a log line"
WORDS = {"no": "float32", "bf16": "bf16", "fp16": "fp16"}
_TEACHER = "task.cache_teacher"
REFERENCE = ("train.precision=no", "train.compile=off", "device.tf32=false")
"""What losses and outputs are compared with: float32, eager."""


@dataclass(frozen=True)
class Setting:
    """One setting of a switch: what of the recipe or the environment it changes."""

    title: str
    words: tuple[str, ...] = ()
    """Overrides of the recipe."""
    environment: tuple[tuple[str, str | None], ...] = ()
    """Environment variables of the process; None: unset."""
    gives_up: str = ""
    """Its trade-off besides time and memory; such a setting is measured and never chosen."""
    same_samples: bool = True
    """True where a step trains on the same samples as before, so that losses can be compared."""
    number: int = 0
    """What is searched for: workers, samples of a batch."""


@dataclass(frozen=True)
class Switch:
    """One thing that may make a recipe faster, with the settings to measure."""

    name: str
    settings: tuple[Setting, ...] = ()
    ends_when_slower: bool = False
    """Numbers that grow: a setting whose interval lies more than 1 % below the best so far ends the search."""
    ends_when_full: bool = False
    """Numbers that grow until one does not fit: a setting that fails ends the search."""
    absent: str = ""
    """Why there is nothing to measure."""
    derived: bool = False
    """Computed from the seconds of one event and the recipe's plan: blocks of seconds do not show what happens every
    thousand steps."""


NAMES = (
    "precision", "tf32", "channels_last", "compile", "cudnn_benchmark", "deterministic", "fused", "threads", "workers",
    "prefetch", "pin", "persistent_workers", "cache", "cache_teacher", "micro_batch", "batch", "accumulation",
    "evaluations", "checkpoints", "log", "expandable_segments", "launch_blocking",
)  # fmt: skip
"""All switches, in the order in which they are measured."""


def listed(
    recipe: Recipe, ready: Ready, environment: Mapping[str, str] = {}, workers: int | None = None
) -> list[Switch]:
    """All switches for a recipe on the machine on which it got `ready`.

    `workers` is the best number found so far; reading further ahead is tried with that many.
    """
    gpu = ready.machine["device"] == "cuda"
    switches = {switch.name: switch for switch in _arithmetic(recipe, ready, gpu)}
    switches |= {switch.name: switch for switch in _reading(recipe, ready, gpu, workers)}
    switches |= {switch.name: switch for switch in _portions(recipe, ready, gpu)}
    switches |= {switch.name: switch for switch in _between(recipe)}
    if not gpu:
        # What a GPU alone has.
        for name in ("tf32", "cudnn_benchmark", "deterministic", "pin", "expandable_segments"):
            switches[name] = Switch(name, absent="no effect on a CPU")
    blocking = environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")
    freed = Setting("without CUDA_LAUNCH_BLOCKING", environment=(("CUDA_LAUNCH_BLOCKING", None),))
    switches["launch_blocking"] = (
        Switch("launch_blocking", (freed,)) if blocking and gpu else Switch("launch_blocking", absent="not set")
    )
    return [switches[name] for name in NAMES]


def _arithmetic(recipe: Recipe, ready: Ready, gpu: bool) -> list[Switch]:
    machine, device = ready.machine, recipe.device
    there = ["no", *(["bf16"] if machine["bf16"] else []), *(["fp16"] if gpu else [])]
    others = [word for word in there if word != machine["precision"]]
    precision = tuple(Setting(WORDS[word], (f"train.precision={word}",)) for word in others)
    on = machine["compile"]
    # On a CPU there are no CUDA graphs, and tuning takes longer than the trainings that it is for.
    modes = ("off", "default", *(("reduce-overhead", "max-autotune") if gpu else ()))
    compiled = tuple(
        Setting("not compiled" if mode == "off" else f"compiled, {mode}", (f"train.compile={mode}",))
        for mode in modes
        if mode != on
    )
    no_compiler = machine["compiles"] if on == "off" else ""
    switches = [
        Switch("precision", precision),
        Switch("compile", absent=no_compiler) if no_compiler else Switch("compile", compiled),
        _toggle("channels_last", "device.channels_last", device.channels_last),
        _toggle("cudnn_benchmark", "device.cudnn_benchmark", device.cudnn_benchmark),
        _toggle("tf32", "device.tf32", device.tf32, "" if machine["tf32"] else "this GPU has no TF32"),
        _toggle("expandable_segments", "device.expandable_segments", device.expandable_segments),
        Switch("deterministic", absent="already off"),
        _toggle("fused", "optim.fused", recipe.optim.fused),
    ]
    if device.deterministic:
        repeats = Setting(
            "nondeterministic kernels",
            ("device.deterministic=false",),
            gives_up="results on a GPU are no longer bitwise reproducible",
        )
        switches.append(Switch("deterministic", (repeats,)))
        switches.append(Switch("cudnn_benchmark", absent="needs nondeterministic kernels"))
    if recipe.optim.name.startswith("timm:"):
        switches.append(Switch("fused", absent="not available for timm's optimizers"))
    cores = max(1, int(machine["cores"]))
    settings = tuple(
        Setting(
            f"{n} threads" if n > 1 else "1 thread", (f"device.threads={n}",), (("OMP_NUM_THREADS", str(n)),), number=n
        )
        for n in _powers(cores)
        if n != machine["threads"]
    )
    switches.append(Switch("threads", settings, ends_when_slower=True, absent="" if settings else "one core only"))
    return switches


def _reading(recipe: Recipe, ready: Ready, gpu: bool, best: int | None) -> list[Switch]:
    loader, cores = recipe.loader, max(1, int(ready.machine["cores"]))
    settings = tuple(with_workers(n) for n in (0, *_powers(cores)) if n != loader.workers)
    switches = [
        Switch("workers", settings, ends_when_slower=True),
        _toggle("pin", "loader.pin", loader.pin),
        Switch("persistent_workers", absent="workers always persist: one stream of batches for the whole run"),
    ]
    count = best if best is not None else loader.workers
    ahead = tuple(
        Setting(f"{n} batches ahead" if n > 1 else "1 batch ahead", _with(count != loader.workers, count, n), number=n)
        for n in (1, 2, 4, 8)
        if n != loader.prefetch
    )
    switches.append(
        Switch("prefetch", ahead) if count else Switch("prefetch", absent="no workers: 0 is the best number so far")
    )
    cached = tuple(
        Setting(f"cache: {word}", (f"data.cache={word}",))
        for word in _other_caches(recipe.data)
        if word != "auto" and (gpu or word != "device")
    )
    switches.append(Switch("cache", cached, absent="" if cached else "not available for this data"))
    switches.append(_teacher(recipe, ready))
    return switches


def _teacher(recipe: Recipe, ready: Ready) -> Switch:
    """List what caching a frozen teacher brings. Losses are not compared: one output may stand for many."""
    if not isinstance(recipe.task, CachesTeacher):
        return Switch("cache_teacher", absent="this task has no teacher to cache")
    if recipe.task.cache_teacher:
        return Switch("cache_teacher", (Setting("teacher in every step", (f"{_TEACHER}=false",), same_samples=False),))
    if not ready.views:
        return Switch(
            "cache_teacher", absent="only mirroring has a countable number of views; this augmentation does more"
        )
    return Switch("cache_teacher", (Setting("cached teacher outputs", (f"{_TEACHER}=true",), same_samples=False),))


def _portions(recipe: Recipe, ready: Ready, gpu: bool) -> list[Switch]:
    batch, micro, many = ready.batch_size, ready.micro_batch, ready.accumulation
    if ready.block > 1:
        why = f"samples come in groups of {ready.block} that must stay together"
        return [Switch(name, absent=why) for name in ("micro_batch", "batch", "accumulation")]
    size = ready.steps_per_epoch * batch
    seen = "changes batch norm statistics" if ready.batch_norm else ""
    least = batch_norm_least(recipe)
    smaller = [batch // part for part in (1, 2, 4, 8) if batch % part == 0 and batch // part >= max(1, least)]
    micros = tuple(
        Setting(f"micro-batch {n}", (f"train.micro_batch={n}",), gives_up=seen, number=n) for n in smaller if n != micro
    )
    changes = {"gives_up": OTHER_BATCH, "same_samples": False}
    batches = tuple(
        Setting(f"batch {n}", (f"train.batch_size={n}", f"train.micro_batch={n}"), number=n, **changes)
        for n in (batch * 2**k for k in range(1, 9))
        if n <= size
    )
    gathered = tuple(
        Setting(
            f"{n} micro-batches of {micro}" if n > 1 else f"batch {micro}, without accumulation",
            (f"train.batch_size={n * micro}", f"train.micro_batch={micro}"),
            number=n,
            **changes,
        )
        for n in (1, 2, 4)
        if n != many and n * micro <= size
    )
    no_smaller, too_few = "the batch cannot be split", "the data has no more samples"
    return [
        Switch("micro_batch", micros, absent="" if micros else no_smaller),
        # On a GPU the search is for what fits, which takes seconds a setting; a CPU has room for more than is of use.
        Switch("batch", batches, ends_when_slower=not gpu, ends_when_full=gpu, absent="" if batches else too_few),
        Switch("accumulation", gathered, absent="" if gathered else too_few),
    ]


def _between(recipe: Recipe) -> list[Switch]:
    repeated = {name: e.every for name, e in recipe.evaluations.items() if e.every is not None}
    evaluations: tuple[Setting, ...] = ()
    if repeated:
        half = tuple(f"evaluations.{name}.every={times(every, 2)}" for name, every in repeated.items())
        evaluations = (Setting("evaluations half as often", half, gives_up=FEWER_EVALUATIONS, number=2),)
        # The learning rate by plateau reads one of them.
        needed = (recipe.train.schedule.metric or "").partition("/")[0]
        if none := tuple(f"evaluations.{name}.every=null" for name in repeated if name != needed):
            title = "evaluations at start and end only" + (f", except {needed}" if needed else "")
            evaluations += (Setting(title, none, gives_up=FEWER_EVALUATIONS),)
    every = recipe.checkpoints.every
    checkpoints: tuple[Setting, ...] = ()
    if every is not None:
        less, half = FEWER_CHECKPOINTS, (f"checkpoints.every={times(every, 2)}",)
        none = ("checkpoints.every=null", "checkpoints.lose_at_most=null")
        checkpoints = (
            Setting("checkpoints half as often", half, gives_up=less, number=2),
            Setting("final checkpoint only", none, gives_up=less),
        )
    lines = (
        Setting("a log line every step", ("log.every=1 step",), gives_up=TO_SEE),
        Setting("log lines a tenth as often", (f"log.every={times(recipe.log.every, 10)}",), gives_up=FEWER_LINES),
    )
    seldom = "none between start and end"
    return [
        Switch("evaluations", evaluations, absent="" if evaluations else seldom, derived=True),
        Switch("checkpoints", checkpoints, absent="" if checkpoints else seldom, derived=True),
        Switch("log", lines if str(recipe.log.every) != "1 step" else lines[1:]),
    ]


def with_workers(number: int) -> Setting:
    """So many workers read batches."""
    title = {0: "no workers", 1: "1 worker"}.get(number, f"{number} workers")
    return Setting(title, (f"loader.workers={number}",), number=number)


def refine(tried: Sequence[int], best: int, most: int) -> list[int]:
    """Numbers halfway from the best of those tried to the adjacent ones, up to `most`: 4 of 2, 4, 8 gives 3 and 6."""
    below = max((n for n in tried if n < best), default=None)
    above = min((n for n in tried if n > best), default=None)
    halfway = {(best + n) // 2 for n in (below, above) if n is not None}
    return sorted(n for n in halfway if n not in tried and 0 <= n <= most)


def times(every: Span, factor: int) -> Span:
    """A span, so many times as long."""
    return replace(every, amount=every.amount * factor)


def merge(words: Sequence[str], more: Sequence[str]) -> tuple[str, ...]:
    """Overrides with more overrides in place of those of the same key, or after them."""
    new = {word.partition("=")[0].strip(): word for word in more}
    kept = [word for word in words if word.partition("=")[0].strip() not in new]
    return (*kept, *new.values())


def _toggle(name: str, key: str, on: bool, absent: str = "") -> Switch:
    change = Setting(f"without {name}" if on else f"with {name}", (f"{key}={'false' if on else 'true'}",))
    return Switch(name, absent=absent) if absent else Switch(name, (change,))


def _with(other: bool, workers: int, ahead: int) -> tuple[str, ...]:
    return (*((f"loader.workers={workers}",) if other else ()), f"loader.prefetch={ahead}")


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`, and `most`."""
    return sorted({*(2**k for k in range(most.bit_length()) if 2**k <= most), most})


def _other_caches(data: Data) -> list[str]:
    """Return the other values of `data.cache`; none where the data has no such key."""
    if not isinstance(data, CachesSamples):
        return []
    hint = typing.get_type_hints(type(data)).get("cache")
    return [word for word in typing.get_args(hint) if isinstance(word, str) and word != data.cache]
