"""Compiled training: what `auto` decides and a resume keeps, and outputs that CUDA graphs write over at every call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from runs import PLUGIN, ROOT, TOY, overrides, run, stop_after
from torch import Tensor

from tests.whole_runs.test_classification import CONVNEXT, pictures  # noqa: F401 - a fixture
from tests.whole_runs.test_classification import words as of_pictures
from tests.whole_runs.test_reid import REID, sets  # noqa: F401
from tests.whole_runs.test_reid import words as of_sets
from tests.whole_runs.test_segmentation_2d import SEGMENT, streets  # noqa: F401
from tests.whole_runs.test_segmentation_2d import words as of_streets
from tests.whole_runs.test_segmentation_3d import TOM500, bodies  # noqa: F401
from tests.whole_runs.test_segmentation_3d import words as of_bodies
from trainkit.checkpoint import safe_load
from trainkit.config import loader
from trainkit.config.run_request import RunRequest, load
from trainkit.distributed import launch_settings
from trainkit.distributed.runtime import Runtime
from trainkit.models import face_backbones
from trainkit.training import teacher_cache
from trainkit.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("store")
DISTIL = ROOT / "recipes" / "adadistill.yaml"
TEACHER = "{net: {name: iresnet18, embedding: 16, width: 0.0625}, weights: teacher.safetensors}"


def of_faces(_: object) -> list[str]:
    """Distillation from a teacher that runs in every update."""
    settings = {
        "task.student": "{name: mobilefacenet, embedding: 16, width: 0.125}",
        "task.teacher": TEACHER,
        "task.cache_teacher": "false",
        "data.image_size": "16",
        "train": "{length: 4 steps, batch_size: 16, micro_batch: 8, ema: 0.9}",
        "evaluations": "{sample: {every: 4 steps}}",
    }
    return overrides(settings, {})


KINDS = {
    "toy": (TOY, None, lambda _: ["task.dropout=0.2"]),
    "adadistill": (DISTIL, None, of_faces),
    "convnext": (CONVNEXT, "pictures", of_pictures),
    "reid": (REID, "sets", of_sets),
    "segment": (SEGMENT, "streets", of_streets),
    "tom500": (TOM500, "bodies", of_bodies),
}


class Graphs:
    """A compiler whose code returns the same memory at every call, gradients included, as CUDA graphs do.

    What stands there when a step begins is lost.
    """

    def __init__(self) -> None:
        self.memory: list[Tensor] = []
        self.steps = self.compiled = 0

    def begin(self) -> None:
        self.steps += 1
        for held in self.memory:
            held.fill_(torch.nan if held.is_floating_point() else 0)

    def backend(self, graph, inputs):
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def compiler(code, _):
            self.compiled += 1
            own: dict[int, Tensor] = {}

            def same_memory(at: int, t: object) -> object:
                if not isinstance(t, Tensor):
                    return t
                if at not in own or own[at].shape != t.shape:
                    own[at] = torch.empty_like(t)
                    self.memory.append(own[at])
                return own[at].copy_(t).detach()

            return make_boxed_func(lambda *args: [same_memory(at, t) for at, t in enumerate(code(*args))])

        return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)(graph, inputs)


@contextlib.contextmanager
def compiling(monkeypatch, backend) -> Iterator[None]:
    """Let `torch.compile` use a backend that translates nothing into C++."""
    torch._dynamo.reset()
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda net, *, mode=None, **_: plain(net, backend=backend))
    try:
        yield
    finally:
        monkeypatch.setattr(torch, "compile", plain)
        torch._dynamo.reset()


@pytest.fixture
def graphs(monkeypatch) -> Iterator[Graphs]:
    """CUDA graphs, as far as memory goes, on a CPU."""
    made = Graphs()
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", made.begin)
    with compiling(monkeypatch, made.backend):
        yield made


@pytest.fixture
def weights(tmp_path) -> dict[str, object]:
    torch.manual_seed(3)
    net = face_backbones.build(
        face_backbones.IResNetSpec(name="iresnet18", embedding=16, width=0.0625), (3, 16, 16)
    )
    file = tmp_path / "teacher.safetensors"
    safe_load.write_tensors(file, net.state_dict())
    return {"teacher": file}


def trained(kind: str, data: object, weights, *more: str, steps: int = 3) -> dict[str, object]:
    """Losses and logs of a few updates, read after the last, scores with and without averaged weights, and weights."""
    path, _, words = KINDS[kind]
    recipe = load(RunRequest(path, [*words(data), *more], ("toy",) if path == TOY else ()))
    found = weights if kind == "adadistill" else None
    with Trainer(recipe, recipe.data.open(recipe.seed), Runtime(recipe), weights=found) as trainer:
        trainer.evaluator.measure_costs()
        trainer.open()
        updates = []
        for _ in range(steps):
            updates += trainer.step().losses
            trainer.after_step()
        scores = {}
        for name in recipe.evaluations:
            scores[name] = dict(trainer.evaluator.score(trainer.model.bare, name).metrics)
            with trainer.model.ema.swapped(trainer.model.bare):
                scores[f"{name}/ema"] = dict(trainer.evaluator.score(trainer.model.bare, name).metrics)
        kept = {"losses": [loss.sum for loss in updates], "logs": [dict(loss.logs) for loss in updates]}
        kept |= {"meter": trainer.meter.read(), "scores": scores, "ema": trainer.model.ema.tensors}
        memory = trainer.model.networks.memory
        return kept | {"model": trainer.model.bare.state_dict(), "memory": memory and memory.state_dict()}


@pytest.mark.parametrize(
    "kind", [k if k in ("toy", "adadistill") else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)
def test_what_a_step_keeps_of_cuda_graphs_is_not_written_over(kind, graphs, weights, request, monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))
    data = KINDS[kind][1] and request.getfixturevalue(KINDS[kind][1])
    plain = trained(kind, data, weights)
    assert not graphs.compiled
    seen = trained(kind, data, weights, "train.compile=reduce-overhead")
    assert graphs.compiled >= 2 and graphs.steps >= 6  # two micro-batches each
    torch.testing.assert_close(seen, plain, rtol=1e-2, atol=3e-4)  # segment chooses the hardest pixels
