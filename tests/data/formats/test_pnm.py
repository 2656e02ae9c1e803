"""PGM and PPM, as text and as bytes."""

import io

import numpy as np
import pytest
from PIL import Image

from trainkit.data.formats import image_decode, pnm
from trainkit.data.scenes.files import Scene, header
from trainkit.errors import UserError


def written(values: np.ndarray, top: int, plain: bool) -> bytes:
    height, width, channels = values.shape
    kind = {(True, 1): "P2", (True, 3): "P3", (False, 1): "P5", (False, 3): "P6"}[plain, channels]
    head = f"{kind}\n# by a camera\n{width} {height} # wide\n{top}\n".encode()
    if plain:
        return head + " \n".join(map(str, values.ravel().tolist())).encode()
    return head + values.astype(np.uint8 if top < 256 else ">u2").tobytes()


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("top", [1, 15, 255, 256, 1023, 4095, 65535])
def test_the_largest_value_of_the_header_is_white(top, channels, plain):
    values = np.random.default_rng(top).integers(0, top + 1, (5, 7, channels))
    values[0, 0], values[0, 1] = 0, top
    data = written(values, top, plain)
    decoded = image_decode.decode(data, "")
    assert decoded.shape == (5, 7, 3) and decoded.dtype == np.uint8
    assert np.abs(decoded - values * 255 / top).max() <= (0.5 if top < 65535 else 1)
    assert (decoded[0, 0] == 0).all() and (decoded[0, 1] == 255).all()
    with Image.open(io.BytesIO(data)) as other:  # which scales grey of more than 8 bits to 16
        theirs = np.asarray(other)
    theirs = theirs >> 8 if theirs.dtype.kind == "i" else theirs
    assert np.abs(decoded - theirs.reshape(5, 7, channels).astype(int)).max() <= 1
    assert header(Scene("a", data, None, "a")) == ((5, 7), 1)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"P5\n", "damaged header"),
        (b"P5 2 2 0\n1234", "largest value 0"),
        (b"P5 2 2 70000\n1234", "largest value 70000"),
        (b"P5 0 2 255\n1234", "0 x 2 pixels"),
        (b"P5 2 2 255\n123", "fewer samples"),
        (b"P5 2 2 65535\n1234567", "fewer samples"),
        (b"P2 2 2 255\n1 2 3", "fewer samples"),
        (b"P2 2 2 255\n1 2 3    ", "3 samples; expected 4"),
        (b"P2 2 2 255\n1 2 x 4", "letters or signs"),
        (b"P2 2 2 255\n1 2 -3 4", "letters or signs"),
        (b"P2 2 2 255\n1 2 256 4", "a sample above 255"),
        (b"P2 2 2 255\n1 2 99999999999999999999 4", "a sample above 255"),
        (b"P5 2 2 1000\n" + b"\xff" * 8, "a sample above 1000"),
        (b"P5 99999 99999 255\n1234", "99999 x 99999 pixels"),
        (b"P4 8 1\n1", "not an image of these formats"),
        (b"P7\nWIDTH 2\n", "not an image of these formats"),
        (b"P5#" + b"a" * 70_000 + b"\n2 2 255\n1234", "damaged header"),
    ],
)  # fmt: skip
def test_damage_and_what_is_no_grey_or_colour_image_is_refused(data, words):
    with pytest.raises(UserError, match=words):
        image_decode.decode(data, "a.pgm")


def test_a_second_image_behind_the_first_is_left():
    assert image_decode.decode(b"P5 2 1 255\n\x01\x02P5 2 1 255\n\x03\x04", "")[..., 0].tolist() == [[1, 2]]
    assert image_decode.decode(b"P2 2 1 255\n1 2 3 4\n", "")[..., 0].tolist() == [[1, 2]]


def test_levels_reach_from_0_to_255_in_order():
    for top in (1, 254, 255, 4095, 65535):
        levels = pnm.levels(top).astype(int)
        assert levels[0] == 0 and levels[-1] == 255 and (np.diff(levels) >= 0).all() and len(levels) == top + 1
