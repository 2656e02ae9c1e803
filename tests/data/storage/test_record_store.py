"""A `.rec` read in place has rows, pixels and trainings of the packed set that would be made of it."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import record_files
from runs import ROOT, all_same, run, stop_after

from trainkit.analysis import data_integrity
from trainkit.data import import_images, sources
from trainkit.data.faces.dataset import Faces
from trainkit.data.formats import recordio
from trainkit.data.loader.damaged_samples import Replacing
from trainkit.data.storage import image_store
from trainkit.data.storage.image_store import Packed
from trainkit.data.storage.record_store import Records
from trainkit.errors import UserError

SIDE = 16


@pytest.fixture
def folder(tmp_path, cache, monkeypatch) -> Path:
    """48 images of six people. Of any size they are as of a set of gigabytes: too large to be kept decoded."""
    monkeypatch.setattr(image_store, "DECODED_LIMIT", 0)
    monkeypatch.setattr(recordio, "_KEPT", 0)
    return record_files.faces(tmp_path / "set")


def packed(folder: Path, **options) -> Packed:
    out = folder.with_name("packed")
    import_images.import_faces(folder, out, image_size=SIDE, resize="down", **options)
    return Packed(out)


def in_place(folder: Path, size: int = SIDE, fit="down") -> Records:
    opened = import_images.pack_once(sources.open_source(folder), (size, size), fit)
    assert isinstance(opened, Records)
    return opened


def test_rows_classes_and_pixels_are_those_of_the_packed_set(folder, cache):
    made, lies = packed(folder), in_place(folder)
    assert len(lies) == len(made) == 48 and lies.store == made.store == "encoded" and lies.size == made.size
    assert lies.class_names == made.class_names == ("0", "2", "3", "4", "5", "6")
    assert (lies.labels == made.labels).all() and lies.labels.dtype == made.labels.dtype and lies.groups is None
    assert lies.ids() == made.ids() and lies.protocol() is None
    order = np.random.default_rng(0).permutation(48)
    for _ in range(2):  # before and after the faster decoder is believed
        assert (lies.fetch(order) == made.fetch(order)).all()
    for row, one in zip(order, lies.pictures(order), strict=True):
        assert (one == made.picture(row)).all() and lies.encoded(row) == made.encoded(row)
    assert (lies.at("content", order) == made.contents()[order]).all() and not lies.contents().any()
    again = pickle.loads(pickle.dumps(lies))
    assert again.digest == lies.digest != made.digest and (again.fetch(order) == made.fetch(order)).all()
    assert {path.suffix for path in cache.iterdir()} <= {".npy", ".json", ".lock", ""}, "nothing was packed"


def test_images_of_other_sizes_are_brought_to_the_size_as_they_are_packed(folder):
    lies = in_place(folder, 8)
    import_images.import_faces(folder, folder.with_name("small"), image_size=8, resize="down")
    assert (lies.fetch(np.arange(48)) == Packed(folder.with_name("small")).fetch(np.arange(48))).all()
    with pytest.raises(UserError, match=r"record 1: 16 x 16 pixels; expected 32 x 32"):
        in_place(folder, 32).fetch(np.arange(4))


def test_small_sets_and_those_packed_before_are_read_packed(folder, monkeypatch):
    faces = Faces(train=str(folder), image_size=SIDE)
    assert isinstance(faces.open(0).train.packed, Records)
    with monkeypatch.context() as patch:
        patch.setattr(image_store, "DECODED_LIMIT", 1 << 30)
        kept = faces.open(0).train.packed
    assert not isinstance(kept, Records) and kept.store == "decoded"
    assert faces.open(0).train.digest == kept.digest, "runs on it can go on"


def test_another_set_has_another_digest(folder):
    rec, idx = folder / "train.rec", folder / "train.idx"
    first, content = in_place(folder).digest, rec.read_bytes()
    assert in_place(folder).digest == first != in_place(folder, 8).digest
    copy = record_files.faces(folder.with_name("copy"))
    assert in_place(copy).digest == first, "wherever and whenever it was copied"
    begin = in_place(folder).span("image", 40)[0]
    for at in (begin + 12, begin + 200):  # its label, its image
        changed = bytearray(content)
        changed[at : at + 4] = struct.pack("<f", 3)
        rec.write_bytes(changed)
        assert in_place(folder).digest != first
    rec.write_bytes(content)
    idx.write_text(idx.read_text().replace("\t", " "))
    assert in_place(folder).digest == first


@pytest.mark.parametrize(
    ("at", "data", "said"),
    [
        (0, b"\0\0\0\0", "bad magic 0x00000000"),
        (4, struct.pack("<I", 0x1FFFFFFF), "truncated or overlapping the next record"),
        (32, bytes(40), "cannot be decoded"),
    ],
    ids=["magic", "length", "image"],
)
def test_a_damaged_record_is_named_or_replaced_by_another_of_its_person(folder, at, data, said):
    begin = in_place(folder).span("image", 21)[0]
    content = bytearray((folder / "train.rec").read_bytes())
    content[begin + at : begin + at + len(data)] = data
    (folder / "train.rec").write_bytes(content)
    train = Faces(train=str(folder), image_size=SIDE).open(0).train
    for rows in ([21], list(range(48))):
        with pytest.raises(UserError, match=rf"train\.rec, record 22: .*{said}.*--damaged skip"):
            train.fetch(np.asarray(rows), 0)
    train.fetch(np.delete(np.arange(48), 21), 0)
    replaced = Replacing(train, 0).fetch(np.asarray([20, 21]), 0)
    assert replaced["index"][1] != 21 and replaced["label"].tolist() == [2, 2]


def test_a_file_that_is_cut_while_it_is_read_ends_in_a_sentence(folder):
    train = Faces(train=str(folder), image_size=SIDE).open(0).train
    with (folder / "train.rec").open("r+b") as file:
        file.truncate(train.packed.span("image", 40)[0] + 100)
    train.fetch(np.arange(40), 0)
    for row in (40, 47):
        with pytest.raises(UserError, match=rf"record {row + 1}: truncated at byte"):
            train.fetch(np.asarray([row]), 0)


@pytest.mark.parametrize(
    ("at", "data", "said"),
    [
        (12, struct.pack("<f", 7), r"label 7\.0; expected a whole number from 0 to 6"),
        (8, struct.pack("<I", 1 << 30), r"1073741824 labels in \d+ bytes"),
    ],
)
def test_a_label_that_is_no_person_is_refused_at_once(folder, at, data, said):
    begin = in_place(folder).span("image", 21)[0]
    content = bytearray((folder / "train.rec").read_bytes())
    content[begin + at : begin + at + 4] = data
    (folder / "train.rec").write_bytes(content)
    with pytest.raises(UserError, match=rf"record 22: {said}"):
        in_place(folder)


def test_copies_are_found_among_images_compared_by_look_and_the_others_are_said_to_be_unknown(folder, tmp_path):
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    for name, seed in (("a", 21), ("b", 500), ("c", 600)):
        (pairs / f"{name}.jpg").write_bytes(record_files.face(seed))
    (pairs / "pairs.csv").write_text("path_a,path_b,same\na.jpg,b.jpg,1\na.jpg,c.jpg,0\n")
    opened = Faces(train=str(folder), image_size=SIDE, evaluate={"val": str(pairs)}).open(0)
    found = {(one.where, one.check): one for one in data_integrity.of(opened).findings}
    copies, alike = (found["data.evaluate.val", check] for check in ("copies", "look-alikes"))
    assert (copies.verdict, copies.count) == ("unknown", 0)
    assert "the content of 48 images of data.train, read in place, is not known" in copies.said
    assert alike.verdict == "leak" and "a.jpg = record 22" in alike.said
    assert found["data.train", "two classes"].verdict == "ok"


def test_people_can_be_held_out_and_are_scored_by_the_same_digest_as_packed(folder, tmp_path):
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("path_a,path_b,same\nrecord 1,record 2,1\nrecord 1,record 10,0\n")
    made = packed(folder)
    lies, kept = (
        Faces(train=str(place), image_size=SIDE, hold_out=str(pairs), evaluate={"val": "held_out"}).open(0)
        for place in (folder, made.path)
    )
    assert lies.meta.class_names == kept.meta.class_names == ("3", "4", "5", "6")
    scored = lies.evaluations["val"]
    assert scored.digest == kept.evaluations["val"].digest and scored.held().prints.all()


def words(train: Path) -> list[str]:
    return [
        f"data.train={train}", f"data.image_size={SIDE}", "data.evaluate={}", "evaluations={}", "best=null",
        "task.net={name: iresnet18, embedding: 16, width: 0.125, dropout: 0.4}", "checkpoints={every: 2 steps}",
        "train={length: 8 steps, batch_size: 12}", "integrity.policy=off",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_a_training_on_it_is_that_on_the_packed_set_to_the_bit_also_when_it_is_interrupted(folder):
    recipe = ROOT / "recipes" / "face_teacher_lfw.yaml"
    made = packed(folder)
    whole, other = (run(*words(place), recipe=recipe) for place in (folder, made.path))
    assert whole.code == other.code == 0 and whole.last.step == 8 and all_same(whole, other)
    assert whole.series("train/loss") == other.series("train/loss")
    cut = run(*words(folder), recipe=recipe, stopping=stop_after(3))
    content = (folder / "train.rec").read_bytes()
    (folder / "train.rec").write_bytes(content[:-200] + bytes([content[-200] ^ 1]) + content[-199:])
    with pytest.raises(UserError, match="data"):
        run(*words(folder), recipe=recipe, resume="")
    (folder / "train.rec").write_bytes(content)
    resumed = run(*words(folder), recipe=recipe, resume="")
    assert resumed.folder == cut.folder and all_same(resumed, whole)
