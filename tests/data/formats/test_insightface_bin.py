import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainkit.data import pairs_csv
from trainkit.data.formats import insightface_bin
from trainkit.data.import_images import import_faces
from trainkit.data.storage.image_store import Packed
from trainkit.errors import UserError

DATA = Path(__file__).parents[4] / "shared" / "data"
real = pytest.mark.skipif(not DATA.is_dir(), reason="the real data is not beside this checkout")
PICTURES = [b"one", b"two", b"one", b"three"]


def read(tmp_path: Path, content: object, protocol: int = 4):
    file = tmp_path / "x.bin"
    file.write_bytes(pickle.dumps(content, protocol))
    return insightface_bin.read_bin(file)


def as_arrays(column: bool) -> list[np.ndarray]:
    arrays = [np.frombuffer(picture, np.uint8) for picture in PICTURES]
    return [array[:, None] for array in arrays] if column else arrays


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "content",
    [
        (PICTURES, [True, False]),
        [PICTURES, [1, 0]],
        (PICTURES, [np.bool_(True), np.bool_(False)]),
        (PICTURES, np.asarray([True, False])),
        (as_arrays(False), [True, False]),
        (as_arrays(True), [True, False]),
    ],
    ids=["bytes", "numbers", "numpy booleans", "array of answers", "arrays", "columns"],
)
def test_every_form_gives_the_same_pairs(tmp_path, content, protocol):
    source, found = read(tmp_path, content, protocol)
    records = list(source.records())
    assert [r.data for r in records] == [b"one", b"two", b"three"]
    assert found.first.tolist() == [0, 0] and found.second.tolist() == [1, 2]
    assert found.same.tolist() == [True, False]


def test_bytes_of_python_2_are_read(tmp_path):
    file = tmp_path / "x.bin"
    file.write_bytes(b"\x80\x02]q\x00(U\x03\x80abU\x02cde]q\x01I01\na\x86.")
    source, found = insightface_bin.read_bin(file)
    assert [r.data for r in source.records()] == [b"\x80ab", b"cd"]
    assert found.same.tolist() == [True]


class Payload:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("place", ["alone", "picture", "answer", "hidden"])
def test_a_file_that_calls_is_refused_and_nothing_is_called(tmp_path, place, protocol):
    sentinel = tmp_path / "sentinel"
    sentence = f"__import__('pathlib').Path({str(sentinel)!r}).touch()"
    bomb = Payload(eval, sentence)
    content = {
        "alone": bomb,
        "picture": ([bomb, b"x"], [True]),
        "answer": ([b"x", b"y"], [bomb]),
        "hidden": (PICTURES, [True, False], bomb),
    }[place]
    with pytest.raises(UserError, match=r"eval|instruction"):
        read(tmp_path, content, protocol)
    assert not sentinel.exists()
    eval(sentence)
    assert sentinel.exists()  # the payload does work


@pytest.mark.parametrize(
    "program",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cnumpy\nload\n(S'/etc/passwd'\ntR.",
        b"cnumpy.core.multiarray\nfromfile\n.",
        b"(ios\nsystem\n(S'true'\nt.",
        b"(S'true'\nios\nsystem\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        b"\x80\x02cnumpy\nndarray\n)\x81.",
        b"\x80\x02}.",
        b"Pid\n.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02]r\xff\xff\xff\x7f.",
        b"]p2147483647\n.",
        b"\x80\x05\x96\0\0\0\0\0\x01\0\0x.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f].",
        b"\x80\x02c_codecs\nencode\n]\x85R.",
        b"\x80\x02cnumpy\ndtype\n]\x85R.",
    ],
)
def test_hand_written_programs_are_refused(tmp_path, program):
    (tmp_path / "x.bin").write_bytes(program)
    with pytest.raises(UserError):
        insightface_bin.read_bin(tmp_path / "x.bin")


@pytest.mark.parametrize(
    "content",
    [
        ([b"a", b"b", b"c"], [True]),
        ([], []),
        ([b"a", b"b"], [2]),
        ([b"a", b"b"], ["yes"]),
        ([b"a", 7], [True]),
        ([b"a", np.zeros((2, 2), np.uint8)], [True]),
        ([b"a", np.zeros(4, np.float32)], [True]),
        b"text",
        [[b"a", b"b"]],
        ({}, [True]),
    ],
)
def test_what_is_no_verification_set_is_refused(tmp_path, content):
    with pytest.raises(UserError, match=r"x\.bin"):
        read(tmp_path, content)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_of_any_kind_ends_in_a_user_error_or_in_pairs(tmp_path, data):
    content = data.draw(st.sampled_from([(PICTURES, [True, False]), (as_arrays(True), [np.bool_(True), False])]))
    program = bytearray(pickle.dumps(content, data.draw(st.integers(0, 5))))
    for _ in range(data.draw(st.integers(1, 5))):
        place = data.draw(st.integers(0, max(0, len(program) - 1)))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "byte", "move"]))
        if kind == "flip" and program:
            program[place] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del program[place:]
        elif kind == "insert":
            program[place:place] = data.draw(st.binary(max_size=6))
        elif kind == "byte" and program:
            program[place] = data.draw(
                st.sampled_from(b"().0123]}acdeghijlqrtuUVXBCNRbo\x81\x85\x86\x87\x88\x89\x8c\x93\x94")
            )
        else:
            end = data.draw(st.integers(place, min(len(program), place + 20)))
            program[place:place] = program[place:end]
    file = tmp_path / "x.bin"
    file.write_bytes(program)
    try:
        source, found = insightface_bin.read_bin(file)
    except UserError as error:
        assert "x.bin" in str(error)
    else:
        assert found.first.max() < source.size and found.second.max() < source.size


@real
def test_insightfaces_own_sample_has_ten_pairs_that_are_all_the_same(tmp_path):
    source, found = insightface_bin.read_bin(DATA / "faces_insightface_sample" / "small_lfw.bin")
    assert len(found) == 10 and found.same.all()
    report = import_faces(source, tmp_path / "out", protocol=found)
    assert report.rows == source.size == len(set(found.first) | set(found.second))


@real
@pytest.mark.slow
def test_the_two_forms_of_a_real_set_hold_the_same_pairs_and_pixels(tmp_path):
    folder = DATA / "faces_lfw112" / "verification"
    sets = []
    for name, (source, found) in {
        "csv": pairs_csv.read_csv(folder / "pairs.csv"),
        "bin": insightface_bin.read_bin(folder / "lfw_view1.bin"),
    }.items():
        import_faces(source, tmp_path / name, protocol=found)
        sets.append(Packed(tmp_path / name))
    one, two = (data.protocol() for data in sets)
    assert len(sets[0]) == len(sets[1]) == 1097 and len(one) == 600
    assert (one.same == two.same).all() and one.same.sum() == 300
    for rows, others in ((one.first, two.first), (one.second, two.second)):
        assert (sets[0].fetch(rows) == sets[1].fetch(others)).all()
