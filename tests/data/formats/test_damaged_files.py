"""Binary files that were damaged anywhere: an answer or one message that names the file, and never anything else."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from binary_readers import READERS

from trainkit.errors import UserError

EXTREMES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, 0x7FF8 << 48, 0x7F800000]


@functools.cache
def sound(name: str) -> list[bytes]:
    """What the corpus of a reader holds that it reads."""
    read, corpus = READERS[name]
    found = []
    for data in corpus():
        try:
            read(data)
        except UserError:
            continue
        found.append(data)
    return found


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Up to four things done to a file: cut, a bit or byte or number changed, a piece lost, doubled or moved."""
    data = bytearray(data)
    for _ in range(rng.integers(1, 5)):
        if not data:
            break
        at, length = int(rng.integers(len(data))), int(rng.integers(1, 17))
        match int(rng.integers(8)):
            case 0:
                del data[at:]
            case 1:
                data[at] ^= 1 << int(rng.integers(8))
            case 2:
                data[at] = int(rng.integers(256))
            case 3 | 4:
                size = int(rng.choice([2, 4, 8]))
                value = EXTREMES[rng.integers(len(EXTREMES))] & (1 << 8 * size) - 1
                data[at : at + size] = value.to_bytes(size, "little" if rng.integers(2) else "big")
            case 5:
                del data[at : at + length]
            case 6:
                data[at:at] = data[at : at + length]
            case 7:
                data[at : at + length] = bytes(length)
    return bytes(data)


def test_damaged_files_are_read_or_refused_by_name(trials):
    ends: Counter[tuple[str, str]] = Counter()
    for seed in trials(50 * len(READERS), 20000 * len(READERS)):
        name = list(READERS)[seed % len(READERS)]
        rng = np.random.default_rng(seed)
        data = damaged(sound(name)[rng.integers(len(sound(name)))], rng)
        try:
            READERS[name][0](data)
            ends[name, "read"] += 1
        except UserError as error:
            ends[name, "refused"] += 1
            assert error.where and len(str(error)) < 1200
    assert all(ends[name, "refused"] or name == "plain_jpeg" for name in READERS), "damage that nothing notices"


def test_a_footer_that_would_end_the_process_is_asked_for_nothing_that_does():
    """A bit of a Parquet file flipped: in what pyarrow 25.0.1 writes, of lengths of histograms, over which its Python
    ends the process when it is asked for what a footer says of a column."""
    read, sounds = READERS["parquet"][0], sound("parquet")[0]
    for at in range(190, 220):
        data = bytearray(sounds)
        data[at] ^= 1
        with contextlib.suppress(UserError):
            read(bytes(data))


def test_a_record_batch_of_fewer_than_no_rows_is_refused():
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([])) as stream:
        stream.write_batch(pa.RecordBatch.from_struct_array(pa.array([{}] * 3, pa.struct([]))))
    sound = sink.getvalue().to_pybytes()
    data = sound.replace((3).to_bytes(8, "little"), (-3).to_bytes(8, "little", signed=True))
    assert data != sound
    with pytest.raises(UserError, match="a record batch of -3 rows; expected 0 or more"):
        READERS["arrow"][0](data)


def test_every_reader_reads_what_is_sound():
    assert all(len(sound(name)) >= (1 if name == "arrow" else 2) for name in READERS)
