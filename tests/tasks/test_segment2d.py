"""The task of segmenting images: its loss, its counts of pixels, what is deployed of it, and what it refuses."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn
from torch.nn import functional as F

from trainkit.config import validation
from trainkit.config.schema import TABLES
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Scenes
from trainkit.interfaces import IGNORED, DatasetInfo, StepContext
from trainkit.losses.segmentation_2d import Near, Ohem, PixelLoss
from trainkit.metrics import boundary_f_score
from trainkit.metrics import segmentation_2d as scenes
from trainkit.models import segmentation_2d as segmenter
from trainkit.models.segmentation_specs import BiSeNetV2Spec, Norm, PointSpec
from trainkit.tasks.segment2d import Segment2d, point_loss

CROP, NAMES = (64, 96), ("road", "car", "pole", "sky")
META = DatasetInfo(4, (3, *CROP), "x", class_names=NAMES, distances=True)
NET = BiSeNetV2Spec(name="bisenetv2", width=0.25)
POINTS = PointSpec(points=48, subdivide=64, channels=16, layers=1)
AT = StepContext(0, 0, 0.0, lambda x: x, contextlib.nullcontext)


class Reads(nn.Module):
    """A network that takes the class of a pixel to be its red, so that an image can be its own truth."""

    multiple = least = 1

    def forward(self, image, distance=None):
        return {"logits": [torch.cat([-10 * (image[:, :1] - c).square() for c in range(4)], 1)]}


class Sees(nn.Module):
    """Sees neighbours, gives scores at half the size, and while training those of two auxiliary heads."""

    multiple, least = 4, 1

    def __init__(self):
        super().__init__()
        self.head = nn.Conv2d(3, 4, 5, stride=2, padding=2)
        self.aux_heads = nn.ModuleList(nn.Conv2d(3, 4, 3, stride=s, padding=1) for s in (2, 4))
        self.given = []

    def forward(self, image, distance=None):
        self.given.append(distance)
        out = {"logits": [self.head(image)]}
        if self.training:
            out["logits"] += [head(image) for head in self.aux_heads]
            draw = torch.Generator().manual_seed(0)
            out["points"] = torch.rand(len(image), 20, 2, generator=draw)
            out["point_logits"] = self.head.weight[:, 0, 0, 0].view(1, 4, 1) * out["points"][..., 0][:, None]
        return out


@pytest.fixture
def made(monkeypatch):
    """A task that has built a given network."""

    def make(net, meta=META, **settings):
        monkeypatch.setattr(segmenter, "build", lambda *args: (net, ["stub"]))
        task = Segment2d(net=NET, **settings)
        return task, task.build(meta, {}, 0)

    return make


def batch(seed=0, count=2, size=(24, 32), **more):
    draw = torch.Generator().manual_seed(seed)
    mask = torch.randint(0, 4, (count, *size), generator=draw, dtype=torch.uint8)
    mask[torch.rand(mask.shape, generator=draw) < 0.2] = IGNORED
    image = torch.randn(count, 3, *size, generator=draw)
    return {"image": image, "mask": mask, **more}


def whole(seed=0, count=2, size=(24, 32), scales=(1.0,), mirrors=(False, False), window=(0, 0), **more):
    """A batch of whole images, and how they are to be seen."""
    return batch(seed, count, size) | {
        "scales": torch.tensor([scales] * count),
        "mirrors": torch.tensor([mirrors] * count),
        "window": torch.tensor([window] * count),
        **more,
    }


# The loss


def test_the_loss_is_that_of_each_output_and_of_the_points(made):
    torch.manual_seed(0)
    net = Sees()
    objective = PixelLoss(ce=0.7, dice=0.3, ohem=Ohem(), near=Near(), class_weights={"pole": 3.0})
    task, networks = made(net, objective=objective, aux_weight=0.4, points=PointSpec(weight=0.6))
    assert networks.model is net and networks.notes == ("stub",)
    given = batch(distance=6 * torch.rand(2, 24, 32))
    found = task.loss(net, networks, given, AT)
    assert net.given[0] is given["distance"]
    out, weights = net(given["image"]), torch.tensor([1.0, 1, 3, 1])
    each = [objective(logits, given["mask"], given["distance"], weights) for logits in out["logits"]]
    at_points = point_loss(out["point_logits"], out["points"], given["mask"], weights)
    assert found.weight == 2
    torch.testing.assert_close(found.sum, 2 * (each[0] + 0.4 * (each[1] + each[2]) + 0.6 * at_points))
    terms = objective.terms(out["logits"][0], given["mask"], given["distance"], weights)
    assert set(found.logs) == {"ce", "dice", "aux", "points", "pixel_accuracy"}
    assert not any(value.requires_grad for value in found.logs.values())
    for name, value in {**terms, "aux": each[1] + each[2], "points": at_points}.items():
        torch.testing.assert_close(found.logs[name], value.detach())
    found.sum.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())


def test_the_logged_accuracy_is_of_labelled_pixels_at_the_networks_stride(made):
    task, networks = made(Reads())
    given = batch(3)
    logits = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    found = task.loss(lambda image, distance: {"logits": [logits]}, networks, given, AT)
    guess, right, count = logits.argmax(1), 0, 0
    for b, y, x in itertools.product(range(2), range(8), range(8)):
        true = given["mask"][b, int((y + 0.5) * 3), int((x + 0.5) * 4)]
        right, count = right + int(guess[b, y, x] == true), count + int(true != IGNORED)
    assert found.logs["pixel_accuracy"].item() == pytest.approx(right / count)


def test_a_crop_without_a_label_costs_nothing_and_moves_nothing(made):
    net = Sees()
    task, networks = made(net, objective=PixelLoss(dice=1, lovasz=1, ohem=Ohem()), points=POINTS)
    given = batch()
    given["mask"][:] = IGNORED
    found = task.loss(net, networks, given, AT)
    found.sum.backward()
    assert found.sum == 0 and all((p.grad == 0).all() for p in net.parameters())
    assert found.logs["pixel_accuracy"] == 0


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
    weighted=st.booleans(),
)
def test_a_point_has_the_class_of_the_pixel_it_lies_in(seed, size, ignored, weighted):
    draw = torch.Generator().manual_seed(seed)
    mask = torch.randint(4, (2, *size), generator=draw, dtype=torch.uint8)
    mask[torch.rand(mask.shape, generator=draw) < ignored] = IGNORED
    points = torch.rand(2, 7, 2, generator=draw)
    points[0, 0], points[0, 1] = torch.tensor([1.0, 1.0]), torch.tensor([0.0, 1.0])
    logits = torch.randn(2, 4, 7, generator=draw)
    weights = torch.tensor([1.0, 2, 0.5, 3]) if weighted else None
    total = count = 0.0
    for b, n in itertools.product(range(2), range(7)):
        x, y = (np.float32(v) for v in points[b, n].tolist())
        row, column = min(int(y * size[0]), size[0] - 1), min(int(x * size[1]), size[1] - 1)
        label = int(mask[b, row, column])
        if label != IGNORED:
            weight = 1.0 if weights is None else float(weights[label])
            total -= weight * float(logits[b, :, n].double().log_softmax(0)[label])
            count += weight
    found = point_loss(logits, points, mask, weights)
    assert found.item() == pytest.approx(total / count if count else 0.0, rel=1e-5, abs=1e-7)


# Predictions


VIEWS = [
    {},
    {"scales": (0.75, 1.5), "mirrors": (False, True)},
    {"window": (12, 16), "mirrors": (True, True)},
    {"scales": (0.5, 1.0), "window": (16, 16)},
]


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_pixels_are_counted_of_the_most_probable_class(made, view):
    net = Sees().eval()
    task, _ = made(net)
    given = whole(**view)
    rows = task.predict(net, given)
    found = task.probabilities(net, given["image"], **view).argmax(1)
    within = 0.0075 * np.hypot(24, 32)
    expected = scenes.pixel_counts(found, given["mask"], 4)
    expected |= boundary_f_score.boundary_counts(found, given["mask"], 4, within)
    assert rows.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(rows[name], value), name
    a, b = found.numpy(), given["mask"].numpy()
    for c in range(4):
        assert rows["actual"][:, c].tolist() == (b == c).sum((1, 2)).tolist()
        assert rows["intersection"][:, c].tolist() == ((a == c) & (b == c)).sum((1, 2)).tolist()
        assert rows["predicted"][:, c].tolist() == ((a == c) & (b != IGNORED)).sum((1, 2)).tolist()


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_scores_do_not_depend_on_how_many_are_seen_at_once(made, view):
    net = Sees().eval()
    task, _ = made(net)
    given = whole(count=3, **view)
    together = task.predict(net, given)
    alone, _ = made(net, window_batch=1)
    each = [alone.predict(net, {key: value[i : i + 1] for key, value in given.items()}) for i in range(3)]
    for name in together:
        assert torch.equal(together[name], torch.cat([rows[name] for rows in each])), name


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_pictures_are_scored_at_the_size_of_their_masks(made, view):
    net = Sees().eval()
    task, _ = made(net)
    given = whole(**view) | {"mask": whole(size=(51, 40))["mask"]}
    found = task.probabilities(net, given["image"], **view, size=(51, 40)).argmax(1)
    expected = scenes.pixel_counts(found, given["mask"], 4)
    rows = task.predict(net, given)
    for name, value in expected.items():
        assert torch.equal(rows[name], value), name
    if not view:
        with torch.no_grad():
            scores = net(given["image"])["logits"][0]
        assert torch.equal(found, F.interpolate(scores, (51, 40), mode="bilinear").argmax(1))


@pytest.mark.parametrize("mirrors", [(False, False), (True, True)])
def test_a_perfect_network_is_perfect(made, mirrors):
    task, _ = made(Reads())
    given = whole(size=(20, 30), mirrors=mirrors)
    given["image"][:, 0] = torch.where(given["mask"] == IGNORED, 2, given["mask"]).float()
    rows = {name: value.float() for name, value in task.predict(Reads(), given).items()}
    scores = task.score(rows, SimpleNamespace(name="val", protocol=Scenes(("a", "b"), NAMES)))
    for name in ("miou", "pixel_accuracy", "mean_accuracy", "boundary_f", "iou.pole"):
        assert scores.metrics[name] == 1.0, name


def test_boundaries_are_not_counted_where_they_are_not_scored(made):
    task, _ = made(Reads(), boundary=None)
    rows = {name: value.float() for name, value in task.predict(Reads(), whole()).items()}
    assert not any(name.startswith("edge") for name in rows)
    scores = task.score(rows, SimpleNamespace(name="val", protocol=Scenes(("a", "b"), NAMES)))
    assert "boundary_f" not in scores.metrics and "miou" in scores.metrics


def test_maps_to_be_drawn_come_with_pictures_that_are_to_be_drawn(made):
    task, _ = made(Reads())
    given = whole(overlay=torch.ones(2, dtype=torch.bool))
    rows = task.predict(Reads(), given)
    assert torch.equal(rows["seen_truth"][:, :24, :32], given["mask"])
    assert rows["seen_predicted"].shape == rows["seen_truth"].shape
    assert "seen_truth" not in task.predict(Reads(), whole())


# What is deployed


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("size", [(24, 32), (25, 39), (64, 96)])
def test_what_is_deployed_maps_pixels_to_the_scores_that_are_evaluated(made, size, corners):
    net, mean, std = Sees().eval(), (0.4, 0.5, 0.3), (0.2, 0.3, 0.25)
    task, _ = made(net, align_corners=corners)
    pixels = torch.randint(0, 256, (2, 3, *size), generator=torch.Generator().manual_seed(0)).float()
    with torch.no_grad():
        logits = task.deployable(net, mean, std)(pixels)
    image = torch.stack([(pixels[:, c] / 255 - mean[c]) / std[c] for c in range(3)], 1)
    assert logits.shape == (2, 4, *size) and logits.dtype == torch.float32
    torch.testing.assert_close(logits.softmax(1), task.probabilities(net, image), rtol=1e-5, atol=1e-6)
    other, _ = made(net, align_corners=not corners)
    fits = not any(side % task._multiple for side in size)  # then only scores are resized, by borders
    assert torch.equal(other.probabilities(net, image), task.probabilities(net, image)) == fits


# A real network


def blobs(count, seed, size=CROP):
    """Images of bars and discs whose colour tells their class, and distances as far as anyone looks."""
    draw = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(*(torch.arange(float(side)) for side in size), indexing="ij")
    mask = torch.zeros(count, *size, dtype=torch.uint8)
    for one in mask:
        a, b, c = (torch.rand(3, generator=draw) * torch.tensor([size[0], size[1], size[1]])).tolist()
        one[y < a / 2] = 3
        one[(y - a).abs() + (x - b).abs() < 20] = 1
        one[(x - c).abs() < 5] = 2
    mask[:, :4] = IGNORED
    colour = torch.tensor([[0.0, 0, 0], [2, 0, -1], [-2, 1, 0], [0, -2, 2]])
    image = colour[mask.long().clamp_max(3)].movedim(-1, 1)
    image = image + 0.3 * torch.randn(image.shape, generator=draw)
    return {"image": image, "mask": mask, "distance": 8 * torch.rand(count, *size, generator=draw)}


@pytest.mark.parametrize("points", [None, POINTS], ids=["plain", "points"])
def test_bisenet_goes_through_training_evaluation_and_deployment(points):
    torch.manual_seed(0)
    task = Segment2d(net=NET, points=points, norm=Norm(name="group"), objective=PixelLoss(ohem=Ohem(), near=Near()))
    networks = task.build(META, {}, 0)
    net, given = networks.model, blobs(2, 0)
    found = task.loss(net, networks, given, AT)
    found.sum.backward()
    assert all(p.grad is not None for p in net.parameters())
    assert ("points" in found.logs) == (points is not None)
    net.eval()
    view = {"scales": torch.tensor([[0.5, 1.0]] * 2), "mirrors": torch.tensor([[False, True]] * 2)}
    rows = task.predict(net, given | view | {"window": torch.tensor([[64, 64]] * 2)})
    assert (rows["actual"].sum(1) == (given["mask"] != IGNORED).sum((1, 2))).all()
    zero, one = (0.0, 0.0, 0.0), (1 / 255,) * 3
    with torch.no_grad():
        logits = task.deployable(net, zero, one)(given["image"])
    torch.testing.assert_close(logits.softmax(1), task.probabilities(net, given["image"]), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("points", [None, PointSpec(points=256, near=0.25, subdivide=512)], ids=["plain", "points"])
def test_a_small_network_learns_bars_and_discs(points):
    torch.manual_seed(0)
    task = Segment2d(net=NET, points=points, objective=PixelLoss(ohem=Ohem(), near=Near()))
    networks = task.build(META, {}, 0)
    net = networks.model
    optimizer = torch.optim.SGD(net.parameters(), 0.02, momentum=0.9)
    for step in range(60):
        loss = task.loss(net, networks, blobs(4, step), AT)
        (loss.sum / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    given = blobs(8, 999)
    view = {
        "scales": torch.ones(8, 1),
        "mirrors": torch.zeros(8, 2, dtype=torch.bool),
        "window": torch.zeros(8, 2).long(),
    }
    rows = {name: value.float() for name, value in task.predict(net.eval(), given | view).items()}
    ids = tuple("abcdefgh")
    scores = task.score(rows, SimpleNamespace(name="val", protocol=Scenes(ids, NAMES)))
    assert scores.metrics["miou"] > 0.75, scores.metrics


# What is refused


@pytest.mark.parametrize(
    ("asks", "place"),
    [
        ({"objective": PixelLoss(near=Near())}, r"task\.objective\.near"),
        ({"points": PointSpec(near=0.5)}, r"task\.points\.near"),
    ],
)
def test_without_distances_what_needs_them_is_refused(made, asks, place):
    with pytest.raises(UserError, match=place + r".*data\.distance"):
        made(Sees(), meta=replace(META, distances=False), **asks)


def test_classes_that_the_data_does_not_have_are_named(made):
    with pytest.raises(UserError, match=r"task\.objective\.class_weights: class 'carr'.*car"):
        made(Sees(), objective=PixelLoss(class_weights={"carr": 2.0}))


def test_a_recipe_says_everything_in_words():
    tree = {
        "net": {"name": "bisenetv1", "weights": "run:first"},
        "norm": {"name": "sync"},
        "points": {"points": 256, "near": 0.25},
        "objective": {"ohem": {"probability": 0.6}, "near": {}, "lovasz": 0.5},
        "aux_weight": 1,
        "boundary": None,
    }
    task = validation.validate(Segment2d, tree, TABLES)
    assert task.objective == PixelLoss(ohem=Ohem(probability=0.6), near=Near(), lovasz=0.5)
    assert task.required_weights()["net"].weights == "run:first" and task.batch_norm == "sync"
    assert task.boundary is None and task.points.points == 256
    assert validation.validate(Segment2d, validation.to_tree(task), TABLES) == task
    plain = validation.validate(Segment2d, {"net": {"name": "bisenetv2"}}, TABLES)
    assert (
        plain.required_weights() == {}
        and plain.batch_norm == "batch"
        and plain.points is None
        and plain.boundary == 0.0075
    )
    group = validation.validate(Segment2d, {"net": {"name": "bisenetv2"}, "norm": {"name": "group"}}, TABLES)
    assert group.batch_norm is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"aux_weight": -1.0},
        {"boundary": 0.5},
        {"boundary": -0.1},
        {"window_batch": 0},
        {"objective": {"ohem": {"least": 2.0}}},
        {"objective": {"focal": 1.0}},
        {"norm": {"name": "layer"}},
        {"net": {"name": "bisenetv3"}},
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValidationError):
        validation.validate(Segment2d, {"net": {"name": "bisenetv2"}, **wrong}, TABLES)
