"""The task of segmenting volumes: its loss, its voxels and millimetres, and what it refuses."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from trainkit.config import validation
from trainkit.config.schema import TABLES
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Segmentation
from trainkit.interfaces import DatasetInfo, StepContext
from trainkit.losses.segmentation_3d import SegmentationLoss, deep, subsets
from trainkit.models import segmentation_3d
from trainkit.models.segmentation_specs import DynUNetSpec, EmcadSpec, UNetSpec
from trainkit.tasks.segment3d import Segment3d, Window

PATCH = (4, 8, 6)
NAMES = ("background", "ball", "box")
META = DatasetInfo(3, (1, *PATCH), "x", class_names=NAMES, spacing=(3.0, 1.0, 0.5), axes="yzx")
UNET = UNetSpec(name="unet", filters=[4, 8])
AT = StepContext(0, 0, 0.0, lambda x: x, contextlib.nullcontext)


class Reads(nn.Module):
    """A network that takes the class of a voxel to be its value, so that an image can be its own truth."""

    def forward(self, image):
        return torch.cat([-10 * (image - c).square() for c in range(3)], 1)


class Several(nn.Module):
    """Scores of three sizes."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image):
        finest = self.scale * torch.cat([image, image.square(), -image], 1)
        return [finest, finest[..., ::2, ::2], finest[..., ::2, ::2, ::2]] if self.training else finest


@pytest.fixture
def made(monkeypatch):
    """A task that has built a given network instead of MONAI's."""

    def make(net=None, spec=UNET, **settings):
        monkeypatch.setattr(segmentation_3d, "build", lambda *args: (net or Reads(), ["stub"]))
        task = Segment3d(net=spec, **settings)
        return task, task.build(META, {}, 0)

    return make


def patches(seed=0):
    draw = torch.Generator().manual_seed(seed)
    mask = torch.randint(0, 3, (2, *PATCH), generator=draw, dtype=torch.uint8)
    return {"image": torch.randn(2, 1, *PATCH, generator=draw), "mask": mask}


def case(shape=(7, 20, 13), seed=0, **more):
    """A whole volume whose image is its truth: a block of each organ."""
    rng = np.random.default_rng(seed)
    truth = np.zeros(shape, np.uint8)
    for organ in (1, 2):
        low = [int(rng.integers(0, side // 2)) for side in shape]
        truth[tuple(slice(a, a + side // 3) for a, side in zip(low, shape, strict=True))] = organ
    truth = torch.from_numpy(truth)[None]
    return {
        "image": truth[:, None].float(),
        "mask": truth,
        "spacing": torch.tensor([[3.0, 1.0, 0.5]], dtype=torch.float64),
        "mirrors": torch.zeros(1, 3, dtype=torch.bool),
        **more,
    }


# The loss


def test_the_loss_is_the_sum_over_samples_of_the_objective(made):
    net = nn.Conv3d(1, 3, 1)
    task, networks = made(net, objective=SegmentationLoss(dice=0.7, ce=0.3, class_weights={"box": 3.0}))
    assert networks.model is net and networks.notes == ("stub",)
    batch = patches()
    found = task.loss(net, networks, batch, AT)
    weights = torch.tensor([1.0, 1.0, 3.0])
    each = [task.objective(net(batch["image"][i : i + 1]), batch["mask"][i : i + 1], weights) for i in range(2)]
    torch.testing.assert_close(found.sum, sum(x.sum() for x in each))
    assert found.weight == 2
    plain, _ = made(net, objective=SegmentationLoss(dice=0.7, ce=0.3))
    assert not torch.isclose(plain.loss(net, networks, batch, AT).sum, found.sum)


@pytest.mark.parametrize(
    ("spec", "combine"),
    [
        (DynUNetSpec(name="dynunet", filters=[4, 8, 8]), deep),
        (EmcadSpec(name="emcad"), subsets),
    ],
    ids=["deep", "subsets"],
)
def test_several_outputs_are_supervised_as_their_network_asks(made, spec, combine):
    net = Several()
    task, networks = made(net, spec)
    batch = patches()
    outputs = net(batch["image"])
    found = task.loss(net, networks, batch, AT)
    torch.testing.assert_close(found.sum, combine(task.objective, outputs, batch["mask"], None).sum())
    for other in (deep, subsets):
        others = other(task.objective, outputs, batch["mask"], None).sum()
        assert torch.isclose(found.sum, others) == (other is combine)


def test_of_nnunets_network_the_head_of_the_coarsest_output_has_a_gradient_of_0():
    torch.manual_seed(0)
    task = Segment3d(net=DynUNetSpec(name="dynunet", filters=[4, 8, 8, 8]))
    patch = (8, 32, 32)
    networks = task.build(
        DatasetInfo(3, (1, *patch), "x", class_names=NAMES, spacing=(3.0, 1.0, 1.0), axes="yzx"), {}, 0
    )
    mask = torch.randint(0, 3, (2, *patch), dtype=torch.uint8)
    task.loss(networks.model, networks, {"image": torch.randn(2, 1, *patch), "mask": mask}, AT).sum.backward()
    zero = {name for name, p in networks.model.named_parameters() if p.grad is not None and not p.grad.any()}
    assert zero == {f"deep_supervision_heads.1.conv.conv.{word}" for word in ("weight", "bias")}
    assert all(p.grad is not None for p in networks.model.parameters())


def test_the_logged_dice_is_that_of_the_organs_voxels_taken_together(made):
    task, networks = made()
    batch = patches(3)
    predicted = torch.randint(0, 3, (2, *PATCH))
    found = task.loss(lambda image: torch.nn.functional.one_hot(predicted, 3).movedim(-1, 1) * 5.0, networks, batch, AT)
    a, b = predicted.numpy(), batch["mask"].numpy()
    hits = sum(((a == c) & (b == c)).sum() for c in (1, 2))
    assert found.logs["dice"].item() == pytest.approx(2 * hits / ((a > 0).sum() + (b > 0).sum()))
    nothing = {"image": torch.zeros(1, 1, *PATCH), "mask": torch.zeros(1, *PATCH, dtype=torch.uint8)}
    assert task.loss(Reads(), networks, nothing, AT).logs["dice"] == 1


# Patches


def test_of_patches_the_voxels_are_counted(made):
    task, _ = made()
    batch = patches(1)
    rows = task.predict(Reads(), batch)
    a = np.clip(np.rint(batch["image"][:, 0].numpy()), 0, 2)
    b = batch["mask"].numpy()
    for organ in (1, 2):
        axes = (1, 2, 3)
        assert rows["predicted"][:, organ - 1].tolist() == (a == organ).sum(axes).tolist()
        assert rows["actual"][:, organ - 1].tolist() == (b == organ).sum(axes).tolist()
        assert rows["intersection"][:, organ - 1].tolist() == ((a == organ) & (b == organ)).sum(axes).tolist()


# Whole volumes


def test_a_perfect_network_is_perfect_in_millimetres(made):
    task, _ = made()
    batch = case()
    rows = task.predict(Reads(), batch)
    assert rows["dice"].tolist() == rows["nsd"].tolist() == [[1.0, 1.0]]
    assert rows["hd95"].tolist() == rows["asd"].tolist() == [[0.0, 0.0]]
    voxels = [(batch["mask"] == organ).sum().item() for organ in (1, 2)]
    assert rows["volume_truth"].tolist() == [[1.5 * n for n in voxels]]
    assert all(value.shape == (1, 2) and value.dtype == torch.float32 for value in rows.values())


def test_a_shift_by_a_slice_is_three_millimetres_and_within_a_tolerance_of_as_many(made):
    batch = case(shape=(8, 20, 13))
    batch["image"] = batch["mask"].roll(1, 1)[:, None].float()
    near, _ = made(tolerance=2.9)
    wide, _ = made(tolerance={"box": 3.0})
    near, wide = near.predict(Reads(), batch), wide.predict(Reads(), batch)
    assert near["hd95"].tolist() == [[3.0, 3.0]]
    assert wide["nsd"][0, 1] == 1 and wide["nsd"][0, 0] == near["nsd"][0, 0] < 1
    assert near["nsd"][0, 1] < 1


def test_scores_are_on_the_grid_of_the_file_whatever_grid_the_network_saw(made):
    task, _ = made()
    batch = case(shape=(7, 20, 12))
    fine = batch["mask"].repeat_interleave(2, 2).repeat_interleave(2, 3)
    rows = task.predict(Reads(), {**batch, "mask": fine, "spacing": torch.tensor([[3.0, 0.5, 0.25]])})
    assert (rows["dice"] > 0.9).all()
    voxels = [(fine == organ).sum().item() for organ in (1, 2)]
    np.testing.assert_allclose(rows["volume_truth"][0], [n * 0.375 for n in voxels])
    assert task.label_map(Reads(), batch["image"], (7, 40, 24)).shape == (7, 40, 24)


def test_the_label_map_is_where_the_mean_over_windows_and_mirrors_is_largest(made):
    from trainkit.models.sliding_window import sliding_probabilities

    torch.manual_seed(0)
    net = nn.Conv3d(1, 3, 3, padding=1).requires_grad_(False)
    window = Window(overlap=0.25, weight="constant", batch_size=3)
    task, _ = made(net, window=window)
    image = torch.randn(1, 1, 6, 13, 9)
    mirrors = (True, False, True)
    wanted = sliding_probabilities(
        net, image, PATCH, overlap=0.25, weight="constant", batch_size=1, mirrors=mirrors
    ).argmax(0)
    found = task.label_map(net, image, image.shape[2:], mirrors)
    assert found.dtype == torch.uint8 and torch.equal(found.long(), wanted)
    assert not torch.equal(task.label_map(net, image, image.shape[2:]), found)
    batch = {**case(shape=(6, 13, 9)), "image": image, "mirrors": torch.tensor([mirrors])}
    predicted = task.predict(net, batch)["volume_prediction"][0]
    assert predicted.tolist() == [1.5 * (wanted == organ).sum().item() for organ in (1, 2)]


def test_rows_of_a_case_do_not_depend_on_what_else_is_in_the_batch(made):
    task, _ = made(nn.Conv3d(1, 3, 3, padding=1).requires_grad_(False))
    net = nn.Conv3d(1, 3, 3, padding=1).requires_grad_(False)
    one, two = case(seed=1), case(seed=2)
    together = task.predict(net, {key: torch.cat([one[key], two[key]]) for key in one})
    for i, alone in enumerate((one, two)):
        for key, value in task.predict(net, alone).items():
            assert torch.equal(value[0], together[key][i])


def test_pictures_come_with_cases_that_ask_for_them(made):
    task, _ = made()
    assert "planes" not in task.predict(Reads(), case())
    rows = task.predict(Reads(), case(overlay=torch.ones(1, dtype=torch.bool)))
    assert rows["planes"].shape[:3] == (1, 3, 3) and rows["planes"].shape[3] == rows["planes"].shape[4]
    truth, prediction = rows["planes"][0, :, 1], rows["planes"][0, :, 2]
    assert torch.equal(truth, prediction) and set(truth.unique().tolist()) == {0, 1, 2}


def test_cases_are_scored_by_the_protocol_of_their_split(made):
    task, _ = made()
    batches = [case(seed=seed) for seed in range(3)]
    rows = [task.predict(Reads(), batch) for batch in batches]
    rows = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
    split = SimpleNamespace(name="val", protocol=Segmentation(("a", "b", "c"), ("a", "b", "c"), NAMES, "whole"))
    scores = task.score(rows, split)
    assert scores.metrics["dice_mean"] == 1 and scores.metrics["hd95_mean_mm"] == 0


def test_mixed_precision_changes_a_label_map_hardly(made):
    torch.manual_seed(0)
    net = nn.Conv3d(1, 3, 3, padding=1).requires_grad_(False)
    task, _ = made(net)
    image = torch.randn(1, 1, 6, 13, 9)
    whole = task.label_map(net, image, image.shape[2:])
    with torch.autocast("cpu", torch.bfloat16):
        half = task.label_map(net, image, image.shape[2:])
    assert (whole == half).float().mean() > 0.98


# What is refused


def test_organs_that_the_data_does_not_have_are_named(made):
    with pytest.raises(UserError, match=r"task.tolerance: organ 'bal', which the data does not have; expected ball"):
        made(tolerance={"bal": 1.0})
    with pytest.raises(UserError, match=r"task.tolerance: organ 'background'"):
        made(tolerance={"background": 1.0})
    with pytest.raises(UserError, match=r"task.objective.class_weights: class 'boxx'"):
        made(objective=SegmentationLoss(class_weights={"boxx": 2.0}))


def test_a_recipe_says_everything_in_words():
    tree = {
        "net": {"name": "dynunet", "filters": [8, 16, 32], "weights": "run:first"},
        "objective": {"dice": 1, "ce": 0.5},
        "window": {"overlap": 0.25, "weight": "constant", "batch_size": 2},
        "tolerance": {"ball": 2},
    }
    task = validation.validate(Segment3d, tree, TABLES)
    assert task.net == DynUNetSpec(name="dynunet", filters=[8, 16, 32], weights="run:first")
    assert task.window == Window(overlap=0.25, weight="constant", batch_size=2)
    assert task.tolerance == {"ball": 2.0} and task.objective.ce == 0.5
    assert task.required_weights()["net"].weights == "run:first"
    assert validation.validate(Segment3d, validation.to_tree(task), TABLES) == task
    plain = validation.validate(Segment3d, {"net": {"name": "unet", "filters": [8, 16]}, "tolerance": 2}, TABLES)
    assert plain.tolerance == 2 and plain.required_weights() == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"tolerance": -1.0},
        {"tolerance": {"ball": float("-1")}},
        {"window": {"overlap": 1.0}},
        {"window": {"batch_size": 0}},
        {"window": {"weight": "linear"}},
        {"net": {"name": "vnet", "filters": [8, 8]}},
        {"net": {"name": "unet", "filters": [8, 8], "kernels": [3]}},
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValidationError):
        validation.validate(Segment3d, {"net": {"name": "unet", "filters": [8, 16]}, **wrong}, TABLES)


# A real network


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        UNetSpec(name="unet", filters=[8, 16]),
        DynUNetSpec(name="dynunet", filters=[8, 16, 16]),
        EmcadSpec(name="emcad", encoder="test_convnext"),
    ],
    ids=lambda spec: spec.name,
)
def test_a_small_network_learns_a_ball_and_a_box(spec):
    patch = (8, 32, 32)
    meta = DatasetInfo(3, (1, *patch), "x", class_names=NAMES, spacing=(3.0, 1.0, 1.0), axes="yzx")
    torch.manual_seed(0)
    task = Segment3d(net=spec)
    networks = task.build(meta, {}, 0)
    net, draw = networks.model, torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2 if spec.name != "emcad" else 3e-3)

    def drawn(count):
        at = torch.stack(torch.meshgrid(*(torch.arange(float(n)) for n in patch), indexing="ij"))
        mask = torch.zeros(count, *patch, dtype=torch.uint8)
        for one in mask:
            centre = torch.rand(2, 3, generator=draw) * torch.tensor([4.0, 20.0, 20.0]) + torch.tensor([2.0, 6.0, 6.0])
            away = (at[None] - centre[:, :, None, None, None]) * torch.tensor([3.0, 1.0, 1.0])[:, None, None, None]
            one[away[0].abs().amax(0) < 5] = 2
            one[away[1].square().sum(0) < 36] = 1
        value = torch.tensor([0.0, 1.5, -1.5])[mask.long()]
        return {"image": (value + 0.5 * torch.randn(value.shape, generator=draw))[:, None], "mask": mask}

    for _ in range(60):
        loss = task.loss(net, networks, drawn(2), AT)
        (loss.sum / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    rows = task.predict(net.eval(), drawn(8))
    dice = 2 * rows["intersection"].sum(0) / (rows["predicted"] + rows["actual"]).sum(0)
    assert (dice > 0.7).all(), dice
