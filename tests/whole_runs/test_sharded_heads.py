"""Trainings whose classes are divided over processes: against undivided ones, stopped, resumed, on other numbers."""

from __future__ import annotations

import pytest
import torch
from runs import ROOT, Ran, all_same, newest, overrides, start

from trainkit.checkpoint import safe_load
from trainkit.interfaces import DatasetInfo
from trainkit.models.network_specs import IResNetSpec
from trainkit.tasks.embed import Embed

pytestmark = pytest.mark.usefixtures("store")
CLASSES, SHARDED = 120, "task.head={sharded: true}"
NET = "{name: iresnet18, embedding: 32, width: 0.0625}"
STUDENT = "{name: mobilefacenet, embedding: 32, width: 0.125}"
SHORT = {
    "data.image_size": "16",
    "train": "{length: 8 steps, batch_size: 16, ema: 0.9}",
    "optim": "{name: sgd, lr: 1e-3, momentum: 0.9, weight_decay: 5e-4, clip_norm: 1}",
    "evaluations": "{}",
    "best": "null",
    "log": "{every: 1 steps, system_every: null, baseline: false}",
    "integrity.policy": "off",
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Untrained weights of a teacher; an `aml` student trains towards its centres."""
    torch.manual_seed(5)
    net = Embed(net=IResNetSpec(name="iresnet18", embedding=32, width=0.0625))
    file = tmp_path_factory.mktemp("teacher") / "model.safetensors"
    safe_load.write_tensors(file, net.build(DatasetInfo(CLASSES, (3, 16, 16), "toy"), {}, 0).model.state_dict())
    return file


@pytest.fixture
def words(teacher):
    """The recipe and words of a kind of training."""
    embed = {"task.net": NET}
    distil = {"task.student": STUDENT, "task.teacher": f"{{net: {NET}, weights: {teacher}}}"}
    kinds = {
        "arcface": ("face_teacher", embed | {"task.margin": "{name: arcface, m: 0.3, scale: 24}"}),
        "adaface": (
            "face_teacher",
            embed | {"task.margin": "{name: adaface, scale: 24}", "optim.name": "adamw", "optim.eps": "1e-2"},
        ),
        "adadistill": ("adadistill", distil),
        "aml": ("adadistill", distil | {"task.method": "aml"}),
    }

    def of(kind: str, **changes: str) -> list[str]:
        recipe, own = kinds[kind]
        return [str(ROOT / "recipes" / f"{recipe}.yaml"), *overrides(SHORT | own, changes)]

    return of


def train(processes: int, *words: str, stop_at: int | None = None) -> Ran:
    plan = [{"at": "trainkit.training.trainer.Trainer.step", "call": stop_at, "do": "signal 15", "rank": 0}]
    with start(processes, *words, plan=plan if stop_at else ()) as started:
        codes = started.wait(900)
        assert codes == [143 if stop_at else 0] * processes, started.stdout + started.stderr
    return Ran(0, newest())


def near(found: Ran, expected: Ran, error: float) -> None:
    """Every tensor of the last checkpoints within a share of its length, or of 1 where it is shorter."""
    one, other = found.last.tensors, expected.last.tensors
    assert one.keys() == other.keys()
    for group, tensors in other.items():
        assert one[group].keys() == tensors.keys()
        for name, tensor in tensors.items():
            found_tensor = one[group][name]
            assert found_tensor.shape == tensor.shape, name
            off = float((found_tensor.double() - tensor.double()).norm() / tensor.double().norm().clamp(min=1))
            print(f"{off:.1e} {group} {name}") if off > error / 30 else None
            assert off < error, (group, name, off)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arcface", "adaface", "adadistill", "aml"])
def test_a_divided_head_trains_like_a_whole_one_and_resumes_to_the_bit(words, kind):
    own = words(kind)
    whole, divided = train(2, *own), train(2, *own, SHARDED)
    for name in ("train/loss", "train/grad_norm", "train/accuracy"):
        assert divided.series(name) == pytest.approx(whole.series(name), rel=1e-5), name
    near(divided, whole, 1e-4)
    cut = train(2, *own, SHARDED, stop_at=3)
    assert 2 < cut.last.step < 8
    resumed = train(2, *own, SHARDED, "--resume")
    assert resumed.folder == cut.folder and resumed.last.step == 8
    assert all_same(resumed, divided) and resumed.repeatable == divided.repeatable


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arcface", "adadistill"])
def test_a_divided_head_goes_on_with_other_numbers_of_processes(words, kind):
    ended = []
    for more in ([], [SHARDED]):
        own = [*words(kind), *more]
        train(1, *own, stop_at=2)
        for processes in (2, 4):
            train(processes, *own, "--resume", "--elastic", stop_at=1)
        ended.append(train(1, *own, "--resume", "--elastic"))
    near(ended[1], ended[0], 1e-4)
