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

from trainkit.config.run_request import RunRequest, load
from trainkit.diagnostics import stepped_process
from trainkit.diagnostics.stepped_process import Ratio, SteppedProcess, SteppedProcessError
from trainkit.errors import UserError

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
REVISION = 1
"""Raised when a measurement is made otherwise, so that its figure means something else: all are then measured again."""
PATIENCE, COMPILING = 240.0, 600.0
"""Seconds without a word after which a training is given up, and one that compiles."""


class Unable(Exception):
    """Why a claim has no figure on this machine."""


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
    """The recipes at hand, and what was measured of them as shipped; one training is kept for the next claim."""

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
        self._chosen: dict[str, tuple[Path, str]] = {}
        self._updates: dict[str, list[float]] = {}
        self._evaluations: dict[tuple[str, str], tuple[float, bool]] = {}
        self._ready: dict[str, Any] = {}
        self._pairs: dict[Any, Any] = {}
        self._open: tuple[Any, SteppedProcess] | None = None
        self._parts: tuple[str, Parts] | None = None

    def close(self) -> None:
        """End the training that is kept."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    # ---- which recipe

    def chosen(self, guide: str) -> tuple[Path, str]:
        """The recipe's file, and why it is not the first of its guide; raises Unable where there is none."""
        if guide not in self._chosen:
            names = (*(self.guides[guide].large if self.gpu else ()), *self.guides[guide].small)
            reasons: list[str] = []
            for name in names:
                path = self.folder / f"{name}.yaml"
                why = self._lacks(path)
                if not why:
                    self._chosen[guide] = (path, "; ".join(reasons))
                    break
                reasons.append(f"{name}: {why}")
            else:
                raise Unable("no recipe can be trained here: " + "; ".join(reasons))
        return self._chosen[guide]

    def _lacks(self, path: Path) -> str:
        """What keeps a recipe from being trained here; empty when nothing does."""
        from trainkit.training.dependencies import gather

        request = RunRequest(path, (), self.plugins)
        try:
            recipe = load(request)
            if recipe.data.missing():
                return "its data are not here"
            gather(request, recipe, SimpleNamespace(on_main=lambda ask: ask(), main=False), self.store, None)
        except UserError as error:
            return f"{Path(error.where).name} {error.found}" if error.found else str(error)
        return ""

    def words(self, words: Sequence[str]) -> tuple[str, ...]:
        """Words with the machine's numbers in them."""
        return tuple(word.replace("{cores}", str(max(1, int(self.cores)))) for word in words)

    def request(self, guide: str, words: Sequence[str] = ()) -> RunRequest:
        """The guide's recipe with some changes."""
        return RunRequest(self.chosen(guide)[0], tuple(words), self.plugins)

    # ---- trainings in processes of their own

    @contextmanager
    def _beside(
        self, request: RunRequest, environment: Sequence[tuple[str, str | None]], patience: float
    ) -> Iterator[SteppedProcess]:
        with SteppedProcess(request, dict(environment), patience=patience) as child:
            child.go(1)
            yield child

    def _kept(
        self, request: RunRequest, environment: Sequence[tuple[str, str | None]], patience: float
    ) -> SteppedProcess:
        """A training that is left standing for the next measurement, which often begins from the same."""
        key = (request.path, tuple(request.overrides), tuple(environment))
        if self._open is None or self._open[0] != key:
            self.close()
            child = SteppedProcess(request, dict(environment), patience=patience)
            self._open = (key, child)
            child.go(1)
        return self._open[1]

    def _count(self, child: SteppedProcess) -> int:
        return max(1, round(self.block / max(child.go(1).seconds, 1e-6)))

    def pairs(self, guide: str, before: Any, blank: Any, after: Any, environment: Any, patience: float) -> list[Any]:
        """Blocks of two trainings in turns. Raises Unable where one of them cannot continue."""
        key = (guide, before, blank, after, environment)
        if key not in self._pairs:
            try:
                one = self._kept(self.request(guide, before), blank, patience)
                with self._beside(self.request(guide, after), environment, patience) as other:
                    updates = self._count(one), self._count(other)
                    self._pairs[key] = list(stepped_process.in_turns(one, other, updates, self.repeats))
            except SteppedProcessError as error:
                self.close()
                raise Unable(f"a training ended: {error.reason}") from None
        return self._pairs[key]

    def _shipped(self, guide: str) -> SteppedProcess:
        try:
            return self._kept(self.request(guide), (), PATIENCE)
        except SteppedProcessError as error:
            self.close()
            raise Unable(f"a training ended: {error.reason}") from None

    def updates(self, guide: str) -> list[float]:
        """Seconds of a step of the recipe as shipped, by repeat."""
        if guide not in self._updates:
            child = self._shipped(guide)
            self._ready[guide] = child.ready
            many = self._count(child)
            self._updates[guide] = [child.go(many).seconds / many for _ in range(self.repeats)]
        return self._updates[guide]

    def ready(self, guide: str) -> Any:
        """What the recipe as shipped said when it began: steps of an epoch and sizes of batches."""
        self.updates(guide)
        return self._ready[guide]

    def evaluation(self, guide: str, name: str) -> tuple[float, bool]:
        """Seconds of an evaluation, of EMA weights too where there are such, and whether it was held."""
        if (guide, name) not in self._evaluations:
            twice = 2 if load(self.request(guide)).train.ema else 1
            try:
                seconds, held = self._shipped(guide).evaluate(name, 20.0)
            except SteppedProcessError as error:
                self.close()
                raise Unable(f"a training ended: {error.reason}") from None
            self._evaluations[guide, name] = twice * seconds, held
        return self._evaluations[guide, name]

    # ---- in this process

    def parts(self, guide: str) -> Parts:
        """The recipe's model and data in this process."""
        if self._parts is None or self._parts[0] != guide:
            self._parts = (guide, self._built(guide))
        return self._parts[1]

    def _built(self, guide: str) -> Parts:
        import torch

        from trainkit.training.dependencies import gather

        request = self.request(guide)
        recipe = load(request)
        dependencies = gather(request, recipe, SimpleNamespace(on_main=lambda ask: ask(), main=False), self.store, None)
        device = torch.device("cuda" if self.gpu else "cpu")
        data = recipe.data.open(recipe.seed)
        torch.manual_seed(0)
        parts = recipe.task.build(
            data.meta, {name: dependency.file for name, dependency in dependencies.items()}, recipe.seed
        )
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
