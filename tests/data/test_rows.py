"""Rows: written batch after batch, read through the mapping, believed only when they were compared."""

from __future__ import annotations

import contextlib
import json
import pickle
import signal
import subprocess
import sys
import zlib

import numpy as np
import pytest

from trainkit.data.rows import reader, row_files
from trainkit.data.rows import writer as rows_writer
from trainkit.data.rows.reader import Rows
from trainkit.data.rows.row_files import Column, Form, Part, Text
from trainkit.data.rows.writer import Writer
from trainkit.errors import UserError


class Things(Rows):
    """Rows of every kind of column: `blob` of any length, `grid` of 5 x 15 bytes each."""

    FORM = Form("things", 1, "a set of things")

    @classmethod
    def layout(cls, manifest):
        return [
            Text("id", "ids.txt"),
            Column("number", "numbers.npy", "int64", late=True),
            Column("small", "small.npy", "uint32"),
            Column("pair", "pairs.npy", "int32", 2),
            Part("blob", "blobs.bin", "offsets.npy"),
            Part("grid", "grids.npy", shape=(5, 15)),
        ]

    IDENTITY = ("rows",)

    @classmethod
    def beside(cls, manifest):
        return ["extra.npy"]


MANY = 41


def row(i: int) -> dict[str, object]:
    rng = np.random.default_rng(i)
    return {
        "id": f"thing {i}",
        "number": -1,
        "small": 7 * i,
        "pair": (i, -i),
        "blob": rng.bytes(int(rng.integers(0, 300))),
        "grid": rng.integers(0, 256, (5, 15), dtype=np.uint8),
    }


def write(folder, count=MANY, *, key="", begin=0, batch_rows=7):
    with Writer(folder, Things.layout({}), key=key, batch_rows=batch_rows, state=lambda: count) as writer:
        for i in range(max(begin, writer.rows), count):
            writer.add(row(i))
        writer.replace("number", np.arange(count) * 10)
        writer.save("extra.npy", np.arange(3))
        writer.publish(Things, {"rows": count})
    return Things(folder)


@pytest.fixture
def things(tmp_path) -> Things:
    return write(tmp_path / "set")


def check(data: Things) -> None:
    assert len(data) == MANY and data.ids() == [f"thing {i}" for i in range(MANY)]
    assert data.column("number").tolist() == [10 * i for i in range(MANY)]
    assert data.column("pair").tolist() == [[i, -i] for i in range(MANY)]
    some = np.asarray([40, 0, 13, 13, 6, 7])
    assert data.at("small", some).tolist() == (7 * some).tolist() and data.text("id", 13) == "thing 13"
    for name in ("blob", "grid"):
        for i, begin, end in zip(some.tolist(), *data.spans(name, some), strict=True):
            assert data.span(name, i) == (begin, end)
            assert data.stored(int(begin), int(end)).tobytes() == bytes(np.ascontiguousarray(row(i)[name]).data)
    assert (data.arrays("grid", some) == np.stack([row(i)["grid"] for i in some])).all()
    assert data.arrays("grid", some[:0]).shape == (0, 5, 15)
    for outside in (-1, MANY):
        with pytest.raises(ValueError, match=f"row {outside} of a set of 41"):
            data.arrays("grid", np.asarray([3, outside]))
    if not data.on_network:
        assert (data.array("grid", 7, np.uint8, (75,)).reshape(5, 15) == row(7)["grid"]).all()


def test_what_was_written_is_read(things):
    assert len(things.manifest["arrow"]["batches"]) == 6
    check(things)
    assert things.changed() == [] and things.where(3).endswith("row 3 (thing 3)")
    assert things.bytes == sum(file.stat().st_size for file in things.path.iterdir() if file.name != "manifest.json")
    check(pickle.loads(pickle.dumps(things)))


def test_the_digest_is_of_the_content_and_not_of_its_batches(things, tmp_path):
    other = write(tmp_path / "other", batch_rows=100)
    assert other.digest == things.digest and len(other.manifest["arrow"]["batches"]) == 1
    blobs = b"".join(row(i)["blob"] for i in range(MANY))
    entry = things.manifest["files"]["blobs.bin"]
    assert entry == {"bytes": len(blobs), "sha256": reader.hashlib.sha256(blobs).hexdigest()}
    np.save(tmp_path / "offsets.npy", np.cumsum([0, *(len(row(i)["blob"]) for i in range(MANY))]))
    np.save(tmp_path / "pairs.npy", np.asarray([row(i)["pair"] for i in range(MANY)], np.int32))
    for name in ("offsets.npy", "pairs.npy"):
        assert things.manifest["files"][name]["sha256"] == reader.files.sha256(tmp_path / name), name


def test_datasets_opens_the_file(things):
    datasets = pytest.importorskip("datasets")
    found = datasets.Dataset.from_file(str(things.path / row_files.FILE))
    assert len(found) == MANY and found[23]["id"] == "thing 23" and found[23]["blob"] == row(23)["blob"]
    assert found["number"][:3] == [0, 10, 20] and found[5]["pair"] == [5, -5]


def test_reading_needs_no_arrow(things):
    code = "import sys; from test_rows import Things, check; check(Things(sys.argv[1]))"
    code += "; assert 'pyarrow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(things.path)], check=True, cwd=__file__.rpartition("/")[0])


def test_a_network_disk_is_not_mapped(things, monkeypatch):
    monkeypatch.setattr(reader.files, "on_network", lambda folder: True)
    data = Things(things.path)
    assert data.on_network
    check(data)
    file = things.path / row_files.FILE
    whole = file.read_bytes()
    begin, end = data.span("blob", 40)
    file.write_bytes(whole[: begin + 1])  # which ends a process that has it mapped
    with pytest.raises(UserError, match=r"rows\.arrow: ends at byte"):
        data.stored(begin, end)
    assert data.text("id", 40) == "thing 40"


def messages(content: bytes) -> list[int]:
    """Where each message of the stream ends: the schema, the batches, the end."""
    import pyarrow as pa

    reader, ends = pa.BufferReader(content), []
    while reader.tell() < len(content):
        try:
            pa.ipc.read_message(reader)
        except EOFError:
            break
        ends.append(reader.tell())
    return ends


def test_a_file_cut_between_two_batches_is_refused(things, monkeypatch):
    monkeypatch.setattr(reader, "HASHED_AT_OPEN", 0)
    file = things.path / row_files.FILE
    whole = file.read_bytes()
    for end in messages(whole)[:-1]:
        file.write_bytes(whole[:end])
        with pytest.raises(UserError, match=rf"rows\.arrow: {end} bytes; expected {len(whole)}"):
            Things(things.path)


@pytest.mark.parametrize("value", [1 << 40, -1, 3])
@pytest.mark.parametrize("name", ["blob", "grid", "id"])
def test_offsets_that_lead_elsewhere_are_refused_before_they_are_used(things, monkeypatch, name, value):
    monkeypatch.setattr(reader, "HASHED_AT_OPEN", 0)
    file, entry = things.path / row_files.FILE, things._entry[name]
    content = bytearray(file.read_bytes())
    place = int(entry[0][1]) + 8 * 2  # of the third row of the second batch
    content[place : place + 8] = value.to_bytes(8, "little", signed=True)
    file.write_bytes(content)
    data = Things(things.path)
    assert data.span("blob", 0)
    with pytest.raises(UserError, match=rf"rows\.arrow: offsets of {name} in batch 1|{name} of batch 1 is not"):
        data.text(name, 9) if name == "id" else data.span(name, 9)
    with pytest.raises(UserError, match="batch 1"):
        data.texts(name) if name == "id" else data.spans(name, np.asarray([0, 9]))


def test_numbers_and_texts_are_compared_before_they_are_used(things, monkeypatch):
    monkeypatch.setattr(reader, "HASHED_AT_OPEN", 0)
    file = things.path / row_files.FILE
    whole = file.read_bytes()
    for name, at in (("number", 0), ("small", 0), ("pair", 0), ("id", 1)):
        content = bytearray(whole)
        content[int(things._entry[name][at][3]) + 1] ^= 1
        file.write_bytes(content)
        data = Things(things.path)
        with pytest.raises(UserError, match=f"{name} of batch 3 is not what was written"):
            data.ids() if name == "id" else data.column(name)
        assert len(data.changed()) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table[0].__setitem__(0, 8),
        lambda table: table[0].__setitem__(1, 1 << 40),
        lambda table: table[0].__setitem__(1, -8),
        lambda table: table[0].__setitem__(1, 1 << 80),
        lambda table: table[0].__setitem__(5, table[0][5] + 1),
        lambda table: table[0].pop(),
        lambda table: table.pop(),
        lambda table: table[0].__setitem__(0, "seven"),
        lambda table: table[0].__setitem__(0, None),
        lambda table: table.append(table[0]),
    ],
)
def test_batches_that_the_file_cannot_have_are_refused(things, change):
    file = things.path / row_files.MANIFEST
    manifest = json.loads(file.read_text())
    change(manifest["arrow"]["batches"])
    file.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"manifest\.json"):
        check(Things(things.path))


@pytest.mark.parametrize("entry", [None, [], {}, {"bytes": 1}, {"bytes": "1", "sha256": ""}])
def test_a_manifest_without_its_rows_is_refused(things, entry):
    file = things.path / row_files.MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | {"arrow": entry}))
    with pytest.raises(UserError, match=r"manifest\.json"):
        Things(things.path)


# ---- Writing


def partials(tmp_path) -> list[str]:
    return [path.name for path in tmp_path.iterdir() if rows_writer.PARTIAL in path.name]


KILLED = """
import os, signal, sys
from pathlib import Path
import test_rows
from trainkit.data.rows.writer import Writer

signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background, which ignore it
add = Writer.add
def dying(self, row):
    add(self, row)
    if self.rows == 25:
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))

Writer.add = dying
test_rows.write(Path(sys.argv[1]), key="things")
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT"])
def test_a_writing_that_was_ended_goes_on(tmp_path, things, how):
    code = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "killed"), how],
        cwd=__file__.rpartition("/")[0],
        stderr=subprocess.DEVNULL,
        check=False,
    ).returncode
    assert code in (-signal.SIGKILL, -signal.SIGINT, 1, 130) and len(partials(tmp_path)) == 1
    with Writer(tmp_path / "killed", Things.layout({}), key="things", batch_rows=7) as writer:
        assert writer.rows == 21 and writer.restored == [MANY] * 3
        for i in range(21, MANY):
            writer.add(row(i))
        writer.replace("number", np.arange(MANY) * 10)
        writer.save("extra.npy", np.arange(3))
        writer.publish(Things, {"rows": MANY})
    assert partials(tmp_path) == []
    data = Things(tmp_path / "killed")
    check(data)
    assert data.digest == things.digest
    assert (data.path / row_files.FILE).read_bytes() == (things.path / row_files.FILE).read_bytes()


def half(tmp_path, key="things"):
    with (
        pytest.raises(KeyboardInterrupt),
        Writer(tmp_path / "half", Things.layout({}), key=key, batch_rows=7) as writer,
    ):
        for i in range(25):
            writer.add(row(i))
        writer.replace("number", np.arange(25))
        raise KeyboardInterrupt
    return tmp_path / next(iter(partials(tmp_path)))


def test_of_what_is_there_only_whole_batches_are_gone_on_with(tmp_path, things):
    folder = half(tmp_path)
    file = folder / row_files.FILE
    content = bytearray(file.read_bytes())
    content[-40] ^= 1  # in the last of four batches
    file.write_bytes(content)
    with (folder / rows_writer.JOURNAL).open("ab") as journal:
        journal.write(b'{"end": 1')
    assert write(tmp_path / "half", key="things").digest == things.digest


def test_another_key_begins_anew_and_a_failure_leaves_nothing(tmp_path, things):
    half(tmp_path)
    assert write(tmp_path / "half", key="others").digest == things.digest and len(partials(tmp_path)) == 1
    with (
        pytest.raises(ValueError, match="no"),
        Writer(tmp_path / "fails", Things.layout({}), key="k", batch_rows=1) as writer,
    ):
        writer.add(row(0))
        raise ValueError("no")
    with pytest.raises(KeyboardInterrupt), Writer(tmp_path / "fails", Things.layout({}), batch_rows=1) as writer:
        writer.add(row(0))
        raise KeyboardInterrupt
    assert len(partials(tmp_path)) == 1 and not (tmp_path / "fails").exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), None])
def test_with_keep_also_what_failed_or_was_given_up_goes_on(tmp_path, things, error):
    with (
        contextlib.suppress(UserError),
        Writer(tmp_path / "half", Things.layout({}), key="things", batch_rows=7, keep=True) as writer,
    ):
        for i in range(25):
            writer.add(row(i))
        if error:
            raise error
    assert len(partials(tmp_path)) == 1
    with Writer(tmp_path / "half", Things.layout({}), key="things", batch_rows=7) as writer:
        assert writer.rows == 21
    assert write(tmp_path / "half", key="things").digest == things.digest


def test_a_disk_that_refuses_the_name_leaves_all_but_the_name(tmp_path, things, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(rows_writer.Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(5, "pulled out")))
        with (
            pytest.raises(UserError, match=r"half: cannot be written \(pulled out\)"),
            Writer(tmp_path / "half", Things.layout({}), key="things", batch_rows=7, keep=True) as writer,
        ):
            for i in range(MANY):
                writer.add(row(i))
            writer.replace("number", np.arange(MANY) * 10)
            writer.save("extra.npy", np.arange(3))
            writer.publish(Things, {"rows": MANY})
    with Writer(tmp_path / "half", Things.layout({}), key="things", batch_rows=7, keep=True) as writer:
        assert writer.rows == MANY
    data = write(tmp_path / "half", key="things")
    check(data)
    assert {file.name for file in data.path.iterdir()} == {"rows.arrow", "manifest.json", "extra.npy"}


def test_two_do_not_write_the_same(tmp_path):
    with Writer(tmp_path / "set", Things.layout({}), key="k"), pytest.raises(UserError, match="another process"):
        code = "import sys; from pathlib import Path; from test_rows import Things, UserError, Writer\n"
        code += "try:\n    Writer(Path(sys.argv[1]), Things.layout({}), key='k').__enter__()\n"
        code += "except UserError as error:\n    sys.exit(str(error))"
        folder = __file__.rpartition("/")[0]
        found = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "set")],
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        raise UserError("", found.stderr)


def test_memory_of_writing_is_that_of_a_batch(tmp_path, monkeypatch):
    import tracemalloc

    monkeypatch.setattr(rows_writer, "BATCH_BYTES", 1 << 20)
    data = np.random.default_rng(0).bytes(100_000)
    tracemalloc.start()
    with Writer(tmp_path / "set", Things.layout({})) as writer:
        for i in range(200):
            writer.add({**row(0), "id": str(i), "blob": data})
        writer.save("extra.npy", np.arange(3))
        writer.publish(Things, {"rows": 200})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20, "of 20 MB"
    found = Things(tmp_path / "set")
    assert zlib.crc32(found.stored(*found.span("blob", 199))) == zlib.crc32(data)
