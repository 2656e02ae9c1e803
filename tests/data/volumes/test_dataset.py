"""The data block `volumes`: what is opened, divided, cut into patches, kept in memory and offered for scoring."""

import logging
import math
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit import files
from trainkit.config.validation import validate
from trainkit.data.volumes import dataset
from trainkit.data.volumes.augment import Noise, Rotate, VolumeAugment
from trainkit.data.volumes.dataset import Volumes, fold_of
from trainkit.data.volumes.patch_reader import PatchReader, cut
from trainkit.data.volumes.preprocess import Preparation
from trainkit.data.volumes.splits import CaseSplit, PatchSplit
from trainkit.data.volumes.volume_store import CaseInfo, PackedVolumes, Writer
from trainkit.errors import UserError
from trainkit.interfaces import Data

NAMES = ("background", "a", "b", "c")
SPACING = (3.0, 1.0, 1.0)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRAINKIT_DATA", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.fixture(autouse=True)
def packed_before(monkeypatch):
    """A folder that `pack` made stands for files that were packed to it."""
    opened, made = dataset.volume_sources.open_volumes, dataset.importer.pack_volumes_once

    def open_volumes(path, **how):
        if not (Path(path) / "manifest.json").is_file():
            return opened(path, **how)
        return SimpleNamespace(path=path, names=None, channels=(), left_out=())

    def pack_volumes_once(source, **how):
        return PackedVolumes(source.path) if isinstance(source, SimpleNamespace) else made(source, **how)

    monkeypatch.setattr(dataset.volume_sources, "open_volumes", open_volumes)
    monkeypatch.setattr(dataset.importer, "pack_volumes_once", pack_volumes_once)


def volume(seed: int, shape: tuple[int, int, int], organs: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Noise, and labels: organ k is a block of its own in the first half of the slices, 4 voxels from the border."""
    image = np.random.default_rng(seed).normal(size=shape).astype(np.float16)
    label = np.zeros(shape, np.uint8)
    for organ in range(1, organs + 1):
        label[shape[0] // 3 : shape[0] // 2 + 1, 4:-4, 4 * organ : 4 * organ + 2 + organ] = organ
    return image, label


def pack(
    out: Path,
    cases: list[tuple[str, tuple[int, int, int]]],
    *,
    first: int = 0,
    names: tuple[str, ...] = NAMES,
    axes: str = "yzx",
    spacing: tuple[float, float, float] | None = None,
    organs: int = 3,
) -> Path:
    """A packed set of cases (id, shape); the patient is what stands before `_`. With `spacing` the grid of the
    files is twice as fine within slices as the prepared one."""
    with Writer(out, how=Preparation(axes, spacing)) as writer:
        for number, (name, shape) in enumerate(cases):
            image, label = volume(first + number, shape, organs)
            truth = None if spacing is None else label.repeat(2, 1).repeat(2, 2)
            original = SPACING if spacing is None else (spacing[0], spacing[1] / 2, spacing[2] / 2)
            info = CaseInfo(
                id=name,
                patient=name.split("_")[0],
                shape=shape,
                spacing=spacing or SPACING,
                original_shape=shape if truth is None else truth.shape,
                original_spacing=original,
                floors=(float(image.min()) - 0.1,),
                volumes_mm3=tuple(float((label == k).sum()) for k in range(len(names))),
                facts={"std": 1.0},
            )
            writer.add_case(info, image[None], label, truth, first + number)
        writer.finish(names=names)
    return out


def people(count: int, letter: str = "p", shape: tuple[int, int, int] = (12, 24, 32)) -> list:
    return [(f"{letter}{number}_1", shape) for number in range(count)]


@pytest.fixture
def train(tmp_path) -> Path:
    """Eight people, of whom p7 has two cases; sizes differ."""
    return pack(tmp_path / "train", [*people(8), ("p7_2", (14, 30, 24))])


def block(path: Path | str, **more) -> Volumes:
    return Volumes(**({"train": str(path), "patch": (8, 16, 16)} | more))


def expected_patch(packed: PackedVolumes, case: int, start: np.ndarray, size: tuple) -> tuple[np.ndarray, np.ndarray]:
    """Voxel by voxel along each axis, through a padded copy."""
    room = [(s, s) for s in size]
    image = np.pad(packed.image(case)[0], room, constant_values=np.float16(packed.case(case).floors[0]))
    label = np.pad(packed.label(case), room)
    here = tuple(slice(s + p, s + 2 * p) for s, p in zip(start, size, strict=True))
    return image[here], label[here]


# ---- What is opened --------------------------------------------------------------------------------------------------


def test_a_set_opens_as_what_it_holds(train):
    data = block(train, patches=3)
    assert isinstance(data, Data) and not data.missing()
    opened = data.open(seed=0)
    packed = PackedVolumes(train)
    assert opened.meta.classes == 4 and opened.meta.class_names == NAMES and opened.meta.shape == (1, 8, 16, 16)
    assert opened.meta.spacing == SPACING and opened.meta.axes == "yzx" and opened.meta.digest == packed.digest
    assert opened.train.size == 27 and opened.train.protocol is None and opened.train.views == 0
    assert opened.train.at_once is None and opened.train.digest == packed.digest
    kinds = ["train", "train.few", "train.mirrored", "train.overlays", "train.patches"]
    assert list(opened.evaluations) == kinds and [split.name for split in opened.evaluations.values()] == kinds
    assert opened.notes == ()


def orbit(root: Path, part: str, patients: list[str], seed: int) -> None:
    """TOM500's layout: coronal slices of 0.5 x 0.75 mm, 4 mm apart, stored to the left, up and to the front."""
    nibabel = pytest.importorskip("nibabel")
    rng = np.random.default_rng(seed)
    for kind in ("image", "label"):
        (root / part / kind).mkdir(parents=True, exist_ok=True)
    for patient in patients:
        image = rng.normal(100, 20, (20, 18, 7)).astype(np.float32)
        label = np.zeros(image.shape, np.uint8)
        label[3:8, 5:9, 2:4], label[12:17, 5:9, 3:5] = 1, 2
        affine = np.array([[-0.5, 0, 0, 5], [0, 0, 4, -9], [0, 0.75, 0, 3], [0, 0, 0, 1.0]])
        for kind, array in (("image", image), ("label", label)):
            nibabel.save(nibabel.Nifti1Image(array, affine), root / part / kind / f"{patient}.nii.gz")


def test_files_are_imported_once_and_read_in_stored_order(tmp_path):
    import nibabel

    root = tmp_path / "orbits"
    orbit(root, "train", ["7", "12", "33"], 0)
    orbit(root, "val", ["8", "21"], 1)
    data = block(f"{root}#train", evaluate={"val": f"{root}#val"}, names=["nerve", "gland"], patch=(4, 8, 8))
    assert not data.missing()
    opened = data.open(0)
    meta = opened.meta
    assert meta.class_names == ("background", "nerve", "gland") and meta.axes == "yzx" and meta.resampled == ()
    assert np.allclose(meta.spacing, (4.0, 0.75, 0.5))
    split = opened.evaluations["val"]
    assert split.protocol.ids == ("21", "8")
    batch = split.fetch(np.array([1]), 0)
    label = np.asarray(nibabel.load(root / "val/label/8.nii.gz").dataobj)
    # From (left, up, front) to (front, up, right).
    assert (batch["mask"][0].numpy() == label.transpose(2, 1, 0)[:, :, ::-1]).all()
    assert np.allclose(batch["spacing"], [[4.0, 0.75, 0.5]])
    values = np.asarray(nibabel.load(root / "val/image/8.nii.gz").dataobj).transpose(2, 1, 0)[:, :, ::-1]
    assert np.corrcoef(values.ravel(), batch["image"].numpy().astype(float).ravel())[0, 1] > 0.99
    cached = sorted((tmp_path / "cache").glob("volumes-*/manifest.json"))
    times = [file.stat().st_mtime_ns for file in cached]
    again = data.open(1)
    assert len(cached) == 2 and times == [file.stat().st_mtime_ns for file in cached]
    assert again.meta == meta
    finer = block(f"{root}#train", names=["nerve", "gland"], patch=(4, 8, 8), spacing=(4.0, 1.0, 1.0)).open(0)
    assert finer.meta.resampled == (4.0, 1.0, 1.0) and finer.meta.digest != meta.digest
    assert finer.evaluations["train"].content == again.evaluations["train"].content, "the same files, another grid"
    whole = finer.evaluations["train"].fetch(np.array([0]), 0)
    assert whole["image"].shape[2:] == (7, 14, 10) and whole["mask"].shape[1:] == (7, 18, 20)


def test_files_to_be_scored_are_prepared_as_the_training_set_was(tmp_path):
    names, grid = ("background", "nerve", "gland"), (4.0, 2.0, 1.5)
    train = pack(tmp_path / "train", people(2), names=names, spacing=grid, organs=2, axes="zyx")
    orbit(tmp_path / "orbits", "val", ["8", "21"], 1)
    split = block(train, evaluate={"val": f"{tmp_path}/orbits#val"}).open(0).evaluations["val"]
    assert split.packed.names == names and split.packed.axes == "zyx" and split.packed.preparation.spacing == grid
    (tmp_path / "orbits/val/dataset.json").write_text('{"labels": {"background": 0, "gland": 1, "nerve": 2}}')
    with pytest.raises(UserError, match=r"labels gland, nerve; expected those of data\.train: nerve, gland"):
        block(train, evaluate={"val": f"{tmp_path}/orbits#val"}).open(0)


def test_a_path_that_leads_nowhere_is_told_before_anything_is_imported(tmp_path):
    orbit(tmp_path / "orbits", "train", ["7", "12"], 0)
    with pytest.raises(UserError, match=r"nowhere.* does not exist"):
        block(f"{tmp_path}/orbits#train", evaluate={"val": f"{tmp_path}/nowhere"}).open(0)
    assert not list((tmp_path / "cache").glob("volumes-*"))


def test_missing_files_are_named(tmp_path, train):
    data = block(train, evaluate={"val": str(tmp_path / "none#val")})
    assert data.missing() == [f"data.evaluate.val: {tmp_path / 'none'} does not exist"]
    held = block(train, fold=0, folds=2, evaluate={"held": "held_out"})
    assert not held.missing() and not Volumes(train="sample:orbits", patch=(8, 8, 8)).missing()


@pytest.mark.parametrize(
    "wrong",
    [
        {"patch": (0, 4, 4)},
        {"patch": (4096, 4096, 4096)},
        {"spacing": (1.0, 0.0, 1.0)},
        {"spacing": (1.0, 1e9, 1.0)},
        {"patches": 0},
        {"few": 0},
        {"foreground": 1.1},
        {"folds": 1},
        {"fold": 5},
        {"fold": -1},
        {"names": []},
        {"names": ["a", "a"]},
        {"patient": "("},
        {"patient": "(a)(b)"},
        {"evaluate": {"val": "held_out"}},
        {"evaluate": {"held_out": "elsewhere"}, "fold": 0},
        {"evaluate": {"train": "x"}},
        {"evaluate": {"v.few": "x"}},
    ],
)
def test_settings_that_cannot_be_meant_are_refused(wrong):
    with pytest.raises(ValueError):
        validate(Volumes, {"train": "x", "patch": [8, 8, 8]} | wrong, {})


def test_labels_axes_and_grids_that_differ_are_refused(tmp_path, train):
    def fails(match: str, other: Path, **more) -> None:
        with pytest.raises(UserError, match=match):
            block(train, evaluate={"val": str(other)}, **more).open(0)

    fails("labels x, y, z", pack(tmp_path / "names", people(2, "q"), first=50, names=("background", "x", "y", "z")))
    fails(
        r"slices from feet to head; expected those of data\.train: from back to front",
        pack(tmp_path / "axes", people(2, "q"), first=50, axes="zyx"),
    )
    fails("resampled to 3x2x2 mm", pack(tmp_path / "grid", people(2, "q"), first=50, spacing=(3.0, 2.0, 2.0)))
    with pytest.raises(UserError, match="unknown label 'x'"):
        block(train, augment=VolumeAugment(flips=["left_right"], swap=[("a", "x")])).open(0)
    with pytest.raises(UserError, match=r"no built-in set.*sample:orbits"):
        Volumes(train="sample:moon", patch=(8, 8, 8)).open(0)


def test_what_is_odd_is_said(tmp_path):
    path = pack(tmp_path / "set", [*people(2), ("q_1", (6, 40, 40))], organs=2)
    notes = block(path, augment=VolumeAugment(rotate=Rotate(in_plane=45))).open(0).notes
    assert any("smaller than the patch of 8x16x16: 1 along depth, of 3" in note for note in notes)
    assert any(note == "no voxel of c in any training case" for note in notes)
    assert any("read with a margin of 0x4x4 voxels" in note for note in notes)


# ---- Patches ---------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_cut_is_what_padding_would_give(data):
    shape, size = (data.draw(st.tuples(*[st.integers(1, 7)] * 3)) for _ in range(2))
    start = [data.draw(st.integers(-9, 9)) for _ in range(3)]
    dtype = data.draw(st.sampled_from([np.float16, np.uint8]))
    values = np.arange(1, math.prod(shape) + 1).reshape(shape).astype(dtype)
    out = np.full((2, *size), 99, dtype)
    cut(values, start, out[1], 7)
    padded = np.pad(values, 17, constant_values=7)
    expected = padded[tuple(slice(s + 17, s + 17 + p) for s, p in zip(start, size, strict=True))]
    assert (out[1] == expected).all() and (out[0] == 99).all()


def test_a_batch_holds_the_voxels_of_its_patches(train):
    split = block(train, patches=4).open(3).train
    rows = np.array([35, 0, 17, 2])
    batch = split.fetch(rows, epoch=5)
    assert set(batch) == {"image", "mask", "index", "view"}
    assert batch["image"].dtype == torch.float16 and batch["image"].shape == (4, 1, 8, 16, 16)
    assert batch["mask"].dtype == torch.uint8 and batch["mask"].shape == (4, 8, 16, 16)
    assert batch["index"].tolist() == rows.tolist() and batch["view"].tolist() == [0] * 4
    for place, (row, start) in enumerate(zip(rows, split.starts(rows, 5), strict=True)):
        image, label = expected_patch(split.packed, row // 4, start, split.patch)
        assert (batch["image"][place, 0].numpy() == image).all() and (batch["mask"][place].numpy() == label).all()
    done = split.on_device(batch)
    assert set(done) == set(batch) and done["image"].dtype == torch.float32 and done["mask"].dtype == torch.uint8
    assert torch.equal(done["image"], batch["image"].float())


def test_volumes_smaller_than_the_patch_are_filled_with_their_floor(tmp_path):
    path = pack(tmp_path / "set", [("p0_1", (5, 40, 20)), ("p1_1", (12, 12, 40))])
    split = block(path, patches=50).open(0).train
    rows = np.arange(100)
    batch, starts = split.fetch(rows, 0), split.starts(rows, 0)
    assert starts[:50, 0].min() == -3 and starts[:50, 0].max() == 0
    for row in rows:
        packed, case = split.packed, row // 50
        image, label = expected_patch(packed, case, starts[row], split.patch)
        assert (batch["image"][row, 0].numpy() == image).all() and (batch["mask"][row].numpy() == label).all()
        outside = math.prod(split.patch) - math.prod(np.minimum(packed.case(case).shape, split.patch))
        assert (batch["image"][row] == np.float16(packed.case(case).floors[0])).sum() == outside


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(*[st.integers(1, 40)] * 3), min_size=1, max_size=4),
    patch=st.tuples(*[st.integers(1, 32)] * 3),
    seed=st.integers(0, 2**40),
)
def test_a_patch_lies_inside_or_holds_all(shapes, patch, seed):
    def known(case: int, organ: int) -> np.ndarray:  # one organ, at every eleventh voxel of even cases
        return np.arange(0, math.prod(shapes[case]), 11, dtype=np.int32) if case % 2 == 0 else np.empty(0, np.int32)

    packed = SimpleNamespace(
        on_network=False,
        case=lambda case: SimpleNamespace(shape=shapes[case], floors=(0.0,)),
        foreground=known,
        names=("background", "x"),
        channels=1,
    )
    cases = np.arange(len(shapes))
    split = PatchSplit("train", packed, cases, PatchReader(packed, cases), seed, patch, 8, 0.5, VolumeAugment())
    rows = np.arange(split.size)
    starts, size = split.starts(rows, 1), np.asarray(shapes)[rows // 8]
    inside = (starts >= 0) & (starts + patch <= size)
    whole = (starts <= 0) & (starts + patch >= size)
    assert (inside | whole).all()


def test_the_share_of_organs_is_what_was_asked_for(tmp_path):
    # Thin blocks far from the border, so that nothing is clamped and patches elsewhere rarely have one in the middle.
    path = pack(tmp_path / "set", [("p0_1", (40, 40, 40)), ("p1_1", (40, 48, 44)), ("p2_1", (32, 40, 40))])
    count = 1200

    def middles(share: float, patch: tuple = (5, 5, 5)) -> np.ndarray:
        split = block(path, patches=count // 3, foreground=share, patch=patch).open(1).train
        return split.fetch(np.arange(count), 0)["mask"][:, patch[0] // 2, patch[1] // 2, patch[2] // 2].numpy()

    everywhere, never, some = middles(1.0), middles(0.0), middles(0.33)
    assert (everywhere > 0).all()
    drawn = np.bincount(everywhere, minlength=4)[1:]
    # Each organ as likely as another though they differ in size: 400 of 1200 each, deviation 16.3.
    assert np.abs(drawn - count / 3).max() < 4 * math.sqrt(count * 2 / 9)
    base = (never > 0).mean()
    assert base < 0.2
    share = 0.33 + 0.67 * base
    assert abs((some > 0).mean() - share) < 4 * math.sqrt(share * (1 - share) / count)
    # Which voxel of an organ: all of them come up, and none twice as often as chance allows.
    split = block(path, patches=3000, foreground=1.0, patch=(1, 1, 1)).open(1).train
    starts = split.starts(np.arange(3000), 0)
    flat = np.ravel_multi_index(starts.T, split.packed.case(0).shape)
    organ = split.packed.foreground(0, 2)
    hits = np.bincount(np.searchsorted(organ, flat[np.isin(flat, organ)]), minlength=len(organ))
    assert 900 < hits.sum() < 1100 and np.isin(flat, np.flatnonzero(split.packed.label(0))).all()
    quarters = [part.sum() for part in np.array_split(hits, 4)]
    assert max(quarters) < 1.35 * min(quarters)


def test_a_case_without_organs_gives_patches_from_anywhere(tmp_path):
    path = pack(tmp_path / "set", people(1), organs=0)
    split = block(path, patches=30, foreground=1.0).open(0).train
    assert (
        split.fetch(np.arange(30), 0)["mask"].max() == 0 and len(np.unique(split.starts(np.arange(30), 0), axis=0)) > 9
    )


def test_a_patch_is_a_function_of_seed_epoch_and_row(train):
    split = block(train).open(7).train
    rows = np.arange(split.size)
    alone = np.concatenate([split.starts(rows[[row]], 2) for row in rows])
    together = split.starts(rows, 2)
    assert (alone == together).all() and (split.starts(rows[::-1], 2) == together[::-1]).all()
    for other in (split.starts(rows, 3), block(train).open(8).train.starts(rows, 2)):
        assert (other != together).any(1).mean() > 0.9
    draws = together.reshape(-1, 4, 3)
    assert any((draws[0, 0] != draw).any() for draw in draws[0, 1:])


def test_the_augmentation_gets_its_margin_and_its_numbers(train):
    augment = VolumeAugment(rotate=Rotate(p=1.0, in_plane=30), noise=Noise(p=1.0), flips=["left_right"])
    split = block(train, augment=augment).open(4).train
    rows = np.array([9, 30, 4])
    assert split.margin == augment.margin((8, 16, 16), SPACING) and min(split.margin[1:]) > 0
    batch = split.fetch(rows, 1)
    size = tuple(p + 2 * m for p, m in zip(split.patch, split.margin, strict=True))
    assert batch["image"].shape == (3, 1, *size) and batch["mask"].shape == (3, *size)
    for place, start in enumerate(split.starts(rows, 1) - split.margin):
        image, label = expected_patch(split.packed, rows[place] // 4, start, size)
        assert (batch["image"][place, 0].numpy() == image).all() and (batch["mask"][place].numpy() == label).all()
    numbers = augment.numbers(4, 1, rows, split.patch, SPACING, "yzx", NAMES)
    assert all((batch[key].numpy() == value).all() for key, value in numbers.items())
    image, mask = augment.apply(
        batch["image"].float(), batch["mask"], {k: torch.from_numpy(v) for k, v in numbers.items()}, split.patch
    )
    done = split.on_device(batch)
    assert set(done) == {"image", "mask", "index", "view"} and done["image"].shape == (3, 1, 8, 16, 16)
    assert torch.equal(done["image"], image) and torch.equal(done["mask"], mask)
    assert not torch.equal(done["image"], block(train).open(4).train.on_device(split.fetch(rows, 1))["image"][..., :8])


# ---- How volumes are read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("augment", [VolumeAugment(), VolumeAugment(rotate=Rotate(p=1.0), flips=["left_right"])])
def test_patches_of_a_set_on_a_network_disk_have_the_same_bits(tmp_path, monkeypatch, augment):
    path = pack(tmp_path / "set", [*people(3), ("q_1", (5, 40, 20)), ("r_1", (20, 10, 12))])
    batches = []
    for on_network in (False, True):
        monkeypatch.setattr(files, "on_network", lambda folder, on_network=on_network: on_network)
        split = block(path, augment=augment, fold=0, folds=4).open(0).train
        assert split.packed.on_network == on_network and len(split.cases) < 5
        batches.append(split.on_device(split.fetch(np.arange(split.size)[::-1], 3)))
    for key, value in batches[0].items():
        assert value.dtype == batches[1][key].dtype and torch.equal(value, batches[1][key]), key


def test_a_split_travels_to_a_spawned_worker(train):
    split = block(train).open(0).train
    rows = np.array([3, 20])
    here = split.on_device(split.fetch(rows, 0))
    packet = pickle.dumps(split)
    assert len(packet) < 10_000  # the volumes, of 300 kB, stay here
    there = pickle.loads(packet)
    again = there.on_device(there.fetch(rows, 0))
    assert all(torch.equal(here[key], again[key]) for key in here)


@pytest.mark.parametrize("on_network", [False, True])
def test_a_damaged_volume_is_named_when_it_is_first_read(train, monkeypatch, on_network):
    monkeypatch.setattr(files, "on_network", lambda folder: on_network)
    split = block(train).open(0).train
    whole = CaseSplit("val", split.packed, split.cases)
    with open(train / "rows.arrow", "r+b") as file:  # in place, where the map sees it
        file.seek(split.packed.span("label", 2)[0] + 5)
        file.write(b"\x09")
    with pytest.raises(UserError, match=r"case 2 \(p2_1\).*labels"):
        split.on_device(split.fetch(np.array([8]), 0))
    with pytest.raises(UserError, match=r"case 2 \(p2_1\).*labels"):
        whole.fetch(np.array([2]), 0)
    assert whole.fetch(np.array([1]), 0)["mask"].max() == 3


# ---- What is scored --------------------------------------------------------------------------------------------------


def test_whole_cases_are_read_one_by_one_on_the_grid_of_their_files(tmp_path, train):
    names, grid = NAMES, (3.0, 2.0, 2.0)
    first = pack(tmp_path / "first", people(2), spacing=grid)
    path = pack(tmp_path / "val", people(2, "q", (10, 20, 24)), first=40, spacing=grid)
    evaluations = block(first, evaluate={"val": str(path)}, patches=3).open(0).evaluations
    split, packed = evaluations["val"], PackedVolumes(path)
    assert split.size == 2 and split.at_once == 1 and split.views == 1 and split.digest == packed.digest
    batch = split.on_device(split.fetch(np.array([1]), 0))
    assert set(batch) == {"image", "mask", "spacing", "mirrors", "index", "view"}
    assert batch["image"].dtype == torch.float32 and batch["image"].shape == (1, 1, 10, 20, 24)
    assert (batch["image"][0, 0].numpy() == packed.image(1).astype(np.float32)).all()
    assert batch["mask"].dtype == torch.uint8 and batch["mask"].shape == (1, 10, 40, 48)
    assert (batch["mask"][0].numpy() == volume(41, (10, 20, 24))[1].repeat(2, 1).repeat(2, 2)).all()
    assert batch["spacing"].dtype == torch.float64 and batch["spacing"].tolist() == [[3.0, 1.0, 1.0]]
    assert batch["mirrors"].tolist() == [[False] * 3] and batch["index"].tolist() == [1]
    assert split.protocol.ids == ("q0_1", "q1_1") and split.protocol.patients == ("q0", "q1")
    assert split.protocol.names == names and split.protocol.kind == "whole"
    mirrored = evaluations["val.mirrored"]
    assert mirrored.fetch(np.array([0]), 0)["mirrors"].tolist() == [[True] * 3] and mirrored.protocol == split.protocol
    overlays = evaluations["val.overlays"].fetch(np.array([0]), 0)
    assert overlays["overlay"].tolist() == [True] and evaluations["val.overlays"].protocol.kind == "overlays"
    with pytest.raises(ValueError, match="one by one"):
        split.fetch(np.array([0, 1]), 0)


def test_few_cases_are_spread_over_the_sizes(tmp_path, train):
    sizes = [(12, 24, 20 + n) for n in (9, 1, 8, 0, 4, 5, 6, 2, 3, 7)]
    path = pack(tmp_path / "val", [(f"q{n}_1", size) for n, size in enumerate(sizes)], first=30)
    evaluations = block(train, evaluate={"val": str(path)}, few=3).open(0).evaluations
    few = evaluations["val.few"]
    assert sorted(size[2] - 20 for size in np.asarray(sizes)[few.cases]) == [1, 5, 8]
    assert (evaluations["val.overlays"].cases == few.cases).all() and few.protocol.ids == ("q1_1", "q2_1", "q5_1")
    assert few.digest != evaluations["val"].digest
    assert evaluations["val"].some(10).size == evaluations["val"].some(99).size == 10
    assert evaluations["val"].some(1).cases.tolist() == [5]
    # Volumes of one size are told apart by their organs.
    path = pack(tmp_path / "alike", people(4, "r"), first=60, names=("background", "a", "b", "c"))
    assert CaseSplit("val", PackedVolumes(path), np.arange(4)).some(2).size == 2


def test_patches_that_are_scored_are_the_same_in_every_run(tmp_path, train):
    path = pack(tmp_path / "val", people(5, "q", (40, 48, 40)), first=30)
    augment = VolumeAugment(rotate=Rotate(p=1.0), noise=Noise(p=1.0))
    data = block(train, evaluate={"val": str(path)}, patches=10, patch=(5, 5, 5), foreground=0.0, augment=augment)
    one, other = (data.open(seed).evaluations["val.patches"] for seed in (1, 2))
    assert one.size == 50 and one.views == 1 and one.at_once is None
    rows = np.arange(50)
    batch = one.on_device(one.fetch(rows, 0))
    again = other.on_device(other.fetch(rows, 9))
    assert set(batch) == {"image", "mask", "index", "view"} and batch["image"].shape == (50, 1, 5, 5, 5)
    assert all(torch.equal(batch[key], again[key]) for key in batch)
    for row, start in zip(rows, one.starts(rows, 0), strict=True):
        image, label = expected_patch(one.packed, row // 10, start, one.patch)
        assert (batch["image"][row, 0].numpy() == image).all() and (batch["mask"][row].numpy() == label).all()
    middle = batch["mask"][:, 2, 2, 2] > 0
    assert middle[::2].all() and middle[1::2].float().mean() < 0.5
    assert one.protocol.kind == "patches" and one.protocol.ids == tuple(f"q{row // 10}_1" for row in rows)


# ---- Folds and leaks -------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 999).map(lambda number: f"ü{number}"), min_size=8, max_size=30), st.integers(2, 8))
def test_folds_part_the_patients_evenly(patients, folds):
    part = fold_of([*patients, *patients], folds)
    counts = np.bincount(list(part.values()), minlength=folds)
    assert set(part) == patients and len(counts) == folds and counts.max() - counts.min() <= 1 and counts.min() > 0
    assert fold_of(sorted(patients), folds) == part


def test_a_fold_keeps_patients_whole_and_together_folds_hold_all(train):
    held: list[str] = []
    for fold in range(4):
        opened = [block(train, fold=fold, folds=4).open(seed) for seed in (0, 1)]
        out = opened[0].evaluations["held_out"]
        assert list(opened[0].evaluations)[:2] == ["held_out", "held_out.few"]
        assert (opened[1].evaluations["held_out"].cases == out.cases).all()
        split = opened[0].train
        patients = {split.packed.case(case).patient for case in split.cases.tolist()}
        assert not patients & set(out.protocol.patients) and len(split.cases) + out.size == 9
        assert split.size == 4 * len(split.cases) and opened[0].meta.digest == split.digest != split.packed.digest
        assert opened[0].meta.spacing == SPACING
        note = f"fold {fold} of 4: {len(split.cases)} cases of 6 patients to train on, {out.size} of 2 held out"
        assert note in opened[0].notes
        held += out.protocol.ids
        rows = np.arange(split.size)
        batch, starts = split.fetch(rows, 0), split.starts(rows, 0)
        for row in rows:  # rows count the cases of the fold, not those of the set
            image, _ = expected_patch(split.packed, split.cases[row // 4], starts[row], split.patch)
            assert (batch["image"][row, 0].numpy() == image).all()
    assert sorted(held) == sorted(PackedVolumes(train).ids())
    named = block(train, fold=0, folds=4, evaluate={"val": "held_out"}).open(0)
    assert "val.mirrored" in named.evaluations and "held_out" not in named.evaluations
    with pytest.raises(UserError, match="9 folds of 8 patients"):
        block(train, fold=0, folds=9).open(0)


def test_patients_and_volumes_in_two_splits_are_refused(tmp_path, train, caplog):
    same_patient = pack(tmp_path / "patient", [("q1_1", (12, 24, 32)), ("p3_9", (12, 24, 32))], first=90)
    same_volume = pack(tmp_path / "volume", [("q1_1", (12, 24, 32))], first=3)
    with pytest.raises(UserError, match=r"data\.evaluate\.val: 1 of its 2 patients are in data\.train: p3;"):
        block(train, evaluate={"val": str(same_patient)}).open(0)
    with pytest.raises(UserError, match=r"data\.evaluate\.val: 1 of its 1 volumes are in data\.train: q1_1 = p3_1"):
        block(train, evaluate={"val": str(same_volume)}).open(0)
    with caplog.at_level(logging.WARNING):
        block(train, evaluate={"val": str(same_volume)}, leakage="allow").open(0)
    assert "q1_1 = p3_1; its metrics are too optimistic" in caplog.text
    clean = pack(tmp_path / "clean", people(2, "q"), first=90)
    block(train, evaluate={"val": str(clean)}).open(0)


def test_one_volume_under_two_names_leaks_from_fold_to_fold(tmp_path):
    names = [f"p{number}_1" for number in range(6)]
    part = fold_of([name.split("_")[0] for name in names], 2)
    inside, outside = (next(n for n in names if part[n.split("_")[0]] == fold) for fold in (0, 1))
    marks = {name: number for number, name in enumerate(names)} | {outside: names.index(inside)}
    with Writer(tmp_path / "set", how=Preparation("yzx", None)) as writer:
        for name in names:
            shape = (12, 24, 32)
            image, label = volume(marks[name], shape)
            info = CaseInfo(name, name.split("_")[0], shape, SPACING, shape, SPACING, (-5.0,), (1.0, 1.0, 1.0, 1.0))
            writer.add_case(info, image[None], label, None, 1 + marks[name])
        writer.finish(names=NAMES)
    with pytest.raises(UserError, match=f"volumes are in data.train: ({inside} = {outside}|{outside} = {inside})"):
        block(tmp_path / "set", fold=0, folds=2).open(0)
