"""InsightFace's verification sets: a pickle of (encoded pictures, answers), read without unpickling.

A pickle is a program. This module runs the few instructions that such files consist of (lists, tuples, bytes, numbers,
booleans) on a stack of its own; the handful of numpy constructors they call are recognised by name and become plain
bytes. No other name is looked up, imported or called: a file that asks for one is refused before anything is built.
"""

from __future__ import annotations

import hashlib
import math
import pickletools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.data.record import Record, Source
from trainkit.errors import UserError
from trainkit.evaluation_protocols import Pairs

BYTE_CAP = 2 << 30
"""Largest file, in bytes: the biggest sets of the field (CFP, 7,000 pairs) are below 100 MB."""

_CORES = ("numpy.core", "numpy._core")
_NAMES = {
    **{f"{core}.multiarray _reconstruct": "array" for core in _CORES},
    **{f"{core}.multiarray scalar": "scalar" for core in _CORES},
    **{f"{core}.numeric _frombuffer": "frombuffer" for core in _CORES},
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
    "_codecs encode": "encode",
}
_BYTES = {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"}
_STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING"}
_TEXTS = {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_NUMBERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_PUTS, _GETS = {"PUT", "BINPUT", "LONG_BINPUT"}, {"GET", "BINGET", "LONG_BINGET"}
_OTHERS = {"PROTO", "FRAME", "STOP", "MARK", "EMPTY_LIST", "EMPTY_TUPLE", "LIST", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_OTHERS |= {"APPEND", "APPENDS", "MEMOIZE", "POP", "DUP", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"}
ALLOWED = _BYTES | _STRINGS | _TEXTS | _NUMBERS | set(_CONSTANTS) | _PUTS | _GETS | _OTHERS
"""Instructions that are understood. Those that make classes, dictionaries or persistent objects are not."""


@dataclass(frozen=True)
class _Name:
    kind: str


@dataclass(eq=False)
class _Array:
    """Stands for a numpy array, dtype or scalar that is being put together."""

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    data: bytes = b""


_MARK = object()


def read_bin(file: Path) -> tuple[Source, Pairs]:
    """A `.bin` of pictures (bytes or uint8 arrays) 2i and 2i + 1 of each pair i, and answers."""
    try:
        size = file.stat().st_size
        if size > BYTE_CAP:
            raise UserError(str(file), f"{size} bytes", f"at most {BYTE_CAP}")
        data = file.read_bytes()
    except OSError as error:
        raise UserError(str(file), f"cannot be read ({error.strerror or error})", "an InsightFace .bin") from None
    content = evaluate(data, str(file))
    if not (isinstance(content, tuple | list) and len(content) == 2 and isinstance(content[0], list)):
        raise UserError(str(file), f"a {_kind(content)}", "a pair of lists: pictures and answers")
    pictures = [_picture(value, f"{file}, picture {row}") for row, value in enumerate(content[0])]
    same = _answers(content[1], str(file))
    if len(pictures) != 2 * len(same) or not same:
        raise UserError(str(file), f"{len(pictures)} pictures and {len(same)} answers", "two pictures for each answer")
    # A picture is in many pairs: told apart by content, it is decoded and embedded once. A pickle may also name one
    # picture again and again in two bytes each: it is looked at once.
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
            yield Record(f"picture {row}", -1, pictures[row], f"{file}, picture {row}")

    source = Source("InsightFace .bin", str(file), len(kept), records, (file,))
    return source, Pairs(rows[::2], rows[1::2], np.asarray(same, bool))


def evaluate(data: bytes, where: str) -> Any:
    """The lists, tuples, bytes, numbers and booleans of a pickle. Raises UserError for anything else, or for damage."""
    try:
        _scan(data, where)
        return _run(data, where)
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, EOFError) as error:
        # What damaged pickles do to the disassembler and to the stack.
        text = " ".join(str(error).split())[:120] or type(error).__name__
        raise UserError(where, f"damaged ({text})", "an InsightFace .bin") from None


def _scan(data: bytes, where: str) -> None:
    # The whole program is looked at before any of it is run.
    for instruction, argument, position in pickletools.genops(data):
        if instruction.name not in ALLOWED:
            raise UserError(where, f"instruction {instruction.name} at byte {position}", "pictures and answers only")
        if instruction.name == "GLOBAL":
            _named(argument, where)


def _named(name: str, where: str) -> _Name:
    if name not in _NAMES:
        found = f"asks for {name.replace(' ', '.')!r}"[:200]
        raise UserError(where, found, "pictures and answers only", "do not trust this file")
    return _Name(_NAMES[name])


def _run(data: bytes, where: str) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    # No text of an honest file is turned into bytes twice, and none has more letters than the file has bytes.
    letters = len(data)

    def since_mark() -> list[Any]:
        position = len(stack) - 1
        while stack[position] is not _MARK:
            position -= 1
            if position < 0:
                raise ValueError("no mark")
        taken = stack[position + 1 :]
        del stack[position:]
        return taken

    def pop() -> Any:
        value = stack.pop()
        if value is _MARK:
            raise ValueError("a mark in place of a value")
        return value

    def extend(values: list[Any]) -> None:
        if not isinstance(stack[-1], list):
            raise ValueError("appending to what is no list")
        stack[-1].extend(values)

    for instruction, argument, _ in pickletools.genops(data):
        name = instruction.name
        if name in _BYTES:
            stack.append(bytes(argument))
        elif name in _STRINGS:
            # Python 2 wrote bytes so; the disassembler shows them as Latin-1.
            stack.append(argument.encode("latin-1"))
        elif name in _TEXTS or name in _NUMBERS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name == "LIST":
            stack.append(since_mark())
        elif name == "TUPLE":
            stack.append(tuple(since_mark()))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            taken = [pop() for _ in range(int(name[-1]))]
            stack.append(tuple(reversed(taken)))
        elif name == "APPEND":
            value = pop()
            extend([value])
        elif name == "APPENDS":
            values = since_mark()
            extend(values)
        elif name in _PUTS:
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in _GETS:
            stack.append(memo[argument])
        elif name == "POP":
            stack.pop()
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "GLOBAL":
            stack.append(_named(argument, where))
        elif name == "STACK_GLOBAL":
            attribute, module = pop(), pop()
            if not (isinstance(attribute, str) and isinstance(module, str)):
                raise ValueError("a name that is no text")
            stack.append(_named(f"{module} {attribute}", where))
        elif name == "REDUCE":
            arguments, called = pop(), pop()
            made = _call(called, arguments)
            letters -= len(made) if isinstance(made, bytes) else 0
            if letters < 0:
                raise UserError(where, "one text made into bytes again and again", "pictures and answers only")
            stack.append(made)
        elif name == "BUILD":
            state = pop()
            _set(stack[-1], state)
        elif name == "STOP":
            return pop()
    raise ValueError("no end")


def _call(called: Any, arguments: Any) -> Any:
    if not isinstance(called, _Name) or not isinstance(arguments, tuple):
        raise ValueError("a call of what cannot be called")
    if called.kind == "encode":
        text, encoding = arguments
        if encoding not in ("latin1", "latin-1"):
            raise ValueError("an encoding other than Latin-1")
        return text.encode("latin-1")
    if called.kind == "dtype":
        return _Array("dtype", dtype=_text(arguments[0]))
    if called.kind == "array":
        return _Array("array")
    if called.kind == "scalar":
        dtype, data = arguments
        return _value(dtype.dtype, data)
    if called.kind == "frombuffer":
        data, dtype, shape, _ = arguments
        return _Array("array", dtype.dtype, _shape(shape), _bytes(data))
    raise ValueError(f"a call of {called.kind}")


def _set(target: Any, state: Any) -> None:
    if not isinstance(target, _Array) or not isinstance(state, tuple):
        raise ValueError("state for what has none")
    if target.kind == "dtype":
        # (version, byte order, ...); one-byte types have no order, and no other is taken.
        return
    _, shape, dtype, fortran, data = state
    if not isinstance(dtype, _Array) or dtype.kind != "dtype" or (fortran is True and len(shape) > 1):
        raise ValueError("an array of unknown type")
    target.dtype, target.shape, target.data = dtype.dtype, _shape(shape), _bytes(data)


def _picture(value: Any, where: str) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, _Array) and value.kind == "array":
        # OpenCV's encoder gives (bytes, 1).
        size = len(value.data)
        if value.dtype not in ("u1", "uint8") or size not in value.shape or math.prod(value.shape) != size:
            raise UserError(where, f"an array {value.dtype} {value.shape}"[:120], "encoded bytes: uint8, one column")
        return value.data
    raise UserError(where, f"a {_kind(value)}", "bytes or an array of bytes")


def _answers(value: Any, where: str) -> list[bool]:
    if isinstance(value, _Array) and value.kind == "array" and value.dtype in ("b1", "bool"):
        value = [bool(byte) for byte in value.data]
    if not isinstance(value, list | tuple):
        raise UserError(where, f"answers in a {_kind(value)}", "a list")
    for row, answer in enumerate(value):
        if not (isinstance(answer, int) and answer in (0, 1)):
            raise UserError(f"{where}, answer {row}", f"a {_kind(answer)}", "true or false")
    return [bool(answer) for answer in value]


def _value(dtype: str, data: Any) -> int:
    if dtype in ("b1", "bool", "u1", "uint8", "i1", "int8") and len(_bytes(data)) == 1:
        return _bytes(data)[0]
    raise ValueError(f"a scalar of type {dtype}")


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("no bytes where bytes belong")
    return value


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)[:20]


def _shape(value: Any) -> tuple[int, ...]:
    if not (isinstance(value, tuple) and all(type(side) is int and side >= 0 for side in value)):
        raise ValueError("a shape that is none")
    return value


def _kind(value: Any) -> str:
    return f"{value.kind}" if isinstance(value, _Array | _Name) else type(value).__name__
