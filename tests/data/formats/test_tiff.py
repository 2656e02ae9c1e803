"""TIFF: what scanners, cameras and microscopes write; everything else is refused in words."""

import io
import struct
import zlib

import numpy as np
import pytest
from decompression_bombs import grey, tiff
from PIL import Image

from trainkit.data.formats import image_decode
from trainkit.errors import UserError

RGB = np.random.default_rng(0).integers(0, 256, (37, 51, 3), dtype=np.uint8)
DEEP = np.random.default_rng(1).integers(0, 1 << 16, (37, 51), dtype=np.uint16)


def saved(image: Image.Image, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "TIFF", **options)
    return stream.getvalue()


def written(
    values: np.ndarray, bits: int, photometric: int = 1, order: str = "<", planar: bool = False, tile: int = 0
) -> bytes:
    """A TIFF file written by hand, of forms that Pillow does not write. `values`: (height, width, channels)."""
    height, width, channels = values.shape
    planes = np.moveaxis(values, 2, 0)[..., None] if planar else values[None]
    pieces = []
    for plane in planes:
        if tile:
            full = np.zeros((-(-height // tile) * tile, -(-width // tile) * tile, plane.shape[2]), values.dtype)
            full[:height, :width] = plane
            for y in range(0, full.shape[0], tile):
                pieces += [packed(full[y : y + tile, x : x + tile], bits, order) for x in range(0, full.shape[1], tile)]
        else:
            pieces.append(packed(plane, bits, order))
    entries = {256: [width], 257: [height], 258: [bits] * channels, 259: [1], 262: [photometric], 277: [channels]}
    entries |= {284: [2 if planar else 1], 339: [1] * channels}
    places = 8 + np.cumsum([0, *map(len, pieces)])
    if tile:
        entries |= {322: [tile], 323: [tile], 324: places[:-1].tolist(), 325: [len(piece) for piece in pieces]}
    else:
        entries |= {273: places[:-1].tolist(), 278: [height], 279: [len(piece) for piece in pieces]}
    extra, rows, at = b"", b"", int(places[-1]) + 2 + 12 * len(entries) + 4
    for tag, numbers in sorted(entries.items()):
        text = struct.pack(f"{order}{len(numbers)}I", *numbers)
        if len(text) > 4:
            text, extra = struct.pack(order + "I", at + len(extra)), extra + text
        rows += struct.pack(order + "HHI", tag, 4, len(numbers)) + text
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", int(places[-1]))
    return head + b"".join(pieces) + struct.pack(order + "H", len(entries)) + rows + bytes(4) + extra


def packed(values: np.ndarray, bits: int, order: str) -> bytes:
    if bits == 16:
        return values.astype(order + "u2").tobytes()
    rows = values.reshape(len(values), -1).tolist()
    lines = ("".join(format(value, f"0{bits}b") for value in row) for row in rows)
    return b"".join(
        bytes(int(line.ljust(-(-len(line) // 8) * 8, "0")[i : i + 8], 2) for i in range(0, len(line), 8))
        for line in lines
    )


@pytest.mark.parametrize("compression", [None, "tiff_lzw", "tiff_deflate", "tiff_adobe_deflate", "packbits"])
def test_images_of_each_compression_are_read_as_they_were_written(compression):
    how = {"compression": compression} if compression else {}
    assert (image_decode.decode(saved(Image.fromarray(RGB), **how), "") == RGB).all()
    assert (image_decode.decode(saved(Image.fromarray(RGB[..., 0]), **how), "") == RGB[..., :1]).all()
    bits = RGB[..., 0] > 128
    assert (image_decode.decode(saved(Image.fromarray(bits), **how), "") == 255 * bits[..., None]).all()
    assert (image_decode.decode(saved(Image.fromarray(DEEP), **how), "") == (DEEP >> 8)[..., None]).all()
    for mode in ("P", "RGBA", "LA"):
        image = Image.fromarray(RGB).convert(mode)
        assert (image_decode.decode(saved(image, **how), "") == np.asarray(image.convert("RGB"))).all(), mode


@pytest.mark.parametrize(
    ("bits", "order", "photometric"),
    [(b, o, p) for b in (1, 2, 4, 8) for o in "<>" for p in (0, 1)] + [(16, "<", 1), (16, ">", 1)],
)
def test_grey_reaches_from_black_to_white_in_both_orders_of_bytes(bits, photometric, order):
    top = (1 << bits) - 1
    values = np.random.default_rng(bits).integers(0, top + 1, (7, 10, 1))
    values[0, 0], values[0, 1] = 0, top
    decoded = image_decode.decode(written(values, bits, photometric, order), "")
    expected = (top - values if photometric == 0 else values) * 255 / top
    assert decoded.shape == (7, 10, 3) and np.abs(decoded - expected).max() <= 1
    assert {decoded[0, 0, 0], decoded[0, 1, 0]} == {0, 255}


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("planar", [False, True])
@pytest.mark.parametrize("tile", [0, 16])
@pytest.mark.parametrize("bits", [8, 16])
def test_colours_in_planes_and_in_tiles(bits, tile, planar, order):
    values = np.random.default_rng(bits).integers(0, 1 << bits, (20, 37, 3))
    data = written(values, bits, 2, order, planar, tile)
    if bits == 16 and planar:
        with pytest.raises(UserError, match="colours of 16 bits in planes"):
            image_decode.decode(data, "scan.tif")
    else:
        assert (image_decode.decode(data, "") == values >> (bits - 8)).all()


@pytest.mark.parametrize("turn", range(1, 10))
def test_its_orientation_is_applied_once_and_known_from_the_header(turn, tmp_path):
    data = saved(Image.fromarray(RGB), tiffinfo={274: turn})
    image = Image.fromarray(RGB)
    image.getexif()[274] = turn
    from PIL import ImageOps

    expected = np.asarray(ImageOps.exif_transpose(image))
    decoded = image_decode.decode(data, "")
    assert (decoded == expected).all()
    (tmp_path / "a.tif").write_bytes(data)
    for file in (data, tmp_path / "a.tif"):
        assert image_decode.header(file, "a") == (decoded.shape[:2], turn if turn < 9 else 1)


REFUSED = {
    "JPEG in it": (saved(Image.fromarray(RGB), compression="jpeg"), "compression 7"),
    "several pages": (
        saved(Image.fromarray(RGB), save_all=True, append_images=[Image.fromarray(RGB)]),
        "several pages; expected a single frame",
    ),
    "numbers with a point": (saved(Image.fromarray(np.zeros((4, 4), np.float32))), "1 channels of 32 bits"),
    "CMYK": (saved(Image.fromarray(RGB).convert("CMYK")), "colours 5"),
    "signed": (tiff(*grey(4, 4, 16, (339, 4, 1, 2)), pixels=bytes(16)), "values with a sign"),
    "no width": (tiff(*(e for e in grey(4, 4, 16) if e[0] != 256), pixels=bytes(16)), "cannot be decoded"),
    "a text for a width": (tiff(*grey(4, 4, 16, (256, 2, 1, 4)), pixels=bytes(16)), "Invalid dimensions"),
    "no pixels": (tiff(*grey(0, 4, 16), pixels=bytes(16)), "cannot be decoded"),
    "no strips": (tiff(*(e for e in grey(4, 4, 16) if e[0] != 273), pixels=bytes(16)), "cannot be decoded"),
    "strips out of it": (tiff(*grey(4, 4, 16, (273, 4, 1, 9_999)), pixels=bytes(16)), "truncated"),
    "reversed bits": (tiff(*grey(4, 4, 16, (266, 3, 1, 2)), pixels=bytes(16)), "bits in the order 2"),
    "colours out of it": (
        tiff(*grey(4, 4, 16, (320, 3, 768, 9_999)), pixels=bytes(16)),
        "tags of 1572 bytes in 150",
    ),
    "few pixels": (tiff(*grey(64, 64, 16), pixels=bytes(16)), "cannot be decoded"),
    "many tags": (tiff(*((400 + n, 4, 1, 0) for n in range(600))), "600 tags; expected 1 to 512"),
    "no directory": (b"II*\0\xff\xff\xff\x7f", "directory beyond its end"),
    "nothing": (b"II*\0", "directory beyond its end"),
    "a tag of 4 GB": (tiff(*grey(4, 4, 16, (273, 4, 0xFFFFFFFF, 8)), pixels=bytes(16)), "values of type 4"),
    "BigTIFF": (b"II+\0\x08\0\0\0" + bytes(100), "cannot be decoded"),
    **{
        f"{bits} bits of which {white} is black, {order}": (
            written(np.zeros((4, 4, 1), int), bits, white, order),
            "12 bits|cannot be decoded" if order == ">" or bits == 12 else "16 bits of which 0 is white",
        )
        for bits, white, order in ((12, 1, "<"), (12, 1, ">"), (12, 0, "<"), (16, 0, "<"), (16, 0, ">"))
    },
    "packed badly": (
        tiff(*grey(64, 64, 40, (259, 4, 1, 8)), pixels=zlib.compress(bytes(9))[:8] + bytes(32)),
        "cannot be decoded",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_in_words(name):
    data, words = REFUSED[name]
    with pytest.raises(UserError, match=words) as caught:
        image_decode.decode(data, "scan.tif")
    assert str(caught.value).startswith("scan.tif: ")


def test_every_cut_and_many_changes_of_a_file_give_an_image_or_a_refusal():
    whole = saved(Image.fromarray(RGB[:8, :8]), compression="tiff_lzw")
    draw = np.random.default_rng(0)
    ends = set()
    for end in [*range(0, len(whole), 3), *([len(whole)] * 300)]:
        data = bytearray(whole[:end])
        if end == len(whole):
            for place in draw.integers(0, len(data), 3):
                data[place] = draw.integers(0, 256)
        try:
            ends.add(image_decode.decode(bytes(data), "a").ndim)
        except UserError:
            ends.add(0)
    assert ends == {0, 3}
