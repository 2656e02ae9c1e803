"""PGM and PPM (Netpbm P2, P3, P5, P6) of 8 and 16 bits, to uint8. Pillow reads most of these a sample at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from trainkit.errors import UserError

_SPACE = rb"(?:\s|#[^\r\n]*[\r\n])+"
_HEADER = re.compile(rb"P([2356])" + _SPACE + rb"(\d{1,9})" + _SPACE + rb"(\d{1,9})" + _SPACE + rb"(\d{1,5})\s")
_HEAD = 1 << 16
"""Bytes in which a header ends, comments included."""


@dataclass(frozen=True)
class Header:
    """Header of a file: the form of its samples."""

    plain: bool
    """Samples are numbers in text."""
    shape: tuple[int, int, int]
    """Height, width, and 1 or 3 channels."""
    top: int
    """The value that is white, 1 to 65535."""
    begin: int
    """Where samples begin, in bytes."""


def is_pnm(data: bytes) -> bool:
    """Return True for data that begins as a PGM or PPM file does."""
    return data[:1] == b"P" and data[1:2] in (b"2", b"3", b"5", b"6") and (data[2:3].isspace() or data[2:3] == b"#")


def header(data: bytes, where: str) -> Header:
    """Read the header from the first 64 KiB of a file or more. Raises UserError where it is damaged."""
    found = _HEADER.match(data[:_HEAD])
    if found is None:
        raise UserError(where, "a damaged header of a PGM or PPM file", "P2, P3, P5 or P6, width, height, maximum")
    kind, width, height, top = map(int, found.groups())
    if not 1 <= top <= 65535:
        raise UserError(where, f"a PGM or PPM file with the largest value {top}", "1 to 65535")
    return Header(kind in (2, 3), (height, width, 3 if kind in (3, 6) else 1), top, found.end())


def decode(data: bytes, where: str, most: int) -> np.ndarray:
    """Decode a file of up to `most` pixels to uint8 (height, width, 1 or 3).

    The header names the value that becomes 255; of full 16 bits the upper byte is kept, as of other formats. Of several
    images in a file the first is read. Raises UserError naming `where` for anything damaged or too large.
    """
    head = header(data, where)
    height, width, channels = head.shape
    if not 1 <= height * width <= most:
        raise UserError(where, f"{width} x {height} pixels", f"1 to {most} pixels")
    count, bytes_each = height * width * channels, 1 if head.top < 256 else 2
    # A sample takes at least one digit and a space; so no memory is asked for that the file does not pay for.
    if len(data) - head.begin < (2 * count - 1 if head.plain else count * bytes_each):
        raise UserError(where, "fewer samples than its header says", f"{count}, for {width} x {height} pixels")
    if head.plain:
        values = _numbers(data[head.begin :], count, where)
    else:
        values = np.frombuffer(data, np.uint8 if bytes_each == 1 else ">u2", count, head.begin)
    if int(values.max()) > head.top or int(values.min()) < 0:
        raise UserError(where, f"a sample above {head.top} or below 0", f"0 to {head.top}, as its header says")
    return levels(head.top)[values].reshape(head.shape)


def levels(top: int) -> np.ndarray:
    """Return the level 0 .. 255 of each value 0 .. `top`, uint8 (top + 1,): nearest to value / top * 255.

    Of full 16 bits it is the upper byte, which is off by one level at most, and what all readers of 16-bit PNG take.
    """
    values = np.arange(top + 1, dtype=np.uint32)
    return (values >> 8 if top == 65535 else (values * 255 + top // 2) // top).astype(np.uint8)


def _numbers(text: bytes, count: int, where: str) -> np.ndarray:
    if b"#" in text:
        text = re.sub(rb"#[^\r\n]*", b"", text)
    if re.search(rb"[^\s\d]", text) is not None:
        raise UserError(where, "letters or signs among samples", "whole numbers")
    # Counted before: numpy fills up with what lay in memory where there are fewer.
    digit = np.frombuffer(text, np.uint8) >= ord("0")
    found = int(np.count_nonzero(digit[1:] & ~digit[:-1])) + int(digit[:1].sum())
    if found < count:
        raise UserError(where, f"{found} samples", f"{count}")
    return np.fromstring(text, np.int64, count, sep=" ")
