"""HEIC: read through pillow-heif where it is installed, and one message where it is not."""

import io
import sys

import numpy as np
import pytest
from PIL import Image

from trainkit.data.formats import heif, image_decode
from trainkit.errors import UserError

HEAD = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"


@pytest.fixture
def without(monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    monkeypatch.delitem(Image.OPEN, "HEIF", raising=False)


def test_without_pillow_heif_one_message_names_the_extra(without):
    for read in (image_decode.decode, lambda data, where: image_decode.header(data, where)):
        with pytest.raises(UserError, match=r"a\.heic: a HEIC image; .*trainkit\[heic\]"):
            read(HEAD + bytes(100), "a.heic")


@pytest.fixture
def photograph() -> bytes:
    pillow_heif = pytest.importorskip("pillow_heif", reason="pillow-heif is not installed (extra heic)")
    pillow_heif.register_heif_opener()
    stream = io.BytesIO()
    y, x = np.mgrid[:48, :64]
    pixels = np.stack([4 * x, 5 * y, 2 * (x + y)], 2).astype(np.uint8)
    exif = Image.Exif()
    exif[274] = 6
    Image.fromarray(pixels).save(stream, "HEIF", quality=95, exif=exif)
    return stream.getvalue()


def test_a_photograph_is_read_and_is_not_turned_by_its_exif(photograph):
    """By the standard the container says how it is turned, and libheif has done so; EXIF only repeats it."""
    y, x = np.mgrid[:48, :64]
    pixels = np.stack([4 * x, 5 * y, 2 * (x + y)], 2)
    assert heif.is_heif(photograph)
    decoded = image_decode.decode(photograph, "a.heic")
    assert decoded.shape == (48, 64, 3) and np.abs(decoded - pixels).mean() < 3
    assert image_decode.header(photograph, "a")[0] == (48, 64)


def test_damaged_files_are_refused(photograph):
    place = photograph.index(b"ispe") + 8
    large = photograph[:place] + b"\0\1\0\0" * 2 + photograph[place + 8 :]
    for data in (large, photograph[:200], photograph[: len(photograph) // 2], HEAD + bytes(100)):
        with pytest.raises(UserError, match=r"^a\.heic: "):
            image_decode.decode(data, "a.heic")
