"""A built-in set of synthetic objects in ten classes, to train a classifier without a download.

A class has two or three kinds, such as a flying and a wading bird; a kind is a list of parts. In an image each part has
a size and a place of its own, some are left out, and images differ in pose, colours, outlines, background, things in
the way, light, blur and noise. Colours say little about the class, classes share their parts (wheels, legs, handles,
boxes), and such parts lie about in all images. What it shows: that the code runs, and that methods order as they should
(pixels below a small network below a larger one). What it does not show: that anything works on photographs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trainkit.data.synthetic import drawing
from trainkit.data.synthetic.drawing import Canvas, box, oval, placement

VERSION = 2
"""Part of the folder's name; raised with any change to what is drawn, so that an old set never passes for a new one."""
SEED = 20251101
SIZE = 32
PICTURES = {"train": 300, "val": 100}
"""Images of each class in the two splits."""

Part = tuple[int, np.ndarray]
_MAIN, _SIDE, _DARK, _LIGHT = range(4)  # what a part is made of


def _fill(of: int, *corners: tuple[float, float]) -> Part:
    return of, np.array(corners)


def _box(of: int, left: float, top: float, right: float, bottom: float) -> Part:
    return of, box(left, top, right, bottom)


def _oval(of: int, x: float, y: float, rx: float, ry: float) -> Part:
    return of, oval(x, y, rx, ry, n=16)


def _legs(of: int, top: float, *at: float) -> list[Part]:
    return [_box(of, x - 0.07, top, x + 0.07, 0.95) for x in at]


def _wheels(*at: float) -> list[Part]:
    return [_oval(of, x, 0.5, r, r) for x in at for of, r in ((_DARK, 0.2), (_LIGHT, 0.09))]


def _handle(x: float, wide: float, top: float, bottom: float) -> Part:
    arch = np.array([(0, 0), (0.7, 0), (1, 0.3), (1, 0.7), (0.7, 1), (0, 1)])
    inner = arch[::-1] * (0.75, 0.5) + (0, 0.25)
    return _MAIN, np.concatenate([arch, inner]) * (wide, bottom - top) + (x, top)


_HULL = _fill(_MAIN, (-1, 0.3), (1, 0.3), (0.75, 0.8), (-0.75, 0.8))
_CAB = [_fill(_MAIN, (0.42, -0.35), (0.8, -0.35), (1, 0), (1, 0.4), (0.42, 0.4)),
        _fill(_LIGHT, (0.52, -0.25), (0.78, -0.25), (0.9, 0), (0.52, 0)), _box(_DARK, -1, 0.35, 1, 0.46)]  # fmt: skip
_SPOUT = _fill(_MAIN, (0.3, 0.45), (0.25, 0.1), (0.75, -0.35), (1, -0.4), (0.95, -0.15), (0.6, 0.5))

# Parts from back to front; x right, y down, an object fills -1..1.
_KINDS: list[tuple[str, list[Part]]] = [
    ("bird", [_fill(_SIDE, (-0.5, 0.1), (-1, -0.1), (-1, 0.35)), _oval(_MAIN, 0, 0.1, 0.6, 0.22),
              _oval(_MAIN, 0.6, 0, 0.2, 0.18), _fill(_DARK, (0.75, -0.08), (1, 0.02), (0.75, 0.1)),
              _fill(_SIDE, (0.25, 0.05), (-0.3, 0.1), (-0.6, -0.85), (-0.25, -0.75))]),
    ("bird", [*_legs(_DARK, 0.1, -0.2, 0.1), _fill(_SIDE, (-0.5, -0.05), (-1, 0.15), (-0.5, 0.2)),
              _oval(_MAIN, -0.15, 0, 0.55, 0.28), _fill(_MAIN, (0.15, 0), (0.35, -0.75), (0.5, -0.7), (0.35, 0.1)),
              _oval(_MAIN, 0.45, -0.75, 0.2, 0.16), _fill(_DARK, (0.58, -0.85), (1, -0.7), (0.58, -0.66))]),
    ("boat", [_box(_DARK, -0.04, -1, 0.04, 0.4), _fill(_SIDE, (0.08, -0.95), (0.08, 0.2), (0.75, 0.2)),
              _fill(_SIDE, (-0.08, -0.75), (-0.08, 0.2), (-0.65, 0.2)), _HULL]),
    ("boat", [_box(_DARK, -0.2, -0.7, 0.05, -0.1), _box(_SIDE, -0.55, -0.15, 0.45, 0.35),
              _box(_LIGHT, -0.35, -0.05, 0.25, 0.15), _HULL]),
    ("car", [_fill(_MAIN, (-0.55, 0), (-0.3, -0.5), (0.35, -0.5), (0.65, 0)),
             _fill(_LIGHT, (-0.4, -0.02), (-0.22, -0.38), (0.28, -0.38), (0.5, -0.02)),
             _fill(_MAIN, (-1, 0.45), (-1, 0.05), (0.6, -0.05), (1, 0.12), (1, 0.45)), *_wheels(-0.55, 0.55)]),
    ("car", [_box(_DARK, -0.75, 0.4, -0.45, 0.85), _box(_DARK, 0.45, 0.4, 0.75, 0.85),
             _box(_MAIN, -0.88, -0.1, 0.88, 0.6), _fill(_MAIN, (-0.75, -0.1), (-0.5, -0.7), (0.5, -0.7), (0.75, -0.1)),
             _fill(_LIGHT, (-0.6, -0.1), (-0.4, -0.58), (0.4, -0.58), (0.6, -0.1)),
             _oval(_LIGHT, -0.65, 0.2, 0.16, 0.14), _oval(_LIGHT, 0.65, 0.2, 0.16, 0.14)]),
    ("chair", [_fill(_SIDE, (-0.65, -0.95), (-0.5, -0.95), (-0.4, 0.2), (-0.55, 0.2)),
               *_legs(_SIDE, 0.15, -0.48, 0.5), _box(_MAIN, -0.6, 0.05, 0.62, 0.22)]),
    ("chair", [*_legs(_SIDE, -0.9, -0.5, 0.3), *_legs(_SIDE, 0.3, -0.15, 0.6), _box(_MAIN, -0.5, -0.9, 0.3, -0.35),
               _fill(_MAIN, (-0.57, 0.1), (0.37, 0.1), (0.7, 0.4), (-0.25, 0.4))]),
    ("fish", [_fill(_SIDE, (-0.4, 0), (-1, -0.45), (-0.85, 0), (-1, 0.45)), _oval(_MAIN, 0.2, 0, 0.7, 0.38),
              _fill(_SIDE, (-0.2, -0.25), (-0.1, -0.7), (0.5, -0.25)), _oval(_LIGHT, 0.62, -0.1, 0.1, 0.1)]),
    ("fish", [_fill(_SIDE, (-0.55, 0), (-1, -0.3), (-1, 0.35)),
              _fill(_SIDE, (-0.1, -0.1), (-0.2, -0.5), (0.25, -0.15)),
              _fill(_MAIN, (-0.75, 0), (0, -0.22), (0.6, -0.17), (1, 0), (0.6, 0.17), (0, 0.22))]),
    ("house", [_box(_MAIN, -0.7, -0.15, 0.7, 0.9), _fill(_SIDE, (-0.9, -0.15), (0, -0.9), (0.9, -0.15)),
               _box(_DARK, -0.1, 0.4, 0.2, 0.9), _box(_LIGHT, -0.5, 0.1, -0.25, 0.4),
               _box(_LIGHT, 0.35, 0.1, 0.6, 0.4)]),
    ("house", [_box(_DARK, 0.2, -0.85, 0.45, -0.3), _box(_MAIN, -0.9, 0, 0.9, 0.8), _box(_DARK, -0.5, 0.3, -0.2, 0.8),
               _fill(_SIDE, (-1, 0), (-0.7, -0.55), (0.7, -0.55), (1, 0)), _box(_LIGHT, 0.15, 0.25, 0.6, 0.5)]),
    ("mug", [_handle(0.35, 0.5, -0.4, 0.45), _fill(_MAIN, (-0.6, -0.7), (0.4, -0.7), (0.35, 0.75), (-0.55, 0.75)),
             _oval(_SIDE, -0.1, -0.7, 0.5, 0.14), _oval(_DARK, -0.1, -0.68, 0.4, 0.08)]),
    ("mug", [_oval(_SIDE, -0.1, 0.6, 0.9, 0.16), _handle(0.4, 0.45, -0.25, 0.3),
             _fill(_MAIN, (-0.75, -0.4), (0.55, -0.4), (0.25, 0.55), (-0.45, 0.55)),
             _oval(_SIDE, -0.1, -0.4, 0.65, 0.13)]),
    ("table", [*_legs(_SIDE, -0.2, -0.8, 0.8), _box(_MAIN, -1, -0.35, 1, -0.15)]),
    ("table", [_box(_SIDE, -0.1, -0.2, 0.1, 0.85), _fill(_SIDE, (-0.4, 0.95), (0, 0.65), (0.4, 0.95)),
               _oval(_MAIN, 0, -0.25, 0.9, 0.2)]),
    ("table", [*_legs(_SIDE, -0.1, -0.8, 0.45), *_legs(_SIDE, 0.2, -0.5, 0.75),
               _fill(_MAIN, (-0.9, -0.25), (0.55, -0.25), (0.9, 0.15), (-0.6, 0.15))]),
    ("teapot", [_SPOUT, _handle(-0.4, -0.55, -0.2, 0.5), _oval(_MAIN, 0, 0.22, 0.62, 0.5),
                _oval(_SIDE, 0, -0.28, 0.36, 0.12), _oval(_DARK, 0, -0.45, 0.1, 0.1)]),
    ("teapot", [_SPOUT, _handle(-0.4, -0.55, -0.3, 0.5),
                _fill(_MAIN, (-0.35, -0.4), (0.35, -0.4), (0.6, 0.75), (-0.6, 0.75)),
                _oval(_SIDE, 0, -0.4, 0.36, 0.1), _oval(_DARK, 0, -0.55, 0.1, 0.1)]),
    ("truck", [_box(_SIDE, -1, -0.65, 0.35, 0.4), *_CAB, *_wheels(-0.65, -0.2, 0.7)]),
    ("truck", [_oval(_LIGHT, -0.3, 0, 0.5, 0.3), _fill(_SIDE, (-1, -0.05), (0.35, 0.05), (0.35, 0.4), (-0.9, 0.4)),
               *_CAB, *_wheels(-0.6, 0.65)]),
]  # fmt: skip
CLASSES = tuple(sorted({kind for kind, _ in _KINDS}))
"""The names of the classes; some share parts in twos: car and truck, chair and table, mug and teapot."""
_EVERY = [corners for _, parts in _KINDS for _, corners in parts]


def folder() -> Path:
    """Return the sample set as a folder of classes, by `drawn_once` (about 6 s on one core, 16 MB).

    Holds `train/<class>/<n>.png`, `val/<class>/<n>.png` and `sample.json`. Images are RGB, 32 x 32 pixels.
    """
    return drawing.drawn_once(f"objects-v{VERSION}-{SIZE}", _write)


def _write(to: Path) -> None:
    for split, pictures in PICTURES.items():
        for kind in CLASSES:
            for number in range(pictures):
                drawing.save(draw(kind, number, split), to / split / kind / f"{number:03d}.png")
    what = "synthetic objects generated by trainkit.data.synthetic.objects; for tests of the code only"
    counts = {split: len(CLASSES) * pictures for split, pictures in PICTURES.items()}
    drawing.write_about(to, what, VERSION, SEED, image_size=SIZE, classes=CLASSES, **counts)


def draw(kind: str, number: int, split: str = "train") -> np.ndarray:
    """Image `number` of class `kind` in `split` ("train" or "val"): uint8, (32, 32, 3), RGB."""
    rng = drawing.generator(SEED, ("train", "val").index(split), CLASSES.index(kind), number)
    dark, manner = float(rng.uniform()) < 0.2, float(rng.uniform())
    near, far, edges = ((120, 235), (10, 110), (200, 250)) if dark else ((25, 130), (140, 245), (5, 50))
    canvas = drawing.gradient(_colours(rng, 4, *far).reshape(2, 2, 3), SIZE, SIZE)
    _scraps(rng, canvas, 6)
    place = placement(rng, turn=0.15, scale=(0.65, 0.95), shift=(0.2, 0.2), squeeze=(0.8, 1.15), shear=0.2)
    colours = _colours(rng, 4, *near)
    colours[_DARK], colours[_LIGHT] = _colours(rng, 1, 15, 80), _colours(rng, 1, 160, 245)
    if manner < 0.15:  # a line drawing: what is between the lines has one colour, any
        colours[:] = _colours(rng, 1)
    edge, width = _colours(rng, 1, *edges)[0], float(rng.uniform(0.02, 0.06))
    kinds = [parts for name, parts in _KINDS if name == kind]
    for of, corners in kinds[int(rng.integers(len(kinds)))]:
        if of != _MAIN and float(rng.uniform()) < 0.1:
            continue
        middle = corners.mean(0)
        at = place((corners - middle) * rng.uniform(0.75, 1.25, 2) + middle + rng.uniform(-0.08, 0.08, 2))
        canvas.fill(at, colours[of])
        if manner < 0.4:
            canvas.line(at, edge, width, closed=True)
    _scraps(rng, canvas, 3)
    return drawing.photograph(rng, canvas.image, blur=(-0.8, 0.7), light=0.35)


def _colours(rng: np.random.Generator, n: int, low: float = 15, high: float = 240) -> np.ndarray:
    """Draw n colours between grey and strong whose mean over the channels is in low..high: float64, (n, 3)."""
    strong = rng.uniform(-70, 70, (n, 3))
    return rng.uniform(low, high, (n, 1)) + strong - strong.mean(1, keepdims=True)


def _scraps(rng: np.random.Generator, canvas: Canvas, most: int) -> None:
    """Lay parts of any object anywhere, small and turned, fewer than `most`."""
    for colour in _colours(rng, int(rng.integers(most))):
        corners = _EVERY[int(rng.integers(len(_EVERY)))]
        canvas.fill(placement(rng, turn=3, scale=(0.2, 0.6), shift=(0.9, 0.9))(corners - corners.mean(0)), colour)
