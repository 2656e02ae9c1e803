"""Waits for the device: what is named, where, how often; and that our own loop has none inside of steps."""

from __future__ import annotations

import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest
import sync_emulation
import torch
from runs import PLUGIN, TOY
from sync_emulation import Following

from trainkit.config.loader import load
from trainkit.config.run_request import RunRequest
from trainkit.diagnostics import sync_audit
from trainkit.distributed.runtime import Runtime
from trainkit.errors import UserError
from trainkit.speed import sync_points
from trainkit.speed.clock import Clock
from trainkit.speed.sync_points import Probe

CPU = torch.device("cpu")
MESSAGE = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:156.)"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _plugins(monkeypatch):
    monkeypatch.syspath_prepend(str(PLUGIN))


def waits(work, *given):
    """What `work` is told of that a GPU would wait for, of tensors that a GPU would hold."""
    seen = []
    with Following(seen.append, lambda file: True):
        held = [x.to(CPU, non_blocking=True) for x in given]
        assert not seen
        work(*held)
    return seen


def table():
    return torch.arange(12.0).view(4, 3) - 5


class Reads(torch.autograd.Function):
    """Looks at its gradient on the way back."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        assert grad.sum().item() > 0
        return grad * 2


# ---- What waits


WAITING = {
    ".item()": lambda x: x.sum().item(),
    "float(tensor)": lambda x: float(x[0, 0]),
    "int(tensor)": lambda x: range(9)[x[0, 0].long().abs()],
    "bool(tensor)": lambda x: 1 if x.sum() > 0 else 2,
    ".tolist()": lambda x: x.tolist(),
    ".numpy()": lambda x: np.asarray(x),
    ".cpu()": lambda x: x.cpu(),
    ".to()": lambda x: x.to("cpu"),
    "print(tensor)": lambda x: str(x),
    ".nonzero": lambda x: (x > 0).nonzero(),
    "torch.where": lambda x: torch.where(x > 0),
    ".unique": lambda x: x.unique(),
    "torch.masked_select": lambda x: torch.masked_select(x, x > 0),
    "torch.bincount": lambda x: torch.bincount(x.long().view(-1).abs()),
    "torch.equal": lambda x: torch.equal(x, x + 1),
    "torch.allclose": lambda x: torch.allclose(x, x + 1),
    ".repeat_interleave": lambda x: x.repeat_interleave(x[:, 0].long().abs(), 0),
    "torch.nn.functional.one_hot": lambda x: torch.nn.functional.one_hot(x.long().abs()),
    "indexing with values of the device": lambda x: x[x > 0],
    "torch.tensor": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    ".new_tensor": lambda x: x.new_tensor([1.0]),
    ".copy_": lambda x: torch.empty(4, 3).copy_(x),
}


@pytest.mark.parametrize("what", WAITING)
def test_a_call_that_waits_is_named_once(what):
    assert waits(WAITING[what], table()) == [what]


def test_more_that_waits():
    x = table()
    assert waits(lambda x: f"{x.sum()}", x) == ["print(tensor)"]
    assert waits(lambda x: x[[0, 1]], x) == ["indexing with values of the device"]  # the list travels to the device
    assert waits(lambda x: x[torch.tensor([0, 1])], x) == ["indexing with values of the device"]
    assert waits(lambda x: torch.ones(3).to(x.device), x) == [".to()"]
    assert waits(lambda x: torch.ones(3).to(x), x) == [".to()"]
    assert waits(lambda x: Reads.apply(x.requires_grad_()).sum().backward(), x) == [".item()"]
    assert waits(lambda x: Reads.apply(x.requires_grad_()).sum().backward(torch.ones((), device=x.device)), x) == [
        ".item()"
    ]


NOT_WAITING = {
    "arithmetic": lambda x: ((x * 2 + 1) @ x.T).softmax(1).argmax(1),
    "numbers go along with the kernel": lambda x: x.add_(3.0).clamp_(0, 1),
    "made there": lambda x: torch.zeros(3, device=x.device) + torch.full((3,), 2.0, device=x.device),
    "without waiting, by place": lambda x: torch.ones(3).to(x.device, torch.float64, True) + x[0],
    "without waiting": lambda x: torch.ones(3).to(x.device, non_blocking=True) + x[0],
    "read later": lambda x: torch.empty(4, 3).copy_(x, non_blocking=True).sum().item(),
    "a copy is the host's": lambda x: x.shape[0] + len(x) + x.dim() + x.numel(),
    "filled where a mask says": lambda x: x.__setitem__(x > 0, 0.0),
    "chosen": lambda x: torch.where(x > 0, x, 0.0),
    "indexed by the device": lambda x: x[x[:, 0].long().abs() % 4],
    "classes are given": lambda x: torch.nn.functional.one_hot(x.long().abs(), 12),
    "as often each": lambda x: x.repeat_interleave(2, 0),
    "already there": lambda x: x.to(x.device).to(x).double().to(torch.float32),
    "of the host alone": lambda x: (torch.ones(3).sum().item(), torch.ones(3).nonzero(), float(torch.ones(()))),
    "a gradient": lambda x: x.clone().requires_grad_().square().sum().backward(),
}


@pytest.mark.parametrize("what", NOT_WAITING)
def test_what_does_not_wait_is_not_named(what):
    assert waits(NOT_WAITING[what], table()) == []


def test_a_copy_for_the_host_waits_once():
    def work(x):
        kept = x.cpu()
        kept.sum().item()
        kept.tolist()

    assert waits(work, table()) == [".cpu()"]


def test_code_that_asks_where_a_tensor_is_takes_the_way_of_a_gpu():
    ways = []

    def work(x):
        ways.append((x.device.type, x.is_cuda, torch.ones(3).device.type, x.cpu().device.type))

    waits(work, table())
    assert ways == [("cuda", True, "cpu", "cpu")]
    with Following(lambda what: None) as following:  # asked by code that is not ours
        x = table().to(CPU)
        assert following.holds(x) and x.device.type == "cpu"


# ---- Where


def toy(*words, steps=5, plugins=("toy",), length=9):
    return sync_emulation.audit(RunRequest(TOY, (f"train.length={length} steps", *words), plugins), steps)


def test_our_loop_waits_nowhere_inside_of_steps():
    found = toy("optim={name: adamw, lr: 0.01, clip_norm: 1}")
    assert not found.inside()
    where = {place.where.rpartition(":")[0] for place in found.counts}
    assert "trainkit/training/loss_meter.py" in where, "it sees what waits outside of them"
    assert "inside steps: no waits" in sync_audit.lines(found)


@pytest.mark.parametrize(("length", "watched"), [(9, 5), (6, 3), (4, 1), (3, 1), (2, 1), (1, 1)])
def test_leaving_updates_out_costs_one_wait_a_step(length, watched):
    found = toy("train.nonfinite=skip", length=length)
    assert found.steps == watched
    (place,) = found.inside()
    assert "bool(update.finite)" in place.code and place.phase == "optimizer"
    assert place.where.startswith("trainkit/training/trainer.py:") and found.inside()[place] == watched


@pytest.fixture
def waiting(tmp_path, monkeypatch):
    """A plug-in whose loss and scores wait, and the lines where they do."""
    text = textwrap.dedent(
        """
        import warnings
        from dataclasses import dataclass

        import torch
        from toy import ToyTask


        @dataclass(kw_only=True)
        class Waiting(ToyTask):
            def loss(self, net, parts, batch, at):
                out = super().loss(net, parts, batch, at)
                float(out.sum)  # 1
                if at.step % 2:
                    out.sum.item()  # 2
                self.count(batch["label"] > 0)
                return out

            def count(self, mask):
                return mask.nonzero(  # 3
                    as_tuple=True
                )

            def predict(self, net, batch):
                return {"logits": net(batch["image"]), "sum": batch["image"].cpu().sum((1, 2, 3))}  # 4


        @dataclass(kw_only=True)
        class Warning(ToyTask):
            def loss(self, net, parts, batch, at):
                warnings.warn("MESSAGE")  # 5
                warnings.warn("another thing")
                return super().loss(net, parts, batch, at)

        TABLES = {"task": {"waiting": "waits:Waiting", "warning": "waits:Warning"}}
        """
    ).replace("MESSAGE", MESSAGE)
    (tmp_path / "waits.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "waits", raising=False)
    yield [f"{tmp_path}/waits.py:{1 + n}" for n, line in enumerate(text.splitlines()) if "# " in line]
    sys.modules.pop("waits", None)


def test_lines_of_a_plugin_are_named_with_how_often_they_wait(waiting):
    # Steps 3 .. 7 are watched, of which 3, 5 and 7 are odd; an update has two micro-batches.
    found = toy("task={name: waiting}", plugins=("toy", "waits"))
    inside = {place.where: (place.code, place.phase, count) for place, count in found.inside().items()}
    assert inside == {
        waiting[0]: ("float(out.sum)  # 1", "forward", 10),
        waiting[1]: ("out.sum.item()  # 2", "forward", 6),
        waiting[2]: ("return mask.nonzero(  # 3", "forward", 10),
    }
    assert found.steps == 5
    assert [p.where for p in found.counts if p.phase == "trial"] == [waiting[3]]
    said = "\n".join(sync_audit.lines(found))
    assert (
        "inside steps: 5.2 waits per step" in said
        and f"{waiting[0]}  float(out.sum)  # 1  2 per step (forward)" in said
    )


@pytest.mark.parametrize(("steps", "said"), [(0, "--steps"), (4, "a CUDA GPU")])
def test_no_steps_and_no_gpu_are_refused(steps, said):
    with pytest.raises(UserError, match=said):
        sync_audit.audit(RunRequest(TOY, (), ("toy",)), steps)


# ---- On a GPU, as far as that can be said without one


@pytest.fixture
def cuda(monkeypatch):
    """CUDA's debug mode, as a list of what it was set to."""
    modes = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return modes


def test_what_cuda_warns_of_is_counted_and_other_warnings_go_on(cuda):
    seen = []
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        with sync_points.cuda_waits(lambda: seen.append(1)):
            for _ in range(3):
                warnings.warn(MESSAGE, stacklevel=1)
                warnings.warn("another thing", stacklevel=1)
        warnings.warn(MESSAGE, stacklevel=1)
    assert len(seen) == 3 and cuda == [0, "warn", 0]
    assert [str(w.message) for w in others] == [*["another thing"] * 3, MESSAGE]


def test_a_probe_counts_a_few_updates_of_a_run(cuda, waiting, tmp_path):
    from trainkit.training.trainer import Trainer

    recipe = load(TOY, ["task={name: warning}", "train.length=9 steps"], ("toy", "waits"))
    with warnings.catch_warnings(), Trainer(recipe, recipe.data.open(0), Runtime(recipe)) as trainer:
        warnings.simplefilter("ignore")
        probe = Probe(torch.device("cuda"), trainer.clock)
        trainer.open()
        for step in range(1, 9):
            trainer.step()
            if step == 3:
                probe.start(step)
            elif step == 7:
                found = probe.stop(step)
    assert found.per_step == 2 and found.places == (waiting[4],) and cuda == [0, "warn", 0]


def test_one_who_counts_does_not_keep_it_from_another(cuda):
    seen = []
    with sync_points.cuda_waits(lambda: seen.append("audit")):
        with sync_points.cuda_waits(lambda: seen.append("probe")):
            warnings.warn(MESSAGE, stacklevel=1)
        warnings.warn(MESSAGE, stacklevel=1)
    assert seen == ["audit", "probe", "audit"] and cuda == [0, "warn", "warn", "warn", 0]


def test_a_probe_on_a_cpu_does_nothing(cuda):
    probe = Probe(CPU, Clock())
    probe.start(3)
    assert probe.stop(7) is None and cuda == [0]


# ---- The recipes that are shipped


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnext", "eye_state", "face_teacher", "reid", "segment", "tom500"])
def test_no_recipe_of_any_task_waits_inside_of_steps(name):
    found = sync_emulation.audit(RunRequest(ROOT / "recipes" / f"{name}.yaml", ("evaluations={}", "best=null")), 2)
    assert not found.inside() and any(place.phase == "log" for place in found.counts)
