"""The index of a set of people: arrays that say what the set says, whatever order its records have."""

import pickle

import numpy as np
import people_sets
import pytest

from trainkit.data import import_images
from trainkit.data.formats import image_decode
from trainkit.data.people import sources
from trainkit.data.people.index import PeopleIndex, indexed
from trainkit.interfaces import TEXT

pytestmark = pytest.mark.usefixtures("cache")


def records(index: PeopleIndex) -> list[tuple]:
    """Every record in words."""
    persons, cameras = (*index.persons, None), (*index.cameras, "")
    numbers = zip(index.person, index.camera, index.modality, index.role, index.of, index.place, strict=True)
    return [
        (id, persons[p], cameras[c], int(m), int(r), index.ids[of] if of >= 0 else None, text, int(place))
        for id, text, (p, c, m, r, of, place) in zip(index.ids, index.texts, numbers, strict=True)
    ]


def rows_of(text) -> list[tuple]:
    """The same from the reader, in the order of modalities."""
    found = sources.find(str(text), "train")
    rows = [
        (one.id, one.person, one.camera, one.modality, one.role,
         found.every[one.of].id if one.of >= 0 else None, one.text, found.places.get(one.camera, -1))
        for one in found.every
    ]  # fmt: skip
    return sorted(rows, key=lambda record: record[3])


SETS = {
    "index": people_sets.index,
    "orbench#train": people_sets.orbench,
    "orbench#test": people_sets.orbench,
    "market#test": people_sets.market,
}


@pytest.mark.parametrize("name", SETS)
def test_arrays_say_what_the_reader_found(tmp_path, name):
    SETS[name](tmp_path / name.partition("#")[0])
    index = indexed(str(tmp_path / name))
    assert records(index) == rows_of(tmp_path / name)
    assert list(index.persons) == sorted(set(index.persons))
    assert np.all(np.diff(index.modality) >= 0)
    kinds = {"person": "i4", "camera": "i4", "place": "i4", "modality": "i1", "role": "i1", "of": "i4", "picture": "i4"}
    for column, kind in kinds.items():
        array = getattr(index, column)
        assert (array.dtype, array.shape) == (np.dtype(kind), (len(index),)), column
    pictures = index.modality != TEXT
    assert np.array_equal(index.picture[pictures], np.arange(pictures.sum()))
    assert (index.picture[~pictures] == -1).all()
    assert index.where == str(tmp_path / name).replace("/index", "/index/index.csv")
    assert not pickle.loads(pickle.dumps(index)).ids, "workers need no names"


def test_pictures_are_packed_in_the_order_of_the_index(tmp_path):
    people_sets.market(tmp_path / "set")
    index = indexed(f"{tmp_path / 'set'}#test")
    packed = import_images.pack_once(index.pictures(), (16, 8))
    assert packed.ids() == list(index.ids)
    names = packed.class_names
    assert [names[label] for label in packed.labels] == [(*index.persons, "-1")[p] for p in index.person]
    for row in (0, 7, len(index) - 1):
        data = (tmp_path / "set" / index.ids[row]).read_bytes()
        assert np.array_equal(packed.picture(row), image_decode.decode(data, ""))


def test_one_set_in_two_places_has_one_digest(tmp_path):
    one, other = (indexed(str(people_sets.index(tmp_path / name))) for name in ("one", "other"))
    assert one.digest == other.digest
    same = indexed(str(people_sets.index(tmp_path / "third", seed=1)))
    assert same.digest == one.digest, "other pixels, the same records"
    assert indexed(str(people_sets.index(tmp_path / "fourth", 5))).digest != one.digest
    with (tmp_path / "one" / "index.csv").open("a") as stream:
        stream.write(",p00,,text,one more caption,\n")
    assert indexed(str(tmp_path / "one")).digest != one.digest
