"""People in tables that hold their images: parquet, saved sets, shards and sets of the hub."""

from __future__ import annotations

import json

import datasets
import fake_hub
import pytest
import table_sets

from trainkit.data.people import index as people_index
from trainkit.errors import UserError
from trainkit.interfaces import NIR, RGB, TEXT

PEOPLE = ("anna", "bert", "carl", "dora", "emil", "fay")


def png(seed: int) -> bytes:
    return table_sets.png(seed, 32, 16)


def table(each: int = 4, first: int = 0) -> datasets.Dataset:
    """People as `datasets` has them: a ClassLabel, images in the table, one caption, one near-infrared image."""
    rows = len(PEOPLE) * each
    columns = {
        "image": [{"bytes": png(first + n), "path": None} for n in range(rows)],
        "person": [n // each for n in range(rows)],
        "camera": [f"c{n % each}" for n in range(rows)],
        "modality": ["nir" if n == 1 else "rgb" for n in range(rows)],
        "text": ["a red coat" if n == 0 else "" for n in range(rows)],
    }
    text = datasets.Value("string")
    kinds = {"image": datasets.Image(), "person": datasets.ClassLabel(names=list(PEOPLE))}
    features = datasets.Features(kinds | dict.fromkeys(("camera", "modality", "text"), text))
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINKIT_CACHE", str(tmp_path / "cache"))


def seen(index) -> list[tuple[str, str, int]]:
    """Person, camera and modality of each record."""
    people, cameras = (*index.persons, None), (*index.cameras, None)
    rows = zip(index.person.tolist(), index.camera.tolist(), index.modality.tolist(), strict=True)
    return [(people[who], cameras[where], kind) for who, where, kind in rows]


def test_a_table_and_a_saved_set_give_the_same_people(tmp_path):
    table().to_parquet(tmp_path / "people.parquet")
    table().save_to_disk(tmp_path / "saved")
    found = people_index.indexed(str(tmp_path / "people.parquet"))
    assert found.persons == PEOPLE and len(found) == 25
    kinds = [kind for *_, kind in seen(found)]
    assert kinds == [RGB] * 23 + [NIR, TEXT] and found.words()[-1] == "a red coat"
    assert seen(found)[0] == ("anna", "c0", RGB) and seen(found)[23] == ("anna", "c1", NIR)
    saved = people_index.indexed(str(tmp_path / "saved"))
    assert saved.manifest["digest"] == found.manifest["digest"]
    pictures = [record.data.read_bytes() for record in found.pictures().records()]
    assert pictures == [png(n) for n in (0, *range(2, 24), 1)]


def test_splits_of_a_folder_of_parquet_files_and_columns_of_other_names(tmp_path):
    splits = {"train": table(first=100), "val": table(each=2, first=300)}
    named = {name: each.rename_columns({"person": "who", "image": "crop"}) for name, each in splits.items()}
    datasets.DatasetDict(named).save_to_disk(tmp_path / "both")
    columns = {"person": "who", "image": "crop"}
    assert len(people_index.indexed(f"{tmp_path}/both#val", columns=columns)) == 13
    assert len(people_index.indexed(f"{tmp_path}/both", columns=columns)) == 25
    with pytest.raises(UserError, match="person in one of"):
        people_index.indexed(f"{tmp_path}/both", columns={"image": "crop"})
    with pytest.raises(UserError, match=r"no column 'whom'; expected one of its columns"):
        people_index.indexed(f"{tmp_path}/both", columns={"person": "whom"})
    with pytest.raises(UserError, match="no such split"):
        people_index.indexed(f"{tmp_path}/both#test", columns=columns)


def test_shards_of_people(tmp_path):
    words = [json.dumps({"pid": f"p{n // 2}", "cam": str(n % 2)}).encode() for n in range(4)]
    members = [part for n in range(4) for part in ((f"{n}.png", png(n)), (f"{n}.json", words[n]))]
    table_sets.shard(tmp_path / "people.tar", *members)
    found = people_index.indexed(str(tmp_path / "people.tar"), columns={"person": "json.pid", "camera": "json.cam"})
    assert seen(found) == [("p0", "0", RGB), ("p0", "1", RGB), ("p1", "0", RGB), ("p1", "1", RGB)]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"image": {"bytes": b"GIF89a", "path": None}}, "row 3: bytes of no known image format"),
        ({"modality": "radar"}, "row 3: modality 'radar'"),
        ({"person": None}, "row 3: person: None"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_and_nothing_is_left(tmp_path, changed, said):
    features = table().features
    bare = features | {"image": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}}
    rows = table().cast_column("image", datasets.Image(decode=False)).to_list()
    rows[3] |= changed
    datasets.Dataset.from_list(rows, features=datasets.Features(bare)).to_parquet(tmp_path / "people.parquet")
    with pytest.raises(UserError, match=said):
        people_index.indexed(str(tmp_path / "people.parquet"))
    assert not list((tmp_path / "cache").glob("people-*/index.csv"))
    assert not list((tmp_path / "cache").glob(".people-*"))


@pytest.mark.slow
def test_people_of_the_hub_are_downloaded_and_copied_into_a_recipe(tmp_path):
    folder = tmp_path / "hub" / "o" / "people" / "data"
    folder.mkdir(parents=True)
    table(each=6).to_parquet(folder / "train-00000-of-00001.parquet")
    new = tmp_path / "mine.yaml"
    with fake_hub.serving(tmp_path / "hub", tmp_path / "home") as served:
        (code, said), (checked, told) = served.run(
            ["cp", "reid_market", new, "--data", "hf://o/people"], ["check", new, "task.net.weights=null"]
        )
    assert code == 0 and "37 records of 6 people (rgb 35, nir 1, text 1)" in said, said
    assert checked == 0 and "hf://o/people#train" in new.read_text(), told
