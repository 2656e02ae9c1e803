"""InsightFace's verification sets: a pickle of (encoded images, answers).

A pickle is a program. `pickle.Unpickler` runs it here after all its instructions were looked at, and finds no class and
no function by name but stand-ins for the handful of numpy constructors that such files call. A file that asks for
another name, or has an instruction beyond lists, tuples, bytes, numbers and booleans, is refused before any of it runs.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import pickletools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from trainkit.data.record import Record, Source
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Pairs

BYTE_CAP = 2 << 30
"""Largest file, in bytes: the biggest sets of the field (CFP, 7,000 pairs) are below 100 MB."""

_CONTENT = "images and labels only"
_PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}
ALLOWED = _PUTS | {
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE",
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4",
    "NONE", "NEWTRUE", "NEWFALSE", "GET", "BINGET", "LONG_BINGET", "PROTO", "FRAME", "STOP", "MARK", "EMPTY_LIST",
    "EMPTY_TUPLE", "LIST", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "MEMOIZE", "POP", "DUP",
    "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD",
}  # fmt: skip
"""Instructions that are run. Those that make objects of classes, dictionaries or persistent objects are not."""


def read_bin(file: Path) -> tuple[Source, Pairs]:
    """Read a `.bin` of images (bytes or uint8 arrays) 2i and 2i + 1 of each pair i, and answers. Raises UserError."""
    try:
        size = file.stat().st_size
        if size > BYTE_CAP:
            raise UserError(str(file), f"{size} bytes", f"at most {BYTE_CAP}")
        data = file.read_bytes()
    except OSError as error:
        raise UserError(str(file), f"cannot be read ({error.strerror or error})", "an InsightFace .bin") from None
    content = evaluate(data, str(file))
    if not (isinstance(content, tuple | list) and len(content) == 2 and isinstance(content[0], list)):
        raise UserError(str(file), f"a {_kind(content)}", "a pair of lists: images and labels")
    pictures = [_picture(value, f"{file}, image {row}") for row, value in enumerate(content[0])]
    same = _answers(content[1], str(file))
    if len(pictures) != 2 * len(same) or not same:
        raise UserError(str(file), f"{len(pictures)} images and {len(same)} labels", "two images for each label")
    # An image is in many pairs: told apart by content, it is decoded and embedded once. A pickle may also name one
    # image again and again in two bytes each: it is looked at once.
    place: dict[bytes, int] = {}
    seen: dict[int, bytes] = {}
    kept: list[int] = []
    rows = np.empty(len(pictures), np.int64)
    for row, picture in enumerate(pictures):
        key = seen.get(id(picture)) or hashlib.blake2b(picture, digest_size=16).digest()
        seen[id(picture)] = key
        if key not in place:
            place[key] = len(kept)
            kept.append(row)
        rows[row] = place[key]

    def records() -> Iterator[Record]:
        for row in kept:
            yield Record(f"image {row}", -1, bytes(pictures[row]), f"{file}, image {row}")

    source = Source("InsightFace .bin", str(file), len(kept), records, (file,))
    return source, Pairs(rows[::2], rows[1::2], np.asarray(same, bool))


def evaluate(data: bytes, where: str) -> Any:
    """Return the lists, tuples, bytes, numbers and booleans of a pickle, and `_Array` for each array of numpy.

    Raises UserError for anything else, or for damage.
    """
    try:
        _refuse_others(data, where)
        return RestrictedUnpickler(data, where).load()
    except UserError:
        raise
    except Exception as error:  # damage raises a dozen kinds, MemoryError among them
        text = " ".join(str(error).split())[:120] or type(error).__name__
        raise UserError(where, f"damaged ({text})", "an InsightFace .bin") from None


def _refuse_others(data: bytes, where: str) -> None:
    """Go over the whole program before any of it runs. Raises UserError for instructions that are not `ALLOWED`."""
    for count, (instruction, argument, place) in enumerate(pickletools.genops(data), 1):
        if instruction.name not in ALLOWED:
            raise UserError(where, f"instruction {instruction.name} at byte {place}", _CONTENT)
        # Unpickler makes a list as long as the highest place that is named.
        if instruction.name in _PUTS and isinstance(argument, int) and argument > count:
            raise ValueError(f"place {argument} at instruction {count}")


class _DType:
    """Stands for a numpy dtype."""

    def __init__(self, name: str | bytes, *_: object):
        self.name = str(name, "latin-1") if isinstance(name, bytes) else name

    def __setstate__(self, _: object) -> None:
        """Ignore the byte order: one-byte types have none, and no other is taken."""


class _Array:
    """Stands for a numpy array."""

    def __init__(self, data: bytes | bytearray, dtype: _DType, shape: tuple[int, ...]):
        if not (isinstance(data, bytes | bytearray) and isinstance(dtype, _DType) and isinstance(shape, tuple)):
            raise ValueError("an array of unknown type")
        self.data, self.dtype, self.shape = data, dtype.name, shape

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, columns_first, data = state
        if columns_first is True and len(shape) > 1:
            raise ValueError("an array by columns")
        _Array.__init__(self, data, dtype, shape)


def _empty(*_: object) -> _Array:
    return _Array(b"", _DType("u1"), ())


def _from_buffer(data: bytes | bytearray, dtype: _DType, shape: tuple[int, ...], _: object) -> _Array:
    return _Array(data, dtype, shape)


def _scalar(dtype: _DType, data: bytes) -> int:
    if dtype.name not in ("b1", "bool", "u1", "uint8", "i1", "int8") or len(data) != 1:
        raise ValueError(f"a scalar of type {dtype.name}")
    return data[0]


def _nothing(*_: object) -> NoReturn:
    raise ValueError("a call of numpy.ndarray")


_STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _empty,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy", "ndarray"): _nothing,
    ("numpy", "dtype"): lambda *arguments: _DType(*arguments),
}


class RestrictedUnpickler(pickle.Unpickler):
    """Unpickles with stand-ins for everything that is found by name."""

    def __init__(self, data: bytes, where: str):
        super().__init__(io.BytesIO(data), encoding="bytes")  # bytes of Python 2 stay bytes
        self._where = where
        # No text of an honest file is turned into bytes twice, and none has more letters than the file has bytes.
        self._letters = len(data)

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        """Return the stand-in for a name. Raises UserError for a name that has none."""
        if (module, name) == ("_codecs", "encode"):
            return self._encode
        if found := _STAND_INS.get((module.replace("numpy._core", "numpy.core"), name)):
            return found
        raise UserError(self._where, f"asks for {module + '.' + name!r}"[:200], _CONTENT, "do not trust this file")

    def persistent_load(self, _: object) -> NoReturn:
        """Raise UserError."""
        raise UserError(self._where, "a persistent object", _CONTENT, "do not trust this file")

    def _encode(self, text: str, encoding: str) -> bytes:
        if encoding not in ("latin1", "latin-1"):
            raise ValueError("an encoding other than Latin-1")
        self._letters -= len(text)
        if self._letters < 0:
            raise UserError(self._where, "one text encoded to bytes repeatedly", _CONTENT)
        return text.encode("latin-1")


def _picture(value: Any, where: str) -> bytes | bytearray:
    if isinstance(value, bytes | bytearray):
        return value
    if isinstance(value, _Array):
        # OpenCV's encoder gives (bytes, 1).
        size = len(value.data)
        if value.dtype not in ("u1", "uint8") or value.shape not in ((size,), (size, 1), (1, size)):
            raise UserError(where, f"an array {value.dtype} {value.shape}"[:120], "encoded bytes: uint8, one column")
        return value.data
    raise UserError(where, f"a {_kind(value)}", "bytes or an array of bytes")


def _answers(value: Any, where: str) -> list[bool]:
    if isinstance(value, _Array) and value.dtype in ("b1", "bool"):
        value = [bool(byte) for byte in value.data]
    if not isinstance(value, list | tuple):
        raise UserError(where, f"answers in a {_kind(value)}", "a list")
    for row, answer in enumerate(value):
        if not (isinstance(answer, int) and answer in (0, 1)):
            raise UserError(f"{where}, answer {row}", f"a {_kind(answer)}", "true or false")
    return [bool(answer) for answer in value]


def _kind(value: Any) -> str:
    return type(value).__name__.removeprefix("_").lower()
