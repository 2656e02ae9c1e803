"""Recomputed activations: the same bits in less memory, for the networks of the recipes and in whole runs."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
from runs import run, stop_after
from torch import Tensor, nn

from trainkit.config import loader
from trainkit.config.loader import digest
from trainkit.errors import UserError
from trainkit.interfaces import DatasetInfo
from trainkit.models import recomputation

RECIPES = Path(loader.RECIPES)
FLAT, CUBE = (3, 64, 64), (1, 16, 32, 32)
UNET = "{name: unet, filters: [4, 8, 16], res_units: 1, dropout: 0.2}"
DYNUNET = "{name: dynunet, filters: [4, 8, 8], res_block: true, dropout: 0.2}"
EYE = "{base_channels: 16, num_blocks: 4, head: avg, drop_path: 0.3"
NETS = {
    "iresnet": ("face_teacher", "{name: iresnet18, embedding: 32, width: 0.125}", (3, 48, 48)),
    "mobilefacenet": ("face_teacher", "{name: mobilefacenet, embedding: 32, width: 0.25}", (3, 48, 48)),
    "eye_baseline": ("eye_state", EYE + ", name: eye_baseline}", (3, 32, 64)),
    "eye_convnext": ("eye_state", EYE + ", name: eye_convnext}", (3, 32, 64)),
    "bisenetv1": ("segment", "{name: bisenetv1, width: 0.25}", FLAT),
    "bisenetv2": ("segment", "{name: bisenetv2, width: 0.25}", FLAT),
    "unet": ("tom500", UNET, CUBE),
    "dynunet": ("tom500", DYNUNET, CUBE),
    "emcad": ("tom500", "{name: emcad, encoder: pvt_v2_b0}", (1, 2, 64, 64)),
}
TIMM = {
    "resnet18": {"drop_path_rate": 0.3},
    "efficientnet_b0": {"drop_path_rate": 0.3, "drop_rate": 0.2},
    "convnext_atto": {"drop_path_rate": 0.3},
    "vit_tiny_patch16_224": {"img_size": 64, "drop_path_rate": 0.3, "proj_drop_rate": 0.2},
    "pvt_v2_b0": {"drop_path_rate": 0.3},
    "densenet121": {},
}


def network(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name in TIMM:
        return timm.create_model(name, num_classes=7, **TIMM[name]), torch.randn(4, *FLAT)
    recipe, net, shape = NETS[name]
    made = loader.load(RECIPES / f"{recipe}.yaml", [f"task.net={net}"])
    info = DatasetInfo(4, shape, "x", spacing=(1.0, 1.0, 1.0), distances=True)
    return made.task.build(info, {}, 0).model, torch.randn(2, *shape)


def tensors(value) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors(part)


def trained(net: nn.Module, x: Tensor, compiled: bool = False) -> tuple[dict[str, Tensor], int]:
    """Two accumulated backward passes; all state and gradients, and the bytes that the last forward kept."""
    net.train()
    own = {t.untyped_storage().data_ptr() for t in net.state_dict().values()}
    forward = torch.compile(net, backend="aot_eager") if compiled else net
    for seed in range(2):
        kept = {}

        def pack(t: Tensor, kept=kept) -> Tensor:
            storage = t.untyped_storage()
            kept |= {storage.data_ptr(): storage.nbytes()} if storage.data_ptr() not in own else {}
            return t

        torch.manual_seed(seed)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = torch.stack([(t.float() ** 2).mean() for t in tensors(forward(x)) if t.requires_grad]).sum()
        loss.backward()
        drawn = torch.rand(1)
    gradients = {f"gradient {name}": p.grad for name, p in net.named_parameters() if p.grad is not None}
    return {**net.state_dict(), **gradients, "loss": loss.detach(), "drawn": drawn}, sum(kept.values())


def assert_same(some: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert some.keys() == other.keys()
    assert [name for name, t in some.items() if not torch.equal(t, other[name])] == []


@pytest.mark.parametrize("name", [*NETS, *TIMM])
def test_gradients_and_all_state_have_the_same_bits_and_less_is_kept(name):
    net, x = network(name)
    again = copy.deepcopy(net)
    assert len(recomputation.apply(again)) > 2
    plain, recomputed = trained(net, x), trained(again, x)
    assert_same(plain[0], recomputed[0])
    assert recomputed[1] < 0.8 * plain[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eye_baseline", "unet", "resnet18", "vit_tiny_patch16_224"])
def test_a_compiled_network_has_the_same_bits_too(name):
    net, x = network(name)
    again = copy.deepcopy(net)
    recomputation.apply(again)
    torch._dynamo.reset()
    plain = trained(net, x, compiled=True)
    torch._dynamo.reset()
    recomputed = trained(again, x, compiled=True)
    assert_same(plain[0], recomputed[0])
    assert recomputed[1] < 0.8 * plain[1]


def test_evaluation_is_as_before_and_nothing_is_kept_for_it():
    net, x = network("resnet18")
    again = copy.deepcopy(net).eval()
    recomputation.apply(again)
    with torch.no_grad():
        assert torch.equal(net.eval()(x), again(x))


def test_a_network_without_blocks_is_refused():
    with pytest.raises(UserError, match=r"Sequential has no blocks .* smaller train\.micro_batch"):
        recomputation.apply(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return self.two(self.one(x).relu())


def test_another_buffer_that_changes_in_a_forward_is_refused():
    net = nn.Sequential(Counting())
    recomputation.apply(net)
    with pytest.raises(UserError, match="Counting changes a buffer in its forward pass"):
        net(torch.randn(3, 2)).sum().backward()


WORDS = (
    "train.length=6 steps", "train.schedule={}", "train.batch_size=16", "train.micro_batch=8",
    "evaluations={val: {every: 3 steps, batch_size: 64}}", "checkpoints={every: 2 steps, keep_last: 50}",
    "task.net={name: eye_baseline, base_channels: 8, num_blocks: 3, head: avg, drop_path: 0.2}",
    "log={every: 1 steps, system_every: null, baseline: false}",
)  # fmt: skip


@pytest.mark.slow
def test_a_run_that_is_resumed_with_it_goes_on_bit_for_bit(store):
    eyes = RECIPES / "eye_state.yaml"
    whole = run(*WORDS, recipe=eyes)
    first = run(*WORDS, recipe=eyes, stopping=stop_after(3))
    assert first.last.step == 3
    ran = run(*WORDS, "train.activation_checkpointing=true", recipe=eyes, resume=first.folder.name)
    assert ran.folder == first.folder and ran.repeatable == whole.repeatable
    for group, saved in whole.last.tensors.items():
        assert_same(saved, ran.last.tensors[group])


def test_a_run_with_it_is_the_same_experiment():
    eyes = RECIPES / "eye_state.yaml"
    assert digest(loader.load(eyes)) == digest(loader.load(eyes, ["train.activation_checkpointing=true"]))
