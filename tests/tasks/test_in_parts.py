"""Losses over a whole micro-batch whose network sees parts of it: loss, gradients and memory of the undivided one."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.tasks import test_adadistill as faces
from tests.tasks import test_reid as people
from tests.tasks import test_segment2d as scenes
from tests.tasks import test_segment3d as volumes
from tests.tasks.test_adadistill import teacher_file
from trainkit.interfaces import StepContext
from trainkit.losses.margin_specs import AdaFace
from trainkit.losses.segmentation_2d import Near, Ohem, PixelLoss
from trainkit.losses.segmentation_3d import SegmentationLoss
from trainkit.models.recomputation import forward_in_parts
from trainkit.models.segmentation_specs import BiSeNetV2Spec, Norm
from trainkit.tasks.embed import Embed
from trainkit.tasks.segment2d import Segment2d
from trainkit.tasks.segment3d import Segment3d

pytestmark = pytest.mark.usefixtures("unsent")

__all__ = ["teacher_file"]
COUNT = 6
AT = StepContext(1, 0, 0.5, lambda x, grad=False: x if grad else x.detach(), contextlib.nullcontext)


def reid(_):
    return *people.made(**people.ALL), people.usual()


def scene(_):
    task = Segment2d(
        net=BiSeNetV2Spec(name="bisenetv2", width=0.25),
        norm=Norm(name="group"),
        objective=PixelLoss(ce=0.7, dice=0.3, lovasz=0.2, ohem=Ohem(), near=Near()),
    )
    torch.manual_seed(0)
    networks = task.build(scenes.META, {}, 0)
    return task, networks, scenes.batch(0, COUNT, scenes.CROP, distance=6 * torch.rand(COUNT, *scenes.CROP))


def volume(_):
    torch.manual_seed(0)
    task = Segment3d(net=volumes.UNET, objective=SegmentationLoss(whole_batch=True))
    draw, meta = torch.Generator().manual_seed(1), replace(volumes.META, shape=(1, 8, 16, 16))
    shape = (COUNT, *meta.shape[1:])
    mask = torch.randint(0, 3, shape, generator=draw, dtype=torch.uint8)
    mask[:3][mask[:3] == 2] = 0  # an organ that only some samples have
    shown = {"image": torch.randn(COUNT, 1, *meta.shape[1:], generator=draw), "mask": mask}
    return task, task.build(meta, {}, 0), shown


def distilled(teacher):
    margin = AdaFace(m=0.4, scale=16.0)
    task, networks = faces.distil(teacher, margin=margin, cache_teacher=False)
    networks.frozen["teacher"].double()
    return task, networks, faces.batch(COUNT)


def embedded(_):
    torch.manual_seed(0)
    task = Embed(net=faces.NET, margin=AdaFace(m=0.4, scale=16.0))
    return task, task.build(faces.META, {}, 0), faces.batch(COUNT)


def results(build, teacher, parts):
    """Loss, gradients, what is remembered, and statistics of batch norm; `parts` None: of the network at once."""
    task, networks, shown = build(teacher)
    net = networks.model.double().train()
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if networks.memory is not None:
        networks.memory.double()
    shown = {key: x.double() if x.is_floating_point() else x for key, x in shown.items()}
    sizes = []

    def in_parts(compute, count):
        def noted(rows):
            if count > 1:  # else a loss that is computed again
                sizes.append(rows.stop - rows.start)
            return compute(rows)

        return forward_in_parts(noted, count, parts, net, torch.device("cpu"))

    at = AT if parts is None else replace(AT, in_parts=in_parts)
    loss = task.loss(net, networks, shown, at)
    loss.sum.backward()
    if parts is not None:  # forward, and again in the backward pass
        assert sum(sizes) == 2 * len(shown["mask" if "mask" in shown else "label"]) and max(sizes) == parts
    found = {name: p.grad for name, p in net.named_parameters() if p.requires_grad}
    found |= {"loss": loss.sum.detach(), "weight": torch.as_tensor(float(loss.weight)), **loss.logs}
    return found | (networks.memory.state_dict() if networks.memory is not None else {})


@pytest.mark.parametrize("build", [reid, scene, volume, distilled, embedded])
def test_parts_give_the_loss_gradients_and_memory_of_the_whole(build, teacher_file, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # features and memories are float32 on purpose
    whole = results(build, teacher_file, None)
    for parts in (2, 1):
        found = results(build, teacher_file, parts)
        assert found.keys() == whole.keys() and all(grad is not None for grad in found.values())
        for name, wanted in whole.items():
            torch.testing.assert_close(found[name], wanted, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
