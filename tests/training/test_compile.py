"""Compiled training: what `auto` decides and a resume keeps, and outputs that CUDA graphs write over at every call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

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
from trainkit.models.network_specs import IResNetSpec
from trainkit.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("store", "unsent")
DISTIL = ROOT / "recipes" / "adadistill.yaml"
TEACHER = "{net: {name: iresnet18, embedding: 16, width: 0.0625}, weights: teacher.safetensors}"


def of_faces(_: object, **changes: str) -> list[str]:
    """Distillation from a teacher that runs in every update."""
    settings = {
        "task.student": "{name: mobilefacenet, embedding: 16, width: 0.125}",
        "task.teacher": TEACHER,
        "task.cache_teacher": "false",
        "data.image_size": "16",
        "train": "{length: 4 steps, batch_size: 16, micro_batch: 8, ema: 0.9}",
        "evaluations": "{sample: {every: 4 steps}}",
    }
    return overrides(settings, changes)


def of_pixels(streets_root, **changes: str) -> list[str]:
    """Scenes by SGD: Adam makes a step of a whole rate of a gradient that is nothing but rounding."""
    return of_streets(streets_root, optim="{name: sgd, lr: 0.001}", **changes)


KINDS = {
    "toy": (TOY, None, lambda _: ["task.dropout=0.2"]),
    "adadistill": (DISTIL, None, of_faces),
    "convnext": (CONVNEXT, "pictures", of_pictures),
    "reid": (REID, "sets", of_sets),
    "segment": (SEGMENT, "streets", of_pixels),
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
    net = face_backbones.build(IResNetSpec(name="iresnet18", embedding=16, width=0.0625), (3, 16, 16))
    file = tmp_path / "teacher.safetensors"
    safe_load.write_tensors(file, net.state_dict())
    return {"teacher": file}


def trained(kind: str, data: object, weights, *more: str, steps: int = 3) -> dict[str, object]:
    """Losses and logs of a few updates, read after the last, scores with and without EMA weights, and weights."""
    path, _, words = KINDS[kind]
    # Without a folder: on a slow machine a checkpoint would be due within these steps.
    words = [*words(data), "checkpoints.lose_at_most=null", *more]
    recipe = load(RunRequest(path, words, ("toy",) if path == TOY else ()))
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_step_keeps_of_cuda_graphs_is_not_written_over(kind, graphs, weights, request, monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))
    data = KINDS[kind][1] and request.getfixturevalue(KINDS[kind][1])
    plain = trained(kind, data, weights)
    assert not graphs.compiled
    seen = trained(kind, data, weights, "train.compile=reduce-overhead")
    assert graphs.compiled >= 2 and graphs.steps >= 6  # two micro-batches each
    # Segment chooses the hardest pixels; adadistill differs by 4.3e-4 in one of 144 weights on an AMD EPYC.
    torch.testing.assert_close(seen, plain, rtol=1e-2, atol=6e-4)


# ---- What auto decides


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))
    return lambda *words: load(RunRequest(TOY, words, ("toy",)))


@pytest.mark.parametrize(
    "device, updates, recorded, lacks, decided",
    [
        ("cpu", 10**6, None, "", "off (train.compile auto: a CPU)"),
        ("mps", 10**6, None, "", "off (train.compile auto: MPS)"),
        (
            "cuda", 295_672, None, "",
            "default (train.compile auto: CUDA, 295,672 steps; compiling takes about a minute)",
        ),
        (
            "cuda", 500, None, "",
            "off (train.compile auto: 500 steps; compiling takes about a minute and pays off from 6,000 steps)",
        ),
        ("cuda", 10**6, None, "no triton", "off (train.compile auto: no triton)"),
        (
            "cpu", 500, "default", "",
            "default (from the checkpoint; here it would be off: train.compile auto: a CPU)",
        ),
        ("cpu", 500, "default", "no compiler", "off (no compiler; the checkpoint was trained with default)"),
        ("cpu", 500, "off", "", "off (train.compile auto: a CPU)"),
        (
            "cuda", 6_000, "off", "",
            "off (from the checkpoint; here it would be default: "
            "train.compile auto: CUDA, 6,000 steps; compiling takes about a minute)",
        ),
    ],
)  # fmt: skip
def test_auto_compiles_on_cuda_where_it_pays_off(device, updates, recorded, lacks, decided, toy, monkeypatch):
    monkeypatch.setattr(launch_settings, "cannot_compile", lambda device: lacks)
    assert str(launch_settings.compile_mode(toy(), device, updates, recorded)) == decided
    assert str(launch_settings.compile_mode(toy("train.compile=default"), device, updates, recorded)) == (
        "default (train.compile)"
    )


def test_auto_has_the_identity_that_off_had(toy):
    auto, off, on = toy(), toy("train.compile=off"), toy("train.compile=default")
    assert loader.digest(auto) == loader.digest(off) != loader.digest(on)
    assert loader.hashed(auto)["train"]["compile"] == "off" and "compile: auto" in loader.dump(auto)


# ---- What a resume keeps


@pytest.fixture
def traced(monkeypatch) -> Iterator[list[object]]:
    """A compiler that runs what it is given; the list holds the graphs."""
    made: list[object] = []

    def backend(graph, inputs):
        made.append(inputs)
        return graph

    with compiling(monkeypatch, backend):
        yield made


WORDS = ("train.length=8 steps", "evaluations={}", "best=null", "checkpoints.every=3 steps")


def same(a, b) -> bool:
    tensors = a.last.tensors
    equal = all(torch.equal(t, b.last.tensors[file][name]) for file in tensors for name, t in tensors[file].items())
    return a.series("train/loss") == b.series("train/loss") and equal


def test_a_compiled_run_that_is_interrupted_has_the_bits_of_one_that_is_not(traced):
    words = (*WORDS, "train.compile=default")
    whole = run(*words)
    assert traced and not any("_orig_mod" in name for file in whole.last.tensors.values() for name in file)
    assert whole.last.state["machine"]["compile"] == "default"
    cut = run(*words, stopping=stop_after(5))
    assert cut.code != 0
    again = run(*words, resume=cut.folder.name)
    assert again.folder.name == cut.folder.name and same(again, whole)


def test_a_resumed_run_keeps_the_mode_and_the_precision_that_auto_chose(traced, monkeypatch, capsys):
    best = launch_settings._best_mode
    precision = launch_settings._device_precision
    gpu = launch_settings.Setting("default", "train.compile auto: CUDA")
    monkeypatch.setattr(launch_settings, "_best_mode", lambda device, updates: gpu)
    monkeypatch.setattr(launch_settings, "_device_precision", lambda: "bf16")
    whole, cut = run(*WORDS), run(*WORDS, stopping=stop_after(5))
    assert cut.last.state["machine"]["precision"] == "bf16" and cut.last.state["machine"]["compile"] == "default"
    monkeypatch.setattr(launch_settings, "_best_mode", best)
    monkeypatch.setattr(launch_settings, "_device_precision", precision)
    del traced[:]
    capsys.readouterr()
    again = run(*WORDS, resume=cut.folder.name)
    said = capsys.readouterr().out
    assert traced and same(again, whole)
    assert (
        "precision bf16 (from the checkpoint; here it would be no: train.precision auto, for this device), "
        "compile default (from the checkpoint; here it would be off: train.compile auto: a CPU)" in said
    )


def test_fp16_of_a_checkpoint_is_refused_on_a_cpu(monkeypatch):
    cut = run(*WORDS, stopping=stop_after(5))
    from trainkit.checkpoint import storage

    state = storage.state_of

    def trained_in_fp16(path):
        found = state(path)
        return found | {"machine": found["machine"] | {"precision": "fp16"}}

    monkeypatch.setattr(storage, "state_of", trained_in_fp16)
    with pytest.raises(launch_settings.UserError, match="fp16 on a CPU"):
        run(*WORDS, resume=cut.folder.name)


# ---- Frozen networks


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, True])
def test_the_teacher_is_compiled_where_it_runs_often(cached, traced, weights, monkeypatch):
    monkeypatch.setattr(launch_settings, "LEAST_FORWARDS", 1)
    more = {"task.cache_teacher": "disk" if cached else "false", "evaluations": "{}", "best": "null"}
    recipe = load(RunRequest(DISTIL, [*of_faces(None, **more), "train.compile=default"]))
    with Trainer(
        recipe, recipe.data.open(recipe.seed), Runtime(recipe), weights=weights, cache=weights["teacher"].parent
    ) as trainer:
        networks = trainer.model.networks
        teacher, pixels = networks.frozen["teacher"], networks.frozen["pixels"]
        assert (teacher._compiled_call_impl is not None) is not cached and pixels._compiled_call_impl is None
        trainer.open()
        opened = len(traced)
        assert opened == cached  # one graph for all batches of the table, the last of which is padded
        trainer.step()
        assert len(traced) == opened + 1 + (not cached)
