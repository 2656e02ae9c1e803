"""The readers of binary files, each with a few sound files made here and with what must be true of its answers.

Each takes the bytes of a file. It gives an answer, which is looked at, or raises a UserError.
"""

from __future__ import annotations

import atexit
import contextlib
import gzip
import io
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from trainkit.data import sources
from trainkit.data.formats import image_decode, insightface_bin, nifti, recordio, table_files
from trainkit.errors import UserError

SCRATCH = Path(tempfile.mkdtemp(prefix="trainkit-readers-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)


def _file(name: str, data: bytes) -> Path:
    path = SCRATCH / name
    path.write_bytes(data)
    return path


def _recordio(data: bytes) -> None:
    """The first two bytes say how many are the index."""
    cut = int.from_bytes(data[:2], "little")
    _file("train.idx", data[2 : 2 + cut])
    source = recordio.insightface(_file("train.rec", data[2 + cut :]))
    for record in source.records():
        assert len(record.data) <= len(data) * 2 and isinstance(record.label, int)


def _records(*payloads: bytes) -> bytes:
    body, index = b"", b""
    for key, payload in enumerate(payloads):
        index += f"{key}\t{len(body)}\n".encode()
        body += struct.pack("<II", recordio.MAGIC, len(payload)) + payload + bytes(-len(payload) % 4)
    return len(index).to_bytes(2, "little") + index + body


def _picture(label: float, data: bytes) -> bytes:
    return struct.pack("<IfQQ", 0, label, 0, 0) + data


def _two(*labels: float) -> bytes:
    return struct.pack("<IfQQ2f", 2, 0.0, 0, 0, *labels)


def _bin(data: bytes) -> None:
    source, pairs = insightface_bin.read_bin(_file("a.bin", data))
    assert sum(len(record.data) for record in source.records()) <= 2 * len(data) and len(pairs) <= len(data)


def _pickles() -> list[bytes]:
    import pickle

    pictures = [np.arange(9, dtype=np.uint8), b"abc", np.frombuffer(b"xyz", np.uint8), b"d"]
    content = (pictures, [True, np.bool_(False)])
    return [pickle.dumps(content, protocol) for protocol in range(6)]


def _nifti(data: bytes) -> None:
    path = _file("a.nii", data)
    with contextlib.suppress(UserError):  # labels must be whole and below 256
        labels, header = nifti.read_labels(path)
        assert labels.shape == header.shape
    array, header = nifti.read_image(path)
    assert array.shape[1:] == header.shape and np.isfinite(array).all()


def _volumes() -> list[bytes]:
    import nibabel

    found = []
    for kind in (nibabel.Nifti1Image, nibabel.Nifti2Image):
        data = kind(np.arange(24, dtype=np.int16).reshape(2, 3, 4), np.diag([1, 2, 3, 1])).to_bytes()
        found += [data, gzip.compress(data, 1, mtime=0)]
    return found


def _jpeg(data: bytes) -> None:
    size = image_decode.plain_jpeg(data)
    assert size is None or (min(size) > 0 and size[0] * size[1] <= image_decode.PIXEL_CAP)


def _jpegs() -> list[bytes]:
    from PIL import Image

    found = []
    for more in ({}, {"progressive": True}, {"subsampling": 0}):
        stream = io.BytesIO()
        Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(stream, "JPEG", **more)
        found.append(stream.getvalue())
    return found


def _decode(data: bytes) -> None:
    pixels = image_decode.decode(data, "an image")
    assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3


def _pictures() -> list[bytes]:
    from PIL import Image

    found = _jpegs()
    for kind in ("PNG", "BMP", "WEBP", "PPM"):
        stream = io.BytesIO()
        Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(stream, kind)
        found.append(stream.getvalue())
    return [*found, b"P2\n# grey\n3 2\n9\n0 1 2\n7 8 9\n", b"P5 2 1 4095\n\x0f\xff\0\0"]


def _table(data: bytes) -> None:
    for record in sources.open_source(_file("a.parquet", data)).records():
        assert isinstance(record.data, bytes)


def _tables() -> list[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = []
    for options in ({}, {"compression": "none"}, {"use_dictionary": False, "write_page_checksum": True}):
        stream = io.BytesIO()
        pq.write_table(pa.table({"image": [b"abc", b"d"], "label": [0, 1]}), stream, **options)
        found.append(stream.getvalue())
    return found


def _stream(data: bytes) -> None:
    content = table_files.open_streams([_file("a.arrow", data)])
    assert content.size == sum(1 for _ in content.read(list(content.columns)))


def _streams() -> list[bytes]:
    import pyarrow as pa

    table = pa.table({"image": [b"abc", b"d"], "label": [0, 1]})
    found = []
    for options in (None, pa.ipc.IpcWriteOptions(compression="zstd")):
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        found.append(sink.getvalue())
    return found


READERS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]]]] = {
    "recordio": (
        _recordio,
        lambda: [
            _records(_picture(0, b"abcd"), _picture(1, b"x")),
            _records(_two(2, 3), _picture(0, b"ab"), _two(1, 2)),
        ],
    ),
    "bin": (_bin, _pickles),
    "nifti": (_nifti, _volumes),
    "plain_jpeg": (_jpeg, _jpegs),
    "decode": (_decode, _pictures),
    "parquet": (_table, _tables),
    "arrow": (_stream, _streams),
}  # fmt: skip
