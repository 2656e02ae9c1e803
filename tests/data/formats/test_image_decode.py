import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from trainkit.data import import_images
from trainkit.data.formats import image_decode
from trainkit.errors import UserError

GREY = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def saved(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def png(samples: np.ndarray, depth: int, colour: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG written by hand, of depths that PIL does not write. `samples`: (height, width, channels)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, channels = samples.shape
    rows = []
    for row in samples.reshape(height, width * channels):
        bits = "".join(format(int(value), f"0{depth}b") for value in row)
        bits += "0" * (-len(bits) % 8)
        rows.append(b"\0" + bytes(int(bits[i : i + 8], 2) for i in range(0, len(bits), 8)))
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = b"".join(chunk(*extra) for extra in chunks) + chunk(b"IDAT", zlib.compress(b"".join(rows)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("channels", "colour"), [(1, 0), (2, 4), (3, 2), (4, 6)], ids=["grey", "grey+alpha", "RGB", "RGBA"]
)
def test_sixteen_bits_are_scaled_and_not_clipped(channels, colour):
    values = np.random.default_rng(1).integers(0, 1 << 16, (5, 6, channels))
    if channels in (2, 4):
        values[..., -1] = 65535
    decoded = image_decode.decode(png(values, 16, colour), "")
    colours = values[..., :3] if channels >= 3 else values[..., :1]
    expected = np.broadcast_to(colours / 65535 * 255, (5, 6, 3))
    assert decoded.dtype == np.uint8 and np.abs(decoded - expected).max() <= 1
    assert decoded.max() > 200 and decoded.min() < 60, "neither white nor black as a whole"


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_grey_of_few_bits_reaches_from_black_to_white(depth):
    top = (1 << depth) - 1
    values = np.random.default_rng(depth).integers(0, top + 1, (7, 9, 1))
    values[0, 0], values[0, 1] = 0, top
    decoded = image_decode.decode(png(values, depth, 0), "")
    assert np.abs(decoded - values * 255 / top).max() < 1
    assert decoded[0, 0].tolist() == [0, 0, 0] and decoded[0, 1].tolist() == [255, 255, 255]


def test_a_palette_gives_its_colours_also_where_they_are_transparent():
    palette = np.asarray([[200, 10, 30], [0, 255, 0], [7, 8, 9], [250, 251, 252]], np.uint8)
    index = np.random.default_rng(0).integers(0, 4, (6, 5, 1))
    for alpha in (b"\0\x80\xff\xff", b"\0"):
        decoded = image_decode.decode(png(index, 2, 3, (b"PLTE", palette.tobytes()), (b"tRNS", alpha)), "")
        assert (decoded == palette[index[..., 0]]).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_is_dropped_and_the_colour_below_it_stays(mode):
    image = Image.fromarray(np.repeat(GREY[..., None], 3, 2)).convert(mode)
    image.putalpha(Image.fromarray(255 - GREY))
    assert (image_decode.decode(saved(image), "") == GREY[..., None]).all()


def test_cmyk_is_taken_to_be_stored_inverted_as_every_writer_does():
    ink = np.zeros((16, 16, 4), np.uint8)
    ink[:, :, 0], ink[:8, :, 3] = 255, 128  # cyan, its upper half darkened by black ink
    data = saved(Image.fromarray(ink, "CMYK"), "JPEG", quality=100, subsampling=0)
    assert b"Adobe" in data, "the marker that says how it is stored"
    decoded = image_decode.decode(data, "").astype(int)
    assert np.abs(decoded[12, 4] - [0, 255, 255]).max() <= 3, "paper without red"
    assert np.abs(decoded[4, 4] - [0, 127, 127]).max() <= 3


def test_a_photograph_with_a_preview_in_its_file_is_a_photograph():
    one, two = Image.fromarray(noise(8, 8)), Image.fromarray(noise(8, 8, 1))
    data = saved(one, "MPO", save_all=True, append_images=[two], quality=100)
    with Image.open(io.BytesIO(data)) as opened:
        assert (opened.format, opened.n_frames) == ("MPO", 2)
    assert (image_decode.decode(data, "") == image_decode.decode(saved(one, "JPEG", quality=100), "")).all()


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_an_animation_is_refused_with_its_file(tmp_path, kind):
    frames = [Image.fromarray(noise(8, 8, seed)) for seed in (0, 1)]
    (tmp_path / "set" / "cat").mkdir(parents=True)
    file = tmp_path / "set" / "cat" / f"7.{kind.lower()}"
    file.write_bytes(saved(frames[0], kind, save_all=True, append_images=frames[1:]))
    with pytest.raises(UserError, match=rf"cat/7\.{kind.lower()}: an animated image"):
        import_images.import_pictures(tmp_path / "set", tmp_path / "out", size=(8, 8), fit="crop")
    assert not (tmp_path / "out").exists()


# Sizes


def resized(pixels: np.ndarray, box: tuple[float, float, float, float], size: tuple[int, int]) -> np.ndarray:
    return np.asarray(Image.fromarray(pixels).resize((size[1], size[0]), Image.Resampling.BICUBIC, box=box))


def test_stretch_resizes_both_sides():
    pixels = noise(13, 40)
    for size in ((32, 64), (6, 11), (13, 20)):
        assert (image_decode.fit(pixels, size, "", "stretch") == resized(pixels, (0, 0, 40, 13), size)).all()


@pytest.mark.parametrize(
    ("shape", "size", "box"),
    [
        ((20, 30), (10, 10), (5, 0, 25, 20)),
        ((30, 20), (10, 10), (0, 5, 20, 25)),
        ((32, 64), (8, 8), (16, 0, 48, 32)),
        ((20, 20), (5, 10), (0, 5, 20, 15)),
        ((9, 12), (18, 12), (3, 0, 9, 9)),
    ],
)
def test_crop_resizes_the_largest_centred_part_of_the_shape(shape, size, box):
    pixels = noise(*shape)
    assert (image_decode.fit(pixels, size, "", "crop") == resized(pixels, box, size)).all()


@pytest.mark.parametrize("shape", [(1, 5000), (5000, 1), (1, 1), (3, 4999), (224, 223)])
def test_thin_and_tiny_pictures_fit_too(shape):
    pixels = np.full((*shape, 3), 77, np.uint8)
    for how in ("crop", "stretch"):
        assert (image_decode.fit(pixels, (224, 224), "", how) == 77).all()
        assert image_decode.fit(pixels, (32, 64), "", how).shape == (32, 64, 3)


def test_faces_are_never_squeezed():
    for how in ("no", "down", "any"):
        with pytest.raises(UserError, match=r"photo: 20 x 10 pixels; expected 8 x 8"):
            image_decode.fit(noise(10, 20), (8, 8), "photo", how)
    with pytest.raises(UserError, match="photo"):
        image_decode.fit(noise(4, 4), (8, 8), "photo", "down")
    assert image_decode.fit(noise(4, 4), (8, 8), "", "any").shape == (8, 8, 3)


def pnm(values: np.ndarray, top: int, plain: bool) -> bytes:
    height, width, channels = values.shape
    kind = {(True, 1): "P2", (True, 3): "P3", (False, 1): "P5", (False, 3): "P6"}[plain, channels]
    head = f"{kind}\n# by a camera\n{width} {height} # wide\n{top}\n".encode()
    if plain:
        return head + " \n".join(map(str, values.ravel().tolist())).encode()
    return head + values.astype(np.uint8 if top < 256 else ">u2").tobytes()


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("top", [1, 15, 255, 256, 1023, 4095, 65535])
def test_the_largest_value_of_the_header_of_pnm_is_white(top, channels, plain):
    values = np.random.default_rng(top).integers(0, top + 1, (5, 7, channels))
    values[0, 0], values[0, 1] = 0, top
    data = pnm(values, top, plain)
    decoded = image_decode.decode(data, "")
    assert decoded.shape == (5, 7, 3) and decoded.dtype == np.uint8
    assert np.abs(decoded - values * 255 / top).max() <= (0.5 if top < 256 else 1)
    assert (decoded[0, 0] == 0).all() and (decoded[0, 1] == 255).all()
    assert image_decode.header(data, "a") == ((5, 7), 1)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"P5\n", "damaged header"),
        (b"P5 2 2 0\n1234", "maxval must be greater than 0"),
        (b"P5 2 2 70000\n1234", "less than 65536"),
        (b"P5 0 2 255\n1234", "cannot be decoded"),
        (b"P5 2 2 255\n123", "cannot be decoded"),
        (b"P5 2 2 65535\n1234567", "cannot be decoded"),
        (b"P2 2 2 255\n1 2 3", "cannot be decoded"),
        (b"P2 2 2 255\n1 2 x 4", "cannot be decoded"),
        (b"P2 2 2 255\n1 2 -3 4", "negative"),
        (b"P2 2 2 255\n1 2 256 4", "too large"),
        (b"P5 99999 99999 255\n1234", "cannot be decoded"),
        (b"P4 8 1\n1", "not an image of these formats"),
        (b"Pf 1 1 -1.0\n1234", "not an image of these formats"),
        (b"P7\nWIDTH 2\n", "not an image of these formats"),
        (b"P5#" + b"a" * 70_000 + b"\n2 2 255\n1234", "damaged header"),
    ],
)  # fmt: skip
def test_a_damaged_pnm_file_is_refused(data, words):
    with pytest.raises(UserError, match=words):
        image_decode.decode(data, "a.pgm")


@pytest.mark.parametrize("data", [b"II*\0" + bytes(40), b"MM\0*" + bytes(40), b"II+\0" + bytes(40)])
def test_a_tiff_file_is_refused_by_name(tmp_path, data):
    (tmp_path / "a.tif").write_bytes(data)
    for read in (
        lambda: image_decode.decode(data, "a.tif"),
        lambda: image_decode.header(tmp_path / "a.tif", "a.tif"),
    ):
        with pytest.raises(UserError, match=r"a\.tif: a TIFF file; expected JPEG, PNG, .*; save it as PNG"):
            read()
