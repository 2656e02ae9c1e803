"""The data block `people`: what is opened, who asks for whom, what batches hold, and what is refused."""

import logging
import pickle
from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np
import people_sets as sets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from runs import environment

from trainkit.config.validation import validate
from trainkit.data import augment
from trainkit.data.augment import Light
from trainkit.data.people import dataset
from trainkit.data.people.dataset import ModalityDropout, People
from trainkit.data.people.modalities import subsets
from trainkit.data.people.pk_sampler import PK, ModalPK, Pairs, parts_of
from trainkit.data.people.searches import combined
from trainkit.data.people.tokenizer import Captions, Words
from trainkit.errors import UserError
from trainkit.interfaces import MODALITIES, RGB, TEXT, Data

SMALL = {"image_size": (16, 8), "text": Captions(length=12, vocabulary=500)}
BLOCK = ModalPK(people=2, each=5)
LIGHT = Light(name="light", flip=0.5, shift=2, erase=0.5)

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Sets of six people to train on, and of three others."""
    root = tmp_path_factory.mktemp("people")
    sets.index(root / "train", 6, (3, 2, 1, 1, 2))
    sets.index(root / "val", ["a", "b", "c"], (3, 2, 1, 1, 2), seed=7)
    return root


def block(home, **more) -> People:
    return People(**({"train": str(home / "train"), "sampler": BLOCK, **SMALL} | more))


@pytest.fixture(scope="module")
def opened(home, tmp_path_factory):
    with environment(TRAINKIT_CACHE=tmp_path_factory.mktemp("cache")):
        data = block(home, evaluate={"val": str(home / "val")}, augment=LIGHT, token_dropout=0.3)
        assert isinstance(data, Data) and data.missing() == []
        yield data.open(seed=3)


# ---- Queries ---------------------------------------------------------------------------------------------------------


def asked_by_hand(person, modality, some, cap=False):
    """The queries of one set of modalities, person after person."""
    found = []
    for who in range(max(person, default=-1) + 1):
        own = {
            m: [i for i, (p, k) in enumerate(zip(person, modality, strict=True)) if (p, k) == (who, m)] for m in some
        }
        if not all(own.values()):
            continue
        times = max(map(len, own.values()))
        if cap and len(some) > 1:
            times = min(times, list(person).count(who) // 2)
        for t in range(times):
            found.append([own[m][t % len(own[m])] if m in some else -1 for m in range(5)])
    return found


records = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=24)


@given(records, st.booleans())
def test_queries_are_what_a_loop_over_people_finds(pairs, cap):
    person = np.asarray([p for p, _ in pairs], np.int64)
    modality = np.asarray([m for _, m in pairs], np.int64)
    wanted = subsets()
    assert len(wanted) == 15
    for some, rows in zip(wanted, combined(person, modality, wanted, cap), strict=True):
        assert rows.shape == (len(rows), 5)
        assert rows.tolist() == asked_by_hand(person.tolist(), modality.tolist(), some, cap)


# ---- What is opened --------------------------------------------------------------------------------------------------


def test_a_set_opens_as_what_it_holds(opened):
    meta = opened.meta
    assert meta.classes == 6 and meta.class_names == tuple(f"p{n:02d}" for n in range(6)) and meta.shape == (3, 16, 8)
    assert meta.modalities == MODALITIES and (meta.vocabulary, meta.text_length) == (500, 12)
    assert opened.block == 10 and opened.train.size == 30 and opened.train.protocol is None
    assert "54 records of 6 people; modal_pk can sample 6 of them" in opened.notes
    assert list(opened.evaluations) == ["val", "val.ranked", "val.reranked"]
    kinds = [split.protocol.kind for split in opened.evaluations.values()]
    assert kinds == ["scores", "ranked", "reranked"]
    assert not opened.evaluations["val.reranked"].protocol.strict


def test_every_combination_of_modalities_asks_for_every_person(opened):
    split = opened.evaluations["val"]
    search = split.protocol
    assert len(search) == split.size == 27 and (np.diff(split.modality) >= 0).all()
    assert len(search.gallery) == 9
    assert set(search.place[split.modality == TEXT]) == {-1} and set(search.place[split.modality != TEXT]) == {0, 1}
    assert {name: len(names) for name, names in search.groups.items()} == {
        "modal_1": 4,
        "modal_2": 6,
        "modal_3": 4,
        "modal_4": 1,
    }
    for size in range(1, 5):
        for some in combinations(range(1, 5), size):
            rows = search.queries["_".join(MODALITIES[m] for m in some)]
            # two infrared images and two captions of each, one of the others
            assert len(rows) == 3 * (2 if {1, 4} & set(some) else 1)
            assert ((rows >= 0) == np.isin(np.arange(5), some)).all()
            for m in some:
                assert (split.modality[rows[:, m]] == m).all()
                assert (search.person[rows[:, m]] == search.person[rows[:, some[0]]]).all()
                assert len(set(rows[:, m].tolist())) == 3 * (2 if m in (1, 4) else 1)
    nir, words = (search.queries["nir_text"][:, m] for m in (1, 4))
    assert split.caption(int(words[0])).endswith("view 0") and search.ids[nir[1]] == "nir/a/1.png"


def test_sets_of_colour_alone_are_asked_with_colour(tmp_path):
    sets.market(tmp_path / "market", train=4, test=2)
    data = People(
        train=f"{tmp_path}/market#train",
        evaluate={"test": f"{tmp_path}/market#test"},
        sampler=PK(people=2, each=2),
        **SMALL,
    )
    opened = data.open(0)
    assert opened.meta.modalities == ("rgb",) and opened.meta.vocabulary == opened.meta.text_length == 0
    batch = opened.train.fetch(opened.train.order(0, 4)[0, :], 0)
    assert set(batch) == {"image.rgb", "label", "modality", "index", "view", "queries"}
    assert batch["queries"].shape == (0, 5) and batch["image.rgb"].shape == (4, 3, 16, 8)
    split = opened.evaluations["test"]
    search, index = split.protocol, split.index
    assert list(search.queries) == ["rgb"] and search.groups == {"modal_1": ("rgb",)}
    role = index.role[split.rows]
    assert (role[search.queries["rgb"][:, RGB]] == 1).all() and (role[search.gallery] == 2).all()
    assert set(search.gallery.tolist()) == set(np.flatnonzero(role == 2).tolist())
    assert (search.person[search.gallery] == -1).any() and (search.place >= 0).any()


def test_lists_of_the_set_are_taken_as_they_are(tmp_path):
    lists = ("NIR", "CP", "SK", "TEXT", "NIR+TEXT", "TEXT+NIR", "NIR+CP+SK+TEXT")
    sets.orbench(tmp_path, train=3, test=2, lists=lists)
    data = People(train=f"{tmp_path}#train", evaluate={"test": f"{tmp_path}#test"}, sampler=BLOCK, **SMALL)
    split = data.open(0).evaluations["test"]
    search = split.protocol
    assert list(search.queries) == ["nir", "cp", "sk", "text", "nir_text", "text_nir", "nir_cp_sk_text"]
    assert search.groups["modal_2"] == ("nir_text", "text_nir")
    assert search.groups["modal_4"] == ("nir_cp_sk_text",) and "modal_3" not in search.groups
    whole = split.index.lists
    for name, rows in search.queries.items():
        back = np.where(rows >= 0, split.rows[rows], -1)
        assert (back == whole[name]).all()
    some = People(
        train=f"{tmp_path}#train",
        evaluate={"test": f"{tmp_path}#test"},
        modalities=["sk", "rgb", "nir"],
        sampler=BLOCK,
        **SMALL,
    ).open(0)
    assert list(some.evaluations["test"].protocol.queries) == ["nir", "sk"]
    assert some.meta.modalities == ("rgb", "nir", "sk") and some.meta.vocabulary == 0
    assert "left out: 4 of cp, 4 of text" in some.notes[-2]
    assert some.notes[-1] == "test: 20 of 28 listed queries are left out, for records that take no part"
    assert set(np.unique(some.evaluations["test"].modality).tolist()) == {0, 1, 3}


def test_nobody_in_particular_is_not_trained_on(tmp_path):
    rows = sets.index_rows(tmp_path, ["a", "b", "c"], (2, 1))
    sets.picture(tmp_path / "rgb" / "nobody.png", 99)
    rows.append(("rgb/nobody.png", "-1", "", "rgb", "", ""))
    sets.write_csv(tmp_path / "index.csv", rows)
    opened = People(train=str(tmp_path), sampler=ModalPK(people=2, each=2), **SMALL).open(0)
    assert opened.meta.classes == 3 and len(opened.train.rows) == 9 and (opened.train.label >= 0).all()
    held = People(train=str(tmp_path), hold_out=["c"], sampler=ModalPK(people=2, each=2), **SMALL).open(0)
    assert held.meta.classes == 2 and (held.train.label >= 0).all()


def test_people_are_held_out_by_share_or_by_name(home):
    data = block(home, hold_out=0.34, evaluate={"kept": "held_out"})
    one, two = data.open(5), data.open(6)
    split = one.evaluations["kept"]
    assert split.persons() == two.evaluations["kept"].persons() and len(split.persons()) == 2
    assert one.meta.classes == 4 and not split.persons() & set(one.meta.class_names)
    others = [replace(data, split_seed=seed).open(5).evaluations["kept"] for seed in range(8)]
    assert len({frozenset(one.persons()) for one in others}) > 1
    assert (split.label == -1).all() and set(one.train.label.tolist()) == {0, 1, 2, 3}
    named = block(home, hold_out=["p01", "p04"]).open(0)
    assert named.evaluations["held_out"].persons() == {"p01", "p04"}
    with pytest.raises(UserError, match="unknown people: p9; expected some of: p00"):
        block(home, hold_out=["p9"]).open(0)
    with pytest.raises(UserError, match="leaves no training data"):
        block(home, hold_out=[f"p{n:02d}" for n in range(6)]).open(0)


# ---- Batches ---------------------------------------------------------------------------------------------------------


def test_a_batch_is_in_the_order_of_its_modalities_and_queries_are_rows_of_it(opened, home):
    train = opened.train
    rows = train.order(0, 20)[0, 10:20]
    batch = train.fetch(rows, 0)
    index, modality = batch["index"].numpy(), batch["modality"].numpy()
    assert sorted(index.tolist()) == sorted(rows.tolist()) and (np.diff(modality) >= 0).all()
    assert (
        modality.tolist() == train.modality[index].tolist() and batch["label"].tolist() == train.label[index].tolist()
    )
    assert {name: len(batch[f"image.{name}"]) for name in MODALITIES[:4]} == dict.fromkeys(MODALITIES[:4], 2)
    assert batch["text"].shape == (2, 12) and batch["text"].dtype == torch.int64 and batch["augment"].shape == (8, 19)
    queries = batch["queries"].numpy()
    assert queries.dtype == np.int64 and len(queries) == 30  # two people with one record of each: 15 sets each
    patterns = Counter(tuple(np.flatnonzero(q >= 0)) for q in queries)
    assert patterns == Counter(dict.fromkeys(subsets(), 2))
    for query in queries:
        there = query[query >= 0]
        assert len(set(batch["label"][there].tolist())) == 1
        assert modality[there].tolist() == np.flatnonzero(query >= 0).tolist()


def test_pictures_and_words_in_a_batch_are_those_of_their_records(home):
    train = block(home).open(0).train
    rows = np.array([5, 53, 0, 40, 20, 36, 37, 53])
    batch = train.fetch(rows, 0)
    order = np.argsort(train.modality[rows], kind="stable")
    assert batch["index"].tolist() == rows[order].tolist()
    ids, texts, modality = train.index.ids, train.index.texts, batch["modality"].numpy()
    place = Counter()
    for row, code in zip(rows[order], modality, strict=True):
        at = place[code]
        place[code] += 1
        if code == TEXT:
            expected = Words(500, 12).encode(texts[train.rows[row]])
            assert batch["text"][at].tolist() == expected + [0] * (12 - len(expected))
        else:
            pixels = np.asarray(Image.open(home / "train" / ids[train.rows[row]]))
            assert (batch[f"image.{MODALITIES[code]}"][at].permute(1, 2, 0).numpy() == pixels).all()
    assert place[2] == 0 and batch["image.cp"].shape == (0, 3, 16, 8)
    done = train.on_device(batch)
    assert done["image.cp"].shape == (0, 3, 16, 8) and done["image.cp"].dtype == torch.float32
    expected = augment.normalise(batch["image.rgb"], train.data.mean, train.data.std)
    assert torch.equal(done["image.rgb"], expected)


def test_pictures_are_augmented_as_each_would_be_alone(opened):
    train = opened.train
    batch = train.fetch(train.order(1, 10)[0, :], 1)
    done = train.on_device(batch)
    assert "augment" not in done
    at = 0
    for name in MODALITIES[:4]:
        for one, picture in zip(done[f"image.{name}"], batch[f"image.{name}"], strict=True):
            alone = LIGHT.apply(picture[None], batch["augment"][at : at + 1], train.data.mean)
            torch.testing.assert_close(
                one, augment.normalise(alone, train.data.mean, train.data.std)[0], rtol=0, atol=1e-6
            )
            at += 1
    assert at == len(batch["augment"])


def test_what_is_drawn_is_a_function_of_batch_and_epoch_and_differs_for_one_record(opened):
    train = opened.train
    rows = np.array([0, 0, 0, 20, 20, 45, 45, 53])
    first, again = train.fetch(rows, 4), pickle.loads(pickle.dumps(train)).fetch(rows, 4)
    assert first.keys() == again.keys() and all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["augment"][0], first["augment"][1])
    other_epoch, other_batch = train.fetch(rows, 5), train.fetch(rows[1:], 4)
    assert not torch.equal(first["augment"], other_epoch["augment"])
    assert not torch.equal(first["augment"][0], other_batch["augment"][0])
    mirrored = train.fetch(rows, 4, view=1)["augment"][:, augment.NUMBERS.index("flip")]
    assert (mirrored == 1).all()


def test_captions_lose_words_in_training_alone(opened):
    train = opened.train
    captions = np.flatnonzero(train.modality == TEXT)
    whole = [len(Words(500, 12).encode(train.caption(int(row)))) - 1 for row in captions]
    left = [(train.fetch(captions, epoch)["text"] > 0).sum(1).numpy() - 1 for epoch in range(60)]
    share = 1 - np.mean(left) / np.mean(whole)
    assert min(map(min, left)) >= 1 and abs(share - 0.3) < 0.04
    val = opened.evaluations["val"]
    rows = np.flatnonzero(val.modality == TEXT)
    expected = [Words(500, 12).encode(val.caption(int(row))) for row in rows]
    assert [[i for i in line if i] for line in val.fetch(rows, 0)["text"].tolist()] == expected


def test_queries_lose_modalities_from_an_epoch_on_and_never_all(home):
    train = block(home, modality_dropout=ModalityDropout(p=0.5, from_epoch=2)).open(0).train
    rows = train.order(0, 10)[0, :]
    whole = train.fetch(rows, 1)["queries"]
    without = dataset.replace(train, data=dataset.replace(train.data, modality_dropout=None))
    assert torch.equal(whole, without.fetch(rows, 2)["queries"])
    assert not torch.equal(whole, train.fetch(rows, 2)["queries"])
    lost = []
    for epoch in range(2, 60):
        some = train.fetch(rows, epoch)["queries"]
        assert some.shape == whole.shape and (some >= 0).any(1).all()
        assert ((some == whole) | (some == -1)).all()
        lost.append(((some < 0) & (whole >= 0)).float().sum(1) / (whole >= 0).sum(1))
    size = (whole >= 0).sum(1)
    lost = torch.stack(lost).mean(0)
    # Of n records each is lost with p, but where all would be, one stays: p - p^n / n of them.
    for n in range(1, 5):
        assert abs(lost[size == n].mean() - (0.5 - 0.5**n / n)) < 0.05


def test_an_evaluation_gives_records_as_they_come_and_has_no_queries(opened):
    val = opened.evaluations["val"]
    rows = np.array([7, 8, 9, 10, 26, 26, 26])
    batch = val.fetch(rows, 0)
    assert set(batch) == {"label", "modality", "index", "view", "text", *(f"image.{m}" for m in MODALITIES[:4])}
    assert batch["index"].tolist() == rows.tolist() and (batch["label"] == -1).all()
    assert [len(batch[f"image.{m}"]) for m in MODALITIES[:4]] == [2, 2, 0, 0] and len(batch["text"]) == 3
    with pytest.raises(ValueError, match="not in the order"):
        val.fetch(np.array([26, 0]), 0)
    with pytest.raises(ValueError, match="not a split to train on"):
        val.order(0, 10)
    assert (val.at_once, val.views, opened.train.views) == (None, 1, 0)


def contents(batch: dict) -> tuple[Counter, Counter]:
    """What a training batch holds, in any order: its records with all that was drawn for them, and its queries."""
    pictures = [picture for name in MODALITIES[:4] for picture in batch[f"image.{name}"]]
    seen = [*zip(pictures, batch["augment"], strict=True), *((words,) for words in batch["text"])]
    keys = zip(batch["modality"].tolist(), batch["index"].tolist(), batch["label"].tolist(), strict=True)
    rows = [(*key, *(part.numpy().tobytes() for part in some)) for key, some in zip(keys, seen, strict=True)]
    asked = [tuple(rows[row] for row in query if row >= 0) for query in batch["queries"].tolist()]
    return Counter(rows), Counter(asked)


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
@pytest.mark.parametrize("spec", [PK(people=6, each=4), ModalPK(people=6, each=5), Pairs(people=12, each=3)])
def test_the_parts_of_a_block_hold_what_the_whole_holds(home, spec, parts):
    dropped = ModalityDropout(p=0.5)
    data = block(home, sampler=spec, augment=LIGHT, token_dropout=0.3, modality_dropout=dropped).open(3)
    train, whole_people = data.train, 0
    assert (data.block, data.part) == (spec.block, spec.each)
    for epoch in range(8):
        rows = train.order(epoch, spec.block)[0, :]
        cut = [train.divide(rows, number, parts) for number in range(parts)]
        batches = [train.fetch(indices, epoch) for indices in cut]
        assert all(len(batch["label"]) == spec.block // parts for batch in batches)
        whole, divided = contents(train.fetch(rows, epoch)), [contents(batch) for batch in batches]
        assert sum((one[0] for one in divided), Counter()) == whole[0]
        for batch in batches:
            _, person = np.unique(batch["label"], return_inverse=True)
            alone = combined(person, batch["modality"].numpy(), subsets(), cap=True)
            assert len(batch["queries"]) == sum(map(len, alone)), "as of its own records: no more than is gathered"
        if sum(len(batch["label"].unique()) for batch in batches) == len({label for _, _, label, *_ in whole[0]}):
            whole_people += 1
            assert sum((one[1] for one in divided), Counter()) == whole[1]
    assert whole_people == 8 or isinstance(spec, Pairs)
    assert whole_people or parts > 3, "blocks in which nobody is in two parts"


def test_draws_of_one_person_are_in_one_part_as_far_as_there_is_room():
    assert parts_of(np.arange(8), 4).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert parts_of(np.array([5, 7, 5, 6, 7, 8]), 2).tolist() == [0, 1, 0, 0, 1, 1]
    assert parts_of(np.array([5, 5, 5, 6]), 2).tolist() == [0, 0, 1, 1]
    assert parts_of(np.array([5, 5]), 2).tolist() == [0, 1]


# ---- What is refused, and said ---------------------------------------------------------------------------------------


def test_people_and_pictures_in_two_splits_are_refused(home, tmp_path, caplog):
    sets.index(tmp_path / "same", ["p01", "x"], (2, 1, 1, 1, 1), seed=9)
    with pytest.raises(UserError, match=r"(?s)data.evaluate.val: 1 of its 2 people are in data.train: p01"):
        block(home, evaluate={"val": str(tmp_path / "same")}).open(0)
    with caplog.at_level(logging.WARNING):
        loose = block(home, evaluate={"val": str(tmp_path / "same")}, leakage="allow").open(0)
    assert "its metrics are too optimistic" in caplog.text
    labels = loose.evaluations["val"].label
    assert set(labels.tolist()) == {-1, 1}
    sets.index(tmp_path / "copied", ["x", "y"], (2, 1, 1, 1, 1), seed=9)
    (tmp_path / "copied/nir/y/0.png").write_bytes((home / "train/rgb/p02/1.png").read_bytes())
    with pytest.raises(UserError, match=r"1 of its 10 images are in data.train: nir/y/0.png = rgb/p02/1.png"):
        block(home, evaluate={"val": str(tmp_path / "copied")}).open(0)


def test_too_few_people_are_refused_before_anything_is_packed(home, tmp_path):
    with pytest.raises(UserError, match=r"data\.sampler\.people: 7 people in a step, but only 6"):
        block(home, sampler=ModalPK(people=7, each=2)).open(0)
    assert not list((tmp_path / "cache").glob("*/images*"))


def test_a_modality_that_is_not_there_is_refused(tmp_path):
    sets.index(tmp_path / "train", 3, (2, 2))
    sampler = ModalPK(people=2, each=2)
    with pytest.raises(UserError, match="no records of sk, only rgb, nir"):
        People(train=str(tmp_path / "train"), modalities=["rgb", "sk"], sampler=sampler, **SMALL).open(0)
    sets.index(tmp_path / "grey", 3, (0, 2, 1))
    with pytest.raises(UserError, match="no records of rgb, only nir, cp"):
        People(train=str(tmp_path / "grey"), sampler=sampler, **SMALL).open(0)
    sets.index(tmp_path / "val", ["a"], (0, 2), seed=1)
    evaluate = {"val": str(tmp_path / "val")}
    with pytest.raises(
        UserError, match=r"data.evaluate.val .*: 2 queries and 0 gallery images; expected at least one of each"
    ):
        People(train=str(tmp_path / "train"), evaluate=evaluate, sampler=sampler, **SMALL).open(0)


def test_what_is_not_there_yet_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_DATA", str(tmp_path))
    data = People(
        train="no",
        evaluate={"v": "held_out", "w": "none.csv", "x": "sample:people"},
        hold_out=0.2,
        sampler=BLOCK,
        text=Captions(tokenizer="clip", file="clip.gz"),
    )
    assert [line.split(":")[0] for line in data.missing()] == ["data.train", "data.evaluate.w", "data.text.file"]
    with pytest.raises(UserError, match="does not exist"):
        data.open(0)


def test_the_digest_follows_pictures_words_and_people(home, tmp_path):
    first = block(home).open(0).meta.digest
    assert first == block(home, augment=LIGHT).open(1).meta.digest
    others = [
        block(home, image_size=(8, 8)),
        block(home, modalities=["rgb", "nir"]),
        block(home, text=Captions(length=9, vocabulary=500)),
        block(home, hold_out=["p00"]),
        block(home, train=str(home / "val")),
    ]
    digests = [other.open(0).meta.digest for other in others]
    assert len({first, *digests}) == 6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"image_size": 0}, "image_size"),
        ({"std": [0.0, 1.0, 1.0]}, "std"),
        ({"token_dropout": 1.0}, "token_dropout"),
        ({"modalities": ["nir", "text"]}, "add rgb"),
        ({"evaluate": {"v": "held_out"}}, "hold_out is not set; set it to the people"),
        ({"evaluate": {"held_out": "b"}, "hold_out": "50%"}, "choose another name"),
        ({"evaluate": {"train": "b"}}, "but not `train`"),
    ],
)
def test_contradictions_in_the_block_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        sampler = {"name": BLOCK.name, "people": BLOCK.people, "each": BLOCK.each}
        validate(People, {"train": "a", "sampler": sampler} | wrong, {})
