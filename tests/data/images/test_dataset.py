"""The data block `images`: what is opened, numbered, divided, sampled and offered for scoring."""

import io
import logging
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from trainkit.config import validation
from trainkit.config.schema import TABLES
from trainkit.data.augment import Light
from trainkit.data.images.dataset import Images
from trainkit.data.storage.image_store import Packed
from trainkit.data.synthetic import eyes as sample_eyes
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Classes, Inspection, Retrieval, Separation
from trainkit.interfaces import Data


def picture(seed: int, side: tuple[int, int] = (8, 8)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*side, 3), dtype=np.uint8)


def folder(root: Path, names: dict[str, list[str]], first: int = 0, side: tuple[int, int] = (8, 8)) -> Path:
    """Images `root/<class>/<name>`; each is noise of a seed of its own, counted from `first`."""
    seed = first
    for kind, files in names.items():
        (root / kind).mkdir(parents=True)
        for file in files:
            Image.fromarray(picture(seed, side)).save(root / kind / file)
            seed += 1
    return root


def people(counts: dict[str, int], per_person: int = 2, classes: tuple[str, ...] = ("closed", "open")) -> dict:
    """Files `<person>_<n>.png` of every person in every class."""
    return {
        kind: [f"{p}{i}_{n}.png" for p, k in counts.items() for i in range(k) for n in range(per_person)]
        for kind in classes
    }


PERSON = r"([a-z]+\d+)_\d+"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRAINKIT_DATA", raising=False)


@pytest.fixture
def eyes(tmp_path) -> Path:
    return folder(tmp_path / "eyes", people({"p": 10}))


@pytest.fixture
def other_eyes(tmp_path) -> Path:
    return folder(tmp_path / "others", people({"q": 3}), first=1000)


# ---- What is opened --------------------------------------------------------------------------------------------------


def test_a_folder_of_classes_opens_as_what_it_holds(tmp_path):
    root = folder(tmp_path / "set", {"b/deep": ["1.png"], "a": ["1.png", "2.png"]}, side=(6, 10))
    data = Images(train=str(root), image_size=(6, 10))
    assert isinstance(data, Data) and not data.missing()
    opened = data.open(seed=0)
    assert opened.meta.classes == 2 and opened.meta.class_names == ("a", "b/deep")
    assert opened.meta.shape == (3, 6, 10) and opened.train.size == 3 and opened.train.protocol is None
    batch = opened.train.fetch(np.array([2, 0]), 0)
    assert batch["label"].tolist() == [1, 0] and batch["index"].tolist() == [2, 0] and batch["view"].tolist() == [0, 0]
    assert (batch["image"][0].permute(1, 2, 0).numpy() == picture(0, (6, 10))).all()
    image = opened.train.on_device(batch)["image"]
    expected = (picture(1, (6, 10)) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    assert np.allclose(image[1].permute(1, 2, 0), expected, atol=1e-5)
    assert set(opened.train.on_device(batch)) == {"image", "label", "index", "view"}


def test_pictures_of_another_shape_are_squeezed_or_cut(tmp_path):
    root = folder(tmp_path / "set", {"a": ["1.png"], "b": ["1.png"]}, side=(8, 20))
    crop, stretch = (Images(train=str(root), image_size=8, fit=fit).open(0).train for fit in ("crop", "stretch"))
    row = np.array([0])
    assert (crop.fetch(row, 0)["image"][0].permute(1, 2, 0).numpy() == picture(0, (8, 20))[:, 6:14]).all()
    squeezed = np.asarray(Image.fromarray(picture(0, (8, 20))).resize((8, 8), Image.Resampling.BICUBIC))
    assert (stretch.fetch(row, 0)["image"][0].permute(1, 2, 0).numpy() == squeezed).all()
    assert crop.digest != stretch.digest


def test_parquet_with_splits_opens_by_split(tmp_path):
    def encoded(seed: int) -> bytes:
        stream = io.BytesIO()
        Image.fromarray(picture(seed)).save(stream, "PNG")
        return stream.getvalue()

    rows = [(s, k, f"{p}/{k}.png") for s, p in (("train", "v1"), ("train", "v2"), ("val", "v3")) for k in (0, 1)]
    table = {
        "split": [row[0] for row in rows],
        "class_id": [row[1] for row in rows],
        "image_path": [row[2] for row in rows],
        "image_bytes": [encoded(i) for i in range(len(rows))],
    }
    pq.write_table(pa.table(table), tmp_path / "eyes.parquet")
    place = str(tmp_path / "eyes.parquet")
    data = Images(train=f"{place}#train", evaluate={"val": f"{place}#val"}, image_size=8, group=r"^(\w+)/")
    opened = data.open(0)
    assert (opened.train.size, opened.evaluations["val"].size) == (4, 2)
    assert opened.train.groups() == {"v1", "v2"} and opened.evaluations["val"].groups() == {"v3"}
    assert opened.meta.class_names == ("0", "1")


def test_a_packed_set_is_taken_as_it_is(eyes):
    first = Images(train=str(eyes), image_size=8, group=PERSON).open(0).train
    again = Images(train=str(first.packed.path), image_size=8).open(0).train
    assert again.packed.path == first.packed.path and again.digest == first.digest and len(again.groups()) == 10
    smaller = Images(train=str(first.packed.path), image_size=4).open(0).train
    assert smaller.packed.size == (4, 4) and smaller.groups() == again.groups()


def test_built_in_sets_have_two_parts_and_eyes_have_people(tmp_path, monkeypatch):
    drawn = tmp_path / "drawn"
    folder(drawn / "train", {k: [f"p{i:04}_00.png" for i in range(4)] for k in ("closed", "open")})
    folder(drawn / "val", {k: [f"p{i:04}_00.png" for i in range(7, 9)] for k in ("closed", "open")}, first=100)
    monkeypatch.setattr(sample_eyes, "folder", lambda: drawn)
    data = Images(train="sample:eyes", evaluate={"val": "sample:eyes"}, image_size=8)
    assert data.missing() == []
    opened = data.open(0)
    assert opened.train.groups() == {"p0000", "p0001", "p0002", "p0003"}
    assert opened.evaluations["val"].groups() == {"p0007", "p0008"}
    with pytest.raises(UserError, match="no built-in set 'sample:ears'; expected sample:objects or sample:eyes"):
        Images(train="sample:ears").open(0)


def test_what_is_not_there_yet_is_said(tmp_path):
    data = Images(train=str(tmp_path / "no"), evaluate={"v": "held_out", "w": "hf://a/b"}, hold_out=0.2)
    assert [line.split(":")[0] for line in data.missing()] == ["data.train", "data.evaluate.w"]
    with pytest.raises(UserError, match="does not exist"):
        data.open(0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hold_out": "much"}, "neither a percentage such as 20% nor a list"),
        ({"hold_out": []}, "neither a percentage"),
        ({"evaluate": {"train": "a"}}, "has the name 'train'"),
        ({"evaluate": {"a.b": "a"}}, "has the name 'a.b'"),
        ({"evaluate": {"v": "held_out"}}, "is not set; set it to the groups"),
        ({"evaluate": {"held_out": "b"}, "hold_out": "20%"}, "is not the groups"),
        ({"sampling": {"a": 2.0}}, "sampling"),
        ({"std": [1.0, 0.0, 1.0]}, "std"),
        ({"image_size": 0}, "image_size"),
        ({"cap": 0}, "cap"),
    ],
)
def test_impossible_settings_are_refused_when_the_recipe_is_read(change, said):
    with pytest.raises(ValueError, match=said):
        validation.validate(Images, {"name": "images", "train": "a"} | change, TABLES)


# ---- What is offered for scoring -------------------------------------------------------------------------------------


def test_every_set_and_train_can_be_scored_in_four_ways(eyes, other_eyes):
    data = Images(train=str(eyes), evaluate={"val": str(other_eyes)}, image_size=8, augment=Light(name="light"))
    found = data.open(0).evaluations
    assert list(found) == [
        *("val", "val.separation", "val.inspection", "val.retrieval"),
        *("train", "train.separation", "train.inspection", "train.retrieval"),
    ]
    kinds = {"": Classes, ".separation": Separation, ".inspection": Inspection, ".retrieval": Retrieval}
    for name, size in (("val", 12), ("train", 40)):
        for word, kind in kinds.items():
            split = found[name + word]
            assert type(split.protocol) is kind and split.size == size and split.name == name + word
            assert split.protocol.label.tolist() == split.fetch(np.arange(size), 0)["label"].tolist()
            assert split.views == 1 and "augment" not in split.fetch(np.arange(2), 0)
    assert found["val"].protocol.names == ("closed", "open")
    assert found["val.inspection"].protocol.ids[0] == "closed/q0_0.png"


def test_labels_are_numbered_by_the_names_of_the_training_set(tmp_path, caplog):
    train = folder(tmp_path / "train", {name: ["1.png", "2.png"] for name in ("ant", "bee", "cow", "dog")})
    test = folder(tmp_path / "test", {name: ["1.png"] for name in ("bee", "dog")}, first=50)
    with caplog.at_level(logging.WARNING):
        opened = Images(train=str(train), evaluate={"test": str(test)}, image_size=8).open(0)
    assert opened.evaluations["test"].protocol.label.tolist() == [1, 3]
    assert opened.evaluations["test"].protocol.names == ("ant", "bee", "cow", "dog")
    assert "no images of 2 training classes: ant, cow" in caplog.text


def test_large_sets_are_looked_at_through_a_fixed_sample_in_the_proportions_of_the_classes(tmp_path):
    counts = {"a": 60, "b": 30, "c": 10}
    root = folder(tmp_path / "set", {k: [f"{i}.png" for i in range(n)] for k, n in counts.items()}, side=(2, 2))
    data = Images(train=str(root), evaluate={"val": str(root)}, leakage="allow", image_size=2, cap=20)
    found = data.open(0).evaluations
    for word, size in (("val", 100), ("val.separation", 20), ("val.inspection", 20), ("val.retrieval", 100)):
        assert found[word].size == size, word
    for word in ("train", "train.retrieval", "val.separation"):
        assert np.bincount(found[word].label).tolist() == [12, 6, 2], word
    rows = found["train"].rows
    assert (np.diff(rows) > 0).all() and not np.array_equal(rows, np.arange(20))
    assert (data.open(0).evaluations["train"].rows == rows).all()
    assert (data.open(1).evaluations["train"].rows == rows).all()
    assert not (replace(data, split_seed=1).open(0).evaluations["train"].rows == rows).all()
    ids = data.open(0).train.packed.ids()
    assert found["train.inspection"].protocol.ids == tuple(ids[row] for row in rows)
    assert (found["train"].fetch(np.arange(20), 0)["image"].numpy() == found["train"].packed.fetch(rows)).all()


# ---- Groups, held out ------------------------------------------------------------------------------------------------


def test_held_out_groups_are_whole_and_chosen_by_name_and_the_seed_of_the_split(eyes):
    data = Images(train=str(eyes), image_size=8, group=PERSON, hold_out=0.3)
    opened = data.open(0)
    held = opened.evaluations["held_out"]
    assert held.size == 12 and opened.train.size == 28 and len(held.groups()) == 3
    assert not held.groups() & opened.train.groups()
    assert sorted([*held.rows, *opened.train.rows]) == list(range(40))
    assert data.open(0).evaluations["held_out"].groups() == held.groups()
    assert data.open(5).evaluations["held_out"].groups() == held.groups()
    others = [replace(data, split_seed=seed).open(0).evaluations["held_out"] for seed in range(6)]
    assert len({frozenset(one.groups()) for one in others}) > 3
    assert set(held.label) == {0, 1}


def test_groups_are_held_out_by_name(eyes):
    data = Images(train=str(eyes), evaluate={"mine": "held_out"}, image_size=8, group=PERSON, hold_out=["p3", "p7"])
    found = data.open(0).evaluations
    assert found["mine"].groups() == {"p3", "p7"} and "held_out" not in found
    names = found["mine"].packed.group_names
    group = [names[k] for k in found["mine"].protocol.group]
    assert group == [re.search(PERSON, found["mine"].packed.ids()[row])[1] for row in found["mine"].rows]
    data.hold_out = ["p3", "p99"]
    with pytest.raises(UserError, match=r"unknown groups: p99; expected some of: p0, p1"):
        data.open(0)
    data.hold_out = [f"p{i}" for i in range(10)]
    with pytest.raises(UserError, match="leaves no training data"):
        data.open(0)


def test_a_test_set_is_held_out_first_and_what_is_evaluated_meanwhile_is_of_the_rest(eyes):
    data = Images(train=str(eyes), image_size=8, group=PERSON, hold_out=0.3)
    both = replace(data, evaluate={"val": "held_out", "test": "held_out_test"}, hold_out_test=0.2)
    opened = both.open(0)
    parts = {"train": opened.train, **{name: opened.evaluations[name] for name in ("val", "test")}}
    assert {name: len(split.groups()) for name, split in parts.items()} == {"train": 6, "val": 2, "test": 2}
    assert sorted(np.concatenate([split.rows for split in parts.values()])) == list(range(40))
    assert both.open(7).evaluations["test"].groups() == parts["test"].groups()
    assert len({frozenset(replace(both, split_seed=k).open(0).evaluations["test"].groups()) for k in range(6)}) > 3
    for wrong in ({"evaluate": {"val": "held_out"}}, {"hold_out_test": None}):
        with pytest.raises(ValueError, match="go together"):
            replace(both, **wrong)
    digests = {opened.meta.digest, data.open(0).meta.digest, replace(both, hold_out=0.4).open(0).meta.digest}
    assert len(digests) == 3


def test_sets_whose_scores_rest_on_few_images_are_told(tmp_path, caplog):
    root = folder(tmp_path / "train", {"a": [f"{k}.png" for k in range(9)], "b": [f"{k}.png" for k in range(9, 18)]})
    few = folder(tmp_path / "few", {"a": ["1.png"], "b": ["2.png"]}, first=50)
    uneven = folder(tmp_path / "uneven", {"a": ["1.png"], "b": [f"{k}.png" for k in range(2, 40)]}, first=100)
    Images(train=str(root), evaluate={"few": str(few), "uneven": str(uneven)}, image_size=8).open(0)
    told = [record.getMessage() for record in caplog.records if "evaluate" in record.getMessage()]
    assert told == [
        "data.evaluate.few: 2 images: one of them moves a score by up to 50 %",
        "data.evaluate.uneven: fewer than 5 images of a",
    ]


def test_nothing_is_held_out_by_picture_unless_asked(eyes):
    data = Images(train=str(eyes), image_size=8, hold_out=0.25)
    with pytest.raises(UserError, match=r"data\.hold_out.*images without groups.*`group: each`"):
        data.open(0)
    data.group = "each"
    opened = data.open(0)
    assert opened.evaluations["held_out"].size == 10 and opened.train.size == 30
    assert opened.evaluations["held_out"].protocol.group is None


def test_classes_must_be_left_to_train_on(tmp_path):
    root = folder(tmp_path / "set", {"a": ["p1_1.png", "p2_1.png"], "b": ["p1_2.png"], "c": ["p1_3.png", "p2_3.png"]})
    data = Images(train=str(root), image_size=8, group=PERSON, hold_out=["p1"])
    with pytest.raises(UserError, match="no training images of b remain"):
        data.open(0)


def test_in_an_open_set_held_out_groups_take_their_classes_with_them(tmp_path):
    names = {
        f"{alphabet}/{k}": [f"{i}.png" for i in range(3)] for alphabet in ("greek", "latin", "thai") for k in (1, 2)
    }
    root = folder(tmp_path / "letters", names)
    data = Images(train=str(root), image_size=8, group=r"^(\w+)/", hold_out=["latin"], open_set=True)
    opened = data.open(0)
    assert opened.meta.class_names == ("greek/1", "greek/2", "thai/1", "thai/2") and opened.meta.classes == 4
    assert opened.train.label.tolist() == [k for k in range(4) for _ in range(3)]
    assert [word for word in opened.evaluations if not word.startswith("train")] == ["held_out", "held_out.retrieval"]
    held = opened.evaluations["held_out"]
    assert type(held.protocol) is Retrieval and held.protocol.label.tolist() == [0, 0, 0, 1, 1, 1]
    assert type(opened.evaluations["train"].protocol) is Classes
    with pytest.raises(UserError, match=r"6 classes have images in held-out groups and in others"):
        Images(train=str(root), image_size=8, group=r"/(\d)\.png", hold_out=["0"], open_set=True).open(0)


def test_the_digest_follows_whatever_changes_the_training(eyes):
    def digest(seed: int = 0, **settings) -> str:
        return Images(**({"train": str(eyes), "image_size": 8, "group": PERSON} | settings)).open(seed).meta.digest

    whole = digest()
    assert digest(seed=1) == whole and digest(evaluate={"again": "held_out"}, hold_out=["p1"]) != whole
    assert len({whole, digest(hold_out=["p1"]), digest(hold_out=["p2"]), digest(hold_out=["p1", "p2"])}) == 4
    assert digest(0, hold_out=0.5) == digest(1, hold_out=0.5) != digest(1, hold_out=0.5, split_seed=1)
    assert digest(image_size=4) != whole
    Image.fromarray(picture(77)).save(eyes / "open" / "p1_1.png")
    assert digest() != whole


# ---- Leaks -----------------------------------------------------------------------------------------------------------


def test_a_person_who_is_trained_and_scored_is_refused(eyes, tmp_path, caplog):
    val = folder(tmp_path / "val", {"closed": ["p3_8.png", "x1_1.png"], "open": ["p4_8.png", "x1_2.png"]}, first=500)
    data = Images(train=str(eyes), evaluate={"val": str(val)}, image_size=8, group=PERSON)
    with pytest.raises(UserError) as error:
        data.open(0)
    assert "data.evaluate.val: 2 of its 3 groups are in data.train: p3, p4" in str(error.value)
    assert "leakage: allow" in str(error.value)
    data.leakage = "allow"
    with caplog.at_level(logging.WARNING):
        assert data.open(0).evaluations["val"].size == 4
    assert "2 of its 3 groups are in data.train" in caplog.text


def test_a_picture_that_is_trained_and_scored_is_refused(eyes, tmp_path):
    val = folder(tmp_path / "val", {"closed": ["a.png", "b.png"], "open": ["c.png"]}, first=500)
    Image.fromarray(picture(5)).save(val / "closed" / "copy.webp", lossless=True)  # other bytes, the same pixels
    data = Images(train=str(eyes), evaluate={"val": str(val)}, image_size=8)
    with pytest.raises(UserError, match=r"1 of its 4 images are in data\.train: closed/copy\.webp = closed/p2_1\.png"):
        data.open(0)
    copies = Images(train=str(val), image_size=8, group="each", hold_out=0.5)
    Image.fromarray(picture(5)).save(val / "open" / "same.png")
    refused = 0
    for seed in range(8):  # the copies fall apart or together
        try:
            replace(copies, split_seed=seed).open(0)
        except UserError as error:
            assert "images are in data.train" in str(error) or "class" in str(error)
            refused += "images are in data.train" in str(error)
    assert refused


def test_an_open_set_whose_classes_are_trained_is_refused(eyes, other_eyes):
    data = Images(train=str(eyes), evaluate={"val": str(other_eyes)}, image_size=8, open_set=True)
    with pytest.raises(UserError, match="2 of its 2 classes are in the training set"):
        data.open(0)


# ---- Order and sampling ----------------------------------------------------------------------------------------------


def test_balanced_sampling_draws_every_class_equally_often(tmp_path):
    names = {"a": [f"{i}.png" for i in range(60)], "b": [f"{i}.png" for i in range(30)], "c": ["0.png"] * 1}
    root = folder(tmp_path / "set", names, side=(2, 2))

    train = Images(train=str(root), image_size=2, sampling="balanced").open(0).train
    rows = np.concatenate([train.order(epoch, 30).ravel() for epoch in range(400)])
    assert rows.min() == 0 and rows.max() == 90
    assert np.abs(np.bincount(train.label[rows], minlength=3) / len(rows) - 1 / 3).max() < 0.01
    assert np.abs(np.bincount(rows, minlength=91)[:60] / len(rows) - 1 / 180).max() < 0.002
    assert (train.order(5, 7) == train.order(5, 7)).all() and not (train.order(5, 7) == train.order(6, 7)).all()
    assert (train.order(5, 7).ravel()[:91] == train.order(5, 91).ravel()[:91]).all(), "of the epoch, not of the batch"


# ---- Augmentation in the split ---------------------------------------------------------------------------------------


def test_mirrored_pictures_alone_can_be_counted(eyes):
    train = Images(train=str(eyes), image_size=8, augment=Light(name="light")).open(0).train
    assert train.views == 2
    rows = np.arange(40)
    plain, mirrored = (train.on_device(train.fetch(rows, 0, view=v)) for v in (0, 1))
    assert torch.equal(plain["image"].flip(-1), mirrored["image"])
    assert not plain["view"].any() and mirrored["view"].all()
    drawn = train.on_device(train.fetch(rows, 4))
    assert 8 < drawn["view"].sum() < 32
    chosen = torch.where(drawn["view"].bool().view(-1, 1, 1, 1), mirrored["image"], plain["image"])
    assert torch.equal(drawn["image"], chosen)
    assert Images(train=str(eyes), image_size=8).open(0).train.views == 1
    moved = Images(train=str(eyes), image_size=8, augment=Light(name="light", shift=1)).open(0).train
    assert moved.views == 0 and not moved.fetch(rows, 0)["view"].any()


# ---- Real images ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_cifar_has_no_picture_in_both_parts(shared):
    root = shared / "cls_cifar10"
    opened = Images(train=str(root / "train"), evaluate={"test": str(root / "test")}, image_size=32).open(0)
    assert (opened.train.size, opened.evaluations["test"].size, opened.meta.classes) == (10_000, 2_000, 10)


def test_omniglot_is_divided_by_alphabet(shared):
    data = Images(
        train=str(shared / "emb_omniglot"), image_size=28, group="^([^/]+)/", hold_out=["Greek"], open_set=True
    )
    opened = data.open(0)
    assert opened.train.size + opened.evaluations["held_out"].size == 136 * 20
    assert opened.evaluations["held_out"].groups() == {"Greek"} and len(opened.train.groups()) == 4
    assert isinstance(opened.train.packed, Packed)
    image = opened.train.fetch(np.arange(200), 0)["image"]
    assert image.min() < 50 and image.max() == 255 and (image[:, 0] == image[:, 1]).all()
