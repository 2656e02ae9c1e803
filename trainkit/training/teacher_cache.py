"""Cache of teacher outputs: outputs of frozen networks over the training split, computed once.

A frozen network gives the same output for the same image in every epoch, and if mirroring is the only augmentation,
each image has two versions. So the teacher need not run in every step: batches carry its cached outputs.

Small caches are computed at every start and kept on the device in float32. Large ones, and those that a task asks to
store, are kept in half precision in the store and shared by later runs:

    <store>/outputs/<key>/              `rows` with one column, `output`: float16 (views, ...) of each sample
    <store>/outputs/.<key>.partial-*/   the same while it is computed; an interrupted computation is continued

The key is a hash of the data's digest, the network's weights and structure, the precision and the preprocessing. At
every start the file is hashed, and some samples are recomputed as an epoch draws them: damaged or wrong outputs are
computed again, and the run ends if these differ, too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import filelock
import numpy as np
import torch
from torch import Tensor, nn

from trainkit.data.loader import stream
from trainkit.data.rows.reader import Rows
from trainkit.data.rows.row_files import Form, Layout, Part, is_count, is_list, is_packed
from trainkit.data.rows.writer import Writer
from trainkit.data.split import SplitView
from trainkit.distributed.runtime import Runtime, checksum
from trainkit.errors import UserError
from trainkit.files import Json
from trainkit.interfaces import Batch, Networks, Split
from trainkit.paths import make_private
from trainkit.training.run_logger import RunLogger

IN_MEMORY = 1 << 30
"""Largest table that is kept on the device unless a task asks otherwise, in bytes of float32."""
BATCH = 64
"""Samples of one forward on each process. The same everywhere, so that a sample has the same bits on any number of
processes."""
BLOCK = 2048
"""Samples that are written and hashed together; an interruption costs what was computed since the last."""
CHECKED = 16
"""Samples that are computed again at every start."""
ROUNDING = 1e-3
"""Largest error of an output in half precision, as a share of its length; fp16 makes 3e-4 of numbers that it holds."""
TOLERANCE = {"no": 2e-3}
"""How far an output computed again may be from the one kept, as a share of its length, by precision."""
LOOSE = 5e-2
"""The same in bf16, fp16 and TF32, where kernels for other batch sizes round elsewhere: in an iResNet-50 bf16 itself is
3e-2 from float32. Another face is off by more than its length."""
_FORMAT = "trainkit outputs"
_SAID_EVERY, _WAIT = 30.0, 2.0
_REMEDY = "make room, name another store in TRAINKIT_STORE, or let the network run in every step"


class StoredOutputs(Rows):
    """Cached outputs in the store, opened for reading."""

    FORM = Form(_FORMAT, 2, "cached outputs of a teacher", counted="samples")
    ENTRIES: ClassVar = {"views": is_count, "shape": lambda shape: is_list(shape, is_count)}
    IDENTITY = ("data", "samples", "views", "shape", "weights", "structure", "precision", "pictures")

    @classmethod
    def layout(cls, manifest: Mapping[str, Json]) -> Layout:
        """Return the column: of each sample all views."""
        return [Part("output", "outputs.npy", dtype="float16", shape=(manifest["views"], *manifest["shape"][1:]))]

    def rows(self, index: Tensor, view: Tensor) -> Tensor:
        """Outputs of samples in their views, float16 (B, ...)."""
        return torch.from_numpy(self.arrays("output", index.numpy())[np.arange(len(index)), view.numpy()])


def outputs(
    networks: Networks,
    split: Split,
    runtime: Runtime,
    logger: RunLogger,
    store: Path | None,
    stopping: Callable[[], bool],
) -> Split | None:
    """Return a split whose batches carry the outputs of `networks.cached`; None if told to stop before all were made.

    Every rank takes part. `store` is the shared folder of caches; None, for tools that only measure speed: nothing is
    stored, and one output stands for all that do not fit into memory. Raises UserError as `refuse_uncountable`, and for
    outputs that do not fit half precision, cannot be written, or are others when they are computed again.
    """
    tables: dict[str, Tensor | StoredOutputs] = {}
    refuse_uncountable(networks, split)
    for name, module in networks.cached.items():
        source = _Source(name, module, split, runtime)
        if source.bytes <= IN_MEMORY and not (networks.cache_on_disk and store):
            table = tabulate(source)
        elif store is None:  # where only speeds are measured, nobody waits hours for a table
            logger.say(f"{name}: the first output stands for all {split.size:,} samples; only speed is measured")
            table = source.first[None].expand(split.size, split.views, *source.first.shape[1:])
        else:
            table = _stored(source, store, logger, stopping)
        if table is None:
            return None
        tables[name] = table
    return _Carrying(split, tables) if tables else split


def refuse_uncountable(networks: Networks, split: Split) -> None:
    """Raise UserError if outputs of `networks.cached` are to be computed once and the augmentation has no views."""
    for name in networks.cached if not split.views else ():
        remedy = "the augmentation has no countable views: mirror only, or let the network run in every step"
        raise UserError("task", f"the outputs of {name} cannot be computed once", remedy=remedy)


@dataclass(frozen=True)
class Building:
    """The cost of computing the outputs of a network once."""

    name: str
    samples: int
    views: int
    seconds: float
    """On all processes together; 0 where they are in the store already."""
    bytes: int
    """That are written to the store; 0 where they are there, or computed at every start and kept on the device."""


def forecast(networks: Networks, split: Split, runtime: Runtime, store: Path) -> list[Building]:
    """Forecast the cost of the outputs of `networks.cached` from three batches of each, without the first.

    `store` is the folder of caches. Every rank takes part. The networks must be on the device.
    """
    found = []
    for name, module in networks.cached.items() if split.views else ():
        source = _Source(name, module, split, runtime)
        stored = networks.cache_on_disk or source.bytes > IN_MEMORY
        seconds, took = 0.0, list[float]()
        if not (stored and runtime.on_main(lambda s=source: is_packed(store / s.key))):
            for number in range(3):
                began = time.perf_counter()
                source.forward((np.arange(source.batch) + number * source.batch) % split.size, view=0)
                runtime.synchronize()
                took.append(time.perf_counter() - began)
            seconds = max(runtime.all_gather(float(np.mean(took[1:])))) * source.batches
        found.append(Building(name, split.size, split.views, seconds, source.bytes // 2 if stored and seconds else 0))
    return found


def tabulate(source: _Source) -> Tensor:
    """Return outputs of a frozen network for every sample and view, float32 (samples, views, ...), on every rank.

    The result is on the device. Computing it takes twice its memory.
    """
    with source.compiled():
        values = source.block(0, source.split.size)
    return torch.from_numpy(values).to(source.runtime.device)


class _Carrying(SplitView):
    """A split whose batches carry rows of tables."""

    def __init__(self, split: Split, tables: Mapping[str, Tensor | StoredOutputs]):
        super().__init__(split)
        self._held = {name: table for name, table in tables.items() if isinstance(table, Tensor)}
        self._stored = {name: table for name, table in tables.items() if isinstance(table, StoredOutputs)}

    def __getstate__(self) -> dict[str, Any]:
        # For spawned workers, who read: tables on the device are looked up where the batch lives.
        return {**self.__dict__, "_held": {}}

    def fetch(self, indices: np.ndarray, epoch: int, view: int | None = None) -> Batch:
        """As the split does it, with what is stored of these samples, in half precision."""
        batch = super().fetch(indices, epoch, view)
        return batch | {name: table.rows(batch["index"], batch["view"]) for name, table in self._stored.items()}

    def on_device(self, batch: Batch) -> Batch:
        """As the split does it, with outputs in float32."""
        batch = super().on_device(batch)
        batch |= {name: batch[name].float() for name in self._stored}
        return batch | {name: table[batch["index"], batch["view"]] for name, table in self._held.items()}


# ---- Computing


@dataclass
class _Source:
    """A frozen network and what it is asked about."""

    name: str
    module: nn.Module
    split: Split
    runtime: Runtime
    first: Tensor = field(init=False)
    """Output for the first sample, float32 (1, ...), on the device."""

    def __post_init__(self) -> None:
        self.run: Callable[[Tensor], Tensor] = self.module  # compiled for the table alone: checks have other shapes
        _, self.first = self.forward(np.zeros(1, np.int64), view=0)
        self.shape = (self.split.size * self.split.views, *self.first.shape[1:])
        """(samples x views, ...) of the table."""
        self.bytes = 4 * int(np.prod(self.shape, dtype=np.int64))
        """Size of the table in float32."""
        self.batch = min(BATCH, self.split.at_once or BATCH, self.split.size)
        """Samples of one forward: the last ones are padded to it."""
        self.batches = -(-self.split.size // (self.batch * self.runtime.world)) * self.split.views
        self.tf32 = self.runtime.device.type == "cuda" and torch.backends.cudnn.allow_tf32
        self.tolerance = LOOSE if self.tf32 else TOLERANCE.get(self.runtime.precision, LOOSE)
        """Largest difference between two outputs of an image, as a share of their length."""

    @functools.cached_property
    def about(self) -> dict[str, Json]:
        """All that an output hangs on."""
        split, runtime, state = self.split, self.runtime, self.module.state_dict()
        seen = [self._fetched(_spread(split, 4), view=view)["image"] for view in range(split.views)]
        return {
            "data": split.digest,
            "samples": split.size,
            "views": split.views,
            "shape": list(self.shape),
            "weights": checksum(state.values()),
            "structure": hashlib.sha256(f"{self.module!r}{list(state)}".encode()).hexdigest(),
            "precision": [runtime.precision, runtime.device.type, self.tf32],
            "pictures": checksum(seen),
        }

    @property
    def key(self) -> str:
        """32 hexadecimal digits."""
        # Under the name that an earlier version gave them, so that what it stored is replaced.
        about = {**self.about, "format": _FORMAT, "version": 1, "block": BLOCK}
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]

    def _fetched(self, rows: np.ndarray, view: int | None = None, epoch: int = 0) -> Batch:
        batch = self.split.fetch(rows, epoch, view)
        if self.runtime.device.type == "cuda":  # the next is read while the device works on this one
            batch = {key: value.pin_memory() for key, value in batch.items()}
        return self.split.on_device(self.runtime.to_device(batch))

    @torch.no_grad()
    def forward(self, rows: np.ndarray, view: int | None = None, epoch: int = 0) -> tuple[Batch, Tensor]:
        """Return samples in a view, or as an epoch draws them, and their outputs, float32, on the device."""
        batch = self._fetched(rows, view, epoch)
        self.runtime.begin_batch()
        with self.runtime.accelerator.autocast():
            return batch, self.run(batch["image"]).float()

    @contextlib.contextmanager
    def compiled(self) -> Iterator[None]:
        """Have the network compiled for a whole table: the last batch is padded, so that there is one shape."""
        self.run = self.runtime.compiled(self.module, self.batches)
        try:
            yield
        finally:
            self.run = self.module

    def block(self, first: int, last: int, stopping: Callable[[], bool] = lambda: False) -> np.ndarray:
        """Return outputs of samples, float32 (samples, views, ...), on every rank.

        Raises _ToldToStop if any rank is to stop before one of the batches.
        """
        split, runtime = self.split, self.runtime
        out: list[Batch] = []
        for begin in range(first, last, self.batch * runtime.world):
            if runtime.any_async(stopping())():
                raise _ToldToStop
            rows = np.minimum(np.arange(self.batch) + begin + self.batch * runtime.rank, last - 1)
            for view in range(split.views):
                batch, value = self.forward(rows, view)
                out.append({"place": (batch["index"] - first) * split.views + view, "value": value})
        gathered = {key: runtime.gather(value).cpu().numpy() for key, value in stream.stack(out).items()}
        values = np.empty(((last - first) * split.views, *self.shape[1:]), np.float32)
        values[gathered["place"]] = gathered["value"]
        return values.reshape(last - first, split.views, *self.shape[1:])

    def disagreement(self, table: StoredOutputs) -> str:
        """Name a sample, as an epoch draws it, with another output than the one kept; empty where there is none.

        Ranks share the work, and all get the answer.
        """
        worst = (0.0, 0, 0)
        rows = _spread(self.split, CHECKED)[self.runtime.rank :: self.runtime.world]
        for begin in range(0, len(rows), self.batch):
            batch, output = self.forward(rows[begin : begin + self.batch], epoch=1)
            values, kept = output.cpu().numpy(), table.rows(batch["index"].cpu(), batch["view"].cpu()).float().numpy()
            share = _lengths(values - kept) / np.maximum(_lengths(values), np.finfo(np.float32).tiny)
            share = np.nan_to_num(share, nan=np.inf)
            at = int(share.argmax())
            worst = max(worst, (float(share[at]), int(batch["index"][at]), int(batch["view"][at])))
        share, sample, view = max(self.runtime.all_gather(worst))
        if share <= self.tolerance:
            return ""
        return f"the output of {self.name} for sample {sample} in view {view} is off by {share:.2g} of its length"


class _ToldToStop(Exception):
    """The run was told to stop while outputs were computed."""


def _stored(source: _Source, store: Path, logger: RunLogger, stopping: Callable[[], bool]) -> StoredOutputs | None:
    """The table of a source in the store, found or computed; None: the run was told to stop before it was whole."""
    runtime = source.runtime
    folder = store / runtime.on_main(lambda: source.key)
    began, reason = time.monotonic(), _unusable(source, folder)
    if not reason:
        took = f"{source.bytes / 2e6:,.1f} MB, hashed in {time.monotonic() - began:.1f} s"
        logger.say(f"{source.name}: its outputs are from {folder} ({took})")
        return StoredOutputs(folder)
    lock = filelock.FileLock(store / f".{folder.name}.lock")
    waits = False
    while not runtime.on_main(lambda: _locked(lock)):
        if not waits:
            logger.say(f"{source.name}: another run computes its outputs; waiting for it")
        waits = True
        if runtime.any_async(stopping())():
            return None
    try:
        if reason := _unusable(source, folder):  # another run may have computed them meanwhile
            _compute(source, folder, reason, logger, stopping)
            if wrong := _disagreement(source, folder):
                remedy = "does the augmentation change more than it counts? Let the network run in every step"
                error = UserError(str(folder), wrong, f"{source.tolerance:g} at most", remedy)
                error.told = not runtime.main
                raise error
    except _ToldToStop:
        return None
    finally:
        lock.release()
    return StoredOutputs(folder)


def _unusable(source: _Source, folder: Path) -> str:
    """Return, on every rank, why outputs in the store cannot be used, in words; empty where they can."""
    return source.runtime.on_main(lambda: _damage(folder, source.about)) or _disagreement(source, folder)


def _disagreement(source: _Source, folder: Path) -> str:
    if not all(source.runtime.all_gather(is_packed(folder))):
        found = "not seen by every process"
        raise UserError(str(folder), found, "a store that all machines share", "name one in TRAINKIT_STORE")
    return source.disagreement(StoredOutputs(folder))


def _damage(folder: Path, about: Mapping[str, Json]) -> str:
    if not folder.exists():
        return "none are stored"
    try:
        found = StoredOutputs(folder)
        if any(found.manifest.get(key) != about[key] for key in about):
            return "the stored outputs are of another teacher, data or setting"
        return "the stored outputs are damaged" if found.changed() else ""
    except UserError as error:
        return f"the stored outputs cannot be used: {error.found}"


def _compute(source: _Source, folder: Path, reason: str, logger: RunLogger, stopping: Callable[[], bool]) -> None:
    """Compute a table block by block and give it its name. Raises _ToldToStop."""
    runtime, split, megabytes = source.runtime, source.split, source.bytes / 2e6
    with contextlib.ExitStack() as writing:
        writers: list[Writer] = []  # on the main process alone

        def begin() -> int:
            _halved(source.first[None].cpu().numpy(), 0, source)  # before hours are spent
            shutil.rmtree(folder, ignore_errors=True)
            layout = StoredOutputs.layout(source.about)
            writer = writing.enter_context(Writer(folder, layout, key=source.key, batch_rows=BLOCK, keep=True))
            missing = megabytes * (split.size - writer.rows) / split.size
            if (free := shutil.disk_usage(writer.folder).free / 1e6) < missing:
                raise UserError(str(folder), f"{free:,.1f} MB free", f"{missing:,.1f} MB", _REMEDY)
            writers.append(writer)
            return writer.rows

        def write(first: int, values: np.ndarray) -> None:
            for sample in _halved(values, first, source):
                writers[0].add({"output": sample})

        done = runtime.on_main(begin)
        begun = f"; {done:,} are there" if done else ""
        what = f"outputs for {split.size:,} samples in {split.views} views are computed once, into {folder}"
        logger.say(f"{source.name}: {what} ({megabytes:,.1f} MB; {reason}{begun})")
        began = said = time.monotonic()
        with source.compiled():
            for first in range(done, split.size, BLOCK):
                last = min(first + BLOCK, split.size)
                values = source.block(first, last, stopping)
                runtime.on_main(lambda first=first, values=values: write(first, values))
                if (now := time.monotonic()) - said > _SAID_EVERY:
                    said, left = now, (now - began) / (last - done) * (split.size - last)
                    logger.say(f"{source.name}: {last:,} of {split.size:,} samples, {left / 60:.0f} min left")
        runtime.on_main(lambda: writers[0].publish(StoredOutputs, source.about))


def _halved(values: np.ndarray, first: int, source: _Source) -> np.ndarray:
    """Return outputs (samples, views, ...) in half precision. Raises UserError for the first that it does not hold."""
    with np.errstate(over="ignore", invalid="ignore"):
        half = values.astype(np.float16)
        flat, rounded = (one.reshape(-1, *source.shape[1:]) for one in (values, half.astype(np.float32)))
        wrong = ~(_lengths(rounded - flat) <= ROUNDING * _lengths(flat))
    if wrong.any():
        sample, view = divmod(first * source.split.views + int(wrong.argmax()), source.split.views)
        found = f"its output for sample {sample} in view {view} does not fit in half precision"
        raise UserError(source.name, found, "finite numbers of 1e-4 to 6e4", "let the network run in every step")
    return half


def _lengths(values: np.ndarray) -> np.ndarray:
    return np.linalg.norm(values.reshape(len(values), -1).astype(np.float64), axis=1)


def _spread(split: Split, many: int) -> np.ndarray:
    """Return the indices of up to so many samples, spread over the split."""
    return np.linspace(0, split.size - 1, min(many, split.size)).astype(np.int64)


def _locked(lock: filelock.FileLock) -> bool:
    folder = Path(lock.lock_file).parent
    try:
        make_private(folder)
        lock.acquire(timeout=_WAIT)
    except filelock.Timeout:
        return False
    except OSError as error:
        raise UserError(str(folder), f"cannot be written ({error.strerror or error})", remedy=_REMEDY) from None
    return True
