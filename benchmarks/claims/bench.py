"""The recipes at hand, trainings beside each other, and costs set against a step: what measurements share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.results import Skipped
from trainkit.config.run_request import RunRequest, load
from trainkit.diagnostics import stepped_process
from trainkit.diagnostics.stepped_process import Ratio, Ready, SteppedProcess, SteppedProcessError
from trainkit.errors import UserError
from trainkit.training import dependencies

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
PATIENCE, COMPILING = 240.0, 600.0
"""Seconds without a word after which a training is given up, and one that compiles."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a measurement gave."""

    ratio: float | None = None
    """How many times as good it is with what the guide advises; None where nothing is a ratio."""
    low: float | None = None
    high: float | None = None
    """Ends of the 95 % interval."""
    true: bool | None = None
    """Of a statement that is computed: whether it is so."""
    text: str = ""
    """What was seen, in words."""


@dataclass(frozen=True, kw_only=True)
class Guide:
    """Where a claim stands, and the recipes that it was said of: the first whose data are here is taken."""

    title: str
    large: tuple[str, ...] = ()
    """Recipes for a GPU."""
    small: tuple[str, ...]


GUIDES = {
    "faces": Guide(
        title="Face recognition by distillation (AdaDistill)",
        large=("adadistill_ms1mv2",),
        small=("adadistill_lfw", "adadistill", "face_teacher"),
    ),
    "eyes": Guide(title="Open and closed eyes (ConvNeXt and baseline)", small=("eye_state",)),
    "people": Guide(title="Cross-modal person re-identification", large=("reid_orbench",), small=("reid",)),
    "scenes": Guide(title="Segmentation of scenes (BiSeNet)", large=("cityscapes",), small=("camvid", "segment")),
    "organs": Guide(title="Segmentation of organs (TOM500)", large=("tom500_full",), small=("tom500",)),
}


def found_ratio(ratio: Ratio, text: str) -> Found:
    return Found(ratio=ratio.value, low=ratio.low, high=ratio.high, text=text)


@dataclass
class Parts:
    """A recipe's model and a batch of its training data in this process."""

    recipe: Any
    data: Any
    net: Any
    parts: Any
    rows: np.ndarray
    """Of the first micro-batch."""
    device: Any

    def batch(self, rows: np.ndarray) -> Any:
        """A batch on the device, as the loop has it."""
        host = self.data.train.fetch(rows, 0)
        return self.data.train.on_device({key: value.to(self.device) for key, value in host.items()})

    def loss(self, batch: Any) -> Any:
        """The loss of a batch."""
        from trainkit.interfaces import StepContext

        at = StepContext(0, 0, 0.0, lambda x, grad=False: x, nullcontext)
        return self.recipe.task.loss(self.net, self.parts, batch, at)


@dataclass
class Bench:
    """The recipes at hand, and what was measured of them as shipped."""

    store: Any
    gpu: bool
    repeats: int = 5
    block: float = 1.5
    """Seconds of a block of steps."""
    cores: float = 1.0
    plugins: tuple[str, ...] = ()
    guides: Mapping[str, Guide] = field(default_factory=lambda: GUIDES)
    folder: Path = RECIPES

    def __post_init__(self) -> None:
        self._chosen: dict[str, Path] = {}
        self._updates: dict[str, tuple[list[float], Ready]] = {}
        self._parts: tuple[str, Parts] | None = None

    # ---- which recipe

    def chosen(self, guide: str) -> Path:
        """The file of the guide's first recipe whose data and weights are here; raises Skipped where there is none."""
        if guide not in self._chosen:
            names = (*(self.guides[guide].large if self.gpu else ()), *self.guides[guide].small)
            lacks = {name: self._lacks(self.folder / f"{name}.yaml") for name in names}
            found = next((name for name, why in lacks.items() if not why), None)
            if found is None:
                reasons = "; ".join(f"{name}: {why}" for name, why in lacks.items())
                raise Skipped(f"no recipe can be trained here: {reasons}")
            self._chosen[guide] = self.folder / f"{found}.yaml"
        return self._chosen[guide]

    def _lacks(self, path: Path) -> str:
        """What keeps a recipe from being trained here; empty when nothing does."""
        request = RunRequest(path, (), self.plugins)
        try:
            recipe = load(request)
            if recipe.data.missing():
                return "its data are not here"
            self._weights(request, recipe)
        except UserError as error:
            return f"{Path(error.where).name} {error.found}" if error.found else str(error)
        return ""

    def _weights(self, request: RunRequest, recipe: Any) -> dict[str, Path]:
        """The files of weights that a recipe needs, by name."""
        runtime: Any = SimpleNamespace(on_main=lambda ask: ask(), main=False)
        found = dependencies.gather(request, recipe, runtime, self.store, None)
        return {name: dependency.file for name, dependency in found.items()}

    def words(self, words: Sequence[str]) -> tuple[str, ...]:
        """Words with the machine's numbers in them."""
        return tuple(word.replace("{cores}", str(max(1, int(self.cores)))) for word in words)

    def request(self, guide: str, words: Sequence[str] = ()) -> RunRequest:
        """The guide's recipe with some changes."""
        return RunRequest(self.chosen(guide), tuple(words), self.plugins)

    # ---- trainings in processes of their own

    @contextmanager
    def training(
        self,
        guide: str,
        words: Sequence[str] = (),
        environment: Sequence[tuple[str, str | None]] = (),
        patience: float = PATIENCE,
    ) -> Iterator[SteppedProcess]:
        """A training of the guide's recipe that has made its first step. Raises Skipped where it ends by itself."""
        try:
            with SteppedProcess(self.request(guide, words), dict(environment), patience=patience) as child:
                child.go(1)
                yield child
        except SteppedProcessError as error:
            raise Skipped(f"a training ended: {error.reason}") from None

    def count(self, child: SteppedProcess) -> int:
        """How many steps of a training are a block."""
        return max(1, round(self.block / max(child.go(1).seconds, 1e-6)))

    def updates(self, guide: str) -> list[float]:
        """Seconds of a step of the recipe as shipped, by repeat."""
        if guide not in self._updates:
            with self.training(guide) as child:
                many = self.count(child)
                seconds = [child.go(many).seconds / many for _ in range(self.repeats)]
                self._updates[guide] = seconds, child.ready
        return self._updates[guide][0]

    def ready(self, guide: str) -> Ready:
        """What the recipe as shipped said when it began: steps of an epoch and sizes of batches."""
        self.updates(guide)
        return self._updates[guide][1]

    def evaluation(self, guide: str, name: str) -> tuple[float, bool]:
        """Seconds of an evaluation, of EMA weights too where there are such, and whether it was held."""
        with self.training(guide) as child:
            seconds, held = child.evaluate(name, 20.0)
        return (2 if load(self.request(guide)).train.ema else 1) * seconds, held

    # ---- in this process

    def parts(self, guide: str) -> Parts:
        """The recipe's model and data in this process."""
        if self._parts is None or self._parts[0] != guide:
            self._parts = (guide, self._built(guide))
        return self._parts[1]

    def _built(self, guide: str) -> Parts:
        import torch

        request = self.request(guide)
        recipe = load(request)
        device = torch.device("cuda" if self.gpu else "cpu")
        data = recipe.data.open(recipe.seed)
        torch.manual_seed(0)
        parts = recipe.task.build(data.meta, self._weights(request, recipe), recipe.seed)
        for module in (parts.model, *parts.frozen.values(), parts.memory):
            if module is not None:
                module.to(device)
        size = recipe.train.micro_batch or recipe.train.batch_size
        rows = np.asarray(data.train.order(0, recipe.train.batch_size)[0, 0:size])
        parts.model.train()
        return Parts(recipe, data, parts.model, parts, rows, device)

    def against(self, guide: str, before: Sequence[float], after: Sequence[float]) -> Ratio:
        """How much faster a training is whose steps cost `after` seconds more instead of `before`, by repeat."""
        updates = self.updates(guide)
        slow = [1 / (s + b) for s, b in zip(updates, before, strict=True)]
        fast = [1 / (s + a) for s, a in zip(updates, after, strict=True)]
        return stepped_process.ratio(fast, slow)

    def timed(self, call: Callable[[], Any], seconds: float = 0.15) -> list[float]:
        """Seconds of a call, by repeat."""
        call()
        tried: list[float] = []
        while len(tried) < 2 or (len(tried) < 3 and sum(tried) < seconds):  # one may be held up by others
            began = time.perf_counter()
            call()
            tried.append(time.perf_counter() - began)
        many = min(max(1, int(seconds / max(min(tried), 1e-8))), 200_000)
        out = []
        for _ in range(self.repeats):
            began = time.perf_counter()
            for _ in range(many):
                call()
            self.wait()
            out.append((time.perf_counter() - began) / many)
        return out

    def wait(self) -> None:
        if self.gpu:
            import torch

            torch.cuda.synchronize()


def cost(bench: Bench, guide: str, before: Sequence[float], after: Sequence[float], what: str) -> Found:
    """Return a cost per step, relative to the step."""
    ratio = bench.against(guide, before, after)
    update = float(np.median(bench.updates(guide)))
    said = f"{what} {short(np.median(before))} per step as in the guide, {short(np.median(after))} here"
    return found_ratio(ratio, f"{said}; a step takes {short(update)}")


def short(seconds: float) -> str:
    """Write seconds with three digits in the unit that fits."""
    for factor, unit in ((1e9, "ns"), (1e6, "us"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"
