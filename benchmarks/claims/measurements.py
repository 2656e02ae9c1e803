"""Measurements of claims: parts of a training timed alone, and arithmetic.

Something that costs little is timed on its own, as the guide had it and as it is here, and set against the seconds of
a step of the recipe it was said of: `(update + cost as the guide had it) / (update + cost as it is here)`. What
follows from numbers alone is computed.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.claims.bench import PATIENCE, Bench, Found, cost, found_ratio, short
from benchmarks.results import Skipped
from trainkit.config.run_request import load
from trainkit.diagnostics import stepped_process

# ---- Parts timed by themselves ---------------------------------------------------------------------------------------


class _Callback:
    """An evaluation that is asked at every step and mostly goes back at once, as the guide describes it."""

    def __init__(self, every: int):
        self.every, self.rank, self.held = every, 0, 0

    def __call__(self, step: int, net: Any) -> None:
        if self.rank == 0 and step > 0 and step % self.every == 0:
            self.held += 1


def callbacks_that_return(bench: Bench, guide: str) -> Found:
    """Three callbacks at every step, none of which has anything to do."""
    calls = [_Callback(10**9), _Callback(10**9 + 1), _Callback(10**9 + 2)]

    def ask() -> None:
        for call in calls:
            if call is not None:
                call(1050, None)

    before = bench.timed(ask, 0.05)
    return cost(bench, guide, before, [0.0] * len(before), "three calls that return take")


def switching_modes(bench: Bench, guide: str) -> Found:
    """The model set to evaluation and back to training at every step."""
    net = bench.parts(guide).net

    def switch() -> None:
        net.eval()
        net.train()

    before = bench.timed(switch, 0.05)
    return cost(bench, guide, before, [0.0] * len(before), "eval() and train() take")


def _sampling(bench: Bench, guide: str) -> tuple[list[float], list[float]]:
    """Seconds to choose a batch: by reading each of its records to see what it is, and by an index made once."""
    parts = bench.parts(guide)
    split, size = parts.data.train, len(parts.rows)

    def infer() -> dict[int, list[str]]:
        kinds: dict[int, list[str]] = {}
        for row in parts.rows:
            sample = split.fetch(np.asarray([row]), 0)
            kinds[int(row)] = [name for name in sample if name.startswith("image") or name == "text"]
        return kinds

    def batches() -> Iterator[np.ndarray]:
        for epoch in range(10**9):  # one after another, as a training asks for them: nothing is drawn twice
            order = split.order(epoch, parts.recipe.train.batch_size)
            for update in range(len(order)):
                yield order[update, 0:size]

    drawn = batches()
    return bench.timed(infer), bench.timed(lambda: next(drawn), 0.2)


def sampler_alone(bench: Bench, guide: str) -> Found:
    """Batches chosen with and without an index."""
    before, after = _sampling(bench, guide)
    slow, fast = short(np.median(before)), short(np.median(after))
    said = f"selecting a batch takes {slow} by reading its records, {fast} from the index"
    return found_ratio(stepped_process.ratio([1 / a for a in after], [1 / b for b in before]), said)


def sampler_in_training(bench: Bench, guide: str) -> Found:
    """The same, as a part of steps."""
    return cost(bench, guide, *_sampling(bench, guide), "selecting a batch takes")


def index_seconds(bench: Bench, guide: str) -> Found:
    """The index of 14,910 records of 320 people, against the 5 s that it may take."""
    from trainkit.data.people.pk_sampler import Cells, Draw, ModalPK

    rng = np.random.default_rng(0)
    person, kind = rng.integers(0, 320, 14_910).astype(np.int32), rng.integers(0, 5, 14_910).astype(np.int8)
    spec = ModalPK(people=8, each=4)
    took = bench.timed(lambda: Draw(spec, Cells.make(person, kind, 320), 0), 0.1)
    ratio = stepped_process.ratio([5 / s for s in took], [1.0] * len(took))
    return found_ratio(ratio, f"made in {short(np.median(took))}; the ratio is of 5 s to that")


def debug_lines(bench: Bench, guide: str) -> Found:
    """A line of figures printed at every step, and one every hundred."""
    import torch

    size = len(bench.parts(guide).rows)
    features = [torch.randn(size, 256, device=bench.parts(guide).device) for _ in range(6)]
    out = open(os.devnull, "w")  # noqa: SIM115  kept open over all calls, as a terminal is

    def line() -> None:
        figures = [f"{f.norm(dim=1).mean().item():.4f}" for f in features]
        print("[monitor] epoch 1, batch 200:", ", ".join(figures), file=out, flush=True)

    before = bench.timed(line, 0.05)
    out.close()
    return cost(bench, guide, before, [b / 100 for b in before], "a printed line of six norms takes")


def gradient_norms(bench: Bench, guide: str) -> Found:
    """The norm of the gradient read parameter by parameter and then clipped by, and one norm that is clipped by."""
    import torch

    parts = bench.parts(guide)
    parameters = [p for p in parts.net.parameters() if p.requires_grad]
    for p in parameters:
        p.grad = torch.randn_like(p) * 1e-6

    def each() -> float:
        total = sum(p.grad.norm(2).item() ** 2 for p in parameters) ** 0.5
        torch.nn.utils.clip_grad_norm_(parameters, 5.0)
        return total

    before = bench.timed(each)
    after = bench.timed(lambda: torch.nn.utils.clip_grad_norm_(parameters, 5.0))
    seldom = [a + (b - a) / 200 for a, b in zip(after, before, strict=True)]
    for p in parameters:
        p.grad = None
    return cost(bench, guide, before, seldom, "norm and clipping take")


def progress_bar(bench: Bench, guide: str) -> Found:
    """A progress bar redrawn every 5 steps, and every 10."""
    from tqdm import tqdm

    bar = tqdm(total=10**9, file=io.StringIO(), mininterval=0, miniters=1)

    def draw() -> None:
        bar.set_postfix({"loss": "1.2345", "lr": "0.001"}, refresh=False)
        bar.update(1)

    once = bench.timed(draw, 0.05)
    bar.close()
    return cost(bench, guide, [b / 5 for b in once], [b / 10 for b in once], "drawing a bar takes")


def all_of_it(bench: Bench, guide: str) -> Found:
    """All that the guide changed and that is not a GPU's: sampler, lines, norms and bar together."""
    update = bench.updates(guide)
    before, after = ([0.0] * len(update) for _ in range(2))
    choose = _sampling(bench, guide)
    for i in range(len(update)):
        before[i] += choose[0][i]
        after[i] += choose[1][i]
    for part in (debug_lines, gradient_norms, progress_bar):
        found = part(bench, guide)
        spared = (found.ratio - 1) * float(np.median(update))
        before = [b + spared for b in before]
    return cost(bench, guide, before, after, "sampler, printed lines, norms and bar take")


class _Batches:
    """As many batches of a split as workers, one an item."""

    def __init__(self, split: Any, rows: np.ndarray, many: int):
        self.split, self.rows, self.many = split, rows, many

    def __len__(self) -> int:
        return self.many

    def __getitem__(self, i: int) -> Any:
        return self.split.fetch(self.rows, 0)


def _workers_that_stay(bench: Bench, guide: str, start: str | None) -> Found:
    from torch.utils.data import DataLoader

    parts, workers = bench.parts(guide), 2
    batches = _Batches(parts.data.train, parts.rows, workers)

    def epochs(stay: bool) -> list[float]:
        loader = DataLoader(
            batches,
            batch_size=None,
            num_workers=workers,
            persistent_workers=stay,
            multiprocessing_context=start,
            timeout=PATIENCE,
        )
        took = []
        for _ in range(bench.repeats + 1):
            began = time.perf_counter()
            for _ in loader:
                pass
            took.append(time.perf_counter() - began)
        return took[1:]  # the first epoch starts workers in either case

    before, after = epochs(False), epochs(True)
    many = bench.ready(guide).steps_per_epoch
    found = bench.against(guide, [b / many for b in before], [a / many for a in after])
    started = float(np.median(before)) - float(np.median(after))
    how = "started by " + (start or "the system's default method")
    epoch = many * float(np.median(bench.updates(guide)))
    return found_ratio(
        found, f"{workers} workers, {how}, cost {short(max(started, 0.0))} more; an epoch takes {epoch:.3g} s"
    )


def workers_that_stay(bench: Bench, guide: str) -> Found:
    """Workers that live from epoch to epoch."""
    return _workers_that_stay(bench, guide, None)


def spawned_workers_that_stay(bench: Bench, guide: str) -> Found:
    """The same, started as Windows starts them."""
    return _workers_that_stay(bench, guide, "spawn")


def distance_maps(bench: Bench, guide: str) -> Found:
    """Distance maps computed in every step, and read (which is part of a step)."""
    from trainkit.data.scenes import boundary_distance

    parts = bench.parts(guide)
    masks = parts.data.train.fetch(parts.rows, 0)["mask"].numpy()
    cap = boundary_distance.Distance().cap
    before = [len(masks) * s for s in bench.timed(lambda: boundary_distance.from_mask(masks[0], cap))]
    return cost(bench, guide, before, [0.0] * len(before), "maps of a batch of crops take")


def scales(bench: Bench, guide: str) -> Found:
    """An evaluation at several sizes of the image, and at one."""
    recipe = load(bench.request(guide))
    many = next((name for name, e in recipe.evaluations.items() if (e.split or "").endswith(".msf")), None)
    one = next((name for name, e in recipe.evaluations.items() if e.split is None), None)
    if many is None or one is None:
        raise Skipped(f"{recipe.name} has no evaluation at several sizes")
    took = [(bench.evaluation(guide, many)[0], bench.evaluation(guide, one)[0]) for _ in range(2)]
    ratio = stepped_process.ratio([1 / b for _, b in took], [1 / a for a, _ in took])
    return found_ratio(ratio, f"{took[0][0]:.3g} s at {len(recipe.data.eval_scales)} sizes, {took[0][1]:.3g} s at one")


def compiled_inference(bench: Bench, guide: str) -> Found:
    """What the model predicts, compiled and as it is."""
    import torch

    parts = bench.parts(guide)
    batch, net = parts.batch(parts.rows), parts.net.eval()
    compiled = torch.compile(net)
    out: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad():
        for which in (net, compiled):
            which(batch["image"])
        for i in range(bench.repeats):
            pair = [(0, net), (1, compiled)]
            for side, which in pair if i % 2 == 0 else pair[::-1]:
                began = time.perf_counter()
                many = 0
                while many < 2 or time.perf_counter() - began < bench.block / 2:
                    which(batch["image"])
                    bench.wait()
                    many += 1
                out[side].append(many / (time.perf_counter() - began))
    parts.net.train()
    plain, fast = (len(parts.rows) * np.median(rates) for rates in out)
    return found_ratio(stepped_process.ratio(out[1], out[0]), f"{plain:.4g} samples/s uncompiled, {fast:.4g} compiled")


# ---- Statements that are computed ------------------------------------------------------------------------------------


def two_portions(bench: Bench, guide: str) -> Found:
    """The gradient of a batch, and of its two halves one after the other, normalised as the loop does it.

    Dropout is off. A second comparison holds the statistics of batch norm fixed, to see whether these are the reason.
    """
    import torch

    parts = bench.parts(guide)
    rows, block = parts.rows, parts.data.block
    if block > 1:  # micro-batches of P x K: two blocks are a batch
        rows = np.asarray(parts.data.train.order(0, 2 * block)[0, 0 : 2 * block])
    half = len(rows) // 2
    first = {key: value.clone() for key, value in parts.net.state_dict().items()}
    kinds = torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.dropout._DropoutNd
    norms, drops = ([m for m in parts.net.modules() if isinstance(m, kind)] for kind in kinds)

    def gradient(portions: Sequence[np.ndarray]) -> torch.Tensor:
        parts.net.load_state_dict(first)
        parts.net.zero_grad(set_to_none=True)
        weight = 0.0
        for portion in portions:
            torch.manual_seed(0)
            loss = parts.loss(parts.batch(portion))
            weight += float(loss.weight)
            loss.sum.backward()
        found = torch.cat([p.grad.flatten() for p in parts.net.parameters() if p.grad is not None])
        parts.net.zero_grad(set_to_none=True)
        return found / weight

    def off() -> float:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # whose rounding would be taken for it
            whole, halves = gradient([rows[: 2 * half]]), gradient([rows[:half], rows[half : 2 * half]])
        return float((whole - halves).norm() / whole.norm())

    for module in drops:
        module.eval()
    shipped = off()
    for module in norms:
        module.eval()
    fixed = off() if norms else shipped
    parts.net.load_state_dict(first)
    parts.net.train()
    text = f"the gradient of 2 x {half} samples differs from that of {2 * half} by {_percent(shipped)} of its length"
    if norms:
        text += f"; with fixed batch norm statistics by {_percent(fixed)}"
    if fixed > 1e-3:
        text += ", since the loss compares or selects samples within a micro-batch"
    return Found(true=shipped <= 1e-3, text=text)


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def half_the_memory(bench: Bench, guide: str) -> Found:
    """Bytes that backward keeps for a sample, against the 2 GB that the rule gives it."""
    import torch

    parts = bench.parts(guide)

    def kept(rows: np.ndarray) -> int:
        seen: dict[int, int] = {}

        def note(x: torch.Tensor) -> torch.Tensor:
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            held.append(x)
            return x

        held: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            parts.loss(parts.batch(rows))
        return sum(seen.values())

    one, two = kept(np.repeat(parts.rows, 2)[:2]), kept(np.repeat(parts.rows, 4)[:4])
    each = (two - one) / 2 / 1e9
    weights = sum(p.numel() for p in parts.net.parameters()) * 16 / 1e9
    fits = max(0.0, 24 - weights) / each
    said = (
        f"the backward pass keeps {1000 * each:.3g} MB per sample here, so about {fits:,.0f} fit into 24 GB, "
        "and the rule says 12"
    )
    return Found(true=6 <= fits <= 24, text=f"{said}; it depends neither on the model nor on the sample size")
