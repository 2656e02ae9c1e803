import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from record_files import MAGIC, parts, record, write

from trainkit.data.formats import recordio
from trainkit.errors import UserError

REAL = Path(__file__).parents[4] / "shared" / "data" / "faces_lfw112"


def jpeg(path: Path, value: int) -> bytes:
    Image.new("RGB", (8, 8), (value, 255 - value, 40)).save(path, "JPEG")
    return path.read_bytes()


def small_set(tmp: Path) -> tuple[dict[int, bytes], list[bytes]]:
    tmp.mkdir(exist_ok=True)
    pictures = [jpeg(tmp / "p.jpg", value) for value in (10, 90, 170, 250)]
    records = {0: record(0, [5, 7], b"")}
    # A scalar label, and arrays of labels whose first one counts.
    for key, (labels, picture) in enumerate(zip([[0], [0, 4], [1, 4], [1]], pictures, strict=True), start=1):
        records[key] = record(key, labels, picture)
    records[5], records[6] = record(5, [1, 3], b""), record(6, [3, 5], b"")
    return records, pictures


def test_pictures_and_labels_are_read_and_people_are_left_out(tmp_path):
    records, pictures = small_set(tmp_path)
    source = recordio.insightface(write(tmp_path / "set", records))
    found = list(source.records())
    assert source.size == 4
    assert [r.label for r in found] == [0, 0, 1, 1]
    assert [r.data for r in found] == pictures


def test_a_record_split_at_the_magic_number_is_joined_again(tmp_path):
    payload = b"abcd" + MAGIC + b"efgh" + MAGIC + MAGIC + b"ij"
    data = record(1, [2], payload)
    assert data.count(MAGIC) == 4  # the parts' own; those of the payload are gone
    source = recordio.insightface(write(tmp_path / "set", {1: data}))
    assert next(source.records()).data == payload


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        list(recordio.insightface(folder).records())
    return str(caught.value)


def _length(data: bytes, length: int) -> bytes:
    return data[:4] + struct.pack("<I", length) + data[8:]


DAMAGED_RECORDS = {
    "magic": (3, lambda data: b"\0" + data[1:], "record 3: bad magic"),
    "a length into the next": (2, lambda data: _length(data, len(data) + 100), "record 2: .*overlapping"),
    "the largest length": (2, lambda data: _length(data, 0x1FFFFFFF), "record 2: truncated"),
    "more labels than bytes": (1, lambda data: parts(struct.pack("<IfQQ", 0xFFFFFFFF, 0, 1, 0) + b"xx"), "record 1: "),
    "more images than there are": (0, lambda data: record(0, [1e9, 2e9], b""), "record 0: "),
    **{
        f"label {label}": (2, lambda data, label=label: record(2, [label], b"x"), "record 2: label")
        for label in (float("nan"), float("inf"), -1.0, 0.5, 3.0)
    },
}


@pytest.mark.parametrize("name", DAMAGED_RECORDS)
def test_a_damaged_record_is_named(tmp_path, name):
    key, damage, said = DAMAGED_RECORDS[name]
    records, _ = small_set(tmp_path)
    records[key] = damage(records[key])
    assert re.search(said, refused(write(tmp_path / "set", records, people=3)))


DAMAGED_FILES = {
    "empty": ("train.rec", lambda data: b"", "record"),
    "one place twice": ("train.idx", lambda data: re.sub(rb"\n2\t\d+\n3\t(\d+)", rb"\n2\t\1\n3\t\1", data),
                        "record 2: overlaps"),
    "beyond the file": ("train.idx", lambda data: re.sub(rb"\d+\n$", b"%d\n" % 10**30, data), r"train\.idx: "),
    "no pair": ("train.idx", lambda data: b"0\t0\nnonsense\n", "row 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED_FILES)
def test_a_damaged_file_is_named(tmp_path, name):
    file, damage, said = DAMAGED_FILES[name]
    place = write(tmp_path / "set", small_set(tmp_path)[0]) / file
    place.write_bytes(damage(place.read_bytes()))
    assert re.search(said, refused(place.parent))


def test_records_are_read_by_number_and_counted_without_being_read(tmp_path):
    records, pictures = small_set(tmp_path)
    source = recordio.insightface(write(tmp_path / "set", records))
    assert [(found.id, found.data) for found in source.some([3, 0])] == [
        ("record 4", pictures[3]),
        ("record 1", pictures[0]),
    ]
    ids, labels = source.labelled()
    assert list(ids) == ["record 1", "record 2", "record 3", "record 4"] and labels.tolist() == [0, 0, 1, 1]


def test_the_table_of_a_large_set_is_made_once(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(recordio, "_KEPT", 4)
    folder = write(tmp_path / "set", small_set(tmp_path)[0])
    first = list(recordio.insightface(folder).records())
    assert recordio.insightface(folder).labelled()[1].tolist() == [0, 0, 1, 1]
    with monkeypatch.context() as patch:
        patch.setattr(recordio, "_made", lambda *_: pytest.fail("made again"))
        assert list(recordio.insightface(folder).records()) == first
        (file,) = cache.glob("recordio-*.npy")
        np.save(file, np.asarray([[1], [0], [1 << 40], [0]]))
        with pytest.raises(UserError, match="records outside of their file"):
            recordio.insightface(folder)
        np.save(file, np.zeros((3, 1)))
        with pytest.raises(UserError, match="remove the file"):
            recordio.insightface(folder)
    records, _ = small_set(tmp_path)
    write(folder, {key: records[key] for key in (1, 2, 3, 4)})
    assert len(recordio.open_table(folder / "train.rec").numbers.T) == 4 == recordio.insightface(folder).size
    assert len(list(cache.glob("recordio-*.npy"))) == 2


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("2\t8\n1\t0\n", [[1, 0], [2, 8]]),
        ("1 0\r\n\n 2\t8", [[1, 0], [2, 8]]),
        ("+1\t0\n", [[1, 0]]),
        ("1\t0\n1\t8\n", "record 1: begins at byte 8"),
        ("1\n0\n", "no records"),
        ("1\t0\t2\n8\n", "row 2"),
        ("1\t0\n2\t-8\n", "record 2: begins at byte -8"),
        ("1\t1.5\n", "1.5"),
        (f"1\t{10**18}\n", "begins at byte"),
        ("٤\t0\n", "cannot be read"),
        ("", "no data"),
    ],
)
def test_an_index_is_read_as_its_lines_say(tmp_path, text, found):
    (tmp_path / "train.idx").write_bytes(text.encode())
    if isinstance(found, list):
        assert recordio.read_index(tmp_path / "train.idx").tolist() == found
    else:
        with pytest.raises(UserError, match=found):
            recordio.read_index(tmp_path / "train.idx")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    return {file.name: file.read_bytes() for file in write(folder / "set", small_set(folder)[0]).iterdir()}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_of_any_kind_ends_in_a_user_error_or_in_records(tmp_path, whole, data):
    folder = tmp_path
    for name, content in whole.items():
        (folder / name).write_bytes(content)
    name = data.draw(st.sampled_from(["train.rec", "train.rec", "train.idx", "property"]))
    content = bytearray((folder / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "word"]))
        place = data.draw(st.integers(0, max(0, len(content) - 1)))
        if kind == "flip" and content:
            content[place] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del content[place:]
        elif kind == "insert":
            content[place:place] = data.draw(st.binary(max_size=9))
        else:
            place = place // 4 * 4
            content[place : place + 4] = data.draw(st.sampled_from([MAGIC, b"\xff" * 4, b"\0" * 4, b"\0\0\0\x80"]))
    (folder / name).write_bytes(content)
    try:
        list(recordio.insightface(folder).records())
    except UserError as error:
        assert str(folder) in str(error)


@pytest.mark.skipif(not REAL.is_dir(), reason="the real faces are not beside this checkout")
def test_a_real_set_has_its_226_pictures_of_30_people():
    source = recordio.insightface(REAL / "rec")
    found = list(source.records())
    assert (source.size, len(found)) == (226, 226)
    assert sorted({r.label for r in found}) == list(range(30))
    # The file's own records of people say which images are whose: 227 .. 256, each a range.
    size = (REAL / "rec" / "train.rec").stat().st_size
    offsets = dict(recordio.read_index(REAL / "rec" / "train.idx").tolist())
    labels = np.asarray([r.label for r in found])
    for person, key in enumerate(range(227, 257)):
        with (REAL / "rec" / "train.rec").open("rb") as file:
            payload = recordio.read_record(file.fileno(), offsets[key], size, "")
        ranges, rest = recordio.unpack(payload, "")
        begin, end = ranges.astype(int).tolist()
        assert rest == b"" and set(labels[begin - 1 : end - 1]) == {person}
