"""Masks as they are in files of every kind, and sizes of images: what is read, and what is said about damage."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
import scene_sets
from PIL import Image

from trainkit.data.formats import image_decode
from trainkit.data.scenes.files import Scene, header, read_mask
from trainkit.data.scenes.label_maps import from_palette
from trainkit.errors import UserError


def png(width: int, height: int, bits: int, kind: int, rows: list[bytes], *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG file of packed rows, written by hand: PIL writes no grey of 2 and 4 bits."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows)))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunk(*c) for c in chunks) + body + chunk(b"IEND", b"")


@pytest.fixture(scope="module")
def scene_of(tmp_path_factory):
    """Write a file, and return the scene whose image and mask it is."""
    file = tmp_path_factory.mktemp("files") / "a.png"

    def scene_of(data: bytes) -> Scene:
        file.write_bytes(data)
        return Scene("a", file, file, "a.txt, line 1")

    return scene_of


@pytest.fixture(scope="module")
def mask_of(scene_of):
    return lambda data, coloured=False: read_mask(scene_of(data), coloured)


def test_values_are_those_in_the_file_whatever_its_bits(mask_of):
    palette = (b"PLTE", bytes(range(100, 148)))
    assert mask_of(png(4, 1, 8, 0, [bytes([0, 1, 11, 255])])).tolist() == [[0, 1, 11, 255]]
    assert mask_of(png(4, 2, 4, 0, [b"\x01\x2f", b"\x34\x56"])).tolist() == [[0, 1, 2, 15], [3, 4, 5, 6]]
    assert mask_of(png(4, 1, 2, 0, [bytes([0b00011011])])).tolist() == [[0, 1, 2, 3]]
    assert mask_of(png(4, 1, 1, 0, [bytes([0b01010000])])).tolist() == [[0, 1, 0, 1]]
    # By a table of colours they are those that are seen.
    assert mask_of(png(4, 1, 1, 0, [bytes([0b01010000])]), True).tolist() == [[0, 255, 0, 255]]
    assert mask_of(png(4, 1, 2, 0, [bytes([0b00011011])]), True).tolist() == [[0, 85, 170, 255]]
    assert mask_of(png(4, 1, 4, 3, [b"\x01\x2f"], palette)).tolist() == [[0, 1, 2, 15]]
    assert mask_of(png(4, 1, 2, 3, [bytes([0b00011011])], palette)).tolist() == [[0, 1, 2, 3]]
    wide = mask_of(png(3, 1, 16, 0, [struct.pack(">3H", 7, 300, 65535)]))
    assert wide.dtype == np.uint16 and wide.tolist() == [[7, 300, 65535]]
    # Grey with alpha, and colours with alpha.
    assert mask_of(png(2, 1, 8, 4, [bytes([3, 0, 200, 255])])).tolist() == [[3, 200]]
    assert mask_of(png(1, 1, 8, 6, [bytes([3, 4, 5, 0])])).tolist() == [[[3, 4, 5]]]
    assert mask_of(scene_sets.encoded(np.array([[1, 9]], np.uint8), "BMP")).tolist() == [[1, 9]]


def test_a_palette_png_is_its_indices_or_its_colours(mask_of, scene_of):
    palette = (b"PLTE", bytes([0, 0, 0, 10, 20, 30, 128, 64, 128]))
    data = png(3, 1, 8, 3, [bytes([0, 2, 1])], palette)
    assert mask_of(data).tolist() == [[0, 2, 1]]
    assert mask_of(data, coloured=True).tolist() == [[[0, 0, 0], [128, 64, 128], [10, 20, 30]]]
    # Indices are no colours: index 0 must not become black, but what the palette makes of it.
    labels = from_palette({"a": (10, 20, 30), "b": (128, 64, 128)}, [(0, 0, 0)])
    assert scene_sets.classes_of(scene_of(data), labels).tolist() == [[255, 1, 0]]
    grey = png(2, 1, 8, 0, [bytes([0, 255])])
    binary = from_palette({"nothing": (0, 0, 0), "thing": (255, 255, 255)})
    assert scene_sets.classes_of(scene_of(grey), binary).tolist() == [[0, 1]]
    with pytest.raises(UserError, match="index 9 of a palette of 3"):
        mask_of(png(1, 1, 8, 3, [bytes([9])], palette), coloured=True)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "0 bytes"),
        (b"GIF89a" + b"\0" * 40, "not an image of these formats"),
        (scene_sets.encoded(scene_sets.scene()[0], "JPEG"), "a JPEG file.*save the masks again, as PNG"),
        (scene_sets.encoded(scene_sets.scene()[0], "WEBP"), "a WEBP file"),
        (scene_sets.encoded(scene_sets.scene()[1])[:-40], "cannot be decoded"),
        (png(1, 1, 16, 2, [bytes(6)]), "16 bits a channel"),
        (png(1, 1, 16, 4, [bytes(4)]), "16 bits a channel"),
        (png(8_000, 8_000, 8, 0, []), "8000 x 8000 pixels"),
    ],
    ids=["empty", "gif", "jpeg", "webp", "cut", "rgb16", "la16", "large"],
)
def test_files_that_are_no_masks(mask_of, data, said):
    with pytest.raises(UserError, match=said) as raised:
        mask_of(data)
    assert raised.value.where.endswith("a.png")


def test_animated_pictures_are_no_masks(mask_of):
    stream = io.BytesIO()
    frames = [Image.fromarray(scene_sets.scene(n)[1]) for n in range(2)]
    frames[0].save(stream, "PNG", save_all=True, append_images=frames[1:])
    with pytest.raises(UserError, match="animated"):
        mask_of(stream.getvalue())


def test_a_mask_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"gone.png: cannot be read \(No such file"):
        read_mask(Scene("a", tmp_path / "a.jpg", tmp_path / "gone.png", "a.txt, line 1"))
    with pytest.raises(UserError, match=r"a.txt, line 1: cannot be read \(No such file"):
        header(Scene("a", tmp_path / "gone.jpg", None, "a.txt, line 1"))[0]


def test_damage_of_any_kind_is_said_or_harmless(mask_of, scene_of):
    rng = np.random.default_rng(0)
    good = [
        scene_sets.encoded(scene_sets.scene()[1]),
        scene_sets.encoded(scene_sets.scene()[1], palette=[(n, n, n) for n in range(256)]),
    ]
    for trial in range(120):
        data = bytearray(good[trial % 2])
        for _ in range(1 + trial % 4):
            data[rng.integers(len(data))] = rng.integers(256)
        data = data[: rng.integers(1, len(data))] if trial % 3 == 0 else data
        for coloured in (False, True):
            try:
                found = mask_of(bytes(data), coloured)
            except UserError as error:
                assert "a.png: " in str(error)
            else:
                assert found.dtype in (np.uint8, np.uint16) and found.ndim in (2, 3)
        try:
            assert len(header(scene_of(bytes(data)))[0]) == 2
        except UserError as error:
            assert "a.txt, line 1" in str(error)


def test_shapes_are_those_after_turning(scene_of):
    for orientation in (1, 3, 6, 8):
        stream = io.BytesIO()
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.fromarray(scene_sets.scene()[0]).save(stream, "JPEG", exif=exif)
        assert header(scene_of(stream.getvalue()))[0] == image_decode.decode(stream.getvalue(), "a").shape[:2]
