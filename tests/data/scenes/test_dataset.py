"""The data block `scenes`: what is opened, what batches hold, how sets are scored, and what is refused."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import scene_sets as sets
import torch
from PIL import Image
from runs import environment

from trainkit.config.validation import validate
from trainkit.data.augment import Distort
from trainkit.data.scenes import dataset
from trainkit.data.scenes.augment import SceneAugment
from trainkit.data.scenes.boundary_distance import STEP, Distance, distances_once
from trainkit.data.scenes.dataset import Scenes
from trainkit.data.scenes.splits import SceneCrops, SceneSet
from trainkit.data.storage import image_store
from trainkit.errors import UserError
from trainkit.interfaces import IGNORED, Data

NAMES = list(sets.NAMES[: sets.CLASSES])
CROP = (16, 24)
JITTER = Distort(p=1.0, brightness=(0.6, 1.4), contrast=(0.6, 1.4), saturation=(0.6, 1.4), hue=(0.0, 0.0), swap=False)
STRONG = SceneAugment(scales=(0.75, 2.0), flip=0.5, distort=JITTER)

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Six images of 24 x 32 to train on and three to be scored, of four classes."""
    return sets.camvid(tmp_path_factory.mktemp("scenes") / "street")


def block(home, **more) -> Scenes:
    return Scenes(**(given(home) | more))


def given(home) -> dict:
    return {"train": f"{home}#train", "evaluate": {"val": f"{home}#val"}, "names": NAMES, "crop": CROP}


@pytest.fixture(scope="module")
def opened(home, tmp_path_factory):
    with environment(TRAINKIT_CACHE=tmp_path_factory.mktemp("cache")):
        data = block(home, augment=STRONG, distance=Distance(cap=6.0), few=2)
        assert isinstance(data, Data) and data.missing() == []
        yield data.open(seed=3)


def drawn(split: int, number: int):
    return sets.scene(1000 * split + number)


def where_of(values: np.ndarray) -> np.ndarray:
    """An image of which each pixel says by its colour where it is."""
    y, x = np.mgrid[: values.shape[0], : values.shape[1]]
    return np.stack([y, x, values], -1).astype(np.uint8)


# ---- What is opened --------------------------------------------------------------------------------------------------


def test_a_set_opens_as_what_it_holds(opened):
    meta = opened.meta
    assert meta.classes == 4 and meta.class_names == tuple(NAMES) and meta.shape == (3, *CROP)
    assert opened.train.size == 6 and opened.train.views == 0 and opened.train.protocol is None
    ends = ("", ".flip", ".crop", ".msf", ".mscf", ".few", ".overlays")
    assert set(opened.evaluations) == {name + end for name in ("val", "train") for end in ends}
    for name, split in opened.evaluations.items():
        assert split.name == name and split.size == (2 if name.endswith(("few", "overlays")) else len(split.protocol))
        assert split.protocol.names == tuple(NAMES)
        assert split.protocol.kind == ("overlays" if name.endswith("overlays") else "scores")
        with pytest.raises(ValueError, match="is an evaluation split"):
            split.order(0, 1)
    masks = [drawn(0, n)[1] for n in range(6)]
    assert opened.train.counts.tolist() == [sum((mask == c).sum() for mask in masks) for c in range(4)]
    assert opened.evaluations["val"].counts.tolist() == [
        sum((drawn(1, n)[1] == c).sum() for n in range(3)) for c in range(4)
    ]


def test_what_is_scored_is_whole_pictures_and_their_masks(opened):
    split = opened.evaluations["val"]
    assert split.at_once is None and split.views == 1
    batch = split.fetch(np.asarray([2, 0]), 0)
    assert set(batch) == {"image", "mask", "index", "view", "scales", "mirrors", "window"}
    for i, row in enumerate((2, 0)):
        picture, mask = drawn(1, row)
        assert (batch["image"][i].numpy() == picture.transpose(2, 0, 1)).all()
        assert (batch["mask"][i].numpy() == mask).all() and split.protocol.ids[row] == f"p{row:03d}.png"
        assert (split.picture(row) == picture).all()
    assert batch["image"].dtype == batch["mask"].dtype == torch.uint8 and batch["index"].tolist() == [2, 0]
    done = split.on_device(batch)
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (split.mean, split.std))
    torch.testing.assert_close(done["image"], (batch["image"] / 255 - mean) / std)
    assert set(done) == set(batch)


@pytest.mark.parametrize(
    ("end", "scales", "mirrored", "window"),
    [
        ("", [1.0], False, [0, 0]),
        (".flip", [1.0], True, [0, 0]),
        (".crop", [1.0], False, [12, 20]),
        (".msf", [0.5, 1.5], True, [0, 0]),
        (".mscf", [0.5, 1.5], True, [12, 20]),
        (".few", [1.0], False, [0, 0]),
        (".overlays", [1.0], False, [0, 0]),
    ],
)
def test_each_split_says_how_pictures_are_to_be_seen(home, end, scales, mirrored, window):
    evaluations = block(home, eval_scales=[0.5, 1.5], eval_crop=(12, 20)).open(0).evaluations
    batch = evaluations["val" + end].fetch(np.asarray([0, 1]), 0)
    assert batch["scales"].dtype == torch.float32 and batch["scales"].tolist() == [scales] * 2
    assert batch["mirrors"].dtype == torch.bool and batch["mirrors"].tolist() == [[False, mirrored]] * 2
    assert batch["window"].dtype == torch.int64 and batch["window"].tolist() == [window] * 2
    assert ("overlay" in batch) == (end == ".overlays") and batch.get("overlay", torch.ones(1)).all()


def test_few_are_spread_evenly_and_always_the_same(home, opened):
    assert opened.evaluations["train.few"].protocol.ids == tuple(
        opened.evaluations["train"].protocol.ids[row] for row in (1, 4)
    )
    assert opened.evaluations["train.overlays"].protocol.ids == opened.evaluations["train.few"].protocol.ids
    split = opened.evaluations["train.few"]
    assert (split.fetch(np.asarray([1]), 0)["mask"][0].numpy() == drawn(0, 4)[1]).all()
    assert (split.picture(1) == drawn(0, 4)[0]).all()


def test_shorter_side_is_a_factor_on_the_scales(home):
    opened = block(home, short_side=48, eval_scales=[0.5, 1.0]).open(0)
    assert opened.evaluations["val"].fetch(np.asarray([0]), 0)["scales"].tolist() == [[2.0]]
    assert opened.evaluations["val.msf"].fetch(np.asarray([0]), 0)["scales"].tolist() == [[1.0, 2.0]]
    # A crop of 16 x 24 then shows 8 x 12 pixels of the image, twice as large.
    assert opened.train.cuts(np.arange(6), 0).region.tolist() == [[8, 12]] * 6


def test_pictures_of_several_sizes_are_scored_one_by_one(tmp_path):
    home = sets.camvid(tmp_path / "a", (4, 2))
    sets.put(home / "val" / "p001.png", np.zeros((40, 20, 3), np.uint8))
    sets.put(home / "valannot" / "p001.png", np.zeros((40, 20), np.uint8))
    sets.put(home / "train" / "p001.png", np.zeros((100, 20, 3), np.uint8) + 9)
    sets.put(home / "trainannot" / "p001.png", np.zeros((100, 20), np.uint8))
    opened = block(home, short_side=40).open(0)
    assert opened.train.scenes.pictures.store == "encoded"
    split = opened.evaluations["val"]
    assert split.at_once == 1
    one, other = (split.fetch(np.asarray([row]), 0) for row in (0, 1))
    assert one["image"].shape == (1, 3, 24, 32) and other["image"].shape == (1, 3, 40, 20)
    np.testing.assert_allclose([one["scales"].item(), other["scales"].item()], [40 / 24, 2.0], rtol=1e-6)
    batch = opened.train.fetch(np.arange(4), 0)
    assert batch["image"].shape == (4, 3, *CROP) and batch["mask"].shape == (4, *CROP)
    # All brought to one size, they are one batch.
    sized = block(home, size=(24, 32)).open(0)
    assert sized.evaluations["val"].at_once is None
    assert sized.evaluations["val"].fetch(np.asarray([0, 1]), 0)["mask"].shape == (2, 24, 32)


# ---- What is trained on ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["decoded", "encoded"])
def test_crops_of_picture_mask_and_distances_are_of_one_place(tmp_path, store, monkeypatch):
    monkeypatch.setattr(image_store, "DECODED_LIMIT", 1 << 31 if store == "decoded" else 0)
    size = (40, 60)
    home = sets.camvid(tmp_path / "a", 5, size)
    for n in range(5):
        # Images whose colours are where each pixel is and its class, so that a crop says what it shows.
        sets.put(home / "train" / f"p{n:03d}.png", self_portrait(home, n))
    data = block(home, augment=SceneAugment(flip=0.5), distance=Distance(cap=6.0))
    train = data.open(1).train
    maps = distances_once(train.scenes.masks, data.distance)
    assert train.scenes.pictures.store == store
    seen = set()
    for epoch in range(4):
        batch = train.fetch(np.arange(5), epoch)
        assert batch["distance"].dtype == torch.float32 and batch["distance"].shape == (5, *CROP)
        for i in range(5):
            ys, xs, classes = (plane.astype(int) for plane in batch["image"][i].numpy())
            assert (batch["mask"][i].numpy() == classes).all()
            assert (batch["distance"][i].numpy() == (maps.levels(i) * np.float32(STEP))[ys, xs]).all()
            assert (np.diff(ys, axis=0) == 1).all() and len(set(np.diff(xs, axis=1).ravel())) == 1
            seen.add((ys[0, 0], xs[0, 0], xs[0, 1] > xs[0, 0]))
    assert len(seen) > 15 and {mirrored for _, _, mirrored in seen} == {True, False}


def self_portrait(home, n):
    return where_of(np.asarray(Image.open(home / "trainannot" / f"p{n:03d}.png")))


def test_distances_grow_with_the_scale(home):
    settings = Distance(cap=6.0)
    train = block(home, augment=SceneAugment(scales=(2.0, 2.0)), distance=settings).open(1).train
    batch, cuts = train.fetch(np.arange(6), 0), train.cuts(np.arange(6), 0)
    maps = distances_once(train.scenes.masks, settings)
    assert (cuts.factor == 2).all()
    for i in range(6):
        y, x = cuts.start[i]
        part = (maps.levels(i) * np.float32(STEP))[y : y + 8, x : x + 12]
        assert (batch["distance"][i].numpy() == 2 * np.kron(part, np.ones((2, 2)))).all()


def test_padding_is_unlabelled_mean_and_far_from_boundaries(home):
    data = block(
        home,
        crop=(48, 64),
        augment=SceneAugment(scales=(1.0, 2.0)),
        distance=Distance(cap=6.0),
        mean=(0.2, 0.4, 0.6),
    )
    opened = data.open(1)
    assert any("larger than their scaled image" in note for note in opened.notes)
    batch = opened.train.fetch(np.arange(6), 0)
    cuts = opened.train.cuts(np.arange(6), 0)
    padded = 0
    for i in range(6):
        outside = cuts_outside(cuts, i, (48, 64))
        padded += outside.any()
        assert (batch["mask"][i].numpy()[outside] == IGNORED).all()
        assert (batch["image"][i].numpy()[:, outside] == np.asarray([[51], [102], [153]])).all()
        np.testing.assert_allclose(batch["distance"][i].numpy()[outside], 6 * cuts.factor[i], rtol=1e-6)
        assert (batch["mask"][i].numpy()[~outside] != IGNORED).any()
    assert padded > 3
    done = opened.train.on_device(batch)["image"]
    assert done[0][:, torch.from_numpy(cuts_outside(cuts, 0, (48, 64)))].abs().max() < 0.01


def cuts_outside(cuts, i, crop):
    outside = np.ones(crop, bool)
    (down, right), (height, width) = cuts.corner[i], cuts.size[i]
    outside[down : down + height, right : right + width] = False
    return outside


def test_a_row_is_the_same_in_any_batch_and_worker_and_another_in_the_next_epoch(opened):
    train: SceneCrops = opened.train
    together = train.on_device(train.fetch(np.arange(6), 2))
    assert set(together) == {"image", "mask", "distance", "index", "view"} and together["image"].is_floating_point()
    copied = pickle.loads(pickle.dumps(train))
    for row in (5, 1):
        alone = copied.on_device(copied.fetch(np.asarray([row]), 2))
        for key, values in alone.items():
            assert torch.equal(values[0], together[key][row]), key
    other = train.on_device(train.fetch(np.arange(6), 3))
    assert not any(torch.equal(other["image"][row], together["image"][row]) for row in range(6))


def test_distortion_changes_colours_and_nothing_else(home, opened):
    plain = block(home, augment=SceneAugment(scales=(0.75, 2.0), flip=0.5)).open(seed=3).train
    here, there = plain.fetch(np.arange(6), 0), opened.train.fetch(np.arange(6), 0)
    assert torch.equal(here["image"], there["image"]) and torch.equal(here["mask"], there["mask"])
    assert "augment" not in here and "distance" not in here
    one, other = plain.on_device(here), opened.train.on_device(there)
    assert not torch.allclose(one["image"], other["image"]) and torch.equal(one["mask"], other["mask"])


def test_crops_that_are_whole_pictures_are_one_view(home):
    assert block(home, crop=sets.SIZE).open(0).train.views == 1
    for changed in ({"crop": CROP}, {"crop": sets.SIZE, "augment": SceneAugment(flip=0.5)}):
        assert block(home, **changed).open(0).train.views == 0
    assert block(home, crop=sets.SIZE, short_side=48).open(0).train.views == 0


# ---- What the digest covers ------------------------------------------------------------------------------------------


def test_the_digest_is_that_of_pictures_masks_and_names(home, tmp_path):
    first = block(home).open(0).meta.digest
    assert first == block(home, distance=Distance(), augment=STRONG, crop=(8, 8)).open(5).meta.digest
    assert first != block(home, names=["a", "b", "c", "d"]).open(0).meta.digest
    assert first != block(home, size=(20, 32)).open(0).meta.digest
    other = sets.camvid(tmp_path / "other")
    assert block(other).open(0).meta.digest == first
    mask = drawn(0, 2)[1].copy()
    mask[-1, -1] = (mask[-1, -1] + 1) % 4
    sets.put(other / "trainannot" / "p002.png", mask)
    assert block(other).open(0).meta.digest != first


def test_the_content_is_that_of_files_masks_and_names_in_any_size(home, tmp_path):
    def contents(data) -> tuple[dict, dict]:
        found = data.open(0).evaluations
        return {name: found[name].content for name in ("val", "val.few")}, {"val": found["val"].digest}

    first, digest = contents(block(home, few=2))
    assert None not in first.values() and first["val"] != first["val.few"]
    small, other = contents(block(home, few=2, size=(20, 28)))
    assert small == first and other != digest
    assert contents(block(home, few=2, short_side=20))[0] == first
    assert contents(block(home, few=2, names=["a", "b", "c", "d"]))[0]["val"] != first["val"]
    changed = sets.camvid(tmp_path / "other")
    assert contents(block(changed, few=2))[0] == first, "whatever folder it is in"
    mask = drawn(1, 2)[1].copy()
    mask[-1, -1] = (mask[-1, -1] + 1) % 4
    sets.put(changed / "valannot" / "p002.png", mask)
    # A pixel that no smaller mask has.
    assert contents(block(changed, few=2, size=(20, 28)))[0]["val"] != first["val"]


def test_masks_that_are_scored_at_the_size_of_files_keep_it(home, tmp_path):
    plain, at_file = (block(home, size=(20, 28), score_at=word).open(0) for word in ("prepared", "file"))
    for name in ("val", "train.msf", "val.overlays"):
        split, before = at_file.evaluations[name], plain.evaluations[name]
        batch, other = split.fetch(np.asarray([2, 0]), 0), before.fetch(np.asarray([2, 0]), 0)
        assert torch.equal(batch["image"], other["image"]) and batch["image"].shape[2:] == other["mask"].shape[1:]
        for i, row in enumerate((2, 0)):
            assert (batch["mask"][i].numpy() == drawn(int(name.startswith("val")), row)[1]).all()
        assert split.at_once is None and split.digest != before.digest and split.content == before.content
    assert at_file.train.digest == plain.train.digest and at_file.meta.digest == plain.meta.digest
    assert at_file.train.fetch(np.arange(2), 0)["mask"].shape == (2, *CROP)
    unsized = [block(home, score_at=word).open(0).evaluations["val"].digest for word in ("prepared", "file")]
    assert unsized[0] == unsized[1], "without `size` both are the same"
    tall = sets.camvid(tmp_path / "tall")
    for folder, array in zip(("val", "valannot"), sets.scene(7, (40, 30)), strict=True):
        sets.put(tall / folder / "p000.png", array)
    split = block(tall, size=(20, 28), score_at="file").open(0).evaluations["val"]
    assert split.at_once == 1 and split.fetch(np.asarray([0]), 0)["mask"].shape == (1, 40, 30)


# ---- How masks are read ----------------------------------------------------------------------------------------------


def test_names_are_needed_where_nothing_says_them(home):
    with pytest.raises(UserError, match=r"data.train .*names of classes"):
        block(home, names=None).open(0)


# ---- Mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"crop": [0, 5]}, "crop.0"),
        ({"crop": [10000, 10000]}, "pixels at most"),
        ({"eval_crop": [5, 0]}, "eval_crop.1"),
        ({"size": [0, 0]}, "size.0"),
        ({"size": [8000, 8000]}, "50000000 pixels at most"),
        ({"short_side": 3}, "short_side"),
        ({"std": [0.0, 1.0, 1.0]}, "std.0"),
        ({"mean": [120.0, 1.0, 1.0]}, "mean.0"),
        ({"eval_scales": []}, "eval_scales is empty"),
        ({"eval_scales": [0.0]}, "eval_scales.0"),
        ({"few": 0}, "few"),
        ({"names": ["a", "a"]}, "two classes with the same name"),
        ({"names": [f"c{n}" for n in range(256)]}, "256 classes; 2 to 255 are needed"),
        ({"names": ["a"]}, "1 classes; 2 to 255"),
        ({"palette": {"a": (0, 0, 0)}}, "keep one"),
        ({"names": None, "palette": {"a": (0, 0, 0), "b": (0, 0, 0)}}, "one colour for several classes"),
        ({"names": None, "ignore": [3]}, "ignore needs names or palette"),
        ({"ignore": [(1, 2, 3)]}, "expected numbers, since names is set"),
        ({"names": None, "palette": {"a": (0, 0, 0), "b": (1, 0, 0)}, "ignore": [3]}, "colours, since palette is set"),
        ({"evaluate": {"train": "x"}}, "but not `train`"),
    ],
)
def test_a_block_that_cannot_be_is_refused(home, wrong, words):
    with pytest.raises(ValueError) as error:
        validate(Scenes, given(home) | wrong, {})
    assert words in str(error.value)


def test_sets_of_other_classes_do_not_go_together(home, tmp_path):
    city = sets.cityscapes(tmp_path / "city")
    with pytest.raises(UserError, match=r"names of classes"):
        block(home, names=None, evaluate={"val": f"{city}#val"}).open(0)
    rooms = sets.ade20k(tmp_path / "rooms")
    with pytest.raises(UserError, match=r"data.evaluate.val .*150 classes: wall.*expected 19 of data.train: road"):
        Scenes(train=f"{city}#train", evaluate={"val": f"{rooms}#val"}, crop=CROP).open(0)


def test_wrong_masks_are_found_before_pictures_are_packed(tmp_path, monkeypatch):
    home = sets.camvid(tmp_path / "a", (2, 1))
    sets.put(home / "trainannot" / "p001.png", np.full(sets.SIZE, 77, np.uint8))
    monkeypatch.setattr(dataset.import_images, "pack_once", lambda *_, **__: pytest.fail("images are packed"))
    with pytest.raises(UserError, match=r"77 \(768 px"):
        block(home).open(0)


def test_long_images_that_the_short_side_makes_too_large_are_refused(home):
    shapes = np.array([[2, 50_000], [64, 96]])
    with pytest.raises(UserError) as error:
        block(home, short_side=512)._check_size("data.train", ["long", "short"], shapes)
    assert error.value.expected == "67,108,864 pixels or fewer"
    assert error.value.found.startswith("1 of 2 images, of which data.short_side makes too many pixels: long (2 x")


def test_missing_files_are_said_by_key(tmp_path):
    said = Scenes(train=str(tmp_path / "none#train"), evaluate={"v": str(tmp_path / "no#val")}, crop=CROP).missing()
    assert len(said) == 2 and said[0].startswith("data.train: ") and said[1].startswith("data.evaluate.v: ")


def test_damage_after_packing_is_found_when_a_row_is_read(home, opened):
    other = block(home).open(0).train
    damaged = SimpleNamespace(**{name: getattr(other.scenes, name) for name in ("rows", "shapes")})
    damaged.pictures = SimpleNamespace(
        store="decoded", fetch=lambda rows: np.zeros((1, 3, 9, 9), np.uint8), where=lambda row: f"row {row}"
    )
    with pytest.raises(UserError, match="row 3: 9 x 9 pixels; expected 24 x 32, as it was packed"):
        SceneSet.pixels(damaged, 3)
