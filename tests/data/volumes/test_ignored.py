"""nnU-Net's reserved words: voxels of `ignore` belong in no loss, score, patch or baseline, whatever is under them."""

import contextlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from organ_volumes import affine, put

from trainkit.data.volumes import importer, verify
from trainkit.data.volumes.augment import Rotate, VolumeAugment
from trainkit.data.volumes.dataset import Volumes
from trainkit.data.volumes.label_names import Classes, classes_named, of_json
from trainkit.data.volumes.volume_store import PackedVolumes
from trainkit.errors import UserError
from trainkit.interfaces import IGNORED, DatasetInfo, StepContext
from trainkit.losses.segmentation_3d import SegmentationLoss
from trainkit.metrics import surface_distance
from trainkit.metrics.segmentation_3d import planes
from trainkit.models import segmentation_3d
from trainkit.models.segmentation_specs import UNetSpec
from trainkit.tasks.segment3d import Segment3d

SHAPE = (16, 14, 8)


def phantom(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An image, labels of two organs, and where nobody labelled: a slab that cuts both."""
    rng = np.random.default_rng(seed)
    labels = np.zeros(SHAPE, np.uint8)
    labels[2:8, 3:9, 1:6], labels[9:14, 4 : 8 + seed % 3, 2:7] = 1, 2
    ignored = np.zeros(SHAPE, bool)
    ignored[5:11, 6:13] = True
    return (rng.normal(0, 0.3, SHAPE) + labels).astype(np.float32), labels, ignored


def nnunet(root: Path, labels: dict[str, object], cases: int = 3, **more: object) -> Path:
    """nnU-Net's raw form; the phantom's organs have the values of `a` and `b`."""
    for number in range(cases):
        image, drawn, ignored = phantom(number)
        written = np.where(drawn == 1, labels["a"], np.where(drawn == 2, labels["b"], 0)).astype(np.int16)
        written[ignored] = labels.get("ignore", written[ignored])
        put(root / "imagesTr" / f"c{number}_0000.nii.gz", image)
        put(root / "labelsTr" / f"c{number}.nii.gz", written)
    about = {"channel_names": {"0": "CT"}, "labels": labels, "numTraining": cases, "file_ending": ".nii.gz", **more}
    (root / "dataset.json").write_text(json.dumps(about))
    return root


# ---- What is read, what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"background": 0, "a": 1, "b": 2, "ignore": 3}, Classes(("background", "a", "b"), None, 3)),
        ({"background": 0, "a": 1, "b": 2, "ignore": 255}, Classes(("background", "a", "b"), None, 255)),
        ({"background": 0, "ignore": 1, "a": 2}, Classes(("background", "a"), (2,), 1)),
        ({"background": 0, "b": 7, "a": 4, "Ignore": 700}, Classes(("background", "a", "b"), (4, 7), 700)),
        ({"0": "background", "1": "a", "2": "ignore"}, Classes(("background", "a"), None, 2)),
        ({"background": 0, "a": 1}, Classes(("background", "a"))),
    ],
)
def test_ignore_is_no_class_whatever_its_value(labels, expected):
    assert of_json(labels, "x") == expected


def test_ignore_is_reserved_wherever_names_come_from():
    assert classes_named(["a", "ignore", "b"], "x") == Classes(("background", "a", "b"), (1, 3), 2)
    assert classes_named({"b": 5, "ignore": 9, "a": 2}, "x") == Classes(("background", "b", "a"), (5, 2), 9)


AB = {"background": 0, "a": 1, "b": 2}


@pytest.mark.parametrize(
    ("labels", "more", "said"),
    [
        ({**AB, "whole": [1, 2]}, {"regions_class_order": [1, 2, 3]}, "the region label 'whole': [1, 2]"),
        (AB, {"dataset": {"c0": {"images": [], "label": ""}}}, "the key `dataset`"),
        ({**AB, "ignore": 3, "IGNORE": 4}, {}, "'ignore' for the values 3, 4"),
        ({"ignore": 0, "a": 1, "b": 2}, {}, "0, the background"),
        ({**AB, "ignore": 2}, {}, "label 'ignore': 2"),
        ({"liver": 0, "a": 1, "b": 2}, {}, "expected 0, the background"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path, labels, more, said):
    root = nnunet(tmp_path, labels, **more)
    block = Volumes(train=str(root), patch=(8, 8, 8))
    for done in (lambda: importer.import_volumes(root, tmp_path / "out"), lambda: block.open(0)):
        with pytest.raises(UserError) as error:
            done()
        assert said in str(error.value) and error.value.where == str(root / "dataset.json")


@pytest.mark.parametrize("values", [(1, 2, 3), (1, 2, 255), (2, 3, 1), (10, 300, 7), (10, 300, 1000)])
@pytest.mark.parametrize("spacing", [None, (8.0, 3.0, 2.0)])
def test_ignored_voxels_are_no_organ_of_a_set(tmp_path, values, spacing):
    a, b, ignore = values
    root = nnunet(tmp_path / "set", {"background": 0, "a": a, "b": b, "ignore": ignore})
    importer.import_volumes(root, tmp_path / "out", spacing=spacing)
    data = PackedVolumes(tmp_path / "out")
    assert data.names == ("background", "a", "b")
    for case in range(3):
        _, labels, ignored = phantom(case)
        expected = np.where(ignored, IGNORED, labels).transpose(2, 1, 0)
        assert (data.truth(case) == expected).all() and set(np.unique(data.label(case))) == {0, 1, 2, IGNORED}
        volumes = [6.0 * ((labels == label) & ~ignored).sum() for label in range(3)]
        assert data.case(case).volumes_mm3 == pytest.approx(volumes) and set(data.case(case).facts["organs"]) == {
            "1",
            "2",
        }
        assert all((data.label(case).ravel()[data.foreground(case, label)] == label).all() for label in (1, 2))
        assert (data.label(case).ravel()[data.foreground(case, 0)] != IGNORED).all()
    assert all(line.startswith("warning: ") for line in verify.verify(root))


def test_names_of_a_recipe_go_with_the_ignored_value_of_the_files(tmp_path):
    root = nnunet(tmp_path / "set", {"background": 0, "a": 1, "b": 2, "ignore": 3})
    for number, names in enumerate((["x", "y"], {"y": 2, "x": 1}, ["x", "y", "ignore"])):
        importer.import_volumes(root, tmp_path / str(number), names=names)
        assert set(PackedVolumes(tmp_path / str(number)).names) == {"background", "x", "y"}
    with pytest.raises(UserError, match=r"a name for label 3, which .*set ignores"):
        importer.import_volumes(root, tmp_path / "out", names=["x", "y", "z"])
    (root / "dataset.json").write_text(json.dumps({"labels": {"background": 0, "a": 1, "b": 2}}))
    with pytest.raises(UserError, match="labels 3 in"):
        importer.import_volumes(root, tmp_path / "out")
    assert Volumes(train=str(root), labels={"x": 1, "y": 2, "ignore": 3}, patch=(8,) * 3).open(0).meta.classes == 3


# ---- Losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"ce": 1, "dice": 0}, {"dice": 1, "ce": 0}, {"squared": True, "empty": "count"},
        {"dice": 1, "whole_batch": True, "background": True}, {"ce": 1, "class_weights": {"b": 3.0}},
    ],
)  # fmt: skip
def test_losses_and_gradients_are_those_of_the_other_voxels(settings):
    draw = torch.Generator().manual_seed(4)
    logits = torch.randn(2, 3, 4, 5, 6, generator=draw, dtype=torch.float64, requires_grad=True)
    mask = torch.randint(0, 3, (2, 4, 5, 6), generator=draw, dtype=torch.uint8)
    known = torch.rand(1, 4, 5, 6, generator=draw).expand(2, -1, -1, -1) > 0.4
    loss = SegmentationLoss(**settings)
    weights = loss.weights(("background", "a", "b"))
    found = loss(logits, torch.where(known, mask, IGNORED), weights)
    kept = logits.movedim(1, -1)[known].view(2, -1, 3).movedim(-1, 1)  # the others alone, as rows of voxels
    torch.testing.assert_close(found, loss(kept, mask[known].view(2, -1), weights))
    (slope,) = torch.autograd.grad(found.sum(), logits)
    (expected,) = torch.autograd.grad(loss(kept, mask[known].view(2, -1), weights).sum(), logits)
    torch.testing.assert_close(slope, expected)
    assert not slope.movedim(1, -1)[~known].any()


@pytest.mark.parametrize("empty", ["skip", "count"])
def test_a_patch_without_a_labelled_voxel_costs_nothing_and_moves_nothing(empty):
    logits = torch.randn(2, 3, 2, 2, 2, requires_grad=True)
    mask = torch.full((2, 2, 2, 2), IGNORED, dtype=torch.uint8)
    loss = SegmentationLoss(empty=empty, class_weights={"a": 2.0})
    found = loss(logits, mask, loss.weights(("background", "a", "b")))
    (slope,) = torch.autograd.grad(found.sum(), logits)
    assert not found.any() and not slope.any() and slope.isfinite().all()


# ---- Scores ----------------------------------------------------------------------------------------------------------


def test_scores_of_a_case_are_those_with_the_ignored_voxels_masked_by_hand():
    _, labels, ignored = phantom(1)
    wrong = np.random.default_rng(0).integers(0, 3, SHAPE).astype(np.uint8)
    predicted = np.where(ignored, wrong, np.roll(labels, 1, axis=0))
    args = (1.0, 1.5, 4.0), 3, [1.0, 2.0]
    found = surface_distance.case_scores(predicted, np.where(ignored, IGNORED, labels), *args)
    expected = surface_distance.case_scores(np.where(ignored, 0, predicted), np.where(ignored, 0, labels), *args)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)
    assert (expected["volume_truth"] > 0).all() and math.isfinite(expected["hd95"].sum())
    shown = planes(labels, np.where(ignored, IGNORED, labels), predicted, (1.0, 1.5, 4.0), size=32)
    assert set(np.unique(shown[:, 1:])) <= {0, 1, 2}
    only = np.where(ignored, IGNORED, 0).astype(np.uint8)  # a class that is predicted there alone is in no legend
    assert not planes(labels, only, np.where(ignored, 2, 0), (1.0, 1.5, 4.0), size=32)[:, 1:].any()


class Reads(torch.nn.Module):
    """A network that takes the class of a voxel to be its value."""

    def forward(self, image):
        return torch.cat([-10 * (image - c).square() for c in range(3)], 1)


def test_the_task_counts_ignored_voxels_nowhere(monkeypatch):
    monkeypatch.setattr(segmentation_3d, "build", lambda *args: (Reads(), []))
    task = Segment3d(net=UNetSpec(name="unet", filters=[4, 8]))
    networks = task.build(DatasetInfo(3, (1, *SHAPE), "x", class_names=("background", "a", "b"), axes="zyx"), {}, 0)
    _, labels, ignored = phantom(2)
    shown = np.roll(labels, 2, axis=1)
    batches = []
    for under in (0, 1, 2):  # whatever the network says where nobody labelled
        image = torch.from_numpy(np.where(ignored, under, shown)).float()[None, None]
        batches.append({"image": image, "mask": torch.from_numpy(np.where(ignored, IGNORED, labels))[None]})
    at = StepContext(0, 0, 0.0, lambda x: x, contextlib.nullcontext)
    losses = [task.loss(networks.model, networks, batch, at) for batch in batches]
    counts = [task.predict(networks.model, batch) for batch in batches]
    whole = {
        "spacing": torch.tensor([[1.0, 1.5, 4.0]], dtype=torch.float64),
        "mirrors": torch.ones(1, 3, dtype=torch.bool),
    }
    cases = [task.predict(networks.model, batch | whole) for batch in batches]
    known = ~ignored
    dice = (
        2
        * ((shown == labels) & (labels > 0) & known).sum()
        / (((labels > 0) & known).sum() + ((shown > 0) & known).sum())
    )
    for loss, count, case in zip(losses, counts, cases, strict=True):
        torch.testing.assert_close(loss.sum, losses[0].sum)
        assert float(loss.logs["dice"]) == pytest.approx(dice)
        assert [int(n) for n in count["predicted"][0]] == [int(((shown == k) & known).sum()) for k in (1, 2)]
        assert all(torch.equal(case[name], cases[0][name]) for name in case)


# ---- Patches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["train", "patches"])
def test_patches_lie_on_labelled_voxels_and_the_augmentation_moves_what_is_ignored_with_the_image(tmp_path, kind):
    root = tmp_path / "set"
    for number in range(2):  # one labelled corner in a large volume
        image = np.random.default_rng(number).normal(0, 1, (40, 36, 24)).astype(np.float32)
        labels = np.full(image.shape, 9, np.uint8)
        labels[:6, :6, :4] = 0
        labels[1:3, 1:3, 1:3], labels[4, 4, 2] = 1, 2
        image[labels == 9] += 100
        put(root / "imagesTr" / f"c{number}_0000.nii.gz", image, affine((1, 1, 1)))
        put(root / "labelsTr" / f"c{number}.nii.gz", labels, affine((1, 1, 1)))
    names = {"background": 0, "left a": 1, "right a": 2, "ignore": 9}
    (root / "dataset.json").write_text(json.dumps({"labels": names}))
    augment = VolumeAugment(
        rotate=Rotate(p=0.5, in_plane=20), flips=["left_right", "back_front"], swap=[("left a", "right a")]
    )
    block = Volumes(train=str(root), patch=(4, 8, 8), patches=40, foreground=0.3, augment=augment)
    data = block.open(3)
    split = data.train if kind == "train" else data.evaluations["train.patches"]
    seen = set()
    for epoch in range(2):
        batch = split.on_device(split.fetch(np.arange(split.size), epoch))
        seen |= set(batch["mask"].unique().tolist())
        known = batch["mask"] != IGNORED
        assert known.flatten(1).any(1).float().mean() > 0.95
        assert (batch["image"][:, 0][~known].mean() - batch["image"][:, 0][known].mean()) > 0.5
    assert seen == {0, 1, 2, IGNORED}
